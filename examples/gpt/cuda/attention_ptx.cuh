/* SPDX-License-Identifier: MIT */
/* The instructions that attention is made of and that C++ has no words for. Shared memory is named by its 32-bit address.
 * Lanes of a fragment, with g = lane / 4 and t = lane % 4:
 *
 *     a, 16 × 16   (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8), two elements of a row in each register
 *     b, 16 × 8    (2t, g), (2t + 8, g), two elements of a column in each register
 *     c, 16 × 8    (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1) */
#ifndef GPT_CUDA_ATTENTION_PTX_CUH
#define GPT_CUDA_ATTENTION_PTX_CUH

#include <stdint.h>

extern __shared__ __align__(128) unsigned char attention_shared[];

__device__ __forceinline__ uint32_t shared_start() { return (uint32_t)__cvta_generic_to_shared(attention_shared); }

/* Four matrices of 8 × 8; lanes 8 i … 8 i + 7 give the addresses of the rows of matrix i. Each lane gets (g, 2t) of each. */
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

/* The same, each matrix transposed: a lane gets rows 2t and 2t + 1 of column g. */
__device__ __forceinline__ void load_transposed(uint32_t (&r)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

/* c += a × b */
__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* c = a × b: what would set c to zero first is saved. */
__device__ __forceinline__ void multiply_first(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, "
        "%10, %10};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}

/* What is computed from x is computed here, each time: the compiler would keep it in registers that loops need more. */
__device__ __forceinline__ void compute_here(int &x) { asm volatile("" : "+r"(x)); }

/* 16 or 8 bytes from global to shared memory, in the background; zeros if not `valid`, and then `from` is not read. */
__device__ __forceinline__ void copy_16(uint32_t to, const void *from, bool valid)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}

__device__ __forceinline__ void copy_8(uint32_t to, const void *from, bool valid)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(valid ? 8 : 0) : "memory");
}

/* Until this thread's copies have arrived. */
__device__ __forceinline__ void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ void shared_store(uint32_t address, uint32_t value)
{
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void shared_store(uint32_t address, float2 value)
{
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(value.x), "f"(value.y) : "memory");
}

__device__ __forceinline__ uint4 shared_load_words(uint32_t address)
{
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

__device__ __forceinline__ float4 shared_load_float4(uint32_t address)
{
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

__device__ __forceinline__ float2 shared_load_float2(uint32_t address)
{
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
    return v;
}

/* 2 to the x; 0 for −inf. Relative error below 2^-22. */
__device__ __forceinline__ float power_of_two(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Two bf16, rounded to nearest; `low` is the one at the lower address. */
__device__ __forceinline__ uint32_t pack(float low, float high)
{
    uint32_t both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

__device__ __forceinline__ float low_of(uint32_t both) { return __uint_as_float(both << 16); }
__device__ __forceinline__ float high_of(uint32_t both) { return __uint_as_float(both & 0xffff0000u); }

__device__ __forceinline__ float from_lane_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }

#endif
