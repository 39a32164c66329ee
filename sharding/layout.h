/* SPDX-License-Identifier: MIT */
/* Where the parameters of a unit lie in its flat groups. */
#ifndef FSDP_SHARDING_LAYOUT_H
#define FSDP_SHARDING_LAYOUT_H

#include "sharding/model.h"

/* Lay the unit's parameters out over `world` ranks: groups, offsets, padded sizes. Pure; may be called again.
 * Errors: ARG (no parameter, more than 2^48 elements). */
fsdp_status fsdp__layout_unit(fsdp_unit *unit, uint32_t world);
/* The part of a parameter that lies in rank's shard: *begin, *count in its own elements, *at in the shard. count 0: none. */
void fsdp__layout_range(const fsdp_param *param, uint32_t rank, uint64_t *begin, uint64_t *count, uint64_t *at);

#endif
