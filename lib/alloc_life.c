/* SPDX-License-Identifier: MIT */
/* Making and destroying allocators, and the ranges of a plan. */
#include <stdio.h>

#include "alloc.h"
#include "check.h"
#include "context.h"
#include "device.h"
#include "graph.h"
#include "hash.h"

static void destroy(fsdp_allocator *a)
{
    fsdp_context *ctx = a->ctx;
    for (size_t i = 0; i < a->ranges.n_segments; i++) {
        const fsdp__segment *seg = &a->ranges.segments[i];
        if (seg->bytes > 0) fsdp__device_free(ctx, (void *)(uintptr_t)seg->begin, seg->bytes, a->kind);
    }
    *(a->previous_pool != NULL ? &a->previous_pool->next_pool : &ctx->pools) = a->next_pool;
    if (a->next_pool != NULL) a->next_pool->previous_pool = a->previous_pool;
    fsdp__ranges_fini(&a->ranges);
    fsdp__host_free(&ctx->host, a->live.entry, a->live.capacity, sizeof *a->live.entry);
    fsdp__host_free(&ctx->host, a->history.events, a->history.capacity, sizeof *a->history.events);
    fsdp__host_free(&ctx->host, a, 1, sizeof *a);
}

static fsdp_status create(fsdp_context *ctx, const fsdp_allocator_config *config, bool placed,
                          fsdp_allocator **out_allocator)
{
    fsdp_allocator *a = fsdp__host_alloc(&ctx->host, 1, sizeof *a);
    if (a == NULL) return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "allocator %s: no host memory", config->name);
    uint32_t capacity = config->history > 0 ? 1 : 0;
    while (capacity < config->history) capacity *= 2;
    a->history.events = fsdp__host_alloc(&ctx->host, capacity, sizeof *a->history.events);
    if (a->history.events == NULL) {
        fsdp__host_free(&ctx->host, a, 1, sizeof *a);
        return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "allocator %s: no host memory for a history of %u events",
                          config->name, capacity);
    }
    a->history.capacity = capacity;
    a->ctx = ctx;
    a->config = *config;
    snprintf(a->name, sizeof a->name, "%s", config->name);
    a->config.name = a->name;
    fsdp__ranges_init(&a->ranges, &ctx->host, placed);
    a->stats.size = sizeof a->stats;
    a->stats.trace_hash = a->step_hash = FSDP__HASH_SEED;
    a->next_pool = ctx->pools;
    if (a->next_pool != NULL) a->next_pool->previous_pool = a;
    ctx->pools = a;
    *out_allocator = a;
    return FSDP_OK;
}

fsdp_status fsdp_allocator_create(fsdp_context *ctx, const fsdp_allocator_config *config,
                                  fsdp_allocator **out_allocator)
{
    FSDP_NEED(ctx);
    FSDP_NEED(out_allocator);
    fsdp_allocator_config c = FSDP_ALLOCATOR_CONFIG_INIT;
    if (config != NULL) FSDP_TRY(fsdp__read_config("fsdp_allocator_config", &c, sizeof c, config, sizeof c));
    if (c.name == NULL) return fsdp__fail(FSDP_ERR_ARG, "fsdp_allocator_config.name is NULL");
    if (c.policy != FSDP_ALLOC_WAIT_FIRST && c.policy != FSDP_ALLOC_GROW_FIRST)
        return fsdp__fail(FSDP_ERR_ARG, "allocator %s: policy %d does not exist", c.name, (int)c.policy);
    if (c.budget_bytes > 0 && c.budget_bytes < ctx->caps.granularity)
        return fsdp__fail(FSDP_ERR_ARG,
                          "allocator %s: a budget of %llu is less than the %llu bytes that the device gives "
                          "at a time",
                          c.name, (unsigned long long)c.budget_bytes, (unsigned long long)ctx->caps.granularity);
    if (c.history > FSDP__HISTORY_MOST)
        return fsdp__fail(FSDP_ERR_ARG, "allocator %s: a history of %u events is more than %u", c.name, c.history,
                          FSDP__HISTORY_MOST);
    FSDP_TRY(fsdp__context_check(ctx));
    FSDP_TRY(fsdp__capture_off(__func__, ctx));
    fsdp__lock(ctx);
    fsdp_status status = create(ctx, &c, false, out_allocator);
    if (status == FSDP_OK) ctx->n_live[FSDP__CHILD_ALLOCATOR]++;
    fsdp__unlock(ctx);
    return status;
}

fsdp_status fsdp__allocator_create_range(fsdp_context *ctx, const char *model, const char *name, uint64_t bytes,
                                         fsdp_allocator **out_allocator)
{
    bytes = fsdp__device_round(&ctx->caps, bytes);
    fsdp_allocator_config config = FSDP_ALLOCATOR_CONFIG_INIT;
    config.name = name;
    config.budget_bytes = config.segment_bytes = bytes;
    fsdp_allocator *a;
    FSDP_TRY(create(ctx, &config, true, &a));
    a->model = model;
    a->kind = FSDP_MEMORY_KIND_COLLECTIVE;
    fsdp_status status = FSDP_OK;
    if (bytes > 0) {
        fsdp__block *range;
        status = fsdp__ranges_reserve(&a->ranges);
        if (status == FSDP_OK) status = fsdp__allocator_grow(a, bytes, &range);
    }
    if (status != FSDP_OK) {
        destroy(a);
        return status;
    }
    *out_allocator = a;
    return FSDP_OK;
}

void fsdp__allocator_destroy_range(fsdp_allocator *a)
{
    if (a != NULL) destroy(a);
}

void *fsdp__allocator_base(const fsdp_allocator *a)
{
    return a->ranges.n_segments > 0 ? (void *)(uintptr_t)a->ranges.segments[0].begin : NULL;
}

fsdp_status fsdp_allocator_destroy(fsdp_allocator *allocator)
{
    if (allocator == NULL) return FSDP_OK;
    fsdp_context *ctx = allocator->ctx;
    FSDP_TRY(fsdp__capture_off(__func__, ctx));
    fsdp__lock(ctx);
    if (allocator->ranges.n_live > 0) {
        char text[2048] = "";
        fsdp__allocator_describe(allocator, text, sizeof text);
        fsdp__unlock(ctx);
        return fsdp__fail(FSDP_ERR_STATE, "allocator %s has %u live block%s: free first%s", allocator->name,
                          allocator->ranges.n_live, allocator->ranges.n_live == 1 ? "" : "s", text);
    }
    fsdp_status status = fsdp__context_settle(ctx, __func__);
    if (status != FSDP_OK) {
        fsdp__unlock(ctx);
        return status;
    }
    fsdp__capture_lose_pool(ctx, allocator, "was destroyed");
    destroy(allocator);
    ctx->n_live[FSDP__CHILD_ALLOCATOR]--;
    fsdp__unlock(ctx);
    return FSDP_OK;
}
