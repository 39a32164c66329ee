/* SPDX-License-Identifier: MIT */
/* Growing: how much a pool takes from the device, and what happens where it cannot. */
#include <stdio.h>

#include "alloc.h"
#include "check.h"
#include "context.h"
#include "device.h"
#include "graph.h"

fsdp_status fsdp__allocator_grow(fsdp_allocator *a, uint64_t bytes, fsdp__block **out_range)
{
    uint32_t number;
    void *ptr;
    FSDP_TRY(fsdp__ranges_reserve_segment(&a->ranges, &number));
    FSDP_TRY(fsdp__device_alloc(a->ctx, bytes, a->kind, &ptr));
    *out_range = fsdp__ranges_add(&a->ranges, number, (uint64_t)(uintptr_t)ptr, bytes);
    a->stats.reserved += bytes;
    if (a->stats.reserved > a->stats.reserved_peak) a->stats.reserved_peak = a->stats.reserved;
    a->stats.grows++;
    fsdp__allocator_note_segment(a, FSDP__ALLOC_EVENT_GROW, number);
    return FSDP_OK;
}

/* How much to take from the device: a segment, or all that the budget has left where that is less. 0: not even the bytes. */
static uint64_t growth(const fsdp_allocator *a, uint64_t bytes)
{
    const fsdp_device_caps *caps = &a->ctx->caps;
    uint64_t budget = a->config.budget_bytes, room = budget == 0 ? UINT64_MAX : budget - a->stats.reserved;
    uint64_t segment_bytes = fsdp__device_round(caps, a->config.segment_bytes), least = fsdp__device_round(caps, bytes);
    room -= room % caps->granularity;
    if (least > room) return 0;
    if (segment_bytes < least) segment_bytes = least;
    return segment_bytes <= room ? segment_bytes : room;
}

static fsdp_status grow_halving(fsdp_allocator *a, uint64_t more, uint64_t least, fsdp__block **out_range)
{
    for (;;) {
        fsdp_status status = fsdp__allocator_grow(a, more, out_range);
        if (status != FSDP_ERR_NO_MEMORY) return status;
        a->refused_bytes = more;
        a->refused_at = a->ctx->n_device_frees;
        if (more == least) return status;
        more = fsdp__device_round(&a->ctx->caps, more / 2);
        if (more < least) more = least;
    }
}

/* Take that much; where the device has less left, half of it, a quarter …, at least what is needed. What it refused on the
 * way is nobody's last error if it gave in the end. */
static fsdp_status grow_by(fsdp_allocator *a, uint64_t more, uint64_t bytes, fsdp__block **out_range)
{
    uint64_t least = fsdp__device_round(&a->ctx->caps, bytes);
    char last_error[FSDP__ERROR_BYTES];
    snprintf(last_error, sizeof last_error, "%s", fsdp_last_error());
    fsdp_status status = grow_halving(a, more, least, out_range);
    if (status == FSDP_OK) FSDP_IGNORE(fsdp__fail(status, "%s", last_error));
    return status;
}

fsdp_status fsdp__allocator_grow_for(fsdp_allocator *a, uint64_t bytes, const char *owner, fsdp__block **out_range)
{
    uint64_t more = growth(a, bytes);
    char why[256];
    if (a->ctx->capture != NULL)
        return fsdp__fail(
            FSDP_ERR_STATE,
            "allocator %s: no room for %llu bytes, and a capture is on, on stream %s, in which nothing can be "
            "taken from the device: let the allocator grow before",
            a->name, (unsigned long long)bytes, a->ctx->capture->stream->name);
    if (a->config.budget_bytes > 0 && bytes > a->config.budget_bytes) {
        snprintf(why, sizeof why, "the whole budget is %llu", (unsigned long long)a->config.budget_bytes);
        return fsdp__allocator_fail(a, bytes, 0, owner, why);
    }
    if (more == 0) {
        uint64_t budget = a->config.budget_bytes, room = budget - a->stats.reserved;
        room -= room % a->ctx->caps.granularity;
        if (room == 0) snprintf(why, sizeof why, "the budget of %llu allows no more", (unsigned long long)budget);
        else
            snprintf(why, sizeof why, "the budget of %llu allows %llu more", (unsigned long long)budget,
                     (unsigned long long)room);
        return fsdp__allocator_fail(a, bytes, room, owner, why);
    }
    fsdp_status status = grow_by(a, more, bytes, out_range);
    if (status != FSDP_ERR_NO_MEMORY) return status;
    snprintf(why, sizeof why, "the device says: %.200s", fsdp_last_error());
    return fsdp__allocator_fail(a, bytes, 0, owner, why);
}

fsdp_status fsdp__allocator_grow_if_possible(fsdp_allocator *a, uint64_t bytes, fsdp__block **out_range)
{
    uint64_t more = growth(a, bytes);
    bool refused = a->refused_bytes > 0 && a->refused_at == a->ctx->n_device_frees &&
                   fsdp__device_round(&a->ctx->caps, bytes) >= a->refused_bytes;
    if (more == 0 || refused || a->ctx->capture != NULL)
        return FSDP_OK; /* a device that says no is slow, so it is not asked the same again */
    char last_error[FSDP__ERROR_BYTES];
    snprintf(last_error, sizeof last_error, "%s", fsdp_last_error());
    fsdp_status status = grow_by(a, more, bytes, out_range);
    if (status != FSDP_ERR_NO_MEMORY) return status;
    FSDP_IGNORE(fsdp__fail(status, "%s", last_error));
    return FSDP_OK;
}
