/* SPDX-License-Identifier: MIT */
/* Values in and out of shards, by way of the copy lane and a small staging buffer: no rank ever holds a model. These calls
 * block until values are where they should be; they are for before, after and between steps. */
#include <stdio.h>
#include <string.h>

#include "lib/check.h"
#include "lib/convert.h"
#include "lib/device.h"
#include "lib/hash.h"
#include "lib/hostmem.h"
#include "lib/side.h"
#include "sharding/layout.h"
#include "sharding/unshard.h"

enum { STAGE_ELEMS = 1 << 18 }; /* 1 MiB of fp32 */

/* Host staging: values in the caller's dtype, and the same in the device's. */
typedef struct stage {
    void *caller, *device;
    uint64_t elems; /* room of each; fp32 is the widest type */
} stage;

static fsdp_status open_stage(fsdp_model *model, uint64_t wanted_elems, stage *st)
{
    st->elems = wanted_elems < STAGE_ELEMS ? wanted_elems : STAGE_ELEMS;
    st->caller = fsdp__host_alloc(&model->ctx->host, st->elems, sizeof(float));
    st->device = fsdp__host_alloc(&model->ctx->host, st->elems, sizeof(float));
    if (st->caller != NULL && st->device != NULL) return FSDP_OK;
    return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "model %s: no host memory for staging", model->name);
}

static void close_stage(fsdp_model *model, stage *st)
{
    fsdp__host_free(&model->ctx->host, st->caller, st->elems, sizeof(float));
    fsdp__host_free(&model->ctx->host, st->device, st->elems, sizeof(float));
}

static fsdp_status check_idle(const char *call, fsdp_model *model)
{
    FSDP_TRY(fsdp__model_check_sealed(call, model));
    if (model->phase != FSDP__IDLE || model->mid_step || model->update_due)
        return fsdp__fail(FSDP_ERR_STATE,
                          "%s: model %s is inside a step: finish pass and update first, or fsdp_pass_abort", call,
                          model->name);
    return FSDP_OK;
}

/* Copy on the copy lane, ordered after whoever has the bytes, and wait for it: the host buffer is the caller's again. */
static fsdp_status copy_host(fsdp_model *model, fsdp__edges *edges, void *dst, const void *src, uint64_t bytes,
                             bool write, const char *label)
{
    fsdp_stream *lane = model->ctx->lanes[FSDP_LANE_COPY];
    fsdp__need need = {0};
    fsdp__lock(model->ctx);
    (write ? fsdp__need_write : fsdp__need_read)(&need, edges);
    fsdp_status status = fsdp__wait_need(lane, &need);
    fsdp_device_op op = {.kind = FSDP_OPERATION_COPY, .u.copy = {dst, src, bytes}};
    if (status == FSDP_OK) status = fsdp__launch(lane, &op, label);
    if (status == FSDP_OK) (write ? fsdp__note_write : fsdp__note_read)(edges, lane);
    if (status == FSDP_OK) status = fsdp__device_drain_host(lane, model->ctx->timeout_ns);
    fsdp__unlock(model->ctx);
    return fsdp__context_explain(model->ctx, status);
}

/* Ask fn for this rank's part of one parameter, chunk by chunk. */
static fsdp_status fill_param(fsdp_param *param, fsdp_fill_fn fn, void *arg, fsdp_dtype dtype, stage *st)
{
    fsdp_unit *unit = param->unit;
    const fsdp__group *group = &unit->groups[param->group];
    fsdp_dtype master = unit->config.master_dtype;
    uint64_t begin, count, at;
    fsdp__layout_range(param, unit->model->ctx->rank, &begin, &count, &at);
    while (count > 0) {
        uint64_t n = count < st->elems ? count : st->elems;
        fsdp_param_range range = {param, begin, n};
        if (fn(arg, &range, st->caller) != 0)
            return fsdp__fail(FSDP_ERR_ARG, "fsdp_model_fill: your function gave up at element %llu of parameter %s",
                              (unsigned long long)begin, param->name);
        fsdp__convert(st->device, master, st->caller, dtype, n);
        FSDP_TRY(copy_host(unit->model, &unit->master_edges, group->master + at * fsdp_dtype_bytes(master), st->device,
                           n * fsdp_dtype_bytes(master), true, unit->name));
        begin += n, at += n, count -= n;
    }
    return FSDP_OK;
}

/* The shard has new values: what was gathered from the old ones is stale. */
static void note_new_values(fsdp_unit *unit)
{
    fsdp__lock(unit->model->ctx);
    unit->version++;
    fsdp__reshard_stale(unit->model);
    fsdp__unlock(unit->model->ctx);
}

fsdp_status fsdp_model_fill(fsdp_model *model, fsdp_fill_fn fn, void *arg, fsdp_dtype dtype)
{
    FSDP_TRY(check_idle(__func__, model));
    FSDP_NEED(fn);
    if (fsdp_dtype_bytes(dtype) == 0) return fsdp__fail(FSDP_ERR_ARG, "fsdp_model_fill: %d is no dtype", (int)dtype);
    stage st;
    fsdp_status status = open_stage(model, STAGE_ELEMS, &st);
    for (size_t u = 0; status == FSDP_OK && u < model->n_units; u++) {
        fsdp_unit *unit = model->units[u];
        for (size_t i = 0; status == FSDP_OK && i < unit->n_params; i++)
            status = fill_param(unit->params[i], fn, arg, dtype, &st);
        note_new_values(unit);
    }
    close_stage(model, &st);
    return status;
}

/* Most elements of the parameter that one rank has. */
static uint64_t longest_part(const fsdp_param *param)
{
    uint64_t shard = param->unit->groups[param->group].shard_elems;
    return shard < param->elems ? shard : param->elems;
}

/* A fill function over a whole parameter in host memory. */
typedef struct source {
    const char *elems;
    size_t each;
} source;

static int copy_from_source(void *arg, const fsdp_param_range *range, void *dst)
{
    const source *src = arg;
    memcpy(dst, src->elems + range->begin * src->each, range->count * src->each);
    return 0;
}

fsdp_status fsdp_param_set(fsdp_param *param, const void *src, fsdp_dtype dtype)
{
    FSDP_NEED(param);
    fsdp_model *model = param->unit->model;
    FSDP_TRY(check_idle(__func__, model));
    if (param->elems > 0) FSDP_NEED(src);
    if (fsdp_dtype_bytes(dtype) == 0) return fsdp__fail(FSDP_ERR_ARG, "fsdp_param_set: %d is no dtype", (int)dtype);
    source from = {src, fsdp_dtype_bytes(dtype)};
    stage st;
    fsdp_status status = open_stage(model, longest_part(param), &st);
    if (status == FSDP_OK) status = fill_param(param, copy_from_source, &from, dtype, &st);
    close_stage(model, &st);
    note_new_values(param->unit);
    return status;
}

/* One of a parameter's per-shard arrays. */
typedef struct column {
    char *base;
    fsdp_dtype dtype;
    fsdp__edges *edges;
} column;

static fsdp_status find_column(fsdp_param *param, fsdp_value value, column *out)
{
    fsdp_unit *unit = param->unit;
    const fsdp__group *group = &unit->groups[param->group];
    if (value < FSDP_VALUE_MASTER || value > FSDP_VALUE_MOMENT_2)
        return fsdp__fail(FSDP_ERR_ARG, "fsdp_param_get: value %d does not exist", (int)value);
    *out = (column){group->master, unit->config.master_dtype, &unit->master_edges};
    if (value == FSDP_VALUE_MASTER || value == FSDP_VALUE_COMPUTE) return FSDP_OK;
    if (group->frozen)
        return fsdp__fail(FSDP_ERR_UNSUPPORTED,
                          "fsdp_param_get: parameter %s is frozen: it has no gradient and no moments", param->name);
    if (value == FSDP_VALUE_GRADIENT) {
        *out = (column){group->gradient, unit->config.reduce_dtype, &unit->gradient_edges};
        return FSDP_OK;
    }
    if (unit->model->adamw == NULL)
        return fsdp__fail(FSDP_ERR_UNSUPPORTED,
                          "fsdp_param_get: model %s has no optimizer, so parameter %s has no moments",
                          unit->model->name, param->name);
    /* Moments are written with the master, between the same fences. */
    *out = (column){(char *)(value == FSDP_VALUE_MOMENT_1 ? group->m : group->v), FSDP_DTYPE_FP32, &unit->master_edges};
    return FSDP_OK;
}

/* In rounds: every rank sends its next st->elems over the side channel, everybody puts all of them where they belong. */
static fsdp_status collect(fsdp_param *param, fsdp_value value, const column *col, char *dst, fsdp_dtype dtype,
                           stage *st, char *all)
{
    fsdp_unit *unit = param->unit;
    fsdp_context *ctx = unit->model->ctx;
    size_t each = fsdp_dtype_bytes(col->dtype), dst_each = fsdp_dtype_bytes(dtype);
    fsdp_dtype compute = unit->groups[param->group].compute_dtype;
    uint64_t chunk = st->elems, longest = longest_part(param);
    for (uint64_t done = 0; done < longest; done += chunk) {
        uint64_t begin, count, at;
        fsdp__layout_range(param, ctx->rank, &begin, &count, &at);
        uint64_t n = count > done ? (count - done < chunk ? count - done : chunk) : 0;
        if (n > 0)
            FSDP_TRY(copy_host(unit->model, col->edges, st->device, col->base + (at + done) * each, n * each, false,
                               unit->name));
        FSDP_TRY(fsdp__side_all_gather(ctx, st->device, all, chunk * each));
        for (uint32_t r = 0; dst != NULL && r < ctx->world; r++) {
            fsdp__layout_range(param, r, &begin, &count, &at);
            n = count > done ? (count - done < chunk ? count - done : chunk) : 0;
            if (n == 0) continue;
            const char *from = all + r * chunk * each;
            fsdp_dtype from_dtype = col->dtype;
            if (value == FSDP_VALUE_COMPUTE) {
                fsdp__convert(st->caller, compute, from, col->dtype, n);
                from = st->caller, from_dtype = compute;
            }
            fsdp__convert(dst + (begin + done) * dst_each, dtype, from, from_dtype, n);
        }
    }
    return FSDP_OK;
}

fsdp_status fsdp_param_get(fsdp_param *param, fsdp_value value, void *dst, fsdp_dtype dtype)
{
    FSDP_NEED(param);
    fsdp_model *model = param->unit->model;
    FSDP_TRY(check_idle(__func__, model));
    if (fsdp_dtype_bytes(dtype) == 0) return fsdp__fail(FSDP_ERR_ARG, "fsdp_param_get: %d is no dtype", (int)dtype);
    column col = {0};
    FSDP_TRY(find_column(param, value, &col));
    fsdp_context *ctx = model->ctx;
    char what[512];
    snprintf(what, sizeof what, "fsdp_param_get of value %d of parameter %u, %.400s", (int)value, param->number,
             param->name);
    FSDP_TRY(fsdp__side_agree(ctx, what));
    uint64_t chunk = STAGE_ELEMS / ctx->world, longest = longest_part(param);
    if (chunk == 0) chunk = 1;
    if (chunk > longest) chunk = longest;
    stage st;
    fsdp_status status = open_stage(model, chunk, &st);
    char *all = fsdp__host_alloc(&ctx->host, ctx->world * chunk, sizeof(float));
    if (status == FSDP_OK && all == NULL)
        status = fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "fsdp_param_get: no host memory for staging");
    status = fsdp__side_vote(ctx, status, "fsdp_param_get");
    if (status == FSDP_OK) status = collect(param, value, &col, dst, dtype, &st, all);
    fsdp__host_free(&ctx->host, all, ctx->world * chunk, sizeof(float));
    close_stage(model, &st);
    return status;
}

/* Every element contributes mix(parameter, its index, its bits) to a sum, so neither order nor owner matters. */
static fsdp_status hash_param(fsdp_param *param, stage *st, uint64_t *hash)
{
    fsdp_unit *unit = param->unit;
    size_t each = fsdp_dtype_bytes(unit->config.master_dtype);
    uint64_t seed = fsdp__mix(fsdp__hash_text(param->name)), begin, count, at;
    if (unit->model->ctx->rank == 0) { /* the shape, once */
        *hash += fsdp__mix(seed ^ param->n_dims);
        for (uint32_t i = 0; i < param->n_dims; i++)
            *hash += fsdp__mix(seed + (i + 1) * 0x632be59bd9b4e019ull + param->dims[i]);
    }
    fsdp__layout_range(param, unit->model->ctx->rank, &begin, &count, &at);
    const char *base = unit->groups[param->group].master;
    while (count > 0) {
        uint64_t n = count < st->elems ? count : st->elems;
        FSDP_TRY(
            copy_host(unit->model, &unit->master_edges, st->device, base + at * each, n * each, false, unit->name));
        for (uint64_t i = 0; i < n; i++) {
            uint32_t bits = 0;
            memcpy(&bits, (const char *)st->device + i * each, each);
            *hash += fsdp__mix(fsdp__mix(seed ^ (begin + i)) + bits);
        }
        begin += n, at += n, count -= n;
    }
    return FSDP_OK;
}

fsdp_status fsdp_model_hash(fsdp_model *model, uint64_t *out_hash)
{
    FSDP_TRY(check_idle(__func__, model));
    FSDP_NEED(out_hash);
    fsdp_context *ctx = model->ctx;
    FSDP_TRY(fsdp__side_agree(ctx, "fsdp_model_hash"));
    stage st;
    uint64_t hash = 0, sum = 0, *all = fsdp__host_alloc(&ctx->host, ctx->world, sizeof *all);
    fsdp_status status = open_stage(model, STAGE_ELEMS, &st);
    if (status == FSDP_OK && all == NULL)
        status = fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "fsdp_model_hash: no host memory");
    for (size_t u = 0; status == FSDP_OK && u < model->n_units; u++)
        for (size_t i = 0; status == FSDP_OK && i < model->units[u]->n_params; i++)
            status = hash_param(model->units[u]->params[i], &st, &hash);
    status = fsdp__side_vote(ctx, status, "fsdp_model_hash");
    if (status == FSDP_OK) status = fsdp__side_all_gather(ctx, &hash, all, sizeof hash);
    for (uint32_t r = 0; status == FSDP_OK && r < ctx->world; r++) sum += all[r];
    if (status == FSDP_OK) *out_hash = sum;
    fsdp__host_free(&ctx->host, all, ctx->world, sizeof *all);
    close_stage(model, &st);
    return status;
}
