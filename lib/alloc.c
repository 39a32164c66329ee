/* SPDX-License-Identifier: MIT */
/* Fenced blocks with vector clocks: policy over the map of alloc_ranges.c. docs/allocator.md tells the whole of it. */
#include "alloc.h"

#include <stdio.h>
#include <string.h>

#include "check.h"
#include "context.h"
#include "device.h"
#include "hostmem.h"
#include "stream.h"

/* Fits looked at, smallest first, for each doubling of the size, before one that needs a wait is taken. */
enum { CANDIDATES = 32 };

typedef struct segment {
    struct segment *next;
    void *ptr;
    uint64_t bytes;
    fsdp__block *first; /* lowest block: the whole segment when it is free */
} segment;

/* A live block by its address: open addressing, linear probing. */
typedef struct table {
    fsdp__block **slot;
    size_t capacity, n; /* capacity: a power of two, or 0 */
} table;

struct fsdp_allocator {
    fsdp_context *ctx;
    fsdp_allocator_config config;
    char name[32];
    fsdp__ranges ranges;
    segment *segments;
    table live;
    fsdp_alloc_stats stats;
};

static size_t table_home(const table *t, uint64_t begin)
{
    return (size_t)(begin / FSDP__BLOCK_ALIGNMENT * 0x9e3779b97f4a7c15ull >> 20) & (t->capacity - 1);
}

static void table_put(table *t, fsdp__block *block)
{
    size_t i = table_home(t, block->begin);
    while (t->slot[i] != NULL) i = (i + 1) & (t->capacity - 1);
    t->slot[i] = block;
    t->n++;
}

static fsdp__block *table_find(const table *t, uint64_t begin)
{
    for (size_t i = t->capacity ? table_home(t, begin) : 0; t->capacity && t->slot[i] != NULL;
         i = (i + 1) & (t->capacity - 1))
        if (t->slot[i]->begin == begin) return t->slot[i];
    return NULL;
}

static void table_remove(table *t, uint64_t begin)
{
    size_t mask = t->capacity - 1, hole = table_home(t, begin);
    while (t->slot[hole]->begin != begin) hole = (hole + 1) & mask;
    /* Close the gap: move up whoever could not sit at or before it. */
    for (size_t i = (hole + 1) & mask; t->slot[i] != NULL; i = (i + 1) & mask) {
        if (((i - table_home(t, t->slot[i]->begin)) & mask) < ((i - hole) & mask)) continue;
        t->slot[hole] = t->slot[i];
        hole = i;
    }
    t->slot[hole] = NULL;
    t->n--;
}

static bool table_reserve(const fsdp_host_allocator *host, table *t)
{
    if (2 * (t->n + 1) <= t->capacity) return true;
    table bigger = {.capacity = t->capacity ? 2 * t->capacity : 64};
    bigger.slot = fsdp__host_alloc(host, bigger.capacity, sizeof(fsdp__block *));
    if (bigger.slot == NULL) return false;
    for (size_t i = 0; i < t->capacity; i++)
        if (t->slot[i] != NULL) table_put(&bigger, t->slot[i]);
    fsdp__host_free(host, t->slot, t->capacity, sizeof(fsdp__block *));
    *t = bigger;
    return true;
}

/* Pending fragments leave as their stream's clock comes to cover them, in any order. */
static void settle_pending(fsdp_allocator *a)
{
    for (int slot = 0; slot < a->ctx->clocks.n_slots; slot++) {
        fsdp_stream *s = a->ctx->clocks.stream[slot];
        for (fsdp__fragment *f = a->ranges.oldest_pending[slot], *newer; f != NULL; f = newer) {
            newer = f->newer;
            if (s == NULL || fsdp__covered(s, &f->clock)) fsdp__ranges_settle(&a->ranges, f);
        }
    }
}

/* What is pending may be covered by now: it is looked through only where it would make a peak. */
static void note_bytes(fsdp_allocator *a)
{
    fsdp_alloc_stats *st = &a->stats;
    if (st->allocated + a->ranges.pending_bytes > st->active_peak) settle_pending(a);
    st->active = st->allocated + a->ranges.pending_bytes;
    if (st->allocated > st->allocated_peak) st->allocated_peak = st->allocated;
    if (st->active > st->active_peak) st->active_peak = st->active;
    if (st->reserved > st->reserved_peak) st->reserved_peak = st->reserved;
}

/* Take a segment from the device. The list of segments is for destroy, trim and the table: newest first. */
static fsdp_status grow(fsdp_allocator *a, uint64_t bytes)
{
    fsdp_context *ctx = a->ctx;
    segment *seg = fsdp__host_alloc(&ctx->host, 1, sizeof *seg);
    if (seg == NULL) return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "allocator %s: no host memory for a segment", a->name);
    fsdp_status status = fsdp__device_alloc(ctx, bytes, FSDP_MEMORY_KIND_DEVICE, &seg->ptr);
    if (status != FSDP_OK) {
        fsdp__host_free(&ctx->host, seg, 1, sizeof *seg);
        return status;
    }
    seg->bytes = bytes;
    seg->next = a->segments;
    a->segments = seg;
    seg->first = fsdp__ranges_add(&a->ranges, (uint64_t)(uintptr_t)seg->ptr, bytes);
    a->stats.reserved += bytes;
    a->stats.grows++;
    note_bytes(a);
    return FSDP_OK;
}

static fsdp_status create(fsdp_context *ctx, const fsdp_allocator_config *config, fsdp_allocator **out_allocator)
{
    fsdp_allocator *a = fsdp__host_alloc(&ctx->host, 1, sizeof *a);
    if (a == NULL) return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "allocator %s: no host memory", config->name);
    a->ctx = ctx;
    a->config = *config;
    snprintf(a->name, sizeof a->name, "%s", config->name);
    a->config.name = a->name;
    fsdp__ranges_init(&a->ranges, &ctx->host);
    a->stats.size = sizeof a->stats;
    *out_allocator = a;
    return FSDP_OK;
}

static void destroy(fsdp_allocator *a)
{
    fsdp_context *ctx = a->ctx;
    for (segment *seg = a->segments; seg != NULL;) {
        segment *next = seg->next;
        fsdp__device_free(ctx, seg->ptr, seg->bytes, FSDP_MEMORY_KIND_DEVICE);
        fsdp__host_free(&ctx->host, seg, 1, sizeof *seg);
        seg = next;
    }
    fsdp__ranges_fini(&a->ranges);
    fsdp__host_free(&ctx->host, a->live.slot, a->live.capacity, sizeof(fsdp__block *));
    fsdp__host_free(&ctx->host, a, 1, sizeof *a);
}

fsdp_status fsdp_allocator_create(fsdp_context *ctx, const fsdp_allocator_config *config,
                                  fsdp_allocator **out_allocator)
{
    FSDP_NEED(ctx);
    FSDP_NEED(out_allocator);
    fsdp_allocator_config c = FSDP_ALLOCATOR_CONFIG_INIT;
    if (config != NULL) FSDP_TRY(fsdp__read_config("fsdp_allocator_config", &c, sizeof c, config, sizeof c));
    if (c.name == NULL) return fsdp__fail(FSDP_ERR_ARG, "fsdp_allocator_config.name is NULL");
    if (c.policy != FSDP_ALLOC_WAIT_FIRST && c.policy != FSDP_ALLOC_GROW_FIRST)
        return fsdp__fail(FSDP_ERR_ARG, "allocator %s: policy %d does not exist", c.name, (int)c.policy);
    FSDP_TRY(fsdp__context_check(ctx));
    fsdp__lock(ctx);
    fsdp_status status = create(ctx, &c, out_allocator);
    if (status == FSDP_OK) ctx->n_children++;
    fsdp__unlock(ctx);
    return status;
}

fsdp_status fsdp__allocator_create_range(fsdp_context *ctx, const char *name, uint64_t bytes,
                                         fsdp_allocator **out_allocator)
{
    bytes = fsdp__device_round(&ctx->caps, bytes);
    fsdp_allocator_config config = {sizeof config, name, bytes, bytes, FSDP_ALLOC_WAIT_FIRST, 0};
    fsdp_allocator *a;
    FSDP_TRY(create(ctx, &config, &a));
    fsdp_status status = FSDP_OK;
    if (bytes > 0) {
        status = fsdp__ranges_reserve(&a->ranges, 4);
        if (status == FSDP_OK) status = grow(a, bytes);
    }
    if (status != FSDP_OK) {
        destroy(a);
        return status;
    }
    *out_allocator = a;
    return FSDP_OK;
}

void fsdp__allocator_destroy_range(fsdp_allocator *a)
{
    if (a != NULL) destroy(a);
}

void *fsdp__allocator_base(const fsdp_allocator *a) { return a->segments != NULL ? a->segments->ptr : NULL; }

fsdp_status fsdp_allocator_destroy(fsdp_allocator *allocator)
{
    if (allocator == NULL) return FSDP_OK;
    fsdp_context *ctx = allocator->ctx;
    fsdp__lock(ctx);
    if (allocator->ranges.n_live > 0) {
        char text[2048] = "";
        fsdp__allocator_describe(allocator, text, sizeof text);
        fsdp__unlock(ctx);
        return fsdp__fail(FSDP_ERR_STATE, "allocator %s has %u live block%s: free first\n%s", allocator->name,
                          allocator->ranges.n_live, allocator->ranges.n_live == 1 ? "" : "s", text);
    }
    /* Its error is the context's. The memory goes back either way, so nothing may be running: there is no deadline. */
    FSDP_IGNORE(fsdp__context_drain(ctx, UINT64_MAX));
    destroy(allocator);
    ctx->n_children--;
    fsdp__unlock(ctx);
    return FSDP_OK;
}

/* A place in a free range. */
typedef struct place {
    fsdp__block *range;
    uint64_t begin;
    uint64_t freed; /* newest free() among what it covers */
    bool covered;
} place;

/* The better end of a range: one that is covered, else the one freed longer ago, else the low one. */
static place best_end(fsdp__block *range, uint64_t bytes, const fsdp_stream *s)
{
    fsdp__clock clock;
    place low = {range, range->begin, fsdp__ranges_clock(range, range->begin, bytes, &clock), false};
    low.covered = fsdp__covered(s, &clock);
    if (low.covered || range->bytes == bytes) return low;
    uint64_t begin = range->begin + range->bytes - bytes;
    place high = {range, begin, fsdp__ranges_clock(range, begin, bytes, &clock), false};
    high.covered = fsdp__covered(s, &clock);
    return high.covered || high.freed < low.freed ? high : low;
}

/* (a) the smallest fit that is covered; (b) else, of those looked at, the one freed longest ago. */
static place find_place(const fsdp_allocator *a, uint64_t bytes, const fsdp_stream *s)
{
    place oldest = {NULL, 0, 0, false};
    int looked_at = 0;
    fsdp__block *r = fsdp__ranges_best(&a->ranges, bytes);
    while (r != NULL) {
        place p = best_end(r, bytes, s);
        if (p.covered) return p;
        if (oldest.range == NULL || p.freed < oldest.freed) oldest = p;
        r = ++looked_at % CANDIDATES != 0 ? fsdp__ranges_next(r) : fsdp__ranges_best(&a->ranges, 2 * r->bytes);
    }
    return oldest;
}

static fsdp__block *take(fsdp_allocator *a, fsdp__block *range, uint64_t begin, uint64_t bytes, fsdp_stream *s,
                         const char *tag, fsdp__need *need)
{
    fsdp__block *block = fsdp__ranges_take(&a->ranges, range, begin, bytes);
    fsdp__need_clock(need, &block->guard, s, FSDP_REASON_REUSE);
    block->slot = s->slot;
    block->taken = fsdp__epoch(s);
    block->tag = tag;

    a->stats.allocated += bytes;
    a->stats.allocs++;
    note_bytes(a);
    return block;
}

fsdp_status fsdp__allocator_reserve(fsdp_allocator *a) { return fsdp__ranges_reserve(&a->ranges, 4); }

fsdp__block *fsdp__allocator_take_at(fsdp_allocator *a, uint64_t offset, uint64_t bytes, fsdp_stream *s,
                                     const char *tag, fsdp__need *need)
{
    if (a->segments == NULL) return NULL;
    uint64_t begin = (uint64_t)(uintptr_t)a->segments->ptr + offset;
    fsdp__block *range = fsdp__ranges_at(&a->ranges, begin, bytes);
    return range != NULL ? take(a, range, begin, bytes, s, tag, need) : NULL;
}

fsdp__block *fsdp__allocator_take(fsdp_allocator *a, uint64_t bytes, fsdp_stream *s, const char *tag, fsdp__need *need)
{
    place p = find_place(a, bytes, s);
    return p.range != NULL ? take(a, p.range, p.begin, bytes, s, tag, need) : NULL;
}

void fsdp__allocator_use(fsdp__block *block, const fsdp_stream *s) { block->use.at[s->slot] = fsdp__epoch(s); }

void fsdp__allocator_give(fsdp_allocator *a, fsdp__block *block, bool until_free)
{
    fsdp__clocks *clocks = &a->ctx->clocks;
    if (until_free) block->until_free |= 1u << block->slot;
    for (int t = 0; t < clocks->n_slots; t++)
        if ((block->until_free >> t & 1u) && clocks->stream[t] != NULL) fsdp__allocator_use(block, clocks->stream[t]);
    fsdp_stream *own = clocks->stream[block->slot];
    a->stats.allocated -= block->bytes;
    a->stats.frees++;
    fsdp__ranges_give(&a->ranges, block, own != NULL && !fsdp__covered(own, &block->use));
    note_bytes(a);
}

static fsdp_status fail_no_memory(fsdp_allocator *a, uint64_t bytes, const char *why)
{
    const fsdp_alloc_stats *st = &a->stats;
    uint64_t largest = 0, idle = 0;
    for (fsdp__block *r = fsdp__ranges_best(&a->ranges, 1); r != NULL; r = fsdp__ranges_next(r)) {
        largest = r->bytes;
        if (r->before == NULL && r->after == NULL) idle += r->bytes;
    }
    char text[6144] = "";
    fsdp__allocator_describe(a, text, sizeof text);
    return fsdp__fail(FSDP_ERR_NO_MEMORY,
                      "allocator %s: no room for %llu bytes: %llu of %llu reserved bytes are live, the largest free "
                      "range has %llu, %s. Free something, ask for at most the largest range, or call "
                      "fsdp_allocator_trim_host: %llu bytes are in wholly free segments\n%s",
                      a->name, (unsigned long long)bytes, (unsigned long long)st->allocated,
                      (unsigned long long)st->reserved, (unsigned long long)largest, why, (unsigned long long)idle,
                      text);
}

/* How much to take from the device: a segment, or less where the budget has no room for one. 0: not even the bytes. */
static uint64_t growth(const fsdp_allocator *a, uint64_t bytes)
{
    const fsdp_device_caps *caps = &a->ctx->caps;
    uint64_t budget = a->config.budget_bytes, room = budget == 0 ? UINT64_MAX : budget - a->stats.reserved;
    uint64_t segment_bytes = fsdp__device_round(caps, a->config.segment_bytes), least = fsdp__device_round(caps, bytes);
    if (segment_bytes > least && segment_bytes <= room) return segment_bytes;
    return least <= room ? least : 0;
}

/* (c) Grow, within the budget. */
static fsdp_status grow_for(fsdp_allocator *a, uint64_t bytes)
{
    uint64_t more = growth(a, bytes);
    char why[256];
    if (more == 0) {
        snprintf(why, sizeof why, "and the budget of %llu allows no more", (unsigned long long)a->config.budget_bytes);
        return fail_no_memory(a, bytes, why);
    }
    fsdp_status status = grow(a, more);
    if (status != FSDP_ERR_NO_MEMORY) return status;
    snprintf(why, sizeof why, "and the device says: %.200s", fsdp_last_error());
    return fail_no_memory(a, bytes, why);
}

static fsdp_status alloc_block(fsdp_allocator *a, uint64_t bytes, fsdp_stream *s, fsdp__block **out_block)
{
    FSDP_TRY(fsdp__allocator_reserve(a));
    if (!table_reserve(&a->ctx->host, &a->live))
        return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "allocator %s: no host memory for the table of blocks", a->name);
    place p = find_place(a, bytes, s);
    bool would_grow = a->config.policy == FSDP_ALLOC_GROW_FIRST && !p.covered && growth(a, bytes) > 0;
    if (p.range == NULL || would_grow) {
        fsdp_status status = grow_for(a, bytes);
        if (status == FSDP_OK) p = (place){a->segments->first, a->segments->first->begin, 0, true};
        else if (p.range == NULL || status != FSDP_ERR_NO_MEMORY) return status;
    }

    fsdp__need need = {0};
    *out_block = take(a, p.range, p.begin, bytes, s, "", &need);
    table_put(&a->live, *out_block);
    uint64_t waits = a->ctx->counters.waits;
    fsdp_status status = fsdp__wait_need(s, &need);
    a->stats.waits += a->ctx->counters.waits - waits;
    if (status != FSDP_OK) { /* the device is gone; the map stays true */
        table_remove(&a->live, (*out_block)->begin);
        fsdp__allocator_give(a, *out_block, true);
    }
    return status;
}

fsdp_status fsdp_allocator_alloc(fsdp_allocator *allocator, uint64_t bytes, fsdp_stream *stream,
                                 const char *owner, void **out_ptr)
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
    fsdp_status status = alloc_block(allocator, rounded, stream, &block);
    if (status == FSDP_OK) {
        block->tag = owner != NULL ? owner : "";
        block->until_free |= 1u << stream->slot;
        *out_ptr = (void *)(uintptr_t)block->begin;
    }
    fsdp__unlock(allocator->ctx);
    return status;
}

static fsdp_status find_live(const char *call, const fsdp_allocator *a, const void *ptr, fsdp__block **out_block)
{
    *out_block = table_find(&a->live, (uint64_t)(uintptr_t)ptr);
    if (*out_block != NULL) return FSDP_OK;
    return fsdp__fail(FSDP_ERR_ARG,
                      "%s: %p is no live block of allocator %s: freed already, inside a block, or not from here", call,
                      ptr, a->name);
}

fsdp_status fsdp_allocator_record_stream(fsdp_allocator *allocator, void *ptr, fsdp_stream *stream)
{
    FSDP_NEED(allocator);
    FSDP_TRY(fsdp__stream_check(__func__, allocator->ctx, stream));
    fsdp__lock(allocator->ctx);
    fsdp__block *block;
    fsdp_status status = find_live(__func__, allocator, ptr, &block);
    if (status == FSDP_OK) {
        /* The last owner's work comes before this stream's, too. */
        fsdp__need need = {0};
        fsdp__need_clock(&need, &block->guard, stream, FSDP_REASON_REUSE);
        uint64_t waits = allocator->ctx->counters.waits;
        status = fsdp__wait_need(stream, &need);
        allocator->stats.waits += allocator->ctx->counters.waits - waits;
        block->until_free |= 1u << stream->slot;
    }
    fsdp__unlock(allocator->ctx);
    return status;
}

fsdp_status fsdp_allocator_record_use(fsdp_allocator *allocator, void *ptr, fsdp_stream *stream)
{
    FSDP_NEED(allocator);
    FSDP_TRY(fsdp__stream_check(__func__, allocator->ctx, stream));
    fsdp__lock(allocator->ctx);
    fsdp__block *block;
    fsdp_status status = find_live(__func__, allocator, ptr, &block);
    if (status == FSDP_OK) fsdp__allocator_use(block, stream);
    fsdp__unlock(allocator->ctx);
    return status;
}

fsdp_status fsdp_allocator_free(fsdp_allocator *allocator, void *ptr)
{
    FSDP_NEED(allocator);
    if (ptr == NULL) return FSDP_OK;
    fsdp__lock(allocator->ctx);
    fsdp__block *block;
    fsdp_status status = find_live(__func__, allocator, ptr, &block);
    if (status == FSDP_OK) {
        table_remove(&allocator->live, block->begin);
        fsdp__allocator_give(allocator, block, false);
    }
    fsdp__unlock(allocator->ctx);
    return status;
}

fsdp_status fsdp_allocator_trim_host(fsdp_allocator *allocator)
{
    FSDP_NEED(allocator);
    fsdp_context *ctx = allocator->ctx;
    fsdp__lock(ctx);
    fsdp_status status = fsdp__context_drain(ctx, ctx->timeout_ns);
    for (segment **link = &allocator->segments; status == FSDP_OK && *link != NULL;) {
        segment *seg = *link;
        fsdp__block *range = fsdp__ranges_at(&allocator->ranges, (uint64_t)(uintptr_t)seg->ptr, seg->bytes);
        if (range == NULL) {
            link = &seg->next;
            continue;
        }
        *link = seg->next;
        fsdp__ranges_drop(&allocator->ranges, range);
        fsdp__device_free(ctx, seg->ptr, seg->bytes, FSDP_MEMORY_KIND_DEVICE);
        allocator->stats.reserved -= seg->bytes;
        fsdp__host_free(&ctx->host, seg, 1, sizeof *seg);
    }
    note_bytes(allocator);
    fsdp__unlock(ctx);
    return status;
}

fsdp_status fsdp_allocator_stats(fsdp_allocator *allocator, fsdp_alloc_stats *out_stats)
{
    FSDP_NEED(allocator);
    FSDP_NEED(out_stats);
    fsdp__lock(allocator->ctx);
    settle_pending(allocator);
    note_bytes(allocator);
    fsdp_alloc_stats stats = allocator->stats;
    fsdp__unlock(allocator->ctx);
    return fsdp__write_result("fsdp_alloc_stats", out_stats, &stats, sizeof stats, sizeof stats);
}

fsdp_status fsdp_allocator_reset_peaks(fsdp_allocator *allocator)
{
    FSDP_NEED(allocator);
    fsdp__lock(allocator->ctx);
    fsdp_alloc_stats *st = &allocator->stats;
    settle_pending(allocator);
    note_bytes(allocator);
    st->allocated_peak = st->allocated;
    st->active_peak = st->active;
    st->reserved_peak = st->reserved;
    fsdp__unlock(allocator->ctx);
    return FSDP_OK;
}

/* The stream that a live block was taken for; its slot may have another owner by now. */
static const char *holder(const fsdp_allocator *a, const fsdp__block *block)
{
    const fsdp_stream *s = a->ctx->clocks.stream[block->slot];
    return s != NULL && block->taken > s->first_fence ? s->name : "a released stream";
}

void fsdp__allocator_describe(const fsdp_allocator *a, char *text, size_t text_bytes)
{
    size_t used = strlen(text);
    for (const segment *seg = a->segments; seg != NULL; seg = seg->next) {
        for (const fsdp__block *b = seg->first; b != NULL && used + 192 < text_bytes; b = b->after) {
            char what[128] = "free";
            if (b->live) snprintf(what, sizeof what, "live %.64s%son %s", b->tag, b->tag[0] ? " " : "", holder(a, b));
            int n = snprintf(text + used, text_bytes - used, "  at %12llu  %12llu bytes  %s\n",
                             (unsigned long long)(b->begin - (uint64_t)(uintptr_t)seg->ptr),
                             (unsigned long long)b->bytes, what);
            used += n > 0 ? (size_t)n : 0;
        }
    }
}
