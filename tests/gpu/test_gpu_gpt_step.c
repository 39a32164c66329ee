/* SPDX-License-Identifier: MIT */
/* A whole micro-step of the trainer on a GPU against the host's model: losses, and the gradient of each parameter, written over
 * poison; the same bits each time; added where asked; GELU computed again where asked. */
#include "gpt_rig.h"

#include "gemm.h"
#include "model_cuda.h"

enum { SEED = 1, MOST_UNITS = 4, MOST_PARAMS = 16 };

/* Heads of 32 and of 64 channels; a context on and off the tiles of attention. */
static const gpt_shape shapes[] = {
    {.layers = 2, .dim = 128, .heads = 4, .context = 64, .batch = 3, .vocab = GPT_VOCAB},
    {.layers = 3, .dim = 192, .heads = 3, .context = 100, .batch = 2, .vocab = GPT_VOCAB},
};

static const double gradient_most = 2e-2, loss_most = 2e-3;

typedef struct step_case {
    const gpt_shape *shape;
    gpt_state host;
    gpt_cuda gpu;
    void *staged;
    cudaStream_t stream;
    uint64_t elems[MOST_UNITS][MOST_PARAMS];
    void *host_params[MOST_UNITS][MOST_PARAMS], *host_grads[MOST_UNITS][MOST_PARAMS];
    void *params[MOST_UNITS][MOST_PARAMS], *grads[MOST_UNITS][MOST_PARAMS];
    float *mean_loss; /* on the GPU */
    float host_loss;
} step_case;

static void make_params(step_case *t)
{
    for (int u = 0; u < gpt_units(t->shape); u++)
        for (int i = 0; i < gpt_unit_params(t->shape, u); i++) {
            const gpt_param param = gpt_param_at(t->shape, u, i);
            float *value = rig_memory(4 * (size_t)param.elems);
            /* No bias of zero and no scale of one: an error there would not be seen. */
            for (uint64_t e = 0; e < param.elems; e++) {
                const double by = param.sd > 0.0f ? (double)gpt_first_value(&param, SEED, u, i, e)
                                                  : 0.2 * random_normal(SEED, (uint64_t)(100 * u + i), e);
                value[e] = fsdp__from_bf16(fsdp__to_bf16((float)(by + (double)param.mean)));
            }
            t->elems[u][i] = param.elems;
            t->host_params[u][i] = value;
            t->host_grads[u][i] = rig_memory(4 * (size_t)param.elems);
            t->params[u][i] = rig_up_bf16(value, (size_t)param.elems);
            t->grads[u][i] = rig_poisoned(4 * (size_t)param.elems);
        }
}

static void open_case(step_case *t, const gpt_shape *shape, bool recompute)
{
    problem why = {""};
    *t = (step_case){.shape = shape};
    CUDA(cudaStreamCreateWithFlags(&t->stream, cudaStreamNonBlocking));
    if (!gpt_cuda_create(&t->gpu, shape, recompute, true, t->stream, &why)) fail_msg("%s", why.text);
    CUDA(cudaMemset(t->gpu.memory, 0xff, t->gpu.bytes));
    CUDA(cudaDeviceSynchronize());
    CUDA(cudaHostAlloc(&t->staged, t->gpu.layout.bytes, cudaHostAllocDefault));
    t->mean_loss = rig_poisoned(4);
    assert_true(gpt_state_create(&t->host, shape));
    make_params(t);
    gpt_state staged = {.shape = *shape, .sequences = shape->batch};
    gpt_cuda_stage(&t->gpu, &staged, t->staged);
    for (int i = 0; i < shape->batch * shape->context; i++) {
        t->host.tokens[i] = staged.tokens[i] = (int)(random_bits(SEED, 7, (uint64_t)i) % 90);
        t->host.targets[i] = staged.targets[i] = (int)(random_bits(SEED, 8, (uint64_t)i) % 90);
    }
    if (!gpt_cuda_put(&t->gpu, &staged, t->staged, &why)) fail_msg("%s", why.text);
    CUDA(cudaStreamSynchronize(t->stream));
}

static void close_case(step_case *t)
{
    for (int u = 0; u < gpt_units(t->shape); u++)
        for (int i = 0; i < gpt_unit_params(t->shape, u); i++) {
            free(t->host_params[u][i]), free(t->host_grads[u][i]);
            cudaFree(t->params[u][i]), cudaFree(t->grads[u][i]);
        }
    gpt_state_destroy(&t->host);
    gpt_cuda_destroy(&t->gpu);
    cudaFreeHost(t->staged);
    cudaFree(t->mean_loss);
    cudaStreamDestroy(t->stream);
}

static const gpt_visit ends[] = {GPT_EMBED_FORWARD, GPT_HEAD_FORWARD, GPT_HEAD_BACKWARD, GPT_EMBED_BACKWARD};

/* visit(t, which, layer) for each visit of a micro-step. */
static void walk(step_case *t, bool backward, bool add, void (*visit)(step_case *, gpt_visit, int, bool, bool))
{
    const int L = t->shape->layers;
    visit(t, ends[0], 0, backward, add);
    for (int l = 0; l < L; l++) visit(t, GPT_BLOCK_FORWARD, l, backward, add);
    visit(t, ends[1], 0, backward, add);
    if (!backward) return;
    visit(t, ends[2], 0, backward, add);
    for (int l = L - 1; l >= 0; l--) visit(t, GPT_BLOCK_BACKWARD, l, backward, add);
    visit(t, ends[3], 0, backward, add);
}

static void visit_host(step_case *t, gpt_visit which, int layer, bool backward, bool add)
{
    (void)backward;
    (void)add;
    gpt_call call = {.state = &t->host,
                     .visit = which,
                     .layer = layer,
                     .held = t->host_params[0],
                     .held_grads = t->host_grads[0],
                     .block = t->host_params[layer + 1],
                     .block_grads = t->host_grads[layer + 1],
                     .mean_loss = &t->host_loss};
    gpt_run(&call);
}

static void visit_gpu(step_case *t, gpt_visit which, int layer, bool backward, bool add)
{
    problem why = {""};
    const gpt_call call = {.visit = which,
                           .layer = layer,
                           .held = t->params[0],
                           .held_grads = t->grads[0],
                           .block = t->params[layer + 1],
                           .block_grads = t->grads[layer + 1],
                           .mean_loss = t->mean_loss,
                           .training = backward,
                           .add_grads = add};
    if (!gpt_cuda_visit(&t->gpu, &call, &why)) fail_msg("%s", why.text);
}

static void run_gpu(step_case *t, bool backward, bool add)
{
    walk(t, backward, add, visit_gpu);
    CUDA(cudaStreamSynchronize(t->stream));
}

static void check_gradients(const step_case *t)
{
    for (int u = 0; u < gpt_units(t->shape); u++)
        for (int i = 0; i < gpt_unit_params(t->shape, u); i++) {
            const gpt_param param = gpt_param_at(t->shape, u, i);
            rig_check(param.name, rig_down(t->grads[u][i], (size_t)param.elems), t->host_grads[u][i],
                      (size_t)param.elems, gradient_most);
        }
}

static float *all_gradients(const step_case *t, size_t *out_n)
{
    size_t n = 0;
    for (int u = 0; u < gpt_units(t->shape); u++)
        for (int i = 0; i < gpt_unit_params(t->shape, u); i++) n += (size_t)t->elems[u][i];
    float *all = rig_memory(4 * n);
    *out_n = 0;
    for (int u = 0; u < gpt_units(t->shape); u++)
        for (int i = 0; i < gpt_unit_params(t->shape, u); i++) {
            CUDA(cudaMemcpy(all + *out_n, t->grads[u][i], 4 * (size_t)t->elems[u][i], cudaMemcpyDeviceToHost));
            *out_n += (size_t)t->elems[u][i];
        }
    return all;
}

static void poison_gradients(const step_case *t)
{
    for (int u = 0; u < gpt_units(t->shape); u++)
        for (int i = 0; i < gpt_unit_params(t->shape, u); i++)
            CUDA(cudaMemset(t->grads[u][i], 0xff, 4 * (size_t)t->elems[u][i]));
    CUDA(cudaDeviceSynchronize());
}

static void losses_and_gradients_are_the_hosts(void **state)
{
    (void)state;
    for (int i = 0; i < 4; i++) {
        step_case t;
        size_t n, again_n;
        open_case(&t, &shapes[i / 2], i % 2 == 1);
        const size_t rows = (size_t)t.shape->batch * (size_t)t.shape->context;
        printf("  %d channels, %d heads, %d positions, GELU %s\n", t.shape->dim, t.shape->heads, t.shape->context,
               t.gpu.recompute ? "again" : "kept");
        walk(&t, true, false, visit_host);
        run_gpu(&t, true, false);
        rig_check("losses", rig_down(t.gpu.losses, rows), t.host.losses, rows, loss_most);
        rig_check("mean loss", rig_down(t.mean_loss, 1), &t.host_loss, 1, loss_most);
        check_gradients(&t);
        float *once = all_gradients(&t, &n);
        poison_gradients(&t);
        run_gpu(&t, true, false);
        float *again = all_gradients(&t, &again_n);
        assert_memory_equal(once, again, 4 * n); /* to the bit */
        free(again);
        run_gpu(&t, true, true);
        again = all_gradients(&t, &again_n);
        for (size_t e = 0; e < n; e++) once[e] *= 2.0f;
        rig_check("added", again, once, n, 1e-5);
        free(once);
        close_case(&t);
    }
}

/* What evaluation and the writing of text read. */
static void without_backward_logits_stay_and_come_back(void **state)
{
    (void)state;
    step_case t;
    gpt_state back;
    problem why = {""};
    open_case(&t, &shapes[1], false);
    const size_t logits = (size_t)t.shape->context * GPT_VOCAB,
                 rows = (size_t)t.shape->batch * (size_t)t.shape->context;
    assert_true(gpt_cuda_host_state(&back, t.shape));
    walk(&t, false, false, visit_host);
    run_gpu(&t, false, false);
    if (!gpt_cuda_fetch(&t.gpu, &why)) fail_msg("%s", why.text);
    CUDA(cudaStreamSynchronize(t.stream));
    gpt_cuda_taken(&t.gpu, &back);
    assert_true(rig_error(back.losses, t.host.losses, rows) < loss_most);
    assert_true(rig_error(back.logits, t.host.logits, logits) < gradient_most);
    /* One sequence of the same batch: the same to a few bits, whatever way cuBLASLt multiplies fewer rows. */
    gpt_state staged = {.shape = *t.shape, .sequences = 1};
    gpt_cuda_stage(&t.gpu, &staged, t.staged);
    if (!gpt_cuda_put(&t.gpu, &staged, t.staged, &why)) fail_msg("%s", why.text);
    run_gpu(&t, false, false);
    if (!gpt_cuda_fetch(&t.gpu, &why)) fail_msg("%s", why.text);
    CUDA(cudaStreamSynchronize(t.stream));
    memset(back.logits, 0, 4 * logits);
    gpt_cuda_taken(&t.gpu, &back);
    assert_true(rig_error(back.logits, t.host.logits, logits) < gradient_most);
    gpt_state_destroy(&back);
    close_case(&t);
}

static void what_it_cannot_do_is_refused_with_a_sentence(void **state)
{
    (void)state;
    gpt_cuda c;
    problem why = {""};
    const gpt_shape heads = {.layers = 1, .dim = 96, .heads = 2, .context = 64, .batch = 1, .vocab = GPT_VOCAB};
    assert_false(gpt_cuda_create(&c, &heads, false, false, 0, &why));
    assert_non_null(strstr(why.text, "heads of 48 channels"));
    gpt_cuda_destroy(&c);
}

int main(void)
{
    if (!rig_has_gpu()) return 77;
    alarm(100);
    gemm_init();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(losses_and_gradients_are_the_hosts),
        cmocka_unit_test(without_backward_logits_stay_and_come_back),
        cmocka_unit_test(what_it_cannot_do_is_refused_with_a_sentence),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
