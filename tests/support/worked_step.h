/* SPDX-License-Identifier: MIT */
/* A training step written out by hand: three blocks and a held unit, depth 1, two micro-steps, AdamW with clipping;
 * every edge and byte range, on a tape without a library behind it. Times are those of three streams and one wire. */
#ifndef WORKED_STEP_H
#define WORKED_STEP_H

#include "context.h"
#include "fsdp/trace.h"

enum { WORKED_COMPUTE = 3, WORKED_NO_WAIT = -1 };

typedef struct worked_step {
    fsdp_context ctx;
    fsdp_stream stream[4];
    fsdp_trace *trace;
    int leave_out;       /* this wait, counted from 0, is left out; WORKED_NO_WAIT: none */
    uint32_t compute_us; /* forward of a block; everything else is a multiple */
    /* inside */
    int n_waits, n_blind_waits; /* waits put so far; of these, for events recorded before the tape begins */
    uint64_t now_ns[4], wire_ns, event_ns[64];
    bool recorded[64];
} worked_step;

/* A context that is good for a trace and nothing else. */
void worked_open(worked_step *w, uint64_t max_records);
void worked_close(worked_step *w);
/* Stop the trace. There is no device: none of its streams is asked whether it is idle. */
fsdp_status worked_stop(worked_step *w);
/* Put one more step on the tape. */
void worked_add(worked_step *w);

#endif
