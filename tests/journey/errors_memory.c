/* SPDX-License-Identifier: MIT */
/* Memory that runs out, host and device, and operations that the device refuses: at the first, second, third … chance,
 * once or for good. Never a crash, never a leak; the status says which; and where it happened once, the program comes
 * out to the bit as if it had not. */
#include "errors.h"

#include <stdio.h>
#include <string.h>

enum { STEPS = 3 };

/* ---- A host backend whose device refuses one call, on the thread that set it up ---- */

typedef enum fault_kind { FAULT_MEMORY, FAULT_LAUNCH, FAULT_RECORD, FAULT_WAIT, FAULT_ENQUEUE, FAULT_DRAIN } fault_kind;

typedef struct fault {
    fault_kind kind;
    int64_t until; /* calls that still succeed; below 0: all */
    bool happened;
    fsdp_status status;
} fault;

static _Thread_local fault refusal = {FAULT_MEMORY, -1, false, FSDP_OK};

static fsdp_status refuse(fault_kind kind)
{
    if (refusal.kind != kind || refusal.until < 0 || refusal.until-- > 0) return FSDP_OK;
    refusal.happened = true;
    return fsdp_backend_fail(refusal.status, "the test refuses a call of kind %d", (int)kind);
}

static const fsdp_device_ops *host_ops(void) { return fsdp_host_backend()->device; }

static fsdp_status mem_alloc(void *dev, uint64_t bytes, fsdp_memory_kind kind, void **out_ptr)
{
    fsdp_status status = kind != FSDP_MEMORY_KIND_PINNED ? refuse(FAULT_MEMORY) : FSDP_OK;
    return status != FSDP_OK ? status : host_ops()->mem_alloc(dev, bytes, kind, out_ptr);
}

static fsdp_status launch(void *dev, void *stream, const fsdp_device_op *op, fsdp_span *span)
{
    fsdp_status status = refuse(FAULT_LAUNCH);
    return status != FSDP_OK ? status : host_ops()->launch(dev, stream, op, span);
}

static fsdp_status event_record(void *dev, void *event, void *stream, fsdp_span *span)
{
    fsdp_status status = refuse(FAULT_RECORD);
    return status != FSDP_OK ? status : host_ops()->event_record(dev, event, stream, span);
}

static fsdp_status stream_wait(void *dev, void *stream, void *event, fsdp_span *span)
{
    fsdp_status status = refuse(FAULT_WAIT);
    return status != FSDP_OK ? status : host_ops()->stream_wait(dev, stream, event, span);
}

static fsdp_status enqueue(void *comm, void *stream, const fsdp_collective *list, uint32_t n)
{
    fsdp_status status = refuse(FAULT_ENQUEUE);
    return status != FSDP_OK ? status : fsdp_host_backend()->comm->enqueue(comm, stream, list, n);
}

static fsdp_status stream_drain(void *dev, void *stream, uint64_t timeout_ns)
{
    fsdp_status status = refuse(FAULT_DRAIN);
    return status != FSDP_OK ? status : host_ops()->stream_drain(dev, stream, timeout_ns);
}

static fsdp_device_ops faulty_device;
static fsdp_comm_ops faulty_comm;
static fsdp_backend faulty;

static const fsdp_backend *faulty_backend(void)
{
    faulty = *fsdp_host_backend();
    faulty_device = *faulty.device;
    faulty_device.mem_alloc = mem_alloc, faulty_device.launch = launch;
    faulty_device.event_record = event_record, faulty_device.stream_wait = stream_wait;
    faulty_device.stream_drain = stream_drain;
    faulty_comm = *faulty.comm;
    faulty_comm.enqueue = enqueue;
    faulty.device = &faulty_device, faulty.comm = &faulty_comm;
    return &faulty;
}

/* ---- Device memory at seal ---- */

typedef struct shortage {
    uint32_t rank;
    int64_t nth;
} shortage;

static void seal_with_a_shortage(rank *r)
{
    const shortage *s = r->arg;
    uint64_t hash = 0;
    fsdp_counters before = FSDP_COUNTERS_INIT, after = FSDP_COUNTERS_INIT;
    fsdp_memory memory = FSDP_MEMORY_INIT;
    EXPECT_OK(r, open_context(r));
    EXPECT_OK(r, register_model(r));
    EXPECT_OK(r, fsdp_context_counters(r->ctx, &before));
    refusal = (fault){FAULT_MEMORY, r->number == s->rank ? s->nth : -1, false, FSDP_ERR_NO_MEMORY};
    rank_keep(r, fsdp_model_seal(r->model));
    refusal.until = -1;
    EXPECT_OK(r, fsdp_context_counters(r->ctx, &after));
    if (r->status != FSDP_OK) {
        EXPECT(r, after.device_bytes == before.device_bytes && after.pinned_bytes == before.pinned_bytes);
        EXPECT_OK(r, fsdp_model_predict(r->model, &memory)); /* still open */
        EXPECT_OK(r, fsdp_model_seal(r->model));             /* memory was found */
    }
    EXPECT_OK(r, fill_model(r));
    EXPECT_OK(r, train_step(r));
    EXPECT_OK(r, hash_model(r, &hash));
    close_all(r);
}

static void without_device_memory_no_rank_is_sealed_and_all_can_try_again(void **state)
{
    (void)state;
    for (uint32_t who = 0; who < 2; who++) {
        shortage s = {who, 0};
        rank ranks[2];
        for (;; s.nth++) {
            for (int i = 0; i < 2; i++)
                ranks[i] = rank_default(), ranks[i].backend = faulty_backend(), ranks[i].arg = &s;
            run_ranks(ranks, 2, seal_with_a_shortage);
            if (ranks[0].status == FSDP_OK) break;
            for (int i = 0; i < 2; i++) assert_kept(&ranks[i], FSDP_ERR_NO_MEMORY, "the test refuses a call of kind 0");
            char said[64];
            snprintf(said, sizeof said, "fsdp_model_seal failed on rank %u, so on every rank: ", who);
            assert_kept(&ranks[1 - who], FSDP_ERR_NO_MEMORY, said);
        }
        assert_int_equal(ranks[1].status, FSDP_OK);
        assert_int_equal(s.nth, 6); /* master, gradients, moments, scratch, gather, grad */
    }
}

/* ---- Host memory in seal, on one rank of two ---- */

typedef struct poverty {
    int64_t nth;
    bool for_good, happened;
    int n_lost; /* contexts: one rank could not enqueue its part of the warm-up */
} poverty;

static void seal_in_poverty(rank *r)
{
    poverty *p = r->arg;
    meter m;
    meter_init(&m);
    if (r->number == 1) r->meter = &m;
    EXPECT_OK(r, open_context(r));
    EXPECT_OK(r, register_model(r));
    if (r->number == 1) meter_fail_after(&m, p->nth, p->for_good);
    rank_keep(r, fsdp_model_seal(r->model));
    if (r->number == 1) p->happened = m.failed, meter_fail_after(&m, -1, false);
    bool lost = fsdp_context_check(r->ctx) != FSDP_OK;
    if (r->status != FSDP_OK && !lost) EXPECT_OK(r, fsdp_model_seal(r->model));
    if (!lost) EXPECT_OK(r, fill_model(r));
    if (!lost) EXPECT_OK(r, train_step(r));
    if (!lost) EXPECT_OK(r, fsdp_stream_drain_host(r->s, 10 * second_ns));
    if (r->number == 0) p->n_lost += lost;
    close_all(r);
    EXPECT(r, m.live_bytes == 0);
}

static void without_host_memory_on_one_rank_no_rank_is_sealed(void **state)
{
    (void)state;
    for (int for_good = 0; for_good < 2; for_good++) {
        poverty p = {0, for_good, true, 0};
        for (; p.happened; p.nth++) {
            rank ranks[2] = {rank_default(), rank_default()};
            for (int i = 0; i < 2; i++) ranks[i].arg = &p;
            p.happened = false;
            run_ranks(ranks, 2, seal_in_poverty);
            if (!p.happened || ranks[1].status == FSDP_OK) continue;
            assert_kept(&ranks[1], FSDP_ERR_NO_HOST_MEMORY, "host ");
            assert_kept(&ranks[0], FSDP_ERR_NO_HOST_MEMORY, "fsdp_model_seal failed on rank 1, so on every rank: ");
        }
        assert_true(p.nth > 20);
        assert_in_range(p.n_lost, 1, 4);
    }
}

/* ---- A whole program with one refusal in it ---- */

/* A program that meets what is refused: a call that failed is made once more, a step that failed is given up and taken
 * once more; where that cannot be, the model is built anew. Returns false with r->status where nothing helps. */
static bool insist(rank *r, fsdp_status (*call)(rank *))
{
    fsdp_status status = call(r);
    if (status == FSDP_OK) return true;
    rank_keep(r, status);
    return call(r) == FSDP_OK;
}

static fsdp_status seal(rank *r) { return fsdp_model_seal(r->model); }

static bool build(rank *r) { return insist(r, register_model) && insist(r, seal) && insist(r, fill_model); }

/* Step number `step`, given up and taken again if it fails; an update that broke half way means to begin anew. */
static bool insist_on_step(rank *r, int step)
{
    fsdp_status status = train_step(r);
    if (status == FSDP_OK) return true;
    rank_keep(r, status);
    fsdp_model_stats stats = FSDP_MODEL_STATS_INIT;
    if (fsdp_model_stats_get(r->model, &stats) != FSDP_OK) return false;
    bool taken = stats.steps == (uint64_t)step; /* what failed comes after the update */
    status = fsdp_pass_abort(r->model, r->s);
    if (status == FSDP_OK) return taken || train_step(r) == FSDP_OK;
    if (strstr(fsdp_last_error(), "inside an update") == NULL) return false;
    close_model(r);
    if (!build(r)) return false;
    for (int i = 1; i <= step; i++)
        if (train_step(r) != FSDP_OK) return false;
    return true;
}

static void run_program(rank *r, uint64_t *out_hash)
{
    rank_keep(r, FSDP_OK);
    EXPECT(r, insist(r, open_context));
    EXPECT(r, build(r));
    for (int step = 1; step <= STEPS; step++) EXPECT(r, insist_on_step(r, step));
    fsdp_status status = hash_model(r, out_hash);
    if (status != FSDP_OK) rank_keep(r, status);
    if (status != FSDP_OK) EXPECT_OK(r, hash_model(r, out_hash));
    close_all(r);
}

/* From one failing allocation to the next to try: each, but for sanitizers, which are an order slower. */
static int64_t stride(int64_t n) { return ERRORS_REDUCED && n >= 30 ? 1 + n / 30 : 1; }

static void any_host_allocation_may_fail_once_and_the_program_comes_out_the_same(void **state)
{
    (void)state;
    uint64_t clean = 0, hash = 0, n_unheard = 0;
    meter m;
    meter_init(&m);
    for (int64_t n = -1; n < 10000; n += stride(n)) {
        rank r = rank_default();
        r.meter = &m;
        m.n_allocs = 0;
        meter_fail_after(&m, n, false);
        run_program(&r, &hash);
        assert_string_equal(r.failed, "");
        assert_int_equal(m.live_bytes, 0);
        if (n < 0) clean = hash;
        if (m.failed && r.status == FSDP_OK) n_unheard++; /* the fence of a drain, which goes without */
        else if (m.failed) assert_kept(&r, FSDP_ERR_NO_HOST_MEMORY, "host ");
        assert_int_equal(hash, clean);
        if (n >= 0 && !m.failed) break;
    }
    assert_false(m.failed);
    assert_in_range(n_unheard, 0, 3);
}

/* Everything is given back, whatever there is by then. */
static void give_up(rank *r)
{
    EXPECT_OK(r, fsdp_model_destroy(r->model));
    EXPECT_OK(r, fsdp_stream_release(r->s));
    EXPECT_OK(r, fsdp_context_destroy(r->ctx));
}

static void host_memory_may_be_gone_for_good_and_nothing_is_leaked(void **state)
{
    (void)state;
    meter m;
    meter_init(&m);
    for (int64_t n = 0; n < 10000; n += stride(n)) {
        rank r = rank_default();
        r.meter = &m;
        meter_fail_after(&m, n, true);
        fsdp_status status = open_all(&r);
        for (int i = 0; status == FSDP_OK && i < STEPS; i++) status = train_step(&r);
        uint64_t hash;
        if (status == FSDP_OK) status = hash_model(&r, &hash);
        bool failed = m.failed;
        if (failed) assert_int_equal(status, FSDP_ERR_NO_HOST_MEMORY);
        if (failed) assert_non_null(strstr(fsdp_last_error(), "host "));
        give_up(&r);
        assert_string_equal(r.failed, "");
        assert_int_equal(m.live_bytes, 0);
        if (!failed) return;
    }
    fail_msg("%s", "allocations without end");
}

/* A refusal in the steps: the model has failed, says so to every call, and is whole again after fsdp_pass_abort. */
static void assert_failed_model(rank *r)
{
    fsdp_view view = FSDP_VIEW_INIT;
    fsdp_pass_args args = FSDP_PASS_ARGS_INIT;
    float value = 0.0f;
    uint64_t hash;
    static const char *const said = "model model has failed (the test refuses a call of kind ";
    REFUSED(fsdp_pass_begin(r->model, &args, r->s), refusal.status, said);
    REFUSED(fsdp_forward_begin(r->unit[1], r->s, &view), refusal.status, said);
    REFUSED(fsdp_backward_end(r->unit[1], r->s), refusal.status, "call fsdp_pass_abort, or destroy it");
    REFUSED(fsdp_pass_end(r->model, r->s), refusal.status, said);
    REFUSED(fsdp_update_begin(r->model, r->s), refusal.status, said);
    REFUSED(fsdp_step_sum(r->model, 0, &value, r->s), refusal.status, said);
    REFUSED(fsdp_model_hash(r->model, &hash), refusal.status, said);
    REFUSED(fill_model(r), refusal.status, said);
}

static uint64_t train_with_a_refusal(fault_kind kind, int64_t n, bool *out_happened)
{
    uint64_t hash = 0;
    rank r = rank_default();
    r.backend = faulty_backend();
    for (uint32_t u = 1; u <= 3; u++) { /* cast, also alone, and so are their gradients */
        r.recipe.unit[u].compute_dtype = r.recipe.unit[u].grad_dtype = FSDP_DTYPE_FP32;
        r.recipe.unit[u].reduce_dtype = r.recipe.unit[u].master_dtype = FSDP_DTYPE_BF16;
    }
    OK(open_all(&r));
    OK(train_step(&r));
    refusal = (fault){kind, n, false, FSDP_ERR_NO_HOST_MEMORY};
    for (int step = 2; step <= STEPS; step++) {
        fsdp_status status = train_step(&r);
        if (status == FSDP_OK) continue;
        assert_int_equal(status, refusal.status);
        fsdp_model_stats stats = FSDP_MODEL_STATS_INIT;
        OK(fsdp_model_stats_get(r.model, &stats));
        /* The caller's own kernels are refused to the caller; the model has not failed by it. */
        fsdp_pass_args args = FSDP_PASS_ARGS_INIT;
        fsdp_status now = fsdp_pass_begin(r.model, &args, r.s);
        if (now == refusal.status) assert_failed_model(&r);
        status = fsdp_pass_abort(r.model, r.s);
        if (status != FSDP_OK) {
            REFUSED(status, refusal.status, "failed inside an update (the test refuses");
            close_model(&r);
            OK(register_model(&r));
            OK(fsdp_model_seal(r.model));
            OK(fill_model(&r));
            for (int i = 1; i < step; i++) OK(train_step(&r));
        }
        if (status != FSDP_OK || stats.steps != (uint64_t)step) OK(train_step(&r));
    }
    *out_happened = refusal.happened;
    refusal.until = -1;
    OK(hash_model(&r, &hash));
    close_all(&r);
    assert_string_equal(r.failed, "");
    return hash;
}

static void any_device_operation_of_a_step_may_fail_once_and_the_program_comes_out_the_same(void **state)
{
    (void)state;
    bool happened;
    uint64_t clean = train_with_a_refusal(FAULT_LAUNCH, -1, &happened);
    for (fault_kind kind = FAULT_LAUNCH; kind < FAULT_ENQUEUE; kind++) {
        int64_t n = 0;
        do {
            uint64_t hash = train_with_a_refusal(kind, n, &happened);
            if (hash != clean) fail_msg("kind %d, call %d: other parameters", (int)kind, (int)n);
        } while (happened && ++n < 1000);
        assert_in_range(n, kind == FAULT_WAIT ? 10 : 20, 200);
    }
}

/* ---- On two ranks a collective that one of them could not enqueue is everybody's business ---- */

static void train_without_one_collective(rank *r)
{
    fsdp_status status = FSDP_OK;
    uint64_t *n = r->arg;
    EXPECT_OK(r, open_all(r));
    EXPECT_OK(r, train_step(r));
    if (r->number == 1) refusal = (fault){FAULT_ENQUEUE, (int64_t)*n, false, FSDP_ERR_NO_HOST_MEMORY};
    for (int i = 0; status == FSDP_OK && i < 2; i++) status = train_step(r);
    if (status == FSDP_OK) status = fsdp_stream_drain_host(r->s, 10 * second_ns);
    if (status == FSDP_OK) status = fsdp_stream_drain_host(fsdp_context_lane(r->ctx, FSDP_LANE_GATHER), 10 * second_ns);
    rank_keep(r, status);
    refusal.until = -1;
    close_all(r); /* the other one is told by it */
}

static void a_collective_that_one_rank_could_not_enqueue_stops_the_others(void **state)
{
    (void)state;
    for (uint64_t n = 0; n < 14; n += 3) {
        rank ranks[2];
        for (int i = 0; i < 2; i++) {
            ranks[i] = rank_default();
            ranks[i].backend = faulty_backend();
            ranks[i].timeout_ns = 5 * second_ns;
            ranks[i].arg = &n;
        }
        run_ranks(ranks, 2, train_without_one_collective);
        assert_kept(&ranks[1], FSDP_ERR_NO_HOST_MEMORY, "the test refuses a call of kind 4");
        assert_kept(&ranks[0], FSDP_ERR_RANK_LOST, "rank 1 of 2 closed before it came");
    }
}

/* ---- Works ---- */

static void a_collective_without_memory_for_its_work_is_not_enqueued(void **state)
{
    (void)state;
    rank r = rank_default();
    meter m;
    meter_init(&m);
    r.meter = &m;
    OK(open_context(&r));
    for (int n = 0; n < 2; n++) {
        fsdp_work *work = NULL;
        fsdp_counters before = FSDP_COUNTERS_INIT, after = FSDP_COUNTERS_INIT;
        OK(fsdp_context_counters(r.ctx, &before));
        meter_fail_after(&m, n, false);
        REFUSED(fsdp_barrier(fsdp_context_comm(r.ctx), r.s, &work), FSDP_ERR_NO_HOST_MEMORY, "host ");
        OK(fsdp_context_counters(r.ctx, &after));
        assert_null(work);
        assert_int_equal(after.collectives, before.collectives);
    }
    OK(fsdp_stream_release(r.s));
    OK(fsdp_context_destroy(r.ctx));
    assert_int_equal(m.live_bytes, 0);
}

/* ---- A stream that cannot be waited for ---- */

/* As CUDA's NULL stream while another one captures: what it was given still runs. */
static void a_stream_that_cannot_be_waited_for_is_not_released(void **state)
{
    (void)state;
    rank r = rank_default();
    r.backend = faulty_backend();
    OK(open_context(&r));
    refusal = (fault){FAULT_DRAIN, 0, false, FSDP_ERR_STATE};
    REFUSED(fsdp_stream_release(r.s), FSDP_ERR_STATE, "the test refuses a call of kind 5");
    REFUSED(fsdp_context_destroy(r.ctx), FSDP_ERR_STATE, "1 stream");
    OK(fsdp_stream_delay(r.s, 1000)); /* it goes on */
    OK(fsdp_stream_release(r.s));
    OK(fsdp_context_destroy(r.ctx));
}

int run_memory_errors(void)
{
#define TEST(name) cmocka_unit_test_setup(name, errors_deadline)
    const struct CMUnitTest tests[] = {
        TEST(without_device_memory_no_rank_is_sealed_and_all_can_try_again),
        TEST(without_host_memory_on_one_rank_no_rank_is_sealed),
        TEST(any_host_allocation_may_fail_once_and_the_program_comes_out_the_same),
        TEST(host_memory_may_be_gone_for_good_and_nothing_is_leaked),
        TEST(any_device_operation_of_a_step_may_fail_once_and_the_program_comes_out_the_same),
        TEST(a_collective_that_one_rank_could_not_enqueue_stops_the_others),
        TEST(a_collective_without_memory_for_its_work_is_not_enqueued),
        TEST(a_stream_that_cannot_be_waited_for_is_not_released),
    };
    return cmocka_run_group_tests_name("memory", tests, NULL, NULL);
}
