/* SPDX-License-Identifier: MIT */
/* Clocks: which work of which stream comes before what, which wait is left out and which fence a wait is for. On the sim
 * backend, whose streams cost nothing; every device call is counted, and the tape says which event it was for. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "context.h"
#include "frontier.h"
#include "fsdp/fsdp.h"

enum { A, B, C, D, STREAMS };

typedef struct rig {
    fsdp_context *ctx;
    fsdp_stream *s[STREAMS];
    uint64_t records, waits; /* when last looked at */
} rig;

#define OK(call) assert_int_equal((call), FSDP_OK)

static int open_rig(void **state)
{
    alarm(60);
    rig *r = calloc(1, sizeof *r);
    assert_non_null(r);
    fsdp_config config = FSDP_CONFIG_INIT;
    config.backend = fsdp_sim_backend();
    OK(fsdp_context_create(&config, &r->ctx));
    for (int i = 0; i < STREAMS; i++) OK(fsdp_stream_create(r->ctx, (const char *[]){"a", "b", "c", "d"}[i], &r->s[i]));
    *state = r;
    return 0;
}

static int close_rig(void **state)
{
    rig *r = *state;
    for (int i = 0; i < STREAMS; i++) OK(fsdp_stream_release(r->s[i]));
    OK(fsdp_context_destroy(r->ctx));
    free(r);
    return 0;
}

/* Since the last call of this: so many records and waits were enqueued. */
static void assert_calls(rig *r, uint64_t records, uint64_t waits)
{
    fsdp_counters now = FSDP_COUNTERS_INIT;
    OK(fsdp_context_counters(r->ctx, &now));
    assert_int_equal(now.records - r->records, records);
    assert_int_equal(now.waits - r->waits, waits);
    r->records = now.records;
    r->waits = now.waits;
}

static fsdp__fence fence_on(fsdp_stream *s)
{
    fsdp__fence fence;
    OK(fsdp__record(s, FSDP_MARK_CALLER, s->name, NULL, &fence));
    return fence;
}

static void stand_for(fsdp_stream *s, const fsdp__fence *fence) { OK(fsdp__wait_fence(s, fence, FSDP_REASON_CALLER)); }

static bool covered(const fsdp_stream *s, const fsdp_stream *other, uint64_t epoch)
{
    return epoch <= s->ctx->clocks.now[s->slot].at[other->slot];
}

static void add_need(fsdp__need *n, const fsdp_stream *s, const fsdp_stream *other, uint64_t epoch, fsdp_reason reason)
{
    fsdp__frontier f = {{fsdp__point_of(other->slot, epoch), 0}, NULL};
    fsdp__need_frontier(n, &f, &s->ctx->clocks.now[s->slot], reason);
}

static void need(fsdp_stream *s, const fsdp_stream *other, uint64_t epoch)
{
    fsdp__need n = {0};
    add_need(&n, s, other, epoch, FSDP_REASON_REUSE);
    OK(fsdp__wait_need(s, &n));
    assert_true(covered(s, other, epoch));
}

/* ---- Fences and waits ---- */

static void a_fence_covers_what_came_before_it_and_no_more(void **state)
{
    rig *r = *state;
    uint64_t used = fsdp__epoch(r->s[A]);
    assert_false(covered(r->s[B], r->s[A], used));
    fsdp__fence fence = fence_on(r->s[A]);
    assert_int_equal(fence.epoch, used);
    uint64_t later = fsdp__epoch(r->s[A]);
    assert_int_equal(later, used + 1);
    stand_for(r->s[B], &fence);
    assert_true(covered(r->s[B], r->s[A], used));
    assert_false(covered(r->s[B], r->s[A], later));
    assert_false(covered(r->s[C], r->s[A], used));
    assert_calls(r, 1, 1);
}

static void a_stream_needs_no_wait_for_itself(void **state)
{
    rig *r = *state;
    assert_true(covered(r->s[A], r->s[A], fsdp__epoch(r->s[A])));
    fsdp__fence fence = fence_on(r->s[A]);
    stand_for(r->s[A], &fence);
    assert_calls(r, 1, 0);
}

static void a_wait_that_is_covered_is_left_out(void **state)
{
    rig *r = *state;
    fsdp__fence first = fence_on(r->s[A]), second = fence_on(r->s[A]);
    stand_for(r->s[B], &second);
    stand_for(r->s[B], &second);
    stand_for(r->s[B], &first);
    assert_calls(r, 2, 1);
}

static void an_order_through_a_third_stream_counts(void **state)
{
    rig *r = *state;
    uint64_t used = fsdp__epoch(r->s[A]);
    fsdp__fence of_a = fence_on(r->s[A]);
    fsdp__fence early = fence_on(r->s[B]); /* before b waits: knows nothing of a */
    stand_for(r->s[B], &of_a);
    fsdp__fence of_b = fence_on(r->s[B]);
    stand_for(r->s[C], &of_b);
    assert_true(covered(r->s[C], r->s[A], used));
    assert_false(covered(r->s[C], r->s[A], used + 1));
    assert_calls(r, 3, 2);
    need(r->s[C], r->s[A], used);
    assert_calls(r, 0, 0);

    stand_for(r->s[D], &early);
    assert_false(covered(r->s[D], r->s[A], used));
    assert_true(covered(r->s[D], r->s[B], early.epoch));
}

/* ---- Which fence a need waits for ---- */

/* The event of the tape's last wait. */
static uint64_t awaited(fsdp_trace *trace)
{
    for (uint64_t i = fsdp_trace_count(trace); i-- > 0;)
        if (fsdp_trace_at(trace, i)->kind == FSDP_RECORD_WAIT) return fsdp_trace_at(trace, i)->event;
    return 0;
}

static void a_need_waits_for_the_oldest_fence_that_covers_it(void **state)
{
    rig *r = *state;
    fsdp_trace *trace;
    OK(fsdp_trace_start(r->ctx, 100, &trace));
    fsdp__fence fence[4];
    for (int i = 0; i < 4; i++) fence[i] = fence_on(r->s[A]);
    need(r->s[B], r->s[A], fence[2].epoch);
    assert_int_equal(awaited(trace), (uintptr_t)fence[2].event);
    assert_false(covered(r->s[B], r->s[A], fence[3].epoch));
    need(r->s[C], r->s[A], fence[0].epoch);
    assert_int_equal(awaited(trace), (uintptr_t)fence[0].event);
    assert_calls(r, 4, 2);
    fsdp_trace_destroy(trace);
}

static void a_fence_that_left_the_ring_is_replaced_by_the_oldest_that_is_left(void **state)
{
    rig *r = *state;
    uint64_t used = fsdp__epoch(r->s[A]);
    for (int i = 0; i < FSDP__FENCES; i++) fence_on(r->s[A]);
    need(r->s[B], r->s[A], used); /* the ring is full, and its oldest fence is the one */
    assert_false(covered(r->s[B], r->s[A], used + 1));
    for (int i = 0; i < 10; i++) fence_on(r->s[A]);
    need(r->s[C], r->s[A], used);
    assert_true(covered(r->s[C], r->s[A], used + 10));
    assert_false(covered(r->s[C], r->s[A], used + 11));
    assert_calls(r, FSDP__FENCES + 10, 2);
}

static void a_use_that_no_fence_covers_gets_one_on_demand(void **state)
{
    rig *r = *state;
    fence_on(r->s[A]);
    uint64_t used = fsdp__epoch(r->s[A]);
    assert_calls(r, 1, 0);
    need(r->s[B], r->s[A], used);
    assert_calls(r, 1, 1);
    need(r->s[C], r->s[A], used); /* there is one now */
    assert_calls(r, 0, 1);
    assert_int_equal(fsdp__epoch(r->s[A]), used + 1);
}

static void one_fence_may_stand_for_several(void **state)
{
    rig *r = *state;
    fsdp__fence of_a = fence_on(r->s[A]), of_c = fence_on(r->s[C]);
    stand_for(r->s[B], &of_a);
    stand_for(r->s[B], &of_c);
    fsdp__fence of_b = fence_on(r->s[B]);
    assert_calls(r, 3, 2);
    fsdp__need n = {0};
    add_need(&n, r->s[D], r->s[A], of_a.epoch, FSDP_REASON_REUSE);
    add_need(&n, r->s[D], r->s[B], of_b.epoch, FSDP_REASON_REUSE);
    add_need(&n, r->s[D], r->s[C], of_c.epoch, FSDP_REASON_REUSE);
    OK(fsdp__wait_need(r->s[D], &n));
    assert_calls(r, 0, 1); /* b's, whose snapshot has the others */
    assert_true(covered(r->s[D], r->s[A], of_a.epoch) && covered(r->s[D], r->s[C], of_c.epoch));
}

static void a_need_keeps_the_maximum_and_its_reason(void **state)
{
    rig *r = *state;
    fsdp_trace *trace;
    OK(fsdp_trace_start(r->ctx, 100, &trace));
    fsdp__fence first = fence_on(r->s[A]), second = fence_on(r->s[A]);
    fsdp__need n = {0};
    add_need(&n, r->s[B], r->s[A], first.epoch, FSDP_REASON_READ);
    add_need(&n, r->s[B], r->s[A], second.epoch, FSDP_REASON_REUSE);
    add_need(&n, r->s[B], r->s[A], first.epoch, FSDP_REASON_WRITE);
    OK(fsdp__wait_need(r->s[B], &n));
    const fsdp_trace_record *wait = fsdp_trace_at(trace, fsdp_trace_count(trace) - 1);
    assert_int_equal(wait->kind, FSDP_RECORD_WAIT);
    assert_int_equal(wait->reason, FSDP_REASON_REUSE);
    assert_int_equal(wait->event, (uintptr_t)second.event);
    assert_calls(r, 2, 1);
    fsdp_trace_destroy(trace);
}

/* ---- Events that are lent ---- */

static void a_fence_whose_event_is_gone_is_replaced_by_a_later_one(void **state)
{
    rig *r = *state;
    fsdp_event *event;
    OK(fsdp_event_create(r->ctx, &event));
    uint64_t used = fsdp__epoch(r->s[A]);
    OK(fsdp_event_record(event, r->s[A]));
    fsdp__fence later = fence_on(r->s[A]);
    fsdp_event_destroy(event);
    need(r->s[B], r->s[A], used);
    assert_true(covered(r->s[B], r->s[A], later.epoch));
    assert_calls(r, 2, 1);
}

static void without_a_later_one_a_fence_is_recorded_on_demand(void **state)
{
    rig *r = *state;
    fsdp_event *event;
    OK(fsdp_event_create(r->ctx, &event));
    uint64_t used = fsdp__epoch(r->s[A]);
    OK(fsdp_event_record(event, r->s[A]));
    fsdp_event_destroy(event);
    need(r->s[B], r->s[A], used);
    assert_calls(r, 2, 1);
}

static void an_event_recorded_again_stands_for_its_new_place_only(void **state)
{
    rig *r = *state;
    fsdp_trace *trace;
    fsdp_event *event;
    OK(fsdp_trace_start(r->ctx, 100, &trace));
    OK(fsdp_event_create(r->ctx, &event));
    uint64_t used = fsdp__epoch(r->s[A]);
    OK(fsdp_event_record(event, r->s[A]));
    fsdp__fence second = fence_on(r->s[A]);
    OK(fsdp_event_record(event, r->s[C])); /* whoever waited for the event now would wait for c */
    need(r->s[B], r->s[A], used);
    assert_int_equal(awaited(trace), (uintptr_t)second.event);
    OK(fsdp_stream_wait_event(r->s[D], event));
    assert_false(covered(r->s[D], r->s[A], used));
    assert_true(covered(r->s[D], r->s[C], fsdp__epoch(r->s[C]) - 1));
    fsdp_event_destroy(event);
    fsdp_trace_destroy(trace);
}

/* A released work's event must not be waited for either; a world of one has collectives too. */
static void a_released_work_is_forgotten(void **state)
{
    rig *r = *state;
    fsdp_work *work;
    uint64_t used = fsdp__epoch(r->s[A]);
    OK(fsdp_barrier(fsdp_context_comm(r->ctx), r->s[A], &work));
    OK(fsdp_work_wait(work, r->s[B]));
    assert_true(covered(r->s[B], r->s[A], used));
    fsdp_work_release(work);
    assert_calls(r, 1, 1);
    need(r->s[C], r->s[A], used);
    assert_calls(r, 1, 1);
}

/* ---- Slots ---- */

static void what_a_released_stream_ran_is_covered_for_everybody(void **state)
{
    rig *r = *state;
    int slot = r->s[A]->slot;
    fence_on(r->s[A]);
    uint64_t used = fsdp__epoch(r->s[A]);
    OK(fsdp_stream_release(r->s[A]));
    r->s[A] = NULL;
    for (int i = B; i < STREAMS; i++) assert_true(used <= r->ctx->clocks.now[r->s[i]->slot].at[slot]);
    assert_calls(r, 1, 0);

    OK(fsdp_stream_create(r->ctx, "next", &r->s[A]));
    assert_int_equal(r->s[A]->slot, slot);
    assert_true(fsdp__epoch(r->s[A]) > used); /* the slot's time goes on */
    assert_true(used <= r->ctx->clocks.now[slot].at[slot]);
    uint64_t next = fsdp__epoch(r->s[A]);
    assert_false(covered(r->s[B], r->s[A], next));
    need(r->s[B], r->s[A], next);
    assert_calls(r, 1, 1);
}

static void a_slot_used_before_never_lends_its_old_fences(void **state)
{
    rig *r = *state;
    for (int i = 0; i < 5; i++) fence_on(r->s[A]);
    OK(fsdp_stream_release(r->s[A]));
    OK(fsdp_stream_create(r->ctx, "next", &r->s[A]));
    assert_calls(r, 5, 0);
    uint64_t used = fsdp__epoch(r->s[A]);
    fsdp__fence fence = fence_on(r->s[A]);
    assert_int_equal(fence.epoch, used);
    need(r->s[B], r->s[A], used);
    assert_calls(r, 1, 1);
    for (int i = 0; i < FSDP__FENCES + 3; i++) fence_on(r->s[A]);
    need(r->s[C], r->s[A], used);
    assert_true(covered(r->s[C], r->s[A], used + 4));
    assert_false(covered(r->s[C], r->s[A], used + 5));
}

static void an_event_outlives_the_stream_that_recorded_it(void **state)
{
    rig *r = *state;
    fsdp_event *event;
    OK(fsdp_event_create(r->ctx, &event));
    OK(fsdp_event_record(event, r->s[A]));
    OK(fsdp_stream_release(r->s[A]));
    OK(fsdp_stream_create(r->ctx, "next", &r->s[A]));
    OK(fsdp_stream_wait_event(r->s[B], event));
    assert_calls(r, 1, 0);
    OK(fsdp_event_record(event, r->s[A]));
    OK(fsdp_stream_wait_event(r->s[B], event));
    assert_calls(r, 1, 1);
    fsdp_event_destroy(event);
}

static void sixteen_streams_live_at_a_time_and_the_next_says_so(void **state)
{
    rig *r = *state;
    fsdp_stream *more[FSDP__SLOTS] = {NULL}, *extra = NULL;
    int n = 0;
    while (n < FSDP__SLOTS && fsdp_stream_create(r->ctx, "more", &more[n]) == FSDP_OK) n++;
    assert_int_equal(n, FSDP__SLOTS - 3 - STREAMS);
    assert_int_equal(fsdp_stream_create(r->ctx, "too many", &extra), FSDP_ERR_STATE);
    assert_string_equal(fsdp_last_error(),
                        "stream too many: all 16 streams of this context are in use: release one first");
    assert_null(extra);
    OK(fsdp_stream_release(more[--n]));
    OK(fsdp_stream_create(r->ctx, "fits", &extra));
    OK(fsdp_stream_release(extra));
    while (n > 0) OK(fsdp_stream_release(more[--n]));
}

/* ---- The access rule ---- */

static void a_reader_waits_for_the_writer_and_a_writer_for_all(void **state)
{
    rig *r = *state;
    fsdp__edges edges = {0};
    fsdp__note_write(&edges, r->s[A]);
    uint64_t written = fsdp__epoch(r->s[A]);
    fence_on(r->s[A]);

    fsdp__need n = {0};
    fsdp__need_read(&n, &edges);
    OK(fsdp__wait_need(r->s[B], &n));
    OK(fsdp__wait_need(r->s[C], &n));
    assert_calls(r, 1, 2);
    fsdp__note_read(&edges, r->s[B]);
    fsdp__note_read(&edges, r->s[C]);
    fsdp__note_read(&edges, r->s[C]);
    uint64_t read_b = fsdp__epoch(r->s[B]), read_c = fsdp__epoch(r->s[C]);

    n = (fsdp__need){0}; /* another reader waits for no reader */
    fsdp__need_read(&n, &edges);
    OK(fsdp__wait_need(r->s[D], &n));
    assert_false(covered(r->s[D], r->s[B], read_b));
    fsdp__note_read(&edges, r->s[D]);
    assert_calls(r, 0, 1);

    n = (fsdp__need){0};
    fsdp__need_write(&n, &edges);
    OK(fsdp__wait_need(r->s[D], &n));
    assert_true(covered(r->s[D], r->s[A], written));
    assert_true(covered(r->s[D], r->s[B], read_b));
    assert_true(covered(r->s[D], r->s[C], read_c));
    assert_calls(r, 2, 2);
    fsdp__note_write(&edges, r->s[D]);

    n = (fsdp__need){0}; /* the write stands for all that it waited for */
    fsdp__need_write(&n, &edges);
    OK(fsdp__wait_need(r->s[A], &n));
    assert_true(covered(r->s[A], r->s[B], read_b));
    assert_calls(r, 1, 1);
}

/* ---- Against the graph itself ---- */

enum { MOVES = 1500, MAX_FENCES = MOVES + 8 };

/* Random records and waits. reach[s][t]: how many fences of t come before what s is given next, found by walking the
 * waits that were really asked for, with no elision. */
static void clocks_know_exactly_what_the_graph_says(void **state)
{
    rig *r = *state;
    static fsdp__fence fence[STREAMS][MAX_FENCES];
    static uint64_t snapshot[STREAMS][MAX_FENCES][STREAMS];
    uint64_t random = 88172645463325252ull;
    uint64_t reach[STREAMS][STREAMS] = {{0}}, n[STREAMS] = {0}, waits = 0;
    for (int move = 0; move < MOVES; move++) {
        random ^= random << 13, random ^= random >> 7, random ^= random << 17;
        int s = (int)((random >> 20) % STREAMS), t = (int)((random >> 24) % STREAMS);
        if ((random >> 30) % 3 == 0) {
            fence[s][n[s]] = fence_on(r->s[s]);
            reach[s][s] = n[s] + 1;
            memcpy(snapshot[s][n[s]], reach[s], sizeof reach[s]);
            n[s]++;
        } else if (n[t] > 0) {
            /* A fence that is still in the ring: an older copy's event would be somebody else's by now. */
            uint64_t back = (random >> 34) % 8;
            uint64_t which = n[t] - 1 > back ? n[t] - 1 - back : 0;
            waits += s != t && reach[s][t] < which + 1;
            stand_for(r->s[s], &fence[t][which]);
            for (int u = 0; u < STREAMS; u++)
                if (snapshot[t][which][u] > reach[s][u]) reach[s][u] = snapshot[t][which][u];
        }
        for (int a = 0; a < STREAMS; a++) {
            for (int b = 0; b < STREAMS; b++) {
                uint64_t first = r->s[b]->first_fence + 1; /* the epoch of its fence 0 */
                if (a != b && reach[a][b] > 0) assert_true(covered(r->s[a], r->s[b], first + reach[a][b] - 1));
                if (a != b) assert_false(covered(r->s[a], r->s[b], first + reach[a][b]));
            }
        }
    }
    assert_calls(r, n[A] + n[B] + n[C] + n[D], waits); /* none too many, none too few */
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, open_rig, close_rig)
    const struct CMUnitTest tests[] = {
        TEST(a_fence_covers_what_came_before_it_and_no_more),
        TEST(a_stream_needs_no_wait_for_itself),
        TEST(a_wait_that_is_covered_is_left_out),
        TEST(an_order_through_a_third_stream_counts),
        TEST(a_need_waits_for_the_oldest_fence_that_covers_it),
        TEST(a_fence_that_left_the_ring_is_replaced_by_the_oldest_that_is_left),
        TEST(a_use_that_no_fence_covers_gets_one_on_demand),
        TEST(one_fence_may_stand_for_several),
        TEST(a_need_keeps_the_maximum_and_its_reason),
        TEST(a_fence_whose_event_is_gone_is_replaced_by_a_later_one),
        TEST(without_a_later_one_a_fence_is_recorded_on_demand),
        TEST(an_event_recorded_again_stands_for_its_new_place_only),
        TEST(a_released_work_is_forgotten),
        TEST(what_a_released_stream_ran_is_covered_for_everybody),
        TEST(a_slot_used_before_never_lends_its_old_fences),
        TEST(an_event_outlives_the_stream_that_recorded_it),
        TEST(sixteen_streams_live_at_a_time_and_the_next_says_so),
        TEST(a_reader_waits_for_the_writer_and_a_writer_for_all),
        TEST(clocks_know_exactly_what_the_graph_says),
    };
    return cmocka_run_group_tests_name("clocks", tests, NULL, NULL);
}
