/* SPDX-License-Identifier: MIT */
/* Kernels over plain arrays: cast, add; and the delay. A block does one tile, each thread several groups of neighbours, 64
 * bytes of the source for a cast, about 128 of both arrays for an add. Groups are of 4 elements where an array is fp32, else of
 * 8, so that a warp's accesses lie side by side on both sides. A tile that is not whole, or not aligned, goes by elements. */
#include "cuda_elements.cuh"

static const int THREADS = 256;

template <typename D, typename S> struct shape {
    static constexpr int group = sizeof(D) == 2 && sizeof(S) == 2 ? 8 : 4;
    static constexpr int cast_groups = 64 / (group * (int)sizeof(S)); /* of a thread */
    static constexpr int add_groups = 4;
    static constexpr uint64_t cast_tile = (uint64_t)THREADS * group * cast_groups;
    static constexpr uint64_t add_tile = (uint64_t)THREADS * group * add_groups;
};

template <typename D, typename S> struct pair_args {
    D *dst;
    const S *src;
    uint64_t count;
};

template <typename D, typename S>
static __device__ __forceinline__ void cast_whole(const pair_args<D, S> &a, uint64_t at)
{
    constexpr int N = shape<D, S>::group, K = shape<D, S>::cast_groups;
    fsdp__group<S, N> from[K];
#pragma unroll
    for (int k = 0; k < K; k++) fsdp__load<true>(&from[k], a.src, at + (uint64_t)k * THREADS * N, a.count);
#pragma unroll
    for (int k = 0; k < K; k++) {
        fsdp__group<D, N> to;
#pragma unroll
        for (int i = 0; i < N; i++) fsdp__from_float(&to.at[i], fsdp__to_float(from[k].at[i]));
        fsdp__store<true>(a.dst, at + (uint64_t)k * THREADS * N, a.count, to);
    }
}

template <typename D, typename S>
static __device__ __forceinline__ void add_whole(const pair_args<D, S> &a, uint64_t at)
{
    constexpr int N = shape<D, S>::group, K = shape<D, S>::add_groups;
    fsdp__group<S, N> from[K];
    fsdp__group<D, N> sum[K];
#pragma unroll
    for (int k = 0; k < K; k++) {
        fsdp__load<true>(&from[k], a.src, at + (uint64_t)k * THREADS * N, a.count);
        fsdp__load<true>(&sum[k], static_cast<const D *>(a.dst), at + (uint64_t)k * THREADS * N, a.count);
    }
#pragma unroll
    for (int k = 0; k < K; k++) {
#pragma unroll
        for (int i = 0; i < N; i++)
            fsdp__from_float(&sum[k].at[i], fsdp__to_float(sum[k].at[i]) + fsdp__to_float(from[k].at[i]));
        fsdp__store<true>(a.dst, at + (uint64_t)k * THREADS * N, a.count, sum[k]);
    }
}

/* Can the block's tile be moved by groups? */
template <typename D, typename S>
static __device__ __forceinline__ bool is_whole(const pair_args<D, S> &a, uint64_t first, uint64_t tile)
{
    constexpr int N = shape<D, S>::group;
    return first + tile <= a.count && fsdp__is_aligned<N * sizeof(D)>(a.dst) && fsdp__is_aligned<N * sizeof(S)>(a.src);
}

template <typename D, typename S> __global__ void __launch_bounds__(THREADS) cast_kernel(pair_args<D, S> a)
{
    constexpr uint64_t TILE = shape<D, S>::cast_tile;
    const uint64_t first = blockIdx.x * TILE;
    if (is_whole(a, first, TILE)) {
        cast_whole(a, first + threadIdx.x * shape<D, S>::group);
        return;
    }
#pragma unroll 1
    for (uint64_t i = first + threadIdx.x; i < first + TILE && i < a.count; i += THREADS)
        fsdp__from_float(&a.dst[i], fsdp__to_float(a.src[i]));
}

template <typename D, typename S> __global__ void __launch_bounds__(THREADS) add_kernel(pair_args<D, S> a)
{
    constexpr uint64_t TILE = shape<D, S>::add_tile;
    const uint64_t first = blockIdx.x * TILE;
    if (is_whole(a, first, TILE)) {
        add_whole(a, first + threadIdx.x * shape<D, S>::group);
        return;
    }
#pragma unroll 1
    for (uint64_t i = first + threadIdx.x; i < first + TILE && i < a.count; i += THREADS)
        fsdp__from_float(&a.dst[i], fsdp__to_float(a.dst[i]) + fsdp__to_float(a.src[i]));
}

template <typename D, typename S>
static cudaError_t launch_pair(void (*kernel)(pair_args<D, S>), uint64_t tile, cudaStream_t stream,
                               const pair_args<D, S> &args)
{
    if (args.count == 0) return cudaSuccess;
    return fsdp__launch_kernel(kernel, (args.count + tile - 1) / tile, THREADS, stream, args);
}

/* Calls f<D, S> for the two types. */
#define FSDP__FOR_SOURCE(D, src_dtype, f, ...)                        \
    ((src_dtype) == FSDP_DTYPE_FP32   ? f<D, float>(__VA_ARGS__)      \
     : (src_dtype) == FSDP_DTYPE_BF16 ? f<D, fsdp__bf16>(__VA_ARGS__) \
                                      : f<D, fsdp__fp16>(__VA_ARGS__))
#define FSDP__FOR_PAIR(dst_dtype, src_dtype, f, ...)                                            \
    ((dst_dtype) == FSDP_DTYPE_FP32   ? FSDP__FOR_SOURCE(float, src_dtype, f, __VA_ARGS__)      \
     : (dst_dtype) == FSDP_DTYPE_BF16 ? FSDP__FOR_SOURCE(fsdp__bf16, src_dtype, f, __VA_ARGS__) \
                                      : FSDP__FOR_SOURCE(fsdp__fp16, src_dtype, f, __VA_ARGS__))

template <typename D, typename S>
static cudaError_t cast_as(cudaStream_t stream, void *dst, const void *src, uint64_t count)
{
    const pair_args<D, S> args = {static_cast<D *>(dst), static_cast<const S *>(src), count};
    return launch_pair(cast_kernel<D, S>, shape<D, S>::cast_tile, stream, args);
}

template <typename D, typename S>
static cudaError_t add_as(cudaStream_t stream, void *dst, const void *src, uint64_t count)
{
    const pair_args<D, S> args = {static_cast<D *>(dst), static_cast<const S *>(src), count};
    return launch_pair(add_kernel<D, S>, shape<D, S>::add_tile, stream, args);
}

extern "C" cudaError_t fsdp__cuda_cast(cudaStream_t stream, const fsdp_device_op *op)
{
    void *dst = op->u.cast.dst;
    const void *src = op->u.cast.src;
    const uint64_t count = op->u.cast.count;
    const fsdp_dtype to = op->u.cast.dst_dtype, from = op->u.cast.src_dtype;
    if (count == 0) return cudaSuccess;
    if (to == from)
        return cudaMemcpyAsync(dst, src, count * (to == FSDP_DTYPE_FP32 ? 4 : 2), cudaMemcpyDeviceToDevice, stream);
    return FSDP__FOR_PAIR(to, from, cast_as, stream, dst, src, count);
}

extern "C" cudaError_t fsdp__cuda_add(cudaStream_t stream, const fsdp_device_op *op)
{
    return FSDP__FOR_PAIR(op->u.add.dst_dtype, op->u.add.src_dtype, add_as, stream, op->u.add.dst, op->u.add.src,
                          op->u.add.count);
}

/* ---- The delay ---- */

struct delay_args {
    uint64_t ns;
    const volatile uint32_t *stop; /* host memory: a look costs a microsecond */
};

static __device__ __forceinline__ uint64_t globaltimer()
{
    uint64_t ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
}

static __global__ void __launch_bounds__(1) delay_kernel(delay_args a)
{
    const uint64_t start = globaltimer();
    for (uint64_t i = 1; globaltimer() - start < a.ns; i++)
        if (i % 64 == 0 && *a.stop != 0) break;
}

extern "C" cudaError_t fsdp__cuda_delay(cudaStream_t stream, uint64_t ns, const uint32_t *stop)
{
    const delay_args args = {ns, stop};
    return fsdp__launch_kernel(delay_kernel, 1, 1, stream, args);
}

/* ---- Loading ---- */

template <typename D, typename S> static cudaError_t load_pair()
{
    cudaError_t error = fsdp__load_kernel(cast_kernel<D, S>);
    return error != cudaSuccess ? error : fsdp__load_kernel(add_kernel<D, S>);
}

extern "C" cudaError_t fsdp__cuda_load_elements(void)
{
    const fsdp_dtype dtypes[] = {FSDP_DTYPE_FP32, FSDP_DTYPE_BF16, FSDP_DTYPE_FP16};
    for (fsdp_dtype to : dtypes) {
        for (fsdp_dtype from : dtypes) {
            const cudaError_t error = FSDP__FOR_PAIR(to, from, load_pair, );
            if (error != cudaSuccess) return error;
        }
    }
    return fsdp__load_kernel(delay_kernel);
}

extern "C" cudaError_t fsdp__cuda_load_kernels(void)
{
    cudaError_t error = fsdp__cuda_load_elements();
    if (error == cudaSuccess) error = fsdp__cuda_load_step();
    return error == cudaSuccess ? fsdp__cuda_load_adamw() : error;
}
