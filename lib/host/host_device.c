/* SPDX-License-Identifier: MIT */
/* Memory, events, the first error, and the table. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include "check.h"
#include "host.h"
#include "hostmem.h"

enum { PAGE = 4096 }; /* alignment and granularity; a multiple of it on machines with larger pages */

static fsdp_status device_open(const fsdp_device_args *args, void **out_dev, fsdp_device_caps *out_caps)
{
    fsdp__host_setup setup;
    FSDP_TRY(fsdp__host_setup_read(args->backend_config, &setup));
    fsdp__host_device *dev = fsdp__host_alloc(args->host, 1, sizeof *dev);
    if (dev == NULL)
        return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "host device: no host memory for %zu bytes", sizeof *dev);
    fsdp_status status = fsdp__memory_open(&dev->memory, args->host, setup.processes);
    if (status != FSDP_OK) {
        fsdp__host_free(args->host, dev, 1, sizeof *dev);
        return status;
    }
    dev->host = args->host;
    dev->debug = args->debug;
    dev->rank = setup.rank;
    dev->jitter_ns = setup.config.jitter_ns;
    dev->jitter_seed = setup.config.jitter_seed;
    dev->log = args->log;
    dev->log_arg = args->log_arg;
    atomic_flag_clear(&dev->warned);
    pthread_mutex_init(&dev->lock, NULL);
    fsdp__cond_init(&dev->failed);
    *out_caps = (fsdp_device_caps){
        .size = sizeof *out_caps, .alignment = PAGE, .granularity = PAGE, .has_data = true, .can_host_call = true};
    *out_dev = dev;
    return FSDP_OK;
}

static void device_close(void *dev_)
{
    fsdp__host_device *dev = dev_;
    assert(dev->n_streams == 0 && dev->n_events == 0 && dev->attached == NULL);
    while (dev->points != NULL) {
        fsdp__point *point = dev->points;
        assert(point->refs == 0);
        dev->points = point->next_made;
        pthread_cond_destroy(&point->cond);
        fsdp__host_free(dev->host, point, 1, sizeof *point);
    }
    fsdp__memory_close(&dev->memory);
    pthread_cond_destroy(&dev->failed);
    pthread_mutex_destroy(&dev->lock);
    fsdp__host_free(dev->host, dev, 1, sizeof *dev);
}

/* ---- Memory ---- */

/* Page-locked, as a device that copies by itself would need it. Where the process may not, the memory works all the same
 * for this backend; only the promise that no page is ever away is gone, and that is said once. */
static void lock_pages(fsdp__host_device *dev, void *ptr, uint64_t bytes)
{
    if (mlock(ptr, bytes) == 0) return;
    int error = errno;
    if (dev->log == NULL || atomic_flag_test_and_set(&dev->warned)) return;
    struct rlimit limit = {0, 0};
    getrlimit(RLIMIT_MEMLOCK, &limit);
    char text[256];
    snprintf(
        text, sizeof text,
        "rank %u: %llu bytes of pinned memory are not page-locked (mlock: error %d; RLIMIT_MEMLOCK is %llu bytes): "
        "it works, and may be paged out",
        dev->rank, (unsigned long long)bytes, error, (unsigned long long)limit.rlim_cur);
    dev->log(dev->log_arg, text);
}

static fsdp_status mem_alloc(void *dev_, uint64_t bytes, fsdp_memory_kind kind, void **out_ptr)
{
    fsdp__host_device *dev = dev_;
    bool pinned = kind == FSDP_MEMORY_KIND_PINNED;
    FSDP_TRY(fsdp__memory_take(&dev->memory, bytes, pinned, out_ptr));
    if (pinned) lock_pages(dev, *out_ptr, bytes);
    return FSDP_OK;
}

static void mem_free(void *dev, void *ptr, uint64_t bytes, fsdp_memory_kind kind)
{
    (void)kind;
    fsdp__memory_give(&((fsdp__host_device *)dev)->memory, ptr, bytes); /* unlocks, too */
}

/* ---- The first error ---- */

/* With the lock held. Everybody who waits for a point or sleeps looks at the status again. */
static void fail_locked(fsdp__host_device *dev, fsdp_status status, const char *sentence)
{
    if (atomic_load(&dev->status) != FSDP_OK) return;
    snprintf(dev->sentence, sizeof dev->sentence, "%s", sentence);
    atomic_store(&dev->status, status);
    pthread_cond_broadcast(&dev->failed);
    for (fsdp__point *point = dev->points; point != NULL; point = point->next_made)
        pthread_cond_broadcast(&point->cond);
}

void fsdp__host_device_fail(fsdp__host_device *dev, fsdp_status status, const char *sentence)
{
    pthread_mutex_lock(&dev->lock);
    fail_locked(dev, status, sentence);
    pthread_mutex_unlock(&dev->lock);
}

/* The sentence is written before the status and never again, so it needs no lock. */
fsdp_status fsdp__host_device_check(void *dev_)
{
    fsdp__host_device *dev = dev_;
    fsdp_status status = (fsdp_status)atomic_load(&dev->status);
    return status == FSDP_OK ? FSDP_OK : fsdp__fail(status, "%s", dev->sentence);
}

static void device_abort(void *dev_)
{
    fsdp__host_device *dev = dev_;
    char sentence[64];
    snprintf(sentence, sizeof sentence, "rank %u: the device was aborted", dev->rank);
    pthread_mutex_lock(&dev->lock);
    fail_locked(dev, FSDP_ERR_ABORTED, sentence);
    for (fsdp__attached *a = dev->attached; a != NULL; a = a->next) a->abort(a->arg);
    pthread_mutex_unlock(&dev->lock);
}

void fsdp__host_attach(fsdp__host_device *dev, fsdp__attached *attached)
{
    pthread_mutex_lock(&dev->lock);
    attached->next = dev->attached;
    dev->attached = attached;
    pthread_mutex_unlock(&dev->lock);
}

void fsdp__host_detach(fsdp__host_device *dev, fsdp__attached *attached)
{
    pthread_mutex_lock(&dev->lock);
    fsdp__attached **link = &dev->attached;
    while (*link != attached) link = &(*link)->next;
    *link = attached->next;
    pthread_mutex_unlock(&dev->lock);
}

/* ---- Events ---- */

/* With refs references, not reached. Points are used again, so that a warm step allocates nothing. */
static fsdp__point *point_take(fsdp__host_device *dev, uint32_t refs)
{
    fsdp__point *point = dev->free_points;
    if (point != NULL) {
        dev->free_points = point->next_free;
    } else {
        point = fsdp__host_alloc(dev->host, 1, sizeof *point);
        if (point == NULL) return NULL;
        fsdp__cond_init(&point->cond);
        point->next_made = dev->points;
        dev->points = point;
    }
    point->reached = point->skipped = false;
    point->refs = refs;
    return point;
}

void fsdp__point_release(fsdp__host_device *dev, fsdp__point *point)
{
    if (point == NULL) return;
    assert(point->refs > 0);
    if (--point->refs > 0) return;
    point->next_free = dev->free_points;
    dev->free_points = point;
}

typedef struct event {
    fsdp__point *point; /* of its last record; NULL before the first */
} event;

static fsdp_status event_create(void *dev_, void **out_event)
{
    fsdp__host_device *dev = dev_;
    event *e = fsdp__host_alloc(dev->host, 1, sizeof *e);
    if (e == NULL) return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "event: no host memory for %zu bytes", sizeof *e);
    pthread_mutex_lock(&dev->lock);
    dev->n_events++;
    pthread_mutex_unlock(&dev->lock);
    *out_event = e;
    return FSDP_OK;
}

static void event_destroy(void *dev_, void *event_)
{
    fsdp__host_device *dev = dev_;
    event *e = event_;
    pthread_mutex_lock(&dev->lock);
    fsdp__point_release(dev, e->point);
    dev->n_events--;
    pthread_mutex_unlock(&dev->lock);
    fsdp__host_free(dev->host, e, 1, sizeof *e);
}

static fsdp_status event_record(void *dev_, void *event_, void *stream, fsdp_span *span)
{
    fsdp__host_device *dev = dev_;
    event *e = event_;
    pthread_mutex_lock(&dev->lock);
    fsdp__point *point = point_take(dev, 2), *before = e->point;
    fsdp_status status;
    bool enqueued = false;
    if (point == NULL) {
        status = fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "event record: no host memory for %zu bytes", sizeof *point);
        goto unlock;
    }
    e->point = point;
    status =
        fsdp__host_push(stream, &(fsdp__item){.kind = FSDP__ITEM_RECORD, .span = span, .u.point = point}, &enqueued);
    if (enqueued) {
        fsdp__point_release(dev, before);
        goto unlock;
    }
    e->point = before;
    fsdp__point_release(dev, point);
    fsdp__point_release(dev, point);
unlock:
    pthread_mutex_unlock(&dev->lock);
    return status;
}

static fsdp_status stream_wait(void *dev_, void *stream, void *event_, fsdp_span *span)
{
    fsdp__host_device *dev = dev_;
    pthread_mutex_lock(&dev->lock);
    fsdp__point *point = ((event *)event_)->point;
    if (point != NULL) point->refs++;
    bool enqueued;
    fsdp_status status =
        fsdp__host_push(stream, &(fsdp__item){.kind = FSDP__ITEM_WAIT, .span = span, .u.point = point}, &enqueued);
    if (!enqueued) fsdp__point_release(dev, point);
    pthread_mutex_unlock(&dev->lock);
    return status;
}

static fsdp_status event_query(void *dev_, void *event_, bool *out_done)
{
    fsdp__host_device *dev = dev_;
    pthread_mutex_lock(&dev->lock);
    const fsdp__point *point = ((event *)event_)->point;
    bool never_recorded = point == NULL, done = !never_recorded && point->reached && !point->skipped;
    pthread_mutex_unlock(&dev->lock);
    /* What happened before the device failed has happened: a flight recorder asks afterwards. */
    if (!done) FSDP_TRY(fsdp__host_device_check(dev));
    *out_done = done || never_recorded;
    return FSDP_OK;
}

static fsdp_status event_wait(void *dev_, void *event_, uint64_t timeout_ns)
{
    fsdp__host_device *dev = dev_;
    uint64_t deadline_ns = fsdp__after_ns(timeout_ns);
    bool reached = true;
    pthread_mutex_lock(&dev->lock);
    fsdp__point *point = ((event *)event_)->point;
    if (point != NULL) {
        point->refs++;
        while (!point->reached && atomic_load(&dev->status) == FSDP_OK &&
               fsdp__cond_until(&point->cond, &dev->lock, deadline_ns)) {
        }
        reached = point->reached;
        fsdp__point_release(dev, point);
    }
    pthread_mutex_unlock(&dev->lock);
    FSDP_TRY(fsdp__host_device_check(dev));
    if (!reached) return fsdp__fail(FSDP_ERR_TIMEOUT, "event has not happened after %.3f s", (double)timeout_ns * 1e-9);
    return FSDP_OK;
}

/* ---- Operations ---- */

static fsdp_status launch(void *dev_, void *stream, const fsdp_device_op *op, fsdp_span *span)
{
    fsdp__host_device *dev = dev_;
    if (op->kind < FSDP_OPERATION_COPY || op->kind > FSDP_OPERATION_STEP_INPUT)
        return fsdp__fail(FSDP_ERR_UNSUPPORTED, "host device: operation %d is none of a stream's", (int)op->kind);
    bool enqueued;
    pthread_mutex_lock(&dev->lock);
    fsdp_status status =
        fsdp__host_push(stream, &(fsdp__item){.kind = FSDP__ITEM_OPERATION, .span = span, .u.op = *op}, &enqueued);
    pthread_mutex_unlock(&dev->lock);
    return status;
}

static uint64_t now_ns(void *dev)
{
    (void)dev;
    return fsdp__now_ns();
}

static const fsdp_device_ops device_ops = {
    .size = sizeof device_ops,
    .name = "host",
    .open = device_open,
    .close = device_close,
    .mem_alloc = mem_alloc,
    .mem_free = mem_free,
    .stream_create = fsdp__host_stream_create,
    .stream_destroy = fsdp__host_stream_destroy,
    .stream_drain = fsdp__host_stream_drain,
    .event_create = event_create,
    .event_destroy = event_destroy,
    .event_record = event_record,
    .stream_wait = stream_wait,
    .event_query = event_query,
    .event_wait = event_wait,
    .launch = launch,
    .check = fsdp__host_device_check,
    .abort = device_abort,
    .now_ns = now_ns,
};

static const fsdp_backend backend = {
    .size = sizeof backend,
    .name = "host",
    .device = &device_ops,
    .comm = &fsdp__host_comm_ops,
    .side = &fsdp__host_side_ops,
};

const fsdp_backend *fsdp_host_backend(void) { return &backend; }
