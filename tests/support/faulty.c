/* SPDX-License-Identifier: MIT */
/* See faulty.h. */
#include "faulty.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "host/host.h"

static const struct {
    const char *name;
    fsdp_status status[3];
} seams[FAULTY_SEAMS] = {
    [FAULTY_HOST_ALLOC] = {"host allocation", {FSDP_ERR_NO_HOST_MEMORY}},
    [FAULTY_DEVICE_OPEN] = {"device open", {FSDP_ERR_NO_HOST_MEMORY, FSDP_ERR_DEVICE}},
    [FAULTY_MEM_ALLOC] = {"mem_alloc", {FSDP_ERR_NO_MEMORY}}, /* NO_HOST_MEMORY, if pinned */
    [FAULTY_STREAM_CREATE] = {"stream_create", {FSDP_ERR_NO_HOST_MEMORY, FSDP_ERR_DEVICE}},
    [FAULTY_EVENT_CREATE] = {"event_create", {FSDP_ERR_NO_HOST_MEMORY, FSDP_ERR_DEVICE}},
    [FAULTY_RECORD] = {"event_record", {FSDP_ERR_NO_HOST_MEMORY, FSDP_ERR_DEVICE}},
    [FAULTY_WAIT] = {"stream_wait", {FSDP_ERR_NO_HOST_MEMORY, FSDP_ERR_DEVICE}},
    [FAULTY_LAUNCH] = {"launch", {FSDP_ERR_NO_HOST_MEMORY, FSDP_ERR_DEVICE}},
    [FAULTY_QUERY] = {"event_query", {FSDP_ERR_DEVICE}},
    [FAULTY_EVENT_WAIT] = {"event_wait", {FSDP_ERR_TIMEOUT, FSDP_ERR_DEVICE}},
    [FAULTY_DRAIN] = {"stream_drain", {FSDP_ERR_TIMEOUT, FSDP_ERR_DEVICE}},
    [FAULTY_COMM_OPEN] = {"communicator open", {FSDP_ERR_NO_HOST_MEMORY}},
    [FAULTY_ENQUEUE] = {"enqueue", {FSDP_ERR_NO_HOST_MEMORY, FSDP_ERR_RANK_LOST}},
    [FAULTY_ATTACH] = {"attach", {FSDP_ERR_NO_HOST_MEMORY}},
    [FAULTY_SIDE_OPEN] = {"side open", {FSDP_ERR_NO_HOST_MEMORY, FSDP_ERR_RANK_LOST}},
    [FAULTY_ALL_GATHER] = {"side all_gather", {FSDP_ERR_RANK_LOST}},
    [FAULTY_BROADCAST] = {"side broadcast", {FSDP_ERR_RANK_LOST}},
};

const char *faulty_seam_name(faulty_seam seam) { return seams[seam].name; }
fsdp_status faulty_status(faulty_seam seam, uint32_t k) { return k < 3 ? seams[seam].status[k] : FSDP_OK; }

void faulty_init(faulty *f, const fsdp_backend *inner, const void *inner_config)
{
    *f = (faulty){.to = {inner, inner_config}};
    pthread_mutex_init(&f->lock, NULL);
}

void faulty_fini(faulty *f) { pthread_mutex_destroy(&f->lock); }

void faulty_arm(faulty *f, faulty_seam seam, fsdp_status status, uint64_t nth, bool for_good)
{
    pthread_mutex_lock(&f->lock);
    f->seam = seam, f->status = status, f->nth = nth, f->for_good = for_good;
    f->n_seen = f->n_failed = 0;
    pthread_mutex_unlock(&f->lock);
}

uint64_t faulty_n_failed(faulty *f)
{
    pthread_mutex_lock(&f->lock);
    uint64_t n = f->n_failed;
    pthread_mutex_unlock(&f->lock);
    return n;
}

const char *faulty_live(faulty *f)
{
    pthread_mutex_lock(&f->lock);
    const char *what = f->host_bytes != 0     ? "host memory"
                       : f->device_bytes != 0 ? "device memory"
                       : f->pinned_bytes != 0 ? "pinned memory"
                       : f->n_objects != 0    ? "streams, events, devices or channels"
                                              : "";
    pthread_mutex_unlock(&f->lock);
    return what;
}

/* True if this operation is to fail; *out_number: which it is. */
static bool fails(faulty *f, faulty_seam seam, uint64_t *out_number)
{
    pthread_mutex_lock(&f->lock);
    bool failing = false;
    if (f->nth > 0 && f->seam == seam) {
        *out_number = ++f->n_seen;
        failing = f->n_seen == f->nth || (f->for_good && f->n_seen > f->nth);
        f->n_failed += failing;
    }
    pthread_mutex_unlock(&f->lock);
    return failing;
}

static fsdp_status refuse(const faulty *f, fsdp_status status, uint64_t number)
{
    return fsdp_backend_fail(status, "%s %llu was made to fail: no %s", seams[f->seam].name, (unsigned long long)number,
                             status == FSDP_ERR_NO_HOST_MEMORY ? "host memory"
                             : status == FSDP_ERR_NO_MEMORY    ? "device memory"
                                                               : "answer");
}

static void count(faulty *f, int64_t *counter, int64_t n)
{
    pthread_mutex_lock(&f->lock);
    *counter += n;
    pthread_mutex_unlock(&f->lock);
}

/* ---- Host memory ---- */

static void *host_alloc(void *arg, size_t bytes, size_t alignment)
{
    faulty *f = arg;
    uint64_t number;
    if (fails(f, FAULTY_HOST_ALLOC, &number)) return NULL;
    count(f, &f->host_bytes, (int64_t)bytes);
    return aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}

static void host_free(void *arg, void *ptr, size_t bytes, size_t alignment)
{
    faulty *f = arg;
    (void)alignment;
    memset(ptr, 0x5a, bytes); /* what is used after it shows */
    count(f, &f->host_bytes, -(int64_t)bytes);
    free(ptr);
}

fsdp_host_allocator faulty_host(faulty *f) { return (fsdp_host_allocator){host_alloc, host_free, f, NULL}; }

/* ---- Device ---- */

static faulty *faulty_of(const void *object) { return (faulty *)((const forwarded *)object)->to; }

static fsdp_status device_open(const fsdp_device_args *args, void **out_dev, fsdp_device_caps *out_caps)
{
    faulty *f = (faulty *)args->backend_config;
    uint64_t number;
    if (fails(f, FAULTY_DEVICE_OPEN, &number)) return refuse(f, f->status, number);
    fsdp_status status = forward_device_ops.open(args, out_dev, out_caps);
    if (status == FSDP_OK) count(f, &f->n_objects, 1);
    return status;
}

static void device_close(void *dev)
{
    faulty *f = faulty_of(dev);
    forward_device_ops.close(dev);
    count(f, &f->n_objects, -1);
}

/* The device is broken, if that is what is wanted: the host backend as by an operation of its own. */
static fsdp_status refuse_and_break(void *dev, uint64_t number)
{
    const faulty *f = faulty_of(dev);
    fsdp_status status = refuse(f, f->status, number);
    if (status != FSDP_ERR_DEVICE) return status;
    char sentence[256];
    snprintf(sentence, sizeof sentence, "%s", fsdp_last_error());
    if (f->to.inner == fsdp_host_backend()) fsdp__host_device_fail(((forwarded *)dev)->inner, status, sentence);
    else forward_device_ops.abort(dev);
    return forward_device_ops.check(dev);
}

static fsdp_status mem_alloc(void *dev, uint64_t bytes, fsdp_memory_kind kind, void **out_ptr)
{
    faulty *f = faulty_of(dev);
    uint64_t number;
    bool pinned = kind == FSDP_MEMORY_KIND_PINNED;
    if (fails(f, FAULTY_MEM_ALLOC, &number))
        return refuse(f, pinned ? FSDP_ERR_NO_HOST_MEMORY : FSDP_ERR_NO_MEMORY, number);
    fsdp_status status = forward_device_ops.mem_alloc(dev, bytes, kind, out_ptr);
    if (status == FSDP_OK) count(f, pinned ? &f->pinned_bytes : &f->device_bytes, (int64_t)bytes);
    return status;
}

static void mem_free(void *dev, void *ptr, uint64_t bytes, fsdp_memory_kind kind)
{
    faulty *f = faulty_of(dev);
    count(f, kind == FSDP_MEMORY_KIND_PINNED ? &f->pinned_bytes : &f->device_bytes, -(int64_t)bytes);
    forward_device_ops.mem_free(dev, ptr, bytes, kind);
}

static fsdp_status stream_create(void *dev, const char *name, bool high_priority, void **out_stream)
{
    faulty *f = faulty_of(dev);
    uint64_t number;
    if (fails(f, FAULTY_STREAM_CREATE, &number)) return refuse(f, f->status, number);
    fsdp_status status = forward_device_ops.stream_create(dev, name, high_priority, out_stream);
    if (status == FSDP_OK) count(f, &f->n_objects, 1);
    return status;
}

static void stream_destroy(void *dev, void *stream)
{
    faulty *f = faulty_of(dev);
    forward_device_ops.stream_destroy(dev, stream);
    count(f, &f->n_objects, -1);
}

/* Without an end to the time it cannot be late; and whoever hears of a broken device may take it that nothing runs. */
static fsdp_status stream_drain(void *dev, void *stream, uint64_t timeout_ns)
{
    faulty *f = faulty_of(dev);
    uint64_t number;
    bool late = f->status == FSDP_ERR_TIMEOUT;
    if (late && timeout_ns == UINT64_MAX) return forward_device_ops.stream_drain(dev, stream, timeout_ns);
    if (!fails(f, FAULTY_DRAIN, &number)) return forward_device_ops.stream_drain(dev, stream, timeout_ns);
    fsdp_status status = refuse_and_break(dev, number);
    return late ? status : forward_device_ops.stream_drain(dev, stream, timeout_ns);
}

static fsdp_status event_create(void *dev, void **out_event)
{
    faulty *f = faulty_of(dev);
    uint64_t number;
    if (fails(f, FAULTY_EVENT_CREATE, &number)) return refuse_and_break(dev, number);
    fsdp_status status = forward_device_ops.event_create(dev, out_event);
    if (status == FSDP_OK) count(f, &f->n_objects, 1);
    return status;
}

static void event_destroy(void *dev, void *event)
{
    faulty *f = faulty_of(dev);
    forward_device_ops.event_destroy(dev, event);
    count(f, &f->n_objects, -1);
}

static fsdp_status event_record(void *dev, void *event, void *stream, fsdp_span *span)
{
    faulty *f = faulty_of(dev);
    uint64_t number;
    if (fails(f, FAULTY_RECORD, &number)) return refuse_and_break(dev, number);
    return forward_device_ops.event_record(dev, event, stream, span);
}

static fsdp_status stream_wait(void *dev, void *stream, void *event, fsdp_span *span)
{
    faulty *f = faulty_of(dev);
    uint64_t number;
    if (fails(f, FAULTY_WAIT, &number)) return refuse_and_break(dev, number);
    return forward_device_ops.stream_wait(dev, stream, event, span);
}

static fsdp_status event_query(void *dev, void *event, bool *out_done)
{
    faulty *f = faulty_of(dev);
    uint64_t number;
    if (fails(f, FAULTY_QUERY, &number)) return refuse_and_break(dev, number);
    return forward_device_ops.event_query(dev, event, out_done);
}

static fsdp_status event_wait(void *dev, void *event, uint64_t timeout_ns)
{
    faulty *f = faulty_of(dev);
    uint64_t number;
    if (fails(f, FAULTY_EVENT_WAIT, &number)) return refuse_and_break(dev, number);
    return forward_device_ops.event_wait(dev, event, timeout_ns);
}

static fsdp_status launch(void *dev, void *stream, const fsdp_device_op *op, fsdp_span *span)
{
    faulty *f = faulty_of(dev);
    uint64_t number;
    if (fails(f, FAULTY_LAUNCH, &number)) return refuse_and_break(dev, number);
    return forward_device_ops.launch(dev, stream, op, span);
}

/* ---- Communicator ---- */

static fsdp_status comm_open(const fsdp_comm_args *args, void **out_comm)
{
    faulty *f = (faulty *)args->backend_config;
    uint64_t number;
    if (fails(f, FAULTY_COMM_OPEN, &number)) return refuse(f, f->status, number);
    fsdp_status status = forward_comm_ops.open(args, out_comm);
    if (status == FSDP_OK) count(f, &f->n_objects, 1);
    return status;
}

static void comm_close(void *comm)
{
    faulty *f = faulty_of(comm);
    forward_comm_ops.close(comm);
    count(f, &f->n_objects, -1);
}

static fsdp_status enqueue(void *comm, void *stream, const fsdp_collective *list, uint32_t n)
{
    faulty *f = faulty_of(comm);
    uint64_t number;
    if (!fails(f, FAULTY_ENQUEUE, &number)) return forward_comm_ops.enqueue(comm, stream, list, n);
    if (f->status != FSDP_ERR_RANK_LOST) return refuse(f, f->status, number);
    forward_comm_ops.abort(comm);
    return forward_comm_ops.check(comm);
}

/* The handle is never NULL: what is taken is given back, also where a backend has nothing to take. */
static fsdp_status comm_attach(void *comm, fsdp_operation kind, void *base, uint64_t bytes, void **out_handle)
{
    faulty *f = faulty_of(comm);
    uint64_t number;
    if (fails(f, FAULTY_ATTACH, &number)) return refuse(f, f->status, number);
    void *inner;
    FSDP_TRY(forward_comm_ops.attach(comm, kind, base, bytes, &inner));
    void **handle = malloc(sizeof *handle);
    if (handle == NULL) abort();
    *handle = inner;
    *out_handle = handle;
    count(f, &f->n_objects, 1);
    return FSDP_OK;
}

static void comm_detach(void *comm, void *handle)
{
    faulty *f = faulty_of(comm);
    forward_comm_ops.detach(comm, *(void **)handle);
    free(handle);
    count(f, &f->n_objects, -1);
}

/* ---- Side channel ---- */

static fsdp_status side_open(const fsdp_side_args *args, void **out_side, uint32_t *out_rank, uint32_t *out_world)
{
    faulty *f = (faulty *)args->backend_config;
    uint64_t number;
    if (fails(f, FAULTY_SIDE_OPEN, &number)) return refuse(f, f->status, number);
    fsdp_status status = forward_side_ops.open(args, out_side, out_rank, out_world);
    if (status != FSDP_OK) return status;
    f->rank = *out_rank;
    count(f, &f->n_objects, 1);
    return FSDP_OK;
}

static void side_close(void *side)
{
    faulty *f = faulty_of(side);
    forward_side_ops.close(side);
    count(f, &f->n_objects, -1);
}

static fsdp_status refuse_for_all(void *side, uint64_t number)
{
    const faulty *f = faulty_of(side);
    char sentence[256];
    (void)refuse(f, f->status, number);
    snprintf(sentence, sizeof sentence, "rank %u: %.200s", f->rank, fsdp_last_error());
    forward_side_ops.fail(side, f->status, sentence);
    return forward_side_ops.check(side);
}

static fsdp_status side_all_gather(void *side, const void *mine, void *all, size_t bytes, uint64_t timeout_ns)
{
    uint64_t number;
    if (fails(faulty_of(side), FAULTY_ALL_GATHER, &number)) return refuse_for_all(side, number);
    return forward_side_ops.all_gather(side, mine, all, bytes, timeout_ns);
}

static fsdp_status side_broadcast(void *side, void *data, size_t bytes, uint32_t root, uint64_t timeout_ns)
{
    uint64_t number;
    if (fails(faulty_of(side), FAULTY_BROADCAST, &number)) return refuse_for_all(side, number);
    return forward_side_ops.broadcast(side, data, bytes, root, timeout_ns);
}

/* ---- The tables ---- */

static fsdp_device_ops device_ops;
static fsdp_comm_ops comm_ops;
static fsdp_side_ops side_ops;

static void make_tables(void)
{
    device_ops = forward_device_ops;
    device_ops.name = "faulty";
    device_ops.open = device_open;
    device_ops.close = device_close;
    device_ops.mem_alloc = mem_alloc;
    device_ops.mem_free = mem_free;
    device_ops.stream_create = stream_create;
    device_ops.stream_destroy = stream_destroy;
    device_ops.stream_drain = stream_drain;
    device_ops.event_create = event_create;
    device_ops.event_destroy = event_destroy;
    device_ops.event_record = event_record;
    device_ops.stream_wait = stream_wait;
    device_ops.event_query = event_query;
    device_ops.event_wait = event_wait;
    device_ops.launch = launch;
    comm_ops = forward_comm_ops;
    comm_ops.name = "faulty";
    comm_ops.open = comm_open;
    comm_ops.close = comm_close;
    comm_ops.enqueue = enqueue;
    comm_ops.attach = comm_attach;
    comm_ops.detach = comm_detach;
    side_ops = forward_side_ops;
    side_ops.open = side_open;
    side_ops.close = side_close;
    side_ops.all_gather = side_all_gather;
    side_ops.broadcast = side_broadcast;
}

const fsdp_backend *faulty_backend(void)
{
    static const fsdp_backend backend = {sizeof backend, "faulty", &device_ops, &comm_ops, &side_ops};
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, make_tables);
    return &backend;
}
