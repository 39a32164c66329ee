/* SPDX-License-Identifier: MIT */
/* Why is a step slow? Three models on a machine of eight ranks that is not here, in virtual time: a step is traced, summed up
 * and drawn, as it is made and with one thing changed at a time. docs/timeline.md reads the pictures.
 *
 *     05_timeline [FOLDER]               FOLDER: where NAME.svg and NAME.json go; neither is written without it
 *
 * Tracing is the same on a real machine: fsdp_trace_start, a step or two, fsdp_trace_stop_host. */
#include <fsdp/fsdp.h>
#include <stdio.h>
#include <stdlib.h>

enum { LAYERS = 8, STEPS = 10 };

#define TRY(call)                                                                      \
    do {                                                                               \
        fsdp_status status_ = (call);                                                  \
        if (status_ != FSDP_OK) {                                                      \
            fprintf(stderr, "%s: %s\n", fsdp_status_name(status_), fsdp_last_error()); \
            exit(1);                                                                   \
        }                                                                              \
    } while (0)

static const uint64_t timeout_ns = 60000000000u; /* virtual, too */

/* Layer l has elems[l % 3] parameters, and its forward takes picoseconds of each. */
typedef struct kind {
    const char *name;
    uint64_t bytes_per_second; /* of the wire */
    uint64_t elems[3], ps_per_elem;
} kind;

static const kind kinds[] = {
    {"compute", 100000000000u, {12000000, 12000000, 12000000}, 160},
    {"wire", 10000000000u, {12000000, 12000000, 12000000}, 160},
    {"uneven", 100000000000u, {40000000, 2000000, 2000000}, 30},
};

/* What is changed. */
typedef struct change {
    const char *name;
    uint32_t depth;
    bool reduce_comm, bf16;
} change;

static const change changes[] = {
    {"as it is", 1, false, false},   {"prefetch off", 0, false, false},    {"depth 3", 3, false, false},
    {"reduce_comm", 1, true, false}, {"bf16 on the wire", 1, false, true},
};

static void add_layers(const kind *k, const change *c, fsdp_model *model, fsdp_unit **unit)
{
    fsdp_unit_config config = FSDP_UNIT_CONFIG_INIT;
    if (c->bf16) config.compute_dtype = config.grad_dtype = config.reduce_dtype = FSDP_DTYPE_BF16;
    for (int l = 0; l < LAYERS; l++) {
        char name[16], weight[16];
        snprintf(name, sizeof name, "h.%d", l);
        snprintf(weight, sizeof weight, "h.%d.w", l);
        TRY(fsdp_model_add_unit(model, name, &config, &unit[l]));
        TRY(fsdp_unit_add_param(unit[l], weight, 1, &k->elems[l % 3], NULL, NULL));
    }
}

static void step(const kind *k, fsdp_model *model, fsdp_unit **unit, fsdp_adamw *opt, fsdp_stream *s)
{
    fsdp_pass_args pass = FSDP_PASS_ARGS_INIT;
    fsdp_adamw_args update = FSDP_ADAMW_ARGS_INIT;
    fsdp_view view = FSDP_VIEW_INIT;
    TRY(fsdp_pass_begin(model, &pass, s));
    for (int l = 0; l < LAYERS; l++) {
        TRY(fsdp_forward_begin(unit[l], s, &view));
        TRY(fsdp_stream_delay(s, k->elems[l % 3] * k->ps_per_elem / 1000)); /* your kernels */
        TRY(fsdp_forward_end(unit[l], s));
    }
    for (int l = LAYERS - 1; l >= 0; l--) {
        TRY(fsdp_backward_begin(unit[l], s, &view));
        TRY(fsdp_stream_delay(s, 2 * k->elems[l % 3] * k->ps_per_elem / 1000));
        TRY(fsdp_backward_end(unit[l], s));
    }
    TRY(fsdp_pass_end(model, s));
    TRY(fsdp_adamw_step(opt, &update, s));
}

static void open_machine(const kind *k, const change *c, fsdp_context **out_ctx)
{
    fsdp_sim_config machine = FSDP_SIM_CONFIG_INIT;
    machine.world = 8;
    machine.link = (fsdp_link){20000, k->bytes_per_second};
    machine.kernel_latency_ns = 5000;
    machine.kernel_bytes_per_second = 2000000000000u;
    fsdp_config config = FSDP_CONFIG_INIT;
    config.backend = fsdp_sim_backend();
    config.backend_config = &machine;
    config.reduce_comm = c->reduce_comm;
    TRY(fsdp_context_create(&config, out_ctx));
}

/* Until both lanes and compute are idle. */
static uint64_t drain(fsdp_context *ctx, fsdp_stream *s)
{
    TRY(fsdp_stream_drain_host(s, timeout_ns));
    TRY(fsdp_stream_drain_host(fsdp_context_lane(ctx, FSDP_LANE_GATHER), timeout_ns));
    TRY(fsdp_stream_drain_host(fsdp_context_lane(ctx, FSDP_LANE_REDUCE), timeout_ns));
    return fsdp_context_now_ns(ctx);
}

/* The tape for ui.perfetto.dev or chrome://tracing: a row a stream, a bar an operation or a wait that took time. (Names of
 * units are not escaped here: these have no quotes.) */
static void write_json(const fsdp_trace *trace, const char *path)
{
    enum { SLOTS = 16 };
    const char *open_unit[SLOTS] = {NULL}; /* whose window the caller's own kernels run in */
    FILE *file = fopen(path, "w");
    if (file == NULL) perror(path), exit(1);
    fprintf(file, "[");
    for (uint64_t i = 0; i < fsdp_trace_count(trace); i++) {
        const fsdp_trace_record *r = fsdp_trace_at(trace, i);
        const char *what = fsdp_operation_name(r->operation), *label = r->label, *mark = "";
        if (r->kind == FSDP_RECORD_USE) open_unit[r->stream] = r->label;
        if ((r->kind != FSDP_RECORD_WAIT && r->kind != FSDP_RECORD_OPERATION) || r->end_ns == r->start_ns) continue;
        if (r->kind == FSDP_RECORD_WAIT) what = "wait for", mark = fsdp_mark_name(r->mark);
        else if (r->operation == FSDP_OPERATION_DELAY) what = "kernels of", label = open_unit[r->stream];
        fprintf(file, "{\"ph\":\"X\",\"pid\":0,\"tid\":%d,\"ts\":%.3f,\"dur\":%.3f,\"name\":\"%s %s %s\"},\n",
                r->stream, (double)r->start_ns / 1e3, (double)(r->end_ns - r->start_ns) / 1e3, what, label, mark);
    }
    for (int32_t s = 0; s < SLOTS; s++)
        fprintf(file, "{\"ph\":\"M\",\"pid\":0,\"tid\":%d,\"name\":\"thread_name\",\"args\":{\"name\":\"%s\"}},\n", s,
                fsdp_trace_stream_name(trace, s));
    fprintf(file, "{\"ph\":\"M\",\"pid\":0,\"name\":\"process_name\",\"args\":{\"name\":\"rank 0\"}}]\n");
    if (fclose(file) != 0) perror(path), exit(1);
}

/* One step's summary; its span is that of a step among many, whose last gathers run beside the next one's first layer. */
static fsdp_trace_summary trace_step(const kind *k, const change *c, const char *folder)
{
    fsdp_context *ctx;
    fsdp_stream *s;
    fsdp_model *model;
    fsdp_unit *unit[LAYERS];
    fsdp_adamw *opt;
    fsdp_trace *trace;
    open_machine(k, c, &ctx);
    fsdp_model_config config = FSDP_MODEL_CONFIG_INIT;
    config.depth = c->depth;
    TRY(fsdp_stream_create(ctx, "compute", &s));
    TRY(fsdp_model_create(ctx, &config, &model));
    add_layers(k, c, model, unit);
    TRY(fsdp_adamw_create(model, NULL, &opt));
    TRY(fsdp_model_seal(model));
    step(k, model, unit, opt, s); /* the first one gathers what later ones find */
    const uint64_t begin = drain(ctx, s);
    for (int i = 0; i < STEPS; i++) step(k, model, unit, opt, s);
    const uint64_t end = drain(ctx, s);
    TRY(fsdp_trace_start(ctx, 100000, &trace));
    step(k, model, unit, opt, s);
    TRY(fsdp_trace_stop_host(trace));
    fsdp_trace_summary sum = FSDP_TRACE_SUMMARY_INIT;
    TRY(fsdp_trace_summarize(trace, s, &sum));
    if (folder != NULL) {
        char path[4096], title[64];
        snprintf(path, sizeof path, "%s/%s.svg", folder, k->name);
        snprintf(title, sizeof title, "One step of rank 0 of 8: %s", k->name);
        TRY(fsdp_trace_write_svg(trace, path, title));
        snprintf(path, sizeof path, "%s/%s.json", folder, k->name);
        write_json(trace, path);
    }
    sum.span_ns = (end - begin) / STEPS;
    fsdp_trace_destroy(trace);
    TRY(fsdp_model_destroy(model));
    TRY(fsdp_stream_release(s));
    TRY(fsdp_context_destroy(ctx));
    return sum;
}

static double ms(uint64_t ns) { return (double)ns / 1e6; }

int main(int argc, char **argv)
{
    if (argc > 2 || (argc == 2 && argv[1][0] == '-')) {
        fprintf(stderr, "usage: 05_timeline [FOLDER]\n");
        return 2;
    }
    printf("ms of one step                  step  compute  exposed: gathers reductions   wire gathers reduces\n");
    for (size_t m = 0; m < sizeof kinds / sizeof *kinds; m++) {
        uint64_t as_it_is = 0;
        for (size_t i = 0; i < sizeof changes / sizeof *changes; i++) {
            const fsdp_trace_summary t = trace_step(&kinds[m], &changes[i], argc > 1 && i == 0 ? argv[1] : NULL);
            printf("%-8s %-18s %9.2f %8.2f %17.2f %10.2f %14.2f %7.2f\n", kinds[m].name, changes[i].name, ms(t.span_ns),
                   ms(t.compute_ns), ms(t.exposed_gather_ns), ms(t.exposed_reduce_ns), ms(t.gather_ns),
                   ms(t.reduce_ns));
            if (i == 0) as_it_is = t.span_ns;
            if ((i == 1 && t.span_ns <= as_it_is) || (i == 4 && t.span_ns >= as_it_is)) {
                fprintf(stderr, "prefetch, or half the bytes, did not help\n");
                return 1;
            }
        }
    }
    return 0;
}
