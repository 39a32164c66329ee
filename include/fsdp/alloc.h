/* SPDX-License-Identifier: MIT */
/** @file alloc.h  The stream-aware caching allocator: fenced blocks with vector clocks (docs/allocator.md).
 *
 *  Which bytes come back is a function of the calls and the budget, never of how far the device is. Memory that another
 *  stream may still be using is handed over with a wait between the two streams, or found covered by one that exists.
 *  Units of a model do not come from here but from planned ranges (docs/schedule.md); this is for everything else. */
#ifndef FSDP_ALLOC_H
#define FSDP_ALLOC_H

#include "fsdp/device.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fsdp_allocator fsdp_allocator;

typedef enum fsdp_alloc_policy {
    FSDP_ALLOC_WAIT_FIRST = 0, /**< reuse with a wait before taking more from the device: the hard bound on memory */
    FSDP_ALLOC_GROW_FIRST = 1  /**< take more, up to the budget, before adding a wait: lets a stream that copies out run beside
                                    the one that computes. Give it a budget */
} fsdp_alloc_policy;

typedef struct fsdp_allocator_config {
    size_t size;
    const char *name;       /**< for errors and pictures; copied (31 bytes are kept) */
    uint64_t budget_bytes;  /**< most that it takes from the device, at least what that gives at a time (host: a page of 4096
                                 bytes; CUDA: 2 MiB); 0: no limit but the device's */
    uint64_t segment_bytes; /**< it takes at least this much at a time, or what the budget or the device has left */
    fsdp_alloc_policy policy;
    uint32_t history;       /**< events that it remembers for a snapshot (memory.h), 48 bytes each, rounded up to a power of
                                 two; 0: none; at most 2^24 */
} fsdp_allocator_config;

#define FSDP_ALLOCATOR_CONFIG_INIT {sizeof(fsdp_allocator_config), "allocator", 0, 2097152, FSDP_ALLOC_WAIT_FIRST, 1024}

/** config NULL: FSDP_ALLOCATOR_CONFIG_INIT. Takes nothing from the device yet.
 *  Owns: *out_allocator is the caller's; destroy it before the context.
 *  Errors: ARG (also a budget below what the device gives at a time); NO_HOST_MEMORY; what stopped the context. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_allocator_create(fsdp_context *ctx, const fsdp_allocator_config *config,
                                                          fsdp_allocator **out_allocator);

/** Waits until the device is done with every byte, then gives all back. NULL is nothing.
 *  Errors: STATE (a block is live: named; inside a capture, the library's or the caller's own): nothing is freed. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_allocator_destroy(fsdp_allocator *allocator);

/** @p bytes for use on @p stream, 256-byte aligned, rounded up to 256. 0 bytes give a pointer too.
 *  In this order: the best fit that is ordered already (no device call); the fit freed longest ago, with a wait on
 *  @p stream; growth within the budget (GROW_FIRST: before the wait).
 *  Until free, the block belongs to whatever @p stream is given.
 *  @p owner: whose it is, for errors and snapshots; a literal, or a string that outlives the allocator; NULL for nobody's.
 *  Thread: any; the order of calls decides the addresses.
 *  Errors: ARG; NO_MEMORY (the text says what would have fitted, who holds the rest, and lists the blocks); NO_HOST_MEMORY;
 *  what stopped the context. Nothing has changed then, but for waits of @p stream that may have been enqueued. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_allocator_alloc(fsdp_allocator *allocator, uint64_t bytes, fsdp_stream *stream,
                                                         const char *owner, void **out_ptr);

/** @p stream, too, uses the block until it is freed: what it is given up to free() comes before the next owner.
 *  (PyTorch's recordStream.) The call makes @p stream wait for the block's last owner where it is not behind it yet; behind
 *  what the block's own stream has written the caller puts it.
 *  Errors: ARG (a pointer that is no live block); NO_HOST_MEMORY (the block has had two streams already, and there is no
 *  memory to note a third; nothing has changed); what stopped the context. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_allocator_record_stream(fsdp_allocator *allocator, void *ptr, fsdp_stream *stream);

/** The narrow form: @p stream uses the block for what it was given until now, and no more. For code that knows its last
 *  use: submit, then this, then free at any time. No wait is added: @p stream is behind the block's allocation already.
 *  Errors: as record_stream. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_allocator_record_use(fsdp_allocator *allocator, void *ptr, fsdp_stream *stream);

/** Give it back, at once, from any thread, without a device call. NULL is nothing.
 *  Errors: ARG (not a live block of this allocator: a double free, or a pointer into the middle). */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_allocator_free(fsdp_allocator *allocator, void *ptr);

/** Give segments that are wholly free back to the device. Blocks the host until every stream of the context has come as far
 *  as it was given, at most the context's timeout_ns each; what other threads free meanwhile stays.
 *  Errors: TIMEOUT, and what stopped the context (nothing went back). */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_allocator_trim_host(fsdp_allocator *allocator);

/** Bytes now and at their peak. allocated: handed out. active: allocated, or freed but not yet ordered before everything
 *  that its own stream will run (PyTorch's meaning). reserved: taken from the device. */
typedef struct fsdp_alloc_stats {
    size_t size;
    uint64_t allocated, active, reserved;
    uint64_t allocated_peak, active_peak, reserved_peak;
    uint64_t allocs, frees;  /**< calls that succeeded */
    uint64_t waits;          /**< stream waits that hand-overs needed */
    uint64_t grows;          /**< segments taken */
    uint64_t trace_hash;     /**< of every alloc so far: segment, offset, bytes, stream, and which streams it waits for.
                                  Equal after equal calls, on every rank and however the device ran */
} fsdp_alloc_stats;

#define FSDP_ALLOC_STATS_INIT {sizeof(fsdp_alloc_stats), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

/** Thread: any. Errors: ARG. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_allocator_stats(fsdp_allocator *allocator, fsdp_alloc_stats *out_stats);
/** The peaks become what is now. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_allocator_reset_peaks(fsdp_allocator *allocator);

#ifdef __cplusplus
}
#endif
#endif
