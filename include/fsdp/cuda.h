/* SPDX-License-Identifier: MIT */
/** @file cuda.h  The CUDA backend: kernels and copies by the CUDA runtime, collectives by NCCL (nccl.h).
 *
 *      fsdp_launch launch = FSDP_LAUNCH_INIT;             // ranks are processes: torchrun, mpirun, srun, by hand
 *      fsdp_launch_from_env(&launch);
 *      cudaSetDevice((int)launch.local_rank);
 *      fsdp_cuda_config cuda = FSDP_CUDA_CONFIG_INIT;
 *      cuda.launch = &launch;
 *      fsdp_config config = FSDP_CONFIG_INIT;
 *      config.backend = fsdp_cuda_backend();
 *      config.backend_config = &cuda;
 *      fsdp_context_create(&config, &ctx);
 *      fsdp_cuda_stream_wrap(ctx, my_stream, "compute", &s);   // every hook takes s
 *
 *  Not in the umbrella fsdp.h: it pulls in the CUDA runtime's header. Only in a build with CUDA (FSDP_WITH_CUDA). */
#ifndef FSDP_CUDA_H
#define FSDP_CUDA_H

#include <cuda_runtime_api.h>

#include "fsdp/device.h"
#include "fsdp/host.h"
#include "fsdp/launch.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fsdp_nccl_config fsdp_nccl_config; /* nccl.h */

/** backend_config of the CUDA backend. Ranks are processes (launch), or threads of this process with a GPU each (local), or
 *  there is one. Read in fsdp_context_create only. */
typedef struct fsdp_cuda_config {
    size_t size;
    int device;                    /**< CUDA's number of the GPU; -1: the one that is current in the calling thread. Calls leave
                                        the thread's as it is; but where the process does not use that GPU (none was set), on
                                        this one, so that GPU 0 does not get a context of each rank */
    const fsdp_launch *launch;     /**< ranks are processes. Not with local */
    fsdp_local *local;             /**< ranks are threads of this process; its link is not used */
    uint32_t rank;                 /**< among local's; 0 with launch */
    const fsdp_side_channel *side; /**< with launch: the caller's own side channel; NULL: a TCP star at launch's address */
    const fsdp_nccl_config *nccl;  /**< NULL: FSDP_NCCL_CONFIG_INIT */
    uint64_t spin_ns;              /**< a call that blocks the host asks the GPU again and again for so long, then sleeps for
                                        20 us at a time (longer after a second) and asks in between */
    uint64_t jitter_ns;            /**< tests: the GPU spins for a random time below this before every operation; 0: never */
    uint64_t jitter_seed;          /**< the same seed gives the same delays */
} fsdp_cuda_config;

#define FSDP_CUDA_CONFIG_INIT {sizeof(fsdp_cuda_config), -1, NULL, NULL, 0, NULL, NULL, 20000, 0, 0}

/** Threads: a context's calls make its GPU current for their own length where another one is: which costs two calls of CUDA
 *  each, and going back makes a CUDA context on that other one, too. So call cudaSetDevice first, in each thread.
 *  Errors of fsdp_context_create: ARG; DEVICE (no driver, no such GPU, or the runtime's own words); UNSUPPORTED (compute
 *  capability below 8.0, NCCL below 2.19, more than 4096 ranks); and nccl.h's. Warnings through fsdp_config.log:
 *  CUDA_LAUNCH_BLOCKING, CUDA_DEVICE_MAX_CONNECTIONS=1 (both make streams wait for each other). */
FSDP_API const fsdp_backend *fsdp_cuda_backend(void);

/** A stream of the caller's own, for compute: @p native, which the caller keeps and destroys, after fsdp_stream_release. What
 *  it was given before this call comes before whatever the library enqueues.
 *  0 and cudaStreamLegacy are the NULL stream. A blocking stream (the NULL stream, one made without cudaStreamNonBlocking) is
 *  taken with a warning: the library's lanes are non-blocking, so that work on the NULL stream is no longer ordered with
 *  what follows on them. cudaStreamPerThread is refused: it is another stream in each thread.
 *  Errors: ARG (another GPU's stream; cudaStreamPerThread; a stream that is capturing; a context that is not on CUDA); STATE
 *  (16 streams live, or it is wrapped already); NO_HOST_MEMORY; DEVICE. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_cuda_stream_wrap(fsdp_context *ctx, cudaStream_t native, const char *name,
                                                          fsdp_stream **out_stream);

/** The stream behind one of the library's or a wrapped one: for kernel launches on what fsdp_stream_create made. Borrowed.
 *  NULL if @p stream is NULL or not on CUDA. */
FSDP_API cudaStream_t fsdp_cuda_stream(const fsdp_stream *stream);

/** The GPU's number of a context on CUDA; -1 of any other. */
FSDP_API int fsdp_cuda_device(const fsdp_context *ctx);

#ifdef __cplusplus
}
#endif
#endif
