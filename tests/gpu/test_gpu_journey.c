/* SPDX-License-Identifier: MIT */
/* The toy trainer on a GPU: the same bits as a plain loop on the host where sums over ranks have one order (one rank, two), and
 * the same bits however it is run: depth, delays, poison, budgets, the host's lead. More ranks come close to one rank with as
 * many micro-steps.
 *
 *     test_gpu_journey           all of it
 *     test_gpu_journey rank      one rank of a short training; others are started beside it (RANK, WORLD_SIZE, …): for tools
 *                                that watch a process. Prints its losses' last and the parameters' hash
 *     test_gpu_journey host      on the host backend */
#include "gpu_toy.h"
#include "toy_assert.h"
#include "toy_programs.h"
#include "toy_ways.h"

#include <math.h>

enum { JITTER = 40000, LOSSES = 20 };

static toy_result results[TOY_TRAININGS * GPU_WORLD], alone[TOY_TRAININGS], plain[1];

static int free_results(void **unused)
{
    (void)unused;
    toy_free(results);
    toy_free(alone);
    toy_free(plain);
    return 0;
}

/* All trainings of one world; all ranks must come through and agree. */
static void run_each(const toy_config *configs, uint32_t n, toy_result *to)
{
    uint32_t world = configs->world;
    bool all = toy_run_each(configs, n, NULL, NULL, to);
    for (uint32_t i = 0; i < n; i++) {
        const toy_result *first = &to[i * world];
        if (!all && first->error[0] != '\0') fail_msg("world %u, training %u: %s", world, i, first->error);
        for (uint32_t r = 1; r < world; r++) {
            bool same = memcmp(first[r].report, first->report, sizeof first->report) == 0;
            if (!same || first[r].hash != first->hash)
                fail_msg("world %u, training %u: ranks 0 and %u do not agree", world, i, r);
        }
    }
}

static void assert_plain(const toy_config *config, const toy_result *run)
{
    toy_shape shape;
    toy_program program;
    toy_resolve(config, &shape, &program);
    toy_plain(config, &shape, &program, NULL, plain);
    if (config->optimizer != TOY_ADAMW) memset(plain[0].loss, 0, sizeof plain[0].loss); /* there are no reports */
    toy_assert_plain(run, &plain[0]);
}

/* ---- The plain loop ---- */

static void own_pass(toy_config *config, void (*make)(const toy_shape *, toy_program *))
{
    toy_shape shape;
    config->shape.square = config->own_program = config->declare = true;
    toy_shape_make(&config->shape, &shape);
    make(&shape, &config->program);
}

static void compute_in(toy_config *config, fsdp_dtype compute, fsdp_dtype grad, fsdp_dtype reduce, fsdp_dtype master)
{
    config->shape.compute = compute, config->shape.grad = grad;
    config->shape.reduce = reduce, config->shape.master = master;
}

/* One of everything; returns how many. */
static uint32_t make_trainings(uint32_t world, toy_config *configs)
{
    enum { N = 16 };
    for (uint32_t i = 0; i < N; i++) {
        configs[i] = gpu_toy_config(world);
        configs[i].steps = 5;
        configs[i].values = true;
        configs[i].depth = i % 3;
        configs[i].debug = i % 2 ? FSDP_DEBUG_POISON : 0;
        configs[i].jitter_ns = i % 4 == 3 ? JITTER : 0;
        configs[i].jitter_seed = i;
        configs[i].shape.tied = i % 4 == 1;
    }
    configs[1].grad_sum = false, configs[1].way = PROCESSES_BY_TCP;
    configs[2].own_side = true;
    configs[2].micro_steps = 3, configs[2].accumulation = FSDP_ACCUMULATE_KEEP_FULL;
    configs[3].micro_steps = 2, configs[3].accumulation = FSDP_ACCUMULATE_REDUCE_EACH;
    compute_in(&configs[4], FSDP_DTYPE_BF16, FSDP_DTYPE_BF16, FSDP_DTYPE_FP32, FSDP_DTYPE_FP32);
    configs[4].shape.mixed = configs[4].shape.frozen_layer = true;
    compute_in(&configs[5], FSDP_DTYPE_BF16, FSDP_DTYPE_BF16, FSDP_DTYPE_BF16, FSDP_DTYPE_FP32);
    compute_in(&configs[6], FSDP_DTYPE_FP16, FSDP_DTYPE_FP16, FSDP_DTYPE_FP32, FSDP_DTYPE_FP32);
    compute_in(&configs[7], FSDP_DTYPE_FP16, FSDP_DTYPE_BF16, FSDP_DTYPE_FP32, FSDP_DTYPE_FP16);
    compute_in(&configs[8], FSDP_DTYPE_BF16, FSDP_DTYPE_FP32, FSDP_DTYPE_FP32, FSDP_DTYPE_BF16);
    configs[8].shape.mixed = true;
    own_pass(&configs[9], toy_program_windows);
    own_pass(&configs[10], toy_program_two_streams);
    own_pass(&configs[11], toy_program_two_streams);
    configs[11].micro_steps = 2, configs[11].accumulation = FSDP_ACCUMULATE_KEEP_FULL;
    own_pass(&configs[12], toy_program_late_gradients);
    own_pass(&configs[13], toy_program_again);
    configs[13].micro_steps = 2, configs[13].accumulation = FSDP_ACCUMULATE_REDUCE_EACH;
    configs[14].alternate = true, configs[14].micro_steps = 2;
    configs[14].accumulation = FSDP_ACCUMULATE_REDUCE_EACH;
    configs[15].optimizer = TOY_OWN_SGD;
    return N;
}

static void check_plain(uint32_t world)
{
    static toy_config configs[TOY_TRAININGS];
    uint32_t n = make_trainings(world, configs);
    run_each(configs, n, results);
    for (uint32_t i = 0; i < n; i++) {
        TOY_CASE("world %u, training %u:", world, i);
        assert_plain(&configs[i], &results[i * world]);
        toy_free(plain);
    }
}

static void one_rank_is_a_plain_loop(void **unused)
{
    (void)unused;
    check_plain(1);
}

static void two_ranks_are_a_plain_loop(void **unused)
{
    (void)unused;
    check_plain(2);
}

static void an_optimizer_of_ones_own_gives_the_librarys_bits(void **unused)
{
    (void)unused;
    toy_config configs[2] = {gpu_toy_config(2), gpu_toy_config(2)};
    for (uint32_t i = 0; i < 2; i++) configs[i].steps = 6, configs[i].jitter_ns = JITTER * i;
    configs[1].optimizer = TOY_OWN_ADAMW;
    run_each(configs, 2, results);
    assert_int_equal(results[2].hash, results[0].hash);
}

/* ---- Ways of running ---- */

static const toy_way ways[] = {
    {0, 2, 0, 0, 0, 0, false, TOY_AHEAD, TOY_EVAL_NONE},
    {1, 2, 0, 0, 0, 0, false, TOY_AHEAD, TOY_EVAL_NONE},
    {2, 2, 0, 0, 0, 0, false, TOY_AHEAD, TOY_EVAL_NONE},
    {4, 3, 0, 0, 0, 0, false, TOY_STEP_BY_STEP, TOY_EVAL_NONE},
    {1, 2, 0, 0, 0, 0, false, TOY_HOOK_BY_HOOK, TOY_EVAL_NONE},
    {0, 1, 0, JITTER, 1, 0, false, TOY_AHEAD, TOY_EVAL_NONE},
    {1, 1, 0, JITTER, 2, FSDP_DEBUG_POISON, false, TOY_AHEAD, TOY_EVAL_NAMED},
    {2, 3, 0, JITTER, 3, 0, false, TOY_AHEAD, TOY_EVAL_NONE},
    {2, 1, 0, JITTER, 4, FSDP_DEBUG_POISON, false, TOY_TWO_AHEAD, TOY_EVAL_SURPRISE},
    {1, 2, 0, 0, 0, FSDP_DEBUG_SYNC, false, TOY_AHEAD, TOY_EVAL_NONE},
    {2, 2, 1, JITTER, 5, FSDP_DEBUG_POISON, false, TOY_AHEAD, TOY_EVAL_NONE},
    {4, 1, 50000, 0, 0, 0, false, TOY_HOOK_BY_HOOK, TOY_EVAL_SURPRISE},
    /* A communicator of the reduce lane's own may add in another order: of two ranks there is one. */
    {4, 2, 0, JITTER, 6, 0, true, TOY_AHEAD, TOY_EVAL_NONE},
    {1, 2, 0, JITTER, 7, FSDP_DEBUG_POISON, true, TOY_TWO_AHEAD, TOY_EVAL_NAMED},
    {2, 2, 25000, JITTER, 8, FSDP_DEBUG_POISON, true, TOY_AHEAD, TOY_EVAL_NAMED},
};

enum { WAYS = sizeof ways / sizeof *ways, WAYS_WITH_ONE_COMM = WAYS - 3 };

static void check_ways(toy_config config, uint32_t n)
{
    static toy_config configs[WAYS];
    for (uint32_t i = 0; i < n; i++) {
        configs[i] = config;
        toy_go(&configs[i], &ways[i]);
    }
    run_each(configs, n, results);
    for (uint32_t i = 1; i < n; i++) {
        TOY_CASE("world %u, way %u:", config.world, i);
        toy_assert_same(&results[i * config.world], &results[0]);
    }
    assert_true(results[0].loss[0] > 0.0f && results[0].loss[config.steps - 1] != results[0].loss[0]);
}

static void every_way_is_the_same_on_one_rank(void **unused)
{
    (void)unused;
    toy_config config = gpu_toy_config(1);
    config.micro_steps = 2;
    config.accumulation = FSDP_ACCUMULATE_KEEP_FULL;
    config.shape.tied = true;
    config.steps = 6;
    check_ways(config, WAYS);
}

static void every_way_is_the_same_on_two_ranks(void **unused)
{
    (void)unused;
    toy_config config = gpu_toy_config(2);
    config.shape.mixed = config.shape.frozen_layer = true;
    config.shape.compute = config.shape.grad = FSDP_DTYPE_BF16;
    config.max_norm = 0.5f;
    config.steps = 6;
    check_ways(config, WAYS);
}

static void every_way_is_the_same_on_four_ranks(void **unused)
{
    (void)unused;
    toy_config config = gpu_toy_config(4);
    config.micro_steps = 2;
    config.accumulation = FSDP_ACCUMULATE_REDUCE_EACH;
    config.shape.tied = true;
    config.steps = 4;
    check_ways(config, WAYS_WITH_ONE_COMM);
}

/* ---- Ranks and micro-steps ---- */

static void ranks_are_micro_steps(void **unused)
{
    (void)unused;
    for (uint32_t world = 2; world <= GPU_WORLD; world *= 2) {
        toy_config configs[2] = {gpu_toy_config(world), gpu_toy_config(world)}, one[2];
        for (uint32_t i = 0; i < 2; i++) {
            configs[i].steps = LOSSES;
            configs[i].depth = 1 + i;
            configs[i].shape.tied = true;
            if (i == 1) configs[i].shape.compute = configs[i].shape.grad = FSDP_DTYPE_BF16;
            one[i] = configs[i];
            one[i].world = 1;
            one[i].micro_steps = world;
            one[i].accumulation = FSDP_ACCUMULATE_REDUCE_EACH;
        }
        run_each(configs, 2, results);
        run_each(one, 2, alone);
        for (uint32_t i = 0; i < 2; i++) {
            for (uint32_t k = 0; k < LOSSES; k++) {
                double a = results[i * world].loss[k], b = alone[i].loss[k];
                if (!(fabs(a - b) <= 2e-3 * fabs(b)))
                    fail_msg("world %u, training %u, step %u: loss %.9g, of one rank %.9g", world, i, k + 1, a, b);
            }
            if (world == 2) assert_int_equal(results[i * world].hash, alone[i].hash);
        }
        free_results(NULL);
    }
}

/* ---- Skips ---- */

static void one_nan_on_one_rank_skips_the_step_on_all(void **unused)
{
    (void)unused;
    toy_config config = gpu_toy_config(2);
    config.steps = 5;
    config.spoil_step = 3;
    config.spoil_rank = 1;
    run_each(&config, 1, results);
    for (uint32_t i = 0; i < config.steps; i++) {
        const fsdp_step_report *report = &results[0].report[i];
        assert_int_equal(report->skipped, i == 2);
        assert_int_equal(report->updates, i < 2 ? i + 1 : i);
        assert_int_equal(isfinite(report->grad_norm) != 0, i != 2);
    }
}

/* ---- One rank, for tools ---- */

static int run_rank(void)
{
    static toy_result result;
    fsdp_launch launch = FSDP_LAUNCH_INIT;
    if (fsdp_launch_from_env(&launch) != FSDP_OK) {
        printf("test_gpu_journey rank: %s\n", fsdp_last_error());
        return 1;
    }
    toy_config config = gpu_toy_config(launch.world);
    own_pass(&config, toy_program_two_streams);
    config.depth = 2;
    config.steps = 3;
    config.micro_steps = 2;
    config.accumulation = FSDP_ACCUMULATE_REDUCE_EACH;
    config.shape.compute = config.shape.grad = FSDP_DTYPE_BF16;
    bool ok = toy_run_rank(&config, &launch, NULL, NULL, &result);
    if (ok)
        printf("rank %u of %u: loss %a, hash %016llx\n", launch.rank, launch.world, (double)result.loss[2],
               (unsigned long long)result.hash);
    else printf("rank %u of %u: %s\n", launch.rank, launch.world, result.error);
    return ok ? 0 : 1;
}

int main(int n_args, char **args)
{
    if (!gpu_toy_begin("test_gpu_journey", n_args, args)) return 77;
    if (n_args > 1 && strcmp(args[n_args - 1], "rank") == 0) return run_rank();
#define JOURNEY(name) cmocka_unit_test_setup_teardown(name, gpu_toy_deadline, free_results)
    const struct CMUnitTest tests[] = {
        JOURNEY(one_rank_is_a_plain_loop),
        JOURNEY(two_ranks_are_a_plain_loop),
        JOURNEY(an_optimizer_of_ones_own_gives_the_librarys_bits),
        JOURNEY(every_way_is_the_same_on_one_rank),
        JOURNEY(every_way_is_the_same_on_two_ranks),
        JOURNEY(every_way_is_the_same_on_four_ranks),
        JOURNEY(ranks_are_micro_steps),
        JOURNEY(one_nan_on_one_rank_skips_the_step_on_all),
    };
    return cmocka_run_group_tests_name("journey on a GPU", tests, NULL, NULL);
}
