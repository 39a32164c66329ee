/* SPDX-License-Identifier: MIT */
/* What the plain loop and the sharded one share: schedules, numbers of sequences, clocks. */
#include "job.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { WARM_STEPS = 3, WARM_UP = 20 };

bool outcome_create(outcome *out, int steps)
{
    *out = (outcome){.held_out = (double)NAN, .step_ms = (double)NAN, .median_ms = (double)NAN};
    out->losses = calloc((size_t)steps, sizeof *out->losses);
    return out->losses != NULL;
}

void outcome_destroy(outcome *out)
{
    free(out->losses);
    out->losses = NULL;
}

/* Up in a line over the first steps, then down a cosine to a tenth. */
float job_learning_rate(const job *j, int step)
{
    const int steps = j->opt.steps, up = steps / 10 < WARM_UP ? steps / 10 : WARM_UP;
    if (step <= up) return (float)(j->opt.lr * step / (up + 1));
    const double done = (double)(step - up) / (steps - up + 1);
    return (float)(j->opt.lr * (0.55 + 0.45 * cos(3.141592653589793 * done)));
}

bool job_evaluates(const job *j, int step)
{
    return j->evaluate_every > 0 && (step == j->steps || step % j->evaluate_every == 0);
}

uint64_t job_first_sequence(const job *j, int rank, int micro_step)
{
    return ((uint64_t)micro_step * (uint64_t)j->opt.ranks + (uint64_t)rank) * (uint64_t)j->shape.batch;
}

float job_mean_loss(const job *j, float sum) { return sum / (float)(j->opt.ranks * j->opt.micro_steps); }

size_t job_prompt(const job *j, uint8_t *text)
{
    const size_t bytes = j->data->held_out_bytes < JOB_PROMPT_BYTES ? j->data->held_out_bytes : JOB_PROMPT_BYTES;
    memcpy(text, j->data->held_out, bytes);
    return bytes;
}

void job_not_finite(problem *why, int step)
{
    problem_set(why, "the gradient of step %d is not finite; a smaller --lr may help", step);
}

double job_now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

step_clock job_step_clock(const job *j)
{
    return (step_clock){.first = WARM_STEPS, .last = j->traced_step == j->steps ? j->steps - 1 : j->steps};
}

void job_clock_step(step_clock *clock, int step)
{
    const double now_s = job_now_s();
    if (step == clock->first) clock->first_s = now_s;
    if (step == clock->last) clock->last_s = now_s;
    if (step >= clock->first) clock->ends_s[clock->n_ends++ % (MEDIAN_STEPS + 1)] = now_s;
}

double job_step_ms(const step_clock *clock)
{
    if (clock->last <= clock->first) return (double)NAN;
    return 1e3 * (clock->last_s - clock->first_s) / (clock->last - clock->first);
}

static int by_size(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double job_median_ms(const step_clock *clock)
{
    const int n = clock->n_ends - 1 < MEDIAN_STEPS ? clock->n_ends - 1 : MEDIAN_STEPS;
    double took_ms[MEDIAN_STEPS];
    if (n < 1) return (double)NAN;
    for (int i = 0; i < n; i++) {
        const int end = clock->n_ends - 1 - i;
        took_ms[i] = 1e3 * (clock->ends_s[end % (MEDIAN_STEPS + 1)] - clock->ends_s[(end - 1) % (MEDIAN_STEPS + 1)]);
    }
    qsort(took_ms, (size_t)n, sizeof *took_ms, by_size);
    return n % 2 ? took_ms[n / 2] : 0.5 * (took_ms[n / 2 - 1] + took_ms[n / 2]);
}
