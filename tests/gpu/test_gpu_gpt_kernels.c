/* SPDX-License-Identifier: MIT */
/* The trainer's kernels on a GPU against the host's in fp32, from the same numbers: shapes on and off the blocks' sizes,
 * poisoned outputs, and the same bits each time. */
#include "gpt_rig.h"

#include "batch.h"
#include "gpt_math.h"
#include "kernels.h"
#include "products.h"

static const double bf16_most = 1e-2, fp32_most = 1e-5, product_most = 1e-4; /* the last: fp32 sums of a tensor core */

/* ---- LayerNorm ---- */

typedef struct norm_case {
    int R, C;
    float *x, *y, *w, *b, *dout, *d;        /* host */
    void *gx, *gy, *gw, *gb, *gdout, *gsum; /* GPU */
    float *sum, *out, *mean, *isd;          /* what the host computes */
    float *gmean, *gisd;
} norm_case;

static void forward_of(norm_case *t)
{
    const size_t n = (size_t)t->R * (size_t)t->C, rows = (size_t)t->R, C = (size_t)t->C;
    t->x = rig_numbers(n, 2.0), t->y = rig_numbers(n, 2.0), t->w = rig_numbers(C, 1.0), t->b = rig_numbers(C, 1.0);
    t->sum = rig_memory(4 * n), t->out = rig_memory(4 * n), t->mean = rig_memory(4 * rows),
    t->isd = rig_memory(4 * rows);
    t->gx = rig_up_bf16(t->x, n), t->gy = rig_up_bf16(t->y, n), t->gw = rig_up_bf16(t->w, C),
    t->gb = rig_up_bf16(t->b, C);
    t->gsum = rig_poisoned(2 * n);
    t->gmean = rig_poisoned(4 * rows), t->gisd = rig_poisoned(4 * rows);
    void *gout = rig_poisoned(2 * n);
    const layernorm ln = {t->out, t->mean, t->isd};
    const gpt_norm_forward_args args = {.sum = t->gsum,
                                        .out = gout,
                                        .mean = t->gmean,
                                        .inverse_sd = t->gisd,
                                        .x = t->gx,
                                        .y = t->gy,
                                        .w = t->gw,
                                        .b = t->gb,
                                        .rows = t->R,
                                        .positions = 1,
                                        .channels = t->C};
    residual_layernorm_forward(t->sum, &ln, t->x, t->y, t->w, t->b, t->R, t->C);
    CUDA(gpt_norm_forward(0, &args));
    rig_check("norm: sum", rig_down_bf16(t->gsum, n), t->sum, n, bf16_most);
    rig_check("norm: out", rig_down_bf16(gout, n), t->out, n, bf16_most);
    rig_check("norm: mean", rig_down(t->gmean, rows), t->mean, rows, bf16_most);
    rig_check("norm: 1 / sd", rig_down(t->gisd, rows), t->isd, rows, bf16_most);
    cudaFree(gout);
}

static void backward_of(norm_case *t, bool add)
{
    const size_t n = (size_t)t->R * (size_t)t->C, C = (size_t)t->C, parts = (size_t)gpt_norm_parts(t->C) * 3 * C;
    float *expected = rig_memory(4 * n), *sums = rig_memory(3 * 4 * C);
    void *gd = add ? rig_up_bf16(t->d, n) : rig_poisoned(2 * n);
    float *gparts = rig_poisoned(4 * parts), *gsums = rig_poisoned(3 * 4 * C);
    const layernorm ln = {t->out, t->mean, t->isd};
    const gpt_norm_backward_args args = {.d = gd,
                                         .add = add,
                                         .dout = t->gdout,
                                         .x = t->gsum,
                                         .mean = t->gmean,
                                         .inverse_sd = t->gisd,
                                         .w = t->gw,
                                         .parts = gparts,
                                         .rows = t->R,
                                         .channels = t->C};
    gpt_sum_parts_args whole = {.parts = gparts,
                                .n_parts = gpt_norm_parts(t->C),
                                .n_sums = 3,
                                .width = t->C,
                                .outs = {gsums, gsums + C, gsums + 2 * C}};
    if (add) memcpy(expected, t->d, 4 * n);
    layernorm_backward(expected, sums, sums + C, t->dout, &ln, t->sum, t->w, t->R, t->C);
    for (size_t i = 0; i < n; i++) sums[2 * C + i % C] += expected[i];
    CUDA(gpt_norm_backward(0, &args));
    CUDA(gpt_sum_parts(0, &whole));
    float *first = rig_down(gsums, 3 * C);
    rig_check("norm: d", rig_down_bf16(gd, n), expected, n, bf16_most);
    rig_check("norm: dw", rig_down(gsums, C), sums, C, bf16_most);
    rig_check("norm: db", rig_down(gsums + C, C), sums + C, C, fp32_most);
    rig_check("norm: column sums of d", rig_down(gsums + 2 * C, C), sums + 2 * C, C, 4 * bf16_most);
    /* Again, onto it: twice as much. And again from the start: the same bits. */
    whole.adds[0] = whole.adds[1] = whole.adds[2] = true;
    CUDA(gpt_sum_parts(0, &whole));
    float *twice = rig_down(gsums, 3 * C);
    for (size_t i = 0; i < 3 * C; i++) assert_true(twice[i] == 2.0f * first[i]);
    if (add) CUDA(cudaMemcpy(gd, t->gdout, 2 * n, cudaMemcpyDeviceToDevice));
    void *const all[] = {gd, gparts, gsums};
    for (size_t i = 0; i < 3; i++) cudaFree(all[i]);
    free(expected), free(sums), free(first), free(twice);
}

static void norms_are_the_hosts(void **state)
{
    (void)state;
    const int shapes[][2] = {{1500, 768}, {37, 128}, {5, 1600}, {1, 64}, {1100, 72}, {9, 4096}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        norm_case t = {.R = shapes[i][0], .C = shapes[i][1]};
        const size_t n = (size_t)t.R * (size_t)t.C;
        printf("  %d rows of %d\n", t.R, t.C);
        forward_of(&t);
        t.dout = rig_numbers(n, 1.0), t.d = rig_numbers(n, 1.0);
        t.gdout = rig_up_bf16(t.dout, n);
        backward_of(&t, false);
        backward_of(&t, true);
        float *const hosts[] = {t.x, t.y, t.w, t.b, t.dout, t.d, t.sum, t.out, t.mean, t.isd};
        void *const gpus[] = {t.gx, t.gy, t.gw, t.gb, t.gdout, t.gsum, t.gmean, t.gisd};
        for (size_t k = 0; k < 10; k++) free(hosts[k]);
        for (size_t k = 0; k < 8; k++) cudaFree(gpus[k]);
    }
}

/* ---- Embedding ---- */

typedef struct embed_case {
    gpt_shape shape;
    gpt_batch_layout layout;
    void *batch, *gbatch;
    int *tokens;
} embed_case;

/* Half of the rows have token 1, so that it takes many pieces; token 2 has exactly one piece's rows, if there are so many. */
static embed_case embed_of(gpt_shape shape)
{
    embed_case t = {.shape = shape, .layout = gpt_batch_layout_of(&shape)};
    const int R = shape.batch * shape.context;
    t.batch = rig_memory(t.layout.bytes);
    t.tokens = (int *)(void *)((char *)t.batch + t.layout.tokens);
    int *starts = rig_memory(((size_t)shape.vocab + 1) * sizeof *starts);
    for (int i = 0; i < R; i++)
        t.tokens[i] = i % 2 ? 1
                      : i / 2 < GPT_PIECE_ROWS
                          ? 2
                          : 3 + (int)(random_bits(4, 4, (uint64_t)i) % (uint64_t)(shape.vocab - 3));
    gpt_batch_sort(t.batch, &t.layout, R, shape.vocab, starts);
    t.gbatch = rig_up(t.batch, t.layout.bytes);
    free(starts);
    return t;
}

static void check_embed_forward(const embed_case *t)
{
    const int R = t->shape.batch * t->shape.context, T = t->shape.context, C = t->shape.dim;
    const size_t n = (size_t)R * (size_t)C, V = (size_t)t->shape.vocab;
    float *wte = rig_numbers(V * (size_t)C, 1.0), *wpe = rig_numbers((size_t)T * (size_t)C, 1.0),
          *w = rig_numbers((size_t)C, 1.0);
    float *sum = rig_memory(4 * n), *out = rig_memory(4 * n), *stats = rig_memory(8 * (size_t)R);
    void *gwte = rig_up_bf16(wte, V * (size_t)C), *gwpe = rig_up_bf16(wpe, (size_t)T * (size_t)C),
         *gw = rig_up_bf16(w, (size_t)C);
    void *gsum = rig_poisoned(2 * n), *gout = rig_poisoned(2 * n);
    float *gstats = rig_poisoned(8 * (size_t)R);
    const layernorm ln = {out, stats, stats + R};
    const gpt_norm_forward_args args = {.sum = gsum,
                                        .out = gout,
                                        .mean = gstats,
                                        .inverse_sd = gstats + R,
                                        .x = gwte,
                                        .y = gwpe,
                                        .tokens = (const int *)(void *)((char *)t->gbatch + t->layout.tokens),
                                        .w = gw,
                                        .b = gw,
                                        .rows = R,
                                        .positions = T,
                                        .channels = C};
    embedding_forward(sum, t->tokens, wte, wpe, t->shape.batch, T, C);
    layernorm_forward(&ln, sum, w, w, R, C);
    CUDA(gpt_norm_forward(0, &args));
    rig_check("embedding: sum", rig_down_bf16(gsum, n), sum, n, bf16_most);
    rig_check("embedding: norm", rig_down_bf16(gout, n), out, n, bf16_most);
    void *const gpus[] = {gwte, gwpe, gw, gsum, gout, gstats};
    for (size_t i = 0; i < 6; i++) cudaFree(gpus[i]);
    free(wte), free(wpe), free(w), free(sum), free(out), free(stats);
}

static void check_embed_backward(const embed_case *t, bool add)
{
    const int T = t->shape.context, C = t->shape.dim;
    const size_t n = (size_t)t->shape.batch * (size_t)T * (size_t)C, of_wte = (size_t)t->shape.vocab * (size_t)C,
                 of_wpe = (size_t)T * (size_t)C;
    float *d = rig_numbers(n, 1.0), *dwte = rig_numbers(of_wte, 1.0), *dwpe = rig_numbers(of_wpe, 1.0);
    void *gd = rig_up_bf16(d, n), *gdwte = rig_up(dwte, 4 * of_wte);
    void *gdwpe = add ? rig_up(dwpe, 4 * of_wpe) : rig_poisoned(4 * of_wpe);
    float *gparts = rig_poisoned((size_t)t->layout.most_parts * (size_t)C * 4);
    const char *batch = t->gbatch;
    const gpt_embed_backward_args args = {.dwte = gdwte,
                                          .dwpe = gdwpe,
                                          .add_dwpe = add,
                                          .parts = gparts,
                                          .d = gd,
                                          .order = (const int *)(const void *)(batch + t->layout.order),
                                          .pieces = (const gpt_token_piece *)(const void *)(batch + t->layout.pieces),
                                          .merges = (const gpt_token_merge *)(const void *)(batch + t->layout.merges),
                                          .counts = (const int *)(const void *)(batch + t->layout.counts),
                                          .most_pieces = t->layout.most_pieces,
                                          .most_merges = t->layout.most_merges,
                                          .sequences = t->shape.batch,
                                          .positions = T,
                                          .channels = C};
    if (!add) memset(dwpe, 0, 4 * of_wpe);
    embedding_backward(dwte, dwpe, d, t->tokens, t->shape.batch, T, C);
    CUDA(gpt_embed_backward(0, &args));
    rig_check("embedding: dwte", rig_down(gdwte, of_wte), dwte, of_wte, fp32_most);
    rig_check("embedding: dwpe", rig_down(gdwpe, of_wpe), dwpe, of_wpe, fp32_most);
    void *const gpus[] = {gd, gdwte, gdwpe, gparts};
    for (size_t i = 0; i < 4; i++) cudaFree(gpus[i]);
    free(d), free(dwte), free(dwpe);
}

static void embeddings_are_the_hosts(void **state)
{
    (void)state;
    const gpt_shape shapes[] = {{.dim = 128, .context = 64, .batch = 7, .vocab = 256},
                                {.dim = 768, .context = 300, .batch = 3, .vocab = 5000},
                                {.dim = 64, .context = 5, .batch = 1, .vocab = 50304}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        embed_case t = embed_of(shapes[i]);
        printf("  %d rows of %d, %d tokens\n", shapes[i].batch * shapes[i].context, shapes[i].dim, shapes[i].vocab);
        check_embed_forward(&t);
        check_embed_backward(&t, false);
        check_embed_backward(&t, true);
        cudaFree(t.gbatch);
        free(t.batch);
    }
}

/* ---- Loss ---- */

/* In double precision, for any V. */
static void exact_loss(float *losses, float *gradient, const float *logits, const int *targets, double scale, int R,
                       int V)
{
    for (int r = 0; r < R; r++, logits += V, gradient += V) {
        double most = (double)logits[0], sum = 0.0;
        for (int i = 1; i < V; i++) most = fmax(most, (double)logits[i]);
        for (int i = 0; i < V; i++) sum += exp((double)logits[i] - most);
        losses[r] = (float)(log(sum) + most - (double)logits[targets[r]]);
        for (int i = 0; i < V; i++)
            gradient[i] = (float)(scale * (exp((double)logits[i] - most) / sum - (i == targets[r] ? 1.0 : 0.0)));
    }
}

static void *up_strided(const float *x, int R, int V, int stride)
{
    uint16_t *bits = rig_memory((size_t)R * (size_t)stride * sizeof *bits);
    memset(bits, 0xff, (size_t)R * (size_t)stride * sizeof *bits); /* NaN between the rows */
    for (int r = 0; r < R; r++)
        for (int i = 0; i < V; i++)
            bits[(size_t)r * (size_t)stride + (size_t)i] = fsdp__to_bf16(x[(size_t)r * (size_t)V + (size_t)i]);
    void *p = rig_up(bits, (size_t)R * (size_t)stride * sizeof *bits);
    free(bits);
    return p;
}

static float *down_strided(const void *p, int R, int V, int stride)
{
    float *all = rig_down_bf16(p, (size_t)R * (size_t)stride), *x = rig_memory((size_t)R * (size_t)V * sizeof *x);
    for (int r = 0; r < R; r++) {
        memcpy(x + (size_t)r * (size_t)V, all + (size_t)r * (size_t)stride, (size_t)V * sizeof *x);
        for (int i = V; i < stride; i++) assert_true(all[(size_t)r * (size_t)stride + (size_t)i] == 0.0f);
    }
    free(all);
    return x;
}

static void check_loss(int R, int V)
{
    const int stride = (V + 127) / 128 * 128;
    const size_t n = (size_t)R * (size_t)V, rows = (size_t)R;
    float *logits = rig_numbers(n, 5.0), *losses = rig_memory(4 * rows), *gradient = rig_memory(4 * n), mean = 0.0f;
    int *targets = rig_memory(rows * sizeof *targets);
    for (int r = 0; r < R; r++) targets[r] = r == 0 ? V - 1 : (int)(random_bits(8, 8, (uint64_t)r) % (uint64_t)V);
    exact_loss(losses, gradient, logits, targets, 0.125, R, V);
    void *glogits = up_strided(logits, R, V, stride), *gtargets = rig_up(targets, 4 * rows);
    float *glosses = rig_poisoned(4 * rows), *gmean = rig_poisoned(4);
    gpt_cross_entropy_args args = {.logits = glogits,
                                   .targets = gtargets,
                                   .losses = glosses,
                                   .scale = 0.125f,
                                   .rows = R,
                                   .vocab = V,
                                   .stride = stride};
    CUDA(gpt_cross_entropy(0, &args));
    float *before = rig_down_bf16(glogits, (size_t)stride);
    assert_memory_equal(before, logits, (size_t)V * sizeof *before); /* without gradient, logits stay */
    free(before);
    rig_check("losses", rig_down(glosses, rows), losses, rows, fp32_most);
    args.gradient = true;
    CUDA(cudaMemset(glosses, 0xff, 4 * rows));
    CUDA(gpt_cross_entropy(0, &args));
    CUDA(gpt_mean(0, gmean, glosses, R));
    for (int r = 0; r < R; r++) mean += losses[r] / (float)R;
    rig_check("losses", rig_down(glosses, rows), losses, rows, fp32_most);
    rig_check("mean", rig_down(gmean, 1), &mean, 1, fp32_most);
    float *down = down_strided(glogits, R, V, stride), *others = rig_memory(4 * n);
    memcpy(others, down, 4 * n);
    rig_check("gradient of logits", down, gradient, n, bf16_most);
    /* The targets' are much larger than the others'. */
    for (int r = 0; r < R; r++) others[r * V + targets[r]] = gradient[r * V + targets[r]] = 0.0f;
    rig_check("but the targets'", others, gradient, n, bf16_most);
    void *const gpus[] = {glogits, gtargets, glosses, gmean};
    for (size_t i = 0; i < 4; i++) cudaFree(gpus[i]);
    free(logits), free(losses), free(gradient), free(targets);
}

static void losses_and_their_gradients_are_exact_for_any_vocabulary(void **state)
{
    (void)state;
    const int shapes[][2] = {{300, 256}, {7, 1003}, {40, 50304}, {3, 50257}, {2, 65536}, {5, 2}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        printf("  %d rows, %d tokens\n", shapes[i][0], shapes[i][1]);
        check_loss(shapes[i][0], shapes[i][1]);
    }
}

/* ---- What goes through an array once ---- */

static void gelu_and_column_sums_are_the_hosts(void **state)
{
    (void)state;
    const int R = 1030, W = 1536;
    const size_t n = (size_t)R * (size_t)W;
    float *x = rig_numbers(n, 4.0), *d = rig_numbers(n, 1.0), *out = rig_memory(4 * n),
          *sums = rig_memory(4 * (size_t)W);
    void *gx = rig_up_bf16(x, n), *gd = rig_up_bf16(d, n), *gout = rig_poisoned(2 * n);
    float *gparts = rig_poisoned((size_t)GPT_COLUMN_PARTS * (size_t)W * 4), *gsums = rig_poisoned(4 * (size_t)W);
    const gpt_sum_parts_args whole = {
        .parts = gparts, .n_parts = GPT_COLUMN_PARTS, .n_sums = 1, .width = W, .outs = {gsums}};
    for (size_t i = 0; i < n; i++) sums[i % (size_t)W] += d[i];
    CUDA(gpt_column_sums(0, gparts, gd, R, W));
    CUDA(gpt_sum_parts(0, &whole));
    rig_check("column sums", rig_down(gsums, (size_t)W), sums, (size_t)W, fp32_most);
    gelu_forward(out, x, (int)n);
    CUDA(gpt_gelu_forward(0, gout, gx, n));
    rig_check("gelu", rig_down_bf16(gout, n), out, n, bf16_most);
    gelu_backward(out, d, x, (int)n);
    CUDA(gpt_gelu_backward(0, gd, gx, n));
    rig_check("gelu: gradient", rig_down_bf16(gd, n), out, n, bf16_most);
    void *const gpus[] = {gx, gd, gout, gparts, gsums};
    for (size_t i = 0; i < 5; i++) cudaFree(gpus[i]);
    free(x), free(d), free(out), free(sums);
}

/* The formula of fsdp/optim.h as the host computes it: to the bit. */
static void adamw_is_the_formula_to_the_last_bit(void **state)
{
    (void)state;
    const size_t n = 4096;
    float *w = rig_numbers(n, 1.0), *m = rig_numbers(n, 0.1), *v = rig_numbers(n, 0.1), *grad = rig_numbers(n, 0.3);
    for (size_t i = 0; i < n; i++) v[i] = fabsf(v[i]), w[i] *= 1.0001f;
    void *gw = rig_up(w, 4 * n), *gm = rig_up(m, 4 * n), *gv = rig_up(v, 4 * n), *ggrad = rig_up(grad, 4 * n);
    void *gcompute = rig_poisoned(2 * n);
    const gpt_adamw_args a = {.w = gw,
                              .m = gm,
                              .v = gv,
                              .compute = gcompute,
                              .grad = ggrad,
                              .n = n,
                              .factor = 0.25f,
                              .lr = 0.003f,
                              .beta1 = 0.9f,
                              .beta2 = 0.999f,
                              .bias1 = 0.271f,
                              .bias2 = 0.002997f,
                              .eps = 1e-8f,
                              .decay = 0.01f};
    CUDA(gpt_adamw(0, &a));
    float *gpu_w = rig_down(gw, n), *gpu_m = rig_down(gm, n), *gpu_v = rig_down(gv, n),
          *compute = rig_down_bf16(gcompute, n);
    for (size_t i = 0; i < n; i++) {
        const float g = grad[i] * a.factor;
        m[i] = a.beta1 * m[i] + (1.0f - a.beta1) * g;
        v[i] = a.beta2 * v[i] + (1.0f - a.beta2) * (g * g);
        w[i] = w[i] - a.lr * (m[i] / a.bias1 / (sqrtf(v[i] / a.bias2) + a.eps) + a.decay * w[i]);
        assert_true(gpu_m[i] == m[i] && gpu_v[i] == v[i] && gpu_w[i] == w[i]);
        assert_true(compute[i] == fsdp__from_bf16(fsdp__to_bf16(w[i])));
    }
    void *const gpus[] = {gw, gm, gv, ggrad, gcompute};
    for (size_t i = 0; i < 5; i++) cudaFree(gpus[i]);
    free(w), free(m), free(v), free(grad), free(gpu_w), free(gpu_m), free(gpu_v), free(compute);
}

/* ---- Products ---- */

typedef struct product_case {
    int R, I, O;
    float *x, *w, *bias, *dout, *out, *dx, *dw;
    void *gx, *gw, *gbias, *gdout, *gout, *gaux, *gdx, *gdw;
} product_case;

static void multiply(gpt_products *p, gpt_product_shape shape, gpt_product_arrays arrays)
{
    problem why = {""};
    if (!gpt_products_plan(p, &shape, &why) || !gpt_products_run(p, &shape, &arrays, 0, &why)) fail_msg("%s", why.text);
}

static void check_products(gpt_products *p, product_case t)
{
    const size_t of_x = (size_t)t.R * (size_t)t.I, of_w = (size_t)t.O * (size_t)t.I, of_out = (size_t)t.R * (size_t)t.O;
    const gpt_product_shape linear = {GPT_LINEAR, t.R, t.I, t.O, t.O, true},
                            gelu = {GPT_LINEAR_GELU, t.R, t.I, t.O, t.O, true};
    const gpt_product_shape input = {GPT_INPUT, t.R, t.I, t.O, t.O, false},
                            weight = {GPT_WEIGHT, t.R, t.I, t.O, t.O, false};
    const gpt_product_shape input_gelu = {GPT_INPUT_GELU, t.R, t.I, t.O, t.O, false};
    multiply(p, linear, (gpt_product_arrays){.out = t.gout, .x = t.gx, .w = t.gw, .bias = t.gbias});
    linear_forward(t.out, t.x, t.w, t.bias, t.R, t.I, t.O);
    rig_check("linear", rig_down_bf16(t.gout, of_out), t.out, of_out, bf16_most);
    multiply(p, gelu, (gpt_product_arrays){.out = t.gout, .x = t.gx, .w = t.gw, .bias = t.gbias, .aux = t.gaux});
    rig_check("linear, before GELU", rig_down_bf16(t.gaux, of_out), t.out, of_out, bf16_most);
    gelu_forward(t.out, t.out, (int)of_out);
    rig_check("linear, GELU", rig_down_bf16(t.gout, of_out), t.out, of_out, bf16_most);
    linear_backward(t.dx, t.dw, NULL, t.dout, t.x, t.w, t.R, t.I, t.O);
    multiply(p, input, (gpt_product_arrays){.out = t.gdx, .dout = t.gdout, .w = t.gw});
    rig_check("gradient of the input", rig_down_bf16(t.gdx, of_x), t.dx, of_x, bf16_most);
    multiply(p, input_gelu, (gpt_product_arrays){.out = t.gdx, .dout = t.gdout, .w = t.gw, .aux = t.gx});
    gelu_backward(t.dx, t.dx, t.x, (int)of_x);
    rig_check("the same through GELU", rig_down_bf16(t.gdx, of_x), t.dx, of_x, bf16_most);
    multiply(p, weight, (gpt_product_arrays){.out = t.gdw, .x = t.gx, .dout = t.gdout});
    float *first = rig_down(t.gdw, of_w);
    rig_check("gradient of the weight", rig_down(t.gdw, of_w), t.dw, of_w, product_most);
    multiply(p, weight, (gpt_product_arrays){.out = t.gdw, .x = t.gx, .dout = t.gdout, .add = true});
    for (size_t i = 0; i < of_w; i++) t.dw[i] *= 2.0f;
    rig_check("twice", rig_down(t.gdw, of_w), t.dw, of_w, product_most);
    CUDA(cudaMemset(t.gdw, 0xff, 4 * of_w));
    multiply(p, weight, (gpt_product_arrays){.out = t.gdw, .x = t.gx, .dout = t.gdout});
    float *again = rig_down(t.gdw, of_w);
    assert_memory_equal(first, again, 4 * of_w);
    free(first), free(again);
}

static void products_are_the_hosts_with_and_without_fused_gelu(void **state)
{
    (void)state;
    const int shapes[][3] = {{384, 128, 512}, {2048, 768, 192}, {35, 64, 200}};
    for (size_t i = 0; i < 2 * sizeof shapes / sizeof shapes[0]; i++) {
        product_case t = {.R = shapes[i / 2][0], .I = shapes[i / 2][1], .O = shapes[i / 2][2]};
        const size_t of_x = (size_t)t.R * (size_t)t.I, of_w = (size_t)t.O * (size_t)t.I,
                     of_out = (size_t)t.R * (size_t)t.O;
        gpt_products p;
        problem why = {""};
        if (!gpt_products_open(&p, &why)) fail_msg("%s", why.text);
        p.no_fused_gelu = i % 2 == 1;
        t.x = rig_numbers(of_x, 1.0), t.w = rig_numbers(of_w, 0.3), t.bias = rig_numbers((size_t)t.O, 1.0);
        t.dout = rig_numbers(of_out, 1.0), t.out = rig_memory(4 * of_out), t.dx = rig_memory(4 * of_x),
        t.dw = rig_memory(4 * of_w);
        t.gx = rig_up_bf16(t.x, of_x), t.gw = rig_up_bf16(t.w, of_w), t.gbias = rig_up_bf16(t.bias, (size_t)t.O);
        t.gdout = rig_up_bf16(t.dout, of_out), t.gout = rig_poisoned(2 * of_out), t.gaux = rig_poisoned(2 * of_out);
        t.gdx = rig_poisoned(2 * of_x), t.gdw = rig_poisoned(4 * of_w);
        printf("  %d rows, %d in, %d out, GELU %s\n", t.R, t.I, t.O, p.no_fused_gelu ? "apart" : "fused");
        check_products(&p, t);
        if (i % 2 == 0 && p.no_fused_gelu) printf("  cuBLASLt has no fused GELU for this shape\n");
        float *const hosts[] = {t.x, t.w, t.bias, t.dout, t.out, t.dx, t.dw};
        void *const gpus[] = {t.gx, t.gw, t.gbias, t.gdout, t.gout, t.gaux, t.gdx, t.gdw};
        for (size_t k = 0; k < 7; k++) free(hosts[k]);
        for (size_t k = 0; k < 8; k++) cudaFree(gpus[k]);
        gpt_products_close(&p);
    }
}

int main(void)
{
    if (!rig_has_gpu()) return 77;
    alarm(100);
    const cudaError_t error = gpt_kernels_init();
    if (error != cudaSuccess) {
        printf("the kernels do not load: %s\n", cudaGetErrorString(error));
        return 1;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(norms_are_the_hosts),
        cmocka_unit_test(embeddings_are_the_hosts),
        cmocka_unit_test(losses_and_their_gradients_are_exact_for_any_vocabulary),
        cmocka_unit_test(gelu_and_column_sums_are_the_hosts),
        cmocka_unit_test(adamw_is_the_formula_to_the_last_bit),
        cmocka_unit_test(products_are_the_hosts_with_and_without_fused_gelu),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
