#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# torchrun.sh --find|--install: the path of a torchrun that works, on stdout. It is $TORCHRUN, or torchrun of the PATH, or the one
# that --install puts into build/torchrun (PyTorch from PyPI: 540 MB to fetch, 1.3 GB there). 77, and a line that says why, if
# there is none.
#
# PyPI's PyTorch for x86-64 is the one for CUDA and wants 2.5 GB of NVIDIA's libraries, of which torchrun calls nothing: it needs
# Python's side and the store by which agents meet. So they are not fetched. Libraries of their names, made here, hold the symbols
# that the loader asks for, and no code.
set -euo pipefail
version=2.15.0
folder=$(cd "$(dirname "$0")/../.." && pwd)/build/torchrun
ready=$folder/ready-$version

works() { "$1" --help >/dev/null 2>&1 </dev/null; }
no() { echo "no torchrun: $1" >&2; exit 77; }

make_stand_ins() { # make_stand_ins TORCH/LIB
    local libraries absent name
    mapfile -t libraries < <(find "$1" -maxdepth 1 -name '*.so')
    mapfile -t absent < <(readelf -d "${libraries[@]}" | sed -nE 's/.*NEEDED.*\[(lib(cu|nv|nccl).*)\]/\1/p' | sort -u)
    [ "${#absent[@]}" -gt 0 ] || return 0 # a PyTorch for the CPU
    nm -D "${libraries[@]}" | awk '
        NF < 2 { next }
        { n = split($NF, part, "@"); name = part[1]; version = part[n] }
        $(NF - 1) !~ /^[Uw]$/ { defined[name] = 1; next }
        n > 1 && version ~ /^(lib(cu|nv)|NVSHMEM)/ { of[name] = version }
        n == 1 && name ~ /^(cu[A-Za-z]|nccl[A-Z]|nvshmem)/ { of[name] = "" }
        END { for (name in of) if (!(name in defined)) print name, of[name] }' >"$folder/symbols"
    awk '{ print "long " $1 "(void) { return 0; }" }' "$folder/symbols" >"$folder/stand_in.c"
    awk 'NF == 2 { names[$2] = names[$2] " " $1 ";" } END { for (v in names) print v " {" names[v] " };" }' \
        "$folder/symbols" >"$folder/stand_in.map"
    "${CC:-cc}" -shared -fPIC -w -fno-builtin -Wl,--version-script="$folder/stand_in.map" -o "$1/libstand_in.so" "$folder/stand_in.c"
    for name in "${absent[@]}"; do ln -sf libstand_in.so "$1/$name"; done
}

install() {
    local pip=("$folder/bin/python" -m pip -q --disable-pip-version-check --no-input install --no-compile --no-cache-dir)
    command -v python3 >/dev/null || no "there is no python3"
    rm -rf "$folder"
    mkdir -p "$folder"
    python3 -m venv "$folder" >"$folder.log" 2>&1 || no "python3 -m venv fails (Debian, Ubuntu: apt-get install python3-venv)"
    { timeout 300 "${pip[@]}" --no-deps "torch==$version" &&
        timeout 120 "${pip[@]}" typing_extensions filelock sympy networkx jinja2 fsspec; } >>"$folder.log" 2>&1 ||
        no "PyTorch $version cannot be installed, see $folder.log"
    make_stand_ins "$(echo "$folder"/lib/python3*/site-packages/torch/lib)" >>"$folder.log" 2>&1 || no "see $folder.log"
    "$folder/bin/torchrun" --help >>"$folder.log" 2>&1 || no "PyTorch $version does not start, see $folder.log"
    touch "$ready"
}

case ${1:-} in --find | --install) ;; *) sed -n '3,5s/^# \{0,1\}//p' "$0"; exit 2 ;; esac
if [ -n "${TORCHRUN:-}" ]; then
    works "$TORCHRUN" || no "TORCHRUN=$TORCHRUN does not work"
    echo "$TORCHRUN"
elif [ -e "$ready" ]; then
    echo "$folder/bin/torchrun"
elif works torchrun; then
    command -v torchrun
elif [ "$1" = --install ]; then
    install
    echo "$folder/bin/torchrun"
else
    no "tests/launch/torchrun.sh --install fetches one"
fi
