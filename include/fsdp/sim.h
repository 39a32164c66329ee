/* SPDX-License-Identifier: MIT */
/** @file sim.h  The sim backend: the same library in virtual time, for machines nobody has.
 *
 *  Memory has addresses and no content; an operation costs what the config says; one rank stands for `world`. Time is
 *  exact and repeatable: fsdp_context_now_ns is the host's virtual clock, which only calls that block move.
 *  Compute is fsdp_stream_delay. */
#ifndef FSDP_SIM_H
#define FSDP_SIM_H

#include "fsdp/context.h"
#include "fsdp/host.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fsdp_sim_config {
    size_t size;
    uint32_t world;                 /**< how many ranks this one stands for: 1 to 2^20 */
    uint32_t rank;
    fsdp_link link;                 /**< a collective's cost, by the byte counts of host.h. A world of one pays nothing */
    uint64_t kernel_latency_ns;     /**< a copy, fill or kernel costs this … */
    uint64_t kernel_bytes_per_second; /**< … and its bytes read and written by this; 0: infinite */
    uint64_t alignment;             /**< of every pointer that the device hands out, in bytes: a power of two, at least 256 */
    uint64_t granularity;           /**< device memory is taken in multiples of this: a power of two */
} fsdp_sim_config;

/** Alignment and granularity are the host backend's. CUDA's are 512 and 2 MiB: for the bytes of a GPU, set them. */
#define FSDP_SIM_CONFIG_INIT {sizeof(fsdp_sim_config), 1, 0, {0, 0}, 0, 0, 4096, 4096}

/** For fsdp_config.backend. */
FSDP_API const fsdp_backend *fsdp_sim_backend(void);

#ifdef __cplusplus
}
#endif
#endif
