/* SPDX-License-Identifier: MIT */
/* Gathering ahead and now, and giving back. */
#ifndef FSDP_SHARDING_UNSHARD_H
#define FSDP_SHARDING_UNSHARD_H

#include "sharding/model.h"

/* True if the unit's full parameters are there, or on their way, and current. */
bool fsdp__is_gathered(const fsdp_unit *unit);
/* Gather it for a visit whose begin hook is being called. planned: its offset in the gather range, or UINT64_MAX.
 * Errors: NO_MEMORY (off plan; nothing changed). */
fsdp_status fsdp__gather_now(fsdp_unit *unit, uint64_t planned);
/* Gather, on the cursor's behalf, what depth and budget allow: each at its planned place, if that is free. */
fsdp_status fsdp__gather_ahead(fsdp_model *model);
/* Give the buffer back; its uses are noted. Not for held units. */
void fsdp__reshard(fsdp_unit *unit);
/* True if a gathered unit stays until its next visit: soon enough by the schedule, and in its place. */
bool fsdp__stays(const fsdp_unit *unit);
/* Give back every gathered unit that is not open and does not stay. */
void fsdp__reshard_unwanted(fsdp_model *model);
/* Give back what was gathered from shards that have been written since, unless it is held. */
void fsdp__reshard_stale(fsdp_model *model);
/* Address of its gathered buffer. */
uint64_t fsdp__full_begin(const fsdp_unit *unit);
/* The pointers of its parameters. */
void fsdp__set_param_ptrs(fsdp_unit *unit);

#endif
