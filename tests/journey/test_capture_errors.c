/* SPDX-License-Identifier: MIT */
/* What captures and replays refuse, in which words, and what is left behind; in which order things may go. On the CPU, by a
 * backend that captures as CUDA does (graphs.h). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "captured.h"
#include "graphs.h"
#include "ok.h"

typedef struct alone {
    graphs g;
    fsdp_context *ctx;
    captured t;
    graphs_graph *graph;
    fsdp_capture *capture;
} alone;

#define REFUSED(call, code, words) assert_refused((call), (code), (words), #call)

static void assert_refused(fsdp_status status, fsdp_status code, const char *words, const char *call)
{
    if (status != code)
        fail_msg("%s: %s, expected %s: %s", call, fsdp_status_name(status), fsdp_status_name(code), fsdp_last_error());
    if (strstr(fsdp_last_error(), words) == NULL)
        fail_msg("%s: \"%s\" does not say \"%s\"", call, fsdp_last_error(), words);
}

static void open_within(alone *a, const captured_config *config, uint32_t debug, uint64_t timeout_ns)
{
    memset(a, 0, sizeof *a);
    graphs_init(&a->g, fsdp_host_backend(), NULL);
    fsdp_config c = FSDP_CONFIG_INIT;
    c.backend = graphs_backend();
    c.backend_config = &a->g;
    c.debug = debug;
    c.timeout_ns = timeout_ns;
    OK(fsdp_context_create(&c, &a->ctx));
    OK(captured_open(&a->t, config, a->ctx));
}

static void open_alone(alone *a, const captured_config *config, uint32_t debug)
{
    open_within(a, config, debug, 60000000000ull);
}

static void eager(alone *a)
{
    fsdp_adamw_args args = FSDP_ADAMW_ARGS_INIT;
    OK(captured_batch(&a->t, a->t.s));
    OK(captured_step(&a->t, &args));
    a->t.n_steps++;
}

static void capture_step(alone *a)
{
    fsdp_adamw_args args = FSDP_ADAMW_ARGS_INIT;
    OK(fsdp_capture_begin(a->ctx, a->t.s));
    graphs_begin(&a->g, a->t.s);
    OK(captured_step(&a->t, &args));
    OK(fsdp_capture_end(a->ctx, a->t.s, &a->capture));
    a->graph = graphs_end(&a->g, a->t.s);
    assert_non_null(a->graph);
}

static void replay(alone *a)
{
    fsdp_adamw_args args = FSDP_ADAMW_ARGS_INIT;
    OK(fsdp_replay(a->capture, 1, &args, a->t.s));
    OK(graphs_launch(a->graph, a->t.s));
    OK(fsdp_replayed(a->capture, a->t.s));
    a->t.n_steps++;
}

static void close_alone(alone *a)
{
    fsdp_capture_destroy(a->capture);
    OK(captured_close(&a->t));
    graphs_destroy(a->graph);
    OK(fsdp_context_destroy(a->ctx));
    assert_null(graphs_complaint(&a->g));
}

static const captured_config small = {.depth = 1};

static void what_cannot_begin_says_why(void **unused)
{
    (void)unused;
    alone a;
    fsdp_view view = FSDP_VIEW_INIT;
    fsdp_pass_args pass = FSDP_PASS_ARGS_INIT;
    fsdp_adamw_args args = FSDP_ADAMW_ARGS_INIT;
    fsdp_trace *trace;
    fsdp_capture *none = NULL;
    open_alone(&a, &small, 0);
    REFUSED(fsdp_capture_begin(a.ctx, fsdp_context_lane(a.ctx, FSDP_LANE_GATHER)), FSDP_ERR_ARG, "gather is a lane");
    REFUSED(fsdp_capture_begin(a.ctx, NULL), FSDP_ERR_ARG, "stream is NULL");
    REFUSED(fsdp_capture_end(a.ctx, a.t.s, &none), FSDP_ERR_STATE, "no capture is on");
    OK(fsdp_trace_start(a.ctx, 100, &trace));
    REFUSED(fsdp_capture_begin(a.ctx, a.t.s), FSDP_ERR_STATE, "a trace is on");
    OK(fsdp_trace_stop_host(trace));
    fsdp_trace_destroy(trace);
    OK(fsdp_pass_begin(a.t.model, &pass, a.t.s));
    REFUSED(fsdp_capture_begin(a.ctx, a.t.s), FSDP_ERR_STATE, "a pass is begun");
    OK(fsdp_forward_begin(a.t.unit[0], a.t.s, &view));
    REFUSED(fsdp_capture_begin(a.ctx, a.t.s), FSDP_ERR_STATE, "unit h0 is open");
    OK(fsdp_pass_abort(a.t.model, a.t.s));
    OK(fsdp_update_begin(a.t.model, a.t.s));
    REFUSED(fsdp_capture_begin(a.ctx, a.t.s), FSDP_ERR_STATE, "an update is begun");
    OK(fsdp_update_end(a.t.model, a.t.s));
    OK(fsdp_pass_idle(a.t.model, &pass, a.t.s));
    REFUSED(fsdp_capture_begin(a.ctx, a.t.s), FSDP_ERR_STATE, "an update is due");
    OK(fsdp_adamw_step(a.t.opt, &args, a.t.s));
    assert_null(none);
    close_alone(&a);
    for (int k = 0; k < 2; k++) {
        open_alone(&a, &small, k == 0 ? FSDP_DEBUG_SYNC : FSDP_DEBUG_ORDER);
        REFUSED(fsdp_capture_begin(a.ctx, a.t.s), FSDP_ERR_STATE, k == 0 ? "FSDP_DEBUG_SYNC" : "FSDP_DEBUG_ORDER");
        close_alone(&a);
    }
}

/* Any thread may write it at any time. */
static void a_flight_recorder_disturbs_no_capture(void **unused)
{
    (void)unused;
    alone a;
    fsdp_adamw_args args = FSDP_ADAMW_ARGS_INIT;
    char path[] = "/tmp/fsdp_capture_flight_XXXXXX";
    int file = mkstemp(path);
    assert_true(file >= 0);
    close(file);
    open_alone(&a, &small, 0);
    eager(&a);
    OK(fsdp_capture_begin(a.ctx, a.t.s));
    graphs_begin(&a.g, a.t.s);
    OK(captured_step(&a.t, &args));
    OK(fsdp_flight_write_json(a.ctx, path));
    OK(fsdp_capture_end(a.ctx, a.t.s, &a.capture));
    a.graph = graphs_end(&a.g, a.t.s);
    assert_non_null(a.graph);
    OK(fsdp_flight_write_json(a.ctx, path));
    replay(&a);
    OK(fsdp_flight_write_json(a.ctx, path));
    close_alone(&a);
    unlink(path);
}

static void wait_at_gate(void *gate) { (void)pthread_mutex_lock(gate), (void)pthread_mutex_unlock(gate); }

/* It has been told to stop, and the device is not through with it: in a capture nobody could wait for that. */
static void a_trace_that_could_not_be_stopped_is_on(void **unused)
{
    (void)unused;
    alone a;
    fsdp_trace *trace;
    pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
    open_within(&a, &small, 0, 1000000000);
    eager(&a);
    OK(fsdp_trace_start(a.ctx, 100, &trace));
    pthread_mutex_lock(&gate);
    OK(fsdp_stream_host_call(a.t.s, wait_at_gate, &gate));
    REFUSED(fsdp_trace_stop_host(trace), FSDP_ERR_TIMEOUT, "");
    REFUSED(fsdp_capture_begin(a.ctx, a.t.s), FSDP_ERR_STATE, "a trace is on, since what is on it has not run yet");
    pthread_mutex_unlock(&gate);
    OK(fsdp_trace_stop_host(trace));
    capture_step(&a);
    fsdp_trace_destroy(trace); /* it may go at any time from then on */
    replay(&a);
    close_alone(&a);
    pthread_mutex_destroy(&gate);
}

static void a_capture_that_the_library_was_not_told_of_is_refused(void **unused)
{
    (void)unused;
    alone a;
    fsdp_pass_args pass = FSDP_PASS_ARGS_INIT;
    fsdp_adamw_args args = FSDP_ADAMW_ARGS_INIT;
    open_alone(&a, &small, 0);
    OK(fsdp_pass_idle(a.t.model, &pass, a.t.s));
    graphs_begin(&a.g, a.t.s);
    REFUSED(fsdp_adamw_step(a.t.opt, &args, a.t.s), FSDP_ERR_STATE, "is being captured, and the library was not told");
    REFUSED(fsdp_update_begin(a.t.model, a.t.s), FSDP_ERR_STATE, "fsdp_update_begin: stream");
    REFUSED(fsdp_capture_begin(a.ctx, a.t.s), FSDP_ERR_STATE, "call fsdp_capture_begin before the capture begins");
    graphs_destroy(graphs_end(&a.g, a.t.s));
    OK(fsdp_adamw_step(a.t.opt, &args, a.t.s));
    graphs_begin(&a.g, a.t.s);
    REFUSED(fsdp_pass_begin(a.t.model, &pass, a.t.s), FSDP_ERR_STATE, "fsdp_pass_begin: stream");
    REFUSED(fsdp_pass_idle(a.t.model, &pass, a.t.s), FSDP_ERR_STATE, "is being captured");
    graphs_destroy(graphs_end(&a.g, a.t.s));
    args = (fsdp_adamw_args)FSDP_ADAMW_ARGS_INIT;
    OK(captured_step(&a.t, &args));
    close_alone(&a);
}

static void a_backend_without_graphs_says_so(void **unused)
{
    (void)unused;
    const fsdp_backend *const backends[] = {fsdp_host_backend(), fsdp_sim_backend()};
    for (int k = 0; k < 2; k++) {
        fsdp_config c = FSDP_CONFIG_INIT;
        fsdp_context *ctx;
        fsdp_stream *s;
        c.backend = backends[k];
        OK(fsdp_context_create(&c, &ctx));
        OK(fsdp_stream_create(ctx, "compute", &s));
        REFUSED(fsdp_capture_begin(ctx, s), FSDP_ERR_UNSUPPORTED,
                k == 0 ? "the host backend has no graphs" : "the sim backend");
        OK(fsdp_stream_release(s));
        OK(fsdp_context_destroy(ctx));
    }
}

static int never(void *arg, const fsdp_param_range *range, void *dst)
{
    (void)arg, (void)range, (void)dst;
    return 1;
}

static void refuse_host_calls(alone *a, fsdp_event *before, fsdp_work *work)
{
    bool done;
    REFUSED(fsdp_stream_drain_host(a->t.s, 1), FSDP_ERR_STATE, "fsdp_stream_drain_host: a capture is on");
    REFUSED(fsdp_event_is_done(before, &done), FSDP_ERR_STATE, "fsdp_event_is_done: a capture is on");
    REFUSED(fsdp_event_wait_host(before, 1), FSDP_ERR_STATE, "fsdp_event_wait_host: a capture is on");
    REFUSED(fsdp_work_is_done(work, &done), FSDP_ERR_STATE, "fsdp_work_is_done: a capture is on");
    REFUSED(fsdp_work_wait_host(work, 1), FSDP_ERR_STATE, "fsdp_work_wait_host: a capture is on");
    double sum = 1.0;
    REFUSED(fsdp_sum_host(a->ctx, &sum, 1), FSDP_ERR_STATE, "fsdp_sum_host: a capture is on");
    REFUSED(fsdp_barrier_host(a->ctx), FSDP_ERR_STATE, "fsdp_barrier_host: a capture is on");
    REFUSED(fsdp_broadcast_host(a->ctx, &sum, 8, 0), FSDP_ERR_STATE, "fsdp_broadcast_host: a capture is on");
}

static void refuse_calls_of_models(alone *a, fsdp_model *sealed_later)
{
    fsdp_model *made;
    fsdp_step_report report = FSDP_STEP_REPORT_INIT;
    float value;
    uint64_t hash;
    REFUSED(fsdp_model_create(a->ctx, NULL, &made), FSDP_ERR_STATE, "fsdp_model_create: a capture is on");
    REFUSED(fsdp_model_seal(sealed_later), FSDP_ERR_STATE, "fsdp_model_seal: a capture is on");
    REFUSED(fsdp_model_destroy(sealed_later), FSDP_ERR_STATE, "fsdp_model_destroy: a capture is on");
    REFUSED(fsdp_model_fill(a->t.model, never, NULL, FSDP_DTYPE_FP32), FSDP_ERR_STATE,
            "fsdp_model_fill: a capture is on");
    REFUSED(fsdp_param_set(a->t.slim[0], &value, FSDP_DTYPE_FP32), FSDP_ERR_STATE, "fsdp_param_set: a capture is on");
    REFUSED(fsdp_param_get(a->t.slim[0], FSDP_VALUE_MASTER, &value, FSDP_DTYPE_FP32), FSDP_ERR_STATE,
            "fsdp_param_get: a capture");
    REFUSED(fsdp_model_hash(a->t.model, &hash), FSDP_ERR_STATE, "fsdp_model_hash: a capture is on");
    REFUSED(fsdp_pass_abort(a->t.model, a->t.s), FSDP_ERR_STATE, "fsdp_pass_abort: a capture is on");
    REFUSED(fsdp_step_report_get(a->t.model, 1, 1, &report), FSDP_ERR_STATE, "fsdp_step_report_get: a capture is on");
}

static void refuse_making_and_memory(alone *a)
{
    fsdp_stream *stream;
    fsdp_allocator *allocator;
    fsdp_trace *trace;
    void *ptr;
    REFUSED(fsdp_capture_begin(a->ctx, a->t.s), FSDP_ERR_STATE, "fsdp_capture_begin: a capture is on");
    REFUSED(fsdp_stream_create(a->ctx, "late", &stream), FSDP_ERR_STATE, "a capture is on");
    REFUSED(fsdp_stream_release(a->t.second), FSDP_ERR_STATE, "fsdp_stream_release: a capture is on");
    REFUSED(fsdp_trace_start(a->ctx, 10, &trace), FSDP_ERR_STATE, "fsdp_trace_start: a capture is on");
    REFUSED(fsdp_allocator_create(a->ctx, NULL, &allocator), FSDP_ERR_STATE, "fsdp_allocator_create: a capture is on");
    REFUSED(fsdp_allocator_destroy(a->t.allocator), FSDP_ERR_STATE, "fsdp_allocator_destroy: a capture is on");
    REFUSED(fsdp_allocator_trim_host(a->t.allocator), FSDP_ERR_STATE, "fsdp_allocator_trim_host: a capture is on");
    REFUSED(fsdp_allocator_alloc(a->t.allocator, 1u << 24, a->t.s, "big", &ptr), FSDP_ERR_STATE,
            "allocator allocator: no room");
    REFUSED(fsdp_pinned_alloc(a->ctx, 64, &ptr), FSDP_ERR_STATE, "fsdp_pinned_alloc: a capture is on");
    REFUSED(fsdp_pinned_free(a->ctx, a->t.pinned), FSDP_ERR_STATE, "fsdp_pinned_free: a capture is on");
}

static void what_cannot_be_inside_is_refused_by_name(void **unused)
{
    (void)unused;
    alone a;
    open_alone(&a, &small, 0);
    eager(&a);
    eager(&a);
    fsdp_event *before, *inside;
    fsdp_work *work;
    OK(fsdp_event_create(a.ctx, &before));
    OK(fsdp_event_create(a.ctx, &inside));
    OK(fsdp_event_record(before, a.t.s));
    OK(fsdp_barrier(fsdp_context_comm(a.ctx), a.t.s, &work));
    fsdp_model *sealed_later;
    fsdp_step_report report = FSDP_STEP_REPORT_INIT;
    bool done;
    OK(fsdp_model_create(a.ctx, NULL, &sealed_later));
    OK(fsdp_capture_begin(a.ctx, a.t.s));
    graphs_begin(&a.g, a.t.s);
    refuse_calls_of_models(&a, sealed_later);
    refuse_making_and_memory(&a);
    refuse_host_calls(&a, before, work);
    /* Waits for what was before change nothing; an event of inside is one of the graph's. */
    OK(fsdp_stream_wait_event(a.t.s, before));
    OK(fsdp_work_wait(work, a.t.s));
    OK(fsdp_stream_wait_stream(a.t.second, a.t.s));
    OK(fsdp_event_record(inside, a.t.second));
    OK(fsdp_stream_wait_event(a.t.s, inside));
    REFUSED(fsdp_capture_end(a.ctx, a.t.second, &a.capture), FSDP_ERR_STATE,
            "the capture is on stream compute, not second");
    fsdp_adamw_args args = FSDP_ADAMW_ARGS_INIT;
    OK(captured_step(&a.t, &args));
    OK(fsdp_capture_end(a.ctx, a.t.s, &a.capture));
    a.graph = graphs_end(&a.g, a.t.s);
    assert_non_null(a.graph);
    REFUSED(fsdp_event_is_done(inside, &done), FSDP_ERR_STATE, "fsdp_event_is_done: it was recorded inside a capture");
    REFUSED(fsdp_event_wait_host(inside, 1), FSDP_ERR_STATE, "fsdp_event_wait_host: it was recorded inside a capture");
    OK(fsdp_stream_wait_event(a.t.second, inside));
    OK(fsdp_step_report_get(a.t.model, 2, UINT64_MAX, &report));
    REFUSED(fsdp_step_report_get(a.t.model, 3, UINT64_MAX, &report), FSDP_ERR_ARG, "no report of step 3");
    replay(&a);
    eager(&a);
    OK(fsdp_step_report_get(a.t.model, 3, UINT64_MAX, &report));
    OK(fsdp_step_report_get(a.t.model, 4, UINT64_MAX, &report));
    fsdp_work_release(work);
    fsdp_event_destroy(before);
    fsdp_event_destroy(inside);
    OK(fsdp_model_destroy(sealed_later));
    close_alone(&a);
}

/* It says which unit; and the model goes on from there, with the bits that it had. */
static void a_capture_that_ends_elsewhere_is_refused_and_forgotten(void **unused)
{
    (void)unused;
    for (int k = 0; k < 5; k++) {
        alone a;
        captured_config config = {.depth = 1, .held = k == 1, .scratch = k == 4};
        open_alone(&a, &config, 0);
        fsdp_adamw_args args = FSDP_ADAMW_ARGS_INIT;
        fsdp_pass_args pass = FSDP_PASS_ARGS_INIT;
        fsdp_view view = FSDP_VIEW_INIT;
        uint64_t before, after;
        static const char *const words[] = {"unit h0", "unit h0", "unit h1 is open", "an update is due",
                                            "allocator allocator"};
        if (k >= 2) eager(&a);
        OK(fsdp_model_hash(a.t.model, &before));
        OK(fsdp_capture_begin(a.ctx, a.t.s));
        graphs_begin(&a.g, a.t.s);
        if (k == 2) {
            OK(fsdp_pass_begin(a.t.model, &pass, a.t.s));
            OK(fsdp_forward_begin(a.t.unit[1], a.t.s, &view));
        } else if (k == 3) {
            OK(fsdp_pass_idle(a.t.model, &pass, a.t.s));
        } else {
            OK(captured_step(&a.t, &args));
        }
        void *block = NULL;
        if (k == 4) OK(fsdp_allocator_alloc(a.t.allocator, 1000, a.t.s, "kept", &block));
        REFUSED(fsdp_capture_end(a.ctx, a.t.s, &a.capture), FSDP_ERR_STATE, words[k]);
        assert_null(a.capture);
        a.graph = graphs_end(&a.g, a.t.s);
        assert_non_null(a.graph);
        OK(fsdp_allocator_free(a.t.allocator, block));
        OK(fsdp_model_hash(a.t.model, &after));
        assert_true(before == after);
        uint64_t n = a.t.n_steps;
        for (int i = 0; i < 3; i++) eager(&a);
        fsdp_step_report report = FSDP_STEP_REPORT_INIT;
        OK(fsdp_step_report_get(a.t.model, n + 3, UINT64_MAX, &report));
        assert_int_equal(report.updates, n + 3);
        graphs_destroy(a.graph);
        capture_step(&a); /* now it can */
        replay(&a);
        OK(fsdp_step_report_get(a.t.model, n + 4, UINT64_MAX, &report));
        assert_int_equal(report.updates, n + 4);
        close_alone(&a);
    }
}

static void a_replay_in_another_state_is_refused(void **unused)
{
    (void)unused;
    alone a;
    fsdp_adamw_args args[2] = {FSDP_ADAMW_ARGS_INIT, FSDP_ADAMW_ARGS_INIT};
    fsdp_pass_args pass = FSDP_PASS_ARGS_INIT;
    const captured_config config = {.depth = 1, .scratch = true};
    open_alone(&a, &config, 0);
    eager(&a);
    capture_step(&a);
    REFUSED(fsdp_replay(a.capture, 0, NULL, a.t.s), FSDP_ERR_ARG, "0 fsdp_adamw_args, and 1 fsdp_adamw_step");
    REFUSED(fsdp_replay(a.capture, 2, args, a.t.s), FSDP_ERR_ARG, "2 fsdp_adamw_args");
    REFUSED(fsdp_replay(a.capture, 1, NULL, a.t.s), FSDP_ERR_ARG, "args");
    REFUSED(fsdp_replay(a.capture, 1, args, fsdp_context_lane(a.ctx, FSDP_LANE_COPY)), FSDP_ERR_ARG, "copy is a lane");
    args[0].lr = -1.0f;
    REFUSED(fsdp_replay(a.capture, 1, args, a.t.s), FSDP_ERR_ARG, "fsdp_replay: lr is -1");
    args[0].lr = 0.01f;
    REFUSED(fsdp_replayed(a.capture, a.t.s), FSDP_ERR_STATE, "fsdp_replay, then the graph's launch");
    OK(fsdp_pass_begin(a.t.model, &pass, a.t.s));
    REFUSED(fsdp_replay(a.capture, 1, args, a.t.s), FSDP_ERR_STATE, "a pass is begun");
    OK(fsdp_pass_abort(a.t.model, a.t.s));
    REFUSED(fsdp_replay(a.capture, 1, args, a.t.s), FSDP_ERR_STATE,
            "unit h0 of model model is not gathered now and was gathered");
    eager(&a);
    /* Blocks that came since may have the bytes of what the capture took for itself. */
    void *block;
    OK(fsdp_allocator_alloc(a.t.allocator, 1000, a.t.s, "late", &block));
    REFUSED(fsdp_replay(a.capture, 1, args, a.t.s), FSDP_ERR_STATE, "allocator allocator");
    OK(fsdp_allocator_free(a.t.allocator, block));
    OK(fsdp_replay(a.capture, 1, args, a.t.s));
    REFUSED(fsdp_replay(a.capture, 1, args, a.t.s), FSDP_ERR_STATE, "a replay on stream compute is not ended");
    REFUSED(fsdp_replayed(a.capture, a.t.second), FSDP_ERR_ARG, "was called for stream compute, not second");
    REFUSED(fsdp_capture_begin(a.ctx, a.t.s), FSDP_ERR_STATE, "call fsdp_replayed");
    OK(graphs_launch(a.graph, a.t.s));
    OK(fsdp_replayed(a.capture, a.t.s));
    a.t.n_steps++;
    replay(&a);
    close_alone(&a);
}

/* ---- Ends ---- */

static void the_ninth_step_of_a_capture_is_refused(void **unused)
{
    (void)unused;
    alone a;
    fsdp_adamw_args args = FSDP_ADAMW_ARGS_INIT, eight[FSDP_REPORT_RING];
    fsdp_pass_args pass = FSDP_PASS_ARGS_INIT;
    open_alone(&a, &small, 0);
    eager(&a);
    OK(fsdp_capture_begin(a.ctx, a.t.s));
    graphs_begin(&a.g, a.t.s);
    for (int i = 0; i < FSDP_REPORT_RING; i++) OK(captured_step(&a.t, &args));
    OK(fsdp_capture_end(a.ctx, a.t.s, &a.capture));
    a.graph = graphs_end(&a.g, a.t.s);
    for (int i = 0; i < FSDP_REPORT_RING; i++) eight[i] = args, eight[i].lr = 0.125f * (float)i;
    OK(fsdp_replay(a.capture, FSDP_REPORT_RING, eight, a.t.s));
    OK(graphs_launch(a.graph, a.t.s));
    OK(fsdp_replayed(a.capture, a.t.s));
    for (uint64_t i = 0; i < FSDP_REPORT_RING; i++) {
        fsdp_step_report report = FSDP_STEP_REPORT_INIT;
        OK(fsdp_step_report_get(a.t.model, i + 2, UINT64_MAX, &report));
        assert_true(report.lr == 0.125f * (float)i && report.updates == i + 2);
    }
    fsdp_capture *second = NULL;
    OK(fsdp_capture_begin(a.ctx, a.t.s));
    graphs_begin(&a.g, a.t.s);
    for (int i = 0; i < FSDP_REPORT_RING; i++) OK(captured_step(&a.t, &args));
    OK(fsdp_pass_idle(a.t.model, &pass, a.t.s));
    REFUSED(fsdp_adamw_step(a.t.opt, &args, a.t.s), FSDP_ERR_STATE, "has had 8 in this capture");
    REFUSED(fsdp_capture_end(a.ctx, a.t.s, &second), FSDP_ERR_STATE, "an update is due");
    graphs_destroy(graphs_end(&a.g, a.t.s));
    close_alone(&a);
}

static void capture_graph_and_model_go_in_any_order(void **unused)
{
    (void)unused;
    static const char *const orders[] = {"cgm", "cmg", "gcm", "gmc", "mcg", "mgc"};
    for (int k = 0; k < 6; k++) {
        alone a;
        const captured_config config = {.depth = 1, .scratch = true};
        fsdp_adamw_args args = FSDP_ADAMW_ARGS_INIT;
        open_alone(&a, &config, 0);
        eager(&a);
        capture_step(&a);
        replay(&a);
        for (const char *what = orders[k]; *what != 0; what++) {
            if (*what == 'c') fsdp_capture_destroy(a.capture), a.capture = NULL;
            if (*what == 'g') graphs_destroy(a.graph), a.graph = NULL;
            if (*what == 'm') OK(captured_close(&a.t));
            if (*what == 'm' && a.capture != NULL) {
                fsdp_stream *s;
                OK(fsdp_stream_create(a.ctx, "later", &s));
                REFUSED(fsdp_replay(a.capture, 1, &args, s), FSDP_ERR_STATE, "model model was destroyed");
                REFUSED(fsdp_replayed(a.capture, s), FSDP_ERR_STATE, "fsdp_replay");
                OK(fsdp_stream_release(s));
                REFUSED(fsdp_context_destroy(a.ctx), FSDP_ERR_STATE, "1 capture of yours");
            }
        }
        OK(fsdp_context_destroy(a.ctx));
        assert_null(graphs_complaint(&a.g));
    }
}

static void an_allocator_that_goes_takes_its_captures_along(void **unused)
{
    (void)unused;
    alone a;
    fsdp_adamw_args args = FSDP_ADAMW_ARGS_INIT;
    open_alone(&a, &small, 0);
    fsdp_allocator *own;
    void *block;
    OK(fsdp_allocator_create(a.ctx, NULL, &own));
    OK(fsdp_allocator_alloc(own, 1000, a.t.s, "before", &block));
    OK(fsdp_allocator_free(own, block));
    eager(&a);
    OK(fsdp_capture_begin(a.ctx, a.t.s));
    graphs_begin(&a.g, a.t.s);
    OK(fsdp_allocator_alloc(own, 1000, a.t.s, "inside", &block));
    OK(fsdp_stream_fill(a.t.s, block, 1, 1000));
    OK(fsdp_allocator_free(own, block));
    OK(captured_step(&a.t, &args));
    OK(fsdp_capture_end(a.ctx, a.t.s, &a.capture));
    a.graph = graphs_end(&a.g, a.t.s);
    replay(&a);
    OK(fsdp_allocator_trim_host(a.t.allocator)); /* which gave nothing to the capture */
    replay(&a);
    OK(fsdp_allocator_trim_host(own));
    REFUSED(fsdp_replay(a.capture, 1, &args, a.t.s), FSDP_ERR_STATE,
            "allocator allocator, whose blocks it uses, was trimmed");
    OK(fsdp_allocator_destroy(own));
    close_alone(&a);
}

static uint64_t n_later; /* of a group than the one before, as sentences of the backend number them */
static fsdp_status note_number(void *comm, void *stream, const fsdp_collective *list, uint32_t n)
{
    n_later = list[0].number - n_later;
    return fsdp_host_backend()->comm->enqueue(comm, stream, list, n);
}

static void captures_and_replays_count_among_the_collectives(void **unused)
{
    (void)unused;
    alone a;
    fsdp_backend noting = *fsdp_host_backend();
    fsdp_comm_ops comm = *noting.comm;
    noting.comm = &comm, comm.enqueue = note_number;
    open_alone(&a, &small, 0);
    eager(&a);
    a.g.to.inner = &noting;
    OK(fsdp_barrier(fsdp_context_comm(a.ctx), a.t.s, NULL));
    capture_step(&a);
    replay(&a);
    OK(fsdp_barrier(fsdp_context_comm(a.ctx), a.t.s, NULL));
    assert_int_equal(n_later, 3);
    close_alone(&a);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_cannot_begin_says_why),
        cmocka_unit_test(a_flight_recorder_disturbs_no_capture),
        cmocka_unit_test(a_trace_that_could_not_be_stopped_is_on),
        cmocka_unit_test(a_capture_that_the_library_was_not_told_of_is_refused),
        cmocka_unit_test(a_backend_without_graphs_says_so),
        cmocka_unit_test(what_cannot_be_inside_is_refused_by_name),
        cmocka_unit_test(a_capture_that_ends_elsewhere_is_refused_and_forgotten),
        cmocka_unit_test(a_replay_in_another_state_is_refused),
        cmocka_unit_test(the_ninth_step_of_a_capture_is_refused),
        cmocka_unit_test(capture_graph_and_model_go_in_any_order),
        cmocka_unit_test(an_allocator_that_goes_takes_its_captures_along),
        cmocka_unit_test(captures_and_replays_count_among_the_collectives),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
