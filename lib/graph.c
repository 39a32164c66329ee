/* SPDX-License-Identifier: MIT */
#include "graph.h"

#include <stdio.h>
#include <string.h>

#include "alloc.h"
#include "check.h"
#include "device.h"
#include "hash.h"
#include "hostmem.h"
#include "mutate.h"

fsdp_status fsdp__capture_refuse(const char *call)
{
    return fsdp__fail(
        FSDP_ERR_STATE,
        "%s: a capture is on, where nothing runs: do this before fsdp_capture_begin or after fsdp_capture_end", call);
}

fsdp_status fsdp__capture_no_moment(const char *call, const fsdp__fence *fence)
{
    if (!fence->captured) return FSDP_OK;
    return fsdp__fail(FSDP_ERR_STATE,
                      "%s: it was recorded inside a capture, so it has no moment of its own: record one after "
                      "fsdp_replayed",
                      call);
}

/* ---- Streams ---- */

/* s waits for all that t was given. */
static fsdp_status join(fsdp_stream *t, fsdp_stream *s)
{
    fsdp__fence fence;
    FSDP_TRY(fsdp__record(t, FSDP_MARK_CALLER, t->name, NULL, &fence)); /* s may go before the fence does */
    return fsdp__wait_fence(s, &fence, FSDP_REASON_CALLER);
}

fsdp_status fsdp__capture_open(fsdp_capture *capture, fsdp_stream *s)
{
    fsdp_context *ctx = s->ctx;
    fsdp__clocks *clocks = &ctx->clocks;
    uint32_t others = 0;
    for (int t = 0; t < clocks->n_slots; t++) {
        if (clocks->stream[t] == NULL || t == s->slot) continue;
        if (!FSDP__MUTATED(CAPTURE_NOT_AFTER)) FSDP_TRY(join(clocks->stream[t], s));
        others |= 1u << t;
    }
    for (int t = 0; t < clocks->n_slots; t++)
        if ((others >> t & 1u) && !FSDP__MUTATED(CAPTURE_NOT_AFTER)) FSDP_TRY(join(s, clocks->stream[t]));
    capture->stream = s;
    __atomic_store_n(&ctx->capture, capture, __ATOMIC_RELAXED);
    clocks->gate_slot = s->slot;
    clocks->gate_epoch = fsdp__epoch(s);
    clocks->behind = FSDP__MUTATED(CAPTURE_NO_FORK) ? 0 : others;
    return FSDP_OK;
}

/* Every epoch that has been open so far is covered for everybody: closed without an event, since nobody waits for it. */
static void cover_all(fsdp__clocks *clocks)
{
    for (int u = 0; u < clocks->n_slots; u++) {
        if (clocks->stream[u] == NULL) continue;
        uint64_t epoch = fsdp__skip_epoch(clocks->stream[u]);
        for (int t = 0; t < FSDP__SLOTS; t++)
            if (clocks->now[t].at[u] < epoch) clocks->now[t].at[u] = epoch;
    }
    for (int t = 0; t < FSDP__SLOTS; t++) clocks->n_raised[t]++;
}

fsdp_status fsdp__capture_close(fsdp_capture *capture)
{
    fsdp_stream *s = capture->stream;
    fsdp__clocks *clocks = &s->ctx->clocks;
    fsdp_status status = FSDP_OK;
    for (int t = 0; t < clocks->n_slots && status == FSDP_OK; t++)
        if (clocks->stream[t] != NULL && t != s->slot && !(clocks->behind >> t & 1u) && !FSDP__MUTATED(CAPTURE_NO_JOIN))
            status = join(clocks->stream[t], s);
    clocks->behind = 0;
    if (!FSDP__MUTATED(CAPTURE_UNCOVERED)) cover_all(clocks);
    clocks->gate_epoch = fsdp__epoch(s); /* for streams that are made later: s has waited for all that was before */
    __atomic_store_n(&s->ctx->capture, NULL, __ATOMIC_RELAXED);
    capture->stream = NULL;
    return status;
}

fsdp_status fsdp__replay_open(fsdp_stream *s)
{
    fsdp__clocks *clocks = &s->ctx->clocks;
    if (FSDP__MUTATED(REPLAY_TOO_EARLY)) return FSDP_OK;
    /* Who is behind the last replay still has been given nothing since. */
    for (int t = 0; t < clocks->n_slots; t++)
        if (clocks->stream[t] != NULL && t != s->slot && !(clocks->behind >> t & 1u))
            FSDP_TRY(join(clocks->stream[t], s));
    return FSDP_OK;
}

/* A lane is given things by the library alone, so it can wait when it is given the next. A stream of the caller's may be given
 * kernels that nobody here hears of. */
fsdp_status fsdp__replay_close(fsdp_stream *s)
{
    fsdp__clocks *clocks = &s->ctx->clocks;
    if (FSDP__MUTATED(REPLAY_FORGOTTEN)) return FSDP_OK;
    clocks->gate_slot = s->slot;
    clocks->gate_epoch = fsdp__epoch(s);
    for (int t = 0; t < clocks->n_slots; t++)
        if (clocks->stream[t] != NULL && t != s->slot) clocks->behind |= 1u << t;
    for (int t = 0; t < clocks->n_slots; t++)
        if ((clocks->behind >> t & 1u) && !clocks->stream[t]->lane) FSDP_TRY(fsdp__pass_gate_now(clocks->stream[t]));
    return FSDP_OK;
}

void fsdp__capture_note(const fsdp_capture *capture, fsdp_operation kind, const fsdp_stream *s)
{
    fsdp_collective named = {.kind = kind, .dtype = FSDP_DTYPE_FP32, .count = capture->hash, .label = ""};
    fsdp__flight_add(&capture->ctx->flight, 0, &named, 1, fsdp__point_of(s->slot, fsdp__epoch(s)),
                     fsdp_context_now_ns(capture->ctx));
}

/* ---- Blocks of the caller's allocators ---- */

/* Of the blocks that live, in no order. */
static uint64_t hash_live(const fsdp_allocator *a)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < a->live.capacity; i++)
        if (a->live.entry[i].begin != 0)
            sum += fsdp__mix(a->live.entry[i].begin ^ fsdp__mix(a->live.entry[i].block->bytes));
    return sum;
}

fsdp_status fsdp__capture_take_pools(fsdp_capture *capture)
{
    fsdp_context *ctx = capture->ctx;
    size_t n = 0;
    for (fsdp_allocator *a = ctx->pools; a != NULL; a = a->next_pool) n += a->model == NULL;
    capture->pools = fsdp__host_alloc(&ctx->host, n, sizeof *capture->pools);
    capture->pools_capacity = n;
    if (capture->pools == NULL)
        return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "fsdp_capture_begin: no host memory for %zu allocators", n);
    for (fsdp_allocator *a = ctx->pools; a != NULL; a = a->next_pool)
        if (a->model == NULL)
            capture->pools[capture->n_pools++] =
                (fsdp__captured_pool){a, hash_live(a), a->stats.allocs, a->stats.frees};
    return FSDP_OK;
}

fsdp_status fsdp__capture_check_pools(const char *call, fsdp_capture *capture)
{
    for (size_t i = 0; i < capture->n_pools; i++) {
        fsdp__captured_pool *p = &capture->pools[i];
        const fsdp_alloc_stats *stats = &p->pool->stats;
        if (p->n_allocs == stats->allocs && p->n_frees == stats->frees) continue;
        if (hash_live(p->pool) != p->live)
            return fsdp__fail(FSDP_ERR_STATE,
                              "%s: allocator %s: the %u blocks that live now are not those that lived when the capture "
                              "began, and it uses the bytes of others: free what came since, or give the capture an "
                              "allocator of its own",
                              call, p->pool->name, p->pool->ranges.n_live);
        if (p->pool->ctx->capture == NULL) p->n_allocs = stats->allocs, p->n_frees = stats->frees;
    }
    return FSDP_OK;
}

void fsdp__capture_drop_pools(fsdp_capture *capture)
{
    size_t kept = 0;
    for (size_t i = 0; i < capture->n_pools; i++)
        if (capture->pools[i].pool->stats.allocs != capture->pools[i].n_allocs)
            capture->pools[kept++] = capture->pools[i];
    capture->n_pools = kept;
}

void fsdp__capture_free_pools(fsdp_capture *capture)
{
    fsdp__host_free(&capture->ctx->host, capture->pools, capture->pools_capacity, sizeof *capture->pools);
}

void fsdp__capture_lose_pool(fsdp_context *ctx, const fsdp_allocator *pool, const char *why)
{
    for (fsdp_capture *c = ctx->captures; c != NULL; c = c->next)
        for (size_t i = 0; i < c->n_pools; i++)
            if (c->pools[i].pool == pool && c->broken[0] == 0)
                snprintf(c->broken, sizeof c->broken, "allocator %s, whose blocks it uses, %s", pool->name, why);
}
