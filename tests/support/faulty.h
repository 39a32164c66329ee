/* SPDX-License-Identifier: MIT */
/* A backend around another one, of which the n-th operation at a seam fails: once, or it and all later ones, with what that
 * seam really gives and what really follows. And it counts what is live, so that nothing can be leaked unseen.
 *
 *  NO_MEMORY, NO_HOST_MEMORY  nothing has happened; the next one may succeed.
 *  DEVICE                     the device is broken: from here on it refuses everything and skips what it was given. (Of
 *                             opening a device or creating a stream: that one thing only.)
 *  TIMEOUT                    what was waited for had more time than that; ask again. Not where the time is without end.
 *  RANK_LOST                  the communicator or side channel has failed, for every rank.
 *
 * One faulty a rank; it outlives the rank's context. Counting is for all threads. */
#ifndef FAULTY_H
#define FAULTY_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "forward.h"
#include "fsdp/backend.h"
#include "fsdp/context.h"

typedef enum faulty_seam {
    FAULTY_HOST_ALLOC, /* through faulty_host */
    FAULTY_DEVICE_OPEN,
    FAULTY_MEM_ALLOC,
    FAULTY_STREAM_CREATE,
    FAULTY_EVENT_CREATE,
    FAULTY_RECORD,
    FAULTY_WAIT,
    FAULTY_LAUNCH,
    FAULTY_QUERY,
    FAULTY_EVENT_WAIT,
    FAULTY_DRAIN,
    FAULTY_COMM_OPEN,
    FAULTY_ATTACH,
    FAULTY_ENQUEUE,
    FAULTY_SIDE_OPEN,
    FAULTY_ALL_GATHER,
    FAULTY_BROADCAST,
    FAULTY_SEAMS
} faulty_seam;

typedef struct faulty {
    forward_to to;
    pthread_mutex_t lock; /* over the rest */
    faulty_seam seam;
    fsdp_status status;
    uint64_t nth;  /* 1: the next one; 0: none */
    uint32_t rank; /* once the side channel is open */
    bool for_good;
    uint64_t n_seen;                                           /* at the seam since it was armed */
    uint64_t n_failed;                                         /* of these */
    int64_t host_bytes, device_bytes, pinned_bytes, n_objects; /* live; objects: devices, streams, events, channels */
} faulty;

void faulty_init(faulty *f, const fsdp_backend *inner, const void *inner_config);
void faulty_fini(faulty *f);
/* From now on. nth 0: none fails any more. */
void faulty_arm(faulty *f, faulty_seam seam, fsdp_status status, uint64_t nth, bool for_good);
uint64_t faulty_n_failed(faulty *f);
/* "" if nothing is live; else what. */
const char *faulty_live(faulty *f);

/* backend_config is the faulty. */
const fsdp_backend *faulty_backend(void);
fsdp_host_allocator faulty_host(faulty *f);

const char *faulty_seam_name(faulty_seam seam);
/* The k-th status that the seam can fail with; FSDP_OK: there are no more. */
fsdp_status faulty_status(faulty_seam seam, uint32_t k);

#endif
