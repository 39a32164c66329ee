/* SPDX-License-Identifier: MIT */
#include "shapes.h"

#include <stdio.h>

#include "check.h"

/* GPT-2: Radford et al. 2019 and its released weights. Llama 3: arXiv:2407.21783, table 3; vocabulary 128,256. */
const published shapes_published[SHAPES_N_PUBLISHED] = {
    {"GPT-2 124M", 12, 768, 3072, 768, 50257, 1024, true, 124439808},
    {"GPT-2 1.5B", 48, 1600, 6400, 1600, 50257, 1024, true, 1557611200},
    {"Llama-3 8B", 32, 4096, 14336, 1024, 128256, 0, false, 8030261248},
    {"Llama-3 70B", 80, 8192, 28672, 1024, 128256, 0, false, 70553706496},
};

const char *shapes_ends_name(shapes_ends ends)
{
    static const char *const names[SHAPES_N_ENDS] = {"untied", "untied, held", "tied, held", "tied, visited twice"};
    return names[ends];
}

/* One unit being declared; the first error stays. */
typedef struct builder {
    shapes_model *m;
    shapes_dtypes dtypes;
    fsdp_status status;
} builder;

static void add_unit(builder *b, const char *name, bool held)
{
    if (b->status != FSDP_OK) return;
    shapes_model *m = b->m;
    fsdp_unit_config config = FSDP_UNIT_CONFIG_INIT;
    config.compute_dtype = b->dtypes.compute;
    config.grad_dtype = b->dtypes.grad;
    config.reshard = held ? FSDP_RESHARD_NEVER : FSDP_RESHARD_AFTER_USE;
    b->status = fsdp_model_add_unit(m->model, name, &config, &m->unit[m->n_units]);
    m->held[m->n_units] = held;
    m->elems[m->n_units++] = 0;
}

/* columns 0: a vector. */
static void add(builder *b, const char *name, uint64_t rows, uint64_t columns)
{
    if (b->status != FSDP_OK) return;
    shapes_model *m = b->m;
    fsdp_unit *unit = m->unit[m->n_units - 1];
    char full[64];
    snprintf(full, sizeof full, "%s.%s", fsdp_unit_name(unit), name);
    const uint64_t dims[] = {rows, columns};
    b->status = fsdp_unit_add_param(unit, full, columns > 0 ? 2 : 1, dims, NULL, NULL);
    m->elems[m->n_units - 1] += rows * (columns > 0 ? columns : 1);
}

static void add_block(builder *b, const published *p)
{
    uint64_t d = p->width, h = p->hidden;
    if (p->gpt2) {
        add(b, "ln_1.weight", d, 0), add(b, "ln_1.bias", d, 0);
        add(b, "attn.c_attn.weight", d, 3 * d), add(b, "attn.c_attn.bias", 3 * d, 0);
        add(b, "attn.c_proj.weight", d, d), add(b, "attn.c_proj.bias", d, 0);
        add(b, "ln_2.weight", d, 0), add(b, "ln_2.bias", d, 0);
        add(b, "mlp.c_fc.weight", d, h), add(b, "mlp.c_fc.bias", h, 0);
        add(b, "mlp.c_proj.weight", h, d), add(b, "mlp.c_proj.bias", d, 0);
        return;
    }
    add(b, "attention_norm", d, 0), add(b, "wq", d, d), add(b, "wk", p->kv_width, d), add(b, "wv", p->kv_width, d);
    add(b, "wo", d, d), add(b, "ffn_norm", d, 0), add(b, "w1", h, d), add(b, "w2", d, h), add(b, "w3", h, d);
}

static void add_units(builder *b, const published *p, shapes_ends ends)
{
    bool tied = ends == SHAPES_TIED_HELD || ends == SHAPES_TIED_VISITED;
    add_unit(b, "embed", ends == SHAPES_TIED_HELD || ends == SHAPES_UNTIED_HELD);
    add(b, "tokens", p->vocab, p->width);
    if (p->context > 0) add(b, "positions", p->context, p->width);
    for (uint32_t l = 0; l < p->layers; l++) {
        char name[16];
        snprintf(name, sizeof name, "h.%u", l);
        add_unit(b, name, false);
        add_block(b, p);
    }
    add_unit(b, "head", ends == SHAPES_UNTIED_HELD);
    add(b, "norm.weight", p->width, 0);
    if (p->gpt2) add(b, "norm.bias", p->width, 0);
    if (!tied) add(b, "output", p->vocab, p->width);
}

static void add_visit(shapes_model *m, uint32_t unit, fsdp_use use, uint32_t until)
{
    m->visit_unit[m->n_visits] = unit;
    m->visit[m->n_visits++] = (fsdp_visit){m->unit[unit], use, (int32_t)until};
}

/* Held units first, open across the half; then the others, forward or reversed. A table that is visited twice comes first
 * and last. */
static void add_half(shapes_model *m, fsdp_use use, const shapes_options *o)
{
    bool backward = use == FSDP_USE_BACKWARD, twice = o->ends == SHAPES_TIED_VISITED;
    uint32_t first = m->n_visits;
    for (uint32_t u = 0; u < m->n_units; u++)
        if (m->held[u]) add_visit(m, u, use, 0);
    if (twice && backward) add_visit(m, 0, use, m->n_visits);
    for (uint32_t k = 0; k < m->n_units; k++) {
        uint32_t u = backward ? m->n_units - 1 - k : k;
        if (m->held[u]) continue;
        bool layer = u > 0 && u + 1 < m->n_units;
        if (backward && layer && o->recompute) add_visit(m, u, FSDP_USE_RECOMPUTE, m->n_visits);
        add_visit(m, u, use, m->n_visits);
    }
    if (twice && !backward) add_visit(m, 0, use, m->n_visits);
    for (uint32_t i = first; i < m->n_visits; i++)
        if (m->held[m->visit_unit[i]]) m->visit[i].until = (int32_t)m->n_visits - 1;
}

fsdp_status shapes_declare(fsdp_context *ctx, const published *p, const shapes_options *options,
                           const fsdp_model_config *config, shapes_model *m)
{
    *m = (shapes_model){.pass = FSDP_PASS_TRAIN};
    FSDP_TRY(fsdp_model_create(ctx, config, &m->model));
    builder b = {m, options->dtypes, FSDP_OK};
    add_units(&b, p, options->ends);
    FSDP_TRY(b.status);
    add_half(m, FSDP_USE_FORWARD, options);
    add_half(m, FSDP_USE_BACKWARD, options);
    if (options->ends == SHAPES_TIED_VISITED || options->recompute)
        FSDP_TRY(fsdp_model_add_pass(m->model, "step", m->n_visits, m->visit, &m->pass));
    return fsdp_adamw_create(m->model, NULL, &m->opt);
}
