/* SPDX-License-Identifier: MIT */
/* What a rank enqueues for one pass: hooks around the visits of the model. */
#include <stdlib.h>
#include <string.h>

#include "rank.h"

enum { FORWARD, BACKWARD, GRADS };

static const uint64_t patience_ns = 120000000000u; /* of a host that waits for its own stream */

bool pass_block_create(pass_block *block, const gpt_shape *shape)
{
    const size_t held = (size_t)gpt_unit_params(shape, 0), blocks = (size_t)shape->layers * BLOCK_PARAMS;
    *block = (pass_block){.calls = calloc(2 * (size_t)shape->layers + 4, sizeof *block->calls),
                          .pointers = calloc(3 * (held + blocks), sizeof *block->pointers)};
    if (!block->calls || !block->pointers) return false;
    for (size_t i = 0; i < 3; i++) {
        block->held[i] = block->pointers + i * held;
        block->blocks[i] = block->pointers + 3 * held + i * blocks;
    }
    return true;
}

void pass_block_destroy(pass_block *block)
{
    free(block->calls);
    free(block->pointers);
    *block = (pass_block){.n_calls = 0};
}

static void copy_pointers(void **to, void *const *from, uint32_t count) { memcpy(to, from, count * sizeof *to); }

/* Open unit `unit` and keep its pointers. */
static fsdp_status open_forward(const rank *r, int unit, void **params)
{
    fsdp_view view = FSDP_VIEW_INIT;
    TRY(fsdp_forward_begin(r->units[unit], r->stream, &view));
    copy_pointers(params, view.params, view.n_params);
    return FSDP_OK;
}

static fsdp_status open_backward(const rank *r, int unit, void **params, void **grads)
{
    fsdp_view view = FSDP_VIEW_INIT;
    TRY(fsdp_backward_begin(r->units[unit], r->stream, &view));
    copy_pointers(params, view.params, view.n_params);
    copy_pointers(grads, view.grads, view.n_params);
    return FSDP_OK;
}

static fsdp_status enqueue_visit(rank *r, pass_block *b, gpt_visit visit, int layer)
{
    const bool backward = visit >= GPT_HEAD_BACKWARD, evaluates = b == &r->blocks[r->n_blocks - 1];
    const ptrdiff_t first = (ptrdiff_t)layer * BLOCK_PARAMS;
    gpt_call *call = &b->calls[b->n_calls++];
    *call = (gpt_call){.state = &r->state,
                       .visit = visit,
                       .layer = layer,
                       .held = b->held[backward ? BACKWARD : FORWARD],
                       .held_grads = b->held[GRADS],
                       .block = b->blocks[backward ? BACKWARD : FORWARD] + first,
                       .block_grads = b->blocks[GRADS] + first,
                       .mean_loss = visit == GPT_HEAD_FORWARD ? b->mean_loss : NULL,
                       .training = !evaluates,
                       .add_grads = r->add_grads};
    return r->job->device->visit(r, call);
}

/* The held unit is open from embedding to head, since each block normalises for the next with its parameters. */
static fsdp_status forward(rank *r, pass_block *b)
{
    b->n_calls = 0;
    TRY(open_forward(r, 0, b->held[FORWARD]));
    TRY(enqueue_visit(r, b, GPT_EMBED_FORWARD, 0));
    for (int l = 0; l < r->job->shape.layers; l++) {
        TRY(open_forward(r, l + 1, b->blocks[FORWARD] + (ptrdiff_t)l * BLOCK_PARAMS));
        TRY(enqueue_visit(r, b, GPT_BLOCK_FORWARD, l));
        TRY(fsdp_forward_end(r->units[l + 1], r->stream));
    }
    TRY(enqueue_visit(r, b, GPT_HEAD_FORWARD, 0));
    return fsdp_forward_end(r->units[0], r->stream);
}

static fsdp_status backward(rank *r, pass_block *b)
{
    TRY(open_backward(r, 0, b->held[BACKWARD], b->held[GRADS]));
    TRY(enqueue_visit(r, b, GPT_HEAD_BACKWARD, 0));
    for (int l = r->job->shape.layers - 1; l >= 0; l--) {
        const ptrdiff_t first = (ptrdiff_t)l * BLOCK_PARAMS;
        TRY(open_backward(r, l + 1, b->blocks[BACKWARD] + first, b->blocks[GRADS] + first));
        TRY(enqueue_visit(r, b, GPT_BLOCK_BACKWARD, l));
        TRY(fsdp_backward_end(r->units[l + 1], r->stream));
    }
    TRY(enqueue_visit(r, b, GPT_EMBED_BACKWARD, 0));
    return fsdp_backward_end(r->units[0], r->stream);
}

/* What comes after the step, so that update_end gathers for it. */
static int32_t pass_after(const job *j, int step)
{
    if (job_evaluates(j, step) || (step == j->steps && j->write_text)) return FSDP_PASS_EVAL;
    return step == j->steps ? FSDP_PASS_NONE : FSDP_PASS_TRAIN;
}

fsdp_status rank_train_pass(rank *r, int step, int micro_step)
{
    const job *j = r->job;
    pass_block *b = &r->blocks[step % STEPS_IN_FLIGHT * j->opt.micro_steps + micro_step];
    fsdp_pass_args args = FSDP_PASS_ARGS_INIT;
    args.index = (uint32_t)micro_step;
    args.count = (uint32_t)j->opt.micro_steps;
    args.next = pass_after(j, step);
    b->batch = (batch_task){&r->state, j->data, (uint64_t)j->opt.seed, (uint64_t)step,
                            job_first_sequence(j, r->index, micro_step)};
    TRY(fsdp_pass_begin(r->model, &args, r->stream));
    TRY(j->device->put(r, b, batch_fill, &b->batch));
    TRY(forward(r, b));
    TRY(fsdp_step_sum(r->model, 0, b->mean_loss, r->stream));
    TRY(backward(r, b));
    return fsdp_pass_end(r->model, r->stream);
}

fsdp_status rank_eval_pass(rank *r, int32_t next, void (*before)(void *), void (*after)(void *), void *task)
{
    pass_block *b = &r->blocks[r->n_blocks - 1];
    fsdp_pass_args args = FSDP_PASS_ARGS_INIT;
    args.pass = FSDP_PASS_EVAL;
    args.next = next;
    TRY(fsdp_pass_begin(r->model, &args, r->stream));
    TRY(r->job->device->put(r, b, before, task));
    TRY(forward(r, b));
    TRY(r->job->device->get(r, after, task));
    TRY(fsdp_pass_end(r->model, r->stream));
    return fsdp_stream_drain_host(r->stream, patience_ns);
}
