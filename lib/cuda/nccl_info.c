/* SPDX-License-Identifier: MIT */
/* nccl.h's calls. */
#include <stdio.h>

#include "comm.h"
#include "context.h"
#include "nccl_parts.h"

fsdp_status fsdp_nccl_info_get(const fsdp_context *ctx, fsdp_nccl_info *out_info)
{
    FSDP_NEED(ctx);
    FSDP_NEED(out_info);
    if (ctx->backend->comm != &fsdp__nccl_comm_ops)
        return fsdp__fail(FSDP_ERR_ARG, "fsdp_nccl_info_get: the context is on %s, not on CUDA", ctx->backend->name);
    fsdp_nccl_info info = FSDP_NCCL_INFO_INIT;
    const fsdp__cuda_device *dev = ctx->dev;
    fsdp__nccl_team *team = dev->nccl;
    info.built_version = NCCL_VERSION_CODE;
    if (ncclGetVersion(&info.version) != ncclSuccess) info.version = 0;
    info.comms = ctx->reduce_comm != ctx->comm ? 2 : 1;
    info.launch_ordered = fsdp__nccl_is_ordered(info.version);
    if (team != NULL) {
        info.windows = atomic_load(&team->n_windows);
        info.window_bytes = atomic_load(&team->window_bytes);
        pthread_mutex_lock(&team->lock);
        snprintf(info.path, sizeof info.path, "%s", team->path);
        pthread_mutex_unlock(&team->lock);
    }
    return fsdp__write_result("fsdp_nccl_info", out_info, &info, sizeof info, sizeof info);
}

ncclComm_t fsdp_nccl_comm(const fsdp_comm *comm)
{
    const fsdp__nccl_comm *c = comm != NULL ? fsdp__comm_native(comm, &fsdp__nccl_comm_ops) : NULL;
    return c != NULL && c->wire != NULL ? atomic_load(&c->wire->comm) : NULL;
}
