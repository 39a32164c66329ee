/* SPDX-License-Identifier: MIT */
/* What goes before the context does takes nothing with it that the context still looks at: host memory that is given back reads
 * as X from then on. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#include "captured.h"
#include "graphs.h"
#include "ok.h"

enum { BYTES = 1 << 21, MAX_RECORDS = 64 };

/* Functions of an fsdp_host_allocator. Nothing is used twice, so that what is gone cannot come back as something else. */
typedef struct gone {
    struct gone *next;
    void *ptr;
} gone;

static void *take_host(void *arg, size_t bytes, size_t alignment)
{
    (void)arg;
    return aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}

static void give_host(void *arg, void *ptr, size_t bytes, size_t alignment)
{
    (void)alignment;
    gone **all = arg, *one = malloc(sizeof *one);
    assert_non_null(one);
    *one = (gone){*all, ptr};
    *all = one;
    memset(ptr, 'X', bytes - 1);
    ((char *)ptr)[bytes - 1] = 0;
}

typedef struct life {
    gone *gone;
    graphs g;
    fsdp_context *ctx;
} life;

static void open_life(life *f)
{
    memset(f, 0, sizeof *f);
    graphs_init(&f->g, fsdp_host_backend(), NULL);
    fsdp_config c = FSDP_CONFIG_INIT;
    c.backend = graphs_backend();
    c.backend_config = &f->g;
    c.host = (fsdp_host_allocator){take_host, give_host, &f->gone, NULL};
    OK(fsdp_context_create(&c, &f->ctx));
}

static void close_life(life *f)
{
    OK(fsdp_context_destroy(f->ctx));
    assert_null(graphs_complaint(&f->g));
    for (gone *one = f->gone, *next; one != NULL; one = next) {
        next = one->next;
        free(one->ptr);
        free(one);
    }
}

/* A block that another stream had last: the label of the wait for it is on the tape, and it is `expected`. */
static void assert_hand_over(life *f, fsdp_allocator *allocator, fsdp_stream *s, const char *expected)
{
    fsdp_trace *trace;
    void *block;
    uint32_t n_waits = 0;
    OK(fsdp_trace_start(f->ctx, MAX_RECORDS, &trace));
    OK(fsdp_allocator_alloc(allocator, BYTES, s, "second", &block));
    OK(fsdp_trace_stop_host(trace));
    for (uint64_t i = 0; i < fsdp_trace_count(trace); i++) {
        const fsdp_trace_record *r = fsdp_trace_at(trace, i);
        if (r->kind != FSDP_RECORD_WAIT) continue;
        assert_string_equal(r->label, expected);
        n_waits++;
    }
    assert_int_equal(n_waits, 1);
    fsdp_trace_destroy(trace);
    OK(fsdp_allocator_free(allocator, block));
}

/* The fence that the hand-over waits for is one that a hook recorded. */
static void a_model_takes_its_names_from_the_fences(void **unused)
{
    (void)unused;
    life f;
    fsdp_stream *s, *other;
    fsdp_allocator *allocator;
    fsdp_view view = FSDP_VIEW_INIT;
    fsdp_unit *unit[2];
    fsdp_model *model;
    const uint64_t elems = 1000;
    void *block;
    open_life(&f);
    OK(fsdp_stream_create(f.ctx, "compute", &s));
    OK(fsdp_stream_create(f.ctx, "other", &other));
    OK(fsdp_allocator_create(f.ctx, NULL, &allocator));
    OK(fsdp_model_create(f.ctx, NULL, &model));
    const fsdp_unit_config bf16 = {sizeof bf16,     FSDP_DTYPE_BF16,        FSDP_DTYPE_FP32,   FSDP_DTYPE_FP32,
                                   FSDP_DTYPE_FP32, FSDP_RESHARD_AFTER_USE, FSDP_PLACE_DEVICE, true};
    for (int i = 0; i < 2; i++) {
        OK(fsdp_model_add_unit(model, i == 0 ? "the first unit" : "the second unit", &bf16, &unit[i]));
        OK(fsdp_unit_add_param(unit[i], i == 0 ? "a" : "b", 1, &elems, NULL, NULL));
    }
    OK(fsdp_model_seal(model));
    fsdp_pass_args eval = FSDP_PASS_ARGS_INIT;
    eval.pass = FSDP_PASS_EVAL, eval.next = FSDP_PASS_NONE;
    OK(fsdp_pass_begin(model, &eval, s));
    OK(fsdp_forward_begin(unit[0], s, &view));
    OK(fsdp_allocator_alloc(allocator, BYTES, s, "first", &block));
    OK(fsdp_allocator_free(allocator, block));
    OK(fsdp_forward_end(unit[0], s)); /* given back: its fence covers the block, too */
    OK(fsdp_pass_end(model, s));
    OK(fsdp_model_destroy(model));
    assert_hand_over(&f, allocator, other, "compute");
    OK(fsdp_allocator_destroy(allocator));
    OK(fsdp_stream_release(other));
    OK(fsdp_stream_release(s));
    close_life(&f);
}

/* What a replay comes after has been told by fences of the other streams; its own stream is gone then. */
static void a_stream_that_replayed_takes_its_name_from_the_fences(void **unused)
{
    (void)unused;
    life f;
    captured t;
    fsdp_capture *capture;
    fsdp_stream *replaying, *other[2];
    fsdp_allocator *allocator;
    void *block;
    open_life(&f);
    const captured_config config = {.depth = 1};
    OK(captured_open(&t, &config, f.ctx));
    OK(fsdp_allocator_create(f.ctx, NULL, &allocator));
    fsdp_adamw_args args = captured_args(1);
    OK(captured_batch(&t, t.s));
    OK(captured_step(&t, &args));
    OK(fsdp_capture_begin(f.ctx, t.s));
    graphs_begin(&f.g, t.s);
    OK(captured_step(&t, &args));
    OK(fsdp_capture_end(f.ctx, t.s, &capture));
    graphs_graph *graph = graphs_end(&f.g, t.s);

    OK(fsdp_stream_create(f.ctx, "replaying", &replaying));
    OK(fsdp_allocator_alloc(allocator, BYTES, t.s, "first", &block));
    OK(fsdp_stream_fill(t.s, block, 0, BYTES));
    OK(fsdp_allocator_free(allocator, block));
    OK(fsdp_replay(capture, 1, &args, replaying));
    OK(graphs_launch(graph, replaying));
    OK(fsdp_replayed(capture, replaying));
    OK(fsdp_stream_release(replaying));
    for (int i = 0; i < 2; i++)
        OK(fsdp_stream_create(f.ctx, "other", &other[i])); /* the first one knows what its slot did */
    assert_hand_over(&f, allocator, other[1], "compute");

    for (int i = 0; i < 2; i++) OK(fsdp_stream_release(other[i]));
    OK(fsdp_allocator_destroy(allocator));
    fsdp_capture_destroy(capture);
    OK(captured_close(&t));
    graphs_destroy(graph);
    close_life(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_model_takes_its_names_from_the_fences),
        cmocka_unit_test(a_stream_that_replayed_takes_its_name_from_the_fences),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
