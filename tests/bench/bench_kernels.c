/* SPDX-License-Identifier: MIT */
/* bench_kernels [MIB…]: how fast the CUDA backend's kernels are, beside copies from device to device.
 *
 * A size is MiB of fp32: so many elements each array has, whatever its type. Bytes are those that must be read and written,
 * each once. Every launch takes its arrays from another place of two gigabytes or more, so that no cache helps, and is timed
 * by two events; the table has the median of 30, and in brackets its ratio to the median of a copy that moves as many bytes:
 * whatever is launched has a few microseconds beside its bytes, and a sum reads an eighth or a quarter of what a copy of its
 * elements moves. The same as lines of JSON, with the ratios to the copy of as many elements and to the copy of the largest.
 *
 * Before each case all memory is numbers from 0.5 to 2 in every type. That matters: what one type has written is NaN and
 * infinity to another, and AdamW's divisions take longer for those.
 *
 * The arrays of a launch follow each other. At sizes that are powers of two all streams of AdamW then are at equal distances;
 * a model's are not. The lines "staggered" have a bit more than 2 MiB between arrays. */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/cuda_backend.h"
#include "hostmem.h"
#include "sorted.h"

enum { N_ARRAYS = 4, N_SEGMENTS = 12, WARM = 5, TIMED = 30, MAX_SIZES = 16, RANDOM_BYTES = 32 << 20 };
enum { STAGGER = (2 << 20) + 37 * 4096 }; /* bytes between arrays */

typedef enum work { COPY, FILL, CAST, ADD, SQUARES, ADAMW } work;

typedef struct bench_case {
    const char *name;
    work work;
    fsdp_dtype dst, src; /* of what is written; of what is only read */
    bool staggered;
} bench_case;

static const bench_case cases[] = {
    {"copy", COPY, FSDP_DTYPE_FP32, FSDP_DTYPE_FP32, false},
    {"fill", FILL, FSDP_DTYPE_FP32, FSDP_DTYPE_FP32, false},
    {"cast fp32 to bf16", CAST, FSDP_DTYPE_BF16, FSDP_DTYPE_FP32, false},
    {"cast bf16 to fp32", CAST, FSDP_DTYPE_FP32, FSDP_DTYPE_BF16, false},
    {"cast fp32 to fp16", CAST, FSDP_DTYPE_FP16, FSDP_DTYPE_FP32, false},
    {"cast bf16 to fp16", CAST, FSDP_DTYPE_FP16, FSDP_DTYPE_BF16, false},
    {"add fp32 += fp32", ADD, FSDP_DTYPE_FP32, FSDP_DTYPE_FP32, false},
    {"add fp32 += bf16", ADD, FSDP_DTYPE_FP32, FSDP_DTYPE_BF16, false},
    {"add bf16 += bf16", ADD, FSDP_DTYPE_BF16, FSDP_DTYPE_BF16, false},
    {"square sum fp32", SQUARES, FSDP_DTYPE_FP32, FSDP_DTYPE_FP32, false},
    {"square sum bf16", SQUARES, FSDP_DTYPE_BF16, FSDP_DTYPE_BF16, false},
    {"adamw fp32, gradient fp32", ADAMW, FSDP_DTYPE_FP32, FSDP_DTYPE_FP32, false},
    {"adamw fp32, gradient bf16", ADAMW, FSDP_DTYPE_FP32, FSDP_DTYPE_BF16, false},
    {"adamw bf16, gradient bf16", ADAMW, FSDP_DTYPE_BF16, FSDP_DTYPE_BF16, false},
    {"adamw fp32, fp32, staggered", ADAMW, FSDP_DTYPE_FP32, FSDP_DTYPE_FP32, true},
    {"adamw fp32, bf16, staggered", ADAMW, FSDP_DTYPE_FP32, FSDP_DTYPE_BF16, true},
    {"adamw bf16, bf16, staggered", ADAMW, FSDP_DTYPE_BF16, FSDP_DTYPE_BF16, true},
};
enum { N_CASES = sizeof cases / sizeof *cases };

static const fsdp_device_ops *ops;

typedef struct bench {
    void *dev;
    fsdp__cuda_stream *stream;
    char *memory; /* of all arrays */
    uint64_t bytes;
    char *random; /* RANDOM_BYTES, to fill it with */
    fsdp_kernel_segment *table;
    fsdp_device_step *step;
    float *sum;
} bench;

static void cuda(cudaError_t error, const char *what)
{
    if (error == cudaSuccess) return;
    fprintf(stderr, "bench_kernels: %s: %s\n", what, cudaGetErrorString(error));
    exit(1);
}

static void ok(fsdp_status status)
{
    if (status == FSDP_OK) return;
    fprintf(stderr, "bench_kernels: %s\n", fsdp_last_error());
    exit(1);
}

/* Of the four arrays of a launch, and what may be between them. */
static uint64_t bytes_of_set(uint64_t count) { return N_ARRAYS * (4 * count + STAGGER); }

/* Random numbers between 0.5 and 2 in each of the types. */
static void write_random(const bench *b)
{
    uint16_t *random = malloc(RANDOM_BYTES);
    if (random == NULL) exit(1);
    uint64_t x = 88172645463325252u;
    for (size_t i = 0; i < RANDOM_BYTES / 2; i++) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        random[i] = (uint16_t)(0x3f00 | (x & 0x7f));
    }
    cuda(cudaMemcpy(b->random, random, RANDOM_BYTES, cudaMemcpyHostToDevice), "cudaMemcpy");
    free(random);
}

static void bench_open(bench *b, uint64_t largest_count)
{
    static fsdp_host_allocator host;
    const fsdp_host_allocator none = {NULL, NULL, NULL, NULL};
    ok(fsdp__host_allocator_resolve(&none, &host));
    fsdp_device_args args = {.size = sizeof args, .host = &host, .timeout_ns = 60000000000u};
    fsdp_device_caps caps = {.size = sizeof caps};
    ops = fsdp_cuda_backend()->device;
    ok(ops->open(&args, &b->dev, &caps));
    void *stream, *memory, *small, *random;
    ok(ops->stream_create(b->dev, "bench", false, &stream));
    b->stream = stream;
    /* Two sets of the largest arrays, or two gigabytes. */
    b->bytes = 2 * bytes_of_set(largest_count);
    if (b->bytes < (uint64_t)2 << 30) b->bytes = (uint64_t)2 << 30;
    b->bytes = (b->bytes + caps.granularity - 1) / caps.granularity * caps.granularity;
    ok(ops->mem_alloc(b->dev, b->bytes, FSDP_MEMORY_KIND_DEVICE, &memory));
    ok(ops->mem_alloc(b->dev, caps.granularity, FSDP_MEMORY_KIND_DEVICE, &small));
    ok(ops->mem_alloc(b->dev, RANDOM_BYTES, FSDP_MEMORY_KIND_DEVICE, &random));
    b->memory = memory;
    b->random = random;
    write_random(b);
    b->table = small;
    b->step = (fsdp_device_step *)(void *)((char *)small + 65536);
    b->sum = (float *)(void *)((char *)small + 131072);
    cuda(cudaMemset(small, 0, caps.granularity), "cudaMemset");
    const fsdp_device_step step = {.factor = 0.5f, .lr = 1e-3f, .bias1 = 0.1f, .bias2 = 0.001f, .updates = 1};
    cuda(cudaMemcpy(b->step, &step, sizeof step, cudaMemcpyHostToDevice), "cudaMemcpy");
}

static void fill_memory(const bench *b)
{
    for (uint64_t at = 0; at < b->bytes; at += RANDOM_BYTES) {
        uint64_t n = b->bytes - at < RANDOM_BYTES ? b->bytes - at : RANDOM_BYTES;
        cuda(cudaMemcpyAsync(b->memory + at, b->random, n, cudaMemcpyDeviceToDevice, b->stream->native),
             "cudaMemcpyAsync");
    }
}

static void bench_close(bench *b)
{
    ops->stream_destroy(b->dev, b->stream);
    ops->mem_free(b->dev, b->memory, b->bytes, FSDP_MEMORY_KIND_DEVICE);
    ops->mem_free(b->dev, b->random, RANDOM_BYTES, FSDP_MEMORY_KIND_DEVICE);
    ops->mem_free(b->dev, b->table, 2 << 20, FSDP_MEMORY_KIND_DEVICE);
    ops->close(b->dev);
}

static uint64_t bytes_of(const bench_case *c, uint64_t count)
{
    const uint64_t dst = fsdp_dtype_bytes(c->dst), src = fsdp_dtype_bytes(c->src);
    switch (c->work) {
    case COPY: return count * 2 * dst;
    case FILL: return count * dst;
    case CAST: return count * (dst + src);
    case ADD: return count * (2 * dst + src);
    case SQUARES: return count * src;
    default: return count * (2 * dst + src + 16);
    }
}

/* arrays: the first of four. */
static fsdp_device_op make_op(const bench *b, const bench_case *c, char *arrays, uint64_t count)
{
    const uint64_t next = 4 * count + (c->staggered ? STAGGER : 0);
    char *const dst = arrays, *const src = arrays + next;
    float *const m = (float *)(void *)(arrays + 2 * next), *const v = (float *)(void *)(arrays + 3 * next);
    switch (c->work) {
    case COPY: return (fsdp_device_op){.kind = FSDP_OPERATION_COPY, .u.copy = {dst, src, 4 * count}};
    case FILL: return (fsdp_device_op){.kind = FSDP_OPERATION_FILL, .u.fill = {dst, 4 * count, 0x3f}};
    case CAST: return (fsdp_device_op){.kind = FSDP_OPERATION_CAST, .u.cast = {dst, src, count, c->dst, c->src}};
    case ADD: return (fsdp_device_op){.kind = FSDP_OPERATION_ADD, .u.add = {dst, src, count, c->dst, c->src}};
    case SQUARES:
        return (fsdp_device_op){.kind = FSDP_OPERATION_SQUARE_SUM,
                                .u.square_sum = {b->sum, src, count, b->table, N_SEGMENTS, c->src}};
    default:
        return (fsdp_device_op){.kind = FSDP_OPERATION_ADAMW,
                                .u.adamw = {.master = dst,
                                            .gradient = src,
                                            .m = m,
                                            .v = v,
                                            .count = count,
                                            .segments = b->table,
                                            .n_segments = N_SEGMENTS,
                                            .step = b->step,
                                            .beta1 = 0.9f,
                                            .beta2 = 0.999f,
                                            .eps = 1e-8f,
                                            .weight_decay = 0.01f,
                                            .master_dtype = c->dst,
                                            .gradient_dtype = c->src}};
    }
}

/* Segments of different lengths, as parameters have; each begins at a multiple of 128. */
static void write_table(const bench *b, uint64_t count)
{
    fsdp_kernel_segment table[N_SEGMENTS];
    uint64_t at = 0;
    for (int s = 0; s < N_SEGMENTS; s++) {
        uint64_t n = s + 1 < N_SEGMENTS ? count / 78 * (uint64_t)(s + 1) / 128 * 128 : count - at; /* 78 = 1 + … + 12 */
        table[s] = (fsdp_kernel_segment){at, n, 1.0f, 1.0f};
        at += n;
    }
    cuda(cudaMemcpy(b->table, table, sizeof table, cudaMemcpyHostToDevice), "cudaMemcpy");
}

/* bytes: 0, or the case is not launched, but a copy that moves so many: at most half of the set to the other half. */
static fsdp_device_op choose_op(const bench *b, const bench_case *c, char *arrays, uint64_t count, uint64_t bytes)
{
    const uint64_t half = bytes_of_set(count) / 2, part = bytes / 2 < half ? bytes / 2 : half;
    if (bytes == 0) return make_op(b, c, arrays, count);
    return (fsdp_device_op){.kind = FSDP_OPERATION_COPY, .u.copy = {arrays, arrays + half, part}};
}

static double median_seconds(const bench *b, const bench_case *c, uint64_t count, uint64_t copy_bytes)
{
    cudaEvent_t begin[TIMED], end[TIMED];
    float ms[TIMED];
    const uint64_t set_bytes = bytes_of_set(count), n_sets = b->bytes / set_bytes;
    for (int i = 0; i < TIMED; i++) {
        cuda(cudaEventCreate(&begin[i]), "cudaEventCreate");
        cuda(cudaEventCreate(&end[i]), "cudaEventCreate");
    }
    fill_memory(b);
    /* While the GPU stands, the host gets ahead: no time of its own is between two events. */
    const fsdp_device_op delay = {.kind = FSDP_OPERATION_DELAY, .u.delay = {5000000}};
    ok(ops->launch(b->dev, b->stream, &delay, NULL));
    for (int i = -WARM; i < TIMED; i++) {
        char *const arrays = b->memory + (uint64_t)(i + WARM) % n_sets * set_bytes;
        const fsdp_device_op op = choose_op(b, c, arrays, count, copy_bytes);
        if (i >= 0) cuda(cudaEventRecord(begin[i], b->stream->native), "cudaEventRecord");
        ok(ops->launch(b->dev, b->stream, &op, NULL));
        if (i >= 0) cuda(cudaEventRecord(end[i], b->stream->native), "cudaEventRecord");
    }
    ok(ops->stream_drain(b->dev, b->stream, UINT64_MAX));
    for (int i = 0; i < TIMED; i++) {
        cuda(cudaEventElapsedTime(&ms[i], begin[i], end[i]), "cudaEventElapsedTime");
        cuda(cudaEventDestroy(begin[i]), "cudaEventDestroy");
        cuda(cudaEventDestroy(end[i]), "cudaEventDestroy");
    }
    sort_floats(ms, TIMED);
    return (double)(ms[TIMED / 2 - 1] + ms[TIMED / 2]) * 0.5e-3;
}

/* GB/s of the cases, and of a copy of as many bytes. */
typedef struct rates {
    double of[N_CASES][MAX_SIZES], copy[N_CASES][MAX_SIZES];
} rates;

static void measure(const bench *b, rates *r, int s, uint64_t count)
{
    for (int k = 0; k < N_CASES; k++) {
        const uint64_t bytes = bytes_of(&cases[k], count), set_bytes = bytes_of_set(count);
        r->of[k][s] = (double)bytes / median_seconds(b, &cases[k], count, 0) * 1e-9;
        r->copy[k][s] =
            (double)(bytes < set_bytes ? bytes : set_bytes) / median_seconds(b, &cases[k], count, bytes) * 1e-9;
    }
}

static void print_all(const rates *r, const uint64_t *mib, int n_sizes)
{
    printf("%-28s", "GB/s (of a copy)");
    for (int s = 0; s < n_sizes; s++) printf("%11llu MiB", (unsigned long long)mib[s]);
    puts("");
    for (int k = 0; k < N_CASES; k++) {
        printf("%-28s", cases[k].name);
        for (int s = 0; s < n_sizes; s++) printf("%7.0f (%4.2f)", r->of[k][s], r->of[k][s] / r->copy[k][s]);
        puts("");
    }
    for (int k = 0; k < N_CASES; k++)
        for (int s = 0; s < n_sizes; s++)
            printf("{\"bench\": \"kernels\", \"kernel\": \"%s\", \"mib\": %llu, \"gb_per_s\": %.1f, \"us\": %.2f, "
                   "\"of_equal_copy\": %.3f, \"of_copy\": %.3f, \"of_largest_copy\": %.3f}\n",
                   cases[k].name, (unsigned long long)mib[s], r->of[k][s],
                   (double)bytes_of(&cases[k], mib[s] << 18) / r->of[k][s] * 1e-3, r->of[k][s] / r->copy[k][s],
                   r->of[k][s] / r->of[0][s], r->of[k][s] / r->of[0][n_sizes - 1]);
}

int main(int argc, char **argv)
{
    static rates r;
    uint64_t mib[MAX_SIZES] = {1, 16, 64, 256, 1024};
    int n_sizes = argc > 1 ? 0 : 5, n = 0;
    for (int i = 1; i < argc && n_sizes < MAX_SIZES; i++) {
        mib[n_sizes] = strtoull(argv[i], NULL, 10);
        if (mib[n_sizes] == 0 || mib[n_sizes] > 8192 || (n_sizes > 0 && mib[n_sizes] < mib[n_sizes - 1])) {
            fprintf(stderr, "usage: bench_kernels [MIB…]: sizes from 1 to 8192 MiB, the largest last\n");
            return 2;
        }
        n_sizes++;
    }
    if (cudaGetDeviceCount(&n) != cudaSuccess || n == 0) {
        puts("bench_kernels is skipped: no GPU");
        return 77;
    }
    bench b;
    bench_open(&b, mib[n_sizes - 1] << 18);
    for (int s = 0; s < n_sizes; s++) {
        const uint64_t count = mib[s] << 18;
        write_table(&b, count);
        measure(&b, &r, s, count);
    }
    print_all(&r, mib, n_sizes);
    bench_close(&b);
    return 0;
}
