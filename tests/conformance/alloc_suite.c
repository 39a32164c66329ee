/* SPDX-License-Identifier: MIT */
/* Sizes, trim, numbers, errors. Limits are alloc_limit_suite.c's, threads and host memory alloc_host_suite.c's, which bytes
 * come back alloc_choice_suite.c's, who waits for whom alloc_order_suite.c's. */
#include "alloc_suite.h"

enum { A, B, C, D };

/* ---- Sizes ---- */

static void blocks_are_aligned_and_apart(void **state)
{
    alloc_rig *r = *state;
    static const struct {
        uint64_t asked, given;
    } sizes[] = {{0, 256},         {1, 256},     {255, 256},         {256, 256},         {257, 512},
                 {4095, 4096},     {4096, 4096}, {4097, 4352},       {65536, 65536},     {65537, 65792},
                 {100000, 100096}, {0, 256},     {2097152, 2097152}, {2097153, 2097408}, {5000000, 5000192}};
    enum { N = sizeof sizes / sizeof *sizes };
    make_allocator(r, 0, 2 * KIB * KIB);
    uint64_t begin[N], all = 0;
    for (int i = 0; i < N; i++) {
        begin[i] = (uintptr_t)take(r, sizes[i].asked, i % ALLOC_STREAMS);
        assert_int_equal(begin[i] % 256, 0);
        all += sizes[i].given;
        assert_int_equal(stats_of(r).allocated, all);
    }
    for (int i = 0; i < N; i++)
        for (int k = 0; k < i; k++)
            assert_true(begin[i] + sizes[i].given <= begin[k] || begin[k] + sizes[k].given <= begin[i]);
    for (int i = 0; i < N; i++) give(r, (void *)(uintptr_t)begin[i]);
    assert_int_equal(stats_of(r).allocated, 0);
}

static void more_than_any_device_has_is_refused(void **state)
{
    alloc_rig *r = *state;
    make_allocator(r, 0, 4 * KIB);
    static const uint64_t sizes[] = {((uint64_t)1 << 56) + 1, (uint64_t)1 << 63, UINT64_MAX - 255, UINT64_MAX};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        void *ptr = r;
        assert_int_equal(fsdp_allocator_alloc(r->a, sizes[i], r->s[A], NULL, &ptr), FSDP_ERR_ARG);
        assert_said("allocator small: ");
        assert_said("more than any device has");
        assert_ptr_equal(ptr, r);
    }
    assert_int_equal(stats_of(r).reserved + stats_of(r).allocs + counters_of(r).device_bytes, 0);
}

static void a_segment_too_large_to_be_had_does_not_stand_in_the_way(void **state)
{
    alloc_rig *r = *state;
    make_allocator(r, 64 * KIB, UINT64_MAX);
    give(r, take(r, 1000, A));
    assert_int_equal(stats_of(r).reserved, 4 * KIB);
}

/* ---- Trim ---- */

static void trim_gives_back_segments_that_are_wholly_free(void **state)
{
    alloc_rig *r = *state;
    make_allocator(r, 64 * KIB, 16 * KIB);
    char *block[3], *part = NULL;
    for (int i = 0; i < 3; i++) block[i] = take(r, 16 * KIB, A);
    part = take(r, 4 * KIB, A); /* in a segment that is not wholly free */
    touch(r, A, block[1], 0x5a, 16 * KIB);
    OK(fsdp_allocator_record_stream(r->a, block[2], r->s[B]));
    give(r, block[0]), give(r, block[2]);
    OK(fsdp_allocator_trim_host(r->a));
    assert_int_equal(stats_of(r).reserved, 32 * KIB);
    assert_int_equal(stats_of(r).active, 20 * KIB);
    assert_int_equal(counters_of(r).device_bytes, 32 * KIB);
    OK(fsdp_allocator_trim_host(r->a));
    assert_int_equal(stats_of(r).reserved, 32 * KIB);
    assert_bytes(r->suite, block[1], 0x5a, 16 * KIB);

    block[0] = take(r, 16 * KIB, B); /* and can be had again */
    assert_int_equal(stats_of(r).grows, 5);
    give(r, block[0]), give(r, block[1]), give(r, part);
    OK(fsdp_allocator_trim_host(r->a));
    assert_int_equal(stats_of(r).reserved + counters_of(r).device_bytes, 0);
}

/* ---- Numbers ---- */

static void freed_bytes_stay_active_until_their_stream_is_ordered_after_them(void **state)
{
    alloc_rig *r = *state;
    make_allocator(r, 64 * KIB, 64 * KIB);
    char *p = take(r, 16 * KIB, A), *q = take(r, 8 * KIB, A);
    assert_int_equal(stats_of(r).active, 24 * KIB);
    give(r, q); /* a alone used it: nothing is open */
    assert_int_equal(stats_of(r).active, 16 * KIB);
    OK(fsdp_allocator_record_stream(r->a, p, r->s[B]));
    give(r, p);
    assert_int_equal(stats_of(r).allocated, 0);
    assert_int_equal(stats_of(r).active, 16 * KIB);
    order(r, C, B); /* somebody else's order changes nothing for a */
    assert_int_equal(stats_of(r).active, 16 * KIB);
    order(r, A, B);
    assert_int_equal(stats_of(r).active, 0);
}

static void active_bytes_settle_in_any_order(void **state)
{
    alloc_rig *r = *state;
    make_allocator(r, 0, 64 * KIB);
    char *p = take(r, 16 * KIB, A), *q = take(r, 8 * KIB, A);
    OK(fsdp_allocator_record_stream(r->a, p, r->s[B]));
    OK(fsdp_allocator_record_stream(r->a, q, r->s[C]));
    give(r, p), give(r, q);
    order(r, A, C); /* the one freed later comes first */
    char *large = take(r, 128 * KIB, A);
    assert_int_equal(stats_of(r).active_peak, (16 + 128) * KIB);
    assert_int_equal(stats_of(r).active, (16 + 128) * KIB);
    order(r, A, B);
    assert_int_equal(stats_of(r).active, 128 * KIB);
    give(r, large);
}

static void an_allocation_takes_over_what_was_active(void **state)
{
    alloc_rig *r = *state;
    make_allocator(r, 16 * KIB, 16 * KIB);
    char *p = take(r, 16 * KIB, A);
    OK(fsdp_allocator_record_stream(r->a, p, r->s[B]));
    give(r, p);
    p = take(r, 4 * KIB, B); /* a quarter of it */
    assert_int_equal(stats_of(r).active, 16 * KIB);
    assert_int_equal(stats_of(r).allocated, 4 * KIB);
    assert_int_equal(stats_of(r).active_peak, 16 * KIB);
    give(r, p);
}

static void peaks_stay_until_they_are_reset(void **state)
{
    alloc_rig *r = *state;
    make_allocator(r, 0, 16 * KIB);
    char *p = take(r, 16 * KIB, A), *q = take(r, 32 * KIB, A);
    give(r, q);
    OK(fsdp_allocator_trim_host(r->a));
    fsdp_alloc_stats s = stats_of(r);
    assert_int_equal(s.allocated, 16 * KIB);
    assert_int_equal(s.allocated_peak, 48 * KIB);
    assert_int_equal(s.active_peak, 48 * KIB);
    assert_int_equal(s.reserved, 16 * KIB);
    assert_int_equal(s.reserved_peak, 48 * KIB);
    OK(fsdp_allocator_reset_peaks(r->a));
    s = stats_of(r);
    assert_int_equal(s.allocated_peak, 16 * KIB);
    assert_int_equal(s.active_peak, 16 * KIB);
    assert_int_equal(s.reserved_peak, 16 * KIB);
    give(r, p);
    assert_int_equal(stats_of(r).allocated_peak, 16 * KIB);
}

static void calls_are_counted(void **state)
{
    alloc_rig *r = *state;
    make_allocator(r, 16 * KIB, 16 * KIB);
    void *ptr;
    give(r, take(r, 16 * KIB, A));
    char *p = take(r, 16 * KIB, B); /* a's last use: one wait */
    assert_int_equal(fsdp_allocator_alloc(r->a, 16 * KIB, r->s[A], NULL, &ptr), FSDP_ERR_NO_MEMORY);
    assert_int_equal(fsdp_allocator_free(r->a, &ptr), FSDP_ERR_ARG);
    OK(fsdp_allocator_free(r->a, NULL));
    OK(fsdp_allocator_record_stream(r->a, p, r->s[C])); /* the same for c */
    fsdp_alloc_stats s = stats_of(r);
    assert_int_equal(s.allocs, 2);
    assert_int_equal(s.frees, 1);
    assert_int_equal(s.waits, 2);
    assert_int_equal(s.grows, 1);
    give(r, p);
}

/* ---- Errors ---- */

static void only_a_live_block_of_the_allocator_is_accepted(void **state)
{
    alloc_rig *r = *state;
    make_allocator(r, 64 * KIB, 64 * KIB);
    fsdp_allocator *mine = r->a;
    make_allocator(r, 64 * KIB, 64 * KIB);
    fsdp_allocator *other = r->a;
    char *foreign = take(r, 100, A);
    r->a = mine;
    char *p = take(r, 8 * KIB, A), *freed = take(r, 8 * KIB, A), local = 0;
    give(r, freed);
    char *const wrong[] = {freed, p + 256, p + 1, p - 256, foreign, &local};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        fsdp_alloc_stats before = stats_of(r);
        assert_int_equal(fsdp_allocator_free(r->a, wrong[i]), FSDP_ERR_ARG);
        assert_said("fsdp_allocator_free: ");
        assert_said("is no live block of allocator small: freed already, inside a block, or not from here");
        assert_int_equal(fsdp_allocator_record_stream(r->a, wrong[i], r->s[B]), FSDP_ERR_ARG);
        assert_said("fsdp_allocator_record_stream: ");
        assert_int_equal(fsdp_allocator_record_use(r->a, wrong[i], r->s[B]), FSDP_ERR_ARG);
        assert_said("fsdp_allocator_record_use: ");
        fsdp_alloc_stats after = stats_of(r);
        assert_memory_equal(&before, &after, sizeof before);
    }
    give(r, p);
    r->a = other;
    give(r, foreign);
    OK(fsdp_allocator_destroy(other));
    r->a = mine;
}

static void an_allocator_with_live_blocks_is_not_destroyed(void **state)
{
    alloc_rig *r = *state;
    make_allocator(r, 64 * KIB, 64 * KIB);
    char *p = take(r, 8 * KIB, B);
    assert_int_equal(fsdp_allocator_destroy(r->a), FSDP_ERR_STATE);
    assert_said("allocator small has 1 live block: free first");
    assert_said("8192 bytes  live on b");
    assert_int_equal(fsdp_context_destroy(r->ctx), FSDP_ERR_STATE);
    touch(r, B, p, 1, 8 * KIB);
    give(r, p);
}

/* Longer than the context's deadline between ranks: that is no reason to pull memory from under a kernel. */
static void destroy_waits_for_the_device(void **state)
{
    alloc_rig slow;
    alloc_rig_open(&slow, ((alloc_rig *)*state)->suite, 0, 0, 1000000, NULL);
    make_allocator(&slow, 0, 64 * KIB);
    char *p = take(&slow, 64 * KIB, A);
    OK(fsdp_stream_delay(slow.s[A], 30000000));
    touch(&slow, A, p, 1, 64 * KIB);
    give(&slow, p);
    OK(fsdp_allocator_destroy(slow.a));
    slow.a = NULL;
    assert_int_equal(counters_of(&slow).device_bytes, 0);
    alloc_rig_close(&slow);
}

int run_alloc_suite(const alloc_suite *suite)
{
#define TEST(name) cmocka_unit_test_prestate_setup_teardown(name, alloc_rig_setup, alloc_rig_teardown, state)
    void *state = (void *)(uintptr_t)suite;
    const struct CMUnitTest tests[] = {
        TEST(blocks_are_aligned_and_apart),
        TEST(more_than_any_device_has_is_refused),
        TEST(a_segment_too_large_to_be_had_does_not_stand_in_the_way),
        TEST(trim_gives_back_segments_that_are_wholly_free),
        TEST(freed_bytes_stay_active_until_their_stream_is_ordered_after_them),
        TEST(active_bytes_settle_in_any_order),
        TEST(an_allocation_takes_over_what_was_active),
        TEST(peaks_stay_until_they_are_reset),
        TEST(calls_are_counted),
        TEST(only_a_live_block_of_the_allocator_is_accepted),
        TEST(an_allocator_with_live_blocks_is_not_destroyed),
        TEST(destroy_waits_for_the_device),
    };
    return cmocka_run_group_tests_name(suite->name, tests, NULL, NULL);
}
