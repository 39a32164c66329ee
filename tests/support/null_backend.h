/* SPDX-License-Identifier: MIT */
/* A backend whose operations are over when they are called: what is left of a step's time is the library's own. */
#ifndef FSDP_TESTS_NULL_BACKEND_H
#define FSDP_TESTS_NULL_BACKEND_H

#include "fsdp/backend.h"

/* backend_config; NULL: a world of one. One rank stands for all, and it is rank 0. */
typedef struct null_config {
    uint32_t world;
} null_config;

/* Device memory, streams and events are numbers; pinned memory is real; the clock is CLOCK_MONOTONIC. No data, no host
 * calls. A step report has its step, its learning rate and zeros. */
const fsdp_backend *null_backend(void);

#endif
