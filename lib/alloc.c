/* SPDX-License-Identifier: MIT */
/* Fenced blocks with vector clocks: policy over the map of alloc_ranges.c. docs/allocator.md tells the whole of it. */
#include "alloc.h"

#include <stdio.h>

#include "alloc_place.h"
#include "check.h"
#include "context.h"
#include "device.h"
#include "graph.h"
#include "hash.h"
#include "mutate.h"
#include "stream.h"

/* Pending fragments leave as their stream's clock comes to cover them, in any order; while it stands still, none does. */
static void settle_pending(fsdp_allocator *a)
{
    fsdp__clocks *clocks = &a->ctx->clocks;
    for (int slot = 0; slot < clocks->n_slots; slot++) {
        if (a->settled_at[slot] == clocks->n_raised[slot] && clocks->stream[slot] != NULL) continue;
        a->settled_at[slot] = clocks->n_raised[slot];
        for (fsdp__block *f = a->ranges.pending[slot].oldest, *newer; f != NULL; f = newer) {
            newer = f->newer;
            if (clocks->stream[slot] == NULL || fsdp__frontier_covered(&clocks->now[slot], &f->use))
                fsdp__ranges_settle(&a->ranges, f);
        }
    }
}

void fsdp__allocator_settle_slot(fsdp_allocator *a, int slot)
{
    while (a->ranges.pending[slot].oldest != NULL) fsdp__ranges_settle(&a->ranges, a->ranges.pending[slot].oldest);
}

static void note_active_peak(fsdp_allocator *a)
{
    settle_pending(a);
    a->stats.active = a->stats.allocated + a->ranges.pending_bytes;
    if (a->stats.active > a->stats.active_peak) a->stats.active_peak = a->stats.active;
}

/* What is pending may be covered by now: it is looked through only where it would make a peak. */
static inline void note_bytes(fsdp_allocator *a)
{
    fsdp_alloc_stats *st = &a->stats;
    if (st->allocated > st->allocated_peak) st->allocated_peak = st->allocated;
    st->active = st->allocated + a->ranges.pending_bytes;
    if (st->active > st->active_peak) note_active_peak(a);
}

static inline uint64_t offset_of(const fsdp_allocator *a, const fsdp__block *block)
{
    return block->begin - a->ranges.segments[block->segment].begin;
}

static inline void remember(fsdp_allocator *a, fsdp__alloc_event_kind kind, const fsdp__block *block, uint64_t offset,
                            int slot, int other)
{
    fsdp__alloc_event event = {offset,         block->bytes,  block->owner,  a->stats.allocated, a->stats.reserved,
                               block->segment, (uint8_t)kind, (uint8_t)slot, (uint8_t)other};
    fsdp__history_add(&a->history, &event);
}

void fsdp__allocator_note(fsdp_allocator *a, fsdp__alloc_event_kind kind, const fsdp__block *block, uint64_t bytes,
                          const char *owner)
{
    fsdp__block none = {.bytes = bytes, .owner = owner};
    if (block != NULL) remember(a, kind, block, offset_of(a, block), block->slot, FSDP__NO_SLOT);
    else remember(a, kind, &none, FSDP__NO_PLACE, FSDP__NO_SLOT, FSDP__NO_SLOT);
}

void fsdp__allocator_note_segment(fsdp_allocator *a, fsdp__alloc_event_kind kind, uint32_t number)
{
    fsdp__block all = {.bytes = a->ranges.segments[number].bytes, .owner = "", .segment = number};
    remember(a, kind, &all, 0, FSDP__NO_SLOT, FSDP__NO_SLOT);
}

/* ---- Taking and giving ---- */

/* Which streams the block waits for goes into the history. */
static void note_hand_over(fsdp_allocator *a, const fsdp__block *block, const fsdp_stream *s, uint32_t missing)
{
    uint64_t offset = offset_of(a, block);
    for (uint32_t bits = missing; bits != 0; bits &= bits - 1)
        remember(a, FSDP__ALLOC_EVENT_WAIT, block, offset, s->slot, __builtin_ctz(bits));
}

static inline uint64_t extend(uint64_t hash, uint64_t offset, const fsdp__block *block, uint32_t missing)
{
    uint64_t what = (uint64_t)missing << 32 | (uint64_t)block->segment << 8 | block->slot;
    return fsdp__mix(hash ^ (offset + block->bytes * 0x9e3779b97f4a7c15ull + what * 0xc2b2ae3d27d4eb4full));
}

/* missing: the streams that s has been, or will be, made to wait for. */
static inline void note_taken(fsdp_allocator *a, fsdp__block *block, const fsdp_stream *s, uint32_t missing)
{
    uint64_t offset = offset_of(a, block);
    a->stats.allocated += block->bytes;
    a->stats.allocs++;
    note_bytes(a);
    remember(a, FSDP__ALLOC_EVENT_ALLOC, block, offset, block->slot, FSDP__NO_SLOT);
    if (missing != 0) note_hand_over(a, block, s, missing);
    a->stats.trace_hash = extend(a->stats.trace_hash, offset, block, missing);
    if (a->ranges.placed) a->step_hash = extend(a->step_hash, offset, block, 0);
}

static inline fsdp__block *take(fsdp_allocator *a, const fsdp__place *p, uint64_t bytes, const fsdp_stream *s,
                                const char *owner)
{
    fsdp__block *block = fsdp__ranges_take(&a->ranges, p->range, p->fragment, p->begin, bytes);
    block->slot = (uint8_t)s->slot;
    block->taken = fsdp__epoch(s);
    block->owner = owner;
    return block;
}

/* For planned ranges: the needs of several are gathered before anything waits. */
static fsdp__block *take_and_need(fsdp_allocator *a, const fsdp__place *p, uint64_t bytes, fsdp_stream *s,
                                  const char *owner, fsdp__need *need)
{
    fsdp__block *block = take(a, p, bytes, s, owner);
    const fsdp__clock *now = &a->ctx->clocks.now[s->slot];
    note_taken(a, block, s, fsdp__need_frontier(need, &block->guard, now, FSDP_REASON_REUSE));
    return block;
}

fsdp_status fsdp__allocator_reserve(fsdp_allocator *a) { return fsdp__ranges_reserve(&a->ranges); }

fsdp__block *fsdp__allocator_take_at(fsdp_allocator *a, uint64_t offset, uint64_t bytes, fsdp_stream *s,
                                     const char *owner, fsdp__need *need)
{
    if (a->ranges.n_segments == 0) return NULL;
    uint64_t begin = a->ranges.segments[0].begin + offset;
    fsdp__block *range = fsdp__ranges_at(&a->ranges, begin, bytes);
    fsdp__place p = {range, range, begin, 0, false};
    return p.range != NULL ? take_and_need(a, &p, bytes, s, owner, need) : NULL;
}

fsdp__block *fsdp__allocator_take(fsdp_allocator *a, uint64_t bytes, fsdp_stream *s, const char *owner,
                                  fsdp__need *need)
{
    fsdp__block *range = fsdp__ranges_best(&a->ranges, bytes);
    fsdp__place p = {range, range, range != NULL ? range->begin : 0, 0, false};
    return p.range != NULL ? take_and_need(a, &p, bytes, s, owner, need) : NULL;
}

uint64_t fsdp__allocator_step(fsdp_allocator *a)
{
    uint64_t hash = a->step_hash;
    a->step_hash = FSDP__HASH_SEED;
    return hash;
}

static inline void use_at(fsdp_allocator *a, fsdp__block *block, fsdp__point point)
{
    fsdp__frontier_add(&a->ranges.wides, &block->use, (int)(point % FSDP__SLOTS), point / FSDP__SLOTS);
}

void fsdp__allocator_use(fsdp_allocator *a, fsdp__block *block, const fsdp__edges *edges)
{
    if (edges->written == 0) {
        if (!FSDP__MUTATED(UNTOUCHED_LOST)) fsdp__frontier_max(&a->ranges.wides, &block->use, &block->guard);
        return;
    }
    use_at(a, block, edges->written);
    for (uint64_t i = 0; i < edges->n_reads; i++) use_at(a, block, edges->read[i]);
}

void fsdp__allocator_give(fsdp_allocator *a, fsdp__block *block)
{
    fsdp__clocks *clocks = &a->ctx->clocks;
    if (FSDP__MUTATED(FREE_WRONG_STREAM) && block->until_free != 0)
        block->until_free = (uint16_t)(1u << (block->slot + 1) % clocks->n_slots);
    for (uint32_t bits = block->until_free; bits != 0; bits &= bits - 1) {
        int t = __builtin_ctz(bits);
        const fsdp_stream *s = clocks->stream[t];
        if (s != NULL && fsdp__frontier_at(&block->use, t) > s->first_fence)
            fsdp__frontier_add(&a->ranges.wides, &block->use, t, fsdp__epoch(s));
        else fsdp__frontier_remove(&block->use, t); /* released, so drained; its slot may be another's by now */
    }
    a->stats.allocated -= block->bytes;
    a->stats.frees++;
    remember(a, FSDP__ALLOC_EVENT_FREE, block, offset_of(a, block), block->slot, FSDP__NO_SLOT);
    bool pending =
        clocks->stream[block->slot] != NULL && !fsdp__frontier_covered(&clocks->now[block->slot], &block->use);
    fsdp__ranges_give(&a->ranges, block, pending);
    note_bytes(a);
}

/* ---- Allocating ---- */

static fsdp_status wait_counted(fsdp_allocator *a, fsdp_stream *s, const fsdp__need *need)
{
    uint64_t waits = a->ctx->counters.waits;
    fsdp_status status = fsdp__wait_need(s, need);
    a->stats.waits += a->ctx->counters.waits - waits;
    return status;
}

/* s comes after whoever used the place last. *out_missing: the streams that it was not behind before. */
static fsdp_status wait_for_place(fsdp_allocator *a, const fsdp__place *p, uint64_t bytes, fsdp_stream *s,
                                  uint32_t *out_missing)
{
    if (FSDP__MUTATED(NO_WAIT_AT_ALLOC)) return FSDP_OK;
    fsdp__need need;
    need.slots = 0;
    const fsdp__block *f = p->fragment;
    while (f->begin + f->bytes <= p->begin) f = f->after;
    for (; f != NULL && f->begin < p->begin + bytes; f = f->after) {
        const fsdp__clock *now = &a->ctx->clocks.now[s->slot];
        *out_missing |= fsdp__need_frontier(&need, &f->use, now, FSDP_REASON_REUSE);
        if (FSDP__MUTATED(MERGE_LOSES_CLOCK)) break;
    }
    return wait_counted(a, s, &need);
}

/* The epoch that is open now stands for the stream, until free raises it: its slot may have another stream by then. */
static void use_until_free(fsdp_allocator *a, fsdp__block *block, const fsdp_stream *s)
{
    block->until_free |= (uint16_t)(1u << s->slot);
    fsdp__frontier_add(&a->ranges.wides, &block->use, s->slot, fsdp__epoch(s));
}

static fsdp_status alloc_block(fsdp_allocator *a, uint64_t bytes, fsdp_stream *s, const char *owner,
                               fsdp__block **out_block)
{
    FSDP_TRY(fsdp__ranges_reserve(&a->ranges));
    if (!fsdp__table_reserve(&a->ctx->host, &a->live))
        return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "allocator %s: no host memory for the table of blocks", a->name);
    fsdp__place p = fsdp__place_find(a, bytes, s);
    if (p.range == NULL || (!p.covered && a->config.policy == FSDP_ALLOC_GROW_FIRST)) {
        fsdp__block *range = NULL;
        FSDP_TRY(p.range == NULL ? fsdp__allocator_grow_for(a, bytes, owner, &range)
                                 : fsdp__allocator_grow_if_possible(a, bytes, &range));
        if (range != NULL) p = (fsdp__place){range, range, range->begin, 0, true};
    }

    /* First the wait: if it fails, nothing has been taken. */
    uint32_t missing = 0;
    if (!p.covered) FSDP_TRY(wait_for_place(a, &p, bytes, s, &missing));
    fsdp__block *block = take(a, &p, bytes, s, owner);
    use_until_free(a, block, s);
    if (FSDP__MUTATED(USE_AT_ALLOC)) block->until_free = 0;
    note_taken(a, block, s, missing);
    fsdp__table_put(&a->live, block);
    *out_block = block;
    return FSDP_OK;
}

/* ---- Public calls ---- */

fsdp_status fsdp_allocator_alloc(fsdp_allocator *allocator, uint64_t bytes, fsdp_stream *stream, const char *owner,
                                 void **out_ptr)
{
    FSDP_NEED(allocator);
    FSDP_NEED(out_ptr);
    FSDP_TRY(fsdp__stream_check(__func__, allocator->ctx, stream));
    if (bytes > (uint64_t)1 << 56)
        return fsdp__fail(FSDP_ERR_ARG, "allocator %s: %llu bytes are more than any device has", allocator->name,
                          (unsigned long long)bytes);
    uint64_t rounded = bytes == 0 ? FSDP__BLOCK_ALIGNMENT
                                  : (bytes + FSDP__BLOCK_ALIGNMENT - 1) / FSDP__BLOCK_ALIGNMENT * FSDP__BLOCK_ALIGNMENT;
    fsdp__lock(allocator->ctx);
    fsdp__block *block = NULL;
    fsdp_status status = alloc_block(allocator, rounded, stream, owner != NULL ? owner : "", &block);
    if (status == FSDP_OK) *out_ptr = (void *)(uintptr_t)block->begin;
    fsdp__unlock(allocator->ctx);
    return status;
}

static fsdp_status find_live(const char *call, const fsdp_allocator *a, const void *ptr, fsdp__table_entry **out_entry)
{
    *out_entry = fsdp__table_find(&a->live, (uint64_t)(uintptr_t)ptr);
    if (*out_entry != NULL) return FSDP_OK;
    return fsdp__fail(FSDP_ERR_ARG,
                      "%s: %p is no live block of allocator %s: freed already, inside a block, or not from here", call,
                      ptr, a->name);
}

/* A third stream's use may need memory: it is taken now, so that free needs none. */
static fsdp_status make_room(fsdp_allocator *a, fsdp__block *block, int slot)
{
    uint32_t slots = block->until_free | 1u << slot;
    if (block->use.wide != NULL || (slots & (slots - 1)) == 0) return FSDP_OK;
    for (int i = 0; i < 2 && block->use.point[i] != 0; i++) slots |= 1u << block->use.point[i] % FSDP__SLOTS;
    if (__builtin_popcount(slots) <= 2) return FSDP_OK;
    FSDP_TRY(fsdp__wides_reserve(&a->ranges.wides, 1));
    fsdp__frontier_widen(&a->ranges.wides, &block->use);
    return FSDP_OK;
}

static fsdp_status record_stream(fsdp_allocator *a, fsdp__block *block, fsdp_stream *s)
{
    FSDP_TRY(make_room(a, block, s->slot));
    /* The last owner's work comes before this stream's, too. */
    if (!FSDP__MUTATED(GUARD_DROPPED) && !fsdp__frontier_covered(&a->ctx->clocks.now[s->slot], &block->guard)) {
        fsdp__need need;
        need.slots = 0;
        const fsdp__clock *now = &a->ctx->clocks.now[s->slot];
        uint32_t missing = fsdp__need_frontier(&need, &block->guard, now, FSDP_REASON_REUSE);
        FSDP_TRY(wait_counted(a, s, &need));
        note_hand_over(a, block, s, missing);
    }
    if (FSDP__MUTATED(USE_AT_RECORD)) fsdp__frontier_add(&a->ranges.wides, &block->use, s->slot, fsdp__epoch(s));
    else if (!FSDP__MUTATED(RECORD_FORGOTTEN)) use_until_free(a, block, s);
    return FSDP_OK;
}

fsdp_status fsdp_allocator_record_stream(fsdp_allocator *allocator, void *ptr, fsdp_stream *stream)
{
    FSDP_NEED(allocator);
    FSDP_TRY(fsdp__stream_check(__func__, allocator->ctx, stream));
    fsdp__lock(allocator->ctx);
    fsdp__table_entry *entry;
    fsdp_status status = find_live(__func__, allocator, ptr, &entry);
    if (status == FSDP_OK) status = record_stream(allocator, entry->block, stream);
    fsdp__unlock(allocator->ctx);
    return status;
}

fsdp_status fsdp_allocator_record_use(fsdp_allocator *allocator, void *ptr, fsdp_stream *stream)
{
    FSDP_NEED(allocator);
    FSDP_TRY(fsdp__stream_check(__func__, allocator->ctx, stream));
    fsdp__lock(allocator->ctx);
    fsdp__table_entry *entry;
    fsdp_status status = find_live(__func__, allocator, ptr, &entry);
    if (status == FSDP_OK) status = make_room(allocator, entry->block, stream->slot);
    if (status == FSDP_OK)
        fsdp__frontier_add(&allocator->ranges.wides, &entry->block->use, stream->slot,
                           fsdp__epoch(stream) - (FSDP__MUTATED(RECORD_USE_EARLY) ? 1 : 0));
    fsdp__unlock(allocator->ctx);
    return status;
}

fsdp_status fsdp_allocator_free(fsdp_allocator *allocator, void *ptr)
{
    FSDP_NEED(allocator);
    if (ptr == NULL) return FSDP_OK;
    fsdp__lock(allocator->ctx);
    fsdp__table_entry *entry;
    fsdp_status status = find_live(__func__, allocator, ptr, &entry);
    if (status == FSDP_OK) {
        fsdp__block *block = entry->block;
        fsdp__table_remove(&allocator->live, entry);
        fsdp__allocator_give(allocator, block);
    }
    fsdp__unlock(allocator->ctx);
    return status;
}

fsdp_status fsdp_allocator_trim_host(fsdp_allocator *allocator)
{
    FSDP_NEED(allocator);
    fsdp_context *ctx = allocator->ctx;
    FSDP_TRY(fsdp__capture_off(__func__, ctx));
    fsdp__lock(ctx);
    uint64_t n_freed = allocator->ranges.n_freed; /* what is freed while this waits may be in use still */
    fsdp_status status = FSDP__MUTATED(TRIM_NO_DRAIN) ? FSDP_OK : fsdp__context_drain(ctx, ctx->timeout_ns);
    for (uint32_t i = 0; status == FSDP_OK && i < allocator->ranges.n_segments; i++) {
        fsdp__segment seg = allocator->ranges.segments[i];
        if (seg.bytes == 0 || !fsdp__ranges_is_free(&allocator->ranges, i)) continue;
        if (seg.first->range_freed > n_freed) continue;
        allocator->stats.reserved -= seg.bytes;
        fsdp__allocator_note_segment(allocator, FSDP__ALLOC_EVENT_TRIM, i);
        fsdp__ranges_drop(&allocator->ranges, i);
        fsdp__capture_lose_pool(ctx, allocator, "was trimmed");
        fsdp__device_free(ctx, (void *)(uintptr_t)seg.begin, seg.bytes, allocator->kind);
    }
    note_bytes(allocator);
    fsdp__unlock(ctx);
    return status == FSDP_OK ? FSDP_OK : fsdp__context_explain(ctx, status);
}

fsdp_status fsdp_allocator_stats(fsdp_allocator *allocator, fsdp_alloc_stats *out_stats)
{
    FSDP_NEED(allocator);
    FSDP_NEED(out_stats);
    fsdp__lock(allocator->ctx);
    note_active_peak(allocator);
    fsdp_alloc_stats stats = allocator->stats;
    fsdp__unlock(allocator->ctx);
    return fsdp__write_result("fsdp_alloc_stats", out_stats, &stats, sizeof stats, sizeof stats);
}

fsdp_status fsdp_allocator_reset_peaks(fsdp_allocator *allocator)
{
    FSDP_NEED(allocator);
    fsdp__lock(allocator->ctx);
    fsdp_alloc_stats *st = &allocator->stats;
    note_active_peak(allocator);
    st->allocated_peak = st->allocated;
    st->active_peak = st->active;
    st->reserved_peak = st->reserved;
    fsdp__unlock(allocator->ctx);
    return FSDP_OK;
}
