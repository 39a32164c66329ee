/* SPDX-License-Identifier: MIT */
/* What ranks tell of themselves, and the sentence that is made of it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bare_recorder.h"
#include "fsdp/fsdp.h"

enum { WORLD = 4 };

typedef struct team {
    fsdp_context *ctx[WORLD];
    bool silent[WORLD];
    char blob[WORLD][FSDP__ORDER_BLOB_BYTES];
    char text[2048];
} team;

static team *team_open(void)
{
    team *t = calloc(1, sizeof *t);
    assert_non_null(t);
    for (int r = 0; r < WORLD; r++) t->ctx[r] = bare();
    return t;
}

static void team_close(team *t)
{
    for (int r = 0; r < WORLD; r++) free(t->ctx[r]);
    free(t);
}

static void compose_behind(team *t, const char *sentence, char *text, size_t bytes)
{
    const void *told[WORLD] = {NULL};
    fsdp_side_words words = {NULL, 0, NULL, NULL};
    for (int r = 0; r < WORLD; r++) {
        words = fsdp__order_words(t->ctx[r]);
        assert_int_equal(words.bytes, FSDP__ORDER_BLOB_BYTES);
        if (t->silent[r]) continue;
        words.tell(words.arg, t->blob[r]);
        told[r] = t->blob[r];
    }
    words.compose(words.arg, sentence, told, WORLD, text, bytes);
}

static void compose(team *t, char *text, size_t bytes) { compose_behind(t, "", text, bytes); }

static void says(team *t, const char *text)
{
    compose(t, t->text, sizeof t->text);
    assert_string_equal(t->text, text);
}

static void all_gather(team *t, uint32_t comm, const char *label, const char *pass)
{
    for (int r = 0; r < WORLD; r++) add(t->ctx[r], comm, gather_of(label, pass, 8));
}

static void ranks_that_agree_are_told_once(void **state)
{
    (void)state;
    team *t = team_open();
    says(t, "Last: ranks 0 to 3: no collective");
    all_gather(t, 0, "h.0", "TRAIN");
    says(t, "Last: ranks 0 to 3: #1 all-gather of h.0 in TRAIN (8 bf16)");
    add(t->ctx[2], 0, gather_of("h.1", "TRAIN", 9)); /* ahead of the others: no difference */
    says(t,
         "Last: ranks 0, 1, 3: #1 all-gather of h.0 in TRAIN (8 bf16); rank 2: #2 all-gather of h.1 in TRAIN (9 bf16)");
    t->silent[3] = true;
    says(t, "Last: ranks 0, 1: #1 all-gather of h.0 in TRAIN (8 bf16); rank 2: #2 all-gather of h.1 in TRAIN (9 bf16); "
            "rank 3 did not answer");
    for (int r = 0; r < WORLD; r++) t->silent[r] = true;
    says(t, "ranks 0 to 3 did not answer");
    team_close(t);
}

static void host_calls_are_told_as_inside_or_returned(void **state)
{
    (void)state;
    team *t = team_open();
    all_gather(t, 1, "h.0", NULL);
    fsdp__flight_host_begin(&t->ctx[0]->flight, "fsdp_barrier_host", 0);
    fsdp__flight_host_begin(&t->ctx[1]->flight, "fsdp_sum_host of 4", 0);
    fsdp__flight_host_end(&t->ctx[1]->flight);
    fsdp__flight_host_begin(&t->ctx[2]->flight, "fsdp_model_seal", 0); /* with its own collective inside */
    add(t->ctx[2], 1, gather_of("seal", NULL, 1));
    fsdp__flight_host_begin(&t->ctx[3]->flight, "fsdp_sum_host of 4", 0);
    fsdp__flight_host_end(&t->ctx[3]->flight);
    add(t->ctx[3], 1, gather_of("seal", NULL, 1)); /* which makes the host call old news */
    says(t, "Last: rank 0: #1 all-gather of h.0 (8 bf16) on communicator 1, inside fsdp_barrier_host; "
            "rank 1: #1 all-gather of h.0 (8 bf16) on communicator 1, then fsdp_sum_host of 4, which has returned; "
            "rank 2: #2 all-gather of seal (1 bf16) on communicator 1, inside fsdp_model_seal; "
            "rank 3: #2 all-gather of seal (1 bf16) on communicator 1");
    team_close(t);
}

static void the_first_difference_is_found_however_far_ranks_have_gone_on(void **state)
{
    (void)state;
    /* 20 equal calls, one that rank 2 does not make, and more of the same. */
    for (int more = 0; more < 24; more += 4) {
        team *t = team_open();
        for (int i = 0; i < 20; i++) all_gather(t, 0, i % 2 ? "h.1" : "h.2", "TRAIN");
        for (int r = 0; r < WORLD; r++)
            if (r != 2) add(t->ctx[r], 0, gather_of("h.0", "EVAL", 294912));
        fsdp_collective norm = {
            .kind = FSDP_OPERATION_ALL_REDUCE, .dtype = FSDP_DTYPE_FP32, .count = 2, .label = "norm"};
        add(t->ctx[2], 0, norm);
        for (int i = 0; i < more; i++) all_gather(t, 0, "h.3", "TRAIN");
        compose(t, t->text, sizeof t->text);
        const char expected[] = "First difference: ranks 0, 1, 3: #21 all-gather of h.0 in EVAL (294912 bf16); "
                                "rank 2: #21 all-reduce of norm (2 fp32). Last: ";
        assert_memory_equal(t->text, expected, sizeof expected - 1);
        team_close(t);
    }
}

static void the_first_part_of_a_group_that_differs_is_named(void **state)
{
    (void)state;
    team *t = team_open();
    for (int r = 0; r < WORLD; r++) {
        fsdp_collective list[3] = {gather_of("a", NULL, 1), gather_of("b", NULL, r == 0 ? 3 : 2),
                                   gather_of("c", NULL, 3)};
        fsdp__flight_add(&t->ctx[r]->flight, 1, list, 3, 0, 0);
    }
    says(t, "First difference: rank 0: #1, 2 of 3: all-gather of b (3 bf16) on communicator 1; "
            "ranks 1 to 3: #1, 2 of 3: all-gather of b (2 bf16) on communicator 1. "
            "Last: ranks 0 to 3: #1, 3 of 3: all-gather of c (3 bf16) on communicator 1");
    compose_behind(t,
                   "they differ: rank 0: #1, 2 of 3: all-gather of b (3 bf16) on communicator 1; "
                   "ranks 1 to 3: #1, 2 of 3: all-gather of b (2 bf16) on communicator 1",
                   t->text, sizeof t->text);
    assert_string_equal(t->text, "Last: ranks 0 to 3: #1, 3 of 3: all-gather of c (3 bf16) on communicator 1");
    team_close(t);
}

static void a_difference_that_is_too_old_is_said_to_be(void **state)
{
    (void)state;
    team *t = team_open();
    for (int r = 0; r < WORLD; r++) add(t->ctx[r], 0, gather_of("h.0", r == 3 ? "EVAL" : "TRAIN", 8));
    for (int i = 0; i < 400; i++)
        all_gather(t, 0, "a.unit.with.a.name.that.takes.most.of.its.room.1", "PASSPASSPASSPAS");
    compose(t, t->text, sizeof t->text);
    uint64_t before = 0;
    assert_int_equal(
        sscanf(t->text, "Calls differ before #%lu already, where nothing is kept. Last: ranks 0 to 3: #401", &before),
        1);
    assert_true(before > 290 && before < 305); /* some 100 of the longest records fit */
    team_close(t);
}

static void words_fit_any_buffer(void **state)
{
    (void)state;
    team *t = team_open();
    char whole[2048];
    for (int r = 0; r < WORLD; r++) add(t->ctx[r], 0, gather_of(r % 2 ? "h.\xc3\xa4" : "h.0", "TRAIN", (uint64_t)r));
    t->silent[1] = true;
    compose(t, whole, sizeof whole);
    size_t length = strlen(whole);
    for (size_t bytes = 1; bytes < length + 4; bytes++) {
        char *text = malloc(bytes); /* its end is watched */
        assert_non_null(text);
        compose(t, text, bytes);
        assert_int_equal(strlen(text), bytes <= length ? bytes - 1 : length);
        assert_memory_equal(text, whole, strlen(text));
        free(text);
    }
    team_close(t);
}

static void blobs_of_a_mad_rank_do_no_harm(void **state)
{
    (void)state;
    uint64_t seed = 1;
    team *t = team_open();
    char *mad = malloc(FSDP__ORDER_BLOB_BYTES); /* its end is watched */
    assert_non_null(mad);
    for (int i = 0; i < 60; i++) all_gather(t, (uint32_t)i % 2, "h.0", "TRAIN");
    for (int turn = 0; turn < 3000; turn++) {
        const void *told[WORLD];
        fsdp_side_words words = fsdp__order_words(t->ctx[0]);
        for (int r = 0; r < WORLD; r++) {
            words.tell(t->ctx[r], t->blob[r]);
            told[r] = t->blob[r];
        }
        memcpy(mad, t->blob[1], FSDP__ORDER_BLOB_BYTES);
        told[1] = mad;
        for (int k = 0; k < (turn % 8 == 0 ? 1000 : 6); k++) {
            seed = seed * 6364136223846793005u + 1442695040888963407u;
            mad[seed >> 33 & (FSDP__ORDER_BLOB_BYTES - 1)] = (char)(seed >> 56);
        }
        words.compose(words.arg, "", told, WORLD, t->text, sizeof t->text);
        assert_true(strlen(t->text) < sizeof t->text);
    }
    free(mad);
    team_close(t);
}

static void words_of_hundreds_of_ranks(void **state)
{
    (void)state;
    enum { MANY = 1000 };
    fsdp_context *ctx[2] = {bare(), bare()};
    char *blobs = calloc(MANY, FSDP__ORDER_BLOB_BYTES), text[1024];
    const void **told = calloc(MANY, sizeof *told);
    assert_non_null(blobs);
    assert_non_null(told);
    for (int i = 0; i < 300; i++)
        add(ctx[0], 0, gather_of("h.0", "TRAIN", 8)), add(ctx[1], 0, gather_of("h.0", "TRAIN", 8));
    add(ctx[0], 0, gather_of("h.1", "TRAIN", 8)), add(ctx[1], 0, gather_of("h.2", "TRAIN", 8));
    fsdp_side_words words = fsdp__order_words(ctx[0]);
    for (int r = 0; r < MANY; r++) {
        if (r == 10) continue;
        told[r] = blobs + (size_t)r * FSDP__ORDER_BLOB_BYTES;
        words.tell(ctx[r == 500], blobs + (size_t)r * FSDP__ORDER_BLOB_BYTES);
    }
    words.compose(words.arg, "", told, MANY, text, sizeof text);
    assert_string_equal(
        text, "First difference: ranks 0 to 9, 11 to 499, 501 to 999: #301 all-gather of h.1 in TRAIN (8 bf16); "
              "rank 500: #301 all-gather of h.2 in TRAIN (8 bf16). "
              "Last: ranks 0 to 9, 11 to 499, 501 to 999: #301 all-gather of h.1 in TRAIN (8 bf16); "
              "rank 500: #301 all-gather of h.2 in TRAIN (8 bf16); rank 10 did not answer");
    free(told), free(blobs), free(ctx[0]), free(ctx[1]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks_that_agree_are_told_once),
        cmocka_unit_test(host_calls_are_told_as_inside_or_returned),
        cmocka_unit_test(the_first_difference_is_found_however_far_ranks_have_gone_on),
        cmocka_unit_test(the_first_part_of_a_group_that_differs_is_named),
        cmocka_unit_test(a_difference_that_is_too_old_is_said_to_be),
        cmocka_unit_test(words_fit_any_buffer),
        cmocka_unit_test(blobs_of_a_mad_rank_do_no_harm),
        cmocka_unit_test(words_of_hundreds_of_ranks),
    };
    alarm(300);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
