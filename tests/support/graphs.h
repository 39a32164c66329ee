/* SPDX-License-Identifier: MIT */
/* A backend around another one that can capture, by the rules of CUDA's stream capture: what its streams are given between
 * graphs_begin and graphs_end runs nowhere, and graphs_launch gives all of it to the backend inside, on streams and events of
 * the graph's own, ordered as it was captured and in no other way. What CUDA forbids is a complaint, and an error (DEVICE):
 * a wait inside for an event of before, a wait outside or a question for an event of inside, a stream that came in and did
 * not join, and blocking, memory and streams inside.
 * One graphs a rank; it outlives the rank's context. It is driven by one thread, as the context is. */
#ifndef GRAPHS_H
#define GRAPHS_H

#include "forward.h"

typedef struct graphs_graph graphs_graph;

typedef struct graphs {
    forward_to to;
    void *dev;           /* of the inner backend, while the context is open */
    graphs_graph *on;    /* that is being captured */
    uint64_t n_captures; /* so far */
    char complaint[256];
} graphs;

void graphs_init(graphs *g, const fsdp_backend *inner, const void *inner_config);
/* The first thing that CUDA would not have taken; NULL: nothing. */
const char *graphs_complaint(const graphs *g);

/* backend_config is the graphs. */
const fsdp_backend *graphs_backend(void);

/* cudaStreamBeginCapture, cudaStreamEndCapture (NULL: it would have failed), cudaGraphLaunch, cudaGraphDestroy: the stream is
 * the library's object. launch: FSDP_OK, or what the backend inside said. */
void graphs_begin(graphs *g, const fsdp_stream *s);
graphs_graph *graphs_end(graphs *g, const fsdp_stream *s);
fsdp_status graphs_launch(graphs_graph *graph, const fsdp_stream *s);
void graphs_destroy(graphs_graph *graph);
/* Operations and collectives in it. */
uint64_t graphs_count(const graphs_graph *graph);

#endif
