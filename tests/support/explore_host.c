/* SPDX-License-Identifier: MIT */
/* Hosts: who goes on when. Whoever blocks hands the turn to a host that can go on; if there is none, it takes steps. Free
 * threads take steps when they block, each by itself. */
#include <stdio.h>
#include <stdlib.h>

#include "explore_parts.h"
#include "monotonic.h"

enum { NOBODY = UINT32_MAX };

/* ---- Free threads ---- */

/* When something may become possible that is not now. */
static uint64_t next_deadline(const explore *x, uint64_t deadline_ns)
{
    for (uint32_t i = 0; i < x->n_streams; i++) {
        const explore_stream *s = x->streams[i];
        if (s->head == s->tail || !s->begun || s->calling) continue;
        const explore_item *head = explore__head(s);
        bool group_waits = head->kind == EXPLORE_GROUP && !explore__group_is_complete(head->u.group);
        uint64_t then = group_waits ? head->u.group->deadline_ns : s->not_before_ns;
        if (then < deadline_ns) deadline_ns = then;
    }
    return deadline_ns;
}

static bool block_free(explore *x, const explore_wait *wait, uint64_t timeout_ns)
{
    uint64_t deadline_ns;
    if (__builtin_add_overflow(explore__now(x), timeout_ns, &deadline_ns)) deadline_ns = UINT64_MAX;
    while (!wait->done(wait->arg)) {
        if (timeout_ns > 0 && explore__step(x, false)) continue;
        uint64_t now = explore__now(x);
        if (now >= deadline_ns) return false;
        if (explore__meeting_lose(x, now)) continue;
        uint64_t until = next_deadline(x, deadline_ns);
        x->n_waiting++;
        (void)fsdp__cond_until(&x->changed, &x->lock, until);
        x->n_waiting--;
    }
    return true;
}

/* ---- Turns ---- */

static bool can_go_on(const explore_host *h)
{
    return !h->left && (h->wait == NULL || h->expired || h->wait->done(h->wait->arg));
}

/* The next rank behind `me` whose host can go on. */
static uint32_t next_host(const explore *x, uint32_t me)
{
    for (uint32_t i = 1; i < x->n_hosts; i++)
        if (can_go_on(&x->host[(me + i) % x->n_hosts])) return (me + i) % x->n_hosts;
    return NOBODY;
}

static void wait_for_turn(explore *x, uint32_t me)
{
    while (x->turn != me) pthread_cond_wait(&x->host[me].turn, &x->lock);
}

static void give_turn(explore *x, uint32_t to)
{
    x->turn = to;
    pthread_cond_signal(&x->host[to].turn);
}

static size_t describe_head(const explore_stream *s, char *text, size_t bytes)
{
    const explore_item *head = explore__head(s);
    char what[400] = "";
    if (head->kind == EXPLORE_WAIT)
        snprintf(what, sizeof what, "waits for entry %llu of stream %u", (unsigned long long)head->u.point->index,
                 head->u.point->stream);
    if (head->kind == EXPLORE_GROUP) {
        char group[300];
        explore__group_describe(head->u.group, 0, group, sizeof group);
        snprintf(what, sizeof what, "%s in communicator %u's %s",
                 s->begun ? "waits for peers" : "is behind another one", head->u.group->comm->index, group);
    }
    int length = snprintf(text, bytes, "; stream %u (rank %u, %s) at entry %llu %s", s->number, s->dev->rank, s->name,
                          (unsigned long long)s->head, what);
    return length < 0 ? 0 : (size_t)length < bytes ? (size_t)length : bytes - 1;
}

/* Who waits for what. */
static void complain_of_deadlock(explore *x)
{
    char text[3500] = "";
    size_t at = 0;
    for (uint32_t r = 0; r < x->n_hosts && at < sizeof text - 1; r++) {
        const explore_wait *wait = x->host[r].wait;
        if (wait == NULL) continue;
        char stream[32] = "";
        if (wait->room == NULL)
            snprintf(stream, sizeof stream, " stream %u",
                     wait->stream != NULL ? wait->stream->number : wait->point->stream);
        int length = snprintf(text + at, sizeof text - at, "; rank %u's host %s%s", r, wait->what, stream);
        at += length > 0 ? (size_t)length : 0;
    }
    for (uint32_t i = 0; i < x->n_streams && at < sizeof text - 1; i++)
        if (x->streams[i]->head < x->streams[i]->tail) at += describe_head(x->streams[i], text + at, sizeof text - at);
    explore__complain(x, "deadlock: nothing can go on%s", text);
}

/* No step, no host: somebody's waiting ends in an error. First collectives, whose peers will not come; then those who
 * wait for the device; then those who wait for other hosts. */
static void break_deadlock(explore *x)
{
    bool any_left = false;
    for (uint32_t r = 0; r < x->n_hosts; r++) any_left |= x->host[r].left;
    if (!any_left && x->n_hosts == x->config.world) complain_of_deadlock(x);
    if (explore__meeting_lose(x, UINT64_MAX)) return;
    for (int for_peers = 0; for_peers < 2; for_peers++) {
        for (uint32_t r = 0; r < x->n_hosts; r++) {
            explore_host *h = &x->host[r];
            if (h->left || h->wait == NULL || (h->wait->room != NULL) != (for_peers == 1)) continue;
            h->expired = true;
            return;
        }
    }
}

void explore__yield(explore *x, bool others_may_help)
{
    uint32_t me = x->turn, next = next_host(x, me);
    if (next == NOBODY || !others_may_help) {
        break_deadlock(x);
        return;
    }
    give_turn(x, next);
    wait_for_turn(x, me);
    x->asleep = 0;
}

bool explore__block(explore *x, const explore_wait *wait, uint64_t timeout_ns)
{
    if (x->config.free_threads) return block_free(x, wait, timeout_ns);
    if (wait->done(wait->arg)) return true;
    if (timeout_ns == 0) return false;
    uint32_t me = x->turn;
    explore_host *h = &x->host[me];
    h->wait = wait;
    h->expired = false;
    while (!wait->done(wait->arg) && !h->expired) {
        uint32_t next = next_host(x, me);
        if (next != NOBODY) {
            give_turn(x, next);
            wait_for_turn(x, me);
        } else if (!explore__step(x, false)) {
            break_deadlock(x);
        }
    }
    h->wait = NULL;
    x->asleep = 0;
    return wait->done(wait->arg);
}

typedef struct rank_job {
    explore *x;
    uint32_t rank;
    void (*fn)(uint32_t rank, void *arg);
    void *arg;
} rank_job;

/* A rank has returned: somebody else's turn, be it to wait. */
static void leave(explore *x, uint32_t me)
{
    x->host[me].left = true;
    uint32_t next = next_host(x, me);
    for (uint32_t r = 0; r < x->n_hosts && next == NOBODY; r++)
        if (!x->host[r].left) next = r;
    if (next != NOBODY) give_turn(x, next);
}

static void *rank_main(void *arg)
{
    rank_job *job = arg;
    explore *x = job->x;
    if (!x->config.free_threads) {
        pthread_mutex_lock(&x->lock);
        wait_for_turn(x, job->rank);
        pthread_mutex_unlock(&x->lock);
    }
    job->fn(job->rank, job->arg);
    pthread_mutex_lock(&x->lock);
    if (!x->config.free_threads) leave(x, job->rank);
    pthread_mutex_unlock(&x->lock);
    return NULL;
}

void explore_run_ranks(explore *x, void (*fn)(uint32_t rank, void *arg), void *arg)
{
    pthread_t thread[EXPLORE_RANKS];
    rank_job job[EXPLORE_RANKS];
    uint32_t world = x->config.world;
    pthread_mutex_lock(&x->lock);
    x->n_hosts = world;
    x->turn = 0;
    for (uint32_t r = 0; r < world; r++) {
        x->host[r].wait = NULL;
        x->host[r].expired = x->host[r].left = false;
        job[r] = (rank_job){x, r, fn, arg};
        if (pthread_create(&thread[r], NULL, rank_main, &job[r]) != 0) abort(); /* no test can go on without */
    }
    pthread_mutex_unlock(&x->lock);
    for (uint32_t r = 0; r < world; r++) pthread_join(thread[r], NULL);
    x->n_hosts = 1;
    x->turn = 0;
    x->host[0].left = false;
}
