#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# compare_fsdp2.sh [options]: the step by hand (bare), through the library, and under PyTorch's FSDP2, alternately, with one
# libnccl for all; then one table of medians, spreads and ratios. Every run has a deadline of 90 s; one that fails is reported
# and made once more.
#   --build DIR      the build with CUDA (build/cuda)
#   --out DIR        results.jsonl, table.txt, step.svg and log go there (a new folder in /tmp)
#   --world N        ranks; more than there are GPUs: all on the first one (2)
#   --repeats N      how often each case runs in each mode (3)
#   --minutes N      stop repeating in time to end within N minutes; the table says what was left out (no limit). Below 8: the
#                    main section without MPS alone, if nothing else is asked for, and no second try of what fails
#   --mps MODE       off, on or both: without CUDA MPS, with it (both; off with a GPU a rank)
#   --tokens A,B,C   balanced, communication-bound, communication only (131072,32768,64)
#   --sections LIST  main, clip (the same steps with the gradient clipped, which sums over ranks), host (hooks' and captured
#                    steps' host time, 1 rank and N), fused (main,clip,host,fused)
#   --peer FILE      another FSDP2 driver (tests/bench/fsdp2_blocks.py)
#   --no-bias        units of weights alone, in all three
#   --dry-run        print the commands, run none
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=bench_runs.sh disable=SC1091
. tests/bench/bench_runs.sh
# shellcheck disable=SC2034 # bench_runs.sh reads them
build=build/cuda out="" world=2 repeats=3 minutes=0 mps="" tokens=131072,32768,64 sections="" peer="" dry_run=0 no_bias=0 one_gpu=0
read_options "build out world repeats minutes mps tokens sections peer" "dry-run no-bias" "$@"
more=()
[ "$no_bias" = 0 ] || more=(--no-bias)
pace=(--steps 5 --rounds 1)
# shellcheck disable=SC2034
if [ "$minutes" -gt 0 ] && [ "$minutes" -lt 8 ]; then
    : "${mps:=off}" "${sections:=main}"
    pace=(--steps 6 --rounds 2) tries=1 deadline=75
fi
: "${mps:=both}" "${sections:=main,clip,host,fused}"
open_out
trap mps_stop EXIT

bench=$build/tests/bench_prefetch calls=$build/tests/bench_prefetch_calls
need_built "$bench"
gpus=$(gpu_count)
if [ "$world" -gt "${gpus:-0}" ]; then one_gpu=1; elif [ "$mps" = both ]; then mps=off; fi
shape=(--layers 8 --dim 1024 "${more[@]}") main_pace=("${pace[@]}")

run_bench() { run_ranks "$world" "$1" "$bench" --device cuda --json "${shape[@]}" "${pace[@]}" "${@:2}"; }

run_fsdp2() { # run_fsdp2 WORLD KEYS [options of our driver]
    local ranks=$1 keys=$2 one
    shift 2
    if [ -z "$peer" ]; then
        run_ranks "$ranks" "$keys" python3 tests/bench/fsdp2_blocks.py "${shape[@]}" "${pace[@]}" "$@"
        return
    fi
    [ "$one_gpu" = 1 ] || export FSDP_PEER_MULTI_GPU=1
    for one in ${tokens//,/ }; do
        run_ranks "$ranks" "$keys" python3 "$peer" "${shape[@]}" --steps 5 --tokens "$one" --overlap
    done
}

repeat_main() { # repeat_main MPS REPEAT: each of the five once, of each section asked for
    local keys="\"mps\":\"$1\",\"repeat\":$2" what=both,comm
    [ "$2" -gt 1 ] || what=both,comm,compute
    if [[ ,$sections, == *,main,* ]]; then repeat_ways "\"section\":\"main\",$keys" "$what" both,comm; fi
    if [[ ,$sections, == *,clip,* ]]; then repeat_ways "\"section\":\"clip\",$keys" both both --clip; fi
}

repeat_ways() { # repeat_ways KEYS WHAT WHAT-OF-TWO-COMMUNICATORS [options]
    run_bench "$1" --mode bare --comms 1 --tokens "$tokens" --what "$2" "${@:4}"
    run_bench "$1" --mode library --comms 1 --tokens "$tokens" --what "$2" "${@:4}"
    run_fsdp2 "$world" "$1" --tokens "$tokens" --what "$2" "${@:4}"
    run_bench "$1" --mode library --comms 2 --tokens "$tokens" --what "$3" "${@:4}"
    run_bench "$1" --mode bare --comms 2 --tokens "$tokens" --what "$3" "${@:4}"
}

run_main() { # run_main MPS SECONDS: repetitions while the time lasts (0: all)
    local mode=$1 budget=$2 start=$SECONDS last=0 i
    for ((i = 1; i <= repeats; i++)); do
        if [ "$budget" -gt 0 ] && [ "$i" -gt 1 ] && [ $((SECONDS - start + last)) -gt "$budget" ]; then
            echo "MPS $mode: $((i - 1)) of $repeats repetitions, the time is over" | tee -a "$out/notes"
            return 0
        fi
        last=$SECONDS
        repeat_main "$mode" "$i"
        last=$((SECONDS - last))
        echo "MPS $mode: repetition $i of $repeats took $last s"
    done
}

run_host() { # what the host pays: small layers, so that the GPU is never the limit
    local ranks keys way
    for ranks in 1 "$world"; do
        keys="\"section\":\"host\",\"mps\":\"off\",\"repeat\":1"
        shape=(--layers 32 --dim 256 "${more[@]}") pace=(--steps 30 --rounds 1)
        [ "$ranks" = 1 ] || shape=(--layers 8 --dim 1024 "${more[@]}") pace=(--steps 15 --rounds 1)
        for way in bare library; do
            run_ranks "$ranks" "$keys" "$bench" --device cuda --json "${shape[@]}" "${pace[@]}" --tokens 64 --what both --mode "$way" --captured
            run_ranks "$ranks" "$keys,\"clocked\":true" "$calls" --device cuda --json "${shape[@]}" "${pace[@]}" --tokens 64 --what both --mode "$way"
        done
        [ -n "$peer" ] || run_fsdp2 "$ranks" "$keys" --tokens 64 --what both
    done
    shape=(--layers 8 --dim 1024 "${more[@]}") pace=("${main_pace[@]}")
}

run_fused() {
    local keys="\"section\":\"fused\",\"mps\":\"off\",\"repeat\":1" way
    # The library's also draws a step.
    for way in bare library; do
        run_bench "$keys" --mode "$way" --fused --tokens "${tokens%%,*}" --what both,compute --timeline "$out/step.svg"
    done
    # FSDP2 issues its collectives from one stream: does that explain its time for them alone?
    run_bench "$keys" --mode bare --one-lane --tokens "${tokens##*,}" --what comm
    run_bench "$keys" --mode bare --keep --tokens "$tokens" --what both,comm
}

describe_machine | tee "$out/machine"
use_one_nccl
start=$SECONDS
modes=(off on)
[ "$mps" = both ] || modes=("$mps")
if [[ ,$sections, == *,host,* ]]; then run_host; fi
if [[ ,$sections, == *,fused,* ]]; then run_fused; fi
if [[ ,$sections, == *,main,* || ,$sections, == *,clip,* ]]; then
    left=${#modes[@]}
    for mode in "${modes[@]}"; do
        budget=0
        if [ "$minutes" -gt 0 ]; then
            budget=$(((minutes * 60 - (SECONDS - start) - 15) / left))
            [ "$budget" -gt 0 ] || budget=1
        fi
        if [ "$mode" = off ] || mps_start; then run_main "$mode" "$budget"; fi
        mps_stop
        left=$((left - 1))
    done
fi
sum_up "$start"
