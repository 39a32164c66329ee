/* SPDX-License-Identifier: MIT */
/* fsdp_memory_write_json: what the file says of programs whose blocks, streams and events are known, and of random ones. The
 * reader checks that blocks lie end to end and that the sums agree. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cjson/cJSON.h>
#include <cmocka.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "snapshot_rig.h"
#include "xorshift.h"

static void check_piece(const fsdp__snapshot_piece *p, fsdp__piece_kind kind, uint64_t offset, uint64_t bytes,
                        const char *words)
{
    char got[256];
    snprintf(got, sizeof got, "%s|%s|%llu", p->owner, p->stream, (unsigned long long)p->freed);
    assert_int_equal(p->kind, kind);
    assert_int_equal(p->offset, offset);
    assert_int_equal(p->bytes, bytes);
    assert_string_equal(got, words);
}

static void check_points(const fsdp__snapshot_piece *p, size_t n, const char *first, uint64_t epoch)
{
    assert_int_equal(p->n_points, n);
    if (n == 0) return;
    assert_string_equal(p->points[0].stream, first);
    assert_int_equal(p->points[0].epoch, epoch);
}

/* ---- What it says ---- */

static void every_block_and_fragment_has_its_place_owner_streams_and_clock(void **state)
{
    bench *b = *state;
    open_pool(b, "pool", 0, 64);
    char *one = take(b, 1000, b->a, "one"); /* 1024 bytes */
    void *two = take(b, 4096, b->a, "two");
    void *three = take(b, 256, b->b, "three");
    void *four = take(b, 512, b->b, NULL);
    OK(fsdp_allocator_record_stream(b->pool, two, b->b));
    OK(fsdp_allocator_record_stream(b->pool, three, b->c));
    OK(fsdp_allocator_record_use(b->pool, three, b->a));
    OK(fsdp_allocator_free(b->pool, one));
    OK(fsdp_allocator_free(b->pool, two));
    OK(fsdp_allocator_free(b->pool, four));

    const fsdp__snapshot_pool *pool = only_pool(b);
    assert_string_equal(pool->name, "pool");
    assert_null(pool->model);
    assert_string_equal(pool->policy, "wait_first");
    assert_int_equal(pool->n_segments, 1);
    const fsdp__snapshot_segment *segment = &pool->segments[0];
    assert_int_equal(segment->bytes, SEGMENT);
    assert_int_equal(segment->n_pieces, 5);
    const fsdp__snapshot_piece *p = segment->pieces;
    /* a's own past is ordered before a's future; b's use of "two" is not, until a waits. */
    check_piece(&p[0], FSDP__PIECE_READY, 0, 1024, "|a|1");
    check_points(&p[0], 1, "a", 1);
    check_piece(&p[1], FSDP__PIECE_PENDING, 1024, 4096, "|a|2");
    check_points(&p[1], 2, "a", 1);
    assert_string_equal(p[1].points[1].stream, "b");
    assert_int_equal(p[0].range, p[1].range);
    assert_int_equal(p[1].range_bytes, 5120);
    check_piece(&p[2], FSDP__PIECE_LIVE, 5120, 256, "three|b|0");
    assert_int_equal(p[2].n_until_free, 2);
    assert_string_equal(p[2].until_free[0], "b");
    assert_string_equal(p[2].until_free[1], "c");
    check_points(&p[2], 1, "a", 1); /* record_use */
    check_piece(&p[3], FSDP__PIECE_READY, 5376, 512, "|b|3");
    check_piece(&p[4], FSDP__PIECE_UNUSED, 5888, SEGMENT - 5888, "||0");
    check_points(&p[4], 0, NULL, 0);
    assert_int_equal(pool->allocated, 256);
    assert_int_equal(pool->active, 256 + 4096);
    OK(fsdp_allocator_free(b->pool, three));
}

/* Nobody has asked the allocator since the wait; and asking for the snapshot leaves no mark. */
static void pending_is_what_is_true_now_and_the_snapshot_changes_nothing(void **state)
{
    bench *b = *state;
    open_pool(b, "pool", 0, 64);
    void *ptr = take(b, 256, b->a, "x");
    OK(fsdp_allocator_record_stream(b->pool, ptr, b->b));
    OK(fsdp_allocator_free(b->pool, ptr));
    assert_int_equal(only_pool(b)->segments[0].pieces[0].kind, FSDP__PIECE_PENDING);
    OK(fsdp_stream_wait_stream(b->a, b->b));
    const fsdp__snapshot_pool *pool = only_pool(b);
    assert_int_equal(pool->segments[0].pieces[0].kind, FSDP__PIECE_READY);
    assert_int_equal(pool->active, 0);
    assert_int_equal(pool->active_peak, 256);
    fsdp_alloc_stats stats = FSDP_ALLOC_STATS_INIT;
    OK(fsdp_allocator_stats(b->pool, &stats));
    assert_int_equal(stats.active, 0);
    size_t n_events = pool->n_events;
    assert_int_equal(only_pool(b)->n_events, n_events);
}

static void a_slot_with_a_new_stream_does_not_lend_its_name_to_the_old_one(void **state)
{
    bench *b = *state;
    open_pool(b, "pool", 0, 64);
    void *live = take(b, 256, b->c, "live"), *freed = take(b, 256, b->c, "freed");
    OK(fsdp_allocator_free(b->pool, freed));
    assert_string_equal(only_pool(b)->segments[0].pieces[0].stream, "c");
    OK(fsdp_stream_wait_stream(b->a, b->c)); /* a fence closes the epoch that they were used in */
    OK(fsdp_stream_release(b->c));
    OK(fsdp_stream_create(b->ctx, "new", &b->c));
    const fsdp__snapshot_piece *p = only_pool(b)->segments[0].pieces;
    assert_string_equal(p[0].stream, "a released stream");
    assert_string_equal(p[1].stream, "a released stream");
    assert_string_equal(p[1].points[0].stream, "a released stream");
    OK(fsdp_allocator_free(b->pool, live));
}

static void check_event(const fsdp__snapshot_event *e, uint64_t n, fsdp__event_kind kind, uint64_t bytes,
                        const char *words)
{
    char got[256];
    snprintf(got, sizeof got, "%s|%s|%s|%llu|%llu", e->owner, e->stream, e->other, (unsigned long long)e->allocated,
             (unsigned long long)e->reserved);
    assert_int_equal(e->n, n);
    assert_string_equal(fsdp__event_names[e->kind], fsdp__event_names[kind]);
    assert_int_equal(e->bytes, bytes);
    assert_string_equal(got, words);
}

static void the_history_tells_what_happened_in_order(void **state)
{
    bench *b = *state;
    open_pool(b, "pool", SEGMENT, 64);
    void *all = take(b, SEGMENT, b->a, "all"), *none = NULL;
    assert_int_equal(fsdp_allocator_alloc(b->pool, 512, b->b, "big", &none), FSDP_ERR_NO_MEMORY);
    OK(fsdp_allocator_free(b->pool, all));
    void *next = take(b, 256, b->b, "next");
    OK(fsdp_allocator_free(b->pool, next));
    OK(fsdp_allocator_trim_host(b->pool));
    const fsdp__snapshot_pool *pool = only_pool(b);
    assert_int_equal(pool->events_dropped, 0);
    assert_int_equal(pool->n_events, 8);
    check_event(&pool->events[0], 0, FSDP__EVENT_GROW, SEGMENT, "|||0|65536");
    check_event(&pool->events[1], 1, FSDP__EVENT_ALLOC, SEGMENT, "all|a||65536|65536");
    check_event(&pool->events[2], 2, FSDP__EVENT_OUT_OF_MEMORY, 512, "big|||65536|65536");
    check_event(&pool->events[3], 3, FSDP__EVENT_FREE, SEGMENT, "all|a||0|65536");
    check_event(&pool->events[4], 4, FSDP__EVENT_ALLOC, 256, "next|b||256|65536");
    check_event(&pool->events[5], 5, FSDP__EVENT_WAIT, 256, "next|b|a|256|65536");
    check_event(&pool->events[6], 6, FSDP__EVENT_FREE, 256, "next|b||0|65536");
    check_event(&pool->events[7], 7, FSDP__EVENT_TRIM, SEGMENT, "|||0|0");
    assert_int_equal(pool->n_segments, 0);
    assert_int_equal(pool->reserved, 0);
}

/* A ring of 8: 1 + 2 × 20 events, numbered from 0. */
static void the_ring_keeps_the_last_events_and_counts_the_others(void **state)
{
    bench *b = *state;
    open_pool(b, "pool", 0, 8);
    for (int i = 0; i < 20; i++) OK(fsdp_allocator_free(b->pool, take(b, 256, b->a, i < 19 ? "early" : "last")));
    const fsdp__snapshot_pool *pool = only_pool(b);
    assert_int_equal(pool->events_dropped, 33);
    assert_int_equal(pool->n_events, 8);
    for (uint64_t i = 0; i < 8; i++) {
        assert_int_equal(pool->events[i].n, 33 + i);
        assert_int_equal(pool->events[i].kind, i % 2 == 0 ? FSDP__EVENT_ALLOC : FSDP__EVENT_FREE);
        assert_string_equal(pool->events[i].owner, i < 6 ? "early" : "last");
    }
}

static const cJSON *member(const cJSON *object, const char *key)
{
    const cJSON *value = cJSON_GetObjectItemCaseSensitive(object, key);
    if (value == NULL) fail_msg("%s is missing", key);
    return value;
}

static void large_numbers_are_strings_and_totals_are_the_contexts(void **state)
{
    bench *b = *state;
    open_pool(b, "pool", UINT64_MAX, 64);
    void *ptr = take(b, 256, b->a, "x");
    const fsdp__snapshot *s = snapshot(b);
    assert_int_equal(s->rank, 0);
    assert_int_equal(s->world, 1);
    assert_string_equal(s->backend, "host");
    fsdp_counters c = FSDP_COUNTERS_INIT;
    OK(fsdp_context_counters(b->ctx, &c));
    assert_int_equal(s->device_bytes, c.device_bytes);
    assert_int_equal(s->device_peak, c.device_bytes_peak);
    assert_int_equal(s->pinned_bytes, c.pinned_bytes);
    assert_true(s->pools[0].budget == UINT64_MAX);
    fsdp_alloc_stats stats = FSDP_ALLOC_STATS_INIT;
    OK(fsdp_allocator_stats(b->pool, &stats));
    const cJSON *json = cJSON_GetArrayItem(member(s->json, "pools"), 0);
    char hash[32];
    snprintf(hash, sizeof hash, "%llu", (unsigned long long)stats.trace_hash);
    assert_string_equal(member(member(json, "stats"), "trace_hash")->valuestring, hash);
    assert_string_equal(member(json, "budget")->valuestring, "18446744073709551615");
    const cJSON *stream = cJSON_GetArrayItem(member(s->json, "streams"), 5);
    assert_string_equal(member(stream, "name")->valuestring, "c");
    assert_int_equal(member(stream, "slot")->valueint, 5);
    OK(fsdp_allocator_free(b->pool, ptr));
}

static void names_cannot_break_the_file(void **state)
{
    bench *b = *state;
    open_pool(b, "a\"b\\c\n\x01\x7f\xff\xc3(\xed\xa0\x80", 0, 64);
    void *ptr = take(b, 256, b->a, "</svg>\"},{\"schön \xf0\x9f\x8c\xb1");
    const fsdp__snapshot_pool *pool = only_pool(b);
    assert_string_equal(pool->name, "a\"b\\c\n\x01\x7f\xef\xbf\xbd\xef\xbf\xbd(\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd");
    assert_string_equal(pool->segments[0].pieces[0].owner, "</svg>\"},{\"schön \xf0\x9f\x8c\xb1");
    OK(fsdp_allocator_free(b->pool, ptr));
}

static void pools_of_models_say_whose_they_are_and_units_own_their_blocks(void **state)
{
    bench *b = *state;
    fsdp_model *model;
    fsdp_model_config mc = FSDP_MODEL_CONFIG_INIT;
    mc.name = "net";
    OK(fsdp_model_create(b->ctx, &mc, &model));
    fsdp_unit_config uc = FSDP_UNIT_CONFIG_INIT;
    uc.compute_dtype = FSDP_DTYPE_BF16; /* so that a world of one gathers, too */
    fsdp_unit *unit[2];
    const uint64_t dims[2] = {64, 64};
    for (int i = 0; i < 2; i++) {
        OK(fsdp_model_add_unit(model, i == 0 ? "h.0" : "h.1", &uc, &unit[i]));
        OK(fsdp_unit_add_param(unit[i], i == 0 ? "w0" : "w1", 2, dims, NULL, NULL));
    }
    OK(fsdp_model_seal(model));
    fsdp_pass_args pass = FSDP_PASS_ARGS_INIT;
    fsdp_view view = FSDP_VIEW_INIT;
    OK(fsdp_pass_begin(model, &pass, b->a));
    OK(fsdp_forward_begin(unit[0], b->a, &view));
    open_pool(b, "mine", 0, 64);

    const fsdp__snapshot *s = snapshot(b);
    assert_int_equal(s->n_pools, 3); /* oldest first */
    assert_string_equal(s->pools[0].name, "gather");
    assert_string_equal(s->pools[0].model, "net");
    assert_string_equal(s->pools[0].policy, "planned");
    assert_string_equal(s->pools[1].name, "grad");
    assert_string_equal(s->pools[1].model, "net");
    assert_string_equal(s->pools[2].name, "mine");
    assert_null(s->pools[2].model);
    const fsdp__snapshot_segment *gather = &s->pools[0].segments[0];
    bool found = false;
    for (size_t i = 0; i < gather->n_pieces; i++)
        found |= gather->pieces[i].kind == FSDP__PIECE_LIVE && strcmp(gather->pieces[i].owner, "h.0") == 0 &&
                 gather->pieces[i].bytes == 2 * 64 * 64;
    assert_true(found);
    assert_int_equal(s->pools[1].allocated, 0);
    fsdp_context_abort(b->ctx, "enough"); /* a snapshot is for bad times, too */
    assert_int_equal(snapshot(b)->n_pools, 3);
    OK(fsdp_model_destroy(model));
    assert_int_equal(snapshot(b)->n_pools, 1);
}

static uint64_t random_state;

static size_t random_below(size_t bound) { return (size_t)(xorshift(&random_state) % bound); }

enum { MOST_LIVE = 24 };

/* One move of a program over three streams. */
static void move_at_random(bench *b, void *live[MOST_LIVE])
{
    fsdp_stream *const streams[3] = {b->a, b->b, b->c};
    fsdp_stream *one = streams[random_below(3)], *other = streams[random_below(3)];
    size_t i = random_below(MOST_LIVE);
    if (live[i] == NULL) {
        live[i] = take(b, 256 * (1 + random_below(60)), one, i % 3 == 0 ? NULL : "owner");
        return;
    }
    switch (random_below(5)) {
    case 0: OK(fsdp_allocator_record_stream(b->pool, live[i], one)); break;
    case 1: OK(fsdp_allocator_record_use(b->pool, live[i], one)); break;
    case 2: OK(fsdp_stream_wait_stream(one, other)); break;
    default: OK(fsdp_allocator_free(b->pool, live[i])); live[i] = NULL;
    }
}

/* The reader has checked that blocks lie end to end and that live ones add up; here, pending ones, and the statistics that the
 * allocator gives after the snapshot. */
static void random_programs_give_snapshots_that_add_up(void **state)
{
    bench *b = *state;
    const char *given = getenv("FSDP_TEST_SEED");
    random_state = given != NULL ? strtoull(given, NULL, 0) : 0x9e3779b97f4a7c15u;
    print_message("seed: FSDP_TEST_SEED=%llu\n", (unsigned long long)random_state);
    void *live[MOST_LIVE] = {NULL};
    uint64_t most_pending = 0;
    open_pool(b, "pool", 0, 32);
    for (int i = 0; i < 4000; i++) {
        move_at_random(b, live);
        if (i % 10 != 0) continue;
        const fsdp__snapshot_pool *pool = only_pool(b);
        uint64_t pending = 0;
        for (size_t s = 0; s < pool->n_segments; s++)
            for (size_t k = 0; k < pool->segments[s].n_pieces; k++)
                if (pool->segments[s].pieces[k].kind == FSDP__PIECE_PENDING)
                    pending += pool->segments[s].pieces[k].bytes;
        fsdp_alloc_stats stats = FSDP_ALLOC_STATS_INIT;
        OK(fsdp_allocator_stats(b->pool, &stats));
        assert_int_equal(pool->allocated, stats.allocated);
        assert_int_equal(pool->active, stats.active);
        assert_int_equal(pool->active, stats.allocated + pending);
        assert_int_equal(pool->reserved, stats.reserved);
        assert_int_equal(pool->allocs, stats.allocs);
        assert_int_equal(pool->waits, stats.waits);
        if (pending > most_pending) most_pending = pending;
    }
    assert_true(most_pending > 0);
    for (int i = 0; i < MOST_LIVE; i++) OK(fsdp_allocator_free(b->pool, live[i]));
}

/* A thread's: its own stream, blocks of its own. */
typedef struct worker {
    bench *b;
    fsdp_stream *stream;
    atomic_bool *stop;
    fsdp_status status;
} worker;

static void *work(void *arg)
{
    worker *w = arg;
    void *live[8] = {NULL};
    for (uint64_t i = 0; w->status == FSDP_OK && (!atomic_load(w->stop) || live[i % 8] != NULL); i++) {
        if (live[i % 8] != NULL) w->status = fsdp_allocator_free(w->b->pool, live[i % 8]);
        live[i % 8] = NULL;
        if (w->status == FSDP_OK && !atomic_load(w->stop))
            w->status = fsdp_allocator_alloc(w->b->pool, 256 * (1 + i % 7), w->stream, "worker", &live[i % 8]);
    }
    return NULL;
}

/* Each snapshot is of one moment: the reader finds no sum that does not agree. */
static void a_snapshot_between_the_calls_of_other_threads_is_of_one_moment(void **state)
{
    bench *b = *state;
    open_pool(b, "pool", 0, 16);
    atomic_bool stop = false;
    worker workers[2] = {{b, b->a, &stop, FSDP_OK}, {b, b->b, &stop, FSDP_OK}};
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) assert_int_equal(pthread_create(&threads[i], NULL, work, &workers[i]), 0);
    uint64_t most_allocs = 0;
    char error[512] = "";
    fsdp_status status = FSDP_OK;
    bool good = true;
    for (int i = 0; status == FSDP_OK && good && (i < 100 || most_allocs < 1000); i++) {
        fsdp__snapshot_free(&b->s);
        status = fsdp_memory_write_json(b->ctx, b->path);
        good = status == FSDP_OK && fsdp__snapshot_read(b->path, &b->s, error, sizeof error);
        if (good) most_allocs = b->s.pools[0].allocs;
    }
    atomic_store(&stop, true);
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    if (!good) fail_msg("%s%s", status == FSDP_OK ? "" : fsdp_last_error(), error);
    for (int i = 0; i < 2; i++) assert_int_equal(workers[i].status, FSDP_OK);
    assert_true(most_allocs >= 1000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(every_block_and_fragment_has_its_place_owner_streams_and_clock),
        TEST(pending_is_what_is_true_now_and_the_snapshot_changes_nothing),
        TEST(a_slot_with_a_new_stream_does_not_lend_its_name_to_the_old_one),
        TEST(the_history_tells_what_happened_in_order),
        TEST(the_ring_keeps_the_last_events_and_counts_the_others),
        TEST(large_numbers_are_strings_and_totals_are_the_contexts),
        TEST(names_cannot_break_the_file),
        TEST(pools_of_models_say_whose_they_are_and_units_own_their_blocks),
        TEST(random_programs_give_snapshots_that_add_up),
        TEST(a_snapshot_between_the_calls_of_other_threads_is_of_one_moment),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
