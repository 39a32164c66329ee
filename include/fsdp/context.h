/* SPDX-License-Identifier: MIT */
/** @file context.h  One rank's device, communicators, lanes and settings. */
#ifndef FSDP_CONTEXT_H
#define FSDP_CONTEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "fsdp/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fsdp_context fsdp_context;
typedef struct fsdp_backend fsdp_backend; /* backend.h */

/** What an allocator holds, as far as it knows; 0 is also "not known". */
typedef struct fsdp_arena_stats {
    size_t size;              /**< sizeof(fsdp_arena_stats) */
    uint64_t allocated_bytes; /**< in live pieces, as the allocator rounds them */
    uint64_t active_bytes;    /**< in pages that hold a live piece */
    uint64_t mapped_bytes;    /**< taken from the system or the device and not given back */
    uint64_t regions;         /**< regions of a pinned heap: takes less gives */
    uint64_t allocs, frees;   /**< pieces so far */
} fsdp_arena_stats;

#define FSDP_ARENA_STATS_INIT {sizeof(fsdp_arena_stats), 0, 0, 0, 0, 0, 0}

/** Where the library's own host memory comes from. alloc and free, or neither (libc). Called from any thread. */
typedef struct fsdp_host_allocator {
    void *(*alloc)(void *arg, size_t bytes, size_t alignment); /**< NULL when out of memory; alignment: power of two */
    void (*free)(void *arg, void *ptr, size_t bytes, size_t alignment); /**< what alloc gave, same sizes */
    void *arg;
    void (*stats)(void *arg, fsdp_arena_stats *out_stats);     /**< may be NULL; fills everything but size */
} fsdp_host_allocator;

/** The device's side of a pinned heap: whole regions of page-locked host memory. Callable from any thread. */
typedef struct fsdp_pinned_source {
    size_t size;
    void *arg;
    void *(*take)(void *arg, size_t bytes);           /**< page-aligned, content undefined; NULL when out of memory */
    void (*give)(void *arg, void *ptr, size_t bytes); /**< a whole region, as taken, once */
    size_t granularity;                               /**< bytes of a region are a multiple; a power of two */
} fsdp_pinned_source;

/** Cuts pinned pieces out of regions that the device gives (<fsdp/jemalloc.h> has one). All functions but stats, or none:
 *  then every piece is a region of its own, as it is on sim in any case. A context opens one heap and closes it after its
 *  last piece; alloc, free and stats are called from any thread, never with a lock of the library held, and may call the
 *  source, which calls neither malloc nor fsdp_config.host. */
typedef struct fsdp_pinned_allocator {
    void *(*open)(void *arg, const fsdp_pinned_source *source);         /**< the heap, or NULL; source lives as long as it */
    void (*close)(void *heap);                                          /**< gives every region back */
    void *(*alloc)(void *heap, size_t bytes, size_t alignment);         /**< NULL when out of memory; content undefined */
    void (*free)(void *heap, void *ptr, size_t bytes, size_t alignment); /**< what alloc gave, same sizes */
    void (*stats)(void *heap, fsdp_arena_stats *out_stats);             /**< may be NULL; fills everything but size */
    void *arg;                                                          /**< for open */
} fsdp_pinned_allocator;

/** Receives warnings (docs/errors.md lists them; none is printed otherwise), from any thread that is in a call, or one of the
 *  backend's own. @p text is valid during the call only. It calls nothing of the library. */
typedef void (*fsdp_log_fn)(void *arg, const char *text);

enum {
    FSDP_DEBUG_SYNC = 1u << 0,  /**< every operation has finished when its call returns (CUDA_LAUNCH_BLOCKING's meaning) */
    FSDP_DEBUG_POISON = 1u << 1, /**< parameters and gradients are filled with NaN when a window or a reduction gives their
                                      buffer back, on its stream; gradients that are the shard, when they are handed out and
                                      not zeroed */
    FSDP_DEBUG_ORDER = 1u << 2  /**< each collective is compared between ranks, over the side channel, before it is enqueued:
                                     a difference is an error at the call that makes it. Blocks the host at each */
};

typedef struct fsdp_config {
    size_t size;                 /**< sizeof(fsdp_config); FSDP_CONFIG_INIT sets it */
    const fsdp_backend *backend; /**< fsdp_host_backend() if NULL; fsdp_sim_backend(), … */
    const void *backend_config;  /**< the backend's own (fsdp_host_config, …); NULL: its defaults. Read here only */
    uint32_t debug;              /**< FSDP_DEBUG_… */
    bool reduce_comm;            /**< a second communicator for reductions: gathers and reductions may overlap on the wire */
    uint64_t timeout_ns;         /**< deadline between ranks: how long a collective or host call waits for a rank that is
                                      behind; longer than the longest time by which ranks' compute can differ. Not 0 */
    fsdp_host_allocator host;    /**< libc if all zero */
    fsdp_log_fn log;             /**< NULL: warnings are dropped */
    void *log_arg;
    fsdp_pinned_allocator pinned; /**< a region a piece if all zero */
    const char *flight_path;     /**< at the first failure between ranks this rank's flight recorder (flight.h) is written
                                      to the file flight_path + ".rank" + its number + ".json"; NULL: it is not. Copied */
} fsdp_config;

#define FSDP_CONFIG_INIT                                                                                    \
    {sizeof(fsdp_config), NULL, NULL, 0, false, 60000000000ull, {NULL, NULL, NULL, NULL}, NULL, NULL,       \
     {NULL, NULL, NULL, NULL, NULL, NULL}, NULL}

/** Open a context: device, communicators, side channel, the lanes gather, reduce and copy.
 *  Owns:   *out_ctx is the caller's; destroy it after every object made from it.
 *  Ranks:  collective over the world that backend_config names (a world of one by default).
 *  Thread: a context is driven by one thread at a time; ranks as threads have a context each.
 *  Blocks: until every rank has come, at most timeout_ns.
 *  Errors: ARG; NO_HOST_MEMORY, NO_MEMORY, DEVICE (on the other ranks ABORTED, with this rank's sentence); UNSUPPORTED;
 *  MISMATCH (FSDP_DEBUG_ORDER or reduce_comm differ); RANK_LOST (names the ranks that came). */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_context_create(const fsdp_config *config, fsdp_context **out_ctx);

/** Close it: waits until its streams are idle (or aborted), then frees everything that is left. NULL is nothing.
 *  Errors: STATE if a model, allocator, stream, event, work, trace, capture or pinned piece of the caller still lives (named;
 *  nothing is closed). */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_context_destroy(fsdp_context *ctx);

/** Give up, on every rank: wakes whoever waits for a peer, fails what is enqueued, frees nothing in flight.
 *  Every later call on every rank's context returns ABORTED with @p reason and this rank, but those that free, release,
 *  destroy, or ask for numbers.
 *  Thread: any. Blocks: 20 ms at most, for rank 0 to have heard of it. @p reason: a sentence, copied; NULL for none. */
FSDP_API void fsdp_context_abort(fsdp_context *ctx, const char *reason);

/** FSDP_OK, or the first error of this context's device, communicators or peers; the call to poll with. Never blocks, but for
 *  the first call that finds a failure between ranks: it asks all of them what they did last, two seconds at most. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_context_check(fsdp_context *ctx);

/** This rank, and how many there are. */
FSDP_API uint32_t fsdp_context_rank(const fsdp_context *ctx);
FSDP_API uint32_t fsdp_context_world(const fsdp_context *ctx);

/** Sum @p n doubles over the ranks, in rank order, on the side channel (no stream, no collective is involved).
 *  Blocks: until every rank has called, at most timeout_ns. Collective. values: in and out; n: 1 to 64.
 *  Errors: ARG; NO_HOST_MEMORY (of one rank, on all); MISMATCH (ranks are in different host calls: nothing was done);
 *  RANK_LOST; ABORTED. values unchanged. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_sum_host(fsdp_context *ctx, double *values, uint32_t n);

/** Return when every rank has called. Side channel; streams go on. Errors as fsdp_sum_host. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_barrier_host(fsdp_context *ctx);

/** Copy @p bytes (1 MiB at most) from rank @p root's @p data to every rank's. Blocks, collective. Errors as fsdp_sum_host. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_broadcast_host(fsdp_context *ctx, void *data, size_t bytes, uint32_t root);

/** What the library has asked of the device so far, counted at the one place that talks to it. */
typedef struct fsdp_counters {
    size_t size;
    uint64_t device_bytes;      /**< device memory held now, as the device really took it (granularity) */
    uint64_t device_bytes_peak; /**< its maximum since create */
    uint64_t pinned_bytes;      /**< host memory that the device can reach, held now, in whole regions */
    uint64_t allocations;       /**< device allocations and pinned regions so far; a training step makes none */
    uint64_t events_created;
    uint64_t records, waits;    /**< event records and stream waits enqueued */
    uint64_t operations;        /**< kernels, copies, fills, host calls, delays enqueued */
    uint64_t collectives;
    uint64_t host_waits;        /**< times that the host was to block: for the device, or for all ranks on the side channel */
} fsdp_counters;

#define FSDP_COUNTERS_INIT {sizeof(fsdp_counters), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

/** Errors: ARG (size). */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_context_counters(const fsdp_context *ctx, fsdp_counters *out_counters);

#ifdef __cplusplus
}
#endif
#endif
