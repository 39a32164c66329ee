/* SPDX-License-Identifier: MIT */
/* Stage 0: a model and its units, up to seal. Next: param.c. */
#include "sharding/model.h"

#include <string.h>

#include "lib/check.h"
#include "lib/device.h"
#include "lib/hostmem.h"
#include "sharding/capture.h"
#include "sharding/pass.h"
#include "sharding/seal.h"

fsdp_status fsdp__model_check(const char *call, fsdp_model *model)
{
    if (model == NULL) return fsdp__fail(FSDP_ERR_ARG, "%s: the model (or unit) is NULL", call);
    FSDP_TRY(fsdp__context_check(model->ctx)); /* first: then pass_abort would not help */
    if (model->failed != FSDP_OK)
        return fsdp__fail(model->failed, "%s: model %s has failed (%s): call fsdp_pass_abort, or destroy it", call,
                          model->name, model->failed_text);
    return FSDP_OK;
}

fsdp_status fsdp__model_check_sealed(const char *call, fsdp_model *model)
{
    FSDP_TRY(fsdp__model_check(call, model));
    if (model->phase == FSDP__OPEN)
        return fsdp__fail(FSDP_ERR_STATE, "%s: model %s is not sealed: call fsdp_model_seal first", call, model->name);
    return FSDP_OK;
}

static fsdp_status check_open(const char *call, fsdp_model *model)
{
    FSDP_TRY(fsdp__model_check(call, model));
    if (model->phase != FSDP__OPEN)
        return fsdp__fail(FSDP_ERR_STATE,
                          "%s: model %s is sealed, nothing can be added: register before fsdp_model_seal", call,
                          model->name);
    return FSDP_OK;
}

fsdp_status fsdp__model_fail(fsdp_model *model, fsdp_status status)
{
    if (status == FSDP_OK) return status;
    status = fsdp__context_explain(model->ctx, status);
    if (model->failed == FSDP_OK) {
        model->failed = status;
        strncpy(model->failed_text, fsdp_last_error(), sizeof model->failed_text - 1);
    }
    return status;
}

static fsdp_status check_config(const fsdp_model_config *c)
{
    if (c->name == NULL) return fsdp__fail(FSDP_ERR_ARG, "fsdp_model_config.name is NULL");
    if (c->depth > FSDP__MAX_DEPTH)
        return fsdp__fail(FSDP_ERR_ARG, "model %s: depth %u, expected 0 to %d", c->name, c->depth, FSDP__MAX_DEPTH);
    if (c->grad_buffers == 0 || c->grad_buffers > FSDP__MAX_DEPTH)
        return fsdp__fail(FSDP_ERR_ARG, "model %s: grad_buffers %u, expected 1 to %d", c->name, c->grad_buffers,
                          FSDP__MAX_DEPTH);
    if (c->accumulation < FSDP_ACCUMULATE_NONE || c->accumulation > FSDP_ACCUMULATE_KEEP_FULL)
        return fsdp__fail(FSDP_ERR_ARG, "model %s: accumulation %d does not exist", c->name, (int)c->accumulation);
    return FSDP_OK;
}

fsdp_status fsdp_model_create(fsdp_context *ctx, const fsdp_model_config *config, fsdp_model **out_model)
{
    FSDP_NEED(ctx);
    FSDP_NEED(out_model);
    fsdp_model_config c = FSDP_MODEL_CONFIG_INIT;
    if (config != NULL) FSDP_TRY(fsdp__read_config("fsdp_model_config", &c, sizeof c, config, sizeof c));
    FSDP_TRY(check_config(&c));
    FSDP_TRY(fsdp__context_check(ctx));
    FSDP_TRY(fsdp__capture_off(__func__, ctx));
    fsdp_model *model = fsdp__host_alloc(&ctx->host, 1, sizeof *model);
    if (model == NULL) return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "model %s: no host memory", c.name);
    model->ctx = ctx;
    model->config = c;
    model->name = fsdp__host_strdup(&ctx->host, c.name);
    model->config.name = model->name;
    model->stats.size = sizeof model->stats;
    fsdp_status status = model->name == NULL ? fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "model %s: no host memory", c.name)
                                             : fsdp__passes_init(model);
    fsdp__lock(ctx);
    ctx->n_live[FSDP__CHILD_MODEL]++;
    model->older = ctx->models;
    if (model->older != NULL) model->older->newer = model;
    ctx->models = model;
    fsdp__unlock(ctx);
    if (status != FSDP_OK) {
        FSDP_IGNORE(fsdp_model_destroy(model));
        return status;
    }
    *out_model = model;
    return FSDP_OK;
}

static void destroy_unit(fsdp_context *ctx, fsdp_unit *unit)
{
    const fsdp_host_allocator *host = &ctx->host;
    fsdp__label_forget(&ctx->clocks, unit->name);
    for (size_t i = 0; i < unit->n_params; i++) {
        fsdp__host_strfree(host, unit->params[i]->name);
        fsdp__host_free(host, unit->params[i], 1, sizeof *unit->params[i]);
    }
    fsdp__host_free(host, unit->params, unit->params_capacity, sizeof *unit->params);
    fsdp__host_free(host, unit->segments, unit->n_params, sizeof *unit->segments);
    fsdp__host_free(host, unit->param_ptrs, unit->n_params, sizeof *unit->param_ptrs);
    fsdp__host_free(host, unit->grad_ptrs, unit->n_params, sizeof *unit->grad_ptrs);
    fsdp__host_strfree(host, unit->name);
    fsdp__host_free(host, unit, 1, sizeof *unit);
}

fsdp_status fsdp_model_destroy(fsdp_model *model)
{
    if (model == NULL) return FSDP_OK;
    fsdp_context *ctx = model->ctx;
    const fsdp_host_allocator *host = &ctx->host;
    FSDP_TRY(fsdp__capture_off(__func__, ctx));
    fsdp__lock(ctx);
    fsdp_status status = fsdp__context_settle(ctx, __func__);
    if (status != FSDP_OK) {
        fsdp__unlock(ctx);
        return status;
    }
    fsdp__capture_forget(model);
    *(model->newer != NULL ? &model->newer->older : &ctx->models) = model->older;
    if (model->older != NULL) model->older->newer = model->newer;
    if (model->phase != FSDP__OPEN) fsdp__drop_step(model);
    fsdp__unseal(model);
    fsdp__passes_fini(model);
    for (size_t i = 0; i < model->n_units; i++) destroy_unit(ctx, model->units[i]);
    fsdp__host_free(host, model->units, model->units_capacity, sizeof *model->units);
    fsdp__names_fini(host, &model->unit_names);
    fsdp__names_fini(host, &model->param_names);
    fsdp__host_free(host, model->adamw, 1, sizeof *model->adamw);
    if (model->name != NULL) fsdp__label_forget(&ctx->clocks, model->name);
    fsdp__host_strfree(host, model->name);
    ctx->n_live[FSDP__CHILD_MODEL]--;
    fsdp__unlock(ctx);
    fsdp__host_free(host, model, 1, sizeof *model);
    return FSDP_OK;
}

static fsdp_status check_unit_config(const fsdp_model *model, const char *name, const fsdp_unit_config *c)
{
    const fsdp_dtype dtypes[] = {c->compute_dtype, c->grad_dtype, c->reduce_dtype, c->master_dtype};
    const char *const fields[] = {"compute_dtype", "grad_dtype", "reduce_dtype", "master_dtype"};
    for (int i = 0; i < 4; i++)
        if (fsdp_dtype_bytes(dtypes[i]) == 0)
            return fsdp__fail(FSDP_ERR_ARG, "unit %s: %s is %d, expected FP32, BF16 or FP16", name, fields[i],
                              (int)dtypes[i]);
    if (c->reshard != FSDP_RESHARD_AFTER_USE && c->reshard != FSDP_RESHARD_NEVER)
        return fsdp__fail(FSDP_ERR_ARG, "unit %s: reshard %d does not exist", name, (int)c->reshard);
    if (c->place != FSDP_PLACE_DEVICE)
        return fsdp__fail(FSDP_ERR_UNSUPPORTED, "unit %s: place %d is not supported", name, (int)c->place);
    if (model->config.accumulation == FSDP_ACCUMULATE_KEEP_FULL && c->grad_dtype != c->reduce_dtype)
        return fsdp__fail(FSDP_ERR_UNSUPPORTED,
                          "unit %s: gradients are kept over micro-steps, so they are summed in grad_dtype %s, which "
                          "must be reduce_dtype %s",
                          name, fsdp_dtype_name(c->grad_dtype), fsdp_dtype_name(c->reduce_dtype));
    if (model->config.accumulation == FSDP_ACCUMULATE_KEEP_FULL && !c->zero_grads)
        return fsdp__fail(FSDP_ERR_UNSUPPORTED,
                          "unit %s: gradients are kept over micro-steps, so kernels add to them: zero_grads must be on",
                          name);
    return FSDP_OK;
}

fsdp_status fsdp_model_add_unit(fsdp_model *model, const char *name, const fsdp_unit_config *config,
                                fsdp_unit **out_unit)
{
    FSDP_TRY(check_open(__func__, model));
    FSDP_NEED(name);
    FSDP_NEED(out_unit);
    const fsdp_host_allocator *host = &model->ctx->host;
    fsdp_unit_config c = FSDP_UNIT_CONFIG_INIT;
    if (config != NULL) FSDP_TRY(fsdp__read_config("fsdp_unit_config", &c, sizeof c, config, sizeof c));
    if (name[0] == 0) return fsdp__fail(FSDP_ERR_ARG, "fsdp_model_add_unit: the name is empty");
    if (fsdp__names_find(&model->unit_names, name) != NULL)
        return fsdp__fail(FSDP_ERR_ARG, "unit %s: the model has a unit of that name: names are unique", name);
    FSDP_TRY(check_unit_config(model, name, &c));
    fsdp_unit *unit = NULL;
    if (fsdp__host_grow(host, &model->units, &model->units_capacity, model->n_units + 1, sizeof *model->units) &&
        fsdp__names_reserve(host, &model->unit_names))
        unit = fsdp__host_alloc(host, 1, sizeof *unit);
    if (unit != NULL && (unit->name = fsdp__host_strdup(host, name)) == NULL) {
        fsdp__host_free(host, unit, 1, sizeof *unit);
        unit = NULL;
    }
    if (unit == NULL) return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "unit %s: no host memory", name);
    unit->model = model;
    unit->config = c;
    unit->index = (uint32_t)model->n_units;
    model->units[model->n_units++] = unit;
    fsdp__names_add(&model->unit_names, unit->name, unit);
    *out_unit = unit;
    return FSDP_OK;
}

const char *fsdp_unit_name(const fsdp_unit *unit) { return unit != NULL ? unit->name : ""; }

fsdp_status fsdp_model_stats_get(const fsdp_model *model, fsdp_model_stats *out_stats)
{
    FSDP_NEED(model);
    FSDP_NEED(out_stats);
    return fsdp__write_result("fsdp_model_stats", out_stats, &model->stats, sizeof model->stats, sizeof model->stats);
}

float fsdp_model_grad_factor(const fsdp_model *model)
{
    if (model == NULL) return 0.0f;
    return model->config.grad_sum ? 1.0f : (float)(1.0 / model->ctx->world);
}
