/* SPDX-License-Identifier: MIT */
/* The trainer's arithmetic: products against naive sums, every backward against finite differences, and the promise that
 * how a step is split between ranks and micro-steps changes no bit. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bigram.h"
#include "counter_random.h"
#include "gemm.h"
#include "job.h"
#include "model.h"
#include "tasks.h"

enum { MOST = 1 << 16, SEED = 11 };

/* Numbers from (-scale, scale); each call of a test gets a stream of its own. */
static uint64_t stream;

static float *numbers(int count, double scale)
{
    float *x = malloc((size_t)count * sizeof *x);
    assert_non_null(x);
    stream++;
    for (int i = 0; i < count; i++) x[i] = (float)(scale * (2.0 * random_unit(SEED, stream, (uint64_t)i) - 1.0));
    return x;
}

static float *zeros(int count)
{
    float *x = calloc((size_t)count, sizeof *x);
    assert_non_null(x);
    return x;
}

static double inner(const float *x, const float *y, int count)
{
    double sum = 0.0;
    for (int i = 0; i < count; i++) sum += (double)x[i] * (double)y[i];
    return sum;
}

/* ---- Finite differences ---- */

typedef double (*loss_fn)(void *arg);

/* What fp32 leaves of a slope: a loss that is a sum over random pulls, and the mean loss of the model. */
static const double kernel_noise = 5e-4, model_noise = 2e-5;

/* Slope of the loss when x goes along d, against the gradient's. */
static void check_slope(const char *what, loss_fn loss, void *arg, float *x, const float *grad, const double *d,
                        int count, double noise)
{
    static float before[MOST];
    const double h = 1e-2;
    double expected = 0.0;
    memcpy(before, x, (size_t)count * sizeof *x);
    for (int i = 0; i < count; i++) expected += (double)grad[i] * d[i];
    for (int i = 0; i < count; i++) x[i] = (float)((double)before[i] + h * d[i]);
    const double up = loss(arg);
    for (int i = 0; i < count; i++) x[i] = (float)((double)before[i] - h * d[i]);
    const double down = loss(arg);
    memcpy(x, before, (size_t)count * sizeof *x);
    const double slope = (up - down) / (2.0 * h);
    if (fabs(slope - expected) > 0.01 * fabs(expected) + noise)
        fail_msg("%s: the loss has slope %g, the gradient says %g", what, slope, expected);
}

/* Along the gradient, and along three random directions of length 1. */
static void check_gradient(const char *what, loss_fn loss, void *arg, float *x, const float *grad, int count,
                           double noise)
{
    static double d[MOST];
    const double length = sqrt(inner(grad, grad, count));
    assert_true(count <= MOST);
    if (length < 20.0 * noise) fail_msg("%s: the gradient is lost in the noise", what);
    for (int i = 0; i < count; i++) d[i] = (double)grad[i] / length;
    check_slope(what, loss, arg, x, grad, d, count, noise);
    for (uint64_t trial = 0; trial < 3; trial++) {
        for (int i = 0; i < count; i++)
            d[i] = (random_bits(SEED, 1000 + trial, (uint64_t)i) & 1 ? 1.0 : -1.0) / sqrt((double)count);
        check_slope(what, loss, arg, x, grad, d, count, noise);
    }
}

/* ---- Products ---- */

static void check_product(int m, int n, int k, bool a_transposed, bool b_transposed, bool add)
{
    const int extra = 3, a_rows = a_transposed ? k : m, b_rows = b_transposed ? n : k;
    const gemm_source a = {numbers(a_rows * (m + k + extra), 1.0), (a_transposed ? m : k) + extra, a_transposed};
    const gemm_source b = {numbers(b_rows * (n + k + extra), 1.0), (b_transposed ? k : n) + extra, b_transposed};
    float *c = numbers(m * (n + extra), 1.0), *before = malloc((size_t)(m * (n + extra)) * sizeof *before);
    assert_non_null(before);
    memcpy(before, c, (size_t)(m * (n + extra)) * sizeof *before);
    gemm(m, n, k, a, b, (gemm_target){c, n + extra, add});
    for (int i = 0; i < m; i++) {
        for (int j = 0; j < n; j++) {
            double sum = add ? (double)before[i * (n + extra) + j] : 0.0;
            for (int p = 0; p < k; p++)
                sum += (double)a.at[a_transposed ? p * a.stride + i : i * a.stride + p] *
                       (double)b.at[b_transposed ? j * b.stride + p : p * b.stride + j];
            if (fabs(sum - (double)c[i * (n + extra) + j]) > 1e-6 * (k + 10))
                fail_msg("%d × %d × %d: element %d, %d is %g, not %g", m, n, k, i, j, (double)c[i * (n + extra) + j],
                         sum);
        }
        for (int j = n; j < n + extra; j++) assert_true(c[i * (n + extra) + j] == before[i * (n + extra) + j]);
    }
    free((void *)(uintptr_t)a.at);
    free((void *)(uintptr_t)b.at);
    free(before);
    free(c);
}

static void products_are_the_naive_sums_for_every_shape_and_transpose(void **state)
{
    (void)state;
    static const int shape[][3] = {{1, 1, 1},   {6, 16, 4},    {7, 17, 9},   {13, 5, 130},
                                   {64, 33, 8}, {20, 300, 40}, {5, 270, 257}};
    for (size_t s = 0; s < sizeof shape / sizeof shape[0]; s++)
        for (int way = 0; way < 8; way++)
            check_product(shape[s][0], shape[s][1], shape[s][2], way & 1, way & 2, way & 4);
}

/* ---- Kernels. Each test's loss is Σ out × pull with random pulls, so that pull is the gradient of out. ---- */

typedef struct kernel_test {
    int rows, n_in, n_out;
    float *x, *y, *w, *b, *out, *pull, *sum;
    layernorm ln;
    attention_shape attention;
    float *weights;
    int *ids;
} kernel_test;

static double layernorm_loss(void *arg)
{
    const kernel_test *t = arg;
    layernorm_forward(&t->ln, t->x, t->w, t->b, t->rows, t->n_in);
    return inner(t->ln.out, t->pull, t->rows * t->n_in);
}

static void layernorm_backward_is_the_slope_and_adds(void **state)
{
    (void)state;
    const int R = 5, C = 29;
    kernel_test t = {.rows = R,
                     .n_in = C,
                     .x = numbers(R * C, 2.0),
                     .w = numbers(C, 1.0),
                     .b = numbers(C, 1.0),
                     .pull = numbers(R * C, 1.0),
                     .ln = {zeros(R * C), zeros(R), zeros(R)}};
    float *dx = zeros(R * C), *dw = zeros(C), *db = zeros(C);
    layernorm_loss(&t);
    layernorm_backward(dx, dw, db, t.pull, &t.ln, t.x, t.w, R, C);
    check_gradient("x", layernorm_loss, &t, t.x, dx, R * C, kernel_noise);
    check_gradient("w", layernorm_loss, &t, t.w, dw, C, kernel_noise);
    check_gradient("b", layernorm_loss, &t, t.b, db, C, kernel_noise);
    const float first[] = {dx[3], dw[3], db[3]};
    layernorm_loss(&t);
    layernorm_backward(dx, dw, db, t.pull, &t.ln, t.x, t.w, R, C);
    assert_true(fabsf(dx[3] - 2 * first[0]) < 1e-5f && fabsf(dw[3] - 2 * first[1]) < 1e-5f);
    assert_true(fabsf(db[3] - 2 * first[2]) < 1e-5f);
    float *const all[] = {t.x, t.w, t.b, t.pull, t.ln.out, t.ln.mean, t.ln.inverse_sd, dx, dw, db};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) free(all[i]);
}

static void the_fused_kernel_is_an_addition_and_a_layernorm(void **state)
{
    (void)state;
    const int R = 4, C = 24;
    float *x = numbers(R * C, 1.0), *y = numbers(R * C, 1.0), *w = numbers(C, 1.0), *b = numbers(C, 1.0);
    float *sum = zeros(R * C), *memory = zeros(4 * R * C);
    const layernorm fused = {memory, memory + R * C, memory + R * C + R};
    const layernorm apart = {memory + 2 * R * C, memory + 3 * R * C, memory + 3 * R * C + R};
    residual_layernorm_forward(sum, &fused, x, y, w, b, R, C);
    for (int i = 0; i < R * C; i++) assert_true(sum[i] == x[i] + y[i]);
    layernorm_forward(&apart, sum, w, b, R, C);
    assert_memory_equal(memory, memory + 2 * R * C, (size_t)(R * C + 2 * R) * sizeof *memory);
    float *const all[] = {x, y, w, b, sum, memory};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) free(all[i]);
}

static double linear_loss(void *arg)
{
    const kernel_test *t = arg;
    linear_forward(t->out, t->x, t->w, t->b, t->rows, t->n_in, t->n_out);
    return inner(t->out, t->pull, t->rows * t->n_out);
}

static void linear_backward_is_the_slope_and_adds_to_weights(void **state)
{
    (void)state;
    const int R = 9, I = 21, O = 13;
    kernel_test t = {.rows = R,
                     .n_in = I,
                     .n_out = O,
                     .x = numbers(R * I, 1.0),
                     .w = numbers(O * I, 1.0),
                     .b = numbers(O, 1.0),
                     .out = zeros(R * O),
                     .pull = numbers(R * O, 1.0)};
    float *dx = numbers(R * I, 1.0), *dw = zeros(O * I), *db = zeros(O);
    linear_backward(dx, dw, db, t.pull, t.x, t.w, R, I, O);
    check_gradient("x", linear_loss, &t, t.x, dx, R * I, kernel_noise);
    check_gradient("w", linear_loss, &t, t.w, dw, O * I, kernel_noise);
    check_gradient("bias", linear_loss, &t, t.b, db, O, kernel_noise);
    const float first[] = {dx[2], dw[2], db[2]};
    linear_backward(dx, dw, db, t.pull, t.x, t.w, R, I, O);
    assert_true(dx[2] == first[0] && fabsf(dw[2] - 2 * first[1]) < 1e-5f && fabsf(db[2] - 2 * first[2]) < 1e-5f);
    float *const all[] = {t.x, t.w, t.b, t.out, t.pull, dx, dw, db};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) free(all[i]);
}

static double gelu_loss(void *arg)
{
    const kernel_test *t = arg;
    gelu_forward(t->out, t->x, t->rows);
    return inner(t->out, t->pull, t->rows);
}

static void gelu_is_the_formula_with_tanh_and_its_backward_the_slope(void **state)
{
    (void)state;
    const int n = 1100; /* more than two chunks, and a rest */
    kernel_test t = {.rows = n, .x = numbers(n, 4.0), .pull = numbers(n, 1.0), .out = zeros(n)};
    t.x[0] = 1e4f;
    t.x[1] = -1e4f;
    gelu_forward(t.out, t.x, n);
    for (int i = 0; i < n; i++) {
        const double x = (double)t.x[i],
                     exact = 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
        assert_true(fabs(exact - (double)t.out[i]) <= 1e-6 * (1.0 + fmax(x, 0.0)));
    }
    t.x[0] = t.x[1] = 0.5f;
    float *dx = zeros(n);
    gelu_backward(dx, t.pull, t.x, n);
    check_gradient("x", gelu_loss, &t, t.x, dx, n, kernel_noise);
    float *const all[] = {t.x, t.pull, t.out, dx};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) free(all[i]);
}

static double attention_loss(void *arg)
{
    const kernel_test *t = arg;
    attention_forward(t->out, t->weights, t->x, &t->attention);
    return inner(t->out, t->pull, t->rows);
}

static void attention_sees_no_later_position_and_its_backward_is_the_slope(void **state)
{
    (void)state;
    const int B = 2, T = 7, C = 12, N = 3;
    kernel_test t = {.rows = B * T * C,
                     .x = numbers(B * T * 3 * C, 1.5),
                     .pull = numbers(B * T * C, 1.0),
                     .out = zeros(B * T * C),
                     .weights = zeros(B * N * T * T),
                     .attention = {B, T, C, N}};
    float *dqkv = numbers(B * T * 3 * C, 1.0), *dp = zeros(T * T), *early = zeros(B * T * C);
    attention_loss(&t);
    memcpy(early, t.out, (size_t)(B * T * C) * sizeof *early);
    attention_backward(dqkv, dp, t.pull, t.weights, t.x, &t.attention);
    check_gradient("qkv", attention_loss, &t, t.x, dqkv, B * T * 3 * C, kernel_noise);
    for (int i = 0; i < 3 * C; i++) t.x[(T - 1) * 3 * C + i] += 1.0f;
    attention_loss(&t);
    assert_memory_equal(early, t.out, (size_t)((T - 1) * C) * sizeof *early);
    assert_true(memcmp(early + (T - 1) * C, t.out + (T - 1) * C, (size_t)C * sizeof *early) != 0);
    float *const all[] = {t.x, t.pull, t.out, t.weights, dqkv, dp, early};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) free(all[i]);
}

static double cross_entropy_loss(void *arg)
{
    const kernel_test *t = arg;
    double sum = 0.0;
    cross_entropy_forward(t->out, t->sum, t->x, t->ids, t->rows);
    for (int i = 0; i < t->rows; i++) sum += (double)t->out[i] * 0.25;
    return sum;
}

static void cross_entropy_is_exact_and_its_backward_the_slope(void **state)
{
    (void)state;
    enum { R = 6 };
    int targets[R] = {0, 255, 3, 3, 77, 128};
    kernel_test t = {.rows = R, .x = numbers(R * GPT_VOCAB, 5.0), .out = zeros(R), .sum = zeros(R), .ids = targets};
    cross_entropy_loss(&t);
    for (int r = 0; r < R; r++) {
        double sum = 0.0;
        for (int i = 0; i < GPT_VOCAB; i++) sum += exp((double)t.x[r * GPT_VOCAB + i]);
        assert_true(fabs(log(sum) - (double)t.x[r * GPT_VOCAB + targets[r]] - (double)t.out[r]) < 1e-5);
    }
    float *dx = malloc(R * GPT_VOCAB * sizeof *dx);
    assert_non_null(dx);
    memcpy(dx, t.x, R * GPT_VOCAB * sizeof *dx);
    cross_entropy_backward(dx, t.sum, targets, 0.25f, R);
    check_gradient("logits", cross_entropy_loss, &t, t.x, dx, R * GPT_VOCAB, kernel_noise);
    float *const all[] = {t.x, t.out, t.sum, dx};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) free(all[i]);
}

/* ---- The model ---- */

static const gpt_shape small = {.layers = 2, .dim = 12, .heads = 3, .context = 6, .batch = 2, .vocab = GPT_VOCAB};

enum { UNITS = 3, MOST_PARAMS = BLOCK_PARAMS };

typedef struct model_test {
    gpt_state state;
    void *params[UNITS][MOST_PARAMS], *grads[UNITS][MOST_PARAMS];
} model_test;

static void run(model_test *t, gpt_visit visit, int layer, float *loss)
{
    gpt_call call = {.state = &t->state,
                     .visit = visit,
                     .layer = layer,
                     .held = t->params[0],
                     .held_grads = t->grads[0],
                     .block = t->params[layer + 1],
                     .block_grads = t->grads[layer + 1],
                     .mean_loss = loss};
    gpt_run(&call);
}

static double model_loss(void *arg)
{
    model_test *t = arg;
    float mean = 0.0f;
    run(t, GPT_EMBED_FORWARD, 0, NULL);
    for (int l = 0; l < small.layers; l++) run(t, GPT_BLOCK_FORWARD, l, NULL);
    run(t, GPT_HEAD_FORWARD, 0, &mean);
    double sum = 0.0;
    for (int row = 0; row < small.batch * small.context; row++) sum += (double)t->state.losses[row];
    assert_true(fabs(sum / (small.batch * small.context) - (double)mean) < 1e-5);
    return sum / (small.batch * small.context);
}

static void model_backward(model_test *t)
{
    model_loss(t);
    run(t, GPT_HEAD_BACKWARD, 0, NULL);
    for (int l = small.layers - 1; l >= 0; l--) run(t, GPT_BLOCK_BACKWARD, l, NULL);
    run(t, GPT_EMBED_BACKWARD, 0, NULL);
}

static void gradients_of_every_parameter_are_slopes_of_the_loss_and_add_up(void **state)
{
    (void)state;
    static model_test t;
    assert_true(gpt_state_create(&t.state, &small));
    for (int i = 0; i < small.batch * small.context; i++) {
        t.state.tokens[i] = (int)(random_bits(SEED, 7, (uint64_t)i) % 5);
        t.state.targets[i] = (int)(random_bits(SEED, 8, (uint64_t)i) % 5);
    }
    for (int u = 0; u < UNITS; u++)
        for (int i = 0; i < gpt_unit_params(&small, u); i++) {
            const gpt_param param = gpt_param_at(&small, u, i);
            float *value = t.params[u][i] = numbers((int)param.elems, 0.4);
            for (uint64_t e = 0; e < param.elems; e++) value[e] += param.mean;
            t.grads[u][i] = zeros((int)param.elems);
        }
    model_backward(&t);
    for (int u = 0; u < UNITS; u++)
        for (int i = 0; i < gpt_unit_params(&small, u); i++) {
            const gpt_param param = gpt_param_at(&small, u, i);
            check_gradient(param.name, model_loss, &t, t.params[u][i], t.grads[u][i], (int)param.elems, model_noise);
        }
    const float once = *(float *)t.grads[1][BLOCK_UP_W], once_held = *(float *)t.grads[0][HELD_FINAL_W];
    model_backward(&t);
    assert_true(fabsf(*(float *)t.grads[1][BLOCK_UP_W] - 2 * once) < 1e-5f);
    assert_true(fabsf(*(float *)t.grads[0][HELD_FINAL_W] - 2 * once_held) < 1e-5f);
    for (int u = 0; u < UNITS; u++)
        for (int i = 0; i < MOST_PARAMS; i++) {
            free(t.params[u][i]);
            free(t.grads[u][i]);
        }
    gpt_state_destroy(&t.state);
}

/* ---- The loop ---- */

static uint8_t letters[4000];

static data_set some_text(void)
{
    for (size_t i = 0; i < sizeof letters; i++)
        letters[i] = (uint8_t)('a' + random_bits(SEED, 9, i) % 3 + (i % 2 ? 10 : 0));
    return (data_set){.train = letters, .train_bytes = 3600, .held_out = letters + 3600, .held_out_bytes = 400};
}

static void run_plain(const data_set *data, int ranks, int micro_steps, bool keep, outcome *out)
{
    job j = {.opt = {.ranks = ranks, .micro_steps = micro_steps, .steps = 30, .seed = 1, .lr = 0.01, .keep_full = keep},
             .shape = small,
             .data = data,
             .steps = 30,
             .evaluate_every = 30};
    assert_true(outcome_create(out, j.steps));
    if (!plain_run(&j, out)) fail_msg("%s", out->why.text);
}

static void ranks_and_micro_steps_may_be_exchanged_to_the_last_bit(void **state)
{
    (void)state;
    const data_set data = some_text();
    outcome wide, deep;
    run_plain(&data, 4, 1, false, &wide);
    run_plain(&data, 1, 4, false, &deep);
    assert_memory_equal(wide.losses, deep.losses, 30 * sizeof *wide.losses);
    assert_true(wide.held_out == deep.held_out);
    assert_true(wide.losses[29] < 0.5f * wide.losses[0]);
    outcome_destroy(&deep);
    run_plain(&data, 1, 4, true, &deep); /* another order of sums: the same but for the last bits */
    assert_true(fabsf(wide.losses[29] - deep.losses[29]) < 0.05f);
    outcome_destroy(&wide);
    outcome_destroy(&deep);
}

static void every_sequence_of_a_step_is_taken_once_however_it_is_split(void **state)
{
    (void)state;
    for (int ranks = 1; ranks <= 4; ranks++) {
        const int micro_steps = 12 / ranks;
        const job j = {.opt = {.ranks = ranks, .micro_steps = micro_steps}, .shape = small};
        bool taken[12] = {false};
        for (int rank = 0; rank < ranks; rank++)
            for (int micro = 0; micro < micro_steps; micro++) {
                const uint64_t first = job_first_sequence(&j, rank, micro);
                assert_true(first % (uint64_t)small.batch == 0 && first / (uint64_t)small.batch < 12);
                assert_false(taken[first / (uint64_t)small.batch]);
                taken[first / (uint64_t)small.batch] = true;
            }
    }
}

static void the_bigram_model_is_add_one_smoothed(void **state)
{
    (void)state;
    uint8_t train[] = "ababac", held[] = "abb"; /* a: 3 followers, b 2, c 1; b: 2 followers, both a */
    const data_set data = {.train = train, .train_bytes = 6, .held_out = held, .held_out_bytes = 3};
    const double expected = -(log(3.0 / 259.0) + log(1.0 / 258.0)) / 2.0;
    assert_true(fabs(bigram_held_out(&data, 2) - expected) < 1e-12);
}

static void counter_random_numbers_repeat_and_are_normal(void **state)
{
    (void)state;
    double sum = 0.0, squares = 0.0;
    for (uint64_t i = 0; i < 20000; i++) {
        const double x = random_normal(3, 4, i);
        assert_true(x == random_normal(3, 4, i));
        sum += x;
        squares += x * x;
    }
    assert_true(fabs(sum / 20000) < 0.03 && fabs(squares / 20000 - 1.0) < 0.04);
    assert_true(random_bits(3, 4, 5) != random_bits(3, 5, 4) && random_bits(3, 4, 5) != random_bits(4, 4, 5));
}

static void random_tokens_are_a_function_of_their_place(void **state)
{
    (void)state;
    enum { T = 300, V = 50304 };
    const data_set data = data_random(V);
    int tokens[T], targets[T], again[T], others[T], rest[T];
    data_sequence(&data, SEED, 5, 7, T, tokens, targets);
    data_sequence(&data, SEED, 5, 7, T, again, rest);
    data_sequence(&data, SEED, 5, 8, T, others, rest);
    assert_memory_equal(tokens, again, sizeof tokens);
    assert_memory_equal(tokens + 1, targets, (T - 1) * sizeof *tokens);
    assert_true(memcmp(tokens, others, sizeof tokens) != 0);
    int most = 0;
    for (int t = 0; t < T; t++) {
        assert_true(tokens[t] >= 0 && tokens[t] < V && targets[t] >= 0 && targets[t] < V);
        most = tokens[t] > most ? tokens[t] : most;
    }
    assert_true(most > V / 2);
}

static void the_median_is_over_the_last_steps(void **state)
{
    (void)state;
    step_clock clock = {.first = 1, .last = 100};
    assert_true(isnan(job_median_ms(&clock)));
    /* Steps of 9 s, then 20 whose lengths are 1 to 5 s: the slow ones are forgotten. */
    double now_s = 0.0;
    for (int step = 1; step <= 51; step++) {
        now_s += step <= 31 ? 9.0 : 1 + step % 5;
        clock.ends_s[clock.n_ends++ % (MEDIAN_STEPS + 1)] = now_s;
    }
    assert_true(fabs(job_median_ms(&clock) - 3000.0) < 1e-6);
}

int main(void)
{
    alarm(60);
    gemm_init();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(products_are_the_naive_sums_for_every_shape_and_transpose),
        cmocka_unit_test(layernorm_backward_is_the_slope_and_adds),
        cmocka_unit_test(the_fused_kernel_is_an_addition_and_a_layernorm),
        cmocka_unit_test(linear_backward_is_the_slope_and_adds_to_weights),
        cmocka_unit_test(gelu_is_the_formula_with_tanh_and_its_backward_the_slope),
        cmocka_unit_test(attention_sees_no_later_position_and_its_backward_is_the_slope),
        cmocka_unit_test(cross_entropy_is_exact_and_its_backward_the_slope),
        cmocka_unit_test(gradients_of_every_parameter_are_slopes_of_the_loss_and_add_up),
        cmocka_unit_test(ranks_and_micro_steps_may_be_exchanged_to_the_last_bit),
        cmocka_unit_test(every_sequence_of_a_step_is_taken_once_however_it_is_split),
        cmocka_unit_test(the_bigram_model_is_add_one_smoothed),
        cmocka_unit_test(counter_random_numbers_repeat_and_are_normal),
        cmocka_unit_test(random_tokens_are_a_function_of_their_place),
        cmocka_unit_test(the_median_is_over_the_last_steps),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
