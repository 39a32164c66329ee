/* SPDX-License-Identifier: MIT */
/* What the host decides on a GPU is what it decides elsewhere: the places of units in their pools are those of the sim backend,
 * the bytes are those predicted and those that the GPU has lost, orders that nobody announced give the bits of the same orders
 * announced, a step given up has never begun, and values come back as they were set.
 *
 *     test_gpu_plan [host]       on the host backend */
#include "gpu_toy.h"
#include "toy_assert.h"
#include "toy_programs.h"

#include <cuda_runtime_api.h>
#include <stdlib.h>

#include "lib/convert.h"
#include "sharding/model.h"

static toy_result results[TOY_TRAININGS * GPU_WORLD], other[TOY_TRAININGS * GPU_WORLD], sim[1];

static int free_results(void **unused)
{
    (void)unused;
    toy_free(results);
    toy_free(other);
    toy_free(sim);
    return 0;
}

static void run_each(const toy_config *configs, uint32_t n, toy_script script, toy_result *to)
{
    bool all = toy_run_each(configs, n, script, NULL, to);
    for (uint32_t i = 0; i < n && !all; i++)
        if (to[i * configs->world].error[0] != '\0')
            fail_msg("world %u, training %u: %s", configs->world, i, to[i * configs->world].error);
}

static void own_pass(toy_config *config, void (*make)(const toy_shape *, toy_program *))
{
    toy_shape shape;
    config->shape.square = config->own_program = config->declare = true;
    toy_shape_make(&config->shape, &shape);
    make(&shape, &config->program);
}

/* ---- Places ---- */

/* The same training on sim with the device's page and alignment. */
static toy_config on_sim(const toy_config *config)
{
    bool gpu = gpu_toy == &gpu_toy_device;
    toy_config on = *config;
    on.device = NULL;
    on.sim = true;
    on.jitter_ns = 0;
    on.sim_alignment = gpu ? 512 : 4096;
    on.sim_granularity = gpu ? 2097152 : 4096;
    return on;
}

static uint32_t make_plans(uint32_t world, toy_config *configs)
{
    enum { N = 9 };
    for (uint32_t i = 0; i < N; i++) {
        configs[i] = gpu_toy_config(world);
        configs[i].steps = 4;
        configs[i].depth = i % 3;
        configs[i].grad_buffers = 1 + i % 2;
        configs[i].jitter_ns = i % 2 ? 30000 : 0;
        configs[i].shape.tied = i % 2;
        configs[i].micro_steps = 1 + i / 3;
        if (i >= 3) configs[i].accumulation = i % 2 ? FSDP_ACCUMULATE_KEEP_FULL : FSDP_ACCUMULATE_REDUCE_EACH;
        if (i == 1 || i == 4 || i == 6) configs[i].shape.compute = configs[i].shape.grad = FSDP_DTYPE_BF16;
    }
    own_pass(&configs[5], toy_program_windows);
    own_pass(&configs[7], toy_program_two_streams);
    own_pass(&configs[8], toy_program_again);
    configs[8].accumulation = FSDP_ACCUMULATE_REDUCE_EACH;
    return N;
}

static void places_and_bytes_are_those_of_sim(void **unused)
{
    (void)unused;
    static toy_config configs[TOY_TRAININGS];
    for (uint32_t world = 1; world <= 2; world++) {
        uint32_t n = make_plans(world, configs);
        run_each(configs, n, NULL, results);
        for (uint32_t i = 0; i < n; i++) {
            const toy_result *r = &results[i * world];
            toy_config config = on_sim(&configs[i]);
            TOY_CASE("world %u, plan %u:", world, i);
            if (!toy_run(&config, NULL, NULL, sim)) fail_msg("%s on sim: %s", toy_case, sim[0].error);
            assert_memory_equal(&r->predicted, &sim[0].predicted, sizeof r->predicted);
            assert_memory_equal(&r->memory, &r->predicted, sizeof r->memory);
            if (r->sealed.device_bytes_peak != r->memory.total + r->room_bytes)
                fail_msg("%s %llu bytes are taken, %llu predicted", toy_case,
                         (unsigned long long)(r->sealed.device_bytes_peak - r->room_bytes),
                         (unsigned long long)r->memory.total);
            assert_int_equal(r->done.device_bytes_peak, r->sealed.device_bytes_peak);
            const fsdp_model_stats *a = &r->stats, *b = &sim[0].stats;
            if (a->gather_trace != b->gather_trace || a->grad_trace != b->grad_trace)
                fail_msg("%s places differ from sim's: gather %016llx, %016llx; grad %016llx, %016llx", toy_case,
                         (unsigned long long)a->gather_trace, (unsigned long long)b->gather_trace,
                         (unsigned long long)a->grad_trace, (unsigned long long)b->grad_trace);
            assert_int_equal(a->gathers, b->gathers);
            assert_int_equal(a->reductions, b->reductions);
            assert_int_equal(a->off_plan_places, b->off_plan_places);
        }
    }
}

/* ---- Bytes ---- */

static fsdp_status device_free(toy *t, uint64_t *out_bytes)
{
    size_t free_bytes = 0, all = 0;
    *out_bytes = 0;
    if (gpu_toy == &gpu_toy_device) TOY_CHECK(cudaMemGetInfo(&free_bytes, &all) == cudaSuccess);
    *out_bytes = free_bytes;
    return FSDP_OK;
}

/* Exactly, but for page tables of the driver's own: two pages. */
static bool lost_about(uint64_t before, uint64_t after, uint64_t bytes)
{
    uint64_t lost = before - after;
    return gpu_toy != &gpu_toy_device || (before >= after && lost >= bytes && lost - bytes <= 2 * 2097152);
}

static fsdp_status empty_step(toy *t, fsdp_model *model, fsdp_unit *const *units, uint32_t n, fsdp_adamw *opt)
{
    fsdp_pass_args pass = FSDP_PASS_ARGS_INIT;
    fsdp_adamw_args args = FSDP_ADAMW_ARGS_INIT;
    fsdp_view view = FSDP_VIEW_INIT;
    TOY_TRY(fsdp_pass_begin(model, &pass, t->s));
    for (uint32_t u = 0; u < n; u++) {
        TOY_TRY(fsdp_forward_begin(units[u], t->s, &view));
        TOY_TRY(fsdp_forward_end(units[u], t->s));
    }
    for (uint32_t u = n; u-- > 0;) {
        TOY_TRY(fsdp_backward_begin(units[u], t->s, &view));
        TOY_TRY(fsdp_backward_end(units[u], t->s));
    }
    TOY_TRY(fsdp_pass_end(model, t->s));
    TOY_TRY(fsdp_adamw_step(opt, &args, t->s));
    TOY_TRY(fsdp_stream_drain_host(t->s, toy_timeout_ns));
    return FSDP_OK;
}

/* Another model, of some dozen pages, beside the toy's, which has trained: whatever is loaded late has been. */
static fsdp_status count_a_second_model(toy *t)
{
    enum { UNITS = 3 };
    const uint64_t elems = 3000001;
    fsdp_counters before = FSDP_COUNTERS_INIT, sealed = FSDP_COUNTERS_INIT, after = FSDP_COUNTERS_INIT;
    fsdp_memory predicted = FSDP_MEMORY_INIT;
    uint64_t free_before, free_sealed, free_after;
    fsdp_model *model;
    fsdp_unit *units[UNITS];
    fsdp_adamw *opt;
    fsdp_status status = toy_train(t);
    if (status != FSDP_OK) return status;
    TOY_TRY(fsdp_context_counters(t->ctx, &before));
    if ((status = device_free(t, &free_before)) != FSDP_OK) return status;
    TOY_TRY(fsdp_model_create(t->ctx, NULL, &model));
    for (uint32_t u = 0; u < UNITS; u++) {
        static const char *const names[UNITS] = {"one", "two", "three"};
        TOY_TRY(fsdp_model_add_unit(model, names[u], NULL, &units[u]));
        TOY_TRY(fsdp_unit_add_param(units[u], names[u], 1, &elems, NULL, NULL));
    }
    TOY_TRY(fsdp_adamw_create(model, NULL, &opt));
    TOY_TRY(fsdp_model_predict(model, &predicted));
    TOY_TRY(fsdp_model_seal(model));
    TOY_TRY(fsdp_context_counters(t->ctx, &sealed));
    if ((status = device_free(t, &free_sealed)) != FSDP_OK) return status;
    TOY_CHECK(sealed.device_bytes - before.device_bytes == predicted.total);
    TOY_CHECK(lost_about(free_before, free_sealed, predicted.total));
    for (int i = 0; i < 3 && status == FSDP_OK; i++) status = empty_step(t, model, units, UNITS, opt);
    if (status != FSDP_OK || (status = device_free(t, &free_after)) != FSDP_OK) return status;
    TOY_TRY(fsdp_context_counters(t->ctx, &after));
    TOY_CHECK(after.allocations == sealed.allocations && lost_about(free_sealed, free_after, 0));
    TOY_TRY(fsdp_model_destroy(model));
    TOY_TRY(fsdp_context_counters(t->ctx, &after));
    if ((status = device_free(t, &free_after)) != FSDP_OK) return status;
    TOY_CHECK(after.device_bytes == before.device_bytes && lost_about(free_before, free_after, 0));
    return FSDP_OK;
}

static void the_gpu_loses_what_was_predicted_and_has_it_back(void **unused)
{
    (void)unused;
    toy_config config = gpu_toy_config(1);
    config.steps = 2;
    run_each(&config, 1, count_a_second_model, results);
}

/* ---- Orders ---- */

typedef struct detour {
    uint32_t n, layer[TOY_POSITIONS];
    bool twice; /* some unit is reduced twice */
} detour;

static const detour detours[] = {
    {4, {0, 2, 3, 4}, false},
    {3, {0, 3, 4}, false},
    {6, {0, 1, 1, 2, 3, 4}, true},
    {6, {0, 1, 2, 1, 3, 4}, true},
    {8, {4, 2, 0, 2, 3, 3, 1, 4}, true},
};

enum { DETOURS = sizeof detours / sizeof *detours };

static void orders_nobody_announced_are_the_same_orders_announced(void **unused)
{
    (void)unused;
    static toy_config configs[4 * DETOURS];
    for (uint32_t world = 1; world <= 2; world++) {
        uint32_t n = 0, each = world == 1 ? 4 : 2;
        for (uint32_t i = 0; i < DETOURS; i++) {
            for (uint32_t k = 0; k < 4;
                 k += world == 1 ? 1 : 3, n++) { /* depths 1 and 2, announced and not; two of these */
                toy_config *c = &configs[n];
                toy_shape shape;
                *c = gpu_toy_config(world);
                c->shape.square = c->own_program = true;
                c->declare = k % 2 == 0;
                c->depth = 1 + k / 2;
                c->prefetch_bytes = k == 3 ? 20000 : 0;
                c->debug = FSDP_DEBUG_POISON;
                c->jitter_ns = k % 2 ? 30000 : 0;
                c->accumulation = detours[i].twice ? FSDP_ACCUMULATE_REDUCE_EACH : FSDP_ACCUMULATE_NONE;
                c->micro_steps = detours[i].twice ? 2 : 1;
                toy_shape_make(&c->shape, &shape);
                toy_program_make(&shape, detours[i].layer, detours[i].n, &c->program);
            }
        }
        run_each(configs, n, NULL, results);
        for (uint32_t k = 0; k < n; k++) {
            TOY_CASE("world %u, order %u, run %u:", world, k / each, k % each);
            toy_assert_same(&results[k * world], &results[k / each * each * world]);
            if (k % 2 == 0) assert_int_equal(results[k * world].stats.off_plan_hooks, 0);
            else assert_true(results[k * world].stats.off_plan_hooks > 0);
        }
        free_results(NULL);
    }
}

/* ---- Giving up ---- */

static fsdp_status train_with_stops(toy *t)
{
    uint32_t line = 0;
    while (t->n_updates < t->config->steps) {
        for (int i = 0; i < 3; i++, line = (line + 5) % (t->program.n + 1)) {
            TOY_TRY(toy_pass_begin(t, 0));
            fsdp_status status = toy_play(t, &t->program, 0, line, toy_sample(t, 0));
            if (status != FSDP_OK) return status;
            TOY_TRY(fsdp_pass_abort(t->model, t->s));
            TOY_CHECK(t->model->n_open == 0 && t->model->n_grads == 0 && t->s->n_open == 0);
        }
        TOY_TRY(toy_step(t));
    }
    return toy_finish(t);
}

static void a_step_given_up_has_never_begun(void **unused)
{
    (void)unused;
    toy_config configs[4];
    for (uint32_t world = 1; world <= 2; world++) {
        for (uint32_t i = 0; i < 4; i++) {
            configs[i] = gpu_toy_config(world);
            configs[i].depth = i % 3;
            configs[i].steps = 4;
            configs[i].jitter_ns = i % 2 ? 30000 : 0;
            configs[i].debug = FSDP_DEBUG_POISON;
            configs[i].shape.tied = i % 2;
            if (i == 3) own_pass(&configs[i], toy_program_two_streams);
        }
        run_each(configs, 4, NULL, results);
        run_each(configs, 4, train_with_stops, other);
        for (uint32_t i = 0; i < 4; i++) {
            TOY_CASE("world %u, training %u:", world, i);
            toy_assert_same(&other[i * world], &results[i * world]);
        }
        free_results(NULL);
    }
}

/* ---- Values ---- */

static float through(float value, fsdp_dtype dtype)
{
    unsigned char bytes[4];
    fsdp__store_floats(bytes, &value, 1, dtype);
    fsdp__load_floats(&value, bytes, 1, dtype);
    return value;
}

static fsdp_status set_and_get(toy *t, const toy_unit *unit, const toy_param *param, fsdp_dtype in)
{
    enum { MOST = 6000 };
    static unsigned char set[4 * MOST];
    static float got[MOST];
    fsdp_param *handle = fsdp_model_find_param(t->model, param->name);
    TOY_CHECK(param->elems <= MOST);
    for (uint64_t i = 0; i < param->elems; i++) {
        float value = ((float)((i * 37 + (uint64_t)in * 11) % 1009) - 500.0f) * 0.013f;
        fsdp__store_floats(set + i * fsdp_dtype_bytes(in), &value, 1, in);
    }
    TOY_TRY(fsdp_param_set(handle, set, in));
    for (fsdp_value value = FSDP_VALUE_MASTER; value <= FSDP_VALUE_COMPUTE; value++) {
        TOY_TRY(fsdp_param_get(handle, value, got, FSDP_DTYPE_FP32));
        for (uint64_t i = 0; i < param->elems; i++) {
            float expected;
            fsdp__load_floats(&expected, set + i * fsdp_dtype_bytes(in), 1, in);
            expected = through(expected, unit->master);
            if (value == FSDP_VALUE_COMPUTE) expected = through(expected, param->compute);
            TOY_CHECK(memcmp(&got[i], &expected, sizeof expected) == 0);
        }
    }
    return FSDP_OK;
}

static fsdp_status set_all_and_train(toy *t)
{
    static const fsdp_dtype dtypes[] = {FSDP_DTYPE_FP32, FSDP_DTYPE_BF16, FSDP_DTYPE_FP16};
    uint32_t turn = 0;
    for (uint32_t u = 0; u < t->shape.n_units; u++) {
        for (uint32_t i = 0; i < t->shape.unit[u].n_params; i++, turn++) {
            fsdp_status status = set_and_get(t, &t->shape.unit[u], &t->shape.unit[u].param[i], dtypes[turn % 3]);
            if (status != FSDP_OK) return status;
        }
    }
    float *gradient = calloc(t->result->n_master, sizeof *gradient),
          *moment = calloc(t->result->n_master, sizeof *moment);
    TOY_CHECK(gradient != NULL && moment != NULL);
    TOY_TRY(toy_step(t));
    TOY_TRY(toy_values(t, FSDP_VALUE_GRADIENT, gradient));
    TOY_TRY(toy_values(t, FSDP_VALUE_MOMENT_1, moment));
    uint64_t n_moved = 0;
    for (uint64_t i = 0; i < t->result->n_master; i++) {
        TOY_CHECK(moment[i] == (1.0f - 0.9f) * gradient[i]);
        n_moved += gradient[i] != 0.0f;
    }
    TOY_CHECK(n_moved > t->result->n_master / 2);
    free(gradient);
    free(moment);
    return toy_train(t);
}

static void values_come_back_as_they_were_set(void **unused)
{
    (void)unused;
    toy_config configs[3];
    for (uint32_t world = 1; world <= 4; world *= 2) {
        for (uint32_t i = 0; i < 3; i++) {
            configs[i] = gpu_toy_config(world);
            configs[i].shape.mixed = true;
            configs[i].shape.tied = i == 1;
            configs[i].shape.master = (fsdp_dtype[]){FSDP_DTYPE_FP32, FSDP_DTYPE_BF16, FSDP_DTYPE_FP16}[i];
            configs[i].shape.compute = FSDP_DTYPE_BF16;
        }
        run_each(configs, 3, set_all_and_train, results);
        for (uint32_t i = 0; i < 3; i++)
            for (uint32_t r = 1; r < world; r++) assert_int_equal(results[i * world + r].hash, results[i * world].hash);
    }
}

int main(int n_args, char **args)
{
    if (!gpu_toy_begin("test_gpu_plan", n_args, args)) return 77;
#define PLAN(name) cmocka_unit_test_setup_teardown(name, gpu_toy_deadline, free_results)
    const struct CMUnitTest tests[] = {
        PLAN(places_and_bytes_are_those_of_sim),
        PLAN(the_gpu_loses_what_was_predicted_and_has_it_back),
        PLAN(orders_nobody_announced_are_the_same_orders_announced),
        PLAN(a_step_given_up_has_never_begun),
        PLAN(values_come_back_as_they_were_set),
    };
    return cmocka_run_group_tests_name("plans on a GPU", tests, NULL, NULL);
}
