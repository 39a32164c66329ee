/* SPDX-License-Identifier: MIT */
/* The kernels of a GPT, forward and backward, by hand. Letters as in all of this folder:
 *
 *     B sequences   T positions   R = B × T rows   C channels   N heads   H = C / N   V = 256 byte values
 *
 * All arrays are row-major fp32. Backward kernels ADD to the gradients of parameters (dw, db: the sum over micro-steps or
 * over uses of a tied weight grows in place); gradients of activations are written, except where "+=" stands. */
#ifndef GPT_MATH_H
#define GPT_MATH_H

enum { GPT_VOCAB = 256 };

/* Each row of x, less its mean, by its standard deviation, times w, plus b. */
typedef struct layernorm {
    float *out;        /* (R, C) */
    float *mean;       /* (R) */
    float *inverse_sd; /* (R) */
} layernorm;

void layernorm_forward(const layernorm *ln, const float *x /* (R, C) */, const float *w /* (C) */,
                       const float *b /* (C) */, int rows, int channels);

/* sum = x + y, then the LayerNorm of sum, in one pass over memory: the residual of this block with the norm of the next. */
void residual_layernorm_forward(float *sum /* (R, C) */, const layernorm *ln, const float *x, const float *y,
                                const float *w, const float *b, int rows, int channels);

/* dx += …; dw, db += …. `ln` is as forward left it, its out unused. */
void layernorm_backward(float *dx, float *dw, float *db, const float *dout, const layernorm *ln, const float *x,
                        const float *w, int rows, int channels);

/* out (R, O) = x (R, I) × w (O, I)ᵀ + bias (O); bias may be NULL. */
void linear_forward(float *out, const float *x, const float *w, const float *bias, int rows, int n_in, int n_out);
/* dx (R, I) = dout (R, O) × w; dw (O, I) += doutᵀ × x; dbias (O) += column sums of dout; dbias may be NULL. */
void linear_backward(float *dx, float *dw, float *dbias, const float *dout, const float *x, const float *w, int rows,
                     int n_in, int n_out);

/* x / 2 × (1 + tanh(√(2/π) (x + 0.044715 x³))); dx may be dout. */
void gelu_forward(float *out, const float *x, int count);
void gelu_backward(float *dx, const float *dout, const float *x, int count);

typedef struct attention_shape {
    int sequences, positions, channels, heads;
} attention_shape;

/* Causal attention. qkv (B, T, 3, N, H); p (B, N, T, T), the weights, kept for backward; out (B, T, N, H). */
void attention_forward(float *out, float *p, const float *qkv, const attention_shape *shape);
/* dqkv = …; dp (T, T) is scratch. */
void attention_backward(float *dqkv, float *dp, const float *dout, const float *p, const float *qkv,
                        const attention_shape *shape);

/* out (B, T, C) = wte[token] + wpe[position]; wte (V, C), wpe (T, C), tokens (B, T). */
void embedding_forward(float *out, const int *tokens, const float *wte, const float *wpe, int sequences, int positions,
                       int channels);
void embedding_backward(float *dwte, float *dwpe, const float *dout, const int *tokens, int sequences, int positions,
                        int channels);

/* losses (R) = log Σ exp(logits) − logits[target]; log_sums (R) is kept for backward. logits (R, V). */
void cross_entropy_forward(float *losses, float *log_sums, const float *logits, const int *targets, int rows);
/* logits (R, V) become their own gradient: (softmax − one at target) × scale. */
void cross_entropy_backward(float *logits, const float *log_sums, const int *targets, float scale, int rows);

#endif
