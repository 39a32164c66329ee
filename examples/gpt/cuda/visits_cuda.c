/* SPDX-License-Identifier: MIT */
/* The visits of model.c, as kernels. Where a gradient is a column sum of d_residual (a bias before a residual), the LayerNorm
 * whose backward wrote d_residual has summed it on the way. */
#include "model_cuda.h"

/* Row 0 of layer l in an array of (layers, R, width) of elements of so many bytes. */
static void *layer_of(const gpt_cuda *c, void *array, int layer, size_t width, size_t element)
{
    const size_t bytes = (size_t)c->shape.batch * (size_t)c->shape.context * width * element;
    return (char *)array + (size_t)layer * ((bytes + 255) / 256 * 256);
}

static void *wide_of(const gpt_cuda *c, void *array, int layer, int columns)
{
    return layer_of(c, array, layer, (size_t)columns, sizeof(uint16_t));
}

static float *statistic_of(const gpt_cuda *c, float *array, int layer)
{
    return layer_of(c, array, layer, 1, sizeof(float));
}

static int rows_of(const gpt_cuda *c) { return c->sequences * c->shape.context; }

static void *gelu_of(const gpt_cuda *c, int layer)
{
    return wide_of(c, c->gelu, c->recompute ? 0 : layer, 4 * c->shape.dim);
}

static const int *tokens_of(const gpt_cuda *c) { return (const int *)(void *)((char *)c->batch + c->layout.tokens); }

/* Which of unit 0 normalises before block `layer`, or before the head when layer is L. */
static int first_norm_param(const gpt_cuda *c, int layer)
{
    return layer < c->shape.layers ? HELD_FIRST_W + 2 * layer : HELD_FINAL_W;
}

static void *residual_before(const gpt_cuda *c, int layer)
{
    return layer == 0 ? c->encoded : wide_of(c, c->residual, layer - 1, c->shape.dim);
}

/* ---- Products ---- */

static gpt_product_shape linear(int rows, int n_in, int n_out)
{
    return (gpt_product_shape){GPT_LINEAR, rows, n_in, n_out, n_out, true};
}

static gpt_product_shape head(const gpt_cuda *c, gpt_product_kind kind, int rows)
{
    return (gpt_product_shape){kind, rows, c->shape.dim, c->shape.vocab, c->stride, false};
}

static gpt_product_shape of_kind(gpt_product_kind kind, int rows, int n_in, int n_out)
{
    return (gpt_product_shape){kind, rows, n_in, n_out, n_out, kind == GPT_LINEAR_GELU};
}

bool gpt_cuda_plan(gpt_cuda *c, int rows, bool training, problem *why)
{
    const int C = c->shape.dim;
    const gpt_product_shape forward[] = {linear(rows, C, 3 * C), linear(rows, C, C), linear(rows, 4 * C, C),
                                         of_kind(GPT_LINEAR_GELU, rows, C, 4 * C), head(c, GPT_LINEAR, rows)};
    const gpt_product_shape backward[] = {
        head(c, GPT_INPUT, rows),
        head(c, GPT_WEIGHT, rows),
        of_kind(GPT_INPUT_GELU, rows, 4 * C, C),
        of_kind(GPT_INPUT, rows, C, 4 * C),
        of_kind(GPT_INPUT, rows, C, C),
        of_kind(GPT_INPUT, rows, C, 3 * C),
        of_kind(GPT_WEIGHT, rows, 4 * C, C),
        of_kind(GPT_WEIGHT, rows, C, 4 * C),
        of_kind(GPT_WEIGHT, rows, C, C),
        of_kind(GPT_WEIGHT, rows, C, 3 * C),
    };
    for (size_t i = 0; i < sizeof forward / sizeof forward[0]; i++)
        if (!gpt_products_plan(&c->products, &forward[i], why)) return false;
    for (size_t i = 0; training && i < sizeof backward / sizeof backward[0]; i++)
        if (!gpt_products_plan(&c->products, &backward[i], why)) return false;
    return true;
}

static bool multiply(const gpt_cuda *c, gpt_product_shape shape, gpt_product_arrays arrays, problem *why)
{
    return gpt_products_run(&c->products, &shape, &arrays, c->stream, why);
}

/* dx (R, I) and dw of out (R, O) = x w ᵀ. */
static bool product_backward(const gpt_cuda *c, int n_in, int n_out, gpt_product_arrays arrays, void *dw, problem *why)
{
    gpt_product_arrays weight = arrays;
    weight.out = dw;
    return multiply(c, of_kind(GPT_WEIGHT, rows_of(c), n_in, n_out), weight, why) &&
           multiply(c, of_kind(arrays.aux ? GPT_INPUT_GELU : GPT_INPUT, rows_of(c), n_in, n_out), arrays, why);
}

/* ---- LayerNorm and sums ---- */

typedef struct norm_at {
    void *out;
    float *mean, *isd;
} norm_at;

static norm_at first_norm(const gpt_cuda *c, int layer)
{
    return (norm_at){wide_of(c, c->first_norm, layer, c->shape.dim), statistic_of(c, c->first_mean, layer),
                     statistic_of(c, c->first_isd, layer)};
}

static norm_at second_norm(const gpt_cuda *c, int layer)
{
    return (norm_at){wide_of(c, c->norm, layer, c->shape.dim), statistic_of(c, c->norm_mean, layer),
                     statistic_of(c, c->norm_isd, layer)};
}

/* sum = x + y, and its norm with w[0] and w[1]. */
static bool add_and_norm(const gpt_cuda *c, void *sum, norm_at norm, const void *x, const void *y, void *const *w,
                         problem *why)
{
    const gpt_norm_forward_args args = {.sum = sum,
                                        .out = norm.out,
                                        .mean = norm.mean,
                                        .inverse_sd = norm.isd,
                                        .x = x,
                                        .y = y,
                                        .w = w[0],
                                        .b = w[1],
                                        .rows = rows_of(c),
                                        .positions = c->shape.context,
                                        .channels = c->shape.dim};
    CUDA_TRY(gpt_norm_forward(c->stream, &args), why);
    return true;
}

/* d_residual = or += what comes through a norm of x from c->branch; grads[0], grads[1]: its parameters'; bias_grad: the column
 * sums of the new d_residual. */
typedef struct norm_back {
    norm_at norm;
    const void *x, *w;
    void *const *grads;
    float *bias_grad;
    bool onto, add_grads, add_bias;
} norm_back;

static bool norm_backward(const gpt_cuda *c, norm_back back, problem *why)
{
    const gpt_norm_backward_args args = {.d = c->d_residual,
                                         .add = back.onto,
                                         .dout = c->branch,
                                         .x = back.x,
                                         .mean = back.norm.mean,
                                         .inverse_sd = back.norm.isd,
                                         .w = back.w,
                                         .parts = c->parts,
                                         .rows = rows_of(c),
                                         .channels = c->shape.dim};
    const gpt_sum_parts_args sums = {.parts = c->parts,
                                     .n_parts = gpt_norm_parts(c->shape.dim),
                                     .n_sums = 3,
                                     .width = c->shape.dim,
                                     .outs = {back.grads[0], back.grads[1], back.bias_grad},
                                     .adds = {back.add_grads, back.add_grads, back.add_bias}};
    CUDA_TRY(gpt_norm_backward(c->stream, &args), why);
    CUDA_TRY(gpt_sum_parts(c->stream, &sums), why);
    return true;
}

/* grad = or += the sum of n_parts rows of `width`. */
static bool sum_into(const gpt_cuda *c, void *grad, const float *parts, int n_parts, int width, bool add, problem *why)
{
    const gpt_sum_parts_args sums = {
        .parts = parts, .n_parts = n_parts, .n_sums = 1, .width = width, .outs = {grad}, .adds = {add}};
    CUDA_TRY(gpt_sum_parts(c->stream, &sums), why);
    return true;
}

static bool bias_backward(const gpt_cuda *c, void *grad, const void *dout, int width, bool add, problem *why)
{
    CUDA_TRY(gpt_column_sums(c->stream, c->parts, dout, rows_of(c), width), why);
    return sum_into(c, grad, c->parts, GPT_COLUMN_PARTS, width, add, why);
}

static gpt_attention_args attention_of(const gpt_cuda *c, int layer)
{
    const size_t lse_width = (size_t)c->shape.heads; /* (B, N, T): N a row */
    return (gpt_attention_args){.sequences = c->sequences,
                                .positions = c->shape.context,
                                .heads = c->shape.heads,
                                .head_dim = c->shape.dim / c->shape.heads,
                                .qkv = wide_of(c, c->qkv, layer, 3 * c->shape.dim),
                                .out = wide_of(c, c->attended, layer, c->shape.dim),
                                .lse = layer_of(c, c->lse, layer, lse_width, sizeof(float)),
                                .dout = c->branch,
                                .dqkv = c->wide,
                                .scratch = c->attention_scratch};
}

/* ---- Visits ---- */

static bool embed_forward(const gpt_cuda *c, const gpt_call *call, problem *why)
{
    const norm_at first = first_norm(c, 0);
    const int norm = first_norm_param(c, 0);
    const gpt_norm_forward_args args = {.sum = c->encoded,
                                        .out = first.out,
                                        .mean = first.mean,
                                        .inverse_sd = first.isd,
                                        .x = call->held[HELD_WTE],
                                        .y = call->held[HELD_WPE],
                                        .tokens = tokens_of(c),
                                        .w = call->held[norm],
                                        .b = call->held[norm + 1],
                                        .rows = rows_of(c),
                                        .positions = c->shape.context,
                                        .channels = c->shape.dim};
    CUDA_TRY(gpt_norm_forward(c->stream, &args), why);
    return true;
}

static bool block_forward(const gpt_cuda *c, const gpt_call *call, problem *why)
{
    void *const *p = call->block;
    const int l = call->layer, C = c->shape.dim, rows = rows_of(c);
    const norm_at first = first_norm(c, l), second = second_norm(c, l), next = first_norm(c, l + 1);
    const gpt_attention_args attention = attention_of(c, l);
    void *middle = wide_of(c, c->middle, l, C), *residual = wide_of(c, c->residual, l, C);
    const gpt_product_arrays qkv = {
        .out = wide_of(c, c->qkv, l, 3 * C), .x = first.out, .w = p[BLOCK_QKV_W], .bias = p[BLOCK_QKV_B]};
    const gpt_product_arrays proj = {
        .out = c->branch, .x = attention.out, .w = p[BLOCK_PROJ_W], .bias = p[BLOCK_PROJ_B]};
    const gpt_product_arrays up = {.out = gelu_of(c, l),
                                   .x = second.out,
                                   .w = p[BLOCK_UP_W],
                                   .bias = p[BLOCK_UP_B],
                                   .aux = wide_of(c, c->up, l, 4 * C)};
    const gpt_product_arrays down = {.out = c->branch, .x = up.out, .w = p[BLOCK_DOWN_W], .bias = p[BLOCK_DOWN_B]};

    if (!multiply(c, linear(rows, C, 3 * C), qkv, why)) return false;
    CUDA_TRY(gpt_attention_forward(c->stream, &attention), why);
    return multiply(c, linear(rows, C, C), proj, why) &&
           add_and_norm(c, middle, second, residual_before(c, l), c->branch, p + BLOCK_NORM_W, why) &&
           multiply(c, of_kind(GPT_LINEAR_GELU, rows, C, 4 * C), up, why) &&
           multiply(c, linear(rows, 4 * C, C), down, why) &&
           add_and_norm(c, residual, next, middle, c->branch, call->held + first_norm_param(c, l + 1), why);
}

static bool head_forward(const gpt_cuda *c, const gpt_call *call, problem *why)
{
    const int rows = rows_of(c);
    const gpt_product_arrays logits = {
        .out = c->logits, .x = first_norm(c, c->shape.layers).out, .w = call->held[HELD_WTE]};
    const gpt_cross_entropy_args loss = {.logits = c->logits,
                                         .targets = (const int *)(void *)((char *)c->batch + c->layout.targets),
                                         .losses = c->losses,
                                         .scale = 1.0f / (float)rows,
                                         .gradient = call->training,
                                         .rows = rows,
                                         .vocab = c->shape.vocab,
                                         .stride = c->stride};
    if (!multiply(c, head(c, GPT_LINEAR, rows), logits, why)) return false;
    CUDA_TRY(gpt_cross_entropy(c->stream, &loss), why);
    if (call->mean_loss) CUDA_TRY(gpt_mean(c->stream, call->mean_loss, c->losses, rows), why);
    return true;
}

/* Leaves the gradient of the last residual in d_residual. */
static bool head_backward(const gpt_cuda *c, const gpt_call *call, problem *why)
{
    const int L = c->shape.layers, rows = rows_of(c);
    const norm_at last = first_norm(c, L);
    const gpt_product_arrays weight = {
        .out = call->held_grads[HELD_WTE], .x = last.out, .dout = c->logits, .add = call->add_grads};
    const gpt_product_arrays input = {.out = c->branch, .dout = c->logits, .w = call->held[HELD_WTE]};
    const norm_back back = {.norm = last,
                            .x = residual_before(c, L),
                            .w = call->held[HELD_FINAL_W],
                            .grads = call->held_grads + HELD_FINAL_W,
                            .bias_grad = c->bias_sum,
                            .add_grads = call->add_grads};
    return multiply(c, head(c, GPT_WEIGHT, rows), weight, why) && multiply(c, head(c, GPT_INPUT, rows), input, why) &&
           norm_backward(c, back, why);
}

static bool mlp_backward(const gpt_cuda *c, const gpt_call *call, problem *why)
{
    void *const *p = call->block, *const *g = call->block_grads;
    const bool add = call->add_grads;
    const int l = call->layer, C = c->shape.dim;
    const norm_at second = second_norm(c, l);
    void *up = wide_of(c, c->up, l, 4 * C);
    const gpt_product_arrays down = {
        .out = c->wide, .x = gelu_of(c, l), .dout = c->d_residual, .w = p[BLOCK_DOWN_W], .aux = up, .add = add};
    const gpt_product_arrays upward = {
        .out = c->branch, .x = second.out, .dout = c->wide, .w = p[BLOCK_UP_W], .add = add};
    const norm_back back = {.norm = second,
                            .x = wide_of(c, c->middle, l, C),
                            .w = p[BLOCK_NORM_W],
                            .grads = g + BLOCK_NORM_W,
                            .bias_grad = g[BLOCK_PROJ_B],
                            .onto = true,
                            .add_grads = add,
                            .add_bias = add};
    if (c->recompute) CUDA_TRY(gpt_gelu_forward(c->stream, gelu_of(c, l), up, (size_t)rows_of(c) * 4 * (size_t)C), why);
    return sum_into(c, g[BLOCK_DOWN_B], c->bias_sum, 1, C, add, why) &&
           product_backward(c, 4 * C, C, down, g[BLOCK_DOWN_W], why) &&
           bias_backward(c, g[BLOCK_UP_B], c->wide, 4 * C, add, why) &&
           product_backward(c, C, 4 * C, upward, g[BLOCK_UP_W], why) && norm_backward(c, back, why);
}

static bool attend_backward(const gpt_cuda *c, const gpt_call *call, problem *why)
{
    void *const *p = call->block, *const *g = call->block_grads;
    const bool add = call->add_grads;
    const int l = call->layer, C = c->shape.dim, norm = first_norm_param(c, l);
    const norm_at first = first_norm(c, l);
    const gpt_attention_args attention = attention_of(c, l);
    const gpt_product_arrays proj = {
        .out = c->branch, .x = attention.out, .dout = c->d_residual, .w = p[BLOCK_PROJ_W], .add = add};
    const gpt_product_arrays qkv = {.out = c->branch, .x = first.out, .dout = c->wide, .w = p[BLOCK_QKV_W], .add = add};
    const norm_back back = {.norm = first,
                            .x = residual_before(c, l),
                            .w = call->held[norm],
                            .grads = call->held_grads + norm,
                            .bias_grad = c->bias_sum,
                            .onto = true,
                            .add_grads = add};
    if (!product_backward(c, C, C, proj, g[BLOCK_PROJ_W], why)) return false;
    CUDA_TRY(gpt_attention_backward(c->stream, &attention), why);
    return bias_backward(c, g[BLOCK_QKV_B], c->wide, 3 * C, add, why) &&
           product_backward(c, C, 3 * C, qkv, g[BLOCK_QKV_W], why) && norm_backward(c, back, why);
}

/* wte has its head's gradient already: what the embedding gives is added. */
static bool embed_backward(const gpt_cuda *c, const gpt_call *call, problem *why)
{
    const char *batch = c->batch;
    const gpt_batch_layout *at = &c->layout;
    const gpt_embed_backward_args args = {.dwte = call->held_grads[HELD_WTE],
                                          .dwpe = call->held_grads[HELD_WPE],
                                          .add_dwpe = call->add_grads,
                                          .parts = c->token_parts,
                                          .d = c->d_residual,
                                          .order = (const int *)(const void *)(batch + at->order),
                                          .pieces = (const gpt_token_piece *)(const void *)(batch + at->pieces),
                                          .merges = (const gpt_token_merge *)(const void *)(batch + at->merges),
                                          .counts = (const int *)(const void *)(batch + at->counts),
                                          .most_pieces = at->most_pieces,
                                          .most_merges = at->most_merges,
                                          .sequences = c->sequences,
                                          .positions = c->shape.context,
                                          .channels = c->shape.dim};
    CUDA_TRY(gpt_embed_backward(c->stream, &args), why);
    return true;
}

bool gpt_cuda_visit(gpt_cuda *c, const gpt_call *call, problem *why)
{
    switch (call->visit) {
    case GPT_EMBED_FORWARD: return embed_forward(c, call, why);
    case GPT_BLOCK_FORWARD: return block_forward(c, call, why);
    case GPT_HEAD_FORWARD: return head_forward(c, call, why);
    case GPT_HEAD_BACKWARD: return head_backward(c, call, why);
    case GPT_BLOCK_BACKWARD: return mlp_backward(c, call, why) && attend_backward(c, call, why);
    case GPT_EMBED_BACKWARD: return embed_backward(c, call, why);
    }
    return problem_set(why, "visit %d is none", (int)call->visit);
}
