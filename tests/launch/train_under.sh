#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# train_under.sh LAUNCHER GPT: the trainer's losses with four processes that LAUNCHER started (by_hand, or one of run_under.sh's)
# are those of four threads, to the last bit; one process speaks; a launcher and --ranks that differ are an error. 77 if the
# launcher is not here.
set -euo pipefail
launcher=$1 gpt=$2
# shellcheck source=tests/launch/run_under.sh
. "$(dirname "$0")/run_under.sh"
[ "$launcher" = by_hand ] || have_launcher "$launcher" || exit 77
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT FSDP_PORT FSDP_NONCE
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1

four() { # four ARGUMENT…: four processes
    local rank status=0 pids=()
    if [ "$launcher" != by_hand ]; then
        run_under "$launcher" 4 "$gpt" "$@"
        return
    fi
    for rank in 0 1 2 3; do
        RANK=$rank WORLD_SIZE=4 LOCAL_RANK=$rank LOCAL_WORLD_SIZE=4 FSDP_NONCE=$folder timeout -k 5 120 "$gpt" "$@" &
        pids+=($!)
    done
    for rank in "${pids[@]}"; do wait "$rank" || status=$?; done
    return "$status"
}

train=(--data "$(dirname "$0")/../../docs" --steps 12 --layers 2 --dim 32 --context 32 --batch 2 --clip 1 --quiet --json)
"$gpt" "${train[@]}" --ranks 4 --losses "$folder/threads" >"$folder/threads.json" 2>"$folder/threads.err" ||
    { cat "$folder/threads.err"; exit 1; }
four "${train[@]}" --losses "$folder/processes" >"$folder/out" 2>"$folder/err" || { cat "$folder/out" "$folder/err"; exit 1; }
cmp "$folder/threads" "$folder/processes"
[ "$(wc -l <"$folder/processes")" = 12 ]
grep -ao '{"ranks":.*}' "$folder/out" >"$folder/processes.json"
diff "$folder/threads.json" "$folder/processes.json" # one line, the same figures and bytes
[ "$(grep -c 'held out' "$folder/err")" = "$(grep -c 'held out' "$folder/threads.err")" ]

if four "${train[@]}" --ranks 3 >"$folder/out" 2>&1; then echo "--ranks 3 among four processes is taken"; exit 1; fi
[ "$(grep -ac 'gpt: --ranks 3, but .* started 4 processes: leave --ranks out' "$folder/out")" -ge 1 ] || { cat "$folder/out"; exit 1; }
echo "$launcher: the losses of four threads"
