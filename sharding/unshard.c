/* SPDX-License-Identifier: MIT */
/* Stage 4: full parameters. In: shards, the cursor. Out: a gathered buffer a unit, and the event u.ready. The cast writes the
 * rank's slot of the full buffer, the all-gather is in place; where master and compute dtype are equal it gathers out of
 * place from the shard itself. Next: the caller's compute, then reduce.c. */
#include "sharding/unshard.h"

#include <string.h>

#include "lib/check.h"
#include "lib/comm.h"
#include "lib/device.h"
#include "lib/mutate.h"

/* Ask for the lines of the unit that the hooks after the next will touch: with thousands of units they come from memory. */
static void fetch_lines(const fsdp_unit *unit)
{
    const char *line = (const char *)unit;
    for (size_t at = 0; at < offsetof(fsdp_unit, groups) + sizeof(fsdp__group); at += 64)
        __builtin_prefetch(line + at, 1);
}

bool fsdp__is_gathered(const fsdp_unit *unit)
{
    return unit->full_bytes == 0 ||
           (unit->full != NULL && (unit->full_version == unit->version || FSDP__MUTATED(STALE_KEPT)));
}

uint64_t fsdp__full_begin(const fsdp_unit *unit)
{
    if (FSDP__MUTATED(GATHER_WRONG_PLACE)) return (uint64_t)(uintptr_t)fsdp__allocator_base(unit->model->gather_pool);
    return unit->full->begin;
}

void fsdp__set_param_ptrs(fsdp_unit *unit)
{
    uint64_t base = unit->full != NULL ? fsdp__full_begin(unit) : 0, moved = base - unit->param_base;
    if (moved == 0) return; /* addresses repeat from step to step */
    bool made = unit->param_base != UINT64_MAX;
    unit->param_base = base;
    if (made && !unit->aliased) { /* all move as one, and nobody looks at each parameter */
        for (size_t i = 0; i < unit->n_params; i++)
            unit->param_ptrs[i] = (void *)((uintptr_t)unit->param_ptrs[i] + moved);
        return;
    }
    for (size_t i = 0; i < unit->n_params; i++) {
        const fsdp_param *param = unit->params[i];
        const fsdp__group *group = &unit->groups[param->group];
        char *begin = group->aliased ? group->master : (char *)(uintptr_t)base + group->full_offset;
        unit->param_ptrs[i] = begin + param->offset * fsdp_dtype_bytes(group->compute_dtype);
    }
}

static void link_gathered(fsdp_unit *unit)
{
    fsdp_model *model = unit->model;
    unit->older = model->newest_gathered;
    unit->newer = NULL;
    if (unit->older != NULL) unit->older->newer = unit;
    model->newest_gathered = unit;
}

static void unlink_gathered(fsdp_unit *unit)
{
    *(unit->newer != NULL ? &unit->newer->older : &unit->model->newest_gathered) = unit->older;
    if (unit->older != NULL) unit->older->newer = unit->newer;
    unit->newer = unit->older = NULL;
}

/* Position of the unit's next visit; UINT32_MAX: none is known. */
static uint32_t next_visit(const fsdp_model *model, const fsdp_unit *unit)
{
    const fsdp__visit *visit;
    for (uint32_t i = model->cursor.at; (visit = fsdp__schedule_visit(&model->cursor, i)) != NULL; i++)
        if (visit->unit == unit->index) return i;
    return UINT32_MAX;
}

/* Give back the gathered unit that is wanted last and is not open; false: there is none. */
static bool evict(fsdp_model *model)
{
    fsdp_unit *victim = NULL;
    uint32_t farthest = 0;
    for (fsdp_unit *unit = model->newest_gathered; unit != NULL; unit = unit->older) {
        if (unit->n_open[0] + unit->n_open[1] > 0) continue;
        uint32_t next = next_visit(model, unit);
        if (victim != NULL && (FSDP__MUTATED(EVICT_NEAREST) ? next >= farthest : next <= farthest)) continue;
        victim = unit;
        farthest = next;
    }
    if (victim == NULL) return false;
    fsdp__allocator_note(model->gather_pool, FSDP__ALLOC_EVENT_EVICT, victim->full, 0, victim->name);
    fsdp__reshard(victim);
    return true;
}

static fsdp_status fail_no_place(const fsdp_unit *unit)
{
    const fsdp_model *model = unit->model;
    uint64_t allocated = model->gather_pool->stats.allocated;
    char text[4096] = "";
    fsdp__allocator_note(model->gather_pool, FSDP__ALLOC_EVENT_OUT_OF_MEMORY, NULL, unit->full_bytes, unit->name);
    fsdp__allocator_describe(model->gather_pool, text, sizeof text);
    return fsdp__fail(FSDP_ERR_NO_MEMORY,
                      "unit %s: its %llu bytes have no place in the gather range of %llu: open and held units have "
                      "%llu, and %llu are "
                      "free in pieces of at most %llu. Close units, or declare this order as a pass%s",
                      unit->name, (unsigned long long)unit->full_bytes, (unsigned long long)model->plan.memory.gather,
                      (unsigned long long)allocated,
                      (unsigned long long)(model->gather_pool->stats.reserved - allocated),
                      (unsigned long long)fsdp__allocator_largest(model->gather_pool), text);
}

/* Find bytes for the unit: planned, else (only when it is needed now) best fit, at the cost of what is gathered and not
 * open. *out_found false: a prefetch has no room. */
static fsdp_status take_buffer(fsdp_unit *unit, uint64_t planned, bool needed_now, fsdp__need *need, bool *out_found)
{
    fsdp_model *model = unit->model;
    fsdp_allocator *pool = model->gather_pool;
    fsdp_stream *lane = model->ctx->lanes[FSDP_LANE_GATHER];
    FSDP_TRY(fsdp__allocator_reserve(pool));
    if (planned != UINT64_MAX)
        unit->full = fsdp__allocator_take_at(pool, planned, unit->full_bytes, lane, unit->name, need);
    *out_found = unit->full != NULL || needed_now;
    if (!*out_found) {
        model->stats.no_room++;
        return FSDP_OK;
    }
    if (unit->full == NULL) {
        do {
            unit->full = fsdp__allocator_take(pool, unit->full_bytes, lane, unit->name, need);
        } while (unit->full == NULL && evict(model));
        if (unit->full == NULL) return fail_no_place(unit);
        model->stats.off_plan_places++;
    }
    fsdp__edges_clear(&unit->full_edges);
    if (!fsdp__unit_held(unit)) link_gathered(unit);
    return FSDP_OK;
}

static fsdp_status enqueue_gather(fsdp_unit *unit, const fsdp__pass *pass)
{
    fsdp_context *ctx = unit->model->ctx;
    fsdp_stream *lane = ctx->lanes[FSDP_LANE_GATHER];
    fsdp_collective list[FSDP__MAX_GROUPS];
    uint32_t n = 0;
    for (uint32_t g = 0; g < unit->n_groups; g++) {
        const fsdp__group *group = &unit->groups[g];
        if (group->aliased || group->elems == 0) continue;
        uint64_t slot_bytes = group->shard_elems * fsdp_dtype_bytes(group->compute_dtype);
        char *full = (char *)(uintptr_t)fsdp__full_begin(unit) + group->full_offset,
             *slot = full + ctx->rank * slot_bytes;
        bool cast = group->compute_dtype != unit->config.master_dtype;
        if (cast) {
            fsdp_device_op op; /* every gather makes one: no zeros into what a cast does not have */
            op.kind = FSDP_OPERATION_CAST;
            op.u.cast.dst = slot, op.u.cast.src = group->master, op.u.cast.count = group->shard_elems;
            op.u.cast.dst_dtype = group->compute_dtype, op.u.cast.src_dtype = unit->config.master_dtype;
            FSDP_TRY(fsdp__launch(lane, &op, unit->name));
        }
        list[n++] = (fsdp_collective){.kind = FSDP_OPERATION_ALL_GATHER,
                                      .dtype = group->compute_dtype,
                                      .count = group->shard_elems,
                                      .send = cast ? slot : group->master,
                                      .recv = full,
                                      .label = unit->name,
                                      .pass = pass->name};
    }
    return ctx->world > 1 && n > 0 ? fsdp__comm_enqueue(ctx->comm, lane, list, n) : FSDP_OK;
}

/* pass: that it is for. */
static fsdp_status gather(fsdp_unit *unit, const fsdp__pass *pass, uint64_t planned, bool needed_now)
{
    fsdp_model *model = unit->model;
    fsdp_stream *lane = model->ctx->lanes[FSDP_LANE_GATHER];
    fsdp__need need;
    fsdp__no_need(&need);
    if (unit->full == NULL) {
        bool found;
        FSDP_TRY(take_buffer(unit, planned, needed_now, &need, &found));
        if (!found) return FSDP_OK;
    }
    if (FSDP__MUTATED(GATHER_NO_WAIT_USED)) memset(&need, 0, sizeof need);
    if (!FSDP__MUTATED(GATHER_NO_WAIT_UPDATED)) fsdp__need_read(&need, &unit->master_edges);
    fsdp__need_write(&need, &unit->full_edges); /* a held buffer that is written again */
    fsdp_status status = fsdp__wait_need(lane, &need);
    if (status == FSDP_OK) {
        status = enqueue_gather(unit, pass);
        fsdp__note_read(&unit->master_edges, lane);
        fsdp__note_write(&unit->full_edges, lane);
    }
    if (status == FSDP_OK) status = fsdp__record(lane, FSDP_MARK_READY, unit->name, NULL, NULL);
    unit->full_version = status == FSDP_OK ? unit->version : UINT64_MAX; /* of no version: it is gathered again */
    unit->ahead = !needed_now;
    model->stats.gathers++;
    if (!needed_now) model->stats.gathers_ahead++;
    return fsdp__model_fail(model, status);
}

fsdp_status fsdp__gather_now(fsdp_unit *unit, uint64_t planned)
{
    return gather(unit, unit->model->pass, planned, true);
}

/* The pass that a visit of the cursor is of. */
static const fsdp__pass *pass_of(const fsdp_model *model, const fsdp__visit *visit)
{
    const fsdp__pass *pass = model->pass;
    return pass == NULL || visit < pass->visits || visit >= pass->visits + pass->n ? model->next : pass;
}

static uint64_t planned_offset(const fsdp_model *model, const fsdp__visit *visit)
{
    const fsdp_unit *unit = model->units[visit->unit];
    if (fsdp__unit_held(unit)) return unit->full_place;
    const fsdp__pass *pass = pass_of(model, visit);
    return pass->full_offset[visit - pass->visits];
}

fsdp_status fsdp__gather_ahead(fsdp_model *model)
{
    fsdp__ahead ahead = {.position = model->cursor.at};
    const fsdp__visit *visit;
    while ((visit = fsdp__schedule_ahead(&model->schedule, &model->cursor, &ahead)) != NULL) {
        fsdp_unit *unit = model->units[visit->unit];
        if (fsdp__is_gathered(unit)) continue;
        FSDP_TRY(gather(unit, pass_of(model, visit), planned_offset(model, visit), false));
        if (!fsdp__is_gathered(unit)) return FSDP_OK; /* no room: a later one must not take what this one waits for */
    }
    const fsdp__visit *after = fsdp__schedule_visit(&model->cursor, ahead.position);
    if (after == NULL) return FSDP_OK;
    fetch_lines(model->units[after->unit]);
    if (ahead.over_budget && !fsdp__is_gathered(model->units[after->unit])) model->stats.over_budget++;
    return FSDP_OK;
}

void fsdp__reshard(fsdp_unit *unit)
{
    assert(unit->full != NULL && !fsdp__unit_held(unit));
    fsdp__allocator_use(unit->model->gather_pool, unit->full, &unit->full_edges);
    fsdp__allocator_give(unit->model->gather_pool, unit->full);
    unit->full = NULL;
    unlink_gathered(unit);
    if (unit->ahead) unit->model->stats.unused_gathers++;
    unit->ahead = false;
}

/* True if the unit can stay where it lies until its next visit: that is planned here, and nothing before it is. Inside a
 * pass that is so by the plan; over a border, and after a hook off plan, it is asked. */
static bool lies_in_place(const fsdp_model *model, const fsdp_unit *unit)
{
    uint64_t begin = unit->full->begin - (uint64_t)(uintptr_t)fsdp__allocator_base(model->gather_pool);
    const fsdp__visit *visit;
    for (uint32_t i = model->cursor.at; (visit = fsdp__schedule_visit(&model->cursor, i)) != NULL; i++) {
        uint64_t at = planned_offset(model, visit);
        if (visit->unit == unit->index) return at == begin;
        bool apart = at + model->schedule.bytes[visit->unit] <= begin || begin + unit->full_bytes <= at;
        if (!model->schedule.held[visit->unit] && !apart && !FSDP__MUTATED(KEPT_IN_THE_WAY)) return false;
    }
    return false;
}

bool fsdp__stays(const fsdp_unit *unit)
{
    const fsdp_model *model = unit->model;
    if (FSDP__MUTATED(KEPT_GIVEN_BACK)) return false;
    return fsdp__schedule_keeps(&model->schedule, &model->cursor, unit->index) && lies_in_place(model, unit);
}

void fsdp__reshard_unwanted(fsdp_model *model)
{
    for (fsdp_unit *unit = model->newest_gathered, *older; unit != NULL; unit = older) {
        older = unit->older;
        bool open = unit->n_open[0] + unit->n_open[1] > 0;
        if (!open && !fsdp__stays(unit)) fsdp__reshard(unit);
    }
}

void fsdp__reshard_stale(fsdp_model *model)
{
    for (fsdp_unit *unit = model->newest_gathered, *older; unit != NULL; unit = older) {
        older = unit->older;
        if (unit->full_version != unit->version && !FSDP__MUTATED(STALE_KEPT)) fsdp__reshard(unit);
    }
}
