/* SPDX-License-Identifier: MIT */
#include "hostmem.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "check.h"

enum { ALIGNMENT = 64 }; /* a cache line: no two allocations share one between threads */
enum { HUGE_PAGE = 2 << 20 };

/* What is large is a map of blocks or its table, read at random: huge pages spare the walks. */
static void *libc_alloc(void *arg, size_t bytes, size_t alignment)
{
    (void)arg;
    bool huge = bytes >= 2 * (size_t)HUGE_PAGE;
    if (huge && alignment < HUGE_PAGE) alignment = HUGE_PAGE;
    void *ptr = aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    if (huge && ptr != NULL) (void)madvise(ptr, bytes, MADV_HUGEPAGE);
    return ptr;
}

static void libc_free(void *arg, void *ptr, size_t bytes, size_t alignment)
{
    (void)arg, (void)bytes, (void)alignment;
    free(ptr);
}

fsdp_status fsdp__host_allocator_resolve(const fsdp_host_allocator *given, fsdp_host_allocator *out)
{
    if ((given->alloc == NULL) != (given->free == NULL))
        return fsdp__fail(FSDP_ERR_ARG, "fsdp_config.host has one of alloc and free: give both, or neither for libc");
    *out = *given;
    if (given->alloc == NULL) *out = (fsdp_host_allocator){libc_alloc, libc_free, NULL, NULL};
    return FSDP_OK;
}

void *fsdp__host_alloc(const fsdp_host_allocator *host, size_t n, size_t each)
{
    size_t bytes;
    if (__builtin_mul_overflow(n, each, &bytes) || bytes > (size_t)1 << 46) return NULL;
    if (bytes == 0) bytes = 1;
    void *ptr = host->alloc(host->arg, bytes, ALIGNMENT);
    if (ptr != NULL) memset(ptr, 0, bytes);
    return ptr;
}

void fsdp__host_free(const fsdp_host_allocator *host, void *ptr, size_t n, size_t each)
{
    if (ptr == NULL) return;
    size_t bytes = n * each;
    host->free(host->arg, ptr, bytes ? bytes : 1, ALIGNMENT);
}

bool fsdp__host_grow(const fsdp_host_allocator *host, void *array, size_t *capacity, size_t need, size_t each)
{
    if (need <= *capacity) return true;
    size_t wanted = *capacity ? *capacity * 2 : 16;
    if (wanted < need) wanted = need;
    void *grown = fsdp__host_alloc(host, wanted, each);
    if (grown == NULL) return false;
    void *old;
    memcpy(&old, array, sizeof old);
    if (old != NULL) memcpy(grown, old, *capacity * each);
    fsdp__host_free(host, old, *capacity, each);
    memcpy(array, &grown, sizeof grown);
    *capacity = wanted;
    return true;
}

char *fsdp__host_strdup(const fsdp_host_allocator *host, const char *text)
{
    size_t bytes = strlen(text) + 1;
    char *copy = fsdp__host_alloc(host, bytes, 1);
    if (copy != NULL) memcpy(copy, text, bytes);
    return copy;
}

void fsdp__host_strfree(const fsdp_host_allocator *host, char *text)
{
    if (text != NULL) fsdp__host_free(host, text, strlen(text) + 1, 1);
}
