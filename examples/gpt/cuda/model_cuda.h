/* SPDX-License-Identifier: MIT */
/* The GPT on a GPU: its activations, and the visits of model.h as kernels on one stream. Parameters come in bf16 and their
 * gradients go out in fp32, both by pointer; it knows nothing of ranks or shards. */
#ifndef GPT_CUDA_MODEL_H
#define GPT_CUDA_MODEL_H

#include <cuda_runtime_api.h>

#include "attention.h"
#include "batch.h"
#include "model.h"
#include "problem.h"
#include "products.h"

typedef struct gpt_cuda {
    gpt_shape shape;
    int sequences; /* in use, 1 … B */
    bool recompute;
    int stride; /* of logits: V, rounded up to 128, so that each row is aligned; products stop at V */
    cudaStream_t stream;
    gpt_products products;
    gpt_batch_layout layout;
    int *starts; /* host: (V + 1), to sort with */

    /* Device memory, one allocation. bf16 is void; each layer's part is aligned to 256 bytes. */
    char *memory;
    size_t bytes;
    void *batch;       /* as batch.h has it */
    void *encoded;     /* (R, C) */
    void *first_norm;  /* (L + 1, R, C); the last is the final LayerNorm */
    float *first_mean; /* (L + 1, R) */
    float *first_isd;  /* (L + 1, R) */
    void *qkv;         /* (L, R, 3 C) */
    float *lse;        /* (L, B, N, T) */
    void *attended;    /* (L, R, C) */
    void *middle;      /* (L, R, C) */
    void *norm;        /* (L, R, C) */
    float *norm_mean;  /* (L, R) */
    float *norm_isd;   /* (L, R) */
    void *up;          /* (L, R, 4 C) */
    void *gelu;        /* (L, R, 4 C); with recompute (R, 4 C) */
    void *residual;    /* (L, R, C) */
    void *logits;      /* (R, stride); in training head forward leaves their gradient */
    float *losses;     /* (R) */
    void *d_residual;  /* (R, C) */
    void *branch;      /* (R, C) */
    void *wide;        /* (R, 4 C) */
    float *parts;      /* partial sums of LayerNorms and columns */
    float *bias_sum;   /* (C): column sums of d_residual, the gradient of the bias below */
    float *token_parts;
    void *attention_scratch;
    size_t attention_scratch_bytes;

    /* Pinned host memory: what comes back. */
    float *losses_back;    /* (R) */
    uint16_t *logits_back; /* (T, V) bf16, of the first sequence; only where V = GPT_VOCAB */
} gpt_cuda;

/* On the current device. text: passes of one sequence will be asked for, too. False: `why` has the sentence; gpt_cuda_destroy
 * gives back what there is, then too. The stream must be idle there. */
bool gpt_cuda_create(gpt_cuda *c, const gpt_shape *shape, bool recompute, bool text, cudaStream_t stream, problem *why);
void gpt_cuda_destroy(gpt_cuda *c);

/* The state that tasks.h's functions read and write, in host memory: tokens and targets in `staged` (pinned, c->layout.bytes),
 * losses and logits as gpt_cuda_fetch left them. gpt_state_destroy frees the latter; tokens must be NULL then. */
bool gpt_cuda_host_state(gpt_state *state, const gpt_shape *shape);
void gpt_cuda_stage(const gpt_cuda *c, gpt_state *state, void *staged);

/* Enqueue: the staged batch goes to the device. `staged` stays as it is until the stream has come past it. */
bool gpt_cuda_put(gpt_cuda *c, const gpt_state *state, void *staged, problem *why);
/* Enqueue: losses, and the first sequence's logits, come back; gpt_cuda_taken moves them to `state`, once the stream is past
 * it. */
bool gpt_cuda_fetch(gpt_cuda *c, problem *why);
void gpt_cuda_taken(const gpt_cuda *c, gpt_state *state);

/* ---- visits_cuda.c ---- */

/* Enqueue a visit: as gpt_run, but pointers in `call` are device memory, and call->state is not looked at. */
bool gpt_cuda_visit(gpt_cuda *c, const gpt_call *call, problem *why);

/* Prepare every product that visits of `rows` rows take. */
bool gpt_cuda_plan(gpt_cuda *c, int rows, bool training, problem *why);

#define CUDA_TRY(call, why)                                                                                        \
    do {                                                                                                           \
        const cudaError_t cuda_error_ = (call);                                                                    \
        if (cuda_error_ != cudaSuccess) return problem_set(why, "%s: %s", #call, cudaGetErrorString(cuda_error_)); \
    } while (0)

#endif
