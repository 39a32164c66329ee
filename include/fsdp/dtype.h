/* SPDX-License-Identifier: MIT */
/** @file dtype.h  Element types. */
#ifndef FSDP_DTYPE_H
#define FSDP_DTYPE_H

#include <stddef.h>

#include "fsdp/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Sums of bf16 and fp16 are carried in fp32 and rounded once, to nearest even; over ranks by NCCL, at each step (nccl.h). */
typedef enum fsdp_dtype {
    FSDP_DTYPE_INHERIT = 0, /**< only in configs: take the surrounding policy's type */
    FSDP_DTYPE_FP32 = 1,
    FSDP_DTYPE_BF16 = 2,
    FSDP_DTYPE_FP16 = 3
} fsdp_dtype;

/** Bytes of one element: 4, 2, 2; 0 for anything that is not a type. */
FSDP_API size_t fsdp_dtype_bytes(fsdp_dtype dtype);

/** "fp32", "bf16", "fp16"; "?" for anything else. */
FSDP_API const char *fsdp_dtype_name(fsdp_dtype dtype);

#ifdef __cplusplus
}
#endif
#endif
