/* SPDX-License-Identifier: MIT */
/* The host backend's device behind its public table, and ours in front of it. What the host's cannot know is added here: that
 * a communicator has failed, and that MPI still holds memory. */
#include <stdio.h>

#include "fsdp/host.h"
#include "hostmem.h"
#include "mpi_backend.h"

static const fsdp_device_ops *host_ops(void) { return fsdp_host_backend()->device; }

static void *host_of(void *dev) { return ((fsdp__mpi_device *)dev)->dev; }

/* ---- The first error ---- */

/* The sentence is written before the status and never again, so it needs no lock. */
static fsdp_status own_error(fsdp__mpi_device *dev)
{
    fsdp_status status = (fsdp_status)atomic_load(&dev->status);
    return status == FSDP_OK ? FSDP_OK : fsdp__fail(status, "%s", dev->sentence);
}

fsdp_status fsdp__mpi_device_check(void *dev_)
{
    fsdp__mpi_device *dev = dev_;
    FSDP_TRY(own_error(dev));
    return host_ops()->check(dev->dev);
}

/* We stop the host's device by aborting it: then what it says of itself is not the cause. */
static fsdp_status explain(void *dev, fsdp_status status)
{
    if (status != FSDP_ERR_ABORTED) return status;
    FSDP_TRY(own_error(dev));
    return status;
}

void fsdp__mpi_device_fail(fsdp__mpi_device *dev, fsdp_status status, const char *sentence)
{
    pthread_mutex_lock(&dev->lock);
    bool first = atomic_load(&dev->status) == FSDP_OK;
    if (first) {
        snprintf(dev->sentence, sizeof dev->sentence, "%s", sentence);
        atomic_store(&dev->status, status);
    }
    /* Their streams run nothing any more, so nobody may wait for them. */
    for (fsdp__mpi_comm *c = dev->comms; c != NULL; c = c->next) fsdp__mpi_comm_take_error(c, status, sentence);
    pthread_mutex_unlock(&dev->lock);
    if (first) host_ops()->abort(dev->dev);
}

static void device_abort(void *dev_)
{
    fsdp__mpi_device *dev = dev_;
    char sentence[64];
    snprintf(sentence, sizeof sentence, "rank %u: the device was aborted", dev->rank);
    pthread_mutex_lock(&dev->lock);
    for (fsdp__mpi_comm *c = dev->comms; c != NULL; c = c->next) fsdp__mpi_comm_ops.abort(c);
    pthread_mutex_unlock(&dev->lock);
    fsdp__mpi_device_fail(dev, FSDP_ERR_ABORTED, sentence);
}

/* ---- Opening and closing ---- */

static fsdp_status device_open(const fsdp_device_args *args, void **out_dev, fsdp_device_caps *out_caps)
{
    fsdp_mpi_config config;
    MPI_Comm comm;
    uint32_t world;
    fsdp__mpi_device *dev = fsdp__host_alloc(args->host, 1, sizeof *dev);
    if (dev == NULL)
        return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "MPI device: no host memory for %zu bytes", sizeof *dev);
    dev->host = args->host;
    pthread_mutex_init(&dev->lock, NULL);
    pthread_mutex_init(&dev->engine.lock, NULL);
    fsdp_host_config host = FSDP_HOST_CONFIG_INIT;
    fsdp_device_args host_args = *args;
    host_args.backend_config = &host;
    fsdp_status status = fsdp__mpi_config_read(args->backend_config, &config, &dev->engine);
    if (status == FSDP_OK) status = fsdp__mpi_comm_read(&config, &dev->engine, &comm, &dev->rank, &world);
    if (status == FSDP_OK) {
        /* Its world is one rank: the seed tells ranks apart. */
        host.jitter_ns = config.jitter_ns;
        host.jitter_seed = config.jitter_seed * FSDP__MAX_WORLD + dev->rank;
        status = host_ops()->open(&host_args, &dev->dev, out_caps);
    }
    if (status == FSDP_OK) {
        *out_dev = dev;
        return FSDP_OK;
    }
    pthread_mutex_destroy(&dev->engine.lock);
    pthread_mutex_destroy(&dev->lock);
    fsdp__host_free(args->host, dev, 1, sizeof *dev);
    return status;
}

static void device_close(void *dev_)
{
    fsdp__mpi_device *dev = dev_;
    assert(dev->comms == NULL);
    while (dev->closed != NULL) {
        fsdp__mpi_comm *c = dev->closed;
        dev->closed = c->next;
        fsdp__mpi_comm_free(c);
    }
    host_ops()->close(dev->dev);
    pthread_mutex_destroy(&dev->engine.lock);
    pthread_mutex_destroy(&dev->lock);
    fsdp__host_free(dev->host, dev, 1, sizeof *dev);
}

/* ---- What the host's device does ---- */

static fsdp_status mem_alloc(void *dev, uint64_t bytes, fsdp_memory_kind kind, void **out_ptr)
{
    return host_ops()->mem_alloc(host_of(dev), bytes, kind, out_ptr);
}

/* A message that has not ended may still be written into it, or be read out of it by another process. */
static void mem_free(void *dev_, void *ptr, uint64_t bytes, fsdp_memory_kind kind)
{
    fsdp__mpi_device *dev = dev_;
    if (!atomic_load(&dev->stuck)) host_ops()->mem_free(dev->dev, ptr, bytes, kind);
}

static fsdp_status stream_create(void *dev, const char *name, bool high_priority, void **out_stream)
{
    return host_ops()->stream_create(host_of(dev), name, high_priority, out_stream);
}

static void stream_destroy(void *dev, void *stream) { host_ops()->stream_destroy(host_of(dev), stream); }

static fsdp_status stream_drain(void *dev, void *stream, uint64_t timeout_ns)
{
    return explain(dev, host_ops()->stream_drain(host_of(dev), stream, timeout_ns));
}

static fsdp_status event_create(void *dev, void **out_event)
{
    return host_ops()->event_create(host_of(dev), out_event);
}

static void event_destroy(void *dev, void *event) { host_ops()->event_destroy(host_of(dev), event); }

static fsdp_status event_record(void *dev, void *event, void *stream, fsdp_span *span)
{
    return explain(dev, host_ops()->event_record(host_of(dev), event, stream, span));
}

static fsdp_status stream_wait(void *dev, void *stream, void *event, fsdp_span *span)
{
    return explain(dev, host_ops()->stream_wait(host_of(dev), stream, event, span));
}

static fsdp_status event_query(void *dev, void *event, bool *out_done)
{
    return explain(dev, host_ops()->event_query(host_of(dev), event, out_done));
}

static fsdp_status event_wait(void *dev, void *event, uint64_t timeout_ns)
{
    return explain(dev, host_ops()->event_wait(host_of(dev), event, timeout_ns));
}

static fsdp_status launch(void *dev, void *stream, const fsdp_device_op *op, fsdp_span *span)
{
    return explain(dev, host_ops()->launch(host_of(dev), stream, op, span));
}

static uint64_t now_ns(void *dev) { return host_ops()->now_ns(host_of(dev)); }

const fsdp_device_ops fsdp__mpi_device_ops = {
    .size = sizeof fsdp__mpi_device_ops,
    .name = "mpi",
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
    .check = fsdp__mpi_device_check,
    .abort = device_abort,
    .now_ns = now_ns,
};

static const fsdp_backend backend = {
    .size = sizeof backend,
    .name = "mpi",
    .device = &fsdp__mpi_device_ops,
    .comm = &fsdp__mpi_comm_ops,
    .side = &fsdp__mpi_side_ops,
};

const fsdp_backend *fsdp_mpi_backend(void) { return &backend; }
