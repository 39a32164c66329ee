/* SPDX-License-Identifier: MIT */
/* Ranks as processes, one of which is made to fail: the model and the steps are those of tests/journey/errors.h, the side
 * channel and the communicators the real ones. Every process must end by itself, long before the library's timeouts unless
 * they are what is tested, and nothing of it may be left. */
#ifndef FSDP_TESTS_FAULT_RIG_H
#define FSDP_TESTS_FAULT_RIG_H

#include "tests/journey/errors.h"

enum { WORLD = 4 };

/* What the processes of one run share. rank[r].arg points to it. */
typedef struct crew {
    meeting meet;     /* of all ranks: before the fault */
    mark victim_mark; /* how far the victim has come */
    mark go;          /* set by the parent */
    mark n_kept;      /* ranks that have left their status and sentence */
    uint32_t n_processes, victim;
    int phase; /* of the test's */
    rank_body body;
    const void *arg;
    uint64_t told_ns[MAX_RANKS];       /* when a rank was told */
    char after[MAX_RANKS][SAID_BYTES]; /* what fsdp_context_check says once all is known */
    rank rank[MAX_RANKS];
} crew;

static inline crew *crew_of(const rank *r) { return r->arg; }
static inline uint32_t place_of(const rank *r) { return (uint32_t)(r - crew_of(r)->rank); } /* among the processes */
static inline bool is_victim(const rank *r) { return place_of(r) == crew_of(r)->victim; }

/* Zeros but for ranks with defaults and timeouts of 100 s, which no test waits for: the alarm is earlier. */
crew *crew_create(uint32_t world, process_way way);
void crew_destroy(crew *c);

/* In the parent, while ranks run. */
typedef void (*crew_watch)(crew *c, processes *p);
/* Run body on all ranks. signal: what the victim is to die of; 0: it is to come to its end as the others. */
void crew_run(crew *c, rank_body body, int signal, crew_watch watch);

/* On a rank: keep status and sentence, and count that. */
void crew_keep(rank *r, fsdp_status status);
/* A step, until it is done. */
fsdp_status step_to_end(rank *r);
/* After a failure every call fails so, and says the same; and all can be closed. */
void fail_on_and_close(rank *r, fsdp_status status);

/* On the main thread, of every rank but the victim: this status, and the fragment in its sentence. */
void assert_others_kept(const crew *c, fsdp_status status, const char *fragment);

/* … and all of them are told the same. */
void assert_others_agree(const crew *c);

/* The groups: how many tests failed. */
int run_kill_faults(void);
int run_order_faults(void);
int run_memory_faults(void);
int run_job_faults(void);

int fault_setup(void **state);
int fault_teardown(void **state); /* nothing is left: no process, no file, no descriptor */
#define FAULT(name) cmocka_unit_test_setup_teardown(name, fault_setup, fault_teardown)

#endif
