/* SPDX-License-Identifier: MIT */
#include "alloc_table.h"

enum { LEAST = 64 };

bool fsdp__table_grow(const fsdp_host_allocator *host, fsdp__table *t)
{
    fsdp__table bigger = {.capacity = t->capacity ? 2 * t->capacity : LEAST};
    bigger.shift = 64 - (uint32_t)__builtin_ctzll(bigger.capacity);
    bigger.entry = fsdp__host_alloc(host, bigger.capacity, sizeof *bigger.entry);
    if (bigger.entry == NULL) return false;
    for (size_t i = 0; i < t->capacity; i++)
        if (t->entry[i].begin != 0) fsdp__table_put(&bigger, t->entry[i].block);
    fsdp__host_free(host, t->entry, t->capacity, sizeof *t->entry);
    *t = bigger;
    return true;
}
