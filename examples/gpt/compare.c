/* SPDX-License-Identifier: MIT */
/* Prefetch off against on, over a modelled link. */
#include "compare.h"

#include <fsdp/launch.h>

#include <math.h>
#include <string.h>

enum { STEPS = 20, LINK_US = 100 };

/* A link that takes this share of the compute: slow enough to be seen, fast enough to be hidden. */
static const double wire_share = 0.4;

typedef struct runner {
    const job *trained;
    const outcome *trained_out;
    comparison *result;
    problem *why;
} runner;

/* Runs `j`, compares its losses with the first steps of training, and gives its times. */
static bool run_one(const runner *run, const job *j, bool (*loop)(const job *, outcome *), double *step_ms,
                    job_tape *tape)
{
    outcome out;
    if (!outcome_create(&out, j->steps)) return problem_set(run->why, "no memory for %d losses", j->steps);
    const bool ok = loop(j, &out);
    if (!ok) problem_set(run->why, "%s", out.why.text);
    if (memcmp(out.losses, run->trained_out->losses, (size_t)j->steps * sizeof *out.losses) != 0)
        run->result->identical = false;
    *step_ms = out.step_ms;
    *tape = out.tape;
    outcome_destroy(&out);
    return ok;
}

static double wire_ms(const job_tape *tape, int link_us, int link_mb_per_s)
{
    const double bytes_ms = link_mb_per_s > 0 ? tape->wire_bytes / (link_mb_per_s * 1e3) : 0.0;
    return tape->collectives * link_us * 1e-3 + bytes_ms;
}

static void choose_link(job *j, const job_tape *tape, double compute_ms)
{
    if (j->opt.has_link) return;
    const double for_bytes_ms = wire_share * compute_ms - tape->collectives * LINK_US * 1e-3;
    const double mb_per_s = tape->wire_bytes / 1e3 / fmax(for_bytes_ms, 0.1 * compute_ms);
    j->opt.has_link = true;
    j->opt.link_us = LINK_US;
    j->opt.link_mb_per_s = (int)fmax(1.0, fmin(mb_per_s, 1e6));
}

/* The same steps, with nothing beside them. */
static job bare_job(const job *trained)
{
    job j = *trained;
    j.steps = trained->steps < STEPS ? trained->steps : STEPS;
    j.traced_step = j.steps;
    j.evaluate_every = j.trace_every = 0;
    j.write_text = false;
    j.progress = NULL;
    j.opt.timeline = NULL;
    if (j.opt.depth == 0) j.opt.depth = 1;
    return j;
}

bool compare_run(const job *trained, const outcome *trained_out, comparison *out, problem *why)
{
    const options *o = &trained->opt;
    job j = bare_job(trained);
    *out = (comparison){
        .steps = j.steps, .depth = j.opt.depth, .fitted = !o->has_link, .identical = true, .has_plain = o->clip == 0.0};
    const runner run = {trained, trained_out, out, why};
    job_tape free_tape, off_tape, on_tape, no_tape;
    double plain_ms;

    j.opt.has_link = false;
    if (!run_one(&run, &j, sharded_run, &out->compute_ms, &free_tape)) return false;
    j.opt.has_link = o->has_link;
    choose_link(&j, &free_tape, out->compute_ms);
    out->link_us = j.opt.link_us;
    out->link_mb_per_s = j.opt.link_mb_per_s;

    char title[160];
    snprintf(title, sizeof title,
             "One training step of rank 0 of %d, prefetch depth %d, over a modelled link: %d us, %d MB/s", o->ranks,
             out->depth, out->link_us, out->link_mb_per_s);
    job on = j, off = j;
    off.opt.depth = 0;
    on.title = title;
    on.opt.timeline = o->timeline;
    if (!run_one(&run, &off, sharded_run, &out->off_ms, &off_tape)) return false;
    if (!run_one(&run, &on, sharded_run, &out->on_ms, &on_tape)) return false;
    const bool first = !j.launch || j.launch->rank == 0; /* ranks that are processes need not all walk alone */
    if (first && out->has_plain && !run_one(&run, &j, plain_run, &plain_ms, &no_tape)) return false;
    out->wire_ms = wire_ms(&on_tape, out->link_us, out->link_mb_per_s);
    out->compute_exposed_ms = free_tape.exposed_ms;
    out->off_exposed_ms = off_tape.exposed_ms;
    out->on_exposed_ms = on_tape.exposed_ms;
    out->efficiency = fmax(out->compute_ms, out->wire_ms) / out->on_ms;
    return true;
}

void compare_print(const comparison *c, FILE *to)
{
    fprintf(to, "\nThe first %d steps again, over a modelled link of %d us and %d MB/s%s.\n", c->steps, c->link_us,
            c->link_mb_per_s, c->fitted ? ", chosen to fit this machine" : "");
    fprintf(to, "No network is involved: each collective sleeps for what the link would take.\n\n");
    fprintf(to, "                           a step   rank 0 stood (one step; for the wire, or for slower ranks)\n");
    fprintf(to, "    compute, no wire    %7.1f ms   %7.1f ms\n", c->compute_ms, c->compute_exposed_ms);
    fprintf(to, "    the wire alone      %7.1f ms\n", c->wire_ms);
    fprintf(to, "    prefetch off        %7.1f ms   %7.1f ms\n", c->off_ms, c->off_exposed_ms);
    fprintf(to, "    prefetch on (%d)     %7.1f ms   %7.1f ms\n\n", c->depth, c->on_ms, c->on_exposed_ms);
    fprintf(to, "    overlap efficiency  %7.2f      max(compute, wire) / prefetch on; 1 hides all that can be hidden\n",
            c->efficiency);
    fprintf(to, "    losses              %s: training, no wire, prefetch off, prefetch on%s\n\n",
            c->identical ? "identical to the last bit" : "NOT IDENTICAL", c->has_plain ? ", unsharded loop" : "");
}
