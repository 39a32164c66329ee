/* SPDX-License-Identifier: MIT */
/* What an allocator takes from its device, where it stops, and what it says then; how free memory falls apart and comes
 * together again. */
#include "alloc_suite.h"

#include <stdio.h>
#include <string.h>

enum { A, B, C, D };

/* ---- Budgets and limits ---- */

static void beyond_the_budget_the_error_says_what_is_in_the_way(void **state)
{
    alloc_rig *r = *state;
    make_allocator(r, 64 * KIB, 16 * KIB);
    char *block[3];
    for (int i = 0; i < 3; i++) block[i] = take(r, 16 * KIB, i);
    give(r, block[1]);
    fsdp_alloc_stats before = stats_of(r);
    void *ptr = NULL;
    assert_int_equal(fsdp_allocator_alloc(r->a, 40000, r->s[A], NULL, &ptr), FSDP_ERR_NO_MEMORY);
    assert_null(ptr);
    assert_said("allocator small: no room for 40192 bytes");
    assert_said("32768 of 49152 reserved bytes are live");
    assert_said("the largest free range has 16384");
    assert_said("the budget of 65536 allows 16384 more: at most 16384 would have fitted");
    assert_said("16384 bytes  live on a"); /* the table: who holds the rest */
    assert_said("16384 bytes  live on c");
    assert_said("16384 bytes  free");
    fsdp_alloc_stats after = stats_of(r);
    assert_memory_equal(&before, &after, sizeof before);

    block[1] = take(r, 16 * KIB, B); /* nothing is lost by it */
    char *last = take(r, 16 * KIB, D);
    assert_int_equal(fsdp_allocator_alloc(r->a, 1, r->s[A], NULL, &ptr), FSDP_ERR_NO_MEMORY);
    give(r, block[2]);
    give(r, take(r, 1, C));
    give(r, block[0]), give(r, block[1]), give(r, last);
    assert_int_equal(stats_of(r).reserved, 64 * KIB);
}

static void a_budget_is_used_up_to_its_last_page(void **state)
{
    alloc_rig *r = *state;
    make_allocator(r, 20 * KIB, 16 * KIB);
    char *first = take(r, 16 * KIB, A), *second = take(r, 4 * KIB, A);
    assert_int_equal(stats_of(r).reserved, 20 * KIB);
    assert_int_equal(counters_of(r).device_bytes, 20 * KIB);
    give(r, first), give(r, second);
}

static void what_the_device_says_is_passed_on(void **state)
{
    alloc_rig *r = *state;
    if (!r->suite->bounded) skip();
    make_allocator(r, 0, 4 * KIB);
    void *block[200];
    int n = 0;
    fsdp_status status;
    while ((status = fsdp_allocator_alloc(r->a, (uint64_t)1 << 56, r->s[A], NULL, &block[n])) == FSDP_OK && n < 199)
        n++;
    assert_int_equal(status, FSDP_ERR_NO_MEMORY);
    assert_said("allocator small: no room for 72057594037927936 bytes");
    assert_said("the device says: ");
    give(r, take(r, 100, A));
    while (n > 0) give(r, block[--n]);
}

static fsdp_status try_take(alloc_rig *r, uint64_t bytes, int stream, const char *owner, char **out_ptr)
{
    void *ptr = NULL;
    fsdp_status status = fsdp_allocator_alloc(r->a, bytes, r->s[stream], owner, &ptr);
    *out_ptr = ptr;
    return status;
}

static void refuse(alloc_rig *r, uint64_t bytes, int stream)
{
    char *ptr;
    fsdp_alloc_stats before = stats_of(r);
    assert_int_equal(try_take(r, bytes, stream, NULL, &ptr), FSDP_ERR_NO_MEMORY);
    assert_null(ptr);
    fsdp_alloc_stats after = stats_of(r);
    assert_memory_equal(&before, &after, sizeof before);
}

static void a_budget_below_a_segment_is_used_all_the_same(void **state)
{
    alloc_rig *r = *state;
    make_allocator(r, 8 * KIB, 64 * KIB);
    refuse(r, 8 * KIB + 1, A);
    char *first = take(r, 1, A); /* takes all that there is: no room for a segment */
    assert_int_equal(stats_of(r).reserved, 8 * KIB);
    char *second = take(r, 4 * KIB, A);
    assert_ptr_equal(second, first + 256);
    char *third = take(r, 4 * KIB - 256, A);
    assert_ptr_equal(third, second + 4 * KIB);
    refuse(r, 1, A);
    assert_int_equal(counters_of(r).device_bytes, 8 * KIB);
    give(r, first), give(r, second), give(r, third);
}

static void a_budget_is_met_exactly_and_not_exceeded_by_a_byte(void **state)
{
    alloc_rig *r = *state;
    make_allocator(r, 32 * KIB, 8 * KIB);
    char *block[4];
    for (int i = 0; i < 4; i++) {
        refuse(r, (uint64_t)(4 - i) * 8 * KIB + 1, A); /* a page more than what is left */
        block[i] = take(r, 8 * KIB, A);
    }
    assert_int_equal(stats_of(r).reserved, 32 * KIB);
    assert_int_equal(counters_of(r).device_bytes, 32 * KIB);
    refuse(r, 1, A);
    for (int i = 0; i < 4; i++) give(r, block[i]);
    OK(fsdp_allocator_trim_host(r->a)); /* what is given back may be taken again, at once */
    block[0] = take(r, 32 * KIB, A);
    refuse(r, 1, B);
    give(r, block[0]);
}

static void a_budget_that_is_no_whole_page_is_not_rounded_up(void **state)
{
    alloc_rig *r = *state;
    make_allocator(r, 20 * KIB - 1, 4 * KIB);
    char *p = take(r, 16 * KIB, A);
    refuse(r, 1, A);
    assert_int_equal(stats_of(r).reserved, 16 * KIB);
    give(r, p);
}

static void what_the_device_refuses_can_be_had_after_a_free(void **state)
{
    alloc_rig *r = *state;
    make_allocator(r, 0, 16 * KIB);
    device_limit(24 * KIB);
    char *p = take(r, 16 * KIB, A), *q;
    refuse(r, 16 * KIB, A);
    assert_said("small device: 8192 bytes are left");
    give(r, p);
    assert_ptr_equal(take(r, 16 * KIB, A), p);
    give(r, p);
    /* Whatever the policy: where it cannot grow, it waits. */
    uint64_t waits = n_waits(r);
    assert_ptr_equal(take(r, 16 * KIB, B), p);
    assert_int_equal(n_waits(r), waits + 1);
    assert_int_equal(stats_of(r).grows, 1);
    device_limit(UINT64_MAX);
    q = take(r, 16 * KIB, A);
    assert_int_equal(stats_of(r).grows, 2);
    give(r, p), give(r, q);
}

/* ---- What the errors say ---- */

static void a_refusal_names_who_holds_the_rest(void **state)
{
    alloc_rig *r = *state;
    make_allocator(r, 64 * KIB, 64 * KIB);
    char *weights, *ids, *nobody, *gap;
    OK(try_take(r, 20 * KIB, A, "weights", &weights));
    OK(try_take(r, 12 * KIB, A, NULL, &gap));
    OK(try_take(r, 16 * KIB, B, "token ids", &ids));
    OK(try_take(r, 10 * KIB, C, NULL, &nobody));
    give(r, gap);
    refuse(r, 12 * KIB + 256, A);
    assert_said("12544"); /* what was asked for */
    assert_said("12288"); /* what would have fitted */
    assert_said("65536"); /* the budget */
    assert_said("20480 bytes  live weights on a");
    assert_said("16384 bytes  live token ids on b");
    assert_said("10240 bytes  live on c");
    give(r, take(r, 12 * KIB, A));
    give(r, weights), give(r, ids), give(r, nobody);
}

static void destroying_names_every_owner_and_changes_nothing(void **state)
{
    alloc_rig *r = *state;
    make_allocator(r, 0, 4 * KIB);
    char *weights, *ids;
    OK(try_take(r, 3 * KIB, A, "weights", &weights));
    OK(try_take(r, 8 * KIB, B, "token ids", &ids));
    fsdp_alloc_stats before = stats_of(r);
    assert_int_equal(fsdp_allocator_destroy(r->a), FSDP_ERR_STATE);
    assert_said("allocator small has 2 live blocks: free first");
    assert_said("3072 bytes  live weights on a");
    assert_said("8192 bytes  live token ids on b");
    fsdp_alloc_stats after = stats_of(r);
    assert_memory_equal(&before, &after, sizeof before);
    give(r, weights);
    assert_int_equal(fsdp_allocator_destroy(r->a), FSDP_ERR_STATE);
    assert_null(strstr(fsdp_last_error(), "weights"));
    give(r, ids);
    OK(fsdp_allocator_destroy(r->a));
    r->a = NULL;
    assert_int_equal(counters_of(r).device_bytes, 0);
}

/* More blocks than an error has room for. */
static void an_error_about_thousands_of_blocks_is_still_one_sentence(void **state)
{
    enum { N = 3200 };
    alloc_rig *r = *state;
    static char *block[N];
    make_allocator(r, 256 * N, 256 * N);
    for (int i = 0; i < N; i++)
        OK(try_take(r, 0, A, "an owner with a name that goes on for rather a long time", &block[i]));
    refuse(r, 1, A);
    assert_said("819200");
    assert_int_equal(fsdp_allocator_destroy(r->a), FSDP_ERR_STATE);
    assert_said("has 3200 live blocks");
    for (int i = 0; i < N; i++) give(r, block[i]);
}

/* ---- Blocks of no bytes; splitting and merging ---- */

static void blocks_of_no_bytes_are_distinct_and_can_be_freed(void **state)
{
    enum { N = 48 };
    alloc_rig *r = *state;
    char *block[N];
    make_allocator(r, 256 * N, 256 * N);
    for (int i = 0; i < N; i++) {
        block[i] = take(r, 0, i % ALLOC_STREAMS);
        assert_int_equal((uintptr_t)block[i] % 256, 0);
        for (int k = 0; k < i; k++) assert_ptr_not_equal(block[i], block[k]);
        assert_int_equal(stats_of(r).allocated, 256 * (i + 1));
    }
    for (int i = 0; i < N; i++) {
        give(r, block[i * 7 % N]);
        assert_int_equal(fsdp_allocator_free(r->a, block[i * 7 % N]), FSDP_ERR_ARG);
    }
    give(r, take(r, 256 * N, A));
}

static void a_block_is_cut_from_the_low_end_and_the_rest_stays(void **state)
{
    alloc_rig *r = *state;
    make_allocator(r, 64 * KIB, 64 * KIB);
    char *base = take(r, 64 * KIB, A);
    give(r, base);
    static const uint64_t sizes[] = {256, 8 * KIB, 768, 16 * KIB};
    char *block[4], *next = base;
    for (int i = 0; i < 4; i++) {
        block[i] = take(r, sizes[i], A);
        assert_ptr_equal(block[i], next);
        next += sizes[i];
    }
    uint64_t rest = (uint64_t)(base + 64 * KIB - next);
    refuse(r, rest + 1, A);
    char *last = take(r, rest, A);
    assert_ptr_equal(last, next);
    for (int i = 0; i < 4; i++) give(r, block[i]);
    give(r, last);
}

/* All orders of giving four neighbours back: at every moment the longest run of free ones, and not a byte more, is there,
 * wherever it lies, without a wait. */
static void neighbours_merge_in_whatever_order_they_are_freed(void **state)
{
    enum { N = 4 };
    alloc_rig *r = *state;
    make_allocator(r, N * 8 * KIB, N * 8 * KIB);
    for (int code = 0; code < N * N * N * N; code++) {
        int freed[N];
        unsigned seen = 0;
        for (int i = 0, c = code; i < N; i++, c /= N) seen |= 1u << (freed[i] = c % N);
        if (seen != (1u << N) - 1) continue; /* no permutation */
        char *block[N];
        for (int i = 0; i < N; i++) block[i] = take(r, 8 * KIB, A);
        uint64_t waits = n_waits(r);
        bool is_free[N] = {false};
        for (int i = 0; i < N; i++) {
            give(r, block[freed[i]]);
            is_free[freed[i]] = true;
            int longest = 0;
            for (int k = 0, run = 0; k < N; k++) {
                run = is_free[k] ? run + 1 : 0;
                if (run > longest) longest = run;
            }
            refuse(r, (uint64_t)longest * 8 * KIB + 1, A);
            give(r, take(r, (uint64_t)longest * 8 * KIB, A));
        }
        assert_int_equal(n_waits(r), waits);
    }
}

/* Segments are apart, even where the device puts them side by side. */
static void free_segments_do_not_merge_with_each_other(void **state)
{
    alloc_rig *r = *state;
    make_allocator(r, 32 * KIB, 8 * KIB);
    char *block[4];
    for (int i = 0; i < 4; i++) block[i] = take(r, 8 * KIB, A);
    for (int i = 0; i < 4; i++) give(r, block[i]);
    refuse(r, 8 * KIB + 1, A);
    OK(fsdp_allocator_trim_host(r->a));
    give(r, take(r, 32 * KIB, A));
}

int run_alloc_limit_suite(const alloc_suite *suite)
{
#define TEST(name) cmocka_unit_test_prestate_setup_teardown(name, alloc_rig_setup, alloc_rig_teardown, state)
    void *state = (void *)(uintptr_t)suite;
    const struct CMUnitTest tests[] = {
        TEST(beyond_the_budget_the_error_says_what_is_in_the_way),
        TEST(a_budget_is_used_up_to_its_last_page),
        TEST(what_the_device_says_is_passed_on),
        TEST(a_budget_below_a_segment_is_used_all_the_same),
        TEST(a_budget_is_met_exactly_and_not_exceeded_by_a_byte),
        TEST(a_budget_that_is_no_whole_page_is_not_rounded_up),
        TEST(what_the_device_refuses_can_be_had_after_a_free),
        TEST(a_refusal_names_who_holds_the_rest),
        TEST(destroying_names_every_owner_and_changes_nothing),
        TEST(an_error_about_thousands_of_blocks_is_still_one_sentence),
        TEST(blocks_of_no_bytes_are_distinct_and_can_be_freed),
        TEST(a_block_is_cut_from_the_low_end_and_the_rest_stays),
        TEST(neighbours_merge_in_whatever_order_they_are_freed),
        TEST(free_segments_do_not_merge_with_each_other),
    };
    return cmocka_run_group_tests_name("limits", tests, NULL, NULL);
}
