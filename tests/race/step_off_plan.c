/* SPDX-License-Identifier: MIT */
/* Random programs of hooks: units in any order and number, nested, on two streams, some given up. A hook may fail only for
 * memory, only if the unit fits nowhere beside what the caller holds open (and held units), and must then name it; once
 * enough is closed, the same hook succeeds. What kernels see is the shards' values, to the bit; what the optimizer sees is
 * the sum of what kernels added. */
#include <stdio.h>
#include <string.h>

#include "convert.h"
#include "hash.h"
#include "step_pool.h"

enum { MOST_OPEN = 12, MOST_JOBS = 2048, MOVES = 16 };

/* A kernel: compares parameters with what they must be, or adds to gradients. */
typedef struct look_job {
    const toy_shape *shape;
    uint32_t unit;
    const float *expected; /* of the unit's first parameter on; NULL: add */
    float value;
    step_log *log;
    void *p[TOY_PARAMS], *g[TOY_PARAMS];
} look_job;

typedef struct window {
    uint32_t unit;
    bool backward;
} window;

typedef struct program {
    toy *t;
    step_log *log;
    step_pools pools;
    uint64_t random;
    window open[MOST_OPEN];
    uint32_t n_open, micro, n_jobs, adds[TOY_UNITS];
    fsdp_stream *stream[TOY_UNITS]; /* of the unit's windows */
    bool shared[TOY_UNITS];         /* the other stream is in them, too */
    bool train, reduced[TOY_UNITS], aborted;
    float *now; /* all masters, in registration order */
    look_job *jobs;
    void *p[TOY_UNITS][TOY_PARAMS], *g[TOY_UNITS][TOY_PARAMS];
} program;

static uint32_t draw(program *o, uint32_t n) { return (uint32_t)(fsdp__mix(o->random++) >> 33) % n; }

/* ---- Kernels ---- */

static void note_wrong(const look_job *job, uint32_t i, uint64_t k, float value, float expected)
{
    if (job->log->n_wrong++ > 0) return;
    snprintf(job->log->wrong, sizeof job->log->wrong, "%s[%llu] is %a, and is %a in its shard",
             job->shape->unit[job->unit].param[i].name, (unsigned long long)k, (double)value, (double)expected);
}

static void run_look(void *arg)
{
    const look_job *job = arg;
    const toy_unit *unit = &job->shape->unit[job->unit];
    const float *at = job->expected;
    for (uint32_t i = 0; i < unit->n_params; i++) {
        const toy_param *param = &unit->param[i];
        for (uint64_t k = 0; k < param->elems; k++) {
            if (at == NULL) {
                if (job->g[i] != NULL) ((float *)job->g[i])[k] += job->value;
                continue;
            }
            char rounded[sizeof(float)];
            float value, expected = *at++;
            size_t each = fsdp_dtype_bytes(param->compute);
            fsdp__store_floats(rounded, &expected, 1, param->compute);
            fsdp__load_floats(&expected, rounded, 1, param->compute);
            fsdp__load_floats(&value, (const char *)job->p[i] + k * each, 1, param->compute);
            if (fsdp__float_bits(value) != fsdp__float_bits(expected)) note_wrong(job, i, k, value, expected);
        }
    }
}

static const float *first_of(const toy *t, const float *all, uint32_t unit)
{
    for (uint32_t u = 0; u < unit; u++)
        for (uint32_t i = 0; i < t->shape.unit[u].n_params; i++) all += t->shape.unit[u].param[i].elems;
    return all;
}

static float share(uint32_t unit, uint32_t rank) { return (float)((rank + 1) * (unit + 1)) * 0.25f; }

static fsdp_status give_kernel(program *o, uint32_t u, fsdp_stream *s, bool add)
{
    toy *t = o->t;
    const toy_unit *unit = &t->shape.unit[u];
    TOY_CHECK(o->n_jobs < MOST_JOBS);
    look_job *job = &o->jobs[o->n_jobs++];
    *job = (look_job){&t->shape, u, add ? NULL : first_of(t, o->now, u), share(u, t->rank), o->log, {NULL}, {NULL}};
    memcpy(job->p, o->p[u], sizeof job->p);
    memcpy(job->g, o->g[u], sizeof job->g);
    TOY_TRY(fsdp_stream_host_call(s, run_look, job));
    for (uint32_t i = 0; i < unit->n_params; i++) {
        uint64_t bytes = unit->param[i].elems * fsdp_dtype_bytes(add ? unit->grad : unit->param[i].compute);
        TOY_TRY(toy_touch(t, s, add ? job->g[i] : job->p[i], bytes, add));
    }
    o->adds[u] += add;
    return FSDP_OK;
}

/* The other stream reads the unit, too: behind this one, and this one goes on behind it. */
static fsdp_status share_window(program *o, uint32_t u)
{
    toy *t = o->t;
    fsdp_stream *s = o->stream[u], *second = s == t->s ? t->second : t->s;
    TOY_TRY(fsdp_stream_wait_stream(second, s));
    TOY_TRY(fsdp_unit_use(t->unit[u], second));
    fsdp_status status = give_kernel(o, u, second, false);
    if (status != FSDP_OK) return status;
    TOY_TRY(fsdp_stream_wait_stream(s, second));
    o->shared[u] = true;
    return FSDP_OK;
}

/* ---- Hooks ---- */

static fsdp_status hook(program *o, window w, fsdp_stream *s)
{
    toy *t = o->t;
    fsdp_view view = FSDP_VIEW_INIT;
    uint32_t before = o->pools.at;
    o->pools.at = step_pools_advance(&o->pools, w.unit, w.backward);
    fsdp_status status =
        w.backward ? fsdp_backward_begin(t->unit[w.unit], s, &view) : fsdp_forward_begin(t->unit[w.unit], s, &view);
    o->log->n_hooks++;
    fsdp_status looked = step_pools_look(&o->pools, w.unit);
    if (looked != FSDP_OK) return looked;
    if (status == FSDP_ERR_NO_MEMORY) o->pools.at = before;
    if (status != FSDP_OK) return status;
    memcpy(o->p[w.unit], view.params, view.n_params * sizeof *view.params);
    if (view.grads != NULL) memcpy(o->g[w.unit], view.grads, view.n_params * sizeof *view.grads);
    o->pools.n_open[w.unit][w.backward]++;
    o->stream[w.unit] = s;
    o->open[o->n_open++] = w;
    return FSDP_OK;
}

static fsdp_status close_one(program *o, uint32_t at)
{
    toy *t = o->t;
    window w = o->open[at];
    uint32_t u = w.unit, *n = o->pools.n_open[u];
    fsdp_stream *s = o->stream[u];
    if (o->shared[u]) TOY_TRY(fsdp_stream_wait_stream(s == t->s ? t->second : t->s, s));
    if (w.backward) TOY_TRY(fsdp_backward_end(t->unit[u], s));
    else TOY_TRY(fsdp_forward_end(t->unit[u], s));
    n[w.backward]--;
    bool keeps = t->config->accumulation == FSDP_ACCUMULATE_KEEP_FULL && o->micro + 1 < t->config->micro_steps;
    if (w.backward && n[1] == 0 && !keeps) o->reduced[u] = true;
    if (n[0] + n[1] == 0) o->shared[u] = false;
    o->open[at] = o->open[--o->n_open];
    return step_pools_look(&o->pools, UINT32_MAX);
}

/* It fits nowhere in the pool that the sentence is about; the sentence names who is in the way. */
static fsdp_status check_refusal(program *o, window w, const char *sentence)
{
    toy *t = o->t;
    bool grad = strstr(sentence, "gradient bytes") != NULL;
    const step_pool *pool = grad ? &o->pools.grad : &o->pools.full;
    uint64_t free;
    TOY_CHECK(w.backward || !grad);
    TOY_CHECK(!step_pool_fits(&o->pools, pool, w.unit, &free));
    TOY_CHECK(strstr(sentence, t->shape.unit[w.unit].name) != NULL);
    for (uint32_t i = 0; i < o->n_open; i++)
        if (pool->block[o->open[i].unit].live && (!grad || o->open[i].backward))
            TOY_CHECK(strstr(sentence, t->shape.unit[o->open[i].unit].name) != NULL);
    o->log->n_refused++;
    o->log->n_fragmented += free >= pool->each[w.unit];
    return FSDP_OK;
}

static bool fits(const program *o, window w)
{
    const step_pools *p = &o->pools;
    bool there = p->n_open[w.unit][0] + p->n_open[w.unit][1] > 0 ||
                 (o->t->shape.unit[w.unit].held && p->full.block[w.unit].live);
    if (!there && !step_pool_fits(p, &p->full, w.unit, NULL)) return false;
    return !w.backward || p->grad.block[w.unit].live || step_pool_fits(p, &p->grad, w.unit, NULL);
}

/* Open it; while it is refused, close something. */
static fsdp_status open_one(program *o, window w)
{
    toy *t = o->t;
    bool open = o->pools.n_open[w.unit][0] + o->pools.n_open[w.unit][1] > 0;
    fsdp_stream *s = open ? o->stream[w.unit] : draw(o, 4) == 0 ? t->second : t->s;
    for (;;) {
        bool fit = fits(o, w);
        fsdp_status status = hook(o, w, s);
        if (status == FSDP_OK) break;
        char sentence[2048];
        snprintf(sentence, sizeof sentence, "%s", fsdp_last_error());
        if (status != FSDP_ERR_NO_MEMORY || fit)
            return toy_fail(t, status, __FILE__, __LINE__, fit ? "a hook whose unit fits" : "a hook", sentence);
        status = check_refusal(o, w, sentence);
        if (status != FSDP_OK) return status;
        TOY_CHECK(o->n_open > 0);
        status = close_one(o, draw(o, o->n_open));
        if (status != FSDP_OK) return status;
        if (w.backward && o->reduced[w.unit] && t->config->accumulation != FSDP_ACCUMULATE_REDUCE_EACH) return FSDP_OK;
    }
    fsdp_status status = FSDP_OK;
    if (o->shared[w.unit]) status = share_window(o, w.unit);
    if (status == FSDP_OK) status = give_kernel(o, w.unit, s, false);
    if (status == FSDP_OK && w.backward) status = give_kernel(o, w.unit, s, true);
    return status;
}

/* A unit's second reduction in a step is refused where no pass announces it. */
static bool may_open(const program *o, window w)
{
    if (o->n_open == MOST_OPEN || (w.backward && !o->train)) return false;
    return !w.backward || !o->reduced[w.unit] || o->pools.n_open[w.unit][1] > 0 ||
           o->t->config->accumulation == FSDP_ACCUMULATE_REDUCE_EACH;
}

static fsdp_status abort_pass(program *o)
{
    toy *t = o->t;
    TOY_TRY(fsdp_pass_abort(t->model, t->s));
    o->n_open = o->micro = 0;
    memset(o->pools.n_open, 0, sizeof o->pools.n_open);
    memset(o->shared, 0, sizeof o->shared);
    memset(o->reduced, 0, sizeof o->reduced);
    memset(o->adds, 0, sizeof o->adds);
    o->aborted = true;
    o->log->n_aborted++;
    return step_pools_look(&o->pools, UINT32_MAX);
}

static fsdp_status move(program *o)
{
    const step_pools *p = &o->pools;
    uint32_t what = draw(o, 100);
    if (what < 30 && p->at < p->n_pass) {
        window next = {p->visit[p->at].unit, p->visit[p->at].backward};
        return may_open(o, next) ? open_one(o, next) : FSDP_OK;
    }
    if (what < 58) {
        window any = {draw(o, o->t->shape.n_units), o->train && draw(o, 3) == 0};
        return may_open(o, any) ? open_one(o, any) : FSDP_OK;
    }
    if (what >= 98 && o->log->n_aborted < 6) return abort_pass(o);
    if (o->n_open == 0) return FSDP_OK;
    uint32_t at = draw(o, o->n_open), u = o->open[at].unit;
    if (what < 85) return close_one(o, at);
    if (what < 92) return share_window(o, u);
    return give_kernel(o, u, o->stream[u], false);
}

/* As a rank that prints does, and the others do not: its host waits for what the others' hosts run past. Nothing that ranks
 * have in common may depend on it. */
static fsdp_status log_a_loss(program *o, uint32_t what)
{
    toy *t = o->t;
    if (t->rank != 0 || what > 1) return FSDP_OK;
    return fsdp_stream_drain_host(what == 0 ? t->s : t->second, toy_timeout_ns);
}

/* ---- Steps ---- */

static fsdp_status run_pass(program *o, bool train)
{
    static const int32_t nexts[] = {FSDP_PASS_NONE, FSDP_PASS_TRAIN, FSDP_PASS_EVAL, FSDP_PASS_TRAIN};
    toy *t = o->t;
    fsdp_pass_args args = FSDP_PASS_ARGS_INIT;
    args.pass = train ? FSDP_PASS_TRAIN : FSDP_PASS_EVAL;
    args.index = train ? o->micro : 0;
    args.count = train ? t->config->micro_steps : 1;
    args.next = nexts[draw(o, 4)];
    bool last = args.index + 1 == args.count;
    o->train = train;
    step_pools_pass(&o->pools, train, !last ? args.pass : train ? FSDP_PASS_NONE : args.next);
    TOY_TRY(fsdp_pass_begin(t->model, &args, t->s));
    fsdp_status status = step_pools_look(&o->pools, UINT32_MAX);
    for (uint32_t i = 0; i < MOVES && status == FSDP_OK && !o->aborted; i++) {
        status = move(o);
        if (status == FSDP_OK) status = log_a_loss(o, draw(o, 12));
    }
    if (status != FSDP_OK || o->aborted) return status;
    while (o->n_open > 0 && status == FSDP_OK) status = close_one(o, draw(o, o->n_open));
    if (status != FSDP_OK) return status;
    TOY_TRY(fsdp_pass_end(t->model, t->s));
    return step_pools_look(&o->pools, UINT32_MAX);
}

/* The next step's masters: by plain SGD on the sum over ranks; every number here is exact but the last subtraction. */
static fsdp_status expect_update(program *o)
{
    toy *t = o->t;
    float *next = step_keep(t, t->result->n_master * sizeof *next), *to = next;
    const float *from = o->now;
    TOY_CHECK(next != NULL);
    for (uint32_t u = 0; u < t->shape.n_units; u++) {
        float sum = 0.0f;
        for (uint32_t r = 0; r < t->config->world; r++) sum += share(u, r) * (float)o->adds[u];
        for (uint32_t i = 0; i < t->shape.unit[u].n_params; i++) {
            const toy_param *param = &t->shape.unit[u].param[i];
            float step = param->frozen ? 0.0f : t->config->lr * param->lr_scale * sum;
            for (uint64_t k = 0; k < param->elems; k++) *to++ = *from++ - step;
        }
        o->adds[u] = 0;
        o->reduced[u] = false;
    }
    o->now = next;
    return FSDP_OK;
}

static fsdp_status start(program *o, toy *t)
{
    step_run *run = t->arg;
    *o = (program){.t = t, .log = &run->log[t->rank], .random = fsdp__mix(run->c->number + 1)};
    float *at = o->now = step_keep(t, t->result->n_master * sizeof *o->now);
    o->jobs = step_keep(t, MOST_JOBS * sizeof *o->jobs);
    TOY_CHECK(o->now != NULL && o->jobs != NULL);
    for (uint32_t u = 0; u < t->shape.n_units; u++)
        for (uint32_t i = 0; i < t->shape.unit[u].n_params; i++)
            for (uint64_t k = 0; k < t->shape.unit[u].param[i].elems; k++) *at++ = toy_initial(&t->shape, u, i, k);
    step_pools_open(&o->pools, t);
    return step_pools_look(&o->pools, UINT32_MAX);
}

static fsdp_status finish(program *o)
{
    toy *t = o->t;
    float *last = step_keep(t, t->result->n_master * sizeof *last);
    TOY_CHECK(last != NULL);
    fsdp_status status = toy_values(t, FSDP_VALUE_MASTER, last);
    if (status != FSDP_OK) return status;
    for (uint64_t i = 0; i < t->result->n_master; i++)
        if (fsdp__float_bits(last[i]) != fsdp__float_bits(o->now[i]) && o->log->n_wrong++ == 0)
            snprintf(o->log->wrong, sizeof o->log->wrong, "element %llu ends as %a, and not %a", (unsigned long long)i,
                     (double)last[i], (double)o->now[i]);
    TOY_TRY(fsdp_stream_drain_host(t->s, toy_timeout_ns));
    TOY_TRY(fsdp_stream_drain_host(t->second, toy_timeout_ns));
    o->log->n_evicted = o->pools.n_evicted;
    return toy_finish(t);
}

static fsdp_status play(toy *t)
{
    program o;
    fsdp_status status = start(&o, t);
    while (status == FSDP_OK && t->n_updates < t->config->steps) {
        if (draw(&o, 4) == 0) status = run_pass(&o, false);
        o.aborted = false;
        for (o.micro = 0; status == FSDP_OK && o.micro < t->config->micro_steps; o.micro++) {
            status = run_pass(&o, true);
            if (o.aborted) o.aborted = false, o.micro = UINT32_MAX; /* begin again with 0 */
        }
        if (status == FSDP_OK) status = expect_update(&o);
        if (status == FSDP_OK) status = toy_update(t);
        if (status == FSDP_OK) status = step_pools_look(&o.pools, UINT32_MAX);
        if (status == FSDP_OK) status = step_log_traces(t);
    }
    return status == FSDP_OK ? finish(&o) : status;
}

void step_off_plan(uint64_t number, step_case *out)
{
    *out = (step_case){.config = toy_config_default(), .script = play, .number = number};
    toy_config *c = &out->config;
    uint64_t bits = fsdp__mix(number);
    c->world = 1 + (uint32_t)(number % STEP_RANKS);
    c->depth = (uint32_t)(number / STEP_RANKS % 5);
    c->accumulation = (fsdp_accumulation)(bits % 3);
    c->micro_steps = c->accumulation == FSDP_ACCUMULATE_NONE ? 1 : 2;
    c->grad_buffers = 1 + (uint32_t)(bits / 3 % 2);
    c->prefetch_bytes = bits / 6 % 4 == 0 ? 8192 : 0;
    c->debug = bits / 24 % 2 ? FSDP_DEBUG_POISON : 0;
    c->shape.tied = bits / 48 % 2;
    c->shape.square = bits / 96 % 2;
    c->shape.mixed = bits / 192 % 2;
    c->shape.frozen_layer = bits / 384 % 2;
    if (c->world == 1 || bits / 768 % 2)
        c->shape.compute = FSDP_DTYPE_BF16; /* alone, what is fp32 is the shard itself */
    c->optimizer = TOY_OWN_SGD;
    c->lr = 0.015625f;
    c->trace = c->touch = c->tape = c->values = true;
    snprintf(out->name, sizeof out->name, "off-plan-%llu", (unsigned long long)number);
}
