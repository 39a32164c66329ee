/* SPDX-License-Identifier: MIT */
/* A run of the trainer: what it is asked for, and what comes out. The plain loop and the sharded one take the same. */
#ifndef GPT_JOB_H
#define GPT_JOB_H

#include "data.h"
#include "model.h"
#include "options.h"
#include "progress.h"

enum { JOB_PROMPT_BYTES = 16, JOB_TEXT_BYTES = 200 };

struct fsdp_launch;
struct rank_device;

typedef struct job {
    options opt;
    const struct fsdp_launch *launch; /* this process is one rank of opt.ranks; NULL: ranks are threads of it */
    const struct rank_device *device; /* what ranks compute with (rank.h); the plain loop has its own */
    gpt_shape shape;
    const data_set *data;
    int steps;          /* of this run: opt.steps (which the learning rate follows) or the first of them */
    int evaluate_every; /* 0: never; otherwise also after the last step */
    bool write_text;    /* generate at the end */
    int trace_every;    /* trace a step of rank 0 now and then, for the exposed communication; 0: never */
    int traced_step;    /* this step's tape goes to outcome.tape, and to opt.timeline if that is given; 0: none */
    const char *title;  /* of the picture */
    progress *progress; /* NULL: none */
} job;

/* What one step put on rank 0's wire, and where its compute stream stood. */
typedef struct job_tape {
    double collectives, wire_bytes; /* wire_bytes by the counts of fsdp/host.h */
    double span_ms, exposed_ms;
} job_tape;

typedef struct outcome {
    float *losses;    /* (steps) */
    double held_out;  /* the last evaluation; NAN: none */
    double step_ms;   /* rank 0's: mean, after a few warm-up steps, without a traced last step; NAN: too few */
    double median_ms; /* the same as a median over the last MEDIAN_STEPS; NAN: too few */
    uint64_t peak_bytes, predicted_bytes;                       /* device memory of a rank; 0 in the plain loop */
    uint64_t activation_bytes, gpu_used_bytes, gpu_total_bytes; /* on a GPU; else 0 */
    job_tape tape;
    uint8_t text[JOB_PROMPT_BYTES + JOB_TEXT_BYTES];
    size_t text_bytes;
    problem why;
} outcome;

/* False: out of memory. */
bool outcome_create(outcome *out, int steps);
void outcome_destroy(outcome *out);

/* The unsharded loop: ranks × micro-steps one after another on this thread, gradients summed in the order in which the
 * library sums them, an AdamW of its own. False: out->why has the sentence. */
bool plain_run(const job *j, outcome *out);
/* The loop with the library: a thread a rank, or this process as one rank. */
bool sharded_run(const job *j, outcome *out);

/* ---- What both loops ask ---- */

float job_learning_rate(const job *j, int step);
bool job_evaluates(const job *j, int step);
/* Number of the first sequence that (rank, micro-step) takes in a step: micro-step 0 of all ranks, then micro-step 1, … */
uint64_t job_first_sequence(const job *j, int rank, int micro_step);
/* The step's loss from the sum over its micro-steps and ranks. */
float job_mean_loss(const job *j, float sum);
/* Text to go on from, JOB_PROMPT_BYTES or less of it. Returns how much. */
size_t job_prompt(const job *j, uint8_t *text);
/* What to say when a step's gradient is not finite. */
void job_not_finite(problem *why, int step);

enum { MEDIAN_STEPS = 20 };

/* Time of a step, mean and median: told when each step's report came. */
typedef struct step_clock {
    int first, last; /* steps whose ends are the two ends of the measure */
    double first_s, last_s;
    int n_ends;
    double ends_s[MEDIAN_STEPS + 1]; /* of the last steps, a ring */
} step_clock;

double job_now_s(void);
step_clock job_step_clock(const job *j);
void job_clock_step(step_clock *clock, int step);
double job_step_ms(const step_clock *clock);
double job_median_ms(const step_clock *clock);

#endif
