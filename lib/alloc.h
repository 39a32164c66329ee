/* SPDX-License-Identifier: MIT */
/* The allocator's inner door, for planned ranges: the caller holds the context's lock, collects needs over several ranges
 * before it waits, and keeps block handles. Public calls are in include/fsdp/alloc.h. */
#ifndef FSDP_LIB_ALLOC_H
#define FSDP_LIB_ALLOC_H

#include "alloc_history.h"
#include "alloc_ranges.h"
#include "alloc_table.h"
#include "fsdp/alloc.h"
#include "fsdp/backend.h"

/* What taking and giving look at comes first. */
struct fsdp_allocator {
    fsdp_context *ctx;
    fsdp__history history;
    fsdp_alloc_stats stats;
    uint64_t step_hash;               /* as stats.trace_hash, since fsdp__allocator_step */
    uint64_t settled_at[FSDP__SLOTS]; /* clocks.n_raised when the slot's pending fragments were looked through */
    fsdp__ranges ranges;
    fsdp_allocator_config config; /* its name is the one below */
    char name[32];
    const char *model; /* whose planned range it is; NULL: a public allocator */
    fsdp_memory_kind kind;
    fsdp__table live;       /* of the public calls */
    uint64_t refused_bytes; /* what the device had no room for last … */
    uint64_t refused_at;    /* … and ctx->n_device_frees then: since nothing was given back, it has none now */
    fsdp_allocator *next_pool, *previous_pool; /* of the context's */
};

/* One contiguous range of `bytes` (rounded to the device's granularity), for collectives, taken now, never grown. May be 0
 * bytes.
 * model: its name, which outlives the range. */
fsdp_status fsdp__allocator_create_range(fsdp_context *ctx, const char *model, const char *name, uint64_t bytes,
                                         fsdp_allocator **out_allocator);
/* Give the range back, blocks and all; the device is idle. NULL is nothing. */
void fsdp__allocator_destroy_range(fsdp_allocator *a);
/* Address of its first byte. */
void *fsdp__allocator_base(const fsdp_allocator *a);

/* Take [offset, offset + bytes) for use on s; NULL if somebody has any of it. What the bytes need goes into need (REUSE);
 * nothing waits yet. fsdp__allocator_reserve comes before each. */
fsdp__block *fsdp__allocator_take_at(fsdp_allocator *a, uint64_t offset, uint64_t bytes, fsdp_stream *s,
                                     const char *owner, fsdp__need *need);
/* Best fit in the range instead, its low end; NULL if nothing fits. By sizes alone: what a rank's host has recorded or waited
 * for beside the step is in its clocks, and places decide what is evicted and gathered: the same on every rank. */
fsdp__block *fsdp__allocator_take(fsdp_allocator *a, uint64_t bytes, fsdp_stream *s, const char *owner,
                                  fsdp__need *need);
fsdp_status fsdp__allocator_reserve(fsdp_allocator *a);
/* All that has touched the block, by its edges; if nothing has, its guard is passed on. Before give. */
void fsdp__allocator_use(fsdp_allocator *a, fsdp__block *block, const fsdp__edges *edges);
/* Back to the pool. */
void fsdp__allocator_give(fsdp_allocator *a, fsdp__block *block);
/* Remember that the block goes because another one needs room, or that there was none. */
void fsdp__allocator_note(fsdp_allocator *a, fsdp__alloc_event_kind kind, const fsdp__block *block, uint64_t bytes,
                          const char *owner);
void fsdp__allocator_note_segment(fsdp_allocator *a, fsdp__alloc_event_kind kind, uint32_t number);
/* Take a segment of so many bytes. Needs fsdp__ranges_reserve. */
fsdp_status fsdp__allocator_grow(fsdp_allocator *a, uint64_t bytes, fsdp__block **out_range);
/* Grow by what the config says, within the budget; NO_MEMORY says all. */
fsdp_status fsdp__allocator_grow_for(fsdp_allocator *a, uint64_t bytes, const char *owner, fsdp__block **out_range);
/* The same where waiting would do, too: without room *out_range stays as it is; that is no error, nor anybody's last one. */
fsdp_status fsdp__allocator_grow_if_possible(fsdp_allocator *a, uint64_t bytes, fsdp__block **out_range);
/* Hash of the places, streams and hand-overs since the last call; the next step begins. */
uint64_t fsdp__allocator_step(fsdp_allocator *a);

/* Nothing of this slot is pending any more: its stream is gone, and idle. */
void fsdp__allocator_settle_slot(fsdp_allocator *a, int slot);

/* Bytes of the largest free range. */
uint64_t fsdp__allocator_largest(const fsdp_allocator *a);
/* Append to text who holds what: owners by bytes, then all blocks. */
void fsdp__allocator_describe(const fsdp_allocator *a, char *text, size_t text_bytes);
/* NO_MEMORY with all that a caller can do about it. room: what it could still grow by; why: the last word on that. */
fsdp_status fsdp__allocator_fail(fsdp_allocator *a, uint64_t bytes, uint64_t room, const char *owner, const char *why);

#endif
