/* SPDX-License-Identifier: MIT */
/* Hooks in every order: off plan, in passes of the caller's own with windows that nest and overlap, on two streams, with
 * optimizers of the caller's own, and given up in the middle. Each must end in the bits of the order that it stands for. */
#include "toy_assert.h"
#include "toy_programs.h"

#include <math.h>
#include <stdlib.h>

#include "sharding/model.h"

static toy_result base[TOY_WORLD], other[TOY_WORLD], plain[1];

static int free_results(void **unused)
{
    (void)unused;
    toy_free(base);
    toy_free(other);
    toy_free(plain);
    return 0;
}

static void run_plain(const toy_config *config)
{
    toy_shape shape;
    toy_program program;
    toy_resolve(config, &shape, &program);
    toy_plain(config, &shape, &program, NULL, plain);
}

static toy_config square(uint32_t world, uint32_t depth, fsdp_accumulation accumulation)
{
    toy_config config = toy_config_default();
    config.shape.square = true;
    config.world = world;
    config.depth = depth;
    config.accumulation = accumulation;
    config.micro_steps = accumulation == FSDP_ACCUMULATE_NONE ? 1 : 2;
    config.own_program = true;
    config.debug = FSDP_DEBUG_POISON;
    config.values = true;
    return config;
}

/* Every third case. */
static void jitter(toy_config *config, uint32_t k)
{
    config->jitter_ns = k % 3 == 0 ? 30000 : 0;
    config->jitter_seed = k;
}

/* ---- Off plan ---- */

typedef struct detour {
    const char *name;
    uint32_t n, layer[TOY_POSITIONS];
    uint32_t n_off_plan; /* hooks of a micro-step that are not the next visit */
    bool twice;          /* some unit is reduced twice */
} detour;

static const detour detours[] = {
    {"as planned", 5, {0, 1, 2, 3, 4}, 0, false},
    {"one left out", 4, {0, 2, 3, 4}, 2, false},
    {"two left out", 3, {0, 3, 4}, 2, false},
    {"one at once again", 6, {0, 1, 1, 2, 3, 4}, 2, true},
    {"one later again", 6, {0, 1, 2, 1, 3, 4}, 4, true},
};

/* The same with hooks that nobody announced, as a declared pass, and as a plain loop. */
static void check_detour(toy_config config, const detour *d)
{
    toy_shape shape;
    toy_shape_make(&config.shape, &shape);
    toy_program_make(&shape, d->layer, d->n, &config.program);
    config.declare = true;
    toy_assert_run(&config, NULL, NULL, base);
    assert_int_equal(base[0].stats.off_plan_hooks, 0);
    config.declare = false;
    config.values = false;
    toy_assert_run(&config, NULL, NULL, other);
    toy_assert_same(&other[0], &base[0]);
    uint64_t expected = (uint64_t)config.steps * config.micro_steps * d->n_off_plan;
    if (other[0].stats.off_plan_hooks != expected)
        fail_msg("%s %llu off plan, expected %llu", toy_case, (unsigned long long)other[0].stats.off_plan_hooks,
                 (unsigned long long)expected);
    run_plain(&config);
    toy_assert_plain(&base[0], &plain[0]);
    free_results(NULL);
}

static void off_plan_is_the_same_order_declared(void **unused)
{
    (void)unused;
    for (size_t i = 0; i < sizeof detours / sizeof *detours; i++) {
        for (uint32_t k = 0; k < 10; k++) {
            uint32_t world = 1 + k % 2, depth = k / 2;
            if (TOY_REDUCED && k % 3 != 0) continue;
            toy_config config =
                square(world, depth, detours[i].twice || k % 3 ? FSDP_ACCUMULATE_REDUCE_EACH : FSDP_ACCUMULATE_NONE);
            if (k == 6 || k == 7) config.accumulation = FSDP_ACCUMULATE_KEEP_FULL, config.micro_steps = 2;
            if (detours[i].twice && config.accumulation == FSDP_ACCUMULATE_KEEP_FULL) continue; /* refused: see below */
            config.shape.tied = k % 4 < 2;
            jitter(&config, k);
            TOY_CASE("%s, world %u, depth %u, accumulation %d:", detours[i].name, world, depth,
                     (int)config.accumulation);
            check_detour(config, &detours[i]);
        }
    }
}

static void any_order_of_layers_is_the_same_order_declared(void **unused)
{
    (void)unused;
    uint32_t seed = 20240607;
    for (uint32_t k = 0; k < (TOY_REDUCED ? 4 : 16); k++) {
        toy_config config = square(1 + k % 3, k % 5, FSDP_ACCUMULATE_REDUCE_EACH);
        toy_shape shape;
        toy_shape_make(&config.shape, &shape);
        uint32_t layers[8];
        for (int i = 0; i < 8; i++) {
            seed = seed * 1664525u + 1013904223u;
            layers[i] = (seed >> 16) % TOY_LAYERS;
        }
        toy_program_make(&shape, layers, 8, &config.program);
        jitter(&config, k);
        TOY_CASE("order %u:", k);
        config.declare = true;
        toy_assert_run(&config, NULL, NULL, base);
        config.declare = false;
        toy_assert_run(&config, NULL, NULL, other);
        toy_assert_same(&other[0], &base[0]);
        free_results(NULL);
    }
}

/* One unit open and another gathered ahead fill the range; a hook off plan takes the place of the latter. */
static fsdp_status open_two_that_no_plan_opens_together(toy *t)
{
    fsdp_view view = FSDP_VIEW_INIT;
    TOY_TRY(toy_pass_begin(t, 0));
    TOY_TRY(fsdp_forward_begin(t->unit[4], t->s, &view)); /* gathers unit 5 ahead */
    TOY_TRY(fsdp_forward_begin(t->unit[0], t->s, &view));
    TOY_TRY(fsdp_forward_end(t->unit[0], t->s));
    TOY_TRY(fsdp_forward_end(t->unit[4], t->s));
    TOY_TRY(fsdp_pass_abort(t->model, t->s));
    return toy_train(t);
}

static void units_gathered_ahead_make_room_for_open_ones(void **unused)
{
    (void)unused;
    toy_config config = toy_config_default();
    config.world = 2;
    toy_assert_run(&config, NULL, NULL, base);
    toy_assert_run(&config, open_two_that_no_plan_opens_together, NULL, other);
    toy_assert_same(&other[0], &base[0]);
}

static fsdp_status open_more_than_the_range_holds(toy *t)
{
    fsdp_view view = FSDP_VIEW_INIT;
    fsdp_status status = FSDP_OK;
    uint32_t n = 0;
    TOY_TRY(toy_pass_begin(t, 0));
    while (n < t->shape.n_units && (status = fsdp_forward_begin(t->unit[n], t->s, &view)) == FSDP_OK) n++;
    TOY_CHECK(status == FSDP_ERR_NO_MEMORY);
    TOY_CHECK(n >= 1 && strstr(fsdp_last_error(), fsdp_unit_name(t->unit[n])) != NULL);
    while (n-- > 0) TOY_TRY(fsdp_forward_end(t->unit[n], t->s));
    TOY_TRY(toy_play(t, &t->program, 0, t->program.n,
                     toy_sample(t, 0))); /* nothing has changed: the micro-step can be made */
    TOY_TRY(toy_sums(t));
    TOY_TRY(fsdp_pass_end(t->model, t->s));
    TOY_TRY(toy_update(t));
    return toy_train(t);
}

static void a_hook_without_room_changes_nothing(void **unused)
{
    (void)unused;
    for (uint32_t depth = 0; depth <= 2; depth++) {
        toy_config config = toy_config_default();
        config.world = 2;
        config.depth = depth;
        TOY_CASE("depth %u:", depth);
        toy_assert_run(&config, NULL, NULL, base);
        toy_assert_run(&config, open_more_than_the_range_holds, NULL, other);
        toy_assert_same(&other[0], &base[0]);
        free_results(NULL);
    }
}

static fsdp_status reduce_twice_unannounced(toy *t)
{
    fsdp_view view = FSDP_VIEW_INIT;
    TOY_TRY(toy_pass_begin(t, 0));
    TOY_TRY(fsdp_backward_begin(t->unit[1], t->s, &view));
    TOY_TRY(fsdp_backward_end(t->unit[1], t->s));
    TOY_CHECK(fsdp_backward_begin(t->unit[1], t->s, &view) == FSDP_ERR_STATE);
    TOY_CHECK(strstr(fsdp_last_error(), fsdp_unit_name(t->unit[1])) != NULL);
    TOY_TRY(fsdp_pass_abort(t->model, t->s));
    return toy_train(t);
}

/* The temporary that a second reduction needs was not taken at seal. */
static void a_second_reduction_needs_a_pass_that_says_so(void **unused)
{
    (void)unused;
    for (uint32_t world = 1; world <= 2; world++) { /* a world of one needs none, and is told all the same */
        toy_config config = toy_config_default();
        config.world = world;
        TOY_CASE("world %u:", world);
        toy_assert_run(&config, NULL, NULL, base);
        toy_assert_run(&config, reduce_twice_unannounced, NULL, other);
        toy_assert_same(&other[0], &base[0]);
        free_results(NULL);
    }
}

static fsdp_status leave_a_layer_out_of_the_second_step(toy *t)
{
    static const uint32_t layers[] = {0, 2, 3, 4};
    float gradient[23 * 23];
    fsdp_param *param = fsdp_model_find_param(t->model, "h.1.weight");
    TOY_CHECK(fsdp_param_elems(param) == sizeof gradient / sizeof *gradient);
    for (int step = 0; step < 2; step++) {
        bool all_zero = true;
        TOY_TRY(toy_step(t));
        TOY_TRY(fsdp_param_get(param, FSDP_VALUE_GRADIENT, gradient, FSDP_DTYPE_FP32));
        for (int i = 0; i < 23 * 23; i++) all_zero &= gradient[i] == 0.0f;
        TOY_CHECK(all_zero == (step == 1));
        toy_program_make(&t->shape, layers, 4, &t->program);
    }
    return toy_reports(t, 2);
}

static void a_unit_that_no_window_reduces_has_gradient_zero(void **unused)
{
    (void)unused;
    for (uint32_t world = 1; world <= 2; world++) {
        toy_config config = square(world, 1, FSDP_ACCUMULATE_NONE);
        config.own_program = false;
        config.steps = 2;
        toy_assert_run(&config, leave_a_layer_out_of_the_second_step, NULL, base);
    }
}

/* ---- Passes of the caller's own ---- */

/* Each world and accumulation: depth 0 against the deeper ones and against the plain loop. */
static void check_own_pass(void (*make)(const toy_shape *, toy_program *), bool tied, uint32_t n_reductions)
{
    for (uint32_t world = 1; world <= 3; world++) {
        for (int accumulation = 0; accumulation < 3; accumulation++) {
            if (TOY_REDUCED && accumulation + 1 != (int)world) continue;
            toy_config config = square(world, 0, (fsdp_accumulation)accumulation);
            config.declare = true;
            config.shape.tied = tied;
            toy_shape shape;
            toy_shape_make(&config.shape, &shape);
            make(&shape, &config.program);
            TOY_CASE("world %u, accumulation %d:", world, accumulation);
            toy_assert_run(&config, NULL, NULL, base);
            uint32_t n_reduced = accumulation == FSDP_ACCUMULATE_REDUCE_EACH ? config.micro_steps : 1;
            if (accumulation != FSDP_ACCUMULATE_KEEP_FULL)
                assert_int_equal(base[0].stats.reductions, config.steps * n_reduced * n_reductions);
            run_plain(&config);
            toy_assert_plain(&base[0], &plain[0]);
            config.values = false;
            for (uint32_t k = 0; k < 2; k++) {
                config.depth = k == 0 ? 1 + (world + (uint32_t)accumulation) % 3 : 4;
                jitter(&config, world * 3 + (uint32_t)accumulation + 4 * k);
                config.pace = (world + k) % 3 == 0 ? TOY_HOOK_BY_HOOK : TOY_AHEAD;
                config.reduce_comm = config.depth == 3;
                TOY_CASE("world %u, accumulation %d, depth %u:", world, accumulation, config.depth);
                toy_assert_run(&config, NULL, NULL, other);
                toy_assert_same(&other[0], &base[0]);
                assert_int_equal(other[0].stats.off_plan_hooks, 0);
                assert_int_equal(other[0].stats.off_plan_places, 0);
                toy_free(other);
            }
            free_results(NULL);
        }
    }
}

static void windows_may_overlap_nest_and_recompute(void **unused)
{
    (void)unused;
    check_own_pass(toy_program_windows, false, 6);
    check_own_pass(toy_program_windows, true, 5);
}

static void a_unit_may_be_visited_and_reduced_again_in_a_micro_step(void **unused)
{
    (void)unused;
    check_own_pass(toy_program_again, false, 10);
}

static void a_second_stream_takes_part_in_windows(void **unused)
{
    (void)unused;
    check_own_pass(toy_program_two_streams, false, 7);
    check_own_pass(toy_program_two_streams, true, 6);
}

static void a_second_stream_may_join_again_for_gradients(void **unused)
{
    (void)unused;
    check_own_pass(toy_program_late_gradients, false, 7);
}

/* Every other micro-step on another stream, with nothing but the library between the two. */
static void micro_steps_may_take_turns_on_two_streams(void **unused)
{
    (void)unused;
    for (uint32_t k = 0; k < 8; k++) {
        toy_config config = toy_config_default();
        config.world = 1 + k % 2;
        config.micro_steps = 2 + k % 3;
        config.depth = k % 4;
        config.accumulation = k / 2 % 2 ? FSDP_ACCUMULATE_REDUCE_EACH : FSDP_ACCUMULATE_KEEP_FULL;
        config.shape.tied = k % 3 == 0;
        config.debug = FSDP_DEBUG_POISON;
        TOY_CASE("case %u:", k);
        toy_assert_run(&config, NULL, NULL, base);
        config.alternate = true;
        config.jitter_ns = 200000;
        config.jitter_seed = k;
        toy_assert_run(&config, NULL, NULL, other);
        toy_assert_same(&other[0], &base[0]);
        free_results(NULL);
    }
}

/* ---- Optimizers of the caller's own ---- */

static void own_optimizers_update_what_the_librarys_would(void **unused)
{
    (void)unused;
    for (uint32_t world = 1; world <= 4; world++) {
        toy_config config = toy_config_default();
        config.world = world;
        config.depth = world % 3;
        config.grad_sum = world % 2;
        config.shape.tied = config.shape.frozen_layer = world > 2;
        jitter(&config, world);
        config.values = true;
        config.debug = FSDP_DEBUG_POISON;
        config.steps = 8;
        TOY_CASE("world %u:", world);
        toy_assert_run(&config, NULL, NULL, base);
        config.optimizer = TOY_OWN_ADAMW;
        toy_assert_run(&config, NULL, NULL, other);
        assert_int_equal(other[0].hash, base[0].hash);
        assert_memory_equal(other[0].master, base[0].master, base[0].n_master * sizeof(float));
        toy_free(other);
        config.optimizer = TOY_OWN_SGD;
        toy_assert_run(&config, NULL, NULL, other);
        run_plain(&config);
        memset(plain[0].loss, 0, sizeof plain[0].loss); /* without AdamW there are no reports */
        toy_assert_plain(&other[0], &plain[0]);
        assert_int_not_equal(other[0].hash, base[0].hash);
        free_results(NULL);
    }
}

/* ---- Giving up ---- */

static fsdp_status check_nothing_is_left(toy *t)
{
    fsdp_alloc_stats gather = FSDP_ALLOC_STATS_INIT, grad = FSDP_ALLOC_STATS_INIT;
    uint64_t held = 0;
    for (size_t i = 0; i < t->model->n_units; i++)
        if (t->model->units[i]->config.reshard == FSDP_RESHARD_NEVER && t->model->units[i]->full != NULL)
            held += t->model->units[i]->full->bytes;
    TOY_TRY(fsdp_allocator_stats(t->model->gather_pool, &gather));
    TOY_TRY(fsdp_allocator_stats(t->model->grad_pool, &grad));
    TOY_CHECK(gather.allocated == held);
    TOY_CHECK(grad.allocated == 0);
    TOY_CHECK(t->model->n_open == 0 && t->model->n_grads == 0 && t->s->n_open == 0 && t->second->n_open == 0);
    return FSDP_OK;
}

/* The k-th place to stop: each line of the last micro-step, each of the first, after each micro-step, in an evaluation, in
 * an empty update without AdamW. *out_end: there are no more. */
static fsdp_status stop_somewhere(toy *t, uint32_t k, bool *out_end)
{
    uint32_t n = t->program.n + 1, last = t->config->micro_steps - 1;
    *out_end = false;
    if (k < 2 * n) {
        uint32_t index = k < n ? last : 0;
        for (uint32_t i = 0; i < index; i++) TOY_TRY(toy_micro(t, i));
        TOY_TRY(toy_pass_begin(t, index));
        TOY_TRY(toy_play(t, &t->program, 0, k % n, toy_sample(t, index)));
        TOY_TRY(toy_sums(t));
    } else if (k < 2 * n + t->config->micro_steps) {
        for (uint32_t i = 0; i <= k - 2 * n; i++) TOY_TRY(toy_micro(t, i));
    } else if (k == 2 * n + t->config->micro_steps) {
        fsdp_pass_args args = FSDP_PASS_ARGS_INIT;
        args.pass = FSDP_PASS_EVAL;
        TOY_TRY(fsdp_pass_begin(t->model, &args, t->s));
        TOY_TRY(toy_play(t, &t->program, 0, t->program.n_forward / 2, 0));
    } else {
        *out_end = true;
        if (t->config->optimizer != TOY_ADAMW) {
            TOY_TRY(fsdp_update_begin(t->model, t->s));
            TOY_CHECK(fsdp_pass_abort(t->model, t->s) == FSDP_ERR_STATE); /* who has begun to write ends it */
            TOY_TRY(fsdp_update_end(t->model, t->s));
        }
    }
    TOY_TRY(fsdp_pass_abort(t->model, t->s));
    return check_nothing_is_left(t);
}

static fsdp_status train_with_stops(toy *t)
{
    fsdp_counters filled = FSDP_COUNTERS_INIT, counters = FSDP_COUNTERS_INIT;
    uint32_t k = 0, stride = *(const uint32_t *)t->arg;
    TOY_TRY(fsdp_context_counters(t->ctx, &filled)); /* values go through pinned staging, taken and given back */
    bool end = false;
    while (t->n_updates < t->config->steps) {
        for (int twice = 0; twice < 2 && !end; twice++, k += stride) TOY_TRY(stop_somewhere(t, k, &end));
        TOY_TRY(toy_step(t));
    }
    TOY_CHECK(end); /* enough steps for all places */
    TOY_TRY(fsdp_context_counters(t->ctx, &counters));
    TOY_CHECK(counters.device_bytes_peak == t->result->predicted.total + t->result->room_bytes);
    TOY_CHECK(counters.allocations == filled.allocations);
    return toy_finish(t);
}

static void check_stops(toy_config config, uint32_t stride)
{
    toy_shape shape;
    toy_program program;
    toy_resolve(&config, &shape, &program);
    config.steps = (2 * program.n + 4 + config.micro_steps) / stride / 2 + 2;
    TOY_CASE("world %u, depth %u, accumulation %d, lines %u:", config.world, config.depth, (int)config.accumulation,
             program.n);
    toy_assert_run(&config, NULL, NULL, base);
    toy_assert_run(&config, train_with_stops, &stride, other);
    toy_assert_same(&other[0], &base[0]);
    free_results(NULL);
}

static void a_step_given_up_anywhere_has_never_begun(void **unused)
{
    (void)unused;
    for (uint32_t k = 0; k < 12; k++) {
        if (TOY_REDUCED && k % 4 != 0) continue;
        toy_config config = square(1 + k % 3, k % 5, (fsdp_accumulation)((k + k / 3) % 3));
        toy_shape shape;
        config.shape.tied = k % 2;
        config.optimizer = k == 5 ? TOY_OWN_SGD : TOY_ADAMW;
        jitter(&config, k);
        config.values = false;
        config.own_program = config.declare = k % 4 > 1;
        toy_shape_make(&config.shape, &shape);
        (k % 4 == 2 ? toy_program_two_streams : toy_program_windows)(&shape, &config.program);
        check_stops(config, TOY_REDUCED ? 7 : 1 + k % 3);
    }
}

/* Alone, on its shard: what the caller does not write is not what the last step left, but NaN. */
static fsdp_status hand_out_unzeroed(toy *t)
{
    fsdp_pass_args args = FSDP_PASS_ARGS_INIT;
    fsdp_view view = FSDP_VIEW_INIT;
    float *values = calloc(t->result->n_master, sizeof *values);
    uint64_t n_before = 0, n_nan = 0;
    TOY_CHECK(values != NULL);
    TOY_TRY(toy_step(t));
    TOY_TRY(toy_values(t, FSDP_VALUE_GRADIENT, values));
    for (uint64_t i = 0; i < t->result->n_master; i++) n_before += isnan(values[i]) != 0;
    t->unit[2]->config.zero_grads = false;
    TOY_TRY(fsdp_pass_begin(t->model, &args, t->s));
    TOY_TRY(fsdp_backward_begin(t->unit[2], t->s, &view));
    TOY_CHECK(!view.grads_zeroed);
    TOY_TRY(fsdp_pass_abort(t->model, t->s));
    t->unit[2]->config.zero_grads = true;
    TOY_TRY(toy_values(t, FSDP_VALUE_GRADIENT, values));
    for (uint64_t i = 0; i < t->result->n_master; i++) n_nan += isnan(values[i]) != 0;
    free(values);
    uint64_t elems = 0;
    for (uint32_t i = 0; i < t->shape.unit[2].n_params; i++)
        if (!t->shape.unit[2].param[i].frozen) elems += t->shape.unit[2].param[i].elems;
    TOY_CHECK(n_before == 0 && elems > 0 && n_nan == elems);
    while (t->n_updates < t->config->steps) TOY_TRY(toy_step(t));
    return toy_finish(t);
}

static void a_shard_that_is_handed_out_unzeroed_is_poisoned(void **unused)
{
    (void)unused;
    toy_config config = square(1, 1, FSDP_ACCUMULATE_NONE);
    config.own_program = false;
    config.steps = 3;
    toy_assert_run(&config, hand_out_unzeroed, NULL, base);
    run_plain(&config);
    toy_assert_plain(&base[0], &plain[0]);
}

int main(int n_args, char **args)
{
    toy_always_processes = n_args > 1 && strcmp(args[1], "processes") == 0;
    toy_always_staged = n_args > 1 && strcmp(args[1], "staged") == 0;
#define PASSES(name) cmocka_unit_test_setup_teardown(name, toy_deadline, free_results)
    const struct CMUnitTest tests[] = {
        PASSES(off_plan_is_the_same_order_declared),
        PASSES(any_order_of_layers_is_the_same_order_declared),
        PASSES(a_unit_that_no_window_reduces_has_gradient_zero),
        PASSES(units_gathered_ahead_make_room_for_open_ones),
        PASSES(a_hook_without_room_changes_nothing),
        PASSES(a_second_reduction_needs_a_pass_that_says_so),
        PASSES(windows_may_overlap_nest_and_recompute),
        PASSES(a_unit_may_be_visited_and_reduced_again_in_a_micro_step),
        PASSES(a_second_stream_takes_part_in_windows),
        PASSES(a_second_stream_may_join_again_for_gradients),
        PASSES(micro_steps_may_take_turns_on_two_streams),
        PASSES(own_optimizers_update_what_the_librarys_would),
        PASSES(a_step_given_up_anywhere_has_never_begun),
        PASSES(a_shard_that_is_handed_out_unzeroed_is_poisoned),
    };
    return cmocka_run_group_tests_name("passes", tests, NULL, NULL);
}
