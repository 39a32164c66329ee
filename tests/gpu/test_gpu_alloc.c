/* SPDX-License-Identifier: MIT */
/* The allocator on CUDA, with both policies. Its suites count in pages of 4096 bytes. */
#include <stdio.h>
#include <stdlib.h>

#include "../conformance/alloc_suite.h"
#include "gpu_suites.h"

static void peek(void *dst, const void *src, uint64_t bytes)
{
    assert_int_equal(cudaMemcpy(dst, src, bytes, cudaMemcpyDeviceToHost), cudaSuccess);
}

int main(void)
{
    if (gpu_is_missing("test_gpu_alloc")) return 77;
    static const char *const policies[] = {"wait first", "grow first"};
    int failed = 0;
    for (int policy = FSDP_ALLOC_WAIT_FIRST; policy <= FSDP_ALLOC_GROW_FIRST; policy++) {
        char name[64];
        snprintf(name, sizeof name, "allocator on cuda, %s", policies[policy]);
        const alloc_suite suite = {.name = name,
                                   .backend = fsdp_cuda_backend(),
                                   .config = gpu_config,
                                   .policy = (fsdp_alloc_policy)policy,
                                   .any_thread = true,
                                   .has_data = true,
                                   .peek = peek,
                                   .takes_time = true,
                                   .bounded = true,
                                   .n_programs = 12,
                                   .granularity = 4096};
        failed += run_alloc_suite(&suite) + run_alloc_limit_suite(&suite) + run_alloc_choice_suite(&suite) +
                  run_alloc_order_suite(&suite) + run_alloc_stream_suite(&suite) + run_alloc_host_suite(&suite) +
                  run_alloc_model_suite(&suite);
    }
    return failed > 0;
}
