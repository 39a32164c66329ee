#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# layers.sh ROOT: who may include whom. sharding/ includes lib/, never the other way round; lib/host and lib/sim do not
# know each other, and neither knows lib/cuda; CUDA is seen in lib/cuda alone; public headers include public and standard ones, and
# two of them CUDA's and NCCL's; examples see <fsdp/…> and their own headers.
set -euo pipefail
cd "$1"
failed=0

includes() { # includes FOLDER… -> "file:name", for quotes and brackets
    find "$@" \( -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' \) -exec grep -HoE '^ *# *include *["<][^">]+' {} + 2>/dev/null |
        sed -E 's/: *# *include *["<]/:/' || true
}
names() { # names FOLDER -> regular expression of the headers that lie there
    find "$1" \( -name '*.h' -o -name '*.cuh' \) -printf '%f\n' 2>/dev/null | sed 's/\./\\./' | paste -sd '|' -
}
forbid() { # forbid WHO WHOM: no file under WHO includes a header of WHOM, by path or by name
    local theirs breach
    theirs=$(names "$2")
    breach=$(includes "$1" | grep -E "(^|[:/])$(basename "$2")/|[:/](${theirs:-no header})\$" | grep -v ':fsdp/' || true)
    [ -z "$breach" ] || { printf '%s includes %s:\n%s\n' "$1" "$2" "$breach"; failed=1; }
}
allow() { # allow WHO REGEX SENTENCE
    local breach
    breach=$(includes "$1" | grep -vE ":($2)\$" || true)
    [ -z "$breach" ] || { printf '%s: %s\n%s\n' "$1" "$3" "$breach"; failed=1; }
}

forbid lib sharding
forbid lib/host lib/sim
forbid lib/sim lib/host
forbid lib/host lib/cuda
forbid lib/sim lib/cuda
forbid lib/cuda lib/sim
forbid sharding lib/cuda
theirs='(cuda|nccl|cublas|driver_types|vector_types)[A-Za-z0-9_]*\.(h|hpp|cuh)' # of CUDA and NCCL
breach=$(includes lib sharding | grep -v '^lib/cuda/' | grep -E ":(fsdp/(cuda|nccl)\.h|$theirs)\$" || true)
[ -z "$breach" ] || { printf 'outside lib/cuda CUDA is not included:\n%s\n' "$breach"; failed=1; }
for header in include/fsdp/*.h; do
    more=''
    case $header in */cuda.h) more='|cuda_runtime_api\.h' ;; */nccl.h) more='|nccl\.h' ;; esac
    allow "$header" "fsdp/[a-z_]+\.h|std(bool|def|int)\.h$more" "public headers include public and three standard ones, cuda.h and nccl.h theirs"
done
own=$(find examples \( -name '*.h' -o -name '*.cuh' \) -printf '%f\n' 2>/dev/null | sed 's/\./\\./' | paste -sd '|' -)
breach=$(find examples \( -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' \) -exec grep -HnE '^ *# *include *"' {} + 2>/dev/null | grep -vE "\"(${own:-none})\"" || true)
[ -z "$breach" ] || { printf 'examples include <fsdp/…> and their own headers:\n%s\n' "$breach"; failed=1; }
internal=$(names lib)
breach=$(includes examples | grep -E ":($internal)\$" | grep -vE ":(${own:-none})\$" || true)
[ -z "$breach" ] || { printf 'examples include internals:\n%s\n' "$breach"; failed=1; }

# A public header and an internal one may share a name (context.h): the public one is always included as fsdp/context.h.
# Otherwise a file's name alone says which file it is; examples are programs of their own.
for tree in "lib sharding tests" examples; do
    # shellcheck disable=SC2086
    twice=$(find $tree \( -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' \) -printf '%f\n' 2>/dev/null | sort | uniq -d)
    [ -z "$twice" ] || { printf '%s: file names that stand twice:\n%s\n' "$tree" "$twice"; failed=1; }
done
exit "$failed"
