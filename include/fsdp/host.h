/* SPDX-License-Identifier: MIT */
/** @file host.h  The host backend: a thread a stream, ranks as threads of one process. No GPU, no daemon. */
#ifndef FSDP_HOST_H
#define FSDP_HOST_H

#include "fsdp/context.h"

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

/** backend_config of the host backend. Each rank's thread opens its own context with its own rank. */
typedef struct fsdp_host_config {
    size_t size;
    fsdp_local *local;    /**< NULL: a world of one */
    uint32_t rank;
    uint64_t jitter_ns;   /**< every operation is delayed by a random time below this; 0: none. Shakes out missing edges */
    uint64_t jitter_seed; /**< the same seed gives the same delays */
} fsdp_host_config;

#define FSDP_HOST_CONFIG_INIT {sizeof(fsdp_host_config), NULL, 0, 0, 0}

FSDP_API const fsdp_backend *fsdp_host_backend(void);

#ifdef __cplusplus
}
#endif
#endif
