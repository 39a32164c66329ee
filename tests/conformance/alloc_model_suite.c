/* SPDX-License-Identifier: MIT */
/* Random programs, by the library and by the model of alloc_model.h side by side: after every call they agree on the
 * address, the error, the waits and records that the device got, and all statistics. FSDP_TEST_SEED runs one program. */
#include "alloc_suite.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "alloc_model.h"

enum { MAX_LIVE = 400, LANES = 3, STREAMS = LANES + ALLOC_STREAMS + 3, GRANULARITY = 4096 };

/* What a program is like. */
typedef struct shape {
    uint64_t budget_pages, segment_pages; /* of GRANULARITY */
    uint64_t device_pages;                /* 0: no limit but the budget */
    uint32_t small_pages, large_pages;    /* sizes of blocks, of MODEL_PAGE; one in eight is large */
    uint32_t n_live;                      /* about */
    uint32_t moves, order_in_1000;
    uint32_t records_in_1000;
    bool trims, releases;
} shape;

typedef struct pair {
    alloc_rig rig;
    fsdp_stream *stream[MODEL_SLOTS]; /* by slot */
    fsdp_event *event[MODEL_EVENTS];
    model m;
    shape shape;
    struct {
        int block;
        void *ptr;
    } live[MAX_LIVE];
    int n_live;
    uint64_t seed, random, records, waits; /* records and waits: the context's before the program */
    uint32_t move;
    bool releases;
    uint64_t hashed, hash; /* allocs that the trace's hash has been seen after, and what it was */
} pair;

static uint64_t draw(pair *g, uint64_t below)
{
    g->random ^= g->random << 13, g->random ^= g->random >> 7, g->random ^= g->random << 17;
    return (g->random >> 11) % below;
}

#define DIFFER(what, library, expected)                                                               \
    fail_msg("%s: FSDP_TEST_SEED=%" PRIu64 ", move %u: %s is %lld in the library, %lld in the model", \
             g->rig.suite->name, g->seed, g->move, what, (long long)(library), (long long)(expected))
#define SAME(what, library, expected)                                 \
    do {                                                              \
        if ((library) != (expected)) DIFFER(what, library, expected); \
    } while (0)

static void compare(pair *g)
{
    fsdp_alloc_stats st = stats_of(&g->rig), *m = &g->m.stats;
    fsdp_counters c = counters_of(&g->rig);
    model_note(&g->m);
    SAME("counters.waits", c.waits - g->waits, g->m.waits);
    SAME("counters.records", c.records - g->records, g->m.records);
    SAME("counters.device_bytes", c.device_bytes, m->reserved);
    SAME("waits", st.waits, m->waits);
    SAME("allocated", st.allocated, m->allocated);
    SAME("active", st.active, m->active);
    SAME("reserved", st.reserved, m->reserved);
    SAME("allocated_peak", st.allocated_peak, m->allocated_peak);
    SAME("active_peak", st.active_peak, m->active_peak);
    SAME("reserved_peak", st.reserved_peak, m->reserved_peak);
    SAME("allocs", st.allocs, m->allocs);
    SAME("frees", st.frees, m->frees);
    SAME("grows", st.grows, m->grows);
    /* Of every alloc, and of nothing else. */
    if (g->hashed > 0) SAME("that the hash is another", st.trace_hash != g->hash, st.allocs != g->hashed);
    g->hashed = st.allocs, g->hash = st.trace_hash;
}

static int any_stream(pair *g)
{
    int slot;
    do slot = (int)draw(g, MODEL_SLOTS);
    while (g->stream[slot] == NULL);
    return slot;
}

static void expect_refusal(pair *g, uint64_t bytes)
{
    char largest[64];
    snprintf(largest, sizeof largest, "free range has %" PRIu64, model_largest_free(&g->m));
    assert_said(largest);
    snprintf(largest, sizeof largest, "no room for %" PRIu64 " bytes", bytes);
    assert_said(largest);
}

static void random_alloc(pair *g)
{
    uint64_t pages = 1 + draw(g, draw(g, 8) == 0 ? g->shape.large_pages : g->shape.small_pages);
    uint64_t bytes = draw(g, 50) == 0 ? 0 : draw(g, 1000) == 0 ? UINT64_MAX - draw(g, 300) : pages * MODEL_PAGE;
    if (bytes > 0 && bytes <= pages * MODEL_PAGE) bytes -= draw(g, 2) * draw(g, MODEL_PAGE - 1);
    int slot = any_stream(g), block = -1;
    bool grew = false;
    void *ptr = NULL;
    if (g->n_live == MAX_LIVE) return;
    fsdp_status expected = model_alloc(&g->m, bytes, slot, &block, &grew);
    fsdp_status status = fsdp_allocator_alloc(g->rig.a, bytes, g->stream[slot], "random", &ptr);
    SAME("the status of alloc", status, expected);
    if (status == FSDP_ERR_NO_MEMORY) expect_refusal(g, bytes == 0 ? 256 : (bytes + 255) / 256 * 256);
    if (status != FSDP_OK) return;
    if (grew) model_place(&g->m, block, ptr);
    SAME("the address", (intptr_t)ptr, (intptr_t)model_address(&g->m, block));
    g->live[g->n_live].ptr = ptr;
    g->live[g->n_live++].block = block;
}

/* One in fifty is no live block: freed already, or a pointer into one. */
static void free_live(pair *g, int i)
{
    char *ptr = g->live[i].ptr;
    if (draw(g, 50) == 0)
        SAME("free inside a block", fsdp_allocator_free(g->rig.a, ptr + 1 + draw(g, 255)), FSDP_ERR_ARG);
    OK(fsdp_allocator_free(g->rig.a, ptr));
    model_free(&g->m, g->live[i].block);
    if (draw(g, 50) == 0) SAME("a double free", fsdp_allocator_free(g->rig.a, ptr), FSDP_ERR_ARG);
    g->live[i] = g->live[--g->n_live];
}

static void random_free(pair *g)
{
    if (g->n_live > 0) free_live(g, (int)draw(g, (uint64_t)g->n_live));
}

static void random_record(pair *g)
{
    if (g->n_live == 0) return;
    int i = (int)draw(g, (uint64_t)g->n_live), slot = any_stream(g);
    if (draw(g, 2) == 0) {
        OK(fsdp_allocator_record_stream(g->rig.a, g->live[i].ptr, g->stream[slot]));
        model_record_stream(&g->m, g->live[i].block, slot);
    } else {
        OK(fsdp_allocator_record_use(g->rig.a, g->live[i].ptr, g->stream[slot]));
        model_record_use(&g->m, g->live[i].block, slot);
    }
}

/* Blocks of one stream that another has used until now, freed one by one while the first comes to wait for the other. */
static void random_burst(pair *g)
{
    int slot = any_stream(g), other = any_stream(g);
    for (int i = g->n_live - 1; i >= 0; i--) {
        if (g->m.block[g->live[i].block].slot != slot) continue;
        OK(fsdp_allocator_record_use(g->rig.a, g->live[i].ptr, g->stream[other]));
        model_record_use(&g->m, g->live[i].block, other);
    }
    for (int i = g->n_live - 1; i >= 0; i--) {
        if (g->m.block[g->live[i].block].slot != slot || draw(g, 3) == 0) continue;
        free_live(g, i);
        if (draw(g, 4) > 0) continue;
        OK(fsdp_stream_wait_stream(g->stream[slot], g->stream[other]));
        model_stream_wait_stream(&g->m, slot, other);
    }
}

static void random_event(pair *g)
{
    int e = (int)draw(g, MODEL_EVENTS), slot = any_stream(g);
    switch (draw(g, 5)) {
    case 0: /* waits that are enqueued stay good; its fence is lost */
        fsdp_event_destroy(g->event[e]);
        model_event_destroy(&g->m, e);
        OK(fsdp_event_create(g->rig.ctx, &g->event[e]));
        break;
    case 1:
    case 2:
        OK(fsdp_event_record(g->event[e], g->stream[slot]));
        model_event_record(&g->m, e, slot);
        break;
    default: OK(fsdp_stream_wait_event(g->stream[slot], g->event[e])); model_event_wait(&g->m, e, slot);
    }
}

static void random_order(pair *g)
{
    if (draw(g, 4) == 0) {
        random_event(g);
        return;
    }
    int slot = any_stream(g), other = any_stream(g);
    /* Now and then so many that the ring of fences overflows. */
    for (uint64_t n = draw(g, 60) == 0 ? 70 : 1; n > 0; n--) {
        OK(fsdp_stream_wait_stream(g->stream[slot], g->stream[other]));
        model_stream_wait_stream(&g->m, slot, other);
    }
}

/* A stream goes, with its blocks live, or another comes, into the lowest free slot. */
static void random_stream(pair *g)
{
    int slot = LANES + (int)draw(g, STREAMS - LANES);
    if (g->stream[slot] != NULL) {
        if (slot == LANES) return; /* one stays */
        OK(fsdp_stream_release(g->stream[slot]));
        model_stream_release(&g->m, slot);
        g->stream[slot] = NULL;
        return;
    }
    slot = model_stream_open(&g->m);
    OK(fsdp_stream_create(g->rig.ctx, "again", &g->stream[slot]));
}

static void random_move(pair *g)
{
    const shape *s = &g->shape;
    uint64_t what = draw(g, 1000);
    if (what < s->order_in_1000) random_order(g);
    else if ((what -= s->order_in_1000) < s->records_in_1000) random_record(g);
    else if ((what -= s->records_in_1000) < 8) {
        if (g->releases) random_stream(g);
    } else if (what < 12) {
        random_burst(g);
    } else if (what < 14) {
        OK(fsdp_allocator_reset_peaks(g->rig.a));
        model_reset_peaks(&g->m);
    } else if (what < 18) {
        if (!s->trims) return;
        OK(fsdp_allocator_trim_host(g->rig.a));
        model_trim(&g->m);
    } else if (draw(g, 2 * s->n_live) >= (uint64_t)g->n_live) random_alloc(g);
    else random_free(g);
}

/* From tight to roomy, from few blocks to more than are looked at, from no order between streams to much. */
static void choose_shape(pair *g)
{
    static const shape shapes[] = {
        {4, 4, 0, 8, 24, 12, 250, 100, 150, true, true},    {16, 4, 0, 6, 40, 40, 300, 60, 100, true, true},
        {20, 16, 0, 4, 16, 80, 400, 40, 60, false, false},  {0, 8, 12, 8, 48, 30, 250, 100, 150, true, true},
        {0, 2, 0, 12, 40, 20, 250, 150, 100, true, false},  {64, 64, 0, 1, 3, 380, 900, 10, 20, false, false},
        {48, 48, 0, 3, 9, 200, 900, 20, 30, false, true},   {16, 16, 0, 3, 12, 60, 300, 300, 100, false, true},
        {3, 1, 0, 6, 16, 8, 200, 100, 200, true, true},     {64, 8, 0, 2, 40, 150, 600, 30, 50, true, true},
        {0, 512, 0, 40, 900, 60, 250, 50, 100, true, true}, {24, 24, 20, 16, 60, 20, 200, 60, 200, true, true},
    };
    g->shape = shapes[g->seed % (sizeof shapes / sizeof *shapes)];
}

static void open_pair(pair *g, const alloc_suite *suite, uint64_t seed)
{
    memset(g, 0, offsetof(pair, m));
    g->n_live = 0;
    g->move = 0;
    g->hashed = 0;
    g->seed = seed;
    g->random = (seed + 1) * 0x9e3779b97f4a7c15ull;
    choose_shape(g);
    alloc_rig_open(&g->rig, suite, 0, 0, 10000000000ull, NULL);
    fsdp_allocator_config config = FSDP_ALLOCATOR_CONFIG_INIT;
    config.policy = suite->policy;
    config.budget_bytes = g->shape.budget_pages * GRANULARITY;
    config.segment_bytes = g->shape.segment_pages * GRANULARITY;
    OK(fsdp_allocator_create(g->rig.ctx, &config, &g->rig.a));
    model_init(&g->m, &config, GRANULARITY);
    for (int i = 0; i < LANES + ALLOC_STREAMS; i++) {
        assert_int_equal(model_stream_open(&g->m), i);
        g->stream[i] = i < LANES ? fsdp_context_lane(g->rig.ctx, (fsdp_lane)i) : g->rig.s[i - LANES];
    }
    for (int i = 0; i < ALLOC_STREAMS; i++) g->rig.s[i] = NULL;
    for (int i = 0; i < MODEL_EVENTS; i++) OK(fsdp_event_create(g->rig.ctx, &g->event[i]));
    if (g->shape.device_pages > 0) device_limit(g->m.device_limit = g->shape.device_pages * GRANULARITY);
    fsdp_counters c = counters_of(&g->rig);
    g->records = c.records, g->waits = c.waits;
}

static void close_pair(pair *g)
{
    while (g->n_live > 0) random_free(g);
    compare(g);
    for (int i = 0; i < MODEL_EVENTS; i++) fsdp_event_destroy(g->event[i]);
    for (int i = LANES; i < MODEL_SLOTS; i++) OK(fsdp_stream_release(g->stream[i]));
    alloc_rig_close(&g->rig);
    device_limit(UINT64_MAX);
}

/* The trace's hash at the end. */
static uint64_t run_pair(const alloc_suite *suite, uint64_t seed, bool releases, bool ask_always)
{
    static pair g;
    open_pair(&g, suite, seed);
    g.releases = g.shape.releases && releases;
    for (g.move = 0; g.move < g.shape.moves && model_has_room(&g.m); g.move++) {
        random_move(&g);
        if (ask_always) compare(&g);
    }
    g.hashed = ask_always ? g.hashed : 0;
    close_pair(&g);
    return g.hash;
}

static void random_programs_are_the_models(void **state)
{
    const alloc_suite *suite = *state;
    const char *given = getenv("FSDP_TEST_SEED");
    uint64_t first = given != NULL ? strtoull(given, NULL, 10) : 0, end = given != NULL ? first + 1 : suite->n_programs;
    alarm(120);
    for (uint64_t seed = first; seed < end; seed++) run_pair(suite, seed, true, true);
}

/* To ask for statistics changes nothing: neither what is given afterwards nor what they say at the end. */
static void asking_changes_nothing(void **state)
{
    const alloc_suite *suite = *state;
    const char *given = getenv("FSDP_TEST_SEED");
    uint64_t first = given != NULL ? strtoull(given, NULL, 10) : 0,
             end = given != NULL ? first + 1 : suite->n_programs / 2;
    alarm(120);
    for (uint64_t seed = first; seed < end; seed++) {
        uint64_t hash = run_pair(suite, seed, false, false);
        if (hash != run_pair(suite, seed, false, true))
            fail_msg("%s: FSDP_TEST_SEED=%" PRIu64 ": two runs of one program have two hashes", suite->name, seed);
    }
}

int run_alloc_model_suite(const alloc_suite *suite)
{
    void *state = (void *)(uintptr_t)suite;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_prestate(random_programs_are_the_models, state),
        cmocka_unit_test_prestate(asking_changes_nothing, state),
    };
    return cmocka_run_group_tests_name("model", tests, NULL, NULL);
}
