/* SPDX-License-Identifier: MIT */
/* The toy trainer on CUDA, all ranks on GPU 0. */
#ifndef FSDP_TESTS_GPU_TOY_H
#define FSDP_TESTS_GPU_TOY_H

#include "toy.h"

enum { GPU_WORLD = 4 };

extern const toy_device gpu_toy_device;
/* The host backend in its place, to try the tests themselves where there is no GPU. */
extern const toy_device gpu_toy_host;

/* What the tests run on. */
extern const toy_device *gpu_toy;

/* First thing in main. "host" as an argument: without a GPU. False: there is none, which has been said; end with 77. */
bool gpu_toy_begin(const char *test, int n_args, char **args);
/* toy_config_default on gpu_toy. */
toy_config gpu_toy_config(uint32_t world);
/* A CMocka setup: ends the program if a test hangs. A training begins with a communicator, which takes a second or so. */
int gpu_toy_deadline(void **unused);

#endif
