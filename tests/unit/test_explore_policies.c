/* SPDX-License-Identifier: MIT */
/* The policies of the exploration device do what they say. */
#include "explore_rig.h"

#include <string.h>
#include <unistd.h>

#include "fsdp/comm.h"

enum { N_OPS = 4, N_SEEDS = 100 };

typedef struct comm {
    void *native;
    fsdp_span span[N_OPS];
} comm;

static void comm_open(rig *r, comm *c)
{
    fsdp_comm_args args = {.size = sizeof args, .backend_config = &r->config, .dev = r->dev, .timeout_ns = 1};
    *c = (comm){NULL, {{0, 0}}};
    DO(explore_backend()->comm->open(&args, &c->native));
}

/* N_OPS fills on each stream, and as many barriers on B. When each of them was. */
static void run_spans(rig *r, comm *c, fsdp_span span[N_STREAMS][N_OPS])
{
    memset(span, 0, sizeof(fsdp_span[N_STREAMS][N_OPS]));
    comm_open(r, c);
    for (int i = 0; i < N_OPS; i++) {
        for (int s = 0; s < N_STREAMS; s++) {
            fsdp_device_op op = {.kind = FSDP_OPERATION_FILL, .u.fill = {r->block + 64 * s, 64, 1}};
            give(r, s, op, &span[s][i]);
        }
        fsdp_collective barrier = {.kind = FSDP_OPERATION_BARRIER, .dtype = FSDP_DTYPE_FP32, .span = &c->span[i]};
        DO(explore_backend()->comm->enqueue(c->native, r->stream[B], &barrier, 1));
    }
    drain_all(r);
    explore_backend()->comm->close(c->native);
}

static uint64_t last_end(const fsdp_span *span)
{
    uint64_t last = 0;
    for (int i = 0; i < N_OPS; i++) last = span[i].end_ns > last ? span[i].end_ns : last;
    return last;
}

static void a_starved_stream_steps_only_when_nothing_else_can(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < N_SEEDS; seed++) {
        rig r;
        comm c;
        fsdp_span span[N_STREAMS][N_OPS];
        rig_open(&r, policy_config(EXPLORE_STARVE, seed));
        run_spans(&r, &c, span);
        assert_true(span[A][0].start_ns > last_end(span[B]));
        assert_true(span[A][0].start_ns > last_end(span[C]));
        rig_close(&r);
    }
}

static void a_slow_collective_ends_only_when_nothing_else_can_step(void **state)
{
    (void)state;
    bool begins_early = false;
    for (uint64_t seed = 0; seed < N_SEEDS; seed++) {
        rig r;
        comm c;
        fsdp_span span[N_STREAMS][N_OPS];
        rig_open(&r, policy_config(EXPLORE_SLOW_COMM, seed));
        run_spans(&r, &c, span);
        assert_true(c.span[0].end_ns > last_end(span[A]));
        assert_true(c.span[0].end_ns > last_end(span[C]));
        begins_early |= c.span[0].start_ns < last_end(span[A]);
        rig_close(&r);
    }
    assert_true(begins_early);
}

static void slow_compute_ends_only_when_nothing_else_can_step(void **state)
{
    (void)state;
    bool begins_early = false;
    for (uint64_t seed = 0; seed < N_SEEDS; seed++) {
        rig r;
        comm c;
        fsdp_span span[N_STREAMS][N_OPS];
        rig_open(&r, policy_config(EXPLORE_SLOW_COMPUTE, seed));
        run_spans(&r, &c, span);
        assert_true(span[A][0].end_ns > last_end(span[C]));
        assert_true(span[B][0].end_ns > last_end(span[C]));
        begins_early |= span[A][0].start_ns < last_end(span[C]);
        rig_close(&r);
    }
    assert_true(begins_early);
}

/* Random steps are taken while the host goes on, and not always. */
static void the_device_may_be_ahead_of_the_host_and_behind_it(void **state)
{
    (void)state;
    int n_ahead = 0, n_behind = 0;
    for (uint64_t seed = 0; seed < N_SEEDS; seed++) {
        rig r;
        rig_open(&r, policy_config(seed % 2 ? EXPLORE_RANDOM : EXPLORE_PCT, seed));
        for (int i = 0; i < 8; i++) fill(&r, i % N_STREAMS, r.block, 64, (uint8_t)i);
        uint64_t steps = explore_steps(r.x);
        n_ahead += steps > 0;
        n_behind += steps < 16;
        drain_all(&r);
        assert_int_equal(explore_steps(r.x), 16);
        rig_close(&r);
    }
    assert_true(n_ahead > N_SEEDS / 4 && n_behind > N_SEEDS / 4);
}

/* The bug shows if B's fill is between the last two of A's operations. */
static bool bug_shows(uint32_t depth, uint64_t steps, uint64_t seed)
{
    enum { BEFORE = 8 };
    rig r;
    char seen = 0;
    rig_open(&r, (explore_config){.policy = EXPLORE_PCT, .seed = seed, .depth = depth, .steps = steps});
    for (int i = 0; i < BEFORE; i++) fill(&r, A, r.block + 64, 64, 3);
    fill(&r, A, r.block, 1, 1);
    copy(&r, A, &seen, r.block, 1);
    fill(&r, B, r.block, 1, 2);
    drain_all(&r);
    rig_close(&r);
    return seen == 2;
}

/* PCT's promise: of n threads (A, B, the host) and k steps, a bug of depth d shows in one of n × k^(d − 1) runs. */
static void pct_finds_a_bug_of_depth_two_as_often_as_it_promises(void **state)
{
    (void)state;
    enum { STEPS = 22, RUNS = 3000 };
    int n[4] = {0};
    for (uint32_t depth = 1; depth <= 3; depth++)
        for (uint64_t seed = 0; seed < RUNS; seed++) n[depth] += bug_shows(depth, STEPS, seed);
    assert_int_equal(n[1], 0); /* priorities alone do not put B in between */
    assert_true(n[2] >= RUNS / (3 * STEPS));
    assert_true(n[3] >= RUNS / (3 * STEPS * STEPS));
}

/* Whoever only asks must be told some day. */
static void a_host_that_polls_is_not_kept_for_ever(void **state)
{
    (void)state;
    for (explore_policy p = EXPLORE_IN_ORDER; p <= EXPLORE_SLOW_COMPUTE; p++) {
        for (uint64_t seed = 0; seed < 20; seed++) {
            rig r;
            rig_open(&r, policy_config(p, seed));
            for (int s = 0; s < N_STREAMS; s++) fill(&r, s, r.block + 64 * s, 64, 1);
            mark(&r, 0, A);
            bool done = false;
            int n = 0;
            for (; !done && n < 10000; n++) DO(r.ops->event_query(r.dev, r.event[0], &done));
            assert_true(done);
            rig_close(&r);
        }
    }
}

static void time_is_steps_and_delays(void **state)
{
    (void)state;
    rig r;
    fsdp_span delay = {0, 0}, filled = {0, 0};
    rig_open(&r, policy_config(EXPLORE_IN_ORDER, 0));
    uint64_t before = r.ops->now_ns(r.dev);
    give(&r, A, (fsdp_device_op){.kind = FSDP_OPERATION_FILL, .u.fill = {r.block, 1, 1}}, &filled);
    assert_int_equal(filled.start_ns, before + 1);
    assert_int_equal(filled.end_ns, before + 2);
    give(&r, A, (fsdp_device_op){.kind = FSDP_OPERATION_DELAY, .u.delay = {3600000000000ull}}, &delay);
    assert_int_equal(delay.end_ns - delay.start_ns, 3600000000000ull);
    rig_close(&r);
}

#define TEST(name) cmocka_unit_test(name)

int main(void)
{
    alarm(100);
    const struct CMUnitTest tests[] = {
        TEST(a_starved_stream_steps_only_when_nothing_else_can),
        TEST(a_slow_collective_ends_only_when_nothing_else_can_step),
        TEST(slow_compute_ends_only_when_nothing_else_can_step),
        TEST(the_device_may_be_ahead_of_the_host_and_behind_it),
        TEST(pct_finds_a_bug_of_depth_two_as_often_as_it_promises),
        TEST(a_host_that_polls_is_not_kept_for_ever),
        TEST(time_is_steps_and_delays),
    };
    return cmocka_run_group_tests_name("policies", tests, NULL, NULL);
}
