/* SPDX-License-Identifier: MIT */
/* What launchers' variables come to: each row is an environment, and the launch or the sentence that it gives. */
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "launch_rig.h"

extern char **environ;

/* ---- Rows ---- */

#define ELASTIC "TORCHELASTIC_RUN_ID=id TORCHELASTIC_RESTART_COUNT=0 "

static void nobody_says_anything_and_it_is_a_world_of_one(void **state)
{
    (void)state;
    static const row rows[] = {
        {"", "none 0 of 1, here 0 of 1, at :0"},
        {"HOME=/ USER=me", "none 0 of 1, here 0 of 1, at :0"},
        {MASTER, "none 0 of 1, here 0 of 1, at :0"},
        {"LOCAL_RANK=2", "a local rank without RANK and WORLD_SIZE; seen: LOCAL_RANK=2; not set: RANK, WORLD_SIZE, "
                         "LOCAL_WORLD_SIZE"},
    };
    CHECK(rows);
}

static void torchrun_is_read_whatever_started_torchrun(void **state)
{
    (void)state;
    static const row rows[] = {
        {ELASTIC "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 " MASTER,
         "torchrun 5 of 8, here 1 of 4, at host:29501"},
        {ELASTIC "RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 " MASTER, "torchrun 0 of 1, here 0 of 1, at :0"},
        {ELASTIC "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 " MASTER
                 " OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=0",
         "torchrun 5 of 8, here 1 of 4, at host:29501"},
        {ELASTIC "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 " MASTER
                 " SLURM_JOB_ID=9 SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=2",
         "torchrun 5 of 8, here 1 of 4, at host:29501"},
        {"TORCHELASTIC_ERROR_FILE=/tmp/x", "none 0 of 1, here 0 of 1, at :0"},
        {ELASTIC,
         "torchrun without RANK and WORLD_SIZE; seen: TORCHELASTIC_RUN_ID=id, TORCHELASTIC_RESTART_COUNT=0; not set: "
         "RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT"},
        {ELASTIC "RANK=0 WORLD_SIZE=4 LOCAL_RANK=0 LOCAL_WORLD_SIZE=4 MASTER_ADDR=host",
         "torchrun without MASTER_PORT; seen: RANK=0, WORLD_SIZE=4, LOCAL_RANK=0, LOCAL_WORLD_SIZE=4, "
         "TORCHELASTIC_RUN_ID=id, "
         "TORCHELASTIC_RESTART_COUNT=0, MASTER_ADDR=host; not set: MASTER_PORT"},
        {"TORCHELASTIC_RESTART_COUNT=1 RANK=0 WORLD_SIZE=4 LOCAL_RANK=0 " MASTER,
         "torchrun without LOCAL_WORLD_SIZE; seen: RANK=0, WORLD_SIZE=4, LOCAL_RANK=0, TORCHELASTIC_RESTART_COUNT=1, "
         "MASTER_ADDR=host, MASTER_PORT=29500; not set: LOCAL_WORLD_SIZE"},
        {ELASTIC "RANK=0 WORLD_SIZE=4 LOCAL_RANK=0 LOCAL_WORLD_SIZE=5 " MASTER,
         "LOCAL_WORLD_SIZE=5 is more than the world of 4; seen: RANK=0, WORLD_SIZE=4, LOCAL_RANK=0, "
         "LOCAL_WORLD_SIZE=5, "
         "TORCHELASTIC_RUN_ID=id, TORCHELASTIC_RESTART_COUNT=0, MASTER_ADDR=host, MASTER_PORT=29500"},
    };
    CHECK(rows);
}

static void variables_by_hand_are_complete_or_refused(void **state)
{
    (void)state;
    static const row rows[] = {
        {"RANK=1 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 " MASTER, "env 1 of 4, here 1 of 2, at host:29501"},
        {"RANK=01 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 " MASTER, "env 1 of 4, here 1 of 2, at host:29501"},
        {"RANK=0 WORLD_SIZE=1", "env 0 of 1, here 0 of 1, at :0"},
        {"RANK=3 WORLD_SIZE=4 MASTER_ADDR=localhost MASTER_PORT=1000", "env 3 of 4, here 3 of 4, at localhost:1001"},
        {"RANK=3 WORLD_SIZE=4 MASTER_ADDR=127.0.0.1 MASTER_PORT=1000", "env 3 of 4, here 3 of 4, at 127.0.0.1:1001"},
        {"RANK=3 WORLD_SIZE=4 MASTER_ADDR=::1 MASTER_PORT=1000", "env 3 of 4, here 3 of 4, at ::1:1001"},
        {"RANK=3 WORLD_SIZE=4 LOCAL_RANK=2 MASTER_ADDR=::1 MASTER_PORT=1000", "env 3 of 4, here 2 of 4, at ::1:1001"},
        {"RANK=3 WORLD_SIZE=4 " MASTER, "how many ranks share this machine is not said: set LOCAL_RANK and "
                                        "LOCAL_WORLD_SIZE (0 and 1 where it is one rank a "
                                        "machine), or MASTER_ADDR=127.0.0.1 where all ranks are here; seen: RANK=3, "
                                        "WORLD_SIZE=4, MASTER_ADDR=host, MASTER_PORT=29500; "
                                        "not set: LOCAL_RANK, LOCAL_WORLD_SIZE"},
        {"RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 " MASTER, "how many ranks share this machine is not said: set LOCAL_RANK "
                                                     "and LOCAL_WORLD_SIZE (0 and 1 where it is one rank a "
                                                     "machine), or MASTER_ADDR=127.0.0.1 where all ranks are "
                                                     "here; seen: RANK=3, WORLD_SIZE=4, LOCAL_RANK=1, "
                                                     "MASTER_ADDR=host, MASTER_PORT=29500; not set: LOCAL_WORLD_SIZE"},
        {"RANK=1", "RANK without WORLD_SIZE; seen: RANK=1; not set: WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE"},
        {"WORLD_SIZE=4 LOCAL_RANK=1",
         "WORLD_SIZE without RANK; seen: WORLD_SIZE=4, LOCAL_RANK=1; not set: RANK, LOCAL_WORLD_SIZE"},
        {"RANK= WORLD_SIZE=4", "RANK is empty; seen: RANK=, WORLD_SIZE=4; not set: LOCAL_RANK, LOCAL_WORLD_SIZE"},
        {"RANK=one WORLD_SIZE=4",
         "RANK=one is not a number from 0 to 2147483647; seen: RANK=one, WORLD_SIZE=4; not set: "
         "LOCAL_RANK, LOCAL_WORLD_SIZE"},
        {"RANK=-1 WORLD_SIZE=4", "RANK=-1 is not a number from 0 to 2147483647; seen: RANK=-1, WORLD_SIZE=4; not set: "
                                 "LOCAL_RANK, LOCAL_WORLD_SIZE"},
        {"RANK=1x WORLD_SIZE=4", "RANK=1x is not a number from 0 to 2147483647; seen: RANK=1x, WORLD_SIZE=4; not set: "
                                 "LOCAL_RANK, LOCAL_WORLD_SIZE"},
        {"RANK=0 WORLD_SIZE=4294967297",
         "WORLD_SIZE=4294967297 is not a number from 0 to 2147483647; seen: RANK=0, WORLD_SIZE=4294967297; not set: "
         "LOCAL_RANK, LOCAL_WORLD_SIZE"},
        {"RANK=0 WORLD_SIZE=18446744073709551617",
         "WORLD_SIZE=18446744073709551617 is not a number from 0 to 2147483647; seen: RANK=0, "
         "WORLD_SIZE=18446744073709551617; not set: LOCAL_RANK, LOCAL_WORLD_SIZE"},
        {"RANK=0 WORLD_SIZE=0",
         "RANK=0 is not below WORLD_SIZE=0; seen: RANK=0, WORLD_SIZE=0; not set: LOCAL_RANK, LOCAL_WORLD_SIZE"},
        {"RANK=4 WORLD_SIZE=4",
         "RANK=4 is not below WORLD_SIZE=4; seen: RANK=4, WORLD_SIZE=4; not set: LOCAL_RANK, LOCAL_WORLD_SIZE"},
        {"RANK=0 WORLD_SIZE=4 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2",
         "LOCAL_RANK=2 is not below LOCAL_WORLD_SIZE=2; seen: RANK=0, WORLD_SIZE=4, LOCAL_RANK=2, LOCAL_WORLD_SIZE=2"},
        {"RANK=0 WORLD_SIZE=4 LOCAL_RANK=0 LOCAL_WORLD_SIZE=0",
         "LOCAL_RANK=0 is not below LOCAL_WORLD_SIZE=0; seen: RANK=0, WORLD_SIZE=4, LOCAL_RANK=0, LOCAL_WORLD_SIZE=0"},
        {"RANK=0 WORLD_SIZE=4 LOCAL_RANK=0 LOCAL_WORLD_SIZE=8",
         "LOCAL_WORLD_SIZE=8 is more than WORLD_SIZE=4; seen: RANK=0, WORLD_SIZE=4, LOCAL_RANK=0, LOCAL_WORLD_SIZE=8"},
        {"RANK=3 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=1000",
         "RANK=3 is not below LOCAL_WORLD_SIZE=2; set LOCAL_RANK; seen: RANK=3, WORLD_SIZE=4, LOCAL_WORLD_SIZE=2; not "
         "set: "
         "LOCAL_RANK"},
    };
    CHECK(rows);
}

#define BY_HAND "RANK=1 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 "
#define TWO_MACHINES \
    "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 "

static void the_meeting_place_follows_from_what_is_set(void **state)
{
    (void)state;
    static const row rows[] = {
        {BY_HAND,
         "RANK and WORLD_SIZE without MASTER_ADDR: set it to the host of rank 0, or FSDP_NONCE to a text of this "
         "job's own, since all ranks are here; seen: RANK=1, WORLD_SIZE=4, "
         "LOCAL_RANK=1, LOCAL_WORLD_SIZE=4; not set: MASTER_ADDR, MASTER_PORT"},
        {BY_HAND "FSDP_NONCE=a", "env 1 of 4, here 1 of 4, at @fsdp-7-NONCE:0"},
        {BY_HAND "MASTER_PORT=29500",
         "MASTER_PORT without MASTER_ADDR: set it to the host of rank 0; seen: RANK=1, WORLD_SIZE=4, LOCAL_RANK=1, "
         "LOCAL_WORLD_SIZE=4, MASTER_PORT=29500; not set: MASTER_ADDR"},
        {BY_HAND "MASTER_ADDR=host", "MASTER_ADDR without MASTER_PORT: set it to a free port of rank 0's host; seen: "
                                     "RANK=1, WORLD_SIZE=4, LOCAL_RANK=1, "
                                     "LOCAL_WORLD_SIZE=4, MASTER_ADDR=host; not set: MASTER_PORT"},
        {BY_HAND "MASTER_ADDR= MASTER_PORT=29500",
         "MASTER_ADDR= is not a host's name or address; seen: RANK=1, WORLD_SIZE=4, LOCAL_RANK=1, LOCAL_WORLD_SIZE=4, "
         "MASTER_ADDR=, MASTER_PORT=29500"},
        {BY_HAND "MASTER_ADDR=@x MASTER_PORT=29500", "MASTER_ADDR=@x is not a host's name or address; seen: RANK=1, "
                                                     "WORLD_SIZE=4, LOCAL_RANK=1, LOCAL_WORLD_SIZE=4, "
                                                     "MASTER_ADDR=@x, MASTER_PORT=29500"},
        {BY_HAND "MASTER_ADDR=host FSDP_PORT=7000", "env 1 of 4, here 1 of 4, at host:7000"},
        {BY_HAND MASTER " FSDP_PORT=7000", "env 1 of 4, here 1 of 4, at host:7000"},
        {BY_HAND "MASTER_ADDR=host MASTER_PORT=65534", "env 1 of 4, here 1 of 4, at host:65535"},
        {BY_HAND "MASTER_ADDR=host MASTER_PORT=65535",
         "MASTER_PORT=65535 and no port comes after it: set FSDP_PORT to one that is free; seen: RANK=1, WORLD_SIZE=4, "
         "LOCAL_RANK=1, LOCAL_WORLD_SIZE=4, MASTER_ADDR=host, MASTER_PORT=65535"},
        {BY_HAND "MASTER_ADDR=host MASTER_PORT=65535 FSDP_PORT=65535", "env 1 of 4, here 1 of 4, at host:65535"},
        {BY_HAND "MASTER_ADDR=host MASTER_PORT=65536",
         "MASTER_PORT=65536 is not a port, 1 to 65535; seen: RANK=1, WORLD_SIZE=4, LOCAL_RANK=1, LOCAL_WORLD_SIZE=4, "
         "MASTER_ADDR=host, MASTER_PORT=65536"},
        {BY_HAND "MASTER_ADDR=host MASTER_PORT=",
         "MASTER_PORT= is not a port, 1 to 65535; seen: RANK=1, WORLD_SIZE=4, LOCAL_RANK=1, LOCAL_WORLD_SIZE=4, "
         "MASTER_ADDR=host, MASTER_PORT="},
        {BY_HAND MASTER " FSDP_PORT=0",
         "FSDP_PORT=0 is not a port, 1 to 65535; seen: RANK=1, WORLD_SIZE=4, LOCAL_RANK=1, LOCAL_WORLD_SIZE=4, "
         "MASTER_ADDR=host, MASTER_PORT=29500, FSDP_PORT=0"},
        {BY_HAND MASTER " FSDP_NONCE=",
         "FSDP_NONCE is empty; seen: RANK=1, WORLD_SIZE=4, LOCAL_RANK=1, LOCAL_WORLD_SIZE=4, MASTER_ADDR=host, "
         "MASTER_PORT=29500, FSDP_NONCE="},
        {ONE_MACHINE "PMIX_NAMESPACE=a", "Open MPI 1 of 4, here 1 of 4, at @fsdp-7-NONCE:0"},
        {ONE_MACHINE "FSDP_NONCE=a", "Open MPI 1 of 4, here 1 of 4, at @fsdp-7-NONCE:0"},
        {ONE_MACHINE "PMIX_NAMESPACE=a FSDP_PORT=7000", "Open MPI 1 of 4, here 1 of 4, at 127.0.0.1:7000"},
        {ONE_MACHINE MASTER, "Open MPI 1 of 4, here 1 of 4, at host:29501"},
        {ONE_MACHINE "PMIX_NAMESPACE=a MASTER_PORT=29500",
         "MASTER_PORT without MASTER_ADDR: set it to the host of rank 0; seen: OMPI_COMM_WORLD_RANK=1, "
         "OMPI_COMM_WORLD_SIZE=4, OMPI_COMM_WORLD_LOCAL_RANK=1, OMPI_COMM_WORLD_LOCAL_SIZE=4, MASTER_PORT=29500; not "
         "set: "
         "MASTER_ADDR"},
        {ONE_MACHINE,
         "nothing tells this job from another one on this machine: set FSDP_NONCE to a text of its own, or MASTER_ADDR "
         "and "
         "MASTER_PORT; seen: OMPI_COMM_WORLD_RANK=1, OMPI_COMM_WORLD_SIZE=4, OMPI_COMM_WORLD_LOCAL_RANK=1, "
         "OMPI_COMM_WORLD_LOCAL_SIZE=4; not set: MASTER_ADDR, MASTER_PORT"},
        {TWO_MACHINES "PMIX_NAMESPACE=a", "Open MPI 1 of 4, here 1 of 2, at :0"},
        {TWO_MACHINES "PMIX_NAMESPACE=a " MASTER, "Open MPI 1 of 4, here 1 of 2, at host:29501"},
        {TWO_MACHINES "PMIX_NAMESPACE=a MASTER_ADDR=host",
         "MASTER_ADDR without MASTER_PORT: set it to a free port of rank 0's host; seen: OMPI_COMM_WORLD_RANK=1, "
         "OMPI_COMM_WORLD_SIZE=4, OMPI_COMM_WORLD_LOCAL_RANK=1, OMPI_COMM_WORLD_LOCAL_SIZE=2, MASTER_ADDR=host; not "
         "set: "
         "MASTER_PORT"},
    };
    CHECK(rows);
}

static void mpirun_of_each_kind_is_read(void **state)
{
    (void)state;
    static const row rows[] = {
        {"OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_LOCAL_RANK=1",
         "OMPI_COMM_WORLD_RANK without OMPI_COMM_WORLD_SIZE; seen: OMPI_COMM_WORLD_RANK=1, "
         "OMPI_COMM_WORLD_LOCAL_RANK=1; not "
         "set: OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_LOCAL_SIZE"},
        {"OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2",
         "Open MPI without its local rank; seen: OMPI_COMM_WORLD_RANK=1, OMPI_COMM_WORLD_SIZE=2; not set: "
         "OMPI_COMM_WORLD_LOCAL_RANK, OMPI_COMM_WORLD_LOCAL_SIZE"},
        {"OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1",
         "OMPI_COMM_WORLD_LOCAL_RANK without OMPI_COMM_WORLD_LOCAL_SIZE; seen: OMPI_COMM_WORLD_RANK=1, "
         "OMPI_COMM_WORLD_SIZE=2, OMPI_COMM_WORLD_LOCAL_RANK=1; not set: OMPI_COMM_WORLD_LOCAL_SIZE"},
        {"PMI_RANK=1 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=4 PMI_FD=8",
         "MPICH 1 of 4, here 1 of 4, at @fsdp-7-NONCE:0"},
        {"PMI_RANK=1 PMI_SIZE=4 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=1", "MPICH 1 of 4, here 0 of 1, at :0"},
        {"PMI_RANK=1 PMI_SIZE=4 PMI_LOCAL_RANK=1 PMI_LOCAL_SIZE=2", "MPICH 1 of 4, here 1 of 2, at :0"},
        {"PMI_RANK=1 PMI_SIZE=4 MV2_COMM_WORLD_LOCAL_RANK=1 MV2_COMM_WORLD_LOCAL_SIZE=2",
         "MPICH 1 of 4, here 1 of 2, at :0"},
        {"PMI_RANK=0 PMI_SIZE=1", "MPICH 0 of 1, here 0 of 1, at :0"},
        {"PMI_RANK=1 PMI_SIZE=4", "PMI_RANK without MPI_LOCALRANKID: set RANK and the others yourself; seen: "
                                  "PMI_RANK=1, PMI_SIZE=4; not set: RANK, "
                                  "WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS"},
        {"PMI_RANK=1 PMI_SIZE=4 RANK=1 WORLD_SIZE=4 LOCAL_RANK=1",
         "PMI_RANK without MPI_LOCALRANKID: set RANK and the others yourself; seen: RANK=1, WORLD_SIZE=4, "
         "LOCAL_RANK=1, "
         "PMI_RANK=1, PMI_SIZE=4; not set: LOCAL_WORLD_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS"},
        {"PMI_RANK=1 PMI_SIZE=4 RANK=1 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2",
         "MPICH 1 of 4, here 1 of 2, at :0"},
        {"PMI_SIZE=4",
         "PMI_SIZE without PMI_RANK; seen: PMI_SIZE=4; not set: PMI_RANK, MPI_LOCALRANKID, MPI_LOCALNRANKS"},
        {"PMI_RANK=1 PMI_SIZE=4 MPI_LOCALRANKID=1", "MPI_LOCALRANKID without MPI_LOCALNRANKS; seen: PMI_RANK=1, "
                                                    "PMI_SIZE=4, MPI_LOCALRANKID=1; not set: MPI_LOCALNRANKS"},
        {"PMI_ID=1 PMI_PORT=host:5 MPI_LOCALRANKID=1",
         "PMI_ID=1 and PMI_PORT do not say how many ranks there are: start mpiexec without -pmi-port; seen: "
         "MPI_LOCALRANKID=1, PMI_ID=1, PMI_PORT=host:5; not set: PMI_RANK, PMI_SIZE, MPI_LOCALNRANKS"},
    };
    CHECK(rows);
}

static void two_launchers_agree_or_are_refused(void **state)
{
    (void)state;
    static const row rows[] = {
        {ONE_MACHINE "PMIX_NAMESPACE=a RANK=1 WORLD_SIZE=4", "Open MPI 1 of 4, here 1 of 4, at @fsdp-7-NONCE:0"},
        {ONE_MACHINE "PMIX_NAMESPACE=a RANK=1 WORLD_SIZE=4 LOCAL_RANK=1",
         "Open MPI 1 of 4, here 1 of 4, at @fsdp-7-NONCE:0"},
        {ONE_MACHINE "PMIX_NAMESPACE=a LOCAL_RANK=3", "Open MPI 1 of 4, here 1 of 4, at @fsdp-7-NONCE:0"},
        {ONE_MACHINE "RANK=1 WORLD_SIZE=4 LOCAL_RANK=0",
         "LOCAL_RANK and LOCAL_WORLD_SIZE contradict Open MPI: unset them; seen: RANK=1, WORLD_SIZE=4, LOCAL_RANK=0, "
         "OMPI_COMM_WORLD_RANK=1, OMPI_COMM_WORLD_SIZE=4, OMPI_COMM_WORLD_LOCAL_RANK=1, OMPI_COMM_WORLD_LOCAL_SIZE=4; "
         "not "
         "set: LOCAL_WORLD_SIZE"},
        {ONE_MACHINE "RANK=0 WORLD_SIZE=4",
         "two launchers contradict each other: unset the one that is left over; seen: RANK=0, WORLD_SIZE=4, "
         "OMPI_COMM_WORLD_RANK=1, OMPI_COMM_WORLD_SIZE=4, OMPI_COMM_WORLD_LOCAL_RANK=1, OMPI_COMM_WORLD_LOCAL_SIZE=4; "
         "not "
         "set: LOCAL_RANK, LOCAL_WORLD_SIZE"},
        {HYDRA_4 "RANK=1 WORLD_SIZE=2",
         "two launchers contradict each other: unset the one that is left over; seen: RANK=1, WORLD_SIZE=2, "
         "PMI_RANK=1, "
         "PMI_SIZE=4, MPI_LOCALRANKID=1, MPI_LOCALNRANKS=4; not set: LOCAL_RANK, LOCAL_WORLD_SIZE"},
        {"OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_LOCAL_RANK=0 "
         "OMPI_COMM_WORLD_LOCAL_SIZE=1 " HYDRA_4,
         "two launchers contradict each other: unset the one that is left over; seen: OMPI_COMM_WORLD_RANK=0, "
         "OMPI_COMM_WORLD_SIZE=1, OMPI_COMM_WORLD_LOCAL_RANK=0, OMPI_COMM_WORLD_LOCAL_SIZE=1, PMI_RANK=1, PMI_SIZE=4, "
         "MPI_LOCALRANKID=1, MPI_LOCALNRANKS=4"},
        {ONE_MACHINE "WORLD_SIZE=4",
         "WORLD_SIZE without RANK; seen: WORLD_SIZE=4; not set: RANK, LOCAL_RANK, LOCAL_WORLD_SIZE"},
        {ONE_MACHINE HYDRA_4 "PMIX_NAMESPACE=a", "Open MPI 1 of 4, here 1 of 4, at @fsdp-7-NONCE:0"},
    };
    CHECK(rows);
}

/* ---- Nonces ---- */

static void ranks_of_one_job_have_one_nonce(void **state)
{
    (void)state;
    assert_true(nonce_of(ELASTIC "RANK=0 WORLD_SIZE=4 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 " MASTER) ==
                nonce_of(ELASTIC "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 " MASTER));
    assert_true(nonce_of("PMI_RANK=0 PMI_SIZE=4 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=3 PMI_FD=6") ==
                nonce_of("PMI_RANK=3 PMI_SIZE=4 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=1 PMI_FD=9"));
    assert_true(nonce_of(ONE_MACHINE "PMIX_NAMESPACE=a PMIX_RANK=1") ==
                nonce_of("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=0 "
                         "OMPI_COMM_WORLD_LOCAL_SIZE=4 PMIX_NAMESPACE=a PMIX_RANK=0"));
    /* The address may be written differently on different machines. */
    assert_true(nonce_of("RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=localhost MASTER_PORT=5") ==
                nonce_of("RANK=1 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=host MASTER_PORT=5"));
}

static void another_job_or_attempt_has_another_nonce(void **state)
{
    (void)state;
    static const char *const lines[] = {
        "RANK=1 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 TORCHELASTIC_RUN_ID=a "
        "TORCHELASTIC_RESTART_COUNT=0 " MASTER,
        "RANK=1 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 TORCHELASTIC_RUN_ID=a "
        "TORCHELASTIC_RESTART_COUNT=1 " MASTER,
        "RANK=1 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 TORCHELASTIC_RUN_ID=b "
        "TORCHELASTIC_RESTART_COUNT=0 " MASTER,
        "RANK=1 WORLD_SIZE=5 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 TORCHELASTIC_RUN_ID=a "
        "TORCHELASTIC_RESTART_COUNT=0 " MASTER,
        ONE_MACHINE "PMIX_NAMESPACE=a",
        ONE_MACHINE "PMIX_NAMESPACE=b",
        ONE_MACHINE "PMIX_NAMESPACE=a OMPI_MCA_orte_precondition_transports=1-2",
        ONE_MACHINE "OMPI_MCA_ess_base_jobid=a",
        ONE_MACHINE "PMIX_NAMESPACE=a FSDP_NONCE=1",
        ONE_MACHINE "PMIX_NAMESPACE=a FSDP_NONCE=2",
        HYDRA_4,
        HYDRA_4 "I_MPI_HYDRA_UUID=1",
        HYDRA_4 "PMI_JOBID=1",
        STEP_ONE,
        STEP_ONE "SLURM_RESTART_COUNT=1",
        STEP_ONE "SLURM_CLUSTER_NAME=c",
        "SLURM_JOB_ID=4711 SLURM_STEP_ID=1 SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_LOCALID=0 SLURM_STEP_NUM_NODES=1",
        "SLURM_JOB_ID=4712 SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_LOCALID=0 SLURM_STEP_NUM_NODES=1",
        "RANK=1 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 " MASTER,
        "RANK=1 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=host MASTER_PORT=29501",
        "RANK=1 WORLD_SIZE=5 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 " MASTER,
    };
    enum { N = sizeof lines / sizeof *lines };
    uint64_t nonces[N];
    for (size_t i = 0; i < N; i++) nonces[i] = nonce_of(lines[i]);
    for (size_t i = 0; i < N; i++) {
        for (size_t j = 0; j < i; j++) {
            if (nonces[i] == nonces[j]) fail_msg("one nonce for\n  %s\n  %s", lines[i], lines[j]);
        }
    }
}

static void hydras_proxy_tells_jobs_apart(void **state)
{
    (void)state;
    fsdp_launch a = FSDP_LAUNCH_INIT, b = FSDP_LAUNCH_INIT;
    assert_int_equal(read_line(HYDRA_4, "1", &a), FSDP_OK);
    assert_int_equal(read_line(HYDRA_4, "2", &b), FSDP_OK);
    assert_true(a.nonce != b.nonce);
    assert_string_not_equal(a.address, b.address);
    /* With a text of the user's own it is not asked. */
    assert_int_equal(read_line(HYDRA_4 "FSDP_NONCE=x", "1", &a), FSDP_OK);
    assert_int_equal(read_line(HYDRA_4 "FSDP_NONCE=x", "2", &b), FSDP_OK);
    assert_true(a.nonce == b.nonce);
    /* Not to be found, and nothing else that names the job. */
    assert_int_equal(read_line(HYDRA_4, "", &a), FSDP_ERR_ARG);
    assert_non_null(strstr(fsdp_last_error(), "nothing tells this job from another one on this machine"));
    assert_int_equal(read_line(HYDRA_4 MASTER, "", &a), FSDP_OK);
    assert_int_equal(read_line(HYDRA_4 "PALS_APID=x", "", &a), FSDP_OK);
}

/* ---- The call itself ---- */

static void long_values_are_cut_and_long_addresses_refused(void **state)
{
    (void)state;
    char line[1024], name[512];
    fsdp_launch launch = FSDP_LAUNCH_INIT;
    memset(name, 'h', sizeof name);
    name[FSDP_ADDRESS_BYTES - 1] = '\0';
    snprintf(line, sizeof line, BY_HAND "MASTER_PORT=5 MASTER_ADDR=%s", name);
    assert_int_equal(read_line(line, "", &launch), FSDP_OK);
    assert_string_equal(launch.address, name);
    snprintf(line, sizeof line, BY_HAND "MASTER_PORT=5 MASTER_ADDR=%sh", name);
    assert_int_equal(read_line(line, "", &launch), FSDP_ERR_ARG);
    assert_true(strlen(fsdp_last_error()) < 400);
    assert_non_null(strstr(fsdp_last_error(), "MASTER_ADDR=hhh"));
    assert_non_null(strstr(fsdp_last_error(), "hhh..., MASTER_PORT=5"));
}

static void the_environment_is_read_and_never_set(void **state)
{
    (void)state;
    static char rank[] = "RANK=2", world[] = "WORLD_SIZE=4", address[] = "MASTER_ADDR=localhost",
                port[] = "MASTER_PORT=5";
    static char *const set[] = {rank, world, address, port, NULL}, *const partial[] = {rank, NULL};
    char *mine[5], *copy[5], **before = environ;
    fsdp_launch launch = FSDP_LAUNCH_INIT;
    environ = mine;
    for (int round = 0; round < 2; round++) {
        memcpy(mine, round == 0 ? set : partial, (round == 0 ? 5 : 2) * sizeof *mine);
        memcpy(copy, mine, (round == 0 ? 5 : 2) * sizeof *mine);
        fsdp_status status = fsdp_launch_from_env(&launch);
        bool same = environ == mine && memcmp(copy, mine, (round == 0 ? 5 : 2) * sizeof *mine) == 0 &&
                    strcmp(rank, "RANK=2") == 0 && strcmp(port, "MASTER_PORT=5") == 0;
        environ = before;
        assert_true(same);
        assert_int_equal(status, round == 0 ? FSDP_OK : FSDP_ERR_ARG);
        environ = mine;
    }
    environ = before;
    assert_int_equal(launch.launcher, FSDP_LAUNCHER_ENV);
    assert_int_equal(launch.rank, 2);
    assert_int_equal(launch.local_world, 4);
    assert_string_equal(launch.address, "localhost");
    assert_int_equal(launch.port, 6);
}

static void what_is_no_launch_struct_is_refused(void **state)
{
    (void)state;
    char *none[] = {NULL}, **before = environ;
    fsdp_launch launch = {0};
    environ = none;
    fsdp_status null = fsdp_launch_from_env(NULL), unsized = fsdp_launch_from_env(&launch);
    launch.size = sizeof launch;
    fsdp_status fine = fsdp_launch_from_env(&launch);
    environ = before;
    assert_int_equal(null, FSDP_ERR_ARG);
    assert_int_equal(unsized, FSDP_ERR_ARG);
    assert_int_equal(fine, FSDP_OK);
    assert_int_equal(launch.world, 1);
}

static void every_launcher_has_a_name(void **state)
{
    (void)state;
    static const char *const names[] = {"none", "env", "torchrun", "Open MPI", "MPICH", "Slurm"};
    for (int i = 0; i < 6; i++) assert_string_equal(fsdp_launcher_name((fsdp_launcher)i), names[i]);
    assert_string_equal(fsdp_launcher_name((fsdp_launcher)6), "?");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nobody_says_anything_and_it_is_a_world_of_one),
        cmocka_unit_test(torchrun_is_read_whatever_started_torchrun),
        cmocka_unit_test(variables_by_hand_are_complete_or_refused),
        cmocka_unit_test(the_meeting_place_follows_from_what_is_set),
        cmocka_unit_test(mpirun_of_each_kind_is_read),
        cmocka_unit_test(two_launchers_agree_or_are_refused),
        cmocka_unit_test(ranks_of_one_job_have_one_nonce),
        cmocka_unit_test(another_job_or_attempt_has_another_nonce),
        cmocka_unit_test(hydras_proxy_tells_jobs_apart),
        cmocka_unit_test(long_values_are_cut_and_long_addresses_refused),
        cmocka_unit_test(the_environment_is_read_and_never_set),
        cmocka_unit_test(what_is_no_launch_struct_is_refused),
        cmocka_unit_test(every_launcher_has_a_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
