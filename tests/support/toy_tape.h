/* SPDX-License-Identifier: MIT */
/* What the host decided in a toy run, for comparing runs: the tape, with offsets into the model's ranges in place of
 * addresses, and events numbered in the order in which they appear. Times are left out. */
#ifndef TOY_TAPE_H
#define TOY_TAPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "fsdp/trace.h"

struct toy;

typedef enum toy_range {
    TOY_ELSEWHERE, /* staging of values: not by the model's plan */
    TOY_GATHER,
    TOY_GRAD,
    TOY_MASTER,
    TOY_GRADIENT,
    TOY_MOMENT,
    TOY_SCRATCH,
    TOY_REPORTS,
    TOY_CALLER, /* what the toy's kernels compute with */
    TOY_N_RANGES
} toy_range;

typedef struct toy_record {
    fsdp_record_kind kind;
    fsdp_operation operation;
    fsdp_mark mark;
    fsdp_reason reason;
    int32_t stream, other;
    uint32_t event, n_accesses;
    uint64_t bytes;
    char label[24];
    struct {
        toy_range range;
        bool write;
        uint64_t offset, bytes;
    } access[FSDP_TRACE_MAX_ACCESSES];
} toy_record;

typedef struct toy_tape {
    uint64_t n;
    toy_record record[];
} toy_tape;

/* A stopped trace; NULL: no memory. */
toy_tape *toy_tape_take(const struct toy *t);
void toy_tape_free(toy_tape *tape);
/* The same decisions? If not, text says where they part. */
bool toy_tape_same(const toy_tape *a, const toy_tape *b, char *text, size_t text_bytes);
/* One record in words. */
void toy_tape_say(const toy_record *record, char *text, size_t text_bytes);

#endif
