/* SPDX-License-Identifier: MIT */
/* A stream is one thread that runs its queue in order. Never a pool: a pool with fewer threads than streams would stand
 * still in the first collective. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>

#include "check.h"
#include "hash.h"
#include "host.h"
#include "hostmem.h"
#include "thread.h"

enum { FIRST_CAPACITY = 64 };

static bool has_failed(const fsdp__host_device *dev) { return atomic_load(&dev->status) != FSDP_OK; }

/* Until deadline_ns or the device's first error. With the lock held. */
static void sleep_until(fsdp__host_device *dev, uint64_t deadline_ns)
{
    while (!has_failed(dev) && fsdp__cond_until(&dev->failed, &dev->lock, deadline_ns)) {
    }
}

/* A function of (seed, rank, stream, operation) alone, so that a schedule that fails can be run again. */
static void jitter(const fsdp__host_stream *s, uint64_t number)
{
    fsdp__host_device *dev = s->dev;
    if (dev->jitter_ns == 0) return;
    uint64_t random = fsdp__mix(fsdp__mix(fsdp__mix(dev->jitter_seed ^ fsdp__mix(dev->rank)) ^ s->number) ^ number);
    if (random & 1) return;
    sleep_until(dev, fsdp__after_ns((random >> 1) % dev->jitter_ns));
}

static uint64_t span_start(const fsdp_span *span) { return span != NULL ? fsdp__now_ns() : 0; }

static void span_end(fsdp_span *span, uint64_t start_ns)
{
    if (span != NULL) *span = (fsdp_span){start_ns, fsdp__now_ns()};
}

static void run_wait(fsdp__host_device *dev, const fsdp__item *item)
{
    fsdp__point *point = item->u.point;
    uint64_t start_ns = span_start(item->span);
    while (point != NULL && !point->reached && !has_failed(dev)) pthread_cond_wait(&point->cond, &dev->lock);
    if (!has_failed(dev)) span_end(item->span, start_ns);
    fsdp__point_release(dev, point);
}

/* Fires on a failed device too, so that nobody waits for it in vain. */
static void run_record(fsdp__host_device *dev, const fsdp__item *item)
{
    if (!has_failed(dev) && item->span != NULL) item->span->start_ns = item->span->end_ns = fsdp__now_ns();
    item->u.point->reached = true;
    item->u.point->skipped = has_failed(dev);
    pthread_cond_broadcast(&item->u.point->cond);
    fsdp__point_release(dev, item->u.point);
}

static void run_operation(fsdp__host_device *dev, const fsdp__item *item)
{
    if (has_failed(dev)) return;
    uint64_t start_ns = span_start(item->span);
    if (item->u.op.kind == FSDP_OPERATION_DELAY) {
        sleep_until(dev, fsdp__after_ns(item->u.op.u.delay.ns));
        if (has_failed(dev)) return;
    } else {
        pthread_mutex_unlock(&dev->lock);
        fsdp__host_kernel(&item->u.op);
        pthread_mutex_lock(&dev->lock);
    }
    span_end(item->span, start_ns);
}

static void run_call(fsdp__host_device *dev, const fsdp__item *item)
{
    bool skip = has_failed(dev);
    pthread_mutex_unlock(&dev->lock);
    fsdp_status status = item->u.call.run(item->u.call.arg, skip);
    if (status != FSDP_OK) fsdp__host_device_fail(dev, status, fsdp_last_error());
    pthread_mutex_lock(&dev->lock);
}

static void *stream_main(void *arg)
{
    fsdp__host_stream *s = arg;
    fsdp__host_device *dev = s->dev;
    /* Sleeps of this thread may end 1 ns late instead of 50 us: delays and links are measured in microseconds. */
    prctl(PR_SET_TIMERSLACK, 1ul, 0ul, 0ul, 0ul);
    pthread_mutex_lock(&dev->lock);
    for (;;) {
        while (s->head == s->tail && !s->stopping) pthread_cond_wait(&s->work, &dev->lock);
        if (s->head == s->tail) break;
        /* A copy: the ring may move while the item runs. */
        const fsdp__item item = s->ring[s->head & (s->capacity - 1)];
        uint64_t number = s->head++;
        s->running = true;
        jitter(s, number);
        switch (item.kind) {
        case FSDP__ITEM_OPERATION: run_operation(dev, &item); break;
        case FSDP__ITEM_RECORD: run_record(dev, &item); break;
        case FSDP__ITEM_WAIT: run_wait(dev, &item); break;
        case FSDP__ITEM_CALL: run_call(dev, &item); break;
        }
        s->running = false;
        if (s->head == s->tail) pthread_cond_broadcast(&s->idle);
    }
    pthread_mutex_unlock(&dev->lock);
    return NULL;
}

static int start_thread(fsdp__host_stream *s, const char *name)
{
    int error = fsdp__thread_start(&s->thread, NULL, stream_main, s);
    if (error != 0) return error;
    char short_name[16] = {0}; /* what Linux keeps of a thread's name */
    strncpy(short_name, name, sizeof short_name - 1);
    pthread_setname_np(s->thread, short_name);
    return 0;
}

static void free_stream(fsdp__host_stream *s)
{
    const fsdp_host_allocator *host = s->dev->host;
    pthread_cond_destroy(&s->work);
    pthread_cond_destroy(&s->idle);
    fsdp__host_free(host, s->ring, s->capacity, sizeof *s->ring);
    fsdp__host_free(host, s, 1, sizeof *s);
}

fsdp_status fsdp__host_stream_create(void *dev_, const char *name, bool high_priority, void **out_stream)
{
    (void)high_priority; /* threads of one process share the machine evenly */
    fsdp__host_device *dev = dev_;
    fsdp__host_stream *s = fsdp__host_alloc(dev->host, 1, sizeof *s);
    if (s == NULL)
        return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "stream %s: no host memory for %zu bytes", name, sizeof *s);
    s->dev = dev;
    snprintf(s->name, sizeof s->name, "%s", name);
    fsdp__cond_init(&s->work);
    fsdp__cond_init(&s->idle);
    s->ring = fsdp__host_alloc(dev->host, FIRST_CAPACITY, sizeof *s->ring);
    if (s->ring == NULL) {
        free_stream(s);
        return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "stream %s: no host memory for a queue of %d operations", name,
                          FIRST_CAPACITY);
    }
    s->capacity = FIRST_CAPACITY;
    pthread_mutex_lock(&dev->lock);
    s->number = dev->n_streams_made++;
    dev->n_streams++;
    pthread_mutex_unlock(&dev->lock);
    int error = start_thread(s, name);
    if (error != 0) {
        pthread_mutex_lock(&dev->lock);
        dev->n_streams--;
        pthread_mutex_unlock(&dev->lock);
        free_stream(s);
        return fsdp__fail(
            FSDP_ERR_DEVICE, "stream %s: pthread_create failed: error %d%s", name, error,
            error == EAGAIN ? " (EAGAIN: the limit on threads, ulimit -u, or no room for its stack, ulimit -v)" : "");
    }
    *out_stream = s;
    return FSDP_OK;
}

void fsdp__host_stream_destroy(void *dev_, void *stream)
{
    fsdp__host_device *dev = dev_;
    fsdp__host_stream *s = stream;
    pthread_mutex_lock(&dev->lock);
    s->stopping = true;
    pthread_cond_broadcast(&s->work);
    pthread_mutex_unlock(&dev->lock);
    pthread_join(s->thread, NULL);
    pthread_mutex_lock(&dev->lock);
    dev->n_streams--;
    pthread_mutex_unlock(&dev->lock);
    free_stream(s);
}

static bool is_idle(const fsdp__host_stream *s) { return s->head == s->tail && !s->running; }

/* Waits on a failed device too: what runs must have ended before its memory is freed. */
fsdp_status fsdp__host_stream_drain(void *dev_, void *stream, uint64_t timeout_ns)
{
    fsdp__host_device *dev = dev_;
    fsdp__host_stream *s = stream;
    uint64_t deadline_ns = fsdp__after_ns(timeout_ns);
    pthread_mutex_lock(&dev->lock);
    while (!is_idle(s) && fsdp__cond_until(&s->idle, &dev->lock, deadline_ns)) {
    }
    bool idle = is_idle(s);
    uint64_t left = s->tail - s->head;
    pthread_mutex_unlock(&dev->lock);
    if (!idle) /* first: whoever hears of another error may take it that nothing runs any more */
        return fsdp__fail(FSDP_ERR_TIMEOUT,
                          "stream %s is not idle after %.3f s: one operation runs, %llu more are enqueued", s->name,
                          (double)timeout_ns * 1e-9, (unsigned long long)left);
    return fsdp__host_device_check(dev);
}

/* The enqueuer never waits for room: the ring doubles. */
static bool make_room(fsdp__host_stream *s)
{
    if (s->tail - s->head < s->capacity) return true;
    fsdp__item *ring = fsdp__host_alloc(s->dev->host, s->capacity * 2, sizeof *ring);
    if (ring == NULL) return false;
    for (uint64_t i = s->head; i < s->tail; i++) ring[i & (s->capacity * 2 - 1)] = s->ring[i & (s->capacity - 1)];
    fsdp__host_free(s->dev->host, s->ring, s->capacity, sizeof *ring);
    s->ring = ring;
    s->capacity *= 2;
    return true;
}

fsdp_status fsdp__host_push(fsdp__host_stream *s, const fsdp__item *item, bool *out_enqueued)
{
    fsdp__host_device *dev = s->dev;
    *out_enqueued = false;
    if (has_failed(dev)) return fsdp__fail((fsdp_status)atomic_load(&dev->status), "%s", dev->sentence);
    if (!make_room(s))
        return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "stream's queue: no host memory to grow beyond %zu operations",
                          s->capacity);
    s->ring[s->tail++ & (s->capacity - 1)] = *item;
    *out_enqueued = true;
    if (!s->running) pthread_cond_broadcast(&s->work);
    if (!(dev->debug & FSDP_DEBUG_SYNC)) return FSDP_OK;
    while (!is_idle(s)) pthread_cond_wait(&s->idle, &dev->lock);
    if (has_failed(dev)) return fsdp__fail((fsdp_status)atomic_load(&dev->status), "%s", dev->sentence);
    return FSDP_OK;
}
