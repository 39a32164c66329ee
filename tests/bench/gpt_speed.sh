#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# gpt_speed.sh GPT [ARGUMENT…]: what the library costs the trainer on one GPU: the same steps with it and without it (--plain), in
# turn, three times each; medians of a step's time, tokens/s, MFU. Without arguments the shape of GPT-2 124M, 64 x 1024 tokens.
# By hand, on a machine with a GPU that nobody else uses. ROUNDS=5 takes more of them.
set -euo pipefail
gpt=$1
shift
[ $# -gt 0 ] || set -- --shape gpt2-124m --data random --batch 64
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
rounds=${ROUNDS:-3}
for round in $(seq "$rounds"); do
    for way in library plain; do
        flags=(--device cuda --ranks 1 --steps 30 --quiet --json "$@")
        [ "$way" = library ] || flags+=(--plain)
        timeout 300 "$gpt" "${flags[@]}" >"$folder/$way.$round" 2>"$folder/err" || { cat "$folder/err"; exit 1; }
    done
done
middle() { # middle WAY FIELD: its median
    cat "$folder/$1".* | grep -o "\"$2\":[0-9.]*" | cut -d: -f2 | sort -n | sed -n "$(((rounds + 1) / 2))p"
}
printf '%-10s %12s %12s %8s\n' "" "ms a step" "tokens/s" MFU
for way in library plain; do
    printf '%-10s %12s %12s %8s\n' "$way" "$(middle $way step_ms)" "$(middle $way tokens_per_s)" "$(middle $way mfu)"
done
awk -v with="$(middle library step_ms)" -v without="$(middle plain step_ms)" \
    'BEGIN { printf "the library costs %.2f %% of a step\n", 100 * (with / without - 1) }'
