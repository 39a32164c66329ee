/* SPDX-License-Identifier: MIT */
#include "sharding/names.h"

#include <string.h>

#include "lib/hash.h"
#include "lib/hostmem.h"

static size_t hash(const char *text)
{
    uint64_t h = fsdp__hash_text(text);
    return (size_t)(h ^ h >> 32);
}

void *fsdp__names_find(const fsdp__names *names, const char *text)
{
    if (names->capacity == 0) return NULL;
    for (size_t i = hash(text) & (names->capacity - 1); names->slot[i].text != NULL;
         i = (i + 1) & (names->capacity - 1))
        if (strcmp(names->slot[i].text, text) == 0) return names->slot[i].object;
    return NULL;
}

void fsdp__names_add(fsdp__names *names, const char *text, void *object)
{
    size_t i = hash(text) & (names->capacity - 1);
    while (names->slot[i].text != NULL) i = (i + 1) & (names->capacity - 1);
    names->slot[i] = (struct fsdp__name){text, object};
    names->n++;
}

bool fsdp__names_reserve(const fsdp_host_allocator *host, fsdp__names *names)
{
    if (2 * (names->n + 1) <= names->capacity) return true;
    fsdp__names bigger = {.capacity = names->capacity ? 2 * names->capacity : 64};
    bigger.slot = fsdp__host_alloc(host, bigger.capacity, sizeof *bigger.slot);
    if (bigger.slot == NULL) return false;
    for (size_t i = 0; i < names->capacity; i++)
        if (names->slot[i].text != NULL) fsdp__names_add(&bigger, names->slot[i].text, names->slot[i].object);
    fsdp__names_fini(host, names);
    *names = bigger;
    return true;
}

void fsdp__names_fini(const fsdp_host_allocator *host, fsdp__names *names)
{
    fsdp__host_free(host, names->slot, names->capacity, sizeof *names->slot);
    memset(names, 0, sizeof *names);
}
