/* SPDX-License-Identifier: MIT */
/* Matrix product: OpenBLAS, or a blocked loop around a register tile written with vector types, which gcc and clang turn
 * into the machine's own vectors. */
#include "gemm.h"

#ifdef GPT_WITH_OPENBLAS

#include <cblas.h>

void gemm_init(void) { openblas_set_num_threads(1); }

const char *gemm_name(void) { return "OpenBLAS"; }

void gemm(int m, int n, int k, gemm_source a, gemm_source b, gemm_target c)
{
    if (m == 0 || n == 0) return;
    cblas_sgemm(CblasRowMajor, a.transposed ? CblasTrans : CblasNoTrans, b.transposed ? CblasTrans : CblasNoTrans, m, n,
                k, 1.0f, a.at, a.stride, b.at, b.stride, c.add ? 1.0f : 0.0f, c.at, c.stride);
}

#else

#include <stddef.h>
#include <string.h>

enum {
    TILE_M = 6,    /* rows of C in registers: 6 × 16 fp32 are 12 of AVX2's 16 registers, 24 of NEON's 32 */
    TILE_N = 16,   /* columns of C in registers */
    BLOCK_K = 128, /* BLOCK_K × BLOCK_N of B are packed at a time: 128 KiB, which the L2 cache holds */
    BLOCK_N = 256
};

typedef struct tile_args {
    int k;
    const float *a;
    ptrdiff_t a_step;        /* from one k to the next */
    ptrdiff_t a_row[TILE_M]; /* offset of each row; those beyond the edge repeat the first */
    const float *b;          /* (k, TILE_N), packed */
    float *out;              /* (TILE_M, TILE_N) */
} tile_args;

#define UNROLL _Pragma("GCC unroll 8")

/* Unaligned, and allowed to alias the floats that they load and store. */
typedef float vector4 __attribute__((vector_size(16), aligned(4), may_alias));
typedef float vector8 __attribute__((vector_size(32), aligned(4), may_alias));

/* out = A B for one tile. The loops have constant bounds: unrolled, sum and y live in registers. */
#define DEFINE_TILE(name, vector, attribute)                                        \
    attribute static void name(const tile_args *t)                                  \
    {                                                                               \
        enum { WIDTH = sizeof(vector) / sizeof(float), VECTORS = TILE_N / WIDTH };  \
        vector sum[TILE_M][VECTORS] = {{{0.0f}}};                                   \
        const float *a = t->a, *b = t->b;                                           \
        ptrdiff_t row[TILE_M];                                                      \
        UNROLL for (int i = 0; i < TILE_M; i++) row[i] = t->a_row[i];               \
        for (int k = 0; k < t->k; k++, a += t->a_step, b += TILE_N) {               \
            vector y[VECTORS];                                                      \
            UNROLL for (int v = 0; v < VECTORS; v++) y[v] = ((const vector *)b)[v]; \
            UNROLL for (int i = 0; i < TILE_M; i++)                                 \
            {                                                                       \
                const float x = a[row[i]];                                          \
                UNROLL for (int v = 0; v < VECTORS; v++) sum[i][v] += x * y[v];     \
            }                                                                       \
        }                                                                           \
        UNROLL for (int i = 0; i < TILE_M; i++)                                     \
        {                                                                           \
            vector *const out = (vector *)t->out + i * VECTORS;                     \
            UNROLL for (int v = 0; v < VECTORS; v++) out[v] = sum[i][v];            \
        }                                                                           \
    }

DEFINE_TILE(tile_base, vector4, )

#ifdef __x86_64__
DEFINE_TILE(tile_avx2, vector8, __attribute__((target("avx2,fma"))))

static bool has_avx2(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
static void (*choose_tile(void))(const tile_args *) { return has_avx2() ? tile_avx2 : tile_base; }
const char *gemm_name(void) { return has_avx2() ? "the built-in loop (AVX2)" : "the built-in loop"; }
#else
static void (*choose_tile(void))(const tile_args *) { return tile_base; }
const char *gemm_name(void) { return "the built-in loop"; }
#endif

void gemm_init(void) {}

static int smaller(int a, int b) { return a < b ? a : b; }

/* A block of the product: all rows, n_n columns from n0, n_k terms from k0. */
typedef struct block {
    int n0, n_n, k0, n_k;
} block;

/* Panels of TILE_N columns, each (n_k, TILE_N); columns beyond the edge are zero. */
static void pack_b(gemm_source b, block at, float *packed)
{
    const ptrdiff_t step_k = b.transposed ? 1 : b.stride, step_n = b.transposed ? b.stride : 1;
    for (int n = 0; n < at.n_n; n += TILE_N, packed += (ptrdiff_t)at.n_k * TILE_N) {
        const int width = smaller(TILE_N, at.n_n - n);
        const float *from = b.at + at.k0 * step_k + (at.n0 + n) * step_n;
        if (width < TILE_N) memset(packed, 0, (size_t)at.n_k * TILE_N * sizeof *packed);
        if (b.transposed) {
            for (int j = 0; j < width; j++)
                for (int k = 0; k < at.n_k; k++) packed[k * TILE_N + j] = from[j * step_n + k];
        } else {
            for (int k = 0; k < at.n_k; k++)
                for (int j = 0; j < width; j++) packed[k * TILE_N + j] = from[k * step_k + j];
        }
    }
}

static void store_tile(const float *tile, gemm_target c, int rows, int columns)
{
    for (int i = 0; i < rows; i++, tile += TILE_N, c.at += c.stride) {
        if (c.add)
            for (int j = 0; j < columns; j++) c.at[j] += tile[j];
        else
            for (int j = 0; j < columns; j++) c.at[j] = tile[j];
    }
}

static void multiply_block(int m, gemm_source a, block at, const float *packed, gemm_target c)
{
    const ptrdiff_t step_k = a.transposed ? a.stride : 1, step_m = a.transposed ? 1 : a.stride;
    void (*const tile)(const tile_args *) = choose_tile();
    float out[TILE_M * TILE_N];
    tile_args t = {.k = at.n_k, .a_step = step_k, .out = out};
    for (int row = 0; row < m; row += TILE_M) {
        const int rows = smaller(TILE_M, m - row);
        t.a = a.at + row * step_m + at.k0 * step_k;
        for (int i = 0; i < TILE_M; i++) t.a_row[i] = i < rows ? i * step_m : 0;
        for (int n = 0; n < at.n_n; n += TILE_N) {
            t.b = packed + (ptrdiff_t)n * at.n_k;
            tile(&t);
            float *const to = c.at + (ptrdiff_t)row * c.stride + at.n0 + n;
            store_tile(out, (gemm_target){to, c.stride, c.add || at.k0 > 0}, rows, smaller(TILE_N, at.n_n - n));
        }
    }
}

void gemm(int m, int n, int k, gemm_source a, gemm_source b, gemm_target c)
{
    float packed[BLOCK_K * BLOCK_N];
    for (int n0 = 0; n0 < n; n0 += BLOCK_N) {
        for (int k0 = 0; k0 < k; k0 += BLOCK_K) {
            const block at = {n0, smaller(BLOCK_N, n - n0), k0, smaller(BLOCK_K, k - k0)};
            pack_b(b, at, packed);
            multiply_block(m, a, at, packed, c);
        }
    }
}

#endif
