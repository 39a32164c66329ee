/* SPDX-License-Identifier: MIT */
/* All-gather and reduce-scatter by size: what NCCL reaches alone, and what is left of it through the library's calls.
 *
 *     ranks.sh WORLD bench_wire [--from MIB] [--to MIB] [--window] [--cta-zero] [--json]        1 to 1024 MiB
 *     ranks.sh WORLD bench_wire --sizes step | BYTES[,BYTES…] [--json]
 *
 * Both on the same communicator (fsdp_nccl_comm) and stream, by turns, in place, bf16 gathers and fp32 sums as a step makes
 * them. Bytes are those of the whole buffer; bus bandwidth is bytes × (world − 1) / world / time. Host time is that of
 * enqueueing one. The last gather's bytes are checked. --window: buffers from ncclMemAlloc, registered as windows.
 *
 * --sizes: does it matter that a shard is no round number of bytes, or where it lies? A size is a rank's part of a bf16
 * all-gather; the reduce-scatter beside it has as many fp32 elements, twice the bytes. NCCL alone: in place and not, on a
 * whole page and 512 bytes behind one, and both collectives at once on two streams, as backward has them. All cases take
 * turns, so that a slow moment meets each. `step`: 8 MiB, and what biases, pads and whole MiB make of it. NCCL's own
 * variables (NCCL_PROTO, NCCL_ALGO, NCCL_MAX_NCHANNELS, NCCL_BUFFSIZE …) reach every rank through ranks.sh and are printed. */
#include <string.h>
#include <unistd.h>

#include "block_bench.h"
#include "fsdp/cuda.h"
#include "fsdp/nccl.h"
#include "sorted.h"

enum { REPEATS = 5, MOST_SIZES = 16, TURNS = 8, IN_A_ROW = 3, PAGE = 2 << 20, OFF_PAGE = 512 };

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
    uint64_t size[MOST_SIZES];
    uint32_t n_sizes;
    char *other; /* with sizes: what is not in place comes from here, or goes here */
    cudaStream_t second;
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
    const uint64_t start = fsdp__now_ns();
    for (int i = 0; i < n; i++) enqueue(w, gather, library, bytes);
    const uint64_t enqueued = fsdp__now_ns();
    CUDA(cudaStreamSynchronize(w->native));
    return (timing){(double)(fsdp__now_ns() - start) * 1e-6 / n, (double)(enqueued - start) * 1e-3 / n};
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

/* ---- --sizes ---- */

typedef enum wire_kind { GATHER, REDUCE, AT_ONCE, KINDS } wire_kind;

typedef struct wire_case {
    wire_kind kind;
    bool in_place;
    uint64_t bytes, offset;
    double ms[TURNS];
} wire_case;

static void start_gather(wire *w, const wire_case *c)
{
    char *full = w->buffer + c->offset, *mine = full + w->launch.rank * c->bytes;
    NCCL(
        ncclAllGather(c->in_place ? mine : w->other + c->offset, full, c->bytes / 2, ncclBfloat16, w->nccl, w->native));
}

/* On the bytes that a gather beside it writes: nobody looks at the values. */
static void start_reduce(wire *w, const wire_case *c, cudaStream_t stream)
{
    char *full = w->buffer + c->offset, *mine = full + w->launch.rank * c->bytes * 2;
    NCCL(ncclReduceScatter(full, c->in_place ? mine : w->other + c->offset, c->bytes / 2, ncclFloat, ncclSum, w->nccl,
                           stream));
}

static double run_case(wire *w, const wire_case *c)
{
    CUDA(cudaDeviceSynchronize());
    LIB(fsdp_barrier(w->comm, w->s, NULL));
    CUDA(cudaDeviceSynchronize());
    const uint64_t start = fsdp__now_ns();
    for (int i = 0; i < IN_A_ROW; i++) {
        if (c->kind != REDUCE) start_gather(w, c);
        if (c->kind != GATHER) start_reduce(w, c, c->kind == REDUCE ? w->native : w->second);
    }
    CUDA(cudaDeviceSynchronize());
    return (double)(fsdp__now_ns() - start) * 1e-6 / IN_A_ROW;
}

/* first: the median of the same kind and place at the first size. */
static double print_wire_case(const wire *w, wire_case *c, double first)
{
    static const char *const names[KINDS] = {"all-gather", "reduce-scatter", "both at once"};
    sort_doubles(c->ms, TURNS);
    const double middle = (c->ms[TURNS / 2 - 1] + c->ms[TURNS / 2]) / 2, moved = (double)c->bytes *
                                                                                 (c->kind == GATHER   ? 1
                                                                                  : c->kind == REDUCE ? 2
                                                                                                      : 3) *
                                                                                 (w->launch.world - 1);
    const double ratio = middle / (first > 0 ? first : middle);
    printf(w->o.json
               ? "{\"wire\":\"%s\",\"in_place\":%d,\"world\":%u,\"rank_bytes\":%llu,\"over_page\":%llu,\"ms\":%.4f,"
                 "\"ms_min\":%.4f,\"ms_max\":%.4f,\"GBps\":%.3f,\"to_first\":%.4f}\n"
               : "%-14s in place %d  world %u  %9llu bytes a rank  offset %4llu  %8.3f ms (%.3f to %.3f)  %7.3f "
                 "GB/s  %.3f of the first size's\n",
           names[c->kind], c->in_place, w->launch.world, (unsigned long long)c->bytes, (unsigned long long)c->offset,
           middle, c->ms[0], c->ms[TURNS - 1], moved / middle * 1e-6, ratio);
    return first > 0 ? first : middle;
}

static void print_environment(const wire *w)
{
    int version;
    NCCL(ncclGetVersion(&version));
    if (w->o.json) return;
    printf("NCCL %d", version);
    for (char **one = environ; *one != NULL; one++)
        if (strncmp(*one, "NCCL_", 5) == 0 && strncmp(*one, "NCCL_HOSTID", 11) != 0) printf(" %s", *one);
    printf("\n");
}

static void run_sizes(wire *w)
{
    enum { PLACES = 3 };
    static const struct {
        bool in_place;
        uint64_t offset;
    } place[PLACES] = {{true, 0}, {true, OFF_PAGE}, {false, 0}};
    static wire_case cases[KINDS * PLACES][MOST_SIZES];
    uint64_t most = 0;
    for (uint32_t i = 0; i < w->n_sizes; i++) most = w->size[i] > most ? w->size[i] : most;
    const uint64_t full = most * 2 * w->launch.world + PAGE, part = most * 2 + PAGE;
    CUDA(cudaMalloc((void **)&w->buffer, full));
    CUDA(cudaMalloc((void **)&w->other, part));
    CUDA(cudaMemset(w->buffer, 0, full));
    CUDA(cudaMemset(w->other, 0, part));
    CUDA(cudaDeviceSynchronize());
    CUDA(cudaStreamCreateWithFlags(&w->second, cudaStreamNonBlocking));
    for (int turn = -1; turn < TURNS; turn++)
        for (int k = 0; k < KINDS * PLACES; k++)
            for (uint32_t i = 0; i < w->n_sizes; i++) {
                wire_case *c = &cases[k][i];
                c->kind = (wire_kind)(k / PLACES);
                c->in_place = place[k % PLACES].in_place;
                c->offset = place[k % PLACES].offset;
                c->bytes = w->size[i];
                const double ms = run_case(w, c);
                if (turn >= 0) c->ms[turn] = ms;
            }
    if (w->launch.rank != 0) return;
    print_environment(w);
    for (int k = 0; k < KINDS * PLACES; k++) {
        double first = 0;
        for (uint32_t i = 0; i < w->n_sizes; i++) first = print_wire_case(w, &cases[k][i], first);
    }
    fflush(stdout);
}

/* What a block of width 1024 comes to on two ranks, and near it. */
static bool set_sizes(wire *w, const char *text)
{
    static const uint64_t step[] = {8 << 20,           (8 << 20) - 5120,  (8 << 20) + 512, (8 << 20) + 5120,
                                    (8 << 20) + 10240, (8 << 20) + 65536, 9 << 20,         12 << 20};
    if (strcmp(text, "step") == 0) {
        w->n_sizes = sizeof step / sizeof *step;
        memcpy(w->size, step, sizeof step);
        return true;
    }
    for (const char *at = text;; at++) {
        char *end;
        const unsigned long long bytes = strtoull(at, &end, 10);
        if (end == at || bytes == 0 || bytes % 4 != 0 || bytes > 1ull << 32 || w->n_sizes == MOST_SIZES) return false;
        w->size[w->n_sizes++] = bytes;
        if (*end == '\0') return true;
        if (*end != ',') return false;
        at = end;
    }
}

/* ---- Both ---- */

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
        else if (strcmp(argv[i], "--sizes") == 0 && i + 1 < argc && set_sizes(w, argv[i + 1])) i++;
        else w->from = 0;
    }
    if (w->n_sizes > 0 && (w->o.window || w->o.cta_zero)) w->from = 0;
    if (w->from > 0 && w->from <= w->to && w->to <= 16384) return;
    fprintf(stderr, "usage: ranks.sh WORLD bench_wire [--from MIB] [--to MIB] [--window] [--cta-zero] [--json]\n"
                    "       ranks.sh WORLD bench_wire --sizes step | BYTES[,BYTES…] [--json]\n");
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
    if (w.n_sizes > 0) {
        run_sizes(&w);
    } else {
        take_buffer(&w);
        check(&w);
        for (int gather = 1; gather >= 0; gather--)
            for (uint64_t mib = w.from; mib <= w.to; mib *= 4) run_size(&w, gather == 1, mib << 20);
    }
    LIB(fsdp_stream_release(w.s));
    LIB(fsdp_context_destroy(w.ctx));
    return 0;
}
