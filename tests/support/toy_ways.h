/* SPDX-License-Identifier: MIT */
/* Ways of running a training that must change no bit of it. */
#ifndef TOY_WAYS_H
#define TOY_WAYS_H

#include "toy.h"

typedef struct toy_way {
    uint32_t depth, grad_buffers;
    uint64_t prefetch_bytes, jitter_ns, seed;
    uint32_t debug;
    bool reduce_comm;
    toy_pace pace;
    toy_eval eval;
} toy_way;

static inline void toy_go(toy_config *config, const toy_way *way)
{
    config->depth = way->depth;
    config->grad_buffers = way->grad_buffers;
    config->prefetch_bytes = way->prefetch_bytes;
    config->jitter_ns = way->jitter_ns;
    config->jitter_seed = way->seed;
    config->debug = way->debug;
    config->reduce_comm = way->reduce_comm;
    config->pace = way->pace;
    config->eval = way->eval;
}

#endif
