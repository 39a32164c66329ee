/* SPDX-License-Identifier: MIT */
#include "toy_math.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "convert.h"

/* ---- Shapes ---- */

static toy_param *add_param(toy_unit *unit, const char *name, uint32_t n_dims, uint64_t rows, uint64_t columns)
{
    toy_param *param = &unit->param[unit->n_params++];
    char prefix[sizeof unit->name];
    memcpy(prefix, unit->name, sizeof prefix);
    snprintf(param->name, sizeof param->name, "%s.%s", prefix, name);
    param->n_dims = n_dims;
    param->dims[0] = rows;
    param->dims[1] = columns;
    param->elems = (n_dims > 0 ? rows : 1) * (n_dims > 1 ? columns : 1);
    param->compute = unit->compute;
    param->lr_scale = 1.0f;
    return param;
}

static toy_unit *add_unit(toy_shape *shape, const toy_shape_config *config, const char *name)
{
    toy_unit *unit = &shape->unit[shape->n_units++];
    snprintf(unit->name, sizeof unit->name, "%s", name);
    unit->compute = config->compute;
    unit->grad = config->grad;
    unit->reduce = config->reduce;
    unit->master = config->master;
    return unit;
}

static void add_table(toy_shape *shape, const toy_shape_config *config, const char *name)
{
    toy_unit *unit = add_unit(shape, config, name);
    unit->held = config->tied;
    add_param(unit, "table", 2, TOY_VOCAB, shape->width[0]);
    toy_param *gain = add_param(unit, "gain", 1, shape->width[0], 0);
    gain->no_decay = true;
    if (config->mixed) gain->compute = FSDP_DTYPE_FP32;
}

static void add_layer(toy_shape *shape, const toy_shape_config *config, uint32_t layer)
{
    char name[16];
    snprintf(name, sizeof name, "h.%u", layer);
    toy_unit *unit = add_unit(shape, config, name);
    uint64_t in = shape->width[layer], out = shape->width[layer + 1];
    add_param(unit, "weight", 2, out, in);
    toy_param *bias = add_param(unit, "bias", 1, out, 0);
    bias->no_decay = true;
    if (config->mixed) bias->compute = FSDP_DTYPE_FP16;
    add_param(unit, "scale", 0, 0, 0)->lr_scale = 0.5f;
    add_param(unit, "nothing", 2, 0, 7);
    add_param(unit, "shift", 1, out, 0)->frozen = true;
    toy_param *extra = add_param(unit, "extra", 1, config->square ? 2 + 150ull * layer * layer : 2, 0);
    if (config->mixed) extra->compute = FSDP_DTYPE_FP32;
    for (uint32_t i = 0; config->frozen_layer && layer == 2 && i < unit->n_params; i++) unit->param[i].frozen = true;
}

void toy_shape_make(const toy_shape_config *config, toy_shape *shape)
{
    static const uint32_t uneven[TOY_LAYERS + 1] = {19, 67, 71, 5, 31, 19};
    memset(shape, 0, sizeof *shape);
    shape->n_layers = TOY_LAYERS;
    for (int i = 0; i <= TOY_LAYERS; i++) shape->width[i] = config->square ? 23 : uneven[i];
    shape->first = 1;
    add_table(shape, config, config->tied ? "tied" : "embed");
    for (uint32_t layer = 0; layer < TOY_LAYERS; layer++) add_layer(shape, config, layer);
    if (!config->tied) add_table(shape, config, "head");
    shape->head = config->tied ? 0 : TOY_LAYERS + 1;
}

static uint64_t mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

float toy_initial(const toy_shape *shape, uint32_t unit, uint32_t param, uint64_t i)
{
    float centre = param == 2 || (unit == shape->embed && param == 1) ? 1.0f : 0.0f; /* scales and gains */
    return centre +
           ((float)(mix(((uint64_t)unit << 40) + ((uint64_t)param << 32) + i) >> 40) / 16777216.0f - 0.5f) * 0.6f;
}

/* ---- Elements ---- */

static float load(const void *base, fsdp_dtype dtype, uint64_t i)
{
    float value;
    fsdp__load_floats(&value, (const char *)base + i * fsdp_dtype_bytes(dtype), 1, dtype);
    return value;
}

/* A matrix or vector in fp32. */
static void load_all(float *dst, const toy_job *job, uint32_t param)
{
    const toy_param *p = &job->shape->unit[job->unit].param[param];
    fsdp__load_floats(dst, job->p[param], p->elems, p->compute);
}

static void accumulate(const toy_job *job, uint32_t param, uint64_t i, float term)
{
    fsdp_dtype dtype = job->shape->unit[job->unit].grad;
    if (job->g[param] == NULL) return; /* frozen */
    float sum = load(job->g[param], dtype, i) + term;
    fsdp__store_floats((char *)job->g[param] + i * fsdp_dtype_bytes(dtype), &sum, 1, dtype);
}

static uint32_t token_of(uint64_t sample, uint64_t row) { return (uint32_t)((sample * 7 + row * 3) % TOY_VOCAB); }
static float target_of(uint64_t sample, uint64_t row, uint64_t v)
{
    return (float)((sample * 5 + row * 11 + v * 3) % 13) * 0.1f - 0.6f;
}

/* ---- Kernels ---- */

static void embed(const toy_job *job)
{
    float table[TOY_VOCAB * TOY_WIDTH], gain[TOY_WIDTH];
    uint32_t width = job->shape->width[0];
    load_all(table, job, 0);
    load_all(gain, job, 1);
    for (uint32_t b = 0; b < TOY_BATCH; b++)
        for (uint32_t i = 0; i < width; i++)
            job->math->x[0][b][i] = table[token_of(job->sample, b) * width + i] * gain[i];
}

static void embed_back(const toy_job *job)
{
    float table[TOY_VOCAB * TOY_WIDTH], gain[TOY_WIDTH];
    uint32_t width = job->shape->width[0];
    load_all(table, job, 0);
    load_all(gain, job, 1);
    for (uint32_t b = 0; b < TOY_BATCH; b++) {
        uint32_t row = token_of(job->sample, b) * width;
        for (uint32_t i = 0; i < width; i++) {
            float d = job->math->dx[0][b][i];
            accumulate(job, 0, row + i, d * gain[i]);
            accumulate(job, 1, i, d * table[row + i]);
        }
    }
}

static void layer(const toy_job *job)
{
    static _Thread_local float weight[TOY_WIDTH * TOY_WIDTH];
    float bias[TOY_WIDTH], shift[TOY_WIDTH];
    uint32_t l = job->unit - job->shape->first, in = job->shape->width[l], out = job->shape->width[l + 1];
    const toy_param *extra = &job->shape->unit[job->unit].param[5];
    load_all(weight, job, 0);
    load_all(bias, job, 1);
    load_all(shift, job, 4);
    float scale = load(job->p[2], job->shape->unit[job->unit].param[2].compute, 0);
    toy_math *m = job->math;
    for (uint32_t b = 0; b < TOY_BATCH; b++) {
        for (uint32_t i = 0; i < out; i++) {
            float u = 0.0f;
            for (uint32_t j = 0; j < in; j++) u += weight[i * in + j] * m->x[job->at][b][j];
            float z = scale * u + bias[i] + shift[i] + load(job->p[5], extra->compute, i % extra->elems);
            m->u[job->at][b][i] = u;
            m->z[job->at][b][i] = z;
            m->x[job->at + 1][b][i] = z / (1.0f + fabsf(z));
        }
    }
}

static void layer_back_rest(const toy_job *job)
{
    static _Thread_local float weight[TOY_WIDTH * TOY_WIDTH];
    uint32_t l = job->unit - job->shape->first, in = job->shape->width[l], out = job->shape->width[l + 1];
    const toy_param *extra = &job->shape->unit[job->unit].param[5];
    load_all(weight, job, 0);
    float scale = load(job->p[2], job->shape->unit[job->unit].param[2].compute, 0);
    toy_math *m = job->math;
    for (uint32_t b = 0; b < TOY_BATCH; b++) {
        memset(m->dx[job->at][b], 0, sizeof m->dx[job->at][b]);
        for (uint32_t i = 0; i < out; i++) {
            float slope = 1.0f + fabsf(m->z[job->at][b][i]);
            float dz = m->dx[job->at + 1][b][i] / (slope * slope);
            m->dz[job->at][b][i] = dz;
            accumulate(job, 1, i, dz);
            accumulate(job, 2, 0, dz * m->u[job->at][b][i]);
            accumulate(job, 4, i, dz);
            accumulate(job, 5, i % extra->elems, dz);
            for (uint32_t j = 0; j < in; j++) m->dx[job->at][b][j] += dz * scale * weight[i * in + j];
        }
    }
    if (job->spoil) accumulate(job, 1, 1, NAN);
}

static void layer_back_weight(const toy_job *job)
{
    uint32_t l = job->unit - job->shape->first, in = job->shape->width[l], out = job->shape->width[l + 1];
    float scale = load(job->p[2], job->shape->unit[job->unit].param[2].compute, 0);
    const toy_math *m = job->math;
    for (uint32_t b = 0; b < TOY_BATCH; b++)
        for (uint32_t i = 0; i < out; i++)
            for (uint32_t j = 0; j < in; j++)
                accumulate(job, 0, i * in + j, m->dz[job->at][b][i] * scale * m->x[job->at][b][j]);
}

static void head(const toy_job *job)
{
    float table[TOY_VOCAB * TOY_WIDTH], gain[TOY_WIDTH];
    uint32_t width = job->shape->width[0];
    load_all(table, job, 0);
    load_all(gain, job, 1);
    toy_math *m = job->math;
    m->loss = 0.0f;
    for (uint32_t b = 0; b < TOY_BATCH; b++) {
        for (uint32_t v = 0; v < TOY_VOCAB; v++) {
            float logit = 0.0f;
            for (uint32_t i = 0; i < width; i++) logit += table[v * width + i] * gain[i] * m->x[job->at][b][i];
            float miss = logit - target_of(job->sample, b, v);
            m->dlogit[b][v] = miss / TOY_VOCAB;
            m->loss += miss * miss / (2 * TOY_VOCAB);
        }
    }
}

static void head_back(const toy_job *job)
{
    float table[TOY_VOCAB * TOY_WIDTH], gain[TOY_WIDTH];
    uint32_t width = job->shape->width[0];
    load_all(table, job, 0);
    load_all(gain, job, 1);
    toy_math *m = job->math;
    for (uint32_t b = 0; b < TOY_BATCH; b++) {
        for (uint32_t i = 0; i < width; i++) {
            float y = m->x[job->at][b][i], sum = 0.0f;
            for (uint32_t v = 0; v < TOY_VOCAB; v++) {
                sum += m->dlogit[b][v] * table[v * width + i];
                accumulate(job, 0, v * width + i, m->dlogit[b][v] * gain[i] * y);
            }
            accumulate(job, 1, i, sum * y);
            m->dx[job->at][b][i] = sum * gain[i];
        }
    }
}

static void look(const toy_job *job)
{
    const toy_param *p = &job->shape->unit[job->unit].param[0];
    float sum = 0.0f;
    for (uint64_t i = 0; i < p->elems; i++) sum += load(job->p[0], p->compute, i);
    job->math->seen = sum;
}

static void pull(const toy_job *job)
{
    const toy_param *p = &job->shape->unit[job->unit].param[0];
    for (uint64_t i = 0; i < p->elems; i++) accumulate(job, 0, i, 0.01f * load(job->p[0], p->compute, i));
}

void toy_compute(void *arg)
{
    const toy_job *job = arg;
    switch (job->kernel) {
    case TOY_EMBED: embed(job); break;
    case TOY_LAYER: layer(job); break;
    case TOY_HEAD: head(job); break;
    case TOY_HEAD_BACK: head_back(job); break;
    case TOY_LAYER_BACK:
        layer_back_rest(job);
        layer_back_weight(job);
        break;
    case TOY_LAYER_BACK_REST: layer_back_rest(job); break;
    case TOY_LAYER_BACK_WEIGHT: layer_back_weight(job); break;
    case TOY_PULL: pull(job); break;
    case TOY_EMBED_BACK: embed_back(job); break;
    case TOY_LOOK: look(job); break;
    }
}
