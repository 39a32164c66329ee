/* SPDX-License-Identifier: MIT */
/* The context: one rank's device, clocks, communicators, side channel, lanes. */
#ifndef FSDP_LIB_CONTEXT_H
#define FSDP_LIB_CONTEXT_H

#include <pthread.h>
#include <stdatomic.h>

#include "check.h"
#include "clock.h"
#include "flight.h"
#include "fsdp/alloc.h"
#include "fsdp/backend.h"
#include "fsdp/comm.h"
#include "fsdp/context.h"
#include "pinned.h"

enum { FSDP__VOTE_BYTES = 16 };

/* What the caller makes and must give up before the context goes. */
typedef enum fsdp__child {
    FSDP__CHILD_MODEL,
    FSDP__CHILD_ALLOCATOR,
    FSDP__CHILD_STREAM,
    FSDP__CHILD_EVENT,
    FSDP__CHILD_WORK,
    FSDP__CHILD_TRACE,
    FSDP__CHILD_CAPTURE,
    FSDP__CHILD_PINNED,
    FSDP__N_CHILDREN
} fsdp__child;

/* What every hook looks at comes first, and lies close together: between hooks other code fills the caches. */
struct fsdp_context {
    const fsdp_backend *backend;
    void *dev, *side;
    fsdp_comm *comm, *reduce_comm; /* the same unless the config asks for two */
    uint32_t rank, world;
    struct fsdp_capture *capture; /* that is on; NULL: none */
    fsdp_trace *trace;            /* NULL when none is on */

    /* One lock over clocks, allocators and the tape: hooks take it once, the allocator's callers on other threads too. */
    pthread_mutex_t lock; /* it knows who holds it */
    fsdp_stream *lanes[3];
    uint64_t timeout_ns;
    uint64_t n_device_frees;
    fsdp_counters counters; /* what hooks count, in the line of debug */
    uint32_t debug;
    fsdp__clocks clocks;
    fsdp__flight flight;

    fsdp_host_allocator host;
    fsdp_device_caps caps;
    char *votes; /* world × FSDP__VOTE_BYTES: the side channel's, so that a rank without host memory can still say so */
    fsdp_log_fn log;
    void *log_arg;
    pthread_cond_t drained; /* some stream's n_drains has come down */
    fsdp__pinned pinned;
    /* Over the communicators' coming and going, for the side channel's thread. Inside it only what a communicator's abort
     * locks. */
    pthread_mutex_t comms_lock;

    fsdp_allocator *pools;             /* all, newest first */
    struct fsdp_model *models;         /* all: sharding's */
    struct fsdp_capture *captures;     /* all that live */
    uint32_t n_live[FSDP__N_CHILDREN]; /* the caller's */
    uint32_t n_open_traces;            /* of these traces, those that the device may still write into */
    atomic_int aborted;

    char *flight_path;          /* of the file, with rank and end; NULL: none is wanted */
    atomic_bool flight_written; /* or tried */
    atomic_bool comparing;      /* FSDP_DEBUG_ORDER: a group is on the recorder that may not be enqueued: no file yet */
    pthread_mutex_t failing_lock; /* over: */
    bool told;                    /* the side channel knows of this rank's failure */
    /* A group that was compared and then found no host memory: asked again, it is not compared again. */
    uint64_t compared_number[FSDP__N_COMMS], compared_hash[FSDP__N_COMMS];
};

/* FSDP_OK, or the device's, communicators' or peers' first error. Cheap: every enqueue asks. The first call that sees a
 * failure between ranks tells it to all of them, which takes half a second at most, and writes the flight file. With the
 * context's lock held or without it. */
fsdp_status fsdp__context_check(fsdp_context *ctx);
/* The same answer, and nothing else happens. */
fsdp_status fsdp__context_peek(fsdp_context *ctx);
/* This rank has found what makes going on impossible: every rank's context fails with it. Returns the whole sentence. */
fsdp_status fsdp__context_fail_all(fsdp_context *ctx, fsdp_status status, const char *sentence);
/* status, or what stopped the context if something did: an abort's own sentence says who and why, while the operation that
 * it met only knows that it was stopped. */
fsdp_status fsdp__context_explain(fsdp_context *ctx, fsdp_status status);
/* The same, of a wait by the host. If it only took longer than timeout_ns: what has not happened, and what to do. */
fsdp_status fsdp__context_late(fsdp_context *ctx, fsdp_status status, uint64_t timeout_ns, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
/* Wait until every stream is idle, at most timeout_ns each. TIMEOUT: one is still running; STATE: one may be, and cannot be
 * waited for now (it captures); another error: all are idle. */
fsdp_status fsdp__context_drain(fsdp_context *ctx, uint64_t timeout_ns);
/* Before memory goes that streams may use: wait until they are idle, without a deadline. STATE: one cannot be waited for. What
 * has stopped one with an error is the context's to tell. */
fsdp_status fsdp__context_settle(fsdp_context *ctx, const char *call);
/* Give a warning to the caller's log. */
void fsdp__log(fsdp_context *ctx, const char *format, ...) __attribute__((format(printf, 2, 3)));

static inline fsdp_status fsdp__pass_gate(fsdp_stream *s)
{
    return __builtin_expect(s->ctx->clocks.behind >> s->slot & 1u, 0) ? fsdp__pass_gate_now(s) : FSDP_OK;
}

/* A mutex that knows its owner refuses him a second time: ignored, the first unlock would let others in too early. */
static inline void fsdp__lock(fsdp_context *ctx)
{
    int error = pthread_mutex_lock(&ctx->lock);
    assert(error == 0);
    (void)error;
}
static inline void fsdp__unlock(fsdp_context *ctx)
{
    int error = pthread_mutex_unlock(&ctx->lock);
    assert(error == 0);
    (void)error;
}
/* Does the calling thread hold it? */
bool fsdp__has_lock(fsdp_context *ctx);

#endif
