/* SPDX-License-Identifier: MIT */
/* A context on the host backend that is watched from outside: what the device accepted is counted, its memory and the
 * host's can be made scarce, a stream can be held at a gate, and a drain can be held before it begins. */
#ifndef FSDP_TESTS_REGRESS_RIG_H
#define FSDP_TESTS_REGRESS_RIG_H

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "fsdp/fsdp.h"

enum { REGRESS_STREAMS = 4, A = 0, B, C, D, KIB = 1024, MIB = 1024 * 1024, FIRST_QUEUE = 64 };

#define OK(call) assert_int_equal((call), FSDP_OK)

/* A host call that stands until it is opened. */
typedef struct gate {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool entered, open;
} gate;

/* What the device was given and took. */
typedef struct seen {
    uint64_t records, waits, operations;
} seen;

typedef struct regress_rig {
    fsdp_context *ctx;
    fsdp_stream *s[REGRESS_STREAMS];
    fsdp_allocator *a;
    fsdp_trace *trace;
    uint64_t dropped_at_start;
    seen at_start; /* of the tape */
    gate gate[REGRESS_STREAMS];
} regress_rig;

/* For CMocka. There is one rig at a time. */
int regress_setup(void **state);
int regress_teardown(void **state);
/* The same inside a test, for one that needs several. */
void regress_open(regress_rig *r);
void regress_close(regress_rig *r);

void make(regress_rig *r, uint64_t budget_bytes, uint64_t segment_bytes, fsdp_alloc_policy policy);
void *take(regress_rig *r, uint64_t bytes, int stream);
fsdp_alloc_stats stats_of(const regress_rig *r);
fsdp_counters counters_of(const regress_rig *r);
seen seen_so_far(void);

/* The stream stands from here on, in a host call that runs already, until regress_open_gate. */
void hold_stream(regress_rig *r, int stream);
/* As hold_stream, and its queue has room for `room` operations more: the next one needs host memory. */
void hold_full(regress_rig *r, int stream, int room);
void let_go(regress_rig *r, int stream);

/* From now on: n more host allocations succeed, then one fails. */
void host_memory_fails_after(int n);
/* Never mind. True: it came to that. */
bool host_memory_failed(void);
/* How much more memory the device gives; UINT64_MAX, as at first: as much as it has. */
void device_has(uint64_t bytes);
/* What goes back to the device, a few pieces, stays mapped until the rig is closed: a test that fails does not crash. */
void keep_freed_memory(void);

/* Where drains of a stream stand: before they begin, while one is held; n counts all that were begun, by whomever. */
void hold_next_drain(const regress_rig *r, int stream);
void wait_until_drains(const regress_rig *r, int stream, int n); /* n begun, or it is being destroyed */
void wait_until_left(const regress_rig *r, int stream);          /* a drain has ended, or it is being destroyed */
void release_drain(void);
int destroyed_while_drained(void);

void start_trace(regress_rig *r, uint64_t max_records);
/* The tape and the counters say what the device took, no more and no less. */
void check_tape(const regress_rig *r);
/* Stop the tape: the oracle finds no race on it. */
void check_no_race(regress_rig *r);

#endif
