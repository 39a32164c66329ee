/* SPDX-License-Identifier: MIT */
/* Values in and out of shards, by way of the copy lane and two small pinned pieces in turn: the device copies one while the
 * host converts the other, and no rank ever holds a model. These calls block until values are where they should be; they
 * are for before, after and between steps. */
#include <stdio.h>
#include <string.h>

#include "lib/check.h"
#include "lib/convert.h"
#include "lib/device.h"
#include "lib/graph.h"
#include "lib/hash.h"
#include "lib/hostmem.h"
#include "lib/pinned.h"
#include "lib/side.h"
#include "sharding/layout.h"
#include "sharding/unshard.h"

enum { STAGE_ELEMS = 1 << 18 }; /* 1 MiB of fp32: the most that fsdp_model_fill asks for at a time */

/* Host staging. A piece holds values in the device's dtype; it is the device's from start_copy to wait_copy. */
typedef struct stage {
    fsdp_model *model;
    void *caller;      /* values in the caller's dtype, where that is another */
    uint64_t elems;    /* room of each; fp32 is the widest type */
    uint32_t n_pieces; /* 1: there is one chunk to copy; 2: they take turns */
    uint32_t turn;     /* of fill: the piece to use next */
    char *piece[2];    /* pinned; one allocation */
    bool busy[2];
    fsdp__fence fence[2]; /* of the copies, if there are two pieces */
} stage;

static fsdp_status open_stage(fsdp_model *model, uint64_t wanted_elems, uint32_t n_pieces, stage *st)
{
    uint64_t elems = wanted_elems < STAGE_ELEMS ? wanted_elems : STAGE_ELEMS;
    if (elems == 0) elems = 1;
    *st = (stage){.model = model, .elems = elems, .n_pieces = n_pieces};
    st->caller = fsdp__host_alloc(&model->ctx->host, elems, sizeof(float));
    if (st->caller == NULL)
        return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "model %s: no host memory for staging", model->name);
    size_t bytes = (size_t)elems * sizeof(float);
    void *pieces;
    fsdp_status status = fsdp__pinned_alloc(model->ctx, n_pieces * bytes, &pieces);
    if (status != FSDP_OK) return fsdp__fail(status, "model %s: staging: %s", model->name, fsdp_last_error());
    memset(pieces, 0, n_pieces * bytes); /* a device without data leaves it so */
    for (uint32_t i = 0; i < n_pieces; i++) st->piece[i] = (char *)pieces + i * bytes;
    return FSDP_OK;
}

static fsdp_status drain(fsdp_context *ctx)
{
    fsdp__lock(ctx);
    fsdp_status status = fsdp__device_drain_host(ctx->lanes[FSDP_LANE_COPY], ctx->timeout_ns);
    fsdp__unlock(ctx);
    return fsdp__context_explain(ctx, status);
}

/* Copy between a piece and the device on the copy lane, ordered after whoever has the bytes. */
static fsdp_status start_copy(stage *st, uint32_t i, fsdp__edges *edges, void *device, uint64_t bytes, bool write,
                              const char *label)
{
    fsdp_context *ctx = st->model->ctx;
    fsdp_stream *lane = ctx->lanes[FSDP_LANE_COPY];
    fsdp_device_op op = {.kind = FSDP_OPERATION_COPY};
    op.u.copy.dst = write ? device : st->piece[i];
    op.u.copy.src = write ? st->piece[i] : device;
    op.u.copy.bytes = bytes;
    fsdp__need need;
    fsdp__no_need(&need);
    assert(!st->busy[i]);
    fsdp__lock(ctx);
    (write ? fsdp__need_write : fsdp__need_read)(&need, edges);
    fsdp_status status = fsdp__wait_need(lane, &need);
    if (status == FSDP_OK) {
        st->busy[i] = true; /* with FSDP_DEBUG_SYNC a launch may fail and have run */
        status = fsdp__launch(lane, &op, label);
    }
    if (status == FSDP_OK) (write ? fsdp__note_write : fsdp__note_read)(edges, lane);
    if (status == FSDP_OK && st->n_pieces > 1)
        status = fsdp__record(lane, FSDP_MARK_DEMAND, lane->name, NULL, &st->fence[i]);
    fsdp__unlock(ctx);
    return status == FSDP_OK ? FSDP_OK : fsdp__context_explain(ctx, status);
}

/* The piece is the host's again. */
static fsdp_status wait_copy(stage *st, uint32_t i)
{
    fsdp_context *ctx = st->model->ctx;
    if (!st->busy[i]) return FSDP_OK;
    fsdp_status status;
    if (st->n_pieces > 1) {
        fsdp__lock(ctx);
        status = fsdp__device_event_wait_host(ctx, st->fence[i].event, ctx->timeout_ns);
        fsdp__unlock(ctx);
        status = fsdp__context_late(ctx, status, ctx->timeout_ns, "a copy of values of model %.80s has not ended",
                                    st->model->name);
    } else {
        status = drain(ctx);
    }
    if (status == FSDP_OK) st->busy[i] = false;
    return status;
}

/* Wait for what is under way, give the stage back; returns status, or what went wrong here. Pieces that a device may still
 * touch, late or stopped as it is, stay until the context is closed. */
static fsdp_status close_stage(stage *st, fsdp_status status)
{
    fsdp_context *ctx = st->model->ctx;
    fsdp_status drained = st->busy[0] || st->busy[1] ? drain(ctx) : FSDP_OK;
    if (drained == FSDP_OK) fsdp__pinned_free(ctx, st->piece[0]);
    fsdp__host_free(&ctx->host, st->caller, st->elems, sizeof(float));
    return status != FSDP_OK ? status : drained;
}

static fsdp_status check_idle(const char *call, fsdp_model *model)
{
    FSDP_TRY(fsdp__model_check_sealed(call, model));
    FSDP_TRY(fsdp__capture_off(call, model->ctx));
    if (model->phase != FSDP__IDLE || model->mid_step || model->update_due)
        return fsdp__fail(FSDP_ERR_STATE,
                          "%s: model %s is inside a step: finish pass and update first, or fsdp_pass_abort", call,
                          model->name);
    return FSDP_OK;
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
        uint32_t i = st->turn;
        st->turn = (i + 1) % st->n_pieces;
        FSDP_TRY(wait_copy(st, i));
        fsdp_param_range range = {param, begin, n};
        int answer = fn(arg, &range, dtype == master ? st->piece[i] : st->caller);
        if (answer != 0)
            return fsdp__fail(FSDP_ERR_ARG,
                              "fsdp_model_fill: your function gave up at element %llu of parameter %s: it returned %d",
                              (unsigned long long)begin, param->name, answer);
        if (dtype != master) fsdp__convert(st->piece[i], master, st->caller, dtype, n);
        FSDP_TRY(start_copy(st, i, &unit->master_edges, group->master + at * fsdp_dtype_bytes(master),
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
    unit->model->n_changes++;
    fsdp__reshard_stale(unit->model);
    fsdp__unlock(unit->model->ctx);
}

/* Most elements of the parameter that one rank has. */
static uint64_t longest_part(const fsdp_param *param)
{
    uint64_t shard = param->unit->groups[param->group].shard_elems;
    return shard < param->elems ? shard : param->elems;
}

static uint64_t longest_part_of_all(const fsdp_model *model)
{
    uint64_t longest = 0;
    for (size_t u = 0; u < model->n_units; u++) {
        for (size_t i = 0; i < model->units[u]->n_params; i++) {
            uint64_t part = longest_part(model->units[u]->params[i]);
            if (part > longest) longest = part;
        }
    }
    return longest;
}

fsdp_status fsdp_model_fill(fsdp_model *model, fsdp_fill_fn fn, void *arg, fsdp_dtype dtype)
{
    FSDP_TRY(check_idle(__func__, model));
    FSDP_NEED(fn);
    if (fsdp_dtype_bytes(dtype) == 0) return fsdp__fail(FSDP_ERR_ARG, "fsdp_model_fill: %d is no dtype", (int)dtype);
    stage st;
    fsdp_status status = open_stage(model, longest_part_of_all(model), 2, &st);
    for (size_t u = 0; status == FSDP_OK && u < model->n_units; u++) {
        fsdp_unit *unit = model->units[u];
        for (size_t i = 0; status == FSDP_OK && i < unit->n_params; i++)
            status = fill_param(unit->params[i], fn, arg, dtype, &st);
        note_new_values(unit);
    }
    return close_stage(&st, status);
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
    uint64_t longest = longest_part(param);
    fsdp_status status = open_stage(model, longest, longest > STAGE_ELEMS ? 2 : 1, &st);
    if (status == FSDP_OK) status = fill_param(param, copy_from_source, &from, dtype, &st);
    note_new_values(param->unit);
    return close_stage(&st, status);
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

/* What rank r has of the parameter in the round that begins at `done` of its part. Returns elements; 0: nothing more. */
static uint64_t round_range(const fsdp_param *param, uint32_t r, uint64_t done, uint64_t chunk, uint64_t *out_begin,
                            uint64_t *out_at)
{
    uint64_t begin, count, at;
    fsdp__layout_range(param, r, &begin, &count, &at);
    *out_begin = begin + done, *out_at = at + done;
    return count <= done ? 0 : count - done < chunk ? count - done : chunk;
}

/* Begin to read this rank's round into piece i; nothing if it has nothing more. */
static fsdp_status start_round(const fsdp_param *param, const column *col, uint64_t done, stage *st, uint32_t i)
{
    size_t each = fsdp_dtype_bytes(col->dtype);
    uint64_t begin, at, n = round_range(param, st->model->ctx->rank, done, st->elems, &begin, &at);
    return n == 0 ? FSDP_OK : start_copy(st, i, col->edges, col->base + at * each, n * each, false, param->unit->name);
}

/* In rounds: every rank sends its next st->elems over the side channel while the device reads those after them, and
 * everybody puts all of them where they belong. Each round is voted on: who cannot read its part must not leave the others
 * in a gather, whose place this rank's next call would take. */
static fsdp_status collect(fsdp_param *param, fsdp_value value, const column *col, char *dst, fsdp_dtype dtype,
                           stage *st, char *all)
{
    fsdp_context *ctx = st->model->ctx;
    size_t each = fsdp_dtype_bytes(col->dtype), dst_each = fsdp_dtype_bytes(dtype);
    fsdp_dtype compute = param->unit->groups[param->group].compute_dtype;
    uint64_t chunk = st->elems, longest = longest_part(param);
    fsdp_status status = longest > 0 ? start_round(param, col, 0, st, 0) : FSDP_OK;
    for (uint64_t done = 0, i = 0; done < longest; done += chunk, i ^= 1) {
        if (status == FSDP_OK && done + chunk < longest)
            status = start_round(param, col, done + chunk, st, (uint32_t)i ^ 1);
        if (status == FSDP_OK) status = wait_copy(st, (uint32_t)i);
        FSDP_TRY(fsdp__side_vote(ctx, status, "fsdp_param_get"));
        FSDP_TRY(fsdp__side_all_gather(ctx, st->piece[i], all, chunk * each));
        for (uint32_t r = 0; dst != NULL && r < ctx->world; r++) {
            uint64_t begin, at, n = round_range(param, r, done, chunk, &begin, &at);
            if (n == 0) continue;
            const char *from = all + r * chunk * each;
            fsdp_dtype from_dtype = col->dtype;
            if (value == FSDP_VALUE_COMPUTE) {
                fsdp__convert(st->caller, compute, from, col->dtype, n);
                from = st->caller, from_dtype = compute;
            }
            fsdp__convert(dst + begin * dst_each, dtype, from, from_dtype, n);
        }
    }
    return FSDP_OK;
}

static const char *const value_names[] = {[FSDP_VALUE_MASTER] = "FSDP_VALUE_MASTER",
                                          [FSDP_VALUE_COMPUTE] = "FSDP_VALUE_COMPUTE",
                                          [FSDP_VALUE_GRADIENT] = "FSDP_VALUE_GRADIENT",
                                          [FSDP_VALUE_MOMENT_1] = "FSDP_VALUE_MOMENT_1",
                                          [FSDP_VALUE_MOMENT_2] = "FSDP_VALUE_MOMENT_2"};

fsdp_status fsdp_param_get(fsdp_param *param, fsdp_value value, void *dst, fsdp_dtype dtype)
{
    FSDP_NEED(param);
    fsdp_model *model = param->unit->model;
    FSDP_TRY(check_idle(__func__, model));
    if (fsdp_dtype_bytes(dtype) == 0) return fsdp__fail(FSDP_ERR_ARG, "fsdp_param_get: %d is no dtype", (int)dtype);
    column col = {0};
    FSDP_TRY(find_column(param, value, &col));
    fsdp_context *ctx = model->ctx;
    char what[512]; /* find_column knows the value */
    snprintf(what, sizeof what, "fsdp_param_get of %s of parameter %u, %.400s", value_names[value], param->number,
             param->name);
    FSDP_TRY(fsdp__side_agree(ctx, what));
    uint64_t chunk = STAGE_ELEMS / ctx->world, longest = longest_part(param);
    if (chunk == 0) chunk = 1;
    if (chunk > longest) chunk = longest;
    stage st;
    fsdp_status status = open_stage(model, chunk, longest > chunk ? 2 : 1, &st);
    char *all = fsdp__host_alloc(&ctx->host, ctx->world * chunk, sizeof(float));
    if (status == FSDP_OK && all == NULL)
        status = fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "fsdp_param_get: no host memory for staging");
    status = fsdp__side_vote(ctx, status, "fsdp_param_get");
    if (status == FSDP_OK) status = collect(param, value, &col, dst, dtype, &st, all);
    fsdp__host_free(&ctx->host, all, ctx->world * chunk, sizeof(float));
    return fsdp__side_end(ctx, close_stage(&st, status));
}

/* Every element contributes mix(parameter, its index, its bits) to a sum, so neither order nor owner matters. */
static void hash_elems(uint64_t seed, uint64_t begin, uint64_t n, const char *elems, size_t each, uint64_t *hash)
{
    for (uint64_t i = 0; i < n; i++) {
        uint32_t bits = 0;
        memcpy(&bits, elems + i * each, each);
        *hash += fsdp__mix(fsdp__mix(seed ^ (begin + i)) + bits);
    }
}

static fsdp_status hash_param(fsdp_param *param, stage *st, uint64_t *hash)
{
    fsdp_unit *unit = param->unit;
    column col = {unit->groups[param->group].master, unit->config.master_dtype, &unit->master_edges};
    size_t each = fsdp_dtype_bytes(col.dtype);
    uint32_t rank = unit->model->ctx->rank;
    uint64_t seed = fsdp__mix(fsdp__hash_text(param->name)), begin, at, n;
    if (rank == 0) { /* the shape, once */
        *hash += fsdp__mix(seed ^ param->n_dims);
        for (uint32_t i = 0; i < param->n_dims; i++)
            *hash += fsdp__mix(seed + (i + 1) * 0x632be59bd9b4e019ull + param->dims[i]);
    }
    FSDP_TRY(start_round(param, &col, 0, st, 0));
    for (uint64_t done = 0, i = 0; (n = round_range(param, rank, done, st->elems, &begin, &at)) > 0; i ^= 1) {
        FSDP_TRY(start_round(param, &col, done + n, st, (uint32_t)i ^ 1));
        FSDP_TRY(wait_copy(st, (uint32_t)i));
        hash_elems(seed, begin, n, st->piece[i], each, hash);
        done += n;
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
    fsdp_status status = open_stage(model, longest_part_of_all(model), 2, &st);
    if (status == FSDP_OK && all == NULL)
        status = fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "fsdp_model_hash: no host memory");
    for (size_t u = 0; status == FSDP_OK && u < model->n_units; u++)
        for (size_t i = 0; status == FSDP_OK && i < model->units[u]->n_params; i++)
            status = hash_param(model->units[u]->params[i], &st, &hash);
    status = fsdp__side_vote(ctx, status, "fsdp_model_hash");
    if (status == FSDP_OK) status = fsdp__side_all_gather(ctx, &hash, all, sizeof hash);
    for (uint32_t r = 0; status == FSDP_OK && r < ctx->world; r++) sum += all[r];
    fsdp__host_free(&ctx->host, all, ctx->world, sizeof *all);
    FSDP_TRY(fsdp__side_end(ctx, close_stage(&st, status)));
    *out_hash = sum;
    return FSDP_OK;
}
