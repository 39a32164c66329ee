#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# ranks.sh WORLD [--one-gpu] [--deadline SECONDS] COMMAND…: WORLD copies of COMMAND on this machine, each told by RANK,
# WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT who it is. If one fails, or the deadline (90 s; 0: none)
# passes, all are ended, and this ends with that one's status, or 124.
#   --one-gpu  all on the first GPU: NCCL refuses that unless it takes the ranks for machines, each of its own NCCL_HOSTID; then it
#              talks over loopback sockets
# NVLink multicast stays off. MASTER_PORT and the three ports behind it are free.
set -uo pipefail
usage() { sed -n '3,8s/^# \{0,1\}//p' "$0" >&2; exit 2; }
world=${1:-}
[[ $world =~ ^[1-9][0-9]*$ ]] || usage
shift
one_gpu=0 deadline=90
while [ $# -gt 0 ]; do
    case $1 in
    --one-gpu) one_gpu=1; shift ;;
    --deadline) deadline=${2:-}; [[ $deadline =~ ^[0-9]+$ ]] || usage; shift 2 ;;
    --) shift; break ;;
    *) break ;;
    esac
done
[ $# -gt 0 ] || usage

# Below the range that the kernel hands out by itself, so that nobody gets one of them by chance; a lock keeps other ranks.sh off.
port_in_use() { # port_in_use PORT: anybody has bound it, over IPv4 or IPv6
    local hex
    printf -v hex ':%04X ' "$1"
    awk -v port="$hex" '{ if (index($2 " ", port)) found = 1 } END { exit !found }' /proc/net/tcp /proc/net/tcp6 2>/dev/null
}
lock_dir=${TMPDIR:-/tmp}/fsdp-ports-$(id -u)
mkdir -p "$lock_dir"
port=""
for ((try = 0; try < 200; try++)); do
    port=$((20000 + (RANDOM * 32768 + RANDOM) % 3000 * 4))
    exec {lock}>"$lock_dir/$port"
    if flock -n "$lock"; then
        busy=0
        for ((i = 0; i < 4; i++)); do port_in_use $((port + i)) && busy=1; done
        [ "$busy" = 1 ] || break
    fi
    exec {lock}>&-
    port=""
done
[ -n "$port" ] || { echo "ranks.sh: no four free ports" >&2; exit 1; }

export MASTER_ADDR=127.0.0.1 MASTER_PORT=$port WORLD_SIZE=$world LOCAL_WORLD_SIZE=$world
export NCCL_NVLS_ENABLE=0 NCCL_LAUNCH_ORDER_IMPLICIT=${NCCL_LAUNCH_ORDER_IMPLICIT:-1}
if [ "$one_gpu" = 1 ]; then
    export NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1 CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}
    CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES%%,*}
fi

pids=() sleeper=""
# shellcheck disable=SC2317 # called by trap
gone() { # gone TENTHS: all ranks are, within so many tenths of a second
    local i
    for ((i = 0; i < $1; i++)); do
        kill -0 "${pids[@]}" 2>/dev/null || return 0
        sleep 0.1
    done
    return 1
}
# shellcheck disable=SC2317
end_all() {
    local pid
    trap - EXIT INT TERM
    for pid in "${pids[@]}"; do kill -TERM -- "-$pid" 2>/dev/null; done
    if [ -n "$sleeper" ]; then
        kill -KILL "$sleeper" 2>/dev/null
        wait "$sleeper" 2>/dev/null
    fi
    gone 20 || true
    for pid in "${pids[@]}"; do kill -KILL -- "-$pid" 2>/dev/null; done
    gone 50 || echo "ranks.sh: a rank cannot be killed" >&2
}
trap end_all EXIT
trap 'exit 130' INT TERM

for ((r = 0; r < world; r++)); do
    [ "$one_gpu" = 0 ] || export NCCL_HOSTID=host$r
    # A session of its own, so that whatever a rank starts ends with it.
    RANK=$r LOCAL_RANK=$r setsid "$@" {lock}>&- &
    pids+=($!)
done
if [ "$deadline" -gt 0 ]; then
    sleep "$deadline" >/dev/null 2>&1 {lock}>&- &
    sleeper=$!
fi

status=0 left=$world
while [ "$left" -gt 0 ]; do
    wait -n; rc=$?
    if [ -n "$sleeper" ] && ! kill -0 "$sleeper" 2>/dev/null; then
        echo "ranks.sh: not done after $deadline s: $*" >&2
        sleeper=""
        exit 124
    fi
    left=$((left - 1))
    if [ "$rc" -ne 0 ]; then
        status=$rc
        [ "$left" = 0 ] || [ "$rc" = 77 ] || echo "ranks.sh: a rank ended with $rc; the others are ended" >&2
        break
    fi
done
exit "$status"
