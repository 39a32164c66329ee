/* SPDX-License-Identifier: MIT */
#include "clock.h"

#include <string.h>

#include "check.h"
#include "context.h"
#include "device.h"

uint64_t fsdp__epoch(const fsdp_stream *s) { return s->n_fences + 1; }

bool fsdp__covered(const fsdp_stream *s, const fsdp__clock *clock)
{
    const fsdp__clocks *clocks = &s->ctx->clocks;
    for (int t = 0; t < clocks->n_slots; t++)
        if (clock->at[t] > clocks->now[s->slot].at[t]) return false;
    return true;
}

void fsdp__need_clock(fsdp__need *need, const fsdp__clock *clock, const fsdp_stream *s, fsdp_reason reason)
{
    int n_slots = s->ctx->clocks.n_slots;
    for (int t = 0; t < n_slots; t++) {
        if (clock->at[t] > need->clock.at[t]) {
            need->clock.at[t] = clock->at[t];
            need->reason[t] = reason;
        }
    }
}

void fsdp__need_read(fsdp__need *need, const fsdp__edges *edges, const fsdp_stream *s)
{
    fsdp__need_clock(need, &edges->written, s, FSDP_REASON_READ);
}

void fsdp__need_write(fsdp__need *need, const fsdp__edges *edges, const fsdp_stream *s)
{
    fsdp__need_clock(need, &edges->written, s, FSDP_REASON_WRITE);
    fsdp__need_clock(need, &edges->read, s, FSDP_REASON_WRITE);
}

void fsdp__note_read(fsdp__edges *edges, const fsdp_stream *s) { edges->read.at[s->slot] = fsdp__epoch(s); }

void fsdp__note_write(fsdp__edges *edges, const fsdp_stream *s)
{
    memset(edges, 0, sizeof *edges);
    edges->written.at[s->slot] = fsdp__epoch(s);
}

/* The oldest fence of t that closes `epoch` or a later one and whose event still exists; NULL if there is none. */
static const fsdp__fence *find_fence(const fsdp_stream *t, uint64_t epoch)
{
    uint64_t oldest = t->n_fences > FSDP__FENCES ? t->n_fences - FSDP__FENCES : 0;
    if (oldest < t->first_fence) oldest = t->first_fence;
    for (uint64_t i = epoch - 1 > oldest ? epoch - 1 : oldest; i < t->n_fences; i++) {
        const fsdp__fence *fence = &t->ring[i % FSDP__FENCES];
        if (fence->event != NULL) return fence;
    }
    return NULL;
}

fsdp_status fsdp__wait_fence(fsdp_stream *s, const fsdp__fence *fence, fsdp_reason reason)
{
    fsdp__clocks *clocks = &s->ctx->clocks;
    if (fence->epoch <= clocks->now[s->slot].at[fence->slot]) return FSDP_OK;
    FSDP_TRY(fsdp__device_wait(s, fence, reason));
    fsdp__clock_max(&clocks->now[s->slot], &fence->snapshot, clocks->n_slots);
    return FSDP_OK;
}

/* How many of the missing components waiting for this fence would settle. */
static int count_settled(const fsdp__clocks *clocks, const fsdp_stream *s, const fsdp__need *need, const fsdp__fence *fence)
{
    int n = 0;
    for (int t = 0; t < clocks->n_slots; t++)
        n += need->clock.at[t] > clocks->now[s->slot].at[t] && fence->snapshot.at[t] >= need->clock.at[t];
    return n;
}

fsdp_status fsdp__wait_need(fsdp_stream *s, const fsdp__need *need)
{
    fsdp__clocks *clocks = &s->ctx->clocks;
    /* Each turn settles at least the fence's own stream. One fence may stand for several through its snapshot, so the one
     * that settles most goes first; the lower slot among equals. */
    for (;;) {
        fsdp__fence best = {0};
        int best_settled = 0;
        for (int t = 0; t < clocks->n_slots; t++) {
            if (need->clock.at[t] <= clocks->now[s->slot].at[t]) continue;
            const fsdp__fence *fence = find_fence(clocks->stream[t], need->clock.at[t]);
            fsdp__fence demanded;
            if (fence == NULL) {
                FSDP_TRY(fsdp__record(clocks->stream[t], FSDP_MARK_DEMAND, clocks->stream[t]->name, NULL, &demanded));
                fence = &demanded;
            }
            int settled = count_settled(clocks, s, need, fence);
            if (settled > best_settled) best = *fence, best_settled = settled;
        }
        if (best_settled == 0) return FSDP_OK;
        FSDP_TRY(fsdp__wait_fence(s, &best, need->reason[best.slot]));
    }
}

fsdp_status fsdp__record(fsdp_stream *s, fsdp_mark mark, const char *label, void *event, fsdp__fence *out_fence)
{
    fsdp__clocks *clocks = &s->ctx->clocks;
    uint64_t place = s->n_fences % FSDP__FENCES;
    fsdp__fence fence = {.slot = s->slot, .epoch = s->n_fences + 1, .snapshot = clocks->now[s->slot], .mark = mark, .label = label};
    fence.event = event != NULL ? event : s->event[place];
    FSDP_TRY(fsdp__device_record(s, &fence));
    s->ring[place] = fence;
    s->n_fences++;
    clocks->now[s->slot].at[s->slot] = s->n_fences + 1;
    if (out_fence != NULL) *out_fence = fence;
    return FSDP_OK;
}

void fsdp__fence_forget(fsdp__clocks *clocks, const fsdp__fence *fence)
{
    fsdp_stream *s = fence->epoch > 0 ? clocks->stream[fence->slot] : NULL;
    if (s == NULL) return;
    fsdp__fence *kept = &s->ring[(fence->epoch - 1) % FSDP__FENCES];
    if (kept->epoch == fence->epoch && kept->event == fence->event) kept->event = NULL;
}
