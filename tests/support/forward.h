/* SPDX-License-Identifier: MIT */
/* Tables of a backend around another one that pass every call on. A backend that does more in some of them takes copies, puts
 * its own functions in their places, and calls these for the rest. Its devices, communicators and side channels are
 * `forwarded`; streams, events and memory are the inner backend's. */
#ifndef FORWARD_H
#define FORWARD_H

#include "fsdp/backend.h"

/* What backend_config points to begins with it. */
typedef struct forward_to {
    const fsdp_backend *inner;
    const void *inner_config;
} forward_to;

typedef struct forwarded {
    forward_to *to;
    void *inner;
} forwarded;

extern const fsdp_device_ops forward_device_ops;
extern const fsdp_comm_ops forward_comm_ops;
extern const fsdp_side_ops forward_side_ops;

#endif
