/* SPDX-License-Identifier: MIT */
/* What prefetch is worth, and what the library itself costs.
 *
 * L equal units; a forward window computes for --compute-us, a backward window for twice that. Measured: the compute alone,
 * the same collectives alone, and the step for each depth; beside it the closed formula (docs/schedule.md). On `sim` all of
 * it is virtual time; on `host` it is real time over a modelled link; on `null`, whose operations return at once, hook_ns is
 * the library's own time for the four hooks of a unit; with --cold step or hook, behind a walk over more memory than caches
 * hold before each step, or each hook. One JSON line a depth. On `cuda` it is another bench, with options of
 * its own: block_bench.h. */
#include <fsdp/fsdp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "monotonic.h"
#include "null_backend.h"
#include "sorted.h"
#ifdef WITH_CUDA
#include "block_bench.h"
#endif

#define TRY(call)                                                                                      \
    do {                                                                                               \
        fsdp_status status_ = (call);                                                                  \
        if (status_ != FSDP_OK) {                                                                      \
            fprintf(stderr, "bench_prefetch: %s: %s\n", fsdp_status_name(status_), fsdp_last_error()); \
            exit(1);                                                                                   \
        }                                                                                              \
    } while (0)

enum { MAX_RANKS = 64, WAIT_S = 60, LINE = 64 };

#define COLD_BYTES ((size_t)256 << 20) /* more than caches of one socket hold */

typedef enum device_kind { HOST, SIM, NULL_DEVICE } device_kind;
typedef enum cold_kind { WARM, COLD_STEP, COLD_HOOK } cold_kind;

typedef struct options {
    device_kind device;
    const char *device_name;
    uint32_t ranks, layers, steps;
    int depth; /* -1: 0, 1 and 2 */
    uint64_t elems, compute_ns;
    fsdp_link link;
    cold_kind cold;
    bool json;
} options;

/* One rank's measurement of one configuration. */
typedef struct run {
    const options *o;
    fsdp_local *local;
    uint32_t rank, depth;
    bool compute;
    double step_ns, hook_ns; /* hook_ns: of the median step, a unit */
    uint64_t peak_bytes, predicted_bytes;
} run;

typedef struct rig {
    fsdp_context *ctx;
    fsdp_stream *s;
    fsdp_model *model;
    fsdp_unit **unit;
    fsdp_adamw *opt;
    double *hook_ns;     /* of each measured step */
    volatile char *cold; /* COLD_BYTES, or NULL */
} rig;

static void open_context(run *r, rig *g)
{
    const options *o = r->o;
    fsdp_host_config host = FSDP_HOST_CONFIG_INIT;
    fsdp_sim_config sim = FSDP_SIM_CONFIG_INIT;
    null_config null = {.world = o->ranks};
    host.local = r->local;
    host.rank = r->rank;
    sim.world = o->ranks;
    sim.link = o->link;
    fsdp_config config = FSDP_CONFIG_INIT;
    config.backend = o->device == SIM           ? fsdp_sim_backend()
                     : o->device == NULL_DEVICE ? null_backend()
                                                : fsdp_host_backend();
    config.backend_config = o->device == SIM ? (void *)&sim : o->device == NULL_DEVICE ? (void *)&null : (void *)&host;
    TRY(fsdp_context_create(&config, &g->ctx));
    TRY(fsdp_stream_create(g->ctx, "compute", &g->s));
}

static void open_model(run *r, rig *g)
{
    const options *o = r->o;
    fsdp_model_config config = FSDP_MODEL_CONFIG_INIT;
    config.depth = r->depth;
    TRY(fsdp_model_create(g->ctx, &config, &g->model));
    g->unit = calloc(o->layers, sizeof(fsdp_unit *));
    for (uint32_t l = 0; l < o->layers; l++) {
        char name[32];
        snprintf(name, sizeof name, "h.%u", l);
        TRY(fsdp_model_add_unit(g->model, name, NULL, &g->unit[l]));
        snprintf(name, sizeof name, "h.%u.w", l);
        TRY(fsdp_unit_add_param(g->unit[l], name, 1, &o->elems, NULL, NULL));
    }
    TRY(fsdp_adamw_create(g->model, NULL, &g->opt));
    fsdp_memory memory = FSDP_MEMORY_INIT;
    TRY(fsdp_model_predict(g->model, &memory));
    r->predicted_bytes = memory.total;
    TRY(fsdp_model_seal(g->model));
}

static void compute(const run *r, rig *g, uint64_t ns)
{
    if (r->compute && ns > 0) TRY(fsdp_stream_delay(g->s, ns));
}

/* What was in the caches leaves them, where --cold says so. Returns the nanoseconds that it took. */
static uint64_t cool(const run *r, const rig *g, cold_kind when)
{
    if (r->o->cold != when) return 0;
    uint64_t start = fsdp__now_ns();
    for (size_t at = 0; at < COLD_BYTES; at += LINE) g->cold[at]++;
    return fsdp__now_ns() - start;
}

/* Returns the host's nanoseconds in the hooks of all units. */
static uint64_t step(const run *r, rig *g)
{
    uint32_t layers = r->o->layers;
    fsdp_view view = FSDP_VIEW_INIT;
    fsdp_pass_args pass = FSDP_PASS_ARGS_INIT;
    cool(r, g, COLD_STEP);
    TRY(fsdp_pass_begin(g->model, &pass, g->s));
    uint64_t start = fsdp__now_ns();
    for (uint32_t l = 0; l < layers; l++) {
        start += cool(r, g, COLD_HOOK);
        TRY(fsdp_forward_begin(g->unit[l], g->s, &view));
        compute(r, g, r->o->compute_ns);
        start += cool(r, g, COLD_HOOK);
        TRY(fsdp_forward_end(g->unit[l], g->s));
    }
    for (uint32_t l = layers; l-- > 0;) {
        start += cool(r, g, COLD_HOOK);
        TRY(fsdp_backward_begin(g->unit[l], g->s, &view));
        compute(r, g, 2 * r->o->compute_ns);
        start += cool(r, g, COLD_HOOK);
        TRY(fsdp_backward_end(g->unit[l], g->s));
    }
    uint64_t hooks = fsdp__now_ns() - start;
    TRY(fsdp_pass_end(g->model, g->s));
    fsdp_adamw_args update = FSDP_ADAMW_ARGS_INIT;
    TRY(fsdp_adamw_step(g->opt, &update, g->s));
    return hooks;
}

/* Step i with step i − 2's report as back-pressure, as a trainer does it. */
static void steps(const run *r, rig *g, uint64_t first, uint64_t n)
{
    fsdp_step_report report = FSDP_STEP_REPORT_INIT;
    for (uint64_t i = first; i < first + n; i++) {
        g->hook_ns[i - first] = (double)step(r, g);
        if (i > 2) TRY(fsdp_step_report_get(g->model, i - 2, WAIT_S * 1000000000ull, &report));
    }
    TRY(fsdp_stream_drain_host(g->s, WAIT_S * 1000000000ull));
}

static void *run_rank(void *arg)
{
    run *r = arg;
    rig g = {.hook_ns = calloc(r->o->steps + 2, sizeof(double))};
    if (r->o->cold != WARM) g.cold = calloc(COLD_BYTES, 1);
    open_context(r, &g);
    open_model(r, &g);
    steps(r, &g, 1, 2); /* warm */
    TRY(fsdp_barrier_host(g.ctx));
    uint64_t start = fsdp_context_now_ns(g.ctx);
    steps(r, &g, 3, r->o->steps);
    r->step_ns = (double)(fsdp_context_now_ns(g.ctx) - start) / r->o->steps;
    sort_doubles(g.hook_ns, r->o->steps);
    r->hook_ns = g.hook_ns[r->o->steps / 2] / r->o->layers;
    fsdp_counters counters = FSDP_COUNTERS_INIT;
    TRY(fsdp_context_counters(g.ctx, &counters));
    r->peak_bytes = counters.device_bytes_peak;
    TRY(fsdp_model_destroy(g.model));
    TRY(fsdp_stream_release(g.s));
    TRY(fsdp_context_destroy(g.ctx));
    free(g.unit);
    free(g.hook_ns);
    free((void *)g.cold);
    return NULL;
}

static run measure(const options *o, uint32_t depth, bool with_compute)
{
    uint32_t threads = o->device == HOST ? o->ranks : 1;
    run runs[MAX_RANKS];
    pthread_t thread[MAX_RANKS];
    fsdp_local *local = NULL;
    if (o->device == HOST) TRY(fsdp_local_create(threads, &o->link, &local));
    for (uint32_t i = 0; i < threads; i++) {
        runs[i] = (run){.o = o, .local = local, .rank = i, .depth = depth, .compute = with_compute};
        if (pthread_create(&thread[i], NULL, run_rank, &runs[i]) != 0) exit(1);
    }
    for (uint32_t i = 0; i < threads; i++) pthread_join(thread[i], NULL);
    fsdp_local_destroy(local);
    return runs[0];
}

/* The delays of a step on a stream of their own: no hooks, no collectives. */
static double measure_compute_ns(const options *o)
{
    run r = {.o = o};
    options alone = *o;
    alone.ranks = 1;
    r.o = &alone;
    rig g = {0};
    open_context(&r, &g);
    uint64_t start = fsdp_context_now_ns(g.ctx);
    for (uint32_t i = 0; i < o->steps * o->layers; i++) {
        TRY(fsdp_stream_delay(g.s, o->compute_ns));
        TRY(fsdp_stream_delay(g.s, 2 * o->compute_ns));
    }
    TRY(fsdp_stream_drain_host(g.s, WAIT_S * 1000000000ull));
    double ns = (double)(fsdp_context_now_ns(g.ctx) - start) / o->steps;
    TRY(fsdp_stream_release(g.s));
    TRY(fsdp_context_destroy(g.ctx));
    return ns;
}

/* ---- The formula: one wire, one compute stream, equal units; what docs/schedule.md derives. ---- */

static double wire_ns(const options *o, double bytes)
{
    if (o->ranks == 1) return 0.0;
    return (double)o->link.latency_ns +
           (o->link.bytes_per_second ? bytes * 1e9 / (double)o->link.bytes_per_second : 0.0);
}

static double larger(double a, double b) { return a > b ? a : b; }

/* Depth 1: AG₀ + Σ max(F, AG) + (F + B) + Σ max(B, RS + AG) + max(B, RS) + RS, then the norm's all-reduce. Depth 0: each
 * gather is exposed, and stands on the wire behind the reduction before it. Deeper: the wire and compute overlap freely but
 * for the first gather, so the larger of the two sums bounds the middle. */
static double formula_ns(const options *o, uint32_t depth)
{
    double world = o->ranks, quantum = 128.0 * world;
    double shard = (double)((uint64_t)(((double)o->elems + quantum - 1) / quantum)) * 128.0 * 4.0;
    double ag = wire_ns(o, shard * (world - 1)), rs = ag,
           norm = wire_ns(o, (double)(uint64_t)(2.0 * 17.0 * 4.0 * (world - 1) / world));
    double f = (double)o->compute_ns, b = 2.0 * f, n = (double)o->layers;
    if (o->layers == 1) return ag + f + b + rs + norm;
    if (depth == 0) return n * (ag + f) + b + (n - 1) * (rs + ag + b) + rs + norm;
    if (depth == 1)
        return ag + (n - 1) * larger(f, ag) + (f + b) + (n - 2) * larger(b, rs + ag) + larger(b, rs) + rs + norm;
    double forward = ag + larger((n - 1) * f, (n - 1) * ag) + f,
           backward = b + larger((n - 1) * b, (n - 1) * rs + (n - 1 - depth) * ag) + rs;
    return forward + backward + norm;
}

/* ---- Options ---- */

static void usage(int code)
{
    fprintf(code ? stderr : stdout,
            "bench_prefetch [--device host|sim|null] [--ranks N] [--layers L] [--depth K] [--elems N]\n"
            "               [--compute-us US] [--link LATENCY_US:MB_PER_S] [--steps N] [--json]\n"
            "               [--cold step|hook], with --device null\n"
            "bench_prefetch --device cuda …: the blocks of FSDP2's comparison on GPUs; --device cuda --help\n");
    exit(code);
}

static uint64_t number(const char *text)
{
    char *end;
    unsigned long long value = strtoull(text, &end, 10);
    if (end == text || *end != 0) {
        fprintf(stderr, "bench_prefetch: '%s' is no number\n", text);
        exit(2);
    }
    return value;
}

static void set_device(options *o, const char *name)
{
    o->device_name = name;
    if (strcmp(name, "host") == 0) o->device = HOST;
    else if (strcmp(name, "sim") == 0) o->device = SIM;
    else if (strcmp(name, "null") == 0) o->device = NULL_DEVICE;
    else usage(2);
}

static void set_cold(options *o, const char *when)
{
    if (strcmp(when, "step") == 0) o->cold = COLD_STEP;
    else if (strcmp(when, "hook") == 0) o->cold = COLD_HOOK;
    else usage(2);
}

static void set_link(options *o, const char *text)
{
    unsigned long long us, mb;
    if (sscanf(text, "%llu:%llu", &us, &mb) != 2) usage(2);
    o->link = (fsdp_link){us * 1000, mb * 1000000};
}

static options parse(int argc, char **argv)
{
    options o = {.device = SIM,
                 .device_name = "sim",
                 .ranks = 4,
                 .layers = 8,
                 .depth = -1,
                 .elems = 1 << 18,
                 .compute_ns = 3000000,
                 .steps = 10,
                 .link = {50000, 500000000}};
    for (int i = 1; i < argc; i++) {
        const char *flag = argv[i];
        if (strcmp(flag, "--json") == 0) o.json = true;
        else if (strcmp(flag, "--help") == 0) usage(0);
        else if (i + 1 == argc) usage(2);
        else if (strcmp(flag, "--device") == 0) set_device(&o, argv[++i]);
        else if (strcmp(flag, "--ranks") == 0) o.ranks = (uint32_t)number(argv[++i]);
        else if (strcmp(flag, "--layers") == 0) o.layers = (uint32_t)number(argv[++i]);
        else if (strcmp(flag, "--depth") == 0) o.depth = (int)number(argv[++i]);
        else if (strcmp(flag, "--elems") == 0) o.elems = number(argv[++i]);
        else if (strcmp(flag, "--steps") == 0) o.steps = (uint32_t)number(argv[++i]);
        else if (strcmp(flag, "--compute-us") == 0) o.compute_ns = number(argv[++i]) * 1000;
        else if (strcmp(flag, "--link") == 0) set_link(&o, argv[++i]);
        else if (strcmp(flag, "--cold") == 0) set_cold(&o, argv[++i]);
        else usage(2);
    }
    if (o.ranks == 0 || o.ranks > MAX_RANKS || o.layers == 0 || o.steps == 0 || o.elems == 0) usage(2);
    if (o.cold != WARM && o.device != NULL_DEVICE) usage(2);
    return o;
}

static void print_line(const options *o, uint32_t depth, const run *full, double compute_ns,
                       const run *collectives_only)
{
    double compute_ms = compute_ns / 1e6, collectives_ms = collectives_only->step_ns / 1e6,
           step_ms = full->step_ns / 1e6;
    double efficiency = step_ms > 0 ? larger(compute_ms, collectives_ms) / step_ms : 0.0;
    const char *format =
        o->json
            ? "{\"device\":\"%s\",\"ranks\":%u,\"layers\":%u,\"depth\":%u,\"step_ms\":%.6f,\"compute_ms\":%.6f,"
              "\"collectives_ms\":%.6f,\"formula_ms\":%.6f,\"overlap_efficiency\":%.4f,\"hook_ns\":%.0f,"
              "\"peak_bytes\":%llu,\"predicted_peak_bytes\":%llu}\n"
            : "%s  ranks %u  layers %u  depth %u  step %.3f ms  compute %.3f ms  collectives %.3f ms  formula %.3f ms  "
              "efficiency %.3f  hooks %.0f ns  peak %llu bytes  predicted %llu bytes\n";
    printf(format, o->device_name, o->ranks, o->layers, depth, step_ms, compute_ms, collectives_ms,
           formula_ns(o, depth) / 1e6, efficiency, full->hook_ns, (unsigned long long)full->peak_bytes,
           (unsigned long long)full->predicted_bytes);
}

static bool asks_for_cuda(int argc, char **argv)
{
    for (int i = 1; i + 1 < argc; i++)
        if (strcmp(argv[i], "--device") == 0 && strcmp(argv[i + 1], "cuda") == 0) return true;
    return false;
}

int main(int argc, char **argv)
{
    if (asks_for_cuda(argc, argv)) {
#ifdef WITH_CUDA
        return block_bench_main(argc, argv);
#else
        fprintf(stderr, "bench_prefetch: built without CUDA and cuBLASLt (cmake --preset cuda)\n");
        return 2;
#endif
    }
    options o = parse(argc, argv);
    for (uint32_t depth = o.depth < 0 ? 0 : (uint32_t)o.depth; depth <= (o.depth < 0 ? 2 : (uint32_t)o.depth);
         depth++) {
        run collectives_only = measure(&o, depth, false), full = measure(&o, depth, true);
        print_line(&o, depth, &full, measure_compute_ns(&o), &collectives_only);
    }
    return 0;
}
