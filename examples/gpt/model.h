/* SPDX-License-Identifier: MIT */
/* The GPT: its units and parameters, its activations, and what runs in each visit of a unit. It knows nothing of ranks,
 * streams or shards: the same visits serve the plain loop and the sharded one.
 *
 * Unit 0 is held: embedding (tied to the head), positions, every block's first LayerNorm and the final one. It is open all
 * the time because a block's last kernel adds the residual and normalises for the NEXT block in one go. Unit l + 1 is
 * block l. Letters of the shapes: gpt_math.h; L layers. */
#ifndef GPT_MODEL_H
#define GPT_MODEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gpt_math.h"

typedef struct gpt_shape {
    int layers, dim, heads, context, batch, vocab; /* L, C, N, T, B, V; the host's kernels know V = GPT_VOCAB only */
} gpt_shape;

enum {               /* parameters of unit 0 */
       HELD_WTE,     /* (V, C) */
       HELD_WPE,     /* (T, C) */
       HELD_FINAL_W, /* (C) */
       HELD_FINAL_B, /* (C) */
       HELD_FIRST_W, /* (C); of block l: HELD_FIRST_W + 2 l */
       HELD_FIRST_B  /* (C); of block l: HELD_FIRST_B + 2 l */
};

enum {               /* parameters of a block */
       BLOCK_QKV_W,  /* (3 C, C) */
       BLOCK_QKV_B,  /* (3 C) */
       BLOCK_PROJ_W, /* (C, C) */
       BLOCK_PROJ_B, /* (C) */
       BLOCK_NORM_W, /* (C) */
       BLOCK_NORM_B, /* (C) */
       BLOCK_UP_W,   /* (4 C, C) */
       BLOCK_UP_B,   /* (4 C) */
       BLOCK_DOWN_W, /* (C, 4 C) */
       BLOCK_DOWN_B, /* (C) */
       BLOCK_PARAMS
};

typedef struct gpt_param {
    char name[32];
    uint32_t n_dims;
    uint64_t dims[2], elems;
    float mean, sd; /* of its first values */
    bool no_decay;
} gpt_param;

int gpt_units(const gpt_shape *shape);
int gpt_unit_params(const gpt_shape *shape, int unit);
gpt_param gpt_param_at(const gpt_shape *shape, int unit, int index);
/* Element `at` of the parameter before the first step; the same whoever asks. */
float gpt_first_value(const gpt_param *param, uint64_t seed, int unit, int index, uint64_t at);
/* Elements begin … begin + count of them, by as many threads as are worth it. */
void gpt_first_values(const gpt_param *param, uint64_t seed, int unit, int index, uint64_t begin, uint64_t count,
                      float *out);

/* Everything that one micro-step leaves for its backward, and scratch. One set a rank: micro-steps follow each other on
 * the compute stream. */
typedef struct gpt_state {
    gpt_shape shape;
    int sequences;     /* in use, 1 … B; who fills tokens sets it */
    int *tokens;       /* (B, T) */
    int *targets;      /* (B, T) */
    float *encoded;    /* (R, C) */
    float *first_norm; /* (L + 1, R, C); the last is the final LayerNorm */
    float *first_mean; /* (L + 1, R) */
    float *first_isd;  /* (L + 1, R) */
    float *qkv;        /* (L, R, 3 C) */
    float *weights;    /* (L, B, N, T, T) */
    float *attended;   /* (L, R, C) */
    float *middle;     /* (L, R, C): residual after attention */
    float *norm;       /* (L, R, C) */
    float *norm_mean;  /* (L, R) */
    float *norm_isd;   /* (L, R) */
    float *up;         /* (L, R, 4 C) */
    float *gelu;       /* (L, R, 4 C) */
    float *residual;   /* (L, R, C): after the block */
    float *logits;     /* (R, V); after head backward: their gradient */
    float *log_sums;   /* (R) */
    float *losses;     /* (R) */
    float *d_residual; /* (R, C): gradient on the residual stream */
    float *branch;     /* (R, C): a branch before it is added; in backward its gradient */
    float *wide;       /* (R, 4 C): gradient inside the MLP, or of qkv */
    float *d_weights;  /* (T, T) */
    float *memory;
    size_t bytes;
} gpt_state;

/* False: out of memory. */
bool gpt_state_create(gpt_state *state, const gpt_shape *shape);
void gpt_state_destroy(gpt_state *state);

typedef enum gpt_visit {
    GPT_EMBED_FORWARD,
    GPT_BLOCK_FORWARD,
    GPT_HEAD_FORWARD, /* losses and, if asked, the micro-step's mean loss */
    GPT_HEAD_BACKWARD,
    GPT_BLOCK_BACKWARD,
    GPT_EMBED_BACKWARD
} gpt_visit;

/* One visit, as an argument for gpt_run: the pointers it works with, in the order of the enums above. */
typedef struct gpt_call {
    gpt_state *state;
    gpt_visit visit;
    int layer;
    void *const *held;       /* parameters of unit 0 */
    void *const *held_grads; /* backward */
    void *const *block;      /* parameters of block `layer` */
    void *const *block_grads;
    float *mean_loss; /* HEAD_FORWARD writes it; may be NULL */
    /* For devices whose kernels can save a pass over memory; the host's ignore them. */
    bool training;  /* a backward follows: HEAD_FORWARD may leave the logits' gradient */
    bool add_grads; /* backward: gradients are added to what is there, as the host always does; else written */
} gpt_call;

/* Takes a gpt_call: the type of a function that a stream can run. */
void gpt_run(void *call);

#endif
