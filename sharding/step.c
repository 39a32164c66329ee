/* SPDX-License-Identifier: MIT */
/* The hooks of a training step: micro-steps, windows, and the edges between the caller's compute and the lanes. What each
 * enqueues, in which order, is the table in docs/streams.md. A hook first checks, then takes memory (host only), and only
 * then enqueues: until there, a refusal changes nothing. */
#include "fsdp/step.h"

#include <string.h>

#include "lib/check.h"
#include "lib/device.h"
#include "lib/graph.h"
#include "lib/mutate.h"
#include "lib/stream.h"
#include "sharding/reduce.h"
#include "sharding/unshard.h"
#include "sharding/update.h"

static fsdp__visit_list list_of(const fsdp__pass *pass)
{
    return pass != NULL ? (fsdp__visit_list){pass->visits, pass->n} : (fsdp__visit_list){NULL, 0};
}

static fsdp_status check_pass_args(const fsdp_model *model, const fsdp_pass_args *a)
{
    int32_t n = (int32_t)model->n_passes;
    if (a->pass < 0 || a->pass >= n)
        return fsdp__fail(FSDP_ERR_ARG, "fsdp_pass_begin: pass %d, the model has 0 to %d", a->pass, n - 1);
    if (a->next < FSDP_PASS_NONE || a->next >= n)
        return fsdp__fail(FSDP_ERR_ARG, "fsdp_pass_begin: next %d, the model has 0 to %d, or FSDP_PASS_NONE", a->next,
                          n - 1);
    if (a->count == 0 || a->index >= a->count)
        return fsdp__fail(FSDP_ERR_ARG, "fsdp_pass_begin: micro-step %u of %u", a->index, a->count);
    const fsdp__pass *pass = &model->passes[a->pass];
    if (pass->backward && a->count > 1 && model->config.accumulation == FSDP_ACCUMULATE_NONE)
        return fsdp__fail(FSDP_ERR_ARG,
                          "fsdp_pass_begin: %u micro-steps in a step: set fsdp_model_config.accumulation to "
                          "FSDP_ACCUMULATE_REDUCE_EACH or FSDP_ACCUMULATE_KEEP_FULL",
                          a->count);
    if (model->mid_step) {
        const fsdp_pass_args *last = &model->args;
        if (a->pass != last->pass || a->count != last->count || a->index != last->index + 1)
            return fsdp__fail(FSDP_ERR_STATE,
                              "fsdp_pass_begin: pass %s, micro-step %u of %u, but %s has had %u of %u: go on with "
                              "micro-step %u, or fsdp_pass_abort",
                              pass->name, a->index, a->count, model->passes[last->pass].name, last->index + 1,
                              last->count, last->index + 1);
    } else if (pass->backward && a->index != 0) {
        return fsdp__fail(FSDP_ERR_STATE, "fsdp_pass_begin: pass %s begins with micro-step %u of %u: begin with 0",
                          pass->name, a->index, a->count);
    }
    return FSDP_OK;
}

fsdp_status fsdp_pass_begin(fsdp_model *model, const fsdp_pass_args *args, fsdp_stream *stream)
{
    FSDP_TRY(fsdp__model_check_sealed(__func__, model));
    FSDP_TRY(fsdp__check_order(model));
    FSDP_NEED(args);
    FSDP_TRY(fsdp__step_stream_check(__func__, model->ctx, stream));
    if (model->phase == FSDP__IN_PASS)
        return fsdp__fail(FSDP_ERR_STATE, "fsdp_pass_begin: pass %s is not ended: call fsdp_pass_end",
                          model->pass->name);
    if (model->phase == FSDP__IN_UPDATE)
        return fsdp__fail(FSDP_ERR_STATE, "fsdp_pass_begin: the update is not ended: call fsdp_update_end");
    if (model->update_due)
        return fsdp__fail(FSDP_ERR_STATE,
                          "fsdp_pass_begin: the gradients of pass %s wait for an update: call an optimizer (skip it if "
                          "you must), or fsdp_pass_abort",
                          model->pass->name);
    fsdp_pass_args a = FSDP_PASS_ARGS_INIT;
    FSDP_TRY(fsdp__read_config("fsdp_pass_args", &a, sizeof a, args, sizeof a));
    FSDP_TRY(check_pass_args(model, &a));
    fsdp__lock(model->ctx);
    model->n_changes++;
    model->args = a;
    model->pass = &model->passes[a.pass];
    bool last = a.index + 1 == a.count;
    model->next = !last                                               ? model->pass
                  : model->pass->backward || a.next == FSDP_PASS_NONE ? NULL
                                                                      : &model->passes[a.next];
    model->cursor = (fsdp__cursor){list_of(model->pass), list_of(model->next), 0};
    model->phase = FSDP__IN_PASS;
    fsdp__reshard_unwanted(model);
    fsdp__unlock(model->ctx);
    return FSDP_OK;
}

static fsdp_status fail_open(const char *call, const fsdp_model *model)
{
    for (size_t i = 0; i < model->n_units; i++) {
        const fsdp_unit *unit = model->units[i];
        for (int b = 0; b < 2; b++)
            if (unit->n_open[b] > 0)
                return fsdp__fail(FSDP_ERR_STATE, "%s: unit %s is open: call fsdp_%s_end first", call, unit->name,
                                  b ? "backward" : "forward");
    }
    return FSDP_OK;
}

fsdp_status fsdp_pass_end(fsdp_model *model, fsdp_stream *stream)
{
    FSDP_TRY(fsdp__model_check_sealed(__func__, model));
    FSDP_TRY(fsdp__stream_check(__func__, model->ctx, stream));
    if (model->phase != FSDP__IN_PASS) return fsdp__fail(FSDP_ERR_STATE, "fsdp_pass_end: no pass is begun");
    if (model->n_open > 0) return fail_open(__func__, model);
    fsdp__lock(model->ctx);
    model->cursor.at = model->cursor.pass.n;
    fsdp__reshard_unwanted(model);
    fsdp_status status = fsdp__gather_ahead(model); /* what had no room while the last units were open */
    bool last = model->args.index + 1 == model->args.count;
    /* Gradients that are still kept belong to units that the last micro-step did not visit. */
    for (size_t i = 0; last && model->n_grads > 0 && status == FSDP_OK && i < model->n_units; i++)
        if (model->units[i]->grad_begin != 0) status = fsdp__reduce(model->units[i]);
    model->update_due = model->pass->backward && last;
    model->mid_step = model->pass->backward && !last;
    model->phase = FSDP__IDLE;
    fsdp__unlock(model->ctx);
    return fsdp__model_fail(model, status);
}

/* Move the cursor for a begin hook of unit. Returns the visit it is, or -1 off plan without a later one. The next visit is the
 * usual case; a later one is a jump, and what was gathered for the visits between is given back. */
static int64_t advance(fsdp_model *model, const fsdp_unit *unit, bool backward)
{
    const fsdp__pass *pass = model->pass;
    for (uint32_t i = model->cursor.at; i < pass->n; i++) {
        if (pass->given[i].unit != unit || (pass->given[i].use == FSDP_USE_BACKWARD) != backward) continue;
        bool on_plan = i == model->cursor.at;
        model->cursor.at = i + 1;
        if (!on_plan) {
            model->stats.off_plan_hooks++;
            fsdp__reshard_unwanted(model);
        }
        return i;
    }
    model->stats.off_plan_hooks++;
    return -1;
}

static fsdp_status check_begin(const char *call, fsdp_unit *unit, fsdp_stream *stream, fsdp_view *view)
{
    if (unit == NULL) return fsdp__fail(FSDP_ERR_ARG, "%s: unit is NULL", call);
    FSDP_TRY(fsdp__model_check_sealed(call, unit->model));
    FSDP_TRY(fsdp__stream_belongs(call, unit->model->ctx, stream));
    if (view == NULL) return fsdp__fail(FSDP_ERR_ARG, "%s: unit %s: out_view is NULL", call, unit->name);
    if (!fsdp__is_size(view->size, sizeof *view))
        return fsdp__fail(FSDP_ERR_ARG, "%s: unit %s: fsdp_view.size is %zu, expected %zu: start from FSDP_VIEW_INIT",
                          call, unit->name, view->size, sizeof *view);
    if (unit->model->phase != FSDP__IN_PASS)
        return fsdp__fail(FSDP_ERR_STATE, "%s: unit %s: no pass is begun: call fsdp_pass_begin", call, unit->name);
    if (unit->n_open[0] + unit->n_open[1] > 0 && unit->stream != stream)
        return fsdp__fail(FSDP_ERR_STATE,
                          "%s: unit %s is open on stream %s, not %s: bring a second stream in with fsdp_unit_use", call,
                          unit->name, unit->stream->name, stream->name);
    return FSDP_OK;
}

/* Everything that a window's buffer must be ordered after, for reading it on s. */
static fsdp_status wait_ready(fsdp_unit *unit, fsdp_stream *s)
{
    fsdp__need need;
    fsdp__no_need(&need);
    fsdp__need_read(&need, &unit->full_edges);
    if (unit->aliased) fsdp__need_read(&need, &unit->master_edges);
    return fsdp__wait_need(s, &need);
}

/* Note on the tape what the caller's kernels may touch, at one end of a window. */
static void note_window(const fsdp_unit *unit, fsdp_stream *s, bool backward)
{
    if (s->ctx->trace == NULL) return;
    fsdp_trace_access access[FSDP_TRACE_MAX_ACCESSES];
    uint32_t n = 0;
    if (unit->full_bytes > 0) access[n++] = (fsdp_trace_access){fsdp__full_begin(unit), unit->full_bytes, false};
    for (uint32_t g = 0; g < unit->n_groups && n < FSDP_TRACE_MAX_ACCESSES - 1; g++) {
        const fsdp__group *group = &unit->groups[g];
        if (group->aliased && group->elems > 0)
            access[n++] = (fsdp_trace_access){(uint64_t)(uintptr_t)group->master,
                                              group->elems * fsdp_dtype_bytes(group->compute_dtype), false};
    }
    if (backward && unit->grad_begin != 0) access[n++] = (fsdp_trace_access){unit->grad_begin, unit->grad_bytes, true};
    fsdp__note_use(s, unit->name, access, n);
}

static void open_window(fsdp_unit *unit, fsdp_stream *s, bool backward)
{
    if (unit->n_open[0] + unit->n_open[1] == 0) s->n_open++;
    unit->stream = s;
    unit->n_open[backward]++;
    unit->ahead = false;
    unit->model->n_open++;
    note_window(unit, s, backward);
}

/* The part that both begin hooks share: gather now if need be, wait, gather ahead. */
static fsdp_status make_ready(fsdp_unit *unit, int64_t visit, fsdp_stream *s)
{
    fsdp_model *model = unit->model;
    if (!fsdp__is_gathered(unit)) {
        uint64_t planned = fsdp__unit_held(unit) ? unit->full_place
                           : visit >= 0          ? model->pass->full_offset[visit]
                                                 : UINT64_MAX;
        FSDP_TRY(fsdp__gather_now(unit, planned));
    }
    if (!FSDP__MUTATED(COMPUTE_NO_WAIT_READY)) FSDP_TRY(fsdp__model_fail(model, wait_ready(unit, s)));
    return fsdp__gather_ahead(model);
}

static void fill_view(fsdp_view *view, fsdp_unit *unit, bool backward, bool zeroed)
{
    fsdp__set_param_ptrs(unit);
    if (backward) fsdp__set_grad_ptrs(unit);
    *view =
        (fsdp_view){view->size, (uint32_t)unit->n_params, zeroed, unit->param_ptrs, backward ? unit->grad_ptrs : NULL};
}

fsdp_status fsdp_forward_begin(fsdp_unit *unit, fsdp_stream *stream, fsdp_view *out_view)
{
    FSDP_TRY(check_begin(__func__, unit, stream, out_view));
    fsdp_model *model = unit->model;
    fsdp__lock(model->ctx);
    uint32_t at = model->cursor.at;
    int64_t visit = advance(model, unit, false);
    fsdp_status status = make_ready(unit, visit, stream);
    if (status == FSDP_OK) {
        open_window(unit, stream, false);
        fill_view(out_view, unit, false, false);
    } else {
        model->cursor.at = at;
    }
    fsdp__unlock(model->ctx);
    return status;
}

/* Make the gradient buffer s's: behind the last owner of its bytes (of an aliased one, the optimizer), zeroed, if this window
 * takes it first; behind whoever wrote what is there, if an earlier micro-step or an outer window did. Bytes of the pool are
 * poisoned when they are given back; a shard is read until now. */
static fsdp_status start_grads(fsdp_unit *unit, fsdp_stream *s, bool fresh, fsdp__need *need)
{
    bool zeros = unit->config.zero_grads, poisons = unit->grad_aliased && (s->ctx->debug & FSDP_DEBUG_POISON);
    fsdp__need_write(need, fsdp__grad_edges(unit));
    if (!FSDP__MUTATED(GRADS_NO_WAIT_REDUCED)) FSDP_TRY(fsdp__wait_need(s, need));
    if (fresh && (zeros || poisons)) {
        fsdp_device_op op = {.kind = FSDP_OPERATION_FILL,
                             .u.fill = {(void *)(uintptr_t)unit->grad_begin, unit->grad_bytes, zeros ? 0 : 0xff}};
        FSDP_TRY(fsdp__launch(s, &op, unit->name));
    }
    fsdp__note_write(fsdp__grad_edges(unit), s);
    return FSDP_OK;
}

static fsdp_status check_backward(const fsdp_unit *unit)
{
    const fsdp_model *model = unit->model;
    if (!model->pass->backward)
        return fsdp__fail(FSDP_ERR_STATE, "fsdp_backward_begin: unit %s: pass %s has no BACKWARD visits", unit->name,
                          model->pass->name);
    bool adds = unit->reduced && fsdp__unit_trainable(unit) && unit->n_open[1] == 0;
    if (adds && !model->plan.reduces_twice)
        return fsdp__fail(FSDP_ERR_STATE,
                          "fsdp_backward_begin: unit %s was reduced in this step already, and no pass says that it is "
                          "visited backward twice: leave its window open until its last use, or declare such a pass",
                          unit->name);
    return FSDP_OK;
}

fsdp_status fsdp_backward_begin(fsdp_unit *unit, fsdp_stream *stream, fsdp_view *out_view)
{
    FSDP_TRY(check_begin(__func__, unit, stream, out_view));
    FSDP_TRY(check_backward(unit));
    fsdp_model *model = unit->model;
    fsdp__lock(model->ctx);
    uint32_t at = model->cursor.at;
    int64_t visit = advance(model, unit, true);
    fsdp__need need;
    fsdp__no_need(&need);
    bool fresh = fsdp__unit_trainable(unit) && unit->grad_begin == 0;
    fsdp_status status =
        fresh ? fsdp__take_grads(unit, visit >= 0 ? model->pass->grad_offset[visit] : UINT64_MAX, stream, &need)
              : FSDP_OK;
    if (status == FSDP_OK) {
        status = make_ready(unit, visit, stream);
        if (status == FSDP_OK && unit->grad_begin != 0)
            status = fsdp__model_fail(model, start_grads(unit, stream, fresh, &need));
        if (status != FSDP_OK && fresh) fsdp__give_grads(unit);
    }
    if (status == FSDP_OK) {
        open_window(unit, stream, true);
        /* What is there already, of an outer window or an earlier micro-step, is to be added to. */
        fill_view(out_view, unit, true, unit->grad_begin != 0 && (!fresh || unit->config.zero_grads));
    } else {
        model->cursor.at = at;
    }
    fsdp__unlock(model->ctx);
    return status;
}

static fsdp_status check_end(const char *call, fsdp_unit *unit, fsdp_stream *stream, bool backward)
{
    if (unit == NULL) return fsdp__fail(FSDP_ERR_ARG, "%s: unit is NULL", call);
    FSDP_TRY(fsdp__model_check_sealed(call, unit->model));
    FSDP_TRY(fsdp__stream_belongs(call, unit->model->ctx, stream));
    if (unit->n_open[backward] == 0)
        return fsdp__fail(FSDP_ERR_STATE, "%s: unit %s has no open %s window: call fsdp_%s_begin first", call,
                          unit->name, backward ? "backward" : "forward", backward ? "backward" : "forward");
    if (unit->stream != stream)
        return fsdp__fail(FSDP_ERR_STATE, "%s: unit %s was opened on stream %s, not %s: end it there", call, unit->name,
                          unit->stream->name, stream->name);
    return FSDP_OK;
}

/* s waits for the further streams of the window, for what they were given so far. */
static fsdp_status join_users(fsdp_unit *unit, fsdp_stream *s, bool backward)
{
    for (uint32_t i = 0; i < unit->n_users; i++) {
        fsdp__fence fence;
        note_window(unit, unit->user[i], backward);
        FSDP_TRY(fsdp__record(unit->user[i], FSDP_MARK_USED, unit->name, NULL, &fence));
        if (!FSDP__MUTATED(SECOND_STREAM_LOST)) FSDP_TRY(fsdp__wait_fence(s, &fence, FSDP_REASON_READ));
    }
    return FSDP_OK;
}

/* NaN over the parameters that s gives back, behind everybody who still reads them: in an earlier micro-step another stream
 * may have. */
static fsdp_status poison(fsdp_unit *unit, fsdp_stream *s)
{
    fsdp__need need;
    fsdp__no_need(&need);
    fsdp__need_write(&need, &unit->full_edges);
    FSDP_TRY(fsdp__wait_need(s, &need));
    fsdp_device_op op = {.kind = FSDP_OPERATION_FILL,
                         .u.fill = {(void *)(uintptr_t)fsdp__full_begin(unit), unit->full_bytes, 0xff}};
    return fsdp__launch(s, &op, unit->name);
}

/* Close one window: note its uses; *out_give: it was the last and the buffer is to be given back. What can fail comes
 * first: until then the window is open, and fsdp_pass_abort knows who is in it. */
static fsdp_status close_window(fsdp_unit *unit, fsdp_stream *s, bool backward, bool *out_give)
{
    fsdp_model *model = unit->model;
    bool last = unit->n_open[0] + unit->n_open[1] == 1, last_backward = backward && unit->n_open[1] == 1;
    *out_give = last && unit->full != NULL && !fsdp__unit_held(unit) && !fsdp__stays(unit);
    if (last || last_backward) FSDP_TRY(join_users(unit, s, backward));
    note_window(unit, s, backward);
    if (*out_give && (model->ctx->debug & FSDP_DEBUG_POISON)) FSDP_TRY(poison(unit, s));
    fsdp__note_read(&unit->full_edges, s);
    if (FSDP__MUTATED(USE_EARLY)) unit->full_edges.read[unit->full_edges.n_reads - 1] -= FSDP__SLOTS;
    if (unit->aliased) fsdp__note_read(&unit->master_edges, s);
    unit->n_open[backward]--;
    model->n_open--;
    if (!last) return FSDP_OK;
    s->n_open--;
    while (unit->n_users > 0) unit->user[--unit->n_users]->n_open--;
    return FSDP_OK;
}

fsdp_status fsdp_forward_end(fsdp_unit *unit, fsdp_stream *stream)
{
    FSDP_TRY(check_end(__func__, unit, stream, false));
    fsdp__lock(unit->model->ctx);
    bool give;
    fsdp_status status = close_window(unit, stream, false, &give);
    if (status == FSDP_OK && give) {
        status = fsdp__record(stream, FSDP_MARK_USED, unit->name, NULL, NULL);
        fsdp__reshard(unit);
    }
    fsdp__unlock(unit->model->ctx);
    return fsdp__model_fail(unit->model, status);
}

static fsdp_status end_backward(fsdp_unit *unit, fsdp_stream *s)
{
    fsdp_model *model = unit->model;
    bool give;
    FSDP_TRY(close_window(unit, s, true, &give));
    bool done = unit->grad_begin != 0 && unit->n_open[1] == 0; /* inner windows leave reduction to the outer */
    if (unit->grad_begin != 0) fsdp__note_write(fsdp__grad_edges(unit), s);
    /* Aliased, no lane waits for the gradients. Another stream that will gets its fence then. */
    if (give || (done && !unit->grad_aliased))
        FSDP_TRY(fsdp__record(s, done ? FSDP_MARK_GRADS : FSDP_MARK_USED, unit->name, NULL, NULL));
    if (give) fsdp__reshard(unit);
    bool keep = model->config.accumulation == FSDP_ACCUMULATE_KEEP_FULL && model->args.index + 1 < model->args.count;
    return done && !keep ? fsdp__reduce(unit) : FSDP_OK;
}

fsdp_status fsdp_backward_end(fsdp_unit *unit, fsdp_stream *stream)
{
    FSDP_TRY(check_end(__func__, unit, stream, true));
    fsdp__lock(unit->model->ctx);
    fsdp_status status = end_backward(unit, stream);
    fsdp__unlock(unit->model->ctx);
    return fsdp__model_fail(unit->model, status);
}

fsdp_status fsdp_unit_use(fsdp_unit *unit, fsdp_stream *other)
{
    FSDP_NEED(unit);
    FSDP_TRY(fsdp__model_check_sealed(__func__, unit->model));
    FSDP_TRY(fsdp__stream_check(__func__, unit->model->ctx, other));
    if (unit->n_open[0] + unit->n_open[1] == 0)
        return fsdp__fail(FSDP_ERR_STATE, "fsdp_unit_use: unit %s is not open", unit->name);
    if (other == unit->stream) return FSDP_OK;
    uint32_t place = 0; /* a stream that is in the window may come again, for gradients that were not there then */
    while (place < unit->n_users && unit->user[place] != other) place++;
    if (place == FSDP__MAX_USERS)
        return fsdp__fail(FSDP_ERR_STATE, "fsdp_unit_use: unit %s is used by %d further streams already", unit->name,
                          FSDP__MAX_USERS);
    fsdp__lock(unit->model->ctx);
    fsdp__need need;
    fsdp__no_need(&need);
    fsdp__need_read(&need, &unit->full_edges);
    if (unit->aliased) fsdp__need_read(&need, &unit->master_edges);
    if (unit->grad_begin != 0) fsdp__need_write(&need, fsdp__grad_edges(unit));
    fsdp_status status = fsdp__wait_need(other, &need);
    if (status == FSDP_OK && place == unit->n_users) {
        unit->user[unit->n_users++] = other;
        other->n_open++;
    }
    if (status == FSDP_OK) note_window(unit, other, unit->n_open[1] > 0);
    fsdp__unlock(unit->model->ctx);
    return fsdp__model_fail(unit->model, status);
}
