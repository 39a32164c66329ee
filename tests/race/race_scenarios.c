/* SPDX-License-Identifier: MIT */
/* Hand-overs that went wrong elsewhere, or could, each as small as it gets. Streams: */
#include "race_rig.h"

enum { A, B, C, D };

/* rmm#2489: A's blocks, still being written, are merged and go to B, and what B leaves of them goes to C, which has waited
 * for B at most. Only C's own wait for A protects what B never touched. */
static void three_stream_handover(race_rig *r)
{
    race_block *a1 = race_take(r, 4 * KIB, A), *a2 = race_take(r, 4 * KIB, A);
    if (r->stopped) return;
    race_write(r, a1, A);
    race_write(r, a2, A);
    race_read(r, a1, A);
    race_read(r, a2, A);
    race_give(r, a1);
    race_give(r, a2);
    race_block *b = race_take(r, 5 * KIB, B), *c = race_take(r, 3 * KIB, C); /* c: none of it was B's */
    if (r->stopped) return;
    race_write(r, c, C);
    race_write(r, b, B);
    race_read(r, c, C);
    race_read(r, b, B);
}

/* The same once B has used and freed its part: C gets bytes of both. */
static void handover_through_a_third_stream(race_rig *r)
{
    race_block *a = race_take(r, 8 * KIB, A);
    if (r->stopped) return;
    race_write(r, a, A);
    race_read(r, a, A);
    race_give(r, a);
    race_block *b = race_take(r, 4 * KIB, B);
    if (r->stopped) return;
    race_write(r, b, B);
    race_read(r, b, B);
    race_give(r, b);
    race_block *c = race_take(r, 8 * KIB, C);
    if (r->stopped) return;
    race_write(r, c, C);
    race_read_part(r, c, C, 0);
    race_read(r, c, C);
}

/* Neighbours of one owner, of which the lower one was used on D too, and the upper one on B: merged, they lose neither. */
static void merged_blocks_keep_their_users(race_rig *r)
{
    race_block *lower = race_take(r, 4 * KIB, A), *upper = race_take(r, 4 * KIB, A);
    if (r->stopped) return;
    race_write(r, lower, A);
    race_write(r, upper, A);
    race_order(r, B, A);
    race_order(r, D, A);
    race_record_stream(r, lower, D);
    race_record_stream(r, upper, B);
    race_read(r, lower, D);
    race_read(r, upper, B);
    race_give(r, lower);
    race_give(r, upper);
    race_order(r, C, A);
    race_block *c = race_take(r, 8 * KIB, C);
    if (r->stopped) return;
    race_write(r, c, C);
    race_read_part(r, c, C, 0);
    race_read(r, c, C);
}

/* Neighbours of two owners: who takes both waits for both, in whatever order they were given back. */
static void merged_blocks_of_two_streams(race_rig *r)
{
    race_block *lower = race_take(r, 4 * KIB, A), *upper = race_take(r, 4 * KIB, B);
    if (r->stopped) return;
    race_write(r, lower, A);
    race_write(r, upper, B);
    race_read(r, lower, A);
    race_read(r, upper, B);
    race_give(r, upper);
    race_give(r, lower);
    race_block *c = race_take(r, 8 * KIB, C);
    if (r->stopped) return;
    race_write(r, c, C);
    race_read_part(r, c, C, 0);
    race_read(r, c, C);
}

/* Neighbours of three owners: the middle one's is its own, the ends are not, and a part is taken at an end. */
static void ends_of_a_range_are_others(race_rig *r)
{
    race_block *low = race_take(r, 4 * KIB, A), *middle = race_take(r, 4 * KIB, B), *high = race_take(r, 4 * KIB, C);
    if (r->stopped) return;
    race_write(r, low, A);
    race_write(r, high, C);
    race_read(r, low, A);
    race_read(r, high, C);
    race_give(r, middle);
    race_give(r, high);
    race_give(r, low);
    race_block *first = race_take(r, 4 * KIB, B), *second = race_take(r, 4 * KIB, B);
    if (r->stopped) return;
    race_write(r, first, B);
    race_write(r, second, B);
    race_read(r, first, B);
    race_read(r, second, B);
}

/* pytorch#188655: used on B, freed by code that runs on C and has waited for B; taken again on A, which waited for nobody. */
static void free_after_wait_on_another_stream(race_rig *r)
{
    race_block *p = race_take(r, 4 * KIB, A);
    if (r->stopped) return;
    race_write(r, p, A);
    race_order(r, B, A);
    race_record_stream(r, p, B);
    race_read(r, p, B);
    race_order(r, C, B);
    race_give(r, p);
    race_block *q = race_take(r, 4 * KIB, A);
    if (r->stopped) return;
    race_write(r, q, A);
    race_read(r, q, A);
}

/* A copy to the host reads a block that is freed and taken again, by its own stream and by another. */
static void d2h_of_freed_block(race_rig *r)
{
    for (int next = A; next <= B; next++) {
        race_block *p = race_take(r, 4 * KIB, A);
        if (r->stopped) return;
        race_write(r, p, A);
        race_order(r, RACE_COPY, A);
        race_read_part(r, p, RACE_COPY, 0);
        race_read(r, p, RACE_COPY);
        race_record_use(r, p, RACE_COPY);
        race_give(r, p);
        race_block *q = race_take(r, 4 * KIB, next);
        if (r->stopped) return;
        race_write(r, q, next);
        race_read(r, q, next);
        race_give(r, q);
    }
}

/* Layers alternate between two compute streams, each reading what the other wrote; room for two buffers. */
static void two_compute_streams(race_rig *r)
{
    race_block *before = NULL;
    for (int i = 0; i < 6; i++) {
        int s = i % 2;
        race_block *x = race_take(r, 4 * KIB, s);
        if (r->stopped) return;
        if (before != NULL) {
            race_order(r, s, 1 - s);
            race_record_stream(r, before, s);
            race_copy(r, x, before, s);
            race_give(r, before);
        } else {
            race_write(r, x, s);
        }
        race_read(r, x, s);
        before = x;
    }
}

static race_block *written_on_a(race_rig *r)
{
    race_block *p = race_take(r, 4 * KIB, A);
    if (r->stopped) return NULL;
    race_write(r, p, A);
    race_order(r, B, A);
    return p;
}

static void taken_again_on(race_rig *r, int stream)
{
    race_block *q = race_take(r, 4 * KIB, stream);
    if (r->stopped) return;
    race_write(r, q, stream);
    race_read(r, q, stream);
}

static void record_stream_before_use(race_rig *r)
{
    race_block *p = written_on_a(r);
    if (p == NULL) return;
    race_record_stream(r, p, B);
    race_read(r, p, B);
    race_give(r, p);
    taken_again_on(r, C);
}

/* Between two uses, with an epoch of B's closed in between. */
static void record_stream_during_use(race_rig *r)
{
    race_block *p = written_on_a(r);
    if (p == NULL) return;
    race_read_part(r, p, B, 0);
    race_record_stream(r, p, B);
    race_event_record(r, 0, B);
    race_read(r, p, B);
    race_give(r, p);
    taken_again_on(r, A);
}

static void record_stream_after_use(race_rig *r)
{
    race_block *p = written_on_a(r);
    if (p == NULL) return;
    race_read(r, p, B);
    race_event_record(r, 0, B);
    race_read_part(r, p, B, 0);
    race_record_stream(r, p, B);
    race_give(r, p);
    taken_again_on(r, C);
}

/* A stream joins a block that nobody has written: what it must wait for is the last owner, which the taker waits for. */
static void record_stream_first_use(race_rig *r)
{
    race_block *p = race_take(r, 4 * KIB, C);
    if (r->stopped) return;
    race_write(r, p, C);
    race_read(r, p, C);
    race_give(r, p);
    race_block *q = race_take(r, 4 * KIB, A);
    if (r->stopped) return;
    race_record_stream(r, q, B);
    race_write(r, q, B);
    race_read(r, q, B);
    race_give(r, q);
    taken_again_on(r, A);
}

/* The narrow form: B goes on with work of its own, which the next owner need not wait for. */
static void record_use_narrow(race_rig *r)
{
    race_block *p = written_on_a(r);
    if (p == NULL) return;
    race_read(r, p, B);
    race_record_use(r, p, B);
    race_event_record(r, 0, B);
    race_block *own = race_take(r, 4 * KIB, B);
    if (r->stopped) return;
    race_write(r, own, B);
    race_read(r, own, B);
    race_give(r, p);
    taken_again_on(r, A);
}

/* Used in the epoch that B opens with a record: noted an epoch early it would be covered by a fence that stands before it. */
static void record_use_after_a_fence(race_rig *r)
{
    race_block *p = written_on_a(r);
    if (p == NULL) return;
    race_event_record(r, 0, B);
    race_event_wait(r, 0, C);
    race_read(r, p, B);
    race_record_use(r, p, B);
    race_give(r, p);
    taken_again_on(r, C);
}

/* A wait on a fence that was recorded before the last use covers nothing of it. */
static void free_after_an_older_fence(race_rig *r)
{
    race_block *p = race_take(r, 4 * KIB, A);
    if (r->stopped) return;
    race_write(r, p, A);
    race_event_record(r, 0, A);
    race_event_wait(r, 0, B);
    race_write(r, p, A);
    race_read(r, p, A);
    race_give(r, p);
    taken_again_on(r, B);
}

/* An event marks A's last use, and is recorded again, on B: whoever waits for A by it would wait for B. */
static void event_recorded_again(race_rig *r)
{
    race_block *p = race_take(r, 4 * KIB, A);
    if (r->stopped) return;
    race_write(r, p, A);
    race_read(r, p, A);
    race_give(r, p);
    race_event_record(r, 0, A);
    race_event_record(r, 0, B);
    taken_again_on(r, C);
}

/* One buffer goes round; whichever stream stands still, the others may not overtake it. */
static void stall_of_each_stream(race_rig *r)
{
    for (int i = 0; i < 8; i++) {
        int s = i % 4;
        race_block *p = race_take(r, 4 * KIB, s), *q = race_take(r, 4 * KIB, (s + 1) % 4);
        if (r->stopped) return;
        race_write(r, p, s);
        race_write(r, q, (s + 1) % 4);
        race_read(r, p, s);
        race_read(r, q, (s + 1) % 4);
        race_give(r, p);
        race_give(r, q);
    }
}

/* More fences between use and reuse than a stream keeps: the one that is left must be a later one. */
static void ring_overflow(race_rig *r)
{
    race_block *p = race_take(r, 4 * KIB, A), *q = race_take(r, 4 * KIB, A);
    if (r->stopped) return;
    race_write(r, p, A);
    race_order(r, B, A);
    race_read(r, p, B);
    race_record_use(r, p, B);
    race_give(r, p);
    for (int i = 0; i < 70; i++) race_event_record(r, i % RACE_EVENTS, B);
    for (int i = 0; i < 70; i++) race_order(r, C, B);
    race_write(r, q, A);
    race_read(r, q, A);
    race_give(r, q);
    for (int i = 0; i < 70; i++) race_event_record(r, 0, A);
    for (int i = 0; i < 130; i++) race_order(r, i % 2 ? B : C, A);
    race_block *late = race_take(r, 8 * KIB, D);
    if (r->stopped) return;
    race_write(r, late, D);
    race_read_part(r, late, D, 0);
    race_read(r, late, D);
}

/* Exactly as many as it keeps, one less and one more, on the stream that used the block. */
static void ring_just_full(race_rig *r)
{
    for (int n = 62; n <= 66; n++) {
        race_block *p = race_take(r, 8 * KIB, A);
        if (r->stopped) return;
        race_write(r, p, A);
        race_read(r, p, A);
        race_give(r, p);
        for (int i = 0; i < n; i++) race_order(r, D, A);
        race_block *q = race_take(r, 8 * KIB, n % 2 ? B : C);
        if (r->stopped) return;
        race_write(r, q, q->stream);
        race_read(r, q, q->stream);
        race_give(r, q);
    }
}

/* A stream is released while a freed range of its waits for nobody yet and a block of its lives; the next one has its slot. */
static void slot_reuse(race_rig *r)
{
    race_block *pending = race_take(r, 2 * KIB, D), *kept = race_take(r, 2 * KIB, D);
    race_block *joined = race_take(r, 2 * KIB, A);
    if (r->stopped) return;
    race_write(r, pending, D);
    race_write(r, kept, D);
    race_write(r, joined, A);
    race_order(r, D, A);
    race_record_stream(r, joined, D);
    race_read(r, joined, D);
    race_give(r, pending);
    race_renew(r, D);
    race_block *again = race_take(r, 2 * KIB, A), *fresh = race_take(r, 2 * KIB, D);
    if (r->stopped) return;
    race_write(r, again, A);
    race_write(r, fresh, D);
    race_record_stream(r, kept, D); /* the new stream's */
    race_read(r, kept, D);
    race_read(r, again, A);
    race_give(r, joined);
    race_give(r, kept);
    race_give(r, fresh);
    race_renew(r, D);
    race_block *all = race_take(r, 4 * KIB, B);
    if (r->stopped) return;
    race_write(r, all, B);
    race_read(r, all, B);
    race_read_part(r, all, B, 0);
}

/* The new stream in a slot uses a freed range of the old one's, and hands it on. */
static void slot_reuse_hands_on(race_rig *r)
{
    race_block *p = race_take(r, 8 * KIB, A);
    if (r->stopped) return;
    race_write(r, p, A);
    race_give(r, p);
    race_renew(r, A);
    race_block *q = race_take(r, 8 * KIB, A);
    if (r->stopped) return;
    race_write(r, q, A);
    race_read(r, q, A);
    race_give(r, q);
    race_block *b = race_take(r, 8 * KIB, B);
    if (r->stopped) return;
    race_write(r, b, B);
    race_read(r, b, B);
}

/* Memory goes back to the device while work on it was just given. */
static void trim_in_flight(race_rig *r)
{
    for (int i = 0; i < 3; i++) {
        race_block *p = race_take(r, 4 * KIB, A), *q = race_take(r, 4 * KIB, B);
        if (r->stopped) return;
        race_write(r, p, A);
        race_write(r, q, B);
        race_read(r, p, A);
        race_give(r, p);
        race_trim(r);
        race_read(r, q, B);
        race_give(r, q);
    }
}

#define ONE(name, streams, budget, every)                                                              \
    {                                                                                                  \
#name, name, streams, (budget)*KIB, (budget)*KIB, FSDP_ALLOC_WAIT_FIRST, 1, every, 0, 0, false \
    }

const race_scenario race_scenarios[] = {
    ONE(three_stream_handover, 3, 8, 4000),
    ONE(handover_through_a_third_stream, 3, 8, 4000),
    ONE(merged_blocks_keep_their_users, 4, 8, 4000),
    ONE(merged_blocks_of_two_streams, 3, 8, 4000),
    ONE(ends_of_a_range_are_others, 3, 12, 4000),
    ONE(free_after_wait_on_another_stream, 3, 4, 4000),
    ONE(d2h_of_freed_block, 2, 4, 4000),
    ONE(two_compute_streams, 2, 8, 4000),
    ONE(record_stream_before_use, 3, 4, 4000),
    ONE(record_stream_during_use, 3, 4, 4000),
    ONE(record_stream_after_use, 3, 4, 4000),
    ONE(record_stream_first_use, 3, 4, 4000),
    ONE(record_use_narrow, 2, 8, 4000),
    ONE(record_use_after_a_fence, 3, 4, 4000),
    ONE(free_after_an_older_fence, 2, 4, 4000),
    ONE(event_recorded_again, 3, 4, 4000),
    ONE(stall_of_each_stream, 4, 8, 4000),
    ONE(ring_overflow, 4, 8, 0),
    ONE(ring_just_full, 4, 8, 0),
    ONE(slot_reuse, 4, 8, 4000),
    ONE(slot_reuse_hands_on, 2, 8, 4000),
    {"trim_in_flight", trim_in_flight, 2, 16 * KIB, 4 * KIB, FSDP_ALLOC_GROW_FIRST, 1, 4000, 0, 0, false},
};
const size_t n_race_scenarios = sizeof race_scenarios / sizeof *race_scenarios;
