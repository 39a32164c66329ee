/* SPDX-License-Identifier: MIT */
/* The kernels' launchers (cuda_kernels_*.cu): C for the rest of lib/cuda. They return what
 * cudaLaunchKernel says. */
#ifndef FSDP_LIB_CUDA_KERNELS_H
#define FSDP_LIB_CUDA_KERNELS_H

#include <cuda_runtime_api.h>

#include "fsdp/backend.h"

#ifdef __cplusplus
extern "C" {
#endif
enum { FSDP__CUDA_SUM_BYTES = 4096 }; /* of a slot of SQUARE_SUM, zeroed before its first use */
/* Load every kernel into the current device's context, so that no launch loads one later. */
cudaError_t fsdp__cuda_load_kernels(void);
cudaError_t fsdp__cuda_cast(cudaStream_t stream, const fsdp_device_op *op);
cudaError_t fsdp__cuda_add(cudaStream_t stream, const fsdp_device_op *op);
cudaError_t fsdp__cuda_square_sum(cudaStream_t stream, const fsdp_device_op *op, char *sum_slot);
cudaError_t fsdp__cuda_step_input(cudaStream_t stream, const fsdp_device_op *op);
cudaError_t fsdp__cuda_step_result(cudaStream_t stream, const fsdp_device_op *op);
cudaError_t fsdp__cuda_adamw(cudaStream_t stream, const fsdp_device_op *op, int n_processors);
/* Spin for ns nanoseconds, or until *stop is not 0. */
cudaError_t fsdp__cuda_delay(cudaStream_t stream, uint64_t ns, const uint32_t *stop);
/* fsdp__cuda_load_kernels, by file. */
cudaError_t fsdp__cuda_load_elements(void);
cudaError_t fsdp__cuda_load_step(void);
cudaError_t fsdp__cuda_load_adamw(void);
#ifdef __cplusplus
}
#endif

#endif
