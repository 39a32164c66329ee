/* SPDX-License-Identifier: MIT */
/* Collectives over MPI against memcpy of the same bytes by as many processes at once.
 *
 *     mpirun -n 4 bench_mpi [MIB [ROUNDS [CHUNK_KIB]]]                    default: 64 MiB, 20 rounds, the library's messages
 *
 * A line a case: best and median time of a round, over the slowest rank, and their ratio to memcpy's. The bytes: the whole
 * buffer, which an all-gather writes on every rank and a reduce-scatter reads on every rank. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fsdp/fsdp.h"
#include "fsdp/mpi.h"
#include "sorted.h"

enum { MAX_ROUNDS = 1000, WARM = 3, N_CASES = 6 };

static const char *const names[N_CASES] = {"memcpy",         "MPI_Allgather", "all-gather",
                                           "reduce-scatter", "all-reduce",    "all-reduce of 8 bytes"};

typedef struct bench {
    fsdp_context *ctx;
    fsdp_stream *s;
    uint64_t bytes;
    uint32_t world;
    float *whole, *part, *other;
} bench;

#define MUST(call)                                                 \
    do {                                                           \
        if ((call) != FSDP_OK) {                                   \
            fprintf(stderr, "%s: %s\n", #call, fsdp_last_error()); \
            MPI_Abort(MPI_COMM_WORLD, 1);                          \
        }                                                          \
    } while (0)

static void run_once(const bench *b, int which)
{
    uint64_t count = b->bytes / sizeof(float) / b->world;
    fsdp_comm *comm = fsdp_context_comm(b->ctx);
    switch (which) {
    case 0: memcpy(b->whole, b->other, b->bytes); return;
    case 1: MPI_Allgather(b->part, (int)count, MPI_FLOAT, b->whole, (int)count, MPI_FLOAT, MPI_COMM_WORLD); return;
    case 2: MUST(fsdp_all_gather(comm, b->part, b->whole, count, FSDP_DTYPE_FP32, b->s, NULL)); break;
    case 3: MUST(fsdp_reduce_scatter(comm, b->whole, b->part, count, FSDP_DTYPE_FP32, b->s, NULL)); break;
    case 4: MUST(fsdp_all_reduce(comm, b->whole, b->whole, count * b->world, FSDP_DTYPE_FP32, b->s, NULL)); break;
    default: MUST(fsdp_all_reduce(comm, b->part, b->part, 2, FSDP_DTYPE_FP32, b->s, NULL)); break;
    }
    MUST(fsdp_stream_drain_host(b->s, UINT64_MAX));
}

static void measure(const bench *b, int which, int rounds, bool prints)
{
    static double seconds[MAX_ROUNDS], best, median;
    for (int i = -WARM; i < rounds; i++) {
        MPI_Barrier(MPI_COMM_WORLD);
        double begin = MPI_Wtime(), mine, most = 0.0;
        run_once(b, which);
        mine = MPI_Wtime() - begin;
        MPI_Allreduce(&mine, &most, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
        if (i >= 0) seconds[i] = most;
    }
    sort_doubles(seconds, (size_t)rounds);
    if (which == 0) best = seconds[0], median = seconds[rounds / 2];
    if (prints)
        printf("%-22s best %9.3f ms  median %9.3f ms  ratio %.2f, %.2f\n", names[which], seconds[0] * 1e3,
               seconds[rounds / 2] * 1e3, seconds[0] / best, seconds[rounds / 2] / median);
}

int main(int argc, char **argv)
{
    int level, rank, world;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world);
    int rounds = argc > 2 ? atoi(argv[2]) : 20;
    if (rounds < 1 || rounds > MAX_ROUNDS) rounds = MAX_ROUNDS;
    bench b = {.bytes = (uint64_t)(argc > 1 ? atoi(argv[1]) : 64) << 20, .world = (uint32_t)world};
    fsdp_mpi_config mpi = FSDP_MPI_CONFIG_INIT;
    if (argc > 3) mpi.chunk_bytes = (uint64_t)atoi(argv[3]) << 10;
    fsdp_config config = FSDP_CONFIG_INIT;
    config.backend = fsdp_mpi_backend();
    config.backend_config = &mpi;
    MUST(fsdp_context_create(&config, &b.ctx));
    MUST(fsdp_stream_create(b.ctx, "bench", &b.s));
    b.whole = malloc(b.bytes);
    b.part = malloc(b.bytes);
    b.other = malloc(b.bytes);
    if (b.whole == NULL || b.part == NULL || b.other == NULL) MPI_Abort(MPI_COMM_WORLD, 1);
    memset(b.whole, 0, b.bytes);
    memset(b.part, 0, b.bytes);
    memset(b.other, 0, b.bytes);
    for (int which = 0; which < N_CASES; which++) measure(&b, which, rounds, rank == 0);
    MUST(fsdp_stream_release(b.s));
    MUST(fsdp_context_destroy(b.ctx));
    free(b.whole);
    free(b.part);
    free(b.other);
    MPI_Finalize();
    return 0;
}
