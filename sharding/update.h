/* SPDX-License-Identifier: MIT */
/* The bracket around whatever writes shards. */
#ifndef FSDP_SHARDING_UPDATE_H
#define FSDP_SHARDING_UPDATE_H

#include "sharding/model.h"

/* The bracket's three calls, checked by the caller, lock held. */
fsdp_status fsdp__update_begin(fsdp_model *model, fsdp_stream *s);
fsdp_status fsdp__update_unit(fsdp_unit *unit, fsdp_stream *s);
fsdp_status fsdp__update_end(fsdp_model *model, fsdp_stream *s);
fsdp_status fsdp__check_update_begin(const char *call, fsdp_model *model, fsdp_stream *s);

/* MISMATCH, on every rank, once the device has found in a step's sum that ranks have enqueued different collectives. Looks at
 * pinned memory and no more. */
fsdp_status fsdp__check_order(fsdp_model *model);

#endif
