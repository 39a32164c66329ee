/* SPDX-License-Identifier: MIT */
/* What CMocka tests say about toy runs. On the main thread only. */
#ifndef TOY_ASSERT_H
#define TOY_ASSERT_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "toy.h"

/* Sanitizers are an order slower: a part of the matrix is enough for them. */
#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define TOY_REDUCED 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define TOY_REDUCED 1
#endif
#ifndef TOY_REDUCED
#define TOY_REDUCED 0
#endif

/* Which of its cases a test is in; stands in its failures. */
static char toy_case[160];
#define TOY_CASE(...) snprintf(toy_case, sizeof toy_case, __VA_ARGS__)

/* Ends the program if a test hangs. */
static inline int toy_deadline(void **unused)
{
    (void)unused;
    alarm(TOY_REDUCED ? 400 : 100);
    toy_case[0] = '\0';
    return 0;
}

/* Runs it; all ranks must come through, with the same reports and the same hash. */
static inline void toy_assert_run(const toy_config *config, toy_script script, void *arg, toy_result *results)
{
    if (!toy_run(config, script, arg, results)) fail_msg("%s %s", toy_case, results[0].error);
    for (uint32_t r = 1; r < config->world && !config->sim; r++) {
        bool same = memcmp(results[r].report, results[0].report, sizeof results[0].report) == 0;
        if (!same || results[r].hash != results[0].hash) fail_msg("%s ranks 0 and %u do not agree", toy_case, r);
    }
}

/* The same losses, norms and parameters, to the bit. */
static inline void toy_assert_same(const toy_result *a, const toy_result *b)
{
    for (uint32_t i = 0; i < TOY_STEPS; i++) {
        const fsdp_step_report *x = &a->report[i], *y = &b->report[i];
        if (memcmp(&a->loss[i], &b->loss[i], sizeof a->loss[i]) != 0)
            fail_msg("%s loss of step %u: %a and %a", toy_case, i + 1, (double)a->loss[i], (double)b->loss[i]);
        if (memcmp(&x->grad_norm, &y->grad_norm, sizeof x->grad_norm) != 0 || x->updates != y->updates)
            fail_msg("%s step %u: norms %a and %a, updates %llu and %llu", toy_case, i + 1, (double)x->grad_norm,
                     (double)y->grad_norm, (unsigned long long)x->updates, (unsigned long long)y->updates);
    }
    if (a->hash != b->hash) fail_msg("%s the parameters differ", toy_case);
}

/* The same losses and parameters as the plain loop, to the bit; the norm but for rounding. */
static inline void toy_assert_plain(const toy_result *run, const toy_result *plain)
{
    for (uint32_t i = 0; i < TOY_STEPS; i++) {
        float norm = run->report[i].grad_norm, expected = plain->report[i].grad_norm;
        if (memcmp(&run->loss[i], &plain->loss[i], sizeof run->loss[i]) != 0)
            fail_msg("%s loss of step %u: %a, plain %a", toy_case, i + 1, (double)run->loss[i], (double)plain->loss[i]);
        if (run->report[i].step > 0 && !(norm >= 0.99999f * expected && norm <= 1.00001f * expected))
            fail_msg("%s norm of step %u: %.9g, plain %.9g", toy_case, i + 1, (double)norm, (double)expected);
    }
    assert_int_equal(run->n_master, plain->n_master);
    for (uint64_t i = 0; i < plain->n_master; i++)
        if (memcmp(&run->master[i], &plain->master[i], sizeof(float)) != 0)
            fail_msg("%s element %llu: %a, plain %a", toy_case, (unsigned long long)i, (double)run->master[i],
                     (double)plain->master[i]);
}

/* Give values back, in whatever order tests end. */
#define toy_free(results) toy_results_free(results, (uint32_t)(sizeof(results) / sizeof *(results)))

#endif
