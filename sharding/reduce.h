/* SPDX-License-Identifier: MIT */
/* From a full gradient buffer onto the shard. */
#ifndef FSDP_SHARDING_REDUCE_H
#define FSDP_SHARDING_REDUCE_H

#include "sharding/model.h"

/* Find bytes for the unit's gradients, on s: the shard's, if aliased. planned: offset in the grad range, or UINT64_MAX. What
 * they need beside fsdp__grad_edges goes into need. Host only: fsdp__give_grads takes it back. Errors: NO_MEMORY (off plan;
 * nothing changed). */
fsdp_status fsdp__take_grads(fsdp_unit *unit, uint64_t planned, fsdp_stream *s, fsdp__need *need);
void fsdp__give_grads(fsdp_unit *unit);
/* On the reduce lane, behind what wrote the gradients: onto the shard, then the buffer is free. Aliased: they are there. */
fsdp_status fsdp__reduce(fsdp_unit *unit);
void fsdp__set_grad_ptrs(fsdp_unit *unit);

#endif
