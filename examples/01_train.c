/* SPDX-License-Identifier: MIT */
/* fsdp.h's worked example, complete: a small network is trained on one rank, then on several that hold a part of it each,
 * every rank a thread. Checks itself: exits with 0 if both runs bring the loss down to a hundredth.
 *
 *     01_train [RANKS]                   default: 4
 *
 * The network is h(l+1) = W(l) h(l), each W a unit; it learns x(i) − x(i+1). */
#include <fsdp/fsdp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { LAYERS = 3, DIM = 16, SAMPLES = 64, STEPS = 300, MOST_RANKS = 8, IN_FLIGHT = 3 };

#define TRY(call)                                                                      \
    do {                                                                               \
        fsdp_status status_ = (call);                                                  \
        if (status_ != FSDP_OK) {                                                      \
            fprintf(stderr, "%s: %s\n", fsdp_status_name(status_), fsdp_last_error()); \
            exit(1);                                                                   \
        }                                                                              \
    } while (0)

/* Above fsdp_config.timeout_ns: who waits for a rank that is late hears which. */
static const uint64_t timeout_ns = 90000000000u;

typedef struct rank {
    uint32_t index, ranks;
    fsdp_local *local;                                               /* where the ranks meet */
    int samples;                                                     /* this rank's share */
    float h[LAYERS + 1][SAMPLES][DIM], dh[LAYERS + 1][SAMPLES][DIM]; /* activations, their gradients */
    float loss;                                                      /* of the step; written on the stream */
    float first, last;                                               /* loss over all ranks */
} rank;

/* A kernel's arguments. The host runs ahead of the stream: they are not used again for IN_FLIGHT steps. */
typedef struct kernel {
    rank *r;
    int layer;
    const float *w; /* (DIM, DIM) */
    float *dw;
} kernel;

static void forward(void *arg)
{
    const kernel *k = arg;
    for (int s = 0; s < k->r->samples; s++) {
        const float *x = k->r->h[k->layer][s];
        float *y = k->r->h[k->layer + 1][s];
        for (int i = 0; i < DIM; i++) {
            y[i] = 0.0f;
            for (int j = 0; j < DIM; j++) y[i] += k->w[i * DIM + j] * x[j];
        }
    }
}

static void squared_error(void *arg)
{
    rank *r = arg;
    const float scale = 1.0f / (float)(r->samples * DIM);
    r->loss = 0.0f;
    for (int s = 0; s < r->samples; s++) {
        for (int i = 0; i < DIM; i++) {
            const float error = r->h[LAYERS][s][i] - (r->h[0][s][i] - r->h[0][s][(i + 1) % DIM]);
            r->loss += error * error * scale;
            r->dh[LAYERS][s][i] = 2.0f * error * scale;
        }
    }
}

static void backward(void *arg)
{
    const kernel *k = arg;
    for (int s = 0; s < k->r->samples; s++) {
        const float *x = k->r->h[k->layer][s], *dy = k->r->dh[k->layer + 1][s];
        float *dx = k->r->dh[k->layer][s];
        for (int j = 0; j < DIM; j++) {
            dx[j] = 0.0f;
            for (int i = 0; i < DIM; i++) dx[j] += k->w[i * DIM + j] * dy[i];
            for (int i = 0; i < DIM; i++) k->dw[i * DIM + j] += dy[i] * x[j];
        }
    }
}

/* Between −1 and 1, a function of n alone: every split into ranks starts from the same numbers. */
static float number(uint64_t n)
{
    n = (n + 1) * 0x9e3779b97f4a7c15u;
    n = (n ^ (n >> 29)) * 0xbf58476d1ce4e5b9u;
    return (float)((n ^ (n >> 32)) >> 40) * 0x1p-23f - 1.0f;
}

static int first_values(void *arg, const fsdp_param_range *range, void *dst)
{
    (void)arg;
    for (uint64_t i = 0; i < range->count; i++) ((float *)dst)[i] = 0.4f * number(5000 + range->begin + i);
    return 0;
}

static void enqueue_step(rank *r, fsdp_model *model, fsdp_unit **unit, fsdp_stream *s, kernel *kernels)
{
    fsdp_pass_args pass = FSDP_PASS_ARGS_INIT;
    fsdp_view v = FSDP_VIEW_INIT;
    TRY(fsdp_pass_begin(model, &pass, s));
    for (int l = 0; l < LAYERS; l++, kernels++) {
        TRY(fsdp_forward_begin(unit[l], s, &v)); /* layer l is there, layer l + 1 on its way */
        *kernels = (kernel){r, l, v.params[0], NULL};
        TRY(fsdp_stream_host_call(s, forward, kernels));
        TRY(fsdp_forward_end(unit[l], s));
    }
    TRY(fsdp_stream_host_call(s, squared_error, r));
    TRY(fsdp_step_sum(model, 0, &r->loss, s));
    for (int l = LAYERS - 1; l >= 0; l--, kernels++) {
        TRY(fsdp_backward_begin(unit[l], s, &v)); /* v.grads[0] is zeroed */
        *kernels = (kernel){r, l, v.params[0], v.grads[0]};
        TRY(fsdp_stream_host_call(s, backward, kernels));
        TRY(fsdp_backward_end(unit[l], s)); /* its sum over ranks: a part on each */
    }
    TRY(fsdp_pass_end(model, s));
}

static void train(rank *r, fsdp_model *model, fsdp_stream *s)
{
    static const char *const unit_name[LAYERS] = {"layer 0", "layer 1", "layer 2"};
    static const char *const weight_name[LAYERS] = {"w0", "w1", "w2"};
    fsdp_unit *unit[LAYERS];
    fsdp_adamw *opt;
    kernel kernels[IN_FLIGHT][2 * LAYERS];
    for (int l = 0; l < LAYERS; l++) {
        TRY(fsdp_model_add_unit(model, unit_name[l], NULL, &unit[l]));
        TRY(fsdp_unit_add_param(unit[l], weight_name[l], 2, (uint64_t[]){DIM, DIM}, NULL, NULL));
    }
    const fsdp_adamw_config config = FSDP_ADAMW_CONFIG_INIT;
    TRY(fsdp_adamw_create(model, &config, &opt));
    TRY(fsdp_model_seal(model)); /* every byte is taken here */
    TRY(fsdp_model_fill(model, first_values, NULL, FSDP_DTYPE_FP32));

    fsdp_step_report report = FSDP_STEP_REPORT_INIT;
    for (uint64_t step = 1; step <= STEPS; step++) {
        fsdp_adamw_args update = FSDP_ADAMW_ARGS_INIT;
        update.lr = step < STEPS / 2 ? 1e-2f : 1e-3f;
        enqueue_step(r, model, unit, s, kernels[step % IN_FLIGHT]);
        TRY(fsdp_adamw_step(opt, &update, s));
        if (step > 2) TRY(fsdp_step_report_get(model, step - 2, timeout_ns, &report)); /* the host is two steps ahead */
        if (step == 3) r->first = report.sums[0] / (float)r->ranks;
    }
    TRY(fsdp_step_report_get(model, STEPS, timeout_ns, &report));
    r->last = report.sums[0] / (float)r->ranks;
}

static void *rank_main(void *arg)
{
    rank *r = arg;
    fsdp_host_config host = FSDP_HOST_CONFIG_INIT;
    host.local = r->local;
    host.rank = r->index;
    fsdp_config config = FSDP_CONFIG_INIT;
    config.backend_config = &host;
    fsdp_model_config model_config = FSDP_MODEL_CONFIG_INIT; /* gathers one unit ahead */
    fsdp_context *ctx;
    fsdp_stream *s;
    fsdp_model *model;
    for (int i = 0; i < r->samples * DIM; i++)
        r->h[0][i / DIM][i % DIM] = number(r->index * (uint64_t)(r->samples * DIM) + (uint64_t)i);
    TRY(fsdp_context_create(&config, &ctx));
    TRY(fsdp_stream_create(ctx, "compute", &s));
    TRY(fsdp_model_create(ctx, &model_config, &model));
    train(r, model, s);
    TRY(fsdp_model_destroy(model));
    TRY(fsdp_stream_release(s));
    TRY(fsdp_context_destroy(ctx));
    return NULL;
}

static bool learns(uint32_t ranks)
{
    static rank all[MOST_RANKS];
    pthread_t thread[MOST_RANKS];
    fsdp_local *local;
    TRY(fsdp_local_create(ranks, NULL, &local));
    for (uint32_t i = 0; i < ranks; i++) {
        all[i] = (rank){.index = i, .ranks = ranks, .local = local, .samples = SAMPLES / (int)ranks};
        if (pthread_create(&thread[i], NULL, rank_main, &all[i]) != 0) exit(1);
    }
    for (uint32_t i = 0; i < ranks; i++) pthread_join(thread[i], NULL);
    fsdp_local_destroy(local);
    printf("%u rank%s: loss %.5f, after %d steps %.7f\n", ranks, ranks == 1 ? "" : "s", (double)all[0].first, STEPS,
           (double)all[0].last);
    return all[0].last < 1e-2f * all[0].first;
}

int main(int argc, char **argv)
{
    const int ranks = argc > 1 ? atoi(argv[1]) : 4;
    if (ranks < 1 || ranks > MOST_RANKS) {
        fprintf(stderr, "usage: 01_train [RANKS], 1 to %d\n", MOST_RANKS);
        return 2;
    }
    const bool ok = learns(1) && learns((uint32_t)ranks);
    puts(ok ? "ok" : "FAILED: the loss should fall to a hundredth");
    return ok ? 0 : 1;
}
