/* SPDX-License-Identifier: MIT */
/* The handle of one enqueued collective: [Note: Four completions] in docs/streams.md. */
#include "check.h"
#include "comm.h"
#include "context.h"
#include "device.h"
#include "hostmem.h"
#include "stream.h"

struct fsdp_work {
    fsdp_context *ctx;
    fsdp__fence fence; /* fence.event is this work's own, until release */
};

fsdp_status fsdp__work_create(fsdp_stream *s, fsdp_work **out_work)
{
    fsdp_context *ctx = s->ctx;
    fsdp_work *work = fsdp__host_alloc(&ctx->host, 1, sizeof *work);
    if (work == NULL) return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "a work on stream %s: no host memory", s->name);
    work->ctx = ctx;
    void *event = NULL;
    fsdp_status status = fsdp__device_event_create(ctx, &event);
    if (status == FSDP_OK) status = fsdp__record(s, FSDP_MARK_CALLER, s->name, event, &work->fence);
    if (status != FSDP_OK) {
        fsdp__device_event_destroy(ctx, event);
        fsdp__host_free(&ctx->host, work, 1, sizeof *work);
        return status;
    }
    ctx->n_children++;
    *out_work = work;
    return FSDP_OK;
}

fsdp_status fsdp_work_wait(fsdp_work *work, fsdp_stream *stream)
{
    FSDP_NEED(work);
    FSDP_TRY(fsdp__stream_check(__func__, work->ctx, stream));
    fsdp__lock(work->ctx);
    fsdp_status status = fsdp__wait_fence(stream, &work->fence, FSDP_REASON_CALLER);
    fsdp__unlock(work->ctx);
    return status;
}

fsdp_status fsdp_work_is_done(fsdp_work *work, bool *out_done)
{
    FSDP_NEED(work);
    FSDP_NEED(out_done);
    FSDP_TRY(fsdp__context_check(work->ctx));
    return work->ctx->backend->device->event_query(work->ctx->dev, work->fence.event, out_done);
}

fsdp_status fsdp_work_wait_host(fsdp_work *work, uint64_t timeout_ns)
{
    FSDP_NEED(work);
    fsdp__lock(work->ctx);
    fsdp_status status = fsdp__device_event_wait_host(work->ctx, work->fence.event, timeout_ns);
    fsdp__unlock(work->ctx);
    return status != FSDP_OK ? status : fsdp__context_check(work->ctx);
}

void fsdp_work_release(fsdp_work *work)
{
    if (work == NULL) return;
    fsdp_context *ctx = work->ctx;
    fsdp__lock(ctx);
    fsdp__fence_forget(&ctx->clocks, &work->fence);
    fsdp__device_event_destroy(ctx, work->fence.event);
    ctx->n_children--;
    fsdp__unlock(ctx);
    fsdp__host_free(&ctx->host, work, 1, sizeof *work);
}
