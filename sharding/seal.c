/* SPDX-License-Identifier: MIT */
/* Seal: the collective end of registration. Plan, compare with the other ranks, vote, take every byte, run each kind of
 * collective once. Either all ranks are sealed, or none is and every one knows why. */
#include "sharding/seal.h"

#include <stdio.h>
#include <string.h>

#include "lib/check.h"
#include "lib/comm.h"
#include "lib/device.h"
#include "lib/graph.h"
#include "lib/hash.h"
#include "lib/hostmem.h"
#include "lib/side.h"
#include "sharding/pass.h"
#include "sharding/plan.h"
#include "sharding/shard.h"

enum { ITEM_BYTES = 400 };

/* Everything that must agree is an item with a line of text: the model, its bytes, each unit, each parameter, each pass. */
static uint32_t count_items(const fsdp_model *model)
{
    return 2 + (uint32_t)model->n_units + model->n_params + (uint32_t)model->n_passes;
}

/* What stands for a name that is longer than its line has room for. */
typedef struct tail {
    char text[24];
} tail;

static tail tail_of(const char *name, size_t room)
{
    tail t = {""};
    size_t bytes = strlen(name);
    if (bytes > room)
        snprintf(t.text, sizeof t.text, "…#%016llx",
                 (unsigned long long)fsdp__hash_bytes(FSDP__HASH_SEED, name, bytes));
    return t;
}

static void describe_param(const fsdp_param *p, char *text)
{
    int n = snprintf(text, ITEM_BYTES, "parameter %.80s%s of unit %.40s: %s%s, lr_scale %.9g%s, shape [", p->name,
                     tail_of(p->name, 80).text, p->unit->name, fsdp_dtype_name(p->compute_dtype),
                     p->frozen ? " frozen" : "", (double)p->lr_scale, p->no_decay ? ", no decay" : "");
    for (uint32_t i = 0; i < p->n_dims && n < ITEM_BYTES; i++)
        n += snprintf(text + n, (size_t)(ITEM_BYTES - n), "%s%llu", i ? ", " : "", (unsigned long long)p->dims[i]);
    if (n < ITEM_BYTES) snprintf(text + n, (size_t)(ITEM_BYTES - n), "]");
}

static void describe_pass(const fsdp__pass *pass, char *text)
{
    uint64_t h = FSDP__HASH_SEED;
    for (uint32_t i = 0; i < pass->n; i++) {
        uint32_t line[3] = {pass->visits[i].unit, (uint32_t)pass->given[i].use, pass->visits[i].until};
        h = fsdp__hash_bytes(h, line, sizeof line);
    }
    snprintf(text, ITEM_BYTES, "pass %.80s%s: %u visits, list %016llx", pass->name, tail_of(pass->name, 80).text,
             pass->n, (unsigned long long)h);
}

/* As the header has them, behind FSDP_ACCUMULATE_ and FSDP_RESHARD_; created with one of these. */
static const char *const accumulation_names[] = {[FSDP_ACCUMULATE_NONE] = "NONE",
                                                 [FSDP_ACCUMULATE_REDUCE_EACH] = "REDUCE_EACH",
                                                 [FSDP_ACCUMULATE_KEEP_FULL] = "KEEP_FULL"};
static const char *const reshard_names[] = {[FSDP_RESHARD_AFTER_USE] = "AFTER_USE", [FSDP_RESHARD_NEVER] = "NEVER"};

static void describe_unit(const fsdp_unit *u, char *text)
{
    const fsdp_unit_config *c = &u->config;
    snprintf(text, ITEM_BYTES,
             "unit %.80s%s: %zu parameters, compute %s, grad %s, reduce %s, master %s, reshard %s, zero_grads %d",
             u->name, tail_of(u->name, 80).text, u->n_params, fsdp_dtype_name(c->compute_dtype),
             fsdp_dtype_name(c->grad_dtype), fsdp_dtype_name(c->reduce_dtype), fsdp_dtype_name(c->master_dtype),
             reshard_names[c->reshard], (int)c->zero_grads);
}

static void describe_model(const fsdp_model *model, char *text)
{
    const fsdp_model_config *c = &model->config;
    int n = snprintf(text, ITEM_BYTES,
                     "model %.60s%s: depth %u, prefetch_bytes %llu, grad_buffers %u, accumulation %s, grad_sum %d",
                     model->name, tail_of(model->name, 60).text, c->depth, (unsigned long long)c->prefetch_bytes,
                     c->grad_buffers, accumulation_names[c->accumulation], (int)c->grad_sum);
    const fsdp_adamw *opt = model->adamw;
    if (opt != NULL && n < ITEM_BYTES)
        snprintf(text + n, (size_t)(ITEM_BYTES - n), ", AdamW beta1 %.9g beta2 %.9g eps %.9g weight_decay %.9g",
                 (double)opt->config.beta1, (double)opt->config.beta2, (double)opt->config.eps,
                 (double)opt->config.weight_decay);
}

/* The same order on every rank: model, then unit by unit with its parameters, then passes, then bytes. The walk is from the
 * front, which is fine for what happens once. */
static void describe_items(const fsdp_model *model, void (*each)(void *arg, uint32_t k, const char *text), void *arg)
{
    char text[ITEM_BYTES];
    uint32_t k = 0;
    describe_model(model, text);
    each(arg, k++, text);
    for (size_t i = 0; i < model->n_units; i++) {
        describe_unit(model->units[i], text);
        each(arg, k++, text);
        for (size_t p = 0; p < model->units[i]->n_params; p++) {
            describe_param(model->units[i]->params[p], text);
            each(arg, k++, text);
        }
    }
    for (size_t p = 0; p < model->n_passes; p++) {
        describe_pass(&model->passes[p], text);
        each(arg, k++, text);
    }
    snprintf(text, sizeof text, "bytes: %llu in all, %llu for gather, %llu for grad",
             (unsigned long long)model->plan.memory.total, (unsigned long long)model->plan.memory.gather,
             (unsigned long long)model->plan.memory.grad);
    each(arg, k, text);
}

static void keep_hash(void *arg, uint32_t k, const char *text) { ((uint64_t *)arg)[k] = fsdp__hash_text(text); }

/* Between rank 0 and another one; rank 0: none. */
typedef struct difference {
    uint32_t item, rank;
} difference;

static fsdp_status fail_no_host_memory(void)
{
    return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "fsdp_model_seal: no host memory to compare models");
}

struct wanted {
    uint32_t k;
    char text[ITEM_BYTES];
};

static void keep_text(void *arg, uint32_t k, const char *text)
{
    struct wanted *w = arg;
    if (k == w->k) snprintf(w->text, sizeof w->text, "%s", text);
}

/* Every rank now knows that item k is the first to differ, between rank 0 and another: fetch both texts and name them. */
static fsdp_status name_difference(fsdp_model *model, const difference *d)
{
    struct wanted w = {d->item, "nothing more"};
    char first[FSDP__SIDE_TEXT_BYTES], second[FSDP__SIDE_TEXT_BYTES];
    describe_items(model, keep_text, &w);
    FSDP_TRY(fsdp__side_text(model->ctx, 0, w.text, first));
    FSDP_TRY(fsdp__side_text(model->ctx, d->rank, w.text, second));
    return fsdp__fail(
        FSDP_ERR_MISMATCH,
        "fsdp_model_seal: ranks registered different models. First difference: rank 0 has %s; rank %u has %s", first,
        d->rank, second);
}

/* Compare n_shared item hashes of all ranks; an item of d that differs before d->item takes its place. */
static fsdp_status compare_hashes(fsdp_context *ctx, const uint64_t *mine, uint32_t n_shared, difference *d)
{
    uint64_t *all = fsdp__host_alloc(&ctx->host, (size_t)ctx->world * n_shared, sizeof *all);
    fsdp_status status = all == NULL ? fail_no_host_memory() : FSDP_OK;
    status = fsdp__side_vote(ctx, status, "fsdp_model_seal");
    if (status == FSDP_OK) status = fsdp__side_all_gather(ctx, mine, all, n_shared * sizeof *all);
    for (uint32_t r = 1; status == FSDP_OK && r < ctx->world; r++)
        for (uint32_t k = 0; k < d->item; k++)
            if (all[(size_t)r * n_shared + k] != all[k]) *d = (difference){k, r};
    fsdp__host_free(&ctx->host, all, (size_t)ctx->world * n_shared, sizeof *all);
    return status;
}

static fsdp_status compare(fsdp_model *model)
{
    fsdp_context *ctx = model->ctx;
    uint32_t n = count_items(model), n_shared = n;
    difference d = {0, 0};
    uint32_t *counts = fsdp__host_alloc(&ctx->host, ctx->world, sizeof *counts);
    uint64_t *hashes = fsdp__host_alloc(&ctx->host, n, sizeof *hashes);
    fsdp_status status = counts == NULL || hashes == NULL ? fail_no_host_memory() : FSDP_OK;
    status = fsdp__side_vote(ctx, status, "fsdp_model_seal");
    if (status == FSDP_OK) status = fsdp__side_all_gather(ctx, &n, counts, sizeof n);
    for (uint32_t r = 0; status == FSDP_OK && r < ctx->world; r++)
        if (counts[r] < n_shared) n_shared = counts[r];
    if (status == FSDP_OK) {
        d.item = n_shared;
        for (uint32_t r = ctx->world; r-- > 1;) /* a rank that ends here where rank 0 does not, or goes on */
            if ((counts[r] == n_shared) != (counts[0] == n_shared)) d.rank = r;
        describe_items(model, keep_hash, hashes);
        status = compare_hashes(ctx, hashes, n_shared, &d);
    }
    fsdp__host_free(&ctx->host, hashes, n, sizeof *hashes);
    fsdp__host_free(&ctx->host, counts, ctx->world, sizeof *counts);
    return status == FSDP_OK && d.rank != 0 ? name_difference(model, &d) : status;
}

/* Each kind of collective once, on the lane and communicator that will run it: connections are made and kernels loaded
 * here, not in the first step. Buffers are undefined before and after; the step's records are zero, and so are their sums. */
static fsdp_status enqueue_each_kind(fsdp_model *model)
{
    fsdp_context *ctx = model->ctx;
    float *part = (float *)(void *)((char *)model->scratch + model->plan.part_offset),
          *total = part + (model->plan.total_offset - model->plan.part_offset) / sizeof *part;
    fsdp_collective norm = {.kind = FSDP_OPERATION_ALL_REDUCE,
                            .dtype = FSDP_DTYPE_FP32,
                            .count = FSDP_STEP_FLOATS,
                            .send = part,
                            .recv = total,
                            .label = "seal"};
    fsdp_stream *gather = ctx->lanes[FSDP_LANE_GATHER], *reduce = ctx->lanes[FSDP_LANE_REDUCE];
    for (size_t i = 0; i < model->n_units; i++) {
        fsdp_unit *unit = model->units[i];
        const fsdp__group *group = &unit->groups[0];
        if (group->shard_elems == 0) continue;
        uint64_t rank = ctx->rank, each = fsdp_dtype_bytes(group->compute_dtype);
        char *full = fsdp__allocator_base(model->gather_pool);
        fsdp_collective ag = {.kind = FSDP_OPERATION_ALL_GATHER,
                              .dtype = group->compute_dtype,
                              .count = FSDP__ALIGN_ELEMS,
                              .send = full + rank * FSDP__ALIGN_ELEMS * each,
                              .recv = full,
                              .label = "seal"};
        FSDP_TRY(fsdp__comm_enqueue(ctx->comm, gather, &ag, 1));
        char *grad = fsdp__allocator_base(model->grad_pool);
        if (group->frozen) break;
        each = fsdp_dtype_bytes(unit->config.grad_dtype);
        fsdp_collective rs = {.kind = FSDP_OPERATION_REDUCE_SCATTER,
                              .dtype = unit->config.grad_dtype,
                              .count = FSDP__ALIGN_ELEMS,
                              .send = grad,
                              .recv = grad + rank * FSDP__ALIGN_ELEMS * each,
                              .label = "seal"};
        FSDP_TRY(fsdp__comm_enqueue(ctx->reduce_comm, reduce, &rs, 1));
        break;
    }
    return fsdp__comm_enqueue(ctx->reduce_comm, reduce, &norm, 1);
}

static fsdp_status warm_up(fsdp_model *model)
{
    fsdp_context *ctx = model->ctx;
    if (ctx->world == 1) return FSDP_OK;
    fsdp__lock(ctx);
    fsdp_status status = enqueue_each_kind(model);
    fsdp__unlock(ctx);
    status = fsdp__side_vote(ctx, status, "fsdp_model_seal");
    if (status != FSDP_OK) { /* some ranks wait for what others could not enqueue: nothing follows on these wires */
        char text[1024];
        snprintf(text, sizeof text, "%s", fsdp_last_error());
        fsdp__comm_abort(ctx->comm);
        if (ctx->reduce_comm != ctx->comm) fsdp__comm_abort(ctx->reduce_comm);
        return fsdp__fail(status, "%s", text);
    }
    fsdp__lock(ctx);
    status = fsdp__device_drain_host(ctx->lanes[FSDP_LANE_GATHER], ctx->timeout_ns);
    if (status == FSDP_OK) status = fsdp__device_drain_host(ctx->lanes[FSDP_LANE_REDUCE], ctx->timeout_ns);
    fsdp__unlock(ctx);
    if (status != FSDP_OK) status = fsdp__context_explain(ctx, status);
    return fsdp__side_vote(ctx, status, "fsdp_model_seal"); /* one rank may have waited its time out, and others not */
}

/* The two pools are what collectives travel in. */
static fsdp_status attach_pools(fsdp_model *model)
{
    fsdp_context *ctx = model->ctx;
    const fsdp_memory *m = &model->plan.memory;
    FSDP_TRY(fsdp__comm_attach(ctx->comm, FSDP_OPERATION_ALL_GATHER, fsdp__allocator_base(model->gather_pool),
                               fsdp__device_round(&ctx->caps, m->gather), &model->gather_attached));
    return fsdp__comm_attach(ctx->reduce_comm, FSDP_OPERATION_REDUCE_SCATTER, fsdp__allocator_base(model->grad_pool),
                             fsdp__device_round(&ctx->caps, m->grad), &model->grad_attached);
}

static fsdp_status take_and_vote(fsdp_model *model)
{
    fsdp_context *ctx = model->ctx;
    fsdp__lock(ctx);
    fsdp_status status = fsdp__shard_alloc(model);
    if (status == FSDP_OK) status = fsdp__shard_clear(model);
    fsdp__unlock(ctx);
    status = fsdp__side_vote(ctx, status, "fsdp_model_seal");
    if (status == FSDP_OK) status = fsdp__side_vote(ctx, attach_pools(model), "fsdp_model_seal");
    if (status == FSDP_OK) status = warm_up(model);
    if (status == FSDP_OK) return status;
    char text[1024]; /* the first sentence stays */
    snprintf(text, sizeof text, "%s", fsdp_last_error());
    fsdp__lock(ctx);
    FSDP_IGNORE(fsdp__context_drain(ctx, UINT64_MAX)); /* what still runs ends by its own deadline */
    fsdp__unseal(model);
    fsdp__unlock(ctx);
    return fsdp__fail(status, "%s", text);
}

/* What is legal and surely not meant. */
static void warn_of_budget(const fsdp_model *model)
{
    uint64_t budget = model->config.prefetch_bytes;
    for (size_t i = 0; budget > 0 && model->config.depth > 0 && i < model->n_units; i++) {
        const fsdp_unit *unit = model->units[i];
        if (unit->full_bytes > budget && !fsdp__unit_held(unit))
            fsdp__log(model->ctx, "unit %s gathers %llu bytes, more than prefetch_bytes %llu: it is never prefetched",
                      unit->name, (unsigned long long)unit->full_bytes, (unsigned long long)budget);
    }
}

static fsdp_status seal_agreed(fsdp_model *model)
{
    FSDP_TRY(fsdp__side_vote(model->ctx, fsdp__plan_build(model), "fsdp_model_seal"));
    FSDP_TRY(compare(model));
    return take_and_vote(model);
}

fsdp_status fsdp_model_seal(fsdp_model *model)
{
    FSDP_TRY(fsdp__model_check(__func__, model));
    fsdp_context *ctx = model->ctx;
    FSDP_TRY(fsdp__capture_off(__func__, ctx));
    if (model->phase != FSDP__OPEN)
        return fsdp__fail(FSDP_ERR_STATE, "fsdp_model_seal: model %s is sealed already", model->name);
    FSDP_TRY(fsdp__side_agree(ctx, "fsdp_model_seal"));
    FSDP_TRY(fsdp__side_end(ctx, seal_agreed(model)));
    model->phase = FSDP__IDLE;
    warn_of_budget(model);
    return FSDP_OK;
}

void fsdp__unseal(fsdp_model *model)
{
    fsdp_context *ctx = model->ctx;
    const fsdp_host_allocator *host = &ctx->host;
    const fsdp_memory *m = &model->plan.memory;
    for (size_t i = 0; i < model->n_units; i++) {
        fsdp_unit *unit = model->units[i];
        fsdp__host_free(host, unit->segments, unit->n_params, sizeof *unit->segments);
        fsdp__host_free(host, unit->param_ptrs, unit->n_params, sizeof *unit->param_ptrs);
        fsdp__host_free(host, unit->grad_ptrs, unit->n_params, sizeof *unit->grad_ptrs);
        unit->segments = NULL, unit->param_ptrs = NULL, unit->grad_ptrs = NULL;
        unit->param_base = unit->grad_base = 0;
    }
    for (int i = 0; i < FSDP_REPORT_RING; i++) {
        fsdp__fence_forget(&ctx->clocks, &model->report_fence[i]);
        fsdp__device_event_destroy(ctx, model->report_event[i]);
        model->report_event[i] = NULL;
    }
    fsdp__device_free(ctx, model->reports, m->pinned, FSDP_MEMORY_KIND_PINNED);
    fsdp__comm_detach(ctx->reduce_comm, model->grad_attached);
    fsdp__comm_detach(ctx->comm, model->gather_attached);
    model->grad_attached = model->gather_attached = NULL;
    fsdp__allocator_destroy_range(model->grad_pool);
    fsdp__allocator_destroy_range(model->gather_pool);
    fsdp__device_free(ctx, model->scratch, m->scratch, FSDP_MEMORY_KIND_DEVICE);
    fsdp__device_free(ctx, model->moments, m->moments, FSDP_MEMORY_KIND_DEVICE);
    fsdp__device_free(ctx, model->gradients, m->gradients, FSDP_MEMORY_KIND_DEVICE);
    fsdp__device_free(ctx, model->master, m->master, FSDP_MEMORY_KIND_DEVICE);
    model->reports = NULL, model->grad_pool = NULL, model->gather_pool = NULL;
    model->scratch = model->moments = model->gradients = model->master = NULL;
    fsdp__host_free(host, model->schedule_bytes, model->schedule_units, sizeof *model->schedule_bytes);
    fsdp__host_free(host, model->schedule_held, model->schedule_units, sizeof *model->schedule_held);
    model->schedule_bytes = NULL, model->schedule_held = NULL;
}

fsdp_status fsdp_model_memory(const fsdp_model *model, fsdp_memory *out_memory)
{
    FSDP_NEED(model);
    FSDP_NEED(out_memory);
    if (model->phase == FSDP__OPEN)
        return fsdp__fail(FSDP_ERR_STATE, "fsdp_model_memory: model %s is not sealed: ask fsdp_model_predict",
                          model->name);
    return fsdp__write_result("fsdp_memory", out_memory, &model->plan.memory, sizeof model->plan.memory,
                              sizeof model->plan.memory);
}
