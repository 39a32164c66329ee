/* SPDX-License-Identifier: MIT */
/* The trainer's kernels on a GPU, but for products (products.h) and attention (attention.h). Letters: gpt_math.h. Activations
 * are bf16 in memory (void here), arithmetic and gradients of parameters fp32. C is a multiple of 8, at most 4096, and arrays
 * are aligned to 16 bytes: a thread moves 16 bytes at a time.
 *
 * Every sum is taken in an order that depends on shapes alone, never on which block is first: the same inputs give the same
 * bits. All launches may be captured: nothing is allocated, and grids depend on shapes only. Each function returns what
 * cudaGetLastError says. */
#ifndef GPT_CUDA_KERNELS_H
#define GPT_CUDA_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    GPT_MOST_CHANNELS = 4096,
    GPT_MOST_VOCAB = 65536,
    GPT_MOST_NORM_PARTS = 1056,
    GPT_COLUMN_PARTS = 128, /* blocks whose sums gpt_column_sums leaves */
    GPT_PIECE_ROWS = 32     /* most rows that one block sums for a token's gradient */
};

/* Load all kernels on the current device. Once a device, before anything is enqueued or captured. */
cudaError_t gpt_kernels_init(void);

/* ---- kernels_norm.cu ---- */

/* sum = x + y, and its LayerNorm, as residual_layernorm_forward; the norm is of `sum` as rounded to bf16, which backward reads.
 * With tokens, x is wte and y is wpe, and a row takes theirs: embedding_forward and the first LayerNorm in one. */
typedef struct gpt_norm_forward_args {
    void *sum;                /* (R, C) */
    void *out;                /* (R, C) */
    float *mean, *inverse_sd; /* (R) */
    const void *x, *y;        /* (R, C); with tokens (V, C), (T, C) */
    const int *tokens;        /* (R) or NULL */
    const void *w, *b;        /* (C) bf16 */
    int rows, positions, channels;
} gpt_norm_forward_args;

cudaError_t gpt_norm_forward(cudaStream_t stream, const gpt_norm_forward_args *args);

/* d = or += the gradient of the LayerNorm's input. parts: fp32 (gpt_norm_parts(C), 3, C): sums over rows for dw, for db, and
 * of the new d, which is the gradient of the bias that was added before; gpt_sum_parts makes them whole. */
typedef struct gpt_norm_backward_args {
    void *d; /* (R, C) */
    bool add;
    const void *dout, *x;           /* (R, C); x as the norm's forward left `sum` */
    const float *mean, *inverse_sd; /* (R) */
    const void *w;                  /* (C) bf16 */
    float *parts;
    int rows, channels;
} gpt_norm_backward_args;

/* Blocks whose sums backward leaves: GPT_MOST_NORM_PARTS or fewer. */
int gpt_norm_parts(int channels);
cudaError_t gpt_norm_backward(cudaStream_t stream, const gpt_norm_backward_args *args);

/* ---- kernels_sum.cu ---- */

/* parts (n_parts, n_sums, width) summed over n_parts: sum i is written to outs[i] (width), or added to it where adds[i]. An
 * outs[i] of NULL is left out. */
typedef struct gpt_sum_parts_args {
    const float *parts;
    int n_parts, n_sums, width;
    float *outs[3];
    bool adds[3];
} gpt_sum_parts_args;

cudaError_t gpt_sum_parts(cudaStream_t stream, const gpt_sum_parts_args *args);

/* parts (GPT_COLUMN_PARTS, width): sums over rows of x (rows, width) bf16; width is a multiple of 8. */
cudaError_t gpt_column_sums(cudaStream_t stream, float *parts, const void *x, int rows, int width);

/* *mean = the mean of x (n). */
cudaError_t gpt_mean(cudaStream_t stream, float *mean, const float *x, int n);

/* ---- kernels_embed.cu ---- */

/* Rows order[begin … begin + count) have this token; their sum goes to the token's gradient, or to partial sum `part`. */
typedef struct gpt_token_piece {
    int token, begin, count, part; /* part < 0: the token has no other piece */
} gpt_token_piece;

/* Partial sums first … first + count are one token's. */
typedef struct gpt_token_merge {
    int token, first, count;
} gpt_token_merge;

typedef struct gpt_embed_backward_args {
    float *dwte, *dwpe; /* (V, C) +=; (T, C) = or += */
    bool add_dwpe;
    float *parts;  /* (most_parts, C) scratch */
    const void *d; /* (R, C) */
    const int *order;
    const gpt_token_piece *pieces;
    const gpt_token_merge *merges;
    const int *counts;            /* device memory: pieces, merges; read when the kernel runs */
    int most_pieces, most_merges; /* grids */
    int sequences, positions, channels;
} gpt_embed_backward_args;

cudaError_t gpt_embed_backward(cudaStream_t stream, const gpt_embed_backward_args *args);

/* ---- kernels_loss.cu ---- */

/* losses as cross_entropy_forward. With gradient, logits become (softmax − one at target) × scale, and the columns from V to
 * the stride, which belong to no token, become 0. */
typedef struct gpt_cross_entropy_args {
    void *logits; /* (R, stride), columns 0 … V used; the stride is a multiple of 8 */
    const int *targets;
    float *losses;
    float scale;
    bool gradient;
    int rows, vocab, stride;
} gpt_cross_entropy_args;

/* The largest vocabulary whose row of logits fits into the current device's shared memory; at most GPT_MOST_VOCAB. */
cudaError_t gpt_most_vocab(int *out_vocab);

cudaError_t gpt_cross_entropy(cudaStream_t stream, const gpt_cross_entropy_args *args);

/* ---- kernels_small.cu ---- */

/* n is a multiple of 8. d: in, the gradient of GELU's output; out, of its input. */
cudaError_t gpt_gelu_forward(cudaStream_t stream, void *out, const void *x, size_t n);
cudaError_t gpt_gelu_backward(cudaStream_t stream, void *d, const void *x, size_t n);

/* n is a multiple of 8. */
cudaError_t gpt_to_bf16(cudaStream_t stream, void *out, const float *x, size_t n);

/* The formula of fsdp/optim.h, in its order of operations, each rounded as there; and the new values in bf16. */
typedef struct gpt_adamw_args {
    float *w, *m, *v; /* (n) */
    void *compute;    /* (n) bf16 */
    const float *grad;
    size_t n; /* a multiple of 8 */
    float factor, lr, beta1, beta2, bias1, bias2, eps, decay;
} gpt_adamw_args;

cudaError_t gpt_adamw(cudaStream_t stream, const gpt_adamw_args *args);

#ifdef __cplusplus
}
#endif

#endif
