#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# docs.sh ROOT: what README.md and docs/ name exists: functions, constants, files and pages. And the other way: what CMake can be
# told, what is read of the environment, and every status are named there.
set -euo pipefail
cd "$1"
failed=0
pages=(README.md docs/*.md)
code=(include lib sharding tests examples CMakeLists.txt CMakePresets.json)

# Names of the interface, and of the insides.
while read -r name; do
    grep -rqwF -- "$name" "${code[@]}" && continue
    echo "named in a page and nowhere else: $name ($(grep -lwF -- "$name" "${pages[@]}" | xargs))"
    failed=1
done < <(grep -ohE '\b(fsdp_[a-z0-9_]*[a-z0-9]|FSDP_[A-Z0-9_]*[A-Z0-9])\b' "${pages[@]}" | sort -u)

# Files by their path, and links from where the page is.
while read -r path; do
    compgen -G "$path" >/dev/null && continue
    echo "no such file: $path"
    failed=1
done < <(grep -ohE '\b(lib|sharding|include|tests|examples|docs)/[A-Za-z0-9_./-]*[A-Za-z0-9_]' "${pages[@]}" | sort -u)
for page in "${pages[@]}"; do
    while read -r link; do
        [ -e "$(dirname "$page")/$link" ] && continue
        echo "$page links to $link, which is not there"
        failed=1
    done < <(grep -oE '\]\([^)#:]+\)' "$page" | sed 's/^](//; s/)$//')
done

# What can be set, and what comes back.
while read -r name; do
    grep -qwF -- "$name" "${pages[@]}" && continue
    echo "named in no page: $name"
    failed=1
done < <(
    find . -path ./build -prune -o \( -name CMakeLists.txt -o -name '*.cmake' \) -exec sed -nE \
        's/^ *(option|find_path|find_library)\(((FSDP|GPT)_[A-Z_]+).*/\2/p; s/^ *set\(((FSDP|GPT)_[A-Z_]+) .*CACHE.*/\1/p' {} +
    grep -rohE 'getenv\("[A-Za-z0-9_]+"' lib examples tests --include='*.c' | grep -oE '[A-Z][A-Za-z0-9_]+'
    grep -ohE '"[A-Z][A-Z0-9]*_[A-Za-z0-9_]+"' lib/launch*.c | tr -d '"'
)
while read -r name; do
    grep -qF -- "\`$name\`" docs/errors.md && continue
    echo "not in docs/errors.md: $name"
    failed=1
done < <(grep -ohE '\bFSDP_ERR_[A-Z_]+' include/fsdp/status.h | sort -u)
echo "${#pages[@]} pages"
exit $failed
