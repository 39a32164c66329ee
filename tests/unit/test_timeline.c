/* SPDX-License-Identifier: MIT */
/* What a picture shows, by value, before it is drawn; then the file: whole, escaped, bounded, and errors told. */
#include <locale.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "context.h"
#include "scarce.h"
#include "svg_assert.h"
#include "timeline_rig.h"
#include "timeline_svg.h"
#include "trace.h"

/* ---- What is shown ---- */

static void compute_streams_come_first_and_idle_streams_have_no_row(void **state)
{
    bench *b = *state;
    put_operation(b, FSDP_OPERATION_ALL_GATHER, GATHER, "h0", 100, 200);
    put_operation(b, FSDP_OPERATION_DELAY, COMPUTE + 2, "", 100, 200);
    put_wait(b, COMPUTE + 2, GATHER, 1, 200, 500);
    put_operation(b, FSDP_OPERATION_DELAY, COMPUTE, "", 100, 500);
    put_operation(b, FSDP_OPERATION_REDUCE_SCATTER, REDUCE, "h0", 100, 200);
    put_event(b, COMPUTE + 3, 1, 300);
    const fsdp__timeline *t = read_tape(b);
    assert_int_equal(t->n_rows, 4);
    assert_int_equal(t->slot_of[0], COMPUTE);
    assert_int_equal(t->slot_of[1], COMPUTE + 2);
    assert_int_equal(t->slot_of[2], GATHER);
    assert_int_equal(t->slot_of[3], REDUCE);
    assert_int_equal(t->row_of[FSDP_LANE_COPY], -1);
    assert_int_equal(t->compute_slot, COMPUTE);
    assert_int_equal(t->first_ns, 100);
    assert_int_equal(t->span_ns, 400);
}

static void compute_is_named_after_the_window_that_was_opened_last(void **state)
{
    bench *b = *state;
    put_operation(b, FSDP_OPERATION_HOST_CALL, COMPUTE, "", 0, 100);
    put_use(b, "H", false);
    put_operation(b, FSDP_OPERATION_HOST_CALL, COMPUTE, "", 100, 200);
    put_use(b, "h0", true);
    put_operation(b, FSDP_OPERATION_DELAY, COMPUTE, "", 200, 300);
    put_operation(b, FSDP_OPERATION_FILL, COMPUTE, "h7", 300, 400);
    put_use(b, "h0", true);
    put_operation(b, FSDP_OPERATION_HOST_CALL, COMPUTE, "", 400, 500);
    put_use(b, "H", false);
    put_operation(b, FSDP_OPERATION_HOST_CALL, COMPUTE, "step", 500, 600);
    static const struct {
        fsdp__shade shade;
        const char *name;
    } expected[] = {{FSDP__SHADE_COMPUTE, ""}, {FSDP__SHADE_FORWARD, "H"}, {FSDP__SHADE_BACKWARD, "h0"},
                    {FSDP__SHADE_SMALL, "h7"}, {FSDP__SHADE_FORWARD, "H"}, {FSDP__SHADE_COMPUTE, "step"}};
    const fsdp__timeline *t = read_tape(b);
    assert_int_equal(t->n_bars, 6);
    for (size_t i = 0; i < 6; i++) {
        assert_int_equal(t->bar[i].shade, expected[i].shade);
        assert_string_equal(t->bar[i].name, expected[i].name);
    }
    assert_int_equal(t->n_units, 2);
    assert_int_equal(t->bar[2].unit, 1);
}

static void bars_within_half_a_pixel_are_one_in_the_colour_of_the_longest(void **state)
{
    bench *b = *state;
    put_operation(b, FSDP_OPERATION_CAST, GATHER, "h0", 1000000, 1000100); /* a pixel is 1001 ns */
    put_operation(b, FSDP_OPERATION_ALL_GATHER, GATHER, "h1", 1000100, 1000300);
    put_operation(b, FSDP_OPERATION_CAST, GATHER, "h2", 1000300, 1000350);
    put_operation(b, FSDP_OPERATION_CAST, GATHER, "h3", 1000350, 1000600);
    put_operation(b, FSDP_OPERATION_ALL_GATHER, GATHER, "h4", 1500000, 2000000);
    const fsdp__timeline *t = read_tape(b);
    assert_int_equal(t->n_bars, 3);
    assert_int_equal(t->bar[0].count, 3);
    assert_int_equal(t->bar[0].shade, FSDP__SHADE_GATHER);
    assert_string_equal(t->bar[0].name, "h1");
    assert_int_equal(t->bar[0].bytes, 3 << 20);
    assert_int_equal(t->bar[0].end_ns, 1000350);
    assert_int_equal(t->bar[1].count, 1);
}

static void members_of_a_group_are_one_bar(void **state)
{
    bench *b = *state;
    put_operation(b, FSDP_OPERATION_ALL_GATHER, GATHER, "h0", 100, 200);
    put_operation(b, FSDP_OPERATION_ALL_GATHER, GATHER, "h0", 100, 200);
    const fsdp__timeline *t = read_tape(b);
    assert_int_equal(t->n_bars, 1);
    assert_int_equal(t->bar[0].bytes, 2 << 20);
}

static void an_arrow_is_as_heavy_as_the_stand_that_it_explains(void **state)
{
    bench *b = *state;
    put_operation(b, FSDP_OPERATION_DELAY, COMPUTE, "", 0, 1000000);
    put_event(b, GATHER, 1, 500000);
    put_event(b, COMPUTE, 2, 100000);
    put_wait(b, COMPUTE, GATHER, 1, 300000, 500000); /* compute stood */
    put_wait(b, GATHER, COMPUTE, 2, 200000, 200100); /* less than a pixel */
    put_wait(b, REDUCE, COMPUTE, 2, 50000, 100000);  /* a lane stood */
    put_operation(b, FSDP_OPERATION_CAST, GATHER, "", 500000, 600000);
    const fsdp__timeline *t = read_tape(b);
    assert_int_equal(t->n_arrows, 3);
    assert_int_equal(t->arrow[0].weight, FSDP__WEIGHT_EXPOSED);
    assert_int_equal(t->arrow[0].from_ns, 500000);
    assert_int_equal(t->arrow[0].from_row, t->row_of[GATHER]);
    assert_int_equal(t->arrow[0].to_row, t->row_of[COMPUTE]);
    assert_int_equal(t->arrow[1].weight, FSDP__WEIGHT_PASSED);
    assert_int_equal(t->arrow[2].weight, FSDP__WEIGHT_STOOD);
}

static void arrows_that_would_lie_on_one_another_are_one(void **state)
{
    bench *b = *state;
    put_operation(b, FSDP_OPERATION_DELAY, COMPUTE, "", 0, 1000000); /* a pixel is 1001 ns */
    put_operation(b, FSDP_OPERATION_CAST, GATHER, "", 0, 1000);
    put_event(b, GATHER, 1, 1000);
    for (uint64_t i = 0; i < 100; i++) put_wait(b, COMPUTE, GATHER, 1, 10000 + 100 * i, 10000 + 100 * i);
    assert_int_equal(read_tape(b)->n_arrows, 5);
}

static void an_arrow_begins_at_the_last_record_before_the_wait(void **state)
{
    bench *b = *state;
    put_event(b, GATHER, 1, 100);
    put_event(b, REDUCE, 1, 300);
    put_wait(b, COMPUTE, REDUCE, 1, 200, 300);
    put_event(b, GATHER, 1, 900);
    put_operation(b, FSDP_OPERATION_ALL_GATHER, GATHER, "h0", 0, 900);
    put_operation(b, FSDP_OPERATION_REDUCE_SCATTER, REDUCE, "h0", 0, 300);
    const fsdp__timeline *t = read_tape(b);
    assert_int_equal(t->n_arrows, 1);
    assert_int_equal(t->arrow[0].from_ns, 300);
    assert_int_equal(t->arrow[0].from_row, t->row_of[REDUCE]);
}

static void a_stand_for_an_event_from_before_the_tape_is_hatched_without_an_arrow(void **state)
{
    bench *b = *state;
    put_wait(b, COMPUTE, GATHER, 1, 1000, 400000);
    put_wait(b, COMPUTE, GATHER, 2, 400000, 400001);
    put_wait(b, REDUCE, COMPUTE, 3, 1000, 400000);
    const fsdp__timeline *t = read_tape(b);
    assert_int_equal(t->n_arrows, 1);
    assert_int_equal(t->arrow[0].from_row, -1);
    const char *svg = draw(b, "t");
    assert_int_equal(n_times(svg, "<rect class=\"h\" x="), 1);
    assert_int_equal(n_times(svg, "<path class=\"e\" marker-end=\"url(#e)\" d=\"M0 7"), 1); /* the legend's */
    assert_int_equal(n_times(svg, "<path class=\"e\""), 1);
}

/* ---- The file ---- */

static void the_worked_step_is_drawn_whole(void **state)
{
    bench *b = *state;
    worked_add(&b->w);
    const char *svg = draw(b, "A step");
    assert_well_formed(svg);
    assert_null(strstr(svg, "<script"));
    assert_null(strstr(svg, "href"));
    assert_non_null(strstr(svg, "<title>A step</title>"));
    assert_non_null(strstr(svg, ">compute</text>"));
    assert_non_null(strstr(svg, ">gather</text>"));
    assert_non_null(strstr(svg, ">reduce</text>"));
    assert_null(strstr(svg, ">copy</text>"));
    assert_non_null(strstr(svg, "<title>all-gather h1\n768 KiB\nstarts 18.0 µs\ntakes 360 µs</title>"));
    assert_int_equal(n_times(svg, "<title>backward h2\n"), 2);
    assert_int_equal(n_times(svg, "<title>forward H\n"), 4);
    assert_non_null(strstr(svg, "<title>compute waits for h2.ready of gather\nwhy: read\n"));
    assert_non_null(strstr(svg, "class=\"te\""));
    assert_non_null(strstr(svg, ">h2.ready</text>"));
    assert_non_null(strstr(svg, ">h0.grads</text>"));
}

static void the_head_line_says_what_the_summary_says(void **state)
{
    bench *b = *state;
    put_operation(b, FSDP_OPERATION_ALL_GATHER, GATHER, "h0", 1000000, 1250000);
    put_event(b, GATHER, 1, 1250000);
    put_wait(b, COMPUTE, GATHER, 1, 1000000, 1250000);
    put_operation(b, FSDP_OPERATION_HOST_CALL, COMPUTE, "", 1250000, 2000000);
    const char *svg = draw(b, "t");
    assert_non_null(strstr(svg, ">1.00 ms</text>"));
    assert_non_null(strstr(svg, ">75.0 % of the span</text>"));
    assert_non_null(strstr(svg, ">25.0 % of the span: 250 µs for gathers, 0 ns for reductions</text>"));
    assert_non_null(strstr(svg, ">25.0 % of the span, 1.00 MiB sent</text>"));
    assert_non_null(strstr(svg, ">4 records</text>"));
}

static void names_cannot_break_the_file(void **state)
{
    bench *b = *state;
    snprintf(b->w.stream[COMPUTE].name, sizeof b->w.stream[COMPUTE].name, "a<b>&\"c\"");
    put_operation(b, FSDP_OPERATION_ALL_GATHER, GATHER, "</svg><script>&", 0, 1000000);
    put_operation(b, FSDP_OPERATION_HOST_CALL, COMPUTE, "\x01\x1f\x7f", 0, 1000000);
    put_operation(b, FSDP_OPERATION_HOST_CALL, COMPUTE,
                  "h\xff\xc3(\xe2\x82\xed\xa0\x80\xc0\xaf\xef\xbf\xbf\xf0\x80\x80\x80", 1000000, 2000000);
    put_operation(b, FSDP_OPERATION_HOST_CALL, COMPUTE, "schön \xf0\x9f\x8c\xb1", 2000000, 3000000);
    const char *svg = draw(b, "x < y & z > \x02\xfe");
    assert_well_formed(svg);
    assert_null(strstr(svg, "<script"));
    assert_non_null(strstr(svg, ">a&lt;b&gt;&amp;\"c\"</text>"));
    assert_non_null(strstr(svg, ">exposed: a&lt;b&gt;&amp;\"c\" stood and waited</text>"));
    assert_non_null(strstr(svg, "all-gather &lt;/svg&gt;&lt;script&gt;&amp;"));
    assert_non_null(strstr(svg, "host call \?\?\?</text>"));
    assert_non_null(strstr(svg, "host call h\?\?(\?\?\?\?\?\?\?\?\?\?\?\?\?\?</text>"));
    assert_non_null(strstr(svg, "host call schön \xf0\x9f\x8c\xb1</text>"));
    assert_non_null(strstr(svg, "<title>x &lt; y &amp; z &gt; \?\?</title>"));
}

static void a_locale_with_a_decimal_comma_changes_nothing(void **state)
{
    bench *b = *state;
    worked_add(&b->w);
    char *plain = strdup(draw(b, "t"));
    assert_non_null(plain);
    if (setlocale(LC_ALL, "de_DE.UTF-8") == NULL && setlocale(LC_ALL, "fr_FR.UTF-8") == NULL) {
        free(plain);
        skip();
    }
    const char *other = draw(b, "t");
    setlocale(LC_ALL, "C");
    bool same = strcmp(plain, other) == 0;
    free(plain);
    assert_true(same);
}

static void ten_thousand_records_make_a_file_below_a_megabyte(void **state)
{
    bench *b = *state;
    for (int step = 0; step < 65; step++) worked_add(&b->w);
    assert_true(fsdp_trace_count(b->w.trace) > 10000);
    assert_well_formed(draw(b, "t"));
    assert_true(b->svg_bytes < 1000000);
    assert_non_null(strstr(b->svg, "event that a lane stood for: too many, not drawn"));
    assert_int_equal(n_times(b->svg, "<path class=\"s\""), 1); /* the legend's */
}

static void a_hundred_thousand_records_make_a_file_below_two_megabytes(void **state)
{
    bench *b = *state;
    for (int step = 0; step < 700; step++) worked_add(&b->w);
    assert_true(fsdp_trace_count(b->w.trace) > 100000);
    assert_well_formed(draw(b, "t"));
    assert_true(b->svg_bytes < 2000000);
    assert_non_null(strstr(b->svg, " in turn, the longest: "));
}

static void a_tape_without_times_is_drawn_too(void **state)
{
    bench *b = *state;
    assert_well_formed(draw(b, "nothing"));
    worked_close(&b->w);
    worked_open(&b->w, 10);
    put_operation(b, FSDP_OPERATION_ALL_GATHER, GATHER, "h0", 0, 0);
    put_wait(b, COMPUTE, GATHER, 1, 0, 0);
    assert_well_formed(draw(b, "nothing has run"));
    worked_close(&b->w);
    worked_open(&b->w, 10);
    put_operation(b, FSDP_OPERATION_ALL_GATHER, GATHER, "h0", 5, 5);
    assert_well_formed(draw(b, "no time has passed"));
}

/* sim's time ends at the largest number. */
static void all_the_time_there_is_has_an_axis_with_an_end(void **state)
{
    bench *b = *state;
    put_operation(b, FSDP_OPERATION_ALL_GATHER, GATHER, "h0", 0, UINT64_MAX);
    assert_well_formed(draw(b, "t"));
    assert_int_equal(n_times(b->svg, "<path class=\"a\""), 10); /* 0, 2, … 18 thousand million seconds */
}

static void a_file_that_cannot_be_opened_or_written_is_an_io_error(void **state)
{
    bench *b = *state;
    worked_add(&b->w);
    assert_int_equal(worked_stop(&b->w), FSDP_OK);
    assert_int_equal(fsdp_trace_write_svg(b->w.trace, "/no such folder/x.svg", "t"), FSDP_ERR_IO);
    assert_non_null(strstr(fsdp_last_error(), "/no such folder/x.svg: No such file or directory"));
    if (access("/dev/full", W_OK) != 0) skip();
    assert_int_equal(fsdp_trace_write_svg(b->w.trace, "/dev/full", "t"), FSDP_ERR_IO);
    assert_non_null(strstr(fsdp_last_error(), "/dev/full: No space left on device"));
}

static void half_a_picture_is_not_left_behind(void **state)
{
    bench *b = *state;
    struct rlimit before, small;
    worked_add(&b->w);
    assert_int_equal(worked_stop(&b->w), FSDP_OK);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    small = (struct rlimit){1000, before.rlim_max}; /* SIGXFSZ would end this program */
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    fsdp_status status = fsdp_trace_write_svg(b->w.trace, b->path, "t");
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
    assert_int_equal(status, FSDP_ERR_IO);
    assert_non_null(strstr(fsdp_last_error(), "File too large"));
    assert_int_not_equal(access(b->path, F_OK), 0);
}

static void without_host_memory_nothing_is_drawn_and_nothing_is_kept(void **state)
{
    bench *b = *state;
    worked_add(&b->w);
    assert_int_equal(worked_stop(&b->w), FSDP_OK);
    scarce memory = {0, 0};
    fsdp_host_allocator host = {scarce_alloc, scarce_free, &memory, NULL};
    fsdp_status status = FSDP_ERR_NO_HOST_MEMORY;
    int n = 0;
    for (; status != FSDP_OK; n++) {
        assert_true(n < 100);
        memory.left = n;
        status = fsdp__timeline_write(&host, b->w.trace, b->path, "t");
        assert_true(status == FSDP_OK || status == FSDP_ERR_NO_HOST_MEMORY);
        assert_int_equal(memory.live, 0);
    }
    assert_true(n > 5);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(compute_streams_come_first_and_idle_streams_have_no_row),
        TEST(compute_is_named_after_the_window_that_was_opened_last),
        TEST(bars_within_half_a_pixel_are_one_in_the_colour_of_the_longest),
        TEST(members_of_a_group_are_one_bar),
        TEST(an_arrow_is_as_heavy_as_the_stand_that_it_explains),
        TEST(arrows_that_would_lie_on_one_another_are_one),
        TEST(an_arrow_begins_at_the_last_record_before_the_wait),
        TEST(a_stand_for_an_event_from_before_the_tape_is_hatched_without_an_arrow),
        TEST(the_worked_step_is_drawn_whole),
        TEST(the_head_line_says_what_the_summary_says),
        TEST(names_cannot_break_the_file),
        TEST(a_locale_with_a_decimal_comma_changes_nothing),
        TEST(ten_thousand_records_make_a_file_below_a_megabyte),
        TEST(a_hundred_thousand_records_make_a_file_below_two_megabytes),
        TEST(a_tape_without_times_is_drawn_too),
        TEST(all_the_time_there_is_has_an_axis_with_an_end),
        TEST(a_file_that_cannot_be_opened_or_written_is_an_io_error),
        TEST(half_a_picture_is_not_left_behind),
        TEST(without_host_memory_nothing_is_drawn_and_nothing_is_kept),
    };
    return cmocka_run_group_tests_name("timeline", tests, NULL, NULL);
}
