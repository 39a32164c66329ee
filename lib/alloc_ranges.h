/* SPDX-License-Identifier: MIT */
/* The allocator's map: segments of device memory, cut into blocks. Host bookkeeping only: it makes no device call and knows
 * no stream; frontiers are values that it carries.
 *
 * A block is live or free. A free one is a fragment: the bytes of earlier blocks of one stream, with the frontier that must
 * be covered before they are used again. A free range is a longest run of fragments. Giving back makes a live block a
 * fragment where it lies, so it takes no memory and cannot fail. Fragments that touch become one only where nothing but age
 * tells them apart: an allocation takes the maximum over the fragments that it covers, so merging never makes a wait later.
 *
 * Ranges lie in bins, eight for each doubling of the size, each a tree; a bit says which bins have any. So the best fit is
 * found without walking ranges that are too small, and most bins hold one range or none. Where places are asked for, ranges lie
 * in one tree by address instead: each take and give of a step changes it, and a best fit, for what is off plan, looks at all
 * ranges. */
#ifndef FSDP_LIB_ALLOC_RANGES_H
#define FSDP_LIB_ALLOC_RANGES_H

#include "frontier.h"
#include "tree.h"

enum {
    FSDP__BLOCK_ALIGNMENT = 256,
    FSDP__BINS = 448, /* up to 2^61 bytes */
    FSDP__NO_SLOT = 255
};

/* What every walk over neighbours looks at lies in the first cache line, the rest of a range in the second. */
typedef struct fsdp__block {
    _Alignas(64) struct fsdp__block *before, *after; /* neighbours in the segment, by address */
    uint64_t begin, bytes;
    /* live: its uses so far. Fragment: what must be covered before the next owner's first use. */
    fsdp__frontier use;
    uint32_t segment;
    uint16_t until_free; /* live; bit t: stream t uses it until it is freed */
    uint8_t slot;        /* of the stream that it is, or was, taken for; FSDP__NO_SLOT: never used */
    bool live : 1;
    bool pending : 1; /* fragment: its own stream's future is not ordered after it yet, so it is still active */
    union {
        struct {
            fsdp__frontier guard; /* what had to be covered before the first use */
            uint64_t taken;       /* the open epoch of slot's stream when it was taken */
            const char *owner;    /* never NULL */
        };
        struct {
            uint64_t freed;           /* number of the free() that made it; 0: never used */
            struct fsdp__block *last; /* first fragment of a range: the last one. Last: the first. Else: no meaning */
            uint64_t range_bytes, range_freed; /* first of a range: of all of it; the last free() that touched it */
            fsdp__tree_node node;              /* first of a range: in its bin, or by address */
            struct fsdp__block *older, *newer; /* among the pending ones of its stream */
        };
    };
} fsdp__block;

typedef struct fsdp__segment {
    uint64_t begin, bytes; /* bytes 0: the number is free */
    fsdp__block *first;    /* its lowest block */
} fsdp__segment;

/* The pending fragments of one stream. */
typedef struct fsdp__pending {
    fsdp__block *oldest, *newest;
} fsdp__pending;

/* What taking and giving look at comes first. */
typedef struct fsdp__ranges {
    _Alignas(64) fsdp__segment *segments;
    size_t n_segments;
    fsdp__tree by_begin; /* where places are asked for */
    uint64_t serial;     /* for the trees */
    uint64_t n_freed;
    uint64_t pending_bytes;
    bool placed; /* places are asked for, by address: by_begin instead of bins */
    uint32_t n_live;
    uint32_t n_spare, n_blocks;

    fsdp__block *spare;
    fsdp__wides wides;
    fsdp__pending pending[FSDP__SLOTS];

    const fsdp_host_allocator *host;
    void *chunks;                    /* everything that blocks come from */
    size_t segment_capacity, n_gone; /* n_gone: numbers that are free */
    uint32_t newest;                 /* number of the segment that was added last */
    uint64_t has_ranges[FSDP__BINS / 64];
    /* By (bytes, touched, segment, begin): smallest first, among equals the one touched longest ago. */
    fsdp__tree bin[FSDP__BINS];
} fsdp__ranges;

void fsdp__ranges_init(fsdp__ranges *ranges, const fsdp_host_allocator *host, bool placed);
void fsdp__ranges_fini(fsdp__ranges *ranges);
/* Have at hand what a new segment and one take need and, where places are asked for, what the uses of all live blocks may
 * need: what follows cannot fail then. Errors: NO_HOST_MEMORY. */
__attribute__((cold)) fsdp_status fsdp__ranges_reserve_more(fsdp__ranges *ranges);
static inline fsdp_status fsdp__ranges_reserve(fsdp__ranges *ranges)
{
    uint32_t n_wides = 2 + (ranges->placed ? ranges->n_live : 0);
    if (ranges->n_spare >= 3 && ranges->wides.n_spare >= n_wides) return FSDP_OK;
    return fsdp__ranges_reserve_more(ranges);
}

/* Room for one more segment, and its number. */
fsdp_status fsdp__ranges_reserve_segment(fsdp__ranges *ranges, uint32_t *out_number);
/* A new segment: one free range, never used. Needs reserve and its number. */
fsdp__block *fsdp__ranges_add(fsdp__ranges *ranges, uint32_t number, uint64_t begin, uint64_t bytes);
/* Nothing in the segment is live. */
static inline bool fsdp__ranges_is_free(const fsdp__ranges *ranges, uint32_t number)
{
    const fsdp__block *first = ranges->segments[number].first;
    return !first->live && first->range_bytes == ranges->segments[number].bytes;
}
/* Take such a segment off the map. */
void fsdp__ranges_drop(fsdp__ranges *ranges, uint32_t number);

/* The smallest free range of at least bytes (its first fragment); further ones by fsdp__ranges_next. NULL: none. Among equals
 * the one touched longest ago. */
fsdp__block *fsdp__ranges_best(const fsdp__ranges *ranges, uint64_t bytes);
fsdp__block *fsdp__ranges_next(const fsdp__ranges *ranges, fsdp__block *range);
/* The free range that holds all of [begin, begin + bytes), or NULL. Only where places are asked for. */
fsdp__block *fsdp__ranges_at(const fsdp__ranges *ranges, uint64_t begin, uint64_t bytes);

/* Cut [begin, begin + bytes) out of a free range: it becomes a live block (no use yet, guard set). fragment: of the range, at
 * or below begin; the walk to begin starts there. Needs reserve. */
fsdp__block *fsdp__ranges_take(fsdp__ranges *ranges, fsdp__block *range, fsdp__block *fragment, uint64_t begin,
                               uint64_t bytes);
/* Back to free: block->use is its frontier from now on. pending: not covered for its stream. */
void fsdp__ranges_give(fsdp__ranges *ranges, fsdp__block *block, bool pending);
/* This fragment is no longer pending. */
void fsdp__ranges_settle(fsdp__ranges *ranges, fsdp__block *fragment);

#endif
