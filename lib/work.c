/* SPDX-License-Identifier: MIT */
/* The handle of one enqueued collective: [Note: Four completions] in docs/streams.md. */
#include "check.h"
#include "comm.h"
#include "context.h"
#include "device.h"
#include "graph.h"
#include "hostmem.h"
#include "stream.h"

struct fsdp_work {
    fsdp_context *ctx;
    void *event;       /* this work's own, until release */
    fsdp__fence fence; /* of its record */
};

fsdp_status fsdp__work_create(fsdp_context *ctx, fsdp_work **out_work)
{
    fsdp_work *work = fsdp__host_alloc(&ctx->host, 1, sizeof *work);
    if (work == NULL) return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "a work: no host memory for %zu bytes", sizeof *work);
    work->ctx = ctx;
    fsdp_status status = fsdp__device_event_create(ctx, &work->event);
    if (status != FSDP_OK) {
        fsdp__host_free(&ctx->host, work, 1, sizeof *work);
        return status;
    }
    ctx->n_live[FSDP__CHILD_WORK]++;
    *out_work = work;
    return FSDP_OK;
}

fsdp_status fsdp__work_record(fsdp_work *work, fsdp_stream *s)
{
    return fsdp__record(s, FSDP_MARK_CALLER, s->name, work->event, &work->fence);
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
    FSDP_TRY(fsdp__capture_off(__func__, work->ctx));
    FSDP_TRY(fsdp__capture_no_moment(__func__, &work->fence));
    return work->ctx->backend->device->event_query(work->ctx->dev, work->event, out_done);
}

fsdp_status fsdp_work_wait_host(fsdp_work *work, uint64_t timeout_ns)
{
    FSDP_NEED(work);
    FSDP_TRY(fsdp__capture_off(__func__, work->ctx));
    FSDP_TRY(fsdp__capture_no_moment(__func__, &work->fence));
    fsdp__lock(work->ctx);
    fsdp_status status = fsdp__device_event_wait_host(work->ctx, work->event, timeout_ns);
    if (status == FSDP_OK) fsdp__host_passed(work->ctx, &work->fence);
    fsdp__unlock(work->ctx);
    return fsdp__context_late(work->ctx, status, timeout_ns, "fsdp_work_wait_host: the work is not done");
}

void fsdp_work_release(fsdp_work *work)
{
    if (work == NULL) return;
    fsdp_context *ctx = work->ctx;
    fsdp__lock(ctx);
    fsdp__fence_forget(&ctx->clocks, &work->fence);
    fsdp__device_event_destroy(ctx, work->event);
    ctx->n_live[FSDP__CHILD_WORK]--;
    fsdp__unlock(ctx);
    fsdp__host_free(&ctx->host, work, 1, sizeof *work);
}
