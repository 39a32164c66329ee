/* SPDX-License-Identifier: MIT */
/* The CUDA device passes the conformance suites, and keeps what only it promises. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../conformance/device_suite.h"
#include "fsdp/fsdp.h"
#include "gpu_suites.h"
#include "hostmem.h"

enum { NO_GPU = 77, DEADLINE_S = 60 };

static device_suite suite; /* set by main */

/* ---- Waiting on the host ---- */

typedef struct waiting {
    fixture *f;
    pthread_t thread;
    fsdp_status status;
    atomic_bool woken;
} waiting;

static void *wait_for_event_0(void *arg)
{
    waiting *w = arg;
    w->status = w->f->ops->event_wait(w->f->dev, w->f->event[0], UINT64_MAX);
    atomic_store(&w->woken, true);
    return NULL;
}

/* More than there are places to sleep in. */
static void many_threads_may_wait_for_one_event(void **state)
{
    fixture *f = *state;
    enum { N = 7 };
    waiting w[N];
    close_gate(f, 0, 0);
    record(f, 0, 0);
    for (int i = 0; i < N; i++) {
        w[i].f = f;
        atomic_init(&w[i].woken, false);
        assert_int_equal(pthread_create(&w[i].thread, NULL, wait_for_event_0, &w[i]), 0);
    }
    assert_int_equal(f->ops->event_wait(f->dev, f->event[0], 20000000), FSDP_ERR_TIMEOUT);
    for (int i = 0; i < N; i++) assert_false(atomic_load(&w[i].woken));
    open_gate(f, 0);
    for (int i = 0; i < N; i++) {
        pthread_join(w[i].thread, NULL);
        assert_int_equal(w[i].status, FSDP_OK);
    }
}

/* Whoever checks his own kernels by cudaGetLastError finds nothing of ours there. */
static void queries_leave_the_callers_last_error_alone(void **state)
{
    fixture *f = *state;
    close_gate(f, 0, 0);
    record(f, 0, 0);
    assert_false(is_done(f, 0));
    assert_int_equal(f->ops->event_wait(f->dev, f->event[0], 2000000), FSDP_ERR_TIMEOUT);
    assert_int_equal(f->ops->stream_drain(f->dev, f->stream[0], 2000000), FSDP_ERR_TIMEOUT);
    CUDA(cudaPeekAtLastError());
    open_gate(f, 0);
}

/* A wait that gives up leaves nothing behind. */
static void waits_that_gave_up_do_not_wake_later_ones(void **state)
{
    fixture *f = *state;
    for (int round = 0; round < 3; round++) {
        close_gate(f, 0, 0);
        record(f, 0, 0);
        for (int i = 0; i < 6; i++)
            assert_int_equal(f->ops->event_wait(f->dev, f->event[0], 2000000), FSDP_ERR_TIMEOUT);
        close_gate(f, 1, 1);
        record(f, 1, 1);
        open_gate(f, 0);
        DO(f->ops->event_wait(f->dev, f->event[0], UINT64_MAX));
        assert_int_equal(f->ops->event_wait(f->dev, f->event[1], 20000000), FSDP_ERR_TIMEOUT);
        assert_false(is_done(f, 1));
        open_gate(f, 1);
        DO(f->ops->event_wait(f->dev, f->event[1], UINT64_MAX));
    }
}

/* ---- Captures ---- */

/* In the strictest mode CUDA refuses these calls to every thread; ours are no part of the capture. */
static void queries_and_memory_work_while_a_stream_captures(void **state)
{
    fixture *f = *state;
    cudaStream_t other;
    cudaGraph_t graph = NULL;
    void *ptr = NULL;
    CUDA(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    char *x = fixture_block(f, 64);
    launch(f, 0, (fsdp_device_op){.kind = FSDP_OPERATION_FILL, .u.fill = {x, 64, 1}}, NULL);
    record(f, 0, 0);
    CUDA(cudaStreamBeginCapture(other, cudaStreamCaptureModeGlobal));
    (void)is_done(f, 0);
    DO(f->ops->event_wait(f->dev, f->event[0], UINT64_MAX));
    drain(f, 0);
    DO(f->ops->mem_alloc(f->dev, f->caps.granularity, FSDP_MEMORY_KIND_DEVICE, &ptr));
    f->ops->mem_free(f->dev, ptr, f->caps.granularity, FSDP_MEMORY_KIND_DEVICE);
    CUDA(cudaMemsetAsync(x, 2, 64, other));
    CUDA(cudaStreamEndCapture(other, &graph));
    assert_non_null(graph);
    CUDA(cudaGraphDestroy(graph));
    CUDA(cudaStreamDestroy(other));
    DO(f->ops->check(f->dev));
}

static cudaStream_t native_of(const fixture *f, int stream) { return ((fsdp__cuda_stream *)f->stream[stream])->native; }

/* Also where somebody asks for the last one, so that another record would need another event of CUDA's. */
static void a_record_that_fails_leaves_the_last_one(void **state)
{
    fixture *f = *state;
    cudaGraph_t graph = NULL;
    waiting w = {.f = f};
    close_gate(f, 0, 0);
    record(f, 0, 0);
    assert_int_equal(pthread_create(&w.thread, NULL, wait_for_event_0, &w), 0);
    assert_int_equal(f->ops->event_wait(f->dev, f->event[0], 50000000), FSDP_ERR_TIMEOUT); /* he is there, too */
    CUDA(cudaStreamBeginCapture(native_of(f, 0), cudaStreamCaptureModeRelaxed));
    assert_int_equal(cudaStreamQuery(native_of(f, 0)),
                     cudaErrorStreamCaptureUnsupported); /* which breaks the capture */
    assert_int_equal(f->ops->event_record(f->dev, f->event[0], f->stream[0], NULL), FSDP_ERR_STATE);
    assert_int_equal(cudaStreamEndCapture(native_of(f, 0), &graph), cudaErrorStreamCaptureInvalidated);
    (void)cudaGetLastError();
    assert_false(is_done(f, 0));
    assert_false(atomic_load(&w.woken));
    open_gate(f, 0);
    pthread_join(w.thread, NULL);
    assert_int_equal(w.status, FSDP_OK);
    DO(f->ops->check(f->dev));
}

/* ---- Square sums ---- */

/* Each stream has memory of its own for its blocks' sums. */
static void square_sums_of_two_streams_do_not_meet(void **state)
{
    fixture *f = *state;
    enum { STREAMS = 2, TIMES = 200, COUNT = 1 << 16 };
    float one = 1.0f, zero = 0.0f, sum;
    const fsdp_kernel_segment all = {0, COUNT, 1, 1};
    float *x = fixture_block(f, COUNT * sizeof *x), *out = fixture_block(f, STREAMS * 64 * sizeof *out);
    fsdp_kernel_segment *segments = fixture_block(f, sizeof all);
    CUDA(cudaMemcpy(x, &one, sizeof one, cudaMemcpyHostToDevice));
    for (uint64_t n = 1; n < COUNT; n *= 2) CUDA(cudaMemcpy(x + n, x, n * sizeof *x, cudaMemcpyDeviceToDevice));
    CUDA(cudaMemcpy(segments, &all, sizeof all, cudaMemcpyHostToDevice));
    for (int s = 0; s < STREAMS; s++) CUDA(cudaMemcpy(out + 64 * s, &zero, sizeof zero, cudaMemcpyHostToDevice));
    CUDA(cudaDeviceSynchronize());
    close_gate(f, 2, 0);
    record(f, 0, 2);
    for (int s = 0; s < STREAMS; s++) wait_event(f, s, 0);
    for (int i = 0; i < TIMES; i++) {
        for (int s = 0; s < STREAMS; s++) {
            fsdp_device_op op = {.kind = FSDP_OPERATION_SQUARE_SUM};
            op.u.square_sum.out = out + 64 * s, op.u.square_sum.x = x, op.u.square_sum.count = COUNT;
            op.u.square_sum.segments = segments, op.u.square_sum.n_segments = 1;
            op.u.square_sum.dtype = FSDP_DTYPE_FP32;
            launch(f, s, op, NULL);
        }
    }
    open_gate(f, 0);
    for (int s = 0; s < STREAMS; s++) {
        drain(f, s);
        CUDA(cudaMemcpy(&sum, out + 64 * s, sizeof sum, cudaMemcpyDeviceToHost));
        assert_float_equal(sum, (float)TIMES * COUNT, 0.0);
    }
}

/* ---- Jitter and times ---- */

static void jitter_delays_about_half_of_the_operations(void **state)
{
    (void)state;
    assert_jitter_delays(&suite);
}

/* Within 5 ms: they are two clocks. */
static void times_of_a_trace_are_in_the_hosts_clock(void **state)
{
    fixture *f = *state;
    fsdp_span span = {0, 0};
    const uint64_t apart_ns = SECOND /* other clocks began years apart */, before_ns = f->ops->now_ns(f->dev);
    launch(f, 0, (fsdp_device_op){.kind = FSDP_OPERATION_DELAY, .u.delay = {1000000}}, &span);
    drain(f, 0);
    const uint64_t after_ns = f->ops->now_ns(f->dev);
    assert_true(span.start_ns + apart_ns >= before_ns && span.end_ns <= after_ns + apart_ns);
}

/* ---- Configs ---- */

static fsdp_status open_device(const fsdp_cuda_config *config)
{
    void *dev = NULL;
    fsdp_host_allocator none = {NULL, NULL, NULL, NULL}, libc;
    DO(fsdp__host_allocator_resolve(&none, &libc));
    fsdp_device_args args = {sizeof args, config, &libc, 0, SECOND, NULL, NULL};
    fsdp_device_caps caps = {.size = sizeof caps};
    fsdp_status status = fsdp_cuda_backend()->device->open(&args, &dev, &caps);
    if (status == FSDP_OK) fsdp_cuda_backend()->device->close(dev);
    return status;
}

static void a_config_that_makes_no_sense_is_refused(void **state)
{
    (void)state;
    fsdp_cuda_config config = FSDP_CUDA_CONFIG_INIT;
    DO(open_device(&config));
    DO(open_device(NULL));
    config.device = 4711;
    assert_int_equal(open_device(&config), FSDP_ERR_DEVICE);
    assert_non_null(strstr(fsdp_last_error(), "fsdp_cuda_config.device is 4711: this process sees "));
    config.device = -2;
    assert_int_equal(open_device(&config), FSDP_ERR_ARG);
    config.device = -1;
    config.rank = 1;
    assert_int_equal(open_device(&config), FSDP_ERR_ARG);
    assert_string_equal(fsdp_last_error(), "fsdp_cuda_config.rank is 1 in a world of 1 (local and launch are NULL)");
    fsdp_launch launch = FSDP_LAUNCH_INIT;
    launch.world = 2;
    launch.local_world = 2;
    config.launch = &launch;
    assert_int_equal(open_device(&config), FSDP_ERR_ARG);
}

/* ---- Wrapped streams ---- */

static char logged[1024];

static void keep_log(void *arg, const char *line)
{
    (void)arg;
    snprintf(logged, sizeof logged, "%s", line);
}

static fsdp_context *create_context(const fsdp_backend *backend)
{
    fsdp_context *ctx = NULL;
    fsdp_config config = FSDP_CONFIG_INIT;
    config.backend = backend;
    config.log = keep_log;
    DO(fsdp_context_create(&config, &ctx));
    return ctx;
}

static cudaStream_t create_native(unsigned flags)
{
    cudaStream_t native = NULL;
    CUDA(cudaStreamCreateWithFlags(&native, flags));
    return native;
}

static void a_wrapped_stream_stays_the_callers(void **state)
{
    (void)state;
    fsdp_context *ctx = create_context(fsdp_cuda_backend());
    fsdp_stream *s = NULL, *again = NULL;
    int current = -1;
    CUDA(cudaGetDevice(&current));
    assert_int_equal(fsdp_cuda_device(ctx), current);
    cudaStream_t native = create_native(cudaStreamNonBlocking);
    logged[0] = 0;
    DO(fsdp_cuda_stream_wrap(ctx, native, "compute", &s));
    assert_string_equal(logged, "");
    assert_ptr_equal(fsdp_cuda_stream(s), native);
    assert_int_equal(fsdp_cuda_stream_wrap(ctx, native, "twice", &again), FSDP_ERR_STATE);
    assert_null(again);
    DO(fsdp_stream_release(s));
    CUDA(cudaStreamQuery(native));
    DO(fsdp_cuda_stream_wrap(ctx, native, "again", &again));
    DO(fsdp_stream_release(again));
    DO(fsdp_context_destroy(ctx));
    CUDA(cudaStreamDestroy(native));
}

/* What it was given before comes first for whoever waits for it. */
static void what_a_wrapped_stream_had_before_comes_first(void **state)
{
    (void)state;
    fsdp_context *ctx = create_context(fsdp_cuda_backend());
    fsdp_stream *s = NULL, *other = NULL;
    uint32_t *pinned = NULL, *device = NULL;
    cudaStream_t native = create_native(cudaStreamNonBlocking);
    CUDA(cudaHostAlloc((void **)&pinned, 4096, cudaHostAllocDefault));
    CUDA(cudaMalloc((void **)&device, 4096));
    CUDA(cudaMemset(device, 0, 4096));
    CUDA(cudaDeviceSynchronize());
    pinned[0] = pinned[1] = 0;
    DO(fsdp_stream_create(ctx, "other", &other));
    CUDA(gpu_hold(native, &pinned[0]));
    CUDA(cudaMemsetAsync(device, 0x11, 4, native));
    DO(fsdp_cuda_stream_wrap(ctx, native, "compute", &s));
    DO(fsdp_stream_wait_stream(other, s));
    DO(fsdp_stream_copy(other, &pinned[1], device, 4));
    assert_int_equal(fsdp_stream_drain_host(other, 20000000), FSDP_ERR_TIMEOUT);
    __atomic_store_n(&pinned[0], 1, __ATOMIC_SEQ_CST);
    DO(fsdp_stream_drain_host(other, UINT64_MAX));
    assert_int_equal(pinned[1], 0x11111111);
    DO(fsdp_stream_release(s));
    DO(fsdp_stream_release(other));
    DO(fsdp_context_destroy(ctx));
    CUDA(cudaFree(device));
    CUDA(cudaFreeHost(pinned));
    CUDA(cudaStreamDestroy(native));
}

static void blocking_streams_are_taken_with_a_warning(void **state)
{
    (void)state;
    fsdp_context *ctx = create_context(fsdp_cuda_backend());
    fsdp_stream *null = NULL, *blocking = NULL, *again = NULL;
    cudaStream_t native = create_native(cudaStreamDefault);
    logged[0] = 0;
    DO(fsdp_cuda_stream_wrap(ctx, NULL, "null", &null));
    assert_non_null(strstr(logged, "stream null is the NULL stream"));
    assert_int_equal(fsdp_cuda_stream_wrap(ctx, cudaStreamLegacy, "legacy", &again), FSDP_ERR_STATE);
    DO(fsdp_cuda_stream_wrap(ctx, native, "blocking", &blocking));
    assert_non_null(strstr(logged, "stream blocking is a blocking stream"));
    DO(fsdp_stream_delay(null, 1000));
    DO(fsdp_stream_wait_stream(blocking, null));
    DO(fsdp_stream_drain_host(blocking, UINT64_MAX));
    DO(fsdp_stream_release(null));
    DO(fsdp_stream_release(blocking));
    DO(fsdp_context_destroy(ctx));
    CUDA(cudaStreamDestroy(native));
}

/* Nothing of theirs is a part of what others capture, in whatever mode. */
static void contexts_come_and_go_while_a_stream_captures(void **state)
{
    (void)state;
    cudaStream_t native = create_native(cudaStreamDefault);
    cudaGraph_t graph = NULL;
    fsdp_trace *trace = NULL;
    CUDA(cudaStreamBeginCapture(native, cudaStreamCaptureModeGlobal));
    fsdp_context *ctx = create_context(fsdp_cuda_backend());
    DO(fsdp_trace_start(ctx, 16, &trace));
    DO(fsdp_trace_stop_host(trace));
    fsdp_trace_destroy(trace);
    DO(fsdp_context_destroy(ctx));
    CUDA(cudaStreamEndCapture(native, &graph));
    assert_non_null(graph);
    CUDA(cudaGraphDestroy(graph));
    CUDA(cudaStreamDestroy(native));
}

/* It may be busy, and nobody can ask. */
static void the_null_stream_is_kept_while_another_captures(void **state)
{
    (void)state;
    fsdp_context *ctx = create_context(fsdp_cuda_backend());
    fsdp_stream *null = NULL;
    cudaStream_t native = create_native(cudaStreamDefault);
    cudaGraph_t graph = NULL;
    DO(fsdp_cuda_stream_wrap(ctx, NULL, "null", &null));
    CUDA(cudaStreamBeginCapture(native, cudaStreamCaptureModeRelaxed));
    assert_int_equal(fsdp_stream_release(null), FSDP_ERR_STATE);
    CUDA(cudaStreamEndCapture(native, &graph)); /* the capture goes on all the same */
    CUDA(cudaGraphDestroy(graph));
    DO(fsdp_stream_release(null));
    DO(fsdp_context_destroy(ctx));
    CUDA(cudaStreamDestroy(native));
}

static void streams_that_cannot_be_wrapped_are_refused(void **state)
{
    (void)state;
    fsdp_context *ctx = create_context(fsdp_cuda_backend()), *host = create_context(fsdp_host_backend());
    fsdp_stream *s = NULL, *made[16] = {NULL};
    cudaStream_t native = create_native(cudaStreamNonBlocking);
    cudaGraph_t graph = NULL;
    assert_int_equal(fsdp_cuda_stream_wrap(ctx, cudaStreamPerThread, "mine", &s), FSDP_ERR_ARG);
    assert_int_equal(fsdp_cuda_stream_wrap(host, native, "mine", &s), FSDP_ERR_ARG);
    assert_int_equal(fsdp_cuda_device(host), -1);
    CUDA(cudaStreamBeginCapture(native, cudaStreamCaptureModeRelaxed));
    assert_int_equal(fsdp_cuda_stream_wrap(ctx, native, "mine", &s), FSDP_ERR_ARG);
    CUDA(cudaStreamEndCapture(native, &graph)); /* the capture goes on all the same */
    CUDA(cudaGraphDestroy(graph));
    int n = 0;
    while (n < 16 && fsdp_stream_create(ctx, "one more", &made[n]) == FSDP_OK) n++;
    assert_int_equal(fsdp_cuda_stream_wrap(ctx, native, "mine", &s), FSDP_ERR_STATE);
    DO(fsdp_stream_release(made[--n]));
    DO(fsdp_cuda_stream_wrap(ctx, native, "mine", &s));
    DO(fsdp_stream_release(s));
    while (n > 0) DO(fsdp_stream_release(made[--n]));
    DO(fsdp_context_destroy(ctx));
    DO(fsdp_context_destroy(host));
    CUDA(cudaStreamDestroy(native));
}

/* With two GPUs: the other one's streams are refused, and calls leave the current one alone. */
static void another_gpu_may_be_current_and_its_streams_are_refused(void **state)
{
    (void)state;
    int n = 0, current = -1;
    CUDA(cudaGetDeviceCount(&n));
    if (n < 2) skip();
    CUDA(cudaSetDevice(0));
    fsdp_context *ctx = create_context(fsdp_cuda_backend());
    fsdp_stream *s = NULL, *made = NULL;
    CUDA(cudaSetDevice(1));
    cudaStream_t native = create_native(cudaStreamNonBlocking);
    assert_int_equal(fsdp_cuda_stream_wrap(ctx, native, "elsewhere", &s), FSDP_ERR_ARG);
    assert_non_null(strstr(fsdp_last_error(), "it is a stream of GPU 1, the context's is GPU 0"));
    DO(fsdp_stream_create(ctx, "here", &made));
    DO(fsdp_stream_delay(made, 1000));
    DO(fsdp_stream_drain_host(made, UINT64_MAX));
    DO(fsdp_stream_release(made));
    DO(fsdp_context_destroy(ctx));
    CUDA(cudaGetDevice(&current));
    assert_int_equal(current, 1);
    CUDA(cudaStreamDestroy(native));
    CUDA(cudaSetDevice(0));
}

/* ---- Memory ---- */

/* Host memory that CUDA does not know can be copied, not filled; nothing is broken by asking. */
static void a_fill_of_memory_that_is_not_the_gpus_is_refused(void **state)
{
    fixture *f = *state;
    static char pageable[64];
    fsdp_device_op op = {.kind = FSDP_OPERATION_FILL, .u.fill = {pageable, sizeof pageable, 1}};
    int reads_all = 0; /* a GPU that reads and writes all of the host's memory fills it */
    CUDA(cudaDeviceGetAttribute(&reads_all, cudaDevAttrPageableMemoryAccess, 0));
    if (reads_all) skip();
    assert_int_equal(f->ops->launch(f->dev, f->stream[0], &op, NULL), FSDP_ERR_ARG);
    assert_non_null(strstr(fsdp_last_error(), "are no memory of the GPU, nor page-locked"));
    DO(f->ops->check(f->dev));
    CUDA(cudaPeekAtLastError());
}

static uint64_t free_bytes(void)
{
    size_t bytes = 0, total = 0;
    CUDA(cudaMemGetInfo(&bytes, &total));
    return bytes;
}

static void what_is_counted_is_what_the_gpu_gave(void **state)
{
    (void)state;
    fsdp_context *ctx = create_context(fsdp_cuda_backend());
    fsdp_stream *s = NULL;
    fsdp_allocator *a = NULL;
    void *ptr[4];
    const uint64_t bytes[4] = {1, 3 << 20, (uint64_t)70 << 20, 5000000};
    DO(fsdp_stream_create(ctx, "compute", &s));
    fsdp_allocator_config config = FSDP_ALLOCATOR_CONFIG_INIT;
    config.segment_bytes = 2 << 20;
    DO(fsdp_allocator_create(ctx, &config, &a));
    const uint64_t before = free_bytes();
    for (int i = 0; i < 4; i++) {
        DO(fsdp_allocator_alloc(a, bytes[i], s, NULL, &ptr[i]));
        fsdp_counters counters = FSDP_COUNTERS_INIT;
        DO(fsdp_context_counters(ctx, &counters));
        assert_int_equal(before - free_bytes(), counters.device_bytes);
    }
    for (int i = 0; i < 4; i++) DO(fsdp_allocator_free(a, ptr[i]));
    DO(fsdp_allocator_destroy(a));
    assert_int_equal(free_bytes(), before);
    DO(fsdp_stream_release(s));
    DO(fsdp_context_destroy(ctx));
}

/* ---- A GPU that breaks: in a process of its own, before this one has touched CUDA ---- */

static char broken_words[4096];
static int broken_code = -1;

static int break_the_gpu(int out)
{
    alarm(DEADLINE_S);
    int n = 0;
    if (cudaGetDeviceCount(&n) != cudaSuccess || n == 0) return NO_GPU;
    fsdp_context *ctx = NULL;
    fsdp_stream *s = NULL;
    fsdp_config config = FSDP_CONFIG_INIT;
    config.backend = fsdp_cuda_backend();
    if (fsdp_context_create(&config, &ctx) != FSDP_OK || fsdp_stream_create(ctx, "compute", &s) != FSDP_OK ||
        gpu_store_nowhere(fsdp_cuda_stream(s)) != cudaSuccess) {
        dprintf(out, "setup: %s", fsdp_last_error());
        return 1;
    }
    int wrong = fsdp_stream_drain_host(s, UINT64_MAX) != FSDP_ERR_DEVICE;
    dprintf(out, "%s", fsdp_last_error());
    wrong |= (fsdp_stream_delay(s, 1) != FSDP_ERR_DEVICE) << 1; /* and so it stays */
    dprintf(out, "\n%s", fsdp_last_error());
    wrong |= (fsdp_stream_release(s) != FSDP_OK) << 2; /* all can be given back */
    wrong |= (fsdp_context_destroy(ctx) != FSDP_OK) << 3;
    return wrong;
}

static void start_breaking(void)
{
    int ends[2], code = 0;
    if (pipe(ends) != 0) exit(1);
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) _exit(break_the_gpu(ends[1]));
    close(ends[1]);
    size_t n = 0;
    for (ssize_t got; (got = read(ends[0], broken_words + n, sizeof broken_words - 1 - n)) > 0;) n += (size_t)got;
    close(ends[0]);
    if (child < 0 || waitpid(child, &code, 0) != child) exit(1);
    broken_code = WIFEXITED(code) ? WEXITSTATUS(code) : -1;
}

static void an_error_of_the_gpu_is_told_by_its_name_and_stays(void **state)
{
    (void)state;
    if (broken_code != 0) fail_msg("exit code %d: %s", broken_code, broken_words);
    char *second = strchr(broken_words, '\n');
    assert_non_null(second);
    *second++ = 0;
    assert_non_null(strstr(broken_words, "cudaErrorIllegalAddress"));
    assert_non_null(strstr(broken_words, "found by cuda"));
    assert_non_null(strstr(second, "cudaErrorIllegalAddress"));
}

/* ---- All ---- */

#define ON_A_DEVICE(name)                                    \
    {                                                        \
#name, name, fixture_setup, fixture_teardown, &suite \
    }

int main(void)
{
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1); /* a held stream must not hold others by chance */
    start_breaking();
    if (broken_code == NO_GPU || gpu_is_missing("test_gpu_device")) {
        if (broken_code == NO_GPU) puts("test_gpu_device is skipped: no GPU");
        return NO_GPU;
    }
    cudaError_t error = gpu_load_kernels();
    if (error != cudaSuccess) {
        printf("the test's kernels do not load: %s\n", cudaGetErrorString(error));
        return 1;
    }
    suite = (device_suite){.backend = fsdp_cuda_backend(),
                           .config = gpu_config,
                           .hold = gpu_hold_stream,
                           .max_queued = 500,
                           .runs_on = true};
    const struct CMUnitTest own[] = {
        ON_A_DEVICE(many_threads_may_wait_for_one_event),
        ON_A_DEVICE(queries_leave_the_callers_last_error_alone),
        ON_A_DEVICE(waits_that_gave_up_do_not_wake_later_ones),
        ON_A_DEVICE(queries_and_memory_work_while_a_stream_captures),
        ON_A_DEVICE(a_record_that_fails_leaves_the_last_one),
        ON_A_DEVICE(square_sums_of_two_streams_do_not_meet),
        ON_A_DEVICE(times_of_a_trace_are_in_the_hosts_clock),
        cmocka_unit_test(jitter_delays_about_half_of_the_operations),
        cmocka_unit_test(a_config_that_makes_no_sense_is_refused),
        cmocka_unit_test(a_wrapped_stream_stays_the_callers),
        cmocka_unit_test(what_a_wrapped_stream_had_before_comes_first),
        cmocka_unit_test(blocking_streams_are_taken_with_a_warning),
        cmocka_unit_test(contexts_come_and_go_while_a_stream_captures),
        cmocka_unit_test(the_null_stream_is_kept_while_another_captures),
        cmocka_unit_test(streams_that_cannot_be_wrapped_are_refused),
        cmocka_unit_test(another_gpu_may_be_current_and_its_streams_are_refused),
        ON_A_DEVICE(a_fill_of_memory_that_is_not_the_gpus_is_refused),
        cmocka_unit_test(what_is_counted_is_what_the_gpu_gave),
        cmocka_unit_test(an_error_of_the_gpu_is_told_by_its_name_and_stays),
    };
    int failed = run_device_suite(&suite) + run_kernel_suite(&suite);
    failed += cmocka_run_group_tests_name("CUDA device", own, NULL, NULL);
    return failed > 0;
}
