/* SPDX-License-Identifier: MIT */
/* The bigram model: P(b after a) = (n(a b) + 1) / (n(a) + 256). */
#include "bigram.h"

#include <math.h>

double bigram_held_out(const data_set *data, int context)
{
    static const int values = 256;
    uint32_t pairs[256][256] = {{0}}, firsts[256] = {0};
    for (size_t i = 0; i + 1 < data->train_bytes; i++) {
        pairs[data->train[i]][data->train[i + 1]]++;
        firsts[data->train[i]]++;
    }
    const size_t predictions = data_windows(data, context) * (size_t)context;
    double nats = 0.0;
    for (size_t i = 0; i < predictions; i++) {
        const uint8_t a = data->held_out[i], b = data->held_out[i + 1];
        nats -= log((pairs[a][b] + 1.0) / ((double)firsts[a] + values));
    }
    return nats / (double)predictions;
}
