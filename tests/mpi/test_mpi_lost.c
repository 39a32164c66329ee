/* SPDX-License-Identifier: MIT */
/* One rank is killed, or stopped, while all work: every other rank gets an error that names it, and ends. Started by lost.sh,
 * which counts the ranks that say so: mpirun's own result is the killed one's.
 * Arguments: "kill" or "stop"; the rank; where: "meeting" (the others stand in a collective), "data" (perhaps in the middle of
 * one), "host" (in a host barrier). */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fsdp/fsdp.h"
#include "mpi_ranks.h"

enum { COUNT = 1 << 20, ROUNDS = 200 };

typedef struct work {
    fsdp_context *ctx;
    fsdp_stream *s;
    float *send, *recv;
} work;

static fsdp_status work_open(work *w, uint64_t timeout_ns)
{
    fsdp_mpi_config mpi = FSDP_MPI_CONFIG_INIT;
    fsdp_config config = FSDP_CONFIG_INIT;
    config.backend = fsdp_mpi_backend();
    config.backend_config = &mpi;
    config.timeout_ns = timeout_ns;
    fsdp_status status = fsdp_context_create(&config, &w->ctx);
    if (status == FSDP_OK) status = fsdp_stream_create(w->ctx, "test", &w->s);
    size_t bytes = COUNT * sizeof(float);
    w->send = calloc(1, bytes);
    w->recv = calloc((size_t)mpi_size(), bytes);
    return status == FSDP_OK && (w->send == NULL || w->recv == NULL) ? FSDP_ERR_NO_HOST_MEMORY : status;
}

/* A barrier, large gathers, and a host barrier; `doomed`: this rank raises the signal there. */
static fsdp_status work_on(work *w, const char *where, bool doomed, int signal)
{
    fsdp_comm *comm = fsdp_context_comm(w->ctx);
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < ROUNDS && status == FSDP_OK; i++) {
        if (doomed && i == 3 && strcmp(where, "meeting") == 0) raise(signal);
        status = fsdp_barrier(comm, w->s, NULL);
        if (status == FSDP_OK) status = fsdp_all_gather(comm, w->send, w->recv, COUNT, FSDP_DTYPE_FP32, w->s, NULL);
        if (doomed && i == 3 && strcmp(where, "data") == 0) {
            usleep(3000);
            raise(signal);
        }
        if (status == FSDP_OK) status = fsdp_stream_drain_host(w->s, 60ull * SECOND);
        if (doomed && i == 3 && strcmp(where, "host") == 0) raise(signal);
        if (status == FSDP_OK) status = fsdp_barrier_host(w->ctx);
    }
    return status;
}

int main(int argc, char **argv)
{
    work w = {NULL, NULL, NULL, NULL};
    if (argc < 4) return 2;
    mpi_tests_begin(&argc, &argv, MPI_THREAD_MULTIPLE);
    alarm(MPI_DEADLINE_S);
    int rank = mpi_rank(), lost = atoi(argv[2]), signal = strcmp(argv[1], "kill") == 0 ? SIGKILL : SIGSTOP;
    pid_t mine = getpid(), all[MAX_RANKS];
    mpi_gather(MPI_COMM_WORLD, &mine, all, sizeof mine);
    fsdp_status status = work_open(&w, (signal == SIGKILL ? 60ull : 1ull) * SECOND);
    if (status == FSDP_OK) status = work_on(&w, argv[3], rank == lost, signal);
    if (status != FSDP_OK && w.ctx != NULL) (void)!fsdp_context_check(w.ctx);
    fprintf(stderr, "rank %d ends: %s: %s\n", rank, fsdp_status_name(status), fsdp_last_error());
    if (w.s != NULL) (void)!fsdp_stream_release(w.s);
    fsdp_status closed = fsdp_context_destroy(w.ctx);
    fprintf(stderr, "rank %d has closed: %s\n", rank, fsdp_status_name(closed));
    /* The stopped one goes on, and hears of its own end. */
    if (signal == SIGSTOP && rank == (lost == 0)) kill(all[lost], SIGCONT);
    _exit(0); /* not by MPI_Finalize, which some MPIs never return from now */
}
