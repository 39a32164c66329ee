/* SPDX-License-Identifier: MIT */
/* What runs around the visits: batches in, losses out, the next byte. */
#include "tasks.h"

#include <math.h>
#include <string.h>

#include "counter_random.h"

static const double nat_unit = 0x1p24, most_nats = 1000.0; /* a loss beyond, or NaN, counts as this: sums fit 64 bits */
static const uint64_t text_stream = (uint64_t)1 << 62;     /* apart from first values and sequences */
static const double temperature = 0.7;

void batch_fill(void *arg)
{
    const batch_task *task = arg;
    gpt_state *s = task->state;
    const int T = s->shape.context;
    s->sequences = s->shape.batch;
    for (int b = 0; b < s->sequences; b++)
        data_sequence(task->data, task->seed, task->step, task->first_sequence + (uint64_t)b, T,
                      s->tokens + (ptrdiff_t)b * T, s->targets + (ptrdiff_t)b * T);
}

void window_fill(void *arg)
{
    const window_task *task = arg;
    gpt_state *s = task->state;
    const int T = s->shape.context;
    const size_t windows = data_windows(task->data, T);
    s->sequences = s->shape.batch;
    for (int b = 0; b < s->sequences; b++) {
        const size_t window = task->first_window + (size_t)b;
        data_window(task->data, window < windows ? window : windows - 1, T, s->tokens + (ptrdiff_t)b * T,
                    s->targets + (ptrdiff_t)b * T);
    }
}

void window_add(void *arg)
{
    window_task *task = arg;
    const gpt_state *s = task->state;
    const int T = s->shape.context;
    const size_t windows = data_windows(task->data, T);
    for (int b = 0; b < s->sequences && task->first_window + (size_t)b < windows; b++)
        for (int t = 0; t < T; t++) task->nats += llround(fmin((double)s->losses[b * T + t], most_nats) * nat_unit);
}

size_t window_batches(const data_set *data, const gpt_shape *shape)
{
    return (data_windows(data, shape->context) + (size_t)shape->batch - 1) / (size_t)shape->batch;
}

double window_mean(const data_set *data, const gpt_shape *shape, double nats)
{
    return nats / nat_unit / ((double)data_windows(data, shape->context) * shape->context);
}

void text_fill(void *arg)
{
    const text_task *task = arg;
    gpt_state *s = task->state;
    const size_t T = (size_t)s->shape.context, known = task->bytes < T ? task->bytes : T;
    s->sequences = 1;
    for (size_t t = 0; t < T; t++) { /* what stands after the known bytes cannot be seen by them */
        s->tokens[t] = t < known ? task->text[task->bytes - known + t] : 0;
        s->targets[t] = 0;
    }
}

void text_pick(void *arg)
{
    text_task *task = arg;
    const gpt_state *s = task->state;
    const size_t T = (size_t)s->shape.context, known = task->bytes < T ? task->bytes : T;
    const float *logits = s->logits + (known - 1) * GPT_VOCAB;
    float most = logits[0];
    for (int i = 1; i < GPT_VOCAB; i++) most = fmaxf(most, logits[i]);
    double weight[GPT_VOCAB], sum = 0.0;
    for (int i = 0; i < GPT_VOCAB; i++) sum += weight[i] = exp((double)(logits[i] - most) / temperature);
    double left = random_unit(task->seed, text_stream, task->bytes) * sum;
    int pick = 0;
    while (pick < GPT_VOCAB - 1 && (left -= weight[pick]) >= 0.0) pick++;
    task->text[task->bytes++] = (uint8_t)pick;
}
