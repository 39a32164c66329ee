/* SPDX-License-Identifier: MIT */
/* A small network for tests: fully connected layers of uneven sizes between an embedding and a head, with every kind of
 * parameter that a layout must carry. Kernels read parameters in their compute type and do += on gradients; the sharded
 * runs and the plain loop call the same ones, so that what differs is the library.
 *
 *   embed  x0 = table[token] · gain
 *   layer  u = W x,  z = scale · u + bias + shift + extra,  y = z / (1 + |z|)
 *   head   logit = table (y · gain),  loss = Σ (logit − target)² / 2·vocab, summed over the batch */
#ifndef TOY_MATH_H
#define TOY_MATH_H

#include <stdbool.h>
#include <stdint.h>

#include "fsdp/dtype.h"

enum {
    TOY_LAYERS = 5,
    TOY_UNITS = TOY_LAYERS + 2,
    TOY_PARAMS = 6,
    TOY_VOCAB = 11,
    TOY_BATCH = 2,
    TOY_WIDTH = 71,    /* most */
    TOY_POSITIONS = 12 /* layers that a sample may go through */
};

typedef struct toy_param {
    char name[32];
    uint32_t n_dims;
    uint64_t dims[2], elems;
    fsdp_dtype compute;
    bool frozen, no_decay;
    float lr_scale;
} toy_param;

typedef struct toy_unit {
    char name[16];
    bool held;
    uint32_t n_params;
    toy_param param[TOY_PARAMS];
    fsdp_dtype compute, grad, reduce, master;
} toy_unit;

typedef struct toy_shape {
    toy_unit unit[TOY_UNITS]; /* in registration order */
    uint32_t n_units, n_layers;
    uint32_t embed, head, first; /* units; embed == head: tied. Layer l is unit first + l */
    uint32_t width[TOY_LAYERS + 1];
} toy_shape;

typedef struct toy_shape_config {
    bool tied;         /* one held unit for embedding and head */
    bool square;       /* all layers map the same width, so that they can be left out, repeated, swapped */
    bool mixed;        /* further compute types in a unit: biases fp16, extras and gains fp32 */
    bool frozen_layer; /* layer 2 is frozen */
    fsdp_dtype compute, grad, reduce, master;
} toy_shape_config;

void toy_shape_make(const toy_shape_config *config, toy_shape *shape);

/* What flows between kernels. Position i of a sample's way is the i-th layer that it goes through. */
typedef float toy_rows[TOY_BATCH][TOY_WIDTH];
typedef struct toy_math {
    toy_rows x[TOY_POSITIONS + 1], u[TOY_POSITIONS], z[TOY_POSITIONS]; /* x[i] enters position i */
    toy_rows dx[TOY_POSITIONS + 1], dz[TOY_POSITIONS];
    float dlogit[TOY_BATCH][TOY_VOCAB];
    float loss, one, seen; /* of the last sample; 1; what TOY_LOOK saw */
} toy_math;

typedef enum toy_kernel {
    TOY_EMBED,
    TOY_LAYER,
    TOY_HEAD, /* the loss, and its gradient by the logits */
    TOY_HEAD_BACK,
    TOY_LAYER_BACK, /* the next two, one after the other */
    TOY_LAYER_BACK_REST,
    TOY_LAYER_BACK_WEIGHT,
    TOY_PULL, /* adds a part of the weight to its gradient */
    TOY_EMBED_BACK,
    TOY_LOOK /* reads the unit's first parameter */
} toy_kernel;

typedef struct toy_job {
    toy_kernel kernel;
    const toy_shape *shape;
    uint32_t unit;
    uint32_t at; /* position; of the head: how many layers came before */
    uint64_t sample;
    bool spoil; /* backward: write a NaN */
    toy_math *math;
    void *p[TOY_PARAMS], *g[TOY_PARAMS];
    void *home[TOY_PARAMS]; /* where g is a copy: of what */
} toy_job;

/* A fsdp_host_fn. */
void toy_compute(void *job);

/* Parameter values to begin with, by unit, parameter and element. */
float toy_initial(const toy_shape *shape, uint32_t unit, uint32_t param, uint64_t i);

#endif
