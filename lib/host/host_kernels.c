/* SPDX-License-Identifier: MIT */
/* The kernels, on the host: the reference that other backends are tested against. All arithmetic is fp32 without
 * contraction (the build sets -ffp-contract=off), so results are the same to the bit wherever this is compiled. Other
 * types pass through chunks of fp32; fp32 goes straight. */
#include <math.h>
#include <string.h>

#include "convert.h"
#include "host.h"

enum { CHUNK = 512 }; /* elements of a pass through fp32: 2 KiB each, so that a few of them stay in the first cache */

static const void *element(const void *base, uint64_t index, fsdp_dtype dtype)
{
    return (const char *)base + index * fsdp_dtype_bytes(dtype);
}

static uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }

/* ---- Sums ---- */

static void add_floats(float *restrict dst, const float *restrict src, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++) dst[i] += src[i];
}

static void run_add(const fsdp_device_op *op)
{
    uint64_t count = op->u.add.count;
    fsdp_dtype dst_dtype = op->u.add.dst_dtype, src_dtype = op->u.add.src_dtype;
    char *dst = op->u.add.dst;
    const char *src = op->u.add.src;
    if (dst_dtype == FSDP_DTYPE_FP32 && src_dtype == FSDP_DTYPE_FP32) {
        add_floats((float *)op->u.add.dst, op->u.add.src, count);
        return;
    }
    float sum[CHUNK], term[CHUNK];
    for (uint64_t done = 0; done < count; done += CHUNK) {
        uint64_t n = least(count - done, CHUNK);
        char *to = dst + done * fsdp_dtype_bytes(dst_dtype);
        fsdp__load_floats(sum, to, n, dst_dtype);
        fsdp__load_floats(term, element(src, done, src_dtype), n, src_dtype);
        add_floats(sum, term, n);
        fsdp__store_floats(to, sum, n, dst_dtype);
    }
}

/* sum = ((a + b) + c) + d: as many of them as there are, in one walk. */
static void fold_floats(float *restrict sum, const float *const *from, uint32_t n_sources, uint64_t n)
{
    const float *a = from[0], *b = from[1], *c = n_sources > 2 ? from[2] : NULL, *d = n_sources > 3 ? from[3] : NULL;
    if (n_sources == 2)
        for (uint64_t i = 0; i < n; i++) sum[i] = a[i] + b[i];
    else if (n_sources == 3)
        for (uint64_t i = 0; i < n; i++) sum[i] = (a[i] + b[i]) + c[i];
    else
        for (uint64_t i = 0; i < n; i++) sum[i] = ((a[i] + b[i]) + c[i]) + d[i];
}

/* Through a piece that stays in the nearest cache, since dst may be one of the sources. */
static void fold_fp32(float *dst, const void *const *sources, uint32_t n_sources, uint64_t count)
{
    float sum[CHUNK];
    for (uint64_t done = 0; done < count; done += CHUNK) {
        uint64_t n = least(count - done, CHUNK);
        const float *first[4];
        uint32_t together = n_sources < 4 ? n_sources : 4;
        for (uint32_t s = 0; s < together; s++) first[s] = (const float *)sources[s] + done;
        fold_floats(sum, first, together, n);
        for (uint32_t s = together; s < n_sources; s++) add_floats(sum, (const float *)sources[s] + done, n);
        memcpy(dst + done, sum, n * sizeof *sum);
    }
}

void fsdp__host_fold(void *dst, const void *const *sources, uint32_t n_sources, uint64_t count, fsdp_dtype dtype)
{
    if (dtype == FSDP_DTYPE_FP32 && n_sources > 1) {
        fold_fp32(dst, sources, n_sources, count);
        return;
    }
    float sum[CHUNK], term[CHUNK];
    for (uint64_t done = 0; done < count; done += CHUNK) {
        uint64_t n = least(count - done, CHUNK);
        fsdp__load_floats(sum, element(sources[0], done, dtype), n, dtype);
        for (uint32_t s = 1; s < n_sources; s++) {
            fsdp__load_floats(term, element(sources[s], done, dtype), n, dtype);
            add_floats(sum, term, n);
        }
        fsdp__store_floats((char *)dst + done * fsdp_dtype_bytes(dtype), sum, n, dtype);
    }
}

/* ---- Σ x². The tree depends on counts alone:
 * a segment is cut into blocks of BLOCK elements; in a block, lane j sums x² of the elements j, j + LANES, … in order;
 * the lanes are folded by halves (j += j + 8, then 4, 2, 1); the blocks' sums are added in order, the segments' likewise.
 * A wider vector unit computes several lanes at once and changes nothing. ---- */

enum { LANES = 16, BLOCK = 4096 };

/* Elements 0 … count of a block go on lanes 0, 1, …: count is a multiple of LANES except at the end of a segment. */
static void square_lanes(float *restrict lane, const float *restrict x, uint64_t count)
{
    uint64_t whole = count - count % LANES;
    for (uint64_t i = 0; i < whole; i += LANES)
        for (uint64_t j = 0; j < LANES; j++) lane[j] += x[i + j] * x[i + j];
    for (uint64_t j = 0; j < count - whole; j++) lane[j] += x[whole + j] * x[whole + j];
}

static float square_block(const void *x, uint64_t count, fsdp_dtype dtype)
{
    float lane[LANES] = {0.0f}, chunk[CHUNK];
    if (dtype == FSDP_DTYPE_FP32) {
        square_lanes(lane, x, count);
    } else {
        for (uint64_t done = 0; done < count; done += CHUNK) {
            uint64_t n = least(count - done, CHUNK);
            fsdp__load_floats(chunk, element(x, done, dtype), n, dtype);
            square_lanes(lane, chunk, n);
        }
    }
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int j = 0; j < width; j++) lane[j] += lane[j + width];
    return lane[0];
}

static void run_square_sum(const fsdp_device_op *op)
{
    fsdp_dtype dtype = op->u.square_sum.dtype;
    float sum = 0.0f;
    for (uint64_t s = 0; s < op->u.square_sum.n_segments; s++) {
        const fsdp_kernel_segment *segment = &op->u.square_sum.segments[s];
        const void *x = element(op->u.square_sum.x, segment->offset, dtype);
        float segment_sum = 0.0f;
        for (uint64_t done = 0; done < segment->count; done += BLOCK)
            segment_sum += square_block(element(x, done, dtype), least(segment->count - done, BLOCK), dtype);
        sum += segment_sum;
    }
    *op->u.square_sum.out += sum;
}

/* ---- The step ---- */

static void run_step_input(const fsdp_device_op *op)
{
    *op->u.step_input.to = op->u.step_input.input;
    float *piece = op->u.step_input.part + FSDP_STEP_ORDER;
    uint64_t order = op->u.step_input.input.order;
    for (int i = 0; i < FSDP_STEP_ORDER_PIECES; i++, order >>= FSDP_STEP_ORDER_BITS) {
        float value = (float)(order & ((1u << FSDP_STEP_ORDER_BITS) - 1));
        piece[2 * i] = value;
        piece[2 * i + 1] = value * value;
    }
}

/* Have the ranks enqueued different collectives? Exact: every number here is below 2^53. Where ranks have summed different
 * things, so that this is no sum of pieces, infinite or not a number, they differ too. */
static bool ranks_differ(const float *total, uint32_t world)
{
    for (const float *piece = total + FSDP_STEP_ORDER; piece < total + FSDP_STEP_FLOATS; piece += 2)
        if (!((double)world * (double)piece[1] - (double)piece[0] * (double)piece[0] == 0.0)) return true;
    return false;
}

/* Formulas: fsdp/optim.h. A step that is skipped scales nothing, so its clip reads 1. */
static void run_step_result(const fsdp_device_op *op)
{
    const fsdp_step_input *input = op->u.step_result.input;
    fsdp_report_record *to = &op->u.step_result.reports[input->step % op->u.step_result.n_reports];
    const float *total = op->u.step_result.total;
    fsdp_device_step *step = op->u.step_result.step;
    float norm = input->factor * sqrtf(total[0]), clip = 1.0f;
    bool differs = ranks_differ(total, input->world), skip = input->skip != 0 || !isfinite(norm) || differs;
    if (!skip && input->max_norm > 0.0f && input->max_norm < norm) clip = input->max_norm / norm;

    if (!skip) step->updates++;
    step->skip = skip ? 1 : 0;
    step->lr = input->lr;
    step->factor = input->factor * clip;
    step->bias1 = (float)(1.0 - pow((double)input->beta1, (double)step->updates));
    step->bias2 = (float)(1.0 - pow((double)input->beta2, (double)step->updates));

    fsdp_report_record report = {.step = input->step,
                                 .updates = step->updates,
                                 .skipped = skip ? 1 : 0,
                                 .lr = input->lr,
                                 .grad_norm = norm,
                                 .clip_scale = clip};
    memcpy(report.sums, total + 1, sizeof report.sums);
    memcpy(to, &report, offsetof(fsdp_report_record, differs));
    __atomic_store_n(&to->differs, differs ? input->step : 0, __ATOMIC_RELEASE);
    memset(op->u.step_result.part, 0, FSDP_STEP_ORDER * sizeof *op->u.step_result.part);
}

typedef struct adamw_factors {
    float factor, beta1, beta2, bias1, bias2, eps, lr, decay;
} adamw_factors;

static void adamw_floats(float *restrict w, const float *restrict gradient, float *restrict m, float *restrict v,
                         uint64_t count, adamw_factors f)
{
    float rest1 = 1.0f - f.beta1, rest2 = 1.0f - f.beta2;
    for (uint64_t i = 0; i < count; i++) {
        float g = gradient[i] * f.factor;
        m[i] = f.beta1 * m[i] + rest1 * g;
        v[i] = f.beta2 * v[i] + rest2 * (g * g);
        w[i] -= f.lr * (m[i] / f.bias1 / (sqrtf(v[i] / f.bias2) + f.eps) + f.decay * w[i]);
    }
}

static void adamw_segment(const fsdp_device_op *op, const fsdp_kernel_segment *segment, adamw_factors f)
{
    fsdp_dtype w_dtype = op->u.adamw.master_dtype, g_dtype = op->u.adamw.gradient_dtype;
    char *w = (char *)op->u.adamw.master + segment->offset * fsdp_dtype_bytes(w_dtype);
    const void *gradient = element(op->u.adamw.gradient, segment->offset, g_dtype);
    float *m = op->u.adamw.m + segment->offset, *v = op->u.adamw.v + segment->offset;
    if (w_dtype == FSDP_DTYPE_FP32 && g_dtype == FSDP_DTYPE_FP32) {
        adamw_floats((float *)op->u.adamw.master + segment->offset, gradient, m, v, segment->count, f);
        return;
    }
    float w_chunk[CHUNK], g_chunk[CHUNK];
    for (uint64_t done = 0; done < segment->count; done += CHUNK) {
        uint64_t n = least(segment->count - done, CHUNK);
        char *to = w + done * fsdp_dtype_bytes(w_dtype);
        fsdp__load_floats(w_chunk, to, n, w_dtype);
        fsdp__load_floats(g_chunk, element(gradient, done, g_dtype), n, g_dtype);
        adamw_floats(w_chunk, g_chunk, m + done, v + done, n, f);
        fsdp__store_floats(to, w_chunk, n, w_dtype);
    }
}

static void run_adamw(const fsdp_device_op *op)
{
    const fsdp_device_step *step = op->u.adamw.step;
    if (step->skip != 0) return;
    for (uint64_t s = 0; s < op->u.adamw.n_segments; s++) {
        const fsdp_kernel_segment *segment = &op->u.adamw.segments[s];
        adamw_factors f = {.factor = step->factor,
                           .beta1 = op->u.adamw.beta1,
                           .beta2 = op->u.adamw.beta2,
                           .bias1 = step->bias1,
                           .bias2 = step->bias2,
                           .eps = op->u.adamw.eps,
                           .lr = step->lr * segment->lr_scale,
                           .decay = op->u.adamw.weight_decay * segment->decay};
        adamw_segment(op, segment, f);
    }
}

/* ---- All ---- */

void fsdp__host_kernel(const fsdp_device_op *op)
{
    switch (op->kind) {
    case FSDP_OPERATION_COPY:
        if (op->u.copy.bytes > 0) memcpy(op->u.copy.dst, op->u.copy.src, op->u.copy.bytes);
        break;
    case FSDP_OPERATION_FILL:
        if (op->u.fill.bytes > 0) memset(op->u.fill.dst, op->u.fill.byte, op->u.fill.bytes);
        break;
    case FSDP_OPERATION_CAST:
        if (op->u.cast.count > 0)
            fsdp__convert(op->u.cast.dst, op->u.cast.dst_dtype, op->u.cast.src, op->u.cast.src_dtype, op->u.cast.count);
        break;
    case FSDP_OPERATION_ADD: run_add(op); break;
    case FSDP_OPERATION_SQUARE_SUM: run_square_sum(op); break;
    case FSDP_OPERATION_STEP_INPUT: run_step_input(op); break;
    case FSDP_OPERATION_STEP_RESULT: run_step_result(op); break;
    case FSDP_OPERATION_ADAMW: run_adamw(op); break;
    case FSDP_OPERATION_HOST_CALL: op->u.host_call.fn(op->u.host_call.arg); break;
    default: break; /* DELAY is the stream's, collectives are the communicator's */
    }
}
