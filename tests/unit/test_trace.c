/* SPDX-License-Identifier: MIT */
/* The tape alone: a context of which only what the tape touches is there, and a device that says when it is drained. */
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
#include "hostmem.h"
#include "trace.h"

enum { GATHER = FSDP_LANE_GATHER, REDUCE = FSDP_LANE_REDUCE, COMPUTE = 3, MAX_BLOCKS = 64 };

/* Host memory that is counted, fails on request, and is given back at the end whatever the tape did. */
typedef struct counted_memory {
    void *block[MAX_BLOCKS];
    size_t n_blocks, live_bytes;
    int fail_at; /* this allocation, from 1, returns NULL; 0: none */
    int n_allocs;
} counted_memory;

static void *counted_alloc(void *arg, size_t bytes, size_t alignment)
{
    counted_memory *memory = arg;
    if (++memory->n_allocs == memory->fail_at) return NULL;
    void *ptr = aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    assert_non_null(ptr);
    assert_true(memory->n_blocks < MAX_BLOCKS);
    memory->block[memory->n_blocks++] = ptr;
    memory->live_bytes += bytes;
    return ptr;
}

static void counted_free(void *arg, void *ptr, size_t bytes, size_t alignment)
{
    (void)alignment;
    counted_memory *memory = arg;
    for (size_t i = 0; i < memory->n_blocks; i++) {
        if (memory->block[i] != ptr) continue;
        memory->block[i] = memory->block[--memory->n_blocks];
        memory->live_bytes -= bytes;
        free(ptr);
        return;
    }
    fail_msg("free of %p, which is not live", ptr);
}

/* A device of which only draining exists. */
typedef struct fake_device {
    int n_drains;
    fsdp_status drain_status;
    fsdp_status first_status; /* of the next drain, instead; FSDP_OK: none */
} fake_device;

static fsdp_status fake_drain(void *dev, void *stream, uint64_t timeout_ns)
{
    (void)stream, (void)timeout_ns;
    fake_device *device = dev;
    fsdp_status status = device->first_status != FSDP_OK ? device->first_status : device->drain_status;
    device->n_drains++;
    device->first_status = FSDP_OK;
    return status == FSDP_OK ? FSDP_OK : fsdp_backend_fail(status, "the fake device stopped");
}

static fsdp_status fake_check(void *dev)
{
    (void)dev;
    return FSDP_OK;
}

/* Stands in where this test is linked without the context's own. */
__attribute__((weak)) fsdp_status fsdp__context_drain(fsdp_context *ctx, uint64_t timeout_ns)
{
    for (int slot = 0; slot < ctx->clocks.n_slots; slot++) {
        fsdp_stream *stream = ctx->clocks.stream[slot];
        if (stream == NULL) continue;
        fsdp_status status = ctx->backend->device->stream_drain(ctx->dev, stream->native, timeout_ns);
        if (status != FSDP_OK) return status;
    }
    return FSDP_OK;
}

static const fsdp_device_ops fake_device_ops = {
    .size = sizeof(fsdp_device_ops), .name = "fake", .stream_drain = fake_drain, .check = fake_check};
static const fsdp_comm_ops fake_comm_ops = {.size = sizeof(fsdp_comm_ops), .name = "fake", .check = fake_check};
static const fsdp_side_ops fake_side_ops = {.size = sizeof(fsdp_side_ops), .check = fake_check};
static const fsdp_backend fake_backend = {.size = sizeof(fsdp_backend),
                                          .name = "fake",
                                          .device = &fake_device_ops,
                                          .comm = &fake_comm_ops,
                                          .side = &fake_side_ops};

typedef struct bench {
    fsdp_context ctx;
    fsdp_stream stream[4];
    fake_device device;
    counted_memory memory;
} bench;

static int set_up(void **state)
{
    static const char *const name[4] = {"gather", "reduce", "copy", "compute"};
    bench *b = calloc(1, sizeof *b);
    assert_non_null(b);
    fsdp_host_allocator given = {counted_alloc, counted_free, &b->memory, NULL};
    assert_int_equal(fsdp__host_allocator_resolve(&given, &b->ctx.host), FSDP_OK);
    assert_int_equal(pthread_mutex_init(&b->ctx.lock, NULL), 0);
    b->ctx.backend = &fake_backend;
    b->ctx.dev = b->ctx.side = &b->device;
    b->ctx.timeout_ns = 1000000000;
    b->ctx.world = 1;
    b->ctx.clocks.n_slots = 4;
    for (int slot = 0; slot < 4; slot++) {
        b->stream[slot].ctx = &b->ctx;
        b->stream[slot].slot = slot;
        b->stream[slot].lane = slot < 3;
        snprintf(b->stream[slot].name, sizeof b->stream[slot].name, "%s", name[slot]);
        b->ctx.clocks.stream[slot] = &b->stream[slot];
    }
    *state = b;
    alarm(60);
    return 0;
}

static int tear_down(void **state)
{
    bench *b = *state;
    for (size_t i = 0; i < b->memory.n_blocks; i++) free(b->memory.block[i]);
    pthread_mutex_destroy(&b->ctx.lock);
    free(b);
    return 0;
}

static fsdp_trace *start(bench *b, uint64_t max_records)
{
    fsdp_trace *trace = NULL;
    assert_int_equal(fsdp_trace_start(&b->ctx, max_records, &trace), FSDP_OK);
    assert_non_null(trace);
    return trace;
}

static void stop(fsdp_trace *trace) { assert_int_equal(fsdp_trace_stop_host(trace), FSDP_OK); }

static void add_operation(fsdp_trace *trace, fsdp_operation operation, int32_t stream, uint64_t bytes,
                          uint64_t start_ns, uint64_t end_ns)
{
    fsdp_trace_record record = {
        .kind = FSDP_RECORD_OPERATION, .operation = operation, .stream = stream, .label = "u", .bytes = bytes};
    fsdp_span *span = fsdp__trace_add(trace, &record);
    assert_non_null(span);
    *span = (fsdp_span){start_ns, end_ns};
}

static void add_wait(fsdp_trace *trace, int32_t stream, int32_t other, uint64_t start_ns, uint64_t end_ns)
{
    fsdp_trace_record record = {.kind = FSDP_RECORD_WAIT, .stream = stream, .other = other, .event = 7, .label = "u"};
    fsdp_span *span = fsdp__trace_add(trace, &record);
    assert_non_null(span);
    *span = (fsdp_span){start_ns, end_ns};
}

static void a_capacity_of_zero_or_beyond_reason_is_refused(void **state)
{
    bench *b = *state;
    fsdp_trace *trace = NULL;
    assert_int_equal(fsdp_trace_start(&b->ctx, 0, &trace), FSDP_ERR_ARG);
    assert_int_equal(fsdp_trace_start(&b->ctx, UINT64_MAX, &trace), FSDP_ERR_ARG);
    assert_int_equal(fsdp_trace_start(&b->ctx, (1 << 26) + 1, &trace), FSDP_ERR_ARG);
    assert_null(trace);
    assert_null(b->ctx.trace);
    assert_int_equal(b->memory.n_allocs, 0);
}

static void null_arguments_are_refused(void **state)
{
    bench *b = *state;
    fsdp_trace *trace = start(b, 1);
    fsdp_trace_summary summary = FSDP_TRACE_SUMMARY_INIT;
    stop(trace);
    assert_int_equal(fsdp_trace_start(NULL, 1, &trace), FSDP_ERR_ARG);
    assert_int_equal(fsdp_trace_start(&b->ctx, 1, NULL), FSDP_ERR_ARG);
    assert_int_equal(fsdp_trace_stop_host(NULL), FSDP_ERR_ARG);
    assert_int_equal(fsdp_trace_summarize(NULL, &b->stream[COMPUTE], &summary), FSDP_ERR_ARG);
    assert_int_equal(fsdp_trace_summarize(trace, NULL, &summary), FSDP_ERR_ARG);
    assert_int_equal(fsdp_trace_summarize(trace, &b->stream[COMPUTE], NULL), FSDP_ERR_ARG);
    assert_int_equal(fsdp_trace_write_svg(NULL, "x", "t"), FSDP_ERR_ARG);
    assert_int_equal(fsdp_trace_write_svg(trace, NULL, "t"), FSDP_ERR_ARG);
    assert_int_equal(fsdp_trace_write_svg(trace, "x", NULL), FSDP_ERR_ARG);
    assert_int_equal(fsdp_trace_count(NULL), 0);
    assert_null(fsdp_trace_at(NULL, 0));
    fsdp_trace_destroy(NULL);
    fsdp_trace_destroy(trace);
}

static void one_trace_is_on_at_a_time(void **state)
{
    bench *b = *state;
    fsdp_trace *first = start(b, 4), *second = NULL;
    size_t live_bytes = b->memory.live_bytes;
    assert_int_equal(fsdp_trace_start(&b->ctx, 4, &second), FSDP_ERR_STATE);
    assert_null(second);
    assert_ptr_equal(b->ctx.trace, first);
    assert_int_equal(b->memory.live_bytes, live_bytes);
    stop(first);
    assert_null(b->ctx.trace);
    second = start(b, 4);
    assert_int_equal(b->ctx.n_live[FSDP__CHILD_TRACE], 2);
    fsdp_trace_destroy(first); /* not the one that is on */
    assert_ptr_equal(b->ctx.trace, second);
    fsdp_trace_destroy(second);
    assert_int_equal(b->ctx.n_live[FSDP__CHILD_TRACE], 0);
}

static void a_trace_that_could_not_be_stopped_leaves_its_successor_on(void **state)
{
    bench *b = *state;
    fsdp_trace *first = start(b, 4);
    b->device.drain_status = FSDP_ERR_TIMEOUT;
    assert_int_equal(fsdp_trace_stop_host(first), FSDP_ERR_TIMEOUT);
    fsdp_trace *second = start(b, 4);
    b->device.drain_status = FSDP_OK;
    fsdp_trace_destroy(first);
    assert_ptr_equal(b->ctx.trace, second);
    fsdp_trace_destroy(second);
}

static void records_come_back_as_given_and_in_order(void **state)
{
    bench *b = *state;
    fsdp_trace *trace = start(b, 100);
    for (uint64_t i = 0; i < 100; i++) {
        fsdp_trace_record record = {.kind = FSDP_RECORD_OPERATION,
                                    .operation = FSDP_OPERATION_CAST,
                                    .mark = FSDP_MARK_USED,
                                    .reason = FSDP_REASON_REUSE,
                                    .stream = COMPUTE,
                                    .other = REDUCE,
                                    .event = 1000 + i,
                                    .label = "h1",
                                    .bytes = 5 * i,
                                    .start_ns = 9,
                                    .end_ns = 99,
                                    .n_accesses = 2,
                                    .access = {{i, 16, false}, {i + 100, 32, true}}};
        assert_non_null(fsdp__trace_add(trace, &record));
    }
    assert_int_equal(fsdp_trace_count(trace), 100);
    for (uint64_t i = 0; i < 100; i++) {
        const fsdp_trace_record *record = fsdp_trace_at(trace, i);
        assert_int_equal(record->event, 1000 + i);
        assert_int_equal(record->bytes, 5 * i);
        assert_int_equal(record->access[1].begin, i + 100);
        assert_int_equal(record->reason, FSDP_REASON_REUSE);
        assert_string_equal(record->label, "h1");
        assert_int_equal(record->end_ns, 0); /* the device's to say, not the record's */
    }
    assert_null(fsdp_trace_at(trace, 100));
    assert_int_equal(fsdp_trace_dropped(trace), 0);
    fsdp_trace_destroy(trace);
}

static void a_label_may_be_gone_after_the_call(void **state)
{
    bench *b = *state;
    fsdp_trace *trace = start(b, 3);
    char label[8] = "h1";
    fsdp_trace_record record = {.kind = FSDP_RECORD_EVENT, .stream = COMPUTE, .label = label};
    fsdp__trace_add(trace, &record);
    strcpy(label, "h2");
    fsdp__trace_add(trace, &record);
    record.label = NULL;
    fsdp__trace_add(trace, &record);
    assert_string_equal(fsdp_trace_at(trace, 0)->label, "h1");
    assert_string_equal(fsdp_trace_at(trace, 1)->label, "h2");
    assert_string_equal(fsdp_trace_at(trace, 2)->label, "");
    fsdp_trace_destroy(trace);
}

static void equal_labels_share_one_copy(void **state)
{
    bench *b = *state;
    fsdp_trace *trace = start(b, 6000);
    char label[16];
    for (int i = 0; i < 6000; i++) {
        snprintf(label, sizeof label, "h%d", i % 3000);
        fsdp_trace_record record = {.kind = FSDP_RECORD_EVENT, .stream = COMPUTE, .label = label};
        fsdp__trace_add(trace, &record);
    }
    for (uint64_t i = 0; i < 3000; i++) {
        snprintf(label, sizeof label, "h%d", (int)i);
        assert_string_equal(fsdp_trace_at(trace, i)->label, label);
        assert_ptr_equal(fsdp_trace_at(trace, i)->label, fsdp_trace_at(trace, i + 3000)->label);
    }
    fsdp_trace_destroy(trace);
}

static void a_full_pool_costs_labels_and_nothing_else(void **state)
{
    bench *b = *state;
    fsdp_trace *trace = start(b, 30000);
    char label[32];
    for (int i = 0; i < 20000; i++) {
        snprintf(label, sizeof label, "unit.%d", i);
        fsdp_trace_record record = {.kind = FSDP_RECORD_EVENT, .stream = COMPUTE, .event = (uint64_t)i, .label = label};
        assert_non_null(fsdp__trace_add(trace, &record));
    }
    static char long_label[1 << 19];
    memset(long_label, 'x', sizeof long_label - 1);
    fsdp_trace_record record = {.kind = FSDP_RECORD_EVENT, .stream = COMPUTE, .label = long_label};
    assert_non_null(fsdp__trace_add(trace, &record));

    assert_string_equal(fsdp_trace_at(trace, 0)->label, "unit.0");
    assert_string_equal(fsdp_trace_at(trace, 8000)->label, "unit.8000");
    assert_string_equal(fsdp_trace_at(trace, 19999)->label, "");
    assert_int_equal(fsdp_trace_at(trace, 19999)->event, 19999);
    assert_string_equal(fsdp_trace_at(trace, 20000)->label, "");
    assert_int_equal(fsdp_trace_dropped(trace), 0);
    fsdp_trace_destroy(trace);
}

static void a_label_longer_than_the_pool_is_empty(void **state)
{
    bench *b = *state;
    fsdp_trace *trace = start(b, 2);
    static char long_label[1 << 19];
    memset(long_label, 'x', sizeof long_label - 1);
    fsdp_trace_record record = {.kind = FSDP_RECORD_EVENT, .stream = COMPUTE, .label = long_label};
    assert_non_null(fsdp__trace_add(trace, &record));
    record.label = "h1";
    assert_non_null(fsdp__trace_add(trace, &record));
    assert_string_equal(fsdp_trace_at(trace, 0)->label, "");
    assert_string_equal(fsdp_trace_at(trace, 1)->label, "h1");
    fsdp_trace_destroy(trace);
}

static void records_beyond_the_capacity_are_counted_not_kept(void **state)
{
    bench *b = *state;
    fsdp_trace *trace = start(b, 2);
    fsdp_trace_record record = {.kind = FSDP_RECORD_EVENT, .stream = COMPUTE, .label = ""};
    fsdp_span *first = fsdp__trace_add(trace, &record), *second = fsdp__trace_add(trace, &record);
    assert_ptr_equal(second, first + 1);
    for (int i = 0; i < 5; i++) assert_null(fsdp__trace_add(trace, &record));
    assert_int_equal(fsdp_trace_count(trace), 2);
    assert_int_equal(fsdp_trace_dropped(trace), 5);
    fsdp_trace_destroy(trace);
}

static void without_a_trace_nothing_is_recorded(void **state)
{
    (void)state;
    fsdp_trace_record record = {.kind = FSDP_RECORD_EVENT, .label = ""};
    assert_null(fsdp__trace_add(NULL, &record));
}

static void times_are_there_after_stop(void **state)
{
    bench *b = *state;
    fsdp_trace *trace = start(b, 2);
    add_operation(trace, FSDP_OPERATION_COPY, COMPUTE, 1, 100, 250);
    assert_int_equal(fsdp_trace_at(trace, 0)->end_ns, 0);
    stop(trace);
    assert_true(b->device.n_drains > 0);
    assert_int_equal(fsdp_trace_at(trace, 0)->start_ns, 100);
    assert_int_equal(fsdp_trace_at(trace, 0)->end_ns, 250);
    stop(trace); /* again: nothing */
    fsdp_trace_destroy(trace);
}

static void an_operation_that_began_and_never_ended_has_no_times(void **state)
{
    bench *b = *state;
    fsdp_trace *trace = start(b, 2);
    add_operation(trace, FSDP_OPERATION_COPY, COMPUTE, 1, 100, 0);
    stop(trace);
    assert_int_equal(fsdp_trace_at(trace, 0)->start_ns, 0);
    assert_int_equal(fsdp_trace_at(trace, 0)->end_ns, 0);
    fsdp_trace_destroy(trace);
}

static void stop_reports_what_stopped_the_device_and_may_be_asked_again(void **state)
{
    bench *b = *state;
    fsdp_trace *trace = start(b, 2);
    add_operation(trace, FSDP_OPERATION_COPY, COMPUTE, 1, 100, 250);
    b->device.drain_status = FSDP_ERR_TIMEOUT;
    assert_int_equal(fsdp_trace_stop_host(trace), FSDP_ERR_TIMEOUT);
    assert_null(b->ctx.trace); /* nothing more is recorded all the same */
    fsdp_trace_summary summary = FSDP_TRACE_SUMMARY_INIT;
    assert_int_equal(fsdp_trace_summarize(trace, &b->stream[COMPUTE], &summary), FSDP_ERR_STATE);
    assert_int_equal(fsdp_trace_write_svg(trace, "/nowhere/x.svg", "t"), FSDP_ERR_STATE);
    b->device.drain_status = FSDP_OK;
    stop(trace);
    assert_int_equal(fsdp_trace_at(trace, 0)->end_ns, 250);
    fsdp_trace_destroy(trace);
}

static void destroy_drains_a_running_trace_and_gives_back_every_byte(void **state)
{
    bench *b = *state;
    fsdp_trace *trace = start(b, 1000);
    assert_true(b->memory.live_bytes > 0);
    assert_int_equal(b->ctx.n_live[FSDP__CHILD_TRACE], 1);
    fsdp_trace_destroy(trace);
    assert_true(b->device.n_drains > 0);
    assert_null(b->ctx.trace);
    assert_int_equal(b->ctx.n_live[FSDP__CHILD_TRACE], 0);
    assert_int_equal(b->memory.live_bytes, 0);
}

static void assert_not_freed(bench *b, fsdp_status first, fsdp_status others)
{
    fsdp_trace *trace = start(b, 2);
    fsdp_trace_record record = {.kind = FSDP_RECORD_OPERATION, .stream = COMPUTE, .label = ""};
    fsdp_span *span = fsdp__trace_add(trace, &record);
    size_t live_bytes = b->memory.live_bytes;
    b->device.first_status = first;
    b->device.drain_status = others;
    fsdp_trace_destroy(trace);
    assert_int_equal(b->ctx.n_live[FSDP__CHILD_TRACE], 0);
    assert_int_equal(b->memory.live_bytes, live_bytes);
    *span = (fsdp_span){1, 2};
}

static void spans_that_the_device_may_still_write_are_not_freed(void **state)
{
    assert_not_freed(*state, FSDP_OK, FSDP_ERR_TIMEOUT);
    assert_not_freed(*state, FSDP_OK, FSDP_ERR_STATE); /* its stream captures, and ran before */
    assert_not_freed(*state, FSDP_ERR_DEVICE, FSDP_ERR_STATE);
    assert_not_freed(*state, FSDP_ERR_STATE, FSDP_ERR_DEVICE);
}

static void start_without_host_memory_changes_nothing(void **state)
{
    bench *b = *state;
    fsdp_trace *trace = NULL;
    for (int n = 1; n <= 5; n++) {
        b->memory.fail_at = b->memory.n_allocs + n;
        assert_int_equal(fsdp_trace_start(&b->ctx, 10, &trace), FSDP_ERR_NO_HOST_MEMORY);
        assert_null(trace);
        assert_null(b->ctx.trace);
        assert_int_equal(b->ctx.n_live[FSDP__CHILD_TRACE], 0);
        assert_int_equal(b->memory.live_bytes, 0);
    }
}

static void a_stream_name_outlives_the_stream(void **state)
{
    bench *b = *state;
    fsdp_trace *trace = start(b, 2);
    add_wait(trace, COMPUTE, GATHER, 1, 2);
    b->ctx.clocks.stream[COMPUTE] = NULL;
    memset(&b->stream[COMPUTE], 0, sizeof b->stream[COMPUTE]);
    assert_string_equal(fsdp_trace_stream_name(trace, COMPUTE), "compute");
    assert_string_equal(fsdp_trace_stream_name(trace, GATHER), "gather"); /* seen as the awaited one */
    assert_string_equal(fsdp_trace_stream_name(trace, REDUCE), "");
    assert_string_equal(fsdp_trace_stream_name(trace, -1), "");
    assert_string_equal(fsdp_trace_stream_name(trace, 16), "");
    fsdp_trace_destroy(trace);
}

static fsdp_trace_summary summarize(bench *b, const fsdp_trace *trace)
{
    fsdp_trace_summary summary = FSDP_TRACE_SUMMARY_INIT;
    assert_int_equal(fsdp_trace_summarize(trace, &b->stream[COMPUTE], &summary), FSDP_OK);
    return summary;
}

static void the_summary_tells_where_the_time_went(void **state)
{
    bench *b = *state;
    fsdp_trace *trace = start(b, 20);
    add_operation(trace, FSDP_OPERATION_ALL_GATHER, GATHER, 600, 1000, 1100);
    add_wait(trace, COMPUTE, GATHER, 1010, 1100); /* 90 exposed, gather */
    add_operation(trace, FSDP_OPERATION_HOST_CALL, COMPUTE, 0, 1100, 1400);
    add_wait(trace, REDUCE, COMPUTE, 1000, 1400); /* another stream's wait */
    add_operation(trace, FSDP_OPERATION_REDUCE_SCATTER, REDUCE, 50, 1400, 1460);
    add_operation(trace, FSDP_OPERATION_ALL_REDUCE, REDUCE, 4, 1460, 1470);
    add_wait(trace, COMPUTE, REDUCE, 1400, 1470); /* 70 exposed, reduce */
    add_wait(trace, COMPUTE, 4, 1470, 1475);      /* 5 exposed, some other stream */
    add_operation(trace, FSDP_OPERATION_ADAMW, COMPUTE, 0, 1475, 1500);
    add_operation(trace, FSDP_OPERATION_COPY, GATHER, 9, 0, 0); /* has not run */
    stop(trace);
    fsdp_trace_summary summary = summarize(b, trace);
    assert_int_equal(summary.span_ns, 500);
    assert_int_equal(summary.compute_ns, 325);
    assert_int_equal(summary.exposed_ns, 165);
    assert_int_equal(summary.exposed_gather_ns, 90);
    assert_int_equal(summary.exposed_reduce_ns, 70);
    assert_int_equal(summary.gather_ns, 100);
    assert_int_equal(summary.reduce_ns, 70);
    assert_int_equal(summary.gather_bytes, 600);
    assert_int_equal(summary.reduce_bytes, 54);
    fsdp_trace_destroy(trace);
}

static void collectives_of_one_group_count_their_time_once(void **state)
{
    bench *b = *state;
    fsdp_trace *trace = start(b, 20);
    add_operation(trace, FSDP_OPERATION_ALL_GATHER, GATHER, 10, 100, 200);
    add_operation(trace, FSDP_OPERATION_ALL_GATHER, GATHER, 20, 100, 200);
    add_operation(trace, FSDP_OPERATION_ALL_GATHER, GATHER, 30, 150, 230);
    stop(trace);
    assert_int_equal(summarize(b, trace).gather_ns, 130);
    assert_int_equal(summarize(b, trace).gather_bytes, 60);
    fsdp_trace_destroy(trace);
}

static void the_summary_of_an_empty_tape_is_zero(void **state)
{
    bench *b = *state;
    fsdp_trace *trace = start(b, 1);
    stop(trace);
    fsdp_trace_summary summary = summarize(b, trace), zero = FSDP_TRACE_SUMMARY_INIT;
    assert_memory_equal(&summary, &zero, sizeof zero);
    fsdp_trace_destroy(trace);
}

static void the_summary_refuses_strangers(void **state)
{
    bench *b = *state;
    fsdp_trace *trace = start(b, 1);
    stop(trace);
    fsdp_trace_summary summary = FSDP_TRACE_SUMMARY_INIT;
    fsdp_stream stranger = {.ctx = NULL, .slot = COMPUTE, .name = "stranger"};
    assert_int_equal(fsdp_trace_summarize(trace, &stranger, &summary), FSDP_ERR_ARG);
    summary.size = 8;
    assert_int_equal(fsdp_trace_summarize(trace, &b->stream[COMPUTE], &summary), FSDP_ERR_ARG);
    fsdp_trace_destroy(trace);
}

typedef const char *(*name_fn)(int);
static const char *operation_name(int i) { return fsdp_operation_name((fsdp_operation)i); }
static const char *mark_name(int i) { return fsdp_mark_name((fsdp_mark)i); }
static const char *reason_name(int i) { return fsdp_reason_name((fsdp_reason)i); }

static void check_names(name_fn name, int last)
{
    for (int i = 0; i <= last; i++) {
        assert_string_not_equal(name(i), "?");
        for (int j = 0; j < i; j++) assert_string_not_equal(name(i), name(j));
    }
    assert_string_equal(name(last + 1), "?");
}

static void every_operation_mark_and_reason_has_a_name_of_its_own(void **state)
{
    (void)state;
    check_names(operation_name, FSDP_OPERATION_REPLAY);
    check_names(mark_name, FSDP_MARK_DEMAND);
    check_names(reason_name, FSDP_REASON_CALLER);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(a_capacity_of_zero_or_beyond_reason_is_refused),
        TEST(null_arguments_are_refused),
        TEST(one_trace_is_on_at_a_time),
        TEST(a_trace_that_could_not_be_stopped_leaves_its_successor_on),
        TEST(records_come_back_as_given_and_in_order),
        TEST(a_label_may_be_gone_after_the_call),
        TEST(equal_labels_share_one_copy),
        TEST(a_full_pool_costs_labels_and_nothing_else),
        TEST(a_label_longer_than_the_pool_is_empty),
        TEST(records_beyond_the_capacity_are_counted_not_kept),
        TEST(without_a_trace_nothing_is_recorded),
        TEST(times_are_there_after_stop),
        TEST(an_operation_that_began_and_never_ended_has_no_times),
        TEST(stop_reports_what_stopped_the_device_and_may_be_asked_again),
        TEST(destroy_drains_a_running_trace_and_gives_back_every_byte),
        TEST(spans_that_the_device_may_still_write_are_not_freed),
        TEST(start_without_host_memory_changes_nothing),
        TEST(a_stream_name_outlives_the_stream),
        TEST(the_summary_tells_where_the_time_went),
        TEST(collectives_of_one_group_count_their_time_once),
        TEST(the_summary_of_an_empty_tape_is_zero),
        TEST(the_summary_refuses_strangers),
        TEST(every_operation_mark_and_reason_has_a_name_of_its_own),
    };
    return cmocka_run_group_tests_name("trace", tests, NULL, NULL);
}
