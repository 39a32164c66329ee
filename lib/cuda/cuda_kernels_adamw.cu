/* SPDX-License-Identifier: MIT */
/* AdamW: fsdp/optim.h, operation by operation, to the bit.
 *
 * nvcc writes a division or a square root as a short sequence and, behind a branch, a long one for operands near the ends of
 * fp32's range. Four branches an element leave nothing to be done while one of them waits, and a zero goes the long way. Here
 * a group's elements are looked at once: where m and v are zero or well inside the range (nearly all), the short sequences run
 * for all elements side by side, else the compiler's own for each. Both round to nearest, so the bits are the same. */
#include "cuda_tiles.cuh"

static const int THREADS = FSDP__TILE_THREADS;
static const int GROUP = 4, BLOCKS = 4; /* elements of a thread, neighbours; blocks of a multiprocessor */
static const uint32_t TILE = THREADS * GROUP;

template <typename W, typename G> struct adamw_args {
    W *w;
    const G *g;
    float *m, *v;
    const fsdp_kernel_segment *segments;
    uint64_t n_segments;
    const fsdp_device_step *step;
    float beta1, beta2, eps, weight_decay;
};

/* ---- Division and square root, nearest, for operands inside the range ---- */

/* 1 / b, nearly to the last bit: what quotient needs of it. */
static __device__ __forceinline__ float reciprocal(float b)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(b));
    return __fmaf_rn(y, __fmaf_rn(-b, y, 1.0f), y);
}

/* a / b: the first quotient, and what it leaves, which is exact. */
static __device__ __forceinline__ float quotient(float a, float b, float reciprocal_of_b)
{
    const float q = __fmul_rn(a, reciprocal_of_b);
    return __fmaf_rn(reciprocal_of_b, __fmaf_rn(-b, q, a), q);
}

static __device__ __forceinline__ float root(float x)
{
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    const float s = __fmul_rn(x, y);
    const float r = __fmaf_rn(__fmaf_rn(-s, s, x), 0.5f * y, s);
    return x == 0.0f ? 0.0f : r;
}

/* Not &&: no branches. */
static __device__ __forceinline__ bool is_between(float x, float low, float high) { return (low <= x) & (x <= high); }

/* m and v: +0 or from 2^-80 to 2^40; biases from 2^-30, eps from 2^-50, both to 1. Then all quotients are from 2^-116 to 2^120,
 * and what a first quotient or root leaves is a multiple of 2^-149. */
static __device__ __forceinline__ bool is_inside(float x)
{
    return is_between(fabsf(x), 0x1p-80f, 0x1p40f) | (__float_as_uint(x) == 0);
}

/* ---- Elements ---- */

/* What a launch and a segment add to it. */
struct adamw_factors {
    float beta1, rest1, beta2, rest2, eps;
    float factor, bias1, bias2, lr, decay;
    float reciprocal1, reciprocal2; /* of the biases */
    bool inside;                    /* the biases and eps */
};

/* For any operands. A function of its own, so that the usual case has its registers and its code to itself. */
static __device__ __noinline__ float ratio_of_any(float m, float bias1, float v, float bias2, float eps)
{
    return m / bias1 / (sqrtf(v / bias2) + eps);
}

/* w, g, m, v: of N neighbours; w, m and v are new then. */
template <int N>
static __device__ __forceinline__ void update(const adamw_factors &f, float (&w)[N], const float (&gradient)[N],
                                              float (&m)[N], float (&v)[N])
{
    bool inside = f.inside;
#pragma unroll
    for (int i = 0; i < N; i++) {
        const float g = gradient[i] * f.factor;
        m[i] = f.beta1 * m[i] + f.rest1 * g;
        v[i] = f.beta2 * v[i] + f.rest2 * (g * g);
        inside &= is_inside(m[i]) & is_inside(v[i]);
    }
    float ratio[N];
    if (inside) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            const float below = root(quotient(v[i], f.bias2, f.reciprocal2)) + f.eps;
            ratio[i] = quotient(quotient(m[i], f.bias1, f.reciprocal1), below, reciprocal(below));
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) ratio[i] = ratio_of_any(m[i], f.bias1, v[i], f.bias2, f.eps);
    }
#pragma unroll
    for (int i = 0; i < N; i++) w[i] -= f.lr * (ratio[i] + f.decay * w[i]);
}

template <typename W, typename G> struct adamw_group {
    fsdp__group<W, GROUP> w;
    fsdp__group<G, GROUP> g;
    fsdp__group<float, GROUP> m, v;
};

/* Elements [at, at + GROUP) of all arrays; end and WHOLE as fsdp__load has them. */
template <bool WHOLE, typename W, typename G>
static __device__ __forceinline__ void update_group(const adamw_args<W, G> &a, const adamw_factors &f, uint64_t at,
                                                    uint64_t end)
{
    adamw_group<W, G> group;
    fsdp__load<WHOLE>(&group.g, a.g, at, end);
    fsdp__load<WHOLE>(&group.w, static_cast<const W *>(a.w), at, end);
    fsdp__load<WHOLE>(&group.m, static_cast<const float *>(a.m), at, end);
    fsdp__load<WHOLE>(&group.v, static_cast<const float *>(a.v), at, end);
    float w[GROUP], g[GROUP];
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
        w[i] = fsdp__to_float(group.w.at[i]);
        g[i] = fsdp__to_float(group.g.at[i]);
    }
    update(f, w, g, group.m.at, group.v.at);
#pragma unroll
    for (int i = 0; i < GROUP; i++) fsdp__from_float(&group.w.at[i], w[i]);
    fsdp__store<WHOLE>(a.w, at, end, group.w);
    fsdp__store<WHOLE>(a.m, at, end, group.m);
    fsdp__store<WHOLE>(a.v, at, end, group.v);
}

/* ---- The kernel ---- */

template <typename W, typename G>
static __device__ __forceinline__ adamw_factors factors_of(const adamw_args<W, G> &a, const fsdp_device_step &step)
{
    adamw_factors f = {};
    f.beta1 = a.beta1, f.rest1 = 1.0f - a.beta1;
    f.beta2 = a.beta2, f.rest2 = 1.0f - a.beta2;
    f.eps = a.eps;
    f.factor = step.factor;
    f.bias1 = step.bias1, f.reciprocal1 = reciprocal(step.bias1);
    f.bias2 = step.bias2, f.reciprocal2 = reciprocal(step.bias2);
    f.inside =
        is_between(f.bias1, 0x1p-30f, 1.0f) && is_between(f.bias2, 0x1p-30f, 1.0f) && is_between(f.eps, 0x1p-50f, 1.0f);
    return f;
}

template <typename W, typename G> __global__ void __launch_bounds__(THREADS, BLOCKS) adamw_kernel(adamw_args<W, G> a)
{
    const fsdp_device_step step = *a.step;
    if (step.skip != 0) return;
    adamw_factors f = factors_of(a, step);
    const bool aligned = fsdp__is_aligned<GROUP * sizeof(W)>(a.w) && fsdp__is_aligned<GROUP * sizeof(G)>(a.g) &&
                         fsdp__is_aligned<16>(a.m) && fsdp__is_aligned<16>(a.v);
    fsdp__for_tiles<TILE>(a.segments, a.n_segments, [&](const fsdp_kernel_segment &segment, uint64_t tile) {
        const uint64_t at = segment.offset + tile + (uint64_t)threadIdx.x * GROUP;
        const uint64_t end = segment.offset + segment.count;
        f.lr = step.lr * segment.lr_scale;
        f.decay = a.weight_decay * segment.decay;
        if (tile + TILE <= segment.count && aligned && segment.offset % GROUP == 0) update_group<true>(a, f, at, end);
        else if (at < end) update_group<false>(a, f, at, end);
    });
}

/* ---- Launching ---- */

template <typename W, typename G>
static cudaError_t adamw_as(cudaStream_t stream, const fsdp_device_op *op, int n_processors)
{
    const uint64_t n = op->u.adamw.n_segments, most = op->u.adamw.count / TILE + n;
    if (n == 0) return cudaSuccess;
    const adamw_args<W, G> args = {static_cast<W *>(op->u.adamw.master),
                                   static_cast<const G *>(op->u.adamw.gradient),
                                   op->u.adamw.m,
                                   op->u.adamw.v,
                                   op->u.adamw.segments,
                                   n,
                                   op->u.adamw.step,
                                   op->u.adamw.beta1,
                                   op->u.adamw.beta2,
                                   op->u.adamw.eps,
                                   op->u.adamw.weight_decay};
    const uint64_t full = (uint64_t)n_processors * BLOCKS;
    return fsdp__launch_kernel(adamw_kernel<W, G>, most < full ? most : full, THREADS, stream, args);
}

template <typename W> static cudaError_t adamw_on(cudaStream_t stream, const fsdp_device_op *op, int n_processors)
{
    switch (op->u.adamw.gradient_dtype) {
    case FSDP_DTYPE_BF16: return adamw_as<W, fsdp__bf16>(stream, op, n_processors);
    case FSDP_DTYPE_FP16: return adamw_as<W, fsdp__fp16>(stream, op, n_processors);
    default: return adamw_as<W, float>(stream, op, n_processors);
    }
}

extern "C" cudaError_t fsdp__cuda_adamw(cudaStream_t stream, const fsdp_device_op *op, int n_processors)
{
    switch (op->u.adamw.master_dtype) {
    case FSDP_DTYPE_BF16: return adamw_on<fsdp__bf16>(stream, op, n_processors);
    case FSDP_DTYPE_FP16: return adamw_on<fsdp__fp16>(stream, op, n_processors);
    default: return adamw_on<float>(stream, op, n_processors);
    }
}

template <typename W> static cudaError_t load_on()
{
    cudaError_t error = fsdp__load_kernel(adamw_kernel<W, float>);
    if (error == cudaSuccess) error = fsdp__load_kernel(adamw_kernel<W, fsdp__bf16>);
    if (error == cudaSuccess) error = fsdp__load_kernel(adamw_kernel<W, fsdp__fp16>);
    return error;
}

extern "C" cudaError_t fsdp__cuda_load_adamw(void)
{
    cudaError_t error = load_on<float>();
    if (error == cudaSuccess) error = load_on<fsdp__bf16>();
    if (error == cudaSuccess) error = load_on<fsdp__fp16>();
    return error;
}
