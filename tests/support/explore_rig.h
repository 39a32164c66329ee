/* SPDX-License-Identifier: MIT */
/* A world of one on the exploration device, and short names for what tests ask of it. */
#ifndef FSDP_TESTS_EXPLORE_RIG_H
#define FSDP_TESTS_EXPLORE_RIG_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "explore.h"

enum { A, B, C, N_STREAMS = 3, N_EVENTS = 8, BLOCK = 4096 }; /* C has high priority */
#define DO(call) assert_int_equal((call), FSDP_OK)

typedef struct rig {
    explore *x;
    const fsdp_device_ops *ops;
    explore_rank config;
    void *dev, *stream[N_STREAMS], *event[N_EVENTS];
    char *block; /* BLOCK bytes of device memory */
} rig;

/* On a device of the test's. */
void rig_open_on(rig *r, explore *x);
void rig_close_on(rig *r);
/* On one of its own. world 0 is 1. close: and the device has no complaint. */
void rig_open(rig *r, explore_config config);
void rig_close(rig *r);
/* The config of a policy, for about 200 steps. STARVE starves A. */
explore_config policy_config(explore_policy policy, uint64_t seed);

void give(rig *r, int stream, fsdp_device_op op, fsdp_span *span);
void fill(rig *r, int stream, void *dst, uint64_t bytes, uint8_t byte);
void copy(rig *r, int stream, void *dst, const void *src, uint64_t bytes);
void add(rig *r, int stream, float *dst, const float *src); /* one element */
void mark(rig *r, int event, int stream);
void follow(rig *r, int stream, int event);
void drain(rig *r, int stream);
void drain_all(rig *r);

#endif
