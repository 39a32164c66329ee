/* SPDX-License-Identifier: MIT */
#include "pool_run.h"

#include <stdlib.h>
#include <string.h>

#include "check.h"

enum { COMPUTE_NS = 1000, REDUCE_NS = 1000000, MAX_RECORDS = 1 << 15, NEAR = 6 };

typedef struct rig {
    const pool_case *c;
    fsdp_context *ctx;
    fsdp_stream *s, *reduce;
    fsdp_trace *tape;
    shapes_model m;
    uint64_t bytes[POOL_N_KINDS][SHAPES_MAX_UNITS]; /* of a unit's buffer, by the tape */
} rig;

static uint32_t n_micro_steps(const pool_case *c) { return c->accumulation == FSDP_ACCUMULATE_NONE ? 1 : 2; }

/* ---- The run ---- */

static fsdp_status open_rig(rig *g)
{
    const pool_case *c = g->c;
    fsdp_sim_config sim = FSDP_SIM_CONFIG_INIT;
    sim.world = c->world;
    fsdp_config config = FSDP_CONFIG_INIT;
    config.backend = fsdp_sim_backend();
    config.backend_config = &sim;
    config.reduce_comm = true; /* else a gather on demand would stand behind the reductions */
    FSDP_TRY(fsdp_context_create(&config, &g->ctx));
    FSDP_TRY(fsdp_stream_create(g->ctx, "compute", &g->s));
    g->reduce = fsdp_context_lane(g->ctx, FSDP_LANE_REDUCE);
    fsdp_model_config model = FSDP_MODEL_CONFIG_INIT;
    model.depth = c->depth;
    model.grad_buffers = c->grad_buffers;
    model.accumulation = c->accumulation;
    FSDP_TRY(shapes_declare(g->ctx, c->model, &c->options, &model, &g->m));
    FSDP_TRY(fsdp_model_seal(g->m.model));
    return fsdp_trace_start(g->ctx, MAX_RECORDS, &g->tape);
}

static fsdp_status close_rig(rig *g)
{
    if (g->ctx == NULL) return FSDP_OK;
    fsdp_trace_destroy(g->tape);
    FSDP_TRY(fsdp_model_destroy(g->m.model));
    FSDP_TRY(fsdp_stream_release(g->s));
    return fsdp_context_destroy(g->ctx);
}

static fsdp_status close_visit(const rig *g, const fsdp_visit *visit)
{
    if (visit->use != FSDP_USE_BACKWARD) return fsdp_forward_end(visit->unit, g->s);
    FSDP_TRY(fsdp_stream_delay(g->reduce, REDUCE_NS));
    return fsdp_backward_end(visit->unit, g->s);
}

static fsdp_status micro_step(const rig *g, uint32_t index)
{
    fsdp_pass_args args = FSDP_PASS_ARGS_INIT;
    args.pass = args.next = g->m.pass;
    args.index = index;
    args.count = n_micro_steps(g->c);
    fsdp_view view = FSDP_VIEW_INIT;
    FSDP_TRY(fsdp_pass_begin(g->m.model, &args, g->s));
    for (uint32_t i = 0; i < g->m.n_visits; i++) {
        const fsdp_visit *visit = &g->m.visit[i];
        if (visit->use == FSDP_USE_BACKWARD) FSDP_TRY(fsdp_backward_begin(visit->unit, g->s, &view));
        else FSDP_TRY(fsdp_forward_begin(visit->unit, g->s, &view));
        FSDP_TRY(fsdp_stream_delay(g->s, COMPUTE_NS));
        for (uint32_t k = i + 1; k-- > 0;)
            if (g->m.visit[k].until == (int32_t)i) FSDP_TRY(close_visit(g, &g->m.visit[k]));
    }
    FSDP_TRY(fsdp_pass_end(g->m.model, g->s));
    return fsdp_stream_wait_stream(g->s, g->reduce); /* so that no reduction reaches over the border */
}

static fsdp_status run_steps(rig *g, pool_result *out)
{
    fsdp_adamw_args args = FSDP_ADAMW_ARGS_INIT;
    uint32_t n_steps = n_micro_steps(g->c) == 1 ? 3 : 2;
    for (uint32_t step = 0; step < n_steps; step++) {
        for (uint32_t i = 0; i < n_micro_steps(g->c); i++) FSDP_TRY(micro_step(g, i));
        FSDP_TRY(fsdp_adamw_step(g->m.opt, &args, g->s));
    }
    FSDP_TRY(fsdp_trace_stop_host(g->tape));
    if (fsdp_trace_dropped(g->tape) > 0) return fsdp__fail(FSDP_ERR_STATE, "the tape is full");
    out->memory = (fsdp_memory)FSDP_MEMORY_INIT;
    out->stats = (fsdp_model_stats)FSDP_MODEL_STATS_INIT;
    out->counters = (fsdp_counters)FSDP_COUNTERS_INIT;
    FSDP_TRY(fsdp_model_memory(g->m.model, &out->memory));
    FSDP_TRY(fsdp_model_stats_get(g->m.model, &out->stats));
    out->reserved[POOL_GATHER] = out->memory.gather;
    out->reserved[POOL_GRAD] = out->memory.grad;
    return fsdp_context_counters(g->ctx, &out->counters);
}

/* ---- The tape ---- */

typedef struct reader {
    rig *g;
    pool_events *events;
    pool_kind kind;
    int64_t life[SHAPES_MAX_UNITS]; /* that the unit's buffer is in; -1: none */
    uint64_t last_use[SHAPES_MAX_UNITS];
    bool used[SHAPES_MAX_UNITS]; /* in this life */
    uint64_t begin, end;         /* addresses */
    bool in_update;
    fsdp_status status;
} reader;

static void emit(reader *r, pool_event_kind kind, uint64_t when, uint32_t life, uint64_t bytes)
{
    pool_events *e = r->events;
    if (e->n == e->capacity) {
        size_t capacity = e->capacity > 0 ? 2 * e->capacity : 1024;
        pool_event *event = realloc(e->event, capacity * sizeof *event);
        if (event == NULL) {
            r->status = fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "no host memory for the events of a pool");
            return;
        }
        e->event = event;
        e->capacity = capacity;
    }
    e->event[e->n] = (pool_event){when, (uint32_t)e->n, kind, life, bytes};
    e->n++;
}

static void begin_life(reader *r, uint32_t unit, uint64_t when, const fsdp_trace_access *access)
{
    r->life[unit] = r->events->n_lives++;
    r->g->bytes[r->kind][unit] = access->bytes;
    if (access->begin < r->begin) r->begin = access->begin;
    if (access->begin + access->bytes > r->end) r->end = access->begin + access->bytes;
    emit(r, POOL_ALLOC, when, (uint32_t)r->life[unit], access->bytes);
}

static void end_life(reader *r, uint32_t unit, uint64_t when)
{
    if (r->life[unit] < 0) return;
    emit(r, POOL_FREE, when, (uint32_t)r->life[unit], r->g->bytes[r->kind][unit]);
    r->life[unit] = -1;
}

static const fsdp_trace_access *written(const fsdp_trace_record *record)
{
    for (uint32_t i = 0; i < record->n_accesses; i++)
        if (record->access[i].write) return &record->access[i];
    return &record->access[0];
}

/* A gathered buffer lives from its all-gather to the last use before the unit is gathered anew; a held one, on. */
static void read_gather(reader *r, uint32_t unit, const fsdp_trace_record *record, uint64_t at)
{
    if (record->kind == FSDP_RECORD_USE) r->last_use[unit] = at, r->used[unit] = true;
    if (record->kind != FSDP_RECORD_OPERATION || record->operation != FSDP_OPERATION_ALL_GATHER) return;
    if (r->g->m.held[unit] && r->life[unit] >= 0) return;
    end_life(r, unit, 2 * r->last_use[unit] + 1);
    begin_life(r, unit, 2 * at, written(record));
    r->last_use[unit] = at;
    r->used[unit] = false;
}

/* A gradient buffer lives from when it is zeroed until its reduction is over. */
static void read_grad(reader *r, uint32_t unit, const fsdp_trace_record *record)
{
    if (record->kind != FSDP_RECORD_OPERATION) return;
    if (record->operation == FSDP_OPERATION_FILL) {
        if (r->life[unit] >= 0) r->status = fsdp__fail(FSDP_ERR_STATE, "%s is zeroed twice", record->label);
        begin_life(r, unit, record->start_ns, written(record));
    } else if (record->operation == FSDP_OPERATION_REDUCE_SCATTER) {
        end_life(r, unit, record->end_ns);
    }
}

/* From a few before the last one found on, and around: a tape goes from neighbour to neighbour. n_units: none. */
static uint32_t find_unit(const shapes_model *m, const char *label, uint32_t last)
{
    for (uint32_t k = 0; k < m->n_units; k++) {
        uint32_t u = (last + m->n_units - NEAR + k) % m->n_units;
        if (strcmp(fsdp_unit_name(m->unit[u]), label) == 0) return u;
    }
    return m->n_units;
}

static bool is_told_of(const fsdp_trace_record *record)
{
    if (record->kind == FSDP_RECORD_USE) return true;
    return record->kind == FSDP_RECORD_OPERATION &&
           (record->operation == FSDP_OPERATION_ALL_GATHER || record->operation == FSDP_OPERATION_FILL ||
            record->operation == FSDP_OPERATION_REDUCE_SCATTER || record->operation == FSDP_OPERATION_ADAMW);
}

static int compare_events(const void *a_, const void *b_)
{
    const pool_event *a = a_, *b = b_;
    if (a->when != b->when) return a->when < b->when ? -1 : 1;
    if (a->kind != b->kind) return a->kind < b->kind ? -1 : 1;
    return a->index < b->index ? -1 : 1;
}

static void find_live_peak(pool_events *e)
{
    uint64_t live = 0;
    qsort(e->event, e->n, sizeof *e->event, compare_events);
    for (size_t i = 0; i < e->n; i++) {
        if (e->event[i].kind == POOL_ALLOC) live += e->event[i].bytes;
        if (e->event[i].kind == POOL_FREE) live -= e->event[i].bytes;
        if (live > e->live_peak) e->live_peak = live;
    }
}

static fsdp_status read_tape(rig *g, pool_kind kind, pool_result *out)
{
    reader r = {.g = g, .events = &out->events[kind], .kind = kind, .begin = UINT64_MAX};
    for (uint32_t u = 0; u < g->m.n_units; u++) r.life[u] = -1;
    uint32_t last = 0;
    for (uint64_t i = 0; i < fsdp_trace_count(g->tape) && r.status == FSDP_OK; i++) {
        const fsdp_trace_record *record = fsdp_trace_at(g->tape, i);
        if (!is_told_of(record)) continue;
        uint32_t unit = find_unit(&g->m, record->label, last);
        bool updates = record->kind == FSDP_RECORD_OPERATION && record->operation == FSDP_OPERATION_ADAMW;
        if (updates && !r.in_update) emit(&r, POOL_UPDATE, kind == POOL_GATHER ? 2 * i : record->start_ns, 0, 0);
        if (updates || record->kind == FSDP_RECORD_USE) r.in_update = updates;
        if (unit == g->m.n_units || updates) continue;
        last = unit;
        if (kind == POOL_GATHER) read_gather(&r, unit, record, i);
        else read_grad(&r, unit, record);
    }
    for (uint32_t u = 0; u < g->m.n_units; u++) end_life(&r, u, r.used[u] ? 2 * r.last_use[u] + 1 : UINT64_MAX);
    FSDP_TRY(r.status);
    find_live_peak(r.events);
    out->extent[kind] = r.end - r.begin;
    return FSDP_OK;
}

/* ---- The words ---- */

typedef struct counter {
    const shapes_model *m;
    uint32_t depth, n; /* n: visits of a step, all micro-steps in a row */
    const uint64_t *bytes;
    bool gathered[SHAPES_MAX_UNITS];
} counter;

static uint32_t unit_at(const counter *k, uint32_t i) { return k->m->visit_unit[i % k->m->n_visits]; }

/* "A unit whose window closes stays gathered if at most `depth` other units are visited before its next visit." */
static bool stays(const counter *k, uint32_t unit, uint32_t closed)
{
    bool seen[SHAPES_MAX_UNITS] = {false};
    uint32_t others = 0, i = closed + 1;
    for (; i < k->n && unit_at(k, i) != unit; i++) {
        if (k->m->held[unit_at(k, i)] || seen[unit_at(k, i)]) continue;
        seen[unit_at(k, i)] = true;
        others++;
    }
    return i < k->n && others <= k->depth;
}

static uint64_t sum_gathered(const counter *k)
{
    uint64_t sum = 0;
    for (uint32_t u = 0; u < k->m->n_units; u++) sum += k->gathered[u] ? k->bytes[u] : 0;
    return sum;
}

/* "While a visit is open, the next `depth` visits are gathered … Held units do not count as positions." */
static uint64_t count_gather(const rig *g, const uint64_t *bytes)
{
    counter k = {.m = &g->m, .depth = g->c->depth, .n = n_micro_steps(g->c) * g->m.n_visits, .bytes = bytes};
    uint64_t peak = 0;
    for (uint32_t i = 0; i < k.n; i++) {
        uint32_t unit = unit_at(&k, i), ahead = 0;
        k.gathered[unit] = true;
        for (uint32_t j = i + 1; j < k.n && (ahead < k.depth || g->m.held[unit_at(&k, j)]); j++) {
            ahead += !g->m.held[unit_at(&k, j)];
            k.gathered[unit_at(&k, j)] = true;
        }
        uint64_t sum = sum_gathered(&k);
        if (sum > peak) peak = sum;
        if (!g->m.held[unit]) k.gathered[unit] = stays(&k, unit, i);
    }
    return peak;
}

/* "A gradient buffer lives from its visit until grad_buffers − 1 further backward visits have begun"; held units and, with
 * KEEP_FULL, all units have one of their own. */
static uint64_t count_grad(const rig *g, const uint64_t *bytes)
{
    const shapes_model *m = &g->m;
    bool keep = g->c->accumulation == FSDP_ACCUMULATE_KEEP_FULL;
    uint64_t own = 0, peak = 0, window[POOL_MAX_GRAD_BUFFERS], sum = 0;
    uint32_t n = 0;
    for (uint32_t u = 0; u < m->n_units; u++) own += keep || m->held[u] ? bytes[u] : 0;
    for (uint32_t i = 0; i < m->n_visits && !keep; i++) {
        if (m->visit[i].use != FSDP_USE_BACKWARD || m->held[m->visit_unit[i]]) continue;
        if (n >= g->c->grad_buffers) sum -= window[n % g->c->grad_buffers];
        window[n++ % g->c->grad_buffers] = bytes[m->visit_unit[i]];
        sum += bytes[m->visit_unit[i]];
        if (sum > peak) peak = sum;
    }
    return own + peak;
}

static void count(rig *g, pool_result *out)
{
    out->counted[POOL_GATHER] = count_gather(g, g->bytes[POOL_GATHER]);
    out->counted[POOL_GRAD] = count_grad(g, g->bytes[POOL_GRAD]);
    uint64_t compute[SHAPES_MAX_UNITS], grad[SHAPES_MAX_UNITS];
    for (uint32_t u = 0; u < g->m.n_units; u++) {
        compute[u] = g->m.elems[u] * fsdp_dtype_bytes(g->c->options.dtypes.compute);
        grad[u] = g->m.elems[u] * fsdp_dtype_bytes(g->c->options.dtypes.grad);
    }
    out->counted_params[POOL_GATHER] = count_gather(g, compute);
    out->counted_params[POOL_GRAD] = count_grad(g, grad);
}

fsdp_status pool_run(const pool_case *c, pool_result *out)
{
    rig g = {.c = c};
    *out = (pool_result){0};
    fsdp_status status = open_rig(&g);
    if (status == FSDP_OK) status = run_steps(&g, out);
    for (pool_kind kind = POOL_GATHER; kind < POOL_N_KINDS && status == FSDP_OK; kind++)
        status = read_tape(&g, kind, out);
    if (status == FSDP_OK) count(&g, out);
    fsdp_status closed = status == FSDP_OK ? close_rig(&g) : FSDP_OK; /* the error's own text is to stay */
    return status == FSDP_OK ? closed : status;
}

void pool_result_free(pool_result *r)
{
    for (pool_kind kind = POOL_GATHER; kind < POOL_N_KINDS; kind++) free(r->events[kind].event);
}
