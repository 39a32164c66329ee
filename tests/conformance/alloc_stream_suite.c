/* SPDX-License-Identifier: MIT */
/* Streams that come and go while blocks are live, more fences than are kept, and trim while work is running. */
#include "alloc_suite.h"

#include <stdio.h>
#include <string.h>

enum { A, B, C, D, MOST = 16, LANES = 3, ROOM = 16 * KIB };

static const uint64_t SLOW_NS = 3000000;

static uint64_t n_records(alloc_rig *r) { return counters_of(r).records; }

/* ---- Streams that come and go ---- */

static void every_stream_that_there_may_be_is_waited_for_and_no_more(void **state)
{
    alloc_rig *r = *state;
    fsdp_stream *s[MOST] = {NULL}, *one_more = NULL;
    char *block[MOST], name[16];
    make_allocator(r, MOST * KIB, MOST * KIB);
    int n = 0;
    for (; n < MOST - LANES - ALLOC_STREAMS; n++) {
        snprintf(name, sizeof name, "s%d", n);
        OK(fsdp_stream_create(r->ctx, name, &s[n]));
    }
    assert_int_equal(fsdp_stream_create(r->ctx, "17th", &one_more), FSDP_ERR_STATE);
    assert_said("stream 17th: all 16 streams of this context are in use");
    assert_null(one_more);
    for (int i = 0; i < ALLOC_STREAMS; i++) s[n++] = r->s[i];
    for (int i = 0; i < LANES; i++) s[n++] = fsdp_context_lane(r->ctx, (fsdp_lane)i);
    assert_int_equal(n, MOST);
    for (int i = 0; i < MOST; i++) {
        void *p;
        OK(fsdp_allocator_alloc(r->a, KIB, s[i], NULL, &p));
        block[i] = p;
    }
    for (int i = 0; i < MOST; i++) give(r, block[i]);
    /* All of it, on a stream that waited for nobody: once for each of the others. */
    uint64_t waits = n_waits(r);
    char *all = take(r, MOST * KIB, A);
    assert_int_equal(n_waits(r), waits + MOST - 1);
    assert_int_equal(stats_of(r).waits, MOST - 1);
    for (int i = 0; i < MOST - LANES - ALLOC_STREAMS; i++) OK(fsdp_stream_release(s[i]));
    OK(fsdp_stream_create(r->ctx, "17th", &one_more)); /* there is room again */
    OK(fsdp_allocator_record_stream(r->a, all, one_more));
    give(r, all);
    OK(fsdp_stream_release(one_more));
}

static void streams_come_and_go_while_blocks_are_live(void **state)
{
    enum { ROUNDS = 60 };
    alloc_rig *r = *state;
    char *kept[ROUNDS];
    make_allocator(r, 0, 4 * KIB);
    for (int i = 0; i < ROUNDS; i++) {
        fsdp_stream *s = NULL;
        void *p = NULL;
        OK(fsdp_stream_create(r->ctx, "visitor", &s));
        OK(fsdp_allocator_alloc(r->a, 1000, s, NULL, &p));
        kept[i] = p;
        touch(r, A, p, (uint8_t)i, 1000);
        OK(fsdp_allocator_record_stream(r->a, p, s));
        if (i > 0 && kept[i - 1] != NULL)
            OK(fsdp_allocator_record_use(r->a, kept[i - 1], s)); /* of a stream that is gone */
        OK(fsdp_stream_delay(s, 1000));
        if (i % 3 == 0) give(r, kept[i]), kept[i] = NULL;
        if (i % 5 == 4) give(r, kept[i - 2]), kept[i - 2] = NULL;
        OK(fsdp_stream_release(s));
        fsdp_alloc_stats st = stats_of(r);
        assert_true(st.allocated <= st.active && st.active <= st.reserved);
    }
    for (int i = 0; i < ROUNDS; i++) give(r, kept[i]);
    fsdp_alloc_stats st = stats_of(r);
    assert_int_equal(st.allocated, 0);
    assert_int_equal(st.active, 0); /* nobody is left who could run anything */
    assert_int_equal(st.allocs, ROUNDS);
    assert_int_equal(st.frees, ROUNDS);
}

/* The last user is gone when the block is freed, another stream has its slot, and that one has work of its own. */
static void a_released_user_needs_no_wait_but_who_has_its_slot_does(void **state)
{
    alloc_rig *r = *state;
    make_allocator(r, ROOM, ROOM);
    char *p = take(r, ROOM, A);
    OK(fsdp_allocator_record_use(r->a, p, r->s[B]));
    OK(fsdp_stream_release(r->s[B]));
    OK(fsdp_stream_create(r->ctx, "next", &r->s[B]));
    OK(fsdp_stream_delay(r->s[B], SLOW_NS));
    give(r, p);
    uint64_t waits = n_waits(r);
    assert_ptr_equal(take(r, ROOM, A), p); /* for b's work of before: done */
    assert_int_equal(n_waits(r), waits);
    OK(fsdp_allocator_record_use(r->a, p, r->s[B]));
    give(r, p);
    assert_ptr_equal(take(r, ROOM, A), p);
    assert_int_equal(n_waits(r), waits + 1);
    give(r, p);
}

/* Which bytes come back depends on what must come before their next use, not on how it came about: of two neighbours that
 * only age tells apart, one had a third user, who is gone. */
static void a_released_user_changes_no_address(void **state)
{
    alloc_rig *r = *state;
    char *p[5];
    make_allocator(r, 4 * KIB, 4 * KIB);
    for (int i = 0; i < 5; i++) p[i] = take(r, i < 4 ? 256 : 3 * KIB, A);
    OK(fsdp_allocator_record_stream(r->a, p[0], r->s[B]));
    for (int i = 0; i < 2; i++) OK(fsdp_allocator_record_use(r->a, p[i], r->s[C]));
    OK(fsdp_stream_release(r->s[B]));
    r->s[B] = NULL;
    give(r, p[0]), give(r, p[3]), give(r, p[1]); /* p[0] and p[1] become one, freed last */
    assert_ptr_equal(take(r, 256, D), p[3]);
    give(r, p[2]), give(r, p[3]), give(r, p[4]);
}

static void a_stream_of_another_context_is_refused(void **state)
{
    alloc_rig *r = *state, other;
    alloc_rig_open(&other, r->suite, 0, 0, 10000000000ull, NULL);
    make_allocator(r, ROOM, ROOM);
    char *p = take(r, 1000, A);
    void *q = NULL;
    fsdp_alloc_stats before = stats_of(r);
    assert_int_equal(fsdp_allocator_alloc(r->a, 1, other.s[A], NULL, &q), FSDP_ERR_ARG);
    assert_said("stream a belongs to another context");
    assert_int_equal(fsdp_allocator_record_stream(r->a, p, other.s[A]), FSDP_ERR_ARG);
    assert_int_equal(fsdp_allocator_record_use(r->a, p, other.s[A]), FSDP_ERR_ARG);
    assert_null(q);
    fsdp_alloc_stats after = stats_of(r);
    assert_memory_equal(&before, &after, sizeof before);
    give(r, p);
    alloc_rig_close(&other);
}

/* ---- Uses ---- */

static void recorded_in_the_middle_of_its_use_a_stream_counts_until_the_free(void **state)
{
    alloc_rig *r = *state;
    make_allocator(r, ROOM, ROOM);
    char *p = take(r, ROOM, A);
    order(r, B, A);
    touch(r, B, p, 1, ROOM);
    OK(fsdp_allocator_record_stream(r->a, p, r->s[B]));
    order(r, C, B); /* c comes after the first half of the use */
    OK(fsdp_stream_delay(r->s[B], SLOW_NS));
    touch(r, B, p, 2, ROOM);
    give(r, p);
    order(r, C, A);
    uint64_t waits = n_waits(r);
    assert_ptr_equal(take(r, ROOM, C), p);
    assert_int_equal(n_waits(r), waits + 1);
    touch(r, C, p, 3, ROOM);
    OK(fsdp_stream_drain_host(r->s[B], UINT64_MAX));
    OK(fsdp_stream_drain_host(r->s[C], UINT64_MAX));
    assert_bytes(r->suite, p, 3, ROOM);
    give(r, p);
}

static void recording_a_stream_twice_changes_nothing(void **state)
{
    alloc_rig *r = *state;
    make_allocator(r, ROOM, ROOM);
    char *p = take(r, ROOM, D);
    give(r, p);
    p = take(r, ROOM, A); /* d's */
    uint64_t waits = n_waits(r);
    for (int i = 0; i < 3; i++) OK(fsdp_allocator_record_stream(r->a, p, r->s[B]));
    assert_int_equal(n_waits(r), waits + 1); /* for d, once */
    for (int i = 0; i < 3; i++) OK(fsdp_allocator_record_stream(r->a, p, r->s[A]));
    assert_int_equal(n_waits(r), waits + 1);
    give(r, p);
    waits = n_waits(r);
    assert_ptr_equal(take(r, ROOM, C), p);
    assert_int_equal(n_waits(r), waits + 2); /* for a and b */
    give(r, p);
}

/* ---- More fences than are kept ---- */

/* b's fence that covers the use has long left the ring: the oldest that is left is later, so it serves. */
static void a_fence_that_left_the_ring_is_replaced_by_a_later_one(void **state)
{
    alloc_rig *r = *state;
    make_allocator(r, ROOM, ROOM);
    char *p = take(r, ROOM, B);
    OK(fsdp_stream_delay(r->s[B], SLOW_NS));
    touch(r, B, p, 1, ROOM);
    give(r, p);
    for (int i = 0; i < 200; i++) order(r, C, B);
    uint64_t waits = n_waits(r), records = n_records(r);
    assert_ptr_equal(take(r, ROOM, A), p);
    assert_int_equal(n_waits(r), waits + 1);
    assert_int_equal(n_records(r), records); /* a fence there was; none was made for it */
    touch(r, A, p, 2, ROOM);
    OK(fsdp_stream_drain_host(r->s[A], UINT64_MAX));
    assert_bytes(r->suite, p, 2, ROOM);
    give(r, p);
}

/* And of those that are left it is the oldest: what b has waited for later is not waited for. */
static void the_fence_that_replaces_it_is_the_oldest_that_is_left(void **state)
{
    alloc_rig *r = *state;
    make_allocator(r, ROOM, ROOM);
    char *p = take(r, ROOM / 2, B), *q = take(r, ROOM / 2, D);
    give(r, p), give(r, q);
    for (int i = 0; i < 200; i++) {
        order(r, C, B);
        if (i == 160) order(r, B, D); /* 64 fences are kept: the oldest of them is older than this */
    }
    uint64_t waits = n_waits(r);
    assert_ptr_equal(take(r, ROOM / 2, A), p);
    assert_int_equal(n_waits(r), waits + 1);
    assert_ptr_equal(take(r, ROOM / 2, A), q); /* a later fence of b would have stood for d, too */
    assert_int_equal(n_waits(r), waits + 2);
    give(r, p), give(r, q);
}

static void a_block_may_live_through_thousands_of_fences(void **state)
{
    alloc_rig *r = *state;
    make_allocator(r, ROOM, ROOM);
    char *p = take(r, ROOM, A);
    OK(fsdp_allocator_record_use(r->a, p, r->s[B]));
    for (int i = 0; i < 3000; i++) order(r, i % 2 ? A : B, i % 2 ? B : A);
    give(r, p);
    uint64_t waits = n_waits(r), records = n_records(r);
    assert_ptr_equal(take(r, ROOM, D), p); /* a's last epoch is open: a fence is made; b's use a has waited for */
    assert_int_equal(n_waits(r), waits + 1);
    assert_int_equal(n_records(r), records + 1);
    give(r, p);
}

/* ---- Trim while work is running ---- */

/* Bytes that a slow copy still reads are freed and trimmed at once: the copy gets them all the same. */
static void trim_waits_for_the_work_on_what_it_gives_back(void **state)
{
    alloc_rig *r = *state;
    void *pinned; /* a copy to other memory may keep the host until it is done */
    OK(fsdp_pinned_alloc(r->ctx, ROOM, &pinned));
    uint8_t *host = pinned;
    make_allocator(r, 0, ROOM);
    memset(host, 0, ROOM);
    char *p = take(r, ROOM, A);
    touch(r, A, p, 0x3c, ROOM);
    order(r, B, A);
    uint64_t start_ns = fsdp_context_now_ns(r->ctx); /* not later: a stream's first copy may take the host long */
    OK(fsdp_stream_delay(r->s[B], SLOW_NS));
    OK(fsdp_stream_copy(r->s[B], host, p, ROOM));
    OK(fsdp_allocator_record_use(r->a, p, r->s[B]));
    give(r, p);
    uint64_t host_waits = counters_of(r).host_waits;
    OK(fsdp_allocator_trim_host(r->a));
    assert_true(counters_of(r).host_waits > host_waits);
    assert_int_equal(stats_of(r).reserved + counters_of(r).device_bytes, 0);
    if (r->suite->takes_time) assert_true(fsdp_context_now_ns(r->ctx) - start_ns >= SLOW_NS / 2);
    if (r->suite->has_data)
        for (int i = 0; i < ROOM; i++) assert_int_equal(host[i], 0x3c);
    OK(fsdp_pinned_free(r->ctx, pinned));
}

static void trim_that_runs_into_the_deadline_gives_nothing_back(void **state)
{
    alloc_rig slow;
    if (!((alloc_rig *)*state)->suite->takes_time) skip();
    alloc_rig_open(&slow, ((alloc_rig *)*state)->suite, 0, 0, 1000000, NULL);
    make_allocator(&slow, 0, ROOM);
    char *p = take(&slow, ROOM, A), *q = take(&slow, ROOM, A);
    OK(fsdp_stream_delay(slow.s[A], 60000000));
    touch(&slow, A, p, 1, ROOM);
    give(&slow, p);
    fsdp_alloc_stats before = stats_of(&slow);
    assert_int_equal(fsdp_allocator_trim_host(slow.a), FSDP_ERR_TIMEOUT);
    fsdp_alloc_stats after = stats_of(&slow);
    assert_memory_equal(&before, &after, sizeof before);
    OK(fsdp_stream_drain_host(slow.s[A], UINT64_MAX));
    OK(fsdp_allocator_trim_host(slow.a)); /* later it can */
    assert_int_equal(stats_of(&slow).reserved, ROOM);
    give(&slow, q);
    alloc_rig_close(&slow);
}

/* Between any two calls: nothing that is live moves, and what comes after is as right as before. */
static void trims_between_all_calls_change_no_block(void **state)
{
    enum { N = 12 };
    alloc_rig *r = *state;
    char *block[N] = {NULL};
    make_allocator(r, 0, 4 * KIB);
    for (int i = 0; i < 20 * N; i++) {
        int k = i * 5 % N, s = i % ALLOC_STREAMS;
        OK(fsdp_allocator_trim_host(r->a));
        if (block[k] != NULL) {
            assert_bytes(r->suite, block[k], (uint8_t)(k + 1), 1); /* trim has drained every stream */
            give(r, block[k]);
            block[k] = NULL;
        } else {
            uint64_t bytes = (uint64_t)(1 + i * 7 % 60) * 100;
            block[k] = take(r, bytes, s);
            touch(r, s, block[k], (uint8_t)(k + 1), bytes);
        }
        fsdp_alloc_stats st = stats_of(r);
        assert_true(st.allocated <= st.active && st.active <= st.reserved);
        assert_int_equal(st.reserved, counters_of(r).device_bytes);
    }
    for (int k = 0; k < N; k++) give(r, block[k]);
    OK(fsdp_allocator_trim_host(r->a));
    assert_int_equal(stats_of(r).reserved, 0);
}

/* ---- The end of the context ---- */

static void after_an_abort_nothing_is_given_but_all_can_be_taken_back(void **state)
{
    alloc_rig r;
    alloc_rig_open(&r, ((alloc_rig *)*state)->suite, 0, 0, 10000000000ull, NULL);
    make_allocator(&r, 0, ROOM);
    char *p = take(&r, ROOM, A);
    fsdp_context_abort(r.ctx, "enough");
    void *q = NULL;
    if (fsdp_context_check(r.ctx) != FSDP_OK) { /* a backend may have nobody to tell */
        assert_int_equal(fsdp_allocator_alloc(r.a, 1, r.s[A], NULL, &q), FSDP_ERR_ABORTED);
        assert_null(q);
        assert_int_equal(fsdp_allocator_record_use(r.a, p, r.s[A]), FSDP_ERR_ABORTED);
    }
    assert_int_equal(stats_of(&r).allocs, 1);
    give(&r, p);
    assert_int_equal(stats_of(&r).allocated, 0);
    alloc_rig_close(&r);
}

int run_alloc_stream_suite(const alloc_suite *suite)
{
#define TEST(name) cmocka_unit_test_prestate_setup_teardown(name, alloc_rig_setup, alloc_rig_teardown, state)
    void *state = (void *)(uintptr_t)suite;
    const struct CMUnitTest tests[] = {
        TEST(every_stream_that_there_may_be_is_waited_for_and_no_more),
        TEST(streams_come_and_go_while_blocks_are_live),
        TEST(a_released_user_needs_no_wait_but_who_has_its_slot_does),
        TEST(a_released_user_changes_no_address),
        TEST(a_stream_of_another_context_is_refused),
        TEST(recorded_in_the_middle_of_its_use_a_stream_counts_until_the_free),
        TEST(recording_a_stream_twice_changes_nothing),
        TEST(a_fence_that_left_the_ring_is_replaced_by_a_later_one),
        TEST(the_fence_that_replaces_it_is_the_oldest_that_is_left),
        TEST(a_block_may_live_through_thousands_of_fences),
        TEST(trim_waits_for_the_work_on_what_it_gives_back),
        TEST(trim_that_runs_into_the_deadline_gives_nothing_back),
        TEST(trims_between_all_calls_change_no_block),
        TEST(after_an_abort_nothing_is_given_but_all_can_be_taken_back),
    };
    return cmocka_run_group_tests_name("streams", tests, NULL, NULL);
}
