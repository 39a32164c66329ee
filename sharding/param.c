/* SPDX-License-Identifier: MIT */
/* Stage 1: a parameter is registered: name, shape, dtype. In: the caller's words. Out: a list a unit. Next: layout.c. */
#include <string.h>

#include "lib/check.h"
#include "lib/hostmem.h"
#include "sharding/model.h"

#define MAX_ELEMS ((uint64_t)1 << 48)

static fsdp_status count_elems(const char *name, uint32_t n_dims, const uint64_t *dims, uint64_t *out_elems)
{
    if (n_dims > FSDP_MAX_DIMS)
        return fsdp__fail(FSDP_ERR_ARG, "parameter %s: %u extents, at most %d", name, n_dims, FSDP_MAX_DIMS);
    if (n_dims > 0 && dims == NULL) return fsdp__fail(FSDP_ERR_ARG, "parameter %s: dims is NULL", name);
    uint64_t elems = 1;
    bool empty = false;
    for (uint32_t i = 0; i < n_dims; i++) empty |= dims[i] == 0;
    for (uint32_t i = 0; i < n_dims && !empty; i++)
        if (__builtin_mul_overflow(elems, dims[i], &elems) || elems > MAX_ELEMS)
            return fsdp__fail(FSDP_ERR_ARG, "parameter %s: more than 2^48 elements with dims[%u], which is %llu", name,
                              i, (unsigned long long)dims[i]);
    *out_elems = empty ? 0 : elems;
    return FSDP_OK;
}

static fsdp_status check_param(fsdp_unit *unit, const char *name, const fsdp_param_config *c)
{
    if (name[0] == 0) return fsdp__fail(FSDP_ERR_ARG, "unit %s: a parameter's name is empty", unit->name);
    const fsdp_param *other = fsdp__names_find(&unit->model->param_names, name);
    if (other != NULL)
        return fsdp__fail(
            FSDP_ERR_ARG,
            "parameter %s exists in unit %s: names are unique in the model; a tied tensor is registered once", name,
            other->unit->name);
    if (c->compute_dtype != FSDP_DTYPE_INHERIT && fsdp_dtype_bytes(c->compute_dtype) == 0)
        return fsdp__fail(FSDP_ERR_ARG, "parameter %s: compute_dtype is %d, expected INHERIT, FP32, BF16 or FP16", name,
                          (int)c->compute_dtype);
    if (!(c->lr_scale >= 0.0f && c->lr_scale <= 1e30f))
        return fsdp__fail(FSDP_ERR_ARG, "parameter %s: lr_scale %g is not a factor", name, (double)c->lr_scale);
    return FSDP_OK;
}

static fsdp_param *new_param(fsdp_unit *unit, const char *name)
{
    const fsdp_host_allocator *host = &unit->model->ctx->host;
    if (!fsdp__host_grow(host, &unit->params, &unit->params_capacity, unit->n_params + 1, sizeof *unit->params))
        return NULL;
    if (!fsdp__names_reserve(host, &unit->model->param_names)) return NULL;
    fsdp_param *param = fsdp__host_alloc(host, 1, sizeof *param);
    if (param == NULL) return NULL;
    param->name = fsdp__host_strdup(host, name);
    if (param->name == NULL) {
        fsdp__host_free(host, param, 1, sizeof *param);
        return NULL;
    }
    return param;
}

fsdp_status fsdp_unit_add_param(fsdp_unit *unit, const char *name, uint32_t n_dims, const uint64_t *dims,
                                const fsdp_param_config *config, fsdp_param **out_param)
{
    FSDP_NEED(unit);
    FSDP_NEED(name);
    fsdp_model *model = unit->model;
    FSDP_TRY(fsdp__model_check(__func__, model));
    if (model->phase != FSDP__OPEN)
        return fsdp__fail(FSDP_ERR_STATE,
                          "parameter %s of unit %s: model %s is sealed: register before fsdp_model_seal", name,
                          unit->name, model->name);
    fsdp_param_config c = FSDP_PARAM_CONFIG_INIT;
    if (config != NULL) FSDP_TRY(fsdp__read_config("fsdp_param_config", &c, sizeof c, config, sizeof c));
    FSDP_TRY(check_param(unit, name, &c));
    uint64_t elems = 0;
    FSDP_TRY(count_elems(name, n_dims, dims, &elems));
    fsdp_param *param = new_param(unit, name);
    if (param == NULL) return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "parameter %s: no host memory", name);
    param->unit = unit;
    param->index = (uint32_t)unit->n_params;
    param->number = model->n_params++;
    param->n_dims = n_dims;
    if (n_dims > 0) memcpy(param->dims, dims, n_dims * sizeof *dims);
    param->elems = elems;
    param->compute_dtype = c.compute_dtype == FSDP_DTYPE_INHERIT ? unit->config.compute_dtype : c.compute_dtype;
    param->frozen = c.frozen;
    param->no_decay = c.no_decay;
    param->lr_scale = c.lr_scale;
    unit->params[unit->n_params++] = param;
    fsdp__names_add(&model->param_names, param->name, param);
    if (out_param != NULL) *out_param = param;
    return FSDP_OK;
}

const char *fsdp_param_name(const fsdp_param *param) { return param != NULL ? param->name : ""; }
uint64_t fsdp_param_elems(const fsdp_param *param) { return param != NULL ? param->elems : 0; }

fsdp_param *fsdp_model_find_param(fsdp_model *model, const char *name)
{
    return model != NULL && name != NULL ? fsdp__names_find(&model->param_names, name) : NULL;
}
