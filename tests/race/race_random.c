/* SPDX-License-Identifier: MIT */
/* Random programs of a correct caller: whoever touches a block comes after those who wrote it (a writer, after its readers
 * too), by any of the ways that there are, and every use is recorded before the block is freed: before it, after it, at
 * the free, as record_stream or as record_use. Budgets are so small that most blocks are somebody's old bytes. */
#include "race_rig.h"

static int draw_stream(race_rig *r)
{
    uint32_t n = r->scenario->n_streams;
    uint64_t s = race_draw(r, n + 1);
    return s == n ? RACE_COPY : (int)s;
}

static race_block *draw_block(race_rig *r)
{
    for (int tries = 0; tries < 8; tries++) {
        race_block *block = &r->live[race_draw(r, RACE_LIVE)];
        if (block->ptr != NULL) return block;
    }
    for (int i = 0; i < RACE_LIVE; i++)
        if (r->live[i].ptr != NULL) return &r->live[i];
    return NULL;
}

static uint32_t bit(int stream) { return 1u << stream; }

/* ---- Order ---- */

static void come_after(race_rig *r, int stream, int other)
{
    if (stream == other) return;
    int event = (int)race_draw(r, RACE_EVENTS), third = draw_stream(r);
    switch (race_draw(r, 4)) {
    case 0: /* through a third one */
        if (third != other) race_order(r, third, other);
        if (third != stream) race_order(r, stream, third);
        break;
    case 1:
        race_event_record(r, event, other);
        race_event_wait(r, event, stream);
        break;
    default: race_order(r, stream, other); break;
    }
}

/* What has to be before stream touches the block. */
static void come_after_users(race_rig *r, const race_block *block, int stream, bool write)
{
    come_after(r, stream, block->last);
    for (int t = 0; write && t <= RACE_STREAMS; t++)
        if (block->readers & bit(t)) come_after(r, stream, t);
}

/* ---- Uses ---- */

static void note_use(race_block *block, int stream, bool write)
{
    if (write) block->last = stream, block->readers = 0;
    else block->readers |= bit(stream);
    if (!(block->declared & bit(stream))) block->owed |= bit(stream);
}

static void declare(race_rig *r, race_block *block, int stream)
{
    race_record_stream(r, block, stream);
    block->declared |= bit(stream);
    block->owed &= ~bit(stream);
}

static void record_use(race_rig *r, race_block *block, int stream)
{
    race_record_use(r, block, stream);
    block->owed &= ~bit(stream);
}

static void some_other_work(race_rig *r, int stream)
{
    switch (race_draw(r, 6)) {
    case 0: race_event_record(r, (int)race_draw(r, RACE_EVENTS), stream); break;
    case 1: come_after(r, draw_stream(r), stream); break;
    case 2: RACE_TRY(r, fsdp_stream_delay(r->s[stream], 1000)); break;
    default: break;
    }
}

static void touch(race_rig *r)
{
    race_block *block = draw_block(r);
    if (block == NULL) return;
    int stream = race_draw(r, 2) ? block->last : draw_stream(r);
    bool write = block->byte == 0 || race_draw(r, 2) == 0;
    uint64_t way = race_draw(r, 5);
    /* Of a block that nobody has touched, to be recorded is to come after its last owners. */
    bool untouched = block->byte == 0 && block->owed == 0 && block->last == block->stream;
    if (way == 0) declare(r, block, stream);
    if (way != 0 || !untouched) come_after_users(r, block, stream, write);
    some_other_work(r, stream);
    if (write) race_write(r, block, stream);
    else if (race_draw(r, 2)) race_read(r, block, stream);
    else race_read_part(r, block, stream, 0);
    note_use(block, stream, write);
    if (way == 1) some_other_work(r, stream), declare(r, block, stream);
    if (way == 2) record_use(r, block, stream);
    if (way == 3) some_other_work(r, stream), record_use(r, block, stream);
}

/* Both blocks in one operation. */
static void copy(race_rig *r)
{
    race_block *from = draw_block(r), *to = draw_block(r);
    if (from == NULL || from == to || from->byte == 0 || to->bytes > from->bytes) return;
    int stream = race_draw(r, 2) ? to->last : draw_stream(r);
    come_after_users(r, from, stream, false);
    come_after_users(r, to, stream, true);
    race_copy(r, to, from, stream);
    note_use(from, stream, false);
    note_use(to, stream, true);
}

/* ---- Blocks ---- */

static void take(race_rig *r)
{
    int n_live = 0;
    for (int i = 0; i < RACE_LIVE; i++) n_live += r->live[i].ptr != NULL;
    if (n_live == RACE_LIVE) return;
    uint64_t bytes = 1 + race_draw(r, race_draw(r, 4) == 0 ? 12 * KIB : 1500);
    race_block *block = race_try_take(r, bytes, draw_stream(r));
    if (block == NULL || race_draw(r, 2)) return;
    race_write(r, block, block->stream); /* nothing but the allocator orders this */
    note_use(block, block->stream, true);
}

static void give_block(race_rig *r, race_block *block)
{
    if (block == NULL) return;
    for (int t = 0; t <= RACE_STREAMS; t++)
        if (block->owed & bit(t)) race_draw(r, 2) ? declare(r, block, t) : record_use(r, block, t);
    race_give(r, block);
}

/* What the old stream did is over; what it owned is its owner's no more, as far as the contract goes. */
static void renew(race_rig *r)
{
    int stream = (int)race_draw(r, r->scenario->n_streams);
    race_renew(r, stream);
    for (int i = 0; i < RACE_LIVE; i++) {
        race_block *block = &r->live[i];
        block->declared &= ~bit(stream);
        block->owed &= ~bit(stream);
        block->readers &= ~bit(stream);
        if (block->stream == stream) block->stream = -1;
    }
}

/* More fences than a stream keeps, on the stream of a block that was freed just now. */
static void leave_the_ring(race_rig *r)
{
    race_block *block = draw_block(r);
    int stream = block != NULL ? block->last : draw_stream(r), event = (int)race_draw(r, RACE_EVENTS);
    give_block(r, block);
    for (uint64_t n = 60 + race_draw(r, 12); n > 0; n--) race_event_record(r, event, stream);
}

static void play(race_rig *r)
{
    for (uint32_t i = 0; i < r->scenario->n_moves && !r->stopped; i++) {
        uint64_t what = race_draw(r, 1000);
        if (what < 250) take(r);
        else if (what < 460) give_block(r, draw_block(r));
        else if (what < 840) touch(r);
        else if (what < 900) copy(r);
        else if (what < 940) come_after(r, draw_stream(r), draw_stream(r));
        else if (what < 944) leave_the_ring(r);
        else if (what < 965) race_event_record(r, (int)race_draw(r, RACE_EVENTS), draw_stream(r));
        else if (what < 990) race_event_wait(r, (int)race_draw(r, RACE_EVENTS), draw_stream(r));
        else if (what < 997) renew(r);
        else race_trim(r);
        r->verdict->n_moves++;
    }
}

race_scenario race_random_program(uint64_t number, uint32_t n_moves)
{
    return (race_scenario){.name = "random",
                           .play = play,
                           .n_streams = 2 + (uint32_t)(number / 2 % 5),
                           .budget_bytes = (16 + 8 * (number / 10 % 3)) * KIB,
                           .segment_bytes = number % 3 ? 8 * KIB : 16 * KIB,
                           .policy = number % 2 ? FSDP_ALLOC_GROW_FIRST : FSDP_ALLOC_WAIT_FIRST,
                           .number = number,
                           .n_moves = n_moves};
}
