/* SPDX-License-Identifier: MIT */
/* The plan: where everything lies and how many bytes that takes. Pure but for host memory: predict and seal share it, so that
 * what is promised is what is taken. [Note: Placement] in docs/schedule.md. */
#include "sharding/plan.h"

#include <string.h>

#include "lib/check.h"
#include "lib/device.h"
#include "lib/hostmem.h"
#include "sharding/layout.h"
#include "sharding/pass.h"

/* Of a model, pads included: no count of bytes comes near 2^64. */
#define MAX_ELEMS ((uint64_t)1 << 54)

/* Working space for one pass. */
typedef struct space {
    fsdp__lives lives;
    fsdp__life *grad_life;
    uint64_t *offset;
    uint32_t n;
} space;

static void free_space(const fsdp_host_allocator *host, space *sp)
{
    fsdp__host_free(host, sp->lives.life, sp->n, sizeof *sp->lives.life);
    fsdp__host_free(host, sp->lives.unit, sp->n, sizeof *sp->lives.unit);
    fsdp__host_free(host, sp->lives.visit_life, sp->n, sizeof *sp->lives.visit_life);
    fsdp__host_free(host, sp->grad_life, sp->n, sizeof *sp->grad_life);
    fsdp__host_free(host, sp->offset, sp->n, sizeof *sp->offset);
}

static fsdp_status alloc_space(const fsdp_host_allocator *host, space *sp, uint32_t n)
{
    *sp = (space){.n = n};
    sp->lives.life = fsdp__host_alloc(host, n, sizeof *sp->lives.life);
    sp->lives.unit = fsdp__host_alloc(host, n, sizeof *sp->lives.unit);
    sp->lives.visit_life = fsdp__host_alloc(host, n, sizeof *sp->lives.visit_life);
    sp->grad_life = fsdp__host_alloc(host, n, sizeof *sp->grad_life);
    sp->offset = fsdp__host_alloc(host, n, sizeof *sp->offset);
    if (sp->lives.life != NULL && sp->lives.unit != NULL && sp->lives.visit_life != NULL && sp->grad_life != NULL &&
        sp->offset != NULL)
        return FSDP_OK;
    free_space(host, sp);
    return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "planning a pass of %u visits: no host memory", n);
}

/* A unit whose buffer is its shard takes no bytes and no place. */
static bool has_bytes(const fsdp__life *life) { return life->bytes > 0; }

/* Place the lives of one pass. With a mirror, only those of the first half: a unit's second life lies where its first did,
 * so that what is kept over a border is in place. */
static fsdp_status place_lives(const fsdp_host_allocator *host, space *sp, int32_t mirror, fsdp__placement *out)
{
    fsdp__lives *lives = &sp->lives;
    fsdp__life *compact = sp->grad_life; /* not yet in use */
    uint32_t n = 0;
    for (uint32_t i = 0; i < lives->n; i++) {
        fsdp__life life = lives->life[i];
        if (!has_bytes(&life) || (mirror >= 0 && life.begin > (uint32_t)mirror)) continue;
        if (mirror >= 0 && life.end > (uint32_t)mirror) life.end = (uint32_t)mirror;
        compact[n++] = life;
    }
    FSDP_TRY(fsdp__place(host, compact, n, FSDP__BLOCK_ALIGNMENT, sp->offset, out));
    /* Spread the offsets back over all lives, from the end, so that none is overwritten before it is read. */
    for (uint32_t i = lives->n; i-- > 0;) {
        const fsdp__life *life = &lives->life[i];
        bool placed = has_bytes(life) && !(mirror >= 0 && life->begin > (uint32_t)mirror);
        sp->offset[i] = placed ? sp->offset[--n] : 0;
    }
    return FSDP_OK;
}

/* From position i in steps of `step`, the first visit that is not held. */
static uint32_t skip_held(const fsdp_model *model, const fsdp__pass *pass, uint32_t i, int step)
{
    while (i < pass->n && model->schedule.held[pass->visits[i].unit]) i += (uint32_t)step;
    return i;
}

/* A life of the second half lies where the life of its mirror does: the list is walked from both ends, the visits that one
 * unit has in a row at a time. */
static void mirror_offsets(const fsdp_model *model, fsdp__pass *pass, const fsdp__lives *lives, uint32_t mirror)
{
    uint32_t low = skip_held(model, pass, 0, 1), high = skip_held(model, pass, pass->n - 1, -1);
    while (high > mirror) {
        uint32_t unit = pass->visits[high].unit;
        uint64_t offset = pass->full_offset[low];
        while (high > mirror && pass->visits[high].unit == unit) {
            if (lives->life[lives->visit_life[high]].begin > mirror) pass->full_offset[high] = offset;
            high = skip_held(model, pass, high - 1, -1);
        }
        while (low < mirror && pass->visits[low].unit == unit) low = skip_held(model, pass, low + 1, 1);
    }
}

static fsdp_status plan_gather(fsdp_model *model, fsdp__pass *pass, space *sp, uint64_t base, fsdp__placement *out)
{
    const fsdp_host_allocator *host = &model->ctx->host;
    fsdp__cursor start = {.pass = {pass->visits, pass->n}};
    FSDP_TRY(fsdp__schedule_lives(host, &model->schedule, &start, (uint32_t)model->n_units, &sp->lives));
    int32_t mirror = model->schedule.budget == 0 ? fsdp__schedule_mirror(&model->schedule, start.pass) : -1;
    FSDP_TRY(place_lives(host, sp, mirror, out));
    for (uint32_t i = 0; i < pass->n; i++)
        if (sp->lives.visit_life[i] >= 0) pass->full_offset[i] = base + sp->offset[sp->lives.visit_life[i]];
    if (mirror >= 0) mirror_offsets(model, pass, &sp->lives, (uint32_t)mirror);
    return FSDP_OK;
}

/* A gradient buffer is written from its visit to the end of its window, then reduced while the next grad_buffers − 1
 * backward visits begin: until then its bytes are not planned for another. */
static fsdp_status plan_grads(fsdp_model *model, fsdp__pass *pass, space *sp, uint64_t base, fsdp__placement *out)
{
    uint32_t n = 0;
    int32_t *visit_of = sp->lives.visit_life; /* lives are done with: reuse as the visit of each gradient life */
    for (uint32_t i = 0; i < pass->n; i++) {
        const fsdp_unit *unit = pass->given[i].unit;
        if (pass->given[i].use != FSDP_USE_BACKWARD || !fsdp__unit_trainable(unit)) continue;
        if (unit->grad_aliased || fsdp__unit_grad_own(unit)) continue;
        visit_of[n] = (int32_t)i;
        sp->grad_life[n++] = (fsdp__life){i, pass->visits[i].until, -1, unit->grad_bytes};
    }
    for (uint32_t k = 0; k < n; k++) {
        uint32_t later = k;
        while (later + 1 < n && sp->grad_life[later + 1].begin <= sp->grad_life[k].end) later++;
        later += model->config.grad_buffers - 1;
        uint32_t last = later < n ? sp->grad_life[later].begin : pass->n - 1;
        if (last > sp->grad_life[k].end) sp->grad_life[k].end = last;
    }
    FSDP_TRY(fsdp__place(&model->ctx->host, sp->grad_life, n, FSDP__BLOCK_ALIGNMENT, sp->offset, out));
    for (uint32_t k = 0; k < n; k++) pass->grad_offset[visit_of[k]] = base + sp->offset[k];
    return FSDP_OK;
}

static uint64_t max_u64(uint64_t a, uint64_t b) { return a > b ? a : b; }

/* Both pools: units with bytes of their own first, then the range that all passes share. */
static fsdp_status plan_pools(fsdp_model *model)
{
    fsdp_memory *m = &model->plan.memory;
    uint64_t own_full = 0, own_grad = 0, gather = 0, grad = 0, live = 0;
    for (size_t i = 0; i < model->n_units; i++) {
        fsdp_unit *unit = model->units[i];
        unit->full_place = own_full;
        unit->grad_place = own_grad;
        if (fsdp__unit_held(unit)) own_full += unit->full_bytes;
        if (fsdp__unit_grad_own(unit) && !unit->grad_aliased) own_grad += unit->grad_bytes;
    }
    for (size_t p = 0; p < model->n_passes; p++) {
        space sp;
        fsdp__placement full = {0}, grads = {0};
        FSDP_TRY(alloc_space(&model->ctx->host, &sp, model->passes[p].n));
        fsdp_status status = plan_gather(model, &model->passes[p], &sp, own_full, &full);
        if (status == FSDP_OK) status = plan_grads(model, &model->passes[p], &sp, own_grad, &grads);
        free_space(&model->ctx->host, &sp);
        if (status != FSDP_OK) return status;
        gather = max_u64(gather, full.bytes);
        live = max_u64(live, full.live_peak);
        grad = max_u64(grad, grads.bytes);
    }
    m->gather = own_full + gather;
    m->gather_live_peak = own_full + live;
    m->grad = own_grad + grad;
    return FSDP_OK;
}

/* True if a pass has two backward windows of one unit that do not nest: reduced twice, also in one micro-step. */
static bool pass_reduces_twice(const fsdp__pass *pass, uint32_t *window_end)
{
    for (uint32_t i = 0; i < pass->n; i++) {
        if (pass->given[i].use != FSDP_USE_BACKWARD) continue;
        uint32_t *end = &window_end[pass->visits[i].unit]; /* behind the unit's last window; 0: none yet */
        if (*end > 0 && i >= *end) return true;
        if (pass->visits[i].until + 1 > *end) *end = pass->visits[i].until + 1;
    }
    return false;
}

static fsdp_status find_reduces_twice(fsdp_model *model)
{
    bool *twice = &model->plan.reduces_twice;
    *twice = model->config.accumulation == FSDP_ACCUMULATE_REDUCE_EACH;
    const fsdp_host_allocator *host = &model->ctx->host;
    for (size_t p = FSDP_PASS_EVAL + 1; p < model->n_passes && !*twice; p++) {
        uint32_t *window_end = fsdp__host_alloc(host, model->n_units, sizeof *window_end);
        if (window_end == NULL)
            return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "planning pass %s: no host memory", model->passes[p].name);
        *twice = pass_reduces_twice(&model->passes[p], window_end);
        fsdp__host_free(host, window_end, model->n_units, sizeof *window_end);
    }
    return FSDP_OK;
}

/* A world of one sums nothing over ranks. Where it sums nothing onto the shard either, and both are of one dtype, kernels write
 * their gradients there at once: no bytes, no copy, no edge to another stream. A second reduction needs a buffer beside it,
 * which backward_begin hands out as zeros. */
static void alias_grads(fsdp_model *model)
{
    for (size_t i = 0; i < model->n_units; i++) {
        fsdp_unit *unit = model->units[i];
        unit->grad_aliased = model->ctx->world == 1 && fsdp__unit_trainable(unit) && !model->plan.reduces_twice &&
                             unit->config.grad_dtype == unit->config.reduce_dtype;
    }
}

static uint64_t add_scratch(fsdp__plan *plan, uint64_t bytes)
{
    uint64_t offset = plan->scratch_bytes;
    plan->scratch_bytes += (bytes + FSDP__BLOCK_ALIGNMENT - 1) / FSDP__BLOCK_ALIGNMENT * FSDP__BLOCK_ALIGNMENT;
    return offset;
}

/* A group's part of this rank's kernel table has at most one segment a parameter; the count is the same on every rank, so
 * that bytes are: empty ones have count 0. */
static void plan_shards(fsdp_model *model, uint64_t *largest_shard, uint64_t *largest_cast, uint64_t *n_table)
{
    fsdp__plan *plan = &model->plan;
    for (size_t i = 0; i < model->n_units; i++) {
        fsdp_unit *unit = model->units[i];
        uint64_t shard = 0, cast = 0;
        for (uint32_t g = 0; g < unit->n_groups; g++) {
            fsdp__group *group = &unit->groups[g];
            group->master_offset = plan->master_bytes;
            plan->master_bytes += group->shard_elems * fsdp_dtype_bytes(unit->config.master_dtype);
            if (group->frozen) continue;
            group->gradient_offset = plan->gradient_bytes;
            assert(!unit->grad_aliased || group->grad_offset == shard); /* one range, laid out like the buffer */
            plan->gradient_bytes += group->shard_elems * fsdp_dtype_bytes(unit->config.reduce_dtype);
            group->moment_offset = plan->moment_bytes;
            if (model->adamw != NULL) plan->moment_bytes += 2 * group->shard_elems * sizeof(float);
            group->table_offset = *n_table * sizeof(fsdp_kernel_segment);
            group->n_segments = 0;
            for (size_t k = 0; k < unit->n_params; k++) group->n_segments += unit->params[k]->group == g;
            *n_table += group->n_segments;
            shard += group->shard_elems * fsdp_dtype_bytes(unit->config.reduce_dtype);
            if (unit->config.grad_dtype != unit->config.reduce_dtype)
                cast += group->elems * fsdp_dtype_bytes(unit->config.reduce_dtype);
        }
        *largest_shard = max_u64(*largest_shard, shard);
        *largest_cast = max_u64(*largest_cast, cast);
        for (size_t k = 0; k < unit->n_params; k++) plan->memory.params += unit->params[k]->elems;
    }
}

static fsdp_status plan_bytes(fsdp_model *model)
{
    fsdp__plan *plan = &model->plan;
    fsdp_memory *m = &plan->memory;
    const fsdp_device_caps *caps = &model->ctx->caps;
    uint64_t largest_shard = 0, largest_cast = 0, n_table = 0;
    plan_shards(model, &largest_shard, &largest_cast, &n_table);
    bool alone = model->ctx->world == 1; /* no collective: casts and adds go straight from the gradients */
    plan->tmp_bytes = plan->reduces_twice && !alone ? largest_shard : 0;
    plan->cast_bytes = alone ? 0 : largest_cast;
    plan->tmp_offset = add_scratch(plan, plan->tmp_bytes);
    plan->cast_offset = add_scratch(plan, plan->cast_bytes);
    plan->part_offset = add_scratch(plan, FSDP_STEP_FLOATS * sizeof(float));
    plan->total_offset = add_scratch(plan, FSDP_STEP_FLOATS * sizeof(float));
    plan->step_offset = add_scratch(plan, sizeof(fsdp_device_step));
    plan->input_offset = add_scratch(plan, FSDP_REPORT_RING * sizeof(fsdp_step_input));
    plan->table_offset = add_scratch(plan, n_table * sizeof(fsdp_kernel_segment));

    m->size = sizeof *m;
    m->master = fsdp__device_round(caps, plan->master_bytes);
    m->gradients = fsdp__device_round(caps, plan->gradient_bytes);
    m->moments = fsdp__device_round(caps, plan->moment_bytes);
    m->gather = fsdp__device_round(caps, m->gather);
    m->grad = fsdp__device_round(caps, m->grad);
    m->scratch = fsdp__device_round(caps, plan->scratch_bytes);
    m->pinned = fsdp__device_round(caps, FSDP_REPORT_RING * sizeof(fsdp_report_record));
    m->total = m->master + m->gradients + m->moments + m->gather + m->grad + m->scratch;
    return FSDP_OK;
}

static fsdp_status build_schedule(fsdp_model *model)
{
    const fsdp_host_allocator *host = &model->ctx->host;
    fsdp__host_free(host, model->schedule_bytes, model->schedule_units, sizeof *model->schedule_bytes);
    fsdp__host_free(host, model->schedule_held, model->schedule_units, sizeof *model->schedule_held);
    model->schedule_units = model->n_units;
    model->schedule_bytes = fsdp__host_alloc(host, model->n_units, sizeof *model->schedule_bytes);
    model->schedule_held = fsdp__host_alloc(host, model->n_units, sizeof *model->schedule_held);
    if (model->schedule_bytes == NULL || model->schedule_held == NULL)
        return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "model %s: no host memory for the schedule of %zu units",
                          model->name, model->n_units);
    for (size_t i = 0; i < model->n_units; i++) {
        model->schedule_bytes[i] = model->units[i]->full_bytes;
        model->schedule_held[i] = fsdp__unit_held(model->units[i]);
    }
    model->schedule = (fsdp__schedule){model->config.depth, model->config.prefetch_bytes, model->schedule_bytes,
                                       model->schedule_held};
    return FSDP_OK;
}

fsdp_status fsdp__plan_build(fsdp_model *model)
{
    if (model->n_units == 0)
        return fsdp__fail(FSDP_ERR_STATE, "model %s has no unit: add one with fsdp_model_add_unit", model->name);
    memset(&model->plan, 0, sizeof model->plan);
    uint64_t elems = 0;
    for (size_t i = 0; i < model->n_units; i++) {
        const fsdp_unit *unit = model->units[i];
        FSDP_TRY(fsdp__layout_unit(model->units[i], model->ctx->world));
        for (uint32_t g = 0; g < unit->n_groups; g++) elems += unit->groups[g].elems;
        if (elems > MAX_ELEMS) return fsdp__fail(FSDP_ERR_ARG, "model %s: more than 2^54 elements", model->name);
    }
    FSDP_TRY(build_schedule(model));
    FSDP_TRY(fsdp__passes_build(model));
    FSDP_TRY(find_reduces_twice(model));
    alias_grads(model);
    FSDP_TRY(plan_pools(model));
    return plan_bytes(model);
}

fsdp_status fsdp_model_predict(fsdp_model *model, fsdp_memory *out_memory)
{
    FSDP_TRY(fsdp__model_check(__func__, model));
    FSDP_NEED(out_memory);
    if (model->phase != FSDP__OPEN)
        return fsdp__fail(FSDP_ERR_STATE, "fsdp_model_predict: model %s is sealed: ask fsdp_model_memory", model->name);
    FSDP_TRY(fsdp__plan_build(model));
    return fsdp__write_result("fsdp_memory", out_memory, &model->plan.memory, sizeof model->plan.memory,
                              sizeof model->plan.memory);
}
