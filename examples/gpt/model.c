/* SPDX-License-Identifier: MIT */
/* The GPT: parameters, activations, and the forward and backward of each visit. */
#include "model.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "counter_random.h"

int gpt_units(const gpt_shape *shape) { return shape->layers + 1; }

int gpt_unit_params(const gpt_shape *shape, int unit)
{
    return unit == 0 ? HELD_FIRST_W + 2 * shape->layers : BLOCK_PARAMS;
}

static gpt_param matrix(int rows, int columns, float sd)
{
    return (gpt_param){.n_dims = 2,
                       .dims = {(uint64_t)rows, (uint64_t)columns},
                       .elems = (uint64_t)rows * (uint64_t)columns,
                       .sd = sd};
}

static gpt_param vector(int elems, float mean)
{
    return (gpt_param){
        .n_dims = 1, .dims = {(uint64_t)elems}, .elems = (uint64_t)elems, .mean = mean, .no_decay = true};
}

/* GPT-2's 0.02 at its 768 channels; narrow models start wider, or they learn slowly. */
static float first_sd(const gpt_shape *shape) { return 0.554f / sqrtf((float)shape->dim); }

static gpt_param held_param(const gpt_shape *shape, int index)
{
    const int C = shape->dim;
    const float sd = first_sd(shape);
    static const char *const name[] = {"wte", "wpe", "final.w", "final.b"};
    gpt_param param;
    if (index == HELD_WTE) param = matrix(shape->vocab, C, sd);
    else if (index == HELD_WPE) param = matrix(shape->context, C, sd);
    else param = vector(C, (index - HELD_FINAL_W) % 2 == 0 ? 1.0f : 0.0f);
    if (index < HELD_FIRST_W) snprintf(param.name, sizeof param.name, "%s", name[index]);
    else
        snprintf(param.name, sizeof param.name, "h.%d.first.%c", (index - HELD_FIRST_W) / 2,
                 (index - HELD_FIRST_W) % 2 == 0 ? 'w' : 'b');
    return param;
}

gpt_param gpt_param_at(const gpt_shape *shape, int unit, int index)
{
    if (unit == 0) return held_param(shape, index);
    const int C = shape->dim;
    const float sd = first_sd(shape), onto_residual = sd / sqrtf(2.0f * (float)shape->layers);
    static const char *const name[BLOCK_PARAMS] = {"qkv.w",  "qkv.b", "proj.w", "proj.b", "norm.w",
                                                   "norm.b", "up.w",  "up.b",   "down.w", "down.b"};
    gpt_param param = {.n_dims = 0};
    switch (index) {
    case BLOCK_QKV_W: param = matrix(3 * C, C, sd); break;
    case BLOCK_QKV_B: param = vector(3 * C, 0.0f); break;
    case BLOCK_PROJ_W: param = matrix(C, C, onto_residual); break;
    case BLOCK_UP_W: param = matrix(4 * C, C, sd); break;
    case BLOCK_UP_B: param = vector(4 * C, 0.0f); break;
    case BLOCK_DOWN_W: param = matrix(C, 4 * C, onto_residual); break;
    case BLOCK_NORM_W: param = vector(C, 1.0f); break;
    default: param = vector(C, 0.0f); break; /* PROJ_B, NORM_B, DOWN_B */
    }
    snprintf(param.name, sizeof param.name, "h.%d.%s", unit - 1, name[index]);
    return param;
}

float gpt_first_value(const gpt_param *param, uint64_t seed, int unit, int index, uint64_t at)
{
    if (param->sd == 0.0f) return param->mean;
    return param->mean + param->sd * (float)random_normal(seed, (uint64_t)(unit * 4096 + index), at);
}

/* Hands out pieces of state->memory; with memory NULL it only counts. */
static float *take(gpt_state *state, size_t count)
{
    const size_t rounded = (count + 15) / 16 * 16, at = state->bytes / sizeof(float);
    state->bytes += rounded * sizeof(float);
    return state->memory ? state->memory + at : NULL;
}

static void place(gpt_state *s)
{
    const size_t L = (size_t)s->shape.layers, C = (size_t)s->shape.dim, N = (size_t)s->shape.heads;
    const size_t T = (size_t)s->shape.context, B = (size_t)s->shape.batch, R = B * T;
    s->bytes = 0;
    s->encoded = take(s, R * C);
    s->first_norm = take(s, (L + 1) * R * C);
    s->first_mean = take(s, (L + 1) * R);
    s->first_isd = take(s, (L + 1) * R);
    s->qkv = take(s, L * R * 3 * C);
    s->weights = take(s, L * B * N * T * T);
    s->attended = take(s, L * R * C);
    s->middle = take(s, L * R * C);
    s->norm = take(s, L * R * C);
    s->norm_mean = take(s, L * R);
    s->norm_isd = take(s, L * R);
    s->up = take(s, L * R * 4 * C);
    s->gelu = take(s, L * R * 4 * C);
    s->residual = take(s, L * R * C);
    s->logits = take(s, R * GPT_VOCAB);
    s->log_sums = take(s, R);
    s->losses = take(s, R);
    s->d_residual = take(s, R * C);
    s->branch = take(s, R * C);
    s->wide = take(s, R * 4 * C);
    s->d_weights = take(s, T * T);
}

bool gpt_state_create(gpt_state *state, const gpt_shape *shape)
{
    *state = (gpt_state){.shape = *shape, .sequences = shape->batch};
    const size_t rows = (size_t)shape->batch * (size_t)shape->context;
    place(state);
    state->memory = calloc(1, state->bytes);
    state->tokens = calloc(2 * rows, sizeof *state->tokens);
    if (!state->memory || !state->tokens) {
        gpt_state_destroy(state);
        return false;
    }
    state->targets = state->tokens + rows;
    place(state);
    return true;
}

void gpt_state_destroy(gpt_state *state)
{
    free(state->memory);
    free(state->tokens);
    *state = (gpt_state){.memory = NULL};
}

/* Row 0 of layer l in an array of (L, R, width). */
static float *layer_of(const gpt_state *s, float *array, int layer, int width)
{
    return array + (ptrdiff_t)layer * s->shape.batch * s->shape.context * width;
}

static layernorm first_norm(const gpt_state *s, int layer)
{
    return (layernorm){layer_of(s, s->first_norm, layer, s->shape.dim), layer_of(s, s->first_mean, layer, 1),
                       layer_of(s, s->first_isd, layer, 1)};
}

static layernorm second_norm(const gpt_state *s, int layer)
{
    return (layernorm){layer_of(s, s->norm, layer, s->shape.dim), layer_of(s, s->norm_mean, layer, 1),
                       layer_of(s, s->norm_isd, layer, 1)};
}

/* Which of unit 0 normalises before block `layer`, or before the head when layer is L. */
static int first_norm_param(const gpt_state *s, int layer)
{
    return layer < s->shape.layers ? HELD_FIRST_W + 2 * layer : HELD_FINAL_W;
}

static float *residual_before(const gpt_state *s, int layer)
{
    return layer == 0 ? s->encoded : layer_of(s, s->residual, layer - 1, s->shape.dim);
}

static float *weights_of(const gpt_state *s, int layer)
{
    return layer_of(s, s->weights, layer, s->shape.heads * s->shape.context);
}

static int rows_of(const gpt_state *s) { return s->sequences * s->shape.context; }

static attention_shape attention_of(const gpt_state *s)
{
    return (attention_shape){s->sequences, s->shape.context, s->shape.dim, s->shape.heads};
}

static void embed_forward(const gpt_call *call)
{
    const gpt_state *s = call->state;
    void *const *held = call->held;
    const layernorm first = first_norm(s, 0);
    const int norm = first_norm_param(s, 0);
    embedding_forward(s->encoded, s->tokens, held[HELD_WTE], held[HELD_WPE], s->sequences, s->shape.context,
                      s->shape.dim);
    layernorm_forward(&first, s->encoded, held[norm], held[norm + 1], rows_of(s), s->shape.dim);
}

static void block_forward(const gpt_call *call)
{
    const gpt_state *s = call->state;
    void *const *held = call->held, *const *p = call->block;
    const int l = call->layer, C = s->shape.dim, rows = rows_of(s), next_norm = first_norm_param(s, l + 1);
    const layernorm first = first_norm(s, l), second = second_norm(s, l), next = first_norm(s, l + 1);
    const attention_shape attention = attention_of(s);
    float *qkv = layer_of(s, s->qkv, l, 3 * C), *attended = layer_of(s, s->attended, l, C);
    float *middle = layer_of(s, s->middle, l, C), *up = layer_of(s, s->up, l, 4 * C),
          *gelu = layer_of(s, s->gelu, l, 4 * C);

    linear_forward(qkv, first.out, p[BLOCK_QKV_W], p[BLOCK_QKV_B], rows, C, 3 * C);
    attention_forward(attended, weights_of(s, l), qkv, &attention);
    linear_forward(s->branch, attended, p[BLOCK_PROJ_W], p[BLOCK_PROJ_B], rows, C, C);
    residual_layernorm_forward(middle, &second, residual_before(s, l), s->branch, p[BLOCK_NORM_W], p[BLOCK_NORM_B],
                               rows, C);
    linear_forward(up, second.out, p[BLOCK_UP_W], p[BLOCK_UP_B], rows, C, 4 * C);
    gelu_forward(gelu, up, rows * 4 * C);
    linear_forward(s->branch, gelu, p[BLOCK_DOWN_W], p[BLOCK_DOWN_B], rows, 4 * C, C);
    residual_layernorm_forward(layer_of(s, s->residual, l, C), &next, middle, s->branch, held[next_norm],
                               held[next_norm + 1], rows, C);
}

static void head_forward(const gpt_call *call)
{
    const gpt_state *s = call->state;
    const int rows = rows_of(s);
    const layernorm last = first_norm(s, s->shape.layers);
    linear_forward(s->logits, last.out, call->held[HELD_WTE], NULL, rows, s->shape.dim, GPT_VOCAB);
    cross_entropy_forward(s->losses, s->log_sums, s->logits, s->targets, rows);
    if (!call->mean_loss) return;
    double sum = 0.0;
    for (int row = 0; row < rows; row++) sum += (double)s->losses[row];
    *call->mean_loss = (float)(sum / rows);
}

/* Leaves the gradient of the last residual in d_residual. */
static void head_backward(const gpt_call *call)
{
    const gpt_state *s = call->state;
    void *const *held = call->held, *const *grads = call->held_grads;
    const int L = s->shape.layers, C = s->shape.dim, rows = rows_of(s);
    const layernorm last = first_norm(s, L);
    cross_entropy_backward(s->logits, s->log_sums, s->targets, 1.0f / (float)rows, rows);
    linear_backward(s->branch, grads[HELD_WTE], NULL, s->logits, last.out, held[HELD_WTE], rows, C, GPT_VOCAB);
    memset(s->d_residual, 0, (size_t)rows * (size_t)C * sizeof(float));
    layernorm_backward(s->d_residual, grads[HELD_FINAL_W], grads[HELD_FINAL_B], s->branch, &last, residual_before(s, L),
                       held[HELD_FINAL_W], rows, C);
}

/* d_residual: in, the gradient after the block; out, before it. */
static void block_backward(const gpt_call *call)
{
    const gpt_state *s = call->state;
    void *const *held = call->held, *const *p = call->block, *const *g = call->block_grads;
    const int l = call->layer, C = s->shape.dim, rows = rows_of(s), norm = first_norm_param(s, l);
    const layernorm first = first_norm(s, l), second = second_norm(s, l);
    const attention_shape attention = attention_of(s);
    float *qkv = layer_of(s, s->qkv, l, 3 * C), *attended = layer_of(s, s->attended, l, C);
    float *up = layer_of(s, s->up, l, 4 * C), *gelu = layer_of(s, s->gelu, l, 4 * C);

    linear_backward(s->wide, g[BLOCK_DOWN_W], g[BLOCK_DOWN_B], s->d_residual, gelu, p[BLOCK_DOWN_W], rows, 4 * C, C);
    gelu_backward(s->wide, s->wide, up, rows * 4 * C);
    linear_backward(s->branch, g[BLOCK_UP_W], g[BLOCK_UP_B], s->wide, second.out, p[BLOCK_UP_W], rows, C, 4 * C);
    layernorm_backward(s->d_residual, g[BLOCK_NORM_W], g[BLOCK_NORM_B], s->branch, &second,
                       layer_of(s, s->middle, l, C), p[BLOCK_NORM_W], rows, C);
    linear_backward(s->branch, g[BLOCK_PROJ_W], g[BLOCK_PROJ_B], s->d_residual, attended, p[BLOCK_PROJ_W], rows, C, C);
    attention_backward(s->wide, s->d_weights, s->branch, weights_of(s, l), qkv, &attention);
    linear_backward(s->branch, g[BLOCK_QKV_W], g[BLOCK_QKV_B], s->wide, first.out, p[BLOCK_QKV_W], rows, C, 3 * C);
    layernorm_backward(s->d_residual, call->held_grads[norm], call->held_grads[norm + 1], s->branch, &first,
                       residual_before(s, l), held[norm], rows, C);
}

static void embed_backward(const gpt_call *call)
{
    const gpt_state *s = call->state;
    embedding_backward(call->held_grads[HELD_WTE], call->held_grads[HELD_WPE], s->d_residual, s->tokens, s->sequences,
                       s->shape.context, s->shape.dim);
}

void gpt_run(void *arg)
{
    const gpt_call *call = arg;
    switch (call->visit) {
    case GPT_EMBED_FORWARD: embed_forward(call); break;
    case GPT_BLOCK_FORWARD: block_forward(call); break;
    case GPT_HEAD_FORWARD: head_forward(call); break;
    case GPT_HEAD_BACKWARD: head_backward(call); break;
    case GPT_BLOCK_BACKWARD: block_backward(call); break;
    case GPT_EMBED_BACKWARD: embed_backward(call); break;
    }
}
