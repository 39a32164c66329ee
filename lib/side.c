/* SPDX-License-Identifier: MIT */
#include "side.h"

#include <stdio.h>
#include <string.h>

#include "check.h"
#include "graph.h"
#include "hostmem.h"
#include "order.h"

enum { MAX_BROADCAST_BYTES = 1 << 20, MAX_SUMS_HOST = 64 };

static void count_wait(fsdp_context *ctx)
{
    bool held = fsdp__has_lock(ctx);
    if (!held) fsdp__lock(ctx);
    ctx->counters.host_waits++;
    if (!held) fsdp__unlock(ctx);
}

/* A channel that has failed says more than the call that met it. */
static fsdp_status explain(fsdp_context *ctx, fsdp_status status)
{
    return status == FSDP_OK ? FSDP_OK : fsdp__context_explain(ctx, status);
}

fsdp_status fsdp__side_all_gather(fsdp_context *ctx, const void *mine, void *all, size_t bytes)
{
    count_wait(ctx);
    return explain(ctx, ctx->backend->side->all_gather(ctx->side, mine, all, bytes, ctx->timeout_ns));
}

fsdp_status fsdp__side_text(fsdp_context *ctx, uint32_t root, const char *mine, char *out_text)
{
    char padded[FSDP__SIDE_TEXT_BYTES] = "";
    strncpy(padded, mine, sizeof padded - 1);
    for (size_t at = 0; at < sizeof padded; at += FSDP__VOTE_BYTES) {
        FSDP_TRY(fsdp__side_all_gather(ctx, padded + at, ctx->votes, FSDP__VOTE_BYTES));
        memcpy(out_text + at, ctx->votes + (size_t)root * FSDP__VOTE_BYTES, FSDP__VOTE_BYTES);
        if (memchr(out_text + at, 0, FSDP__VOTE_BYTES) != NULL) break; /* on every rank at the same piece */
    }
    out_text[FSDP__SIDE_TEXT_BYTES - 1] = '\0';
    return FSDP_OK;
}

fsdp_status fsdp__side_agree(fsdp_context *ctx, const char *what)
{
    fsdp__lock(ctx);
    fsdp__flight_host_begin(&ctx->flight, what, fsdp_context_now_ns(ctx));
    fsdp__unlock(ctx);
    fsdp_status status = fsdp__order_agree(ctx, what);
    return status == FSDP_OK ? FSDP_OK : fsdp__side_end(ctx, status);
}

fsdp_status fsdp__side_end(fsdp_context *ctx, fsdp_status status)
{
    fsdp__lock(ctx);
    fsdp__flight_host_end(&ctx->flight);
    fsdp__unlock(ctx);
    return status;
}

fsdp_status fsdp__side_vote(fsdp_context *ctx, fsdp_status mine, const char *what)
{
    int32_t ballot[FSDP__VOTE_BYTES / sizeof(int32_t)] = {mine}, first = FSDP_OK;
    char own[FSDP__SIDE_TEXT_BYTES] = "", said[FSDP__SIDE_TEXT_BYTES];
    if (mine != FSDP_OK) strncpy(own, fsdp_last_error(), sizeof own - 1);
    fsdp_status status = fsdp__side_all_gather(ctx, ballot, ctx->votes, FSDP__VOTE_BYTES);
    uint32_t r = 0;
    while (status == FSDP_OK && r < ctx->world) {
        memcpy(&first, ctx->votes + (size_t)r * FSDP__VOTE_BYTES, sizeof first);
        if (first != FSDP_OK) break;
        r++;
    }
    if (status == FSDP_OK && first != FSDP_OK) status = fsdp__side_text(ctx, r, own, said);
    if (mine == FSDP_ERR_ABORTED) return fsdp__context_explain(ctx, fsdp__fail(mine, "%s", own)); /* who, and why */
    if (mine != FSDP_OK) return fsdp__fail(mine, "%s", own);
    if (status != FSDP_OK || first == FSDP_OK) return status;
    return fsdp__fail(fsdp__status_of_peer(first), "%s failed on rank %u, so on every rank: %s", what, r, said);
}

/* values[i] = Σ over ranks, in rank order. */
static fsdp_status sum_agreed(fsdp_context *ctx, double *values, uint32_t n)
{
    double *all = fsdp__host_alloc(&ctx->host, (size_t)ctx->world * n, sizeof *all);
    fsdp_status status = all == NULL ? fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "fsdp_sum_host: no host memory") : FSDP_OK;
    status = fsdp__side_vote(ctx, status, "fsdp_sum_host");
    if (status == FSDP_OK) status = fsdp__side_all_gather(ctx, values, all, n * sizeof *values);
    for (uint32_t i = 0; status == FSDP_OK && i < n; i++) {
        values[i] = all[i];
        for (uint32_t r = 1; r < ctx->world; r++) values[i] += all[(size_t)r * n + i];
    }
    fsdp__host_free(&ctx->host, all, (size_t)ctx->world * n, sizeof *all);
    return status;
}

fsdp_status fsdp_sum_host(fsdp_context *ctx, double *values, uint32_t n)
{
    FSDP_NEED(ctx);
    FSDP_NEED(values);
    if (n == 0 || n > MAX_SUMS_HOST)
        return fsdp__fail(FSDP_ERR_ARG, "fsdp_sum_host: n is %u, expected 1 to %d", n, MAX_SUMS_HOST);
    FSDP_TRY(fsdp__context_check(ctx));
    FSDP_TRY(fsdp__capture_off(__func__, ctx));
    char what[64];
    snprintf(what, sizeof what, "fsdp_sum_host of %u", n);
    FSDP_TRY(fsdp__side_agree(ctx, what));
    return fsdp__side_end(ctx, sum_agreed(ctx, values, n));
}

fsdp_status fsdp_barrier_host(fsdp_context *ctx)
{
    FSDP_NEED(ctx);
    FSDP_TRY(fsdp__context_check(ctx));
    FSDP_TRY(fsdp__capture_off(__func__, ctx));
    FSDP_TRY(fsdp__side_agree(ctx, "fsdp_barrier_host"));
    return fsdp__side_end(ctx, FSDP_OK);
}

fsdp_status fsdp_broadcast_host(fsdp_context *ctx, void *data, size_t bytes, uint32_t root)
{
    FSDP_NEED(ctx);
    FSDP_NEED(data);
    if (bytes == 0 || bytes > MAX_BROADCAST_BYTES)
        return fsdp__fail(FSDP_ERR_ARG, "fsdp_broadcast_host: %zu bytes, expected 1 to %d", bytes, MAX_BROADCAST_BYTES);
    if (root >= ctx->world)
        return fsdp__fail(FSDP_ERR_ARG, "fsdp_broadcast_host: root %u in a world of %u", root, ctx->world);
    FSDP_TRY(fsdp__context_check(ctx));
    FSDP_TRY(fsdp__capture_off(__func__, ctx));
    char what[96];
    snprintf(what, sizeof what, "fsdp_broadcast_host of %zu bytes from rank %u", bytes, root);
    FSDP_TRY(fsdp__side_agree(ctx, what));
    count_wait(ctx);
    return fsdp__side_end(ctx,
                          explain(ctx, ctx->backend->side->broadcast(ctx->side, data, bytes, root, ctx->timeout_ns)));
}
