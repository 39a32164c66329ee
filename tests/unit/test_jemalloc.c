/* SPDX-License-Identifier: MIT */
/* fsdp::jemalloc: the arena over pinned memory against a source of regions that counts and checks every one, and its hooks
 * one by one. Run once more with MALLOC_CONF=retain:false, where jemalloc asks other questions. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <dlfcn.h>
#include <jemalloc/jemalloc.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "fsdp/jemalloc.h"
#include "mallctl.h"

enum { PAGE = 4096, MB = 1024 * 1024, SPACE = 1024 * MB, MAX_REGIONS = 1024, MAX_PIECES = 200 };

/* ---- A device's regions: each begins where the last one ends, so that only their own begin and end keep them apart ---- */

typedef struct device {
    pthread_mutex_t lock;
    fsdp_pinned_source source;
    char *space;
    size_t used, offset; /* offset: regions lie so many bytes behind a page */
    struct {
        char *ptr;
        size_t bytes;
        uint32_t n_gives;
    } region[MAX_REGIONS];
    uint32_t n_takes, n_gives, n_wrong;
    uint64_t held_bytes, largest;
    int64_t until_refusal; /* below 0: never */
} device;

static void *device_take(void *arg, size_t bytes)
{
    device *d = arg;
    char *ptr = NULL;
    pthread_mutex_lock(&d->lock);
    size_t whole = (bytes + PAGE - 1) / PAGE * PAGE;
    if (d->until_refusal != 0 && d->used + whole + PAGE <= SPACE && d->n_takes < MAX_REGIONS) {
        ptr = d->space + d->used + d->offset;
        d->used += whole + (d->offset ? PAGE : 0);
        d->region[d->n_takes].ptr = ptr;
        d->region[d->n_takes].bytes = bytes;
        d->region[d->n_takes++].n_gives = 0;
        d->held_bytes += bytes;
        if (bytes > d->largest) d->largest = bytes;
        if (d->until_refusal > 0) d->until_refusal--;
    }
    pthread_mutex_unlock(&d->lock);
    return ptr;
}

static void device_give(void *arg, void *ptr, size_t bytes)
{
    device *d = arg;
    uint32_t found = 0;
    pthread_mutex_lock(&d->lock);
    for (uint32_t i = 0; i < d->n_takes; i++)
        if (d->region[i].ptr == ptr && d->region[i].bytes == bytes && d->region[i].n_gives++ == 0) found++;
    d->n_wrong += found != 1; /* a part, twice, or nobody's */
    d->n_gives++;
    d->held_bytes -= bytes;
    pthread_mutex_unlock(&d->lock);
}

static void device_open(device *d)
{
    *d = (device){.until_refusal = -1};
    pthread_mutex_init(&d->lock, NULL);
    d->source = (fsdp_pinned_source){sizeof d->source, d, device_take, device_give, PAGE};
    d->space = mmap(NULL, SPACE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    assert_true(d->space != MAP_FAILED);
}

/* Every region has come back, once and whole. */
static void device_close(device *d)
{
    assert_int_equal(d->n_wrong, 0);
    assert_int_equal(d->n_gives, d->n_takes);
    assert_int_equal(d->held_bytes, 0);
    munmap(d->space, SPACE);
    pthread_mutex_destroy(&d->lock);
}

/* Which region has the whole piece, or −1. */
static int region_of(const device *d, const char *ptr, size_t bytes)
{
    for (uint32_t i = 0; i < d->n_takes; i++)
        if (ptr >= d->region[i].ptr && ptr + bytes <= d->region[i].ptr + d->region[i].bytes) return (int)i;
    return -1;
}

static void read_control(unsigned arena, const char *what, void *out, size_t bytes)
{
    char name[64];
    snprintf(name, sizeof name, "arena.%u.%s", arena, what);
    assert_int_equal(control(name, out, &bytes, NULL, 0), 0);
}

/* ---- The facts, one by one ---- */

static void nothing_is_pinned_before_the_first_piece(void **unused)
{
    (void)unused;
    device d;
    device_open(&d);
    const fsdp_pinned_allocator t = fsdp_jemalloc_pinned();
    void *heap = t.open(t.arg, &d.source);
    assert_non_null(heap);
    assert_int_equal(d.n_takes, 0); /* jemalloc keeps its own records elsewhere */
    void *p = t.alloc(heap, 100, 64);
    assert_non_null(p);
    assert_int_equal(d.n_takes, 1);
    assert_in_range(d.held_bytes, 1, 2 * MB);
    t.free(heap, p, 100, 64);
    t.close(heap);
    device_close(&d);
}

static void regions_do_not_grow_with_every_piece(void **unused)
{
    (void)unused;
    device d;
    device_open(&d);
    const fsdp_pinned_allocator t = fsdp_jemalloc_pinned();
    void *heap = t.open(t.arg, &d.source);
    for (int i = 0; i < 60; i++) assert_non_null(t.alloc(heap, MB, PAGE));
    assert_in_range(d.largest, MB, 2 * MB); /* 24 MiB without the limit */
    uint64_t before = d.held_bytes;
    assert_non_null(t.alloc(heap, 20 * MB, PAGE));
    assert_in_range(d.held_bytes - before, 20 * MB, 25 * MB); /* the next size class */
    t.close(heap);
    device_close(&d);
}

static void pieces_lie_on_their_alignment_in_one_region(void **unused)
{
    (void)unused;
    static const size_t sizes[] = {1, 100, PAGE, 5000, 70000, MB, 3 * MB + 1, 20 * MB};
    for (size_t offset = 0; offset <= 64; offset += 64) { /* a device that promises no page */
        device d;
        device_open(&d);
        d.offset = offset;
        const fsdp_pinned_allocator t = fsdp_jemalloc_pinned();
        void *heap = t.open(t.arg, &d.source);
        for (size_t alignment = 64; alignment <= 4 * MB; alignment *= 2) {
            for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
                char *p = t.alloc(heap, sizes[i], alignment);
                assert_non_null(p);
                assert_int_equal((uintptr_t)p & (alignment - 1), 0);
                assert_true(region_of(&d, p, sizes[i]) >= 0);
                p[0] = p[sizes[i] - 1] = 1;
                t.free(heap, p, sizes[i], alignment);
            }
        }
        t.close(heap);
        device_close(&d);
    }
}

/* jemalloc hands out its hooks: call them as it would. */
static void each_hook_refuses_what_would_tear_or_join_regions(void **unused)
{
    (void)unused;
    device d;
    device_open(&d);
    const fsdp_pinned_allocator t = fsdp_jemalloc_pinned();
    void *heap = t.open(t.arg, &d.source), *piece = t.alloc(heap, 100, 64);
    unsigned arena = arena_of(piece);
    extent_hooks_t *hooks;
    read_control(arena, "extent_hooks", &hooks, sizeof hooks);
    assert_null(hooks->commit);
    assert_null(hooks->decommit);
    assert_null(hooks->purge_lazy);
    assert_null(hooks->purge_forced);

    bool zero = true, commit = false;
    uint32_t n_takes = d.n_takes;
    memset(d.space + d.used, 0xee, 2 * MB); /* what a device gives need not be zero */
    assert_null(hooks->alloc(hooks, d.space + d.used, MB, PAGE, &zero, &commit, arena));
    assert_int_equal(d.n_takes, n_takes);
    char *a = hooks->alloc(hooks, NULL, MB, PAGE, &zero, &commit, arena);
    assert_true(zero && commit);
    for (size_t i = 0; i < MB; i++) assert_int_equal(a[i], 0);
    zero = commit = false;
    char *b = hooks->alloc(hooks, NULL, MB, PAGE, &zero, &commit, arena);
    assert_true(!zero && commit);
    assert_ptr_equal(b, a + MB); /* neighbours */
    assert_int_equal((unsigned char)b[0], 0xee);

    assert_false(hooks->split(hooks, a, MB, PAGE, MB - PAGE, true, arena));
    assert_false(hooks->merge(hooks, a, PAGE, a + PAGE, MB - PAGE, true, arena));
    assert_true(hooks->merge(hooks, a, MB, b, MB, true, arena));
    assert_true(hooks->merge(hooks, a + PAGE, MB - PAGE, b, PAGE, true, arena));
    assert_true(hooks->dalloc(hooks, a, PAGE, true, arena));
    assert_true(hooks->dalloc(hooks, a + PAGE, MB - PAGE, true, arena));
    assert_true(hooks->dalloc(hooks, a, 2 * MB, true, arena));
    assert_int_equal(d.n_gives, 0);
    assert_false(hooks->dalloc(hooks, a, MB, true, arena));
    assert_int_equal(d.n_gives, 1);
    assert_true(hooks->dalloc(hooks, a, MB, true, arena)); /* once */
    assert_int_equal(d.n_gives, 1);
    hooks->destroy(hooks, b, PAGE, true, arena); /* a part: the whole stays for close */
    assert_int_equal(d.n_gives, 1);
    t.close(heap);
    device_close(&d);
}

static void decay_is_off_and_no_thread_purges(void **unused)
{
    (void)unused;
    device d;
    device_open(&d);
    const fsdp_pinned_allocator t = fsdp_jemalloc_pinned();
    void *heap = t.open(t.arg, &d.source), *piece = t.alloc(heap, 100, 64);
    unsigned arena = arena_of(piece);
    ptrdiff_t dirty = 0, muzzy = 0;
    read_control(arena, "dirty_decay_ms", &dirty, sizeof dirty);
    read_control(arena, "muzzy_decay_ms", &muzzy, sizeof muzzy);
    assert_int_equal(dirty, -1);
    assert_int_equal(muzzy, -1);
    bool thread = true;
    size_t bytes = sizeof thread;
    assert_int_equal(control("background_thread", &thread, &bytes, NULL, 0), 0);
    assert_false(thread);
    /* Pieces come and go; what the device gave once is used again, and nothing goes back. */
    uint64_t most = 0;
    for (int round = 0; round < 20; round++) {
        void *p[8];
        for (int i = 0; i < 8; i++) assert_non_null(p[i] = t.alloc(heap, MB + (size_t)i * PAGE, PAGE));
        for (int i = 0; i < 8; i++) t.free(heap, p[i], MB + (size_t)i * PAGE, PAGE);
        if (round == 0) most = d.held_bytes;
    }
    assert_int_equal(d.held_bytes, most);
    assert_int_equal(d.n_gives, 0);
    t.close(heap);
    device_close(&d);
}

/* ---- Under load ---- */

static uint64_t next_random(uint64_t *seed)
{
    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    return *seed >> 33;
}

/* Half of all pieces live on at the end. */
static void load(void *heap, const fsdp_pinned_allocator *t, device *d, uint64_t seed, int n)
{
    struct {
        unsigned char *ptr;
        size_t bytes;
    } piece[MAX_PIECES] = {{NULL, 0}};
    for (int i = 0; i < n; i++) {
        size_t k = next_random(&seed) % MAX_PIECES;
        size_t bytes = 1 + next_random(&seed) % (next_random(&seed) % 8 == 0 ? 2 * MB : 40000);
        if (piece[k].ptr != NULL) {
            assert_int_equal(piece[k].ptr[0], (unsigned char)k);
            assert_int_equal(piece[k].ptr[piece[k].bytes - 1], (unsigned char)k);
            t->free(heap, piece[k].ptr, piece[k].bytes, PAGE);
            piece[k].ptr = NULL;
        } else {
            piece[k].ptr = t->alloc(heap, bytes, PAGE);
            piece[k].bytes = bytes;
            assert_non_null(piece[k].ptr);
            assert_true(region_of(d, (char *)piece[k].ptr, bytes) >= 0);
            memset(piece[k].ptr, (int)k, bytes);
        }
    }
}

static void closing_gives_every_region_back_once_and_whole(void **unused)
{
    (void)unused;
    for (uint64_t seed = 1; seed <= 8; seed++) {
        device d;
        device_open(&d);
        d.offset = seed % 2 ? 0 : 64;
        const fsdp_pinned_allocator t = fsdp_jemalloc_pinned();
        void *heap = t.open(t.arg, &d.source);
        load(heap, &t, &d, seed, 1500);
        if (seed % 4 == 3) { /* a caller who purges every arena: whole regions may go, parts may not */
            unsigned arena = arena_of(t.alloc(heap, 1, 64));
            char name[64];
            snprintf(name, sizeof name, "arena.%u.purge", arena);
            assert_int_equal(control(name, NULL, NULL, NULL, 0), 0);
            load(heap, &t, &d, seed + 100, 300);
        }
        assert_true(d.n_takes > 4);
        t.close(heap);
        device_close(&d);
    }
}

static void arenas_are_given_back(void **unused)
{
    (void)unused;
    device d;
    device_open(&d);
    const fsdp_pinned_allocator t = fsdp_jemalloc_pinned();
    for (int i = 0; i < 5000; i++) { /* more than can exist */
        void *heap = t.open(t.arg, &d.source);
        assert_non_null(heap);
        t.close(heap);
    }
    device_close(&d);
}

static void a_device_that_refuses_leaves_the_heap_whole(void **unused)
{
    (void)unused;
    device d;
    device_open(&d);
    const fsdp_pinned_allocator t = fsdp_jemalloc_pinned();
    void *heap = t.open(t.arg, &d.source), *p[16];
    d.until_refusal = 2;
    int n = 0;
    while (n < 16 && (p[n] = t.alloc(heap, MB, PAGE)) != NULL) n++;
    assert_in_range(n, 2, 15);
    t.free(heap, p[n - 1], MB, PAGE);
    assert_non_null(t.alloc(heap, MB, PAGE)); /* of what there is */
    assert_null(t.alloc(heap, 4 * MB, PAGE));
    d.until_refusal = -1;
    assert_non_null(t.alloc(heap, 4 * MB, PAGE));
    t.close(heap);
    device_close(&d);
}

typedef struct worker {
    void *heap;
    uint64_t seed;
    uint32_t n_wrong;
} worker;

static void *work(void *arg)
{
    worker *w = arg;
    const fsdp_pinned_allocator t = fsdp_jemalloc_pinned();
    unsigned char *held[16] = {NULL};
    size_t bytes[16] = {0};
    for (uint32_t i = 0; i < 4000 + 16; i++) {
        size_t k = i % 16;
        if (held[k] != NULL) {
            w->n_wrong += held[k][0] != (unsigned char)w->seed || held[k][bytes[k] - 1] != (unsigned char)w->seed;
            t.free(w->heap, held[k], bytes[k], PAGE);
        }
        held[k] = NULL;
        if (i >= 4000) continue;
        bytes[k] = 1 + (i * 2654435761u >> 12) % 30000;
        held[k] = t.alloc(w->heap, bytes[k], PAGE);
        if (held[k] == NULL) w->n_wrong++;
        else memset(held[k], (int)w->seed, bytes[k]);
    }
    return NULL;
}

static void any_thread_takes_and_gives_and_stats_are_exact(void **unused)
{
    (void)unused;
    device d;
    device_open(&d);
    const fsdp_pinned_allocator t = fsdp_jemalloc_pinned();
    void *heap = t.open(t.arg, &d.source);
    worker w[4];
    pthread_t thread[4];
    for (uint64_t i = 0; i < 4; i++) {
        w[i] = (worker){heap, i + 1, 0};
        assert_int_equal(pthread_create(&thread[i], NULL, work, &w[i]), 0);
    }
    fsdp_arena_stats stats = FSDP_ARENA_STATS_INIT;
    for (int i = 0; i < 4; i++) {
        t.stats(heap, &stats); /* while they are at it */
        pthread_join(thread[i], NULL);
        assert_int_equal(w[i].n_wrong, 0);
    }
    t.stats(heap, &stats);
    assert_int_equal(stats.allocs, 16000);
    assert_int_equal(stats.frees, 16000);
    assert_int_equal(stats.allocated_bytes, 0);
    void *p = t.alloc(heap, 3 * MB, PAGE);
    t.stats(heap, &stats);
    assert_int_equal(stats.size, sizeof stats);
    assert_in_range(stats.allocated_bytes, 3 * MB, 3 * MB + MB / 2);
    assert_in_range(stats.active_bytes, stats.allocated_bytes, stats.mapped_bytes);
    assert_int_equal(stats.mapped_bytes, d.held_bytes);
    assert_int_equal(stats.regions, d.n_takes - d.n_gives);
    assert_int_equal(stats.allocs, 16001);
    t.free(heap, p, 3 * MB, PAGE);
    t.close(heap);
    device_close(&d);
}

int main(void)
{
    if (!find_control()) return 1;
#define TEST(name) cmocka_unit_test_setup(name, deadline)
    const struct CMUnitTest tests[] = {
        TEST(nothing_is_pinned_before_the_first_piece),
        TEST(regions_do_not_grow_with_every_piece),
        TEST(pieces_lie_on_their_alignment_in_one_region),
        TEST(each_hook_refuses_what_would_tear_or_join_regions),
        TEST(decay_is_off_and_no_thread_purges),
        TEST(closing_gives_every_region_back_once_and_whole),
        TEST(arenas_are_given_back),
        TEST(a_device_that_refuses_leaves_the_heap_whole),
        TEST(any_thread_takes_and_gives_and_stats_are_exact),
    };
    return cmocka_run_group_tests_name("jemalloc over pinned memory", tests, NULL, NULL);
}
