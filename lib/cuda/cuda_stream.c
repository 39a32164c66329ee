/* SPDX-License-Identifier: MIT */
/* Streams: ours, and the caller's that are wrapped. */
#include "stream.h"

#include <stdio.h>

#include "context.h"
#include "cuda_backend.h"
#include "hostmem.h"

static const uint64_t STUCK_NS = 1000000000; /* how long a stream of an aborted device may take to come to its end */

static bool is_null_stream(cudaStream_t native) { return native == NULL || native == cudaStreamLegacy; }

/* Into the device's list. */
static fsdp__cuda_stream *add(fsdp__cuda_device *dev, const char *name, cudaStream_t native, bool owned)
{
    fsdp__cuda_stream *s = fsdp__host_alloc(dev->host, 1, sizeof *s);
    if (s == NULL) return NULL;
    s->dev = dev;
    s->native = native;
    s->owned = owned;
    s->needs_device = is_null_stream(native) || dev->jitter_ns > 0 || (dev->debug & FSDP_DEBUG_SYNC) != 0;
    s->sum_slot = -1;
    s->end_marks = &s->first_mark;
    snprintf(s->name, sizeof s->name, "%s", name);
    pthread_mutex_lock(&dev->lock);
    s->number = dev->n_streams_made++;
    s->next = dev->streams;
    dev->streams = s;
    pthread_mutex_unlock(&dev->lock);
    return s;
}

static void take_out(fsdp__cuda_stream *s)
{
    fsdp__cuda_device *dev = s->dev;
    pthread_mutex_lock(&dev->lock);
    fsdp__cuda_stream **link = &dev->streams;
    while (*link != s) link = &(*link)->next;
    *link = s->next;
    if (s->sum_slot >= 0) dev->sum_slots &= ~((uint64_t)1 << s->sum_slot);
    pthread_mutex_unlock(&dev->lock);
    fsdp__host_free(dev->host, s, 1, sizeof *s);
}

static fsdp_status no_host_memory(const char *name)
{
    return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "stream %s: no host memory for %zu bytes", name,
                      sizeof(fsdp__cuda_stream));
}

fsdp_status fsdp__cuda_stream_create(void *dev_, const char *name, bool high_priority, void **out_stream)
{
    fsdp__cuda_device *dev = dev_;
    cudaStream_t native = NULL;
    int least = 0, greatest = 0, before = fsdp__cuda_enter(dev);
    cudaError_t error = cudaDeviceGetStreamPriorityRange(&least, &greatest);
    if (error == cudaSuccess)
        error = cudaStreamCreateWithPriority(&native, cudaStreamNonBlocking, high_priority ? greatest : least);
    fsdp_status status = fsdp__cuda_fail(dev, error, "cudaStreamCreateWithPriority for stream %s", name);
    if (error == cudaSuccess) {
        *out_stream = add(dev, name, native, true);
        if (*out_stream == NULL) {
            (void)cudaStreamDestroy(native);
            status = no_host_memory(name);
        }
    }
    fsdp__cuda_leave(before);
    return status;
}

bool fsdp__cuda_is_capturing(cudaStream_t native)
{
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    cudaError_t error = cudaStreamIsCapturing(native, &capture);
    if (error == cudaSuccess) return capture != cudaStreamCaptureStatusNone;
    /* Implicit: the NULL stream, while another stream captures: nobody may touch it now. Others the next call finds, too. */
    (void)cudaGetLastError();
    return error == cudaErrorStreamCaptureImplicit;
}

/* Until it is idle; on an aborted device it may be stuck behind the caller's own work, and what it was given ends later, or
 * never: CUDA takes the stream back then. */
void fsdp__cuda_stream_destroy(void *dev_, void *stream)
{
    fsdp__cuda_device *dev = dev_;
    fsdp__cuda_stream *s = stream;
    int before = fsdp__cuda_enter(dev);
    const uint64_t look_ns = 100000000;
    uint64_t given_up_ns = UINT64_MAX;
    while (fsdp__cuda_wait_idle(s, look_ns) == FSDP_ERR_TIMEOUT && fsdp__now_ns() < given_up_ns)
        if (given_up_ns == UINT64_MAX && atomic_load(&dev->status) != FSDP_OK) given_up_ns = fsdp__after_ns(STUCK_NS);
    fsdp__cuda_spans_write(s, true);
    if (s->owned) FSDP_IGNORE(fsdp__cuda_fail(dev, cudaStreamDestroy(s->native), "cudaStreamDestroy of %s", s->name));
    fsdp__cuda_leave(before);
    fsdp__cuda_front_drop(s);
    take_out(s);
}

/* Waits on an aborted device too: what runs must have ended before its memory is freed. */
fsdp_status fsdp__cuda_stream_drain(void *dev_, void *stream, uint64_t timeout_ns)
{
    fsdp__cuda_device *dev = dev_;
    fsdp__cuda_stream *s = stream;
    int before = fsdp__cuda_enter(dev);
    fsdp_status status = fsdp__cuda_wait_idle(s, timeout_ns);
    if (status != FSDP_ERR_TIMEOUT) fsdp__cuda_spans_write(s, true); /* the tape may go now */
    fsdp__cuda_leave(before);
    if (status != FSDP_OK) return status;
    return fsdp__cuda_check(dev);
}

/* ---- The caller's streams ---- */

static fsdp_status check_device(fsdp__cuda_device *dev, cudaStream_t native, const char *name)
{
#if CUDART_VERSION >= 12080
    int ordinal = dev->ordinal;
    if (is_null_stream(native)) return FSDP_OK; /* it is the current device's, which is ours here */
    cudaError_t error = cudaStreamGetDevice(native, &ordinal);
    if (error != cudaSuccess) {
        (void)cudaGetLastError();
        return fsdp__fail(FSDP_ERR_ARG, "fsdp_cuda_stream_wrap of %s: no stream: %s (%s)", name,
                          cudaGetErrorString(error), cudaGetErrorName(error));
    }
    if (ordinal != dev->ordinal)
        return fsdp__fail(FSDP_ERR_ARG,
                          "fsdp_cuda_stream_wrap of %s: it is a stream of GPU %d, the context's is GPU %d", name,
                          ordinal, dev->ordinal);
    return FSDP_OK;
#else
    /* An event is recorded on streams of its own device only. */
    cudaEvent_t event;
    FSDP__CUDA_TRY(dev, cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    cudaError_t error = cudaEventRecord(event, native);
    (void)cudaEventDestroy(event);
    if (error == cudaSuccess) return FSDP_OK;
    (void)cudaGetLastError();
    return fsdp__fail(FSDP_ERR_ARG, "fsdp_cuda_stream_wrap of %s: no stream of GPU %d, the context's: %s (%s)", name,
                      dev->ordinal, cudaGetErrorString(error), cudaGetErrorName(error));
#endif
}

static fsdp_status check_native(fsdp__cuda_device *dev, cudaStream_t native, const char *name, bool *out_blocking)
{
    if (native == cudaStreamPerThread)
        return fsdp__fail(FSDP_ERR_ARG,
                          "fsdp_cuda_stream_wrap of %s: cudaStreamPerThread is another stream in each thread: make one "
                          "with cudaStreamCreateWithFlags",
                          name);
    if (fsdp__cuda_is_capturing(native))
        return fsdp__fail(FSDP_ERR_ARG, "fsdp_cuda_stream_wrap of %s: the stream is capturing: wrap it before", name);
    FSDP_TRY(check_device(dev, native, name));
    unsigned flags = 0;
    if (!is_null_stream(native)) FSDP__CUDA_TRY(dev, cudaStreamGetFlags(native, &flags));
    *out_blocking = (flags & cudaStreamNonBlocking) == 0;
    return FSDP_OK;
}

static bool is_wrapped(fsdp__cuda_device *dev, cudaStream_t native)
{
    bool found = false;
    pthread_mutex_lock(&dev->lock);
    for (const fsdp__cuda_stream *s = dev->streams; s != NULL; s = s->next)
        found |= s->native == native || (is_null_stream(s->native) && is_null_stream(native));
    pthread_mutex_unlock(&dev->lock);
    return found;
}

static fsdp_status wrap(fsdp_context *ctx, cudaStream_t native, const char *name, fsdp_stream **out_stream)
{
    fsdp__cuda_device *dev = ctx->dev;
    bool blocking = false;
    FSDP_TRY(check_native(dev, native, name, &blocking));
    if (is_wrapped(dev, native))
        return fsdp__fail(FSDP_ERR_STATE, "fsdp_cuda_stream_wrap of %s: this context has that stream already", name);
    fsdp__cuda_stream *s = add(dev, name, native, false);
    if (s == NULL) return no_host_memory(name);
    fsdp_status status = fsdp__stream_adopt(ctx, name, s, out_stream);
    if (status != FSDP_OK) {
        take_out(s);
        return status;
    }
    if (blocking)
        fsdp__log(ctx,
                  "rank %u: stream %s is %s: the library's lanes do not wait for the NULL stream, nor it for them; use "
                  "a stream made with cudaStreamNonBlocking",
                  dev->rank, name, is_null_stream(native) ? "the NULL stream" : "a blocking stream");
    return FSDP_OK;
}

static bool is_on_cuda(const fsdp_context *ctx) { return ctx->backend->device == &fsdp__cuda_device_ops; }

fsdp_status fsdp_cuda_stream_wrap(fsdp_context *ctx, cudaStream_t native, const char *name, fsdp_stream **out_stream)
{
    FSDP_NEED(ctx);
    FSDP_NEED(name);
    FSDP_NEED(out_stream);
    if (!is_on_cuda(ctx))
        return fsdp__fail(FSDP_ERR_ARG, "fsdp_cuda_stream_wrap of %s: the context is on %s, not on CUDA", name,
                          ctx->backend->name);
    FSDP_TRY(fsdp__context_check(ctx));
    int before = fsdp__cuda_enter(ctx->dev);
    fsdp__lock(ctx);
    fsdp_status status = wrap(ctx, native, name, out_stream);
    if (status == FSDP_OK) ctx->n_live[FSDP__CHILD_STREAM]++;
    fsdp__unlock(ctx);
    fsdp__cuda_leave(before);
    return status;
}

cudaStream_t fsdp_cuda_stream(const fsdp_stream *stream)
{
    if (stream == NULL || !is_on_cuda(stream->ctx)) return NULL;
    fsdp__cuda_stream *s = stream->native;
    atomic_store_explicit(&s->exposed, true, memory_order_relaxed);
    return s->native;
}

int fsdp_cuda_device(const fsdp_context *ctx)
{
    if (ctx == NULL || !is_on_cuda(ctx)) return -1;
    return ((const fsdp__cuda_device *)ctx->dev)->ordinal;
}
