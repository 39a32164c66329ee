/* SPDX-License-Identifier: MIT */
/* Cross-entropy, forward and backward in one: a block takes a row of logits into shared memory, where it is read three times
 * (maximum, sum of exponentials, gradient), so that device memory is read once and written once. */
#include <cuda_pipeline.h>

#include "kernels.cuh"

enum { MOST_THREADS = 1024 };

static const float log2_e = 1.4426950408889634f;

/* One instruction, to 2 units in the last place; minus infinity gives 0. */
static __device__ __forceinline__ float two_to(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

static __device__ __forceinline__ float block_max(float x, float *shared)
{
    const int warps = blockDim.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
    if (lane == 0) shared[threadIdx.x / 32] = x;
    __syncthreads(); /* also: the row is in shared memory, for all */
    x = lane < warps ? shared[lane] : -INFINITY;
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
    return x;
}

/* Two blocks to a multiprocessor: one computes while the other's row is on its way. */
static __global__ void __launch_bounds__(MOST_THREADS, 2) cross_entropy(const gpt_cross_entropy_args a)
{
    extern __shared__ uint4 row_bits[];
    __shared__ float shared[2][32];
    const int whole = a.vocab / 8, vectors = a.stride / 8;
    uint4 *row = static_cast<uint4 *>(a.logits) + (size_t)blockIdx.x * vectors;
    for (int v = threadIdx.x; v < vectors; v += blockDim.x) __pipeline_memcpy_async(&row_bits[v], &row[v], sizeof *row);
    __pipeline_commit();
    __pipeline_wait_prior(0); /* a thread's own vectors are what it reads below */

    /* Columns that belong to no token count as minus infinity. */
    float most = -INFINITY, sum = 0.0f;
    for (int v = threadIdx.x; v < vectors; v += blockDim.x) {
        eight x = unpack(row_bits[v]);
        if (v >= whole) {
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (8 * v + i >= a.vocab) x.x[i] = -INFINITY;
            row_bits[v] =
                make_uint4(pack(x.x[0], x.x[1]), pack(x.x[2], x.x[3]), pack(x.x[4], x.x[5]), pack(x.x[6], x.x[7]));
        }
#pragma unroll
        for (int i = 0; i < 8; i++) most = fmaxf(most, x.x[i]);
    }
    most = block_max(most, shared[0]);
    const float shift = -most * log2_e;
    for (int v = threadIdx.x; v < vectors; v += blockDim.x) {
        const eight x = unpack(row_bits[v]);
#pragma unroll
        for (int i = 0; i < 8; i++) sum += two_to(fmaf(x.x[i], log2_e, shift));
    }
    sum = block_sum(sum, shared[1]);

    const int target = a.targets[blockIdx.x];
    const __nv_bfloat16 *numbers = reinterpret_cast<const __nv_bfloat16 *>(row_bits);
    if (threadIdx.x == 0) a.losses[blockIdx.x] = logf(sum) + most - __bfloat162float(numbers[target]);
    if (!a.gradient) return;
    const float factor = a.scale / sum;
    for (int v = threadIdx.x; v < vectors; v += blockDim.x) {
        eight x = unpack(row_bits[v]);
#pragma unroll
        for (int i = 0; i < 8; i++) x.x[i] = two_to(fmaf(x.x[i], log2_e, shift)) * factor;
        store8(row, v, x);
    }
    /* The thread that wrote the target's column writes it again. */
    if ((int)threadIdx.x != target / 8 % (int)blockDim.x) return;
    const float p = two_to(fmaf(__bfloat162float(numbers[target]), log2_e, shift));
    reinterpret_cast<__nv_bfloat16 *>(row)[target] = __float2bfloat16_rn(p * factor - a.scale);
}

cudaError_t gpt_cross_entropy(cudaStream_t stream, const gpt_cross_entropy_args *args)
{
    const int threads = threads_for(args->stride) < MOST_THREADS ? threads_for(args->stride) : MOST_THREADS;
    cross_entropy<<<args->rows, threads, (size_t)args->stride * 2, stream>>>(*args);
    return cudaGetLastError();
}

/* A row of logits, and what the kernel has of its own. */
static cudaError_t most_shared(int *out_bytes)
{
    int device, bytes = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    *out_bytes = bytes - 1024 < GPT_MOST_VOCAB * 2 ? bytes - 1024 : GPT_MOST_VOCAB * 2;
    return error;
}

cudaError_t gpt_most_vocab(int *out_vocab)
{
    int bytes;
    const cudaError_t error = most_shared(&bytes);
    *out_vocab = bytes / 2 / 128 * 128; /* rows are padded to 128 columns */
    return error;
}

cudaError_t gpt_loss_kernels_load(void)
{
    int bytes;
    const cudaError_t error = most_shared(&bytes);
    return error != cudaSuccess
               ? error
               : cudaFuncSetAttribute(cross_entropy, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}
