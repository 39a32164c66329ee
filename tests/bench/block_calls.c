/* SPDX-License-Identifier: MIT */
/* How much of a hook's host time is the library's own: bench_prefetch_calls is bench_prefetch linked with the linker's --wrap
 * for the functions below, so that every call of CUDA and NCCL made by the library (and by the bench) goes through a clock.
 * libfsdp.a is linked statically, so its calls are seen; what NCCL and CUDA call inside themselves is theirs. Hook time less
 * the time inside is the library's, less what reading the clock costs, which is measured on this machine and printed. A
 * function that is missing here counts as the library's: the figure errs against it. The other executable has no clocks in
 * it; times of steps are taken there. */
#include "block_bench.h"

_Thread_local uint64_t block_calls, block_calls_ns;
_Thread_local bool block_in_call;

/* One function's calls in hooks and updates. */
typedef struct tally tally;
struct tally {
    const char *name;
    uint64_t n, ns;
    tally *next;
};
static _Thread_local tally *tallies;

static void tally_call(tally *t, uint64_t ns)
{
    block_calls_ns += ns;
    block_calls++;
    if (!block_in_call) return;
    if (t->n == 0) {
        t->next = tallies;
        tallies = t;
    }
    t->n++;
    t->ns += ns;
}

void block_calls_print(double layers_and_steps)
{
    for (const tally *t = tallies; t != NULL; t = t->next)
        printf("    %-36s %6.2f calls a layer, %8.3f us\n", t->name, (double)t->n / layers_and_steps,
               (double)t->ns * 1e-3 / layers_and_steps);
}

void block_calls_reset(void)
{
    for (tally *t = tallies; t != NULL; t = t->next) t->n = t->ns = 0;
    tallies = NULL;
}

/* tally_call comes behind the clock: what it costs is taken off with the clock's own cost. */
#define WRAP(result, name, declared, passed)                     \
    result __real_##name declared;                               \
    result __wrap_##name declared;                               \
    result __wrap_##name declared                                \
    {                                                            \
        static _Thread_local tally tally_ = {#name, 0, 0, NULL}; \
        const uint64_t start = fsdp__now_ns();                   \
        const result result_ = __real_##name passed;             \
        tally_call(&tally_, fsdp__now_ns() - start);             \
        return result_;                                          \
    }

/* clang-format off */
WRAP(cudaError_t, cudaEventRecord, (cudaEvent_t event, cudaStream_t stream), (event, stream))
WRAP(cudaError_t, cudaEventRecordWithFlags, (cudaEvent_t event, cudaStream_t stream, unsigned flags), (event, stream, flags))
WRAP(cudaError_t, cudaEventQuery, (cudaEvent_t event), (event))
WRAP(cudaError_t, cudaStreamWaitEvent, (cudaStream_t stream, cudaEvent_t event, unsigned flags), (stream, event, flags))
WRAP(cudaError_t, cudaStreamQuery, (cudaStream_t stream), (stream))
WRAP(cudaError_t, cudaStreamIsCapturing, (cudaStream_t stream, enum cudaStreamCaptureStatus *status), (stream, status))
WRAP(cudaError_t, cudaThreadExchangeStreamCaptureMode, (enum cudaStreamCaptureMode *mode), (mode))
WRAP(cudaError_t, cudaMemsetAsync, (void *dst, int value, size_t bytes, cudaStream_t stream), (dst, value, bytes, stream))
WRAP(cudaError_t, cudaMemcpyAsync, (void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream),
     (dst, src, bytes, kind, stream))
WRAP(cudaError_t, cudaLaunchKernel, (const void *fn, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream),
     (fn, grid, block, args, shared, stream))
#if CUDART_VERSION >= 13000 /* what nvcc makes of <<<…>>> since */
WRAP(cudaError_t, __cudaLaunchKernel,
     (cudaKernel_t kernel, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream),
     (kernel, grid, block, args, shared, stream))
#endif
WRAP(cudaError_t, cudaLaunchKernelExC, (const cudaLaunchConfig_t *config, const void *fn, void **args), (config, fn, args))
WRAP(cudaError_t, cudaLaunchHostFunc, (cudaStream_t stream, cudaHostFn_t fn, void *arg), (stream, fn, arg))
WRAP(cudaError_t, cudaSetDevice, (int device), (device))
WRAP(cudaError_t, cudaGetDevice, (int *device), (device))
WRAP(cudaError_t, cudaGetLastError, (void), ())
WRAP(cudaError_t, cudaPeekAtLastError, (void), ())
WRAP(ncclResult_t, ncclAllGather,
     (const void *send, void *recv, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream),
     (send, recv, count, type, comm, stream))
WRAP(ncclResult_t, ncclReduceScatter,
     (const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream),
     (send, recv, count, type, op, comm, stream))
WRAP(ncclResult_t, ncclAllReduce,
     (const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream),
     (send, recv, count, type, op, comm, stream))
WRAP(ncclResult_t, ncclGroupStart, (void), ())
WRAP(ncclResult_t, ncclGroupEnd, (void), ())
WRAP(ncclResult_t, ncclCommGetAsyncError, (ncclComm_t comm, ncclResult_t *error), (comm, error))
/* clang-format on */

uint64_t block_call_cost_ns(void)
{
    enum { TIMES = 100000 };
    tally probe = {"", 1, 0, NULL};
    const uint64_t calls = block_calls, calls_ns = block_calls_ns;
    const uint64_t begin = fsdp__now_ns();
    for (int i = 0; i < TIMES; i++) {
        const uint64_t start = fsdp__now_ns();
        tally_call(&probe, fsdp__now_ns() - start);
    }
    const uint64_t whole = fsdp__now_ns() - begin, inside = block_calls_ns - calls_ns;
    block_calls = calls;
    block_calls_ns = calls_ns;
    return (whole - inside) / TIMES;
}
