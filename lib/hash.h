/* SPDX-License-Identifier: MIT */
/* Hashes of text and numbers: the same on every machine and in every run. */
#ifndef FSDP_LIB_HASH_H
#define FSDP_LIB_HASH_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define FSDP__HASH_SEED 0xcbf29ce484222325ull

/* FNV-1a: h is FSDP__HASH_SEED, or what came before. */
static inline uint64_t fsdp__hash_bytes(uint64_t h, const void *data, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++) h = (h ^ ((const unsigned char *)data)[i]) * 0x100000001b3ull;
    return h;
}

static inline uint64_t fsdp__hash_text(const char *text)
{
    return fsdp__hash_bytes(FSDP__HASH_SEED, text, strlen(text));
}

/* The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): every bit of x reaches every bit of the result. */
static inline uint64_t fsdp__mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

#endif
