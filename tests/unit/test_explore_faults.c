/* SPDX-License-Identifier: MIT */
/* What the exploration device says of use after free, of bytes that are nobody's, of deadlock and of lost ranks. */
#include "explore_rig.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { N_SEEDS = 60, WORLD = 3 };

static bool all_are(const char *bytes, size_t n, int byte)
{
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)bytes[i] != byte) return false;
    return true;
}

/* ---- Poison ---- */

/* A writes, B reads behind it, the host frees, C reads behind B: too late, and its host order says so. */
static void a_reader_in_time_reads_the_data_and_a_late_one_poison(void **state)
{
    (void)state;
    for (explore_policy p = EXPLORE_IN_ORDER; p <= EXPLORE_SLOW_COMPUTE; p++) {
        for (uint64_t seed = 0; seed < N_SEEDS; seed++) {
            rig r;
            char in_time[64] = {0}, late[64] = {0};
            rig_open(&r, policy_config(p, seed));
            fill(&r, A, r.block, 64, 7);
            mark(&r, 0, A);
            follow(&r, B, 0);
            copy(&r, B, in_time, r.block, 64);
            mark(&r, 1, B);
            explore_freed(r.x, 0, r.block, 64);
            follow(&r, C, 1);
            copy(&r, C, late, r.block, 64);
            drain_all(&r);
            assert_true(all_are(in_time, 64, 7));
            assert_true(all_are(late, 64, 0xa5));
            rig_close(&r);
        }
    }
}

/* The next owner gets half of it before the reader is done with all: only the other half is poisoned. */
static void poison_spares_the_next_owner_s_bytes(void **state)
{
    (void)state;
    int n_raced = 0;
    for (uint64_t seed = 0; seed < N_SEEDS; seed++) {
        rig r;
        char old[128] = {0};
        rig_open(&r, policy_config(EXPLORE_RANDOM, seed));
        memset(r.block, 7, 128);
        copy(&r, A, old, r.block, 128);
        explore_freed(r.x, 0, r.block, 128);
        fill(&r, B, r.block + 32, 64, 9);
        drain_all(&r);
        n_raced += !all_are(old, 128, 7);
        assert_true(all_are(r.block, 32, 0xa5));
        assert_true(all_are(r.block + 32, 64, 9));
        assert_true(all_are(r.block + 96, 32, 0xa5));
        rig_close(&r);
    }
    assert_true(n_raced > 0 && n_raced < N_SEEDS);
}

static void what_nobody_uses_is_poisoned_at_once(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, policy_config(EXPLORE_PCT, 1));
    memset(r.block, 7, 128);
    explore_freed(r.x, 0, r.block + 64, 64);
    assert_true(all_are(r.block, 64, 7));
    assert_true(all_are(r.block + 64, 64, 0xa5));
    rig_close(&r);
}

static void new_memory_is_poison_and_aligned(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, policy_config(EXPLORE_IN_ORDER, 0));
    assert_true(all_are(r.block, BLOCK, 0xa5));
    void *pinned = NULL;
    DO(r.ops->mem_alloc(r.dev, BLOCK, FSDP_MEMORY_KIND_PINNED, &pinned));
    assert_true(all_are(pinned, BLOCK, 0xa5));
    fill(&r, A, pinned, BLOCK, 1);
    drain(&r, A);
    r.ops->mem_free(r.dev, pinned, BLOCK, FSDP_MEMORY_KIND_PINNED);
    rig_close(&r);
}

/* ---- Bytes that are nobody's ---- */

static void expect_complaint(rig *r, const char *says)
{
    drain_all(r);
    rig_close_on(r);
    const char *complaint = explore_complaint(r->x);
    assert_non_null(complaint);
    if (strstr(complaint, says) == NULL) fail_msg("\"%s\" does not say \"%s\"", complaint, says);
    explore_close(r->x);
}

static char host_bytes[64];

static void operations_on_bytes_that_are_not_allocated_are_named(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, policy_config(EXPLORE_RANDOM, 1));
    fill(&r, B, r.block + BLOCK - 32, 33, 1);
    expect_complaint(&r, "stream 1 (rank 0, test), entry 0: fill writes 33 bytes");

    rig_open(&r, policy_config(EXPLORE_RANDOM, 1));
    memset(host_bytes, 3, sizeof host_bytes);
    fill(&r, A, host_bytes, 8, 1);
    expect_complaint(&r, "were never the device's");
    assert_true(all_are(host_bytes, 64, 3));

    rig_open(&r, policy_config(EXPLORE_RANDOM, 1));
    char *gone = r.block;
    r.ops->mem_free(r.dev, r.block, BLOCK, FSDP_MEMORY_KIND_DEVICE);
    r.block = NULL;
    copy(&r, A, host_bytes, gone, 8);
    expect_complaint(&r, "given back to the device");
    assert_true(all_are(host_bytes, 64, 3));

    rig_open(&r, policy_config(EXPLORE_RANDOM, 1));
    explore_freed(r.x, 0, r.block + BLOCK, 8);
    expect_complaint(&r, "explore_freed");
}

static void the_caller_s_memory_may_be_copied_or_lent_to_all(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, policy_config(EXPLORE_RANDOM, 1));
    memset(host_bytes, 3, sizeof host_bytes);
    copy(&r, A, r.block, host_bytes, 64);
    copy(&r, A, host_bytes, r.block, 64);
    rig_close(&r);
    explore_config config = policy_config(EXPLORE_RANDOM, 1);
    config.host_memory = true;
    rig_open(&r, config);
    fill(&r, A, host_bytes, 64, 4);
    rig_close(&r);
    assert_true(all_are(host_bytes, 64, 4));
}

static void memory_given_back_under_an_operation_is_a_complaint(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, (explore_config){.policy = EXPLORE_REPLAY, .schedule = "r1"}); /* A's first step, then the host */
    fill(&r, A, r.block, 64, 1);
    assert_int_equal(explore_steps(r.x), 1);
    r.ops->mem_free(r.dev, r.block, BLOCK, FSDP_MEMORY_KIND_DEVICE);
    r.block = NULL;
    expect_complaint(&r, "back to the device while entry 0 of stream 0 (test) uses it");

    rig_open(&r, policy_config(EXPLORE_IN_ORDER, 1));
    r.ops->mem_free(r.dev, r.block + 256, 256, FSDP_MEMORY_KIND_DEVICE);
    expect_complaint(&r, "no allocation of its");
}

/* A table that a race has spoiled must not make the kernel run wild. */
static void a_table_of_segments_that_makes_no_sense_is_a_complaint(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, policy_config(EXPLORE_RANDOM, 1));
    fsdp_device_op op = {.kind = FSDP_OPERATION_SQUARE_SUM};
    op.u.square_sum.out = (float *)(void *)r.block;
    op.u.square_sum.x = r.block + 64;
    op.u.square_sum.count = 16;
    op.u.square_sum.segments = (const fsdp_kernel_segment *)(const void *)(r.block + 256); /* 0xa5 everywhere */
    op.u.square_sum.n_segments = 2;
    op.u.square_sum.dtype = FSDP_DTYPE_FP32;
    give(&r, A, op, NULL);
    expect_complaint(&r, "makes no sense");
}

/* ---- Ranks. No assertion on their threads: they leave behind what they saw ---- */

typedef struct ranks {
    explore *x;
    fsdp_status status[WORLD], side_status[WORLD];
    char sentence[WORLD][512];
    int order[64]; /* who did what when, as the hosts see it */
    int n;
    float sum[WORLD];
} ranks;

typedef struct member {
    explore_rank config;
    void *dev, *comm[2], *side, *stream, *event;
    float *data;
    uint32_t rank, world;
} member;

static const fsdp_device_ops *device(void) { return explore_backend()->device; }

static bool member_open(member *m, ranks *t, uint32_t rank)
{
    *m = (member){.config = {sizeof m->config, t->x, rank}};
    fsdp_device_args args = {.size = sizeof args, .backend_config = &m->config, .timeout_ns = 1};
    fsdp_device_caps caps = {.size = sizeof caps};
    void *ptr = NULL;
    if (device()->open(&args, &m->dev, &caps) != FSDP_OK) return false;
    fsdp_comm_args comm = {.size = sizeof comm, .backend_config = &m->config, .dev = m->dev, .timeout_ns = 1000000000};
    fsdp_side_args side = {.size = sizeof side, .backend_config = &m->config, .timeout_ns = comm.timeout_ns};
    if (explore_backend()->side->open(&side, &m->side, &m->rank, &m->world) != FSDP_OK) return false;
    for (; comm.index < 2; comm.index++)
        if (explore_backend()->comm->open(&comm, &m->comm[comm.index]) != FSDP_OK) return false;
    bool opened = device()->stream_create(m->dev, "lane", true, &m->stream) == FSDP_OK &&
                  device()->event_create(m->dev, &m->event) == FSDP_OK &&
                  device()->mem_alloc(m->dev, 4096, FSDP_MEMORY_KIND_DEVICE, &ptr) == FSDP_OK;
    m->data = ptr;
    return opened;
}

static void member_close(member *m)
{
    device()->stream_destroy(m->dev, m->stream);
    device()->event_destroy(m->dev, m->event);
    for (int i = 0; i < 2; i++) explore_backend()->comm->close(m->comm[i]);
    explore_backend()->side->close(m->side);
    device()->mem_free(m->dev, m->data, 4096, FSDP_MEMORY_KIND_DEVICE);
    device()->close(m->dev);
}

static fsdp_status sum_over_ranks(member *m, int comm, const char *label)
{
    fsdp_collective c = {.kind = FSDP_OPERATION_ALL_REDUCE, .dtype = FSDP_DTYPE_FP32, .count = 1, .label = label};
    c.send = c.recv = m->data;
    return explore_backend()->comm->enqueue(m->comm[comm], m->stream, &c, 1);
}

/* Each rank's host: sums, gathers, drains; what it says stands in the order in which hosts had their turns. */
static void train(uint32_t rank, void *arg)
{
    ranks *t = arg;
    member m;
    if (!member_open(&m, t, rank)) return;
    *m.data = (float)(rank + 1);
    fsdp_status status = FSDP_OK;
    for (int i = 0; status == FSDP_OK && i < 4; i++) {
        uint32_t all[WORLD];
        status = sum_over_ranks(&m, i % 2, "sum");
        if (status == FSDP_OK) status = device()->event_record(m.dev, m.event, m.stream, NULL);
        t->order[t->n++] = (int)rank;
        if (status == FSDP_OK) status = explore_backend()->side->all_gather(m.side, &rank, all, sizeof rank, 1);
        for (uint32_t r = 0; status == FSDP_OK && r < WORLD; r++)
            if (all[r] != r) status = FSDP_ERR_STATE;
        t->order[t->n++] = (int)rank;
        if (status == FSDP_OK) status = device()->event_wait(m.dev, m.event, UINT64_MAX);
    }
    t->status[rank] = status;
    t->sum[rank] = *m.data;
    member_close(&m);
}

static void run_training(explore_config config, ranks *t, uint64_t *out_hash, char *schedule)
{
    config.world = WORLD;
    *t = (ranks){.x = explore_open(&config)};
    assert_non_null(t->x);
    explore_run_ranks(t->x, train, t);
    *out_hash = explore_hash(t->x);
    if (schedule != NULL) strcpy(schedule, explore_schedule(t->x));
    assert_null(explore_complaint(t->x));
    explore_close(t->x);
    for (int r = 0; r < WORLD; r++) {
        assert_int_equal(t->status[r], FSDP_OK);
        assert_true(t->sum[r] == 6.0f * WORLD * WORLD * WORLD);
    }
}

static void ranks_take_turns_and_the_schedule_is_all_there_is(void **state)
{
    (void)state;
    static char schedule[1 << 16];
    uint64_t hash[3], last = 0;
    int n_new = 0;
    for (explore_policy p = EXPLORE_IN_ORDER; p <= EXPLORE_SLOW_COMPUTE; p++) {
        for (uint64_t seed = 0; seed < 10; seed++) {
            ranks t[3];
            run_training(policy_config(p, seed), &t[0], &hash[0], schedule);
            run_training(policy_config(p, seed), &t[1], &hash[1], NULL);
            run_training((explore_config){.policy = EXPLORE_REPLAY, .schedule = schedule}, &t[2], &hash[2], NULL);
            for (int i = 1; i < 3; i++) {
                assert_int_equal(hash[i], hash[0]);
                assert_int_equal(t[i].n, t[0].n);
                assert_memory_equal(t[i].order, t[0].order, sizeof t[i].order);
            }
            n_new += hash[0] != last;
            last = hash[0];
        }
    }
    assert_true(n_new > 30);
}

/* Three beginnings in any order, then three ends in any order. */
static void meet_once(uint32_t rank, void *arg)
{
    ranks *t = arg;
    member m;
    if (!member_open(&m, t, rank)) return;
    *m.data = (float)(rank + 1);
    t->status[rank] = sum_over_ranks(&m, 0, "sum");
    if (t->status[rank] == FSDP_OK) t->status[rank] = device()->stream_drain(m.dev, m.stream, 1);
    t->sum[rank] = *m.data;
    member_close(&m);
}

static bool run_meeting(explore *x, void *arg)
{
    ranks *t = arg;
    *t = (ranks){.x = x, .n = t->n};
    explore_run_ranks(x, meet_once, t);
    assert_null(explore_complaint(x));
    for (int r = 0; r < WORLD; r++) assert_true(t->status[r] == FSDP_OK && t->sum[r] == 6.0f);
    t->n++;
    return true;
}

static void every_order_of_a_collective_is_run_once(void **state)
{
    (void)state;
    ranks t = {.n = 0};
    const explore_config config = {.world = WORLD, .all_orders = true};
    bool all = false;
    assert_int_equal(explore_every(&config, run_meeting, &t, 1000, &all), 36);
    assert_int_equal(t.n, 36);
    assert_true(all);
}

/* Hosts that never wait, but ask until it is so: until all have come, or one is missed. */
static member polling[WORLD];

static void poll(uint32_t rank, void *arg)
{
    ranks *t = arg;
    member *m = &polling[rank];
    if (!member_open(m, t, rank)) return;
    bool done = false, stays_away = t->n == 1 && rank == 1;
    fsdp_status status = stays_away ? FSDP_OK : sum_over_ranks(m, 0, "sum");
    if (status == FSDP_OK) status = device()->event_record(m->dev, m->event, m->stream, NULL);
    while (status == FSDP_OK && !done) status = device()->event_query(m->dev, m->event, &done);
    t->status[rank] = status;
}

static void hosts_that_only_ask_let_each_other_go_on(void **state)
{
    (void)state;
    for (explore_policy p = EXPLORE_IN_ORDER; p <= EXPLORE_SLOW_COMPUTE; p++) {
        for (int missing = 0; missing < 2; missing++) {
            explore_config config = policy_config(p, 3);
            config.world = WORLD;
            ranks t = {.x = explore_open(&config), .n = missing};
            explore_run_ranks(t.x, poll, &t);
            for (int r = 0; r < WORLD; r += 2) assert_int_equal(t.status[r], missing ? FSDP_ERR_RANK_LOST : FSDP_OK);
            assert_int_equal(t.status[1], FSDP_OK);
            assert_null(explore_complaint(t.x));
            for (int r = 0; r < WORLD; r++) member_close(&polling[r]);
            explore_close(t.x);
        }
    }
}

/* Two ranks of three enqueue on the communicators in another order than the third does. */
static void cross(uint32_t rank, void *arg)
{
    ranks *t = arg;
    member m;
    if (!member_open(&m, t, rank)) return;
    fsdp_status status = sum_over_ranks(&m, rank == 2, "first");
    if (status == FSDP_OK) status = sum_over_ranks(&m, rank != 2, "second");
    if (status == FSDP_OK) status = device()->stream_drain(m.dev, m.stream, UINT64_MAX);
    t->status[rank] = status;
    snprintf(t->sentence[rank], sizeof t->sentence[rank], "%s", fsdp_last_error());
    member_close(&m);
}

static void a_deadlock_is_named_and_nobody_hangs(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 10; seed++) {
        explore_config config = policy_config(EXPLORE_RANDOM, seed);
        config.world = WORLD;
        ranks t = {.x = explore_open(&config)};
        explore_run_ranks(t.x, cross, &t);
        const char *complaint = explore_complaint(t.x);
        assert_non_null(complaint);
        static const char *const says[] = {
            "deadlock", "rank 0's host drains stream 0",
            "stream 1 (rank 1, lane) at entry 0 waits for peers in communicator 0's #1 all-reduce of first (1 fp32)",
            "stream 2 (rank 2, lane) at entry 0 waits for peers in communicator 1's #1 all-reduce of first (1 fp32)"};
        for (size_t i = 0; i < sizeof says / sizeof *says; i++)
            if (strstr(complaint, says[i]) == NULL) fail_msg("\"%s\" does not say \"%s\"", complaint, says[i]);
        for (int r = 0; r < WORLD; r++) assert_int_equal(t.status[r], FSDP_ERR_RANK_LOST);
        explore_close(t.x);
    }
}

/* Rank 1 returns instead of coming: to a collective, or to the side channel. */
static void lose_one(uint32_t rank, void *arg)
{
    ranks *t = arg;
    member m;
    if (!member_open(&m, t, rank)) return;
    uint32_t all[WORLD];
    if (rank != 1) {
        fsdp_status status = sum_over_ranks(&m, 0, "first");
        if (status == FSDP_OK) status = device()->stream_drain(m.dev, m.stream, UINT64_MAX);
        t->status[rank] = status;
        t->side_status[rank] = explore_backend()->side->all_gather(m.side, &rank, all, sizeof rank, UINT64_MAX);
        snprintf(t->sentence[rank], sizeof t->sentence[rank], "%s", fsdp_last_error());
        member_close(&m);
    } else {
        member_close(&m);
    }
}

static void a_rank_that_leaves_is_missed_at_once_and_is_no_complaint(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 10; seed++) {
        explore_config config = policy_config(EXPLORE_PCT, seed);
        config.world = WORLD;
        ranks t = {.x = explore_open(&config)};
        explore_run_ranks(t.x, lose_one, &t);
        assert_null(explore_complaint(t.x));
        for (int r = 0; r < WORLD; r += 2) {
            assert_int_equal(t.status[r], FSDP_ERR_RANK_LOST);
            assert_int_equal(t.side_status[r], FSDP_ERR_RANK_LOST);
            assert_non_null(strstr(t.sentence[r], "rank 1 of 3 closed before it came"));
        }
        explore_close(t.x);
    }
}

/* A rank that does not even open. */
static void stay_away(uint32_t rank, void *arg)
{
    ranks *t = arg;
    explore_rank config = {sizeof config, t->x, rank};
    fsdp_side_args args = {.size = sizeof args, .backend_config = &config, .timeout_ns = 30000000};
    void *side = NULL;
    uint32_t n, world;
    if (rank == 1) return;
    t->status[rank] = explore_backend()->side->open(&args, &side, &n, &world);
    snprintf(t->sentence[rank], sizeof t->sentence[rank], "%s", fsdp_last_error());
}

static void opening_without_all_ranks_says_who_came(void **state)
{
    (void)state;
    explore_config config = policy_config(EXPLORE_RANDOM, 1);
    config.world = WORLD;
    ranks t = {.x = explore_open(&config)};
    for (int i = 0; i < 2; i++) {
        explore_run_ranks(t.x, stay_away, &t);
        assert_null(explore_complaint(t.x));
        for (int r = 0; r < WORLD; r += 2) {
            assert_int_equal(t.status[r], FSDP_ERR_RANK_LOST);
            assert_string_equal(t.sentence[r],
                                "opening the side channel: ranks 0, 2 of 3 came, rank 1 did not within 0.030 s");
        }
    }
    explore_close(t.x);
}

/* Rank 1's device writes to rank 0's memory. */
static float *rank_0_data;

static void trespass(uint32_t rank, void *arg)
{
    ranks *t = arg;
    member m;
    if (!member_open(&m, t, rank)) return;
    uint32_t all[WORLD];
    if (rank == 0) rank_0_data = m.data;
    t->status[rank] = explore_backend()->side->all_gather(m.side, &rank, all, sizeof rank, 1);
    fsdp_device_op op = {.kind = FSDP_OPERATION_FILL, .u.fill = {rank_0_data, 4, 1}};
    if (rank == 1) t->status[rank] = device()->launch(m.dev, m.stream, &op, NULL);
    device()->stream_drain(m.dev, m.stream, UINT64_MAX);
    t->status[rank] = explore_backend()->side->all_gather(m.side, &rank, all, sizeof rank, 1);
    member_close(&m);
}

static void another_rank_s_memory_is_not_touched(void **state)
{
    (void)state;
    explore_config config = policy_config(EXPLORE_IN_ORDER, 1);
    config.world = WORLD;
    ranks t = {.x = explore_open(&config)};
    explore_run_ranks(t.x, trespass, &t);
    assert_non_null(explore_complaint(t.x));
    assert_non_null(strstr(explore_complaint(t.x), "rank 1, lane), entry 0: fill writes 4 bytes"));
    assert_non_null(strstr(explore_complaint(t.x), "another rank's"));
    explore_close(t.x);
}

#define TEST(name) cmocka_unit_test(name)

int main(void)
{
    alarm(100);
    const struct CMUnitTest tests[] = {
        TEST(a_reader_in_time_reads_the_data_and_a_late_one_poison),
        TEST(poison_spares_the_next_owner_s_bytes),
        TEST(what_nobody_uses_is_poisoned_at_once),
        TEST(new_memory_is_poison_and_aligned),
        TEST(operations_on_bytes_that_are_not_allocated_are_named),
        TEST(the_caller_s_memory_may_be_copied_or_lent_to_all),
        TEST(memory_given_back_under_an_operation_is_a_complaint),
        TEST(a_table_of_segments_that_makes_no_sense_is_a_complaint),
        TEST(ranks_take_turns_and_the_schedule_is_all_there_is),
        TEST(every_order_of_a_collective_is_run_once),
        TEST(hosts_that_only_ask_let_each_other_go_on),
        TEST(a_deadlock_is_named_and_nobody_hangs),
        TEST(a_rank_that_leaves_is_missed_at_once_and_is_no_complaint),
        TEST(opening_without_all_ranks_says_who_came),
        TEST(another_rank_s_memory_is_not_touched),
    };
    return cmocka_run_group_tests_name("explore: faults", tests, NULL, NULL);
}
