/* SPDX-License-Identifier: MIT */
/** @file device.h  Streams and events.
 *
 *  A stream runs what it is given in order; different streams are ordered only by an event that one records and the
 *  other waits for. Every call here enqueues and returns; what blocks ends in _host, but for fsdp_stream_release. An error on
 *  a device is sticky: it reaches the next call of its context.
 *
 *  A stream has a slot in its context's clocks (docs/streams.md): the library knows which work of which stream comes
 *  before what, so that a wait that would change nothing is left out, and a buffer is handed over by a wait where one is
 *  needed. Orderings made behind the library's back cost a wait, never a race. */
#ifndef FSDP_DEVICE_H
#define FSDP_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "fsdp/context.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fsdp_stream fsdp_stream;
typedef struct fsdp_event fsdp_event;

/** The library's own streams. */
typedef enum fsdp_lane {
    FSDP_LANE_GATHER = 0, /**< casts and all-gathers */
    FSDP_LANE_REDUCE = 1, /**< reduce-scatters, the norm, the step report */
    FSDP_LANE_COPY = 2    /**< host to device and back: values in and out */
} fsdp_lane;

/** A stream of the caller's own, for compute.
 *  @p name is copied (31 bytes are kept) and stands in errors, traces and pictures.
 *  Errors: ARG; STATE (16 streams live, the three lanes included: release one); NO_HOST_MEMORY; DEVICE. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_stream_create(fsdp_context *ctx, const char *name, fsdp_stream **out_stream);

/** Wait until the stream is idle and give it up; blocks that were last used on it stay protected. NULL is nothing.
 *  Errors: STATE (a unit is open on it; it is a lane; or the host cannot wait for it now, since it captures, or is CUDA's NULL
 *  stream while a blocking one does): it is kept then. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_stream_release(fsdp_stream *stream);

/** Borrowed; lives as long as the context. NULL for a number that is no lane. */
FSDP_API fsdp_stream *fsdp_context_lane(fsdp_context *ctx, fsdp_lane lane);

/** The caller's compute, on a machine without a GPU: @p fn(arg) runs on the stream's thread, after everything that was
 *  enqueued before it. @p arg must stay valid until then, or until the stream is released (after an abort it may never
 *  run). @p fn may call nothing of the library but fsdp_context_abort.
 *  The sim backend runs no function; there compute is fsdp_stream_delay.
 *  Errors: ARG; UNSUPPORTED (a device that cannot call the host); NO_HOST_MEMORY; DEVICE, ABORTED. */
typedef void (*fsdp_host_fn)(void *arg);
FSDP_API FSDP_NODISCARD fsdp_status fsdp_stream_host_call(fsdp_stream *stream, fsdp_host_fn fn, void *arg);

/** Keep the stream busy for @p ns nanoseconds: the delay kernel of tests and benches. Errors: as host_call. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_stream_delay(fsdp_stream *stream, uint64_t ns);

/** Copy or fill @p bytes: device memory, or host memory that stays valid until it has run. dst and src do not overlap.
 *  Errors: as host_call. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_stream_copy(fsdp_stream *stream, void *dst, const void *src, uint64_t bytes);
FSDP_API FSDP_NODISCARD fsdp_status fsdp_stream_fill(fsdp_stream *stream, void *dst, uint8_t byte, uint64_t bytes);

/** @p bytes of host memory that the device reads and writes at full speed: for batches on their way in, results on their
 *  way out. Aligned to 4096 bytes (64 on sim), content undefined. It comes from fsdp_config.pinned, without that it is a
 *  whole region of the device: slow to get, so get it before the first step. The host backend locks it into memory where
 *  the process may (RLIMIT_MEMLOCK), and warns once through fsdp_config.log where it may not.
 *  Thread: any. Errors: ARG (bytes is 0); NO_HOST_MEMORY; ABORTED, … */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_pinned_alloc(fsdp_context *ctx, size_t bytes, void **out_ptr);
/** Give it back, at once: the device must be done with it, by an event that the host has waited for or a drained stream.
 *  Thread: any. NULL is nothing. Errors: ARG (no live piece of @p ctx: a double free, somebody else's pointer, or one into
 *  the middle of a piece; nothing was done). */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_pinned_free(fsdp_context *ctx, void *ptr);

/** Order: what is enqueued on @p stream from now on runs after everything that @p other was given until now.
 *  One event record and one wait. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_stream_wait_stream(fsdp_stream *stream, fsdp_stream *other);

/** Block the host until the stream is idle. The clocks know it then: what any stream is given from now on comes after what
 *  this one was given before, without a wait. (So it is with fsdp_event_wait_host and fsdp_work_wait_host.)
 *  Errors: TIMEOUT (ask again); DEVICE, RANK_LOST, MISMATCH, ABORTED (what stopped it). */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_stream_drain_host(fsdp_stream *stream, uint64_t timeout_ns);

/** An event of the caller's own; the clocks know it. record overwrites; a wait refers to the last record before it, and
 *  to nothing if there was none. Destroying one does not disturb waits already enqueued; NULL is nothing. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_event_create(fsdp_context *ctx, fsdp_event **out_event);
FSDP_API void fsdp_event_destroy(fsdp_event *event);
FSDP_API FSDP_NODISCARD fsdp_status fsdp_event_record(fsdp_event *event, fsdp_stream *stream);
FSDP_API FSDP_NODISCARD fsdp_status fsdp_stream_wait_event(fsdp_stream *stream, fsdp_event *event);
/** Asks, never blocks. An event that was never recorded is done. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_event_is_done(fsdp_event *event, bool *out_done);
/** Blocks the host until it is done. Errors: TIMEOUT (ask again); what stopped the context. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_event_wait_host(fsdp_event *event, uint64_t timeout_ns);

/** The device's clock in nanoseconds: monotonic on host and CUDA, virtual on sim. */
FSDP_API uint64_t fsdp_context_now_ns(fsdp_context *ctx);

#ifdef __cplusplus
}
#endif
#endif
