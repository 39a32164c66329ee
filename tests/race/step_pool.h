/* SPDX-License-Identifier: MIT */
/* A count of its own of what lies in a rank's gather and grad range: sizes from the shape, places from the pool's history,
 * checked against what the tape says was used. It knows the rules of docs/schedule.md, not the code that follows them. */
#ifndef STEP_POOL_H
#define STEP_POOL_H

#include "step_rig.h"

typedef struct step_block {
    uint64_t begin, bytes; /* offset */
    bool live;
} step_block;

typedef struct step_pool {
    fsdp_allocator *pool;
    uint64_t bytes, n_seen;   /* of the range; events of the history */
    uint64_t each[TOY_UNITS]; /* what each unit takes */
    step_block block[TOY_UNITS];
} step_pool;

typedef struct step_visit {
    uint32_t unit;
    bool backward;
} step_visit;

typedef struct step_pools {
    toy *t;
    step_pool full, grad;
    uint64_t n_tape; /* records seen */
    uint32_t n_open[TOY_UNITS][2];
    /* The passes TRAIN and EVAL, what follows in this one, and where its host is. */
    step_visit visit[4 * TOY_UNITS];
    uint32_t n_visits, n_pass, at;
    uint64_t n_evicted;
    uint32_t last_evicted;
} step_pools;

void step_pools_open(step_pools *p, toy *t);
/* A pass begins: the visits of `train`, or of its first half, and then those of next, if it is no -1. */
void step_pools_pass(step_pools *p, bool train, int32_t next);
/* A begin hook is about to come: the cursor behind it. */
uint32_t step_pools_advance(const step_pools *p, uint32_t unit, bool backward);
/* After each call that may move buffers: follow the history; whoever was evicted must have been the one to go.
 * unit: whose hook it was; UINT32_MAX: no begin hook's. */
fsdp_status step_pools_look(step_pools *p, uint32_t unit);
/* Would the unit fit, with nothing there but what is open, and held? *out_free: how much is free so, in all. */
bool step_pool_fits(const step_pools *p, const step_pool *pool, uint32_t unit, uint64_t *out_free);

#endif
