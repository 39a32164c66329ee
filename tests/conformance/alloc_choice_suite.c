/* SPDX-License-Identifier: MIT */
/* Which bytes an allocation gets: the best fit that is ordered already, else the one freed longest ago, else growth, or
 * growth first; the same in every run. */
#include "alloc_suite.h"

#include <stdio.h>
#include <string.h>

enum { A, B, C, D };

/* Blocks of 8 KiB side by side, then what is left. */
static void fill_up(alloc_rig *r, char **block, int n, int stream)
{
    for (int i = 0; i < n; i++) {
        block[i] = take(r, 8 * KIB, stream);
        if (i > 0) assert_ptr_equal(block[i], block[i - 1] + 8 * KIB);
    }
}

static void give_after(alloc_rig *r, char *ptr, int stream)
{
    OK(fsdp_allocator_record_stream(r->a, ptr, r->s[stream]));
    give(r, ptr);
}

static void a_fit_that_is_ordered_comes_before_a_tighter_one_that_is_not(void **state)
{
    alloc_rig *r = *state;
    char *b[6];
    make_allocator(r, 48 * KIB, 48 * KIB);
    fill_up(r, b, 6, A);
    give_after(r, b[1], B);       /* 8 KiB that b may still use */
    give(r, b[3]), give(r, b[4]); /* 16 KiB that nobody else has */
    uint64_t waits = n_waits(r);
    assert_ptr_equal(take(r, 8 * KIB, A), b[3]);
    assert_ptr_equal(take(r, 8 * KIB, A), b[4]);
    assert_int_equal(n_waits(r), waits);
    assert_ptr_equal(take(r, 8 * KIB, A), b[1]);
    assert_int_equal(n_waits(r), waits + 1);
    for (int i = 0; i < 6; i++) give(r, b[i]);
}

static void the_smallest_of_the_ordered_fits_is_taken(void **state)
{
    alloc_rig *r = *state;
    char *b[8];
    make_allocator(r, 64 * KIB, 64 * KIB);
    fill_up(r, b, 8, A);
    give(r, b[0]), give(r, b[1]), give(r, b[2]); /* 24 KiB, freed first */
    give(r, b[4]), give(r, b[5]);                /* 16 */
    give(r, b[7]);                               /* 8 */
    assert_ptr_equal(take(r, 8 * KIB, A), b[7]);
    assert_ptr_equal(take(r, 16 * KIB, A), b[4]);
    assert_ptr_equal(take(r, 24 * KIB, A), b[0]);
    give(r, b[0]), give(r, b[3]), give(r, b[4]), give(r, b[6]), give(r, b[7]);
}

static void where_none_is_ordered_the_one_freed_longest_ago_is_taken_with_a_wait(void **state)
{
    alloc_rig *r = *state;
    static const int freed[] = {4, 0, 6, 2};
    char *b[8];
    make_allocator(r, 64 * KIB, 64 * KIB);
    fill_up(r, b, 8, A);
    for (int i = 0; i < 4; i++) {
        give_after(r, b[freed[i]], B);
        OK(fsdp_stream_delay(r->s[B], 100)); /* the next is used later */
        order(r, C, B);
    }
    for (int i = 0; i < 4; i++) {
        uint64_t waits = n_waits(r);
        assert_ptr_equal(take(r, 8 * KIB, D), b[freed[i]]);
        assert_true(n_waits(r) > waits);
    }
    for (int i = 0; i < 8; i++) give(r, b[i]);
}

static void a_larger_range_freed_earlier_comes_before_a_tighter_one_where_both_need_a_wait(void **state)
{
    alloc_rig *r = *state;
    char *b[6];
    make_allocator(r, 48 * KIB, 48 * KIB);
    fill_up(r, b, 6, A);
    give_after(r, b[2], B), give_after(r, b[3], B);
    give_after(r, b[0], B);
    char *p = take(r, 8 * KIB, C);
    assert_true(p == b[2] || p == b[3]);
    give(r, p);
    give(r, b[1]), give(r, b[4]), give(r, b[5]);
}

static void the_policy_says_whether_to_wait_or_to_grow(void **state)
{
    alloc_rig *r = *state;
    make_allocator(r, 32 * KIB, 16 * KIB);
    char *first = take(r, 16 * KIB, A);
    give(r, first);
    uint64_t waits = n_waits(r);
    char *p = take(r, 16 * KIB, B);
    if (r->suite->policy == FSDP_ALLOC_WAIT_FIRST) {
        assert_ptr_equal(p, first);
        assert_int_equal(n_waits(r), waits + 1);
        assert_int_equal(stats_of(r).grows, 1);
        give(r, p);
        return;
    }
    assert_ptr_not_equal(p, first);
    assert_int_equal(n_waits(r), waits);
    assert_int_equal(stats_of(r).grows, 2);
    char *q = take(r, 16 * KIB, C); /* the budget is used up: now it waits */
    assert_ptr_equal(q, first);
    assert_int_equal(n_waits(r), waits + 1);
    give(r, p), give(r, q);
}

/* However many fits would need a wait: what was grown for an allocation is what it gets. */
static void growth_is_used_by_who_asked_for_it(void **state)
{
    alloc_rig *r = *state;
    if (r->suite->policy != FSDP_ALLOC_GROW_FIRST) skip();
    enum { N = 50 };
    char *b[2 * N];
    make_allocator(r, 0, 2 * N * 256);
    for (int i = 0; i < 2 * N; i++) b[i] = take(r, 256, A);
    for (int i = 0; i < N; i++) give(r, b[2 * i]); /* no two are neighbours */
    uint64_t waits = n_waits(r);
    for (int i = 0; i < N; i++) {
        b[2 * i] = take(r, 256, B);
        assert_int_equal(n_waits(r), waits);
    }
    assert_int_equal(stats_of(r).grows, 2);
    for (int i = 0; i < 2 * N; i++) give(r, b[i]);
}

/* The same where what was grown is not among the fits that are looked at first. */
static void growth_is_used_where_many_tighter_fits_need_a_wait(void **state)
{
    alloc_rig *r = *state;
    if (r->suite->policy != FSDP_ALLOC_GROW_FIRST) skip();
    enum { N = 40 };
    char *b[N], *rest[N];
    make_allocator(r, 0, 4 * KIB);
    for (int i = 0; i < N; i++) b[i] = take(r, 3 * KIB, A), rest[i] = take(r, KIB, A);
    for (int i = 0; i < N; i++) give(r, b[i]);
    uint64_t waits = n_waits(r);
    b[0] = take(r, 3 * KIB, B);
    assert_int_equal(n_waits(r), waits);
    assert_int_equal(stats_of(r).grows, N + 1);
    give(r, b[0]);
    for (int i = 0; i < N; i++) give(r, rest[i]);
}

static void a_call_that_succeeds_leaves_the_last_error_alone(void **state)
{
    alloc_rig *r = *state;
    make_allocator(r, 16 * KIB, 16 * KIB);
    assert_int_equal(fsdp_allocator_free(r->a, r), FSDP_ERR_ARG);
    char said[512];
    snprintf(said, sizeof said, "%s", fsdp_last_error());
    give(r, take(r, 16 * KIB, A));
    give(r, take(r, 16 * KIB, B));
    assert_string_equal(fsdp_last_error(), said);
}

/* ---- The same calls, the same addresses ---- */

enum { REPLAY = 400 };

static uint64_t replay(const alloc_suite *suite, uint64_t jitter_seed, int64_t *offset)
{
    alloc_rig r;
    alloc_rig_open(&r, suite, 20000, jitter_seed, 10000000000ull, NULL);
    make_allocator(&r, 12 * KIB, 12 * KIB);
    fsdp_allocator *other = r.a;
    char *ballast = jitter_seed % 2 == 0 ? take(&r, 1, B) : NULL; /* so that the device's addresses are others */
    make_allocator(&r, 256 * KIB, 256 * KIB);
    char *base = take(&r, 256, A), *live[64] = {NULL};
    uint64_t random = 0x853c49e6748fea9bull;
    for (int i = 0; i < REPLAY; i++) {
        random ^= random << 13, random ^= random >> 7, random ^= random << 17;
        char **p = &live[(random >> 8) % 64];
        int s = (int)((random >> 16) % ALLOC_STREAMS);
        uint64_t bytes = (random >> 24) % 9000;
        void *got = NULL;
        if (*p != NULL) {
            if (random % 3 == 0) OK(fsdp_allocator_record_stream(r.a, *p, r.s[s]));
            give(&r, *p);
            *p = NULL;
        } else if (fsdp_allocator_alloc(r.a, bytes, r.s[s], NULL, &got) == FSDP_OK) {
            *p = got;
            touch(&r, s, got, 1, bytes);
        }
        if (random % 7 == 0) order(&r, (int)(random >> 40 & 3), (int)(random >> 44 & 3));
        offset[i] = got != NULL ? (char *)got - base : -1;
    }
    for (int i = 0; i < 64; i++) give(&r, live[i]);
    give(&r, base);
    uint64_t hash = stats_of(&r).trace_hash;
    OK(fsdp_allocator_free(other, ballast));
    OK(fsdp_allocator_destroy(other));
    alloc_rig_close(&r);
    return hash;
}

static void the_same_calls_give_the_same_addresses_however_far_the_device_is(void **state)
{
    static int64_t first[REPLAY], again[REPLAY];
    const alloc_suite *suite = ((alloc_rig *)*state)->suite;
    uint64_t hash = replay(suite, 1, first);
    for (uint64_t seed = 2; seed <= 4; seed++) {
        assert_true(replay(suite, seed, again) == hash);
        assert_memory_equal(first, again, sizeof first);
    }
}

/* ---- What changes no address, and what every address goes into ---- */

static int64_t offset_for_c(const alloc_suite *suite, bool ask)
{
    alloc_rig rig, *r = &rig;
    char *p[5];
    alloc_rig_open(r, suite, 0, 0, 10000000000ull, NULL);
    make_allocator(r, 4 * KIB, 4 * KIB);
    for (int i = 0; i < 5; i++) p[i] = take(r, i < 4 ? 256 : 3 * KIB, A);
    for (int i = 0; i < 2; i++) OK(fsdp_allocator_record_use(r->a, p[i], r->s[B]));
    give(r, p[0]);  /* freed first; a may not use it yet: it is active */
    order(r, A, B); /* no more */
    if (ask) assert_int_equal(stats_of(r).active, 4 * KIB - 256);
    give(r, p[3]), give(r, p[1]); /* p[1] has p[0]'s history, whoever asked */
    char *got = take(r, 256, C);
    int64_t offset = got - p[0];
    give(r, got), give(r, p[2]), give(r, p[4]);
    alloc_rig_close(r);
    return offset;
}

static void asking_for_numbers_changes_no_address(void **state)
{
    const alloc_suite *suite = ((alloc_rig *)*state)->suite;
    assert_int_equal(offset_for_c(suite, true), offset_for_c(suite, false));
}

/* The trace's hash after: perhaps a use by b; perhaps an order of c after b; then `bytes` for `stream`. */
static uint64_t hash_of(const alloc_suite *suite, bool used, bool ordered, uint64_t bytes, int stream)
{
    alloc_rig rig, *r = &rig;
    alloc_rig_open(r, suite, 0, 0, 10000000000ull, NULL);
    make_allocator(r, 16 * KIB, 16 * KIB);
    char *p = take(r, 16 * KIB, A);
    uint64_t hash = stats_of(r).trace_hash;
    if (used) OK(fsdp_allocator_record_stream(r->a, p, r->s[B]));
    if (ordered) order(r, C, A);
    give(r, p);
    OK(fsdp_allocator_reset_peaks(r->a));
    assert_true(stats_of(r).trace_hash == hash); /* of allocations only */
    give(r, take(r, bytes, stream));
    hash = stats_of(r).trace_hash;
    alloc_rig_close(r);
    return hash;
}

static void the_hash_is_of_bytes_streams_and_waits(void **state)
{
    const alloc_suite *suite = ((alloc_rig *)*state)->suite;
    const uint64_t hash[] = {hash_of(suite, false, false, 1000, A), hash_of(suite, false, false, 1300, A),
                             hash_of(suite, false, false, 1000, B), hash_of(suite, true, false, 1000, A),
                             hash_of(suite, true, false, 1000, C),  hash_of(suite, false, false, 1000, C)};
    for (size_t i = 0; i < sizeof hash / sizeof *hash; i++)
        for (size_t k = 0; k < i; k++) assert_true(hash[i] != hash[k]);
    assert_true(hash_of(suite, false, false, 1000, A) == hash[0]);
    assert_true(hash_of(suite, false, false, 1024, A) == hash[0]); /* as rounded */
    assert_true(hash_of(suite, false, true, 1000, C) == hash[5]);  /* a's use goes on until the free: the same wait */
}

int run_alloc_choice_suite(const alloc_suite *suite)
{
#define TEST(name) cmocka_unit_test_prestate_setup_teardown(name, alloc_rig_setup, alloc_rig_teardown, state)
    void *state = (void *)(uintptr_t)suite;
    const struct CMUnitTest tests[] = {
        TEST(a_fit_that_is_ordered_comes_before_a_tighter_one_that_is_not),
        TEST(the_smallest_of_the_ordered_fits_is_taken),
        TEST(where_none_is_ordered_the_one_freed_longest_ago_is_taken_with_a_wait),
        TEST(a_larger_range_freed_earlier_comes_before_a_tighter_one_where_both_need_a_wait),
        TEST(the_policy_says_whether_to_wait_or_to_grow),
        TEST(growth_is_used_by_who_asked_for_it),
        TEST(growth_is_used_where_many_tighter_fits_need_a_wait),
        TEST(a_call_that_succeeds_leaves_the_last_error_alone),
        TEST(the_same_calls_give_the_same_addresses_however_far_the_device_is),
        TEST(asking_for_numbers_changes_no_address),
        TEST(the_hash_is_of_bytes_streams_and_waits),
    };
    return cmocka_run_group_tests_name("choices", tests, NULL, NULL);
}
