#!/bin/sh
# SPDX-License-Identifier: MIT
# libfsdp's allocator beside PyTorch's and cudaMallocAsync, on the GPU of this machine, in one run: ns on the host for each case.
#
#     sh compare_allocators.sh BUILD_DIRECTORY [--json]
#
# Needs python3 with PyTorch for CUDA, ninja and a C++ compiler.
set -eu
build=${1:?usage: compare_allocators.sh BUILD_DIRECTORY [--json]}
here=$(cd "$(dirname "$0")" && pwd)
ours=$(mktemp)
trap 'rm -f "$ours"' EXIT
"$build/tests/bench_allocator" --device cuda --peers --json >"$ours"
if [ "${2-}" = --json ]; then cat "$ours"; fi
python3 "$here/allocator_peers.py" "$ours" ${2:+"$2"}
