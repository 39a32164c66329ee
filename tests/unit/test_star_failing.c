/* SPDX-License-Identifier: MIT */
/* How a star fails: the first failure, its words, aborts; and that it sleeps as long as nothing happens. */
#include "star_rig.h"

#include <pthread.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

enum { MAX_WORLD = 32 };
static star_rank ranks[MAX_WORLD];

enum { WORDS_BYTES = 40 };

static void tell(void *arg, void *blob)
{
    const star_rank *r = arg;
    snprintf(blob, WORDS_BYTES, "rank %u was at #%u", r->rank, r->rank * 10);
}

static void compose(void *arg, const char *sentence, const void *const *blobs, uint32_t world, char *text, size_t bytes)
{
    (void)arg, (void)sentence;
    size_t at = 0;
    text[0] = '\0';
    for (uint32_t i = 0; i < world && at < bytes; i++)
        at += (size_t)snprintf(text + at, bytes - at, "%s%s", i > 0 ? "; " : "",
                               blobs[i] != NULL ? (const char *)blobs[i] : "?");
}

typedef struct failing {
    pthread_barrier_t meet, rest;
    atomic_int n_told;
} failing;

static void count_told(void *arg) { atomic_fetch_add(&((failing *)arg)->n_told, 1); }

static fsdp_status wait_for_failure(const star_rank *r)
{
    fsdp_status status;
    while ((status = fsdp__star_side_ops.check(r->side)) == FSDP_OK) usleep(100);
    return status;
}

static void all_fail_at_once(star_rank *r)
{
    failing *f = r->arg;
    char own[64];
    r->args.words = (fsdp_side_words){r, WORDS_BYTES, tell, compose};
    r->args.failed = count_told;
    r->args.failed_arg = f;
    CHECK(star_rank_open(r) == FSDP_OK);
    pthread_barrier_wait(&f->meet);
    snprintf(own, sizeof own, "rank %u was first", r->rank);
    if (r->rank != 3) {
        (fsdp__star_side_ops.fail)(r->side, FSDP_ERR_RANK_LOST, own);
        CHECK(fsdp__star_side_ops.check(r->side) == FSDP_ERR_RANK_LOST);
    }
    star_rank_keep(r, wait_for_failure(r));
    while (atomic_load(&f->n_told) < (int)r->world) usleep(100);
    pthread_barrier_wait(&f->meet);
    star_rank_close(r);
}

static void the_first_failure_is_everybodys_with_the_words_of_all(void **state)
{
    (void)state;
    for (int i = 0; i < 10; i++) {
        star_place place;
        failing f = {.n_told = 0};
        pthread_barrier_init(&f.meet, NULL, 5);
        assert_true(star_place_make(&place, i % 2 ? "127.0.0.1" : "@", 5));
        for (uint32_t k = 0; k < 5; k++) {
            star_rank_init(&ranks[k], &place, k);
            ranks[k].arg = &f;
        }
        star_run(ranks, 5, all_fail_at_once);
        assert_non_null(strstr(ranks[0].sentence, " was first. rank 0 was at #0; rank 1 was at #10; rank 2 was at #20; "
                                                  "rank 3 was at #30; rank 4 was at #40"));
        for (int k = 1; k < 5; k++) assert_string_equal(ranks[k].sentence, ranks[0].sentence);
        assert_int_equal(f.n_told, 5); /* once each, also for those that failed themselves */
        pthread_barrier_destroy(&f.meet);
    }
}

typedef struct aborting {
    pthread_barrier_t meet;
    _Atomic uint64_t start_ns, slowest_ns;
} aborting;

/* The rank's own thread hears of it and says so, while this one does not look. */
typedef struct heard {
    aborting *all;
    pthread_mutex_t lock;
    pthread_cond_t cond;
    bool is;
} heard;

static void hear_failure(void *arg)
{
    heard *h = arg;
    uint64_t took_ns = fsdp__now_ns() - atomic_load(&h->all->start_ns), slowest_ns = atomic_load(&h->all->slowest_ns);
    while (took_ns > slowest_ns && !atomic_compare_exchange_weak(&h->all->slowest_ns, &slowest_ns, took_ns)) {
    }
    pthread_mutex_lock(&h->lock);
    h->is = true;
    pthread_cond_signal(&h->cond);
    pthread_mutex_unlock(&h->lock);
}

static void abort_busy_ranks(star_rank *r)
{
    aborting *a = r->arg;
    heard h = {.all = a};
    pthread_mutex_init(&h.lock, NULL);
    pthread_cond_init(&h.cond, NULL);
    r->args.words = (fsdp_side_words){r, WORDS_BYTES, tell, compose};
    r->args.failed = hear_failure;
    r->args.failed_arg = &h;
    CHECK(star_rank_open(r) == FSDP_OK);
    pthread_barrier_wait(&a->meet);
    if (r->rank == 3) {
        atomic_store(&a->start_ns, fsdp__now_ns());
        (fsdp__star_side_ops.fail)(r->side, FSDP_ERR_ABORTED, "rank 3 aborted: stop");
    }
    pthread_mutex_lock(&h.lock);
    while (!h.is) pthread_cond_wait(&h.cond, &h.lock);
    pthread_mutex_unlock(&h.lock);
    star_rank_keep(r, fsdp__star_side_ops.check(r->side));
    star_rank_close(r);
    pthread_mutex_destroy(&h.lock);
    pthread_cond_destroy(&h.cond);
}

static void an_abort_reaches_ranks_that_do_not_ask(void **state)
{
    (void)state;
    enum { WORLD = 32 };
    star_place place;
    aborting a = {.slowest_ns = 0};
    pthread_barrier_init(&a.meet, NULL, WORLD);
    assert_true(star_place_make(&place, "127.0.0.1", WORLD));
    for (uint32_t k = 0; k < WORLD; k++) {
        star_rank_init(&ranks[k], &place, k);
        ranks[k].arg = &a;
    }
    star_run(ranks, WORLD, abort_busy_ranks);
    for (int k = 0; k < WORLD; k++) {
        assert_int_equal(ranks[k].status, FSDP_ERR_ABORTED);
        assert_string_equal(ranks[k].sentence, "rank 3 aborted: stop");
    }
    printf("an abort reached %d ranks within %.3f ms\n", WORLD, (double)a.slowest_ns * 1e-6);
    pthread_barrier_destroy(&a.meet);
}

/* ---- At rest ---- */

/* How often threads of this process gave the processor away: one that polls, or wakes by a clock, does. */
static long switches(void)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_nvcsw + usage.ru_nivcsw;
}

static void be_idle(star_rank *r)
{
    failing *f = r->arg;
    CHECK(star_rank_open(r) == FSDP_OK);
    pthread_barrier_wait(&f->meet);
    const struct timespec settle = {0, 50000000}, look = {0, 500000000};
    if (r->rank == 0) {
        nanosleep(&settle, NULL);
        long before = switches();
        nanosleep(&look, NULL);
        CHECK(switches() - before < 16);
    }
    pthread_barrier_wait(&f->meet);
    star_rank_close(r);
}

static void stars_at_rest_do_not_wake(void **state)
{
    (void)state;
    enum { WORLD = 32 };
    star_place place;
    failing f = {.n_told = 0};
    pthread_barrier_init(&f.meet, NULL, WORLD);
    assert_true(star_place_make(&place, "127.0.0.1", WORLD));
    for (uint32_t k = 0; k < WORLD; k++) {
        star_rank_init(&ranks[k], &place, k);
        ranks[k].arg = &f;
    }
    star_run(ranks, WORLD, be_idle);
    pthread_barrier_destroy(&f.meet);
}

/* ---- Leaving ---- */

static void leave_early(star_rank *r)
{
    failing *f = r->arg;
    unsigned char all[4 * 8];
    CHECK(star_rank_open(r) == FSDP_OK);
    if (r->rank == 1 || r->rank == 2) star_rank_close(r);
    pthread_barrier_wait(&f->meet);
    if (r->side == NULL) return;
    CHECK(fsdp__star_side_ops.check(r->side) == FSDP_OK); /* nobody needs them yet */
    pthread_barrier_wait(&f->rest);
    star_rank_keep(r, star_rank_gather(r, all, 8, 50 * STAR_SECOND));
    star_rank_close(r);
}

static void who_left_early_is_named_once_it_is_needed(void **state)
{
    (void)state;
    star_place place;
    failing f = {.n_told = 0};
    pthread_barrier_init(&f.meet, NULL, 4);
    pthread_barrier_init(&f.rest, NULL, 2);
    assert_true(star_place_make(&place, "127.0.0.1", 4));
    for (uint32_t k = 0; k < 4; k++) {
        star_rank_init(&ranks[k], &place, k);
        ranks[k].arg = &f;
    }
    star_run(ranks, 4, leave_early);
    for (int k = 0; k < 4; k += 3) {
        assert_int_equal(ranks[k].status, FSDP_ERR_RANK_LOST);
        assert_string_equal(ranks[k].sentence, "side channel #1 of 8 bytes: ranks 1, 2 of 4 closed before it came");
    }
    pthread_barrier_destroy(&f.meet);
    pthread_barrier_destroy(&f.rest);
}

#define TEST(name) cmocka_unit_test_setup(name, star_deadline)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(the_first_failure_is_everybodys_with_the_words_of_all),
        TEST(an_abort_reaches_ranks_that_do_not_ask),
        TEST(who_left_early_is_named_once_it_is_needed),
        TEST(stars_at_rest_do_not_wake),
    };
    return cmocka_run_group_tests_name("failing", tests, NULL, NULL);
}
