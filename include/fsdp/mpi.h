/* SPDX-License-Identifier: MIT */
/** @file mpi.h  The host backend across machines: ranks are the processes of an MPI communicator, and MPI moves the bytes.
 *
 *  A library of its own, fsdp::mpi (-lfsdp_mpi), built with FSDP_WITH_MPI against one MPI; libfsdp never links one. Results
 *  are equal to the bit to ranks as threads (fsdp/host.h): MPI only carries, sums are made here.
 *
 *      int level;
 *      MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
 *      fsdp_mpi_config mpi = FSDP_MPI_CONFIG_INIT;        // all of MPI_COMM_WORLD
 *      fsdp_config config = FSDP_CONFIG_INIT;
 *      config.backend = fsdp_mpi_backend();
 *      config.backend_config = &mpi;
 *
 *  Threads. The program starts and ends MPI; the library's streams call it. MPI_THREAD_MULTIPLE: nothing else to heed.
 *  MPI_THREAD_SERIALIZED: the calls of a context are made one at a time; the program then makes no MPI call while a context
 *  lives, and has one context. Less is refused with UNSUPPORTED.
 *
 *  Failures. A rank that is late, gone or out of order is every rank's error, with one sentence, over a side channel of
 *  sockets: MPI itself does not notice. Whether the other processes live on is the launcher's choice. After a failure MPI may
 *  still hold what was in flight: the library's duplicate of the communicator is then not freed, nor is device memory given
 *  back to the system, until the process ends. Nothing waits for it, except, in some MPIs, MPI_Finalize: a program that has
 *  seen an error between ranks calls MPI_Abort, or exits without. */
#ifndef FSDP_MPI_H
#define FSDP_MPI_H

#include "fsdp/context.h"

#ifdef __cplusplus
extern "C" {
#endif

/** backend_config of the MPI backend; equal on every rank but for comm and address. Read in fsdp_context_create only. */
typedef struct fsdp_mpi_config {
    size_t size;
    const void *comm;     /**< a const MPI_Comm *: an intracommunicator; NULL: MPI_COMM_WORLD. It is duplicated, so that no
                               message of ours meets one of the program's. fsdp_context_create is collective on it, and so is
                               fsdp_context_destroy, which waits a second at most for the others */
    const char *address;  /**< rank 0's counts: where the others reach it by TCP, a host name or an IP address. NULL: a Unix
                               socket where all ranks are on one machine; else each rank picks the one of rank 0's addresses
                               that lies in a network of its own, or the first */
    uint64_t chunk_bytes; /**< no message is longer; a multiple of 4. 0: 8 MiB / world, at least 64 KiB, at most 1 MiB. A
                               communicator that sums takes host memory for twice `world` messages; one that never sums, none */
    uint64_t jitter_ns, jitter_seed; /**< as in fsdp_host_config */
} fsdp_mpi_config;

#define FSDP_MPI_CONFIG_INIT {sizeof(fsdp_mpi_config), NULL, NULL, 0, 0, 0}

/** Its device is the host backend's. Errors of fsdp_context_create: ARG (a communicator that is null or has two groups; MPI is
 *  not initialised or finalised already), UNSUPPORTED (the thread level; more than 4096 ranks), RANK_LOST (MPI's own words, or
 *  a rank that did not come within timeout_ns). Collectives take memory of the context, or memory that outlives it. */
FSDP_API const fsdp_backend *fsdp_mpi_backend(void);

#ifdef __cplusplus
}
#endif
#endif
