/* SPDX-License-Identifier: MIT */
/* Forward, and the interface. A block owns 128 queries of one head (64 where H is 128) and goes through the keys up to its
 * own diagonal, 64 at a time, the next tile on its way while one is worked on. Softmax is online: a row's greatest score so
 * far is taken from every score; when it grows, what was summed before shrinks by the difference. */
#include <math.h>

#include "attention.h"
#include "attention_tile.cuh"

/* A warp's own rows: their q, and what has been summed. A lane holds two rows of each 16: g and g + 8. */
template <int H, int M> struct forward_rows {
    uint32_t q[M][H / 16][4];
    float out[M][H / 8][4];
    float most[M][2]; /* greatest score so far */
    float sum[M][2];  /* of exponentials: this lane's columns only */
};

/* Scores of 64 keys, as [16 keys][M][8 keys][4]. MASKED: a key after the query is −∞. `ahead` is the lane's first query
 * less its first key, `warp_last` the warp's last query less the tile's first key. */
template <int H, int M, bool MASKED>
__device__ __forceinline__ void forward_scores(float (&scores)[4][M][2][4], const uint32_t (&q)[M][H / 16][4],
                                               uint32_t keys, lane_offsets offsets, int ahead, int warp_last)
{
#pragma unroll
    for (int k = 0; k < H / 16; k++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
            if (MASKED && 16 * c > warp_last) continue;
            uint32_t b[4];
            load_matrices(b, square<H>(keys, offsets.by_columns, 16 * c, k));
#pragma unroll
            for (int m = 0; m < M; m++) {
                multiply_step(k == 0, scores[c][m][0], q[m][k], b[0], b[1]);
                multiply_step(k == 0, scores[c][m][1], q[m][k], b[2], b[3]);
            }
        }
    if constexpr (MASKED) {
#pragma unroll
        for (int c = 0; c < 4; c++)
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int i = 0; i < 8; i++)
                    if (16 * c + i / 4 * 8 + i % 2 - 16 * m - i % 4 / 2 * 8 > ahead)
                        scores[c][m][i / 4][i % 4] = -INFINITY;
    }
}

/* Scores become weights; `most` and `sum` go on, and `out` shrinks to the new `most`. */
template <int H, int M>
__device__ __forceinline__ void forward_softmax(forward_rows<H, M> &rows, float (&scores)[4][M][2][4], float scale_log2)
{
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float most = rows.most[m][half];
#pragma unroll
            for (int i = 0; i < 16; i++) most = fmaxf(most, scores[i / 4][m][i / 2 % 2][2 * half + i % 2]);
            most = fmaxf(most, from_lane_xor(most, 1));
            most = fmaxf(most, from_lane_xor(most, 2));
            const float shrink = power_of_two((rows.most[m][half] - most) * scale_log2), base = most * scale_log2;
            rows.most[m][half] = most;
            float sum = 0;
#pragma unroll
            for (int i = 0; i < 16; i++) {
                float &score = scores[i / 4][m][i / 2 % 2][2 * half + i % 2];
                score = power_of_two(fmaf(score, scale_log2, -base));
                sum += score;
            }
            rows.sum[m][half] = fmaf(rows.sum[m][half], shrink, sum);
#pragma unroll
            for (int n = 0; n < H / 8; n++) {
                rows.out[m][n][2 * half] *= shrink;
                rows.out[m][n][2 * half + 1] *= shrink;
            }
        }
}

template <int H, int M, bool MASKED>
__device__ __forceinline__ void forward_tile(forward_rows<H, M> &rows, uint32_t keys, uint32_t values,
                                             lane_offsets offsets, float scale_log2, int ahead, int warp_last)
{
    float scores[4][M][2][4] = {};
    forward_scores<H, M, MASKED>(scores, rows.q, keys, offsets, ahead, warp_last);
    forward_softmax<H, M>(rows, scores, scale_log2);
#pragma unroll
    for (int c = 0; c < 4; c++) {
        if (MASKED && 16 * c > warp_last) continue;
        uint32_t weights[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) pack_weights(weights[m], scores[c][m][0], scores[c][m][1]);
        multiply_columns<H, M>(rows.out, weights, values, offsets, 16 * c);
    }
}

/* out and lse of the warp's rows, of which `valid` exist. Their place in shared memory is free: q is in registers. */
template <int H, int M>
__device__ __forceinline__ void forward_store(const attention_problem &p, const attention_place<H> &place, int first,
                                              int valid, uint32_t shared_rows, const forward_rows<H, M> &rows)
{
    const int lane = (int)threadIdx.x % 32, g = lane / 4;
    float factors[M][2];
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = rows.sum[m][half];
            sum += from_lane_xor(sum, 1);
            sum += from_lane_xor(sum, 2);
            factors[m][half] = 1 / sum;
            const int row = 16 * m + 8 * half + g;
            if (lane % 4 == 0 && row < valid)
                p.lse[place.stat_at + first + row] = rows.most[m][half] * p.scale + logf(sum);
        }
    own_store<H, M>(p.out + place.out_at + (ptrdiff_t)first * place.channels, place.channels, valid, shared_rows,
                    rows.out, factors);
}

template <int H> struct forward_shared {
    using own = attention_own<H>;
    static constexpr int stage_bytes = 2 * own::other_bytes; /* k and v */
    static constexpr int bytes = own::bytes + 2 * stage_bytes;
};

template <int H>
__global__ void __launch_bounds__(ATTENTION_THREADS, 2) forward_kernel(const __grid_constant__ attention_problem p)
{
    using own = attention_own<H>;
    constexpr int M = own::m;
    const int T = p.positions, blocks = (T + own::rows - 1) / own::rows;
    const attention_place<H> place(p, blocks);
    /* The longest first. */
    const int first = (blocks - 1 - place.block) * own::rows,
              tiles = (min(T, first + own::rows) + 63) / ATTENTION_OTHER;
    const uint16_t *const q = p.qkv + place.qkv_at, *const k = q + place.channels, *const v = k + place.channels;
    const uint32_t queries = shared_start(), stages = queries + own::bytes;
    const int lane = (int)threadIdx.x % 32, warp_row = (int)threadIdx.x / 32 * own::warp_rows,
              warp_first = first + warp_row;
    const lane_offsets offsets = lane_offsets_of<H>(lane);
    const uint32_t own_rows = queries + (uint32_t)(warp_row * 2 * H);

    const auto load = [&](int tile) {
        const uint32_t stage = stages + (uint32_t)(tile % 2 * forward_shared<H>::stage_bytes);
        const int key = tile * ATTENTION_OTHER;
        const ptrdiff_t at = (ptrdiff_t)key * place.width;
        tile_load<H, ATTENTION_OTHER>(stage, k + at, place.width, T - key);
        tile_load<H, ATTENTION_OTHER>(stage + own::other_bytes, v + at, place.width, T - key);
    };
    tile_load<H, own::rows>(queries, q + (ptrdiff_t)first * place.width, place.width, T - first);
    load(0);

    forward_rows<H, M> rows = {};
#pragma unroll
    for (int m = 0; m < M; m++) rows.most[m][0] = rows.most[m][1] = -INFINITY;
    for (int tile = 0; tile < tiles; tile++) {
        /* The tile is here, and nobody reads the other stage any more. */
        copies_wait();
        __syncthreads();
        if (tile == 0) own_fragments<H, M>(rows.q, own_rows, offsets);
        if (tile + 1 < tiles) load(tile + 1);
        const uint32_t keys = stages + (uint32_t)(tile % 2 * forward_shared<H>::stage_bytes),
                       values = keys + own::other_bytes;
        const int lead = warp_first - tile * ATTENTION_OTHER, warp_last = lead + own::warp_rows - 1;
        const int ahead = lead + lane / 4 - lane % 4 * 2;
        if (lead >= ATTENTION_OTHER - 1)
            forward_tile<H, M, false>(rows, keys, values, offsets, p.scale_log2, ahead, warp_last);
        else if (warp_last >= 0) forward_tile<H, M, true>(rows, keys, values, offsets, p.scale_log2, ahead, warp_last);
    }
    forward_store<H, M>(p, place, warp_first, T - warp_first, own_rows, rows);
}

cudaError_t attention_kernel_init(const void *kernel, size_t bytes)
{
    const cudaError_t result = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    if (result != cudaSuccess) return result;
    return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
}

cudaError_t attention_kernel_launch(const void *kernel, size_t bytes, long long blocks, cudaStream_t stream,
                                    const attention_problem *problem)
{
    if (blocks > INT32_MAX) return cudaErrorInvalidValue;
    void *arguments[] = {(void *)problem};
    return cudaLaunchKernel(kernel, dim3((unsigned)blocks), dim3(ATTENTION_THREADS), arguments, bytes, stream);
}

template <int H> static cudaError_t forward_init()
{
    return attention_kernel_init((const void *)forward_kernel<H>, forward_shared<H>::bytes);
}

template <int H> static cudaError_t forward_launch(cudaStream_t stream, const attention_problem *problem, int sequences)
{
    const int rows = attention_own<H>::rows, blocks = (problem->positions - 1) / rows + 1;
    return attention_kernel_launch((const void *)forward_kernel<H>, forward_shared<H>::bytes,
                                   (long long)sequences * problem->heads * blocks, stream, problem);
}

static bool usable(const void *pointer) { return pointer && (uintptr_t)pointer % 16 == 0; }

/* False: not a shape or a pointer that forward can take; backward takes no others. */
static bool problem_of(attention_problem *problem, const gpt_attention_args *args)
{
    const int H = args->head_dim;
    if (args->sequences < 1 || args->positions < 1 || args->heads < 1 || (H != 32 && H != 64 && H != 128)) return false;
    /* What lies within a tile, and positions, are ints inside the kernels. */
    if (args->heads > INT32_MAX / (256 * 3 * H) || args->positions > INT32_MAX - 256) return false;
    if (args->sequences > INT32_MAX / args->heads) return false;
    if (!usable(args->qkv) || !usable(args->out) || !args->lse || (uintptr_t)args->lse % 4 != 0) return false;
    *problem = {};
    problem->qkv = (const uint16_t *)args->qkv;
    problem->out = (uint16_t *)args->out;
    problem->lse = args->lse;
    problem->positions = args->positions;
    problem->heads = args->heads;
    problem->scale = 1 / sqrtf((float)H);
    problem->scale_log2 = problem->scale * 1.44269504f;
    return true;
}

size_t gpt_attention_lse_bytes(const gpt_attention_args *args)
{
    return (size_t)args->sequences * (size_t)args->heads * (size_t)args->positions * sizeof(float);
}

size_t gpt_attention_scratch_bytes(const gpt_attention_args *args) { return 2 * gpt_attention_lse_bytes(args); }

cudaError_t gpt_attention_init(void)
{
    cudaError_t result = forward_init<32>();
    if (result == cudaSuccess) result = forward_init<64>();
    if (result == cudaSuccess) result = forward_init<128>();
    return result == cudaSuccess ? attention_backward_init() : result;
}

cudaError_t gpt_attention_forward(cudaStream_t stream, const gpt_attention_args *args)
{
    attention_problem problem;
    if (!problem_of(&problem, args)) return cudaErrorInvalidValue;
    if (args->head_dim == 32) return forward_launch<32>(stream, &problem, args->sequences);
    if (args->head_dim == 64) return forward_launch<64>(stream, &problem, args->sequences);
    return forward_launch<128>(stream, &problem, args->sequences);
}

cudaError_t gpt_attention_backward(cudaStream_t stream, const gpt_attention_args *args)
{
    attention_problem problem;
    if (!problem_of(&problem, args)) return cudaErrorInvalidValue;
    if (!usable(args->dout) || !usable(args->dqkv) || !usable(args->scratch)) return cudaErrorInvalidValue;
    problem.dout = (const uint16_t *)args->dout;
    problem.dqkv = (uint16_t *)args->dqkv;
    problem.row_stats = (float2 *)args->scratch;
    return attention_backward_launch(stream, &problem, args->sequences, args->head_dim);
}
