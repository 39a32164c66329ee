/* SPDX-License-Identifier: MIT */
/* Ranks of a test as processes: forked from a test that has no other thread at that moment, each running one function to
 * its end; what they share is memory mapped before. A process that fails, hangs, or is killed is named; none is left
 * behind, whatever happens.
 *
 * In a child, CMocka's asserts end the process (they belong to the parent); processes_complain brings a sentence home. */
#ifndef FSDP_TESTS_PROCESSES_H
#define FSDP_TESTS_PROCESSES_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "fsdp/launch.h"
#include "monotonic.h"

enum { PROCESSES_MAX = 64, PROCESSES_SAID_BYTES = 1024 };

/* Zeros that parent and children see; from before the fork until processes_unshare. Ends the program if there are none. */
void *processes_shared(size_t bytes);
void processes_unshare(void *shared, size_t bytes); /* NULL is nothing */

/* ---- Between ranks, beside what is tested; in shared memory, for threads as well ---- */

/* A barrier that a killed or failed rank does not hold for ever. */
typedef struct meeting {
    _Atomic uint32_t round, came;
    uint32_t n;
} meeting;

void meeting_init(meeting *m, uint32_t n);
/* False: it is broken, or not all came in time, which breaks it. */
bool meeting_wait(meeting *m, uint64_t timeout_ns);
void meeting_break(meeting *m);

/* A number that only grows, and that others wait for. */
typedef struct mark {
    _Atomic uint32_t value;
} mark;

void mark_set(mark *m, uint32_t value);
void mark_add(mark *m);                                          /* one more */
bool mark_wait(mark *m, uint32_t at_least, uint64_t timeout_ns); /* false: not in time */

/* ---- Processes ---- */

typedef enum process_end {
    PROCESS_RUNNING = 0,
    PROCESS_DONE = 1,   /* its function returned true */
    PROCESS_FAILED = 2, /* its function returned false, or it called exit */
    PROCESS_KILLED = 3, /* by a signal */
    PROCESS_LATE = 4    /* it did not end in time, and was killed for it */
} process_end;

typedef bool (*process_fn)(uint32_t rank, void *arg);

typedef struct processes {
    uint32_t world;
    pid_t pid[PROCESSES_MAX];
    int gone
        [PROCESSES_MAX]; /* a pipe that ends when the process and all that it forked are gone; -1: read to its end */
    process_end end[PROCESSES_MAX];
    int signal[PROCESSES_MAX];   /* KILLED: by which */
    int expected[PROCESSES_MAX]; /* the signal that the test means to kill it with; 0: none */
    struct process_said *said;   /* shared: one a rank */
} processes;

/* Fork `world` processes. Ends the program if that fails, or if this process has other threads. */
void processes_start(processes *p, uint32_t world, process_fn fn, void *arg);
void processes_signal(processes *p, uint32_t rank, int signal);
/* Wait for one rank's end; false: it is running still. */
bool processes_wait_one(processes *p, uint32_t rank, uint64_t timeout_ns);
/* Wait until a rank has stopped by a signal; false: not in time. */
bool processes_wait_stopped(processes *p, uint32_t rank, uint64_t timeout_ns);
/* Wait for all; who has not ended in time is killed. Once a rank has failed, the others have a few seconds. */
void processes_wait(processes *p, uint64_t timeout_ns);
/* The first rank that did not do as expected, in words; NULL: all did. After processes_wait. */
const char *processes_failure(const processes *p);
/* Kill and reap whoever is left, and give back what start took. */
void processes_finish(processes *p);
/* All of it. The sentence of the first failure stands until the next run; NULL: none. */
const char *processes_run(uint32_t world, uint64_t timeout_ns, process_fn fn, void *arg);

/* In a child: print, and leave it for processes_failure; the first stays. Elsewhere it only prints. */
void processes_complain(const char *file, int line, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* ---- Where they meet ---- */

typedef enum process_way {
    PROCESSES_BY_NAME, /* "@fsdp-test-…": a Unix socket without a file */
    PROCESSES_BY_TCP   /* 127.0.0.1 and a port that was free a moment ago */
} process_way;

/* A job of its own: an address that no other job of this machine has, and a nonce. Rank and world are to be filled in. */
fsdp_launch processes_launch(process_way way);

/* Is somebody listening there? Connects, and hangs up at once. */
bool processes_listens(const fsdp_launch *launch);

/* ---- A side channel of the test's own, over shared memory ---- */

typedef struct shared_side shared_side;

shared_side *shared_side_create(uint32_t world);
void shared_side_destroy(shared_side *side); /* NULL is nothing */
/* Rank's end of it; lives as long as side. */
const fsdp_side_channel *shared_side_end(shared_side *side, uint32_t rank);

/* ---- What is left ---- */

typedef struct footprint {
    uint32_t n_descriptors, n_threads, n_children;
    uint32_t n_shm; /* files in /dev/shm that no process has mapped, and so none will remove */
    uint64_t resident_bytes, mapped_bytes;
} footprint;

/* Of this process. */
footprint footprint_take(void);

#endif
