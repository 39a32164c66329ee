/* SPDX-License-Identifier: MIT */
/* See null_backend.h. */
#include "null_backend.h"

#include <string.h>

#include "attach.h"
#include "monotonic.h"

enum { ALIGNMENT = 4096, PINNED_ALIGNMENT = 64 };

/* What stands for device, communicator and side channel. */
typedef struct null_object {
    const fsdp_host_allocator *host;
    uint32_t world;
    uint64_t next;         /* number of the next stream or event, address of the next block */
    fsdp_step_input input; /* of the last STEP_INPUT; each has its STEP_RESULT next */
} null_object;

static fsdp_status open_object(const fsdp_host_allocator *host, const void *backend_config, null_object **out_object)
{
    const null_config *config = backend_config;
    null_object *object = host->alloc(host->arg, sizeof *object, PINNED_ALIGNMENT);
    if (object == NULL) return fsdp_backend_fail(FSDP_ERR_NO_HOST_MEMORY, "null backend: no host memory");
    *object = (null_object){.host = host, .world = config != NULL ? config->world : 1, .next = (uint64_t)1 << 52};
    *out_object = object;
    return FSDP_OK;
}

static void close_object(void *object_)
{
    null_object *object = object_;
    const fsdp_host_allocator *host = object->host;
    host->free(host->arg, object, sizeof *object, PINNED_ALIGNMENT);
}

static void *take_number(null_object *object, uint64_t bytes)
{
    uint64_t number = object->next;
    object->next += (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return (void *)(uintptr_t)number;
}

/* ---- Device ---- */

static fsdp_status device_open(const fsdp_device_args *args, void **out_dev, fsdp_device_caps *out_caps)
{
    null_object *dev = NULL;
    fsdp_status status = open_object(args->host, args->backend_config, &dev);
    if (status != FSDP_OK) return status;
    *out_dev = dev;
    *out_caps = (fsdp_device_caps){.size = sizeof *out_caps, .alignment = ALIGNMENT, .granularity = ALIGNMENT};
    return FSDP_OK;
}

static fsdp_status mem_alloc(void *dev_, uint64_t bytes, fsdp_memory_kind kind, void **out_ptr)
{
    null_object *dev = dev_;
    if (kind != FSDP_MEMORY_KIND_PINNED) {
        *out_ptr = take_number(dev, bytes);
        return FSDP_OK;
    }
    void *ptr = dev->host->alloc(dev->host->arg, (size_t)bytes, PINNED_ALIGNMENT);
    if (ptr == NULL) return fsdp_backend_fail(FSDP_ERR_NO_HOST_MEMORY, "null backend: no host memory");
    memset(ptr, 0, (size_t)bytes);
    *out_ptr = ptr;
    return FSDP_OK;
}

static void mem_free(void *dev_, void *ptr, uint64_t bytes, fsdp_memory_kind kind)
{
    null_object *dev = dev_;
    if (kind == FSDP_MEMORY_KIND_PINNED) dev->host->free(dev->host->arg, ptr, (size_t)bytes, PINNED_ALIGNMENT);
}

static fsdp_status stream_create(void *dev, const char *name, bool high_priority, void **out_stream)
{
    (void)name, (void)high_priority;
    *out_stream = take_number(dev, 1);
    return FSDP_OK;
}

static fsdp_status event_create(void *dev, void **out_event)
{
    *out_event = take_number(dev, 1);
    return FSDP_OK;
}

static void destroy(void *dev, void *object) { (void)dev, (void)object; }

static fsdp_status wait_host(void *dev, void *object, uint64_t timeout_ns)
{
    (void)dev, (void)object, (void)timeout_ns;
    return FSDP_OK;
}

static fsdp_status event_record(void *dev, void *event, void *stream, fsdp_span *span)
{
    (void)dev, (void)event, (void)stream, (void)span;
    return FSDP_OK;
}

static fsdp_status stream_wait(void *dev, void *stream, void *event, fsdp_span *span)
{
    (void)dev, (void)stream, (void)event, (void)span;
    return FSDP_OK;
}

static fsdp_status event_query(void *dev, void *event, bool *out_done)
{
    (void)dev, (void)event;
    *out_done = true;
    return FSDP_OK;
}

static fsdp_status launch(void *dev, void *stream, const fsdp_device_op *op, fsdp_span *span)
{
    fsdp_step_input *input = &((null_object *)dev)->input;
    (void)stream, (void)span;
    if (op->kind == FSDP_OPERATION_STEP_INPUT) *input = op->u.step_input.input;
    if (op->kind == FSDP_OPERATION_STEP_RESULT)
        op->u.step_result.reports[input->step % op->u.step_result.n_reports] =
            (fsdp_report_record){.step = input->step, .updates = input->step, .lr = input->lr, .clip_scale = 1.0f};
    return FSDP_OK;
}

static fsdp_status check(void *object)
{
    (void)object;
    return FSDP_OK;
}

static void no_abort(void *object) { (void)object; }

static uint64_t now_ns(void *dev)
{
    (void)dev;
    return fsdp__now_ns();
}

/* ---- Communicator and side channel ---- */

static fsdp_status comm_open(const fsdp_comm_args *args, void **out_comm)
{
    null_object *comm = NULL;
    fsdp_status status = open_object(args->host, args->backend_config, &comm);
    if (status == FSDP_OK) *out_comm = comm;
    return status;
}

static fsdp_status enqueue(void *comm, void *stream, const fsdp_collective *list, uint32_t n)
{
    (void)comm, (void)stream, (void)list, (void)n;
    return FSDP_OK;
}

static fsdp_status side_open(const fsdp_side_args *args, void **out_side, uint32_t *out_rank, uint32_t *out_world)
{
    null_object *side = NULL;
    fsdp_status status = open_object(args->host, args->backend_config, &side);
    if (status != FSDP_OK) return status;
    *out_side = side;
    *out_rank = 0;
    *out_world = side->world;
    return FSDP_OK;
}

static fsdp_status side_all_gather(void *side_, const void *mine, void *all, size_t bytes, uint64_t timeout_ns)
{
    const null_object *side = side_;
    (void)timeout_ns;
    for (uint32_t rank = 0; rank < side->world; rank++) memcpy((char *)all + rank * bytes, mine, bytes);
    return FSDP_OK;
}

static fsdp_status side_broadcast(void *side, void *data, size_t bytes, uint32_t root, uint64_t timeout_ns)
{
    (void)side, (void)data, (void)bytes, (void)root, (void)timeout_ns;
    return FSDP_OK;
}

static void side_fail(void *side, fsdp_status status, const char *sentence)
{
    (void)side, (void)status, (void)sentence;
}

static const fsdp_device_ops device_ops = {
    .size = sizeof(fsdp_device_ops),
    .name = "null",
    .open = device_open,
    .close = close_object,
    .mem_alloc = mem_alloc,
    .mem_free = mem_free,
    .stream_create = stream_create,
    .stream_destroy = destroy,
    .stream_drain = wait_host,
    .event_create = event_create,
    .event_destroy = destroy,
    .event_record = event_record,
    .stream_wait = stream_wait,
    .event_query = event_query,
    .event_wait = wait_host,
    .launch = launch,
    .check = check,
    .abort = no_abort,
    .now_ns = now_ns,
};

static const fsdp_comm_ops comm_ops = {
    .size = sizeof(fsdp_comm_ops),
    .name = "null",
    .open = comm_open,
    .close = close_object,
    .enqueue = enqueue,
    .check = check,
    .abort = no_abort,
    .attach = fsdp__attach_nothing,
    .detach = fsdp__detach_nothing,
};

static const fsdp_side_ops side_ops = {
    .size = sizeof(fsdp_side_ops),
    .open = side_open,
    .close = close_object,
    .all_gather = side_all_gather,
    .broadcast = side_broadcast,
    .fail = side_fail,
    .check = check,
};

const fsdp_backend *null_backend(void)
{
    static const fsdp_backend backend = {sizeof backend, "null", &device_ops, &comm_ops, &side_ops};
    return &backend;
}
