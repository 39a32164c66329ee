/* SPDX-License-Identifier: MIT */
#include "pool_matrix.h"

#include "check.h"

double pool_ratio(uint64_t bytes, uint64_t live) { return live > 0 ? (double)bytes / (double)live : 0.0; }

static void take_larger(double *a, double b)
{
    if (b > *a) *a = b;
}

void pool_take_worst(pool_worst *worst, const pool_figures *f)
{
    bool none_found = f->best_segments > 0 && f->best_in_range == 0;
    take_larger(&worst->reserved, pool_ratio(f->reserved, f->live));
    take_larger(&worst->reserved_params, pool_ratio(f->reserved, f->live_params));
    take_larger(&worst->best_segments, pool_ratio(f->best_segments, f->live));
    take_larger(&worst->best_in_range, none_found ? 2.0 : pool_ratio(f->best_in_range, f->live));
}

const char *pool_dtype_name(fsdp_dtype dtype) { return dtype == FSDP_DTYPE_BF16 ? "bf16" : "fp32"; }

const char *pool_accumulation_name(fsdp_accumulation accumulation)
{
    return accumulation == FSDP_ACCUMULATE_NONE ? "none" : accumulation == FSDP_ACCUMULATE_KEEP_FULL ? "keep" : "each";
}

static fsdp_status measure(pool_row *row, bool best_fit)
{
    pool_result *r = &row->result;
    FSDP_TRY(pool_run(&row->c, r));
    for (pool_kind kind = POOL_GATHER; kind < POOL_N_KINDS; kind++) {
        pool_figures *f = &row->pool[kind];
        *f = (pool_figures){r->reserved[kind], r->events[kind].live_peak, r->counted_params[kind], 0, 0};
        if (!best_fit) continue;
        FSDP_TRY(pool_fit_segments(&r->events[kind], &f->best_segments));
        FSDP_TRY(pool_fit_range(&r->events[kind], &f->best_in_range));
    }
    return FSDP_OK;
}

static fsdp_status visit_case(const pool_matrix *m, const pool_case *c, pool_row_fn fn, void *arg)
{
    pool_row row = {.c = *c};
    fsdp_status status = measure(&row, m->best_fit);
    if (status == FSDP_OK) status = fn(arg, &row);
    pool_result_free(&row.result);
    return status;
}

/* KEEP_FULL adds up in the gradient buffers, so these must be of the reduction's dtype. */
static fsdp_status each_dtype(const pool_matrix *m, pool_case c, pool_row_fn fn, void *arg)
{
    static const fsdp_dtype dtypes[] = {FSDP_DTYPE_BF16, FSDP_DTYPE_FP32};
    for (int k = 0; k < 4; k++) {
        c.options.dtypes = (shapes_dtypes){dtypes[k / 2], dtypes[k % 2]};
        for (int a = FSDP_ACCUMULATE_NONE; a <= FSDP_ACCUMULATE_KEEP_FULL; a++) {
            c.accumulation = (fsdp_accumulation)a;
            if (a == FSDP_ACCUMULATE_KEEP_FULL && c.options.dtypes.grad != FSDP_DTYPE_FP32) continue;
            for (c.grad_buffers = m->min_buffers; c.grad_buffers <= m->max_buffers; c.grad_buffers++)
                FSDP_TRY(visit_case(m, &c, fn, arg));
        }
    }
    return FSDP_OK;
}

fsdp_status pool_each_case(const pool_matrix *m, pool_row_fn fn, void *arg)
{
    pool_case c = {.options.recompute = m->recompute};
    for (uint32_t i = 0; i < SHAPES_N_PUBLISHED; i++) {
        c.model = &shapes_published[i];
        for (int ends = c.model->gpt2 ? SHAPES_TIED_HELD : SHAPES_UNTIED; ends < SHAPES_N_ENDS; ends++) {
            c.options.ends = (shapes_ends)ends;
            for (c.depth = 0; c.depth <= 4; c.depth++)
                for (uint32_t w = 0; w < m->n_worlds; w++) {
                    c.world = m->worlds[w];
                    FSDP_TRY(each_dtype(m, c, fn, arg));
                }
        }
    }
    return FSDP_OK;
}
