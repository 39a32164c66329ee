/* SPDX-License-Identifier: MIT */
/* Right calls at the wrong moment: before each call of a step, everything that has no place there. The steps come out to the
 * bit as if nothing wrong had been asked. */
#include "errors.h"

#include <stdatomic.h>
#include <string.h>

#define STATE(call, fragment) REFUSED(call, FSDP_ERR_STATE, fragment)

enum { STEPS = 3 };

static rank r;
static fsdp_stream *second;
static fsdp_view view;
static float values[280];

static fsdp_pass_args pass_args(int32_t pass, uint32_t index, uint32_t count)
{
    fsdp_pass_args args = FSDP_PASS_ARGS_INIT;
    args.pass = pass, args.index = index, args.count = count;
    return args;
}

static void open_program(fsdp_accumulation accumulation)
{
    r = rank_default();
    r.recipe.model.accumulation = accumulation;
    OK(open_all(&r));
    OK(fsdp_stream_create(r.ctx, "second", &second));
    view = (fsdp_view)FSDP_VIEW_INIT;
}

static void close_program(void)
{
    OK(fsdp_stream_release(second));
    close_all(&r);
    assert_string_equal(r.failed, "");
}

/* ---- What is wrong where ---- */

static void wrong_since_seal(void)
{
    fsdp_unit *unit = NULL;
    fsdp_param *param = NULL;
    fsdp_adamw *opt = NULL;
    fsdp_memory memory = FSDP_MEMORY_INIT;
    fsdp_visit visit = {r.unit[1], FSDP_USE_READ, 0};
    uint64_t dim = 3;
    int32_t pass = 0;
    STATE(fsdp_model_add_unit(r.model, "late", NULL, &unit),
          "model model is sealed, nothing can be added: register before fsdp_model_seal");
    STATE(fsdp_unit_add_param(r.unit[1], "late", 1, &dim, NULL, &param),
          "parameter late of unit h.1: model model is sealed");
    STATE(fsdp_model_add_pass(r.model, "late", 1, &visit, &pass),
          "pass late: model model is sealed: add passes before");
    STATE(fsdp_adamw_create(r.model, NULL, &opt), "model model is sealed: declare its optimizer before");
    STATE(fsdp_model_seal(r.model), "model model is sealed already");
    STATE(fsdp_model_predict(r.model, &memory), "is sealed: ask fsdp_model_memory");
    assert_true(unit == NULL && param == NULL && opt == NULL && pass == 0);
}

static void wrong_outside_a_pass(void)
{
    STATE(fsdp_forward_begin(r.unit[1], r.s, &view),
          "fsdp_forward_begin: unit h.1: no pass is begun: call fsdp_pass_begin");
    STATE(fsdp_backward_begin(r.unit[2], r.s, &view), "fsdp_backward_begin: unit h.2: no pass is begun");
    STATE(fsdp_forward_end(r.unit[1], r.s), "unit h.1 has no open forward window: call fsdp_forward_begin first");
    STATE(fsdp_backward_end(r.unit[1], r.s), "unit h.1 has no open backward window: call fsdp_backward_begin first");
    STATE(fsdp_unit_use(r.unit[3], second), "unit h.3 is not open");
    STATE(fsdp_pass_end(r.model, r.s), "fsdp_pass_end: no pass is begun");
}

static void wrong_outside_an_update(void)
{
    STATE(fsdp_update_unit(r.unit[1], r.s), "fsdp_update_unit: no update is begun: call fsdp_update_begin first");
    STATE(fsdp_update_end(r.model, r.s), "fsdp_update_end: no update is begun");
}

static void wrong_inside_a_step(void)
{
    uint64_t hash;
    STATE(fill_model(&r),
          "fsdp_model_fill: model model is inside a step: finish pass and update first, or fsdp_pass_abort");
    STATE(fsdp_param_set(r.param[1][0], values, FSDP_DTYPE_FP32), "fsdp_param_set: model model is inside a step");
    STATE(fsdp_param_get(r.param[1][0], FSDP_VALUE_MASTER, values, FSDP_DTYPE_FP32),
          "fsdp_param_get: model model is inside a step");
    STATE(fsdp_model_hash(r.model, &hash), "fsdp_model_hash: model model is inside a step");
}

static void wrong_inside_a_pass(void)
{
    fsdp_pass_args args = pass_args(FSDP_PASS_TRAIN, 0, 1);
    fsdp_adamw_args adamw = FSDP_ADAMW_ARGS_INIT;
    STATE(fsdp_pass_begin(r.model, &args, r.s), "pass TRAIN is not ended: call fsdp_pass_end");
    STATE(fsdp_update_begin(r.model, r.s), "fsdp_update_begin: ");
    STATE(fsdp_adamw_step(r.opt, &adamw, r.s), "fsdp_adamw_step: ");
}

/* Unit u is open, in a window of this kind. */
static void wrong_while_open(uint32_t u, bool backward)
{
    fsdp_unit *unit = r.unit[u];
    STATE(fsdp_pass_end(r.model, r.s), "is open: call fsdp_");
    STATE(fsdp_update_begin(r.model, r.s), "is open: end it, then the pass, then update");
    STATE(fsdp_forward_begin(unit, second, &view),
          "is open on stream compute, not second: bring a second stream in with fsdp_unit_use");
    STATE(fsdp_backward_begin(unit, second, &view), "is open on stream compute, not second");
    STATE(backward ? fsdp_backward_end(unit, second) : fsdp_forward_end(unit, second),
          "was opened on stream compute, not second: end it there");
    STATE(backward ? fsdp_forward_end(unit, r.s) : fsdp_backward_end(unit, r.s),
          backward ? "has no open forward window" : "has no open backward window");
    STATE(fsdp_stream_release(r.s), " open on stream compute: end ");
}

/* By the calls of micro_step: which unit has just been opened before call number i, or −1. */
static const int opened[] = {-1, -1, 0, 1, -1, 2, -1, 3, -1, -1, 0, 3, -1, 2, -1, 1, -1, -1, -1};

static void everything_wrong(rank *program, uint32_t call)
{
    assert_ptr_equal(program, &r);
    wrong_since_seal();
    wrong_outside_an_update();
    if (call == 0 || call == 18) wrong_outside_a_pass();
    if (call > 0) wrong_inside_a_step();
    if (call > 0 && call < 18) wrong_inside_a_pass();
    if (opened[call] >= 0) wrong_while_open((uint32_t)opened[call], call > 9);
    if (call == 0) {
        fsdp_adamw_args adamw = FSDP_ADAMW_ARGS_INIT;
        STATE(fsdp_adamw_step(r.opt, &adamw, r.s), "there are no new gradients: run a pass with BACKWARD visits first");
    }
    if (call == 18) {
        fsdp_pass_args train = pass_args(FSDP_PASS_TRAIN, 0, 1), eval = pass_args(FSDP_PASS_EVAL, 0, 1);
        STATE(fsdp_pass_begin(r.model, &train, r.s),
              "the gradients of pass TRAIN wait for an update: call an optimizer");
        STATE(fsdp_pass_begin(r.model, &eval, r.s), "wait for an update");
    }
}

static uint64_t train(between at, fsdp_model_stats *out_stats)
{
    uint64_t hash;
    open_program(FSDP_ACCUMULATE_NONE);
    for (int i = 0; i < STEPS; i++) {
        OK(micro_step(&r, 0, 1, at));
        OK(update(&r));
    }
    OK(hash_model(&r, &hash));
    *out_stats = (fsdp_model_stats)FSDP_MODEL_STATS_INIT;
    OK(fsdp_model_stats_get(r.model, out_stats));
    close_program();
    return hash;
}

static void calls_at_the_wrong_moment_are_refused_and_change_nothing(void **state)
{
    (void)state;
    fsdp_model_stats clean, after;
    uint64_t hash = train(NULL, &clean);
    assert_int_equal(train(everything_wrong, &after), hash);
    assert_memory_equal(&clean, &after, sizeof clean);
}

/* ---- The update bracket ---- */

static void an_update_bracket_is_entered_once_and_left_before_anything_else(void **state)
{
    (void)state;
    fsdp_pass_args args = pass_args(FSDP_PASS_TRAIN, 0, 1);
    fsdp_adamw_args adamw = FSDP_ADAMW_ARGS_INIT;
    open_program(FSDP_ACCUMULATE_NONE);
    OK(micro_step(&r, 0, 1, NULL));
    OK(fsdp_update_begin(r.model, r.s));
    STATE(fsdp_update_begin(r.model, r.s), "fsdp_update_begin: an update is begun already");
    STATE(fsdp_adamw_step(r.opt, &adamw, r.s), "fsdp_adamw_step: an update is begun already");
    STATE(fsdp_pass_begin(r.model, &args, r.s), "the update is not ended: call fsdp_update_end");
    STATE(fsdp_pass_abort(r.model, r.s), "an update is begun: call fsdp_update_end");
    wrong_outside_a_pass();
    wrong_inside_a_step();
    OK(fsdp_update_unit(r.unit[2], r.s));
    STATE(fsdp_update_unit(r.unit[2], r.s), "unit h.2 was called updated already in this bracket");
    OK(fsdp_update_end(r.model, r.s));
    wrong_outside_an_update();
    OK(train_step(&r));
    close_program();
}

/* ---- Micro-steps ---- */

static void micro_steps_come_in_order_and_all(void **state)
{
    (void)state;
    open_program(FSDP_ACCUMULATE_REDUCE_EACH);
    fsdp_pass_args args = pass_args(FSDP_PASS_TRAIN, 1, 3);
    STATE(fsdp_pass_begin(r.model, &args, r.s), "pass TRAIN begins with micro-step 1 of 3: begin with 0");
    OK(micro_step(&r, 0, 3, NULL));
    static const struct {
        int32_t pass;
        uint32_t index, count;
    } wrong[] = {{FSDP_PASS_TRAIN, 0, 3}, {FSDP_PASS_TRAIN, 2, 3}, {FSDP_PASS_TRAIN, 1, 2},
                 {FSDP_PASS_TRAIN, 1, 4}, {FSDP_PASS_EVAL, 1, 3},  {FSDP_PASS_EVAL, 0, 1}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        args = pass_args(wrong[i].pass, wrong[i].index, wrong[i].count);
        STATE(fsdp_pass_begin(r.model, &args, r.s),
              "but TRAIN has had 1 of 3: go on with micro-step 1, or fsdp_pass_abort");
    }
    fsdp_adamw_args adamw = FSDP_ADAMW_ARGS_INIT;
    STATE(fsdp_adamw_step(r.opt, &adamw, r.s),
          "micro-step 1 of 3 is the last so far: run the others, or fsdp_pass_abort");
    STATE(fsdp_update_begin(r.model, r.s), "micro-step 1 of 3 is the last so far");
    wrong_inside_a_step();
    OK(micro_step(&r, 1, 3, NULL));
    OK(micro_step(&r, 2, 3, NULL));
    OK(update(&r));
    close_program();
}

static void a_step_can_be_given_up_at_any_call(void **state)
{
    (void)state;
    uint64_t clean, after;
    open_program(FSDP_ACCUMULATE_NONE);
    for (int i = 0; i < STEPS; i++) OK(train_step(&r));
    OK(hash_model(&r, &clean));
    close_program();

    open_program(FSDP_ACCUMULATE_NONE);
    OK(train_step(&r));
    for (uint32_t stop = 1; stop <= 18; stop++) {
        fsdp_pass_args args = pass_args(FSDP_PASS_TRAIN, 0, 1);
        OK(fsdp_pass_begin(r.model, &args, r.s));
        static const struct {
            uint32_t unit;
            bool backward, end;
        } call[] = {{0, 0, 0}, {1, 0, 0}, {1, 0, 1}, {2, 0, 0}, {2, 0, 1}, {3, 0, 0}, {3, 0, 1}, {0, 0, 1},
                    {0, 1, 0}, {3, 1, 0}, {3, 1, 1}, {2, 1, 0}, {2, 1, 1}, {1, 1, 0}, {1, 1, 1}, {0, 1, 1}};
        for (uint32_t i = 0; i + 1 < stop && i < 16; i++) {
            fsdp_unit *u = r.unit[call[i].unit];
            if (call[i].end) OK(call[i].backward ? fsdp_backward_end(u, r.s) : fsdp_forward_end(u, r.s));
            else OK(call[i].backward ? fsdp_backward_begin(u, r.s, &view) : fsdp_forward_begin(u, r.s, &view));
            if (!call[i].end) OK(compute(&r, &view, 7.0f));
            if (!call[i].end && i % 3 == 0) OK(fsdp_unit_use(u, second));
        }
        if (stop == 18) OK(fsdp_pass_end(r.model, r.s));
        OK(fsdp_pass_abort(r.model, r.s));
    }
    OK(fsdp_pass_abort(r.model, r.s)); /* nothing is begun: nothing happens */
    OK(train_step(&r));
    OK(train_step(&r));
    OK(hash_model(&r, &after));
    assert_int_equal(clean, after);
    close_program();
}

/* ---- Passes and streams ---- */

static void an_evaluation_has_no_gradients(void **state)
{
    (void)state;
    open_program(FSDP_ACCUMULATE_NONE);
    fsdp_pass_args args = pass_args(FSDP_PASS_EVAL, 0, 1);
    OK(fsdp_pass_begin(r.model, &args, r.s));
    STATE(fsdp_backward_begin(r.unit[1], r.s, &view), "unit h.1: pass EVAL has no BACKWARD visits");
    OK(fsdp_forward_begin(r.unit[1], r.s, &view));
    OK(fsdp_forward_end(r.unit[1], r.s));
    OK(fsdp_pass_end(r.model, r.s));
    OK(train_step(&r));
    close_program();
}

static void a_unit_has_four_further_streams(void **state)
{
    (void)state;
    fsdp_stream *more[5];
    open_program(FSDP_ACCUMULATE_NONE);
    fsdp_pass_args args = pass_args(FSDP_PASS_EVAL, 0, 1);
    OK(fsdp_pass_begin(r.model, &args, r.s));
    OK(fsdp_forward_begin(r.unit[1], r.s, &view));
    for (int i = 0; i < 5; i++) OK(fsdp_stream_create(r.ctx, "more", &more[i]));
    for (int i = 0; i < 4; i++) OK(fsdp_unit_use(r.unit[1], more[i]));
    OK(fsdp_unit_use(r.unit[1], more[0])); /* once more is no more */
    STATE(fsdp_unit_use(r.unit[1], more[4]), "unit h.1 is used by 4 further streams already");
    STATE(fsdp_stream_release(more[2]), "1 unit is open on stream more");
    OK(fsdp_forward_end(r.unit[1], r.s));
    for (int i = 0; i < 5; i++) OK(fsdp_stream_release(more[i]));
    OK(fsdp_pass_end(r.model, r.s));
    close_program();
}

static void objects_go_before_their_context(void **state)
{
    (void)state;
    fsdp_event *event;
    fsdp_trace *trace;
    fsdp_allocator *a;
    fsdp_work *work;
    fsdp_stream *s, *other;
    rank o = rank_default();
    OK(open_context(&o));
    s = o.s;
    OK(fsdp_event_create(o.ctx, &event));
    OK(fsdp_trace_start(o.ctx, 10, &trace));
    OK(fsdp_allocator_create(o.ctx, NULL, &a));
    OK(fsdp_barrier(fsdp_context_comm(o.ctx), s, &work));
    OK(fsdp_model_create(o.ctx, NULL, &o.model));
    OK(fsdp_stream_create(o.ctx, "copy", &other));
    STATE(fsdp_context_destroy(o.ctx),
          "fsdp_context_destroy: 1 model, 1 allocator, 2 streams (compute, copy), 1 event, "
          "1 work, 1 trace of yours still live: destroy or release them first");
    OK(fsdp_stream_release(other));
    fsdp_event_destroy(event);
    fsdp_trace_destroy(trace);
    OK(fsdp_allocator_destroy(a));
    fsdp_work_release(work);
    OK(fsdp_model_destroy(o.model));
    STATE(fsdp_context_destroy(o.ctx), "fsdp_context_destroy: 1 stream (compute) of yours still live");
    OK(fsdp_stream_release(s));
    OK(fsdp_context_destroy(o.ctx));
}

static void before_seal_there_is_nothing_to_train(void **state)
{
    (void)state;
    rank o = rank_default();
    fsdp_pass_args args = pass_args(FSDP_PASS_TRAIN, 0, 1);
    fsdp_adamw_args adamw = FSDP_ADAMW_ARGS_INIT;
    fsdp_step_report report = FSDP_STEP_REPORT_INIT;
    fsdp_memory memory = FSDP_MEMORY_INIT;
    fsdp_adamw *another = NULL;
    const fsdp_shard_segment *segments;
    uint32_t n;
    uint64_t hash;
    static const char *const said = "model model is not sealed: call fsdp_model_seal first";
    OK(open_context(&o));
    OK(fsdp_model_create(o.ctx, NULL, &o.model));
    STATE(fsdp_model_seal(o.model), "model model has no unit: add one with fsdp_model_add_unit");
    STATE(fsdp_model_predict(o.model, &memory), "model model has no unit");
    OK(register_model(&o));
    STATE(fsdp_adamw_create(o.model, NULL, &another), "model model has an optimizer");
    STATE(fsdp_pass_begin(o.model, &args, o.s), said);
    STATE(fsdp_pass_end(o.model, o.s), said);
    STATE(fsdp_pass_abort(o.model, o.s), "model model is not sealed");
    STATE(fsdp_forward_begin(o.unit[0], o.s, &view), said);
    STATE(fsdp_forward_end(o.unit[0], o.s), said);
    STATE(fsdp_backward_begin(o.unit[0], o.s, &view), said);
    STATE(fsdp_backward_end(o.unit[0], o.s), said);
    STATE(fsdp_unit_use(o.unit[0], o.s), said);
    STATE(fsdp_update_begin(o.model, o.s), said);
    STATE(fsdp_update_unit(o.unit[0], o.s), said);
    STATE(fsdp_update_end(o.model, o.s), said);
    STATE(fsdp_adamw_step(o.opt, &adamw, o.s), said);
    STATE(fsdp_step_sum(o.model, 0, values, o.s), said);
    STATE(fsdp_step_report_get(o.model, 1, 1, &report), said);
    STATE(fsdp_unit_shard(o.unit[0], &segments, &n), said);
    STATE(fill_model(&o), said);
    STATE(fsdp_param_set(o.param[0][0], values, FSDP_DTYPE_FP32), said);
    STATE(fsdp_param_get(o.param[0][0], FSDP_VALUE_MASTER, values, FSDP_DTYPE_FP32), said);
    STATE(fsdp_model_hash(o.model, &hash), said);
    STATE(fsdp_model_memory(o.model, &memory), "model model is not sealed: ask fsdp_model_predict");
    OK(fsdp_model_seal(o.model));
    OK(fill_model(&o));
    OK(train_step(&o));
    close_all(&o);
    assert_string_equal(o.failed, "");
}

/* ---- On two ranks, whose buffers are not their shards ---- */

static void reduce_twice(rank *o)
{
    uint64_t hash = 0;
    fsdp_view v = FSDP_VIEW_INIT;
    fsdp_pass_args args = pass_args(FSDP_PASS_TRAIN, 0, 1);
    EXPECT_OK(o, open_all(o));
    EXPECT_OK(o, fsdp_pass_begin(o->model, &args, o->s));
    EXPECT_OK(o, fsdp_backward_begin(o->unit[2], o->s, &v));
    EXPECT_OK(o, compute(o, &v, 1.0f));
    EXPECT_OK(o, fsdp_backward_end(o->unit[2], o->s));
    rank_keep(o, fsdp_backward_begin(o->unit[2], o->s, &v));
    EXPECT_OK(o, fsdp_pass_end(o->model, o->s));
    EXPECT_OK(o, update(o));
    EXPECT_OK(o, train_step(o));
    EXPECT_OK(o, hash_model(o, &hash));
    close_all(o);
}
static void a_second_reduction_must_be_declared(void **state)
{
    (void)state;
    rank ranks[2] = {rank_default(), rank_default()};
    run_ranks(ranks, 2, reduce_twice);
    for (int i = 0; i < 2; i++)
        assert_kept(&ranks[i], FSDP_ERR_STATE,
                    "unit h.2 was reduced in this step already, and no pass says that it is visited backward twice: "
                    "leave its window open until its last use, or declare such a pass");
}

/* Units that nobody planned to be open together. */
static void open_too_many(rank *o)
{
    fsdp_view v = FSDP_VIEW_INIT;
    fsdp_pass_args args = pass_args(FSDP_PASS_TRAIN, 0, 1);
    bool backward = *(bool *)o->arg;
    fsdp_status (*begin)(fsdp_unit *, fsdp_stream *, fsdp_view *) = backward ? fsdp_backward_begin : fsdp_forward_begin;
    fsdp_status (*end)(fsdp_unit *, fsdp_stream *) = backward ? fsdp_backward_end : fsdp_forward_end;
    o->recipe.model.depth = backward ? 3 : 1; /* all full buffers have room; gradients have two in flight */
    for (uint32_t u = 0; u < UNITS; u++)
        o->recipe.dims[u][0][0] = 128; /* 4096 bytes a unit: no slack from granularity */
    EXPECT_OK(o, open_all(o));
    EXPECT_OK(o, train_step(o));
    EXPECT_OK(o, fsdp_pass_begin(o->model, &args, o->s));
    EXPECT_OK(o, begin(o->unit[0], o->s, &v)); /* its own bytes would do otherwise */
    EXPECT_OK(o, begin(o->unit[3], o->s, &v));
    EXPECT_OK(o, begin(o->unit[2], o->s, &v));
    rank_keep(o, begin(o->unit[1], o->s, &v));
    EXPECT_OK(o, end(o->unit[3], o->s));
    EXPECT_OK(o, begin(o->unit[1], o->s, &v)); /* what was said to do */
    EXPECT_OK(o, end(o->unit[2], o->s));
    EXPECT_OK(o, end(o->unit[1], o->s));
    EXPECT_OK(o, fsdp_pass_abort(o->model, o->s));
    EXPECT_OK(o, train_step(o));
    EXPECT_OK(o, fsdp_stream_drain_host(o->s, 10 * second_ns));
    close_all(o);
}

static void units_that_have_no_room_together_can_be_opened_one_after_another(void **state)
{
    (void)state;
    for (int b = 0; b < 2; b++) {
        bool backward = b == 1;
        rank ranks[2] = {rank_default(), rank_default()};
        ranks[0].arg = ranks[1].arg = &backward;
        run_ranks(ranks, 2, open_too_many);
        for (int i = 0; i < 2; i++) {
            assert_kept(&ranks[i], FSDP_ERR_NO_MEMORY,
                        backward ? "gradient bytes have no place in the grad range of"
                                 : "bytes have no place in the gather range of");
            assert_kept(&ranks[i], FSDP_ERR_NO_MEMORY, "unit h.1: ");
            assert_kept(&ranks[i], FSDP_ERR_NO_MEMORY, "Close units, or declare this order as a pass");
            assert_kept(&ranks[i], FSDP_ERR_NO_MEMORY, "live h.3 on "); /* who holds the bytes */
        }
    }
}

static atomic_int n_nan;

static void count_nan(void *arg)
{
    const float *value = *(float *const *)arg;
    for (int i = 0; i < 280; i++) n_nan += value[i] != value[i];
}

/* A view is good until its end hook; with the debug flag, what is read after it is no number. */
static void read_after_the_end(rank *o)
{
    fsdp_view v = FSDP_VIEW_INIT;
    fsdp_pass_args args = pass_args(FSDP_PASS_EVAL, 0, 1);
    o->recipe.model.depth = 0;
    EXPECT_OK(o, open_all(o));
    EXPECT_OK(o, fsdp_pass_begin(o->model, &args, o->s));
    EXPECT_OK(o, fsdp_forward_begin(o->unit[1], o->s, &v));
    void *weight = v.params[0];
    EXPECT_OK(o, fsdp_stream_host_call(o->s, count_nan, &weight));
    EXPECT_OK(o, fsdp_stream_drain_host(o->s, 10 * second_ns));
    EXPECT(o, n_nan == 0);
    (void)meeting_wait(o->meet, 50 * second_ns);
    EXPECT_OK(o, fsdp_forward_end(o->unit[1], o->s));
    EXPECT_OK(o, fsdp_stream_host_call(o->s, count_nan, &weight));
    EXPECT_OK(o, fsdp_stream_drain_host(o->s, 10 * second_ns));
    EXPECT_OK(o, fsdp_pass_end(o->model, o->s));
    close_all(o);
}

static void a_view_after_its_end_shows_no_numbers_when_asked_to(void **state)
{
    (void)state;
    rank ranks[2] = {rank_default(), rank_default()};
    ranks[0].debug = ranks[1].debug = FSDP_DEBUG_POISON;
    n_nan = 0;
    run_ranks(ranks, 2, read_after_the_end);
    assert_int_equal(n_nan, 2 * 280);
}

int run_state_errors(void)
{
#define TEST(name) cmocka_unit_test_setup(name, errors_deadline)
    const struct CMUnitTest tests[] = {
        TEST(calls_at_the_wrong_moment_are_refused_and_change_nothing),
        TEST(an_update_bracket_is_entered_once_and_left_before_anything_else),
        TEST(micro_steps_come_in_order_and_all),
        TEST(a_step_can_be_given_up_at_any_call),
        TEST(an_evaluation_has_no_gradients),
        TEST(a_unit_has_four_further_streams),
        TEST(objects_go_before_their_context),
        TEST(before_seal_there_is_nothing_to_train),
        TEST(a_second_reduction_must_be_declared),
        TEST(units_that_have_no_room_together_can_be_opened_one_after_another),
        TEST(a_view_after_its_end_shows_no_numbers_when_asked_to),
    };
    return cmocka_run_group_tests_name("wrong moment", tests, NULL, NULL);
}
