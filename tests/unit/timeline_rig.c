/* SPDX-License-Identifier: MIT */
#include "timeline_rig.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "trace.h"

/* No stream runs anything here. */
__attribute__((weak)) fsdp_status fsdp__context_drain(fsdp_context *ctx, uint64_t timeout_ns)
{
    (void)ctx, (void)timeout_ns;
    return FSDP_OK;
}

int set_up(void **state)
{
    alarm(120);
    bench *b = calloc(1, sizeof *b);
    assert_non_null(b);
    strcpy(b->path, "/tmp/fsdp_timeline_XXXXXX");
    int file = mkstemp(b->path);
    assert_true(file >= 0);
    close(file);
    worked_open(&b->w, 120000);
    *state = b;
    return 0;
}

int tear_down(void **state)
{
    bench *b = *state;
    if (b->timeline.host != NULL) fsdp__timeline_free(&b->timeline);
    worked_close(&b->w);
    unlink(b->path);
    free(b->svg);
    free(b);
    return 0;
}

void put(bench *b, fsdp_trace_record record, uint64_t start_ns, uint64_t end_ns)
{
    fsdp_span *span = fsdp__trace_add(b->w.trace, &record);
    assert_non_null(span);
    *span = (fsdp_span){start_ns, end_ns};
}

void put_operation(bench *b, fsdp_operation operation, int stream, const char *label, uint64_t start_ns,
                   uint64_t end_ns)
{
    put(b,
        (fsdp_trace_record){.operation = operation,
                            .stream = stream,
                            .other = -1,
                            .label = label,
                            .bytes = 1 << 20,
                            .enqueued_ns = start_ns},
        start_ns, end_ns);
}

void put_event(bench *b, int stream, uint64_t event, uint64_t at_ns)
{
    put(b, (fsdp_trace_record){.kind = FSDP_RECORD_EVENT, .stream = stream, .other = -1, .event = event, .label = "h1"},
        at_ns, at_ns);
}

void put_wait(bench *b, int stream, int other, uint64_t event, uint64_t start_ns, uint64_t end_ns)
{
    put(b,
        (fsdp_trace_record){.kind = FSDP_RECORD_WAIT, .stream = stream, .other = other, .event = event, .label = "h1"},
        start_ns, end_ns);
}

void put_use(bench *b, const char *label, bool write)
{
    fsdp_trace_record use = {.kind = FSDP_RECORD_USE,
                             .stream = COMPUTE,
                             .other = -1,
                             .label = label,
                             .n_accesses = 2,
                             .access = {{4096, 64, false}, {8192, 64, write}}};
    fsdp__trace_add(b->w.trace, &use);
}

const fsdp__timeline *read_tape(bench *b)
{
    assert_int_equal(worked_stop(&b->w), FSDP_OK);
    assert_int_equal(fsdp__timeline_read(&b->w.ctx.host, b->w.trace, PIXELS, &b->timeline), FSDP_OK);
    return &b->timeline;
}

const char *draw(bench *b, const char *title)
{
    assert_int_equal(worked_stop(&b->w), FSDP_OK);
    assert_int_equal(fsdp_trace_write_svg(b->w.trace, b->path, title), FSDP_OK);
    FILE *file = fopen(b->path, "r");
    assert_non_null(file);
    free(b->svg);
    b->svg = calloc(1, 16 << 20);
    assert_non_null(b->svg);
    b->svg_bytes = fread(b->svg, 1, (16 << 20) - 1, file);
    fclose(file);
    return b->svg;
}

size_t n_times(const char *text, const char *what)
{
    size_t n = 0;
    while ((text = strstr(text, what)) != NULL) n++, text += strlen(what);
    return n;
}
