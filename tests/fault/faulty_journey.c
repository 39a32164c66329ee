/* SPDX-License-Identifier: MIT */
/* The journey: register, seal, fill, steps of both kinds, an evaluation, values, host calls, collectives, a step given up, a
 * step that one rank has less data for. Every result goes into the rank's values. */
#include "faulty_journey.h"

#include <stdio.h>
#include <string.h>

#include "check.h"
#include "sharding/model.h"

enum { N_MICRO = 2 };
static const uint64_t get_ns = 20000000000ull;

/* ---- Registration. Units: one held, two not; a bias of 4 elements, all of which one rank has ---- */

static fsdp_status add_unit(rank *r, uint32_t u)
{
    static const char *const units[UNITS] = {"embed", "h.0", "h.1"};
    static const char *const params[UNITS][PARAMS] = {{"embed.w", "embed.b"}, {"h.0.w", "h.0.b"}, {"h.1.w", "h.1.b"}};
    static const uint64_t dims[PARAMS][2] = {{16, 8}, {4, 1}};
    fsdp_unit_config config = FSDP_UNIT_CONFIG_INIT;
    if (u == 0) config.reshard = FSDP_RESHARD_NEVER;
    if (u == 1) config.compute_dtype = FSDP_DTYPE_BF16;
    if (u == 2 && !r->reduce_comm) config.zero_grads = false;
    CALL(r, fsdp_model_add_unit(r->model, units[u], &config, &r->unit[u]));
    for (uint32_t p = 0; p < PARAMS; p++)
        CALL(r, fsdp_unit_add_param(r->unit[u], params[u][p], 2, dims[p], NULL, &r->param[u][p]));
    return FSDP_OK;
}

static int fill(void *arg, const fsdp_param_range *range, void *dst)
{
    (void)arg;
    const char *name = fsdp_param_name(range->param);
    uint64_t first = (uint64_t)(unsigned char)name[2] + (uint64_t)(unsigned char)name[4];
    for (uint64_t i = 0; i < range->count; i++)
        ((float *)dst)[i] = (float)((first + range->begin + i) % 13) * 0.125f - 0.7f;
    return 0;
}

/* All ranks are sealed, or none is. */
static fsdp_status seal(rank *r)
{
    verdict v = SOME_FAILED;
    for (int tries = 0; v != ALL_OK; tries++) {
        fsdp_status status = fsdp_model_seal(r->model);
        bool again = status != FSDP_OK && rank_calls_again(r, status, "fsdp_model_seal");
        v = rank_meet(r, status == FSDP_OK, 0);
        if (status == FSDP_OK && v != ALL_OK) rank_complain(r, "fsdp_model_seal", "sealed where another rank is not");
        if (v != ALL_OK && (!again || tries == 3)) return status != FSDP_OK ? status : FSDP_ERR_ABORTED;
    }
    return FSDP_OK;
}

static fsdp_status build(rank *r)
{
    fsdp_model_config config = FSDP_MODEL_CONFIG_INIT;
    config.accumulation = r->reduce_comm ? FSDP_ACCUMULATE_KEEP_FULL : FSDP_ACCUMULATE_REDUCE_EACH;
    fsdp_memory memory = FSDP_MEMORY_INIT;
    CALL(r, fsdp_model_create(r->ctx, &config, &r->model));
    for (uint32_t u = 0; u < UNITS; u++) FSDP_TRY(add_unit(r, u));
    const fsdp_visit visits[] = {{r->unit[1], FSDP_USE_FORWARD, 1}, {r->unit[2], FSDP_USE_READ, 1}};
    CALL(r, fsdp_model_add_pass(r->model, "own", 2, visits, &r->own_pass));
    CALL(r, fsdp_adamw_create(r->model, NULL, &r->opt));
    CALL(r, fsdp_model_predict(r->model, &memory));
    FSDP_TRY(seal(r));
    CALL(r, fsdp_model_fill(r->model, fill, NULL, FSDP_DTYPE_FP32));
    rank_value(r, memory.total);
    return FSDP_OK;
}

/* ---- Kernels ---- */

static void run_forward(void *arg)
{
    const job *j = arg;
    for (uint64_t i = 0; i < j->n; i++) j->r->loss += j->params[i] * 0.01f;
}

static void run_backward(void *arg)
{
    const job *j = arg;
    for (uint64_t i = 0; i < j->n; i++) j->grads[i] += j->params[i] * j->factor + 0.01f;
}

static void run_sgd(void *arg)
{
    const job *j = arg;
    float *w = (float *)(uintptr_t)j->params;
    for (uint64_t i = 0; i < j->n; i++) w[i] -= 0.01f * j->factor * j->grads[i];
}

static void run_reset(void *arg) { ((const job *)arg)->r->loss = 0.0f; }

static fsdp_status enqueue(rank *r, fsdp_host_fn fn, job given)
{
    job *j = &r->jobs[r->n_jobs++ % MAX_JOBS];
    *j = given;
    j->r = r;
    CALL(r, fsdp_stream_host_call(r->s, fn, j));
    return FSDP_OK;
}

/* bf16 parameters are left to the library. */
static bool computes(const rank *r, uint32_t u) { return r->unit[u]->config.compute_dtype == FSDP_DTYPE_FP32; }

static fsdp_status forward(rank *r, uint32_t u, bool ends)
{
    fsdp_view view = FSDP_VIEW_INIT;
    CALL(r, fsdp_forward_begin(r->unit[u], r->s, &view));
    for (uint32_t p = 0; p < PARAMS && computes(r, u); p++)
        FSDP_TRY(enqueue(r, run_forward, (job){.params = view.params[p], .n = p == 0 ? 128 : 4}));
    if (ends) CALL(r, fsdp_forward_end(r->unit[u], r->s));
    return FSDP_OK;
}

static fsdp_status backward(rank *r, uint32_t u, float factor, bool ends)
{
    fsdp_view view = FSDP_VIEW_INIT;
    static const float zeros[128]; /* in place of parameters that are not fp32 */
    CALL(r, fsdp_backward_begin(r->unit[u], r->s, &view));
    for (uint32_t p = 0; p < PARAMS; p++) {
        uint64_t n = p == 0 ? 128 : 4;
        if (!view.grads_zeroed) CALL(r, fsdp_stream_fill(r->s, view.grads[p], 0, n * sizeof(float)));
        FSDP_TRY(enqueue(
            r, run_backward,
            (job){
                .params = computes(r, u) ? view.params[p] : zeros, .grads = view.grads[p], .n = n, .factor = factor}));
    }
    if (ends) CALL(r, fsdp_backward_end(r->unit[u], r->s));
    return FSDP_OK;
}

/* ---- Steps ---- */

static fsdp_pass_args pass_of(int32_t pass, uint32_t index)
{
    fsdp_pass_args args = FSDP_PASS_ARGS_INIT;
    args.pass = pass, args.index = index;
    args.count = pass == FSDP_PASS_TRAIN ? N_MICRO : 1;
    args.next = FSDP_PASS_TRAIN;
    return args;
}

static fsdp_status micro_step(rank *r, uint32_t index, bool no_data)
{
    fsdp_pass_args args = pass_of(FSDP_PASS_TRAIN, index);
    float factor = 0.1f * (float)(1 + r->number + index);
    if (no_data) {
        fsdp_status status = fsdp_pass_idle(r->model, &args, r->s);
        if (status == FSDP_OK) return FSDP_OK;
        if (r->model->failed == FSDP_OK && r->model->phase != FSDP__IDLE)
            rank_complain(r, "fsdp_pass_idle", "half a micro-step, and the model has not failed");
        return (void)rank_calls_again(r, status, "fsdp_pass_idle"), status;
    }
    CALL(r, fsdp_pass_begin(r->model, &args, r->s));
    FSDP_TRY(enqueue(r, run_reset, (job){.n = 0}));
    FSDP_TRY(forward(r, 0, false));
    for (uint32_t u = 1; u < UNITS; u++) FSDP_TRY(forward(r, u, true));
    CALL(r, fsdp_forward_end(r->unit[0], r->s));
    FSDP_TRY(backward(r, 0, factor, false));
    for (uint32_t u = UNITS - 1; u > 0; u--) FSDP_TRY(backward(r, u, factor, true));
    CALL(r, fsdp_backward_end(r->unit[0], r->s));
    CALL(r, fsdp_step_sum(r->model, 0, &r->loss, r->s));
    CALL(r, fsdp_pass_end(r->model, r->s));
    return FSDP_OK;
}

static fsdp_status own_update(rank *r)
{
    CALL(r, fsdp_update_begin(r->model, r->s));
    for (uint32_t u = 0; u < UNITS; u++) {
        const fsdp_shard_segment *segment;
        uint32_t n;
        CALL(r, fsdp_unit_shard(r->unit[u], &segment, &n));
        for (uint32_t i = 0; i < n; i++)
            FSDP_TRY(enqueue(r, run_sgd,
                             (job){.params = segment[i].master,
                                   .grads = segment[i].gradient,
                                   .n = segment[i].count,
                                   .factor = fsdp_model_grad_factor(r->model)}));
        if (u < 2) CALL(r, fsdp_update_unit(r->unit[u], r->s));
    }
    CALL(r, fsdp_update_end(r->model, r->s));
    return FSDP_OK;
}

static fsdp_status adamw_update(rank *r)
{
    fsdp_adamw_args args = FSDP_ADAMW_ARGS_INIT;
    args.max_norm = 0.5f;
    args.grad_scale = 1.0 / N_MICRO;
    CALL(r, fsdp_adamw_step(r->opt, &args, r->s));
    return FSDP_OK;
}

static uint64_t n_updates(const rank *r) { return r->model->stats.steps; }

/* All ranks are here, and one of them has failed. What pass_abort cannot mend ends the journey. */
static fsdp_status give_up_the_step(rank *r)
{
    fsdp_status status = fsdp_pass_abort(r->model, r->s);
    if (!r->gave_up) r->n_before = r->n_values;
    r->gave_up = true;
    if (status != FSDP_OK && r->model->phase != FSDP__IN_UPDATE && rank_alive(r))
        status = fsdp_pass_abort(r->model, r->s);
    if (status != FSDP_OK) (void)rank_calls_again(r, status, "fsdp_pass_abort");
    return status;
}

typedef enum step_kind { STEP_ADAMW, STEP_OWN, STEP_NO_DATA } step_kind;

static fsdp_status micro_steps(rank *r, step_kind kind)
{
    for (uint32_t i = 0; i < N_MICRO; i++) FSDP_TRY(micro_step(r, i, kind == STEP_NO_DATA && r->number == 1 && i == 1));
    return FSDP_OK;
}

/* Before the update ranks say whether they have come through, and after it; who has not gives up with all the others, who
 * then take the step again, or go on. */
static fsdp_status step(rank *r, step_kind kind)
{
    verdict v = SOME_FAILED;
    for (int tries = 0; v != ALL_OK; tries++) {
        fsdp_status status = micro_steps(r, kind);
        if (status != FSDP_OK && (!r->stubborn || !rank_alive(r))) return status;
        v = rank_meet(r, status == FSDP_OK, n_updates(r));
        if (v == APART || tries == 3) return status != FSDP_OK ? status : FSDP_ERR_ABORTED;
        if (v == SOME_FAILED) FSDP_TRY(give_up_the_step(r));
    }
    fsdp_status status = kind == STEP_OWN ? own_update(r) : adamw_update(r);
    if (status != FSDP_OK && (!r->stubborn || !rank_alive(r))) return status;
    v = rank_meet(r, status == FSDP_OK, n_updates(r));
    if (v == APART) return status != FSDP_OK ? status : FSDP_ERR_ABORTED;
    if (v == SOME_FAILED) FSDP_TRY(give_up_the_step(r));
    if (kind == STEP_OWN) return FSDP_OK;
    fsdp_step_report report = FSDP_STEP_REPORT_INIT;
    CALL(r, fsdp_step_report_get(r->model, n_updates(r), get_ns, &report));
    rank_float(r, report.sums[0]);
    rank_float(r, report.grad_norm);
    rank_value(r, report.updates);
    return FSDP_OK;
}

static fsdp_status evaluate(rank *r)
{
    fsdp_pass_args args = pass_of(FSDP_PASS_EVAL, 0);
    CALL(r, fsdp_pass_begin(r->model, &args, r->s));
    FSDP_TRY(forward(r, 0, false));
    for (uint32_t u = 1; u < UNITS; u++) FSDP_TRY(forward(r, u, true));
    CALL(r, fsdp_forward_end(r->unit[0], r->s));
    CALL(r, fsdp_pass_end(r->model, r->s));
    args = pass_of(r->own_pass, 0);
    CALL(r, fsdp_pass_begin(r->model, &args, r->s));
    FSDP_TRY(forward(r, 1, false));
    CALL(r, fsdp_unit_use(r->unit[1], r->second));
    FSDP_TRY(forward(r, 2, true));
    CALL(r, fsdp_forward_end(r->unit[1], r->s));
    CALL(r, fsdp_pass_end(r->model, r->s));
    return FSDP_OK;
}

/* ---- Values, host calls, collectives ---- */

static fsdp_status values(rank *r)
{
    static const float four[4] = {0.5f, -0.25f, 1.0f, 2.0f};
    float got[128];
    uint64_t hash;
    for (uint32_t u = 0; u < UNITS; u++) {
        CALL(r, fsdp_param_get(r->param[u][1], u == 2 ? FSDP_VALUE_MOMENT_2 : FSDP_VALUE_MASTER, got, FSDP_DTYPE_FP32));
        for (int i = 0; i < 4; i++) rank_float(r, got[i]);
    }
    CALL(r, fsdp_param_get(r->param[1][0], FSDP_VALUE_COMPUTE, got, FSDP_DTYPE_FP32));
    for (int i = 0; i < 128; i += 32) rank_float(r, got[i]);
    CALL(r, fsdp_param_set(r->param[1][1], four, FSDP_DTYPE_FP32));
    CALL(r, fsdp_model_hash(r->model, &hash));
    rank_value(r, hash);
    return FSDP_OK;
}

static fsdp_status host_calls(rank *r)
{
    double sums[2] = {1.0 + r->number, 0.5};
    float data[3] = {(float)(7 + r->number), 1.0f, 2.0f};
    CALL(r, fsdp_sum_host(r->ctx, sums, 2));
    CALL(r, fsdp_broadcast_host(r->ctx, data, sizeof data, 1));
    CALL(r, fsdp_barrier_host(r->ctx));
    rank_float(r, (float)sums[0] + (float)sums[1]);
    rank_float(r, data[0]);
    return FSDP_OK;
}

static fsdp_status collectives(rank *r)
{
    float *x = r->buffer;
    bool done = false;
    CALL(r, fsdp_stream_fill(r->s, x, 0, 64));
    for (int i = 0; i < 4; i++) r->sum[i] = (float)(i + 1) * (1.0f + (float)r->number);
    CALL(r, fsdp_stream_copy(r->s, x, r->sum, sizeof r->sum));
    CALL(r, fsdp_all_reduce(fsdp_context_comm(r->ctx), x, x, 4, FSDP_DTYPE_FP32, r->s, &r->work));
    CALL(r, fsdp_work_wait(r->work, r->second));
    CALL(r, fsdp_work_is_done(r->work, &done));
    CALL(r, fsdp_stream_copy(r->second, r->got, x, sizeof r->got));
    CALL(r, fsdp_event_record(r->event, r->second));
    CALL(r, fsdp_stream_wait_event(r->s, r->event));
    CALL(r, fsdp_event_is_done(r->event, &done));
    CALL(r, fsdp_work_wait_host(r->work, get_ns));
    CALL(r, fsdp_event_wait_host(r->event, get_ns));
    CALL(r, fsdp_stream_drain_host(r->second, get_ns));
    for (int i = 0; i < 4; i++) rank_float(r, r->got[i]);
    return FSDP_OK;
}

/* A step that nobody wants to end. */
static fsdp_status abandon(rank *r)
{
    fsdp_pass_args args = pass_of(FSDP_PASS_TRAIN, 0);
    fsdp_status status = fsdp_pass_begin(r->model, &args, r->s);
    if (status == FSDP_OK) status = forward(r, 0, false);
    if (status == FSDP_OK) status = forward(r, 1, false);
    if (status == FSDP_OK) status = backward(r, 2, 0.5f, true);
    if (status != FSDP_OK) (void)rank_calls_again(r, status, "an abandoned step");
    return give_up_the_step(r);
}

fsdp_status faulty_journey(rank *r)
{
    FSDP_TRY(build(r));
    FSDP_TRY(step(r, STEP_ADAMW));
    FSDP_TRY(evaluate(r));
    FSDP_TRY(values(r));
    FSDP_TRY(step(r, STEP_OWN));
    FSDP_TRY(host_calls(r));
    FSDP_TRY(collectives(r));
    FSDP_TRY(abandon(r));
    FSDP_TRY(step(r, STEP_NO_DATA));
    return values(r);
}
