/* SPDX-License-Identifier: MIT */
/* A rank that does something else than the others: every rank is told, by name, what each was about to do. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "fault_rig.h"

typedef struct odd_step {
    const char *what;
    fsdp_status (*victim)(rank *r);
    fsdp_status status; /* of every rank, the victim too */
    const char *usual,
        *victims; /* what the sentence says of the others, and of the victim; NULL: nothing in particular */
} odd_step;

static fsdp_status visit(rank *r, uint32_t unit, bool backward)
{
    fsdp_view view = FSDP_VIEW_INIT;
    fsdp_unit *u = r->unit[unit];
    fsdp_status status = backward ? fsdp_backward_begin(u, r->s, &view) : fsdp_forward_begin(u, r->s, &view);
    if (status == FSDP_OK) status = compute(r, &view, 1.0f);
    if (status != FSDP_OK) return status;
    return backward ? fsdp_backward_end(u, r->s) : fsdp_forward_end(u, r->s);
}

/* A pass over these units, forward and, with train, back and updated; then the wait that tells. */
static fsdp_status walk(rank *r, int32_t pass, const uint32_t *units, uint32_t n, bool train)
{
    fsdp_pass_args args = FSDP_PASS_ARGS_INIT;
    args.pass = pass;
    fsdp_status status = fsdp_pass_begin(r->model, &args, r->s);
    for (uint32_t i = 0; status == FSDP_OK && i < n; i++) status = visit(r, units[i], false);
    for (uint32_t i = n; status == FSDP_OK && i-- > 0 && train;) status = visit(r, units[i], true);
    if (status == FSDP_OK) status = fsdp_pass_end(r->model, r->s);
    if (status == FSDP_OK && train) status = update(r);
    if (status == FSDP_OK) status = fsdp_stream_drain_host(r->s, 200 * second_ns);
    return status == FSDP_OK ? fsdp_barrier_host(r->ctx) : status;
}

static const uint32_t in_order[] = {0, 1, 2, 3}, swapped[] = {0, 2, 1, 3}, without_1[] = {0, 2, 3};

static fsdp_status usual(rank *r) { return walk(r, FSDP_PASS_TRAIN, in_order, 4, true); }
static fsdp_status exchange(rank *r) { return walk(r, FSDP_PASS_TRAIN, swapped, 4, true); }
static fsdp_status leave_out(rank *r) { return walk(r, FSDP_PASS_TRAIN, without_1, 3, true); }
static fsdp_status evaluate(rank *r) { return walk(r, FSDP_PASS_EVAL, in_order, 4, false); }
static fsdp_status sample(rank *r) { return walk(r, r->extra_pass, in_order, 4, false); }

/* Goes away, as a program does whose data has come to its end. */
static fsdp_status leave(rank *r)
{
    close_all(r);
    return FSDP_OK;
}

/* Ends in the middle of it all, and says that all went well. */
static fsdp_status end(rank *r)
{
    (void)r;
    _exit(0);
}

/* Has no more data, but comes to what follows the step. */
static fsdp_status one_batch_fewer(rank *r) { return fsdp_barrier_host(r->ctx); }

static const odd_step odd_steps[] = {
    {"closes its context early", leave, FSDP_ERR_RANK_LOST, "", "rank 2 of 4 closed before it came"},
    {"ends early", end, FSDP_ERR_RANK_LOST, "", "rank 2 is gone"},
    {"skips a unit", leave_out, FSDP_ERR_MISMATCH, "all-gather of h.1 in TRAIN", "all-gather of h.2 in TRAIN"},
    {"swaps two equal units", exchange, FSDP_ERR_MISMATCH, "all-gather of h.1 in TRAIN", "all-gather of h.2 in TRAIN"},
    {"evaluates alone", evaluate, FSDP_ERR_MISMATCH, " in TRAIN", " in EVAL"},
    {"samples alone", sample, FSDP_ERR_MISMATCH, " in TRAIN", " in extra"},
};

static void train_but_for_one(rank *r)
{
    const odd_step *o = crew_of(r)->arg;
    r->recipe.extra_visits = 4;
    r->recipe.extra_use = FSDP_USE_READ;
    r->recipe.model.depth = 0; /* nothing is gathered before its hook */
    r->recipe.unit[0].reshard = FSDP_RESHARD_AFTER_USE;
    EXPECT_OK(r, open_all(r));
    EXPECT_OK(r, usual(r));
    (void)meeting_wait(r->meet, 60 * second_ns);
    crew_keep(r, (is_victim(r) ? o->victim : usual)(r));
    if (r->ctx == NULL) return;
    EXPECT(r, fsdp_context_check(r->ctx) == o->status);
    fail_on_and_close(r, o->status);
}

static void a_rank_that_does_something_else_is_found_out(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof odd_steps / sizeof *odd_steps; i++) {
        const odd_step *o = &odd_steps[i];
        crew *c = crew_create(WORLD, PROCESSES_BY_NAME);
        c->victim = 2;
        c->phase = (int)i;
        c->arg = o;
        crew_run(c, train_but_for_one, 0, NULL);
        printf("    rank 2 %s: %s\n", o->what, c->rank[0].said);
        assert_others_kept(c, o->status, o->usual);
        assert_others_kept(c, o->status, o->victims);
        if (o->status == FSDP_ERR_MISMATCH) {
            assert_others_kept(c, o->status, "rank 2: #");
            assert_others_kept(c, o->status, "ranks 0, 1, 3: #");
            assert_kept(&c->rank[2], o->status, c->rank[0].said);
        }
        crew_destroy(c);
    }
}

/* The others' third step finds one rank in another call. */
static void train_with_one_batch_fewer(rank *r)
{
    EXPECT_OK(r, open_all(r));
    EXPECT_OK(r, usual(r));
    (void)meeting_wait(r->meet, 60 * second_ns);
    crew_keep(r, (is_victim(r) ? one_batch_fewer : usual)(r));
    EXPECT(r, fsdp_context_check(r->ctx) == FSDP_ERR_RANK_LOST);
    fail_on_and_close(r, FSDP_ERR_RANK_LOST);
}

static void a_rank_with_one_batch_fewer_is_named(void **state)
{
    (void)state;
    crew *c = crew_create(WORLD, PROCESSES_BY_NAME);
    c->victim = 3;
    for (uint32_t r = 0; r < WORLD; r++)
        if (r != c->victim) c->rank[r].timeout_ns = second_ns;
    crew_run(c, train_with_one_batch_fewer, 0, NULL);
    printf("    rank 3 has one batch fewer: %s\n", c->rank[0].said);
    assert_others_kept(c, FSDP_ERR_RANK_LOST, "rank 3");
    assert_others_kept(c, FSDP_ERR_RANK_LOST, "all-gather of h.");
    crew_destroy(c);
}

/* With fsdp_pass_idle in the batch's place it takes part, and all train on. */
static void take_part_without_a_batch(rank *r)
{
    fsdp_pass_args args = FSDP_PASS_ARGS_INIT;
    uint64_t hash = 0;
    r->recipe.unit[0].reshard = FSDP_RESHARD_AFTER_USE;
    EXPECT_OK(r, open_all(r));
    EXPECT_OK(r, usual(r));
    if (is_victim(r)) {
        EXPECT_OK(r, fsdp_pass_idle(r->model, &args, r->s));
        EXPECT_OK(r, update(r));
        EXPECT_OK(r, fsdp_stream_drain_host(r->s, 200 * second_ns));
        EXPECT_OK(r, fsdp_barrier_host(r->ctx));
    } else {
        EXPECT_OK(r, usual(r));
    }
    EXPECT_OK(r, usual(r));
    EXPECT_OK(r, hash_model(r, &hash));
    EXPECT_OK(r, fsdp_context_check(r->ctx));
    crew_of(r)->told_ns[r->number] = hash;
    close_all(r);
}

static void a_rank_with_one_batch_fewer_can_take_part(void **state)
{
    (void)state;
    for (uint32_t victim = 0; victim < WORLD; victim += 3) {
        crew *c = crew_create(WORLD, PROCESSES_BY_NAME);
        c->victim = victim;
        crew_run(c, take_part_without_a_batch, 0, NULL);
        for (int i = 1; i < WORLD; i++) assert_int_equal(c->told_ns[i], c->told_ns[0]);
        assert_true(c->told_ns[0] != 0);
        crew_destroy(c);
    }
}

int run_order_faults(void)
{
    const struct CMUnitTest tests[] = {
        FAULT(a_rank_that_does_something_else_is_found_out),
        FAULT(a_rank_with_one_batch_fewer_is_named),
        FAULT(a_rank_with_one_batch_fewer_can_take_part),
    };
    return cmocka_run_group_tests_name("out of order", tests, NULL, NULL);
}
