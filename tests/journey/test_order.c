/* SPDX-License-Identifier: MIT */
/* Ranks that do not make the same calls: all are told by one sentence which calls differ, with what each did last, and each
 * leaves its flight recorder. Ranks are threads of the host backend. */
#include "order_team.h"

/* What a step does besides what it should, on one rank. */
typedef struct oddity {
    const char *what;
    uint32_t rank;
    bool swap, skip, evaluate, reduce_more;
    const char *others, *odd; /* what the first difference says of them, without the number */
} oddity;

static fsdp_status pass(member *m, const oddity *o, bool train)
{
    fsdp_pass_args args = FSDP_PASS_ARGS_INIT;
    args.pass = train ? FSDP_PASS_TRAIN : FSDP_PASS_EVAL;
    fsdp_status status = fsdp_pass_begin(m->model, &args, m->s);
    for (uint32_t i = 0; status == FSDP_OK && i < (train ? 2 : 1) * UNITS; i++) {
        bool backward = i >= UNITS;
        uint32_t unit = backward ? 2 * UNITS - 1 - i : i;
        if (o != NULL && o->swap && !backward && unit > 0) unit = 3 - unit;
        if (o != NULL && o->skip && unit == 1) continue;
        status = visit(m, unit, backward);
        if (status == FSDP_OK && o != NULL && o->reduce_more && i == 0) status = all_reduce(m, 2);
    }
    return status == FSDP_OK ? fsdp_pass_end(m->model, m->s) : status;
}

static fsdp_status train_step(member *m, const oddity *o)
{
    fsdp_status status = o != NULL && o->evaluate ? pass(m, NULL, false) : FSDP_OK;
    if (status == FSDP_OK) status = pass(m, o, true);
    fsdp_adamw_args args = FSDP_ADAMW_ARGS_INIT;
    if (status == FSDP_OK) status = fsdp_adamw_step(m->opt, &args, m->s);
    return status;
}

/* ---- Steps that differ ---- */

static void one_is_odd(member *m)
{
    const oddity *o = m->arg;
    open_all(m);
    EXPECT_OK(train_step(m, NULL));
    EXPECT_OK(fsdp_barrier_host(m->ctx));
    EXPECT(!is_there(m));
    fsdp_status status = train_step(m, m->number == o->rank ? o : NULL);
    if (status == FSDP_OK) status = fsdp_stream_drain_host(m->s, 20 * second_ns);
    if (status == FSDP_OK) status = fsdp_stream_drain_host(fsdp_context_lane(m->ctx, FSDP_LANE_GATHER), 20 * second_ns);
    if (status == FSDP_OK) status = fsdp_barrier_host(m->ctx);
    keep(m, status);
    is_dead_with_one_sentence(m);
    close_all(m);
}

static const oddity oddities[] = {
    {.what = "two equal units swapped",
     .rank = 2,
     .swap = true,
     .others = "ranks 0, 1, 3: #%llu all-gather of h.1 in TRAIN (256 fp32)",
     .odd = "rank 2: #%llu all-gather of h.2 in TRAIN (256 fp32)"},
    {.what = "a unit skipped",
     .rank = 1,
     .skip = true,
     .others = "ranks 0, 2, 3: #%llu all-gather of h.1 in TRAIN (256 fp32)",
     .odd = "rank 1: #%llu all-gather of h.2 in TRAIN (256 fp32)"},
    {.what = "an evaluation alone",
     .rank = 3,
     .evaluate = true,
     .others = "ranks 0 to 2: #%llu all-gather of h.0 in TRAIN (128 fp32)",
     .odd = "rank 3: #%llu all-gather of h.0 in EVAL (128 fp32)"},
    {.what = "an all-reduce more",
     .rank = 0,
     .reduce_more = true,
     .others = "ranks 1 to 3: #%llu all-gather of h.1 in TRAIN (256 fp32)",
     .odd = "rank 0: #%llu all-reduce of caller (2 fp32)"},
};

/* The number of the first call that differs, as "#12" in the words of the odd rank. */
static uint64_t number_in(const member *m, const char *format)
{
    char words[128];
    for (unsigned long long number = 1; number < 200; number++) {
        snprintf(words, sizeof words, format, number);
        if (strstr(m->said, words) != NULL) return number;
    }
    fail_msg("rank %u: '%s' is not in: %s", m->number, format, m->said);
    return 0;
}

static void check_files(const member *team, const oddity *o, uint64_t number)
{
    const flight_file *odd = &team[o->rank].file, *other = &team[o->rank == 0 ? 1 : 0].file;
    for (uint32_t r = 0; r < team->world; r++) {
        const flight_call *last = flight_file_last(&team[r].file);
        assert_non_null(last);
        assert_int_equal(last->number, team[r].file.n[0]);
        if (!(team->debug & FSDP_DEBUG_ORDER)) continue;
        /* Nothing of it was enqueued, on any rank. */
        assert_int_equal(last->number, number - 1);
        assert_int_equal(team[r].file.hash[0], other->hash[0]);
    }
    if (team->debug & FSDP_DEBUG_ORDER) return;
    assert_true(odd->n[0] >= number && other->n[0] >= number);
    assert_int_not_equal(odd->hash[0], other->hash[0]);
    char what[2][256];
    for (int k = 0; k < 2; k++) {
        const flight_file *f = k == 0 ? odd : other;
        for (uint32_t i = 0; i < f->n_calls; i++)
            if (f->call[i].comm == 0 && f->call[i].number == number)
                snprintf(what[k], sizeof what[k], "#%llu %s of %s%s%s (%llu %s)", (unsigned long long)number,
                         f->call[i].call, f->call[i].what, f->call[i].pass[0] ? " in " : "", f->call[i].pass,
                         (unsigned long long)f->call[i].count, f->call[i].dtype);
    }
    assert_string_not_equal(what[0], what[1]);
    for (int k = 0; k < 2; k++) has(&team[0], what[k]);
}

static void steps_that_differ(uint32_t debug, uint32_t depth)
{
    for (size_t i = 0; i < sizeof oddities / sizeof *oddities; i++) {
        const oddity *o = &oddities[i];
        member *team = team_new(WORLD, one_is_odd, o);
        for (uint32_t r = 0; r < WORLD; r++) team[r].debug = debug, team[r].depth = depth;
        team_run(team);
        uint64_t number = number_in(&team[0], o->odd);
        for (uint32_t r = 0; r < WORLD; r++) {
            assert_int_equal(team[r].status, FSDP_ERR_MISMATCH);
            assert_string_equal(team[r].said, team[0].said);
            assert_int_equal(number_in(&team[r], o->others), number);
            has(&team[r], "Last: ");
        }
        check_files(team, o, number);
        team_free(team);
    }
}

static void a_step_that_differs_is_told_to_all_ranks_with_both_calls(void **state)
{
    (void)state;
    steps_that_differ(0, 0);
}

static void in_debug_mode_nothing_that_differs_is_enqueued(void **state)
{
    (void)state;
    steps_that_differ(FSDP_DEBUG_ORDER, 0);
}

/* ---- Steps that do not ---- */

static void train_and_write(member *m)
{
    char path[160];
    open_all(m);
    for (int i = 0; i < 60; i++) {
        EXPECT_OK(train_step(m, NULL));
        EXPECT_OK(pass(m, NULL, false));
    }
    EXPECT_OK(fsdp_barrier_host(m->ctx));
    EXPECT(!is_there(m));
    snprintf(path, sizeof path, "%s.own", m->file_path);
    EXPECT_OK(fsdp_flight_write_json(m->ctx, path));
    read_file(m, path);
    EXPECT(unlink(path) == 0);
    EXPECT(strcmp(m->file.status, "FSDP_OK") == 0);
    close_all(m);
}

static void equal_trainings_have_equal_hashes(void **state)
{
    (void)state;
    for (uint32_t turn = 0; turn < 6; turn++) {
        member *team = team_new(turn % 2 ? WORLD : 2, train_and_write, NULL);
        for (uint32_t r = 0; r < team->world; r++) {
            team[r].debug = turn % 3 == 0 ? FSDP_DEBUG_ORDER : 0;
            team[r].reduce_comm = turn >= 3;
            team[r].depth = turn % 3;
        }
        team_run(team);
        const flight_file *first = &team[0].file;
        assert_int_equal(first->n_calls, FSDP_FLIGHT_CALLS);
        assert_true(first->n[0] > 12 * UNITS && (first->n[1] > 0) == (turn >= 3));
        assert_string_equal(first->call[FSDP_FLIGHT_CALLS - 1].call, "fsdp_barrier_host");
        for (uint32_t r = 1; r < team->world; r++) {
            const flight_file *f = &team[r].file;
            assert_memory_equal(f->n, first->n, sizeof f->n);
            assert_memory_equal(f->hash, first->hash, sizeof f->hash);
            for (uint32_t i = 0; i < f->n_calls; i++) {
                assert_string_equal(f->call[i].what, first->call[i].what);
                assert_string_equal(f->call[i].pass, first->call[i].pass);
                if (strcmp(f->call[i].call, "reduce-scatter") == 0) assert_string_equal(f->call[i].pass, "TRAIN");
            }
        }
        team_free(team);
    }
}

/* An evaluation that is followed by training gathers ahead for it. */
static void evaluate_and_write(member *m)
{
    open_all(m);
    fsdp_pass_args args = FSDP_PASS_ARGS_INIT;
    args.pass = FSDP_PASS_EVAL, args.next = FSDP_PASS_TRAIN;
    EXPECT_OK(fsdp_pass_begin(m->model, &args, m->s));
    for (uint32_t i = 0; i < UNITS; i++) EXPECT_OK(visit(m, i, false));
    EXPECT_OK(fsdp_pass_end(m->model, m->s));
    EXPECT_OK(fsdp_flight_write_json(m->ctx, m->file_path));
    read_file(m, m->file_path);
    EXPECT(unlink(m->file_path) == 0);
    args.pass = FSDP_PASS_TRAIN;
    EXPECT_OK(fsdp_pass_begin(m->model, &args, m->s));
    EXPECT_OK(fsdp_pass_abort(m->model, m->s));
    close_all(m);
}

static void gathers_ahead_say_the_pass_that_they_are_for(void **state)
{
    (void)state;
    member *team = team_new(2, evaluate_and_write, NULL);
    team[0].depth = team[1].depth = 1;
    team_run(team);
    for (uint32_t r = 0; r < 2; r++) {
        const flight_file *f = &team[r].file;
        const flight_call *last = flight_file_last(f);
        assert_string_equal(last->what, "h.0");
        assert_string_equal(last->pass, "TRAIN");
        uint32_t n_eval = 0;
        for (uint32_t i = 0; i < f->n_calls; i++) n_eval += strcmp(f->call[i].pass, "EVAL") == 0;
        assert_int_equal(n_eval, UNITS);
    }
    team_free(team);
}

/* ---- Ranks that do not come ---- */

static void one_stays_away(member *m)
{
    open_all(m);
    EXPECT_OK(train_step(m, NULL));
    EXPECT_OK(fsdp_stream_drain_host(m->s, 20 * second_ns));
    if (m->number == 1) {
        pthread_barrier_wait(m->meet);
        keep(m, fsdp_context_check(m->ctx));
    } else {
        keep(m, m->number == 0 ? fsdp_barrier_host(m->ctx) : train_step(m, NULL));
        if (m->status == FSDP_OK) keep(m, fsdp_barrier_host(m->ctx));
        pthread_barrier_wait(m->meet);
    }
    is_dead_with_one_sentence(m);
    close_all(m);
}

static void who_waits_for_a_rank_is_told_where_each_one_is(void **state)
{
    (void)state;
    for (uint32_t turn = 0; turn < 2; turn++) {
        member *team = team_new(3, one_stays_away, NULL);
        for (uint32_t r = 0; r < 3; r++) team[r].timeout_ns = second_ns, team[r].debug = turn ? FSDP_DEBUG_ORDER : 0;
        team_run(team);
        for (uint32_t r = 0; r < 3; r++) {
            assert_int_equal(team[r].status, FSDP_ERR_RANK_LOST);
            assert_string_equal(team[r].said, team[0].said);
            has(&team[r], ", inside fsdp_barrier_host");
            has(&team[r], "rank 1: #");
            has(&team[r], "all-reduce of norm in UPDATE (33 fp32)");
            if (turn == 1) assert_int_equal(team[r].file.n[0], team[1].file.n[0]);
        }
        assert_string_equal(team[0].file.call[team[0].file.n_calls - 1].call, "fsdp_barrier_host");
        team_free(team);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_step_that_differs_is_told_to_all_ranks_with_both_calls),
        cmocka_unit_test(in_debug_mode_nothing_that_differs_is_enqueued),
        cmocka_unit_test(equal_trainings_have_equal_hashes),
        cmocka_unit_test(gathers_ahead_say_the_pass_that_they_are_for),
        cmocka_unit_test(who_waits_for_a_rank_is_told_where_each_one_is),
    };
    alarm(100);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
