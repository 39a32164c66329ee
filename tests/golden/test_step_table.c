/* SPDX-License-Identifier: MIT */
/* One training step, call by call: what each host call enqueues, on which stream, in which order, waiting for what, onto
 * which bytes. The table is docs/streams.md's worked step: three blocks and a held unit, depth 1, two micro-steps, AdamW. */
#include "journey.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "context.h"
#include "sharding/model.h"

/* A line is what one call enqueued: "call | stream: what, what; stream: what | A B", streams in host order. A and B are the
 * two places of the gather range that blocks share, grad0 and grad1 those of the grad range, gs.u is u's gradient shard,
 * tmp the temporary; collectives are numbered as they stand on the wire. The caller's kernels are left out. */

enum { TEXT_BYTES = 1 << 14, MAX_PLACES = 32 };

typedef struct place {
    uint64_t address;
    char name[16];
} place;

typedef struct table {
    journey j;
    place places[MAX_PLACES];
    uint32_t n_places;
    uint64_t n_seen; /* records of the tape that are in lines already */
    uint32_t n_wire; /* collectives in them */
    size_t used;
    char text[TEXT_BYTES];
    size_t raw_used; /* every address of every record, for comparing steps */
    char raw[8 * TEXT_BYTES];
} table;

static void name_place(table *t, uint64_t address, const char *name)
{
    assert_in_range(t->n_places, 0, MAX_PLACES - 1);
    t->places[t->n_places].address = address;
    snprintf(t->places[t->n_places++].name, sizeof t->places[0].name, "%s", name);
}

static const char *place_name(table *t, uint64_t address)
{
    for (uint32_t i = 0; i < t->n_places; i++)
        if (t->places[i].address == address) return t->places[i].name;
    return "elsewhere";
}

__attribute__((format(printf, 2, 3))) static void put(table *t, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int n = vsnprintf(t->text + t->used, sizeof t->text - t->used, format, args);
    va_end(args);
    t->used += (size_t)n;
    assert_true(t->used < sizeof t->text);
}

static uint64_t written(const fsdp_trace_record *r)
{
    for (uint32_t i = 0; i < r->n_accesses; i++)
        if (r->access[i].write) return r->access[i].begin;
    return 0;
}

static uint64_t was_read(const fsdp_trace_record *r)
{
    for (uint32_t i = 0; i < r->n_accesses; i++)
        if (!r->access[i].write) return r->access[i].begin;
    return 0;
}

static void put_operation(table *t, const fsdp_trace_record *r)
{
    const char *to = place_name(t, written(r)), *from = place_name(t, was_read(r));
    switch (r->operation) {
    case FSDP_OPERATION_CAST: put(t, "cast %s", r->label); break;
    case FSDP_OPERATION_FILL: put(t, "zero %s", to); break;
    case FSDP_OPERATION_ADD: put(t, "add %s > %s", from, to); break;
    case FSDP_OPERATION_SQUARE_SUM: put(t, "square %s", from); break;
    case FSDP_OPERATION_ADAMW: put(t, "AdamW(%s)", r->label); break;
    case FSDP_OPERATION_ALL_GATHER: put(t, "%u AG(%s) > %s", ++t->n_wire, r->label, to); break;
    case FSDP_OPERATION_REDUCE_SCATTER: put(t, "%u RS(%s) %s > %s", ++t->n_wire, r->label, from, to); break;
    case FSDP_OPERATION_ALL_REDUCE: put(t, "%u all-reduce %s", ++t->n_wire, r->label); break;
    case FSDP_OPERATION_STEP_INPUT: put(t, "input"); break;
    case FSDP_OPERATION_STEP_RESULT: put(t, "result"); break;
    default: put(t, "%s %s", fsdp_operation_name(r->operation), r->label); break;
    }
}

static void put_record(table *t, const fsdp_trace_record *r)
{
    if (r->kind == FSDP_RECORD_OPERATION) {
        put_operation(t, r);
        return;
    }
    bool norm = r->mark == FSDP_MARK_NORM_PART || r->mark == FSDP_MARK_NORM_SUM;
    put(t, "%s %s%s%s", r->kind == FSDP_RECORD_WAIT ? "wait" : "record", norm ? "" : r->label, norm ? "" : ".",
        fsdp_mark_name(r->mark));
}

/* The report's place is left out: it is a ring, by step. */
static void put_raw(table *t, const fsdp_trace_record *r)
{
    bool reports = r->kind == FSDP_RECORD_OPERATION && r->operation == FSDP_OPERATION_STEP_RESULT;
    for (uint32_t i = 0; i < r->n_accesses - reports; i++)
        t->raw_used +=
            (size_t)snprintf(t->raw + t->raw_used, sizeof t->raw - t->raw_used, "%d %d %s %" PRIx64 " %" PRIu64 "\n",
                             (int)r->kind, (int)r->operation, r->label, r->access[i].begin, r->access[i].bytes);
    assert_true(t->raw_used < sizeof t->raw);
}

/* Which block is gathered in A, and which in B. */
static void put_buffers(table *t)
{
    const char *in[2] = {"-", "-"};
    for (uint32_t i = 0; i < t->j.n_blocks; i++) {
        const fsdp_unit *unit = t->j.unit[i];
        if (unit->full == NULL) continue;
        const char *name = place_name(t, unit->full->begin);
        assert_true(strcmp(name, "A") == 0 || strcmp(name, "B") == 0);
        assert_string_equal(in[name[0] - 'A'], "-");
        in[name[0] - 'A'] = unit->name;
    }
    put(t, " | %s %s\n", in[0], in[1]);
}

static void put_line(journey *j, const char *call)
{
    table *t = j->arg;
    int32_t stream = -1;
    put(t, "%s |", call);
    for (; t->n_seen < fsdp_trace_count(j->trace); t->n_seen++) {
        const fsdp_trace_record *r = fsdp_trace_at(j->trace, t->n_seen);
        if (r->kind == FSDP_RECORD_USE || (r->kind == FSDP_RECORD_OPERATION && r->operation == FSDP_OPERATION_DELAY))
            continue;
        if (r->stream != stream) put(t, "%s %s: ", stream >= 0 ? ";" : "", fsdp_trace_stream_name(j->trace, r->stream));
        else put(t, ", ");
        stream = r->stream;
        put_record(t, r);
        put_raw(t, r);
    }
    put_buffers(t);
}

/* ---- The tables ---- */

/* clang-format off */
static const char reduce_each[] =
    "pass_begin() | | h0 -\n"
    "forward_begin(H) | s: wait H.ready | h0 -\n"
    "forward_begin(h0) | s: wait h0.ready; gather: wait h1.updated, cast h1, 1 AG(h1) > B, record h1.ready | h0 h1\n"
    "forward_end(h0) | s: record h0.used | - h1\n"
    "forward_begin(h1) | s: wait h1.ready; gather: wait h0.used, cast h2, 2 AG(h2) > A, record h2.ready | h2 h1\n"
    "forward_end(h1) | | h2 h1\n"
    "forward_begin(h2) | s: wait h2.ready | h2 h1\n"
    "forward_end(h2) | | h2 h1\n"
    "forward_end(H) | | h2 h1\n"
    "backward_begin(H) | s: zero gradH | h2 h1\n"
    "backward_begin(h2) | s: zero grad0 | h2 h1\n"
    "backward_end(h2) | s: record h2.grads; reduce: wait h2.grads, 3 RS(h2) grad0 > gs.h2, record h2.reduced | - h1\n"
    "backward_begin(h1) | gather: wait h2.grads, cast h0, 4 AG(h0) > A, record h0.ready; s: zero grad1 | h0 h1\n"
    "backward_end(h1) | s: record h1.grads; reduce: wait h1.grads, 5 RS(h1) grad1 > gs.h1, record h1.reduced | h0 h1\n"
    "backward_begin(h0) | s: wait h0.ready, wait h2.reduced, zero grad0 | h0 h1\n"
    "backward_end(h0) | s: record h0.grads; reduce: wait h0.grads, 6 RS(h0) grad0 > gs.h0, record h0.reduced | h0 h1\n"
    "backward_end(H) | s: record H.grads; reduce: wait H.grads, 7 RS(H) gradH > gs.H, record H.reduced | h0 h1\n"
    "pass_end() | | h0 h1\n"
    "pass_begin() | | h0 h1\n"
    "forward_begin(H) | | h0 h1\n"
    "forward_begin(h0) | | h0 h1\n"
    "forward_end(h0) | s: record h0.used | - h1\n"
    "forward_begin(h1) | gather: wait h0.used, cast h2, 8 AG(h2) > A, record h2.ready | h2 h1\n"
    "forward_end(h1) | | h2 h1\n"
    "forward_begin(h2) | s: wait h2.ready | h2 h1\n"
    "forward_end(h2) | | h2 h1\n"
    "forward_end(H) | | h2 h1\n"
    "backward_begin(H) | s: wait H.reduced, zero gradH | h2 h1\n"
    "backward_begin(h2) | s: zero grad0 | h2 h1\n"
    "backward_end(h2) | s: record h2.grads; "
        "reduce: wait h2.grads, 9 RS(h2) grad0 > tmp, add tmp > gs.h2, record h2.reduced | - h1\n"
    "backward_begin(h1) | gather: wait h2.grads, cast h0, 10 AG(h0) > A, record h0.ready; s: zero grad1 | h0 h1\n"
    "backward_end(h1) | s: record h1.grads; "
        "reduce: wait h1.grads, 11 RS(h1) grad1 > tmp, add tmp > gs.h1, record h1.reduced | h0 -\n"
    "backward_begin(h0) | s: wait h0.ready, wait h2.reduced, zero grad0 | h0 -\n"
    "backward_end(h0) | s: record h0.grads; "
        "reduce: wait h0.grads, 12 RS(h0) grad0 > tmp, add tmp > gs.h0, record h0.reduced | - -\n"
    "backward_end(H) | s: record H.grads; "
        "reduce: wait H.grads, 13 RS(H) gradH > tmp, add tmp > gs.H, record H.reduced | - -\n"
    "pass_end() | | - -\n"
    "adamw_step() | s: wait H.reduced; gather: wait h2.reduced, square gs.h2, wait h1.reduced, square gs.h1, "
        "wait h0.reduced, square gs.h0, wait H.reduced, square gs.H, input, record norm.part; "
        "reduce: wait norm.part, 14 all-reduce norm, result, record norm.sum; "
        "s: wait norm.sum, AdamW(H), record H.updated, AdamW(h0), record h0.updated, AdamW(h1), "
        "record h1.updated, AdamW(h2), record h2.updated; "
        "gather: wait H.updated, cast H, 15 AG(H) > H, record H.ready, wait h0.updated, cast h0, 16 AG(h0) > A, "
        "record h0.ready | h0 -\n";

static const char keep_full[] =
    "pass_begin() | | h0 -\n"
    "forward_begin(H) | s: wait H.ready | h0 -\n"
    "forward_begin(h0) | s: wait h0.ready; gather: wait h1.updated, cast h1, 1 AG(h1) > B, record h1.ready | h0 h1\n"
    "forward_end(h0) | s: record h0.used | - h1\n"
    "forward_begin(h1) | s: wait h1.ready; gather: wait h0.used, cast h2, 2 AG(h2) > A, record h2.ready | h2 h1\n"
    "forward_end(h1) | | h2 h1\n"
    "forward_begin(h2) | s: wait h2.ready | h2 h1\n"
    "forward_end(h2) | | h2 h1\n"
    "forward_end(H) | | h2 h1\n"
    "backward_begin(H) | s: zero grad.H | h2 h1\n"
    "backward_begin(h2) | s: zero grad.h2 | h2 h1\n"
    "backward_end(h2) | s: record h2.grads | - h1\n"
    "backward_begin(h1) | gather: wait h2.grads, cast h0, 3 AG(h0) > A, record h0.ready; s: zero grad.h1 | h0 h1\n"
    "backward_end(h1) | s: record h1.grads | h0 h1\n"
    "backward_begin(h0) | s: wait h0.ready, zero grad.h0 | h0 h1\n"
    "backward_end(h0) | s: record h0.grads | h0 h1\n"
    "backward_end(H) | s: record H.grads | h0 h1\n"
    "pass_end() | | h0 h1\n"
    "pass_begin() | | h0 h1\n"
    "forward_begin(H) | | h0 h1\n"
    "forward_begin(h0) | | h0 h1\n"
    "forward_end(h0) | s: record h0.used | - h1\n"
    "forward_begin(h1) | gather: wait h0.used, cast h2, 4 AG(h2) > A, record h2.ready | h2 h1\n"
    "forward_end(h1) | | h2 h1\n"
    "forward_begin(h2) | s: wait h2.ready | h2 h1\n"
    "forward_end(h2) | | h2 h1\n"
    "forward_end(H) | | h2 h1\n"
    "backward_begin(H) | | h2 h1\n"
    "backward_begin(h2) | | h2 h1\n"
    "backward_end(h2) | s: record h2.grads; reduce: wait h2.grads, 5 RS(h2) grad.h2 > gs.h2, record h2.reduced | - h1\n"
    "backward_begin(h1) | gather: wait h2.grads, cast h0, 6 AG(h0) > A, record h0.ready | h0 h1\n"
    "backward_end(h1) | s: record h1.grads; reduce: wait h1.grads, 7 RS(h1) grad.h1 > gs.h1, record h1.reduced | h0 -\n"
    "backward_begin(h0) | s: wait h0.ready | h0 -\n"
    "backward_end(h0) | s: record h0.grads; reduce: wait h0.grads, 8 RS(h0) grad.h0 > gs.h0, record h0.reduced | - -\n"
    "backward_end(H) | s: record H.grads; reduce: wait H.grads, 9 RS(H) grad.H > gs.H, record H.reduced | - -\n"
    "pass_end() | | - -\n"
    "adamw_step() | s: wait H.reduced; gather: wait h2.reduced, square gs.h2, wait h1.reduced, square gs.h1, "
        "wait h0.reduced, square gs.h0, wait H.reduced, square gs.H, input, record norm.part; "
        "reduce: wait norm.part, 10 all-reduce norm, result, record norm.sum; "
        "s: wait norm.sum, AdamW(H), record H.updated, AdamW(h0), record h0.updated, AdamW(h1), "
        "record h1.updated, AdamW(h2), record h2.updated; "
        "gather: wait H.updated, cast H, 11 AG(H) > H, record H.ready, wait h0.updated, cast h0, 12 AG(h0) > A, "
        "record h0.ready | h0 -\n";

/* What the very first step has in place of gathers 15 and 16 of the one before: nothing to wait for, and no update. */
static const char first_begins[] =
    "pass_begin() | | - -\n"
    "forward_begin(H) | gather: cast H, 1 AG(H) > H, record H.ready; s: wait H.ready; "
        "gather: cast h0, 2 AG(h0) > A, record h0.ready | h0 -\n"
    "forward_begin(h0) | s: wait h0.ready; gather: cast h1, 3 AG(h1) > B, record h1.ready | h0 h1\n";

/* The last row, where the caller writes the shards himself. */
static const char own_writer[] =
    "update_begin() | s: wait H.reduced | - -\n"
    "update_unit(H) | s: record H.updated | - -\n"
    "update_unit(h0) | s: record h0.updated | - -\n"
    "update_unit(h1) | s: record h1.updated | - -\n"
    "update_unit(h2) | s: record h2.updated | - -\n"
    "update_end() | gather: wait H.updated, cast H, 14 AG(H) > H, record H.ready, wait h0.updated, cast h0, "
        "15 AG(h0) > A, record h0.ready | h0 -\n";
/* clang-format on */

/* ---- Running one ---- */

static void name_places(table *t)
{
    const fsdp_model *model = t->j.model;
    const fsdp__pass *pass = &model->passes[FSDP_PASS_TRAIN];
    uint64_t full = (uint64_t)(uintptr_t)fsdp__allocator_base(model->gather_pool);
    uint64_t grad = (uint64_t)(uintptr_t)fsdp__allocator_base(model->grad_pool);
    name_place(t, full + model->units[0]->full_place, "H");
    name_place(t, full + pass->full_offset[1], "A"); /* h0's visit */
    name_place(t, full + pass->full_offset[2], "B");
    if (t->j.model_config.accumulation != FSDP_ACCUMULATE_KEEP_FULL) {
        name_place(t, grad + model->units[0]->grad_place, "gradH");
        name_place(t, grad + pass->grad_offset[5], "grad0"); /* h2's backward visit */
        name_place(t, grad + pass->grad_offset[6], "grad1");
        name_place(t, (uint64_t)(uintptr_t)model->scratch + model->plan.tmp_offset, "tmp");
    }
    for (size_t i = 0; i < model->n_units; i++) {
        char name[16];
        const fsdp_unit *unit = model->units[i];
        snprintf(name, sizeof name, "gs.%s", unit->name);
        name_place(t, (uint64_t)(uintptr_t)unit->groups[0].gradient, name);
        snprintf(name, sizeof name, "grad.%s", unit->name);
        if (t->j.model_config.accumulation == FSDP_ACCUMULATE_KEEP_FULL) name_place(t, grad + unit->grad_place, name);
    }
    for (uint32_t i = 0; i < t->n_places; i++)
        for (uint32_t k = 0; k < i; k++) assert_int_not_equal(t->places[i].address, t->places[k].address);
}

static table *open_table(fsdp_accumulation accumulation)
{
    static table t;
    memset(&t, 0, sizeof t);
    journey_init(&t.j, 3);
    t.j.held = true;
    t.j.n_micro = 2;
    t.j.model_config.accumulation = accumulation;
    t.j.unit_config.compute_dtype = FSDP_DTYPE_BF16;
    t.j.seen = put_line;
    t.j.arg = &t;
    return &t;
}

static void run_step(table *t)
{
    t->n_seen = t->n_wire = 0;
    t->used = t->raw_used = 0;
    journey_tape_start(&t->j);
    journey_step(&t->j);
    journey_tape_stop(&t->j);
}

/* The texts begin alike; the first line that does not is shown. */
static void assert_begins(const char *text, const char *expected)
{
    for (size_t n; *expected != '\0'; text += n, expected += n) {
        n = strcspn(expected, "\n") + 1;
        if (strncmp(text, expected, n) == 0) continue;
        fail_msg("expected\n    %.*s\nhave\n    %.*s", (int)n - 1, expected, (int)strcspn(text, "\n"), text);
    }
}

static void assert_text(const char *text, const char *expected)
{
    assert_begins(text, expected);
    assert_int_equal(strlen(text), strlen(expected));
}

/* Steps 2 and 3 are the table; 3 also has 2's every address. */
static void assert_table(table *t, const char *expected)
{
    static char second[sizeof t->raw];
    journey_open(&t->j);
    name_places(t);
    run_step(t);
    run_step(t);
    assert_text(t->text, expected);
    memcpy(second, t->raw, sizeof second);
    run_step(t);
    assert_text(t->text, expected);
    assert_text(t->raw, second);
    journey_close(&t->j);
}

/* ---- Tests ---- */

static void a_step_with_reductions_each_micro_step_is_the_table(void **state)
{
    (void)state;
    assert_table(open_table(FSDP_ACCUMULATE_REDUCE_EACH), reduce_each);
}

static void a_step_with_full_gradients_kept_is_the_table(void **state)
{
    (void)state;
    assert_table(open_table(FSDP_ACCUMULATE_KEEP_FULL), keep_full);
}

static void the_table_does_not_depend_on_time(void **state)
{
    (void)state;
    for (uint64_t speed = 1; speed <= 1000000000; speed *= 1000) {
        table *t = open_table(FSDP_ACCUMULATE_REDUCE_EACH);
        t->j.sim.link = (fsdp_link){1000, 1000000 * speed};
        t->j.sim.kernel_latency_ns = speed;
        for (uint32_t i = 0; i < t->j.n_blocks; i++) t->j.block[i] = (journey_costs){100000, 200000, 0};
        assert_table(t, reduce_each);
    }
}

static void the_table_does_not_depend_on_the_world(void **state)
{
    (void)state;
    for (uint32_t world = 3; world <= 512; world *= 5) {
        table *t = open_table(FSDP_ACCUMULATE_REDUCE_EACH);
        t->j.sim.world = world;
        t->j.sim.rank = world / 2;
        assert_table(t, reduce_each);
    }
}

static void the_first_step_gathers_in_its_first_begin_hooks(void **state)
{
    (void)state;
    table *t = open_table(FSDP_ACCUMULATE_REDUCE_EACH);
    journey_open(&t->j);
    name_places(t);
    run_step(t);
    assert_begins(t->text, first_begins);
    /* From there on it is the table, two collectives later. */
    const char *rest = strstr(t->text, "forward_end(h0)");
    assert_non_null(rest);
    assert_begins(rest, "forward_end(h0) | s: record h0.used | - h1\n"
                        "forward_begin(h1) | s: wait h1.ready; "
                        "gather: wait h0.used, cast h2, 4 AG(h2) > A, record h2.ready | h2 h1\n"
                        "forward_end(h1) | | h2 h1\n");
    assert_int_equal(t->n_wire, 18);
    journey_close(&t->j);
}

static void a_writer_of_the_callers_own_has_the_rows_of_adamw_without_the_norm(void **state)
{
    (void)state;
    table *t = open_table(FSDP_ACCUMULATE_REDUCE_EACH);
    t->j.own_optimizer = true;
    journey_open(&t->j);
    name_places(t);
    run_step(t);
    run_step(t);
    const char *update = strstr(t->text, "update_begin");
    assert_non_null(update);
    assert_text(update, own_writer);
    *strstr(t->text, "update_begin") = '\0';
    assert_int_equal(strlen(t->text), strstr(reduce_each, "adamw_step") - reduce_each);
    assert_begins(reduce_each, t->text);
    journey_close(&t->j);
}

int main(void)
{
    alarm(60);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_step_with_reductions_each_micro_step_is_the_table),
        cmocka_unit_test(a_step_with_full_gradients_kept_is_the_table),
        cmocka_unit_test(the_table_does_not_depend_on_time),
        cmocka_unit_test(the_table_does_not_depend_on_the_world),
        cmocka_unit_test(the_first_step_gathers_in_its_first_begin_hooks),
        cmocka_unit_test(a_writer_of_the_callers_own_has_the_rows_of_adamw_without_the_norm),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
