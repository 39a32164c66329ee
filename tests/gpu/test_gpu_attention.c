/* SPDX-License-Identifier: MIT */
/* Attention on the GPU against sums in double precision, forward and backward: every T on and off the tiles, every head
 * dimension; the same bits each time, eager and as a graph; and what it refuses. */
#include "gpt_rig.h"

#include "attention.h"

enum { SEED = 5 };

/* ---- One problem: on the host, and on the GPU ---- */

typedef struct problem {
    int B, T, N, H;
    size_t n_out, n_qkv, n_lse; /* elements */
    uint16_t *qkv, *dout, *out, *dqkv;
    float *lse;
    gpt_attention_args gpu;
} problem;

/* Mean 0, standard deviation `scale`. */
static uint16_t *normals(size_t count, double scale, uint64_t stream)
{
    uint16_t *x = rig_memory(count * sizeof *x);
    for (size_t i = 0; i < count; i++) x[i] = fsdp__to_bf16((float)(scale * random_normal(SEED, stream, i)));
    return x;
}

static void open_problem(problem *p, double scale)
{
    static uint64_t stream;
    p->n_out = (size_t)p->B * (size_t)p->T * (size_t)p->N * (size_t)p->H;
    p->n_qkv = 3 * p->n_out;
    p->n_lse = p->n_out / (size_t)p->H;
    p->qkv = normals(p->n_qkv, scale, stream++);
    p->dout = normals(p->n_out, 1, stream++);
    p->out = rig_memory(2 * p->n_out);
    p->dqkv = rig_memory(2 * p->n_qkv);
    p->lse = rig_memory(p->n_lse * sizeof *p->lse);
    p->gpu = (gpt_attention_args){.sequences = p->B, .positions = p->T, .heads = p->N, .head_dim = p->H};
    assert_int_equal(gpt_attention_lse_bytes(&p->gpu), p->n_lse * sizeof *p->lse);
    p->gpu.qkv = rig_up(p->qkv, 2 * p->n_qkv);
    p->gpu.dout = rig_up(p->dout, 2 * p->n_out);
    p->gpu.out = rig_poisoned(2 * p->n_out);
    p->gpu.dqkv = rig_poisoned(2 * p->n_qkv);
    p->gpu.lse = rig_poisoned(gpt_attention_lse_bytes(&p->gpu));
    p->gpu.scratch = rig_poisoned(gpt_attention_scratch_bytes(&p->gpu));
}

static void close_problem(problem *p)
{
    void *on_gpu[] = {(void *)(uintptr_t)p->gpu.qkv,
                      (void *)(uintptr_t)p->gpu.dout,
                      p->gpu.out,
                      p->gpu.dqkv,
                      p->gpu.lse,
                      p->gpu.scratch};
    for (size_t i = 0; i < sizeof on_gpu / sizeof *on_gpu; i++) CUDA(cudaFree(on_gpu[i]));
    free(p->qkv);
    free(p->dout);
    free(p->out);
    free(p->dqkv);
    free(p->lse);
}

/* All that is written is NaN before: what is left out shows. */
static void poison(const problem *p)
{
    CUDA(cudaMemset(p->gpu.out, 0xff, 2 * p->n_out));
    CUDA(cudaMemset(p->gpu.dqkv, 0xff, 2 * p->n_qkv));
    CUDA(cudaMemset(p->gpu.lse, 0xff, gpt_attention_lse_bytes(&p->gpu)));
    CUDA(cudaMemset(p->gpu.scratch, 0xff, gpt_attention_scratch_bytes(&p->gpu)));
    CUDA(cudaDeviceSynchronize());
}

static void fetch(const problem *p)
{
    CUDA(cudaDeviceSynchronize());
    CUDA(cudaMemcpy(p->out, p->gpu.out, 2 * p->n_out, cudaMemcpyDeviceToHost));
    CUDA(cudaMemcpy(p->dqkv, p->gpu.dqkv, 2 * p->n_qkv, cudaMemcpyDeviceToHost));
    CUDA(cudaMemcpy(p->lse, p->gpu.lse, p->n_lse * sizeof *p->lse, cudaMemcpyDeviceToHost));
}

static void both_ways(const problem *p, cudaStream_t stream)
{
    CUDA(gpt_attention_forward(stream, &p->gpu));
    CUDA(gpt_attention_backward(stream, &p->gpu));
}

/* ---- The reference: one head in double precision ---- */

typedef struct head {
    int T, H;
    double *q, *k, *v, *dout, *out, *dq, *dk, *dv; /* (T, H) */
    double *lse;                                   /* (T) */
    double *memory;
} head;

static void open_head(head *h, const problem *p, int b, int n)
{
    const size_t T = (size_t)p->T, H = (size_t)p->H, C = (size_t)p->N * H;
    h->T = p->T;
    h->H = p->H;
    h->memory = rig_memory((8 * T * H + T) * sizeof(double));
    double **all[] = {&h->q, &h->k, &h->v, &h->dout, &h->out, &h->dq, &h->dk, &h->dv, &h->lse};
    for (size_t i = 0; i < 9; i++) *all[i] = h->memory + i * T * H;
    for (size_t t = 0; t < T; t++)
        for (size_t i = 0; i < H; i++) {
            const size_t row = (size_t)b * T + t, at = (size_t)n * H + i, to = t * H + i;
            h->q[to] = (double)fsdp__from_bf16(p->qkv[row * 3 * C + at]);
            h->k[to] = (double)fsdp__from_bf16(p->qkv[row * 3 * C + C + at]);
            h->v[to] = (double)fsdp__from_bf16(p->qkv[row * 3 * C + 2 * C + at]);
            h->dout[to] = (double)fsdp__from_bf16(p->dout[row * C + at]);
        }
}

static double inner(const double *x, const double *y, int count)
{
    double sum = 0;
    for (int i = 0; i < count; i++) sum += x[i] * y[i];
    return sum;
}

static void add(double *to, double factor, const double *x, int count)
{
    for (int i = 0; i < count; i++) to[i] += factor * x[i];
}

/* Row t, both ways; weights and d_weights (T) are scratch. */
static void attend_row(const head *h, int t, double *weights, double *d_weights)
{
    const int H = h->H;
    const double scale = 1 / sqrt(H);
    const ptrdiff_t at = (ptrdiff_t)t * H;
    double most = -INFINITY, sum = 0, dot = 0;
    for (int j = 0; j <= t; j++) {
        weights[j] = scale * inner(h->q + at, h->k + (ptrdiff_t)j * H, H);
        most = fmax(most, weights[j]);
    }
    for (int j = 0; j <= t; j++) sum += exp(weights[j] - most);
    h->lse[t] = most + log(sum);
    for (int j = 0; j <= t; j++) {
        const ptrdiff_t key = (ptrdiff_t)j * H;
        weights[j] = exp(weights[j] - h->lse[t]);
        d_weights[j] = inner(h->dout + at, h->v + key, H);
        dot += weights[j] * d_weights[j];
        add(h->out + at, weights[j], h->v + key, H);
        add(h->dv + key, weights[j], h->dout + at, H);
    }
    for (int j = 0; j <= t; j++) {
        const double d_score = scale * weights[j] * (d_weights[j] - dot);
        add(h->dq + at, d_score, h->k + (ptrdiff_t)j * H, H);
        add(h->dk + (ptrdiff_t)j * H, d_score, h->q + at, H);
    }
}

static void attend(const head *h)
{
    double *scratch = rig_memory(2 * (size_t)h->T * sizeof *scratch);
    for (int t = 0; t < h->T; t++) attend_row(h, t, scratch, scratch + h->T);
    free(scratch);
}

/* ---- Comparison ---- */

/* ‖got − want‖ and ‖want‖, squared, over all heads. */
typedef struct error {
    double difference, norm, count;
} error;

static void compare(error *e, const uint16_t *got, size_t width, const double *want, const head *h)
{
    for (size_t t = 0; t < (size_t)h->T; t++)
        for (size_t i = 0; i < (size_t)h->H; i++) {
            const double w = want[t * (size_t)h->H + i], d = (double)fsdp__from_bf16(got[t * width + i]) - w;
            e->difference += d * d;
            e->norm += w * w;
            e->count += 1;
        }
}

/* A gradient may be zero by nature (T = 1): what is left is then measured by its inputs, which are of size one. */
static bool within(const char *what, const error *e, double limit)
{
    const double difference = sqrt(e->difference), norm = sqrt(e->norm) + 1e-3 * sqrt(e->count);
    if (difference <= limit * norm) return true; /* and not NaN */
    print_error("%s: off by %.3e of %.3e\n", what, difference, norm);
    return false;
}

/* lse within 1e-4, out and gradients by their norms. */
static bool right(const problem *p, double out_limit, double gradient_limit)
{
    error out = {0}, dq = {0}, dk = {0}, dv = {0};
    bool ok = true;
    for (int b = 0; b < p->B; b++)
        for (int n = 0; n < p->N; n++) {
            head h;
            open_head(&h, p, b, n);
            attend(&h);
            const size_t T = (size_t)p->T, H = (size_t)p->H, C = (size_t)p->N * H;
            const size_t row = (size_t)b * T, at = (size_t)n * H;
            const uint16_t *dqkv = p->dqkv + row * 3 * C + at;
            compare(&out, p->out + row * C + at, C, h.out, &h);
            compare(&dq, dqkv, 3 * C, h.dq, &h);
            compare(&dk, dqkv + C, 3 * C, h.dk, &h);
            compare(&dv, dqkv + 2 * C, 3 * C, h.dv, &h);
            for (size_t t = 0; t < T; t++)
                if (!(fabs((double)p->lse[((size_t)b * (size_t)p->N + (size_t)n) * T + t] - h.lse[t]) < 1e-4))
                    ok = false;
            free(h.memory);
        }
    if (!ok) print_error("lse: off by 1e-4 or more\n");
    ok &= within("out", &out, out_limit);
    ok &= within("dq", &dq, gradient_limit);
    ok &= within("dk", &dk, gradient_limit);
    return within("dv", &dv, gradient_limit) && ok;
}

/* ---- Tests ---- */

/* Twice, with poison before each: right, and the same bits. */
static void check_problem(problem p, double scale, double out_limit, double gradient_limit)
{
    open_problem(&p, scale);
    poison(&p);
    both_ways(&p, NULL);
    fetch(&p);
    if (!right(&p, out_limit, gradient_limit)) fail_msg("B %d, T %d, N %d, H %d, scale %g", p.B, p.T, p.N, p.H, scale);
    uint16_t *const out = p.out, *const dqkv = p.dqkv;
    p.out = rig_memory(2 * p.n_out);
    p.dqkv = rig_memory(2 * p.n_qkv);
    poison(&p);
    both_ways(&p, NULL);
    fetch(&p);
    assert_memory_equal(out, p.out, 2 * p.n_out);
    assert_memory_equal(dqkv, p.dqkv, 2 * p.n_qkv);
    free(out);
    free(dqkv);
    close_problem(&p);
}

static void check_all_positions(int H)
{
    static const int positions[] = {1, 7, 63, 64, 65, 128, 129, 200, 1024};
    for (size_t i = 0; i < sizeof positions / sizeof *positions; i++)
        for (int N = 1; N <= (positions[i] < 1024 ? 3 : 2); N++)
            check_problem((problem){.B = N == 2 ? 1 : 2, .T = positions[i], .N = N, .H = H}, 1, 5e-3, 1e-2);
}

static void equals_double_precision_with_heads_of_32(void **state)
{
    (void)state;
    check_all_positions(32);
}

static void equals_double_precision_with_heads_of_64(void **state)
{
    (void)state;
    check_all_positions(64);
}

static void equals_double_precision_with_heads_of_128(void **state)
{
    (void)state;
    check_all_positions(128);
}

/* Scores up to a hundred and more: exponentials overflow where a row's greatest score is not taken off first. Nearly all of
 * a row is one key's then, and gradients of scores are small differences of what bf16 has rounded. */
static void great_scores_do_not_overflow(void **state)
{
    (void)state;
    check_problem((problem){.B = 1, .T = 200, .N = 2, .H = 64}, 6, 5e-3, 5e-2);
    check_problem((problem){.B = 1, .T = 200, .N = 2, .H = 128}, 6, 5e-3, 5e-2);
}

static void a_captured_graph_gives_the_same_bits(void **state)
{
    (void)state;
    problem p = {.B = 2, .T = 200, .N = 3, .H = 64};
    open_problem(&p, 1);
    poison(&p);
    both_ways(&p, NULL);
    fetch(&p);
    uint16_t *const out = p.out, *const dqkv = p.dqkv;
    p.out = rig_memory(2 * p.n_out);
    p.dqkv = rig_memory(2 * p.n_qkv);
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    both_ways(&p, stream);
    CUDA(cudaStreamEndCapture(stream, &graph));
    CUDA(cudaGraphInstantiate(&replay, graph, 0));
    poison(&p);
    CUDA(cudaGraphLaunch(replay, stream));
    fetch(&p);
    assert_memory_equal(out, p.out, 2 * p.n_out);
    assert_memory_equal(dqkv, p.dqkv, 2 * p.n_qkv);
    CUDA(cudaGraphExecDestroy(replay));
    CUDA(cudaGraphDestroy(graph));
    CUDA(cudaStreamDestroy(stream));
    free(out);
    free(dqkv);
    close_problem(&p);
}

static void refuses_what_it_cannot_do(void **state)
{
    (void)state;
    problem p = {.B = 1, .T = 7, .N = 1, .H = 64};
    open_problem(&p, 1);
    const gpt_attention_args good = p.gpu;
    gpt_attention_args bad[8];
    for (size_t i = 0; i < 8; i++) bad[i] = good;
    bad[0].head_dim = 48;
    bad[1].positions = 0;
    bad[2].sequences = 0;
    bad[3].heads = -1;
    bad[4].qkv = NULL;
    bad[5].qkv = (const char *)good.qkv + 2;
    bad[6].out = NULL;
    bad[7].lse = NULL;
    for (size_t i = 0; i < 8; i++) {
        assert_int_equal(gpt_attention_forward(NULL, &bad[i]), cudaErrorInvalidValue);
        assert_int_equal(gpt_attention_backward(NULL, &bad[i]), cudaErrorInvalidValue);
    }
    for (size_t i = 0; i < 3; i++) bad[i] = good;
    bad[0].dout = NULL;
    bad[1].dqkv = (char *)good.dqkv + 8;
    bad[2].scratch = NULL;
    for (size_t i = 0; i < 3; i++) assert_int_equal(gpt_attention_backward(NULL, &bad[i]), cudaErrorInvalidValue);
    CUDA(cudaDeviceSynchronize());
    CUDA(cudaGetLastError());
    close_problem(&p);
}

/* test_gpu_attention [FILTER]: all tests, or those whose name fits, as in "a_captured*". */
int main(int argc, char **argv)
{
    if (!rig_has_gpu()) return 77;
    const cudaError_t result = gpt_attention_init();
    if (result != cudaSuccess) {
        fprintf(stderr, "test_gpu_attention: the kernels do not load: %s\n", cudaGetErrorString(result));
        return 1;
    }
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(refuses_what_it_cannot_do),
        cmocka_unit_test(equals_double_precision_with_heads_of_32),
        cmocka_unit_test(equals_double_precision_with_heads_of_64),
        cmocka_unit_test(equals_double_precision_with_heads_of_128),
        cmocka_unit_test(great_scores_do_not_overflow),
        cmocka_unit_test(a_captured_graph_gives_the_same_bits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
