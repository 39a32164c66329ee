/* SPDX-License-Identifier: MIT */
/* Elements of any type, one at a time, and numbers to put into them. */
#ifndef FSDP_TESTS_ELEMENTS_H
#define FSDP_TESTS_ELEMENTS_H

#include <math.h>

#include "convert.h"

static const fsdp_dtype dtypes[] = {FSDP_DTYPE_FP32, FSDP_DTYPE_BF16, FSDP_DTYPE_FP16};

#define EACH(i, array)                \
    size_t i = 0;                     \
    i < sizeof array / sizeof *array; \
    i++

static inline float load(const void *base, uint64_t index, fsdp_dtype dtype)
{
    float value;
    fsdp__load_floats(&value, (const char *)base + index * fsdp_dtype_bytes(dtype), 1, dtype);
    return value;
}

static inline void store(void *base, uint64_t index, float value, fsdp_dtype dtype)
{
    fsdp__store_floats((char *)base + index * fsdp_dtype_bytes(dtype), &value, 1, dtype);
}

/* Numbers of both signs, from 2^-12 to 2^12, the same for the same seed: sums of them round, and show their order. */
static inline float number(uint64_t seed, uint64_t index)
{
    uint64_t x = (seed * 1000003 + index) * 0x9e3779b97f4a7c15u;
    x ^= x >> 29, x *= 0xbf58476d1ce4e5b9u, x ^= x >> 32;
    float mantissa = 1.0f + (float)(x & 0x7fffff) * 0x1p-23f;
    return ldexpf(x >> 23 & 1 ? mantissa : -mantissa, (int)(x >> 24 & 31) % 25 - 12);
}

#endif
