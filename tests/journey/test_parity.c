/* SPDX-License-Identifier: MIT */
/* Sharding, prefetch, jitter and the host's lead change no bit: every way of running a training gives the same losses,
 * norms and parameters, and those of a plain loop without shards and streams. With the argument "processes" all ranks are
 * processes. */
#include "toy_assert.h"
#include "toy_ways.h"

#include <math.h>
#include <stdlib.h>

static toy_result base[TOY_WORLD], other[TOY_WORLD], plain[1];

static void run_plain(const toy_config *config, const float *norms)
{
    toy_shape shape;
    toy_program program;
    toy_resolve(config, &shape, &program);
    toy_plain(config, &shape, &program, norms, plain);
}

static int free_results(void **unused)
{
    (void)unused;
    toy_free(base);
    toy_free(other);
    toy_free(plain);
    return 0;
}

/* ---- Ways of running ---- */

enum { JITTER = 60000 };

static const toy_way ways[] = {
    {0, 2, 0, 0, 0, 0, false, TOY_AHEAD, 0},
    {1, 2, 0, 0, 0, 0, false, TOY_AHEAD, 0},
    {2, 2, 0, 0, 0, 0, false, TOY_AHEAD, 0},
    {4, 2, 0, 0, 0, 0, false, TOY_AHEAD, 0},
    {1, 2, 0, 0, 0, 0, false, TOY_HOOK_BY_HOOK, 0},
    {4, 3, 0, 0, 0, 0, false, TOY_STEP_BY_STEP, 0},
    {0, 1, 0, JITTER, 1, 0, false, TOY_AHEAD, 0},
    {1, 1, 0, JITTER, 2, 0, false, TOY_AHEAD, 0},
    {2, 3, 0, JITTER, 3, 0, false, TOY_AHEAD, 0},
    {4, 2, 0, JITTER, 4, 0, true, TOY_AHEAD, 0},
    {1, 2, 0, JITTER, 5, 0, true, TOY_TWO_AHEAD, TOY_EVAL_NAMED},
    {2, 1, 0, JITTER, 6, 0, false, TOY_TWO_AHEAD, TOY_EVAL_SURPRISE},
    {1, 2, 0, 0, 0, FSDP_DEBUG_SYNC, false, TOY_AHEAD, 0},
    {2, 2, 0, 0, 0, FSDP_DEBUG_SYNC | FSDP_DEBUG_POISON, true, TOY_AHEAD, TOY_EVAL_SURPRISE},
    {1, 1, 0, JITTER, 7, FSDP_DEBUG_POISON, false, TOY_AHEAD, TOY_EVAL_NAMED},
    {4, 3, 0, JITTER, 8, FSDP_DEBUG_POISON, true, TOY_AHEAD, 0},
    {2, 2, 1, JITTER, 9, FSDP_DEBUG_POISON, false, TOY_AHEAD, 0},
    {2, 2, 25000, JITTER, 10, FSDP_DEBUG_POISON, true, TOY_AHEAD, TOY_EVAL_NAMED},
    {4, 1, 50000, 0, 0, 0, false, TOY_HOOK_BY_HOOK, TOY_EVAL_SURPRISE},
};

static void check_all_ways(toy_config config)
{
    config.values = false;
    toy_assert_run(&config, NULL, NULL, base);
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i += TOY_REDUCED ? 3 : 1) {
        toy_config varied = config;
        toy_go(&varied, &ways[i]);
        TOY_CASE("way %zu:", i);
        toy_assert_run(&varied, NULL, NULL, other);
        toy_assert_same(&other[0], &base[0]);
    }
}

static toy_config with(uint32_t world, uint32_t micro_steps, fsdp_accumulation accumulation, bool tied)
{
    toy_config config = toy_config_default();
    config.world = world;
    config.micro_steps = micro_steps;
    config.accumulation = accumulation;
    config.shape.tied = tied;
    config.values = true;
    return config;
}

static void every_way_is_the_same_with_one_micro_step(void **unused)
{
    (void)unused;
    check_all_ways(with(2, 1, FSDP_ACCUMULATE_NONE, false));
}

static void every_way_is_the_same_with_a_held_unit(void **unused)
{
    (void)unused;
    toy_config config = with(3, 2, FSDP_ACCUMULATE_REDUCE_EACH, true);
    config.grad_sum = false;
    check_all_ways(config);
}

static void every_way_is_the_same_with_full_gradients_kept(void **unused)
{
    (void)unused;
    check_all_ways(with(2, 3, FSDP_ACCUMULATE_KEEP_FULL, false));
}

static void every_way_is_the_same_on_one_rank(void **unused)
{
    (void)unused;
    check_all_ways(with(1, 2, FSDP_ACCUMULATE_KEEP_FULL, true));
    check_all_ways(with(1, 2, FSDP_ACCUMULATE_REDUCE_EACH, false));
}

static void every_way_is_the_same_with_mixed_types_and_a_frozen_unit(void **unused)
{
    (void)unused;
    toy_config config = with(4, 1, FSDP_ACCUMULATE_NONE, true);
    config.shape.mixed = config.shape.frozen_layer = true;
    config.shape.compute = config.shape.grad = FSDP_DTYPE_BF16;
    check_all_ways(config);
    free_results(NULL);
    config.world = 1; /* the fp32 parts of a unit are the shard itself, the others are cast */
    check_all_ways(config);
}

/* ---- Threads and processes ---- */

static void as_processes(toy_config config, uint32_t k)
{
    static const uint32_t worlds[] = {1, 2, 3, 4, TOY_WORLD};
    for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++) {
        config.world = worlds[i];
        config.processes = false;
        config.values = true;
        TOY_CASE("case %u, world %u:", k, config.world);
        toy_assert_run(&config, NULL, NULL, base);
        config.processes = true;
        config.own_side = i % 2 != k % 2;
        config.way = k % 3 == 1 ? PROCESSES_BY_TCP : PROCESSES_BY_NAME;
        toy_assert_run(&config, NULL, NULL, other);
        toy_assert_same(&other[0], &base[0]);
        assert_int_equal(other[0].n_master, base[0].n_master);
        assert_memory_equal(other[0].master, base[0].master, base[0].n_master * sizeof(float));
        assert_memory_equal(&other[0].predicted, &base[0].predicted, sizeof base[0].predicted);
        assert_memory_equal(&other[0].memory, &base[0].memory, sizeof base[0].memory);
        free_results(NULL);
    }
}

static void ranks_as_processes_are_ranks_as_threads(void **unused)
{
    (void)unused;
    for (uint32_t k = 0; k < 4; k++) {
        toy_config config = with(1, k == 0 ? 1 : 2, (fsdp_accumulation)(k % 3), k % 2);
        if (k == 3) config.accumulation = FSDP_ACCUMULATE_REDUCE_EACH;
        config.shape.mixed = config.shape.frozen_layer = k == 3;
        if (k == 3) config.shape.compute = config.shape.grad = FSDP_DTYPE_BF16;
        config.depth = k;
        config.reduce_comm = k % 2;
        config.jitter_ns = k == 2 ? JITTER : 0;
        config.eval = k == 1 ? TOY_EVAL_NAMED : TOY_EVAL_NONE;
        config.max_norm = k == 0 ? 0.35f : 0.0f;
        config.debug = k == 3 ? FSDP_DEBUG_POISON : 0;
        as_processes(config, k);
    }
}

/* ---- Ranks and micro-steps ---- */

static void ranks_are_micro_steps(toy_config config, uint32_t world)
{
    config.steps = TOY_REDUCED ? 12 : TOY_STEPS;
    TOY_CASE("world %u:", world);
    config.world = world;
    config.micro_steps = 1;
    config.accumulation = FSDP_ACCUMULATE_NONE;
    toy_assert_run(&config, NULL, NULL, base);
    run_plain(&config, NULL);
    config.world = 1;
    config.micro_steps = world;
    config.accumulation = FSDP_ACCUMULATE_REDUCE_EACH;
    toy_assert_run(&config, NULL, NULL, other);
    assert_memory_equal(other[0].loss, base[0].loss, sizeof base[0].loss);
    assert_int_equal(other[0].hash, base[0].hash);
    toy_assert_plain(&base[0], &plain[0]);
    toy_assert_plain(&other[0], &plain[0]);
    assert_true(base[0].loss[config.steps - 1] < base[0].loss[0]); /* it does learn */
    free_results(NULL);
}

static void ranks_are_micro_steps_to_the_bit(void **unused)
{
    (void)unused;
    toy_config config = toy_config_default();
    config.pace = TOY_AHEAD;
    config.shape.tied = config.values = true;
    for (uint32_t world = 2; world <= 4; world++) ranks_are_micro_steps(config, world);
}

static void ranks_are_micro_steps_to_the_bit_in_half_precision(void **unused)
{
    (void)unused;
    toy_config config = toy_config_default();
    config.values = config.shape.mixed = config.shape.frozen_layer = true;
    config.shape.compute = config.shape.grad = FSDP_DTYPE_BF16;
    ranks_are_micro_steps(config, 3);
}

static void kept_gradients_are_a_plain_loop_that_adds(void **unused)
{
    (void)unused;
    toy_config config = with(1, 3, FSDP_ACCUMULATE_KEEP_FULL, true);
    config.steps = 20;
    toy_assert_run(&config, NULL, NULL, base);
    run_plain(&config, NULL);
    toy_assert_plain(&base[0], &plain[0]);
}

static void ranks_and_micro_steps_are_a_plain_loop(void **unused)
{
    (void)unused;
    for (uint32_t k = 0; k < 6; k++) {
        toy_config config =
            with(2 + k % 2, 2 + k % 3, k / 3 ? FSDP_ACCUMULATE_KEEP_FULL : FSDP_ACCUMULATE_REDUCE_EACH, k % 2);
        config.depth = k % 3;
        config.debug = FSDP_DEBUG_POISON;
        if (k % 3 == 0) config.shape.compute = config.shape.grad = config.shape.reduce = FSDP_DTYPE_BF16;
        TOY_CASE("case %u:", k);
        toy_assert_run(&config, NULL, NULL, base);
        run_plain(&config, NULL);
        toy_assert_plain(&base[0], &plain[0]);
        free_results(NULL);
    }
}

static void every_type_is_the_plain_loop_in_that_type(void **unused)
{
    (void)unused;
    static const fsdp_dtype types[][4] = {
        /* compute, grad, reduce, master */
        {FSDP_DTYPE_BF16, FSDP_DTYPE_FP32, FSDP_DTYPE_FP32, FSDP_DTYPE_FP32},
        {FSDP_DTYPE_BF16, FSDP_DTYPE_BF16, FSDP_DTYPE_FP32, FSDP_DTYPE_BF16},
        {FSDP_DTYPE_FP16, FSDP_DTYPE_FP16, FSDP_DTYPE_FP32, FSDP_DTYPE_FP32},
        {FSDP_DTYPE_FP16, FSDP_DTYPE_BF16, FSDP_DTYPE_FP32, FSDP_DTYPE_FP16},
        {FSDP_DTYPE_FP32, FSDP_DTYPE_FP16, FSDP_DTYPE_FP32, FSDP_DTYPE_FP32},
        {FSDP_DTYPE_FP32, FSDP_DTYPE_FP32, FSDP_DTYPE_FP32, FSDP_DTYPE_BF16},
        /* sums of two are rounded once either way */
        {FSDP_DTYPE_BF16, FSDP_DTYPE_BF16, FSDP_DTYPE_BF16, FSDP_DTYPE_FP32},
        /* a narrower reduce type: between ranks each term is rounded, alone none is */
        {FSDP_DTYPE_BF16, FSDP_DTYPE_FP32, FSDP_DTYPE_FP16, FSDP_DTYPE_FP32}};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        bool narrower = types[i][1] == FSDP_DTYPE_FP32 && types[i][2] != FSDP_DTYPE_FP32;
        for (uint32_t world = 1; world <= (narrower ? 1 : 2); world++) {
            toy_config config =
                with(world, 3 - world, world == 1 ? FSDP_ACCUMULATE_REDUCE_EACH : FSDP_ACCUMULATE_NONE, i % 2);
            config.shape.compute = types[i][0], config.shape.grad = types[i][1];
            config.shape.reduce = types[i][2], config.shape.master = types[i][3];
            config.shape.mixed = i < 4;
            config.debug = FSDP_DEBUG_POISON;
            config.steps = 6;
            TOY_CASE("types %zu, world %u:", i, world);
            toy_assert_run(&config, NULL, NULL, base);
            run_plain(&config, NULL);
            toy_assert_plain(&base[0], &plain[0]);
            free_results(NULL);
        }
    }
}

static void the_mean_over_ranks_is_the_sum_times_one_factor(void **unused)
{
    (void)unused;
    toy_config config = with(3, 1, FSDP_ACCUMULATE_NONE, false);
    config.grad_sum = false;
    config.steps = 8;
    toy_assert_run(&config, NULL, NULL, base);
    run_plain(&config, NULL);
    toy_assert_plain(&base[0], &plain[0]);
}

/* ---- Updates ---- */

static void the_norm_is_clipped_as_in_the_plain_loop(void **unused)
{
    (void)unused;
    toy_config config = with(3, 1, FSDP_ACCUMULATE_NONE, true);
    config.steps = 12;
    config.max_norm = 0.35f; /* the norms of this run lie on both sides */
    toy_assert_run(&config, NULL, NULL, base);
    float norms[TOY_STEPS];
    for (int i = 0; i < TOY_STEPS; i++) norms[i] = base[0].report[i].grad_norm;
    run_plain(&config, norms);
    uint32_t n_clipped = 0;
    for (uint32_t i = 0; i < config.steps; i++) {
        const fsdp_step_report *report = &base[0].report[i];
        float clip = config.max_norm < report->grad_norm ? config.max_norm / report->grad_norm : 1.0f;
        assert_memory_equal(&report->clip_scale, &clip, sizeof clip);
        assert_memory_equal(&report->clip_scale, &plain[0].report[i].clip_scale, sizeof clip);
        n_clipped += clip < 1.0f;
    }
    assert_in_range(n_clipped, 1, config.steps - 1);
    toy_assert_plain(&base[0], &plain[0]);
}

static fsdp_status train_and_compare_around_the_spoilt_step(toy *t)
{
    float *before = calloc(t->result->n_master, sizeof *before), *after = calloc(t->result->n_master, sizeof *after);
    TOY_CHECK(before != NULL && after != NULL);
    while (t->n_updates + 1 < t->config->spoil_step) TOY_TRY(toy_step(t));
    TOY_TRY(toy_values(t, FSDP_VALUE_MASTER, before));
    TOY_TRY(toy_step(t));
    TOY_TRY(toy_values(t, FSDP_VALUE_MASTER, after));
    TOY_CHECK(memcmp(before, after, t->result->n_master * sizeof *before) == 0);
    free(before);
    free(after);
    while (t->n_updates < t->config->steps) TOY_TRY(toy_step(t));
    return toy_finish(t);
}

static void one_nan_on_one_rank_skips_the_step_on_all(void **unused)
{
    (void)unused;
    for (uint32_t world = 1; world <= 3; world += 2) {
        toy_config config = with(world, 1, FSDP_ACCUMULATE_NONE, world == 1);
        config.steps = 6;
        config.spoil_step = 3;
        config.spoil_rank = world - 1;
        toy_assert_run(&config, train_and_compare_around_the_spoilt_step, NULL, base);
        run_plain(&config, NULL);
        for (uint32_t i = 0; i < config.steps; i++) {
            const fsdp_step_report *report = &base[0].report[i];
            assert_int_equal(report->step, i + 1);
            assert_int_equal(report->skipped, i == 2);
            assert_int_equal(report->updates, i < 2 ? i + 1 : i);
            assert_int_equal(isfinite(report->grad_norm) != 0, i != 2);
            base[0].report[i].grad_norm = i == 2 ? 0.0f : report->grad_norm; /* NaN compares with nothing */
            plain[0].report[i].grad_norm = i == 2 ? 0.0f : plain[0].report[i].grad_norm;
        }
        toy_assert_plain(&base[0], &plain[0]);
        free_results(NULL);
    }
}

static void sums_are_over_ranks_and_micro_steps(void **unused)
{
    (void)unused;
    toy_config config = with(3, 2, FSDP_ACCUMULATE_KEEP_FULL, false);
    config.eval = TOY_EVAL_NAMED;
    config.steps = 5;
    toy_assert_run(&config, NULL, NULL, base);
    for (uint32_t i = 0; i < config.steps; i++) {
        const float *sums = base[0].report[i].sums;
        assert_true(sums[FSDP_MAX_SUMS - 1] == 6.0f);  /* a one for each */
        assert_true(sums[0] > 0.0f && sums[1] > 0.0f); /* losses; those of evaluations */
        for (int k = 2; k < FSDP_MAX_SUMS - 1; k++) assert_true(sums[k] == 0.0f);
    }
}

/* A layer that no sample goes through has gradient zero, so what moves its parameters is weight decay alone. */
static void decay_rates_and_frozen_parameters_are_the_parameters_own(void **unused)
{
    (void)unused;
    static const uint32_t layers[] = {0, 2, 3, 4};
    toy_config config = with(2, 1, FSDP_ACCUMULATE_NONE, false);
    config.shape.square = config.own_program = true;
    config.steps = 1;
    config.lr = 0.5f;
    config.weight_decay = 0.25f;
    toy_shape shape;
    toy_shape_make(&config.shape, &shape);
    toy_program_make(&shape, layers, 4, &config.program);
    toy_assert_run(&config, NULL, NULL, base);
    const float *now = base[0].master;
    uint32_t n_moved = 0;
    for (uint32_t u = 0; u < shape.n_units; u++) {
        for (uint32_t p = 0; p < shape.unit[u].n_params; p++) {
            const toy_param *param = &shape.unit[u].param[p];
            float lr = config.lr * param->lr_scale, decay = param->no_decay ? 0.0f : config.weight_decay;
            for (uint64_t i = 0; i < param->elems; i++, now++) {
                float start = toy_initial(&shape, u, p, i);
                if (param->frozen) assert_true(*now == start);
                else if (u == shape.first + 1) assert_true(*now == start - lr * (decay * start));
                else n_moved += *now != start;
            }
        }
    }
    assert_true(n_moved > 1000);
}

int main(int n_args, char **args)
{
    toy_always_processes = n_args > 1 && strcmp(args[1], "processes") == 0;
    toy_always_staged = n_args > 1 && strcmp(args[1], "staged") == 0;
#define PARITY(name) cmocka_unit_test_setup_teardown(name, toy_deadline, free_results)
    const struct CMUnitTest tests[] = {
        PARITY(every_way_is_the_same_with_one_micro_step),
        PARITY(every_way_is_the_same_with_a_held_unit),
        PARITY(every_way_is_the_same_with_full_gradients_kept),
        PARITY(every_way_is_the_same_on_one_rank),
        PARITY(every_way_is_the_same_with_mixed_types_and_a_frozen_unit),
        PARITY(ranks_as_processes_are_ranks_as_threads),
        PARITY(ranks_are_micro_steps_to_the_bit),
        PARITY(ranks_are_micro_steps_to_the_bit_in_half_precision),
        PARITY(kept_gradients_are_a_plain_loop_that_adds),
        PARITY(ranks_and_micro_steps_are_a_plain_loop),
        PARITY(every_type_is_the_plain_loop_in_that_type),
        PARITY(the_mean_over_ranks_is_the_sum_times_one_factor),
        PARITY(the_norm_is_clipped_as_in_the_plain_loop),
        PARITY(one_nan_on_one_rank_skips_the_step_on_all),
        PARITY(sums_are_over_ranks_and_micro_steps),
        PARITY(decay_rates_and_frozen_parameters_are_the_parameters_own),
    };
    return cmocka_run_group_tests_name("parity", tests, NULL, NULL);
}
