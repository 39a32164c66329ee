/* SPDX-License-Identifier: MIT */
/* The sim backend beside time: costs of operations, reports, memory, configs, aborts, the side channel. */
#include "sim_rig.h"

#include <string.h>
#include <unistd.h>

/* ---- Operations ---- */

static void an_operation_costs_its_latency_and_the_bytes_it_touches(void **unused)
{
    (void)unused;
    rig r;
    fsdp_sim_config config = FSDP_SIM_CONFIG_INIT;
    config.kernel_latency_ns = 7;
    config.kernel_bytes_per_second = 2000000000; /* 2 bytes a nanosecond */
    open_rig(&r, &config, 0);
    const struct {
        fsdp_device_op op;
        uint64_t ns;
    } cases[] = {
        {{.kind = FSDP_OPERATION_COPY, .u.copy = {.bytes = 1000}}, 7 + 1000},
        {{.kind = FSDP_OPERATION_FILL, .u.fill = {.bytes = 1001}}, 7 + 501},
        {{.kind = FSDP_OPERATION_CAST, .u.cast = {NULL, NULL, 100, FSDP_DTYPE_BF16, FSDP_DTYPE_FP32}}, 7 + 300},
        {{.kind = FSDP_OPERATION_ADD, .u.add = {NULL, NULL, 100, FSDP_DTYPE_FP32, FSDP_DTYPE_BF16}}, 7 + 500},
        {{.kind = FSDP_OPERATION_SQUARE_SUM, .u.square_sum = {.count = 100, .dtype = FSDP_DTYPE_FP32}}, 7 + 204},
        /* master 2 × 2, gradient 4, m and v 2 × 4 each, and the step's record */
        {{.kind = FSDP_OPERATION_ADAMW,
          .u.adamw = {.count = 100, .master_dtype = FSDP_DTYPE_BF16, .gradient_dtype = FSDP_DTYPE_FP32}},
         7 + 1200 + sizeof(fsdp_device_step) / 2},
        {{.kind = FSDP_OPERATION_DELAY, .u.delay = {123}}, 123},
    };
    uint64_t now_ns = 0;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fsdp_span span;
        assert_int_equal(r.device->launch(r.dev, r.a, &cases[i].op, &span), FSDP_OK);
        assert_span(span, now_ns, now_ns + cases[i].ns);
        now_ns += cases[i].ns;
    }
    close_rig(&r);
}

static void a_host_call_is_refused_and_says_what_to_use(void **unused)
{
    (void)unused;
    rig r;
    open_rig(&r, NULL, 0);
    fsdp_device_op op = {.kind = FSDP_OPERATION_HOST_CALL};
    assert_false(r.caps.can_host_call);
    assert_int_equal(r.device->launch(r.dev, r.a, &op, NULL), FSDP_ERR_UNSUPPORTED);
    assert_non_null(strstr(fsdp_last_error(), "fsdp_stream_delay"));
    op.kind = FSDP_OPERATION_BARRIER;
    assert_int_equal(r.device->launch(r.dev, r.a, &op, NULL), FSDP_ERR_UNSUPPORTED);
    assert_int_equal(r.device->check(r.dev), FSDP_OK); /* refused, not broken */
    close_rig(&r);
}

static const fsdp_report_record *report(rig *r, fsdp_report_record *to, fsdp_step_input *at, uint64_t n, bool skip)
{
    fsdp_device_op given = {.kind = FSDP_OPERATION_STEP_INPUT,
                            .u.step_input = {NULL, at, {n, 0.25f, 1.0f, 1.0f, 0.9f, 0.999f, skip, 1, 0}}};
    fsdp_device_op op = {.kind = FSDP_OPERATION_STEP_RESULT, .u.step_result = {NULL, NULL, NULL, at, to, 1}};
    memset(to, 0xff, sizeof *to);
    assert_int_equal(r->device->launch(r->dev, r->a, &given, NULL), FSDP_OK);
    assert_int_equal(r->device->launch(r->dev, r->a, &op, NULL), FSDP_OK);
    assert_int_equal(to->step, n);
    assert_int_equal(to->skipped, skip);
    assert_true(to->lr == 0.25f && to->grad_norm == 0.0f && to->clip_scale == 1.0f && to->sums[15] == 0.0f);
    return to;
}

static void reports_are_written_and_count_updates_by_model(void **unused)
{
    (void)unused;
    rig r;
    open_rig(&r, NULL, 0);
    void *pinned, *steps;
    assert_int_equal(r.device->mem_alloc(r.dev, 4096, FSDP_MEMORY_KIND_PINNED, &pinned), FSDP_OK);
    assert_int_equal(r.device->mem_alloc(r.dev, 4096, FSDP_MEMORY_KIND_DEVICE, &steps), FSDP_OK);
    fsdp_step_input *one = steps, *two = one + 1;
    assert_int_equal(report(&r, pinned, one, 1, false)->updates, 1);
    assert_int_equal(report(&r, pinned, one, 2, true)->updates, 1);
    assert_int_equal(report(&r, pinned, two, 7, false)->updates, 1);
    assert_int_equal(report(&r, pinned, one, 3, false)->updates, 2);
    r.device->mem_free(r.dev, pinned, 4096, FSDP_MEMORY_KIND_PINNED);
    r.device->mem_free(r.dev, steps, 4096, FSDP_MEMORY_KIND_DEVICE);
    close_rig(&r);
}

/* ---- Memory ---- */

static void device_addresses_are_aligned_and_never_given_out_twice(void **unused)
{
    (void)unused;
    rig r;
    fsdp_sim_config config = FSDP_SIM_CONFIG_INIT;
    config.alignment = 512;
    config.granularity = 1 << 21;
    open_rig(&r, &config, 0);
    assert_int_equal(r.caps.alignment, 512);
    assert_int_equal(r.caps.granularity, 1 << 21);
    assert_false(r.caps.has_data);
    uint64_t end = 0;
    for (int i = 0; i < 8; i++) {
        void *ptr = NULL;
        uint64_t bytes = (uint64_t)(i + 1) << 21;
        assert_int_equal(r.device->mem_alloc(r.dev, bytes, FSDP_MEMORY_KIND_DEVICE, &ptr), FSDP_OK);
        assert_int_equal((uintptr_t)ptr % 512, 0);
        assert_true((uintptr_t)ptr > end); /* not even behind one another */
        end = (uintptr_t)ptr + bytes;
        r.device->mem_free(r.dev, ptr, bytes, FSDP_MEMORY_KIND_DEVICE);
    }
    assert_int_equal(r.device->check(r.dev), FSDP_OK);
    close_rig(&r);
}

static void memory_without_end_is_refused(void **unused)
{
    (void)unused;
    rig r;
    open_rig(&r, NULL, 0);
    void *ptr = NULL;
    assert_int_equal(r.device->mem_alloc(r.dev, (uint64_t)1 << 63, FSDP_MEMORY_KIND_DEVICE, &ptr), FSDP_ERR_NO_MEMORY);
    assert_null(ptr);
    uint64_t huge = (uint64_t)1 << 62; /* far more than any machine has: a model nobody can run is still a model */
    assert_int_equal(r.device->mem_alloc(r.dev, huge, FSDP_MEMORY_KIND_DEVICE, &ptr), FSDP_OK);
    r.device->mem_free(r.dev, ptr, huge, FSDP_MEMORY_KIND_DEVICE);
    close_rig(&r);
}

static void a_free_that_matches_no_block_breaks_the_device(void **unused)
{
    (void)unused;
    for (int wrong = 0; wrong < 3; wrong++) {
        rig r;
        void *ptr = NULL;
        open_rig(&r, NULL, 0);
        assert_int_equal(r.device->mem_alloc(r.dev, 8192, FSDP_MEMORY_KIND_DEVICE, &ptr), FSDP_OK);
        r.device->mem_free(r.dev, wrong == 0 ? (char *)ptr + 256 : ptr, wrong == 1 ? 4096 : 8192,
                           wrong == 2 ? FSDP_MEMORY_KIND_PINNED : FSDP_MEMORY_KIND_DEVICE);
        assert_int_equal(r.device->check(r.dev), FSDP_ERR_DEVICE);
        assert_non_null(strstr(fsdp_last_error(), "no such block"));
        assert_int_equal(r.device->stream_drain(r.dev, r.a, 0), FSDP_ERR_DEVICE);
        r.device->mem_free(r.dev, ptr, 8192, FSDP_MEMORY_KIND_DEVICE);
        close_rig(&r);
    }
}

/* ---- Config ---- */

static void wrong_configs_are_refused_by_every_open(void **unused)
{
    (void)unused;
    fsdp_sim_config config[7];
    for (int i = 0; i < 7; i++) config[i] = (fsdp_sim_config)FSDP_SIM_CONFIG_INIT;
    config[0].world = 0;
    config[1].rank = 1; /* of one */
    config[2].alignment = 128;
    config[3].alignment = 768;
    config[4].granularity = 0;
    config[5].granularity = 5000;
    config[6].size = sizeof(size_t);
    static const char *const words[7] = {
        "world of 0", "rank 1", "alignment is 128", "alignment is 768", "is 0,", "granularity is 5000", "size is"};
    rig r;
    open_rig(&r, NULL, 0);
    for (int i = 0; i < 7; i++) {
        fsdp_device_args device = {sizeof device, &config[i], &r.host, 0, FOREVER, NULL, NULL};
        fsdp_comm_args comm = {.size = sizeof comm, .backend_config = &config[i], .dev = r.dev, .host = &r.host};
        fsdp_side_args side = {.size = sizeof side, .backend_config = &config[i], .host = &r.host};
        uint32_t rank = 9, world = 9;
        void *out = NULL;
        assert_int_equal(r.device->open(&device, &out, &r.caps), FSDP_ERR_ARG);
        assert_non_null(strstr(fsdp_last_error(), words[i]));
        assert_int_equal(r.backend->comm->open(&comm, &out), FSDP_ERR_ARG);
        assert_int_equal(r.backend->side->open(&side, &out, &rank, &world), FSDP_ERR_ARG);
        assert_true(out == NULL && rank == 9 && world == 9);
    }
    close_rig(&r);
}

static void granularity_may_be_smaller_than_alignment(void **unused)
{
    (void)unused;
    rig r;
    fsdp_sim_config config = FSDP_SIM_CONFIG_INIT;
    config.granularity = 1;
    void *one = NULL, *two = NULL;
    open_rig(&r, &config, 0);
    assert_int_equal(r.device->mem_alloc(r.dev, 3, FSDP_MEMORY_KIND_DEVICE, &one), FSDP_OK);
    assert_int_equal(r.device->mem_alloc(r.dev, 3, FSDP_MEMORY_KIND_DEVICE, &two), FSDP_OK);
    assert_int_equal((uintptr_t)two % 4096, 0);
    r.device->mem_free(r.dev, one, 3, FSDP_MEMORY_KIND_DEVICE);
    r.device->mem_free(r.dev, two, 3, FSDP_MEMORY_KIND_DEVICE);
    close_rig(&r);
}

/* ---- Aborts and the side channel ---- */

static void an_aborted_device_refuses_everything_but_giving_back(void **unused)
{
    (void)unused;
    rig r;
    open_rig(&r, NULL, 0);
    void *event = new_event(&r);
    bool done = true;
    fsdp_device_op op = {.kind = FSDP_OPERATION_DELAY, .u.delay = {1}};
    r.device->abort(r.dev);
    assert_int_equal(r.device->check(r.dev), FSDP_ERR_ABORTED);
    assert_int_equal(r.device->launch(r.dev, r.a, &op, NULL), FSDP_ERR_ABORTED);
    assert_int_equal(r.device->event_record(r.dev, event, r.a, NULL), FSDP_ERR_ABORTED);
    assert_int_equal(r.device->stream_wait(r.dev, r.a, event, NULL), FSDP_ERR_ABORTED);
    assert_int_equal(r.device->event_query(r.dev, event, &done), FSDP_ERR_ABORTED);
    assert_int_equal(r.device->event_wait(r.dev, event, 0), FSDP_ERR_ABORTED);
    assert_int_equal(r.device->stream_drain(r.dev, r.a, 0), FSDP_ERR_ABORTED);
    r.device->event_destroy(r.dev, event);
    close_rig(&r);
}

static void an_aborted_communicator_refuses_and_leaves_the_other_alone(void **unused)
{
    (void)unused;
    rig r;
    fsdp_sim_config config = byte_a_nanosecond(2);
    open_rig(&r, &config, 0);
    fsdp_collective op = {.kind = FSDP_OPERATION_BARRIER, .dtype = FSDP_DTYPE_FP32};
    assert_int_equal(r.backend->comm->check(r.comm), FSDP_OK);
    r.backend->comm->abort(r.comm);
    assert_int_equal(r.backend->comm->check(r.comm), FSDP_ERR_ABORTED);
    assert_int_equal(r.backend->comm->enqueue(r.comm, r.a, &op, 1), FSDP_ERR_ABORTED);
    assert_int_equal(r.backend->comm->enqueue(r.reduce_comm, r.a, &op, 1), FSDP_OK);
    close_rig(&r);
}

static void on_the_side_channel_every_rank_says_what_this_one_says(void **unused)
{
    (void)unused;
    rig r;
    fsdp_sim_config config = byte_a_nanosecond(5);
    config.rank = 3;
    open_rig(&r, &config, 0);
    const fsdp_side_ops *ops = r.backend->side;
    fsdp_side_args args = {.size = sizeof args, .backend_config = &config, .host = &r.host};
    void *side = NULL;
    uint32_t rank = 0, world = 0;
    char all[5 * 3 + 1] = "";
    assert_int_equal(ops->open(&args, &side, &rank, &world), FSDP_OK);
    assert_int_equal(rank, 3);
    assert_int_equal(world, 5);
    assert_int_equal(ops->all_gather(side, "abc", all, 3, FOREVER), FSDP_OK);
    assert_string_equal(all, "abcabcabcabcabc");
    assert_int_equal(r.device->now_ns(r.dev), 0);
    assert_int_equal(ops->check(side), FSDP_OK);
    (ops->fail)(side, FSDP_ERR_ABORTED, "rank 3 aborted: the loss is not finite");
    (ops->fail)(side, FSDP_ERR_RANK_LOST, "a second thought");
    assert_int_equal(ops->check(side), FSDP_ERR_ABORTED);
    assert_string_equal(fsdp_last_error(), "rank 3 aborted: the loss is not finite");
    assert_int_equal(ops->all_gather(side, "abc", all, 3, FOREVER), FSDP_ERR_ABORTED);
    ops->close(side);
    close_rig(&r);
}

/* ---- Host memory ---- */

static void *no_alloc(void *arg, size_t bytes, size_t alignment)
{
    (void)arg, (void)bytes, (void)alignment;
    return NULL;
}

static void no_free(void *arg, void *ptr, size_t bytes, size_t alignment)
{
    (void)arg, (void)ptr, (void)bytes, (void)alignment;
}

static void without_host_memory_nothing_opens(void **unused)
{
    (void)unused;
    rig r;
    open_rig(&r, NULL, 0);
    const fsdp_host_allocator none = {no_alloc, no_free, NULL, NULL};
    fsdp_device_args device = {sizeof device, NULL, &none, 0, FOREVER, NULL, NULL};
    fsdp_comm_args comm = {.size = sizeof comm, .dev = r.dev, .host = &none};
    fsdp_side_args side = {.size = sizeof side, .host = &none};
    uint32_t rank, world;
    void *out = NULL;
    assert_int_equal(r.device->open(&device, &out, &r.caps), FSDP_ERR_NO_HOST_MEMORY);
    assert_int_equal(r.backend->comm->open(&comm, &out), FSDP_ERR_NO_HOST_MEMORY);
    assert_int_equal(r.backend->side->open(&side, &out, &rank, &world), FSDP_ERR_NO_HOST_MEMORY);
    fsdp_host_allocator real = r.host;
    r.host = none; /* the device keeps a pointer to it */
    assert_int_equal(r.device->stream_create(r.dev, "c", false, &out), FSDP_ERR_NO_HOST_MEMORY);
    assert_int_equal(r.device->event_create(r.dev, &out), FSDP_ERR_NO_HOST_MEMORY);
    assert_int_equal(r.device->mem_alloc(r.dev, 4096, FSDP_MEMORY_KIND_DEVICE, &out), FSDP_ERR_NO_HOST_MEMORY);
    assert_int_equal(r.device->mem_alloc(r.dev, 4096, FSDP_MEMORY_KIND_PINNED, &out), FSDP_ERR_NO_HOST_MEMORY);
    assert_null(out);
    r.host = real;
    close_rig(&r);
}

int main(void)
{
    alarm(60);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_operation_costs_its_latency_and_the_bytes_it_touches),
        cmocka_unit_test(a_host_call_is_refused_and_says_what_to_use),
        cmocka_unit_test(reports_are_written_and_count_updates_by_model),
        cmocka_unit_test(device_addresses_are_aligned_and_never_given_out_twice),
        cmocka_unit_test(memory_without_end_is_refused),
        cmocka_unit_test(a_free_that_matches_no_block_breaks_the_device),
        cmocka_unit_test(wrong_configs_are_refused_by_every_open),
        cmocka_unit_test(granularity_may_be_smaller_than_alignment),
        cmocka_unit_test(an_aborted_device_refuses_everything_but_giving_back),
        cmocka_unit_test(an_aborted_communicator_refuses_and_leaves_the_other_alone),
        cmocka_unit_test(on_the_side_channel_every_rank_says_what_this_one_says),
        cmocka_unit_test(without_host_memory_nothing_opens),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
