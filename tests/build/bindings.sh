#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# bindings.sh ROOT defaults CC [FOLDER…]: the table of docs/bindings.md is what the initialiser macros set, and nothing else is
# set. FOLDERs are CUDA's and NCCL's headers; without them cuda.h and nccl.h are left out.
# bindings.sh ROOT example PYTHON3 LIBFSDP.SO: examples/06_ctypes.py trains alone and on two processes, and says what the page says.
set -euo pipefail
root=$1 what=$2 program=$3
shift 3
page=$root/docs/bindings.md
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# A source that holds each struct twice: from its macro, and zero but for its size and the row of the page.
write_check() { # write_check HEADER…
    local macro type field row
    for header; do printf '#include "fsdp/%s"\n' "${header##*/}"; done
    printf '#include <stdio.h>\n#include <string.h>\n'
    while read -r macro type; do
        printf 'static const %s macro_%s = %s;\nstatic %s page_%s;\n' "$type" "$type" "$macro" "$type" "$type"
        printf 'static int check_%s(void) {\n    page_%s.size = sizeof page_%s;\n' "$type" "$type" "$type"
        row=$(sed -nE "s/^\| \`$type\` \|([^|]*)\|.*/\1/p" "$page")
        while read -r field; do
            [ -z "$field" ] || printf '    page_%s.%s;\n' "$type" "$field"
        done < <(grep -oE '`[^`]+`' <<<"$row" | tr -d '`')
        printf '    return memcmp(&page_%s, &macro_%s, sizeof page_%s) != 0 && printf("%s: not what %s sets\\n"); }\n' \
            "$type" "$type" "$type" "$type" "$macro"
    done <"$folder/macros"
    printf 'int main(void) { return %s0; }\n' "$(sed 's/^[^ ]* \(.*\)/check_\1() + /' "$folder/macros" | tr -d '\n')"
}

case $what in
defaults)
    system=() headers=() failed=0
    for each; do system+=(-isystem "$each"); done
    for header in "$root"/include/fsdp/*.h; do
        case $header in */cuda.h | */nccl.h) [ $# -gt 0 ] || continue ;; esac
        headers+=("$header")
    done
    # "FSDP_VIEW_INIT fsdp_view", one a line
    awk '/^#define FSDP_[A-Z0-9_]+_INIT/ { macro = $2 }
        macro && match($0, /sizeof\([a-z0-9_]+\)/) { print macro, substr($0, RSTART + 7, RLENGTH - 8); macro = "" }' \
        "${headers[@]}" >"$folder/macros"
    while read -r type; do
        grep -q "sizeof($type)" "$root"/include/fsdp/*.h && continue
        echo "docs/bindings.md: no macro for $type"
        failed=1
    done < <(sed -nE 's/^\| `(fsdp_[a-z0-9_]+)` \|.*/\1/p' "$page")
    write_check "${headers[@]}" >"$folder/check.c"
    "$program" -std=c11 -I"$root/include" "${system[@]}" "$folder/check.c" -o "$folder/check"
    "$folder/check" || failed=1
    echo "$(wc -l <"$folder/macros") structs"
    [ -s "$folder/macros" ] && exit "$failed"
    ;;
example)
    example=("$program" "$root/examples/06_ctypes.py" "$1")
    unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT FSDP_PORT
    timeout 60 "${example[@]}" | grep -xF 'rank 0 of 1: 0.0'
    for rank in 0 1; do
        RANK=$rank WORLD_SIZE=2 LOCAL_RANK=$rank LOCAL_WORLD_SIZE=2 FSDP_NONCE=bindings-$$ timeout 60 "${example[@]}" \
            >"$folder/$rank" &
    done
    wait
    for rank in 0 1; do grep -xF "rank $rank of 2: 0.5" "$folder/$rank"; done
    grep -qF 'rank 0 of 2: 0.5' "$page"
    ;;
*) exit 2 ;;
esac
