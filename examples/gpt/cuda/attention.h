/* SPDX-License-Identifier: MIT */
/* Causal attention on a GPU (compute capability 8.0 or later), bf16 in memory, fp32 sums. The T × T weights are never in
 * memory: forward keeps one number a row, and backward computes the weights again from it. Letters: gpt_math.h.
 *
 *     gpt_attention_init();                                     // once a device
 *     gpt_attention_args args = {.sequences = B, .positions = T, .heads = N, .head_dim = H, .qkv = …, .out = …, .lse = …};
 *     gpt_attention_forward(stream, &args);
 *     args.dout = …, args.dqkv = …, args.scratch = …;           // qkv, out and lse as forward left them
 *     gpt_attention_backward(stream, &args);
 *
 * Every sum is taken by one block in one order: the same inputs give the same bits. The launches may be captured. */
#ifndef GPT_CUDA_ATTENTION_H
#define GPT_CUDA_ATTENTION_H

#include <stddef.h>

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Device pointers, bf16 and aligned to 16 bytes where void. The caller owns all of it until the stream is past it. */
typedef struct gpt_attention_args {
    int sequences, positions, heads, head_dim; /* B, T, N, H; H is 32, 64 or 128 */
    const void *qkv;                           /* (B, T, 3, N, H) */
    void *out;                                 /* (B, T, N, H): forward writes it, backward reads it */
    float *lse;       /* (B, N, T): log Σ exp of a row's scores; forward writes it, backward reads it */
    const void *dout; /* (B, T, N, H) */
    void *dqkv;       /* (B, T, 3, N, H): written by backward, all of it */
    void *scratch;    /* backward's, gpt_attention_scratch_bytes, aligned to 16 bytes */
} gpt_attention_args;

size_t gpt_attention_lse_bytes(const gpt_attention_args *args);
size_t gpt_attention_scratch_bytes(const gpt_attention_args *args);

/* Loads the kernels on the current device and lets them have their shared memory. Once a device, before the first launch
 * there; not while a stream captures. */
cudaError_t gpt_attention_init(void);

/* Enqueue on the stream and return. cudaErrorInvalidValue: a shape or a pointer that is not as said above; nothing is
 * enqueued then. */
cudaError_t gpt_attention_forward(cudaStream_t stream, const gpt_attention_args *args);
cudaError_t gpt_attention_backward(cudaStream_t stream, const gpt_attention_args *args);

#ifdef __cplusplus
}
#endif

#endif
