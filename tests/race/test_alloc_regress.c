/* SPDX-License-Identifier: MIT */
/* Faults that the allocator once had, each as the program that showed it. Those of several threads: regress_threads.c. */
#include <string.h>

#include "regress_rig.h"
#include "regress_threads.h"

enum { SHORT_NS = 20000000, WHOLE = 64 * KIB };

/* Whatever the stream was given last waits for another that is held. */
static void check_stands(regress_rig *r, int stream)
{
    assert_int_equal(fsdp_stream_drain_host(r->s[stream], SHORT_NS), FSDP_ERR_TIMEOUT);
}

static void drain_all(regress_rig *r)
{
    for (int i = 0; i < REGRESS_STREAMS; i++) OK(fsdp_stream_drain_host(r->s[i], UINT64_MAX));
}

static void check_bytes(regress_rig *r, int stream, const void *ptr, int byte)
{
    static unsigned char read[WHOLE];
    memset(read, 0, sizeof read);
    OK(fsdp_stream_copy(r->s[stream], read, ptr, sizeof read));
    OK(fsdp_stream_drain_host(r->s[stream], UINT64_MAX));
    for (size_t i = 0; i < sizeof read; i++)
        if (read[i] != byte) fail_msg("byte %zu is 0x%02x, not 0x%02x", i, read[i], (unsigned)byte);
}

/* But for waits that were enqueued before the failure: they stay, and count. */
static void check_nothing_changed(const regress_rig *r, const fsdp_alloc_stats *before, uint64_t waits_before)
{
    fsdp_alloc_stats after = stats_of(r);
    assert_int_equal(after.waits - before->waits, seen_so_far().waits - waits_before);
    after.waits = before->waits;
    after.active = before->active; /* a wait may have covered what was pending */
    assert_memory_equal(before, &after, sizeof after);
    OK(fsdp_context_check(r->ctx)); /* the device goes on */
    check_tape(r);
}

/* ---- A host without memory ---- */

/* B and C have used all there is and stand; no queue has room. The k-th host allocation of A's alloc fails. True: it came to
 * that. */
static bool alloc_with_failure(int k)
{
    static regress_rig rig;
    regress_rig *r = &rig;
    regress_open(r);
    make(r, WHOLE, WHOLE, FSDP_ALLOC_WAIT_FIRST);
    start_trace(r, 1000);
    char *p = take(r, WHOLE, B);
    OK(fsdp_allocator_record_stream(r->a, p, r->s[C]));
    hold_full(r, A, 0), hold_full(r, B, 1), hold_full(r, C, 1);
    OK(fsdp_stream_fill(r->s[B], p, 0xbb, WHOLE / 2));
    OK(fsdp_stream_fill(r->s[C], p + WHOLE / 2, 0xcc, WHOLE / 2));
    OK(fsdp_allocator_free(r->a, p));

    fsdp_alloc_stats before = stats_of(r);
    uint64_t waits_before = seen_so_far().waits;
    void *q = NULL;
    host_memory_fails_after(k);
    fsdp_status status = fsdp_allocator_alloc(r->a, WHOLE, r->s[A], "again", &q);
    bool failed = host_memory_failed();
    if (failed) {
        assert_int_equal(status, FSDP_ERR_NO_HOST_MEMORY);
        assert_null(q);
        check_nothing_changed(r, &before, waits_before);
        status = fsdp_allocator_alloc(r->a, WHOLE, r->s[A], "again", &q);
    }
    OK(status);
    assert_ptr_equal(q, p);
    assert_int_equal(seen_so_far().waits, waits_before + 2); /* B's fence, and C's */
    assert_int_equal(stats_of(r).waits, 2);
    check_tape(r);

    OK(fsdp_stream_fill(r->s[A], q, 0xaa, WHOLE));
    let_go(r, A);
    check_stands(r, A);
    let_go(r, B);
    check_stands(r, A);
    let_go(r, C);
    drain_all(r);
    check_bytes(r, A, q, 0xaa);
    check_no_race(r);
    OK(fsdp_allocator_free(r->a, q));
    regress_close(r);
    return failed;
}

static void an_alloc_whose_wait_fails_changes_nothing(void **state)
{
    (void)state;
    int k = 0;
    while (k < 100 && alloc_with_failure(k)) k++;
    assert_in_range(k, 3, 99); /* at least the three queues */
}

/* A's block is guarded by B, which stands. The k-th host allocation of record_stream for D fails; then, once more or not,
 * the block is freed and A has it again. True: it came to that. */
static bool record_stream_with_failure(int k, bool repeat)
{
    static regress_rig rig;
    regress_rig *r = &rig;
    regress_open(r);
    make(r, WHOLE, WHOLE, FSDP_ALLOC_WAIT_FIRST);
    start_trace(r, 1000);
    void *p = take(r, WHOLE, B);
    hold_stream(r, B), hold_full(r, D, 0);
    OK(fsdp_stream_fill(r->s[B], p, 0xbb, WHOLE));
    OK(fsdp_allocator_free(r->a, p));
    p = take(r, WHOLE, A);

    fsdp_alloc_stats before = stats_of(r);
    uint64_t waits_before = seen_so_far().waits;
    host_memory_fails_after(k);
    fsdp_status status = fsdp_allocator_record_stream(r->a, p, r->s[D]);
    bool failed = host_memory_failed();
    if (failed) {
        assert_int_equal(status, FSDP_ERR_NO_HOST_MEMORY);
        check_nothing_changed(r, &before, waits_before);
        if (repeat) status = fsdp_allocator_record_stream(r->a, p, r->s[D]);
    }
    bool noted = !failed || repeat;
    if (noted) {
        OK(status);
        assert_int_equal(seen_so_far().waits, waits_before + 1);
        OK(fsdp_stream_fill(r->s[D], p, 0xdd, WHOLE));
        let_go(r, D);
        check_stands(r, D);
    }
    OK(fsdp_allocator_free(r->a, p));
    assert_ptr_equal(take(r, WHOLE, A), p);
    assert_int_equal(seen_so_far().waits, waits_before + (noted ? 2 : 0)); /* A waits for D if D has used it */
    OK(fsdp_stream_fill(r->s[A], p, 0xaa, WHOLE));
    check_stands(r, A);
    let_go(r, B), let_go(r, D);
    drain_all(r);
    check_tape(r);
    check_bytes(r, A, p, 0xaa);
    check_no_race(r);
    OK(fsdp_allocator_free(r->a, p));
    regress_close(r);
    return failed;
}

static void a_record_stream_whose_wait_fails_is_not_noted(void **state)
{
    (void)state;
    int k = 0;
    while (k < 100 && record_stream_with_failure(k, false)) k++;
    assert_in_range(k, 1, 99);
    for (int i = 0; i < k; i++) assert_true(record_stream_with_failure(i, true));
}

/* Calls of every kind that the device has no memory for. */
static void check_refused(regress_rig *r, fsdp_status status, uint64_t extra_records)
{
    static seen before;
    (void)host_memory_failed();
    seen now = seen_so_far();
    if (status != FSDP_OK) {
        assert_int_equal(status, FSDP_ERR_NO_HOST_MEMORY);
        assert_int_equal(now.records, before.records + extra_records);
        assert_int_equal(now.waits, before.waits);
        assert_int_equal(now.operations, before.operations);
    }
    before = now;
    check_tape(r);
    host_memory_fails_after(0);
}

static void refuse_everything(regress_rig *r, uint64_t max_records)
{
    fsdp_event *event, *other;
    char *p = take(r, 4 * KIB, A);
    OK(fsdp_event_create(r->ctx, &event));
    OK(fsdp_event_create(r->ctx, &other));
    OK(fsdp_event_record(other, r->s[B]));
    OK(fsdp_stream_drain_host(r->s[B], UINT64_MAX));
    OK(fsdp_event_record(other, r->s[B])); /* a point to spare: then it is the queue that has no room */
    hold_full(r, A, 0);
    start_trace(r, max_records);
    check_refused(r, FSDP_OK, 0);
    check_refused(r, fsdp_stream_fill(r->s[A], p, 1, 4 * KIB), 0);
    check_refused(r, fsdp_stream_delay(r->s[A], 0), 0);
    check_refused(r, fsdp_event_record(event, r->s[A]), 0);
    check_refused(r, fsdp_stream_wait_event(r->s[A], other), 0);
    check_refused(r, fsdp_stream_wait_stream(r->s[A], r->s[B]), 1); /* B's fence is there */
    for (int k = 0; k < 3; k++) {
        host_memory_fails_after(k);
        fsdp_status status = fsdp_barrier(fsdp_context_comm(r->ctx), r->s[A], NULL);
        if (k == 0) assert_int_equal(status, FSDP_ERR_NO_HOST_MEMORY);
        check_refused(r, status, 0);
    }
    (void)host_memory_failed();
    OK(fsdp_stream_fill(r->s[A], p, 1, 4 * KIB)); /* the same calls, and now they are there */
    OK(fsdp_event_record(event, r->s[A]));
    OK(fsdp_stream_wait_event(r->s[B], event));
    check_tape(r);
    let_go(r, A);
    fsdp_event_destroy(event), fsdp_event_destroy(other);
    OK(fsdp_allocator_free(r->a, p));
}

static void what_never_happened_is_neither_on_the_tape_nor_counted(void **state)
{
    regress_rig *r = *state;
    make(r, 0, 4 * KIB, FSDP_ALLOC_WAIT_FIRST);
    refuse_everything(r, 1000);
    assert_int_equal(fsdp_trace_dropped(r->trace), 0);
    check_no_race(r);
}

static void what_never_happened_is_not_dropped_from_a_full_tape_either(void **state)
{
    regress_rig *r = *state;
    make(r, 0, 4 * KIB, FSDP_ALLOC_WAIT_FIRST);
    refuse_everything(r, 1);
    assert_true(fsdp_trace_dropped(r->trace) >= 3);
}

/* ---- A device or a budget that is small ---- */

static void a_device_with_less_than_a_segment_left_gives_what_is_needed(void **state)
{
    regress_rig *r = *state;
    void *p[6];
    make(r, 0, 64 * KIB, FSDP_ALLOC_WAIT_FIRST);
    device_has(24 * KIB);
    for (int i = 0; i < 6; i++) p[i] = take(r, 4 * KIB, A);
    assert_int_equal(stats_of(r).reserved, 24 * KIB);
    void *more = NULL;
    assert_int_equal(fsdp_allocator_alloc(r->a, 1, r->s[A], "more", &more), FSDP_ERR_NO_MEMORY);
    for (int i = 0; i < 6; i++) OK(fsdp_allocator_free(r->a, p[i]));
    device_has(UINT64_MAX);
    OK(fsdp_allocator_free(r->a, take(r, 16 * KIB, A))); /* it took halves, not pages */
    assert_int_equal(stats_of(r).reserved, 24 * KIB);
}

/* As above where growing comes before waiting: no wait while the device has what is needed. */
static void a_device_with_less_than_a_segment_left_is_used_before_waiting(void **state)
{
    regress_rig *r = *state;
    make(r, 0, 64 * KIB, FSDP_ALLOC_GROW_FIRST);
    device_has(12 * KIB);
    char *ptr[] = {take(r, 4 * KIB, A), NULL, NULL};
    for (int i = A; i <= C; i++) {
        if (i > A) ptr[i] = take(r, 4 * KIB, i);
        OK(fsdp_allocator_free(r->a, ptr[i]));
        assert_int_equal(stats_of(r).reserved, i < C ? 8 * KIB : 12 * KIB);
    }
    assert_int_equal(stats_of(r).waits, 0);
    assert_ptr_equal(take(r, 4 * KIB, D), ptr[A]); /* and then it waits, for the oldest */
    assert_int_equal(stats_of(r).waits, 1);
    OK(fsdp_allocator_free(r->a, ptr[A]));
}

/* A budget below a segment is one segment: what was cut up is whole again once all is free. */
static void a_budget_below_a_segment_does_not_fall_to_pieces(void **state)
{
    enum { MOST = 10000 };
    regress_rig *r = *state;
    static void *p[MOST];
    uint64_t budget = 2 * MIB - 4 * KIB;
    make(r, budget, 2 * MIB, FSDP_ALLOC_WAIT_FIRST);
    int n = 0;
    while (n < MOST && fsdp_allocator_alloc(r->a, 300, r->s[A], "small", &p[n]) == FSDP_OK) n++;
    assert_int_equal(n, budget / 512);
    assert_int_equal(stats_of(r).reserved, budget);
    for (int i = 0; i < n; i++) OK(fsdp_allocator_free(r->a, p[i]));
    OK(fsdp_allocator_free(r->a, take(r, budget / 2, A)));
    OK(fsdp_allocator_free(r->a, take(r, budget, A)));
    assert_int_equal(stats_of(r).grows, 1);
}

/* ---- The middle of a range ---- */

static void use_by_both(regress_rig *r, int n)
{
    for (int i = 0; i < n; i++) {
        void *p = take(r, 4 * KIB, A);
        OK(fsdp_allocator_record_stream(r->a, p, r->s[B]));
        OK(fsdp_allocator_free(r->a, p));
    }
}

/* B is never joined, so that no block can come back to A without a wait; but there is room. */
static void growing_first_uses_the_middle_of_a_segment(void **state)
{
    regress_rig *r = *state;
    make(r, 0, 2 * MIB, FSDP_ALLOC_GROW_FIRST);
    use_by_both(r, 200);
    fsdp_alloc_stats s = stats_of(r);
    assert_int_equal(s.waits, 0);
    assert_int_equal(s.active, 200 * 4 * KIB);
    assert_true(s.reserved <= 4 * MIB);
}

/* What a place in the middle may cut off is a sixteenth of the range. */
static void waiting_first_does_not_wait_while_the_low_sixteenth_lasts(void **state)
{
    regress_rig *r = *state;
    make(r, 16 * MIB, 16 * MIB, FSDP_ALLOC_WAIT_FIRST);
    use_by_both(r, 200); /* 800 KiB of the 1 MiB */
    assert_int_equal(stats_of(r).waits, 0);
    use_by_both(r, 100);
    assert_true(stats_of(r).waits > 0);
    assert_int_equal(stats_of(r).reserved, 16 * MIB);
}

/* ---- The slot of a stream that is gone ---- */

static void a_block_that_outlives_its_stream_is_not_the_next_streams(void **state)
{
    regress_rig *r = *state;
    make(r, 4 * KIB, 4 * KIB, FSDP_ALLOC_WAIT_FIRST);
    void *p = take(r, 4 * KIB, A);
    OK(fsdp_stream_release(r->s[A]));
    OK(fsdp_stream_create(r->ctx, "next", &r->s[A])); /* has A's slot */
    hold_stream(r, A);
    OK(fsdp_allocator_free(r->a, p));
    assert_ptr_equal(take(r, 4 * KIB, D), p);
    assert_int_equal(stats_of(r).waits, 0);
    OK(fsdp_stream_drain_host(r->s[D], UINT64_MAX)); /* while the next one stands */
    let_go(r, A);
    OK(fsdp_allocator_free(r->a, p));
}

/* But it is, once it says so. record: 0 record_stream, 1 record_use. */
static void check_named(regress_rig *r, int record)
{
    void *p = take(r, 4 * KIB, A);
    OK(fsdp_stream_release(r->s[A]));
    OK(fsdp_stream_create(r->ctx, "next", &r->s[A]));
    hold_stream(r, A);
    if (record == 0) OK(fsdp_allocator_record_stream(r->a, p, r->s[A]));
    OK(fsdp_stream_fill(r->s[A], p, 1, 4 * KIB));
    if (record == 1) OK(fsdp_allocator_record_use(r->a, p, r->s[A]));
    OK(fsdp_allocator_free(r->a, p));
    uint64_t waits = seen_so_far().waits;
    assert_ptr_equal(take(r, 4 * KIB, D), p);
    assert_int_equal(seen_so_far().waits, waits + 1);
    check_stands(r, D);
    let_go(r, A);
    OK(fsdp_stream_drain_host(r->s[D], UINT64_MAX));
    OK(fsdp_allocator_free(r->a, p));
}

static void the_next_stream_of_a_slot_may_use_the_block_too(void **state)
{
    make(*state, 4 * KIB, 4 * KIB, FSDP_ALLOC_WAIT_FIRST);
    for (int record = 0; record < 2; record++) check_named(*state, record);
}

int main(int argc, char **argv)
{
    if (argc > 1) cmocka_set_test_filter(argv[1]);
#define TEST(name) cmocka_unit_test_setup_teardown(name, regress_setup, regress_teardown)
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_alloc_whose_wait_fails_changes_nothing),
        cmocka_unit_test(a_record_stream_whose_wait_fails_is_not_noted),
        TEST(what_never_happened_is_neither_on_the_tape_nor_counted),
        TEST(what_never_happened_is_not_dropped_from_a_full_tape_either),
        TEST(a_device_with_less_than_a_segment_left_gives_what_is_needed),
        TEST(a_device_with_less_than_a_segment_left_is_used_before_waiting),
        TEST(a_budget_below_a_segment_does_not_fall_to_pieces),
        TEST(growing_first_uses_the_middle_of_a_segment),
        TEST(waiting_first_does_not_wait_while_the_low_sixteenth_lasts),
        TEST(a_block_that_outlives_its_stream_is_not_the_next_streams),
        TEST(the_next_stream_of_a_slot_may_use_the_block_too),
        TEST(trim_keeps_what_is_freed_while_it_drains),
        TEST(release_waits_until_nobody_drains_the_stream),
        TEST(trim_on_one_thread_and_streams_that_come_and_go_on_another),
        TEST(destroy_on_one_thread_and_streams_that_come_and_go_on_another),
        TEST(while_a_stream_is_released_other_threads_go_on),
        TEST(counters_may_be_asked_for_while_another_thread_allocates),
    };
    return cmocka_run_group_tests_name("what was wrong once", tests, NULL, NULL);
}
