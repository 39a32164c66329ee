/* SPDX-License-Identifier: MIT */
/* A device for exploration: real bytes, and an order of execution that a seed chooses.
 *
 * Whichever host thread blocks (drain, event wait, side channel, opening) while no other rank's host can go on runs
 * operations of all streams of all ranks, one step at a time, until it need block no longer. A step begins or ends one
 * operation, reaches a record or passes a wait: everything that an operation reads is read when it begins, everything that
 * it writes is written when it ends, and other streams step in between. So two operations that nothing orders really do see
 * half of each other. A host call is one step, whole: what it touches is not known. A collective has a beginning and an end
 * on each rank; its ends come after all beginnings.
 * Every choice among the steps that are possible is made by the policy, and is written down: the list of choices is the
 * schedule, and the same program on the same schedule runs the same steps. Nothing here knows the library's clocks.
 *
 * Host and device: some steps are also taken while the host goes on, after a call that enqueues and before an event query
 * answers; how many is a choice like any other. Orders among operations do not depend on it, only what a query answers and
 * what the host sees of memory that it looks at without waiting.
 *
 * Time is the number of steps so far, plus the delays that have run. A timeout of 0 looks and takes no step; any other lasts
 * until nothing can go on any more, and then fails at once: RANK_LOST for what a rank that will never come would have to
 * do, TIMEOUT for the rest. That is a complaint too, unless a rank has returned from explore_run_ranks: then its absence is
 * the test's. */
#ifndef FSDP_TESTS_EXPLORE_H
#define FSDP_TESTS_EXPLORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "fsdp/backend.h"

typedef enum explore_policy {
    EXPLORE_IN_ORDER = 0, /* each operation whole, in the order in which the host gave them, as soon as it may run */
    EXPLORE_RANDOM = 1,   /* any possible step, each as likely; now and then some while the host goes on */
    EXPLORE_PCT = 2,      /* streams and the host have random priorities; at depth − 1 random steps whoever runs falls
                               * to the last */
    EXPLORE_STARVE = 3,   /* the world's stream number `target` steps only if nothing else can */
    EXPLORE_SLOW_COMM = 4, /* a collective ends only if nothing else can step */
    EXPLORE_SLOW_COMPUTE =
        5,             /* what is no collective, on streams that are not high priority, ends only if nothing else can
                               * step */
    EXPLORE_REPLAY = 6 /* the choices in `schedule`, then the first possible one */
} explore_policy;

typedef struct explore_config {
    uint32_t world; /* ranks; 1 … 64 */
    explore_policy policy;
    uint64_t seed;
    uint32_t depth;       /* PCT: 1 is priorities alone; up to 9 */
    uint64_t steps;       /* PCT: about how many steps the run has (drops fall among them); 0: 1000 */
    uint32_t target;      /* STARVE: streams are counted over the world, from 0, in the order in which they are made */
    const char *schedule; /* REPLAY: as of explore_schedule; read by explore_open */
    bool host_memory; /* any operation may use the caller's host memory, as on the host backend; else only copies may */
    bool all_orders;  /* explore_every: also orders that differ in nothing that matters */
    /* Ranks are threads of the caller's that run freely, host calls run on threads of their own and may block, time and
     * deadlines are the machine's, and collectives take their time on a link: what a backend's conformance suites need.
     * Such a run is not a function of its schedule. */
    bool free_threads;
    uint64_t link_latency_ns, link_bytes_per_second;
} explore_config;

typedef struct explore explore;

/* NULL: no memory, a config that makes no sense, or a schedule that is none. */
explore *explore_open(const explore_config *config);
/* Every context of it is gone. NULL is nothing. */
void explore_close(explore *x);

/* The backend; its backend_config is an explore_rank. A world of one may be used from any one thread at a time. Contexts may
 * be opened, closed and opened again on one x; several of a rank may live at once if they have no communicators. Device
 * memory is aligned to 256 bytes, and 8 GiB a context; new memory, pinned too, is filled with 0xa5. */
typedef struct explore_rank {
    size_t size;
    explore *x;
    uint32_t rank;
} explore_rank;
const fsdp_backend *explore_backend(void);

/* fn(rank, arg) on a thread for each rank; only one runs at a time, from where it blocks to where it blocks again, in an
 * order that depends on nothing but the calls and the schedule: the next rank, cyclically, whose host can go on; if none
 * can, steps are taken. Returns when all have returned. Threads of a rank's own making may only abort. */
void explore_run_ranks(explore *x, void (*fn)(uint32_t rank, void *arg), void *arg);

/* The test has freed these bytes: when every operation given so far that touches them has ended, they are filled with 0xa5,
 * so that whoever still reads them reads nonsense; but for the bytes that a later operation has begun to touch by then,
 * which are its own. What host calls touch is not known. */
void explore_freed(explore *x, uint32_t rank, const void *ptr, uint64_t bytes);

/* The choices so far, as text without spaces; valid until the next call or close. A failing test prints it. */
const char *explore_schedule(explore *x);
/* Hash of all steps so far, in order: which operation of which stream began or ended. Equal runs have equal hashes. */
uint64_t explore_hash(const explore *x);
uint64_t explore_steps(const explore *x);
/* The first thing that went wrong in the device itself: a deadlock (who waits for what), bytes touched that are not
 * allocated (such an operation has no effect), memory given back while an operation uses it, a schedule of another program.
 * NULL: nothing. */
const char *explore_complaint(const explore *x);

/* Every order, for small cases: run(x, arg) once for each schedule, at most max_runs times; it opens its contexts on x, drains,
 * closes them, and returns false to stop. Returns how many schedules were run; *out_all (NULL: not wanted): that was all of
 * them. config->policy, seed and schedule are not used.
 * No step is taken while the host goes on, and records, waits and delays, which touch nothing, are taken as soon as they can
 * be: that leaves every order of beginnings and ends that the host and edges allow. Of orders that differ only in steps that
 * touch no common bytes, one is run, and now and then another; so a host that waits for one stream and then looks at what
 * another one writes sees all that it may see, but a program whose collectives do not fit may fail in fewer ways than it
 * could. With all_orders, n operations that nothing orders have (2n)! / 2^n orders: 6, 90, 2520, 113400. */
uint64_t explore_every(const explore_config *config, bool (*run)(explore *x, void *arg), void *arg, uint64_t max_runs,
                       bool *out_all);

#endif
