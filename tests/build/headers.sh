#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# headers.sh ROOT c|c++|cu COMPILER [FOLDER…]: each public header compiles alone, and twice, and each of its initialiser macros
# initialises every field of its struct. Skipped (77) without a compiler for the language. FOLDERs are CUDA's and NCCL's headers;
# without them cuda.h and nccl.h are left out.
set -euo pipefail
root=$1 language=$2 compiler=$3
shift 3
command -v "$compiler" >/dev/null || { echo "no $language compiler"; exit 77; }
system=()
for each; do system+=(-isystem "$each"); done
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

write_source() { # write_source HEADER -> HEADER's name as a file in $folder
    local name inits
    name=fsdp/$(basename "$1")
    # "FSDP_VIEW_INIT fsdp_view", one a line
    inits=$(awk '/^#define FSDP_[A-Z0-9_]+_INIT/ { macro = $2 }
        macro && match($0, /sizeof\([a-z0-9_]+\)/) { print macro, substr($0, RSTART + 7, RLENGTH - 8); macro = "" }' "$1")
    if [ "$(grep -c '^#define FSDP_[A-Z0-9_]*_INIT' "$1")" != "$(grep -c . <<<"$inits")" ]; then
        echo "$name: an initialiser macro does not begin with its struct's sizeof"
        return 1
    fi
    printf '#include "%s"\n#include "%s"\n' "$name" "$name"
    while read -r macro type; do
        if [ -n "$macro" ]; then
            printf '%s init_%s(void);\n%s init_%s(void) { %s v = %s; return v; }\n' \
                "$type" "$type" "$type" "$type" "$type" "$macro"
        fi
    done <<<"$inits"
    printf 'extern int not_empty;\n'
}

case $language in
c) command=("$compiler" -x c -std=c11 -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror -fsyntax-only) ;;
c++) command=("$compiler" -x c++ -std=c++17 -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror -fsyntax-only) ;;
# nvcc's own front end reads it for the host and for the GPU; what it writes then is thrown away.
cu) command=("$compiler" -x cu -std=c++17 --cuda -Werror=all-warnings -o /dev/null) ;;
*) exit 2 ;;
esac
command+=("-I$root/include" "${system[@]}")

compile() { # compile SOURCE COMMAND…
    local source=$1
    shift
    "$@" "$source" && return
    echo "fsdp/$(basename "$source"): does not compile alone as $language"
    return 1
}
export -f compile

failed=0
for header in "$root"/include/fsdp/*.h; do
    name=$(basename "$header")
    if [ $# = 0 ] && { [ "$name" = cuda.h ] || [ "$name" = nccl.h ]; }; then continue; fi
    write_source "$header" >"$folder/$name" || { cat "$folder/$name"; failed=1; }
done
export language
printf '%s\n' "$folder"/*.h | xargs -P 2 -I{} bash -c 'compile "$@"' _ {} "${command[@]}" || failed=1
n=$(find "$folder" -name '*.h' | wc -l)
echo "$n headers as $language"
[ "$n" -gt 0 ] && exit "$failed"
