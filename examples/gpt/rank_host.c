/* SPDX-License-Identifier: MIT */
/* Ranks on the host backend: a visit is a function that the stream's thread runs. */
#include "rank.h"

static fsdp_status open_host(rank *r, fsdp_config *config)
{
    const options *o = &r->job->opt;
    fsdp_host_config host = FSDP_HOST_CONFIG_INIT;
    host.launch = r->job->launch;
    host.local = r->local;
    host.link = r->link;
    host.rank = r->local ? (uint32_t)r->index : 0;
    host.jitter_ns = (uint64_t)o->jitter_us * 1000;
    host.jitter_seed = (uint64_t)o->seed + (uint64_t)r->index;
    config->backend = fsdp_host_backend();
    config->backend_config = &host;
    TRY(fsdp_context_create(config, &r->ctx));
    return fsdp_stream_create(r->ctx, "compute", &r->stream);
}

/* fp32 throughout, gradients zeroed: the library's defaults. */
static void configure_host(const rank *r, fsdp_unit_config *config)
{
    (void)r;
    (void)config;
}

static fsdp_status take_host_memory(rank *r)
{
    for (int i = 0; i < r->n_blocks; i++) r->blocks[i].mean_loss = &r->blocks[i].loss;
    if (gpt_state_create(&r->state, &r->job->shape)) return FSDP_OK;
    problem_set(&r->why, "rank %d: no memory for the activations of a model of this size", r->index);
    return FSDP_ERR_NO_HOST_MEMORY;
}

static void give_back_host(rank *r) { gpt_state_destroy(&r->state); }

static fsdp_status put_on_host(rank *r, pass_block *block, fsdp_host_fn fill, void *task)
{
    (void)block;
    return fsdp_stream_host_call(r->stream, fill, task);
}

static fsdp_status visit_on_host(rank *r, gpt_call *call) { return fsdp_stream_host_call(r->stream, gpt_run, call); }

static fsdp_status get_on_host(rank *r, fsdp_host_fn take, void *task)
{
    return fsdp_stream_host_call(r->stream, take, task);
}

const rank_device rank_host_device = {open_host,   configure_host, take_host_memory, give_back_host,
                                      put_on_host, visit_on_host,  get_on_host};
