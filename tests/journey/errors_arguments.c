/* SPDX-License-Identifier: MIT */
/* Wrong arguments of the public functions of lib/, header by header: null, size fields, ranges, dtypes. */
#include "errors_arguments.h"

#include <stdio.h>

rank program;

static fsdp_context *ctx(void) { return program.ctx; }

int open_program(void **state)
{
    errors_deadline(state);
    program = rank_default();
    OK(open_all(&program));
    return 0;
}

int close_program(void **state)
{
    (void)state;
    close_all(&program);
    assert_string_equal(program.failed, "");
    return 0;
}

void assert_program_unharmed(void **state, void (*const *tests)(void **), size_t n)
{
    uint64_t clean, after;
    OK(train_step(&program));
    OK(hash_model(&program, &clean));
    close_program(state);
    open_program(state);
    for (size_t i = 0; i < n; i++) tests[i](state);
    OK(train_step(&program));
    OK(hash_model(&program, &after));
    assert_int_equal(clean, after);
}

/* ---- fsdp.h, status.h, dtype.h, backend.h ---- */

static void version_is_one_number(void **state)
{
    (void)state;
    assert_int_equal(fsdp_version() / 10000, FSDP_VERSION_MAJOR);
    assert_int_equal(fsdp_version() / 100 % 100, FSDP_VERSION_MINOR);
    assert_int_equal(fsdp_version() % 100, FSDP_VERSION_PATCH);
    assert_int_equal(fsdp_version(), FSDP_VERSION);
}

static void names_are_never_null(void **state)
{
    (void)state;
    assert_string_equal(fsdp_status_name((fsdp_status)-999), "FSDP_ERR_?");
    assert_string_equal(fsdp_status_name((fsdp_status)1), "FSDP_ERR_?");
    static const fsdp_status codes[] = {FSDP_OK,
                                        FSDP_ERR_ARG,
                                        FSDP_ERR_STATE,
                                        FSDP_ERR_UNSUPPORTED,
                                        FSDP_ERR_TIMEOUT,
                                        FSDP_ERR_NO_MEMORY,
                                        FSDP_ERR_NO_HOST_MEMORY,
                                        FSDP_ERR_MISMATCH,
                                        FSDP_ERR_RANK_LOST,
                                        FSDP_ERR_ABORTED,
                                        FSDP_ERR_DEVICE,
                                        FSDP_ERR_IO};
    for (size_t i = 0; i < sizeof codes / sizeof *codes; i++) assert_null(strchr(fsdp_status_name(codes[i]), '?'));
    static const int bad[] = {-1, 0, 4, 1000};
    for (int i = 0; i < 4; i++) {
        assert_int_equal(fsdp_dtype_bytes((fsdp_dtype)bad[i]), 0);
        assert_string_equal(fsdp_dtype_name((fsdp_dtype)bad[i]), "?");
        assert_string_equal(fsdp_operation_name((fsdp_operation)(bad[i] + 100)), "?");
        assert_string_equal(fsdp_mark_name((fsdp_mark)(bad[i] + 100)), "?");
        assert_string_equal(fsdp_reason_name((fsdp_reason)(bad[i] + 100)), "?");
    }
}

static void *look_at_a_fresh_thread(void *arg)
{
    snprintf(arg, 64, "%s", fsdp_last_error());
    return NULL;
}

static void each_thread_has_its_own_sentence(void **state)
{
    (void)state;
    char seen[64] = "not looked at";
    pthread_t thread;
    assert_int_equal(fsdp_backend_fail(FSDP_ERR_IO, "%s of %d", "sentence", 1), FSDP_ERR_IO);
    assert_int_equal(pthread_create(&thread, NULL, look_at_a_fresh_thread, seen), 0);
    pthread_join(thread, NULL);
    assert_string_equal(seen, "");
    assert_string_equal(fsdp_last_error(), "sentence of 1");
    OK(fsdp_context_check(ctx())); /* success leaves it */
    assert_string_equal(fsdp_last_error(), "sentence of 1");
}

/* What answers with a value has one for nobody, too. */
static void questions_to_nobody_have_empty_answers(void **state)
{
    (void)state;
    assert_int_equal(fsdp_context_rank(NULL), 0);
    assert_int_equal(fsdp_context_world(NULL), 0);
    assert_int_equal(fsdp_context_now_ns(NULL), 0);
    assert_int_equal(fsdp_comm_rank(NULL), 0);
    assert_int_equal(fsdp_comm_size(NULL), 0);
    assert_int_equal(fsdp_param_elems(NULL), 0);
    assert_string_equal(fsdp_unit_name(NULL), "");
    assert_string_equal(fsdp_param_name(NULL), "");
    assert_true(fsdp_model_grad_factor(NULL) >= 0.0f && fsdp_model_grad_factor(NULL) <= 0.0f);
    assert_null(fsdp_context_comm(NULL));
    assert_null(fsdp_context_reduce_comm(NULL));
    assert_null(fsdp_context_lane(NULL, FSDP_LANE_GATHER));
    assert_null(fsdp_context_lane(ctx(), (fsdp_lane)-1));
    assert_null(fsdp_context_lane(ctx(), (fsdp_lane)3));
    assert_null(fsdp_model_find_param(NULL, "h.0.w"));
    assert_null(fsdp_model_find_param(program.model, NULL));
    assert_null(fsdp_model_find_param(program.model, "h.9.w"));
    assert_int_equal(fsdp_trace_count(NULL) + fsdp_trace_dropped(NULL), 0);
    assert_null(fsdp_trace_at(NULL, 0));
    assert_string_equal(fsdp_trace_stream_name(NULL, 0), "");
}

static void giving_nothing_back_is_nothing(void **state)
{
    (void)state;
    OK(fsdp_context_destroy(NULL));
    OK(fsdp_stream_release(NULL));
    OK(fsdp_model_destroy(NULL));
    OK(fsdp_allocator_destroy(NULL));
    fsdp_context_abort(NULL, "nobody");
    fsdp_event_destroy(NULL);
    fsdp_work_release(NULL);
    fsdp_trace_destroy(NULL);
    fsdp_local_destroy(NULL);
}

/* ---- context.h, host.h, sim.h ---- */

static void a_backend_of_another_version_is_refused(void **state)
{
    (void)state;
    fsdp_context *none = NULL;
    for (int i = 0; i < 4; i++) {
        fsdp_backend backend = *fsdp_host_backend();
        fsdp_device_ops device = *backend.device;
        fsdp_comm_ops comm = *backend.comm;
        fsdp_side_ops side = *backend.side;
        size_t *const size[] = {&backend.size, &device.size, &comm.size, &side.size};
        backend.device = &device, backend.comm = &comm, backend.side = &side;
        *size[i] -= 8;
        fsdp_config c = FSDP_CONFIG_INIT;
        c.backend = &backend;
        ARG(fsdp_context_create(&c, &none), "fsdp_config.backend has the tables of another version");
    }
}

static void contexts(void **state)
{
    (void)state;
    fsdp_context *none = NULL;
    fsdp_config c = FSDP_CONFIG_INIT;
    ARG(fsdp_context_create(NULL, &none), "fsdp_context_create: config is NULL");
    ARG(fsdp_context_create(&c, NULL), "out_ctx is NULL");
    CONFIG_SIZES(fsdp_context_create(config, &none), fsdp_config, FSDP_CONFIG_INIT, "fsdp_config");
    c.debug = 8;
    ARG(fsdp_context_create(&c, &none), "fsdp_config.debug is 0x8");
    c.debug = 0, c.timeout_ns = 0;
    ARG(fsdp_context_create(&c, &none), "fsdp_config.timeout_ns is 0");
    c.timeout_ns = second_ns, c.flight_path = "";
    ARG(fsdp_context_create(&c, &none), "fsdp_config.flight_path is empty");
    c.flight_path = NULL, c.host.alloc = meter_host(NULL).alloc;
    ARG(fsdp_context_create(&c, &none), "give both, or neither");

    c = (fsdp_config)FSDP_CONFIG_INIT;
    CONFIG_SIZES((c.backend_config = config, fsdp_context_create(&c, &none)), fsdp_host_config, FSDP_HOST_CONFIG_INIT,
                 "fsdp_host_config");
    fsdp_host_config host = FSDP_HOST_CONFIG_INIT;
    c.backend_config = &host;
    host.rank = 1;
    ARG(fsdp_context_create(&c, &none), "fsdp_host_config.rank is 1 in a world of 1");
    fsdp_local *local = NULL;
    ARG(fsdp_local_create(0, NULL, &local), "a world of 0, expected 1 to 64");
    ARG(fsdp_local_create(65, NULL, &local), "a world of 65");
    ARG(fsdp_local_create(2, NULL, NULL), "out_local is NULL");

    c.backend = fsdp_sim_backend();
    CONFIG_SIZES((c.backend_config = config, fsdp_context_create(&c, &none)), fsdp_sim_config, FSDP_SIM_CONFIG_INIT,
                 "fsdp_sim_config");
    static const fsdp_sim_config sims[] = {{sizeof *sims, 0, 0, {0, 0}, 0, 0, 4096, 4096},
                                           {sizeof *sims, 4, 4, {0, 0}, 0, 0, 4096, 4096},
                                           {sizeof *sims, 4, 0, {0, 0}, 0, 0, 128, 4096},
                                           {sizeof *sims, 4, 0, {0, 0}, 0, 0, 768, 4096},
                                           {sizeof *sims, 4, 0, {0, 0}, 0, 0, 4096, 0},
                                           {sizeof *sims, 4, 0, {0, 0}, 0, 0, 4096, 3000},
                                           {sizeof *sims, UINT32_MAX, 0, {0, 0}, 0, 0, 4096, 4096}};
    for (size_t i = 0; i < sizeof sims / sizeof *sims; i++) {
        c.backend_config = &sims[i];
        ARG(fsdp_context_create(&c, &none), "fsdp_sim_config");
    }
    assert_null(none);
    assert_null(local);
}

static void a_context_is_asked(void **state)
{
    (void)state;
    double value = 1.0;
    ARG(fsdp_context_check(NULL), "ctx is NULL");
    ARG(fsdp_sum_host(NULL, &value, 1), "ctx is NULL");
    ARG(fsdp_sum_host(ctx(), NULL, 1), "values is NULL");
    ARG(fsdp_sum_host(ctx(), &value, 0), "n is 0, expected 1 to 64");
    ARG(fsdp_sum_host(ctx(), &value, 65), "n is 65");
    ARG(fsdp_barrier_host(NULL), "ctx is NULL");
    ARG(fsdp_broadcast_host(NULL, &value, 8, 0), "ctx is NULL");
    ARG(fsdp_broadcast_host(ctx(), NULL, 8, 0), "data is NULL");
    ARG(fsdp_broadcast_host(ctx(), &value, 0, 0), "0 bytes, expected 1 to 1048576");
    ARG(fsdp_broadcast_host(ctx(), &value, (1 << 20) + 1, 0), "1048577 bytes");
    ARG(fsdp_broadcast_host(ctx(), &value, 8, 1), "root 1 in a world of 1");
    fsdp_counters counters = FSDP_COUNTERS_INIT;
    ARG(fsdp_context_counters(NULL, &counters), "ctx is NULL");
    ARG(fsdp_context_counters(ctx(), NULL), "out_counters is NULL");
    RESULT_SIZES(fsdp_context_counters(ctx(), out), fsdp_counters, FSDP_COUNTERS_INIT, "fsdp_counters");
    assert_true(value >= 1.0 && value <= 1.0);
    REFUSED(fsdp_context_destroy(ctx()), FSDP_ERR_STATE, "1 model, 1 stream (compute) of yours still live");
}

/* ---- device.h ---- */

static void nothing(void *arg) { (void)arg; }

static void streams_and_events(void **state)
{
    (void)state;
    fsdp_stream *s = program.s, *none = NULL;
    fsdp_event *event = NULL;
    char bytes[8];
    bool done;
    ARG(fsdp_stream_create(NULL, "x", &none), "ctx is NULL");
    ARG(fsdp_stream_create(ctx(), NULL, &none), "name is NULL");
    ARG(fsdp_stream_create(ctx(), "x", NULL), "out_stream is NULL");
    REFUSED(fsdp_stream_release(fsdp_context_lane(ctx(), FSDP_LANE_COPY)), FSDP_ERR_STATE,
            "copy is a lane of the library");
    ARG(fsdp_stream_host_call(NULL, nothing, NULL), "fsdp_stream_host_call: stream is NULL");
    ARG(fsdp_stream_host_call(s, NULL, NULL), "fn is NULL");
    ARG(fsdp_stream_delay(NULL, 1), "stream is NULL");
    ARG(fsdp_stream_copy(NULL, bytes, bytes + 4, 4), "stream is NULL");
    ARG(fsdp_stream_copy(s, NULL, bytes, 4), "dst is NULL");
    ARG(fsdp_stream_copy(s, bytes, NULL, 4), "src is NULL");
    ARG(fsdp_stream_copy(s, bytes, bytes + 3, 4), "4 bytes each, overlap");
    ARG(fsdp_stream_copy(s, bytes + 3, bytes, 4), "4 bytes each, overlap");
    ARG(fsdp_stream_copy(s, bytes, bytes, UINT64_MAX), "overlap");
    ARG(fsdp_stream_fill(NULL, bytes, 0, 4), "stream is NULL");
    ARG(fsdp_stream_fill(s, NULL, 0, 4), "dst is NULL");
    ARG(fsdp_stream_wait_stream(NULL, s), "stream is NULL");
    ARG(fsdp_stream_wait_stream(s, NULL), "stream is NULL");
    ARG(fsdp_stream_drain_host(NULL, 1), "stream is NULL");
    ARG(fsdp_event_create(NULL, &event), "ctx is NULL");
    ARG(fsdp_event_create(ctx(), NULL), "out_event is NULL");
    OK(fsdp_event_create(ctx(), &event));
    ARG(fsdp_event_record(NULL, s), "event is NULL");
    ARG(fsdp_event_record(event, NULL), "stream is NULL");
    ARG(fsdp_stream_wait_event(NULL, event), "stream is NULL");
    ARG(fsdp_stream_wait_event(s, NULL), "event is NULL");
    ARG(fsdp_event_is_done(NULL, &done), "event is NULL");
    ARG(fsdp_event_is_done(event, NULL), "out_done is NULL");
    ARG(fsdp_event_wait_host(NULL, 1), "event is NULL");
    fsdp_event_destroy(event);
    assert_null(none);
}

static void a_stream_of_another_context_is_refused(void **state)
{
    (void)state;
    rank other = rank_default();
    OK(open_context(&other));
    fsdp_event *event;
    fsdp_view view = FSDP_VIEW_INIT;
    fsdp_pass_args pass = FSDP_PASS_ARGS_INIT;
    fsdp_adamw_args adamw = FSDP_ADAMW_ARGS_INIT;
    float value = 0.0f;
    OK(fsdp_event_create(ctx(), &event));
    ARG(fsdp_stream_wait_stream(program.s, other.s), "stream compute belongs to another context");
    ARG(fsdp_event_record(event, other.s), "another context");
    ARG(fsdp_stream_wait_event(other.s, event), "another context");
    ARG(fsdp_barrier(fsdp_context_comm(ctx()), other.s, NULL), "another context");
    ARG(fsdp_pass_begin(program.model, &pass, other.s), "another context");
    ARG(fsdp_pass_end(program.model, other.s), "another context");
    ARG(fsdp_forward_begin(program.unit[1], other.s, &view), "another context");
    ARG(fsdp_backward_begin(program.unit[1], other.s, &view), "another context");
    ARG(fsdp_forward_end(program.unit[1], other.s), "another context");
    ARG(fsdp_backward_end(program.unit[1], other.s), "another context");
    ARG(fsdp_unit_use(program.unit[1], other.s), "another context");
    ARG(fsdp_update_begin(program.model, other.s), "another context");
    ARG(fsdp_update_unit(program.unit[1], other.s), "another context");
    ARG(fsdp_update_end(program.model, other.s), "another context");
    ARG(fsdp_adamw_step(program.opt, &adamw, other.s), "another context");
    ARG(fsdp_step_sum(program.model, 0, &value, other.s), "another context");
    ARG(fsdp_pass_abort(program.model, other.s), "another context");
    fsdp_event_destroy(event);
    OK(fsdp_stream_release(other.s));
    OK(fsdp_context_destroy(other.ctx));
}

/* ---- alloc.h ---- */

static void allocators(void **state)
{
    (void)state;
    fsdp_allocator *a = NULL;
    fsdp_allocator_config c = FSDP_ALLOCATOR_CONFIG_INIT;
    void *ptr = NULL;
    ARG(fsdp_allocator_create(NULL, &c, &a), "ctx is NULL");
    ARG(fsdp_allocator_create(ctx(), &c, NULL), "out_allocator is NULL");
    CONFIG_SIZES(fsdp_allocator_create(ctx(), config, &a), fsdp_allocator_config, FSDP_ALLOCATOR_CONFIG_INIT,
                 "fsdp_allocator_config");
    c.name = NULL;
    ARG(fsdp_allocator_create(ctx(), &c, &a), "fsdp_allocator_config.name is NULL");
    c.name = "mine", c.policy = (fsdp_alloc_policy)2;
    ARG(fsdp_allocator_create(ctx(), &c, &a), "allocator mine: policy 2 does not exist");
    assert_null(a);
    OK(fsdp_allocator_create(ctx(), NULL, &a));
    ARG(fsdp_allocator_alloc(NULL, 1, program.s, NULL, &ptr), "allocator is NULL");
    ARG(fsdp_allocator_alloc(a, 1, NULL, NULL, &ptr), "stream is NULL");
    ARG(fsdp_allocator_alloc(a, 1, program.s, NULL, NULL), "out_ptr is NULL");
    OK(fsdp_allocator_alloc(a, 1, program.s, NULL, &ptr));
    ARG(fsdp_allocator_record_stream(NULL, ptr, program.s), "allocator is NULL");
    ARG(fsdp_allocator_record_stream(a, NULL, program.s), "is no live block");
    ARG(fsdp_allocator_record_stream(a, ptr, NULL), "stream is NULL");
    ARG(fsdp_allocator_record_use(NULL, ptr, program.s), "allocator is NULL");
    ARG(fsdp_allocator_record_use(a, NULL, program.s), "is no live block");
    ARG(fsdp_allocator_record_use(a, ptr, NULL), "stream is NULL");
    ARG(fsdp_allocator_free(NULL, ptr), "allocator is NULL");
    ARG(fsdp_allocator_trim_host(NULL), "allocator is NULL");
    ARG(fsdp_allocator_reset_peaks(NULL), "allocator is NULL");
    fsdp_alloc_stats stats = FSDP_ALLOC_STATS_INIT;
    ARG(fsdp_allocator_stats(NULL, &stats), "allocator is NULL");
    ARG(fsdp_allocator_stats(a, NULL), "out_stats is NULL");
    RESULT_SIZES(fsdp_allocator_stats(a, out), fsdp_alloc_stats, FSDP_ALLOC_STATS_INIT, "fsdp_alloc_stats");
    OK(fsdp_allocator_free(a, ptr));
    OK(fsdp_allocator_destroy(a));
}

/* ---- comm.h ---- */

static void collectives(void **state)
{
    (void)state;
    fsdp_comm *comm = fsdp_context_comm(ctx());
    float x[4] = {0}, y[4] = {0};
    fsdp_work *work = NULL;
    const fsdp_dtype bad = (fsdp_dtype)9, fp32 = FSDP_DTYPE_FP32;
    const uint64_t beyond = ((uint64_t)1 << 48) + 1;
    ARG(fsdp_all_gather(NULL, x, y, 1, fp32, program.s, &work), "fsdp_all_gather: comm is NULL");
    ARG(fsdp_all_gather(comm, NULL, y, 1, fp32, program.s, &work), "fsdp_all_gather: a buffer is NULL");
    ARG(fsdp_all_gather(comm, x, NULL, 1, fp32, program.s, &work), "a buffer is NULL");
    ARG(fsdp_all_gather(comm, x, y, 1, bad, program.s, &work), "9 is no dtype");
    ARG(fsdp_all_gather(comm, x, y, 1, FSDP_DTYPE_INHERIT, program.s, &work), "0 is no dtype");
    ARG(fsdp_all_gather(comm, x, y, beyond, fp32, program.s, &work), "count 281474976710657 is beyond 2^48");
    ARG(fsdp_all_gather(comm, x, y, 1, fp32, NULL, &work), "stream is NULL");
    ARG(fsdp_reduce_scatter(NULL, x, y, 1, fp32, program.s, &work), "fsdp_reduce_scatter: comm is NULL");
    ARG(fsdp_reduce_scatter(comm, NULL, y, 1, fp32, program.s, &work), "a buffer is NULL");
    ARG(fsdp_reduce_scatter(comm, x, NULL, 1, fp32, program.s, &work), "a buffer is NULL");
    ARG(fsdp_reduce_scatter(comm, x, y, 1, bad, program.s, &work), "9 is no dtype");
    ARG(fsdp_reduce_scatter(comm, x, y, 1, fp32, NULL, &work), "stream is NULL");
    ARG(fsdp_all_reduce(NULL, x, y, 1, fp32, program.s, &work), "fsdp_all_reduce: comm is NULL");
    ARG(fsdp_all_reduce(comm, NULL, y, 1, fp32, program.s, &work), "a buffer is NULL");
    ARG(fsdp_all_reduce(comm, x, NULL, 1, fp32, program.s, &work), "a buffer is NULL");
    ARG(fsdp_all_reduce(comm, x, y, 1, bad, program.s, &work), "9 is no dtype");
    ARG(fsdp_all_reduce(comm, x, y, 1, fp32, NULL, &work), "stream is NULL");
    ARG(fsdp_broadcast(NULL, x, 1, fp32, 0, program.s, &work), "fsdp_broadcast: comm is NULL");
    ARG(fsdp_broadcast(comm, NULL, 1, fp32, 0, program.s, &work), "a buffer is NULL");
    ARG(fsdp_broadcast(comm, x, 1, bad, 0, program.s, &work), "9 is no dtype");
    ARG(fsdp_broadcast(comm, x, 1, fp32, 1, program.s, &work), "root 1 in a world of 1");
    ARG(fsdp_broadcast(comm, x, 1, fp32, 0, NULL, &work), "stream is NULL");
    ARG(fsdp_barrier(NULL, program.s, &work), "fsdp_barrier: comm is NULL");
    ARG(fsdp_barrier(comm, NULL, &work), "stream is NULL");
    assert_null(work);
    bool done;
    OK(fsdp_all_reduce(comm, NULL, NULL, 0, fp32, program.s, &work)); /* nothing of nobody's is fine */
    ARG(fsdp_work_wait(NULL, program.s), "work is NULL");
    ARG(fsdp_work_wait(work, NULL), "stream is NULL");
    ARG(fsdp_work_is_done(NULL, &done), "work is NULL");
    ARG(fsdp_work_is_done(work, NULL), "out_done is NULL");
    ARG(fsdp_work_wait_host(NULL, 1), "work is NULL");
    OK(fsdp_work_wait_host(work, 10 * second_ns));
    fsdp_work_release(work);
}

/* In a world where this rank is the third of four: it touches no byte, so that any address serves. */
enum { GATHER, SCATTER, REDUCE };
static const uint64_t base = (uint64_t)1 << 40, most = (uint64_t)1 << 48; /* base: an address */
static const struct buffer_case {
    int call;
    fsdp_dtype dtype;
    uint64_t send, recv, count; /* bytes from base; elements */
    const char *says;           /* NULL: it is fine */
} buffer_cases[] = {
    {GATHER, FSDP_DTYPE_FP32, 80, 0, 10, NULL}, /* in place: 2 * 10 floats into 40 */
    {GATHER, FSDP_DTYPE_FP32, 160, 0, 10, NULL},
    {GATHER, FSDP_DTYPE_FP32, 0, 40, 10, NULL},
    {GATHER, FSDP_DTYPE_FP32, 4, 40, 10, "fsdp_all_gather: send (40 bytes at 0x10000000004) and recv (160 bytes at "},
    {GATHER, FSDP_DTYPE_FP32, 156, 0, 10, "is not in place, which is send == recv + rank * count"},
    {GATHER, FSDP_DTYPE_FP32, 84, 0, 10, "overlap, and rank 2 is not in place"},
    {GATHER, FSDP_DTYPE_FP32, 0, 0, 10, "overlap"}, /* rank 0's place */
    {GATHER, FSDP_DTYPE_FP32, 0, 0, 0, NULL},
    {GATHER, FSDP_DTYPE_FP32, 2, 400, 10, "send is at 0x10000000002, which is no multiple of 4 bytes, one fp32"},
    {GATHER, FSDP_DTYPE_FP32, 400, 1, 10, "recv is at 0x10000000001, which is no multiple of 4 bytes"},
    {GATHER, FSDP_DTYPE_BF16, 2, 400, 10, NULL},
    {GATHER, FSDP_DTYPE_BF16, 3, 400, 10, "no multiple of 2 bytes, one bf16"},
    {GATHER, FSDP_DTYPE_FP32, most * 16, 0, most, NULL}, /* all ranks have 2^52 bytes */
    {GATHER, FSDP_DTYPE_FP32, most * 8, 0, most, NULL},
    {GATHER, FSDP_DTYPE_FP32, most * 16 - 4, 0, most, "overlap"},
    {SCATTER, FSDP_DTYPE_FP32, 0, 80, 10, NULL}, /* in place */
    {SCATTER, FSDP_DTYPE_FP32, 0, 160, 10, NULL},
    {SCATTER, FSDP_DTYPE_FP32, 40, 0, 10, NULL},
    {SCATTER, FSDP_DTYPE_FP32, 0, 156, 10, "which is recv == send + rank * count"},
    {SCATTER, FSDP_DTYPE_FP32, 0, 0, 10,
     "fsdp_reduce_scatter: send (160 bytes at 0x10000000000) and recv (40 bytes at "},
    {SCATTER, FSDP_DTYPE_FP32, 36, 0, 10, "overlap"},
    {SCATTER, FSDP_DTYPE_FP32, 0, 402, 10, "recv is at 0x10000000192"},
    {REDUCE, FSDP_DTYPE_FP32, 0, 0, 10, NULL}, /* in place */
    {REDUCE, FSDP_DTYPE_FP32, 0, 40, 10, NULL},
    {REDUCE, FSDP_DTYPE_FP32, 40, 0, 10, NULL},
    {REDUCE, FSDP_DTYPE_FP32, 36, 0, 10, "which is send == recv"},
    {REDUCE, FSDP_DTYPE_FP32, 0, 36, 10, "fsdp_all_reduce: send (40 bytes at 0x10000000000) and recv (40 bytes at "},
    {REDUCE, FSDP_DTYPE_FP32, 1, 1, 10, "send is at 0x10000000001"},
};

static fsdp_status call_case(fsdp_comm *comm, fsdp_stream *s, const struct buffer_case *it)
{
    const void *send = (const void *)(uintptr_t)(base + it->send);
    void *recv = (void *)(uintptr_t)(base + it->recv);
    switch (it->call) {
    case GATHER: return fsdp_all_gather(comm, send, recv, it->count, it->dtype, s, NULL);
    case SCATTER: return fsdp_reduce_scatter(comm, send, recv, it->count, it->dtype, s, NULL);
    default: return fsdp_all_reduce(comm, send, recv, it->count, it->dtype, s, NULL);
    }
}

static void buffers_of_collectives(void **state)
{
    (void)state;
    fsdp_sim_config sim = FSDP_SIM_CONFIG_INIT;
    fsdp_config config = FSDP_CONFIG_INIT;
    fsdp_context *third = NULL;
    fsdp_stream *s = NULL;
    sim.world = 4, sim.rank = 2;
    config.backend = fsdp_sim_backend(), config.backend_config = &sim;
    OK(fsdp_context_create(&config, &third));
    OK(fsdp_stream_create(third, "test", &s));
    fsdp_comm *comm = fsdp_context_comm(third);
    for (size_t i = 0; i < sizeof buffer_cases / sizeof *buffer_cases; i++) {
        const char *says = buffer_cases[i].says;
        fsdp_status status = call_case(comm, s, &buffer_cases[i]);
        bool right =
            says != NULL ? status == FSDP_ERR_ARG && strstr(fsdp_last_error(), says) != NULL : status == FSDP_OK;
        if (!right) fail_msg("case %zu: %s: %s", i, fsdp_status_name(status), fsdp_last_error());
    }
    ARG(fsdp_broadcast(comm, (void *)(uintptr_t)(base + 2), 4, FSDP_DTYPE_FP32, 0, s, NULL),
        "fsdp_broadcast: data is at 0x10000000002, which is no multiple of 4 bytes");
    OK(fsdp_broadcast(comm, (void *)(uintptr_t)base, 4, FSDP_DTYPE_FP32, 0, s, NULL));
    OK(fsdp_stream_release(s));
    OK(fsdp_context_destroy(third));
}

/* So many ranks that a buffer of all is larger than any address space: what lies behind it overlaps, wherever it is. */
static void a_buffer_beyond_all_addresses_overlaps(void **state)
{
    (void)state;
    fsdp_sim_config sim = FSDP_SIM_CONFIG_INIT;
    fsdp_config config = FSDP_CONFIG_INIT;
    fsdp_context *last = NULL;
    fsdp_stream *s = NULL;
    sim.world = 1 << 20, sim.rank = sim.world - 1;
    config.backend = fsdp_sim_backend(), config.backend_config = &sim;
    OK(fsdp_context_create(&config, &last));
    OK(fsdp_stream_create(last, "test", &s));
    fsdp_comm *comm = fsdp_context_comm(last);
    ARG(fsdp_all_gather(comm, (void *)(UINTPTR_MAX - 3), (void *)4096, most, FSDP_DTYPE_FP32, s, NULL), "overlap");
    ARG(fsdp_reduce_scatter(comm, (void *)4096, (void *)((uintptr_t)0 - 4096), most, FSDP_DTYPE_FP32, s, NULL),
        "overlap");
    OK(fsdp_stream_release(s));
    OK(fsdp_context_destroy(last));
}

/* ---- trace.h ---- */

static void traces(void **state)
{
    (void)state;
    fsdp_trace *trace = NULL, *second = NULL;
    fsdp_trace_summary summary = FSDP_TRACE_SUMMARY_INIT;
    ARG(fsdp_trace_start(NULL, 10, &trace), "ctx is NULL");
    ARG(fsdp_trace_start(ctx(), 10, NULL), "out_trace is NULL");
    ARG(fsdp_trace_start(ctx(), 0, &trace), "max_records is 0");
    ARG(fsdp_trace_start(ctx(), UINT64_MAX, &trace), "max_records is 18446744073709551615");
    OK(fsdp_trace_start(ctx(), 10, &trace));
    REFUSED(fsdp_trace_start(ctx(), 10, &second), FSDP_ERR_STATE, "a trace is on in this context");
    ARG(fsdp_trace_stop_host(NULL), "trace is NULL");
    REFUSED(fsdp_trace_summarize(trace, program.s, &summary), FSDP_ERR_STATE,
            "the trace is on: call fsdp_trace_stop_host first");
    REFUSED(fsdp_trace_write_svg(trace, "/nowhere/x.svg", "x"), FSDP_ERR_STATE, "call fsdp_trace_stop_host first");
    OK(fsdp_trace_stop_host(trace));
    ARG(fsdp_trace_summarize(NULL, program.s, &summary), "trace is NULL");
    ARG(fsdp_trace_summarize(trace, NULL, &summary), "compute is NULL");
    ARG(fsdp_trace_summarize(trace, program.s, NULL), "out_summary is NULL");
    RESULT_SIZES(fsdp_trace_summarize(trace, program.s, out), fsdp_trace_summary, FSDP_TRACE_SUMMARY_INIT,
                 "fsdp_trace_summary");
    ARG(fsdp_trace_write_svg(NULL, "x", "x"), "trace is NULL");
    ARG(fsdp_trace_write_svg(trace, NULL, "x"), "path is NULL");
    ARG(fsdp_trace_write_svg(trace, "", "x"), "path is empty");
    ARG(fsdp_trace_write_svg(trace, "x", NULL), "title is NULL");
    REFUSED(fsdp_trace_write_svg(trace, "/nowhere/at/all/x.svg", "x"), FSDP_ERR_IO, "/nowhere/at/all/x.svg");
    assert_string_equal(fsdp_trace_stream_name(trace, -1), "");
    assert_string_equal(fsdp_trace_stream_name(trace, 16), "");
    assert_null(fsdp_trace_at(trace, UINT64_MAX));
    fsdp_trace_destroy(trace);
    assert_null(second);
}

/* ---- And the program goes on ---- */

static void after_all_of_it_the_program_comes_out_the_same(void **state)
{
    static void (*const all[])(void **) = {
        a_context_is_asked, streams_and_events, a_stream_of_another_context_is_refused,
        allocators,         collectives,        traces};
    assert_program_unharmed(state, all, sizeof all / sizeof *all);
}

int run_argument_errors(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, open_program, close_program)
    const struct CMUnitTest tests[] = {
        TEST(version_is_one_number),
        TEST(names_are_never_null),
        TEST(each_thread_has_its_own_sentence),
        TEST(questions_to_nobody_have_empty_answers),
        TEST(giving_nothing_back_is_nothing),
        TEST(a_backend_of_another_version_is_refused),
        TEST(contexts),
        TEST(a_context_is_asked),
        TEST(streams_and_events),
        TEST(a_stream_of_another_context_is_refused),
        TEST(allocators),
        TEST(collectives),
        TEST(buffers_of_collectives),
        TEST(a_buffer_beyond_all_addresses_overlaps),
        TEST(traces),
        TEST(after_all_of_it_the_program_comes_out_the_same),
    };
    return cmocka_run_group_tests_name("wrong arguments of lib", tests, NULL, NULL);
}
