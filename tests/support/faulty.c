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
    *f = (faulty){.inner = inner, .inner_config = inner_config};
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

/* ---- What stands for a device, a communicator, a side channel ---- */

typedef struct wrapped {
    faulty *f;
    void *inner;
} wrapped;

static wrapped *wrap(faulty *f, void *inner)
{
    wrapped *w = malloc(sizeof *w);
    if (w == NULL) abort();
    *w = (wrapped){f, inner};
    count(f, &f->n_objects, 1);
    return w;
}

static void unwrap(wrapped *w)
{
    count(w->f, &w->f->n_objects, -1);
    free(w);
}

static const fsdp_device_ops *device_of(const wrapped *w) { return w->f->inner->device; }

/* ---- Device ---- */

static fsdp_status device_open(const fsdp_device_args *args, void **out_dev, fsdp_device_caps *out_caps)
{
    faulty *f = (faulty *)args->backend_config;
    uint64_t number;
    void *inner;
    if (fails(f, FAULTY_DEVICE_OPEN, &number)) return refuse(f, f->status, number);
    fsdp_device_args inner_args = *args;
    inner_args.backend_config = f->inner_config;
    fsdp_status status = f->inner->device->open(&inner_args, &inner, out_caps);
    if (status == FSDP_OK) *out_dev = wrap(f, inner);
    return status;
}

static void device_close(void *dev)
{
    device_of(dev)->close(((wrapped *)dev)->inner);
    unwrap(dev);
}

/* The device is broken, if that is what is wanted: the host backend as by an operation of its own. */
static fsdp_status refuse_and_break(wrapped *w, uint64_t number)
{
    fsdp_status status = refuse(w->f, w->f->status, number);
    if (status != FSDP_ERR_DEVICE) return status;
    char sentence[256];
    snprintf(sentence, sizeof sentence, "%s", fsdp_last_error());
    if (w->f->inner == fsdp_host_backend()) fsdp__host_device_fail(w->inner, status, sentence);
    else device_of(w)->abort(w->inner);
    return device_of(w)->check(w->inner);
}

static fsdp_status mem_alloc(void *dev, uint64_t bytes, fsdp_memory_kind kind, void **out_ptr)
{
    wrapped *w = dev;
    uint64_t number;
    bool pinned = kind == FSDP_MEMORY_KIND_PINNED;
    if (fails(w->f, FAULTY_MEM_ALLOC, &number))
        return refuse(w->f, pinned ? FSDP_ERR_NO_HOST_MEMORY : FSDP_ERR_NO_MEMORY, number);
    fsdp_status status = device_of(w)->mem_alloc(w->inner, bytes, kind, out_ptr);
    if (status == FSDP_OK) count(w->f, pinned ? &w->f->pinned_bytes : &w->f->device_bytes, (int64_t)bytes);
    return status;
}

static void mem_free(void *dev, void *ptr, uint64_t bytes, fsdp_memory_kind kind)
{
    wrapped *w = dev;
    count(w->f, kind == FSDP_MEMORY_KIND_PINNED ? &w->f->pinned_bytes : &w->f->device_bytes, -(int64_t)bytes);
    device_of(w)->mem_free(w->inner, ptr, bytes, kind);
}

static fsdp_status stream_create(void *dev, const char *name, bool high_priority, void **out_stream)
{
    wrapped *w = dev;
    uint64_t number;
    if (fails(w->f, FAULTY_STREAM_CREATE, &number)) return refuse(w->f, w->f->status, number);
    fsdp_status status = device_of(w)->stream_create(w->inner, name, high_priority, out_stream);
    if (status == FSDP_OK) count(w->f, &w->f->n_objects, 1);
    return status;
}

static void stream_destroy(void *dev, void *stream)
{
    wrapped *w = dev;
    device_of(w)->stream_destroy(w->inner, stream);
    count(w->f, &w->f->n_objects, -1);
}

/* Without an end to the time it cannot be late; and whoever hears of a broken device may take it that nothing runs. */
static fsdp_status stream_drain(void *dev, void *stream, uint64_t timeout_ns)
{
    wrapped *w = dev;
    uint64_t number;
    bool late = w->f->status == FSDP_ERR_TIMEOUT;
    if (late && timeout_ns == UINT64_MAX) return device_of(w)->stream_drain(w->inner, stream, timeout_ns);
    if (!fails(w->f, FAULTY_DRAIN, &number)) return device_of(w)->stream_drain(w->inner, stream, timeout_ns);
    fsdp_status status = refuse_and_break(w, number);
    return late ? status : device_of(w)->stream_drain(w->inner, stream, timeout_ns);
}

static fsdp_status event_create(void *dev, void **out_event)
{
    wrapped *w = dev;
    uint64_t number;
    if (fails(w->f, FAULTY_EVENT_CREATE, &number)) return refuse_and_break(w, number);
    fsdp_status status = device_of(w)->event_create(w->inner, out_event);
    if (status == FSDP_OK) count(w->f, &w->f->n_objects, 1);
    return status;
}

static void event_destroy(void *dev, void *event)
{
    wrapped *w = dev;
    device_of(w)->event_destroy(w->inner, event);
    count(w->f, &w->f->n_objects, -1);
}

static fsdp_status event_record(void *dev, void *event, void *stream, fsdp_span *span)
{
    wrapped *w = dev;
    uint64_t number;
    if (fails(w->f, FAULTY_RECORD, &number)) return refuse_and_break(w, number);
    return device_of(w)->event_record(w->inner, event, stream, span);
}

static fsdp_status stream_wait(void *dev, void *stream, void *event, fsdp_span *span)
{
    wrapped *w = dev;
    uint64_t number;
    if (fails(w->f, FAULTY_WAIT, &number)) return refuse_and_break(w, number);
    return device_of(w)->stream_wait(w->inner, stream, event, span);
}

static fsdp_status event_query(void *dev, void *event, bool *out_done)
{
    wrapped *w = dev;
    uint64_t number;
    if (fails(w->f, FAULTY_QUERY, &number)) return refuse_and_break(w, number);
    return device_of(w)->event_query(w->inner, event, out_done);
}

static fsdp_status event_wait(void *dev, void *event, uint64_t timeout_ns)
{
    wrapped *w = dev;
    uint64_t number;
    if (fails(w->f, FAULTY_EVENT_WAIT, &number)) return refuse_and_break(w, number);
    return device_of(w)->event_wait(w->inner, event, timeout_ns);
}

static fsdp_status launch(void *dev, void *stream, const fsdp_device_op *op, fsdp_span *span)
{
    wrapped *w = dev;
    uint64_t number;
    if (fails(w->f, FAULTY_LAUNCH, &number)) return refuse_and_break(w, number);
    return device_of(w)->launch(w->inner, stream, op, span);
}

static fsdp_status device_check(void *dev) { return device_of(dev)->check(((wrapped *)dev)->inner); }
static void device_abort(void *dev) { device_of(dev)->abort(((wrapped *)dev)->inner); }
static uint64_t device_now_ns(void *dev) { return device_of(dev)->now_ns(((wrapped *)dev)->inner); }

/* ---- Communicator ---- */

static fsdp_status comm_open(const fsdp_comm_args *args, void **out_comm)
{
    faulty *f = (faulty *)args->backend_config;
    uint64_t number;
    void *inner;
    if (fails(f, FAULTY_COMM_OPEN, &number)) return refuse(f, f->status, number);
    fsdp_comm_args inner_args = *args;
    inner_args.backend_config = f->inner_config;
    inner_args.dev = ((wrapped *)args->dev)->inner;
    inner_args.side_ops = f->inner->side;
    inner_args.side = args->side != NULL ? ((wrapped *)args->side)->inner : NULL;
    fsdp_status status = f->inner->comm->open(&inner_args, &inner);
    if (status == FSDP_OK) *out_comm = wrap(f, inner);
    return status;
}

static void comm_close(void *comm)
{
    wrapped *w = comm;
    w->f->inner->comm->close(w->inner);
    unwrap(w);
}

static fsdp_status enqueue(void *comm, void *stream, const fsdp_collective *list, uint32_t n)
{
    wrapped *w = comm;
    uint64_t number;
    if (!fails(w->f, FAULTY_ENQUEUE, &number)) return w->f->inner->comm->enqueue(w->inner, stream, list, n);
    if (w->f->status != FSDP_ERR_RANK_LOST) return refuse(w->f, w->f->status, number);
    w->f->inner->comm->abort(w->inner);
    return w->f->inner->comm->check(w->inner);
}

static fsdp_status comm_check(void *comm) { return ((wrapped *)comm)->f->inner->comm->check(((wrapped *)comm)->inner); }
static void comm_abort(void *comm) { ((wrapped *)comm)->f->inner->comm->abort(((wrapped *)comm)->inner); }

static fsdp_status comm_attach(void *comm, void *base, uint64_t bytes, void **out_handle)
{
    wrapped *w = comm;
    uint64_t number;
    if (fails(w->f, FAULTY_ATTACH, &number)) return refuse(w->f, w->f->status, number);
    void *inner;
    FSDP_TRY(w->f->inner->comm->attach(w->inner, base, bytes, &inner));
    *out_handle = wrap(w->f, inner); /* what is taken is given back, also where a backend has nothing to take */
    return FSDP_OK;
}

static void comm_detach(void *comm, void *handle)
{
    wrapped *w = comm;
    w->f->inner->comm->detach(w->inner, ((wrapped *)handle)->inner);
    unwrap(handle);
}

/* ---- Side channel ---- */

static fsdp_status side_open(const fsdp_side_args *args, void **out_side, uint32_t *out_rank, uint32_t *out_world)
{
    faulty *f = (faulty *)args->backend_config;
    uint64_t number;
    void *inner;
    if (fails(f, FAULTY_SIDE_OPEN, &number)) return refuse(f, f->status, number);
    fsdp_side_args inner_args = *args;
    inner_args.backend_config = f->inner_config;
    fsdp_status status = f->inner->side->open(&inner_args, &inner, out_rank, out_world);
    if (status == FSDP_OK) *out_side = wrap(f, inner), f->rank = *out_rank;
    return status;
}

static void side_close(void *side)
{
    wrapped *w = side;
    w->f->inner->side->close(w->inner);
    unwrap(w);
}

static fsdp_status refuse_for_all(wrapped *w, uint64_t number)
{
    char sentence[256];
    (void)refuse(w->f, w->f->status, number);
    snprintf(sentence, sizeof sentence, "rank %u: %.200s", w->f->rank, fsdp_last_error());
    w->f->inner->side->fail(w->inner, w->f->status, sentence);
    return w->f->inner->side->check(w->inner);
}

static fsdp_status side_all_gather(void *side, const void *mine, void *all, size_t bytes, uint64_t timeout_ns)
{
    wrapped *w = side;
    uint64_t number;
    if (fails(w->f, FAULTY_ALL_GATHER, &number)) return refuse_for_all(w, number);
    return w->f->inner->side->all_gather(w->inner, mine, all, bytes, timeout_ns);
}

static fsdp_status side_broadcast(void *side, void *data, size_t bytes, uint32_t root, uint64_t timeout_ns)
{
    wrapped *w = side;
    uint64_t number;
    if (fails(w->f, FAULTY_BROADCAST, &number)) return refuse_for_all(w, number);
    return w->f->inner->side->broadcast(w->inner, data, bytes, root, timeout_ns);
}

static void side_fail(void *side, fsdp_status status, const char *sentence)
{
    wrapped *w = side;
    w->f->inner->side->fail(w->inner, status, sentence);
}

static fsdp_status side_check(void *side) { return ((wrapped *)side)->f->inner->side->check(((wrapped *)side)->inner); }

/* ---- The tables ---- */

static const fsdp_device_ops device_ops = {
    .size = sizeof(fsdp_device_ops),
    .name = "faulty",
    .open = device_open,
    .close = device_close,
    .mem_alloc = mem_alloc,
    .mem_free = mem_free,
    .stream_create = stream_create,
    .stream_destroy = stream_destroy,
    .stream_drain = stream_drain,
    .event_create = event_create,
    .event_destroy = event_destroy,
    .event_record = event_record,
    .stream_wait = stream_wait,
    .event_query = event_query,
    .event_wait = event_wait,
    .launch = launch,
    .check = device_check,
    .abort = device_abort,
    .now_ns = device_now_ns,
};

static const fsdp_comm_ops comm_ops = {
    .size = sizeof(fsdp_comm_ops),
    .name = "faulty",
    .open = comm_open,
    .close = comm_close,
    .enqueue = enqueue,
    .check = comm_check,
    .abort = comm_abort,
    .attach = comm_attach,
    .detach = comm_detach,
};

static const fsdp_side_ops side_ops = {
    .size = sizeof(fsdp_side_ops),
    .open = side_open,
    .close = side_close,
    .all_gather = side_all_gather,
    .broadcast = side_broadcast,
    .fail = side_fail,
    .check = side_check,
};

const fsdp_backend *faulty_backend(void)
{
    static const fsdp_backend backend = {sizeof backend, "faulty", &device_ops, &comm_ops, &side_ops};
    return &backend;
}
