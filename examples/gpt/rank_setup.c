/* SPDX-License-Identifier: MIT */
/* A rank's objects: context, stream, model, first values; and the way back. */
#ifdef GPT_WITH_JEMALLOC
#include <fsdp/jemalloc.h>
#endif
#include <stdlib.h>

#include "rank.h"

/* Warnings, rare: a person should see them. */
static void warn(void *arg, const char *text)
{
    const rank *r = arg;
    fprintf(stderr, "\nrank %d: %s\n", r->index, text);
}

static fsdp_status open_context(rank *r)
{
    const options *o = &r->job->opt;
    fsdp_config config = FSDP_CONFIG_INIT;
    config.debug = (o->sync ? FSDP_DEBUG_SYNC : 0u) | (o->poison ? FSDP_DEBUG_POISON : 0u);
    config.reduce_comm = o->reduce_comm;
    config.log = warn;
    config.log_arg = r;
#ifdef GPT_WITH_JEMALLOC
    if (fsdp_jemalloc_host_create(&r->host) != FSDP_OK) warn(r, fsdp_jemalloc_last_error()); /* it is libc then */
    config.host = r->host;
    config.pinned = fsdp_jemalloc_pinned(); /* values in and out go through the same few regions */
#endif
    return r->job->device->open(r, &config);
}

static fsdp_status add_unit(rank *r, int unit, fsdp_param **params)
{
    const gpt_shape *shape = &r->job->shape;
    fsdp_unit_config config = FSDP_UNIT_CONFIG_INIT;
    if (unit == 0) config.reshard = FSDP_RESHARD_NEVER;
    r->job->device->configure(r, &config);
    r->add_grads = config.zero_grads;
    char name[32] = "held";
    if (unit > 0) snprintf(name, sizeof name, "h.%d", unit - 1);
    TRY(fsdp_model_add_unit(r->model, name, &config, &r->units[unit]));
    for (int i = 0; i < gpt_unit_params(shape, unit); i++) {
        const gpt_param param = gpt_param_at(shape, unit, i);
        fsdp_param_config param_config = FSDP_PARAM_CONFIG_INIT;
        param_config.no_decay = param.no_decay;
        TRY(fsdp_unit_add_param(r->units[unit], param.name, param.n_dims, param.dims, &param_config, &params[i]));
    }
    return FSDP_OK;
}

static fsdp_status register_model(rank *r)
{
    const options *o = &r->job->opt;
    fsdp_model_config config = FSDP_MODEL_CONFIG_INIT;
    config.name = "gpt";
    config.depth = (uint32_t)o->depth;
    if (o->micro_steps > 1)
        config.accumulation = o->keep_full ? FSDP_ACCUMULATE_KEEP_FULL : FSDP_ACCUMULATE_REDUCE_EACH;
    TRY(fsdp_model_create(r->ctx, &config, &r->model));
    fsdp_param **params = r->params;
    for (int unit = 0; unit < gpt_units(&r->job->shape); unit++) {
        TRY(add_unit(r, unit, params));
        params += gpt_unit_params(&r->job->shape, unit);
    }
    const fsdp_adamw_config adamw = FSDP_ADAMW_CONFIG_INIT;
    return fsdp_adamw_create(r->model, &adamw, &r->adamw);
}

/* The values of the range that this rank owns, by parameter and element: any number of ranks starts from one model. */
static int first_values(void *arg, const fsdp_param_range *range, void *dst)
{
    const rank *r = arg;
    const gpt_shape *shape = &r->job->shape;
    fsdp_param *const *params = r->params;
    for (int unit = 0; unit < gpt_units(shape); unit++) {
        for (int i = 0; i < gpt_unit_params(shape, unit); i++, params++) {
            if (*params != range->param) continue;
            const gpt_param param = gpt_param_at(shape, unit, i);
            gpt_first_values(&param, (uint64_t)r->job->opt.seed, unit, i, range->begin, range->count, dst);
            return 0;
        }
    }
    return 1;
}

static bool take_memory(rank *r)
{
    const gpt_shape *shape = &r->job->shape;
    size_t n_params = 0;
    for (int unit = 0; unit < gpt_units(shape); unit++) n_params += (size_t)gpt_unit_params(shape, unit);
    r->units = calloc((size_t)gpt_units(shape), sizeof *r->units);
    r->params = calloc(n_params, sizeof *r->params);
    r->n_blocks = STEPS_IN_FLIGHT * r->job->opt.micro_steps + 1;
    r->blocks = calloc((size_t)r->n_blocks, sizeof *r->blocks);
    if (!r->units || !r->params || !r->blocks) return false;
    for (int i = 0; i < r->n_blocks; i++)
        if (!pass_block_create(&r->blocks[i], shape)) return false;
    return true;
}

fsdp_status rank_open(rank *r)
{
    TRY(open_context(r));
    if (!take_memory(r)) {
        problem_set(&r->why, "rank %d: no memory for a model of this many parameters", r->index);
        return FSDP_ERR_NO_HOST_MEMORY;
    }
    TRY(r->job->device->take_memory(r));
    TRY(register_model(r));
    fsdp_memory predicted = FSDP_MEMORY_INIT;
    TRY(fsdp_model_predict(r->model, &predicted));
    TRY(fsdp_model_seal(r->model));
    if (r->out) r->out->predicted_bytes = predicted.total;
    return fsdp_model_fill(r->model, first_values, r, FSDP_DTYPE_FP32);
}

/* A failure on the way back is told like any other, but only if nothing failed before. */
static void close_call(rank *r, fsdp_status status)
{
    if (status != FSDP_OK && r->status == FSDP_OK) {
        r->status = status;
        problem_set(&r->why, "rank %d: %s", r->index, fsdp_last_error());
    }
}

void rank_close(rank *r)
{
    fsdp_trace_destroy(r->trace);
    close_call(r, fsdp_model_destroy(r->model));
    close_call(r, fsdp_stream_release(r->stream));
    close_call(r, fsdp_context_destroy(r->ctx));
#ifdef GPT_WITH_JEMALLOC
    if (fsdp_jemalloc_host_destroy(&r->host) != FSDP_OK) warn(r, fsdp_jemalloc_last_error());
#endif
    /* The streams are idle: nothing reads the blocks or the activations any more. */
    for (int i = 0; r->blocks && i < r->n_blocks; i++) pass_block_destroy(&r->blocks[i]);
    r->job->device->give_back(r);
    free(r->blocks);
    free(r->params);
    free(r->units);
}
