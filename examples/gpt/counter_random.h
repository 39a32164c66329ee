/* SPDX-License-Identifier: MIT */
/* Random numbers by counter: the value at (seed, stream, index) depends on nothing else, so every rank, loop and order of
 * work draws the same. The mixing is splitmix64's (Steele, Lea and Flood, OOPSLA 2014). */
#ifndef GPT_COUNTER_RANDOM_H
#define GPT_COUNTER_RANDOM_H

#include <math.h>
#include <stdint.h>

static inline uint64_t random_mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static inline uint64_t random_bits(uint64_t seed, uint64_t stream, uint64_t index)
{
    return random_mix(random_mix(random_mix(seed) ^ stream) ^ index);
}

/* In [0, 1). */
static inline double random_unit(uint64_t seed, uint64_t stream, uint64_t index)
{
    return (double)(random_bits(seed, stream, index) >> 11) * 0x1p-53;
}

/* Mean 0, standard deviation 1: Box and Muller, the cosine half. */
static inline double random_normal(uint64_t seed, uint64_t stream, uint64_t index)
{
    const double radius = sqrt(-2.0 * log(1.0 - random_unit(seed, stream, 2 * index)));
    return radius * cos(6.283185307179586 * random_unit(seed, stream, 2 * index + 1));
}

#endif
