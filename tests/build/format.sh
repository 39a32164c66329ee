#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# format.sh ROOT [--fix]: lib/, sharding/, tests/ and examples/ are as clang-format 14 sets them (other versions differ in
# details; without it the test is skipped, 77). --fix sets them. The public headers are pages set by hand.
set -euo pipefail
cd "$1"
for tool in clang-format-14 clang-format; do
    case $("$tool" --version 2>/dev/null) in *"version 14."*) break ;; esac
    tool=""
done
[ -n "$tool" ] || { echo "no clang-format 14"; exit 77; }
mapfile -t files < <(find lib sharding tests examples \( -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' \) | sort)
if [ "${2:-}" = --fix ]; then exec "$tool" -i "${files[@]}"; fi
wrong=$("$tool" --dry-run "${files[@]}" 2>&1 | grep -oE '^[^ :]+:[0-9]+' | sort -u -t: -k1,1 || true)
[ -n "$wrong" ] || exit 0
printf 'not formatted, from the line given; tests/build/format.sh . --fix mends it:\n%s\n' "$wrong"
exit 1
