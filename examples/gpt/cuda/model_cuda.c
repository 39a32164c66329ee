/* SPDX-License-Identifier: MIT */
/* The GPT's memory on a GPU, and the ways in and out. */
#include "model_cuda.h"

#include <stdlib.h>
#include <string.h>

static size_t aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }

/* Hands out pieces of c->memory; with memory NULL it only counts. */
static void *take(gpt_cuda *c, size_t layers, size_t bytes)
{
    const size_t at = c->bytes;
    c->bytes += layers * aligned(bytes);
    return c->memory ? c->memory + at : NULL;
}

static size_t largest(size_t a, size_t b) { return a > b ? a : b; }

static void place(gpt_cuda *c)
{
    const size_t L = (size_t)c->shape.layers, C = (size_t)c->shape.dim,
                 R = (size_t)c->shape.batch * (size_t)c->shape.context;
    const size_t row = sizeof(uint16_t) * R, statistic = sizeof(float) * R;
    const gpt_attention_args attention = {.sequences = c->shape.batch,
                                          .positions = c->shape.context,
                                          .heads = c->shape.heads,
                                          .head_dim = c->shape.dim / c->shape.heads};
    const size_t norm_parts = (size_t)gpt_norm_parts(c->shape.dim) * 3 * C,
                 column_parts = (size_t)GPT_COLUMN_PARTS * 4 * C;
    c->attention_scratch_bytes = gpt_attention_scratch_bytes(&attention);
    c->bytes = 0;
    c->batch = take(c, 1, c->layout.bytes);
    c->encoded = take(c, 1, row * C);
    c->first_norm = take(c, L + 1, row * C);
    c->first_mean = take(c, L + 1, statistic);
    c->first_isd = take(c, L + 1, statistic);
    c->qkv = take(c, L, row * 3 * C);
    c->lse = take(c, L, gpt_attention_lse_bytes(&attention));
    c->attended = take(c, L, row * C);
    c->middle = take(c, L, row * C);
    c->norm = take(c, L, row * C);
    c->norm_mean = take(c, L, statistic);
    c->norm_isd = take(c, L, statistic);
    c->up = take(c, L, row * 4 * C);
    c->gelu = take(c, c->recompute ? 1 : L, row * 4 * C);
    c->residual = take(c, L, row * C);
    c->logits = take(c, 1, row * (size_t)c->stride);
    c->losses = take(c, 1, statistic);
    c->d_residual = take(c, 1, row * C);
    c->branch = take(c, 1, row * C);
    c->wide = take(c, 1, row * 4 * C);
    c->parts = take(c, 1, sizeof(float) * largest(norm_parts, column_parts));
    c->bias_sum = take(c, 1, sizeof(float) * C);
    c->token_parts = take(c, 1, sizeof(float) * (size_t)c->layout.most_parts * C);
    c->attention_scratch = take(c, 1, c->attention_scratch_bytes);
}

static bool check_shape(const gpt_shape *shape, problem *why)
{
    const int head = shape->dim / shape->heads;
    if (head != 32 && head != 64 && head != 128)
        return problem_set(
            why, "--device cuda: heads of %d channels; attention there has 32, 64 or 128: change --dim or --heads",
            head);
    if (shape->dim > GPT_MOST_CHANNELS)
        return problem_set(why, "--device cuda: --dim %d is more than %d", shape->dim, GPT_MOST_CHANNELS);
    int most = 0;
    CUDA_TRY(gpt_most_vocab(&most), why);
    if (shape->vocab > most)
        return problem_set(why, "--device cuda: --vocab %d is more than the %d that this GPU's shared memory holds",
                           shape->vocab, most);
    return true;
}

static bool take_memory(gpt_cuda *c, problem *why)
{
    const size_t rows = (size_t)c->shape.batch * (size_t)c->shape.context;
    place(c);
    const cudaError_t error = cudaMalloc((void **)&c->memory, c->bytes);
    if (error != cudaSuccess) {
        c->memory = NULL;
        return problem_set(why, "no %.1f MiB on the GPU for activations (%s): take a smaller --batch, or --recompute",
                           (double)c->bytes / 1048576.0, cudaGetErrorString(error));
    }
    place(c);
    CUDA_TRY(cudaHostAlloc((void **)&c->losses_back, rows * sizeof *c->losses_back, cudaHostAllocDefault), why);
    if (c->shape.vocab == GPT_VOCAB)
        CUDA_TRY(cudaHostAlloc((void **)&c->logits_back, (size_t)c->shape.context * GPT_VOCAB * sizeof *c->logits_back,
                               cudaHostAllocDefault),
                 why);
    c->starts = calloc((size_t)c->shape.vocab + 1, sizeof *c->starts);
    return c->starts ? true : problem_set(why, "no memory to sort tokens with");
}

bool gpt_cuda_create(gpt_cuda *c, const gpt_shape *shape, bool recompute, bool text, cudaStream_t stream, problem *why)
{
    *c = (gpt_cuda){.shape = *shape,
                    .sequences = shape->batch,
                    .recompute = recompute,
                    .stride = (shape->vocab + 127) / 128 * 128,
                    .stream = stream,
                    .layout = gpt_batch_layout_of(shape)};
    if (!check_shape(shape, why) || !take_memory(c, why)) return false;
    CUDA_TRY(gpt_kernels_init(), why);
    CUDA_TRY(gpt_attention_init(), why);
    return gpt_products_open(&c->products, why) && gpt_cuda_plan(c, shape->batch * shape->context, true, why) &&
           (!text || gpt_cuda_plan(c, shape->context, false, why)) && gpt_products_warm(&c->products, stream, why);
}

void gpt_cuda_destroy(gpt_cuda *c)
{
    gpt_products_close(&c->products);
    if (c->losses_back) cudaFreeHost(c->losses_back);
    if (c->logits_back) cudaFreeHost(c->logits_back);
    if (c->memory) cudaFree(c->memory);
    free(c->starts);
    *c = (gpt_cuda){.memory = NULL};
}

bool gpt_cuda_host_state(gpt_state *state, const gpt_shape *shape)
{
    const size_t rows = (size_t)shape->batch * (size_t)shape->context;
    const size_t logits = shape->vocab == GPT_VOCAB ? (size_t)shape->context * GPT_VOCAB : 0;
    *state = (gpt_state){.shape = *shape, .sequences = shape->batch};
    state->memory = calloc(rows + logits, sizeof *state->memory);
    if (!state->memory) return false;
    state->losses = state->memory;
    state->logits = state->memory + rows;
    return true;
}

void gpt_cuda_stage(const gpt_cuda *c, gpt_state *state, void *staged)
{
    state->tokens = (int *)(void *)((char *)staged + c->layout.tokens);
    state->targets = (int *)(void *)((char *)staged + c->layout.targets);
}

bool gpt_cuda_put(gpt_cuda *c, const gpt_state *state, void *staged, problem *why)
{
    c->sequences = state->sequences;
    gpt_batch_sort(staged, &c->layout, c->sequences * c->shape.context, c->shape.vocab, c->starts);
    CUDA_TRY(cudaMemcpyAsync(c->batch, staged, c->layout.bytes, cudaMemcpyHostToDevice, c->stream), why);
    return true;
}

bool gpt_cuda_fetch(gpt_cuda *c, problem *why)
{
    const size_t rows = (size_t)c->sequences * (size_t)c->shape.context;
    CUDA_TRY(cudaMemcpyAsync(c->losses_back, c->losses, rows * sizeof *c->losses, cudaMemcpyDeviceToHost, c->stream),
             why);
    if (!c->logits_back) return true;
    const size_t bytes = (size_t)c->shape.context * GPT_VOCAB * sizeof *c->logits_back; /* the stride is V there */
    CUDA_TRY(cudaMemcpyAsync(c->logits_back, c->logits, bytes, cudaMemcpyDeviceToHost, c->stream), why);
    return true;
}

void gpt_cuda_taken(const gpt_cuda *c, gpt_state *state)
{
    memcpy(state->losses, c->losses_back, (size_t)c->sequences * (size_t)c->shape.context * sizeof *state->losses);
    if (!c->logits_back) return;
    for (int i = 0; i < c->shape.context * GPT_VOCAB; i++) {
        const uint32_t bits = (uint32_t)c->logits_back[i] << 16;
        memcpy(&state->logits[i], &bits, sizeof bits);
    }
}
