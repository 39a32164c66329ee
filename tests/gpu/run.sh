#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# run.sh [SECONDS]: on a machine with a GPU: build with CUDA, run the tests of label gpu, then a short training once more in each
# of these ways, on one and two ranks: as it is, under compute-sanitizer (memcheck; initcheck on one rank), with
# CUDA_LAUNCH_BLOCKING=1 and with CUDA_DEVICE_MAX_CONNECTIONS=1. Every way must give the same bits. A line for each; the last one
# sums up. Ends within SECONDS (480); what there was no time for is told, and is no success.
# GPU_TESTS: a regular expression of ctest, for a part of the tests.
set -euo pipefail
cd "$(dirname "$0")/../.."
budget=${1:-480}
export build=build/cuda logs=build/cuda/gpu
passed=0 failed=0 left_out=0
PATH=$PATH:/usr/local/cuda/bin
mkdir -p "$logs"
has() { command -v "$1" >/dev/null 2>&1; }

# step NAME SECONDS COMMAND…: within that time and what is left of the budget.
step() {
    local name=$1 seconds=$2 log started=$SECONDS status=0
    log=$logs/${1//[^a-z0-9_]/_}.log
    shift 2
    if [ $((budget - SECONDS)) -lt 15 ]; then
        echo "not run  $name: no time left"
        left_out=$((left_out + 1))
        return
    fi
    [ "$seconds" -lt $((budget - SECONDS)) ] || seconds=$((budget - SECONDS))
    # In a group of its own, so that the deadline reaches all that it has started.
    timeout -k 10 "$seconds" bash -c '"$@"' _ "$@" >"$log" 2>&1 || status=$?
    if [ "$status" = 0 ]; then
        passed=$((passed + 1))
        echo "passed   $name ($((SECONDS - started)) s)"
    else
        failed=$((failed + 1))
        echo "FAILED   $name (status $status after $((SECONDS - started)) s, at most $seconds), the end of $log:"
        tail -n 40 "$log"
    fi
}

# On the GPU that is there. A build folder keeps the generator that it has.
make_build() {
    local generator=() architecture
    architecture=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d '. ')
    if has ninja && [ ! -e "$build/CMakeCache.txt" ]; then generator=(-G Ninja); fi
    cmake --preset cuda "${generator[@]}" "-DCMAKE_CUDA_ARCHITECTURES=$architecture" &&
        cmake --build "$build" --target cuda_tests -j "$(nproc)"
}

# ranks WORLD COMMAND…: a process each; shows what they said, rank by rank.
ranks() {
    local world=$1 rank status=0 pids=() nonce=gpu-$$-$RANDOM
    shift
    for ((rank = 0; rank < world; rank++)); do
        RANK=$rank WORLD_SIZE=$world LOCAL_RANK=$rank LOCAL_WORLD_SIZE=$world FSDP_NONCE=$nonce "$@" >"$logs/rank$rank" 2>&1 &
        pids+=($!)
    done
    for rank in "${pids[@]}"; do wait "$rank" || status=$?; done
    for ((rank = 0; rank < world; rank++)); do cat "$logs/rank$rank"; done
    return "$status"
}

# way WORLD COMMAND…: ends well, with the bits of the first way.
way() {
    local world=$1 said
    shift
    said=$(ranks "$world" "$@") || { echo "$said"; return 1; }
    echo "$said"
    said=$(grep -E '^rank [0-9]+ of [0-9]+: loss ' <<<"$said")
    [ "$(wc -l <<<"$said")" = "$world" ] || { echo "not all ranks came to the end"; return 1; }
    [ -e "$logs/bits$world" ] || echo "$said" >"$logs/bits$world"
    diff "$logs/bits$world" - <<<"$said" || { echo "other bits than without"; return 1; }
}

export -f has make_build ranks way
if ! has nvidia-smi || ! nvidia-smi -L >"$logs/gpus" 2>&1; then
    echo "there is no GPU: tests/gpu/run.sh is for machines that have one"
    exit 77
fi
head -n 1 "$logs/gpus"
rm -f "$logs"/bits*
step "build" 400 make_build
[ "$failed" = 0 ] || exit 1
step "ctest" 460 ctest --test-dir "$build" -L '^gpu$' -R "${GPU_TESTS:-.}" --output-on-failure --no-tests=error
grep -E '^ *[0-9]+/[0-9]+ Test' "$logs/ctest.log" || true

train=("$build/tests/gpu/test_gpu_journey" rank)
for world in 1 2; do
    step "training, world $world" 60 way "$world" "${train[@]}"
    step "CUDA_LAUNCH_BLOCKING=1, world $world" 60 way "$world" env CUDA_LAUNCH_BLOCKING=1 "${train[@]}"
    step "CUDA_DEVICE_MAX_CONNECTIONS=1, world $world" 60 way "$world" env CUDA_DEVICE_MAX_CONNECTIONS=1 "${train[@]}"
done
if has compute-sanitizer; then
    sanitizer=(compute-sanitizer --error-exitcode 99 --print-limit 20)
    step "memcheck, world 1" 120 way 1 "${sanitizer[@]}" --tool memcheck "${train[@]}"
    step "initcheck, world 1" 120 way 1 "${sanitizer[@]}" --tool initcheck "${train[@]}"
    # NCCL asks CUDA for kernels that its library does not have, and goes on: calls that fail are no finding there.
    step "memcheck, world 2" 180 way 2 "${sanitizer[@]}" --tool memcheck --report-api-errors no "${train[@]}"
else
    echo "not run  compute-sanitizer is not installed"
    left_out=$((left_out + 1))
fi
echo "$passed passed, $failed failed, $left_out not run, $SECONDS s"
[ "$failed" = 0 ] && [ "$left_out" = 0 ]
