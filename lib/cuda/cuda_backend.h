/* SPDX-License-Identifier: MIT */
/* The CUDA backend: what its files share. No file outside lib/cuda includes this one.
 *
 *  device   one GPU's primary context, by the CUDA runtime. Whoever calls may have another GPU current: each entry that needs
 *           it makes this one current for its own length (fsdp__cuda_enter).
 *  stream   a cudaStream_t, ours or the caller's (wrapped); with it what a trace's spans need.
 *  event    a cudaEvent_t without timing. Spans of a trace take events with timing from a pool.
 *  waiter   blocks the host until an event is done: asks for spin_ns, then sleeps until a host function wakes it.
 *  failure  the first error stays, with its sentence; every entry that meets one keeps it. check reads it, and no more.
 *  comm     NCCL. One ncclComm_t a communicator; a world of one has none and enqueues nothing.
 *  watch    one thread a device of a world of more than one: asks NCCL for its errors and events for how far collectives have
 *           got. The only thread that does; it touches the device by event query alone. */
#ifndef FSDP_LIB_CUDA_BACKEND_H
#define FSDP_LIB_CUDA_BACKEND_H

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdatomic.h>

#include "call.h"
#include "check.h"
#include "fsdp/backend.h"
#include "fsdp/cuda.h"

/* ---- cuda_config.c ---- */

typedef struct fsdp__cuda_setup {
    fsdp_cuda_config config; /* its pointers are the caller's: good during fsdp_context_create only */
    uint32_t rank, world;
} fsdp__cuda_setup;

/* The backend's config, or its defaults for NULL, with what follows from it. Errors: ARG. */
fsdp_status fsdp__cuda_setup_read(const void *given, fsdp__cuda_setup *out_setup);

/* ---- cuda_device.c ---- */

typedef struct fsdp__cuda_spans fsdp__cuda_spans;   /* cuda_span.c */
typedef struct fsdp__cuda_waiter fsdp__cuda_waiter; /* cuda_wait.c */

typedef struct fsdp__cuda_device {
    const fsdp_host_allocator *host;
    int ordinal; /* CUDA's number of the GPU */
    uint32_t debug, rank;
    uint64_t timeout_ns, spin_ns, jitter_ns, jitter_seed;
    fsdp_log_fn log;
    void *log_arg;
    int n_processors; /* multiprocessors, for grids */
    float *square_parts; /* device memory of the backend's own: partials of SQUARE_SUM; not counted by the library */
    fsdp__cuda_spans *spans;
    fsdp__cuda_waiter *waiter;

    pthread_mutex_t lock; /* over streams, spans and the sentence; never held in a call that can block */
    atomic_int status;    /* the first error, written under the lock, once */
    char sentence[FSDP__SENTENCE_BYTES];
    atomic_bool aborted;
} fsdp__cuda_device;

typedef struct fsdp__cuda_stream {
    fsdp__cuda_device *dev;
    cudaStream_t native;
    bool owned; /* made here; else the caller's */
    char name[32];
    uint64_t n_jitter; /* delays drawn so far */
    uint32_t number;   /* of the streams of its device, in order of creation */
    struct fsdp__cuda_stream *next;
} fsdp__cuda_stream;

extern const fsdp_device_ops fsdp__cuda_device_ops;

/* Keep the first error and its sentence; returns FSDP_ERR_DEVICE (NO_MEMORY where CUDA says so and nothing is broken). error:
 * cudaSuccess gives FSDP_OK. what: "cudaMalloc of 64 bytes". */
fsdp_status fsdp__cuda_fail(fsdp__cuda_device *dev, cudaError_t error, const char *what, ...)
    __attribute__((format(printf, 3, 4)));
/* The first error, with its sentence set, or FSDP_OK. Never calls CUDA. */
fsdp_status fsdp__cuda_check(void *dev);

/* Make the device current where it is not. Returns the one that was, for fsdp__cuda_leave; or -1: nothing to undo. */
int fsdp__cuda_enter(const fsdp__cuda_device *dev);
void fsdp__cuda_leave(int before);

#define FSDP__CUDA_TRY(dev, call)                                                      \
    do {                                                                               \
        cudaError_t cuda_error_ = (call);                                              \
        if (cuda_error_ != cudaSuccess) return fsdp__cuda_fail((dev), cuda_error_, #call); \
    } while (0)

/* ---- cuda_stream.c, cuda_event.c, cuda_wait.c, cuda_span.c, cuda_memory.c, cuda_launch.c: the table's entries ---- */

/* Before and after each thing that is enqueued: the start of its span and the delay of jitter; its end, and FSDP_DEBUG_SYNC.
 * Collectives use them, too. */
fsdp_status fsdp__cuda_before(fsdp__cuda_stream *s, fsdp_span *span);
fsdp_status fsdp__cuda_after(fsdp__cuda_stream *s, fsdp_span *span);

/* Block the host until the event is done, at most timeout_ns (UINT64_MAX: for ever). Errors: TIMEOUT; the device's; ABORTED as
 * soon as the device is aborted. */
fsdp_status fsdp__cuda_wait_host(fsdp__cuda_device *dev, cudaEvent_t event, uint64_t timeout_ns);

/* ---- cuda_kernels.cu: arithmetic. The launchers return cudaGetLastError's value. ---- */

#ifdef __cplusplus
extern "C" {
#endif
/* Load every kernel into the current device's context, so that no launch loads one later. */
cudaError_t fsdp__cuda_load_kernels(void);
/* Any operation of fsdp_device_op but COPY, FILL, HOST_CALL. */
cudaError_t fsdp__cuda_kernel(const fsdp__cuda_device *dev, cudaStream_t stream, const fsdp_device_op *op);
/* Spin for ns nanoseconds. */
cudaError_t fsdp__cuda_delay(cudaStream_t stream, uint64_t ns);
#ifdef __cplusplus
}
#endif

/* ---- cuda_side.c: the star between processes, a room between threads, the caller's own ---- */

extern const fsdp_side_ops fsdp__cuda_side_ops;

/* ---- nccl_*.c ---- */

extern const fsdp_comm_ops fsdp__nccl_comm_ops;

#endif
