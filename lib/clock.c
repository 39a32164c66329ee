/* SPDX-License-Identifier: MIT */
#include "clock.h"

#include <string.h>

#include "check.h"
#include "context.h"
#include "device.h"
#include "mutate.h"

static fsdp__point point_now(const fsdp_stream *s) { return fsdp__point_of(s->slot, fsdp__epoch(s)); }

static void need_point(fsdp__need *need, fsdp__point point, fsdp_reason reason)
{
    fsdp__need_epoch(need, point % FSDP__SLOTS, point / FSDP__SLOTS, reason);
}

void fsdp__need_read(fsdp__need *need, const fsdp__edges *edges) { need_point(need, edges->written, FSDP_REASON_READ); }

void fsdp__need_write(fsdp__need *need, const fsdp__edges *edges)
{
    need_point(need, edges->written, FSDP_REASON_WRITE);
    for (uint64_t i = 0; i < edges->n_reads; i++) need_point(need, edges->read[i], FSDP_REASON_WRITE);
}

void fsdp__note_read(fsdp__edges *edges, const fsdp_stream *s)
{
    uint64_t i = 0;
    while (i < edges->n_reads && edges->read[i] % FSDP__SLOTS != (unsigned)s->slot) i++;
    edges->read[i] = point_now(s);
    if (i == edges->n_reads) edges->n_reads++;
}

void fsdp__note_write(fsdp__edges *edges, const fsdp_stream *s)
{
    edges->written = point_now(s);
    edges->n_reads = 0;
}

void fsdp__edges_clear(fsdp__edges *edges)
{
    edges->written = 0;
    edges->n_reads = 0;
}

/* The oldest fence of t that closes `epoch` or a later one and whose event still exists; NULL if there is none. */
static const fsdp__fence *find_fence(const fsdp_stream *t, uint64_t epoch)
{
    uint64_t oldest = t->n_fences > FSDP__FENCES ? t->n_fences - FSDP__FENCES : 0;
    if (oldest < t->first_fence) oldest = t->first_fence;
    for (uint64_t i = epoch - 1 > oldest ? epoch - 1 : oldest; i < t->n_fences; i++) {
        const fsdp__fence *fence = &t->ring[i % FSDP__FENCES].fence;
        if (fence->event != NULL) return fence;
    }
    return NULL;
}

/* For a planted bug: the fence before this one, if it is still there. */
static const fsdp__fence *one_before(const fsdp__clocks *clocks, const fsdp__fence *fence)
{
    const fsdp_stream *t = clocks->stream[fence->slot];
    if (t == NULL || fence->epoch < t->first_fence + 2) return fence;
    const fsdp__fence *before = &t->ring[(fence->epoch - 2) % FSDP__FENCES].fence;
    return before->event != NULL ? before : fence;
}

fsdp_status fsdp__wait_fence(fsdp_stream *s, const fsdp__fence *fence, fsdp_reason reason)
{
    fsdp__clocks *clocks = &s->ctx->clocks;
    if (fence->epoch <= clocks->now[s->slot].at[fence->slot]) return FSDP_OK;
    bool past_gate = fence->slot == clocks->gate_slot && fence->epoch >= clocks->gate_epoch;
    if (!past_gate) FSDP_TRY(fsdp__pass_gate(s));
    if (FSDP__MUTATED(STALE_FENCE)) FSDP_TRY(fsdp__device_wait(s, one_before(clocks, fence), reason));
    else FSDP_TRY(fsdp__device_wait(s, fence, reason));
    if (past_gate) clocks->behind &= ~(1u << s->slot);
    fsdp__clock_max(&clocks->now[s->slot], &fence->snapshot, clocks->n_slots);
    clocks->n_raised[s->slot]++;
    if (FSDP__MUTATED(SNAPSHOT_AT_WAIT))
        fsdp__clock_max(&clocks->now[s->slot], &clocks->now[fence->slot], clocks->n_slots);
    if (FSDP__MUTATED(NO_SNAPSHOT_OF_SELF)) clocks->now[s->slot].at[fence->slot]++;
    return FSDP_OK;
}

/* A fence of t that covers epoch: one there is, or one recorded now. */
static fsdp_status find_or_record(fsdp_stream *t, uint64_t epoch, const fsdp__fence **out_fence)
{
    *out_fence = find_fence(t, epoch);
    if (*out_fence != NULL) return FSDP_OK;
    uint64_t place = t->n_fences % FSDP__FENCES;
    FSDP_TRY(fsdp__record(t, FSDP_MARK_DEMAND, t->name, NULL, NULL));
    *out_fence = &t->ring[place].fence;
    return FSDP_OK;
}

fsdp_status fsdp__pass_gate_now(fsdp_stream *s)
{
    fsdp__clocks *clocks = &s->ctx->clocks;
    const fsdp__fence *fence;
    FSDP_TRY(find_or_record(clocks->stream[clocks->gate_slot], clocks->gate_epoch, &fence));
    FSDP_TRY(fsdp__wait_fence(s, fence, FSDP_REASON_CALLER));
    clocks->behind &= ~(1u << s->slot);
    return FSDP_OK;
}

/* How many of the missing components waiting for this fence would settle. */
static int count_settled(const fsdp__clocks *clocks, const fsdp_stream *s, const fsdp__need *need,
                         const fsdp__fence *fence)
{
    int n = 0;
    for (uint32_t bits = need->slots; bits != 0; bits &= bits - 1) {
        int t = __builtin_ctz(bits);
        n += need->clock.at[t] > clocks->now[s->slot].at[t] && fence->snapshot.at[t] >= need->clock.at[t];
    }
    return n;
}

fsdp_status fsdp__wait_need(fsdp_stream *s, const fsdp__need *need)
{
    fsdp__clocks *clocks = &s->ctx->clocks;
    FSDP_TRY(fsdp__pass_gate(s));
    /* Each turn settles at least one fence's own stream. One fence may stand for several through its snapshot, so the one
     * that settles most goes first; the lower slot among equals. */
    for (;;) {
        const fsdp__fence *best = NULL;
        int best_settled = 0, n_missing = 0;
        for (uint32_t bits = need->slots; bits != 0; bits &= bits - 1) {
            int t = __builtin_ctz(bits);
            if (need->clock.at[t] <= clocks->now[s->slot].at[t]) continue;
            if (FSDP__MUTATED(RING_OVERWRITTEN) && need->clock.at[t] + FSDP__FENCES <= clocks->stream[t]->n_fences)
                continue;
            const fsdp__fence *fence = NULL;
            FSDP_TRY(find_or_record(clocks->stream[t], need->clock.at[t], &fence));
            int settled = n_missing++ == 0 ? 1 : count_settled(clocks, s, need, fence);
            if (n_missing == 2)
                best_settled = count_settled(clocks, s, need, best); /* of the first, now that it matters */
            if (settled > best_settled) best = fence, best_settled = settled;
        }
        if (n_missing == 0) return FSDP_OK;
        FSDP_TRY(fsdp__wait_fence(s, best, (fsdp_reason)need->reason[best->slot]));
        if (n_missing == 1 || FSDP__MUTATED(FIRST_NEED_ONLY)) return FSDP_OK;
    }
}

/* Few contexts have more than four streams. */
static inline void take_snapshot(fsdp__clock *to, const fsdp__clock *from, int n_slots)
{
    enum { FEW = 4 };
    memcpy(to->at, from->at, FEW * sizeof *to->at);
    if (n_slots > FEW) memcpy(to->at + FEW, from->at + FEW, sizeof *to - FEW * sizeof *to->at);
}

fsdp_status fsdp__record(fsdp_stream *s, fsdp_mark mark, const char *label, void *event, fsdp__fence *out_fence)
{
    fsdp__clocks *clocks = &s->ctx->clocks;
    FSDP_TRY(fsdp__pass_gate(s));
    uint64_t place = s->n_fences % FSDP__FENCES;
    fsdp__fence *fence = &s->ring[place].fence; /* the oldest one ends here, also if the device fails: then all ends */
    fence->slot = s->slot;
    fence->captured = s->ctx->capture != NULL;
    fence->epoch = s->n_fences + 1;
    fence->event = event != NULL ? event : s->event[place];
    fence->mark = (uint8_t)mark;
    fence->label = label;
    take_snapshot(&fence->snapshot, &clocks->now[s->slot], clocks->n_slots);
    fsdp_status status = fsdp__device_record(s, fence);
    if (status != FSDP_OK) {
        fence->event = NULL;
        return status;
    }
    s->n_fences++;
    clocks->now[s->slot].at[s->slot] = s->n_fences + 1;
    if (out_fence != NULL) *out_fence = *fence;
    return FSDP_OK;
}

uint64_t fsdp__skip_epoch(fsdp_stream *s)
{
    uint64_t epoch = fsdp__epoch(s);
    s->ring[s->n_fences % FSDP__FENCES].fence = (fsdp__fence){.slot = s->slot, .epoch = epoch, .label = s->name};
    s->n_fences++;
    s->ctx->clocks.now[s->slot].at[s->slot] = s->n_fences + 1;
    return epoch;
}

void fsdp__host_passed(fsdp_context *ctx, const fsdp__fence *fence)
{
    if (fence->epoch == 0) return;
    for (int t = 0; t < FSDP__SLOTS; t++) {
        uint64_t *now = ctx->clocks.now[t].at;
        bool raised = false;
        for (int u = 0; u < FSDP__SLOTS; u++) {
            if (fence->snapshot.at[u] <= now[u]) continue;
            now[u] = fence->snapshot.at[u];
            raised = true;
        }
        if (raised) ctx->clocks.n_raised[t]++;
    }
    fsdp__note_host(ctx, fence);
}

void fsdp__fence_forget(fsdp__clocks *clocks, const fsdp__fence *fence)
{
    fsdp_stream *s = fence->epoch > 0 ? clocks->stream[fence->slot] : NULL;
    if (s == NULL) return;
    fsdp__fence *kept = &s->ring[(fence->epoch - 1) % FSDP__FENCES].fence;
    if (kept->epoch == fence->epoch && kept->event == fence->event) kept->event = NULL;
}

void fsdp__label_forget(fsdp__clocks *clocks, const char *label)
{
    for (int t = 0; t < clocks->n_slots; t++) {
        fsdp_stream *s = clocks->stream[t];
        for (int i = 0; s != NULL && i < FSDP__FENCES; i++)
            if (s->ring[i].fence.label == label) s->ring[i].fence.label = s->name;
    }
}
