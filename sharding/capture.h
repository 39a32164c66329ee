/* SPDX-License-Identifier: MIT */
/* What the rest of sharding/ tells the captures. */
#ifndef FSDP_SHARDING_CAPTURE_H
#define FSDP_SHARDING_CAPTURE_H

#include "lib/graph.h"
#include "sharding/model.h"

/* An fsdp_adamw_step of the capture that is on; *out_place: of its host values. Errors: STATE (the ninth of a model);
 * NO_HOST_MEMORY; nothing has been enqueued. */
fsdp_status fsdp__capture_step(fsdp_model *model, uint32_t *out_place);
/* The model goes: captures of it can be replayed no more. With the lock held. */
void fsdp__capture_forget(const fsdp_model *model);

#endif
