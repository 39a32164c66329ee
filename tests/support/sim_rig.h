/* SPDX-License-Identifier: MIT */
/* A rank of the sim backend with two streams and two wires, driven through the tables; every call must succeed. */
#ifndef FSDP_TESTS_SIM_RIG_H
#define FSDP_TESTS_SIM_RIG_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "fsdp/backend.h"
#include "fsdp/sim.h"
#include "hostmem.h"

enum { FOREVER = 1000000000, LATENCY = 10 };

typedef struct rig {
    fsdp_host_allocator host;
    const fsdp_backend *backend;
    const fsdp_device_ops *device;
    void *dev, *a, *b; /* streams */
    void *comm, *reduce_comm;
    fsdp_device_caps caps;
} rig;

/* A link of LATENCY ns and then a byte a nanosecond. */
static inline fsdp_sim_config byte_a_nanosecond(uint32_t world)
{
    fsdp_sim_config config = FSDP_SIM_CONFIG_INIT;
    config.world = world;
    config.link = (fsdp_link){LATENCY, 1000000000};
    return config;
}

static inline void *open_comm(rig *r, const fsdp_sim_config *config, uint32_t index)
{
    void *comm = NULL;
    fsdp_comm_args args = {
        .size = sizeof args, .backend_config = config, .dev = r->dev, .host = &r->host, .index = index};
    assert_int_equal(r->backend->comm->open(&args, &comm), FSDP_OK);
    return comm;
}

static inline void open_rig(rig *r, const fsdp_sim_config *config, uint32_t debug)
{
    *r = (rig){.backend = fsdp_sim_backend(), .device = fsdp_sim_backend()->device};
    const fsdp_host_allocator libc = {NULL, NULL, NULL, NULL};
    assert_int_equal(fsdp__host_allocator_resolve(&libc, &r->host), FSDP_OK);
    fsdp_device_args args = {sizeof args, config, &r->host, debug, FOREVER, NULL, NULL};
    assert_int_equal(r->device->open(&args, &r->dev, &r->caps), FSDP_OK);
    assert_int_equal(r->device->stream_create(r->dev, "a", false, &r->a), FSDP_OK);
    assert_int_equal(r->device->stream_create(r->dev, "b", true, &r->b), FSDP_OK);
    r->comm = open_comm(r, config, 0);
    r->reduce_comm = open_comm(r, config, 1);
}

static inline void close_rig(rig *r)
{
    r->backend->comm->close(r->comm);
    r->backend->comm->close(r->reduce_comm);
    r->device->stream_destroy(r->dev, r->a);
    r->device->stream_destroy(r->dev, r->b);
    r->device->close(r->dev);
}

static inline void *new_event(rig *r)
{
    void *event = NULL;
    assert_int_equal(r->device->event_create(r->dev, &event), FSDP_OK);
    return event;
}

/* These enqueue, and return the span. */
static inline fsdp_span delay(rig *r, void *stream, uint64_t ns)
{
    fsdp_span span = {UINT64_MAX, UINT64_MAX};
    fsdp_device_op op = {.kind = FSDP_OPERATION_DELAY, .u.delay = {ns}};
    assert_int_equal(r->device->launch(r->dev, stream, &op, &span), FSDP_OK);
    return span;
}

static inline fsdp_span record(rig *r, void *event, void *stream)
{
    fsdp_span span = {UINT64_MAX, UINT64_MAX};
    assert_int_equal(r->device->event_record(r->dev, event, stream, &span), FSDP_OK);
    return span;
}

static inline fsdp_span stand(rig *r, void *stream, void *event)
{
    fsdp_span span = {UINT64_MAX, UINT64_MAX};
    assert_int_equal(r->device->stream_wait(r->dev, stream, event, &span), FSDP_OK);
    return span;
}

static inline fsdp_span collective(rig *r, void *comm, void *stream, fsdp_operation kind, fsdp_dtype dtype,
                                   uint64_t count)
{
    fsdp_span span = {UINT64_MAX, UINT64_MAX};
    fsdp_collective op = {.kind = kind, .dtype = dtype, .count = count, .label = "test", .span = &span};
    assert_int_equal(r->backend->comm->enqueue(comm, stream, &op, 1), FSDP_OK);
    return span;
}

static inline void assert_span(fsdp_span span, uint64_t start_ns, uint64_t end_ns)
{
    assert_int_equal(span.start_ns, start_ns);
    assert_int_equal(span.end_ns, end_ns);
}

static inline bool is_done(rig *r, void *event)
{
    bool done = false;
    assert_int_equal(r->device->event_query(r->dev, event, &done), FSDP_OK);
    return done;
}

#endif
