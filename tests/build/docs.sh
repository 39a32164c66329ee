#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# docs.sh ROOT: what README.md and docs/ name exists: functions, constants, files and pages.
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
echo "${#pages[@]} pages"
exit $failed
