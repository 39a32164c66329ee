/* SPDX-License-Identifier: MIT */
/* Where an allocation goes: a search in the map against a stream's clock. It changes nothing. */
#ifndef FSDP_LIB_ALLOC_PLACE_H
#define FSDP_LIB_ALLOC_PLACE_H

#include "alloc.h"

/* A place in a free range. */
typedef struct fsdp__place {
    fsdp__block *range;    /* NULL: nothing fits */
    fsdp__block *fragment; /* in which it begins, or one below; so that nobody walks there again */
    uint64_t begin;
    uint64_t freed; /* newest free() among what it covers */
    bool covered;   /* all of it comes before what the stream is given next */
} fsdp__place;

/* The smallest fit that is covered; else, of those looked at, the one freed longest ago. */
fsdp__place fsdp__place_find(const fsdp_allocator *a, uint64_t bytes, const fsdp_stream *s);

#endif
