/* SPDX-License-Identifier: MIT */
/* The unsharded loop on a GPU: whole parameters, an AdamW of its own, the host two steps ahead as in the sharded loop. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "model_cuda.h"
#include "rank_cuda.h"

typedef struct plain_gpu {
    const job *job;
    int n_passes; /* a step: ranks × micro-steps */
    cudaStream_t stream;
    cudaEvent_t done[STEPS_IN_FLIGHT]; /* a step's losses are on the host */
    gpt_cuda model;
    gpt_state state;
    int n_params;
    int *first_param;       /* (units) */
    void **values, **grads; /* (n_params): into compute and grad */
    size_t elems, decayed;  /* weight decay applies to the first `decayed` of all elements */
    char *memory;
    float *master, *m, *v, *grad; /* (elems) each */
    void *compute;                /* (elems) bf16 */
    float *losses;                /* (STEPS_IN_FLIGHT, passes), on the GPU */
    float *losses_back;           /* the same, pinned */
    char *staged;                 /* (STEPS_IN_FLIGHT, passes) batches, pinned; one more for evaluation */
} plain_gpu;

static const float beta1 = 0.9f, beta2 = 0.999f, eps = 1e-8f, weight_decay = 0.01f; /* FSDP_ADAMW_CONFIG_INIT */

static size_t rounded(uint64_t elems) { return ((size_t)elems + 127) / 128 * 128; }

/* Calls visit(p, param, n, at) for parameter number n at element `at`: those with weight decay first, so that two launches of
 * AdamW are enough. */
static bool each_param(plain_gpu *p,
                       bool (*visit)(plain_gpu *, const gpt_param *, int unit, int index, size_t at, problem *),
                       problem *why)
{
    const gpt_shape *shape = &p->job->shape;
    p->elems = 0;
    for (int plain = 0; plain < 2; plain++) {
        for (int unit = 0; unit < gpt_units(shape); unit++)
            for (int i = 0; i < gpt_unit_params(shape, unit); i++) {
                const gpt_param param = gpt_param_at(shape, unit, i);
                if (param.no_decay != (plain == 1)) continue;
                if (visit && !visit(p, &param, unit, i, p->elems, why)) return false;
                p->elems += rounded(param.elems);
            }
        if (plain == 0) p->decayed = p->elems;
    }
    return true;
}

static bool fill_param(plain_gpu *p, const gpt_param *param, int unit, int index, size_t at, problem *why)
{
    const int n = p->first_param[unit] + index;
    float *first = malloc((size_t)param->elems * sizeof *first);
    if (!first) return problem_set(why, "no memory for the first values of %s", param->name);
    gpt_first_values(param, (uint64_t)p->job->opt.seed, unit, index, 0, param->elems, first);
    const cudaError_t error =
        cudaMemcpy(p->master + at, first, (size_t)param->elems * sizeof *first, cudaMemcpyHostToDevice);
    free(first);
    CUDA_TRY(error, why);
    p->values[n] = (char *)p->compute + at * sizeof(uint16_t);
    p->grads[n] = p->grad + at;
    return true;
}

static bool take_params(plain_gpu *p, problem *why)
{
    const gpt_shape *shape = &p->job->shape;
    p->first_param = calloc((size_t)gpt_units(shape), sizeof *p->first_param);
    if (!p->first_param) return problem_set(why, "no memory");
    for (int unit = 0; unit < gpt_units(shape); unit++) {
        p->first_param[unit] = p->n_params;
        p->n_params += gpt_unit_params(shape, unit);
    }
    p->values = calloc(2 * (size_t)p->n_params, sizeof *p->values);
    if (!p->values || !each_param(p, NULL, why)) return problem_set(why, "no memory");
    p->grads = p->values + p->n_params;
    const size_t bytes = p->elems * (4 * sizeof(float) + sizeof(uint16_t));
    CUDA_TRY(cudaMalloc((void **)&p->memory, bytes), why);
    CUDA_TRY(cudaMemset(p->memory, 0, bytes), why);
    float **const arrays[] = {&p->master, &p->m, &p->v, &p->grad};
    for (size_t i = 0; i < 4; i++) *arrays[i] = (float *)(void *)p->memory + i * p->elems;
    p->compute = p->memory + 4 * sizeof(float) * p->elems;
    if (!each_param(p, fill_param, why)) return false;
    CUDA_TRY(cudaDeviceSynchronize(), why); /* the stream does not block: it waits for no copy on the NULL stream */
    CUDA_TRY(gpt_to_bf16(p->stream, p->compute, p->master, p->elems), why);
    return true;
}

static bool open_all(plain_gpu *p, problem *why)
{
    const job *j = p->job;
    const size_t slots = (size_t)STEPS_IN_FLIGHT * (size_t)p->n_passes;
    CUDA_TRY(cudaSetDevice(0), why);
    CUDA_TRY(cudaStreamCreateWithFlags(&p->stream, cudaStreamNonBlocking), why);
    for (int i = 0; i < STEPS_IN_FLIGHT; i++)
        CUDA_TRY(cudaEventCreateWithFlags(&p->done[i], cudaEventDisableTiming), why);
    if (!gpt_cuda_create(&p->model, &j->shape, j->opt.recompute, j->write_text, p->stream, why)) return false;
    if (!gpt_cuda_host_state(&p->state, &j->shape)) return problem_set(why, "no memory for losses");
    CUDA_TRY(cudaMalloc((void **)&p->losses, slots * sizeof *p->losses), why);
    CUDA_TRY(cudaHostAlloc((void **)&p->losses_back, slots * sizeof *p->losses, cudaHostAllocDefault), why);
    CUDA_TRY(cudaHostAlloc((void **)&p->staged, (slots + 1) * p->model.layout.bytes, cudaHostAllocDefault), why);
    if (!take_params(p, why)) return false;
    CUDA_TRY(cudaStreamSynchronize(p->stream), why);
    return true;
}

static void close_all(plain_gpu *p)
{
    if (p->stream) cudaStreamSynchronize(p->stream);
    p->state.tokens = NULL; /* it is `staged` */
    gpt_state_destroy(&p->state);
    gpt_cuda_destroy(&p->model);
    for (int i = 0; i < STEPS_IN_FLIGHT; i++)
        if (p->done[i]) cudaEventDestroy(p->done[i]);
    if (p->memory) cudaFree(p->memory);
    if (p->losses) cudaFree(p->losses);
    if (p->losses_back) cudaFreeHost(p->losses_back);
    if (p->staged) cudaFreeHost(p->staged);
    if (p->stream) cudaStreamDestroy(p->stream);
    free(p->values);
    free(p->first_param);
}

static bool visit(plain_gpu *p, gpt_visit which, int layer, gpt_call rest, problem *why)
{
    const int first = which == GPT_BLOCK_FORWARD || which == GPT_BLOCK_BACKWARD ? p->first_param[layer + 1] : 0;
    rest.visit = which;
    rest.layer = layer;
    rest.held = p->values;
    rest.held_grads = p->grads;
    rest.block = p->values + first;
    rest.block_grads = p->grads + first;
    return gpt_cuda_visit(&p->model, &rest, why);
}

static bool forward(plain_gpu *p, gpt_call call, problem *why)
{
    if (!visit(p, GPT_EMBED_FORWARD, 0, call, why)) return false;
    for (int l = 0; l < p->job->shape.layers; l++)
        if (!visit(p, GPT_BLOCK_FORWARD, l, call, why)) return false;
    return visit(p, GPT_HEAD_FORWARD, 0, call, why);
}

static bool backward(plain_gpu *p, gpt_call call, problem *why)
{
    if (!visit(p, GPT_HEAD_BACKWARD, 0, call, why)) return false;
    for (int l = p->job->shape.layers - 1; l >= 0; l--)
        if (!visit(p, GPT_BLOCK_BACKWARD, l, call, why)) return false;
    return visit(p, GPT_EMBED_BACKWARD, 0, call, why);
}

static bool adamw(plain_gpu *p, int step, problem *why)
{
    const options *o = &p->job->opt;
    gpt_adamw_args args = {.factor = (float)((1.0 / o->micro_steps) * (1.0 / o->ranks)),
                           .lr = job_learning_rate(p->job, step),
                           .beta1 = beta1,
                           .beta2 = beta2,
                           .bias1 = (float)(1.0 - pow((double)beta1, step)),
                           .bias2 = (float)(1.0 - pow((double)beta2, step)),
                           .eps = eps};
    for (int plain = 0; plain < 2; plain++) {
        const size_t at = plain ? p->decayed : 0;
        args.n = plain ? p->elems - p->decayed : p->decayed;
        args.w = p->master + at;
        args.m = p->m + at;
        args.v = p->v + at;
        args.grad = p->grad + at;
        args.compute = (char *)p->compute + at * sizeof(uint16_t);
        args.decay = plain ? 0.0f : weight_decay;
        CUDA_TRY(gpt_adamw(p->stream, &args), why);
    }
    return true;
}

static bool enqueue_step(plain_gpu *p, int step, problem *why)
{
    const job *j = p->job;
    const int slot = step % STEPS_IN_FLIGHT * p->n_passes;
    for (int pass = 0; pass < p->n_passes; pass++) {
        char *staged = p->staged + (size_t)(slot + pass) * p->model.layout.bytes;
        batch_task batch = {&p->state, j->data, (uint64_t)j->opt.seed, (uint64_t)step,
                            job_first_sequence(j, pass % j->opt.ranks, pass / j->opt.ranks)};
        const gpt_call call = {.training = true, .add_grads = pass > 0, .mean_loss = p->losses + slot + pass};
        gpt_cuda_stage(&p->model, &p->state, staged);
        batch_fill(&batch);
        if (!gpt_cuda_put(&p->model, &p->state, staged, why)) return false;
        if (!forward(p, call, why) || !backward(p, call, why)) return false;
    }
    if (!adamw(p, step, why)) return false;
    CUDA_TRY(cudaMemcpyAsync(p->losses_back + slot, p->losses + slot, (size_t)p->n_passes * sizeof(float),
                             cudaMemcpyDeviceToHost, p->stream),
             why);
    CUDA_TRY(cudaEventRecord(p->done[step % STEPS_IN_FLIGHT], p->stream), why);
    return true;
}

static bool read_loss(plain_gpu *p, int step, float *loss, problem *why)
{
    float sum = 0.0f;
    CUDA_TRY(cudaEventSynchronize(p->done[step % STEPS_IN_FLIGHT]), why);
    for (int pass = 0; pass < p->n_passes; pass++) sum += p->losses_back[step % STEPS_IN_FLIGHT * p->n_passes + pass];
    *loss = job_mean_loss(p->job, sum);
    if (isfinite(*loss)) return true;
    job_not_finite(why, step);
    return false;
}

/* fill(task), forward, take(task); the host waits. */
static bool eval_pass(plain_gpu *p, void (*fill)(void *), void (*take)(void *), void *task, problem *why)
{
    char *staged = p->staged + (size_t)(STEPS_IN_FLIGHT * p->n_passes) * p->model.layout.bytes;
    gpt_cuda_stage(&p->model, &p->state, staged);
    fill(task);
    if (!gpt_cuda_put(&p->model, &p->state, staged, why)) return false;
    if (!forward(p, (gpt_call){.training = false}, why) || !gpt_cuda_fetch(&p->model, why)) return false;
    CUDA_TRY(cudaStreamSynchronize(p->stream), why);
    gpt_cuda_taken(&p->model, &p->state);
    take(task);
    return true;
}

static bool evaluate(plain_gpu *p, int step, outcome *out)
{
    const job *j = p->job;
    const double begun_s = job_now_s();
    window_task task = {.state = &p->state, .data = j->data};
    const size_t batches = window_batches(j->data, &j->shape);
    for (size_t batch = 0; batch < batches; batch++) {
        task.first_window = batch * (size_t)j->shape.batch;
        if (!eval_pass(p, window_fill, window_add, &task, &out->why)) return false;
    }
    out->held_out = window_mean(j->data, &j->shape, (double)task.nats);
    progress_evaluated(j->progress, step, out->held_out, job_now_s() - begun_s);
    return true;
}

static bool write_text(plain_gpu *p, outcome *out)
{
    text_task task = {&p->state, (uint64_t)p->job->opt.seed, out->text, job_prompt(p->job, out->text)};
    for (int i = 0; i < JOB_TEXT_BYTES; i++)
        if (!eval_pass(p, text_fill, text_pick, &task, &out->why)) return false;
    out->text_bytes = task.bytes;
    return true;
}

static bool train(plain_gpu *p, outcome *out)
{
    const job *j = p->job;
    const int behind = j->opt.run_ahead ? STEPS_IN_FLIGHT - 1 : 0;
    step_clock clock = job_step_clock(j);
    for (int step = 1, read = 0; step <= j->steps; step++) {
        if (!enqueue_step(p, step, &out->why)) return false;
        const int until = step == j->steps || job_evaluates(j, step) ? step : step - behind;
        while (read < until) {
            read++;
            if (!read_loss(p, read, &out->losses[read - 1], &out->why)) return false;
            job_clock_step(&clock, read);
            progress_step(j->progress, read, out->losses[read - 1]);
        }
        if (job_evaluates(j, step) && !evaluate(p, step, out)) return false;
    }
    out->step_ms = job_step_ms(&clock);
    out->median_ms = job_median_ms(&clock);
    return !j->write_text || write_text(p, out);
}

static bool read_memory(const plain_gpu *p, outcome *out)
{
    size_t left = 0, total = 0;
    CUDA_TRY(cudaMemGetInfo(&left, &total), &out->why);
    out->activation_bytes = p->model.bytes;
    out->gpu_used_bytes = total - left;
    out->gpu_total_bytes = total;
    return true;
}

bool plain_cuda_run(const job *j, outcome *out)
{
    plain_gpu p = {.job = j, .n_passes = j->opt.ranks * j->opt.micro_steps};
    if (j->opt.clip > 0.0) return problem_set(&out->why, "--plain --device cuda does not clip: leave --clip out");
    const bool ok = open_all(&p, &out->why) && read_memory(&p, out) && train(&p, out);
    close_all(&p);
    return ok;
}
