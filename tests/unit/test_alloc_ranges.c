/* SPDX-License-Identifier: MIT */
/* The allocator's map against a map of single units of 256 bytes, over fake addresses: random takes and gives, every
 * question asked of both. Then the rules one by one. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "alloc_ranges.h"
#include "hostmem.h"
#include "xorshift.h"

enum {
    UNIT = FSDP__BLOCK_ALIGNMENT,
    SEGMENTS = 4,
    SEGMENT_UNITS = 96,
    UNITS = SEGMENTS * SEGMENT_UNITS,
    MAX_BLOCKS = 128
};

/* Segments 0 and 1 touch, 2 and 3 do not: touching segments must not merge. */
static const uint64_t segment_begin[SEGMENTS] = {0x10000, 0x10000 + SEGMENT_UNITS *UNIT, 0x90000, 0x50000};

/* ---- Host memory that is counted and can run out ---- */

typedef struct meter {
    fsdp_host_allocator libc;
    size_t bytes;
    bool empty;
} meter;

static void *metered_alloc(void *arg, size_t bytes, size_t alignment)
{
    meter *m = arg;
    if (m->empty) return NULL;
    m->bytes += bytes;
    return m->libc.alloc(m->libc.arg, bytes, alignment);
}

static void metered_free(void *arg, void *ptr, size_t bytes, size_t alignment)
{
    meter *m = arg;
    m->bytes -= bytes;
    m->libc.free(m->libc.arg, ptr, bytes, alignment);
}

/* ---- The plain model: what is true of each unit ---- */

typedef struct cell {
    bool there, live;
    uint64_t freed, touched;
    fsdp__clock clock;
    int slot;
    bool pending;
    uint64_t fragment; /* which one it is part of */
    uint64_t added;    /* the number of its segment */
} cell;

typedef struct world {
    meter meter;
    fsdp_host_allocator host;
    fsdp__ranges ranges;
    cell cell[UNITS];
    fsdp__block *block[MAX_BLOCKS]; /* live */
    int n_blocks;
    uint32_t number[SEGMENTS];
    uint64_t n_freed, n_fragments, random;
} world;

static uint64_t draw(world *w, uint64_t below) { return (xorshift_star(&w->random) >> 33) % below; }

static uint64_t address(int unit)
{
    return segment_begin[unit / SEGMENT_UNITS] + (uint64_t)(unit % SEGMENT_UNITS) * UNIT;
}

static int unit_at(uint64_t begin)
{
    for (int s = 0; s < SEGMENTS; s++)
        if (begin >= segment_begin[s] && begin < segment_begin[s] + SEGMENT_UNITS * UNIT)
            return s * SEGMENT_UNITS + (int)((begin - segment_begin[s]) / UNIT);
    fail_msg("no unit at 0x%llx", (unsigned long long)begin);
    return 0;
}

/* A maximal free run of units of one segment. */
typedef struct run {
    int unit, n;
    uint64_t touched, added;
} run;

static int list_runs(const world *w, run *runs)
{
    int n = 0;
    for (int i = 0; i < UNITS; i++) {
        const cell *c = &w->cell[i];
        if (!c->there || c->live) continue;
        bool goes_on = i % SEGMENT_UNITS != 0 && w->cell[i - 1].there && !w->cell[i - 1].live;
        if (!goes_on) runs[n++] = (run){i, 0, c->touched, c->added};
        runs[n - 1].n++;
    }
    return n;
}

/* By size, then the last free() that touched it, then age of the segment, then address. */
static int compare_runs(const void *a, const void *b)
{
    const run *x = a, *y = b;
    if (x->n != y->n) return x->n < y->n ? -1 : 1;
    if (x->touched != y->touched) return x->touched < y->touched ? -1 : 1;
    if (x->added != y->added) return x->added < y->added ? -1 : 1;
    return address(x->unit) < address(y->unit) ? -1 : 1;
}

static void assert_frontier(const fsdp__frontier *f, const fsdp__clock *want)
{
    fsdp__clock clock;
    fsdp__frontier_clock(f, &clock);
    assert_memory_equal(&clock, want, sizeof clock);
}

static fsdp__clock clock_of(const world *w, int unit, int n)
{
    fsdp__clock want = {{0}};
    for (int i = unit; i < unit + n; i++) fsdp__clock_max(&want, &w->cell[i].clock, FSDP__SLOTS);
    return want;
}

/* Every free range, in the order in which an allocation looks at them, with the fragments that it ought to have. */
static void check_free(world *w)
{
    static run runs[UNITS];
    int n = list_runs(w, runs);
    qsort(runs, (size_t)n, sizeof *runs, compare_runs);
    fsdp__block *range = fsdp__ranges_best(&w->ranges, 1);
    for (int i = 0; i < n; i++, range = fsdp__ranges_next(&w->ranges, range)) {
        assert_non_null(range);
        assert_int_equal(range->begin, address(runs[i].unit));
        assert_int_equal(range->range_bytes, runs[i].n * UNIT);
        assert_int_equal(range->range_freed, runs[i].touched);
        assert_ptr_equal(range->last->last, range);
        uint64_t end = range->begin;
        for (const fsdp__block *f = range;; f = f->after) {
            assert_int_equal(f->begin, end);
            end += f->bytes;
            for (uint64_t at = f->begin; at < end; at += UNIT) {
                const cell *c = &w->cell[unit_at(at)];
                assert_int_equal(f->freed, c->freed);
                assert_int_equal(f->pending, c->pending);
                assert_int_equal(f->slot, c->slot);
                assert_frontier(&f->use, &c->clock);
            }
            if (f == range->last) break;
        }
        assert_int_equal(end, range->begin + range->range_bytes);
    }
    assert_null(range);
}

static void check_pending(world *w)
{
    uint64_t want[FSDP__SLOTS] = {0}, all = 0, listed = 0;
    for (int i = 0; i < UNITS; i++)
        if (w->cell[i].pending) want[w->cell[i].slot] += UNIT, all += UNIT;
    assert_int_equal(w->ranges.pending_bytes, all);
    for (int t = 0; t < FSDP__SLOTS; t++) {
        uint64_t bytes = 0;
        const fsdp__block *last = NULL;
        for (const fsdp__block *f = w->ranges.pending[t].oldest; f != NULL; last = f, f = f->newer) {
            assert_true(f->pending && f->slot == t && f->older == last);
            bytes += f->bytes;
        }
        assert_ptr_equal(w->ranges.pending[t].newest, last);
        assert_int_equal(bytes, want[t]);
        listed += bytes;
    }
    assert_int_equal(listed, all);
}

/* Blocks of a segment follow one another without a gap. */
static void check_neighbours(world *w)
{
    for (int i = 0; i < w->n_blocks; i++) {
        const fsdp__block *b = w->block[i];
        assert_true(b->live);
        for (; b->after != NULL; b = b->after) {
            assert_ptr_equal(b->after->before, b);
            assert_int_equal(b->after->begin, b->begin + b->bytes);
        }
    }
    assert_int_equal(w->ranges.n_live, w->n_blocks);
}

/* ---- Moves ---- */

static void add_segment(world *w, int s)
{
    uint32_t number;
    assert_int_equal(fsdp__ranges_reserve(&w->ranges), FSDP_OK);
    assert_int_equal(fsdp__ranges_reserve_segment(&w->ranges, &number), FSDP_OK);
    for (int k = 0; k < SEGMENTS; k++) assert_false(w->cell[k * SEGMENT_UNITS].there && w->number[k] == number);
    w->number[s] = number;
    fsdp__ranges_add(&w->ranges, number, segment_begin[s], SEGMENT_UNITS * UNIT);
    for (int i = s * SEGMENT_UNITS; i < (s + 1) * SEGMENT_UNITS; i++)
        w->cell[i] = (cell){.there = true, .slot = FSDP__NO_SLOT};
    for (int i = s * SEGMENT_UNITS; i < (s + 1) * SEGMENT_UNITS; i++)
        w->cell[i].fragment = w->n_fragments, w->cell[i].added = number;
    w->n_fragments++;
}

static bool segment_is_free(const world *w, int s)
{
    for (int i = s * SEGMENT_UNITS; i < (s + 1) * SEGMENT_UNITS; i++)
        if (!w->cell[i].there || w->cell[i].live) return false;
    return true;
}

static void drop_segment(world *w, int s)
{
    assert_true(fsdp__ranges_is_free(&w->ranges, w->number[s]));
    fsdp__ranges_drop(&w->ranges, w->number[s]);
    memset(&w->cell[s * SEGMENT_UNITS], 0, SEGMENT_UNITS * sizeof(cell));
}

static void take(world *w)
{
    int unit = (int)draw(w, UNITS), n = 1 + (int)draw(w, draw(w, 4) == 0 ? SEGMENT_UNITS : 6);
    bool free_there = unit % SEGMENT_UNITS + n <= SEGMENT_UNITS;
    for (int i = unit; free_there && i < unit + n; i++) free_there = w->cell[i].there && !w->cell[i].live;
    fsdp__block *range = fsdp__ranges_at(&w->ranges, address(unit), (uint64_t)n * UNIT);
    assert_int_equal(range != NULL, free_there);
    if (range == NULL || w->n_blocks == MAX_BLOCKS) return;

    fsdp__clock clock = clock_of(w, unit, n);
    assert_int_equal(fsdp__ranges_reserve(&w->ranges), FSDP_OK);
    fsdp__block *block = fsdp__ranges_take(&w->ranges, range, range, address(unit), (uint64_t)n * UNIT);
    assert_true(block->live && block->begin == address(unit) && block->bytes == (uint64_t)n * UNIT);
    assert_int_equal(block->until_free, 0);
    assert_frontier(&block->guard, &clock);
    assert_frontier(&block->use, &(fsdp__clock){{0}});
    for (int i = unit; i < unit + n; i++)
        w->cell[i] = (cell){.there = true, .live = true, .slot = FSDP__NO_SLOT, .added = w->cell[i].added};
    block->slot = (uint8_t)draw(w, 3);
    w->block[w->n_blocks++] = block;
}

static bool same_fragment(const world *w, int i, int k)
{
    const cell *a = &w->cell[i], *b = &w->cell[k];
    return a->there && b->there && !a->live && !b->live && a->fragment == b->fragment;
}

/* Fragments that touch between cells border − 1 and border become one if only their age differs: the newer one counts. What
 * is known of the one just given (its cell is `given`) is then true of its neighbour. */
static void join(world *w, int border, int given)
{
    if (border % SEGMENT_UNITS == 0) return;
    const cell *a = &w->cell[border - 1], *b = &w->cell[border];
    if (!a->there || a->live || b->live || a->slot != b->slot) return;
    if (memcmp(&a->clock, &b->clock, sizeof a->clock) != 0) return;
    int neighbour = given < border ? border : border - 1;
    for (int i = neighbour; !w->cell[given].pending && same_fragment(w, i, neighbour);
         i += neighbour - given > 0 ? 1 : -1) {
        w->cell[i].pending = false;
        if (i % SEGMENT_UNITS == (neighbour > given ? SEGMENT_UNITS - 1 : 0)) break;
    }
    if (a->pending != b->pending) return;
    uint64_t freed = a->freed > b->freed ? a->freed : b->freed, fragment = w->n_fragments++;
    int begin = border - 1, end = border + 1;
    while (begin % SEGMENT_UNITS != 0 && same_fragment(w, begin - 1, border - 1)) begin--;
    while (end % SEGMENT_UNITS != 0 && same_fragment(w, end, border)) end++;
    for (int i = begin; i < end; i++) w->cell[i].freed = freed, w->cell[i].fragment = fragment;
}

/* The whole run that the unit is in. */
static void touch(world *w, int unit)
{
    int begin = unit / SEGMENT_UNITS * SEGMENT_UNITS, end = begin + SEGMENT_UNITS, from = unit, to = unit + 1;
    while (from > begin && !w->cell[from - 1].live) from--;
    while (to < end && !w->cell[to].live) to++;
    for (int i = from; i < to; i++) w->cell[i].touched = w->n_freed;
}

static void give(world *w)
{
    if (w->n_blocks == 0) return;
    int i = (int)draw(w, (uint64_t)w->n_blocks);
    fsdp__block *block = w->block[i];
    w->block[i] = w->block[--w->n_blocks];
    fsdp__clock clock = {{0}};
    for (uint64_t k = draw(w, 4); k > 0; k--) clock.at[draw(w, FSDP__SLOTS)] = draw(w, 1000);
    clock.at[draw(w, 3)] = 1 + draw(w, 3); /* equal clocks are frequent, as they are in life */
    assert_int_equal(fsdp__wides_reserve(&w->ranges.wides, 1), FSDP_OK);
    fsdp__frontier_raise(&w->ranges.wides, &block->use, &clock);
    bool pending = draw(w, 2) == 0;
    cell freed = {true, false, ++w->n_freed, 0, clock, block->slot, pending, w->n_fragments++, 0};
    int unit = unit_at(block->begin), n = (int)(block->bytes / UNIT);
    freed.added = w->cell[unit].added;
    for (int u = unit; u < unit + n; u++) w->cell[u] = freed;
    fsdp__ranges_give(&w->ranges, block, pending); /* never fails, never takes host memory */
    if (unit + n < UNITS) join(w, unit + n, unit);
    join(w, unit, unit);
    touch(w, unit);
}

static void settle(world *w)
{
    int slot = (int)draw(w, 3);
    fsdp__block *f = w->ranges.pending[slot].oldest;
    for (uint64_t k = draw(w, 3); f != NULL && k > 0; k--) f = f->newer;
    if (f == NULL) return;
    for (uint64_t at = f->begin; at < f->begin + f->bytes; at += UNIT) w->cell[unit_at(at)].pending = false;
    fsdp__ranges_settle(&w->ranges, f);
    fsdp__ranges_settle(&w->ranges, f); /* twice is once */
}

static void best(world *w)
{
    static run runs[UNITS];
    int n = list_runs(w, runs), units = 1 + (int)draw(w, SEGMENT_UNITS + 2), at = 0;
    qsort(runs, (size_t)n, sizeof *runs, compare_runs);
    while (at < n && runs[at].n < units) at++;
    const fsdp__block *range = fsdp__ranges_best(&w->ranges, (uint64_t)units * UNIT);
    assert_int_equal(range != NULL, at < n);
    if (range != NULL) assert_int_equal(range->begin, address(runs[at].unit));
}

static void open_world(world *w, uint64_t seed)
{
    memset(w, 0, sizeof *w);
    const fsdp_host_allocator none = {NULL, NULL, NULL, NULL};
    assert_int_equal(fsdp__host_allocator_resolve(&none, &w->meter.libc), FSDP_OK);
    w->host = (fsdp_host_allocator){metered_alloc, metered_free, &w->meter, NULL};
    w->random = seed;
    fsdp__ranges_init(&w->ranges, &w->host, true);
}

static void close_world(world *w)
{
    fsdp__ranges_fini(&w->ranges);
    assert_int_equal(w->meter.bytes, 0);
}

static void the_map_answers_as_a_map_of_units(void **state)
{
    (void)state;
    static world w;
    for (uint64_t seed = 1; seed <= 12; seed++) {
        open_world(&w, seed * 0x9e3779b97f4a7c15ull);
        add_segment(&w, 0);
        for (int step = 0; step < 4000; step++) {
            uint64_t what = draw(&w, 100);
            bool filling = step / 400 % 2 == 0;
            if (what < (filling ? 60 : 25)) take(&w);
            else if (what < 85) give(&w);
            else if (what < 93) settle(&w);
            else if (what < 97) best(&w);
            else if (what == 97) {
                int s = (int)draw(&w, SEGMENTS);
                if (!w.cell[s * SEGMENT_UNITS].there) add_segment(&w, s);
                else if (segment_is_free(&w, s)) drop_segment(&w, s);
            }
            if (step % 8 != 0) continue;
            check_free(&w);
            check_pending(&w);
            check_neighbours(&w);
        }
        while (w.n_blocks > 0) give(&w);
        check_free(&w);
        for (int s = 0; s < SEGMENTS; s++)
            if (w.cell[s * SEGMENT_UNITS].there) drop_segment(&w, s);
        assert_null(fsdp__ranges_best(&w.ranges, 1));
        check_pending(&w);
        close_world(&w);
    }
}

/* ---- One rule at a time ---- */

static fsdp__block *take_units(world *w, int unit, int n)
{
    assert_int_equal(fsdp__ranges_reserve(&w->ranges), FSDP_OK);
    fsdp__block *range = fsdp__ranges_at(&w->ranges, address(unit), (uint64_t)n * UNIT);
    assert_non_null(range);
    fsdp__block *block = fsdp__ranges_take(&w->ranges, range, range, address(unit), (uint64_t)n * UNIT);
    block->slot = 0;
    return block;
}

static void merged_ranges_keep_each_clock_to_its_bytes(void **state)
{
    (void)state;
    world w;
    open_world(&w, 1);
    add_segment(&w, 0);
    fsdp__block *block[3];
    for (int i = 0; i < 3; i++) block[i] = take_units(&w, 4 * i, 4);
    for (int i = 0; i < 3; i++) fsdp__frontier_add(&w.ranges.wides, &block[i]->use, i, 10);
    for (int i = 2; i >= 0; i--) fsdp__ranges_give(&w.ranges, block[i], false);
    /* One range again; the middle one's bytes alone need the middle one's clock alone. */
    fsdp__block *middle = take_units(&w, 4, 4);
    assert_frontier(&middle->guard, &(fsdp__clock){{0, 10, 0}});
    /* Half of the first and nothing else; then the rest of it, and what was never used. */
    fsdp__block *half = take_units(&w, 0, 2), *rest = take_units(&w, 2, 2), *fresh = take_units(&w, 50, 4);
    assert_frontier(&half->guard, &(fsdp__clock){{10}});
    assert_frontier(&rest->guard, &(fsdp__clock){{10}});
    assert_frontier(&fresh->guard, &(fsdp__clock){{0}});
    /* Across the border of the third and the unused: the third's. */
    fsdp__block *across = take_units(&w, 11, 4);
    assert_frontier(&across->guard, &(fsdp__clock){{0, 0, 10}});
    close_world(&w);
}

static void among_equals_the_one_freed_longest_ago_comes_first(void **state)
{
    (void)state;
    world w;
    open_world(&w, 1);
    add_segment(&w, 0);
    fsdp__block *block[8];
    for (int i = 0; i < 8; i++) block[i] = take_units(&w, 12 * i, 12);
    fsdp__ranges_give(&w.ranges, block[4], false);
    fsdp__ranges_give(&w.ranges, block[2], false);
    fsdp__ranges_give(&w.ranges, block[6], false);
    const int order[] = {4, 2, 6};
    fsdp__block *range = fsdp__ranges_best(&w.ranges, 12 * UNIT);
    for (int i = 0; i < 3; i++, range = fsdp__ranges_next(&w.ranges, range))
        assert_int_equal(range->begin, address(12 * order[i]));
    assert_null(range);
    close_world(&w);
}

/* Where segments lie is the device's business, and not the same on every rank. */
static void among_unused_segments_the_one_added_first_comes_first(void **state)
{
    (void)state;
    world w;
    open_world(&w, 1);
    add_segment(&w, 2), add_segment(&w, 0), add_segment(&w, 3);
    fsdp__block *range = fsdp__ranges_best(&w.ranges, 1);
    assert_int_equal(range->begin, segment_begin[2]);
    assert_int_equal((range = fsdp__ranges_next(&w.ranges, range))->begin, segment_begin[0]);
    assert_int_equal((range = fsdp__ranges_next(&w.ranges, range))->begin, segment_begin[3]);
    close_world(&w);
}

static void blocks_that_only_age_tells_apart_leave_one_fragment(void **state)
{
    (void)state;
    world w;
    open_world(&w, 1);
    add_segment(&w, 0);
    fsdp__block *block[SEGMENT_UNITS];
    for (int i = 0; i < SEGMENT_UNITS; i++) block[i] = take_units(&w, i, 1);
    for (int i = 0; i < SEGMENT_UNITS; i++) fsdp__frontier_add(&w.ranges.wides, &block[i]->use, 0, i < 48 ? 7 : 8);
    for (int i = 0; i < SEGMENT_UNITS; i += 2) fsdp__ranges_give(&w.ranges, block[i], i >= 48);
    for (int i = 1; i < SEGMENT_UNITS; i += 2) fsdp__ranges_give(&w.ranges, block[i], i >= 48);
    const fsdp__block *f = fsdp__ranges_best(&w.ranges, 1);
    assert_int_equal(f->bytes, 48 * UNIT);
    assert_int_equal(f->after->bytes, 48 * UNIT);
    assert_null(f->after->after);
    assert_int_equal(w.ranges.pending_bytes, 48 * UNIT);
    fsdp__ranges_settle(&w.ranges, w.ranges.pending[0].oldest);
    assert_int_equal(w.ranges.pending_bytes, 0);
    close_world(&w);
}

static void giving_back_needs_no_host_memory(void **state)
{
    (void)state;
    world w;
    open_world(&w, 1);
    add_segment(&w, 0);
    fsdp__block *block[SEGMENT_UNITS];
    for (int i = 0; i < SEGMENT_UNITS; i++) block[i] = take_units(&w, i, 1);
    w.meter.empty = true;
    for (int i = 0; i < SEGMENT_UNITS; i += 2) fsdp__ranges_give(&w.ranges, block[i], true);
    for (int i = 1; i < SEGMENT_UNITS; i += 2) fsdp__ranges_give(&w.ranges, block[i], true);
    assert_int_equal(w.ranges.pending_bytes, SEGMENT_UNITS * UNIT);
    close_world(&w);
}

static void a_reserve_without_host_memory_changes_nothing(void **state)
{
    (void)state;
    world w;
    open_world(&w, 1);
    w.meter.empty = true;
    assert_int_equal(fsdp__ranges_reserve(&w.ranges), FSDP_ERR_NO_HOST_MEMORY);
    assert_non_null(strstr(fsdp_last_error(), "no host memory"));
    assert_int_equal(w.ranges.n_spare + w.ranges.wides.n_spare, 0);
    w.meter.empty = false;
    assert_int_equal(fsdp__ranges_reserve(&w.ranges), FSDP_OK);
    close_world(&w);
}

int main(void)
{
    alarm(60);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_map_answers_as_a_map_of_units),
        cmocka_unit_test(merged_ranges_keep_each_clock_to_its_bytes),
        cmocka_unit_test(among_equals_the_one_freed_longest_ago_comes_first),
        cmocka_unit_test(among_unused_segments_the_one_added_first_comes_first),
        cmocka_unit_test(blocks_that_only_age_tells_apart_leave_one_fragment),
        cmocka_unit_test(giving_back_needs_no_host_memory),
        cmocka_unit_test(a_reserve_without_host_memory_changes_nothing),
    };
    return cmocka_run_group_tests_name("allocator's map", tests, NULL, NULL);
}
