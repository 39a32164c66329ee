/* SPDX-License-Identifier: MIT */
/* The judge judged: small tapes whose verdict is plain. Random ones: test_hb_random.c. */
#include "tape_rig.h"

static void an_empty_tape_has_no_race(void **state)
{
    tape *t = *state;
    assert_int_equal(check(t), 0);
    assert_string_equal(t->text, "");
}

static void a_write_and_a_read_that_nothing_orders_race(void **state)
{
    tape *t = *state;
    touch(t, A, "h0", WRITE, 0x1000, 64);
    touch(t, B, "h1", READ, 0x1000, 64);
    assert_int_equal(check(t), 1);
}

static void a_race_is_told_with_both_records(void **state)
{
    tape *t = *state;
    touch(t, C, "other", WRITE, 0x9000, 64);
    touch(t, A, "h0", WRITE, 0x1000, 64);
    use(t, B, "h1", READ, 0x1020, 64);
    assert_int_equal(check(t), 1);
    assert_string_equal(t->text,
                        "records 1 and 2 race: cast of \"h0\" on stream 3 \"compute\" writes 0x1000 … 0x1040, "
                        "use of \"h1\" on stream 0 \"gather\" reads 0x1020 … 0x1060, and nothing orders the two");
}

static void the_text_may_be_short_or_missing(void **state)
{
    tape *t = *state;
    touch(t, A, "h0", WRITE, 0x1000, 64);
    touch(t, B, "h1", READ, 0x1000, 64);
    assert_int_equal(hb_check(t->trace, NULL, 0), 1);
    char small[10];
    assert_int_equal(hb_check(t->trace, small, sizeof small), 1);
    assert_string_equal(small, "records 0");
}

static void two_reads_do_not_race(void **state)
{
    tape *t = *state;
    touch(t, A, "h0", READ, 0x1000, 64);
    touch(t, B, "h0", READ, 0x1000, 64);
    use(t, C, "h0", READ, 0x1000, 64);
    assert_int_equal(check(t), 0);
}

static void a_read_and_a_later_write_race(void **state)
{
    tape *t = *state;
    touch(t, A, "h0", READ, 0x1000, 64);
    touch(t, B, "h0", WRITE, 0x1000, 64);
    assert_int_equal(check(t), 1);
}

static void one_stream_never_races_with_itself(void **state)
{
    tape *t = *state;
    touch(t, A, "h0", WRITE, 0x1000, 64);
    touch(t, A, "h0", READ, 0x1000, 64);
    touch(t, A, "h0", WRITE, 0x1000, 64);
    assert_int_equal(check(t), 0);
}

static void an_event_and_a_wait_order_two_streams(void **state)
{
    tape *t = *state;
    touch(t, A, "h0", WRITE, 0x1000, 64);
    record_event(t, A, 1);
    wait_event(t, B, 1);
    touch(t, B, "h0", READ, 0x1000, 64);
    assert_int_equal(check(t), 0);
}

static void what_the_host_has_waited_for_comes_before_every_stream(void **state)
{
    tape *t = *state;
    touch(t, A, "h0", WRITE, 0x1000, 64), record_event(t, A, 1);
    fsdp__trace_add(t->trace, &(fsdp_trace_record){.kind = FSDP_RECORD_HOST, .stream = A, .event = 1, .label = ""});
    touch(t, B, "h0", READ, 0x1000, 64);
    touch(t, A, "h0", WRITE, 0x2000, 64), touch(t, C, "h0", WRITE, 0x2000, 64); /* behind the record */
    assert_int_equal(check(t), 1);
}

static void work_behind_the_record_is_not_waited_for(void **state)
{
    tape *t = *state;
    record_event(t, A, 1);
    touch(t, A, "h0", WRITE, 0x1000, 64);
    wait_event(t, B, 1);
    touch(t, B, "h0", READ, 0x1000, 64);
    assert_int_equal(check(t), 1);
}

static void work_before_the_wait_is_not_ordered_by_it(void **state)
{
    tape *t = *state;
    touch(t, A, "h0", WRITE, 0x1000, 64);
    record_event(t, A, 1);
    touch(t, B, "h0", READ, 0x1000, 64);
    wait_event(t, B, 1);
    assert_int_equal(check(t), 1);
}

static void a_wait_before_the_record_orders_nothing(void **state)
{
    tape *t = *state;
    touch(t, A, "h0", WRITE, 0x1000, 64);
    wait_event(t, B, 1);
    record_event(t, A, 1);
    touch(t, B, "h0", READ, 0x1000, 64);
    assert_int_equal(check(t), 1);
}

static void a_wait_for_an_event_that_nobody_records_orders_nothing(void **state)
{
    tape *t = *state;
    touch(t, A, "h0", WRITE, 0x1000, 64);
    record_event(t, A, 1);
    wait_event(t, B, 2);
    touch(t, B, "h0", READ, 0x1000, 64);
    assert_int_equal(check(t), 1);
}

static void a_wait_means_the_last_record_before_it(void **state)
{
    tape *t = *state;
    touch(t, A, "h0", WRITE, 0x1000, 64);
    record_event(t, A, 1);
    touch(t, C, "h1", WRITE, 0x2000, 64);
    record_event(t, C, 1); /* the event is C's now */
    wait_event(t, B, 1);
    touch(t, B, "h1", READ, 0x2000, 64);
    assert_int_equal(check(t), 0);
    touch(t, B, "h0", READ, 0x1000, 64);
    assert_int_equal(check(t), 1);
}

static void a_record_after_the_wait_does_not_move_it(void **state)
{
    tape *t = *state;
    record_event(t, A, 1);
    wait_event(t, B, 1);
    touch(t, A, "h0", WRITE, 0x1000, 64);
    record_event(t, A, 1);
    touch(t, B, "h0", READ, 0x1000, 64);
    assert_int_equal(check(t), 1);
}

static void order_goes_through_a_third_stream(void **state)
{
    tape *t = *state;
    touch(t, A, "h0", WRITE, 0x1000, 64);
    record_event(t, A, 1);
    wait_event(t, C, 1);
    record_event(t, C, 2);
    wait_event(t, B, 2);
    touch(t, B, "h0", WRITE, 0x1000, 64);
    assert_int_equal(check(t), 0);
}

static void a_third_stream_that_recorded_too_early_passes_nothing_on(void **state)
{
    tape *t = *state;
    touch(t, A, "h0", WRITE, 0x1000, 64);
    record_event(t, A, 1);
    record_event(t, C, 2);
    wait_event(t, C, 1);
    wait_event(t, B, 2);
    touch(t, B, "h0", WRITE, 0x1000, 64);
    assert_int_equal(check(t), 1);
}

static void ranges_that_share_one_byte_race(void **state)
{
    tape *t = *state;
    touch(t, A, "h0", WRITE, 0x1000, 64);
    touch(t, B, "h1", WRITE, 0x103f, 64);
    assert_int_equal(check(t), 1);
}

static void neighbours_and_empty_ranges_do_not_race(void **state)
{
    tape *t = *state;
    touch(t, A, "h0", WRITE, 0x1000, 64);
    touch(t, B, "h1", WRITE, 0x1040, 64);
    touch(t, C, "h2", WRITE, 0x0fc0, 64);
    touch(t, C, "h2", WRITE, 0x1020, 0);
    assert_int_equal(check(t), 0);
}

static void a_range_may_end_at_the_last_address(void **state)
{
    tape *t = *state;
    touch(t, A, "h0", WRITE, UINT64_MAX - 63, 64);
    touch(t, B, "h1", READ, UINT64_MAX - 10, 100);
    assert_int_equal(check(t), 1);
}

static void a_reader_hidden_by_later_readers_is_still_raced_with(void **state)
{
    tape *t = *state;
    touch(t, A, "h0", READ, 0x1000, 64);
    touch(t, C, "h0", READ, 0x1000, 64);
    record_event(t, C, 1);
    wait_event(t, B, 1); /* for C's read, not for A's */
    touch(t, B, "h0", WRITE, 0x1000, 64);
    assert_int_equal(check(t), 1);
    assert_non_null(strstr(t->text, "records 0 and 4"));
}

static void a_small_write_inside_a_large_one_is_raced_with(void **state)
{
    tape *t = *state;
    touch(t, A, "pool", WRITE, 0x1000, 0x1000);
    record_event(t, A, 1);
    touch(t, C, "h1", READ, 0x5000, 64);
    touch(t, A, "h1", WRITE, 0x1800, 64);
    wait_event(t, B, 1);
    touch(t, B, "low", READ, 0x1000, 0x800);
    touch(t, B, "high", READ, 0x1840, 0x7c0);
    assert_int_equal(check(t), 0);
    touch(t, B, "pool", READ, 0x1000, 0x1000);
    assert_int_equal(check(t), 1);
    assert_non_null(strstr(t->text, "records 3 and 7"));
}

static void a_hand_over_without_the_last_owners_close_is_a_race(void **state)
{
    tape *t = *state;
    touch(t, B, "h0", WRITE, 0x1000, 64); /* gather */
    record_event(t, B, 1);
    wait_event(t, A, 1);
    use(t, A, "h0", READ, 0x1000, 64); /* the window opens … */
    record_event(t, A, 2);
    wait_event(t, B, 2);
    touch(t, B, "h2", WRITE, 0x1000, 64); /* in order after the open … */
    assert_int_equal(check(t), 0);
    use(t, A, "h0", READ, 0x1000, 64); /* … but not with the close */
    assert_int_equal(check(t), 1);
}

static void a_hand_over_after_the_close_is_none(void **state)
{
    tape *t = *state;
    touch(t, B, "h0", WRITE, 0x1000, 64);
    record_event(t, B, 1);
    wait_event(t, A, 1);
    use(t, A, "h0", READ, 0x1000, 64);
    use(t, A, "h0", READ, 0x1000, 64);
    record_event(t, A, 2);
    wait_event(t, B, 2);
    touch(t, B, "h2", WRITE, 0x1000, 64);
    assert_int_equal(check(t), 0);
}

static void each_record_that_races_counts_once(void **state)
{
    tape *t = *state;
    touch(t, A, "h0", WRITE, 0x1000, 64);
    touch(t, A, "h0", WRITE, 0x1040, 64);
    touch(t, C, "h0", WRITE, 0x2000, 64);
    touch(t, B, "h1", READ, 0x1000, 0x2000);
    touch(t, B, "h1", READ, 0x1000, 0x20);
    assert_int_equal(check(t), 2);
    assert_non_null(strstr(t->text, "records 2 and 3"));
}

static void a_tape_that_lost_records_is_not_judged(void **state)
{
    tape *t = *state;
    for (int i = 0; i < 65; i++) record_event(t, A, 1);
    assert_int_equal(check(t), SIZE_MAX);
    assert_non_null(strstr(t->text, "dropped"));
}

/* ---- The worked step ---- */

static size_t check_two_steps(int leave_out, int *out_waits, int *out_blind_waits, char *text, size_t text_bytes)
{
    worked_step w;
    worked_open(&w, 1000);
    w.leave_out = leave_out;
    worked_add(&w);
    worked_add(&w);
    size_t races = hb_check(w.trace, text, text_bytes);
    *out_waits = w.n_waits;
    *out_blind_waits = w.n_blind_waits;
    worked_close(&w);
    return races;
}

static void the_worked_step_has_no_race(void **state)
{
    (void)state;
    char text[1024];
    int n_waits, n_blind;
    size_t races = check_two_steps(WORKED_NO_WAIT, &n_waits, &n_blind, text, sizeof text);
    if (races != 0) fail_msg("%s", text);
    assert_int_equal(n_waits, 2 * (12 + 7 + 9));
    assert_int_equal(n_blind, 3); /* H.ready, h0.ready, h1.updated: of the step before the tape */
}

static void leaving_any_one_wait_out_of_the_worked_step_is_a_race(void **state)
{
    (void)state;
    char text[1024];
    int n_waits, n_blind, n_free = 0;
    check_two_steps(WORKED_NO_WAIT, &n_waits, &n_blind, text, sizeof text);
    for (int wait = 0; wait < n_waits; wait++) {
        int ignored, blind_left;
        if (check_two_steps(wait, &ignored, &blind_left, text, sizeof text) > 0) continue;
        n_free++;
        if (blind_left == n_blind) fail_msg("wait %d can be left out", wait);
    }
    assert_int_equal(n_free, n_blind);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(an_empty_tape_has_no_race),
        TEST(a_write_and_a_read_that_nothing_orders_race),
        TEST(a_race_is_told_with_both_records),
        TEST(the_text_may_be_short_or_missing),
        TEST(two_reads_do_not_race),
        TEST(a_read_and_a_later_write_race),
        TEST(one_stream_never_races_with_itself),
        TEST(an_event_and_a_wait_order_two_streams),
        TEST(what_the_host_has_waited_for_comes_before_every_stream),
        TEST(work_behind_the_record_is_not_waited_for),
        TEST(work_before_the_wait_is_not_ordered_by_it),
        TEST(a_wait_before_the_record_orders_nothing),
        TEST(a_wait_for_an_event_that_nobody_records_orders_nothing),
        TEST(a_wait_means_the_last_record_before_it),
        TEST(a_record_after_the_wait_does_not_move_it),
        TEST(order_goes_through_a_third_stream),
        TEST(a_third_stream_that_recorded_too_early_passes_nothing_on),
        TEST(ranges_that_share_one_byte_race),
        TEST(neighbours_and_empty_ranges_do_not_race),
        TEST(a_range_may_end_at_the_last_address),
        TEST(a_reader_hidden_by_later_readers_is_still_raced_with),
        TEST(a_small_write_inside_a_large_one_is_raced_with),
        TEST(a_hand_over_without_the_last_owners_close_is_a_race),
        TEST(a_hand_over_after_the_close_is_none),
        TEST(each_record_that_races_counts_once),
        TEST(a_tape_that_lost_records_is_not_judged),
        TEST(the_worked_step_has_no_race),
        TEST(leaving_any_one_wait_out_of_the_worked_step_is_a_race),
    };
    return cmocka_run_group_tests_name("hb_oracle", tests, NULL, NULL);
}
