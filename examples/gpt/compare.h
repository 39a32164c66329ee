/* SPDX-License-Identifier: MIT */
/* The first steps of a job again: without a wire, then over a modelled one with prefetch off and on, then unsharded. What
 * prefetch is worth, and that it changes no bit. */
#ifndef GPT_COMPARE_H
#define GPT_COMPARE_H

#include "job.h"

typedef struct comparison {
    int steps, depth; /* of prefetch on */
    int link_us, link_mb_per_s;
    bool fitted;          /* the link was chosen here */
    double compute_ms;    /* a step without a wire */
    double wire_ms;       /* what the link takes for a step's collectives, by its formula */
    double off_ms, on_ms; /* a step over the link */
    double compute_exposed_ms, off_exposed_ms, on_exposed_ms; /* of these, rank 0's compute stood (one step) */
    double efficiency; /* max(compute, wire) / on: 1 where all that can be hidden is */
    bool identical;    /* losses of all runs, and of the first steps of `trained`, bit for bit */
    bool has_plain;    /* the unsharded loop was among them (not with clipping) */
} comparison;

/* False: `why` has the sentence. */
bool compare_run(const job *trained, const outcome *trained_out, comparison *out, problem *why);
void compare_print(const comparison *c, FILE *to);

#endif
