/* SPDX-License-Identifier: MIT */
/* See captured.h. */
#include "captured.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "monotonic.h"

enum { BF16 = 2, BATCH = CAPTURED_SLIM * BF16 };

static const uint64_t timeout_ns = 60000000000ull;

/* ---- Opening ---- */

static int fill(void *arg, const fsdp_param_range *range, void *dst)
{
    const char *name = fsdp_param_name(range->param);
    (void)arg;
    for (uint64_t k = 0; k < range->count; k++) {
        uint64_t i = range->begin + k;
        ((float *)dst)[k] = (float)((i * 37 + (uint64_t)(name[0] * 13 + name[1])) % 97) / 64.0f - 0.75f;
    }
    return 0;
}

static fsdp_status add_units(captured *t)
{
    for (uint32_t u = 0; u < CAPTURED_UNITS; u++) {
        char name[16];
        fsdp_unit_config config = FSDP_UNIT_CONFIG_INIT;
        config.compute_dtype = config.grad_dtype = FSDP_DTYPE_BF16;
        if (t->config.held && u == 0) config.reshard = FSDP_RESHARD_NEVER;
        snprintf(name, sizeof name, "h%u", u);
        FSDP_TRY(fsdp_model_add_unit(t->model, name, &config, &t->unit[u]));
        const uint64_t wide = CAPTURED_WIDE, slim = CAPTURED_SLIM;
        snprintf(name, sizeof name, "w%u", u);
        FSDP_TRY(fsdp_unit_add_param(t->unit[u], name, 1, &wide, NULL, &t->wide[u]));
        snprintf(name, sizeof name, "b%u", u);
        FSDP_TRY(fsdp_unit_add_param(t->unit[u], name, 1, &slim, NULL, &t->slim[u]));
    }
    return FSDP_OK;
}

static fsdp_status take(captured *t, uint32_t u)
{
    void *ptr;
    FSDP_TRY(fsdp_allocator_alloc(t->allocator, CAPTURED_WIDE * BF16, t->s, "act", &ptr));
    t->act[u] = ptr;
    FSDP_TRY(fsdp_allocator_alloc(t->allocator, BATCH, t->s, "side", &ptr));
    t->side[u] = ptr;
    return FSDP_OK;
}

static fsdp_status give(captured *t, uint32_t u)
{
    FSDP_TRY(fsdp_allocator_free(t->allocator, t->act[u]));
    FSDP_TRY(fsdp_allocator_free(t->allocator, t->side[u]));
    t->act[u] = t->side[u] = NULL;
    return FSDP_OK;
}

static fsdp_status open_memory(captured *t)
{
    void *ptr;
    FSDP_TRY(fsdp_allocator_create(t->ctx, NULL, &t->allocator));
    FSDP_TRY(fsdp_allocator_alloc(t->allocator, BATCH, t->s, "batch", &ptr));
    t->batch = ptr;
    for (uint32_t u = 0; u < CAPTURED_UNITS && !t->config.scratch; u++) FSDP_TRY(take(t, u));
    FSDP_TRY(fsdp_pinned_alloc(t->ctx, (CAPTURED_STEPS + CAPTURED_EVALS * CAPTURED_UNITS) * BATCH, &ptr));
    t->pinned = ptr;
    memset(ptr, 0, (CAPTURED_STEPS + CAPTURED_EVALS * CAPTURED_UNITS) * BATCH);
    uint16_t *to = ptr; /* bf16 of ± 1 to 2, another for each step, rank and element */
    for (uint32_t i = 0; i < CAPTURED_STEPS * CAPTURED_SLIM; i++)
        to[i] = (uint16_t)(0x3f80 | (i * 2654435761u >> 7 & 0x7f) |
                           ((i + fsdp_context_rank(t->ctx)) % 3 == 0 ? 0x8000 : 0));
    return FSDP_OK;
}

fsdp_status captured_open(captured *t, const captured_config *config, fsdp_context *ctx)
{
    *t = (captured){.config = *config, .ctx = ctx};
    FSDP_TRY(fsdp_stream_create(ctx, "compute", &t->s));
    FSDP_TRY(fsdp_stream_create(ctx, "second", &t->second));
    fsdp_model_config model = FSDP_MODEL_CONFIG_INIT;
    model.depth = config->depth;
    FSDP_TRY(fsdp_model_create(ctx, &model, &t->model));
    FSDP_TRY(add_units(t));
    FSDP_TRY(fsdp_adamw_create(t->model, NULL, &t->opt));
    FSDP_TRY(fsdp_model_seal(t->model));
    FSDP_TRY(fsdp_model_fill(t->model, fill, NULL, FSDP_DTYPE_FP32));
    return open_memory(t);
}

fsdp_status captured_close(captured *t)
{
    FSDP_TRY(fsdp_stream_drain_host(t->s, timeout_ns));
    for (uint32_t u = 0; u < CAPTURED_UNITS; u++) FSDP_TRY(give(t, u));
    FSDP_TRY(fsdp_allocator_free(t->allocator, t->batch));
    FSDP_TRY(fsdp_model_destroy(t->model));
    FSDP_TRY(fsdp_allocator_destroy(t->allocator));
    FSDP_TRY(fsdp_pinned_free(t->ctx, t->pinned));
    FSDP_TRY(fsdp_stream_release(t->second));
    return fsdp_stream_release(t->s);
}

/* ---- Steps ---- */

fsdp_adamw_args captured_args(uint64_t k)
{
    fsdp_adamw_args args = FSDP_ADAMW_ARGS_INIT;
    args.lr = 0.02f / (float)(1 + k % 5);
    args.grad_scale = 1.0 + 0.25 * (double)(k % 3);
    args.max_norm = k % 4 == 3 ? 0.5f : 0.0f;
    args.skip = k % 7 == 6;
    return args;
}

fsdp_status captured_batch(captured *t, fsdp_stream *s)
{
    return fsdp_stream_copy(s, t->batch, t->pinned + t->n_steps % CAPTURED_STEPS * BATCH, BATCH);
}

static fsdp_status forward(captured *t, uint32_t u)
{
    fsdp_view view = FSDP_VIEW_INIT;
    FSDP_TRY(fsdp_forward_begin(t->unit[u], t->s, &view));
    if (t->config.scratch && t->act[u] == NULL) FSDP_TRY(take(t, u));
    FSDP_TRY(fsdp_stream_copy(t->s, t->act[u], view.params[0], CAPTURED_WIDE * BF16));
    fsdp_stream *s = t->s;
    if (t->config.second) {
        FSDP_TRY(fsdp_unit_use(t->unit[u], t->second));
        if (t->config.scratch) FSDP_TRY(fsdp_allocator_record_stream(t->allocator, t->side[u], t->second));
        FSDP_TRY(fsdp_stream_wait_stream(t->second, t->s)); /* after who had the block before */
        s = t->second;
    }
    FSDP_TRY(fsdp_stream_copy(s, t->side[u], view.params[1], BATCH));
    return t->config.held && u == 0 ? FSDP_OK : fsdp_forward_end(t->unit[u], t->s);
}

static fsdp_status backward(captured *t, uint32_t u)
{
    fsdp_view view = FSDP_VIEW_INIT;
    FSDP_TRY(fsdp_backward_begin(t->unit[u], t->s, &view));
    FSDP_TRY(fsdp_stream_copy(t->s, view.grads[0], t->act[(u + 1) % CAPTURED_UNITS], CAPTURED_WIDE * BF16));
    FSDP_TRY(fsdp_stream_copy(t->s, view.grads[1], u % 2 == 0 ? t->batch : t->side[u], BATCH));
    return t->config.held && u == 0 ? FSDP_OK : fsdp_backward_end(t->unit[u], t->s);
}

static fsdp_status all_forward(captured *t)
{
    for (uint32_t u = 0; u < CAPTURED_UNITS; u++) FSDP_TRY(forward(t, u));
    return t->config.held ? fsdp_forward_end(t->unit[0], t->s) : FSDP_OK;
}

static fsdp_status all_backward(captured *t)
{
    if (t->config.held) FSDP_TRY(backward(t, 0));
    for (uint32_t u = CAPTURED_UNITS; u-- > (t->config.held ? 1 : 0);) FSDP_TRY(backward(t, u));
    return t->config.held ? fsdp_backward_end(t->unit[0], t->s) : FSDP_OK;
}

fsdp_status captured_step(captured *t, const fsdp_adamw_args *args)
{
    const fsdp_pass_args pass = FSDP_PASS_ARGS_INIT;
    FSDP_TRY(fsdp_pass_begin(t->model, &pass, t->s));
    FSDP_TRY(all_forward(t));
    FSDP_TRY(all_backward(t));
    FSDP_TRY(fsdp_pass_end(t->model, t->s));
    FSDP_TRY(fsdp_step_sum(t->model, 3, (const float *)(const void *)t->batch,
                           t->s)); /* two bf16 as one fp32: any number will do */
    for (uint32_t u = 0; t->config.scratch && u < CAPTURED_UNITS; u++) FSDP_TRY(give(t, u));
    return fsdp_adamw_step(t->opt, args, t->s);
}

fsdp_status captured_eval(captured *t)
{
    fsdp_pass_args pass = FSDP_PASS_ARGS_INIT;
    pass.pass = FSDP_PASS_EVAL;
    FSDP_TRY(fsdp_pass_begin(t->model, &pass, t->s));
    FSDP_TRY(all_forward(t));
    FSDP_TRY(fsdp_pass_end(t->model, t->s));
    for (uint32_t u = 0; u < CAPTURED_UNITS; u++) {
        uint64_t at = CAPTURED_STEPS + t->n_evals % CAPTURED_EVALS * CAPTURED_UNITS + u;
        FSDP_TRY(fsdp_stream_copy(t->s, t->pinned + at * BATCH, t->act[u], BATCH));
        if (t->config.scratch) FSDP_TRY(give(t, u));
    }
    t->n_evals++;
    return FSDP_OK;
}

/* ---- Scripts ---- */

typedef struct run {
    captured *t;
    const captured_graphs *graphs;
    captured_result *result;
    fsdp_capture *capture;
    void *graph;
    bool on_second;
} run;

static uint32_t n_inside(const captured *t) { return t->config.n_inside > 0 ? t->config.n_inside : 1; }

/* Step − 2's report, as a training would ask for it. */
static fsdp_status get_report(run *r, uint64_t step)
{
    if (step == 0) return FSDP_OK;
    r->result->report[step] = (fsdp_step_report)FSDP_STEP_REPORT_INIT;
    return fsdp_step_report_get(r->t->model, step, timeout_ns, &r->result->report[step]);
}

static fsdp_status count_step(run *r)
{
    uint64_t n = ++r->t->n_steps;
    return get_report(r, n >= 2 ? n - 2 : 0);
}

static fsdp_status eager_steps(run *r, uint32_t n)
{
    FSDP_TRY(captured_batch(r->t, r->t->s));
    for (uint32_t i = 0; i < n; i++) {
        fsdp_adamw_args args = captured_args(r->t->n_steps + 1);
        uint64_t begin = fsdp__now_ns();
        FSDP_TRY(captured_step(r->t, &args));
        r->result->eager_ns += fsdp__now_ns() - begin;
        r->result->n_eager++;
        FSDP_TRY(count_step(r));
    }
    return FSDP_OK;
}

static fsdp_status fail(run *r, const char *what)
{
    snprintf(r->result->why, sizeof r->result->why, "%s", what);
    return FSDP_ERR_DEVICE;
}

static fsdp_status begin_and_end(run *r)
{
    captured *t = r->t;
    fsdp_capture_destroy(r->capture); /* an earlier one; replays of its graph may be in flight */
    if (r->graph != NULL) r->graphs->destroy(r->graphs->arg, r->graph);
    r->capture = NULL, r->graph = NULL;
    FSDP_TRY(fsdp_capture_begin(t->ctx, t->s));
    if (r->graphs->begin(r->graphs->arg, t->s) != 0) return fail(r, "the graph did not begin");
    fsdp_adamw_args args = captured_args(33); /* which no replay uses */
    for (uint32_t i = 0; i < n_inside(t); i++) FSDP_TRY(captured_step(t, &args));
    FSDP_TRY(fsdp_capture_end(t->ctx, t->s, &r->capture));
    return r->graphs->end(r->graphs->arg, t->s, &r->graph) == 0 ? FSDP_OK : fail(r, "the graph did not end");
}

static fsdp_status replay(run *r)
{
    captured *t = r->t;
    fsdp_stream *s = r->on_second ? t->second : t->s;
    fsdp_adamw_args args[FSDP_REPORT_RING];
    for (uint32_t i = 0; i < n_inside(t); i++) args[i] = captured_args(t->n_steps + 1 + i);
    if (s != t->s) FSDP_TRY(fsdp_stream_wait_stream(s, t->s)); /* the batch's place */
    FSDP_TRY(captured_batch(t, s));
    uint64_t begin = fsdp__now_ns();
    FSDP_TRY(fsdp_replay(r->capture, n_inside(t), args, s));
    uint64_t launched = fsdp__now_ns();
    if (r->graphs->launch(r->graphs->arg, r->graph, s) != 0) return fail(r, "the graph was not launched");
    uint64_t done = fsdp__now_ns();
    FSDP_TRY(fsdp_replayed(r->capture, s));
    r->result->replay_ns += fsdp__now_ns() - done + launched - begin;
    r->result->n_replays++;
    for (uint32_t i = 0; i < n_inside(t); i++) FSDP_TRY(count_step(r));
    return FSDP_OK;
}

static fsdp_status refused_replay(run *r)
{
    fsdp_adamw_args args[FSDP_REPORT_RING];
    for (uint32_t i = 0; i < n_inside(r->t); i++) args[i] = captured_args(1);
    fsdp_status status = fsdp_replay(r->capture, n_inside(r->t), args, r->t->s);
    if (status == FSDP_ERR_STATE && strstr(fsdp_last_error(), "unit h") != NULL) return FSDP_OK;
    return fail(r, "a replay in another state was not refused, or without the unit's name");
}

static fsdp_status set_param(captured *t)
{
    float values[CAPTURED_SLIM];
    for (uint32_t i = 0; i < CAPTURED_SLIM; i++) values[i] = (float)i / 256.0f;
    return fsdp_param_set(t->slim[0], values, FSDP_DTYPE_FP32);
}

/* With scratch, so that nothing of the test's own orders the new stream. */
static fsdp_status eval_on_new_stream(captured *t)
{
    fsdp_stream *s = t->s;
    FSDP_TRY(fsdp_stream_create(t->ctx, "new", &t->s));
    fsdp_status status = captured_eval(t);
    fsdp_stream *made = t->s;
    t->s = s;
    FSDP_TRY(status);
    return fsdp_stream_release(made);
}

static fsdp_status act(run *r, char what)
{
    bool eager = r->graphs == NULL;
    switch (what) {
    case 'E': return eager_steps(r, 1);
    case 'C': return eager ? FSDP_OK : begin_and_end(r);
    case 'R': return eager ? eager_steps(r, n_inside(r->t)) : replay(r);
    case 'r': return eager ? FSDP_OK : refused_replay(r);
    case 'V': return captured_eval(r->t);
    case 'N': return eval_on_new_stream(r->t);
    case 'S': return set_param(r->t);
    default: r->on_second = !r->on_second; return FSDP_OK;
    }
}

static fsdp_status get_values(run *r)
{
    captured *t = r->t;
    captured_result *to = r->result;
    for (uint64_t step = t->n_steps > 1 ? t->n_steps - 1 : 1; step <= t->n_steps; step++) FSDP_TRY(get_report(r, step));
    size_t at = 0;
    for (uint32_t u = 0; u < CAPTURED_UNITS; u++) {
        fsdp_param *const both[] = {t->wide[u], t->slim[u]};
        for (int i = 0; i < 2; i++) {
            FSDP_TRY(fsdp_param_get(both[i], FSDP_VALUE_MASTER, to->master + at, FSDP_DTYPE_FP32));
            FSDP_TRY(fsdp_param_get(both[i], FSDP_VALUE_MOMENT_1, to->m + at, FSDP_DTYPE_FP32));
            FSDP_TRY(fsdp_param_get(both[i], FSDP_VALUE_MOMENT_2, to->v + at, FSDP_DTYPE_FP32));
            at += fsdp_param_elems(both[i]);
        }
    }
    FSDP_TRY(fsdp_stream_drain_host(t->s, timeout_ns));
    memcpy(to->seen, t->pinned + CAPTURED_STEPS * BATCH, sizeof to->seen);
    to->n = t->n_steps;
    to->stats = (fsdp_model_stats)FSDP_MODEL_STATS_INIT;
    FSDP_TRY(fsdp_model_stats_get(t->model, &to->stats));
    /* An eager step uses what an evaluation left gathered; a replay gathers all that the captured step did. */
    if (strpbrk(t->config.script, "VN") != NULL) to->stats.gathers = 0;
    return FSDP_OK;
}

static fsdp_status play(run *r)
{
    for (const char *what = r->t->config.script; *what != 0; what++) FSDP_TRY(act(r, *what));
    FSDP_TRY(get_values(r));
    fsdp_capture_destroy(r->capture);
    FSDP_TRY(captured_close(r->t));
    if (r->graph != NULL) r->graphs->destroy(r->graphs->arg, r->graph);
    return FSDP_OK;
}

/* After an error: what still works is done, so that nothing is left. */
static void give_up(run *r)
{
    captured *t = r->t;
    fsdp_capture *on = NULL;
    bool bad = fsdp_capture_end(t->ctx, t->s, &on) != FSDP_OK; /* if one is on */
    fsdp_capture_destroy(on);
    fsdp_capture_destroy(r->capture);
    if (r->graph != NULL) r->graphs->destroy(r->graphs->arg, r->graph);
    bad |= fsdp_model_destroy(t->model) != FSDP_OK;
    for (uint32_t u = 0; u < CAPTURED_UNITS; u++) bad |= give(t, u) != FSDP_OK;
    bad |= fsdp_allocator_free(t->allocator, t->batch) != FSDP_OK;
    bad |= fsdp_allocator_destroy(t->allocator) != FSDP_OK;
    bad |= fsdp_pinned_free(t->ctx, t->pinned) != FSDP_OK;
    bad |= fsdp_stream_release(t->second) != FSDP_OK;
    bad |= fsdp_stream_release(t->s) != FSDP_OK;
    (void)bad;
}

fsdp_status captured_run(const captured_config *config, fsdp_context *ctx, const captured_graphs *graphs,
                         captured_result *result)
{
    captured t;
    run r = {&t, graphs, result, NULL, NULL, false};
    *result = (captured_result){.n = 0};
    fsdp_status status = captured_open(&t, config, ctx);
    if (status == FSDP_OK) status = play(&r);
    if (status == FSDP_OK) return status;
    if (result->why[0] == 0) snprintf(result->why, sizeof result->why, "%s", fsdp_last_error());
    give_up(&r);
    return status;
}

const char *captured_difference(const captured_result *a, const captured_result *b)
{
    static _Thread_local char text[160];
    if (a->n != b->n) return "the number of steps";
    for (uint64_t i = 1; i <= a->n; i++) {
        const fsdp_step_report *x = &a->report[i], *y = &b->report[i];
        const char *what = x->step != y->step || x->step != i                                  ? "step"
                           : x->updates != y->updates                                          ? "updates"
                           : x->skipped != y->skipped                                          ? "skipped"
                           : memcmp(&x->lr, &y->lr, sizeof x->lr) != 0                         ? "lr"
                           : memcmp(&x->grad_norm, &y->grad_norm, sizeof x->grad_norm) != 0    ? "grad_norm"
                           : memcmp(&x->clip_scale, &y->clip_scale, sizeof x->clip_scale) != 0 ? "clip_scale"
                           : memcmp(x->sums, y->sums, sizeof x->sums) != 0                     ? "sums"
                                                                                               : NULL;
        if (what == NULL) continue;
        snprintf(text, sizeof text, "%s of the report of step %llu", what, (unsigned long long)i);
        return text;
    }
    if (memcmp(a->seen, b->seen, sizeof a->seen) != 0) return "what evaluations read";
    if (memcmp(a->master, b->master, sizeof a->master) != 0) return "parameters";
    if (memcmp(a->m, b->m, sizeof a->m) != 0) return "the first moments";
    if (memcmp(a->v, b->v, sizeof a->v) != 0) return "the second moments";
    if (a->stats.steps != b->stats.steps || a->stats.gathers != b->stats.gathers ||
        a->stats.reductions != b->stats.reductions || a->stats.off_plan_hooks != b->stats.off_plan_hooks)
        return "the statistics";
    return NULL;
}
