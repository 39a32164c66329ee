/* SPDX-License-Identifier: MIT */
/* The shared libraries, as a program links them: sums come out, and a sentence that libfsdp_mpi.so writes is found by
 * libfsdp.so's fsdp_last_error. */
#include <mpi.h>
#include <stdio.h>
#include <string.h>

#include "fsdp/fsdp.h"
#include "fsdp/mpi.h"

#define MUST(call)                                                     \
    do {                                                               \
        if ((call) != FSDP_OK) {                                       \
            fprintf(stderr, "%s: \"%s\"\n", #call, fsdp_last_error()); \
            MPI_Abort(MPI_COMM_WORLD, 1);                              \
        }                                                              \
    } while (0)

int main(int argc, char **argv)
{
    int level, rank, world;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world);
    fsdp_mpi_config mpi = FSDP_MPI_CONFIG_INIT;
    fsdp_config config = FSDP_CONFIG_INIT;
    fsdp_context *ctx;
    fsdp_stream *s;
    static float x[5000];
    int wrong = 0;
    config.backend = fsdp_mpi_backend();
    config.backend_config = &mpi;
    MUST(fsdp_context_create(&config, &ctx));
    MUST(fsdp_stream_create(ctx, "test", &s));
    for (int i = 0; i < 5000; i++) x[i] = (float)(i * (rank + 1));
    MUST(fsdp_all_reduce(fsdp_context_comm(ctx), x, x, 5000, FSDP_DTYPE_FP32, s, NULL));
    MUST(fsdp_stream_drain_host(s, UINT64_MAX));
    for (int i = 0; i < 5000; i++) wrong += x[i] != (float)(i * (world * (world + 1) / 2));
    MUST(fsdp_barrier_host(ctx));
    (void)!fsdp_all_gather(fsdp_context_comm(ctx), x + 4000, x, rank == 0 ? 2 : 3, FSDP_DTYPE_FP32, s, NULL);
    if (fsdp_stream_drain_host(s, UINT64_MAX) == FSDP_OK) wrong++;
    if (fsdp_context_check(ctx) != FSDP_ERR_MISMATCH ||
        strstr(fsdp_last_error(),
               "rank 0: #2 all-gather of caller (2 fp32); rank 1: #2 all-gather of caller (3 fp32)") == NULL)
        wrong++;
    if (wrong > 0) fprintf(stderr, "rank %d: %d wrong; \"%s\"\n", rank, wrong, fsdp_last_error());
    MUST(fsdp_stream_release(s));
    MUST(fsdp_context_destroy(ctx));
    MPI_Finalize();
    return wrong > 0;
}
