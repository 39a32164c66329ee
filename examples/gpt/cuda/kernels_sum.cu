/* SPDX-License-Identifier: MIT */
/* Sums over rows, in two stages: blocks leave partial sums, and one block a column group adds them up in their order. */
#include "kernels.cuh"

enum { SIDE = 32, COLUMN_ROWS = 8, MEAN_THREADS = 1024 };

/* Block (32, 32): 32 columns; thread (x, y) takes parts y, y + 32, … */
static __global__ void __launch_bounds__(SIDE *SIDE) sum_parts(const gpt_sum_parts_args a)
{
    __shared__ float shared[SIDE][SIDE + 1];
    const int columns = a.n_sums * a.width, column = blockIdx.x * SIDE + threadIdx.x;
    float sum = 0.0f;
    if (column < columns) {
#pragma unroll 8
        for (int part = threadIdx.y; part < a.n_parts; part += SIDE) sum += a.parts[(size_t)part * columns + column];
    }
    shared[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || column >= columns) return;
    sum = 0.0f;
#pragma unroll
    for (int y = 0; y < SIDE; y++) sum += shared[y][threadIdx.x];
    const int which = column / a.width;
    float *out = which == 0 ? a.outs[0] : which == 1 ? a.outs[1] : a.outs[2];
    const bool add = which == 0 ? a.adds[0] : which == 1 ? a.adds[1] : a.adds[2];
    if (!out) return;
    out += column % a.width;
    *out = add ? *out + sum : sum;
}

cudaError_t gpt_sum_parts(cudaStream_t stream, const gpt_sum_parts_args *args)
{
    const int columns = args->n_sums * args->width;
    sum_parts<<<(columns + SIDE - 1) / SIDE, dim3(SIDE, SIDE), 0, stream>>>(*args);
    return cudaGetLastError();
}

/* Block (32, 8): 256 columns, eight a thread; rows 8 by + y, and on by the grid's stride. */
static __global__ void __launch_bounds__(SIDE *COLUMN_ROWS)
    column_sums(float *parts, const void *x, int rows, int vectors)
{
    __shared__ float shared[COLUMN_ROWS][SIDE * 8 + 4];
    const int v = blockIdx.x * SIDE + threadIdx.x;
    eight sum = {};
    if (v < vectors) {
#pragma unroll 4
        for (int row = blockIdx.y * COLUMN_ROWS + threadIdx.y; row < rows; row += GPT_COLUMN_PARTS * COLUMN_ROWS) {
            const eight one = load8(x, (size_t)row * vectors + v);
#pragma unroll
            for (int i = 0; i < 8; i++) sum.x[i] += one.x[i];
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++) shared[threadIdx.y][threadIdx.x * 8 + i] = sum.x[i];
    __syncthreads();
    const int thread = threadIdx.y * SIDE + threadIdx.x, column = blockIdx.x * SIDE * 8 + thread;
    if (column >= vectors * 8) return;
    float total = 0.0f;
#pragma unroll
    for (int y = 0; y < COLUMN_ROWS; y++) total += shared[y][thread];
    parts[(size_t)blockIdx.y * vectors * 8 + column] = total;
}

cudaError_t gpt_column_sums(cudaStream_t stream, float *parts, const void *x, int rows, int width)
{
    const dim3 grid((width / 8 + SIDE - 1) / SIDE, GPT_COLUMN_PARTS);
    column_sums<<<grid, dim3(SIDE, COLUMN_ROWS), 0, stream>>>(parts, x, rows, width / 8);
    return cudaGetLastError();
}

static __global__ void __launch_bounds__(MEAN_THREADS) mean_of(float *mean, const float *x, int n)
{
    __shared__ float shared[32];
    float sum = 0.0f;
#pragma unroll 4
    for (int i = threadIdx.x; i < n; i += MEAN_THREADS) sum += x[i];
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) *mean = sum / n;
}

cudaError_t gpt_mean(cudaStream_t stream, float *mean, const float *x, int n)
{
    mean_of<<<1, MEAN_THREADS, 0, stream>>>(mean, x, n);
    return cudaGetLastError();
}

cudaError_t gpt_sum_kernels_load(void)
{
    cudaFuncAttributes attributes;
    cudaError_t error = cudaFuncGetAttributes(&attributes, sum_parts);
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, column_sums);
    return error != cudaSuccess ? error : cudaFuncGetAttributes(&attributes, mean_of);
}
