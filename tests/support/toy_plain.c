/* SPDX-License-Identifier: MIT */
/* The toy training as a plain loop. It shares the network's kernels with the sharded runs and nothing else: gradients,
 * their sums and the optimizer are written out here from the formulas in fsdp/optim.h. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "convert.h"
#include "toy.h"

enum { WINDOWS = 4 }; /* times that a unit is reduced in a micro-step, at most */

typedef struct plain_param {
    const toy_param *spec;
    void *compute, *master, *sum; /* in their types; sum: over ranks and micro-steps */
    void *grad[TOY_WORLD];        /* of each rank */
    float *part[WINDOWS];         /* sum over ranks, of one window */
    float *m, *v;
} plain_param;

typedef struct plain_unit {
    plain_param param[TOY_PARAMS];
    uint32_t n_open;           /* backward windows */
    bool has_grads[TOY_WORLD]; /* since a first window opened, up to the reduction */
    uint32_t n_windows;        /* reduced in this micro-step */
    bool summed;               /* since the last update */
} plain_unit;

typedef struct plain {
    const toy_config *config;
    const toy_shape *shape;
    const toy_program *program;
    plain_unit unit[TOY_UNITS];
    toy_math math;
    uint64_t updates;
} plain;

static void *zeros(uint64_t elems, size_t each)
{
    void *ptr = calloc(elems + 1, each);
    if (ptr == NULL) abort();
    return ptr;
}

static void open_plain(plain *p)
{
    for (uint32_t u = 0; u < p->shape->n_units; u++) {
        const toy_unit *spec = &p->shape->unit[u];
        for (uint32_t i = 0; i < spec->n_params; i++) {
            plain_param *param = &p->unit[u].param[i];
            uint64_t n = spec->param[i].elems;
            *param = (plain_param){&spec->param[i], zeros(n, 4),      zeros(n, 4),
                                   zeros(n, 4),     .m = zeros(n, 4), .v = zeros(n, 4)};
            for (uint32_t r = 0; r < p->config->world; r++) param->grad[r] = zeros(n, 4);
            for (uint32_t w = 0; w < WINDOWS; w++) param->part[w] = zeros(n, 4);
            for (uint64_t k = 0; k < n; k++) {
                float value = toy_initial(p->shape, u, i, k);
                fsdp__store_floats((char *)param->master + k * fsdp_dtype_bytes(spec->master), &value, 1, spec->master);
            }
        }
    }
}

/* Leaves the masters in result. */
static void close_plain(plain *p, toy_result *result)
{
    uint64_t n_elems = 0;
    for (uint32_t u = 0; u < p->shape->n_units; u++)
        for (uint32_t i = 0; i < p->shape->unit[u].n_params; i++) n_elems += p->shape->unit[u].param[i].elems;
    result->master = zeros(n_elems, sizeof(float));
    result->n_master = n_elems;
    float *at = result->master;
    for (uint32_t u = 0; u < p->shape->n_units; u++) {
        for (uint32_t i = 0; i < p->shape->unit[u].n_params; i++) {
            plain_param *param = &p->unit[u].param[i];
            fsdp__load_floats(at, param->master, param->spec->elems, p->shape->unit[u].master);
            at += param->spec->elems;
            void *all[] = {param->compute, param->master, param->sum, param->m, param->v};
            for (size_t k = 0; k < sizeof all / sizeof *all; k++) free(all[k]);
            for (uint32_t r = 0; r < p->config->world; r++) free(param->grad[r]);
            for (uint32_t w = 0; w < WINDOWS; w++) free(param->part[w]);
        }
    }
}

static void gather(plain *p)
{
    for (uint32_t u = 0; u < p->shape->n_units; u++)
        for (uint32_t i = 0; i < p->shape->unit[u].n_params; i++) {
            plain_param *param = &p->unit[u].param[i];
            fsdp__convert(param->compute, param->spec->compute, param->master, p->shape->unit[u].master,
                          param->spec->elems);
        }
}

static float round_to(float value, fsdp_dtype dtype)
{
    char bytes[sizeof value];
    fsdp__store_floats(bytes, &value, 1, dtype);
    fsdp__load_floats(&value, bytes, 1, dtype);
    return value;
}

/* A window's gradients join those of the ranks before: in fp32, from the reduce type if there are others. */
static void reduce(plain *p, uint32_t u, uint32_t rank)
{
    plain_unit *unit = &p->unit[u];
    const toy_unit *spec = &p->shape->unit[u];
    uint32_t window = unit->n_windows++;
    if (window == WINDOWS) abort();
    for (uint32_t i = 0; i < spec->n_params; i++) {
        plain_param *param = &unit->param[i];
        for (uint64_t k = 0; k < param->spec->elems && !param->spec->frozen; k++) {
            float term;
            fsdp__load_floats(&term, (const char *)param->grad[rank] + k * fsdp_dtype_bytes(spec->grad), 1, spec->grad);
            if (p->config->world > 1) term = round_to(term, spec->reduce);
            param->part[window][k] = rank == 0 ? term : param->part[window][k] + term;
        }
    }
    unit->has_grads[rank] = false;
}

/* After the last rank of a micro-step: window by window onto the sum. */
static void add_parts(plain *p, uint32_t u)
{
    plain_unit *unit = &p->unit[u];
    const toy_unit *spec = &p->shape->unit[u];
    for (uint32_t w = 0; w < unit->n_windows; w++) {
        for (uint32_t i = 0; i < spec->n_params; i++) {
            plain_param *param = &unit->param[i];
            for (uint64_t k = 0; k < param->spec->elems && !param->spec->frozen; k++) {
                char *sum_at = (char *)param->sum + k * fsdp_dtype_bytes(spec->reduce);
                float part = param->part[w][k], sum;
                if (p->config->world > 1) part = round_to(part, spec->reduce);
                fsdp__load_floats(&sum, sum_at, 1, spec->reduce);
                sum = unit->summed ? sum + part : part;
                fsdp__store_floats(sum_at, &sum, 1, spec->reduce);
            }
        }
        unit->summed = true;
    }
    unit->n_windows = 0;
}

static void clear_grads(plain *p, uint32_t u, uint32_t rank)
{
    for (uint32_t i = 0; i < p->shape->unit[u].n_params; i++)
        memset(p->unit[u].param[i].grad[rank], 0, p->unit[u].param[i].spec->elems * 4);
}

static void run_kernel(plain *p, const toy_line *line, uint32_t rank, uint64_t number, bool spoil)
{
    toy_job job = {line->kernel, p->shape, line->unit, line->at, number, spoil, &p->math, {NULL}, {NULL}, {NULL}};
    for (uint32_t i = 0; i < p->shape->unit[line->unit].n_params; i++) {
        plain_param *param = &p->unit[line->unit].param[i];
        job.p[i] = param->compute;
        job.g[i] = param->spec->frozen ? NULL : param->grad[rank];
    }
    toy_compute(&job);
}

/* One rank's micro-step. reduces: gradients that are kept end here. */
static void run_sample(plain *p, uint32_t rank, uint64_t number, bool reduces, bool spoil)
{
    for (uint32_t u = 0; u < p->shape->n_units; u++) p->unit[u].n_windows = 0;
    for (uint32_t i = 0; i < p->program->n; i++) {
        const toy_line *line = &p->program->line[i];
        plain_unit *unit = &p->unit[line->unit];
        if (line->op == TOY_KERNEL || line->op == TOY_KERNEL_SECOND) run_kernel(p, line, rank, number, spoil);
        if (line->op == TOY_BACKWARD_BEGIN) {
            if (!unit->has_grads[rank]) clear_grads(p, line->unit, rank);
            unit->has_grads[rank] = true;
            unit->n_open++;
        }
        if (line->op == TOY_BACKWARD_END && --unit->n_open == 0 && reduces) reduce(p, line->unit, rank);
    }
}

static void adamw_param(plain *p, plain_param *param, const toy_unit *unit, float factor)
{
    const toy_config *c = p->config;
    float bias1 = (float)(1.0 - pow((double)0.9f, (double)p->updates)),
          bias2 = (float)(1.0 - pow((double)0.999f, (double)p->updates));
    float lr = c->lr * param->spec->lr_scale, decay = param->spec->no_decay ? 0.0f : c->weight_decay;
    for (uint64_t k = 0; k < param->spec->elems; k++) {
        float w, g, *m = &param->m[k], *v = &param->v[k];
        void *w_at = (char *)param->master + k * fsdp_dtype_bytes(unit->master);
        fsdp__load_floats(&w, w_at, 1, unit->master);
        fsdp__load_floats(&g, (const char *)param->sum + k * fsdp_dtype_bytes(unit->reduce), 1, unit->reduce);
        g = g * factor;
        if (c->optimizer == TOY_OWN_SGD) {
            w -= lr * g;
        } else {
            *m = 0.9f * *m + (1.0f - 0.9f) * g;
            *v = 0.999f * *v + (1.0f - 0.999f) * (g * g);
            w -= lr * (*m / bias1 / (sqrtf(*v / bias2) + 1e-8f) + decay * w);
        }
        fsdp__store_floats(w_at, &w, 1, unit->master);
    }
}

static double square_sum(const plain *p)
{
    double sum = 0.0;
    for (uint32_t u = 0; u < p->shape->n_units; u++) {
        const toy_unit *spec = &p->shape->unit[u];
        for (uint32_t i = 0; i < spec->n_params; i++) {
            const plain_param *param = &p->unit[u].param[i];
            for (uint64_t k = 0; k < param->spec->elems && !param->spec->frozen; k++) {
                float g;
                fsdp__load_floats(&g, (const char *)param->sum + k * fsdp_dtype_bytes(spec->reduce), 1, spec->reduce);
                sum += (double)g * (double)g;
            }
        }
    }
    return sum;
}

static void update(plain *p, const float *norm, fsdp_step_report *report)
{
    const toy_config *c = p->config;
    float factor = c->grad_sum ? 1.0f : (float)(1.0 / c->world), clip = 1.0f;
    report->grad_norm = (float)(sqrt(square_sum(p)) * (double)factor);
    float clip_by = norm != NULL ? *norm : report->grad_norm;
    report->skipped = !isfinite(report->grad_norm);
    if (c->max_norm > 0.0f && c->max_norm < clip_by) clip = c->max_norm / clip_by;
    report->clip_scale = clip;
    if (!report->skipped) p->updates++;
    report->updates = p->updates;
    for (uint32_t u = 0; u < p->shape->n_units; u++) {
        for (uint32_t i = 0; i < p->shape->unit[u].n_params && !report->skipped; i++)
            if (!p->unit[u].param[i].spec->frozen)
                adamw_param(p, &p->unit[u].param[i], &p->shape->unit[u], factor * clip);
        p->unit[u].summed = false;
        for (uint32_t i = 0; i < p->shape->unit[u].n_params; i++)
            memset(p->unit[u].param[i].sum, 0, p->unit[u].param[i].spec->elems * 4);
    }
}

static void run_step(plain *p, uint32_t step, const float *norm, toy_result *result)
{
    const toy_config *c = p->config;
    float loss[TOY_WORLD] = {0.0f};
    gather(p);
    for (uint32_t i = 0; i < c->micro_steps; i++) {
        bool reduces = c->accumulation != FSDP_ACCUMULATE_KEEP_FULL || i + 1 == c->micro_steps;
        for (uint32_t r = 0; r < c->world; r++) {
            bool spoil = c->spoil_step == step + 1 && c->spoil_rank == r;
            run_sample(p, r, ((uint64_t)step * c->micro_steps + i) * c->world + r, reduces, spoil);
            loss[r] += p->math.loss;
        }
        for (uint32_t u = 0; u < p->shape->n_units; u++) add_parts(p, u);
    }
    for (uint32_t r = 0; r < c->world; r++) result->loss[step] += loss[r];
    update(p, norm, &result->report[step]);
}

void toy_plain(const toy_config *config, const toy_shape *shape, const toy_program *program, const float *norms,
               toy_result *result)
{
    plain *p = zeros(1, sizeof *p);
    p->config = config;
    p->shape = shape;
    p->program = program;
    p->math.one = 1.0f;
    open_plain(p);
    toy_results_free(result, 1);
    memset(result, 0, sizeof *result);
    for (uint32_t step = 0; step < config->steps; step++)
        run_step(p, step, norms != NULL ? &norms[step] : NULL, result);
    close_plain(p, result);
    free(p);
}
