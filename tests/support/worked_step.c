/* SPDX-License-Identifier: MIT */
/* The worked step. An event has one number for each (unit, mark): recording it again is what its next turn does. */
#include "worked_step.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hostmem.h"
#include "trace.h"

enum { GATHER = FSDP_LANE_GATHER, REDUCE = FSDP_LANE_REDUCE, COMPUTE = WORKED_COMPUTE, H = 3, N_UNITS = 4, NONE = -1 };

static const char *const unit_name[N_UNITS] = {"h0", "h1", "h2", "H"};

/* Addresses: buffers A and B, H's own, two gradient buffers and H's, then a shard, its gradient and moments a unit. */
enum {
    FULL = 1 << 20,
    SHARD = FULL / 4,
    BASE = 1 << 28,
    STEP_RECORD = BASE + (64 << 20),
    PARTIAL = STEP_RECORD + 4096
};

static uint64_t full_of(int unit) { return BASE + (uint64_t)(unit == H ? 2 : unit % 2) * FULL; }
static uint64_t grad_of(int unit) { return BASE + (uint64_t)(unit == H ? 5 : unit == 1 ? 4 : 3) * FULL; }
static uint64_t shard_of(int unit) { return BASE + (uint64_t)(8 + unit) * FULL; }
static uint64_t grad_shard_of(int unit) { return shard_of(unit) + SHARD; }
static uint64_t moments_of(int unit) { return shard_of(unit) + 2 * SHARD; }
static uint64_t temporary(void) { return BASE + 6ull * FULL; }

static uint64_t event_of(int unit, fsdp_mark mark)
{
    return (uint64_t)mark * N_UNITS + (uint64_t)(unit == NONE ? 0 : unit);
}
static const char *label_of(int unit) { return unit == NONE ? "" : unit_name[unit]; }

void worked_open(worked_step *w, uint64_t max_records)
{
    static const fsdp_host_allocator libc = {NULL, NULL, NULL, NULL};
    static const char *const name[4] = {"gather", "reduce", "copy", "compute"};
    memset(w, 0, sizeof *w);
    w->leave_out = WORKED_NO_WAIT;
    w->compute_us = 450;
    if (fsdp__host_allocator_resolve(&libc, &w->ctx.host) != FSDP_OK) abort();
    pthread_mutex_init(&w->ctx.lock, NULL);
    for (int slot = 0; slot < 4; slot++) {
        w->stream[slot].ctx = &w->ctx;
        w->stream[slot].slot = slot;
        snprintf(w->stream[slot].name, sizeof w->stream[slot].name, "%s", name[slot]);
        w->ctx.clocks.stream[slot] = &w->stream[slot];
    }
    if (fsdp_trace_start(&w->ctx, max_records, &w->trace) != FSDP_OK) abort();
}

fsdp_status worked_stop(worked_step *w)
{
    memset(w->ctx.clocks.stream, 0, sizeof w->ctx.clocks.stream);
    return fsdp_trace_stop_host(w->trace);
}

void worked_close(worked_step *w)
{
    memset(w->ctx.clocks.stream, 0, sizeof w->ctx.clocks.stream);
    fsdp_trace_destroy(w->trace);
    pthread_mutex_destroy(&w->ctx.lock);
}

/* ---- Records, with the times of a machine that runs them ---- */

static void put(worked_step *w, fsdp_trace_record *record, uint64_t start_ns, uint64_t end_ns)
{
    fsdp_span *span = fsdp__trace_add(w->trace, record);
    if (span != NULL && record->kind != FSDP_RECORD_USE) *span = (fsdp_span){1000000 + start_ns, 1000000 + end_ns};
}

static void touch(fsdp_trace_record *record, uint64_t begin, uint64_t bytes, bool write)
{
    record->access[record->n_accesses++] = (fsdp_trace_access){begin, bytes, write};
}

static bool on_wire(fsdp_operation operation) { return operation <= FSDP_OPERATION_BARRIER; }

static void run(worked_step *w, fsdp_trace_record *record, uint64_t percent)
{
    uint64_t *now = &w->now_ns[record->stream], start = *now;
    if (on_wire(record->operation) && w->wire_ns > start) start = w->wire_ns;
    *now = start + w->compute_us * percent * 10;
    if (on_wire(record->operation)) w->wire_ns = *now;
    put(w, record, start, *now);
}

static fsdp_trace_record operation(int stream, fsdp_operation kind, int unit, uint64_t bytes)
{
    return (fsdp_trace_record){
        .operation = kind, .stream = stream, .other = -1, .label = label_of(unit), .bytes = bytes};
}

static void record_event(worked_step *w, int stream, int unit, fsdp_mark mark)
{
    uint64_t event = event_of(unit, mark);
    fsdp_trace_record record = {.kind = FSDP_RECORD_EVENT,
                                .mark = mark,
                                .stream = stream,
                                .other = -1,
                                .event = 100 + event,
                                .label = label_of(unit)};
    w->event_ns[event] = w->now_ns[stream];
    w->recorded[event] = true;
    put(w, &record, w->now_ns[stream], w->now_ns[stream]);
}

static void wait_event(worked_step *w, int stream, int other, int unit, fsdp_mark mark, fsdp_reason reason)
{
    uint64_t event = event_of(unit, mark), start = w->now_ns[stream];
    fsdp_trace_record record = {.kind = FSDP_RECORD_WAIT,
                                .mark = mark,
                                .reason = reason,
                                .stream = stream,
                                .other = other,
                                .event = 100 + event,
                                .label = label_of(unit)};
    if (w->n_waits++ == w->leave_out) return;
    if (!w->recorded[event]) w->n_blind_waits++;
    if (w->event_ns[event] > start) w->now_ns[stream] = w->event_ns[event];
    put(w, &record, start, w->now_ns[stream]);
}

/* ---- The parts of a step ---- */

static void use(worked_step *w, int unit, bool backward)
{
    fsdp_trace_record record = {.kind = FSDP_RECORD_USE, .stream = COMPUTE, .other = -1, .label = label_of(unit)};
    touch(&record, full_of(unit), FULL, false);
    if (backward) touch(&record, grad_of(unit), FULL, true);
    put(w, &record, 0, 0);
}

static void compute(worked_step *w, uint64_t percent)
{
    fsdp_trace_record record = operation(COMPUTE, FSDP_OPERATION_HOST_CALL, NONE, 0);
    run(w, &record, percent);
}

static void gather(worked_step *w, int unit)
{
    uint64_t slot = full_of(unit) + SHARD; /* rank 1 of 4 */
    fsdp_trace_record cast = operation(GATHER, FSDP_OPERATION_CAST, unit, 2 * SHARD);
    touch(&cast, shard_of(unit), SHARD, false);
    touch(&cast, slot, SHARD, true);
    run(w, &cast, 4);
    fsdp_trace_record all_gather = operation(GATHER, FSDP_OPERATION_ALL_GATHER, unit, 3 * SHARD);
    touch(&all_gather, slot, SHARD, false);
    touch(&all_gather, full_of(unit), FULL, true);
    run(w, &all_gather, unit == H ? 95 : 80);
    record_event(w, GATHER, unit, FSDP_MARK_READY);
}

static void zero(worked_step *w, int unit)
{
    fsdp_trace_record fill = operation(COMPUTE, FSDP_OPERATION_FILL, unit, FULL);
    touch(&fill, grad_of(unit), FULL, true);
    run(w, &fill, 3);
}

/* Onto the shard's gradient; in the second micro-step by way of the temporary. */
static void reduce(worked_step *w, int unit, bool second)
{
    record_event(w, COMPUTE, unit, FSDP_MARK_GRADS);
    wait_event(w, REDUCE, COMPUTE, unit, FSDP_MARK_GRADS, FSDP_REASON_READ);
    uint64_t into = second ? temporary() : grad_shard_of(unit);
    fsdp_trace_record scatter = operation(REDUCE, FSDP_OPERATION_REDUCE_SCATTER, unit, 3 * SHARD);
    touch(&scatter, grad_of(unit), FULL, false);
    touch(&scatter, into, SHARD, true);
    run(w, &scatter, unit == H ? 100 : 85);
    if (second) {
        fsdp_trace_record add = operation(REDUCE, FSDP_OPERATION_ADD, unit, 3 * SHARD);
        touch(&add, into, SHARD, false);
        touch(&add, grad_shard_of(unit), SHARD, true);
        run(w, &add, 5);
    }
    record_event(w, REDUCE, unit, FSDP_MARK_REDUCED);
}

static void micro_step(worked_step *w, bool second)
{
    if (!second) wait_event(w, COMPUTE, GATHER, H, FSDP_MARK_READY, FSDP_REASON_READ);
    use(w, H, false);
    compute(w, 20);
    if (!second) {
        wait_event(w, COMPUTE, GATHER, 0, FSDP_MARK_READY, FSDP_REASON_READ);
        wait_event(w, GATHER, COMPUTE, 1, FSDP_MARK_UPDATED, FSDP_REASON_READ);
        gather(w, 1);
    }
    use(w, 0, false), compute(w, 100), use(w, 0, false);
    record_event(w, COMPUTE, 0, FSDP_MARK_USED);
    if (!second) wait_event(w, COMPUTE, GATHER, 1, FSDP_MARK_READY, FSDP_REASON_READ);
    wait_event(w, GATHER, COMPUTE, 0, FSDP_MARK_USED, FSDP_REASON_REUSE);
    gather(w, 2);
    use(w, 1, false), compute(w, 100), use(w, 1, false);
    wait_event(w, COMPUTE, GATHER, 2, FSDP_MARK_READY, FSDP_REASON_READ);
    use(w, 2, false), compute(w, 100), use(w, 2, false);
    compute(w, 60);
    use(w, H, false);

    if (second) wait_event(w, COMPUTE, REDUCE, H, FSDP_MARK_REDUCED, FSDP_REASON_REUSE);
    zero(w, H);
    use(w, H, true), compute(w, 110);
    zero(w, 2);
    use(w, 2, true), compute(w, 200), use(w, 2, true);
    reduce(w, 2, second);
    wait_event(w, GATHER, COMPUTE, 2, FSDP_MARK_GRADS, FSDP_REASON_REUSE);
    gather(w, 0);
    zero(w, 1);
    use(w, 1, true), compute(w, 200), use(w, 1, true);
    reduce(w, 1, second);
    wait_event(w, COMPUTE, GATHER, 0, FSDP_MARK_READY, FSDP_REASON_READ);
    wait_event(w, COMPUTE, REDUCE, 2, FSDP_MARK_REDUCED, FSDP_REASON_REUSE);
    zero(w, 0);
    use(w, 0, true), compute(w, 200), use(w, 0, true);
    reduce(w, 0, second);
    compute(w, 35);
    use(w, H, true);
    reduce(w, H, second);
}

static void norm(worked_step *w)
{
    for (int i = 0; i < N_UNITS; i++) {
        int unit = (i + H) % N_UNITS;
        fsdp_trace_record squares = operation(COMPUTE, FSDP_OPERATION_SQUARE_SUM, unit, SHARD);
        touch(&squares, grad_shard_of(unit), SHARD, false);
        touch(&squares, PARTIAL, 64, true);
        run(w, &squares, 2);
    }
    record_event(w, COMPUTE, NONE, FSDP_MARK_NORM_PART);
    wait_event(w, REDUCE, COMPUTE, NONE, FSDP_MARK_NORM_PART, FSDP_REASON_READ);
    fsdp_trace_record all_reduce = operation(REDUCE, FSDP_OPERATION_ALL_REDUCE, NONE, 102);
    touch(&all_reduce, PARTIAL, 64, false);
    touch(&all_reduce, PARTIAL + 64, 64, true);
    run(w, &all_reduce, 6);
    fsdp_trace_record result = operation(REDUCE, FSDP_OPERATION_STEP_RESULT, NONE, 64);
    touch(&result, PARTIAL + 64, 64, false);
    touch(&result, PARTIAL, 64, true);
    touch(&result, STEP_RECORD, 64, true);
    run(w, &result, 2);
    record_event(w, REDUCE, NONE, FSDP_MARK_NORM_SUM);
}

static void update(worked_step *w)
{
    wait_event(w, COMPUTE, REDUCE, H, FSDP_MARK_REDUCED, FSDP_REASON_READ);
    norm(w);
    wait_event(w, COMPUTE, REDUCE, NONE, FSDP_MARK_NORM_SUM, FSDP_REASON_READ);
    for (int i = 0; i < N_UNITS; i++) {
        int unit = (i + H) % N_UNITS;
        fsdp_trace_record adamw = operation(COMPUTE, FSDP_OPERATION_ADAMW, unit, 7 * SHARD);
        touch(&adamw, grad_shard_of(unit), SHARD, false);
        touch(&adamw, STEP_RECORD, 64, false);
        touch(&adamw, shard_of(unit), SHARD, true);
        touch(&adamw, moments_of(unit), 2 * SHARD, true);
        run(w, &adamw, 30);
        record_event(w, COMPUTE, unit, FSDP_MARK_UPDATED);
    }
    wait_event(w, GATHER, COMPUTE, H, FSDP_MARK_UPDATED, FSDP_REASON_READ);
    gather(w, H);
    wait_event(w, GATHER, COMPUTE, 0, FSDP_MARK_UPDATED, FSDP_REASON_READ);
    gather(w, 0);
}

void worked_add(worked_step *w)
{
    micro_step(w, false);
    micro_step(w, true);
    update(w);
}
