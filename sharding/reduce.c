/* SPDX-License-Identifier: MIT */
/* Stage 5: gradients. In: a flat buffer that the caller's kernels wrote. Out: the sum over ranks (and micro-steps) on the
 * gradient shard, in the reduce dtype, and the event u.reduced. No copy in, no copy out; two cases cost counted bytes: another
 * gradient dtype (one cast), a second reduction onto the shard (one temporary, one add). Next: optim.c. */
#include "sharding/reduce.h"

#include <string.h>

#include "lib/check.h"
#include "lib/comm.h"
#include "lib/device.h"
#include "lib/mutate.h"

static fsdp_status take_block(fsdp_unit *unit, uint64_t planned, fsdp_stream *s, fsdp__need *need)
{
    fsdp_model *model = unit->model;
    fsdp_allocator *pool = model->grad_pool;
    FSDP_TRY(fsdp__allocator_reserve(pool));
    if (fsdp__unit_grad_own(unit)) planned = unit->grad_place;
    if (planned != UINT64_MAX)
        unit->grad = fsdp__allocator_take_at(pool, planned, unit->grad_bytes, s, unit->name, need);
    if (unit->grad == NULL) unit->grad = fsdp__allocator_take(pool, unit->grad_bytes, s, unit->name, need);
    if (unit->grad == NULL) {
        char text[4096] = "";
        fsdp__allocator_note(pool, FSDP__ALLOC_EVENT_OUT_OF_MEMORY, NULL, unit->grad_bytes, unit->name);
        fsdp__allocator_describe(pool, text, sizeof text);
        return fsdp__fail(FSDP_ERR_NO_MEMORY,
                          "unit %s: its %llu gradient bytes have no place in the grad range of %llu: open backward "
                          "windows have %llu, and "
                          "%llu are free in pieces of at most %llu. Close units, or declare this order as a pass%s",
                          unit->name, (unsigned long long)unit->grad_bytes, (unsigned long long)model->plan.memory.grad,
                          (unsigned long long)pool->stats.allocated,
                          (unsigned long long)(pool->stats.reserved - pool->stats.allocated),
                          (unsigned long long)fsdp__allocator_largest(pool), text);
    }
    fsdp__edges_clear(&unit->grad_edges);
    unit->grad_begin = unit->grad->begin;
    return FSDP_OK;
}

/* Who has read and written the shard stands in its edges, and goes on there. */
static void take_shard(fsdp_unit *unit)
{
    const fsdp__group *first = unit->groups;
    while (first->frozen) first++;
    unit->grad_begin = (uint64_t)(uintptr_t)first->gradient;
}

fsdp_status fsdp__take_grads(fsdp_unit *unit, uint64_t planned, fsdp_stream *s, fsdp__need *need)
{
    if (unit->grad_aliased) take_shard(unit);
    else FSDP_TRY(take_block(unit, planned, s, need));
    unit->model->n_grads++;
    return FSDP_OK;
}

void fsdp__give_grads(fsdp_unit *unit)
{
    if (unit->grad != NULL) {
        fsdp__allocator_use(unit->model->grad_pool, unit->grad, &unit->grad_edges);
        fsdp__allocator_give(unit->model->grad_pool, unit->grad);
        unit->grad = NULL;
    }
    unit->grad_begin = 0;
    unit->model->n_grads--;
}

void fsdp__set_grad_ptrs(fsdp_unit *unit)
{
    char *base = (char *)(uintptr_t)unit->grad_begin;
    uint64_t moved = unit->grad_begin - unit->grad_base;
    if (moved == 0) return; /* a unit without a buffer: entries stay NULL */
    bool made = unit->grad_base != 0 && base != NULL;
    unit->grad_base = unit->grad_begin;
    if (made) { /* all but those of frozen parameters move as one */
        for (size_t i = 0; i < unit->n_params; i++)
            if (unit->grad_ptrs[i] != NULL) unit->grad_ptrs[i] = (void *)((uintptr_t)unit->grad_ptrs[i] + moved);
        return;
    }
    for (size_t i = 0; i < unit->n_params; i++) {
        const fsdp_param *param = unit->params[i];
        const fsdp__group *group = &unit->groups[param->group];
        unit->grad_ptrs[i] =
            group->frozen || base == NULL
                ? NULL
                : base + group->grad_offset + param->offset * fsdp_dtype_bytes(unit->config.grad_dtype);
    }
}

/* A world of one whose gradients have another dtype, or are added to the shard: no collective runs. */
static fsdp_status reduce_alone(fsdp_unit *unit, fsdp_stream *lane)
{
    for (uint32_t g = 0; g < unit->n_groups; g++) {
        const fsdp__group *group = &unit->groups[g];
        if (group->frozen || group->elems == 0) continue;
        char *grad = (char *)(uintptr_t)unit->grad_begin + group->grad_offset;
        fsdp_device_op op = {.kind = unit->reduced ? FSDP_OPERATION_ADD : FSDP_OPERATION_CAST};
        if (unit->reduced) {
            op.u.add.dst = group->gradient, op.u.add.src = grad, op.u.add.count = group->shard_elems;
            op.u.add.dst_dtype = unit->config.reduce_dtype, op.u.add.src_dtype = unit->config.grad_dtype;
        } else {
            op.u.cast.dst = group->gradient, op.u.cast.src = grad, op.u.cast.count = group->shard_elems;
            op.u.cast.dst_dtype = unit->config.reduce_dtype, op.u.cast.src_dtype = unit->config.grad_dtype;
        }
        FSDP_TRY(fsdp__launch(lane, &op, unit->name));
    }
    return FSDP_OK;
}

/* Where a group's sum lands: the shard, or the temporary that is added to it. */
typedef struct landing {
    const fsdp__group *group;
    char *at;
} landing;

static fsdp_status cast_and_list(fsdp_unit *unit, fsdp_stream *lane, fsdp_collective *list, landing *land,
                                 uint32_t *out_n)
{
    fsdp_model *model = unit->model;
    const fsdp_unit_config *c = &unit->config;
    char *cast_at = (char *)model->scratch + model->plan.cast_offset,
         *tmp = (char *)model->scratch + model->plan.tmp_offset;
    size_t each = fsdp_dtype_bytes(c->reduce_dtype);
    uint32_t n = 0;
    for (uint32_t g = 0; g < unit->n_groups; g++) {
        const fsdp__group *group = &unit->groups[g];
        if (group->frozen || group->elems == 0) continue;
        char *send = (char *)(uintptr_t)unit->grad_begin + group->grad_offset;
        if (c->grad_dtype != c->reduce_dtype) {
            fsdp_device_op op = {.kind = FSDP_OPERATION_CAST,
                                 .u.cast = {cast_at, send, group->elems, c->reduce_dtype, c->grad_dtype}};
            FSDP_TRY(fsdp__launch(lane, &op, unit->name));
            send = cast_at;
            cast_at += group->elems * each;
        }
        land[n] = (landing){group, unit->reduced ? tmp : group->gradient};
        tmp += group->shard_elems * each;
        list[n] = (fsdp_collective){.kind = FSDP_OPERATION_REDUCE_SCATTER,
                                    .dtype = c->reduce_dtype,
                                    .count = group->shard_elems,
                                    .send = send,
                                    .recv = land[n].at,
                                    .label = unit->name,
                                    .pass = model->pass->name};
        n++;
    }
    *out_n = n;
    return FSDP_OK;
}

static fsdp_status reduce_over_ranks(fsdp_unit *unit, fsdp_stream *lane)
{
    fsdp_collective list[FSDP__MAX_GROUPS];
    landing land[FSDP__MAX_GROUPS];
    uint32_t n = 0;
    FSDP_TRY(cast_and_list(unit, lane, list, land, &n));
    if (n > 0) FSDP_TRY(fsdp__comm_enqueue(unit->model->ctx->reduce_comm, lane, list, n));
    for (uint32_t i = 0; unit->reduced && i < n; i++) {
        fsdp_dtype dtype = unit->config.reduce_dtype;
        fsdp_device_op op = {.kind = FSDP_OPERATION_ADD,
                             .u.add = {land[i].group->gradient, land[i].at, land[i].group->shard_elems, dtype, dtype}};
        FSDP_TRY(fsdp__launch(lane, &op, unit->name));
    }
    return FSDP_OK;
}

static fsdp_status poison(fsdp_unit *unit, fsdp_stream *lane)
{
    if (!(unit->model->ctx->debug & FSDP_DEBUG_POISON)) return FSDP_OK;
    fsdp_device_op op = {.kind = FSDP_OPERATION_FILL,
                         .u.fill = {(void *)(uintptr_t)unit->grad_begin, unit->grad_bytes, 0xff}};
    return fsdp__launch(lane, &op, unit->name);
}

static fsdp_status reduce_onto_shard(fsdp_unit *unit)
{
    const fsdp_model *model = unit->model;
    fsdp_stream *lane = model->ctx->lanes[FSDP_LANE_REDUCE];
    fsdp__need need;
    fsdp__no_need(&need);
    if (!FSDP__MUTATED(REDUCE_NO_WAIT_GRADS)) fsdp__need_read(&need, &unit->grad_edges);
    fsdp__need_write(&need, &unit->gradient_edges);
    fsdp_status status = fsdp__wait_need(lane, &need);
    if (status == FSDP_OK) {
        status = model->ctx->world == 1 ? reduce_alone(unit, lane) : reduce_over_ranks(unit, lane);
        if (status == FSDP_OK) status = poison(unit, lane);
        fsdp__note_write(&unit->grad_edges, lane);
        fsdp__note_write(&unit->gradient_edges, lane);
    }
    return status == FSDP_OK ? fsdp__record(lane, FSDP_MARK_REDUCED, unit->name, NULL, NULL) : status;
}

fsdp_status fsdp__reduce(fsdp_unit *unit)
{
    fsdp_status status = unit->grad_aliased ? FSDP_OK : reduce_onto_shard(unit);
    fsdp__give_grads(unit);
    unit->reduced = true;
    unit->model->stats.reductions++;
    return status;
}
