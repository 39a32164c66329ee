/* SPDX-License-Identifier: MIT */
/* A model of blocks h0, h1, … and perhaps a held unit H, registered first, on the sim backend; and its training step with
 * delays as compute. Tests set what they need between journey_init and journey_open; every call must succeed. */
#ifndef JOURNEY_H
#define JOURNEY_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "fsdp/optim.h"
#include "fsdp/sim.h"
#include "fsdp/trace.h"

enum { JOURNEY_BLOCKS = 64 };

typedef struct journey_costs {
    uint64_t forward_ns, backward_ns;
    uint64_t update_ns; /* of the unit's update, when the optimizer is the test's own */
} journey_costs;

typedef struct journey journey;
struct journey {
    fsdp_sim_config sim;
    fsdp_model_config model_config;
    fsdp_unit_config unit_config;
    uint32_t n_blocks, n_micro;
    bool held;
    bool own_optimizer;                   /* delays in an update bracket; false: AdamW with clipping */
    uint64_t shard_elems[JOURNEY_BLOCKS]; /* of each block's one parameter: a multiple of 128 */
    uint64_t held_shard_elems;
    journey_costs block[JOURNEY_BLOCKS];
    journey_costs embed, head;       /* of H, next to h0 and next to the last block; update_ns: embed's */
    void (*before_seal)(journey *j); /* for what else is to be registered */
    /* Called after each host call, named as in "forward_begin(h0)". */
    void (*seen)(journey *j, const char *call);
    void *arg;

    fsdp_context *ctx;
    fsdp_stream *s;
    fsdp_model *model;
    fsdp_unit *held_unit, *unit[JOURNEY_BLOCKS];
    fsdp_adamw *opt;
    fsdp_trace *trace;
};

void journey_ok(fsdp_status status);
#define OK(call) journey_ok(call)

/* n equal blocks of 1024 shard elements, no held unit, two ranks, depth 1, one micro-step; nothing takes time. */
void journey_init(journey *j, uint32_t n_blocks);
/* Context, stream, model, seal. */
void journey_open(journey *j);
void journey_close(journey *j);

void journey_micro_step(journey *j, uint32_t index);
void journey_update(journey *j);
/* All micro-steps, then the update. */
void journey_step(journey *j);

/* One tape at a time: start forgets the last one. */
void journey_tape_start(journey *j);
void journey_tape_stop(journey *j);
/* Counts of what is on the tape. */
uint64_t journey_n_operations(const journey *j, fsdp_operation operation);
uint64_t journey_n_records(const journey *j, const fsdp_stream *stream, fsdp_record_kind kind);

#endif
