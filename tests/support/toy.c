/* SPDX-License-Identifier: MIT */
#include "toy.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "convert.h"
#include "hb_oracle.h"

enum { JOBS = 256 };

struct toy_jobs {
    toy_jobs *older;
    uint32_t n;
    toy_job job[JOBS];
};

fsdp_status toy_fail(toy *t, fsdp_status status, const char *file, int line, const char *what, const char *why)
{
    const char *slash = strrchr(file, '/');
    if (t->result->error[0] == '\0')
        snprintf(t->result->error, sizeof t->result->error, "%s:%d: rank %u of %u, step %llu: %s: %s (%s)",
                 slash != NULL ? slash + 1 : file, line, t->rank, t->config->world,
                 (unsigned long long)t->n_updates + 1, what, fsdp_status_name(status), why);
    return status;
}

toy_config toy_config_default(void)
{
    return (toy_config){
        .world = 1,
        .depth = 1,
        .grad_buffers = 2,
        .micro_steps = 1,
        .steps = 3,
        .lr = 5e-3f,
        .weight_decay = 0.01f,
        .grad_sum = true,
        .pace = TOY_TWO_AHEAD,
        .shape = {
            .compute = FSDP_DTYPE_FP32, .grad = FSDP_DTYPE_FP32, .reduce = FSDP_DTYPE_FP32, .master = FSDP_DTYPE_FP32}};
}

/* ---- Programs ---- */

void toy_program_add(toy_program *program, toy_line line)
{
    if (program->n < TOY_LINES) program->line[program->n++] = line;
}

static void add(toy_program *program, toy_op op, uint32_t unit, toy_kernel kernel, uint32_t at)
{
    toy_program_add(program,
                    (toy_line){op, unit, op == TOY_BACKWARD_BEGIN ? FSDP_USE_BACKWARD : FSDP_USE_FORWARD, kernel, at});
}

void toy_program_make(const toy_shape *shape, const uint32_t *layers, uint32_t n, toy_program *program)
{
    bool tied = shape->embed == shape->head;
    *program = (toy_program){.n = 0};
    add(program, TOY_FORWARD_BEGIN, shape->embed, 0, 0);
    add(program, TOY_KERNEL, shape->embed, TOY_EMBED, 0);
    if (!tied) add(program, TOY_FORWARD_END, shape->embed, 0, 0);
    for (uint32_t i = 0; i < n; i++) {
        add(program, TOY_FORWARD_BEGIN, shape->first + layers[i], 0, 0);
        add(program, TOY_KERNEL, shape->first + layers[i], TOY_LAYER, i);
        add(program, TOY_FORWARD_END, shape->first + layers[i], 0, 0);
    }
    if (!tied) add(program, TOY_FORWARD_BEGIN, shape->head, 0, 0);
    add(program, TOY_KERNEL, shape->head, TOY_HEAD, n);
    add(program, TOY_FORWARD_END, shape->head, 0, 0);
    program->n_forward = program->n;
    add(program, TOY_BACKWARD_BEGIN, shape->head, 0, 0);
    add(program, TOY_KERNEL, shape->head, TOY_HEAD_BACK, n);
    if (!tied) add(program, TOY_BACKWARD_END, shape->head, 0, 0);
    for (uint32_t i = n; i-- > 0;) {
        add(program, TOY_BACKWARD_BEGIN, shape->first + layers[i], 0, 0);
        add(program, TOY_KERNEL, shape->first + layers[i], TOY_LAYER_BACK, i);
        add(program, TOY_BACKWARD_END, shape->first + layers[i], 0, 0);
    }
    if (!tied) add(program, TOY_BACKWARD_BEGIN, shape->embed, 0, 0);
    add(program, TOY_KERNEL, shape->embed, TOY_EMBED_BACK, 0);
    add(program, TOY_BACKWARD_END, shape->embed, 0, 0);
}

static bool begins(const toy_line *line) { return line->op == TOY_FORWARD_BEGIN || line->op == TOY_BACKWARD_BEGIN; }

uint32_t toy_program_visits(const toy_program *program, fsdp_unit *const *units, fsdp_visit *visits)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < program->n; i++) {
        const toy_line *line = &program->line[i];
        if (!begins(line)) continue;
        int32_t until = (int32_t)n;
        uint32_t depth = 1;
        for (uint32_t k = i + 1; k < program->n; k++) {
            const toy_line *later = &program->line[k];
            until += begins(later);
            if (later->unit == line->unit && later->op == line->op) depth++;
            if (later->unit == line->unit && later->op == line->op + 1 && --depth == 0) break;
        }
        visits[n++] = (fsdp_visit){units[line->unit], line->use, until};
    }
    return n;
}

void toy_resolve(const toy_config *config, toy_shape *shape, toy_program *program)
{
    static const uint32_t all[TOY_LAYERS] = {0, 1, 2, 3, 4};
    toy_shape_make(&config->shape, shape);
    if (config->own_program) *program = config->program;
    else toy_program_make(shape, all, TOY_LAYERS, program);
}

/* ---- Kernels on streams ---- */

static toy_job *new_job(toy *t)
{
    if (t->jobs == NULL || t->jobs->n == JOBS) {
        toy_jobs *more = malloc(sizeof *more);
        if (more == NULL) abort();
        more->older = t->jobs;
        more->n = 0;
        t->jobs = more;
    }
    return &t->jobs->job[t->jobs->n++];
}

void toy_jobs_free(toy_jobs *jobs)
{
    while (jobs != NULL) {
        toy_jobs *older = jobs->older;
        free(jobs);
        jobs = older;
    }
}

fsdp_status toy_touch(toy *t, fsdp_stream *s, void *ptr, uint64_t bytes, bool write)
{
    if (ptr == NULL || bytes == 0) return FSDP_OK;
    void *scratch = t->scratch[s == t->streams[1]];
    if (bytes > TOY_SCRATCH_BYTES) bytes = TOY_SCRATCH_BYTES;
    TOY_TRY(fsdp_stream_copy(s, scratch, ptr, bytes));
    if (write) TOY_TRY(fsdp_stream_copy(s, ptr, scratch, bytes));
    return FSDP_OK;
}

/* What a kernel reads and which gradients it writes. */
static fsdp_status touch_kernel(toy *t, fsdp_stream *s, const toy_line *line)
{
    const toy_unit *u = &t->shape.unit[line->unit];
    toy_job job = {.kernel = line->kernel, .shape = &t->shape, .unit = line->unit};
    uint32_t first, end;
    toy_kernel_adds(&job, &first, &end);
    for (uint32_t i = 0; t->config->touch && i < u->n_params; i++) {
        TOY_TRY(toy_touch(t, s, t->p[line->unit][i], u->param[i].elems * fsdp_dtype_bytes(u->param[i].compute), false));
        if (i < first || i >= end) continue;
        TOY_TRY(toy_touch(t, s, t->g[line->unit][i], u->param[i].elems * fsdp_dtype_bytes(u->grad), true));
    }
    return FSDP_OK;
}

static fsdp_status run_kernel(toy *t, const toy_line *line, uint64_t sample)
{
    fsdp_stream *s = line->op == TOY_KERNEL_SECOND ? t->second : t->s;
    if (t->config->sim) {
        TOY_TRY(fsdp_stream_delay(s, 1000));
        return touch_kernel(t, s, line);
    }
    toy_job *job = new_job(t);
    *job = (toy_job){line->kernel, &t->shape, line->unit, line->at, sample, false, t->math, {NULL}, {NULL}, {NULL}};
    job->spoil = t->config->spoil_step == t->n_updates + 1 && t->config->spoil_rank == t->rank;
    memcpy(job->p, t->p[line->unit], sizeof job->p);
    memcpy(job->g, t->g[line->unit], sizeof job->g);
    TOY_TRY(toy_stage_in(t, s, job));
    TOY_TRY(fsdp_stream_host_call(s, toy_compute, job));
    TOY_TRY(toy_stage_out(t, s, job));
    return touch_kernel(t, s, line);
}

static void keep_view(toy *t, uint32_t unit, const fsdp_view *view)
{
    for (uint32_t i = 0; i < view->n_params; i++) {
        t->p[unit][i] = view->params[i];
        if (view->grads != NULL) t->g[unit][i] = view->grads[i];
    }
}

/* The toy's kernels add. The view must say that they may: in an inner window and in a later micro-step, too. */
static bool may_add(const fsdp_view *view)
{
    bool trainable = false;
    for (uint32_t i = 0; i < view->n_params; i++) trainable |= view->grads[i] != NULL;
    return view->grads_zeroed == trainable;
}

static fsdp_status play_line(toy *t, const toy_line *line, uint64_t sample)
{
    fsdp_view view = FSDP_VIEW_INIT;
    fsdp_unit *unit = t->unit[line->unit];
    switch (line->op) {
    case TOY_FORWARD_BEGIN: TOY_TRY(fsdp_forward_begin(unit, t->s, &view)); break;
    case TOY_BACKWARD_BEGIN: TOY_TRY(fsdp_backward_begin(unit, t->s, &view)); break;
    case TOY_FORWARD_END: TOY_TRY(fsdp_forward_end(unit, t->s)); break;
    case TOY_BACKWARD_END: TOY_TRY(fsdp_backward_end(unit, t->s)); break;
    case TOY_USE: TOY_TRY(fsdp_unit_use(unit, t->second)); break;
    case TOY_FOLLOW: TOY_TRY(fsdp_stream_wait_stream(t->second, t->s)); break;
    case TOY_LEAD: TOY_TRY(fsdp_stream_wait_stream(t->s, t->second)); break;
    case TOY_KERNEL:
    case TOY_KERNEL_SECOND: return run_kernel(t, line, sample);
    }
    if (begins(line)) keep_view(t, line->unit, &view);
    if (line->op == TOY_BACKWARD_BEGIN) TOY_CHECK(may_add(&view));
    if (t->config->pace == TOY_HOOK_BY_HOOK) TOY_TRY(fsdp_stream_drain_host(t->s, toy_timeout_ns));
    return FSDP_OK;
}

fsdp_status toy_play(toy *t, const toy_program *program, uint32_t begin, uint32_t end, uint64_t sample)
{
    for (uint32_t i = begin; i < end; i++) {
        fsdp_status status = play_line(t, &program->line[i], sample);
        if (status != FSDP_OK) return status;
    }
    return FSDP_OK;
}

/* ---- A step ---- */

uint64_t toy_sample(const toy *t, uint32_t index)
{
    const toy_config *c = t->config;
    uint32_t world = c->sim ? 1 : c->world;
    return (t->n_updates * c->micro_steps + index) * world + t->rank;
}

fsdp_status toy_pass_begin(toy *t, uint32_t index)
{
    fsdp_pass_args args = FSDP_PASS_ARGS_INIT;
    args.pass = t->pass;
    args.index = index;
    args.count = t->config->micro_steps;
    args.next = t->config->eval == TOY_EVAL_NAMED ? FSDP_PASS_EVAL : t->pass;
    TOY_TRY(fsdp_pass_begin(t->model, &args, t->s));
    return FSDP_OK;
}

fsdp_status toy_sums(toy *t)
{
    const float *loss;
    TOY_TRY(toy_stage_loss(t, &loss));
    TOY_TRY(fsdp_step_sum(t->model, 0, loss, t->s));
    TOY_TRY(fsdp_step_sum(t->model, FSDP_MAX_SUMS - 1, toy_is_staged(t) ? t->device_one : &t->math->one, t->s));
    return FSDP_OK;
}

fsdp_status toy_micro(toy *t, uint32_t index)
{
    if (t->config->alternate) {
        fsdp_stream *other = t->second;
        t->second = t->s;
        t->s = other;
        t->math = t->math == t->maths ? t->maths + 1 : t->maths;
    }
    TOY_TRY(toy_pass_begin(t, index));
    TOY_TRY(toy_play(t, &t->program, 0, t->program.n, toy_sample(t, index)));
    TOY_TRY(toy_sums(t));
    TOY_TRY(fsdp_pass_end(t->model, t->s));
    return FSDP_OK;
}

fsdp_status toy_evaluate(toy *t)
{
    fsdp_pass_args args = FSDP_PASS_ARGS_INIT;
    args.pass = FSDP_PASS_EVAL;
    if (t->config->eval == TOY_EVAL_SURPRISE) args.next = t->n_updates % 2 == 0 ? FSDP_PASS_EVAL : FSDP_PASS_NONE;
    else args.next = t->pass;
    TOY_TRY(fsdp_pass_begin(t->model, &args, t->s));
    TOY_TRY(toy_play(t, &t->program, 0, t->program.n_forward, t->rank));
    const float *loss;
    TOY_TRY(toy_stage_loss(t, &loss));
    TOY_TRY(fsdp_step_sum(t->model, 1, loss, t->s));
    TOY_TRY(fsdp_pass_end(t->model, t->s));
    return FSDP_OK;
}

fsdp_status toy_reports(toy *t, uint64_t step)
{
    if (t->config->optimizer != TOY_ADAMW) return FSDP_OK;
    while (t->n_reported < step) {
        fsdp_step_report *report = &t->result->report[t->n_reported];
        *report = (fsdp_step_report)FSDP_STEP_REPORT_INIT;
        TOY_TRY(fsdp_step_report_get(t->model, t->n_reported + 1, toy_timeout_ns, report));
        t->result->loss[t->n_reported++] = report->sums[0];
    }
    return FSDP_OK;
}

fsdp_status toy_step(toy *t)
{
    static const uint64_t lag[] = {[TOY_AHEAD] = FSDP_REPORT_RING - 1, [TOY_TWO_AHEAD] = 2};
    if (t->config->eval != TOY_EVAL_NONE) TOY_TRY(toy_evaluate(t));
    for (uint32_t i = 0; i < t->config->micro_steps; i++) TOY_TRY(toy_micro(t, i));
    TOY_TRY(toy_update(t));
    if (t->config->pace >= TOY_STEP_BY_STEP) {
        TOY_TRY(fsdp_stream_drain_host(t->s, toy_timeout_ns));
        return toy_reports(t, t->n_updates);
    }
    uint64_t behind = lag[t->config->pace];
    return t->n_updates > behind ? toy_reports(t, t->n_updates - behind) : FSDP_OK;
}

fsdp_status toy_values(toy *t, fsdp_value value, float *out)
{
    for (uint32_t u = 0; u < t->shape.n_units; u++) {
        for (uint32_t i = 0; i < t->shape.unit[u].n_params; i++) {
            const toy_param *param = &t->shape.unit[u].param[i];
            fsdp_param *handle = fsdp_model_find_param(t->model, param->name);
            TOY_CHECK(handle != NULL);
            bool has = !param->frozen || value == FSDP_VALUE_MASTER || value == FSDP_VALUE_COMPUTE;
            if (has) TOY_TRY(fsdp_param_get(handle, value, out, FSDP_DTYPE_FP32));
            if (out != NULL) out += param->elems;
        }
    }
    return FSDP_OK;
}

/* Floats of a shard, which is host memory or goes through the stage. */
static fsdp_status take_segment(toy *t, const fsdp_shard_segment *segment, fsdp_dtype dtype, float *out)
{
    void *from = segment->master;
    if (toy_is_staged(t) && segment->count > 0) {
        TOY_TRY(toy_stage_bytes(t, t->s, 0, segment->master, segment->count * fsdp_dtype_bytes(dtype), &from));
        TOY_TRY(fsdp_stream_drain_host(t->s, toy_timeout_ns));
    }
    fsdp__load_floats(out, from, segment->count, dtype);
    return FSDP_OK;
}

/* This rank's part of every parameter, straight from its shards. */
static fsdp_status take_masters(toy *t)
{
    float *out = t->masters;
    for (uint32_t u = 0; u < t->shape.n_units; u++) {
        const fsdp_shard_segment *segments = NULL;
        uint32_t n = 0;
        TOY_TRY(fsdp_unit_shard(t->unit[u], &segments, &n));
        for (uint32_t i = 0; i < t->shape.unit[u].n_params; i++) {
            const toy_param *param = &t->shape.unit[u].param[i];
            for (uint32_t k = 0; k < n; k++)
                if (strcmp(fsdp_param_name(segments[k].param), param->name) == 0)
                    TOY_TRY(take_segment(t, &segments[k], t->shape.unit[u].master, out + segments[k].begin));
            out += param->elems;
        }
    }
    return FSDP_OK;
}

fsdp_status toy_finish(toy *t)
{
    toy_result *r = t->result;
    TOY_TRY(toy_reports(t, t->n_updates));
    TOY_TRY(fsdp_model_stats_get(t->model, &r->stats));
    TOY_TRY(fsdp_context_counters(t->ctx, &r->done));
    if (!t->config->sim) TOY_TRY(fsdp_model_hash(t->model, &r->hash));
    if (!t->config->sim && t->config->values) { /* the hash has waited for who wrote them */
        fsdp_status status = take_masters(t);
        if (status != FSDP_OK) return status;
    }
    if (t->trace != NULL) {
        TOY_TRY(fsdp_trace_stop_host(t->trace));
        r->n_records = fsdp_trace_count(t->trace);
        r->races = hb_check(t->trace, r->race, sizeof r->race);
        if (t->config->tape) TOY_CHECK((r->tape = toy_tape_take(t)) != NULL);
    }
    return FSDP_OK;
}

fsdp_status toy_train(toy *t)
{
    while (t->n_updates < t->config->steps) TOY_TRY(toy_step(t));
    return toy_finish(t);
}
