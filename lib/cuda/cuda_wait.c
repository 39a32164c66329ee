/* SPDX-License-Identifier: MIT */
/* Blocking the host. Asking for spin_ns; then a stream of the waiter's own waits for the event and wakes the sleeper by a host
 * function, so that the stream that is waited for gets nothing. A sleeper that gave up leaves its sleeping place in flight:
 * it is used again once its host function has run. When all places are taken, and while the caller's own host functions hold
 * up CUDA's one thread for them, the sleeper looks by himself now and then. */
#include <errno.h>

#include "cuda_backend.h"
#include "hostmem.h"

enum { PLACES = 4, MAX_LOOKS = 20 };

static const uint64_t LOOK_NS = 100000000, /* host functions do not run in a context that is broken */
    NO_PLACE_NS = 200000;

typedef struct place {
    fsdp__cuda_waiter *waiter;
    cudaStream_t stream;
    bool taken, in_flight, woken; /* in_flight: a host function will come */
} place;

struct fsdp__cuda_waiter {
    pthread_mutex_t lock; /* never held in a call of CUDA */
    pthread_cond_t changed;
    place places[PLACES];
};

fsdp_status fsdp__cuda_waiter_open(fsdp__cuda_device *dev)
{
    fsdp__cuda_waiter *w = fsdp__host_alloc(dev->host, 1, sizeof *w);
    if (w == NULL) return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "CUDA device: no host memory for %zu bytes", sizeof *w);
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&w->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    pthread_mutex_init(&w->lock, NULL);
    dev->waiter = w;
    for (int i = 0; i < PLACES; i++) w->places[i].waiter = w;
    /* The others when they are needed: streams share the GPU's queues, and few programs wait on two threads. */
    FSDP__CUDA_TRY(dev, cudaStreamCreateWithFlags(&w->places[0].stream, cudaStreamNonBlocking));
    return FSDP_OK;
}

static bool sleep_until(fsdp__cuda_waiter *w, uint64_t deadline_ns)
{
    struct timespec then = {(time_t)(deadline_ns / 1000000000u), (long)(deadline_ns % 1000000000u)};
    return pthread_cond_timedwait(&w->changed, &w->lock, &then) != ETIMEDOUT;
}

static bool is_in_flight(const fsdp__cuda_waiter *w)
{
    for (int i = 0; i < PLACES; i++)
        if (w->places[i].in_flight) return true;
    return false;
}

/* A device that is broken without our knowing runs no host function. */
static void look_for_errors(fsdp__cuda_device *dev)
{
    for (int i = 0; i < PLACES; i++) {
        if (dev->waiter->places[i].stream == NULL) continue;
        cudaError_t error = fsdp__cuda_asked(cudaStreamQuery(dev->waiter->places[i].stream));
        if (error != cudaErrorNotReady) FSDP_IGNORE(fsdp__cuda_fail(dev, error, "cudaStreamQuery"));
    }
}

/* Until no host function is left that writes into the waiter. False: on a device that has failed that may take for ever. */
static bool come_to_rest(fsdp__cuda_device *dev)
{
    fsdp__cuda_waiter *w = dev->waiter;
    for (int looks = 0; looks < MAX_LOOKS; looks += atomic_load(&dev->status) != FSDP_OK) {
        uint64_t look_ns = fsdp__cuda_after_ns(LOOK_NS);
        pthread_mutex_lock(&w->lock);
        while (is_in_flight(w) && sleep_until(w, look_ns)) {
        }
        bool in_flight = is_in_flight(w);
        pthread_mutex_unlock(&w->lock);
        if (!in_flight) return true;
        look_for_errors(dev);
    }
    return false;
}

void fsdp__cuda_waiter_close(fsdp__cuda_device *dev)
{
    fsdp__cuda_waiter *w = dev->waiter;
    if (w == NULL) return;
    bool at_rest = come_to_rest(dev);
    for (int i = 0; i < PLACES; i++)
        if (w->places[i].stream != NULL && cudaStreamDestroy(w->places[i].stream) != cudaSuccess)
            (void)cudaGetLastError();
    dev->waiter = NULL;
    if (!at_rest) return; /* a leak, where freeing would let a host function write into freed memory */
    pthread_cond_destroy(&w->changed);
    pthread_mutex_destroy(&w->lock);
    fsdp__host_free(dev->host, w, 1, sizeof *w);
}

void fsdp__cuda_waiter_wake(fsdp__cuda_waiter *w)
{
    pthread_mutex_lock(&w->lock);
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
}

/* The host function, on a thread of CUDA's. */
static void CUDART_CB wake(void *place_)
{
    place *p = place_;
    fsdp__cuda_waiter *w = p->waiter;
    pthread_mutex_lock(&w->lock);
    p->in_flight = false;
    p->woken = true;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
}

/* A place that will be woken by the event; NULL: none is free. */
static fsdp_status take_place(fsdp__cuda_device *dev, cudaEvent_t event, place **out_place)
{
    fsdp__cuda_waiter *w = dev->waiter;
    place *p = NULL;
    pthread_mutex_lock(&w->lock);
    for (int i = PLACES; i-- > 0;)
        if (!w->places[i].taken && !w->places[i].in_flight) p = &w->places[i];
    if (p != NULL) {
        p->taken = p->in_flight = true;
        p->woken = false;
    }
    pthread_mutex_unlock(&w->lock);
    *out_place = p;
    if (p == NULL) return FSDP_OK;
    cudaError_t error = cudaSuccess;
    if (p->stream == NULL) error = cudaStreamCreateWithFlags(&p->stream, cudaStreamNonBlocking);
    if (error == cudaSuccess) error = cudaStreamWaitEvent(p->stream, event, 0);
    if (error == cudaSuccess) error = cudaLaunchHostFunc(p->stream, wake, p);
    if (error == cudaSuccess) return FSDP_OK;
    pthread_mutex_lock(&w->lock);
    p->taken = p->in_flight = false;
    pthread_mutex_unlock(&w->lock);
    *out_place = NULL;
    return fsdp__cuda_fail(dev, error, "cudaLaunchHostFunc after an event that the host waits for");
}

static void give_place(fsdp__cuda_waiter *w, place *p)
{
    if (p == NULL) return;
    pthread_mutex_lock(&w->lock);
    p->taken = false;
    pthread_mutex_unlock(&w->lock);
}

/* FSDP_OK and *out_done, or the device's error. */
static fsdp_status ask(fsdp__cuda_device *dev, cudaEvent_t event, bool *out_done)
{
    cudaError_t error = fsdp__cuda_asked(cudaEventQuery(event));
    *out_done = error == cudaSuccess;
    if (error == cudaErrorNotReady) return FSDP_OK;
    return fsdp__cuda_fail(dev, error, "cudaEventQuery of an event that the host waits for");
}

static fsdp_status late(uint64_t timeout_ns)
{
    return fsdp__fail(FSDP_ERR_TIMEOUT, "the GPU has not come to the event after %.3f s", (double)timeout_ns * 1e-9);
}

typedef struct waiting {
    cudaEvent_t event;
    uint64_t timeout_ns, deadline_ns;
    bool to_the_end; /* an abort does not end it */
} waiting;

static bool is_over(const fsdp__cuda_device *dev, const waiting *w)
{
    return atomic_load(&dev->broken) || (!w->to_the_end && atomic_load(&dev->status) != FSDP_OK);
}

static fsdp_status spin(fsdp__cuda_device *dev, const waiting *w, bool *out_done)
{
    uint64_t end_ns = fsdp__cuda_after_ns(dev->spin_ns);
    if (end_ns > w->deadline_ns) end_ns = w->deadline_ns;
    do {
        FSDP_TRY(ask(dev, w->event, out_done));
        if (*out_done) return FSDP_OK;
        if (is_over(dev, w)) return fsdp__cuda_check(dev);
    } while (fsdp__cuda_now_ns() < end_ns);
    return FSDP_OK;
}

/* Until the place is woken, the device's status changes, or it is time to look. */
static bool sleep_in(fsdp__cuda_device *dev, const place *p, const waiting *w)
{
    fsdp__cuda_waiter *waiter = dev->waiter;
    uint64_t until_ns = fsdp__cuda_after_ns(p != NULL ? LOOK_NS : NO_PLACE_NS);
    if (until_ns > w->deadline_ns) until_ns = w->deadline_ns;
    pthread_mutex_lock(&waiter->lock);
    while (!(p != NULL && p->woken) && !is_over(dev, w) && sleep_until(waiter, until_ns)) {
    }
    bool woken = p != NULL && p->woken;
    pthread_mutex_unlock(&waiter->lock);
    return woken;
}

static fsdp_status sleep_for(fsdp__cuda_device *dev, const waiting *w)
{
    place *p;
    FSDP_TRY(take_place(dev, w->event, &p));
    fsdp_status status = FSDP_OK;
    for (bool done = false; !done;) {
        done = sleep_in(dev, p, w); /* the host function has run: so it is, even if another record followed */
        if (!done) status = ask(dev, w->event, &done);
        if (done || status != FSDP_OK) break;
        if (is_over(dev, w)) status = fsdp__cuda_check(dev);
        else if (fsdp__cuda_now_ns() >= w->deadline_ns) status = late(w->timeout_ns);
        if (status != FSDP_OK) break;
    }
    give_place(dev->waiter, p);
    return status;
}

static fsdp_status wait_for(fsdp__cuda_device *dev, const waiting *w)
{
    bool done = false;
    int before = fsdp__cuda_enter(dev);
    enum cudaStreamCaptureMode mode = fsdp__cuda_relax();
    fsdp_status status = spin(dev, w, &done);
    if (status == FSDP_OK && !done)
        status = fsdp__cuda_now_ns() >= w->deadline_ns ? late(w->timeout_ns) : sleep_for(dev, w);
    fsdp__cuda_unrelax(mode);
    fsdp__cuda_leave(before);
    return status;
}

fsdp_status fsdp__cuda_wait_host(fsdp__cuda_device *dev, cudaEvent_t event, uint64_t timeout_ns)
{
    FSDP_TRY(fsdp__cuda_check(dev));
    return wait_for(dev, &(waiting){event, timeout_ns, fsdp__cuda_after_ns(timeout_ns), false});
}

fsdp_status fsdp__cuda_wait_end(fsdp__cuda_device *dev, cudaEvent_t event, uint64_t timeout_ns)
{
    if (atomic_load(&dev->broken)) return FSDP_OK;
    fsdp_status status = wait_for(dev, &(waiting){event, timeout_ns, fsdp__cuda_after_ns(timeout_ns), true});
    return atomic_load(&dev->broken) ? FSDP_OK : status;
}

static fsdp_status wait_idle(fsdp__cuda_stream *s, uint64_t timeout_ns)
{
    fsdp__cuda_device *dev = s->dev;
    if (fsdp__cuda_is_capturing(s->native))
        return fsdp__fail(FSDP_ERR_STATE, "stream %s is capturing: the host cannot wait for it", s->name);
    cudaError_t error = fsdp__cuda_asked(cudaStreamQuery(s->native));
    if (error == cudaSuccess) return FSDP_OK;
    if (error != cudaErrorNotReady) return fsdp__cuda_fail(dev, error, "cudaStreamQuery of %s", s->name);
    cudaEvent_t event;
    FSDP__CUDA_TRY(dev, cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    error = cudaEventRecord(event, s->native);
    fsdp_status status = fsdp__cuda_fail(dev, error, "cudaEventRecord on %s", s->name);
    if (status == FSDP_OK) status = fsdp__cuda_wait_end(dev, event, timeout_ns);
    if (cudaEventDestroy(event) != cudaSuccess) (void)cudaGetLastError();
    if (status == FSDP_ERR_TIMEOUT)
        return fsdp__fail(FSDP_ERR_TIMEOUT, "stream %s is not idle after %.3f s", s->name, (double)timeout_ns * 1e-9);
    return status;
}

fsdp_status fsdp__cuda_wait_idle(fsdp__cuda_stream *s, uint64_t timeout_ns)
{
    if (atomic_load(&s->dev->broken)) return FSDP_OK;
    enum cudaStreamCaptureMode mode = fsdp__cuda_relax();
    fsdp_status status = wait_idle(s, timeout_ns);
    fsdp__cuda_unrelax(mode);
    return atomic_load(&s->dev->broken) ? FSDP_OK : status;
}
