/* SPDX-License-Identifier: MIT */
/* attach and detach for the table of a communicator that has nothing to do there. */
#ifndef FSDP_LIB_ATTACH_H
#define FSDP_LIB_ATTACH_H

#include "fsdp/backend.h"

static inline fsdp_status fsdp__attach_nothing(void *comm, fsdp_operation kind, void *base, uint64_t bytes,
                                               void **out_handle)
{
    (void)comm, (void)kind, (void)base, (void)bytes;
    *out_handle = NULL;
    return FSDP_OK;
}

static inline void fsdp__detach_nothing(void *comm, void *handle) { (void)comm, (void)handle; }

#endif
