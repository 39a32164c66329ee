/* SPDX-License-Identifier: MIT */
/* The toy trainer with ranks as MPI processes comes to the bit to what it does with ranks as threads of one process.
 * Argument: "multiple" or "serialized", the thread level; "reversed": ranks are numbered the other way round. */
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "mpi_ranks.h"
#include "toy.h"

enum { STEPS = 6, ERROR_BYTES = 768 };

/* ---- Every MPI call that streams make, through MPI's profiling names: with MPI_THREAD_SERIALIZED no two at a time ---- */

static atomic_int inside, n_at_once;
static bool serialized;

static void enter(void)
{
    if (atomic_fetch_add(&inside, 1) != 0) atomic_fetch_add(&n_at_once, 1);
    if (serialized) sched_yield(); /* another one could come now */
}

static int leave(int code)
{
    atomic_fetch_sub(&inside, 1);
    return code;
}

int MPI_Testsome(int n, MPI_Request *requests, int *n_done, int *indices, MPI_Status *statuses)
{
    enter();
    return leave(PMPI_Testsome(n, requests, n_done, indices, statuses));
}

int MPI_Isend(const void *from, int n, MPI_Datatype type, int to, int tag, MPI_Comm comm, MPI_Request *request)
{
    enter();
    return leave(PMPI_Isend(from, n, type, to, tag, comm, request));
}

int MPI_Irecv(void *to, int n, MPI_Datatype type, int from, int tag, MPI_Comm comm, MPI_Request *request)
{
    enter();
    return leave(PMPI_Irecv(to, n, type, from, tag, comm, request));
}

/* ---- Runs ---- */

typedef struct run {
    const char *name;
    void (*change)(toy_config *config);
} run;

static void as_it_is(toy_config *config) { (void)config; }

static void in_halves(toy_config *config)
{
    config->shape.compute = config->shape.grad = FSDP_DTYPE_BF16;
    config->shape.reduce = FSDP_DTYPE_BF16;
}

static void on_two_wires(toy_config *config)
{
    config->reduce_comm = true;
    config->micro_steps = 2;
    config->accumulation = FSDP_ACCUMULATE_REDUCE_EACH;
    config->depth = 2;
}

static void clipped_and_shaken(toy_config *config)
{
    config->max_norm = 0.01f;
    config->eval = TOY_EVAL_NAMED;
    config->jitter_ns = 100000;
    config->jitter_seed = 5;
}

static const run runs[] = {{"as it is", as_it_is},
                           {"in halves", in_halves},
                           {"on two wires", on_two_wires},
                           {"clipped, with evaluations, shaken", clipped_and_shaken},
                           {"in messages of 60 bytes", on_two_wires}};

/* What comes out of a training on one rank. */
typedef struct outcome {
    char error[ERROR_BYTES];
    uint64_t hash;
    float loss[STEPS], norm[STEPS];
} outcome;

static outcome outcome_of(const toy_result *result)
{
    outcome o = {.hash = result->hash};
    memcpy(o.error, result->error, sizeof o.error);
    for (int i = 0; i < STEPS; i++) {
        o.loss[i] = result->loss[i];
        o.norm[i] = result->report[i].grad_norm;
    }
    return o;
}

static outcome train_as_rank(const toy_config *config, MPI_Comm comm, uint64_t chunk_bytes)
{
    static toy_result result;
    fsdp_mpi_config mpi = FSDP_MPI_CONFIG_INIT;
    toy t = {.config = config, .result = &result, .backend = fsdp_mpi_backend(), .backend_config = &mpi};
    int rank;
    MPI_Comm_rank(comm, &rank);
    mpi.comm = &comm;
    mpi.chunk_bytes = chunk_bytes;
    mpi.jitter_ns = config->jitter_ns;
    mpi.jitter_seed = config->jitter_seed;
    t.rank = (uint32_t)rank;
    memset(&result, 0, sizeof result);
    fsdp_status status = toy_open(&t);
    if (status == FSDP_OK) status = toy_train(&t);
    if (status != FSDP_OK && t.ctx != NULL) fsdp_context_abort(t.ctx, result.error);
    toy_close(&t);
    return outcome_of(&result);
}

/* On process 0, which gets everybody's outcome. */
static int compare(const run *r, const toy_config *config, const outcome *all)
{
    static toy_result results[TOY_WORLD];
    bool ok = toy_run(config, NULL, NULL, results);
    outcome threads = outcome_of(&results[0]);
    toy_results_free(results, config->world);
    if (!ok) return fprintf(stderr, "%s, as threads: %s\n", r->name, threads.error) > 0;
    for (uint32_t i = 0; i < config->world; i++) {
        if (memcmp(&all[i], &threads, sizeof threads) == 0) continue;
        return fprintf(stderr, "%s, rank %u of %u: %s; hash %llx, as threads %llx; loss %a, as threads %a\n", r->name,
                       i, config->world, all[i].error, (unsigned long long)all[i].hash,
                       (unsigned long long)threads.hash, (double)all[i].loss[STEPS - 1],
                       (double)threads.loss[STEPS - 1]) > 0;
    }
    printf("%s, %u ranks: hash %016llx, loss %g\n", r->name, config->world, (unsigned long long)threads.hash,
           (double)threads.loss[STEPS - 1]);
    return 0;
}

int main(int argc, char **argv)
{
    serialized = argc > 1 && strcmp(argv[1], "serialized") == 0;
    bool reversed = argc > 1 && strcmp(argv[1], "reversed") == 0;
    mpi_tests_begin(&argc, &argv, serialized ? MPI_THREAD_SERIALIZED : MPI_THREAD_MULTIPLE);
    alarm(MPI_DEADLINE_S);
    int failed = 0, level = -1;
    MPI_Query_thread(&level);
    if (serialized && level != MPI_THREAD_SERIALIZED) failed = fprintf(stderr, "the thread level is %d\n", level) > 0;
    MPI_Comm comm;
    MPI_Comm_split(MPI_COMM_WORLD, 0, reversed ? -mpi_rank() : mpi_rank(), &comm);
    for (size_t i = 0; i < sizeof runs / sizeof *runs; i++) {
        static outcome all[TOY_WORLD];
        toy_config config = toy_config_default();
        config.world = (uint32_t)mpi_size();
        config.steps = STEPS;
        runs[i].change(&config);
        outcome mine = train_as_rank(&config, comm, i == sizeof runs / sizeof *runs - 1 ? 60 : 0);
        mpi_gather(MPI_COMM_WORLD, &mine, all, sizeof mine);
        if (mpi_rank() == 0) failed += compare(&runs[i], &config, all);
    }
    MPI_Comm_free(&comm);
    int at_once = atomic_load(&n_at_once);
    if (serialized && at_once > 0) failed += fprintf(stderr, "%d MPI calls came while another was made\n", at_once) > 0;
    return mpi_tests_end(failed);
}
