/* SPDX-License-Identifier: MIT */
/* Backward of the embedding. Rows of one token are brought together by the host, which sorts the batch (batch.h); a token with
 * many rows is summed in pieces, and its pieces in their order: no atomic, no order that could differ. */
#include "kernels.cuh"

enum { MOST_THREADS = 512 };

static __device__ void add_onto(float *array, size_t at, const eight &sum)
{
    eight total = load8_float(array, at);
#pragma unroll
    for (int i = 0; i < 8; i++) total.x[i] += sum.x[i];
    store8_float(array, at, total);
}

static __global__ void __launch_bounds__(MOST_THREADS) token_pieces(const gpt_embed_backward_args a)
{
    const int v = threadIdx.x, vectors = a.channels / 8;
    if ((int)blockIdx.x >= a.counts[0] || v >= vectors) return;
    const gpt_token_piece piece = a.pieces[blockIdx.x];
    eight sum = {};
#pragma unroll 4
    for (int i = 0; i < piece.count; i++) {
        const eight one = load8(a.d, (size_t)a.order[piece.begin + i] * vectors + v);
#pragma unroll
        for (int j = 0; j < 8; j++) sum.x[j] += one.x[j];
    }
    if (piece.part < 0) add_onto(a.dwte, (size_t)piece.token * vectors + v, sum);
    else store8_float(a.parts, (size_t)piece.part * vectors + v, sum);
}

static __global__ void __launch_bounds__(MOST_THREADS) token_merges(const gpt_embed_backward_args a)
{
    const int v = threadIdx.x, vectors = a.channels / 8;
    if ((int)blockIdx.x >= a.counts[1] || v >= vectors) return;
    const gpt_token_merge merge = a.merges[blockIdx.x];
    eight sum = {};
#pragma unroll 4
    for (int i = 0; i < merge.count; i++) {
        const eight one = load8_float(a.parts, (size_t)(merge.first + i) * vectors + v);
#pragma unroll
        for (int j = 0; j < 8; j++) sum.x[j] += one.x[j];
    }
    add_onto(a.dwte, (size_t)merge.token * vectors + v, sum);
}

/* A block a position. */
static __global__ void __launch_bounds__(MOST_THREADS) position_gradients(const gpt_embed_backward_args a)
{
    const int v = threadIdx.x, vectors = a.channels / 8;
    if (v >= vectors) return;
    eight sum = {};
#pragma unroll 4
    for (int b = 0; b < a.sequences; b++) {
        const eight one = load8(a.d, ((size_t)b * a.positions + blockIdx.x) * vectors + v);
#pragma unroll
        for (int j = 0; j < 8; j++) sum.x[j] += one.x[j];
    }
    const size_t at = (size_t)blockIdx.x * vectors + v;
    if (a.add_dwpe) add_onto(a.dwpe, at, sum);
    else store8_float(a.dwpe, at, sum);
}

cudaError_t gpt_embed_backward(cudaStream_t stream, const gpt_embed_backward_args *args)
{
    const int threads = threads_for(args->channels);
    position_gradients<<<args->positions, threads, 0, stream>>>(*args);
    token_pieces<<<args->most_pieces, threads, 0, stream>>>(*args);
    token_merges<<<args->most_merges, threads, 0, stream>>>(*args);
    return cudaGetLastError();
}

cudaError_t gpt_embed_kernels_load(void)
{
    cudaFuncAttributes attributes;
    cudaError_t error = cudaFuncGetAttributes(&attributes, token_pieces);
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, token_merges);
    return error != cudaSuccess ? error : cudaFuncGetAttributes(&attributes, position_gradients);
}
