/* SPDX-License-Identifier: MIT */
/* The trainer's first values: drawn by several threads, they are what one draws. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdlib.h>
#include <unistd.h>

#include "model.h"

enum { SEED = 11 };

static void first_values_are_the_same_however_many_threads_draw_them(void **state)
{
    (void)state;
    const gpt_shape shape = {.layers = 1, .dim = 256, .heads = 2, .context = 8, .batch = 1, .vocab = GPT_VOCAB};
    const gpt_param param = gpt_param_at(&shape, 1, BLOCK_UP_W);
    const uint64_t begin = 1000, count = 200000; /* worth several threads */
    float *many = malloc(count * sizeof *many);
    assert_non_null(many);
    gpt_first_values(&param, SEED, 1, BLOCK_UP_W, begin, count, many);
    for (uint64_t i = 0; i < count; i++)
        assert_true(many[i] == gpt_first_value(&param, SEED, 1, BLOCK_UP_W, begin + i));
    free(many);
}

int main(void)
{
    alarm(60);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(first_values_are_the_same_however_many_threads_draw_them),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
