/* SPDX-License-Identifier: MIT */
/* A world of one: what a step still enqueues where there is nobody to gather from and to sum with, call by call, and what it
 * takes of memory. The tables are those of docs/streams.md. */
#include "journey.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "context.h"
#include "sharding/model.h"

enum { ELEMS = 1024, BLOCKS = 3 };

/* ---- Counts ---- */

typedef struct row {
    const char *name;
    fsdp_dtype compute, grad, reduce;
    fsdp_accumulation accumulation;
    uint32_t n_micro;
    bool held;
    /* Of a step, from the second on. */
    uint64_t casts, zeros, adds;
    uint64_t records[3], waits[3]; /* the caller's s, the gather lane, the reduce lane */
    uint64_t grad_bytes;           /* of one element, in all buffers */
} row;

#define F32 FSDP_DTYPE_FP32
#define B16 FSDP_DTYPE_BF16
/* clang-format off */
static const row rows[] = {
    {"all is the shard", F32, F32, F32, FSDP_ACCUMULATE_NONE, 1, false, 0, 3, 0, {1, 0, 0}, {0, 0, 0}, 0},
    {"with a held unit", F32, F32, F32, FSDP_ACCUMULATE_NONE, 1, true, 0, 4, 0, {1, 0, 0}, {0, 0, 0}, 0},
    {"full gradients kept", F32, F32, F32, FSDP_ACCUMULATE_KEEP_FULL, 2, false, 0, 3, 0, {1, 0, 0}, {0, 0, 0}, 0},
    {"cast to compute", B16, F32, F32, FSDP_ACCUMULATE_NONE, 1, false, 4, 3, 0, {8, 4, 0}, {4, 4, 0}, 0},
    {"all in half precision", B16, B16, B16, FSDP_ACCUMULATE_NONE, 1, false, 4, 3, 0, {8, 4, 0}, {4, 4, 0}, 0},
    {"gradients of another type", B16, B16, F32, FSDP_ACCUMULATE_NONE, 1, false, 7, 3, 0, {8, 4, 3}, {6, 4, 3}, 4},
    {"reduced twice", F32, F32, F32, FSDP_ACCUMULATE_REDUCE_EACH, 2, false, 3, 6, 3, {7, 0, 6}, {4, 0, 6}, 8},
};
/* clang-format on */

static void open_row(journey *j, const row *r)
{
    journey_init(j, BLOCKS);
    j->sim.world = 1;
    j->sim.granularity = 1; /* bytes to the byte */
    j->held = r->held;
    j->n_micro = r->n_micro;
    j->model_config.accumulation = r->accumulation;
    j->unit_config.compute_dtype = r->compute;
    j->unit_config.grad_dtype = r->grad;
    j->unit_config.reduce_dtype = r->reduce;
    journey_open(j);
    journey_step(j);
}

static void assert_count(const journey *j, const row *r, const char *what, uint64_t have, uint64_t want)
{
    if (have != want)
        fail_msg("%s, step %llu: %llu %s, expected %llu", r->name, (unsigned long long)j->model->n_updates,
                 (unsigned long long)have, what, (unsigned long long)want);
}

static void assert_step(journey *j, const row *r)
{
    static const char *const lanes[] = {"s", "gather", "reduce"};
    const fsdp_stream *stream[] = {j->s, fsdp_context_lane(j->ctx, FSDP_LANE_GATHER),
                                   fsdp_context_lane(j->ctx, FSDP_LANE_REDUCE)};
    uint64_t units = BLOCKS + r->held, reductions = j->model->stats.reductions;
    journey_tape_start(j);
    journey_step(j);
    journey_tape_stop(j);
    assert_count(j, r, "casts", journey_n_operations(j, FSDP_OPERATION_CAST), r->casts);
    assert_count(j, r, "zero fills", journey_n_operations(j, FSDP_OPERATION_FILL), r->zeros);
    assert_count(j, r, "adds", journey_n_operations(j, FSDP_OPERATION_ADD), r->adds);
    assert_count(j, r, "copies", journey_n_operations(j, FSDP_OPERATION_COPY), 0);
    assert_count(j, r, "square sums", journey_n_operations(j, FSDP_OPERATION_SQUARE_SUM), units);
    assert_count(j, r, "AdamWs", journey_n_operations(j, FSDP_OPERATION_ADAMW), units);
    for (int i = 0; i < 3; i++) {
        char what[32];
        snprintf(what, sizeof what, "records on %s", lanes[i]);
        assert_count(j, r, what, journey_n_records(j, stream[i], FSDP_RECORD_EVENT), r->records[i]);
        snprintf(what, sizeof what, "waits on %s", lanes[i]);
        assert_count(j, r, what, journey_n_records(j, stream[i], FSDP_RECORD_WAIT), r->waits[i]);
    }
    bool each = r->accumulation == FSDP_ACCUMULATE_REDUCE_EACH;
    assert_count(j, r, "reductions", j->model->stats.reductions - reductions, units * (each ? r->n_micro : 1));
}

static void the_counts_of_a_step_are_those_of_the_table(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        journey j;
        fsdp_counters counters = FSDP_COUNTERS_INIT;
        open_row(&j, &rows[i]);
        for (int step = 2; step <= 4; step++) assert_step(&j, &rows[i]);
        OK(fsdp_context_counters(j.ctx, &counters));
        assert_int_equal(counters.collectives, 0);
        journey_close(&j);
    }
}

/* ---- Bytes ---- */

static void a_grad_range_has_the_buffers_of_what_is_no_shard(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const row *r = &rows[i];
        journey j;
        fsdp_memory memory = FSDP_MEMORY_INIT;
        fsdp_counters counters = FSDP_COUNTERS_INIT;
        open_row(&j, r);
        OK(fsdp_model_memory(j.model, &memory));
        OK(fsdp_context_counters(j.ctx, &counters));
        uint64_t elems = ELEMS * (uint64_t)(BLOCKS + r->held);
        assert_int_equal(memory.grad, ELEMS * r->grad_bytes);
        assert_int_equal(memory.gradients, elems * fsdp_dtype_bytes(r->reduce));
        assert_int_equal(counters.device_bytes, memory.total);
        journey_close(&j);
    }
}

/* One model, registered and asked: how many bytes its grad range would have. odd: a unit whose gradients have another type;
 * twice: a pass that reduces some unit twice. */
static uint64_t predict_grad(fsdp_context *ctx, bool odd, bool twice)
{
    fsdp_model *model = NULL;
    fsdp_unit *unit[BLOCKS];
    fsdp_memory memory = FSDP_MEMORY_INIT;
    fsdp_model_config config = FSDP_MODEL_CONFIG_INIT;
    OK(fsdp_model_create(ctx, &config, &model));
    for (uint32_t i = 0; i < BLOCKS; i++) {
        fsdp_unit_config policy = FSDP_UNIT_CONFIG_INIT;
        fsdp_param_config frozen = FSDP_PARAM_CONFIG_INIT;
        uint64_t elems = ELEMS;
        char name[16], param[24];
        if (odd && i == 1) policy.grad_dtype = B16;
        frozen.frozen = true;
        snprintf(name, sizeof name, "h%u", i);
        OK(fsdp_model_add_unit(model, name, &policy, &unit[i]));
        snprintf(param, sizeof param, "%s.frozen", name);
        OK(fsdp_unit_add_param(unit[i], param, 1, &elems, &frozen, NULL));
        snprintf(param, sizeof param, "%s.w", name);
        OK(fsdp_unit_add_param(unit[i], param, 1, &elems, NULL, NULL));
    }
    fsdp_visit visits[] = {{unit[0], FSDP_USE_FORWARD, 0},
                           {unit[1], FSDP_USE_FORWARD, 1},
                           {unit[1], FSDP_USE_BACKWARD, 2},
                           {unit[0], FSDP_USE_BACKWARD, 3},
                           {unit[1], FSDP_USE_BACKWARD, 4}};
    int32_t pass;
    OK(fsdp_model_add_pass(model, "own", twice ? 5 : 4, visits, &pass));
    OK(fsdp_model_predict(model, &memory));
    OK(fsdp_model_destroy(model));
    return memory.grad;
}

static void a_unit_is_its_shard_or_not_by_its_own_types_and_all_passes(void **state)
{
    (void)state;
    fsdp_sim_config sim = FSDP_SIM_CONFIG_INIT;
    fsdp_config config = FSDP_CONFIG_INIT;
    fsdp_context *ctx = NULL;
    sim.granularity = 1;
    config.backend = fsdp_sim_backend();
    config.backend_config = &sim;
    OK(fsdp_context_create(&config, &ctx));
    assert_int_equal(predict_grad(ctx, false, false), 0);
    assert_int_equal(predict_grad(ctx, true, false), ELEMS * 2);
    assert_int_equal(predict_grad(ctx, false, true), 2 * ELEMS * 4); /* two buffers in flight */
    OK(fsdp_context_destroy(ctx));
}

/* ---- Call by call ---- */

typedef struct table {
    journey j;
    uint64_t n_seen;
    size_t used;
    char text[8192];
} table;

static void put(table *t, const char *format, const char *a, const char *b)
{
    t->used += (size_t)snprintf(t->text + t->used, sizeof t->text - t->used, format, a, b);
    assert_true(t->used < sizeof t->text);
}

static bool on_gradients(const table *t, const fsdp_trace_record *r)
{
    uint64_t begin = (uint64_t)(uintptr_t)t->j.model->gradients;
    return r->access[0].begin >= begin && r->access[0].begin < begin + t->j.model->plan.memory.gradients;
}

static void put_line(journey *j, const char *call)
{
    table *t = j->arg;
    int32_t stream = -1;
    put(t, "%s |%s", call, "");
    for (; t->n_seen < fsdp_trace_count(j->trace); t->n_seen++) {
        const fsdp_trace_record *r = fsdp_trace_at(j->trace, t->n_seen);
        if (r->kind == FSDP_RECORD_USE) continue;
        if (r->stream != stream) put(t, "%s %s:", stream >= 0 ? ";" : "", fsdp_trace_stream_name(j->trace, r->stream));
        else put(t, "%s%s", ",", "");
        stream = r->stream;
        if (r->kind == FSDP_RECORD_OPERATION) {
            put(t, " %s %s", fsdp_operation_name(r->operation), r->label);
            if (r->operation == FSDP_OPERATION_FILL) put(t, "%s%s", on_gradients(t, r) ? " shard" : " buffer", "");
        } else if (r->mark == FSDP_MARK_NORM_SUM) {
            put(t, " %s %s", r->kind == FSDP_RECORD_WAIT ? "wait" : "record", fsdp_mark_name(r->mark));
        } else {
            put(t, " %s ", r->kind == FSDP_RECORD_WAIT ? "wait" : "record", "");
            put(t, "%s.%s", r->label, fsdp_mark_name(r->mark));
        }
    }
    put(t, "%s%s", "\n", "");
}

/* clang-format off */
static const char all_shard[] =
    "pass_begin() |\n"
    "forward_begin(h0) |\n"
    "forward_end(h0) |\n"
    "forward_begin(h1) |\n"
    "forward_end(h1) |\n"
    "forward_begin(h2) |\n"
    "forward_end(h2) |\n"
    "backward_begin(h2) | s: fill h2 shard\n"
    "backward_end(h2) |\n"
    "backward_begin(h1) | s: fill h1 shard\n"
    "backward_end(h1) |\n"
    "backward_begin(h0) | s: fill h0 shard\n"
    "backward_end(h0) |\n"
    "pass_end() |\n"
    "adamw_step() | s: square sum h2, square sum h1, square sum h0, step input norm, step result norm, "
        "record norm.sum, adamw h0, adamw h1, adamw h2\n";
static const char cast[] =
    "pass_begin() |\n"
    "forward_begin(h0) | s: wait h0.ready; gather: wait h1.updated, cast h1, record h1.ready\n"
    "forward_end(h0) | s: record h0.used\n"
    "forward_begin(h1) | s: wait h1.ready; gather: wait h0.used, cast h2, record h2.ready\n"
    "forward_end(h1) |\n"
    "forward_begin(h2) | s: wait h2.ready\n"
    "forward_end(h2) |\n"
    "backward_begin(h2) | s: fill h2 shard\n"
    "backward_end(h2) | s: record h2.grads\n"
    "backward_begin(h1) | gather: wait h2.grads, cast h0, record h0.ready; s: fill h1 shard\n"
    "backward_end(h1) | s: record h1.grads\n"
    "backward_begin(h0) | s: wait h0.ready, fill h0 shard\n"
    "backward_end(h0) | s: record h0.grads\n"
    "pass_end() |\n"
    "adamw_step() | s: square sum h2, square sum h1, square sum h0, step input norm, step result norm, "
        "record norm.sum, adamw h0, record h0.updated, adamw h1, record h1.updated, adamw h2, record h2.updated; "
        "gather: wait h0.updated, cast h0, record h0.ready\n";
/* clang-format on */

static void assert_table(const row *r, const char *expected)
{
    static table t;
    t = (table){.n_seen = 0};
    open_row(&t.j, r);
    journey_tape_start(&t.j);
    t.j.seen = put_line;
    t.j.arg = &t;
    journey_step(&t.j);
    journey_tape_stop(&t.j);
    if (strcmp(t.text, expected) != 0)
        fail_msg("%s\n--- this is enqueued:\n%s--- expected:\n%s", r->name, t.text, expected);
    journey_close(&t.j);
}

static void each_call_enqueues_what_the_table_says(void **state)
{
    (void)state;
    assert_table(&rows[0], all_shard);
    assert_table(&rows[3], cast);
}

int main(void)
{
    alarm(60);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_counts_of_a_step_are_those_of_the_table),
        cmocka_unit_test(a_grad_range_has_the_buffers_of_what_is_no_shard),
        cmocka_unit_test(a_unit_is_its_shard_or_not_by_its_own_types_and_all_passes),
        cmocka_unit_test(each_call_enqueues_what_the_table_says),
    };
    return cmocka_run_group_tests_name("alone", tests, NULL, NULL);
}
