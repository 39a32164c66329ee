/* SPDX-License-Identifier: MIT */
#include "toy_tape.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sharding/model.h"
#include "toy.h"

enum { EVENTS = 4096 }; /* a power of two, several times as many as a run has */

typedef struct range {
    const char *begin;
    uint64_t bytes;
} range;

static range find_range(const toy *t, toy_range which, uint32_t part)
{
    const fsdp_model *m = t->model;
    switch (which) {
    case TOY_GATHER: return (range){fsdp__allocator_base(m->gather_pool), m->plan.memory.gather};
    case TOY_GRAD: return (range){fsdp__allocator_base(m->grad_pool), m->plan.memory.grad};
    case TOY_MASTER: return (range){m->master, m->plan.memory.master};
    case TOY_GRADIENT: return (range){m->gradients, m->plan.memory.gradients};
    case TOY_MOMENT: return (range){m->moments, m->plan.memory.moments};
    case TOY_SCRATCH: return (range){m->scratch, m->plan.memory.scratch};
    case TOY_REPORTS: return (range){(const char *)m->reports, m->plan.memory.pinned};
    case TOY_CALLER:
        if (part < 2) return (range){t->scratch[part], TOY_SCRATCH_BYTES};
        return (range){(const char *)t->maths, 2 * sizeof *t->maths};
    default: return (range){NULL, 0};
    }
}

static toy_range place(const toy *t, uint64_t address, uint64_t *offset)
{
    for (toy_range which = TOY_GATHER; which < TOY_N_RANGES; which++) {
        uint64_t before = 0;
        for (uint32_t part = 0; part < (which == TOY_CALLER ? 3 : 1); part++) {
            range r = find_range(t, which, part);
            uint64_t begin = (uint64_t)(uintptr_t)r.begin;
            *offset = before + (address - begin);
            if (r.begin != NULL && address >= begin && address - begin < r.bytes) return which;
            before += r.bytes;
        }
    }
    *offset = 0;
    return TOY_ELSEWHERE;
}

typedef struct event_names {
    uint64_t event[EVENTS];
    uint32_t name[EVENTS], n;
} event_names;

static uint32_t name_event(event_names *names, uint64_t event)
{
    uint32_t at = (uint32_t)(event * 0x9e3779b97f4a7c15ull >> 40) % EVENTS;
    while (names->name[at] != 0 && names->event[at] != event) at = (at + 1) % EVENTS;
    if (names->name[at] == 0 && names->n < EVENTS - 1) {
        names->event[at] = event;
        names->name[at] = ++names->n;
    }
    return names->name[at];
}

static void take(const toy *t, const fsdp_trace_record *from, event_names *names, toy_record *r)
{
    memset(r, 0, sizeof *r); /* records are compared with their padding */
    r->kind = from->kind;
    r->stream = from->stream;
    r->bytes = from->bytes;
    snprintf(r->label, sizeof r->label, "%s", from->label);
    if (from->kind == FSDP_RECORD_OPERATION) r->operation = from->operation;
    if (from->kind == FSDP_RECORD_EVENT || from->kind == FSDP_RECORD_WAIT || from->kind == FSDP_RECORD_HOST) {
        r->mark = from->mark;
        r->event = name_event(names, from->event);
    }
    if (from->kind == FSDP_RECORD_WAIT) r->reason = from->reason, r->other = from->other;
    r->n_accesses = from->n_accesses;
    for (uint32_t i = 0; i < from->n_accesses; i++) {
        r->access[i].range = place(t, from->access[i].begin, &r->access[i].offset);
        r->access[i].bytes = from->access[i].bytes;
        r->access[i].write = from->access[i].write;
    }
}

toy_tape *toy_tape_take(const toy *t)
{
    uint64_t n = fsdp_trace_count(t->trace);
    toy_tape *tape = malloc(sizeof *tape + n * sizeof *tape->record);
    event_names *names = calloc(1, sizeof *names);
    if (tape != NULL && names != NULL) {
        tape->n = n;
        for (uint64_t i = 0; i < n; i++) take(t, fsdp_trace_at(t->trace, i), names, &tape->record[i]);
    } else {
        free(tape);
        tape = NULL;
    }
    free(names);
    return tape;
}

void toy_tape_free(toy_tape *tape) { free(tape); }

void toy_tape_say(const toy_record *r, char *text, size_t text_bytes)
{
    static const char *const names[] = {"elsewhere", "gather",  "grad",    "master", "gradient",
                                        "moment",    "scratch", "reports", "caller"};
    int n = 0;
    switch (r->kind) {
    case FSDP_RECORD_OPERATION:
        n = snprintf(text, text_bytes, "stream %d: %s %s", r->stream, fsdp_operation_name(r->operation), r->label);
        break;
    case FSDP_RECORD_WAIT:
        n = snprintf(text, text_bytes, "stream %d: waits for event %u of %d, %s %s, to %s", r->stream, r->event,
                     r->other, r->label, fsdp_mark_name(r->mark), fsdp_reason_name(r->reason));
        break;
    case FSDP_RECORD_EVENT:
        n = snprintf(text, text_bytes, "stream %d: event %u, %s %s", r->stream, r->event, r->label,
                     fsdp_mark_name(r->mark));
        break;
    case FSDP_RECORD_HOST: n = snprintf(text, text_bytes, "the host has waited for stream %d", r->stream); break;
    case FSDP_RECORD_USE: n = snprintf(text, text_bytes, "stream %d: use of %s", r->stream, r->label); break;
    }
    for (uint32_t i = 0; i < r->n_accesses && n >= 0 && (size_t)n < text_bytes; i++)
        n += snprintf(text + n, text_bytes - (size_t)n, ", %s %s %llu+%llu", r->access[i].write ? "writes" : "reads",
                      names[r->access[i].range], (unsigned long long)r->access[i].offset,
                      (unsigned long long)r->access[i].bytes);
}

bool toy_tape_same(const toy_tape *a, const toy_tape *b, char *text, size_t text_bytes)
{
    uint64_t n = a->n < b->n ? a->n : b->n, i = 0;
    while (i < n && memcmp(&a->record[i], &b->record[i], sizeof a->record[i]) == 0) i++;
    text[0] = '\0';
    if (i == a->n && i == b->n) return true;
    char one[400] = "nothing", other[400] = "nothing";
    if (i < a->n) toy_tape_say(&a->record[i], one, sizeof one);
    if (i < b->n) toy_tape_say(&b->record[i], other, sizeof other);
    snprintf(text, text_bytes, "record %llu is [%s], and was [%s]", (unsigned long long)i, other, one);
    return false;
}
