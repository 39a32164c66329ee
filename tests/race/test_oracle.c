/* SPDX-License-Identifier: MIT */
/* Tapes of whole trainings, on both backends, judged by somebody who knows nothing of the clocks: no race anywhere. The
 * kernels of the toy touch what they use by copies that stand on the tape, beside the windows' own records. */
#include "toy_assert.h"
#include "toy_programs.h"

static toy_result results[TOY_WORLD];
static uint64_t n_tapes, n_records;

/* ---- Scripts ---- */

static uint32_t draw(uint32_t *seed, uint32_t n)
{
    *seed = *seed * 1664525u + 1013904223u;
    return (*seed >> 10) % n;
}

static fsdp_status stop_at_random(toy *t, uint32_t *seed)
{
    uint32_t index = draw(seed, t->config->micro_steps);
    for (uint32_t i = 0; i < index; i++) TOY_TRY(toy_micro(t, i));
    if (draw(seed, 4) > 0) { /* in a micro-step; else between two */
        TOY_TRY(toy_pass_begin(t, index));
        TOY_TRY(toy_play(t, &t->program, 0, draw(seed, t->program.n), toy_sample(t, index)));
    }
    TOY_TRY(fsdp_pass_abort(t->model, t->s));
    return FSDP_OK;
}

static fsdp_status train_with_stops(toy *t)
{
    uint32_t seed = *(const uint32_t *)t->arg;
    while (t->n_updates < t->config->steps) {
        if (draw(&seed, 2) == 0) TOY_TRY(stop_at_random(t, &seed));
        TOY_TRY(toy_step(t));
    }
    return toy_finish(t);
}

/* The second stream is in a window that is given up, and in none that comes after. */
static fsdp_status leave_the_second_stream_behind(toy *t)
{
    static const toy_line look = {.op = TOY_KERNEL_SECOND, .kernel = TOY_LOOK},
                          pull = {.op = TOY_KERNEL_SECOND, .kernel = TOY_PULL};
    while (t->n_updates < t->config->steps) {
        fsdp_view view = FSDP_VIEW_INIT;
        uint32_t unit = t->shape.first + (uint32_t)t->n_updates % t->shape.n_layers;
        bool backward = t->n_updates % 2 == 1;
        toy_program program = {.line = {{.op = backward ? TOY_BACKWARD_BEGIN : TOY_FORWARD_BEGIN},
                                        {.op = TOY_USE},
                                        backward ? pull : look},
                               .n = 3};
        for (uint32_t i = 0; i < program.n; i++) program.line[i].unit = unit;
        TOY_TRY(toy_pass_begin(t, 0));
        TOY_TRY(fsdp_forward_begin(t->unit[0], t->s, &view));
        TOY_TRY(fsdp_forward_end(t->unit[0], t->s));
        TOY_TRY(toy_play(t, &program, 0, program.n, 0));
        TOY_TRY(fsdp_pass_abort(t->model, t->s));
        TOY_TRY(toy_step(t));
    }
    return toy_finish(t);
}

/* ---- Judgement ---- */

static void judge(toy_config config, toy_script script, void *arg)
{
    config.trace = config.touch = true;
    toy_assert_run(&config, script, arg, results);
    for (uint32_t r = 0; r < (config.sim ? 1 : config.world); r++) {
        if (results[r].races != 0)
            fail_msg("%s rank %u: %zu records race; %s", toy_case, r, results[r].races, results[r].race);
        assert_true(results[r].n_records > 200);
        n_tapes++;
        n_records += results[r].n_records;
    }
}

/* On one backend in full, on the other in part. */
static bool left_out(uint32_t k, bool sim) { return sim ? TOY_REDUCED && k % 3 != 0 : k % (TOY_REDUCED ? 16 : 5) != 0; }

static toy_config with(bool sim, uint32_t world, uint32_t depth, fsdp_accumulation accumulation, bool tied)
{
    toy_config config = toy_config_default();
    config.sim = sim;
    config.world = world;
    config.depth = depth;
    config.accumulation = accumulation;
    config.micro_steps = accumulation == FSDP_ACCUMULATE_NONE ? 1 : 2;
    config.shape.tied = tied;
    return config;
}

/* ---- The matrix ---- */

static void no_race_at_any_depth_and_accumulation(void **unused)
{
    (void)unused;
    for (uint32_t k = 0; k < 2 * 3 * 5 * 3 * 2; k++) {
        uint32_t world = 1 + k / 2 % 3, depth = k / 6 % 5;
        toy_config config = with(k % 2, world, depth, (fsdp_accumulation)(k / 30 % 3), k / 90);
        if (left_out(k / 2, config.sim)) continue;
        config.grad_buffers = 1 + (k / 7) % 3;
        config.debug = k % 3 ? FSDP_DEBUG_POISON : 0;
        config.pace = TOY_AHEAD;
        TOY_CASE("%s, world %u, depth %u, accumulation %u, tied %u:", config.sim ? "sim" : "host", world, depth,
                 k / 30 % 3, k / 90);
        judge(config, NULL, NULL);
    }
}

typedef void (*maker)(const toy_shape *, toy_program *);
static const maker makers[] = {toy_program_windows, toy_program_again, toy_program_two_streams,
                               toy_program_late_gradients};

static void make_detour(const toy_shape *shape, toy_program *program)
{
    static const uint32_t layers[] = {0, 3, 1, 1, 4, 0, 2};
    toy_program_make(shape, layers, sizeof layers / sizeof *layers, program);
}

static toy_program make_program(const toy_config *config, uint32_t k)
{
    toy_shape shape;
    toy_program program;
    toy_shape_make(&config->shape, &shape);
    (k < 4 ? makers[k] : make_detour)(&shape, &program);
    return program;
}

static void no_race_in_passes_of_the_callers_own_and_off_plan(void **unused)
{
    (void)unused;
    for (uint32_t k = 0; k < 2 * 3 * 5 * 3 * 5; k++) {
        uint32_t world = 1 + k / 2 % 3, depth = k / 6 % 5, which = k / 90;
        toy_config config = with(k % 2, world, depth, (fsdp_accumulation)(k / 30 % 3), k % 4 > 1);
        if (left_out(k / 2, config.sim)) continue;
        if (which == 4 && config.accumulation != FSDP_ACCUMULATE_REDUCE_EACH)
            config = with(config.sim, world, depth, FSDP_ACCUMULATE_REDUCE_EACH, k % 4 > 1);
        config.shape.square = config.own_program = true;
        config.program = make_program(&config, which);
        config.declare = which < 4;
        config.debug = k % 3 ? FSDP_DEBUG_POISON : 0;
        TOY_CASE("%s, world %u, depth %u, accumulation %d, program %u:", config.sim ? "sim" : "host", world, depth,
                 (int)config.accumulation, which);
        judge(config, NULL, NULL);
    }
}

/* Everything at random that can be combined. */
static toy_config draw_config(uint32_t *seed, bool sim)
{
    toy_config config = with(sim, 1 + draw(seed, 4), draw(seed, 5), (fsdp_accumulation)draw(seed, 3), draw(seed, 2));
    if (config.micro_steps > 1) config.micro_steps += draw(seed, 2);
    config.steps = 4;
    config.grad_buffers = 1 + draw(seed, 3);
    config.prefetch_bytes = draw(seed, 3) == 0 ? draw(seed, 60000) : 0;
    config.reduce_comm = draw(seed, 2);
    config.debug = draw(seed, 2) ? FSDP_DEBUG_POISON : 0;
    config.eval = (toy_eval)draw(seed, 3);
    config.optimizer = (toy_optimizer)draw(seed, 3);
    config.alternate = draw(seed, 3) == 0;
    config.pace = draw(seed, 2) ? TOY_AHEAD : TOY_STEP_BY_STEP;
    config.max_norm = draw(seed, 2) ? 0.3f : 0.0f;
    config.jitter_ns = draw(seed, 4) == 0 ? 20000 : 0;
    config.shape.frozen_layer = draw(seed, 2);
    config.shape.square = draw(seed, 2);
    config.shape.mixed = draw(seed, 2);
    if (config.optimizer == TOY_ADAMW && draw(seed, 2)) {
        config.shape.compute = FSDP_DTYPE_BF16;
        config.shape.master = draw(seed, 2) ? FSDP_DTYPE_BF16 : FSDP_DTYPE_FP32;
        if (config.accumulation != FSDP_ACCUMULATE_KEEP_FULL) config.shape.grad = FSDP_DTYPE_BF16;
    }
    config.own_program = config.shape.square && draw(seed, 2);
    if (config.own_program) {
        config.program = make_program(&config, draw(seed, 4));
        config.declare = true;
        config.eval =
            TOY_EVAL_NONE; /* half of a pass of one's own is no EVAL: windows that nest there have no room planned */
    }
    return config;
}

static void no_race_in_random_combinations(void **unused)
{
    (void)unused;
    for (uint32_t number = 1; number <= (TOY_REDUCED ? 60 : 600); number++) {
        uint32_t seed = number * 2654435761u;
        toy_config config = draw_config(&seed, number % 8 != 0);
        TOY_CASE("seed %u:", number);
        judge(config, draw(&seed, 2) ? train_with_stops : NULL, &seed);
    }
}

static void no_race_with_a_stream_that_was_left_behind(void **unused)
{
    (void)unused;
    for (uint32_t k = 0; k < 24; k++) {
        toy_config config =
            with(k % 2, 1 + k / 2 % 2, k / 4 % 3, k / 12 ? FSDP_ACCUMULATE_REDUCE_EACH : FSDP_ACCUMULATE_NONE, false);
        config.steps = 6;
        TOY_CASE("%s, world %u, depth %u:", config.sim ? "sim" : "host", config.world, config.depth);
        judge(config, leave_the_second_stream_behind, NULL);
    }
}

static int say_how_many(void **unused)
{
    (void)unused;
    print_message("%llu tapes, %llu records\n", (unsigned long long)n_tapes, (unsigned long long)n_records);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(no_race_at_any_depth_and_accumulation, toy_deadline),
        cmocka_unit_test_setup(no_race_in_passes_of_the_callers_own_and_off_plan, toy_deadline),
        cmocka_unit_test_setup(no_race_in_random_combinations, toy_deadline),
        cmocka_unit_test_setup(no_race_with_a_stream_that_was_left_behind, toy_deadline),
    };
    return cmocka_run_group_tests_name("oracle", tests, NULL, say_how_many);
}
