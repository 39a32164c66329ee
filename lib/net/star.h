/* SPDX-License-Identifier: MIT */
/* The side channel between processes: a star of TCP (or Unix) connections whose hub is rank 0; and the caller's own function
 * in its place. Both are side tables for any backend whose ranks are processes.
 *
 *  hub     rank 0. It listens until every rank of the job has come, then closes the door. It puts blobs together and passes
 *          failures on.
 *  door    who comes says magic, version, job nonce, world and rank within a second or two; who does not is let go and
 *          harms nobody. A rank that is there already is asked to come again later: it may be the next context's.
 *  thread  each rank has one, asleep in poll(): it notices at once when the hub, or a rank, is gone; it answers for this
 *          rank's words while the host is busy elsewhere. A world of one has neither thread nor socket.
 *  memory  all is taken at open, but for blobs above 64 bytes. A rank that gets none for such a call fails it on every rank
 *          (NO_HOST_MEMORY), and the channel is good as before. At open it is the same, unless it is rank 0 that gets none:
 *          then the others wait for their deadline.
 *  leaving whoever closes says goodbye; that is no failure until a call needs it. Once rank 0 has left nobody passes anything
 *          on: calls fail, and `fail` is heard on its own rank only. */
#ifndef FSDP_LIB_NET_STAR_H
#define FSDP_LIB_NET_STAR_H

#include "fsdp/backend.h"
#include "fsdp/launch.h"

/* backend_config of the two tables. */
typedef struct fsdp__star_config {
    const fsdp_launch *launch;
    const fsdp_side_channel *own; /* fsdp__own_side_ops only */
    int listener; /* rank 0: a socket that listens already and becomes the star's; -1: it opens launch's */
} fsdp__star_config;

extern const fsdp_side_ops fsdp__star_side_ops;
extern const fsdp_side_ops fsdp__own_side_ops;

/* Listen on any free port of this machine; for a job whose ranks have another way to tell each other the port.
 * Errors: RANK_LOST with errno's words. */
fsdp_status fsdp__star_listen(int *out_listener, uint16_t *out_port);

#endif
