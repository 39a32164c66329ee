/* SPDX-License-Identifier: MIT */
/* Products by cuBLASLt, which counts in columns: a row-major (R, O) is its (O, R). */
#include "products.h"

#include <stdint.h>
#include <stdlib.h>

#include "kernels.h"

struct gpt_product {
    gpt_product_shape shape;
    cublasLtMatmulDesc_t how;
    cublasLtMatrixLayout_t a, b, out;
    cublasLtMatmulAlgo_t algo;
};

static bool blas_failed(cublasStatus_t status, const char *what, problem *why)
{
    problem_set(why, "%s: %s", what, cublasLtGetStatusString(status));
    return false;
}

#define BLAS_TRY(call, why)                                                                      \
    do {                                                                                         \
        const cublasStatus_t blas_status_ = (call);                                              \
        if (blas_status_ != CUBLAS_STATUS_SUCCESS) return blas_failed(blas_status_, #call, why); \
    } while (0)

bool gpt_products_open(gpt_products *p, problem *why)
{
    *p = (gpt_products){.handle = NULL};
    BLAS_TRY(cublasLtCreate(&p->handle), why);
    p->plans = calloc(GPT_MOST_PRODUCTS, sizeof *p->plans);
    if (!p->plans) return problem_set(why, "no memory for the plans of products");
    const cudaError_t error = cudaMalloc(&p->workspace, GPT_WORKSPACE_BYTES);
    if (error == cudaSuccess) return true;
    p->workspace = NULL;
    return problem_set(why, "cudaMalloc of the products' workspace: %s", cudaGetErrorString(error));
}

static void give_back_plan(gpt_product *plan)
{
    if (plan->how) cublasLtMatmulDescDestroy(plan->how);
    if (plan->a) cublasLtMatrixLayoutDestroy(plan->a);
    if (plan->b) cublasLtMatrixLayoutDestroy(plan->b);
    if (plan->out) cublasLtMatrixLayoutDestroy(plan->out);
    *plan = (gpt_product){.how = NULL};
}

void gpt_products_close(gpt_products *p)
{
    for (int i = 0; i < p->n_plans; i++) give_back_plan(&p->plans[i]);
    free(p->plans);
    if (p->workspace) cudaFree(p->workspace);
    if (p->handle) cublasLtDestroy(p->handle);
    *p = (gpt_products){.handle = NULL};
}

static gpt_product *find(const gpt_products *p, const gpt_product_shape *s)
{
    for (int i = 0; i < p->n_plans; i++) {
        const gpt_product_shape *known = &p->plans[i].shape;
        if (known->kind == s->kind && known->rows == s->rows && known->n_in == s->n_in && known->n_out == s->n_out &&
            known->stride == s->stride && known->bias == s->bias)
            return &p->plans[i];
    }
    return NULL;
}

static cublasStatus_t set(cublasLtMatmulDesc_t how, cublasLtMatmulDescAttributes_t name, const void *value,
                          size_t bytes)
{
    return cublasLtMatmulDescSetAttribute(how, name, value, bytes);
}

static bool describe_end(gpt_product *plan, const gpt_products *p, problem *why)
{
    const gpt_product_shape *s = &plan->shape;
    cublasLtEpilogue_t end = CUBLASLT_EPILOGUE_DEFAULT;
    if (s->kind == GPT_LINEAR && s->bias) end = CUBLASLT_EPILOGUE_BIAS;
    if (s->kind == GPT_LINEAR_GELU) end = CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
    if (s->kind == GPT_INPUT_GELU) end = CUBLASLT_EPILOGUE_DGELU;
    BLAS_TRY(set(plan->how, CUBLASLT_MATMUL_DESC_EPILOGUE, &end, sizeof end), why);
    /* Pointers are set again for each product; here they say how those will be aligned. */
    if (s->bias) BLAS_TRY(set(plan->how, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &p->workspace, sizeof p->workspace), why);
    if (s->kind != GPT_LINEAR_GELU && s->kind != GPT_INPUT_GELU) return true;
    const int64_t stride = s->kind == GPT_LINEAR_GELU ? s->n_out : s->n_in;
    BLAS_TRY(set(plan->how, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &stride, sizeof stride), why);
    BLAS_TRY(set(plan->how, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &p->workspace, sizeof p->workspace), why);
    return true;
}

/* out = op(a) × op(b), in columns. */
static bool describe(gpt_product *plan, const gpt_products *p, problem *why)
{
    const gpt_product_shape *s = &plan->shape;
    const uint64_t R = (uint64_t)s->rows, I = (uint64_t)s->n_in, O = (uint64_t)s->n_out;
    const cublasOperation_t transpose = CUBLAS_OP_T;
    const bool linear = s->kind == GPT_LINEAR || s->kind == GPT_LINEAR_GELU, weight = s->kind == GPT_WEIGHT;
    BLAS_TRY(cublasLtMatmulDescCreate(&plan->how, CUBLAS_COMPUTE_32F, CUDA_R_32F), why);
    if (linear) { /* (O, R) = w (I, O)ᵀ × x (I, R) */
        BLAS_TRY(set(plan->how, CUBLASLT_MATMUL_DESC_TRANSA, &transpose, sizeof transpose), why);
        BLAS_TRY(cublasLtMatrixLayoutCreate(&plan->a, CUDA_R_16BF, I, O, s->n_in), why);
        BLAS_TRY(cublasLtMatrixLayoutCreate(&plan->b, CUDA_R_16BF, I, R, s->n_in), why);
        BLAS_TRY(cublasLtMatrixLayoutCreate(&plan->out, CUDA_R_16BF, O, R, s->stride), why);
    } else { /* (I, R) = w (I, O) × dout (O, R);  (I, O) = x (I, R) × dout (O, R)ᵀ */
        if (weight) BLAS_TRY(set(plan->how, CUBLASLT_MATMUL_DESC_TRANSB, &transpose, sizeof transpose), why);
        BLAS_TRY(cublasLtMatrixLayoutCreate(&plan->a, CUDA_R_16BF, I, weight ? R : O, s->n_in), why);
        BLAS_TRY(cublasLtMatrixLayoutCreate(&plan->b, CUDA_R_16BF, O, R, s->stride), why);
        BLAS_TRY(cublasLtMatrixLayoutCreate(&plan->out, weight ? CUDA_R_32F : CUDA_R_16BF, I, weight ? O : R, s->n_in),
                 why);
    }
    return describe_end(plan, p, why);
}

static bool choose(gpt_product *plan, const gpt_products *p, problem *why)
{
    const gpt_product_shape *s = &plan->shape;
    const size_t bytes = GPT_WORKSPACE_BYTES;
    cublasLtMatmulPreference_t most;
    cublasLtMatmulHeuristicResult_t found;
    int n = 0;
    BLAS_TRY(cublasLtMatmulPreferenceCreate(&most), why);
    cublasStatus_t status =
        cublasLtMatmulPreferenceSetAttribute(most, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof bytes);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = cublasLtMatmulAlgoGetHeuristic(p->handle, plan->how, plan->a, plan->b, plan->out, plan->out, most, 1,
                                                &found, &n);
    cublasLtMatmulPreferenceDestroy(most);
    if (status == CUBLAS_STATUS_SUCCESS && n == 1 && found.state == CUBLAS_STATUS_SUCCESS) {
        plan->algo = found.algo;
        return true;
    }
    return problem_set(why, "cuBLASLt has no way to multiply: kind %d, %d rows, %d in, %d out, stride %d (%s)",
                       (int)s->kind, s->rows, s->n_in, s->n_out, s->stride, cublasLtGetStatusString(status));
}

static bool plan_one(gpt_products *p, const gpt_product_shape *shape, problem *why)
{
    if (find(p, shape)) return true;
    if (p->n_plans == GPT_MOST_PRODUCTS) return problem_set(why, "more than %d shapes of products", GPT_MOST_PRODUCTS);
    gpt_product *plan = &p->plans[p->n_plans];
    *plan = (gpt_product){.shape = *shape};
    if (describe(plan, p, why) && choose(plan, p, why)) {
        p->n_plans++;
        return true;
    }
    give_back_plan(plan);
    return false;
}

/* The product without GELU in it. */
static gpt_product_shape unfused(const gpt_product_shape *shape)
{
    gpt_product_shape s = *shape;
    if (s.kind == GPT_LINEAR_GELU) s.kind = GPT_LINEAR;
    if (s.kind == GPT_INPUT_GELU) s.kind = GPT_INPUT;
    return s;
}

/* Where cuBLASLt has no fused GELU for one shape, all go without: so each is prepared both ways. */
bool gpt_products_plan(gpt_products *p, const gpt_product_shape *shape, problem *why)
{
    const bool gelu = shape->kind == GPT_LINEAR_GELU || shape->kind == GPT_INPUT_GELU;
    const gpt_product_shape bare = unfused(shape);
    problem no_gelu = {""};
    if (!plan_one(p, &bare, why)) return false;
    if (gelu && !p->no_fused_gelu && !plan_one(p, shape, &no_gelu)) p->no_fused_gelu = true;
    return true;
}

static bool point(const gpt_product *plan, const gpt_product_arrays *arrays, problem *why)
{
    const gpt_product_shape *s = &plan->shape;
    if (s->bias) BLAS_TRY(set(plan->how, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &arrays->bias, sizeof arrays->bias), why);
    if (s->kind == GPT_LINEAR_GELU || s->kind == GPT_INPUT_GELU)
        BLAS_TRY(set(plan->how, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &arrays->aux, sizeof arrays->aux), why);
    return true;
}

static bool multiply(const gpt_products *p, const gpt_product_shape *shape, const gpt_product_arrays *arrays,
                     cudaStream_t stream, problem *why)
{
    const gpt_product *plan = find(p, shape);
    const float one = 1.0f, old = shape->kind == GPT_WEIGHT && arrays->add ? 1.0f : 0.0f;
    if (!plan)
        return problem_set(why, "a product of %d rows, %d in, %d out was not prepared", shape->rows, shape->n_in,
                           shape->n_out);
    if (!point(plan, arrays, why)) return false;
    const bool linear = shape->kind == GPT_LINEAR || shape->kind == GPT_LINEAR_GELU;
    const void *a = shape->kind == GPT_WEIGHT ? arrays->x : arrays->w, *b = linear ? arrays->x : arrays->dout;
    BLAS_TRY(cublasLtMatmul(p->handle, plan->how, &one, a, plan->a, b, plan->b, &old, arrays->out, plan->out,
                            arrays->out, plan->out, &plan->algo, p->workspace, GPT_WORKSPACE_BYTES, stream),
             why);
    return true;
}

bool gpt_products_run(const gpt_products *p, const gpt_product_shape *shape, const gpt_product_arrays *arrays,
                      cudaStream_t stream, problem *why)
{
    const bool gelu = shape->kind == GPT_LINEAR_GELU || shape->kind == GPT_INPUT_GELU;
    if (!gelu || !p->no_fused_gelu) return multiply(p, shape, arrays, stream, why);
    const gpt_product_shape bare = unfused(shape);
    const bool linear = shape->kind == GPT_LINEAR_GELU;
    gpt_product_arrays into = *arrays;
    if (linear) into.out = arrays->aux;
    if (!multiply(p, &bare, &into, stream, why)) return false;
    const size_t n = (size_t)shape->rows * (size_t)(linear ? shape->n_out : shape->n_in);
    const cudaError_t error = linear ? gpt_gelu_forward(stream, arrays->out, arrays->aux, n)
                                     : gpt_gelu_backward(stream, arrays->out, arrays->aux, n);
    return error == cudaSuccess || problem_set(why, "GELU: %s", cudaGetErrorString(error));
}

static size_t larger(size_t a, size_t b) { return a > b ? a : b; }

/* One product of nothing but zeros. */
static bool warm_one(const gpt_products *p, const gpt_product_shape *s, cudaStream_t stream, problem *why)
{
    const size_t R = (size_t)s->rows, I = (size_t)s->n_in, O = (size_t)s->n_out, wide = R * (size_t)s->stride;
    const bool gelu = s->kind == GPT_LINEAR_GELU || s->kind == GPT_INPUT_GELU;
    const size_t sizes[] = {
        2 * R * I, 2 * wide, 4 * O * I, larger(4 * O * I, 2 * larger(R * I, wide)), gelu ? 2 * larger(R * I, wide) : 0,
        2 * O};
    size_t at[7] = {0};
    char *memory = NULL;
    for (int i = 0; i < 6; i++) at[i + 1] = at[i] + (sizes[i] + 255) / 256 * 256;
    if (cudaMalloc((void **)&memory, at[6]) != cudaSuccess) {
        (void)cudaGetLastError(); /* there is no room beside the rest: then the first real product loads the kernel */
        return true;
    }
    const gpt_product_arrays arrays = {.x = memory + at[0],
                                       .dout = memory + at[1],
                                       .w = memory + at[2],
                                       .out = memory + at[3],
                                       .aux = memory + at[4],
                                       .bias = memory + at[5]};
    bool ok = cudaMemsetAsync(memory, 0, at[6], stream) == cudaSuccess && multiply(p, s, &arrays, stream, why);
    const cudaError_t error = cudaStreamSynchronize(stream);
    cudaFree(memory);
    if (error != cudaSuccess) ok = problem_set(why, "a first product: %s", cudaGetErrorString(error));
    return ok;
}

bool gpt_products_warm(const gpt_products *p, cudaStream_t stream, problem *why)
{
    for (int i = 0; i < p->n_plans; i++)
        if (!warm_one(p, &p->plans[i].shape, stream, why)) return false;
    return true;
}
