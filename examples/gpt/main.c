/* SPDX-License-Identifier: MIT */
/* gpt: train a byte-level GPT on sharded ranks, judge it on text it has not seen, let it write. */
#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <fsdp/launch.h>
#include <fsdp/status.h>

#include "bigram.h"
#include "compare.h"
#include "gemm.h"
#include "job.h"
#include "rank.h"
#ifdef GPT_WITH_CUDA
#include "rank_cuda.h"
#endif

enum { EVALUATIONS = 4, TRACES = 20, WARM_STEP = 10 };

typedef struct result {
    outcome trained;
    double bigram;
    bool has_comparison;
    comparison compared;
} result;

static double n_params(const gpt_shape *shape)
{
    double n = 0.0;
    for (int unit = 0; unit < gpt_units(shape); unit++)
        for (int i = 0; i < gpt_unit_params(shape, unit); i++) n += (double)gpt_param_at(shape, unit, i).elems;
    return n;
}

static double tokens_a_step(const job *j)
{
    return (double)j->opt.ranks * j->opt.micro_steps * j->shape.batch * j->shape.context;
}

static int at_least_one(int n) { return n > 0 ? n : 1; }

static job make_job(const options *o, const fsdp_launch *launch, const data_set *data, progress *p)
{
    const bool watched = !o->quiet && launch->rank == 0;
    job j = {.opt = *o,
             .launch = launch->world > 1 ? launch : NULL,
             .device = &rank_host_device,
             .shape = {o->layers, o->dim, o->heads, o->context, o->batch, o->vocab},
             .data = data,
             .steps = o->steps,
             .evaluate_every = at_least_one(o->steps / EVALUATIONS),
             .write_text = !o->random_data,
             .title = "One training step of rank 0",
             .progress = watched ? p : NULL};
#ifdef GPT_WITH_CUDA
    if (o->cuda) j.device = &rank_cuda_device;
#endif
    if (o->random_data) j.evaluate_every = 0; /* there is nothing to learn */
    if (watched && !o->cuda) j.trace_every = at_least_one(o->steps / TRACES);
    if (o->compare) {
        j.opt.has_link = false;
        j.opt.timeline = NULL;
    }
    if (j.opt.timeline) j.traced_step = o->steps < WARM_STEP ? o->steps : WARM_STEP;
    return j;
}

static void print_head(const job *j, FILE *to)
{
    const options *o = &j->opt;
    const char *unit = o->random_data ? "tokens" : "bytes";
    fprintf(to, "gpt: %.2f million parameters, %d layers of %d channels, %d heads, %d %s of context\n",
            n_params(&j->shape) / 1e6, o->layers, o->dim, o->heads, o->context, unit);
    if (o->random_data) fprintf(to, "     random tokens below %d\n", o->vocab);
    else
        fprintf(to, "     %d document%s from %s: %zu bytes to train on, %zu held out\n", j->data->documents,
                j->data->documents == 1 ? "" : "s", o->data, j->data->train_bytes, j->data->held_out_bytes);
    if (o->plain) fprintf(to, "     unsharded, in the order of sums of %d ranks", o->ranks);
    else if (j->launch)
        fprintf(to, "     %d processes by %s, prefetch depth %d", o->ranks, fsdp_launcher_name(j->launch->launcher),
                o->depth);
    else fprintf(to, "     %d rank%s, prefetch depth %d", o->ranks, o->ranks == 1 ? "" : "s", o->depth);
    if (o->micro_steps > 1)
        fprintf(to, ", %d micro-steps (%s)", o->micro_steps, o->keep_full ? "gradients kept" : "each reduced");
    fprintf(to, ", %.0f %s a step, products by %s\n", tokens_a_step(j), unit,
            o->cuda ? "cuBLASLt in bf16" : gemm_name());
    if (o->has_link) fprintf(to, "     over a modelled link of %d us and %d MB/s\n", o->link_us, o->link_mb_per_s);
}

static void print_text(const outcome *out, FILE *to)
{
    fprintf(to, "\n%d bytes that all ranks wrote together:\n\n    ", JOB_TEXT_BYTES);
    for (size_t i = 0; i < out->text_bytes; i++) {
        const int c = out->text[i];
        if (c == '\n') fprintf(to, "\n    ");
        else fputc(isprint(c) ? c : '?', to);
    }
    fprintf(to, "\n");
}

/* 6 a parameter (the tied embedding counts once, as the head), and causal attention, of whose scores half are needed. */
static double flop_a_token(const gpt_shape *shape)
{
    return 6.0 * n_params(shape) + 6.0 * shape->layers * (double)shape->dim * shape->context;
}

static double tokens_per_s(const job *j, const outcome *out) { return tokens_a_step(j) / (1e-3 * out->median_ms); }

/* Of all ranks' GPUs together. */
static double mfu(const job *j, const outcome *out)
{
    const double peak = 1e12 * j->opt.peak_tflops * (j->opt.plain ? 1 : j->opt.ranks);
    return tokens_per_s(j, out) * flop_a_token(&j->shape) / peak;
}

static void print_gpu(const job *j, const outcome *out, FILE *to)
{
    const double mib = 1048576.0;
    fprintf(to, "activations of a rank: %.1f MiB%s; in use on its GPU, all in all: %.1f of %.1f MiB\n",
            (double)out->activation_bytes / mib, j->opt.recompute ? " (GELU is computed again)" : "",
            (double)out->gpu_used_bytes / mib, (double)out->gpu_total_bytes / mib);
    if (!isfinite(out->median_ms)) return;
    fprintf(to, "a step: %.2f ms (median of the last %d or fewer), %.0f tokens/s\n", out->median_ms, MEDIAN_STEPS,
            tokens_per_s(j, out));
    fprintf(to,
            "MFU %.1f %%: of %.0f TFLOP/s a rank, at 6 x parameters + 6 x layers x channels x context FLOP a token\n",
            100.0 * mfu(j, out), j->opt.peak_tflops);
}

static void print_result(const job *j, const result *r, FILE *to)
{
    fprintf(to, "loss %.4f in the first step, %.4f in the last", (double)r->trained.losses[0],
            (double)r->trained.losses[j->steps - 1]);
    if (j->evaluate_every == 0) fprintf(to, "\n");
    else fprintf(to, "; held out %.4f nats a byte, a bigram model has %.4f\n", r->trained.held_out, r->bigram);
    if (j->opt.cuda) print_gpu(j, &r->trained, to);
    if (r->trained.peak_bytes > 0)
        fprintf(to, "device memory of a rank: %llu bytes at the peak, %llu predicted before the first step\n",
                (unsigned long long)r->trained.peak_bytes, (unsigned long long)r->trained.predicted_bytes);
}

/* JSON has no NaN. */
static void print_number(const char *name, double value, int digits, const char *end)
{
    if (isfinite(value)) printf("\"%s\":%.*f%s", name, digits, value, end);
    else printf("\"%s\":null%s", name, end);
}

static void print_json(const job *j, const result *r)
{
    const comparison *c = r->has_comparison ? &r->compared : NULL;
    printf("{\"ranks\":%d,\"steps\":%d,", j->opt.ranks, j->steps);
    print_number("loss_first", (double)r->trained.losses[0], 6, ",");
    print_number("loss_last", (double)r->trained.losses[j->steps - 1], 6, ",");
    print_number("loss_held_out", r->trained.held_out, 6, ",");
    print_number("bigram_held_out", r->bigram, 6, ",");
    print_number("step_ms_prefetch_off", c ? c->off_ms : (double)NAN, 3, ",");
    print_number("step_ms_prefetch_on", c ? c->on_ms : (double)NAN, 3, ",");
    print_number("overlap_efficiency", c ? c->efficiency : (double)NAN, 3, ",");
    printf("\"peak_bytes\":%llu,\"predicted_peak_bytes\":%llu,", (unsigned long long)r->trained.peak_bytes,
           (unsigned long long)r->trained.predicted_bytes);
    if (j->opt.cuda) {
        print_number("step_ms", r->trained.median_ms, 3, ",");
        print_number("tokens_per_s", tokens_per_s(j, &r->trained), 0, ",");
        print_number("mfu", mfu(j, &r->trained), 4, ",");
        printf("\"activation_bytes\":%llu,", (unsigned long long)r->trained.activation_bytes);
    }
    printf("\"losses_identical\":%s}\n", !c ? "null" : c->identical ? "true" : "false");
}

static bool write_losses(const char *path, const float *losses, int steps, problem *why)
{
    FILE *file = fopen(path, "w");
    if (!file) return problem_set(why, "cannot write %s: %s", path, strerror(errno));
    for (int i = 0; i < steps; i++) fprintf(file, "%a\n", (double)losses[i]);
    const bool written = !ferror(file);
    if (fclose(file) != 0 || !written) return problem_set(why, "cannot write %s: %s", path, strerror(errno));
    return true;
}

/* Before minutes of training, not after. */
static bool check_writable(const char *path, problem *why)
{
    if (!path) return true;
    FILE *file = fopen(path, "a");
    if (!file) return problem_set(why, "cannot write %s: %s", path, strerror(errno));
    fclose(file);
    return true;
}

static bool train(const job *j, result *r, progress *p, FILE *people, problem *why)
{
    print_head(j, people);
    fflush(people);
    if (j->progress) progress_begin(p, "training", j->steps, tokens_a_step(j));
    bool (*loop)(const job *, outcome *) = j->opt.plain ? plain_run : sharded_run;
#ifdef GPT_WITH_CUDA
    if (j->opt.plain && j->opt.cuda) loop = plain_cuda_run;
#endif
    const bool ok = loop(j, &r->trained);
    progress_end(j->progress);
    if (!ok) return problem_set(why, "%s", r->trained.why.text);
    print_result(j, r, people);
    if (j->write_text) print_text(&r->trained, people);
    fflush(people);
    return !j->opt.losses || write_losses(j->opt.losses, r->trained.losses, j->steps, why);
}

static bool run(const options *o, const fsdp_launch *launch, const data_set *data, FILE *people, problem *why)
{
    progress p;
    job j = make_job(o, launch, data, &p);
    result r = {.bigram = o->random_data ? (double)NAN : bigram_held_out(data, o->context),
                .has_comparison = o->compare};
    if (!outcome_create(&r.trained, j.steps)) return problem_set(why, "no memory for %d losses", j.steps);
    bool ok = train(&j, &r, &p, people, why);
    if (ok && o->compare) {
        if (j.progress) fprintf(stderr, "\ncomparing …\n");
        j.opt = *o;
        ok = compare_run(&j, &r.trained, &r.compared, why);
        if (ok) compare_print(&r.compared, people);
        if (ok && !r.compared.identical) ok = problem_set(why, "losses of runs that must agree to the last bit differ");
    }
    if (o->json && launch->rank == 0 && (ok || r.compared.steps > 0)) print_json(&j, &r);
    outcome_destroy(&r.trained);
    return ok;
}

/* Threads of this process, or the processes that a launcher started. */
static bool place(options *o, fsdp_launch *launch, problem *why)
{
    if (fsdp_launch_from_env(launch) != FSDP_OK) return problem_set(why, "%s", fsdp_last_error());
    const int world = (int)launch->world;
    if (world == 1) {
        if (o->ranks == 0) o->ranks = o->cuda ? 1 : 4;
        return true;
    }
    const char *launcher = fsdp_launcher_name(launch->launcher);
    if (o->plain) return problem_set(why, "--plain is one process without ranks, and %s started %d", launcher, world);
    if (o->ranks != 0 && o->ranks != world)
        return problem_set(why, "--ranks %d, but %s started %d processes: leave --ranks out", o->ranks, launcher,
                           world);
    o->ranks = world;
    if (launch->rank > 0) o->losses = o->timeline = NULL;
    return true;
}

static bool load_and_run(const options *o, const fsdp_launch *launch, FILE *people, problem *why)
{
    data_set data;
    if (!check_writable(o->losses, why) || !check_writable(o->timeline, why)) return false;
    if (o->random_data) data = data_random(o->vocab);
    else if (!data_load(&data, o->data, o->context, why)) return false;
    const bool ok = run(o, launch, &data, people, why);
    data_free(&data);
    return ok;
}

int main(int argc, char **argv)
{
    problem why = {""};
    options o;
    fsdp_launch launch = FSDP_LAUNCH_INIT;
    if (!options_parse(&o, argc, argv, &why)) {
        fprintf(stderr, "gpt: %s\n", why.text);
        return 2;
    }
    if (o.help) {
        options_help(stdout);
        return 0;
    }
#ifndef GPT_WITH_CUDA
    if (o.cuda) {
        fprintf(stderr, "gpt: --device cuda: this gpt was built without CUDA\n");
        return 2;
    }
#endif
    gemm_init();
    bool ok = place(&o, &launch, &why);
    /* One process speaks for all. */
    FILE *people = launch.rank > 0 ? fopen("/dev/null", "w") : o.json ? stderr : stdout;
    if (!people) ok = problem_set(&why, "cannot open /dev/null: %s", strerror(errno));
    if (ok) ok = load_and_run(&o, &launch, people, &why);
    if (launch.rank > 0 && people) fclose(people);
    if (ok && fflush(stdout) == 0) return 0;
    fprintf(stderr, "gpt: %s\n", ok ? "cannot write to standard output" : why.text);
    return 1;
}
