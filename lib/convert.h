/* SPDX-License-Identifier: MIT */
/* Element types on the host: bf16 and fp16 to fp32 and back, round to nearest even, NaN stays NaN. */
#ifndef FSDP_LIB_CONVERT_H
#define FSDP_LIB_CONVERT_H

#include <stdint.h>
#include <string.h>

#include "fsdp/dtype.h"

static inline float fsdp__bits_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t fsdp__float_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float fsdp__from_bf16(uint16_t half) { return fsdp__bits_float((uint32_t)half << 16); }

static inline uint16_t fsdp__to_bf16(float value)
{
    uint32_t bits = fsdp__float_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40u); /* NaN: keep it quiet */
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

float fsdp__from_fp16(uint16_t half);
uint16_t fsdp__to_fp16(float value);

/* count elements of src, as fp32. */
void fsdp__load_floats(float *dst, const void *src, uint64_t count, fsdp_dtype src_dtype);
/* count fp32 elements, rounded to dst's type. */
void fsdp__store_floats(void *dst, const float *src, uint64_t count, fsdp_dtype dst_dtype);
/* dst = convert(src), any types; equal types are a copy of the bits. dst and src do not overlap. */
void fsdp__convert(void *dst, fsdp_dtype dst_dtype, const void *src, fsdp_dtype src_dtype, uint64_t count);

#endif
