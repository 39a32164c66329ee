/* SPDX-License-Identifier: MIT */
/* Environments in one line, "RANK=1 WORLD_SIZE=4", and what fsdp_launch_from_env makes of them. */
#ifndef LAUNCH_RIG_H
#define LAUNCH_RIG_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "launch.h"

/* proxy: what /proc says of MPICH's proxy; "": nothing. */
fsdp_status read_line(const char *line, const char *proxy, fsdp_launch *launch);
uint64_t nonce_of(const char *line);

/* expected: "torchrun 1 of 4, here 1 of 4, at host:29501", or the sentence. The nonce in "@fsdp-7-<nonce>" is written NONCE,
 * once it is found to be the launch's; a port that is made of a Slurm job's numbers PORT. */
typedef struct row {
    const char *line, *expected;
} row;
void check_rows(const row *rows, size_t n);
#define CHECK(rows) check_rows(rows, sizeof(rows) / sizeof *(rows))

#define MASTER "MASTER_ADDR=host MASTER_PORT=29500"
#define ONE_MACHINE \
    "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=4 "
#define HYDRA_4 "PMI_RANK=1 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=4 "
#define JOB     "SLURM_JOB_ID=4711 SLURM_STEP_ID=0 "
#define STEP_ONE                                                                                                      \
    JOB "SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=4 SLURM_NTASKS=4 SLURM_LOCALID=1 SLURM_NODEID=0 SLURM_STEP_NUM_NODES=1 " \
        "SLURM_STEP_TASKS_PER_NODE=4 SLURM_STEP_NODELIST=n07 "

#endif
