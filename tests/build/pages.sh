#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# pages.sh ROOT EXAMPLES [MEMORY_PICTURE FSDP_MEMORY]: what README.md and docs/ show of a program's output is what it prints and draws.
# EXAMPLES: the folder of the built ones. MEMORY_PICTURE writes the snapshot that FSDP_MEMORY draws.
set -euo pipefail
root=$1 examples=$2 failed=0
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

shows() { # shows PAGE COMMAND…: its output, whole, stands in the page
    local page=$1 text output
    shift
    text=$(<"$root/$page")
    output=$("$@")
    [[ $text == *"$output"* ]] && return
    echo "$page does not show what ${1##*/} prints:"
    echo "$output"
    failed=1
}
draws() { # draws PICTURE FILE WHICH: are they the same?
    cmp -s "$root/$1" "$2" && return
    echo "$1 is not what is drawn today: copy $3"
    failed=1
}

shows README.md "$examples/02_will_it_fit"
shows docs/timeline.md "$examples/05_timeline" "$folder"
draws docs/step.svg "$folder/wire.svg" "wire.svg of 05_timeline FOLDER"
if [ $# -gt 2 ]; then
    "$3" "$folder/memory.json" >/dev/null 2>&1
    "$4" "$folder/memory.json" -o "$folder/memory.svg"
    draws docs/memory.svg "$folder/memory.svg" "the one that docs/memory.md says how to make"
fi
exit "$failed"
