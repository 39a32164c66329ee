/* SPDX-License-Identifier: MIT */
/* Captures, as far as they are bytes, streams and time: who comes in, who joins, what a replay comes after and before.
 * [Note: Capture] in docs/streams.md. What they are of models: sharding/capture.c. With the context's lock held. */
#ifndef FSDP_LIB_GRAPH_H
#define FSDP_LIB_GRAPH_H

#include "context.h"
#include "fsdp/capture.h"

/* An allocator of the caller's that gave something to the capture. */
typedef struct fsdp__captured_pool {
    fsdp_allocator *pool;
    uint64_t live;              /* sum of hashes of the blocks that live while it is replayed */
    uint64_t n_allocs, n_frees; /* of its statistics when that was so */
} fsdp__captured_pool;

typedef struct fsdp__captured_model fsdp__captured_model; /* sharding/capture.c */

/* One fsdp_adamw_step of a capture. */
typedef struct fsdp__captured_step {
    uint32_t model;  /* index */
    uint32_t update; /* which one of the model's in a replay: 1, 2, … */
    uint32_t place;  /* of its host values */
} fsdp__captured_step;

struct fsdp_capture {
    fsdp_context *ctx;
    fsdp_capture *next;  /* of the context's */
    fsdp_stream *stream; /* while it is on */
    uint64_t hash;       /* of what the ranks have enqueued up to its end: tells captures apart */
    char broken[192];    /* why it can be replayed no more; "" */

    fsdp__captured_pool *pools;
    size_t n_pools, pools_capacity;
    fsdp__captured_model *models;
    size_t n_models, models_capacity;
    fsdp__captured_step *steps;
    size_t n_steps, steps_capacity;

    /* Between fsdp_replay and fsdp_replayed: on which stream. The stream may be gone since. */
    bool replaying;
    int replay_slot;
    char replay_name[sizeof((fsdp_stream *)0)->name];
};

/* Everything that any stream was given comes before what any is given next; then the capture is on, and the others come in by a
 * fork from s. */
fsdp_status fsdp__capture_open(fsdp_capture *capture, fsdp_stream *s);
/* Join, and off. Nothing of it has run, so afterwards all of it counts as covered for everybody. Off whatever is returned. */
fsdp_status fsdp__capture_close(fsdp_capture *capture);

/* The pools: remember them; find out which gave something, and whether the same blocks live; whether they do now. */
fsdp_status fsdp__capture_take_pools(fsdp_capture *capture);
fsdp_status fsdp__capture_check_pools(const char *call, fsdp_capture *capture);
/* Forget those that gave nothing. */
void fsdp__capture_drop_pools(fsdp_capture *capture);
void fsdp__capture_free_pools(fsdp_capture *capture);
/* The allocator goes, or what it gave may have gone. */
void fsdp__capture_lose_pool(fsdp_context *ctx, const fsdp_allocator *pool, const char *why);

/* s comes after everything that other streams were given since the last replay. */
fsdp_status fsdp__replay_open(fsdp_stream *s);
/* Whatever others are given from now on comes after what s was given so far. */
fsdp_status fsdp__replay_close(fsdp_stream *s);

/* On the flight recorder, for all ranks to compare. kind: CAPTURE or REPLAY. */
void fsdp__capture_note(const fsdp_capture *capture, fsdp_operation kind, const fsdp_stream *s);

/* STATE, for what cannot be inside a capture: `call` of it. With the lock or without it: some may be called from any thread. */
fsdp_status fsdp__capture_refuse(const char *call);
static inline fsdp_status fsdp__capture_off(const char *call, const fsdp_context *ctx)
{
    return __builtin_expect(__atomic_load_n(&ctx->capture, __ATOMIC_RELAXED) == NULL, 1) ? FSDP_OK
                                                                                         : fsdp__capture_refuse(call);
}
/* For an event that may have been recorded inside one. */
fsdp_status fsdp__capture_no_moment(const char *call, const fsdp__fence *fence);

#endif
