/* SPDX-License-Identifier: MIT */
/* The least change to a trainer in the manner of llm.c: parameters in one flat array, gradients in another, AdamW by hand,
 * kernels that run where they are called. plain() is that loop, train() the same on ranks: its kernels are untouched.
 *
 *     04_flat                            or four of it: mpirun -n 4, torchrun, srun, or by hand (docs/running.md)
 *
 * One unit with one parameter is the flat array. Masters, gradients and moments are then a part on each rank, and the whole of
 * the parameters is there from the begin to the end of forward and of backward. The next step is a unit a layer, and kernels
 * as host calls or on a GPU's stream: then only two layers are there at a time, and nobody waits (01_train.c, examples/gpt).
 * Checks itself: exits with 0 if both give the same losses. */
#include <fsdp/fsdp.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { VOCAB = 31, DIM = 24, LAYERS = 3, TOKENS = 64, STEPS = 40 };
enum { N_PARAMS = VOCAB * DIM + LAYERS * DIM * DIM + VOCAB * DIM };

#define TRY(call)                                                                      \
    do {                                                                               \
        fsdp_status status_ = (call);                                                  \
        if (status_ != FSDP_OK) {                                                      \
            fprintf(stderr, "%s: %s\n", fsdp_status_name(status_), fsdp_last_error()); \
            exit(1);                                                                   \
        }                                                                              \
    } while (0)

static const uint64_t timeout_ns = 60000000000u;

/* ---- The network, as it was: x = embed[token]; x += tanh(w[l] x) for each layer; logits = head x ---- */

typedef struct tensors {
    float *embed, *w[LAYERS], *head;
} tensors;

typedef struct net {
    tensors p, g; /* point into the flat arrays */
    int token[TOKENS], target[TOKENS];
    float x[LAYERS + 1][TOKENS][DIM], t[LAYERS][TOKENS][DIM], probs[TOKENS][VOCAB], loss;
} net;

static void point(tensors *t, float *flat)
{
    t->embed = flat;
    for (int l = 0; l < LAYERS; l++) t->w[l] = flat + VOCAB * DIM + l * DIM * DIM;
    t->head = flat + VOCAB * DIM + LAYERS * DIM * DIM;
}

static void init(float *flat)
{
    uint64_t n = 1;
    for (int i = 0; i < N_PARAMS; i++) {
        n = n * 6364136223846793005u + 1442695040888963407u;
        flat[i] = 0.4f * ((float)(n >> 40) * 0x1p-23f - 1.0f);
    }
}

static void next_batch(net *n, int step, int which) /* a pattern that can be learnt */
{
    for (int i = 0; i < TOKENS; i++) {
        n->token[i] = (7 * i + 3 * step + 11 * which) % VOCAB;
        n->target[i] = (5 * n->token[i] + 1) % VOCAB;
    }
}

static void matvec(float *y, const float *w, const float *x, int rows)
{
    for (int r = 0; r < rows; r++) {
        y[r] = 0.0f;
        for (int c = 0; c < DIM; c++) y[r] += w[r * DIM + c] * x[c];
    }
}

static void forward(net *n)
{
    n->loss = 0.0f;
    for (int i = 0; i < TOKENS; i++) {
        memcpy(n->x[0][i], n->p.embed + n->token[i] * DIM, sizeof n->x[0][i]);
        for (int l = 0; l < LAYERS; l++) {
            matvec(n->t[l][i], n->p.w[l], n->x[l][i], DIM);
            for (int c = 0; c < DIM; c++) n->t[l][i][c] = tanhf(n->t[l][i][c]);
            for (int c = 0; c < DIM; c++) n->x[l + 1][i][c] = n->x[l][i][c] + n->t[l][i][c];
        }
        float *p = n->probs[i], sum = 0.0f;
        matvec(p, n->p.head, n->x[LAYERS][i], VOCAB);
        for (int v = 0; v < VOCAB; v++) sum += p[v] = expf(p[v]);
        for (int v = 0; v < VOCAB; v++) p[v] /= sum;
        n->loss -= logf(p[n->target[i]]) / TOKENS;
    }
}

/* dx += wᵀ dy, dw += dy xᵀ */
static void matvec_backward(float *dx, float *dw, const float *dy, const float *w, const float *x, int rows)
{
    for (int r = 0; r < rows; r++) {
        for (int c = 0; c < DIM; c++) {
            dx[c] += w[r * DIM + c] * dy[r];
            dw[r * DIM + c] += dy[r] * x[c];
        }
    }
}

static void backward(net *n)
{
    for (int i = 0; i < TOKENS; i++) {
        float dx[DIM] = {0}, dlogits[VOCAB], dt[DIM];
        for (int v = 0; v < VOCAB; v++) dlogits[v] = (n->probs[i][v] - (v == n->target[i] ? 1.0f : 0.0f)) / TOKENS;
        matvec_backward(dx, n->g.head, dlogits, n->p.head, n->x[LAYERS][i], VOCAB);
        for (int l = LAYERS - 1; l >= 0; l--) {
            for (int c = 0; c < DIM; c++) dt[c] = dx[c] * (1.0f - n->t[l][i][c] * n->t[l][i][c]);
            matvec_backward(dx, n->g.w[l], dt, n->p.w[l], n->x[l][i], DIM);
        }
        for (int c = 0; c < DIM; c++) n->g.embed[n->token[i] * DIM + c] += dx[c];
    }
}

static void update(float *w, const float *g, float *m, float *v, size_t n, float scale, int t)
{
    const float lr = 1e-2f, beta1 = 0.9f, beta2 = 0.95f, eps = 1e-8f, decay = 0.01f;
    for (size_t i = 0; i < n; i++) {
        const float grad = scale * g[i];
        m[i] = beta1 * m[i] + (1.0f - beta1) * grad;
        v[i] = beta2 * v[i] + (1.0f - beta2) * grad * grad;
        const float m_hat = m[i] / (1.0f - powf(beta1, (float)t)), v_hat = v[i] / (1.0f - powf(beta2, (float)t));
        w[i] -= lr * (m_hat / (sqrtf(v_hat) + eps) + decay * w[i]);
    }
}

static void *zeros(size_t n)
{
    void *p = calloc(n, sizeof(float));
    if (p == NULL) exit(1);
    return p;
}

/* ---- The loop, as it was: all ranks' batches one after another ---- */

static void plain(net *n, uint32_t batches, double *losses)
{
    float *params = zeros(N_PARAMS), *grads = zeros(N_PARAMS), *m = zeros(N_PARAMS), *v = zeros(N_PARAMS);
    init(params);
    point(&n->p, params);
    point(&n->g, grads);
    for (int step = 0; step < STEPS; step++) {
        memset(grads, 0, N_PARAMS * sizeof *grads);
        losses[step] = 0.0;
        for (uint32_t b = 0; b < batches; b++) {
            next_batch(n, step, (int)b);
            forward(n);
            backward(n);
            losses[step] += (double)n->loss / batches;
        }
        update(params, grads, m, v, N_PARAMS, 1.0f / (float)batches, step + 1);
    }
    free(params), free(grads), free(m), free(v);
}

/* ---- The loop on ranks ---- */

static void train(net *n, fsdp_context *ctx, fsdp_stream *s, fsdp_model *model, double *losses)
{
    fsdp_unit *unit;
    fsdp_param *flat;
    TRY(fsdp_model_add_unit(model, "all", NULL, &unit));
    TRY(fsdp_unit_add_param(unit, "params", 1, (uint64_t[]){N_PARAMS}, NULL, &flat));
    TRY(fsdp_model_seal(model));
    float *params = zeros(N_PARAMS); /* for the first values only; fsdp_model_fill does without */
    init(params);
    TRY(fsdp_param_set(flat, params, FSDP_DTYPE_FP32));
    free(params);

    const fsdp_shard_segment *mine; /* this rank's part: n_mine is 0 where there are more ranks than elements, else 1 */
    uint32_t n_mine;
    TRY(fsdp_unit_shard(unit, &mine, &n_mine));
    const size_t count = n_mine > 0 ? mine->count : 0;
    float *m = zeros(count + 1), *v = zeros(count + 1);
    const uint32_t rank = fsdp_context_rank(ctx), world = fsdp_context_world(ctx);
    for (int step = 0; step < STEPS; step++) {
        fsdp_pass_args pass = FSDP_PASS_ARGS_INIT;
        fsdp_view view = FSDP_VIEW_INIT;
        next_batch(n, step, (int)rank);
        TRY(fsdp_pass_begin(model, &pass, s));
        TRY(fsdp_forward_begin(unit, s, &view));
        TRY(fsdp_stream_drain_host(s, timeout_ns)); /* the kernels run here, not on s: first the values must be there */
        point(&n->p, view.params[0]);
        forward(n);
        TRY(fsdp_forward_end(unit, s));
        TRY(fsdp_backward_begin(unit, s, &view));
        TRY(fsdp_stream_drain_host(s, timeout_ns));
        point(&n->p, view.params[0]); /* not where they were in forward */
        point(&n->g, view.grads[0]);  /* zeroed */
        backward(n);
        TRY(fsdp_backward_end(unit, s));
        TRY(fsdp_pass_end(model, s));
        TRY(fsdp_update_begin(model, s));
        TRY(fsdp_stream_drain_host(s, timeout_ns));
        if (count > 0) update(mine->master, mine->gradient, m, v, count, fsdp_model_grad_factor(model), step + 1);
        TRY(fsdp_update_end(model, s));
        losses[step] = (double)n->loss / world;
        TRY(fsdp_sum_host(ctx, &losses[step], 1));
    }
    free(m), free(v);
}

static void sharded(net *n, const fsdp_launch *launch, double *losses)
{
    fsdp_host_config host = FSDP_HOST_CONFIG_INIT;
    host.launch = launch;
    fsdp_config config = FSDP_CONFIG_INIT;
    config.backend_config = &host;
    fsdp_context *ctx;
    fsdp_stream *s;
    fsdp_model *model;
    TRY(fsdp_context_create(&config, &ctx));
    TRY(fsdp_stream_create(ctx, "compute", &s));
    TRY(fsdp_model_create(ctx, NULL, &model));
    train(n, ctx, s, model, losses);
    TRY(fsdp_model_destroy(model));
    TRY(fsdp_stream_release(s));
    TRY(fsdp_context_destroy(ctx));
}

int main(void)
{
    static net n;
    double expected[STEPS], got[STEPS], worst = 0.0;
    fsdp_launch launch = FSDP_LAUNCH_INIT;
    TRY(fsdp_launch_from_env(&launch));
    plain(&n, launch.world, expected);
    sharded(&n, &launch, got);
    for (int i = 0; i < STEPS; i++) worst = fmax(worst, fabs(got[i] - expected[i]));
    const bool ok = worst < 1e-4 && got[STEPS - 1] < 0.5 * got[0]; /* ranks add in another order than one does */
    if (launch.rank == 0)
        printf("%u rank%s: loss %.6f, after %d steps %.6f; plain %.6f and %.6f\n%s\n", launch.world,
               launch.world == 1 ? "" : "s", got[0], STEPS, got[STEPS - 1], expected[0], expected[STEPS - 1],
               ok ? "ok" : "FAILED: the losses should be the same, and fall to half");
    return ok ? 0 : 1;
}
