/* SPDX-License-Identifier: MIT */
/* A small training whose compute is copies on the device, so that it runs, and can be captured, on any backend with data: each
 * unit's gradients are what another unit's parameters were in forward, and part of a batch. Scripts of eager steps, captures
 * and replays; the same script with every replay as an eager step must end in the same bits. */
#ifndef CAPTURED_H
#define CAPTURED_H

#include "fsdp/fsdp.h"

enum {
    CAPTURED_UNITS = 4,
    CAPTURED_WIDE = 700, /* elements of a unit's first parameter */
    CAPTURED_SLIM = 130, /* and of its second */
    CAPTURED_ELEMS = CAPTURED_UNITS * (CAPTURED_WIDE + CAPTURED_SLIM),
    CAPTURED_STEPS = 64,
    CAPTURED_EVALS = 8
};

/* What the library leaves to its caller. begin … end: 0 is good. */
typedef struct captured_graphs {
    void *arg;
    int (*begin)(void *arg, fsdp_stream *s);
    int (*end)(void *arg, fsdp_stream *s, void **out_graph);
    int (*launch)(void *arg, void *graph, fsdp_stream *s);
    void (*destroy)(void *arg, void *graph);
} captured_graphs;

typedef struct captured_config {
    const char *script; /* E: an eager step. C: capture. R: replay. V: an evaluation; N: one on a new stream. S: a
                         * parameter is set, so that what is gathered is stale. r: as R, and it must be refused (a
                         * reference run leaves it out). 2: another stream replays from now on, or no longer */
    uint32_t depth;
    uint32_t n_inside; /* steps in a capture; 0 is 1 */
    bool held;         /* the first unit is */
    bool second;       /* a second compute stream in the windows of forward */
    bool scratch;      /* activations are blocks that each step takes and gives back */
} captured_config;

typedef struct captured_result {
    uint64_t n;                                                   /* steps */
    fsdp_step_report report[CAPTURED_STEPS + 1];                  /* of step 1, 2, … */
    uint16_t seen[CAPTURED_EVALS][CAPTURED_UNITS][CAPTURED_SLIM]; /* what evaluations have read */
    float master[CAPTURED_ELEMS], m[CAPTURED_ELEMS], v[CAPTURED_ELEMS];
    fsdp_model_stats stats;
    uint64_t eager_ns, n_eager;    /* host time of eager steps: hooks and update */
    uint64_t replay_ns, n_replays; /* and of fsdp_replay and fsdp_replayed, graph's launch left out */
    char why[1024];                /* the first error; "" */
} captured_result;

/* On a context of the caller's, which is empty afterwards. graphs NULL: everything is eager. */
fsdp_status captured_run(const captured_config *config, fsdp_context *ctx, const captured_graphs *graphs,
                         captured_result *result);
/* NULL: the two are the same to the bit; else what is not. */
const char *captured_difference(const captured_result *a, const captured_result *b);

/* ---- For tests that go step by step ---- */

typedef struct captured {
    captured_config config;
    fsdp_context *ctx;
    fsdp_stream *s, *second;
    fsdp_model *model;
    fsdp_unit *unit[CAPTURED_UNITS];
    fsdp_param *wide[CAPTURED_UNITS], *slim[CAPTURED_UNITS];
    fsdp_adamw *opt;
    fsdp_allocator *allocator;
    char *act[CAPTURED_UNITS], *side[CAPTURED_UNITS], *batch; /* bf16 */
    char *pinned;                                             /* a batch a step, then what evaluations have read */
    uint64_t n_steps, n_evals;
} captured;

fsdp_status captured_open(captured *t, const captured_config *config, fsdp_context *ctx);
fsdp_status captured_close(captured *t);
/* The args of step k, 1, 2, … */
fsdp_adamw_args captured_args(uint64_t k);
/* The next step's batch, on s. */
fsdp_status captured_batch(captured *t, fsdp_stream *s);
/* A step's hooks and update. */
fsdp_status captured_step(captured *t, const fsdp_adamw_args *args);
fsdp_status captured_eval(captured *t);

#endif
