/* SPDX-License-Identifier: MIT */
/* Passes of the caller's own, and hooks off plan: a pass that is followed has room for each of its gathers; and no hook
 * fails for memory while nothing else is open, whatever is kept or gathered ahead. */
#include "journey.h"
#include "xorshift.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { MAX_VISITS = 32 };

typedef struct own {
    journey j;
    char forward[MAX_VISITS / 2], backward[MAX_VISITS / 2];
    fsdp_visit visits[MAX_VISITS];
    uint32_t n_visits;
    int32_t pass;
} own;

static uint64_t random_state;

static uint32_t random_below(uint32_t n) { return (uint32_t)((xorshift_star(&random_state) >> 33) % n); }

/* The pass, written as words: a letter is a visit of the block of that number; first forward, then backward. */
static void add_half(own *o, const char *text, fsdp_use use)
{
    for (; *text != '\0'; text++) {
        assert_in_range(o->n_visits, 0, MAX_VISITS - 1);
        o->visits[o->n_visits] = (fsdp_visit){o->j.unit[*text - 'a'], use, (int32_t)o->n_visits};
        o->n_visits++;
    }
}

static void declare_pass(journey *j)
{
    own *o = j->arg;
    add_half(o, o->forward, FSDP_USE_FORWARD);
    add_half(o, o->backward, FSDP_USE_BACKWARD);
    OK(fsdp_model_add_pass(j->model, "own", o->n_visits, o->visits, &o->pass));
}

static void init_own(own *o, uint32_t n_units, uint32_t depth)
{
    memset(o, 0, sizeof *o);
    journey_init(&o->j, n_units);
    o->j.own_optimizer = true;
    o->j.model_config.depth = depth;
    o->j.model_config.accumulation = FSDP_ACCUMULATE_REDUCE_EACH;
    o->j.before_seal = declare_pass;
    o->j.arg = o;
}

static void random_own(own *o, uint64_t seed, bool mirrored)
{
    random_state = seed * 2654435769u + 1;
    for (int i = 0; i < 8; i++) random_below(2);
    uint32_t n_units = 2 + random_below(4), n = 2 + random_below(7);
    init_own(o, n_units, random_below(4));
    for (uint32_t i = 0; seed % 2 != 0 && i < n_units; i++) o->j.shard_elems[i] = 128 * (1 + random_below(20));
    for (uint32_t i = 0; i < n; i++) o->forward[i] = (char)('a' + random_below(n_units));
    for (uint32_t i = 0; i < n; i++)
        o->backward[i] = mirrored ? o->forward[n - 1 - i] : (char)('a' + random_below(n_units));
}

static void follow_step(own *o, uint32_t n_micro)
{
    journey *j = &o->j;
    for (uint32_t index = 0; index < n_micro; index++) {
        fsdp_pass_args args = {sizeof args, o->pass, index, n_micro, o->pass};
        OK(fsdp_pass_begin(j->model, &args, j->s));
        for (uint32_t i = 0; i < o->n_visits; i++) {
            fsdp_view view = FSDP_VIEW_INIT;
            fsdp_unit *unit = o->visits[i].unit;
            bool backward = o->visits[i].use == FSDP_USE_BACKWARD;
            fsdp_status status =
                backward ? fsdp_backward_begin(unit, j->s, &view) : fsdp_forward_begin(unit, j->s, &view);
            if (status != FSDP_OK)
                fail_msg("depth %u, pass %s %s, micro-step %u, visit %u: %s", j->model_config.depth, o->forward,
                         o->backward, index, i, fsdp_last_error());
            OK(backward ? fsdp_backward_end(unit, j->s) : fsdp_forward_end(unit, j->s));
        }
        OK(fsdp_pass_end(j->model, j->s));
    }
    OK(fsdp_update_begin(j->model, j->s));
    OK(fsdp_update_end(j->model, j->s));
}

static void assert_follows_plan(own *o)
{
    fsdp_model_stats stats = FSDP_MODEL_STATS_INIT;
    journey_open(&o->j);
    for (int step = 0; step < 3; step++) follow_step(o, 1);
    OK(fsdp_model_stats_get(o->j.model, &stats));
    if (stats.no_room + stats.off_plan_places + stats.off_plan_hooks + stats.unused_gathers > 0)
        fail_msg("depth %u, pass %s %s: %" PRIu64 " prefetches without room, %" PRIu64 " gathers off plan",
                 o->j.model_config.depth, o->forward, o->backward, stats.no_room, stats.off_plan_places);
    journey_close(&o->j);
}

static void assert_this_follows_plan(uint32_t n_units, uint32_t depth, const char *forward, const char *backward)
{
    own o;
    init_own(&o, n_units, depth);
    strcpy(o.forward, forward);
    strcpy(o.backward, backward);
    assert_follows_plan(&o);
}

/* A unit has two lives in the first half here, at two places: each life of the second half has to lie where its own mirror
 * does, not where the unit's last one did. */
static void a_mirrored_pass_that_comes_back_to_a_unit_has_room_for_its_gathers(void **state)
{
    (void)state;
    assert_this_follows_plan(3, 1, "cacabc", "cbacac");
    assert_this_follows_plan(4, 1, "ccddac", "caddcc");
}

/* Three visits of b lie between a and c on the way there, one on the way back: at depth 2 the two are gathered at a time only
 * there. */
static void a_mirror_that_is_shorter_on_the_way_back_has_room_for_its_gathers(void **state)
{
    (void)state;
    assert_this_follows_plan(4, 2, "abbbcd", "cba");
    assert_this_follows_plan(5, 3, "aabbccdde", "dcba");
}

static void passes_that_are_followed_have_room_for_their_gathers(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 2000; seed++) {
        own o;
        random_own(&o, seed, seed % 3 != 0);
        assert_follows_plan(&o);
    }
}

/* At a border of micro-steps a kept unit may lie where the plan wants another. */
static void micro_steps_of_any_pass_never_fail_for_memory(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 2000; seed++) {
        own o;
        random_own(&o, seed, seed % 3 != 0);
        journey_open(&o.j);
        follow_step(&o, 2);
        follow_step(&o, 2);
        journey_close(&o.j);
    }
}

static void hooks_in_any_order_never_fail_for_memory_while_one_unit_is_open(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 1000; seed++) {
        own o;
        fsdp_pass_args args = {sizeof args, FSDP_PASS_EVAL, 0, 1, FSDP_PASS_EVAL};
        random_own(&o, seed, true);
        journey_open(&o.j);
        OK(fsdp_pass_begin(o.j.model, &args, o.j.s));
        for (uint32_t i = 0; i < o.n_visits; i++) {
            fsdp_view view = FSDP_VIEW_INIT;
            if (fsdp_forward_begin(o.visits[i].unit, o.j.s, &view) != FSDP_OK)
                fail_msg("depth %u, hooks %s, the one of %u: %s", o.j.model_config.depth, o.forward, i,
                         fsdp_last_error());
            OK(fsdp_forward_end(o.visits[i].unit, o.j.s));
        }
        OK(fsdp_pass_end(o.j.model, o.j.s));
        journey_close(&o.j);
    }
}

int main(void)
{
    alarm(60);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_mirrored_pass_that_comes_back_to_a_unit_has_room_for_its_gathers),
        cmocka_unit_test(a_mirror_that_is_shorter_on_the_way_back_has_room_for_its_gathers),
        cmocka_unit_test(passes_that_are_followed_have_room_for_their_gathers),
        cmocka_unit_test(micro_steps_of_any_pass_never_fail_for_memory),
        cmocka_unit_test(hooks_in_any_order_never_fail_for_memory_while_one_unit_is_open),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
