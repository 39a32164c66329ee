/* SPDX-License-Identifier: MIT */
/* The one caller of a backend's collective table: arguments, counts and tape. With the context's lock held. */
#ifndef FSDP_LIB_COMM_H
#define FSDP_LIB_COMM_H

#include "clock.h"
#include "fsdp/comm.h"

fsdp_status fsdp__comm_open(fsdp_context *ctx, const fsdp_config *config, uint32_t index, fsdp_comm **out_comm);
void fsdp__comm_close(fsdp_comm *comm);
fsdp_status fsdp__comm_check(fsdp_comm *comm);
void fsdp__comm_abort(fsdp_comm *comm);
/* Enqueue n operations (1 to 16) as one group; spans and tape records are filled in here. */
fsdp_status fsdp__comm_enqueue(fsdp_comm *comm, fsdp_stream *s, fsdp_collective *list, uint32_t n);

/* A handle that owns its end event; and that event's record, on the operation's stream. */
fsdp_status fsdp__work_create(fsdp_context *ctx, fsdp_work **out_work);
fsdp_status fsdp__work_record(fsdp_work *work, fsdp_stream *s);

#endif
