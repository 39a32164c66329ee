# SPDX-License-Identifier: MIT
# For compare_fsdp2.sh and multi_gpu.sh, which source it: runs with a deadline, one libnccl for all, results as lines of JSON.
# They set: build, out, dry_run, world, one_gpu.
# shellcheck shell=bash disable=SC2034,SC2154
bench_dir=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
failed_runs=0

# read_options "NAME…" "FLAG…" ARGUMENT…: `--NAME VALUE` sets the variable of that name, `--FLAG` sets it to 1; no-bias is no_bias.
# Anything else prints the script's first comment, which lists them.
read_options() {
    local names=" $1 " flags=" $2 " name
    shift 2
    while [ $# -gt 0 ]; do
        name=${1#--}
        if [[ $1 == --* && $flags == *" $name "* ]]; then
            printf -v "${name//-/_}" %s 1
            shift
        elif [[ $1 == --* && $names == *" $name "* ]]; then
            [ $# -ge 2 ] || exit 2
            printf -v "${name//-/_}" %s "$2"
            shift 2
        else
            sed -n '3,${/^#/!q;s/^# \{0,1\}//p}' "$bench_dir/$(basename "$0")"
            exit 2
        fi
    done
}

# The folder `out`, a new one if none was named, with an empty log and, in `results`, an empty file of lines.
open_out() {
    [ -n "$out" ] || out=$(mktemp -d)
    mkdir -p "$out"
    results=$out/results.jsonl
    : >"$results"
    : >"$out/log"
}

# A dry run needs no PROGRAM.
need_built() { [ "$dry_run" = 1 ] || [ -x "$1" ] || { echo "no $1: cmake --preset cuda && cmake --build --preset cuda"; exit 1; }; }

# sum_up STARTED: how it went since then, and the table.
sum_up() {
    echo "all runs took $((SECONDS - $1)) s; $failed_runs of them failed"
    [ "$dry_run" = 1 ] || python3 "$bench_dir/bench_table.py" "$results" | tee "$out/table.txt"
}

# Every program gets the libnccl of PyTorch's wheel, if there is one: else the comparison would be one of NCCL versions.
use_one_nccl() {
    local dir
    dir=$(python3 -c 'import nvidia.nccl, os; print(os.path.join(list(nvidia.nccl.__path__)[0], "lib"))' 2>/dev/null) || dir=""
    if [ -n "$dir" ] && [ -e "$dir/libnccl.so.2" ]; then
        export LD_LIBRARY_PATH=$dir${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
        echo "NCCL: $dir/libnccl.so.2"
    else
        echo "NCCL: each program's own (no wheel nvidia.nccl)"
    fi
}

gpu_count() { nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true; }

# tag KEYS: lines of JSON from standard input into the results, with KEYS in front; other lines are dropped.
tag() { sed -n "s/^{/{$1,/p" >>"$results"; }

# run_ranks WORLD KEYS COMMAND…: one run on WORLD ranks, `deadline` (90) seconds at most; one that fails is reported, with what it
# said last, and made once more (`tries`: 2); then the next one has its turn.
run_ranks() {
    local ranks=$1 keys=$2 try rc started flags=(--deadline "${deadline:-90}")
    shift 2
    [ "$one_gpu" = 0 ] || flags+=(--one-gpu)
    if [ "$dry_run" = 1 ]; then
        echo "ranks.sh $ranks ${flags[*]} $*"
        return 0
    fi
    for ((try = 1; try <= ${tries:-2}; try++)); do
        started=$SECONDS
        rc=0
        bash "$bench_dir/ranks.sh" "$ranks" "${flags[@]}" "$@" >"$out/.run" 2>"$out/.said" || rc=$?
        cat "$out/.said" "$out/.run" >>"$out/log"
        if [ "$rc" = 0 ]; then
            tag "$keys" <"$out/.run"
            rm -f "$out/.run" "$out/.said"
            return 0
        fi
        failed_runs=$((failed_runs + 1))
        echo "run failed (status $rc, after $((SECONDS - started)) s$([ "$rc" = 124 ] && echo ", deadline"), try $try): $*"
        { grep -m 1 '^bench_prefetch: ' "$out/.said"; tail -n 8 "$out/.said"; } | cut -c 1-200 | sed 's/^/    /' || true
    done
    rm -f "$out/.run" "$out/.said"
    return 0
}

# ---- CUDA MPS, with pipe and log of its own; the GPU's settings are not touched ----
mps_dir=""
mps_start() {
    mps_dir=$(mktemp -d)
    export CUDA_MPS_PIPE_DIRECTORY=$mps_dir/pipe CUDA_MPS_LOG_DIRECTORY=$mps_dir/log
    mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
    [ "$dry_run" = 1 ] && return 0
    if ! nvidia-cuda-mps-control -d >>"$out/log" 2>&1; then
        echo "CUDA MPS does not start: see $out/log"
        mps_stop
        return 1
    fi
}
mps_stop() {
    [ -n "$mps_dir" ] || return 0
    if [ "$dry_run" = 0 ]; then echo quit | timeout 20 nvidia-cuda-mps-control >>"$out/log" 2>&1 || true; fi
    unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
    rm -rf "$mps_dir"
    mps_dir=""
}

describe_machine() {
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null | sort | uniq -c || true
    python3 -c 'import torch; print("PyTorch", torch.__version__, "CUDA", torch.version.cuda)' 2>/dev/null || echo "no PyTorch"
    echo "$(nproc) cores, $(uname -sr), $(date -u +%Y-%m-%d)"
}
