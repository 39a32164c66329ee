/* SPDX-License-Identifier: MIT */
/* A model checker for rooms. lib/host/host_room.c itself runs, on threads of the model's own that change hands before each
 * of its atomic steps, in the middle of each copy, and around its futexes and its lock. A depth-first search goes through all
 * schedules of at most so many preemptions; leaving a thread that sleeps or has ended costs none. In between a rank is killed
 * before any of its writes (what it has only read nobody can tell), deadlines pass early, and failures come at every step.
 * Otherwise time stands still while anybody can run.
 *
 * What is judged:
 *  - nobody sleeps without a deadline while nobody runs
 *  - a rank goes on only when all have come to the meeting, or have ended the phase
 *  - an item that is read or compared is whole, and this meeting's; between threads the memory behind it is still there
 *  - a failure has one status and one sentence for all, whole; a lost rank's names ranks, the killed one among them
 *  - nothing fails without a reason, and a mismatch is always found
 *  - without a kill nobody has to wait for the deadline to hear of a failure
 *  - n_waiting comes back to 0
 *
 * What it cannot see: errors that need more preemptions, ranks or meetings than a scenario has; a weaker order of memory (the
 * room's atomics are all sequentially consistent, so that their interleavings are all that a machine can show; its plain
 * accesses are ThreadSanitizer's business); host_futex.c, in whose place stands the model; counters that wrap. */
#ifndef ROOM_MODEL_H
#define ROOM_MODEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { ROOM_WORLD = 3, ROOM_THREADS = 6, ROOM_MEETINGS = 2 };

/* What a thread does. Also sets of meetings. */
typedef enum room_does { FIRST = 1, SECOND = 2, BOTH = 3, FAILS = 4 } room_does;

typedef struct room_script {
    uint32_t rank;
    room_does does; /* goes to these meetings; or fails the room */
} room_script;

typedef struct room_scenario {
    const char *name;
    room_script thread[ROOM_THREADS]; /* up to the first that does nothing */
    uint32_t world;
    bool processes;       /* ranks are; otherwise threads */
    bool may_fail;        /* even if nobody is killed */
    bool early_deadlines; /* they may pass while others run; each costs a preemption */
    int two_phases;       /* these meetings have */
    int differs;          /* in these meetings rank `odd` brings another item */
    uint32_t odd;
    uint32_t quits;  /* bit r: rank r leaves for good when its threads have ended */
    uint32_t victim; /* a rank but 0 that may be killed; 0: none */
    uint32_t preemptions;
} room_scenario;

typedef struct room_count {
    uint64_t n_schedules, n_steps;
} room_count;

/* False: text says what was found, and by which schedule. Adds to *count. Not reentrant. */
bool room_model_search(const room_scenario *scenario, room_count *count, char *text, size_t bytes);

#endif
