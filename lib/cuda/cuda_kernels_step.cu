/* SPDX-License-Identifier: MIT */
/* Kernels of the optimizer's step, but for AdamW: the sum of squares, and what is done once. */
#include "cuda_tiles.cuh"

static const int THREADS = FSDP__TILE_THREADS;

/* ---- Σ x²
 * A thread sums the squares of its places in all its tiles, place i of each group on sum i; the sums of a group are folded by
 * halves, then those of a warp, then those of the warps; the last block to end folds the blocks' sums. Which place is whose
 * depends on counts alone, and blocks without a tile add 0: the grid's size does not show. ---- */

static const int SUM_BLOCKS = 528; /* four for each multiprocessor of an H100 */
static const int SUM_GROUPS = 4, SUM_PARTS = (SUM_BLOCKS + THREADS - 1) / THREADS;

struct sum_slot {
    float part[SUM_BLOCKS];
    unsigned n_ended; /* blocks of the launch that runs; 0 between launches */
};
static_assert(sizeof(sum_slot) <= FSDP__CUDA_SUM_BYTES, "a slot holds it");

template <typename T> struct sum_args {
    float *out;
    const T *x;
    const fsdp_kernel_segment *segments;
    uint64_t n_segments;
    sum_slot *slot;
};

template <typename T> struct sum_shape {
    static constexpr int group = 16 / sizeof(T);
    static constexpr uint32_t tile = THREADS * group * SUM_GROUPS;
};

/* Of all threads, on each. */
static __device__ float fold_block(float sum)
{
    __shared__ float warp_sums[THREADS / 32];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_down_sync(0xffffffffu, sum, step);
    __syncthreads();
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = sum;
    __syncthreads();
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < THREADS / 32; w++) total += warp_sums[w];
    return total;
}

/* One more block of the launch has ended: what it stored before is seen by who sees the count, which is before this block. */
static __device__ __forceinline__ unsigned count_ended(unsigned *n_ended)
{
    unsigned before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(n_ended) : "memory");
    return before;
}

static __device__ __forceinline__ void fold_blocks(float *out, sum_slot *slot, float block_sum)
{
    bool last = false;
    if (threadIdx.x == 0) {
        __stcg(&slot->part[blockIdx.x], block_sum);
        last = count_ended(&slot->n_ended) == gridDim.x - 1;
    }
    if (__syncthreads_or(last) == 0) return;
    float before = 0.0f, part[SUM_PARTS], sum = 0.0f;
    if (threadIdx.x == 0) before = *out;
#pragma unroll
    for (int k = 0; k < SUM_PARTS; k++) {
        const unsigned b = threadIdx.x + k * THREADS;
        part[k] = b < gridDim.x ? __ldcg(&slot->part[b]) : 0.0f;
    }
#pragma unroll
    for (int k = 0; k < SUM_PARTS; k++) sum += part[k];
    sum = fold_block(sum);
    if (threadIdx.x != 0) return;
    *out = before + sum;
    slot->n_ended = 0;
}

template <bool WHOLE, int K, typename T, int N>
static __device__ __forceinline__ void square_groups(float (&sum)[N], const T *x, uint64_t at, uint64_t count)
{
    fsdp__group<T, N> group[K];
#pragma unroll
    for (int k = 0; k < K; k++) fsdp__load<WHOLE>(&group[k], x, at + (uint64_t)k * THREADS * N, count);
#pragma unroll
    for (int k = 0; k < K; k++) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            const float value = fsdp__to_float(group[k].at[i]);
            sum[i] += value * value;
        }
    }
}

template <typename T> __global__ void __launch_bounds__(THREADS, 4) square_sum_kernel(sum_args<T> a)
{
    constexpr int N = sum_shape<T>::group;
    constexpr uint32_t TILE = sum_shape<T>::tile;
    float sum[N] = {0.0f};
    fsdp__for_tiles<TILE>(a.segments, a.n_segments, [&](const fsdp_kernel_segment &segment, uint64_t tile) {
        const T *x = a.x + segment.offset;
        uint64_t at = tile + (uint64_t)threadIdx.x * N;
        const uint64_t count = segment.count;
        if (tile + TILE <= count && fsdp__is_aligned<16>(x)) {
            square_groups<true, SUM_GROUPS>(sum, x, at, count);
            return;
        }
#pragma unroll 1
        for (int k = 0; k < SUM_GROUPS && at < count; k++, at += THREADS * N)
            square_groups<false, 1>(sum, x, at, count);
    });
#pragma unroll
    for (int width = N / 2; width > 0; width /= 2) {
#pragma unroll
        for (int i = 0; i < width; i++) sum[i] += sum[i + width];
    }
    fold_blocks(a.out, a.slot, fold_block(sum[0]));
}

template <typename T> static cudaError_t square_sum_as(cudaStream_t stream, const fsdp_device_op *op, char *slot)
{
    const uint64_t n = op->u.square_sum.n_segments, most = op->u.square_sum.count / sum_shape<T>::tile + n;
    if (n == 0) return cudaSuccess;
    const sum_args<T> args = {op->u.square_sum.out, static_cast<const T *>(op->u.square_sum.x),
                              op->u.square_sum.segments, n, reinterpret_cast<sum_slot *>(slot)};
    return fsdp__launch_kernel(square_sum_kernel<T>, most < SUM_BLOCKS ? most : SUM_BLOCKS, THREADS, stream, args);
}

extern "C" cudaError_t fsdp__cuda_square_sum(cudaStream_t stream, const fsdp_device_op *op, char *sum_slot)
{
    switch (op->u.square_sum.dtype) {
    case FSDP_DTYPE_BF16: return square_sum_as<fsdp__bf16>(stream, op, sum_slot);
    case FSDP_DTYPE_FP16: return square_sum_as<fsdp__fp16>(stream, op, sum_slot);
    default: return square_sum_as<float>(stream, op, sum_slot);
    }
}

/* ---- The step ---- */

struct step_input_args {
    float *part;
    fsdp_step_input *to;
    fsdp_step_input input;
};

static __global__ void __launch_bounds__(32) step_input_kernel(step_input_args a)
{
    const unsigned i = threadIdx.x;
    if (i == 0) *a.to = a.input;
    if (i >= FSDP_STEP_ORDER_PIECES) return;
    const float value = (float)(a.input.order >> i * FSDP_STEP_ORDER_BITS & ((1u << FSDP_STEP_ORDER_BITS) - 1));
    a.part[FSDP_STEP_ORDER + 2 * i] = value;
    a.part[FSDP_STEP_ORDER + 2 * i + 1] = value * value;
}

struct step_result_args {
    float *part;
    const float *total;
    fsdp_device_step *step;
    const fsdp_step_input *input;
    fsdp_report_record *reports;
    uint32_t n_reports;
};

/* As in lib/host/host_kernels.c, line by line. */
static __device__ bool ranks_differ(const float *total, uint32_t world)
{
    for (const float *piece = total + FSDP_STEP_ORDER; piece < total + FSDP_STEP_FLOATS; piece += 2)
        if (!((double)world * (double)piece[1] - (double)piece[0] * (double)piece[0] == 0.0)) return true;
    return false;
}

static __device__ void step_result(const step_result_args &a)
{
    const fsdp_step_input input = *a.input;
    const float norm = input.factor * sqrtf(a.total[0]);
    const bool differs = ranks_differ(a.total, input.world), skip = input.skip != 0 || !isfinite(norm) || differs;
    float clip = 1.0f;
    if (!skip && input.max_norm > 0.0f && input.max_norm < norm) clip = input.max_norm / norm;

    const uint64_t updates = a.step->updates + (skip ? 0 : 1);
    a.step->updates = updates;
    a.step->skip = skip ? 1 : 0;
    a.step->lr = input.lr;
    a.step->factor = input.factor * clip;
    a.step->bias1 = (float)(1.0 - pow((double)input.beta1, (double)updates));
    a.step->bias2 = (float)(1.0 - pow((double)input.beta2, (double)updates));

    fsdp_report_record *to = &a.reports[input.step % a.n_reports];
    to->step = input.step;
    to->updates = updates;
    to->skipped = skip ? 1 : 0;
    to->lr = input.lr;
    to->grad_norm = norm;
    to->clip_scale = clip;
    for (int i = 0; i < 16; i++) to->sums[i] = a.total[1 + i];
    __threadfence_system(); /* the host may look at what follows before the step's event is done */
    *(volatile uint64_t *)&to->differs = differs ? input.step : 0;
}

static __global__ void __launch_bounds__(32) step_result_kernel(step_result_args a)
{
    if (threadIdx.x == 0) step_result(a);
    __syncwarp(); /* part may be total */
    if (threadIdx.x < FSDP_STEP_ORDER) a.part[threadIdx.x] = 0.0f;
}

extern "C" cudaError_t fsdp__cuda_step_input(cudaStream_t stream, const fsdp_device_op *op)
{
    const step_input_args args = {op->u.step_input.part, op->u.step_input.to, op->u.step_input.input};
    return fsdp__launch_kernel(step_input_kernel, 1, 32, stream, args);
}

extern "C" cudaError_t fsdp__cuda_step_result(cudaStream_t stream, const fsdp_device_op *op)
{
    const step_result_args args = {op->u.step_result.part,  op->u.step_result.total,   op->u.step_result.step,
                                   op->u.step_result.input, op->u.step_result.reports, op->u.step_result.n_reports};
    return fsdp__launch_kernel(step_result_kernel, 1, 32, stream, args);
}

/* ---- Loading ---- */

extern "C" cudaError_t fsdp__cuda_load_step(void)
{
    cudaError_t error = fsdp__load_kernel(square_sum_kernel<float>);
    if (error == cudaSuccess) error = fsdp__load_kernel(square_sum_kernel<fsdp__bf16>);
    if (error == cudaSuccess) error = fsdp__load_kernel(square_sum_kernel<fsdp__fp16>);
    if (error == cudaSuccess) error = fsdp__load_kernel(step_input_kernel);
    if (error == cudaSuccess) error = fsdp__load_kernel(step_result_kernel);
    return error;
}
