/* SPDX-License-Identifier: MIT */
/* Trainings under the exploration device, and who judges them.
 *
 * A case is a toy training (or a script of its own) that must do the same under every schedule. It runs once in order, and
 * that run is compared with the plain loop and the host backend where the case is a training; then under other schedules,
 * each of which a seed names. Every run has seven judges (step_judge); a failure names them, the case, the seed and the
 * schedule, and the command that runs just that. */
#ifndef STEP_RIG_H
#define STEP_RIG_H

#include "toy.h"

enum { STEP_LOG = 24, STEP_RANKS = 3, STEP_KEEP = 64 };

typedef enum step_judge {
    STEP_CALL,    /* a call failed that must not, or a script's check; deadlocks too */
    STEP_ORDER,   /* the happens-before oracle */
    STEP_DEVICE,  /* the exploration device complains */
    STEP_NUMBERS, /* losses, parameters */
    STEP_TAPE,    /* what was enqueued, with its waits and places, in host order */
    STEP_MEMORY,  /* the peak */
    STEP_TRACES,  /* gather_trace and grad_trace: by step, rank and schedule */
    STEP_JUDGES
} step_judge;

/* What the steps of one rank said. */
typedef struct step_log {
    uint32_t n;
    uint64_t gather[STEP_LOG], grad[STEP_LOG];
    uint64_t n_refused, n_fragmented, n_evicted, n_aborted, n_hooks; /* off plan */
    uint64_t n_wrong; /* elements that a kernel found otherwise than it should */
    char wrong[160];
    void *keep[STEP_KEEP]; /* freed when the world is gone */
    uint32_t n_keep;
} step_log;

typedef struct step_case {
    char name[96];
    toy_config config;
    toy_script script; /* NULL: step_train */
    uint64_t number;   /* of a random program */
    bool training;     /* its numbers are the plain loop's and the host backend's */
    bool steady;       /* its steps are equal from the second on */
    uint64_t gathers;  /* what it must count; 0: anything */
} step_case;

/* A script's arg. */
typedef struct step_run {
    const step_case *c;
    step_log log[STEP_RANKS];
} step_run;

typedef struct step_options {
    const char *program, *name, *schedule;
    bool quick, is_long, has_seed, list;
    uint64_t seed;
} step_options;

typedef struct step_total {
    uint64_t n_cases, n_runs, n_steps, n_records;
    uint64_t n_refused, n_fragmented, n_evicted, n_aborted, n_hooks;
} step_total;

/* Every policy has seeds of its own: seed % 8 is the policy, the rest is its seed, or the stream that it starves. */
enum { STEP_SEED_KINDS = 8 };
explore_config step_order(uint64_t seed, uint32_t n_streams, uint64_t n_steps);

/* toy_train, with a log of each step's traces. */
fsdp_status step_train(toy *t);
fsdp_status step_log_traces(toy *t);
/* malloc, for as long as operations may still run. */
void *step_keep(toy *t, size_t bytes);

/* The case in order, then under the schedules of n seeds from first on. False: text says what, and how to repeat it. */
bool step_try(const step_case *c, uint64_t first, uint32_t n, const step_options *options, step_total *total,
              char *text, size_t text_bytes);

/* The seed's run, once more, and its schedule replayed: all three the same steps? */
bool step_replays(const step_case *c, uint64_t seed);
/* What rank 0 logged in the last case, in order. */
const step_log *step_last(void);
bool step_options_read(step_options *options, int argc, char **argv);

/* ---- Cases: step_cases.c, step_off_plan.c, step_named.c ---- */

/* Training number i of the matrix program × accumulation × depth × world × poison; false: there are no more. */
bool step_training(uint32_t i, step_case *out);
/* A program of hooks that a number determines. */
void step_off_plan(uint64_t number, step_case *out);
/* Case number i of those made by hand. */
bool step_named(uint32_t i, step_case *out);

#endif
