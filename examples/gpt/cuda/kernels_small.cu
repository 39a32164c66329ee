/* SPDX-License-Identifier: MIT */
/* Kernels that go through their arrays once: GELU, casts, AdamW; and the loading of all kernels. */
#include "kernels.cuh"

enum { THREADS = 256 };

static const float gelu_root = 0.7978845608f; /* √(2/π) */
static const float gelu_cubic = 0.044715f;

static __global__ void __launch_bounds__(THREADS) gelu_forward(void *out, const void *x, size_t vectors)
{
    const size_t v = (size_t)blockIdx.x * THREADS + threadIdx.x;
    if (v >= vectors) return;
    eight y = load8(x, v);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float u = gelu_root * (y.x[i] + gelu_cubic * y.x[i] * y.x[i] * y.x[i]);
        y.x[i] = 0.5f * y.x[i] * (1.0f + tanhf(u));
    }
    store8(out, v, y);
}

static __global__ void __launch_bounds__(THREADS) gelu_backward(void *d, const void *x, size_t vectors)
{
    const size_t v = (size_t)blockIdx.x * THREADS + threadIdx.x;
    if (v >= vectors) return;
    const eight y = load8(x, v);
    eight out = load8(d, v);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float square = y.x[i] * y.x[i], t = tanhf(gelu_root * y.x[i] * (1.0f + gelu_cubic * square));
        const float slope = gelu_root * (1.0f + 3.0f * gelu_cubic * square);
        out.x[i] *= 0.5f * (1.0f + t) + 0.5f * y.x[i] * (1.0f - t * t) * slope;
    }
    store8(d, v, out);
}

static __global__ void __launch_bounds__(THREADS) to_bf16(void *out, const float *x, size_t vectors)
{
    const size_t v = (size_t)blockIdx.x * THREADS + threadIdx.x;
    if (v >= vectors) return;
    eight y = load8_float(x, v);
    store8(out, v, y);
}

/* No multiply-add is fused, so that the bits are the library's. */
static __global__ void __launch_bounds__(THREADS) adamw(const gpt_adamw_args a)
{
    const size_t at = (size_t)blockIdx.x * THREADS + threadIdx.x;
    if (at >= a.n / 8) return;
    eight w = load8_float(a.w, at), m = load8_float(a.m, at), v = load8_float(a.v, at);
    const eight grad = load8_float(a.grad, at);
    const float rest1 = __fsub_rn(1.0f, a.beta1), rest2 = __fsub_rn(1.0f, a.beta2);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float g = __fmul_rn(grad.x[i], a.factor);
        m.x[i] = __fadd_rn(__fmul_rn(a.beta1, m.x[i]), __fmul_rn(rest1, g));
        v.x[i] = __fadd_rn(__fmul_rn(a.beta2, v.x[i]), __fmul_rn(rest2, __fmul_rn(g, g)));
        const float below = __fadd_rn(__fsqrt_rn(__fdiv_rn(v.x[i], a.bias2)), a.eps);
        const float step = __fadd_rn(__fdiv_rn(__fdiv_rn(m.x[i], a.bias1), below), __fmul_rn(a.decay, w.x[i]));
        w.x[i] = __fsub_rn(w.x[i], __fmul_rn(a.lr, step));
    }
    store8_float(a.w, at, w);
    store8_float(a.m, at, m);
    store8_float(a.v, at, v);
    store8(a.compute, at, w);
}

static unsigned int blocks_for(size_t n) { return (unsigned int)((n / 8 + THREADS - 1) / THREADS); }

cudaError_t gpt_gelu_forward(cudaStream_t stream, void *out, const void *x, size_t n)
{
    gelu_forward<<<blocks_for(n), THREADS, 0, stream>>>(out, x, n / 8);
    return cudaGetLastError();
}

cudaError_t gpt_gelu_backward(cudaStream_t stream, void *d, const void *x, size_t n)
{
    gelu_backward<<<blocks_for(n), THREADS, 0, stream>>>(d, x, n / 8);
    return cudaGetLastError();
}

cudaError_t gpt_to_bf16(cudaStream_t stream, void *out, const float *x, size_t n)
{
    to_bf16<<<blocks_for(n), THREADS, 0, stream>>>(out, x, n / 8);
    return cudaGetLastError();
}

cudaError_t gpt_adamw(cudaStream_t stream, const gpt_adamw_args *args)
{
    if (args->n == 0) return cudaSuccess;
    adamw<<<blocks_for(args->n), THREADS, 0, stream>>>(*args);
    return cudaGetLastError();
}

cudaError_t gpt_norm_kernels_load(void);
cudaError_t gpt_sum_kernels_load(void);
cudaError_t gpt_embed_kernels_load(void);
cudaError_t gpt_loss_kernels_load(void);

cudaError_t gpt_kernels_init(void)
{
    cudaFuncAttributes attributes;
    cudaError_t error = cudaFuncGetAttributes(&attributes, gelu_forward);
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, gelu_backward);
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, to_bf16);
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, adamw);
    cudaError_t (*const others[])(void) = {gpt_norm_kernels_load, gpt_sum_kernels_load, gpt_embed_kernels_load,
                                           gpt_loss_kernels_load};
    for (cudaError_t (*load)(void) : others)
        if (error == cudaSuccess) error = load();
    return error;
}
