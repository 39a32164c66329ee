/* SPDX-License-Identifier: MIT */
/* First values, many at a time. A billion of them take a thread a minute: so large ranges are divided among threads. */
#include <pthread.h>
#include <unistd.h>

#include "model.h"

enum { MOST_THREADS = 16, LEAST_SHARE = 1 << 14 /* elements that are worth a thread */ };

typedef struct share {
    const gpt_param *param;
    uint64_t seed, begin, count;
    int unit, index;
    float *out;
} share;

static void *fill_share(void *arg)
{
    const share *s = arg;
    for (uint64_t e = 0; e < s->count; e++)
        s->out[e] = gpt_first_value(s->param, s->seed, s->unit, s->index, s->begin + e);
    return NULL;
}

static uint64_t threads_for(uint64_t count)
{
    const long online = sysconf(_SC_NPROCESSORS_ONLN);
    uint64_t n = count / LEAST_SHARE;
    if (n > MOST_THREADS) n = MOST_THREADS;
    if (online > 0 && n > (uint64_t)online) n = (uint64_t)online;
    return n > 0 ? n : 1;
}

void gpt_first_values(const gpt_param *param, uint64_t seed, int unit, int index, uint64_t begin, uint64_t count,
                      float *out)
{
    const uint64_t n = threads_for(count);
    share shares[MOST_THREADS];
    pthread_t threads[MOST_THREADS];
    bool started[MOST_THREADS] = {false};
    for (uint64_t i = 0; i < n; i++) {
        const uint64_t from = count * i / n, to = count * (i + 1) / n;
        shares[i] = (share){param, seed, begin + from, to - from, unit, index, out + from};
        started[i] = i > 0 && pthread_create(&threads[i], NULL, fill_share, &shares[i]) == 0;
    }
    for (uint64_t i = 0; i < n; i++)
        if (!started[i]) fill_share(&shares[i]);
    for (uint64_t i = 0; i < n; i++)
        if (started[i]) pthread_join(threads[i], NULL);
}
