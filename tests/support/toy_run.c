/* SPDX-License-Identifier: MIT */
/* The ranks of a toy run: as threads, as processes, or on the exploration device. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "toy.h"

bool toy_always_processes;

typedef struct rank {
    const toy_config *config;
    fsdp_local *local;
    const fsdp_side_channel *side;
    fsdp_launch launch; /* size 0: ranks are threads */
    explore *x;
    toy_script script;
    toy_result *result;
    float *masters;
    void *arg;
    uint32_t number;
    pthread_t thread;
} rank;

static void *rank_main(void *arg)
{
    rank *r = arg;
    toy *t = calloc(1, sizeof *t);
    if (t == NULL) abort();
    t->config = r->config;
    t->local = r->local;
    t->launch = r->launch.size > 0 ? &r->launch : NULL;
    t->side = r->side;
    t->x = r->x;
    t->result = r->result;
    t->masters = r->masters;
    t->arg = r->arg;
    t->rank = r->number;
    fsdp_status status = toy_open(t);
    if (status == FSDP_OK) status = (r->script != NULL ? r->script : toy_train)(t);
    if (status != FSDP_OK && t->ctx != NULL) fsdp_context_abort(t->ctx, t->result->error);
    toy_close(t);
    free(t);
    return NULL;
}

static uint64_t count_elems(const toy_config *config)
{
    toy_shape shape;
    uint64_t n_elems = 0;
    toy_shape_make(&config->shape, &shape);
    for (uint32_t u = 0; u < shape.n_units; u++)
        for (uint32_t i = 0; i < shape.unit[u].n_params; i++) n_elems += shape.unit[u].param[i].elems;
    return n_elems;
}

static float *new_masters(const toy_config *config)
{
    float *masters = calloc(count_elems(config), sizeof *masters);
    if (masters == NULL) abort();
    return masters;
}

static void run_threads(rank *ranks, uint32_t n)
{
    fsdp_local *local = NULL;
    if (!ranks->config->sim && fsdp_local_create(n, NULL, &local) != FSDP_OK) abort();
    for (uint32_t r = 0; r < n; r++) {
        ranks[r].local = local;
        if (pthread_create(&ranks[r].thread, NULL, rank_main, &ranks[r]) != 0) abort();
    }
    for (uint32_t r = 0; r < n; r++) pthread_join(ranks[r].thread, NULL);
    fsdp_local_destroy(local);
}

/* ---- Ranks as processes ---- */

/* n trainings of one world: the ranks of the first, then those of the second, … */
typedef struct trainings {
    rank *ranks;
    uint32_t n, world;
} trainings;

static bool rank_process(uint32_t number, void *arg)
{
    const trainings *all = arg;
    const toy_device *device = all->ranks->config->device;
    if (device != NULL) device->begin_process(number);
    for (uint32_t i = 0; i < all->n; i++) (void)rank_main(&all->ranks[i * all->world + number]);
    return true; /* what went wrong stands in its result */
}

static void launch_ranks(rank *ranks, uint32_t n, shared_side *side, toy_result *shared, float *masters)
{
    fsdp_launch launch = processes_launch(ranks->config->way);
    for (uint32_t r = 0; r < n; r++) {
        launch.rank = launch.local_rank = r;
        launch.world = launch.local_world = n;
        ranks[r].launch = launch;
        ranks[r].side = side != NULL ? shared_side_end(side, r) : NULL;
        ranks[r].result = &shared[r];
        ranks[r].masters = masters;
    }
}

/* Results and masters come home through memory that all share. */
static void run_processes(trainings all)
{
    const uint32_t n = all.n * all.world;
    uint64_t master_floats = 0, at = 0;
    rank *ranks = all.ranks;
    for (uint32_t i = 0; i < all.n; i++) master_floats += count_elems(ranks[i * all.world].config);
    float *masters = processes_shared(master_floats * sizeof *masters);
    toy_result *results = ranks->result, *shared = processes_shared(n * sizeof *shared);
    shared_side *sides[TOY_TRAININGS] = {NULL};
    for (uint32_t i = 0; i < all.n; i++) {
        rank *first = &ranks[i * all.world];
        if (first->config->own_side) sides[i] = shared_side_create(all.world);
        launch_ranks(first, all.world, sides[i], &shared[i * all.world], masters + at);
        at += count_elems(first->config);
    }
    const char *failure = processes_run(all.world, toy_timeout_ns, rank_process, &all);
    /* A process that was killed or hangs is why others have failed. */
    for (uint32_t i = 0; failure != NULL && i < all.n; i++)
        snprintf(shared[i * all.world].error, sizeof shared->error, "%s", failure);
    for (uint32_t r = 0; r < n; r++) {
        float *master = results[r].master;
        results[r] = shared[r];
        results[r].master = master;
        if (master != NULL) memcpy(master, ranks[r].masters, count_elems(ranks[r].config) * sizeof *masters);
    }
    for (uint32_t i = 0; i < all.n; i++) shared_side_destroy(sides[i]);
    processes_unshare(masters, master_floats * sizeof *masters);
    processes_unshare(shared, n * sizeof *shared);
}

static void explored_main(uint32_t number, void *ranks) { rank_main((rank *)ranks + number); }

static void run_explored(rank *ranks, uint32_t n)
{
    explore_config order = ranks->config->order;
    order.world = n;
    order.host_memory = true; /* losses are summed from where kernels leave them */
    explore *x = explore_open(&order);
    if (x == NULL) abort();
    for (uint32_t r = 0; r < n; r++) ranks[r].x = x;
    explore_run_ranks(x, explored_main, ranks);
    toy_result *result = ranks->result;
    const char *complaint = explore_complaint(x);
    if (complaint != NULL) snprintf(result->complaint, sizeof result->complaint, "%s", complaint);
    result->order_hash = explore_hash(x);
    result->n_order_steps = explore_steps(x);
    if (ranks->config->schedule && (result->schedule = strdup(explore_schedule(x))) == NULL) abort();
    explore_close(x);
}

/* A training's ranks, with results that are zeros. */
static void new_ranks(const toy_config *config, toy_script script, void *arg, toy_result *results, rank *ranks)
{
    uint32_t n = config->sim ? 1 : config->world;
    toy_results_free(results, n);
    memset(results, 0, n * sizeof *results);
    if (config->values) results[0].master = new_masters(config);
    for (uint32_t r = 0; r < n; r++)
        ranks[r] = (rank){.config = config,
                          .script = script,
                          .result = &results[r],
                          .masters = results[0].master,
                          .arg = arg,
                          .number = r};
}

/* The sentence that tells most is rank 0's then. Whoever was aborted tells less than who aborted. */
static bool all_came_through(toy_result *results, uint32_t n)
{
    const char *first = NULL;
    for (uint32_t r = 0; r < n; r++) {
        if (results[r].error[0] == '\0') continue;
        if (first == NULL || strstr(first, "FSDP_ERR_ABORTED") != NULL) first = results[r].error;
    }
    if (first != NULL && first != results[0].error) memcpy(results[0].error, first, sizeof results[0].error);
    return first == NULL;
}

bool toy_run(const toy_config *config, toy_script script, void *arg, toy_result *results)
{
    uint32_t n = config->sim ? 1 : config->world;
    rank ranks[TOY_WORLD];
    new_ranks(config, script, arg, results, ranks);
    if (config->explored) run_explored(ranks, n);
    else if (config->processes || config->device != NULL || (toy_always_processes && !config->sim))
        run_processes((trainings){ranks, 1, n});
    else run_threads(ranks, n);
    return all_came_through(results, n);
}

bool toy_run_each(const toy_config *configs, uint32_t n, toy_script script, void *arg, toy_result *results)
{
    uint32_t world = configs->world;
    rank *ranks = calloc(n * world, sizeof *ranks);
    if (ranks == NULL || n > TOY_TRAININGS) abort();
    for (uint32_t i = 0; i < n; i++) {
        if (configs[i].world != world || configs[i].device != configs->device || configs[i].sim || configs[i].explored)
            abort();
        new_ranks(&configs[i], script, arg, &results[i * world], &ranks[i * world]);
    }
    run_processes((trainings){ranks, n, world});
    free(ranks);
    bool all = true;
    for (uint32_t i = 0; i < n; i++) all &= all_came_through(&results[i * world], world);
    return all;
}

bool toy_run_rank(const toy_config *config, const fsdp_launch *launch, toy_script script, void *arg, toy_result *result)
{
    rank r = {
        .config = config, .launch = *launch, .script = script, .result = result, .arg = arg, .number = launch->rank};
    memset(result, 0, sizeof *result);
    if (config->device != NULL) config->device->begin_process(launch->rank);
    rank_main(&r);
    return result->error[0] == '\0';
}

void toy_results_free(toy_result *results, uint32_t n)
{
    for (uint32_t r = 0; r < n; r++) {
        free(results[r].master);
        free(results[r].schedule);
        toy_tape_free(results[r].tape);
        results[r].master = NULL;
        results[r].schedule = NULL;
        results[r].tape = NULL;
    }
}
