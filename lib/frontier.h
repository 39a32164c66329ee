/* SPDX-License-Identifier: MIT */
/* Frontiers: the clocks that blocks carry. What must come before a block's next use is nearly always one point or two (its
 * own stream's last use, and that of one stream beside it), so two points lie in place; a third stream makes it wide: a
 * whole clock of its own, shared by whoever copies it, and never changed once it is shared. */
#ifndef FSDP_LIB_FRONTIER_H
#define FSDP_LIB_FRONTIER_H

#include "clock.h"
#include "mutate.h"

typedef struct fsdp__wide {
    fsdp__clock clock;
    struct fsdp__wide *next; /* of the spare ones */
    uint32_t n_owners;
} fsdp__wide;

typedef struct fsdp__frontier {
    fsdp__point point[2]; /* of two streams; 0: none. The second is 0 where the first is. Both 0 if it is wide */
    fsdp__wide *wide;     /* NULL: the points are all */
} fsdp__frontier;

/* Where wide ones come from. */
typedef struct fsdp__wides {
    const fsdp_host_allocator *host;
    fsdp__wide *spare;
    uint32_t n_spare;
    void *chunks;
} fsdp__wides;

void fsdp__wides_fini(fsdp__wides *wides);
/* Have n at hand, so that the next n that are needed cannot fail. Errors: NO_HOST_MEMORY. */
fsdp_status fsdp__wides_reserve(fsdp__wides *wides, uint32_t n);

__attribute__((cold)) void fsdp__frontier_drop_wide(fsdp__wides *wides, fsdp__frontier *f);
__attribute__((cold)) void fsdp__frontier_add_third(fsdp__wides *wides, fsdp__frontier *f, fsdp__point point);
__attribute__((cold)) bool fsdp__frontier_covered_wide(const fsdp__clock *now, const fsdp__frontier *f);
__attribute__((cold)) bool fsdp__frontier_equal_wide(const fsdp__frontier *a, const fsdp__frontier *b);
/* into becomes the maximum of both. May take one spare wide. */
void fsdp__frontier_max(fsdp__wides *wides, fsdp__frontier *into, const fsdp__frontier *other);
/* Make it wide now, and nobody else's, so that later points need no memory. May take one spare wide. */
void fsdp__frontier_widen(fsdp__wides *wides, fsdp__frontier *f);
/* What of it a stream with this clock is not behind yet goes into need; bit t: stream t is among it. */
uint32_t fsdp__need_frontier(fsdp__need *need, const fsdp__frontier *f, const fsdp__clock *now, fsdp_reason reason);
/* The epoch of one; 0: none. */
static inline uint64_t fsdp__frontier_at(const fsdp__frontier *f, int slot)
{
    if (f->wide != NULL) return f->wide->clock.at[slot];
    for (int i = 0; i < 2; i++)
        if (f->point[i] != 0 && f->point[i] % FSDP__SLOTS == (unsigned)slot) return f->point[i] / FSDP__SLOTS;
    return 0;
}
/* Nothing of this slot any more. f is nobody else's. */
static inline void fsdp__frontier_remove(fsdp__frontier *f, int slot)
{
    if (f->wide != NULL) f->wide->clock.at[slot] = 0;
    if (f->point[0] != 0 && f->point[0] % FSDP__SLOTS == (unsigned)slot) f->point[0] = f->point[1], f->point[1] = 0;
    if (f->point[1] != 0 && f->point[1] % FSDP__SLOTS == (unsigned)slot) f->point[1] = 0;
}
/* The epochs of all slots. */
void fsdp__frontier_clock(const fsdp__frontier *f, fsdp__clock *out_clock);
/* Raise f to a clock; f was empty or holds no later epoch. May take one spare wide. */
void fsdp__frontier_raise(fsdp__wides *wides, fsdp__frontier *f, const fsdp__clock *clock);

/* An empty frontier from then on. */
static inline void fsdp__frontier_clear(fsdp__wides *wides, fsdp__frontier *f)
{
    if (f->wide != NULL) fsdp__frontier_drop_wide(wides, f);
    f->point[0] = f->point[1] = 0;
}

static inline fsdp__frontier fsdp__frontier_copy(const fsdp__frontier *f)
{
    if (f->wide != NULL) f->wide->n_owners++;
    return *f;
}

/* True: all of it comes before what a stream with this clock is given next. */
static inline bool fsdp__frontier_covered(const fsdp__clock *now, const fsdp__frontier *f)
{
    if (f->wide != NULL) return fsdp__frontier_covered_wide(now, f);
    fsdp__point p = f->point[0], q = f->point[1];
    if (FSDP__MUTATED(EPOCH_OFF_BY_ONE)) return p / FSDP__SLOTS <= now->at[p % FSDP__SLOTS] + 1;
    return p / FSDP__SLOTS <= now->at[p % FSDP__SLOTS] && q / FSDP__SLOTS <= now->at[q % FSDP__SLOTS];
}

static inline bool fsdp__frontier_equal(const fsdp__frontier *a, const fsdp__frontier *b)
{
    if (a->wide != NULL || b->wide != NULL) return fsdp__frontier_equal_wide(a, b);
    return (a->point[0] == b->point[0] && a->point[1] == b->point[1]) ||
           (a->point[0] == b->point[1] && a->point[1] == b->point[0]);
}

/* This point, too, must be covered. A third stream takes one spare wide. */
static inline void fsdp__frontier_add(fsdp__wides *wides, fsdp__frontier *f, int slot, uint64_t epoch)
{
    fsdp__point point = fsdp__point_of(slot, epoch);
    if (f->wide == NULL) {
        if (f->point[0] == 0 || f->point[0] % FSDP__SLOTS == (unsigned)slot) {
            if (point > f->point[0]) f->point[0] = point;
            return;
        }
        if (f->point[1] == 0 || f->point[1] % FSDP__SLOTS == (unsigned)slot) {
            if (point > f->point[1]) f->point[1] = point;
            return;
        }
    }
    fsdp__frontier_add_third(wides, f, point);
}

#endif
