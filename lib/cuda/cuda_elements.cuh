/* SPDX-License-Identifier: MIT */
/* Elements on the GPU: conversions to the bit as lib/convert.h, and groups of them that are moved by one instruction. */
#ifndef FSDP_LIB_CUDA_ELEMENTS_CUH
#define FSDP_LIB_CUDA_ELEMENTS_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "cuda_kernels.h"

typedef __nv_bfloat16 fsdp__bf16;
typedef __half fsdp__fp16;

static __device__ __forceinline__ float fsdp__to_float(float x) { return x; }
static __device__ __forceinline__ float fsdp__to_float(fsdp__bf16 x)
{
    return __uint_as_float((uint32_t)__bfloat16_as_ushort(x) << 16);
}
/* The conversion instruction loses what is behind a NaN. */
static __device__ __forceinline__ float fsdp__to_float(fsdp__fp16 x)
{
    uint32_t bits = __half_as_ushort(x);
    float nan = __uint_as_float((bits & 0x8000u) << 16 | 0x7f800000u | (bits & 0x3ffu) << 13);
    return (bits & 0x7fffu) > 0x7c00u ? nan : __half2float(x);
}

static __device__ __forceinline__ void fsdp__from_float(float *to, float x) { *to = x; }
static __device__ __forceinline__ void fsdp__from_float(fsdp__bf16 *to, float x)
{
    uint32_t bits = __float_as_uint(x);
    uint16_t nan = (uint16_t)(bits >> 16 | 0x40u), rounded = __bfloat16_as_ushort(__float2bfloat16_rn(x));
    *to = __ushort_as_bfloat16((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}
static __device__ __forceinline__ void fsdp__from_float(fsdp__fp16 *to, float x)
{
    uint32_t bits = __float_as_uint(x);
    uint16_t nan = (uint16_t)((bits >> 16 & 0x8000u) | 0x7e00u), rounded = __half_as_ushort(__float2half_rn(x));
    *to = __ushort_as_half((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

/* N neighbours, moved together: N × sizeof(T) is 8 or 16. */
template <typename T, int N> struct alignas(sizeof(T) * N) fsdp__group {
    T at[N];
};

/* Elements [index, index + N) of base. WHOLE: all are below count, and base is aligned for a group: one instruction, and no
 * branch between this and the next one. Else those below count, one by one; the others are 0. */
template <bool WHOLE, typename T, int N>
static __device__ __forceinline__ void fsdp__load(fsdp__group<T, N> *to, const T *base, uint64_t index, uint64_t count)
{
    if constexpr (WHOLE) {
        *to = *reinterpret_cast<const fsdp__group<T, N> *>(base + index);
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) {
            if (index + i < count) to->at[i] = base[index + i];
            else fsdp__from_float(&to->at[i], 0.0f);
        }
    }
}

template <bool WHOLE, typename T, int N>
static __device__ __forceinline__ void fsdp__store(T *base, uint64_t index, uint64_t count,
                                                   const fsdp__group<T, N> &group)
{
    if constexpr (WHOLE) {
        *reinterpret_cast<fsdp__group<T, N> *>(base + index) = group;
    } else {
#pragma unroll
        for (int i = 0; i < N; i++)
            if (index + i < count) base[index + i] = group.at[i];
    }
}

template <int BYTES> static __device__ __forceinline__ bool fsdp__is_aligned(const void *ptr)
{
    return reinterpret_cast<uintptr_t>(ptr) % BYTES == 0;
}

/* cudaLaunchKernel for a kernel whose one parameter is a struct. (Not <<<>>>: that guards a static by a function of libstdc++,
 * which programs in C do not link.) */
template <typename Args>
static inline cudaError_t fsdp__launch_kernel(void (*kernel)(Args), uint64_t grid, unsigned threads,
                                              cudaStream_t stream, const Args &args)
{
    void *params[1] = {const_cast<Args *>(&args)};
    return cudaLaunchKernel(reinterpret_cast<const void *>(kernel), dim3(static_cast<unsigned>(grid)), dim3(threads),
                            params, 0, stream);
}

template <typename Args> static inline cudaError_t fsdp__load_kernel(void (*kernel)(Args))
{
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, reinterpret_cast<const void *>(kernel));
}

#endif
