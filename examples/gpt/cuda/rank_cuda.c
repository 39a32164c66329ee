/* SPDX-License-Identifier: MIT */
/* A rank on a GPU. It brings a stream of its own to the library, as a program with kernels would. */
#include "rank_cuda.h"

#include <fsdp/cuda.h>

#include <stdlib.h>

#include "model_cuda.h"

static const uint64_t patience_ns = 120000000000u; /* of a host that waits for its own stream */

typedef struct cuda_rank {
    cudaStream_t native;
    gpt_cuda model;
    char *staged;  /* pinned: a batch for each pass block */
    float *losses; /* on the GPU: a mean loss for each pass block, LOSS_STRIDE apart */
    bool has_put;
} cuda_rank;

enum { LOSS_STRIDE = 64 };

#define CUDA_OR_FAIL(r, call)                                                                              \
    do {                                                                                                   \
        const cudaError_t cuda_error_ = (call);                                                            \
        if (cuda_error_ != cudaSuccess) {                                                                  \
            problem_set(&(r)->why, "rank %d: %s: %s", (r)->index, #call, cudaGetErrorString(cuda_error_)); \
            return cuda_error_ == cudaErrorMemoryAllocation ? FSDP_ERR_NO_MEMORY : FSDP_ERR_DEVICE;        \
        }                                                                                                  \
    } while (0)

/* Processes of a machine take its GPUs in turn, threads a GPU each. */
static fsdp_status pick_gpu(rank *r, int *out_ordinal)
{
    const fsdp_launch *launch = r->job->launch;
    int gpus = 0;
    CUDA_OR_FAIL(r, cudaGetDeviceCount(&gpus));
    const int here = launch ? (int)launch->local_world : r->job->opt.ranks;
    const int mine = launch ? (int)launch->local_rank : r->index;
    if (here > gpus && !launch) {
        problem_set(&r->why,
                    "--ranks %d as threads need a GPU each, and there are %d: start fewer, or processes by a launcher",
                    here, gpus);
        return FSDP_ERR_ARG;
    }
    if (here > gpus && !getenv("NCCL_HOSTID")) {
        problem_set(
            &r->why,
            "%d ranks of this machine share %d GPU%s, which NCCL refuses unless each rank has a NCCL_HOSTID of its own "
            "in the environment (it takes them for machines then, and talks over sockets)",
            here, gpus, gpus == 1 ? "" : "s");
        return FSDP_ERR_ARG;
    }
    *out_ordinal = mine % gpus;
    return FSDP_OK;
}

static fsdp_status open_cuda(rank *r, fsdp_config *config)
{
    const options *o = &r->job->opt;
    cuda_rank *c = calloc(1, sizeof *c);
    int ordinal = 0;
    r->on_device = c;
    if (!c) {
        problem_set(&r->why, "rank %d: no memory", r->index);
        return FSDP_ERR_NO_HOST_MEMORY;
    }
    TRY(pick_gpu(r, &ordinal));
    CUDA_OR_FAIL(r, cudaSetDevice(ordinal));
    CUDA_OR_FAIL(r, cudaStreamCreateWithFlags(&c->native, cudaStreamNonBlocking));
    fsdp_cuda_config cuda = FSDP_CUDA_CONFIG_INIT;
    cuda.device = ordinal;
    cuda.launch = r->job->launch;
    cuda.local = o->ranks > 1 ? r->local : NULL;
    cuda.rank = r->local ? (uint32_t)r->index : 0;
    cuda.jitter_ns = (uint64_t)o->jitter_us * 1000;
    cuda.jitter_seed = (uint64_t)o->seed + (uint64_t)r->index;
    config->backend = fsdp_cuda_backend();
    config->backend_config = &cuda;
    TRY(fsdp_context_create(config, &r->ctx));
    return fsdp_cuda_stream_wrap(r->ctx, c->native, "compute", &r->stream);
}

/* Kernels read bf16 and write fp32 gradients. A block's are written whole by products and sums, and so is wte's, by the head's
 * product: zeroing them first and adding would move 8 bytes a parameter more, 12 GB a step of 1.5 billion (about 3 ms). Only
 * where the sum over micro-steps stays in the gradients do kernels add, to zeros the first time. */
static void configure_cuda(const rank *r, fsdp_unit_config *config)
{
    config->compute_dtype = FSDP_DTYPE_BF16;
    config->zero_grads = r->job->opt.micro_steps > 1 && r->job->opt.keep_full;
}

static fsdp_status told(rank *r, const problem *why, fsdp_status status)
{
    problem_set(&r->why, "rank %d: %s", r->index, why->text);
    return status;
}

static fsdp_status take_cuda_memory(rank *r)
{
    cuda_rank *c = r->on_device;
    const job *j = r->job;
    const size_t n = (size_t)r->n_blocks;
    problem why = {""};
    if (!gpt_cuda_create(&c->model, &j->shape, j->opt.recompute, j->write_text, c->native, &why))
        return told(r, &why, FSDP_ERR_NO_MEMORY);
    if (!gpt_cuda_host_state(&r->state, &j->shape)) {
        problem_set(&r->why, "rank %d: no memory for losses", r->index);
        return FSDP_ERR_NO_HOST_MEMORY;
    }
    const size_t bytes = c->model.layout.bytes;
    CUDA_OR_FAIL(r, cudaHostAlloc((void **)&c->staged, n * bytes, cudaHostAllocDefault));
    CUDA_OR_FAIL(r, cudaMalloc((void **)&c->losses, n * LOSS_STRIDE * sizeof *c->losses));
    for (size_t i = 0; i < n; i++) {
        r->blocks[i].staged = c->staged + i * bytes;
        r->blocks[i].mean_loss = c->losses + i * LOSS_STRIDE;
    }
    if (r->out) r->out->activation_bytes = c->model.bytes;
    return FSDP_OK;
}

static void give_back_cuda(rank *r)
{
    cuda_rank *c = r->on_device;
    if (!c) return;
    r->state.tokens = NULL; /* it is `staged` */
    gpt_state_destroy(&r->state);
    gpt_cuda_destroy(&c->model);
    if (c->staged) cudaFreeHost(c->staged);
    if (c->losses) cudaFree(c->losses);
    if (c->native) cudaStreamDestroy(c->native);
    free(c);
}

/* After seal all memory that this run will ever take is taken. */
static fsdp_status read_memory(rank *r)
{
    cuda_rank *c = r->on_device;
    size_t left = 0, total = 0;
    if (c->has_put || !r->out) return FSDP_OK;
    c->has_put = true;
    CUDA_OR_FAIL(r, cudaMemGetInfo(&left, &total));
    r->out->gpu_used_bytes = total - left;
    r->out->gpu_total_bytes = total;
    return FSDP_OK;
}

/* The host makes the batch now, while the GPU is steps behind. */
static fsdp_status put_cuda(rank *r, pass_block *block, fsdp_host_fn fill, void *task)
{
    cuda_rank *c = r->on_device;
    problem why = {""};
    TRY(read_memory(r));
    gpt_cuda_stage(&c->model, &r->state, block->staged);
    fill(task);
    return gpt_cuda_put(&c->model, &r->state, block->staged, &why) ? FSDP_OK : told(r, &why, FSDP_ERR_DEVICE);
}

static fsdp_status visit_cuda(rank *r, gpt_call *call)
{
    cuda_rank *c = r->on_device;
    problem why = {""};
    return gpt_cuda_visit(&c->model, call, &why) ? FSDP_OK : told(r, &why, FSDP_ERR_DEVICE);
}

static fsdp_status get_cuda(rank *r, fsdp_host_fn take, void *task)
{
    cuda_rank *c = r->on_device;
    problem why = {""};
    if (!gpt_cuda_fetch(&c->model, &why)) return told(r, &why, FSDP_ERR_DEVICE);
    TRY(fsdp_stream_drain_host(r->stream, patience_ns));
    gpt_cuda_taken(&c->model, &r->state);
    take(task);
    return FSDP_OK;
}

const rank_device rank_cuda_device = {open_cuda, configure_cuda, take_cuda_memory, give_back_cuda,
                                      put_cuda,  visit_cuda,     get_cuda};
