#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# symbols.sh ROOT CC NM LIBFSDP.SO LIBFSDP.A [HEADER [FOLDER…]]: what libfsdp.so exports is what the public headers declare
# FSDP_API, no more and no less: nothing of the CUDA runtime that lies in it; and libfsdp.a defines no global name outside fsdp_
# that could meet one of the program's. HEADER is a library's own, jemalloc.h: then the same for that library and what it adds to
# the headers that it includes; fsdp.h is libfsdp's own. FOLDERs are CUDA's and NCCL's headers, where libfsdp was built with them:
# cuda.h and nccl.h are headers of it then.
set -euo pipefail
root=$1 cc=$2 nm=$3 shared=$4 static=$5 only=${6:-fsdp.h}
shift $(($# < 6 ? $# : 6))
system=()
for each; do system+=(-isystem "$each"); done
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# One declaration a line. FSDP_API is a visibility attribute once the compiler has expanded it; the name declared is the
# first one before a "(", but fields of the backend tables, "fsdp_status (*open)(…)", declare nothing.
declared_by() { # declared_by HEADER…
    for header; do printf '#include "%s"\n' "$header"; done |
    "$cc" -E -P -std=c11 -I"$root/include" "${system[@]}" - | tr '\n' ' ' | tr ';{}' '\n\n\n' | grep -v '^ *typedef' |
    sed -E 's/__attribute__ *\(\((format|warn_unused)[^()]*(\([^()]*\))?[^()]*\)\)//g' |
    grep -E '\bfsdp_[a-z0-9_]+ *\([^*]' || true
}
own=("$root"/include/fsdp/{jemalloc,mpi}.h) # of libraries beside libfsdp
[ $# -gt 0 ] || own+=("$root"/include/fsdp/{cuda,nccl}.h)
mapfile -t main < <(printf '%s\n' "$root"/include/fsdp/*.h | grep -vxFf <(printf '%s\n' "${own[@]}"))
declared_by "${main[@]}" >"$folder/declarations"
if [ "$only" != fsdp.h ]; then
    mv "$folder/declarations" "$folder/of_main"
    declared_by "$root/include/fsdp/$only" | grep -vxFf "$folder/of_main" >"$folder/declarations"
fi
names() { sed -E 's/__attribute__ *\(\(visibility\("default"\)\)\)//' | grep -oE '\bfsdp_[a-z0-9_]+ *\([^*]' | sed 's/ *(.*//' | sort -u; }
grep 'visibility("default")' "$folder/declarations" | names >"$folder/declared"
grep -v 'visibility("default")' "$folder/declarations" | names >"$folder/unmarked" || true
"$nm" -D --defined-only "$shared" | awk '{ print $NF }' | sort -u >"$folder/exported"
# Weak ones give way to the program's: constructors of CUDA's vector types.
"$nm" -g --defined-only "$static" | awk 'NF == 3 && $2 !~ /^[WVu]$/ { print $3 }' | sort -u >"$folder/global"

failed=0
complain() { # complain TEXT FILE
    [ -s "$2" ] || return 0
    echo "$1"
    sed 's/^/    /' "$2"
    failed=1
}
comm -23 "$folder/declared" "$folder/exported" >"$folder/missing"
comm -13 "$folder/declared" "$folder/exported" >"$folder/undeclared"
grep -v '^fsdp_' "$folder/global" >"$folder/foreign" || true
complain "declared in a public header without FSDP_API:" "$folder/unmarked"
complain "declared FSDP_API and not exported:" "$folder/missing"
complain "exported and not declared FSDP_API:" "$folder/undeclared"
complain "global names in libfsdp.a outside fsdp_:" "$folder/foreign"
echo "$(wc -l <"$folder/declared") declared, $(wc -l <"$folder/exported") exported"
[ -s "$folder/declared" ] && exit "$failed"
