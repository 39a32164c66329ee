/* SPDX-License-Identifier: MIT */
/* The trainer on GPUs: what main.c takes instead of the host's. */
#ifndef GPT_CUDA_RANK_H
#define GPT_CUDA_RANK_H

#include "rank.h"

/* Ranks on the CUDA backend, a GPU each. */
extern const rank_device rank_cuda_device;

/* The unsharded loop with the same kernels, without the library: what the library costs is the difference. Sums of several
 * ranks and micro-steps grow in place, one after another. False: out->why has the sentence. */
bool plain_cuda_run(const job *j, outcome *out);

#endif
