/* SPDX-License-Identifier: MIT */
#include "journey.h"

#include <stdio.h>

#include "clock.h"
#include "context.h"

enum { MAX_RECORDS = 1 << 14 };

void journey_ok(fsdp_status status)
{
    if (status != FSDP_OK) fail_msg("%s: %s", fsdp_status_name(status), fsdp_last_error());
}

void journey_init(journey *j, uint32_t n_blocks)
{
    assert_in_range(n_blocks, 1, JOURNEY_BLOCKS);
    *j = (journey){.sim = FSDP_SIM_CONFIG_INIT,
                   .model_config = FSDP_MODEL_CONFIG_INIT,
                   .unit_config = FSDP_UNIT_CONFIG_INIT,
                   .n_blocks = n_blocks,
                   .n_micro = 1,
                   .held_shard_elems = 1024};
    j->sim.world = 2;
    for (uint32_t i = 0; i < n_blocks; i++) j->shard_elems[i] = 1024;
}

static fsdp_unit *add_unit(journey *j, const char *name, uint64_t shard_elems, fsdp_reshard reshard)
{
    char param[40];
    fsdp_unit *unit = NULL;
    fsdp_unit_config config = j->unit_config;
    config.reshard = reshard;
    OK(fsdp_model_add_unit(j->model, name, &config, &unit));
    uint64_t elems = shard_elems * j->sim.world;
    snprintf(param, sizeof param, "%s.w", name);
    OK(fsdp_unit_add_param(unit, param, 1, &elems, NULL, NULL));
    return unit;
}

void journey_open(journey *j)
{
    fsdp_config config = FSDP_CONFIG_INIT;
    config.backend = fsdp_sim_backend();
    config.backend_config = &j->sim;
    config.timeout_ns = UINT64_MAX; /* virtual */
    OK(fsdp_context_create(&config, &j->ctx));
    OK(fsdp_stream_create(j->ctx, "s", &j->s));
    OK(fsdp_model_create(j->ctx, &j->model_config, &j->model));
    if (j->held) j->held_unit = add_unit(j, "H", j->held_shard_elems, FSDP_RESHARD_NEVER);
    for (uint32_t i = 0; i < j->n_blocks; i++) {
        char name[16];
        snprintf(name, sizeof name, "h%u", i);
        j->unit[i] = add_unit(j, name, j->shard_elems[i], FSDP_RESHARD_AFTER_USE);
    }
    if (!j->own_optimizer) OK(fsdp_adamw_create(j->model, NULL, &j->opt));
    if (j->before_seal != NULL) j->before_seal(j);
    OK(fsdp_model_seal(j->model));
}

void journey_close(journey *j)
{
    fsdp_trace_destroy(j->trace);
    OK(fsdp_model_destroy(j->model));
    OK(fsdp_stream_release(j->s));
    OK(fsdp_context_destroy(j->ctx));
}

static void seen(journey *j, const char *call, const fsdp_unit *unit)
{
    char text[64];
    if (j->seen == NULL) return;
    snprintf(text, sizeof text, "%s(%s)", call, unit != NULL ? fsdp_unit_name(unit) : "");
    j->seen(j, text);
}

static void compute(journey *j, uint64_t ns)
{
    if (ns > 0) OK(fsdp_stream_delay(j->s, ns));
}

static void begin(journey *j, fsdp_unit *unit, bool backward)
{
    fsdp_view view = FSDP_VIEW_INIT;
    OK(backward ? fsdp_backward_begin(unit, j->s, &view) : fsdp_forward_begin(unit, j->s, &view));
    seen(j, backward ? "backward_begin" : "forward_begin", unit);
}

static void end(journey *j, fsdp_unit *unit, bool backward)
{
    OK(backward ? fsdp_backward_end(unit, j->s) : fsdp_forward_end(unit, j->s));
    seen(j, backward ? "backward_end" : "forward_end", unit);
}

static void half(journey *j, bool backward)
{
    journey_costs first = backward ? j->head : j->embed, last = backward ? j->embed : j->head;
    if (j->held) {
        begin(j, j->held_unit, backward);
        compute(j, backward ? first.backward_ns : first.forward_ns);
    }
    for (uint32_t k = 0; k < j->n_blocks; k++) {
        uint32_t i = backward ? j->n_blocks - 1 - k : k;
        begin(j, j->unit[i], backward);
        compute(j, backward ? j->block[i].backward_ns : j->block[i].forward_ns);
        end(j, j->unit[i], backward);
    }
    if (j->held) {
        compute(j, backward ? last.backward_ns : last.forward_ns);
        end(j, j->held_unit, backward);
    }
}

void journey_micro_step(journey *j, uint32_t index)
{
    fsdp_pass_args args = FSDP_PASS_ARGS_INIT;
    args.index = index;
    args.count = j->n_micro;
    OK(fsdp_pass_begin(j->model, &args, j->s));
    seen(j, "pass_begin", NULL);
    half(j, false);
    half(j, true);
    OK(fsdp_pass_end(j->model, j->s));
    seen(j, "pass_end", NULL);
}

static void update_unit(journey *j, fsdp_unit *unit, uint64_t ns)
{
    compute(j, ns);
    OK(fsdp_update_unit(unit, j->s));
    seen(j, "update_unit", unit);
}

void journey_update(journey *j)
{
    if (!j->own_optimizer) {
        fsdp_adamw_args args = FSDP_ADAMW_ARGS_INIT;
        args.max_norm = 1.0f;
        OK(fsdp_adamw_step(j->opt, &args, j->s));
        seen(j, "adamw_step", NULL);
        return;
    }
    OK(fsdp_update_begin(j->model, j->s));
    seen(j, "update_begin", NULL);
    if (j->held) update_unit(j, j->held_unit, j->embed.update_ns);
    for (uint32_t i = 0; i < j->n_blocks; i++) update_unit(j, j->unit[i], j->block[i].update_ns);
    OK(fsdp_update_end(j->model, j->s));
    seen(j, "update_end", NULL);
}

void journey_step(journey *j)
{
    for (uint32_t i = 0; i < j->n_micro; i++) journey_micro_step(j, i);
    journey_update(j);
}

void journey_tape_start(journey *j)
{
    fsdp_trace_destroy(j->trace);
    OK(fsdp_trace_start(j->ctx, MAX_RECORDS, &j->trace));
}

void journey_tape_stop(journey *j)
{
    OK(fsdp_trace_stop_host(j->trace));
    assert_int_equal(fsdp_trace_dropped(j->trace), 0);
}

uint64_t journey_n_operations(const journey *j, fsdp_operation operation)
{
    uint64_t n = 0;
    for (uint64_t i = 0; i < fsdp_trace_count(j->trace); i++) {
        const fsdp_trace_record *r = fsdp_trace_at(j->trace, i);
        n += r->kind == FSDP_RECORD_OPERATION && r->operation == operation;
    }
    return n;
}

uint64_t journey_n_records(const journey *j, const fsdp_stream *stream, fsdp_record_kind kind)
{
    uint64_t n = 0;
    for (uint64_t i = 0; i < fsdp_trace_count(j->trace); i++) {
        const fsdp_trace_record *r = fsdp_trace_at(j->trace, i);
        n += r->kind == kind && r->stream == stream->slot;
    }
    return n;
}
