/* SPDX-License-Identifier: MIT */
/* Pinned pieces: the caller's own and the library's staging, cut by the heap that fsdp_config.pinned names, or a region of
 * the device each. A heap has locks of its own and calls back for regions, so the context's lock is never held around it:
 * it is taken inside, to count a region or to look a piece up. */
#ifndef FSDP_LIB_PINNED_H
#define FSDP_LIB_PINNED_H

#include <stdatomic.h>

#include "fsdp/context.h"

enum { FSDP__PINNED_ALIGNMENT = 4096 }; /* of every piece: what DMA and direct file reads ask for */

typedef struct fsdp__pinned_piece {
    char *ptr;
    size_t bytes; /* as the heap or the device was asked */
    bool caller;  /* the caller's; otherwise staging */
} fsdp__pinned_piece;

typedef struct fsdp__pinned {
    fsdp_pinned_allocator table; /* open NULL: every piece is a region */
    fsdp_pinned_source source;
    void *heap;
    atomic_uint n_refused;      /* regions that the device refused: whose sentence the last error is */
    fsdp__pinned_piece *pieces; /* by address. From here on under the context's lock */
    size_t n_pieces, capacity;
    uint64_t live_bytes, allocs, frees;
} fsdp__pinned;

/* Check the table of a config: every function but stats, or none. */
fsdp_status fsdp__pinned_check(const fsdp_pinned_allocator *table);
/* Open the heap; the device is open. Errors: NO_HOST_MEMORY. */
fsdp_status fsdp__pinned_open(fsdp_context *ctx, const fsdp_pinned_allocator *table);
/* After every stream is idle: free the pieces that are left (staging that a stopped device held) and close the heap. */
void fsdp__pinned_close(fsdp_context *ctx);

/* A piece for staging, page-aligned, of any content. Errors: NO_HOST_MEMORY. */
fsdp_status fsdp__pinned_alloc(fsdp_context *ctx, size_t bytes, void **out_ptr);
/* The device is done with it. NULL is nothing. */
void fsdp__pinned_free(fsdp_context *ctx, void *ptr);

typedef enum fsdp__arena {
    FSDP__ARENA_HOST = 0,  /* fsdp_config.host */
    FSDP__ARENA_PINNED = 1 /* fsdp_config.pinned, or the pieces that are regions of their own */
} fsdp__arena;

/* False: nobody knows (libc, a table without stats). The lock is not held: a table's stats may take locks of its own. */
bool fsdp__arena_stats(fsdp_context *ctx, fsdp__arena arena, fsdp_arena_stats *out_stats);

#endif
