/* SPDX-License-Identifier: MIT */
/* What the files of block_cuda.h's kernels share. */
#ifndef FSDP_BENCH_BLOCK_PARTS_CUH
#define FSDP_BENCH_BLOCK_PARTS_CUH

#include <cuda_bf16.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define MUST(call)                                                                                     \
    do {                                                                                               \
        cudaError_t error_ = (call);                                                                   \
        if (error_ != cudaSuccess) {                                                                   \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(error_)); \
            exit(1);                                                                                   \
        }                                                                                              \
    } while (0)

namespace
{

typedef __nv_bfloat16 bf16;

constexpr int THREADS = 256;

unsigned blocks_for(uint64_t threads) { return (unsigned)((threads + THREADS - 1) / THREADS); }

/* The driver loads a kernel at its first launch, and may wait for what is running then. */
template <size_t N> void load_kernels(const void *const (&kernels)[N])
{
    cudaFuncAttributes attributes;
    for (const void *kernel : kernels) MUST(cudaFuncGetAttributes(&attributes, kernel));
}

/* The sum of a block's threads, in thread 0. */
__device__ float block_sum(float mine)
{
    __shared__ float sums[THREADS];
    sums[threadIdx.x] = mine;
    for (int half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    return sums[0];
}

/* One block: the sum of count numbers, times factor. */
__global__ void __launch_bounds__(THREADS) add_sums(float *out, const float *partial, uint32_t count, float factor)
{
    float total = 0.0f;
    for (uint32_t i = threadIdx.x; i < count; i += THREADS) total += partial[i];
    total = block_sum(total);
    if (threadIdx.x == 0) *out = total * factor;
}

/* Four elements a thread. */
__global__ void to_bf16(bf16 *dst, const float *src, uint64_t count)
{
    const uint64_t at = ((uint64_t)blockIdx.x * THREADS + threadIdx.x) * 4;
    if (at >= count) return;
    const float4 v = *(const float4 *)(src + at);
    *(__nv_bfloat162 *)(dst + at) = __floats2bfloat162_rn(v.x, v.y);
    *(__nv_bfloat162 *)(dst + at + 2) = __floats2bfloat162_rn(v.z, v.w);
}

} // namespace

#endif
