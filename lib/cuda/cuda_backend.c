/* SPDX-License-Identifier: MIT */
/* The backend's one table of tables. */
#include "cuda_backend.h"

const fsdp_backend *fsdp_cuda_backend(void)
{
    static const fsdp_backend backend = {
        .size = sizeof backend,
        .name = "cuda",
        .device = &fsdp__cuda_device_ops,
        .comm = &fsdp__nccl_comm_ops,
        .side = &fsdp__cuda_side_ops,
    };
    return &backend;
}
