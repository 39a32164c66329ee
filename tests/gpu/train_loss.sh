#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# train_loss.sh GPT: 200 steps on the host and on a GPU, from the same first values over the same text: each step's loss differs by
# less than 1 %. On the GPU, the loop without the library has the losses of the one with it, to the last bit.
# 77 if there is no GPU.
set -euo pipefail
gpt=$1
# shellcheck source=tests/gpu/losses.sh
. "$(dirname "$0")/losses.sh"
nvidia-smi -L >/dev/null 2>&1 || { echo "no GPU here: skipped"; exit 77; }
folder=$(mktemp -d)
host=""
trap '[ -z "$host" ] || kill "$host" 2>/dev/null || true; rm -rf "$folder"' EXIT
train=(--data "$(dirname "$0")/../../docs" --steps 200 --layers 4 --dim 128 --heads 4 --context 64 --batch 16 --ranks 1 --quiet)

"$gpt" "${train[@]}" --losses "$folder/host" >"$folder/host.out" &
host=$!
"$gpt" "${train[@]}" --device cuda --losses "$folder/cuda" | tee "$folder/cuda.out"
"$gpt" "${train[@]}" --device cuda --plain --losses "$folder/plain" >"$folder/plain.out"
"$gpt" "${train[@]}" --device cuda --micro-steps 4 --batch 4 --accumulate keep --losses "$folder/keep" >/dev/null
"$gpt" "${train[@]}" --device cuda --micro-steps 4 --batch 4 --accumulate each --losses "$folder/each" >/dev/null
wait "$host" || { cat "$folder/host.out"; exit 1; }
host=""

compare "cuda against host" "$folder/host" "$folder/cuda" 1
compare "cuda, 4 micro-steps kept, against one" "$folder/cuda" "$folder/keep" 1
compare "cuda, 4 micro-steps each reduced, against one" "$folder/cuda" "$folder/each" 1
cmp "$folder/cuda" "$folder/plain"
echo "cuda without the library: the same losses, to the last bit"
