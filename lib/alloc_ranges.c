/* SPDX-License-Identifier: MIT */
#include "alloc_ranges.h"

#include <string.h>

#include "check.h"
#include "hostmem.h"

#define BLOCK_OF(node, member) ((fsdp__block *)(void *)((char *)(node)-offsetof(fsdp__block, member)))

static bool less_size(const fsdp__tree_node *a, const fsdp__tree_node *b)
{
    const fsdp__block *x = BLOCK_OF(a, by_size), *y = BLOCK_OF(b, by_size);
    if (x->bytes != y->bytes) return x->bytes < y->bytes;
    if (x->freed != y->freed) return x->freed < y->freed;
    if (x->segment != y->segment) return x->segment < y->segment; /* its number: addresses differ between ranks */
    return x->begin < y->begin;
}

static bool less_begin(const fsdp__tree_node *a, const fsdp__tree_node *b)
{
    return BLOCK_OF(a, by_begin)->begin < BLOCK_OF(b, by_begin)->begin;
}

void fsdp__ranges_init(fsdp__ranges *ranges, const fsdp_host_allocator *host)
{
    memset(ranges, 0, sizeof *ranges);
    ranges->host = host;
    ranges->by_size.less = less_size;
    ranges->by_begin.less = less_begin;
}

/* Nodes come in chunks and are kept until fini: a pool's map never shrinks below its high-water mark. */
typedef struct chunk {
    struct chunk *next;
    uint32_t n;
    uint32_t unused;
} chunk;

static size_t chunk_bytes(uint32_t n) { return sizeof(chunk) + n * (sizeof(fsdp__block) + sizeof(fsdp__fragment)); }

void fsdp__ranges_fini(fsdp__ranges *ranges)
{
    for (chunk *c = ranges->chunks; c != NULL;) {
        chunk *next = c->next;
        fsdp__host_free(ranges->host, c, chunk_bytes(c->n), 1);
        c = next;
    }
    memset(ranges, 0, sizeof *ranges);
}

fsdp_status fsdp__ranges_reserve(fsdp__ranges *ranges, uint32_t n_blocks)
{
    uint32_t n_fragments = n_blocks + ranges->n_live;
    if (ranges->n_spare_blocks >= n_blocks && ranges->n_spare_fragments >= n_fragments) return FSDP_OK;
    uint32_t n = n_fragments < 64 ? 64 : n_fragments;
    chunk *c = fsdp__host_alloc(ranges->host, chunk_bytes(n), 1);
    if (c == NULL)
        return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "no host memory for the map of %u blocks (%zu bytes)", n,
                          chunk_bytes(n));
    c->next = ranges->chunks;
    c->n = n;
    ranges->chunks = c;
    fsdp__block *blocks = (fsdp__block *)(void *)(c + 1);
    fsdp__fragment *fragments = (fsdp__fragment *)(void *)(blocks + n);
    for (uint32_t i = 0; i < n; i++) {
        blocks[i].after = ranges->spare_blocks;
        ranges->spare_blocks = &blocks[i];
        fragments[i].next = ranges->spare_fragments;
        ranges->spare_fragments = &fragments[i];
    }
    ranges->n_spare_blocks += n;
    ranges->n_spare_fragments += n;
    return FSDP_OK;
}

static fsdp__block *new_block(fsdp__ranges *ranges)
{
    assert(ranges->n_spare_blocks > 0);
    fsdp__block *block = ranges->spare_blocks;
    ranges->spare_blocks = block->after;
    ranges->n_spare_blocks--;
    block->before = block->after = NULL;
    block->fragments = NULL;
    block->tag = "";
    return block;
}

static void drop_block(fsdp__ranges *ranges, fsdp__block *block)
{
    block->after = ranges->spare_blocks;
    ranges->spare_blocks = block;
    ranges->n_spare_blocks++;
}

static fsdp__fragment *new_fragment(fsdp__ranges *ranges)
{
    assert(ranges->n_spare_fragments > 0);
    fsdp__fragment *fragment = ranges->spare_fragments;
    ranges->spare_fragments = fragment->next;
    ranges->n_spare_fragments--;
    return fragment;
}

static void drop_fragment(fsdp__ranges *ranges, fsdp__fragment *fragment)
{
    fsdp__ranges_settle(ranges, fragment);
    fragment->next = ranges->spare_fragments;
    ranges->spare_fragments = fragment;
    ranges->n_spare_fragments++;
}

static void add_pending(fsdp__ranges *ranges, fsdp__fragment *f, fsdp__fragment *after)
{
    f->pending = true;
    f->older = after;
    f->newer = after != NULL ? after->newer : ranges->oldest_pending[f->slot];
    *(f->older != NULL ? &f->older->newer : &ranges->oldest_pending[f->slot]) = f;
    *(f->newer != NULL ? &f->newer->older : &ranges->newest_pending[f->slot]) = f;
    ranges->pending_bytes += f->bytes;
}

void fsdp__ranges_settle(fsdp__ranges *ranges, fsdp__fragment *f)
{
    if (!f->pending) return;
    f->pending = false;
    *(f->older != NULL ? &f->older->newer : &ranges->oldest_pending[f->slot]) = f->newer;
    *(f->newer != NULL ? &f->newer->older : &ranges->newest_pending[f->slot]) = f->older;
    ranges->pending_bytes -= f->bytes;
}

static void link_free(fsdp__ranges *ranges, fsdp__block *range)
{
    range->live = false;
    range->freed = 0;
    for (const fsdp__fragment *f = range->fragments; f != NULL; f = f->next)
        if (f->freed > range->freed) range->freed = f->freed;
    fsdp__tree_insert(&ranges->by_size, &range->by_size);
    fsdp__tree_insert(&ranges->by_begin, &range->by_begin);
}

static void unlink_free(fsdp__ranges *ranges, fsdp__block *range)
{
    fsdp__tree_remove(&ranges->by_size, &range->by_size);
    fsdp__tree_remove(&ranges->by_begin, &range->by_begin);
}

fsdp__block *fsdp__ranges_add(fsdp__ranges *ranges, uint64_t begin, uint64_t bytes)
{
    fsdp__block *range = new_block(ranges);
    range->begin = begin;
    range->bytes = bytes;
    range->segment = ranges->n_segments++;
    range->fragments = new_fragment(ranges);
    *range->fragments = (fsdp__fragment){.begin = begin, .bytes = bytes, .slot = -1};
    link_free(ranges, range);
    return range;
}

void fsdp__ranges_drop(fsdp__ranges *ranges, fsdp__block *segment)
{
    assert(!segment->live && segment->before == NULL && segment->after == NULL);
    unlink_free(ranges, segment);
    for (fsdp__fragment *f = segment->fragments; f != NULL;) {
        fsdp__fragment *next = f->next;
        drop_fragment(ranges, f);
        f = next;
    }
    drop_block(ranges, segment);
}

fsdp__block *fsdp__ranges_best(const fsdp__ranges *ranges, uint64_t bytes)
{
    fsdp__block key = {.bytes = bytes};
    fsdp__tree_node *node = fsdp__tree_lower_bound(&ranges->by_size, &key.by_size);
    return node != NULL ? BLOCK_OF(node, by_size) : NULL;
}

fsdp__block *fsdp__ranges_next(fsdp__block *range)
{
    fsdp__tree_node *node = fsdp__tree_next(&range->by_size);
    return node != NULL ? BLOCK_OF(node, by_size) : NULL;
}

fsdp__block *fsdp__ranges_at(const fsdp__ranges *ranges, uint64_t begin, uint64_t bytes)
{
    /* The last free range that begins at or before begin. */
    fsdp__block *found = NULL;
    for (fsdp__tree_node *node = ranges->by_begin.root; node != NULL;) {
        fsdp__block *range = BLOCK_OF(node, by_begin);
        if (range->begin <= begin) found = range, node = node->right;
        else node = node->left;
    }
    return found != NULL && begin - found->begin <= found->bytes && bytes <= found->bytes - (begin - found->begin)
               ? found
               : NULL;
}

uint64_t fsdp__ranges_clock(const fsdp__block *range, uint64_t begin, uint64_t bytes, fsdp__clock *out_clock)
{
    const fsdp__fragment *only = range->fragments;
    if (only->next == NULL) { /* what is usual */
        *out_clock = only->clock;
        return only->freed;
    }
    uint64_t newest = 0;
    memset(out_clock, 0, sizeof *out_clock);
    for (const fsdp__fragment *f = range->fragments; f != NULL && f->begin < begin + bytes; f = f->next) {
        if (f->begin + f->bytes <= begin) continue;
        fsdp__clock_max(out_clock, &f->clock, FSDP__SLOTS);
        if (f->freed > newest) newest = f->freed;
    }
    return newest;
}

/* Cut the fragment list of range at address: returns what lies at or above it. */
static fsdp__fragment *cut_fragments(fsdp__ranges *ranges, fsdp__block *range, uint64_t at)
{
    fsdp__fragment **link = &range->fragments;
    while (*link != NULL && (*link)->begin + (*link)->bytes <= at) link = &(*link)->next;
    fsdp__fragment *f = *link, *upper = f;
    if (f != NULL && f->begin < at) { /* at lies inside f */
        upper = new_fragment(ranges);
        *upper = *f;
        upper->begin = at;
        upper->bytes = f->begin + f->bytes - at;
        f->bytes = at - f->begin;
        f->next = NULL;
        if (f->pending) {
            ranges->pending_bytes -= upper->bytes; /* add_pending counts them again */
            add_pending(ranges, upper, f);
        }
    } else {
        *link = NULL;
    }
    return upper;
}

/* Split range at address `at` into two neighbours; returns the upper one. Neither is linked as free. */
static fsdp__block *split(fsdp__ranges *ranges, fsdp__block *range, uint64_t at)
{
    fsdp__block *upper = new_block(ranges);
    upper->begin = at;
    upper->bytes = range->begin + range->bytes - at;
    upper->segment = range->segment;
    upper->fragments = cut_fragments(ranges, range, at);
    range->bytes = at - range->begin;
    upper->before = range;
    upper->after = range->after;
    if (upper->after != NULL) upper->after->before = upper;
    range->after = upper;
    return upper;
}

fsdp__block *fsdp__ranges_take(fsdp__ranges *ranges, fsdp__block *range, uint64_t begin, uint64_t bytes)
{
    assert(!range->live && begin >= range->begin && bytes > 0 && begin + bytes <= range->begin + range->bytes);
    unlink_free(ranges, range);
    fsdp__block *block = range;
    if (begin > range->begin) {
        block = split(ranges, range, begin);
        link_free(ranges, range);
    }
    if (block->bytes > bytes) link_free(ranges, split(ranges, block, begin + bytes));

    fsdp__ranges_clock(block, begin, bytes, &block->guard);
    while (block->fragments != NULL) {
        fsdp__fragment *f = block->fragments;
        block->fragments = f->next;
        drop_fragment(ranges, f);
    }
    block->live = true;
    ranges->n_live++;
    memset(&block->use, 0, sizeof block->use);
    block->until_free = 0;
    return block;
}

/* Upper lies right above lower: their fragments become one list. The two that touch become one fragment where nothing but
 * their age tells them apart, so that a stream that gives back thousands of blocks leaves a few fragments. */
static void append_fragments(fsdp__ranges *ranges, fsdp__block *lower, fsdp__block *upper)
{
    fsdp__fragment *last = lower->fragments, *first = upper->fragments;
    while (last->next != NULL) last = last->next;
    last->next = first;
    if (last->slot != first->slot || last->pending != first->pending) return;
    if (memcmp(&last->clock, &first->clock, sizeof last->clock) != 0) return;
    if (last->pending) ranges->pending_bytes += first->bytes; /* dropping it takes them off */
    last->bytes += first->bytes;
    if (first->freed > last->freed) last->freed = first->freed;
    last->next = first->next;
    drop_fragment(ranges, first);
}

/* upper disappears into lower; both are unlinked. */
static void merge(fsdp__ranges *ranges, fsdp__block *lower, fsdp__block *upper)
{
    append_fragments(ranges, lower, upper);
    lower->bytes += upper->bytes;
    lower->after = upper->after;
    if (lower->after != NULL) lower->after->before = lower;
    drop_block(ranges, upper);
}

void fsdp__ranges_give(fsdp__ranges *ranges, fsdp__block *block, bool pending)
{
    assert(block->live);
    fsdp__fragment *f = new_fragment(ranges);
    *f = (fsdp__fragment){.begin = block->begin,
                          .bytes = block->bytes,
                          .freed = ++ranges->n_freed,
                          .clock = block->use,
                          .slot = block->slot};
    if (pending) add_pending(ranges, f, ranges->newest_pending[f->slot]);
    block->fragments = f;
    block->live = false;
    ranges->n_live--;
    if (block->after != NULL && !block->after->live) {
        unlink_free(ranges, block->after);
        merge(ranges, block, block->after);
    }
    if (block->before != NULL && !block->before->live) {
        fsdp__block *lower = block->before;
        unlink_free(ranges, lower);
        merge(ranges, lower, block);
        block = lower;
    }
    link_free(ranges, block);
}
