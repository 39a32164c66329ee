/* SPDX-License-Identifier: MIT */
/* The side channel: blobs, deadlines, aborts. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm_suite.h"

enum { MOST = 8, N_WORLDS = 5 };

static const uint32_t worlds[N_WORLDS] = {1, 2, 3, 4, MOST};

static fsdp_status gather_bytes(member *r, void *all, size_t bytes, uint64_t timeout_ns)
{
    unsigned char mine[1000];
    memset(mine, (int)(r->rank + 1), sizeof mine);
    return r->sides->all_gather(r->side, mine, all, bytes, timeout_ns);
}

static void keep_sentence(member *r) { strncpy(r->sentence, fsdp_last_error(), sizeof r->sentence - 1); }

/* Where communicators are slow to open, there are none. */
static team *new_side_team(void **state, uint32_t world)
{
    team *t = team_of_at_most(state, world);
    t->is_apart = t->suite->loose;
    return t;
}

/* The sentence but for the calls' numbers: where ranks are processes, opening communicators takes some. */
static const char *without_numbers(const char *sentence)
{
    static char text[SENTENCE_BYTES];
    size_t n = 0;
    for (const char *c = sentence; *c != '\0' && n + 2 < sizeof text;) {
        text[n++] = *c;
        if (*c++ != '#') continue;
        while (*c >= '0' && *c <= '9') c++;
    }
    text[n] = '\0';
    return text;
}

static void gather_many(member *r)
{
    unsigned char all[MOST * 1000 + 8];
    for (size_t i = 0; i < 300; i++) {
        size_t bytes = i * 7 % 1001;
        memset(all, 0xa5, sizeof all);
        EXPECT_OK(gather_bytes(r, all, bytes, 60ull * SECOND));
        for (size_t k = 0; k < bytes * r->world; k++) EXPECT(all[k] == k / bytes + 1);
        for (size_t k = bytes * r->world; k < sizeof all; k++) EXPECT(all[k] == 0xa5);
    }
    EXPECT_OK(r->sides->check(r->side));
}

static void blobs_of_all_ranks_arrive_any_number_of_times(void **state)
{
    for (int i = 0; i < N_WORLDS; i++)
        if (suite_has(state, worlds[i])) run_team(new_side_team(state, worlds[i]), gather_many);
}

static void broadcast_many(member *r)
{
    static const size_t sizes[] = {1, 8, 64, 65, 4096, 1 << 20};
    for (uint32_t i = 0; i < 6 * r->world; i++) {
        size_t bytes = sizes[i % 6];
        uint32_t root = i / 6;
        unsigned char *data = malloc(bytes);
        EXPECT(data != NULL);
        for (size_t k = 0; k < bytes; k++) data[k] = (unsigned char)(r->rank == root ? k * 7 + root : 0xa5);
        fsdp_status status = r->sides->broadcast(r->side, data, bytes, root, 60ull * SECOND);
        size_t k = 0;
        while (k < bytes && data[k] == (unsigned char)(k * 7 + root)) k++;
        free(data);
        EXPECT_OK(status);
        EXPECT(k == bytes);
    }
}

static void a_broadcast_is_the_roots(void **state)
{
    for (int i = 0; i < N_WORLDS; i++)
        if (suite_has(state, worlds[i])) run_team(new_side_team(state, worlds[i]), broadcast_many);
}

static void gather_sizes(member *r)
{
    unsigned char all[2000];
    EXPECT_OK(gather_bytes(r, all, 8, 60ull * SECOND));
    memset(all, 0xa5, sizeof all);
    EXPECT(gather_bytes(r, all, r->rank == 1 ? 16 : 24, 60ull * SECOND) == FSDP_ERR_MISMATCH);
    keep_sentence(r);
    for (size_t k = 0; k < sizeof all; k++) EXPECT(all[k] == 0xa5);
    EXPECT(gather_bytes(r, all, 8, 60ull * SECOND) == FSDP_ERR_MISMATCH);
    EXPECT(r->sides->check(r->side) == FSDP_ERR_MISMATCH);
}

static void blobs_of_different_sizes_are_a_mismatch(void **state)
{
    team *t = new_side_team(state, 2);
    run_team(t, gather_sizes);
    assert_string_equal(without_numbers(t->rank[0].sentence),
                        "rank 0: side channel # of 24 bytes; rank 1: side channel # of 16 bytes");
    assert_string_equal(t->rank[1].sentence, t->rank[0].sentence);
}

static void gather_without_odd(member *r)
{
    unsigned char all[4 * 8];
    meet(r); /* the others must come together within the timeout */
    if (r->rank % 2 == 0) {
        EXPECT(gather_bytes(r, all, 8, SECOND / 2) == FSDP_ERR_RANK_LOST);
        keep_sentence(r);
    }
    meet(r);
    EXPECT(gather_bytes(r, all, 8, SECOND / 2) == FSDP_ERR_RANK_LOST);
}

static void ranks_that_do_not_come_are_named(void **state)
{
    team *t = new_side_team(state, 4);
    const char *who = t->world == 4 ? "ranks 1, 3 of 4" : t->world == 3 ? "rank 1 of 3" : "rank 1 of 2";
    char expected[SENTENCE_BYTES];
    snprintf(expected, sizeof expected, "side channel # of 8 bytes: %s did not come within 0.500 s", who);
    run_team(t, gather_without_odd);
    for (uint32_t i = 0; i < t->world; i += 2) assert_string_equal(without_numbers(t->rank[i].sentence), expected);
}

static void abort_side(member *r)
{
    unsigned char all[3 * 8];
    if (r->rank == r->world - 1) {
        meet(r);
        (r->sides->fail)(r->side, FSDP_ERR_ABORTED, r->team->arg);
        (r->sides->fail)(r->side, FSDP_ERR_RANK_LOST, "another reason");
    } else {
        meet(r);
        EXPECT(gather_bytes(r, all, 8, 60ull * SECOND) == FSDP_ERR_ABORTED);
    }
    meet(r);
    EXPECT(r->sides->check(r->side) == FSDP_ERR_ABORTED);
    keep_sentence(r);
}

static void an_abort_reaches_every_rank_with_its_reason(void **state)
{
    for (int i = suite_times(state, 20); i-- > 0;) {
        team *t = new_side_team(state, 3);
        t->arg = i % 2 ? "a rank aborted: the loss is NaN" : "a rank aborted";
        run_team(t, abort_side);
        for (uint32_t k = 0; k < t->world; k++) assert_string_equal(t->rank[k].sentence, t->arg);
    }
}

static void close_side_early(member *r)
{
    unsigned char all[2 * 8];
    if (r->rank == 0) {
        r->sides->close(r->side);
        r->side = NULL;
        return;
    }
    EXPECT(gather_bytes(r, all, 8, 60ull * SECOND) == FSDP_ERR_RANK_LOST);
    keep_sentence(r);
}

static void a_rank_that_closes_early_is_named(void **state)
{
    for (int i = 0; i < 10; i++) {
        team *t = new_side_team(state, 2);
        run_team(t, close_side_early);
        assert_string_equal(without_numbers(t->rank[1].sentence),
                            "side channel # of 8 bytes: rank 0 of 2 closed before it came");
    }
}

#define TEST(name)                                   \
    {                                                \
#name, name, team_setup, team_teardown, NULL \
    }

int run_side_suite(const comm_suite *suite)
{
    struct CMUnitTest tests[] = {
        TEST(blobs_of_all_ranks_arrive_any_number_of_times), TEST(a_broadcast_is_the_roots),
        TEST(blobs_of_different_sizes_are_a_mismatch),       TEST(ranks_that_do_not_come_are_named),
        TEST(an_abort_reaches_every_rank_with_its_reason),
    };
    struct CMUnitTest strict[] = {TEST(a_rank_that_closes_early_is_named)}; /* while its communicators are open */
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) tests[i].initial_state = (void *)(uintptr_t)suite;
    strict[0].initial_state = (void *)(uintptr_t)suite;
    int failed = cmocka_run_group_tests_name("side channel", tests, NULL, NULL);
    if (!suite->loose) failed += cmocka_run_group_tests_name("side channel that closes", strict, NULL, NULL);
    return failed;
}
