/* SPDX-License-Identifier: MIT */
/* Memory of the two planned pools, for published models: reserved is at most 1.02 × the most bytes that are live at once.
 * Live is read off the tape of a training step, and counted once more by the words of docs/schedule.md; best fit alone,
 * given the same sequence, is printed beside it. bench_pools prints every case. */
#include "toy_assert.h"

#include <stdio.h>
#include <string.h>

#include "ok.h"
#include "pool_matrix.h"

enum { PAD_ELEMS = 128, PAGE = 4096 };

static const char *name_case(const pool_case *c)
{
    static char text[256];
    snprintf(text, sizeof text,
             "%s, %s, %u ranks, depth %u, compute %s, gradients %s, accumulation %s, %u gradient buffers%s",
             c->model->name, shapes_ends_name(c->options.ends), c->world, c->depth,
             pool_dtype_name(c->options.dtypes.compute), pool_dtype_name(c->options.dtypes.grad),
             pool_accumulation_name(c->accumulation), c->grad_buffers, c->options.recompute ? ", recompute" : "");
    return text;
}

static const char *const pool_names[POOL_N_KINDS] = {"gather", "grad"};

typedef struct summary {
    bool print; /* a line for each model, ends and depth */
    pool_case last;
    uint32_t n_cases;
    pool_worst line[POOL_N_KINDS], all[POOL_N_KINDS]; /* line: of the cases like the last */
} summary;

static void print_line(const summary *t)
{
    const pool_worst *g = &t->line[POOL_GATHER], *r = &t->line[POOL_GRAD];
    if (!t->print) return;
    print_message("  %-11s %-19s %u | %7.4f %9.2f %8.2f | %7.4f %9.2f %8.2f\n", t->last.model->name,
                  shapes_ends_name(t->last.options.ends), t->last.depth, g->reserved, g->best_segments,
                  g->best_in_range, r->reserved, r->best_segments, r->best_in_range);
}

/* A new line where the model, its ends or the depth change. */
static void sum_up(summary *t, const pool_row *row)
{
    const pool_case *last = &t->last, *now = &row->c;
    bool same = last->model == now->model && last->options.ends == now->options.ends && last->depth == now->depth;
    if (t->n_cases > 0 && !same) print_line(t);
    if (!same) memset(t->line, 0, sizeof t->line);
    t->last = *now;
    t->n_cases++;
    for (pool_kind kind = POOL_GATHER; kind < POOL_N_KINDS; kind++) {
        pool_take_worst(&t->line[kind], &row->pool[kind]);
        pool_take_worst(&t->all[kind], &row->pool[kind]);
    }
}

/* Parameters as published; a Llama with a tied head has one table less. */
static uint64_t count_params(const pool_case *c)
{
    bool less = !c->model->gpt2 && (c->options.ends == SHAPES_TIED_HELD || c->options.ends == SHAPES_TIED_VISITED);
    return c->model->params - (less ? c->model->vocab * c->model->width : 0);
}

static void check_pool(const pool_row *row, pool_kind kind)
{
    const pool_figures *f = &row->pool[kind];
    uint64_t counted = row->result.counted[kind];
    if (f->live != counted)
        fail_msg("%s: %s: by the tape %llu bytes are live, by the words %llu", name_case(&row->c), pool_names[kind],
                 (unsigned long long)f->live, (unsigned long long)counted);
    if (f->reserved * 100 > f->live * 102 || f->reserved < f->live)
        fail_msg("%s: %s: reserved %llu bytes, live at most %llu: %.4f", name_case(&row->c), pool_names[kind],
                 (unsigned long long)f->reserved, (unsigned long long)f->live, pool_ratio(f->reserved, f->live));
    if (f->reserved * 100 > f->live_params * 102 || f->live < f->live_params)
        fail_msg("%s: %s: reserved %llu bytes, parameters at most %llu: pads take too much", name_case(&row->c),
                 pool_names[kind], (unsigned long long)f->reserved, (unsigned long long)f->live_params);
    assert_in_range(row->result.extent[kind], f->live, f->reserved); /* buffers lie where they were said to */
    if (f->best_segments > 0) assert_true(f->best_segments >= f->live);
    if (f->best_in_range > 0) assert_true(f->best_in_range >= f->live);
}

static fsdp_status check_row(void *arg, const pool_row *row)
{
    const pool_result *r = &row->result;
    for (pool_kind kind = POOL_GATHER; kind < POOL_N_KINDS; kind++) check_pool(row, kind);
    assert_int_equal(r->memory.gather_live_peak, r->counted[POOL_GATHER]);
    assert_int_equal(r->counters.device_bytes_peak, r->memory.total);
    assert_int_equal(r->memory.params, count_params(&row->c));
    /* Nothing was left out to save bytes. */
    assert_int_equal(r->stats.no_room, 0);
    assert_int_equal(r->stats.off_plan_places, 0);
    assert_int_equal(r->stats.off_plan_hooks, 0);
    assert_int_equal(r->stats.unused_gathers, 0);
    sum_up(arg, row);
    return FSDP_OK;
}

static void run_matrix(const pool_matrix *m, summary *t)
{
    t->print = m->best_fit;
    if (t->print)
        print_message(
            "  reserved / live peak, worst of ranks,  | gather: best fit alone    | grad: best fit alone\n"
            "  dtypes, accumulations           depth  |    plan  segments    range |    plan  segments    range\n");
    OK(pool_each_case(m, check_row, t));
    print_line(t);
    for (pool_kind kind = POOL_GATHER; kind < POOL_N_KINDS; kind++)
        print_message("  %s, worst of %u cases: %.4f of what is live, %.4f of the parameters in it%s\n",
                      pool_names[kind], t->n_cases, t->all[kind].reserved, t->all[kind].reserved_params,
                      t->print ? "" : " (best fit not asked)");
}

static void pools_reserve_what_is_live_for_published_models(void **unused)
{
    (void)unused;
    static const uint32_t worlds[] = {64, 8, 512};
    uint32_t n_worlds = TOY_REDUCED ? 1 : 3;
    summary t = {0};
    run_matrix(&(pool_matrix){worlds, n_worlds, 2, 2, false, true}, &t);
    assert_int_equal(t.n_cases, 12 * 5 * n_worlds * 10);
    /* These sequences are ones that need a plan, or the figures say nothing. */
    for (pool_kind kind = POOL_GATHER; kind < POOL_N_KINDS; kind++) assert_true(t.all[kind].best_in_range > 1.2);
}

static void so_they_do_with_one_to_four_gradient_buffers(void **unused)
{
    (void)unused;
    static const uint32_t worlds[] = {24};
    uint32_t least = TOY_REDUCED ? 3 : 1, most = TOY_REDUCED ? 3 : 4;
    summary t = {0};
    run_matrix(&(pool_matrix){worlds, 1, least, most, false, false}, &t);
    assert_int_equal(t.n_cases, 12 * 5 * 10 * (most - least + 1));
}

static void so_they_do_where_layers_run_forward_again(void **unused)
{
    (void)unused;
    static const uint32_t worlds[] = {16};
    summary t = {0};
    run_matrix(&(pool_matrix){worlds, 1, 2, 2, true, false}, &t);
    assert_int_equal(t.n_cases, 12 * 5 * 10);
}

/* ---- By hand, so that the two counts are not only of one mind ---- */

static uint64_t padded(uint64_t elems, uint32_t world)
{
    uint64_t unit = (uint64_t)world * PAD_ELEMS;
    return (elems + unit - 1) / unit * unit;
}

static void llama_8b_on_8_ranks_by_hand(void **unused)
{
    (void)unused;
    const uint64_t head = 128256ull * 4096 + 4096, layer = 218112000;
    pool_case c = {&shapes_published[2],
                   {SHAPES_UNTIED, {FSDP_DTYPE_BF16, FSDP_DTYPE_FP32}, false},
                   8,
                   1,
                   FSDP_ACCUMULATE_NONE,
                   2};
    pool_result r;
    OK(pool_run(&c, &r));
    assert_int_equal(r.reserved[POOL_GATHER], 2 * (head + layer)); /* the turn: both are kept */
    assert_int_equal(r.reserved[POOL_GRAD], 4 * (head + layer));
    assert_int_equal(r.events[POOL_GATHER].live_peak, 2 * (head + layer));
    assert_int_equal(r.events[POOL_GRAD].live_peak, 4 * (head + layer));
    /* A warm step gathers 2 × 34 − (1 + 1); three steps, and after the last one embed and no other. */
    assert_int_equal(r.stats.gathers, 3 * (2 * 34 - 2) + 1);
    pool_result_free(&r);
}

static void gpt2_124m_on_64_ranks_by_hand(void **unused)
{
    (void)unused;
    const uint64_t embed = padded(50257u * 768 + 1024u * 768, 64), layer = padded(12u * 768 * 768 + 13u * 768, 64),
                   norm = padded(2 * 768, 64);
    pool_case c = {&shapes_published[0],
                   {SHAPES_TIED_HELD, {FSDP_DTYPE_FP32, FSDP_DTYPE_FP32}, false},
                   64,
                   2,
                   FSDP_ACCUMULATE_KEEP_FULL,
                   2};
    pool_result r;
    OK(pool_run(&c, &r));
    assert_int_equal(r.events[POOL_GATHER].live_peak, 4 * (embed + 3 * layer));
    assert_int_equal(r.events[POOL_GRAD].live_peak, 4 * (embed + 12 * layer + norm));
    for (pool_kind kind = POOL_GATHER; kind < POOL_N_KINDS; kind++)
        assert_in_range(r.reserved[kind], r.events[kind].live_peak, r.events[kind].live_peak + PAGE - 1);
    pool_result_free(&r);
}

int main(void)
{
    alarm(240);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(llama_8b_on_8_ranks_by_hand),
        cmocka_unit_test(gpt2_124m_on_64_ranks_by_hand),
        cmocka_unit_test(pools_reserve_what_is_live_for_published_models),
        cmocka_unit_test(so_they_do_with_one_to_four_gradient_buffers),
        cmocka_unit_test(so_they_do_where_layers_run_forward_again),
    };
    return cmocka_run_group_tests_name("pool memory", tests, NULL, NULL);
}
