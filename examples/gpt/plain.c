/* SPDX-License-Identifier: MIT */
/* The unsharded loop: one thread, whole parameters, an AdamW of its own. It computes what the sharded loop must compute,
 * sum by sum: gradients of the ranks' micro-steps are added in the order in which the library adds them, so that losses
 * agree to the last bit (without clipping, whose norm is summed over shards). */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "job.h"
#include "tasks.h"

typedef struct plain_param {
    size_t at, elems; /* where it lies in each of the flat arrays */
    bool no_decay;
} plain_param;

typedef struct plain {
    const job *job;
    gpt_state state;
    int n_params;
    plain_param *params;
    size_t elems;
    float *memory;                                    /* all of the flat arrays */
    float *value, *grad, *over_ranks, *total, *m, *v; /* (elems) each */
    void **values, **grads;                           /* (n_params): pointers into value and grad */
    int *first_param;                                 /* (units): of each unit */
    float *rank_loss;                                 /* (ranks): sum over a rank's micro-steps */
} plain;

static const float beta1 = 0.9f, beta2 = 0.999f, eps = 1e-8f, weight_decay = 0.01f; /* FSDP_ADAMW_CONFIG_INIT */

static void place_params(plain *p)
{
    const gpt_shape *shape = &p->job->shape;
    for (int unit = 0, n = 0; unit < gpt_units(shape); unit++) {
        p->first_param[unit] = n;
        for (int i = 0; i < gpt_unit_params(shape, unit); i++, n++) {
            const gpt_param param = gpt_param_at(shape, unit, i);
            p->params[n] = (plain_param){p->elems, (size_t)param.elems, param.no_decay};
            p->elems += ((size_t)param.elems + 15) / 16 * 16;
        }
    }
}

static void fill_values(plain *p)
{
    const gpt_shape *shape = &p->job->shape;
    const uint64_t seed = (uint64_t)p->job->opt.seed;
    for (int unit = 0; unit < gpt_units(shape); unit++)
        for (int i = 0; i < gpt_unit_params(shape, unit); i++) {
            const gpt_param param = gpt_param_at(shape, unit, i);
            float *value = p->value + p->params[p->first_param[unit] + i].at;
            gpt_first_values(&param, seed, unit, i, 0, param.elems, value);
        }
}

static bool plain_create(plain *p, const job *j)
{
    *p = (plain){.job = j};
    const int units = gpt_units(&j->shape);
    for (int unit = 0; unit < units; unit++) p->n_params += gpt_unit_params(&j->shape, unit);
    const size_t n = (size_t)p->n_params;
    p->first_param = calloc((size_t)units, sizeof *p->first_param);
    p->params = calloc(n, sizeof *p->params);
    p->values = calloc(2 * n, sizeof *p->values);
    p->rank_loss = calloc((size_t)j->opt.ranks, sizeof *p->rank_loss);
    if (!p->first_param || !p->params || !p->values || !p->rank_loss) return false;
    place_params(p);
    p->memory = calloc(6 * p->elems, sizeof *p->memory);
    if (!p->memory || !gpt_state_create(&p->state, &j->shape)) return false;
    float **const arrays[] = {&p->value, &p->grad, &p->over_ranks, &p->total, &p->m, &p->v};
    for (size_t i = 0; i < 6; i++) *arrays[i] = p->memory + i * p->elems;
    p->grads = p->values + n;
    for (size_t i = 0; i < n; i++) {
        p->values[i] = p->value + p->params[i].at;
        p->grads[i] = p->grad + p->params[i].at;
    }
    fill_values(p);
    return true;
}

static void plain_destroy(plain *p)
{
    gpt_state_destroy(&p->state);
    free(p->memory);
    free(p->rank_loss);
    free(p->values);
    free(p->params);
    free(p->first_param);
}

static gpt_call call_for(plain *p, int layer)
{
    const int first = layer < p->job->shape.layers ? p->first_param[layer + 1] : 0;
    return (gpt_call){.state = &p->state,
                      .layer = layer,
                      .held = p->values,
                      .held_grads = p->grads,
                      .block = p->values + first,
                      .block_grads = p->grads + first};
}

static void run_visit(plain *p, gpt_visit visit, int layer, float *mean_loss)
{
    gpt_call call = call_for(p, layer);
    call.visit = visit;
    call.mean_loss = mean_loss;
    gpt_run(&call);
}

static void forward(plain *p, float *mean_loss)
{
    run_visit(p, GPT_EMBED_FORWARD, 0, NULL);
    for (int l = 0; l < p->job->shape.layers; l++) run_visit(p, GPT_BLOCK_FORWARD, l, NULL);
    run_visit(p, GPT_HEAD_FORWARD, 0, mean_loss);
}

/* Forward and backward of one rank's micro-step, onto grad. Returns its loss. */
static float micro_step(plain *p, int step, int rank, int micro)
{
    const job *j = p->job;
    batch_task batch = {&p->state, j->data, (uint64_t)j->opt.seed, (uint64_t)step, job_first_sequence(j, rank, micro)};
    float loss = 0.0f;
    batch_fill(&batch);
    forward(p, &loss);
    run_visit(p, GPT_HEAD_BACKWARD, 0, NULL);
    for (int l = j->shape.layers - 1; l >= 0; l--) run_visit(p, GPT_BLOCK_BACKWARD, l, NULL);
    run_visit(p, GPT_EMBED_BACKWARD, 0, NULL);
    return loss;
}

static void zero(const plain *p, float *array) { memset(array, 0, p->elems * sizeof *array); }

/* sum = grad, or sum += grad. */
static void collect(const plain *p, float *sum, const float *grad, bool first)
{
    if (first) memcpy(sum, grad, p->elems * sizeof *sum);
    else
        for (size_t i = 0; i < p->elems; i++) sum[i] += grad[i];
}

/* Reduced in each micro-step: a sum over ranks, and these sums one onto the other. */
static void gradients_each(plain *p, int step)
{
    for (int micro = 0; micro < p->job->opt.micro_steps; micro++) {
        for (int rank = 0; rank < p->job->opt.ranks; rank++) {
            zero(p, p->grad);
            p->rank_loss[rank] += micro_step(p, step, rank, micro);
            collect(p, p->over_ranks, p->grad, rank == 0);
        }
        collect(p, p->total, p->over_ranks, micro == 0);
    }
}

/* Kept full: the kernels' += runs over a rank's micro-steps, then one sum over ranks. */
static void gradients_kept(plain *p, int step)
{
    for (int rank = 0; rank < p->job->opt.ranks; rank++) {
        zero(p, p->grad);
        for (int micro = 0; micro < p->job->opt.micro_steps; micro++)
            p->rank_loss[rank] += micro_step(p, step, rank, micro);
        collect(p, p->total, p->grad, rank == 0);
    }
}

static float clip_scale(const plain *p, float factor)
{
    double squares = 0.0;
    for (size_t i = 0; i < p->elems; i++) squares += (double)p->total[i] * (double)p->total[i];
    const float norm = factor * (float)sqrt(squares), most = (float)p->job->opt.clip;
    return most > 0.0f && most < norm ? most / norm : 1.0f;
}

/* The formula of fsdp/optim.h, in its order of operations. */
static void adamw(plain *p, int step)
{
    const options *o = &p->job->opt;
    const float lr = job_learning_rate(p->job, step);
    float factor = (float)((1.0 / o->micro_steps) * (1.0 / o->ranks));
    factor *= clip_scale(p, factor);
    const float bias1 = (float)(1.0 - pow((double)beta1, step)), bias2 = (float)(1.0 - pow((double)beta2, step));
    for (int i = 0; i < p->n_params; i++) {
        const float decay = p->params[i].no_decay ? 0.0f : weight_decay;
        const size_t end = p->params[i].at + p->params[i].elems;
        for (size_t e = p->params[i].at; e < end; e++) {
            const float g = p->total[e] * factor;
            p->m[e] = beta1 * p->m[e] + (1.0f - beta1) * g;
            p->v[e] = beta2 * p->v[e] + (1.0f - beta2) * (g * g);
            p->value[e] -= lr * (p->m[e] / bias1 / (sqrtf(p->v[e] / bias2) + eps) + decay * p->value[e]);
        }
    }
}

static float train_step(plain *p, int step)
{
    const options *o = &p->job->opt;
    memset(p->rank_loss, 0, (size_t)o->ranks * sizeof *p->rank_loss);
    if (o->keep_full) gradients_kept(p, step);
    else gradients_each(p, step);
    adamw(p, step);
    float sum = p->rank_loss[0];
    for (int rank = 1; rank < o->ranks; rank++) sum += p->rank_loss[rank];
    return job_mean_loss(p->job, sum);
}

static double evaluate(plain *p)
{
    const job *j = p->job;
    window_task task = {.state = &p->state, .data = j->data};
    const size_t batches = window_batches(j->data, &j->shape);
    for (size_t batch = 0; batch < batches; batch++) {
        task.first_window = batch * (size_t)j->shape.batch;
        window_fill(&task);
        forward(p, NULL);
        window_add(&task);
    }
    return window_mean(j->data, &j->shape, (double)task.nats);
}

static void write_text(plain *p, outcome *out)
{
    text_task task = {&p->state, (uint64_t)p->job->opt.seed, out->text, job_prompt(p->job, out->text)};
    for (int i = 0; i < JOB_TEXT_BYTES; i++) {
        text_fill(&task);
        forward(p, NULL);
        text_pick(&task);
    }
    out->text_bytes = task.bytes;
}

bool plain_run(const job *j, outcome *out)
{
    plain p;
    if (!plain_create(&p, j)) {
        plain_destroy(&p);
        return problem_set(&out->why, "no memory for a model of this size");
    }
    step_clock clock = job_step_clock(j);
    for (int step = 1; step <= j->steps; step++) {
        out->losses[step - 1] = train_step(&p, step);
        if (!isfinite(out->losses[step - 1])) {
            job_not_finite(&out->why, step);
            break;
        }
        job_clock_step(&clock, step);
        progress_step(j->progress, step, out->losses[step - 1]);
        if (!job_evaluates(j, step)) continue;
        const double begun_s = job_now_s();
        out->held_out = evaluate(&p);
        progress_evaluated(j->progress, step, out->held_out, job_now_s() - begun_s);
    }
    out->step_ms = job_step_ms(&clock);
    out->median_ms = job_median_ms(&clock);
    if (j->write_text && out->why.text[0] == '\0') write_text(&p, out);
    plain_destroy(&p);
    return out->why.text[0] == '\0';
}
