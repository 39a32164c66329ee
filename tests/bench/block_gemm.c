/* SPDX-License-Identifier: MIT */
/* cuBLASLt counts columns first: a row-major (tokens, d) is its d × tokens, and W (out, in) its in × out. */
#include "block_gemm.h"

#include <cublasLt.h>
#include <stdio.h>
#include <stdlib.h>

#define MUST(call)                                                                                           \
    do {                                                                                                     \
        cublasStatus_t status_ = (call);                                                                     \
        if (status_ != CUBLAS_STATUS_SUCCESS) {                                                              \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cublasLtGetStatusString(status_)); \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

typedef struct gemm_plan {
    cublasLtMatmulDesc_t op;
    cublasLtMatrixLayout_t a, b, c;
    cublasLtMatmulAlgo_t algo;
    float beta;
    bool made;
} gemm_plan;

struct block_gemms {
    cublasLtHandle_t handle;
    cudaStream_t stream;
    uint64_t dim;
    bool fused;
    void *workspace;
    gemm_plan plan[BLOCK_GEMM_KINDS];
};

/* out (m, n) = op(a) op(b), sum over k. */
typedef struct gemm_shape {
    const char *name;
    bool a_transposed, b_transposed;
    uint64_t m, n, k;
    cudaDataType_t out;
    cublasLtEpilogue_t epilogue;
    float beta;
} gemm_shape;

static gemm_shape shape_of(const block_gemms *g, block_gemm_kind kind, uint64_t tokens)
{
    const uint64_t d = g->dim;
    const float add = g->fused ? 1.0f : 0.0f;
    switch (kind) {
    case BLOCK_GEMM_UP:
        return (gemm_shape){
            "up",   true, false,       4 * d,
            tokens, d,    CUDA_R_16BF, g->fused ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_BIAS,
            0.0f};
    case BLOCK_GEMM_DOWN:
        return (gemm_shape){"down", true, false, d, tokens, 4 * d, CUDA_R_16BF, CUBLASLT_EPILOGUE_BIAS, add};
    case BLOCK_GEMM_DOWN_WEIGHT:
        return (gemm_shape){"down weight", false, true, 4 * d, d, tokens, CUDA_R_32F, CUBLASLT_EPILOGUE_DEFAULT, 0.0f};
    case BLOCK_GEMM_DOWN_INPUT:
        return (gemm_shape){"down input", false, false, 4 * d, tokens, d, CUDA_R_16BF, CUBLASLT_EPILOGUE_DEFAULT, 0.0f};
    case BLOCK_GEMM_UP_WEIGHT:
        return (gemm_shape){"up weight", false, true, d, 4 * d, tokens, CUDA_R_32F, CUBLASLT_EPILOGUE_DEFAULT, 0.0f};
    default:
        return (gemm_shape){"up input", false, false, d, tokens, 4 * d, CUDA_R_16BF, CUBLASLT_EPILOGUE_DEFAULT, add};
    }
}

static void set(cublasLtMatmulDesc_t op, cublasLtMatmulDescAttributes_t what, const void *value, size_t bytes)
{
    MUST(cublasLtMatmulDescSetAttribute(op, what, value, bytes));
}

static void choose(block_gemms *g, gemm_plan *plan, const gemm_shape *shape)
{
    cublasLtMatmulPreference_t wish;
    const size_t most = BLOCK_WORKSPACE;
    MUST(cublasLtMatmulPreferenceCreate(&wish));
    MUST(cublasLtMatmulPreferenceSetAttribute(wish, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &most, sizeof most));
    cublasLtMatmulHeuristicResult_t found;
    int n_found = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(g->handle, plan->op, plan->a, plan->b, plan->c,
                                                                 plan->c, wish, 1, &found, &n_found);
    if (status != CUBLAS_STATUS_SUCCESS || n_found == 0) {
        fprintf(stderr, "cuBLASLt has no algorithm for GEMM '%s' (%llu × %llu × %llu): %s\n", shape->name,
                (unsigned long long)shape->m, (unsigned long long)shape->n, (unsigned long long)shape->k,
                cublasLtGetStatusString(status));
        exit(1);
    }
    plan->algo = found.algo;
    MUST(cublasLtMatmulPreferenceDestroy(wish));
}

static void make(block_gemms *g, gemm_plan *plan, const gemm_shape *shape)
{
    const cublasOperation_t ta = shape->a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N,
                            tb = shape->b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    const uint64_t a_rows = shape->a_transposed ? shape->k : shape->m,
                   a_columns = shape->a_transposed ? shape->m : shape->k,
                   b_rows = shape->b_transposed ? shape->n : shape->k,
                   b_columns = shape->b_transposed ? shape->k : shape->n;
    MUST(cublasLtMatmulDescCreate(&plan->op, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    set(plan->op, CUBLASLT_MATMUL_DESC_TRANSA, &ta, sizeof ta);
    set(plan->op, CUBLASLT_MATMUL_DESC_TRANSB, &tb, sizeof tb);
    set(plan->op, CUBLASLT_MATMUL_DESC_EPILOGUE, &shape->epilogue, sizeof shape->epilogue);
    /* The heuristic looks at these pointers' alignment; each call sets its own. */
    if (shape->epilogue != CUBLASLT_EPILOGUE_DEFAULT)
        set(plan->op, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &g->workspace, sizeof g->workspace);
    if (shape->epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS) {
        const int64_t row = (int64_t)shape->m;
        set(plan->op, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &g->workspace, sizeof g->workspace);
        set(plan->op, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &row, sizeof row);
    }
    MUST(cublasLtMatrixLayoutCreate(&plan->a, CUDA_R_16BF, a_rows, a_columns, (int64_t)a_rows));
    MUST(cublasLtMatrixLayoutCreate(&plan->b, CUDA_R_16BF, b_rows, b_columns, (int64_t)b_rows));
    MUST(cublasLtMatrixLayoutCreate(&plan->c, shape->out, shape->m, shape->n, (int64_t)shape->m));
    plan->beta = shape->beta;
    choose(g, plan, shape);
    plan->made = true;
}

static void unmake(gemm_plan *plan)
{
    if (!plan->made) return;
    MUST(cublasLtMatrixLayoutDestroy(plan->a));
    MUST(cublasLtMatrixLayoutDestroy(plan->b));
    MUST(cublasLtMatrixLayoutDestroy(plan->c));
    MUST(cublasLtMatmulDescDestroy(plan->op));
    plan->made = false;
}

block_gemms *block_gemms_create(uint32_t dim, bool fused, cudaStream_t stream)
{
    block_gemms *g = calloc(1, sizeof *g);
    if (g == NULL || cudaMalloc(&g->workspace, BLOCK_WORKSPACE) != cudaSuccess) {
        fprintf(stderr, "no %d bytes for cuBLASLt's workspace\n", (int)BLOCK_WORKSPACE);
        exit(1);
    }
    MUST(cublasLtCreate(&g->handle));
    g->dim = dim;
    g->fused = fused;
    g->stream = stream;
    return g;
}

void block_gemms_destroy(block_gemms *g)
{
    for (int i = 0; i < BLOCK_GEMM_KINDS; i++) unmake(&g->plan[i]);
    MUST(cublasLtDestroy(g->handle));
    (void)cudaFree(g->workspace);
    free(g);
}

void block_gemms_set_tokens(block_gemms *g, uint64_t tokens)
{
    for (int i = 0; i < BLOCK_GEMM_KINDS; i++) {
        const gemm_shape shape = shape_of(g, (block_gemm_kind)i, tokens);
        unmake(&g->plan[i]);
        make(g, &g->plan[i], &shape);
    }
}

void block_gemm(block_gemms *g, block_gemm_kind kind, const void *a, const void *b, const void *add, void *out,
                const void *bias, void *aux)
{
    const gemm_plan *plan = &g->plan[kind];
    const float one = 1.0f;
    if (bias != NULL) set(plan->op, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias);
    if (aux != NULL) set(plan->op, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &aux, sizeof aux);
    MUST(cublasLtMatmul(g->handle, plan->op, &one, a, plan->a, b, plan->b, &plan->beta, add != NULL ? add : out,
                        plan->c, out, plan->c, &plan->algo, g->workspace, BLOCK_WORKSPACE, g->stream));
}
