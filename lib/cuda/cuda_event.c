/* SPDX-License-Identifier: MIT */
/* Events. CUDA's own meaning is the table's: a wait refers to the last record before it. */
#include "cuda_backend.h"
#include "hostmem.h"

typedef struct event {
    cudaEvent_t native;
    atomic_bool recorded;
} event;

fsdp_status fsdp__cuda_event_create(void *dev_, void **out_event)
{
    fsdp__cuda_device *dev = dev_;
    event *e = fsdp__host_alloc(dev->host, 1, sizeof *e);
    if (e == NULL) return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "event: no host memory for %zu bytes", sizeof *e);
    int before = fsdp__cuda_enter(dev);
    cudaError_t error = cudaEventCreateWithFlags(&e->native, cudaEventDisableTiming);
    fsdp_status status = fsdp__cuda_fail(dev, error, "cudaEventCreateWithFlags");
    fsdp__cuda_leave(before);
    if (error == cudaSuccess) *out_event = e;
    else fsdp__host_free(dev->host, e, 1, sizeof *e);
    return status;
}

void fsdp__cuda_event_destroy(void *dev_, void *event_)
{
    fsdp__cuda_device *dev = dev_;
    event *e = event_;
    int before = fsdp__cuda_enter(dev);
    FSDP_IGNORE(fsdp__cuda_fail(dev, cudaEventDestroy(e->native), "cudaEventDestroy"));
    fsdp__cuda_leave(before);
    fsdp__host_free(dev->host, e, 1, sizeof *e);
}

static fsdp_status record(fsdp__cuda_stream *s, event *e, fsdp_span *span)
{
    FSDP_TRY(fsdp__cuda_before(s, span));
    FSDP_TRY(fsdp__cuda_span_end(s, true)); /* an instant, before what waits for the event goes on */
    FSDP__CUDA_TRY(s->dev, cudaEventRecord(e->native, s->native));
    atomic_store_explicit(&e->recorded, true, memory_order_release); /* the default would be a fence a record */
    return fsdp__cuda_sync(s);
}

fsdp_status fsdp__cuda_event_record(void *dev, void *event_, void *stream, fsdp_span *span)
{
    int before = fsdp__cuda_enter(dev);
    fsdp_status status = record(stream, event_, span);
    fsdp__cuda_leave(before);
    return status;
}

static fsdp_status wait_for(fsdp__cuda_stream *s, const event *e, fsdp_span *span)
{
    FSDP_TRY(fsdp__cuda_before(s, span));
    if (atomic_load(&e->recorded)) FSDP__CUDA_TRY(s->dev, cudaStreamWaitEvent(s->native, e->native, 0));
    return fsdp__cuda_after(s, span);
}

fsdp_status fsdp__cuda_stream_wait(void *dev, void *stream, void *event_, fsdp_span *span)
{
    int before = fsdp__cuda_enter(dev);
    fsdp_status status = wait_for(stream, event_, span);
    fsdp__cuda_leave(before);
    return status;
}

/* What happened before the device failed has happened: a flight recorder asks afterwards. */
fsdp_status fsdp__cuda_event_query(void *dev_, void *event_, bool *out_done)
{
    fsdp__cuda_device *dev = dev_;
    const event *e = event_;
    if (!atomic_load(&e->recorded)) {
        FSDP_TRY(fsdp__cuda_check(dev));
        *out_done = true;
        return FSDP_OK;
    }
    enum cudaStreamCaptureMode mode = fsdp__cuda_relax();
    cudaError_t error = fsdp__cuda_asked(cudaEventQuery(e->native));
    fsdp__cuda_unrelax(mode);
    if (error != cudaSuccess) {
        if (error != cudaErrorNotReady) return fsdp__cuda_fail(dev, error, "cudaEventQuery");
        FSDP_TRY(fsdp__cuda_check(dev));
    }
    *out_done = error == cudaSuccess;
    return FSDP_OK;
}

fsdp_status fsdp__cuda_event_wait(void *dev, void *event_, uint64_t timeout_ns)
{
    const event *e = event_;
    FSDP_TRY(fsdp__cuda_check(dev));
    if (!atomic_load(&e->recorded)) return FSDP_OK;
    fsdp_status status = fsdp__cuda_wait_host(dev, e->native, timeout_ns);
    FSDP_TRY(fsdp__cuda_check(dev)); /* an abort's sentence rather than its consequence */
    return status;
}
