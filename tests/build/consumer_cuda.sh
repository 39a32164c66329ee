#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# consumer_cuda.sh WAY BUILD FOLDER CMAKE NVCC ARCHITECTURES: somebody else's CUDA program, consumer_cuda/train.cu, builds against
# the library and runs, by find_package or pkg_config from a fresh install prefix that was moved after the install. Where there is
# no GPU it must end with the library's sentence about that.
set -euo pipefail
way=$1 build=$2 folder=$3/cuda_$1 cmake=$4 nvcc=$5 architectures=$6
here=$(cd "$(dirname "$0")" && pwd)/consumer_cuda
rm -rf "$folder"
mkdir -p "$folder"
"$cmake" --install "$build" --prefix "$folder/first" >/dev/null
mv "$folder/first" "$folder/prefix"

run() { # run PROGRAM
    local status=0
    timeout 60 "$1" >"$folder/out" 2>&1 || status=$?
    cat "$folder/out"
    if compgen -G '/dev/nvidia[0-9]*' >/dev/null; then return "$status"; fi
    if [ "$status" = 77 ] && grep -qE '^fsdp_context_create.*: FSDP_ERR_DEVICE: .+' "$folder/out"; then return 0; fi
    echo "$1: status $status; without a GPU it should be 77, with the library's sentence"
    return 1
}

case $way in
find_package)
    { "$cmake" -S "$here" -B "$folder/build" -DCMAKE_PREFIX_PATH="$folder/prefix" -DCMAKE_CUDA_COMPILER="$nvcc" \
        -DCMAKE_CUDA_ARCHITECTURES="$architectures" && "$cmake" --build "$folder/build" -j 2; } >"$folder/log" 2>&1 ||
        { cat "$folder/log"; exit 1; }
    for kind in fsdp shared static; do run "$folder/build/consumer_$kind"; done
    ;;
pkg_config)
    command -v pkg-config >/dev/null || { echo "no pkg-config"; exit 77; }
    libdir=$(dirname "$(find "$folder/prefix" -name pkgconfig)")
    export PKG_CONFIG_PATH=$libdir/pkgconfig
    arch=$(sed -E 's/-(real|virtual)//g; s/.*;//' <<<"$architectures") # the last of a list
    # shellcheck disable=SC2046
    "$nvcc" "-arch=sm_$arch" -std=c++17 "$here/train.cu" -o "$folder/shared" $(pkg-config --cflags --libs fsdp)
    LD_LIBRARY_PATH=$libdir${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} run "$folder/shared"
    rm "$libdir"/libfsdp.so*
    # shellcheck disable=SC2046
    "$nvcc" "-arch=sm_$arch" -std=c++17 "$here/train.cu" -o "$folder/static" $(pkg-config --static --cflags --libs fsdp)
    run "$folder/static"
    ;;
*) exit 2 ;;
esac
