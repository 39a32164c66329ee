/* SPDX-License-Identifier: MIT */
/* Captures and graphs of the stand-in. A capture is the list of what its streams were given, a branch each; a launch
 * gives it to the launching stream and to streams of the graph's own, one a branch, with new moments for its events: so
 * what the graph does not order is not ordered either when it runs. */
#include "standin.h"

#include <stdlib.h>
#include <string.h>

enum { BRANCHES = 16 };

typedef enum item_kind { ITEM_WORK, ITEM_RECORD, ITEM_WAIT } item_kind;

typedef struct item {
    item_kind kind;
    uint32_t branch, moment;
    const standin_kind *work;
    void *arg;
} item;

/* How many items of each branch something comes after. */
typedef struct frontier {
    uint32_t n[BRANCHES];
} frontier;

/* What a capture, its graph and what is instantiated from that share. */
typedef struct body {
    atomic_int refs;
    item *items;
    uint32_t n, capacity, n_branches, n_moments, n_nodes;
} body;

struct standin_capture {
    uint64_t id;
    enum cudaStreamCaptureMode mode;
    pthread_t thread;
    bool invalid;
    cudaStream_t stream[BRANCHES];
    frontier at[BRANCHES], *moment;
    body *body;
    standin_capture *next;
};

struct CUgraph_st {
    body *body;
};

struct CUgraphExec_st {
    body *body;
    cudaStream_t stream[BRANCHES];
    pthread_mutex_t lock;
    standin_moment *last; /* launches of one graph come one after the other */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* over captures */
static standin_capture *captures;
static uint64_t n_captures_made;
static _Thread_local enum cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

static void *more(void *old, size_t bytes)
{
    void *room = realloc(old, bytes);
    if (room == NULL) standin_die("no memory for a capture");
    return room;
}

static void release_body(body *b)
{
    if (atomic_fetch_sub(&b->refs, 1) > 1) return;
    for (uint32_t i = 0; i < b->n; i++) free(b->items[i].arg);
    free(b->items);
    free(b);
}

/* ---- What is allowed meanwhile ---- */

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode)
{
    enum cudaStreamCaptureMode before = thread_mode;
    STANDIN_BEGIN();
    thread_mode = *mode;
    *mode = before;
    return cudaSuccess;
}

/* As cudaThreadExchangeStreamCaptureMode says of a thread's modes. Whoever breaks the rule ends the captures that it
 * protects. */
cudaError_t standin_may_call(void)
{
    cudaError_t error = cudaSuccess;
    if (thread_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
    pthread_mutex_lock(&lock);
    for (standin_capture *c = captures; c != NULL; c = c->next) {
        bool mine = pthread_equal(c->thread, pthread_self()) && c->mode != cudaStreamCaptureModeRelaxed;
        bool strict = thread_mode == cudaStreamCaptureModeGlobal && c->mode == cudaStreamCaptureModeGlobal;
        if (!mine && !strict) continue;
        c->invalid = true;
        error = cudaErrorStreamCaptureUnsupported;
    }
    pthread_mutex_unlock(&lock);
    return error;
}

cudaError_t standin_is_free(cudaStream_t s)
{
    pthread_mutex_lock(&lock);
    standin_capture *c = atomic_load(&s->capture);
    if (c != NULL) c->invalid = true;
    pthread_mutex_unlock(&lock);
    return c != NULL ? cudaErrorStreamCaptureUnsupported : s->is_null ? standin_null_is_free(s->device) : cudaSuccess;
}

cudaError_t standin_null_is_free(int device)
{
    bool is_free = true;
    pthread_mutex_lock(&lock);
    for (const standin_capture *c = captures; c != NULL; c = c->next)
        for (uint32_t i = 0; i < c->body->n_branches; i++)
            is_free &= (c->stream[i]->flags & cudaStreamNonBlocking) != 0 || c->stream[i]->device != device;
    pthread_mutex_unlock(&lock);
    return is_free ? cudaSuccess : cudaErrorStreamCaptureImplicit;
}

/* The capture is not ended by the question. */
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status)
{
    STANDIN_BEGIN();
    cudaError_t error = standin_stream_of(stream, &stream);
    if (error == cudaSuccess && stream->is_null) error = standin_null_is_free(stream->device);
    if (error != cudaSuccess) return standin_return(error);
    pthread_mutex_lock(&lock);
    const standin_capture *c = atomic_load(&stream->capture);
    *status = c == NULL    ? cudaStreamCaptureStatusNone
              : c->invalid ? cudaStreamCaptureStatusInvalidated
                           : cudaStreamCaptureStatusActive;
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

/* ---- Capturing ---- */

static item *add_item(standin_capture *c, item_kind kind, uint32_t branch)
{
    body *b = c->body;
    if (b->n == b->capacity) b->items = more(b->items, (b->capacity = 2 * b->capacity + 64) * sizeof *b->items);
    item *to = &b->items[b->n++];
    *to = (item){.kind = kind, .branch = branch};
    c->at[branch].n[branch]++;
    if (kind == ITEM_WORK) b->n_nodes++;
    return to;
}

cudaError_t standin_capture_work(cudaStream_t s, const standin_kind *kind, const void *arg)
{
    pthread_mutex_lock(&lock);
    standin_capture *c = atomic_load(&s->capture);
    bool invalid = c == NULL || c->invalid;
    if (!invalid) {
        item *to = add_item(c, ITEM_WORK, s->branch);
        to->work = kind;
        to->arg = more(NULL, kind->bytes);
        memcpy(to->arg, arg, kind->bytes);
    }
    pthread_mutex_unlock(&lock);
    return invalid ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
}

cudaError_t standin_capture_record(cudaStream_t s, standin_mark *mark)
{
    if (atomic_load(&s->capture) == NULL) return cudaSuccess;
    pthread_mutex_lock(&lock);
    standin_capture *c = atomic_load(&s->capture);
    bool invalid = c->invalid;
    if (!invalid) {
        *mark = (standin_mark){c->id, c->body->n_moments++};
        add_item(c, ITEM_RECORD, s->branch)->moment = mark->index;
        c->moment = more(c->moment, c->body->n_moments * sizeof *c->moment);
        c->moment[mark->index] = c->at[s->branch];
    }
    pthread_mutex_unlock(&lock);
    return invalid ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
}

static standin_capture *find(uint64_t id)
{
    standin_capture *c = captures;
    while (c != NULL && c->id != id) c = c->next;
    return c;
}

/* A stream that waits for a captured event belongs to the capture from then on. */
static cudaError_t join(standin_capture *c, cudaStream_t s)
{
    if (c->body->n_branches == BRANCHES) standin_die("a capture of more than %d streams", BRANCHES);
    s->branch = c->body->n_branches++;
    c->stream[s->branch] = s;
    atomic_store(&s->capture, c);
    return cudaSuccess;
}

/* Of an event that was recorded outside, or in a capture that is over, a captured stream cannot wait. */
static cudaError_t capture_wait(cudaStream_t s, standin_mark mark, bool recorded)
{
    standin_capture *own = atomic_load(&s->capture), *c = mark.capture != 0 ? find(mark.capture) : NULL;
    if (mark.capture == 0) {
        if (recorded) own->invalid = true;
        return recorded ? cudaErrorStreamCaptureIsolation : cudaSuccess;
    }
    if (c == NULL) return cudaErrorCapturedEvent;
    if (own != NULL && own != c) {
        own->invalid = c->invalid = true;
        return cudaErrorStreamCaptureMerge;
    }
    if (c->invalid) return cudaErrorStreamCaptureInvalidated;
    cudaError_t error = own == NULL ? join(c, s) : cudaSuccess;
    if (error != cudaSuccess) return error;
    add_item(c, ITEM_WAIT, s->branch)->moment = mark.index;
    for (uint32_t i = 0; i < BRANCHES; i++)
        if (c->at[s->branch].n[i] < c->moment[mark.index].n[i]) c->at[s->branch].n[i] = c->moment[mark.index].n[i];
    return cudaSuccess;
}

cudaError_t standin_capture_wait(cudaStream_t s, standin_mark mark, bool recorded)
{
    pthread_mutex_lock(&lock);
    cudaError_t error = capture_wait(s, mark, recorded);
    pthread_mutex_unlock(&lock);
    return error;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode)
{
    STANDIN_BEGIN();
    cudaError_t error = standin_stream_of(stream, &stream);
    if (error == cudaSuccess && stream->is_null) error = cudaErrorStreamCaptureUnsupported;
    if (error == cudaSuccess && atomic_load(&stream->capture) != NULL) error = cudaErrorIllegalState;
    if (error != cudaSuccess) return standin_return(error);
    standin_capture *c = calloc(1, sizeof *c);
    body *b = calloc(1, sizeof *b);
    if (c == NULL || b == NULL) standin_die("no memory for a capture");
    atomic_init(&b->refs, 1);
    c->mode = mode;
    c->thread = pthread_self();
    c->body = b;
    pthread_mutex_lock(&lock);
    c->id = ++n_captures_made;
    c->next = captures;
    captures = c;
    (void)join(c, stream);
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

/* Everything that other streams were given must come before the end. */
static cudaError_t end(standin_capture *c)
{
    if (c->invalid) return cudaErrorStreamCaptureInvalidated;
    for (uint32_t i = 1; i < c->body->n_branches; i++)
        if (c->at[0].n[i] < c->at[i].n[i]) return cudaErrorStreamCaptureUnjoined;
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *out_graph)
{
    STANDIN_ENTER();
    *out_graph = NULL;
    cudaError_t error = standin_stream_of(stream, &stream);
    if (error != cudaSuccess) return standin_return(error);
    pthread_mutex_lock(&lock);
    standin_capture *c = atomic_load(&stream->capture);
    error = c == NULL || c->stream[0] != stream ? cudaErrorIllegalState : cudaSuccess;
    if (error == cudaSuccess && c->mode != cudaStreamCaptureModeRelaxed && !pthread_equal(c->thread, pthread_self()))
        error = cudaErrorStreamCaptureWrongThread;
    if (error == cudaSuccess) {
        standin_capture **link = &captures;
        while (*link != c) link = &(*link)->next;
        *link = c->next;
        for (uint32_t i = 0; i < c->body->n_branches; i++) atomic_store(&c->stream[i]->capture, NULL);
    } else {
        c = NULL;
    }
    pthread_mutex_unlock(&lock);
    if (c == NULL) return standin_return(error);
    error = end(c);
    cudaGraph_t graph = error == cudaSuccess ? calloc(1, sizeof *graph) : NULL;
    if (graph != NULL) graph->body = c->body;
    else release_body(c->body);
    *out_graph = graph;
    free(c->moment);
    free(c);
    return standin_return(error);
}

/* ---- Graphs ---- */

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *n)
{
    STANDIN_BEGIN();
    if (nodes != NULL) return standin_return(cudaErrorNotSupported);
    *n = graph->body->n_nodes;
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    cudaError_t entered = standin_enter();
    if (!standin_may_give_back(entered)) return standin_return(entered);
    if (graph == NULL) return standin_return(cudaErrorInvalidValue);
    release_body(graph->body);
    free(graph);
    return standin_return(entered);
}

#if CUDART_VERSION >= 12000
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *out_exec, cudaGraph_t graph, unsigned long long flags)
{
    (void)flags;
    STANDIN_BEGIN();
    cudaGraphExec_t exec = calloc(1, sizeof *exec);
    if (exec == NULL) standin_die("no memory for a graph");
    exec->body = graph->body;
    atomic_fetch_add(&exec->body->refs, 1);
    pthread_mutex_init(&exec->lock, NULL);
    for (uint32_t i = 1; i < exec->body->n_branches; i++)
        exec->stream[i] = standin_stream_make(standin_current(), cudaStreamNonBlocking);
    *out_exec = exec;
    return cudaSuccess;
}
#endif

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
    cudaError_t entered = standin_enter();
    if (!standin_may_give_back(entered)) return standin_return(entered);
    if (exec == NULL) return standin_return(cudaErrorInvalidValue);
    for (uint32_t i = 1; i < exec->body->n_branches; i++) standin_stream_leave(exec->stream[i]);
    standin_moment_release(exec->last);
    release_body(exec->body);
    pthread_mutex_destroy(&exec->lock);
    free(exec);
    return standin_return(entered);
}

static void launch_items(cudaGraphExec_t exec, cudaStream_t stream)
{
    const body *b = exec->body;
    standin_moment **moments = more(NULL, (b->n_moments + 1) * sizeof *moments);
    for (uint32_t i = 0; i < b->n_moments; i++) moments[i] = standin_moment_make();
    for (uint32_t i = 0; i < b->n; i++) {
        const item *it = &b->items[i];
        cudaStream_t on = it->branch == 0 ? stream : exec->stream[it->branch];
        if (it->kind == ITEM_RECORD) standin_record_moment(on, standin_moment_hold(moments[it->moment]));
        else if (it->kind == ITEM_WAIT) standin_wait_moment(on, standin_moment_hold(moments[it->moment]));
        else (void)standin_push(on, it->work, it->arg);
    }
    for (uint32_t i = 0; i < b->n_moments; i++) standin_moment_release(moments[i]);
    free(moments);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream)
{
    STANDIN_BEGIN();
    cudaError_t error = standin_stream_of(stream, &stream);
    if (error == cudaSuccess) error = standin_is_free(stream);
    if (error != cudaSuccess) return standin_return(error);
    pthread_mutex_lock(&exec->lock);
    if (exec->last != NULL) standin_wait_moment(stream, exec->last);
    launch_items(exec, stream);
    exec->last = standin_moment_make();
    standin_record_moment(stream, standin_moment_hold(exec->last));
    pthread_mutex_unlock(&exec->lock);
    return cudaSuccess;
}
