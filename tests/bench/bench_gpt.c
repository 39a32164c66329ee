/* SPDX-License-Identifier: MIT */
/* Where a step of the trainer goes on a GPU: each visit, each product and each kernel alone, for a shape of GPT-2's family;
 * medians of RUNS by events. The step's sum is without optimizer and library. A model of two blocks is enough to measure one.
 *
 *     bench_gpt [gpt2-124m | gpt2-1.5b] */
#include <stdio.h>
#include <stdlib.h>

#include "gpt_bench.h"
#include "model_cuda.h"
#include "sorted.h"

enum { WARM = 3, RUNS = 11, N_RANDOM = 1 << 20 };

typedef struct bench {
    gpt_shape shape;
    int layers; /* of the whole model */
    gpt_cuda model;
    cudaStream_t stream;
    void *held[16], *held_grads[16], *block[BLOCK_PARAMS], *block_grads[BLOCK_PARAMS];
    float *mean_loss;
    void *w, *dw; /* (V, C) bf16, fp32: for products alone */
    problem why;
} bench;

/* What is timed: a visit, or one call. */
typedef struct timed {
    bench *b;
    bool (*run)(const struct timed *);
    gpt_call call;
    gpt_product_shape product;
    gpt_product_arrays arrays;
} timed;

/* Prints a line; flop and bytes of 0 are left out. Returns ms. */
static double measure(const char *name, const timed *t, double flop, double bytes)
{
    float took_ms[RUNS];
    cudaEvent_t begin, end;
    check(cudaEventCreate(&begin));
    check(cudaEventCreate(&end));
    for (int run = -WARM; run < RUNS; run++) {
        check(cudaEventRecord(begin, t->b->stream));
        if (!t->run(t)) {
            fprintf(stderr, "bench_gpt: %s\n", t->b->why.text);
            exit(1);
        }
        check(cudaEventRecord(end, t->b->stream));
        check(cudaEventSynchronize(end));
        if (run >= 0) check(cudaEventElapsedTime(&took_ms[run], begin, end));
    }
    check(cudaEventDestroy(begin));
    check(cudaEventDestroy(end));
    sort_floats(took_ms, RUNS);
    const double ms = (double)took_ms[RUNS / 2];
    printf("  %-34s %8.3f ms", name, ms);
    if (flop > 0.0) printf("  %7.1f TFLOP/s", flop / (ms * 1e9));
    if (bytes > 0.0) printf("  %7.0f GB/s", bytes / (ms * 1e6));
    printf("\n");
    return ms;
}

static bool run_visit(const timed *t) { return gpt_cuda_visit(&t->b->model, &t->call, &t->b->why); }

static bool run_product(const timed *t)
{
    return gpt_products_run(&t->b->model.products, &t->product, &t->arrays, t->b->stream, &t->b->why);
}

static void take_params(bench *b)
{
    for (int u = 0; u < 2; u++)
        for (int i = 0; i < gpt_unit_params(&b->shape, u); i++) {
            const gpt_param param = gpt_param_at(&b->shape, u, i);
            (u ? b->block : b->held)[i] = device_random((size_t)param.elems, N_RANDOM, param.mean, param.sd);
            (u ? b->block_grads : b->held_grads)[i] = device(4 * (size_t)param.elems);
        }
    const size_t most = (size_t)b->shape.vocab * (size_t)b->shape.dim;
    b->w = device_random(most, N_RANDOM, 0.0f, 0.02f);
    b->dw = device(4 * most);
    b->mean_loss = device(4);
}

static void put_batch(bench *b)
{
    void *staged = NULL;
    gpt_state state = {.shape = b->shape, .sequences = b->shape.batch};
    check(cudaHostAlloc(&staged, b->model.layout.bytes, cudaHostAllocDefault));
    gpt_cuda_stage(&b->model, &state, staged);
    for (int i = 0; i < b->shape.batch * b->shape.context; i++) {
        state.tokens[i] = (int)(random_bits(2, 2, (uint64_t)i) % (uint64_t)b->shape.vocab);
        state.targets[i] = (int)(random_bits(3, 3, (uint64_t)i) % (uint64_t)b->shape.vocab);
    }
    if (!gpt_cuda_put(&b->model, &state, staged, &b->why)) check(cudaErrorUnknown);
    check(cudaStreamSynchronize(b->stream));
    check(cudaFreeHost(staged));
}

static double visit(bench *b, const char *name, gpt_visit which, double flop)
{
    const timed t = {.b = b,
                     .run = run_visit,
                     .call = {.visit = which,
                              .layer = which == GPT_BLOCK_FORWARD || which == GPT_BLOCK_BACKWARD ? 1 : 0,
                              .held = b->held,
                              .held_grads = b->held_grads,
                              .block = b->block,
                              .block_grads = b->block_grads,
                              .mean_loss = b->mean_loss,
                              .training = true}};
    return measure(name, &t, flop, 0.0);
}

static void visits(bench *b)
{
    const double R = (double)b->shape.batch * b->shape.context, C = b->shape.dim, V = b->shape.vocab,
                 T = b->shape.context;
    const double block = 24.0 * R * C * C + 2.0 * R * T * C, head = 2.0 * R * C * V;
    double ms = visit(b, "embedding, first norm", GPT_EMBED_FORWARD, 0.0);
    timed first = {.b = b, .call = {.visit = GPT_BLOCK_FORWARD, .held = b->held, .block = b->block, .training = true}};
    if (!run_visit(&first)) check(cudaErrorUnknown); /* block 0, so that block 1 has what it reads */
    ms += b->layers * visit(b, "block forward", GPT_BLOCK_FORWARD, block);
    ms += visit(b, "head forward, with loss", GPT_HEAD_FORWARD, head);
    ms += visit(b, "head backward", GPT_HEAD_BACKWARD, 2.0 * head);
    ms += b->layers * visit(b, "block backward", GPT_BLOCK_BACKWARD, 2.0 * 24.0 * R * C * C + 5.0 * R * T * C);
    ms += visit(b, "embedding backward", GPT_EMBED_BACKWARD, 0.0);
    printf("  a step of %d blocks: %.1f ms, %.0f tokens/s\n", b->layers, ms, 1e3 * R / ms);
}

static void product(bench *b, const char *name, gpt_product_kind kind, int n_in, int n_out)
{
    const gpt_cuda *c = &b->model;
    const bool head = n_out == b->shape.vocab, linear = kind == GPT_LINEAR || kind == GPT_LINEAR_GELU;
    const int rows = b->shape.batch * b->shape.context;
    void *wide_out = head && linear ? c->logits : c->up;
    const timed t = {.b = b,
                     .run = run_product,
                     .product = {kind, rows, n_in, n_out, head ? c->stride : n_out, linear && !head},
                     .arrays = {.out = kind == GPT_WEIGHT ? b->dw : wide_out,
                                .x = c->gelu,
                                .dout = head ? c->logits : c->wide,
                                .w = b->w,
                                .bias = b->w,
                                .aux = c->gelu}};
    measure(name, &t, 2.0 * rows * n_in * n_out, 0.0);
}

static void products(bench *b)
{
    const int C = b->shape.dim, V = b->shape.vocab;
    product(b, "qkv", GPT_LINEAR, C, 3 * C);
    product(b, "proj", GPT_LINEAR, C, C);
    product(b, "up, bias", GPT_LINEAR, C, 4 * C);
    product(b, "up, bias, GELU", GPT_LINEAR_GELU, C, 4 * C);
    product(b, "down", GPT_LINEAR, 4 * C, C);
    product(b, "qkv: input's gradient", GPT_INPUT, C, 3 * C);
    product(b, "proj: input's gradient", GPT_INPUT, C, C);
    product(b, "up: input's gradient", GPT_INPUT, C, 4 * C);
    product(b, "down: input's gradient", GPT_INPUT, 4 * C, C);
    product(b, "down: input's gradient, GELU", GPT_INPUT_GELU, 4 * C, C);
    product(b, "qkv: weight's gradient", GPT_WEIGHT, C, 3 * C);
    product(b, "proj: weight's gradient", GPT_WEIGHT, C, C);
    product(b, "up: weight's gradient", GPT_WEIGHT, C, 4 * C);
    product(b, "down: weight's gradient", GPT_WEIGHT, 4 * C, C);
    product(b, "head: input's gradient", GPT_INPUT, C, V);
    product(b, "head: weight's gradient", GPT_WEIGHT, C, V);
    product(b, "head", GPT_LINEAR, C, V);
    if (b->model.products.no_fused_gelu) printf("  (cuBLASLt has no fused GELU here: it is a kernel of its own)\n");
}

/* ---- Kernels ---- */

static bool run_norm_forward(const timed *t)
{
    const gpt_cuda *c = &t->b->model;
    const gpt_norm_forward_args args = {.sum = c->middle,
                                        .out = c->norm,
                                        .mean = c->norm_mean,
                                        .inverse_sd = c->norm_isd,
                                        .x = c->encoded,
                                        .y = c->branch,
                                        .w = t->b->block[BLOCK_NORM_W],
                                        .b = t->b->block[BLOCK_NORM_B],
                                        .rows = c->shape.batch * c->shape.context,
                                        .positions = c->shape.context,
                                        .channels = c->shape.dim};
    CUDA_TRY(gpt_norm_forward(c->stream, &args), &t->b->why);
    return true;
}

static bool run_norm_backward(const timed *t)
{
    const gpt_cuda *c = &t->b->model;
    const gpt_norm_backward_args args = {.d = c->d_residual,
                                         .add = true,
                                         .dout = c->branch,
                                         .x = c->middle,
                                         .mean = c->norm_mean,
                                         .inverse_sd = c->norm_isd,
                                         .w = t->b->block[BLOCK_NORM_W],
                                         .parts = c->parts,
                                         .rows = c->shape.batch * c->shape.context,
                                         .channels = c->shape.dim};
    CUDA_TRY(gpt_norm_backward(c->stream, &args), &t->b->why);
    return true;
}

static bool run_sum_parts(const timed *t)
{
    const gpt_cuda *c = &t->b->model;
    float *out = t->b->dw;
    const gpt_sum_parts_args args = {.parts = c->parts,
                                     .n_parts = gpt_norm_parts(c->shape.dim),
                                     .n_sums = 3,
                                     .width = c->shape.dim,
                                     .outs = {out, out + c->shape.dim, out + 2 * c->shape.dim}};
    CUDA_TRY(gpt_sum_parts(c->stream, &args), &t->b->why);
    return true;
}

static bool run_column_sums(const timed *t)
{
    const gpt_cuda *c = &t->b->model;
    CUDA_TRY(gpt_column_sums(c->stream, c->parts, c->wide, c->shape.batch * c->shape.context, 4 * c->shape.dim),
             &t->b->why);
    return true;
}

static bool run_cross_entropy(const timed *t)
{
    const gpt_cuda *c = &t->b->model;
    const int rows = c->shape.batch * c->shape.context;
    const gpt_cross_entropy_args args = {.logits = c->logits,
                                         .targets = (const int *)(void *)((char *)c->batch + c->layout.targets),
                                         .losses = c->losses,
                                         .scale = 1.0f / (float)rows,
                                         .gradient = true,
                                         .rows = rows,
                                         .vocab = c->shape.vocab,
                                         .stride = c->stride};
    CUDA_TRY(gpt_cross_entropy(c->stream, &args), &t->b->why);
    return true;
}

static bool run_copy(const timed *t)
{
    const gpt_cuda *c = &t->b->model;
    const size_t bytes = 2 * (size_t)c->shape.batch * (size_t)c->shape.context * 4 * (size_t)c->shape.dim;
    CUDA_TRY(cudaMemcpyAsync(c->up, c->gelu, bytes, cudaMemcpyDeviceToDevice, c->stream), &t->b->why);
    return true;
}

static void kernels(bench *b)
{
    const double row = 2.0 * b->shape.batch * b->shape.context, C = b->shape.dim;
    const struct {
        const char *name;
        bool (*run)(const timed *);
        double bytes;
    } all[] = {{"copy of device memory", run_copy, 8.0 * row * C},
               {"residual and norm", run_norm_forward, 4.0 * row * C},
               {"norm backward", run_norm_backward, 4.0 * row * C},
               {"its sums over blocks", run_sum_parts, 0.0},
               {"column sums of 4 C", run_column_sums, 4.0 * row * C},
               {"cross-entropy and its gradient", run_cross_entropy, 2.0 * row * b->model.stride}};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        const timed t = {.b = b, .run = all[i].run};
        measure(all[i].name, &t, 0.0, all[i].bytes);
    }
}

int main(int argc, char **argv)
{
    const bool large = argc > 1 && strcmp(argv[1], "gpt2-1.5b") == 0;
    bench b = {.layers = large ? 48 : 12};
    b.shape = large ? (gpt_shape){2, 1600, 25, 1024, 16, 50304} : (gpt_shape){2, 768, 12, 1024, 64, 50304};
    if (argc > 1 && !large && strcmp(argv[1], "gpt2-124m") != 0) {
        fprintf(stderr, "bench_gpt: takes gpt2-124m or gpt2-1.5b, not '%s'\n", argv[1]);
        return 2;
    }
    check(cudaStreamCreateWithFlags(&b.stream, cudaStreamNonBlocking));
    if (!gpt_cuda_create(&b.model, &b.shape, false, false, b.stream, &b.why)) {
        fprintf(stderr, "bench_gpt: %s\n", b.why.text);
        return 1;
    }
    take_params(&b);
    put_batch(&b);
    printf("%d channels, %d heads, %d x %d tokens\n", b.shape.dim, b.shape.heads, b.shape.batch, b.shape.context);
    visits(&b);
    kernels(&b);
    products(&b);
    gpt_cuda_destroy(&b.model);
    return 0;
}
