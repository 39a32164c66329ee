/* SPDX-License-Identifier: MIT */
/** @file comm.h  Collectives, and the four words for how far one has got.
 *
 *  enqueued: the call has returned.      ordered: a stream waits for the work's end event.
 *  done:     the end event has happened. drained: a stream or the device is idle.
 *  They are different things, and no call here mixes two of them.
 *
 *  One communicator is one wire: its operations run one after another, in the order in which the host enqueued them, on
 *  every rank, whatever streams they are on. Sums over ranks are a left fold in rank order, in fp32, rounded once.
 *  (What is otherwise on NCCL: nccl.h.) */
#ifndef FSDP_COMM_H
#define FSDP_COMM_H

#include "fsdp/device.h"
#include "fsdp/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fsdp_comm fsdp_comm;
typedef struct fsdp_work fsdp_work;

/** The communicator of all ranks. Gathers travel on it, and reductions unless reduce_comm is set. Borrowed. */
FSDP_API fsdp_comm *fsdp_context_comm(fsdp_context *ctx);
/** The one that reductions travel on: the same, or the second one. Borrowed. */
FSDP_API fsdp_comm *fsdp_context_reduce_comm(fsdp_context *ctx);
/** The context's rank and world. */
FSDP_API uint32_t fsdp_comm_rank(const fsdp_comm *comm);
FSDP_API uint32_t fsdp_comm_size(const fsdp_comm *comm);

/* All of these: collective, same order and same arguments on every rank; enqueue on @p stream and return; buffers
 * belong to the operation until it is done. @p out_work may be NULL. count may be 0. A buffer begins at a multiple of its
 * dtype's bytes. send and recv have no byte in common, or the call is in place, exactly as it says below: else ARG.
 * Errors: ARG, STATE, NO_HOST_MEMORY: nothing was enqueued. Ranks that call different things all fail with MISMATCH,
 * which names both, at their next call; a rank that never comes is RANK_LOST after the context's timeout_ns. */

/** Rank r's @p count elements end up at recv + r * count on every rank.
 *  Shapes: send count, recv size * count. In place: send == recv + rank * count. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_all_gather(fsdp_comm *comm, const void *send, void *recv, uint64_t count,
                                                    fsdp_dtype dtype, fsdp_stream *stream, fsdp_work **out_work);
/** Rank r receives the sum over ranks of their send + r * count.
 *  Shapes: send size * count, recv count. In place: recv == send + rank * count. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_reduce_scatter(fsdp_comm *comm, const void *send, void *recv, uint64_t count,
                                                        fsdp_dtype dtype, fsdp_stream *stream, fsdp_work **out_work);
/** Every rank receives the sum. Shapes: count, count. In place: send == recv. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_all_reduce(fsdp_comm *comm, const void *send, void *recv, uint64_t count,
                                                    fsdp_dtype dtype, fsdp_stream *stream, fsdp_work **out_work);
/** Every rank receives rank @p root's elements, in place. Shapes: count. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_broadcast(fsdp_comm *comm, void *data, uint64_t count, fsdp_dtype dtype,
                                                   uint32_t root, fsdp_stream *stream, fsdp_work **out_work);
/** What follows on @p stream runs after every rank's stream has come this far. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_barrier(fsdp_comm *comm, fsdp_stream *stream, fsdp_work **out_work);

/** A work owns its end event until it is released; the event was recorded when the operation was enqueued.
 *  wait: orders @p stream after it, that stream and no other, and returns at once. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_work_wait(fsdp_work *work, fsdp_stream *stream);
/** Asks whether it is done; never blocks. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_work_is_done(fsdp_work *work, bool *out_done);
/** Blocks the host until it is done: asleep until it is woken, on CUDA in naps (fsdp_cuda_config.spin_ns).
 *  Errors: TIMEOUT (ask again); MISMATCH, RANK_LOST, ABORTED, DEVICE. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_work_wait_host(fsdp_work *work, uint64_t timeout_ns);
/** Give up the handle; the operation goes on. NULL is nothing. */
FSDP_API void fsdp_work_release(fsdp_work *work);

#ifdef __cplusplus
}
#endif
#endif
