/* SPDX-License-Identifier: MIT */
/* Stage 6: the optimizer. In: gradient shards. Out: new masters and moments, the norm, the step report. No host value decides
 * anything after enqueue: lr, clip, skip and step count are read from device memory. */
#include "sharding/optim.h"

#include <string.h>

#include "lib/check.h"
#include "lib/comm.h"
#include "lib/device.h"
#include "lib/hash.h"
#include "lib/hostmem.h"
#include "lib/mutate.h"
#include "lib/stream.h"
#include "sharding/capture.h"
#include "sharding/update.h"

static fsdp_status check_config(const fsdp_adamw_config *c)
{
    if (!(c->beta1 >= 0.0f && c->beta1 < 1.0f))
        return fsdp__fail(FSDP_ERR_ARG, "fsdp_adamw_config.beta1 is %g, expected 0 to below 1", (double)c->beta1);
    if (!(c->beta2 >= 0.0f && c->beta2 < 1.0f))
        return fsdp__fail(FSDP_ERR_ARG, "fsdp_adamw_config.beta2 is %g, expected 0 to below 1", (double)c->beta2);
    if (!(c->eps > 0.0f && c->eps < 1e30f))
        return fsdp__fail(FSDP_ERR_ARG, "fsdp_adamw_config.eps is %g, expected more than 0", (double)c->eps);
    if (!(c->weight_decay >= 0.0f && c->weight_decay < 1e30f))
        return fsdp__fail(FSDP_ERR_ARG, "fsdp_adamw_config.weight_decay is %g, expected 0 or more",
                          (double)c->weight_decay);
    return FSDP_OK;
}

fsdp_status fsdp_adamw_create(fsdp_model *model, const fsdp_adamw_config *config, fsdp_adamw **out_opt)
{
    FSDP_TRY(fsdp__model_check(__func__, model));
    FSDP_NEED(out_opt);
    if (model->phase != FSDP__OPEN)
        return fsdp__fail(FSDP_ERR_STATE, "fsdp_adamw_create: model %s is sealed: declare its optimizer before",
                          model->name);
    if (model->adamw != NULL)
        return fsdp__fail(FSDP_ERR_STATE, "fsdp_adamw_create: model %s has an optimizer", model->name);
    fsdp_adamw_config c = FSDP_ADAMW_CONFIG_INIT;
    if (config != NULL) FSDP_TRY(fsdp__read_config("fsdp_adamw_config", &c, sizeof c, config, sizeof c));
    FSDP_TRY(check_config(&c));
    fsdp_adamw *opt = fsdp__host_alloc(&model->ctx->host, 1, sizeof *opt);
    if (opt == NULL) return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "fsdp_adamw_create: no host memory");
    opt->model = model;
    opt->config = c;
    model->adamw = opt;
    *out_opt = opt;
    return FSDP_OK;
}

_Static_assert(FSDP_STEP_ORDER == 1 + FSDP_MAX_SUMS, "the order stands behind the norm and the caller's sums");

static char *scratch_at(const fsdp_model *model, uint64_t offset) { return (char *)model->scratch + offset; }

static const fsdp_kernel_segment *table_of(const fsdp_model *model, const fsdp__group *group)
{
    return (const fsdp_kernel_segment *)(const void *)scratch_at(model, model->plan.table_offset + group->table_offset);
}

/* Every collective that this rank has enqueued so far, on both communicators: the same number on all ranks if they have made
 * the same calls before this step's sum. */
static uint64_t order_of(const fsdp_context *ctx)
{
    return ctx->world <= FSDP__MAX_WORLD ? fsdp__flight_fold(&ctx->flight, FSDP__HASH_SEED) : 0;
}

static fsdp_step_input *input_at(const fsdp_model *model, uint32_t place)
{
    return (fsdp_step_input *)(void *)scratch_at(model, model->plan.input_offset) + place;
}

static fsdp_step_input input_of(const fsdp_adamw *opt, const fsdp_adamw_args *args, uint64_t step)
{
    const fsdp_model *model = opt->model;
    double factor = args->grad_scale * (model->config.grad_sum ? 1.0 : 1.0 / model->ctx->world);
    return (fsdp_step_input){.step = step,
                             .lr = args->lr,
                             .factor = (float)factor,
                             .max_norm = args->max_norm,
                             .beta1 = opt->config.beta1,
                             .beta2 = opt->config.beta2,
                             .skip = args->skip,
                             .world = model->ctx->world,
                             .order = order_of(model->ctx)};
}

fsdp_status fsdp__step_input(const fsdp_adamw *opt, const fsdp_adamw_args *args, uint64_t step, uint32_t place,
                             fsdp_stream *s)
{
    const fsdp_model *model = opt->model;
    fsdp_device_op op = {.kind = FSDP_OPERATION_STEP_INPUT};
    op.u.step_input.part = (float *)(void *)scratch_at(model, model->plan.part_offset);
    op.u.step_input.to = input_at(model, place);
    op.u.step_input.input = input_of(opt, args, step);
    return fsdp__launch(s, &op, "norm");
}

static fsdp_status add_squares(fsdp_unit *unit, fsdp_stream *s)
{
    fsdp_model *model = unit->model;
    fsdp__need need;
    fsdp__no_need(&need);
    if (!FSDP__MUTATED(SQUARES_NO_WAIT_REDUCED)) fsdp__need_read(&need, &unit->gradient_edges);
    FSDP_TRY(fsdp__wait_need(s, &need));
    for (uint32_t g = 0; g < unit->n_groups; g++) {
        const fsdp__group *group = &unit->groups[g];
        if (group->frozen || group->elems == 0) continue;
        fsdp_device_op op = {.kind = FSDP_OPERATION_SQUARE_SUM};
        op.u.square_sum.out = (float *)(void *)scratch_at(model, model->plan.part_offset);
        op.u.square_sum.x = group->gradient;
        op.u.square_sum.count = group->shard_elems;
        op.u.square_sum.segments = table_of(model, group);
        op.u.square_sum.n_segments = group->n_segments;
        op.u.square_sum.dtype = unit->config.reduce_dtype;
        FSDP_TRY(fsdp__launch(s, &op, unit->name));
    }
    fsdp__note_read(&unit->gradient_edges, s);
    return FSDP_OK;
}

/* This rank's part of what the step sums. Σ g² of its shards comes first, in the order of reductions, on the gather lane: that
 * has nothing left to do behind backward's last gather, so each unit's squares follow its reduction, beside what is left of
 * backward. Then the order of its calls, with the host's values, which in a capture are the replay's to bring. In a world of
 * one there is no reason to leave s. */
static fsdp_status make_part(fsdp_adamw *opt, const fsdp_adamw_args *args, fsdp_stream *s)
{
    fsdp_model *model = opt->model;
    const bool alone = model->ctx->world == 1;
    fsdp_stream *lane = alone ? s : model->ctx->lanes[FSDP_LANE_GATHER];
    fsdp__need need;
    fsdp__no_need(&need);
    fsdp__need_write(&need, &model->square_edges);
    FSDP_TRY(fsdp__wait_need(lane, &need));
    for (size_t i = model->n_units; i-- > 0;) FSDP_TRY(add_squares(model->units[i], lane));
    fsdp__note_write(&model->square_edges, lane);
    if (model->ctx->capture == NULL) {
        fsdp__no_need(&need);
        fsdp__need_write(&need, &model->part_edges);
        FSDP_TRY(fsdp__wait_need(lane, &need));
        FSDP_TRY(fsdp__step_input(opt, args, model->n_updates + 1, 0, lane));
        fsdp__note_write(&model->part_edges, lane);
    }
    return alone ? FSDP_OK : fsdp__record(lane, FSDP_MARK_NORM_PART, "norm", NULL, NULL);
}

/* On the reduce lane: sum over ranks, decide clip and skip, write device record and report. In a world of one nothing is
 * summed, and there is no reason to leave s. */
static fsdp_status step_result(fsdp_model *model, uint32_t place, fsdp_stream *s)
{
    fsdp_context *ctx = model->ctx;
    fsdp_stream *lane = ctx->world > 1 ? ctx->lanes[FSDP_LANE_REDUCE] : s;
    float *part = (float *)(void *)scratch_at(model, model->plan.part_offset);
    float *total = ctx->world > 1 ? (float *)(void *)scratch_at(model, model->plan.total_offset) : part;
    fsdp__need need;
    fsdp__no_need(&need);
    fsdp__need_write(&need, &model->part_edges);
    fsdp__need_write(&need, &model->square_edges);
    fsdp__need_write(&need, &model->step_edges);
    FSDP_TRY(fsdp__wait_need(lane, &need));
    if (ctx->world > 1) {
        fsdp_collective sum = {.kind = FSDP_OPERATION_ALL_REDUCE,
                               .dtype = FSDP_DTYPE_FP32,
                               .count = FSDP_STEP_FLOATS,
                               .send = part,
                               .recv = total,
                               .label = "norm",
                               .pass = "UPDATE"};
        FSDP_TRY(fsdp__comm_enqueue(ctx->reduce_comm, lane, &sum, 1));
    }
    fsdp_device_op op = {.kind = FSDP_OPERATION_STEP_RESULT};
    op.u.step_result.part = part;
    op.u.step_result.total = total;
    op.u.step_result.step = (fsdp_device_step *)(void *)scratch_at(model, model->plan.step_offset);
    op.u.step_result.input = input_at(model, place);
    op.u.step_result.reports = model->reports, op.u.step_result.n_reports = FSDP_REPORT_RING;
    FSDP_TRY(fsdp__launch(lane, &op, "norm"));
    fsdp__note_write(&model->part_edges, lane);
    fsdp__note_write(&model->square_edges, lane);
    fsdp__note_write(&model->step_edges, lane);
    if (ctx->capture != NULL)
        return ctx->world > 1 ? fsdp__record(lane, FSDP_MARK_NORM_SUM, "norm", NULL, NULL) : FSDP_OK;
    return fsdp__report_record(model, model->n_updates + 1, lane);
}

/* The report owns this event, so that step − 2 can be asked for however many fences have been recorded since. */
fsdp_status fsdp__report_record(fsdp_model *model, uint64_t step, fsdp_stream *s)
{
    uint64_t slot = step % FSDP_REPORT_RING;
    fsdp__fence_forget(&model->ctx->clocks, &model->report_fence[slot]);
    model->report_step[slot] = step;
    return fsdp__record(s, FSDP_MARK_NORM_SUM, "norm", model->report_event[slot], &model->report_fence[slot]);
}

static fsdp_status update_units(fsdp_adamw *opt, fsdp_stream *s)
{
    fsdp_model *model = opt->model;
    fsdp__need need;
    fsdp__no_need(&need);
    fsdp__need_read(&need, &model->step_edges);
    FSDP_TRY(fsdp__wait_need(s, &need));
    for (size_t i = 0; i < model->n_units; i++) {
        fsdp_unit *unit = model->units[i];
        if (!fsdp__unit_trainable(unit)) {
            unit->updated = true; /* nothing is written: what is gathered of it stays current */
            continue;
        }
        for (uint32_t g = 0; g < unit->n_groups; g++) {
            const fsdp__group *group = &unit->groups[g];
            if (group->frozen || group->elems == 0) continue;
            fsdp_device_op op = {.kind = FSDP_OPERATION_ADAMW};
            op.u.adamw.master = group->master, op.u.adamw.gradient = group->gradient, op.u.adamw.m = group->m,
            op.u.adamw.v = group->v;
            op.u.adamw.count = group->shard_elems;
            op.u.adamw.segments = table_of(model, group), op.u.adamw.n_segments = group->n_segments;
            op.u.adamw.step = (const fsdp_device_step *)(const void *)scratch_at(model, model->plan.step_offset);
            op.u.adamw.beta1 = opt->config.beta1, op.u.adamw.beta2 = opt->config.beta2;
            op.u.adamw.eps = opt->config.eps, op.u.adamw.weight_decay = opt->config.weight_decay;
            op.u.adamw.master_dtype = unit->config.master_dtype, op.u.adamw.gradient_dtype = unit->config.reduce_dtype;
            FSDP_TRY(fsdp__launch(s, &op, unit->name));
        }
        FSDP_TRY(fsdp__update_unit(unit, s));
    }
    fsdp__note_read(&model->step_edges, s);
    return FSDP_OK;
}

static fsdp_status step(fsdp_adamw *opt, const fsdp_adamw_args *args, uint32_t place, fsdp_stream *s)
{
    FSDP_TRY(fsdp__update_begin(opt->model, s));
    FSDP_TRY(make_part(opt, args, s));
    FSDP_TRY(step_result(opt->model, place, s));
    FSDP_TRY(update_units(opt, s));
    return fsdp__update_end(opt->model, s);
}

fsdp_status fsdp__adamw_args_read(const char *call, const fsdp_adamw_args *given, fsdp_adamw_args *a)
{
    *a = (fsdp_adamw_args)FSDP_ADAMW_ARGS_INIT;
    FSDP_TRY(fsdp__read_config("fsdp_adamw_args", a, sizeof *a, given, sizeof *a));
    if (!(a->lr >= 0.0f && a->lr < 1e30f))
        return fsdp__fail(FSDP_ERR_ARG, "%s: lr is %g, expected 0 to below 1e30", call, (double)a->lr);
    if (!(a->max_norm >= 0.0f && a->max_norm < 1e30f))
        return fsdp__fail(FSDP_ERR_ARG, "%s: max_norm is %g, expected 0 (no clipping) to below 1e30", call,
                          (double)a->max_norm);
    if (!(a->grad_scale > -1e30 && a->grad_scale < 1e30))
        return fsdp__fail(FSDP_ERR_ARG, "%s: grad_scale is %g, expected between -1e30 and 1e30", call, a->grad_scale);
    return FSDP_OK;
}

fsdp_status fsdp_adamw_step(fsdp_adamw *opt, const fsdp_adamw_args *args, fsdp_stream *stream)
{
    FSDP_NEED(opt);
    FSDP_NEED(args);
    fsdp_model *model = opt->model;
    FSDP_TRY(fsdp__check_update_begin(__func__, model, stream));
    if (!model->update_due)
        return fsdp__fail(FSDP_ERR_STATE,
                          "fsdp_adamw_step: there are no new gradients: run a pass with BACKWARD visits first");
    fsdp_adamw_args a;
    FSDP_TRY(fsdp__adamw_args_read(__func__, args, &a));
    uint32_t place = 0;
    if (model->ctx->capture != NULL) FSDP_TRY(fsdp__capture_step(model, &place));
    fsdp__lock(model->ctx);
    fsdp_status status = step(opt, &a, place, stream);
    fsdp__unlock(model->ctx);
    return fsdp__model_fail(model, status);
}

fsdp_status fsdp_step_sum(fsdp_model *model, uint32_t index, const float *device_value, fsdp_stream *stream)
{
    FSDP_TRY(fsdp__model_check_sealed(__func__, model));
    FSDP_NEED(device_value);
    FSDP_TRY(fsdp__stream_check(__func__, model->ctx, stream));
    if (index >= FSDP_MAX_SUMS)
        return fsdp__fail(FSDP_ERR_ARG, "fsdp_step_sum: index %u, expected 0 to %d", index, FSDP_MAX_SUMS - 1);
    fsdp__lock(model->ctx);
    if (model->ctx->capture != NULL) model->n_changes++; /* it is in it, whatever else is */
    fsdp__need need;
    fsdp__no_need(&need);
    fsdp__need_write(&need, &model->part_edges);
    fsdp_status status = fsdp__wait_need(stream, &need);
    float *part = (float *)(void *)scratch_at(model, model->plan.part_offset);
    fsdp_device_op op = {.kind = FSDP_OPERATION_ADD,
                         .u.add = {part + 1 + index, device_value, 1, FSDP_DTYPE_FP32, FSDP_DTYPE_FP32}};
    if (status == FSDP_OK) status = fsdp__launch(stream, &op, "sums");
    if (status == FSDP_OK) fsdp__note_write(&model->part_edges, stream);
    fsdp__unlock(model->ctx);
    return fsdp__model_fail(model, status);
}

fsdp_status fsdp_step_report_get(fsdp_model *model, uint64_t step, uint64_t timeout_ns, fsdp_step_report *out_report)
{
    FSDP_TRY(fsdp__model_check_sealed(__func__, model));
    FSDP_NEED(out_report);
    FSDP_TRY(fsdp__capture_off(__func__, model->ctx));
    uint64_t slot = step % FSDP_REPORT_RING;
    if (step == 0 || model->report_step[slot] != step)
        return fsdp__fail(
            FSDP_ERR_ARG,
            "fsdp_step_report_get: there is no report of step %llu: %llu updates so far; the last %d are kept, "
            "if fsdp_adamw_step made them",
            (unsigned long long)step, (unsigned long long)model->n_updates, FSDP_REPORT_RING);
    fsdp__lock(model->ctx);
    fsdp_status status = fsdp__device_event_wait_host(model->ctx, model->report_event[slot], timeout_ns);
    fsdp__unlock(model->ctx);
    /* An event also happens when its stream has failed: then nothing was written. */
    FSDP_TRY(fsdp__context_late(model->ctx, status, timeout_ns,
                                "fsdp_step_report_get: step %llu of model %.80s is not done", (unsigned long long)step,
                                model->name));
    FSDP_TRY(fsdp__check_order(model));
    const fsdp_report_record *r = &model->reports[slot];
    fsdp_step_report report = {sizeof report, r->step,      r->updates,    r->skipped != 0,
                               r->lr,         r->grad_norm, r->clip_scale, {0.0f}};
    memcpy(report.sums, r->sums, sizeof report.sums);
    return fsdp__write_result("fsdp_step_report", out_report, &report, sizeof report, sizeof report);
}
