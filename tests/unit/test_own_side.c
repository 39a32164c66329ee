/* SPDX-License-Identifier: MIT */
/* The caller's own side channel, as one: ranks are threads, whose function meets at a barrier. */
#include "star_rig.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "scarce.h"

enum { WORLD = 3, MAX_BYTES = 1 << 20 };
static star_rank ranks[WORLD];

/* What a caller brings along. */
typedef struct callers {
    pthread_barrier_t meet;
    pthread_mutex_t lock; /* the first reason stays */
    const void *blob[WORLD];
    _Atomic(const char *) reason;
    char text[8192];
    bool swaps; /* a function that puts blobs in the wrong place */
    int spoils; /* from this call on it brings something else; 0: never */
} callers;

typedef struct caller {
    callers *all;
    uint32_t rank;
    int n_calls, fails_at; /* 0: never */
    fsdp_status fails_with;
    const char *says;
    int n_failed; /* calls of args.failed */
    scarce memory;
    fsdp_side_channel channel;
} caller;

static caller them[WORLD];

static fsdp_status gather(void *arg, const void *mine, void *all, size_t bytes, uint64_t timeout_ns)
{
    caller *c = arg;
    (void)timeout_ns;
    if (++c->n_calls == c->fails_at)
        return c->says != NULL ? fsdp_backend_fail(c->fails_with, "%s", c->says) : c->fails_with;
    c->all->blob[c->rank] = mine;
    pthread_barrier_wait(&c->all->meet);
    for (uint32_t r = 0; r < WORLD; r++) {
        uint32_t to = c->all->swaps ? WORLD - 1 - r : r;
        if (bytes > 0) memcpy((char *)all + to * bytes, c->all->blob[r], bytes);
    }
    if (c->all->spoils > 0 && c->n_calls >= c->all->spoils) memset(all, 0xff, bytes * WORLD);
    pthread_barrier_wait(&c->all->meet);
    return FSDP_OK;
}

static void tell_abort(void *arg, const char *reason)
{
    callers *all = ((caller *)arg)->all;
    pthread_mutex_lock(&all->lock);
    if (atomic_load(&all->reason) == NULL) {
        snprintf(all->text, sizeof all->text, "%s", reason);
        atomic_store(&all->reason, all->text);
    }
    pthread_mutex_unlock(&all->lock);
}

static const char *aborted(void *arg) { return atomic_load(&((caller *)arg)->all->reason); }

static void note_failed(void *arg) { ((caller *)arg)->n_failed++; }

static fsdp_status own_open(star_rank *r)
{
    uint32_t rank = 0, world = 0;
    star_rank_keep(r, fsdp__own_side_ops.open(&r->args, &r->side, &rank, &world));
    if (r->status == FSDP_OK && (rank != r->rank || world != r->world)) r->check_failed = true;
    return r->status;
}

static void own_close(star_rank *r)
{
    if (r->side != NULL) fsdp__own_side_ops.close(r->side);
    r->side = NULL;
}

static void prepare(callers *all)
{
    static star_place place;
    place = (star_place){FSDP_LAUNCH_INIT, -1};
    place.launch.world = WORLD;
    memset(all, 0, sizeof *all);
    pthread_barrier_init(&all->meet, NULL, WORLD);
    pthread_mutex_init(&all->lock, NULL);
    for (uint32_t k = 0; k < WORLD; k++) {
        star_rank_init(&ranks[k], &place, k);
        them[k] = (caller){.all = all, .rank = k, .memory = {.left = 1000}};
        them[k].channel = (fsdp_side_channel)FSDP_SIDE_CHANNEL_INIT;
        them[k].channel.arg = &them[k];
        them[k].channel.all_gather = gather;
        them[k].channel.abort = tell_abort;
        them[k].channel.aborted = aborted;
        ranks[k].config.own = &them[k].channel;
        ranks[k].host = (fsdp_host_allocator){scarce_alloc, scarce_free, &them[k].memory, NULL};
        ranks[k].args.failed = note_failed;
        ranks[k].args.failed_arg = &them[k];
    }
}

static void finish(callers *all)
{
    pthread_barrier_destroy(&all->meet);
    pthread_mutex_destroy(&all->lock);
    for (int k = 0; k < WORLD; k++) assert_int_equal(them[k].memory.live, 0);
}

static void gather_and_broadcast(star_rank *r)
{
    static unsigned char data[WORLD][MAX_BYTES];
    unsigned char mine[100], all[WORLD * 100];
    CHECK(own_open(r) == FSDP_OK);
    memset(mine, (int)(r->rank + 1), sizeof mine);
    CHECK(fsdp__own_side_ops.all_gather(r->side, mine, all, sizeof mine, STAR_SECOND) == FSDP_OK);
    for (size_t k = 0; k < sizeof all; k++) CHECK(all[k] == k / 100 + 1);
    for (uint32_t root = 0; root < WORLD; root++) {
        for (size_t k = 0; k < MAX_BYTES; k++)
            data[r->rank][k] = (unsigned char)(r->rank == root ? k * 7 + root : 0xa5);
        CHECK(fsdp__own_side_ops.broadcast(r->side, data[r->rank], MAX_BYTES, root, STAR_SECOND) == FSDP_OK);
        for (size_t k = 0; k < MAX_BYTES; k++) CHECK(data[r->rank][k] == (unsigned char)(k * 7 + root));
    }
    CHECK(fsdp__own_side_ops.broadcast(r->side, mine, 8, WORLD, STAR_SECOND) == FSDP_ERR_ARG);
    CHECK(fsdp__own_side_ops.check(r->side) == FSDP_OK);
    own_close(r);
}

static void blobs_go_through_the_callers_function(void **state)
{
    (void)state;
    callers all;
    prepare(&all);
    star_run(ranks, WORLD, gather_and_broadcast);
    finish(&all);
}

static void gather_until_it_fails(star_rank *r)
{
    unsigned char mine[8] = {0}, all[WORLD * 8];
    CHECK(own_open(r) == FSDP_OK);
    while ((r->status = fsdp__own_side_ops.all_gather(r->side, mine, all, 8, STAR_SECOND)) == FSDP_OK) {
    }
    star_rank_keep(r, r->status);
    int n_calls = them[r->rank].n_calls;
    CHECK(fsdp__own_side_ops.all_gather(r->side, mine, all, 8, STAR_SECOND) == r->status);
    CHECK(them[r->rank].n_calls == n_calls); /* for good: the function is not asked again */
    CHECK(fsdp__own_side_ops.check(r->side) == r->status);
    CHECK(them[r->rank].n_failed == 1);
    own_close(r);
}

static void a_failure_of_the_function_stays(void **state)
{
    (void)state;
    const struct {
        const char *says, *expected;
        fsdp_status with, status;
    } cases[] = {
        {"rank 2 hung up",
         "side channel #2 of 8 bytes: the caller's all_gather returned FSDP_ERR_RANK_LOST (-21): rank 2 hung up",
         FSDP_ERR_RANK_LOST, FSDP_ERR_RANK_LOST},
        {"ranks differ",
         "side channel #2 of 8 bytes: the caller's all_gather returned FSDP_ERR_MISMATCH (-20): ranks differ",
         FSDP_ERR_MISMATCH, FSDP_ERR_MISMATCH},
        {"enough", "side channel #2 of 8 bytes: the caller's all_gather returned FSDP_ERR_ABORTED (-22): enough",
         FSDP_ERR_ABORTED, FSDP_ERR_ABORTED},
        {NULL, "side channel #2 of 8 bytes: the caller's all_gather returned FSDP_ERR_IO (-40): it gave no sentence",
         FSDP_ERR_IO, FSDP_ERR_RANK_LOST},
        {"my pipe broke",
         "side channel #2 of 8 bytes: the caller's all_gather returned FSDP_ERR_IO (-40): my pipe broke", FSDP_ERR_IO,
         FSDP_ERR_RANK_LOST},
        {NULL,
         "side channel #2 of 8 bytes: the caller's all_gather returned FSDP_ERR_TIMEOUT (-4): it gave no sentence",
         FSDP_ERR_TIMEOUT, FSDP_ERR_RANK_LOST},
        {NULL,
         "side channel #2 of 8 bytes: the caller's all_gather returned what is no status (5): it gave no sentence",
         (fsdp_status)5, FSDP_ERR_RANK_LOST},
        {NULL,
         "side channel #2 of 8 bytes: the caller's all_gather returned what is no status (-999): it gave no sentence",
         (fsdp_status)-999, FSDP_ERR_RANK_LOST},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        callers all;
        prepare(&all);
        for (int k = 0; k < WORLD; k++) {
            them[k].fails_at = 3; /* the first is open's */
            them[k].fails_with = cases[i].with;
            them[k].says = cases[i].says;
        }
        star_run(ranks, WORLD, gather_until_it_fails);
        for (int k = 0; k < WORLD; k++) {
            assert_int_equal(ranks[k].status, cases[i].status);
            assert_string_equal(ranks[k].sentence, cases[i].expected);
        }
        finish(&all);
    }
}

/* What lies in no rank's place is what that rank gave: neither a vote nor a ballot of it is read. */
static void a_function_that_brings_something_else_is_found_out(void **state)
{
    (void)state;
    callers all;
    prepare(&all);
    all.spoils = 3;
    star_run(ranks, WORLD, gather_until_it_fails);
    for (int k = 0; k < WORLD; k++) {
        assert_int_equal(ranks[k].status, FSDP_ERR_MISMATCH);
        assert_non_null(
            strstr(ranks[k].sentence, "side channel #2 of 8 bytes: the caller's all_gather returned FSDP_OK, and "));
        assert_non_null(strstr(ranks[k].sentence, "'s place on that rank is not what it gave"));
    }
    finish(&all);
}

static void broadcast_spoilt(star_rank *r)
{
    unsigned char data[200] = {0};
    CHECK(own_open(r) == FSDP_OK);
    star_rank_keep(r, fsdp__own_side_ops.broadcast(r->side, data, sizeof data, 0, STAR_SECOND));
    CHECK(fsdp__own_side_ops.check(r->side) == FSDP_ERR_MISMATCH);
    own_close(r);
}

static void a_broadcast_of_something_else_is_found_out(void **state)
{
    (void)state;
    for (int at = 2; at <= 3; at++) { /* what they agree on; the data */
        callers all;
        prepare(&all);
        all.spoils = at;
        star_run(ranks, WORLD, broadcast_spoilt);
        for (int k = 0; k < WORLD; k++) {
            assert_int_equal(ranks[k].status, FSDP_ERR_MISMATCH);
            assert_non_null(strstr(ranks[k].sentence, "is not what it gave"));
        }
        finish(&all);
    }
}

static void a_status_of_a_peer_is_one_of_ours(void **state)
{
    (void)state;
    assert_true(fsdp__is_failure(FSDP_ERR_IO) && fsdp__is_failure(FSDP_ERR_ARG));
    static const int64_t none[] = {
        FSDP_OK, 1, INT32_MAX, -999, INT32_MIN, INT64_MIN, (int64_t)FSDP_ERR_IO - (1ll << 32)};
    for (size_t i = 0; i < sizeof none / sizeof *none; i++) assert_false(fsdp__is_failure(none[i]));
}

typedef struct failing {
    fsdp_status status;
    pthread_barrier_t meet;
} failing;

static void one_fails(star_rank *r)
{
    failing *f = r->arg;
    CHECK(own_open(r) == FSDP_OK);
    if (r->rank == 1) (fsdp__own_side_ops.fail)(r->side, f->status, "rank 1 ran out of paper");
    pthread_barrier_wait(&f->meet);
    if (r->rank == 2) (fsdp__own_side_ops.fail)(r->side, FSDP_ERR_DEVICE, "too late");
    star_rank_keep(r, fsdp__own_side_ops.check(r->side));
    CHECK(them[r->rank].n_failed == 1);
    own_close(r);
}

static void a_failure_of_one_reaches_all_with_status_and_sentence(void **state)
{
    (void)state;
    const fsdp_status statuses[] = {FSDP_ERR_ABORTED, FSDP_ERR_RANK_LOST, FSDP_ERR_NO_HOST_MEMORY, FSDP_ERR_NO_MEMORY};
    for (int i = 0; i < 4; i++) {
        callers all;
        failing f = {.status = statuses[i]};
        pthread_barrier_init(&f.meet, NULL, WORLD);
        prepare(&all);
        for (int k = 0; k < WORLD; k++) ranks[k].arg = &f;
        star_run(ranks, WORLD, one_fails);
        for (int k = 0; k < WORLD; k++) {
            assert_int_equal(ranks[k].status, statuses[i]);
            assert_string_equal(ranks[k].sentence, "rank 1 ran out of paper");
        }
        pthread_barrier_destroy(&f.meet);
        finish(&all);
    }
}

static void broadcast_scarcely(star_rank *r)
{
    unsigned char data[200];
    memset(data, (int)r->rank, sizeof data);
    CHECK(own_open(r) == FSDP_OK);
    star_rank_keep(r, fsdp__own_side_ops.broadcast(r->side, data, sizeof data, 0, STAR_SECOND));
    CHECK(r->status == FSDP_OK || data[0] == r->rank);
    CHECK(fsdp__own_side_ops.check(r->side) == FSDP_OK);
    own_close(r);
}

static void a_rank_without_memory_fails_a_broadcast_of_all(void **state)
{
    (void)state;
    for (int left = 1; left <= 2; left++) {
        callers all;
        prepare(&all);
        them[1].memory.left = left;
        star_run(ranks, WORLD, broadcast_scarcely);
        for (int k = 0; k < WORLD; k++) {
            assert_int_equal(ranks[k].status, left == 1 ? FSDP_ERR_NO_HOST_MEMORY : FSDP_OK);
            if (left == 1) assert_non_null(strstr(ranks[k].sentence, "rank 1 has no host memory for 600 bytes"));
        }
        finish(&all);
    }
}

static void broadcast_differently(star_rank *r)
{
    unsigned char data[200] = {0};
    CHECK(own_open(r) == FSDP_OK);
    star_rank_keep(r, fsdp__own_side_ops.broadcast(r->side, data, r->rank == 1 ? 100 : 200, 0, STAR_SECOND));
    CHECK(fsdp__own_side_ops.check(r->side) == FSDP_ERR_MISMATCH);
    own_close(r);
}

static void different_broadcasts_are_a_mismatch(void **state)
{
    (void)state;
    callers all;
    prepare(&all);
    star_run(ranks, WORLD, broadcast_differently);
    for (int k = 0; k < WORLD; k++) {
        assert_int_equal(ranks[k].status, FSDP_ERR_MISMATCH);
        assert_string_equal(ranks[k].sentence,
                            "rank 0: side channel #1 of 200 bytes from rank 0; rank 1: side channel #1 of 100 "
                            "bytes from rank 0");
    }
    finish(&all);
}

static void only_open(star_rank *r)
{
    (void)own_open(r);
    own_close(r);
}

static void a_function_that_mixes_up_ranks_is_found_out(void **state)
{
    (void)state;
    callers all;
    prepare(&all);
    all.swaps = true;
    star_run(ranks, WORLD, only_open);
    for (int k = 0; k < WORLD; k++) {
        assert_int_equal(ranks[k].status, FSDP_ERR_MISMATCH);
        assert_string_equal(ranks[k].sentence, "the caller's all_gather brought rank 2 of 3 in place 0 of 3");
    }
    finish(&all);
}

static void what_cannot_be_is_refused(void **state)
{
    (void)state;
    callers all;
    prepare(&all);
    them[0].channel.size = 3;
    assert_int_equal(own_open(&ranks[0]), FSDP_ERR_ARG);
    them[1].channel.all_gather = NULL;
    assert_int_equal(own_open(&ranks[1]), FSDP_ERR_ARG);
    assert_string_equal(ranks[1].sentence, "fsdp_side_channel.all_gather is NULL");
    ranks[2].config.own = NULL;
    assert_int_equal(own_open(&ranks[2]), FSDP_ERR_ARG);
    ranks[2].launch.rank = WORLD;
    ranks[2].config.own = &them[2].channel;
    assert_int_equal(own_open(&ranks[2]), FSDP_ERR_ARG);
    finish(&all);
}

#define TEST(name) cmocka_unit_test_setup(name, star_deadline)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(blobs_go_through_the_callers_function),
        TEST(a_failure_of_the_function_stays),
        TEST(a_function_that_brings_something_else_is_found_out),
        TEST(a_broadcast_of_something_else_is_found_out),
        TEST(a_status_of_a_peer_is_one_of_ours),
        TEST(a_failure_of_one_reaches_all_with_status_and_sentence),
        TEST(a_rank_without_memory_fails_a_broadcast_of_all),
        TEST(different_broadcasts_are_a_mismatch),
        TEST(a_function_that_mixes_up_ranks_is_found_out),
        TEST(what_cannot_be_is_refused),
    };
    return cmocka_run_group_tests_name("own side channel", tests, NULL, NULL);
}
