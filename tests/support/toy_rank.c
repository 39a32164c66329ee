/* SPDX-License-Identifier: MIT */
/* A rank of the toy trainer: what it opens, what it closes, and its update, with AdamW or with an optimizer of its own. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "toy.h"

enum { TRACE_RECORDS = 1 << 16, EXPLORED_RECORDS = 1 << 13 }; /* few: a test explores thousands of short runs */

static fsdp_status open_context(toy *t)
{
    const toy_config *c = t->config;
    fsdp_host_config host = FSDP_HOST_CONFIG_INIT;
    host.local = t->local;
    host.rank = t->launch != NULL ? 0 : t->rank;
    host.launch = t->launch;
    host.side = t->side;
    host.jitter_ns = c->jitter_ns;
    host.jitter_seed = c->jitter_seed;
    fsdp_sim_config sim = FSDP_SIM_CONFIG_INIT;
    sim.world = c->world;
    sim.link = (fsdp_link){1000, 10000000000ull};
    sim.kernel_latency_ns = 100;
    if (c->sim_alignment > 0) sim.alignment = c->sim_alignment;
    if (c->sim_granularity > 0) sim.granularity = c->sim_granularity;
    fsdp_config config = FSDP_CONFIG_INIT;
    explore_rank explored = {sizeof explored, t->x, t->rank};
    config.backend = c->explored ? explore_backend() : c->sim ? fsdp_sim_backend() : fsdp_host_backend();
    config.backend_config = c->explored ? (const void *)&explored : c->sim ? (const void *)&sim : &host;
    if (t->backend != NULL) {
        config.backend = t->backend;
        config.backend_config = t->backend_config;
    }
    config.debug = c->debug;
    config.reduce_comm = c->reduce_comm;
    if (c->device != NULL) TOY_TRY(c->device->open_context(t, &config));
    else TOY_TRY(fsdp_context_create(&config, &t->ctx));
    TOY_TRY(fsdp_stream_create(t->ctx, "compute", &t->s));
    t->streams[0] = t->s;
    TOY_TRY(fsdp_stream_create(t->ctx, "second", &t->second));
    t->streams[1] = t->second;
    return FSDP_OK;
}

static fsdp_status add_unit(toy *t, uint32_t u)
{
    const toy_unit *spec = &t->shape.unit[u];
    fsdp_unit_config config = FSDP_UNIT_CONFIG_INIT;
    config.compute_dtype = spec->compute;
    config.grad_dtype = spec->grad;
    config.reduce_dtype = spec->reduce;
    config.master_dtype = spec->master;
    config.reshard = spec->held ? FSDP_RESHARD_NEVER : FSDP_RESHARD_AFTER_USE;
    TOY_TRY(fsdp_model_add_unit(t->model, spec->name, &config, &t->unit[u]));
    for (uint32_t i = 0; i < spec->n_params; i++) {
        const toy_param *p = &spec->param[i];
        fsdp_param_config param = FSDP_PARAM_CONFIG_INIT;
        if (p->compute != spec->compute) param.compute_dtype = p->compute;
        param.frozen = p->frozen;
        param.no_decay = p->no_decay;
        param.lr_scale = p->lr_scale;
        TOY_TRY(fsdp_unit_add_param(t->unit[u], p->name, p->n_dims, p->dims, &param, NULL));
        t->result->n_master += p->elems;
    }
    return FSDP_OK;
}

static fsdp_status register_model(toy *t)
{
    const toy_config *c = t->config;
    fsdp_model_config config = FSDP_MODEL_CONFIG_INIT;
    config.depth = c->depth;
    config.prefetch_bytes = c->prefetch_bytes;
    config.grad_buffers = c->grad_buffers;
    config.accumulation = c->accumulation;
    config.grad_sum = c->grad_sum;
    TOY_TRY(fsdp_model_create(t->ctx, &config, &t->model));
    for (uint32_t u = 0; u < t->shape.n_units; u++) TOY_TRY(add_unit(t, u));
    t->pass = FSDP_PASS_TRAIN;
    if (c->declare) {
        fsdp_visit visits[TOY_LINES];
        uint32_t n = toy_program_visits(&t->program, t->unit, visits);
        TOY_TRY(fsdp_model_add_pass(t->model, "own", n, visits, &t->pass));
    }
    if (c->optimizer != TOY_ADAMW) return FSDP_OK;
    fsdp_adamw_config adamw = FSDP_ADAMW_CONFIG_INIT;
    adamw.weight_decay = c->weight_decay;
    TOY_TRY(fsdp_adamw_create(t->model, &adamw, &t->opt));
    return FSDP_OK;
}

static int fill(void *arg, const fsdp_param_range *range, void *dst)
{
    const toy *t = arg;
    const char *name = fsdp_param_name(range->param);
    for (uint32_t u = 0; u < t->shape.n_units; u++) {
        for (uint32_t i = 0; i < t->shape.unit[u].n_params; i++) {
            if (strcmp(name, t->shape.unit[u].param[i].name) != 0) continue;
            for (uint64_t k = 0; k < range->count; k++)
                ((float *)dst)[k] = toy_initial(&t->shape, u, i, range->begin + k);
            return 0;
        }
    }
    return 1;
}

static fsdp_status open_own_moments(toy *t)
{
    uint64_t n_elems = 0;
    for (uint32_t u = 0; u < t->shape.n_units; u++) {
        const fsdp_shard_segment *segments;
        uint32_t n;
        TOY_TRY(fsdp_unit_shard(t->unit[u], &segments, &n));
        for (uint32_t i = 0; i < n; i++) n_elems += segments[i].count;
    }
    t->own_m = calloc(n_elems + 1, sizeof *t->own_m);
    t->own_v = calloc(n_elems + 1, sizeof *t->own_v);
    TOY_CHECK(t->own_m != NULL && t->own_v != NULL);
    return FSDP_OK;
}

fsdp_status toy_open(toy *t)
{
    toy_resolve(t->config, &t->shape, &t->program);
    t->result->predicted = (fsdp_memory)FSDP_MEMORY_INIT;
    t->result->memory = (fsdp_memory)FSDP_MEMORY_INIT;
    t->result->sealed = t->result->done = (fsdp_counters)FSDP_COUNTERS_INIT;
    t->result->stats = (fsdp_model_stats)FSDP_MODEL_STATS_INIT;
    TOY_TRY(open_context(t));
    TOY_TRY(toy_stage_open(t));
    TOY_TRY(register_model(t));
    TOY_TRY(fsdp_model_predict(t->model, &t->result->predicted));
    TOY_TRY(fsdp_model_seal(t->model));
    TOY_TRY(fsdp_model_memory(t->model, &t->result->memory));
    TOY_TRY(fsdp_context_counters(t->ctx, &t->result->sealed));
    uint64_t n_records = t->config->explored ? EXPLORED_RECORDS : TRACE_RECORDS;
    if (t->config->trace) TOY_TRY(fsdp_trace_start(t->ctx, n_records, &t->trace));
    TOY_TRY(fsdp_model_fill(t->model, fill, t, FSDP_DTYPE_FP32));
    if (t->config->optimizer != TOY_ADAMW) TOY_TRY(open_own_moments(t));
    return FSDP_OK;
}

/* ---- Updates ---- */

struct toy_own_job {
    toy_own_job *older;
    bool sgd;
    float *w, *m, *v;
    const float *g;
    uint64_t count;
    float factor, lr, bias1, bias2, decay;
};

static void run_own(void *arg)
{
    const toy_own_job *j = arg;
    for (uint64_t i = 0; i < j->count; i++) {
        float g = j->g[i] * j->factor;
        if (j->sgd) {
            j->w[i] -= j->lr * g;
            continue;
        }
        j->m[i] = 0.9f * j->m[i] + (1.0f - 0.9f) * g;
        j->v[i] = 0.999f * j->v[i] + (1.0f - 0.999f) * (g * g);
        j->w[i] -= j->lr * (j->m[i] / j->bias1 / (sqrtf(j->v[i] / j->bias2) + 1e-8f) + j->decay * j->w[i]);
    }
}

static const toy_param *find_param(const toy_unit *unit, const fsdp_param *param)
{
    uint32_t i = 0;
    while (strcmp(unit->param[i].name, fsdp_param_name(param)) != 0) i++;
    return &unit->param[i];
}

/* fp32 shards only. *at: how many elements of the moments came before. */
static fsdp_status update_segment(toy *t, const toy_unit *unit, const fsdp_shard_segment *segment, uint64_t at)
{
    const toy_config *c = t->config;
    const toy_param *param = find_param(unit, segment->param);
    if (c->touch) {
        TOY_TRY(toy_touch(t, t->s, segment->master, segment->count * sizeof(float), segment->gradient != NULL));
        if (segment->gradient != NULL)
            TOY_TRY(toy_touch(t, t->s, segment->gradient, segment->count * sizeof(float), false));
    }
    if (segment->gradient == NULL || c->sim) return FSDP_OK;
    toy_own_job *job = malloc(sizeof *job);
    TOY_CHECK(job != NULL);
    double updates = (double)t->n_updates + 1;
    *job = (toy_own_job){t->own_jobs,
                         c->optimizer == TOY_OWN_SGD,
                         segment->master,
                         t->own_m + at,
                         t->own_v + at,
                         segment->gradient,
                         segment->count,
                         fsdp_model_grad_factor(t->model),
                         c->lr * param->lr_scale,
                         (float)(1.0 - pow((double)0.9f, updates)),
                         (float)(1.0 - pow((double)0.999f, updates)),
                         param->no_decay ? 0.0f : c->weight_decay};
    t->own_jobs = job;
    void *staged = NULL, *home = segment->master;
    uint64_t bytes = segment->count * sizeof(float);
    if (toy_is_staged(t)) {
        TOY_TRY(toy_stage_bytes(t, t->s, 0, segment->master, bytes, &staged));
        job->w = staged;
        TOY_TRY(toy_stage_bytes(t, t->s, TOY_STAGE_BYTES / 2, segment->gradient, bytes, &staged));
        job->g = staged;
    }
    TOY_TRY(fsdp_stream_host_call(t->s, run_own, job));
    if (staged != NULL && bytes > 0) TOY_TRY(fsdp_stream_copy(t->s, home, job->w, bytes));
    return FSDP_OK;
}

static fsdp_status update_own(toy *t)
{
    uint64_t at = 0;
    TOY_TRY(fsdp_update_begin(t->model, t->s));
    for (uint32_t u = 0; u < t->shape.n_units; u++) {
        const fsdp_shard_segment *segments;
        uint32_t n;
        TOY_TRY(fsdp_unit_shard(t->unit[u], &segments, &n));
        for (uint32_t i = 0; i < n; i++) {
            TOY_TRY(update_segment(t, &t->shape.unit[u], &segments[i], at));
            at += segments[i].count;
        }
        if (u % 2 == 0) TOY_TRY(fsdp_update_unit(t->unit[u], t->s)); /* update_end does it for the rest */
    }
    TOY_TRY(fsdp_update_end(t->model, t->s));
    return FSDP_OK;
}

fsdp_status toy_update(toy *t)
{
    if (t->config->optimizer == TOY_ADAMW) {
        fsdp_adamw_args args = FSDP_ADAMW_ARGS_INIT;
        args.lr = t->config->lr;
        args.max_norm = t->config->max_norm;
        TOY_TRY(fsdp_adamw_step(t->opt, &args, t->s));
    } else {
        TOY_TRY(update_own(t));
    }
    t->n_updates++;
    return FSDP_OK;
}

/* ---- The end ---- */

void toy_close(toy *t)
{
    fsdp_trace_destroy(t->trace);
    bool closed = fsdp_model_destroy(t->model) == FSDP_OK;
    closed &= fsdp_stream_release(t->second) == FSDP_OK;
    closed &= fsdp_stream_release(t->s) == FSDP_OK;
    toy_stage_close(t);
    closed &= fsdp_context_destroy(t->ctx) == FSDP_OK;
    if (!closed && t->result->error[0] == '\0')
        snprintf(t->result->error, sizeof t->result->error, "rank %u cannot be closed: %s", t->rank, fsdp_last_error());
    toy_jobs_free(t->jobs);
    while (t->own_jobs != NULL) {
        toy_own_job *older = t->own_jobs->older;
        free(t->own_jobs);
        t->own_jobs = older;
    }
    free(t->own_m);
    free(t->own_v);
}
