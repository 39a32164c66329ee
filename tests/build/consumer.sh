#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# consumer.sh WAY ROOT BUILD FOLDER CMAKE CC with|without [CMAKE-ARGUMENT…]: somebody else's project builds against the library and
# runs, by find_package or pkg_config from a fresh install prefix that was moved after the install, or by add_subdirectory of the
# source tree, with the arguments. By pkg_config the small examples are built and run, too.
set -euo pipefail
way=$1 root=$2 build=$3 folder=$4/$1 cmake=$5 cc=$6 jemalloc=$7 # was fsdp::jemalloc built?
shift 7
rm -rf "$folder"
mkdir -p "$folder"

install_moved() {
    "$cmake" --install "$build" --prefix "$folder/first" >/dev/null
    mv "$folder/first" "$folder/prefix"
}
build_and_run() { # build_and_run CMAKE-ARGUMENT…
    "$cmake" -S "$root/tests/build/consumer" -B "$folder/build" -DCMAKE_C_COMPILER="$cc" "$@" >"$folder/log" 2>&1 &&
        "$cmake" --build "$folder/build" -j 2 >>"$folder/log" 2>&1 || { cat "$folder/log"; exit 1; }
    for kind in fsdp shared static; do timeout 20 "$folder/build/consumer_$kind"; done
    if [ "$jemalloc" = with ]; then
        for kind in jemalloc jemalloc_static; do timeout 20 "$folder/build/consumer_$kind"; done
    fi
}

case $way in
find_package)
    install_moved
    build_and_run -DCMAKE_PREFIX_PATH="$folder/prefix"
    ;;
pkg_config)
    command -v pkg-config >/dev/null || { echo "no pkg-config"; exit 77; }
    install_moved
    libdir=$(dirname "$(find "$folder/prefix" -name pkgconfig)")
    export PKG_CONFIG_PATH=$libdir/pkgconfig
    source=$root/tests/build/consumer/main.c
    # shellcheck disable=SC2046
    "$cc" "$source" -o "$folder/shared" $(pkg-config --cflags --libs fsdp)
    LD_LIBRARY_PATH=$libdir timeout 20 "$folder/shared"
    for example in "$root"/examples/[0-9]*.c; do
        # shellcheck disable=SC2046
        "$cc" -std=c11 -Wall -Wextra -pedantic -Werror "$example" -o "$folder/example" $(pkg-config --cflags --libs fsdp) -pthread -lm
        LD_LIBRARY_PATH=$libdir timeout 20 "$folder/example" >/dev/null
    done
    if [ "$jemalloc" = with ]; then
        # shellcheck disable=SC2046
        "$cc" "$root/tests/build/consumer/jemalloc.c" -o "$folder/jemalloc" $(pkg-config --cflags --libs fsdp-jemalloc)
        LD_LIBRARY_PATH=$libdir timeout 20 "$folder/jemalloc"
    fi
    rm "$libdir"/libfsdp.so*
    # shellcheck disable=SC2046
    "$cc" "$source" -o "$folder/static" $(pkg-config --static --cflags --libs fsdp)
    timeout 20 "$folder/static"
    ;;
add_subdirectory)
    linked_shared() { case $(ldd "$folder/build/consumer_fsdp") in *libfsdp.so*) return 0 ;; esac; return 1; }
    build_and_run -DFSDP_FROM="$root" "$@"
    linked_shared || { echo "by default fsdp::fsdp is not the shared library"; exit 1; }
    rm "$folder/build/CMakeCache.txt"
    build_and_run -DFSDP_FROM="$root" -DBUILD_SHARED_LIBS=OFF "$@"
    if linked_shared; then
        echo "BUILD_SHARED_LIBS=OFF gave the shared library"
        exit 1
    fi
    ;;
*) exit 2 ;;
esac
