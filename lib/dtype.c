/* SPDX-License-Identifier: MIT */
/* Element types: sizes, names, conversion. */
#include "fsdp/dtype.h"

#include "convert.h"

size_t fsdp_dtype_bytes(fsdp_dtype dtype)
{
    return dtype == FSDP_DTYPE_FP32 ? 4 : dtype == FSDP_DTYPE_BF16 || dtype == FSDP_DTYPE_FP16 ? 2 : 0;
}

const char *fsdp_dtype_name(fsdp_dtype dtype)
{
    return dtype == FSDP_DTYPE_FP32   ? "fp32"
           : dtype == FSDP_DTYPE_BF16 ? "bf16"
           : dtype == FSDP_DTYPE_FP16 ? "fp16"
                                      : "?";
}

float fsdp__from_fp16(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16, exponent = half >> 10 & 0x1fu, mantissa = half & 0x3ffu;
    if (exponent == 0x1f) return fsdp__bits_float(sign | 0x7f800000u | mantissa << 13);
    if (exponent == 0) { /* zero or subnormal: mantissa × 2^-24 is exact in fp32 */
        float value = (float)mantissa * 0x1p-24f;
        return sign ? -value : value;
    }
    return fsdp__bits_float(sign | (exponent + 112) << 23 | mantissa << 13);
}

uint16_t fsdp__to_fp16(float value)
{
    uint32_t bits = fsdp__float_bits(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
    if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* rounds to 65536 or more: infinity */
    if (magnitude <
        0x38800000u) { /* below 2^-14: adding 0.5 lines the subnormal up with the last mantissa bits, rounded */
        float shifted = fsdp__bits_float(magnitude) + 0.5f;
        return (uint16_t)(sign | (fsdp__float_bits(shifted) - 0x3f000000u));
    }
    uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
    return (uint16_t)(sign | ((rounded - 0x38000000u) >> 13));
}

void fsdp__load_floats(float *dst, const void *src, uint64_t count, fsdp_dtype src_dtype)
{
    const uint16_t *half = src;
    if (src_dtype == FSDP_DTYPE_FP32) memcpy(dst, src, count * sizeof *dst);
    else if (src_dtype == FSDP_DTYPE_BF16)
        for (uint64_t i = 0; i < count; i++) dst[i] = fsdp__from_bf16(half[i]);
    else
        for (uint64_t i = 0; i < count; i++) dst[i] = fsdp__from_fp16(half[i]);
}

void fsdp__store_floats(void *dst, const float *src, uint64_t count, fsdp_dtype dst_dtype)
{
    uint16_t *half = dst;
    if (dst_dtype == FSDP_DTYPE_FP32) memcpy(dst, src, count * sizeof *src);
    else if (dst_dtype == FSDP_DTYPE_BF16)
        for (uint64_t i = 0; i < count; i++) half[i] = fsdp__to_bf16(src[i]);
    else
        for (uint64_t i = 0; i < count; i++) half[i] = fsdp__to_fp16(src[i]);
}

void fsdp__convert(void *dst, fsdp_dtype dst_dtype, const void *src, fsdp_dtype src_dtype, uint64_t count)
{
    if (dst_dtype == src_dtype) {
        memcpy(dst, src, count * fsdp_dtype_bytes(src_dtype));
        return;
    }
    float chunk[512];
    char *to = dst;
    const char *from = src;
    while (count > 0) {
        uint64_t n = count < 512 ? count : 512;
        fsdp__load_floats(chunk, from, n, src_dtype);
        fsdp__store_floats(to, chunk, n, dst_dtype);
        to += n * fsdp_dtype_bytes(dst_dtype);
        from += n * fsdp_dtype_bytes(src_dtype);
        count -= n;
    }
}
