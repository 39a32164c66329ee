/* SPDX-License-Identifier: MIT */
/* One rank of the sharded loop: its objects, and what it enqueues. */
#ifndef GPT_RANK_H
#define GPT_RANK_H

#include <fsdp/fsdp.h>

#include "job.h"
#include "tasks.h"

/* Arguments of everything that one pass enqueues. The host runs ahead of the stream, and a view's pointers are valid in
 * stream order only up to the end hook: so they are copied here, and a block is not used again until the stream has come
 * past its pass. */
typedef struct pass_block {
    batch_task batch;
    float loss;       /* of the micro-step: written and read on the stream */
    float *mean_loss; /* where it is: &loss, or the device's own memory */
    void *staged;     /* a batch on its way to the device; the host's needs none */
    gpt_call *calls;  /* 2 L + 4, in the order of the pass */
    int n_calls;
    void **held[3]; /* parameters in forward, in backward, gradients; pointers in the order of the unit's parameters */
    void **blocks[3]; /* the same, (L, BLOCK_PARAMS) */
    void **pointers;
} pass_block;

typedef struct rank rank;

/* What differs between devices that ranks compute with. Statuses: r->why has a sentence of ours, or fsdp_last_error the
 * library's. */
typedef struct rank_device {
    /* r->ctx and r->stream, by `config`, in which the backend is still to be named. */
    fsdp_status (*open)(rank *r, fsdp_config *config);
    /* How this device wants a unit's numbers, after the defaults. */
    void (*configure)(const rank *r, fsdp_unit_config *config);
    /* Activations, and what r->blocks need of the device. */
    fsdp_status (*take_memory)(rank *r);
    /* All of it, and of open(), back; the context is gone and the streams are idle. */
    void (*give_back)(rank *r);
    /* fill(task) writes r->state's tokens, targets and sequences; they are the batch of what comes next on the stream. */
    fsdp_status (*put)(rank *r, pass_block *block, fsdp_host_fn fill, void *task);
    /* One visit, on the stream; *call stays until it has run. */
    fsdp_status (*visit)(rank *r, gpt_call *call);
    /* take(task), after all that is on the stream, with r->state's losses and the first sequence's logits. */
    fsdp_status (*get)(rank *r, fsdp_host_fn take, void *task);
} rank_device;

extern const rank_device rank_host_device; /* rank_host.c */

enum { STEPS_IN_FLIGHT = 3 /* this one, and two whose report has not been asked for */ };

struct rank {
    const job *job;
    int index;
    fsdp_local *local;     /* ranks as threads */
    const fsdp_link *link; /* ranks as processes; NULL: no model of a wire */
    outcome *out;          /* one a process: NULL on the threads of ranks above 0 */
    problem why;
    fsdp_status status; /* of the call that failed */
    bool add_grads;     /* the model's gradients are zeroed, or hold earlier micro-steps' */

    fsdp_host_allocator host; /* an arena of jemalloc's, where the program has it; else zero: libc */
    fsdp_context *ctx;
    fsdp_stream *stream; /* compute */
    fsdp_model *model;
    fsdp_adamw *adamw;
    fsdp_trace *trace;   /* while one is on */
    fsdp_unit **units;   /* (L + 1) */
    fsdp_param **params; /* all, in registration order */
    gpt_state state;
    pass_block *blocks; /* (STEPS_IN_FLIGHT, micro-steps), then one for evaluation */
    int n_blocks;
    void *on_device; /* the device's own */
    step_clock clock;
};

#define TRY(expr)                                     \
    do {                                              \
        const fsdp_status try_status = (expr);        \
        if (try_status != FSDP_OK) return try_status; \
    } while (0)

/* A rank from start to end, on the calling thread. True if all went well; if not, the other ranks have been told. */
bool rank_run(rank *r);

/* ---- rank_passes.c ---- */

/* False: out of memory. */
bool pass_block_create(pass_block *block, const gpt_shape *shape);
void pass_block_destroy(pass_block *block);

/* Forward and backward of one micro-step; its gradients and loss go to the step. */
fsdp_status rank_train_pass(rank *r, int step, int micro_step);
/* Forward, for its losses and logits. before(task) and after(task) run before and after it; the host waits. */
fsdp_status rank_eval_pass(rank *r, int32_t next, void (*before)(void *), void (*after)(void *), void *task);

/* ---- rank_setup.c ---- */

/* Context, stream, model and memory, filled with the first values; the prediction goes to `out`. */
fsdp_status rank_open(rank *r);
/* Gives back whatever rank_open got to. */
void rank_close(rank *r);

#endif
