/* SPDX-License-Identifier: MIT */
/* Tiles of attention in shared memory, and what both directions do with them.
 *
 * A tile is rows of H bf16, in chunks of 16 bytes. Within a row, chunks are permuted by the row's number, so that eight rows
 * of one chunk lie in eight different groups of banks: ldmatrix reads them without a conflict.
 *
 * A block has four warps. Each owns 16 × M rows of the block's own tile, as the A operand, and goes through all rows of the
 * other side's tiles, as the B operand. M is 2 where registers allow it: what a warp reads from shared memory then serves
 * twice the products, and shared memory would be the bottleneck otherwise. */
#ifndef GPT_CUDA_ATTENTION_TILE_CUH
#define GPT_CUDA_ATTENTION_TILE_CUH

#include "attention_ptx.cuh"

enum {
    ATTENTION_THREADS = 128,
    ATTENTION_OTHER = 64 /* rows of a tile of the other side */
};

/* What a kernel is given. All of gpt_attention_args, and what follows from it. */
typedef struct attention_problem {
    const uint16_t *qkv, *dout;
    uint16_t *out, *dqkv;
    float *lse;
    float2 *row_stats; /* (B, N, T): lse in units of log 2, and out · dout */
    int positions, heads;
    float scale;      /* of scores: 1 / √H */
    float scale_log2; /* the same for powers of 2: × log2 e */
} attention_problem;

/* One block's part of the problem. Blocks of one head follow each other, so that they share the head's rows in the L2. */
template <int H> struct attention_place {
    int head;            /* b × N + n */
    int block;           /* 0 … blocks − 1 along T */
    ptrdiff_t qkv_at;    /* of position 0 of this head; + C: k, + 2 C: v */
    ptrdiff_t out_at;    /* the same in out and dout */
    ptrdiff_t stat_at;   /* in lse and row_stats */
    int channels, width; /* strides of a row: C, 3 C */

    __device__ __forceinline__ attention_place(const attention_problem &p, int blocks)
    {
        head = (int)blockIdx.x / blocks;
        block = (int)blockIdx.x % blocks;
        channels = p.heads * H;
        width = 3 * channels;
        const ptrdiff_t row = (ptrdiff_t)(head / p.heads) * p.positions;
        qkv_at = row * width + head % p.heads * H;
        out_at = row * channels + head % p.heads * H;
        stat_at = (ptrdiff_t)head * p.positions;
    }
};

/* Rows of H bf16 a block owns. */
template <int H> struct attention_own {
    static constexpr int m = H > 64 ? 1 : 2;   /* M */
    static constexpr int warp_rows = 16 * m;   /* of one warp */
    static constexpr int rows = 4 * warp_rows; /* of the block */
    static constexpr int bytes = rows * 2 * H; /* of a tile of them */
    static constexpr int other_bytes = ATTENTION_OTHER * 2 * H;
};

template <int H> __device__ __forceinline__ uint32_t chunk_offset(int row, int chunk)
{
    const int permuted = H >= 64 ? chunk ^ (row & 7) : chunk ^ (row >> 1 & 3);
    return (uint32_t)(row * 2 * H + permuted * 16);
}

/* What a lane adds to the start of a tile for the ldmatrix of 16 rows × 16 columns at row 0, column 0. At column 16 k of row r,
 * with r a multiple of 16: (this ^ 32 k) + r × 2 H. The four matrices are, in order of the registers:
 *     plain        rows 0 … 7 and 8 … 15 of columns 0 … 7, then of 8 … 15: an a fragment, or two b fragments transposed
 *     by_columns   columns 0 … 7 and 8 … 15 of rows 0 … 7, then of 8 … 15: two b fragments, each in registers side by side */
struct lane_offsets {
    uint32_t plain, by_columns;
};

template <int H> __device__ __forceinline__ lane_offsets lane_offsets_of(int lane)
{
    return {chunk_offset<H>(lane & 15, lane >> 4), chunk_offset<H>((lane & 7) + (lane >> 4) * 8, lane >> 3 & 1)};
}

template <int H> __device__ __forceinline__ uint32_t square(uint32_t tile, uint32_t lane_at, int row, int k)
{
    return tile + (lane_at ^ (uint32_t)(32 * k)) + (uint32_t)(row * 2 * H);
}

/* ROWS rows from memory, in the background; from row `valid` on, zeros. `from` is a row that may be read. */
template <int H, int ROWS>
__device__ __forceinline__ void tile_load(uint32_t tile, const uint16_t *from, int stride, int valid)
{
    /* A pass of the block is `step` rows, a multiple of 8: the permutation of a thread's chunks is one. */
    constexpr int chunks = H / 8, step = ATTENTION_THREADS / chunks;
    const int thread = (int)threadIdx.x;
    const int row = thread / chunks, chunk = thread % chunks;
    const uint32_t to = tile + chunk_offset<H>(row, chunk);
    compute_here(stride);
    /* 32 bits are enough for what lies within a tile, and save registers. */
    const uint32_t mine = (uint32_t)(row * stride + chunk * 8) * 2, pass = (uint32_t)(step * stride) * 2;
#pragma unroll
    for (int i = 0; i < ROWS / step; i++) {
        const bool inside = row + i * step < valid;
        copy_16(to + (uint32_t)(i * step * 2 * H), (const char *)from + (inside ? mine + (uint32_t)i * pass : 0),
                inside);
    }
}

/* The A fragments of a warp's own rows; `rows` is where they begin in the block's tile. */
template <int H, int M>
__device__ __forceinline__ void own_fragments(uint32_t (&a)[M][H / 16][4], uint32_t rows, lane_offsets lane)
{
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int k = 0; k < H / 16; k++) load_matrices(a[m][k], square<H>(rows, lane.plain, 16 * m, k));
}

/* c += a × b, or = */
__device__ __forceinline__ void multiply_step(bool first, float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                              uint32_t b1)
{
    if (first) multiply_first(c, a, b0, b1);
    else multiply(c, a, b0, b1);
}

/* scores (16 M × 16) = own (16 M × H) × rows `row` … `row` + 15 of the tile, transposed. */
template <int H, int M>
__device__ __forceinline__ void multiply_rows(float (&scores)[M][2][4], const uint32_t (&own)[M][H / 16][4],
                                              uint32_t tile, lane_offsets lane, int row)
{
#pragma unroll
    for (int k = 0; k < H / 16; k++) {
        uint32_t b[4];
        load_matrices(b, square<H>(tile, lane.by_columns, row, k));
#pragma unroll
        for (int m = 0; m < M; m++) {
            multiply_step(k == 0, scores[m][0], own[m][k], b[0], b[1]);
            multiply_step(k == 0, scores[m][1], own[m][k], b[2], b[3]);
        }
    }
}

/* sums (16 M × H) += weights (16 M × 16) × rows `row` … `row` + 15 of the tile. */
template <int H, int M>
__device__ __forceinline__ void multiply_columns(float (&sums)[M][H / 8][4], const uint32_t (&weights)[M][4],
                                                 uint32_t tile, lane_offsets lane, int row)
{
#pragma unroll
    for (int k = 0; k < H / 16; k++) {
        uint32_t b[4];
        load_transposed(b, square<H>(tile, lane.plain, row, k));
#pragma unroll
        for (int m = 0; m < M; m++) {
            multiply(sums[m][2 * k], weights[m], b[0], b[1]);
            multiply(sums[m][2 * k + 1], weights[m], b[2], b[3]);
        }
    }
}

/* The c fragments of 16 columns as an a fragment. */
__device__ __forceinline__ void pack_weights(uint32_t (&a)[4], const float (&left)[4], const float (&right)[4])
{
    a[0] = pack(left[0], left[1]);
    a[1] = pack(left[2], left[3]);
    a[2] = pack(right[0], right[1]);
    a[3] = pack(right[2], right[3]);
}

/* A warp's own rows, × factors (one for each row of a lane), to memory by way of shared memory at `rows`, which only this
 * warp uses: whole chunks go out. Rows from `valid` on are not written. */
template <int H, int M>
__device__ __forceinline__ void own_store(uint16_t *to, int stride, int valid, uint32_t rows,
                                          const float (&sums)[M][H / 8][4], const float (&factors)[M][2])
{
    const int lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
    constexpr int chunks = H / 8;
    __syncwarp();
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < chunks; n++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                shared_store(
                    rows + chunk_offset<H>(16 * m + 8 * half + g, n) + 4 * (uint32_t)t,
                    pack(sums[m][n][2 * half] * factors[m][half], sums[m][n][2 * half + 1] * factors[m][half]));
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 16 * M * chunks / 32; i++) {
        const int at = i * 32 + lane, row = at / chunks, chunk = at % chunks;
        const uint4 words = shared_load_words(rows + chunk_offset<H>(row, chunk));
        if (row < valid) *(uint4 *)(to + (ptrdiff_t)row * stride + chunk * 8) = words;
    }
}

/* attention_backward.cu's part of the interface. */
cudaError_t attention_backward_init(void);
cudaError_t attention_backward_launch(cudaStream_t stream, const attention_problem *problem, int sequences,
                                      int head_dim);

/* One kernel: its shared memory is allowed to be `bytes`, most of the L1 is given to it. */
cudaError_t attention_kernel_init(const void *kernel, size_t bytes);
cudaError_t attention_kernel_launch(const void *kernel, size_t bytes, long long blocks, cudaStream_t stream,
                                    const attention_problem *problem);

#endif
