/* SPDX-License-Identifier: MIT */
/* Kernels of the GPU tests, and whether there is a GPU. */
#ifndef FSDP_TESTS_GPU_KERNELS_H
#define FSDP_TESTS_GPU_KERNELS_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Load the kernels, so that no launch loads one while another spins. Makes the current GPU's context. */
cudaError_t gpu_load_kernels(void);
/* The stream stands until *word, pinned memory, is not 0. */
cudaError_t gpu_hold(cudaStream_t stream, const uint32_t *word);
/* A store into the page of NULL, the one address at which CUDA maps nothing: it breaks the context of this process. */
cudaError_t gpu_store_nowhere(cudaStream_t stream);

#ifdef __cplusplus
}
#endif

/* In one line why there is no GPU, if so; the test ends with 77 then. */
static inline bool gpu_is_missing(const char *test)
{
    int n = 0;
    cudaError_t error = cudaGetDeviceCount(&n);
    if (error == cudaSuccess && n > 0) return false;
    printf("%s is skipped: no GPU: %s\n", test, error == cudaSuccess ? "there are none" : cudaGetErrorString(error));
    return true;
}

#endif
