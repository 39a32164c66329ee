/* SPDX-License-Identifier: MIT */
/* Every order, but those that differ in nothing that matters: small random programs come to the same ends as by all orders. */
#include "explore_rig.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "hash.h"

enum { N_CELLS = 3, N_OPS = 5, N_LINES = 14, MAX_ENDS = 4096, N_PROGRAMS = 100 };

typedef struct program {
    uint64_t seed;
    bool frees;
    uint64_t end[MAX_ENDS]; /* hashes of what was in memory, and of what the host saw on the way; each once */
    size_t n_ends;
    bool replayed;
} program;

static uint64_t draw(uint64_t *seed, uint64_t below) { return fsdp__mix((*seed)++) % below; }

static void operate(rig *r, uint64_t *seed, float *cell, float *host)
{
    int s = (int)draw(seed, N_STREAMS);
    float *to = cell + draw(seed, N_CELLS), *from = cell + draw(seed, N_CELLS);
    switch (draw(seed, 4)) {
    case 0: fill(r, s, to, sizeof *to, (uint8_t)(1 + draw(seed, 9))); break;
    case 1: add(r, s, to, from); break;
    case 2: copy(r, s, host, from, sizeof *from); break;
    default: copy(r, s, to, from, sizeof *to); break;
    }
}

/* N_OPS operations, and between them edges, and hosts that wait for a stream or an event, and look or free. */
static uint64_t play(rig *r, const program *p)
{
    uint64_t seed = fsdp__mix(p->seed), hash = FSDP__HASH_SEED;
    float *cell = (float *)(void *)r->block, host[2] = {0.0f, 0.0f};
    for (int i = 0; i < N_CELLS; i++) cell[i] = (float)(i + 1);
    int n_ops = 0;
    for (int line = 0; line < N_LINES; line++) {
        int s = (int)draw(&seed, N_STREAMS), e = (int)draw(&seed, N_EVENTS);
        switch (draw(&seed, 8)) {
        case 0: mark(r, e, s); break;
        case 1: mark(r, e, s), follow(r, (s + 1) % N_STREAMS, e); break;
        case 2:
            drain(r, s);
            hash = fsdp__hash_bytes(hash, cell, N_CELLS * sizeof *cell);
            break;
        case 3:
            mark(r, e, s);
            DO(r->ops->event_wait(r->dev, r->event[e], UINT64_MAX));
            hash = fsdp__hash_bytes(hash, host, sizeof host);
            break;
        case 4:
            if (p->frees) explore_freed(r->x, 0, cell + draw(&seed, N_CELLS), sizeof *cell);
            break;
        default:
            if (n_ops++ < N_OPS) operate(r, &seed, cell, &host[n_ops % 2]);
        }
    }
    drain_all(r);
    hash = fsdp__hash_bytes(hash, host, sizeof host);
    return fsdp__hash_bytes(hash, cell, N_CELLS * sizeof *cell);
}

static bool play_once(explore *x, void *arg)
{
    program *p = arg;
    rig r;
    rig_open_on(&r, x);
    uint64_t end = play(&r, p), steps = explore_hash(x);
    rig_close_on(&r);
    assert_null(explore_complaint(x));
    size_t i = 0;
    while (i < p->n_ends && p->end[i] != end) i++;
    if (i < p->n_ends) return true;
    assert_true(p->n_ends < MAX_ENDS);
    p->end[p->n_ends++] = end;
    /* What was found can be shown again. */
    explore_config replay = {.world = 1, .policy = EXPLORE_REPLAY, .schedule = explore_schedule(x)};
    rig again;
    rig_open(&again, replay);
    assert_true(play(&again, p) == end);
    assert_true(explore_hash(again.x) == steps);
    rig_close(&again);
    return true;
}

static int compare_ends(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static void equal_orders_left_out_leave_every_end(void **state)
{
    (void)state;
    uint64_t n_all = 0, n_few = 0, n_ends = 0;
    for (uint64_t seed = 0; seed < N_PROGRAMS; seed++) {
        static program all, few;
        all = (program){.seed = seed, .frees = seed % 2 == 0};
        few = all;
        bool all_done = false, few_done = false;
        const explore_config config = {.world = 1}, config_all = {.world = 1, .all_orders = true};
        n_all += explore_every(&config_all, play_once, &all, 100000, &all_done);
        n_few += explore_every(&config, play_once, &few, 100000, &few_done);
        assert_true(all_done && few_done);
        qsort(all.end, all.n_ends, sizeof *all.end, compare_ends);
        qsort(few.end, few.n_ends, sizeof *few.end, compare_ends);
        if (few.n_ends != all.n_ends)
            print_error("program %d: %d of %d ends\n", (int)seed, (int)few.n_ends, (int)all.n_ends);
        assert_int_equal(few.n_ends, all.n_ends);
        assert_memory_equal(few.end, all.end, all.n_ends * sizeof *all.end);
        n_ends += all.n_ends;
    }
    print_message("%llu orders, %llu run, %llu ends\n", (unsigned long long)n_all, (unsigned long long)n_few,
                  (unsigned long long)n_ends);
    assert_true(n_few < n_all / 2 && n_ends > 2 * N_PROGRAMS);
}

/* Each stream at its own place: one order is enough, however many there are. */
static bool work_apart(explore *x, void *arg)
{
    rig r;
    rig_open_on(&r, x);
    for (int i = 0; i < 4; i++)
        for (int s = 0; s < N_STREAMS; s++) fill(&r, s, r.block + 64 * s, 64, (uint8_t)i);
    drain_all(&r);
    for (int s = 0; s < N_STREAMS; s++) assert_int_equal(r.block[64 * s], 3);
    rig_close_on(&r);
    ++*(uint64_t *)arg;
    return true;
}

static void streams_that_share_nothing_take_few_runs(void **state)
{
    (void)state;
    uint64_t n = 0;
    bool all = false;
    const explore_config config = {.world = 1}; /* 24! / 8!³ orders */
    assert_true(explore_every(&config, work_apart, &n, 100000, &all) < 1000);
    assert_true(all);
    print_message("%llu runs\n", (unsigned long long)n);
}

int main(void)
{
    alarm(100);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equal_orders_left_out_leave_every_end),
        cmocka_unit_test(streams_that_share_nothing_take_few_runs),
    };
    return cmocka_run_group_tests_name("every order", tests, NULL, NULL);
}
