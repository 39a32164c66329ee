/* SPDX-License-Identifier: MIT */
/* Every operation that touches data, against a reference as plain as it can be written: one element at a time, through
 * the conversions that tests/unit checks by themselves. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "device_suite.h"
#include "elements.h"

enum { MAX_COUNT = 5000, GUARD = 64 };

static const uint64_t counts[] = {0, 1, 3, 15, 17, 511, 512, 513, 4096, 4099};

/* A host buffer of MAX_COUNT elements and a guard; where nothing is written nothing may change. */
typedef struct buffer {
    char bytes[MAX_COUNT * 4 + GUARD];
} buffer;

static void fill_numbers(buffer *b, uint64_t count, fsdp_dtype dtype, uint64_t seed)
{
    memset(b, 0xa5, sizeof *b);
    for (uint64_t i = 0; i < count; i++) store(b->bytes, i, number(seed, i), dtype);
}

static void to_device(fixture *f, void *dst, const void *src, uint64_t bytes)
{
    launch(f, 0, copy_op(dst, src, bytes), NULL);
    drain(f, 0);
}

static void from_device(fixture *f, void *dst, const void *src, uint64_t bytes) { to_device(f, dst, src, bytes); }

/* Steps between two floats of dtype, where their sign is the same; NaN equals NaN. */
static uint64_t distance(const void *a, const void *b, uint64_t index, fsdp_dtype dtype)
{
    float x = load(a, index, dtype), y = load(b, index, dtype);
    if (isnan(x) && isnan(y)) return 0;
    if (dtype == FSDP_DTYPE_FP32) {
        int64_t p = fsdp__float_bits(x), q = fsdp__float_bits(y);
        return (uint64_t)llabs(p - q);
    }
    const uint16_t *p = a, *q = b;
    return (uint64_t)abs(p[index] - q[index]);
}

static void assert_same(const buffer *got, const buffer *want, uint64_t count, fsdp_dtype dtype, uint32_t max_ulps)
{
    for (uint64_t i = 0; i < count; i++) {
        if (distance(got->bytes, want->bytes, i, dtype) <= max_ulps) continue;
        fail_msg("element %llu of %llu %s: %.9g, expected %.9g", (unsigned long long)i, (unsigned long long)count,
                 fsdp_dtype_name(dtype), (double)load(got->bytes, i, dtype), (double)load(want->bytes, i, dtype));
    }
    size_t end = count * fsdp_dtype_bytes(dtype);
    assert_memory_equal(got->bytes + end, want->bytes + end, sizeof got->bytes - end);
}

static buffer x_host, y_host, want, got;

/* ---- Copy, fill, cast, add ---- */

static void copy_and_fill_take_any_byte_count_and_place(void **state)
{
    fixture *f = *state;
    char *a = fixture_block(f, sizeof(buffer)), *b = fixture_block(f, sizeof(buffer));
    fill_numbers(&x_host, MAX_COUNT, FSDP_DTYPE_FP32, 1);
    to_device(f, a, &x_host, sizeof x_host);
    for (EACH(i, counts)) {
        uint64_t bytes = counts[i], at = i * 7 % 13;
        launch(f, 0, fill_op(b, 0x11, sizeof(buffer)), NULL);
        launch(f, 0, copy_op(b + at, a + 3, bytes), NULL);
        launch(f, 0, fill_op(b + at + bytes, (uint8_t)(0xf0 + i), bytes), NULL);
        from_device(f, &got, b, sizeof got);
        memset(&want, 0x11, sizeof want);
        memcpy(want.bytes + at, x_host.bytes + 3, bytes);
        memset(want.bytes + at + bytes, (int)(0xf0 + i), bytes);
        assert_memory_equal(&got, &want, sizeof got);
    }
}

static void casts_round_to_nearest_between_all_types(void **state)
{
    fixture *f = *state;
    void *x = fixture_block(f, sizeof(buffer)), *y = fixture_block(f, sizeof(buffer));
    for (EACH(s, dtypes)) {
        for (EACH(d, dtypes)) {
            for (EACH(c, counts)) {
                uint64_t count = counts[c];
                fill_numbers(&x_host, count, dtypes[s], c);
                if (count > 4) store(x_host.bytes, 0, NAN, dtypes[s]), store(x_host.bytes, 1, -INFINITY, dtypes[s]);
                memset(&want, 0xa5, sizeof want);
                for (uint64_t i = 0; i < count; i++) store(want.bytes, i, load(x_host.bytes, i, dtypes[s]), dtypes[d]);
                memset(&y_host, 0xa5, sizeof y_host);
                to_device(f, x, &x_host, sizeof x_host);
                to_device(f, y, &y_host, sizeof y_host);
                launch(f, 0,
                       (fsdp_device_op){.kind = FSDP_OPERATION_CAST, .u.cast = {y, x, count, dtypes[d], dtypes[s]}},
                       NULL);
                from_device(f, &got, y, sizeof got);
                assert_same(&got, &want, count, dtypes[d], 0);
            }
        }
    }
}

static void add_sums_in_fp32_and_rounds_once(void **state)
{
    fixture *f = *state;
    void *x = fixture_block(f, sizeof(buffer)), *y = fixture_block(f, sizeof(buffer));
    for (EACH(s, dtypes)) {
        for (EACH(d, dtypes)) {
            for (EACH(c, counts)) {
                uint64_t count = counts[c];
                fill_numbers(&x_host, count, dtypes[s], 2 * c);
                fill_numbers(&y_host, count, dtypes[d], 2 * c + 1);
                memcpy(&want, &y_host, sizeof want);
                for (uint64_t i = 0; i < count; i++)
                    store(want.bytes, i, load(y_host.bytes, i, dtypes[d]) + load(x_host.bytes, i, dtypes[s]),
                          dtypes[d]);
                to_device(f, x, &x_host, sizeof x_host);
                to_device(f, y, &y_host, sizeof y_host);
                launch(f, 0, (fsdp_device_op){.kind = FSDP_OPERATION_ADD, .u.add = {y, x, count, dtypes[d], dtypes[s]}},
                       NULL);
                from_device(f, &got, y, sizeof got);
                assert_same(&got, &want, count, dtypes[d], 0);
            }
        }
    }
}

/* ---- Square sum ---- */

typedef struct sum_case {
    fixture *f;
    void *x;
    float *out;
    fsdp_kernel_segment *table;
} sum_case;

static sum_case sum_open(fixture *f)
{
    return (sum_case){f, fixture_block(f, sizeof(buffer)), fixture_block(f, 64), fixture_block(f, 4096)};
}

/* before + Σ x_host² over the segments. */
static float square_sum(sum_case *c, fsdp_dtype dtype, const fsdp_kernel_segment *segments, uint64_t n, float before)
{
    float result;
    to_device(c->f, c->x, &x_host, sizeof x_host);
    to_device(c->f, c->out, &before, sizeof before);
    if (n > 0) to_device(c->f, c->table, segments, n * sizeof *segments);
    fsdp_device_op op = {
        .kind = FSDP_OPERATION_SQUARE_SUM,
        .u.square_sum = {
            .out = c->out, .x = c->x, .count = MAX_COUNT, .segments = c->table, .n_segments = n, .dtype = dtype}};
    launch(c->f, 0, op, NULL);
    from_device(c->f, &result, c->out, sizeof result);
    return result;
}

static void square_sum_adds_the_segments_and_nothing_else(void **state)
{
    sum_case c = sum_open(*state);
    const fsdp_kernel_segment segments[] = {
        {0, 1, 1, 1}, {2, 0, 1, 1}, {3, 15, 1, 1}, {128, 513, 1, 1}, {640, 4099, 1, 1}, {4999, 1, 1, 1},
    };
    const uint64_t n = sizeof segments / sizeof *segments;
    for (EACH(t, dtypes)) {
        memset(&x_host, 0, sizeof x_host);
        for (uint64_t i = 0; i < MAX_COUNT; i++) store(x_host.bytes, i, NAN, dtypes[t]); /* pads are never read */
        double exact = 2.0;
        for (uint64_t s = 0; s < n; s++) {
            for (uint64_t i = segments[s].offset; i < segments[s].offset + segments[s].count; i++) {
                store(x_host.bytes, i, (float)((int)(i % 7) - 3), dtypes[t]); /* small integers: any order is exact */
                exact += (double)(((int)(i % 7) - 3) * ((int)(i % 7) - 3));
            }
        }
        assert_float_equal(square_sum(&c, dtypes[t], segments, n, 2.0f), (float)exact, 0.0);
        assert_float_equal(square_sum(&c, dtypes[t], segments, 0, 2.0f), 2.0f, 0.0);
    }
}

static void square_sum_is_near_the_true_sum_and_depends_on_counts_alone(void **state)
{
    sum_case c = sum_open(*state);
    for (EACH(t, dtypes)) {
        for (EACH(k, counts)) {
            fsdp_kernel_segment here = {0, counts[k], 1, 1}, there = {counts[k] < 4500 ? 401 : 0, counts[k], 1, 1};
            double exact = 0.0;
            fill_numbers(&x_host, MAX_COUNT, dtypes[t], k);
            for (uint64_t i = 0; i < counts[k]; i++) {
                float x = load(x_host.bytes, i, dtypes[t]);
                exact += (double)x * (double)x;
            }
            float first = square_sum(&c, dtypes[t], &here, 1, 0.0f);
            assert_true(fabs((double)first - exact) <= exact * 1e-5);
            memmove(x_host.bytes + there.offset * fsdp_dtype_bytes(dtypes[t]), x_host.bytes,
                    counts[k] * fsdp_dtype_bytes(dtypes[t]));
            float again = square_sum(&c, dtypes[t], &there, 1, 0.0f);
            assert_int_equal(fsdp__float_bits(first), fsdp__float_bits(again));
        }
    }
}

/* ---- Step result ---- */

typedef struct step_case {
    const char *name;
    float squares;         /* total[0] */
    fsdp_step_input input; /* step, lr, factor, max_norm, beta1, beta2, skip, world, order */
    uint64_t updates;      /* before */
    uint64_t want_updates;
    uint32_t want_skip;
    float want_norm, want_clip;
} step_case;

static const step_case step_cases[] = {
    {"no clipping", 16.0f, {1, 0.5f, 0.25f, 0.0f, 0.9f, 0.999f, 0, 1, 0}, 0, 1, 0, 1.0f, 1.0f},
    {"below the limit", 16.0f, {7, 0.5f, 0.25f, 1.5f, 0.9f, 0.999f, 0, 1, 0}, 5, 6, 0, 1.0f, 1.0f},
    {"at the limit", 16.0f, {7, 0.5f, 0.25f, 1.0f, 0.9f, 0.999f, 0, 1, 0}, 5, 6, 0, 1.0f, 1.0f},
    {"clipped", 64.0f, {8, 0.5f, 0.5f, 1.0f, 0.9f, 0.95f, 0, 1, 0}, 99, 100, 0, 4.0f, 0.25f},
    {"the caller skips", 16.0f, {9, 0.5f, 0.25f, 0.0f, 0.9f, 0.999f, 1, 1, 0}, 3, 3, 1, 1.0f, 1.0f},
    {"the caller skips what would be clipped",
     64.0f,
     {9, 0.5f, 0.5f, 1.0f, 0.9f, 0.999f, 1, 1, 0},
     3,
     3,
     1,
     4.0f,
     1.0f},
    {"infinite", INFINITY, {10, 0.5f, 0.25f, 1.0f, 0.9f, 0.999f, 0, 1, 0}, 3, 3, 1, INFINITY, 1.0f},
    {"not a number", NAN, {11, 0.5f, 0.25f, 1.0f, 0.9f, 0.999f, 0, 1, 0}, 3, 3, 1, NAN, 1.0f},
    {"nothing", 0.0f, {12, 0.5f, 0.25f, 1.0f, 0.9f, 0.999f, 0, 1, 0}, 3, 4, 0, 0.0f, 1.0f},
};

static void assert_step(const step_case *c, const fsdp_device_step *step, const fsdp_report_record *report,
                        const float *total)
{
    if (step->updates != c->want_updates || step->skip != c->want_skip) fail_msg("%s: updates or skip", c->name);
    assert_int_equal(report->step, c->input.step);
    assert_int_equal(report->updates, c->want_updates);
    assert_int_equal(report->skipped, c->want_skip);
    assert_true(step->lr == c->input.lr && report->lr == c->input.lr);
    if (isnan(c->want_norm)) assert_true(isnan(report->grad_norm));
    else assert_true(report->grad_norm == c->want_norm);
    if (report->clip_scale != c->want_clip) fail_msg("%s: clip %g", c->name, (double)report->clip_scale);
    for (int i = 0; i < 16; i++) assert_true(report->sums[i] == total[1 + i]);
    if (step->skip) return; /* then nobody reads the rest */
    assert_true(step->factor == c->input.factor * c->want_clip);
    double t = (double)c->want_updates;
    assert_float_equal(step->bias1, (float)(1.0 - pow((double)c->input.beta1, t)), 1e-7);
    assert_float_equal(step->bias2, (float)(1.0 - pow((double)c->input.beta2, t)), 1e-7);
}

static void step_result_decides_norm_clip_and_skip(void **state)
{
    fixture *f = *state;
    float *part = fixture_block(f, 256), *total = fixture_block(f, 256);
    float total_host[FSDP_STEP_FLOATS] = {0}, part_host[20];
    fsdp_device_step *step = fixture_block(f, 64), step_host;
    fsdp_step_input *input = fixture_block(f, 64);
    void *report;
    DO(f->ops->mem_alloc(f->dev, f->caps.granularity, FSDP_MEMORY_KIND_PINNED, &report));
    for (EACH(i, step_cases)) {
        const step_case *c = &step_cases[i];
        for (int k = 0; k < 17; k++) total_host[k] = 0.5f * (float)k;
        for (int k = 0; k < 20; k++) part_host[k] = 3.0f;
        total_host[0] = c->squares;
        step_host = (fsdp_device_step){.updates = c->updates};
        to_device(f, total, total_host, sizeof total_host);
        to_device(f, part, part_host, sizeof part_host);
        to_device(f, step, &step_host, sizeof step_host);
        to_device(f, input, &c->input, sizeof c->input);
        fsdp_device_op op = {.kind = FSDP_OPERATION_STEP_RESULT,
                             .u.step_result = {part, total, step, input, report, 8}};
        launch(f, 0, op, NULL);
        from_device(f, &step_host, step, sizeof step_host);
        from_device(f, part_host, part, sizeof part_host);
        fsdp_report_record record;
        memcpy(&record, (fsdp_report_record *)report + c->input.step % 8, sizeof record);
        assert_step(c, &step_host, &record, total_host);
        assert_int_equal(record.differs, 0);
        for (int k = 0; k < 20; k++) assert_true(part_host[k] == (k < 17 ? 0.0f : 3.0f));
    }
    f->ops->mem_free(f->dev, report, f->caps.granularity, FSDP_MEMORY_KIND_PINNED);
}

/* ---- The order of the ranks' calls, in the step's sum ---- */

typedef struct order_case {
    fixture *f;
    float *part, *total;
    fsdp_device_step *step;
    fsdp_step_input *input;
    void *report;
} order_case;

/* What a rank with this hash adds to the sum. */
static void add_part(const order_case *c, uint64_t order, float *sum)
{
    float part[FSDP_STEP_FLOATS];
    for (int k = 0; k < FSDP_STEP_FLOATS; k++) part[k] = 7.0f;
    to_device(c->f, c->part, part, sizeof part);
    fsdp_step_input given = {order + 1, 0.5f, 0.25f, 2.0f, 0.9f, 0.999f, 1, 3, order}, kept;
    fsdp_device_op op = {.kind = FSDP_OPERATION_STEP_INPUT, .u.step_input = {c->part, c->input, given}};
    launch(c->f, 0, op, NULL);
    from_device(c->f, part, c->part, sizeof part);
    from_device(c->f, &kept, c->input, sizeof kept);
    assert_true(kept.step == order + 1 && kept.lr == 0.5f && kept.factor == 0.25f && kept.max_norm == 2.0f);
    assert_true(kept.beta1 == 0.9f && kept.beta2 == 0.999f && kept.skip == 1 && kept.world == 3 && kept.order == order);
    for (int k = 0; k < FSDP_STEP_ORDER; k++) assert_true(part[k] == 7.0f);
    for (int k = FSDP_STEP_ORDER; k < FSDP_STEP_FLOATS; k += 2) {
        float piece = (float)(order & 63);
        assert_true(part[k] == piece && part[k + 1] == piece * piece);
        sum[k] += piece, sum[k + 1] += piece * piece;
        order >>= 6;
    }
}

/* The step in which the device finds that they differ; a step that does is skipped. */
static uint64_t judge(const order_case *c, const float *sum, uint32_t world)
{
    fsdp_device_step step = {.updates = 4};
    fsdp_report_record record;
    memset(c->report, 0xff, sizeof record);
    to_device(c->f, c->total, sum, FSDP_STEP_FLOATS * sizeof *sum);
    to_device(c->f, c->step, &step, sizeof step);
    fsdp_step_input input = {9, 0.5f, 0.25f, 0.0f, 0.9f, 0.999f, 0, world, 0};
    to_device(c->f, c->input, &input, sizeof input);
    fsdp_device_op op = {.kind = FSDP_OPERATION_STEP_RESULT,
                         .u.step_result = {c->part, c->total, c->step, c->input, c->report, 1}};
    launch(c->f, 0, op, NULL);
    from_device(c->f, &step, c->step, sizeof step);
    memcpy(&record, c->report, sizeof record);
    assert_int_equal(step.skip, record.differs != 0);
    assert_int_equal(record.skipped, record.differs != 0);
    assert_int_equal(step.updates, record.differs != 0 ? 4 : 5);
    assert_int_equal(record.updates, step.updates);
    return record.differs;
}

/* All have the same, with every value of a piece; and one, first or last, has another, in one bit or in all. */
static void check_world(const order_case *c, uint32_t world)
{
    for (uint64_t k = 0; k < 64; k++) {
        float sum[FSDP_STEP_FLOATS] = {1.0f};
        uint64_t above = (uint64_t)world << 50,
                 order = above ^ k * 0x41041041041; /* k in every piece; above: not looked at */
        if (k >= 8) order ^= 0x2aull << (k % 42);
        for (uint32_t r = 0; r < world; r++) add_part(c, order, sum);
        assert_int_equal(judge(c, sum, world), 0);
        for (uint32_t odd = 0; world > 1 && odd < world; odd += world - 1) {
            memset(sum, 0, sizeof sum);
            for (uint32_t r = 0; r < world; r++) add_part(c, r == odd ? order ^ 1ull << (k % 48) : order, sum);
            assert_int_equal(judge(c, sum, world), 9);
        }
    }
}

static void a_rank_whose_calls_differ_is_seen_in_the_steps_sum(void **state)
{
    fixture *f = *state;
    order_case c = {f, fixture_block(f, 256), fixture_block(f, 256), fixture_block(f, 64), fixture_block(f, 64), NULL};
    DO(f->ops->mem_alloc(f->dev, f->caps.granularity, FSDP_MEMORY_KIND_PINNED, &c.report));
    for (uint32_t world = 1; world <= 8; world++) check_world(&c, world);
    /* The most ranks: sums that are exact in fp32 only just. */
    float most[FSDP_STEP_FLOATS] = {1.0f};
    for (int k = FSDP_STEP_ORDER; k < FSDP_STEP_FLOATS; k += 2) most[k] = 4096 * 63, most[k + 1] = 4096 * 63 * 63;
    assert_int_equal(judge(&c, most, 4096), 0);
    most[FSDP_STEP_ORDER] -= 1, most[FSDP_STEP_ORDER + 1] -= 63 * 63 - 62 * 62;
    assert_int_equal(judge(&c, most, 4096), 9);
    /* Pieces whose mean is one rank's own differ all the same: 4, 5 and 6. And what is no sum of pieces. */
    float odd[FSDP_STEP_FLOATS] = {1.0f};
    odd[FSDP_STEP_ORDER] = 15, odd[FSDP_STEP_ORDER + 1] = 16 + 25 + 36;
    assert_int_equal(judge(&c, odd, 3), 9);
    odd[FSDP_STEP_ORDER] = NAN;
    assert_int_equal(judge(&c, odd, 3), 9);
    odd[FSDP_STEP_ORDER] = odd[FSDP_STEP_ORDER + 1] = INFINITY;
    assert_int_equal(judge(&c, odd, 3), 9);
    f->ops->mem_free(f->dev, c.report, f->caps.granularity, FSDP_MEMORY_KIND_PINNED);
}

/* ---- AdamW ---- */

typedef struct adamw_case {
    fixture *f;
    void *w, *g;
    float *m, *v;
    fsdp_kernel_segment *table;
    fsdp_device_step *step;
} adamw_case;

static const fsdp_kernel_segment adamw_segments[] = {
    {0, 700, 1.0f, 1.0f}, {768, 1, 2.0f, 0.0f}, {896, 0, 1.0f, 1.0f}, {1024, 515, 0.5f, 1.0f}};
enum { ADAMW_COUNT = 1600, N_SEGMENTS = 4 };

static buffer w_host, g_host, m_host, v_host, want_w, want_m, want_v;

static void reference_adamw(const fsdp_device_op *op, const fsdp_device_step *step, fsdp_dtype wt, fsdp_dtype gt)
{
    float beta1 = op->u.adamw.beta1, beta2 = op->u.adamw.beta2;
    want_w = w_host, want_m = m_host, want_v = v_host;
    for (int s = 0; s < N_SEGMENTS && !step->skip; s++) {
        const fsdp_kernel_segment *segment = &adamw_segments[s];
        for (uint64_t i = segment->offset; i < segment->offset + segment->count; i++) {
            float g = load(g_host.bytes, i, gt) * step->factor, w = load(w_host.bytes, i, wt);
            float m = beta1 * load(m_host.bytes, i, FSDP_DTYPE_FP32) + (1.0f - beta1) * g;
            float v = beta2 * load(v_host.bytes, i, FSDP_DTYPE_FP32) + (1.0f - beta2) * (g * g);
            float direction = m / step->bias1 / (sqrtf(v / step->bias2) + op->u.adamw.eps);
            w = w - step->lr * segment->lr_scale * (direction + op->u.adamw.weight_decay * segment->decay * w);
            store(want_w.bytes, i, w, wt);
            store(want_m.bytes, i, m, FSDP_DTYPE_FP32);
            store(want_v.bytes, i, v, FSDP_DTYPE_FP32);
        }
    }
}

static void check_adamw(adamw_case *c, fsdp_dtype wt, fsdp_dtype gt, bool skip)
{
    fixture *f = c->f;
    fill_numbers(&w_host, ADAMW_COUNT, wt, 1);
    fill_numbers(&g_host, ADAMW_COUNT, gt, 2);
    fill_numbers(&m_host, ADAMW_COUNT, FSDP_DTYPE_FP32, 3);
    memset(&v_host, 0xa5, sizeof v_host);
    for (uint64_t i = 0; i < ADAMW_COUNT; i++) store(v_host.bytes, i, fabsf(number(4, i)), FSDP_DTYPE_FP32);
    fsdp_device_step step = {
        .factor = 0.125f, .lr = 0.01f, .bias1 = 0.271f, .bias2 = 0.002997f, .updates = 3, .skip = skip};
    to_device(f, c->w, &w_host, sizeof w_host);
    to_device(f, c->g, &g_host, sizeof g_host);
    to_device(f, c->m, &m_host, sizeof m_host);
    to_device(f, c->v, &v_host, sizeof v_host);
    to_device(f, c->step, &step, sizeof step);
    to_device(f, c->table, adamw_segments, sizeof adamw_segments);
    fsdp_device_op op = {.kind = FSDP_OPERATION_ADAMW,
                         .u.adamw = {.master = c->w,
                                     .gradient = c->g,
                                     .m = c->m,
                                     .v = c->v,
                                     .count = ADAMW_COUNT,
                                     .segments = c->table,
                                     .n_segments = N_SEGMENTS,
                                     .step = c->step,
                                     .beta1 = 0.9f,
                                     .beta2 = 0.999f,
                                     .eps = 1e-8f,
                                     .weight_decay = 0.1f,
                                     .master_dtype = wt,
                                     .gradient_dtype = gt}};
    launch(f, 0, op, NULL);
    reference_adamw(&op, &step, wt, gt);
    from_device(f, &got, c->w, sizeof got);
    assert_same(&got, &want_w, ADAMW_COUNT, wt, f->suite->max_ulps);
    from_device(f, &got, c->m, sizeof got);
    assert_same(&got, &want_m, ADAMW_COUNT, FSDP_DTYPE_FP32, f->suite->max_ulps);
    from_device(f, &got, c->v, sizeof got);
    assert_same(&got, &want_v, ADAMW_COUNT, FSDP_DTYPE_FP32, f->suite->max_ulps);
}

static void adamw_is_the_formula_for_every_pair_of_types(void **state)
{
    fixture *f = *state;
    adamw_case c = {f,
                    fixture_block(f, sizeof(buffer)),
                    fixture_block(f, sizeof(buffer)),
                    fixture_block(f, sizeof(buffer)),
                    fixture_block(f, sizeof(buffer)),
                    fixture_block(f, 4096),
                    fixture_block(f, 64)};
    for (EACH(w, dtypes)) {
        for (EACH(g, dtypes)) {
            check_adamw(&c, dtypes[w], dtypes[g], false);
            check_adamw(&c, dtypes[w], dtypes[g], true);
        }
    }
}

/* ---- All together ---- */

/* A program on four streams, ordered by events alone; bytes that depend on the order of everything in it. */
static void run_program(fixture *f, unsigned char out[256])
{
    unsigned char *x = fixture_block(f, FIXTURE_STREAMS * 256);
    uint64_t random = 12345;
    for (int s = 0; s < FIXTURE_STREAMS; s++) launch(f, s, fill_op(x + 256 * s, (uint8_t)s, 256), NULL);
    for (int i = 0; i < 200; i++) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        int from = (int)(random >> 33) % FIXTURE_STREAMS, to = (int)(random >> 40) % FIXTURE_STREAMS;
        uint64_t at = (random >> 50) % 200;
        if (from == to) continue;
        /* to reads what from wrote; from waits until it has been read */
        record(f, 0, from);
        wait_event(f, to, 0);
        launch(f, to, copy_op(x + 256 * to + at, x + 256 * from + at / 2, 40), NULL);
        record(f, 1, to);
        wait_event(f, from, 1);
        launch(f, from, fill_op(x + 256 * from + at, (uint8_t)i, 16), NULL);
    }
    for (int s = 1; s < FIXTURE_STREAMS; s++) {
        record(f, 2, s);
        wait_event(f, 0, 2);
    }
    unsigned char all[FIXTURE_STREAMS * 256];
    launch(f, 0, copy_op(all, x, sizeof all), NULL);
    drain(f, 0);
    for (int k = 0; k < 256; k++) {
        out[k] = 0;
        for (int s = 0; s < FIXTURE_STREAMS; s++) out[k] = (unsigned char)(out[k] * 31 + all[256 * s + k]);
    }
}

static void jitter_changes_no_result(void **state)
{
    fixture *f = *state;
    unsigned char calm[256], shaken[256];
    run_program(f, calm);
    for (uint64_t seed = 1; seed <= 3; seed++) {
        static fixture shaky;
        if (!fixture_open(&shaky, f->suite, 0, 100000, seed)) skip();
        run_program(&shaky, shaken);
        fixture_close(&shaky);
        assert_memory_equal(calm, shaken, sizeof calm);
    }
}

#define TEST(name)                                         \
    {                                                      \
#name, name, fixture_setup, fixture_teardown, NULL \
    }

int run_kernel_suite(const device_suite *suite)
{
    struct CMUnitTest tests[] = {
        TEST(copy_and_fill_take_any_byte_count_and_place),
        TEST(casts_round_to_nearest_between_all_types),
        TEST(add_sums_in_fp32_and_rounds_once),
        TEST(square_sum_adds_the_segments_and_nothing_else),
        TEST(square_sum_is_near_the_true_sum_and_depends_on_counts_alone),
        TEST(step_result_decides_norm_clip_and_skip),
        TEST(a_rank_whose_calls_differ_is_seen_in_the_steps_sum),
        TEST(adamw_is_the_formula_for_every_pair_of_types),
        TEST(jitter_changes_no_result),
    };
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) tests[i].initial_state = (void *)(uintptr_t)suite;
    return cmocka_run_group_tests_name("kernels", tests, NULL, NULL);
}
