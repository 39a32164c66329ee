/* SPDX-License-Identifier: MIT */
/* Ranks that differ, are late, leave or give up: nobody hangs, and everybody learns who and where. */
#include "comm_suite.h"

#include <string.h>

/* The error of comms->check with its sentence left in r->sentence. */
static fsdp_status comm_error(member *r, int comm)
{
    fsdp_status status = r->comms->check(r->comm[comm]);
    if (status != FSDP_OK) strncpy(r->sentence, fsdp_last_error(), sizeof r->sentence - 1);
    return status;
}

/* What this rank has enqueued on stream fails as expected, and so does everything after it. */
static void expect_broken(member *r, int comm, int stream, fsdp_status expected)
{
    EXPECT(rank_drain(r, stream) == expected);
    EXPECT(comm_error(r, comm) == expected);
    EXPECT(r->device->check(r->dev) == expected);
    fsdp_collective c = {.kind = FSDP_OPERATION_BARRIER, .dtype = FSDP_DTYPE_FP32};
    EXPECT(enqueue(r, comm, stream, c) == expected);
    EXPECT(strcmp(fsdp_last_error(), r->sentence) == 0);
}

static void assert_same_sentence(const team *t)
{
    for (uint32_t i = 1; i < t->world; i++) assert_string_equal(t->rank[0].sentence, t->rank[i].sentence);
}

static void assert_says(const char *sentence, const char *part)
{
    if (strstr(sentence, part) == NULL) fail_msg("\"%s\" does not say \"%s\"", sentence, part);
}

/* ---- Mismatch ---- */

typedef struct mismatch {
    fsdp_collective usual[2], odd[2]; /* the last rank's */
    uint32_t n_usual, n_odd;
    const char *says_usual, *says_odd;
} mismatch;

/* clang-format off */
#define CALL(kind_, count_, dtype_, root_, label_) /* of rank_memory */ \
    {.kind = (kind_), .dtype = (dtype_), .count = (count_), .root = (root_), .label = (label_)}
#define GATHER(label_, count_, dtype_) CALL(FSDP_OPERATION_ALL_GATHER, count_, dtype_, 0, label_)
#define REDUCE(label_, count_, dtype_) CALL(FSDP_OPERATION_ALL_REDUCE, count_, dtype_, 0, label_)
#define BROADCAST(label_, root_) CALL(FSDP_OPERATION_BROADCAST, 4, FSDP_DTYPE_FP32, root_, label_)
/* clang-format on */

static const mismatch mismatches[] = {
    {{GATHER("h.0", 8, FSDP_DTYPE_FP32)},
     {REDUCE("h.0", 8, FSDP_DTYPE_FP32)},
     1,
     1,
     "#2 all-gather of h.0 (8 fp32)",
     "#2 all-reduce of h.0 (8 fp32)"},
    {{GATHER("h.0", 8, FSDP_DTYPE_FP32)},
     {GATHER("h.0", 9, FSDP_DTYPE_FP32)},
     1,
     1,
     "#2 all-gather of h.0 (8 fp32)",
     "#2 all-gather of h.0 (9 fp32)"},
    {{GATHER("h.0", 8, FSDP_DTYPE_FP32)},
     {GATHER("h.0", 8, FSDP_DTYPE_BF16)},
     1,
     1,
     "#2 all-gather of h.0 (8 fp32)",
     "#2 all-gather of h.0 (8 bf16)"},
    {{GATHER("h.0", 8, FSDP_DTYPE_FP32)},
     {GATHER("h.1", 8, FSDP_DTYPE_FP32)},
     1,
     1,
     "#2 all-gather of h.0 (8 fp32)",
     "#2 all-gather of h.1 (8 fp32)"},
    {{GATHER(NULL, 8, FSDP_DTYPE_FP32)},
     {GATHER("h.1", 8, FSDP_DTYPE_FP32)},
     1,
     1,
     "#2 all-gather (8 fp32)",
     "#2 all-gather of h.1 (8 fp32)"},
    {{BROADCAST("seed", 0)},
     {BROADCAST("seed", 1)},
     1,
     1,
     "#2 broadcast of seed (4 fp32 from rank 0)",
     "#2 broadcast of seed (4 fp32 from rank 1)"},
    {{GATHER("h.0", 8, FSDP_DTYPE_FP32), REDUCE("norm", 2, FSDP_DTYPE_FP32)},
     {GATHER("h.0", 8, FSDP_DTYPE_FP32)},
     2,
     1,
     "#2, 1 of 2: all-gather of h.0 (8 fp32)",
     "#2 all-gather of h.0 (8 fp32)"},
    {{GATHER("h.0", 8, FSDP_DTYPE_FP32), REDUCE("norm", 2, FSDP_DTYPE_FP32)},
     {GATHER("h.0", 8, FSDP_DTYPE_FP32), REDUCE("norm", 3, FSDP_DTYPE_FP32)},
     2,
     2,
     "#2, 2 of 2: all-reduce of norm (2 fp32)",
     "#2, 2 of 2: all-reduce of norm (3 fp32)"},
};

static void call_different_things(member *r)
{
    const mismatch *m = r->team->arg;
    bool odd = r->rank == r->world - 1;
    fsdp_collective first = {.kind = FSDP_OPERATION_BARRIER, .dtype = FSDP_DTYPE_FP32, .label = "first"};
    EXPECT_OK(enqueue(r, 0, 0, first));
    meet(r);
    fsdp_collective list[2];
    uint32_t n = odd ? m->n_odd : m->n_usual;
    memcpy(list, odd ? m->odd : m->usual, sizeof list);
    EXPECT_OK(rank_memory(r, list, n));
    fsdp_status status = r->comms->enqueue(r->comm[0], r->stream[1], list, n);
    EXPECT(status == FSDP_OK || status == FSDP_ERR_MISMATCH);
    if (status == FSDP_OK) EXPECT(rank_drain(r, 1) == FSDP_ERR_MISMATCH);
    meet(r);
    EXPECT(comm_error(r, 0) == FSDP_ERR_MISMATCH);
    EXPECT(enqueue(r, 0, 0, first) == FSDP_ERR_MISMATCH);
    EXPECT(rank_drain(r, 0) == (status == FSDP_OK ? FSDP_ERR_MISMATCH : FSDP_OK));
}

static void ranks_that_differ_in_any_field_all_fail_and_name_both(void **state)
{
    for (size_t i = 0; i < sizeof mismatches / sizeof *mismatches; i++) {
        for (uint32_t world = 2; world <= 3; world++) {
            team *t = new_team(state, world);
            t->arg = &mismatches[i];
            run_team(t, call_different_things);
            assert_same_sentence(t);
            assert_says(t->rank[0].sentence, mismatches[i].says_usual);
            assert_says(t->rank[0].sentence, mismatches[i].says_odd);
        }
    }
}

static const mismatch example = {
    {GATHER("h.0", 294912, FSDP_DTYPE_FP32)}, {REDUCE("norm", 17, FSDP_DTYPE_FP32)}, 1, 1, NULL, NULL};

static void the_sentence_of_a_mismatch_reads_well(void **state)
{
    team *t = new_team(state, 2);
    t->arg = &example;
    run_team(t, call_different_things);
    assert_string_equal(t->rank[1].sentence,
                        "rank 0: #2 all-gather of h.0 (294912 fp32); rank 1: #2 all-reduce of norm (17 fp32)");
}

static void same_text_elsewhere(member *r)
{
    char label[8] = "h.0";
    fsdp_collective c = {.kind = FSDP_OPERATION_BARRIER, .dtype = FSDP_DTYPE_FP32, .label = label};
    c.root = r->rank; /* a barrier has no root */
    EXPECT_OK(enqueue(r, 0, 0, c));
    EXPECT_OK(rank_drain(r, 0));
}

static void labels_are_compared_by_their_text(void **state) { run_team(new_team(state, 3), same_text_elsewhere); }

/* Communicator 1's operation stands behind the one that fails: it must neither run nor keep its peers. */
static void fail_with_more_behind(member *r)
{
    fsdp_collective c = {.kind = FSDP_OPERATION_ALL_REDUCE, .dtype = FSDP_DTYPE_FP32, .count = 1 + r->rank};
    float *x = rank_block(r, 64);
    EXPECT(x != NULL);
    c.send = c.recv = x;
    fsdp_collective behind = {.kind = FSDP_OPERATION_BARRIER, .dtype = FSDP_DTYPE_FP32};
    rank_close_gate(r, 0);
    EXPECT_OK(enqueue(r, 0, 0, c));
    EXPECT_OK(enqueue(r, 1, 0, behind));
    EXPECT_OK(r->device->event_record(r->dev, r->event[0], r->stream[0], NULL));
    EXPECT_OK(r->device->stream_wait(r->dev, r->stream[1], r->event[0], NULL));
    EXPECT_OK(enqueue(r, 1, 1, behind));
    meet(r);
    rank_open_gate(r);
    EXPECT(rank_drain(r, 1) == FSDP_ERR_MISMATCH);
    EXPECT(rank_drain(r, 0) == FSDP_ERR_MISMATCH);
}

static void what_stands_behind_a_failed_collective_is_skipped(void **state)
{
    run_team(new_team(state, 2), fail_with_more_behind);
}

/* ---- Lost ranks ---- */

static fsdp_status gather(member *r, int comm, int stream)
{
    fsdp_collective c = GATHER("h.0", 8, FSDP_DTYPE_FP32);
    fsdp_status status = rank_memory(r, &c, 1);
    return status != FSDP_OK ? status : enqueue(r, comm, stream, c);
}

static bool is_absent(const member *r) { return *(const uint64_t *)r->team->arg >> r->rank & 1; }

static void some_do_not_come(member *r)
{
    fsdp_collective barrier = {.kind = FSDP_OPERATION_BARRIER, .dtype = FSDP_DTYPE_FP32};
    meet(r); /* the others must come together within the timeout */
    if (!is_absent(r)) {
        EXPECT_OK(gather(r, 0, 0));
        expect_broken(r, 0, 0, FSDP_ERR_RANK_LOST);
    }
    meet(r);
    if (is_absent(r)) {
        EXPECT(enqueue(r, 0, 0, barrier) == FSDP_ERR_RANK_LOST);
        EXPECT(comm_error(r, 0) == FSDP_ERR_RANK_LOST);
        EXPECT_OK(r->device->check(r->dev)); /* nothing of its own has failed */
    }
}

static void a_rank_that_does_not_come_in_time_is_named_on_every_rank(void **state)
{
    static const struct {
        uint64_t absent;
        const char *says;
    } cases[] = {{1 << 2, "rank 2 of 4 did not come within 0.500 s"},
                 {1 << 1 | 1 << 3, "ranks 1, 3 of 4 did not come within 0.500 s"}};
    for (int i = 0; i < 2; i++) {
        team *t = new_team(state, 4);
        t->timeout_ns = SECOND / 2;
        t->arg = &cases[i].absent;
        run_team(t, some_do_not_come);
        assert_same_sentence(t);
        assert_says(t->rank[0].sentence, "#1 all-gather of h.0 (8 fp32)");
        assert_says(t->rank[0].sentence, cases[i].says);
    }
}

/* Rank 0 fails on communicator 0, where rank 1 does not come, and so cannot come to communicator 1. */
static void fail_elsewhere(member *r)
{
    bool enqueued_before = *(const bool *)r->team->arg;
    fsdp_collective barrier = {.kind = FSDP_OPERATION_BARRIER, .dtype = FSDP_DTYPE_FP32};
    close_comm(r, 0);
    EXPECT_OK(open_comm(r, 0, 50000000));
    if (r->rank == 1) {
        EXPECT_OK(enqueue(r, 1, 0, barrier));
        EXPECT(rank_drain(r, 0) == FSDP_ERR_RANK_LOST);
        EXPECT(comm_error(r, 1) == FSDP_ERR_RANK_LOST);
    } else {
        EXPECT_OK(gather(r, 0, 0));
        if (enqueued_before) EXPECT_OK(enqueue(r, 1, 0, barrier));
        EXPECT(rank_drain(r, 0) == FSDP_ERR_RANK_LOST);
        if (!enqueued_before) EXPECT(enqueue(r, 1, 0, barrier) == FSDP_ERR_RANK_LOST);
    }
    meet(r);
}

static void a_rank_that_has_failed_elsewhere_tells_its_peers_at_once(void **state)
{
    for (int i = 0; i < 2; i++) {
        bool enqueued_before = i == 1;
        team *t = new_team(state, 2);
        t->arg = &enqueued_before;
        run_team(t, fail_elsewhere);
        assert_string_equal(t->rank[1].sentence, "#1 barrier: rank 0 of 2 did not come: #1 all-gather of h.0 (8 fp32): "
                                                 "rank 1 of 2 did not come within 0.050 s");
    }
}

static void one_closes_early(member *r)
{
    meet(r); /* all have opened everything */
    if (r->rank == 1) {
        close_comm(r, 0);
        return;
    }
    fsdp_status status = gather(r, 0, 0);
    if (status == FSDP_OK) status = rank_drain(r, 0);
    EXPECT(status == FSDP_ERR_RANK_LOST); /* refused at once, if a peer has found out before */
    EXPECT(comm_error(r, 0) == FSDP_ERR_RANK_LOST);
}

static void a_rank_that_closes_early_is_named_and_nobody_waits(void **state)
{
    for (int i = 0; i < 20; i++) {
        team *t = new_team(state, 3);
        run_team(t, one_closes_early);
        assert_string_equal(t->rank[0].sentence, t->rank[2].sentence);
        assert_says(t->rank[0].sentence, "#1 all-gather of h.0 (8 fp32): rank 1 of 3 closed before it came");
    }
}

static void close_with_work(member *r)
{
    if (r->rank == 1) rank_close_gate(r, 0);
    EXPECT_OK(gather(r, 0, 0));
    if (r->rank == 1) {
        meet(r);
        close_comm(r, 0);
        rank_open_gate(r);
        EXPECT(rank_drain(r, 0) == FSDP_ERR_RANK_LOST);
        return;
    }
    meet(r);
    expect_broken(r, 0, 0, FSDP_ERR_RANK_LOST);
}

static void closing_with_operations_enqueued_fails_them(void **state)
{
    team *t = new_team(state, 2);
    run_team(t, close_with_work);
    assert_string_equal(t->rank[0].sentence, "rank 1 closed communicator 0 with 1 operations enqueued");
}

static void close_after_the_last(member *r)
{
    fsdp_collective barrier = {.kind = FSDP_OPERATION_BARRIER, .dtype = FSDP_DTYPE_FP32};
    for (int i = 0; i < 3; i++) EXPECT_OK(enqueue(r, 0, i % 2, barrier));
    EXPECT_OK(rank_drain(r, 0));
    EXPECT_OK(rank_drain(r, 1));
    close_comm(r, 0); /* while peers may still be on their way out of the last one */
    EXPECT_OK(r->device->check(r->dev));
}

static void closing_after_the_last_operation_hurts_nobody(void **state)
{
    for (int i = 0; i < 20; i++) run_team(new_team(state, 4), close_after_the_last);
}

/* ---- Abort ---- */

static void comm_abort_wakes_all(member *r)
{
    if (r->rank == 0) {
        meet(r);
        r->comms->abort(r->comm[0]);
        EXPECT(comm_error(r, 0) == FSDP_ERR_ABORTED);
        EXPECT(gather(r, 0, 0) == FSDP_ERR_ABORTED);
        return;
    }
    EXPECT_OK(gather(r, 0, 0));
    meet(r);
    expect_broken(r, 0, 0, FSDP_ERR_ABORTED);
}

static void an_abort_reaches_every_rank(void **state)
{
    for (int i = 0; i < 10; i++) {
        team *t = new_team(state, 3);
        run_team(t, comm_abort_wakes_all);
        assert_same_sentence(t);
        assert_string_equal(t->rank[2].sentence, "rank 0 aborted communicator 0");
    }
}

static void device_abort_wakes_all(member *r)
{
    fsdp_collective barrier = {.kind = FSDP_OPERATION_BARRIER, .dtype = FSDP_DTYPE_FP32};
    EXPECT_OK(enqueue(r, 0, 0, barrier));
    if (r->rank == 0) rank_close_gate(r, 1);
    fsdp_status status = gather(r, 1, 1); /* stays: rank 0's stands behind a gate */
    meet(r);
    if (r->rank == 0) r->device->abort(r->dev);
    EXPECT(status == FSDP_OK);
    rank_open_gate(r);
    EXPECT(rank_drain(r, 1) != FSDP_OK);
    EXPECT(r->device->check(r->dev) == FSDP_ERR_ABORTED);
    EXPECT(r->comms->check(r->comm[1]) == FSDP_ERR_ABORTED);
}

static void aborting_a_device_takes_its_communicators_along(void **state)
{
    for (int i = 0; i < 10; i++) run_team(new_team(state, 2), device_abort_wakes_all);
}

static void abort_a_slow_wire(member *r)
{
    fsdp_collective barrier = {.kind = FSDP_OPERATION_BARRIER, .dtype = FSDP_DTYPE_FP32};
    EXPECT_OK(enqueue(r, 0, 0, barrier)); /* an hour */
    EXPECT(r->device->stream_drain(r->dev, r->stream[0], 20000000) == FSDP_ERR_TIMEOUT);
    meet(r);
    if (r->rank == 1) r->comms->abort(r->comm[0]);
    expect_broken(r, 0, 0, FSDP_ERR_ABORTED);
}

static void an_abort_does_not_wait_for_the_link(void **state)
{
    team *t = new_team(state, 2);
    t->link.latency_ns = 3600ull * SECOND;
    run_team(t, abort_a_slow_wire);
}

/* A rank that learns of the abort first gives its memory back while its peers may be in the middle of reading it. */
static void free_at_once(member *r)
{
    enum { COUNT = 1 << 19 };
    char *send = rank_block(r, COUNT * 4), *recv = rank_block(r, COUNT * 4ull * r->world);
    EXPECT(send != NULL && recv != NULL);
    fsdp_collective c = {
        .kind = FSDP_OPERATION_ALL_GATHER, .dtype = FSDP_DTYPE_FP32, .count = COUNT, .send = send, .recv = recv};
    EXPECT_OK(enqueue(r, 0, 0, c));
    meet(r);
    if (r->rank == 0) {
        fsdp_device_op delay = {.kind = FSDP_OPERATION_DELAY, .u.delay = {*(const uint64_t *)r->team->arg}};
        EXPECT_OK(r->device->launch(r->dev, r->stream[1], &delay, NULL));
        EXPECT_OK(rank_drain(r, 1));
        r->comms->abort(r->comm[0]);
    }
    fsdp_status status = rank_drain(r, 0);
    free_blocks(r);
    EXPECT(status == FSDP_OK || status == FSDP_ERR_ABORTED);
}

static void memory_of_a_failed_collective_can_be_freed_at_once(void **state)
{
    for (uint64_t ns = 1000; ns < 20000000; ns += ns / 2) {
        team *t = new_team(state, 3);
        t->arg = &ns;
        run_team(t, free_at_once);
    }
}

#define TEST(name)                                   \
    {                                                \
#name, name, team_setup, team_teardown, NULL \
    }

int run_comm_error_suite(const comm_suite *suite)
{
    struct CMUnitTest tests[] = {
        TEST(ranks_that_differ_in_any_field_all_fail_and_name_both),
        TEST(the_sentence_of_a_mismatch_reads_well),
        TEST(labels_are_compared_by_their_text),
        TEST(what_stands_behind_a_failed_collective_is_skipped),
        TEST(a_rank_that_does_not_come_in_time_is_named_on_every_rank),
        TEST(a_rank_that_has_failed_elsewhere_tells_its_peers_at_once),
        TEST(a_rank_that_closes_early_is_named_and_nobody_waits),
        TEST(closing_with_operations_enqueued_fails_them),
        TEST(closing_after_the_last_operation_hurts_nobody),
        TEST(an_abort_reaches_every_rank),
        TEST(aborting_a_device_takes_its_communicators_along),
        TEST(an_abort_does_not_wait_for_the_link),
        TEST(memory_of_a_failed_collective_can_be_freed_at_once),
    };
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) tests[i].initial_state = (void *)(uintptr_t)suite;
    return cmocka_run_group_tests_name("collectives that fail", tests, NULL, NULL);
}
