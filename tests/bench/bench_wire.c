/* SPDX-License-Identifier: MIT */
/* All-gather and reduce-scatter by size: what NCCL reaches alone, and what is left of it through the library's calls.
 *
 *     ranks.sh WORLD bench_wire [--from MIB] [--to MIB] [--window] [--cta-zero] [--json]        1 to 1024 MiB
 *
 * Both on the same communicator (fsdp_nccl_comm) and stream, by turns, in place, bf16 gathers and fp32 sums as a step makes
 * them. Bytes are those of the whole buffer; bus bandwidth is bytes × (world − 1) / world / time. Host time is that of
 * enqueueing one. The last gather's bytes are checked. --window: buffers from ncclMemAlloc, registered as windows. */
#include <string.h>

#include "block_bench.h"
#include "fsdp/cuda.h"
#include "fsdp/nccl.h"

enum { REPEATS = 5 };

typedef struct wire {
    block_options o;
    fsdp_launch launch;
    fsdp_context *ctx;
    fsdp_comm *comm;
    ncclComm_t nccl;
    cudaStream_t native;
    fsdp_stream *s;
    char *buffer;
    uint64_t from, to;
} wire;

typedef struct timing {
    double ms, host_us;
} timing;

static void enqueue(wire *w, bool gather, bool library, uint64_t bytes)
{
    const uint64_t world = w->launch.world, count = bytes / world / (gather ? 2 : 4);
    char *mine = w->buffer + w->launch.rank * count * (gather ? 2 : 4);
    if (gather && library) LIB(fsdp_all_gather(w->comm, mine, w->buffer, count, FSDP_DTYPE_BF16, w->s, NULL));
    else if (gather) NCCL(ncclAllGather(mine, w->buffer, count, ncclBfloat16, w->nccl, w->native));
    else if (library) LIB(fsdp_reduce_scatter(w->comm, w->buffer, mine, count, FSDP_DTYPE_FP32, w->s, NULL));
    else NCCL(ncclReduceScatter(w->buffer, mine, count, ncclFloat, ncclSum, w->nccl, w->native));
}

static timing run_once(wire *w, bool gather, bool library, uint64_t bytes)
{
    const int n = bytes < 64u << 20 ? 20 : 4;
    CUDA(cudaStreamSynchronize(w->native));
    LIB(fsdp_barrier(w->comm, w->s, NULL));
    CUDA(cudaStreamSynchronize(w->native));
    const uint64_t start = block_now();
    for (int i = 0; i < n; i++) enqueue(w, gather, library, bytes);
    const uint64_t enqueued = block_now();
    CUDA(cudaStreamSynchronize(w->native));
    return (timing){(double)(block_now() - start) * 1e-6 / n, (double)(enqueued - start) * 1e-3 / n};
}

static int by_ms(const void *a, const void *b)
{
    const timing *x = a, *y = b;
    return (x->ms > y->ms) - (x->ms < y->ms);
}

static void run_size(wire *w, bool gather, uint64_t bytes)
{
    timing t[2][REPEATS];
    for (int i = -1; i < REPEATS; i++)
        for (int library = 0; library < 2; library++) {
            const timing one = run_once(w, gather, library == 1, bytes);
            if (i >= 0) t[library][i] = one;
        }
    if (w->launch.rank != 0) return;
    double bus[2];
    for (int library = 0; library < 2; library++) {
        qsort(t[library], REPEATS, sizeof(timing), by_ms);
        bus[library] = (double)bytes * (w->launch.world - 1) / w->launch.world / t[library][REPEATS / 2].ms * 1e-6;
    }
    const timing alone = t[0][REPEATS / 2], through = t[1][REPEATS / 2];
    printf(w->o.json
               ? "{\"wire\":\"%s\",\"world\":%u,\"mib\":%llu,\"window\":%d,\"cta_zero\":%d,\"nccl_ms\":%.4f,\"nccl_"
                 "GBps\":%.2f,"
                 "\"nccl_host_us\":%.2f,\"library_ms\":%.4f,\"library_GBps\":%.2f,\"library_host_us\":%.2f}\n"
               : "%-14s world %u %5llu MiB  window %d  no CTAs %d   NCCL %9.4f ms %7.2f GB/s host %6.2f us   library "
                 "%9.4f ms %7.2f GB/s host %6.2f us\n",
           gather ? "all-gather" : "reduce-scatter", w->launch.world, (unsigned long long)(bytes >> 20), w->o.window,
           w->o.cta_zero, alone.ms, bus[0], alone.host_us, through.ms, bus[1], through.host_us);
    fflush(stdout);
}

/* Every rank's part holds its number; after a gather every rank has all of them. */
static void check(wire *w)
{
    const uint64_t world = w->launch.world, count = (w->from << 20) / world / 2;
    CUDA(cudaMemset(w->buffer, 0xff, count * 2 * world));
    CUDA(cudaMemset(w->buffer + w->launch.rank * count * 2, (int)w->launch.rank + 1, count * 2));
    CUDA(cudaDeviceSynchronize());
    enqueue(w, true, true, w->from << 20);
    CUDA(cudaStreamSynchronize(w->native));
    for (uint64_t r = 0; r < world; r++) {
        char seen[2];
        CUDA(cudaMemcpy(&seen[0], w->buffer + r * count * 2, 1, cudaMemcpyDeviceToHost));
        CUDA(cudaMemcpy(&seen[1], w->buffer + (r + 1) * count * 2 - 1, 1, cudaMemcpyDeviceToHost));
        if (seen[0] != (char)(r + 1) || seen[1] != (char)(r + 1)) BENCH_FAIL("rank %u: wrong bytes", w->launch.rank);
    }
    CUDA(cudaMemset(w->buffer, 0, w->to << 20));
    CUDA(cudaDeviceSynchronize());
}

static void take_buffer(wire *w)
{
    const uint64_t bytes = w->to << 20;
    if (!w->o.window) {
        CUDA(cudaMalloc((void **)&w->buffer, bytes));
        return;
    }
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
    ncclWindow_t window;
    NCCL(ncclMemAlloc((void **)&w->buffer, bytes));
    NCCL(ncclCommWindowRegister(w->nccl, w->buffer, bytes, &window, NCCL_WIN_COLL_SYMMETRIC));
#else
    BENCH_FAIL("--window needs NCCL 2.27 or later");
#endif
}

static void parse(wire *w, int argc, char **argv)
{
    w->from = 1;
    w->to = 1024;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--json") == 0) w->o.json = true;
        else if (strcmp(argv[i], "--window") == 0) w->o.window = true;
        else if (strcmp(argv[i], "--cta-zero") == 0) w->o.cta_zero = true;
        else if (strcmp(argv[i], "--from") == 0 && i + 1 < argc) w->from = strtoull(argv[++i], NULL, 10);
        else if (strcmp(argv[i], "--to") == 0 && i + 1 < argc) w->to = strtoull(argv[++i], NULL, 10);
        else w->from = 0;
    }
    if (w->from > 0 && w->from <= w->to && w->to <= 16384) return;
    fprintf(stderr, "usage: ranks.sh WORLD bench_wire [--from MIB] [--to MIB] [--window] [--cta-zero] [--json]\n");
    exit(2);
}

int main(int argc, char **argv)
{
    wire w = {0};
    parse(&w, argc, argv);
    const fsdp_launch nobody = FSDP_LAUNCH_INIT;
    w.launch = nobody;
    LIB(fsdp_launch_from_env(&w.launch));
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        fprintf(stderr, "bench_wire: no GPU\n");
        return 77;
    }
    if (w.launch.world < 2) BENCH_FAIL("one rank has no wire: tests/bench/ranks.sh WORLD bench_wire");
    ncclConfig_t tuned;
    block_nccl_config(&w.o, &tuned);
    fsdp_nccl_config nccl = FSDP_NCCL_CONFIG_INIT;
    if (w.o.cta_zero) nccl.config = &tuned;
    fsdp_cuda_config cuda = FSDP_CUDA_CONFIG_INIT;
    cuda.device = (int)(w.launch.local_rank % (uint32_t)devices);
    cuda.launch = &w.launch;
    cuda.nccl = &nccl;
    CUDA(cudaSetDevice(cuda.device));
    CUDA(cudaStreamCreateWithFlags(&w.native, cudaStreamNonBlocking));
    fsdp_config config = FSDP_CONFIG_INIT;
    config.backend = fsdp_cuda_backend();
    config.backend_config = &cuda;
    LIB(fsdp_context_create(&config, &w.ctx));
    LIB(fsdp_cuda_stream_wrap(w.ctx, w.native, "wire", &w.s));
    w.comm = fsdp_context_comm(w.ctx);
    w.nccl = fsdp_nccl_comm(w.comm);
    take_buffer(&w);
    check(&w);
    for (int gather = 1; gather >= 0; gather--)
        for (uint64_t mib = w.from; mib <= w.to; mib *= 4) run_size(&w, gather == 1, mib << 20);
    LIB(fsdp_stream_release(w.s));
    LIB(fsdp_context_destroy(w.ctx));
    return 0;
}
