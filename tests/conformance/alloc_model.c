/* SPDX-License-Identifier: MIT */
#include "alloc_model.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

void model_init(model *m, const fsdp_allocator_config *config, uint64_t granularity)
{
    memset(m, 0, sizeof *m);
    m->policy = config->policy;
    m->budget = config->budget_bytes;
    m->segment_bytes = config->segment_bytes;
    m->granularity = granularity;
    m->device_limit = UINT64_MAX;
}

bool model_has_room(const model *m)
{
    int n_live = 0;
    for (int i = 0; i < MODEL_BLOCKS; i++) n_live += m->block[i].live;
    return m->n_pages < MODEL_PAGES / 2 && m->n_segments < MODEL_SEGMENTS - 1 && m->n_pieces < MODEL_PIECES - 4 &&
           n_live < MODEL_BLOCKS - 1;
}

/* ---- Streams ---- */

static void raise(model_clock *into, const model_clock *other)
{
    for (int t = 0; t < MODEL_SLOTS; t++)
        if (other->at[t] > into->at[t]) into->at[t] = other->at[t];
}

static bool covered(const model *m, int slot, const model_clock *clock)
{
    for (int t = 0; t < MODEL_SLOTS; t++)
        if (clock->at[t] > m->now[slot].at[t]) return false;
    return true;
}

int model_stream_open(model *m)
{
    int slot = 0;
    while (m->open[slot]) slot++;
    m->open[slot] = true;
    if (m->epoch[slot] == 0) m->epoch[slot] = m->now[slot].at[slot] = 1;
    m->opened[slot] = m->epoch[slot];
    memset(m->fence[slot], 0, sizeof m->fence[slot]);
    return slot;
}

void model_stream_release(model *m, int slot)
{
    for (int t = 0; t < MODEL_SLOTS; t++) m->now[t].at[slot] = m->epoch[slot];
    m->now[slot].at[slot] = ++m->epoch[slot];
    m->open[slot] = false;
}

static model_fence *place_of(model *m, int slot, uint64_t epoch) { return &m->fence[slot][epoch % MODEL_FENCES]; }

static model_fence *record(model *m, int slot)
{
    uint64_t epoch = m->epoch[slot]++;
    model_fence *fence = place_of(m, slot, epoch);
    *fence = (model_fence){.epoch = epoch, .slot = slot, .snapshot = m->now[slot]};
    m->now[slot].at[slot] = m->epoch[slot];
    m->records++;
    return fence;
}

static void wait_fence(model *m, int slot, const model_fence *fence)
{
    if (fence->epoch <= m->now[slot].at[fence->slot]) return;
    m->waits++;
    raise(&m->now[slot], &fence->snapshot);
}

void model_stream_wait_stream(model *m, int slot, int other)
{
    if (slot != other) wait_fence(m, slot, record(m, other));
}

void model_event_destroy(model *m, int event)
{
    model_fence *e = &m->event[event];
    if (e->epoch > 0 && m->open[e->slot]) {
        model_fence *kept = place_of(m, e->slot, e->epoch);
        if (kept->epoch == e->epoch) kept->gone = true;
    }
    e->epoch = 0;
}

void model_event_record(model *m, int event, int slot)
{
    model_event_destroy(m, event);
    m->event[event] = *record(m, slot);
}

void model_event_wait(model *m, int event, int slot)
{
    if (m->event[event].epoch > 0) wait_fence(m, slot, &m->event[event]);
}

/* The oldest fence that covers the epoch, of those that are kept; one recorded now where there is none. */
static const model_fence *fence_for(model *m, int slot, uint64_t epoch)
{
    for (uint64_t e = epoch; e < m->epoch[slot]; e++) {
        const model_fence *fence = place_of(m, slot, e);
        if (fence->epoch == e && !fence->gone) return fence;
    }
    return record(m, slot);
}

static int count_settled(const model *m, int slot, const model_clock *need, const model_fence *fence)
{
    int n = 0;
    for (int t = 0; t < MODEL_SLOTS; t++) n += need->at[t] > m->now[slot].at[t] && fence->snapshot.at[t] >= need->at[t];
    return n;
}

/* The fence that settles most goes first, the lower slot among equals, until nothing is missing. */
static void wait_for(model *m, int slot, const model_clock *need)
{
    while (!covered(m, slot, need)) {
        const model_fence *best = NULL;
        for (int t = 0; t < MODEL_SLOTS; t++) {
            if (need->at[t] <= m->now[slot].at[t]) continue;
            const model_fence *fence = fence_for(m, t, need->at[t]);
            if (best == NULL || count_settled(m, slot, need, fence) > count_settled(m, slot, need, best)) best = fence;
        }
        wait_fence(m, slot, best);
    }
}

static void wait_and_count(model *m, int slot, const model_clock *need)
{
    uint64_t waits = m->waits;
    wait_for(m, slot, need);
    m->stats.waits += m->waits - waits;
}

/* ---- Memory ---- */

typedef struct range {
    uint32_t segment, first, n; /* pages, from the segment's first */
    uint64_t touched;
} range;

static int page_of(const model *m, uint32_t segment, uint32_t at) { return (int)(m->segment[segment].page + at); }

static const model_piece *piece_at(const model *m, uint32_t segment, uint32_t at)
{
    return &m->piece[m->page[page_of(m, segment, at)].piece];
}

/* What [first, first + n) was used for: the maximum. Returns the newest free(). */
static uint64_t history(const model *m, uint32_t segment, uint32_t first, uint32_t n, model_clock *out_clock)
{
    uint64_t newest = 0;
    memset(out_clock, 0, sizeof *out_clock);
    for (uint32_t i = first; i < first + n; i++) {
        const model_piece *piece = piece_at(m, segment, i);
        if (i > first && piece == piece_at(m, segment, i - 1)) continue;
        raise(out_clock, &piece->clock);
        if (piece->freed > newest) newest = piece->freed;
    }
    return newest;
}

static int by_size(const void *x_, const void *y_)
{
    const range *x = x_, *y = y_;
    if (x->n != y->n) return x->n < y->n ? -1 : 1;
    if (x->touched != y->touched) return x->touched < y->touched ? -1 : 1;
    if (x->segment != y->segment) return x->segment < y->segment ? -1 : 1;
    return x->first < y->first ? -1 : x->first > y->first;
}

/* The free ranges of at least n pages, smallest first, then the one touched longest ago. */
static uint32_t list_ranges(const model *m, uint32_t n, range *out)
{
    uint32_t count = 0;
    for (uint32_t s = 0; s < m->n_segments; s++) {
        for (uint32_t i = 0, end; i < m->segment[s].n && !m->segment[s].gone; i = end) {
            end = i + 1;
            if (m->page[page_of(m, s, i)].block >= 0) continue;
            while (end < m->segment[s].n && m->page[page_of(m, s, end)].block < 0) end++;
            if (end - i >= n) out[count++] = (range){s, i, end - i, m->page[page_of(m, s, i)].touched};
        }
    }
    qsort(out, count, sizeof *out, by_size);
    return count;
}

static void settle(model *m)
{
    for (uint32_t i = 0; i < m->n_pieces; i++) {
        model_piece *p = &m->piece[i];
        if (p->pending && (!m->open[p->slot] || covered(m, p->slot, &p->clock))) p->pending = false;
    }
}

void model_note(model *m)
{
    fsdp_alloc_stats *st = &m->stats;
    settle(m);
    st->active = st->allocated;
    for (uint32_t s = 0; s < m->n_segments; s++)
        for (uint32_t i = 0; i < m->segment[s].n && !m->segment[s].gone; i++)
            if (m->page[page_of(m, s, i)].block < 0 && piece_at(m, s, i)->pending) st->active += MODEL_PAGE;
    if (st->allocated > st->allocated_peak) st->allocated_peak = st->allocated;
    if (st->active > st->active_peak) st->active_peak = st->active;
    if (st->reserved > st->reserved_peak) st->reserved_peak = st->reserved;
}

static uint64_t round_up(uint64_t bytes, uint64_t to) { return (bytes + to - 1) / to * to; }

/* Bytes to take from the device; 0: the budget has no room. */
static uint64_t growth(const model *m, uint64_t bytes)
{
    uint64_t least = round_up(bytes, m->granularity), most = round_up(m->segment_bytes, m->granularity);
    uint64_t room = m->budget == 0 ? UINT64_MAX : m->budget - m->stats.reserved;
    room -= room % m->granularity;
    if (most < least) most = least;
    return most <= room ? most : least <= room ? room : 0;
}

static bool grow(model *m, uint64_t bytes, uint32_t *out_segment)
{
    uint64_t more = growth(m, bytes), left = m->device_limit - m->stats.reserved;
    uint64_t least = round_up(bytes, m->granularity);
    while (more > left && more > least) {
        more = round_up(more / 2, m->granularity);
        if (more < least) more = least;
    }
    if (more == 0 || more > left) return false;
    uint32_t number = 0;
    while (number < m->n_segments && !m->segment[number].gone) number++;
    if (number == m->n_segments) m->n_segments++;
    m->newest = number;
    model_segment *s = &m->segment[number];
    *s = (model_segment){.page = m->n_pages, .n = (uint32_t)(more / MODEL_PAGE)};
    for (uint32_t i = 0; i < s->n; i++) {
        m->page[m->n_pages].block = -1;
        m->page[m->n_pages].touched = 0;
        m->page[m->n_pages++].piece = (int)m->n_pieces;
    }
    m->piece[m->n_pieces++] = (model_piece){.slot = -1};
    m->stats.reserved += more;
    m->stats.grows++;
    model_note(m);
    *out_segment = number;
    return true;
}

typedef struct place {
    bool found, covered;
    uint32_t segment, first;
    uint64_t freed;
} place;

/* n pages of the range from its low end, or down from its high end. */
static place look_at(const model *m, const range *r, uint32_t n, bool from_high, int slot)
{
    place p = {true, true, r->segment, from_high ? r->first + r->n - n : r->first, 0};
    const model_piece *last = NULL;
    uint32_t pieces = 0;
    for (uint32_t i = 0; i < n; i++) {
        const model_piece *piece = piece_at(m, r->segment, from_high ? r->first + r->n - 1 - i : r->first + i);
        if (piece == last) continue;
        if (pieces++ >= (p.covered ? MODEL_DEEP : MODEL_FRAGMENTS)) {
            p.covered = false;
            p.freed = r->touched;
            return p;
        }
        last = piece;
        if (!covered(m, slot, &piece->clock)) p.covered = false;
        if (piece->freed > p.freed) p.freed = piece->freed;
    }
    return p;
}

/* The first n pages of the range's lowest pieces that all are covered. */
static place covered_run(const model *m, const range *r, uint32_t n, int slot, uint32_t *left)
{
    uint32_t run = 0, most = m->policy == FSDP_ALLOC_GROW_FIRST ? r->n : r->n / MODEL_CUT_OFF;
    for (uint32_t i = r->first; i < r->first + r->n; i++) {
        const model_piece *piece = piece_at(m, r->segment, i);
        if (i == r->first || piece != piece_at(m, r->segment, i - 1)) {
            if (*left == 0) break;
            --*left;
        }
        run = covered(m, slot, &piece->clock) ? run + 1 : 0;
        if (run == 1 && i - r->first > most) break;
        if (run == n) return (place){true, true, r->segment, i + 1 - n, 0};
    }
    return (place){0};
}

/* Of a range: the low end, the high one, what lies between. */
static place better_place(const model *m, const range *r, uint32_t n, int slot, uint32_t *left)
{
    place low = look_at(m, r, n, false, slot), high;
    if (low.covered || r->n == n) return low;
    high = look_at(m, r, n, true, slot);
    if (high.covered) return high;
    place between = covered_run(m, r, n, slot, left);
    if (between.found) return between;
    return high.freed < low.freed ? high : low;
}

/* In the segment that was taken last: covered or nothing. */
static place find_in_newest(const model *m, uint32_t n, int slot)
{
    const model_segment *s = &m->segment[m->newest];
    uint32_t left = MODEL_RUNS;
    for (uint32_t i = 0, end, steps = 0; m->n_segments > 0 && !s->gone && i < s->n && steps < MODEL_NEWEST;
         i = end, steps++) {
        int block = m->page[page_of(m, m->newest, i)].block;
        if (block >= 0) {
            end = i + m->block[block].n;
            continue;
        }
        for (end = i + 1; end < s->n && m->page[page_of(m, m->newest, end)].block < 0; end++) {
        }
        range r = {m->newest, i, end - i, m->page[page_of(m, m->newest, i)].touched};
        place p = r.n >= n ? better_place(m, &r, n, slot, &left) : (place){0};
        if (p.found && p.covered) return p;
    }
    return (place){0};
}

static place find_place(const model *m, uint32_t n, int slot)
{
    static range list[MODEL_PAGES];
    uint32_t count = list_ranges(m, n, list), looked_at = 0, at_least = 0, left = MODEL_RUNS;
    place oldest = {0};
    for (uint32_t i = 0; i < count; i++) {
        if (list[i].n < at_least) continue;
        place p = better_place(m, &list[i], n, slot, &left);
        if (p.covered) return p;
        if (!oldest.found || p.freed < oldest.freed) oldest = p;
        if (++looked_at % MODEL_CANDIDATES == 0) at_least = 2 * list[i].n;
    }
    place newest = find_in_newest(m, n, slot);
    return newest.found ? newest : oldest;
}

/* First the wait, then the bytes. */
static int take(model *m, const place *p, uint32_t n, int slot)
{
    int b = 0;
    while (m->block[b].live) b++;
    model_block *block = &m->block[b];
    *block = (model_block){
        .live = true, .segment = p->segment, .first = p->first, .n = n, .slot = slot, .until_free = 1u << slot};
    history(m, p->segment, p->first, n, &block->guard);
    wait_and_count(m, slot, &block->guard);
    block->named[slot] = m->epoch[slot];
    for (uint32_t i = 0; i < n; i++) m->page[page_of(m, p->segment, p->first + i)].block = b;
    m->stats.allocated += (uint64_t)n * MODEL_PAGE;
    m->stats.allocs++;
    model_note(m);
    return b;
}

fsdp_status model_alloc(model *m, uint64_t bytes, int slot, int *out_block, bool *out_grew)
{
    if (bytes > (uint64_t)1 << 56) return FSDP_ERR_ARG;
    uint64_t rounded = bytes == 0 ? MODEL_PAGE : round_up(bytes, MODEL_PAGE);
    uint32_t n = rounded > MODEL_PAGES * (uint64_t)MODEL_PAGE ? MODEL_PAGES : (uint32_t)(rounded / MODEL_PAGE);
    place p = find_place(m, n, slot);
    uint32_t grown;
    *out_grew = (!p.found || (m->policy == FSDP_ALLOC_GROW_FIRST && !p.covered)) && grow(m, rounded, &grown);
    if (*out_grew) p = (place){true, true, grown, 0, 0};
    if (!p.found) return FSDP_ERR_NO_MEMORY;
    *out_block = take(m, &p, n, slot);
    return FSDP_OK;
}

void model_place(model *m, int block, const void *ptr)
{
    m->segment[m->block[block].segment].base = (uint64_t)(uintptr_t)ptr;
}

const void *model_address(const model *m, int block)
{
    const model_block *b = &m->block[block];
    return (const void *)(uintptr_t)(m->segment[b->segment].base + (uint64_t)b->first * MODEL_PAGE);
}

void model_record_stream(model *m, int block, int slot)
{
    wait_and_count(m, slot, &m->block[block].guard);
    m->block[block].until_free |= 1u << slot;
    m->block[block].named[slot] = m->epoch[slot];
}

void model_record_use(model *m, int block, int slot) { m->block[block].use.at[slot] = m->epoch[slot]; }

/* The free pages on both sides of a border become one piece where nothing but their age tells them apart. */
static void join(model *m, uint32_t segment, uint32_t border)
{
    const model_segment *s = &m->segment[segment];
    if (border == 0 || border == s->n) return;
    uint32_t first = border - 1, end = border + 1;
    if (m->page[page_of(m, segment, first)].block >= 0 || m->page[page_of(m, segment, border)].block >= 0) return;
    const model_piece *x = piece_at(m, segment, first), *y = piece_at(m, segment, border);
    if (x->slot != y->slot || x->pending != y->pending || memcmp(&x->clock, &y->clock, sizeof x->clock) != 0) return;
    while (first > 0 && m->page[page_of(m, segment, first - 1)].block < 0 && piece_at(m, segment, first - 1) == x)
        first--;
    while (end < s->n && m->page[page_of(m, segment, end)].block < 0 && piece_at(m, segment, end) == y) end++;
    model_piece both = *x;
    if (y->freed > both.freed) both.freed = y->freed;
    for (uint32_t i = first; i < end; i++) m->page[page_of(m, segment, i)].piece = (int)m->n_pieces;
    m->piece[m->n_pieces++] = both;
}

/* The whole range that the page lies in. */
static void touch_range(model *m, uint32_t segment, uint32_t at)
{
    uint32_t first = at, end = at;
    while (first > 0 && m->page[page_of(m, segment, first - 1)].block < 0) first--;
    while (end < m->segment[segment].n && m->page[page_of(m, segment, end)].block < 0) end++;
    for (uint32_t i = first; i < end; i++) m->page[page_of(m, segment, i)].touched = m->n_freed;
}

void model_free(model *m, int block)
{
    model_block *b = &m->block[block];
    settle(m);
    for (int t = 0; t < MODEL_SLOTS; t++)
        if (b->until_free >> t & 1u) {
            /* Of the slot's present stream, by whatever call? An earlier one was drained. */
            bool present = m->open[t] && (b->named[t] >= m->opened[t] || b->use.at[t] >= m->opened[t]);
            b->use.at[t] = present ? m->epoch[t] : 0;
        }
    model_piece piece = {b->use, ++m->n_freed, b->slot, m->open[b->slot] && !covered(m, b->slot, &b->use)};
    for (uint32_t i = 0; i < b->n; i++) {
        m->page[page_of(m, b->segment, b->first + i)].block = -1;
        m->page[page_of(m, b->segment, b->first + i)].piece = (int)m->n_pieces;
    }
    m->piece[m->n_pieces++] = piece;
    join(m, b->segment, b->first + b->n);
    join(m, b->segment, b->first);
    touch_range(m, b->segment, b->first);
    b->live = false;
    m->stats.allocated -= (uint64_t)b->n * MODEL_PAGE;
    m->stats.frees++;
    model_note(m);
}

void model_trim(model *m)
{
    for (uint32_t s = 0; s < m->n_segments; s++) {
        uint32_t n_free = 0;
        while (n_free < m->segment[s].n && m->page[page_of(m, s, n_free)].block < 0) n_free++;
        if (m->segment[s].gone || n_free < m->segment[s].n) continue;
        m->segment[s].gone = true;
        m->stats.reserved -= (uint64_t)m->segment[s].n * MODEL_PAGE;
    }
    model_note(m);
}

void model_reset_peaks(model *m)
{
    model_note(m);
    m->stats.allocated_peak = m->stats.allocated;
    m->stats.active_peak = m->stats.active;
    m->stats.reserved_peak = m->stats.reserved;
}

uint64_t model_largest_free(const model *m)
{
    static range list[MODEL_PAGES];
    uint32_t count = list_ranges(m, 1, list);
    return count > 0 ? (uint64_t)list[count - 1].n * MODEL_PAGE : 0;
}
