/* SPDX-License-Identifier: MIT */
/* A device that has failed or was aborted: it says so on every thread, touches no data, and lets nobody hang. */
#include <stdatomic.h>
#include <string.h>

#include "device_suite.h"

enum { A, B }; /* streams */

static void *check_elsewhere(void *arg)
{
    fixture *f = arg;
    bool right = f->ops->check(f->dev) == FSDP_ERR_ABORTED && fsdp_last_error()[0] != 0;
    return right ? f : NULL;
}

static void an_error_is_sticky_and_has_its_sentence_on_every_thread(void **state)
{
    fixture *f = *state;
    DO(f->ops->check(f->dev));
    f->ops->abort(f->dev);
    char sentence[256];
    for (int i = 0; i < 3; i++) {
        assert_int_equal(f->ops->check(f->dev), FSDP_ERR_ABORTED);
        if (i == 0) strncpy(sentence, fsdp_last_error(), sizeof sentence - 1), sentence[sizeof sentence - 1] = 0;
        assert_string_equal(fsdp_last_error(), sentence);
    }
    assert_int_not_equal(strlen(sentence), 0);
    pthread_t thread;
    void *right = NULL;
    assert_int_equal(pthread_create(&thread, NULL, check_elsewhere, f), 0);
    pthread_join(thread, &right);
    assert_ptr_equal(right, f);
    bool done;
    fsdp_device_op op = delay_op(1);
    assert_int_equal(f->ops->launch(f->dev, f->stream[A], &op, NULL), FSDP_ERR_ABORTED);
    assert_int_equal(f->ops->event_record(f->dev, f->event[0], f->stream[A], NULL), FSDP_ERR_ABORTED);
    assert_int_equal(f->ops->stream_wait(f->dev, f->stream[A], f->event[0], NULL), FSDP_ERR_ABORTED);
    assert_int_equal(f->ops->event_query(f->dev, f->event[0], &done), FSDP_ERR_ABORTED);
    assert_int_equal(f->ops->event_wait(f->dev, f->event[0], SECOND), FSDP_ERR_ABORTED);
    assert_int_equal(f->ops->stream_drain(f->dev, f->stream[A], SECOND), FSDP_ERR_ABORTED);
}

static void after_an_error_no_data_is_touched_and_nobody_hangs(void **state)
{
    fixture *f = *state;
    need_host_calls(f);
    need_data(f);
    atomic_int flag = 0;
    char *x = fixture_block(f, 64);
    void *pinned; /* so that no copy waits for the gate on the host */
    DO(f->ops->mem_alloc(f->dev, f->caps.granularity, FSDP_MEMORY_KIND_PINNED, &pinned));
    char *after = pinned;
    launch(f, B, fill_op(x, 1, 64), NULL);
    launch(f, B, copy_op(after, x, 64), NULL);
    drain(f, B);
    for (int k = 0; k < 64; k++) assert_int_equal(after[k], 1);
    close_gate(f, A, 0);
    launch(f, A, fill_op(x, 2, 64), NULL);
    launch(f, A, copy_op(after, x, 64), NULL);
    host_call(f, A, set_flag, &flag);
    record(f, 0, A);
    wait_event(f, B, 0);
    record(f, 1, B);
    memset(after, 9, 64);
    f->ops->abort(f->dev);
    assert_int_equal(f->ops->event_wait(f->dev, f->event[1], UINT64_MAX), FSDP_ERR_ABORTED);
    open_gate(f, 0);
    assert_int_equal(f->ops->stream_drain(f->dev, f->stream[A], UINT64_MAX), FSDP_ERR_ABORTED);
    assert_int_equal(f->ops->stream_drain(f->dev, f->stream[B], UINT64_MAX), FSDP_ERR_ABORTED);
    if (!f->suite->runs_on) {
        assert_int_equal(atomic_load(&flag), 0);
        for (int k = 0; k < 64; k++) assert_int_equal(after[k], 9);
    }
    f->ops->mem_free(f->dev, pinned, f->caps.granularity, FSDP_MEMORY_KIND_PINNED);
}

static void *wait_elsewhere(void *arg)
{
    fixture *f = arg;
    return f->ops->event_wait(f->dev, f->event[0], UINT64_MAX) == FSDP_ERR_ABORTED ? f : NULL;
}

/* The host waits for stream A on one thread, stream B on the device; an abort wakes the host. */
static void abort_who_waits_for_stream_a(fixture *f)
{
    pthread_t thread;
    void *woken = NULL;
    record(f, 0, A);
    wait_event(f, B, 0);
    record(f, 1, B);
    assert_int_equal(pthread_create(&thread, NULL, wait_elsewhere, f), 0);
    assert_never(f, 1);
    f->ops->abort(f->dev);
    pthread_join(thread, &woken);
    assert_ptr_equal(woken, f);
}

static void an_abort_wakes_the_host_delays_and_waiting_streams(void **state)
{
    fixture *f = *state;
    need_host_calls(f); /* in virtual time an hour is over at once */
    launch(f, A, delay_op(3600ull * SECOND), NULL);
    abort_who_waits_for_stream_a(f);
    assert_int_equal(f->ops->stream_drain(f->dev, f->stream[A], UINT64_MAX), FSDP_ERR_ABORTED);
    assert_int_equal(f->ops->stream_drain(f->dev, f->stream[B], UINT64_MAX), FSDP_ERR_ABORTED);
}

static void an_abort_wakes_who_waits_for_a_stream_that_is_stuck(void **state)
{
    fixture *f = *state;
    need_host_calls(f);
    close_gate(f, A, 0);
    abort_who_waits_for_stream_a(f);
    f->ops->stream_destroy(f->dev, f->stream[B]); /* while the gate is closed */
    f->stream[B] = NULL;
}

static void abort_from_inside(void *arg)
{
    fixture *f = arg;
    f->ops->abort(f->dev);
}

static void an_abort_may_come_from_a_host_call(void **state)
{
    fixture *f = *state;
    need_host_calls(f);
    host_call(f, A, abort_from_inside, f);
    assert_int_equal(f->ops->stream_drain(f->dev, f->stream[A], UINT64_MAX), FSDP_ERR_ABORTED);
}

#define TEST(name)                                         \
    {                                                      \
#name, name, fixture_setup, fixture_teardown, NULL \
    }

int run_device_error_suite(const device_suite *suite)
{
    struct CMUnitTest tests[] = {
        TEST(an_error_is_sticky_and_has_its_sentence_on_every_thread),
        TEST(after_an_error_no_data_is_touched_and_nobody_hangs),
        TEST(an_abort_wakes_the_host_delays_and_waiting_streams),
        TEST(an_abort_wakes_who_waits_for_a_stream_that_is_stuck),
        TEST(an_abort_may_come_from_a_host_call),
    };
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) tests[i].initial_state = (void *)(uintptr_t)suite;
    return cmocka_run_group_tests_name("device errors", tests, NULL, NULL);
}
