/* SPDX-License-Identifier: MIT */
/* Tests under mpirun: every process runs the same test program, and is a rank of each team that is large enough to have it.
 * What a rank leaves behind, failed and sentence, is brought to all processes, so that their assertions come out alike. */
#ifndef FSDP_TESTS_MPI_RANKS_H
#define FSDP_TESTS_MPI_RANKS_H

#include <mpi.h>

#include "comm_suite.h"
#include "fsdp/mpi.h"

enum { MPI_DEADLINE_S = 100 };

comm_suite mpi_suite(void);      /* ranks are the first `world` processes, in a communicator of their own */
extern uint64_t mpi_chunk_bytes; /* of all configs that are made; 0: the library's choice */

/* MPI_Init_thread with this level, or the test ends; stdout only on rank 0. */
void mpi_tests_begin(int *argc, char ***argv, int level);
int mpi_tests_end(int failed); /* main's result, equal on all processes */

int mpi_rank(void); /* in MPI_COMM_WORLD */
int mpi_size(void);
/* A barrier that sleeps: processes are more than processors. False: not all came in time. */
bool mpi_meet(MPI_Comm comm, uint64_t timeout_ns);
/* bytes from each process, to all. */
void mpi_gather(MPI_Comm comm, const void *mine, void *all, size_t bytes);
/* Collective: the first `world` processes; MPI_COMM_NULL in the others. */
MPI_Comm mpi_first(uint32_t world);

#endif
