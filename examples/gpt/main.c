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
             .shape = {o->layers, o->dim, o->heads, o->context, o->batch},
             .data = data,
             .steps = o->steps,
             .evaluate_every = at_least_one(o->steps / EVALUATIONS),
             .write_text = true,
             .title = "One training step of rank 0",
             .progress = watched ? p : NULL};
    if (watched) j.trace_every = at_least_one(o->steps / TRACES);
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
    fprintf(to, "gpt: %.2f million parameters, %d layers of %d channels, %d heads, %d bytes of context\n",
            n_params(&j->shape) / 1e6, o->layers, o->dim, o->heads, o->context);
    fprintf(to, "     %d document%s from %s: %zu bytes to train on, %zu held out\n", j->data->documents,
            j->data->documents == 1 ? "" : "s", o->data, j->data->train_bytes, j->data->held_out_bytes);
    if (o->plain) fprintf(to, "     unsharded, in the order of sums of %d ranks", o->ranks);
    else if (j->launch)
        fprintf(to, "     %d processes by %s, prefetch depth %d", o->ranks, fsdp_launcher_name(j->launch->launcher),
                o->depth);
    else fprintf(to, "     %d rank%s, prefetch depth %d", o->ranks, o->ranks == 1 ? "" : "s", o->depth);
    if (o->micro_steps > 1)
        fprintf(to, ", %d micro-steps (%s)", o->micro_steps, o->keep_full ? "gradients kept" : "each reduced");
    fprintf(to, ", %.0f bytes a step, products by %s\n", tokens_a_step(j), gemm_name());
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

static void print_result(const job *j, const result *r, FILE *to)
{
    fprintf(to, "loss %.4f in the first step, %.4f in the last; held out %.4f nats a byte, a bigram model has %.4f\n",
            (double)r->trained.losses[0], (double)r->trained.losses[j->steps - 1], r->trained.held_out, r->bigram);
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
    const bool ok = j->opt.plain ? plain_run(j, &r->trained) : sharded_run(j, &r->trained);
    progress_end(j->progress);
    if (!ok) return problem_set(why, "%s", r->trained.why.text);
    print_result(j, r, people);
    print_text(&r->trained, people);
    fflush(people);
    return !j->opt.losses || write_losses(j->opt.losses, r->trained.losses, j->steps, why);
}

static bool run(const options *o, const fsdp_launch *launch, const data_set *data, FILE *people, problem *why)
{
    progress p;
    job j = make_job(o, launch, data, &p);
    result r = {.bigram = bigram_held_out(data, o->context), .has_comparison = o->compare};
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
        if (o->ranks == 0) o->ranks = 4;
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
    if (!data_load(&data, o->data, o->context, why)) return false;
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
