/* SPDX-License-Identifier: MIT */
/* The judge judged on random tapes, against a search of the whole graph, and on long ones. */
#include "tape_rig.h"
#include "xorshift.h"

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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(random_tapes_are_judged_as_a_search_of_all_paths_judges_them, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(a_tape_of_a_hundred_thousand_records_is_judged, set_up, tear_down),
        cmocka_unit_test_setup_teardown(random_ranges_over_a_hundred_thousand_records_are_judged, set_up, tear_down),
    };
    return cmocka_run_group_tests_name("hb_oracle, random", tests, NULL, NULL);
}
