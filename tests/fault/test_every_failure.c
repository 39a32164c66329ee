/* SPDX-License-Identifier: MIT */
/* The journey with its n-th operation failing, n = 1, 2, …, at every seam, on either rank, once and for good. Whatever fails:
 * the call says so, with the seam's status and a sentence; the other rank goes on to the same numbers or is told; nothing
 * hangs; nothing is leaked; no number is ever another one; and new contexts go all the way.
 *
 *   test_every_failure [--long] [seam]
 * There are twelve ways: which rank, once or for good, which kind of journey. The first n are tried in all, the others in one
 * of them; with --long all in all. */
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

#include "faulty_rank.h"

#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define REDUCED 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define REDUCED 1
#endif
#ifndef REDUCED
#define REDUCED 0
#endif

enum { WORKERS = 6, WAYS = 12, MAX_TASKS = 512, MAX_N = 100000 };
static const uint64_t ms = 1000000;

static bool is_long;
static const char *only_seam;

/* ---- One run ---- */

/* What fails. nth 0: nothing. */
typedef struct trial {
    faulty_seam seam;
    fsdp_status status;
    uint32_t rank;
    bool for_good;
    uint32_t kind; /* of journey */
    uint64_t nth;
} trial;

typedef struct outcome {
    uint64_t n_failed; /* operations that were made to */
    uint32_t n_finished, n_told;
    char complaint[2 * SAID_BYTES];
} outcome;

/* Journeys differ in how ranks are tied together. */
enum { ONE_COMM, TWO_COMMS, ORDERED, KINDS };
static const char *const kind_name[KINDS] = {"one communicator", "two communicators", "FSDP_DEBUG_ORDER"};

/* Results of a journey without a failure. */
static uint64_t reference[KINDS][RANKS][MAX_VALUES];
static uint32_t n_reference[KINDS][RANKS];

static void *rank_main(void *arg)
{
    rank_journey(arg);
    return NULL;
}

static void run_ranks(rank *ranks, const trial *t, uint64_t timeout_ns)
{
    fsdp_local *local = NULL;
    meeting meet;
    pthread_t thread[RANKS];
    if (fsdp_local_create(RANKS, NULL, &local) != FSDP_OK) abort();
    meeting_init(&meet);
    for (uint32_t i = 0; i < RANKS; i++) {
        rank *r = &ranks[i];
        *r = (rank){.number = i, .timeout_ns = timeout_ns, .meeting = &meet, .reduce_comm = t->kind == TWO_COMMS};
        r->debug = t->kind == ORDERED ? FSDP_DEBUG_ORDER | FSDP_DEBUG_POISON : 0;
        r->host = (fsdp_host_config)FSDP_HOST_CONFIG_INIT;
        r->host.local = local, r->host.rank = i;
        r->stubborn = !t->for_good;
        r->aborts = t->nth % 2;
        faulty_init(&r->f, fsdp_host_backend(), &r->host);
        if (i == t->rank) faulty_arm(&r->f, t->seam, t->status, t->nth, t->for_good);
        if (pthread_create(&thread[i], NULL, rank_main, r) != 0) abort();
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

/* Device memory is taken in two calls, and only what blocks can be late: docs/errors.md. */
static bool is_documented(const rank *r)
{
    static const char *const takes[] = {"fsdp_allocator_alloc", "fsdp_model_seal", NULL};
    static const char *const blocks[] = {
        "_host(", "_get(", "fsdp_model_fill", "fsdp_param_set", "fsdp_model_hash", "fsdp_model_seal", NULL};
    if (r->status != FSDP_ERR_NO_MEMORY && r->status != FSDP_ERR_TIMEOUT) return true;
    const char *const *name = r->status == FSDP_ERR_NO_MEMORY ? takes : blocks;
    while (*name != NULL && strstr(r->call, *name) == NULL) name++;
    return *name != NULL;
}

/* The rank where it failed. A pinned piece is host memory. */
static void judge_failed(outcome *o, const rank *r, const trial *t)
{
    bool pinned = t->seam == FAULTY_MEM_ALLOC && r->status == FSDP_ERR_NO_HOST_MEMORY;
    bool dead = t->status == FSDP_ERR_RANK_LOST && r->status == FSDP_ERR_ABORTED; /* a communicator's own abort */
    bool late =
        t->seam == FAULTY_EVENT_WAIT && strstr(r->said, "s: ask again") != NULL; /* said where it was asked for */
    char said[SAID_BYTES + 160];
    snprintf(said, sizeof said, "%s: %s, %s", r->call, fsdp_status_name(r->status), r->said);
    if (r->status != t->status && !pinned && !dead) complain(o, r, "not the status of what failed", said);
    bool named = strstr(r->said, "was made to fail") != NULL || strstr(r->said, "host memory") != NULL ||
                 strstr(r->said, "host allocator") != NULL || dead || late;
    if (!named) complain(o, r, "a sentence about something else", said);
    bool again = r->unchanged && !t->for_good && strcmp(r->call, "an abandoned step") != 0;
    if (again && o->n_finished < RANKS) complain(o, r, "nothing had changed, and to call again did not help", said);
}

/* The other rank: that one's failure by vote, or that it is gone. */
static void judge_told(outcome *o, const rank *r, const trial *t)
{
    char said[SAID_BYTES + 160];
    snprintf(said, sizeof said, "%s: %s, %s", r->call, fsdp_status_name(r->status), r->said);
    bool between = r->status == FSDP_ERR_RANK_LOST || r->status == FSDP_ERR_ABORTED || r->status == FSDP_ERR_MISMATCH;
    bool voted = strstr(r->said, "so on every rank") != NULL;
    if (!between && !voted) complain(o, r, "an error that is not between ranks", said);
    char number[16];
    snprintf(number, sizeof number, r->gave_up ? "rank " : "rank %u", t->rank);
    if (strstr(r->said, number) == NULL) complain(o, r, "a sentence that does not name the rank", said);
}

static void judge(outcome *o, rank *ranks, const trial *t)
{
    memset(o, 0, sizeof *o);
    o->n_failed = faulty_n_failed(&ranks[t->rank].f);
    for (uint32_t i = 0; i < RANKS; i++) o->n_finished += ranks[i].finished, o->n_told += ranks[i].n_errors > 0;
    for (uint32_t i = 0; i < RANKS; i++) {
        rank *r = &ranks[i];
        if (r->complaint[0] != 0) complain(o, r, "in the journey", r->complaint);
        if (faulty_live(&r->f)[0] != 0) complain(o, r, "leaked", faulty_live(&r->f));
        if (o->n_failed == 0 && !r->finished)
            complain(o, r, "nothing was made to fail, and it did not come through", r->said);
        if (r->n_errors > 0 && !is_documented(r)) complain(o, r, "not a status of this call", r->call);
        if (r->n_errors > 0 && o->n_failed > 0) (i == t->rank ? judge_failed : judge_told)(o, r, t);
        if (n_reference[t->kind][i] == 0) continue;
        uint32_t n = n_reference[t->kind][i];
        if (r->n_values > n || (r->finished && r->n_values != n)) complain(o, r, "other results", "in number");
        uint32_t same = 0;
        while (same < r->n_values && same < n && r->value[same] == reference[t->kind][i][same]) same++;
        if (same < r->n_values) {
            char where[SAID_BYTES + 200];
            snprintf(where, sizeof where, "value %u of %u (has %u): %s: %s; other rank %s: %s", same, n, r->n_values,
                     r->call, r->said, ranks[1 - i].call, ranks[1 - i].said);
            complain(o, r, "other results", where);
        }
        faulty_fini(&r->f);
    }
    /* Of two ranks that part, one has a reason. */
    if (o->n_finished < RANKS && o->n_told == 0) complain(o, &ranks[0], "gave up", "and no rank was told why");
}

/* Once; and where it looks wrong, once more with time enough for a machine that has other things to do. */
static void try_once(const trial *t, rank *ranks, outcome *o)
{
    for (int again = 0; again < 2; again++) {
        run_ranks(ranks, t, again ? 10000 * ms : 400 * ms);
        judge(o, ranks, t);
        if (o->complaint[0] == 0) return;
    }
}

/* ---- All runs of one seam and status in one way ---- */

typedef struct task {
    trial t; /* but nth */
    uint64_t first, stride, n_all;
    /* results */
    uint64_t last, n_runs, n_unheard, n_mended;
    char complaint[2 * SAID_BYTES + 256];
} task;

static task tasks[MAX_TASKS];
static uint32_t n_tasks;
static atomic_uint next_task;

/* All up to n_all, then every stride-th. */
static uint64_t next_n(const task *k, uint64_t n)
{
    do n++;
    while (n > k->n_all && n % k->stride != k->first);
    return n;
}

static void run_task(task *k, rank *ranks)
{
    outcome o;
    trial clean = {.kind = k->t.kind};
    for (uint64_t n = 1; n < MAX_N; n = next_n(k, n)) {
        k->t.nth = n;
        try_once(&k->t, ranks, &o);
        bool happened = o.n_failed > 0;
        if (o.complaint[0] == 0 && happened) {
            k->n_runs++;
            k->n_unheard += o.n_told == 0;
            k->n_mended += o.n_told > 0 && o.n_finished == RANKS;
            if (o.n_finished < RANKS && (is_long || n % 8 == 0)) try_once(&clean, ranks, &o);
        }
        if (o.complaint[0] != 0) {
            snprintf(k->complaint, sizeof k->complaint, "%s %llu, %s, %s on rank %u, %s: %s",
                     faulty_seam_name(k->t.seam), (unsigned long long)n, kind_name[k->t.kind],
                     fsdp_status_name(k->t.status), k->t.rank, k->t.for_good ? "for good" : "once", o.complaint);
            return;
        }
        if (!happened) return;
        k->last = n;
    }
}

static void *worker_main(void *unused)
{
    (void)unused;
    rank *ranks = calloc(RANKS, sizeof *ranks);
    if (ranks == NULL) abort();
    for (uint32_t i; (i = atomic_fetch_add(&next_task, 1)) < n_tasks;) run_task(&tasks[i], ranks);
    free(ranks);
    return NULL;
}

static void make_tasks(void)
{
    for (int seam = 0; seam < FAULTY_SEAMS; seam++) {
        if (only_seam != NULL && strcmp(only_seam, faulty_seam_name((faulty_seam)seam)) != 0) continue;
        fsdp_status status;
        for (uint32_t s = 0; (status = faulty_status((faulty_seam)seam, s)) != FSDP_OK; s++)
            for (uint32_t way = 0; way < WAYS; way++) {
                assert_true(n_tasks < MAX_TASKS);
                task *k = &tasks[n_tasks++];
                k->t = (trial){(faulty_seam)seam, status, way % 2, way / 2 % 2, way / 4, 0};
                k->stride = REDUCED ? WAYS * 10 : WAYS;
                k->first = way * k->stride / WAYS;
                k->n_all = is_long ? MAX_N : REDUCED ? 1 : 5;
            }
    }
}

static void record_reference(void)
{
    rank *ranks = calloc(RANKS, sizeof *ranks);
    assert_non_null(ranks);
    for (uint32_t kind = 0; kind < KINDS; kind++) {
        trial clean = {.kind = kind};
        outcome o;
        for (int twice = 0; twice < 2; twice++) { /* the second is judged by the first */
            run_ranks(ranks, &clean, 20000 * ms);
            judge(&o, ranks, &clean);
            if (o.complaint[0] != 0) fail_msg("without a failure: %s", o.complaint);
            for (uint32_t i = 0; i < RANKS && twice == 0; i++) {
                n_reference[kind][i] = ranks[i].n_values;
                memcpy(reference[kind][i], ranks[i].value, sizeof reference[kind][i]);
                faulty_fini(&ranks[i].f);
            }
        }
    }
    free(ranks);
}

static void print_table(void)
{
    print_message("%-18s %-24s %7s %6s %8s %7s\n", "seam", "status", "last n", "runs", "unheard", "mended");
    for (uint32_t i = 0; i < n_tasks;) {
        task sum = tasks[i];
        uint32_t end = i + 1;
        for (; end < n_tasks && tasks[end].t.seam == sum.t.seam && tasks[end].t.status == sum.t.status; end++) {
            if (tasks[end].last > sum.last) sum.last = tasks[end].last;
            sum.n_runs += tasks[end].n_runs, sum.n_unheard += tasks[end].n_unheard, sum.n_mended += tasks[end].n_mended;
        }
        print_message("%-18s %-24s %7llu %6llu %8llu %7llu\n", faulty_seam_name(sum.t.seam),
                      fsdp_status_name(sum.t.status), (unsigned long long)sum.last, (unsigned long long)sum.n_runs,
                      (unsigned long long)sum.n_unheard, (unsigned long long)sum.n_mended);
        i = end;
    }
}

static void any_operation_may_fail_and_no_number_is_wrong(void **unused)
{
    (void)unused;
    pthread_t worker[WORKERS];
    record_reference();
    make_tasks();
    for (int i = 0; i < WORKERS; i++) assert_int_equal(pthread_create(&worker[i], NULL, worker_main, NULL), 0);
    for (int i = 0; i < WORKERS; i++) pthread_join(worker[i], NULL);
    print_table();
    uint32_t n_complaints = 0;
    for (uint32_t i = 0; i < n_tasks; i++) {
        if (tasks[i].complaint[0] == 0) continue;
        n_complaints++;
        print_error("%s\n", tasks[i].complaint);
    }
    assert_int_equal(n_complaints, 0);
    for (uint32_t i = 0; i < n_tasks; i++) /* each seam is one that the journey comes to */
        if (tasks[i].last == 0) fail_msg("%s never failed", faulty_seam_name(tasks[i].t.seam));
}

int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--long") == 0) is_long = true;
        else only_seam = argv[i];
    }
    alarm(is_long ? 3000 : REDUCED ? 1000 : 250);
    const struct CMUnitTest tests[] = {cmocka_unit_test(any_operation_may_fail_and_no_number_is_wrong)};
    return cmocka_run_group_tests_name("every failure", tests, NULL, NULL);
}
