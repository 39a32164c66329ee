/* SPDX-License-Identifier: MIT */
/* What the benches of the trainer's kernels share: checks, and arrays on the GPU. */
#ifndef FSDP_BENCH_GPT_BENCH_H
#define FSDP_BENCH_GPT_BENCH_H

#include <cuda_runtime_api.h>
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "convert.h"
#include "counter_random.h"

enum { MOST_RANDOM = 1 << 22 };

static inline void check(cudaError_t result)
{
    if (result == cudaSuccess) return;
    fprintf(stderr, "%s: %s\n", program_invocation_short_name, cudaGetErrorString(result));
    exit(1);
}

static inline void *device(size_t bytes)
{
    void *p = NULL;
    check(cudaMalloc(&p, bytes));
    check(cudaMemset(p, 0, bytes));
    check(cudaDeviceSynchronize());
    return p;
}

/* Normal numbers × sd + mean in bf16, the same n_random, at most MOST_RANDOM, again and again. */
static inline void *device_random(size_t count, size_t n_random, float mean, float sd)
{
    static uint16_t random[MOST_RANDOM];
    for (uint64_t i = 0; i < n_random && i < count; i++)
        random[i] = fsdp__to_bf16(mean + sd * (float)random_normal(1, 0, i));
    uint16_t *p = device(2 * count);
    for (size_t at = 0; at < count; at += n_random)
        check(cudaMemcpy(p + at, random, 2 * (count - at < n_random ? count - at : n_random), cudaMemcpyHostToDevice));
    check(cudaDeviceSynchronize());
    return p;
}

#endif
