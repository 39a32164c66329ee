/* SPDX-License-Identifier: MIT */
/* What a test on a GPU cannot ask for: NCCL finds an error while a collective waits; it does not come back from an abort; a
 * peer does not come when all close; a stream takes any number of collectives that wait. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../conformance/comm_suite.h"
#include "cuda/cuda_backend.h"
#include "fsdp/nccl.h"
#include "standin_nccl.h"

enum { WORLD = 2, LATE_S = 2 };

typedef struct group {
    fsdp_launch launch[WORLD];
} group;

static const void *rank_config(void *storage, void *group_, uint32_t rank, uint64_t jitter_ns, uint64_t jitter_seed)
{
    (void)jitter_ns, (void)jitter_seed;
    fsdp_cuda_config *config = storage;
    *config = (fsdp_cuda_config)FSDP_CUDA_CONFIG_INIT;
    config->device = (int)rank;
    config->launch = &((group *)group_)->launch[rank];
    setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 1);
    return config;
}

static void *group_create(uint32_t world, const fsdp_link *link)
{
    (void)link;
    group *g = calloc(1, sizeof *g);
    assert_non_null(g);
    assert_int_equal(world, WORLD);
    g->launch[0] = processes_launch(PROCESSES_BY_NAME);
    for (uint32_t r = 0; r < world; r++) {
        g->launch[r] = g->launch[0];
        g->launch[r].rank = g->launch[r].local_rank = r;
        g->launch[r].world = g->launch[r].local_world = world;
    }
    return g;
}

static void group_destroy(void *g) { free(g); }

static fsdp_status gather(member *r)
{
    fsdp_collective c = {.kind = FSDP_OPERATION_ALL_GATHER, .dtype = FSDP_DTYPE_FP32, .count = 8, .label = "h.0"};
    fsdp_status status = rank_memory(r, &c, 1);
    return status != FSDP_OK ? status : enqueue(r, 0, 0, c);
}

static void connect_all(member *r)
{
    EXPECT_OK(gather(r));
    EXPECT_OK(rank_drain(r, 0));
    meet(r);
}

static void expect_failed(member *r, fsdp_status expected)
{
    const struct timespec moment = {0, 10000000};
    fsdp_status status = FSDP_OK;
    uint64_t end = fsdp__after_ns(30ull * SECOND);
    while (status == FSDP_OK && fsdp__now_ns() < end) {
        nanosleep(&moment, NULL);
        status = r->comms->check(r->comm[0]);
    }
    snprintf(r->sentence, sizeof r->sentence, "%s", fsdp_last_error());
    EXPECT(status == expected);
}

static void assert_told(const team *t, const char *part)
{
    for (uint32_t i = 0; i < t->world; i++)
        if (strstr(t->rank[i].sentence, part) == NULL)
            fail_msg("\"%s\" does not say \"%s\"", t->rank[i].sentence, part);
    assert_string_equal(t->rank[0].sentence, t->rank[1].sentence);
}

/* ---- An error that NCCL finds ---- */

static void find_an_error(member *r)
{
    connect_all(r);
    if (r->rank == 0) EXPECT_OK(gather(r)); /* the other does not come */
    if (r->rank == 0) standin_nccl_find(0, ncclRemoteError);
    expect_failed(r, FSDP_ERR_RANK_LOST);
    if (r->rank == 0) EXPECT(r->device->stream_drain(r->dev, r->stream[0], 20ull * SECOND) != FSDP_ERR_TIMEOUT);
    EXPECT_OK(r->device->check(r->dev));
    meet(r);
}

static void an_error_that_nccl_finds_is_every_ranks(void **state)
{
    team *t = new_team(state, WORLD);
    run_team(t, find_an_error);
    assert_told(t, "rank 0: NCCL on communicator 0: remote error");
}

/* Where nothing waits it is no matter: a peer may have closed. */
static void find_one_in_vain(member *r)
{
    const struct timespec while_ = {0, 700000000};
    connect_all(r);
    standin_nccl_find((int)r->rank, ncclRemoteError);
    nanosleep(&while_, NULL);
    EXPECT_OK(r->comms->check(r->comm[0]));
    standin_nccl_find((int)r->rank, ncclSuccess);
    EXPECT_OK(gather(r));
    EXPECT_OK(rank_drain(r, 0));
    meet(r);
}

static void an_error_that_nccl_finds_while_nothing_waits_is_none(void **state)
{
    run_team(new_team(state, WORLD), find_one_in_vain);
}

/* ---- More that wait than are watched ---- */

static void wait_in_vain(member *r)
{
    enum { N = 1200 }; /* more than twice FSDP__NCCL_RING */
    fsdp_collective c = {.kind = FSDP_OPERATION_BARRIER, .dtype = FSDP_DTYPE_FP32, .label = "many"};
    connect_all(r);
    for (int i = 0; i < N && r->rank == 0; i++) EXPECT_OK(enqueue(r, 0, 0, c));
    expect_failed(r, FSDP_ERR_RANK_LOST);
    meet(r);
}

static void of_more_groups_than_are_watched_the_oldest_is_known(void **state)
{
    team *t = new_team(state, WORLD);
    t->timeout_ns = (uint64_t)LATE_S * SECOND;
    run_team(t, wait_in_vain);
    assert_told(t, "#2 barrier of many");
}

/* ---- A peer that does not close ---- */

static void close_alone(member *r)
{
    connect_all(r);
    if (r->rank == 1) meet(r);
    close_comm(r, 1); /* rank 0 gives up here: rank 1 is a timeout late */
    EXPECT_OK(r->device->check(r->dev));
    if (r->rank == 0) meet(r);
}

static void a_rank_that_closes_alone_gives_up_in_time(void **state)
{
    team *t = new_team(state, WORLD);
    t->timeout_ns = (uint64_t)LATE_S * SECOND;
    run_team(t, close_alone);
}

/* ---- An abort that does not come back ---- */

/* The GPU cannot be had back; all that the process has is closed all the same, and nothing waits for it. */
static void abort_in_vain(member *r)
{
    connect_all(r);
    if (r->rank == 0) {
        standin_nccl_hold_aborts();
        EXPECT_OK(gather(r));
    }
    expect_failed(r, FSDP_ERR_RANK_LOST);
    if (r->rank == 0) {
        r->doing = "waiting until its GPU is given up";
        EXPECT(r->device->stream_drain(r->dev, r->stream[0], 40ull * SECOND) != FSDP_ERR_TIMEOUT);
        EXPECT(r->device->check(r->dev) == FSDP_ERR_ABORTED);
        EXPECT(strstr(fsdp_last_error(), "ncclCommAbort has not returned within 15 s") != NULL);
    }
    meet(r);
}

static void an_abort_that_does_not_come_back_is_left_behind(void **state)
{
    team *t = new_team(state, WORLD);
    t->timeout_ns = (uint64_t)LATE_S * SECOND;
    run_team(t, abort_in_vain);
    assert_told(t, "#2 all-gather of h.0 (8 fp32)");
}

int main(void)
{
#define TEST(name)                                   \
    {                                                \
#name, name, team_setup, team_teardown, NULL \
    }
    static comm_suite suite = {NULL, group_create, group_destroy, rank_config, true, true, WORLD, NULL};
    suite.backend = fsdp_cuda_backend();
    struct CMUnitTest tests[] = {
        TEST(an_error_that_nccl_finds_is_every_ranks),
        TEST(an_error_that_nccl_finds_while_nothing_waits_is_none),
        TEST(of_more_groups_than_are_watched_the_oldest_is_known),
        TEST(a_rank_that_closes_alone_gives_up_in_time),
        TEST(an_abort_that_does_not_come_back_is_left_behind),
    };
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) tests[i].initial_state = &suite;
    return cmocka_run_group_tests_name("what NCCL does seldom", tests, NULL, NULL);
}
