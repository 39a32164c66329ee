#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# multi_gpu.sh [options]: everything that needs several GPUs of one host, a rank a GPU, in one table: the gpu tests, bandwidth of
# the collectives, the step by hand, through the library and under FSDP2, one communicator against two, windows and copy-engine
# gathers, eager and captured, bytes against their prediction, GPT-2 1.5B. NVLink multicast stays off.
#   --build DIR      the build with CUDA (build/cuda)
#   --out DIR        results.jsonl, table.txt, tests.txt, step.svg and log go there (a new folder in /tmp)
#   --gpus N         of this machine's GPUs (all)
#   --minutes N      end within N minutes: repetitions, then whole sections are left out, and said to be (20)
#   --repeats N      of the comparison (3)
#   --sections LIST  tests, wire, main, large, variants, gpt, host (all)
#   --peer FILE      another FSDP2 driver (tests/bench/fsdp2_blocks.py)
#   --one-gpu        a rehearsal: two ranks on one GPU, which says that all of it runs, and nothing about several GPUs
#   --dry-run        print the commands, run none
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=bench_runs.sh disable=SC1091
. tests/bench/bench_runs.sh
# shellcheck disable=SC2034 # bench_runs.sh reads one_gpu
build=build/cuda out="" gpus="" minutes=20 repeats=3 sections=tests,wire,main,large,variants,gpt,host peer="" dry_run=0 one_gpu=0
read_options "build out gpus minutes repeats sections peer" "dry-run one-gpu" "$@"
open_out
world=${gpus:-$(gpu_count)}
[ "$one_gpu" = 0 ] || world=2
[ "${world:-0}" -ge 2 ] || [ "$dry_run" = 1 ] || { echo "multi_gpu.sh: ${world:-0} GPUs: it needs two"; exit 77; }
[ "${world:-0}" -ge 2 ] || world=2
bench=$build/tests/bench_prefetch
need_built "$bench"
export NCCL_NVLS_ENABLE=0 FSDP_PEER_MULTI_GPU=1
started=$SECONDS
pace=(--steps 10 --rounds 2)
large=(--layers 16 --dim 2048) # 33.5 million parameters a layer
small=(--layers 32 --dim 256)  # launching is all there is
tokens=2048,512                # balanced and communication-bound on NVLink
shape=gpt2-1.5b gpus=$world
if [ "$one_gpu" = 1 ]; then # over sockets
    pace=(--steps 3 --rounds 1) large=(--layers 4 --dim 1024) small=(--layers 4 --dim 256) shape=gpt2-124m gpus=1
fi

left() { echo $((minutes * 60 - (SECONDS - started))); }
# section NAME SECONDS: wanted, and there is time for it
section() {
    [[ ,$sections, == *,$1,* ]] || return 1
    if [ "$(left)" -lt "$2" ]; then
        echo "left out: $1 ($(left) s left, it may take $2)" | tee -a "$out/notes"
        return 1
    fi
    echo "== $1 ($(left) s left)"
}

# Those of the gpu tests that start ranks, or need two GPUs; the others look at one.
ranks_tests='comm|current|journey|capture|order|faults'
run_tests() {
    local seconds
    seconds=$(($(left) > 30 ? $(left) : 30)) # the rest
    if [ "$dry_run" = 1 ]; then
        echo "FSDP_TEST_GPUS=$gpus ctest --test-dir $build -L gpu -R $ranks_tests"
        return
    fi
    FSDP_TEST_GPUS=$gpus timeout "$seconds" ctest --test-dir "$build" -L gpu -R "$ranks_tests" --output-on-failure >"$out/tests.txt" 2>&1 || true
    grep -E 'tests (passed|failed)|Failed|Timeout|did not run' "$out/tests.txt" || echo "the gpu tests did not end within $seconds s"
}

run_wire() {
    local wire=$build/tests/bench_wire keys='"section":"wire"'
    run_ranks "$world" "$keys" "$wire" --json
    run_ranks "$world" "$keys" "$wire" --json --window
    run_ranks "$world" "$keys" "$wire" --json --window --cta-zero
}

run_bench() { run_ranks "$world" "$1" "$bench" --device cuda --json "${pace[@]}" "${@:2}"; }

run_fsdp2() { # run_fsdp2 KEYS TOKENS SHAPE… [options of our driver]
    local keys=$1 list=$2 one
    shift 2
    if [ -z "$peer" ]; then
        run_ranks "$world" "$keys" python3 tests/bench/fsdp2_blocks.py "$@" "${pace[@]}" --tokens "$list"
    else
        for one in ${list//,/ }; do run_ranks "$world" "$keys" python3 "$peer" "$@" --steps 10 --tokens "$one" --overlap; done
    fi
}

repeat_main() {
    local keys="\"section\":\"main\",\"repeat\":$1" clip="\"section\":\"clip\",\"repeat\":$1" comms way
    for comms in 1 2; do
        for way in bare library; do
            run_bench "$keys" "${large[@]}" --tokens "$tokens" --mode "$way" --comms "$comms"
        done
    done
    run_fsdp2 "$keys" "$tokens" "${large[@]}"
    for way in bare library; do run_bench "$clip" "${large[@]}" --tokens "$tokens" --what both --clip --mode "$way"; done
    [ -n "$peer" ] || run_fsdp2 "$clip" "$tokens" "${large[@]}" --what both --clip
    for way in bare library; do run_bench "$keys" "${small[@]}" --tokens 64 --what both,comm --mode "$way"; done
    run_fsdp2 "$keys" 64 "${small[@]}"
}

run_main() {
    local i last=0
    for ((i = 1; i <= repeats; i++)); do
        # What comes behind gets its part of the time, too.
        if [ "$i" -gt 1 ] && [ $(($(left) - last)) -lt 250 ]; then
            echo "main: $((i - 1)) of $repeats repetitions, the time is over" | tee -a "$out/notes"
            return
        fi
        last=$SECONDS
        repeat_main "$i"
        last=$((SECONDS - last))
        echo "main: repetition $i of $repeats took $last s"
    done
}

# Layers so large that FSDP2's host is not the limit.
run_large() {
    local keys='"section":"main"' way huge=(--layers 6 --dim 8192 --steps 5 --rounds 1) list=2048,1024
    [ "$one_gpu" = 0 ] || huge=(--layers 2 --dim 2048 --steps 3 --rounds 1)
    for way in bare library; do
        run_ranks "$world" "$keys" "$bench" --device cuda --json "${huge[@]}" --tokens "$list" --mode "$way"
        run_ranks "$world" '"section":"fused"' "$bench" --device cuda --json "${huge[@]}" --tokens "$list" --mode "$way" --window --cta-zero
    done
    [ -n "$peer" ] || run_ranks "$world" "$keys" python3 tests/bench/fsdp2_blocks.py "${huge[@]}" --tokens "$list"
}

run_variants() {
    local keys='"section":"fused"' way ctas
    for way in bare library; do
        run_bench "$keys" "${large[@]}" --tokens "$tokens" --what both,comm --mode "$way" --window
        run_bench "$keys" "${large[@]}" --tokens "$tokens" --what both,comm --mode "$way" --window --window-grad
        run_bench "$keys" "${large[@]}" --tokens "$tokens" --what both,comm --mode "$way" --window --cta-zero
        run_bench "$keys" "${large[@]}" --tokens "$tokens" --what both --mode "$way" --captured
        run_bench "$keys" "${large[@]}" --tokens "$tokens" --what both,compute --mode "$way" --fused \
            --timeline "$out/step.svg"
        run_bench "$keys" "${large[@]}" --tokens "$tokens" --what both --mode "$way" --depth 2
    done
    # How many SMs NCCL may take from the blocks' kernels.
    for ctas in 4 8 16; do
        export NCCL_MAX_CTAS=$ctas
        for way in bare library; do
            run_bench "$keys,\"ctas\":$ctas" "${large[@]}" --tokens "$tokens" --what both,comm --mode "$way"
        done
        run_fsdp2 "$keys,\"ctas\":$ctas" "$tokens" "${large[@]}" --what both,comm
        unset NCCL_MAX_CTAS
    done
}

run_host() {
    local way
    for way in bare library; do
        run_bench '"section":"host"' "${small[@]}" --tokens 64 --what both --mode "$way" --captured
        run_ranks "$world" '"section":"host","clocked":true' "$build/tests/bench_prefetch_calls" --device cuda --json "${pace[@]}" \
            "${small[@]}" --tokens 64 --what both --mode "$way"
    done
}

run_gpt() {
    local gpt
    gpt=$(find "$build" -name gpt -type f -perm -u+x 2>/dev/null | head -n 1) || gpt=""
    if [ -z "$gpt" ] && [ "$dry_run" = 0 ]; then
        echo "left out: gpt (not built)" | tee -a "$out/notes"
        return
    fi
    deadline=150 tries=1 run_ranks "$world" '"section":"gpt"' "${gpt:-gpt}" --device cuda --data random --shape "$shape" --batch 16 --steps 20 --json --quiet
}

{ describe_machine; nvidia-smi topo -m 2>/dev/null || true; } | tee "$out/machine"
use_one_nccl
if section wire 60; then run_wire; fi
if section gpt 150; then run_gpt; fi
if section main 100; then run_main; fi
if section large 110; then run_large; fi
if section variants 100; then run_variants; fi
if section host 40; then run_host; fi
if section tests 30; then run_tests; fi
sum_up "$started"
