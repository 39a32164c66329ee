/* SPDX-License-Identifier: MIT */
/* The line that is watched: redrawn in place on a terminal, a plain line now and then elsewhere. */
#ifndef GPT_PROGRESS_H
#define GPT_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>

typedef struct progress {
    const char *label;
    int steps;
    double tokens_a_step;
    bool terminal;
    double begun_s, drawn_s, evaluating_s;
    double exposed;        /* share of the last traced step in which compute stood; below 0: unknown */
    uint64_t memory_bytes; /* device memory of a rank; 0: unknown */
    double held_out;       /* the last evaluation; below 0: none yet */
} progress;

void progress_begin(progress *p, const char *label, int steps, double tokens_a_step);
/* After each step. p may be NULL. */
void progress_step(progress *p, int step, float loss);
/* An evaluation: its result, and how long it took, which does not count towards tokens/s. p may be NULL. */
void progress_evaluated(progress *p, int step, double held_out, double took_s);
/* Takes the line away. p may be NULL. */
void progress_end(progress *p);

#endif
