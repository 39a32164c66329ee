/* SPDX-License-Identifier: MIT */
/* Memory of the GPU, and page-locked memory that it reads and writes. */
#include "cuda_backend.h"

static fsdp_status no_memory(uint64_t bytes, fsdp_memory_kind kind, cudaError_t error)
{
    (void)cudaGetLastError(); /* nothing is broken: the next call starts clean */
    if (kind == FSDP_MEMORY_KIND_PINNED)
        return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "CUDA: no %llu bytes of page-locked host memory (%s)",
                          (unsigned long long)bytes, cudaGetErrorName(error));
    size_t free_bytes = 0, total_bytes = 0;
    if (cudaMemGetInfo(&free_bytes, &total_bytes) != cudaSuccess) (void)cudaGetLastError();
    return fsdp__fail(FSDP_ERR_NO_MEMORY, "CUDA: no %llu bytes of device memory: %llu of the GPU's %llu bytes are free",
                      (unsigned long long)bytes, (unsigned long long)free_bytes, (unsigned long long)total_bytes);
}

static bool is_shortage(cudaError_t error, uint64_t bytes)
{
    /* More bytes than there are addresses are an invalid value to some drivers. */
    return error == cudaErrorMemoryAllocation || (error == cudaErrorInvalidValue && bytes >> 47 != 0);
}

fsdp_status fsdp__cuda_mem_alloc(void *dev_, uint64_t bytes, fsdp_memory_kind kind, void **out_ptr)
{
    fsdp__cuda_device *dev = dev_;
    fsdp__cuda_inside inside = fsdp__cuda_enter_relaxed(dev);
    void *ptr = NULL;
    cudaError_t error = cudaErrorInvalidValue;
    switch (kind) {
    case FSDP_MEMORY_KIND_PINNED:
        error = cudaHostAlloc(&ptr, bytes, cudaHostAllocPortable | cudaHostAllocMapped);
        break;
    case FSDP_MEMORY_KIND_COLLECTIVE: error = fsdp__nccl_mem_alloc(dev, bytes, &ptr); break;
    default: error = cudaMalloc(&ptr, bytes); break;
    }
    fsdp_status status = FSDP_OK;
    if (error != cudaSuccess)
        status = is_shortage(error, bytes)
                     ? no_memory(bytes, kind, error)
                     : fsdp__cuda_fail(dev, error, "%s of %llu bytes",
                                       kind == FSDP_MEMORY_KIND_PINNED ? "cudaHostAlloc" : "cudaMalloc",
                                       (unsigned long long)bytes);
    else *out_ptr = ptr;
    fsdp__cuda_leave_relaxed(inside);
    return status;
}

void fsdp__cuda_mem_free(void *dev_, void *ptr, uint64_t bytes, fsdp_memory_kind kind)
{
    fsdp__cuda_device *dev = dev_;
    if (atomic_load(&dev->stuck)) return;
    fsdp__cuda_inside inside = fsdp__cuda_enter_relaxed(dev);
    bool pinned = kind == FSDP_MEMORY_KIND_PINNED;
    cudaError_t error = pinned                                ? cudaFreeHost(ptr)
                        : kind == FSDP_MEMORY_KIND_COLLECTIVE ? fsdp__nccl_mem_free(dev, ptr)
                                                              : cudaFree(ptr);
    FSDP_IGNORE(fsdp__cuda_fail(dev, error, "%s of %llu bytes", pinned ? "cudaFreeHost" : "cudaFree",
                                (unsigned long long)bytes));
    fsdp__cuda_leave_relaxed(inside);
}
