/* SPDX-License-Identifier: MIT */
/* Several ranks on one GPU: processes that NCCL takes for machines, each of its own name, so that it connects them by sockets.
 * With FSDP_TEST_GPUS=n in the environment they go round n GPUs of this machine, and those on different ones are on one machine
 * to NCCL. A process that has called CUDA must not fork them. */
#ifndef FSDP_TESTS_GPU_RANKS_H
#define FSDP_TESTS_GPU_RANKS_H

#include <stdbool.h>
#include <stdint.h>

/* Opening a communicator takes NCCL seconds, and a rank that is late must be later than that: tests' timeouts. The stand-in
 * (tests/standin) opens at once. */
#ifdef FSDP_STANDIN
enum { GPU_LATE_S = 2, GPU_OPENING_MS = 60 };
#else
enum { GPU_LATE_S = 8, GPU_OPENING_MS = 3000 };
#endif

/* In one line why there is no GPU, if so; asked in a child, so that this process stays without CUDA. */
bool gpu_is_missing_here(const char *test);
/* FSDP_TEST_GPUS. */
uint32_t gpu_count_wanted(uint32_t otherwise);
/* In a rank's process, before CUDA or NCCL is called: NCCL's environment, and the rank's GPU is made current. */
void gpu_rank_environment(uint32_t rank);

#endif
