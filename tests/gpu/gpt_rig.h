/* SPDX-License-Identifier: MIT */
/* What the tests of the trainer's kernels share: random numbers that bf16 holds, arrays on both sides, relative errors. */
#ifndef FSDP_TESTS_GPU_GPT_RIG_H
#define FSDP_TESTS_GPU_GPT_RIG_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <cuda_runtime_api.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../../lib/convert.h"
#include "counter_random.h"

#define CUDA(call) assert_string_equal(cudaGetErrorString(call), cudaGetErrorString(cudaSuccess))

static inline void *rig_memory(size_t bytes)
{
    void *p = calloc(1, bytes);
    assert_non_null(p);
    return p;
}

/* From (-scale, scale), rounded to bf16, so that host and GPU start from the same. Each call gets a stream of its own. */
static inline float *rig_numbers(size_t n, double scale)
{
    static uint64_t stream;
    float *x = rig_memory(n * sizeof *x);
    stream++;
    for (size_t i = 0; i < n; i++)
        x[i] = fsdp__from_bf16(fsdp__to_bf16((float)(scale * (2.0 * random_unit(3, stream, i) - 1.0))));
    return x;
}

/* On the GPU, every byte 0xff: NaN in both formats, so that what is not written is seen. Streams that do not block wait for
 * nothing on the NULL stream: so here, and below, the host does. */
static inline void *rig_poisoned(size_t bytes)
{
    void *p = NULL;
    CUDA(cudaMalloc(&p, bytes));
    CUDA(cudaMemset(p, 0xff, bytes));
    CUDA(cudaDeviceSynchronize());
    return p;
}

static inline void *rig_up(const void *x, size_t bytes)
{
    void *p = rig_poisoned(bytes);
    CUDA(cudaMemcpy(p, x, bytes, cudaMemcpyHostToDevice));
    CUDA(cudaDeviceSynchronize());
    return p;
}

static inline void *rig_up_bf16(const float *x, size_t n)
{
    uint16_t *bits = rig_memory(n * sizeof *bits);
    for (size_t i = 0; i < n; i++) bits[i] = fsdp__to_bf16(x[i]);
    void *p = rig_up(bits, n * sizeof *bits);
    free(bits);
    return p;
}

static inline float *rig_down(const void *p, size_t n)
{
    float *x = rig_memory(n * sizeof *x);
    CUDA(cudaMemcpy(x, p, n * sizeof *x, cudaMemcpyDeviceToHost));
    return x;
}

static inline float *rig_down_bf16(const void *p, size_t n)
{
    uint16_t *bits = rig_memory(n * sizeof *bits);
    float *x = rig_memory(n * sizeof *x);
    CUDA(cudaMemcpy(bits, p, n * sizeof *bits, cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < n; i++) x[i] = fsdp__from_bf16(bits[i]);
    free(bits);
    return x;
}

/* ‖x − y‖ / ‖y‖; a NaN anywhere is a NaN here. */
static inline double rig_error(const float *x, const float *y, size_t n)
{
    double difference = 0.0, square = 0.0;
    for (size_t i = 0; i < n; i++) {
        difference += ((double)x[i] - (double)y[i]) * ((double)x[i] - (double)y[i]);
        square += (double)y[i] * (double)y[i];
    }
    return sqrt(difference) / sqrt(square);
}

/* Frees x, which came from the GPU. */
static inline void rig_check(const char *what, float *x, const float *expected, size_t n, double most)
{
    const double error = rig_error(x, expected, n);
    printf("    %-28s %.2e\n", what, error);
    free(x);
    if (!(error < most)) fail_msg("%s: relative error %.3g, and %.3g is the most", what, error, most);
}

static inline bool rig_has_gpu(void)
{
    int gpus = 0;
    if (cudaGetDeviceCount(&gpus) == cudaSuccess && gpus > 0) return true;
    printf("no GPU here: skipped\n");
    return false;
}

#endif
