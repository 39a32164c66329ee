/* SPDX-License-Identifier: MIT */
/* Live blocks by their address: open addressing, linear probing, the key beside the block so that a search reads nothing
 * else. */
#ifndef FSDP_LIB_ALLOC_TABLE_H
#define FSDP_LIB_ALLOC_TABLE_H

#include "alloc_ranges.h"
#include "hostmem.h"

typedef struct fsdp__table_entry {
    uint64_t begin; /* 0: none; no block begins at address 0 */
    fsdp__block *block;
} fsdp__table_entry;

typedef struct fsdp__table {
    fsdp__table_entry *entry;
    size_t capacity, n; /* capacity: a power of two, or 0 */
    uint32_t shift;
} fsdp__table;

/* Room for one more. */
bool fsdp__table_grow(const fsdp_host_allocator *host, fsdp__table *t);
static inline bool fsdp__table_reserve(const fsdp_host_allocator *host, fsdp__table *t)
{
    return 2 * (t->n + 1) <= t->capacity || fsdp__table_grow(host, t);
}

static inline size_t fsdp__table_home(const fsdp__table *t, uint64_t begin)
{
    return (size_t)(begin / FSDP__BLOCK_ALIGNMENT * 0x9e3779b97f4a7c15ull >> t->shift);
}

static inline void fsdp__table_put(fsdp__table *t, fsdp__block *block)
{
    size_t i = fsdp__table_home(t, block->begin);
    while (t->entry[i].begin != 0) i = (i + 1) & (t->capacity - 1);
    t->entry[i] = (fsdp__table_entry){block->begin, block};
    t->n++;
}

/* Where the block that begins there stands; NULL: there is none. */
static inline fsdp__table_entry *fsdp__table_find(const fsdp__table *t, uint64_t begin)
{
    if (t->n == 0 || begin == 0) return NULL;
    size_t i = fsdp__table_home(t, begin);
    while (t->entry[i].begin != begin) {
        if (t->entry[i].begin == 0) return NULL;
        i = (i + 1) & (t->capacity - 1);
    }
    return &t->entry[i];
}

static inline void fsdp__table_remove(fsdp__table *t, fsdp__table_entry *entry)
{
    size_t mask = t->capacity - 1, hole = (size_t)(entry - t->entry);
    /* Close the gap: move up whoever could not sit at or before it. */
    for (size_t i = (hole + 1) & mask; t->entry[i].begin != 0; i = (i + 1) & mask) {
        if (((i - fsdp__table_home(t, t->entry[i].begin)) & mask) < ((i - hole) & mask)) continue;
        t->entry[hole] = t->entry[i];
        hole = i;
    }
    t->entry[hole].begin = 0;
    t->n--;
}

#endif
