/* SPDX-License-Identifier: MIT */
/* NCCL's communicators pass the suites, with ranks as processes on one GPU; and what only they promise.
 *
 *     test_gpu_comm [own] [threads]     own: without the suites; threads: ranks are threads, each with a GPU of its own */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../conformance/comm_suite.h"
#include "fsdp/nccl.h"
#include "gpu_ranks.h"
#include "gpu_suites.h"

enum { MOST = 4, LATE_S = GPU_LATE_S };

static bool in_threads;
static uint32_t most = MOST; /* ranks: threads have a GPU each */

typedef struct group {
    fsdp_launch launch[MOST];
    fsdp_local *local; /* of threads */
} group;

/* What does not fit into a member's room for a config. */
typedef struct rank_room {
    fsdp_cuda_config cuda;
    fsdp_nccl_config nccl;
} rank_room;

_Static_assert(sizeof(rank_room) <= CONFIG_BYTES, "a rank's config");

static rank_room *room_of(member *r) { return (rank_room *)(void *)r->config; }

static const void *rank_config(void *storage, void *group_, uint32_t rank, uint64_t jitter_ns, uint64_t jitter_seed)
{
    rank_room *room = storage;
    group *g = group_;
    room->cuda = (fsdp_cuda_config)FSDP_CUDA_CONFIG_INIT;
    room->nccl = (fsdp_nccl_config)FSDP_NCCL_CONFIG_INIT;
    if (in_threads) {
        room->cuda.device = (int)rank;
        room->cuda.local = g->local;
        room->cuda.rank = rank;
    } else {
        gpu_rank_environment(rank);
        room->cuda.launch = &g->launch[rank];
    }
    room->cuda.nccl = &room->nccl;
    room->cuda.jitter_ns = jitter_ns;
    room->cuda.jitter_seed = jitter_seed;
    return storage;
}

static void *group_create(uint32_t world, const fsdp_link *link)
{
    (void)link;
    group *g = calloc(1, sizeof *g);
    assert_non_null(g);
    assert_true(world <= MOST);
    if (in_threads) {
        DO(fsdp_local_create(world, NULL, &g->local));
        return g;
    }
    g->launch[0] = processes_launch(PROCESSES_BY_NAME);
    for (uint32_t r = 0; r < world; r++) {
        g->launch[r] = g->launch[0];
        g->launch[r].rank = g->launch[r].local_rank = r;
        g->launch[r].world = g->launch[r].local_world = world;
    }
    return g;
}

static void group_destroy(void *group_)
{
    group *g = group_;
    fsdp_local_destroy(g->local);
    free(g);
}

/* ---- Ranks that are late, leave or give up ---- */

static fsdp_status gather(member *r, int comm, int stream)
{
    fsdp_collective c = {.kind = FSDP_OPERATION_ALL_GATHER, .dtype = FSDP_DTYPE_FP32, .count = 8, .label = "h.0"};
    fsdp_status status = rank_memory(r, &c, 1);
    return status != FSDP_OK ? status : enqueue(r, comm, stream, c);
}

/* NCCL connects ranks at their first collective, and waits for them where it is called; from the second on it does not. */
static void connect_all(member *r, int comm, int stream)
{
    EXPECT_OK(gather(r, comm, stream));
    EXPECT_OK(rank_drain(r, stream));
}

/* The communicator fails by itself, while the host does nothing; then its streams become idle, and it refuses. */
static void expect_broken(member *r, int comm, int stream, fsdp_status expected)
{
    const struct timespec moment = {0, 10000000};
    fsdp_status status = FSDP_OK;
    uint64_t end = fsdp__after_ns(30ull * SECOND);
    while (status == FSDP_OK && fsdp__now_ns() < end) {
        nanosleep(&moment, NULL);
        status = r->comms->check(r->comm[comm]);
    }
    snprintf(r->sentence, sizeof r->sentence, "%s", fsdp_last_error());
    EXPECT(status == expected);
    r->doing = "draining a stream of a communicator that has failed";
    EXPECT(r->device->stream_drain(r->dev, r->stream[stream], 20ull * SECOND) != FSDP_ERR_TIMEOUT);
    fsdp_collective c = {.kind = FSDP_OPERATION_BARRIER, .dtype = FSDP_DTYPE_FP32};
    EXPECT(enqueue(r, comm, stream, c) == expected);
    EXPECT(strcmp(fsdp_last_error(), r->sentence) == 0);
}

static void assert_same_sentence(const team *t, const char *part)
{
    printf("    %s\n", t->rank[0].sentence);
    if (strstr(t->rank[0].sentence, part) == NULL) fail_msg("\"%s\" does not say \"%s\"", t->rank[0].sentence, part);
    for (uint32_t i = 1; i < t->world; i++) assert_string_equal(t->rank[0].sentence, t->rank[i].sentence);
}

static void the_last_does_not_come(member *r)
{
    meet(r);
    r->doing = "in a first collective that one rank does not come to";
    fsdp_status status = r->rank + 1 < r->world ? gather(r, 0, 0) : FSDP_OK;
    EXPECT(status == FSDP_OK || status == FSDP_ERR_RANK_LOST);
    expect_broken(r, 0, 0, FSDP_ERR_RANK_LOST);
    meet(r);
}

static void a_collective_that_waits_too_long_fails_on_every_rank(void **state)
{
    team *t = team_of_at_most(state, 3);
    t->timeout_ns = (uint64_t)LATE_S * SECOND;
    run_team(t, the_last_does_not_come);
    assert_same_sentence(t, "#1 all-gather of h.0 (8 fp32)");
    char waited[32];
    snprintf(waited, sizeof waited, " has waited %d.", LATE_S);
    assert_same_sentence(t, waited);
}

/* For longer than the timeout the GPU computes before each collective, on its stream or another: nobody is late. */
static void compute_for_long(member *r)
{
    fsdp_device_op delay = {.kind = FSDP_OPERATION_DELAY, .u.delay = {(LATE_S + 2) * (uint64_t)SECOND}};
    for (int i = 0; i < 2; i++) connect_all(r, i, i);
    EXPECT_OK(r->device->launch(r->dev, r->stream[1], &delay, NULL));
    EXPECT_OK(r->device->event_record(r->dev, r->event[0], r->stream[1], NULL));
    EXPECT_OK(gather(r, 1, 1));
    EXPECT_OK(r->device->stream_wait(r->dev, r->stream[0], r->event[0], NULL));
    EXPECT_OK(gather(r, 0, 0));
    for (int i = 0; i < 2; i++) {
        EXPECT_OK(rank_drain(r, i));
        EXPECT_OK(r->comms->check(r->comm[i]));
    }
    meet(r);
}

static void what_comes_before_a_collective_is_not_its_time(void **state)
{
    team *t = new_team(state, 2);
    t->timeout_ns = (uint64_t)LATE_S * SECOND;
    run_team(t, compute_for_long);
}

/* Far more groups than the watch has places, of which the last waits in vain. */
static void enqueue_many(member *r)
{
    enum { N = 1200 }; /* more than twice FSDP__NCCL_RING */
    fsdp_collective c = {.kind = FSDP_OPERATION_BARRIER, .dtype = FSDP_DTYPE_FP32, .label = "many"};
    for (int i = 0; i < N; i++) EXPECT_OK(enqueue(r, 0, 0, c));
    EXPECT_OK(rank_drain(r, 0));
    meet(r);
    for (int i = 0; i < N; i++)
        if (r->rank == 0 || i < N - 1) EXPECT_OK(enqueue(r, 0, 0, c));
    expect_broken(r, 0, 0, FSDP_ERR_RANK_LOST);
    meet(r);
}

static void more_groups_than_are_watched_are_watched_all_the_same(void **state)
{
    team *t = new_team(state, 2);
    t->timeout_ns = (uint64_t)LATE_S * SECOND;
    run_team(t, enqueue_many);
    assert_same_sentence(t, "#2400 barrier of many");
}

static void one_aborts(member *r)
{
    connect_all(r, 0, 0);
    if (r->rank != 1) EXPECT_OK(gather(r, 0, 0));
    meet(r);
    if (r->rank == 1) r->comms->abort(r->comm[0]);
    expect_broken(r, 0, 0, FSDP_ERR_ABORTED);
    meet(r);
}

/* While NCCL holds the other hosts; half a second is enough for that, or they come too late, which changes nothing else. */
static void one_aborts_at_the_first(member *r)
{
    const struct timespec moment = {0, SECOND / 2};
    meet(r);
    if (r->rank == 1) {
        nanosleep(&moment, NULL);
        r->comms->abort(r->comm[0]);
    } else {
        r->doing = "in a first collective that is aborted";
        fsdp_status status = gather(r, 0, 0);
        EXPECT(status == FSDP_OK || status == FSDP_ERR_ABORTED);
    }
    expect_broken(r, 0, 0, FSDP_ERR_ABORTED);
    meet(r);
}

static void an_abort_reaches_every_rank(void **state)
{
    team *t = team_of_at_most(state, 3);
    run_team(t, one_aborts);
    assert_same_sentence(t, "rank 1 aborted communicator 0");
    t = team_of_at_most(state, 3);
    run_team(t, one_aborts_at_the_first);
    assert_same_sentence(t, "rank 1 aborted communicator 0");
}

static void abort_device(member *r)
{
    connect_all(r, 1, 1);
    if (r->rank == 0) EXPECT_OK(gather(r, 1, 1));
    meet(r);
    if (r->rank == 1) r->device->abort(r->dev);
    if (r->rank == 0) expect_broken(r, 1, 1, FSDP_ERR_ABORTED);
    meet(r);
}

static void an_aborted_device_takes_the_communicators_along(void **state)
{
    run_team(new_team(state, 2), abort_device);
}

static void close_after_the_last(member *r)
{
    fsdp_collective barrier = {.kind = FSDP_OPERATION_BARRIER, .dtype = FSDP_DTYPE_FP32};
    for (int i = 0; i < 3; i++) EXPECT_OK(enqueue(r, 0, i % 2, barrier));
    EXPECT_OK(rank_drain(r, 0));
    EXPECT_OK(rank_drain(r, 1));
    close_comm(r, 0); /* while peers may still be on their way out of the last one */
    EXPECT_OK(r->device->check(r->dev));
    EXPECT_OK(r->comms->check(r->comm[1]));
}

static void closing_after_the_last_operation_hurts_nobody(void **state)
{
    run_team(team_of_at_most(state, MOST), close_after_the_last);
}

static void free_at_once(member *r)
{
    enum { COUNT = 1 << 22 };
    char *send = rank_block(r, COUNT * 4), *recv = rank_block(r, COUNT * 4ull * r->world);
    EXPECT(send != NULL && recv != NULL);
    fsdp_collective c = {
        .kind = FSDP_OPERATION_ALL_GATHER, .dtype = FSDP_DTYPE_FP32, .count = COUNT, .send = send, .recv = recv};
    for (int i = 0; i < 4; i++) EXPECT_OK(enqueue(r, 0, 0, c));
    meet(r);
    if (r->rank == 0) r->comms->abort(r->comm[0]);
    EXPECT(r->device->stream_drain(r->dev, r->stream[0], 30ull * SECOND) != FSDP_ERR_TIMEOUT);
    free_blocks(r);
    EXPECT_OK(r->device->check(r->dev));
}

static void memory_of_a_failed_collective_can_be_freed_at_once(void **state)
{
    run_team(new_team(state, 2), free_at_once);
}

/* An event that is recorded behind a collective may be the watch's own: what it says of the last record stays true of the next
 * one. */
static void record_behind(member *r)
{
    bool done = false;
    connect_all(r, 0, 0);
    for (int i = 0; i < 2; i++) EXPECT_OK(r->device->event_record(r->dev, r->event[i], r->stream[0], NULL));
    for (int i = 0; i < 2; i++) EXPECT_OK(r->device->event_wait(r->dev, r->event[i], UINT64_MAX));
    meet(r);
    if (r->rank == 0) rank_close_gate(r, 0);
    EXPECT_OK(gather(r, 0, 0));
    EXPECT_OK(r->device->event_record(r->dev, r->event[0], r->stream[0], NULL));
    EXPECT_OK(r->device->stream_wait(r->dev, r->stream[1], r->event[0], NULL));
    EXPECT_OK(gather(r, 0, 0));
    EXPECT_OK(r->device->event_record(r->dev, r->event[0], r->stream[0], NULL));
    EXPECT(r->device->event_wait(r->dev, r->event[0], 20000000) == FSDP_ERR_TIMEOUT);
    EXPECT_OK(r->device->event_query(r->dev, r->event[1], &done));
    EXPECT(done);
    EXPECT(r->device->stream_drain(r->dev, r->stream[1], 20000000) == FSDP_ERR_TIMEOUT);
    meet(r);
    rank_open_gate(r);
    EXPECT_OK(r->device->event_wait(r->dev, r->event[0], UINT64_MAX));
    for (int i = 0; i < 2; i++) EXPECT_OK(rank_drain(r, i));
}

static void an_event_behind_a_collective_is_its_end(void **state) { run_team(new_team(state, 2), record_behind); }

/* Two events are the end of one collective; one of them is recorded again, behind more than a collective. */
static void record_one_again(member *r)
{
    bool done = false;
    char *x = rank_block(r, 64);
    EXPECT(x != NULL);
    fsdp_device_op fill = {.kind = FSDP_OPERATION_FILL, .u.fill = {x, 64, 1}};
    connect_all(r, 0, 0);
    for (int i = 0; i < 2; i++) EXPECT_OK(r->device->event_record(r->dev, r->event[i], r->stream[0], NULL));
    EXPECT_OK(r->device->event_wait(r->dev, r->event[1], UINT64_MAX));
    if (r->rank == 0) rank_close_gate(r, 0);
    EXPECT_OK(r->device->launch(r->dev, r->stream[0], &fill, NULL));
    EXPECT_OK(r->device->event_record(r->dev, r->event[0], r->stream[0], NULL));
    EXPECT_OK(r->device->event_query(r->dev, r->event[0], &done));
    EXPECT(!done || r->rank != 0);
    EXPECT_OK(r->device->event_query(r->dev, r->event[1], &done));
    EXPECT(done);
    rank_open_gate(r);
    EXPECT_OK(rank_drain(r, 0));
    meet(r);
}

static void an_event_recorded_again_leaves_those_of_its_last_record_alone(void **state)
{
    run_team(new_team(state, 2), record_one_again);
}

/* ---- What is NCCL's own ---- */

static void expect_sum(member *r, int comm)
{
    float *x = rank_block(r, 64), value = (float)(r->rank + 1), sum = 0.0f;
    EXPECT(x != NULL);
    fsdp_collective c = {.kind = FSDP_OPERATION_ALL_REDUCE, .dtype = FSDP_DTYPE_FP32, .count = 1, .send = x, .recv = x};
    EXPECT_OK(rank_copy(r, x, &value, sizeof value));
    EXPECT_OK(enqueue(r, comm, 0, c));
    EXPECT_OK(rank_copy(r, &sum, x, sizeof sum));
    EXPECT(sum == (float)(r->world * (r->world + 1) / 2));
}

static void open_without_order(member *r)
{
    close_comm(r, 1);
    unsetenv("NCCL_LAUNCH_ORDER_IMPLICIT");
    EXPECT(open_comm(r, 1, 60ull * SECOND) == FSDP_ERR_UNSUPPORTED);
    EXPECT(strstr(fsdp_last_error(), "set NCCL_LAUNCH_ORDER_IMPLICIT=1") != NULL);
    room_of(r)->nccl.accept_unordered = true;
    EXPECT_OK(open_comm(r, 1, 60ull * SECOND));
    expect_sum(r, 1);
    expect_sum(r, 0);
}

static void a_second_communicator_needs_an_order_of_launches(void **state)
{
    if (in_threads) skip(); /* the environment is of all */
    run_team(new_team(state, 2), open_without_order);
}

static bool make_own(member *r, ncclComm_t *own)
{
    ncclUniqueId id;
    memset(&id, 0, sizeof id);
    if (r->rank == 0 && ncclGetUniqueId(&id) != ncclSuccess) return false;
    if (r->sides->broadcast(r->side, &id, sizeof id, 0, 60ull * SECOND) != FSDP_OK) return false;
    if (in_threads && cudaSetDevice((int)r->rank) != cudaSuccess) return false;
    return ncclCommInitRank(own, (int)r->world, id, (int)r->rank) == ncclSuccess;
}

static void use_an_own_communicator(member *r)
{
    ncclComm_t own = NULL;
    int n = 0;
    close_comm(r, 1);
    close_comm(r, 0);
    EXPECT(make_own(r, &own));
    room_of(r)->nccl.comm = own;
    EXPECT_OK(open_comm(r, 0, 60ull * SECOND));
    EXPECT_OK(open_comm(r, 1, 60ull * SECOND)); /* split from it */
    expect_sum(r, 0);
    expect_sum(r, 1);
    close_comm(r, 1);
    close_comm(r, 0);
    EXPECT(ncclCommCount(own, &n) == ncclSuccess && n == (int)r->world); /* it lives */
    fsdp_nccl_config *nccl = &room_of(r)->nccl;
    nccl->reduce_comm = own;
    EXPECT(open_comm(r, 0, 60ull * SECOND) == FSDP_ERR_ARG && strstr(fsdp_last_error(), "reduce_comm is comm") != NULL);
    nccl->reduce_comm = NULL;
    if (r->rank == 1) nccl->comm = NULL;
    EXPECT(open_comm(r, 0, 60ull * SECOND) == FSDP_ERR_MISMATCH);
    EXPECT(strstr(fsdp_last_error(), "fsdp_nccl_config.comm is set on rank 0 and not on rank 1") != NULL);
    EXPECT(ncclCommDestroy(own) == ncclSuccess);
}

static void the_callers_own_communicator_is_used_and_left_alone(void **state)
{
    run_team(new_team(state, 2), use_an_own_communicator);
}

static void pass_a_config(member *r)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0; /* not taken over */
    config.maxCTAs = 2;
    close_comm(r, 1);
    close_comm(r, 0);
    room_of(r)->nccl.config = &config;
    EXPECT_OK(open_comm(r, 0, 60ull * SECOND));
    EXPECT_OK(open_comm(r, 1, 60ull * SECOND));
    expect_sum(r, 0);
    expect_sum(r, 1);
    EXPECT(config.blocking == 0 && config.maxCTAs == 2);
}

static void a_config_goes_to_nccl(void **state) { run_team(new_team(state, 2), pass_a_config); }

/* Between machines, as these ranks seem to be, NCCL may refuse: then all goes on without. */
static void gather_in_a_window(member *r)
{
    enum { COUNT = 1 << 18 };
    void *pool = NULL, *handle = NULL;
    float *host = calloc(2 * COUNT, sizeof *host);
    EXPECT(host != NULL);
    uint64_t bytes = r->caps.granularity;
    close_comm(r, 1);
    close_comm(r, 0);
    uint32_t *windows = &room_of(r)->nccl.windows;
    *windows = 8;
    EXPECT(open_comm(r, 0, 60ull * SECOND) == FSDP_ERR_ARG && strstr(fsdp_last_error(), "windows is 0x8") != NULL);
    *windows = r->rank == 0 ? FSDP_NCCL_WINDOW_GATHER : FSDP_NCCL_WINDOW_GATHER | FSDP_NCCL_WINDOW_GRAD;
    EXPECT(open_comm(r, 0, 60ull * SECOND) == FSDP_ERR_MISMATCH);
    EXPECT(strstr(fsdp_last_error(), "windows: FSDP_NCCL_WINDOW_GRAD is set on rank 1 and not on rank 0") != NULL);
    *windows = FSDP_NCCL_WINDOW_GATHER;
    EXPECT_OK(open_comm(r, 0, 60ull * SECOND));
    EXPECT_OK(r->device->mem_alloc(r->dev, bytes, FSDP_MEMORY_KIND_COLLECTIVE, &pool));
    EXPECT_OK(r->comms->attach(r->comm[0], FSDP_OPERATION_ALL_GATHER, pool, bytes, &handle));
    void *other = pool; /* gradients are not asked for */
    EXPECT_OK(r->comms->attach(r->comm[0], FSDP_OPERATION_REDUCE_SCATTER, pool, bytes, &other));
    EXPECT(other == NULL);
    snprintf(r->sentence, sizeof r->sentence, "a pool is %s a window", handle != NULL ? "now" : "not");
    float *x = pool;
    for (int i = 0; i < COUNT; i++) host[i] = (float)(r->rank * 1000 + (uint32_t)i % 100);
    EXPECT_OK(rank_copy(r, x + r->rank * COUNT, host, COUNT * sizeof *host));
    fsdp_collective c = {.kind = FSDP_OPERATION_ALL_GATHER, .dtype = FSDP_DTYPE_FP32, .count = COUNT};
    c.send = x + r->rank * COUNT, c.recv = x;
    EXPECT_OK(enqueue(r, 0, 0, c));
    EXPECT_OK(rank_copy(r, host, x, 2 * COUNT * sizeof *host));
    for (int i = 0; i < 2 * COUNT; i++) EXPECT(host[i] == (float)(i / COUNT * 1000 + i % COUNT % 100));
    free(host);
    if (handle != NULL) r->comms->detach(r->comm[0], handle);
    r->device->mem_free(r->dev, pool, bytes, FSDP_MEMORY_KIND_COLLECTIVE);
    EXPECT_OK(r->device->check(r->dev));
}

static void a_pool_can_be_a_window(void **state)
{
    team *t = new_team(state, 2);
    run_team(t, gather_in_a_window);
    assert_same_sentence(t, "a window");
}

static int run_own_suite(const comm_suite *suite)
{
#define TEST(name)                                   \
    {                                                \
#name, name, team_setup, team_teardown, NULL \
    }
    struct CMUnitTest tests[] = {
        TEST(a_collective_that_waits_too_long_fails_on_every_rank),
        TEST(what_comes_before_a_collective_is_not_its_time),
        TEST(more_groups_than_are_watched_are_watched_all_the_same),
        TEST(an_abort_reaches_every_rank),
        TEST(an_aborted_device_takes_the_communicators_along),
        TEST(closing_after_the_last_operation_hurts_nobody),
        TEST(memory_of_a_failed_collective_can_be_freed_at_once),
        TEST(an_event_behind_a_collective_is_its_end),
        TEST(an_event_recorded_again_leaves_those_of_its_last_record_alone),
        TEST(a_second_communicator_needs_an_order_of_launches),
        TEST(the_callers_own_communicator_is_used_and_left_alone),
        TEST(a_config_goes_to_nccl),
        TEST(a_pool_can_be_a_window),
    };
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) tests[i].initial_state = (void *)(uintptr_t)suite;
    return cmocka_run_group_tests_name("NCCL", tests, NULL, NULL);
}

/* A GPU for each rank, in one process. Here CUDA may be called at once. */
static bool gpus_are_missing(void)
{
    int n = 0;
    if (cudaGetDeviceCount(&n) != cudaSuccess) n = 0;
    if (gpu_count_wanted((uint32_t)n) < most) most = gpu_count_wanted((uint32_t)n);
    if ((uint32_t)n < most) most = (uint32_t)n;
    if (most < 2) printf("test_gpu_comm threads is skipped: fewer than two GPUs\n");
    else gpu_rank_environment(0);
    return most < 2;
}

int main(int argc, char **argv)
{
    bool own = false;
    for (int i = 1; i < argc; i++) {
        own |= strcmp(argv[i], "own") == 0;
        in_threads |= strcmp(argv[i], "threads") == 0;
    }
    if (in_threads ? gpus_are_missing() : gpu_is_missing_here("test_gpu_comm")) return 77;
    const comm_suite suite = {fsdp_cuda_backend(), group_create, group_destroy, rank_config,
                              !in_threads,         true,         most,          gpu_hold_stream};
    int failed = run_own_suite(&suite);
    if (!own) failed += run_comm_suite(&suite) + run_side_suite(&suite);
    return failed > 0;
}
