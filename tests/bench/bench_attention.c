/* SPDX-License-Identifier: MIT */
/* How fast the trainer's attention is on the GPU: forward and backward for the shapes of GPT-2 124M and 1.5B, medians of 20
 * runs by events, one line a shape. TFLOP/s count what a causal product needs, 4 × B × N × T² × H / 2 forward and 2.5 times
 * that backward; what is computed twice is not counted. Inputs are far larger than the L2. */
#include <stdio.h>
#include <stdlib.h>

#include "attention.h"
#include "gpt_bench.h"
#include "sorted.h"

enum { WARM = 3, RUNS = 20, N_RANDOM = 1 << 22 };

typedef struct shape {
    const char *name;
    int layers, sequences, positions, heads, head_dim;
} shape;

static const shape shapes[] = {
    {"124M", 12, 64, 1024, 12, 64},
    {"1.5B", 48, 16, 1024, 25, 64},
    {"124M, 4096 long", 12, 16, 4096, 12, 64},
    {"heads of 128", 12, 64, 1024, 6, 128},
    {"heads of 32", 12, 64, 1024, 24, 32},
};

/* Milliseconds. */
static float median(cudaError_t (*run)(cudaStream_t, const gpt_attention_args *), cudaStream_t stream,
                    const gpt_attention_args *args)
{
    cudaEvent_t from[RUNS], to[RUNS];
    float ms[RUNS];
    for (int i = 0; i < WARM; i++) check(run(stream, args));
    for (int i = 0; i < RUNS; i++) {
        check(cudaEventCreate(&from[i]));
        check(cudaEventCreate(&to[i]));
        check(cudaEventRecord(from[i], stream));
        check(run(stream, args));
        check(cudaEventRecord(to[i], stream));
    }
    check(cudaStreamSynchronize(stream));
    for (int i = 0; i < RUNS; i++) {
        check(cudaEventElapsedTime(&ms[i], from[i], to[i]));
        check(cudaEventDestroy(from[i]));
        check(cudaEventDestroy(to[i]));
    }
    sort_floats(ms, RUNS);
    return (ms[RUNS / 2 - 1] + ms[RUNS / 2]) / 2;
}

static void bench(cudaStream_t stream, const shape *s)
{
    const size_t count = (size_t)s->sequences * (size_t)s->positions * (size_t)s->heads * (size_t)s->head_dim;
    gpt_attention_args args = {
        .sequences = s->sequences, .positions = s->positions, .heads = s->heads, .head_dim = s->head_dim};
    void *const qkv = device_random(3 * count, N_RANDOM, 0, 1), *const dout = device_random(count, N_RANDOM, 0, 1);
    args.qkv = qkv;
    args.dout = dout;
    args.out = device(2 * count);
    args.dqkv = device(6 * count);
    args.lse = device(gpt_attention_lse_bytes(&args));
    args.scratch = device(gpt_attention_scratch_bytes(&args));
    const double forward_ms = (double)median(gpt_attention_forward, stream, &args);
    const double backward_ms = (double)median(gpt_attention_backward, stream, &args);
    const double forward_flops = 2.0 * (double)count * (double)s->positions;
    printf("%-16s %4d %6d %4d %4d   %8.3f %8.1f   %8.3f %8.1f   %9.2f\n", s->name, s->sequences, s->positions, s->heads,
           s->head_dim, forward_ms, forward_flops / forward_ms * 1e-9, backward_ms,
           2.5 * forward_flops / backward_ms * 1e-9, s->layers * (forward_ms + backward_ms));
    void *const all[] = {qkv, dout, args.out, args.dqkv, args.lse, args.scratch};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) check(cudaFree(all[i]));
}

int main(void)
{
    int n_devices = 0;
    if (cudaGetDeviceCount(&n_devices) != cudaSuccess || n_devices == 0) {
        printf("bench_attention: no GPU\n");
        return 77;
    }
    check(gpt_attention_init());
    cudaStream_t stream;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    printf("%-16s %4s %6s %4s %4s   %8s %8s   %8s %8s   %9s\n", "", "B", "T", "N", "H", "fwd ms", "TFLOP/s", "bwd ms",
           "TFLOP/s", "layers ms");
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) bench(stream, &shapes[i]);
    check(cudaStreamDestroy(stream));
    return 0;
}
