#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# symbols_used.sh NM OBJDUMP LIBFSDP.A: the library does not print, does not end the process, does not touch its
# environment or signals, takes host memory in one file only, and has no writable global. What nvcc adds to a .cu file by itself
# is excepted by name: handles of its GPU code and of kernels, registered before main and given back by atexit.
set -euo pipefail
nm=$1 objdump=$2 static=$3
failed=0
undefined=$("$nm" -A -u "$static" | sed -E 's/^[^:]*:([^:]*):.* U /\1 /; s/@.*//')

calls=$(grep -E ' (printf|__printf_chk|puts|putchar|vprintf|__vprintf_chk|perror|stdout|stderr|exit|_exit|_Exit|quick_exit|abort|atexit|setenv|unsetenv|putenv|signal|sigaction|system|fork)$' <<<"$undefined" |
    grep -vE '\.cu\.o atexit$' || true)
[ -z "$calls" ] || { printf 'a library does not call these:\n%s\n' "$calls"; failed=1; }

memory=$(grep -E ' (malloc|calloc|realloc|free|aligned_alloc|posix_memalign|strdup|strndup|asprintf|vasprintf)$' <<<"$undefined" |
    grep -v '^hostmem\.c\.o ' || true)
[ -z "$memory" ] || { printf 'host memory is taken through lib/hostmem.h:\n%s\n' "$memory"; failed=1; }

# Thread-local data has sections of its own; tables of pointers lie in .data.rel.ro, which nobody writes.
globals=$("$objdump" -t "$static" | awk '/file format/ { object = $1 } / O +\.(data|bss|data\.rel|data\.rel\.local)[ \t]/ { print object, $NF }' |
    grep -vE '\.cu\.o:? _Z[A-Z0-9]+(__device_stub__|__cudaFatCubinHandle|__nv_|____nv_)' || true)
[ -z "$globals" ] || { printf 'writable globals:\n%s\n' "$globals"; failed=1; }
exit "$failed"
