/* SPDX-License-Identifier: MIT */
/* Cases made by hand: who is evicted, who is given back, and the gather of a unit that nobody used. */
#include <stdio.h>
#include <string.h>

#include "check.h"
#include "step_pool.h"

enum { UNITS = TOY_LAYERS + 2 }; /* embed, h.0 … h.4, head */

static fsdp_status begin(step_pools *p, int32_t pass, int32_t next)
{
    toy *t = p->t;
    fsdp_pass_args args = FSDP_PASS_ARGS_INIT;
    args.pass = pass;
    args.next = next;
    step_pools_pass(p, pass == FSDP_PASS_TRAIN, pass == FSDP_PASS_TRAIN ? FSDP_PASS_NONE : next);
    TOY_TRY(fsdp_pass_begin(t->model, &args, t->s));
    return step_pools_look(p, UINT32_MAX);
}

/* A window that stays open. */
static fsdp_status open_unit(step_pools *p, uint32_t unit, bool backward)
{
    toy *t = p->t;
    fsdp_view view = FSDP_VIEW_INIT;
    p->at = step_pools_advance(p, unit, backward);
    if (backward) TOY_TRY(fsdp_backward_begin(t->unit[unit], t->s, &view));
    else TOY_TRY(fsdp_forward_begin(t->unit[unit], t->s, &view));
    FSDP_TRY(step_pools_look(p, unit));
    p->n_open[unit][backward]++;
    return FSDP_OK;
}

static fsdp_status close_unit(step_pools *p, uint32_t unit, bool backward)
{
    toy *t = p->t;
    if (backward) TOY_TRY(fsdp_backward_end(t->unit[unit], t->s));
    else TOY_TRY(fsdp_forward_end(t->unit[unit], t->s));
    p->n_open[unit][backward]--;
    return step_pools_look(p, UINT32_MAX);
}

static fsdp_status visit(step_pools *p, uint32_t unit, bool backward)
{
    FSDP_TRY(open_unit(p, unit, backward));
    return close_unit(p, unit, backward);
}

static fsdp_status read_stats(toy *t, fsdp_model_stats *stats)
{
    *stats = (fsdp_model_stats)FSDP_MODEL_STATS_INIT;
    TOY_TRY(fsdp_model_stats_get(t->model, stats));
    return FSDP_OK;
}

static bool overlap(const step_block *a, const step_block *b)
{
    return a->begin < b->begin + b->bytes && b->begin < a->begin + a->bytes;
}

/* h.1 is open, h.2, h.3 and h.4 are gathered ahead; h.0 comes again, which no plan says: h.4 must go, and only it. */
static fsdp_status evict_one(toy *t)
{
    step_pools p;
    fsdp_model_stats before, after;
    step_pools_open(&p, t);
    FSDP_TRY(begin(&p, FSDP_PASS_TRAIN, FSDP_PASS_TRAIN));
    FSDP_TRY(visit(&p, 0, false));
    FSDP_TRY(visit(&p, 1, false));
    FSDP_TRY(open_unit(&p, 2, false));
    for (uint32_t u = 3; u <= 5; u++) TOY_CHECK(p.full.block[u].live);
    step_block place = p.full.block[5];
    FSDP_TRY(read_stats(t, &before));
    FSDP_TRY(open_unit(&p, 1, false));
    FSDP_TRY(read_stats(t, &after));
    TOY_CHECK(p.n_evicted == 1 && p.last_evicted == 5);
    TOY_CHECK(after.unused_gathers == before.unused_gathers + 1);
    TOY_CHECK(after.off_plan_places == before.off_plan_places + 1);
    TOY_CHECK(after.off_plan_hooks == before.off_plan_hooks + 1);
    TOY_CHECK(overlap(&p.full.block[1], &place) && !p.full.block[5].live);
    FSDP_TRY(close_unit(&p, 1, false));
    FSDP_TRY(close_unit(&p, 2, false));
    FSDP_TRY(read_stats(t, &before));
    FSDP_TRY(open_unit(&p, 3, false)); /* h.2 was left alone; h.4 is gathered again, ahead of its visit */
    FSDP_TRY(read_stats(t, &after));
    TOY_CHECK(after.gathers_ahead - before.gathers_ahead == after.gathers - before.gathers);
    FSDP_TRY(close_unit(&p, 3, false));
    TOY_TRY(fsdp_pass_abort(t->model, t->s));
    FSDP_TRY(step_pools_look(&p, UINT32_MAX));
    return toy_finish(t);
}

/* h.0 and h.2 are open, h.3, h.4 and the head are gathered ahead; the big h.1 comes again, and not even the place of one of
 * them would be enough: one after the other must go, the last needed first. */
static fsdp_status evict_several(toy *t)
{
    step_pools p;
    fsdp_model_stats before, after;
    step_pools_open(&p, t);
    FSDP_TRY(begin(&p, FSDP_PASS_TRAIN, FSDP_PASS_TRAIN));
    for (uint32_t u = 0; u < 3; u++) FSDP_TRY(visit(&p, u, false));
    FSDP_TRY(open_unit(&p, 3, false));
    FSDP_TRY(open_unit(&p, 1, false));
    for (uint32_t u = 4; u < UNITS; u++) TOY_CHECK(p.full.block[u].live);
    uint64_t open = p.full.each[1] + p.full.each[3], ahead = p.full.each[4] + p.full.each[5] + p.full.each[6];
    TOY_CHECK(p.full.bytes - open - ahead + p.full.each[6] < p.full.each[2]);
    FSDP_TRY(read_stats(t, &before));
    FSDP_TRY(open_unit(&p, 2, false));
    FSDP_TRY(read_stats(t, &after));
    TOY_CHECK(p.n_evicted >= 2 && p.last_evicted + p.n_evicted == UNITS); /* the head, h.4, … */
    TOY_CHECK(after.unused_gathers == before.unused_gathers + p.n_evicted);
    FSDP_TRY(close_unit(&p, 2, false));
    FSDP_TRY(close_unit(&p, 1, false));
    FSDP_TRY(close_unit(&p, 3, false));
    for (uint32_t u = 4; u < UNITS; u++) FSDP_TRY(visit(&p, u, false)); /* on as if nothing had been */
    for (uint32_t u = UNITS; u-- > 0;) FSDP_TRY(visit(&p, u, true));
    TOY_TRY(fsdp_pass_end(t->model, t->s));
    FSDP_TRY(step_pools_look(&p, UINT32_MAX));
    TOY_TRY(fsdp_pass_abort(t->model, t->s));
    return toy_finish(t);
}

/* A jump over units that are gathered: of those whose turn in backward is soon, what lies in place stays; in a pass that
 * never comes to them again all go, and none is left for an eviction to find. */
static fsdp_status jump(toy *t)
{
    step_pools p;
    fsdp_model_stats stats;
    step_pools_open(&p, t);
    FSDP_TRY(begin(&p, FSDP_PASS_EVAL, FSDP_PASS_NONE));
    FSDP_TRY(open_unit(&p, 0, false));
    for (uint32_t u = 1; u <= 3; u++) TOY_CHECK(p.full.block[u].live);
    FSDP_TRY(open_unit(&p, 6, false));
    for (uint32_t u = 1; u <= 5; u++) TOY_CHECK(!p.full.block[u].live);
    FSDP_TRY(read_stats(t, &stats));
    TOY_CHECK(stats.unused_gathers == 3 && stats.off_plan_hooks == 1);
    FSDP_TRY(open_unit(&p, 3, false)); /* its visit is over: best fit */
    FSDP_TRY(close_unit(&p, 3, false));
    TOY_CHECK(!p.full.block[3].live && p.n_evicted == 0);
    FSDP_TRY(close_unit(&p, 6, false));
    FSDP_TRY(close_unit(&p, 0, false));
    TOY_TRY(fsdp_pass_end(t->model, t->s));
    FSDP_TRY(step_pools_look(&p, UINT32_MAX));
    FSDP_TRY(begin(&p, FSDP_PASS_TRAIN, FSDP_PASS_TRAIN));
    FSDP_TRY(visit(&p, 0, false));
    FSDP_TRY(open_unit(&p, 6, false));
    TOY_CHECK(!p.full.block[1].live && !p.full.block[2].live); /* more than three others come before their backward */
    FSDP_TRY(close_unit(&p, 6, false));
    TOY_TRY(fsdp_pass_abort(t->model, t->s));
    FSDP_TRY(step_pools_look(&p, UINT32_MAX));
    return toy_finish(t);
}

/* Hooks off plan before the held unit is gathered for the first time: its place is its own all the same, so that afterwards
 * every visit on plan finds the place that was planned for it. */
static fsdp_status held_place(toy *t)
{
    static const uint32_t pairs[][2] = {{1, 2}, {3, 2}, {2, 1}};
    step_pools p;
    fsdp_model_stats before, after;
    step_pools_open(&p, t);
    FSDP_TRY(begin(&p, FSDP_PASS_EVAL, FSDP_PASS_TRAIN));
    for (uint32_t i = 0; i < 3; i++) {
        FSDP_TRY(open_unit(&p, pairs[i][0], false));
        FSDP_TRY(open_unit(&p, pairs[i][1], false));
        if (i == 2) FSDP_TRY(visit(&p, 0, false));
        FSDP_TRY(close_unit(&p, pairs[i][1], false));
        FSDP_TRY(close_unit(&p, pairs[i][0], false));
    }
    TOY_TRY(fsdp_pass_end(t->model, t->s));
    FSDP_TRY(step_pools_look(&p, UINT32_MAX));
    FSDP_TRY(read_stats(t, &before));
    FSDP_TRY(step_train(t));
    FSDP_TRY(read_stats(t, &after));
    TOY_CHECK(after.off_plan_places == before.off_plan_places);
    return FSDP_OK;
}

/* Does a stream's record `to` come behind the gather lane's record `from`, by a wait of its own? */
static bool waits_between(const fsdp_trace *trace, uint64_t from, uint64_t to)
{
    int32_t stream = fsdp_trace_at(trace, to)->stream, lane = fsdp_trace_at(trace, from)->stream;
    for (uint64_t i = to; i-- > from;) {
        const fsdp_trace_record *wait = fsdp_trace_at(trace, i);
        if (wait->kind != FSDP_RECORD_WAIT || wait->stream != stream || wait->other != lane) continue;
        uint64_t k = i;
        while (k-- > from) {
            const fsdp_trace_record *event = fsdp_trace_at(trace, k);
            if (event->kind == FSDP_RECORD_EVENT && event->event == wait->event) break;
        }
        if (k != UINT64_MAX && k > from) return true;
    }
    return false;
}

/* The embedding's backward is left out: it is gathered ahead for it, and not used. Its cast reads the shard that AdamW
 * writes next, in every step. */
static fsdp_status unused_gather(toy *t)
{
    fsdp_model_stats stats;
    FSDP_TRY(step_train(t));
    FSDP_TRY(read_stats(t, &stats));
    TOY_CHECK(stats.unused_gathers == t->config->steps);
    uint64_t cast = UINT64_MAX, n_updates = 0;
    for (uint64_t i = 0; i < fsdp_trace_count(t->trace); i++) {
        const fsdp_trace_record *r = fsdp_trace_at(t->trace, i);
        if (r->kind != FSDP_RECORD_OPERATION || strcmp(r->label, "embed") != 0) continue;
        if (r->operation == FSDP_OPERATION_CAST && strcmp(fsdp_trace_stream_name(t->trace, r->stream), "gather") == 0)
            cast = i;
        if (r->operation != FSDP_OPERATION_ADAMW) continue;
        TOY_CHECK(cast != UINT64_MAX && waits_between(t->trace, cast, i));
        cast = UINT64_MAX;
        n_updates++;
    }
    TOY_CHECK(n_updates == t->config->steps);
    return FSDP_OK;
}

/* A step is given up with two streams in a window. Alone, they were writing the shard: who reads that next, or writes it in the
 * next step, comes behind both. */
static fsdp_status give_up(toy *t)
{
    fsdp_pass_args args = FSDP_PASS_ARGS_INIT;
    float *gradients = step_keep(t, t->result->n_master * sizeof *gradients);
    TOY_CHECK(gradients != NULL);
    for (uint32_t k = 0; k < 2; k++) {
        fsdp_view view = FSDP_VIEW_INIT;
        TOY_TRY(fsdp_pass_begin(t->model, &args, t->s));
        TOY_TRY(fsdp_backward_begin(t->unit[3], t->s, &view));
        TOY_CHECK(view.n_params > 0 && view.grads_zeroed);
        TOY_TRY(toy_touch(t, t->s, view.grads[0], sizeof(float), true));
        TOY_TRY(fsdp_unit_use(t->unit[3], t->second));
        TOY_TRY(toy_touch(t, t->second, view.grads[0], sizeof(float), true));
        TOY_TRY(fsdp_pass_abort(t->model, t->s));
        if (k == 0) TOY_TRY(toy_values(t, FSDP_VALUE_GRADIENT, gradients));
    }
    return step_train(t);
}

/* ---- The list ---- */

static void drop_last_visit(toy_config *c)
{
    static const uint32_t all[TOY_LAYERS] = {0, 1, 2, 3, 4};
    toy_shape shape;
    toy_shape_make(&c->shape, &shape);
    toy_program_make(&shape, all, TOY_LAYERS, &c->program);
    c->program.n -= 3;
    c->own_program = true;
}

bool step_named(uint32_t i, step_case *out)
{
    static const struct {
        const char *name;
        toy_script script;
        uint32_t depth, world;
    } list[] = {
        {"evict-one", evict_one, 3, 2},   {"evict-several", evict_several, 3, 2}, {"jump", jump, 3, 2},
        {"held-place", held_place, 0, 2}, {"unused-gather", unused_gather, 2, 2}, {"give-up", give_up, 1, 2},
        {"give-up-alone", give_up, 1, 1},
    };
    if (i >= sizeof list / sizeof *list) return false;
    *out = (step_case){.config = toy_config_default(), .script = list[i].script};
    toy_config *c = &out->config;
    snprintf(out->name, sizeof out->name, "%s", list[i].name);
    c->world = list[i].world;
    c->depth = list[i].depth;
    c->pace = TOY_AHEAD;
    c->trace = c->touch = c->tape = true;
    c->shape.square = list[i].script == evict_one || list[i].script == held_place;
    c->shape.tied = list[i].script == held_place;
    if (list[i].script == unused_gather) {
        out->training = c->values = true;
        c->shape.compute = FSDP_DTYPE_BF16;
        drop_last_visit(c);
    }
    return true;
}
