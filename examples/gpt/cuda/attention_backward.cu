/* SPDX-License-Identifier: MIT */
/* Backward: two kernels that each compute the weights again from lse, so that every gradient is summed by one block. The
 * first owns queries, like forward, and makes dq and the rows' statistics; the second owns keys and makes dk and dv, with
 * weights and their gradients transposed: what comes out of one product is then the A operand of the next.
 *
 *     S = q kᵀ   P = exp(S / √H − lse)   dP = dout vᵀ   dS = P ∘ (dP − rowsum(out ∘ dout))
 *     dq = dS k / √H   dk = dSᵀ q / √H   dv = Pᵀ dout */
#include "attention_tile.cuh"

/* ---- dq ---- */

template <int H> struct query_shared {
    using own = attention_own<H>;
    static constexpr int stage_bytes = 2 * own::other_bytes;   /* k and v */
    static constexpr int stats_at = 2 * own::bytes;            /* after q and dout */
    static constexpr int stages_at = stats_at + own::rows * 8; /* float2 a row */
    static constexpr int bytes = stages_at + 2 * stage_bytes;
};

template <int H, int M> struct query_rows {
    uint32_t q[M][H / 16][4], dout[M][H / 16][4];
    float dq[M][H / 8][4];
    float2 stats[M][2];
};

/* out · dout of eight elements. */
__device__ __forceinline__ float dot_words(uint4 x, uint4 y)
{
    float sum = low_of(x.x) * low_of(y.x) + high_of(x.x) * high_of(y.x);
    sum += low_of(x.y) * low_of(y.y) + high_of(x.y) * high_of(y.y);
    sum += low_of(x.z) * low_of(y.z) + high_of(x.z) * high_of(y.z);
    return sum + (low_of(x.w) * low_of(y.w) + high_of(x.w) * high_of(y.w));
}

/* (lse / log 2, out · dout) of the block's rows, to shared memory and, for the other kernel, to memory. `words` are the
 * thread's chunks of out; dout's tile has arrived. */
template <int H, int N>
__device__ __forceinline__ void query_stats(const attention_problem &p, ptrdiff_t first_at, int valid, uint32_t dout,
                                            uint32_t stats, const uint4 (&words)[N])
{
    constexpr int chunks = H / 8;
#pragma unroll
    for (int i = 0; i < N; i++) {
        const int at = i * ATTENTION_THREADS + (int)threadIdx.x, row = at / chunks, chunk = at % chunks;
        float dot = dot_words(words[i], shared_load_words(dout + chunk_offset<H>(row, chunk)));
#pragma unroll
        for (int lanes = 1; lanes < chunks; lanes *= 2) dot += from_lane_xor(dot, lanes);
        if (chunk != 0) continue;
        float2 stat = {0, 0};
        if (row < valid) {
            stat = {p.lse[first_at + row] * 1.44269504f, dot};
            p.row_stats[first_at + row] = stat;
        }
        shared_store(stats + (uint32_t)(8 * row), stat);
    }
}

/* 64 keys. `ahead` and `warp_last` as in forward. */
template <int H, int M, bool MASKED>
__device__ __forceinline__ void query_tile(query_rows<H, M> &rows, uint32_t keys, uint32_t values, lane_offsets offsets,
                                           float scale_log2, int ahead, int warp_last)
{
#pragma unroll
    for (int c = 0; c < 4; c++) {
        if (MASKED && 16 * c > warp_last) continue;
        float scores[M][2][4] = {}, d_weights[M][2][4] = {};
        multiply_rows<H, M>(scores, rows.q, keys, offsets, 16 * c);
        multiply_rows<H, M>(d_weights, rows.dout, values, offsets, 16 * c);
        uint32_t d_scores[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const float2 stat = rows.stats[m][i % 4 / 2];
                const float weight = power_of_two(fmaf(scores[m][i / 4][i % 4], scale_log2, -stat.x));
                float &d = d_weights[m][i / 4][i % 4];
                d = weight * (d - stat.y);
                if (MASKED && 16 * c + i / 4 * 8 + i % 2 - 16 * m - i % 4 / 2 * 8 > ahead) d = 0;
            }
            pack_weights(d_scores[m], d_weights[m][0], d_weights[m][1]);
        }
        multiply_columns<H, M>(rows.dq, d_scores, keys, offsets, 16 * c);
    }
}

/* The warp's own rows of q, dout and statistics into registers. */
template <int H, int M>
__device__ __forceinline__ void query_begin(query_rows<H, M> &rows, uint32_t q, uint32_t dout, uint32_t stats,
                                            lane_offsets offsets)
{
    const int g = (int)threadIdx.x % 32 / 4;
    own_fragments<H, M>(rows.q, q, offsets);
    own_fragments<H, M>(rows.dout, dout, offsets);
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            rows.stats[m][half] = shared_load_float2(stats + (uint32_t)(8 * (16 * m + 8 * half + g)));
}

template <int H>
__global__ void __launch_bounds__(ATTENTION_THREADS, 2) query_kernel(const __grid_constant__ attention_problem p)
{
    using own = attention_own<H>;
    using layout = query_shared<H>;
    constexpr int M = own::m, n_words = own::rows * H / 8 / ATTENTION_THREADS;
    const int T = p.positions, blocks = (T + own::rows - 1) / own::rows;
    const attention_place<H> place(p, blocks);
    /* The longest first. */
    const int first = (blocks - 1 - place.block) * own::rows,
              tiles = (min(T, first + own::rows) + 63) / ATTENTION_OTHER;
    const uint16_t *const q = p.qkv + place.qkv_at, *const k = q + place.channels, *const v = k + place.channels;
    const ptrdiff_t own_at = place.out_at + (ptrdiff_t)first * place.channels;
    const uint32_t queries = shared_start(), douts = queries + own::bytes, stats = queries + layout::stats_at;
    const int lane = (int)threadIdx.x % 32, warp_row = (int)threadIdx.x / 32 * own::warp_rows,
              warp_first = first + warp_row;
    const lane_offsets offsets = lane_offsets_of<H>(lane);
    const uint32_t rows_at = (uint32_t)(warp_row * 2 * H);

    const auto load = [&](int tile) {
        const uint32_t stage = queries + layout::stages_at + (uint32_t)(tile % 2 * layout::stage_bytes);
        const int key = tile * ATTENTION_OTHER;
        const ptrdiff_t at = (ptrdiff_t)key * place.width;
        tile_load<H, ATTENTION_OTHER>(stage, k + at, place.width, T - key);
        tile_load<H, ATTENTION_OTHER>(stage + own::other_bytes, v + at, place.width, T - key);
    };
    tile_load<H, own::rows>(queries, q + (ptrdiff_t)first * place.width, place.width, T - first);
    tile_load<H, own::rows>(douts, p.dout + own_at, place.channels, T - first);
    load(0);
    uint4 words[n_words];
#pragma unroll
    for (int i = 0; i < n_words; i++) {
        const int at = i * ATTENTION_THREADS + (int)threadIdx.x, row = at / (H / 8), chunk = at % (H / 8);
        words[i] = row < T - first ? *(const uint4 *)(p.out + own_at + (ptrdiff_t)row * place.channels + chunk * 8)
                                   : make_uint4(0, 0, 0, 0);
    }
    copies_wait();
    __syncthreads();
    query_stats<H, n_words>(p, place.stat_at + first, T - first, douts, stats, words);

    query_rows<H, M> rows = {};
    for (int tile = 0; tile < tiles; tile++) {
        /* The tile is here, and nobody reads the other stage any more. */
        copies_wait();
        __syncthreads();
        if (tile == 0)
            query_begin<H, M>(rows, queries + rows_at, douts + rows_at, stats + (uint32_t)(8 * warp_row), offsets);
        if (tile + 1 < tiles) load(tile + 1);
        const uint32_t keys = queries + layout::stages_at + (uint32_t)(tile % 2 * layout::stage_bytes);
        const int lead = warp_first - tile * ATTENTION_OTHER, warp_last = lead + own::warp_rows - 1;
        const int ahead = lead + lane / 4 - lane % 4 * 2;
        if (lead >= ATTENTION_OTHER - 1)
            query_tile<H, M, false>(rows, keys, keys + own::other_bytes, offsets, p.scale_log2, ahead, warp_last);
        else if (warp_last >= 0)
            query_tile<H, M, true>(rows, keys, keys + own::other_bytes, offsets, p.scale_log2, ahead, warp_last);
    }
    float factors[M][2];
#pragma unroll
    for (int m = 0; m < M; m++) factors[m][0] = factors[m][1] = p.scale;
    own_store<H, M>(p.dqkv + place.qkv_at + (ptrdiff_t)warp_first * place.width, place.width, T - warp_first,
                    queries + rows_at, rows.dq, factors);
}

/* ---- dk and dv ---- */

template <int H> struct key_shared {
    using own = attention_own<H>;
    static constexpr int stats_at = 2 * own::other_bytes; /* in a stage, after q and dout */
    static constexpr int stage_bytes = stats_at + ATTENTION_OTHER * 8;
    static constexpr int stages_at = 2 * own::bytes; /* after k and v */
    static constexpr int bytes = stages_at + 2 * stage_bytes;
};

template <int H, int M> struct key_rows {
    uint32_t k[M][H / 16][4], v[M][H / 16][4];
    float dk[M][H / 8][4], dv[M][H / 8][4];
};

/* 64 queries at `stage`. MASKED: a query before the key has no weight. `ahead` is the lane's first key less its first query,
 * `warp_first` the warp's first key less the tile's first query. */
template <int H, int M, bool MASKED>
__device__ __forceinline__ void key_tile(key_rows<H, M> &rows, uint32_t stage, lane_offsets offsets, float scale_log2,
                                         int ahead, int warp_first)
{
    const uint32_t douts = stage + attention_own<H>::other_bytes;
    const uint32_t stats_at = stage + key_shared<H>::stats_at + 16 * (threadIdx.x % 4);
#pragma unroll
    for (int c = 0; c < 4; c++) {
        if (MASKED && 16 * c + 15 < warp_first) continue;
        float weights[M][2][4] = {}, d_weights[M][2][4] = {};
        multiply_rows<H, M>(weights, rows.k, stage, offsets, 16 * c);
        multiply_rows<H, M>(d_weights, rows.v, douts, offsets, 16 * c);
        uint32_t packed[M][4], d_scores[M][4];
#pragma unroll
        for (int n = 0; n < 2; n++) {
            /* Of queries 2t and 2t + 1: lse, dot, lse, dot. */
            const float4 stats = shared_load_float4(stats_at + (uint32_t)(8 * (16 * c + 8 * n)));
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float &weight = weights[m][n][i], &d = d_weights[m][n][i];
                    weight = power_of_two(fmaf(weight, scale_log2, i % 2 ? -stats.z : -stats.x));
                    if (MASKED && 16 * m + i / 2 * 8 - 16 * c - 8 * n - i % 2 > -ahead) weight = 0;
                    d = weight * (d - (i % 2 ? stats.w : stats.y));
                }
        }
#pragma unroll
        for (int m = 0; m < M; m++) {
            pack_weights(packed[m], weights[m][0], weights[m][1]);
            pack_weights(d_scores[m], d_weights[m][0], d_weights[m][1]);
        }
        multiply_columns<H, M>(rows.dv, packed, douts, offsets, 16 * c);
        multiply_columns<H, M>(rows.dk, d_scores, stage, offsets, 16 * c);
    }
}

template <int H>
__global__ void __launch_bounds__(ATTENTION_THREADS, 2) key_kernel(const __grid_constant__ attention_problem p)
{
    using own = attention_own<H>;
    using layout = key_shared<H>;
    constexpr int M = own::m;
    const int T = p.positions, blocks = (T + own::rows - 1) / own::rows;
    const attention_place<H> place(p, blocks);
    const int first = place.block * own::rows, tiles = (T - first + ATTENTION_OTHER - 1) / ATTENTION_OTHER;
    const uint16_t *const q = p.qkv + place.qkv_at, *const k = q + place.channels, *const v = k + place.channels;
    const uint32_t keys = shared_start(), values = keys + own::bytes;
    const int lane = (int)threadIdx.x % 32, warp_row = (int)threadIdx.x / 32 * own::warp_rows,
              warp_first = first + warp_row;
    const lane_offsets offsets = lane_offsets_of<H>(lane);
    const uint32_t rows_at = (uint32_t)(warp_row * 2 * H);

    const auto load = [&](int tile) {
        const uint32_t stage = keys + layout::stages_at + (uint32_t)(tile % 2 * layout::stage_bytes);
        const int query = first + tile * ATTENTION_OTHER, row = (int)threadIdx.x;
        tile_load<H, ATTENTION_OTHER>(stage, q + (ptrdiff_t)query * place.width, place.width, T - query);
        tile_load<H, ATTENTION_OTHER>(stage + own::other_bytes,
                                      p.dout + place.out_at + (ptrdiff_t)query * place.channels, place.channels,
                                      T - query);
        if (row < ATTENTION_OTHER)
            copy_8(stage + layout::stats_at + (uint32_t)(8 * row),
                   p.row_stats + place.stat_at + (query + row < T ? query + row : 0), query + row < T);
    };
    const ptrdiff_t own_at = (ptrdiff_t)first * place.width;
    tile_load<H, own::rows>(keys, k + own_at, place.width, T - first);
    tile_load<H, own::rows>(values, v + own_at, place.width, T - first);
    load(0);

    key_rows<H, M> rows = {};
    for (int tile = 0; tile < tiles; tile++) {
        /* The tile is here, and nobody reads the other stage any more. */
        copies_wait();
        __syncthreads();
        if (tile == 0) {
            own_fragments<H, M>(rows.k, keys + rows_at, offsets);
            own_fragments<H, M>(rows.v, values + rows_at, offsets);
        }
        if (tile + 1 < tiles) load(tile + 1);
        const uint32_t stage = keys + layout::stages_at + (uint32_t)(tile % 2 * layout::stage_bytes);
        const int lead = warp_row - tile * ATTENTION_OTHER, ahead = lead + lane / 4 - lane % 4 * 2;
        if (lead + own::warp_rows - 1 <= 0) key_tile<H, M, false>(rows, stage, offsets, p.scale_log2, ahead, lead);
        else if (lead < ATTENTION_OTHER) key_tile<H, M, true>(rows, stage, offsets, p.scale_log2, ahead, lead);
    }
    float factors[M][2];
#pragma unroll
    for (int m = 0; m < M; m++) factors[m][0] = factors[m][1] = p.scale;
    uint16_t *const dk = p.dqkv + place.qkv_at + place.channels + (ptrdiff_t)warp_first * place.width;
    own_store<H, M>(dk, place.width, T - warp_first, keys + rows_at, rows.dk, factors);
#pragma unroll
    for (int m = 0; m < M; m++) factors[m][0] = factors[m][1] = 1;
    own_store<H, M>(dk + place.channels, place.width, T - warp_first, values + rows_at, rows.dv, factors);
}

template <int H> static cudaError_t backward_init()
{
    const cudaError_t result = attention_kernel_init((const void *)query_kernel<H>, query_shared<H>::bytes);
    return result == cudaSuccess ? attention_kernel_init((const void *)key_kernel<H>, key_shared<H>::bytes) : result;
}

template <int H>
static cudaError_t backward_launch(cudaStream_t stream, const attention_problem *problem, int sequences)
{
    const int rows = attention_own<H>::rows;
    const long long blocks = (long long)sequences * problem->heads * ((problem->positions - 1) / rows + 1);
    const cudaError_t result =
        attention_kernel_launch((const void *)query_kernel<H>, query_shared<H>::bytes, blocks, stream, problem);
    if (result != cudaSuccess) return result;
    return attention_kernel_launch((const void *)key_kernel<H>, key_shared<H>::bytes, blocks, stream, problem);
}

cudaError_t attention_backward_init(void)
{
    cudaError_t result = backward_init<32>();
    if (result == cudaSuccess) result = backward_init<64>();
    return result == cudaSuccess ? backward_init<128>() : result;
}

cudaError_t attention_backward_launch(cudaStream_t stream, const attention_problem *problem, int sequences,
                                      int head_dim)
{
    if (head_dim == 32) return backward_launch<32>(stream, problem, sequences);
    if (head_dim == 64) return backward_launch<64>(stream, problem, sequences);
    return backward_launch<128>(stream, problem, sequences);
}
