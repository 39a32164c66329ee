/* SPDX-License-Identifier: MIT */
/* Kernels over segments cut each segment into tiles, numbered over all segments; block b of a grid of G takes the tiles b,
 * b + G, …: all blocks are near each other in memory. The table of segments lies in device memory: a block reads 256 of them at
 * a time and sums up their counts to find its tiles. */
#ifndef FSDP_LIB_CUDA_TILES_CUH
#define FSDP_LIB_CUDA_TILES_CUH

#include "cuda_elements.cuh"

static const int FSDP__TILE_THREADS = 256; /* of a block */

/* Of 256 segments of the table: they themselves, and how many tiles end with each, summed. 2^32 tiles are more than any memory
 * holds. */
struct fsdp__tile_map {
    fsdp_kernel_segment segments[FSDP__TILE_THREADS];
    uint32_t ends[FSDP__TILE_THREADS];
    uint32_t warp_sums[FSDP__TILE_THREADS / 32];
};

static __device__ __forceinline__ void fsdp__map_tiles(fsdp__tile_map *map, const fsdp_kernel_segment *segments,
                                                       uint64_t n, uint32_t tile)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    fsdp_kernel_segment segment = {};
    if (threadIdx.x < n) segment = segments[threadIdx.x];
    uint32_t sum = static_cast<uint32_t>((segment.count + tile - 1) / tile);
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const uint32_t left = __shfl_up_sync(0xffffffffu, sum, step);
        if (lane >= step) sum += left;
    }
    __syncthreads(); /* the map's last readers are through */
    map->segments[threadIdx.x] = segment;
    if (lane == 31) map->warp_sums[warp] = sum;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < FSDP__TILE_THREADS / 32 - 1; w++)
        if (w < warp) sum += map->warp_sums[w];
    map->ends[threadIdx.x] = sum;
    __syncthreads();
}

/* The segment that tile t lies in: the first whose end is beyond it. */
static __device__ __forceinline__ int fsdp__segment_of(const fsdp__tile_map *map, uint32_t t)
{
    int low = 0;
#pragma unroll
    for (int step = FSDP__TILE_THREADS / 2; step > 0; step /= 2)
        if (map->ends[low + step - 1] <= t) low += step;
    return low;
}

/* visit(segment, first element of the tile) for each tile of this block, in order. The search is for the first of a segment. */
template <uint32_t TILE, typename Visit>
static __device__ __forceinline__ void fsdp__for_tiles(const fsdp_kernel_segment *segments, uint64_t n,
                                                       const Visit &visit)
{
    __shared__ fsdp__tile_map map;
    uint32_t t = blockIdx.x; /* this block's next tile, counted from the map's first */
    for (uint64_t first = 0; first < n; first += FSDP__TILE_THREADS) {
        fsdp__map_tiles(&map, segments + first, n - first, TILE);
        const uint32_t here = map.ends[FSDP__TILE_THREADS - 1];
        fsdp_kernel_segment segment = {};
        uint32_t begin = 0, end = 0; /* the segment's tiles */
        for (; t < here; t += gridDim.x) {
            if (t >= end) {
                const int s = fsdp__segment_of(&map, t);
                segment = map.segments[s];
                begin = s > 0 ? map.ends[s - 1] : 0;
                end = map.ends[s];
            }
            visit(segment, static_cast<uint64_t>(t - begin) * TILE);
        }
        t -= here;
    }
}

#endif
