/* SPDX-License-Identifier: MIT */
/** @file nccl.h  The CUDA backend's communicators: what NCCL is told, and what is known of it.
 *
 *  Communicators are blocking ones (a non-blocking one starts a thread for each collective). Making, splitting, finalising and
 *  aborting them happens on a helper thread with the context's deadline, so that no call of the library waits for ever in
 *  NCCL. The id travels over the side channel unless the caller gives one.
 *
 *  Two communicators (fsdp_config.reduce_comm) on one GPU can wait for each other's kernels for ever, unless NCCL orders their
 *  launches: NCCL_LAUNCH_ORDER_IMPLICIT=1 in the environment (NCCL 2.26 or later), or accept_unordered where the caller knows
 *  that both always fit on the GPU. Else fsdp_context_create says so.
 *
 *  A collective that is on the GPU for longer than fsdp_config.timeout_ns, from when its stream came to it, fails the context
 *  on every rank with RANK_LOST, whatever the hosts do: a thread of the library looks every 20 ms. Replays of captured graphs
 *  are not watched so, nor, of more than 512 groups in flight on a communicator, those between the oldest 512 and the newest; a
 *  peer that is gone is noticed there, too. NCCL connects ranks at a communicator's first collectives and holds the host in
 *  them until all ranks have come: that is watched, and ends, in the same way.
 *
 *  Of what comm.h says of collectives two things are not so here. Sums are in NCCL's order, and 16-bit sums are rounded at
 *  each step of it. And calls are not compared between ranks when they meet: where they differ the collective hangs until
 *  timeout_ns, or gives wrong results, which fsdp_adamw_step finds and throws away; FSDP_DEBUG_ORDER finds the call.
 *
 *  Not in the umbrella fsdp.h: it pulls in NCCL's header. */
#ifndef FSDP_NCCL_H
#define FSDP_NCCL_H

#include <nccl.h>

#include "fsdp/comm.h"
#include "fsdp/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Pools that collectives travel in, as NCCL windows: its kernels, or the GPU's copy engines, then read peers' directly. */
typedef enum fsdp_nccl_window {
    FSDP_NCCL_WINDOW_GATHER = 1, /**< parameters: what all-gathers write */
    FSDP_NCCL_WINDOW_GRAD = 2    /**< gradients: what reduce-scatters read. Measure it: docs/performance.md */
} fsdp_nccl_window;

struct fsdp_nccl_config {
    size_t size;
    ncclComm_t comm;              /**< the caller's own, of all ranks in their order: used, never finalised, aborted only when
                                       the context fails. NULL: one is made */
    ncclComm_t reduce_comm;       /**< with comm and fsdp_config.reduce_comm: a second one of the caller's; NULL: comm is
                                       split */
    const ncclUniqueId *id;       /**< the same on every rank, from one ncclGetUniqueId; NULL: rank 0's travels over the side
                                       channel. Not with comm */
    const ncclConfig_t *config;   /**< CTAs, policy, net name, …: passed on as it is, but for `blocking`; NULL: NCCL's defaults.
                                       Not with comm */
    bool accept_unordered;        /**< two communicators without NCCL_LAUNCH_ORDER_IMPLICIT=1, at the caller's risk */
    uint32_t windows;             /**< of fsdp_nccl_window, by OR: with any, the gather and grad pools of each model come from
                                       ncclMemAlloc, and these are registered, one window each (NCCL 2.27 or later); 0: none */
};

#define FSDP_NCCL_CONFIG_INIT {sizeof(fsdp_nccl_config), NULL, NULL, NULL, NULL, false, 0}

/** What is known of a context's communicators. */
typedef struct fsdp_nccl_info {
    size_t size;
    int built_version;    /**< NCCL_VERSION_CODE of the header: 22809 is 2.28.9 */
    int version;          /**< of the library that runs */
    uint32_t comms;       /**< 1 or 2 */
    bool launch_ordered;  /**< NCCL_LAUNCH_ORDER_IMPLICIT=1 is set, and this NCCL knows it */
    uint32_t windows;     /**< pools that are registered now */
    uint64_t window_bytes;
    char path[128];       /**< which way collectives go, in words, as far as NCCL tells: "windows: symmetric kernels …"; "" if
                               it cannot be known */
} fsdp_nccl_info;

#define FSDP_NCCL_INFO_INIT {sizeof(fsdp_nccl_info), 0, 0, 0, false, 0, 0, {0}}

/** Errors: ARG (size; a context that is not on CUDA). */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_nccl_info_get(const fsdp_context *ctx, fsdp_nccl_info *out_info);

/** The communicator itself, for collectives of the caller's own: enqueued from the thread that drives the context, between
 *  calls of the library, in the same order on every rank. Borrowed. NULL in a world of one, or not on CUDA. */
FSDP_API ncclComm_t fsdp_nccl_comm(const fsdp_comm *comm);

#ifdef __cplusplus
}
#endif
#endif
