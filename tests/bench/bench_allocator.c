/* SPDX-License-Identifier: MIT */
/* What an allocation costs the host: nanoseconds per alloc + free, one line a case. The device is the null backend by default
 * (it does nothing, so what is left is the allocator and its two device calls where a wait is due). */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "fsdp/fsdp.h"
#include "null_backend.h"

enum { N_SIZES = 5, MAX_THREADS = 4, BLOCK = 65536, POOL = 1 << 30 };

static const uint64_t sizes[N_SIZES] = {4096, 16384, 65536, 20480, 262144};

typedef struct bench {
    const fsdp_backend *backend;
    fsdp_context *ctx;
    fsdp_stream *s[MAX_THREADS];
    fsdp_allocator *a;
    uint64_t pairs;
    bool json;
} bench;

static void check(fsdp_status status)
{
    if (status == FSDP_OK) return;
    fprintf(stderr, "bench_allocator: %s\n", fsdp_last_error());
    exit(1);
}

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void *take(bench *b, uint64_t bytes, int stream)
{
    void *ptr;
    check(fsdp_allocator_alloc(b->a, bytes, b->s[stream], "bench", &ptr));
    return ptr;
}

static void give(bench *b, void *ptr) { check(fsdp_allocator_free(b->a, ptr)); }

/* ---- Cases: each makes n pairs ---- */

static void hit(bench *b, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) give(b, take(b, BLOCK, 0));
}

/* The two streams are ordered every 32 pairs, as a step does it; until then new memory is taken. */
static void hit_record_stream(bench *b, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        void *ptr = take(b, BLOCK, 0);
        check(fsdp_allocator_record_stream(b->a, ptr, b->s[1]));
        give(b, ptr);
        if (i % 32 == 31) check(fsdp_stream_wait_stream(b->s[0], b->s[1]));
    }
}

/* 32 blocks on one stream, then on the other, which has been ordered behind it. */
static void ordered_handover(bench *b, uint64_t n)
{
    void *ptr[32];
    for (uint64_t i = 0; i < n; i += 32) {
        int s = (int)(i / 32 % 2);
        for (int k = 0; k < 32; k++) ptr[k] = take(b, BLOCK, s);
        for (int k = 0; k < 32; k++) give(b, ptr[k]);
        check(fsdp_stream_wait_stream(b->s[!s], b->s[s]));
    }
}

static void waited_handover(bench *b, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) give(b, take(b, BLOCK, (int)(i % 2)));
}

static void ring(bench *b, uint64_t n, uint32_t live)
{
    void *ptr[256];
    for (uint32_t i = 0; i < live; i++) ptr[i] = take(b, sizes[i % N_SIZES], 0);
    for (uint64_t i = live; i < live + n; i++) {
        give(b, ptr[i % live]);
        ptr[i % live] = take(b, sizes[i % N_SIZES], 0);
    }
    for (uint32_t i = 0; i < live; i++) give(b, ptr[i]);
}

static void ring32(bench *b, uint64_t n) { ring(b, n, 32); }
static void ring256(bench *b, uint64_t n) { ring(b, n, 256); }

/* ---- Many live blocks ---- */

/* Set up outside the time that is measured. */
static double live(bench *b, uint64_t n, uint32_t n_live)
{
    void **ptr = malloc(n_live * sizeof *ptr);
    if (ptr == NULL) exit(1);
    for (uint32_t i = 0; i < n_live; i++) ptr[i] = take(b, sizes[i % N_SIZES], 0);
    uint64_t random = 1, start = 0;
    for (uint64_t i = 0; i < 2 * n; i++) { /* the first half warms up */
        if (i == n) start = now_ns();
        random = random * 6364136223846793005u + 1442695040888963407u;
        uint32_t k = (uint32_t)((random >> 32) * n_live >> 32);
        give(b, ptr[k]);
        ptr[k] = take(b, sizes[k % N_SIZES], 0);
    }
    double ns = (double)(now_ns() - start) / (double)n;
    for (uint32_t i = 0; i < n_live; i++) give(b, ptr[i]);
    free(ptr);
    return ns;
}

/* ---- Threads: a stream and a size each ---- */

typedef struct worker {
    bench *b;
    int stream;
    uint64_t n;
    pthread_barrier_t *start;
    uint64_t begin_ns, end_ns;
} worker;

static void *work(void *arg)
{
    worker *w = arg;
    pthread_barrier_wait(w->start);
    w->begin_ns = now_ns();
    for (uint64_t i = 0; i < w->n; i++) give(w->b, take(w->b, sizes[w->stream], w->stream));
    w->end_ns = now_ns();
    return NULL;
}

/* Wall time over the pairs of all threads. */
static double threads(bench *b, uint64_t n, int n_threads)
{
    pthread_barrier_t start;
    pthread_barrier_init(&start, NULL, (unsigned)n_threads);
    pthread_t thread[MAX_THREADS];
    worker w[MAX_THREADS];
    for (int i = 0; i < n_threads; i++) {
        w[i] = (worker){b, i, n / (uint64_t)n_threads, &start, 0, 0};
        if (pthread_create(&thread[i], NULL, work, &w[i]) != 0) exit(1);
    }
    uint64_t begin = UINT64_MAX, end = 0;
    for (int i = 0; i < n_threads; i++) {
        pthread_join(thread[i], NULL);
        if (w[i].begin_ns < begin) begin = w[i].begin_ns;
        if (w[i].end_ns > end) end = w[i].end_ns;
    }
    pthread_barrier_destroy(&start);
    return (double)(end - begin) / (double)n;
}

/* ---- Running them ---- */

/* segment_bytes: what the pool has at first, and, if it is tight, at most. */
static void open_bench(bench *b, uint64_t segment_bytes, bool tight)
{
    fsdp_config config = FSDP_CONFIG_INIT;
    null_config null = {1};
    config.backend = b->backend;
    if (b->backend == null_backend()) config.backend_config = &null;
    check(fsdp_context_create(&config, &b->ctx));
    static const char *const names[MAX_THREADS] = {"a", "b", "c", "d"};
    for (int i = 0; i < MAX_THREADS; i++) check(fsdp_stream_create(b->ctx, names[i], &b->s[i]));
    fsdp_allocator_config a = FSDP_ALLOCATOR_CONFIG_INIT;
    a.name = "bench";
    a.segment_bytes = segment_bytes;
    a.budget_bytes = tight ? segment_bytes : 0;
    check(fsdp_allocator_create(b->ctx, &a, &b->a));
}

static void close_bench(bench *b)
{
    check(fsdp_allocator_destroy(b->a));
    for (int i = 0; i < MAX_THREADS; i++) check(fsdp_stream_release(b->s[i]));
    check(fsdp_context_destroy(b->ctx));
}

static void say(const bench *b, const char *name, double ns)
{
    printf(b->json ? "{\"case\":\"%s\",\"ns_per_pair\":%.1f}\n" : "%-20s %8.1f ns\n", name, ns);
    fflush(stdout);
}

typedef struct plain_case {
    const char *name;
    void (*run)(bench *b, uint64_t n);
    bool tight; /* the pool has one block, so that whoever comes next must take it */
} plain_case;

static const plain_case plain_cases[] = {
    {"hit", hit, false},
    {"hit_record_stream", hit_record_stream, false},
    {"ordered_handover", ordered_handover, false},
    {"waited_handover", waited_handover, true},
    {"ring32", ring32, false},
    {"ring256", ring256, false},
};

/* The best of five: what the code costs, not what else the machine did. */
enum { ROUNDS = 5 };

static void run_plain(bench *b, const plain_case *c)
{
    double best = 1e30;
    open_bench(b, c->tight ? BLOCK : POOL, c->tight);
    c->run(b, b->pairs / 10 / 32 * 32);
    for (int round = 0; round < ROUNDS; round++) {
        uint64_t start = now_ns(), n = b->pairs / ROUNDS / 32 * 32;
        c->run(b, n);
        double ns = (double)(now_ns() - start) / (double)n;
        if (ns < best) best = ns;
    }
    close_bench(b);
    say(b, c->name, best);
}

static void run_sized(bench *b, const char *name, double (*run)(bench *, uint64_t, int), int size)
{
    double best = 1e30;
    for (int round = 0; round < ROUNDS; round++) {
        open_bench(b, POOL, false);
        double ns = run(b, b->pairs / ROUNDS, size);
        close_bench(b);
        if (ns < best) best = ns;
    }
    say(b, name, best);
}

static double run_live(bench *b, uint64_t n, int n_live) { return live(b, n, (uint32_t)n_live); }

int main(int argc, char **argv)
{
    bench b = {.backend = null_backend(), .pairs = 2000000};
    const char *only = NULL;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--json") == 0) b.json = true;
        else if (strcmp(argv[i], "--case") == 0 && i + 1 < argc) only = argv[++i];
        else if (strcmp(argv[i], "--pairs") == 0 && i + 1 < argc) b.pairs = strtoull(argv[++i], NULL, 10);
        else if (strcmp(argv[i], "--device") == 0 && i + 1 < argc)
            b.backend = strcmp(argv[++i], "host") == 0 ? fsdp_host_backend() : null_backend();
        else {
            fprintf(stderr, "usage: bench_allocator [--json] [--case NAME] [--pairs N] [--device null|host]\n");
            return 2;
        }
    }
    for (size_t i = 0; i < sizeof plain_cases / sizeof *plain_cases; i++)
        if (only == NULL || strcmp(only, plain_cases[i].name) == 0) run_plain(&b, &plain_cases[i]);
    static const struct {
        const char *name;
        double (*run)(bench *, uint64_t, int);
        int size;
    } sized[] = {{"live100", run_live, 100}, {"live10000", run_live, 10000}, {"live1000000", run_live, 1000000},
                 {"threads1", threads, 1},   {"threads2", threads, 2},       {"threads4", threads, 4}};
    for (size_t i = 0; i < sizeof sized / sizeof *sized; i++)
        if (only == NULL || strcmp(only, sized[i].name) == 0) run_sized(&b, sized[i].name, sized[i].run, sized[i].size);
    return 0;
}
