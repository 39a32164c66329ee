/* SPDX-License-Identifier: MIT */
/* What both arenas share: making, counting and asking jemalloc's tree of controls. This folder is a library of its own: it
 * calls jemalloc, libc and pthread, and nothing of libfsdp. */
#ifndef FSDP_LIB_JEMALLOC_ARENA_H
#define FSDP_LIB_JEMALLOC_ARENA_H

#include <jemalloc/jemalloc.h>
#include <stdatomic.h>

#include "fsdp/jemalloc.h"

typedef struct fsdp__arena_counts {
    atomic_uint_fast64_t allocs, frees;
} fsdp__arena_counts;

/* Set this thread's sentence, return status. */
fsdp_status fsdp__jemalloc_fail(fsdp_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* A new arena: of pages of the system, or of what hooks give; *hooks must outlive it. False: jemalloc makes none. */
bool fsdp__arena_create(extent_hooks_t *hooks, unsigned *out_arena);
/* Every piece is gone with it, freed or not; hooks get every region back before this returns. */
void fsdp__arena_destroy(unsigned arena);
/* Write one control of the arena, "retain_grow_limit". False: jemalloc refuses. */
bool fsdp__arena_set(unsigned arena, const char *control, void *value, size_t bytes);

/* bytes > 0, alignment a power of two. */
void *fsdp__arena_alloc(unsigned arena, fsdp__arena_counts *counts, size_t bytes, size_t alignment);
void fsdp__arena_free(unsigned arena, fsdp__arena_counts *counts, void *ptr, size_t bytes, size_t alignment);
/* Everything but regions. */
void fsdp__arena_read(unsigned arena, fsdp__arena_counts *counts, fsdp_arena_stats *out_stats);

#endif
