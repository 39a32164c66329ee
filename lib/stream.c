/* SPDX-License-Identifier: MIT */
/* Streams and events of include/fsdp/device.h. */
#include "stream.h"

#include <stdio.h>
#include <string.h>

#include "alloc.h"
#include "check.h"
#include "context.h"
#include "device.h"
#include "graph.h"
#include "hostmem.h"
#include "mutate.h"

static void destroy_events(fsdp_stream *s)
{
    for (int i = 0; i < FSDP__FENCES; i++) fsdp__device_event_destroy(s->ctx, s->event[i]);
}

static fsdp_status create_events(fsdp_stream *s)
{
    for (int i = 0; i < FSDP__FENCES; i++) {
        fsdp_status status = fsdp__device_event_create(s->ctx, &s->event[i]);
        if (status != FSDP_OK) {
            destroy_events(s);
            return status;
        }
    }
    return FSDP_OK;
}

static int free_slot(const fsdp__clocks *clocks)
{
    for (int t = 0; t < FSDP__SLOTS; t++)
        if (clocks->stream[t] == NULL) return t;
    return -1;
}

/* A slot, the events, and native or, for NULL, a stream of the library's own. */
static fsdp_status open_stream(fsdp_context *ctx, const char *name, bool lane, void *native, fsdp_stream **out_stream)
{
    fsdp__clocks *clocks = &ctx->clocks;
    FSDP_TRY(fsdp__capture_off("making a stream", ctx));
    int slot = free_slot(clocks);
    if (slot < 0)
        return fsdp__fail(FSDP_ERR_STATE, "stream %s: all %d streams of this context are in use: release one first",
                          name, FSDP__SLOTS);
    fsdp_stream *s = fsdp__host_alloc(&ctx->host, 1, sizeof *s);
    if (s == NULL)
        return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "stream %s: no host memory for %zu bytes", name, sizeof *s);
    s->ctx = ctx;
    s->slot = slot;
    s->lane = lane;
    snprintf(s->name, sizeof s->name, "%s", name);
    s->native = native;
    fsdp_status status = FSDP_OK;
    if (native == NULL) status = ctx->backend->device->stream_create(ctx->dev, s->name, lane, &s->native);
    if (status != FSDP_OK) goto free_stream;
    status = create_events(s);
    if (status != FSDP_OK) goto destroy_native;

    uint64_t open_epoch = clocks->now[slot].at[slot];
    if (open_epoch == 0 || FSDP__MUTATED(SLOT_FORGETS)) open_epoch = clocks->now[slot].at[slot] = 1;
    s->n_fences = s->first_fence = open_epoch - 1;
    clocks->stream[slot] = s;
    if (slot >= clocks->n_slots) clocks->n_slots = slot + 1;
    /* What a replay has touched is in nobody's edges, and may be running. */
    if (clocks->gate_epoch != 0 && !FSDP__MUTATED(NEW_STREAM_TOO_EARLY)) status = fsdp__pass_gate_now(s);
    if (status != FSDP_OK) goto leave_slot;
    *out_stream = s;
    return FSDP_OK;

leave_slot:
    clocks->stream[slot] = NULL;
    destroy_events(s);
destroy_native:
    if (native == NULL) ctx->backend->device->stream_destroy(ctx->dev, s->native);
free_stream:
    fsdp__host_free(&ctx->host, s, 1, sizeof *s);
    return status;
}

fsdp_status fsdp__stream_open(fsdp_context *ctx, const char *name, bool lane, fsdp_stream **out_stream)
{
    return open_stream(ctx, name, lane, NULL, out_stream);
}

fsdp_status fsdp__stream_adopt(fsdp_context *ctx, const char *name, void *native, fsdp_stream **out_stream)
{
    assert(native != NULL);
    return open_stream(ctx, name, false, native, out_stream);
}

void fsdp__stream_close(fsdp_stream *s)
{
    fsdp_context *ctx = s->ctx;
    fsdp__clocks *clocks = &ctx->clocks;
    ctx->backend->device->stream_destroy(ctx->dev, s->native);
    destroy_events(s);
    /* It is idle, so all that it ran comes before whatever anybody is given from now on. */
    uint64_t open_epoch = fsdp__epoch(s);
    for (int t = 0; t < FSDP__SLOTS; t++) clocks->now[t].at[s->slot] = open_epoch, clocks->n_raised[t]++;
    clocks->now[s->slot].at[s->slot] = open_epoch + 1;
    clocks->stream[s->slot] = NULL;
    if (s->slot == clocks->gate_slot) clocks->gate_epoch = clocks->behind = 0; /* passed, by everybody */
    clocks->behind &= ~(1u << s->slot);
    for (fsdp_allocator *a = ctx->pools; a != NULL; a = a->next_pool) fsdp__allocator_settle_slot(a, s->slot);
    fsdp__host_free(&ctx->host, s, 1, sizeof *s);
}

fsdp_status fsdp__stream_belongs(const char *call, const fsdp_context *ctx, const fsdp_stream *s)
{
    if (s == NULL) return fsdp__fail(FSDP_ERR_ARG, "%s: stream is NULL", call);
    if (s->ctx != ctx) return fsdp__fail(FSDP_ERR_ARG, "%s: stream %s belongs to another context", call, s->name);
    return FSDP_OK;
}

fsdp_status fsdp__stream_check(const char *call, const fsdp_context *ctx, const fsdp_stream *s)
{
    FSDP_TRY(fsdp__stream_belongs(call, ctx == NULL && s != NULL ? s->ctx : ctx, s));
    return fsdp__context_check(s->ctx);
}

fsdp_status fsdp__step_stream_check(const char *call, const fsdp_context *ctx, const fsdp_stream *s)
{
    FSDP_TRY(fsdp__stream_check(call, ctx, s));
    if (s->lane)
        return fsdp__fail(FSDP_ERR_ARG, "%s: %s is a lane of the library: give it a stream of your own", call, s->name);
    bool (*const is_capturing)(void *stream) = ctx->backend->device->stream_is_capturing;
    if (ctx->capture == NULL && is_capturing != NULL && is_capturing(s->native))
        return fsdp__fail(FSDP_ERR_STATE,
                          "%s: stream %s is being captured, and the library was not told: call fsdp_capture_begin "
                          "before the capture begins",
                          call, s->name);
    return FSDP_OK;
}

fsdp_status fsdp_stream_create(fsdp_context *ctx, const char *name, fsdp_stream **out_stream)
{
    FSDP_NEED(ctx);
    FSDP_NEED(name);
    FSDP_NEED(out_stream);
    FSDP_TRY(fsdp__context_check(ctx));
    fsdp__lock(ctx);
    fsdp_status status = fsdp__stream_open(ctx, name, false, out_stream);
    if (status == FSDP_OK) ctx->n_live[FSDP__CHILD_STREAM]++;
    fsdp__unlock(ctx);
    return status;
}

/* With the lock held, but not while it waits. A fence, to know afterwards what has been waited for: other threads may give
 * the stream more meanwhile. Without memory for one the stream is drained all the same, and the clocks learn nothing. */
static fsdp_status drain(fsdp_stream *s, uint64_t timeout_ns)
{
    fsdp__fence fence = {.epoch = 0};
    if (s->late_drain > 0 && s->late_drain == s->n_fences) fence = s->ring[(s->n_fences - 1) % FSDP__FENCES].fence;
    else if (fsdp__context_check(s->ctx) == FSDP_OK)
        FSDP_IGNORE(fsdp__record(s, FSDP_MARK_CALLER, s->name, NULL, &fence));
    fsdp_status status = fsdp__device_drain_host(s, timeout_ns);
    s->late_drain = status == FSDP_ERR_TIMEOUT && fence.epoch == s->n_fences ? fence.epoch : 0;
    if (status == FSDP_OK) fsdp__host_passed(s->ctx, &fence);
    return status;
}

fsdp_status fsdp_stream_release(fsdp_stream *stream)
{
    if (stream == NULL) return FSDP_OK;
    fsdp_context *ctx = stream->ctx;
    if (stream->lane)
        return fsdp__fail(FSDP_ERR_STATE, "fsdp_stream_release: %s is a lane of the library", stream->name);
    FSDP_TRY(fsdp__capture_off(__func__, ctx));
    if (stream->n_open > 0)
        return fsdp__fail(
            FSDP_ERR_STATE, "fsdp_stream_release: %u unit%s open on stream %s: end %s, or fsdp_pass_abort",
            stream->n_open, stream->n_open == 1 ? " is" : "s are", stream->name, stream->n_open == 1 ? "it" : "them");
    fsdp__lock(ctx);
    /* Others go on meanwhile; what stopped it is the context's to say. One that cannot be waited for now is not idle. */
    fsdp_status status = fsdp__device_drain_host(stream, UINT64_MAX);
    while (stream->n_drains > 0) pthread_cond_wait(&ctx->drained, &ctx->lock);
    if (status != FSDP_ERR_STATE) {
        fsdp__stream_close(stream);
        ctx->n_live[FSDP__CHILD_STREAM]--;
        status = FSDP_OK;
    }
    fsdp__unlock(ctx);
    return status;
}

fsdp_stream *fsdp_context_lane(fsdp_context *ctx, fsdp_lane lane)
{
    return ctx != NULL && lane >= FSDP_LANE_GATHER && lane <= FSDP_LANE_COPY ? ctx->lanes[lane] : NULL;
}

static fsdp_status launch_caller(const char *call, fsdp_stream *s, const fsdp_device_op *op)
{
    FSDP_TRY(fsdp__stream_check(call, NULL, s));
    fsdp__lock(s->ctx);
    fsdp_status status = fsdp__launch(s, op, "");
    fsdp__unlock(s->ctx);
    return status == FSDP_OK ? status : fsdp__context_explain(s->ctx, status);
}

fsdp_status fsdp_stream_host_call(fsdp_stream *stream, fsdp_host_fn fn, void *arg)
{
    FSDP_NEED(fn);
    fsdp_device_op op = {.kind = FSDP_OPERATION_HOST_CALL, .u.host_call = {fn, arg}};
    return launch_caller(__func__, stream, &op);
}

fsdp_status fsdp_stream_delay(fsdp_stream *stream, uint64_t ns)
{
    fsdp_device_op op = {.kind = FSDP_OPERATION_DELAY, .u.delay = {ns}};
    return launch_caller(__func__, stream, &op);
}

fsdp_status fsdp_stream_copy(fsdp_stream *stream, void *dst, const void *src, uint64_t bytes)
{
    FSDP_NEED(dst);
    FSDP_NEED(src);
    uint64_t to = (uint64_t)(uintptr_t)dst, from = (uint64_t)(uintptr_t)src;
    if (to <= from ? from - to < bytes : to - from < bytes)
        return fsdp__fail(FSDP_ERR_ARG, "fsdp_stream_copy: dst (%p) and src (%p), %llu bytes each, overlap", dst, src,
                          (unsigned long long)bytes);
    fsdp_device_op op = {.kind = FSDP_OPERATION_COPY, .u.copy = {dst, src, bytes}};
    return launch_caller(__func__, stream, &op);
}

fsdp_status fsdp_stream_fill(fsdp_stream *stream, void *dst, uint8_t byte, uint64_t bytes)
{
    FSDP_NEED(dst);
    fsdp_device_op op = {.kind = FSDP_OPERATION_FILL, .u.fill = {dst, bytes, byte}};
    return launch_caller(__func__, stream, &op);
}

fsdp_status fsdp_stream_wait_stream(fsdp_stream *stream, fsdp_stream *other)
{
    FSDP_TRY(fsdp__stream_check(__func__, NULL, stream));
    FSDP_TRY(fsdp__stream_check(__func__, stream->ctx, other));
    if (stream == other) return FSDP_OK;
    fsdp__lock(stream->ctx);
    /* Work that other was given since its last fence is in its open epoch: only a new fence covers it. */
    fsdp__fence fence;
    fsdp_status status = fsdp__record(other, FSDP_MARK_CALLER, other->name, NULL, &fence);
    if (status == FSDP_OK) status = fsdp__wait_fence(stream, &fence, FSDP_REASON_CALLER);
    fsdp__unlock(stream->ctx);
    return status;
}

fsdp_status fsdp_stream_drain_host(fsdp_stream *stream, uint64_t timeout_ns)
{
    FSDP_NEED(stream);
    fsdp_context *ctx = stream->ctx;
    FSDP_TRY(fsdp__capture_off(__func__, ctx));
    fsdp__lock(ctx);
    fsdp_status status = drain(stream, timeout_ns);
    fsdp__unlock(ctx);
    return fsdp__context_explain(ctx, status);
}

struct fsdp_event {
    fsdp_context *ctx;
    void *native;
    fsdp__fence fence; /* of its last record; epoch 0: none yet */
};

fsdp_status fsdp_event_create(fsdp_context *ctx, fsdp_event **out_event)
{
    FSDP_NEED(ctx);
    FSDP_NEED(out_event);
    FSDP_TRY(fsdp__context_check(ctx));
    fsdp_event *event = fsdp__host_alloc(&ctx->host, 1, sizeof *event);
    if (event == NULL) return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "fsdp_event_create: no host memory");
    event->ctx = ctx;
    fsdp__lock(ctx);
    fsdp_status status = fsdp__device_event_create(ctx, &event->native);
    if (status == FSDP_OK) ctx->n_live[FSDP__CHILD_EVENT]++;
    fsdp__unlock(ctx);
    if (status != FSDP_OK) {
        fsdp__host_free(&ctx->host, event, 1, sizeof *event);
        return status;
    }
    *out_event = event;
    return FSDP_OK;
}

void fsdp_event_destroy(fsdp_event *event)
{
    if (event == NULL) return;
    fsdp_context *ctx = event->ctx;
    fsdp__lock(ctx);
    fsdp__fence_forget(&ctx->clocks, &event->fence);
    fsdp__device_event_destroy(ctx, event->native);
    ctx->n_live[FSDP__CHILD_EVENT]--;
    fsdp__unlock(ctx);
    fsdp__host_free(&ctx->host, event, 1, sizeof *event);
}

fsdp_status fsdp_event_record(fsdp_event *event, fsdp_stream *stream)
{
    FSDP_NEED(event);
    FSDP_TRY(fsdp__stream_check(__func__, event->ctx, stream));
    fsdp__lock(event->ctx);
    fsdp__fence_forget(&event->ctx->clocks, &event->fence);
    fsdp_status status = fsdp__record(stream, FSDP_MARK_CALLER, stream->name, event->native, &event->fence);
    fsdp__unlock(event->ctx);
    return status;
}

fsdp_status fsdp_stream_wait_event(fsdp_stream *stream, fsdp_event *event)
{
    FSDP_NEED(event);
    FSDP_TRY(fsdp__stream_check(__func__, event->ctx, stream));
    if (event->fence.epoch == 0) return FSDP_OK;
    fsdp__lock(event->ctx);
    fsdp_status status = fsdp__wait_fence(stream, &event->fence, FSDP_REASON_CALLER);
    fsdp__unlock(event->ctx);
    return status;
}

fsdp_status fsdp_event_is_done(fsdp_event *event, bool *out_done)
{
    FSDP_NEED(event);
    FSDP_NEED(out_done);
    FSDP_TRY(fsdp__context_check(event->ctx));
    FSDP_TRY(fsdp__capture_off(__func__, event->ctx));
    FSDP_TRY(fsdp__capture_no_moment(__func__, &event->fence));
    return event->ctx->backend->device->event_query(event->ctx->dev, event->native, out_done);
}

fsdp_status fsdp_event_wait_host(fsdp_event *event, uint64_t timeout_ns)
{
    FSDP_NEED(event);
    FSDP_TRY(fsdp__capture_off(__func__, event->ctx));
    FSDP_TRY(fsdp__capture_no_moment(__func__, &event->fence));
    fsdp__lock(event->ctx);
    fsdp__fence fence = event->fence;
    fsdp_status status = fsdp__device_event_wait_host(event->ctx, event->native, timeout_ns);
    bool same = fence.epoch == event->fence.epoch && fence.slot == event->fence.slot; /* else: whose record was it? */
    if (status == FSDP_OK && same) fsdp__host_passed(event->ctx, &fence);
    fsdp__unlock(event->ctx);
    return fsdp__context_late(event->ctx, status, timeout_ns, "fsdp_event_wait_host: the event has not happened");
}
