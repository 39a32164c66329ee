/* SPDX-License-Identifier: MIT */
#include "arena.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local char last_error[256];

const char *fsdp_jemalloc_last_error(void) { return last_error; }

fsdp_status fsdp__jemalloc_fail(fsdp_status status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(last_error, sizeof last_error, format, args);
    va_end(args);
    return status;
}

/* The argument of experimental.arenas_create_ext (jemalloc 5.3; its header does not declare it). */
typedef struct arena_config {
    extent_hooks_t *hooks;
    bool metadata_use_hooks;
} arena_config;

bool fsdp__arena_create(extent_hooks_t *hooks, unsigned *out_arena)
{
    size_t bytes = sizeof *out_arena;
    if (hooks == NULL) return mallctl("arenas.create", out_arena, &bytes, NULL, 0) == 0;
    /* jemalloc's own records in pinned memory would cost 2 MiB of it at 2 MiB's alignment. */
    arena_config config = {hooks, false};
    if (mallctl("experimental.arenas_create_ext", out_arena, &bytes, &config, sizeof config) == 0) return true;
    bytes = sizeof *out_arena;
    return mallctl("arenas.create", out_arena, &bytes, &hooks, sizeof hooks) == 0;
}

bool fsdp__arena_set(unsigned arena, const char *control, void *value, size_t bytes)
{
    char name[64];
    snprintf(name, sizeof name, "arena.%u.%s", arena, control);
    return mallctl(name, NULL, NULL, value, bytes) == 0;
}

void fsdp__arena_destroy(unsigned arena) { (void)fsdp__arena_set(arena, "destroy", NULL, 0); }

/* No thread cache: a piece may be freed by another thread than the one that took it, and a cache would hold pieces of an
 * arena that is destroyed. The alignment is always given: a large piece without it lies at any offset of its page. */
static int flags(unsigned arena, size_t alignment)
{
    return (int)(MALLOCX_ARENA(arena) | MALLOCX_TCACHE_NONE | MALLOCX_ALIGN(alignment));
}

void *fsdp__arena_alloc(unsigned arena, fsdp__arena_counts *counts, size_t bytes, size_t alignment)
{
    void *ptr = mallocx(bytes, flags(arena, alignment));
    if (ptr != NULL) atomic_fetch_add_explicit(&counts->allocs, 1, memory_order_relaxed);
    return ptr;
}

void fsdp__arena_free(unsigned arena, fsdp__arena_counts *counts, void *ptr, size_t bytes, size_t alignment)
{
    sdallocx(ptr, bytes, flags(arena, alignment));
    atomic_fetch_add_explicit(&counts->frees, 1, memory_order_relaxed);
}

static uint64_t read_stat(unsigned arena, const char *what)
{
    char name[64];
    size_t value = 0, bytes = sizeof value;
    snprintf(name, sizeof name, "stats.arenas.%u.%s", arena, what);
    return mallctl(name, &value, &bytes, NULL, 0) == 0 ? value : 0;
}

void fsdp__arena_read(unsigned arena, fsdp__arena_counts *counts, fsdp_arena_stats *out_stats)
{
    uint64_t epoch = 1;
    size_t page = 4096, bytes = sizeof page;
    (void)mallctl("epoch", NULL, NULL, &epoch, sizeof epoch);
    (void)mallctl("arenas.page", &page, &bytes, NULL, 0);
    *out_stats = (fsdp_arena_stats){
        .size = sizeof *out_stats,
        .allocated_bytes = read_stat(arena, "small.allocated") + read_stat(arena, "large.allocated"),
        .active_bytes = read_stat(arena, "pactive") * page,
        .mapped_bytes = read_stat(arena, "mapped"),
        .allocs = atomic_load_explicit(&counts->allocs, memory_order_relaxed),
        .frees = atomic_load_explicit(&counts->frees, memory_order_relaxed),
    };
}
