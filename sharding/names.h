/* SPDX-License-Identifier: MIT */
/* Unique names, each for an object: a hash table of borrowed strings. */
#ifndef FSDP_SHARDING_NAMES_H
#define FSDP_SHARDING_NAMES_H

#include "fsdp/context.h"

typedef struct fsdp__names {
    struct fsdp__name {
        const char *text;
        void *object;
    } * slot;
    size_t capacity, n;
} fsdp__names;

void *fsdp__names_find(const fsdp__names *names, const char *text);
/* Room for one more, so that add cannot fail. False: no memory. */
bool fsdp__names_reserve(const fsdp_host_allocator *host, fsdp__names *names);
void fsdp__names_add(fsdp__names *names, const char *text, void *object);
void fsdp__names_fini(const fsdp_host_allocator *host, fsdp__names *names);

#endif
