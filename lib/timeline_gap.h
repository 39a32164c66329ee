/* SPDX-License-Identifier: MIT */
/* Streams between their records. Of the caller's: on the tape of a backend that sees his kernels, nothing ran there; on CUDA
 * they did, or nothing. Of lanes: a collective that waited for its peers. */
#ifndef FSDP_LIB_TIMELINE_GAP_H
#define FSDP_LIB_TIMELINE_GAP_H

#include "timeline.h"

enum { FSDP__MAX_WINDOWS = 32 /* open on one stream at a time; deeper ones are not followed */ };

/* A unit between its begin and end on a stream. */
typedef struct fsdp__window {
    const char *label;
    bool writes; /* gradients */
} fsdp__window;

/* Time of a stream between two of its records, in which it neither stood in a wait nor ran an operation of the tape. */
typedef struct fsdp__gap {
    uint64_t start_ns, end_ns;
    /* Of it: the stream had nothing left when the host came with the next record. Where kernels are not seen it is all of the
     * gap or nothing, since they may have been a part of it. */
    uint64_t late_ns;
    const fsdp__window *inside; /* until the next record is read; NULL: outside any */
    /* Of a lane, where a collective's time begins when all ranks have come (not with NCCL): it had come, and waited for the
     * wire, which another lane has, or for another rank. */
    bool for_wire;
} fsdp__gap;

typedef struct fsdp__gap_stream {
    fsdp__window open[FSDP__MAX_WINDOWS];
    int n_open;
    uint64_t until_ns;
} fsdp__gap_stream;

typedef struct fsdp__gaps {
    bool sees_kernels;
    uint64_t behind_ns; /* where they are not: by which the device's clock is seen to be behind the host's */
    fsdp__gap_stream of[FSDP__TIMELINE_SLOTS];
} fsdp__gaps;

void fsdp__gaps_begin(fsdp__gaps *gaps, const fsdp_trace *trace);
/* Give it each record of the tape in order. True: a gap ends where this one begins. */
bool fsdp__gaps_read(fsdp__gaps *gaps, const fsdp_trace_record *record, fsdp__gap *out_gap);
/* The window that was opened last on that stream and is open, to which the caller's operations belong; or NULL. */
const fsdp__window *fsdp__gaps_window(const fsdp__gaps *gaps, int32_t slot);

#endif
