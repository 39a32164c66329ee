/* SPDX-License-Identifier: MIT */
/* Host memory that ends after so many allocations, and counts what is held. Functions of an fsdp_host_allocator. */
#ifndef FSDP_TESTS_SCARCE_H
#define FSDP_TESTS_SCARCE_H

#include <stddef.h>
#include <stdlib.h>

typedef struct scarce {
    int left;
    size_t live;
} scarce;

static inline void *scarce_alloc(void *arg, size_t bytes, size_t alignment)
{
    scarce *s = arg;
    if (s->left-- <= 0) return NULL;
    s->live++;
    return aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}

static inline void scarce_free(void *arg, void *ptr, size_t bytes, size_t alignment)
{
    (void)bytes, (void)alignment;
    ((scarce *)arg)->live--;
    free(ptr);
}

#endif
