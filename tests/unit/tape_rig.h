/* SPDX-License-Identifier: MIT */
/* Tapes that tests write by hand, and the judge's word on them. */
#ifndef FSDP_TESTS_TAPE_RIG_H
#define FSDP_TESTS_TAPE_RIG_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "context.h"
#include "fsdp/trace.h"
#include "hb_oracle.h"
#include "trace.h"
#include "worked_step.h"

enum { A = WORKED_COMPUTE, B = FSDP_LANE_GATHER, C = FSDP_LANE_REDUCE, READ = 0, WRITE = 1 };

/* No stream runs anything here. */
__attribute__((weak)) fsdp_status fsdp__context_drain(fsdp_context *ctx, uint64_t timeout_ns)
{
    (void)ctx, (void)timeout_ns;
    return FSDP_OK;
}

typedef struct tape {
    worked_step w; /* its context; the step itself is put where a test wants it */
    fsdp_trace *trace;
    char text[1024];
} tape;

static inline void open_tape(tape *t, uint64_t max_records)
{
    worked_open(&t->w, max_records);
    t->trace = t->w.trace;
}

static inline void close_tape(tape *t) { worked_close(&t->w); }

static inline int set_up(void **state)
{
    alarm(120);
    tape *t = malloc(sizeof *t);
    assert_non_null(t);
    open_tape(t, 64);
    *state = t;
    return 0;
}

static inline int tear_down(void **state)
{
    close_tape(*state);
    free(*state);
    return 0;
}

static inline void touch(tape *t, int32_t stream, const char *label, int write, uint64_t begin, uint64_t bytes)
{
    fsdp_trace_record record = {.kind = FSDP_RECORD_OPERATION,
                                .operation = FSDP_OPERATION_CAST,
                                .stream = stream,
                                .label = label,
                                .n_accesses = 1,
                                .access = {{begin, bytes, write == WRITE}}};
    fsdp__trace_add(t->trace, &record);
}

static inline void use(tape *t, int32_t stream, const char *label, int write, uint64_t begin, uint64_t bytes)
{
    fsdp_trace_record record = {.kind = FSDP_RECORD_USE,
                                .stream = stream,
                                .label = label,
                                .n_accesses = 1,
                                .access = {{begin, bytes, write == WRITE}}};
    fsdp__trace_add(t->trace, &record);
}

static inline void record_event(tape *t, int32_t stream, uint64_t event)
{
    fsdp_trace_record record = {.kind = FSDP_RECORD_EVENT, .stream = stream, .event = event, .label = ""};
    fsdp__trace_add(t->trace, &record);
}

static inline void wait_event(tape *t, int32_t stream, uint64_t event)
{
    fsdp_trace_record record = {.kind = FSDP_RECORD_WAIT, .stream = stream, .event = event, .label = ""};
    fsdp__trace_add(t->trace, &record);
}

static inline size_t check(tape *t) { return hb_check(t->trace, t->text, sizeof t->text); }

#endif
