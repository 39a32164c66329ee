/* SPDX-License-Identifier: MIT */
/* How many collectives, records and waits a step has: by value for three blocks at depth 1, by formula for the rest. */
#include "journey.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "context.h"

enum { BLOCK_BYTES = 2 * 1024 * 4 }; /* gathered: two ranks of journey_init's 1024 fp32 */

/* Of one step; by stream: the caller's s, the gather lane, the reduce lane. */
typedef struct counts {
    uint64_t gathers, reductions, all_reduces;
    uint64_t records[3], waits[3];
    fsdp_model_stats stats;
    fsdp_counters counters;
} counts;

static counts counts_of_step(journey *j)
{
    counts c = {.stats = FSDP_MODEL_STATS_INIT, .counters = FSDP_COUNTERS_INIT};
    fsdp_model_stats stats = FSDP_MODEL_STATS_INIT;
    fsdp_counters counters = FSDP_COUNTERS_INIT;
    const fsdp_stream *stream[3] = {j->s, fsdp_context_lane(j->ctx, FSDP_LANE_GATHER),
                                    fsdp_context_lane(j->ctx, FSDP_LANE_REDUCE)};
    journey_tape_start(j);
    OK(fsdp_model_stats_get(j->model, &stats));
    OK(fsdp_context_counters(j->ctx, &counters));
    journey_step(j);
    OK(fsdp_model_stats_get(j->model, &c.stats));
    OK(fsdp_context_counters(j->ctx, &c.counters));
    c.stats.gathers -= stats.gathers;
    c.stats.gathers_ahead -= stats.gathers_ahead;
    c.stats.reductions -= stats.reductions;
    c.counters.records -= counters.records;
    c.counters.waits -= counters.waits;
    c.counters.collectives -= counters.collectives;
    c.counters.host_waits -= counters.host_waits;
    c.counters.allocations -= counters.allocations;
    c.counters.events_created -= counters.events_created;
    journey_tape_stop(j);
    c.gathers = journey_n_operations(j, FSDP_OPERATION_ALL_GATHER);
    c.reductions = journey_n_operations(j, FSDP_OPERATION_REDUCE_SCATTER);
    c.all_reduces = journey_n_operations(j, FSDP_OPERATION_ALL_REDUCE);
    for (int i = 0; i < 3; i++) {
        c.records[i] = journey_n_records(j, stream[i], FSDP_RECORD_EVENT);
        c.waits[i] = journey_n_records(j, stream[i], FSDP_RECORD_WAIT);
    }
    return c;
}

/* ---- By value ---- */

typedef struct row {
    bool held;
    uint32_t n_micro;
    fsdp_accumulation accumulation;
    uint64_t gathers, reductions, records[3], waits[3];
} row;

static const row rows[] = {
    {false, 1, FSDP_ACCUMULATE_NONE, 4, 3, {7, 5, 4}, {7, 7, 4}},
    {true, 1, FSDP_ACCUMULATE_NONE, 5, 4, {9, 6, 5}, {8, 9, 5}},
    {true, 2, FSDP_ACCUMULATE_REDUCE_EACH, 7, 8, {14, 8, 9}, {12, 11, 9}},
    {true, 2, FSDP_ACCUMULATE_KEEP_FULL, 7, 4, {14, 8, 5}, {9, 11, 5}},
};

static void three_blocks_at_depth_1_have_the_counts_of_the_table(void **state)
{
    (void)state;
    for (size_t r = 0; r < sizeof rows / sizeof *rows; r++) {
        journey j;
        journey_init(&j, 3);
        j.held = rows[r].held;
        j.n_micro = rows[r].n_micro;
        j.model_config.accumulation = rows[r].accumulation;
        journey_open(&j);
        journey_step(&j);
        for (int step = 2; step <= 4; step++) {
            counts c = counts_of_step(&j);
            assert_int_equal(c.gathers, rows[r].gathers);
            assert_int_equal(c.reductions, rows[r].reductions);
            assert_int_equal(c.all_reduces, 1);
            assert_memory_equal(c.records, rows[r].records, sizeof c.records);
            assert_memory_equal(c.waits, rows[r].waits, sizeof c.waits);
        }
        journey_close(&j);
    }
}

/* ---- By formula ---- */

static uint64_t min_u64(uint64_t a, uint64_t b) { return a < b ? a : b; }

typedef struct combination {
    uint32_t n_blocks, depth, n_micro;
    bool held;
    fsdp_accumulation accumulation;
} combination;

/* Gathers of a warm step. Each of 2n halves would gather L units; at each of the 2n − 1 borders between halves the units
 * that the next half begins with are kept: depth + 1 of them, or all L where depth reaches over the whole model. The
 * update ends that: so no step does with less than L, once each. A held unit is gathered once a step. */
static uint64_t warm_gathers(const combination *c)
{
    uint64_t halves = 2ull * c->n_micro, kept = min_u64(c->depth + 1, c->n_blocks);
    return halves * c->n_blocks - (halves - 1) * kept + c->held;
}

/* What update_end gathers for the pass that follows, or the first step for itself. */
static uint64_t first_gathers(const combination *c) { return min_u64(c->depth, c->n_blocks) + c->held; }

static uint64_t all_reductions(const combination *c)
{
    bool each = c->accumulation == FSDP_ACCUMULATE_REDUCE_EACH;
    return (uint64_t)(each ? c->n_micro : 1) * (c->n_blocks + c->held);
}

/* Records of s: used where a forward buffer is given back, grads, updated. */
static uint64_t compute_records(const combination *c)
{
    uint64_t units = c->n_blocks + c->held, used = c->n_blocks - min_u64(c->depth + 1, c->n_blocks);
    return c->n_micro * (used + units) + units;
}

/* Waits of s: each gather's ready, the last reduced before the update, norm.sum; and where two gradient buffers go round,
 * the reduced of their last owner: from the third block of a micro-step on. A later micro-step takes over the buffers of
 * the one before as well: one wait, for H, which was reduced last; or for h0, whose buffer comes first with an odd number
 * of blocks; with an even one h1's comes first, and each needs its own. */
static uint64_t compute_waits(const combination *c, uint64_t gathers)
{
    uint64_t waits = gathers + 2;
    if (c->accumulation == FSDP_ACCUMULATE_KEEP_FULL) return waits;
    if (c->n_blocks > 2) waits += c->n_micro * (c->n_blocks - 2ull);
    return waits + (c->n_micro - 1) * (c->held || c->n_blocks % 2 != 0 ? 1ull : 2ull);
}

/* Waits of the gather lane for reductions, before it squares: for each unit, but for those of which it knows from backward's
 * last gather. That waited for s, which gave back the buffer and had waited for reductions itself, to have its two gradient
 * buffers: all but those of the depth + 3 blocks behind. */
static uint64_t square_waits(const combination *c)
{
    bool known = c->accumulation != FSDP_ACCUMULATE_KEEP_FULL;
    return (known ? min_u64(c->n_blocks, c->depth + 3) : c->n_blocks) + c->held;
}

/* True of every step. Each gather is one wait (for the shard's update, or for the last owner of the bytes) and one
 * record; the squares on that lane are one record; each reduction, and the norm, one wait and one record. The host neither
 * waits nor allocates. */
static void assert_counts(const combination *c, const counts *have, uint64_t gathers)
{
    assert_int_equal(have->gathers, gathers);
    assert_int_equal(have->reductions, all_reductions(c));
    assert_int_equal(have->all_reduces, 1);
    assert_int_equal(have->records[0], compute_records(c));
    assert_int_equal(have->records[1], gathers + 1);
    assert_int_equal(have->records[2], all_reductions(c) + 1);
    assert_int_equal(have->waits[2], all_reductions(c) + 1);
    assert_int_equal(have->counters.records, have->records[0] + have->records[1] + have->records[2]);
    assert_int_equal(have->counters.waits, have->waits[0] + have->waits[1] + have->waits[2]);
    assert_int_equal(have->counters.collectives, gathers + all_reductions(c) + 1);
    assert_int_equal(have->counters.host_waits, 0);
    assert_int_equal(have->counters.allocations, 0);
    assert_int_equal(have->counters.events_created, 0);
    assert_int_equal(have->stats.gathers, gathers);
    assert_int_equal(have->stats.reductions, all_reductions(c));
    assert_int_equal(have->stats.off_plan_hooks, 0);
    assert_int_equal(have->stats.unused_gathers, 0);
    assert_int_equal(have->stats.over_budget, 0);
    assert_int_equal(have->stats.no_room, 0);
    assert_int_equal(have->stats.off_plan_places, 0);
}

static void assert_combination(const combination *c)
{
    journey j;
    fsdp_memory memory = FSDP_MEMORY_INIT;
    journey_init(&j, c->n_blocks);
    j.held = c->held;
    j.n_micro = c->n_micro;
    j.model_config.depth = c->depth;
    j.model_config.accumulation = c->accumulation;
    journey_open(&j);
    OK(fsdp_model_memory(j.model, &memory));
    assert_int_equal(memory.gather, (c->held + min_u64(c->depth + 1, c->n_blocks)) * BLOCK_BYTES);

    counts have = counts_of_step(&j);
    assert_counts(c, &have, warm_gathers(c) + first_gathers(c));
    for (int step = 2; step <= 3; step++) {
        have = counts_of_step(&j);
        assert_counts(c, &have, warm_gathers(c));
        assert_int_equal(have.waits[0], compute_waits(c, have.gathers));
        assert_int_equal(have.waits[1], have.gathers + square_waits(c));
        assert_int_equal(have.stats.gathers_ahead, c->depth > 0 ? have.gathers : c->held);
    }
    journey_close(&j);
}

static void every_shape_has_the_counts_of_the_formulas(void **state)
{
    (void)state;
    static const uint32_t blocks[] = {1, 2, 5, 12, 48}, micro[] = {1, 2, 4};
    for (uint32_t i = 0; i < sizeof blocks / sizeof *blocks; i++) {
        uint32_t depths[] = {0, 1, 2, 4, blocks[i] - 1, blocks[i], blocks[i] + 3};
        for (uint32_t k = 0; k < (sizeof depths / sizeof *depths) * (sizeof micro / sizeof *micro) * 4; k++) {
            combination c = {blocks[i], depths[k / 12], micro[k / 4 % 3], k % 2 != 0,
                             k / 2 % 2 != 0 ? FSDP_ACCUMULATE_REDUCE_EACH : FSDP_ACCUMULATE_KEEP_FULL};
            assert_combination(&c);
        }
    }
}

/* The words of the schedule: one pass without micro-steps makes 2L − 1 − depth gathers, not 2L, and L reductions. */
static void a_pass_makes_2l_minus_1_minus_depth_gathers_and_l_reductions(void **state)
{
    (void)state;
    for (uint32_t n_blocks = 2; n_blocks <= 16; n_blocks++) {
        for (uint32_t depth = 0; depth < n_blocks; depth++) {
            journey j;
            journey_init(&j, n_blocks);
            j.model_config.depth = depth;
            journey_open(&j);
            journey_tape_start(&j); /* from scratch, and without the update's gathers for what follows */
            journey_micro_step(&j, 0);
            journey_tape_stop(&j);
            assert_int_equal(journey_n_operations(&j, FSDP_OPERATION_ALL_GATHER), 2 * n_blocks - 1 - depth);
            assert_int_equal(journey_n_operations(&j, FSDP_OPERATION_REDUCE_SCATTER), n_blocks);
            journey_update(&j);
            assert_int_equal(counts_of_step(&j).gathers, 2 * n_blocks - 1 - depth);
            journey_close(&j);
        }
    }
}

/* At depth 1 with a budget below a block: no gather is ahead, only the turn's block is kept, and one buffer does. */
static void blocks_larger_than_the_budget_are_gathered_when_needed_and_counted(void **state)
{
    (void)state;
    for (uint32_t n_blocks = 2; n_blocks <= 5; n_blocks++) {
        journey j;
        fsdp_memory memory = FSDP_MEMORY_INIT;
        fsdp_model_stats before = FSDP_MODEL_STATS_INIT;
        journey_init(&j, n_blocks);
        j.model_config.prefetch_bytes = BLOCK_BYTES - 1;
        journey_open(&j);
        OK(fsdp_model_memory(j.model, &memory));
        assert_int_equal(memory.gather, BLOCK_BYTES);
        journey_step(&j);
        OK(fsdp_model_stats_get(j.model, &before));
        counts c = counts_of_step(&j);
        assert_int_equal(c.gathers, 2 * n_blocks - 1);
        assert_int_equal(c.stats.gathers_ahead, 0);
        assert_true(c.stats.over_budget - before.over_budget >= c.gathers);
        assert_int_equal(c.stats.no_room + c.stats.off_plan_places, 0);
        journey_close(&j);
    }
}

int main(void)
{
    alarm(60);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(three_blocks_at_depth_1_have_the_counts_of_the_table),
        cmocka_unit_test(every_shape_has_the_counts_of_the_formulas),
        cmocka_unit_test(blocks_larger_than_the_budget_are_gathered_when_needed_and_counted),
        cmocka_unit_test(a_pass_makes_2l_minus_1_minus_depth_gathers_and_l_reductions),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
