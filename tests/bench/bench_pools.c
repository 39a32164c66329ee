/* SPDX-License-Identifier: MIT */
/* What the gather and the grad pool reserve for published models, beside what is live in them and what best fit alone
 * would take.
 *
 *     bench_pools [--json] [--worst] [--buffers N] [--recompute] [RANKS…]       default: 8 16 32 64 128 256 512
 *
 * A Markdown table, a row a case, then the worst of each model and pool (--worst: only these); --json: a line a case. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pool_matrix.h"

enum { MAX_WORLDS = 64 };

typedef struct bench {
    bool json, only_worst;
    uint32_t n_cases;
    pool_worst model[SHAPES_N_PUBLISHED][POOL_N_KINDS];
} bench;

static const char *const pool_names[POOL_N_KINDS] = {"gather", "grad"};

static void print_json_pool(const char *name, const pool_figures *f)
{
    printf(",\"%s\":{\"reserved\":%llu,\"live_peak\":%llu,\"live_params\":%llu,\"best_fit_segments\":%llu,"
           "\"best_fit_range\":%llu}",
           name, (unsigned long long)f->reserved, (unsigned long long)f->live, (unsigned long long)f->live_params,
           (unsigned long long)f->best_segments, (unsigned long long)f->best_in_range);
}

static void print_json(const pool_row *row)
{
    const pool_case *c = &row->c;
    printf("{\"model\":\"%s\",\"ends\":\"%s\",\"recompute\":%s,\"ranks\":%u,\"depth\":%u,\"compute\":\"%s\","
           "\"grad\":\"%s\",\"accumulation\":\"%s\",\"grad_buffers\":%u",
           c->model->name, shapes_ends_name(c->options.ends), c->options.recompute ? "true" : "false", c->world,
           c->depth, pool_dtype_name(c->options.dtypes.compute), pool_dtype_name(c->options.dtypes.grad),
           pool_accumulation_name(c->accumulation), c->grad_buffers);
    for (pool_kind kind = POOL_GATHER; kind < POOL_N_KINDS; kind++) print_json_pool(pool_names[kind], &row->pool[kind]);
    printf("}\n");
}

static void print_row(const pool_row *row)
{
    const pool_case *c = &row->c;
    printf("| %s | %s | %u | %u | %s | %s | %s |", c->model->name, shapes_ends_name(c->options.ends), c->world,
           c->depth, pool_dtype_name(c->options.dtypes.compute), pool_dtype_name(c->options.dtypes.grad),
           pool_accumulation_name(c->accumulation));
    for (pool_kind kind = POOL_GATHER; kind < POOL_N_KINDS; kind++) {
        const pool_figures *f = &row->pool[kind];
        printf(" %.1f | %.4f | %.2f | %.2f |", (double)f->live / (double)(1 << 20), pool_ratio(f->reserved, f->live),
               pool_ratio(f->best_segments, f->live), pool_ratio(f->best_in_range, f->live));
    }
    printf("\n");
}

static fsdp_status add_row(void *arg, const pool_row *row)
{
    bench *b = arg;
    if (b->json) print_json(row);
    else if (!b->only_worst) print_row(row);
    b->n_cases++;
    for (pool_kind kind = POOL_GATHER; kind < POOL_N_KINDS; kind++)
        pool_take_worst(&b->model[row->c.model - shapes_published][kind], &row->pool[kind]);
    return FSDP_OK;
}

static void print_worst(const bench *b)
{
    printf("\nWorst of %u cases, in live peaks:\n\n"
           "| model | pool | reserved | … of the parameters alone | best fit, segments | best fit, one range |\n"
           "|---|---|---:|---:|---:|---:|\n",
           b->n_cases);
    for (uint32_t i = 0; i < SHAPES_N_PUBLISHED; i++)
        for (pool_kind kind = POOL_GATHER; kind < POOL_N_KINDS; kind++) {
            const pool_worst *w = &b->model[i][kind];
            printf("| %s | %s | %.4f | %.4f | %.2f | %.2f |\n", shapes_published[i].name, pool_names[kind], w->reserved,
                   w->reserved_params, w->best_segments, w->best_in_range);
        }
}

static uint32_t parse_count(const char *text)
{
    char *end;
    unsigned long value = strtoul(text, &end, 10);
    if (*text == 0 || *end != 0 || value == 0 || value > 1 << 16) {
        fprintf(stderr,
                "bench_pools: %s: expected a number from 1 to 65536\n"
                "usage: bench_pools [--json] [--worst] [--buffers N] [--recompute] [RANKS…]\n",
                text);
        exit(2);
    }
    return (uint32_t)value;
}

int main(int argc, char **argv)
{
    static const uint32_t usual[] = {8, 16, 32, 64, 128, 256, 512};
    uint32_t worlds[MAX_WORLDS];
    pool_matrix m = {usual, sizeof usual / sizeof *usual, 2, 2, false, true};
    uint32_t n_worlds = 0;
    bench b = {0};
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--json") == 0) b.json = true;
        else if (strcmp(argv[i], "--worst") == 0) b.only_worst = true;
        else if (strcmp(argv[i], "--recompute") == 0) m.recompute = true;
        else if (strcmp(argv[i], "--buffers") == 0 && i + 1 < argc)
            m.min_buffers = m.max_buffers = parse_count(argv[++i]);
        else if (n_worlds < MAX_WORLDS) worlds[n_worlds++] = parse_count(argv[i]);
    }
    if (n_worlds > 0) m.worlds = worlds, m.n_worlds = n_worlds;
    if (m.max_buffers > POOL_MAX_GRAD_BUFFERS) {
        fprintf(stderr, "bench_pools: at most %d gradient buffers\n", POOL_MAX_GRAD_BUFFERS);
        return 2;
    }
    if (!b.json && !b.only_worst)
        printf("| model | ends | ranks | depth | compute | grad | accumulation | gather live MiB | reserved | best "
               "fit, segments "
               "| best fit, one range | grad live MiB | reserved | best fit, segments | best fit, one range |\n"
               "|---|---|---:|---:|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|\n");
    if (pool_each_case(&m, add_row, &b) != FSDP_OK) {
        fprintf(stderr, "bench_pools: %s\n", fsdp_last_error());
        return 1;
    }
    if (!b.json) print_worst(&b);
    return 0;
}
