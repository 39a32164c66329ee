/* SPDX-License-Identifier: MIT */
#include "gpu_ranks.h"

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

bool gpu_is_missing_here(const char *test)
{
    int n = 0, end = 0;
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) _exit(cudaGetDeviceCount(&n) == cudaSuccess && n > 0 ? 0 : 1);
    bool there = child > 0 && waitpid(child, &end, 0) == child && WIFEXITED(end) && WEXITSTATUS(end) == 0;
    if (!there) printf("%s is skipped: no GPU\n", test);
    return !there;
}

uint32_t gpu_count_wanted(uint32_t otherwise)
{
    const char *given = getenv("FSDP_TEST_GPUS");
    return given != NULL && atoi(given) > 0 ? (uint32_t)atoi(given) : otherwise;
}

void gpu_rank_environment(uint32_t rank)
{
    uint32_t n_gpus = gpu_count_wanted(1);
    char host[16];
    snprintf(host, sizeof host, "host%u", rank / n_gpus);
    setenv("NCCL_HOSTID", host, 1);
    setenv("NCCL_SOCKET_IFNAME", "lo", 1);
    setenv("NCCL_IB_DISABLE", "1", 1);
    setenv("NCCL_NVLS_ENABLE", "0", 1);
    setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 1);
    cudaError_t error = cudaSetDevice((int)(rank % n_gpus));
    if (error == cudaSuccess) return;
    fprintf(stderr, "rank %u: FSDP_TEST_GPUS=%u: %s\n", rank, n_gpus, cudaGetErrorString(error));
    exit(1);
}
