/* SPDX-License-Identifier: MIT */
/* Several threads at once; and a host that has no memory left. */
#include "alloc_suite.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

enum { A, B, C, D };

/* ---- Threads ---- */

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
    if (!r->suite->any_thread) skip();
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
    if (!r->suite->any_thread) skip();
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

/* Blocks that one thread allocates and another gives back, while a third asks, resets and trims. */
enum { SHELF = 8, PASSED = 600 };

typedef struct shelf {
    alloc_rig *rig;
    pthread_mutex_t lock;
    void *block[SHELF];
    int n, n_made, n_done, failures;
} shelf;

static void *make_blocks(void *arg)
{
    shelf *sh = arg;
    fsdp_allocator *a = sh->rig->a;
    for (bool more = true; more;) {
        void *p = NULL;
        pthread_mutex_lock(&sh->lock);
        int number = sh->n_made;
        more = number < PASSED;
        bool fits = more && sh->n < SHELF;
        if (fits) {
            fsdp_stream *s = sh->rig->s[number % 2];
            sh->failures += fsdp_allocator_alloc(a, (uint64_t)(number * 37 % 5000), s, "shelf", &p) != FSDP_OK;
            sh->block[sh->n++] = p;
            sh->n_made++;
        }
        pthread_mutex_unlock(&sh->lock);
        if (!fits) sched_yield();
    }
    return NULL;
}

static void *give_blocks(void *arg)
{
    shelf *sh = arg;
    fsdp_allocator *a = sh->rig->a;
    for (bool more = true; more;) {
        void *p = NULL;
        pthread_mutex_lock(&sh->lock);
        if (sh->n > 0) p = sh->block[--sh->n], sh->n_done++;
        int number = sh->n_done;
        more = number < PASSED;
        pthread_mutex_unlock(&sh->lock);
        if (p == NULL) {
            sched_yield();
            continue;
        }
        int failures = fsdp_allocator_record_stream(a, p, sh->rig->s[C + number % 2]) != FSDP_OK;
        failures += fsdp_allocator_record_use(a, p, sh->rig->s[number % ALLOC_STREAMS]) != FSDP_OK;
        failures += fsdp_allocator_free(a, p) != FSDP_OK;
        pthread_mutex_lock(&sh->lock);
        sh->failures += failures;
        pthread_mutex_unlock(&sh->lock);
    }
    return NULL;
}

static void blocks_go_from_thread_to_thread_while_a_third_trims(void **state)
{
    alloc_rig *r = *state;
    if (!r->suite->any_thread) skip();
    shelf sh = {.rig = r};
    pthread_t maker[2], giver[2];
    make_allocator(r, 0, 4 * KIB);
    pthread_mutex_init(&sh.lock, NULL);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(pthread_create(&maker[i], NULL, make_blocks, &sh), 0);
        assert_int_equal(pthread_create(&giver[i], NULL, give_blocks, &sh), 0);
    }
    for (int i = 0; i < 100; i++) {
        OK(fsdp_allocator_trim_host(r->a));
        fsdp_alloc_stats s = stats_of(r);
        assert_true(s.frees <= s.allocs && s.allocated <= s.active && s.active <= s.reserved);
        uint64_t device_bytes = counters_of(r).device_bytes;
        assert_true(s.reserved <= device_bytes && device_bytes <= stats_of(r).reserved); /* nobody else trims */
        OK(fsdp_allocator_reset_peaks(r->a));
    }
    for (int i = 0; i < 2; i++) pthread_join(maker[i], NULL), pthread_join(giver[i], NULL);
    pthread_mutex_destroy(&sh.lock);
    assert_int_equal(sh.failures, 0);
    fsdp_alloc_stats s = stats_of(r);
    assert_int_equal(s.allocs, PASSED);
    assert_int_equal(s.frees, PASSED);
    assert_int_equal(s.allocated, 0);
    OK(fsdp_allocator_trim_host(r->a));
    assert_int_equal(stats_of(r).reserved, 0);
}

/* ---- Host memory ---- */

typedef struct meter {
    pthread_mutex_t lock;
    int64_t until_failure; /* below 0: never */
    bool stays;            /* from then on all of them fail */
    int64_t live_bytes;
} meter;

static void *metered_alloc(void *arg, size_t bytes, size_t alignment)
{
    meter *m = arg;
    pthread_mutex_lock(&m->lock);
    bool fails = m->until_failure == 0;
    if (m->until_failure > 0 || (fails && !m->stays)) m->until_failure--;
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
    const fsdp_host_allocator host = {.alloc = metered_alloc, .free = metered_free, .arg = &m};
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

/* But for waits that were enqueued before the failure: they stay. */
static void expect_no_change(alloc_rig *r, const fsdp_alloc_stats *before, fsdp_status status)
{
    assert_int_equal(status, FSDP_ERR_NO_HOST_MEMORY);
    fsdp_alloc_stats after = stats_of(r);
    assert_true(after.active <= before->active && after.waits >= before->waits);
    after.active = before->active, after.waits = before->waits;
    assert_memory_equal(before, &after, sizeof after);
}

/* Allocations, records, orders and frees with one host allocation failing, the k-th. True: it came to that. */
static bool run_with_failure(const alloc_suite *suite, meter *m, const fsdp_host_allocator *host, int k)
{
    enum { N = 48 };
    alloc_rig r;
    alloc_rig_open(&r, suite, 0, 0, 10000000000ull, host);
    m->until_failure = k;
    fsdp_allocator_config config = FSDP_ALLOCATOR_CONFIG_INIT;
    config.segment_bytes = 4 * KIB;
    config.policy = suite->policy;
    fsdp_status status = fsdp_allocator_create(r.ctx, &config, &r.a);
    if (status != FSDP_OK) {
        assert_int_equal(status, FSDP_ERR_NO_HOST_MEMORY);
        OK(fsdp_allocator_create(r.ctx, &config, &r.a));
    }
    void *block[N] = {NULL};
    for (int i = 0; i < 6 * N; i++) {
        void **p = &block[i * 29 % N];
        fsdp_stream *s = r.s[i % ALLOC_STREAMS], *t = r.s[(i / 5 + 1) % ALLOC_STREAMS];
        fsdp_alloc_stats before = stats_of(&r);
        if (*p == NULL) {
            status = fsdp_allocator_alloc(r.a, (uint64_t)(i * 311 % 3000), s, "failing", p);
            if (status == FSDP_OK) continue;
            assert_null(*p);
            expect_no_change(&r, &before, status);
            OK(fsdp_allocator_alloc(r.a, 100, s, "again", p));
            continue;
        }
        status = fsdp_allocator_record_stream(r.a, *p, t);
        if (status != FSDP_OK) {
            expect_no_change(&r, &before, status);
            OK(fsdp_allocator_record_stream(r.a, *p, t));
        }
        status = fsdp_allocator_record_use(r.a, *p, s);
        if (status != FSDP_OK) {
            expect_no_change(&r, &before, status);
            OK(fsdp_allocator_record_use(r.a, *p, s));
        }
        OK(fsdp_allocator_free(r.a, *p));
        *p = NULL;
    }
    bool failed = m->until_failure < 0;
    m->until_failure = -1;
    for (int i = 0; i < N; i++) OK(fsdp_allocator_free(r.a, block[i]));
    alloc_rig_close(&r);
    assert_int_equal(m->live_bytes, 0);
    return failed;
}

static void whichever_host_allocation_fails_nothing_changes_and_nothing_is_lost(void **state)
{
    meter m = {.until_failure = -1};
    pthread_mutex_init(&m.lock, NULL);
    const fsdp_host_allocator host = {.alloc = metered_alloc, .free = metered_free, .arg = &m};
    int k = 0;
    while (k < 2000 && run_with_failure(((alloc_rig *)*state)->suite, &m, &host, k)) k++;
    assert_in_range(k, 6, 1999); /* the allocator, its table, its map, its segments */
    pthread_mutex_destroy(&m.lock);
}

/* Giving back, and noting the uses of two streams, work without a byte of host memory, however many blocks there are. */
static void what_is_freed_or_used_needs_no_host_memory(void **state)
{
    enum { N = 500 };
    meter m = {.until_failure = -1};
    pthread_mutex_init(&m.lock, NULL);
    const fsdp_host_allocator host = {.alloc = metered_alloc, .free = metered_free, .arg = &m};
    alloc_rig r;
    static char *block[N];
    alloc_rig_open(&r, ((alloc_rig *)*state)->suite, 0, 0, 10000000000ull, &host);
    make_allocator(&r, 0, 64 * KIB);
    for (int i = 0; i < N; i++) block[i] = take(&r, (uint64_t)(i * 57 % 1200), i % ALLOC_STREAMS);
    m.until_failure = 0;
    m.stays = true;
    for (int i = 0; i < N; i++) { /* fresh memory: no wait. Two streams have their places; a third may need one */
        OK(fsdp_allocator_record_stream(r.a, block[i], r.s[(i + 1) % ALLOC_STREAMS]));
        OK(fsdp_allocator_record_use(r.a, block[i], r.s[i % ALLOC_STREAMS]));
        OK(fsdp_allocator_record_use(r.a, block[i], r.s[(i + 1) % ALLOC_STREAMS]));
        fsdp_alloc_stats before = stats_of(&r);
        fsdp_status status = fsdp_allocator_record_use(r.a, block[i], r.s[(i + 2) % ALLOC_STREAMS]);
        if (status != FSDP_OK) expect_no_change(&r, &before, status);
    }
    for (int i = 0; i < N; i++) give(&r, block[i * 321 % N]);
    OK(fsdp_allocator_reset_peaks(r.a));
    assert_int_equal(stats_of(&r).allocated, 0);
    OK(fsdp_allocator_trim_host(r.a));
    assert_int_equal(stats_of(&r).reserved, 0);
    m.until_failure = -1;
    m.stays = false;
    alloc_rig_close(&r);
    assert_int_equal(m.live_bytes, 0);
    pthread_mutex_destroy(&m.lock);
}

static void what_the_device_refuses_leaks_nothing(void **state)
{
    meter m = {.until_failure = -1};
    pthread_mutex_init(&m.lock, NULL);
    const fsdp_host_allocator host = {.alloc = metered_alloc, .free = metered_free, .arg = &m};
    alloc_rig r;
    alloc_rig_open(&r, ((alloc_rig *)*state)->suite, 0, 0, 10000000000ull, &host);
    make_allocator(&r, 0, 4 * KIB);
    device_limit(8 * KIB);
    char *p = take(&r, 8 * KIB, A);
    int64_t held_bytes = 0;
    for (int i = 0; i < 100; i++) {
        void *none = NULL;
        assert_int_equal(fsdp_allocator_alloc(r.a, 8 * KIB, r.s[B], NULL, &none), FSDP_ERR_NO_MEMORY);
        if (i == 0) held_bytes = m.live_bytes;
        assert_int_equal(m.live_bytes, held_bytes);
    }
    device_limit(UINT64_MAX);
    give(&r, p);
    alloc_rig_close(&r);
    assert_int_equal(m.live_bytes, 0);
    pthread_mutex_destroy(&m.lock);
}

int run_alloc_host_suite(const alloc_suite *suite)
{
#define TEST(name) cmocka_unit_test_prestate_setup_teardown(name, alloc_rig_setup, alloc_rig_teardown, state)
    void *state = (void *)(uintptr_t)suite;
    const struct CMUnitTest tests[] = {
        TEST(a_block_may_be_freed_by_another_thread),
        TEST(several_threads_may_use_it_at_once),
        TEST(blocks_go_from_thread_to_thread_while_a_third_trims),
        TEST(without_host_memory_nothing_changes_and_nothing_is_lost),
        TEST(whichever_host_allocation_fails_nothing_changes_and_nothing_is_lost),
        TEST(what_is_freed_or_used_needs_no_host_memory),
        TEST(what_the_device_refuses_leaks_nothing),
    };
    return cmocka_run_group_tests_name("threads and host memory", tests, NULL, NULL);
}
