/* SPDX-License-Identifier: MIT */
/* The worked example of docs/allocator.md, number by number. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "alloc.h"
#include "context.h"
#include "fsdp/fsdp.h"

enum { KIB = 1024, A = 0, B = 1, C = 2 };

#define OK(call) assert_int_equal((call), FSDP_OK)

typedef struct example {
    fsdp_context *ctx;
    fsdp_stream *s[3];
    fsdp_allocator *a;
    fsdp_counters seen;
} example;

static int set_up(void **state)
{
    static example e;
    e = (example){.seen = FSDP_COUNTERS_INIT};
    fsdp_config config = FSDP_CONFIG_INIT;
    config.backend = fsdp_sim_backend();
    OK(fsdp_context_create(&config, &e.ctx));
    static const char *const names[] = {"A", "B", "C"};
    for (int i = 0; i < 3; i++) OK(fsdp_stream_create(e.ctx, names[i], &e.s[i]));
    fsdp_allocator_config a = FSDP_ALLOCATOR_CONFIG_INIT;
    a.budget_bytes = a.segment_bytes = 64 * KIB;
    OK(fsdp_allocator_create(e.ctx, &a, &e.a));
    *state = &e;
    return 0;
}

static int tear_down(void **state)
{
    example *e = *state;
    OK(fsdp_allocator_destroy(e->a));
    for (int i = 0; i < 3; i++) OK(fsdp_stream_release(e->s[i]));
    OK(fsdp_context_destroy(e->ctx));
    return 0;
}

/* What the call before made the device do. */
static void assert_device(example *e, uint64_t records, uint64_t waits)
{
    fsdp_counters now = FSDP_COUNTERS_INIT;
    OK(fsdp_context_counters(e->ctx, &now));
    assert_int_equal(now.records - e->seen.records, records);
    assert_int_equal(now.waits - e->seen.waits, waits);
    e->seen = now;
}

static void assert_clock(const example *e, int s, uint64_t a, uint64_t b, uint64_t c)
{
    const uint64_t want[] = {a, b, c};
    for (int t = 0; t < 3; t++) assert_int_equal(e->ctx->clocks.now[e->s[s]->slot].at[e->s[t]->slot], want[t]);
}

static void assert_frontier(const example *e, const fsdp__frontier *f, uint64_t a, uint64_t b, uint64_t c)
{
    const uint64_t want[] = {a, b, c};
    fsdp__clock clock;
    fsdp__frontier_clock(f, &clock);
    for (int t = 0; t < FSDP__SLOTS; t++) {
        uint64_t epoch = 0;
        for (int i = 0; i < 3; i++)
            if (e->s[i]->slot == t) epoch = want[i];
        assert_int_equal(clock.at[t], epoch);
    }
}

static void *take(example *e, uint64_t bytes, int s)
{
    void *ptr;
    OK(fsdp_allocator_alloc(e->a, bytes, e->s[s], "example", &ptr));
    return ptr;
}

static const fsdp__block *block_of(const example *e, const void *ptr)
{
    return fsdp__table_find(&e->a->live, (uint64_t)(uintptr_t)ptr)->block;
}

static const fsdp__block *first_fragment(const example *e) { return fsdp__ranges_best(&e->a->ranges, 1); }

static void the_example_is_as_the_page_says(void **state)
{
    example *e = *state;
    assert_device(e, 0, 0);
    void *p = take(e, 64 * KIB, A);
    assert_device(e, 0, 0);
    assert_clock(e, A, 1, 0, 0);
    assert_frontier(e, &block_of(e, p)->guard, 0, 0, 0);
    OK(fsdp_stream_fill(e->s[A], p, 1, 64 * KIB));

    OK(fsdp_stream_wait_stream(e->s[B], e->s[A]));
    assert_device(e, 1, 1);
    assert_clock(e, A, 2, 0, 0);
    assert_clock(e, B, 1, 1, 0);

    OK(fsdp_allocator_record_stream(e->a, p, e->s[B]));
    OK(fsdp_stream_fill(e->s[B], p, 2, 64 * KIB));
    assert_int_equal(block_of(e, p)->until_free, 1u << e->s[A]->slot | 1u << e->s[B]->slot);
    OK(fsdp_allocator_free(e->a, p));
    assert_device(e, 0, 0);
    assert_frontier(e, &first_fragment(e)->use, 2, 1, 0);

    void *q = take(e, 64 * KIB, A);
    assert_ptr_equal(q, p);
    assert_device(e, 1, 1);
    assert_clock(e, B, 1, 2, 0);
    assert_clock(e, A, 2, 1, 0);
    assert_frontier(e, &block_of(e, q)->guard, 2, 1, 0);
    OK(fsdp_allocator_free(e->a, q));
    assert_frontier(e, &first_fragment(e)->use, 2, 0, 0);

    void *r = take(e, 32 * KIB, C);
    assert_device(e, 1, 1);
    assert_clock(e, A, 3, 1, 0);
    assert_clock(e, C, 2, 1, 1);
    assert_frontier(e, &block_of(e, r)->guard, 2, 0, 0);
    assert_frontier(e, &first_fragment(e)->use, 2, 0, 0);

    void *t = take(e, 32 * KIB, C);
    assert_device(e, 0, 0);
    assert_frontier(e, &block_of(e, t)->guard, 2, 0, 0);
    OK(fsdp_allocator_free(e->a, r));
    OK(fsdp_allocator_free(e->a, t));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(the_example_is_as_the_page_says, set_up, tear_down),
    };
    return cmocka_run_group_tests_name("allocator's example", tests, NULL, NULL);
}
