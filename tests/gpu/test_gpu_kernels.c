/* SPDX-License-Identifier: MIT */
/* The kernels on arrays of many tiles: to the bit what the host's do. Sums of squares: near the true ones, always the same. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../conformance/device_suite.h"
#include "../conformance/elements.h"
#include "gpu_suites.h"
#include "host/host.h"

enum { COUNT = 300007, N_SEGMENTS = 700, BYTES = 4 * (COUNT + 64) };

static device_suite suite_of_cuda(void) { return (device_suite){.backend = fsdp_cuda_backend(), .config = gpu_config}; }

/* An array on both sides, the same at first. */
typedef struct both {
    char *host, *gpu;
} both;

static char *back; /* [BYTES] */

static void copy(fixture *f, void *dst, const void *src, uint64_t bytes)
{
    launch(f, 0, (fsdp_device_op){.kind = FSDP_OPERATION_COPY, .u.copy = {dst, src, bytes}}, NULL);
    drain(f, 0);
}

static both make(fixture *f)
{
    both b = {malloc(BYTES), fixture_block(f, BYTES)};
    assert_non_null(b.host);
    return b;
}

/* Numbers from element `at` on; the rest is 0xa5 and must stay. */
static void fill(fixture *f, both *b, uint64_t at, uint64_t count, fsdp_dtype dtype, uint64_t seed)
{
    memset(b->host, 0xa5, BYTES);
    for (uint64_t i = 0; i < count; i++) store(b->host, at + i, number(seed, i), dtype);
    copy(f, b->gpu, b->host, BYTES);
}

static void assert_same(fixture *f, const both *b, const char *what)
{
    copy(f, back, b->gpu, BYTES);
    for (uint64_t i = 0; i < BYTES; i++)
        if (back[i] != b->host[i]) fail_msg("%s: byte %llu differs", what, (unsigned long long)i);
}

static void *element(char *base, uint64_t index, fsdp_dtype dtype) { return base + index * fsdp_dtype_bytes(dtype); }

/* ---- Cast and add ---- */

static void check_pair(fixture *f, both *dst, both *src, fsdp_dtype to, fsdp_dtype from)
{
    static const uint64_t offsets[][2] = {{0, 0}, {8, 16}, {1, 0}, {0, 3}};
    char what[64];
    for (EACH(i, offsets)) {
        uint64_t d = offsets[i][0], s = offsets[i][1], count = COUNT - i * 4096;
        snprintf(what, sizeof what, "%s to %s, case %zu", fsdp_dtype_name(from), fsdp_dtype_name(to), i);
        for (int add = 0; add < 2; add++) {
            fill(f, dst, d, count, to, 2 * i);
            fill(f, src, s, count, from, 2 * i + 1);
            for (int gpu = 0; gpu < 2; gpu++) {
                void *x = element(gpu ? dst->gpu : dst->host, d, to), *y = element(gpu ? src->gpu : src->host, s, from);
                fsdp_device_op op = {.kind = FSDP_OPERATION_CAST, .u.cast = {x, y, count, to, from}};
                if (add) op = (fsdp_device_op){.kind = FSDP_OPERATION_ADD, .u.add = {x, y, count, to, from}};
                if (gpu) launch(f, 0, op, NULL);
                else fsdp__host_kernel(&op);
            }
            assert_same(f, dst, what);
            assert_same(f, src, what);
        }
    }
}

static void casts_and_adds_of_many_tiles_are_the_hosts(void **state)
{
    fixture *f = *state;
    both dst = make(f), src = make(f);
    for (EACH(d, dtypes))
        for (EACH(s, dtypes)) check_pair(f, &dst, &src, dtypes[d], dtypes[s]);
    free(dst.host), free(src.host);
}

/* Every bf16 and fp16 there is, and fp32 values on both sides of every halfway point. */
static void every_16_bit_value_is_converted_as_on_the_host(void **state)
{
    fixture *f = *state;
    both dst = make(f), src = make(f);
    for (int half = 1; half < 3; half++) {
        memset(src.host, 0, BYTES);
        for (uint32_t i = 0; i < 65536; i++) ((uint16_t *)(void *)src.host)[i] = (uint16_t)i;
        for (int back_again = 0; back_again < 2; back_again++) {
            fsdp_dtype to = back_again ? dtypes[half] : FSDP_DTYPE_FP32,
                       from = back_again ? FSDP_DTYPE_FP32 : dtypes[half];
            uint64_t count = back_again ? 3 * 65536 : 65536;
            for (uint32_t i = 0; back_again && i < count; i++) {
                uint16_t bits = (uint16_t)(i / 3);
                float x = load(&bits, 0, dtypes[half]), next;
                uint16_t after = (uint16_t)(bits + 1);
                next = load(&after, 0, dtypes[half]);
                float middle = x + (next - x) * 0.5f;
                ((float *)(void *)src.host)[i] = i % 3 == 0 ? middle : nextafterf(middle, i % 3 == 1 ? x : next);
            }
            memset(dst.host, 0xa5, BYTES);
            copy(f, src.gpu, src.host, BYTES);
            copy(f, dst.gpu, dst.host, BYTES);
            fsdp__convert(dst.host, to, src.host, from, count);
            launch(f, 0, (fsdp_device_op){.kind = FSDP_OPERATION_CAST, .u.cast = {dst.gpu, src.gpu, count, to, from}},
                   NULL);
            assert_same(f, &dst, fsdp_dtype_name(dtypes[half]));
        }
    }
    free(dst.host), free(src.host);
}

/* ---- Over segments ---- */

/* More than a block reads at once; empty ones, ones of a few elements, and a long one; at multiples of 128 or anywhere. */
static uint64_t make_segments(fsdp_kernel_segment *segment, bool aligned)
{
    uint64_t at = aligned ? 0 : 1, total = 0;
    for (int i = 0; i < N_SEGMENTS; i++) {
        uint64_t count = i == 300 ? 150000 : (uint64_t)(i * 37 % 101);
        segment[i] = (fsdp_kernel_segment){at, count, 1.0f + (float)(i % 3), i % 2 ? 1.0f : 0.0f};
        at += aligned ? (count + 127) / 128 * 128 : count + 3;
        total += count;
    }
    assert_true(at <= COUNT);
    return total;
}

static fsdp_device_op sum_op(const both *x, const fsdp_kernel_segment *table, fsdp_dtype dtype, float *out)
{
    return (fsdp_device_op){
        .kind = FSDP_OPERATION_SQUARE_SUM,
        .u.square_sum = {
            .out = out, .x = x->gpu, .count = COUNT, .segments = table, .n_segments = N_SEGMENTS, .dtype = dtype}};
}

static float square_sum(fixture *f, int stream, const both *x, const fsdp_kernel_segment *table, fsdp_dtype dtype,
                        float *out)
{
    float result = 0.5f;
    copy(f, out, &result, sizeof result);
    launch(f, stream, sum_op(x, table, dtype, out), NULL);
    drain(f, stream);
    copy(f, &result, out, sizeof result);
    return result;
}

static void sums_of_squares_are_near_and_always_the_same(void **state)
{
    fixture *f = *state;
    static fsdp_kernel_segment segments[N_SEGMENTS];
    both x = make(f);
    fsdp_kernel_segment *table = fixture_block(f, sizeof segments);
    float *out = fixture_block(f, 64);
    for (EACH(t, dtypes)) {
        float sums[2];
        for (int aligned = 0; aligned < 2; aligned++) {
            make_segments(segments, aligned != 0);
            copy(f, table, segments, sizeof segments);
            memset(x.host, 0xff, BYTES); /* NaN: pads are never read */
            double exact = 0.5;
            uint64_t n = 0;
            for (int s = 0; s < N_SEGMENTS; s++) {
                for (uint64_t i = 0; i < segments[s].count; i++, n++) {
                    store(x.host, segments[s].offset + i, number(9, n), dtypes[t]);
                    double value = (double)load(x.host, segments[s].offset + i, dtypes[t]);
                    exact += value * value;
                }
            }
            copy(f, x.gpu, x.host, BYTES);
            sums[aligned] = square_sum(f, 0, &x, table, dtypes[t], out);
            assert_true(fabs((double)sums[aligned] - exact) <= exact * 1e-5);
            for (int again = 1; again < 8; again++)
                assert_true(square_sum(f, again % FIXTURE_STREAMS, &x, table, dtypes[t], out) == sums[aligned]);
        }
        assert_true(sums[0] == sums[1]); /* counts alone decide the order */
    }
    free(x.host);
}

/* As many launches on each stream as there are, none waiting for another stream's; and as many replays of a captured one. */
static void sums_in_flight_at_once_and_replayed_are_the_same(void **state)
{
    enum { TIMES = 50 };
    fixture *f = *state;
    static fsdp_kernel_segment segments[N_SEGMENTS];
    both x = make(f);
    fsdp_kernel_segment *table = fixture_block(f, sizeof segments);
    float *out = fixture_block(f, 256 * (FIXTURE_STREAMS + 2)), sums[FIXTURE_STREAMS + 2];
    cudaStream_t native = ((fsdp__cuda_stream *)f->stream[1])->native;
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    make_segments(segments, true);
    copy(f, table, segments, sizeof segments);
    fill(f, &x, 0, COUNT, FSDP_DTYPE_FP32, 9);
    launch(f, 0, (fsdp_device_op){.kind = FSDP_OPERATION_FILL, .u.fill = {out, 256 * (FIXTURE_STREAMS + 2), 0}}, NULL);
    drain(f, 0);
    for (int i = 0; i < TIMES; i++) {
        launch(f, 0, sum_op(&x, table, FSDP_DTYPE_FP32, out), NULL);
        drain(f, 0);
    }
    for (int i = 0; i < TIMES * FIXTURE_STREAMS; i++) {
        int s = i % FIXTURE_STREAMS;
        launch(f, s, sum_op(&x, table, FSDP_DTYPE_FP32, out + 64 * (s + 1)), NULL);
    }
    for (int s = 0; s < FIXTURE_STREAMS; s++) drain(f, s);
    CUDA(cudaStreamBeginCapture(native, cudaStreamCaptureModeThreadLocal));
    launch(f, 1, sum_op(&x, table, FSDP_DTYPE_FP32, out + 64 * (FIXTURE_STREAMS + 1)), NULL);
    CUDA(cudaStreamEndCapture(native, &graph));
    CUDA(cudaGraphInstantiate(&replay, graph, 0));
    for (int i = 0; i < TIMES; i++) CUDA(cudaGraphLaunch(replay, native));
    drain(f, 1);
    for (int s = 0; s < FIXTURE_STREAMS + 2; s++) copy(f, &sums[s], out + (ptrdiff_t)64 * s, sizeof *sums);
    assert_true(sums[0] > 0);
    for (int s = 1; s < FIXTURE_STREAMS + 2; s++) assert_true(sums[s] == sums[0]);
    CUDA(cudaGraphExecDestroy(replay));
    CUDA(cudaGraphDestroy(graph));
    free(x.host);
}

/* Now and then no gradient, and moments from the whole range: divisions and roots go another way near its ends. */
static void put_extremes(both array[4], fsdp_dtype gradient_dtype)
{
    static const float ms[] = {0.0f,    -0.0f, 1e-45f, -1e-40f,  3e-38f, -8e-25f, 9e-25f,
                               -1e-24f, 1e-9f, 1e12f,  -1.2e12f, 1e20f,  -1e30f},
                       vs[] = {0.0f, 1e-45f, 1e-38f, 8e-25f, 9e-25f, 1e-16f, 1e12f, 1.2e12f, 3e38f};
    float *m = (float *)(void *)array[2].host, *v = (float *)(void *)array[3].host;
    for (uint64_t i = 0; i < COUNT; i++) {
        v[i] = fabsf(v[i]);
        if (i / 1000 % 3 != 0 || i % 7 != 3) continue;
        store(array[1].host, i, 0.0f, gradient_dtype);
        m[i] = ms[i / 7 % (sizeof ms / sizeof *ms)];
        v[i] = vs[i / 91 % (sizeof vs / sizeof *vs)];
    }
}

static void check_adamw(fixture *f, both array[4], const fsdp_kernel_segment *segments,
                        const fsdp_kernel_segment *table, fsdp_device_step *gpu_step, const fsdp_dtype types[2])
{
    fsdp_device_step step = {
        .factor = 0.125f, .lr = 0.01f, .bias1 = 0.271f, .bias2 = 0.002997f, .updates = 3, .skip = 0};
    if (types[0] == FSDP_DTYPE_FP16) step.bias2 = 1e-10f; /* so small that all go that other way */
    /* the divisor whose reciprocal is the hardest to round; bias1 comes to it after some 160 steps */
    if (types[1] == FSDP_DTYPE_BF16) step.bias1 = step.bias2 = 0x1.fffffep-1f;
    copy(f, gpu_step, &step, sizeof step);
    for (int k = 0; k < 4; k++) fill(f, &array[k], 0, COUNT, k < 2 ? types[k] : FSDP_DTYPE_FP32, (uint64_t)k);
    put_extremes(array, types[1]);
    for (int k = 1; k < 4; k++) copy(f, array[k].gpu, array[k].host, BYTES);
    for (int gpu = 0; gpu < 2; gpu++) {
        char *at[4];
        for (int k = 0; k < 4; k++) at[k] = gpu ? array[k].gpu : array[k].host;
        fsdp_device_op op = {.kind = FSDP_OPERATION_ADAMW,
                             .u.adamw = {.master = at[0],
                                         .gradient = at[1],
                                         .m = (float *)(void *)at[2],
                                         .v = (float *)(void *)at[3],
                                         .count = COUNT,
                                         .segments = gpu ? table : segments,
                                         .n_segments = N_SEGMENTS,
                                         .step = gpu ? gpu_step : &step,
                                         .beta1 = 0.9f,
                                         .beta2 = 0.999f,
                                         .eps = 1e-8f,
                                         .weight_decay = 0.1f,
                                         .master_dtype = types[0],
                                         .gradient_dtype = types[1]}};
        if (gpu) launch(f, 0, op, NULL);
        else fsdp__host_kernel(&op);
    }
    static const char *const names[] = {"weights", "gradients", "m", "v"};
    for (int k = 0; k < 4; k++) assert_same(f, &array[k], names[k]);
}

static void adamw_over_many_segments_is_the_hosts_to_the_bit(void **state)
{
    fixture *f = *state;
    static fsdp_kernel_segment segments[N_SEGMENTS];
    both array[4];
    for (int k = 0; k < 4; k++) array[k] = make(f);
    fsdp_kernel_segment *table = fixture_block(f, sizeof segments);
    fsdp_device_step *step = fixture_block(f, sizeof *step);
    for (int aligned = 0; aligned < 2; aligned++) {
        make_segments(segments, aligned != 0);
        copy(f, table, segments, sizeof segments);
        for (EACH(w, dtypes))
            for (EACH(g, dtypes)) {
                const fsdp_dtype types[2] = {dtypes[w], dtypes[g]};
                check_adamw(f, array, segments, table, step, types);
            }
    }
    for (int k = 0; k < 4; k++) free(array[k].host);
}

#define TEST(name)                                           \
    {                                                        \
#name, name, fixture_setup, fixture_teardown, &suite \
    }

int main(void)
{
    if (gpu_is_missing("test_gpu_kernels")) return 77;
    device_suite suite = suite_of_cuda();
    back = malloc(BYTES);
    if (back == NULL) return 1;
    const struct CMUnitTest tests[] = {
        TEST(casts_and_adds_of_many_tiles_are_the_hosts),       TEST(every_16_bit_value_is_converted_as_on_the_host),
        TEST(sums_of_squares_are_near_and_always_the_same),     TEST(sums_in_flight_at_once_and_replayed_are_the_same),
        TEST(adamw_over_many_segments_is_the_hosts_to_the_bit),
    };
    int failed = cmocka_run_group_tests_name("CUDA kernels", tests, NULL, NULL);
    free(back);
    return failed > 0;
}
