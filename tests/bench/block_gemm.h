/* SPDX-License-Identifier: MIT */
/* The GEMMs of a block by cuBLASLt: each shape's algorithm is chosen once, so that a call is one launch. */
#ifndef FSDP_BENCH_BLOCK_GEMM_H
#define FSDP_BENCH_BLOCK_GEMM_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { BLOCK_WORKSPACE = 32 << 20, BLOCK_MOST_CHUNKS = 264 };

typedef enum block_gemm_kind {
    BLOCK_GEMM_UP = 0,      /* u = W1 x + b1; fused: out h = gelu(u), u in aux */
    BLOCK_GEMM_DOWN,        /* z = W2 h + b2; fused: + x */
    BLOCK_GEMM_DOWN_WEIGHT, /* dW2 = dy hᵀ, fp32 */
    BLOCK_GEMM_DOWN_INPUT,  /* dh = W2ᵀ dy */
    BLOCK_GEMM_UP_WEIGHT,   /* dW1 = du xᵀ, fp32 */
    BLOCK_GEMM_UP_INPUT,    /* dx = W1ᵀ du; fused: + dy */
    BLOCK_GEMM_KINDS
} block_gemm_kind;

typedef struct block_gemms block_gemms;

block_gemms *block_gemms_create(uint32_t dim, bool fused, cudaStream_t stream);
void block_gemms_destroy(block_gemms *gemms);
void block_gemms_set_tokens(block_gemms *gemms, uint64_t tokens);
/* out = a b, + add where the kind has it (else NULL), + bias. */
void block_gemm(block_gemms *gemms, block_gemm_kind kind, const void *a, const void *b, const void *add, void *out,
                const void *bias, void *aux);

#ifdef __cplusplus
}
#endif
#endif
