/* SPDX-License-Identifier: MIT */
/* The kernels of a GPT, forward and backward, by hand: plain loops that the compiler turns into vectors, and GEMMs. */
#include "gpt_math.h"

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "gemm.h"

enum { LANES = 8 }; /* partial sums of a reduction: C has no licence to reorder a sum, so the source does it */

static float add_lanes(const float *part)
{
    return ((part[0] + part[4]) + (part[2] + part[6])) + ((part[1] + part[5]) + (part[3] + part[7]));
}

static float sum_of(const float *x, int count)
{
    float part[LANES] = {0.0f}, rest = 0.0f;
    int i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int j = 0; j < LANES; j++) part[j] += x[i + j];
    for (; i < count; i++) rest += x[i];
    return add_lanes(part) + rest;
}

static float square_sum_around(const float *x, float centre, int count)
{
    float part[LANES] = {0.0f}, rest = 0.0f;
    int i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int j = 0; j < LANES; j++) part[j] += (x[i + j] - centre) * (x[i + j] - centre);
    for (; i < count; i++) rest += (x[i] - centre) * (x[i] - centre);
    return add_lanes(part) + rest;
}

static float dot(const float *x, const float *y, int count)
{
    float part[LANES] = {0.0f}, rest = 0.0f;
    int i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int j = 0; j < LANES; j++) part[j] += x[i + j] * y[i + j];
    for (; i < count; i++) rest += x[i] * y[i];
    return add_lanes(part) + rest;
}

/* x becomes e^x, to about 2 units in the last place. No branch, no call: both loops become vectors (in one loop gcc makes
 * branches of the cut). x is cut to ±87, where fp32 ends. e^x = 2^n e^r with n = round(x / ln 2), |r| <= ln 2 / 2; the
 * polynomial is Cephes' expf. */
static void exponentials(float *x, int count)
{
    const float shift = 12582912.0f; /* 1.5 × 2^23: a sum with it has no fraction bits, and n in its lowest */
    for (int i = 0; i < count; i++) {
        const float low = x[i] < -87.0f ? -87.0f : x[i];
        x[i] = low > 87.0f ? 87.0f : low;
    }
    for (int i = 0; i < count; i++) {
        const float shifted = x[i] * 1.44269504f + shift, n = shifted - shift;
        const float r = (x[i] - n * 0.693359375f) - n * -2.12194440e-4f;
        float e = 1.9875691500e-4f;
        e = e * r + 1.3981999507e-3f;
        e = e * r + 8.3334519073e-3f;
        e = e * r + 4.1665795894e-2f;
        e = e * r + 1.6666665459e-1f;
        e = e * r + 5.0000001201e-1f;
        e = e * r * r + r + 1.0f;
        uint32_t bits;
        memcpy(&bits, &shifted, sizeof bits);
        bits = (bits - 0x4b400000u + 127u) << 23; /* less shift's own bits: 2^n */
        float power;
        memcpy(&power, &bits, sizeof power);
        x[i] = e * power;
    }
}

static void normalise_row(const layernorm *ln, int row, const float *x, const float *w, const float *b, int channels)
{
    const float mean = sum_of(x, channels) / (float)channels;
    const float inverse_sd = 1.0f / sqrtf(square_sum_around(x, mean, channels) / (float)channels + 1e-5f);
    float *out = ln->out + (ptrdiff_t)row * channels;
    for (int i = 0; i < channels; i++) out[i] = (x[i] - mean) * inverse_sd * w[i] + b[i];
    ln->mean[row] = mean;
    ln->inverse_sd[row] = inverse_sd;
}

void layernorm_forward(const layernorm *ln, const float *x, const float *w, const float *b, int rows, int channels)
{
    for (int row = 0; row < rows; row++, x += channels) normalise_row(ln, row, x, w, b, channels);
}

void residual_layernorm_forward(float *sum, const layernorm *ln, const float *x, const float *y, const float *w,
                                const float *b, int rows, int channels)
{
    for (int row = 0; row < rows; row++, x += channels, y += channels, sum += channels) {
        for (int i = 0; i < channels; i++) sum[i] = x[i] + y[i];
        normalise_row(ln, row, sum, w, b, channels);
    }
}

/* With n = (x − mean) / sd and g = w dout:  dx = (g − mean(g) − n mean(g n)) / sd. */
void layernorm_backward(float *dx, float *dw, float *db, const float *dout, const layernorm *ln, const float *x,
                        const float *w, int rows, int channels)
{
    for (int row = 0; row < rows; row++, x += channels, dx += channels, dout += channels) {
        const float mean = ln->mean[row], inverse_sd = ln->inverse_sd[row];
        float g_sum[LANES] = {0.0f}, gn_sum[LANES] = {0.0f};
        for (int i = 0; i < channels; i++) {
            const float g = w[i] * dout[i], n = (x[i] - mean) * inverse_sd;
            g_sum[i % LANES] += g;
            gn_sum[i % LANES] += g * n;
        }
        const float g_mean = add_lanes(g_sum) / (float)channels, gn_mean = add_lanes(gn_sum) / (float)channels;
        for (int i = 0; i < channels; i++) {
            const float n = (x[i] - mean) * inverse_sd;
            dw[i] += n * dout[i];
            db[i] += dout[i];
            dx[i] += (w[i] * dout[i] - g_mean - n * gn_mean) * inverse_sd;
        }
    }
}

void linear_forward(float *out, const float *x, const float *w, const float *bias, int rows, int n_in, int n_out)
{
    if (bias)
        for (int row = 0; row < rows; row++) memcpy(out + (ptrdiff_t)row * n_out, bias, (size_t)n_out * sizeof *bias);
    gemm(rows, n_out, n_in, gemm_from(x, n_in), gemm_transposed(w, n_in), (gemm_target){out, n_out, bias != NULL});
}

void linear_backward(float *dx, float *dw, float *dbias, const float *dout, const float *x, const float *w, int rows,
                     int n_in, int n_out)
{
    gemm(rows, n_in, n_out, gemm_from(dout, n_out), gemm_from(w, n_in), gemm_into(dx, n_in));
    gemm(n_out, n_in, rows, gemm_transposed(dout, n_out), gemm_from(x, n_in), gemm_onto(dw, n_in));
    if (!dbias) return;
    for (int row = 0; row < rows; row++, dout += n_out)
        for (int i = 0; i < n_out; i++) dbias[i] += dout[i];
}

/* (1 + tanh(u)) / 2 is the logistic function of 2u, which needs one exponential. */
static const float gelu_slope = 1.5957691216f; /* 2 √(2/π) */
static const float gelu_cubic = 0.044715f;

enum { CHUNK = 512 };

/* e = exp(−2u) for each of x. */
static void gelu_exponentials(float *e, const float *x, int count)
{
    for (int i = 0; i < count; i++) e[i] = -gelu_slope * (x[i] + gelu_cubic * x[i] * x[i] * x[i]);
    exponentials(e, count);
}

void gelu_forward(float *out, const float *x, int count)
{
    float e[CHUNK];
    for (int done = 0; done < count; done += CHUNK, out += CHUNK, x += CHUNK) {
        const int n = count - done < CHUNK ? count - done : CHUNK;
        gelu_exponentials(e, x, n);
        for (int i = 0; i < n; i++) out[i] = x[i] / (1.0f + e[i]);
    }
}

void gelu_backward(float *dx, const float *dout, const float *x, int count)
{
    float e[CHUNK];
    for (int done = 0; done < count; done += CHUNK, dx += CHUNK, dout += CHUNK, x += CHUNK) {
        const int n = count - done < CHUNK ? count - done : CHUNK;
        gelu_exponentials(e, x, n);
        for (int i = 0; i < n; i++) {
            const float s = 1.0f / (1.0f + e[i]), slope = gelu_slope * (1.0f + 3.0f * gelu_cubic * x[i] * x[i]);
            dx[i] = dout[i] * (s + x[i] * s * (1.0f - s) * slope);
        }
    }
}

/* Each row t of scores (T, T) becomes its softmax over columns 0 … t, and zero beyond. */
static void causal_softmax(float *scores, int positions, float scale)
{
    for (int t = 0; t < positions; t++, scores += positions) {
        float most = scores[0];
        for (int i = 1; i <= t; i++) most = scores[i] > most ? scores[i] : most;
        for (int i = 0; i <= t; i++) scores[i] = (scores[i] - most) * scale;
        exponentials(scores, t + 1);
        const float inverse = 1.0f / sum_of(scores, t + 1);
        for (int i = 0; i <= t; i++) scores[i] *= inverse;
        memset(scores + t + 1, 0, (size_t)(positions - t - 1) * sizeof *scores);
    }
}

/* Scores' gradient from the weights' (both (T, T), in place): ds = scale × p (dp − Σ dp p); zero beyond the diagonal. */
static void causal_softmax_backward(float *dp, const float *p, int positions, float scale)
{
    for (int t = 0; t < positions; t++, dp += positions, p += positions) {
        const float mean = dot(dp, p, t + 1);
        for (int i = 0; i <= t; i++) dp[i] = scale * p[i] * (dp[i] - mean);
        memset(dp + t + 1, 0, (size_t)(positions - t - 1) * sizeof *dp);
    }
}

void attention_forward(float *out, float *p, const float *qkv, const attention_shape *shape)
{
    const int T = shape->positions, C = shape->channels, N = shape->heads, H = C / N;
    const float scale = 1.0f / sqrtf((float)H);
    for (int head = 0; head < shape->sequences * N; head++, p += (ptrdiff_t)T * T) {
        const ptrdiff_t first = (ptrdiff_t)(head / N) * T;
        const float *q = qkv + first * 3 * C + head % N * H, *k = q + C, *v = k + C;
        gemm(T, T, H, gemm_from(q, 3 * C), gemm_transposed(k, 3 * C), gemm_into(p, T));
        causal_softmax(p, T, scale);
        gemm(T, H, T, gemm_from(p, T), gemm_from(v, 3 * C), gemm_into(out + first * C + head % N * H, C));
    }
}

void attention_backward(float *dqkv, float *dp, const float *dout, const float *p, const float *qkv,
                        const attention_shape *shape)
{
    const int T = shape->positions, C = shape->channels, N = shape->heads, H = C / N;
    const float scale = 1.0f / sqrtf((float)H);
    for (int head = 0; head < shape->sequences * N; head++, p += (ptrdiff_t)T * T) {
        const ptrdiff_t first = (ptrdiff_t)(head / N) * T, at = first * 3 * C + head % N * H;
        const float *q = qkv + at, *k = q + C, *v = k + C, *d = dout + first * C + head % N * H;
        float *dq = dqkv + at, *dk = dq + C, *dv = dk + C;
        gemm(T, H, T, gemm_transposed(p, T), gemm_from(d, C), gemm_into(dv, 3 * C));
        gemm(T, T, H, gemm_from(d, C), gemm_transposed(v, 3 * C), gemm_into(dp, T));
        causal_softmax_backward(dp, p, T, scale);
        gemm(T, H, T, gemm_from(dp, T), gemm_from(k, 3 * C), gemm_into(dq, 3 * C));
        gemm(T, H, T, gemm_transposed(dp, T), gemm_from(q, 3 * C), gemm_into(dk, 3 * C));
    }
}

void embedding_forward(float *out, const int *tokens, const float *wte, const float *wpe, int sequences, int positions,
                       int channels)
{
    for (int row = 0; row < sequences * positions; row++, out += channels) {
        const float *token = wte + (ptrdiff_t)tokens[row] * channels;
        const float *position = wpe + (ptrdiff_t)(row % positions) * channels;
        for (int i = 0; i < channels; i++) out[i] = token[i] + position[i];
    }
}

void embedding_backward(float *dwte, float *dwpe, const float *dout, const int *tokens, int sequences, int positions,
                        int channels)
{
    for (int row = 0; row < sequences * positions; row++, dout += channels) {
        float *token = dwte + (ptrdiff_t)tokens[row] * channels;
        float *position = dwpe + (ptrdiff_t)(row % positions) * channels;
        for (int i = 0; i < channels; i++) token[i] += dout[i];
        for (int i = 0; i < channels; i++) position[i] += dout[i];
    }
}

void cross_entropy_forward(float *losses, float *log_sums, const float *logits, const int *targets, int rows)
{
    for (int row = 0; row < rows; row++, logits += GPT_VOCAB) {
        float most = logits[0], e[GPT_VOCAB];
        for (int i = 1; i < GPT_VOCAB; i++) most = logits[i] > most ? logits[i] : most;
        for (int i = 0; i < GPT_VOCAB; i++) e[i] = logits[i] - most;
        exponentials(e, GPT_VOCAB);
        log_sums[row] = most + logf(sum_of(e, GPT_VOCAB));
        losses[row] = log_sums[row] - logits[targets[row]];
    }
}

void cross_entropy_backward(float *logits, const float *log_sums, const int *targets, float scale, int rows)
{
    for (int row = 0; row < rows; row++, logits += GPT_VOCAB) {
        for (int i = 0; i < GPT_VOCAB; i++) logits[i] -= log_sums[row];
        exponentials(logits, GPT_VOCAB);
        for (int i = 0; i < GPT_VOCAB; i++) logits[i] *= scale;
        logits[targets[row]] -= scale;
    }
}
