/* SPDX-License-Identifier: MIT */
/* Every case of the pools' memory: published models × ends × ranks × depths × dtypes × accumulation. */
#ifndef FSDP_TESTS_POOL_MATRIX_H
#define FSDP_TESTS_POOL_MATRIX_H

#include "pool_fit.h"

/* Bytes of one pool in one case. */
typedef struct pool_figures {
    uint64_t reserved;          /* what seal took */
    uint64_t live, live_params; /* live at most: buffers, and parameters in them */
    uint64_t best_segments,
        best_in_range; /* best fit alone: taken segment by segment; as one range (0: over 2 × live) */
} pool_figures;

typedef struct pool_row {
    pool_case c;
    pool_figures pool[POOL_N_KINDS];
    pool_result result; /* its events are gone */
} pool_row;

/* Called for each case in a fixed order. Not OK ends it. */
typedef fsdp_status (*pool_row_fn)(void *arg, const pool_row *row);

typedef struct pool_matrix {
    const uint32_t *worlds;
    uint32_t n_worlds;
    uint32_t min_buffers, max_buffers; /* gradient buffers in flight */
    bool recompute;                    /* with layers that run forward again, else without */
    bool best_fit;                     /* measure that too, else leave its figures 0 */
} pool_matrix;

/* GPT-2 as published (tied: held, or visited twice); Llama 3 untied, held, and as if it were tied. */
fsdp_status pool_each_case(const pool_matrix *m, pool_row_fn fn, void *arg);

/* The largest ratios to the live peak. */
typedef struct pool_worst {
    double reserved, reserved_params; /* the latter: to the parameters' */
    double best_segments, best_in_range;
} pool_worst;

void pool_take_worst(pool_worst *worst, const pool_figures *f);
double pool_ratio(uint64_t bytes, uint64_t live);
const char *pool_dtype_name(fsdp_dtype dtype);
const char *pool_accumulation_name(fsdp_accumulation accumulation);

#endif
