/* SPDX-License-Identifier: MIT */
/* What runs around the visits, on the same stream: a batch goes in, losses are added up, a byte is chosen. Each function
 * takes its struct as a void pointer, as a stream's function does. */
#ifndef GPT_TASKS_H
#define GPT_TASKS_H

#include "data.h"
#include "model.h"

/* Sequences first_sequence … of a training step become the state's tokens and targets. */
typedef struct batch_task {
    gpt_state *state;
    const data_set *data;
    uint64_t seed, step, first_sequence;
} batch_task;

void batch_fill(void *task);

/* Windows first_window … of the held-out text, as many as a batch holds. Beyond the last window the last is repeated and
 * not counted, so that every pass of every rank has one shape. */
typedef struct window_task {
    gpt_state *state;
    const data_set *data;
    size_t first_window;
    int64_t nats; /* Σ of losses × 2^24, as whole numbers: the same in any order and over any number of ranks */
} window_task;

void window_fill(void *task); /* before the forward */
void window_add(void *task);  /* after it */

/* Passes of B windows that the held-out text takes. */
size_t window_batches(const data_set *data, const gpt_shape *shape);
/* Mean nats a byte, from the sum over all windows. */
double window_mean(const data_set *data, const gpt_shape *shape, double nats);

/* The text so far; text_pick appends one byte. */
typedef struct text_task {
    gpt_state *state;
    uint64_t seed;
    uint8_t *text;
    size_t bytes; /* 1 or more before the first text_fill */
} text_task;

void text_fill(void *task); /* before the forward: the last T bytes as the only sequence */
void text_pick(void *task); /* after it */

#endif
