/* SPDX-License-Identifier: MIT */
/* A trace's times. Around a thing that is traced stand two events with timing, from a pool; once they are done, the host reads
 * their distance from one base event, whose host time is known. Times of one base keep their order when they are rounded,
 * and the base changes only while no span is open. */
#include "cuda_backend.h"
#include "hostmem.h"

struct fsdp__cuda_mark {
    fsdp_span *span;
    cudaEvent_t start, end;
    bool instant; /* end is not used */
    fsdp__cuda_mark *next, *next_made;
};

struct fsdp__cuda_spans {
    fsdp__cuda_mark *free, *made;
    cudaEvent_t base;
    uint64_t base_ns; /* the host's time at the base */
    uint64_t n_open;  /* marks that are begun or enqueued */
};

/* CUDA gives milliseconds as a float: after ten seconds they are a microsecond coarse. */
static const uint64_t OLD_NS = 10000000000u, BASE_PATIENCE_NS = 2000000;

/* Where the GPU does not come to it soon, the old base stays. With nothing open, and no part of what others capture. */
static fsdp_status take_base(fsdp__cuda_device *dev, uint64_t patience_ns)
{
    fsdp__cuda_spans *spans = dev->spans;
    cudaEvent_t base;
    /* Idle, so that the event is done at once; not kept, as streams share the GPU's queues. */
    cudaStream_t stream = NULL;
    FSDP__CUDA_TRY(dev, cudaEventCreateWithFlags(&base, cudaEventDefault));
    cudaError_t error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    uint64_t asked_ns = fsdp__now_ns(), seen_ns;
    if (error == cudaSuccess) error = cudaEventRecord(base, stream);
    do {
        if (error == cudaSuccess || error == cudaErrorNotReady) error = fsdp__cuda_asked(cudaEventQuery(base));
        seen_ns = fsdp__now_ns();
    } while (error == cudaErrorNotReady && seen_ns - asked_ns < patience_ns);
    if (error == cudaSuccess) {
        cudaEvent_t old = spans->base;
        spans->base = base;
        spans->base_ns = asked_ns + (seen_ns - asked_ns) / 2;
        base = old;
    }
    if (base != NULL) (void)cudaEventDestroy(base);
    if (stream != NULL) (void)cudaStreamDestroy(stream);
    if (error == cudaErrorNotReady && spans->base != NULL) return FSDP_OK;
    return fsdp__cuda_fail(dev, error, "the base of a trace's times");
}

static fsdp_status new_base(fsdp__cuda_device *dev, uint64_t patience_ns)
{
    enum cudaStreamCaptureMode mode = fsdp__cuda_relax();
    fsdp_status status = take_base(dev, patience_ns);
    fsdp__cuda_unrelax(mode);
    return status;
}

fsdp_status fsdp__cuda_spans_open(fsdp__cuda_device *dev)
{
    fsdp__cuda_spans *spans = fsdp__host_alloc(dev->host, 1, sizeof *spans);
    if (spans == NULL)
        return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "CUDA device: no host memory for %zu bytes", sizeof *spans);
    dev->spans = spans;
    FSDP_TRY(new_base(dev, UINT64_MAX)); /* the first takes long: it is only a warm-up */
    return new_base(dev, UINT64_MAX);
}

void fsdp__cuda_spans_close(fsdp__cuda_device *dev)
{
    fsdp__cuda_spans *spans = dev->spans;
    if (spans == NULL) return;
    dev->spans = NULL;
    while (spans->made != NULL) {
        fsdp__cuda_mark *mark = spans->made;
        spans->made = mark->next_made;
        (void)cudaEventDestroy(mark->start);
        (void)cudaEventDestroy(mark->end);
        fsdp__host_free(dev->host, mark, 1, sizeof *mark);
    }
    if (spans->base != NULL) (void)cudaEventDestroy(spans->base);
    (void)cudaGetLastError();
    fsdp__host_free(dev->host, spans, 1, sizeof *spans);
}

static void give_mark(fsdp__cuda_device *dev, fsdp__cuda_mark *mark)
{
    mark->next = dev->spans->free;
    dev->spans->free = mark;
    dev->spans->n_open--;
}

static fsdp_status make_mark(fsdp__cuda_device *dev, fsdp__cuda_mark **out_mark)
{
    fsdp__cuda_mark *mark = fsdp__host_alloc(dev->host, 1, sizeof *mark);
    if (mark == NULL) return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "trace: no host memory for %zu bytes", sizeof *mark);
    cudaError_t error = cudaEventCreateWithFlags(&mark->start, cudaEventDefault);
    if (error == cudaSuccess) error = cudaEventCreateWithFlags(&mark->end, cudaEventDefault);
    if (error == cudaSuccess) {
        pthread_mutex_lock(&dev->lock);
        mark->next_made = dev->spans->made;
        dev->spans->made = mark;
        pthread_mutex_unlock(&dev->lock);
        *out_mark = mark;
        return FSDP_OK;
    }
    if (mark->start != NULL) (void)cudaEventDestroy(mark->start);
    fsdp__host_free(dev->host, mark, 1, sizeof *mark);
    return fsdp__cuda_fail(dev, error, "cudaEventCreateWithFlags for a trace");
}

static fsdp_status take_mark(fsdp__cuda_device *dev, fsdp__cuda_mark **out_mark)
{
    fsdp__cuda_spans *spans = dev->spans;
    pthread_mutex_lock(&dev->lock);
    fsdp__cuda_mark *mark = spans->free;
    if (mark != NULL) spans->free = mark->next;
    bool first = spans->n_open++ == 0, old = fsdp__now_ns() - spans->base_ns > OLD_NS;
    pthread_mutex_unlock(&dev->lock);
    fsdp_status status = FSDP_OK;
    if (first && old) status = new_base(dev, BASE_PATIENCE_NS); /* enqueuing is one thread's at a time */
    if (status == FSDP_OK && mark == NULL) status = make_mark(dev, &mark);
    if (status == FSDP_OK) {
        *out_mark = mark;
        return FSDP_OK;
    }
    pthread_mutex_lock(&dev->lock);
    if (mark != NULL) give_mark(dev, mark);
    else spans->n_open--;
    pthread_mutex_unlock(&dev->lock);
    return status;
}

static void forget_begun(fsdp__cuda_stream *s)
{
    if (s->begun == NULL) return;
    pthread_mutex_lock(&s->dev->lock);
    give_mark(s->dev, s->begun);
    pthread_mutex_unlock(&s->dev->lock);
    s->begun = NULL;
}

fsdp_status fsdp__cuda_span_begin(fsdp__cuda_stream *s, fsdp_span *span)
{
    forget_begun(s);                                                        /* of an operation that failed */
    if (span == NULL || fsdp__cuda_is_capturing(s->native)) return FSDP_OK; /* a captured event has no time */
    fsdp__cuda_mark *mark;
    FSDP_TRY(take_mark(s->dev, &mark));
    mark->span = span;
    s->begun = mark;
    FSDP__CUDA_TRY(s->dev, cudaEventRecord(mark->start, s->native));
    return FSDP_OK;
}

fsdp_status fsdp__cuda_span_end(fsdp__cuda_stream *s, bool instant)
{
    fsdp__cuda_mark *mark = s->begun;
    if (mark == NULL) return FSDP_OK;
    if (!instant) FSDP__CUDA_TRY(s->dev, cudaEventRecord(mark->end, s->native));
    mark->instant = instant;
    mark->next = NULL;
    s->begun = NULL;
    pthread_mutex_lock(&s->dev->lock);
    *s->end_marks = mark;
    s->end_marks = &mark->next;
    pthread_mutex_unlock(&s->dev->lock);
    return FSDP_OK;
}

/* The host's time at the event; false: it has not happened, or the device is broken. */
static bool time_of(const fsdp__cuda_spans *spans, cudaEvent_t event, uint64_t *out_ns)
{
    float ms = 0;
    if (cudaEventElapsedTime(&ms, spans->base, event) != cudaSuccess) {
        (void)cudaGetLastError();
        return false;
    }
    *out_ns = spans->base_ns + (uint64_t)(int64_t)((double)ms * 1e6);
    return true;
}

void fsdp__cuda_spans_write(fsdp__cuda_stream *s, bool all)
{
    fsdp__cuda_device *dev = s->dev;
    if (all) forget_begun(s);
    enum cudaStreamCaptureMode mode = fsdp__cuda_relax();
    pthread_mutex_lock(&dev->lock);
    while (s->first_mark != NULL) {
        fsdp__cuda_mark *mark = s->first_mark;
        uint64_t start_ns = 0, end_ns = 0;
        bool done =
            time_of(dev->spans, mark->start, &start_ns) && (mark->instant || time_of(dev->spans, mark->end, &end_ns));
        if (!done && !all) break;
        if (done) *mark->span = (fsdp_span){start_ns, mark->instant ? start_ns : end_ns};
        s->first_mark = mark->next;
        if (s->first_mark == NULL) s->end_marks = &s->first_mark;
        give_mark(dev, mark);
    }
    pthread_mutex_unlock(&dev->lock);
    fsdp__cuda_unrelax(mode);
}
