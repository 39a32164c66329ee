/* SPDX-License-Identifier: MIT */
/* Every order, by depth-first search: the program runs from its beginning again and again, each time along the path of
 * choices before, up to the last that has another possibility.
 *
 * Of orders that differ only in neighbours that do not matter to each other, one is run (sleep sets: Godefroid, Partial-Order
 * Methods, 1996): where a step was tried already and another one is taken instead, the first sleeps until one is taken that
 * it matters to. Steps matter to each other if they touch common bytes and one of them writes, or if one of them may let a
 * host go on. Nothing sleeps when a host goes on: what it does is not known. */
#include <stdlib.h>

#include "explore_parts.h"

/* Reaching a record, passing a wait and a delay touch nothing: to do them at once leaves every order of the rest. */
static bool is_eager(const explore_item *item)
{
    if (item->kind == EXPLORE_OPERATION) return item->u.op.kind == FSDP_OPERATION_DELAY;
    return item->kind == EXPLORE_RECORD || item->kind == EXPLORE_WAIT;
}

explore_stream *explore__find_eager(const explore *x, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        if (is_eager(explore__head(x->can[i]))) return x->can[i];
    return NULL;
}

/* ---- What matters to what ---- */

static bool is_host_call(const explore_item *item)
{
    return item->kind == EXPLORE_OPERATION && item->u.op.kind == FSDP_OPERATION_HOST_CALL;
}

/* Does it read what it writes? */
static bool updates(const explore_item *item)
{
    if (item->kind != EXPLORE_OPERATION) return false;
    fsdp_operation kind = item->u.op.kind;
    return kind == FSDP_OPERATION_ADD || kind == FSDP_OPERATION_SQUARE_SUM || kind == FSDP_OPERATION_STEP_INPUT ||
           kind == FSDP_OPERATION_STEP_RESULT || kind == FSDP_OPERATION_ADAMW;
}

/* What the stream's next step touches: a beginning reads, an end writes. Where the test frees bytes, an end may also poison
 * what the operation has read, and a beginning takes over what it will write. */
static bool step_range(const explore_stream *s, uint32_t i, explore_range *out_range)
{
    const explore_item *item = explore__head(s);
    if (!explore__range(item, i, out_range)) return false;
    bool touched = s->begun ? out_range->write : !out_range->write || updates(item);
    if (!touched && !s->dev->x->frees) out_range->bytes = 0;
    return true;
}

static bool matter(const explore_stream *a, const explore_stream *b)
{
    if (is_host_call(explore__head(a)) || is_host_call(explore__head(b))) return true;
    if (!a->begun && !b->begun) return false;
    explore_range p, q;
    for (uint32_t i = 0; step_range(a, i, &p); i++)
        for (uint32_t k = 0; step_range(b, k, &q); k++)
            if (p.bytes > 0 && q.bytes > 0 && p.ptr < q.ptr + q.bytes && q.ptr < p.ptr + p.bytes) return true;
    return false;
}

/* Is the step all that keeps a host? Not if anything else is before what the host waits for, on its stream. */
static bool may_wake_host(const explore *x, const explore_host *h, const explore_stream *step)
{
    if (h->left || h->wait == NULL || h->wait->room != NULL) return false;
    const explore_stream *s = h->wait->stream;
    uint64_t end = s != NULL ? s->tail : 0;
    for (uint32_t i = 0; s == NULL && i < x->n_streams; i++) {
        if (x->streams[i]->number != h->wait->point->stream) continue;
        s = x->streams[i];
        end = h->wait->point->index;
    }
    for (uint64_t i = s != NULL ? s->head : 0; i < end; i++) {
        bool is_step = s == step && i == s->head && s->begun;
        if (!is_step && !is_eager(explore__item(s, i))) return false;
    }
    return true;
}

static bool may_wake(const explore *x, const explore_stream *step)
{
    for (uint32_t r = 0; r < x->n_hosts; r++)
        if (may_wake_host(x, &x->host[r], step)) return true;
    return false;
}

/* ---- The path ---- */

static uint64_t bit_of(const explore_stream *s) { return s->number < 64 ? (uint64_t)1 << s->number : 0; }

/* The next choice of a path, or a new end of it. */
static uint32_t next_of_path(explore *x, uint32_t n)
{
    explore_path *path = x->path;
    if (path->next == path->length) {
        if (!explore__grow(&path->at, &path->capacity, path->length + 1, sizeof *path->at)) {
            explore__complain(x, "no host memory for the search");
            return 0;
        }
        path->at[path->length].pick = 0;
        path->at[path->length++].n = n;
    }
    if (path->at[path->next].n != n)
        explore__complain(
            x, "choice %zu has %u possibilities, and had %u before: the run depends on more than its schedule",
            path->next, n, path->at[path->next].n);
    uint32_t pick = path->at[path->next++].pick;
    return pick < n ? pick : 0;
}

/* The pick-th of can[] that is awake. */
static uint32_t find_awake(const explore *x, uint32_t pick)
{
    uint32_t i = 0;
    for (;; i++)
        if (!(x->asleep & bit_of(x->can[i])) && pick-- == 0) return i;
}

/* All that slept, and all that was tried here before, sleeps while the step does not matter to it. */
static void fall_asleep(explore *x, uint32_t n, uint32_t step)
{
    uint64_t asleep = 0;
    for (uint32_t i = 0; i < n; i++) {
        const explore_stream *s = x->can[i];
        bool known = (x->asleep & bit_of(s)) || i < step;
        if (known && i != step && !may_wake(x, s) && !matter(s, x->can[step])) asleep |= bit_of(s);
    }
    x->asleep = asleep;
}

uint32_t explore__pick_of_path(explore *x, uint32_t n)
{
    uint32_t n_awake = 0;
    for (uint32_t i = 0; i < n; i++) n_awake += !(x->asleep & bit_of(x->can[i]));
    /* All that is possible was tried elsewhere: the run is brought to its end, and branches no more. */
    if (n_awake == 0) x->is_known = true;
    if (x->is_known) return 0;
    uint32_t step = find_awake(x, n_awake > 1 ? next_of_path(x, n_awake) : 0);
    if (!x->config.all_orders) fall_asleep(x, n, step);
    return step;
}

/* The next path in depth-first order; false: that was the last. */
static bool advance(explore_path *path)
{
    while (path->length > 0 && path->at[path->length - 1].pick + 1 == path->at[path->length - 1].n) path->length--;
    path->next = 0;
    if (path->length == 0) return false;
    path->at[path->length - 1].pick++;
    return true;
}

uint64_t explore_every(const explore_config *config, bool (*run)(explore *x, void *arg), void *arg, uint64_t max_runs,
                       bool *out_all)
{
    explore_path path = {NULL, 0, 0, 0};
    explore_config each = *config;
    each.policy = EXPLORE_IN_ORDER;
    each.free_threads = false;
    uint64_t n_runs = 0;
    bool more = true, goes_on = true;
    while (more && goes_on && n_runs < max_runs) {
        explore *x = explore_open(&each);
        if (x == NULL) break;
        x->eager = true;
        x->path = &path;
        goes_on = run(x, arg);
        explore_close(x);
        n_runs++;
        more = advance(&path);
    }
    free(path.at);
    if (out_all != NULL) *out_all = !more;
    return n_runs;
}
