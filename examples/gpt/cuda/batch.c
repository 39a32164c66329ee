/* SPDX-License-Identifier: MIT */
/* A batch, sorted by token. */
#include "batch.h"

#include <string.h>

static int least(int a, int b) { return a < b ? a : b; }

/* Room for the array behind what there is, aligned as device memory should be. */
static size_t take(gpt_batch_layout *layout, size_t bytes)
{
    const size_t at = layout->bytes;
    layout->bytes += (bytes + 255) / 256 * 256;
    return at;
}

/* A token of n > 32 rows has ⌈n / 32⌉ < 2 n / 32 pieces, each a partial sum; one of fewer has one piece and no partial sum. */
gpt_batch_layout gpt_batch_layout_of(const gpt_shape *shape)
{
    const int rows = shape->batch * shape->context, full = rows / GPT_PIECE_ROWS;
    gpt_batch_layout layout = {.most_pieces = least(shape->vocab, rows) + full,
                               .most_merges = least(shape->vocab, full) + 1,
                               .most_parts = 2 * full + 1};
    layout.tokens = take(&layout, (size_t)rows * sizeof(int));
    layout.targets = take(&layout, (size_t)rows * sizeof(int));
    layout.order = take(&layout, (size_t)rows * sizeof(int));
    layout.counts = take(&layout, 2 * sizeof(int));
    layout.pieces = take(&layout, (size_t)layout.most_pieces * sizeof(gpt_token_piece));
    layout.merges = take(&layout, (size_t)layout.most_merges * sizeof(gpt_token_merge));
    return layout;
}

static void *at(void *batch, size_t offset) { return (char *)batch + offset; }

/* A token's rows, order[begin … end): pieces of them, and what brings the pieces together. */
static void cut(void *batch, const gpt_batch_layout *layout, int token, int begin, int end, int *n_parts)
{
    int *counts = at(batch, layout->counts);
    gpt_token_piece *pieces = at(batch, layout->pieces);
    gpt_token_merge *merges = at(batch, layout->merges);
    const int n = (end - begin + GPT_PIECE_ROWS - 1) / GPT_PIECE_ROWS;
    if (n > 1) merges[counts[1]++] = (gpt_token_merge){token, *n_parts, n};
    for (int i = 0; i < n; i++) {
        const int from = begin + i * GPT_PIECE_ROWS;
        pieces[counts[0]++] =
            (gpt_token_piece){token, from, least(GPT_PIECE_ROWS, end - from), n > 1 ? (*n_parts)++ : -1};
    }
}

void gpt_batch_sort(void *batch, const gpt_batch_layout *layout, int rows, int vocab, int *starts)
{
    const int *tokens = at(batch, layout->tokens);
    int *order = at(batch, layout->order), *counts = at(batch, layout->counts), n_parts = 0;
    memset(starts, 0, ((size_t)vocab + 1) * sizeof *starts);
    for (int row = 0; row < rows; row++) starts[tokens[row] + 1]++;
    for (int token = 0; token < vocab; token++) starts[token + 1] += starts[token];
    for (int row = 0; row < rows; row++) order[starts[tokens[row]]++] = row;
    /* Each start has moved to its token's end. */
    counts[0] = counts[1] = 0;
    for (int token = 0, begin = 0; token < vocab; begin = starts[token++])
        if (starts[token] > begin) cut(batch, layout, token, begin, starts[token], &n_parts);
}
