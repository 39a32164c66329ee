/* SPDX-License-Identifier: MIT */
/* A micro-step without data, so that other ranks may have one more. It goes through the hooks themselves: what they gather and
 * reduce, keep and give back, in which order, cannot differ from what a rank with data does. */
#include "fsdp/step.h"

#include "lib/check.h"
#include "lib/device.h"
#include "sharding/model.h"

/* Zeros over gradients that were handed out as they lay. */
static fsdp_status zero_grads(const fsdp_unit *unit, const fsdp_view *view, fsdp_stream *s)
{
    if (unit->grad_begin == 0 || view->grads_zeroed) return FSDP_OK;
    fsdp_device_op op = {.kind = FSDP_OPERATION_FILL,
                         .u.fill = {(void *)(uintptr_t)unit->grad_begin, unit->grad_bytes, 0}};
    fsdp__lock(s->ctx);
    fsdp_status status = fsdp__launch(s, &op, unit->name);
    fsdp__unlock(s->ctx);
    return status;
}

static fsdp_status begin_visit(const fsdp_visit *visit, fsdp_stream *s)
{
    fsdp_view view = FSDP_VIEW_INIT;
    if (visit->use != FSDP_USE_BACKWARD) return fsdp_forward_begin(visit->unit, s, &view);
    FSDP_TRY(fsdp_backward_begin(visit->unit, s, &view));
    return zero_grads(visit->unit, &view, s);
}

static fsdp_status end_visit(const fsdp_visit *visit, fsdp_stream *s)
{
    return visit->use == FSDP_USE_BACKWARD ? fsdp_backward_end(visit->unit, s) : fsdp_forward_end(visit->unit, s);
}

static fsdp_status visit_all(const fsdp__pass *pass, fsdp_stream *s)
{
    uint32_t n_closed = 0;
    for (uint32_t i = 0; i < pass->n; i++) {
        FSDP_TRY(begin_visit(&pass->given[i], s));
        for (; n_closed < pass->n && pass->visits[pass->closing[n_closed]].until == i; n_closed++)
            FSDP_TRY(end_visit(&pass->given[pass->closing[n_closed]], s));
    }
    return FSDP_OK;
}

fsdp_status fsdp_pass_idle(fsdp_model *model, const fsdp_pass_args *args, fsdp_stream *stream)
{
    FSDP_TRY(fsdp_pass_begin(model, args, stream));
    fsdp_status status = visit_all(model->pass, stream);
    if (status == FSDP_OK) status = fsdp_pass_end(model, stream);
    /* Some of the windows have been, and others have not: nobody but pass_abort knows how to go on from there. */
    return fsdp__model_fail(model, status);
}
