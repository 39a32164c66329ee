#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# train_ranks.sh GPT: two and four ranks on one GPU, by NCCL over sockets: 20 losses are those of one rank with as many
# micro-steps, within 0.2 % (kernels are the same, sums over ranks are in another order); without prefetch and with it the same,
# to the last bit. 77 if there is no GPU.
set -euo pipefail
gpt=$1
# shellcheck source=tests/gpu/losses.sh
. "$(dirname "$0")/losses.sh"
nvidia-smi -L >/dev/null 2>&1 || { echo "no GPU here: skipped"; exit 77; }
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT FSDP_PORT FSDP_NONCE
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
# All ranks on the first GPU, though NCCL takes each for a machine of its own.
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}
export NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1 NCCL_NVLS_ENABLE=0 NCCL_LAUNCH_ORDER_IMPLICIT=1
train=(--data "$(dirname "$0")/../../docs" --device cuda --steps 20 --layers 3 --dim 128 --heads 2 --context 128 --batch 4 --quiet)

ranks() { # ranks WORLD LOSSES ARGUMENT…
    local world=$1 losses=$2 rank status=0 pids=()
    shift 2
    for ((rank = 0; rank < world; rank++)); do
        RANK=$rank WORLD_SIZE=$world LOCAL_RANK=$rank LOCAL_WORLD_SIZE=$world FSDP_NONCE=$losses NCCL_HOSTID=host$rank \
            timeout -k 5 100 "$gpt" "${train[@]}" --losses "$losses" "$@" >"$folder/out.$rank" 2>&1 &
        pids+=($!)
    done
    for rank in "${!pids[@]}"; do wait "${pids[rank]}" || { status=$?; cat "$folder/out.$rank"; }; done
    return "$status"
}

for world in 2 4; do
    "$gpt" "${train[@]}" --ranks 1 --micro-steps "$world" --losses "$folder/one.$world" >/dev/null
    ranks "$world" "$folder/many.$world"
    compare "$world ranks against $world micro-steps" "$folder/one.$world" "$folder/many.$world" 0.2
done
ranks 2 "$folder/off" --depth 0
cmp "$folder/many.2" "$folder/off"
echo "2 ranks, prefetch off and on: the same losses, to the last bit"
ranks 2 "$folder/two" --reduce-comm
cmp "$folder/many.2" "$folder/two"
echo "2 ranks, one and two communicators: the same losses, to the last bit"
