/* SPDX-License-Identifier: MIT */
/* Captures, as far as they are of models: the state in which one begins, must end and may be replayed; what a replay brings to
 * the device, and what the host counts for it. */
#include "sharding/capture.h"

#include <stdio.h>
#include <string.h>

#include "lib/check.h"
#include "lib/device.h"
#include "lib/hash.h"
#include "lib/hostmem.h"
#include "lib/mutate.h"
#include "lib/stream.h"
#include "sharding/optim.h"
#include "sharding/unshard.h"
#include "sharding/update.h"

/* What the host believes of a unit's gathered buffer, and the graph relies on. */
typedef struct unit_state {
    uint64_t full; /* address; 0: none */
    bool current;  /* gathered, from the shard as it is */
} unit_state;

/* A model at the beginning; of those that the capture did not touch nothing is kept. */
struct fsdp__captured_model {
    fsdp_model *model;
    unit_state *units;
    size_t n_units;
    uint64_t n_changes;     /* model->n_changes when its state was the captured one */
    uint64_t n_updates;     /* before; then: in a replay */
    uint32_t n_steps;       /* fsdp_adamw_step calls */
    fsdp_model_stats stats; /* before; then: what a replay adds */
};

/* ---- States ---- */

static unit_state state_of(const fsdp_unit *unit)
{
    if (unit->full == NULL) return (unit_state){0, false};
    return (unit_state){unit->full->begin, unit->full_version == unit->version};
}

static fsdp_status check_between_steps(const char *call, const fsdp_model *model)
{
    if (model->failed != FSDP_OK)
        return fsdp__fail(model->failed, "%s: model %s has failed (%s): call fsdp_pass_abort, or destroy it", call,
                          model->name, model->failed_text);
    for (size_t i = 0; model->n_open > 0 && i < model->n_units; i++)
        if (model->units[i]->n_open[0] + model->units[i]->n_open[1] > 0)
            return fsdp__fail(FSDP_ERR_STATE, "%s: unit %s is open: end the whole step first", call,
                              model->units[i]->name);
    const char *what = model->phase == FSDP__IN_PASS     ? "a pass is begun"
                       : model->phase == FSDP__IN_UPDATE ? "an update is begun"
                       : model->mid_step                 ? "micro-steps are missing"
                       : model->update_due               ? "an update is due"
                                                         : NULL;
    if (what == NULL) return FSDP_OK;
    return fsdp__fail(FSDP_ERR_STATE, "%s: model %s is inside a step, %s: end the whole step first", call, model->name,
                      what);
}

static fsdp_status fail_unit(const char *call, const fsdp_unit *unit, unit_state had, unit_state has)
{
    static const char *const how[] = {"not gathered", "gathered from an older shard", "gathered"};
    int before = had.full == 0 ? 0 : had.current ? 2 : 1, now = has.full == 0 ? 0 : has.current ? 2 : 1;
    return fsdp__fail(
        FSDP_ERR_STATE,
        "%s: unit %s of model %s is %s now and was %s when the capture began%s, so a replay would use the wrong "
        "bytes: run a whole step first, whose pass names the same `next` as the captured one",
        call, unit->name, unit->model->name, how[now], how[before], now == before ? ", elsewhere" : "");
}

/* Gathered, and not when the capture began: an evaluation keeps what comes soon in the next pass. */
static bool is_extra(const fsdp__captured_model *c, size_t i)
{
    return c->units[i].full == 0 && c->model->units[i]->full != NULL;
}

/* Is the model in the state in which the capture began? A replay can do with more than that. */
static fsdp_status check_state(const char *call, const fsdp__captured_model *c, bool may_have_more)
{
    FSDP_TRY(check_between_steps(call, c->model));
    if (c->n_changes == c->model->n_changes || (FSDP__MUTATED(REPLAY_ANYWHERE) && may_have_more)) return FSDP_OK;
    for (size_t i = 0; i < c->n_units; i++) {
        unit_state has = state_of(c->model->units[i]);
        bool same = has.full == c->units[i].full && has.current == c->units[i].current;
        if (!same && !(may_have_more && is_extra(c, i))) return fail_unit(call, c->model->units[i], c->units[i], has);
    }
    return FSDP_OK;
}

/* What is there beside that goes: the graph will gather it. */
static void give_back_extra(fsdp__captured_model *c)
{
    if (c->n_changes == c->model->n_changes) return;
    for (size_t i = 0; i < c->n_units; i++)
        if (is_extra(c, i)) fsdp__reshard(c->model->units[i]);
    c->n_changes = c->model->n_changes;
}

static void free_model(const fsdp_host_allocator *host, fsdp__captured_model *c)
{
    fsdp__host_free(host, c->units, c->n_units, sizeof *c->units);
    c->units = NULL;
}

static fsdp_status remember_model(fsdp_capture *capture, fsdp_model *model)
{
    fsdp__captured_model *c = &capture->models[capture->n_models];
    c->units = fsdp__host_alloc(&capture->ctx->host, model->n_units, sizeof *c->units);
    if (c->units == NULL)
        return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "fsdp_capture_begin: no host memory for the %zu units of model %s",
                          model->n_units, model->name);
    c->model = model;
    c->n_units = model->n_units;
    for (size_t i = 0; i < c->n_units; i++) c->units[i] = state_of(model->units[i]);
    c->n_changes = model->n_changes;
    c->n_updates = model->n_updates;
    c->stats = model->stats;
    capture->n_models++;
    return FSDP_OK;
}

static fsdp_status remember_models(fsdp_capture *capture)
{
    fsdp_context *ctx = capture->ctx;
    size_t n = 0;
    for (const fsdp_model *m = ctx->models; m != NULL; m = m->older) n++;
    capture->models = fsdp__host_alloc(&ctx->host, n, sizeof *capture->models);
    if (capture->models == NULL)
        return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "fsdp_capture_begin: no host memory for %zu models", n);
    capture->models_capacity = n;
    for (fsdp_model *m = ctx->models; m != NULL; m = m->older)
        if (m->phase != FSDP__OPEN) FSDP_TRY(remember_model(capture, m));
    return FSDP_OK;
}

/* ---- Life ---- */

static void free_capture(fsdp_capture *capture)
{
    const fsdp_host_allocator *host = &capture->ctx->host;
    for (size_t i = 0; i < capture->n_models; i++) free_model(host, &capture->models[i]);
    fsdp__host_free(host, capture->models, capture->models_capacity, sizeof *capture->models);
    fsdp__host_free(host, capture->steps, capture->steps_capacity, sizeof *capture->steps);
    fsdp__capture_free_pools(capture);
    fsdp__host_free(host, capture, 1, sizeof *capture);
}

void fsdp_capture_destroy(fsdp_capture *capture)
{
    if (capture == NULL) return;
    fsdp_context *ctx = capture->ctx;
    fsdp__lock(ctx);
    fsdp_capture **link = &ctx->captures;
    while (*link != capture) link = &(*link)->next;
    *link = capture->next;
    ctx->n_live[FSDP__CHILD_CAPTURE]--;
    fsdp__unlock(ctx);
    free_capture(capture);
}

void fsdp__capture_forget(const fsdp_model *model)
{
    for (fsdp_capture *c = model->ctx->captures; c != NULL; c = c->next)
        for (size_t i = 0; i < c->n_models; i++) {
            if (c->models[i].model != model) continue;
            c->models[i].model = NULL;
            snprintf(c->broken, sizeof c->broken, "model %.120s was destroyed", model->name);
        }
}

/* ---- Begin and end ---- */

/* A graph that is launched, or will be in a moment, and that nothing is ordered after yet. */
static fsdp_status check_no_replay(const char *call, const fsdp_context *ctx)
{
    for (const fsdp_capture *c = ctx->captures; c != NULL; c = c->next)
        if (c->replaying)
            return fsdp__fail(
                FSDP_ERR_STATE,
                "%s: a replay on stream %s is not ended: call fsdp_replayed, or destroy its capture if the graph "
                "was not launched",
                call, c->replay_name);
    return FSDP_OK;
}

static fsdp_status check_begin(fsdp_context *ctx)
{
    FSDP_TRY(fsdp__capture_off("fsdp_capture_begin", ctx));
    if (!ctx->caps.can_capture)
        return fsdp__fail(FSDP_ERR_UNSUPPORTED, "fsdp_capture_begin: the %s backend has no graphs", ctx->backend->name);
    if (ctx->debug & (FSDP_DEBUG_SYNC | FSDP_DEBUG_ORDER))
        return fsdp__fail(
            FSDP_ERR_STATE,
            "fsdp_capture_begin: fsdp_config.debug has %s, which waits at each call: nothing runs in a capture",
            ctx->debug & FSDP_DEBUG_SYNC ? "FSDP_DEBUG_SYNC" : "FSDP_DEBUG_ORDER");
    if (ctx->n_open_traces > 0)
        return fsdp__fail(FSDP_ERR_STATE,
                          "fsdp_capture_begin: a trace is on%s, and nothing runs in a capture: stop it first",
                          ctx->trace == NULL ? ", since what is on it has not run yet" : "");
    for (const fsdp_model *m = ctx->models; m != NULL; m = m->older)
        if (m->phase != FSDP__OPEN) FSDP_TRY(check_between_steps("fsdp_capture_begin", m));
    return check_no_replay("fsdp_capture_begin", ctx);
}

fsdp_status fsdp_capture_begin(fsdp_context *ctx, fsdp_stream *stream)
{
    FSDP_NEED(ctx);
    FSDP_TRY(fsdp__step_stream_check(__func__, ctx, stream));
    FSDP_TRY(check_begin(ctx));
    fsdp_capture *capture = fsdp__host_alloc(&ctx->host, 1, sizeof *capture);
    if (capture == NULL) return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "fsdp_capture_begin: no host memory");
    capture->ctx = ctx;
    fsdp__lock(ctx);
    fsdp_status status = remember_models(capture);
    if (status == FSDP_OK) status = fsdp__capture_take_pools(capture);
    if (status == FSDP_OK) status = fsdp__capture_open(capture, stream);
    if (status == FSDP_OK) {
        fsdp__capture_note(capture, FSDP_OPERATION_CAPTURE, stream);
        capture->next = ctx->captures;
        ctx->captures = capture;
        ctx->n_live[FSDP__CHILD_CAPTURE]++;
    }
    fsdp__unlock(ctx);
    if (status == FSDP_OK) return FSDP_OK;
    free_capture(capture);
    return fsdp__context_explain(ctx, status);
}

fsdp_status fsdp__capture_step(fsdp_model *model, uint32_t *out_place)
{
    fsdp_capture *capture = model->ctx->capture;
    uint32_t i = 0;
    while (capture->models[i].model != model) i++;
    fsdp__captured_model *c = &capture->models[i];
    if (c->n_steps == FSDP_REPORT_RING)
        return fsdp__fail(
            FSDP_ERR_STATE,
            "fsdp_adamw_step: model %s has had %d in this capture, and there are as many reports: end the "
            "capture, and replay it more often",
            model->name, FSDP_REPORT_RING);
    if (!fsdp__host_grow(&model->ctx->host, &capture->steps, &capture->steps_capacity, capture->n_steps + 1,
                         sizeof *capture->steps))
        return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "fsdp_adamw_step: no host memory for a capture's list of steps");
    *out_place = FSDP__MUTATED(REPLAY_ONE_INPUT) ? 0 : c->n_steps;
    c->n_steps++;
    capture->steps[capture->n_steps++] =
        (fsdp__captured_step){i, (uint32_t)(model->n_updates - c->n_updates) + 1, *out_place};
    return FSDP_OK;
}

static fsdp_status check_end_state(fsdp_capture *capture)
{
    for (size_t i = 0; i < capture->n_models; i++)
        FSDP_TRY(check_state("fsdp_capture_end", &capture->models[i], false));
    return fsdp__capture_check_pools("fsdp_capture_end", capture);
}

/* Nothing has run: what the host believes to be gathered is not. */
static void forget_steps(fsdp__captured_model *c)
{
    fsdp_model *model = c->model;
    if (c->n_changes == model->n_changes) return;
    fsdp__drop_step(model);
    for (size_t i = 0; i < model->n_units; i++)
        if (model->units[i]->full != NULL) model->units[i]->full_version = UINT64_MAX;
    model->phase = FSDP__IDLE;
    model->failed = FSDP_OK;
    model->n_updates = c->n_updates;
    model->stats = c->stats;
}

/* What a replay adds; the model is as if nothing had been called. */
static void take_difference(fsdp__captured_model *c)
{
    fsdp_model_stats before = c->stats, *d = &c->stats;
    fsdp_model *model = c->model;
    *d = model->stats;
    d->steps -= before.steps, d->gathers -= before.gathers, d->gathers_ahead -= before.gathers_ahead;
    d->reductions -= before.reductions, d->off_plan_hooks -= before.off_plan_hooks;
    d->unused_gathers -= before.unused_gathers, d->over_budget -= before.over_budget;
    d->no_room -= before.no_room, d->off_plan_places -= before.off_plan_places;
    model->stats = before;
    uint64_t n_updates = model->n_updates - c->n_updates;
    model->n_updates = c->n_updates;
    c->n_updates = n_updates;
    c->n_changes = model->n_changes;
}

static void add_difference(const fsdp__captured_model *c)
{
    const fsdp_model_stats *d = &c->stats;
    fsdp_model_stats *st = &c->model->stats;
    st->steps += d->steps, st->gathers += d->gathers, st->gathers_ahead += d->gathers_ahead;
    st->reductions += d->reductions, st->off_plan_hooks += d->off_plan_hooks;
    st->unused_gathers += d->unused_gathers, st->over_budget += d->over_budget;
    st->no_room += d->no_room, st->off_plan_places += d->off_plan_places;
    st->gather_trace = d->gather_trace, st->grad_trace = d->grad_trace;
    c->model->n_updates += c->n_updates;
}

/* Keep the models that the capture touched. */
static void settle_models(fsdp_capture *capture)
{
    size_t kept = 0;
    for (size_t i = 0; i < capture->n_models; i++) {
        fsdp__captured_model *c = &capture->models[i];
        if (c->n_changes == c->model->n_changes) {
            free_model(&capture->ctx->host, c);
            continue;
        }
        take_difference(c);
        for (size_t k = 0; k < capture->n_steps; k++)
            if (capture->steps[k].model == i) capture->steps[k].model = (uint32_t)kept;
        if (kept != i) capture->models[kept] = *c;
        kept++;
    }
    capture->n_models = kept;
}

static void unlink_open(fsdp_capture *capture)
{
    assert(capture->ctx->captures == capture); /* none has been begun since */
    capture->ctx->captures = capture->next;
    capture->ctx->n_live[FSDP__CHILD_CAPTURE]--;
}

fsdp_status fsdp_capture_end(fsdp_context *ctx, fsdp_stream *stream, fsdp_capture **out_capture)
{
    FSDP_NEED(ctx);
    FSDP_NEED(out_capture);
    FSDP_TRY(fsdp__stream_belongs(__func__, ctx, stream));
    fsdp_capture *capture = ctx->capture;
    if (capture == NULL)
        return fsdp__fail(FSDP_ERR_STATE, "fsdp_capture_end: no capture is on: call fsdp_capture_begin first");
    if (capture->stream != stream)
        return fsdp__fail(FSDP_ERR_STATE, "fsdp_capture_end: the capture is on stream %s, not %s",
                          capture->stream->name, stream->name);
    fsdp_status status = fsdp__context_check(ctx);
    char sentence[FSDP__ERROR_BYTES];
    fsdp__lock(ctx);
    if (status == FSDP_OK) status = check_end_state(capture);
    snprintf(sentence, sizeof sentence, "%s", fsdp_last_error());
    for (size_t i = 0; status != FSDP_OK && i < capture->n_models; i++) forget_steps(&capture->models[i]);
    fsdp_status joined = fsdp__capture_close(capture);
    if (status == FSDP_OK && joined != FSDP_OK) {
        status = joined;
        snprintf(sentence, sizeof sentence, "%s", fsdp_last_error());
        for (size_t i = 0; i < capture->n_models; i++) forget_steps(&capture->models[i]);
    }
    if (status == FSDP_OK) {
        settle_models(capture);
        fsdp__capture_drop_pools(capture);
        capture->hash = fsdp__flight_fold(&ctx->flight, FSDP__HASH_SEED);
    } else {
        unlink_open(capture);
    }
    fsdp__unlock(ctx);
    if (status == FSDP_OK) {
        *out_capture = capture;
        return FSDP_OK;
    }
    free_capture(capture);
    return fsdp__context_explain(ctx, fsdp__fail(status, "%s", sentence));
}

/* ---- Replays ---- */

static fsdp_status check_replay(fsdp_capture *capture, uint32_t n_args, const fsdp_adamw_args *args, fsdp_stream *s)
{
    static const char call[] = "fsdp_replay";
    FSDP_TRY(fsdp__step_stream_check(call, capture->ctx, s));
    FSDP_TRY(fsdp__capture_off(call, capture->ctx));
    FSDP_TRY(check_no_replay(call, capture->ctx));
    if (capture->broken[0] != 0)
        return fsdp__fail(FSDP_ERR_STATE, "%s: %s: capture again, and throw the graph away", call, capture->broken);
    if (n_args != capture->n_steps)
        return fsdp__fail(FSDP_ERR_ARG,
                          "%s: %u fsdp_adamw_args, and %zu fsdp_adamw_step were captured: give each its own", call,
                          n_args, capture->n_steps);
    if (n_args > 0) FSDP_NEED(args);
    for (size_t i = 0; i < capture->n_models; i++) {
        FSDP_TRY(check_state(call, &capture->models[i], true));
        FSDP_TRY(fsdp__check_order(capture->models[i].model));
    }
    return fsdp__capture_check_pools(call, capture);
}

/* The caller's k-th, of his version of the struct. */
static const fsdp_adamw_args *args_at(const fsdp_adamw_args *args, uint32_t k)
{
    return (const fsdp_adamw_args *)(const void *)((const char *)args + k * args->size);
}

fsdp_status fsdp_replay(fsdp_capture *capture, uint32_t n_args, const fsdp_adamw_args *args, fsdp_stream *stream)
{
    FSDP_NEED(capture);
    FSDP_TRY(check_replay(capture, n_args, args, stream));
    fsdp_adamw_args a;
    for (uint32_t k = 0; k < n_args; k++) FSDP_TRY(fsdp__adamw_args_read(__func__, args_at(args, k), &a));
    fsdp_context *ctx = capture->ctx;
    fsdp__lock(ctx);
    for (size_t i = 0; i < capture->n_models; i++) give_back_extra(&capture->models[i]);
    fsdp_status status = fsdp__replay_open(stream);
    for (uint32_t k = 0; status == FSDP_OK && k < n_args; k++) {
        const fsdp__captured_step *step = &capture->steps[k];
        const fsdp_model *model = capture->models[step->model].model;
        FSDP_IGNORE(fsdp__adamw_args_read(__func__, args_at(args, k), &a)); /* it was good a moment ago */
        status = fsdp__step_input(model->adamw, &a, model->n_updates + step->update, step->place, stream);
    }
    if (status == FSDP_OK) {
        fsdp__capture_note(capture, FSDP_OPERATION_REPLAY, stream);
        capture->replaying = true;
        capture->replay_slot = stream->slot;
        memcpy(capture->replay_name, stream->name, sizeof capture->replay_name);
    }
    fsdp__unlock(ctx);
    return status == FSDP_OK ? FSDP_OK : fsdp__context_explain(ctx, status);
}

fsdp_status fsdp_replayed(fsdp_capture *capture, fsdp_stream *stream)
{
    FSDP_NEED(capture);
    fsdp_context *ctx = capture->ctx;
    FSDP_TRY(fsdp__stream_check(__func__, ctx, stream));
    if (!capture->replaying)
        return fsdp__fail(FSDP_ERR_STATE, "fsdp_replayed: fsdp_replay, then the graph's launch, come before it");
    if (capture->replay_slot != stream->slot)
        return fsdp__fail(FSDP_ERR_ARG, "fsdp_replayed: fsdp_replay was called for stream %s, not %s",
                          capture->replay_name, stream->name);
    for (size_t i = 0; i < capture->n_models; i++) {
        const fsdp__captured_model *c = &capture->models[i];
        if (c->model == NULL || c->n_changes != c->model->n_changes)
            return fsdp__fail(FSDP_ERR_STATE, "fsdp_replayed: %s was used between fsdp_replay and this call",
                              c->model != NULL ? c->model->name : "a model that is gone");
    }
    fsdp__lock(ctx);
    fsdp_status status = fsdp__replay_close(stream);
    for (size_t k = 0; status == FSDP_OK && k < capture->n_steps; k++) {
        fsdp_model *model = capture->models[capture->steps[k].model].model;
        status = fsdp__report_record(model, model->n_updates + capture->steps[k].update, stream);
    }
    if (status == FSDP_OK) {
        for (size_t i = 0; i < capture->n_models; i++) add_difference(&capture->models[i]);
        capture->replaying = false;
    }
    fsdp__unlock(ctx);
    return status == FSDP_OK ? FSDP_OK : fsdp__context_explain(ctx, status);
}
