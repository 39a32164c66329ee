/* SPDX-License-Identifier: MIT */
/* Several ranks on one GPU: processes that NCCL takes for machines, each of its own name, so that it connects them by sockets.
 * With FSDP_TEST_GPUS=n in the environment they go round n GPUs of this machine, and those on different ones are on one machine
 * to NCCL. A process that has called CUDA must not fork them. */
#ifndef FSDP_TESTS_GPU_RANKS_H
#define FSDP_TESTS_GPU_RANKS_H

#include <stdbool.h>
#include <stdint.h>

/* In one line why there is no GPU, if so; asked in a child, so that this process stays without CUDA. */
bool gpu_is_missing_here(const char *test);
/* In a rank's process, before CUDA or NCCL is called: NCCL's environment, and the rank's GPU is made current. */
void gpu_rank_environment(uint32_t rank);

#endif
