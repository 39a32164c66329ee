#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# sources.sh ROOT: the rules of docs/style.md that can be counted: licence line, length of lines, functions and files,
# no tabs, no unfinished business; and every C and CUDA file is named in a CMakeLists.txt, so that none is left out of the build.
set -euo pipefail
cd "$1"
failed=0
complain() { # complain TEXT LINES
    [ -z "$2" ] || { printf '%s\n%s\n' "$1" "$2"; failed=1; }
}
mapfile -t code < <(find include lib sharding tests examples \( -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' \) | sort)
mapfile -t scripts < <(find . -path ./build -prune -o -path './.*' -not -path './.ci*' -prune -o \
    \( -name '*.sh' -o -name '*.py' -o -name CMakeLists.txt -o -path './.ci/*' -o -name '*.in' \) -type f -print | sort)

complain "no SPDX line at the top:" "$(
    awk 'FNR == 1 && $0 != "/* SPDX-License-Identifier: MIT */" { print "    " FILENAME }' "${code[@]}"
    awk 'function report() { if (file != "" && !found) print "    " file }
        FNR == 1 { report(); file = FILENAME; found = 0 }
        FNR <= 2 && $0 == "# SPDX-License-Identifier: MIT" { found = 1 }
        END { report() }' "${scripts[@]}")"
# Right below the licence line, in a header also inside its guard; a .c file may leave it to its header.
complain "no comment that says what the file is for:" "$(
    awk 'function report() { if (file != "" && !found) print file }
        FNR == 1 { report(); file = FILENAME; found = 0 }
        FNR >= 2 && FNR <= 6 && /^\/\*/ { found = 1 }
        END { report() }' "${code[@]}" |
        while read -r file; do
            case $file in
            *.c | *.cu) [ -e "${file%.*}.h" ] || [ -e "${file%.*}.cuh" ] || echo "    $file" ;;
            *) echo "    $file" ;;
            esac
        done)"
# clang-format keeps code within 120; comments and the hand-set public headers may hang over a little.
complain "lines over 128 columns:" "$(LC_ALL=C.UTF-8 grep -nE '^.{129,}' "${code[@]}" | cut -d: -f1,2 | sed 's/^/    /' || true)"
complain "files over 600 lines:" "$(wc -l "${code[@]}" | awk '$2 != "total" && $1 > 600 { print "    " $2, $1 }')"
# A function's braces stand alone in the first column.
complain "functions over 80 lines:" "$(awk 'FNR == 1 { start = 0 } /^\{$/ { start = FNR }
    /^\}/ { if (start && FNR - start > 80) print "    " FILENAME ":" start, FNR - start; start = 0 }' "${code[@]}")"
complain "tabs:" "$(grep -nP '\t' "${code[@]}" | cut -d: -f1,2 || true)"
complain "unfinished:" "$(grep -nE '\b(TODO|FIXME|XXX|HACK)\b' "${code[@]}" || true)"
# Named by its path from the folder of the CMakeLists.txt that builds it, which is its own or one above.
named=$(find . -path ./build -prune -o -name CMakeLists.txt -print | sed 's|^\./||' | while read -r list; do
    grep -oE '[A-Za-z0-9_./]+\.cu?\b' "$list" | sed "s|^|$(dirname "$list")/|; s|^\./||"
done | sort -u)
complain "in no CMakeLists.txt:" "$(printf '%s\n' "${code[@]}" | grep -E '\.cu?$' | comm -23 - <(printf '%s\n' "$named") | sed 's/^/    /')"
echo "${#code[@]} C files, ${#scripts[@]} scripts"
exit "$failed"
