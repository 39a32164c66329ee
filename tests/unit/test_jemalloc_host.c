/* SPDX-License-Identifier: MIT */
/* fsdp::jemalloc: the arena for host memory, and both arenas under the library: nothing that came from one allocator is
 * freed by another, and nothing is left. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "context.h"
#include "fsdp/fsdp.h"
#include "fsdp/jemalloc.h"
#include "mallctl.h"
#include "pinned.h"

#define OK(call) assert_int_equal((call), FSDP_OK)

enum { PAGE = 4096, MB = 1024 * 1024 };

/* ---- The arena for host memory ---- */

static void the_host_arena_is_its_own_and_malloc_stays_libcs(void **unused)
{
    (void)unused;
    fsdp_host_allocator host, twin;
    OK(fsdp_jemalloc_host_create(&host));
    OK(fsdp_jemalloc_host_create(&twin));
    void *p = host.alloc(host.arg, 1000, 64), *q = twin.alloc(twin.arg, 1000, 64);
    assert_int_not_equal(arena_of(p), arena_of(q));
    static const char *const names[] = {"malloc", "aligned_alloc", "free"};
    for (int i = 0; i < 3; i++) {
        Dl_info info;
        assert_int_not_equal(dladdr(dlsym(RTLD_DEFAULT, names[i]), &info), 0);
        assert_null(strstr(info.dli_fname, "jemalloc"));
    }
    for (size_t alignment = 1; alignment <= 65536; alignment *= 2) {
        char *a = host.alloc(host.arg, 3, alignment);
        assert_int_equal((uintptr_t)a & (alignment - 1), 0);
        assert_int_equal(arena_of(a), arena_of(p));
        host.free(host.arg, a, 3, alignment);
    }
    host.free(host.arg, p, 1000, 64);
    twin.free(twin.arg, q, 1000, 64);
    OK(fsdp_jemalloc_host_destroy(&host));
    OK(fsdp_jemalloc_host_destroy(&twin));
}

static void *foreign_alloc(void *arg, size_t bytes, size_t alignment)
{
    (void)arg;
    return aligned_alloc(alignment, bytes);
}

static void foreign_free(void *arg, void *ptr, size_t bytes, size_t alignment)
{
    (void)arg, (void)bytes, (void)alignment;
    free(ptr);
}

static void a_host_arena_with_live_pieces_is_not_destroyed(void **unused)
{
    (void)unused;
    fsdp_host_allocator host, foreign = {foreign_alloc, foreign_free, NULL, NULL};
    OK(fsdp_jemalloc_host_create(&host));
    void *p = host.alloc(host.arg, 1000, 64);
    assert_int_equal(fsdp_jemalloc_host_destroy(&host), FSDP_ERR_STATE);
    assert_non_null(strstr(fsdp_jemalloc_last_error(), "1 pieces live"));
    memset(p, 1, 1000);
    host.free(host.arg, p, 1000, 64);
    OK(fsdp_jemalloc_host_destroy(&host));
    assert_null(host.alloc);
    OK(fsdp_jemalloc_host_destroy(&host)); /* nothing */
    assert_int_equal(fsdp_jemalloc_host_destroy(&foreign), FSDP_ERR_ARG);
    assert_non_null(strstr(fsdp_jemalloc_last_error(), "not from fsdp_jemalloc_host_create"));
    assert_int_equal(fsdp_jemalloc_host_destroy(NULL), FSDP_ERR_ARG);
    assert_int_equal(fsdp_jemalloc_host_create(NULL), FSDP_ERR_ARG);
}

static void arenas_are_given_back(void **unused)
{
    (void)unused;
    for (int i = 0; i < 5000; i++) { /* more than can exist */
        fsdp_host_allocator host;
        OK(fsdp_jemalloc_host_create(&host));
        OK(fsdp_jemalloc_host_destroy(&host));
    }
}

/* ---- Under the library ---- */

/* Every pointer that the library gives back to the host table is one that it got there: no cross-free. */
typedef struct watch {
    fsdp_host_allocator host;
    unsigned arena;
    uint32_t n_wrong;
    pthread_mutex_t lock;
} watch;

static void *watched_alloc(void *arg, size_t bytes, size_t alignment)
{
    watch *w = arg;
    return w->host.alloc(w->host.arg, bytes, alignment);
}

static void watched_free(void *arg, void *ptr, size_t bytes, size_t alignment)
{
    watch *w = arg;
    unsigned arena;
    size_t size = sizeof arena;
    int error = control("arenas.lookup", &arena, &size, &ptr, sizeof ptr);
    pthread_mutex_lock(&w->lock);
    w->n_wrong += error != 0 || arena != w->arena;
    pthread_mutex_unlock(&w->lock);
    if (error == 0) w->host.free(w->host.arg, ptr, bytes, alignment);
}

static void use_a_model(fsdp_context *ctx)
{
    enum { ELEMS = 2 * 262144 + 17 };
    float *values = malloc(ELEMS * sizeof *values), *got = malloc(ELEMS * sizeof *got);
    fsdp_model *model;
    fsdp_unit *unit;
    fsdp_param *param;
    fsdp_counters first = FSDP_COUNTERS_INIT, last = FSDP_COUNTERS_INIT;
    fsdp_arena_stats stats;
    assert_true(values != NULL && got != NULL);
    OK(fsdp_model_create(ctx, NULL, &model));
    OK(fsdp_model_add_unit(model, "u", NULL, &unit));
    OK(fsdp_unit_add_param(unit, "w", 1, (uint64_t[]){ELEMS}, NULL, &param));
    OK(fsdp_model_seal(model));
    for (int i = 0; i < ELEMS; i++) values[i] = (float)i;
    OK(fsdp_param_set(param, values, FSDP_DTYPE_FP32));
    OK(fsdp_context_counters(ctx, &first));
    for (int i = 0; i < 3; i++) {
        memset(got, 0, ELEMS * sizeof *got);
        OK(fsdp_param_get(param, FSDP_VALUE_MASTER, got, FSDP_DTYPE_FP32));
        assert_memory_equal(got, values, ELEMS * sizeof *got);
    }
    OK(fsdp_context_counters(ctx, &last));
    assert_int_equal(last.allocations, first.allocations); /* staging comes from what the device gave before */
    assert_true(fsdp__arena_stats(ctx, FSDP__ARENA_PINNED, &stats));
    assert_int_equal(stats.allocs, 4);
    assert_int_equal(stats.frees, 4);
    assert_int_equal(stats.allocated_bytes, 0);
    fsdp_memory memory = FSDP_MEMORY_INIT;
    OK(fsdp_model_memory(model, &memory));
    assert_int_equal(last.pinned_bytes, memory.pinned + stats.mapped_bytes);
    assert_true(fsdp__arena_stats(ctx, FSDP__ARENA_HOST, &stats));
    assert_true(stats.allocs > stats.frees && stats.allocated_bytes > 0);
    assert_in_range(stats.active_bytes, stats.allocated_bytes, stats.mapped_bytes);
    OK(fsdp_model_destroy(model));
    free(values);
    free(got);
}

static void a_context_lives_in_both_arenas_and_leaves_nothing(void **unused)
{
    (void)unused;
    const fsdp_backend *backends[] = {fsdp_host_backend(), fsdp_sim_backend()};
    for (int b = 0; b < 2; b++) {
        watch w = {.n_wrong = 0};
        fsdp_arena_stats stats = FSDP_ARENA_STATS_INIT;
        pthread_mutex_init(&w.lock, NULL);
        OK(fsdp_jemalloc_host_create(&w.host));
        void *probe = w.host.alloc(w.host.arg, 8, 8);
        w.arena = arena_of(probe);
        w.host.free(w.host.arg, probe, 8, 8);
        fsdp_config config = FSDP_CONFIG_INIT;
        config.backend = backends[b];
        config.host = w.host;
        config.host.alloc = watched_alloc, config.host.free = watched_free, config.host.stats = NULL;
        config.host.arg = &w;
        config.pinned = fsdp_jemalloc_pinned();
        fsdp_context *ctx;
        void *p;
        OK(fsdp_context_create(&config, &ctx));
        OK(fsdp_pinned_alloc(ctx, 10000, &p));
        assert_int_equal((uintptr_t)p % (b == 0 ? PAGE : 64), 0);
        assert_true(fsdp__arena_stats(ctx, FSDP__ARENA_PINNED, &stats));
        assert_int_equal(ctx->pinned.heap != NULL, b == 0); /* on sim a hook would lead into the host's arena */
        assert_in_range(stats.mapped_bytes, 3 * PAGE, b == 0 ? 2 * MB : 3 * PAGE);
        memset(p, 1, 10000);
        OK(fsdp_pinned_free(ctx, p));
        OK(fsdp_context_destroy(ctx));

        config.host = w.host;
        OK(fsdp_context_create(&config, &ctx));
        if (b == 0) use_a_model(ctx);
        OK(fsdp_context_destroy(ctx));
        assert_int_equal(w.n_wrong, 0);
        w.host.stats(w.host.arg, &stats);
        assert_int_equal(stats.allocs, stats.frees);
        OK(fsdp_jemalloc_host_destroy(&w.host));
        pthread_mutex_destroy(&w.lock);
    }
}

int main(void)
{
    if (!find_control()) return 1;
#define TEST(name) cmocka_unit_test_setup(name, deadline)
    const struct CMUnitTest tests[] = {
        TEST(the_host_arena_is_its_own_and_malloc_stays_libcs),
        TEST(a_host_arena_with_live_pieces_is_not_destroyed),
        TEST(arenas_are_given_back),
        TEST(a_context_lives_in_both_arenas_and_leaves_nothing),
    };
    return cmocka_run_group_tests_name("jemalloc under the library", tests, NULL, NULL);
}
