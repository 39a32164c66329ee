/* SPDX-License-Identifier: MIT */
/* Ranks without data: fsdp_pass_idle in place of a micro-step must end in the bits of a micro-step whose gradients and sums
 * are zero, make the same collectives as the ranks that have data, and leave no race. */
#include "toy_assert.h"
#include "toy_programs.h"

#include "sharding/model.h"

static toy_result idle[TOY_WORLD], zero[TOY_WORLD];

static int free_results(void **unused)
{
    (void)unused;
    toy_free(idle);
    toy_free(zero);
    return 0;
}

/* Who has no data when. */
typedef struct plan {
    bool library;   /* fsdp_pass_idle; false: the hooks and the forward kernels, and no kernel that writes a gradient */
    uint32_t seed;  /* 0: all ranks but the first in the last micro-step of each step; else at random */
    bool undefined; /* the policy hands gradients out as they lie */
    uint32_t from_step; /* before it everybody has data */
} plan;

static bool has_no_data(const toy *t, uint32_t index)
{
    const plan *p = t->arg;
    uint32_t world = t->config->world, step = (uint32_t)t->n_updates;
    if (step < p->from_step) return false;
    if (p->seed == 0) return (t->rank > 0 || world == 1) && index + 1 == t->config->micro_steps;
    uint32_t x = ((p->seed * 64 + step) * 16 + index) * TOY_WORLD + t->rank;
    x = x * 2654435761u, x ^= x >> 15, x *= 2246822519u;
    return (x >> 20) % 2 == 0;
}

static bool writes_gradients(const toy_line *line)
{
    bool kernel = line->op == TOY_KERNEL || line->op == TOY_KERNEL_SECOND;
    return kernel && line->kernel >= TOY_HEAD_BACK && line->kernel <= TOY_EMBED_BACK;
}

static fsdp_status play_without_gradients(toy *t, uint32_t end, uint64_t sample)
{
    for (uint32_t i = 0; i < end; i++)
        if (!writes_gradients(&t->program.line[i])) TOY_TRY(toy_play(t, &t->program, i, i + 1, sample));
    return FSDP_OK;
}

static void set_zero_grads(toy *t, bool on)
{
    for (uint32_t u = 0; u < t->shape.n_units; u++) t->unit[u]->config.zero_grads = on;
}

static fsdp_status micro(toy *t, uint32_t index)
{
    const plan *p = t->arg;
    if (!has_no_data(t, index)) return toy_micro(t, index);
    if (!p->library) {
        TOY_TRY(toy_pass_begin(t, index));
        TOY_TRY(play_without_gradients(t, t->program.n, toy_sample(t, index)));
        TOY_TRY(fsdp_pass_end(t->model, t->s));
        return FSDP_OK;
    }
    fsdp_pass_args args = FSDP_PASS_ARGS_INIT;
    args.pass = t->pass;
    args.index = index;
    args.count = t->config->micro_steps;
    args.next = t->config->eval == TOY_EVAL_NAMED ? FSDP_PASS_EVAL : t->pass;
    if (p->undefined) set_zero_grads(t, false);
    TOY_TRY(fsdp_pass_idle(t->model, &args, t->s));
    if (p->undefined) set_zero_grads(t, true);
    TOY_CHECK(t->model->n_open == 0 && t->s->n_open == 0 && t->model->phase == FSDP__IDLE);
    TOY_CHECK(t->model->update_due == (index + 1 == args.count) && t->model->mid_step != t->model->update_due);
    return FSDP_OK;
}

static fsdp_status evaluate(toy *t)
{
    const plan *p = t->arg;
    if (!has_no_data(t, t->config->micro_steps - 1)) return toy_evaluate(t);
    fsdp_pass_args args = FSDP_PASS_ARGS_INIT;
    args.pass = FSDP_PASS_EVAL;
    args.next = t->pass;
    if (p->library) {
        TOY_TRY(fsdp_pass_idle(t->model, &args, t->s));
        TOY_CHECK(t->model->phase == FSDP__IDLE && !t->model->update_due && !t->model->mid_step);
        return FSDP_OK;
    }
    TOY_TRY(fsdp_pass_begin(t->model, &args, t->s));
    TOY_TRY(play_without_gradients(t, t->program.n_forward, t->rank));
    TOY_TRY(fsdp_pass_end(t->model, t->s));
    return FSDP_OK;
}

static fsdp_status train(toy *t)
{
    while (t->n_updates < t->config->steps) {
        if (t->config->eval != TOY_EVAL_NONE) TOY_TRY(evaluate(t));
        for (uint32_t i = 0; i < t->config->micro_steps; i++) TOY_TRY(micro(t, i));
        TOY_TRY(toy_update(t));
        if (t->n_updates > 2) TOY_TRY(toy_reports(t, t->n_updates - 2));
    }
    return toy_finish(t);
}

static void assert_no_race(const toy_config *config, const toy_result *results)
{
    for (uint32_t r = 0; r < config->world && config->trace; r++) {
        if (results[r].races != 0) fail_msg("%s rank %u: %s", toy_case, r, results[r].race);
        assert_true(results[r].n_records > 0);
    }
}

/* Both ways, the same training; and on every rank the same collectives, for the same units. */
static void check(toy_config config, uint32_t seed, bool undefined)
{
    plan with = {true, seed, undefined, 1}, without = {false, seed, false, 1};
    config.touch = config.trace;
    toy_assert_run(&config, train, &without, zero);
    toy_assert_run(&config, train, &with, idle);
    toy_assert_same(&idle[0], &zero[0]);
    if (config.values) assert_memory_equal(idle[0].master, zero[0].master, zero[0].n_master * sizeof(float));
    for (uint32_t r = 0; r < config.world; r++) {
        const toy_result *x = &idle[r];
        bool same = x->done.collectives == zero[0].done.collectives && x->stats.gathers == zero[0].stats.gathers &&
                    x->stats.reductions == zero[0].stats.reductions && x->stats.off_plan_hooks == 0 &&
                    x->stats.gather_trace == zero[r].stats.gather_trace &&
                    x->stats.grad_trace == zero[r].stats.grad_trace;
        if (!same)
            fail_msg("%s rank %u: %llu collectives, %llu gathers, %llu reductions, not %llu, %llu and %llu, or others",
                     toy_case, r, (unsigned long long)x->done.collectives, (unsigned long long)x->stats.gathers,
                     (unsigned long long)x->stats.reductions, (unsigned long long)zero[0].done.collectives,
                     (unsigned long long)zero[0].stats.gathers, (unsigned long long)zero[0].stats.reductions);
    }
    assert_no_race(&config, idle);
    free_results(NULL);
}

static toy_config config_of(uint32_t world, uint32_t depth, uint32_t accumulation)
{
    toy_config config = toy_config_default();
    config.world = world;
    config.depth = depth;
    config.accumulation = (fsdp_accumulation)accumulation;
    config.micro_steps = accumulation == FSDP_ACCUMULATE_NONE ? 1 : 2 + world % 2;
    config.grad_sum = (world + depth) % 2;
    config.max_norm = depth % 2 ? 0.5f : 0.0f;
    config.debug = FSDP_DEBUG_POISON;
    return config;
}

static void a_rank_without_data_is_a_rank_with_gradients_of_zero(void **unused)
{
    (void)unused;
    for (uint32_t k = 0; k < 4 * 4 * 3; k++) {
        if (TOY_REDUCED && k % 5 != 1) continue;
        toy_config config = config_of(1 + k % 4, k / 4 % 4, k / 16);
        config.shape.tied = k / 2 % 2; /* a held unit */
        config.shape.frozen_layer = k % 3 == 0;
        config.shape.mixed = k % 5 == 0;
        config.reduce_comm = k % 3 == 1;
        config.prefetch_bytes = k % 7 == 3 ? 8192 : 0;
        config.jitter_ns = k % 2 ? 30000 : 0;
        config.jitter_seed = k;
        config.values = k % 2 == 0;
        config.trace = k % 3 == 2;
        TOY_CASE("world %u, depth %u, accumulation %d:", config.world, config.depth, (int)config.accumulation);
        check(config, k % 2 ? k : 0, false);
    }
}

/* Nothing that lay there before comes into the sum; NaN does, thanks to poison. */
static void gradients_that_are_handed_out_undefined_are_zero_too(void **unused)
{
    (void)unused;
    for (uint32_t k = 0; k < 8; k++) {
        if (TOY_REDUCED && k % 3 != 0) continue;
        toy_config config = config_of(1 + k % 4, k % 3, k % 2); /* kept gradients come with zeros */
        toy_shape shape;
        config.shape.square = true;
        config.shape.tied = k / 4 % 2;
        config.own_program = config.declare = k > 3;
        toy_shape_make(&config.shape, &shape);
        toy_program_windows(&shape, &config.program);
        config.trace = true;
        TOY_CASE("case %u:", k);
        check(config, k % 4 > 1 ? k : 0, true);
    }
}

static void own_passes_with_nested_windows_go_by_their_plan(void **unused)
{
    (void)unused;
    static void (*const make[])(const toy_shape *, toy_program *) = {
        toy_program_windows, toy_program_again, toy_program_late_gradients, toy_program_two_streams};
    for (uint32_t k = 0; k < 4 * 9; k++) {
        if (TOY_REDUCED && k % 7 != 2) continue;
        toy_config config = config_of(1 + k % 3, k % 4, k / 3 % 3);
        toy_shape shape;
        config.shape.square = true;
        config.shape.tied = k % 4 == 0;
        config.reduce_comm = k % 5 == 2;
        config.own_program = config.declare = true;
        toy_shape_make(&config.shape, &shape);
        make[k / 9](&shape, &config.program);
        config.jitter_ns = k % 3 == 0 ? 30000 : 0;
        config.jitter_seed = k;
        config.trace = k % 3 == 1;
        TOY_CASE("pass %u, world %u, depth %u, accumulation %d:", k / 9, config.world, config.depth,
                 (int)config.accumulation);
        check(config, k % 2 ? k : 0, false);
    }
}

static void evaluations_may_be_without_data(void **unused)
{
    (void)unused;
    for (uint32_t k = 0; k < 8; k++) {
        toy_config config = config_of(1 + k % 4, k % 4, k % 3);
        config.eval = k % 3 == 1 ? TOY_EVAL_SURPRISE : TOY_EVAL_NAMED;
        config.shape.tied = k % 2;
        config.trace = k % 4 == 3;
        config.jitter_ns = 20000;
        config.jitter_seed = k;
        if (config.eval == TOY_EVAL_SURPRISE) config.depth = 0; /* `next` is said by toy_evaluate and differs here */
        TOY_CASE("case %u:", k);
        check(config, k % 2 ? k : 0, false);
    }
}

/* ---- Errors ---- */

typedef struct snapshot {
    fsdp_counters counters;
    fsdp__phase phase;
    bool update_due, mid_step;
    fsdp_pass_args args;
} snapshot;

static fsdp_status take_snapshot(toy *t, snapshot *out)
{
    memset(out, 0, sizeof *out);
    out->counters = (fsdp_counters)FSDP_COUNTERS_INIT;
    TOY_TRY(fsdp_context_counters(t->ctx, &out->counters));
    out->phase = t->model->phase;
    out->update_due = t->model->update_due;
    out->mid_step = t->model->mid_step;
    out->args = t->model->args;
    return FSDP_OK;
}

static fsdp_status is_refused(toy *t, const fsdp_pass_args *args, fsdp_status expected, const char *says)
{
    snapshot before, after;
    TOY_TRY(take_snapshot(t, &before));
    TOY_CHECK(fsdp_pass_idle(t->model, args, t->s) == expected);
    TOY_CHECK(strstr(fsdp_last_error(), says) != NULL);
    TOY_TRY(take_snapshot(t, &after));
    TOY_CHECK(memcmp(&before, &after, sizeof before) == 0);
    return FSDP_OK;
}

static fsdp_status refuse(toy *t)
{
    fsdp_pass_args good = FSDP_PASS_ARGS_INIT;
    good.count = t->config->micro_steps;
    fsdp_pass_args bad = good;
    TOY_CHECK(fsdp_pass_idle(NULL, &good, t->s) == FSDP_ERR_ARG);
    TOY_CHECK(fsdp_pass_idle(t->model, &good, NULL) == FSDP_ERR_ARG);
    TOY_TRY(is_refused(t, NULL, FSDP_ERR_ARG, "args"));
    bad.pass = 7;
    TOY_TRY(is_refused(t, &bad, FSDP_ERR_ARG, "pass 7"));
    bad = good, bad.next = -2;
    TOY_TRY(is_refused(t, &bad, FSDP_ERR_ARG, "next -2"));
    bad = good, bad.index = bad.count;
    TOY_TRY(is_refused(t, &bad, FSDP_ERR_ARG, "micro-step"));
    bad = good, bad.size = 3;
    TOY_TRY(is_refused(t, &bad, FSDP_ERR_ARG, "size"));
    TOY_TRY(toy_pass_begin(t, 0));
    TOY_TRY(is_refused(t, &good, FSDP_ERR_STATE, "is not ended"));
    TOY_TRY(toy_play(t, &t->program, 0, t->program.n, toy_sample(t, 0)));
    TOY_TRY(toy_sums(t));
    TOY_TRY(fsdp_pass_end(t->model, t->s));
    TOY_TRY(is_refused(t, &good, FSDP_ERR_STATE, "micro-step 0"));
    TOY_TRY(toy_micro(t, 1));
    TOY_TRY(is_refused(t, &good, FSDP_ERR_STATE, "wait for an update"));
    TOY_TRY(toy_update(t));
    t->model->phase = FSDP__IN_UPDATE; /* a bracket of one's own would take a number from the reports */
    TOY_TRY(is_refused(t, &good, FSDP_ERR_STATE, "fsdp_update_end"));
    t->model->phase = FSDP__IDLE;
    t->model->failed = FSDP_ERR_NO_MEMORY; /* as it stands after a failure in the middle */
    TOY_TRY(is_refused(t, &good, FSDP_ERR_NO_MEMORY, "fsdp_pass_abort"));
    TOY_TRY(fsdp_pass_abort(t->model, t->s));
    return toy_train(t);
}

static void what_is_refused_has_not_begun(void **unused)
{
    (void)unused;
    for (uint32_t world = 1; world <= 2; world++) {
        toy_config config = config_of(world, 1, FSDP_ACCUMULATE_REDUCE_EACH);
        config.micro_steps = 2;
        TOY_CASE("world %u:", world);
        toy_assert_run(&config, NULL, NULL, zero);
        toy_assert_run(&config, refuse, NULL, idle);
        toy_assert_same(&idle[0], &zero[0]);
        free_results(NULL);
    }
}

int main(void)
{
#define IDLE(name) cmocka_unit_test_setup_teardown(name, toy_deadline, free_results)
    const struct CMUnitTest tests[] = {
        IDLE(a_rank_without_data_is_a_rank_with_gradients_of_zero),
        IDLE(gradients_that_are_handed_out_undefined_are_zero_too),
        IDLE(own_passes_with_nested_windows_go_by_their_plan),
        IDLE(evaluations_may_be_without_data),
        IDLE(what_is_refused_has_not_begun),
    };
    return cmocka_run_group_tests_name("idle", tests, NULL, NULL);
}
