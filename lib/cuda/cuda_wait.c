/* SPDX-License-Identifier: MIT */
/* Blocking the host. Asking again and again for spin_ns; then asleep for a moment at a time, asking in between. The moments are
 * short because CUDA's own ways to be woken are slow (on an H200 in a virtual machine: a host function 130 to 450 us after the
 * event, this 5 to 40), and they grow with a wait that lasts for seconds, where nobody minds a thousandth. A stream that is
 * waited for gets nothing. An abort wakes all sleepers. */
#include <errno.h>
#include <sys/prctl.h>

#include "cuda_backend.h"
#include "hostmem.h"

static const uint64_t NAP_NS = 20000, LONGEST_NAP_NS = 1000000;
enum { NAPS_OF_A_WAIT = 50000 }; /* a nap is at least this part of the wait so far: from the second second on */

struct fsdp__cuda_waiter {
    pthread_mutex_t lock; /* never held in a call of CUDA */
    pthread_cond_t changed;
};

fsdp_status fsdp__cuda_waiter_open(fsdp__cuda_device *dev)
{
    fsdp__cuda_waiter *w = fsdp__host_alloc(dev->host, 1, sizeof *w);
    if (w == NULL) return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "CUDA device: no host memory for %zu bytes", sizeof *w);
    fsdp__cond_init(&w->changed);
    pthread_mutex_init(&w->lock, NULL);
    dev->waiter = w;
    return FSDP_OK;
}

void fsdp__cuda_waiter_close(fsdp__cuda_device *dev)
{
    fsdp__cuda_waiter *w = dev->waiter;
    if (w == NULL) return;
    dev->waiter = NULL;
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

typedef struct waiting {
    cudaEvent_t event;
    uint64_t timeout_ns, deadline_ns;
    bool to_the_end;     /* an abort does not end it */
    cudaStream_t stream; /* until this one is idle, where event is NULL */
} waiting;

/* FSDP_OK and *out_done, or the device's error. */
static fsdp_status ask(fsdp__cuda_device *dev, const waiting *w, bool *out_done)
{
    cudaError_t error = fsdp__cuda_asked(w->event != NULL ? cudaEventQuery(w->event) : cudaStreamQuery(w->stream));
    *out_done = error == cudaSuccess;
    if (error == cudaErrorNotReady) return FSDP_OK;
    return fsdp__cuda_fail(dev, error, "%s that the host waits for",
                           w->event != NULL ? "cudaEventQuery of an event" : "cudaStreamQuery of a stream");
}

static fsdp_status late(uint64_t timeout_ns)
{
    return fsdp__fail(FSDP_ERR_TIMEOUT, "the GPU has not come to the event after %.3f s", (double)timeout_ns * 1e-9);
}

static bool is_over(const fsdp__cuda_device *dev, const waiting *w)
{
    return atomic_load(&dev->broken) || (!w->to_the_end && atomic_load(&dev->status) != FSDP_OK);
}

static uint64_t nap_of(uint64_t waited_ns)
{
    uint64_t nap_ns = waited_ns / NAPS_OF_A_WAIT;
    return nap_ns < NAP_NS ? NAP_NS : nap_ns < LONGEST_NAP_NS ? nap_ns : LONGEST_NAP_NS;
}

static void nap_until(fsdp__cuda_device *dev, const waiting *w, uint64_t until_ns)
{
    pthread_mutex_lock(&dev->waiter->lock);
    while (!is_over(dev, w) && fsdp__cond_until(&dev->waiter->changed, &dev->waiter->lock, until_ns)) {
    }
    pthread_mutex_unlock(&dev->waiter->lock);
}

static fsdp_status ask_and_nap(fsdp__cuda_device *dev, const waiting *w)
{
    uint64_t start_ns = fsdp__now_ns(), spin_end_ns = fsdp__after_ns(dev->spin_ns);
    for (;;) {
        bool done;
        FSDP_TRY(ask(dev, w, &done));
        if (done) return FSDP_OK;
        if (is_over(dev, w)) return fsdp__cuda_check(dev);
        uint64_t now_ns = fsdp__now_ns();
        if (now_ns >= w->deadline_ns) return late(w->timeout_ns);
        if (now_ns < spin_end_ns) continue;
        uint64_t until_ns = now_ns + nap_of(now_ns - start_ns);
        nap_until(dev, w, until_ns < w->deadline_ns ? until_ns : w->deadline_ns);
    }
}

/* The kernel may put the end of a nap off by the thread's timer slack, 50 us unless somebody has set it: not here. */
static fsdp_status wait_for(fsdp__cuda_device *dev, const waiting *w)
{
    fsdp__cuda_inside inside = fsdp__cuda_enter_relaxed(dev);
    int slack_ns = prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0);
    if (slack_ns > 0) (void)prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
    fsdp_status status = ask_and_nap(dev, w);
    if (slack_ns > 0) (void)prctl(PR_SET_TIMERSLACK, slack_ns, 0, 0, 0);
    fsdp__cuda_leave_relaxed(inside);
    return status;
}

fsdp_status fsdp__cuda_wait_host(fsdp__cuda_device *dev, cudaEvent_t event, uint64_t timeout_ns)
{
    FSDP_TRY(fsdp__cuda_check(dev));
    return wait_for(dev, &(waiting){event, timeout_ns, fsdp__after_ns(timeout_ns), false, NULL});
}

/* An event's if there is one, else the stream's. */
static fsdp_status wait_end(fsdp__cuda_device *dev, cudaEvent_t event, cudaStream_t stream, uint64_t timeout_ns)
{
    if (atomic_load(&dev->broken)) return FSDP_OK;
    fsdp_status status = wait_for(dev, &(waiting){event, timeout_ns, fsdp__after_ns(timeout_ns), true, stream});
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
    /* Others may give it more meanwhile. Where CUDA has no memory for an event, they are waited for, too: whoever gets an
     * answer gives back what the stream uses. */
    cudaEvent_t event = NULL;
    error = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    if (error == cudaSuccess && (error = cudaEventRecord(event, s->native)) != cudaSuccess) {
        (void)cudaEventDestroy(event);
        event = NULL;
    }
    fsdp_status status = fsdp__cuda_fail(dev, error, "an event on %s", s->name);
    if (status == FSDP_OK || status == FSDP_ERR_NO_MEMORY) status = wait_end(dev, event, s->native, timeout_ns);
    if (event != NULL && cudaEventDestroy(event) != cudaSuccess) (void)cudaGetLastError();
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
