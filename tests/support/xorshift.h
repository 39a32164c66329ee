/* SPDX-License-Identifier: MIT */
/* Random numbers that are the same on every machine. The state is never 0 if it was not. */
#ifndef FSDP_TESTS_XORSHIFT_H
#define FSDP_TESTS_XORSHIFT_H

#include <stdint.h>

/* Marsaglia's xorshift64. */
static inline uint64_t xorshift(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

/* xorshift64*: Vigna, arXiv:1402.6246. The high bits are the better ones. */
static inline uint64_t xorshift_star(uint64_t *state)
{
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * 2685821657736338717ull;
}

#endif
