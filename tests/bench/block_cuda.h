/* SPDX-License-Identifier: MIT */
/* The compute of the comparison with PyTorch's FSDP2, apart from whoever moves the parameters: blocks
 * y = x + W2 gelu(W1 x + b1) + b2 in bf16, loss = mean(y²), their gradients in fp32, by cuBLASLt and a few kernels.
 *
 * Plain: one kernel for each operation, as eager PyTorch launches them (a bias is in its GEMM's epilogue there, too). Fused:
 * GELU in the epilogue, both residuals by the GEMM's beta, GELU's backward and the bias' gradient in one pass, the loss in
 * one. Where PyTorch writes weight gradients in bf16 and casts them for the reduction, the GEMM writes fp32 here. The first
 * block's input needs no gradient. No atomics: the same numbers in every run. Every call enqueues on the stream given to
 * block_math_create and exits with a sentence if CUDA refuses. */
#ifndef FSDP_BENCH_BLOCK_CUDA_H
#define FSDP_BENCH_BLOCK_CUDA_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stdint.h>

#ifdef __CUDACC__
#define BLOCK_BOTH __host__ __device__
#else
#define BLOCK_BOTH
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum { BLOCK_PARAMS = 4 }; /* W1 (4d, d), b1 (4d), W2 (d, 4d), b2 (d), one after another */

/* Elements of a block's parameters. dim is a multiple of 128, so that no parameter needs a pad before it. */
static inline BLOCK_BOTH uint64_t block_elems(uint64_t dim) { return 8 * dim * dim + 5 * dim; }
/* Where parameter i begins, of 0 … BLOCK_PARAMS. */
static inline BLOCK_BOTH uint64_t block_offset(uint64_t dim, int i)
{
    const uint64_t at[BLOCK_PARAMS + 1] = {0, 4 * dim * dim, 4 * dim * dim + 4 * dim, 8 * dim * dim + 4 * dim,
                                           block_elems(dim)};
    return at[i];
}

/* Between -1 and 1, from seed and index alone. */
static inline BLOCK_BOTH float block_noise(uint32_t seed, uint64_t index)
{
    uint32_t h = (uint32_t)index * 2654435761u ^ (uint32_t)(index >> 32) * 40503u ^ seed * 0x9e3779b9u;
    h ^= h >> 13;
    h *= 0x85ebca6bu;
    h ^= h >> 16;
    h *= 0xc2b2ae35u;
    h ^= h >> 15;
    return (float)(h >> 8) * 0x1p-23f - 1.0f;
}

typedef struct block_scales { /* of first values: 1 / sqrt(inputs), as torch.nn.Linear begins */
    float up, down;
} block_scales;
block_scales block_first_scales(uint32_t dim);
/* First value of element index of a layer's parameters, the same on host and device. */
static inline BLOCK_BOTH float block_first_value(uint32_t layer, uint64_t dim, block_scales scales, uint64_t index)
{
    return block_noise(layer + 1, index) * (index < 4 * dim * dim + 4 * dim ? scales.up : scales.down);
}

typedef struct block_math block_math;

typedef struct block_math_config {
    uint32_t layers, dim, rank; /* rank: seed of the input */
    uint64_t max_tokens;
    bool fused;
    cudaStream_t stream;
} block_math_config;

/* Takes the activations of all layers for max_tokens, and cuBLASLt's workspace. */
block_math *block_math_create(const block_math_config *config);
void block_math_destroy(block_math *math);
/* At most max_tokens; makes the input anew and chooses the GEMMs' algorithms. Blocks. */
void block_math_set_tokens(block_math *math, uint64_t tokens);
uint64_t block_math_bytes(const block_math *math);    /* device memory that it holds */
const float *block_math_loss(const block_math *math); /* device memory */

void block_forward(block_math *math, uint32_t layer, const void *const params[BLOCK_PARAMS]); /* bf16 */
void block_loss(block_math *math);                                                            /* and its gradient */
void block_backward(block_math *math, uint32_t layer, const void *const params[BLOCK_PARAMS],
                    float *const grads[BLOCK_PARAMS]);

/* ---- What the bare step does to shards; the library has its own. ---- */

enum { BLOCK_SUMS = 528 }; /* partial sums of squares of a shard */

typedef struct block_record { /* in device memory */
    float step, bias1, bias2; /* AdamW's step count and bias corrections */
    float norm, scale;        /* of the gradient; what clipping makes of it: 1 without */
} block_record;

void block_load_shard_kernels(void); /* the driver loads a kernel at its first launch, and may wait then */
void block_first_values(float *dst, uint64_t begin, uint64_t count, uint32_t layer, uint32_t dim, cudaStream_t stream);
void block_cast(void *dst_bf16, const float *src, uint64_t count, cudaStream_t stream);
void block_advance(block_record *record, cudaStream_t stream);
/* partial[BLOCK_SUMS]: of x², count a multiple of four; the sum of n such lists; scale = min(1, max_norm / (√sum · factor)), as
 * PyTorch's clip_grad_norm_ has it. */
void block_square_sums(float *partial, const float *x, uint64_t count, cudaStream_t stream);
void block_add_sums(float *out, const float *partial, uint32_t n, cudaStream_t stream);
void block_clip(block_record *record, const float *sum, float factor, float max_norm, cudaStream_t stream);
/* lr 1e-4, betas 0.9 and 0.999, eps 1e-8, weight decay 0.01: what the PyTorch driver sets. factor: on the gradient, with
 * the record's scale. */
void block_adamw(float *master, const float *gradient, float *m, float *v, uint64_t count, const block_record *record,
                 float factor, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
