/* SPDX-License-Identifier: MIT */
/* bench_work on a GPU: marks are CUDA events with timing on the streams themselves. To put a point of the device's time on the
 * host's clock, an event is recorded on a stream that is idle and asked for until it is done: it has happened between the
 * two looks at the host's clock; the narrowest of several pairs is taken, and its earlier end, so that what is measured from
 * there is never too short, and too long by the width of the pair at most. */
#include <cuda_runtime_api.h>

#include "fsdp/cuda.h"
#include "work_rig.h"

#define MUST(call)                                                                      \
    do {                                                                                \
        cudaError_t error_ = (call);                                                    \
        if (error_ != cudaSuccess) {                                                    \
            fprintf(stderr, "bench_work: %s: %s\n", #call, cudaGetErrorString(error_)); \
            exit(1);                                                                    \
        }                                                                               \
    } while (0)

enum { TRIES = 20 };

typedef struct cuda_clock {
    work_rig *rig;
    cudaEvent_t mark[WORK_MARKS], begin, end, reference[2];
    int narrowest; /* of reference */
    uint64_t reference_ns, width_ns;
} cuda_clock;

static void *cuda_open(work_rig *rig)
{
    cuda_clock *c = calloc(1, sizeof *c);
    if (c == NULL) exit(1);
    c->rig = rig;
    MUST(cudaSetDevice(fsdp_cuda_device(rig->ctx)));
    for (int i = 0; i < WORK_MARKS; i++) MUST(cudaEventCreate(&c->mark[i]));
    for (int i = 0; i < 2; i++) MUST(cudaEventCreate(&c->reference[i]));
    MUST(cudaEventCreate(&c->begin));
    MUST(cudaEventCreate(&c->end));
    return c;
}

static void cuda_close(void *clock)
{
    cuda_clock *c = clock;
    for (int i = 0; i < WORK_MARKS; i++) MUST(cudaEventDestroy(c->mark[i]));
    for (int i = 0; i < 2; i++) MUST(cudaEventDestroy(c->reference[i]));
    MUST(cudaEventDestroy(c->begin));
    MUST(cudaEventDestroy(c->end));
    free(c);
}

static void cuda_mark(void *clock, int which, fsdp_stream *stream)
{
    cuda_clock *c = clock;
    MUST(cudaEventRecord(c->mark[which], fsdp_cuda_stream(stream)));
}

static double us(cudaEvent_t from, cudaEvent_t to)
{
    float ms;
    MUST(cudaEventElapsedTime(&ms, from, to));
    return (double)ms * 1e3;
}

static double cuda_us_between(void *clock, int from, int to)
{
    const cuda_clock *c = clock;
    return us(c->mark[from], c->mark[to]);
}

static void cuda_wire_begin(void *clock)
{
    cuda_clock *c = clock;
    cudaStream_t idle = fsdp_cuda_stream(c->rig->idle);
    c->narrowest = 0;
    c->width_ns = UINT64_MAX;
    for (int i = 0; i < TRIES; i++) {
        int other = !c->narrowest;
        cudaError_t answer;
        uint64_t before = fsdp__now_ns();
        MUST(cudaEventRecord(c->reference[other], idle));
        while ((answer = cudaEventQuery(c->reference[other])) == cudaErrorNotReady) {
        }
        uint64_t width = fsdp__now_ns() - before;
        MUST(answer);
        if (width >= c->width_ns) continue;
        c->width_ns = width;
        c->reference_ns = before;
        c->narrowest = other;
    }
    MUST(cudaEventRecord(c->begin, fsdp_cuda_stream(c->rig->wire)));
}

static void cuda_wire_end(void *clock)
{
    cuda_clock *c = clock;
    MUST(cudaEventRecord(c->end, fsdp_cuda_stream(c->rig->wire)));
}

static void cuda_wire_read(void *clock, uint64_t *begin_ns, uint64_t *end_ns, uint64_t *error_ns)
{
    const cuda_clock *c = clock;
    cudaEvent_t reference = c->reference[c->narrowest];
    *begin_ns = c->reference_ns + (uint64_t)(us(reference, c->begin) * 1e3);
    *end_ns = c->reference_ns + (uint64_t)(us(reference, c->end) * 1e3);
    *error_ns = c->width_ns;
}

const work_clock work_cuda_clock = {cuda_open,       cuda_close,    cuda_mark,     cuda_us_between,
                                    cuda_wire_begin, cuda_wire_end, cuda_wire_read};

void work_cuda_config(fsdp_config *config, fsdp_launch *launch, uint64_t spin_ns)
{
    static fsdp_cuda_config cuda = FSDP_CUDA_CONFIG_INIT;
    int n_devices = 0;
    MUST(cudaGetDeviceCount(&n_devices));
    if (n_devices == 0) {
        fprintf(stderr, "bench_work: there is no GPU\n");
        exit(1);
    }
    cuda.device = (int)launch->local_rank % n_devices; /* several ranks on one GPU: NCCL must be told that they may */
    cuda.launch = launch;
    cuda.spin_ns = spin_ns;
    config->backend = fsdp_cuda_backend();
    config->backend_config = &cuda;
}
