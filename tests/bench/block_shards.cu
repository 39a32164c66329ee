/* SPDX-License-Identifier: MIT */
/* What the bare step does to shards: first values, the cast before a gather, the gradient's norm, AdamW. */
#include "block_cuda.h"
#include "block_parts.cuh"

namespace
{

__global__ void first_values(float *dst, uint64_t begin, uint64_t count, uint32_t layer, uint32_t dim,
                             block_scales scales)
{
    const uint64_t at = (uint64_t)blockIdx.x * THREADS + threadIdx.x;
    if (at >= count) return;
    dst[at] = begin + at < block_elems(dim) ? block_first_value(layer, dim, scales, begin + at) : 0.0f;
}

__global__ void __launch_bounds__(THREADS) square_sums(float *partial, const float4 *x, uint64_t quads)
{
    float total = 0.0f;
    for (uint64_t at = (uint64_t)blockIdx.x * THREADS + threadIdx.x; at < quads; at += (uint64_t)gridDim.x * THREADS) {
        const float4 v = x[at];
        total += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
    total = block_sum(total);
    if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

__global__ void clip(block_record *record, const float *sum, float factor, float max_norm)
{
    record->norm = sqrtf(*sum) * factor;
    record->scale = fminf(1.0f, max_norm / (record->norm + 1e-6f));
}

__global__ void advance(block_record *record)
{
    record->scale = 1.0f;
    record->step += 1.0f;
    record->bias1 = 1.0f - powf(0.9f, record->step);
    record->bias2 = 1.0f - powf(0.999f, record->step);
}

__global__ void __launch_bounds__(THREADS)
    adamw(float4 *w, const float4 *g, float4 *m, float4 *v, uint64_t quads, const block_record *record, float factor)
{
    const uint64_t at = (uint64_t)blockIdx.x * THREADS + threadIdx.x;
    if (at >= quads) return;
    const float bias1 = record->bias1, bias2 = record->bias2, scale = record->scale * factor;
    float4 w4 = w[at], g4 = g[at], m4 = m[at], v4 = v[at];
    float *pw = &w4.x, *pg = &g4.x, *pm = &m4.x, *pv = &v4.x;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float grad = pg[i] * scale;
        pm[i] = 0.9f * pm[i] + 0.1f * grad;
        pv[i] = 0.999f * pv[i] + 0.001f * grad * grad;
        pw[i] -= 1e-4f * (pm[i] / bias1 / (sqrtf(pv[i] / bias2) + 1e-8f) + 0.01f * pw[i]);
    }
    w[at] = w4;
    m[at] = m4;
    v[at] = v4;
}

} // namespace

extern "C" {

void block_load_shard_kernels(void)
{
    const void *const kernels[] = {(const void *)first_values, (const void *)to_bf16, (const void *)square_sums,
                                   (const void *)add_sums,     (const void *)clip,    (const void *)advance,
                                   (const void *)adamw};
    load_kernels(kernels);
}

void block_first_values(float *dst, uint64_t begin, uint64_t count, uint32_t layer, uint32_t dim, cudaStream_t stream)
{
    first_values<<<blocks_for(count), THREADS, 0, stream>>>(dst, begin, count, layer, dim, block_first_scales(dim));
    MUST(cudaGetLastError());
}

void block_cast(void *dst, const float *src, uint64_t count, cudaStream_t stream)
{
    to_bf16<<<blocks_for(count / 4), THREADS, 0, stream>>>((bf16 *)dst, src, count);
    MUST(cudaGetLastError());
}

void block_square_sums(float *partial, const float *x, uint64_t count, cudaStream_t stream)
{
    square_sums<<<BLOCK_SUMS, THREADS, 0, stream>>>(partial, (const float4 *)x, count / 4);
    MUST(cudaGetLastError());
}

void block_add_sums(float *out, const float *partial, uint32_t n, cudaStream_t stream)
{
    add_sums<<<1, THREADS, 0, stream>>>(out, partial, n * BLOCK_SUMS, 1.0f);
    MUST(cudaGetLastError());
}

void block_clip(block_record *record, const float *sum, float factor, float max_norm, cudaStream_t stream)
{
    clip<<<1, 1, 0, stream>>>(record, sum, factor, max_norm);
    MUST(cudaGetLastError());
}

void block_advance(block_record *record, cudaStream_t stream)
{
    advance<<<1, 1, 0, stream>>>(record);
    MUST(cudaGetLastError());
}

void block_adamw(float *master, const float *gradient, float *m, float *v, uint64_t count, const block_record *record,
                 float factor, cudaStream_t stream)
{
    adamw<<<blocks_for(count / 4), THREADS, 0, stream>>>((float4 *)master, (const float4 *)gradient, (float4 *)m,
                                                         (float4 *)v, count / 4, record, factor);
    MUST(cudaGetLastError());
}

} // extern "C"
