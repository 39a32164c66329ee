/* SPDX-License-Identifier: MIT */
#include "pinned.h"

#include <string.h>

#include "check.h"
#include "context.h"
#include "device.h"
#include "graph.h"
#include "hostmem.h"

fsdp_status fsdp__pinned_check(const fsdp_pinned_allocator *table)
{
    int n = (table->open != NULL) + (table->close != NULL) + (table->alloc != NULL) + (table->free != NULL);
    if (n == 4 || (n == 0 && table->stats == NULL)) return FSDP_OK;
    return fsdp__fail(FSDP_ERR_ARG,
                      "fsdp_config.pinned has %d of open, close, alloc and free: give all four, or leave "
                      "the table zero for a region a piece",
                      n);
}

/* ---- Regions ---- */

static void *take_region(void *arg, size_t bytes)
{
    fsdp_context *ctx = arg;
    void *ptr;
    uint64_t rounded = fsdp__device_round(&ctx->caps, bytes);
    if (rounded != 0 && fsdp__device_take_region(ctx, rounded, &ptr) == FSDP_OK) return ptr;
    atomic_fetch_add(&ctx->pinned.n_refused, 1);
    return NULL;
}

static void give_region(void *arg, void *ptr, size_t bytes)
{
    fsdp_context *ctx = arg;
    fsdp__device_give_region(ctx, ptr, fsdp__device_round(&ctx->caps, bytes));
}

fsdp_status fsdp__pinned_open(fsdp_context *ctx, const fsdp_pinned_allocator *table)
{
    fsdp__pinned *p = &ctx->pinned;
    p->source = (fsdp_pinned_source){sizeof p->source, ctx, take_region, give_region, ctx->caps.granularity};
    /* Without data nothing is pinned, and the device may take what it hands out from fsdp_config.host: a heap whose hooks
     * led there would enter its own allocator again. */
    if (table->open == NULL || !ctx->caps.has_data) return FSDP_OK;
    p->heap = table->open(table->arg, &p->source);
    if (p->heap == NULL)
        return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY,
                          "fsdp_context_create: fsdp_config.pinned.open gave no heap: no pinned host memory");
    p->table = *table;
    return FSDP_OK;
}

/* ---- The table of pieces, with the lock held ---- */

/* The first piece that ends behind ptr. */
static size_t find_piece(const fsdp__pinned *p, const char *ptr)
{
    size_t low = 0, high = p->n_pieces;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (p->pieces[middle].ptr + p->pieces[middle].bytes <= ptr) low = middle + 1;
        else high = middle;
    }
    return low;
}

static bool add_piece(fsdp_context *ctx, fsdp__pinned_piece piece)
{
    fsdp__pinned *p = &ctx->pinned;
    if (!fsdp__host_grow(&ctx->host, &p->pieces, &p->capacity, p->n_pieces + 1, sizeof *p->pieces)) return false;
    size_t at = find_piece(p, piece.ptr);
    memmove(&p->pieces[at + 1], &p->pieces[at], (p->n_pieces - at) * sizeof *p->pieces);
    p->pieces[at] = piece;
    p->n_pieces++;
    p->allocs++;
    p->live_bytes += piece.bytes;
    if (piece.caller) ctx->n_live[FSDP__CHILD_PINNED]++;
    return true;
}

static fsdp__pinned_piece take_piece(fsdp_context *ctx, size_t at)
{
    fsdp__pinned *p = &ctx->pinned;
    fsdp__pinned_piece piece = p->pieces[at];
    p->n_pieces--;
    memmove(&p->pieces[at], &p->pieces[at + 1], (p->n_pieces - at) * sizeof *p->pieces);
    p->frees++;
    p->live_bytes -= piece.bytes;
    if (piece.caller) ctx->n_live[FSDP__CHILD_PINNED]--;
    return piece;
}

/* ---- Pieces, without it ---- */

static fsdp_status get_bytes(fsdp_context *ctx, size_t *bytes, void **out_ptr)
{
    fsdp__pinned *p = &ctx->pinned;
    unsigned n_refused = atomic_load(&p->n_refused);
    if (p->heap == NULL) {
        uint64_t rounded = fsdp__device_round(&ctx->caps, *bytes);
        if (rounded == 0) return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "no host memory has %zu bytes", *bytes);
        *bytes = rounded;
        return fsdp__device_take_region(ctx, rounded, out_ptr);
    }
    void *ptr = p->table.alloc(p->heap, *bytes, FSDP__PINNED_ALIGNMENT);
    if (ptr == NULL && atomic_load(&p->n_refused) != n_refused)
        return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "no pinned host memory for %zu bytes: %s", *bytes,
                          fsdp_last_error());
    if (ptr == NULL)
        return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "no pinned host memory for %zu bytes: the heap gave none", *bytes);
    *out_ptr = ptr;
    return FSDP_OK;
}

static void put_bytes(fsdp_context *ctx, fsdp__pinned_piece piece)
{
    fsdp__pinned *p = &ctx->pinned;
    if (p->heap != NULL) p->table.free(p->heap, piece.ptr, piece.bytes, FSDP__PINNED_ALIGNMENT);
    else fsdp__device_give_region(ctx, piece.ptr, piece.bytes);
}

static fsdp_status alloc_piece(fsdp_context *ctx, size_t bytes, bool caller, void **out_ptr)
{
    void *ptr;
    FSDP_TRY(get_bytes(ctx, &bytes, &ptr));
    fsdp__pinned_piece piece = {ptr, bytes, caller};
    fsdp__lock(ctx);
    bool added = add_piece(ctx, piece);
    fsdp__unlock(ctx);
    if (!added) {
        put_bytes(ctx, piece);
        return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "no host memory for the table of pinned pieces");
    }
    *out_ptr = ptr;
    return FSDP_OK;
}

fsdp_status fsdp__pinned_alloc(fsdp_context *ctx, size_t bytes, void **out_ptr)
{
    return alloc_piece(ctx, bytes, false, out_ptr);
}

void fsdp__pinned_free(fsdp_context *ctx, void *ptr)
{
    if (ptr == NULL) return;
    fsdp__lock(ctx);
    size_t at = find_piece(&ctx->pinned, ptr);
    assert(at < ctx->pinned.n_pieces && ctx->pinned.pieces[at].ptr == ptr && !ctx->pinned.pieces[at].caller);
    fsdp__pinned_piece piece = take_piece(ctx, at);
    fsdp__unlock(ctx);
    put_bytes(ctx, piece);
}

void fsdp__pinned_close(fsdp_context *ctx)
{
    fsdp__pinned *p = &ctx->pinned;
    while (p->n_pieces > 0) put_bytes(ctx, take_piece(ctx, p->n_pieces - 1));
    if (p->heap != NULL) p->table.close(p->heap);
    fsdp__host_free(&ctx->host, p->pieces, p->capacity, sizeof *p->pieces);
}

fsdp_status fsdp_pinned_alloc(fsdp_context *ctx, size_t bytes, void **out_ptr)
{
    FSDP_NEED(ctx);
    FSDP_NEED(out_ptr);
    if (bytes == 0) return fsdp__fail(FSDP_ERR_ARG, "fsdp_pinned_alloc: bytes is 0");
    FSDP_TRY(fsdp__context_check(ctx));
    FSDP_TRY(fsdp__capture_off(__func__, ctx));
    return alloc_piece(ctx, bytes, true, out_ptr);
}

/* With the lock held: which live piece of the caller's begins at ptr; refuse anything else. */
static fsdp_status find_callers(const fsdp__pinned *p, const char *ptr, size_t *out_at)
{
    size_t at = find_piece(p, ptr);
    const fsdp__pinned_piece *piece = at < p->n_pieces && p->pieces[at].ptr <= ptr ? &p->pieces[at] : NULL;
    if (piece == NULL)
        return fsdp__fail(FSDP_ERR_ARG,
                          "fsdp_pinned_free: %p is no live piece of this context: it was freed already, or "
                          "fsdp_pinned_alloc never gave it",
                          (const void *)ptr);
    if (!piece->caller)
        return fsdp__fail(FSDP_ERR_ARG, "fsdp_pinned_free: %p is the library's own staging", (const void *)ptr);
    if (piece->ptr != ptr)
        return fsdp__fail(FSDP_ERR_ARG,
                          "fsdp_pinned_free: %p points %zu bytes into a piece of %zu: free its first byte",
                          (const void *)ptr, (size_t)(ptr - piece->ptr), piece->bytes);
    *out_at = at;
    return FSDP_OK;
}

fsdp_status fsdp_pinned_free(fsdp_context *ctx, void *ptr)
{
    FSDP_NEED(ctx);
    if (ptr == NULL) return FSDP_OK;
    FSDP_TRY(fsdp__capture_off(__func__, ctx));
    size_t at = 0;
    fsdp__pinned_piece piece = {0};
    fsdp__lock(ctx);
    fsdp_status status = find_callers(&ctx->pinned, ptr, &at);
    if (status == FSDP_OK) piece = take_piece(ctx, at);
    fsdp__unlock(ctx);
    if (status == FSDP_OK) put_bytes(ctx, piece);
    return status;
}

/* ---- Stats ---- */

static void stats_of_regions(fsdp_context *ctx, fsdp_arena_stats *out_stats)
{
    fsdp__lock(ctx);
    const fsdp__pinned *p = &ctx->pinned;
    *out_stats = (fsdp_arena_stats){sizeof *out_stats, p->live_bytes, p->live_bytes, p->live_bytes,
                                    p->n_pieces,       p->allocs,     p->frees};
    fsdp__unlock(ctx);
}

bool fsdp__arena_stats(fsdp_context *ctx, fsdp__arena arena, fsdp_arena_stats *out_stats)
{
    *out_stats = (fsdp_arena_stats)FSDP_ARENA_STATS_INIT;
    const fsdp__pinned *p = &ctx->pinned;
    if (arena == FSDP__ARENA_HOST && ctx->host.stats != NULL) ctx->host.stats(ctx->host.arg, out_stats);
    else if (arena == FSDP__ARENA_PINNED && p->heap == NULL) stats_of_regions(ctx, out_stats);
    else if (arena == FSDP__ARENA_PINNED && p->table.stats != NULL) p->table.stats(p->heap, out_stats);
    else return false;
    return true;
}
