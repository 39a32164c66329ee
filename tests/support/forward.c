/* SPDX-License-Identifier: MIT */
#include "forward.h"

#include <stdlib.h>

static forwarded *wrap(forward_to *to, void *inner)
{
    forwarded *object = malloc(sizeof *object);
    if (object == NULL) abort();
    *object = (forwarded){to, inner};
    return object;
}

static void *inner_of(const void *object) { return ((const forwarded *)object)->inner; }
static const fsdp_device_ops *device_of(const void *dev) { return ((const forwarded *)dev)->to->inner->device; }
static const fsdp_comm_ops *comm_of(const void *comm) { return ((const forwarded *)comm)->to->inner->comm; }
static const fsdp_side_ops *side_of(const void *side) { return ((const forwarded *)side)->to->inner->side; }

/* ---- Device ---- */

static fsdp_status device_open(const fsdp_device_args *args, void **out_dev, fsdp_device_caps *out_caps)
{
    forward_to *to = (forward_to *)args->backend_config;
    void *inner;
    fsdp_device_args inner_args = *args;
    inner_args.backend_config = to->inner_config;
    fsdp_status status = to->inner->device->open(&inner_args, &inner, out_caps);
    if (status == FSDP_OK) *out_dev = wrap(to, inner);
    return status;
}

static void device_close(void *dev)
{
    device_of(dev)->close(inner_of(dev));
    free(dev);
}

static fsdp_status mem_alloc(void *dev, uint64_t bytes, fsdp_memory_kind kind, void **out_ptr)
{
    return device_of(dev)->mem_alloc(inner_of(dev), bytes, kind, out_ptr);
}

static void mem_free(void *dev, void *ptr, uint64_t bytes, fsdp_memory_kind kind)
{
    device_of(dev)->mem_free(inner_of(dev), ptr, bytes, kind);
}

static fsdp_status stream_create(void *dev, const char *name, bool high_priority, void **out_stream)
{
    return device_of(dev)->stream_create(inner_of(dev), name, high_priority, out_stream);
}

static void stream_destroy(void *dev, void *stream) { device_of(dev)->stream_destroy(inner_of(dev), stream); }

static fsdp_status stream_drain(void *dev, void *stream, uint64_t timeout_ns)
{
    return device_of(dev)->stream_drain(inner_of(dev), stream, timeout_ns);
}

static fsdp_status event_create(void *dev, void **out_event)
{
    return device_of(dev)->event_create(inner_of(dev), out_event);
}

static void event_destroy(void *dev, void *event) { device_of(dev)->event_destroy(inner_of(dev), event); }

static fsdp_status event_record(void *dev, void *event, void *stream, fsdp_span *span)
{
    return device_of(dev)->event_record(inner_of(dev), event, stream, span);
}

static fsdp_status stream_wait(void *dev, void *stream, void *event, fsdp_span *span)
{
    return device_of(dev)->stream_wait(inner_of(dev), stream, event, span);
}

static fsdp_status event_query(void *dev, void *event, bool *out_done)
{
    return device_of(dev)->event_query(inner_of(dev), event, out_done);
}

static fsdp_status event_wait(void *dev, void *event, uint64_t timeout_ns)
{
    return device_of(dev)->event_wait(inner_of(dev), event, timeout_ns);
}

static fsdp_status launch(void *dev, void *stream, const fsdp_device_op *op, fsdp_span *span)
{
    return device_of(dev)->launch(inner_of(dev), stream, op, span);
}

static fsdp_status device_check(void *dev) { return device_of(dev)->check(inner_of(dev)); }
static void device_abort(void *dev) { device_of(dev)->abort(inner_of(dev)); }
static uint64_t device_now_ns(void *dev) { return device_of(dev)->now_ns(inner_of(dev)); }

/* ---- Communicator ---- */

static fsdp_status comm_open(const fsdp_comm_args *args, void **out_comm)
{
    forward_to *to = (forward_to *)args->backend_config;
    void *inner;
    fsdp_comm_args inner_args = *args;
    inner_args.backend_config = to->inner_config;
    inner_args.dev = inner_of(args->dev);
    inner_args.side_ops = to->inner->side;
    inner_args.side = args->side != NULL ? inner_of(args->side) : NULL;
    fsdp_status status = to->inner->comm->open(&inner_args, &inner);
    if (status == FSDP_OK) *out_comm = wrap(to, inner);
    return status;
}

static void comm_close(void *comm)
{
    comm_of(comm)->close(inner_of(comm));
    free(comm);
}

static fsdp_status enqueue(void *comm, void *stream, const fsdp_collective *list, uint32_t n)
{
    return comm_of(comm)->enqueue(inner_of(comm), stream, list, n);
}

static fsdp_status comm_check(void *comm) { return comm_of(comm)->check(inner_of(comm)); }
static void comm_abort(void *comm) { comm_of(comm)->abort(inner_of(comm)); }

static fsdp_status comm_attach(void *comm, fsdp_operation kind, void *base, uint64_t bytes, void **out_handle)
{
    return comm_of(comm)->attach(inner_of(comm), kind, base, bytes, out_handle);
}

static void comm_detach(void *comm, void *handle) { comm_of(comm)->detach(inner_of(comm), handle); }

/* ---- Side channel ---- */

static fsdp_status side_open(const fsdp_side_args *args, void **out_side, uint32_t *out_rank, uint32_t *out_world)
{
    forward_to *to = (forward_to *)args->backend_config;
    void *inner;
    fsdp_side_args inner_args = *args;
    inner_args.backend_config = to->inner_config;
    fsdp_status status = to->inner->side->open(&inner_args, &inner, out_rank, out_world);
    if (status == FSDP_OK) *out_side = wrap(to, inner);
    return status;
}

static void side_close(void *side)
{
    side_of(side)->close(inner_of(side));
    free(side);
}

static fsdp_status side_all_gather(void *side, const void *mine, void *all, size_t bytes, uint64_t timeout_ns)
{
    return side_of(side)->all_gather(inner_of(side), mine, all, bytes, timeout_ns);
}

static fsdp_status side_broadcast(void *side, void *data, size_t bytes, uint32_t root, uint64_t timeout_ns)
{
    return side_of(side)->broadcast(inner_of(side), data, bytes, root, timeout_ns);
}

static void side_fail(void *side, fsdp_status status, const char *sentence)
{
    side_of(side)->fail(inner_of(side), status, sentence);
}

static fsdp_status side_check(void *side) { return side_of(side)->check(inner_of(side)); }

/* ---- The tables ---- */

const fsdp_device_ops forward_device_ops = {
    .size = sizeof(fsdp_device_ops),
    .name = "forward",
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

const fsdp_comm_ops forward_comm_ops = {
    .size = sizeof(fsdp_comm_ops),
    .name = "forward",
    .open = comm_open,
    .close = comm_close,
    .enqueue = enqueue,
    .check = comm_check,
    .abort = comm_abort,
    .attach = comm_attach,
    .detach = comm_detach,
};

const fsdp_side_ops forward_side_ops = {
    .size = sizeof(fsdp_side_ops),
    .open = side_open,
    .close = side_close,
    .all_gather = side_all_gather,
    .broadcast = side_broadcast,
    .fail = side_fail,
    .check = side_check,
};
