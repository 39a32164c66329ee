/* SPDX-License-Identifier: MIT */
/* What the kernels share: eight bf16 numbers at a time, and sums over a block. */
#ifndef GPT_CUDA_KERNELS_CUH
#define GPT_CUDA_KERNELS_CUH

#include <cuda_bf16.h>

#include "kernels.h"

struct eight {
    float x[8];
};

static __device__ __forceinline__ uint32_t pack(float low, float high)
{
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    uint32_t bits;
    memcpy(&bits, &pair, sizeof bits);
    return bits;
}

static __device__ __forceinline__ eight unpack(uint4 bits)
{
    const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
    eight out;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        out.x[2 * i] = __uint_as_float(words[i] << 16);
        out.x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
    return out;
}

/* Numbers 8 i … 8 i + 7 of a bf16 array. */
static __device__ __forceinline__ eight load8(const void *array, size_t i)
{
    return unpack(static_cast<const uint4 *>(array)[i]);
}

/* Writes them, and leaves in `v` what was written: rounded. */
static __device__ __forceinline__ void store8(void *array, size_t i, eight &v)
{
    const uint4 bits =
        make_uint4(pack(v.x[0], v.x[1]), pack(v.x[2], v.x[3]), pack(v.x[4], v.x[5]), pack(v.x[6], v.x[7]));
    static_cast<uint4 *>(array)[i] = bits;
    v = unpack(bits);
}

static __device__ __forceinline__ void store8_float(float *array, size_t i, const eight &v)
{
    float4 *at = reinterpret_cast<float4 *>(array) + 2 * i;
    at[0] = make_float4(v.x[0], v.x[1], v.x[2], v.x[3]);
    at[1] = make_float4(v.x[4], v.x[5], v.x[6], v.x[7]);
}

static __device__ __forceinline__ eight load8_float(const float *array, size_t i)
{
    const float4 *at = reinterpret_cast<const float4 *>(array) + 2 * i, low = at[0], high = at[1];
    return {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
}

static __device__ __forceinline__ float warp_sum(float x)
{
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
    return x;
}

/* Sum over the block, for all its threads; whole warps. shared: 32 numbers that no thread still reads from an earlier call: two
 * buffers in turn are enough, since each call has a barrier. */
static __device__ __forceinline__ float block_sum(float x, float *shared)
{
    const int warps = blockDim.x / 32, lane = threadIdx.x % 32;
    x = warp_sum(x);
    if (warps == 1) return x;
    if (lane == 0) shared[threadIdx.x / 32] = x;
    __syncthreads();
    return warp_sum(lane < warps ? shared[lane] : 0.0f);
}

/* Threads of a block that has one for each eight channels. */
static inline int threads_for(int channels) { return (channels / 8 + 31) / 32 * 32; }

#endif
