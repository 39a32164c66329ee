/* SPDX-License-Identifier: MIT */
/* The allocator's map: segments of device memory, cut into live blocks and free ranges. Host bookkeeping only: it makes no
 * device call and knows no stream; clocks are values that it carries.
 *
 * A free range is a run of fragments, each the bytes of earlier blocks of one stream with the clock that must be covered
 * before they are used again. Neighbouring ranges merge at once, their fragments only where nothing but age tells them
 * apart: an allocation takes the maximum over the fragments that it covers, so merging never makes a wait later. */
#ifndef FSDP_LIB_ALLOC_RANGES_H
#define FSDP_LIB_ALLOC_RANGES_H

#include "clock.h"
#include "tree.h"

enum { FSDP__BLOCK_ALIGNMENT = 256 };

typedef struct fsdp__fragment {
    struct fsdp__fragment *next;          /* in address order within its range */
    struct fsdp__fragment *older, *newer; /* among the pending ones of its stream */
    uint64_t begin, bytes;
    uint64_t freed; /* number of the free() that made it; 0: never used */
    fsdp__clock clock;
    int slot;     /* of the stream that its block was allocated for; -1: none */
    bool pending; /* that stream's future is not ordered after it yet: still active */
} fsdp__fragment;

typedef struct fsdp__block {
    fsdp__tree_node by_size, by_begin;  /* free ranges only */
    struct fsdp__block *before, *after; /* neighbours in the segment */
    uint64_t begin, bytes;
    uint64_t segment; /* number of its segment, in the order in which they were added */
    bool live;
    /* free */
    fsdp__fragment *fragments;
    uint64_t freed; /* the newest fragment's */
    /* live */
    fsdp__clock guard;   /* what had to be covered before the first use */
    fsdp__clock use;     /* what must be covered before the next owner's */
    uint32_t until_free; /* bit t: stream t uses it until it is freed */
    int slot;
    uint64_t taken; /* the open epoch of slot's stream when it was taken */
    const char *tag;
} fsdp__block;

typedef struct fsdp__ranges {
    const fsdp_host_allocator *host;
    fsdp__tree
        by_size; /* (bytes, freed, segment, begin): the smallest that fits first, among equals the one freed longest ago */
    fsdp__tree by_begin;
    uint64_t n_freed, n_segments;
    uint64_t pending_bytes;
    fsdp__fragment *oldest_pending[FSDP__SLOTS], *newest_pending[FSDP__SLOTS];
    fsdp__block *spare_blocks;
    fsdp__fragment *spare_fragments;
    void *chunks; /* everything they come from */
    uint32_t n_spare_blocks, n_spare_fragments;
    uint32_t n_live; /* live blocks: a fragment is kept spare for each, so that giving back cannot fail */
} fsdp__ranges;

void fsdp__ranges_init(fsdp__ranges *ranges, const fsdp_host_allocator *host);
void fsdp__ranges_fini(fsdp__ranges *ranges);
/* Have nodes at hand for n more cuts, so that what follows cannot fail. */
fsdp_status fsdp__ranges_reserve(fsdp__ranges *ranges, uint32_t n_blocks);

/* A new segment: one free range, never used. *out_first (may be NULL): its block. Needs reserve(1). */
fsdp__block *fsdp__ranges_add(fsdp__ranges *ranges, uint64_t begin, uint64_t bytes);
/* Take a free range that is a whole segment off the map. */
void fsdp__ranges_drop(fsdp__ranges *ranges, fsdp__block *segment);

/* The smallest free range of at least bytes; further ones by fsdp__ranges_next. NULL: none. */
fsdp__block *fsdp__ranges_best(const fsdp__ranges *ranges, uint64_t bytes);
fsdp__block *fsdp__ranges_next(fsdp__block *range);
/* The free range that holds all of [begin, begin + bytes), or NULL. */
fsdp__block *fsdp__ranges_at(const fsdp__ranges *ranges, uint64_t begin, uint64_t bytes);
/* Into *out_clock, the maximum over the fragments that [begin, begin + bytes) of a free range covers; returns the newest
 * free() among them. */
uint64_t fsdp__ranges_clock(const fsdp__block *range, uint64_t begin, uint64_t bytes, fsdp__clock *out_clock);

/* Cut [begin, begin + bytes) out of a free range: it becomes a live block (use empty, guard set). Needs reserve(2). */
fsdp__block *fsdp__ranges_take(fsdp__ranges *ranges, fsdp__block *range, uint64_t begin, uint64_t bytes);
/* Back to free, with block->use as its fragment's clock; merges with free neighbours. pending: not covered for its stream. */
void fsdp__ranges_give(fsdp__ranges *ranges, fsdp__block *block, bool pending);
/* This fragment is no longer pending. */
void fsdp__ranges_settle(fsdp__ranges *ranges, fsdp__fragment *fragment);

#endif
