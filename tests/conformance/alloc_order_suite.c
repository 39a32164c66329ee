/* SPDX-License-Identifier: MIT */
/* No bytes change hands without an edge, and no edge is there twice. Each scenario is judged three ways: how many waits the
 * device got and for which stream, the tape (any two touches of the same bytes must be ordered), and, where memory has
 * content, bytes that a missing edge would spoil, since delays keep the earlier owner busy. */
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
    assert_bytes(sc->rig.suite, ptr, byte, bytes);
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
        cmocka_unit_test_prestate(alloc_random_programs_have_no_unordered_pair, state),
    };
    return cmocka_run_group_tests_name("order", tests, NULL, NULL);
}
