/* SPDX-License-Identifier: MIT */
/* Placement: where buffers whose lives are known lie in one contiguous range. Pure: sizes and positions in, offsets out. */
#ifndef FSDP_LIB_PLACEMENT_H
#define FSDP_LIB_PLACEMENT_H

#include <stdint.h>

#include "fsdp/context.h"

/* A buffer, live from position `begin` to position `end` of a pass, both included. */
typedef struct fsdp__life {
    uint32_t begin, end;
    int32_t same_as; /* index of an earlier life whose offset this one must have (same bytes); -1: free choice */
    uint64_t bytes;  /* > 0, a multiple of the alignment */
} fsdp__life;

typedef struct fsdp__placement {
    uint64_t bytes;     /* of the range: the least that was found */
    uint64_t live_peak; /* most bytes live at one position: no placement can do with less */
} fsdp__placement;

/* Two-ended placement with a beam: lives are sorted by begin; each goes to the low or the high end of a gap. Reaches the
 * live peak for the shapes of GPT-2 and Llama. out_offsets[n]. The same input gives the same offsets everywhere.
 * Errors: NO_HOST_MEMORY. */
fsdp_status fsdp__place(const fsdp_host_allocator *host, const fsdp__life *lives, uint32_t n, uint64_t alignment,
                        uint64_t *out_offsets, fsdp__placement *out);

#endif
