/* SPDX-License-Identifier: MIT */
/* The text: files read in the order of their names, the last tenth of each kept from training, and which bytes a sequence
 * of a step takes. */
#ifndef GPT_DATA_H
#define GPT_DATA_H

#include <stddef.h>
#include <stdint.h>

#include "problem.h"

/* On every Debian and Ubuntu. */
#define DATA_DEFAULT_PATH "/usr/share/common-licenses"

typedef struct data_set {
    uint8_t *train, *held_out; /* all documents' parts, one after another */
    size_t train_bytes, held_out_bytes;
    int documents, duplicates;
    int random_vocab; /* above 0: no text, but tokens below this, drawn by their place */
} data_set;

/* A file, or a folder and the folders in it: links are skipped, so are files whose content was seen already. Both parts
 * must hold a sequence of `context` bytes and one more. On false there is nothing to free. */
bool data_load(data_set *data, const char *path, int context, problem *why);
void data_free(data_set *data);

/* Random tokens below `vocab`: nothing to free, nothing held out. */
data_set data_random(int vocab);

/* Sequence number `sequence` of step `step`, counted over all ranks and micro-steps: a function of its arguments alone,
 * so however a step is split the same sequences are in it. tokens, targets (T): targets[t] follows tokens[t]. */
void data_sequence(const data_set *data, uint64_t seed, uint64_t step, uint64_t sequence, int context, int *tokens,
                   int *targets);

/* Held-out text is judged in windows of `context` bytes that do not overlap. */
size_t data_windows(const data_set *data, int context);
void data_window(const data_set *data, size_t window, int context, int *tokens, int *targets);

#endif
