/* SPDX-License-Identifier: MIT */
/* NCCL compares no two ranks' calls: two collectives of a size, swapped on one rank, exchange each other's bytes and nobody
 * hears of it. The order of each rank's calls rides in the step's sum: both ranks are told, by the step's report or by the
 * next step's hooks, and the step has changed nothing. Two processes on one GPU, which NCCL takes for two machines. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <string.h>

#include "fsdp/cuda.h"
#include "fsdp/fsdp.h"
#include "gpu_expect.h"
#include "gpu_ranks.h"

enum { NO_GPU = 77, WORLD = 2, UNITS = 3, ELEMS = 1000, STEPS = 3, RUN_S = 100, SHARD = 512 };
static const uint64_t second_ns = 1000000000;

typedef struct job {
    fsdp_launch launch;
    bool odd;         /* rank 1's last step is */
    bool polls;       /* found by the hooks of the next step, else by the report */
    bool reduce_comm; /* gathers and the step's sum are on two wires */
} job;

typedef struct actor {
    const job *j;
    uint32_t rank;
    fsdp_context *ctx;
    fsdp_stream *s;
    fsdp_model *model;
    fsdp_unit *unit[UNITS];
    fsdp_adamw *opt;
} actor;

static int fill_with_one(void *arg, const fsdp_param_range *range, void *dst)
{
    (void)arg;
    for (uint64_t i = 0; i < range->count; i++) ((float *)dst)[i] = 1.0f;
    return 0;
}

static bool open_model(actor *a)
{
    const uint64_t elems = ELEMS; /* of all units */
    fsdp_model_config config = FSDP_MODEL_CONFIG_INIT;
    config.depth =
        0; /* a prefetch that comes to nothing would be one gather more on the odd rank: that hangs, and is the
                         watchdog's to find */
    MUST(fsdp_model_create(a->ctx, &config, &a->model));
    for (int i = 0; i < UNITS; i++) {
        char name[16];
        fsdp_unit_config unit = FSDP_UNIT_CONFIG_INIT;
        unit.reshard = FSDP_RESHARD_AFTER_USE;
        snprintf(name, sizeof name, "h.%d", i);
        MUST(fsdp_model_add_unit(a->model, name, &unit, &a->unit[i]));
        MUST(fsdp_unit_add_param(a->unit[i], name, 1, &elems, NULL, NULL));
    }
    MUST(fsdp_adamw_create(a->model, NULL, &a->opt));
    MUST(fsdp_model_seal(a->model));
    MUST(fsdp_model_fill(a->model, fill_with_one, NULL, FSDP_DTYPE_FP32));
    return true;
}

static bool open_actor(actor *a)
{
    fsdp_launch launch = a->j->launch;
    launch.rank = launch.local_rank = a->rank;
    launch.world = launch.local_world = WORLD;
    fsdp_cuda_config cuda = FSDP_CUDA_CONFIG_INIT;
    cuda.launch = &launch;
    fsdp_config config = FSDP_CONFIG_INIT;
    config.backend = fsdp_cuda_backend();
    config.backend_config = &cuda;
    config.reduce_comm = a->j->reduce_comm;
    config.timeout_ns = 40 * second_ns;
    MUST(fsdp_context_create(&config, &a->ctx));
    MUST(fsdp_stream_create(a->ctx, "compute", &a->s));
    return open_model(a);
}

static bool close_actor(actor *a)
{
    MUST(fsdp_model_destroy(a->model));
    MUST(fsdp_stream_release(a->s));
    MUST(fsdp_context_destroy(a->ctx));
    return true;
}

static fsdp_status visit(actor *a, uint32_t unit, bool backward)
{
    fsdp_view view = FSDP_VIEW_INIT;
    fsdp_status status =
        backward ? fsdp_backward_begin(a->unit[unit], a->s, &view) : fsdp_forward_begin(a->unit[unit], a->s, &view);
    if (status != FSDP_OK) return status;
    return backward ? fsdp_backward_end(a->unit[unit], a->s) : fsdp_forward_end(a->unit[unit], a->s);
}

static fsdp_status pass(actor *a, int32_t which, const uint32_t *order, uint32_t n)
{
    fsdp_pass_args args = FSDP_PASS_ARGS_INIT;
    args.pass = which;
    args.next = FSDP_PASS_NONE;
    fsdp_status status = fsdp_pass_begin(a->model, &args, a->s);
    for (uint32_t i = 0; status == FSDP_OK && i < n; i++) status = visit(a, order[i], i >= UNITS);
    return status == FSDP_OK ? fsdp_pass_end(a->model, a->s) : status;
}

/* An evaluation, whose gathers alone differ on the odd rank, then a training step. */
static fsdp_status step(actor *a, bool odd)
{
    static const uint32_t train[] = {0, 1, 2, 2, 1, 0}, plain[] = {0, 1, 2}, swapped[] = {0, 2, 1};
    fsdp_adamw_args args = FSDP_ADAMW_ARGS_INIT;
    fsdp_status status = pass(a, FSDP_PASS_EVAL, odd ? swapped : plain, UNITS);
    if (status == FSDP_OK) status = pass(a, FSDP_PASS_TRAIN, train, 2 * UNITS);
    return status == FSDP_OK ? fsdp_adamw_step(a->opt, &args, a->s) : status;
}

/* This rank's masters, once the GPU is idle. */
static bool copy_masters(const fsdp_shard_segment *const *segment, const uint32_t *n, float *to)
{
    memset(to, 0, UNITS * SHARD * sizeof *to);
    EXPECT(cudaDeviceSynchronize() == cudaSuccess);
    for (int i = 0; i < UNITS; i++) {
        if (n[i] == 0) continue;
        EXPECT(n[i] == 1 && segment[i]->count <= SHARD);
        EXPECT(cudaMemcpy(to + i * SHARD, segment[i]->master, segment[i]->count * sizeof *to, cudaMemcpyDeviceToHost) ==
               cudaSuccess);
    }
    return true;
}

static bool is_told(actor *a, fsdp_status status)
{
    char said[2048];
    snprintf(said, sizeof said, "%s", fsdp_last_error());
    EXPECT(status == FSDP_ERR_MISMATCH);
    EXPECT(strstr(said, "step 3 of model ") != NULL);
    EXPECT(strstr(said, "ranks have enqueued different collectives before its sum, and it changed nothing. "
                        "First difference: rank 0: #") != NULL);
    EXPECT(strstr(said, " all-gather of h.1 in EVAL (512 fp32); rank 1: #") != NULL);
    EXPECT(strstr(said, " all-gather of h.2 in EVAL (512 fp32)") != NULL);
    EXPECT(fsdp_context_check(a->ctx) == FSDP_ERR_MISMATCH && strstr(said, fsdp_last_error()) != NULL);
    return true;
}

static bool last_step(actor *a)
{
    const fsdp_shard_segment *segment[UNITS];
    uint32_t n[UNITS];
    float before[UNITS * SHARD], after[UNITS * SHARD];
    fsdp_step_report report = FSDP_STEP_REPORT_INIT;
    bool odd = a->j->odd && a->rank == 1;
    for (int i = 0; i < UNITS; i++) MUST(fsdp_unit_shard(a->unit[i], &segment[i], &n[i]));
    if (!copy_masters(segment, n, before)) return false;
    fsdp_status status = step(a, odd);
    if (status == FSDP_OK && a->j->polls) {
        status = fsdp_stream_drain_host(a->s, 40 * second_ns);
        if (status == FSDP_OK) status = step(a, false);
    } else if (status == FSDP_OK) {
        status = fsdp_step_report_get(a->model, STEPS, 40 * second_ns, &report);
    }
    if (a->j->odd && !is_told(a, status)) return false;
    if (!a->j->odd) MUST(status);
    if (!copy_masters(segment, n, after)) return false;
    EXPECT((memcmp(before, after, sizeof after) == 0) == a->j->odd);
    return true;
}

static bool rank_main(uint32_t rank, void *arg)
{
    actor a = {.j = arg, .rank = rank};
    fsdp_step_report report = FSDP_STEP_REPORT_INIT;
    gpu_rank_environment(rank);
    if (!open_actor(&a)) return false;
    for (uint64_t i = 1; i < STEPS; i++) {
        MUST(step(&a, false));
        MUST(fsdp_step_report_get(a.model, i, 40 * second_ns, &report));
        EXPECT(report.updates == i && !report.skipped);
    }
    return last_step(&a) && close_actor(&a);
}

static void run(job *j)
{
    j->launch = processes_launch(PROCESSES_BY_TCP);
    const char *failure = processes_run(WORLD, RUN_S * second_ns, rank_main, j);
    if (failure != NULL) fail_msg("%s", failure);
}

static void swapped_gathers_are_found_by_the_report(void **state)
{
    (void)state;
    run(&(job){.odd = true});
}

static void swapped_gathers_are_found_by_the_next_steps_hooks(void **state)
{
    (void)state;
    run(&(job){.odd = true, .polls = true, .reduce_comm = true});
}

static void ranks_that_agree_hear_nothing(void **state)
{
    (void)state;
    run(&(job){.odd = false});
    run(&(job){.odd = false, .polls = true, .reduce_comm = true});
}

int main(void)
{
    if (gpu_is_missing_here("test_gpu_order")) return NO_GPU;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(swapped_gathers_are_found_by_the_report),
        cmocka_unit_test(swapped_gathers_are_found_by_the_next_steps_hooks),
        cmocka_unit_test(ranks_that_agree_hear_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
