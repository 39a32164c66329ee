/* SPDX-License-Identifier: MIT */
/* The allocator under every schedule that a seed can think of: the named hand-overs, random programs, four callers at once, and
 * (--long) a soak. race_rig.h says who judges. A failure prints the command that repeats it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "monotonic.h"
#include "race_rig.h"
#include "toy_assert.h"

enum { MOVES = 400, ACTOR_MOVES = 300, SOAK_MOVES = 5000, THREAD_MOVES = 8000 };

static race_options options;
static race_report report;

static void fail_if_said(void)
{
    if (report.text[0] == '\0') return;
    fprintf(stderr, "%s\n", report.text); /* CMocka would cut it off */
    fail_msg("%.400s", report.text);
}

static int start(void **unused)
{
    (void)unused;
    alarm(TOY_REDUCED ? 400 : 110);
    memset(&report, 0, sizeof report);
    return 0;
}

static int tell(void **unused)
{
    (void)unused;
    print_message("           %llu steps, %llu records, %llu waits, %llu reads, %llu moves, %llu refused\n",
                  (unsigned long long)report.total.n_steps, (unsigned long long)report.total.n_records,
                  (unsigned long long)report.total.n_waits, (unsigned long long)report.total.n_reads,
                  (unsigned long long)report.total.n_moves, (unsigned long long)report.total.n_refused);
    return 0;
}

static void run(const race_scenario *scenario, uint32_t n_seeds)
{
    race_run_all(scenario, n_seeds, &options, &report);
    fail_if_said();
}

static void each_judge_speaks_of_a_program_that_is_wrong(void **unused)
{
    (void)unused;
    for (int judge = 0; judge < RACE_JUDGES; judge++) {
        const race_scenario *scenario = &race_wrong_scenarios[judge];
        memset(&report, 0, sizeof report);
        race_run_all(scenario, 64, &options, &report);
        if (report.total.found[judge] == 0) fail_msg("judge %d has nothing to say of %s", judge, scenario->name);
    }
    start(NULL);
}

/* The schedule that a failure prints gives the same failure again. */
static void a_failure_can_be_repeated(void **unused)
{
    (void)unused;
    static char first[sizeof report.text];
    race_run_all(&race_wrong_scenarios[RACE_DATA], 64, &options, &report);
    assert_true(report.shows_data);
    snprintf(first, sizeof first, "%s", report.text);
    char *schedule = strstr(report.text, "--schedule '") + strlen("--schedule '");
    *strchr(schedule, '\'') = '\0';
    race_options again = {.program = options.program, .schedule = schedule};
    static race_report repeated;
    race_run_all(&race_wrong_scenarios[RACE_DATA], 1, &again, &repeated);
    assert_true(repeated.shows_data);
    assert_string_equal(strstr(repeated.text, "judges:"), strstr(first, "judges:")); /* and the same schedule */
    start(NULL);
}

static void named_hand_overs_under_every_policy(void **unused)
{
    (void)unused;
    for (size_t i = 0; i < n_race_scenarios; i++) run(&race_scenarios[i], TOY_REDUCED ? 16 : 200);
}

static void hand_overs_around_collectives(void **unused)
{
    (void)unused;
    for (size_t i = 0; i < n_race_rank_scenarios; i++) run(&race_rank_scenarios[i], TOY_REDUCED ? 4 : 64);
}

static void random_programs(void **unused)
{
    (void)unused;
    for (uint64_t number = 1; number <= (TOY_REDUCED ? 30 : 400); number++) {
        race_scenario scenario = race_random_program(number, MOVES);
        run(&scenario, TOY_REDUCED ? 1 : 2);
    }
    assert_true(report.total.n_refused > 0); /* budgets are small enough to be met */
}

static void four_callers_interleaved(void **unused)
{
    (void)unused;
    for (uint64_t number = 1; number <= (TOY_REDUCED ? 15 : 200); number++) {
        race_scenario scenario = race_actors_program(number, ACTOR_MOVES);
        run(&scenario, TOY_REDUCED ? 1 : 2);
    }
}

static void four_threads_at_once(void **unused)
{
    (void)unused;
    for (uint64_t number = 1; number <= (TOY_REDUCED ? 4 : 12); number++) {
        race_scenario scenario = race_actors_program(number, THREAD_MOVES);
        race_verdict v = {{0}, "", 0, 0, 0, 0, 0, 0};
        scenario.play = race_play_threads;
        scenario.no_tape = true;
        scenario.budget_bytes = 32 * KIB; /* blocks wait in the post while their owners-to-be do something else */
        race_play_on(&scenario, NULL, number, NULL, &v);
        if (race_judged(&v) > 0) fail_msg("threads, number %llu: %s\n", (unsigned long long)number, v.text);
        report.total.n_moves += v.n_moves;
        report.total.n_records += v.n_records;
        report.total.n_reads += v.n_reads;
        report.total.n_waits += v.n_waits;
        report.total.n_refused += v.n_refused;
    }
}

/* ---- By hand ---- */

static bool wanted(const char *name) { return options.scenario == NULL || strcmp(options.scenario, name) == 0; }

static int try_one(const race_scenario *scenario)
{
    memset(&report, 0, sizeof report);
    race_run_all(scenario, 200, &options, &report);
    printf("%s: %s\n", scenario->name, report.text[0] != '\0' ? report.text : "nothing found");
    return report.text[0] != '\0';
}

static int run_by_hand(void)
{
    int failed = 0, n = 0;
    for (size_t i = 0; i < n_race_scenarios; i++)
        if (wanted(race_scenarios[i].name)) failed += try_one(&race_scenarios[i]), n++;
    for (size_t i = 0; i < n_race_rank_scenarios; i++)
        if (wanted(race_rank_scenarios[i].name)) failed += try_one(&race_rank_scenarios[i]), n++;
    const race_scenario random = race_random_program(options.seed, MOVES),
                        actors = race_actors_program(options.seed, ACTOR_MOVES);
    race_scenario soak = race_random_program(options.seed, SOAK_MOVES);
    soak.name = "soak";
    const race_scenario *const drawn[] = {&random, &actors, &soak};
    options.has_seed = false; /* it was the program's */
    for (int i = 0; i < 3; i++)
        if (wanted(drawn[i]->name)) failed += try_one(drawn[i]), n++;
    if (n == 0) fprintf(stderr, "%s: there is no scenario %s\n", options.program, options.scenario);
    return failed > 0 || n == 0;
}

static double seconds(void) { return (double)fsdp__now_ns() * 1e-9; }

/* Every program under a policy of its own, and each tenth one again under another, for the tape's sake. */
static int soak(void)
{
    static const explore_policy policies[] = {EXPLORE_RANDOM, EXPLORE_PCT,          EXPLORE_RANDOM,  EXPLORE_PCT,
                                              EXPLORE_STARVE, EXPLORE_SLOW_COMPUTE, EXPLORE_IN_ORDER};
    double began = seconds();
    for (uint64_t number = options.seed; report.total.n_moves < options.n_ops && report.text[0] == '\0'; number++) {
        race_scenario scenario = race_random_program(number, SOAK_MOVES);
        race_reference reference = {{NULL}, {0}, 0, 0, {false}};
        scenario.name = "soak";
        for (uint64_t again = 0; again < (number % 10 ? 1 : 2); again++) {
            explore_config config = {.world = 1, .policy = policies[(number + again) % 7], .seed = number};
            config.depth = 2 + (uint32_t)(number / 7 % 2);
            config.steps = SOAK_MOVES * 2;
            config.target = (uint32_t)(number / 7 % (3 + scenario.n_streams));
            race_run_one(&scenario, &config, &reference, &report);
        }
        race_reference_free(&reference);
        if (number % 100 == 0) {
            fprintf(stderr, "\r%llu operations, %.0f a second ", (unsigned long long)report.total.n_moves,
                    (double)report.total.n_moves / (seconds() - began));
            fflush(stderr);
        }
    }
    double took = seconds() - began;
    fprintf(stderr, "\n");
    printf("%llu operations in %.1f s: %.0f a second\n", (unsigned long long)report.total.n_moves, took,
           (double)report.total.n_moves / took);
    tell(NULL);
    printf("%s\n", report.text[0] != '\0' ? report.text : "nothing found");
    return report.text[0] != '\0';
}

int main(int argc, char **argv)
{
    int status = race_options_read(&options, argc, argv);
    if (status != 0) return status;
    if (options.is_long) return soak();
    if (options.scenario != NULL || options.has_seed || options.schedule != NULL) return run_by_hand();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(each_judge_speaks_of_a_program_that_is_wrong, start),
        cmocka_unit_test_setup(a_failure_can_be_repeated, start),
        cmocka_unit_test_setup_teardown(named_hand_overs_under_every_policy, start, tell),
        cmocka_unit_test_setup_teardown(hand_overs_around_collectives, start, tell),
        cmocka_unit_test_setup_teardown(random_programs, start, tell),
        cmocka_unit_test_setup_teardown(four_callers_interleaved, start, tell),
        cmocka_unit_test_setup_teardown(four_threads_at_once, start, tell),
    };
    return cmocka_run_group_tests_name("alloc_race", tests, NULL, NULL);
}
