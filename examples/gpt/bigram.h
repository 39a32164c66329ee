/* SPDX-License-Identifier: MIT */
/* The model to beat: how often each byte followed each byte in the training part, add-one smoothed. */
#ifndef GPT_BIGRAM_H
#define GPT_BIGRAM_H

#include "data.h"

/* Mean nats a byte over the very predictions that the GPT is judged by: the windows of the held-out part. */
double bigram_held_out(const data_set *data, int context);

#endif
