/* SPDX-License-Identifier: MIT */
/* The one caller of a backend's collective table: arguments, counts and tape. With the context's lock held. */
#ifndef FSDP_LIB_COMM_H
#define FSDP_LIB_COMM_H

#include "clock.h"
#include "fsdp/backend.h"
#include "fsdp/comm.h"

fsdp_status fsdp__comm_open(fsdp_context *ctx, const fsdp_config *config, uint32_t index, fsdp_comm **out_comm);
void fsdp__comm_close(fsdp_comm *comm);
fsdp_status fsdp__comm_check(fsdp_comm *comm);
void fsdp__comm_abort(fsdp_comm *comm);
/* The backend's own, if it is ops'; else NULL. */
void *fsdp__comm_native(const fsdp_comm *comm, const fsdp_comm_ops *ops);
/* Tell the backend of device memory that collectives will be in; and take it back. Collective; the lock is not needed. A NULL
 * comm or handle is nothing. */
fsdp_status fsdp__comm_attach(fsdp_comm *comm, fsdp_operation kind, void *base, uint64_t bytes, void **out_handle);
void fsdp__comm_detach(fsdp_comm *comm, void *handle);
/* Enqueue n operations (1 to 16) as one group; spans and tape records are filled in here. */
fsdp_status fsdp__comm_enqueue(fsdp_comm *comm, fsdp_stream *s, fsdp_collective *list, uint32_t n);

/* A handle that owns its end event; and that event's record, on the operation's stream. */
fsdp_status fsdp__work_create(fsdp_context *ctx, fsdp_work **out_work);
fsdp_status fsdp__work_record(fsdp_work *work, fsdp_stream *s);

#endif
