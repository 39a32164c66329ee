/* SPDX-License-Identifier: MIT */
/* What seal took, given back. */
#ifndef FSDP_SHARDING_SEAL_H
#define FSDP_SHARDING_SEAL_H

#include "sharding/model.h"

/* Give back everything that the plan and seal took, host and device; a model that was never sealed is fine. Streams are
 * idle; the lock is held. */
void fsdp__unseal(fsdp_model *model);

#endif
