/* SPDX-License-Identifier: MIT */
/* Published models: every parameter tensor, a unit a layer, and one visit after another of a micro-step. */
#ifndef FSDP_TESTS_SHAPES_H
#define FSDP_TESTS_SHAPES_H

#include "fsdp/fsdp.h"

typedef struct published {
    const char *name;
    uint32_t layers;
    uint64_t width, hidden, kv_width, vocab, context; /* context: learned positions; 0: none */
    bool gpt2;                                        /* LayerNorms and biases; else RMSNorms and a gate */
    uint64_t params;                                  /* as published: GPT-2's head is tied, Llama's is not */
} published;

enum { SHAPES_N_PUBLISHED = 4 };
extern const published shapes_published[SHAPES_N_PUBLISHED];

/* What becomes of the embedding and the head. */
typedef enum shapes_ends {
    SHAPES_UNTIED,       /* embedding; final norm and head */
    SHAPES_UNTIED_HELD,  /* the same, both held */
    SHAPES_TIED_HELD,    /* one table, held; the final norm is a unit */
    SHAPES_TIED_VISITED, /* one table, visited first and last in each half, by a pass of its own */
    SHAPES_N_ENDS
} shapes_ends;

const char *shapes_ends_name(shapes_ends ends);

enum { SHAPES_MAX_UNITS = 96, SHAPES_MAX_VISITS = 3 * SHAPES_MAX_UNITS };

typedef struct shapes_model {
    fsdp_model *model;
    fsdp_adamw *opt;
    fsdp_unit *unit[SHAPES_MAX_UNITS];
    bool held[SHAPES_MAX_UNITS];
    uint64_t elems[SHAPES_MAX_UNITS]; /* parameters, without pads */
    uint32_t n_units;
    fsdp_visit visit[SHAPES_MAX_VISITS]; /* one micro-step, in the order of begin hooks; until is set for held units */
    uint32_t visit_unit[SHAPES_MAX_VISITS];
    uint32_t n_visits;
    int32_t pass; /* its number */
} shapes_model;

typedef struct shapes_dtypes {
    fsdp_dtype compute, grad; /* reduction and master: fp32 */
} shapes_dtypes;

typedef struct shapes_options {
    shapes_ends ends;
    shapes_dtypes dtypes;
    bool recompute; /* each layer runs forward again right before its backward */
} shapes_options;

/* Declare it on ctx, AdamW included; not sealed. The caller destroys m->model. */
fsdp_status shapes_declare(fsdp_context *ctx, const published *p, const shapes_options *options,
                           const fsdp_model_config *config, shapes_model *m);

#endif
