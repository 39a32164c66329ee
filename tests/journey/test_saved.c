/* SPDX-License-Identifier: MIT */
/* docs/running.md, "Saving and going on": a run with an optimizer of its own, written segment by segment into one file, goes on
 * to the bit, on that number of ranks and on another. The file is memory that the ranks share; ranks are threads. */
#include "toy_assert.h"

#include <stdlib.h>

enum { SAVED_AT = 3, END = 6, MOST_ELEMS = 1 << 16 };

/* The file: every parameter in registration order, each with its two moments. */
typedef struct file {
    float master[MOST_ELEMS], m[MOST_ELEMS], v[MOST_ELEMS];
} file;

typedef struct plan {
    const file *from; /* NULL: begin */
    file *to;         /* NULL: nothing is saved */
    uint32_t until;
} plan;

static file of_four, of_one;
static toy_result straight[TOY_WORLD], other[TOY_WORLD];

/* Where a parameter begins in the file. */
static uint64_t place(const toy *t, const fsdp_param *p)
{
    uint64_t at = 0;
    for (uint32_t u = 0; u < t->shape.n_units; u++) {
        const toy_unit *unit = &t->shape.unit[u];
        for (uint32_t i = 0; i < unit->n_params; at += unit->param[i++].elems)
            if (strcmp(unit->param[i].name, fsdp_param_name(p)) == 0) return at;
    }
    abort();
}

typedef struct reader {
    const toy *t;
    const file *from;
} reader;

static int read_masters(void *arg, const fsdp_param_range *range, void *dst)
{
    const reader *r = arg;
    memcpy(dst, r->from->master + place(r->t, range->param) + range->begin, range->count * sizeof(float));
    return 0;
}

/* Each of this rank's segments: where it lies in the file, and in the toy's own moments. */
static fsdp_status each_segment(toy *t, const plan *p)
{
    uint64_t own = 0;
    for (uint32_t u = 0; u < t->shape.n_units; u++) {
        const fsdp_shard_segment *s;
        uint32_t n;
        TOY_TRY(fsdp_unit_shard(t->unit[u], &s, &n));
        for (uint32_t i = 0; i < n; own += s[i++].count) {
            const uint64_t at = place(t, s[i].param) + s[i].begin, bytes = s[i].count * sizeof(float);
            TOY_CHECK(at + s[i].count <= MOST_ELEMS);
            if (p->from != NULL) {
                memcpy(t->own_m + own, p->from->m + at, bytes);
                memcpy(t->own_v + own, p->from->v + at, bytes);
                continue;
            }
            memcpy(p->to->master + at, s[i].master, bytes);
            memcpy(p->to->m + at, t->own_m + own, bytes);
            memcpy(p->to->v + at, t->own_v + own, bytes);
        }
    }
    return FSDP_OK;
}

static fsdp_status part_of_a_run(toy *t)
{
    const plan *p = t->arg;
    reader r = {t, p->from};
    if (p->from != NULL) {
        TOY_TRY(fsdp_model_fill(t->model, read_masters, &r, FSDP_DTYPE_FP32));
        TOY_TRY(each_segment(t, p));
        t->n_updates = SAVED_AT;
    }
    while (t->n_updates < p->until) TOY_TRY(toy_step(t));
    if (p->to != NULL) {
        TOY_TRY(fsdp_update_begin(t->model, t->s));
        TOY_TRY(fsdp_stream_drain_host(t->s, toy_timeout_ns));
        TOY_TRY(each_segment(t, p));
        TOY_TRY(fsdp_update_end(t->model, t->s));
    }
    return toy_finish(t);
}

/* Four samples a step, however many ranks. */
static toy_config on_ranks(uint32_t world)
{
    toy_config config = toy_config_default();
    config.world = world;
    config.micro_steps = 4 / world;
    config.accumulation = FSDP_ACCUMULATE_REDUCE_EACH;
    config.optimizer = TOY_OWN_ADAMW;
    config.depth = world == 1 ? 0 : 2;
    return config;
}

static void part(uint32_t world, plan p, toy_result *results)
{
    toy_config config = on_ranks(world);
    toy_assert_run(&config, part_of_a_run, &p, results);
}

static void a_saved_run_goes_on_to_the_bit_on_any_number_of_ranks(void **unused)
{
    (void)unused;
    part(4, (plan){NULL, NULL, END}, straight);
    part(4, (plan){NULL, &of_four, SAVED_AT}, other);
    assert_true(other[0].hash != straight[0].hash);
    for (uint32_t world = 1; world <= 4; world += 3) {
        TOY_CASE("on %u:", world);
        part(world, (plan){&of_four, NULL, END}, other);
        assert_true(other[0].hash == straight[0].hash);
    }
}

static void the_file_does_not_know_how_many_ranks_wrote_it(void **unused)
{
    (void)unused;
    part(4, (plan){NULL, &of_four, SAVED_AT}, other);
    part(1, (plan){NULL, &of_one, SAVED_AT}, other);
    assert_memory_equal(&of_four, &of_one, sizeof of_one);
}

/* After a bracket of the caller's own the next report's number is one further (step.h). */
static fsdp_status save_between_steps(toy *t)
{
    fsdp_step_report report = FSDP_STEP_REPORT_INIT;
    TOY_TRY(toy_step(t));
    TOY_TRY(fsdp_update_begin(t->model, t->s));
    TOY_TRY(fsdp_update_end(t->model, t->s));
    TOY_TRY(toy_micro(t, 0));
    TOY_TRY(toy_update(t));
    TOY_TRY(fsdp_step_report_get(t->model, 3, toy_timeout_ns, &report));
    TOY_CHECK(report.step == 3 && report.updates == 2);
    TOY_CHECK(fsdp_step_report_get(t->model, 2, toy_timeout_ns, &report) == FSDP_ERR_ARG);
    return FSDP_OK;
}

static void a_bracket_without_gradients_takes_a_number(void **unused)
{
    (void)unused;
    toy_config config = toy_config_default();
    config.world = 2;
    toy_assert_run(&config, save_between_steps, NULL, other);
}

static int free_results(void **unused)
{
    (void)unused;
    toy_free(straight);
    toy_free(other);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(a_saved_run_goes_on_to_the_bit_on_any_number_of_ranks, toy_deadline),
        cmocka_unit_test_setup(the_file_does_not_know_how_many_ranks_wrote_it, toy_deadline),
        cmocka_unit_test_setup(a_bracket_without_gradients_takes_a_number, toy_deadline),
    };
    return cmocka_run_group_tests(tests, NULL, free_results);
}
