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

/* ---- Backends that help ---- */

static _Thread_local struct {
    bool swallow;  /* enqueue does nothing */
    int no_memory; /* enqueues that find none */
    bool device_fails;
} mine;

static fsdp_status odd_enqueue(void *comm, void *stream, const fsdp_collective *list, uint32_t n)
{
    if (mine.no_memory > 0) {
        mine.no_memory--;
        return fsdp_backend_fail(FSDP_ERR_NO_HOST_MEMORY, "no memory for a test");
    }
    return mine.swallow ? FSDP_OK : fsdp_host_backend()->comm->enqueue(comm, stream, list, n);
}

static fsdp_status odd_check(void *dev)
{
    return mine.device_fails ? fsdp_backend_fail(FSDP_ERR_DEVICE, "the device burns")
                             : fsdp_host_backend()->device->check(dev);
}

static const fsdp_backend *odd_backend(void)
{
    static fsdp_comm_ops comm;
    static fsdp_device_ops device;
    static fsdp_backend backend;
    backend = *fsdp_host_backend();
    comm = *backend.comm, comm.enqueue = odd_enqueue;
    device = *backend.device, device.check = odd_check;
    backend.comm = &comm, backend.device = &device;
    return &backend;
}

/* On a wire that says nothing, ranks differ in one call; then they are in the same host call. */
static void differ_before_a_barrier(member *m)
{
    open_context(m);
    mine.swallow = true;
    EXPECT_OK(all_reduce(m, 5));
    EXPECT_OK(fsdp_barrier_host(m->ctx));
    EXPECT_OK(all_reduce(m, m->number == 1 ? 6 : 7));
    EXPECT_OK(all_reduce(m, 8));
    keep(m, fsdp_barrier_host(m->ctx));
    is_dead_with_one_sentence(m);
    close_context(m);
}

static void host_calls_compare_the_collectives_before_them(void **state)
{
    (void)state;
    member *team = team_new(3, differ_before_a_barrier, NULL);
    for (uint32_t r = 0; r < 3; r++) team[r].backend = odd_backend();
    team_run(team);
    for (uint32_t r = 0; r < 3; r++) {
        assert_int_equal(team[r].status, FSDP_ERR_MISMATCH);
        has(&team[r], "fsdp_barrier_host: ranks have enqueued different collectives before it. First difference: "
                      "ranks 0, 2: #2 all-reduce of caller (7 fp32); rank 1: #2 all-reduce of caller (6 fp32). Last: ");
    }
    team_free(team);
}

/* A rank that lacks calls may still make them: it may have to ask the others first. */
static void lag_behind(member *m)
{
    double sum = 1.0;
    open_context(m);
    mine.swallow = true;
    for (uint64_t i = 0; i < 300; i++) {
        if (m->number != 1) EXPECT_OK(all_reduce(m, i));
        if (i % 100 == 0 || i > 290) EXPECT_OK(fsdp_sum_host(m->ctx, &sum, 1));
    }
    for (uint64_t i = 0; i < 300; i++)
        if (m->number == 1) EXPECT_OK(all_reduce(m, i));
    EXPECT_OK(fsdp_barrier_host(m->ctx));
    EXPECT_OK(fsdp_context_check(m->ctx));
    EXPECT(!is_there(m));
    close_context(m);
}

static void a_rank_that_is_behind_may_still_make_its_calls(void **state)
{
    (void)state;
    member *team = team_new(3, lag_behind, NULL);
    for (uint32_t r = 0; r < 3; r++) team[r].backend = odd_backend();
    team_run(team);
    team_free(team);
}

/* A group that was compared and found no memory is asked for again, and not compared again. */
static void ask_again(member *m)
{
    open_context(m);
    EXPECT_OK(all_reduce(m, 4));
    mine.no_memory = m->number == 1 ? 3 : 0;
    fsdp_status status;
    int n_refused = 0;
    while ((status = all_reduce(m, 5)) == FSDP_ERR_NO_HOST_MEMORY) n_refused++;
    EXPECT(status == FSDP_OK && n_refused == (m->number == 1 ? 3 : 0));
    EXPECT_OK(all_reduce(m, 6));
    EXPECT_OK(fsdp_stream_drain_host(m->s, 20 * second_ns));
    EXPECT_OK(fsdp_barrier_host(m->ctx));
    EXPECT(!is_there(m));
    close_context(m);
}

static void a_group_that_found_no_memory_may_be_asked_for_again(void **state)
{
    (void)state;
    for (uint32_t turn = 0; turn < 2; turn++) {
        member *team = team_new(2, ask_again, NULL);
        for (uint32_t r = 0; r < 2; r++) team[r].backend = odd_backend(), team[r].debug = turn ? FSDP_DEBUG_ORDER : 0;
        team_run(team);
        team_free(team);
    }
}

/* Rank 1's device has failed: it says so, while its peers know only that it does not come. */
static void burn(member *m)
{
    open_context(m);
    EXPECT_OK(all_reduce(m, 4));
    EXPECT_OK(fsdp_barrier_host(m->ctx));
    if (m->number == 0) keep(m, fsdp_barrier_host(m->ctx));
    pthread_barrier_wait(m->meet);
    mine.device_fails = m->number == 1;
    if (m->number == 1) keep(m, fsdp_context_check(m->ctx));
    mine.device_fails = false;
    close_context(m);
}

static void a_rank_whose_device_failed_says_so_itself(void **state)
{
    (void)state;
    member *team = team_new(2, burn, NULL);
    for (uint32_t r = 0; r < 2; r++) team[r].backend = odd_backend(), team[r].timeout_ns = second_ns / 2;
    team_run(team);
    assert_int_equal(team[0].status, FSDP_ERR_RANK_LOST);
    assert_int_equal(team[1].status, FSDP_ERR_DEVICE);
    has(&team[1], "the device burns");
    assert_int_equal(access(team[1].file_path, F_OK), -1); /* no failure between ranks was returned here */
    assert_int_equal(unlink(team[0].file_path), 0);
    team_free(team);
}

/* ---- Calls of different kinds, and aborts ---- */

/* In debug mode: one rank is about to enqueue while the others are in a host call. */
static void one_enqueues(member *m)
{
    open_context(m);
    EXPECT_OK(all_reduce(m, 4));
    keep(m, m->number == 2 ? all_reduce(m, 5) : fsdp_barrier_host(m->ctx));
    is_dead_with_one_sentence(m);
    close_context(m);
}

static void in_debug_mode_a_collective_and_a_host_call_differ(void **state)
{
    (void)state;
    member *team = team_new(3, one_enqueues, NULL);
    for (uint32_t r = 0; r < 3; r++) team[r].debug = FSDP_DEBUG_ORDER;
    team_run(team);
    for (uint32_t r = 0; r < 3; r++) {
        assert_int_equal(team[r].status, FSDP_ERR_MISMATCH);
        has(&team[r], "ranks called different things: ranks 0, 1: fsdp_barrier_host; rank 2: #2 all-reduce of caller "
                      "(5 fp32). Nothing was enqueued: make the same call on every rank");
        has(&team[r], "Last: ranks 0, 1: #1 all-reduce of caller (4 fp32), inside fsdp_barrier_host; "
                      "rank 2: #1 all-reduce of caller (4 fp32)");
        assert_int_equal(team[r].file.n[0], 1);
    }
    team_free(team);
}

/* Host calls that differ leave the context as it was, and no file. */
static void call_different_things(member *m)
{
    double sums[8] = {0};
    open_context(m);
    EXPECT(fsdp_sum_host(m->ctx, sums, m->number + 1) == FSDP_ERR_MISMATCH);
    EXPECT(strstr(fsdp_last_error(), "rank 3: fsdp_sum_host of 4. Nothing was done") != NULL);
    EXPECT(!is_there(m));
    EXPECT_OK(fsdp_flight_write_json(m->ctx, m->file_path));
    read_file(m, m->file_path);
    EXPECT(unlink(m->file_path) == 0);
    EXPECT(m->file.n_calls == 1 && strcmp(m->file.call[0].state, "returned") == 0);
    EXPECT(fsdp_stream_delay(NULL, 1) == FSDP_ERR_ARG);
    EXPECT(all_reduce(m, UINT64_MAX) == FSDP_ERR_ARG);
    EXPECT_OK(fsdp_barrier_host(m->ctx));
    EXPECT(!is_there(m));
    close_context(m);
}

static void calls_that_are_refused_leave_no_file(void **state)
{
    (void)state;
    member *team = team_new(4, call_different_things, NULL);
    team_run(team);
    team_free(team);
}

/* What contexts must agree on is compared when they open. */
static void open_differently(member *m, uint32_t debug, bool reduce_comm)
{
    fsdp_host_config host = {.size = sizeof host, .local = m->local, .rank = m->number};
    fsdp_config config = FSDP_CONFIG_INIT;
    config.backend_config = &host;
    config.debug = debug, config.reduce_comm = reduce_comm;
    keep(m, fsdp_context_create(&config, &m->ctx));
}

static void one_debugs(member *m) { open_differently(m, m->number == 0 ? FSDP_DEBUG_ORDER : 0, false); }
static void one_has_a_second_communicator(member *m) { open_differently(m, 0, m->number == 0); }

static void contexts_that_differ_do_not_open(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        member *team = team_new(3, i == 0 ? one_debugs : one_has_a_second_communicator, NULL);
        team_run(team);
        for (uint32_t r = 0; r < 3; r++) {
            assert_true(team[r].status == FSDP_ERR_MISMATCH && team[r].ctx == NULL);
            has(&team[r], i == 0 ? "fsdp_config.debug has FSDP_DEBUG_ORDER on rank 0 of 3 only"
                                 : "rank 0: fsdp_context_create with reduce_comm; ranks 1, 2: fsdp_context_create. ");
        }
        team_free(team);
    }
}

/* Rank 0 waits in the comparison, with its context's lock; another thread of its gives up. */
static void *give_up(void *arg)
{
    member *m = arg;
    fsdp_context_abort(m->ctx, "no longer");
    return NULL;
}

static void wait_in_comparison(member *m)
{
    pthread_t thread;
    open_context(m);
    pthread_barrier_wait(m->meet);
    if (m->number == 0) {
        EXPECT(pthread_create(&thread, NULL, give_up, m) == 0);
        keep(m, all_reduce(m, 4));
        pthread_join(thread, NULL);
        pthread_barrier_wait(m->meet);
    } else {
        pthread_barrier_wait(m->meet);
        keep(m, fsdp_context_check(m->ctx));
    }
    is_dead_with_one_sentence(m);
    close_context(m);
}

static void an_abort_wakes_who_waits_in_a_comparison(void **state)
{
    (void)state;
    for (int turn = 0; turn < 20; turn++) {
        member *team = team_new(2, wait_in_comparison, NULL);
        for (uint32_t r = 0; r < 2; r++) team[r].debug = FSDP_DEBUG_ORDER, team[r].timeout_ns = 600 * second_ns;
        team_run(team);
        for (uint32_t r = 0; r < 2; r++) assert_int_equal(team[r].status, FSDP_ERR_ABORTED);
        has(&team[1], "rank 0 aborted: no longer");
        assert_int_equal(team[0].file.n[0], 0); /* what it waited with was not enqueued */
        team_free(team);
    }
}

/* The file cannot be written: the log is told, the error stays. */
static void abort_without_a_folder(member *m)
{
    snprintf(m->path, sizeof m->path, "%s/none/flight", m->folder);
    open_context(m);
    pthread_barrier_wait(m->meet);
    if (m->number == 0) fsdp_context_abort(m->ctx, "why not");
    pthread_barrier_wait(m->meet);
    for (int i = 0; i < 2; i++) {
        keep(m, fsdp_barrier_host(m->ctx));
        EXPECT(m->status == FSDP_ERR_ABORTED && strcmp(m->said, "rank 0 aborted: why not") == 0);
        EXPECT(i > 0 || strstr(m->log, "No such file or directory") != NULL);
        if (i > 0) EXPECT(m->log[0] == '\0'); /* once */
        m->log[0] = '\0';
    }
    close_context(m);
}

static void a_file_that_cannot_be_written_changes_no_error(void **state)
{
    (void)state;
    member *team = team_new(2, abort_without_a_folder, NULL);
    team_run(team);
    team_free(team);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_step_that_differs_is_told_to_all_ranks_with_both_calls),
        cmocka_unit_test(in_debug_mode_nothing_that_differs_is_enqueued),
        cmocka_unit_test(equal_trainings_have_equal_hashes),
        cmocka_unit_test(gathers_ahead_say_the_pass_that_they_are_for),
        cmocka_unit_test(who_waits_for_a_rank_is_told_where_each_one_is),
        cmocka_unit_test(host_calls_compare_the_collectives_before_them),
        cmocka_unit_test(a_rank_that_is_behind_may_still_make_its_calls),
        cmocka_unit_test(a_group_that_found_no_memory_may_be_asked_for_again),
        cmocka_unit_test(a_rank_whose_device_failed_says_so_itself),
        cmocka_unit_test(in_debug_mode_a_collective_and_a_host_call_differ),
        cmocka_unit_test(calls_that_are_refused_leave_no_file),
        cmocka_unit_test(contexts_that_differ_do_not_open),
        cmocka_unit_test(an_abort_wakes_who_waits_in_a_comparison),
        cmocka_unit_test(a_file_that_cannot_be_written_changes_no_error),
    };
    alarm(100);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
