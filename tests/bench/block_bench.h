/* SPDX-License-Identifier: MIT */
/* `bench_prefetch --device cuda`: one step of block_cuda.h's blocks, sharded over ranks, in two ways that launch the same
 * compute kernels: `bare`, by hand on CUDA and NCCL, and `library`. Ranks are processes (tests/bench/ranks.sh). */
#ifndef FSDP_BENCH_BLOCK_BENCH_H
#define FSDP_BENCH_BLOCK_BENCH_H

#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>

#include "block_cuda.h"
#include "fsdp/fsdp.h"
#include "monotonic.h"

#define BENCH_FAIL(...)                                        \
    do {                                                       \
        fprintf(stderr, "bench: %s:%d: ", __FILE__, __LINE__); \
        fprintf(stderr, __VA_ARGS__);                          \
        fprintf(stderr, "\n");                                 \
        exit(1);                                               \
    } while (0)

#define CUDA(call)                                                                        \
    do {                                                                                  \
        const cudaError_t cuda_ = (call);                                                 \
        if (cuda_ != cudaSuccess) BENCH_FAIL("%s: %s", #call, cudaGetErrorString(cuda_)); \
    } while (0)
#define NCCL(call)                                                                                                     \
    do {                                                                                                               \
        const ncclResult_t nccl_ = (call);                                                                             \
        if (nccl_ != ncclSuccess) BENCH_FAIL("%s: %s (%s)", #call, ncclGetErrorString(nccl_), ncclGetLastError(NULL)); \
    } while (0)
#define LIB(call)                                                                                        \
    do {                                                                                                 \
        const fsdp_status lib_ = (call);                                                                 \
        if (lib_ != FSDP_OK) BENCH_FAIL("%s: %s: %s", #call, fsdp_status_name(lib_), fsdp_last_error()); \
    } while (0)

enum { BLOCK_MOST_CASES = 8, BLOCK_MOST_LAYERS = 256, BLOCK_MOST_DEPTH = 8 };
static const float BLOCK_MAX_NORM = 1.0f;
enum { BLOCK_BOTH_WAYS = 1, BLOCK_COMM = 2, BLOCK_COMPUTE = 4 }; /* what is measured */

typedef struct block_options {
    bool library, fused, json, captured, window, window_grad, cta_zero;
    bool clip; /* the gradient, to BLOCK_MAX_NORM: a norm over all ranks before the optimizer */
    bool keep; /* bare: keep the last depth + 1 units of forward for backward, as the library does, not only the last */
    bool one_lane; /* bare: gathers and reductions on one stream */
    bool no_bias;  /* units are weights alone; compute adds zeros that every rank has */
    uint64_t pad;  /* a rank's part of a gather is made a multiple of so many bytes; 0: of 256 */
    uint32_t layers, dim, depth, comms, steps, rounds, n_tokens, what;
    uint64_t tokens[BLOCK_MOST_CASES];
    const char *timeline; /* library: draw a step of the last case to this file */
} block_options;

/* Host time of the step that was enqueued last. hooks: what stands between the compute kernels; update: behind the last. */
typedef struct block_times {
    uint64_t hooks_ns, update_ns;
    uint64_t hook_calls, hook_calls_ns; /* of hooks: calls of CUDA and NCCL; only in bench_prefetch_calls */
} block_times;

typedef struct block_way block_way;
struct block_way {
    const block_options *options;
    fsdp_launch launch;
    int device;
    cudaStream_t stream; /* compute */
    block_math *math;
    void *zeros;         /* with no_bias: what stands for a bias, */
    float *bias_scratch; /* and where its gradient goes */
    block_times times;
    void *self;
    void (*step)(block_way *way, bool compute); /* enqueue one; without compute also without the optimizer */
    void (*barrier)(block_way *way);            /* enqueue something that needs every rank */
    void (*capture)(block_way *way);            /* a step with compute, as a graph; nothing is running */
    void (*replay)(block_way *way);
    void (*draw)(block_way *way, const char *path); /* NULL: it cannot */
    void (*look)(block_way *way);                   /* sets what follows, as it is now */
    void (*close)(block_way *way);
    uint64_t device_bytes,
        predicted_bytes; /* sharded state and buffers, not activations. Library: its counter, its promise */
    uint64_t gathers;    /* so far */
    char path[128];      /* the way collectives go, as far as it is known */
    uint64_t entered_ns, entered_calls, entered_calls_ns;
};

/* Set step … close; options, launch, device, stream and math are set. */
void block_bare_open(block_way *way);
void block_library_open(block_way *way);

int block_bench_main(int argc, char **argv);
extern const char *volatile block_stage;                  /* what is being done, for the sentence of a crash */
bool block_measure_case(block_way *way, uint64_t tokens); /* prints; false: bytes are not as predicted */

/* block_calls.c */
extern _Thread_local uint64_t block_calls, block_calls_ns;
extern _Thread_local bool block_in_call; /* between block_enter and block_leave_… */
void block_calls_reset(void);
void block_calls_print(double layers_and_steps); /* by function, since the reset */
uint64_t block_call_cost_ns(void); /* of the two clock readings around one call, as far as they fall outside it */

/* Elements of a unit's parameters, and where parameter i begins. */
static inline uint64_t block_unit_elems(const block_options *o)
{
    const uint64_t dim = o->dim;
    return o->no_bias ? 8 * dim * dim : block_elems(dim);
}

static inline uint64_t block_unit_offset(const block_options *o, int i)
{
    const uint64_t dim = o->dim;
    return o->no_bias ? (i < 2 ? 0 : 4 * dim * dim) : block_offset(dim, i);
}

/* Elements of a unit with its pad: what is gathered. */
static inline uint64_t block_padded_elems(const block_options *o, uint32_t world)
{
    const uint64_t quantum = (o->pad > 0 ? o->pad / 2 : 128) * world;
    return (block_unit_elems(o) + quantum - 1) / quantum * quantum;
}

/* What a layer computes with, from where its unit lies: bf16 parameters; fp32 gradients. */
static inline void block_params_at(const block_way *way, const char *full, const void *params[BLOCK_PARAMS])
{
    for (int i = 0; i < BLOCK_PARAMS; i++)
        params[i] = way->options->no_bias && i % 2 == 1 ? way->zeros : full + 2 * block_unit_offset(way->options, i);
}

static inline void block_grads_at(const block_way *way, float *full, float *grads[BLOCK_PARAMS])
{
    for (int i = 0; i < BLOCK_PARAMS; i++)
        grads[i] = way->options->no_bias && i % 2 == 1 ? way->bias_scratch : full + block_unit_offset(way->options, i);
}

static inline void block_nccl_config(const block_options *o, ncclConfig_t *out_config)
{
    const ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    *out_config = config;
    if (!o->cta_zero) return;
#ifdef NCCL_CTA_POLICY_ZERO
    out_config->CTAPolicy = NCCL_CTA_POLICY_ZERO;
#else
    BENCH_FAIL("--cta-zero needs a newer NCCL header than %d", NCCL_VERSION_CODE);
#endif
}

static inline void block_enter(block_way *way)
{
#ifdef BLOCK_COUNT_CALLS
    way->entered_calls = block_calls;
    way->entered_calls_ns = block_calls_ns;
    block_in_call = true;
#endif
    way->entered_ns = fsdp__now_ns();
}

static inline void block_leave_hook(block_way *way)
{
    way->times.hooks_ns += fsdp__now_ns() - way->entered_ns;
#ifdef BLOCK_COUNT_CALLS
    way->times.hook_calls += block_calls - way->entered_calls;
    way->times.hook_calls_ns += block_calls_ns - way->entered_calls_ns;
    block_in_call = false;
#endif
}

static inline void block_leave_update(block_way *way)
{
    way->times.update_ns += fsdp__now_ns() - way->entered_ns;
#ifdef BLOCK_COUNT_CALLS
    block_in_call = false;
#endif
}

#endif
