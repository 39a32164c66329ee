/* SPDX-License-Identifier: MIT */
/* Sizes, budgets, numbers, errors, threads. Which bytes come back is alloc_choice_suite.c's, who waits for whom
 * alloc_order_suite.c's. */
#include "alloc_suite.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { A, B, C, D };

/* ---- Sizes ---- */

static void blocks_are_aligned_and_apart(void **state)
{
    alloc_rig *r = *state;
    static const struct {
        uint64_t asked, given;
    } sizes[] = {{0, 256},         {1, 256},     {255, 256},         {256, 256},         {257, 512},
                 {4095, 4096},     {4096, 4096}, {4097, 4352},       {65536, 65536},     {65537, 65792},
                 {100000, 100096}, {0, 256},     {2097152, 2097152}, {2097153, 2097408}, {5000000, 5000192}};
    enum { N = sizeof sizes / sizeof *sizes };
    make_allocator(r, 0, 2 * KIB * KIB);
    uint64_t begin[N], all = 0;
    for (int i = 0; i < N; i++) {
        begin[i] = (uintptr_t)take(r, sizes[i].asked, i % ALLOC_STREAMS);
        assert_int_equal(begin[i] % 256, 0);
        all += sizes[i].given;
        assert_int_equal(stats_of(r).allocated, all);
    }
    for (int i = 0; i < N; i++)
        for (int k = 0; k < i; k++)
            assert_true(begin[i] + sizes[i].given <= begin[k] || begin[k] + sizes[k].given <= begin[i]);
    for (int i = 0; i < N; i++) give(r, (void *)(uintptr_t)begin[i]);
    assert_int_equal(stats_of(r).allocated, 0);
}

static void more_than_any_device_has_is_refused(void **state)
{
    alloc_rig *r = *state;
    make_allocator(r, 0, 4 * KIB);
    static const uint64_t sizes[] = {((uint64_t)1 << 56) + 1, (uint64_t)1 << 63, UINT64_MAX - 255, UINT64_MAX};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        void *ptr = r;
        assert_int_equal(fsdp_allocator_alloc(r->a, sizes[i], r->s[A], NULL, &ptr), FSDP_ERR_ARG);
        assert_said("allocator small: ");
        assert_said("more than any device has");
        assert_ptr_equal(ptr, r);
    }
    assert_int_equal(stats_of(r).reserved + stats_of(r).allocs + counters_of(r).device_bytes, 0);
}

static void a_segment_too_large_to_be_had_does_not_stand_in_the_way(void **state)
{
    alloc_rig *r = *state;
    make_allocator(r, 64 * KIB, UINT64_MAX);
    give(r, take(r, 1000, A));
    assert_int_equal(stats_of(r).reserved, 4 * KIB);
}

/* ---- Budgets and limits ---- */

static void beyond_the_budget_the_error_says_what_is_in_the_way(void **state)
{
    alloc_rig *r = *state;
    make_allocator(r, 64 * KIB, 16 * KIB);
    char *block[3];
    for (int i = 0; i < 3; i++) block[i] = take(r, 16 * KIB, i);
    give(r, block[1]);
    fsdp_alloc_stats before = stats_of(r);
    void *ptr = NULL;
    assert_int_equal(fsdp_allocator_alloc(r->a, 40000, r->s[A], NULL, &ptr), FSDP_ERR_NO_MEMORY);
    assert_null(ptr);
    assert_said("allocator small: no room for 40192 bytes");
    assert_said("32768 of 49152 reserved bytes are live");
    assert_said("the largest free range has 16384");
    assert_said("the budget of 65536 allows no more");
    assert_said("16384 bytes  live on a"); /* the table: who holds the rest */
    assert_said("16384 bytes  live on c");
    assert_said("16384 bytes  free");
    fsdp_alloc_stats after = stats_of(r);
    assert_memory_equal(&before, &after, sizeof before);

    block[1] = take(r, 16 * KIB, B); /* nothing is lost by it */
    char *last = take(r, 16 * KIB, D);
    assert_int_equal(fsdp_allocator_alloc(r->a, 1, r->s[A], NULL, &ptr), FSDP_ERR_NO_MEMORY);
    give(r, block[2]);
    give(r, take(r, 1, C));
    give(r, block[0]), give(r, block[1]), give(r, last);
    assert_int_equal(stats_of(r).reserved, 64 * KIB);
}

static void a_budget_is_used_up_to_its_last_page(void **state)
{
    alloc_rig *r = *state;
    make_allocator(r, 20 * KIB, 16 * KIB);
    char *first = take(r, 16 * KIB, A), *second = take(r, 4 * KIB, A);
    assert_int_equal(stats_of(r).reserved, 20 * KIB);
    assert_int_equal(counters_of(r).device_bytes, 20 * KIB);
    give(r, first), give(r, second);
}

static void what_the_device_says_is_passed_on(void **state)
{
    alloc_rig *r = *state;
    make_allocator(r, 0, 4 * KIB);
    void *block[200];
    int n = 0;
    fsdp_status status;
    while ((status = fsdp_allocator_alloc(r->a, (uint64_t)1 << 56, r->s[A], NULL, &block[n])) == FSDP_OK && n < 199) n++;
    assert_int_equal(status, FSDP_ERR_NO_MEMORY);
    assert_said("allocator small: no room for 72057594037927936 bytes");
    assert_said("the device says: ");
    give(r, take(r, 100, A));
    while (n > 0) give(r, block[--n]);
}

/* ---- Trim ---- */

static void trim_gives_back_segments_that_are_wholly_free(void **state)
{
    alloc_rig *r = *state;
    make_allocator(r, 64 * KIB, 16 * KIB);
    char *block[3], *part = NULL;
    for (int i = 0; i < 3; i++) block[i] = take(r, 16 * KIB, A);
    part = take(r, 4 * KIB, A); /* in a segment that is not wholly free */
    touch(r, A, block[1], 0x5a, 16 * KIB);
    OK(fsdp_allocator_record_stream(r->a, block[2], r->s[B]));
    give(r, block[0]), give(r, block[2]);
    OK(fsdp_allocator_trim_host(r->a));
    assert_int_equal(stats_of(r).reserved, 32 * KIB);
    assert_int_equal(stats_of(r).active, 20 * KIB);
    assert_int_equal(counters_of(r).device_bytes, 32 * KIB);
    OK(fsdp_allocator_trim_host(r->a));
    assert_int_equal(stats_of(r).reserved, 32 * KIB);
    if (r->suite->has_data)
        for (int i = 0; i < 16 * KIB; i++) assert_int_equal((uint8_t)block[1][i], 0x5a);

    block[0] = take(r, 16 * KIB, B); /* and can be had again */
    assert_int_equal(stats_of(r).grows, 5);
    give(r, block[0]), give(r, block[1]), give(r, part);
    OK(fsdp_allocator_trim_host(r->a));
    assert_int_equal(stats_of(r).reserved + counters_of(r).device_bytes, 0);
}

/* ---- Numbers ---- */

static void freed_bytes_stay_active_until_their_stream_is_ordered_after_them(void **state)
{
    alloc_rig *r = *state;
    make_allocator(r, 64 * KIB, 64 * KIB);
    char *p = take(r, 16 * KIB, A), *q = take(r, 8 * KIB, A);
    assert_int_equal(stats_of(r).active, 24 * KIB);
    give(r, q); /* a alone used it: nothing is open */
    assert_int_equal(stats_of(r).active, 16 * KIB);
    OK(fsdp_allocator_record_stream(r->a, p, r->s[B]));
    give(r, p);
    assert_int_equal(stats_of(r).allocated, 0);
    assert_int_equal(stats_of(r).active, 16 * KIB);
    order(r, C, B); /* somebody else's order changes nothing for a */
    assert_int_equal(stats_of(r).active, 16 * KIB);
    order(r, A, B);
    assert_int_equal(stats_of(r).active, 0);
}

static void active_bytes_settle_in_any_order(void **state)
{
    alloc_rig *r = *state;
    make_allocator(r, 0, 64 * KIB);
    char *p = take(r, 16 * KIB, A), *q = take(r, 8 * KIB, A);
    OK(fsdp_allocator_record_stream(r->a, p, r->s[B]));
    OK(fsdp_allocator_record_stream(r->a, q, r->s[C]));
    give(r, p), give(r, q);
    order(r, A, C); /* the one freed later comes first */
    char *large = take(r, 128 * KIB, A);
    assert_int_equal(stats_of(r).active_peak, (16 + 128) * KIB);
    assert_int_equal(stats_of(r).active, (16 + 128) * KIB);
    order(r, A, B);
    assert_int_equal(stats_of(r).active, 128 * KIB);
    give(r, large);
}

static void an_allocation_takes_over_what_was_active(void **state)
{
    alloc_rig *r = *state;
    make_allocator(r, 16 * KIB, 16 * KIB);
    char *p = take(r, 16 * KIB, A);
    OK(fsdp_allocator_record_stream(r->a, p, r->s[B]));
    give(r, p);
    p = take(r, 4 * KIB, B); /* a quarter of it */
    assert_int_equal(stats_of(r).active, 16 * KIB);
    assert_int_equal(stats_of(r).allocated, 4 * KIB);
    assert_int_equal(stats_of(r).active_peak, 16 * KIB);
    give(r, p);
}

static void peaks_stay_until_they_are_reset(void **state)
{
    alloc_rig *r = *state;
    make_allocator(r, 0, 16 * KIB);
    char *p = take(r, 16 * KIB, A), *q = take(r, 32 * KIB, A);
    give(r, q);
    OK(fsdp_allocator_trim_host(r->a));
    fsdp_alloc_stats s = stats_of(r);
    assert_int_equal(s.allocated, 16 * KIB);
    assert_int_equal(s.allocated_peak, 48 * KIB);
    assert_int_equal(s.active_peak, 48 * KIB);
    assert_int_equal(s.reserved, 16 * KIB);
    assert_int_equal(s.reserved_peak, 48 * KIB);
    OK(fsdp_allocator_reset_peaks(r->a));
    s = stats_of(r);
    assert_int_equal(s.allocated_peak, 16 * KIB);
    assert_int_equal(s.active_peak, 16 * KIB);
    assert_int_equal(s.reserved_peak, 16 * KIB);
    give(r, p);
    assert_int_equal(stats_of(r).allocated_peak, 16 * KIB);
}

static void calls_are_counted(void **state)
{
    alloc_rig *r = *state;
    make_allocator(r, 16 * KIB, 16 * KIB);
    void *ptr;
    give(r, take(r, 16 * KIB, A));
    char *p = take(r, 16 * KIB, B); /* a's last use: one wait */
    assert_int_equal(fsdp_allocator_alloc(r->a, 16 * KIB, r->s[A], NULL, &ptr), FSDP_ERR_NO_MEMORY);
    assert_int_equal(fsdp_allocator_free(r->a, &ptr), FSDP_ERR_ARG);
    OK(fsdp_allocator_free(r->a, NULL));
    OK(fsdp_allocator_record_stream(r->a, p, r->s[C])); /* the same for c */
    fsdp_alloc_stats s = stats_of(r);
    assert_int_equal(s.allocs, 2);
    assert_int_equal(s.frees, 1);
    assert_int_equal(s.waits, 2);
    assert_int_equal(s.grows, 1);
    give(r, p);
}

/* ---- Errors ---- */

static void only_a_live_block_of_the_allocator_is_accepted(void **state)
{
    alloc_rig *r = *state;
    make_allocator(r, 64 * KIB, 64 * KIB);
    fsdp_allocator *mine = r->a;
    make_allocator(r, 64 * KIB, 64 * KIB);
    fsdp_allocator *other = r->a;
    char *foreign = take(r, 100, A);
    r->a = mine;
    char *p = take(r, 8 * KIB, A), *freed = take(r, 8 * KIB, A), local = 0;
    give(r, freed);
    char *const wrong[] = {freed, p + 256, p + 1, p - 256, foreign, &local};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        fsdp_alloc_stats before = stats_of(r);
        assert_int_equal(fsdp_allocator_free(r->a, wrong[i]), FSDP_ERR_ARG);
        assert_said("fsdp_allocator_free: ");
        assert_said("is no live block of allocator small: freed already, inside a block, or not from here");
        assert_int_equal(fsdp_allocator_record_stream(r->a, wrong[i], r->s[B]), FSDP_ERR_ARG);
        assert_said("fsdp_allocator_record_stream: ");
        assert_int_equal(fsdp_allocator_record_use(r->a, wrong[i], r->s[B]), FSDP_ERR_ARG);
        assert_said("fsdp_allocator_record_use: ");
        fsdp_alloc_stats after = stats_of(r);
        assert_memory_equal(&before, &after, sizeof before);
    }
    give(r, p);
    r->a = other;
    give(r, foreign);
    OK(fsdp_allocator_destroy(other));
    r->a = mine;
}

static void an_allocator_with_live_blocks_is_not_destroyed(void **state)
{
    alloc_rig *r = *state;
    make_allocator(r, 64 * KIB, 64 * KIB);
    char *p = take(r, 8 * KIB, B);
    assert_int_equal(fsdp_allocator_destroy(r->a), FSDP_ERR_STATE);
    assert_said("allocator small has 1 live block: free first");
    assert_said("8192 bytes  live on b");
    assert_int_equal(fsdp_context_destroy(r->ctx), FSDP_ERR_STATE);
    touch(r, B, p, 1, 8 * KIB);
    give(r, p);
}

/* Longer than the context's deadline between ranks: that is no reason to pull memory from under a kernel. */
static void destroy_waits_for_the_device(void **state)
{
    alloc_rig slow;
    alloc_rig_open(&slow, ((alloc_rig *)*state)->suite, 0, 0, 1000000, NULL);
    make_allocator(&slow, 0, 64 * KIB);
    char *p = take(&slow, 64 * KIB, A);
    OK(fsdp_stream_delay(slow.s[A], 30000000));
    touch(&slow, A, p, 1, 64 * KIB);
    give(&slow, p);
    OK(fsdp_allocator_destroy(slow.a));
    slow.a = NULL;
    assert_int_equal(counters_of(&slow).device_bytes, 0);
    alloc_rig_close(&slow);
}

/* ---- Threads and host memory ---- */

typedef struct worker {
    alloc_rig *rig;
    int stream;
    char *ptr;
    int failures;
} worker;

static void *free_one(void *arg)
{
    worker *w = arg;
    w->failures = fsdp_allocator_free(w->rig->a, w->ptr) != FSDP_OK;
    return NULL;
}

static void a_block_may_be_freed_by_another_thread(void **state)
{
    alloc_rig *r = *state;
    make_allocator(r, 16 * KIB, 16 * KIB);
    worker w = {r, A, take(r, 16 * KIB, A), 0};
    touch(r, A, w.ptr, 7, 16 * KIB);
    pthread_t thread;
    uint64_t waits = n_waits(r);
    assert_int_equal(pthread_create(&thread, NULL, free_one, &w), 0);
    pthread_join(thread, NULL);
    assert_int_equal(w.failures, 0);
    assert_ptr_equal(take(r, 16 * KIB, A), w.ptr);
    assert_int_equal(n_waits(r), waits);
    give(r, w.ptr);
}

static void *hammer(void *arg)
{
    worker *w = arg;
    fsdp_allocator *a = w->rig->a;
    for (int i = 0; i < 300; i++) {
        void *p[3] = {NULL, NULL, NULL};
        fsdp_stream *s = w->rig->s[w->stream], *t = w->rig->s[(w->stream + 1) % ALLOC_STREAMS];
        for (int k = 0; k < 3; k++)
            w->failures += fsdp_allocator_alloc(a, (uint64_t)(i * 3 + k) * 37 % 4000, s, NULL, &p[k]) != FSDP_OK;
        w->failures += fsdp_allocator_record_stream(a, p[0], t) != FSDP_OK;
        w->failures += fsdp_allocator_record_use(a, p[1], t) != FSDP_OK;
        for (int k = 0; k < 3; k++) w->failures += fsdp_allocator_free(a, p[(i + k) % 3]) != FSDP_OK;
    }
    return NULL;
}

static void several_threads_may_use_it_at_once(void **state)
{
    alloc_rig *r = *state;
    make_allocator(r, 0, 16 * KIB);
    worker w[ALLOC_STREAMS];
    pthread_t thread[ALLOC_STREAMS];
    for (int i = 0; i < ALLOC_STREAMS; i++) {
        w[i] = (worker){r, i, NULL, 0};
        assert_int_equal(pthread_create(&thread[i], NULL, hammer, &w[i]), 0);
    }
    for (int i = 0; i < ALLOC_STREAMS; i++) {
        pthread_join(thread[i], NULL);
        assert_int_equal(w[i].failures, 0);
    }
    fsdp_alloc_stats s = stats_of(r);
    assert_int_equal(s.allocated, 0);
    assert_int_equal(s.allocs, ALLOC_STREAMS * 900);
    assert_int_equal(s.frees, ALLOC_STREAMS * 900);
}

typedef struct meter {
    pthread_mutex_t lock;
    int64_t until_failure; /* below 0: never */
    int64_t live_bytes;
} meter;

static void *metered_alloc(void *arg, size_t bytes, size_t alignment)
{
    meter *m = arg;
    pthread_mutex_lock(&m->lock);
    bool fails = m->until_failure >= 0 && m->until_failure-- == 0;
    if (!fails) m->live_bytes += (int64_t)bytes;
    pthread_mutex_unlock(&m->lock);
    return fails ? NULL : aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}

static void metered_free(void *arg, void *ptr, size_t bytes, size_t alignment)
{
    meter *m = arg;
    (void)alignment;
    pthread_mutex_lock(&m->lock);
    m->live_bytes -= (int64_t)bytes;
    pthread_mutex_unlock(&m->lock);
    free(ptr);
}

static void without_host_memory_nothing_changes_and_nothing_is_lost(void **state)
{
    enum { N = 150 };
    meter m = {.until_failure = -1};
    pthread_mutex_init(&m.lock, NULL);
    const fsdp_host_allocator host = {metered_alloc, metered_free, &m};
    int failed = 0;
    for (int k = 0; k < 12; k++) {
        alloc_rig r;
        alloc_rig_open(&r, ((alloc_rig *)*state)->suite, 0, 0, 10000000000ull, &host);
        make_allocator(&r, 0, 16 * KIB);
        m.until_failure = k;
        char *block[N];
        for (int i = 0; i < N; i++) {
            void *p = NULL;
            fsdp_alloc_stats before = stats_of(&r);
            fsdp_status status = fsdp_allocator_alloc(r.a, 1000, r.s[i % ALLOC_STREAMS], NULL, &p);
            if (status != FSDP_OK) {
                assert_int_equal(status, FSDP_ERR_NO_HOST_MEMORY);
                assert_null(p);
                fsdp_alloc_stats after = stats_of(&r);
                assert_memory_equal(&before, &after, sizeof before);
                failed++;
                p = take(&r, 1000, i % ALLOC_STREAMS);
            }
            block[i] = p;
        }
        for (int i = 0; i < N; i++) give(&r, block[i]);
        m.until_failure = -1;
        alloc_rig_close(&r);
        assert_int_equal(m.live_bytes, 0);
    }
    assert_true(failed >= 8);
    pthread_mutex_destroy(&m.lock);
}

int run_alloc_suite(const alloc_suite *suite)
{
#define TEST(name) cmocka_unit_test_prestate_setup_teardown(name, alloc_rig_setup, alloc_rig_teardown, state)
    void *state = (void *)(uintptr_t)suite;
    const struct CMUnitTest tests[] = {
        TEST(blocks_are_aligned_and_apart),
        TEST(more_than_any_device_has_is_refused),
        TEST(a_segment_too_large_to_be_had_does_not_stand_in_the_way),
        TEST(beyond_the_budget_the_error_says_what_is_in_the_way),
        TEST(a_budget_is_used_up_to_its_last_page),
        TEST(what_the_device_says_is_passed_on),
        TEST(trim_gives_back_segments_that_are_wholly_free),
        TEST(freed_bytes_stay_active_until_their_stream_is_ordered_after_them),
        TEST(active_bytes_settle_in_any_order),
        TEST(an_allocation_takes_over_what_was_active),
        TEST(peaks_stay_until_they_are_reset),
        TEST(calls_are_counted),
        TEST(only_a_live_block_of_the_allocator_is_accepted),
        TEST(an_allocator_with_live_blocks_is_not_destroyed),
        TEST(destroy_waits_for_the_device),
        TEST(a_block_may_be_freed_by_another_thread),
        TEST(several_threads_may_use_it_at_once),
        TEST(without_host_memory_nothing_changes_and_nothing_is_lost),
    };
    return cmocka_run_group_tests_name(suite->name, tests, NULL, NULL);
}
