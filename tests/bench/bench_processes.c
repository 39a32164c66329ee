/* SPDX-License-Identifier: MIT */
/* Collectives between processes over shared memory, against memcpy of the same bytes by as many processes at once.
 *
 *     bench_processes [--mib N] [--rounds N] [RANKS…]                default: 64 MiB, 20 rounds, ranks 2 4
 *
 * A line a case: best and median time of a round, from a barrier to the last rank's end, and their ratio to memcpy's. The
 * bytes: the whole buffer, which an all-gather writes on every rank and a reduce-scatter reads on every rank. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fsdp/fsdp.h"
#include "processes.h"
#include "sorted.h"

enum { MAX_ROUNDS = 200, WARM = 3 };

typedef enum bench_case { MEMCPY, ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, SMALL, N_CASES } bench_case;

static const char *const case_names[N_CASES] = {"memcpy", "all-gather", "reduce-scatter", "all-reduce",
                                                "all-reduce of 8 bytes"};

typedef struct shared {
    fsdp_launch launch;
    uint64_t bytes;
    uint32_t rounds;
    meeting meeting;
    _Atomic uint64_t end_ns[MAX_ROUNDS];
    uint64_t begin_ns[MAX_ROUNDS];
    uint64_t round_ns[N_CASES][MAX_ROUNDS];
} shared;

typedef struct bench_rank {
    shared *sh;
    uint32_t rank, world;
    fsdp_context *ctx;
    fsdp_stream *s;
    float *whole, *part, *other;
} bench_rank;

#define MUST(call)                                                                      \
    do {                                                                                \
        if ((call) != FSDP_OK) {                                                        \
            processes_complain(__FILE__, __LINE__, "%s: %s", #call, fsdp_last_error()); \
            return false;                                                               \
        }                                                                               \
    } while (0)

static bool run_once(bench_rank *r, bench_case which)
{
    uint64_t count = r->sh->bytes / sizeof(float) / r->world;
    fsdp_comm *comm = fsdp_context_comm(r->ctx);
    fsdp_work *work = NULL;
    switch (which) {
    case MEMCPY: memcpy(r->whole, r->other, r->sh->bytes); return true;
    case ALL_GATHER: MUST(fsdp_all_gather(comm, r->part, r->whole, count, FSDP_DTYPE_FP32, r->s, &work)); break;
    case REDUCE_SCATTER: MUST(fsdp_reduce_scatter(comm, r->whole, r->part, count, FSDP_DTYPE_FP32, r->s, &work)); break;
    case ALL_REDUCE:
        MUST(fsdp_all_reduce(comm, r->whole, r->whole, count * r->world, FSDP_DTYPE_FP32, r->s, &work));
        break;
    default: MUST(fsdp_all_reduce(comm, r->part, r->part, 2, FSDP_DTYPE_FP32, r->s, &work)); break;
    }
    MUST(fsdp_work_wait_host(work, UINT64_MAX));
    fsdp_work_release(work);
    return true;
}

static bool run_case(bench_rank *r, bench_case which)
{
    shared *sh = r->sh;
    for (uint32_t i = 0; i < sh->rounds + WARM; i++) {
        uint32_t at = i < WARM ? 0 : i - WARM;
        if (!meeting_wait(&sh->meeting, UINT64_MAX)) return false;
        if (r->rank == 0) {
            atomic_store(&sh->end_ns[at], 0);
            sh->begin_ns[at] = fsdp__now_ns();
        }
        if (!meeting_wait(&sh->meeting, UINT64_MAX) || !run_once(r, which)) return false;
        uint64_t now = fsdp__now_ns(), end = atomic_load(&sh->end_ns[at]);
        while (end < now && !atomic_compare_exchange_weak(&sh->end_ns[at], &end, now)) {
        }
        if (!meeting_wait(&sh->meeting, UINT64_MAX)) return false;
        if (r->rank == 0) sh->round_ns[which][at] = atomic_load(&sh->end_ns[at]) - sh->begin_ns[at];
    }
    return true;
}

static bool rank_main(uint32_t rank, void *arg)
{
    shared *sh = arg;
    bench_rank r = {.sh = sh, .rank = rank, .world = sh->launch.world};
    fsdp_launch launch = sh->launch;
    launch.rank = launch.local_rank = rank;
    fsdp_host_config host = FSDP_HOST_CONFIG_INIT;
    host.launch = &launch;
    fsdp_config config = FSDP_CONFIG_INIT;
    config.backend_config = &host;
    MUST(fsdp_context_create(&config, &r.ctx));
    MUST(fsdp_stream_create(r.ctx, "bench", &r.s));
    fsdp_allocator_config pool = FSDP_ALLOCATOR_CONFIG_INIT;
    fsdp_allocator *allocator;
    MUST(fsdp_allocator_create(r.ctx, &pool, &allocator));
    float **buffer[3] = {&r.whole, &r.part, &r.other};
    for (int i = 0; i < 3; i++) {
        void *ptr;
        MUST(fsdp_allocator_alloc(allocator, sh->bytes, r.s, "bench", &ptr));
        memset(ptr, 0, sh->bytes); /* the stream is idle, and the pages are there */
        *buffer[i] = ptr;
    }
    for (bench_case which = MEMCPY; which < N_CASES; which++)
        if (!run_case(&r, which)) return false;
    for (int i = 0; i < 3; i++) MUST(fsdp_allocator_free(allocator, *buffer[i]));
    MUST(fsdp_allocator_destroy(allocator));
    MUST(fsdp_stream_release(r.s));
    MUST(fsdp_context_destroy(r.ctx));
    return true;
}

static bool run_world(uint32_t world, uint64_t bytes, uint32_t rounds)
{
    shared *sh = processes_shared(sizeof *sh);
    sh->launch = processes_launch(PROCESSES_BY_NAME);
    sh->launch.world = sh->launch.local_world = world;
    sh->bytes = bytes / (sizeof(float) * world) * sizeof(float) * world;
    sh->rounds = rounds;
    meeting_init(&sh->meeting, world);
    const char *failure = processes_run(world, 120000000000u, rank_main, sh);
    if (failure != NULL) fprintf(stderr, "bench_processes: %s\n", failure);
    uint64_t best[N_CASES], median[N_CASES];
    for (bench_case which = MEMCPY; failure == NULL && which < N_CASES; which++) {
        sort_uint64s(sh->round_ns[which], rounds);
        best[which] = sh->round_ns[which][0];
        median[which] = sh->round_ns[which][rounds / 2];
        printf("%u processes, %llu MiB, %-22s best %9.3f ms  median %9.3f ms", world, (unsigned long long)(bytes >> 20),
               case_names[which], (double)best[which] * 1e-6, (double)median[which] * 1e-6);
        if (which != MEMCPY && which != SMALL)
            printf("  of memcpy %.2f, %.2f", (double)best[which] / (double)best[MEMCPY],
                   (double)median[which] / (double)median[MEMCPY]);
        printf("\n");
    }
    processes_unshare(sh, sizeof *sh);
    return failure == NULL;
}

int main(int argc, char **argv)
{
    uint64_t mib = 64, worlds[16], n_worlds = 0;
    uint32_t rounds = 20;
    for (int i = 1; i < argc; i++) {
        uint64_t *number = NULL, rounds_given = rounds;
        if (strcmp(argv[i], "--mib") == 0) number = &mib;
        else if (strcmp(argv[i], "--rounds") == 0) number = &rounds_given;
        const char *text = number != NULL && i + 1 < argc ? argv[++i] : argv[i];
        char *end;
        unsigned long long value = strtoull(text, &end, 10);
        if (*end != '\0' || value == 0 || n_worlds == 16) {
            fprintf(stderr, "usage: bench_processes [--mib N] [--rounds N] [RANKS…]\n");
            return 2;
        }
        if (number != NULL) *number = value;
        else worlds[n_worlds++] = value;
        rounds = rounds_given < MAX_ROUNDS ? (uint32_t)rounds_given : MAX_ROUNDS;
    }
    if (n_worlds == 0) worlds[0] = 2, worlds[1] = 4, n_worlds = 2;
    bool ok = true;
    for (uint64_t i = 0; i < n_worlds; i++) ok = run_world((uint32_t)worlds[i], mib << 20, rounds) && ok;
    return ok ? 0 : 1;
}
