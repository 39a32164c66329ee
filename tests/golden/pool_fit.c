/* SPDX-License-Identifier: MIT */
#include "pool_fit.h"

#include <stdlib.h>

#include "check.h"
#include "null_backend.h"

enum { GRANULARITY = 4096, STEPS_OF_PEAK = 128 };

/* The gather lane and compute, or compute and the reduce lane. */
typedef struct replay {
    fsdp_context *ctx;
    fsdp_stream *owner, *user;
    fsdp_allocator *allocator;
    void **ptr; /* of each life */
} replay;

static fsdp_status close_replay(replay *p)
{
    free(p->ptr);
    if (p->ctx == NULL) return FSDP_OK;
    FSDP_TRY(fsdp_allocator_destroy(p->allocator));
    FSDP_TRY(fsdp_stream_release(p->owner));
    FSDP_TRY(fsdp_stream_release(p->user));
    return fsdp_context_destroy(p->ctx);
}

static fsdp_status open_replay(replay *p, const pool_events *events, uint64_t budget)
{
    fsdp_config config = FSDP_CONFIG_INIT;
    config.backend = null_backend();
    FSDP_TRY(fsdp_context_create(&config, &p->ctx));
    FSDP_TRY(fsdp_stream_create(p->ctx, "owner", &p->owner));
    FSDP_TRY(fsdp_stream_create(p->ctx, "user", &p->user));
    fsdp_allocator_config pool = FSDP_ALLOCATOR_CONFIG_INIT;
    pool.budget_bytes = budget;
    pool.segment_bytes = budget > 0 ? budget : GRANULARITY;
    pool.history = 0;
    FSDP_TRY(fsdp_allocator_create(p->ctx, &pool, &p->allocator));
    p->ptr = calloc(events->n_lives + 1, sizeof *p->ptr);
    return p->ptr != NULL ? FSDP_OK : fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "no host memory for a replay");
}

/* Written on the owner's stream, then used on the other; an update orders everything. */
static fsdp_status replay_event(replay *p, const pool_event *event)
{
    void **ptr = &p->ptr[event->life];
    switch (event->kind) {
    case POOL_ALLOC:
        FSDP_TRY(fsdp_allocator_alloc(p->allocator, event->bytes, p->owner, "life", ptr));
        FSDP_TRY(fsdp_stream_delay(p->owner, 1));
        return fsdp_stream_wait_stream(p->user, p->owner);
    case POOL_FREE:
        FSDP_TRY(fsdp_stream_delay(p->user, 1));
        FSDP_TRY(fsdp_allocator_record_use(p->allocator, *ptr, p->user));
        FSDP_TRY(fsdp_allocator_free(p->allocator, *ptr));
        *ptr = NULL;
        return FSDP_OK;
    case POOL_UPDATE: return fsdp_stream_wait_stream(p->owner, p->user);
    }
    return FSDP_OK;
}

/* *out_fits false: the budget did not hold it. */
static fsdp_status replay_events(const pool_events *events, uint64_t budget, uint64_t *out_reserved, bool *out_fits)
{
    replay p = {0};
    FSDP_TRY(open_replay(&p, events, budget));
    fsdp_status status = FSDP_OK;
    for (size_t i = 0; i < events->n && status == FSDP_OK; i++) status = replay_event(&p, &events->event[i]);
    *out_fits = status == FSDP_OK;
    if (status != FSDP_OK && (budget == 0 || status != FSDP_ERR_NO_MEMORY)) return status;
    fsdp_alloc_stats stats = FSDP_ALLOC_STATS_INIT;
    FSDP_TRY(fsdp_allocator_stats(p.allocator, &stats));
    if (*out_fits && stats.allocated_peak < events->live_peak)
        return fsdp__fail(FSDP_ERR_STATE, "the replay held less than the pool");
    *out_reserved = stats.reserved_peak;
    for (uint32_t life = 0; life < events->n_lives; life++) FSDP_TRY(fsdp_allocator_free(p.allocator, p.ptr[life]));
    return close_replay(&p);
}

fsdp_status pool_fit_segments(const pool_events *events, uint64_t *out_reserved)
{
    bool fits;
    return replay_events(events, 0, out_reserved, &fits);
}

fsdp_status pool_fit_range(const pool_events *events, uint64_t *out_reserved)
{
    bool fits = false;
    uint64_t step = events->live_peak / STEPS_OF_PEAK / GRANULARITY * GRANULARITY + GRANULARITY;
    uint64_t range = (events->live_peak + GRANULARITY - 1) / GRANULARITY * GRANULARITY;
    for (; !fits && range <= 2 * events->live_peak; range += step)
        FSDP_TRY(replay_events(events, range, out_reserved, &fits));
    if (!fits) *out_reserved = 0;
    return FSDP_OK;
}
