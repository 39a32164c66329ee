/* SPDX-License-Identifier: MIT */
/* Numbers in ascending order: for medians and sets. */
#ifndef FSDP_TESTS_SORTED_H
#define FSDP_TESTS_SORTED_H

#include <stdint.h>
#include <stdlib.h>

static inline int sorted_by_double(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static inline int sorted_by_float(const void *a, const void *b)
{
    const float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static inline int sorted_by_uint64(const void *a, const void *b)
{
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static inline void sort_doubles(double *value, size_t n) { qsort(value, n, sizeof *value, sorted_by_double); }
static inline void sort_floats(float *value, size_t n) { qsort(value, n, sizeof *value, sorted_by_float); }
static inline void sort_uint64s(uint64_t *value, size_t n) { qsort(value, n, sizeof *value, sorted_by_uint64); }

#endif
