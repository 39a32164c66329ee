/* SPDX-License-Identifier: MIT */
/* Operations on a stream, and what stands around each: jitter, the trace's times, FSDP_DEBUG_SYNC. */
#include "cuda_backend.h"
#include "hash.h"

/* A function of (seed, rank, stream, operation) alone, so that a schedule that fails can be run again. */
static __attribute__((cold)) fsdp_status jitter(fsdp__cuda_stream *s)
{
    const fsdp__cuda_device *dev = s->dev;
    uint64_t random =
        fsdp__mix(fsdp__mix(fsdp__mix(dev->jitter_seed ^ fsdp__mix(dev->rank)) ^ s->number) ^ s->n_jitter++);
    if (random & 1) return FSDP_OK;
    FSDP__CUDA_TRY(s->dev, fsdp__cuda_delay(s->native, (random >> 1) % dev->jitter_ns, dev->stop));
    return FSDP_OK;
}

fsdp_status fsdp__cuda_before(fsdp__cuda_stream *s, fsdp_span *span)
{
    FSDP_TRY(fsdp__cuda_check(s->dev));
    if (s->dev->jitter_ns > 0) FSDP_TRY(jitter(s));
    return span != NULL || s->begun != NULL ? fsdp__cuda_span_begin(s, span) : FSDP_OK;
}

fsdp_status fsdp__cuda_sync(fsdp__cuda_stream *s)
{
    if (!(s->dev->debug & FSDP_DEBUG_SYNC) || fsdp__cuda_is_capturing(s->native)) return FSDP_OK;
    fsdp_status status = fsdp__cuda_wait_idle(s, s->dev->timeout_ns);
    if (status != FSDP_OK) return status;
    fsdp__cuda_spans_write(s, false);
    return fsdp__cuda_check(s->dev);
}

fsdp_status fsdp__cuda_after(fsdp__cuda_stream *s, fsdp_span *span)
{
    if (span != NULL) FSDP_TRY(fsdp__cuda_span_end(s, false));
    return fsdp__cuda_sync(s);
}

/* SQUARE_SUM's memory: launches of one stream take turns with it, those of two may not. A captured launch keeps the slot of the
 * stream that it was captured on, and its replays come before or after whatever any stream of the context is given outside of
 * them, and before or after each other (fsdp__replay_open and _close): so that slot, too, has one user at a time, even when it
 * is another stream's by then. */
static fsdp_status take_sum_slot(fsdp__cuda_stream *s)
{
    fsdp__cuda_device *dev = s->dev;
    pthread_mutex_lock(&dev->lock);
    for (int i = 0; i < FSDP__CUDA_SUM_SLOTS && s->sum_slot < 0; i++)
        if ((dev->sum_slots >> i & 1) == 0) s->sum_slot = i;
    if (s->sum_slot >= 0) dev->sum_slots |= (uint64_t)1 << s->sum_slot;
    pthread_mutex_unlock(&dev->lock);
    if (s->sum_slot >= 0) return FSDP_OK;
    return fsdp__fail(FSDP_ERR_STATE, "stream %s: square sums on more than %d streams", s->name, FSDP__CUDA_SUM_SLOTS);
}

static cudaError_t enqueue(fsdp__cuda_stream *s, const fsdp_device_op *op)
{
    fsdp__cuda_device *dev = s->dev;
    switch (op->kind) {
    case FSDP_OPERATION_COPY:
        if (op->u.copy.bytes == 0) return cudaSuccess;
        return cudaMemcpyAsync(op->u.copy.dst, op->u.copy.src, op->u.copy.bytes, cudaMemcpyDefault, s->native);
    case FSDP_OPERATION_FILL:
        if (op->u.fill.bytes == 0) return cudaSuccess;
        return cudaMemsetAsync(op->u.fill.dst, op->u.fill.byte, op->u.fill.bytes, s->native);
    case FSDP_OPERATION_CAST: return fsdp__cuda_cast(s->native, op);
    case FSDP_OPERATION_ADD: return fsdp__cuda_add(s->native, op);
    case FSDP_OPERATION_SQUARE_SUM:
        return fsdp__cuda_square_sum(s->native, op, dev->sums + (size_t)s->sum_slot * FSDP__CUDA_SUM_BYTES);
    case FSDP_OPERATION_STEP_INPUT: return fsdp__cuda_step_input(s->native, op);
    case FSDP_OPERATION_STEP_RESULT: return fsdp__cuda_step_result(s->native, op);
    case FSDP_OPERATION_ADAMW: return fsdp__cuda_adamw(s->native, op, dev->n_processors);
    case FSDP_OPERATION_HOST_CALL: return cudaLaunchHostFunc(s->native, op->u.host_call.fn, op->u.host_call.arg);
    case FSDP_OPERATION_DELAY: return fsdp__cuda_delay(s->native, op->u.delay.ns, dev->stop);
    default: return cudaErrorInvalidValue; /* collectives are the communicator's */
    }
}

/* CUDA looks at a copy's and a fill's addresses when they are enqueued: a wrong one breaks nothing. */
static fsdp_status bad_address(const fsdp__cuda_stream *s, const fsdp_device_op *op)
{
    (void)cudaGetLastError();
    if (op->kind == FSDP_OPERATION_FILL)
        return fsdp__fail(FSDP_ERR_ARG, "fill on %s: %llu bytes at %p are no memory of the GPU, nor page-locked",
                          s->name, (unsigned long long)op->u.fill.bytes, op->u.fill.dst);
    return fsdp__fail(FSDP_ERR_ARG, "copy on %s: %llu bytes from %p to %p: CUDA does not know that memory", s->name,
                      (unsigned long long)op->u.copy.bytes, op->u.copy.src, op->u.copy.dst);
}

static fsdp_status launch(fsdp__cuda_stream *s, const fsdp_device_op *op, fsdp_span *span)
{
    if (op->kind == FSDP_OPERATION_SQUARE_SUM && s->sum_slot < 0) FSDP_TRY(take_sum_slot(s));
    FSDP_TRY(fsdp__cuda_before(s, span));
    if (op->kind == FSDP_OPERATION_HOST_CALL || op->kind == FSDP_OPERATION_DELAY) fsdp__cuda_front_drop(s);
    else fsdp__cuda_front_add(s);
    cudaError_t error = enqueue(s, op);
    if (error == cudaErrorInvalidValue && (op->kind == FSDP_OPERATION_COPY || op->kind == FSDP_OPERATION_FILL))
        return bad_address(s, op);
    if (error != cudaSuccess)
        return fsdp__cuda_fail(s->dev, error, "enqueuing a %s on %s", fsdp_operation_name(op->kind), s->name);
    return fsdp__cuda_after(s, span);
}

fsdp_status fsdp__cuda_launch(void *dev, void *stream, const fsdp_device_op *op, fsdp_span *span)
{
    if (op->kind < FSDP_OPERATION_COPY || op->kind > FSDP_OPERATION_STEP_INPUT)
        return fsdp__fail(FSDP_ERR_UNSUPPORTED, "CUDA device: operation %d is none of a stream's", (int)op->kind);
    int before = fsdp__cuda_enter(dev);
    fsdp_status status = launch(stream, op, span);
    fsdp__cuda_leave(before);
    return status;
}
