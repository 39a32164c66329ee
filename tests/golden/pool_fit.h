/* SPDX-License-Identifier: MIT */
/* Best fit alone: the sequence of a pool, asked of an allocator that knows nothing of what comes. */
#ifndef FSDP_TESTS_POOL_FIT_H
#define FSDP_TESTS_POOL_FIT_H

#include "pool_run.h"

/* Most that an fsdp_allocator takes, WAIT_FIRST, a segment for each request that nothing fits. */
fsdp_status pool_fit_segments(const pool_events *events, uint64_t *out_reserved);

/* The least range, in steps of 1/128 of the live peak, in which best fit finds a place for every request; 0: not in twice
 * the live peak. */
fsdp_status pool_fit_range(const pool_events *events, uint64_t *out_reserved);

#endif
