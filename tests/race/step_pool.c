/* SPDX-License-Identifier: MIT */
#include "step_pool.h"

#include <string.h>

#include "sharding/model.h"

enum { ALIGN = 128, NEVER = UINT32_MAX };

static uint64_t round_up(uint64_t value, uint64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

/* Parameters of one type, frozen or not, lie one after another. grad: bytes of gradients, of those that are not frozen. */
static uint64_t unit_bytes(const toy *t, const toy_unit *unit, bool grad)
{
    uint64_t total = 0, world = t->config->world;
    bool counted[TOY_PARAMS] = {false};
    for (uint32_t i = 0; i < unit->n_params; i++) {
        const toy_param *first = &unit->param[i];
        uint64_t elems = 0;
        for (uint32_t k = i; k < unit->n_params && !counted[i]; k++) {
            if (unit->param[k].compute != first->compute || unit->param[k].frozen != first->frozen) continue;
            elems += round_up(unit->param[k].elems, ALIGN);
            counted[k] = k > i;
        }
        elems = round_up(elems, world * ALIGN);
        bool is_shard = world == 1 && first->compute == unit->master;
        if (grad && !first->frozen) total += elems * fsdp_dtype_bytes(unit->grad);
        if (!grad && !is_shard) total += elems * fsdp_dtype_bytes(first->compute);
    }
    return total;
}

/* In a world of one that reduces no unit twice, gradients of the reduce type are written onto the shard. */
static bool on_shard(const toy *t, const toy_unit *unit)
{
    return t->config->world == 1 && t->config->accumulation != FSDP_ACCUMULATE_REDUCE_EACH &&
           unit->grad == unit->reduce;
}

/* Where a unit's gradients begin among all shards, in a world of one. */
static uint64_t shard_offset(const toy *t, uint32_t u)
{
    uint64_t offset = 0;
    while (u-- > 0) offset += unit_bytes(t, &t->shape.unit[u], true);
    return offset;
}

void step_pools_open(step_pools *p, toy *t)
{
    *p = (step_pools){.t = t};
    p->full = (step_pool){.pool = t->model->gather_pool, .bytes = t->result->memory.gather};
    p->grad = (step_pool){.pool = t->model->grad_pool, .bytes = t->result->memory.grad};
    for (uint32_t u = 0; u < t->shape.n_units; u++) {
        p->full.each[u] = unit_bytes(t, &t->shape.unit[u], false);
        p->grad.each[u] = on_shard(t, &t->shape.unit[u]) ? 0 : unit_bytes(t, &t->shape.unit[u], true);
    }
    p->n_tape = fsdp_trace_count(t->trace);
}

/* ---- Visits ---- */

static void add_half(step_pools *p, bool backward)
{
    const toy_shape *shape = &p->t->shape;
    for (uint32_t held = 2; held-- > 0;)
        for (uint32_t i = 0; i < shape->n_units; i++) {
            uint32_t unit = backward && !held ? shape->n_units - 1 - i : i;
            if (shape->unit[unit].held == held) p->visit[p->n_visits++] = (step_visit){unit, backward};
        }
}

void step_pools_pass(step_pools *p, bool train, int32_t next)
{
    p->n_visits = p->at = 0;
    add_half(p, false);
    if (train) add_half(p, true);
    p->n_pass = p->n_visits;
    if (next != FSDP_PASS_NONE) add_half(p, false);
    if (next == FSDP_PASS_TRAIN) add_half(p, true);
}

uint32_t step_pools_advance(const step_pools *p, uint32_t unit, bool backward)
{
    for (uint32_t i = p->at; i < p->n_pass; i++)
        if (p->visit[i].unit == unit && p->visit[i].backward == backward) return i + 1;
    return p->at;
}

static uint32_t next_visit(const step_pools *p, uint32_t unit)
{
    for (uint32_t i = p->at; i < p->n_visits; i++)
        if (p->visit[i].unit == unit) return i;
    return NEVER;
}

/* ---- Places ---- */

static bool stays(const step_pools *p, const step_pool *pool, uint32_t unit)
{
    bool full = pool == &p->full;
    if (full && p->t->shape.unit[unit].held) return true;
    return p->n_open[unit][1] > 0 || (full && p->n_open[unit][0] > 0);
}

/* The largest gap between the blocks that count; only_open: those that stay, else all. */
static uint64_t largest_gap(const step_pools *p, const step_pool *pool, bool only_open, uint64_t *out_free)
{
    uint64_t at = 0, largest = 0, free = 0;
    while (at < pool->bytes) {
        uint64_t next = pool->bytes, behind = pool->bytes;
        for (uint32_t u = 0; u < p->t->shape.n_units; u++) {
            const step_block *b = &pool->block[u];
            if (!b->live || (only_open && !stays(p, pool, u)) || b->begin < at || b->begin >= next) continue;
            next = b->begin;
            behind = b->begin + b->bytes;
        }
        if (next - at > largest) largest = next - at;
        free += next - at;
        at = behind;
    }
    if (out_free != NULL) *out_free = free;
    return largest;
}

bool step_pool_fits(const step_pools *p, const step_pool *pool, uint32_t unit, uint64_t *out_free)
{
    return largest_gap(p, pool, true, out_free) >= pool->each[unit];
}

static uint32_t find_unit(const toy *t, const char *name)
{
    uint32_t u = 0;
    while (u < t->shape.n_units && strcmp(t->shape.unit[u].name, name) != 0) u++;
    return u;
}

/* Nothing that is gathered and may go is wanted later, and it had to go: the unit found no gap beside it. */
static fsdp_status check_evicted(step_pools *p, uint32_t victim, uint32_t unit)
{
    toy *t = p->t;
    TOY_CHECK(victim < t->shape.n_units && p->full.block[victim].live && !stays(p, &p->full, victim));
    for (uint32_t u = 0; u < t->shape.n_units; u++)
        if (p->full.block[u].live && !stays(p, &p->full, u)) TOY_CHECK(next_visit(p, u) <= next_visit(p, victim));
    TOY_CHECK(unit != NEVER);
    TOY_CHECK(largest_gap(p, &p->full, false, NULL) < p->full.each[unit]);
    p->n_evicted++;
    p->last_evicted = victim;
    return FSDP_OK;
}

static fsdp_status follow(step_pools *p, step_pool *pool, uint32_t unit)
{
    toy *t = p->t;
    const fsdp__history *history = &pool->pool->history;
    TOY_CHECK(history->n - pool->n_seen <= history->capacity);
    for (; pool->n_seen < history->n; pool->n_seen++) {
        const fsdp__alloc_event *event = &history->events[pool->n_seen & (history->capacity - 1)];
        uint32_t u = find_unit(t, event->owner);
        if (event->kind == FSDP__ALLOC_EVENT_EVICT) {
            fsdp_status status = check_evicted(p, u, unit);
            if (status != FSDP_OK) return status;
        }
        if (event->kind == FSDP__ALLOC_EVENT_FREE) {
            TOY_CHECK(u < t->shape.n_units && pool->block[u].live);
            pool->block[u].live = false;
        }
        if (event->kind != FSDP__ALLOC_EVENT_ALLOC) continue;
        uint64_t begin = event->offset;
        TOY_CHECK(u < t->shape.n_units && !pool->block[u].live && event->bytes == pool->each[u]);
        TOY_CHECK(begin + event->bytes <= pool->bytes);
        for (uint32_t k = 0; k < t->shape.n_units; k++) {
            const step_block *b = &pool->block[k];
            TOY_CHECK(!b->live || b->begin + b->bytes <= begin || begin + event->bytes <= b->begin);
        }
        pool->block[u] = (step_block){begin, event->bytes, true};
    }
    return FSDP_OK;
}

/* A window's bytes are those of the unit's block, or of its shards. */
static fsdp_status check_use(step_pools *p, const fsdp_trace_record *record)
{
    toy *t = p->t;
    uint32_t u = find_unit(t, record->label);
    TOY_CHECK(u < t->shape.n_units);
    for (uint32_t i = 0; i < record->n_accesses; i++) {
        if (record->access[i].write && on_shard(t, &t->shape.unit[u])) {
            TOY_CHECK(record->access[i].begin == (uint64_t)(uintptr_t)t->model->gradients + shard_offset(t, u));
            TOY_CHECK(record->access[i].bytes == unit_bytes(t, &t->shape.unit[u], true));
            continue;
        }
        step_pool *pool = record->access[i].write ? &p->grad : &p->full;
        uint64_t begin = record->access[i].begin - (uint64_t)(uintptr_t)fsdp__allocator_base(pool->pool);
        uint64_t at = record->access[i].begin - (uint64_t)(uintptr_t)t->model->master;
        if (!record->access[i].write && at < t->result->memory.master) continue; /* the shard itself */
        TOY_CHECK(pool->block[u].live && begin == pool->block[u].begin && record->access[i].bytes == pool->each[u]);
    }
    return FSDP_OK;
}

fsdp_status step_pools_look(step_pools *p, uint32_t unit)
{
    fsdp_status status = follow(p, &p->full, unit);
    if (status == FSDP_OK) status = follow(p, &p->grad, unit);
    uint64_t n = fsdp_trace_count(p->t->trace);
    for (; p->n_tape < n && status == FSDP_OK; p->n_tape++) {
        const fsdp_trace_record *record = fsdp_trace_at(p->t->trace, p->n_tape);
        if (record->kind == FSDP_RECORD_USE && unit != NEVER) status = check_use(p, record);
    }
    return status;
}
