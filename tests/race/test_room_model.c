/* SPDX-License-Identifier: MIT */
/* Rooms under every schedule of few preemptions: ranks that meet, fail, differ, quit, come late and are killed.
 * room_model.h says what is judged and what cannot be seen. A failure prints the schedule.
 *
 *     test_room_model [--long] [--only WORDS]
 *
 * --long: one more preemption everywhere, about a hundred times as many schedules. --only: scenarios with these words in
 * their name. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "room_model.h"

/* AddressSanitizer knows no stacks that are left for good. */
#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define SKIPPED 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#define SKIPPED 1
#endif
#ifndef SKIPPED
#define SKIPPED 0
#endif

static bool is_long;
static const char *only;
static room_count total;
static char text[1 << 14];

static int start(void **unused)
{
    (void)unused;
    total = (room_count){0};
    if (!is_long) alarm(110);
    return 0;
}

static int tell(void **unused)
{
    (void)unused;
    print_message("           %llu schedules, %llu steps\n", (unsigned long long)total.n_schedules,
                  (unsigned long long)total.n_steps);
    return 0;
}

static void try_all(const room_scenario *scenarios, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        room_scenario scenario = scenarios[i];
        room_count count = {0};
        if (only != NULL && strstr(scenario.name, only) == NULL) continue;
        if (is_long) scenario.preemptions++;
        if (!room_model_search(&scenario, &count, text, sizeof text)) fail_msg("%s", text);
        total.n_schedules += count.n_schedules;
        total.n_steps += count.n_steps;
        if (is_long || only != NULL)
            print_message("           %-50s %10llu schedules, %12llu steps\n", scenario.name,
                          (unsigned long long)count.n_schedules, (unsigned long long)count.n_steps);
    }
}
#define TRY_ALL(scenarios) try_all(scenarios, sizeof(scenarios) / sizeof *(scenarios))

/* ---- The model itself ---- */

static void must_find(const room_scenario *scenario, const char *what)
{
    if (room_model_search(scenario, &total, text, sizeof text)) fail_msg("%s: nothing was found", scenario->name);
    if (strstr(text, what) == NULL) fail_msg("not \"%s\", but: %s", what, text);
}

/* Scenarios that ask more of a room than it promises. */
static void the_judges_speak_of_what_must_not_be(void **unused)
{
    (void)unused;
    must_find(&(room_scenario){.name = "a rank fails, and need not", .world = 2, .thread = {{0, FIRST}, {1, FAILS}}},
              "it failed");
    must_find(&(room_scenario){.name = "a rank never comes", .world = 2, .thread = {{0, FIRST}}, .may_fail = true},
              "told by a deadline alone");
    must_find(&(room_scenario){.name = "a rank comes after another that differed, and does not differ",
                               .world = 2,
                               .thread = {{0, FIRST}, {1, FIRST}},
                               .differs = SECOND,
                               .odd = 1},
              "no mismatch");
    /* Between threads a peer that reads is waited for without a deadline: a thread cannot be killed alone. */
    must_find(
        &(room_scenario){.name = "a thread is killed", .world = 2, .thread = {{0, FIRST}, {1, FIRST}}, .victim = 1},
        "a hang");
}

static void a_search_repeats_itself(void **unused)
{
    (void)unused;
    const room_scenario scenario = {.name = "again", .world = 2, .thread = {{0, BOTH}, {1, BOTH}}, .preemptions = 1};
    room_count first = {0}, second = {0};
    assert_true(room_model_search(&scenario, &first, text, sizeof text));
    assert_true(room_model_search(&scenario, &second, text, sizeof text));
    assert_true(first.n_schedules > 100);
    assert_memory_equal(&first, &second, sizeof first);
}

/* ---- Rooms ---- */

static void ranks_meet(void **unused)
{
    (void)unused;
    const room_scenario scenarios[] = {
        {.name = "two meetings, three phases",
         .world = 2,
         .thread = {{0, BOTH}, {1, BOTH}},
         .two_phases = FIRST,
         .preemptions = 2},
        {.name = "three ranks",
         .world = 3,
         .thread = {{0, BOTH}, {1, BOTH}, {2, BOTH}},
         .two_phases = SECOND,
         .preemptions = 1},
        {.name = "two streams of each rank",
         .world = 2,
         .thread = {{0, FIRST}, {0, SECOND}, {1, FIRST}, {1, SECOND}},
         .preemptions = 1},
    };
    TRY_ALL(scenarios);
}

static void all_hear_of_a_failure(void **unused)
{
    (void)unused;
    const room_scenario scenarios[] = {
        {.name = "rank 1 fails at any step",
         .world = 2,
         .thread = {{0, BOTH}, {1, BOTH}, {1, FAILS}},
         .two_phases = FIRST,
         .may_fail = true,
         .preemptions = 2},
        {.name = "both fail at any step",
         .world = 2,
         .thread = {{0, FIRST}, {1, FIRST}, {1, FAILS}, {0, FAILS}},
         .two_phases = FIRST,
         .may_fail = true,
         .preemptions = 1},
        {.name = "two streams, and one fails",
         .world = 2,
         .thread = {{0, FIRST}, {0, SECOND}, {1, BOTH}, {0, FAILS}},
         .may_fail = true,
         .preemptions = 1},
        {.name = "two threads of a rank fail",
         .world = 2,
         .thread = {{0, FIRST}, {1, FAILS}, {1, FAILS}},
         .may_fail = true,
         .preemptions = 2},
    };
    TRY_ALL(scenarios);
}

static void a_mismatch_is_found_by_all(void **unused)
{
    (void)unused;
    const room_scenario scenarios[] = {
        {.name = "a mismatch",
         .world = 2,
         .thread = {{0, BOTH}, {1, BOTH}},
         .differs = SECOND,
         .odd = 1,
         .may_fail = true,
         .preemptions = 2},
        {.name = "a mismatch of three",
         .world = 3,
         .thread = {{0, FIRST}, {1, FIRST}, {2, FIRST}},
         .differs = FIRST,
         .odd = 1,
         .may_fail = true,
         .preemptions = 2},
        {.name = "a mismatch while a rank fails",
         .world = 2,
         .thread = {{0, FIRST}, {1, FIRST}, {0, FAILS}},
         .differs = FIRST,
         .odd = 1,
         .may_fail = true,
         .preemptions = 2},
        {.name = "a mismatch, and a rank that never comes",
         .world = 3,
         .thread = {{0, FIRST}, {1, FIRST}},
         .differs = FIRST,
         .odd = 1,
         .may_fail = true,
         .preemptions = 2},
    };
    TRY_ALL(scenarios);
}

static void who_quits_is_not_waited_for(void **unused)
{
    (void)unused;
    const room_scenario scenarios[] = {
        {.name = "both quit", .world = 2, .thread = {{0, FIRST}, {1, FIRST}}, .quits = 3, .preemptions = 3},
        {.name = "rank 1 quits, rank 0 goes on",
         .world = 2,
         .thread = {{0, BOTH}, {1, FIRST}},
         .quits = 2,
         .may_fail = true,
         .preemptions = 2},
        {.name = "two of three quit",
         .world = 3,
         .thread = {{0, BOTH}, {1, FIRST}, {2, FIRST}},
         .quits = 6,
         .may_fail = true,
         .preemptions = 1},
    };
    TRY_ALL(scenarios);
}

static void a_deadline_may_pass_at_any_step(void **unused)
{
    (void)unused;
    room_scenario scenario = {.name = "deadlines of threads pass early",
                              .world = 2,
                              .thread = {{0, BOTH}, {1, BOTH}},
                              .two_phases = FIRST,
                              .early_deadlines = true,
                              .may_fail = true,
                              .preemptions = 2};
    try_all(&scenario, 1);
    scenario.name = "deadlines of processes pass early";
    scenario.processes = true;
    try_all(&scenario, 1);
}

static void a_process_may_be_killed_at_any_step(void **unused)
{
    (void)unused;
    const room_scenario scenarios[] = {
        {.name = "rank 1 is killed at any step",
         .world = 2,
         .thread = {{0, BOTH}, {1, BOTH}},
         .two_phases = FIRST,
         .victim = 1,
         .preemptions = 2},
        {.name = "one of three is killed",
         .world = 3,
         .thread = {{0, FIRST}, {1, FIRST}, {2, FIRST}},
         .two_phases = FIRST,
         .victim = 1,
         .preemptions = 1},
        {.name = "one is killed, and another fails",
         .world = 3,
         .thread = {{0, FIRST}, {1, FIRST}, {2, FIRST}, {0, FAILS}},
         .victim = 1,
         .may_fail = true,
         .preemptions = 1},
        {.name = "two streams; a rank fails and dies",
         .world = 2,
         .thread = {{0, FIRST}, {0, SECOND}, {1, FIRST}, {1, FAILS}},
         .victim = 1,
         .may_fail = true,
         .preemptions = 1},
        {.name = "one gives up, another fails and dies",
         .world = 2,
         .thread = {{0, SECOND}, {0, FAILS}, {1, FAILS}},
         .victim = 1,
         .may_fail = true,
         .preemptions = 2},
        {.name = "a mismatch, and one is killed",
         .world = 3,
         .thread = {{0, FIRST}, {1, FIRST}, {2, FIRST}},
         .differs = FIRST,
         .odd = 2,
         .victim = 1,
         .may_fail = true,
         .preemptions = 1},
    };
    room_scenario as_processes[sizeof scenarios / sizeof *scenarios];
    for (size_t i = 0; i < sizeof scenarios / sizeof *scenarios; i++) {
        as_processes[i] = scenarios[i];
        as_processes[i].processes = true;
    }
    TRY_ALL(as_processes);
}

int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--long") == 0) is_long = true;
        else if (strcmp(argv[i], "--only") == 0 && i + 1 < argc) only = argv[++i];
        else return fprintf(stderr, "%s [--long] [--only WORDS]\n", argv[0]), 2;
    }
    if (SKIPPED) return 77;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(the_judges_speak_of_what_must_not_be, start),
        cmocka_unit_test_setup(a_search_repeats_itself, start),
        cmocka_unit_test_setup_teardown(ranks_meet, start, tell),
        cmocka_unit_test_setup_teardown(all_hear_of_a_failure, start, tell),
        cmocka_unit_test_setup_teardown(a_mismatch_is_found_by_all, start, tell),
        cmocka_unit_test_setup_teardown(who_quits_is_not_waited_for, start, tell),
        cmocka_unit_test_setup_teardown(a_deadline_may_pass_at_any_step, start, tell),
        cmocka_unit_test_setup_teardown(a_process_may_be_killed_at_any_step, start, tell),
    };
    return cmocka_run_group_tests_name("room_model", tests, NULL, NULL);
}
