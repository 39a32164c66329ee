/* SPDX-License-Identifier: MIT */
/* Stage 3: this rank's shards. In: the plan. Out: master, gradient and moment bytes, the two pools, scratch, and for each
 * group the table of segments by which kernels skip the pads. Next: unshard.c. */
#include "sharding/shard.h"

#include <string.h>

#include "lib/check.h"
#include "lib/device.h"
#include "lib/hostmem.h"
#include "sharding/layout.h"

/* Which of the ranges did not fit, of how much. */
static fsdp_status explain(const fsdp_model *model, fsdp_status status, const char *what, uint64_t bytes)
{
    if (status != FSDP_ERR_NO_MEMORY) return status;
    return fsdp__fail(status, "model %s, rank %u: no room for %s, %llu of the %llu bytes that it needs: %s",
                      model->name, model->ctx->rank, what, (unsigned long long)bytes,
                      (unsigned long long)model->plan.memory.total, fsdp_last_error());
}

static fsdp_status alloc_range(fsdp_model *model, const char *what, uint64_t bytes, fsdp_memory_kind kind, void **out)
{
    return explain(model, fsdp__device_alloc(model->ctx, bytes, kind, out), what, bytes);
}

/* A held unit has its bytes for good, from before its first gather: no hook off plan can be given them. */
static fsdp_status take_held_places(fsdp_model *model)
{
    for (size_t i = 0; i < model->n_units; i++) {
        fsdp_unit *unit = model->units[i];
        unit->full = NULL;
        if (!fsdp__unit_held(unit) || unit->full_bytes == 0) continue;
        fsdp__need need; /* nobody has had them before */
        fsdp__no_need(&need);
        FSDP_TRY(fsdp__allocator_reserve(model->gather_pool));
        unit->full = fsdp__allocator_take_at(model->gather_pool, unit->full_place, unit->full_bytes,
                                             model->ctx->lanes[FSDP_LANE_GATHER], unit->name, &need);
        assert(unit->full != NULL);
        fsdp__edges_clear(&unit->full_edges);
        unit->full_version = UINT64_MAX; /* of no version: not gathered */
    }
    return FSDP_OK;
}

static fsdp_status alloc_ranges(fsdp_model *model)
{
    fsdp_context *ctx = model->ctx;
    const fsdp_memory *m = &model->plan.memory;
    FSDP_TRY(alloc_range(model, "parameter shards", m->master, FSDP_MEMORY_KIND_DEVICE, &model->master));
    FSDP_TRY(alloc_range(model, "gradient shards", m->gradients, FSDP_MEMORY_KIND_DEVICE, &model->gradients));
    FSDP_TRY(alloc_range(model, "moments", m->moments, FSDP_MEMORY_KIND_DEVICE, &model->moments));
    FSDP_TRY(alloc_range(model, "scratch", m->scratch, FSDP_MEMORY_KIND_DEVICE, &model->scratch));
    FSDP_TRY(explain(model, fsdp__allocator_create_range(ctx, model->name, "gather", m->gather, &model->gather_pool),
                     "gathered parameters", m->gather));
    FSDP_TRY(take_held_places(model));
    FSDP_TRY(explain(model, fsdp__allocator_create_range(ctx, model->name, "grad", m->grad, &model->grad_pool),
                     "full gradients", m->grad));
    void *reports;
    FSDP_TRY(alloc_range(model, "step reports", m->pinned, FSDP_MEMORY_KIND_PINNED, &reports));
    model->reports = reports;
    memset(reports, 0, m->pinned);
    for (int i = 0; i < FSDP_REPORT_RING; i++) FSDP_TRY(fsdp__device_event_create(ctx, &model->report_event[i]));
    return FSDP_OK;
}

static fsdp_status set_segments(fsdp_unit *unit)
{
    const fsdp_host_allocator *host = &unit->model->ctx->host;
    unit->segments = fsdp__host_alloc(host, unit->n_params, sizeof *unit->segments);
    unit->param_ptrs = fsdp__host_alloc(host, unit->n_params, sizeof *unit->param_ptrs);
    unit->grad_ptrs = fsdp__host_alloc(host, unit->n_params, sizeof *unit->grad_ptrs);
    if (unit->segments == NULL || unit->param_ptrs == NULL || unit->grad_ptrs == NULL)
        return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "unit %s: no host memory for its tables", unit->name);
    size_t master_each = fsdp_dtype_bytes(unit->config.master_dtype),
           gradient_each = fsdp_dtype_bytes(unit->config.reduce_dtype);
    unit->n_segments = 0;
    unit->param_base = UINT64_MAX; /* no address: the pointers are still to be made */
    for (size_t i = 0; i < unit->n_params; i++) {
        fsdp_param *param = unit->params[i];
        const fsdp__group *group = &unit->groups[param->group];
        fsdp_shard_segment seg = {.param = param};
        uint64_t at;
        fsdp__layout_range(param, unit->model->ctx->rank, &seg.begin, &seg.count, &at);
        if (seg.count == 0) continue;
        seg.master = group->master + at * master_each;
        seg.gradient = group->gradient != NULL ? group->gradient + at * gradient_each : NULL;
        unit->segments[unit->n_segments++] = seg;
    }
    return FSDP_OK;
}

static fsdp_status set_pointers(fsdp_model *model)
{
    for (size_t i = 0; i < model->n_units; i++) {
        fsdp_unit *unit = model->units[i];
        for (uint32_t g = 0; g < unit->n_groups; g++) {
            fsdp__group *group = &unit->groups[g];
            group->master = (char *)model->master + group->master_offset;
            if (group->frozen) continue;
            group->gradient = (char *)model->gradients + group->gradient_offset;
            if (model->adamw == NULL) continue;
            group->m = (float *)(void *)((char *)model->moments + group->moment_offset);
            group->v = group->m + group->shard_elems;
        }
        FSDP_TRY(set_segments(unit));
    }
    return FSDP_OK;
}

fsdp_status fsdp__shard_alloc(fsdp_model *model)
{
    FSDP_TRY(alloc_ranges(model));
    return set_pointers(model);
}

/* The table that norm and optimizer walk: one entry a parameter of the group, in order, also where this rank has nothing. */
static void fill_table(const fsdp_unit *unit, uint32_t g, fsdp_kernel_segment *table)
{
    for (size_t i = 0; i < unit->n_params; i++) {
        const fsdp_param *param = unit->params[i];
        if (param->group != g) continue;
        uint64_t begin, count, at;
        fsdp__layout_range(param, unit->model->ctx->rank, &begin, &count, &at);
        *table++ = (fsdp_kernel_segment){at, count, param->lr_scale, param->no_decay ? 0.0f : 1.0f};
    }
}

static fsdp_status upload_tables(fsdp_model *model, fsdp_stream *s)
{
    const fsdp__plan *plan = &model->plan;
    const fsdp_host_allocator *host = &model->ctx->host;
    uint64_t bytes = plan->scratch_bytes - plan->table_offset;
    if (bytes == 0) return FSDP_OK;
    char *tables = fsdp__host_alloc(host, bytes, 1);
    if (tables == NULL)
        return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "model %s: no host memory for tables of %llu bytes", model->name,
                          (unsigned long long)bytes);
    for (size_t i = 0; i < model->n_units; i++) {
        const fsdp_unit *unit = model->units[i];
        for (uint32_t g = 0; g < unit->n_groups; g++)
            if (!unit->groups[g].frozen)
                fill_table(unit, g, (fsdp_kernel_segment *)(void *)(tables + unit->groups[g].table_offset));
    }
    fsdp_device_op op = {.kind = FSDP_OPERATION_COPY,
                         .u.copy = {(char *)model->scratch + plan->table_offset, tables, bytes}};
    fsdp_status status = fsdp__launch(s, &op, "tables");
    fsdp_status drained = fsdp__device_drain_host(s, model->ctx->timeout_ns);
    if (drained == FSDP_ERR_TIMEOUT) { /* the tables go: nothing may read them any more */
        fsdp_status ended = fsdp__device_drain_host(s, UINT64_MAX);
        if (ended != FSDP_OK) drained = ended;
    }
    fsdp__host_free(host, tables, bytes, 1);
    return status != FSDP_OK ? status : drained;
}

static fsdp_status clear(fsdp_stream *s, void *ptr, uint64_t bytes, const char *label)
{
    fsdp_device_op op = {.kind = FSDP_OPERATION_FILL, .u.fill = {ptr, bytes, 0}};
    return bytes > 0 ? fsdp__launch(s, &op, label) : FSDP_OK;
}

fsdp_status fsdp__shard_clear(fsdp_model *model)
{
    fsdp_stream *s = model->ctx->lanes[FSDP_LANE_COPY];
    const fsdp__plan *plan = &model->plan;
    FSDP_TRY(upload_tables(model, s));
    FSDP_TRY(clear(s, model->master, plan->master_bytes, "shards"));
    FSDP_TRY(clear(s, model->gradients, plan->gradient_bytes, "gradients"));
    FSDP_TRY(clear(s, model->moments, plan->moment_bytes, "moments"));
    FSDP_TRY(
        clear(s, (char *)model->scratch + plan->part_offset, plan->table_offset - plan->part_offset, "step records"));
    return fsdp__device_drain_host(s, model->ctx->timeout_ns);
}
