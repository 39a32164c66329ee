/* SPDX-License-Identifier: MIT */
/* What an allocation costs the host: nanoseconds per alloc + free, one line a case. The device is the null backend by default
 * (it does nothing, so what is left is the allocator and its two device calls where a wait is due). --peers: the cases that
 * allocator_peers.py measures of other allocators, and what an event costs. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fsdp/fsdp.h"
#include "monotonic.h"
#include "null_backend.h"
#ifdef ALLOCATOR_WITH_CUDA
#include "fsdp/cuda.h"
#endif

enum { N_SIZES = 5, MAX_THREADS = 4, BLOCK = 65536, POOL = 1 << 30, ORDERED_EVERY = 32 };

static const uint64_t sizes[N_SIZES] = {4096, 16384, 65536, 20480, 262144};

typedef struct bench {
    const fsdp_backend *backend;
    fsdp_context *ctx;
    fsdp_stream *s[MAX_THREADS];
    fsdp_allocator *a;
    uint64_t pairs;
    fsdp_alloc_policy policy;
    bool json;
} bench;

static void check(fsdp_status status)
{
    if (status == FSDP_OK) return;
    fprintf(stderr, "bench_allocator: %s\n", fsdp_last_error());
    exit(1);
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
        if (i == n) start = fsdp__now_ns();
        random = random * 6364136223846793005u + 1442695040888963407u;
        uint32_t k = (uint32_t)((random >> 32) * n_live >> 32);
        give(b, ptr[k]);
        ptr[k] = take(b, sizes[k % N_SIZES], 0);
    }
    double ns = (double)(fsdp__now_ns() - start) / (double)n;
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
    w->begin_ns = fsdp__now_ns();
    for (uint64_t i = 0; i < w->n; i++) give(w->b, take(w->b, sizes[w->stream], w->stream));
    w->end_ns = fsdp__now_ns();
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

/* ---- The cases of peers: all of one size, on one stream, by one thread ---- */

static void peer_pair(bench *b, uint64_t bytes, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) give(b, take(b, bytes, 0));
}

/* A second stream uses each block, and does nothing. The streams are ordered every 32 pairs, as a step does it; until then
 * other blocks are handed out: nothing waits. */
static void peer_record_stream(bench *b, uint64_t bytes, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        void *ptr = take(b, bytes, 0);
        check(fsdp_allocator_record_stream(b->a, ptr, b->s[1]));
        give(b, ptr);
        if (i % ORDERED_EVERY == ORDERED_EVERY - 1) check(fsdp_stream_wait_stream(b->s[0], b->s[1]));
    }
}

/* Of 256 live blocks (32 of the largest), one goes and one of a slightly other size comes. */
static void peer_ring(bench *b, uint64_t bytes, uint64_t n)
{
    void *ptr[256];
    uint64_t n_live = bytes < 1 << 24 ? 256 : 32;
    for (uint64_t k = 0; k < n_live; k++) ptr[k] = take(b, bytes, 0);
    for (uint64_t i = 0; i < n; i++) {
        uint64_t k = i * 7919 % n_live;
        give(b, ptr[k]);
        ptr[k] = take(b, bytes + i % 5 * 4096, 0);
    }
    for (uint64_t k = 0; k < n_live; k++) give(b, ptr[k]);
}

static fsdp_event *event;

static void peer_event_wait(bench *b, uint64_t bytes, uint64_t n)
{
    (void)bytes;
    for (uint64_t i = 0; i < n; i++) {
        check(fsdp_event_record(event, b->s[0]));
        check(fsdp_stream_wait_event(b->s[1], event));
    }
}

/* Of an event that has happened. */
static void peer_event_query(bench *b, uint64_t bytes, uint64_t n)
{
    (void)bytes, (void)b;
    bool done;
    for (uint64_t i = 0; i < n; i++) check(fsdp_event_is_done(event, &done));
}

/* ---- Running them ---- */

/* segment_bytes: what the pool has at first, and, if it is tight, at most. */
static void open_bench(bench *b, uint64_t segment_bytes, bool tight)
{
    fsdp_config config = FSDP_CONFIG_INIT;
    null_config null = {1};
    config.backend = b->backend;
    if (b->backend == null_backend()) config.backend_config = &null; /* others: a world of one by themselves */
    check(fsdp_context_create(&config, &b->ctx));
    static const char *const names[MAX_THREADS] = {"a", "b", "c", "d"};
    for (int i = 0; i < MAX_THREADS; i++) check(fsdp_stream_create(b->ctx, names[i], &b->s[i]));
    fsdp_allocator_config a = FSDP_ALLOCATOR_CONFIG_INIT;
    a.name = "bench";
    a.segment_bytes = segment_bytes;
    a.policy = b->policy;
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
        uint64_t start = fsdp__now_ns(), n = b->pairs / ROUNDS / 32 * 32;
        c->run(b, n);
        double ns = (double)(fsdp__now_ns() - start) / (double)n;
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

static void run_peer(bench *b, const char *name, void (*run)(bench *, uint64_t, uint64_t), uint64_t bytes)
{
    uint64_t n = b->pairs / 10 / ORDERED_EVERY * ORDERED_EVERY;
    double best = 1e30;
    fsdp_counters before = FSDP_COUNTERS_INIT, after = FSDP_COUNTERS_INIT;
    open_bench(b, bytes < 1 << 24 ? POOL : (uint64_t)4 << 30, false);
    check(fsdp_event_create(b->ctx, &event));
    run(b, bytes, n / 10 / ORDERED_EVERY * ORDERED_EVERY + ORDERED_EVERY);
    check(fsdp_stream_drain_host(b->s[0], UINT64_MAX));
    check(fsdp_context_counters(b->ctx, &before));
    for (int round = 0; round < ROUNDS; round++) {
        uint64_t start = fsdp__now_ns();
        run(b, bytes, n);
        double ns = (double)(fsdp__now_ns() - start) / (double)n;
        if (ns < best) best = ns;
        for (int i = 0; i < 2; i++) check(fsdp_stream_drain_host(b->s[i], UINT64_MAX));
    }
    check(fsdp_context_counters(b->ctx, &after));
    fsdp_event_destroy(event);
    close_bench(b);
    double pairs = (double)n * ROUNDS, waits = (double)(after.waits - before.waits) / pairs,
           records = (double)(after.records - before.records) / pairs;
    uint64_t taken = after.allocations - before.allocations;
    printf(b->json ? "{\"whose\":\"fsdp\",\"case\":\"%s\",\"bytes\":%llu,\"ns\":%.1f,\"records\":%.3f,\"waits\":%.3f,"
                     "\"device_allocations\":%llu}\n"
                   : "%-16s %10llu bytes %8.1f ns, %.3f records, %.3f waits each; %llu device allocations\n",
           name, (unsigned long long)bytes, best, records, waits, (unsigned long long)taken);
    fflush(stdout);
}

/* Whose allocator takes other memory rather than wait, as theirs do. */
static void run_peers(bench *b)
{
    b->policy = FSDP_ALLOC_GROW_FIRST;
    static const uint64_t bytes[] = {4096, 1 << 20, 64 << 20};
    for (size_t i = 0; i < sizeof bytes / sizeof *bytes; i++) {
        run_peer(b, "pair", peer_pair, bytes[i]);
        run_peer(b, "record_stream", peer_record_stream, bytes[i]);
        run_peer(b, "ring", peer_ring, bytes[i]);
    }
    run_peer(b, "event_wait", peer_event_wait, 0);
    run_peer(b, "event_query", peer_event_query, 0);
}

static double run_live(bench *b, uint64_t n, int n_live) { return live(b, n, (uint32_t)n_live); }

/* NULL: not in this build. */
static const fsdp_backend *backend_named(const char *name)
{
#ifdef ALLOCATOR_WITH_CUDA
    if (strcmp(name, "cuda") == 0) return fsdp_cuda_backend();
#endif
    return strcmp(name, "host") == 0 ? fsdp_host_backend() : strcmp(name, "null") == 0 ? null_backend() : NULL;
}

int main(int argc, char **argv)
{
    bench b = {.backend = null_backend(), .pairs = 2000000};
    const char *only = NULL;
    bool peers = false;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--json") == 0) b.json = true;
        else if (strcmp(argv[i], "--peers") == 0) peers = true;
        else if (strcmp(argv[i], "--case") == 0 && i + 1 < argc) only = argv[++i];
        else if (strcmp(argv[i], "--pairs") == 0 && i + 1 < argc) b.pairs = strtoull(argv[++i], NULL, 10);
        else if (strcmp(argv[i], "--device") == 0 && i + 1 < argc) b.backend = backend_named(argv[++i]);
        else b.backend = NULL;
        if (b.backend == NULL) {
            fprintf(stderr,
                    "usage: bench_allocator [--json] [--case NAME | --peers] [--pairs N] [--device null|host|cuda]\n"
                    "cuda: only in a build with CUDA\n");
            return 2;
        }
    }
    if (peers) {
        run_peers(&b);
        return 0;
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
