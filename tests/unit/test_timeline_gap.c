/* SPDX-License-Identifier: MIT */
/* What is between the records of a stream: the caller's kernels, where the tape does not see them, or a host that is late. */
#include <string.h>

#include "svg_assert.h"
#include "timeline_rig.h"
#include "xorshift.h"

/* An event of the compute stream with which the host came at enqueued_ns, and the stream at at_ns. */
static void come(bench *b, uint64_t enqueued_ns, uint64_t at_ns)
{
    put(b,
        (fsdp_trace_record){
            .kind = FSDP_RECORD_EVENT, .stream = COMPUTE, .other = -1, .label = "", .enqueued_ns = enqueued_ns},
        at_ns, at_ns);
}

static fsdp_trace_summary sum_of(const bench *b, int32_t slot)
{
    fsdp_trace_summary sum = FSDP_TRACE_SUMMARY_INIT;
    fsdp__timeline_sum(b->w.trace, slot, &sum);
    return sum;
}

/* Kernels of the caller in three gaps: in h0, in h1, at the end of which the host is late, and behind both. */
static void put_kernels_unseen(bench *b)
{
    b->w.ctx.caps.native_kernels = true;
    put_wait(b, COMPUTE, GATHER, 1, 1000, 5000);
    put_use(b, "h0", false);
    come(b, 10, 65000);
    put_use(b, "h0", false);
    put_use(b, "h1", true);
    come(b, 160000, 165000);
    put_use(b, "h1", true);
    put(b,
        (fsdp_trace_record){.operation = FSDP_OPERATION_ADAMW, .stream = COMPUTE, .other = -1, .enqueued_ns = 170000},
        195000, 205000);
}

static void kernels_that_are_not_seen_are_a_bar_of_their_window(void **state)
{
    bench *b = *state;
    put_kernels_unseen(b);
    const fsdp__timeline *t = read_tape(b);
    static const struct {
        fsdp__shade shade;
        const char *name;
        uint64_t start_ns, end_ns;
        bool late;
    } expected[] = {{FSDP__SHADE_FORWARD, "h0", 5000, 65000, false},
                    {FSDP__SHADE_BACKWARD, "h1", 65000, 165000, true},
                    {FSDP__SHADE_COMPUTE, "", 165000, 195000, false},
                    {FSDP__SHADE_OPTIMIZER, "", 195000, 205000, false}};
    assert_int_equal(t->n_bars, 4);
    for (size_t i = 0; i < 4; i++) {
        assert_int_equal(t->bar[i].shade, expected[i].shade);
        assert_string_equal(t->bar[i].name, expected[i].name);
        assert_int_equal(t->bar[i].start_ns, expected[i].start_ns);
        assert_int_equal(t->bar[i].end_ns, expected[i].end_ns);
        assert_int_equal(t->bar[i].late, expected[i].late);
    }
    assert_string_equal(t->bar[2].kind, "between hooks");
    const fsdp_trace_summary sum = sum_of(b, COMPUTE);
    assert_int_equal(sum.compute_ns, 10000);
    assert_int_equal(sum.between_ns, 60000 + 100000 + 30000);
    assert_int_equal(sum.late_ns, 100000);
}

static void the_busiest_stream_is_that_whose_kernels_are_not_seen(void **state)
{
    bench *b = *state;
    put_kernels_unseen(b);
    put_operation(b, FSDP_OPERATION_FILL, COMPUTE + 1, "", 1000, 70000);
    assert_int_equal(read_tape(b)->compute_slot, COMPUTE);
}

/* A unit whose buffer is the shard, in a world of one: there is nothing to wait for. */
static void a_stream_of_windows_and_events_has_a_row(void **state)
{
    bench *b = *state;
    b->w.ctx.caps.native_kernels = true;
    put_operation(b, FSDP_OPERATION_CAST, GATHER, "h0", 1000, 2000);
    come(b, 1, 1000);
    put_use(b, "h0", false);
    come(b, 1, 90000);
    put_use(b, "h0", false);
    const fsdp__timeline *t = read_tape(b);
    assert_int_equal(t->n_bars, 2);
    assert_int_equal(t->n_rows, 2);
    assert_int_equal(t->compute_slot, COMPUTE);
    assert_string_equal(t->bar[1].name, "h0");
    assert_int_equal(t->bar[1].row, 0);
}

/* A host that computes by itself, while the stream has nothing. */
static void a_stream_that_only_idles_in_windows_has_a_row(void **state)
{
    bench *b = *state;
    come(b, 1000, 1000);
    put_use(b, "h0", false);
    come(b, 90000, 91000);
    put_use(b, "h0", false);
    const fsdp__timeline *t = read_tape(b);
    assert_int_equal(t->n_bars, 1);
    assert_int_equal(t->bar[0].shade, FSDP__SHADE_IDLE);
    assert_int_equal(t->bar[0].row, 0);
}

static void a_stream_without_windows_has_no_kernels_to_draw(void **state)
{
    bench *b = *state;
    b->w.ctx.caps.native_kernels = true;
    for (uint64_t i = 0; i < 3; i++)
        put_operation(b, FSDP_OPERATION_COPY, COMPUTE, "", 1000 + 100000 * i, 2000 + 100000 * i);
    for (uint64_t i = 0; i < 3; i++)
        put_operation(b, FSDP_OPERATION_CAST, GATHER, "", 1000 + 100000 * i, 2000 + 100000 * i);
    assert_int_equal(read_tape(b)->n_bars, 6);
    assert_int_equal(sum_of(b, COMPUTE).between_ns, 2 * 99000);
    assert_int_equal(sum_of(b, GATHER).between_ns, 0);
}

static void a_device_whose_clock_is_behind_finds_the_host_late_too(void **state)
{
    bench *b = *state;
    b->w.ctx.caps.native_kernels = true;
    come(b, 1, 50000);
    come(b, 400000, 360000); /* 40 µs before it was enqueued */
    come(b, 500000, 479000); /* 19 µs after */
    come(b, 600000, 582000); /* 22 */
    (void)read_tape(b);
    assert_int_equal(sum_of(b, COMPUTE).late_ns, (360000 - 50000) + (479000 - 360000));
}

static void where_kernels_are_seen_the_host_is_late_by_what_was_idle(void **state)
{
    bench *b = *state;
    put_use(b, "h0", false);
    put_operation(b, FSDP_OPERATION_HOST_CALL, COMPUTE, "", 50000, 100000);
    come(b, 130000, 133000);
    come(b, 1000, 140000); /* idle, and not for want of a record: whoever enqueued it was early */
    put_use(b, "h0", false);
    put_operation(b, FSDP_OPERATION_HOST_CALL, COMPUTE, "", 140000, 200000);
    const fsdp__timeline *t = read_tape(b);
    assert_int_equal(t->n_bars, 3);
    assert_int_equal(t->bar[1].shade, FSDP__SHADE_IDLE);
    assert_string_equal(t->bar[1].kind, "idle");
    assert_int_equal(t->bar[1].start_ns, 100000);
    assert_int_equal(t->bar[1].end_ns, 130000);
    assert_true(t->bar[1].late);
    const fsdp_trace_summary sum = sum_of(b, COMPUTE);
    assert_int_equal(sum.late_ns, 30000);
    assert_int_equal(sum.between_ns, 0);
}

static void put_gather(bench *b, const char *label, uint64_t enqueued_ns, uint64_t start_ns, uint64_t end_ns)
{
    put(b,
        (fsdp_trace_record){.operation = FSDP_OPERATION_ALL_GATHER,
                            .stream = GATHER,
                            .other = -1,
                            .label = label,
                            .enqueued_ns = enqueued_ns},
        start_ns, end_ns);
}

/* The first came before the tape knows of its lane, and had to wait since it was enqueued; the second since the first's end. */
static void put_gathers_that_wait(bench *b)
{
    put_gather(b, "h0", 20000, 50000, 60000);
    put_gather(b, "h1", 30000, 90000, 100000);
    put_operation(b, FSDP_OPERATION_CAST, GATHER, "h2", 150000, 160000);
    put_gather(b, "h2", 150000, 160000, 200000);
}

static void a_collective_that_waits_for_its_peers_is_a_bar_of_its_lane(void **state)
{
    bench *b = *state;
    put_operation(b, FSDP_OPERATION_HOST_CALL, COMPUTE, "", 25000, 30000);
    put_gathers_that_wait(b);
    const fsdp__timeline *t = read_tape(b);
    assert_int_equal(t->n_bars, 7);
    assert_int_equal(t->first_ns, 25000); /* nothing is drawn before it */
    for (size_t i = 0; i < 4; i += 2) {
        assert_int_equal(t->bar[i].shade, FSDP__SHADE_WIRE);
        assert_int_equal(t->bar[i].start_ns, i == 0 ? 25000 : 60000);
        assert_int_equal(t->bar[i].end_ns, i == 0 ? 50000 : 90000);
        assert_string_equal(t->bar[i].name, i == 0 ? "h0" : "h1");
        assert_false(t->bar[i].late);
    }
    assert_int_equal(sum_of(b, GATHER).late_ns, 0);
}

/* NCCL's time begins when the stream comes to the collective. */
static void nccl_waits_within_a_collective(void **state)
{
    bench *b = *state;
    b->w.ctx.caps.native_kernels = true;
    put_gathers_that_wait(b);
    const fsdp__timeline *t = read_tape(b);
    assert_int_equal(t->n_bars, 4);
    for (size_t i = 0; i < 4; i++) assert_true(t->bar[i].shade != FSDP__SHADE_WIRE);
    assert_int_equal(sum_of(b, GATHER).between_ns, 0);
}

static uint64_t draw_number(uint64_t *seed, uint64_t below) { return (xorshift_star(seed) >> 33) % below; }

/* Some record of the stream behind `from_ns`, of which the host comes too late with half; returns when it ends. */
static uint64_t put_any(bench *b, int stream, uint64_t *seed, uint64_t from_ns)
{
    uint64_t start_ns = from_ns + draw_number(seed, 2) * draw_number(seed, 50000);
    uint64_t end_ns = start_ns + draw_number(seed, 2) * draw_number(seed, 50000);
    fsdp_trace_record record = {.stream = stream, .other = GATHER, .label = "h0", .event = 1};
    record.enqueued_ns = draw_number(seed, 2) == 0 ? start_ns : draw_number(seed, start_ns);
    record.kind = (fsdp_record_kind)draw_number(seed, 3);
    record.operation = (fsdp_operation)draw_number(seed, FSDP_OPERATION_STEP_INPUT + 1);
    if (record.kind == FSDP_RECORD_EVENT) end_ns = start_ns;
    put(b, record, start_ns, end_ns);
    if (draw_number(seed, 3) == 0 && stream == COMPUTE)
        put_use(b, draw_number(seed, 2) ? "h0" : "h1", draw_number(seed, 2));
    return end_ns;
}

/* Streams of both kinds side by side, from 40000 on; then no bar of a row lies on another. */
static void put_many(bench *b, uint64_t *at_ns)
{
    uint64_t seed = 1, end_ns[16] = {0};
    for (int slot = 0; slot < 16; slot++) at_ns[slot] = 40000;
    for (int slot = COMPUTE; slot <= COMPUTE + 1; slot++) put_operation(b, FSDP_OPERATION_FILL, slot, "", 40000, 40000);
    for (int i = 0; i < 5000; i++) {
        static const int of[] = {COMPUTE, COMPUTE + 1, GATHER, REDUCE};
        int slot = of[draw_number(&seed, 4)];
        at_ns[slot] = put_any(b, slot, &seed, at_ns[slot]);
    }
    const fsdp__timeline *t = read_tape(b);
    for (size_t i = 0; i < t->n_bars; i++) {
        assert_true(t->bar[i].start_ns >= end_ns[t->bar[i].row] && t->bar[i].end_ns >= t->bar[i].start_ns);
        end_ns[t->bar[i].row] = t->bar[i].end_ns;
    }
    assert_well_formed(draw(b, "t"));
}

/* It is operations, waits, and what is between them, of which a part may be late. */
static void all_time_of_a_stream_whose_kernels_are_not_seen_is_accounted_for(void **state)
{
    bench *b = *state;
    uint64_t at_ns[16];
    b->w.ctx.caps.native_kernels = true;
    put_many(b, at_ns);
    for (int slot = COMPUTE; slot <= COMPUTE + 1; slot++) {
        const fsdp_trace_summary sum = sum_of(b, slot);
        assert_true(sum.late_ns > 0 && sum.late_ns < sum.between_ns);
        assert_int_equal(sum.compute_ns + sum.exposed_ns + sum.between_ns, at_ns[slot] - 40000);
    }
}

static void where_kernels_are_seen_late_time_is_idle_time(void **state)
{
    bench *b = *state;
    uint64_t at_ns[16];
    put_many(b, at_ns);
    for (int slot = COMPUTE; slot <= COMPUTE + 1; slot++) {
        const fsdp_trace_summary sum = sum_of(b, slot);
        assert_int_equal(sum.between_ns, 0);
        assert_true(sum.late_ns > 0 && sum.compute_ns + sum.exposed_ns + sum.late_ns <= at_ns[slot] - 40000);
    }
}

static void a_late_host_is_drawn_and_said(void **state)
{
    bench *b = *state;
    put_kernels_unseen(b);
    const char *svg = draw(b, "t");
    assert_well_formed(svg);
    assert_non_null(strstr(svg, ">the host was late</text>"));
    assert_non_null(strstr(svg, ">100 µs</text>"));
    assert_non_null(strstr(svg, ">at most 49.0 % of the span</text>"));
    assert_non_null(strstr(svg, "backward h1\nnothing was left to run when the host came: it was late\n"));
    assert_non_null(strstr(svg, ">the host was late: nothing left to run</text>"));
    assert_int_equal(n_times(svg, " class=\"l\"/>"), 1);
    assert_non_null(strstr(svg, ">compute ran</text>"));
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(kernels_that_are_not_seen_are_a_bar_of_their_window),
        TEST(the_busiest_stream_is_that_whose_kernels_are_not_seen),
        TEST(a_stream_of_windows_and_events_has_a_row),
        TEST(a_stream_that_only_idles_in_windows_has_a_row),
        TEST(a_stream_without_windows_has_no_kernels_to_draw),
        TEST(a_device_whose_clock_is_behind_finds_the_host_late_too),
        TEST(where_kernels_are_seen_the_host_is_late_by_what_was_idle),
        TEST(a_collective_that_waits_for_its_peers_is_a_bar_of_its_lane),
        TEST(nccl_waits_within_a_collective),
        TEST(all_time_of_a_stream_whose_kernels_are_not_seen_is_accounted_for),
        TEST(where_kernels_are_seen_late_time_is_idle_time),
        TEST(a_late_host_is_drawn_and_said),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
