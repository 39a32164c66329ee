/* SPDX-License-Identifier: MIT */
/* Passes: lists of visits, the library's two and the caller's. All that plans reads these lists; nothing reads history. */
#include "sharding/pass.h"

#include <string.h>

#include "lib/check.h"
#include "lib/hostmem.h"

static void fini_pass(const fsdp_host_allocator *host, fsdp__pass *pass)
{
    fsdp__host_free(host, pass->given, pass->n, sizeof *pass->given);
    fsdp__host_free(host, pass->visits, pass->n, sizeof *pass->visits);
    fsdp__host_free(host, pass->full_offset, pass->n, sizeof *pass->full_offset);
    fsdp__host_free(host, pass->grad_offset, pass->n, sizeof *pass->grad_offset);
    fsdp__host_free(host, pass->closing, pass->n, sizeof *pass->closing);
    pass->given = NULL, pass->visits = NULL, pass->full_offset = NULL, pass->grad_offset = NULL, pass->closing = NULL;
    pass->n = 0;
}

/* Windows by the visit after which they close, and of those that close after the same one the innermost first. A counting sort;
 * the counts live in offsets that the plan has not written yet. */
static void sort_closing(fsdp__pass *pass)
{
    uint64_t *begin = pass->full_offset; /* of those that close after visit i, among all */
    for (uint32_t i = 0; i < pass->n; i++)
        if (pass->visits[i].until + 1 < pass->n) begin[pass->visits[i].until + 1]++;
    for (uint32_t i = 1; i < pass->n; i++) begin[i] += begin[i - 1];
    for (uint32_t i = pass->n; i-- > 0;) pass->closing[begin[pass->visits[i].until]++] = i;
    memset(begin, 0, pass->n * sizeof *begin);
}

/* pass: its name is set, nothing else. visits are copied. */
static fsdp_status init_pass(const fsdp_host_allocator *host, fsdp__pass *pass, const fsdp_visit *visits, uint32_t n)
{
    pass->n = n;
    pass->backward = false;
    pass->given = fsdp__host_alloc(host, n, sizeof *pass->given);
    pass->visits = fsdp__host_alloc(host, n, sizeof *pass->visits);
    pass->full_offset = fsdp__host_alloc(host, n, sizeof *pass->full_offset);
    pass->grad_offset = fsdp__host_alloc(host, n, sizeof *pass->grad_offset);
    pass->closing = fsdp__host_alloc(host, n, sizeof *pass->closing);
    if (pass->given == NULL || pass->visits == NULL || pass->full_offset == NULL || pass->grad_offset == NULL ||
        pass->closing == NULL) {
        fini_pass(host, pass);
        return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "pass %s of %u visits: no host memory", pass->name, n);
    }
    for (uint32_t i = 0; i < n; i++) {
        pass->given[i] = visits[i];
        pass->visits[i] =
            (fsdp__visit){visits[i].unit->index, visits[i].until > (int32_t)i ? (uint32_t)visits[i].until : i};
        pass->backward |= visits[i].use == FSDP_USE_BACKWARD;
    }
    sort_closing(pass);
    return FSDP_OK;
}

static fsdp_status append_name(fsdp_model *model, const char *name)
{
    const fsdp_host_allocator *host = &model->ctx->host;
    char *copy = NULL;
    if (fsdp__host_grow(host, &model->passes, &model->passes_capacity, model->n_passes + 1, sizeof *model->passes))
        copy = fsdp__host_strdup(host, name);
    if (copy == NULL) return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "pass %s: no host memory", name);
    model->passes[model->n_passes++] = (fsdp__pass){.name = copy};
    return FSDP_OK;
}

fsdp_status fsdp__passes_init(fsdp_model *model)
{
    FSDP_TRY(append_name(model, "TRAIN"));
    return append_name(model, "EVAL");
}

void fsdp__passes_fini(fsdp_model *model)
{
    const fsdp_host_allocator *host = &model->ctx->host;
    for (size_t i = 0; i < model->n_passes; i++) {
        fini_pass(host, &model->passes[i]);
        fsdp__host_strfree(host, model->passes[i].name);
    }
    fsdp__host_free(host, model->passes, model->passes_capacity, sizeof *model->passes);
    model->n_passes = 0;
}

/* Append one half: held units first, then the others, forward or reversed. Held windows close with the half's last visit. */
static uint32_t add_half(const fsdp_model *model, fsdp_visit *visits, uint32_t n, fsdp_use use)
{
    uint32_t n_units = (uint32_t)model->n_units, end = n + n_units - 1;
    for (uint32_t i = 0; i < n_units; i++)
        if (fsdp__unit_held(model->units[i])) visits[n++] = (fsdp_visit){model->units[i], use, (int32_t)end};
    for (uint32_t i = 0; i < n_units; i++) {
        fsdp_unit *unit = model->units[use == FSDP_USE_BACKWARD ? n_units - 1 - i : i];
        if (!fsdp__unit_held(unit)) visits[n] = (fsdp_visit){unit, use, (int32_t)n}, n++;
    }
    return n;
}

fsdp_status fsdp__passes_build(fsdp_model *model)
{
    const fsdp_host_allocator *host = &model->ctx->host;
    size_t n_units = model->n_units;
    fsdp_visit *visits = fsdp__host_alloc(host, 2 * n_units, sizeof *visits);
    if (visits == NULL)
        return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "model %s: no host memory for passes of %zu units", model->name,
                          n_units);
    uint32_t forward = add_half(model, visits, 0, FSDP_USE_FORWARD),
             both = add_half(model, visits, forward, FSDP_USE_BACKWARD);
    fini_pass(host, &model->passes[FSDP_PASS_TRAIN]);
    fini_pass(host, &model->passes[FSDP_PASS_EVAL]);
    fsdp_status status = init_pass(host, &model->passes[FSDP_PASS_TRAIN], visits, both);
    if (status == FSDP_OK) status = init_pass(host, &model->passes[FSDP_PASS_EVAL], visits, forward);
    fsdp__host_free(host, visits, 2 * n_units, sizeof *visits);
    return status;
}

static fsdp_status check_visits(const fsdp_model *model, const char *name, uint32_t n_visits, const fsdp_visit *visits)
{
    for (uint32_t i = 0; i < n_visits; i++) {
        const fsdp_visit *v = &visits[i];
        if (v->unit == NULL) return fsdp__fail(FSDP_ERR_ARG, "pass %s: visit %u has no unit", name, i);
        if (v->unit->model != model)
            return fsdp__fail(FSDP_ERR_ARG, "pass %s: visit %u is of unit %s, which belongs to another model, %s", name,
                              i, v->unit->name, v->unit->model->name);
        if (v->use < FSDP_USE_FORWARD || v->use > FSDP_USE_READ)
            return fsdp__fail(FSDP_ERR_ARG, "pass %s: visit %u of unit %s has use %d, which does not exist", name, i,
                              v->unit->name, (int)v->use);
        if (v->until >= (int64_t)n_visits)
            return fsdp__fail(FSDP_ERR_ARG, "pass %s: the window of visit %u (unit %s) reaches to visit %d of %u", name,
                              i, v->unit->name, v->until, n_visits);
    }
    return FSDP_OK;
}

/* Ranks compare a collective's pass by its name. */
static fsdp_status check_name(const fsdp_model *model, const char *name)
{
    if (name[0] == '\0') return fsdp__fail(FSDP_ERR_ARG, "fsdp_model_add_pass: the name is empty");
    for (size_t i = 0; i < model->n_passes; i++)
        if (strcmp(model->passes[i].name, name) == 0)
            return fsdp__fail(FSDP_ERR_ARG, "pass %s exists in model %s: names are unique", name, model->name);
    return FSDP_OK;
}

fsdp_status fsdp_model_add_pass(fsdp_model *model, const char *name, uint32_t n_visits, const fsdp_visit *visits,
                                int32_t *out_pass)
{
    FSDP_TRY(fsdp__model_check(__func__, model));
    FSDP_NEED(name);
    FSDP_NEED(visits);
    FSDP_NEED(out_pass);
    if (model->phase != FSDP__OPEN)
        return fsdp__fail(FSDP_ERR_STATE, "pass %s: model %s is sealed: add passes before fsdp_model_seal", name,
                          model->name);
    FSDP_TRY(check_name(model, name));
    if (n_visits == 0 || n_visits > 1u << 24)
        return fsdp__fail(FSDP_ERR_ARG, "pass %s: %u visits, expected 1 to 2^24", name, n_visits);
    FSDP_TRY(check_visits(model, name, n_visits, visits));
    FSDP_TRY(append_name(model, name));
    fsdp__pass *pass = &model->passes[model->n_passes - 1];
    fsdp_status status = init_pass(&model->ctx->host, pass, visits, n_visits);
    if (status != FSDP_OK) {
        fsdp__host_strfree(&model->ctx->host, pass->name);
        model->n_passes--;
        return status;
    }
    *out_pass = (int32_t)model->n_passes - 1;
    return FSDP_OK;
}
