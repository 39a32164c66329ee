/* SPDX-License-Identifier: MIT */
/* Lives of random passes, against definitions that share nothing with the schedule but its words. */
#include "schedule_words.h"
#include "xorshift.h"

#include <inttypes.h>
#include <stdio.h>
#include <unistd.h>

/* ---- Random passes ---- */

static uint64_t random_state;

static uint32_t random_below(uint32_t n) { return (uint32_t)((xorshift_star(&random_state) >> 33) % n); }

static uint32_t random_pass(plan *p, fsdp__visit *visits, uint32_t n, bool nest)
{
    for (uint32_t i = 0; i < n; i++) {
        uint32_t reach = nest && random_below(3) == 0 ? random_below(5) : 0;
        visits[i] = (fsdp__visit){random_below(p->n_units), i + reach < n ? i + reach : n - 1};
    }
    return n;
}

/* Any units in any order; some held; a next pass that follows, or none. */
static void random_plan(plan *p, uint64_t seed, bool nest)
{
    random_state = seed * 2654435769u + 1;
    for (int i = 0; i < 8; i++) random_below(2);
    init_plan(p, random_below(6), "", "");
    p->n_units = 1 + random_below(10);
    for (uint32_t u = 0; u < p->n_units; u++) {
        p->letter[u] = (char)('a' + u);
        p->bytes[u] = 100 * (1 + random_below(5));
        p->held[u] = random_below(5) == 0;
    }
    p->cursor.pass = (fsdp__visit_list){p->pass, random_pass(p, p->pass, 1 + random_below(30), nest)};
    if (random_below(2))
        p->cursor.next = (fsdp__visit_list){p->next, random_pass(p, p->next, 1 + random_below(30), nest)};
}

/* True of every plan: a visit that is not held lies in one life of its unit, whole window and all; lives of one unit are
 * apart; they are sorted. */
static void assert_lives_cover_visits(plan *p)
{
    make_lives(p);
    for (uint32_t i = 0; i < p->cursor.pass.n; i++) {
        const fsdp__visit *visit = &p->pass[i];
        assert_int_equal(p->visit_life[i] < 0, p->held[visit->unit]);
        if (p->held[visit->unit]) continue;
        const fsdp__life *life = &p->life[p->visit_life[i]];
        assert_int_equal(p->life_unit[p->visit_life[i]], visit->unit);
        assert_true(life->begin <= i && visit->until <= life->end);
    }
    for (uint32_t k = 0; k < p->lives.n; k++) {
        assert_int_equal(p->life[k].bytes, p->bytes[p->life_unit[k]]);
        assert_int_equal(p->life[k].same_as, -1);
        assert_true(p->life[k].begin <= p->life[k].end && p->life[k].end < p->cursor.pass.n);
        assert_true(k == 0 || p->life[k - 1].begin <= p->life[k].begin);
        for (uint32_t l = 0; l < k; l++)
            assert_true(p->life_unit[l] != p->life_unit[k] || p->life[l].end < p->life[k].begin);
    }
}

static bool lives_at(const plan *p, uint32_t unit, uint32_t i)
{
    for (uint32_t k = 0; k < p->lives.n; k++)
        if (p->life_unit[k] == unit && p->life[k].begin <= i && i <= p->life[k].end) return true;
    return false;
}

static void assert_same_lives(const plan *p, uint64_t seed, uint32_t unit, uint32_t i, bool expected)
{
    if (lives_at(p, unit, i) != expected)
        fail_msg("seed %" PRIu64 ": unit %u at visit %u: %s expected", seed, unit, i,
                 expected ? "gathered" : "not gathered");
}

/* ---- … without nesting, against what the words say, each position by itself ---- */

static const fsdp__visit *visit_at(const plan *p, uint32_t i) { return fsdp__schedule_visit(&p->cursor, i); }

/* How many visits, or how many units, that are not held stand at begin … end - 1. */
static uint32_t count_between(const plan *p, uint32_t begin, uint32_t end, bool distinct)
{
    bool there[MAX_UNITS] = {false};
    uint32_t n = 0;
    for (uint32_t i = begin; i < end; i++) {
        uint32_t unit = visit_at(p, i)->unit;
        if (p->held[unit] || (distinct && there[unit])) continue;
        there[unit] = true;
        n++;
    }
    return n;
}

/* Gathered while visit i is open: open itself; or its next visit is one of the next `depth` positions; or it stayed from
 * its last visit on, since at most `depth` other units stand between that and the next. */
static bool gathered_by_definition(const plan *p, uint32_t unit, uint32_t i)
{
    uint32_t n = p->cursor.pass.n, last = i, next = i + 1;
    if (p->held[unit]) return false;
    if (p->pass[i].unit == unit) return true;
    while (visit_at(p, next) != NULL && visit_at(p, next)->unit != unit) next++;
    if (visit_at(p, next) == NULL) return false;
    if (next < n && count_between(p, i + 1, next + 1, false) <= p->schedule.depth) return true;
    while (last > 0 && p->pass[last - 1].unit != unit) last--;
    return last > 0 && count_between(p, last, next, true) <= p->schedule.depth;
}

static void lives_are_what_the_words_say(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 4000; seed++) {
        plan p;
        random_plan(&p, seed, false);
        assert_lives_cover_visits(&p);
        for (uint32_t i = 0; i < p.cursor.pass.n; i++) {
            uint32_t n_gathered = 0;
            for (uint32_t unit = 0; unit < p.n_units; unit++) {
                assert_same_lives(&p, seed, unit, i, gathered_by_definition(&p, unit, i));
                n_gathered += lives_at(&p, unit, i);
            }
            assert_in_range(n_gathered, 0, p.schedule.depth + 1); /* so depth + 1 buffers do */
        }
    }
}

/* ---- … with windows that nest, and a budget, against a walk with sets ---- */

typedef struct walker {
    const plan *p;
    bool gathered[MAX_UNITS];
    uint32_t open[MAX_UNITS]; /* windows of it */
} walker;

static bool walker_keeps(const walker *w, uint32_t now, uint32_t unit)
{
    const plan *p = w->p;
    uint32_t next = now + 1, others;
    while (visit_at(p, next) != NULL && visit_at(p, next)->unit != unit) next++;
    if (visit_at(p, next) == NULL) return false;
    others = count_between(p, now + 1, next, true);
    if (others > p->schedule.depth) return false;
    uint64_t bytes = p->bytes[unit];
    for (uint32_t u = 0; u < p->n_units; u++)
        for (uint32_t i = now + 1; i < next; i++)
            if (visit_at(p, i)->unit == u && !p->held[u]) {
                bytes += p->bytes[u];
                break;
            }
    return others == 0 || p->schedule.budget == 0 || bytes <= p->schedule.budget;
}

static void walker_ahead(walker *w, uint32_t now)
{
    const plan *p = w->p;
    uint32_t n = 0;
    uint64_t bytes = 0;
    for (uint32_t i = now + 1; i < p->cursor.pass.n; i++) {
        uint32_t unit = p->pass[i].unit;
        if (p->held[unit]) continue;
        bytes += p->bytes[unit];
        if (++n > p->schedule.depth || (p->schedule.budget > 0 && bytes > p->schedule.budget)) return;
        w->gathered[unit] = true;
    }
}

static void walker_close(walker *w, uint32_t now)
{
    const plan *p = w->p;
    for (uint32_t i = 0; i <= now; i++)
        if (p->pass[i].until == now) w->open[p->pass[i].unit]--;
    for (uint32_t i = 0; i <= now; i++) {
        uint32_t unit = p->pass[i].unit;
        if (p->pass[i].until == now && w->open[unit] == 0 && !walker_keeps(w, now, unit)) w->gathered[unit] = false;
    }
}

static void lives_with_nested_windows_and_budgets_are_a_walks(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 4000; seed++) {
        plan p;
        random_plan(&p, seed, true);
        if (random_below(2)) p.schedule.budget = 100 * (1 + random_below(12));
        assert_lives_cover_visits(&p);
        walker w = {.p = &p};
        for (uint32_t i = 0; i < p.cursor.pass.n; i++) {
            w.gathered[p.pass[i].unit] = true;
            w.open[p.pass[i].unit]++;
            walker_ahead(&w, i);
            for (uint32_t unit = 0; unit < p.n_units; unit++)
                assert_same_lives(&p, seed, unit, i, w.gathered[unit] && !p.held[unit]);
            walker_close(&w, i);
        }
    }
}

/* ---- The deepest ---- */

static void the_deepest_schedule_keeps_65_of_100_units(void **state)
{
    (void)state;
    plan p;
    init_plan(&p, 64, "", "");
    p.n_units = 100;
    for (uint32_t i = 0; i < 200; i++) p.pass[i] = (fsdp__visit){i < 100 ? i : 199 - i, i};
    for (uint32_t u = 0; u < 100; u++) p.bytes[u] = 100;
    p.cursor.pass = (fsdp__visit_list){p.pass, 200};
    p.cursor.at = 100;
    uint32_t n_kept = 0;
    for (uint32_t u = 0; u < 100; u++) n_kept += fsdp__schedule_keeps(&p.schedule, &p.cursor, u);
    assert_int_equal(n_kept, 65);
    assert_lives_cover_visits(&p);
    for (uint32_t i = 0; i < 200; i++) {
        uint32_t n_gathered = 0;
        for (uint32_t u = 0; u < 100; u++) n_gathered += lives_at(&p, u, i);
        assert_in_range(n_gathered, 1, 65);
    }
}

int main(void)
{
    alarm(60);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lives_are_what_the_words_say),
        cmocka_unit_test(lives_with_nested_windows_and_budgets_are_a_walks),
        cmocka_unit_test(the_deepest_schedule_keeps_65_of_100_units),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
