/* SPDX-License-Identifier: MIT */
/* The comparison's compute (block_cuda.h), plain and fused, against the same in double on the host: else two ways could be
 * compared at computing something else. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "block_cuda.h"
#include "convert.h"

enum { D = 128, W = 4 * D, T = 200, LAYERS = 2, ELEMS = 8 * D * D + 5 * D };

#define CUDA(call) assert_int_equal(call, cudaSuccess)

static double bf16_value(float x) { return (double)fsdp__from_bf16(fsdp__to_bf16(x)); }

static double gelu(double x) { return 0.5 * x * (1.0 + tanh(0.7978845608 * (x + 0.044715 * x * x * x))); }

static double gelu_slope(double x)
{
    const double t = tanh(0.7978845608 * (x + 0.044715 * x * x * x));
    return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * 0.7978845608 * (1.0 + 3.0 * 0.044715 * x * x);
}

typedef struct reference {
    double w[LAYERS][ELEMS], g[LAYERS][ELEMS];
    double x[LAYERS + 1][T][D], u[LAYERS][T][W], dy[T][D], du[T][W];
    double loss;
} reference;

/* out (T, rows) = in (T, columns) wᵀ + b */
static void linear(double *out, const double *in, const double *w, const double *b, int rows, int columns)
{
    for (int t = 0; t < T; t++) {
        for (int r = 0; r < rows; r++) {
            double sum = b[r];
            for (int c = 0; c < columns; c++) sum += in[t * columns + c] * w[r * columns + c];
            out[t * rows + r] = sum;
        }
    }
}

/* dw (rows, columns) = doutᵀ in, db = Σ dout, din += dout w */
static void linear_back(const double *dout, const double *in, const double *w, double *dw, double *din, int rows,
                        int columns)
{
    for (int t = 0; t < T; t++) {
        for (int r = 0; r < rows; r++) {
            const double g = dout[t * rows + r];
            dw[rows * columns + r] += g; /* the bias lies behind its weight */
            for (int c = 0; c < columns; c++) {
                dw[r * columns + c] += g * in[t * columns + c];
                din[t * columns + c] += g * w[r * columns + c];
            }
        }
    }
}

static void run_reference(reference *r)
{
    static double h[T][W], z[T][D], dh[T][W];
    const int down = W * D + W;
    for (int i = 0; i < T * D; i++)
        (&r->x[0][0][0])[i] = bf16_value(block_noise(0x5eed0000u, (uint64_t)i) * 1.7320508f);
    for (int l = 0; l < LAYERS; l++) {
        linear(&r->u[l][0][0], &r->x[l][0][0], r->w[l], r->w[l] + W * D, W, D);
        for (int i = 0; i < T * W; i++) (&h[0][0])[i] = gelu((&r->u[l][0][0])[i]);
        linear(&z[0][0], &h[0][0], r->w[l] + down, r->w[l] + down + D * W, D, W);
        for (int i = 0; i < T * D; i++) (&r->x[l + 1][0][0])[i] = (&r->x[l][0][0])[i] + (&z[0][0])[i];
    }
    for (int i = 0; i < T * D; i++) {
        const double y = (&r->x[LAYERS][0][0])[i];
        r->loss += y * y / (T * D);
        (&r->dy[0][0])[i] = 2.0 * y / (T * D);
    }
    for (int l = LAYERS - 1; l >= 0; l--) {
        for (int i = 0; i < T * W; i++) (&h[0][0])[i] = gelu((&r->u[l][0][0])[i]);
        memset(dh, 0, sizeof dh);
        linear_back(&r->dy[0][0], &h[0][0], r->w[l] + down, r->g[l] + down, &dh[0][0], D, W);
        for (int i = 0; i < T * W; i++) (&r->du[0][0])[i] = (&dh[0][0])[i] * gelu_slope((&r->u[l][0][0])[i]);
        linear_back(&r->du[0][0], &r->x[l][0][0], r->w[l], r->g[l], &r->dy[0][0], W, D);
    }
}

/* What the GPU computes: gradients of every layer, and the loss. */
typedef struct outcome {
    float g[LAYERS][ELEMS];
    float loss;
} outcome;

static void run_blocks(bool fused, outcome *out)
{
    static uint16_t bits[ELEMS];
    cudaStream_t stream;
    char *weights[LAYERS];
    float *gradients[LAYERS];
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    const block_math_config config = {LAYERS, D, 0, T + 56, fused, stream};
    block_math *math = block_math_create(&config);
    block_math_set_tokens(math, T);
    const void *params[LAYERS][BLOCK_PARAMS];
    float *grads[LAYERS][BLOCK_PARAMS];
    for (int l = 0; l < LAYERS; l++) {
        for (int i = 0; i < ELEMS; i++)
            bits[i] = fsdp__to_bf16(block_first_value((uint32_t)l, D, block_first_scales(D), (uint64_t)i));
        CUDA(cudaMalloc((void **)&weights[l], sizeof bits));
        CUDA(cudaMalloc((void **)&gradients[l], sizeof out->g[l]));
        CUDA(cudaMemcpy(weights[l], bits, sizeof bits, cudaMemcpyHostToDevice));
        CUDA(cudaMemset(gradients[l], 0xff, sizeof out->g[l])); /* whoever adds to it gets NaN */
        for (int i = 0; i < BLOCK_PARAMS; i++) {
            params[l][i] = weights[l] + 2 * block_offset(D, i);
            grads[l][i] = gradients[l] + block_offset(D, i);
        }
    }
    CUDA(cudaDeviceSynchronize());
    CUDA(cudaDeviceSynchronize());
    for (uint32_t l = 0; l < LAYERS; l++) block_forward(math, l, params[l]);
    block_loss(math);
    for (uint32_t l = LAYERS; l-- > 0;) block_backward(math, l, params[l], grads[l]);
    CUDA(cudaStreamSynchronize(stream));
    CUDA(cudaMemcpy(&out->loss, block_math_loss(math), sizeof out->loss, cudaMemcpyDeviceToHost));
    for (int l = 0; l < LAYERS; l++) {
        CUDA(cudaMemcpy(out->g[l], gradients[l], sizeof out->g[l], cudaMemcpyDeviceToHost));
        CUDA(cudaFree(weights[l]));
        CUDA(cudaFree(gradients[l]));
    }
    block_math_destroy(math);
    CUDA(cudaStreamDestroy(stream));
}

static reference *the_reference;

static int make_reference(void **state)
{
    (void)state;
    reference *r = calloc(1, sizeof *r);
    if (r == NULL) return -1;
    for (int l = 0; l < LAYERS; l++)
        for (int i = 0; i < ELEMS; i++)
            r->w[l][i] = bf16_value(block_first_value((uint32_t)l, D, block_first_scales(D), (uint64_t)i));
    run_reference(r);
    the_reference = r;
    return 0;
}

static int free_reference(void **state)
{
    (void)state;
    free(the_reference);
    return 0;
}

/* The distance, by length of the vectors: bf16 activations carry about 2⁻⁹ of noise each. */
static void compare(const outcome *out)
{
    static const char *const names[BLOCK_PARAMS] = {"W1", "b1", "W2", "b2"};
    const reference *r = the_reference;
    if (!(fabs((double)out->loss - r->loss) < 2e-3 * r->loss))
        fail_msg("loss %.9g, not %.9g", (double)out->loss, r->loss);
    for (int l = 0; l < LAYERS; l++) {
        for (int p = 0; p < BLOCK_PARAMS; p++) {
            double error = 0.0, length = 0.0;
            for (uint64_t i = block_offset(D, p); i < block_offset(D, p + 1); i++) {
                const double e = (double)out->g[l][i] - r->g[l][i];
                error += e * e;
                length += r->g[l][i] * r->g[l][i];
            }
            const double far = sqrt(error / length);
            if (!(far < 0.02)) fail_msg("layer %d: gradient of %s is off by %.3g of its length", l, names[p], far);
        }
    }
}

static void plain_blocks_compute_what_the_host_does(void **state)
{
    (void)state;
    outcome *out = calloc(1, sizeof *out);
    run_blocks(false, out);
    compare(out);
    free(out);
}

static void fused_blocks_compute_what_the_host_does(void **state)
{
    (void)state;
    outcome *out = calloc(1, sizeof *out);
    run_blocks(true, out);
    compare(out);
    free(out);
}

static void the_same_bits_come_out_again(void **state)
{
    (void)state;
    for (int fused = 0; fused < 2; fused++) {
        outcome *first = calloc(1, sizeof *first), *second = calloc(1, sizeof *second);
        run_blocks(fused == 1, first);
        run_blocks(fused == 1, second);
        assert_memory_equal(first, second, sizeof *first);
        free(first);
        free(second);
    }
}

static void first_values_are_the_same_on_host_and_gpu(void **state)
{
    (void)state;
    static float values[ELEMS + 128];
    float *device;
    CUDA(cudaMalloc((void **)&device, sizeof values));
    block_first_values(device, 0, ELEMS + 128, 3, D, 0);
    CUDA(cudaMemcpy(values, device, sizeof values, cudaMemcpyDeviceToHost));
    CUDA(cudaFree(device));
    for (uint64_t i = 0; i < ELEMS + 128; i++) {
        const float wanted = i < ELEMS ? block_first_value(3, D, block_first_scales(D), i) : 0.0f; /* the pad */
        assert_memory_equal(&values[i], &wanted, sizeof wanted);
    }
}

/* Two updates of one weight by the formula. */
static void adamw_is_pytorchs(void **state)
{
    (void)state;
    float *device, host[16]; /* w, g, m, v: four each */
    block_record *record;
    for (int i = 0; i < 4; i++) host[i] = 0.5f, host[4 + i] = 0.25f * (float)(i + 1), host[8 + i] = host[12 + i] = 0.0f;
    CUDA(cudaMalloc((void **)&device, sizeof host));
    CUDA(cudaMalloc((void **)&record, sizeof *record));
    CUDA(cudaMemset(record, 0, sizeof *record));
    CUDA(cudaMemcpy(device, host, sizeof host, cudaMemcpyHostToDevice));
    for (int i = 0; i < 2; i++) {
        block_advance(record, 0);
        block_adamw(device, device + 4, device + 8, device + 12, 4, record, 0.5f, 0);
    }
    CUDA(cudaMemcpy(host, device, sizeof host, cudaMemcpyDeviceToHost));
    for (int i = 0; i < 4; i++) {
        double w = 0.5, m = 0.0, v = 0.0;
        const double g = 0.125 * (i + 1);
        for (int t = 1; t <= 2; t++) {
            m = 0.9 * m + 0.1 * g;
            v = 0.999 * v + 0.001 * g * g;
            w -= 1e-4 * (m / (1 - pow(0.9, t)) / (sqrt(v / (1 - pow(0.999, t))) + 1e-8) + 0.01 * w);
        }
        assert_true(fabs((double)host[i] - w) < 1e-6);
    }
    CUDA(cudaFree(device));
    CUDA(cudaFree(record));
}

/* The norm over two shards, and the scale of a gradient that is too long and of one that is not. */
static void clipping_is_pytorchs(void **state)
{
    (void)state;
    enum { COUNT = 4 * 300000 };
    static float host[COUNT];
    float *device, *partial;
    block_record *record, seen;
    double wanted = 0.0;
    for (int i = 0; i < COUNT; i++) {
        host[i] = block_noise(9, (uint64_t)i);
        wanted += (double)host[i] * host[i];
    }
    wanted = sqrt(2.0 * wanted) * 0.5;
    CUDA(cudaMalloc((void **)&device, sizeof host));
    CUDA(cudaMalloc((void **)&partial, (2 * BLOCK_SUMS + 1) * sizeof(float)));
    CUDA(cudaMalloc((void **)&record, sizeof *record));
    CUDA(cudaMemset(record, 0, sizeof *record));
    CUDA(cudaMemcpy(device, host, sizeof host, cudaMemcpyHostToDevice));
    for (int i = 0; i < 2; i++) block_square_sums(partial + i * BLOCK_SUMS, device, COUNT, 0);
    block_add_sums(partial + 2 * BLOCK_SUMS, partial, 2, 0);
    for (int way = 0; way < 2; way++) {
        const float most = way == 0 ? 1.0f : 1e9f;
        block_clip(record, partial + 2 * BLOCK_SUMS, 0.5f, most, 0);
        CUDA(cudaMemcpy(&seen, record, sizeof seen, cudaMemcpyDeviceToHost));
        assert_true(fabs((double)seen.norm / wanted - 1.0) < 1e-4);
        assert_true(fabs((double)seen.scale - (way == 0 ? 1.0 / wanted : 1.0)) < 1e-4 * (double)seen.scale);
    }
    CUDA(cudaFree(device));
    CUDA(cudaFree(partial));
    CUDA(cudaFree(record));
}

int main(void)
{
    int n = 0;
    if (cudaGetDeviceCount(&n) != cudaSuccess || n == 0) {
        puts("test_gpu_blocks: no GPU, skipped");
        return 77;
    }
    alarm(100);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plain_blocks_compute_what_the_host_does),
        cmocka_unit_test(fused_blocks_compute_what_the_host_does),
        cmocka_unit_test(the_same_bits_come_out_again),
        cmocka_unit_test(first_values_are_the_same_on_host_and_gpu),
        cmocka_unit_test(adamw_is_pytorchs),
        cmocka_unit_test(clipping_is_pytorchs),
    };
    return cmocka_run_group_tests(tests, make_reference, free_reference);
}
