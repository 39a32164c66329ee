/* SPDX-License-Identifier: MIT */
/* The schedule, which is pure: what is gathered ahead, what is kept, how long buffers live, where a pass mirrors itself; by
 * value on small passes. */
#include "schedule_words.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* ---- Ahead ---- */

/* What is to be gathered once the visit before position `at` is open, as letters; '!' where the budget ends it. */
static const char *ahead(plan *p, uint32_t at)
{
    static char text[MAX_VISITS + 2];
    fsdp__ahead state = {.position = at};
    const fsdp__visit *visit;
    size_t n = 0;
    p->cursor.at = at;
    while ((visit = fsdp__schedule_ahead(&p->schedule, &p->cursor, &state)) != NULL) text[n++] = p->letter[visit->unit];
    assert_int_equal(state.position, at + n);
    if (state.over_budget) text[n++] = '!';
    text[n] = '\0';
    assert_null(fsdp__schedule_ahead(&p->schedule, &p->cursor, &state)); /* and stays at its end */
    return text;
}

static void ahead_are_the_next_depth_positions(void **state)
{
    (void)state;
    plan p;
    static const char *const from_2[] = {"", "c", "cc", "ccb", "ccba"};
    for (uint32_t depth = 0; depth < sizeof from_2 / sizeof *from_2; depth++) {
        init_plan(&p, depth, "abccba", "");
        assert_string_equal(ahead(&p, 2), from_2[depth]);
    }
    init_plan(&p, 2, "abccba", "");
    assert_string_equal(ahead(&p, 0), "ab");
    assert_string_equal(ahead(&p, 5), "a");
    assert_string_equal(ahead(&p, 6), "");
}

static void held_units_are_gathered_on_the_way_and_fill_no_position(void **state)
{
    (void)state;
    plan p;
    init_plan(&p, 1, "H8ab H3ba", "");
    assert_string_equal(ahead(&p, 0), "Ha");
    assert_string_equal(ahead(&p, 2), "bH"); /* up to the next one that counts */
    init_plan(&p, 0, "HKab", "");
    assert_string_equal(ahead(&p, 0), "HK");
    assert_string_equal(ahead(&p, 2), "");
}

static void ahead_goes_on_into_the_next_pass(void **state)
{
    (void)state;
    plan p;
    init_plan(&p, 3, "abba", "Hcd");
    assert_string_equal(ahead(&p, 3), "aHcd");
    assert_string_equal(ahead(&p, 4), "Hcd");
    assert_string_equal(ahead(&p, 6), "d");
    assert_null(fsdp__schedule_visit(&p.cursor, 7));
    assert_ptr_equal(fsdp__schedule_visit(&p.cursor, 3), &p.pass[3]);
    assert_ptr_equal(fsdp__schedule_visit(&p.cursor, 4), &p.next[0]);
    init_plan(&p, 3, "abba", "");
    assert_string_equal(ahead(&p, 3), "a");
}

static void the_budget_ends_it_and_says_so(void **state)
{
    (void)state;
    plan p;
    init_plan(&p, 4, "abcde", "");
    p.schedule.budget = 300;
    assert_string_equal(ahead(&p, 1), "bcd!");
    p.schedule.budget = 400;
    assert_string_equal(ahead(&p, 1), "bcde");
    p.bytes[2] = 401; /* c is larger than the budget: nothing overtakes it */
    assert_string_equal(ahead(&p, 1), "b!");
    assert_string_equal(ahead(&p, 2), "!");
    assert_string_equal(ahead(&p, 3), "de");
    p.schedule.budget = 0;
    assert_string_equal(ahead(&p, 1), "bcde");
    init_plan(&p, 1, "aHb", "");
    p.bytes[unit_of(&p, 'H')] = 1000000; /* held bytes count for nothing */
    p.schedule.budget = 100;
    assert_string_equal(ahead(&p, 1), "Hb");
}

/* ---- Keep ---- */

/* The units that would stay gathered if their window closed at position `at`, in order of letters. */
static const char *kept(plan *p, uint32_t at)
{
    static char text[MAX_UNITS + 1];
    size_t n = 0;
    p->cursor.at = at;
    for (char c = 'a'; c <= 'z'; c++)
        if (strchr(p->letter, c) != NULL && fsdp__schedule_keeps(&p->schedule, &p->cursor, unit_of(p, c)))
            text[n++] = c;
    text[n] = '\0';
    return text;
}

static void the_last_depth_and_one_of_forward_are_kept(void **state)
{
    (void)state;
    static const char *const at_the_turn[] = {"e", "de", "cde", "bcde", "abcde", "abcde"};
    for (uint32_t depth = 0; depth < sizeof at_the_turn / sizeof *at_the_turn; depth++) {
        plan p;
        init_plan(&p, depth, "abcde edcba", "");
        assert_string_equal(kept(&p, 5), at_the_turn[depth]);
        for (uint32_t i = 0; i < 5; i++) { /* forward_end of unit i: keeps it if it will be among them */
            bool keeps = strchr(kept(&p, i + 1), "abcde"[i]) != NULL;
            assert_int_equal(keeps, strchr(at_the_turn[depth], "abcde"[i]) != NULL);
        }
    }
}

static void the_first_depth_and_one_are_kept_over_a_border_of_micro_steps(void **state)
{
    (void)state;
    plan p;
    init_plan(&p, 1, "abcde edcba", "abcde edcba");
    assert_string_equal(kept(&p, 10), "ab");
    p.cursor.at = 9; /* b has closed: a is still to come, twice */
    assert_true(fsdp__schedule_keeps(&p.schedule, &p.cursor, unit_of(&p, 'b')));
    p.cursor.at = 8;
    assert_false(fsdp__schedule_keeps(&p.schedule, &p.cursor, unit_of(&p, 'c')));
    init_plan(&p, 1, "abcde edcba", ""); /* an update follows */
    assert_string_equal(kept(&p, 10), "");
    assert_string_equal(kept(&p, 9), "a");
}

static void what_lies_between_counts_once_and_held_units_not_at_all(void **state)
{
    (void)state;
    plan p;
    init_plan(&p, 1, "abbHbbKa", "");
    assert_true(fsdp__schedule_keeps(&p.schedule, &p.cursor, unit_of(&p, 'a')));
    p.cursor.at = 1;
    assert_true(fsdp__schedule_keeps(&p.schedule, &p.cursor, unit_of(&p, 'a')));
    init_plan(&p, 1, "abcba", "");
    p.cursor.at = 1;
    assert_false(fsdp__schedule_keeps(&p.schedule, &p.cursor, unit_of(&p, 'a')));
    p.schedule.depth = 2;
    assert_true(fsdp__schedule_keeps(&p.schedule, &p.cursor, unit_of(&p, 'a')));
}

static void more_than_the_budget_is_not_kept(void **state)
{
    (void)state;
    plan p;
    init_plan(&p, 2, "abc cba", "");
    p.cursor.at = 1;
    p.schedule.budget = 300;
    assert_true(fsdp__schedule_keeps(&p.schedule, &p.cursor, unit_of(&p, 'a')));
    p.schedule.budget = 299;
    assert_false(fsdp__schedule_keeps(&p.schedule, &p.cursor, unit_of(&p, 'a')));
    p.cursor.at = 3; /* the next visit is its own: there is nothing to gather ahead */
    p.schedule.budget = 1;
    assert_true(fsdp__schedule_keeps(&p.schedule, &p.cursor, unit_of(&p, 'c')));
    assert_false(fsdp__schedule_keeps(&p.schedule, &p.cursor, unit_of(&p, 'b')));
}

/* ---- Lives ---- */

/* "a0-3 b0-2 …" */
static const char *lives_text(plan *p)
{
    static char text[MAX_VISITS * 16];
    size_t used = 0;
    make_lives(p);
    text[0] = '\0';
    for (uint32_t i = 0; i < p->lives.n; i++)
        used += (size_t)snprintf(text + used, sizeof text - used, "%s%c%u-%u", i > 0 ? " " : "",
                                 p->letter[p->life_unit[i]], p->life[i].begin, p->life[i].end);
    return text;
}

static void a_training_pass_has_these_lives(void **state)
{
    (void)state;
    plan p;
    init_plan(&p, 0, "abc cba", "");
    assert_string_equal(lives_text(&p), "a0-0 b1-1 c2-3 b4-4 a5-5");
    init_plan(&p, 1, "abc cba", "");
    assert_string_equal(lives_text(&p), "a0-0 b0-4 c1-3 a4-5");
    init_plan(&p, 1, "abc cba", "abc cba"); /* b and a stay for the next micro-step */
    assert_string_equal(lives_text(&p), "a0-0 b0-5 c1-3 a4-5");
    init_plan(&p, 2, "abc cba", "");
    assert_string_equal(lives_text(&p), "a0-5 b0-4 c0-3");
    init_plan(&p, 1, "H7abc H3cba", "");
    assert_string_equal(lives_text(&p), "a0-1 b1-6 c2-5 a6-7");
    static const int32_t life_of[] = {-1, 0, 1, 2, -1, 2, 1, 3};
    assert_memory_equal(p.visit_life, life_of, sizeof life_of);
}

static void an_eval_pass_has_these_lives(void **state)
{
    (void)state;
    plan p;
    init_plan(&p, 1, "abcd", "");
    assert_string_equal(lives_text(&p), "a0-0 b0-1 c1-2 d2-3");
    init_plan(&p, 1, "abcd", "abcd"); /* what is gathered for the next pass is in that pass's lives */
    assert_string_equal(lives_text(&p), "a0-0 b0-1 c1-2 d2-3");
}

static void nested_windows_keep_their_units(void **state)
{
    (void)state;
    plan p;
    init_plan(&p, 0, "a2bc d", ""); /* b and c run inside a's window */
    assert_string_equal(lives_text(&p), "a0-2 b1-1 c2-2 d3-3");
    init_plan(&p, 0, "a1b2cd a", ""); /* windows that overlap: a's ends with b's begin, b's with d's */
    assert_string_equal(lives_text(&p), "a0-1 b1-3 c2-2 d3-3 a4-4");
    init_plan(&p, 0, "a3bab c", ""); /* a again, inside its own window: one life to the end of the outer one */
    assert_string_equal(lives_text(&p), "a0-3 b1-1 b3-3 c4-4");
    init_plan(&p, 1, "a3bcd a", "");
    assert_string_equal(lives_text(&p), "a0-4 b0-1 c1-2 d2-3");
}

static void recomputed_and_repeated_visits_share_a_life_where_they_meet(void **state)
{
    (void)state;
    plan p;
    init_plan(&p, 1, "abc ccbbaa", ""); /* RECOMPUTE, then BACKWARD of each */
    assert_string_equal(lives_text(&p), "a0-0 b0-6 c1-4 a6-8");
    init_plan(&p, 0, "abab", "");
    assert_string_equal(lives_text(&p), "a0-0 b1-1 a2-2 b3-3");
    init_plan(&p, 1, "abab", "");
    assert_string_equal(lives_text(&p), "a0-2 b0-3");
}

/* ---- Mirror ---- */

static int32_t mirror(uint32_t depth, const char *pass)
{
    plan p;
    init_plan(&p, depth, pass, "");
    return fsdp__schedule_mirror(&p.schedule, p.cursor.pass);
}

static void forward_and_its_mirror_are_found(void **state)
{
    (void)state;
    assert_int_equal(mirror(1, "abc cba"), 3);     /* the middle unit's last visit */
    assert_int_equal(mirror(1, "H7abc H3cba"), 5); /* held ones are looked through */
    assert_int_equal(mirror(1, "aa"), 1);
    assert_int_equal(mirror(1, "a"), 0);
    assert_int_equal(mirror(1, "abc ccbbaa"), 4); /* with RECOMPUTE */
    assert_int_equal(mirror(1, "abcba"), 2);
    assert_int_equal(mirror(1, "abaab baaba"), 5); /* the middle may be one that was there before */
}

static void what_does_not_mirror_is_not_taken_for_it(void **state)
{
    (void)state;
    assert_int_equal(mirror(1, "abc"), -1);
    assert_int_equal(mirror(1, "ab"), -1);
    assert_int_equal(mirror(1, "abc cab"), -1);
    assert_int_equal(mirror(1, "abab"), -1);
    assert_int_equal(mirror(1, "a1bc cba"), -1); /* a window that nests */
    assert_int_equal(mirror(1, "HK"), -1);
    assert_int_equal(mirror(1, "abbc cba"), -1); /* a and c are closer together on the way back */
    assert_int_equal(mirror(1, "abHbc Hcba"), -1);
    assert_int_equal(mirror(1, "abc cbba"), 3);
}

/* ---- Limits ---- */

static void *failing_alloc(void *arg, size_t bytes, size_t alignment)
{
    int *n_left = arg;
    if ((*n_left)-- == 0) return NULL;
    return aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}

static void plain_free(void *arg, void *ptr, size_t bytes, size_t alignment)
{
    (void)arg, (void)bytes, (void)alignment;
    free(ptr);
}

static void without_host_memory_there_are_no_lives(void **state)
{
    (void)state;
    for (int n = 0; n < 2; n++) {
        plan p;
        int n_left = n;
        fsdp_host_allocator host = {failing_alloc, plain_free, &n_left, NULL};
        init_plan(&p, 1, "abccba", "");
        p.lives.n = 77;
        assert_int_equal(fsdp__schedule_lives(&host, &p.schedule, &p.cursor, p.n_units, &p.lives),
                         FSDP_ERR_NO_HOST_MEMORY);
        assert_int_equal(p.lives.n, 77);
    }
}

int main(void)
{
    alarm(60);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ahead_are_the_next_depth_positions),
        cmocka_unit_test(held_units_are_gathered_on_the_way_and_fill_no_position),
        cmocka_unit_test(ahead_goes_on_into_the_next_pass),
        cmocka_unit_test(the_budget_ends_it_and_says_so),
        cmocka_unit_test(the_last_depth_and_one_of_forward_are_kept),
        cmocka_unit_test(the_first_depth_and_one_are_kept_over_a_border_of_micro_steps),
        cmocka_unit_test(what_lies_between_counts_once_and_held_units_not_at_all),
        cmocka_unit_test(more_than_the_budget_is_not_kept),
        cmocka_unit_test(a_training_pass_has_these_lives),
        cmocka_unit_test(an_eval_pass_has_these_lives),
        cmocka_unit_test(nested_windows_keep_their_units),
        cmocka_unit_test(recomputed_and_repeated_visits_share_a_life_where_they_meet),
        cmocka_unit_test(forward_and_its_mirror_are_found),
        cmocka_unit_test(what_does_not_mirror_is_not_taken_for_it),
        cmocka_unit_test(without_host_memory_there_are_no_lives),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
