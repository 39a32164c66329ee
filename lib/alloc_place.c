/* SPDX-License-Identifier: MIT */
#include "alloc_place.h"

#include "context.h"
#include "mutate.h"

enum {
    CANDIDATES = 32, /* ranges looked at, smallest first, before the search goes on at twice the size */
    FRAGMENTS = 32   /* of each of them, looked at for a run that needs no wait */
};

static inline void look_at(fsdp__place *p, const fsdp__block *f, const fsdp__clock *now)
{
    if (!fsdp__frontier_covered(now, &f->use)) p->covered = false;
    if (f->freed > p->freed) p->freed = f->freed;
}

static inline fsdp__place low_end(fsdp__block *range, uint64_t bytes, const fsdp__clock *now)
{
    fsdp__place p = {range, range->begin, 0, true};
    const fsdp__block *f = range;
    look_at(&p, f, now);
    for (uint64_t seen = f->bytes; seen < bytes; seen += f->bytes) {
        f = f->after;
        look_at(&p, f, now);
    }
    return p;
}

static fsdp__place high_end(fsdp__block *range, uint64_t bytes, const fsdp__clock *now)
{
    fsdp__place p = {range, range->begin + range->range_bytes - bytes, 0, true};
    const fsdp__block *f = range->last;
    look_at(&p, f, now);
    for (uint64_t seen = f->bytes; seen < bytes; seen += f->bytes) {
        f = f->before;
        look_at(&p, f, now);
    }
    return p;
}

/* The first run of covered fragments, of the lowest ones, that is large enough; range NULL: there is none. */
static fsdp__place covered_run(fsdp__block *range, uint64_t bytes, const fsdp__clock *now)
{
    fsdp__place run = {range, 0, 0, true};
    uint64_t seen = 0;
    const fsdp__block *f = range;
    for (int n = 0; n < FRAGMENTS && f != range->last->after; n++, f = f->after) {
        if (!fsdp__frontier_covered(now, &f->use)) {
            seen = 0;
            continue;
        }
        if (seen == 0) run.begin = f->begin;
        seen += f->bytes;
        if (seen >= bytes) return run;
    }
    return (fsdp__place){NULL, 0, 0, false};
}

/* The best place in a range: a covered end, the low one first; where growing is the other choice, a covered run between them
 * (where it is waiting, cutting a range in its middle is too dear); else the end freed longer ago. */
static inline fsdp__place best_place(const fsdp_allocator *a, fsdp__block *range, uint64_t bytes,
                                     const fsdp__clock *now)
{
    fsdp__place low = low_end(range, bytes, now);
    if (low.covered || range->range_bytes == bytes) return low;
    fsdp__place high = high_end(range, bytes, now);
    if (FSDP__MUTATED(WRONG_END) && range->last->last != range->last)
        high.covered = fsdp__frontier_covered(now, &range->last->before->use);
    if (high.covered) return high;
    if (a->config.policy == FSDP_ALLOC_GROW_FIRST && range->after != range->last) {
        fsdp__place between = covered_run(range, bytes, now);
        if (between.range != NULL) return between;
    }
    return high.freed < low.freed ? high : low;
}

/* (a) the smallest fit that is covered; (b) else, of those looked at, the one freed longest ago. */
fsdp__place fsdp__place_find(const fsdp_allocator *a, uint64_t bytes, const fsdp_stream *s)
{
    const fsdp__clock *now = &a->ctx->clocks.now[s->slot];
    fsdp__place oldest = {NULL, 0, 0, false};
    int looked_at = 0;
    fsdp__block *r = fsdp__ranges_best(&a->ranges, bytes);
    while (r != NULL) {
        fsdp__place p = best_place(a, r, bytes, now);
        if (FSDP__MUTATED(EVERYTHING_COVERED_BY_OWN) && r->slot == s->slot) p.covered = true;
        if (p.covered) return p;
        if (oldest.range == NULL || p.freed < oldest.freed) oldest = p;
        r = ++looked_at % CANDIDATES != 0 ? fsdp__ranges_next(&a->ranges, r)
                                          : fsdp__ranges_best(&a->ranges, 2 * r->range_bytes);
    }
    return oldest;
}
