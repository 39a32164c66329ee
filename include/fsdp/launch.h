/* SPDX-License-Identifier: MIT */
/** @file launch.h  Who am I, of how many, and where do we meet: asked of the launcher that started this process. */
#ifndef FSDP_LAUNCH_H
#define FSDP_LAUNCH_H

#include <stddef.h>
#include <stdint.h>

#include "fsdp/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Who started this process. */
typedef enum fsdp_launcher {
    FSDP_LAUNCHER_NONE = 0,     /**< nobody that says so: a world of one */
    FSDP_LAUNCHER_ENV = 1,      /**< RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, by hand or by a script */
    FSDP_LAUNCHER_TORCHRUN = 2,
    FSDP_LAUNCHER_OPEN_MPI = 3, /**< mpirun of Open MPI */
    FSDP_LAUNCHER_MPICH = 4,    /**< Hydra and whatever else speaks PMI: MPICH, Intel MPI, MVAPICH */
    FSDP_LAUNCHER_SLURM = 5     /**< srun */
} fsdp_launcher;

/** The launcher's name as people write it, "torchrun"; never NULL ("?" for a number that is none). */
FSDP_API const char *fsdp_launcher_name(fsdp_launcher launcher);

#define FSDP_ADDRESS_BYTES 256

/** One process's place in its job. A caller that knows better fills it by hand, or changes what the launcher said. */
typedef struct fsdp_launch {
    size_t size;
    uint32_t rank, world;
    uint32_t local_rank, local_world; /**< among the ranks of this machine: local_rank picks the GPU */
    fsdp_launcher launcher;
    char address[FSDP_ADDRESS_BYTES]; /**< where rank 0 listens: a host name, an IPv4 or IPv6 address; or "@name", a Unix
                                           socket without a file, for ranks that are all on one machine; "": none known */
    uint16_t port;                    /**< of the side channel: MASTER_PORT + 1 unless given; 0 with "@name" */
    uint64_t nonce;                   /**< the job's: whoever brings another one is turned away. No secret: it keeps out
                                           strays, not an attacker who can read this process's environment */
} fsdp_launch;

#define FSDP_LAUNCH_INIT {sizeof(fsdp_launch), 0, 1, 0, 1, FSDP_LAUNCHER_NONE, "", 0, 0}

/** Read the environment, and set nothing in it. Call it before any CUDA call, so that local_rank can pick the device.
 *  out_launch: starts as FSDP_LAUNCH_INIT; written on success only. Thread: any that may call getenv. Not collective.
 *
 *  The most specific launcher wins: torchrun (TORCHELASTIC_…), whatever started it; then RANK and WORLD_SIZE, Open MPI's and
 *  PMI's variables, which must not contradict each other; then Slurm's, within srun's steps only (a batch script is a world of
 *  one); else a world of one.
 *
 *  Where no launcher but RANK and WORLD_SIZE says which ranks share a machine, LOCAL_RANK and LOCAL_WORLD_SIZE must; they may
 *  be left out where MASTER_ADDR is a loopback address (all ranks are here).
 *
 *  address, port  MASTER_ADDR and MASTER_PORT + 1 (or FSDP_PORT), with any launcher; needed by torchrun, and by RANK unless
 *                 FSDP_NONCE names the job and all its ranks are here. Else, all ranks on one machine: a Unix socket
 *                 "@fsdp-<user>-<nonce>" and 0, or with FSDP_PORT 127.0.0.1 and that; Slurm: the step's first node and
 *                 FSDP_PORT, or a port from 20000 to 29999 that job and step give; mpirun over several machines: "" (the MPI
 *                 backend needs none).
 *                 In a world of one: "" and 0.
 *  nonce          from the launcher's own name of this job and its attempt, the world and the port.
 *
 *  Two variables are this library's own: FSDP_PORT (the port itself, instead of MASTER_PORT + 1) and FSDP_NONCE (any text, the
 *  same on all ranks and another one in each job, instead of the launcher's name of the job).
 *
 *  docs/running.md lists every variable that is read.
 *  Errors: ARG: variables are missing, empty, no numbers, out of range, or contradict each other: the text lists what was seen
 *  and what was not. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_launch_from_env(fsdp_launch *out_launch);

/** The caller's own side channel, instead of the library's TCP star: for a program that has a way to talk already. */
typedef struct fsdp_side_channel {
    size_t size;
    void *arg;
    /** all[r * bytes …] = rank r's blob, on every rank; called by one thread at a time, on every rank in the same order.
     *  Returns FSDP_OK; FSDP_ERR_RANK_LOST once timeout_ns is over; MISMATCH; ABORTED. Anything else counts as RANK_LOST, and
     *  every failure is for good. Its sentence: fsdp_backend_fail. It must itself end soon after `aborted` begins to answer:
     *  nobody can wake a rank inside it, which else hears of an abort only when it returns. */
    fsdp_status (*all_gather)(void *arg, const void *mine, void *all, size_t bytes, uint64_t timeout_ns);
    /** Tell every rank, from any thread, without blocking; may be NULL: then an abort wakes the ranks of this machine that are
     *  in a collective; who is inside all_gather, or on another machine, hears of it at his deadline. */
    void (*abort)(void *arg, const char *reason);
    /** The reason another rank's abort gave, or NULL; asked often, from any thread; NULL if abort is. */
    const char *(*aborted)(void *arg);
} fsdp_side_channel;

#define FSDP_SIDE_CHANNEL_INIT {sizeof(fsdp_side_channel), NULL, NULL, NULL, NULL}

#ifdef __cplusplus
}
#endif
#endif
