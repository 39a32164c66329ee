/* SPDX-License-Identifier: MIT */
#include "device.h"

#include <string.h>

#include "check.h"
#include "context.h"
#include "trace.h"

uint64_t fsdp__device_round(const fsdp_device_caps *caps, uint64_t bytes)
{
    uint64_t raised;
    if (__builtin_add_overflow(bytes, caps->granularity - 1, &raised)) return 0;
    return raised - raised % caps->granularity;
}

fsdp_status fsdp__device_alloc(fsdp_context *ctx, uint64_t bytes, fsdp_memory_kind kind, void **out_ptr)
{
    if (bytes == 0) {
        *out_ptr = NULL;
        return FSDP_OK;
    }
    FSDP_TRY(ctx->backend->device->mem_alloc(ctx->dev, bytes, kind, out_ptr));
    fsdp_counters *c = &ctx->counters;
    c->allocations++;
    if (kind == FSDP_MEMORY_KIND_PINNED) {
        c->pinned_bytes += bytes;
        return FSDP_OK;
    }
    c->device_bytes += bytes;
    if (c->device_bytes > c->device_bytes_peak) c->device_bytes_peak = c->device_bytes;
    return FSDP_OK;
}

void fsdp__device_free(fsdp_context *ctx, void *ptr, uint64_t bytes, fsdp_memory_kind kind)
{
    if (ptr == NULL) return;
    ctx->backend->device->mem_free(ctx->dev, ptr, bytes, kind);
    ctx->n_device_frees++;
    *(kind == FSDP_MEMORY_KIND_PINNED ? &ctx->counters.pinned_bytes : &ctx->counters.device_bytes) -= bytes;
}

fsdp_status fsdp__device_take_region(fsdp_context *ctx, uint64_t bytes, void **out_ptr)
{
    FSDP_TRY(ctx->backend->device->mem_alloc(ctx->dev, bytes, FSDP_MEMORY_KIND_PINNED, out_ptr));
    fsdp__lock(ctx);
    ctx->counters.allocations++;
    ctx->counters.pinned_bytes += bytes;
    fsdp__unlock(ctx);
    return FSDP_OK;
}

void fsdp__device_give_region(fsdp_context *ctx, void *ptr, uint64_t bytes)
{
    ctx->backend->device->mem_free(ctx->dev, ptr, bytes, FSDP_MEMORY_KIND_PINNED);
    fsdp__lock(ctx);
    ctx->counters.pinned_bytes -= bytes;
    fsdp__unlock(ctx);
}

fsdp_status fsdp__device_event_create(fsdp_context *ctx, void **out_event)
{
    FSDP_TRY(ctx->backend->device->event_create(ctx->dev, out_event));
    ctx->counters.events_created++;
    return FSDP_OK;
}

void fsdp__device_event_destroy(fsdp_context *ctx, void *event)
{
    if (event != NULL) ctx->backend->device->event_destroy(ctx->dev, event);
}

static fsdp_trace_record new_record(const fsdp_stream *s, fsdp_record_kind kind, const char *label)
{
    return (fsdp_trace_record){.kind = kind,
                               .stream = s->slot,
                               .other = -1,
                               .label = label != NULL ? label : "",
                               .enqueued_ns = s->ctx->backend->device->now_ns(s->ctx->dev)};
}

/* What the device had no memory for has not happened: off the tape and the count again. (Any other error is its last.) */
static inline fsdp_status taken(fsdp_context *ctx, fsdp_status status, const fsdp_span *span, uint64_t *counter)
{
    if (status != FSDP_ERR_NO_HOST_MEMORY) return status;
    --*counter;
    if (ctx->trace != NULL) fsdp__trace_take_back(ctx->trace, span);
    return status;
}

fsdp_status fsdp__device_record(fsdp_stream *s, const fsdp__fence *fence)
{
    fsdp_context *ctx = s->ctx;
    fsdp_span *span = NULL;
    if (ctx->trace != NULL) {
        fsdp_trace_record record = new_record(s, FSDP_RECORD_EVENT, fence->label);
        record.mark = (fsdp_mark)fence->mark;
        record.event = (uint64_t)(uintptr_t)fence->event;
        span = fsdp__trace_add(ctx->trace, &record);
    }
    ctx->counters.records++;
    return taken(ctx, ctx->backend->device->event_record(ctx->dev, fence->event, s->native, span), span,
                 &ctx->counters.records);
}

fsdp_status fsdp__device_wait(fsdp_stream *s, const fsdp__fence *fence, fsdp_reason reason)
{
    fsdp_context *ctx = s->ctx;
    fsdp_span *span = NULL;
    if (ctx->trace != NULL) {
        fsdp_trace_record record = new_record(s, FSDP_RECORD_WAIT, fence->label);
        record.mark = (fsdp_mark)fence->mark;
        record.reason = reason;
        record.other = fence->slot;
        record.event = (uint64_t)(uintptr_t)fence->event;
        span = fsdp__trace_add(ctx->trace, &record);
    }
    ctx->counters.waits++;
    return taken(ctx, ctx->backend->device->stream_wait(ctx->dev, s->native, fence->event, span), span,
                 &ctx->counters.waits);
}

fsdp_status fsdp__device_event_wait_host(fsdp_context *ctx, void *event, uint64_t timeout_ns)
{
    ctx->counters.host_waits++;
    fsdp__unlock(ctx);
    fsdp_status status = ctx->backend->device->event_wait(ctx->dev, event, timeout_ns);
    fsdp__lock(ctx);
    return status;
}

fsdp_status fsdp__device_drain_host(fsdp_stream *s, uint64_t timeout_ns)
{
    fsdp_context *ctx = s->ctx;
    ctx->counters.host_waits++;
    s->n_drains++;
    fsdp__unlock(ctx);
    fsdp_status status = ctx->backend->device->stream_drain(ctx->dev, s->native, timeout_ns);
    fsdp__lock(ctx);
    if (--s->n_drains == 0) pthread_cond_broadcast(&ctx->drained);
    return status;
}

static void add_access(fsdp_trace_record *record, const void *begin, uint64_t bytes, bool write)
{
    if (begin == NULL || bytes == 0) return;
    assert(record->n_accesses < FSDP_TRACE_MAX_ACCESSES);
    record->access[record->n_accesses++] = (fsdp_trace_access){(uint64_t)(uintptr_t)begin, bytes, write};
    record->bytes += bytes;
}

/* What an operation touches, from its own arguments: nobody else has to say it, so nobody can say it wrong. Segment tables
 * are left out: they are written once, before anything runs. */
static void add_accesses(fsdp_trace_record *r, const fsdp_device_op *op)
{
    switch (op->kind) {
    case FSDP_OPERATION_COPY:
        add_access(r, op->u.copy.src, op->u.copy.bytes, false);
        add_access(r, op->u.copy.dst, op->u.copy.bytes, true);
        break;
    case FSDP_OPERATION_FILL: add_access(r, op->u.fill.dst, op->u.fill.bytes, true); break;
    case FSDP_OPERATION_CAST:
        add_access(r, op->u.cast.src, op->u.cast.count * fsdp_dtype_bytes(op->u.cast.src_dtype), false);
        add_access(r, op->u.cast.dst, op->u.cast.count * fsdp_dtype_bytes(op->u.cast.dst_dtype), true);
        break;
    case FSDP_OPERATION_ADD:
        add_access(r, op->u.add.src, op->u.add.count * fsdp_dtype_bytes(op->u.add.src_dtype), false);
        add_access(r, op->u.add.dst, op->u.add.count * fsdp_dtype_bytes(op->u.add.dst_dtype), true);
        break;
    case FSDP_OPERATION_SQUARE_SUM:
        add_access(r, op->u.square_sum.x, op->u.square_sum.count * fsdp_dtype_bytes(op->u.square_sum.dtype), false);
        add_access(r, op->u.square_sum.out, sizeof(float), true);
        break;
    case FSDP_OPERATION_STEP_INPUT:
        add_access(r, op->u.step_input.part + FSDP_STEP_ORDER, (FSDP_STEP_FLOATS - FSDP_STEP_ORDER) * sizeof(float),
                   true);
        add_access(r, op->u.step_input.to, sizeof(fsdp_step_input), true);
        break;
    case FSDP_OPERATION_STEP_RESULT:
        add_access(r, op->u.step_result.total, FSDP_STEP_FLOATS * sizeof(float), false);
        add_access(r, op->u.step_result.part, FSDP_STEP_ORDER * sizeof(float), true);
        add_access(r, op->u.step_result.step, sizeof(fsdp_device_step), true);
        add_access(r, op->u.step_result.input, sizeof(fsdp_step_input), false);
        add_access(r, op->u.step_result.reports, op->u.step_result.n_reports * sizeof(fsdp_report_record), true);
        break;
    case FSDP_OPERATION_ADAMW:
        add_access(r, op->u.adamw.gradient, op->u.adamw.count * fsdp_dtype_bytes(op->u.adamw.gradient_dtype), false);
        add_access(r, op->u.adamw.step, sizeof(fsdp_device_step), false);
        add_access(r, op->u.adamw.master, op->u.adamw.count * fsdp_dtype_bytes(op->u.adamw.master_dtype), true);
        add_access(r, op->u.adamw.m, op->u.adamw.count * sizeof(float), true);
        add_access(r, op->u.adamw.v, op->u.adamw.count * sizeof(float), true);
        break;
    case FSDP_OPERATION_HOST_CALL:
    case FSDP_OPERATION_DELAY:
    case FSDP_OPERATION_CAPTURE:
    case FSDP_OPERATION_REPLAY:
    case FSDP_OPERATION_ALL_GATHER:
    case FSDP_OPERATION_REDUCE_SCATTER:
    case FSDP_OPERATION_ALL_REDUCE:
    case FSDP_OPERATION_BROADCAST:
    case FSDP_OPERATION_BARRIER: break;
    }
}

fsdp_status fsdp__launch(fsdp_stream *s, const fsdp_device_op *op, const char *label)
{
    fsdp_context *ctx = s->ctx;
    FSDP_TRY(fsdp__pass_gate(s));
    fsdp_span *span = NULL;
    if (ctx->trace != NULL) {
        fsdp_trace_record record = new_record(s, FSDP_RECORD_OPERATION, label);
        record.operation = op->kind;
        add_accesses(&record, op);
        span = fsdp__trace_add(ctx->trace, &record);
    }
    ctx->counters.operations++;
    return taken(ctx, ctx->backend->device->launch(ctx->dev, s->native, op, span), span, &ctx->counters.operations);
}

void fsdp__note_host(fsdp_context *ctx, const fsdp__fence *fence)
{
    if (ctx->trace == NULL) return;
    fsdp_trace_record record = {.kind = FSDP_RECORD_HOST,
                                .stream = fence->slot,
                                .other = -1,
                                .mark = (fsdp_mark)fence->mark,
                                .event = (uint64_t)(uintptr_t)fence->event,
                                .enqueued_ns = ctx->backend->device->now_ns(ctx->dev),
                                .label = ""}; /* the fence's own may have gone with its stream */
    fsdp__trace_add(ctx->trace, &record);
}

void fsdp__note_use(fsdp_stream *s, const char *label, const fsdp_trace_access *access, uint32_t n)
{
    if (s->ctx->trace == NULL) return;
    /* What kernels are between is two records with times. Without this one they are not drawn, and a device that is broken is
     * told of by the next call. */
    if (s->ctx->capture == NULL && fsdp__trace_wants_time(s->ctx->trace, s->slot))
        FSDP_IGNORE(fsdp__record(s, FSDP_MARK_CALLER, s->name, NULL, NULL));
    fsdp_trace_record record = new_record(s, FSDP_RECORD_USE, label);
    assert(n <= FSDP_TRACE_MAX_ACCESSES);
    memcpy(record.access, access, n * sizeof *access);
    record.n_accesses = n;
    fsdp__trace_add(s->ctx->trace, &record);
}
