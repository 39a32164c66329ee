/* SPDX-License-Identifier: MIT */
/* The sim backend: virtual time, worked out when an operation is enqueued: nothing that comes later can change it.
 *
 * A stream is the time at which its last operation ends, an event the time at which it happens, a communicator the time
 * at which its wire is free, the host a clock that only calls that block move. An operation starts when its stream, the
 * host and its wire are there, and ends after what the config says that it costs. */
#ifndef FSDP_LIB_SIM_H
#define FSDP_LIB_SIM_H

#include "fsdp/backend.h"
#include "fsdp/sim.h"

__extension__ typedef unsigned __int128 fsdp__u128;

typedef struct fsdp__sim_device fsdp__sim_device;

extern const fsdp_comm_ops fsdp__sim_comm_ops;
extern const fsdp_side_ops fsdp__sim_side_ops;

/* The caller's config, or the defaults for NULL. Errors: ARG: size, world, rank, alignment, granularity. */
fsdp_status fsdp__sim_read_config(const void *backend_config, fsdp_sim_config *out);

/* Add without wrapping: the end of time is UINT64_MAX. */
uint64_t fsdp__sim_add_ns(uint64_t a, uint64_t b);
/* ceil(bytes × 10^9 / bytes_per_second), exactly; 0 for a rate of 0, which is infinite. bytes < 2^98. */
uint64_t fsdp__sim_transfer_ns(fsdp__u128 bytes, uint64_t bytes_per_second);

/* Keep stream busy for ns, from the first moment that is not before not_before_ns. */
fsdp_status fsdp__sim_occupy(fsdp__sim_device *dev, void *stream, uint64_t not_before_ns, uint64_t ns,
                             fsdp_span *out_span);

#endif
