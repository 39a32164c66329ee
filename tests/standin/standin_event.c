/* SPDX-License-Identifier: MIT */
/* Events of the stand-in. */
#include "standin.h"

#include <stdlib.h>

struct standin_moment {
    atomic_int refs;
    _Atomic uint32_t done;
    _Atomic uint64_t time_ns;
};

struct CUevent_st {
    int device;
    bool has_time;
    pthread_mutex_t lock;
    standin_moment *last; /* NULL: never recorded */
    standin_mark mark;    /* of its last record, if that was captured */
};

/* ---- Moments ---- */

standin_moment *standin_moment_make(void)
{
    standin_moment *m = calloc(1, sizeof *m);
    if (m == NULL) standin_die("no memory for an event");
    atomic_init(&m->refs, 1);
    return m;
}

standin_moment *standin_moment_hold(standin_moment *m)
{
    if (m != NULL) atomic_fetch_add(&m->refs, 1);
    return m;
}

void standin_moment_release(standin_moment *m)
{
    if (m != NULL && atomic_fetch_sub(&m->refs, 1) == 1) free(m);
}

/* It has happened when what came before it had ended, whenever the thread comes to it: a GPU loses no time there, and what
 * waited for the end of that on another stream comes later. */
static void run_record(void *arg)
{
    standin_moment *m = *(standin_moment **)arg;
    uint64_t since_ns = atomic_load_explicit(&m->time_ns, memory_order_relaxed), ended_ns = standin_ended_ns();
    if (since_ns < ended_ns) atomic_store_explicit(&m->time_ns, ended_ns, memory_order_relaxed);
    atomic_store_explicit(&m->done, 1, memory_order_release);
    fsdp__futex_wake_all(&m->done, false);
    standin_moment_release(m);
}

static bool is_done(standin_moment *m) { return atomic_load_explicit(&m->done, memory_order_acquire) != 0; }

static void sleep_until(standin_moment *m, int device)
{
    while (!is_done(m) && !standin_is_broken(device))
        (void)fsdp__futex_wait(&m->done, 0, fsdp__after_ns(STANDIN_LOOK_NS), false);
}

typedef struct wait_arg {
    standin_moment *moment;
    int device;
} wait_arg;

static void run_wait(void *arg)
{
    const wait_arg *wait = arg;
    sleep_until(wait->moment, wait->device);
    standin_moment_release(wait->moment);
}

static const standin_kind record_kind = {run_record, NULL, sizeof(standin_moment *), true, true};
static const standin_kind wait_kind = {run_wait, NULL, sizeof(wait_arg), true, false};

void standin_record_moment(cudaStream_t s, standin_moment *m)
{
    atomic_store_explicit(&m->time_ns, fsdp__now_ns(), memory_order_relaxed);
    (void)standin_push(s, &record_kind, &m);
}

void standin_wait_moment(cudaStream_t s, standin_moment *m)
{
    const wait_arg wait = {m, s->device};
    (void)standin_push(s, &wait_kind, &wait);
}

/* ---- CUDA's calls ---- */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out_event, unsigned flags)
{
    STANDIN_BEGIN();
    cudaEvent_t event = calloc(1, sizeof *event);
    if (event == NULL) standin_die("no memory for an event");
    event->device = standin_current();
    event->has_time = (flags & cudaEventDisableTiming) == 0;
    pthread_mutex_init(&event->lock, NULL);
    atomic_fetch_add(&standin_live[event->device], 1);
    *out_event = event;
    return cudaSuccess;
}

/* It may go before its last record has happened, and before who waits for that. */
cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    cudaError_t entered = standin_enter();
    if (!standin_may_give_back(entered)) return standin_return(entered);
    if (event == NULL) return standin_return(cudaErrorInvalidResourceHandle);
    atomic_fetch_sub(&standin_live[event->device], 1);
    standin_moment_release(event->last);
    pthread_mutex_destroy(&event->lock);
    free(event);
    return standin_return(entered);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    STANDIN_BEGIN();
    standin_mark mark = {0, 0};
    cudaError_t error = standin_stream_of(stream, &stream);
    if (error == cudaSuccess && stream->device != event->device) error = cudaErrorInvalidResourceHandle;
    if (error == cudaSuccess && stream->is_null) error = standin_null_is_free(stream->device);
    if (error == cudaSuccess) error = standin_capture_record(stream, &mark);
    if (error != cudaSuccess) return standin_return(error);
    standin_moment *m = mark.capture == 0 ? standin_moment_make() : NULL;
    pthread_mutex_lock(&event->lock);
    standin_moment *before = event->last;
    event->last = standin_moment_hold(m);
    event->mark = mark;
    pthread_mutex_unlock(&event->lock);
    standin_moment_release(before);
    if (m != NULL) standin_record_moment(stream, m);
    return cudaSuccess;
}

/* "Other APIs such as cudaStreamWaitEvent() use the most recently captured state at the time of the API call, and are
 * not affected by later calls to cudaEventRecord()." One that was never recorded is nothing to wait for. */
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags)
{
    (void)flags;
    STANDIN_BEGIN();
    cudaError_t error = standin_stream_of(stream, &stream);
    if (error != cudaSuccess) return standin_return(error);
    pthread_mutex_lock(&event->lock);
    standin_moment *m = standin_moment_hold(event->last);
    standin_mark mark = event->mark;
    pthread_mutex_unlock(&event->lock);
    if (mark.capture != 0 || atomic_load(&stream->capture) != NULL) {
        error = standin_capture_wait(stream, mark, m != NULL);
        standin_moment_release(m);
        return standin_return(error);
    }
    if (m != NULL) standin_wait_moment(stream, m);
    return cudaSuccess;
}

/* Its last record, or the error of one that was captured. */
static cudaError_t last_of(cudaEvent_t event, standin_moment **out_moment)
{
    pthread_mutex_lock(&event->lock);
    *out_moment = standin_moment_hold(event->last);
    bool captured = event->mark.capture != 0;
    pthread_mutex_unlock(&event->lock);
    return captured ? cudaErrorCapturedEvent : cudaSuccess;
}

/* Never recorded: success. */
cudaError_t cudaEventQuery(cudaEvent_t event)
{
    standin_moment *m = NULL;
    STANDIN_BEGIN();
    cudaError_t error = standin_may_call();
    if (error == cudaSuccess) error = last_of(event, &m);
    if (error == cudaSuccess && m != NULL && !is_done(m)) error = cudaErrorNotReady;
    standin_moment_release(m);
    return standin_return(error);
}

static cudaError_t time_of(cudaEvent_t event, uint64_t *out_ns)
{
    standin_moment *m = NULL;
    cudaError_t error = last_of(event, &m);
    if (error == cudaSuccess && (m == NULL || !event->has_time)) error = cudaErrorInvalidResourceHandle;
    if (error == cudaSuccess && !is_done(m)) error = cudaErrorNotReady;
    if (error == cudaSuccess) *out_ns = atomic_load_explicit(&m->time_ns, memory_order_relaxed);
    standin_moment_release(m);
    return error;
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end)
{
    uint64_t start_ns = 0, end_ns = 0;
    STANDIN_BEGIN();
    cudaError_t error = time_of(start, &start_ns);
    if (error == cudaSuccess) error = time_of(end, &end_ns);
    if (error == cudaSuccess) *ms = (float)((double)(int64_t)(end_ns - start_ns) / 1e6);
    return standin_return(error);
}
