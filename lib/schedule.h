/* SPDX-License-Identifier: MIT */
/* The schedule: from a pass, a depth and a byte budget, what to gather ahead, what to keep, and how long each buffer lives.
 * Pure, over unit numbers, sizes and positions: no device, no time, no history. docs/schedule.md has the rules. */
#ifndef FSDP_LIB_SCHEDULE_H
#define FSDP_LIB_SCHEDULE_H

#include "placement.h"

typedef struct fsdp__visit {
    uint32_t unit;
    uint32_t until; /* last visit that begins inside this window; its own index if none does */
} fsdp__visit;

typedef struct fsdp__visit_list {
    const fsdp__visit *visits;
    uint32_t n;
} fsdp__visit_list;

typedef struct fsdp__schedule {
    uint32_t depth;
    uint64_t budget;       /* most bytes gathered ahead; 0: no limit */
    const uint64_t *bytes; /* of each unit's gathered buffer */
    const uint8_t *held;   /* of each unit: 1 if it counts for nothing here */
} fsdp__schedule;

/* Where the host is: the next visit, and what follows the pass without an update between (n = 0: nothing). */
typedef struct fsdp__cursor {
    fsdp__visit_list pass, next;
    uint32_t at; /* 0 … pass.n; positions from pass.n on lie in next */
} fsdp__cursor;

/* The visit at position i, counted through pass and next; NULL beyond both. */
const fsdp__visit *fsdp__schedule_visit(const fsdp__cursor *cursor, uint32_t i);

/* Walk ahead: *position begins at cursor->at and is moved behind each visit returned; *state begins as zeros. Returns the
 * next visit to have gathered (held ones on the way included), or NULL when depth, budget or the passes end.
 * *over_budget: the unit at which the budget ended it. */
typedef struct fsdp__ahead {
    uint32_t position, n_counted;
    uint64_t bytes;
    bool over_budget;
} fsdp__ahead;
const fsdp__visit *fsdp__schedule_ahead(const fsdp__schedule *schedule, const fsdp__cursor *cursor, fsdp__ahead *state);

/* True if a unit whose window has just closed stays gathered: its next visit is at most `depth` other units away. */
bool fsdp__schedule_keeps(const fsdp__schedule *schedule, const fsdp__cursor *cursor, uint32_t unit);

/* How long each gathered buffer of a pass lives, when the pass is entered with nothing gathered and `next` follows it:
 * visits' indices, both included. visit_life[i]: the life that visit i finds its unit in; -1 for a held one.
 * At most pass.n lives, sorted by begin; each keeps its unit in unit[]. Errors: NO_HOST_MEMORY. */
typedef struct fsdp__lives {
    fsdp__life *life;
    uint32_t *unit;
    int32_t *visit_life;
    uint32_t n;
} fsdp__lives;
fsdp_status fsdp__schedule_lives(const fsdp_host_allocator *host, const fsdp__schedule *schedule,
                                 const fsdp__cursor *start, uint32_t n_units, fsdp__lives *lives);

/* If the visits that are not held read the same from both ends (forward and its mirror, no windows that nest; a unit may be
 * visited more often in a row on the way back, not less), the index of the last visit of the first half, the middle unit's; -1
 * if not. */
int32_t fsdp__schedule_mirror(const fsdp__schedule *schedule, fsdp__visit_list pass);

#endif
