/* SPDX-License-Identifier: MIT */
#include "alloc_ranges.h"

#include <string.h>

#include "check.h"
#include "hostmem.h"
#include "mutate.h"

#define BLOCK_OF(tree_node) ((fsdp__block *)(void *)((char *)(tree_node)-offsetof(fsdp__block, node)))

void fsdp__ranges_init(fsdp__ranges *ranges, const fsdp_host_allocator *host, bool placed)
{
    memset(ranges, 0, sizeof *ranges);
    ranges->host = ranges->wides.host = host;
    ranges->placed = placed;
}

/* ---- Memory: blocks come in chunks and are kept until fini, so a map never shrinks below its high-water mark ---- */

typedef struct chunk {
    _Alignas(64) struct chunk *next; /* blocks begin on a cache line */
    uint32_t n;
} chunk;

static size_t chunk_bytes(uint32_t n) { return sizeof(chunk) + n * sizeof(fsdp__block); }

void fsdp__ranges_fini(fsdp__ranges *ranges)
{
    for (chunk *c = ranges->chunks; c != NULL;) {
        chunk *next = c->next;
        fsdp__host_free(ranges->host, c, chunk_bytes(c->n), 1);
        c = next;
    }
    fsdp__wides_fini(&ranges->wides);
    fsdp__host_free(ranges->host, ranges->segments, ranges->segment_capacity, sizeof *ranges->segments);
    memset(ranges, 0, sizeof *ranges);
}

static fsdp_status reserve_blocks(fsdp__ranges *ranges)
{
    uint32_t n = ranges->n_blocks < 64 ? 64 : ranges->n_blocks; /* doubles */
    chunk *c = fsdp__host_alloc(ranges->host, chunk_bytes(n), 1);
    if (c == NULL)
        return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "no host memory for the map of %u more blocks (%zu bytes)", n,
                          chunk_bytes(n));
    c->next = ranges->chunks;
    c->n = n;
    ranges->chunks = c;
    fsdp__block *blocks = (fsdp__block *)(void *)(c + 1);
    for (uint32_t i = n; i-- > 0;) { /* the first is used first */
        blocks[i].after = ranges->spare;
        ranges->spare = &blocks[i];
    }
    ranges->n_spare += n;
    ranges->n_blocks += n;
    return FSDP_OK;
}

fsdp_status fsdp__ranges_reserve_more(fsdp__ranges *ranges)
{
    if (ranges->n_spare < 3) FSDP_TRY(reserve_blocks(ranges));
    return fsdp__wides_reserve(&ranges->wides, 2 + (ranges->placed ? 2 * ranges->n_live : 0));
}

static inline fsdp__block *new_block(fsdp__ranges *ranges)
{
    assert(ranges->n_spare > 0);
    fsdp__block *block = ranges->spare;
    ranges->spare = block->after;
    ranges->n_spare--;
    return block;
}

static inline void drop_block(fsdp__ranges *ranges, fsdp__block *block)
{
    fsdp__frontier_clear(&ranges->wides, &block->use);
    block->after = ranges->spare;
    ranges->spare = block;
    ranges->n_spare++;
}

/* ---- Pending fragments ---- */

static void add_pending(fsdp__ranges *ranges, fsdp__block *f, fsdp__block *after)
{
    fsdp__pending *pending = &ranges->pending[f->slot];
    f->pending = true;
    f->older = after;
    f->newer = after != NULL ? after->newer : pending->oldest;
    *(f->older != NULL ? &f->older->newer : &pending->oldest) = f;
    *(f->newer != NULL ? &f->newer->older : &pending->newest) = f;
    ranges->pending_bytes += f->bytes;
}

void fsdp__ranges_settle(fsdp__ranges *ranges, fsdp__block *f)
{
    if (!f->pending) return;
    fsdp__pending *pending = &ranges->pending[f->slot];
    f->pending = false;
    *(f->older != NULL ? &f->older->newer : &pending->oldest) = f->newer;
    *(f->newer != NULL ? &f->newer->older : &pending->newest) = f->older;
    ranges->pending_bytes -= f->bytes;
}

/* ---- Free ranges ---- */

/* Exact below 2 KiB, then eight bins for each doubling. */
static inline uint32_t bin_of(uint64_t bytes)
{
    uint64_t n = bytes / FSDP__BLOCK_ALIGNMENT;
    if (n < 8) return (uint32_t)n;
    uint32_t exponent = 63 - (uint32_t)__builtin_clzll(n);
    return (exponent - 2) * 8 + (uint32_t)(n >> (exponent - 3) & 7);
}

static bool is_smaller(const fsdp__block *x, const fsdp__block *y)
{
    if (x->range_bytes != y->range_bytes) return x->range_bytes < y->range_bytes;
    if (x->range_freed != y->range_freed) return x->range_freed < y->range_freed;
    if (x->segment != y->segment) return x->segment < y->segment; /* its number: addresses differ between ranks */
    return x->begin < y->begin;
}

static bool less_size(const fsdp__tree_node *a, const fsdp__tree_node *b)
{
    return is_smaller(BLOCK_OF(a), BLOCK_OF(b));
}

static bool less_begin(const fsdp__tree_node *a, const fsdp__tree_node *b)
{
    return BLOCK_OF(a)->begin < BLOCK_OF(b)->begin;
}

/* The first fragment of a range stands for it. */
static inline void link_range(fsdp__ranges *ranges, fsdp__block *first)
{
    if (ranges->placed) {
        fsdp__tree_insert(&ranges->by_begin, &first->node, ranges->serial++, less_begin);
        return;
    }
    uint32_t bin = bin_of(first->range_bytes);
    ranges->has_ranges[bin / 64] |= (uint64_t)1 << bin % 64;
    fsdp__tree_insert(&ranges->bin[bin], &first->node, ranges->serial++, less_size);
}

static inline void unlink_range(fsdp__ranges *ranges, fsdp__block *first)
{
    if (ranges->placed) {
        fsdp__tree_remove(&ranges->by_begin, &first->node);
        return;
    }
    uint32_t bin = bin_of(first->range_bytes);
    fsdp__tree_remove(&ranges->bin[bin], &first->node);
    if (ranges->bin[bin].root == NULL) ranges->has_ranges[bin / 64] &= ~((uint64_t)1 << bin % 64);
}

/* The first range of a bin from `bin` on. */
static inline fsdp__block *first_from(const fsdp__ranges *ranges, uint32_t bin)
{
    if (bin >= FSDP__BINS) return NULL;
    uint32_t word = bin / 64;
    uint64_t bits = ranges->has_ranges[word] & ~(uint64_t)0 << bin % 64;
    while (bits == 0) {
        if (++word == FSDP__BINS / 64) return NULL;
        bits = ranges->has_ranges[word];
    }
    return BLOCK_OF(fsdp__tree_first(&ranges->bin[word * 64 + (uint32_t)__builtin_ctzll(bits)]));
}

/* Of all in by_begin, the smallest of at least bytes that comes after `after` by size; NULL: after none. */
static fsdp__block *smallest_placed(const fsdp__ranges *ranges, uint64_t bytes, const fsdp__block *after)
{
    fsdp__block *found = NULL;
    for (fsdp__tree_node *node = fsdp__tree_first(&ranges->by_begin); node != NULL; node = fsdp__tree_next(node)) {
        fsdp__block *range = BLOCK_OF(node);
        if (range->range_bytes < bytes || (after != NULL && !is_smaller(after, range))) continue;
        if (found == NULL || is_smaller(range, found)) found = range;
    }
    return found;
}

fsdp__block *fsdp__ranges_best(const fsdp__ranges *ranges, uint64_t bytes)
{
    if (ranges->placed) return smallest_placed(ranges, bytes, NULL);
    uint32_t bin = bin_of(bytes);
    fsdp__block *found = NULL;
    for (fsdp__tree_node *node = ranges->bin[bin].root; node != NULL;) {
        fsdp__block *range = BLOCK_OF(node);
        if (range->range_bytes < bytes) node = node->right;
        else found = range, node = node->left;
    }
    return found != NULL ? found : first_from(ranges, bin + 1);
}

fsdp__block *fsdp__ranges_next(const fsdp__ranges *ranges, fsdp__block *range)
{
    if (ranges->placed) return smallest_placed(ranges, range->range_bytes, range);
    fsdp__tree_node *node = fsdp__tree_next(&range->node);
    return node != NULL ? BLOCK_OF(node) : first_from(ranges, bin_of(range->range_bytes) + 1);
}

fsdp__block *fsdp__ranges_at(const fsdp__ranges *ranges, uint64_t begin, uint64_t bytes)
{
    /* The last free range that begins at or before begin. */
    fsdp__block *found = NULL;
    for (fsdp__tree_node *node = ranges->by_begin.root; node != NULL;) {
        fsdp__block *range = BLOCK_OF(node);
        if (range->begin <= begin) found = range, node = node->right;
        else node = node->left;
    }
    if (found == NULL || begin - found->begin > found->range_bytes) return NULL;
    return bytes <= found->range_bytes - (begin - found->begin) ? found : NULL;
}

/* ---- Segments ---- */

fsdp_status fsdp__ranges_reserve_segment(fsdp__ranges *ranges, uint32_t *out_number)
{
    size_t number = ranges->n_gone > 0 ? 0 : ranges->n_segments;
    while (number < ranges->n_segments && ranges->segments[number].bytes > 0) number++;
    if (!fsdp__host_grow(ranges->host, &ranges->segments, &ranges->segment_capacity, number + 1,
                         sizeof *ranges->segments))
        return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "no host memory for segment %zu", number);
    *out_number = (uint32_t)number;
    return FSDP_OK;
}

/* [from, to], a run of fragments and a longest one, becomes a range. */
static inline void make_range(fsdp__ranges *ranges, fsdp__block *from, fsdp__block *to, uint64_t bytes, uint64_t freed)
{
    from->last = to;
    to->last = from;
    from->range_bytes = bytes;
    from->range_freed = freed;
    link_range(ranges, from);
}

fsdp__block *fsdp__ranges_add(fsdp__ranges *ranges, uint32_t number, uint64_t begin, uint64_t bytes)
{
    fsdp__block *block = new_block(ranges);
    *block = (fsdp__block){.begin = begin, .bytes = bytes, .segment = number, .slot = FSDP__NO_SLOT};
    ranges->segments[number] = (fsdp__segment){begin, bytes, block};
    ranges->newest = number;
    if (number == ranges->n_segments) ranges->n_segments++;
    else ranges->n_gone--;
    make_range(ranges, block, block, bytes, 0);
    return block;
}

void fsdp__ranges_drop(fsdp__ranges *ranges, uint32_t number)
{
    fsdp__segment *segment = &ranges->segments[number];
    assert(fsdp__ranges_is_free(ranges, number));
    unlink_range(ranges, segment->first);
    for (fsdp__block *f = segment->first; f != NULL;) {
        fsdp__block *next = f->after;
        fsdp__ranges_settle(ranges, f);
        drop_block(ranges, f);
        f = next;
    }
    *segment = (fsdp__segment){0, 0, NULL};
    ranges->n_gone++;
}

/* ---- Taking ---- */

/* Cut a fragment in two at address `at`, inside it; returns the upper part. */
static fsdp__block *cut(fsdp__ranges *ranges, fsdp__block *f, uint64_t at)
{
    fsdp__block *upper = new_block(ranges);
    upper->before = f;
    upper->after = f->after;
    if (upper->after != NULL) upper->after->before = upper;
    f->after = upper;
    upper->begin = at;
    upper->bytes = f->begin + f->bytes - at;
    f->bytes -= upper->bytes;
    upper->use = FSDP__MUTATED(CUT_LOSES_CLOCK) ? (fsdp__frontier){{0, 0}, NULL} : fsdp__frontier_copy(&f->use);
    upper->segment = f->segment;
    upper->slot = f->slot;
    upper->live = upper->pending = false;
    upper->freed = f->freed;
    if (f->pending) {
        ranges->pending_bytes -= upper->bytes; /* add_pending counts them again */
        add_pending(ranges, upper, f);
    }
    return upper;
}

/* The fragments up to `to` join `from`, which becomes a live block; its guard is the maximum of theirs. */
static void fuse(fsdp__ranges *ranges, fsdp__block *from, const fsdp__block *to, uint64_t bytes)
{
    fsdp__frontier guard = from->use; /* moved */
    fsdp__block *rest = to->after;
    fsdp__ranges_settle(ranges, from);
    while (from->after != rest) {
        fsdp__block *f = from->after;
        from->after = f->after;
        if (!FSDP__MUTATED(MERGE_LOSES_CLOCK)) fsdp__frontier_max(&ranges->wides, &guard, &f->use);
        fsdp__ranges_settle(ranges, f);
        drop_block(ranges, f);
    }
    if (rest != NULL) rest->before = from;
    from->bytes = bytes;
    from->use = (fsdp__frontier){{0, 0}, NULL};
    from->until_free = 0;
    from->live = true;
    from->guard = guard;
}

fsdp__block *fsdp__ranges_take(fsdp__ranges *ranges, fsdp__block *range, fsdp__block *fragment, uint64_t begin,
                               uint64_t bytes)
{
    uint64_t end = begin + bytes, range_end = range->begin + range->range_bytes, freed = range->range_freed;
    assert(!range->live && begin >= range->begin && bytes > 0 && end <= range_end);
    unlink_range(ranges, range);

    fsdp__block *from = fragment, *last = range->last;
    while (from->begin + from->bytes <= begin) from = from->after;
    if (from->begin < begin) {
        bool was_last = from == last;
        from = cut(ranges, from, begin);
        if (was_last) last = from;
    }
    fsdp__block *to = from;
    while (to->begin + to->bytes < end) to = to->after;
    if (to->begin + to->bytes > end) {
        fsdp__block *upper = cut(ranges, to, end);
        if (to == last) last = upper;
    }

    uint64_t low_bytes = begin - range->begin, high_bytes = range_end - end;
    if (low_bytes > 0) make_range(ranges, range, from->before, low_bytes, freed);
    if (high_bytes > 0) make_range(ranges, to->after, last, high_bytes, freed);
    fuse(ranges, from, to, bytes);
    ranges->n_live++;
    return from;
}

/* ---- Giving ---- */

/* Nothing but age tells two neighbours apart. */
static inline bool same_fragment(fsdp__ranges *ranges, fsdp__block *neighbour, const fsdp__block *given)
{
    if (neighbour->slot != given->slot) return false;
    if (!fsdp__frontier_equal(&neighbour->use, &given->use) && !FSDP__MUTATED(MERGE_ANY)) return false;
    /* What is known of the one just given is true of its neighbour, too: whether somebody asked must not matter. */
    if (!given->pending) fsdp__ranges_settle(ranges, neighbour);
    return neighbour->pending == given->pending;
}

/* upper goes into lower, its neighbour below. */
static void absorb(fsdp__ranges *ranges, fsdp__block *lower, fsdp__block *upper)
{
    if (upper->pending) {
        fsdp__ranges_settle(ranges, upper);
        ranges->pending_bytes += upper->bytes; /* they are lower's now */
    }
    lower->bytes += upper->bytes;
    if (upper->freed > lower->freed) lower->freed = upper->freed;
    lower->after = upper->after;
    if (lower->after != NULL) lower->after->before = lower;
    drop_block(ranges, upper);
}

void fsdp__ranges_give(fsdp__ranges *ranges, fsdp__block *block, bool pending)
{
    assert(block->live);
    fsdp__frontier_clear(&ranges->wides, &block->guard);
    block->live = block->pending = false;
    block->freed = ++ranges->n_freed;
    ranges->n_live--;
    if (pending) add_pending(ranges, block, ranges->pending[block->slot].newest);

    fsdp__block *first = block, *last = block, *before = block->before, *after = block->after;
    uint64_t bytes = block->bytes, freed = block->freed;
    if (after != NULL && !after->live) {
        unlink_range(ranges, after);
        bytes += after->range_bytes;
        last = after->last;
        if (same_fragment(ranges, after, block)) {
            if (last == after) last = block;
            absorb(ranges, block, after);
        }
    }
    if (before != NULL && !before->live) {
        first = before->last; /* before is the last fragment of its range, or the only one */
        unlink_range(ranges, first);
        bytes += first->range_bytes;
        if (same_fragment(ranges, before, block)) {
            if (last == block) last = before;
            absorb(ranges, before, block);
        }
    }
    make_range(ranges, first, last, bytes, freed);
}
