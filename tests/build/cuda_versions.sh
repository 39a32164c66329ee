#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# cuda_versions.sh ROOT CMAKE CC: a CUDA or an NCCL that is too old is not taken by AUTO, and refused by ON, with its version. An nvcc
# that can only say its version, and a header and a library that are none, stand for them.
set -euo pipefail
root=$1 cmake=$2 cc=$3 failed=0
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
touch "$folder/libnccl.so"

# configure WITH CUDA NCCL-MAJOR NCCL-MINOR
configure() {
    printf '#!/bin/sh\necho "Cuda compilation tools, release %s, V%s.1"\n' "$2" "$2" >"$folder/nvcc"
    chmod +x "$folder/nvcc"
    printf '#define NCCL_MAJOR %s\n#define NCCL_MINOR %s\n#define NCCL_PATCH 1\n' "$3" "$4" >"$folder/nccl.h"
    rm -rf "$folder/build"
    "$cmake" -S "$root" -B "$folder/build" -DCMAKE_C_COMPILER="$cc" -DCMAKE_CUDA_COMPILER="$folder/nvcc" \
        -DFSDP_NCCL_DIR="$folder" -DFSDP_NCCL_LIBRARY="$folder/libnccl.so" -DFSDP_WITH_CUDA="$1" -DFSDP_TESTS=OFF \
        -DFSDP_EXAMPLES=OFF -DFSDP_JEMALLOC=OFF -DFSDP_WITH_MPI=OFF >"$folder/log" 2>&1
}
expect() { # expect STATUS TEXT CONFIGURE-ARGUMENT…
    local wanted=$1 text=$2 status=0
    shift 2
    configure "$@" || status=1
    if [ "$status" = "$wanted" ] && tr -s '\n ' ' ' <"$folder/log" | grep -qF "$text"; then return; fi
    echo "FSDP_WITH_CUDA=$1, CUDA $2, NCCL $3.$4: expected status $wanted and \"$text\":"
    cat "$folder/log"
    failed=1
}

expect 0 "without CUDA: CUDA 11.8 is found, and 12.2 or later is needed" AUTO 11.8 2 20
expect 0 "without CUDA: NCCL 2.18 is found, and 2.19 or later is needed" AUTO 12.2 2 18
expect 1 "FSDP_WITH_CUDA is ON, and NCCL 2.9 is found, and 2.19 or later is needed" ON 13.0 2 9
expect 1 "(enable_language)" AUTO 12.2 2 19 # it is taken, and found out
exit "$failed"
