/* SPDX-License-Identifier: MIT */
/* The loop with the library: a thread a rank, each with a context of its own over one meeting place; or this process as one
 * rank of a launcher's. */
#include <pthread.h>
#include <stdlib.h>

#include "rank.h"

static void *rank_main(void *arg)
{
    rank_run(arg);
    return NULL;
}

/* The sentence of the rank that failed by itself; of one that was told to stop only if there is no other. */
static bool judge(const rank *ranks, int n, problem *why)
{
    const rank *worst = NULL;
    for (int i = 0; i < n; i++) {
        if (ranks[i].status == FSDP_OK) continue;
        if (!worst || (worst->status == FSDP_ERR_ABORTED && ranks[i].status != FSDP_ERR_ABORTED)) worst = &ranks[i];
    }
    return worst ? problem_set(why, "%s", worst->why.text) : true;
}

static bool run_threads(const job *j, fsdp_local *local, rank *ranks, pthread_t *threads, outcome *out)
{
    const int n = j->opt.ranks;
    int started = 0;
    for (; started < n; started++) {
        ranks[started] = (rank){.job = j, .index = started, .local = local, .out = started == 0 ? out : NULL};
        if (pthread_create(&threads[started], NULL, rank_main, &ranks[started]) != 0) {
            problem_set(&out->why, "the system gives no thread for rank %d", started);
            break; /* those that run miss it, and say so at the deadline */
        }
    }
    for (int i = 0; i < started; i++) pthread_join(threads[i], NULL);
    return judge(ranks, started, &out->why) && started == n;
}

static bool run_process(const job *j, const fsdp_link *link, outcome *out)
{
    rank r = {.job = j, .index = (int)j->launch->rank, .link = j->opt.has_link ? link : NULL, .out = out};
    return rank_run(&r) ? true : problem_set(&out->why, "%s", r.why.text);
}

bool sharded_run(const job *j, outcome *out)
{
    const options *o = &j->opt;
    const fsdp_link link = {.latency_ns = (uint64_t)o->link_us * 1000,
                            .bytes_per_second = (uint64_t)o->link_mb_per_s * 1000000};
    if (j->launch) return run_process(j, &link, out);
    rank *ranks = calloc((size_t)o->ranks, sizeof *ranks);
    pthread_t *threads = calloc((size_t)o->ranks, sizeof *threads);
    fsdp_local *local = NULL;
    bool ok = false;
    if (!ranks || !threads) problem_set(&out->why, "no memory for %d ranks", o->ranks);
    else if (fsdp_local_create((uint32_t)o->ranks, o->has_link ? &link : NULL, &local) != FSDP_OK)
        problem_set(&out->why, "%s", fsdp_last_error());
    else ok = run_threads(j, local, ranks, threads, out);
    if (local) fsdp_local_destroy(local);
    free(threads);
    free(ranks);
    return ok;
}
