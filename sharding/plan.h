/* SPDX-License-Identifier: MIT */
/* Every offset and every byte, before any is taken. */
#ifndef FSDP_SHARDING_PLAN_H
#define FSDP_SHARDING_PLAN_H

#include "sharding/model.h"

/* Lay out every unit, build the passes, place every visit, add up every byte: what predict answers and seal takes.
 * Fills unit layouts, passes' offsets, model->schedule and model->plan; takes no device memory. May be called again.
 * Errors: STATE (no unit), ARG, NO_HOST_MEMORY. */
fsdp_status fsdp__plan_build(fsdp_model *model);

#endif
