#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# quickstart.sh [--install] [--threads]: build the trainer, train a small GPT on four ranks, show what prefetch is worth.
#   --install   what is missing may be installed with sudo (as root it is installed anyway)
#   --threads   ranks are threads of one process; without it they are four processes, as mpirun or torchrun would start them
# Three minutes at most on two cores. The last line is the result as JSON.
set -euo pipefail
cd "$(dirname "$0")/.."
build=build/quickstart

install=0 threads=0
for argument; do
    case $argument in
    --install) install=1 ;;
    --threads) threads=1 ;;
    *) sed -n '3,6s/^# \{0,1\}//p' "$0"; exit 2 ;;
    esac
done

has() { command -v "$1" >/dev/null 2>&1; }

# What the build needs, as Debian and Ubuntu name it.
missing_packages() {
    has cmake || echo cmake
    has "${CC:-cc}" || echo gcc libc6-dev
    has make || has ninja || echo make
}

packages=$(missing_packages | xargs)
if [ -n "$packages" ]; then
    command="apt-get install -y --no-install-recommends $packages"
    if ! has apt-get; then
        echo "missing: $packages (as Debian names them); install them, then run this again" >&2
        exit 1
    elif [ "$(id -u)" = 0 ]; then
        sudo=""
    elif [ "$install" = 1 ] && has sudo; then
        sudo="sudo "
    else
        echo "missing: $packages; type this, then run quickstart again:" >&2
        echo "    sudo $command" >&2
        exit 1
    fi
    echo "installing: ${sudo}apt-get update && $sudo$command"
    ${sudo}apt-get update -q
    DEBIAN_FRONTEND=noninteractive $sudo$command
fi

mkdir -p "$build"
log=$build/build.log
quiet() { # quiet COMMAND…: its output goes to the log, and is shown if it fails
    if ! "$@" >>"$log" 2>&1; then
        tail -n 40 "$log" >&2
        echo "failed: $* (all of it: $log)" >&2
        exit 1
    fi
}
: >"$log"
echo "building in $build"
has make || export CMAKE_GENERATOR=Ninja
quiet cmake -S . -B "$build" -DCMAKE_BUILD_TYPE=Release -DFSDP_TESTS=OFF -DFSDP_WITH_CUDA=OFF
quiet cmake --build "$build" --target gpt --parallel 2
grep -o 'gpt: products by .*' "$log" | sed 's/^gpt: //' | tail -n 1

timeline=$build/timeline.svg
result=$build/result.json
gpt=("$build/examples/gpt/gpt" --steps 400 --compare --timeline "$timeline" --losses "$build/losses.txt" --json)

pids=()
# What a launcher does: the same program four times, each told its rank. Rank 0 speaks for all.
run_processes() {
    local rank status=0 nonce=quickstart-$$-$RANDOM
    trap '[ ${#pids[@]} = 0 ] || kill "${pids[@]}" 2>/dev/null || true' EXIT # an interrupt reaches this script only
    for rank in 1 2 3 0; do
        RANK=$rank WORLD_SIZE=4 LOCAL_RANK=$rank LOCAL_WORLD_SIZE=4 FSDP_NONCE=$nonce "${gpt[@]}" \
            >"$build/rank$rank.out" &
        pids+=($!)
    done
    for rank in "${pids[@]}"; do wait "$rank" || status=$?; done
    pids=()
    mv "$build/rank0.out" "$result"
    return $status
}

if [ "$threads" = 1 ]; then
    "${gpt[@]}" >"$result"
elif ! run_processes; then
    echo "processes cannot share memory here, or something is wrong with them (above): the ranks are threads now" >&2
    "${gpt[@]}" >"$result"
fi
echo "one step as a picture: $timeline"
tail -n 1 "$result"
