/* SPDX-License-Identifier: MIT */
/* LayerNorm. A block takes a row at a time, a thread eight of its channels: whatever C is, everything of a row stays in
 * registers, and a column's weights and sums belong to one thread. */
#include "kernels.cuh"

enum { FORWARD_BLOCKS = 8192, MOST_THREADS = 512 };

static __global__ void __launch_bounds__(MOST_THREADS) norm_forward(const gpt_norm_forward_args a)
{
    __shared__ float shared[2][32];
    const int v = threadIdx.x, vectors = a.channels / 8;
    const bool active = v < vectors;
    eight w = {}, b = {};
    if (active) w = load8(a.w, v), b = load8(a.b, v);
    for (int row = blockIdx.x; row < a.rows; row += gridDim.x) {
        const size_t at = (size_t)row * vectors + v;
        eight s = {};
        if (active) {
            const size_t x_row = a.tokens ? a.tokens[row] : row, y_row = a.tokens ? row % a.positions : row;
            s = load8(a.x, x_row * vectors + v);
            const eight y = load8(a.y, y_row * vectors + v);
#pragma unroll
            for (int i = 0; i < 8; i++) s.x[i] += y.x[i];
            store8(a.sum, at, s);
        }
        float total = 0.0f, squares = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++) total += s.x[i];
        const float mean = block_sum(total, shared[0]) / a.channels;
        if (active) {
#pragma unroll
            for (int i = 0; i < 8; i++) squares += (s.x[i] - mean) * (s.x[i] - mean);
        }
        const float inverse_sd = rsqrtf(block_sum(squares, shared[1]) / a.channels + 1e-5f);
        if (active) {
#pragma unroll
            for (int i = 0; i < 8; i++) s.x[i] = (s.x[i] - mean) * inverse_sd * w.x[i] + b.x[i];
            store8(a.out, at, s);
        }
        if (threadIdx.x == 0) {
            a.mean[row] = mean;
            a.inverse_sd[row] = inverse_sd;
        }
    }
}

cudaError_t gpt_norm_forward(cudaStream_t stream, const gpt_norm_forward_args *args)
{
    const int blocks = args->rows < FORWARD_BLOCKS ? args->rows : FORWARD_BLOCKS;
    norm_forward<<<blocks, threads_for(args->channels), 0, stream>>>(*args);
    return cudaGetLastError();
}

/* What a thread needs of a row, as it lies in memory: asked for one row ahead, so that the barrier does not stop the loads. */
struct backward_row {
    uint4 dout, x, d;
    float mean, inverse_sd;
};

static __device__ __forceinline__ backward_row fetch(const gpt_norm_backward_args &a, int row_index, int v)
{
    const size_t at = (size_t)row_index * (a.channels / 8) + v;
    backward_row row = {static_cast<const uint4 *>(a.dout)[at],
                        static_cast<const uint4 *>(a.x)[at],
                        {},
                        a.mean[row_index],
                        a.inverse_sd[row_index]};
    if (a.add) row.d = static_cast<const uint4 *>(a.d)[at];
    return row;
}

/* With n = (x − mean) / sd and g = w dout:  dx = (g − mean(g) − n mean(g n)) / sd. */
static __global__ void __launch_bounds__(MOST_THREADS) norm_backward(const gpt_norm_backward_args a)
{
    __shared__ float shared[2][2][32];
    const int v = threadIdx.x, vectors = a.channels / 8;
    const bool active = v < vectors;
    eight w = {}, dw = {}, db = {}, d_sum = {};
    backward_row next = {};
    if (active) w = load8(a.w, v);
    if (active && (int)blockIdx.x < a.rows) next = fetch(a, blockIdx.x, v);
    int turn = 0;
    for (int row = blockIdx.x; row < a.rows; row += gridDim.x, turn ^= 1) {
        const size_t at = (size_t)row * vectors + v;
        const float mean = next.mean, inverse_sd = next.inverse_sd;
        const eight dout = unpack(next.dout);
        eight n = unpack(next.x), d = unpack(next.d);
        if (active && row + (int)gridDim.x < a.rows) next = fetch(a, row + gridDim.x, v);
        float g_sum = 0.0f, gn_sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            n.x[i] = (n.x[i] - mean) * inverse_sd;
            g_sum += w.x[i] * dout.x[i];
            gn_sum += w.x[i] * dout.x[i] * n.x[i];
            dw.x[i] += n.x[i] * dout.x[i];
            db.x[i] += dout.x[i];
        }
        /* Both sums behind one barrier. */
        g_sum = warp_sum(g_sum);
        gn_sum = warp_sum(gn_sum);
        const int warps = blockDim.x / 32, lane = threadIdx.x % 32;
        if (warps > 1) {
            if (lane == 0) {
                shared[turn][0][threadIdx.x / 32] = g_sum;
                shared[turn][1][threadIdx.x / 32] = gn_sum;
            }
            __syncthreads();
            g_sum = warp_sum(lane < warps ? shared[turn][0][lane] : 0.0f);
            gn_sum = warp_sum(lane < warps ? shared[turn][1][lane] : 0.0f);
        }
        if (!active) continue;
        const float g_mean = g_sum / a.channels, gn_mean = gn_sum / a.channels;
#pragma unroll
        for (int i = 0; i < 8; i++) d.x[i] += (w.x[i] * dout.x[i] - g_mean - n.x[i] * gn_mean) * inverse_sd;
        store8(a.d, at, d);
#pragma unroll
        for (int i = 0; i < 8; i++) d_sum.x[i] += d.x[i];
    }
    if (!active) return;
    const size_t first = (size_t)blockIdx.x * 3 * vectors + v;
    store8_float(a.parts, first, dw);
    store8_float(a.parts, first + vectors, db);
    store8_float(a.parts, first + 2 * vectors, d_sum);
}

/* As many blocks as 132 multiprocessors hold at a time, by registers; a number of the shape's alone, so that sums are the same
 * on any GPU. */
int gpt_norm_parts(int channels)
{
    const int blocks = 132 * (65536 / (96 * threads_for(channels)));
    return blocks < GPT_MOST_NORM_PARTS ? blocks : GPT_MOST_NORM_PARTS;
}

cudaError_t gpt_norm_backward(cudaStream_t stream, const gpt_norm_backward_args *args)
{
    norm_backward<<<gpt_norm_parts(args->channels), threads_for(args->channels), 0, stream>>>(*args);
    return cudaGetLastError();
}

cudaError_t gpt_norm_kernels_load(void)
{
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, norm_forward);
    return error != cudaSuccess ? error : cudaFuncGetAttributes(&attributes, norm_backward);
}
