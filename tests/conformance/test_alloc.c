/* SPDX-License-Identifier: MIT */
/* The allocator on the host and the sim backend, with both policies. */
#include <stdio.h>

#include "alloc_suite.h"

static const void *host_config(void *storage, uint64_t jitter_ns, uint64_t jitter_seed)
{
    fsdp_host_config *config = storage;
    *config = (fsdp_host_config)FSDP_HOST_CONFIG_INIT;
    config->jitter_ns = jitter_ns;
    config->jitter_seed = jitter_seed;
    return config;
}

static const void *sim_config(void *storage, uint64_t jitter_ns, uint64_t jitter_seed)
{
    fsdp_sim_config *config = storage;
    (void)jitter_ns, (void)jitter_seed;
    *config = (fsdp_sim_config)FSDP_SIM_CONFIG_INIT;
    config->kernel_bytes_per_second = 1000000000;
    return config;
}

int main(void)
{
    const alloc_suite suites[] = {
        {"allocator on host, wait first", fsdp_host_backend(), host_config, FSDP_ALLOC_WAIT_FIRST, true},
        {"allocator on host, grow first", fsdp_host_backend(), host_config, FSDP_ALLOC_GROW_FIRST, true},
        {"allocator on sim, wait first", fsdp_sim_backend(), sim_config, FSDP_ALLOC_WAIT_FIRST, false},
        {"allocator on sim, grow first", fsdp_sim_backend(), sim_config, FSDP_ALLOC_GROW_FIRST, false},
    };
    int failed = 0;
    for (size_t i = 0; i < sizeof suites / sizeof *suites; i++)
        failed += run_alloc_suite(&suites[i]) + run_alloc_choice_suite(&suites[i]) + run_alloc_order_suite(&suites[i]);
    return failed > 0;
}
