#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# nccl_versions.sh ROOT [FOLDER [CC]]: the library's C files build against the oldest and the newest NCCL and CUDA headers that are
# promised, as objects and as a shared library, and call nothing that the NCCL of those headers lacks. Kernels need nvcc and are
# left out. Wheels of PyPI come into FOLDER (build/nccl_versions), once. By hand and in CI. 77: no pip, or no network.
set -euo pipefail
root=$(cd "$1" && pwd)
folder=${2:-$root/build/nccl_versions} cc=${3:-cc}
python3 -m pip --version >/dev/null 2>&1 || { echo "skipped: no pip"; exit 77; }
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
failed=0

wheels() { # wheels NAME PACKAGE…: unpacked under FOLDER/NAME
    local into=$folder/$1
    shift
    [ ! -e "$into/complete" ] || return 0
    rm -rf "$into" && mkdir -p "$into/wheels"
    python3 -m pip download --quiet --no-deps --only-binary :all: --dest "$into/wheels" "$@" ||
        { echo "skipped: no wheels of $*"; exit 77; }
    for wheel in "$into"/wheels/*.whl; do python3 -m zipfile -e "$wheel" "$into"; done
    touch "$into/complete"
}

build() { # build NAME: everything under ROOT that libfsdp.so has in C, with the headers under FOLDER/NAME
    local name=$1 at=$folder/$1 objects=() includes=() library source object header
    for header in nccl.h cuda_runtime_api.h crt/host_defines.h; do
        local found
        found=$(find "$at" -path "*/include/$header" | head -1)
        [ -n "$found" ] || { echo "$name: no $header in its wheels"; failed=1; return; }
        includes+=(-isystem "${found%"/$header"}")
    done
    library=$(find "$at" -name 'libnccl.so*' | head -1)
    rm -rf "$at/objects" && mkdir -p "$at/objects"
    while IFS= read -r source; do
        object=$at/objects/$(tr / _ <<<"${source#"$root/"}").o
        "$cc" -std=c11 -O1 -fPIC -ffp-contract=off -Wall -Wextra -Wpedantic -Werror -Wno-format-truncation -Wno-maybe-uninitialized \
            -D_GNU_SOURCE \
            -I"$root" -I"$root/include" -I"$root/lib" "${includes[@]}" -c "$source" -o "$object" || { failed=1; return; }
        objects+=("$object")
    done < <(find "$root/lib" "$root/sharding" -name '*.c' -not -path '*/lib/mpi/*' -not -path '*/lib/jemalloc/*' \
        -not -path '*/lib/tools/*')
    "$cc" -shared -o "$at/libfsdp.so" "${objects[@]}" "$library" -lm -lpthread -ldl || { failed=1; return; }
    local lacks
    lacks=$(comm -23 <(nm -D --undefined-only "$at/libfsdp.so" | awk '{print $NF}' | sed 's/@.*//' | grep '^nccl' | sort -u) \
        <(nm -D --defined-only "$library" | awk '{print $NF}' | sed 's/@.*//' | sort -u))
    [ -z "$lacks" ] || { printf '%s: its NCCL lacks\n%s\n' "$name" "$lacks"; failed=1; }
    printf '%s: NCCL %s, %d files\n' "$name" \
        "$(awk '/define NCCL_(MAJOR|MINOR|PATCH) / {printf "%s%s", dot, $3; dot = "."}' "$(find "$at" -name nccl.h | head -1)")" \
        "${#objects[@]}"
}

wheels oldest nvidia-nccl-cu12==2.19.3 'nvidia-cuda-runtime-cu12==12.2.*' 'nvidia-cuda-nvcc-cu12==12.2.*'
wheels newest nvidia-nccl-cu13 nvidia-cuda-runtime nvidia-cuda-crt
build oldest
build newest
exit "$failed"
