/* SPDX-License-Identifier: MIT */
/* Who watches the watchman: the bugs of lib/mutate.h, switched on one at a time, must each be found by the oracle on the
 * tapes of ordinary trainings, and none must be found without. How often wrong numbers come out is told beside it: with a
 * race that is luck, so nothing is asserted of it. */
#include "toy_assert.h"
#include "toy_programs.h"

#include "lib/mutate.h"

extern int fsdp__mutant;
int fsdp__mutant = FSDP__MUTANT_NONE;

enum { N_MUTANTS = 6, N_CASES = 4 };

static const char *const names[N_MUTANTS] = {
    [FSDP__MUTANT_NONE] = "none",
    [FSDP__MUTANT_NO_WAIT_USED] = "gather does not wait for the buffer's last user",
    [FSDP__MUTANT_NO_WAIT_REDUCED] = "gradients are zeroed while being reduced",
    [FSDP__MUTANT_NO_WAIT_UPDATED] = "gather does not wait for the optimizer",
    [FSDP__MUTANT_EARLY_USE] = "use noted an epoch too early",
    [FSDP__MUTANT_WRONG_PLACE] = "all units gathered to one place",
};

static toy_result base[N_CASES][TOY_WORLD], results[TOY_WORLD];

/* Trainings without anything special in them. */
static toy_config make_case(uint32_t number)
{
    toy_config config = toy_config_default();
    config.world = 2 + number % 2;
    config.depth = number;
    config.accumulation = number % 2 ? FSDP_ACCUMULATE_REDUCE_EACH : FSDP_ACCUMULATE_NONE;
    config.micro_steps = 1 + number % 2;
    config.shape.tied = number > 1;
    config.pace = TOY_AHEAD;
    config.steps = 5;
    config.trace = config.touch = true;
    config.jitter_ns = 100000;
    config.jitter_seed = number;
    return config;
}

typedef struct verdict {
    uint64_t sim, host; /* records that race, over all cases */
    uint32_t wrong;     /* cases with other numbers than without the mutant */
} verdict;

static verdict try_mutant(int mutant, char *first, size_t first_bytes)
{
    verdict v = {0, 0, 0};
    first[0] = '\0';
    fsdp__mutant = mutant;
    for (uint32_t number = 0; number < N_CASES; number++) {
        toy_config config = make_case(number);
        toy_result *kept = mutant == FSDP__MUTANT_NONE ? base[number] : results;
        TOY_CASE("mutant %d, case %u:", mutant, number);
        config.sim = true;
        toy_assert_run(&config, NULL, NULL, results);
        v.sim += results[0].races;
        if (first[0] == '\0') snprintf(first, first_bytes, "%s", results[0].race);
        /* What races for real is none of ThreadSanitizer's business here. */
        if (TOY_REDUCED && mutant != FSDP__MUTANT_NONE) continue;
        config.sim = false;
        if (!toy_run(&config, NULL, NULL, kept)) fail_msg("%s %s", toy_case, kept[0].error);
        v.host += kept[0].races;
        v.wrong += kept[0].hash != base[number][0].hash ||
                   memcmp(kept[0].loss, base[number][0].loss, sizeof kept[0].loss) != 0;
    }
    fsdp__mutant = FSDP__MUTANT_NONE;
    return v;
}

static void the_oracle_finds_each_planted_bug_and_nothing_else(void **unused)
{
    (void)unused;
    char first[640];
    bool caught[N_MUTANTS];
    print_message("           %-48s | racing records, sim | host | cases of %d with wrong numbers\n", "planted",
                  N_CASES);
    for (int mutant = 0; mutant < N_MUTANTS; mutant++) {
        verdict v = try_mutant(mutant, first, sizeof first);
        print_message("           %-48s | %19llu | %4llu | %u\n", names[mutant], (unsigned long long)v.sim,
                      (unsigned long long)v.host, v.wrong);
        if (first[0] != '\0') print_message("             %s\n", first);
        caught[mutant] = v.sim > 0 && (v.host > 0 || TOY_REDUCED);
        if (mutant == FSDP__MUTANT_NONE) assert_true(v.sim + v.host + v.wrong == 0);
    }
    for (int mutant = 1; mutant < N_MUTANTS; mutant++)
        if (!caught[mutant]) fail_msg("not found: %s", names[mutant]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(the_oracle_finds_each_planted_bug_and_nothing_else, toy_deadline),
    };
    return cmocka_run_group_tests_name("planted", tests, NULL, NULL);
}
