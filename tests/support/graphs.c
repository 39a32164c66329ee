/* SPDX-License-Identifier: MIT */
/* See graphs.h. A graph is a list of nodes in host order, each on one of its branches: branch 0 is the stream that is captured,
 * the others are the streams that came in. clock[b][a]: how many of branch a's nodes come before what branch b gets next. */
#include "graphs.h"

#include <assert.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lib/clock.h"

enum { MAX_BRANCHES = 16, MAX_PARTS = 8 };

typedef enum node_kind { NODE_OPERATION, NODE_GROUP, NODE_RECORD, NODE_WAIT } node_kind;

typedef struct node {
    node_kind kind;
    uint32_t branch;
    fsdp_device_op op;
    void *comm;
    fsdp_collective list[MAX_PARTS];
    uint32_t n;
    void *event;                   /* RECORD: the graph's own */
    size_t record;                 /* WAIT: the node that it waits for */
    uint64_t before[MAX_BRANCHES]; /* RECORD: the clock of its branch */
} node;

typedef struct stream {
    graphs *g;
    void *inner;
    uint64_t capture; /* number of the capture that it is in, or was; branch: there */
    uint32_t branch;
} stream;

typedef struct event {
    void *inner;
    bool recorded;
    uint64_t capture; /* number of the one in which it was recorded last; 0: outside */
    size_t node;
} event;

struct graphs_graph {
    graphs *g;
    uint64_t number;
    const stream *origin;
    uint32_t n_branches;
    void *branch[MAX_BRANCHES]; /* streams of the backend inside; 0: none, it runs where it is launched */
    uint64_t clock[MAX_BRANCHES][MAX_BRANCHES], length[MAX_BRANCHES];
    node *node;
    size_t n_nodes, capacity;
};

void graphs_init(graphs *g, const fsdp_backend *inner, const void *inner_config)
{
    *g = (graphs){.to = {inner, inner_config}};
}

const char *graphs_complaint(const graphs *g) { return g->complaint[0] != 0 ? g->complaint : NULL; }

static fsdp_status complain(graphs *g, const char *what)
{
    if (g->complaint[0] == 0) snprintf(g->complaint, sizeof g->complaint, "%s", what);
    return fsdp_backend_fail(FSDP_ERR_DEVICE, "graphs: %s", g->complaint);
}

static const fsdp_device_ops *device_of(const graphs *g) { return g->to.inner->device; }
static graphs *graphs_of(const void *object) { return (graphs *)((const forwarded *)object)->to; }
static bool is_in(const stream *s) { return s->g->on != NULL && s->capture == s->g->on->number; }

static node *add_node(graphs_graph *graph, node_kind kind, uint32_t branch)
{
    if (graph->n_nodes == graph->capacity) {
        graph->capacity = graph->capacity == 0 ? 256 : 2 * graph->capacity;
        graph->node = realloc(graph->node, graph->capacity * sizeof *graph->node);
        if (graph->node == NULL) abort();
    }
    node *n = &graph->node[graph->n_nodes++];
    memset(n, 0, sizeof *n);
    n->kind = kind;
    n->branch = branch;
    return n;
}

/* ---- What a test does in the place of CUDA ---- */

static void enter(graphs_graph *graph, stream *s)
{
    if (graph->n_branches == MAX_BRANCHES) abort();
    s->capture = graph->number;
    s->branch = graph->n_branches++;
}

void graphs_begin(graphs *g, const fsdp_stream *s)
{
    if (g->on != NULL) {
        (void)complain(g, "a capture is on already");
        return;
    }
    graphs_graph *graph = calloc(1, sizeof *graph);
    if (graph == NULL) abort();
    graph->g = g;
    graph->number = ++g->n_captures;
    graph->origin = s->native;
    enter(graph, s->native);
    g->on = graph;
}

static bool is_joined(const graphs_graph *graph)
{
    for (uint32_t b = 1; b < graph->n_branches; b++)
        if (graph->clock[0][b] < graph->length[b]) return false;
    return true;
}

graphs_graph *graphs_end(graphs *g, const fsdp_stream *s)
{
    graphs_graph *graph = g->on;
    if (graph == NULL || graph->origin != s->native) {
        (void)complain(g, "the stream whose capture ends is not the one on which it began");
        return NULL;
    }
    g->on = NULL;
    if (!is_joined(graph)) (void)complain(g, "a stream that came into the capture did not join");
    fsdp_status status = FSDP_OK;
    for (uint32_t b = 1; b < graph->n_branches && status == FSDP_OK; b++)
        status = device_of(g)->stream_create(g->dev, "branch", false, &graph->branch[b]);
    for (size_t i = 0; i < graph->n_nodes && status == FSDP_OK; i++)
        if (graph->node[i].kind == NODE_RECORD) status = device_of(g)->event_create(g->dev, &graph->node[i].event);
    if (status == FSDP_OK && g->complaint[0] == 0) return graph;
    graphs_destroy(graph);
    return NULL;
}

void graphs_destroy(graphs_graph *graph)
{
    if (graph == NULL) return;
    const graphs *g = graph->g;
    for (uint32_t b = 1; b < graph->n_branches; b++)
        if (graph->branch[b] != NULL) device_of(g)->stream_destroy(g->dev, graph->branch[b]);
    for (size_t i = 0; i < graph->n_nodes; i++)
        if (graph->node[i].event != NULL) device_of(g)->event_destroy(g->dev, graph->node[i].event);
    free(graph->node);
    free(graph);
}

uint64_t graphs_count(const graphs_graph *graph)
{
    uint64_t n = 0;
    for (size_t i = 0; i < graph->n_nodes; i++) n += graph->node[i].kind <= NODE_GROUP;
    return n;
}

fsdp_status graphs_launch(graphs_graph *graph, const fsdp_stream *s)
{
    graphs *g = graph->g;
    const fsdp_device_ops *ops = device_of(g);
    fsdp_status status = FSDP_OK;
    for (size_t i = 0; i < graph->n_nodes && status == FSDP_OK; i++) {
        const node *n = &graph->node[i];
        void *on = n->branch == 0 ? ((stream *)s->native)->inner : graph->branch[n->branch];
        switch (n->kind) {
        case NODE_OPERATION: status = ops->launch(g->dev, on, &n->op, NULL); break;
        case NODE_GROUP: status = g->to.inner->comm->enqueue(n->comm, on, n->list, n->n); break;
        case NODE_RECORD: status = ops->event_record(g->dev, n->event, on, NULL); break;
        case NODE_WAIT: status = ops->stream_wait(g->dev, on, graph->node[n->record].event, NULL); break;
        }
    }
    return status;
}

/* ---- Device ---- */

static fsdp_status device_open(const fsdp_device_args *args, void **out_dev, fsdp_device_caps *out_caps)
{
    fsdp_status status = forward_device_ops.open(args, out_dev, out_caps);
    if (status != FSDP_OK) return status;
    graphs_of(*out_dev)->dev = ((forwarded *)*out_dev)->inner;
    out_caps->can_capture = true;
    return FSDP_OK;
}

static fsdp_status mem_alloc(void *dev, uint64_t bytes, fsdp_memory_kind kind, void **out_ptr)
{
    graphs *g = graphs_of(dev);
    if (g->on != NULL) return complain(g, "memory is taken from the device inside a capture");
    return device_of(g)->mem_alloc(g->dev, bytes, kind, out_ptr);
}

static void mem_free(void *dev, void *ptr, uint64_t bytes, fsdp_memory_kind kind)
{
    graphs *g = graphs_of(dev);
    if (g->on != NULL) (void)complain(g, "memory is given back to the device inside a capture");
    device_of(g)->mem_free(g->dev, ptr, bytes, kind);
}

static fsdp_status stream_create(void *dev, const char *name, bool high_priority, void **out_stream)
{
    graphs *g = graphs_of(dev);
    if (g->on != NULL) return complain(g, "a stream is made inside a capture");
    stream *s = calloc(1, sizeof *s);
    if (s == NULL) abort();
    s->g = g;
    fsdp_status status = device_of(g)->stream_create(g->dev, name, high_priority, &s->inner);
    if (status == FSDP_OK) *out_stream = s;
    else free(s);
    return status;
}

static void stream_destroy(void *dev, void *stream_)
{
    graphs *g = graphs_of(dev);
    stream *s = stream_;
    if (g->on != NULL) (void)complain(g, "a stream is destroyed inside a capture");
    device_of(g)->stream_destroy(g->dev, s->inner);
    free(s);
}

static fsdp_status stream_drain(void *dev, void *stream_, uint64_t timeout_ns)
{
    graphs *g = graphs_of(dev);
    fsdp_status forbidden = g->on != NULL ? complain(g, "the host waits for a stream inside a capture") : FSDP_OK;
    /* What ran before runs on, and its memory may go now. */
    fsdp_status status = device_of(g)->stream_drain(g->dev, ((stream *)stream_)->inner, timeout_ns);
    return forbidden != FSDP_OK ? forbidden : status;
}

static fsdp_status event_create(void *dev, void **out_event)
{
    graphs *g = graphs_of(dev);
    event *e = calloc(1, sizeof *e);
    if (e == NULL) abort();
    fsdp_status status = device_of(g)->event_create(g->dev, &e->inner);
    if (status == FSDP_OK) *out_event = e;
    else free(e);
    return status;
}

static void event_destroy(void *dev, void *event_)
{
    const graphs *g = graphs_of(dev);
    event *e = event_;
    device_of(g)->event_destroy(g->dev, e->inner);
    free(e);
}

static fsdp_status event_record(void *dev, void *event_, void *stream_, fsdp_span *span)
{
    graphs *g = graphs_of(dev);
    stream *s = stream_;
    event *e = event_;
    if (!is_in(s)) {
        fsdp_status status = device_of(g)->event_record(g->dev, e->inner, s->inner, span);
        if (status == FSDP_OK) e->recorded = true, e->capture = 0;
        return status;
    }
    graphs_graph *graph = g->on;
    graph->clock[s->branch][s->branch] = graph->length[s->branch];
    memcpy(add_node(graph, NODE_RECORD, s->branch)->before, graph->clock[s->branch], sizeof graph->clock[0]);
    *e = (event){e->inner, true, graph->number, graph->n_nodes - 1};
    return FSDP_OK;
}

static fsdp_status stream_wait(void *dev, void *stream_, void *event_, fsdp_span *span)
{
    graphs *g = graphs_of(dev);
    stream *s = stream_;
    const event *e = event_;
    bool captured = e->recorded && e->capture != 0;
    if (captured && (g->on == NULL || e->capture != g->on->number))
        return complain(g, "a wait for an event that was recorded in a capture, which is over");
    if (is_in(s) && !captured)
        return e->recorded ? complain(g, "a wait inside a capture for an event of before") : FSDP_OK;
    if (!captured) return device_of(g)->stream_wait(g->dev, s->inner, e->inner, span);
    graphs_graph *graph = g->on;
    if (!is_in(s)) enter(graph, s);
    node *n = add_node(graph, NODE_WAIT, s->branch);
    n->record = e->node;
    for (uint32_t b = 0; b < MAX_BRANCHES; b++)
        if (graph->node[e->node].before[b] > graph->clock[s->branch][b])
            graph->clock[s->branch][b] = graph->node[e->node].before[b];
    return FSDP_OK;
}

static fsdp_status check_question(graphs *g, const event *e)
{
    if (g->on != NULL) return complain(g, "the host asks for an event inside a capture");
    if (e->recorded && e->capture != 0) return complain(g, "the host asks for an event that was recorded in a capture");
    return FSDP_OK;
}

static fsdp_status event_query(void *dev, void *event_, bool *out_done)
{
    graphs *g = graphs_of(dev);
    fsdp_status status = check_question(g, event_);
    return status == FSDP_OK ? device_of(g)->event_query(g->dev, ((event *)event_)->inner, out_done) : status;
}

static fsdp_status event_wait(void *dev, void *event_, uint64_t timeout_ns)
{
    graphs *g = graphs_of(dev);
    fsdp_status status = check_question(g, event_);
    return status == FSDP_OK ? device_of(g)->event_wait(g->dev, ((event *)event_)->inner, timeout_ns) : status;
}

static fsdp_status launch(void *dev, void *stream_, const fsdp_device_op *op, fsdp_span *span)
{
    graphs *g = graphs_of(dev);
    const stream *s = stream_;
    if (!is_in(s)) return device_of(g)->launch(g->dev, s->inner, op, span);
    add_node(g->on, NODE_OPERATION, s->branch)->op = *op;
    g->on->length[s->branch]++;
    return FSDP_OK;
}

static fsdp_status device_check(void *dev)
{
    graphs *g = graphs_of(dev);
    if (g->complaint[0] != 0) return complain(g, g->complaint);
    return device_of(g)->check(g->dev);
}

/* ---- Communicator ---- */

static fsdp_status enqueue(void *comm, void *stream_, const fsdp_collective *list, uint32_t n)
{
    const stream *s = stream_;
    if (!is_in(s)) return forward_comm_ops.enqueue(comm, s->inner, list, n);
    assert(n <= MAX_PARTS);
    node *group = add_node(s->g->on, NODE_GROUP, s->branch);
    group->comm = ((forwarded *)comm)->inner;
    group->n = n;
    memcpy(group->list, list, n * sizeof *list);
    s->g->on->length[s->branch]++;
    return FSDP_OK;
}

static bool stream_is_capturing(void *stream_) { return is_in(stream_); }

/* ---- The tables ---- */

static fsdp_device_ops device_ops;
static fsdp_comm_ops comm_ops;

static void make_tables(void)
{
    device_ops = forward_device_ops;
    device_ops.name = "graphs";
    device_ops.open = device_open;
    device_ops.mem_alloc = mem_alloc;
    device_ops.mem_free = mem_free;
    device_ops.stream_create = stream_create;
    device_ops.stream_destroy = stream_destroy;
    device_ops.stream_drain = stream_drain;
    device_ops.event_create = event_create;
    device_ops.event_destroy = event_destroy;
    device_ops.event_record = event_record;
    device_ops.stream_wait = stream_wait;
    device_ops.event_query = event_query;
    device_ops.event_wait = event_wait;
    device_ops.launch = launch;
    device_ops.check = device_check;
    device_ops.stream_is_capturing = stream_is_capturing;
    comm_ops = forward_comm_ops;
    comm_ops.name = "graphs";
    comm_ops.enqueue = enqueue;
}

const fsdp_backend *graphs_backend(void)
{
    static const fsdp_backend backend = {sizeof backend, "graphs", &device_ops, &comm_ops, &forward_side_ops};
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, make_tables);
    return &backend;
}
