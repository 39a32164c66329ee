/* SPDX-License-Identifier: MIT */
/* What the conformance suites and tests beside them ask of a GPU. */
#ifndef FSDP_TESTS_GPU_SUITES_H
#define FSDP_TESTS_GPU_SUITES_H

#include "cuda/cuda_backend.h"
#include "gpu_kernels.h"

#define CUDA(call) assert_string_equal(cudaGetErrorName(call), "cudaSuccess")

/* Of a world of one; storage has room for it. */
static inline const void *gpu_config(void *storage, uint64_t jitter_ns, uint64_t jitter_seed)
{
    fsdp_cuda_config *config = storage;
    *config = (fsdp_cuda_config)FSDP_CUDA_CONFIG_INIT;
    config->jitter_ns = jitter_ns;
    config->jitter_seed = jitter_seed;
    return config;
}

static inline fsdp_status gpu_hold_stream(void *stream, uint32_t *word)
{
    cudaError_t error = gpu_hold(((fsdp__cuda_stream *)stream)->native, word);
    return error == cudaSuccess ? FSDP_OK : fsdp_backend_fail(FSDP_ERR_DEVICE, "hold: %s", cudaGetErrorName(error));
}

#endif
