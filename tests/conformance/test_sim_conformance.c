/* SPDX-License-Identifier: MIT */
/* The sim backend passes the device suite. It has no data, so the kernel suite has nothing to look at. */
#include "device_suite.h"

#include "fsdp/sim.h"

static const void *sim_config(void *storage, uint64_t jitter_ns, uint64_t jitter_seed)
{
    fsdp_sim_config *config = storage;
    (void)jitter_seed;
    if (jitter_ns > 0) return NULL;
    *config = (fsdp_sim_config)FSDP_SIM_CONFIG_INIT;
    config->kernel_latency_ns = 1000;
    config->kernel_bytes_per_second = 1000000000;
    return config;
}

int main(void)
{
    device_suite suite = {.backend = fsdp_sim_backend(), .config = sim_config};
    return run_device_suite(&suite) > 0;
}
