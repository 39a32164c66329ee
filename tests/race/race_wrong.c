/* SPDX-License-Identifier: MIT */
/* Programs with a mistake in them, or that ask what a correct one may not ask, each for one of the judges: a judge who
 * never speaks would be no proof of anything. */
#include "race_rig.h"

enum { A, B };

/* The block is freed a second time. */
static void frees_twice(race_rig *r)
{
    race_block *p = race_take(r, 4 * KIB, A);
    if (r->stopped) return;
    race_block again = *p;
    race_give(r, p);
    race_give(r, &again);
}

/* B reads, and nobody records it: what A takes next is still being read, and it is poisoned under the reader's hands. */
static void forgets_to_record(race_rig *r)
{
    race_block *p = race_take(r, 4 * KIB, A);
    if (r->stopped) return;
    race_write(r, p, A);
    race_order(r, B, A);
    race_read(r, p, B);
    race_read_part(r, p, B, 0);
    race_give(r, p);
    race_block *q = race_take(r, 4 * KIB, A);
    if (r->stopped) return;
    race_write(r, q, A);
    race_read(r, q, A);
}

/* B writes what A wrote, in bytes that are disjoint in time if one is lucky. */
static void forgets_to_wait(race_rig *r)
{
    race_block *p = race_take(r, 4 * KIB, A);
    if (r->stopped) return;
    race_write(r, p, A);
    race_record_stream(r, p, B);
    race_read(r, p, B);
}

/* Bytes that went back to the device are written. */
static void writes_after_trim(race_rig *r)
{
    race_block *p = race_take(r, 4 * KIB, A);
    if (r->stopped) return;
    race_block gone = *p;
    race_give(r, p);
    race_trim(r);
    race_write(r, &gone, A);
}

/* What is asked of the device decides what it is given. */
static void asks_how_far_it_is(race_rig *r)
{
    bool done = false;
    race_block *p = race_take(r, 4 * KIB, A);
    if (r->stopped) return;
    race_write(r, p, A);
    race_event_record(r, 0, A);
    race_order(r, B, A);
    RACE_TRY(r, fsdp_event_is_done(r->event[0], &done));
    if (done) race_order(r, B, A);
    race_give(r, p);
}

#define ONE(name)                                                                  \
    {                                                                              \
#name, name, 2, 4 * KIB, 4 * KIB, FSDP_ALLOC_WAIT_FIRST, 1, 0, 0, 0, false \
    }
const race_scenario race_wrong_scenarios[RACE_JUDGES] = {
    [RACE_CALL] = ONE(frees_twice),         [RACE_DATA] = ONE(forgets_to_record),  [RACE_ORDER] = ONE(forgets_to_wait),
    [RACE_DEVICE] = ONE(writes_after_trim), [RACE_TAPE] = ONE(asks_how_far_it_is),
};
