/* SPDX-License-Identifier: MIT */
#include "frontier.h"

#include <string.h>

#include "check.h"
#include "hostmem.h"

enum { WIDES_PER_CHUNK = 16 };

typedef struct chunk {
    struct chunk *next;
    uint32_t n;
} chunk;

static size_t chunk_bytes(uint32_t n) { return sizeof(chunk) + n * sizeof(fsdp__wide); }

void fsdp__wides_fini(fsdp__wides *wides)
{
    for (chunk *c = wides->chunks; c != NULL;) {
        chunk *next = c->next;
        fsdp__host_free(wides->host, c, chunk_bytes(c->n), 1);
        c = next;
    }
    wides->chunks = NULL;
    wides->spare = NULL;
    wides->n_spare = 0;
}

fsdp_status fsdp__wides_reserve(fsdp__wides *wides, uint32_t n)
{
    if (wides->n_spare >= n) return FSDP_OK;
    uint32_t more = n > WIDES_PER_CHUNK ? n : WIDES_PER_CHUNK;
    chunk *c = fsdp__host_alloc(wides->host, chunk_bytes(more), 1);
    if (c == NULL)
        return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY,
                          "no host memory for %u clocks of blocks that many streams use (%zu bytes)", more,
                          chunk_bytes(more));
    c->next = wides->chunks;
    c->n = more;
    wides->chunks = c;
    fsdp__wide *wide = (fsdp__wide *)(void *)(c + 1);
    for (uint32_t i = 0; i < more; i++) {
        wide[i].next = wides->spare;
        wides->spare = &wide[i];
    }
    wides->n_spare += more;
    return FSDP_OK;
}

void fsdp__frontier_drop_wide(fsdp__wides *wides, fsdp__frontier *f)
{
    fsdp__wide *wide = f->wide;
    f->wide = NULL;
    if (--wide->n_owners > 0) return;
    wide->next = wides->spare;
    wides->spare = wide;
    wides->n_spare++;
}

static fsdp__wide *take_wide(fsdp__wides *wides)
{
    assert(wides->n_spare > 0);
    fsdp__wide *wide = wides->spare;
    wides->spare = wide->next;
    wides->n_spare--;
    wide->n_owners = 1;
    return wide;
}

void fsdp__frontier_clock(const fsdp__frontier *f, fsdp__clock *out_clock)
{
    if (f->wide != NULL) {
        *out_clock = f->wide->clock;
        return;
    }
    memset(out_clock, 0, sizeof *out_clock);
    for (int i = 0; i < 2 && f->point[i] != 0; i++)
        out_clock->at[f->point[i] % FSDP__SLOTS] = f->point[i] / FSDP__SLOTS;
}

void fsdp__frontier_widen(fsdp__wides *wides, fsdp__frontier *f)
{
    if (f->wide != NULL && f->wide->n_owners == 1) return;
    fsdp__wide *wide = take_wide(wides);
    fsdp__frontier_clock(f, &wide->clock);
    fsdp__frontier_clear(wides, f);
    f->wide = wide;
}

void fsdp__frontier_add_third(fsdp__wides *wides, fsdp__frontier *f, fsdp__point point)
{
    uint64_t slot = point % FSDP__SLOTS, epoch = point / FSDP__SLOTS;
    if (FSDP__MUTATED(THIRD_STREAM_LOST)) return;
    if (f->wide != NULL && epoch <= f->wide->clock.at[slot]) return;
    fsdp__frontier_widen(wides, f);
    f->wide->clock.at[slot] = epoch;
}

bool fsdp__frontier_covered_wide(const fsdp__clock *now, const fsdp__frontier *f)
{
    for (int t = 0; t < FSDP__SLOTS; t++)
        if (f->wide->clock.at[t] > now->at[t]) return false;
    return true;
}

bool fsdp__frontier_equal_wide(const fsdp__frontier *a, const fsdp__frontier *b)
{
    if (a->wide == NULL || b->wide == NULL) {
        fsdp__clock x, y;
        fsdp__frontier_clock(a, &x);
        fsdp__frontier_clock(b, &y);
        return memcmp(&x, &y, sizeof x) == 0;
    }
    return a->wide == b->wide || memcmp(&a->wide->clock, &b->wide->clock, sizeof a->wide->clock) == 0;
}

void fsdp__frontier_max(fsdp__wides *wides, fsdp__frontier *into, const fsdp__frontier *other)
{
    fsdp__clock clock;
    if (other->wide == NULL) {
        for (int i = 0; i < 2 && other->point[i] != 0; i++)
            fsdp__frontier_add(wides, into, (int)(other->point[i] % FSDP__SLOTS), other->point[i] / FSDP__SLOTS);
        return;
    }
    fsdp__frontier_clock(other, &clock);
    fsdp__frontier_raise(wides, into, &clock);
}

void fsdp__frontier_raise(fsdp__wides *wides, fsdp__frontier *f, const fsdp__clock *clock)
{
    for (int t = 0; t < FSDP__SLOTS; t++)
        if (clock->at[t] > 0) fsdp__frontier_add(wides, f, t, clock->at[t]);
}

uint32_t fsdp__need_frontier(fsdp__need *need, const fsdp__frontier *f, const fsdp__clock *now, fsdp_reason reason)
{
    uint32_t missing = 0;
    for (int t = 0; f->wide != NULL && t < FSDP__SLOTS; t++) {
        if (f->wide->clock.at[t] <= now->at[t]) continue;
        missing |= 1u << t;
        fsdp__need_epoch(need, (uint64_t)t, f->wide->clock.at[t], reason);
    }
    for (int i = 0; i < 2; i++) {
        uint64_t t = f->point[i] % FSDP__SLOTS, epoch = f->point[i] / FSDP__SLOTS;
        if (epoch <= now->at[t]) continue;
        missing |= 1u << t;
        fsdp__need_epoch(need, t, epoch, reason);
    }
    return missing;
}
