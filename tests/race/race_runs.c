/* SPDX-License-Identifier: MIT */
/* Which schedules a program is run under, and what is said when one of them fails. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "race_rig.h"

enum { N_LANES = 3, PCT_STEPS = 200 };

static void add(race_verdict *total, const race_verdict *v)
{
    if (total->text[0] == '\0') memcpy(total->text, v->text, sizeof v->text);
    for (int j = 0; j < RACE_JUDGES; j++) total->found[j] += v->found[j];
    total->n_records += v->n_records;
    total->n_steps += v->n_steps;
    total->n_waits += v->n_waits;
    total->n_reads += v->n_reads;
    total->n_moves += v->n_moves;
    total->n_refused += v->n_refused;
}

static void note(const race_scenario *scenario, const race_verdict *v, explore *x, race_report *report)
{
    bool has_data = v->found[RACE_DATA] > 0;
    add(&report->total, v);
    if (race_judged(v) == 0 || (report->text[0] != '\0' && (report->shows_data || !has_data))) return;
    report->shows_data = has_data;
    snprintf(report->text, sizeof report->text,
             "%s: %s\n  judges: call %llu, data %llu, order %llu, device %llu, tape %llu\n"
             "  again: --scenario %s --seed %llu --schedule '%s'",
             scenario->name, v->text, (unsigned long long)v->found[RACE_CALL], (unsigned long long)v->found[RACE_DATA],
             (unsigned long long)v->found[RACE_ORDER], (unsigned long long)v->found[RACE_DEVICE],
             (unsigned long long)v->found[RACE_TAPE], scenario->name, (unsigned long long)scenario->number,
             explore_schedule(x));
}

void race_run_one(const race_scenario *scenario, const explore_config *config, race_reference *reference,
                  race_report *report)
{
    race_verdict v = {{0}, "", 0, 0, 0, 0, 0, 0};
    explore *x = explore_open(config);
    if (x == NULL) abort();
    race_play_on(scenario, x, 0, reference, &v);
    if (reference != NULL && reference->n_steps == 0) reference->n_steps = explore_steps(x);
    note(scenario, &v, x, report);
    explore_close(x);
}

typedef struct every {
    const race_scenario *scenario;
    race_reference *reference;
    race_report *report;
} every;

static bool run_every(explore *x, void *arg)
{
    every *e = arg;
    race_verdict v = {{0}, "", 0, 0, 0, 0, 0, 0};
    race_play_on(e->scenario, x, 0, e->reference, &v);
    note(e->scenario, &v, x, e->report);
    return race_judged(&v) == 0;
}

typedef struct runs {
    every e;
    explore_config config;
} runs;

static void run_seeds(runs *u, explore_policy policy, uint32_t depth, uint32_t n_seeds)
{
    const race_scenario *scenario = u->e.scenario;
    explore_config config = u->config;
    config.policy = policy;
    config.depth = depth;
    config.steps = u->e.reference->n_steps > 0 ? u->e.reference->n_steps : PCT_STEPS;
    for (uint32_t i = 0; i < n_seeds; i++) {
        config.seed = scenario->number * 1000 + i + u->config.seed;
        race_run_one(scenario, &config, u->e.reference, u->e.report);
    }
}

static void run_policies(runs *u, uint32_t n_seeds)
{
    const race_scenario *scenario = u->e.scenario;
    uint32_t few = (n_seeds + 7) / 8, n_streams = u->config.world * (N_LANES + scenario->n_streams);
    run_seeds(u, EXPLORE_IN_ORDER, 0, 1);
    run_seeds(u, EXPLORE_RANDOM, 0, n_seeds);
    run_seeds(u, EXPLORE_PCT, 2, n_seeds);
    run_seeds(u, EXPLORE_PCT, 3, n_seeds);
    for (u->config.target = 0; u->config.target < n_streams; u->config.target++) run_seeds(u, EXPLORE_STARVE, 0, few);
    run_seeds(u, EXPLORE_SLOW_COMM, 0, few);
    run_seeds(u, EXPLORE_SLOW_COMPUTE, 0, few);
}

void race_run_all(const race_scenario *scenario, uint32_t n_seeds, const race_options *options, race_report *report)
{
    race_reference reference = {{NULL}, {0}, 0, 0, {false}};
    runs u = {{scenario, &reference, report},
              {.world = scenario->world > 1 ? scenario->world : 1, .seed = options->has_seed ? options->seed : 0}};
    if (options->schedule != NULL) {
        u.config.policy = EXPLORE_REPLAY;
        u.config.schedule = options->schedule;
        race_run_one(scenario, &u.config, NULL, report);
        return;
    }
    run_policies(&u, n_seeds);
    if (scenario->every > 0 && report->text[0] == '\0') {
        bool all = false;
        uint64_t n = explore_every(&u.config, run_every, &u.e, scenario->every, &all);
        printf("           %-36s %llu orders%s\n", scenario->name, (unsigned long long)n, all ? ", all there are" : "");
    }
    race_reference_free(&reference);
}

/* ---- The command line ---- */

static const char usage[] = "[--scenario NAME] [--seed N] [--schedule S] [--long] [--ops N]\n"
                            "  --scenario NAME  this one only\n"
                            "  --seed N         of a random program: this one; of another: more seeds, from here on\n"
                            "  --schedule S     this schedule only, as a failure printed it\n"
                            "  --long           a soak of ten million random operations\n"
                            "  --ops N          … of N\n";

int race_options_read(race_options *options, int argc, char **argv)
{
    *options = (race_options){.program = argv[0], .n_ops = 10000000};
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (strcmp(argv[i], "--long") == 0) {
            options->is_long = true;
            continue;
        }
        if (strcmp(argv[i], "--scenario") == 0) options->scenario = value;
        else if (strcmp(argv[i], "--schedule") == 0) options->schedule = value;
        else if (strcmp(argv[i], "--seed") == 0) options->has_seed = true;
        else if (strcmp(argv[i], "--ops") != 0) value = NULL;
        if (value == NULL) {
            fprintf(stderr, "%s %s", argv[0], usage);
            return 2;
        }
        if (strcmp(argv[i], "--seed") == 0) options->seed = strtoull(value, NULL, 0);
        if (strcmp(argv[i], "--ops") == 0) options->n_ops = strtoull(value, NULL, 0);
        i++;
    }
    return 0;
}
