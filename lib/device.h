/* SPDX-License-Identifier: MIT */
/* The one caller of a backend's device table: counts, tape and rounding sit here once. With the context's lock held,
 * except where said. */
#ifndef FSDP_LIB_DEVICE_H
#define FSDP_LIB_DEVICE_H

#include "clock.h"
#include "fsdp/backend.h"

/* bytes rounded up to what the device really takes; 0 on overflow. */
uint64_t fsdp__device_round(const fsdp_device_caps *caps, uint64_t bytes);
/* bytes must be rounded; 0 gives NULL. Errors: NO_MEMORY with the sizes. */
fsdp_status fsdp__device_alloc(fsdp_context *ctx, uint64_t bytes, fsdp_memory_kind kind, void **out_ptr);
void fsdp__device_free(fsdp_context *ctx, void *ptr, uint64_t bytes, fsdp_memory_kind kind);
/* Pinned memory for a heap, from any thread, the lock NOT held: it is taken to count only, since a heap has locks of its own
 * around this call. */
fsdp_status fsdp__device_take_region(fsdp_context *ctx, uint64_t bytes, void **out_ptr);
void fsdp__device_give_region(fsdp_context *ctx, void *ptr, uint64_t bytes);

fsdp_status fsdp__device_event_create(fsdp_context *ctx, void **out_event);
void fsdp__device_event_destroy(fsdp_context *ctx, void *event);
fsdp_status fsdp__device_record(fsdp_stream *s, const fsdp__fence *fence);
fsdp_status fsdp__device_wait(fsdp_stream *s, const fsdp__fence *fence, fsdp_reason reason);
/* Block the host; the lock is not held while it waits. */
fsdp_status fsdp__device_event_wait_host(fsdp_context *ctx, void *event, uint64_t timeout_ns);
fsdp_status fsdp__device_drain_host(fsdp_stream *s, uint64_t timeout_ns);

/* Enqueue an operation; what it reads and writes goes on the tape with it. label: a unit's name, or what it is for. */
fsdp_status fsdp__launch(fsdp_stream *s, const fsdp_device_op *op, const char *label);
/* Note on the tape that the host has waited for a fence. */
void fsdp__note_host(fsdp_context *ctx, const fsdp__fence *fence);
/* Note on the tape that the caller's kernels on s may touch these ranges. */
void fsdp__note_use(fsdp_stream *s, const char *label, const fsdp_trace_access *access, uint32_t n);

#endif
