/* SPDX-License-Identifier: MIT */
/* This rank's bytes. */
#ifndef FSDP_SHARDING_SHARD_H
#define FSDP_SHARDING_SHARD_H

#include "sharding/model.h"

/* Take every byte of the plan: shards, pools, scratch, report ring. On failure what was taken stays noted in the model, for
 * fsdp__unseal. The lock is held. */
fsdp_status fsdp__shard_alloc(fsdp_model *model);
/* Upload the kernel tables and enqueue zeros for shards, moments and step records, on the copy lane; waits until they are
 * there. */
fsdp_status fsdp__shard_clear(fsdp_model *model);

#endif
