/* SPDX-License-Identifier: MIT */
/* What is measured of a way, on rank 0's clock, in this order:
 *     warm      a few steps; their losses are printed, so that two ways can be seen to compute the same
 *     compute   forward, loss and backward on one layer's weights, nobody else near: no collectives, no optimizer
 *     step      one step between two synchronisations of the device, after a small collective that all ranks meet in
 *     stream    ten steps in a row, one synchronisation, / 10
 *     comm      a step's hooks without compute and optimizer, as `step`
 *     captured  a step as a CUDA graph, as `step`; host time, a layer, is that of a replay with all that belongs to it
 * A figure is the median, with the smallest and the largest beside it. */
#include <string.h>

#include "block_bench.h"
#include "sorted.h"

enum { MOST_SAMPLES = 256, WARM = 3, ROW = 10 };

typedef struct series {
    double value[MOST_SAMPLES];
    uint32_t n;
} series;

typedef struct figures {
    series compute_ms, step_ms, host_us, hooks_us, update_us, row_hooks_us, stream_ms, comm_ms, captured_ms,
        captured_host_us;
    series inside_us, outside_us, row_outside_us; /* of the hooks, a layer: time in CUDA and NCCL, the rest */
    double calls;                                 /* of CUDA and NCCL, in the hooks of a layer */
    uint64_t clock_ns;                            /* taken off a call */
    float loss[WARM];
    uint64_t gathers;
} figures;

static void add(series *s, double value)
{
    if (s->n < MOST_SAMPLES) s->value[s->n++] = value;
}

static double median(series *s)
{
    if (s->n == 0) return 0.0;
    sort_doubles(s->value, s->n);
    return s->value[s->n / 2];
}

/* Every rank is here, and the device is idle. */
static void meet(block_way *way)
{
    CUDA(cudaDeviceSynchronize());
    way->barrier(way);
    CUDA(cudaDeviceSynchronize());
}

static double ms_since(uint64_t start) { return (double)(fsdp__now_ns() - start) * 1e-6; }

#ifdef BLOCK_COUNT_CALLS
/* Of the hooks of the step that was enqueued last, a layer: what is not inside CUDA and NCCL, without the clocks' own time. */
static double outside_us(const block_way *way, const figures *f)
{
    const block_times *t = &way->times;
    const double clocks = (double)(t->hook_calls * f->clock_ns);
    return ((double)t->hooks_ns - (double)t->hook_calls_ns - clocks) * 1e-3 / way->options->layers;
}
#endif

static void measure_steps(block_way *way, figures *f)
{
    const double layers = way->options->layers;
    const block_times *t = &way->times;
#ifdef BLOCK_COUNT_CALLS
    f->clock_ns = block_call_cost_ns();
    block_calls_reset();
#endif
    for (uint32_t i = 0; i < way->options->steps; i++) {
        meet(way);
        const uint64_t start = fsdp__now_ns();
        way->step(way, true);
        add(&f->host_us, ms_since(start) * 1e3 / layers);
        CUDA(cudaDeviceSynchronize());
        add(&f->step_ms, ms_since(start));
        add(&f->hooks_us, (double)t->hooks_ns * 1e-3 / layers);
        add(&f->update_us, (double)t->update_ns * 1e-3 / layers);
#ifdef BLOCK_COUNT_CALLS
        f->calls = (double)t->hook_calls / layers;
        add(&f->inside_us, (double)t->hook_calls_ns * 1e-3 / layers);
        add(&f->outside_us, outside_us(way, f));
#endif
    }
#ifdef BLOCK_COUNT_CALLS
    if (way->launch.rank == 0 && !way->options->json) block_calls_print(layers * way->options->steps);
#endif
}

/* The third of three steps in a row: the host has not waited since the first, so nobody else had the core and its caches. */
static void measure_row_hooks(block_way *way, figures *f)
{
    for (uint32_t i = 0; i < way->options->steps; i++) {
        meet(way);
        for (int k = 0; k < 3; k++) way->step(way, true);
        add(&f->row_hooks_us, (double)way->times.hooks_ns * 1e-3 / way->options->layers);
#ifdef BLOCK_COUNT_CALLS
        add(&f->row_outside_us, outside_us(way, f));
#endif
        CUDA(cudaDeviceSynchronize());
    }
}

static void measure_stream(block_way *way, figures *f)
{
    for (uint32_t i = 0; i < way->options->rounds; i++) {
        meet(way);
        const uint64_t start = fsdp__now_ns();
        for (int k = 0; k < ROW; k++) way->step(way, true);
        CUDA(cudaDeviceSynchronize());
        add(&f->stream_ms, ms_since(start) / ROW);
    }
}

static void measure_comm(block_way *way, figures *f)
{
    for (uint32_t i = 0; i < way->options->steps; i++) {
        meet(way);
        const uint64_t start = fsdp__now_ns();
        way->step(way, false);
        CUDA(cudaDeviceSynchronize());
        if (i > 0) add(&f->comm_ms, ms_since(start));
    }
}

/* Real values: a GEMM on zeros takes less power, and so less time. */
static void measure_compute(block_way *way, figures *f, uint32_t repeats)
{
    const uint32_t layers = way->options->layers, dim = way->options->dim;
    const uint64_t elems = block_elems(dim) / 128 * 128;
    char *weights;
    float *gradients;
    CUDA(cudaMalloc((void **)&weights, block_elems(dim) * 2));
    CUDA(cudaMalloc((void **)&gradients, block_elems(dim) * 4));
    block_first_values(gradients, 0, block_elems(dim), 0, dim, way->stream);
    block_cast(weights, gradients, elems, way->stream);
    const void *params[BLOCK_PARAMS];
    float *grads[BLOCK_PARAMS];
    for (int i = 0; i < BLOCK_PARAMS; i++) {
        params[i] = weights + 2 * block_offset(dim, i);
        grads[i] = gradients + block_offset(dim, i);
    }
    for (uint32_t i = 0; i <= repeats; i++) {
        meet(way);
        const uint64_t start = fsdp__now_ns();
        for (uint32_t l = 0; l < layers; l++) block_forward(way->math, l, params);
        block_loss(way->math);
        for (uint32_t l = layers; l-- > 0;) block_backward(way->math, l, params, grads);
        CUDA(cudaDeviceSynchronize());
        if (i > 0) add(&f->compute_ms, ms_since(start)); /* the first one loads kernels, before any collective spins */
    }
    CUDA(cudaFree(weights));
    CUDA(cudaFree(gradients));
}

static void measure_captured(block_way *way, figures *f)
{
    meet(way);
    way->capture(way);
    for (uint32_t i = 0; i <= way->options->steps; i++) {
        meet(way);
        const uint64_t start = fsdp__now_ns();
        way->replay(way);
        const double host = ms_since(start) * 1e3 / way->options->layers;
        CUDA(cudaDeviceSynchronize());
        if (i == 0) continue; /* a graph's first launch is more work */
        add(&f->captured_ms, ms_since(start));
        add(&f->captured_host_us, host);
    }
}

static void warm(block_way *way, figures *f)
{
    for (int i = 0; i < WARM; i++) {
        way->look(way);
        const uint64_t before = way->gathers;
        meet(way);
        way->step(way, true);
        CUDA(cudaDeviceSynchronize());
        CUDA(cudaMemcpy(&f->loss[i], block_math_loss(way->math), sizeof(float), cudaMemcpyDeviceToHost));
        way->look(way);
        f->gathers = way->gathers - before;
    }
}

/* ---- Printing ---- */

static void print_series(bool json, const char *name, const char *unit, series *s)
{
    if (s->n == 0) return;
    const double middle = median(s);
    if (json)
        printf(",\"%s_%s\":%.4f,\"%s_%s_min\":%.4f,\"%s_%s_max\":%.4f", name, unit, middle, name, unit, s->value[0],
               name, unit, s->value[s->n - 1]);
    else
        printf("    %-14s %10.3f %-10s (%.3f to %.3f, %u times)\n", name, middle, unit, s->value[0], s->value[s->n - 1],
               s->n);
}

static double larger(double a, double b) { return a > b ? a : b; }

static const char *yes(bool flag) { return flag ? "true" : "false"; }

static void print_head_json(const block_way *way, const char *compute, uint64_t tokens, int nccl)
{
    const block_options *o = way->options;
    printf("{\"way\":\"%s\",\"compute\":\"%s\",\"world\":%u,\"layers\":%u,\"dim\":%u,\"tokens\":%llu,\"depth\":%u,"
           "\"comms\":%u",
           o->library ? "library" : "bare", compute, way->launch.world, o->layers, o->dim, (unsigned long long)tokens,
           o->depth, o->comms);
    printf(",\"window\":%s,\"window_grad\":%s,\"cta_zero\":%s,\"keep\":%s,\"one_lane\":%s,\"no_bias\":%s,\"clip\":%s",
           yes(o->window), yes(o->window_grad), yes(o->cta_zero), yes(o->keep), yes(o->one_lane), yes(o->no_bias),
           yes(o->clip));
    printf(",\"pad\":%llu,\"nccl\":%d,\"path\":\"%s\"", (unsigned long long)o->pad, nccl, way->path);
}

static void print_head_text(const block_way *way, const char *compute, uint64_t tokens, int nccl)
{
    const block_options *o = way->options;
    printf("%s, %s compute: world %u, %u layers × %u, %llu tokens, depth %u, %u communicator%s",
           o->library ? "library" : "bare", compute, way->launch.world, o->layers, o->dim, (unsigned long long)tokens,
           o->depth, o->comms, o->comms == 1 ? "" : "s");
    printf("%s%s%s%s%s%s%s, NCCL %d %s\n", o->window ? ", gathers in a window" : "",
           o->window_grad ? ", gradients in a window" : "", o->cta_zero ? ", no CTAs" : "",
           o->keep ? ", keeping depth + 1" : "", o->one_lane ? ", one lane" : "", o->no_bias ? ", no biases" : "",
           o->clip ? ", clipping" : "", nccl, way->path);
    printf("    a rank's part of a gather: %llu bytes\n",
           (unsigned long long)block_padded_elems(o, way->launch.world) / way->launch.world * 2);
}

static void print_head(const block_way *way, uint64_t tokens)
{
    const char *compute = way->options->fused ? "fused" : "plain";
    int nccl = 0;
    NCCL(ncclGetVersion(&nccl));
    if (way->options->json) print_head_json(way, compute, tokens, nccl);
    else print_head_text(way, compute, tokens, nccl);
}

static void print_bytes(const block_way *way, const figures *f)
{
    const unsigned long long device = way->device_bytes, predicted = way->predicted_bytes,
                             math = block_math_bytes(way->math), gathers = f->gathers;
    if (way->options->json)
        printf(",\"device_bytes\":%llu,\"predicted_bytes\":%llu,\"activation_bytes\":%llu,\"gathers\":%llu,"
               "\"losses\":[%.9g,%.9g,%.9g]}\n",
               device, predicted, math, gathers, (double)f->loss[0], (double)f->loss[1], (double)f->loss[2]);
    else
        printf("    bytes: state and buffers %llu, %s %llu, activations %llu; %llu gathers a step; losses %.9g %.9g "
               "%.9g\n",
               device, way->options->library ? "predicted" : "as taken", predicted, math, gathers, (double)f->loss[0],
               (double)f->loss[1], (double)f->loss[2]);
}

static void print_case(block_way *way, uint64_t tokens, figures *f)
{
    const bool json = way->options->json;
    print_head(way, tokens);
    if (!json)
        printf(
            "    (host, hooks, update: host microseconds a layer; row_hooks: in the third of three steps in a row)\n");
    print_series(json, "step", "ms", &f->step_ms);
    print_series(json, "stream", "ms", &f->stream_ms);
    print_series(json, "comm", "ms", &f->comm_ms);
    print_series(json, "compute", "ms", &f->compute_ms);
    print_series(json, "host", "us", &f->host_us);
    print_series(json, "hooks", "us", &f->hooks_us);
    print_series(json, "row_hooks", "us", &f->row_hooks_us);
    print_series(json, "update", "us", &f->update_us);
    print_series(json, "captured", "ms", &f->captured_ms);
    print_series(json, "captured_host", "us", &f->captured_host_us);
    const double step = median(&f->step_ms), ideal = larger(median(&f->comm_ms), median(&f->compute_ms));
    if (step > 0 && ideal > 0)
        printf(json ? ",\"efficiency\":%.4f" : "    efficiency     %10.4f (the longer of comm and compute, by step)\n",
               ideal / step);
#ifdef BLOCK_COUNT_CALLS
    print_series(json, "inside", "us", &f->inside_us);
    print_series(json, "outside", "us", &f->outside_us);
    print_series(json, "row_outside", "us", &f->row_outside_us);
    printf(json ? ",\"hook_calls\":%.2f,\"clock_ns\":%llu"
                : "    hooks, a layer: %.2f calls of CUDA and NCCL; %llu ns of clock a call taken off\n",
           f->calls, (unsigned long long)f->clock_ns);
#endif
    print_bytes(way, f);
    fflush(stdout);
}

bool block_measure_case(block_way *way, uint64_t tokens)
{
    figures *f = calloc(1, sizeof *f);
    if (f == NULL) BENCH_FAIL("no memory");
    const uint32_t what = way->options->what;
    block_stage = "choosing GEMMs";
    block_math_set_tokens(way->math, tokens);
    block_stage = "computing alone";
    measure_compute(way, f, what & BLOCK_COMPUTE ? way->options->steps : 0);
    if (what & BLOCK_BOTH_WAYS) {
        block_stage = "warming";
        warm(way, f);
        block_stage = "measuring steps";
        measure_steps(way, f);
        measure_row_hooks(way, f);
        measure_stream(way, f);
    }
    block_stage = "measuring collectives alone";
    if (what & BLOCK_COMM) measure_comm(way, f);
    block_stage = "capturing";
    if (way->options->captured) measure_captured(way, f);
    block_stage = "printing";
    way->look(way);
    if (way->launch.rank == 0) print_case(way, tokens, f);
    free(f);
    if (way->device_bytes == way->predicted_bytes) return true;
    fprintf(stderr, "bench: rank %u: %llu bytes of device memory, %llu were predicted\n", way->launch.rank,
            (unsigned long long)way->device_bytes, (unsigned long long)way->predicted_bytes);
    return false;
}
