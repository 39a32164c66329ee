/* SPDX-License-Identifier: MIT */
/* The library's own host memory: everything goes through the caller's fsdp_host_allocator, libc's by default. */
#ifndef FSDP_LIB_HOSTMEM_H
#define FSDP_LIB_HOSTMEM_H

#include "fsdp/context.h"

/* Check a table from a config (both functions or neither) and fill in libc's. */
fsdp_status fsdp__host_allocator_resolve(const fsdp_host_allocator *given, fsdp_host_allocator *out);

/* Zeroed, aligned to 64 bytes; NULL when out of memory or when n * each overflows. n * each may be 0. */
void *fsdp__host_alloc(const fsdp_host_allocator *host, size_t n, size_t each);
/* NULL is nothing; n and each as given to alloc. */
void fsdp__host_free(const fsdp_host_allocator *host, void *ptr, size_t n, size_t each);
/* Room for at least `need` elements: *array of *capacity grows by doubling, contents kept, new bytes zero. False: no memory,
 * nothing changed. */
bool fsdp__host_grow(const fsdp_host_allocator *host, void *array, size_t *capacity, size_t need, size_t each);
/* A copy of text; free with fsdp__host_free(host, copy, strlen(copy) + 1, 1). */
char *fsdp__host_strdup(const fsdp_host_allocator *host, const char *text);
void fsdp__host_strfree(const fsdp_host_allocator *host, char *text);

#endif
