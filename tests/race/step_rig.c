/* SPDX-License-Identifier: MIT */
#include "step_rig.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lib/hash.h"

static const char *const judges[STEP_JUDGES] = {"call", "order", "device", "numbers", "tape", "memory", "traces"};

/* ---- Schedules ---- */

explore_config step_order(uint64_t seed, uint32_t n_streams, uint64_t n_steps)
{
    static const explore_policy policies[STEP_SEED_KINDS] = {EXPLORE_IN_ORDER,  EXPLORE_RANDOM,      EXPLORE_PCT,
                                                             EXPLORE_STARVE,    EXPLORE_RANDOM,      EXPLORE_PCT,
                                                             EXPLORE_SLOW_COMM, EXPLORE_SLOW_COMPUTE};
    explore_config order = {.policy = policies[seed % STEP_SEED_KINDS], .seed = seed, .steps = n_steps};
    order.depth = seed % STEP_SEED_KINDS == 2 ? 2 : 3;
    order.target = (uint32_t)(seed / STEP_SEED_KINDS % n_streams);
    return order;
}

/* ---- Scripts ---- */

void *step_keep(toy *t, size_t bytes)
{
    step_log *log = &((step_run *)t->arg)->log[t->rank];
    if (log->n_keep == STEP_KEEP) return NULL;
    return log->keep[log->n_keep++] = calloc(1, bytes);
}

fsdp_status step_log_traces(toy *t)
{
    step_log *log = &((step_run *)t->arg)->log[t->rank];
    fsdp_model_stats stats = FSDP_MODEL_STATS_INIT;
    TOY_TRY(fsdp_model_stats_get(t->model, &stats));
    TOY_CHECK(log->n < STEP_LOG);
    log->gather[log->n] = stats.gather_trace;
    log->grad[log->n++] = stats.grad_trace;
    return FSDP_OK;
}

fsdp_status step_train(toy *t)
{
    while (t->n_updates < t->config->steps) {
        fsdp_status status = toy_step(t);
        if (status == FSDP_OK) status = step_log_traces(t);
        if (status == FSDP_OK && t->rank == 0 && t->n_updates % 3 == 0) /* one rank prints a loss, the others do not */
            status = fsdp_stream_drain_host(t->s, toy_timeout_ns);
        if (status != FSDP_OK) return status;
    }
    return toy_finish(t);
}

/* ---- One run ---- */

typedef struct outcome {
    toy_result result[TOY_WORLD]; /* the first STEP_RANKS are used */
    step_run run;
} outcome;

static outcome in_order, other, on_host, plain;

typedef struct verdict {
    bool by[STEP_JUDGES];
    char text[2048];
} verdict;

static void found(verdict *v, step_judge judge, const char *format, ...) __attribute__((format(printf, 3, 4)));
static void found(verdict *v, step_judge judge, const char *format, ...)
{
    v->by[judge] = true;
    size_t used = strlen(v->text);
    if (used + 8 > sizeof v->text) return;
    used += (size_t)snprintf(v->text + used, sizeof v->text - used, "\n  %s: ", judges[judge]);
    if (used >= sizeof v->text) return;
    va_list args;
    va_start(args, format);
    vsnprintf(v->text + used, sizeof v->text - used, format, args);
    va_end(args);
}

static void free_kept(step_run *run)
{
    for (uint32_t r = 0; r < STEP_RANKS; r++)
        for (step_log *log = &run->log[r]; log->n_keep > 0;) free(log->keep[--log->n_keep]);
}

static bool go(const step_case *c, const toy_config *config, outcome *out)
{
    memset(&out->run, 0, sizeof out->run);
    out->run.c = c;
    bool good = toy_run(config, c->script != NULL ? c->script : step_train, &out->run, out->result);
    free_kept(&out->run);
    return good;
}

/* On a tape that is kept, only copies (values in and out, by staging) touch what is neither the model's nor the toy's. */
static void judge_places(const toy_tape *tape, uint32_t rank, verdict *v)
{
    char text[400];
    for (uint64_t i = 0; tape != NULL && i < tape->n; i++) {
        const toy_record *r = &tape->record[i];
        if (r->kind == FSDP_RECORD_OPERATION && r->operation == FSDP_OPERATION_COPY) continue;
        for (uint32_t k = 0; k < r->n_accesses; k++) {
            if (r->access[k].range != TOY_ELSEWHERE || r->access[k].bytes == 0) continue;
            toy_tape_say(r, text, sizeof text);
            found(v, STEP_DEVICE, "rank %u, record %llu is out of all ranges: %s", rank, (unsigned long long)i, text);
            return;
        }
    }
}

/* What one run says by itself. */
static void judge_alone(const step_case *c, const outcome *o, bool good, verdict *v)
{
    if (!good) found(v, STEP_CALL, "%s", o->result[0].error);
    if (o->result[0].complaint[0] != '\0') found(v, STEP_DEVICE, "%s", o->result[0].complaint);
    for (uint32_t r = 0; r < c->config.world; r++)
        if (o->result[r].races > 0) {
            found(v, STEP_ORDER, "rank %u, %zu races: %s", r, o->result[r].races, o->result[r].race);
            break;
        }
    for (uint32_t r = 0; r < c->config.world; r++) {
        if (o->run.log[r].n_wrong == 0) continue;
        found(v, STEP_NUMBERS, "rank %u: %s", r, o->run.log[r].wrong);
        break;
    }
    if (!good) return;
    for (uint32_t r = 0; r < c->config.world; r++) judge_places(o->result[r].tape, r, v);
    for (uint32_t r = 1; r < c->config.world; r++) {
        const step_log *a = &o->run.log[0], *b = &o->run.log[r];
        if (a->n != b->n || memcmp(a->gather, b->gather, sizeof a->gather) != 0 ||
            memcmp(a->grad, b->grad, sizeof a->grad) != 0)
            found(v, STEP_TRACES, "ranks 0 and %u have other places", r);
        if (o->result[r].hash != o->result[0].hash) found(v, STEP_NUMBERS, "ranks 0 and %u do not agree", r);
    }
    const step_log *log = &o->run.log[0];
    for (uint32_t i = 2; c->steady && i < log->n; i++)
        if (log->gather[i] != log->gather[1] || log->grad[i] != log->grad[1])
            found(v, STEP_TRACES, "steps 2 and %u have other places", i + 1);
    if (c->gathers != 0 && o->result[0].stats.gathers != c->gathers)
        found(v, STEP_MEMORY, "%llu units gathered, expected %llu", (unsigned long long)o->result[0].stats.gathers,
              (unsigned long long)c->gathers);
}

static void judge_numbers(const toy_result *a, const toy_result *b, const char *what, verdict *v)
{
    for (uint32_t i = 0; i < TOY_STEPS; i++)
        if (memcmp(&a->loss[i], &b->loss[i], sizeof a->loss[i]) != 0) {
            found(v, STEP_NUMBERS, "loss of step %u is %a, %s %a", i + 1, (double)a->loss[i], what, (double)b->loss[i]);
            return;
        }
    for (uint64_t i = 0; a->master != NULL && b->master != NULL && i < b->n_master; i++)
        if (memcmp(&a->master[i], &b->master[i], sizeof(float)) != 0) {
            found(v, STEP_NUMBERS, "element %llu is %a, %s %a", (unsigned long long)i, (double)a->master[i], what,
                  (double)b->master[i]);
            return;
        }
    if (b->hash != 0 && a->hash != b->hash) found(v, STEP_NUMBERS, "the parameters are not the same as %s", what);
}

/* What two runs say together. */
static void judge_pair(const step_case *c, const outcome *a, const outcome *b, const char *what, verdict *v)
{
    char text[1024];
    judge_numbers(&a->result[0], &b->result[0], what, v);
    for (uint32_t r = 0; r < c->config.world; r++) {
        const toy_result *x = &a->result[r], *y = &b->result[r];
        if (x->tape != NULL && y->tape != NULL && !toy_tape_same(y->tape, x->tape, text, sizeof text))
            found(v, STEP_TAPE, "rank %u: %s %s", r, text, what);
        if (x->done.device_bytes_peak != y->done.device_bytes_peak)
            found(v, STEP_MEMORY, "rank %u: %llu bytes at most, %s %llu", r,
                  (unsigned long long)x->done.device_bytes_peak, what, (unsigned long long)y->done.device_bytes_peak);
        if (memcmp(a->run.log[r].gather, b->run.log[r].gather, sizeof a->run.log[r].gather) != 0 ||
            memcmp(a->run.log[r].grad, b->run.log[r].grad, sizeof a->run.log[r].grad) != 0)
            found(v, STEP_TRACES, "rank %u: places are not the same as %s", r, what);
    }
}

static void judge_training(const step_case *c, bool quick, verdict *v)
{
    toy_shape shape;
    toy_program program;
    toy_resolve(&c->config, &shape, &program);
    toy_results_free(plain.result, 1);
    toy_plain(&c->config, &shape, &program, NULL, plain.result);
    plain.result[0].hash = 0;
    if (c->config.optimizer != TOY_ADAMW) memset(plain.result[0].loss, 0, sizeof plain.result[0].loss); /* no report */
    judge_numbers(&in_order.result[0], plain.result, "in the plain loop", v);
    if (quick) return;
    toy_config config = c->config;
    if (!go(c, &config, &on_host)) found(v, STEP_CALL, "on the host backend: %s", on_host.result[0].error);
    else judge_pair(c, &in_order, &on_host, "on the host backend", v);
}

/* ---- A case ---- */

static bool say(const step_case *c, const step_options *options, uint64_t seed, const toy_config *config,
                const verdict *v, char *text, size_t text_bytes)
{
    toy_config again = *config;
    again.schedule = true;
    go(c, &again, &other); /* a run is a function of its seed */
    const char *schedule = other.result[0].schedule;
    char names[128] = "";
    for (int j = 0; j < STEP_JUDGES; j++)
        if (v->by[j]) snprintf(names + strlen(names), sizeof names - strlen(names), " %s", judges[j]);
    char which[32] = "this schedule";
    if (config->order.policy != EXPLORE_REPLAY) snprintf(which, sizeof which, "--seed %llu", (unsigned long long)seed);
    snprintf(text, text_bytes, "%s, %s: judges%s%s\n  again: %s --case %s --schedule '%s'", c->name, which, names,
             v->text, options->program, c->name, schedule != NULL ? schedule : "");
    return false;
}

static void count(const step_case *c, const outcome *o, step_total *total)
{
    total->n_runs++;
    total->n_steps += o->result[0].n_order_steps;
    for (uint32_t r = 0; r < c->config.world; r++) {
        const step_log *log = &o->run.log[r];
        total->n_records += o->result[r].n_records;
        total->n_refused += log->n_refused;
        total->n_fragmented += log->n_fragmented;
        total->n_evicted += log->n_evicted;
        total->n_aborted += log->n_aborted;
        total->n_hooks += log->n_hooks;
    }
}

static bool try_one(const step_case *c, const toy_config *config, uint64_t seed, const step_options *options,
                    step_total *total, char *text, size_t text_bytes)
{
    verdict v = {{false}, ""};
    bool good = go(c, config, &other);
    judge_alone(c, &other, good, &v);
    if (good) judge_pair(c, &other, &in_order, "in order", &v);
    count(c, &other, total);
    return v.text[0] == '\0' || say(c, options, seed, config, &v, text, text_bytes);
}

bool step_try(const step_case *c, uint64_t first, uint32_t n, const step_options *options, step_total *total,
              char *text, size_t text_bytes)
{
    toy_config config = c->config;
    verdict v = {{false}, ""};
    text[0] = '\0';
    config.explored = true;
    config.order = step_order(0, 1, 0);
    bool good = go(c, &config, &in_order);
    judge_alone(c, &in_order, good, &v);
    if (good && c->training) judge_training(c, options->quick, &v);
    count(c, &in_order, total);
    total->n_cases++;
    if (v.text[0] != '\0') return say(c, options, 0, &config, &v, text, text_bytes);
    if (options->schedule != NULL) {
        config.order = (explore_config){.policy = EXPLORE_REPLAY, .schedule = options->schedule};
        return try_one(c, &config, 0, options, total, text, text_bytes);
    }
    uint32_t n_streams = config.world * (3 + 2); /* lanes, and the toy's two */
    for (uint32_t i = 0; i < n; i++) {
        config.order = step_order(first + i, n_streams, in_order.result[0].n_order_steps);
        if (!try_one(c, &config, first + i, options, total, text, text_bytes)) return false;
    }
    return true;
}

bool step_replays(const step_case *c, uint64_t seed)
{
    toy_config config = c->config;
    config.explored = config.schedule = true;
    config.order = step_order(seed, config.world * 5, 4000);
    if (!go(c, &config, &other)) return false;
    const toy_result *r = &other.result[0];
    uint64_t hash = r->order_hash, n = r->n_order_steps;
    char *schedule = strdup(r->schedule);
    bool same = schedule != NULL && go(c, &config, &other) && r->order_hash == hash && r->n_order_steps == n;
    config.order = (explore_config){.policy = EXPLORE_REPLAY, .schedule = schedule};
    same = same && go(c, &config, &other) && r->order_hash == hash && r->n_order_steps == n;
    free(schedule);
    return same;
}

const step_log *step_last(void) { return &in_order.run.log[0]; }

/* ---- The command line ---- */

static const char usage[] = "[--quick | --long] [--list] [--case NAME [--seed N | --schedule S]]\n"
                            "  --quick       a part that takes a second or two, and still sees every planted bug\n"
                            "  --long        the whole matrix, many schedules\n"
                            "  --list        names of cases\n"
                            "  --case NAME   this one only\n"
                            "  --seed N      … in the order of this seed only\n"
                            "  --schedule S  … in this order only, as a failure printed it\n";

bool step_options_read(step_options *options, int argc, char **argv)
{
    *options = (step_options){.program = argv[0]};
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        bool is_seed = strcmp(argv[i], "--seed") == 0, is_case = strcmp(argv[i], "--case") == 0;
        if (strcmp(argv[i], "--quick") == 0) options->quick = true;
        else if (strcmp(argv[i], "--long") == 0) options->is_long = true;
        else if (strcmp(argv[i], "--list") == 0) options->list = true;
        else if (value != NULL && is_case) options->name = value, i++;
        else if (value != NULL && is_seed) options->has_seed = true, options->seed = strtoull(value, NULL, 0), i++;
        else if (value != NULL && strcmp(argv[i], "--schedule") == 0) options->schedule = value, i++;
        else {
            fprintf(stderr, "%s %s", argv[0], usage);
            return false;
        }
    }
    return true;
}
