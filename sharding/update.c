/* SPDX-License-Identifier: MIT */
/* The update bracket: around whatever writes shards. In: reduced gradients. Out: shards of a new version, an event a unit, and
 * the first gathers of what follows, which so hide behind the rest of the optimizer. */
#include "sharding/update.h"

#include <stdio.h>

#include "lib/check.h"
#include "lib/device.h"
#include "lib/mutate.h"
#include "lib/stream.h"
#include "sharding/unshard.h"

/* A rank's calls stay different from the others' once they are: what a later step writes over was the same. */
fsdp_status fsdp__check_order(fsdp_model *model)
{
    uint64_t first = 0;
    for (int i = 0; model->ctx->world > 1 && i < FSDP_REPORT_RING; i++) {
        uint64_t step = __atomic_load_n(&model->reports[i].differs, __ATOMIC_ACQUIRE);
        if (step != 0 && (first == 0 || step < first)) first = step;
    }
    if (first == 0) return FSDP_OK;
    char sentence[FSDP__SENTENCE_BYTES];
    snprintf(
        sentence, sizeof sentence,
        "step %llu of model %.80s: ranks have enqueued different collectives before its sum, and it changed nothing",
        (unsigned long long)first, model->name);
    return fsdp__context_fail_all(model->ctx, FSDP_ERR_MISMATCH, sentence);
}

fsdp_status fsdp__check_update_begin(const char *call, fsdp_model *model, fsdp_stream *s)
{
    FSDP_TRY(fsdp__model_check_sealed(call, model));
    FSDP_TRY(fsdp__check_order(model));
    FSDP_TRY(fsdp__step_stream_check(call, model->ctx, s));
    if (model->phase == FSDP__IN_UPDATE) return fsdp__fail(FSDP_ERR_STATE, "%s: an update is begun already", call);
    if (model->phase == FSDP__IN_PASS) {
        for (size_t i = 0; i < model->n_units; i++)
            if (model->units[i]->n_open[0] + model->units[i]->n_open[1] > 0)
                return fsdp__fail(FSDP_ERR_STATE, "%s: unit %s is open: end it, then the pass, then update", call,
                                  model->units[i]->name);
        return fsdp__fail(FSDP_ERR_STATE, "%s: pass %s is not ended: call fsdp_pass_end first", call,
                          model->pass->name);
    }
    if (model->mid_step)
        return fsdp__fail(FSDP_ERR_STATE,
                          "%s: micro-step %u of %u is the last so far: run the others, or fsdp_pass_abort", call,
                          model->args.index + 1, model->args.count);
    return FSDP_OK;
}

/* A trainable unit that no backward window reduced has gradient zero, not what the last step left. */
static fsdp_status clear_unreduced(fsdp_unit *unit, fsdp_stream *s)
{
    for (uint32_t g = 0; g < unit->n_groups; g++) {
        const fsdp__group *group = &unit->groups[g];
        if (group->frozen || group->elems == 0) continue;
        fsdp_device_op op = {
            .kind = FSDP_OPERATION_FILL,
            .u.fill = {group->gradient, group->shard_elems * fsdp_dtype_bytes(unit->config.reduce_dtype), 0}};
        FSDP_TRY(fsdp__launch(s, &op, unit->name));
    }
    fsdp__note_write(&unit->gradient_edges, s);
    return FSDP_OK;
}

fsdp_status fsdp__update_begin(fsdp_model *model, fsdp_stream *s)
{
    fsdp__need need;
    fsdp__no_need(&need);
    model->n_changes++;
    for (size_t i = 0; i < model->n_units; i++) {
        fsdp_unit *unit = model->units[i];
        unit->updated = false;
        if (!FSDP__MUTATED(UPDATE_NO_WAIT_REDUCED)) fsdp__need_read(&need, &unit->gradient_edges);
        if (!FSDP__MUTATED(UPDATE_NO_WAIT_GATHERS)) fsdp__need_write(&need, &unit->master_edges);
        if (model->update_due && !unit->reduced) fsdp__need_write(&need, &unit->gradient_edges);
    }
    FSDP_TRY(fsdp__wait_need(s, &need));
    for (size_t i = 0; model->update_due && i < model->n_units; i++)
        if (fsdp__unit_trainable(model->units[i]) && !model->units[i]->reduced)
            FSDP_TRY(clear_unreduced(model->units[i], s));
    model->phase = FSDP__IN_UPDATE;
    return FSDP_OK;
}

static void note_updated(fsdp_unit *unit, const fsdp_stream *s)
{
    fsdp__note_write(&unit->master_edges, s);
    fsdp__note_read(&unit->gradient_edges, s);
    unit->version++;
    unit->updated = true;
}

fsdp_status fsdp__update_unit(fsdp_unit *unit, fsdp_stream *s)
{
    note_updated(unit, s);
    /* Where nothing is gathered, no lane waits for it: windows read the shard itself, usually on s. */
    return unit->full_bytes > 0 ? fsdp__record(s, FSDP_MARK_UPDATED, unit->name, NULL, NULL) : FSDP_OK;
}

fsdp_status fsdp__update_end(fsdp_model *model, fsdp_stream *s)
{
    bool rest = false;
    for (size_t i = 0; i < model->n_units; i++) {
        fsdp_unit *unit = model->units[i];
        unit->reduced = false;
        if (unit->updated) continue;
        note_updated(unit, s);
        rest |= unit->full_bytes > 0;
    }
    if (rest) FSDP_TRY(fsdp__record(s, FSDP_MARK_UPDATED, model->name, NULL, NULL));
    model->phase = FSDP__IDLE;
    model->update_due = false;
    model->n_updates++;
    model->stats.steps++;
    fsdp__reshard_stale(model);
    model->stats.gather_trace = fsdp__allocator_step(model->gather_pool);
    model->stats.grad_trace = fsdp__allocator_step(model->grad_pool);

    /* The next pass is entered with nothing gathered but held units: these first, then the first `depth` visits. */
    bool known = model->pass != NULL && model->args.next != FSDP_PASS_NONE;
    model->pass = known ? &model->passes[model->args.next] : NULL;
    model->next = NULL;
    model->cursor = (fsdp__cursor){0};
    if (!known) return FSDP_OK;
    model->cursor.pass = (fsdp__visit_list){model->pass->visits, model->pass->n};
    return fsdp__gather_ahead(model);
}

fsdp_status fsdp_update_begin(fsdp_model *model, fsdp_stream *stream)
{
    FSDP_TRY(fsdp__check_update_begin(__func__, model, stream));
    fsdp__lock(model->ctx);
    fsdp_status status = fsdp__update_begin(model, stream);
    fsdp__unlock(model->ctx);
    return fsdp__model_fail(model, status);
}

static fsdp_status check_in_update(const char *call, fsdp_model *model, fsdp_stream *s)
{
    FSDP_TRY(fsdp__model_check_sealed(call, model));
    FSDP_TRY(fsdp__stream_check(call, model->ctx, s));
    if (model->phase != FSDP__IN_UPDATE)
        return fsdp__fail(FSDP_ERR_STATE, "%s: no update is begun: call fsdp_update_begin first", call);
    return FSDP_OK;
}

fsdp_status fsdp_update_unit(fsdp_unit *unit, fsdp_stream *stream)
{
    FSDP_NEED(unit);
    FSDP_TRY(check_in_update(__func__, unit->model, stream));
    if (unit->updated)
        return fsdp__fail(FSDP_ERR_STATE, "fsdp_update_unit: unit %s was called updated already in this bracket",
                          unit->name);
    fsdp__lock(unit->model->ctx);
    fsdp_status status = fsdp__update_unit(unit, stream);
    fsdp__unlock(unit->model->ctx);
    return fsdp__model_fail(unit->model, status);
}

fsdp_status fsdp_update_end(fsdp_model *model, fsdp_stream *stream)
{
    FSDP_TRY(check_in_update(__func__, model, stream));
    fsdp__lock(model->ctx);
    fsdp_status status = fsdp__update_end(model, stream);
    fsdp__unlock(model->ctx);
    return fsdp__model_fail(model, status);
}

fsdp_status fsdp_unit_shard(fsdp_unit *unit, const fsdp_shard_segment **out_segments, uint32_t *out_n)
{
    FSDP_NEED(unit);
    FSDP_NEED(out_segments);
    FSDP_NEED(out_n);
    FSDP_TRY(fsdp__model_check_sealed(__func__, unit->model));
    *out_segments = unit->segments;
    *out_n = unit->n_segments;
    return FSDP_OK;
}
