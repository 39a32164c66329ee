/* SPDX-License-Identifier: MIT */
/* See errors.h. */
#include "errors.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"

/* ---- Host memory ---- */

static void *metered_alloc(void *arg, size_t bytes, size_t alignment)
{
    meter *m = arg;
    pthread_mutex_lock(&m->lock);
    m->n_allocs++;
    bool fails = m->until_failure >= 0 && m->until_failure-- == 0;
    if (fails && m->for_good) m->until_failure = 0;
    if (fails) m->failed = true;
    else m->live_bytes += (int64_t)bytes;
    pthread_mutex_unlock(&m->lock);
    return fails ? NULL : aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}

static void metered_free(void *arg, void *ptr, size_t bytes, size_t alignment)
{
    meter *m = arg;
    (void)alignment;
    memset(ptr, 0x5a, bytes); /* what is used after it shows */
    pthread_mutex_lock(&m->lock);
    m->live_bytes -= (int64_t)bytes;
    pthread_mutex_unlock(&m->lock);
    free(ptr);
}

void meter_init(meter *m)
{
    *m = (meter){.until_failure = -1};
    pthread_mutex_init(&m->lock, NULL);
}

void meter_fail_after(meter *m, int64_t n, bool for_good)
{
    pthread_mutex_lock(&m->lock);
    m->until_failure = n;
    m->for_good = for_good;
    m->failed = false;
    pthread_mutex_unlock(&m->lock);
}

fsdp_host_allocator meter_host(meter *m) { return (fsdp_host_allocator){metered_alloc, metered_free, m, NULL}; }

/* ---- Recipe ---- */

recipe recipe_default(void)
{
    static const char *const units[UNITS] = {"h.0", "h.1", "h.2", "h.3"};
    static const char *const params[UNITS][PARAMS] = {
        {"h.0.w", "h.0.b"}, {"h.1.w", "h.1.b"}, {"h.2.w", "h.2.b"}, {"h.3.w", "h.3.b"}};
    recipe c = {.model = FSDP_MODEL_CONFIG_INIT, .adamw = FSDP_ADAMW_CONFIG_INIT, .n_units = UNITS};
    for (uint32_t u = 0; u < UNITS; u++) {
        c.unit[u] = (fsdp_unit_config)FSDP_UNIT_CONFIG_INIT;
        c.unit_name[u] = units[u];
        c.order[u] = u;
        for (uint32_t p = 0; p < PARAMS; p++) {
            c.param[u][p] = (fsdp_param_config)FSDP_PARAM_CONFIG_INIT;
            c.param_name[u][p] = params[u][p];
            c.n_dims[u][p] = p == 0 ? 2 : 1;
            c.dims[u][p][0] = p == 0 ? 40 : 7;
            c.dims[u][p][1] = 7;
        }
    }
    c.unit[0].reshard = FSDP_RESHARD_NEVER;
    return c;
}

/* ---- Ranks ---- */

rank rank_default(void)
{
    rank r = {.world = 1, .timeout_ns = 10 * second_ns, .recipe = recipe_default()};
    return r;
}

void rank_failed(rank *r, const char *file, int line, const char *condition)
{
    if (r->failed[0] != 0) return;
    snprintf(r->failed, sizeof r->failed, "%s:%d: rank %u: %s (%.300s)", file, line, r->number, condition,
             fsdp_last_error());
    fprintf(stderr, "%s\n", r->failed); /* now: the other ranks may wait for this one until the alarm */
    if (r->meet != NULL) meeting_break(r->meet);
}

void rank_keep(rank *r, fsdp_status status)
{
    r->status = status;
    snprintf(r->said, sizeof r->said, "%s", status == FSDP_OK ? "" : fsdp_last_error());
}

bool ranks_are_processes;

/* What went wrong, or NULL. */
static const char *failure_of(const rank *ranks, uint32_t world)
{
    for (uint32_t i = 0; i < world; i++)
        if (ranks[i].failed[0] != 0) return ranks[i].failed;
    return NULL;
}

typedef struct job {
    rank *r;
    rank_body body;
} job;

static void *run_one(void *arg)
{
    job *j = arg;
    j->body(j->r);
    return NULL;
}

static void run_as_threads(rank *ranks, uint32_t world, rank_body body)
{
    pthread_t thread[MAX_RANKS];
    job jobs[MAX_RANKS];
    meeting meet;
    fsdp_local *local = NULL;
    OK(fsdp_local_create(world, NULL, &local));
    meeting_init(&meet, world);
    for (uint32_t i = 0; i < world; i++) {
        ranks[i].local = local, ranks[i].meet = &meet;
        jobs[i] = (job){&ranks[i], body};
        assert_int_equal(pthread_create(&thread[i], NULL, run_one, &jobs[i]), 0);
    }
    for (uint32_t i = 0; i < world; i++) pthread_join(thread[i], NULL);
    fsdp_local_destroy(local);
}

/* The ranks of all processes, in shared memory. */
typedef struct company {
    meeting meet;
    rank_body body;
    rank rank[MAX_RANKS];
} company;

static bool run_process(uint32_t number, void *arg)
{
    company *c = arg;
    c->body(&c->rank[number]);
    return c->rank[number].failed[0] == 0;
}

static void run_as_processes(rank *ranks, uint32_t world, rank_body body)
{
    company *c = processes_shared(sizeof *c);
    fsdp_launch launch = processes_launch(PROCESSES_BY_NAME);
    launch.world = launch.local_world = world;
    meeting_init(&c->meet, world);
    c->body = body;
    for (uint32_t i = 0; i < world; i++) {
        launch.rank = launch.local_rank = i;
        ranks[i].launch = launch, ranks[i].meet = &c->meet;
        c->rank[i] = ranks[i];
    }
    const char *failure = processes_run(world, 50 * second_ns, run_process, c);
    memcpy(ranks, c->rank, world * sizeof *ranks);
    processes_unshare(c, sizeof *c);
    if (failure != NULL && failure_of(ranks, world) == NULL) fail_msg("%s", failure);
}

void run_ranks(rank *ranks, uint32_t world, rank_body body)
{
    assert_true(world <= MAX_RANKS);
    for (uint32_t i = 0; i < world; i++) ranks[i].number = i, ranks[i].world = world;
    (ranks_are_processes ? run_as_processes : run_as_threads)(ranks, world, body);
    const char *failure = failure_of(ranks, world);
    if (failure != NULL) fail_msg("%s", failure);
}

/* ---- From context to values ---- */

fsdp_status open_context(rank *r)
{
    fsdp_host_config host = FSDP_HOST_CONFIG_INIT;
    host.local = r->local;
    host.rank = r->local != NULL ? r->number : 0;
    if (r->launch.size > 0) host.launch = &r->launch;
    fsdp_config config = FSDP_CONFIG_INIT;
    config.backend = r->backend;
    config.backend_config = &host;
    config.timeout_ns = r->timeout_ns;
    config.debug = r->debug;
    if (r->meter != NULL) config.host = meter_host(r->meter);
    if (r->ctx == NULL) FSDP_TRY(fsdp_context_create(&config, &r->ctx));
    return r->s == NULL ? fsdp_stream_create(r->ctx, "compute", &r->s) : FSDP_OK;
}

static fsdp_status add_extra_pass(rank *r)
{
    const recipe *c = &r->recipe;
    fsdp_visit visits[8];
    for (uint32_t i = 0; i < c->extra_visits; i++)
        visits[i] = (fsdp_visit){r->unit[c->order[i % c->n_units]], c->extra_use, (int32_t)i};
    return c->extra_visits > 0 ? fsdp_model_add_pass(r->model, "extra", c->extra_visits, visits, &r->extra_pass)
                               : FSDP_OK;
}

/* Goes on where it failed. */
fsdp_status register_model(rank *r)
{
    const recipe *c = &r->recipe;
    if (r->model == NULL) FSDP_TRY(fsdp_model_create(r->ctx, &c->model, &r->model));
    for (uint32_t i = 0; i < c->n_units; i++) {
        uint32_t u = c->order[i];
        if (r->unit[u] == NULL) FSDP_TRY(fsdp_model_add_unit(r->model, c->unit_name[u], &c->unit[u], &r->unit[u]));
        for (uint32_t p = 0; p < PARAMS; p++)
            if (c->param_name[u][p] != NULL && r->param[u][p] == NULL)
                FSDP_TRY(fsdp_unit_add_param(r->unit[u], c->param_name[u][p], c->n_dims[u][p], c->dims[u][p],
                                             &c->param[u][p], &r->param[u][p]));
    }
    if (r->extra_pass == 0) FSDP_TRY(add_extra_pass(r));
    return c->no_adamw || r->opt != NULL ? FSDP_OK : fsdp_adamw_create(r->model, &c->adamw, &r->opt);
}

static int fill_range(void *arg, const fsdp_param_range *range, void *dst)
{
    (void)arg;
    float *value = dst;
    const char *name = fsdp_param_name(range->param);
    uint64_t first = (uint64_t)name[2] * 31 + (uint64_t)name[4];
    for (uint64_t i = 0; i < range->count; i++) value[i] = (float)((first + range->begin + i) % 13) * 0.125f - 0.7f;
    return 0;
}

fsdp_status fill_model(rank *r) { return fsdp_model_fill(r->model, fill_range, NULL, FSDP_DTYPE_FP32); }

fsdp_status open_all(rank *r)
{
    FSDP_TRY(open_context(r));
    FSDP_TRY(register_model(r));
    FSDP_TRY(fsdp_model_seal(r->model));
    return fill_model(r);
}

void close_model(rank *r)
{
    EXPECT_OK(r, fsdp_model_destroy(r->model));
    r->model = NULL, r->opt = NULL, r->extra_pass = 0;
    memset(r->unit, 0, sizeof r->unit);
    memset(r->param, 0, sizeof r->param);
}

void close_all(rank *r)
{
    close_model(r);
    EXPECT_OK(r, fsdp_stream_release(r->s));
    EXPECT_OK(r, fsdp_context_destroy(r->ctx));
    r->s = NULL, r->ctx = NULL;
}

/* ---- Steps ---- */

static void run_kernel(void *arg)
{
    const kernel *k = arg;
    enum { N = 280 }; /* of the weight */
    if (k->grads == NULL) return;
    for (int i = 0; i < N; i++) k->grads[i] += k->params[i] * k->factor + 0.01f;
}

fsdp_status compute(rank *r, const fsdp_view *view, float factor)
{
    kernel *k = &r->kernel[r->n_kernels++ % MAX_KERNELS];
    *k = (kernel){view->params[0], view->grads != NULL ? view->grads[0] : NULL, factor};
    return fsdp_stream_host_call(r->s, run_kernel, k);
}

/* What a micro-step calls, in order, and the unit it is for. */
typedef enum call_kind { PASS_BEGIN, FORWARD_BEGIN, FORWARD_END, BACKWARD_BEGIN, BACKWARD_END, PASS_END } call_kind;
typedef struct call {
    call_kind kind;
    uint32_t unit;
} call;

static const call calls[] = {{PASS_BEGIN, 0},     {FORWARD_BEGIN, 0},  {FORWARD_BEGIN, 1},  {FORWARD_END, 1},
                             {FORWARD_BEGIN, 2},  {FORWARD_END, 2},    {FORWARD_BEGIN, 3},  {FORWARD_END, 3},
                             {FORWARD_END, 0},    {BACKWARD_BEGIN, 0}, {BACKWARD_BEGIN, 3}, {BACKWARD_END, 3},
                             {BACKWARD_BEGIN, 2}, {BACKWARD_END, 2},   {BACKWARD_BEGIN, 1}, {BACKWARD_END, 1},
                             {BACKWARD_END, 0},   {PASS_END, 0}};

static fsdp_status make_call(rank *r, const call *c, uint32_t index, uint32_t count)
{
    fsdp_unit *unit = r->unit[c->unit];
    fsdp_view view = FSDP_VIEW_INIT;
    fsdp_pass_args args = FSDP_PASS_ARGS_INIT;
    args.index = index, args.count = count;
    switch (c->kind) {
    case PASS_BEGIN: return fsdp_pass_begin(r->model, &args, r->s);
    case FORWARD_BEGIN: FSDP_TRY(fsdp_forward_begin(unit, r->s, &view)); return compute(r, &view, 0.0f);
    case FORWARD_END: return fsdp_forward_end(unit, r->s);
    case BACKWARD_BEGIN:
        FSDP_TRY(fsdp_backward_begin(unit, r->s, &view));
        return compute(r, &view, 0.5f + (float)c->unit + (float)r->number);
    case BACKWARD_END: return fsdp_backward_end(unit, r->s);
    case PASS_END: return fsdp_pass_end(r->model, r->s);
    }
    return FSDP_OK;
}

fsdp_status micro_step(rank *r, uint32_t index, uint32_t count, between at)
{
    uint32_t n = sizeof calls / sizeof *calls;
    for (uint32_t i = 0; i < n; i++) {
        if (at != NULL) at(r, i);
        FSDP_TRY(make_call(r, &calls[i], index, count));
    }
    if (at != NULL) at(r, n);
    return FSDP_OK;
}

fsdp_status update(rank *r)
{
    fsdp_adamw_args args = FSDP_ADAMW_ARGS_INIT;
    args.max_norm = 1.0f;
    return fsdp_adamw_step(r->opt, &args, r->s);
}

fsdp_status train_step(rank *r)
{
    FSDP_TRY(micro_step(r, 0, 1, NULL));
    return update(r);
}

fsdp_status hash_model(rank *r, uint64_t *out_hash)
{
    FSDP_TRY(fsdp_stream_drain_host(r->s, 10 * second_ns));
    return fsdp_model_hash(r->model, out_hash);
}

/* ---- Saying ---- */

void assert_refused(fsdp_status got, fsdp_status status, const char *fragment, const char *file, int line)
{
    if (got != status)
        fail_msg("%s:%d: %s, expected %s (%s)", file, line, fsdp_status_name(got), fsdp_status_name(status),
                 fsdp_last_error());
    if (strstr(fsdp_last_error(), fragment) == NULL)
        fail_msg("%s:%d: '%s' is not in: %s", file, line, fragment, fsdp_last_error());
}

void assert_kept(const rank *r, fsdp_status status, const char *fragment)
{
    if (r->status != status)
        fail_msg("rank %u: %s, expected %s (%s)", r->number, fsdp_status_name(r->status), fsdp_status_name(status),
                 r->said);
    if (strstr(r->said, fragment) == NULL) fail_msg("rank %u: '%s' is not in: %s", r->number, fragment, r->said);
}

void assert_ok(fsdp_status got, const char *file, int line)
{
    if (got != FSDP_OK) fail_msg("%s:%d: %s: %s", file, line, fsdp_status_name(got), fsdp_last_error());
}

int errors_deadline(void **state)
{
    (void)state;
    alarm(ERRORS_REDUCED ? 300 : 60);
    return 0;
}
