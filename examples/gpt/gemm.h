/* SPDX-License-Identifier: MIT */
/* Matrix product, fp32, on the calling thread alone. OpenBLAS where the build found it, a blocked loop otherwise; either
 * gives the same bits for the same arguments on the same machine, whichever thread or rank calls. */
#ifndef GPT_GEMM_H
#define GPT_GEMM_H

#include <stdbool.h>

/* A matrix as it lies in memory: row-major; stride is the distance between its stored rows. */
typedef struct gemm_source {
    const float *at;
    int stride;
    bool transposed; /* stored as its transpose */
} gemm_source;

typedef struct gemm_target {
    float *at;
    int stride;
    bool add; /* C += A B, not C = A B */
} gemm_target;

static inline gemm_source gemm_from(const float *at, int stride) { return (gemm_source){at, stride, false}; }
static inline gemm_source gemm_transposed(const float *at, int stride) { return (gemm_source){at, stride, true}; }
static inline gemm_target gemm_into(float *at, int stride) { return (gemm_target){at, stride, false}; }
static inline gemm_target gemm_onto(float *at, int stride) { return (gemm_target){at, stride, true}; }

/* C (m, n) = or += A (m, k) × B (k, n). */
void gemm(int m, int n, int k, gemm_source a, gemm_source b, gemm_target c);

/* Once, before the first gemm: one thread a call, since every rank has threads of its own. */
void gemm_init(void);
/* What multiplies, for people. */
const char *gemm_name(void);

#endif
