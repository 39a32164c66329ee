/* SPDX-License-Identifier: MIT */
/* Events. CUDA's own meaning is the table's: a wait refers to the last record before it. A record that somebody else still asks
 * about stays as it is: the next one takes another CUDA event. */
#include "cuda_backend.h"
#include "hostmem.h"

typedef struct event {
    fsdp__cuda_moment *moment; /* under moment_lock where another thread may record */
    atomic_bool recorded;
} event;

fsdp_status fsdp__cuda_event_create(void *dev_, void **out_event)
{
    fsdp__cuda_device *dev = dev_;
    event *e = fsdp__host_alloc(dev->host, 1, sizeof *e);
    if (e == NULL) return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "event: no host memory for %zu bytes", sizeof *e);
    fsdp_status status = fsdp__cuda_moment_take(dev, 1, &e->moment);
    if (status == FSDP_OK) *out_event = e;
    else fsdp__host_free(dev->host, e, 1, sizeof *e);
    return status;
}

void fsdp__cuda_event_destroy(void *dev_, void *event_)
{
    fsdp__cuda_device *dev = dev_;
    event *e = event_;
    fsdp__cuda_moment_release(dev, e->moment);
    fsdp__host_free(dev->host, e, 1, sizeof *e);
}

/* One that fails leaves the event's last record as it was, as CUDA does: inside a capture that has broken, the context and
 * all it recorded before go on. */
static fsdp_status record_anew(fsdp__cuda_stream *s, event *e)
{
    fsdp__cuda_moment *m = NULL;
    FSDP_TRY(fsdp__cuda_moment_to_record(s->dev, e->moment, &m));
    cudaError_t error = cudaEventRecord(m->native, s->native);
    if (error == cudaSuccess) {
        fsdp__cuda_moment_recorded(s->dev, &e->moment, m);
        return FSDP_OK;
    }
    if (m != e->moment) fsdp__cuda_moment_release(s->dev, m);
    return fsdp__cuda_fail(s->dev, error, "cudaEventRecord on %s", s->name);
}

static fsdp_status record(fsdp__cuda_stream *s, event *e, fsdp_span *span)
{
    FSDP_TRY(fsdp__cuda_before(s, span));
    FSDP_TRY(fsdp__cuda_span_end(s, true)); /* an instant, before what waits for the event goes on */
    if (span != NULL || !fsdp__cuda_front_share(s, &e->moment)) {
        fsdp__cuda_front_drop(s);
        FSDP_TRY(record_anew(s, e));
    }
    atomic_store_explicit(&e->recorded, true, memory_order_release); /* the default would be a fence a record */
    return fsdp__cuda_sync(s);
}

/* An event is recorded, and waited for, on a stream whatever device is current ("Stream and Event Behavior" in CUDA's guide):
 * a hook has many of both, and none asks which it is. What else may stand around one does need its device. */
static bool needs_device(const fsdp__cuda_stream *s, const fsdp_span *span)
{
    return s->needs_device || span != NULL || s->begun != NULL;
}

fsdp_status fsdp__cuda_event_record(void *dev, void *event_, void *stream, fsdp_span *span)
{
    if (!needs_device(stream, span)) return record(stream, event_, NULL);
    int before = fsdp__cuda_enter(dev);
    fsdp_status status = record(stream, event_, span);
    fsdp__cuda_leave(before);
    return status;
}

static fsdp_status wait_for(fsdp__cuda_stream *s, const event *e, fsdp_span *span)
{
    FSDP_TRY(fsdp__cuda_before(s, span));
    if (atomic_load(&e->recorded)) {
        FSDP__CUDA_TRY(s->dev, cudaStreamWaitEvent(s->native, e->moment->native, 0));
        fsdp__cuda_front_wait(s, &e->moment);
    }
    return fsdp__cuda_after(s, span);
}

fsdp_status fsdp__cuda_stream_wait(void *dev, void *stream, void *event_, fsdp_span *span)
{
    if (!needs_device(stream, span)) return wait_for(stream, event_, NULL);
    int before = fsdp__cuda_enter(dev);
    fsdp_status status = wait_for(stream, event_, span);
    fsdp__cuda_leave(before);
    return status;
}

/* What happened before the device failed has happened: a flight recorder asks afterwards. */
fsdp_status fsdp__cuda_event_query(void *dev_, void *event_, bool *out_done)
{
    fsdp__cuda_device *dev = dev_;
    event *e = event_;
    if (!atomic_load(&e->recorded)) {
        FSDP_TRY(fsdp__cuda_check(dev));
        *out_done = true;
        return FSDP_OK;
    }
    enum cudaStreamCaptureMode mode = fsdp__cuda_relax();
    fsdp__cuda_moment *moment = fsdp__cuda_moment_hold(dev, &e->moment);
    cudaError_t error = fsdp__cuda_asked(cudaEventQuery(moment->native));
    fsdp__cuda_moment_release(dev, moment);
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
    event *e = event_;
    FSDP_TRY(fsdp__cuda_check(dev));
    if (!atomic_load(&e->recorded)) return FSDP_OK;
    fsdp__cuda_moment *moment = fsdp__cuda_moment_hold(dev, &e->moment);
    fsdp_status status = fsdp__cuda_wait_host(dev, moment->native, timeout_ns);
    fsdp__cuda_moment_release(dev, moment);
    FSDP_TRY(fsdp__cuda_check(dev)); /* an abort's sentence rather than its consequence */
    return status;
}
