/* SPDX-License-Identifier: MIT */
/* A batch as it goes to the GPU: one piece of memory with tokens, targets, and the rows sorted by their token, so that the
 * embedding's backward need not add in an order that differs from run to run. */
#ifndef GPT_CUDA_BATCH_H
#define GPT_CUDA_BATCH_H

#include "kernels.h"
#include "model.h"

/* Where everything lies, in bytes from the start; the same for every batch of a shape. */
typedef struct gpt_batch_layout {
    size_t tokens;  /* (R) int, as all others */
    size_t targets; /* (R) */
    size_t order;   /* (R) */
    size_t counts;  /* pieces, merges */
    size_t pieces;  /* (most_pieces) gpt_token_piece */
    size_t merges;  /* (most_merges) gpt_token_merge */
    size_t bytes;
    int most_pieces, most_merges, most_parts;
} gpt_batch_layout;

gpt_batch_layout gpt_batch_layout_of(const gpt_shape *shape);

/* Fill order, counts, pieces and merges of a batch of `rows` tokens. starts: (V + 1) scratch. */
void gpt_batch_sort(void *batch, const gpt_batch_layout *layout, int rows, int vocab, int *starts);

#endif
