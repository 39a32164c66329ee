/* SPDX-License-Identifier: MIT */
#include "gpu_toy.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "fsdp/cuda.h"
#include "gpu_ranks.h"

const toy_device *gpu_toy = &gpu_toy_device;

static fsdp_status open_on_gpu(toy *t, fsdp_config *config)
{
    fsdp_cuda_config cuda = FSDP_CUDA_CONFIG_INIT;
    cuda.launch = t->launch;
    cuda.side = t->side;
    cuda.jitter_ns = t->config->jitter_ns;
    cuda.jitter_seed = t->config->jitter_seed + 1000 * t->rank;
    config->backend = fsdp_cuda_backend();
    config->backend_config = &cuda;
    TOY_TRY(fsdp_context_create(config, &t->ctx));
    return FSDP_OK;
}

const toy_device gpu_toy_device = {gpu_rank_environment, open_on_gpu};

static void begin_on_host(uint32_t rank) { (void)rank; }

/* toy_rank.c has set all but the context. */
static fsdp_status open_on_host(toy *t, fsdp_config *config)
{
    TOY_TRY(fsdp_context_create(config, &t->ctx));
    return FSDP_OK;
}

const toy_device gpu_toy_host = {begin_on_host, open_on_host};

bool gpu_toy_begin(const char *test, int n_args, char **args)
{
    if (n_args > 1 && strcmp(args[1], "host") == 0) gpu_toy = &gpu_toy_host;
    return gpu_toy == &gpu_toy_host || !gpu_is_missing_here(test);
}

toy_config gpu_toy_config(uint32_t world)
{
    toy_config config = toy_config_default();
    config.world = world;
    config.device = gpu_toy;
    return config;
}

int gpu_toy_deadline(void **unused)
{
    (void)unused;
    alarm(250);
    return 0;
}
