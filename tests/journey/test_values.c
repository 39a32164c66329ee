/* SPDX-License-Identifier: MIT */
/* Values in and out: fill, set, get and hash see the same numbers on every world, and training goes on from what was set. */
#include "toy_assert.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lib/convert.h"

static toy_result results[TOY_WORLD], other[TOY_WORLD];

static int free_results(void **unused)
{
    (void)unused;
    toy_free(results);
    toy_free(other);
    return 0;
}

/* ---- Fill ---- */

enum { BIG = 700001, MAX_RANGES = 128 };

/* What each rank was asked for. */
typedef struct asked {
    struct {
        uint32_t param; /* number in registration order */
        uint64_t begin, count;
    } range[MAX_RANGES];
    uint32_t n;
} asked;

static const uint64_t sizes[] = {3, BIG, 1, 0, 5000, 129}; /* of the parameters of two units */

static int note_range(void *arg, const fsdp_param_range *range, void *dst)
{
    asked *a = arg;
    uint32_t number = (uint32_t)(fsdp_param_name(range->param)[0] - 'a');
    if (a->n == MAX_RANGES) return 1;
    a->range[a->n].param = number;
    a->range[a->n].begin = range->begin;
    a->range[a->n++].count = range->count;
    for (uint64_t i = 0; i < range->count; i++) ((uint16_t *)dst)[i] = fsdp__to_bf16((float)((range->begin + i) % 97));
    return 0;
}

static fsdp_status fill_a_model(toy *t)
{
    asked *a = (asked *)t->arg + t->rank;
    fsdp_model *model;
    fsdp_unit *units[2];
    TOY_TRY(fsdp_model_create(t->ctx, NULL, &model));
    for (int u = 0; u < 2; u++) TOY_TRY(fsdp_model_add_unit(model, u ? "second" : "first", NULL, &units[u]));
    /* registered unit by unit, which is the order in which they come */
    for (uint32_t i = 0; i < 6; i++) {
        const char name[] = {(char)('a' + i), '\0'};
        TOY_TRY(fsdp_unit_add_param(units[i / 3], name, 1, &sizes[i], NULL, NULL));
    }
    TOY_TRY(fsdp_model_seal(model));
    TOY_TRY(fsdp_model_fill(model, note_range, a, FSDP_DTYPE_BF16));
    float *values = malloc(BIG * sizeof *values);
    TOY_CHECK(values != NULL);
    for (uint32_t i = 0; i < 6; i++) {
        const char name[] = {(char)('a' + i), '\0'};
        TOY_TRY(fsdp_param_get(fsdp_model_find_param(model, name), FSDP_VALUE_MASTER, values, FSDP_DTYPE_FP32));
        for (uint64_t k = 0; k < sizes[i]; k++) TOY_CHECK(values[k] == (float)(k % 97));
    }
    free(values);
    TOY_TRY(fsdp_model_destroy(model));
    return FSDP_OK;
}

static void fill_asks_each_rank_for_its_own_ranges_in_order(void **unused)
{
    (void)unused;
    asked *all = processes_shared(TOY_WORLD * sizeof *all);
    for (uint32_t world = 1; world <= 7; world += world < 4 ? 1 : 3) {
        toy_config config = toy_config_default();
        config.world = world;
        memset(all, 0, TOY_WORLD * sizeof *all);
        TOY_CASE("world %u:", world);
        toy_assert_run(&config, fill_a_model, all, results);
        uint64_t next[6] = {
            0}; /* ranks have ascending shards, so rank by rank each parameter is asked for from end to end */
        for (uint32_t r = 0; r < world; r++) {
            uint32_t param = 0;
            for (uint32_t i = 0; i < all[r].n; i++) {
                assert_in_range(all[r].range[i].param, param, 5);
                param = all[r].range[i].param;
                assert_int_equal(all[r].range[i].begin, next[param]);
                assert_in_range(all[r].range[i].count, 1, (1 << 20) / sizeof(float));
                next[param] += all[r].range[i].count;
            }
        }
        assert_memory_equal(next, sizes, sizeof sizes);
    }
    processes_unshare(all, TOY_WORLD * sizeof *all);
}

/* ---- Set and get ---- */

static const fsdp_dtype dtypes[] = {FSDP_DTYPE_FP32, FSDP_DTYPE_BF16, FSDP_DTYPE_FP16};

/* Element i of the k-th pattern: small, large, negative and tiny. */
static float pattern(uint64_t i, uint32_t k)
{
    return ((float)((i * 37 + k * 11) % 1009) - 500.0f) * (k % 2 ? 0.013f : 1.7f);
}

static float through(float value, fsdp_dtype dtype)
{
    unsigned char bytes[4];
    fsdp__convert(bytes, dtype, &value, FSDP_DTYPE_FP32, 1);
    fsdp__convert(&value, FSDP_DTYPE_FP32, bytes, dtype, 1);
    return value;
}

/* Set in `in`, read in `out`: the value has gone through in, master (and compute), out. */
static fsdp_status check_round_trip(toy *t, const toy_unit *unit, const toy_param *param, fsdp_dtype in, fsdp_dtype out)
{
    static _Thread_local unsigned char set[4 * 6000], got[4 * 6000];
    fsdp_param *handle = fsdp_model_find_param(t->model, param->name);
    TOY_CHECK(param->elems <= 6000);
    uint32_t k = (uint32_t)in * 3 + (uint32_t)out;
    for (uint64_t i = 0; i < param->elems; i++) {
        float value = pattern(i, k);
        fsdp__store_floats(set + i * fsdp_dtype_bytes(in), &value, 1, in);
    }
    TOY_TRY(fsdp_param_set(handle, set, in));
    for (fsdp_value value = FSDP_VALUE_MASTER; value <= FSDP_VALUE_COMPUTE; value++) {
        memset(got, 0xee, sizeof got);
        bool wants = t->rank != 1; /* a rank need not take the values */
        TOY_TRY(fsdp_param_get(handle, value, wants ? got : NULL, out));
        for (uint64_t i = 0; i < param->elems && wants; i++) {
            float expected = through(through(pattern(i, k), in), unit->master), is;
            if (value == FSDP_VALUE_COMPUTE) expected = through(expected, param->compute);
            expected = through(expected, out);
            fsdp__load_floats(&is, got + i * fsdp_dtype_bytes(out), 1, out);
            TOY_CHECK(memcmp(&is, &expected, sizeof is) == 0);
        }
        for (size_t i = param->elems * fsdp_dtype_bytes(out); i < sizeof got; i++) TOY_CHECK(got[i] == 0xee);
    }
    return FSDP_OK;
}

static fsdp_status set_and_get_everything(toy *t)
{
    uint32_t turn = 0;
    for (uint32_t u = 0; u < t->shape.n_units; u++) {
        for (uint32_t i = 0; i < t->shape.unit[u].n_params; i++, turn++) {
            fsdp_status status = check_round_trip(t, &t->shape.unit[u], &t->shape.unit[u].param[i], dtypes[turn % 3],
                                                  dtypes[turn / 3 % 3]);
            if (status != FSDP_OK) return status;
        }
    }
    return FSDP_OK;
}

static void what_is_set_can_be_read_in_every_type(void **unused)
{
    (void)unused;
    for (uint32_t world = 1; world <= 4; world++) {
        for (int master = 0; master < 3; master++) {
            if (TOY_REDUCED && (uint32_t)master != world % 3) continue;
            toy_config config = toy_config_default();
            config.world = world;
            config.shape.tied = world % 2;
            config.shape.mixed = true;
            config.shape.compute = dtypes[(master + (int)world) % 3];
            config.shape.master = dtypes[master];
            TOY_CASE("world %u, master %s:", world, fsdp_dtype_name(config.shape.master));
            toy_assert_run(&config, set_and_get_everything, NULL, results);
        }
    }
}

/* ---- Gradients and moments ---- */

enum { MOST_ELEMS = 1 << 15 };

/* Of rank 0; in shared memory. */
typedef struct columns {
    float gradient[MOST_ELEMS], moment_1[MOST_ELEMS], moment_2[MOST_ELEMS];
} columns;

static fsdp_status step_and_read(toy *t)
{
    columns *c = t->arg;
    float *out[3] = {NULL};
    for (int i = 0; i < 3; i++) TOY_CHECK((out[i] = calloc(t->result->n_master, sizeof(float))) != NULL);
    TOY_TRY(toy_step(t));
    TOY_TRY(toy_values(t, FSDP_VALUE_GRADIENT, out[0]));
    TOY_TRY(toy_values(t, FSDP_VALUE_MOMENT_1, out[1]));
    TOY_TRY(toy_values(t, FSDP_VALUE_MOMENT_2, out[2]));
    fsdp_param *frozen = fsdp_model_find_param(t->model, "h.0.shift");
    for (fsdp_value value = FSDP_VALUE_GRADIENT; value <= FSDP_VALUE_MOMENT_2; value++) {
        TOY_CHECK(fsdp_param_get(frozen, value, out[0], FSDP_DTYPE_FP32) == FSDP_ERR_UNSUPPORTED);
        TOY_CHECK(strstr(fsdp_last_error(), "h.0.shift") != NULL);
    }
    float *const home[] = {c->gradient, c->moment_1, c->moment_2};
    TOY_CHECK(t->result->n_master <= MOST_ELEMS);
    for (int i = 0; i < 3; i++) {
        if (t->rank == 0) memcpy(home[i], out[i], t->result->n_master * sizeof(float));
        free(out[i]);
    }
    return toy_finish(t);
}

static void gradients_and_moments_are_those_of_the_last_step(void **unused)
{
    (void)unused;
    columns *many = processes_shared(2 * sizeof *many), *one = many + 1;
    for (uint32_t world = 1; world <= 4; world += TOY_REDUCED ? 2 : 1) {
        toy_config config = toy_config_default();
        config.world = world;
        config.depth = 2;
        config.steps = 1;
        toy_assert_run(&config, step_and_read, many, results);
        config.world = 1;
        config.micro_steps = world;
        config.accumulation = FSDP_ACCUMULATE_REDUCE_EACH;
        toy_assert_run(&config, step_and_read, one, other);
        uint64_t n = results[0].n_master, n_zero = 0;
        assert_memory_equal(many->gradient, one->gradient, n * sizeof(float));
        for (uint64_t i = 0; i < n; i++) {
            float g = many->gradient[i], m = (1.0f - 0.9f) * g, v = (1.0f - 0.999f) * (g * g);
            assert_true(many->moment_1[i] == m && many->moment_2[i] == v);
            n_zero += g == 0.0f;
        }
        assert_in_range(n_zero, 1, n / 4); /* frozen parameters have none */
    }
    processes_unshare(many, 2 * sizeof *many);
}

/* ---- Hash ---- */

static fsdp_status hash_before_and_after_one_bit(toy *t)
{
    uint64_t *hashes = t->arg, before, after, back;
    float weight[TOY_WIDTH * TOY_WIDTH];
    fsdp_param *param = fsdp_model_find_param(t->model, "h.1.weight");
    TOY_CHECK(fsdp_param_elems(param) <= TOY_WIDTH * TOY_WIDTH);
    TOY_TRY(fsdp_model_hash(t->model, &before));
    TOY_TRY(fsdp_param_get(param, FSDP_VALUE_MASTER, weight, FSDP_DTYPE_FP32));
    uint64_t last = fsdp_param_elems(param) - 1;
    uint32_t bits = fsdp__float_bits(weight[last]) ^ 1;
    float kept = weight[last];
    weight[last] = fsdp__bits_float(bits);
    TOY_TRY(fsdp_param_set(param, weight, FSDP_DTYPE_FP32));
    TOY_TRY(fsdp_model_hash(t->model, &after));
    TOY_CHECK(after != before);
    if (t->rank == 0) hashes[1] = after;
    weight[last] = weight[0];
    weight[0] = kept; /* the same values in other places */
    TOY_TRY(fsdp_param_set(param, weight, FSDP_DTYPE_FP32));
    TOY_TRY(fsdp_model_hash(t->model, &after));
    TOY_CHECK(after != before && weight[0] != weight[last]);
    weight[0] = weight[last];
    weight[last] = kept;
    TOY_TRY(fsdp_param_set(param, weight, FSDP_DTYPE_FP32));
    TOY_TRY(fsdp_model_hash(t->model, &back));
    TOY_CHECK(back == before);
    if (t->rank == 0) hashes[0] = before;
    return FSDP_OK;
}

static void the_hash_is_of_values_and_names_not_of_ranks(void **unused)
{
    (void)unused;
    uint64_t first[2] = {0}, *hashes = processes_shared(sizeof first);
    for (uint32_t world = 1; world <= 4; world++) {
        toy_config config = toy_config_default();
        config.world = world;
        config.depth = world;
        toy_assert_run(&config, hash_before_and_after_one_bit, hashes, results);
        if (world == 1) memcpy(first, hashes, sizeof first);
        assert_memory_equal(hashes, first, sizeof first);
    }
    toy_config config = toy_config_default();
    config.shape.square = true; /* another shape */
    toy_assert_run(&config, hash_before_and_after_one_bit, hashes, results);
    assert_int_not_equal(hashes[0], first[0]);
    processes_unshare(hashes, sizeof first);
}

/* ---- Between steps ---- */

static fsdp_status set_between_steps(toy *t)
{
    static const char *const names[] = {"tied.table", "tied.gain", "h.0.weight", "h.0.shift", "h.3.scale"};
    while (t->n_updates < t->config->steps) {
        TOY_TRY(toy_step(t));
        float values[6000];
        fsdp_param *param = fsdp_model_find_param(t->model, names[t->n_updates % 5]);
        TOY_TRY(fsdp_param_get(param, FSDP_VALUE_MASTER, values, FSDP_DTYPE_FP32));
        for (uint64_t i = 0; i < fsdp_param_elems(param); i++) values[i] *= 0.75f;
        TOY_TRY(fsdp_param_set(param, values, FSDP_DTYPE_FP32));
    }
    return toy_finish(t);
}

/* What has been gathered ahead from the old values, held units included, must not be used. */
static void training_goes_on_from_what_was_set(void **unused)
{
    (void)unused;
    for (uint32_t k = 0; k < 8; k += TOY_REDUCED ? 3 : 1) {
        toy_config config = toy_config_default();
        config.shape.tied = true;
        config.steps = 7;
        config.micro_steps = 3;
        config.accumulation = FSDP_ACCUMULATE_REDUCE_EACH;
        if (k == 0) toy_assert_run(&config, set_between_steps, NULL, results);
        config.world = k % 2 ? 3 : 1;
        config.micro_steps = k % 2 ? 1 : 3;
        config.depth = k / 2;
        config.jitter_ns = k % 3 ? 0 : 50000;
        config.eval = k % 2 ? TOY_EVAL_SURPRISE : TOY_EVAL_NONE;
        config.pace = k % 4 == 1 ? TOY_HOOK_BY_HOOK : TOY_AHEAD;
        TOY_CASE("case %u:", k);
        toy_assert_run(&config, set_between_steps, NULL, other);
        assert_memory_equal(other[0].loss, results[0].loss, sizeof results[0].loss);
        assert_int_equal(other[0].hash, results[0].hash);
    }
}

/* ---- Ranks in different calls ---- */

static bool says(const char *part) { return strstr(fsdp_last_error(), part) != NULL; }

/* Each pair of calls that do not belong together: MISMATCH with both on every rank, and the next call that agrees works. */
static fsdp_status call_different_things(toy *t)
{
    bool odd = t->rank == t->config->world - 1;
    fsdp_model *model;
    fsdp_unit *unit;
    TOY_TRY(fsdp_model_create(t->ctx, NULL, &model));
    TOY_TRY(fsdp_model_add_unit(model, "unit", NULL, &unit));
    const uint64_t size = 1000;
    fsdp_param *param[2];
    for (int i = 0; i < 2; i++) TOY_TRY(fsdp_unit_add_param(unit, i ? "two" : "one", 1, &size, NULL, &param[i]));
    double sums[2] = {1.0, 2.0};
    float values[1000] = {-1.0f};

    TOY_CHECK((odd ? fsdp_model_seal(model) : fsdp_barrier_host(t->ctx)) == FSDP_ERR_MISMATCH);
    TOY_CHECK(says(": fsdp_barrier_host") && says(": fsdp_model_seal"));
    TOY_TRY(fsdp_model_seal(model));
    TOY_CHECK(fsdp_param_get(param[odd], FSDP_VALUE_MASTER, values, FSDP_DTYPE_FP32) == FSDP_ERR_MISMATCH);
    TOY_CHECK(says("one") && says("two") && values[0] == -1.0f);
    fsdp_value value = odd ? FSDP_VALUE_COMPUTE : FSDP_VALUE_MASTER;
    TOY_CHECK(fsdp_param_get(param[0], value, values, FSDP_DTYPE_FP32) == FSDP_ERR_MISMATCH);
    TOY_CHECK(says("fsdp_param_get of FSDP_VALUE_MASTER of parameter 0, one") && says("of FSDP_VALUE_COMPUTE of"));
    TOY_CHECK((odd ? fsdp_barrier_host(t->ctx) : fsdp_sum_host(t->ctx, sums, 1)) == FSDP_ERR_MISMATCH);
    TOY_CHECK(fsdp_sum_host(t->ctx, sums, odd ? 1 : 2) == FSDP_ERR_MISMATCH && sums[0] == 1.0);
    TOY_CHECK(fsdp_broadcast_host(t->ctx, values, 8, odd) == FSDP_ERR_MISMATCH);

    TOY_TRY(fsdp_context_check(t->ctx));
    TOY_TRY(fsdp_sum_host(t->ctx, sums, 2));
    TOY_CHECK(sums[0] == t->config->world && sums[1] == 2.0 * t->config->world);
    TOY_TRY(fsdp_param_get(param[1], FSDP_VALUE_MASTER, values, FSDP_DTYPE_FP32));
    TOY_CHECK(values[0] == 0.0f);
    return fsdp_model_destroy(model);
}

static void ranks_in_different_calls_are_told_both_and_go_on(void **unused)
{
    (void)unused;
    for (uint32_t world = 2; world <= 3; world++) {
        toy_config config = toy_config_default();
        config.world = world;
        TOY_CASE("world %u:", world);
        toy_assert_run(&config, call_different_things, NULL, results);
    }
}

int main(int n_args, char **args)
{
    toy_always_processes = n_args > 1 && strcmp(args[1], "processes") == 0;
    toy_always_staged = n_args > 1 && strcmp(args[1], "staged") == 0;
#define VALUES(name) cmocka_unit_test_setup_teardown(name, toy_deadline, free_results)
    const struct CMUnitTest tests[] = {
        VALUES(fill_asks_each_rank_for_its_own_ranges_in_order),
        VALUES(what_is_set_can_be_read_in_every_type),
        VALUES(gradients_and_moments_are_those_of_the_last_step),
        VALUES(the_hash_is_of_values_and_names_not_of_ranks),
        VALUES(training_goes_on_from_what_was_set),
        VALUES(ranks_in_different_calls_are_told_both_and_go_on),
    };
    return cmocka_run_group_tests_name("values", tests, NULL, NULL);
}
