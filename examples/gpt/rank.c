/* SPDX-License-Identifier: MIT */
/* A rank's training loop. */
#include "rank.h"

#include <string.h>

static const uint64_t patience_ns = 120000000000u; /* of a host that waits for a report */

/* ---- A tape of one step ---- */

static bool traces(const rank *r, int step)
{
    const job *j = r->job;
    if (r->index != 0) return false;
    return step == j->traced_step || (j->trace_every > 0 && step % j->trace_every == 0);
}

static fsdp_status begin_trace(rank *r)
{
    const uint64_t visits = 2 * (uint64_t)gpt_units(&r->job->shape) * (uint64_t)r->job->opt.micro_steps;
    return fsdp_trace_start(r->ctx, 64 * visits + 1024, &r->trace);
}

static void count_wire(const fsdp_trace *trace, job_tape *tape)
{
    for (uint64_t i = 0; i < fsdp_trace_count(trace); i++) {
        const fsdp_trace_record *record = fsdp_trace_at(trace, i);
        if (record->kind != FSDP_RECORD_OPERATION || record->operation > FSDP_OPERATION_BARRIER) continue;
        tape->collectives += 1.0;
        tape->wire_bytes += (double)record->bytes;
    }
}

static fsdp_status end_trace(rank *r, int step)
{
    const job *j = r->job;
    fsdp_trace_summary summary = FSDP_TRACE_SUMMARY_INIT;
    TRY(fsdp_trace_stop_host(r->trace));
    TRY(fsdp_trace_summarize(r->trace, r->stream, &summary));
    if (j->progress)
        j->progress->exposed = summary.span_ns ? (double)summary.exposed_ns / (double)summary.span_ns : 0.0;
    if (step == j->traced_step) {
        r->out->tape =
            (job_tape){.span_ms = (double)summary.span_ns * 1e-6, .exposed_ms = (double)summary.exposed_ns * 1e-6};
        count_wire(r->trace, &r->out->tape);
        if (j->opt.timeline) TRY(fsdp_trace_write_svg(r->trace, j->opt.timeline, j->title));
    }
    fsdp_trace_destroy(r->trace);
    r->trace = NULL;
    return FSDP_OK;
}

/* ---- A step ---- */

static fsdp_status enqueue_step(rank *r, int step)
{
    const job *j = r->job;
    for (int micro = 0; micro < j->opt.micro_steps; micro++) TRY(rank_train_pass(r, step, micro));
    fsdp_adamw_args update = FSDP_ADAMW_ARGS_INIT;
    update.lr = job_learning_rate(j, step);
    update.grad_scale = 1.0 / j->opt.micro_steps;
    update.max_norm = (float)j->opt.clip;
    return fsdp_adamw_step(r->adamw, &update, r->stream);
}

/* Every rank reads the same report, so all stop at the same step. */
static fsdp_status read_report(rank *r, int step)
{
    fsdp_step_report report = FSDP_STEP_REPORT_INIT;
    TRY(fsdp_step_report_get(r->model, (uint64_t)step, patience_ns, &report));
    if (report.skipped) {
        job_not_finite(&r->why, step);
        return FSDP_ERR_STATE;
    }
    if (!r->out) return FSDP_OK;
    r->out->losses[step - 1] = job_mean_loss(r->job, report.sums[0]);
    job_clock_step(&r->clock, step);
    progress_step(r->job->progress, step, r->out->losses[step - 1]);
    return FSDP_OK;
}

/* ---- Beside training ---- */

static fsdp_status evaluate(rank *r, int step)
{
    const job *j = r->job;
    const double begun_s = job_now_s();
    const size_t ranks = (size_t)j->opt.ranks, batch = (size_t)j->shape.batch;
    const size_t rounds = (window_batches(j->data, &j->shape) + ranks - 1) / ranks;
    window_task task = {.state = &r->state, .data = j->data};
    for (size_t round = 0; round < rounds; round++) {
        const int32_t after = step < j->steps ? FSDP_PASS_TRAIN : j->write_text ? FSDP_PASS_EVAL : FSDP_PASS_NONE;
        task.first_window = (round * ranks + (size_t)r->index) * batch;
        TRY(rank_eval_pass(r, round + 1 < rounds ? FSDP_PASS_EVAL : after, window_fill, window_add, &task));
    }
    double nats = (double)task.nats;
    TRY(fsdp_sum_host(r->ctx, &nats, 1));
    if (!r->out) return FSDP_OK;
    r->out->held_out = window_mean(j->data, &j->shape, nats);
    progress_evaluated(j->progress, step, r->out->held_out, job_now_s() - begun_s);
    return FSDP_OK;
}

/* All ranks together: each gathers from all, and each draws the same byte. */
static fsdp_status write_text(rank *r)
{
    uint8_t text[JOB_PROMPT_BYTES + JOB_TEXT_BYTES];
    text_task task = {&r->state, (uint64_t)r->job->opt.seed, text, job_prompt(r->job, text)};
    for (int i = 1; i <= JOB_TEXT_BYTES; i++)
        TRY(rank_eval_pass(r, i < JOB_TEXT_BYTES ? FSDP_PASS_EVAL : FSDP_PASS_NONE, text_fill, text_pick, &task));
    if (!r->out) return FSDP_OK;
    memcpy(r->out->text, text, task.bytes);
    r->out->text_bytes = task.bytes;
    return FSDP_OK;
}

/* ---- All ---- */

static fsdp_status train(rank *r)
{
    const job *j = r->job;
    const int behind = j->opt.run_ahead ? STEPS_IN_FLIGHT - 1 : 0;
    int reported = 0;
    for (int step = 1; step <= j->steps; step++) {
        if (traces(r, step)) TRY(begin_trace(r));
        TRY(enqueue_step(r, step));
        if (r->trace) TRY(end_trace(r, step));
        /* Two steps back: log line and back-pressure in one. An evaluation waits for the stream anyway. */
        const int until = step == j->steps || job_evaluates(j, step) ? step : step - behind;
        while (reported < until) TRY(read_report(r, ++reported));
        if (job_evaluates(j, step)) TRY(evaluate(r, step));
    }
    return j->write_text ? write_text(r) : FSDP_OK;
}

/* Processes decide by what rank 0 measured, so that they decide the same. */
static fsdp_status share_times(rank *r)
{
    if (!r->job->launch) return FSDP_OK;
    TRY(fsdp_broadcast_host(r->ctx, &r->out->step_ms, sizeof r->out->step_ms, 0));
    return fsdp_broadcast_host(r->ctx, &r->out->tape, sizeof r->out->tape, 0);
}

static fsdp_status read_counters(rank *r)
{
    fsdp_counters counters = FSDP_COUNTERS_INIT;
    if (!r->out) return FSDP_OK;
    TRY(fsdp_context_counters(r->ctx, &counters));
    r->out->peak_bytes = counters.device_bytes_peak;
    r->out->step_ms = job_step_ms(&r->clock);
    r->out->median_ms = job_median_ms(&r->clock);
    return share_times(r);
}

static fsdp_status run(rank *r)
{
    TRY(rank_open(r));
    if (r->out && r->job->progress) r->job->progress->memory_bytes = r->out->predicted_bytes;
    r->clock = job_step_clock(r->job);
    TRY(train(r));
    return read_counters(r);
}

bool rank_run(rank *r)
{
    r->status = run(r);
    if (r->status != FSDP_OK) {
        problem_set(&r->why, "rank %d: %s", r->index, fsdp_last_error());
        if (r->ctx) fsdp_context_abort(r->ctx, r->why.text);
    }
    rank_close(r);
    return r->status == FSDP_OK;
}
