/* SPDX-License-Identifier: MIT */
/* A context, four streams and an allocator under test. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "alloc_suite.h"

#include "fsdp/backend.h"

enum { DEADLINE_S = 60 };

/* The backend under test, but for how much memory its device has. One suite runs at a time, so one is enough. */
static struct {
    const fsdp_device_ops *inner;
    fsdp_device_ops device;
    fsdp_backend backend;
    uint64_t left;        /* bytes; UINT64_MAX: as many as the inner one has */
    uint64_t granularity; /* 0: the inner one's */
} small = {.left = UINT64_MAX};

void device_limit(uint64_t bytes) { small.left = bytes; }

static fsdp_status small_open(const fsdp_device_args *args, void **out_dev, fsdp_device_caps *out_caps)
{
    fsdp_status status = small.inner->open(args, out_dev, out_caps);
    if (status == FSDP_OK && small.granularity != 0) out_caps->granularity = small.granularity;
    return status;
}

static fsdp_status small_alloc(void *dev, uint64_t bytes, fsdp_memory_kind kind, void **out_ptr)
{
    bool counts = kind == FSDP_MEMORY_KIND_DEVICE && small.left != UINT64_MAX;
    if (counts && bytes > small.left)
        return fsdp_backend_fail(FSDP_ERR_NO_MEMORY, "small device: %llu bytes are left",
                                 (unsigned long long)small.left);
    fsdp_status status = small.inner->mem_alloc(dev, bytes, kind, out_ptr);
    if (status == FSDP_OK && counts) small.left -= bytes;
    return status;
}

static void small_free(void *dev, void *ptr, uint64_t bytes, fsdp_memory_kind kind)
{
    small.inner->mem_free(dev, ptr, bytes, kind);
    if (kind == FSDP_MEMORY_KIND_DEVICE && small.left != UINT64_MAX) small.left += bytes;
}

static const fsdp_backend *small_backend(const fsdp_backend *backend, uint64_t granularity)
{
    small.inner = backend->device;
    small.granularity = granularity;
    small.device = *backend->device;
    small.device.open = small_open;
    small.device.mem_alloc = small_alloc;
    small.device.mem_free = small_free;
    small.backend = *backend;
    small.backend.device = &small.device;
    return &small.backend;
}

void alloc_rig_open(alloc_rig *r, const alloc_suite *suite, uint64_t jitter_ns, uint64_t jitter_seed,
                    uint64_t timeout_ns, const fsdp_host_allocator *host)
{
    *r = (alloc_rig){.suite = suite};
    fsdp_config config = FSDP_CONFIG_INIT;
    config.backend = small_backend(suite->backend, suite->granularity);
    config.backend_config = suite->config(r->config, jitter_ns, jitter_seed);
    config.timeout_ns = timeout_ns;
    if (host != NULL) config.host = *host;
    OK(fsdp_context_create(&config, &r->ctx));
    static const char *const names[ALLOC_STREAMS] = {"a", "b", "c", "d"};
    for (int i = 0; i < ALLOC_STREAMS; i++) OK(fsdp_stream_create(r->ctx, names[i], &r->s[i]));
}

void alloc_rig_close(alloc_rig *r)
{
    OK(fsdp_allocator_destroy(r->a));
    for (int i = 0; i < ALLOC_STREAMS; i++) OK(fsdp_stream_release(r->s[i]));
    OK(fsdp_context_destroy(r->ctx));
    if (r->suite->end != NULL) r->suite->end(r->config);
}

int alloc_rig_setup(void **state)
{
    alarm(DEADLINE_S);
    alloc_rig *r = malloc(sizeof *r);
    if (r == NULL) return -1;
    alloc_rig_open(r, *state, 0, 0, 10000000000ull, NULL);
    *state = r;
    return 0;
}

int alloc_rig_teardown(void **state)
{
    alloc_rig_close(*state);
    free(*state);
    alarm(0);
    return 0;
}

void make_allocator(alloc_rig *r, uint64_t budget_bytes, uint64_t segment_bytes)
{
    fsdp_allocator_config config = FSDP_ALLOCATOR_CONFIG_INIT;
    config.name = "small";
    config.budget_bytes = budget_bytes;
    config.segment_bytes = segment_bytes;
    config.policy = r->suite->policy;
    OK(fsdp_allocator_create(r->ctx, &config, &r->a));
}

char *take(alloc_rig *r, uint64_t bytes, int stream)
{
    void *ptr = NULL;
    OK(fsdp_allocator_alloc(r->a, bytes, r->s[stream], NULL, &ptr));
    assert_non_null(ptr);
    return ptr;
}

void give(alloc_rig *r, void *ptr) { OK(fsdp_allocator_free(r->a, ptr)); }

fsdp_alloc_stats stats_of(alloc_rig *r)
{
    fsdp_alloc_stats stats = FSDP_ALLOC_STATS_INIT;
    OK(fsdp_allocator_stats(r->a, &stats));
    return stats;
}

fsdp_counters counters_of(alloc_rig *r)
{
    fsdp_counters c = FSDP_COUNTERS_INIT;
    OK(fsdp_context_counters(r->ctx, &c));
    return c;
}

uint64_t n_waits(alloc_rig *r) { return counters_of(r).waits; }
void order(alloc_rig *r, int stream, int other) { OK(fsdp_stream_wait_stream(r->s[stream], r->s[other])); }

void touch(alloc_rig *r, int stream, void *ptr, uint8_t byte, uint64_t bytes)
{
    OK(fsdp_stream_fill(r->s[stream], ptr, byte, bytes));
}

void assert_bytes(const alloc_suite *suite, const void *ptr, uint8_t byte, uint64_t bytes)
{
    static uint8_t seen[4096];
    for (uint64_t at = 0; suite->has_data && at < bytes; at += sizeof seen) {
        uint64_t n = bytes - at < sizeof seen ? bytes - at : sizeof seen;
        if (suite->peek != NULL) suite->peek(seen, (const char *)ptr + at, n);
        else memcpy(seen, (const char *)ptr + at, n);
        for (uint64_t i = 0; i < n; i++) assert_int_equal(seen[i], byte);
    }
}

void assert_said(const char *fragment)
{
    if (strstr(fsdp_last_error(), fragment) == NULL) fail_msg("'%s' is not in: %s", fragment, fsdp_last_error());
}
