/* SPDX-License-Identifier: MIT */
#include "explore_rig.h"

void rig_open_on(rig *r, explore *x)
{
    assert_non_null(x);
    *r = (rig){.x = x, .ops = explore_backend()->device, .config = {sizeof r->config, x, 0}};
    fsdp_device_args args = {.size = sizeof args, .backend_config = &r->config, .timeout_ns = 1};
    fsdp_device_caps caps = {.size = sizeof caps};
    DO(r->ops->open(&args, &r->dev, &caps));
    for (int i = 0; i < N_STREAMS; i++) DO(r->ops->stream_create(r->dev, "test", i == C, &r->stream[i]));
    for (int i = 0; i < N_EVENTS; i++) DO(r->ops->event_create(r->dev, &r->event[i]));
    void *ptr = NULL;
    DO(r->ops->mem_alloc(r->dev, BLOCK, FSDP_MEMORY_KIND_DEVICE, &ptr));
    r->block = ptr;
}

void rig_close_on(rig *r)
{
    for (int i = 0; i < N_STREAMS; i++) r->ops->stream_destroy(r->dev, r->stream[i]);
    for (int i = 0; i < N_EVENTS; i++) r->ops->event_destroy(r->dev, r->event[i]);
    if (r->block != NULL) r->ops->mem_free(r->dev, r->block, BLOCK, FSDP_MEMORY_KIND_DEVICE);
    r->ops->close(r->dev);
}

void rig_open(rig *r, explore_config config)
{
    if (config.world == 0) config.world = 1;
    rig_open_on(r, explore_open(&config));
}

void rig_close(rig *r)
{
    rig_close_on(r);
    assert_null(explore_complaint(r->x));
    explore_close(r->x);
}

explore_config policy_config(explore_policy policy, uint64_t seed)
{
    return (explore_config){.world = 1, .policy = policy, .seed = seed, .depth = 3, .steps = 200, .target = A};
}

void give(rig *r, int stream, fsdp_device_op op, fsdp_span *span)
{
    DO(r->ops->launch(r->dev, r->stream[stream], &op, span));
}

void fill(rig *r, int stream, void *dst, uint64_t bytes, uint8_t byte)
{
    give(r, stream, (fsdp_device_op){.kind = FSDP_OPERATION_FILL, .u.fill = {dst, bytes, byte}}, NULL);
}

void copy(rig *r, int stream, void *dst, const void *src, uint64_t bytes)
{
    give(r, stream, (fsdp_device_op){.kind = FSDP_OPERATION_COPY, .u.copy = {dst, src, bytes}}, NULL);
}

void add(rig *r, int stream, float *dst, const float *src)
{
    const fsdp_device_op op = {.kind = FSDP_OPERATION_ADD, .u.add = {dst, src, 1, FSDP_DTYPE_FP32, FSDP_DTYPE_FP32}};
    give(r, stream, op, NULL);
}

void mark(rig *r, int event, int stream) { DO(r->ops->event_record(r->dev, r->event[event], r->stream[stream], NULL)); }

void follow(rig *r, int stream, int event)
{
    DO(r->ops->stream_wait(r->dev, r->stream[stream], r->event[event], NULL));
}

void drain(rig *r, int stream) { DO(r->ops->stream_drain(r->dev, r->stream[stream], UINT64_MAX)); }

void drain_all(rig *r)
{
    for (int s = 0; s < N_STREAMS; s++) drain(r, s);
}
