/* SPDX-License-Identifier: MIT */
/* The arena for host memory: fsdp_config.host by jemalloc. Its own record lies in it. */
#include "arena.h"

typedef struct host_arena {
    unsigned arena;
    fsdp__arena_counts counts;
} host_arena;

enum { RECORD_ALIGNMENT = 64 };

static void *host_alloc(void *arg, size_t bytes, size_t alignment)
{
    host_arena *h = arg;
    return fsdp__arena_alloc(h->arena, &h->counts, bytes, alignment);
}

static void host_free(void *arg, void *ptr, size_t bytes, size_t alignment)
{
    host_arena *h = arg;
    fsdp__arena_free(h->arena, &h->counts, ptr, bytes, alignment);
}

static void host_stats(void *arg, fsdp_arena_stats *out_stats)
{
    host_arena *h = arg;
    fsdp__arena_read(h->arena, &h->counts, out_stats);
}

fsdp_status fsdp_jemalloc_host_create(fsdp_host_allocator *out_host)
{
    if (out_host == NULL) return fsdp__jemalloc_fail(FSDP_ERR_ARG, "fsdp_jemalloc_host_create: out_host is NULL");
    unsigned arena;
    if (!fsdp__arena_create(NULL, &arena))
        return fsdp__jemalloc_fail(FSDP_ERR_NO_HOST_MEMORY, "fsdp_jemalloc_host_create: jemalloc makes no arena");
    fsdp__arena_counts none = {0};
    host_arena *h = fsdp__arena_alloc(arena, &none, sizeof *h, RECORD_ALIGNMENT);
    if (h == NULL) {
        fsdp__arena_destroy(arena);
        return fsdp__jemalloc_fail(FSDP_ERR_NO_HOST_MEMORY, "fsdp_jemalloc_host_create: no host memory for %zu bytes",
                                   sizeof *h);
    }
    h->arena = arena;
    atomic_init(&h->counts.allocs, 0);
    atomic_init(&h->counts.frees, 0);
    *out_host = (fsdp_host_allocator){host_alloc, host_free, h, host_stats};
    return FSDP_OK;
}

fsdp_status fsdp_jemalloc_host_destroy(fsdp_host_allocator *host)
{
    if (host == NULL) return fsdp__jemalloc_fail(FSDP_ERR_ARG, "fsdp_jemalloc_host_destroy: host is NULL");
    if (host->alloc == NULL) return FSDP_OK;
    if (host->alloc != host_alloc)
        return fsdp__jemalloc_fail(FSDP_ERR_ARG,
                                   "fsdp_jemalloc_host_destroy: the table is not from fsdp_jemalloc_host_create");
    host_arena *h = host->arg;
    uint64_t live = atomic_load(&h->counts.allocs) - atomic_load(&h->counts.frees);
    if (live > 0)
        return fsdp__jemalloc_fail(
            FSDP_ERR_STATE, "fsdp_jemalloc_host_destroy: %llu pieces live: destroy the contexts that use it first",
            (unsigned long long)live);
    fsdp__arena_destroy(h->arena); /* the record goes with it */
    *host = (fsdp_host_allocator){NULL, NULL, NULL, NULL};
    return FSDP_OK;
}
