/* SPDX-License-Identifier: MIT */
/* bench_calls: what calls of CUDA cost the host on this machine: the floor under a hook's host time.
 *
 * A pattern is a list of calls on up to three streams, enqueued over and over: 64 calls or so on an idle GPU, then a
 * synchronisation, 200 times. Each call goes between two looks at the clock, whose own cost is taken off. A line has the median
 * of one call of the pattern over all its turns, in microseconds, beside the tenth and the ninetieth part of a hundred; the
 * pattern's own line has the sum of the medians. `held`: all streams stand behind a kernel that spins until the host has
 * enqueued everything, so that nothing that is enqueued can begin. Takes some seconds. */
#include <cuda.h>
#include <cuda_runtime.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <thread>

#include "monotonic.h"

enum { STREAMS = 3, EVENTS = 8, MOST_STEPS = 12, ROUND_CALLS = 64, ROUNDS = 200, MOST = ROUND_CALLS * ROUNDS };
static const size_t BIG = 32 << 20;

#define MUST(call) must((call), #call, __LINE__)
static void must(cudaError_t error, const char *what, int line)
{
    if (error == cudaSuccess) return;
    fprintf(stderr, "bench_calls.cu:%d: %s: %s\n", line, what, cudaGetErrorString(error));
    exit(1);
}
static void must_driver(CUresult result, const char *what)
{
    if (result == CUDA_SUCCESS) return;
    fprintf(stderr, "bench_calls: %s: driver's error %d\n", what, (int)result);
    exit(1);
}

/* ---- Kernels ---- */

template <int BYTES> struct params {
    uint32_t word[BYTES / 4];
};
template <int BYTES> __global__ void empty(params<BYTES> p)
{
    if (p.word[0] == 1) __trap(); /* it is 0 */
}

static __global__ void hold(volatile uint32_t *go)
{
    const long long begin = clock64();
    while (*go == 0 && clock64() - begin < 4000000000) {
    }
}

/* ---- Calls ---- */

enum call {
    END,
    GET_DEVICE,
    SET_DEVICE,
    IS_CAPTURING,
    CAPTURE_MODE,
    RECORD,
    WAIT,
    DRIVER_RECORD,
    DRIVER_WAIT,
    QUERY,
    WRITE_VALUE, /* of a word, by the stream */
    WAIT_VALUE,
    FILL,
    COPY,
    COPY_SMALL,
    ARROWS,        /* <<<>>> */
    LAUNCH,        /* cudaLaunchKernel */
    LAUNCH_HANDLE, /* with a cudaKernel_t */
    EX,            /* cudaLaunchKernelExC */
    EX_HANDLE,
    DRIVER_FUNCTION, /* cuLaunchKernel */
    DRIVER_KERNEL    /* with a CUkernel */
};
static const char *const call_names[] = {"",
                                         "cudaGetDevice",
                                         "cudaSetDevice",
                                         "cudaStreamIsCapturing",
                                         "cudaThreadExchangeStreamCaptureMode",
                                         "cudaEventRecord",
                                         "cudaStreamWaitEvent",
                                         "cuEventRecord",
                                         "cuStreamWaitEvent",
                                         "cudaEventQuery",
                                         "cuStreamWriteValue32",
                                         "cuStreamWaitValue32",
                                         "cudaMemsetAsync 32 MiB",
                                         "cudaMemcpyAsync 32 MiB",
                                         "cudaMemcpyAsync 4 KiB",
                                         "kernel<<<>>>",
                                         "cudaLaunchKernel",
                                         "cudaLaunchKernel, cudaKernel_t",
                                         "cudaLaunchKernelExC",
                                         "cudaLaunchKernelExC, cudaKernel_t",
                                         "cuLaunchKernel, CUfunction",
                                         "cuLaunchKernel, CUkernel"};

struct step {
    enum call call;
    int stream = 0, event = 0; /* event: of a launch, its size: 0 to 3 */
};
struct pattern {
    const char *name;
    step steps[MOST_STEPS];
    bool held = false;
};

enum { SIZES = 4 };
static const int param_bytes[SIZES] = {16, 64, 256, 1024};

struct bench {
    cudaStream_t stream[STREAMS];
    cudaEvent_t event[EVENTS];
    const void *symbol[SIZES];
    cudaKernel_t handle[SIZES];
    cudaFunction_t function[SIZES];
    char *a, *b;
    volatile uint32_t *go; /* page-locked */
    bool has_values;       /* the driver takes them here */
    CUresult(CUDAAPI *launch)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                              CUstream, void **, void **);
    CUresult(CUDAAPI *record)(CUevent, CUstream);
    CUresult(CUDAAPI *wait)(CUstream, CUevent, unsigned);
    CUresult(CUDAAPI *write_value)(CUstream, CUdeviceptr, cuuint32_t, unsigned);
    CUresult(CUDAAPI *wait_value)(CUstream, CUdeviceptr, cuuint32_t, unsigned);
};

static params<1024> zeros;
static unsigned blocks = 1;

static void arrows(int size, cudaStream_t stream)
{
    switch (size) {
    case 0: empty<16><<<blocks, 256, 0, stream>>>(params<16>{}); break;
    case 1: empty<64><<<blocks, 256, 0, stream>>>(params<64>{}); break;
    case 2: empty<256><<<blocks, 256, 0, stream>>>(params<256>{}); break;
    default: empty<1024><<<blocks, 256, 0, stream>>>(zeros); break;
    }
}

static cudaError_t launch_ex(const void *kernel, cudaStream_t stream)
{
    void *args[] = {&zeros};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(blocks), config.blockDim = dim3(256), config.stream = stream;
    return cudaLaunchKernelExC(&config, kernel, args);
}

static void launch(const bench *b, const step &s)
{
    const cudaStream_t stream = b->stream[s.stream];
    void *args[] = {&zeros};
    CUfunction function = s.call == DRIVER_KERNEL ? (CUfunction)b->handle[s.event] : (CUfunction)b->function[s.event];
    switch (s.call) {
    case ARROWS: arrows(s.event, stream); return;
    case LAUNCH: MUST(cudaLaunchKernel(b->symbol[s.event], dim3(blocks), dim3(256), args, 0, stream)); return;
    case LAUNCH_HANDLE:
        MUST(cudaLaunchKernel((const void *)b->handle[s.event], dim3(blocks), dim3(256), args, 0, stream));
        return;
    case EX: MUST(launch_ex(b->symbol[s.event], stream)); return;
    case EX_HANDLE: MUST(launch_ex((const void *)b->handle[s.event], stream)); return;
    default: must_driver(b->launch(function, blocks, 1, 1, 256, 1, 1, 0, stream, args, NULL), call_names[s.call]);
    }
}

static void do_step(const bench *b, const step &s)
{
    const cudaStream_t stream = b->stream[s.stream];
    int device = 0;
    enum cudaStreamCaptureStatus capture;
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    const CUdeviceptr word = (CUdeviceptr)b->a + (size_t)s.event * 64;
    switch (s.call) {
    case GET_DEVICE: MUST(cudaGetDevice(&device)); return;
    case SET_DEVICE: MUST(cudaSetDevice(0)); return;
    case IS_CAPTURING: MUST(cudaStreamIsCapturing(stream, &capture)); return;
    case CAPTURE_MODE: MUST(cudaThreadExchangeStreamCaptureMode(&mode)); return;
    case RECORD: MUST(cudaEventRecord(b->event[s.event], stream)); return;
    case WAIT: MUST(cudaStreamWaitEvent(stream, b->event[s.event], 0)); return;
    case DRIVER_RECORD: must_driver(b->record(b->event[s.event], stream), call_names[s.call]); return;
    case DRIVER_WAIT: must_driver(b->wait(stream, b->event[s.event], 0), call_names[s.call]); return;
    case QUERY:
        if (cudaEventQuery(b->event[s.event]) == cudaErrorNotReady) (void)cudaGetLastError();
        return;
    case WRITE_VALUE: must_driver(b->write_value(stream, word, 0, 0), call_names[s.call]); return;
    case WAIT_VALUE: must_driver(b->wait_value(stream, word, 0, CU_STREAM_WAIT_VALUE_GEQ), call_names[s.call]); return;
    case FILL: MUST(cudaMemsetAsync(b->a, 0, BIG, stream)); return;
    case COPY: MUST(cudaMemcpyAsync(b->b, b->a, BIG, cudaMemcpyDefault, stream)); return;
    case COPY_SMALL: MUST(cudaMemcpyAsync(b->b, b->a, 4096, cudaMemcpyDefault, stream)); return;
    default: launch(b, s); return;
    }
}

/* ---- Patterns ---- */

static const pattern patterns[] = {
    {"current device", {{GET_DEVICE}, {SET_DEVICE}}},
    {"questions", {{IS_CAPTURING}, {CAPTURE_MODE}, {QUERY}}},
    {"records, one stream", {{RECORD, 0, 0}, {RECORD, 0, 1}}},
    {"records, held", {{RECORD, 0, 0}, {RECORD, 0, 1}}, true},
    {"record and wait", {{RECORD, 0, 0}, {WAIT, 1, 0}}},
    {"record and wait, driver's", {{DRIVER_RECORD, 0, 0}, {DRIVER_WAIT, 1, 0}}},
    {"values", {{WRITE_VALUE, 0, 0}, {WAIT_VALUE, 1, 0}}},
    {"launches, one stream, 16 bytes",
     {{ARROWS, 0, 0},
      {LAUNCH, 0, 0},
      {LAUNCH_HANDLE, 0, 0},
      {EX, 0, 0},
      {EX_HANDLE, 0, 0},
      {DRIVER_FUNCTION, 0, 0},
      {DRIVER_KERNEL, 0, 0}}},
    {"launches, one stream, held, 16 bytes",
     {{ARROWS, 0, 0}, {LAUNCH, 0, 0}, {LAUNCH_HANDLE, 0, 0}, {EX_HANDLE, 0, 0}, {DRIVER_FUNCTION, 0, 0}},
     true},
    {"launches, 64, 256 and 1024 bytes",
     {{LAUNCH, 0, 1},
      {LAUNCH, 0, 2},
      {LAUNCH, 0, 3},
      {LAUNCH_HANDLE, 0, 1},
      {LAUNCH_HANDLE, 0, 2},
      {LAUNCH_HANDLE, 0, 3},
      {DRIVER_FUNCTION, 0, 1},
      {DRIVER_FUNCTION, 0, 2},
      {DRIVER_FUNCTION, 0, 3}}},
    {"launches, three streams", {{LAUNCH, 0, 0}, {LAUNCH, 1, 0}, {LAUNCH, 2, 0}}},
    {"launches, three streams, held", {{LAUNCH, 0, 0}, {LAUNCH, 1, 0}, {LAUNCH, 2, 0}}, true},
    {"launch behind a record", {{LAUNCH, 0, 0}, {RECORD, 0, 0}}},
    {"launch behind a wait that is over", {{RECORD, 1, 0}, {WAIT, 0, 0}, {LAUNCH, 0, 0}}},
    {"a gather of a world of one, back and forth",
     {{RECORD, 0, 0}, {WAIT, 1, 0}, {LAUNCH, 1, 0}, {RECORD, 1, 1}, {WAIT, 0, 1}, {LAUNCH, 0, 0}}},
    {"the same, held",
     {{RECORD, 0, 0}, {WAIT, 1, 0}, {LAUNCH, 1, 0}, {RECORD, 1, 1}, {WAIT, 0, 1}, {LAUNCH, 0, 0}},
     true},
    {"the same, cudaKernel_t",
     {{RECORD, 0, 0}, {WAIT, 1, 0}, {LAUNCH_HANDLE, 1, 0}, {RECORD, 1, 1}, {WAIT, 0, 1}, {LAUNCH_HANDLE, 0, 0}}},
    {"the same, driver's launch",
     {{RECORD, 0, 0}, {WAIT, 1, 0}, {DRIVER_FUNCTION, 1, 0}, {RECORD, 1, 1}, {WAIT, 0, 1}, {DRIVER_FUNCTION, 0, 0}}},
    {"the same, all driver's",
     {{DRIVER_RECORD, 0, 0},
      {DRIVER_WAIT, 1, 0},
      {DRIVER_KERNEL, 1, 0},
      {DRIVER_RECORD, 1, 1},
      {DRIVER_WAIT, 0, 1},
      {DRIVER_KERNEL, 0, 0}}},
    {"the same, five launches of the caller's between",
     {{RECORD, 0, 0},
      {WAIT, 1, 0},
      {LAUNCH, 1, 0},
      {RECORD, 1, 1},
      {WAIT, 0, 1},
      {ARROWS, 0, 0},
      {ARROWS, 0, 0},
      {ARROWS, 0, 0},
      {ARROWS, 0, 0},
      {ARROWS, 0, 0}}},
    {"a gather and a reduction, three streams",
     {{RECORD, 0, 0},
      {WAIT, 1, 0},
      {LAUNCH, 1, 0},
      {RECORD, 1, 1},
      {WAIT, 0, 1},
      {ARROWS, 0, 0},
      {RECORD, 0, 2},
      {WAIT, 2, 2},
      {LAUNCH, 2, 0},
      {RECORD, 2, 3}}},
    {"copies and fills", {{FILL, 0}, {COPY, 0}, {COPY_SMALL, 0}}},
    {"copies and fills, held", {{FILL, 0}, {COPY, 0}, {COPY_SMALL, 0}}, true},
};

/* ---- Measuring ---- */

static uint32_t samples[MOST_STEPS][MOST];

static int by_value(const void *a, const void *b)
{
    const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

/* One round: turns of the pattern. */
static int run_round(const bench *b, const pattern &p, int n_steps, int at)
{
    const int turns = ROUND_CALLS / n_steps;
    if (p.held) {
        *b->go = 0;
        for (int s = 0; s < STREAMS; s++) hold<<<1, 1, 0, b->stream[s]>>>(b->go);
    }
    for (int i = 0; i < turns; i++, at++) {
        for (int k = 0; k < n_steps; k++) {
            const uint64_t begin = fsdp__now_ns();
            do_step(b, p.steps[k]);
            samples[k][at] = (uint32_t)(fsdp__now_ns() - begin);
        }
    }
    *b->go = 1;
    MUST(cudaDeviceSynchronize());
    return at;
}

static double us_of(const uint32_t *sorted, int at, uint64_t clock)
{
    return ((double)sorted[at] - (double)clock) * 1e-3;
}

static void measure(const bench *b, const pattern &p, uint64_t clock)
{
    int n_steps = 0, n = 0;
    if (p.steps[0].call == WRITE_VALUE && !b->has_values) return;
    while (n_steps < MOST_STEPS && p.steps[n_steps].call != END) n_steps++;
    run_round(b, p, n_steps, 0);
    for (int i = 0; i < ROUNDS; i++) n = run_round(b, p, n_steps, n);
    double sum = 0;
    for (int k = 0; k < n_steps; k++) {
        qsort(samples[k], (size_t)n, sizeof samples[k][0], by_value);
        sum += us_of(samples[k], n / 2, clock);
    }
    printf("%-52s %8.3f\n", p.name, sum);
    for (int k = 0; k < n_steps; k++) {
        const step &s = p.steps[k];
        char bytes[32] = "";
        if (s.call >= ARROWS) snprintf(bytes, sizeof bytes, " (%d bytes)", param_bytes[s.event]);
        printf("    stream %d  %-36s%-12s %8.3f  (%.3f to %.3f)\n", s.stream, call_names[s.call], bytes,
               us_of(samples[k], n / 2, clock), us_of(samples[k], n / 10, clock), us_of(samples[k], n * 9 / 10, clock));
    }
    fflush(stdout);
}

static uint64_t clock_cost_ns(void)
{
    for (int i = 0; i < MOST; i++) {
        const uint64_t begin = fsdp__now_ns();
        samples[0][i] = (uint32_t)(fsdp__now_ns() - begin);
    }
    qsort(samples[0], MOST, sizeof samples[0][0], by_value);
    return samples[0][MOST / 2];
}

static void *entry_point(const char *name)
{
    void *found = NULL;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    MUST(cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result));
    if (result == cudaDriverEntryPointSuccess) return found;
    fprintf(stderr, "bench_calls: the driver has no %s\n", name);
    exit(1);
}

template <int BYTES> static void find_kernel(bench *b, int size)
{
    b->symbol[size] = (const void *)empty<BYTES>;
    MUST(cudaGetKernel(&b->handle[size], empty<BYTES>));
    MUST(cudaGetFuncBySymbol(&b->function[size], b->symbol[size]));
}

static void open_bench(bench *b)
{
    int least = 0, greatest = 0;
    MUST(cudaSetDevice(0));
    MUST(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    for (int i = 0; i < STREAMS; i++)
        MUST(cudaStreamCreateWithPriority(&b->stream[i], cudaStreamNonBlocking, i == 0 ? least : greatest));
    for (int i = 0; i < EVENTS; i++) {
        MUST(cudaEventCreateWithFlags(&b->event[i], cudaEventDisableTiming));
        MUST(cudaEventRecord(b->event[i], b->stream[0]));
    }
    find_kernel<16>(b, 0);
    find_kernel<64>(b, 1);
    find_kernel<256>(b, 2);
    find_kernel<1024>(b, 3);
    MUST(cudaMalloc((void **)&b->a, BIG));
    MUST(cudaMalloc((void **)&b->b, BIG));
    MUST(cudaMemset(b->a, 0, BIG));
    void *go = NULL;
    MUST(cudaHostAlloc(&go, 64, cudaHostAllocPortable | cudaHostAllocMapped));
    b->go = (volatile uint32_t *)go;
    *b->go = 1;
    hold<<<1, 1, 0, b->stream[0]>>>(b->go); /* loaded now: later it would wait for what runs */
    MUST(cudaDeviceSynchronize());
    *(void **)&b->launch = entry_point("cuLaunchKernel");
    *(void **)&b->record = entry_point("cuEventRecord");
    *(void **)&b->wait = entry_point("cuStreamWaitEvent");
    *(void **)&b->write_value = entry_point("cuStreamWriteValue32");
    *(void **)&b->wait_value = entry_point("cuStreamWaitValue32");
    b->has_values = b->write_value(b->stream[0], (CUdeviceptr)b->a, 0, 0) == CUDA_SUCCESS;
}

/* What does not ask for the current device: on a thread that has no context, and, where there is a second GPU, on one whose
 * current device is that. */
static void say(const char *where, const char *what, int error)
{
    if (error == 0) printf("%s: %s works\n", where, what);
    else printf("%s: %s fails: error %d\n", where, what, error);
}

static int launch_handle(const bench *b)
{
    void *args[] = {&zeros};
    return (int)b->launch((CUfunction)b->handle[0], 1, 1, 1, 256, 1, 1, 0, b->stream[0], args, NULL);
}

static void on_another_device(const bench *b)
{
    const char *where = "another device is current";
    MUST(cudaSetDevice(1));
    say(where, "cudaEventRecord", (int)cudaEventRecord(b->event[0], b->stream[0]));
    say(where, "cudaStreamWaitEvent", (int)cudaStreamWaitEvent(b->stream[1], b->event[0], 0));
    say(where, "cudaMemcpyAsync", (int)cudaMemcpyAsync(b->b, b->a, 4096, cudaMemcpyDefault, b->stream[0]));
    say(where, "cudaMemsetAsync", (int)cudaMemsetAsync(b->a, 0, 4096, b->stream[0]));
    say(where, "cuLaunchKernel, CUkernel", launch_handle(b));
    say(where, "cudaStreamSynchronize", (int)cudaStreamSynchronize(b->stream[0]));
}

static void check_devices(const bench *b, int n_devices)
{
    std::thread none([=] {
        const char *where = "no context is current";
        say(where, "cuEventRecord", (int)b->record(b->event[0], b->stream[0]));
        say(where, "cuStreamWaitEvent", (int)b->wait(b->stream[1], b->event[0], 0));
        say(where, "cuLaunchKernel, CUkernel", launch_handle(b));
    });
    none.join();
    if (n_devices < 2) return;
    std::thread other(on_another_device, b);
    other.join();
}

int main(void)
{
    int n = 0;
    if (cudaGetDeviceCount(&n) != cudaSuccess || n == 0) {
        printf("bench_calls: no GPU\n");
        return 77;
    }
    static bench b;
    open_bench(&b);
    const uint64_t clock = clock_cost_ns();
    printf("host microseconds a call, median (tenth to ninetieth of a hundred); %d ns of clock a call taken off\n",
           (int)clock);
    for (const pattern &p : patterns) measure(&b, p, clock);
    check_devices(&b, n);
    MUST(cudaDeviceSynchronize());
    printf("---- launches of 4096 blocks\n");
    blocks = 4096;
    for (const pattern &p : patterns)
        if (p.steps[0].call == LAUNCH) measure(&b, p, clock);
    return 0;
}
