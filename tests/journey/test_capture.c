/* SPDX-License-Identifier: MIT */
/* Captured steps on the CPU, by a backend that captures as CUDA does (graphs.h): replays end in the bits of eager steps, in
 * whatever order the device runs what nothing orders; what CUDA forbids is never done; what cannot be is refused by name. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "captured.h"
#include "explore.h"
#include "graphs.h"

enum { WORLD = 2 };

/* ---- Graphs, as the small training wants them ---- */

static int begin(void *arg, fsdp_stream *s)
{
    graphs_begin(arg, s);
    return graphs_complaint(arg) != NULL;
}

static int end(void *arg, fsdp_stream *s, void **out_graph)
{
    *out_graph = graphs_end(arg, s);
    return *out_graph == NULL;
}

static int launch(void *arg, void *graph, fsdp_stream *s)
{
    (void)arg;
    return graphs_launch(graph, s) != FSDP_OK;
}

static void destroy(void *arg, void *graph)
{
    (void)arg;
    graphs_destroy(graph);
}

/* ---- Ranks ---- */

typedef struct rank_run {
    const captured_config *config;
    bool eager;
    explore *x;        /* NULL: the host backend */
    fsdp_local *local; /* of the host backend; NULL: a world of one */
    uint32_t rank;
    captured_result result;
    fsdp_status status;
} rank_run;

static void run_rank(rank_run *r)
{
    const explore_rank explored = {sizeof explored, r->x, r->rank};
    fsdp_host_config host = FSDP_HOST_CONFIG_INIT;
    host.local = r->local;
    host.rank = r->rank;
    host.jitter_ns = r->local != NULL ? 20000 : 0;
    graphs g;
    if (r->x != NULL) graphs_init(&g, explore_backend(), &explored);
    else graphs_init(&g, fsdp_host_backend(), &host);
    const captured_graphs made = {&g, begin, end, launch, destroy};
    fsdp_config config = FSDP_CONFIG_INIT;
    config.backend = graphs_backend();
    config.backend_config = &g;
    fsdp_context *ctx = NULL;
    r->status = fsdp_context_create(&config, &ctx);
    if (r->status == FSDP_OK) r->status = captured_run(r->config, ctx, r->eager ? NULL : &made, &r->result);
    fsdp_status destroyed = fsdp_context_destroy(ctx);
    if (r->status == FSDP_OK) r->status = destroyed;
    if (r->status != FSDP_OK && r->result.why[0] == 0)
        snprintf(r->result.why, sizeof r->result.why, "%s", fsdp_last_error());
    if (graphs_complaint(&g) != NULL) {
        r->status = FSDP_ERR_DEVICE;
        snprintf(r->result.why, sizeof r->result.why, "%s", graphs_complaint(&g));
    }
}

static rank_run runs[WORLD], plain[WORLD];

static void *run_thread(void *arg)
{
    run_rank(arg);
    return NULL;
}

static void run_explored(uint32_t rank, void *arg) { run_rank((rank_run *)arg + rank); }

static void run_all(rank_run *each, const captured_config *config, uint32_t world, bool eager, explore *x)
{
    fsdp_local *local = NULL;
    if (world > 1 && x == NULL) assert_int_equal(fsdp_local_create(world, NULL, &local), FSDP_OK);
    for (uint32_t r = 0; r < world; r++)
        each[r] = (rank_run){.config = config, .eager = eager, .x = x, .local = local, .rank = r};
    if (x != NULL) {
        explore_run_ranks(x, run_explored, each);
    } else {
        pthread_t thread[WORLD];
        for (uint32_t r = 0; r < world; r++)
            assert_int_equal(pthread_create(&thread[r], NULL, run_thread, &each[r]), 0);
        for (uint32_t r = 0; r < world; r++) pthread_join(thread[r], NULL);
    }
    fsdp_local_destroy(local);
}

static void assert_same(const captured_config *c, uint32_t world, const char *where)
{
    for (uint32_t r = 0; r < world; r++) {
        if (plain[r].status != FSDP_OK) fail_msg("%s: eager, rank %u: %s", c->script, r, plain[r].result.why);
        if (runs[r].status != FSDP_OK) fail_msg("%s on %s, rank %u: %s", c->script, where, r, runs[r].result.why);
        const char *what = captured_difference(&runs[r].result, &plain[r].result);
        if (what != NULL)
            fail_msg("%s on %s, rank %u of %u, depth %u: %s differ", c->script, where, r, world, c->depth, what);
    }
}

/* ---- Parity ---- */

#define TWENTY "RRRRRRRRRRRRRRRRRRRR"

static const captured_config configs[] = {
    {.script = "EC" TWENTY "ERRVRE", .depth = 1},
    {.script = "EECRRSrERCRR", .depth = 1, .second = true},
    {.script = "ECRR2RR2RERR", .depth = 1, .scratch = true},
    {.script = "ECRRVRSrER", .depth = 2, .held = true, .second = true, .scratch = true},
    {.script = "ECRRRERR", .depth = 1, .n_inside = 3, .second = true},
    {.script = "ECRRERR", .depth = 0, .held = true},
    {.script = "ECRNRRNERVRNR", .depth = 1, .scratch = true, .second = true},
    {.script = "ECRERSrER", .depth = 4, .scratch = true, .n_inside = 2},
};
#define EACH_CONFIG                       \
    size_t i = 0;                         \
    i < sizeof configs / sizeof *configs; \
    i++

static void replays_end_in_the_bits_of_eager_steps(void **unused)
{
    (void)unused;
    for (uint32_t world = 1; world <= WORLD; world++)
        for (EACH_CONFIG) {
            run_all(plain, &configs[i], world, true, NULL);
            run_all(runs, &configs[i], world, false, NULL);
            assert_same(&configs[i], world, "the host backend");
        }
}

static explore_config order(uint64_t seed, uint32_t world)
{
    static const explore_policy policies[] = {EXPLORE_RANDOM, EXPLORE_PCT,       EXPLORE_STARVE,
                                              EXPLORE_RANDOM, EXPLORE_SLOW_COMM, EXPLORE_SLOW_COMPUTE};
    return (explore_config){.world = world,
                            .policy = policies[seed % 6],
                            .seed = seed,
                            .depth = 3,
                            .steps = 3000,
                            .target = (uint32_t)(seed / 6 % (world * 9))};
}

/* Lanes, the caller's streams and the graph's branches step in any order that the edges leave. */
static void no_order_of_the_device_shows_in_a_replay(void **unused)
{
    (void)unused;
    for (uint32_t world = 1; world <= WORLD; world++)
        for (EACH_CONFIG) {
            run_all(plain, &configs[i], world, true, NULL);
            for (uint64_t seed = 0; seed < 24; seed++) {
                const explore_config config = order(seed * 31 + i, world);
                explore *x = explore_open(&config);
                assert_non_null(x);
                run_all(runs, &configs[i], world, false, x);
                char where[64];
                snprintf(where, sizeof where, "the exploration device, seed %llu", (unsigned long long)config.seed);
                if (explore_complaint(x) != NULL)
                    fail_msg("%s on %s: %s", configs[i].script, where, explore_complaint(x));
                assert_same(&configs[i], world, where);
                explore_close(x);
            }
        }
}

/* ---- Ranks that do not do the same ---- */

/* What they enqueue fits together, and yet: one replays what the other calls. */
static void ranks_that_replay_different_things_are_told(void **unused)
{
    (void)unused;
    static const captured_config replays = {.script = "EECRRE", .depth = 1}, calls = {.script = "EECREE", .depth = 1};
    fsdp_local *local;
    pthread_t thread[WORLD];
    assert_int_equal(fsdp_local_create(WORLD, NULL, &local), FSDP_OK);
    for (uint32_t r = 0; r < WORLD; r++) {
        runs[r] = (rank_run){.config = r == 0 ? &replays : &calls, .local = local, .rank = r};
        assert_int_equal(pthread_create(&thread[r], NULL, run_thread, &runs[r]), 0);
    }
    for (uint32_t r = 0; r < WORLD; r++) pthread_join(thread[r], NULL);
    for (uint32_t r = 0; r < WORLD; r++) {
        if (runs[r].status != FSDP_ERR_MISMATCH) fail_msg("rank %u: %s", r, runs[r].result.why);
        if (strstr(runs[r].result.why, "step 4 of model model: ranks have enqueued different collectives") == NULL)
            fail_msg("rank %u: %s", r, runs[r].result.why);
    }
    fsdp_local_destroy(local);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(replays_end_in_the_bits_of_eager_steps),
        cmocka_unit_test(no_order_of_the_device_shows_in_a_replay),
        cmocka_unit_test(ranks_that_replay_different_things_are_told),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
