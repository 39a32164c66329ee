/* SPDX-License-Identifier: MIT */
/* Collectives: what comes out, to the bit, and in which order and how fast operations may follow each other. */
#include "comm_suite.h"

#include <string.h>

#include "elements.h"

enum { MAX_COUNT = 1009, GUARD = 16, MOST = 8, MAX_BUFFER = (MOST * MAX_COUNT + GUARD) * 4, N_OPEN = 4 };

static const uint32_t worlds[] = {1, 2, 3, 4, MOST};
static const uint64_t counts[] = {0, 1, 2, 3, 5, 64, MAX_COUNT};
static const fsdp_operation kinds[] = {FSDP_OPERATION_ALL_GATHER, FSDP_OPERATION_REDUCE_SCATTER,
                                       FSDP_OPERATION_ALL_REDUCE, FSDP_OPERATION_BROADCAST, FSDP_OPERATION_BARRIER};

/* A collective with its buffers, its inputs (numbers of a seed, by rank) and what must come out. */
typedef struct trial {
    fsdp_collective c;
    bool in_place;
    uint64_t seed;
    uint64_t n_send, n_recv; /* elements */
    char *send, *recv;       /* device */
} trial;

/* Where sums may be in any order, whole numbers so small that every order gives the same bits. */
static float input(const member *r, const trial *t, uint32_t rank, uint64_t i)
{
    uint64_t bits = 0;
    float value = number(t->seed * 64 + rank, i);
    if (r->team->suite->loose) value = (float)((t->seed + 3 * rank + 7 * i) % 9) - 4.0f;
    store(&bits, 0, value, t->c.dtype);
    return load(&bits, 0, t->c.dtype);
}

/* The left fold in rank order, in fp32, that store() rounds once. */
static float folded(const member *r, const trial *t, uint64_t i)
{
    float sum = input(r, t, 0, i);
    for (uint32_t q = 1; q < r->world; q++) sum = sum + input(r, t, q, i);
    return sum;
}

static float expected(const member *r, const trial *t, uint64_t i)
{
    switch (t->c.kind) {
    case FSDP_OPERATION_ALL_GATHER: return input(r, t, (uint32_t)(i / t->c.count), i % t->c.count);
    case FSDP_OPERATION_REDUCE_SCATTER: return folded(r, t, r->rank * t->c.count + i);
    case FSDP_OPERATION_ALL_REDUCE: return folded(r, t, i);
    default: return input(r, t, t->c.root, i);
    }
}

/* Where in recv's memory the input lies, in elements, for an operation in place; and the output in send's. */
static void place(const member *r, trial *t)
{
    size_t each = fsdp_dtype_bytes(t->c.dtype);
    uint64_t own = r->rank * t->c.count * each;
    bool is_scatter = t->c.kind == FSDP_OPERATION_REDUCE_SCATTER, is_gather = t->c.kind == FSDP_OPERATION_ALL_GATHER;
    t->n_send = t->c.count * (is_scatter ? r->world : 1);
    t->n_recv = t->c.count * (is_gather ? r->world : 1);
    if (t->in_place && is_scatter) t->recv = t->send + own;
    else if (t->in_place && is_gather) t->send = t->recv + own;
    else if (t->in_place) t->send = t->recv;
    t->c.send = t->send;
    t->c.recv = t->recv;
}

static fsdp_status trial_prepare(member *r, trial *t, fsdp_operation kind, fsdp_dtype dtype, uint64_t count,
                                 bool in_place, uint64_t seed, char *send, char *recv)
{
    static _Thread_local char host[MAX_BUFFER];
    *t = (trial){
        .c = {.kind = kind, .dtype = dtype, .count = count, .label = "trial"}, .in_place = in_place, .seed = seed};
    if (kind == FSDP_OPERATION_BROADCAST) t->c.root = (uint32_t)seed % r->world, t->in_place = true;
    t->send = send;
    t->recv = recv;
    place(r, t);
    memset(host, 0xa5, sizeof host);
    fsdp_status status = rank_copy(r, send, host, sizeof host);
    if (status == FSDP_OK) status = rank_copy(r, recv, host, sizeof host);
    for (uint64_t i = 0; i < t->n_send; i++) store(host, i, input(r, t, r->rank, i), dtype);
    if (status == FSDP_OK && t->n_send > 0) status = rank_copy(r, t->send, host, t->n_send * fsdp_dtype_bytes(dtype));
    return status;
}

static void trial_check(member *r, const trial *t)
{
    static _Thread_local char host[MAX_BUFFER];
    fsdp_dtype dtype = t->c.dtype;
    size_t each = fsdp_dtype_bytes(dtype);
    EXPECT_OK(rank_copy(r, host, t->recv, (t->n_recv + GUARD) * each));
    for (uint64_t i = 0; i < t->n_recv && t->c.kind != FSDP_OPERATION_BARRIER; i++) {
        uint64_t want = 0;
        store(&want, 0, expected(r, t, i), dtype);
        EXPECT(memcmp(host + i * each, &want, each) == 0);
    }
    for (size_t k = 0; k < GUARD * each && !t->in_place; k++) EXPECT((unsigned char)host[t->n_recv * each + k] == 0xa5);
    if (t->in_place) return;
    EXPECT_OK(rank_copy(r, host, t->send, t->n_send * each));
    for (uint64_t i = 0; i < t->n_send; i++) EXPECT(load(host, i, dtype) == input(r, t, r->rank, i));
}

static void try_all(member *r)
{
    char *send = rank_block(r, MAX_BUFFER), *recv = rank_block(r, MAX_BUFFER);
    EXPECT(send != NULL && recv != NULL);
    uint64_t seed = 0;
    for (EACH(k, kinds)) {
        for (EACH(d, dtypes)) {
            for (EACH(c, counts)) {
                for (int in_place = 0; in_place < 2; in_place++) {
                    trial t;
                    EXPECT_OK(trial_prepare(r, &t, kinds[k], dtypes[d], counts[c], in_place == 1, ++seed, send, recv));
                    EXPECT_OK(r->comms->enqueue(r->comm[0], r->stream[seed % 2], &t.c, 1));
                    EXPECT_OK(rank_drain(r, seed % 2));
                    trial_check(r, &t);
                    if (r->failed) return;
                }
            }
        }
    }
    EXPECT_OK(r->comms->check(r->comm[0]));
}

static void every_collective_gives_what_comm_h_says_to_the_bit(void **state)
{
    for (EACH(i, worlds))
        if (suite_has(state, worlds[i])) run_team(new_team(state, worlds[i]), try_all);
}

/* 1e8 + 1 is 1e8 in fp32, so only ((1e8 + 1) - 1e8) + 1 gives 1; in bf16 sums, only fp32 in between keeps the 1. */
static void fold_visibly(member *r)
{
    static const float term[4] = {1e8f, 1.0f, -1e8f, 1.0f}, small[4] = {256.0f, 1.0f, 1.0f, 0.0f};
    float *x = rank_block(r, 64), result = 0.0f;
    EXPECT(x != NULL);
    fsdp_collective c = {.kind = FSDP_OPERATION_ALL_REDUCE, .dtype = FSDP_DTYPE_FP32, .count = 1, .send = x, .recv = x};
    EXPECT_OK(rank_copy(r, x, &term[r->rank], sizeof *x));
    EXPECT_OK(enqueue(r, 0, 0, c));
    EXPECT_OK(rank_copy(r, &result, x, sizeof result));
    EXPECT(result == 1.0f);

    uint16_t half;
    store(&half, 0, small[r->rank], FSDP_DTYPE_BF16);
    c.dtype = FSDP_DTYPE_BF16;
    EXPECT_OK(rank_copy(r, x, &half, sizeof half));
    EXPECT_OK(enqueue(r, 0, 0, c));
    EXPECT_OK(rank_copy(r, &half, x, sizeof half));
    EXPECT(load(&half, 0, FSDP_DTYPE_BF16) == 258.0f); /* 256 + 1 is 256 in bf16 */
}

static void sums_are_a_left_fold_in_rank_order_in_fp32(void **state) { run_team(new_team(state, 4), fold_visibly); }

static void try_group(member *r)
{
    trial t[4];
    fsdp_collective list[4];
    fsdp_span span[4] = {{0, 0}};
    for (int i = 0; i < 4; i++) {
        char *send = rank_block(r, MAX_BUFFER), *recv = rank_block(r, MAX_BUFFER);
        EXPECT(send != NULL && recv != NULL);
        EXPECT_OK(
            trial_prepare(r, &t[i], kinds[i], dtypes[i % 3], counts[3 + i % 4], i % 2 == 0, (uint64_t)i, send, recv));
        list[i] = t[i].c;
        list[i].span = &span[i];
    }
    EXPECT_OK(r->comms->enqueue(r->comm[0], r->stream[1], list, 4));
    memset(list, 0, sizeof list); /* it was copied */
    EXPECT_OK(rank_drain(r, 1));
    for (int i = 0; i < 4; i++) {
        trial_check(r, &t[i]);
        EXPECT(span[i].start_ns > 0 && span[i].end_ns >= span[i].start_ns);
    }
}

static void a_group_is_one_operation_of_many_collectives(void **state)
{
    bool few = ((const team *)*state)->suite->loose && suite_has(state, 3); /* then of more than two ranks only */
    for (EACH(i, worlds))
        if (suite_has(state, worlds[i]) && (worlds[i] > 2 || !few)) run_team(new_team(state, worlds[i]), try_group);
}

/* ---- Order ---- */

static const fsdp_collective barrier = {.kind = FSDP_OPERATION_BARRIER, .dtype = FSDP_DTYPE_FP32, .label = "order"};

static void wait_for_first_in_line(member *r)
{
    fsdp_span span[2] = {{0, 0}};
    fsdp_collective first = barrier, second = barrier;
    first.span = &span[0];
    second.span = &span[1];
    if (r->team->suite->loose) { /* the first waits for the peers where it is called */
        EXPECT_OK(enqueue(r, 0, 0, barrier));
        EXPECT_OK(rank_drain(r, 0));
    }
    if (r->rank == 0) rank_close_gate(r, 0);
    EXPECT_OK(enqueue(r, 0, 0, first));
    EXPECT_OK(enqueue(r, 0, 1, second));
    EXPECT_OK(r->device->event_record(r->dev, r->event[0], r->stream[1], NULL));
    EXPECT(r->device->event_wait(r->dev, r->event[0], 20000000) == FSDP_ERR_TIMEOUT);
    meet(r);
    rank_open_gate(r);
    EXPECT_OK(r->device->event_wait(r->dev, r->event[0], UINT64_MAX));
    EXPECT_OK(rank_drain(r, 0));
    EXPECT_OK(rank_drain(r, 1));
    EXPECT(span[0].end_ns >= span[0].start_ns && span[1].end_ns >= span[0].end_ns);
    EXPECT(r->team->suite->loose || span[1].start_ns >= span[0].end_ns);
}

static void one_communicator_is_one_wire_for_all_streams(void **state)
{
    bool loose = ((const team *)*state)->suite->loose; /* without a peer there is no wire */
    for (uint32_t world = loose ? 3 : 1; world <= 3; world++)
        run_team(team_of_at_most(state, world), wait_for_first_in_line);
}

static void pass_by_the_other_communicator(member *r)
{
    if (r->rank == 0) rank_close_gate(r, 0);
    EXPECT_OK(enqueue(r, 0, 0, barrier));
    EXPECT_OK(enqueue(r, 1, 1, barrier));
    EXPECT_OK(r->device->event_record(r->dev, r->event[0], r->stream[0], NULL));
    EXPECT_OK(rank_drain(r, 1));
    bool done = true;
    EXPECT_OK(r->device->event_query(r->dev, r->event[0], &done));
    EXPECT(!done);
    meet(r);
    rank_open_gate(r);
    EXPECT_OK(rank_drain(r, 0));
}

static void two_communicators_are_two_wires(void **state)
{
    run_team(new_team(state, 3), pass_by_the_other_communicator);
}

/* A program on both streams and both communicators; each operation reads what the one before it on its stream left. */
static void run_program(member *r)
{
    enum { ROUNDS = 60, COUNT = 37 };
    float *x[2], host[4 * COUNT];
    for (int s = 0; s < 2; s++) {
        x[s] = rank_block(r, sizeof host);
        EXPECT(x[s] != NULL);
        for (int i = 0; i < 4 * COUNT; i++) host[i] = (float)((i * 7 + (int)r->rank * 3 + s) % 5);
        EXPECT_OK(rank_copy(r, x[s], host, sizeof host));
    }
    for (int i = 0; i < ROUNDS; i++) {
        int s = i * 5 % 7 % 2;
        fsdp_collective c = {.dtype = FSDP_DTYPE_FP32, .count = COUNT, .label = "program"};
        c.kind = kinds[i % 3];
        c.send = c.kind == FSDP_OPERATION_ALL_GATHER ? x[s] + r->rank * COUNT : x[s];
        c.recv = c.kind == FSDP_OPERATION_REDUCE_SCATTER ? x[s] + r->rank * COUNT : x[s];
        EXPECT_OK(enqueue(r, i % 3 == 2, s, c));
        /* Zeroes at places that wander keep the sums from growing alike. */
        fsdp_device_op fill = {.kind = FSDP_OPERATION_FILL, .u.fill = {x[s] + (i * 11) % (3 * COUNT), 4 * 9, 0}};
        EXPECT_OK(r->device->launch(r->dev, r->stream[s], &fill, NULL));
        if (i % 6 == 5) {
            EXPECT_OK(r->device->event_record(r->dev, r->event[0], r->stream[s], NULL));
            EXPECT_OK(r->device->stream_wait(r->dev, r->stream[1 - s], r->event[0], NULL));
        }
    }
    uint64_t hash = 14695981039346656037u;
    for (int s = 0; s < 2; s++) {
        EXPECT_OK(rank_drain(r, s));
        EXPECT_OK(rank_copy(r, host, x[s], sizeof host));
        for (int i = 0; i < 4 * COUNT; i++) hash = (hash ^ fsdp__float_bits(host[i])) * 1099511628211u;
    }
    memcpy(r->sentence, &hash, sizeof hash);
}

static void jitter_and_sync_change_no_result(void **state)
{
    uint64_t calm[4] = {0}, shaken[4] = {0};
    team *t = team_of_at_most(state, 4);
    run_team(t, run_program);
    for (uint32_t i = 0; i < t->world; i++) memcpy(&calm[i], t->rank[i].sentence, sizeof calm[i]);
    for (uint64_t seed = suite_times(state, 4) == 4 ? 1 : 3; seed <= 4; seed++) {
        t = team_of_at_most(state, 4);
        t->jitter_ns = seed < 4 ? 300000 : 0;
        t->jitter_seed = seed;
        t->debug = seed < 4 ? 0 : FSDP_DEBUG_SYNC;
        run_team(t, run_program);
        for (uint32_t i = 0; i < t->world; i++) memcpy(&shaken[i], t->rank[i].sentence, sizeof shaken[i]);
        assert_memory_equal(calm, shaken, sizeof calm);
    }
}

static void sync_at_once(member *r)
{
    for (int i = 0; i < 10; i++) {
        fsdp_span span = {0, 0};
        fsdp_collective c = barrier;
        c.span = &span;
        EXPECT_OK(enqueue(r, i % 2, i % 2, c));
        EXPECT(span.end_ns > 0);
    }
}

static void with_debug_sync_a_collective_is_done_when_its_call_returns(void **state)
{
    team *t = team_of_at_most(state, 3);
    t->debug = FSDP_DEBUG_SYNC;
    run_team(t, sync_at_once);
}

/* ---- Time ---- */

static const fsdp_link slow = {300000, 100000000}; /* 0.3 ms, 100 MB/s: 10 ns a byte */

static void pay_for_the_link(member *r)
{
    static const uint64_t bytes_of[5][2] = {{3, 1}, {3, 1}, {6, 4}, {1, 1}, {0, 1}}; /* of count × 4, in a world of 4 */
    char *send = rank_block(r, MAX_BUFFER), *recv = rank_block(r, MAX_BUFFER);
    EXPECT(send != NULL && recv != NULL);
    for (EACH(k, kinds)) {
        fsdp_span span[2] = {{0, 0}};
        for (int i = 0; i < 2; i++) {
            fsdp_collective c = {.kind = kinds[k],
                                 .dtype = FSDP_DTYPE_FP32,
                                 .count = 1000,
                                 .send = send,
                                 .recv = recv,
                                 .span = &span[i]};
            EXPECT_OK(enqueue(r, 0, i, c));
        }
        EXPECT_OK(rank_drain(r, 0));
        EXPECT_OK(rank_drain(r, 1));
        uint64_t least_ns = slow.latency_ns + 10 * (4000 * bytes_of[k][0] / bytes_of[k][1]);
        for (int i = 0; i < 2; i++) EXPECT(span[i].end_ns - span[i].start_ns >= least_ns);
        EXPECT(span[1].start_ns >= span[0].end_ns);
    }
}

static void an_operation_takes_at_least_its_time_on_the_link(void **state)
{
    team *t = new_team(state, 4);
    t->link = slow;
    run_team(t, pay_for_the_link);
}

/* ---- Generations ---- */

static void open_again(member *r)
{
    for (int i = r->team->suite->loose ? N_OPEN - 1 : 0; i < N_OPEN; i++) {
        EXPECT_OK(enqueue(r, 0, 0, barrier));
        EXPECT_OK(enqueue(r, 1, 1, barrier));
        EXPECT_OK(rank_drain(r, 0));
        EXPECT_OK(rank_drain(r, 1));
        close_comm(r, 0);
        close_comm(r, 1);
        EXPECT_OK(open_comm(r, 0, 60ull * SECOND));
        EXPECT_OK(open_comm(r, 1, 60ull * SECOND));
    }
}

static void ranks_can_open_close_and_open_again(void **state)
{
    team *t = team_of_at_most(state, 3);
    void *group = t->suite->group_create(t->world, &t->link);
    for (int i = suite_times(state, N_OPEN); i-- > 0;) {
        t = team_of_at_most(state, 3);
        t->group = group;
        run_team(t, open_again);
    }
    t->suite->group_destroy(group);
}

static void sum_ones(member *r)
{
    float *x = rank_block(r, 64), one = 1.0f;
    EXPECT(x != NULL);
    EXPECT_OK(rank_copy(r, x, &one, sizeof one));
    fsdp_collective c = {.kind = FSDP_OPERATION_ALL_REDUCE, .dtype = FSDP_DTYPE_FP32, .count = 1, .send = x, .recv = x};
    EXPECT_OK(enqueue(r, 0, 0, c));
    EXPECT_OK(rank_copy(r, &one, x, sizeof one));
    EXPECT(one == (float)r->world);
}

static void the_largest_world_works(void **state) { run_team(team_of_at_most(state, MAX_RANKS), sum_ones); }

#define TEST(name)                                   \
    {                                                \
#name, name, team_setup, team_teardown, NULL \
    }

int run_comm_suite(const comm_suite *suite)
{
    struct CMUnitTest tests[] = {
        TEST(every_collective_gives_what_comm_h_says_to_the_bit),
        TEST(a_group_is_one_operation_of_many_collectives),
        TEST(one_communicator_is_one_wire_for_all_streams),
        TEST(jitter_and_sync_change_no_result),
        TEST(with_debug_sync_a_collective_is_done_when_its_call_returns),
        TEST(ranks_can_open_close_and_open_again),
        TEST(the_largest_world_works),
    };
    struct CMUnitTest strict[] = {
        TEST(sums_are_a_left_fold_in_rank_order_in_fp32),
        TEST(two_communicators_are_two_wires),
        TEST(an_operation_takes_at_least_its_time_on_the_link),
    };
    for (EACH(i, tests)) tests[i].initial_state = (void *)(uintptr_t)suite;
    for (EACH(i, strict)) strict[i].initial_state = (void *)(uintptr_t)suite;
    int failed = cmocka_run_group_tests_name("collectives", tests, NULL, NULL);
    if (!suite->loose) failed += cmocka_run_group_tests_name("collectives, to the letter", strict, NULL, NULL);
    return failed;
}
