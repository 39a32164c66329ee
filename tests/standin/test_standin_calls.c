/* SPDX-License-Identifier: MIT */
/* The journey of test_every_failure on lib/cuda, with the n-th call of CUDA or NCCL failing, n = 1, 2, …, on either rank:
 * once, or so that the GPU is broken from then on; and with the n-th block of host memory missing. Whatever fails: nothing
 * hangs, nothing is leaked, no number is ever another one, and of two ranks that do not come through one is told why.
 *
 *   standin_calls [--long | n]     Some of them; --long: all; n: that one. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../conformance/device_suite.h"
#include "../fault/faulty_rank.h"
#include "cuda/cuda_backend.h"
#include "fsdp/cuda.h"
#include "standin.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { STRIDE = 60 };
#else
enum { STRIDE = 12 };
#endif

enum { WORKERS = STANDIN_DEVICES / RANKS, WAYS = 8, HOST_STRIDE = 10 /* blocks of host memory are many */ };
static const uint64_t ms = 1000000;

typedef struct trial {
    uint64_t n; /* 0: none fails */
    uint32_t rank;
    cudaError_t error; /* cudaSuccess: no call of CUDA's, but the n-th asking for host memory */
    bool for_good;
} trial;

typedef struct outcome {
    const char *failed; /* NULL: the journey has fewer calls */
    uint32_t n_finished, n_told;
    char complaint[2 * SAID_BYTES];
} outcome;

static uint64_t reference[RANKS][MAX_VALUES];
static uint32_t n_reference[RANKS];
static uint64_t only_n;
static uint32_t stride = STRIDE;

/* ---- One run ---- */

typedef struct seat {
    rank *r;
    fsdp_cuda_config cuda;
} seat;

static void *rank_main(void *arg)
{
    const seat *s = arg;
    if (cudaSetDevice(s->cuda.device) != cudaSuccess) abort();
    rank_journey(s->r);
    return NULL;
}

/* On two GPUs from `device` on. */
static void run_ranks(rank *ranks, const trial *t, int device, uint64_t timeout_ns)
{
    fsdp_local *local = NULL;
    meeting meet;
    pthread_t thread[RANKS];
    seat seats[RANKS];
    if (fsdp_local_create(RANKS, NULL, &local) != FSDP_OK) abort();
    meeting_init(&meet);
    for (uint32_t i = 0; i < RANKS; i++) {
        rank *r = &ranks[i];
        *r = (rank){.number = i, .timeout_ns = timeout_ns, .meeting = &meet};
        r->stubborn = !t->for_good;
        r->aborts = t->n % 2;
        r->reduce_comm = t->n % 4 > 1;
        fsdp_cuda_config *cuda = &seats[i].cuda;
        *cuda = (fsdp_cuda_config)FSDP_CUDA_CONFIG_INIT;
        cuda->local = local, cuda->rank = i;
        cuda->device = device + (int)i;
        seats[i].r = r;
        faulty_init(&r->f, fsdp_cuda_backend(), cuda); /* it counts what is live */
        bool of_cuda = i == t->rank && t->error != cudaSuccess, of_host = i == t->rank && t->error == cudaSuccess;
        standin_fail(device + (int)i, of_cuda ? t->n : 0, t->error, t->for_good);
        faulty_arm(&r->f, FAULTY_HOST_ALLOC, FSDP_ERR_NO_HOST_MEMORY, of_host ? t->n : 0, false);
        if (pthread_create(&thread[i], NULL, rank_main, &seats[i]) != 0) abort();
    }
    for (uint32_t i = 0; i < RANKS; i++) pthread_join(thread[i], NULL);
    meeting_fini(&meet);
    fsdp_local_destroy(local);
}

static void complain(outcome *o, const rank *r, const char *what, const char *detail)
{
    if (o->complaint[0] == 0)
        snprintf(o->complaint, sizeof o->complaint, "rank %u: %s: %.900s", r->number, what, detail);
}

/* Behind a failure one rank may have enqueued a collective less. NCCL compares nothing, so until the next step's sum says so
 * the caller's own may get each other's bytes (docs/failures.md): who gave up a step, and has not come through after all, is
 * judged by what he had before. */
static void judge_rank(outcome *o, rank *r, const trial *t)
{
    const uint32_t n_judged = r->finished || !r->gave_up ? r->n_values : r->n_before;
    const uint32_t n = n_reference[r->number];
    const uint64_t *expected = reference[r->number];
    uint32_t same = 0;
    if (r->complaint[0] != 0) complain(o, r, "in the journey", r->complaint);
    if (faulty_live(&r->f)[0] != 0) complain(o, r, "leaked", faulty_live(&r->f));
    if (o->failed == NULL && !r->finished) complain(o, r, "nothing was made to fail", r->said);
    if (n == 0 || t->n % 4 > 1) return;
    while (same < n_judged && same < n && r->value[same] == expected[same]) same++;
    if (same < n_judged || (r->finished && same < n)) complain(o, r, "other results", r->said);
}

static void judge(outcome *o, rank *ranks, const trial *t, int device)
{
    memset(o, 0, sizeof *o);
    o->failed = standin_failed(device + (int)t->rank);
    if (t->error == cudaSuccess && t->n > 0 && faulty_n_failed(&ranks[t->rank].f) > 0) o->failed = "host memory";
    for (uint32_t i = 0; i < RANKS; i++) {
        o->n_finished += ranks[i].finished, o->n_told += ranks[i].n_errors > 0;
        judge_rank(o, &ranks[i], t);
        faulty_fini(&ranks[i].f);
    }
    if (o->n_finished < RANKS && o->n_told == 0) complain(o, &ranks[0], "gave up", "and no rank was told why");
}

/* lib/cuda aborts no communicator on a GPU that is broken: the process has to end anyway. */
static int live_on(int device, bool with_comms)
{
    return atomic_load(&standin_live[device]) + (with_comms ? atomic_load(&standin_live_comms[device]) : 0);
}

/* A job that nobody waits for any more cleans up when it comes back: a moment later. */
static void judge_live(outcome *o, const rank *ranks, const trial *t, int device)
{
    const struct timespec moment = {0, 5 * 1000000};
    for (int i = 0; i < RANKS; i++) {
        for (int k = 0; k < 400 && live_on(device + i, !t->for_good) != 0; k++) nanosleep(&moment, NULL);
        if (live_on(device + i, !t->for_good) != 0)
            complain(o, &ranks[i], "left on the GPU", o->failed != NULL ? o->failed : "after all");
        atomic_store(&standin_live[device + i], 0);
        atomic_store(&standin_live_comms[device + i], 0);
    }
}

/* Once; and where it looks wrong, once more with time enough for a machine that has other things to do. */
static void try_once(const trial *t, rank *ranks, int device, outcome *o)
{
    for (int again = 0; again < 2; again++) {
        run_ranks(ranks, t, device, again ? 10000 * ms : 400 * ms);
        judge(o, ranks, t, device);
        judge_live(o, ranks, t, device);
        if (o->complaint[0] == 0) return;
    }
}

/* ---- All runs ---- */

/* Which rank; an error of the network's or of one call, too little memory, the end of the GPU, no host memory. */
static trial trial_of(uint64_t n, uint32_t way)
{
    static const cudaError_t errors[] = {cudaErrorUnknown, cudaErrorMemoryAllocation, cudaErrorLaunchFailure,
                                         cudaSuccess};
    return (trial){n, way % RANKS, errors[way / RANKS], way / RANKS == 2};
}

static atomic_uint next_task;
static atomic_bool is_through[WAYS];
static atomic_ulong n_runs, n_unheard, n_mended;
static char complaints[8][2 * SAID_BYTES + 128];
static atomic_uint n_complaints;

static void run_trial(const trial *t, uint32_t way, rank *ranks, int device)
{
    outcome o;
    try_once(t, ranks, device, &o);
    if (o.failed == NULL) atomic_store(&is_through[way], true);
    n_runs += o.failed != NULL;
    n_unheard += o.failed != NULL && o.n_told == 0;
    n_mended += o.n_told > 0 && o.n_finished == RANKS;
    if (o.complaint[0] == 0) return;
    uint32_t i = atomic_fetch_add(&n_complaints, 1);
    if (i >= sizeof complaints / sizeof *complaints) return;
    snprintf(complaints[i], sizeof complaints[i], "call %llu on rank %u (%s): %s, %s: %s", (unsigned long long)t->n,
             t->rank, o.failed != NULL ? o.failed : "none", cudaGetErrorName(t->error),
             t->for_good ? "for good" : "once", o.complaint);
}

typedef struct worker {
    pthread_t thread;
    int device;
} worker;

/* In turns through all ways; each begins with another call. */
static void *worker_main(void *arg)
{
    const worker *w = arg;
    rank *ranks = calloc(RANKS, sizeof *ranks);
    if (ranks == NULL) abort();
    for (uint32_t n_through = 0; n_through < WAYS && n_complaints < 8;) {
        uint32_t task = atomic_fetch_add(&next_task, 1), way = task % WAYS;
        uint32_t step = way / RANKS == 3 ? HOST_STRIDE * stride : stride;
        trial t = trial_of(1 + task / WAYS * step + way * step / WAYS, way);
        if (only_n != 0) t = trial_of(only_n, way);
        if (only_n != 0 && task >= WAYS) break;
        if (!atomic_load(&is_through[way])) run_trial(&t, way, ranks, w->device);
        n_through = 0;
        for (uint32_t i = 0; i < WAYS; i++) n_through += atomic_load(&is_through[i]);
    }
    free(ranks);
    return NULL;
}

static void record_reference(void)
{
    rank *ranks = calloc(RANKS, sizeof *ranks);
    trial clean = {.n = 0};
    outcome o;
    assert_non_null(ranks);
    for (int twice = 0; twice < 2; twice++) { /* the second is judged by the first */
        run_ranks(ranks, &clean, 0, 20000 * ms);
        judge(&o, ranks, &clean, 0);
        judge_live(&o, ranks, &clean, 0);
        if (o.complaint[0] != 0) fail_msg("without a failure: %s", o.complaint);
        for (uint32_t i = 0; i < RANKS && twice == 0; i++) {
            n_reference[i] = ranks[i].n_values;
            memcpy(reference[i], ranks[i].value, sizeof reference[i]);
        }
    }
    free(ranks);
}

static void any_call_may_fail_and_no_number_is_wrong(void **unused)
{
    (void)unused;
    static worker workers[WORKERS];
    record_reference();
    for (int i = 0; i < WORKERS; i++) {
        workers[i].device = i * RANKS;
        assert_int_equal(pthread_create(&workers[i].thread, NULL, worker_main, &workers[i]), 0);
    }
    for (int i = 0; i < WORKERS; i++) pthread_join(workers[i].thread, NULL);
    print_message("%lu runs, %lu of them unheard, %lu mended\n", n_runs, n_unheard, n_mended);
    for (uint32_t i = 0; i < n_complaints && i < 8; i++) print_error("%s\n", complaints[i]);
    assert_int_equal(n_complaints, 0);
    assert_true(n_runs > 0);
}

/* ---- Half an operation ---- */

static const void *alone_config(void *storage, uint64_t jitter_ns, uint64_t jitter_seed)
{
    (void)jitter_ns, (void)jitter_seed;
    fsdp_cuda_config *config = storage;
    *config = (fsdp_cuda_config)FSDP_CUDA_CONFIG_INIT;
    return config;
}

static void count_up(void *arg) { (*(int *)arg)++; }

/* A host call behind some work, waited for at once; the n-th call of CUDA has no memory. False: there are not so many. */
static bool try_host_call(uint64_t n)
{
    static fixture f;
    const device_suite suite = {.backend = fsdp_cuda_backend(), .config = alone_config};
    static const uint32_t never;
    int count = 0;
    fsdp_device_op op = {.kind = FSDP_OPERATION_HOST_CALL, .u.host_call = {count_up, &count}};
    assert_true(fixture_open(&f, &suite, FSDP_DEBUG_SYNC, 0, 0));
    assert_int_equal(fsdp__cuda_delay(((fsdp__cuda_stream *)f.stream[0])->native, 20 * ms, &never), cudaSuccess);
    standin_fail(0, n, cudaErrorMemoryAllocation, false);
    fsdp_status status = f.ops->launch(f.dev, f.stream[0], &op, NULL);
    const char *failed = standin_failed(0);
    standin_fail(0, 0, cudaSuccess, false);
    (void)f.ops->stream_drain(f.dev, f.stream[0], 20ull * SECOND);
    if (status == FSDP_OK) assert_int_equal(count, 1);
    bool asks = failed != NULL && strstr(failed, "Query") != NULL;         /* that needs no memory */
    if (status == FSDP_ERR_NO_MEMORY && !asks) assert_int_equal(count, 0); /* it may be made again */
    fixture_close(&f);
    return failed != NULL;
}

static void what_had_no_memory_has_not_happened(void **unused)
{
    (void)unused;
    uint64_t n = 1;
    while (try_host_call(n)) n++;
    assert_true(n > 3);
}

int main(int argc, char **argv)
{
    bool is_long = argc > 1 && strcmp(argv[1], "--long") == 0;
    if (is_long) stride = 1;
    else if (argc > 1) only_n = strtoull(argv[1], NULL, 0);
    alarm(is_long ? 3000 : 400);
    setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 1);
    const struct CMUnitTest tests[] = {cmocka_unit_test(what_had_no_memory_has_not_happened),
                                       cmocka_unit_test(any_call_may_fail_and_no_number_is_wrong)};
    return cmocka_run_group_tests_name("every call", tests, NULL, NULL);
}
