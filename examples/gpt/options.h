/* SPDX-License-Identifier: MIT */
/* The command line. One table holds every option's name, limits, default and help. */
#ifndef GPT_OPTIONS_H
#define GPT_OPTIONS_H

#include <stdint.h>

#include "problem.h"

typedef struct options {
    const char *data, *timeline, *losses; /* paths; NULL: not asked for (data has a default) */
    int ranks;                            /* 0: not given */
    int depth, layers, dim, heads, context, batch, micro_steps, steps, seed, jitter_us, run_ahead;
    double lr, clip;
    bool keep_full; /* --accumulate keep */
    bool has_link;
    int link_us, link_mb_per_s; /* --link; 0 MB/s: infinite */
    bool plain, compare, poison, sync, json, quiet, help;
} options;

/* False: `why` has one sentence. Strings are borrowed from argv. */
bool options_parse(options *out, int argc, char **argv, problem *why);
void options_help(FILE *out);

#endif
