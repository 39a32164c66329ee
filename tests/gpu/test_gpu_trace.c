/* SPDX-License-Identifier: MIT */
/* The caller's kernels on a tape, which does not see them: they are what is between a stream's records. */
#include <string.h>
#include <time.h>

#include "fsdp/fsdp.h"
#include "gpu_ranks.h"
#include "gpu_suites.h"
#include "hostmem.h"
#include "ok.h"
#include "timeline.h"

enum { UNITS = 2 };
static const uint64_t LONG_NS = 5000000, SURELY_NS = 4000000 /* of it, by another clock */;

typedef struct bench {
    fsdp_context *ctx;
    cudaStream_t native;
    fsdp_stream *s;
    fsdp_trace *trace;
    uint32_t *word; /* pinned; each 0 holds the stream */
    uint32_t n_held;
} bench;

static int set_up(void **state)
{
    static bench it;
    bench *b = *state = &it;
    *b = (bench){.ctx = NULL};
    fsdp_config config = FSDP_CONFIG_INIT;
    config.backend = fsdp_cuda_backend();
    OK(fsdp_context_create(&config, &b->ctx));
    CUDA(cudaHostAlloc((void **)&b->word, 4096, cudaHostAllocDefault));
    CUDA(cudaStreamCreateWithFlags(&b->native, cudaStreamNonBlocking));
    OK(fsdp_cuda_stream_wrap(b->ctx, b->native, "compute", &b->s));
    return 0;
}

static int tear_down(void **state)
{
    bench *b = *state;
    fsdp_trace_destroy(b->trace);
    OK(fsdp_stream_release(b->s));
    OK(fsdp_context_destroy(b->ctx));
    CUDA(cudaFreeHost(b->word));
    CUDA(cudaStreamDestroy(b->native));
    return 0;
}

/* A kernel of the caller's that runs for LONG_NS: let_go ends one after the other. */
static void hold(bench *b)
{
    uint32_t *word = &b->word[b->n_held++];
    __atomic_store_n(word, 0, __ATOMIC_SEQ_CST);
    CUDA(gpu_hold(b->native, word));
}

static void let_go_and_stop(bench *b)
{
    const struct timespec moment = {0, (long)LONG_NS};
    for (uint32_t i = 0; i < b->n_held; i++) {
        nanosleep(&moment, NULL);
        __atomic_store_n(&b->word[i], 1, __ATOMIC_SEQ_CST);
    }
    OK(fsdp_trace_stop_host(b->trace));
}

static void a_tape_knows_how_long_the_callers_kernels_took(void **state)
{
    bench *b = *state;
    fsdp_event *event = NULL;
    OK(fsdp_event_create(b->ctx, &event));
    OK(fsdp_trace_start(b->ctx, 16, &b->trace));
    OK(fsdp_event_record(event, b->s));
    hold(b);
    OK(fsdp_event_record(event, b->s));
    let_go_and_stop(b);
    fsdp_trace_summary sum = FSDP_TRACE_SUMMARY_INIT;
    OK(fsdp_trace_summarize(b->trace, b->s, &sum));
    assert_int_equal(fsdp_trace_count(b->trace), 2);
    assert_true(sum.between_ns >= SURELY_NS);
    assert_int_equal(sum.late_ns, 0); /* the second record had come while they ran */
    assert_int_equal(sum.compute_ns, 0);
    fsdp_event_destroy(event);
}

static fsdp_model *make_model(bench *b, fsdp_unit **unit)
{
    fsdp_model *model = NULL;
    fsdp_model_config config = FSDP_MODEL_CONFIG_INIT;
    OK(fsdp_model_create(b->ctx, &config, &model));
    for (int i = 0; i < UNITS; i++) {
        OK(fsdp_model_add_unit(model, i == 0 ? "h.0" : "h.1", NULL, &unit[i]));
        OK(fsdp_unit_add_param(unit[i], i == 0 ? "h.0.w" : "h.1.w", 1, (uint64_t[]){64}, NULL, NULL));
    }
    OK(fsdp_model_seal(model));
    return model;
}

/* Of all the caller's kernels h.0's forward and h.1's backward are the long ones. */
static void enqueue_pass(bench *b, fsdp_model *model, fsdp_unit **unit)
{
    fsdp_pass_args pass = FSDP_PASS_ARGS_INIT;
    fsdp_view view = FSDP_VIEW_INIT;
    OK(fsdp_pass_begin(model, &pass, b->s));
    for (int i = 0; i < UNITS; i++) {
        OK(fsdp_forward_begin(unit[i], b->s, &view));
        if (i == 0) hold(b);
        OK(fsdp_forward_end(unit[i], b->s));
    }
    for (int i = UNITS; i-- > 0;) {
        OK(fsdp_backward_begin(unit[i], b->s, &view));
        if (i == 1) hold(b);
        OK(fsdp_backward_end(unit[i], b->s));
    }
    OK(fsdp_pass_end(model, b->s));
}

static const fsdp__bar *bar_of(const fsdp__timeline *timeline, fsdp__shade shade, const char *unit)
{
    for (size_t i = 0; i < timeline->n_bars; i++)
        if (timeline->bar[i].shade == shade && strcmp(timeline->bar[i].name, unit) == 0) return &timeline->bar[i];
    fail_msg("%s has no bar", unit);
    return NULL;
}

/* And the host was not late: what ends the bar had come while the kernel ran. */
static void assert_is_long(const fsdp__bar *bar)
{
    assert_string_equal(bar->kind, "between hooks");
    assert_true(bar->end_ns - bar->start_ns >= SURELY_NS);
    assert_false(bar->late);
}

static void kernels_in_a_window_are_a_bar_of_its_unit(void **state)
{
    bench *b = *state;
    fsdp_unit *unit[UNITS];
    fsdp_model *model = make_model(b, unit);
    OK(fsdp_trace_start(b->ctx, 1000, &b->trace));
    enqueue_pass(b, model, unit);
    let_go_and_stop(b);
    fsdp_host_allocator none = {NULL, NULL, NULL, NULL}, libc;
    fsdp__timeline timeline;
    OK(fsdp__host_allocator_resolve(&none, &libc));
    OK(fsdp__timeline_read(&libc, b->trace, 1000, &timeline));
    assert_is_long(bar_of(&timeline, FSDP__SHADE_FORWARD, "h.0"));
    assert_is_long(bar_of(&timeline, FSDP__SHADE_BACKWARD, "h.1"));
    fsdp__timeline_free(&timeline);
    OK(fsdp_model_destroy(model));
}

int main(void)
{
    if (gpu_is_missing_here("test_gpu_trace")) return 77;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_tape_knows_how_long_the_callers_kernels_took, set_up, tear_down),
        cmocka_unit_test_setup_teardown(kernels_in_a_window_are_a_bar_of_its_unit, set_up, tear_down),
    };
    return cmocka_run_group_tests_name("trace", tests, NULL, NULL) > 0;
}
