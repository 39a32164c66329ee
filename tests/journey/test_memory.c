/* SPDX-License-Identifier: MIT */
/* Memory is exact: predicted before the first byte is taken, taken at seal, and the same from then on, however far the host
 * runs ahead and whatever order the hooks come in. No hook, pass or update takes memory, makes an event or blocks. */
#include "toy_assert.h"

#include <stdio.h>
#include <string.h>

static toy_result results[TOY_WORLD], simulated[TOY_WORLD];

static int free_results(void **unused)
{
    (void)unused;
    toy_free(results);
    return 0;
}

/* ---- The toy, on the host and simulated ---- */

static fsdp_status check_counters(toy *t, const char *when)
{
    const toy_result *r = t->result;
    fsdp_counters now = FSDP_COUNTERS_INIT;
    TOY_TRY(fsdp_context_counters(t->ctx, &now));
    if (now.device_bytes == r->predicted.total && now.device_bytes_peak == r->predicted.total &&
        now.pinned_bytes == r->predicted.pinned && now.allocations == r->sealed.allocations &&
        now.events_created == r->sealed.events_created && now.host_waits == r->sealed.host_waits)
        return FSDP_OK;
    char text[256];
    snprintf(text, sizeof text,
             "%llu bytes, peak %llu, predicted %llu; since seal %llu allocations, %llu events, %llu host waits",
             (unsigned long long)now.device_bytes, (unsigned long long)now.device_bytes_peak,
             (unsigned long long)r->predicted.total, (unsigned long long)(now.allocations - r->sealed.allocations),
             (unsigned long long)(now.events_created - r->sealed.events_created),
             (unsigned long long)(now.host_waits - r->sealed.host_waits));
    return toy_fail(t, FSDP_ERR_STATE, __FILE__, __LINE__, when, text);
}

/* Windows one after another, in no order of any pass: backward first, some units twice, some never. */
static fsdp_status off_plan_step(toy *t)
{
    fsdp_view view = FSDP_VIEW_INIT;
    for (uint32_t i = 0; i < t->config->micro_steps; i++) {
        TOY_TRY(toy_pass_begin(t, i));
        for (uint32_t k = 0; k < 2 * t->shape.n_units; k++) {
            fsdp_unit *unit = t->unit[k * 5 % t->shape.n_units];
            TOY_TRY(fsdp_forward_begin(unit, t->s, &view));
            TOY_TRY(fsdp_forward_end(unit, t->s));
            if (k % 3 != 0 || k >= t->shape.n_units) continue;
            TOY_TRY(fsdp_backward_begin(unit, t->s, &view));
            TOY_TRY(fsdp_backward_end(unit, t->s));
        }
        TOY_TRY(fsdp_pass_end(t->model, t->s));
    }
    return toy_update(t);
}

static fsdp_status train_without_asking(toy *t)
{
    TOY_CHECK(memcmp(&t->result->memory, &t->result->predicted, sizeof t->result->memory) == 0);
    TOY_CHECK(t->result->sealed.device_bytes == t->result->predicted.total);
    TOY_CHECK(t->result->sealed.device_bytes_peak == t->result->predicted.total);
    TOY_CHECK(t->result->sealed.pinned_bytes == t->result->predicted.pinned);
    TOY_TRY(fsdp_context_counters(t->ctx, &t->result->sealed)); /* fill has blocked since */
    for (int step = 0; step < 5; step++) {
        if (step % 2 == 1) TOY_TRY(toy_evaluate(t));
        for (uint32_t i = 0; i < t->config->micro_steps; i++) {
            TOY_TRY(toy_micro(t, i));
            TOY_TRY(check_counters(t, "in a step"));
        }
        TOY_TRY(toy_update(t));
        TOY_TRY(check_counters(t, "after an update"));
    }
    TOY_TRY(off_plan_step(t));
    TOY_TRY(check_counters(t, "after a step off plan"));
    TOY_TRY(fsdp_model_stats_get(t->model, &t->result->stats));
    TOY_CHECK(t->result->stats.off_plan_hooks > 0);
    TOY_TRY(fsdp_stream_drain_host(t->s, toy_timeout_ns));
    return FSDP_OK;
}

static void check_bytes(const toy_config *config)
{
    toy_assert_run(config, train_without_asking, NULL, results);
    for (uint32_t r = 1; r < config->world; r++)
        assert_memory_equal(&results[r].memory, &results[0].memory, sizeof results[0].memory);
    toy_config sim = *config;
    sim.sim = true;
    toy_assert_run(&sim, train_without_asking, NULL, simulated);
    if (memcmp(&simulated[0].predicted, &results[0].memory, sizeof results[0].memory) != 0)
        fail_msg("%s %llu bytes on the host, %llu simulated", toy_case, (unsigned long long)results[0].memory.total,
                 (unsigned long long)simulated[0].predicted.total);
}

/* The k-th of the types a model may have. */
static void set_types(toy_config *config, uint32_t k)
{
    bool keep = config->accumulation == FSDP_ACCUMULATE_KEEP_FULL;
    toy_shape_config *shape = &config->shape;
    if (k % 4 == 1) shape->compute = FSDP_DTYPE_BF16, shape->grad = keep ? FSDP_DTYPE_FP32 : FSDP_DTYPE_BF16;
    if (k % 4 == 2) shape->compute = FSDP_DTYPE_FP16, shape->mixed = shape->frozen_layer = true;
    if (k % 4 == 3) shape->compute = shape->grad = shape->reduce = shape->master = FSDP_DTYPE_BF16;
}

static void device_bytes_are_those_predicted_from_seal_to_the_end(void **unused)
{
    (void)unused;
    static const uint32_t worlds[] = {1, 2, 3, 4, 7};
    static const uint32_t depths[] = {0, 1, 2, 3, 4};
    uint32_t k = 0;
    for (size_t w = 0; w < sizeof worlds / sizeof *worlds; w++) {
        for (size_t d = 0; d < sizeof depths / sizeof *depths; d++) {
            for (uint32_t tied = 0; tied < 2; tied++, k++) {
                if (TOY_REDUCED && k % 5 != 0) continue;
                toy_config config = toy_config_default();
                config.world = worlds[w];
                config.depth = depths[d];
                config.shape.tied = tied;
                config.accumulation = (fsdp_accumulation)((k + w) % 3);
                config.micro_steps = config.accumulation == FSDP_ACCUMULATE_NONE ? 1 : 2;
                config.grad_buffers = 1 + k % 3;
                config.debug = k % 2 ? FSDP_DEBUG_POISON : 0;
                config.reduce_comm = k % 7 == 0;
                set_types(&config, k / 2 + (uint32_t)d);
                TOY_CASE("world %u, depth %u, tied %u, accumulation %d, types %u:", config.world, config.depth, tied,
                         (int)config.accumulation, (k / 2 + (uint32_t)d) % 4);
                check_bytes(&config);
            }
        }
    }
}

static void a_unit_without_optimizer_takes_no_moments(void **unused)
{
    (void)unused;
    toy_config config = toy_config_default();
    config.world = 2;
    toy_assert_run(&config, train_without_asking, NULL, results);
    uint64_t total = results[0].memory.total, moments = results[0].memory.moments;
    assert_in_range(moments, 2 * results[0].memory.gradients - 4096, 2 * results[0].memory.gradients);
    config.optimizer = TOY_OWN_SGD;
    toy_assert_run(&config, train_without_asking, NULL, results);
    assert_int_equal(results[0].memory.moments, 0);
    assert_int_equal(results[0].memory.total, total - moments);
}

/* ---- Models that no test machine holds ---- */

typedef struct published {
    const char *name;
    uint32_t layers;
    uint64_t width, hidden, kv_width, vocab, context; /* context: learned positions; 0: none */
    bool biases;
    uint64_t params; /* with a tied head, as published or worked out from the shapes */
} published;

/* GPT-2: Radford et al. 2019 and its released weights. Llama 3: arXiv:2407.21783, table 3; vocabulary 128,256. */
static const published models[] = {
    {"GPT-2 124M", 12, 768, 3072, 768, 50257, 1024, true, 124439808},
    {"GPT-2 1.5B", 48, 1600, 6400, 1600, 50257, 1024, true, 1557611200},
    {"Llama 3 8B", 32, 4096, 14336, 1024, 128256, 0, false, 8030261248 - 128256ull * 4096},
    {"Llama 3 70B", 80, 8192, 28672, 1024, 128256, 0, false, 70553706496 - 128256ull * 8192},
};

static void add(fsdp_unit *unit, const char *name, uint64_t rows, uint64_t columns)
{
    char full[64];
    snprintf(full, sizeof full, "%s.%s", fsdp_unit_name(unit), name);
    const uint64_t dims[] = {rows, columns};
    assert_int_equal(fsdp_unit_add_param(unit, full, columns > 0 ? 2 : 1, dims, NULL, NULL), FSDP_OK);
}

static void add_block(const published *p, fsdp_unit *unit)
{
    uint64_t d = p->width, h = p->hidden;
    if (p->biases) {
        add(unit, "ln1.w", d, 0), add(unit, "ln1.b", d, 0), add(unit, "ln2.w", d, 0), add(unit, "ln2.b", d, 0);
        add(unit, "qkv.w", 3 * d, d), add(unit, "qkv.b", 3 * d, 0), add(unit, "proj.w", d, d),
            add(unit, "proj.b", d, 0);
        add(unit, "up.w", h, d), add(unit, "up.b", h, 0), add(unit, "down.w", d, h), add(unit, "down.b", d, 0);
        return;
    }
    add(unit, "norm1", d, 0), add(unit, "q", d, d), add(unit, "k", p->kv_width, d), add(unit, "v", p->kv_width, d),
        add(unit, "o", d, d);
    add(unit, "norm2", d, 0), add(unit, "gate", h, d), add(unit, "up", h, d), add(unit, "down", d, h);
}

static void add_ends(const published *p, fsdp_unit *embed, fsdp_unit *last)
{
    add(embed, "wte", p->vocab, p->width);
    if (p->context > 0) add(embed, "wpe", p->context, p->width);
    add(last, "norm.w", p->width, 0);
    if (p->biases) add(last, "norm.b", p->width, 0);
}

static fsdp_unit *add_unit(fsdp_model *model, const char *name, fsdp_reshard reshard, fsdp_dtype grad)
{
    fsdp_unit_config config = FSDP_UNIT_CONFIG_INIT;
    config.compute_dtype = FSDP_DTYPE_BF16;
    config.grad_dtype = grad;
    config.reshard = reshard;
    fsdp_unit *unit = NULL;
    assert_int_equal(fsdp_model_add_unit(model, name, &config, &unit), FSDP_OK);
    return unit;
}

/* Tied: embedding, last norm and head are one held unit. */
static void predict_published(fsdp_context *ctx, const published *p, bool tied, uint32_t depth, fsdp_memory *out)
{
    fsdp_model *model = NULL;
    fsdp_model_config config = FSDP_MODEL_CONFIG_INIT;
    config.depth = depth;
    assert_int_equal(fsdp_model_create(ctx, &config, &model), FSDP_OK);
    fsdp_unit *embed = add_unit(model, "embed", tied ? FSDP_RESHARD_NEVER : FSDP_RESHARD_AFTER_USE, FSDP_DTYPE_BF16),
              *last = embed;
    for (uint32_t l = 0; l < p->layers; l++) {
        char name[16];
        snprintf(name, sizeof name, "h.%u", l);
        add_block(p, add_unit(model, name, FSDP_RESHARD_AFTER_USE, FSDP_DTYPE_BF16));
    }
    if (!tied) last = add_unit(model, "head", FSDP_RESHARD_AFTER_USE, FSDP_DTYPE_BF16);
    add_ends(p, embed, last);
    if (!tied) add(last, "head", p->vocab, p->width);
    fsdp_adamw *opt;
    assert_int_equal(fsdp_adamw_create(model, NULL, &opt), FSDP_OK);
    *out = (fsdp_memory)FSDP_MEMORY_INIT;
    assert_int_equal(fsdp_model_predict(model, out), FSDP_OK);
    assert_int_equal(fsdp_model_destroy(model), FSDP_OK);
}

static uint64_t round_up(uint64_t bytes, uint64_t granularity)
{
    return (bytes + granularity - 1) / granularity * granularity;
}

static void check_published(fsdp_context *ctx, const published *p, bool tied, uint32_t world)
{
    uint64_t before = 0;
    for (uint32_t depth = 0; depth <= 4; depth++) {
        fsdp_memory m;
        predict_published(ctx, p, tied, depth, &m);
        uint64_t params = tied ? p->params : p->params + p->vocab * p->width;
        assert_int_equal(m.params, params);
        if (m.gather != round_up(m.gather_live_peak, 4096))
            fail_msg("%s, tied %d, world %u, depth %u: gather %llu bytes, live at most %llu", p->name, tied, world,
                     depth, (unsigned long long)m.gather, (unsigned long long)m.gather_live_peak);
        assert_true(m.gather > before); /* each depth costs a buffer */
        before = m.gather;
        assert_int_equal(m.total, m.master + m.gradients + m.moments + m.gather + m.grad + m.scratch);
        /* fp32 shards, gradients and two moments, and at most a multiple of 128 elements a parameter and rank beside */
        assert_in_range(m.master, params * 4 / world, params * 4 / world + (p->layers + 2) * 1024 + 4096);
        assert_int_equal(m.gradients, m.master);
        assert_in_range(m.moments, 2 * m.master - 4096, 2 * m.master);
    }
}

static void published_models_gather_in_no_more_than_is_live(void **unused)
{
    (void)unused;
    for (uint32_t world = 8; world <= 64; world += 56) {
        fsdp_sim_config sim = FSDP_SIM_CONFIG_INIT;
        sim.world = world;
        fsdp_config config = FSDP_CONFIG_INIT;
        config.backend = fsdp_sim_backend();
        config.backend_config = &sim;
        fsdp_context *ctx = NULL;
        assert_int_equal(fsdp_context_create(&config, &ctx), FSDP_OK);
        for (size_t i = 0; i < sizeof models / sizeof *models; i++)
            for (int tied = 0; tied < 2; tied++) check_published(ctx, &models[i], tied, world);
        fsdp_counters counters = FSDP_COUNTERS_INIT;
        assert_int_equal(fsdp_context_counters(ctx, &counters), FSDP_OK);
        assert_int_equal(counters.device_bytes_peak, 0); /* asking takes nothing */
        assert_int_equal(fsdp_context_destroy(ctx), FSDP_OK);
    }
}

/* ---- Passes of the caller's own ---- */

typedef struct random_pass {
    fsdp_visit visit[32];
    uint32_t n;
    struct {
        bool begin;
        uint32_t visit;
    } hook[64];
    uint32_t n_hooks;
    bool backward;
} random_pass;

static uint32_t seed;

static uint32_t draw(uint32_t n)
{
    seed = seed * 1664525u + 1013904223u;
    return (seed >> 10) % n;
}

/* Up to three windows at a time, each within the one that was opened before it. */
static void make_pass(fsdp_unit *const *units, uint32_t n_units, random_pass *pass)
{
    uint32_t open[3], n_open = 0, n_visits = 4 + draw(20);
    *pass = (random_pass){.n = 0};
    while (pass->n < n_visits || n_open > 0) {
        if (n_open > 0 && (pass->n == n_visits || n_open == 3 || draw(3) > 0)) {
            uint32_t visit = open[--n_open];
            pass->visit[visit].until = (int32_t)pass->n - 1;
            pass->hook[pass->n_hooks].begin = false;
            pass->hook[pass->n_hooks++].visit = visit;
            continue;
        }
        fsdp_use use = draw(2) ? FSDP_USE_BACKWARD : FSDP_USE_FORWARD;
        pass->backward |= use == FSDP_USE_BACKWARD;
        pass->hook[pass->n_hooks].begin = true;
        pass->hook[pass->n_hooks++].visit = pass->n;
        open[n_open++] = pass->n;
        pass->visit[pass->n++] = (fsdp_visit){units[draw(n_units)], use, 0};
    }
}

static fsdp_status run_pass(const random_pass *pass, fsdp_stream *s)
{
    fsdp_status status = FSDP_OK;
    for (uint32_t i = 0; i < pass->n_hooks && status == FSDP_OK; i++) {
        const fsdp_visit *visit = &pass->visit[pass->hook[i].visit];
        fsdp_view view = FSDP_VIEW_INIT;
        if (visit->use == FSDP_USE_BACKWARD)
            status =
                pass->hook[i].begin ? fsdp_backward_begin(visit->unit, s, &view) : fsdp_backward_end(visit->unit, s);
        else
            status = pass->hook[i].begin ? fsdp_forward_begin(visit->unit, s, &view) : fsdp_forward_end(visit->unit, s);
    }
    return status;
}

/* Two passes that follow each other in any order, as often as one likes. */
static void train_on(fsdp_model *model, fsdp_adamw *opt, const random_pass *passes, const int32_t *numbers,
                     uint32_t n_micro_steps, fsdp_stream *s)
{
    for (int step = 0; step < 6; step++) {
        uint32_t which = draw(2);
        fsdp_pass_args args = FSDP_PASS_ARGS_INIT;
        args.pass = numbers[which];
        args.next = numbers[draw(2)];
        args.count = n_micro_steps;
        for (args.index = 0; args.index < args.count; args.index++) {
            assert_int_equal(fsdp_pass_begin(model, &args, s), FSDP_OK);
            if (run_pass(&passes[which], s) != FSDP_OK) fail_msg("%s %s", toy_case, fsdp_last_error());
            assert_int_equal(fsdp_pass_end(model, s), FSDP_OK);
        }
        fsdp_adamw_args update = FSDP_ADAMW_ARGS_INIT;
        if (passes[which].backward) assert_int_equal(fsdp_adamw_step(opt, &update, s), FSDP_OK);
    }
}

static void check_random_passes(fsdp_context *ctx, fsdp_stream *s)
{
    fsdp_model_config config = FSDP_MODEL_CONFIG_INIT;
    config.depth = draw(5);
    config.accumulation = (fsdp_accumulation)draw(3);
    config.grad_buffers = 1 + draw(3);
    config.prefetch_bytes = draw(4) == 0 ? draw(200000) : 0;
    fsdp_model *model = NULL;
    fsdp_adamw *opt = NULL;
    fsdp_unit *units[9];
    uint32_t n_units = 2 + draw(8);
    assert_int_equal(fsdp_model_create(ctx, &config, &model), FSDP_OK);
    for (uint32_t u = 0; u < n_units; u++) {
        char name[16];
        snprintf(name, sizeof name, "u%u", u);
        units[u] = add_unit(model, name, draw(5) == 0 ? FSDP_RESHARD_NEVER : FSDP_RESHARD_AFTER_USE, FSDP_DTYPE_FP32);
        add(units[u], "weight", 1 + draw(draw(2) ? 30000 : 3000), 0);
    }
    random_pass passes[2];
    int32_t numbers[2];
    for (int i = 0; i < 2; i++) {
        make_pass(units, n_units, &passes[i]);
        assert_int_equal(fsdp_model_add_pass(model, i ? "one" : "other", passes[i].n, passes[i].visit, &numbers[i]),
                         FSDP_OK);
    }
    assert_int_equal(fsdp_adamw_create(model, NULL, &opt), FSDP_OK);
    assert_int_equal(fsdp_model_seal(model), FSDP_OK);
    train_on(model, opt, passes, numbers, config.accumulation == FSDP_ACCUMULATE_NONE ? 1 : 1 + draw(3), s);
    fsdp_model_stats stats = FSDP_MODEL_STATS_INIT;
    assert_int_equal(fsdp_model_stats_get(model, &stats), FSDP_OK);
    if (stats.off_plan_hooks + stats.off_plan_places > 0)
        fail_msg("%s on plan, but %llu hooks and %llu places were not", toy_case,
                 (unsigned long long)stats.off_plan_hooks, (unsigned long long)stats.off_plan_places);
    assert_int_equal(fsdp_model_destroy(model), FSDP_OK);
}

static void a_visit_on_plan_never_lacks_room(void **unused)
{
    (void)unused;
    for (uint32_t number = 1; number <= 2000; number++) {
        seed = number * 2654435761u;
        fsdp_sim_config sim = FSDP_SIM_CONFIG_INIT;
        sim.world = 1 + draw(4);
        fsdp_config config = FSDP_CONFIG_INIT;
        config.backend = fsdp_sim_backend();
        config.backend_config = &sim;
        fsdp_context *ctx = NULL;
        fsdp_stream *s = NULL;
        assert_int_equal(fsdp_context_create(&config, &ctx), FSDP_OK);
        assert_int_equal(fsdp_stream_create(ctx, "compute", &s), FSDP_OK);
        TOY_CASE("seed %u:", number);
        check_random_passes(ctx, s);
        assert_int_equal(fsdp_stream_release(s), FSDP_OK);
        assert_int_equal(fsdp_context_destroy(ctx), FSDP_OK);
    }
}

/* ---- The log ---- */

typedef struct heard {
    uint32_t n;
    char last[256];
} heard;

static void hear(void *arg, const char *text)
{
    heard *h = arg;
    h->n++;
    snprintf(h->last, sizeof h->last, "%s", text);
}

static void a_unit_that_the_budget_never_holds_is_warned_of(void **unused)
{
    (void)unused;
    heard h = {0};
    fsdp_sim_config sim = FSDP_SIM_CONFIG_INIT;
    sim.world = 2;
    fsdp_config config = FSDP_CONFIG_INIT;
    config.backend = fsdp_sim_backend();
    config.backend_config = &sim;
    config.log = hear;
    config.log_arg = &h;
    fsdp_model_config budget = FSDP_MODEL_CONFIG_INIT;
    budget.prefetch_bytes = 3000;
    fsdp_context *ctx = NULL;
    fsdp_model *model = NULL;
    assert_int_equal(fsdp_context_create(&config, &ctx), FSDP_OK);
    assert_int_equal(fsdp_model_create(ctx, &budget, &model), FSDP_OK);
    add(add_unit(model, "small", FSDP_RESHARD_AFTER_USE, FSDP_DTYPE_FP32), "weight", 1000, 0);
    add(add_unit(model, "big", FSDP_RESHARD_AFTER_USE, FSDP_DTYPE_FP32), "weight", 2000, 0);
    add(add_unit(model, "held", FSDP_RESHARD_NEVER, FSDP_DTYPE_FP32), "weight", 2000, 0);
    assert_int_equal(fsdp_model_seal(model), FSDP_OK);
    assert_int_equal(h.n, 1);
    assert_non_null(strstr(h.last, "unit big gathers 4096 bytes, more than prefetch_bytes 3000"));
    assert_int_equal(fsdp_model_destroy(model), FSDP_OK);
    assert_int_equal(fsdp_context_destroy(ctx), FSDP_OK);
}

int main(void)
{
#define MEMORY(name) cmocka_unit_test_setup_teardown(name, toy_deadline, free_results)
    const struct CMUnitTest tests[] = {
        MEMORY(device_bytes_are_those_predicted_from_seal_to_the_end),
        MEMORY(a_unit_without_optimizer_takes_no_moments),
        MEMORY(a_visit_on_plan_never_lacks_room),
        MEMORY(published_models_gather_in_no_more_than_is_live),
        MEMORY(a_unit_that_the_budget_never_holds_is_warned_of),
    };
    return cmocka_run_group_tests_name("memory", tests, NULL, NULL);
}
