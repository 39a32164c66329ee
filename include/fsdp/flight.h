/* SPDX-License-Identifier: MIT */
/** @file flight.h  The flight recorder: what this rank's last 256 collectives and collective host calls were.
 *
 *  It is always on (a few ns a collective), and part of what every rank is told when one is late, lost or out of order.
 *  As a file it is one JSON object a rank, in the order in which the host made the calls. */
#ifndef FSDP_FLIGHT_H
#define FSDP_FLIGHT_H

#include "fsdp/context.h"

#ifdef __cplusplus
extern "C" {
#endif

/** How many calls it keeps. */
#define FSDP_FLIGHT_CALLS 256

/** Write it to the file @p path, whole or not at all: a file of that name is replaced, a link or a device is refused.
 *  Thread: any. Never waits for the device or another rank; works on a context that has failed, which is when it is wanted
 *  most.
 *  {"version":1,"rank":2,"world":4,"status":"FSDP_OK","error":"","hash":["…","…"],"n":[811,0],
 *   "calls":[{"comm":0,"number":811,"part":0,"of":1,"call":"all-gather","what":"h.0","pass":"EVAL","count":294912,
 *             "dtype":"bf16","root":0,"enqueued_ns":123,"state":"done"}, …]}
 *  comm: 0, 1, or -1 for a host call, which has number, call, what, enqueued_ns and state only. number: of the group on its
 *  communicator, or of the host call; part and of: which of the group. state: "done", "enqueued" (on a stream, not known to be
 *  done), or, of a host call, "inside" or "returned". hash and n: rolling hash and number of each communicator's groups: equal
 *  between ranks that have made the same calls. Times: fsdp_context_now_ns. Errors: ARG, NO_HOST_MEMORY, IO. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_flight_write_json(fsdp_context *ctx, const char *path);

#ifdef __cplusplus
}
#endif
#endif
