#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# headers_cuda.sh ROOT CC [FOLDER…]: no public header but cuda.h and nccl.h pulls in a header of CUDA or NCCL, by whatever way.
# FOLDERs are where those lie: then it is also seen that the two do.
set -euo pipefail
root=$1 cc=$2
shift 2
system=()
for each; do system+=(-isystem "$each"); done
theirs='(^|/)(cuda|nccl|cublas|cudnn|curand|cufft|cusparse|cusolver|nvtx|nvToolsExt|driver_types|vector_types|device_types|builtin_types)[A-Za-z0-9_]*\.(h|hpp|hxx|cuh)$'
list=$(mktemp)
trap 'rm -f "$list"' EXIT
# pulled_by HEADER: CUDA's and NCCL's files among all that it includes. Status 1: one that it includes is not there.
pulled_by() {
    "$cc" -M -x c -std=c11 -I"$root/include" "${system[@]}" - <<<"#include \"fsdp/$1\"" >"$list" || return 1
    tr -s ' \\' '\n' <"$list" | grep -v '/include/fsdp/' | grep -E "$theirs" | head -n 3 | xargs || true
}
failed=0 n=0
for header in "$root"/include/fsdp/*.h; do
    name=$(basename "$header")
    if [ "$name" = cuda.h ] || [ "$name" = nccl.h ]; then
        [ $# = 0 ] || [ -n "$(pulled_by "$name")" ] || { echo "fsdp/$name pulls in no CUDA: what this test looks for is wrong"; failed=1; }
        continue
    fi
    pulled=$(pulled_by "$name") || pulled="what is not there, see above"
    [ -z "$pulled" ] || { echo "fsdp/$name pulls in $pulled"; failed=1; }
    n=$((n + 1))
done
echo "$n headers"
[ "$n" -gt 0 ] && exit "$failed"
