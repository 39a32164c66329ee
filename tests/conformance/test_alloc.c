/* SPDX-License-Identifier: MIT */
/* The allocator on each backend, with both policies. */
#include <stdio.h>

#include "alloc_suite.h"
#include "explore.h"
#include "null_backend.h"

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

static const void *no_config(void *storage, uint64_t jitter_ns, uint64_t jitter_seed)
{
    (void)storage, (void)jitter_ns, (void)jitter_seed;
    return NULL;
}

/* Any order that the edges allow. */
static const void *explore_any(void *storage, uint64_t jitter_ns, uint64_t jitter_seed)
{
    (void)jitter_ns;
    const explore_config config = {.world = 1, .policy = EXPLORE_RANDOM, .seed = jitter_seed, .free_threads = true};
    explore_rank *rank = storage;
    *rank = (explore_rank){sizeof *rank, explore_open(&config), 0};
    assert_non_null(rank->x);
    return rank;
}

static void explore_end(void *storage)
{
    explore_rank *rank = storage;
    const char *complaint = explore_complaint(rank->x);
    if (complaint != NULL) fail_msg("%s", complaint);
    explore_close(rank->x);
}

static int run(alloc_suite suite)
{
    static const char *const policies[] = {"wait first", "grow first"};
    int failed = 0;
    for (int policy = FSDP_ALLOC_WAIT_FIRST; policy <= FSDP_ALLOC_GROW_FIRST; policy++) {
        char name[64];
        snprintf(name, sizeof name, "allocator on %s, %s", suite.backend->name, policies[policy]);
        suite.name = name;
        suite.policy = (fsdp_alloc_policy)policy;
        failed += run_alloc_suite(&suite) + run_alloc_limit_suite(&suite) + run_alloc_choice_suite(&suite) +
                  run_alloc_order_suite(&suite) + run_alloc_stream_suite(&suite) + run_alloc_host_suite(&suite) +
                  run_alloc_model_suite(&suite);
    }
    return failed;
}

int main(void)
{
    int failed = 0;
    failed += run((alloc_suite){.backend = fsdp_host_backend(),
                                .config = host_config,
                                .any_thread = true,
                                .has_data = true,
                                .takes_time = true,
                                .bounded = true,
                                .n_programs = 24});
    failed += run((alloc_suite){.backend = fsdp_sim_backend(),
                                .config = sim_config,
                                .any_thread = true,
                                .takes_time = true,
                                .bounded = true,
                                .n_programs = 120});
    failed += run((alloc_suite){.backend = explore_backend(),
                                .config = explore_any,
                                .end = explore_end,
                                .any_thread = true,
                                .has_data = true,
                                .bounded = true,
                                .n_programs = 24});
    failed += run((alloc_suite){.backend = null_backend(), .config = no_config, .any_thread = true, .n_programs = 600});
    return failed > 0;
}
