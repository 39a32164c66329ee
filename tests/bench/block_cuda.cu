/* SPDX-License-Identifier: MIT */
/* The kernels of compute, and who launches which; block_gemm.c has the GEMMs, block_shards.cu what is done to shards. */
#include "block_cuda.h"

#include <cuda_bf16.h>
#include <math.h>

#include "block_gemm.h"
#include "block_parts.cuh"

namespace
{

struct alignas(16) pack { /* eight neighbours, one load */
    __nv_bfloat162 pair[4];
};

constexpr int SUM_COLUMNS = 256, SUM_ROWS = 8, LOSS_BLOCKS = 1024;

__device__ float gelu(float x) { return 0.5f * x * (1.0f + tanhf(0.7978845608f * (x + 0.044715f * x * x * x))); }

__device__ float gelu_slope(float x)
{
    const float t = tanhf(0.7978845608f * (x + 0.044715f * x * x * x));
    return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * 0.7978845608f * (1.0f + 0.134145f * x * x);
}

struct gelu_of {
    __device__ float operator()(float x, float) const { return gelu(x); }
};
struct gelu_back { /* gradient, pre-activation */
    __device__ float operator()(float g, float u) const { return g * gelu_slope(u); }
};
struct sum_of {
    __device__ float operator()(float a, float b) const { return a + b; }
};

/* dst = f(a, b), eight elements a thread; dst may be a. */
template <class F>
__global__ void __launch_bounds__(THREADS) map_bf16(bf16 *dst, const bf16 *a, const bf16 *b, uint64_t count, F f)
{
    const uint64_t at = ((uint64_t)blockIdx.x * THREADS + threadIdx.x) * 8;
    if (at >= count) return;
    pack x = *(const pack *)(a + at), y = x;
    if (b != nullptr) y = *(const pack *)(b + at);
    for (int i = 0; i < 4; i++) {
        const float2 p = __bfloat1622float2(x.pair[i]), q = __bfloat1622float2(y.pair[i]);
        x.pair[i] = __floats2bfloat162_rn(f(p.x, q.x), f(p.y, q.y));
    }
    *(pack *)(dst + at) = x;
}

/* partial[chunk][column] = the sum of the chunk's rows of x, (rows, columns). With a pre-activation, x is a gradient behind
 * GELU: it goes through GELU's backward first, in place. A block: 32 × 8 columns, 8 rows at a time. */
template <bool GELU>
__global__ void __launch_bounds__(THREADS)
    column_sums(float *partial, bf16 *x, const bf16 *pre, uint64_t rows, uint32_t columns, uint64_t chunk)
{
    __shared__ float sums[SUM_ROWS][SUM_COLUMNS];
    const uint32_t column = blockIdx.x * SUM_COLUMNS + threadIdx.x * 8;
    const uint64_t first = blockIdx.y * chunk, end = first + chunk < rows ? first + chunk : rows;
    float total[8] = {0};
    if (column < columns) {
#pragma unroll 4
        for (uint64_t row = first + threadIdx.y; row < end; row += SUM_ROWS) {
            pack v = *(const pack *)(x + row * columns + column);
            if (GELU) {
                const pack u = *(const pack *)(pre + row * columns + column);
                for (int i = 0; i < 4; i++) {
                    const float2 g = __bfloat1622float2(v.pair[i]), p = __bfloat1622float2(u.pair[i]);
                    v.pair[i] = __floats2bfloat162_rn(g.x * gelu_slope(p.x), g.y * gelu_slope(p.y));
                }
                *(pack *)(x + row * columns + column) = v;
            }
            for (int i = 0; i < 4; i++) {
                const float2 p = __bfloat1622float2(v.pair[i]);
                total[2 * i] += p.x;
                total[2 * i + 1] += p.y;
            }
        }
    }
    for (int i = 0; i < 8; i++) sums[threadIdx.y][threadIdx.x * 8 + i] = total[i];
    __syncthreads();
    const uint32_t mine = threadIdx.y * 32 + threadIdx.x;
    float sum = 0.0f;
    for (int i = 0; i < SUM_ROWS; i++) sum += sums[i][mine];
    if (blockIdx.x * SUM_COLUMNS + mine < columns)
        partial[(uint64_t)blockIdx.y * columns + blockIdx.x * SUM_COLUMNS + mine] = sum;
}

/* out[column] = Σ partial[chunk][column]; a block: 32 columns, 8 chunks at a time. */
__global__ void __launch_bounds__(THREADS)
    add_chunks(float *out, const float *partial, uint32_t columns, uint32_t chunks)
{
    __shared__ float sums[8][33];
    const uint32_t column = blockIdx.x * 32 + threadIdx.x;
    float total = 0.0f;
    if (column < columns)
        for (uint32_t i = threadIdx.y; i < chunks; i += 8) total += partial[(uint64_t)i * columns + column];
    sums[threadIdx.y][threadIdx.x] = total;
    __syncthreads();
    if (threadIdx.y != 0 || column >= columns) return;
    for (int i = 1; i < 8; i++) total += sums[i][threadIdx.x];
    out[column] = total;
}

/* ---- The loss, an operation a kernel: PyTorch's float(), pow, mean, and their backward. Four elements a thread. ---- */

__global__ void to_float(float *dst, const bf16 *src, uint64_t count)
{
    const uint64_t at = ((uint64_t)blockIdx.x * THREADS + threadIdx.x) * 4;
    if (at >= count) return;
    const float2 a = __bfloat1622float2(*(const __nv_bfloat162 *)(src + at)),
                 b = __bfloat1622float2(*(const __nv_bfloat162 *)(src + at + 2));
    *(float4 *)(dst + at) = make_float4(a.x, a.y, b.x, b.y);
}

/* dst = factor × a × b; NULL is 1. */
__global__ void product(float *dst, const float *a, const float *b, float factor, uint64_t count)
{
    const uint64_t at = ((uint64_t)blockIdx.x * THREADS + threadIdx.x) * 4;
    if (at >= count) return;
    float4 x = make_float4(factor, factor, factor, factor);
    if (a != nullptr) {
        const float4 p = *(const float4 *)(a + at);
        x = make_float4(x.x * p.x, x.y * p.y, x.z * p.z, x.w * p.w);
    }
    if (b != nullptr) {
        const float4 q = *(const float4 *)(b + at);
        x = make_float4(x.x * q.x, x.y * q.y, x.z * q.z, x.w * q.w);
    }
    *(float4 *)(dst + at) = x;
}

__global__ void __launch_bounds__(THREADS) partial_sums(float *partial, const float *x, uint64_t count)
{
    float total = 0.0f;
    for (uint64_t at = ((uint64_t)blockIdx.x * THREADS + threadIdx.x) * 4; at < count;
         at += (uint64_t)LOSS_BLOCKS * THREADS * 4) {
        const float4 v = *(const float4 *)(x + at);
        total += (v.x + v.y) + (v.z + v.w);
    }
    total = block_sum(total);
    if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

/* The whole loss in one pass: partial sums of y², and dy = 2 y / count. */
__global__ void __launch_bounds__(THREADS)
    square_loss(float *partial, bf16 *dy, const bf16 *y, float factor, uint64_t count)
{
    float total = 0.0f;
    for (uint64_t at = ((uint64_t)blockIdx.x * THREADS + threadIdx.x) * 8; at < count;
         at += (uint64_t)LOSS_BLOCKS * THREADS * 8) {
        pack v = *(const pack *)(y + at);
        for (int i = 0; i < 4; i++) {
            const float2 p = __bfloat1622float2(v.pair[i]);
            total += p.x * p.x + p.y * p.y;
            v.pair[i] = __floats2bfloat162_rn(factor * p.x, factor * p.y);
        }
        *(pack *)(dy + at) = v;
    }
    total = block_sum(total);
    if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

__global__ void input_values(bf16 *dst, uint32_t seed, uint64_t count)
{
    const uint64_t at = (uint64_t)blockIdx.x * THREADS + threadIdx.x;
    if (at < count) dst[at] = __float2bfloat16(block_noise(seed, at) * 1.7320508f); /* variance 1 */
}

template <class T> T *take(uint64_t count, uint64_t *bytes)
{
    void *ptr = nullptr;
    MUST(cudaMalloc(&ptr, count * sizeof(T)));
    MUST(cudaMemset(ptr, 0, count * sizeof(T)));
    *bytes += count * sizeof(T);
    return (T *)ptr;
}

} // namespace

struct block_math {
    block_math_config config;
    uint64_t tokens, bytes;
    block_gemms *gemms;
    bf16 **x, **u, **h; /* x[layers + 1] (tokens, d); u, h (tokens, 4d): before and behind GELU */
    bf16 *z, *dy, *dh;  /* a block's output before the residual, and gradients */
    float *y32, *square, *g32;
    float *partial, *loss;
};

extern "C" {

block_scales block_first_scales(uint32_t dim)
{
    return block_scales{1.0f / sqrtf((float)dim), 0.5f / sqrtf((float)dim)};
}

static void load_math_kernels(void)
{
    const void *const kernels[] = {(const void *)map_bf16<gelu_of>,
                                   (const void *)map_bf16<gelu_back>,
                                   (const void *)map_bf16<sum_of>,
                                   (const void *)column_sums<true>,
                                   (const void *)column_sums<false>,
                                   (const void *)add_chunks,
                                   (const void *)to_float,
                                   (const void *)product,
                                   (const void *)to_bf16,
                                   (const void *)partial_sums,
                                   (const void *)square_loss,
                                   (const void *)add_sums,
                                   (const void *)input_values};
    load_kernels(kernels);
}

block_math *block_math_create(const block_math_config *config)
{
    block_math *m = (block_math *)calloc(1, sizeof *m);
    load_math_kernels();
    m->config = *config;
    const uint64_t d = config->dim, n = config->max_tokens, layers = config->layers;
    m->x = (bf16 **)calloc(3 * layers + 1, sizeof *m->x);
    m->u = m->x + layers + 1;
    m->h = m->u + layers;
    for (uint64_t l = 0; l <= layers; l++) m->x[l] = take<bf16>(n * d, &m->bytes);
    for (uint64_t l = 0; l < layers; l++) {
        m->u[l] = take<bf16>(n * 4 * d, &m->bytes);
        m->h[l] = take<bf16>(n * 4 * d, &m->bytes);
    }
    m->z = take<bf16>(n * d, &m->bytes);
    m->dy = take<bf16>(n * d, &m->bytes);
    m->dh = take<bf16>(n * 4 * d, &m->bytes);
    if (!config->fused) {
        m->y32 = take<float>(n * d, &m->bytes);
        m->square = take<float>(n * d, &m->bytes);
        m->g32 = take<float>(n * d, &m->bytes);
    }
    m->partial = take<float>(BLOCK_MOST_CHUNKS * 4 * d, &m->bytes);
    m->loss = take<float>(1, &m->bytes);
    m->gemms = block_gemms_create(config->dim, config->fused, config->stream);
    m->bytes += BLOCK_WORKSPACE;
    MUST(cudaDeviceSynchronize()); /* take's memsets are on the default stream: our stream would not wait for them */
    return m;
}

void block_math_destroy(block_math *m)
{
    block_gemms_destroy(m->gemms);
    for (uint64_t i = 0; i < 3 * (uint64_t)m->config.layers + 1; i++) MUST(cudaFree(m->x[i]));
    void *rest[] = {m->z, m->dy, m->dh, m->y32, m->square, m->g32, m->partial, m->loss};
    for (void *ptr : rest) MUST(cudaFree(ptr));
    free(m->x);
    free(m);
}

void block_math_set_tokens(block_math *m, uint64_t tokens)
{
    m->tokens = tokens;
    block_gemms_set_tokens(m->gemms, tokens);
    const uint64_t count = tokens * m->config.dim;
    input_values<<<blocks_for(count), THREADS, 0, m->config.stream>>>(m->x[0], 0x5eed0000u + m->config.rank, count);
    MUST(cudaGetLastError());
    MUST(cudaStreamSynchronize(m->config.stream));
}

uint64_t block_math_bytes(const block_math *m) { return m->bytes; }
const float *block_math_loss(const block_math *m) { return m->loss; }

/* Column sums of x into out; with pre, behind GELU's backward. */
static void sum_columns(block_math *m, float *out, bf16 *x, const bf16 *pre, uint32_t columns)
{
    const uint32_t across = (columns + SUM_COLUMNS - 1) / SUM_COLUMNS;
    uint64_t chunks = (m->tokens + SUM_ROWS - 1) / SUM_ROWS;
    const uint64_t most = 1056 / across > 1 ? 1056 / across : 1; /* eight blocks a multiprocessor of a large GPU */
    if (chunks > most) chunks = most;
    if (chunks > BLOCK_MOST_CHUNKS) chunks = BLOCK_MOST_CHUNKS;
    const uint64_t chunk = (m->tokens + chunks - 1) / chunks;
    chunks = (m->tokens + chunk - 1) / chunk;
    const dim3 grid(across, (unsigned)chunks), threads(32, SUM_ROWS);
    if (pre) column_sums<true><<<grid, threads, 0, m->config.stream>>>(m->partial, x, pre, m->tokens, columns, chunk);
    else column_sums<false><<<grid, threads, 0, m->config.stream>>>(m->partial, x, nullptr, m->tokens, columns, chunk);
    add_chunks<<<(columns + 31) / 32, threads, 0, m->config.stream>>>(out, m->partial, columns, (uint32_t)chunks);
    MUST(cudaGetLastError());
}

void block_forward(block_math *m, uint32_t l, const void *const w[BLOCK_PARAMS])
{
    const uint64_t narrow = m->tokens * m->config.dim, wide = 4 * narrow;
    cudaStream_t s = m->config.stream;
    if (m->config.fused) {
        block_gemm(m->gemms, BLOCK_GEMM_UP, w[0], m->x[l], nullptr, m->h[l], w[1], m->u[l]);
        block_gemm(m->gemms, BLOCK_GEMM_DOWN, w[2], m->h[l], m->x[l], m->x[l + 1], w[3], nullptr);
        return;
    }
    block_gemm(m->gemms, BLOCK_GEMM_UP, w[0], m->x[l], nullptr, m->u[l], w[1], nullptr);
    map_bf16<<<blocks_for(wide / 8), THREADS, 0, s>>>(m->h[l], m->u[l], (const bf16 *)nullptr, wide, gelu_of());
    block_gemm(m->gemms, BLOCK_GEMM_DOWN, w[2], m->h[l], nullptr, m->z, w[3], nullptr);
    map_bf16<<<blocks_for(narrow / 8), THREADS, 0, s>>>(m->x[l + 1], m->x[l], m->z, narrow, sum_of());
    MUST(cudaGetLastError());
}

void block_loss(block_math *m)
{
    const uint64_t count = m->tokens * m->config.dim;
    const unsigned quads = blocks_for(count / 4);
    const float mean = 1.0f / (float)count;
    cudaStream_t s = m->config.stream;
    const bf16 *y = m->x[m->config.layers];
    if (m->config.fused) {
        square_loss<<<LOSS_BLOCKS, THREADS, 0, s>>>(m->partial, m->dy, y, 2.0f * mean, count);
        add_sums<<<1, THREADS, 0, s>>>(m->loss, m->partial, LOSS_BLOCKS, mean);
    } else {
        to_float<<<quads, THREADS, 0, s>>>(m->y32, y, count);
        product<<<quads, THREADS, 0, s>>>(m->square, m->y32, m->y32, 1.0f, count);
        partial_sums<<<LOSS_BLOCKS, THREADS, 0, s>>>(m->partial, m->square, count);
        add_sums<<<1, THREADS, 0, s>>>(m->loss, m->partial, LOSS_BLOCKS, mean);
        product<<<quads, THREADS, 0, s>>>(m->g32, nullptr, nullptr, mean, count);      /* mean's backward */
        product<<<quads, THREADS, 0, s>>>(m->square, m->y32, nullptr, 1.0f, count);    /* pow's: y to the power of 1, */
        product<<<quads, THREADS, 0, s>>>(m->square, m->square, nullptr, 2.0f, count); /* times 2, */
        product<<<quads, THREADS, 0, s>>>(m->g32, m->g32, m->square, 1.0f, count);     /* times the gradient */
        to_bf16<<<quads, THREADS, 0, s>>>(m->dy, m->g32, count);
    }
    MUST(cudaGetLastError());
}

void block_backward(block_math *m, uint32_t l, const void *const w[BLOCK_PARAMS], float *const g[BLOCK_PARAMS])
{
    const uint32_t d = m->config.dim;
    const uint64_t narrow = m->tokens * d, wide = 4 * narrow;
    cudaStream_t s = m->config.stream;
    sum_columns(m, g[3], m->dy, nullptr, d);
    block_gemm(m->gemms, BLOCK_GEMM_DOWN_WEIGHT, m->h[l], m->dy, nullptr, g[2], nullptr, nullptr);
    block_gemm(m->gemms, BLOCK_GEMM_DOWN_INPUT, w[2], m->dy, nullptr, m->dh, nullptr, nullptr);
    if (m->config.fused) {
        sum_columns(m, g[1], m->dh, m->u[l], 4 * d);
    } else {
        map_bf16<<<blocks_for(wide / 8), THREADS, 0, s>>>(m->dh, m->dh, m->u[l], wide, gelu_back());
        sum_columns(m, g[1], m->dh, nullptr, 4 * d);
    }
    block_gemm(m->gemms, BLOCK_GEMM_UP_WEIGHT, m->x[l], m->dh, nullptr, g[0], nullptr, nullptr);
    if (l == 0) return;
    if (m->config.fused) {
        block_gemm(m->gemms, BLOCK_GEMM_UP_INPUT, w[0], m->dh, m->dy, m->dy, nullptr, nullptr);
        return;
    }
    block_gemm(m->gemms, BLOCK_GEMM_UP_INPUT, w[0], m->dh, nullptr, m->z, nullptr, nullptr);
    map_bf16<<<blocks_for(narrow / 8), THREADS, 0, s>>>(m->dy, m->dy, m->z, narrow, sum_of());
    MUST(cudaGetLastError());
}

} // extern "C"
