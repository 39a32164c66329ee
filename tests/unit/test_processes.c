/* SPDX-License-Identifier: MIT */
/* The harness of ranks as processes finds out who fails, hangs, dies or leaves something behind. */
#include "processes.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const uint64_t second_ns = 1000000000, long_ns = 30000000000u;

static int deadline(void **state)
{
    (void)state;
    alarm(100);
    return 0;
}

typedef struct shared {
    meeting meet;
    mark mark;
    uint32_t seen[8];
} shared;

static void assert_says(const char *failure, const char *part)
{
    if (failure == NULL) fail_msg("no failure, expected '%s'", part);
    if (strstr(failure, part) == NULL) fail_msg("'%s' does not say '%s'", failure, part);
}

static bool see_all(uint32_t rank, void *arg)
{
    shared *s = arg;
    for (uint32_t i = 0; i < 100; i++) {
        s->seen[rank] = i;
        if (!meeting_wait(&s->meet, long_ns)) return false;
        for (uint32_t r = 0; r < s->meet.n; r++)
            if (s->seen[r] != i) return false;
        if (!meeting_wait(&s->meet, long_ns)) return false;
    }
    return true;
}

static void ranks_share_memory_and_meet(void **state)
{
    (void)state;
    shared *s = processes_shared(sizeof *s);
    for (uint32_t world = 1; world <= 8; world++) {
        meeting_init(&s->meet, world);
        assert_null(processes_run(world, long_ns, see_all, s));
    }
    assert_int_equal(s->seen[7], 99);
    processes_unshare(s, sizeof *s);
}

static bool fail_on_one(uint32_t rank, void *arg)
{
    (void)arg;
    if (rank == 1) processes_complain("dir/file.c", 7, "%d is not %d", 1, 2);
    return rank != 1;
}

static bool assert_on_one(uint32_t rank, void *arg)
{
    (void)arg;
    if (rank == 2) assert_int_equal(1, 2);
    return true;
}

static bool exit_on_one(uint32_t rank, void *arg)
{
    (void)arg;
    if (rank == 0) exit(3);
    return true;
}

static bool crash_on_one(uint32_t rank, void *arg)
{
    (void)arg;
    if (rank == 1) raise(SIGSEGV);
    return true;
}

static void a_rank_that_fails_is_named(void **state)
{
    (void)state;
    assert_says(processes_run(3, long_ns, fail_on_one, NULL), "process 1 of 3 failed: file.c:7: 1 is not 2");
    assert_says(processes_run(3, long_ns, assert_on_one, NULL), "process 2 of 3 was killed by signal 6");
    assert_says(processes_run(3, long_ns, exit_on_one, NULL), "process 0 of 3 failed: said nothing");
    assert_says(processes_run(3, long_ns, crash_on_one, NULL), "process 1 of 3 was killed by signal 11");
}

static bool hang_on_one(uint32_t rank, void *arg)
{
    (void)arg;
    while (rank == 1) pause();
    return true;
}

static bool leave_a_child(uint32_t rank, void *arg)
{
    (void)arg;
    if (rank == 1 && fork() == 0) /* which sleeps on when its parent has gone */
        for (int i = 0; i < 10; i++) sleep(1);
    return true;
}

static void a_rank_that_hangs_is_killed_and_named(void **state)
{
    (void)state;
    assert_says(processes_run(3, second_ns / 5, hang_on_one, NULL), "process 1 of 3 did not end in time");
    assert_says(processes_run(3, second_ns / 5, leave_a_child, NULL), "process 1 of 3 did not end in time");
    assert_int_equal(footprint_take().n_children, 0);
}

/* Rank 1 dies where the others wait for it. */
static bool die_before_the_meeting(uint32_t rank, void *arg)
{
    shared *s = arg;
    if (rank == 1) {
        mark_set(&s->mark, 5);
        while (true) pause();
    }
    return !meeting_wait(&s->meet, second_ns / 2) && !meeting_wait(&s->meet, long_ns);
}

static void killing_a_rank_is_expected_or_a_failure(void **state)
{
    (void)state;
    shared *s = processes_shared(sizeof *s);
    for (int expected = 0; expected < 2; expected++) {
        processes p;
        meeting_init(&s->meet, 3);
        atomic_store(&s->mark.value, 0);
        processes_start(&p, 3, die_before_the_meeting, s);
        if (expected) p.expected[1] = SIGKILL;
        assert_true(mark_wait(&s->mark, 5, long_ns));
        assert_false(mark_wait(&s->mark, 6, 1000000));
        assert_false(processes_wait_one(&p, 1, 1000000));
        processes_signal(&p, 1, SIGSTOP);
        assert_true(processes_wait_stopped(&p, 1, long_ns));
        processes_signal(&p, 1, SIGKILL);
        assert_true(processes_wait_one(&p, 1, long_ns));
        assert_int_equal(p.end[1], PROCESS_KILLED);
        processes_wait(&p, long_ns);
        if (expected) assert_null(processes_failure(&p));
        else assert_says(processes_failure(&p), "process 1 of 3 was killed by signal 9");
        processes_finish(&p);
    }
    processes_unshare(s, sizeof *s);
}

static bool succeed(uint32_t rank, void *arg)
{
    (void)rank, (void)arg;
    return true;
}

static void a_kill_that_did_not_come_is_a_failure(void **state)
{
    (void)state;
    processes p;
    processes_start(&p, 2, succeed, NULL);
    p.expected[0] = SIGKILL;
    processes_wait(&p, long_ns);
    assert_says(processes_failure(&p), "process 0 of 2 came to its end, which signal 9 should have been");
    processes_finish(&p);
}

/* ---- The side channel of the test's own ---- */

static bool gather(uint32_t rank, void *arg)
{
    enum { MOST = 40000 };
    const fsdp_side_channel *end = shared_side_end(arg, rank);
    unsigned char *mine = malloc(MOST), *all = malloc(3 * MOST);
    for (size_t bytes = 0; bytes <= MOST; bytes = bytes * 3 + 1) {
        memset(mine, (int)(bytes % 50 + rank), MOST);
        memset(all, 0xa5, 3 * MOST);
        if (end->all_gather(end->arg, mine, all, bytes, long_ns) != FSDP_OK) return false;
        for (size_t i = 0; i < 3 * bytes; i++)
            if (all[i] != bytes % 50 + i / bytes) return false;
        if (3 * bytes < 3 * MOST && all[3 * bytes] != 0xa5) return false;
    }
    if (rank == 1) end->abort(end->arg, "enough");
    bool told = end->all_gather(end->arg, mine, all, 8, long_ns) == FSDP_ERR_ABORTED;
    free(mine);
    free(all);
    return told && strcmp(end->aborted(end->arg), "enough") == 0;
}

static bool gather_without_one(uint32_t rank, void *arg)
{
    const fsdp_side_channel *end = shared_side_end(arg, rank);
    char mine = 0, all[3];
    return rank == 1 || end->all_gather(end->arg, &mine, all, 1, second_ns / 10) == FSDP_ERR_RANK_LOST;
}

static void the_own_side_channel_gathers_and_aborts(void **state)
{
    (void)state;
    shared_side *side = shared_side_create(3);
    assert_null(processes_run(3, long_ns, gather, side));
    shared_side_destroy(side);
    side = shared_side_create(3);
    assert_null(processes_run(3, long_ns, gather_without_one, side));
    shared_side_destroy(side);
}

static void jobs_do_not_share_an_address(void **state)
{
    (void)state;
    fsdp_launch a = processes_launch(PROCESSES_BY_NAME), b = processes_launch(PROCESSES_BY_NAME);
    fsdp_launch tcp = processes_launch(PROCESSES_BY_TCP);
    assert_string_not_equal(a.address, b.address);
    assert_int_not_equal(a.nonce, b.nonce);
    assert_int_equal(a.address[0], '@');
    assert_true(tcp.port > 0);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup(name, deadline)
    const struct CMUnitTest tests[] = {
        TEST(ranks_share_memory_and_meet),           TEST(a_rank_that_fails_is_named),
        TEST(a_rank_that_hangs_is_killed_and_named), TEST(killing_a_rank_is_expected_or_a_failure),
        TEST(a_kill_that_did_not_come_is_a_failure), TEST(the_own_side_channel_gathers_and_aborts),
        TEST(jobs_do_not_share_an_address),
    };
    return cmocka_run_group_tests_name("processes", tests, NULL, NULL);
}
