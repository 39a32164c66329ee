/* SPDX-License-Identifier: MIT */
/* The command line. One table holds every option's name, limits, default and help. */
#ifndef GPT_OPTIONS_H
#define GPT_OPTIONS_H

#include <stdint.h>

#include "problem.h"

typedef struct options {
    const char *data, *timeline, *losses; /* paths; NULL: not asked for (data has a default) */
    bool random_data;                     /* --data random */
    bool cuda;                            /* --device cuda */
    int ranks;                            /* 0: not given */
    int depth, layers, dim, heads, context, batch, micro_steps, steps, seed, jitter_us, run_ahead;
    int vocab;        /* of a token: GPT_VOCAB, or --vocab */
    bool named_shape; /* --shape */
    double lr, clip, peak_tflops;
    bool keep_full; /* --accumulate keep */
    bool reduce_comm;
    bool has_link;
    int link_us, link_mb_per_s; /* --link; 0 MB/s: infinite */
    bool plain, compare, recompute, poison, sync, json, quiet, help;
} options;

/* False: `why` has one sentence. Strings are borrowed from argv. */
bool options_parse(options *out, int argc, char **argv, problem *why);
void options_help(FILE *out);

#endif
