/* SPDX-License-Identifier: MIT */
#include "alloc_place.h"

#include "context.h"
#include "mutate.h"

enum {
    CANDIDATES = 32, /* ranges looked at, smallest first, before the search goes on at twice the size */
    FRAGMENTS = 64,  /* of each of them, looked at from an end once one is not covered */
    DEEP = 4096,     /* and while all are */
    RUNS = 2048,     /* fragments of all ranges, looked at for a covered run between the ends */
    NEWEST = 64,     /* blocks and ranges of the newest segment, looked at last */
    CUT_OFF = 16     /* the part of a range that a run may cut off where waiting would do, too: a sixteenth */
};

/* How a place at an end of the range stands: covered, if every fragment is; as old as the newest. Past so many fragments
 * it is not known to be covered, and the range's own age will do. */
static inline fsdp__place look_at(fsdp__block *range, uint64_t begin, uint64_t bytes, bool from_high,
                                  const fsdp__clock *now)
{
    fsdp__place p = {range, range, begin, 0, true};
    fsdp__block *f = from_high ? range->last : range;
    uint64_t seen = 0;
    for (int n = 1;; n++, f = from_high ? f->before : f->after) {
        if (!fsdp__frontier_covered(now, &f->use)) p.covered = false;
        if (f->freed > p.freed) p.freed = f->freed;
        seen += f->bytes;
        if (seen >= bytes) break;
        if (n < (p.covered ? DEEP : FRAGMENTS)) continue;
        p.covered = false;
        p.freed = range->range_freed;
        return p;
    }
    if (from_high) p.fragment = f;
    return p;
}

/* The first run of covered fragments, of the lowest ones, that is large enough and cuts off no more than most; range NULL:
 * there is none. *left: how many fragments may still be looked at. */
static fsdp__place covered_run(fsdp__block *range, uint64_t bytes, uint64_t most, const fsdp__clock *now, int *left)
{
    fsdp__place run = {range, range, 0, 0, true};
    uint64_t seen = 0;
    fsdp__block *f = range;
    for (; *left > 0; f = f->after) {
        --*left;
        bool covered = fsdp__frontier_covered(now, &f->use) || FSDP__MUTATED(RUN_ACROSS);
        if (covered && seen == 0) run.begin = f->begin, run.fragment = f;
        if (covered && run.begin - range->begin > most) break;
        seen = covered ? seen + f->bytes : 0;
        if (seen >= bytes) return run;
        if (f == range->last) break;
    }
    return (fsdp__place){NULL, NULL, 0, 0, false};
}

/* The best place in a range: a covered end, the low one first; a covered run between them; else the end freed longer ago.
 * What the run cuts off is lost to larger requests for a while: where growing is the other choice, any may go. */
static inline fsdp__place best_place(const fsdp_allocator *a, fsdp__block *range, uint64_t bytes,
                                     const fsdp__clock *now, int *runs_left)
{
    fsdp__place low = look_at(range, range->begin, bytes, false, now);
    if (low.covered || range->range_bytes == bytes) return low;
    fsdp__place high = look_at(range, range->begin + range->range_bytes - bytes, bytes, true, now);
    if (FSDP__MUTATED(WRONG_END) && range->last->last != range->last)
        high.covered = fsdp__frontier_covered(now, &range->last->before->use);
    if (high.covered) return high;
    uint64_t most = a->config.policy == FSDP_ALLOC_GROW_FIRST ? UINT64_MAX : range->range_bytes / CUT_OFF;
    fsdp__place between = covered_run(range, bytes, most, now, runs_left);
    if (between.range != NULL) return between;
    return high.freed < low.freed ? high : low;
}

/* Among many ranges of one size that need a wait the newest segment, with bytes that nobody has used yet, is the last. */
static fsdp__place find_in_newest(const fsdp_allocator *a, uint64_t bytes, const fsdp__clock *now)
{
    const fsdp__ranges *ranges = &a->ranges;
    int runs_left = RUNS;
    fsdp__block *b = ranges->n_segments > 0 ? ranges->segments[ranges->newest].first : NULL;
    for (int n = 0; n < NEWEST && b != NULL; n++, b = (b->live ? b : b->last)->after) {
        if (b->live || b->range_bytes < bytes) continue;
        fsdp__place p = best_place(a, b, bytes, now, &runs_left);
        if (p.covered) return p;
    }
    return (fsdp__place){NULL, NULL, 0, 0, false};
}

/* (a) the smallest fit that is covered; (b) else, of those looked at, the one freed longest ago. */
fsdp__place fsdp__place_find(const fsdp_allocator *a, uint64_t bytes, const fsdp_stream *s)
{
    const fsdp__clock *now = &a->ctx->clocks.now[s->slot];
    fsdp__place oldest = {NULL, NULL, 0, 0, false};
    int looked_at = 0, runs_left = RUNS;
    fsdp__block *r = fsdp__ranges_best(&a->ranges, bytes);
    while (r != NULL) {
        fsdp__place p = best_place(a, r, bytes, now, &runs_left);
        if (FSDP__MUTATED(EVERYTHING_COVERED_BY_OWN) && r->slot == s->slot) p.covered = true;
        if (p.covered) return p;
        if (oldest.range == NULL || p.freed < oldest.freed) oldest = p;
        r = ++looked_at % CANDIDATES != 0 ? fsdp__ranges_next(&a->ranges, r)
                                          : fsdp__ranges_best(&a->ranges, 2 * r->range_bytes);
    }
    fsdp__place newest = find_in_newest(a, bytes, now);
    return newest.range != NULL ? newest : oldest;
}
