/* SPDX-License-Identifier: MIT */
/* Kernels of the optimizer's step. Those over segments cut each segment into tiles, numbered over all segments; block b of a
 * grid of G takes the tiles b, b + G, …. The table of segments lies in device memory: a block reads its counts, 256 at a time,
 * and sums them up to find its tiles. */
#include "cuda_elements.cuh"

static const int THREADS = 256;

/* ---- Tiles ---- */

/* Of 256 segments of the table: how many tiles end with each, summed. */
struct tile_map {
    uint64_t ends[THREADS];
    uint64_t warp_sums[THREADS / 32];
};

static __device__ void map_tiles(tile_map *map, const fsdp_kernel_segment *segments, uint64_t n, uint64_t tile)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint64_t sum = threadIdx.x < n ? (segments[threadIdx.x].count + tile - 1) / tile : 0;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const uint64_t left = __shfl_up_sync(0xffffffffu, sum, step);
        if (lane >= step) sum += left;
    }
    __syncthreads(); /* the map's last readers are through */
    if (lane == 31) map->warp_sums[warp] = sum;
    __syncthreads();
    for (int w = 0; w < warp; w++) sum += map->warp_sums[w];
    map->ends[threadIdx.x] = sum;
    __syncthreads();
}

/* The segment that tile t lies in: the first whose end is beyond it. */
static __device__ __forceinline__ int segment_of(const tile_map *map, uint64_t t)
{
    int low = 0;
#pragma unroll
    for (int step = THREADS / 2; step > 0; step /= 2)
        if (map->ends[low + step - 1] <= t) low += step;
    return low;
}

/* visit(segment, first element of the tile) for each tile of this block, in order. */
template <typename Visit>
static __device__ __forceinline__ void for_tiles(const fsdp_kernel_segment *segments, uint64_t n, uint64_t tile,
                                                 const Visit &visit)
{
    __shared__ tile_map map;
    uint64_t next = blockIdx.x, base = 0; /* numbers over all segments: this block's next tile; tiles passed */
    for (uint64_t first = 0; first < n; first += THREADS) {
        map_tiles(&map, segments + first, n - first, tile);
        const uint64_t here = map.ends[THREADS - 1];
        for (; next - base < here; next += gridDim.x) {
            const uint64_t t = next - base;
            const int s = segment_of(&map, t);
            visit(segments[first + s], (t - (s > 0 ? map.ends[s - 1] : 0)) * tile);
        }
        base += here;
    }
}

/* ---- Σ x²
 * A thread sums the squares of its places in all its tiles, place i of each group on sum i; the sums of a group are folded by
 * halves, then those of a warp, then those of the warps; the last block to end folds the blocks' sums. Which place is whose
 * depends on counts alone, and blocks without a tile add 0: the grid's size does not show. ---- */

static const int SUM_BLOCKS = 528, SUM_GROUPS = 4; /* 528: four for each multiprocessor of an H100 */

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

/* Of all threads, on thread 0. */
static __device__ float fold_block(float sum)
{
    __shared__ float warp_sums[THREADS / 32];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_down_sync(0xffffffffu, sum, step);
    __syncthreads();
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = sum;
    __syncthreads();
    float total = 0.0f;
    for (int w = 0; w < THREADS / 32; w++) total += warp_sums[w];
    return total;
}

static __device__ void fold_blocks(float *out, sum_slot *slot, float block_sum)
{
    __shared__ bool last;
    if (threadIdx.x == 0) {
        slot->part[blockIdx.x] = block_sum;
        __threadfence();
        last = atomicAdd(&slot->n_ended, 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    float sum = 0.0f;
    for (unsigned b = threadIdx.x; b < gridDim.x; b += THREADS) sum += __ldcg(&slot->part[b]);
    sum = fold_block(sum);
    if (threadIdx.x != 0) return;
    *out += sum;
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
    constexpr int N = 16 / sizeof(T);
    constexpr uint64_t TILE = (uint64_t)THREADS * N * SUM_GROUPS;
    float sum[N] = {0.0f};
    for_tiles(a.segments, a.n_segments, TILE, [&](const fsdp_kernel_segment &segment, uint64_t tile) {
        const T *x = a.x + segment.offset;
        const uint64_t at = tile + (uint64_t)threadIdx.x * N, count = segment.count;
        if (tile + TILE <= count && fsdp__is_aligned<16>(x)) {
            square_groups<true, SUM_GROUPS>(sum, x, at, count);
            return;
        }
#pragma unroll 1
        for (int k = 0; k < SUM_GROUPS; k++) square_groups<false, 1>(sum, x, at + (uint64_t)k * THREADS * N, count);
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
    const uint64_t tile = (uint64_t)THREADS * (16 / sizeof(T)) * SUM_GROUPS;
    const uint64_t n = op->u.square_sum.n_segments, most = op->u.square_sum.count / tile + n;
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

__global__ void __launch_bounds__(32) step_input_kernel(step_input_args a)
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
    const bool differs = ranks_differ(a.total, input.world), finite = isfinite(norm);
    const bool skip = input.skip != 0 || !finite || differs;
    float clip = 1.0f;
    if (finite && input.max_norm > 0.0f && input.max_norm < norm) clip = input.max_norm / norm;

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

__global__ void __launch_bounds__(32) step_result_kernel(step_result_args a)
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

/* ---- AdamW: fsdp/optim.h, operation by operation ---- */

static const int ADAMW_GROUP = 4, ADAMW_BLOCKS = 5; /* elements together; blocks of a multiprocessor */

template <typename W, typename G> struct adamw_args {
    W *w;
    const G *g;
    float *m, *v;
    const fsdp_kernel_segment *segments;
    uint64_t n_segments;
    const fsdp_device_step *step;
    float beta1, beta2, eps, weight_decay;
};

/* What a segment adds to it. */
struct adamw_factors {
    float factor, bias1, bias2, lr, decay;
};

template <bool WHOLE, typename W, typename G>
static __device__ __forceinline__ void adamw_tile(const adamw_args<W, G> &a, const adamw_factors &f, uint64_t offset,
                                                  uint64_t at, uint64_t count)
{
    constexpr int N = ADAMW_GROUP;
    if (!WHOLE && at >= count) return;
    fsdp__group<G, N> gradient;
    fsdp__group<W, N> w_group;
    fsdp__group<float, N> m_group, v_group;
    fsdp__load<WHOLE>(&gradient, a.g + offset, at, count);
    fsdp__load<WHOLE>(&w_group, static_cast<const W *>(a.w + offset), at, count);
    fsdp__load<WHOLE>(&m_group, static_cast<const float *>(a.m + offset), at, count);
    fsdp__load<WHOLE>(&v_group, static_cast<const float *>(a.v + offset), at, count);
    const float rest1 = 1.0f - a.beta1, rest2 = 1.0f - a.beta2;
#pragma unroll
    for (int i = 0; i < N; i++) {
        const float g = fsdp__to_float(gradient.at[i]) * f.factor;
        const float m = a.beta1 * m_group.at[i] + rest1 * g;
        const float v = a.beta2 * v_group.at[i] + rest2 * (g * g);
        float w = fsdp__to_float(w_group.at[i]);
        w -= f.lr * (m / f.bias1 / (sqrtf(v / f.bias2) + a.eps) + f.decay * w);
        m_group.at[i] = m;
        v_group.at[i] = v;
        fsdp__from_float(&w_group.at[i], w);
    }
    fsdp__store<WHOLE>(a.w + offset, at, count, w_group);
    fsdp__store<WHOLE>(a.m + offset, at, count, m_group);
    fsdp__store<WHOLE>(a.v + offset, at, count, v_group);
}

template <typename W, typename G>
__global__ void __launch_bounds__(THREADS, ADAMW_BLOCKS) adamw_kernel(adamw_args<W, G> a)
{
    constexpr int N = ADAMW_GROUP;
    constexpr uint64_t TILE = (uint64_t)THREADS * N;
    const fsdp_device_step step = *a.step;
    if (step.skip != 0) return;
    for_tiles(a.segments, a.n_segments, TILE, [&](const fsdp_kernel_segment &segment, uint64_t tile) {
        const uint64_t offset = segment.offset, at = tile + (uint64_t)threadIdx.x * N;
        const adamw_factors f = {step.factor, step.bias1, step.bias2, step.lr * segment.lr_scale,
                                 a.weight_decay * segment.decay};
        const bool whole = tile + TILE <= segment.count && fsdp__is_aligned<N * sizeof(W)>(a.w + offset) &&
                           fsdp__is_aligned<N * sizeof(G)>(a.g + offset) && fsdp__is_aligned<16>(a.m + offset) &&
                           fsdp__is_aligned<16>(a.v + offset);
        if (whole) adamw_tile<true>(a, f, offset, at, segment.count);
        else adamw_tile<false>(a, f, offset, at, segment.count);
    });
}

template <typename W, typename G>
static cudaError_t adamw_as(cudaStream_t stream, const fsdp_device_op *op, int n_processors)
{
    const uint64_t n = op->u.adamw.n_segments, most = op->u.adamw.count / (THREADS * ADAMW_GROUP) + n;
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
    const uint64_t full = (uint64_t)n_processors * ADAMW_BLOCKS;
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

/* ---- Loading ---- */

template <typename W> static cudaError_t load_on()
{
    cudaError_t error = fsdp__load_kernel(square_sum_kernel<W>);
    if (error == cudaSuccess) error = fsdp__load_kernel(adamw_kernel<W, float>);
    if (error == cudaSuccess) error = fsdp__load_kernel(adamw_kernel<W, fsdp__bf16>);
    if (error == cudaSuccess) error = fsdp__load_kernel(adamw_kernel<W, fsdp__fp16>);
    return error;
}

extern "C" cudaError_t fsdp__cuda_load_step(void)
{
    cudaError_t error = load_on<float>();
    if (error == cudaSuccess) error = load_on<fsdp__bf16>();
    if (error == cudaSuccess) error = load_on<fsdp__fp16>();
    if (error == cudaSuccess) error = fsdp__load_kernel(step_input_kernel);
    if (error == cudaSuccess) error = fsdp__load_kernel(step_result_kernel);
    return error;
}
