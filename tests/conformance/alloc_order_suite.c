/* SPDX-License-Identifier: MIT */
/* No bytes change hands without an edge, and no edge is there twice. Each scenario is judged three ways: how many waits the
 * device got and for which stream, the tape (any two touches of the same bytes must be ordered), and, where memory has
 * content, bytes that a missing edge would spoil, since delays keep the earlier owner busy. Then random programs. */
#include "alloc_suite.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "hb_oracle.h"

enum { A, B, C, D, ROOM = 16 * KIB, LANES = 3, MAX_RECORDS = 8192 };

static const uint64_t SLOW_NS = 3000000;

typedef struct scene {
    alloc_rig rig;
    fsdp_trace *trace;
    uint64_t seen; /* records that expect_waits has looked at */
} scene;

static int open_scene(void **state)
{
    alarm(60);
    scene *sc = calloc(1, sizeof *sc);
    if (sc == NULL) return -1;
    alloc_rig_open(&sc->rig, *state, 0, 0, 10000000000ull, NULL);
    make_allocator(&sc->rig, ROOM, ROOM); /* one segment: neither policy can grow */
    OK(fsdp_trace_start(sc->rig.ctx, MAX_RECORDS, &sc->trace));
    *state = sc;
    return 0;
}

static int close_scene(void **state)
{
    scene *sc = *state;
    fsdp_trace_destroy(sc->trace);
    alloc_rig_close(&sc->rig);
    free(sc);
    return 0;
}

static char *take_room(scene *sc, int stream) { return take(&sc->rig, ROOM, stream); }

/* Keeps the stream busy, then writes: whoever does not wait writes first and is overwritten. */
static void slow_write(scene *sc, int stream, void *ptr, uint8_t byte, uint64_t bytes)
{
    OK(fsdp_stream_delay(sc->rig.s[stream], SLOW_NS));
    touch(&sc->rig, stream, ptr, byte, bytes);
}

/* Since the last call of this, `stream` was told to wait exactly for these (a mask of streams), in any order. */
static void expect_waits(scene *sc, int stream, unsigned for_streams)
{
    unsigned got = 0;
    for (; sc->seen < fsdp_trace_count(sc->trace); sc->seen++) {
        const fsdp_trace_record *r = fsdp_trace_at(sc->trace, sc->seen);
        if (r->kind != FSDP_RECORD_WAIT || r->reason != FSDP_REASON_REUSE) continue;
        assert_int_equal(r->stream, LANES + stream);
        assert_int_equal(got >> (r->other - LANES) & 1, 0);
        got |= 1u << (r->other - LANES);
    }
    assert_int_equal(got, for_streams);
}

/* Nothing raced, and the last writer's bytes are what is there. */
static void expect_bytes(scene *sc, const char *ptr, uint8_t byte, uint64_t bytes)
{
    OK(fsdp_trace_stop_host(sc->trace)); /* drains */
    char text[1024];
    assert_true(fsdp_trace_dropped(sc->trace) == 0);
    if (hb_check(sc->trace, text, sizeof text) != 0) fail_msg("%s", text);
    if (!sc->rig.suite->has_data) return;
    for (uint64_t i = 0; i < bytes; i++) assert_int_equal((uint8_t)ptr[i], byte);
}

/* ---- One owner after another ---- */

static void the_same_stream_needs_no_wait(void **state)
{
    scene *sc = *state;
    char *p = take_room(sc, A);
    slow_write(sc, A, p, 1, ROOM);
    give(&sc->rig, p);
    assert_ptr_equal(take_room(sc, A), p);
    expect_waits(sc, A, 0);
    touch(&sc->rig, A, p, 2, ROOM);
    expect_bytes(sc, p, 2, ROOM);
    give(&sc->rig, p);
}

static void another_stream_waits_once(void **state)
{
    scene *sc = *state;
    char *p = take_room(sc, A);
    slow_write(sc, A, p, 1, ROOM);
    give(&sc->rig, p);
    assert_ptr_equal(take_room(sc, B), p);
    expect_waits(sc, B, 1 << A);
    touch(&sc->rig, B, p, 2, ROOM);
    give(&sc->rig, p);
    assert_ptr_equal(take_room(sc, B), p);
    expect_waits(sc, B, 0);
    expect_bytes(sc, p, 2, ROOM);
    give(&sc->rig, p);
}

static void an_order_that_exists_is_found_through_a_third_stream(void **state)
{
    scene *sc = *state;
    char *p = take_room(sc, A);
    slow_write(sc, A, p, 1, ROOM);
    give(&sc->rig, p);
    order(&sc->rig, B, A);
    order(&sc->rig, C, B);
    assert_ptr_equal(take_room(sc, C), p);
    expect_waits(sc, C, 0);
    touch(&sc->rig, C, p, 2, ROOM);
    expect_bytes(sc, p, 2, ROOM);
    give(&sc->rig, p);
}

static void an_order_from_before_the_last_use_does_not_count(void **state)
{
    scene *sc = *state;
    char *p = take_room(sc, A);
    touch(&sc->rig, A, p, 1, ROOM);
    order(&sc->rig, B, A);
    slow_write(sc, A, p, 2, ROOM); /* after what b waited for */
    give(&sc->rig, p);
    assert_ptr_equal(take_room(sc, B), p);
    expect_waits(sc, B, 1 << A);
    touch(&sc->rig, B, p, 3, ROOM);
    expect_bytes(sc, p, 3, ROOM);
    give(&sc->rig, p);
}

/* A use counts until free, not from where it was declared: the stream's fence in between closes the epoch that the
 * declaration stood in, and the work comes after it. */
static void a_recorded_stream_uses_the_block_until_it_is_freed(void **state)
{
    scene *sc = *state;
    char *p = take_room(sc, A);
    OK(fsdp_allocator_record_stream(sc->rig.a, p, sc->rig.s[B]));
    order(&sc->rig, C, B);
    slow_write(sc, B, p, 1, ROOM);
    give(&sc->rig, p);
    assert_ptr_equal(take_room(sc, C), p);
    expect_waits(sc, C, 1 << A | 1 << B);
    touch(&sc->rig, C, p, 2, ROOM);
    expect_bytes(sc, p, 2, ROOM);
    give(&sc->rig, p);
}

static void declared_after_the_use_it_counts_the_same(void **state)
{
    scene *sc = *state;
    char *p = take_room(sc, A);
    order(&sc->rig, B, A);
    slow_write(sc, B, p, 1, ROOM);
    order(&sc->rig, D, B);
    slow_write(sc, B, p, 2, ROOM);
    OK(fsdp_allocator_record_stream(sc->rig.a, p, sc->rig.s[B]));
    give(&sc->rig, p);
    assert_ptr_equal(take_room(sc, A), p);
    expect_waits(sc, A, 1 << B);
    touch(&sc->rig, A, p, 3, ROOM);
    expect_bytes(sc, p, 3, ROOM);
    give(&sc->rig, p);
}

/* Freed once somebody has waited for the other stream, but not the stream that takes the bytes next. */
static void freed_after_a_wait_of_another_stream_it_is_still_waited_for(void **state)
{
    scene *sc = *state;
    char *p = take_room(sc, A);
    OK(fsdp_allocator_record_stream(sc->rig.a, p, sc->rig.s[B]));
    order(&sc->rig, B, A);
    slow_write(sc, B, p, 1, ROOM);
    order(&sc->rig, C, B);
    give(&sc->rig, p);
    assert_ptr_equal(take_room(sc, A), p);
    expect_waits(sc, A, 1 << B);
    touch(&sc->rig, A, p, 2, ROOM);
    expect_bytes(sc, p, 2, ROOM);
    give(&sc->rig, p);
}

static void a_stream_joined_before_the_free_is_waited_for_until_the_free(void **state)
{
    scene *sc = *state;
    char *p = take_room(sc, A);
    OK(fsdp_allocator_record_stream(sc->rig.a, p, sc->rig.s[B]));
    order(&sc->rig, B, A);
    slow_write(sc, B, p, 1, ROOM);
    order(&sc->rig, A, B);
    give(&sc->rig, p); /* the caller's kernels are not seen: b may have been given more */
    assert_ptr_equal(take_room(sc, A), p);
    expect_waits(sc, A, 1 << B);
    touch(&sc->rig, A, p, 2, ROOM);
    expect_bytes(sc, p, 2, ROOM);
    give(&sc->rig, p);
}

/* The narrow form: what b is given after it is nobody's business. */
static void a_recorded_use_counts_up_to_the_call(void **state)
{
    scene *sc = *state;
    char *p = take_room(sc, A);
    order(&sc->rig, B, A);
    slow_write(sc, B, p, 1, ROOM);
    OK(fsdp_allocator_record_use(sc->rig.a, p, sc->rig.s[B]));
    order(&sc->rig, A, B);
    OK(fsdp_stream_delay(sc->rig.s[B], SLOW_NS));
    give(&sc->rig, p);
    assert_ptr_equal(take_room(sc, A), p);
    expect_waits(sc, A, 0);
    touch(&sc->rig, A, p, 2, ROOM);
    expect_bytes(sc, p, 2, ROOM);
    give(&sc->rig, p);
}

static void a_recorded_use_is_in_the_epoch_of_the_call(void **state)
{
    scene *sc = *state;
    char *p = take_room(sc, A);
    order(&sc->rig, B, A);
    order(&sc->rig, C, B); /* closes an epoch of b before the use */
    slow_write(sc, B, p, 1, ROOM);
    OK(fsdp_allocator_record_use(sc->rig.a, p, sc->rig.s[B]));
    give(&sc->rig, p);
    order(&sc->rig, C, A);
    assert_ptr_equal(take_room(sc, C), p);
    expect_waits(sc, C, 1 << B);
    touch(&sc->rig, C, p, 2, ROOM);
    expect_bytes(sc, p, 2, ROOM);
    give(&sc->rig, p);
}

/* b joins a block whose bytes d may still be using: a has waited for d, b has not. */
static void a_stream_that_joins_waits_for_the_last_owner_too(void **state)
{
    scene *sc = *state;
    char *p = take_room(sc, D);
    slow_write(sc, D, p, 1, ROOM);
    give(&sc->rig, p);
    assert_ptr_equal(take_room(sc, A), p);
    expect_waits(sc, A, 1 << D);
    OK(fsdp_allocator_record_stream(sc->rig.a, p, sc->rig.s[B]));
    expect_waits(sc, B, 1 << D);
    touch(&sc->rig, B, p, 2, ROOM);
    expect_bytes(sc, p, 2, ROOM);
    give(&sc->rig, p);
}

static void a_stream_ordered_after_the_allocation_joins_without_a_wait(void **state)
{
    scene *sc = *state;
    char *p = take_room(sc, D);
    slow_write(sc, D, p, 1, ROOM);
    give(&sc->rig, p);
    assert_ptr_equal(take_room(sc, A), p);
    expect_waits(sc, A, 1 << D);
    order(&sc->rig, B, A);
    OK(fsdp_allocator_record_stream(sc->rig.a, p, sc->rig.s[B]));
    expect_waits(sc, B, 0);
    touch(&sc->rig, B, p, 2, ROOM);
    expect_bytes(sc, p, 2, ROOM);
    give(&sc->rig, p);
}

/* ---- Parts of ranges ---- */

static void bytes_need_the_waits_of_their_own_last_owners_only(void **state)
{
    scene *sc = *state;
    char *part[4];
    for (int i = 0; i < 4; i++) part[i] = take(&sc->rig, ROOM / 4, i);
    for (int i = 0; i < 4; i++) slow_write(sc, i, part[i], 1, ROOM / 4);
    give(&sc->rig, part[1]), give(&sc->rig, part[3]), give(&sc->rig, part[0]), give(&sc->rig, part[2]);
    /* One range of four histories. Where more could be had, c's own in the middle comes first: no wait. */
    bool grows = sc->rig.suite->policy == FSDP_ALLOC_GROW_FIRST;
    char *own = grows ? take(&sc->rig, ROOM / 4, C) : NULL;
    expect_waits(sc, C, 0);
    if (grows) assert_ptr_equal(own, part[2]);
    /* Then the end that was freed longest ago: of the whole, d's; of what is left below c's, b's. */
    char *p = take(&sc->rig, ROOM / 4, C);
    expect_waits(sc, C, grows ? 1 << B : 1 << D);
    assert_ptr_equal(p, grows ? part[1] : part[3]);
    touch(&sc->rig, C, p, 2, ROOM / 4);
    expect_bytes(sc, p, 2, ROOM / 4);
    give(&sc->rig, p), give(&sc->rig, own);
}

static void bytes_of_several_owners_wait_for_each_of_them(void **state)
{
    scene *sc = *state;
    char *part[4];
    for (int i = 0; i < 4; i++) part[i] = take(&sc->rig, ROOM / 4, i);
    for (int i = 0; i < 3; i++) slow_write(sc, i, part[i], 1, ROOM / 4);
    for (int i = 0; i < 3; i++) give(&sc->rig, part[i]);
    char *p = take(&sc->rig, ROOM / 4 + ROOM / 2, D);
    expect_waits(sc, D, 1 << A | 1 << B | 1 << C);
    assert_ptr_equal(p, part[0]);
    touch(&sc->rig, D, p, 2, ROOM / 4 + ROOM / 2);
    expect_bytes(sc, p, 2, ROOM / 4 + ROOM / 2);
    give(&sc->rig, p), give(&sc->rig, part[3]);
}

static void one_wait_stands_for_several_owners_where_one_has_waited_for_the_others(void **state)
{
    scene *sc = *state;
    char *part[2];
    for (int i = 0; i < 2; i++) part[i] = take(&sc->rig, ROOM / 2, i);
    slow_write(sc, A, part[0], 1, ROOM / 2);
    OK(fsdp_allocator_record_use(sc->rig.a, part[0], sc->rig.s[A]));
    give(&sc->rig, part[0]);
    order(&sc->rig, B, A);
    slow_write(sc, B, part[1], 1, ROOM / 2);
    give(&sc->rig, part[1]);
    char *p = take_room(sc, D);
    expect_waits(sc, D, 1 << B);
    touch(&sc->rig, D, p, 2, ROOM);
    expect_bytes(sc, p, 2, ROOM);
    give(&sc->rig, p);
}

/* ---- The host waits ---- */

static void what_the_host_has_waited_for_needs_no_wait(void **state)
{
    scene *sc = *state;
    alloc_rig *r = &sc->rig;
    fsdp_event *event;
    OK(fsdp_event_create(r->ctx, &event));
    char *p = take_room(sc, A);
    slow_write(sc, A, p, 1, ROOM);
    OK(fsdp_allocator_record_stream(r->a, p, r->s[B]));
    touch(r, A, p, 1, ROOM);
    give(r, p);
    OK(fsdp_stream_drain_host(r->s[A], UINT64_MAX));
    OK(fsdp_stream_drain_host(r->s[B], UINT64_MAX));
    assert_int_equal(stats_of(r).active, 0); /* its own stream comes after b's use, too */
    assert_ptr_equal(take_room(sc, C), p);
    expect_waits(sc, C, 0);
    slow_write(sc, C, p, 2, ROOM);
    give(r, p);
    OK(fsdp_event_record(event, r->s[C]));
    OK(fsdp_event_wait_host(event, UINT64_MAX));
    assert_ptr_equal(take_room(sc, D), p);
    expect_waits(sc, D, 0);
    touch(r, D, p, 3, ROOM);
    expect_bytes(sc, p, 3, ROOM);
    give(r, p);
    fsdp_event_destroy(event);
}

static void what_came_after_the_event_that_the_host_waited_for_needs_one(void **state)
{
    scene *sc = *state;
    alloc_rig *r = &sc->rig;
    fsdp_event *event;
    OK(fsdp_event_create(r->ctx, &event));
    char *p = take_room(sc, A);
    OK(fsdp_event_record(event, r->s[A]));
    slow_write(sc, A, p, 1, ROOM);
    give(r, p);
    OK(fsdp_event_wait_host(event, UINT64_MAX));
    assert_ptr_equal(take_room(sc, B), p);
    expect_waits(sc, B, 1 << A);
    touch(r, B, p, 2, ROOM);
    expect_bytes(sc, p, 2, ROOM);
    give(r, p);
    fsdp_event_destroy(event);
}

/* ---- Streams that go ---- */

static void a_released_stream_needs_no_wait(void **state)
{
    scene *sc = *state;
    alloc_rig *r = &sc->rig;
    char *p = take_room(sc, A);
    slow_write(sc, A, p, 1, ROOM);
    OK(fsdp_stream_release(r->s[A])); /* waits for it; the block is still live */
    r->s[A] = NULL;
    give(r, p);
    assert_ptr_equal(take_room(sc, B), p);
    expect_waits(sc, B, 0);
    give(r, p);
    OK(fsdp_trace_stop_host(sc->trace));
}

static void a_stream_in_the_slot_of_another_is_protected_as_itself(void **state)
{
    scene *sc = *state;
    alloc_rig *r = &sc->rig;
    char *p = take(r, ROOM / 2, A), *q = take(r, ROOM / 2, A);
    OK(fsdp_stream_release(r->s[A]));
    OK(fsdp_stream_create(r->ctx, "next", &r->s[A]));
    void *none;
    assert_int_equal(fsdp_allocator_alloc(r->a, ROOM, r->s[B], NULL, &none), FSDP_ERR_NO_MEMORY);
    assert_non_null(strstr(fsdp_last_error(), "live on a released stream"));
    give(r, p);
    give(r, q);
    p = take_room(sc, A);
    slow_write(sc, A, p, 1, ROOM);
    give(r, p);
    sc->seen = fsdp_trace_count(sc->trace);
    assert_ptr_equal(take_room(sc, B), p);
    expect_waits(sc, B, 1 << A);
    touch(r, B, p, 2, ROOM);
    expect_bytes(sc, p, 2, ROOM);
    give(r, p);
}

/* ---- Random programs ---- */

/* A judge of the tape who knows nothing of clocks either, by plain search over all pairs. Unlike hb_check it knows what
 * the host did: when a stream is released, all that it was given comes before all that anybody is given later. */
enum { MAX_RELEASES = 64, MAX_TOUCHES = 4096, SLOTS = 16 };

typedef struct judged {
    uint32_t at[SLOTS]; /* records of each stream that come before this touch, counted from 1 on the tape */
    uint64_t record;
    int32_t stream;
    fsdp_trace_access access;
} judged;

typedef struct release {
    uint64_t at; /* records on the tape by then */
    int32_t slot;
} release;

typedef struct last_record {
    uint64_t event;
    uint32_t at[SLOTS];
} last_record;

static void raise(uint32_t *into, const uint32_t *other)
{
    for (int t = 0; t < SLOTS; t++)
        if (other[t] > into[t]) into[t] = other[t];
}

static bool overlap(const fsdp_trace_access *x, const fsdp_trace_access *y)
{
    return (x->write || y->write) && x->begin < y->begin + y->bytes && y->begin < x->begin + x->bytes;
}

/* How many pairs of touches are not ordered. */
static size_t count_races(const fsdp_trace *trace, const release *released, int n_released)
{
    static judged touched[MAX_TOUCHES];
    static last_record event[MAX_RECORDS];
    uint32_t after[SLOTS][SLOTS] = {{0}};
    size_t n = 0, n_events = 0, races = 0;
    for (uint64_t i = 0; i < fsdp_trace_count(trace); i++) {
        const fsdp_trace_record *r = fsdp_trace_at(trace, i);
        for (; n_released > 0 && released->at <= i; released++, n_released--)
            for (int s = 0; s < SLOTS; s++) after[s][released->slot] = (uint32_t)released->at;
        uint32_t *mine = after[r->stream];
        mine[r->stream] = (uint32_t)i + 1;
        size_t e = 0;
        while (e < n_events && event[e].event != r->event) e++;
        if (r->kind == FSDP_RECORD_WAIT && e < n_events) raise(mine, event[e].at);
        if (r->kind == FSDP_RECORD_EVENT) {
            if (e == n_events) event[n_events++].event = r->event;
            memcpy(event[e].at, mine, sizeof event[e].at);
        }
        for (uint32_t a = 0; a < r->n_accesses; a++) {
            for (size_t k = 0; k < n; k++)
                races += overlap(&touched[k].access, &r->access[a]) && touched[k].record >= mine[touched[k].stream];
            assert_true(n < MAX_TOUCHES);
            touched[n].record = i;
            touched[n].stream = r->stream;
            touched[n++].access = r->access[a];
        }
    }
    return races;
}

enum { MAX_LIVE = 20, MAX_READS = 1024, READ_BYTES = 64 };

typedef struct owned {
    char *ptr;
    uint64_t bytes;
    int last;          /* stream of the last touch */
    unsigned declared; /* mask: streams that it belongs to until free */
    unsigned reader;   /* mask: streams that have waited for the last touch */
    uint8_t byte;      /* what is in it; 0: nothing was written */
} owned;

typedef struct program {
    alloc_rig rig;
    owned live[MAX_LIVE];
    int n_live;
    uint64_t random;
    uint8_t next_byte;
    release released[MAX_RELEASES];
    int n_released;
    struct {
        uint8_t want, got[READ_BYTES];
    } read[MAX_READS];
    int n_reads;
    fsdp_trace *trace;
} program;

static uint64_t draw(program *g, uint64_t below)
{
    g->random ^= g->random << 13, g->random ^= g->random >> 7, g->random ^= g->random << 17;
    return (g->random >> 11) % below;
}

static void random_alloc(program *g)
{
    if (g->n_live == MAX_LIVE) return;
    uint64_t bytes = 1 + draw(g, draw(g, 4) == 0 ? 12 * KIB : 1500);
    int s = (int)draw(g, ALLOC_STREAMS);
    void *ptr = NULL;
    fsdp_status status = fsdp_allocator_alloc(g->rig.a, bytes, g->rig.s[s], NULL, &ptr);
    if (status == FSDP_ERR_NO_MEMORY) return;
    OK(status);
    g->live[g->n_live++] = (owned){ptr, bytes, s, 1u << s, 0, 0};
}

static void random_free(program *g)
{
    if (g->n_live == 0) return;
    int i = (int)draw(g, (uint64_t)g->n_live);
    give(&g->rig, g->live[i].ptr);
    g->live[i] = g->live[--g->n_live];
}

/* Use a block on a stream, as a correct caller: ordered after the block's last touch, declared one way or the other. */
static void random_touch(program *g)
{
    if (g->n_live == 0) return;
    owned *o = &g->live[draw(g, (uint64_t)g->n_live)];
    int t = (int)draw(g, ALLOC_STREAMS);
    bool write = o->byte == 0 || draw(g, 2) == 0 || g->n_reads == MAX_READS;
    unsigned way = (unsigned)draw(g, 3), mine = 1u << t;
    if (t != o->last) order(&g->rig, t, o->last);
    if (way == 0) OK(fsdp_allocator_record_stream(g->rig.a, o->ptr, g->rig.s[t]));
    if (draw(g, 3) == 0) OK(fsdp_stream_delay(g->rig.s[t], 1000 + draw(g, 30000)));
    if (draw(g, 4) == 0) order(&g->rig, (int)draw(g, ALLOC_STREAMS), t); /* closes t's epoch between the two */
    if (write) {
        o->byte = g->next_byte = (uint8_t)(g->next_byte % 255 + 1);
        touch(&g->rig, t, o->ptr, o->byte, o->bytes);
    } else {
        uint64_t n = o->bytes < READ_BYTES ? o->bytes : READ_BYTES;
        g->read[g->n_reads].want = o->byte;
        memset(g->read[g->n_reads].got, o->byte, READ_BYTES);
        OK(fsdp_stream_copy(g->rig.s[t], g->read[g->n_reads++].got, o->ptr + o->bytes - n, n));
    }
    if (way == 1) OK(fsdp_allocator_record_stream(g->rig.a, o->ptr, g->rig.s[t]));
    if (way < 2) o->declared |= mine;
    if (!(o->declared & mine)) OK(fsdp_allocator_record_use(g->rig.a, o->ptr, g->rig.s[t]));
    o->last = t;
}

/* Release a stream and open another in its slot. Blocks that it owned stay, and belong to the new one from then on. */
static void random_release(program *g)
{
    if (g->n_released == MAX_RELEASES) return;
    int s = (int)draw(g, ALLOC_STREAMS);
    OK(fsdp_stream_release(g->rig.s[s]));
    g->released[g->n_released++] = (release){fsdp_trace_count(g->trace), LANES + s};
    OK(fsdp_stream_create(g->rig.ctx, "again", &g->rig.s[s]));
    for (int i = 0; i < g->n_live; i++) g->live[i].declared &= ~(1u << s);
}

static void run_program(const alloc_suite *suite, uint64_t seed, int moves, bool with_releases)
{
    static program g;
    memset(&g, 0, sizeof g);
    g.random = seed * 0x9e3779b97f4a7c15ull;
    alloc_rig_open(&g.rig, suite, 15000, seed, 10000000000ull, NULL);
    make_allocator(&g.rig, 24 * KIB, 8 * KIB);
    OK(fsdp_trace_start(g.rig.ctx, MAX_RECORDS, &g.trace));
    for (int i = 0; i < moves; i++) {
        uint64_t what = draw(&g, 100);
        if (what < 22) random_alloc(&g);
        else if (what < 40) random_free(&g);
        else if (what < 88) random_touch(&g);
        else if (what < 98 || !with_releases) order(&g.rig, (int)draw(&g, ALLOC_STREAMS), (int)draw(&g, ALLOC_STREAMS));
        else random_release(&g);
    }
    while (g.n_live > 0) random_free(&g);
    OK(fsdp_trace_stop_host(g.trace));
    assert_true(fsdp_trace_dropped(g.trace) == 0);
    size_t races = count_races(g.trace, g.released, g.n_released);
    if (races > 0) fail_msg("seed %llu: %zu pairs of touches are not ordered", (unsigned long long)seed, races);
    char text[1024];
    if (!with_releases && hb_check(g.trace, text, sizeof text) != 0)
        fail_msg("seed %llu: %s", (unsigned long long)seed, text);
    for (int i = 0; suite->has_data && i < g.n_reads; i++)
        for (int k = 0; k < READ_BYTES; k++)
            if (g.read[i].got[k] != g.read[i].want)
                fail_msg("seed %llu: read %d found another owner's bytes", (unsigned long long)seed, i);
    fsdp_trace_destroy(g.trace);
    alloc_rig_close(&g.rig);
}

static void random_programs_have_no_unordered_pair(void **state)
{
    const alloc_suite *suite = *state;
    alarm(60);
    for (uint64_t seed = 1; seed <= (suite->has_data ? 6 : 60); seed++) run_program(suite, seed, 700, seed % 2 == 0);
}

int run_alloc_order_suite(const alloc_suite *suite)
{
#define TEST(name) cmocka_unit_test_prestate_setup_teardown(name, open_scene, close_scene, state)
    void *state = (void *)(uintptr_t)suite;
    const struct CMUnitTest tests[] = {
        TEST(the_same_stream_needs_no_wait),
        TEST(another_stream_waits_once),
        TEST(an_order_that_exists_is_found_through_a_third_stream),
        TEST(an_order_from_before_the_last_use_does_not_count),
        TEST(a_recorded_stream_uses_the_block_until_it_is_freed),
        TEST(declared_after_the_use_it_counts_the_same),
        TEST(freed_after_a_wait_of_another_stream_it_is_still_waited_for),
        TEST(a_stream_joined_before_the_free_is_waited_for_until_the_free),
        TEST(a_recorded_use_counts_up_to_the_call),
        TEST(a_recorded_use_is_in_the_epoch_of_the_call),
        TEST(a_stream_that_joins_waits_for_the_last_owner_too),
        TEST(a_stream_ordered_after_the_allocation_joins_without_a_wait),
        TEST(bytes_need_the_waits_of_their_own_last_owners_only),
        TEST(bytes_of_several_owners_wait_for_each_of_them),
        TEST(one_wait_stands_for_several_owners_where_one_has_waited_for_the_others),
        TEST(what_the_host_has_waited_for_needs_no_wait),
        TEST(what_came_after_the_event_that_the_host_waited_for_needs_one),
        TEST(a_released_stream_needs_no_wait),
        TEST(a_stream_in_the_slot_of_another_is_protected_as_itself),
        cmocka_unit_test_prestate(random_programs_have_no_unordered_pair, state),
    };
    return cmocka_run_group_tests_name("order", tests, NULL, NULL);
}
