/* SPDX-License-Identifier: MIT */
/** @file host.h  The host backend: a thread a stream; ranks as threads of one process (fsdp_local), or as processes of one
 *  machine over shared memory (fsdp_launch). No GPU, no daemon. Both give the same bits. */
#ifndef FSDP_HOST_H
#define FSDP_HOST_H

#include "fsdp/context.h"
#include "fsdp/launch.h"

#ifdef __cplusplus
extern "C" {
#endif

/** A wire between ranks. An operation that moves b bytes takes at least latency_ns + b / bytes_per_second; it sleeps
 *  for what the copying itself did not take. b is what one rank sends: (world − 1) × count elements for all-gather and
 *  reduce-scatter, twice (world − 1) / world of the buffer for all-reduce, the buffer for broadcast. All zero: no model. */
typedef struct fsdp_link {
    uint64_t latency_ns;
    uint64_t bytes_per_second; /**< 0: infinite */
} fsdp_link;

/** Where the ranks of one process meet. */
typedef struct fsdp_local fsdp_local;

/** @p world ranks (1 to 64) and the wire between them. link NULL: as fast as memory is.
 *  Owns: the caller's; destroy after the contexts of all ranks (NULL is nothing). Thread: any. Errors: ARG, NO_HOST_MEMORY. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_local_create(uint32_t world, const fsdp_link *link, fsdp_local **out_local);
FSDP_API void fsdp_local_destroy(fsdp_local *local);

/** backend_config of the host backend. Threads: each rank's thread opens its own context with its own rank of local.
 *  Processes: each opens it with its own launch, 64 at most; collectives take device memory only (fsdp_allocator_alloc and
 *  pinned memory: what peers can map). Neither: a world of one. Pointers are read in fsdp_context_create only. */
typedef struct fsdp_host_config {
    size_t size;
    fsdp_local *local;             /**< ranks are threads of this process */
    uint32_t rank;                 /**< among local's; 0 with launch */
    uint64_t jitter_ns;            /**< every operation is delayed by a random time below this; 0: none. Finds missing edges */
    uint64_t jitter_seed;          /**< the same seed gives the same delays */
    const fsdp_launch *launch;     /**< ranks are processes of this machine, started by a launcher. Not with local */
    const fsdp_side_channel *side; /**< with launch: the caller's own side channel; NULL: a TCP star at launch's address */
    const fsdp_link *link;         /**< with launch: the wire, the same on every rank; NULL: as fast as memory is */
} fsdp_host_config;

#define FSDP_HOST_CONFIG_INIT {sizeof(fsdp_host_config), NULL, 0, 0, 0, NULL, NULL, NULL}

/** For fsdp_config.backend, whose default it is. */
FSDP_API const fsdp_backend *fsdp_host_backend(void);

#ifdef __cplusplus
}
#endif
#endif
