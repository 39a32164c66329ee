/* SPDX-License-Identifier: MIT */
/* The products of a GPT by cuBLASLt: bf16 in, fp32 sums, with what belongs at a product's end done there (bias, GELU and its
 * gradient). How each shape is multiplied is asked of cuBLASLt's heuristic once, at the start, and kept: nothing is measured,
 * so that ranks and runs agree to the bit. A product allocates nothing, and may be captured.
 *
 *     LINEAR        out (R, O) = x (R, I) × w (O, I)ᵀ + bias (O)                                     bf16
 *     LINEAR_GELU   aux (R, O) = the same, out = GELU(aux)
 *     INPUT         out (R, I) = dout (R, O) × w (O, I)
 *     INPUT_GELU    out (R, I) = the same × GELU'(aux (R, I))
 *     WEIGHT        out (O, I) = or += doutᵀ × x                                                     fp32 */
#ifndef GPT_CUDA_PRODUCTS_H
#define GPT_CUDA_PRODUCTS_H

#include <stdbool.h>
#include <stddef.h>

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include "problem.h"

typedef enum gpt_product_kind { GPT_LINEAR, GPT_LINEAR_GELU, GPT_INPUT, GPT_INPUT_GELU, GPT_WEIGHT } gpt_product_kind;

typedef struct gpt_product_shape {
    gpt_product_kind kind;
    int rows, n_in, n_out; /* R, I, O */
    int stride;            /* between rows of what is (R, O): O, or more */
    bool bias;             /* LINEAR */
} gpt_product_shape;

/* Device pointers, bf16 but for WEIGHT's out; aligned to 16 bytes. */
typedef struct gpt_product_arrays {
    void *out;
    const void *x;    /* LINEAR, WEIGHT */
    const void *dout; /* INPUT, WEIGHT */
    const void *w;    /* LINEAR, INPUT */
    const void *bias; /* LINEAR */
    void *aux;        /* …_GELU */
    bool add;         /* WEIGHT: += */
} gpt_product_arrays;

typedef struct gpt_product gpt_product;

enum { GPT_MOST_PRODUCTS = 48 };

typedef struct gpt_products {
    cublasLtHandle_t handle;
    void *workspace; /* device memory, GPT_WORKSPACE_BYTES */
    gpt_product *plans;
    int n_plans;
    bool no_fused_gelu; /* cuBLASLt has none for these shapes: GELU is a kernel of its own */
} gpt_products;

#define GPT_WORKSPACE_BYTES ((size_t)32 << 20)

/* False: `why` has the sentence; then too gpt_products_close gives back what there is. */
bool gpt_products_open(gpt_products *p, problem *why);
void gpt_products_close(gpt_products *p);

/* Prepare a shape, if it is not yet. Not while a stream captures. */
bool gpt_products_plan(gpt_products *p, const gpt_product_shape *shape, problem *why);

/* Run every prepared shape once, in memory of its own that is given back, so that all kernels are loaded: a kernel that is
 * loaded later may have to wait for others on the GPU, and cannot be loaded in a capture. Blocks the host. */
bool gpt_products_warm(const gpt_products *p, cudaStream_t stream, problem *why);

/* Enqueue a product of a shape that was prepared. */
bool gpt_products_run(const gpt_products *p, const gpt_product_shape *shape, const gpt_product_arrays *arrays,
                      cudaStream_t stream, problem *why);

#endif
