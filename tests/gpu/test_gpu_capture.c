/* SPDX-License-Identifier: MIT */
/* Captured steps as CUDA graphs, alone and with NCCL's collectives in them: replays, each with its own learning rate, end in
 * the bits of eager steps; what CUDA would refuse is refused before, by name; graph, capture, model and context go in any
 * order. A process a rank, two of them on one GPU, which NCCL takes for two machines. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <string.h>

#include "captured.h"
#include "fsdp/cuda.h"
#include "gpu_expect.h"
#include "gpu_ranks.h"

enum { NO_GPU = 77, RUN_S = 150 };
static const uint64_t second_ns = 1000000000;

typedef struct job {
    fsdp_launch launch;
    uint32_t world;
    captured_config config;
    uint64_t jitter_ns;
    bool reduce_comm;
} job;

#define CUDA(call)                                                                           \
    do {                                                                                     \
        cudaError_t error_ = (call);                                                         \
        if (error_ == cudaSuccess) break;                                                    \
        processes_complain(__FILE__, __LINE__, "%s: %s", #call, cudaGetErrorString(error_)); \
        return false;                                                                        \
    } while (0)

/* ---- Graphs ---- */

typedef struct cuda_graph {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
} cuda_graph;

static cuda_graph made[2]; /* the newest, and one that is being replaced */
static uint32_t n_made;

static int begin(void *arg, fsdp_stream *s)
{
    (void)arg;
    return cudaStreamBeginCapture(fsdp_cuda_stream(s), cudaStreamCaptureModeThreadLocal) != cudaSuccess;
}

static int end(void *arg, fsdp_stream *s, void **out_graph)
{
    cuda_graph *g = &made[n_made++ % 2];
    size_t n_nodes = 0;
    (void)arg;
    *g = (cuda_graph){NULL, NULL};
    cudaError_t error = cudaStreamEndCapture(fsdp_cuda_stream(s), &g->graph);
    if (error == cudaSuccess) error = cudaGraphGetNodes(g->graph, NULL, &n_nodes);
    if (error == cudaSuccess) error = cudaGraphInstantiate(&g->exec, g->graph, cudaGraphInstantiateFlagUseNodePriority);
    if (error != cudaSuccess) printf("a graph of %zu nodes: %s\n", n_nodes, cudaGetErrorString(error));
    *out_graph = g;
    return error != cudaSuccess;
}

static int launch(void *arg, void *graph, fsdp_stream *s)
{
    (void)arg;
    return cudaGraphLaunch(((cuda_graph *)graph)->exec, fsdp_cuda_stream(s)) != cudaSuccess;
}

static void destroy(void *arg, void *graph)
{
    cuda_graph *g = graph;
    (void)arg;
    if (g->exec != NULL) (void)cudaGraphExecDestroy(g->exec);
    if (g->graph != NULL) (void)cudaGraphDestroy(g->graph);
    *g = (cuda_graph){NULL, NULL};
}

static const captured_graphs graphs = {NULL, begin, end, launch, destroy};

/* ---- Ranks ---- */

static bool open_context(const job *j, uint32_t rank, uint32_t debug, fsdp_context **out_ctx)
{
    fsdp_launch where = j->launch;
    where.rank = where.local_rank = rank;
    where.world = where.local_world = j->world;
    fsdp_cuda_config cuda = FSDP_CUDA_CONFIG_INIT;
    cuda.launch = j->world > 1 ? &where : NULL;
    cuda.jitter_ns = j->jitter_ns;
    fsdp_config config = FSDP_CONFIG_INIT;
    config.backend = fsdp_cuda_backend();
    config.backend_config = &cuda;
    config.reduce_comm = j->reduce_comm;
    config.debug = debug;
    config.timeout_ns = 40 * second_ns;
    MUST(fsdp_context_create(&config, out_ctx));
    return true;
}

static captured_result eager_result, graph_result;

static bool compare_runs(uint32_t rank, void *arg)
{
    const job *j = arg;
    fsdp_context *ctx;
    gpu_rank_environment(rank);
    if (!open_context(j, rank, 0, &ctx)) return false;
    if (captured_run(&j->config, ctx, NULL, &eager_result) != FSDP_OK) {
        processes_complain(__FILE__, __LINE__, "eager: %.900s", eager_result.why);
        return false;
    }
    if (captured_run(&j->config, ctx, &graphs, &graph_result) != FSDP_OK) {
        processes_complain(__FILE__, __LINE__, "captured: %.900s", graph_result.why);
        return false;
    }
    MUST(fsdp_context_destroy(ctx));
    const char *what = captured_difference(&graph_result, &eager_result);
    if (what != NULL) processes_complain(__FILE__, __LINE__, "%s, rank %u: %s differ", j->config.script, rank, what);
    if (rank == 0)
        printf("world %u, %-30s host time: eager step %.1f us, replay %.1f us beside the graph's launch\n", j->world,
               j->config.script, (double)eager_result.eager_ns / (double)eager_result.n_eager / 1000.0,
               (double)graph_result.replay_ns / (double)graph_result.n_replays / 1000.0);
    return what == NULL;
}

#define TWENTY "RRRRRRRRRRRRRRRRRRRR"

static const job jobs[] = {
    {.config = {.script = "EC" TWENTY "ERRVRE", .depth = 1}},
    {.config = {.script = "EECRRSrERCRR", .depth = 1, .second = true}},
    {.config = {.script = "ECRR2RR2RERR", .depth = 1, .scratch = true}, .jitter_ns = 50000},
    {.config = {.script = "ECRRVRSrER", .depth = 2, .held = true, .second = true, .scratch = true},
     .reduce_comm = true},
    {.config = {.script = "ECRRRERR", .depth = 1, .n_inside = 3, .second = true}},
    {.config = {.script = "ECRNRRNERVRNR", .depth = 1, .second = true, .scratch = true}, .jitter_ns = 20000},
};

static void run_jobs(uint32_t world)
{
    for (size_t i = 0; i < sizeof jobs / sizeof *jobs; i++) {
        job j = jobs[i];
        j.world = world;
        j.launch = processes_launch(PROCESSES_BY_TCP);
        const char *failure = processes_run(world, RUN_S * second_ns, compare_runs, &j);
        if (failure != NULL) fail_msg("world %u, %s: %s", world, j.config.script, failure);
    }
}

static void a_rank_alone_replays_to_the_bits_of_eager_steps(void **state)
{
    (void)state;
    run_jobs(1);
}

static void two_ranks_replay_their_collectives_too(void **state)
{
    (void)state;
    run_jobs(2);
}

/* ---- Refusals ---- */

static bool is_refused(fsdp_status status, fsdp_status code, const char *words)
{
    EXPECT(status == code);
    EXPECT(strstr(fsdp_last_error(), words) != NULL);
    return true;
}

#define REFUSED(call, code, words) EXPECT(is_refused((call), (code), (words)))

static bool open_and_step(const job *j, uint32_t debug, fsdp_context **ctx, captured *t)
{
    fsdp_adamw_args args = FSDP_ADAMW_ARGS_INIT;
    if (!open_context(j, 0, debug, ctx)) return false;
    MUST(captured_open(t, &j->config, *ctx));
    MUST(captured_batch(t, t->s));
    MUST(captured_step(t, &args));
    t->n_steps++;
    return true;
}

/* None of these may disturb the capture. */
static bool refuse_inside(fsdp_context *ctx, captured *t, fsdp_event *before, cudaStream_t native)
{
    fsdp_step_report report = FSDP_STEP_REPORT_INIT;
    fsdp_stream *wrapped;
    void *ptr;
    bool done;
    REFUSED(fsdp_capture_begin(ctx, t->s), FSDP_ERR_STATE, "a capture is on");
    REFUSED(fsdp_cuda_stream_wrap(ctx, native, "late", &wrapped), FSDP_ERR_STATE, "a capture is on");
    REFUSED(fsdp_stream_drain_host(t->s, 1), FSDP_ERR_STATE, "a capture is on");
    REFUSED(fsdp_event_is_done(before, &done), FSDP_ERR_STATE, "a capture is on");
    REFUSED(fsdp_step_report_get(t->model, 1, 1, &report), FSDP_ERR_STATE, "a capture is on");
    REFUSED(fsdp_allocator_alloc(t->allocator, 1u << 28, t->s, "big", &ptr), FSDP_ERR_STATE, "a capture is on");
    REFUSED(fsdp_pinned_alloc(ctx, 64, &ptr), FSDP_ERR_STATE, "a capture is on");
    REFUSED(fsdp_model_destroy(t->model), FSDP_ERR_STATE, "a capture is on");
    return true;
}

static bool replay(fsdp_capture *capture, const cuda_graph *g, captured *t, uint64_t step)
{
    fsdp_adamw_args args = FSDP_ADAMW_ARGS_INIT;
    fsdp_step_report report = FSDP_STEP_REPORT_INIT;
    MUST(fsdp_replay(capture, 1, &args, t->s));
    CUDA(cudaGraphLaunch(g->exec, fsdp_cuda_stream(t->s)));
    MUST(fsdp_replayed(capture, t->s));
    MUST(fsdp_step_report_get(t->model, step, 40 * second_ns, &report));
    EXPECT(report.step == step && report.updates == step && !report.skipped);
    return true;
}

/* The graph is whole, and thrown away; the model goes on. */
static bool end_elsewhere(fsdp_context *ctx, captured *t)
{
    fsdp_capture *none = NULL;
    fsdp_view view = FSDP_VIEW_INIT;
    fsdp_pass_args pass = FSDP_PASS_ARGS_INIT;
    cudaGraph_t thrown;
    MUST(fsdp_capture_begin(ctx, t->s));
    EXPECT(begin(NULL, t->s) == 0);
    MUST(fsdp_pass_begin(t->model, &pass, t->s));
    MUST(fsdp_forward_begin(t->unit[2], t->s, &view));
    REFUSED(fsdp_capture_end(ctx, t->s, &none), FSDP_ERR_STATE, "unit h2 is open");
    CUDA(cudaStreamEndCapture(fsdp_cuda_stream(t->s), &thrown));
    CUDA(cudaGraphDestroy(thrown));
    return true;
}

/* CUDA is capturing, and fsdp_capture_begin was not called. */
static bool refuse_unannounced(fsdp_context *ctx, captured *t)
{
    fsdp_pass_args pass = FSDP_PASS_ARGS_INIT;
    cudaGraph_t empty;
    EXPECT(begin(NULL, t->s) == 0);
    REFUSED(fsdp_pass_begin(t->model, &pass, t->s), FSDP_ERR_STATE, "is being captured, and the library was not told");
    REFUSED(fsdp_capture_begin(ctx, t->s), FSDP_ERR_STATE, "call fsdp_capture_begin before the capture begins");
    REFUSED(fsdp_model_destroy(t->model), FSDP_ERR_STATE, "fsdp_model_destroy: a stream is being captured");
    fsdp_allocator *pool;
    MUST(fsdp_allocator_create(ctx, NULL, &pool));
    REFUSED(fsdp_allocator_destroy(pool), FSDP_ERR_STATE, "fsdp_allocator_destroy: a stream is being captured");
    CUDA(cudaStreamEndCapture(fsdp_cuda_stream(t->s), &empty));
    CUDA(cudaGraphDestroy(empty));
    MUST(fsdp_allocator_destroy(pool));
    return true;
}

static bool refuse(uint32_t rank, void *arg)
{
    captured t;
    fsdp_context *ctx;
    fsdp_adamw_args args = FSDP_ADAMW_ARGS_INIT;
    fsdp_capture *capture = NULL;
    fsdp_event *event;
    cudaStream_t native;
    cuda_graph g;
    gpu_rank_environment(rank);
    if (!open_and_step(arg, 0, &ctx, &t)) return false;
    MUST(fsdp_event_create(ctx, &event));
    MUST(fsdp_event_record(event, t.s));
    CUDA(cudaStreamCreateWithFlags(&native, cudaStreamNonBlocking));
    if (!refuse_unannounced(ctx, &t)) return false;
    MUST(fsdp_capture_begin(ctx, t.s));
    EXPECT(begin(NULL, t.s) == 0);
    if (!refuse_inside(ctx, &t, event, native)) return false;
    MUST(fsdp_stream_wait_event(t.s, event));
    MUST(captured_step(&t, &args));
    MUST(fsdp_capture_end(ctx, t.s, &capture));
    CUDA(cudaStreamEndCapture(fsdp_cuda_stream(t.s), &g.graph));
    CUDA(cudaGraphInstantiate(&g.exec, g.graph, 0));
    REFUSED(fsdp_replay(capture, 2, &args, t.s), FSDP_ERR_ARG, "2 fsdp_adamw_args");
    if (!replay(capture, &g, &t, 2)) return false;
    if (!end_elsewhere(ctx, &t)) return false;
    MUST(captured_step(&t, &args));
    if (!replay(capture, &g, &t, 4)) return false;
    fsdp_capture_destroy(capture);
    fsdp_event_destroy(event);
    MUST(captured_close(&t));
    destroy(NULL, &g);
    MUST(fsdp_context_destroy(ctx));
    CUDA(cudaStreamDestroy(native));
    return true;
}

static void what_cuda_would_refuse_is_refused_before(void **state)
{
    (void)state;
    job j = {.world = 1, .config = {.depth = 1}};
    const char *failure = processes_run(1, RUN_S * second_ns, refuse, &j);
    if (failure != NULL) fail_msg("%s", failure);
}

/* ---- Ends ---- */

static bool go_in_order(uint32_t rank, void *arg)
{
    static const char *const orders[] = {"cgmx", "cmgx", "gcmx", "gmcx", "mcgx", "mgcx", "cmxg", "mcxg"};
    gpu_rank_environment(rank);
    for (size_t k = 0; k < sizeof orders / sizeof *orders; k++) {
        captured t;
        fsdp_context *ctx;
        fsdp_adamw_args args = FSDP_ADAMW_ARGS_INIT;
        fsdp_capture *capture;
        void *graph;
        if (!open_and_step(arg, 0, &ctx, &t)) return false;
        MUST(fsdp_capture_begin(ctx, t.s));
        EXPECT(begin(NULL, t.s) == 0);
        MUST(captured_step(&t, &args));
        MUST(fsdp_capture_end(ctx, t.s, &capture));
        EXPECT(end(NULL, t.s, &graph) == 0);
        MUST(fsdp_replay(capture, 1, &args, t.s));
        EXPECT(launch(NULL, graph, t.s) == 0);
        MUST(fsdp_replayed(capture, t.s));
        for (const char *what = orders[k]; *what != 0; what++) {
            if (*what == 'c') fsdp_capture_destroy(capture);
            if (*what == 'g') destroy(NULL, graph);
            if (*what == 'm') MUST(captured_close(&t));
            if (*what == 'x') MUST(fsdp_context_destroy(ctx));
        }
    }
    CUDA(cudaDeviceSynchronize());
    return true;
}

static void graph_capture_model_and_context_go_in_any_order(void **state)
{
    (void)state;
    job j = {.world = 1, .config = {.depth = 1, .scratch = true}};
    const char *failure = processes_run(1, RUN_S * second_ns, go_in_order, &j);
    if (failure != NULL) fail_msg("%s", failure);
}

int main(void)
{
    if (gpu_is_missing_here("test_gpu_capture")) return NO_GPU;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_rank_alone_replays_to_the_bits_of_eager_steps),
        cmocka_unit_test(two_ranks_replay_their_collectives_too),
        cmocka_unit_test(what_cuda_would_refuse_is_refused_before),
        cmocka_unit_test(graph_capture_model_and_context_go_in_any_order),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
