/* SPDX-License-Identifier: MIT */
/* A tape written by hand, and what is read and drawn of it. */
#ifndef FSDP_TESTS_TIMELINE_RIG_H
#define FSDP_TESTS_TIMELINE_RIG_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "fsdp/trace.h"
#include "timeline.h"
#include "worked_step.h"

enum { GATHER = FSDP_LANE_GATHER, REDUCE = FSDP_LANE_REDUCE, COMPUTE = WORKED_COMPUTE, PIXELS = 1000 };

typedef struct bench {
    worked_step w;
    fsdp__timeline timeline;
    char path[64];
    char *svg; /* what was drawn */
    size_t svg_bytes;
} bench;

int set_up(void **state);
int tear_down(void **state);

/* A record and the times of a machine that ran it. */
void put(bench *b, fsdp_trace_record record, uint64_t start_ns, uint64_t end_ns);
/* Enqueued when it starts. */
void put_operation(bench *b, fsdp_operation operation, int stream, const char *label, uint64_t start_ns,
                   uint64_t end_ns);
void put_event(bench *b, int stream, uint64_t event, uint64_t at_ns);
void put_wait(bench *b, int stream, int other, uint64_t event, uint64_t start_ns, uint64_t end_ns);
/* Opens the window of that unit, or closes it. */
void put_use(bench *b, const char *label, bool write);

const fsdp__timeline *read_tape(bench *b);
/* The file's text, until the next. */
const char *draw(bench *b, const char *title);
size_t n_times(const char *text, const char *what);

#endif
