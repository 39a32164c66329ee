/* SPDX-License-Identifier: MIT */
/* The parts of an AdamW step that a replay does anew. */
#ifndef FSDP_SHARDING_OPTIM_H
#define FSDP_SHARDING_OPTIM_H

#include "sharding/model.h"

/* The caller's, checked. Errors: ARG, in the name of `call`. */
fsdp_status fsdp__adamw_args_read(const char *call, const fsdp_adamw_args *given, fsdp_adamw_args *a);
/* Give the device the host's values of update `step`, in the place where its STEP_RESULT reads them: 0 of an eager step; each
 * step of a capture has its own. */
fsdp_status fsdp__step_input(const fsdp_adamw *opt, const fsdp_adamw_args *args, uint64_t step, uint32_t place,
                             fsdp_stream *s);
/* The report of update `step` is written once s has come this far. */
fsdp_status fsdp__report_record(fsdp_model *model, uint64_t step, fsdp_stream *s);

#endif
