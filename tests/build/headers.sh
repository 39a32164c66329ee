#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# headers.sh ROOT c|c++ COMPILER: each public header compiles alone, and twice, and each of its initialiser macros
# initialises every field of its struct. Skipped (77) without a compiler for the language.
set -euo pipefail
root=$1 language=$2 compiler=$3
command -v "$compiler" >/dev/null || { echo "no $language compiler"; exit 77; }
[ "$language" = c ] && standard=c11 || standard=c++17
failed=0 n=0
for header in "$root"/include/fsdp/*.h; do
    name=fsdp/$(basename "$header")
    # "FSDP_VIEW_INIT fsdp_view", one a line
    inits=$(awk '/^#define FSDP_[A-Z0-9_]+_INIT/ { macro = $2 }
        macro && match($0, /sizeof\([a-z0-9_]+\)/) { print macro, substr($0, RSTART + 7, RLENGTH - 8); macro = "" }' "$header")
    if [ "$(grep -c '^#define FSDP_[A-Z0-9_]*_INIT' "$header")" != "$(grep -c . <<<"$inits")" ]; then
        echo "$name: an initialiser macro does not begin with its struct's sizeof"
        failed=1
    fi
    source=$(printf '#include "%s"\n#include "%s"\n' "$name" "$name"
        while read -r macro type; do
            if [ -n "$macro" ]; then
                printf '%s init_%s(void);\n%s init_%s(void) { %s v = %s; return v; }\n' \
                    "$type" "$type" "$type" "$type" "$type" "$macro"
            fi
        done <<<"$inits"
        printf 'extern int not_empty;\n')
    "$compiler" -x "$language" -std="$standard" -I"$root/include" -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror \
        -fsyntax-only - <<<"$source" || { echo "$name: does not compile alone as $standard"; failed=1; }
    n=$((n + 1))
done
echo "$n headers as $standard"
[ "$n" -gt 0 ] && exit "$failed"
