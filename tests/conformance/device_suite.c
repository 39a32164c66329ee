/* SPDX-License-Identifier: MIT */
/* Streams and events of any backend. Order is asserted three ways: by spans (all backends), by data, and by gates:
 * host calls that hold a stream until the test lets go, so that "does not happen before" is asserted without a race. */
#include "device_suite.h"

#include <stdatomic.h>
#include <string.h>

enum { A, B, C, D }; /* streams */

static const uint64_t SHORT_NS = 2000000; /* a delay */

/* ---- Order ---- */

static void operations_of_a_stream_run_one_after_another(void **state)
{
    fixture *f = *state;
    fsdp_span span[20] = {{0, 0}};
    for (int i = 0; i < 20; i++) launch(f, A, delay_op(SHORT_NS / 20), &span[i]);
    drain(f, A);
    for (int i = 0; i < 20; i++) {
        assert_true(span[i].end_ns - span[i].start_ns >= SHORT_NS / 20);
        if (i > 0) assert_true(span[i].start_ns >= span[i - 1].end_ns);
    }
}

static void data_of_a_stream_is_seen_in_order(void **state)
{
    fixture *f = *state;
    need_data(f);
    char *x = fixture_block(f, 4096), *seen = fixture_block(f, 64 * 64);
    char back[64];
    for (int i = 0; i < 64; i++) {
        launch(f, A, fill_op(x, (uint8_t)i, 64), NULL);
        launch(f, A, copy_op(seen + 64 * i, x, 64), NULL);
    }
    for (int i = 0; i < 64; i++) {
        launch(f, A, copy_op(back, seen + 64 * i, 64), NULL);
        drain(f, A);
        for (int k = 0; k < 64; k++) assert_int_equal(back[k], i);
    }
}

typedef struct counter {
    int next;
    bool in_order;
} counter;

typedef struct turn {
    counter *counter;
    int index;
} turn;

static void take_turn(void *arg)
{
    turn *t = arg;
    if (t->counter->next++ != t->index) t->counter->in_order = false;
}

static void a_queue_of_ten_thousand_keeps_its_order_and_never_blocks_the_host(void **state)
{
    fixture *f = *state;
    need_host_calls(f);
    static turn turns[10000];
    counter count = {0, true};
    int n = f->suite->max_queued > 0 ? (int)f->suite->max_queued : 10000;
    close_gate(f, A, 0);
    for (int i = 0; i < n; i++) {
        turns[i] = (turn){&count, i};
        host_call(f, A, take_turn, &turns[i]);
    }
    open_gate(f, 0);
    drain(f, A);
    assert_int_equal(count.next, n);
    assert_true(count.in_order);
}

static void streams_without_an_edge_do_not_wait_for_each_other(void **state)
{
    fixture *f = *state;
    need_host_calls(f);
    for (int s = A; s < D; s++) close_gate(f, s, s);
    record(f, 0, D);
    DO(f->ops->event_wait(f->dev, f->event[0], 20ull * SECOND));
    for (int s = A; s < D; s++) open_gate(f, s);
}

static void a_wait_puts_a_stream_behind_the_record(void **state)
{
    fixture *f = *state;
    fsdp_span before = {0, 0}, after = {0, 0}, stood = {0, 0}, marked = {0, 0};
    launch(f, A, delay_op(SHORT_NS), &before);
    DO(f->ops->event_record(f->dev, f->event[0], f->stream[A], &marked));
    DO(f->ops->stream_wait(f->dev, f->stream[B], f->event[0], &stood));
    launch(f, B, delay_op(SHORT_NS), &after);
    drain(f, B);
    drain(f, A);
    assert_true(marked.start_ns >= before.end_ns && marked.end_ns == marked.start_ns);
    assert_true(stood.start_ns <= stood.end_ns && stood.end_ns >= marked.end_ns);
    assert_true(after.start_ns >= stood.end_ns);
}

static void a_wait_that_need_not_wait_stands_no_time_before_the_record(void **state)
{
    fixture *f = *state;
    fsdp_span stood = {0, 0}, before = {0, 0};
    record(f, 0, A);
    drain(f, A);
    launch(f, B, delay_op(SHORT_NS), &before);
    DO(f->ops->stream_wait(f->dev, f->stream[B], f->event[0], &stood));
    drain(f, B);
    assert_true(stood.start_ns >= before.end_ns && stood.end_ns >= stood.start_ns);
}

static void edges_carry_data_round_a_ring_of_streams(void **state)
{
    fixture *f = *state;
    need_data(f);
    char *ring = fixture_block(f, FIXTURE_STREAMS * 1024);
    char back[1024];
    launch(f, A, fill_op(ring, 7, 1024), NULL);
    for (int lap = 0; lap < 50; lap++) {
        for (int s = 0; s < FIXTURE_STREAMS; s++) {
            int next = (s + 1) % FIXTURE_STREAMS;
            record(f, s, s);
            wait_event(f, next, s);
            launch(f, next, copy_op(ring + 1024 * next, ring + 1024 * s, 1024), NULL);
            launch(f, next, fill_op(ring + 1024 * s, (uint8_t)(100 + s), 1024), NULL);
        }
    }
    launch(f, A, copy_op(back, ring, 1024), NULL);
    drain(f, A);
    for (int k = 0; k < 1024; k++) assert_int_equal(back[k], 7);
}

/* ---- Events ---- */

static void an_event_never_recorded_is_done(void **state)
{
    fixture *f = *state;
    assert_true(is_done(f, 0));
    DO(f->ops->event_wait(f->dev, f->event[0], 0));
    wait_event(f, A, 0);
    drain(f, A);
}

static void a_wait_enqueued_before_the_record_does_not_see_it(void **state)
{
    fixture *f = *state;
    need_host_calls(f);
    close_gate(f, A, 0);
    close_gate(f, B, 1);
    wait_event(f, B, 0); /* enqueued before any record, run after it */
    record(f, 0, A);
    record(f, 1, B);
    open_gate(f, 1);
    DO(f->ops->event_wait(f->dev, f->event[1], 20ull * SECOND));
    assert_false(is_done(f, 0));
}

static void a_later_record_does_not_hold_an_earlier_wait(void **state)
{
    fixture *f = *state;
    need_host_calls(f);
    close_gate(f, B, 1);
    record(f, 0, A);
    wait_event(f, B, 0);
    close_gate(f, C, 2);
    record(f, 0, C);
    record(f, 1, B);
    open_gate(f, 1);
    DO(f->ops->event_wait(f->dev, f->event[1], 20ull * SECOND));
    assert_false(is_done(f, 0));
}

static void a_later_record_does_not_satisfy_an_earlier_wait(void **state)
{
    fixture *f = *state;
    need_host_calls(f);
    close_gate(f, A, 0);
    record(f, 0, A);
    wait_event(f, B, 0);
    record(f, 1, B);
    record(f, 0, C);
    DO(f->ops->event_wait(f->dev, f->event[0], 20ull * SECOND)); /* the last record, on C */
    assert_never(f, 1);
    open_gate(f, 0);
    DO(f->ops->event_wait(f->dev, f->event[1], 20ull * SECOND));
}

static void records_of_one_event_on_one_stream_stand_for_their_own_place(void **state)
{
    fixture *f = *state;
    need_host_calls(f);
    record(f, 0, A);
    wait_event(f, B, 0);
    record(f, 1, B);
    close_gate(f, A, 0);
    record(f, 0, A);
    wait_event(f, C, 0);
    record(f, 2, C);
    DO(f->ops->event_wait(f->dev, f->event[1], 20ull * SECOND));
    assert_never(f, 2);
    open_gate(f, 0);
    DO(f->ops->event_wait(f->dev, f->event[2], 20ull * SECOND));
}

static void destroying_an_event_leaves_enqueued_waits_alone(void **state)
{
    fixture *f = *state;
    need_host_calls(f);
    close_gate(f, A, 0);
    record(f, 0, A);
    wait_event(f, B, 0);
    record(f, 1, B);
    f->ops->event_destroy(f->dev, f->event[0]);
    f->event[0] = NULL;
    DO(f->ops->event_create(f->dev, &f->event[0])); /* which may get the same memory */
    record(f, 0, C);
    drain(f, C);
    assert_never(f, 1);
    open_gate(f, 0);
    DO(f->ops->event_wait(f->dev, f->event[1], 20ull * SECOND));
}

static void an_event_outlives_the_stream_that_recorded_it(void **state)
{
    fixture *f = *state;
    launch(f, A, delay_op(SHORT_NS), NULL);
    record(f, 0, A);
    wait_event(f, B, 0);
    f->ops->stream_destroy(f->dev, f->stream[A]);
    f->stream[A] = NULL;
    assert_true(is_done(f, 0));
    wait_event(f, C, 0);
    drain(f, B);
    drain(f, C);
}

static void a_wait_of_the_host_times_out_and_can_be_asked_again(void **state)
{
    fixture *f = *state;
    need_host_calls(f);
    close_gate(f, A, 0);
    record(f, 0, A);
    assert_int_equal(f->ops->event_wait(f->dev, f->event[0], 0), FSDP_ERR_TIMEOUT);
    assert_never(f, 0);
    assert_int_equal(f->ops->stream_drain(f->dev, f->stream[A], FIXTURE_NEVER_NS), FSDP_ERR_TIMEOUT);
    DO(f->ops->check(f->dev));
    open_gate(f, 0);
    DO(f->ops->event_wait(f->dev, f->event[0], UINT64_MAX));
    DO(f->ops->stream_drain(f->dev, f->stream[A], UINT64_MAX));
}

static void a_warm_event_is_recorded_thousands_of_times(void **state)
{
    fixture *f = *state;
    for (int i = 0; i < 5000; i++) {
        record(f, 0, i % 2 ? A : B);
        wait_event(f, i % 2 ? B : A, 0);
    }
    drain(f, A);
    drain(f, B);
    assert_true(is_done(f, 0));
}

/* ---- Streams and memory ---- */

static void destroying_a_stream_lets_it_finish(void **state)
{
    fixture *f = *state;
    need_host_calls(f);
    atomic_int flag = 0;
    launch(f, A, delay_op(SHORT_NS), NULL);
    host_call(f, A, set_flag, &flag);
    f->ops->stream_destroy(f->dev, f->stream[A]);
    f->stream[A] = NULL;
    assert_int_equal(atomic_load(&flag), 1);
}

static void an_idle_stream_is_drained_at_once(void **state)
{
    fixture *f = *state;
    DO(f->ops->stream_drain(f->dev, f->stream[A], 0));
    launch(f, A, delay_op(1), NULL);
    drain(f, A);
    DO(f->ops->stream_drain(f->dev, f->stream[A], 0));
}

static void memory_is_aligned_and_does_not_overlap(void **state)
{
    fixture *f = *state;
    uint64_t alignment = f->caps.alignment, granularity = f->caps.granularity;
    assert_true(alignment >= 256 && (alignment & (alignment - 1)) == 0);
    assert_true(granularity >= 1);
    char *block[8];
    for (int i = 0; i < 8; i++) {
        block[i] = fixture_block(f, granularity * (uint64_t)(i + 1) - 1);
        assert_int_equal((uintptr_t)block[i] % alignment, 0);
        if (f->caps.has_data) launch(f, A, fill_op(block[i], (uint8_t)i, granularity * (uint64_t)(i + 1) - 1), NULL);
    }
    for (int i = 0; i < 8; i++)
        for (int k = 0; k < i; k++)
            assert_true(block[k] + granularity * (uint64_t)(k + 1) <= block[i] ||
                        block[i] + granularity * (uint64_t)(i + 1) <= block[k]);
    drain(f, A);
    void *pinned = NULL;
    DO(f->ops->mem_alloc(f->dev, granularity, FSDP_MEMORY_KIND_PINNED, &pinned));
    memset(pinned, 1, granularity); /* the host's on every backend */
    f->ops->mem_free(f->dev, pinned, granularity, FSDP_MEMORY_KIND_PINNED);
}

static void more_memory_than_there_is_is_refused(void **state)
{
    fixture *f = *state;
    need_data(f);
    void *ptr = f;
    uint64_t bytes = ((uint64_t)1 << 55) / f->caps.granularity * f->caps.granularity;
    assert_int_equal(f->ops->mem_alloc(f->dev, bytes, FSDP_MEMORY_KIND_DEVICE, &ptr), FSDP_ERR_NO_MEMORY);
    assert_ptr_equal(ptr, f);
    assert_non_null(strstr(fsdp_last_error(), "36028797018963968"));
    DO(f->ops->check(f->dev));
}

static void the_clock_does_not_go_back(void **state)
{
    fixture *f = *state;
    uint64_t before = f->ops->now_ns(f->dev);
    launch(f, A, delay_op(SHORT_NS), NULL);
    drain(f, A);
    assert_true(f->ops->now_ns(f->dev) >= before + SHORT_NS);
}

static void what_is_no_operation_of_a_stream_is_refused(void **state)
{
    fixture *f = *state;
    fsdp_device_op op = {.kind = FSDP_OPERATION_ALL_GATHER};
    assert_int_equal(f->ops->launch(f->dev, f->stream[A], &op, NULL), FSDP_ERR_UNSUPPORTED);
    DO(f->ops->check(f->dev));
}

/* ---- Debugging ---- */

static void with_debug_sync_every_call_returns_when_it_is_done(void **state)
{
    fixture *plain = *state;
    static fixture f;
    assert_true(fixture_open(&f, plain->suite, FSDP_DEBUG_SYNC, 0, 0));
    for (int i = 0; i < 10; i++) {
        atomic_int flag = 0;
        fsdp_span span = {0, 0};
        launch(&f, A, delay_op(SHORT_NS / 10), &span);
        assert_true(span.end_ns - span.start_ns >= SHORT_NS / 10);
        record(&f, 0, A);
        assert_true(is_done(&f, 0));
        wait_event(&f, B, 0);
        if (f.caps.can_host_call) {
            host_call(&f, B, set_flag, &flag);
            assert_int_equal(atomic_load(&flag), 1);
        }
    }
    fixture_close(&f);
}

#define TEST(name)                                         \
    {                                                      \
#name, name, fixture_setup, fixture_teardown, NULL \
    }

int run_device_suite(const device_suite *suite)
{
    struct CMUnitTest tests[] = {
        TEST(operations_of_a_stream_run_one_after_another),
        TEST(data_of_a_stream_is_seen_in_order),
        TEST(a_queue_of_ten_thousand_keeps_its_order_and_never_blocks_the_host),
        TEST(streams_without_an_edge_do_not_wait_for_each_other),
        TEST(a_wait_puts_a_stream_behind_the_record),
        TEST(a_wait_that_need_not_wait_stands_no_time_before_the_record),
        TEST(edges_carry_data_round_a_ring_of_streams),
        TEST(an_event_never_recorded_is_done),
        TEST(a_wait_enqueued_before_the_record_does_not_see_it),
        TEST(a_later_record_does_not_hold_an_earlier_wait),
        TEST(a_later_record_does_not_satisfy_an_earlier_wait),
        TEST(records_of_one_event_on_one_stream_stand_for_their_own_place),
        TEST(destroying_an_event_leaves_enqueued_waits_alone),
        TEST(an_event_outlives_the_stream_that_recorded_it),
        TEST(a_wait_of_the_host_times_out_and_can_be_asked_again),
        TEST(a_warm_event_is_recorded_thousands_of_times),
        TEST(destroying_a_stream_lets_it_finish),
        TEST(an_idle_stream_is_drained_at_once),
        TEST(memory_is_aligned_and_does_not_overlap),
        TEST(more_memory_than_there_is_is_refused),
        TEST(the_clock_does_not_go_back),
        TEST(what_is_no_operation_of_a_stream_is_refused),
        TEST(with_debug_sync_every_call_returns_when_it_is_done),
    };
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) tests[i].initial_state = (void *)(uintptr_t)suite;
    return cmocka_run_group_tests_name("device", tests, NULL, NULL) + run_device_error_suite(suite);
}
