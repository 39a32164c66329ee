/* SPDX-License-Identifier: MIT */
/* A published model's training step on the sim backend, and what its two pools held: read off the tape, and counted by
 * the words of docs/schedule.md alone. Neither looks at the placement, the plan or the schedule. */
#ifndef FSDP_TESTS_POOL_RUN_H
#define FSDP_TESTS_POOL_RUN_H

#include "shapes.h"

enum { POOL_MAX_GRAD_BUFFERS = 8 };

typedef enum pool_kind { POOL_GATHER, POOL_GRAD, POOL_N_KINDS } pool_kind;

typedef struct pool_case {
    const published *model;
    shapes_options options;
    uint32_t world, depth;
    fsdp_accumulation accumulation; /* other than NONE: two micro-steps a step */
    uint32_t grad_buffers;          /* at most POOL_MAX_GRAD_BUFFERS */
} pool_case;

typedef enum pool_event_kind { POOL_FREE, POOL_UPDATE, POOL_ALLOC } pool_event_kind; /* their order at one moment */

typedef struct pool_event {
    uint64_t when;  /* gather: twice the place on the tape, one more to free; grad: device time */
    uint32_t index; /* makes the order total */
    pool_event_kind kind;
    uint32_t life; /* ALLOC, FREE: which buffer */
    uint64_t bytes;
} pool_event;

/* What a pool was asked for, in order. */
typedef struct pool_events {
    pool_event *event;
    size_t n, capacity;
    uint32_t n_lives;
    uint64_t live_peak;
} pool_events;

typedef struct pool_result {
    fsdp_memory memory;                    /* what seal took */
    uint64_t reserved[POOL_N_KINDS];       /* of it, the pool's */
    uint64_t extent[POOL_N_KINDS];         /* from the pool's first to its last byte that a tape names */
    uint64_t counted[POOL_N_KINDS];        /* live peak by the words */
    uint64_t counted_params[POOL_N_KINDS]; /* the same without pads between parameters and ranks */
    pool_events events[POOL_N_KINDS];      /* live peak by the tape */
    fsdp_model_stats stats;
    fsdp_counters counters;
} pool_result;

/* Two steps (three with one micro-step each). Reductions are far behind, so that as many gradient buffers are in flight
 * as may be. Free the result with pool_result_free, also after an error. */
fsdp_status pool_run(const pool_case *c, pool_result *out);
void pool_result_free(pool_result *r);

#endif
