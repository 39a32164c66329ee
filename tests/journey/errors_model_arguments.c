/* SPDX-License-Identifier: MIT */
/* Wrong arguments of the public functions of sharding/, header by header: null, size fields, ranges, dtypes, shapes, names. */
#include "errors_arguments.h"

#include <stdio.h>

static fsdp_context *ctx(void) { return program.ctx; }

/* ---- model.h ---- */

static void model_configs(void **state)
{
    (void)state;
    fsdp_model *m = NULL;
    fsdp_model_config c = FSDP_MODEL_CONFIG_INIT;
    ARG(fsdp_model_create(NULL, &c, &m), "ctx is NULL");
    ARG(fsdp_model_create(ctx(), &c, NULL), "out_model is NULL");
    CONFIG_SIZES(fsdp_model_create(ctx(), config, &m), fsdp_model_config, FSDP_MODEL_CONFIG_INIT, "fsdp_model_config");
    c.name = NULL;
    ARG(fsdp_model_create(ctx(), &c, &m), "fsdp_model_config.name is NULL");
    c.name = "tiny", c.depth = 65;
    ARG(fsdp_model_create(ctx(), &c, &m), "model tiny: depth 65, expected 0 to 64");
    c.depth = UINT32_MAX;
    ARG(fsdp_model_create(ctx(), &c, &m), "model tiny: depth 4294967295");
    c.depth = 1, c.grad_buffers = 0;
    ARG(fsdp_model_create(ctx(), &c, &m), "model tiny: grad_buffers 0, expected 1 to 64");
    c.grad_buffers = 65;
    ARG(fsdp_model_create(ctx(), &c, &m), "grad_buffers 65");
    c.grad_buffers = 2, c.accumulation = (fsdp_accumulation)3;
    ARG(fsdp_model_create(ctx(), &c, &m), "model tiny: accumulation 3 does not exist");
    c.accumulation = (fsdp_accumulation)-1;
    ARG(fsdp_model_create(ctx(), &c, &m), "accumulation -1 does not exist");
    assert_null(m);
}

static void units(void **state)
{
    (void)state;
    fsdp_model *m;
    fsdp_unit *u = NULL, *first;
    fsdp_unit_config c = FSDP_UNIT_CONFIG_INIT;
    OK(fsdp_model_create(ctx(), NULL, &m));
    ARG(fsdp_model_add_unit(NULL, "u", &c, &u), "fsdp_model_add_unit: the model (or unit) is NULL");
    ARG(fsdp_model_add_unit(m, NULL, &c, &u), "name is NULL");
    ARG(fsdp_model_add_unit(m, "u", &c, NULL), "out_unit is NULL");
    ARG(fsdp_model_add_unit(m, "", &c, &u), "the name is empty");
    CONFIG_SIZES(fsdp_model_add_unit(m, "u", config, &u), fsdp_unit_config, FSDP_UNIT_CONFIG_INIT, "fsdp_unit_config");
    static const struct {
        size_t offset;
        const char *field;
    } dtypes[] = {{offsetof(fsdp_unit_config, compute_dtype), "compute_dtype"},
                  {offsetof(fsdp_unit_config, grad_dtype), "grad_dtype"},
                  {offsetof(fsdp_unit_config, reduce_dtype), "reduce_dtype"},
                  {offsetof(fsdp_unit_config, master_dtype), "master_dtype"}};
    for (int i = 0; i < 4; i++) {
        static const int bad[] = {0, 4, -1};
        for (int k = 0; k < 3; k++) {
            char said[64];
            fsdp_unit_config wrong = FSDP_UNIT_CONFIG_INIT;
            memcpy((char *)&wrong + dtypes[i].offset, &bad[k], sizeof bad[k]);
            snprintf(said, sizeof said, "unit u: %s is %d, expected FP32, BF16 or FP16", dtypes[i].field, bad[k]);
            ARG(fsdp_model_add_unit(m, "u", &wrong, &u), said);
        }
    }
    c.reshard = (fsdp_reshard)2;
    ARG(fsdp_model_add_unit(m, "u", &c, &u), "unit u: reshard 2 does not exist");
    c.reshard = FSDP_RESHARD_NEVER, c.place = (fsdp_place)1;
    REFUSED(fsdp_model_add_unit(m, "u", &c, &u), FSDP_ERR_UNSUPPORTED, "unit u: place 1 is not supported");
    assert_null(u);
    OK(fsdp_model_add_unit(m, "u", NULL, &first));
    ARG(fsdp_model_add_unit(m, "u", NULL, &u), "unit u: the model has a unit of that name: names are unique");
    assert_null(u);
    OK(fsdp_model_destroy(m));
}

static void gradients_that_are_kept_have_two_conditions(void **state)
{
    (void)state;
    fsdp_model *m;
    fsdp_unit *u = NULL;
    fsdp_model_config mc = FSDP_MODEL_CONFIG_INIT;
    fsdp_unit_config c = FSDP_UNIT_CONFIG_INIT;
    mc.accumulation = FSDP_ACCUMULATE_KEEP_FULL;
    OK(fsdp_model_create(ctx(), &mc, &m));
    c.grad_dtype = FSDP_DTYPE_BF16;
    REFUSED(fsdp_model_add_unit(m, "u", &c, &u), FSDP_ERR_UNSUPPORTED,
            "unit u: gradients are kept over micro-steps, so they are summed in grad_dtype bf16");
    c.grad_dtype = FSDP_DTYPE_FP32, c.zero_grads = false;
    REFUSED(fsdp_model_add_unit(m, "u", &c, &u), FSDP_ERR_UNSUPPORTED, "zero_grads must be on");
    assert_null(u);
    OK(fsdp_model_destroy(m));
}

static void parameters(void **state)
{
    (void)state;
    fsdp_model *m;
    fsdp_unit *u, *v;
    fsdp_param *p = NULL;
    uint64_t dims[FSDP_MAX_DIMS] = {3, 4, 1, 1, 1, 1, 1, 1};
    fsdp_param_config c = FSDP_PARAM_CONFIG_INIT;
    OK(fsdp_model_create(ctx(), NULL, &m));
    OK(fsdp_model_add_unit(m, "u", NULL, &u));
    OK(fsdp_model_add_unit(m, "v", NULL, &v));
    ARG(fsdp_unit_add_param(NULL, "w", 2, dims, &c, &p), "unit is NULL");
    ARG(fsdp_unit_add_param(u, NULL, 2, dims, &c, &p), "name is NULL");
    ARG(fsdp_unit_add_param(u, "", 2, dims, &c, &p), "unit u: a parameter's name is empty");
    ARG(fsdp_unit_add_param(u, "w", 2, NULL, &c, &p), "parameter w: dims is NULL");
    ARG(fsdp_unit_add_param(u, "w", 9, dims, &c, &p), "parameter w: 9 extents, at most 8");
    ARG(fsdp_unit_add_param(u, "w", UINT32_MAX, dims, &c, &p), "parameter w: 4294967295 extents");
    CONFIG_SIZES(fsdp_unit_add_param(u, "w", 2, dims, config, &p), fsdp_param_config, FSDP_PARAM_CONFIG_INIT,
                 "fsdp_param_config");
    c.compute_dtype = (fsdp_dtype)4;
    ARG(fsdp_unit_add_param(u, "w", 2, dims, &c, &p),
        "parameter w: compute_dtype is 4, expected INHERIT, FP32, BF16 or FP16");
    c.compute_dtype = FSDP_DTYPE_INHERIT;
    static const float scales[] = {-1.0f, 1e31f, __builtin_inff(), __builtin_nanf("")};
    for (int i = 0; i < 4; i++) {
        c.lr_scale = scales[i];
        ARG(fsdp_unit_add_param(u, "w", 2, dims, &c, &p), "parameter w: lr_scale ");
    }
    static const uint64_t huge[][4] = {{((uint64_t)1 << 48) + 1, 1, 1, 1},
                                       {UINT64_MAX, 1, 1, 1},
                                       {(uint64_t)1 << 32, (uint64_t)1 << 32, 1, 1},
                                       {1u << 16, 1u << 16, 1u << 16, 2},
                                       {(uint64_t)1 << 63, 2, 1, 1}};
    for (size_t i = 0; i < sizeof huge / sizeof *huge; i++)
        ARG(fsdp_unit_add_param(u, "w", 4, huge[i], NULL, &p), "more than 2^48 elements with dims[");
    ARG(fsdp_unit_add_param(u, "w", 4, huge[3], NULL, &p), "more than 2^48 elements with dims[3], which is 2");
    assert_null(p);
    /* One extent of 0 makes it empty, whatever the others are and wherever it stands. */
    static const uint64_t empty[][3] = {{0, UINT64_MAX, 2}, {UINT64_MAX, 0, 2}, {UINT64_MAX, UINT64_MAX, 0}};
    static const char *const names[] = {"e0", "e1", "e2"};
    for (size_t i = 0; i < sizeof empty / sizeof *empty; i++) {
        OK(fsdp_unit_add_param(u, names[i], 3, empty[i], NULL, &p));
        assert_int_equal(fsdp_param_elems(p), 0);
    }
    p = NULL;
    OK(fsdp_unit_add_param(u, "w", 2, dims, NULL, NULL));
    ARG(fsdp_unit_add_param(u, "w", 2, dims, NULL, &p), "parameter w exists in unit u: names are unique in the model");
    ARG(fsdp_unit_add_param(v, "w", 2, dims, NULL, &p), "parameter w exists in unit u");
    assert_null(p);
    /* A unit that got nothing but refusals has no parameters, and that is what seal says. */
    ARG(fsdp_model_seal(m), "unit v has no parameters: add one, or leave the unit out");
    OK(fsdp_model_destroy(m));
}

/* Odd shapes are shapes: nothing, scalars, one element of many dims, a prime, and the most there may be. */
static void odd_shapes_are_fine(void **state)
{
    (void)state;
    rank o = rank_default();
    uint64_t zero[2] = {5, 0}, ones[FSDP_MAX_DIMS] = {1, 1, 1, 1, 1, 1, 1, 1}, prime = 1009;
    fsdp_unit *u, *empty;
    fsdp_param *p[4];
    OK(open_context(&o));
    OK(fsdp_model_create(o.ctx, NULL, &o.model));
    OK(fsdp_model_add_unit(o.model, "odd", NULL, &u));
    OK(fsdp_model_add_unit(o.model, "empty", NULL, &empty));
    OK(fsdp_unit_add_param(u, "zero", 2, zero, NULL, &p[0]));
    OK(fsdp_unit_add_param(u, "scalar", 0, NULL, NULL, &p[1]));
    OK(fsdp_unit_add_param(u, "ones", FSDP_MAX_DIMS, ones, NULL, &p[2]));
    OK(fsdp_unit_add_param(u, "prime", 1, &prime, NULL, &p[3]));
    OK(fsdp_unit_add_param(empty, "nothing", 2, zero, NULL, NULL));
    static const uint64_t elems[] = {0, 1, 1, 1009};
    for (int i = 0; i < 4; i++) assert_int_equal(fsdp_param_elems(p[i]), elems[i]);
    OK(fsdp_model_seal(o.model));
    float one = 3.5f, back = 0.0f;
    OK(fsdp_param_set(p[1], &one, FSDP_DTYPE_FP32));
    OK(fsdp_param_get(p[1], FSDP_VALUE_MASTER, &back, FSDP_DTYPE_FP32));
    assert_memory_equal(&one, &back, sizeof one);
    OK(fsdp_param_set(p[0], NULL, FSDP_DTYPE_FP32));
    OK(fsdp_param_get(p[0], FSDP_VALUE_MASTER, NULL, FSDP_DTYPE_FP32));
    OK(fsdp_model_destroy(o.model));
    OK(fsdp_stream_release(o.s));
    OK(fsdp_context_destroy(o.ctx));
}

/* Parameters, units and models are bounded, so that no byte count wraps: on a machine that has the room on paper. */
static void a_model_too_large_for_any_machine_is_refused(void **state)
{
    (void)state;
    fsdp_config config = FSDP_CONFIG_INIT;
    fsdp_context *sim;
    fsdp_model *m;
    fsdp_memory memory = FSDP_MEMORY_INIT;
    uint64_t most = (uint64_t)1 << 48;
    char name[32];
    config.backend = fsdp_sim_backend();
    OK(fsdp_context_create(&config, &sim));
    OK(fsdp_model_create(sim, NULL, &m));
    for (int i = 0; i < 65; i++) {
        fsdp_unit *u;
        snprintf(name, sizeof name, "u%d", i);
        OK(fsdp_model_add_unit(m, name, NULL, &u));
        OK(fsdp_unit_add_param(u, name, 1, &most, NULL, NULL));
        if (i == 0) OK(fsdp_model_predict(m, &memory));
    }
    ARG(fsdp_model_predict(m, &memory), "model model: more than 2^54 elements");
    ARG(fsdp_model_seal(m), "more than 2^54 elements");
    OK(fsdp_model_destroy(m));
    OK(fsdp_context_destroy(sim));
}

static void a_unit_too_large_is_refused(void **state)
{
    (void)state;
    fsdp_memory memory = FSDP_MEMORY_INIT;
    uint64_t most = (uint64_t)1 << 48;
    for (int frozen = 0; frozen < 2; frozen++) { /* in one group, or in two */
        fsdp_model *m;
        fsdp_unit *u;
        fsdp_param_config second = FSDP_PARAM_CONFIG_INIT;
        second.frozen = frozen;
        OK(fsdp_model_create(ctx(), NULL, &m));
        OK(fsdp_model_add_unit(m, "u", NULL, &u));
        OK(fsdp_unit_add_param(u, "w0", 1, &most, NULL, NULL));
        OK(fsdp_model_predict(m, &memory));
        OK(fsdp_unit_add_param(u, "w1", 1, &most, &second, NULL));
        ARG(fsdp_model_predict(m, &memory), "unit u: more than 2^48 elements with parameter w1: split the unit");
        OK(fsdp_model_destroy(m));
    }
}

static void passes(void **state)
{
    (void)state;
    fsdp_model *m;
    fsdp_unit *u;
    int32_t pass = 77;
    OK(fsdp_model_create(ctx(), NULL, &m));
    OK(fsdp_model_add_unit(m, "u", NULL, &u));
    fsdp_visit good[2] = {{u, FSDP_USE_FORWARD, 0}, {u, FSDP_USE_BACKWARD, 1}}, bad[2];
    ARG(fsdp_model_add_pass(NULL, "p", 2, good, &pass), "is NULL");
    ARG(fsdp_model_add_pass(m, NULL, 2, good, &pass), "name is NULL");
    ARG(fsdp_model_add_pass(m, "p", 2, NULL, &pass), "visits is NULL");
    ARG(fsdp_model_add_pass(m, "p", 2, good, NULL), "out_pass is NULL");
    ARG(fsdp_model_add_pass(m, "p", 0, good, &pass), "pass p: 0 visits, expected 1 to 2^24");
    ARG(fsdp_model_add_pass(m, "p", UINT32_MAX, good, &pass), "pass p: 4294967295 visits");
    memcpy(bad, good, sizeof bad), bad[1].unit = NULL;
    ARG(fsdp_model_add_pass(m, "p", 2, bad, &pass), "pass p: visit 1 has no unit");
    memcpy(bad, good, sizeof bad), bad[1].unit = program.unit[2];
    ARG(fsdp_model_add_pass(m, "p", 2, bad, &pass),
        "pass p: visit 1 is of unit h.2, which belongs to another model, model");
    memcpy(bad, good, sizeof bad), bad[0].use = (fsdp_use)4;
    ARG(fsdp_model_add_pass(m, "p", 2, bad, &pass), "pass p: visit 0 of unit u has use 4, which does not exist");
    memcpy(bad, good, sizeof bad), bad[0].until = 2;
    ARG(fsdp_model_add_pass(m, "p", 2, bad, &pass), "pass p: the window of visit 0 (unit u) reaches to visit 2 of 2");
    ARG(fsdp_model_add_pass(m, "", 2, good, &pass), "fsdp_model_add_pass: the name is empty");
    ARG(fsdp_model_add_pass(m, "TRAIN", 2, good, &pass), "pass TRAIN exists in model model: names are unique");
    assert_int_equal(pass, 77);
    OK(fsdp_model_add_pass(m, "p", 2, good, &pass));
    assert_int_equal(pass, 2);
    ARG(fsdp_model_add_pass(m, "p", 2, good, &pass), "pass p exists");
    OK(fsdp_model_destroy(m));
}

static int fill_nothing(void *arg, const fsdp_param_range *range, void *dst)
{
    (void)range, (void)dst;
    return *(int *)arg;
}

static void values_and_bytes(void **state)
{
    (void)state;
    float v[280];
    uint64_t hash;
    int gives_up = 1;
    fsdp_param *p = program.param[1][0];
    fsdp_memory memory = FSDP_MEMORY_INIT;
    const fsdp_dtype bad = (fsdp_dtype)7, fp32 = FSDP_DTYPE_FP32;
    ARG(fsdp_model_fill(NULL, fill_nothing, NULL, fp32), "is NULL");
    ARG(fsdp_model_fill(program.model, NULL, NULL, fp32), "fn is NULL");
    ARG(fsdp_model_fill(program.model, fill_nothing, NULL, bad), "7 is no dtype");
    ARG(fsdp_model_fill(program.model, fill_nothing, &gives_up, fp32),
        "your function gave up at element 0 of parameter h.0.w: it returned 1");
    ARG(fsdp_param_set(NULL, v, fp32), "param is NULL");
    ARG(fsdp_param_set(p, NULL, fp32), "src is NULL");
    ARG(fsdp_param_set(p, v, FSDP_DTYPE_INHERIT), "0 is no dtype");
    ARG(fsdp_param_get(NULL, FSDP_VALUE_MASTER, v, fp32), "param is NULL");
    ARG(fsdp_param_get(p, (fsdp_value)5, v, fp32), "value 5 does not exist");
    ARG(fsdp_param_get(p, (fsdp_value)-1, v, fp32), "value -1 does not exist");
    ARG(fsdp_param_get(p, FSDP_VALUE_MASTER, v, bad), "7 is no dtype");
    ARG(fsdp_model_hash(NULL, &hash), "is NULL");
    ARG(fsdp_model_hash(program.model, NULL), "out_hash is NULL");
    ARG(fsdp_model_predict(NULL, &memory), "is NULL");
    ARG(fsdp_model_memory(NULL, &memory), "model is NULL");
    ARG(fsdp_model_memory(program.model, NULL), "out_memory is NULL");
    RESULT_SIZES(fsdp_model_memory(program.model, out), fsdp_memory, FSDP_MEMORY_INIT, "fsdp_memory");
    ARG(fsdp_model_seal(NULL), "is NULL");
}

static void what_a_parameter_does_not_have(void **state)
{
    (void)state;
    rank o = rank_default();
    float v[280];
    o.recipe.no_adamw = true;
    o.recipe.param[2][0].frozen = true;
    OK(open_all(&o));
    fsdp_memory memory = FSDP_MEMORY_INIT;
    REFUSED(fsdp_param_get(o.param[2][0], FSDP_VALUE_GRADIENT, v, FSDP_DTYPE_FP32), FSDP_ERR_UNSUPPORTED,
            "parameter h.2.w is frozen");
    REFUSED(fsdp_param_get(o.param[1][0], FSDP_VALUE_MOMENT_1, v, FSDP_DTYPE_FP32), FSDP_ERR_UNSUPPORTED,
            "model model has no optimizer, so parameter h.1.w has no moments");
    REFUSED(fsdp_model_predict(o.model, &memory), FSDP_ERR_STATE, "is sealed: ask fsdp_model_memory");
    close_all(&o);
    assert_string_equal(o.failed, "");
}

/* ---- step.h, optim.h ---- */

static void hooks(void **state)
{
    (void)state;
    fsdp_view view = FSDP_VIEW_INIT;
    fsdp_pass_args pass = FSDP_PASS_ARGS_INIT;
    ARG(fsdp_pass_begin(NULL, &pass, program.s), "is NULL");
    ARG(fsdp_pass_begin(program.model, NULL, program.s), "args is NULL");
    ARG(fsdp_pass_begin(program.model, &pass, NULL), "fsdp_pass_begin: stream is NULL");
    ARG(fsdp_pass_begin(program.model, &pass, fsdp_context_lane(ctx(), FSDP_LANE_GATHER)),
        "fsdp_pass_begin: gather is a lane of the library: give it a stream of your own");
    CONFIG_SIZES(fsdp_pass_begin(program.model, config, program.s), fsdp_pass_args, FSDP_PASS_ARGS_INIT,
                 "fsdp_pass_args");
    static const struct {
        fsdp_pass_args args;
        const char *said;
    } bad[] = {{{sizeof pass, -1, 0, 1, 0}, "pass -1, the model has 0 to 1"},
               {{sizeof pass, 2, 0, 1, 0}, "pass 2, the model has 0 to 1"},
               {{sizeof pass, 0, 0, 1, 2}, "next 2, the model has 0 to 1, or FSDP_PASS_NONE"},
               {{sizeof pass, 0, 0, 1, -2}, "next -2"},
               {{sizeof pass, 0, 0, 0, 0}, "micro-step 0 of 0"},
               {{sizeof pass, 0, 1, 1, 0}, "micro-step 1 of 1"},
               {{sizeof pass, 0, 0, 2, 0},
                "2 micro-steps in a step: set fsdp_model_config.accumulation to "
                "FSDP_ACCUMULATE_REDUCE_EACH or FSDP_ACCUMULATE_KEEP_FULL"}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        ARG(fsdp_pass_begin(program.model, &bad[i].args, program.s), bad[i].said);
    ARG(fsdp_pass_end(NULL, program.s), "is NULL");
    ARG(fsdp_pass_end(program.model, NULL), "stream is NULL");
    ARG(fsdp_pass_abort(NULL, program.s), "model is NULL");
    ARG(fsdp_pass_abort(program.model, NULL), "stream is NULL");

    OK(fsdp_pass_begin(program.model, &pass, program.s));
    ARG(fsdp_forward_begin(NULL, program.s, &view), "fsdp_forward_begin: unit is NULL");
    ARG(fsdp_forward_begin(program.unit[0], NULL, &view), "stream is NULL");
    ARG(fsdp_forward_begin(program.unit[0], program.s, NULL), "unit h.0: out_view is NULL");
    ARG(fsdp_backward_begin(NULL, program.s, &view), "fsdp_backward_begin: unit is NULL");
    ARG(fsdp_backward_begin(program.unit[0], NULL, &view), "stream is NULL");
    ARG(fsdp_backward_begin(program.unit[0], program.s, NULL), "unit h.0: out_view is NULL");
    view.size = 0;
    ARG(fsdp_forward_begin(program.unit[0], program.s, &view), "unit h.0: fsdp_view.size is 0");
    ARG(fsdp_backward_begin(program.unit[0], program.s, &view), "start from FSDP_VIEW_INIT");
    ARG(fsdp_forward_end(NULL, program.s), "unit is NULL");
    ARG(fsdp_forward_end(program.unit[0], NULL), "stream is NULL");
    ARG(fsdp_backward_end(NULL, program.s), "unit is NULL");
    ARG(fsdp_backward_end(program.unit[0], NULL), "stream is NULL");
    ARG(fsdp_unit_use(NULL, program.s), "unit is NULL");
    ARG(fsdp_unit_use(program.unit[0], NULL), "stream is NULL");
    OK(fsdp_pass_abort(program.model, program.s));
}

/* Results may be of a later version's size: what is ours is filled in, the rest stays. */
static void a_view_of_a_later_version_is_filled_in(void **state)
{
    (void)state;
    struct {
        fsdp_view view;
        uint64_t behind;
    } later = {FSDP_VIEW_INIT, 7};
    const fsdp_pass_args pass = FSDP_PASS_ARGS_INIT;
    OK(fsdp_pass_begin(program.model, &pass, program.s));
    later.view.size = sizeof later.view - 1;
    ARG(fsdp_forward_begin(program.unit[0], program.s, &later.view), "fsdp_view.size is 31, expected 32");
    later.view.size = SIZE_MAX;
    ARG(fsdp_backward_begin(program.unit[0], program.s, &later.view), "fsdp_view.size is ");
    later.view.size = sizeof later;
    OK(fsdp_forward_begin(program.unit[0], program.s, &later.view));
    assert_true(later.view.n_params > 0 && later.view.params != NULL && later.view.grads == NULL);
    OK(fsdp_forward_end(program.unit[0], program.s));
    OK(fsdp_backward_begin(program.unit[0], program.s, &later.view));
    assert_true(later.view.n_params > 0 && later.view.params != NULL && later.view.grads != NULL);
    OK(fsdp_backward_end(program.unit[0], program.s));
    assert_int_equal(later.view.size, sizeof later);
    assert_int_equal(later.behind, 7);
    OK(fsdp_pass_abort(program.model, program.s));
}

static void updates_and_reports(void **state)
{
    (void)state;
    const fsdp_shard_segment *segments;
    uint32_t n;
    float value = 0.0f;
    ARG(fsdp_update_begin(NULL, program.s), "is NULL");
    ARG(fsdp_update_begin(program.model, NULL), "stream is NULL");
    ARG(fsdp_update_unit(NULL, program.s), "unit is NULL");
    ARG(fsdp_update_unit(program.unit[0], NULL), "stream is NULL");
    ARG(fsdp_update_end(NULL, program.s), "is NULL");
    ARG(fsdp_update_end(program.model, NULL), "stream is NULL");
    ARG(fsdp_unit_shard(NULL, &segments, &n), "unit is NULL");
    ARG(fsdp_unit_shard(program.unit[0], NULL, &n), "out_segments is NULL");
    ARG(fsdp_unit_shard(program.unit[0], &segments, NULL), "out_n is NULL");
    ARG(fsdp_step_sum(NULL, 0, &value, program.s), "is NULL");
    ARG(fsdp_step_sum(program.model, 0, NULL, program.s), "device_value is NULL");
    ARG(fsdp_step_sum(program.model, 16, &value, program.s), "index 16, expected 0 to 15");
    ARG(fsdp_step_sum(program.model, 0, &value, NULL), "stream is NULL");
    fsdp_step_report report = FSDP_STEP_REPORT_INIT;
    ARG(fsdp_step_report_get(NULL, 1, 1, &report), "is NULL");
    ARG(fsdp_step_report_get(program.model, 1, 1, NULL), "out_report is NULL");
    ARG(fsdp_step_report_get(program.model, 0, 1, &report), "there is no report of step 0");
    ARG(fsdp_step_report_get(program.model, 1, 1, &report), "there is no report of step 1: 0 updates so far");
    for (int i = 0; i < 9; i++) OK(train_step(&program));
    ARG(fsdp_step_report_get(program.model, 1, second_ns, &report),
        "there is no report of step 1: 9 updates so far; the last 8 are kept");
    ARG(fsdp_step_report_get(program.model, 10, second_ns, &report), "there is no report of step 10");
    OK(fsdp_step_report_get(program.model, 2, 10 * second_ns, &report));
    assert_int_equal(report.step, 2);
    RESULT_SIZES(fsdp_step_report_get(program.model, 9, second_ns, out), fsdp_step_report, FSDP_STEP_REPORT_INIT,
                 "fsdp_step_report");
    fsdp_model_stats stats = FSDP_MODEL_STATS_INIT;
    ARG(fsdp_model_stats_get(NULL, &stats), "model is NULL");
    ARG(fsdp_model_stats_get(program.model, NULL), "out_stats is NULL");
    RESULT_SIZES(fsdp_model_stats_get(program.model, out), fsdp_model_stats, FSDP_MODEL_STATS_INIT, "fsdp_model_stats");
}

static void optimizers(void **state)
{
    (void)state;
    fsdp_model *m;
    fsdp_adamw *opt = NULL;
    OK(fsdp_model_create(ctx(), NULL, &m));
    ARG(fsdp_adamw_create(NULL, NULL, &opt), "is NULL");
    ARG(fsdp_adamw_create(m, NULL, NULL), "out_opt is NULL");
    CONFIG_SIZES(fsdp_adamw_create(m, config, &opt), fsdp_adamw_config, FSDP_ADAMW_CONFIG_INIT, "fsdp_adamw_config");
    static const struct {
        fsdp_adamw_config config;
        const char *said;
    } bad[] = {{{sizeof bad->config, 1.0f, 0.9f, 1e-8f, 0.0f}, "beta1 is 1"},
               {{sizeof bad->config, -0.1f, 0.9f, 1e-8f, 0.0f}, "beta1 is -0.1"},
               {{sizeof bad->config, 0.9f, 1.5f, 1e-8f, 0.0f}, "beta2 is 1.5"},
               {{sizeof bad->config, 0.9f, 0.9f, 0.0f, 0.0f}, "eps is 0, expected more than 0"},
               {{sizeof bad->config, 0.9f, 0.9f, 1e-8f, -1.0f}, "weight_decay is -1, expected 0 or more"}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) ARG(fsdp_adamw_create(m, &bad[i].config, &opt), bad[i].said);
    fsdp_adamw_config nan_config = FSDP_ADAMW_CONFIG_INIT;
    nan_config.beta1 = __builtin_nanf("");
    ARG(fsdp_adamw_create(m, &nan_config, &opt), "beta1 is");
    assert_null(opt);
    OK(fsdp_model_destroy(m));

    fsdp_adamw_args args = FSDP_ADAMW_ARGS_INIT;
    ARG(fsdp_adamw_step(NULL, &args, program.s), "opt is NULL");
    ARG(fsdp_adamw_step(program.opt, NULL, program.s), "args is NULL");
    OK(micro_step(&program, 0, 1, NULL)); /* now an update is due, and its arguments are looked at */
    ARG(fsdp_adamw_step(program.opt, &args, NULL), "stream is NULL");
    CONFIG_SIZES(fsdp_adamw_step(program.opt, config, program.s), fsdp_adamw_args, FSDP_ADAMW_ARGS_INIT,
                 "fsdp_adamw_args");
    static const float lrs[] = {-1.0f, 1e31f, __builtin_nanf("")};
    for (int i = 0; i < 3; i++) {
        args = (fsdp_adamw_args)FSDP_ADAMW_ARGS_INIT, args.lr = lrs[i];
        ARG(fsdp_adamw_step(program.opt, &args, program.s), ", expected 0 to below 1e30");
        args = (fsdp_adamw_args)FSDP_ADAMW_ARGS_INIT, args.max_norm = lrs[i];
        ARG(fsdp_adamw_step(program.opt, &args, program.s), "max_norm is ");
        args = (fsdp_adamw_args)FSDP_ADAMW_ARGS_INIT, args.grad_scale = i == 0 ? -2e30 : (double)lrs[i];
        ARG(fsdp_adamw_step(program.opt, &args, program.s), ", expected between -1e30 and 1e30");
    }
    OK(update(&program));
}

/* ---- And the program goes on ---- */

static void after_all_of_it_the_program_comes_out_the_same(void **state)
{
    static void (*const all[])(void **) = {model_configs,
                                           units,
                                           gradients_that_are_kept_have_two_conditions,
                                           parameters,
                                           a_unit_too_large_is_refused,
                                           passes,
                                           values_and_bytes,
                                           hooks};
    assert_program_unharmed(state, all, sizeof all / sizeof *all);
}

int run_model_argument_errors(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, open_program, close_program)
    const struct CMUnitTest tests[] = {
        TEST(model_configs),
        TEST(units),
        TEST(gradients_that_are_kept_have_two_conditions),
        TEST(parameters),
        TEST(odd_shapes_are_fine),
        TEST(a_unit_too_large_is_refused),
        TEST(a_model_too_large_for_any_machine_is_refused),
        TEST(passes),
        TEST(values_and_bytes),
        TEST(what_a_parameter_does_not_have),
        TEST(hooks),
        TEST(a_view_of_a_later_version_is_filled_in),
        TEST(updates_and_reports),
        TEST(optimizers),
        TEST(after_all_of_it_the_program_comes_out_the_same),
    };
    return cmocka_run_group_tests_name("wrong arguments of sharding", tests, NULL, NULL);
}
