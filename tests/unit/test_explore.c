/* SPDX-License-Identifier: MIT */
/* The exploration device: runs are functions of their schedule, every order is every order, races show. */
#include "explore_rig.h"

#include <string.h>
#include <unistd.h>

enum { LIMIT = 100000 };

/* Edges, host waits, queries: a bit of everything. The last value of each stream's place comes back. */
static uint64_t run_mixed(explore_config config, uint64_t *out_steps, char *schedule, size_t bytes)
{
    rig r;
    rig_open(&r, config);
    for (int i = 0; i < 40; i++) {
        int s = i * 7 % N_STREAMS, t = (s + 1 + i % 2) % N_STREAMS;
        fill(&r, s, r.block + 64 * s, 64, (uint8_t)i);
        mark(&r, i % N_EVENTS, s);
        if (i % 3 == 0) follow(&r, t, i % N_EVENTS);
        copy(&r, t, r.block + 1024 + 64 * t, r.block + 64 * s, 64);
        bool done;
        if (i % 5 == 0) DO(r.ops->event_query(r.dev, r.event[i % N_EVENTS], &done));
        if (i % 11 == 10) DO(r.ops->event_wait(r.dev, r.event[i % N_EVENTS], UINT64_MAX));
    }
    drain_all(&r);
    uint64_t hash = explore_hash(r.x);
    if (out_steps != NULL) *out_steps = explore_steps(r.x);
    if (schedule != NULL) {
        assert_true(strlen(explore_schedule(r.x)) < bytes);
        strcpy(schedule, explore_schedule(r.x));
    }
    rig_close(&r);
    return hash;
}

static void the_same_seed_gives_the_same_run(void **state)
{
    (void)state;
    for (explore_policy p = EXPLORE_IN_ORDER; p <= EXPLORE_SLOW_COMPUTE; p++) {
        uint64_t steps[2];
        uint64_t first = run_mixed(policy_config(p, 5), &steps[0], NULL, 0);
        assert_int_equal(run_mixed(policy_config(p, 5), &steps[1], NULL, 0), first);
        assert_int_equal(steps[0], steps[1]);
        assert_true(steps[0] >= 40 * 5);
    }
}

static void seeds_and_policies_give_runs_of_their_own(void **state)
{
    (void)state;
    enum { N_SEEDS = 20 };
    uint64_t hash[(EXPLORE_SLOW_COMPUTE + 1) * N_SEEDS];
    size_t n = 0;
    for (explore_policy p = EXPLORE_RANDOM; p <= EXPLORE_SLOW_COMPUTE; p++)
        for (uint64_t seed = 0; seed < N_SEEDS; seed++) hash[n++] = run_mixed(policy_config(p, seed), NULL, NULL, 0);
    size_t n_equal = 0;
    for (size_t i = 0; i < n; i++)
        for (size_t k = 0; k < i; k++) n_equal += hash[i] == hash[k];
    assert_true(n_equal <= n / 10); /* PCT may give two seeds the same priorities */
}

static void a_schedule_replays_its_run(void **state)
{
    (void)state;
    static char schedule[1 << 16], again[1 << 16];
    for (explore_policy p = EXPLORE_IN_ORDER; p <= EXPLORE_SLOW_COMPUTE; p++) {
        for (uint64_t seed = 0; seed < 10; seed++) {
            uint64_t hash = run_mixed(policy_config(p, seed), NULL, schedule, sizeof schedule);
            explore_config replay = {.world = 1, .policy = EXPLORE_REPLAY, .schedule = schedule};
            assert_int_equal(run_mixed(replay, NULL, again, sizeof again), hash);
            assert_string_equal(again, schedule);
            assert_null(strchr(schedule, ' '));
        }
    }
}

static void a_schedule_that_makes_no_sense_is_refused(void **state)
{
    (void)state;
    static const char *const wrong[] = {"", "x012", "r01 2", "r0*", "r0*0.", "r0*3", "r_.", "r_7", "012", NULL};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        explore_config config = {.world = 1, .policy = EXPLORE_REPLAY, .schedule = wrong[i]};
        assert_null(explore_open(&config));
    }
    explore_config config = {.world = 0};
    assert_null(explore_open(&config));
    config.world = 65;
    assert_null(explore_open(&config));
}

static void a_schedule_of_another_program_is_a_complaint(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, (explore_config){.policy = EXPLORE_REPLAY, .schedule = "r0_40.0"});
    for (int s = 0; s < N_STREAMS; s++) fill(&r, s, r.block, 64, 1);
    drain_all(&r);
    rig_close_on(&r);
    assert_non_null(strstr(explore_complaint(r.x), "another program"));
    explore_close(r.x);
}

/* ---- Every order ---- */

typedef struct outcomes {
    void (*program)(rig *r);
    uint64_t of[256]; /* runs by what byte 0 of the block was in the end */
    uint64_t stop_after, n;
} outcomes;

static bool run_program(explore *x, void *arg)
{
    outcomes *o = arg;
    rig r;
    rig_open_on(&r, x);
    memset(r.block, 0, BLOCK);
    o->program(&r);
    drain_all(&r);
    assert_null(explore_complaint(x));
    o->of[(unsigned char)r.block[0]]++;
    rig_close_on(&r);
    return ++o->n != o->stop_after;
}

static uint64_t every(outcomes *o, uint64_t max_runs, bool *out_all)
{
    const explore_config config = {.world = 1, .all_orders = true};
    return explore_every(&config, run_program, o, max_runs, out_all);
}

static void two_alone(rig *r)
{
    fill(r, A, r->block, 64, 1);
    fill(r, B, r->block + 64, 64, 2);
}

static void three_alone(rig *r)
{
    two_alone(r);
    fill(r, C, r->block + 128, 64, 3);
}

static void two_in_a_row(rig *r)
{
    fill(r, A, r->block, 64, 1);
    mark(r, 0, A);
    follow(r, B, 0);
    fill(r, B, r->block, 64, 2);
}

static void two_against_one(rig *r)
{
    fill(r, A, r->block, 64, 1);
    fill(r, A, r->block + 64, 64, 1);
    fill(r, B, r->block + 128, 64, 2);
}

/* The record is taken as soon as it can be: it is no step that others can be before or behind. */
static void a_record_that_nobody_waits_for(rig *r)
{
    fill(r, A, r->block, 64, 1);
    mark(r, 0, A);
    fill(r, B, r->block + 64, 64, 2);
}

static void a_drain_between(rig *r)
{
    fill(r, A, r->block, 64, 1);
    drain(r, A);
    fill(r, B, r->block, 64, 2);
}

/* Two steps an operation: as many orders as ways to shuffle the streams' steps. */
static void every_order_is_run_once(void **state)
{
    (void)state;
    static const struct {
        void (*program)(rig *r);
        uint64_t n;
    } cases[] = {{two_alone, 6},        {a_record_that_nobody_waits_for, 6},
                 {three_alone, 90},     {two_in_a_row, 1},
                 {two_against_one, 15}, {a_drain_between, 1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        outcomes o = {.program = cases[i].program};
        bool all = false;
        assert_int_equal(every(&o, LIMIT, &all), cases[i].n);
        assert_true(all);
        o = (outcomes){.program = cases[i].program};
        assert_int_equal(every(&o, cases[i].n, &all), cases[i].n);
        assert_true(all);
    }
}

static void a_search_stops_where_it_is_told_to(void **state)
{
    (void)state;
    bool all = true;
    outcomes o = {.program = three_alone};
    assert_int_equal(every(&o, 89, &all), 89);
    assert_false(all);
    o = (outcomes){.program = three_alone, .stop_after = 7};
    assert_int_equal(every(&o, LIMIT, &all), 7);
    assert_false(all);
}

/* ---- Races show ---- */

/* Two writers and a reader whose copy stays in byte 0. */
static void write_and_read(rig *r)
{
    fill(r, A, r->block + 64, 1, 1);
    copy(r, B, r->block, r->block + 64, 1);
}

static void write_and_read_in_order(rig *r)
{
    fill(r, A, r->block + 64, 1, 1);
    mark(r, 0, A);
    follow(r, B, 0);
    copy(r, B, r->block, r->block + 64, 1);
}

static void a_read_that_nothing_orders_sees_both(void **state)
{
    (void)state;
    outcomes o = {.program = write_and_read};
    assert_int_equal(every(&o, LIMIT, NULL), 6);
    /* The copy reads when it begins, the fill writes when it ends: new only if the fill has ended by then. */
    assert_int_equal(o.of[1], 1);
    assert_int_equal(o.of[0], 5);
    for (explore_policy p = EXPLORE_RANDOM; p <= EXPLORE_PCT; p++) {
        o = (outcomes){.program = write_and_read};
        outcomes ordered = {.program = write_and_read_in_order};
        for (uint64_t seed = 0; seed < 200; seed++) {
            explore_config config = policy_config(p, seed);
            explore *x = explore_open(&config), *y = explore_open(&config);
            run_program(x, &o);
            run_program(y, &ordered);
            explore_close(x);
            explore_close(y);
        }
        assert_true(o.of[0] > 10 && o.of[1] > 10);
        assert_int_equal(ordered.of[1], 200);
    }
}

/* 1 + 1 + 1 in floats; what is left in byte 0 is the sum. */
static void add_twice(rig *r)
{
    float *sum = (float *)(void *)(r->block + 64), *one = (float *)(void *)(r->block + 128);
    *sum = *one = 1.0f;
    add(r, A, sum, one);
    add(r, B, sum, one);
    drain_all(r);
    r->block[0] = (char)*sum;
}

/* Whole operations can only give 3: 2 is one that read before the other wrote, and wrote after it. */
static void operations_that_overlap_lose_an_update(void **state)
{
    (void)state;
    outcomes o = {.program = add_twice};
    assert_int_equal(every(&o, LIMIT, NULL), 6);
    assert_int_equal(o.of[3], 2);
    assert_int_equal(o.of[2], 4);
}

/* A steps the elements 0 and 3; B owns what lies between, whenever it writes. */
static void optimize_around(rig *r)
{
    enum { COUNT = 4 };
    float *w = (float *)(void *)(r->block + 64);
    const fsdp_kernel_segment segments[] = {{0, 1, 1.0f, 0.0f}, {3, 1, 1.0f, 0.0f}};
    const fsdp_device_step step = {.factor = 1.0f, .lr = 1.0f, .bias1 = 1.0f, .bias2 = 1.0f};
    memcpy(r->block + 512, segments, sizeof segments);
    memcpy(r->block + 1024, &step, sizeof step);
    for (int i = 0; i < COUNT; i++) w[16 + i] = 1.0f; /* gradients; the moments are zero */
    fsdp_device_op op = {.kind = FSDP_OPERATION_ADAMW};
    op.u.adamw.master = w;
    op.u.adamw.gradient = w + 16;
    op.u.adamw.m = w + 32;
    op.u.adamw.v = w + 48;
    op.u.adamw.count = COUNT;
    op.u.adamw.segments = (const fsdp_kernel_segment *)(const void *)(r->block + 512);
    op.u.adamw.n_segments = 2;
    op.u.adamw.master_dtype = op.u.adamw.gradient_dtype = FSDP_DTYPE_FP32;
    op.u.adamw.step = (const fsdp_device_step *)(const void *)(r->block + 1024);
    give(r, A, op, NULL);
    fill(r, B, w + 1, 2 * sizeof *w, 9);
    drain_all(r);
    assert_true(w[0] != 0.0f && w[3] == w[0]);
    r->block[0] = *(char *)(w + 1);
}

static void the_optimizer_leaves_alone_what_is_between_its_segments(void **state)
{
    (void)state;
    outcomes o = {.program = optimize_around};
    assert_int_equal(every(&o, LIMIT, NULL), 6);
    assert_int_equal(o.of[9], 6);
}

static void in_order_operations_are_whole_and_in_the_host_s_order(void **state)
{
    (void)state;
    outcomes o = {.program = add_twice};
    explore_config config = policy_config(EXPLORE_IN_ORDER, 0);
    explore *x = explore_open(&config);
    run_program(x, &o);
    assert_int_equal(o.of[3], 1);
    explore_close(x);
    rig r;
    rig_open(&r, config);
    for (int i = 0; i < 20; i++) fill(&r, i % N_STREAMS, r.block, 64, (uint8_t)i);
    assert_int_equal(r.block[0], 19); /* at once: nothing had to wait */
    rig_close(&r);
}

#define TEST(name) cmocka_unit_test(name)

int main(void)
{
    alarm(100);
    const struct CMUnitTest tests[] = {
        TEST(the_same_seed_gives_the_same_run),
        TEST(seeds_and_policies_give_runs_of_their_own),
        TEST(a_schedule_replays_its_run),
        TEST(a_schedule_that_makes_no_sense_is_refused),
        TEST(a_schedule_of_another_program_is_a_complaint),
        TEST(every_order_is_run_once),
        TEST(a_search_stops_where_it_is_told_to),
        TEST(a_read_that_nothing_orders_sees_both),
        TEST(operations_that_overlap_lose_an_update),
        TEST(the_optimizer_leaves_alone_what_is_between_its_segments),
        TEST(in_order_operations_are_whole_and_in_the_host_s_order),
    };
    return cmocka_run_group_tests_name("explore", tests, NULL, NULL);
}
