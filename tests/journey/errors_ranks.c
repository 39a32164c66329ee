/* SPDX-License-Identifier: MIT */
/* Ranks that differ, fail, skip, stop or give up: every rank is told, by name, within the deadline. */
#include "errors.h"

#include <stdio.h>
#include <string.h>

/* ---- Unequal models ---- */

typedef void (*change)(recipe *c);

static void unit_name(recipe *c) { c->unit_name[2] = "h.two"; }
static void param_name(recipe *c) { c->param_name[2][1] = "h.2.bias"; }
static void unit_order(recipe *c) { c->order[1] = 2, c->order[2] = 1; }
static void param_order(recipe *c)
{
    const char *name = c->param_name[1][0];
    c->param_name[1][0] = c->param_name[1][1], c->param_name[1][1] = name;
    c->dims[1][1][0] = 40, c->dims[1][0][0] = 7, c->n_dims[1][1] = 2, c->n_dims[1][0] = 1;
}
static void shape(recipe *c) { c->dims[2][0][0] = 41; }
static void shape_turned(recipe *c) { c->dims[2][0][0] = 7, c->dims[2][0][1] = 40; } /* as many elements */
static void dims(recipe *c) { c->n_dims[2][0] = 3, c->dims[2][0][2] = 1; }
static void unit_dtype(recipe *c) { c->unit[2].compute_dtype = FSDP_DTYPE_BF16; }
static void grad_dtype(recipe *c) { c->unit[2].grad_dtype = FSDP_DTYPE_FP16; }
static void master_dtype(recipe *c) { c->unit[2].master_dtype = FSDP_DTYPE_BF16; }
static void param_dtype(recipe *c) { c->param[2][1].compute_dtype = FSDP_DTYPE_BF16; }
static void frozen(recipe *c) { c->param[2][1].frozen = true; }
static void no_decay(recipe *c) { c->param[2][1].no_decay = true; }
static void lr_scale(recipe *c) { c->param[2][1].lr_scale = 1.0000002f; }
static void reshard(recipe *c) { c->unit[2].reshard = FSDP_RESHARD_NEVER; }
static void zero_grads(recipe *c) { c->unit[2].zero_grads = false; }
static void fewer_units(recipe *c) { c->n_units = 3; }
static void fewer_params(recipe *c) { c->param_name[3][1] = NULL; }
static void depth(recipe *c) { c->model.depth = 2; }
static void prefetch_bytes(recipe *c) { c->model.prefetch_bytes = 1 << 20; }
static void grad_buffers(recipe *c) { c->model.grad_buffers = 3; }
static void accumulation(recipe *c) { c->model.accumulation = FSDP_ACCUMULATE_REDUCE_EACH; }
static void grad_sum(recipe *c) { c->model.grad_sum = true; }
static void no_adamw(recipe *c) { c->no_adamw = true; }
static void beta(recipe *c) { c->adamw.beta2 = 0.9990001f; }
static void extra_pass(recipe *c) { c->extra_visits = 4, c->extra_use = FSDP_USE_READ; }

static const char long_name[] =
    "transformer.h.0.attention.query_key_value.projection.of.the.first.decoder.layer.of.the.left.tower.weight";
static const char long_name_too[] =
    "transformer.h.0.attention.query_key_value.projection.of.the.first.decoder.layer.of.the.left.tower.bias";
static void one_long_name(recipe *c) { c->unit_name[2] = long_name; }
static void other_long_name(recipe *c) { c->unit_name[2] = long_name_too; }
static void one_long_param(recipe *c) { c->param_name[2][0] = long_name; }
static void other_long_param(recipe *c) { c->param_name[2][0] = long_name_too; }
static void a_pass(recipe *c) { c->extra_visits = 4, c->extra_use = FSDP_USE_READ; }
static void other_pass(recipe *c) { c->extra_visits = 4, c->extra_use = FSDP_USE_FORWARD; }

typedef struct difference {
    const char *what;
    change low, high;               /* on rank 0 and on the last rank; NULL: as it is */
    const char *rank_0, *rank_last; /* what the sentence says of each */
} difference;

static const difference differences[] = {
    {"unit name", NULL, unit_name, "rank 0 has unit h.2:", " has unit h.two:"},
    {"parameter name", NULL, param_name, "rank 0 has parameter h.2.b of unit h.2",
     " has parameter h.2.bias of unit h.2"},
    {"unit order", NULL, unit_order, "rank 0 has unit h.1:", " has unit h.2:"},
    {"parameter order", NULL, param_order, "rank 0 has parameter h.1.w of unit h.1",
     " has parameter h.1.b of unit h.1"},
    {"shape", NULL, shape, "rank 0 has parameter h.2.w of unit h.2: fp32, lr_scale 1, shape [40, 7]", "shape [41, 7]"},
    {"shape turned", NULL, shape_turned, "shape [40, 7]", "shape [7, 40]"},
    {"dims", NULL, dims, "shape [40, 7]", "shape [40, 7, 1]"},
    {"unit dtype", NULL, unit_dtype, "rank 0 has unit h.2: 2 parameters, compute fp32", "compute bf16"},
    {"gradient dtype", NULL, grad_dtype, "grad fp32", "grad fp16"},
    {"master dtype", NULL, master_dtype, "master fp32", "master bf16"},
    {"parameter dtype", NULL, param_dtype, "rank 0 has parameter h.2.b of unit h.2: fp32",
     " has parameter h.2.b of unit h.2: bf16"},
    {"frozen", NULL, frozen, "parameter h.2.b of unit h.2: fp32,", "parameter h.2.b of unit h.2: fp32 frozen"},
    {"no decay", NULL, no_decay, "lr_scale 1, shape", "lr_scale 1, no decay, shape"},
    {"learning rate scale", NULL, lr_scale, "lr_scale 1, shape", "lr_scale 1.00000024"},
    {"reshard", NULL, reshard, "unit h.2: 2 parameters", "reshard NEVER"},
    {"zero_grads", NULL, zero_grads, "zero_grads 1", "zero_grads 0"},
    {"fewer units", NULL, fewer_units, "rank 0 has unit h.3:", " has pass TRAIN"},
    {"more units", fewer_units, NULL, "rank 0 has pass TRAIN", " has unit h.3:"},
    {"fewer parameters", NULL, fewer_params, "rank 0 has unit h.3: 2 parameters", " has unit h.3: 1 parameters"},
    {"depth", NULL, depth, "rank 0 has model model: depth 1", "depth 2"},
    {"prefetch_bytes", NULL, prefetch_bytes, "prefetch_bytes 0", "prefetch_bytes 1048576"},
    {"grad_buffers", NULL, grad_buffers, "grad_buffers 2", "grad_buffers 3"},
    {"accumulation", NULL, accumulation, "accumulation NONE", "accumulation REDUCE_EACH"},
    {"grad_sum", NULL, grad_sum, "grad_sum 0", "grad_sum 1"},
    {"optimizer", no_adamw, NULL, "rank 0 has model model", "AdamW beta1"},
    {"optimizer's numbers", NULL, beta, "AdamW beta1 0.899999976 beta2 0.999000013 ", " beta2 0.999000072 "},
    {"pass list", a_pass, other_pass, "rank 0 has pass extra: 4 visits", " has pass extra: 4 visits"},
    {"one pass more", NULL, extra_pass, "rank 0 has bytes:", " has pass extra"},
    {"long unit names", one_long_name, other_long_name, "rank 0 has unit transformer.h.0.attention", "…#"},
    {"long parameter names", one_long_param, other_long_param, "rank 0 has parameter transformer.h.0.attention", "…#"},
};

static bool differ(rank *r, const difference *d)
{
    change c = r->number == 0 ? d->low : r->number + 1 == r->world ? d->high : NULL;
    if (r->number > 0 && r->number + 1 < r->world) c = d->low; /* the middle one is as rank 0 */
    if (c != NULL) c(&r->recipe);
    return true;
}

/* Seal a model that is not everybody's; then, in the same context, one that is, and train it. */
static void seal_unequal(rank *r)
{
    uint64_t hash = 0;
    recipe equal = r->recipe;
    (void)differ(r, r->arg);
    EXPECT_OK(r, open_context(r));
    EXPECT_OK(r, register_model(r));
    rank_keep(r, fsdp_model_seal(r->model));
    EXPECT_OK(r, fsdp_context_check(r->ctx));
    fsdp_counters counters = FSDP_COUNTERS_INIT;
    EXPECT_OK(r, fsdp_context_counters(r->ctx, &counters));
    EXPECT(r, counters.device_bytes == 0 && counters.pinned_bytes == 0);
    /* As before: still open for registration, and refused again for the same reason. */
    fsdp_unit *more = NULL;
    EXPECT_OK(r, fsdp_model_add_unit(r->model, "more", NULL, &more));
    uint64_t dim = 3;
    EXPECT_OK(r, fsdp_unit_add_param(more, "more.w", 1, &dim, NULL, NULL));
    EXPECT(r, fsdp_model_seal(r->model) == FSDP_ERR_MISMATCH);
    close_model(r);
    r->recipe = equal;
    EXPECT_OK(r, open_all(r));
    EXPECT_OK(r, train_step(r));
    EXPECT_OK(r, hash_model(r, &hash));
    close_all(r);
}

static void every_difference_between_models_is_named_on_every_rank(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof differences / sizeof *differences; i++) {
        const difference *d = &differences[i];
        uint32_t world = i % 4 == 0 ? 3 : 2;
        rank ranks[MAX_RANKS];
        for (uint32_t k = 0; k < world; k++) ranks[k] = rank_default(), ranks[k].arg = (void *)(uintptr_t)d;
        run_ranks(ranks, world, seal_unequal);
        char last[16];
        snprintf(last, sizeof last, "; rank %u has ", world - 1);
        for (uint32_t k = 0; k < world; k++) {
            if (ranks[k].status != FSDP_ERR_MISMATCH)
                fail_msg("%s: rank %u: %s: %s", d->what, k, fsdp_status_name(ranks[k].status), ranks[k].said);
            assert_kept(&ranks[k], FSDP_ERR_MISMATCH,
                        "fsdp_model_seal: ranks registered different models. First difference: rank 0 has ");
            assert_kept(&ranks[k], FSDP_ERR_MISMATCH, last);
            assert_kept(&ranks[k], FSDP_ERR_MISMATCH, d->rank_0);
            assert_kept(&ranks[k], FSDP_ERR_MISMATCH, d->rank_last);
            assert_string_equal(ranks[k].said, ranks[0].said);
        }
    }
}

/* ---- One rank refuses what the others accept ---- */

static void seal_with_an_empty_unit(rank *r)
{
    EXPECT_OK(r, open_context(r));
    EXPECT_OK(r, register_model(r));
    fsdp_unit *unit;
    if (r->number == 1) EXPECT_OK(r, fsdp_model_add_unit(r->model, "forgotten", NULL, &unit));
    rank_keep(r, fsdp_model_seal(r->model));
    close_all(r);
}

static void a_rank_that_cannot_seal_fails_all_and_is_named(void **state)
{
    (void)state;
    rank ranks[3] = {rank_default(), rank_default(), rank_default()};
    run_ranks(ranks, 3, seal_with_an_empty_unit);
    for (int i = 0; i < 3; i++)
        assert_kept(&ranks[i], FSDP_ERR_ARG, "unit forgotten has no parameters: add one, or leave the unit out");
    for (int i = 0; i < 3; i += 2)
        assert_kept(&ranks[i], FSDP_ERR_ARG, "fsdp_model_seal failed on rank 1, so on every rank: ");
}

/* ---- Steps that are not the same ---- */

/* A step in which rank 1 leaves something out. */
typedef struct skip {
    const char *what;
    uint32_t depth;
    uint32_t unit;
    bool forward, backward; /* hooks that are left out */
    const char *rank_0, *rank_1;
} skip;

static fsdp_status visit(rank *r, uint32_t unit, bool backward)
{
    fsdp_view view = FSDP_VIEW_INIT;
    fsdp_status status =
        backward ? fsdp_backward_begin(r->unit[unit], r->s, &view) : fsdp_forward_begin(r->unit[unit], r->s, &view);
    if (status == FSDP_OK) status = compute(r, &view, 1.0f);
    if (status == FSDP_OK)
        status = backward ? fsdp_backward_end(r->unit[unit], r->s) : fsdp_forward_end(r->unit[unit], r->s);
    return status;
}

/* A step as far as it goes; then the wait that tells. */
static fsdp_status skipping_step(rank *r, const skip *k)
{
    fsdp_pass_args args = FSDP_PASS_ARGS_INIT;
    fsdp_status status = fsdp_pass_begin(r->model, &args, r->s);
    for (uint32_t i = 0; status == FSDP_OK && i < 2 * UNITS; i++) {
        bool backward = i >= UNITS;
        uint32_t unit = backward ? 2 * UNITS - 1 - i : i;
        bool left_out = r->number == 1 && unit == k->unit && (backward ? k->backward : k->forward);
        if (!left_out) status = visit(r, unit, backward);
    }
    if (status == FSDP_OK) status = fsdp_pass_end(r->model, r->s);
    if (status == FSDP_OK) status = update(r);
    if (status == FSDP_OK) status = fsdp_stream_drain_host(r->s, 10 * second_ns);
    if (status == FSDP_OK) status = fsdp_stream_drain_host(fsdp_context_lane(r->ctx, FSDP_LANE_GATHER), 10 * second_ns);
    return status;
}

static void train_skipping(rank *r)
{
    const skip *k = r->arg;
    uint64_t hash;
    r->recipe.model.depth = k->depth;
    r->recipe.unit[0].reshard = FSDP_RESHARD_AFTER_USE;
    EXPECT_OK(r, open_all(r));
    rank_keep(r, skipping_step(r, k));
    /* From then on every call says the same, and nothing hangs. */
    EXPECT(r, fsdp_context_check(r->ctx) == FSDP_ERR_MISMATCH);
    EXPECT(r, fsdp_model_hash(r->model, &hash) == FSDP_ERR_MISMATCH);
    EXPECT(r, fsdp_pass_abort(r->model, r->s) == FSDP_ERR_MISMATCH);
    EXPECT(r, fsdp_stream_delay(r->s, 1) == FSDP_ERR_MISMATCH);
    close_all(r);
}

static void a_rank_that_skips_hooks_is_found_out_and_both_are_named(void **state)
{
    (void)state;
    static const skip skips[] = {
        {"forward, nothing ahead", 0, 1, true, false, "rank 0: #", "rank 1: #"},
        {"backward of a middle unit", 1, 2, false, true, "reduce-scatter of h.2 in TRAIN (",
         "all-gather of h.0 in TRAIN ("},
        {"backward of the first unit", 1, 0, false, true, "reduce-scatter of h.0 in TRAIN (",
         "all-reduce of norm in UPDATE (33 fp32)"},
        {"backward of the last unit", 1, 3, false, true, "reduce-scatter of h.3 in TRAIN (", " of h."},
        {"a unit altogether", 2, 1, true, true, "rank 0: #", " of h."},
    };
    for (size_t i = 0; i < sizeof skips / sizeof *skips; i++) {
        rank ranks[2] = {rank_default(), rank_default()};
        for (int k = 0; k < 2; k++) ranks[k].arg = (void *)(uintptr_t)&skips[i], ranks[k].timeout_ns = 2 * second_ns;
        run_ranks(ranks, 2, train_skipping);
        for (int k = 0; k < 2; k++) {
            assert_kept(&ranks[k], FSDP_ERR_MISMATCH, "rank 0: #");
            assert_kept(&ranks[k], FSDP_ERR_MISMATCH, "; rank 1: #");
            assert_kept(&ranks[k], FSDP_ERR_MISMATCH, skips[i].rank_0);
            assert_kept(&ranks[k], FSDP_ERR_MISMATCH, skips[i].rank_1);
        }
    }
}

/* Asked before the deadline, nobody is named yet, and the sentence says when. (A slow machine may be past it.) */
static bool says_when(fsdp_status status)
{
    return status == FSDP_ERR_RANK_LOST ||
           (status == FSDP_ERR_TIMEOUT &&
            strstr(fsdp_last_error(), "step 2 of model model is not done after 0.000 s: ask again. A rank that others "
                                      "wait for is named after fsdp_config.timeout_ns, 1.000 s") != NULL);
}

/* Rank 1 stops calling; it is alive, and that is all. */
static void one_stops(rank *r)
{
    EXPECT_OK(r, open_all(r));
    EXPECT_OK(r, train_step(r));
    EXPECT_OK(r, fsdp_stream_drain_host(r->s, 10 * second_ns));
    fsdp_step_report report = FSDP_STEP_REPORT_INIT;
    if (r->number == 0) {
        fsdp_status status = train_step(r);
        EXPECT(r, status != FSDP_OK || says_when(fsdp_step_report_get(r->model, 2, 0, &report)));
        rank_keep(r, status == FSDP_OK ? fsdp_step_report_get(r->model, 2, 10 * second_ns, &report) : status);
    }
    (void)meeting_wait(r->meet, 50 * second_ns);
    if (r->number == 1) rank_keep(r, fsdp_context_check(r->ctx));
    close_all(r);
}

static void a_rank_that_stops_is_lost_and_named_within_the_deadline(void **state)
{
    (void)state;
    rank ranks[2] = {rank_default(), rank_default()};
    ranks[0].timeout_ns = ranks[1].timeout_ns = second_ns;
    run_ranks(ranks, 2, one_stops);
    for (int i = 0; i < 2; i++) {
        assert_kept(&ranks[i], FSDP_ERR_RANK_LOST, "all-gather of h.");
        assert_kept(&ranks[i], FSDP_ERR_RANK_LOST, "rank 1 of 2 did not come within 1.000 s");
    }
}

static void one_leaves(rank *r)
{
    EXPECT_OK(r, open_all(r));
    EXPECT_OK(r, train_step(r));
    EXPECT_OK(r, fsdp_stream_drain_host(r->s, 10 * second_ns));
    if (r->number == 0) {
        fsdp_step_report report = FSDP_STEP_REPORT_INIT;
        fsdp_status status = train_step(r);
        rank_keep(r, status == FSDP_OK ? fsdp_step_report_get(r->model, 2, 10 * second_ns, &report) : status);
    }
    close_all(r);
}

static void a_rank_that_leaves_is_named_at_once(void **state)
{
    (void)state;
    rank ranks[2] = {rank_default(), rank_default()};
    ranks[0].timeout_ns = ranks[1].timeout_ns = 50 * second_ns; /* nobody waits for that */
    run_ranks(ranks, 2, one_leaves);
    assert_kept(&ranks[0], FSDP_ERR_RANK_LOST, "rank 1 of 2 closed before it came");
}

/* ---- Late to open ---- */

static void open_without_rank_1(rank *r)
{
    if (r->number == 1) return;
    rank_keep(r, open_context(r));
}

static void a_context_waits_for_all_ranks_and_names_who_is_missing(void **state)
{
    (void)state;
    rank ranks[3] = {rank_default(), rank_default(), rank_default()};
    for (int i = 0; i < 3; i++) ranks[i].timeout_ns = second_ns;
    run_ranks(ranks, 3, open_without_rank_1);
    for (int i = 0; i < 3; i += 2) {
        const char *thread = "ranks 0, 2 of 3 came, rank 1 did not within 1.000 s",
                   *process = "rank 1 of 3 did not come";
        assert_kept(&ranks[i], FSDP_ERR_RANK_LOST, ranks_are_processes ? process : thread);
        assert_null(ranks[i].ctx);
    }
}

/* ---- Giving up ---- */

static fsdp_context *volatile to_abort;
static pthread_barrier_t all_wait;

static void *abort_from_outside(void *arg)
{
    (void)arg;
    pthread_barrier_wait(&all_wait);
    fsdp_context_abort(to_abort, "the operator pressed the button");
    fsdp_context_abort(to_abort, "twice"); /* once is enough */
    return NULL;
}

/* Rank 0 waits on the side channel, rank 1 for an event, rank 2 for a report: for a step that rank 0 does not take. */
static void wait_in_vain(rank *r)
{
    double value = 1.0;
    fsdp_step_report report = FSDP_STEP_REPORT_INIT;
    fsdp_event *event;
    fsdp_allocator *allocator;
    fsdp_alloc_stats stats = FSDP_ALLOC_STATS_INIT;
    void *block = NULL, *more = NULL;
    EXPECT_OK(r, open_all(r));
    EXPECT_OK(r, train_step(r));
    EXPECT_OK(r, fsdp_event_create(r->ctx, &event));
    EXPECT_OK(r, fsdp_allocator_create(r->ctx, NULL, &allocator));
    EXPECT_OK(r, fsdp_allocator_alloc(allocator, 1000, r->s, NULL, &block));
    if (r->number == 1) to_abort = r->ctx;
    if (r->number > 0) EXPECT_OK(r, train_step(r));
    EXPECT_OK(r, fsdp_event_record(event, r->s));
    pthread_barrier_wait(&all_wait);
    switch (r->number) {
    case 0: rank_keep(r, fsdp_sum_host(r->ctx, &value, 1)); break;
    case 1: rank_keep(r, fsdp_event_wait_host(event, 50 * second_ns)); break;
    default: rank_keep(r, fsdp_step_report_get(r->model, 2, 50 * second_ns, &report)); break;
    }
    EXPECT(r, fsdp_context_check(r->ctx) == FSDP_ERR_ABORTED);
    EXPECT(r, fsdp_stream_drain_host(r->s, second_ns) == FSDP_ERR_ABORTED);
    EXPECT(r, fsdp_barrier_host(r->ctx) == FSDP_ERR_ABORTED);
    EXPECT(r, train_step(r) == FSDP_ERR_ABORTED);
    EXPECT(r, fsdp_pass_abort(r->model, r->s) == FSDP_ERR_ABORTED);
    EXPECT(r, strstr(fsdp_last_error(), "the operator pressed the button") != NULL);
    EXPECT(r, value >= 1.0 && value <= 1.0);
    EXPECT(r, fsdp_allocator_alloc(allocator, 1000, r->s, NULL, &more) == FSDP_ERR_ABORTED);
    EXPECT_OK(r, fsdp_allocator_free(allocator, block)); /* what gives back and what only counts still works */
    EXPECT_OK(r, fsdp_allocator_stats(allocator, &stats));
    EXPECT_OK(r, fsdp_allocator_destroy(allocator));
    fsdp_event_destroy(event);
    close_all(r);
}

static void an_abort_wakes_every_rank_with_its_reason(void **state)
{
    (void)state;
    rank ranks[3] = {rank_default(), rank_default(), rank_default()};
    pthread_t outside;
    pthread_barrier_init(&all_wait, NULL, 4);
    assert_int_equal(pthread_create(&outside, NULL, abort_from_outside, NULL), 0);
    for (int i = 0; i < 3; i++) ranks[i].timeout_ns = 50 * second_ns;
    run_ranks(ranks, 3, wait_in_vain);
    pthread_join(outside, NULL);
    pthread_barrier_destroy(&all_wait);
    for (int i = 0; i < 3; i++)
        assert_kept(&ranks[i], FSDP_ERR_ABORTED, "rank 1 aborted: the operator pressed the button");
}

static void abort_in_a_kernel(void *arg) { fsdp_context_abort(arg, NULL); }

static void give_up_on_the_stream(rank *r)
{
    EXPECT_OK(r, open_all(r));
    (void)meeting_wait(r->meet, 50 * second_ns);
    if (r->number == 0) EXPECT_OK(r, fsdp_stream_host_call(r->s, abort_in_a_kernel, r->ctx));
    fsdp_status status = fsdp_barrier(fsdp_context_comm(r->ctx), r->s, NULL);
    rank_keep(r, status == FSDP_OK ? fsdp_stream_drain_host(r->s, 50 * second_ns) : status);
    close_all(r);
}

static void a_kernel_may_abort_without_a_reason(void **state)
{
    (void)state;
    rank ranks[2] = {rank_default(), rank_default()};
    run_ranks(ranks, 2, give_up_on_the_stream);
    for (int i = 0; i < 2; i++) assert_kept(&ranks[i], FSDP_ERR_ABORTED, "rank 0 aborted");
}

/* ---- Time that runs out is not lost ---- */

static pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;

/* A kernel that lasts as long as the test holds the gate. */
static void wait_at_gate(void *arg)
{
    (void)arg;
    pthread_mutex_lock(&gate);
    pthread_mutex_unlock(&gate);
}

static void a_wait_that_ran_out_of_time_can_be_asked_again(void **state)
{
    (void)state;
    rank r = rank_default();
    fsdp_event *event;
    fsdp_work *work;
    fsdp_step_report report = FSDP_STEP_REPORT_INIT;
    const uint64_t ms = 1000000;
    OK(open_all(&r));
    OK(fsdp_event_create(r.ctx, &event));
    OK(micro_step(&r, 0, 1, NULL));
    pthread_mutex_lock(&gate);
    OK(fsdp_stream_host_call(r.s, wait_at_gate, NULL));
    OK(update(&r));
    OK(fsdp_event_record(event, r.s));
    OK(fsdp_barrier(fsdp_context_comm(r.ctx), r.s, &work));
    REFUSED(fsdp_stream_drain_host(r.s, ms), FSDP_ERR_TIMEOUT, "stream compute is not idle after 0.001 s");
    REFUSED(fsdp_event_wait_host(event, ms), FSDP_ERR_TIMEOUT,
            "fsdp_event_wait_host: the event has not happened after 0.001 s: ask again");
    REFUSED(fsdp_work_wait_host(work, ms), FSDP_ERR_TIMEOUT,
            "fsdp_work_wait_host: the work is not done after 0.001 s: ask again");
    REFUSED(fsdp_step_report_get(r.model, 1, ms, &report), FSDP_ERR_TIMEOUT,
            "fsdp_step_report_get: step 1 of model model is not done after 0.001 s: ask again");
    assert_int_equal(report.step, 0);
    pthread_mutex_unlock(&gate);
    OK(fsdp_step_report_get(r.model, 1, 10 * second_ns, &report));
    OK(fsdp_work_wait_host(work, 10 * second_ns));
    OK(fsdp_event_wait_host(event, 10 * second_ns));
    OK(fsdp_stream_drain_host(r.s, 10 * second_ns));
    assert_int_equal(report.step, 1);
    fsdp_work_release(work);
    fsdp_event_destroy(event);
    close_all(&r);
    assert_string_equal(r.failed, "");
}

/* A model that is destroyed while its last step runs longer than the deadline between ranks. */
static void destroy_waits_however_long_the_step_takes(void **state)
{
    (void)state;
    rank r = rank_default();
    r.timeout_ns = second_ns / 2;
    OK(open_all(&r));
    OK(fsdp_stream_delay(r.s, 4 * second_ns / 5));
    OK(train_step(&r));
    close_all(&r);
    assert_string_equal(r.failed, "");
}

int run_rank_errors(bool as_processes)
{
#define TEST(name) cmocka_unit_test_setup(name, errors_deadline)
    const struct CMUnitTest tests[] = {
        TEST(every_difference_between_models_is_named_on_every_rank),
        TEST(a_rank_that_cannot_seal_fails_all_and_is_named),
        TEST(a_rank_that_skips_hooks_is_found_out_and_both_are_named),
        TEST(a_rank_that_stops_is_lost_and_named_within_the_deadline),
        TEST(a_rank_that_leaves_is_named_at_once),
        TEST(a_context_waits_for_all_ranks_and_names_who_is_missing),
        TEST(a_kernel_may_abort_without_a_reason),
    };
    const struct CMUnitTest of_threads[] = {
        TEST(an_abort_wakes_every_rank_with_its_reason),
        TEST(a_wait_that_ran_out_of_time_can_be_asked_again),
        TEST(destroy_waits_however_long_the_step_takes),
    };
    ranks_are_processes = as_processes;
    int failed = cmocka_run_group_tests_name(as_processes ? "ranks as processes" : "ranks", tests, NULL, NULL);
    ranks_are_processes = false;
    if (!as_processes) failed += cmocka_run_group_tests_name("waits", of_threads, NULL, NULL);
    return failed;
}
