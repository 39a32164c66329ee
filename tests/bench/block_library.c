/* SPDX-License-Identifier: MIT */
/* The same step through libfsdp: a program's loop, its own stream wrapped, ranks from the launcher. */
#include <string.h>

#include "block_bench.h"
#include "fsdp/capture.h"
#include "fsdp/cuda.h"
#include "fsdp/nccl.h"

typedef struct library {
    fsdp_context *ctx;
    fsdp_stream *s;
    fsdp_model *model;
    fsdp_unit *unit[BLOCK_MOST_LAYERS];
    int place[BLOCK_PARAMS + 1], n_params; /* of a unit's parameters: which of a block's; BLOCK_PARAMS: a pad */
    fsdp_adamw *opt;
    fsdp_capture *capture;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
} library;

static void find_params(const block_way *way, const fsdp_view *view, const void *params[BLOCK_PARAMS])
{
    const library *b = way->self;
    for (int i = 0; i < BLOCK_PARAMS; i++) params[i] = way->zeros;
    for (int i = 0; i < b->n_params; i++)
        if (b->place[i] < BLOCK_PARAMS) params[b->place[i]] = view->params[i];
}

static void find_grads(const block_way *way, const fsdp_view *view, float *grads[BLOCK_PARAMS])
{
    const library *b = way->self;
    for (int i = 0; i < BLOCK_PARAMS; i++) grads[i] = way->bias_scratch;
    for (int i = 0; i < b->n_params; i++)
        if (b->place[i] < BLOCK_PARAMS) grads[b->place[i]] = view->grads[i];
}

static fsdp_adamw_args update_args(const block_way *way)
{
    fsdp_adamw_args args = FSDP_ADAMW_ARGS_INIT;
    args.lr = 1e-4f;
    if (way->options->clip) args.max_norm = BLOCK_MAX_NORM;
    return args;
}

static void library_step(block_way *way, bool compute)
{
    library *b = way->self;
    const uint32_t layers = way->options->layers;
    const void *params[BLOCK_PARAMS];
    float *grads[BLOCK_PARAMS];
    fsdp_pass_args pass = FSDP_PASS_ARGS_INIT;
    fsdp_view view = FSDP_VIEW_INIT;
    memset(&way->times, 0, sizeof way->times);
    block_enter(way);
    LIB(fsdp_pass_begin(b->model, &pass, b->s));
    block_leave_hook(way);
    for (uint32_t l = 0; l < layers; l++) {
        block_enter(way);
        LIB(fsdp_forward_begin(b->unit[l], b->s, &view));
        block_leave_hook(way);
        find_params(way, &view, params);
        if (compute) block_forward(way->math, l, params);
        block_enter(way);
        LIB(fsdp_forward_end(b->unit[l], b->s));
        block_leave_hook(way);
    }
    if (compute) block_loss(way->math);
    for (uint32_t l = layers; l-- > 0;) {
        block_enter(way);
        LIB(fsdp_backward_begin(b->unit[l], b->s, &view));
        block_leave_hook(way);
        find_params(way, &view, params);
        find_grads(way, &view, grads);
        if (compute) block_backward(way->math, l, params, grads);
        block_enter(way);
        LIB(fsdp_backward_end(b->unit[l], b->s));
        block_leave_hook(way);
    }
    block_enter(way);
    LIB(fsdp_pass_end(b->model, b->s));
    block_leave_hook(way);
    const fsdp_adamw_args args = update_args(way);
    block_enter(way);
    if (compute) {
        LIB(fsdp_adamw_step(b->opt, &args, b->s));
    } else {
        LIB(fsdp_update_begin(b->model, b->s));
        LIB(fsdp_update_end(b->model, b->s));
    }
    block_leave_update(way);
}

static void library_barrier(block_way *way)
{
    library *b = way->self;
    LIB(fsdp_barrier(fsdp_context_comm(b->ctx), b->s, NULL));
}

static void drop_graph(library *b)
{
    fsdp_capture_destroy(b->capture);
    b->capture = NULL;
    if (b->exec == NULL) return;
    CUDA(cudaGraphExecDestroy(b->exec));
    CUDA(cudaGraphDestroy(b->graph));
    b->exec = NULL;
}

static void library_capture(block_way *way)
{
    library *b = way->self;
    drop_graph(b);
    LIB(fsdp_capture_begin(b->ctx, b->s));
    CUDA(cudaStreamBeginCapture(way->stream, cudaStreamCaptureModeThreadLocal));
    library_step(way, true);
    LIB(fsdp_capture_end(b->ctx, b->s, &b->capture));
    CUDA(cudaStreamEndCapture(way->stream, &b->graph));
    block_stage = "instantiating the graph";
    CUDA(cudaGraphInstantiate(&b->exec, b->graph, cudaGraphInstantiateFlagUseNodePriority));
    block_stage = "replaying";
}

static void library_replay(block_way *way)
{
    library *b = way->self;
    const fsdp_adamw_args args = update_args(way);
    LIB(fsdp_replay(b->capture, 1, &args, b->s));
    CUDA(cudaGraphLaunch(b->exec, way->stream));
    LIB(fsdp_replayed(b->capture, b->s));
}

/* One step as a picture, and where compute's stream stood. */
static void library_draw(block_way *way, const char *path)
{
    library *b = way->self;
    fsdp_trace *trace;
    fsdp_trace_summary sum = FSDP_TRACE_SUMMARY_INIT;
    char title[160];
    LIB(fsdp_trace_start(b->ctx, 1 << 16, &trace));
    library_step(way, true);
    LIB(fsdp_trace_stop_host(trace));
    LIB(fsdp_trace_summarize(trace, b->s, &sum));
    if (way->launch.rank == 0) {
        snprintf(title, sizeof title,
                 "%u blocks of width %u, %u ranks, depth %u: exposed gathers %.2f ms, reductions %.2f ms of %.2f ms",
                 way->options->layers, way->options->dim, way->launch.world, way->options->depth,
                 (double)sum.exposed_gather_ns * 1e-6, (double)sum.exposed_reduce_ns * 1e-6,
                 (double)sum.span_ns * 1e-6);
        fprintf(stderr, "%s; gathers took %.2f ms, reductions %.2f ms\n", title, (double)sum.gather_ns * 1e-6,
                (double)sum.reduce_ns * 1e-6);
        LIB(fsdp_trace_write_svg(trace, path, title));
    }
    fsdp_trace_destroy(trace);
}

static void library_look(block_way *way)
{
    library *b = way->self;
    fsdp_counters counters = FSDP_COUNTERS_INIT;
    fsdp_model_stats stats = FSDP_MODEL_STATS_INIT;
    fsdp_nccl_info info = FSDP_NCCL_INFO_INIT;
    LIB(fsdp_context_counters(b->ctx, &counters));
    LIB(fsdp_model_stats_get(b->model, &stats));
    LIB(fsdp_nccl_info_get(b->ctx, &info));
    way->device_bytes = counters.device_bytes_peak;
    way->gathers = stats.gathers;
    memcpy(way->path, info.path, sizeof way->path);
}

static void library_close(block_way *way)
{
    library *b = way->self;
    CUDA(cudaDeviceSynchronize());
    drop_graph(b); /* NCCL waits for graphs that hold its collectives */
    LIB(fsdp_model_destroy(b->model));
    LIB(fsdp_stream_release(b->s));
    LIB(fsdp_context_destroy(b->ctx));
    free(b);
}

/* ---- Opening ---- */

static void warn(void *arg, const char *text)
{
    if (*(const uint32_t *)arg == 0) fprintf(stderr, "bench: warning: %s\n", text);
}

static void open_context(block_way *way, library *b)
{
    ncclConfig_t tuned;
    block_nccl_config(way->options, &tuned);
    fsdp_nccl_config nccl = FSDP_NCCL_CONFIG_INIT;
    nccl.windows = (way->options->window ? FSDP_NCCL_WINDOW_GATHER : 0u) |
                   (way->options->window_grad ? FSDP_NCCL_WINDOW_GRAD : 0u);
    if (way->options->cta_zero) nccl.config = &tuned;
    fsdp_cuda_config cuda = FSDP_CUDA_CONFIG_INIT;
    cuda.device = way->device;
    if (way->launch.world > 1) cuda.launch = &way->launch;
    cuda.nccl = &nccl;
    fsdp_config config = FSDP_CONFIG_INIT;
    config.backend = fsdp_cuda_backend();
    config.backend_config = &cuda;
    config.reduce_comm = way->options->comms == 2;
    config.log = warn;
    config.log_arg = &way->launch.rank;
    LIB(fsdp_context_create(&config, &b->ctx));
    LIB(fsdp_cuda_stream_wrap(b->ctx, way->stream, "compute", &b->s));
}

typedef struct fill_args {
    const block_options *o;
    block_scales scales;
} fill_args;

static int fill(void *arg, const fsdp_param_range *range, void *dst)
{
    const fill_args *f = arg;
    uint32_t layer, param;
    if (sscanf(fsdp_param_name(range->param), "h.%u.%u", &layer, &param) != 2 || param > BLOCK_PARAMS) return 1;
    const bool pad = param == BLOCK_PARAMS;
    const uint64_t at = (pad ? 0 : block_unit_offset(f->o, (int)param)) + range->begin;
    for (uint64_t i = 0; i < range->count; i++)
        ((float *)dst)[i] = pad ? 0.0f : block_first_value(layer, f->o->dim, f->scales, at + i);
    return 0;
}

static void open_model(block_way *way, library *b)
{
    const uint64_t d = way->options->dim;
    const uint64_t pad = way->options->pad == 0
                             ? 0
                             : block_padded_elems(way->options, way->launch.world) - block_unit_elems(way->options);
    const uint64_t dims[BLOCK_PARAMS + 1][2] = {{4 * d, d}, {4 * d, 1}, {d, 4 * d}, {d, 1}, {pad, 1}};
    for (int i = 0; i <= BLOCK_PARAMS; i++) {
        const bool left_out = i == BLOCK_PARAMS ? pad == 0 : i % 2 == 1 && way->options->no_bias;
        if (!left_out) b->place[b->n_params++] = i;
    }
    fsdp_model_config config = FSDP_MODEL_CONFIG_INIT;
    config.depth = way->options->depth;
    LIB(fsdp_model_create(b->ctx, &config, &b->model));
    fsdp_unit_config unit = FSDP_UNIT_CONFIG_INIT;
    unit.compute_dtype = FSDP_DTYPE_BF16;
    unit.zero_grads = pad > 0; /* the kernels write every element, but for a pad's */
    for (uint32_t l = 0; l < way->options->layers; l++) {
        char name[32];
        snprintf(name, sizeof name, "h.%u", l);
        LIB(fsdp_model_add_unit(b->model, name, &unit, &b->unit[l]));
        for (int i = 0; i < b->n_params; i++) {
            const int place = b->place[i];
            snprintf(name, sizeof name, "h.%u.%d", l, place);
            LIB(fsdp_unit_add_param(b->unit[l], name, place == 0 || place == 2 ? 2 : 1, dims[place], NULL, NULL));
        }
    }
    LIB(fsdp_adamw_create(b->model, NULL, &b->opt)); /* its defaults are PyTorch's */
    fsdp_memory memory = FSDP_MEMORY_INIT;
    LIB(fsdp_model_predict(b->model, &memory));
    LIB(fsdp_model_seal(b->model));
    way->predicted_bytes = memory.total;
    fill_args args = {way->options, block_first_scales(way->options->dim)};
    LIB(fsdp_model_fill(b->model, fill, &args, FSDP_DTYPE_FP32));
}

void block_library_open(block_way *way)
{
    library *b = calloc(1, sizeof *b);
    if (b == NULL) BENCH_FAIL("no memory");
    way->self = b;
    way->step = library_step;
    way->barrier = library_barrier;
    way->capture = library_capture;
    way->replay = library_replay;
    way->draw = library_draw;
    way->look = library_look;
    way->close = library_close;
    open_context(way, b);
    open_model(way, b);
}
