/* SPDX-License-Identifier: MIT */
/* The judge judged: small tapes whose verdict is plain, and random ones against a search of the whole graph. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "context.h"
#include "fsdp/trace.h"
#include "hb_oracle.h"
#include "trace.h"
#include "worked_step.h"
#include "xorshift.h"

enum { A = WORKED_COMPUTE, B = FSDP_LANE_GATHER, C = FSDP_LANE_REDUCE, READ = 0, WRITE = 1 };

/* No stream runs anything here. */
__attribute__((weak)) fsdp_status fsdp__context_drain(fsdp_context *ctx, uint64_t timeout_ns)
{
    (void)ctx, (void)timeout_ns;
    return FSDP_OK;
}

typedef struct tape {
    worked_step w; /* its context; the step itself is put where a test wants it */
    fsdp_trace *trace;
    char text[1024];
} tape;

static void open_tape(tape *t, uint64_t max_records)
{
    worked_open(&t->w, max_records);
    t->trace = t->w.trace;
}

static void close_tape(tape *t) { worked_close(&t->w); }

static int set_up(void **state)
{
    alarm(120);
    tape *t = malloc(sizeof *t);
    assert_non_null(t);
    open_tape(t, 64);
    *state = t;
    return 0;
}

static int tear_down(void **state)
{
    close_tape(*state);
    free(*state);
    return 0;
}

static void touch(tape *t, int32_t stream, const char *label, int write, uint64_t begin, uint64_t bytes)
{
    fsdp_trace_record record = {.kind = FSDP_RECORD_OPERATION,
                                .operation = FSDP_OPERATION_CAST,
                                .stream = stream,
                                .label = label,
                                .n_accesses = 1,
                                .access = {{begin, bytes, write == WRITE}}};
    fsdp__trace_add(t->trace, &record);
}

static void use(tape *t, int32_t stream, const char *label, int write, uint64_t begin, uint64_t bytes)
{
    fsdp_trace_record record = {.kind = FSDP_RECORD_USE,
                                .stream = stream,
                                .label = label,
                                .n_accesses = 1,
                                .access = {{begin, bytes, write == WRITE}}};
    fsdp__trace_add(t->trace, &record);
}

static void record_event(tape *t, int32_t stream, uint64_t event)
{
    fsdp_trace_record record = {.kind = FSDP_RECORD_EVENT, .stream = stream, .event = event, .label = ""};
    fsdp__trace_add(t->trace, &record);
}

static void wait_event(tape *t, int32_t stream, uint64_t event)
{
    fsdp_trace_record record = {.kind = FSDP_RECORD_WAIT, .stream = stream, .event = event, .label = ""};
    fsdp__trace_add(t->trace, &record);
}

static size_t check(tape *t) { return hb_check(t->trace, t->text, sizeof t->text); }

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

/* ---- Random tapes ---- */

enum { MAX_RANDOM = 160 };

static uint64_t draw(uint64_t *seed, uint64_t below) { return (xorshift_star(seed) >> 32) % below; }

static void random_record(fsdp_trace_record *record, uint64_t *seed, uint64_t n_streams, uint64_t n_bytes,
                          uint64_t syncs)
{
    *record = (fsdp_trace_record){.stream = (int32_t)draw(seed, n_streams), .label = ""};
    if (draw(seed, 100) < syncs) {
        record->kind = draw(seed, 2) ? FSDP_RECORD_WAIT : FSDP_RECORD_EVENT;
        record->event = 100 + draw(seed, 2 * n_streams);
        return;
    }
    record->kind = draw(seed, 2) ? FSDP_RECORD_OPERATION : FSDP_RECORD_USE;
    record->n_accesses = (uint32_t)draw(seed, 4);
    for (uint32_t a = 0; a < record->n_accesses; a++) {
        record->access[a].begin = 1000 + draw(seed, n_bytes);
        record->access[a].bytes = draw(seed, draw(seed, 4) ? 4 : n_bytes);
        record->access[a].write = draw(seed, 3) == 0;
    }
}

static bool overlap(const fsdp_trace_record *a, const fsdp_trace_record *b)
{
    for (uint32_t i = 0; i < a->n_accesses; i++) {
        for (uint32_t j = 0; j < b->n_accesses; j++) {
            const fsdp_trace_access *x = &a->access[i], *y = &b->access[j];
            if (!x->write && !y->write) continue;
            if (x->begin < y->begin + y->bytes && y->begin < x->begin + x->bytes && x->bytes && y->bytes) return true;
        }
    }
    return false;
}

/* The definition, taken at its word: edges into a matrix, paths by closure, then every pair. */
static size_t naive_check(const fsdp_trace *trace, size_t *out_first, size_t *out_second)
{
    static bool before[MAX_RANDOM][MAX_RANDOM];
    size_t n = fsdp_trace_count(trace), races = 0;
    memset(before, 0, sizeof before);
    for (size_t j = 0; j < n; j++) {
        const fsdp_trace_record *record = fsdp_trace_at(trace, j);
        size_t recorded = n;
        for (size_t i = 0; i < j; i++) {
            const fsdp_trace_record *earlier = fsdp_trace_at(trace, i);
            if (earlier->stream == record->stream) before[i][j] = true;
            if (earlier->kind == FSDP_RECORD_EVENT && earlier->event == record->event) recorded = i;
        }
        if (record->kind == FSDP_RECORD_WAIT && recorded < n) before[recorded][j] = true;
    }
    for (size_t k = 0; k < n; k++)
        for (size_t i = 0; i < k; i++)
            for (size_t j = k + 1; before[i][k] && j < n; j++) before[i][j] |= before[k][j];
    for (size_t j = 0; j < n; j++) {
        size_t with = n;
        for (size_t i = 0; i < j; i++)
            if (!before[i][j] && overlap(fsdp_trace_at(trace, i), fsdp_trace_at(trace, j))) with = i;
        if (with < n && races++ == 0) *out_first = with, *out_second = j;
    }
    return races;
}

/* True if the tape has a race. */
static bool compare_one(uint64_t seed_value)
{
    uint64_t seed = seed_value * 0x9e3779b97f4a7c15u | 1;
    uint64_t n = 1 + draw(&seed, MAX_RANDOM), n_streams = 2 + draw(&seed, 4), n_bytes = 4 + draw(&seed, 400);
    uint64_t syncs = 60 + draw(&seed, 39);
    tape t;
    open_tape(&t, MAX_RANDOM);
    for (uint64_t i = 0; i < n; i++) {
        fsdp_trace_record record;
        random_record(&record, &seed, n_streams, n_bytes, syncs);
        fsdp__trace_add(t.trace, &record);
    }
    size_t first = 0, second = 0, told_first = 0, told_second = 0;
    size_t expected = naive_check(t.trace, &first, &second), found = check(&t);
    if (found > 0) sscanf(t.text, "records %zu and %zu", &told_first, &told_second);
    if (found != expected || told_first != first || told_second != second)
        fail_msg("seed %llu: %zu races, first %zu and %zu; the oracle says %zu: %s", (unsigned long long)seed_value,
                 expected, first, second, found, t.text);
    close_tape(&t);
    return expected > 0;
}

static void random_tapes_are_judged_as_a_search_of_all_paths_judges_them(void **state)
{
    (void)state;
    size_t racy = 0, n = 1000;
    for (uint64_t seed = 1; seed <= n; seed++) racy += compare_one(seed);
    assert_true(racy > n / 4 && racy < n * 3 / 4); /* both kinds were there */
}

/* Steps of 64 units: gathered and reduced on lanes, ordered as training is; then one edge is left out. */
static void add_step(tape *t, int skip_wait_of_unit)
{
    enum { UNIT = 1 << 20, UNITS = 64, EVENTS = 1000 };
    for (uint64_t u = 0; u < UNITS; u++) {
        uint64_t buffer = (1 + u % 2) * UNIT, shard = (100 + u) * UNIT;
        wait_event(t, FSDP_LANE_GATHER, EVENTS + u % 2);
        touch(t, FSDP_LANE_GATHER, "u", READ, shard, UNIT);
        touch(t, FSDP_LANE_GATHER, "u", WRITE, buffer, UNIT);
        record_event(t, FSDP_LANE_GATHER, EVENTS + 10 + u);
        if ((int)u != skip_wait_of_unit) wait_event(t, A, EVENTS + 10 + u);
        for (uint64_t part = 0; part < 4; part++) touch(t, A, "u", READ, buffer + part * UNIT / 4, UNIT / 4);
        record_event(t, A, EVENTS + u % 2);
        touch(t, A, "u", WRITE, shard + UNIT / 2, UNIT / 2);
    }
    record_event(t, A, EVENTS + 5);
    wait_event(t, FSDP_LANE_GATHER, EVENTS + 5);
}

static void a_tape_of_a_hundred_thousand_records_is_judged(void **state)
{
    (void)state;
    tape t;
    open_tape(&t, 120000);
    for (int step = 0; step < 140; step++) add_step(&t, -1);
    assert_true(fsdp_trace_count(t.trace) > 95000);
    assert_int_equal(check(&t), 0);
    add_step(&t, 33);
    assert_int_equal(check(&t), 5); /* four reads of the unit, and the update of its shard */
    close_tape(&t);
}

static void random_ranges_over_a_hundred_thousand_records_are_judged(void **state)
{
    (void)state;
    tape t;
    open_tape(&t, 100000);
    uint64_t seed = 7;
    for (int i = 0; i < 100000; i++) {
        fsdp_trace_record record = {.kind = FSDP_RECORD_OPERATION, .stream = A, .label = "", .n_accesses = 6};
        for (int a = 0; a < 6; a++)
            record.access[a] = (fsdp_trace_access){draw(&seed, 1 << 30), 1 + draw(&seed, 1 << 16), draw(&seed, 2)};
        if (i == 99999) record.stream = B, record.access[0] = (fsdp_trace_access){0, 1 << 30, false};
        fsdp__trace_add(t.trace, &record);
    }
    assert_int_equal(check(&t), 1);
    close_tape(&t);
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
        TEST(random_tapes_are_judged_as_a_search_of_all_paths_judges_them),
        TEST(a_tape_of_a_hundred_thousand_records_is_judged),
        TEST(random_ranges_over_a_hundred_thousand_records_are_judged),
    };
    return cmocka_run_group_tests_name("hb_oracle", tests, NULL, NULL);
}
