/* SPDX-License-Identifier: MIT */
/* Ranks whose calls differ outside of steps: before host calls, in kind, as contexts open; wires and devices that help;
 * aborts, and a file that cannot be written. Ranks are threads of the host backend. */
#include "order_team.h"

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
