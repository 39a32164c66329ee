/* SPDX-License-Identifier: MIT */
/* Lists of visits, before and at seal. */
#ifndef FSDP_SHARDING_PASS_H
#define FSDP_SHARDING_PASS_H

#include "sharding/model.h"

/* Places for TRAIN and EVAL, empty until passes_build. */
fsdp_status fsdp__passes_init(fsdp_model *model);
void fsdp__passes_fini(fsdp_model *model);
/* Make TRAIN and EVAL from the units there are now. May be called again as units come. */
fsdp_status fsdp__passes_build(fsdp_model *model);

#endif
