/* SPDX-License-Identifier: MIT */
/* The whole training step under every schedule that a seed can think of: trainings of every kind, random hooks off plan,
 * evictions made by hand. step_rig.h says who judges. A failure prints the command that repeats it. */
#include "step_rig.h"
#include "toy_assert.h"

#include <malloc.h>

/* Every `stride`-th case, of each `seeds` schedules. Strides have no factor in common with the matrix's digits. */
typedef struct extent {
    uint32_t stride, seeds, n_off_plan, off_plan_seeds, named_seeds;
} extent;

static step_options options;
static extent extents;
static step_total total;
static char text[1 << 16];

static extent choose_extent(void)
{
    if (options.is_long) return (extent){1, 24, 1000, 16, 400};
    if (options.quick) return (extent){23, 2, 12, 2, 8};
    if (TOY_REDUCED) return (extent){11, 2, 40, 1, 16};
    return (extent){2, 2, 100, 2, 40};
}

static int start(void **unused)
{
    (void)unused;
    toy_case[0] = '\0';
    if (!options.is_long) alarm(options.quick ? 30 : TOY_REDUCED ? 400 : 110);
    total = (step_total){0};
    return 0;
}

static int tell(void **unused)
{
    (void)unused;
    if (total.n_hooks > 0)
        print_message(
            "           %llu hooks, %llu refused (%llu: enough was free, in pieces), %llu evictions, %llu aborts\n",
            (unsigned long long)total.n_hooks, (unsigned long long)total.n_refused,
            (unsigned long long)total.n_fragmented, (unsigned long long)total.n_evicted,
            (unsigned long long)total.n_aborted);
    print_message("           %llu cases, %llu runs, %llu steps of the device, %llu records\n",
                  (unsigned long long)total.n_cases, (unsigned long long)total.n_runs,
                  (unsigned long long)total.n_steps, (unsigned long long)total.n_records);
    return 0;
}

static void try_case(const step_case *c, uint64_t first, uint32_t n)
{
    if (!step_try(c, first, n, &options, &total, text, sizeof text)) fail_msg("%s", text);
    if (options.is_long && total.n_cases % 10 == 0)
        fprintf(stderr, "\r%llu cases, %llu runs ", (unsigned long long)total.n_cases,
                (unsigned long long)total.n_runs);
}

static void a_training_is_the_same_under_every_schedule(void **unused)
{
    (void)unused;
    step_case c;
    for (uint32_t i = 0; step_training(i, &c); i += extents.stride)
        try_case(&c, options.is_long ? 1 : 1 + i * extents.seeds, extents.seeds);
}

static void a_hook_off_plan_fails_only_for_what_is_open(void **unused)
{
    (void)unused;
    step_case c;
    for (uint64_t number = 0; number < extents.n_off_plan; number++) {
        step_off_plan(number, &c);
        try_case(&c, 1 + number * extents.off_plan_seeds, extents.off_plan_seeds);
    }
    assert_true(total.n_refused > 0 && total.n_fragmented > 0 && total.n_evicted > 0 && total.n_aborted > 0);
}

static void evictions_and_unused_gathers_made_by_hand(void **unused)
{
    (void)unused;
    step_case c;
    for (uint32_t i = 0; step_named(i, &c); i++) try_case(&c, 1, extents.named_seeds);
}

/* Equal hashes of places would say nothing if they were always equal. */
static void other_programs_have_other_places(void **unused)
{
    (void)unused;
    uint64_t gather[8], grad[8];
    uint32_t n = 0;
    for (uint32_t k = 0; k < 8; k++) {
        step_case c = {.config = toy_config_default(), .steady = true};
        static const uint32_t swapped[] = {0, 2, 1, 3, 4};
        toy_shape shape;
        snprintf(c.name, sizeof c.name, "places-%u", k);
        c.config.world = 2;
        c.config.depth = k < 5 ? k : 2;
        c.config.shape.square = true;
        c.config.grad_buffers = k == 5 ? 3 : 2;
        c.config.own_program = c.config.declare = k == 6;
        c.config.shape.tied = k == 7;
        c.config.trace = true;
        toy_shape_make(&c.config.shape, &shape);
        toy_program_make(&shape, swapped, TOY_LAYERS, &c.config.program);
        try_case(&c, 1, 1);
        const step_log *log = step_last();
        gather[n] = log->gather[log->n - 1];
        grad[n++] = log->grad[log->n - 1];
    }
    for (uint32_t i = 0; i < n; i++) {
        assert_true(gather[i] != 0 && grad[i] != 0);
        for (uint32_t k = 0; k < i; k++) {
            bool same_gathers = i == 5 && k == 2; /* another number of gradient buffers moves no parameters */
            if ((gather[i] == gather[k]) != same_gathers) fail_msg("gather traces of %u and %u", k, i);
        }
    }
    for (uint32_t i = 0; i < 5; i++) assert_true(grad[i] == grad[0]); /* depth moves no gradients */
    for (uint32_t i = 5; i < n; i++) assert_true(grad[i] != grad[0]);
}

static void a_seed_and_a_schedule_repeat_a_run(void **unused)
{
    (void)unused;
    step_case c;
    for (uint64_t seed = 0; seed < (options.quick ? 2 : STEP_SEED_KINDS); seed++) {
        assert_true(step_training(TOY_REDUCED ? 1 : 230 + (uint32_t)seed, &c) && step_replays(&c, seed));
        step_off_plan(seed + 10, &c);
        assert_true(step_replays(&c, seed));
    }
}

/* ---- By hand ---- */

static bool find_case(step_case *c)
{
    unsigned long long number;
    for (uint32_t i = 0; step_named(i, c); i++)
        if (strcmp(c->name, options.name) == 0) return true;
    for (uint32_t i = 0; step_training(i, c); i++)
        if (strcmp(c->name, options.name) == 0) return true;
    if (sscanf(options.name, "off-plan-%llu", &number) != 1) return false;
    step_off_plan(number, c);
    return true;
}

static int list_cases(void)
{
    step_case c;
    for (uint32_t i = 0; step_named(i, &c); i++) printf("%s\n", c.name);
    for (uint32_t i = 0; step_training(i, &c); i++) printf("%s\n", c.name);
    printf("off-plan-N, for any N\n");
    return 0;
}

static int run_by_hand(void)
{
    step_case c;
    if (!find_case(&c)) {
        fprintf(stderr, "%s: there is no case %s: see --list\n", options.program, options.name);
        return 2;
    }
    bool one = options.has_seed,
         good = step_try(&c, one ? options.seed : 1, one ? 1 : 400, &options, &total, text, sizeof text);
    tell(NULL);
    printf("%s\n", good ? "nothing found" : text);
    return !good;
}

int main(int argc, char **argv)
{
    if (!step_options_read(&options, argc, argv)) return 2;
    extents = choose_extent();
#if !TOY_REDUCED
    mallopt(M_MMAP_THRESHOLD, 32 << 20); /* thousands of worlds come and go: keep their memory */
    mallopt(M_TRIM_THRESHOLD, 1 << 30);
    mallopt(M_ARENA_MAX, 1);
#endif
    if (options.list) return list_cases();
    if (options.name != NULL) return run_by_hand();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(evictions_and_unused_gathers_made_by_hand, start, tell),
        cmocka_unit_test_setup_teardown(a_training_is_the_same_under_every_schedule, start, tell),
        cmocka_unit_test_setup_teardown(a_hook_off_plan_fails_only_for_what_is_open, start, tell),
        cmocka_unit_test_setup_teardown(other_programs_have_other_places, start, tell),
        cmocka_unit_test_setup(a_seed_and_a_schedule_repeat_a_run, start),
    };
    return cmocka_run_group_tests_name("step_race", tests, NULL, NULL);
}
