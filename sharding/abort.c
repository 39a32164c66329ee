/* SPDX-License-Identifier: MIT */
/* Giving up a step: what is open is closed without a reduction, what was summed is discarded, and edges keep the order. */
#include "fsdp/step.h"

#include "lib/check.h"
#include "lib/device.h"
#include "lib/graph.h"
#include "lib/stream.h"
#include "sharding/reduce.h"
#include "sharding/unshard.h"

/* A stream leaves a window that is dropped: it counts as a user until now. Of gradients, too: several streams at a time may
 * have written them, and edges know one writer. */
static void drop_user(fsdp_unit *unit, fsdp_stream *s)
{
    s->n_open--;
    fsdp__note_read(&unit->full_edges, s);
    if (unit->aliased) fsdp__note_read(&unit->master_edges, s);
    if (unit->grad_begin != 0) fsdp__note_read(fsdp__grad_edges(unit), s);
}

/* Close what is open without a reduction. */
static void drop_unit(fsdp_unit *unit)
{
    if (unit->n_open[0] + unit->n_open[1] > 0) {
        drop_user(unit, unit->stream);
        for (uint32_t i = 0; i < unit->n_users; i++) drop_user(unit, unit->user[i]);
    }
    unit->n_users = unit->n_open[0] = unit->n_open[1] = 0;
    unit->ahead = false;
    if (unit->full != NULL && !fsdp__unit_held(unit)) fsdp__reshard(unit);
    if (unit->grad_begin != 0) fsdp__give_grads(unit);
    unit->reduced = unit->updated = false;
}

/* Whoever reads a shard that dropped windows may have written comes behind s, and s behind all that was in them. */
static fsdp_status settle_shards(const fsdp_model *model, fsdp_stream *s)
{
    fsdp__need need;
    fsdp__no_need(&need);
    for (size_t i = 0; i < model->n_units; i++)
        if (model->units[i]->grad_aliased) fsdp__need_write(&need, &model->units[i]->gradient_edges);
    FSDP_TRY(fsdp__wait_need(s, &need));
    for (size_t i = 0; i < model->n_units; i++)
        if (model->units[i]->grad_aliased) fsdp__note_write(&model->units[i]->gradient_edges, s);
    return FSDP_OK;
}

/* What the step has summed so far is discarded too. */
static fsdp_status clear_sums(fsdp_model *model, fsdp_stream *s)
{
    fsdp__need need;
    fsdp__no_need(&need);
    fsdp__need_write(&need, &model->part_edges);
    fsdp__need_write(&need, &model->square_edges);
    FSDP_TRY(fsdp__wait_need(s, &need));
    fsdp_device_op op = {
        .kind = FSDP_OPERATION_FILL,
        .u.fill = {(char *)model->scratch + model->plan.part_offset, FSDP_STEP_FLOATS * sizeof(float), 0}};
    FSDP_TRY(fsdp__launch(s, &op, "sums"));
    fsdp__note_write(&model->part_edges, s);
    fsdp__note_write(&model->square_edges, s);
    return FSDP_OK;
}

void fsdp__drop_step(fsdp_model *model)
{
    model->n_changes++;
    for (size_t i = 0; i < model->n_units; i++) drop_unit(model->units[i]);
    model->n_open = 0;
    model->update_due = model->mid_step = false;
    model->pass = model->next = NULL;
    model->cursor = (fsdp__cursor){0};
}

fsdp_status fsdp_pass_abort(fsdp_model *model, fsdp_stream *stream)
{
    FSDP_NEED(model);
    if (model->phase == FSDP__OPEN)
        return fsdp__fail(FSDP_ERR_STATE, "fsdp_pass_abort: model %s is not sealed", model->name);
    FSDP_TRY(fsdp__step_stream_check(__func__, model->ctx, stream));
    FSDP_TRY(fsdp__capture_off(__func__, model->ctx));
    if (model->phase == FSDP__IN_UPDATE && model->failed == FSDP_OK)
        return fsdp__fail(FSDP_ERR_STATE, "fsdp_pass_abort: an update is begun: call fsdp_update_end");
    if (model->phase == FSDP__IN_UPDATE)
        return fsdp__fail(model->failed,
                          "fsdp_pass_abort: model %s failed inside an update (%s), so some shards are new and some are "
                          "old: destroy it and load what you saved",
                          model->name, model->failed_text);
    fsdp__lock(model->ctx);
    fsdp__drop_step(model);
    model->phase = FSDP__IDLE;
    model->failed = FSDP_OK;
    fsdp_status status = settle_shards(model, stream);
    if (status == FSDP_OK) status = clear_sums(model, stream);
    fsdp__unlock(model->ctx);
    return fsdp__model_fail(model, status);
}
