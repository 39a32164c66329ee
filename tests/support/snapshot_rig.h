/* SPDX-License-Identifier: MIT */
/* A context with three streams, an allocator, and a folder for its snapshots, which are read back by fsdp-memory's reader. */
#ifndef FSDP_TESTS_SNAPSHOT_RIG_H
#define FSDP_TESTS_SNAPSHOT_RIG_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fsdp/fsdp.h"
#include "ok.h"
#include "tools/fsdp_memory_read.h"

enum { SEGMENT = 65536 };

typedef struct bench {
    char folder[64], path[96];
    fsdp_context *ctx;
    fsdp_stream *a, *b, *c;
    fsdp_allocator *pool;
    fsdp__snapshot s;
} bench;

static inline void open_context(bench *b, const fsdp_host_allocator *host)
{
    fsdp_config config = FSDP_CONFIG_INIT;
    if (host != NULL) config.host = *host;
    OK(fsdp_context_create(&config, &b->ctx));
    OK(fsdp_stream_create(b->ctx, "a", &b->a));
    OK(fsdp_stream_create(b->ctx, "b", &b->b));
    OK(fsdp_stream_create(b->ctx, "c", &b->c));
}

static inline void open_pool(bench *b, const char *name, uint64_t budget, uint32_t history)
{
    fsdp_allocator_config config = FSDP_ALLOCATOR_CONFIG_INIT;
    config.name = name;
    config.segment_bytes = SEGMENT;
    config.budget_bytes = budget;
    config.history = history;
    OK(fsdp_allocator_create(b->ctx, &config, &b->pool));
}

static inline int set_up(void **state)
{
    alarm(120);
    bench *b = calloc(1, sizeof *b);
    assert_non_null(b);
    strcpy(b->folder, "/tmp/fsdp_snapshot_XXXXXX");
    assert_non_null(mkdtemp(b->folder));
    snprintf(b->path, sizeof b->path, "%s/memory.json", b->folder);
    open_context(b, NULL);
    *state = b;
    return 0;
}

static inline void close_context(bench *b)
{
    OK(fsdp_allocator_destroy(b->pool));
    OK(fsdp_stream_release(b->a));
    OK(fsdp_stream_release(b->b));
    OK(fsdp_stream_release(b->c));
    OK(fsdp_context_destroy(b->ctx));
    b->pool = NULL;
}

static inline int tear_down(void **state)
{
    bench *b = *state;
    fsdp__snapshot_free(&b->s);
    close_context(b);
    unlink(b->path);
    rmdir(b->folder);
    free(b);
    return 0;
}

static inline void *take(bench *b, uint64_t bytes, fsdp_stream *stream, const char *owner)
{
    void *ptr = NULL;
    OK(fsdp_allocator_alloc(b->pool, bytes, stream, owner, &ptr));
    return ptr;
}

/* Write and read back. */
static inline const fsdp__snapshot *snapshot(bench *b)
{
    char error[512];
    fsdp__snapshot_free(&b->s);
    OK(fsdp_memory_write_json(b->ctx, b->path));
    if (!fsdp__snapshot_read(b->path, &b->s, error, sizeof error)) fail_msg("%s", error);
    return &b->s;
}

/* The snapshot's one pool. */
static inline const fsdp__snapshot_pool *only_pool(bench *b)
{
    const fsdp__snapshot *s = snapshot(b);
    assert_int_equal(s->n_pools, 1);
    return &s->pools[0];
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

#endif
