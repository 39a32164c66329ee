/* SPDX-License-Identifier: MIT */
/* A context's flight recorder without a context. */
#ifndef FSDP_TESTS_BARE_RECORDER_H
#define FSDP_TESTS_BARE_RECORDER_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "order.h"

static inline fsdp_collective gather_of(const char *label, const char *pass, uint64_t count)
{
    return (fsdp_collective){
        .kind = FSDP_OPERATION_ALL_GATHER, .dtype = FSDP_DTYPE_BF16, .count = count, .label = label, .pass = pass};
}

static inline fsdp_context *bare(void)
{
    fsdp_context *ctx = aligned_alloc(64, (sizeof *ctx + 63) / 64 * 64);
    assert_non_null(ctx);
    memset(ctx, 0, sizeof *ctx);
    return ctx;
}

static inline void add(fsdp_context *ctx, uint32_t comm, fsdp_collective c)
{
    fsdp__flight_add(&ctx->flight, comm, &c, 1, fsdp__point_of(1, 1), 7);
}

#endif
