/* SPDX-License-Identifier: MIT */
#include "regress_threads.h"

#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "regress_rig.h"

/* Asserts are the test's thread's; the others count what went wrong. */
typedef struct helper {
    regress_rig *rig;
    pthread_t thread;
    atomic_bool stop;
    atomic_int failures, n_done;
    int n_wanted; /* go on until so often, whatever stop says */
    void *ptr;
    char path[32];
    fsdp_stream *idle;
    gate *opens; /* when it is done */
} helper;

static void start(helper *h, void *(*run)(void *)) { assert_int_equal(pthread_create(&h->thread, NULL, run, h), 0); }

static void join(helper *h)
{
    atomic_store(&h->stop, true);
    pthread_join(h->thread, NULL);
    assert_int_equal(atomic_load(&h->failures), 0);
}

static bool goes_on(helper *h) { return !atomic_load(&h->stop) || atomic_load(&h->n_done) < h->n_wanted; }

static void *trim_once(void *arg)
{
    helper *h = arg;
    h->failures += fsdp_allocator_trim_host(h->rig->a) != FSDP_OK;
    return NULL;
}

/* Trim has drained A and stands at B's drain; A gets work on bytes that are free, and they are free again, before trim goes on.
 * What was free all the time goes back. */
void trim_keeps_what_is_freed_while_it_drains(void **state)
{
    enum { BYTES = 1024 * 1024 };
    static unsigned char read[BYTES];
    regress_rig *r = *state;
    make(r, 0, 2 * MIB, FSDP_ALLOC_WAIT_FIRST);
    void *first = take(r, 2 * MIB, A), *second = take(r, 2 * MIB, C);
    OK(fsdp_allocator_free(r->a, second)), OK(fsdp_allocator_free(r->a, first));
    keep_freed_memory();
    hold_next_drain(r, B);
    helper h = {.rig = r};
    start(&h, trim_once);
    wait_until_drains(r, B, 1);
    void *p = take(r, BYTES, A);
    bool is_first = p == first;
    hold_stream(r, A);
    OK(fsdp_stream_fill(r->s[A], p, 0x5a, BYTES));
    OK(fsdp_allocator_free(r->a, p));
    release_drain();
    join(&h);
    assert_int_equal(stats_of(r).reserved, 2 * MIB); /* one of the two */
    assert_true(is_first);
    assert_ptr_equal(take(r, BYTES, A), p);
    OK(fsdp_stream_copy(r->s[A], read, p, BYTES));
    let_go(r, A);
    OK(fsdp_stream_drain_host(r->s[A], UINT64_MAX));
    for (size_t i = 0; i < BYTES; i++)
        if (read[i] != 0x5a) fail_msg("byte %zu is 0x%02x", i, read[i]);
    OK(fsdp_allocator_free(r->a, p));
    OK(fsdp_allocator_trim_host(r->a));
    assert_int_equal(stats_of(r).reserved, 0);
}

static void *release_c(void *arg)
{
    helper *h = arg;
    h->failures += fsdp_stream_release(h->rig->s[C]) != FSDP_OK;
    return NULL;
}

/* Trim stands at C's drain; the release of C may end only after it. */
void release_waits_until_nobody_drains_the_stream(void **state)
{
    regress_rig *r = *state;
    make(r, 0, 4 * KIB, FSDP_ALLOC_WAIT_FIRST);
    OK(fsdp_allocator_free(r->a, take(r, 4 * KIB, C)));
    hold_next_drain(r, C);
    helper trims = {.rig = r}, releases = {.rig = r};
    start(&trims, trim_once);
    wait_until_drains(r, C, 1);
    start(&releases, release_c);
    wait_until_left(r, C); /* its own drain is over: if it were to go on, it would do so now */
    for (int i = 0; i < 200; i++) (void)counters_of(r), sched_yield();
    release_drain();
    pthread_join(releases.thread, NULL);
    r->s[C] = NULL;
    join(&trims);
    assert_int_equal(releases.failures, 0);
    assert_int_equal(destroyed_while_drained(), 0);
    assert_int_equal(stats_of(r).reserved, 0);
}

static void *trim_again_and_again(void *arg)
{
    helper *h = arg;
    for (; goes_on(h); h->n_done++) h->failures += fsdp_allocator_trim_host(h->rig->a) != FSDP_OK;
    return NULL;
}

static void *make_and_destroy(void *arg)
{
    helper *h = arg;
    for (; goes_on(h); h->n_done++) {
        fsdp_allocator *a;
        fsdp_allocator_config config = FSDP_ALLOCATOR_CONFIG_INIT;
        void *p = NULL;
        config.segment_bytes = 4 * KIB;
        if (fsdp_allocator_create(h->rig->ctx, &config, &a) != FSDP_OK) {
            h->failures++;
            return NULL;
        }
        h->failures += fsdp_allocator_alloc(a, 100, h->idle, "short", &p) != FSDP_OK;
        h->failures += fsdp_allocator_free(a, p) != FSDP_OK;
        h->failures += fsdp_allocator_destroy(a) != FSDP_OK;
    }
    return NULL;
}

static void streams_come_and_go(regress_rig *r, void *(*meanwhile)(void *))
{
    enum { N = 300 };
    make(r, 0, 4 * KIB, FSDP_ALLOC_WAIT_FIRST);
    helper h = {.rig = r, .n_wanted = 20, .idle = r->s[A]};
    start(&h, meanwhile);
    int failures = 0;
    for (int i = 0; i < N; i++) {
        fsdp_stream *s;
        void *p = NULL;
        OK(fsdp_stream_create(r->ctx, "short", &s));
        failures += fsdp_stream_delay(s, 20000) != FSDP_OK;
        failures += fsdp_allocator_alloc(r->a, 4 * KIB, s, "short", &p) != FSDP_OK;
        failures += fsdp_stream_fill(s, p, 1, 4 * KIB) != FSDP_OK;
        if (i % 2 == 0) failures += fsdp_allocator_free(r->a, p) != FSDP_OK;
        failures += fsdp_stream_release(s) != FSDP_OK;
        if (i % 2 == 1) failures += fsdp_allocator_free(r->a, p) != FSDP_OK;
    }
    join(&h);
    assert_int_equal(failures, 0);
    assert_int_equal(destroyed_while_drained(), 0);
    assert_int_equal(stats_of(r).allocated, 0);
}

void trim_on_one_thread_and_streams_that_come_and_go_on_another(void **state)
{
    streams_come_and_go(*state, trim_again_and_again);
}

void destroy_on_one_thread_and_streams_that_come_and_go_on_another(void **state)
{
    streams_come_and_go(*state, make_and_destroy);
}

/* Everything that may be called from any thread; then the stream that is being released may go on. */
static void *use_everything(void *arg)
{
    helper *h = arg;
    regress_rig *r = h->rig;
    void *p = NULL;
    fsdp_alloc_stats stats = FSDP_ALLOC_STATS_INIT;
    fsdp_counters counters = FSDP_COUNTERS_INIT;
    wait_until_drains(r, C, 1);
    h->failures += fsdp_allocator_alloc(r->a, 100, r->s[A], "meanwhile", &p) != FSDP_OK;
    h->failures += fsdp_allocator_record_stream(r->a, p, r->s[B]) != FSDP_OK;
    h->failures += fsdp_allocator_record_use(r->a, h->ptr, r->s[B]) != FSDP_OK;
    h->failures += fsdp_allocator_free(r->a, p) != FSDP_OK;
    h->failures += fsdp_allocator_free(r->a, h->ptr) != FSDP_OK; /* of the stream that goes */
    h->failures += fsdp_allocator_stats(r->a, &stats) != FSDP_OK;
    h->failures += fsdp_allocator_reset_peaks(r->a) != FSDP_OK;
    h->failures += fsdp_context_counters(r->ctx, &counters) != FSDP_OK;
    h->failures += fsdp_memory_write_json(r->ctx, h->path) != FSDP_OK;
    h->n_done++;
    let_go(r, C);
    return NULL;
}

/* C ends only when the other thread is through. */
void while_a_stream_is_released_other_threads_go_on(void **state)
{
    regress_rig *r = *state;
    make(r, 0, 4 * KIB, FSDP_ALLOC_WAIT_FIRST);
    helper h = {.rig = r, .ptr = take(r, 4 * KIB, C), .path = "/tmp/fsdp_regress_XXXXXX"};
    int file = mkstemp(h.path);
    assert_true(file >= 0);
    close(file);
    hold_stream(r, C);
    OK(fsdp_stream_fill(r->s[C], h.ptr, 1, 4 * KIB));
    start(&h, use_everything);
    OK(fsdp_stream_release(r->s[C]));
    r->s[C] = NULL;
    assert_int_equal(h.n_done, 1);
    join(&h);
    remove(h.path);
    assert_int_equal(destroyed_while_drained(), 0);
    assert_int_equal(stats_of(r).allocated, 0);
}

/* Each turn counts one record, and at first more. */
static void *allocate_and_record(void *arg)
{
    helper *h = arg;
    fsdp_event *event;
    if (fsdp_event_create(h->rig->ctx, &event) != FSDP_OK) {
        h->failures++;
        return NULL;
    }
    for (; goes_on(h); h->n_done++) {
        void *p = NULL;
        h->failures += fsdp_allocator_alloc(h->rig->a, 4 * KIB, h->rig->s[A], "busy", &p) != FSDP_OK;
        h->failures += fsdp_allocator_free(h->rig->a, p) != FSDP_OK;
        h->failures += fsdp_event_record(event, h->rig->s[A]) != FSDP_OK;
        if (h->n_done % 64 == 0) h->failures += fsdp_event_wait_host(event, UINT64_MAX) != FSDP_OK;
    }
    fsdp_event_destroy(event);
    return NULL;
}

/* For ThreadSanitizer; what is read is one moment's. Several in a row: nothing else orders them after the other thread. */
void counters_may_be_asked_for_while_another_thread_allocates(void **state)
{
    regress_rig *r = *state;
    make(r, 0, 0, FSDP_ALLOC_WAIT_FIRST);
    helper h = {.rig = r, .n_wanted = 100};
    start(&h, allocate_and_record);
    fsdp_counters before = counters_of(r);
    for (int i = 0; i < 300; i++) {
        OK(fsdp_allocator_free(r->a, take(r, (uint64_t)(i + 1) * 4 * KIB, B)));
        OK(fsdp_stream_wait_stream(r->s[C], r->s[B]));
        for (int k = 0; k < 20; k++) {
            fsdp_counters now = counters_of(r);
            assert_true(now.records >= before.records + (k == 0) && now.waits >= before.waits + (k == 0));
            assert_true(now.device_bytes <= now.device_bytes_peak);
            before = now;
        }
    }
    join(&h);
    assert_int_equal(counters_of(r).records, seen_so_far().records);
}
