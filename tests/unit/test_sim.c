/* SPDX-License-Identifier: MIT */
/* The sim backend: virtual nanoseconds of schedules worked out by hand, to the nanosecond. */
#include "sim_rig.h"

#include <string.h>
#include <unistd.h>

#include "sim/sim.h"

/* ---- Streams and events ---- */

static void streams_run_side_by_side_and_an_event_orders_them(void **unused)
{
    (void)unused;
    rig r;
    open_rig(&r, NULL, 0);
    void *event = new_event(&r);
    assert_span(delay(&r, r.a, 100), 0, 100);
    assert_span(record(&r, event, r.a), 100, 100);
    assert_span(delay(&r, r.a, 40), 100, 140);
    assert_span(delay(&r, r.b, 30), 0, 30);
    assert_span(stand(&r, r.b, event), 30, 100); /* stands for 70 */
    assert_span(delay(&r, r.b, 5), 100, 105);
    assert_span(stand(&r, r.a, event), 140, 140); /* its own past: no standing */
    assert_int_equal(r.device->now_ns(r.dev), 0);
    r.device->event_destroy(r.dev, event);
    close_rig(&r);
}

static void a_wait_means_the_last_record_before_it(void **unused)
{
    (void)unused;
    rig r;
    open_rig(&r, NULL, 0);
    void *event = new_event(&r);
    assert_span(stand(&r, r.b, event), 0, 0); /* never recorded: nothing */
    assert_true(is_done(&r, event));
    delay(&r, r.a, 100);
    record(&r, event, r.a);
    delay(&r, r.a, 100);
    assert_span(stand(&r, r.b, event), 0, 100);
    record(&r, event, r.a);
    assert_span(delay(&r, r.b, 1), 100, 101); /* the second record came after the wait */
    assert_span(stand(&r, r.b, event), 101, 200);
    r.device->event_destroy(r.dev, event);
    assert_span(delay(&r, r.b, 1), 200, 201); /* the wait outlives its event */
    close_rig(&r);
}

static void the_host_clock_moves_only_when_the_host_blocks(void **unused)
{
    (void)unused;
    rig r;
    open_rig(&r, NULL, 0);
    void *event = new_event(&r);
    delay(&r, r.a, 100);
    record(&r, event, r.a);
    delay(&r, r.a, 900);
    assert_false(is_done(&r, event));
    assert_int_equal(r.device->now_ns(r.dev), 0);
    assert_int_equal(r.device->event_wait(r.dev, event, FOREVER), FSDP_OK);
    assert_int_equal(r.device->now_ns(r.dev), 100);
    assert_true(is_done(&r, event));
    assert_span(delay(&r, r.b, 50), 100, 150); /* what is enqueued now cannot start in the past */
    assert_int_equal(r.device->stream_drain(r.dev, r.a, FOREVER), FSDP_OK);
    assert_int_equal(r.device->now_ns(r.dev), 1000);
    assert_int_equal(r.device->stream_drain(r.dev, r.b, FOREVER), FSDP_OK); /* long over */
    assert_int_equal(r.device->now_ns(r.dev), 1000);
    r.device->event_destroy(r.dev, event);
    close_rig(&r);
}

static void a_host_wait_times_out_in_virtual_time_and_can_be_asked_again(void **unused)
{
    (void)unused;
    rig r;
    open_rig(&r, NULL, 0);
    delay(&r, r.a, 100);
    assert_int_equal(r.device->stream_drain(r.dev, r.a, 0), FSDP_ERR_TIMEOUT);
    assert_int_equal(r.device->stream_drain(r.dev, r.a, 60), FSDP_ERR_TIMEOUT);
    assert_int_equal(r.device->now_ns(r.dev), 60);
    assert_non_null(strstr(fsdp_last_error(), "100 ns"));
    assert_int_equal(r.device->stream_drain(r.dev, r.a, 40), FSDP_OK);
    assert_int_equal(r.device->now_ns(r.dev), 100);
    close_rig(&r);
}

static void a_destroyed_stream_has_run_dry(void **unused)
{
    (void)unused;
    rig r;
    void *stream;
    open_rig(&r, NULL, 0);
    assert_int_equal(r.device->stream_create(r.dev, "c", false, &stream), FSDP_OK);
    delay(&r, stream, 77);
    r.device->stream_destroy(r.dev, stream);
    assert_int_equal(r.device->now_ns(r.dev), 77);
    close_rig(&r);
}

static void with_debug_sync_every_operation_has_ended_when_its_call_returns(void **unused)
{
    (void)unused;
    rig r;
    fsdp_sim_config config = byte_a_nanosecond(2);
    open_rig(&r, &config, FSDP_DEBUG_SYNC);
    delay(&r, r.a, 100);
    assert_int_equal(r.device->now_ns(r.dev), 100);
    assert_span(delay(&r, r.b, 1), 100, 101);
    collective(&r, r.comm, r.a, FSDP_OPERATION_ALL_GATHER, FSDP_DTYPE_FP32, 5);
    assert_int_equal(r.device->now_ns(r.dev), 101 + LATENCY + 20);
    close_rig(&r);
}

static void time_saturates_instead_of_starting_again(void **unused)
{
    (void)unused;
    rig r;
    open_rig(&r, NULL, 0);
    delay(&r, r.a, UINT64_MAX - 5);
    assert_span(delay(&r, r.a, 10), UINT64_MAX - 5, UINT64_MAX);
    close_rig(&r);
}

/* ---- The wire ---- */

static void one_communicator_is_one_wire_in_host_order(void **unused)
{
    (void)unused;
    rig r;
    fsdp_sim_config config = byte_a_nanosecond(4);
    open_rig(&r, &config, 0);
    delay(&r, r.a, 5000);
    /* 3 × 100 × 4 bytes; the second stands behind the first, though its own stream has nothing to do. */
    assert_span(collective(&r, r.comm, r.a, FSDP_OPERATION_ALL_GATHER, FSDP_DTYPE_FP32, 100), 5000, 6210);
    assert_span(collective(&r, r.comm, r.b, FSDP_OPERATION_REDUCE_SCATTER, FSDP_DTYPE_BF16, 100), 6210, 6820);
    assert_span(delay(&r, r.b, 1), 6820, 6821); /* and the stream stands with it */
    /* The other communicator is another wire. */
    assert_span(collective(&r, r.reduce_comm, r.a, FSDP_OPERATION_BARRIER, FSDP_DTYPE_FP32, 0), 6210, 6220);
    close_rig(&r);
}

/* AG(l) may start when compute of l - 1 starts: docs/streams.md's rule for depth 1, as the runtime enqueues it. */
static void a_gather_one_ahead_hides_behind_compute(void **unused)
{
    (void)unused;
    enum { LAYERS = 4, GATHER = LATENCY + 400, COMPUTE = 1000 };
    rig r;
    fsdp_sim_config config = byte_a_nanosecond(2);
    open_rig(&r, &config, 0);
    void *ready[LAYERS], *used[LAYERS];
    for (int l = 0; l < LAYERS; l++) ready[l] = new_event(&r), used[l] = new_event(&r);
    for (int l = 0; l < LAYERS; l++) {
        for (int ahead = l == 0 ? 0 : l + 1; ahead <= l + 1 && ahead < LAYERS; ahead++) {
            if (ahead >= 2) stand(&r, r.b, used[ahead - 2]); /* two buffers */
            collective(&r, r.comm, r.b, FSDP_OPERATION_ALL_GATHER, FSDP_DTYPE_BF16, 200);
            record(&r, ready[ahead], r.b);
        }
        stand(&r, r.a, ready[l]);
        delay(&r, r.a, COMPUTE);
        record(&r, used[l], r.a);
    }
    assert_int_equal(r.device->stream_drain(r.dev, r.a, FOREVER), FSDP_OK);
    assert_int_equal(r.device->now_ns(r.dev), GATHER + LAYERS * COMPUTE); /* the first gather is exposed, no other */
    for (int l = 0; l < LAYERS; l++) r.device->event_destroy(r.dev, ready[l]), r.device->event_destroy(r.dev, used[l]);
    close_rig(&r);
}

static void a_group_pays_the_latency_once(void **unused)
{
    (void)unused;
    rig r;
    fsdp_span spans[3] = {{0, 0}, {0, 0}, {0, 0}};
    fsdp_sim_config config = byte_a_nanosecond(3);
    config.link.bytes_per_second = 3000000000; /* 3 bytes a nanosecond */
    open_rig(&r, &config, 0);
    fsdp_collective list[3] = {
        {.kind = FSDP_OPERATION_ALL_GATHER, .dtype = FSDP_DTYPE_FP32, .count = 5, .span = &spans[0]},  /* 40 bytes */
        {.kind = FSDP_OPERATION_ALL_GATHER, .dtype = FSDP_DTYPE_BF16, .count = 25, .span = &spans[1]}, /* 100 bytes */
        {.kind = FSDP_OPERATION_REDUCE_SCATTER, .dtype = FSDP_DTYPE_FP16, .count = 1, .span = &spans[2]}, /* 4 bytes */
    };
    delay(&r, r.a, 1);
    assert_int_equal(r.backend->comm->enqueue(r.comm, r.a, list, 3), FSDP_OK);
    assert_span(spans[0], 1, 1 + LATENCY + 14); /* ⌈40/3⌉ */
    assert_span(spans[1], 25, 1 + LATENCY + 47);
    assert_span(spans[2], 58, 1 + LATENCY + 48); /* 144/3: rounded once, not three times */
    assert_span(delay(&r, r.a, 1), 59, 60);
    assert_int_equal(r.backend->comm->enqueue(r.comm, r.a, list, 0), FSDP_OK);
    assert_span(delay(&r, r.a, 1), 60, 61);
    close_rig(&r);
}

static void a_collective_costs_what_one_rank_sends(void **unused)
{
    (void)unused;
    rig r;
    fsdp_sim_config config = byte_a_nanosecond(8);
    config.link.latency_ns = 0;
    open_rig(&r, &config, 0);
    static const struct {
        fsdp_operation kind;
        fsdp_dtype dtype;
        uint64_t count, ns;
    } cases[] = {
        {FSDP_OPERATION_ALL_GATHER, FSDP_DTYPE_BF16, 1000, 14000},
        {FSDP_OPERATION_REDUCE_SCATTER, FSDP_DTYPE_FP32, 1000, 28000},
        {FSDP_OPERATION_ALL_REDUCE, FSDP_DTYPE_FP32, 1000, 7000}, /* 2 × 7/8 of 4000 */
        {FSDP_OPERATION_ALL_REDUCE, FSDP_DTYPE_FP16, 1, 3},       /* 3.5: whole bytes */
        {FSDP_OPERATION_BROADCAST, FSDP_DTYPE_FP32, 1000, 4000},
        {FSDP_OPERATION_BARRIER, FSDP_DTYPE_FP32, 0, 0},
        {FSDP_OPERATION_ALL_GATHER, FSDP_DTYPE_BF16, 0, 0},
    };
    uint64_t now_ns = 0;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fsdp_span span = collective(&r, r.comm, r.a, cases[i].kind, cases[i].dtype, cases[i].count);
        assert_span(span, now_ns, now_ns + cases[i].ns);
        now_ns += cases[i].ns;
    }
    close_rig(&r);
}

static void a_world_of_one_pays_nothing_and_waits_for_no_wire(void **unused)
{
    (void)unused;
    rig r;
    fsdp_sim_config config = byte_a_nanosecond(1);
    open_rig(&r, &config, 0);
    delay(&r, r.a, 500);
    assert_span(collective(&r, r.comm, r.a, FSDP_OPERATION_ALL_REDUCE, FSDP_DTYPE_FP32, 1000), 500, 500);
    assert_span(collective(&r, r.comm, r.b, FSDP_OPERATION_BROADCAST, FSDP_DTYPE_FP32, 1000), 0, 0);
    close_rig(&r);
}

/* Llama 3 70B's head on 1024 ranks: where 64 bits of bytes × 10^9 have long run over. */
static void large_transfers_are_exact(void **unused)
{
    (void)unused;
    rig r;
    fsdp_sim_config config = byte_a_nanosecond(1024);
    config.link = (fsdp_link){25000, 48300000001}; /* no divisor of anything */
    open_rig(&r, &config, 0);
    /* 1023 × 1026048 × 2 = 2099294208 bytes; × 10^9 / 48300000001 = 43463648.19… */
    assert_span(collective(&r, r.comm, r.a, FSDP_OPERATION_ALL_GATHER, FSDP_DTYPE_BF16, 1026048), 0, 43463649 + 25000);
    close_rig(&r);

    assert_int_equal(fsdp__sim_transfer_ns(0, 7), 0);
    assert_int_equal(fsdp__sim_transfer_ns(1, 3), 333333334);
    assert_int_equal(fsdp__sim_transfer_ns(3, 3), 1000000000);
    assert_int_equal(fsdp__sim_transfer_ns(1, UINT64_MAX), 1);
    assert_int_equal(fsdp__sim_transfer_ns((fsdp__u128)1 << 60, 0), 0);
    assert_int_equal(fsdp__sim_transfer_ns(((fsdp__u128)1 << 50) + 1, 1u << 20), 1073741824000000954u);
    assert_int_equal(fsdp__sim_transfer_ns((fsdp__u128)1 << 97, 1), UINT64_MAX);
}

int main(void)
{
    alarm(60);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(streams_run_side_by_side_and_an_event_orders_them),
        cmocka_unit_test(a_wait_means_the_last_record_before_it),
        cmocka_unit_test(the_host_clock_moves_only_when_the_host_blocks),
        cmocka_unit_test(a_host_wait_times_out_in_virtual_time_and_can_be_asked_again),
        cmocka_unit_test(a_destroyed_stream_has_run_dry),
        cmocka_unit_test(with_debug_sync_every_operation_has_ended_when_its_call_returns),
        cmocka_unit_test(time_saturates_instead_of_starting_again),
        cmocka_unit_test(one_communicator_is_one_wire_in_host_order),
        cmocka_unit_test(a_gather_one_ahead_hides_behind_compute),
        cmocka_unit_test(a_group_pays_the_latency_once),
        cmocka_unit_test(a_collective_costs_what_one_rank_sends),
        cmocka_unit_test(a_world_of_one_pays_nothing_and_waits_for_no_wire),
        cmocka_unit_test(large_transfers_are_exact),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
