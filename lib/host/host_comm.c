/* SPDX-License-Identifier: MIT */
/* Collectives between threads or processes. A communicator is one wire: its operations have numbers, given in host order, and
 * run one after another in that order on whatever streams they are; ranks are matched by the number. The rank's stream thread
 * meets its peers in the room, pulls its own output out of their buffers, and leaves when nobody reads any more. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "attach.h"
#include "check.h"
#include "host.h"
#include "host_process.h"
#include "host_watch.h"
#include "hostmem.h"

enum { MAX_PARTS = 16 }; /* of a group: lib/comm.h */

typedef struct comm comm;

/* A buffer as peers find it. Threads: its address. Processes: the piece of the rank's memory that it lies in, and where. */
typedef struct spot {
    uint64_t offset, bytes, into;
} spot;

typedef struct part {
    fsdp__call call;
    spot send, recv;
} part;

/* What a rank brings to a meeting. */
typedef struct item {
    uint64_t n;
    part part[MAX_PARTS];
} item;

/* What one enqueue gave: one operation on the wire, a group of n. */
typedef struct group {
    struct group *next_free;
    comm *comm;
    uint64_t number;
    uint32_t n;
    fsdp_collective list[MAX_PARTS];
    item item;
} group;

struct comm {
    const fsdp_host_allocator *host;
    fsdp__host_device *dev;
    fsdp__room room;
    fsdp__place *place; /* threads */
    fsdp__peers *peers; /* processes */
    fsdp__watch *watch; /* their ends; on communicator 0 */
    fsdp_link link;
    uint64_t timeout_ns;
    uint32_t rank, world, index;
    pthread_mutex_t telling;       /* over side */
    const fsdp_side_ops *side_ops; /* with side */
    void *side;                    /* NULL: none, or this is closed, and the side may be */
    fsdp__attached attached;
    uint64_t n_enqueued; /* the host's */

    pthread_mutex_t lock; /* over the rest, between the host and the streams' threads */
    group *free_groups;   /* used again, so that a warm step allocates nothing */
    uint32_t n_pending;   /* groups enqueued and not run */
    bool closed;
};

/* ---- Comparison ---- */

static bool same(const void *a_, const void *b_, uint32_t *out_place)
{
    const item *a = a_, *b = b_;
    uint32_t n = (uint32_t)(a->n < b->n ? a->n : b->n);
    for (*out_place = 0; *out_place < n; ++*out_place)
        if (a->part[*out_place].call.hash != b->part[*out_place].call.hash) return false;
    *out_place = 0;
    return a->n == b->n;
}

static void say(const void *item_, uint32_t place, char *text, size_t bytes)
{
    const item *it = item_;
    fsdp__call_describe(&it->part[place < it->n ? place : it->n - 1].call, text, bytes);
}

static const fsdp__room_kind kind = {same, say, sizeof(item)};
_Static_assert(sizeof(item) <= FSDP__ROOM_ITEM_BYTES, "an item");

/* ---- Buffers ---- */

/* What an operation reads of a rank's send buffer, and writes into its receive buffer. */
static void sizes_of(const fsdp_collective *c, uint32_t world, uint64_t *out_sent, uint64_t *out_received)
{
    uint64_t bytes = c->count * fsdp_dtype_bytes(c->dtype);
    *out_sent = c->kind == FSDP_OPERATION_REDUCE_SCATTER ? bytes * world : bytes;
    *out_received = c->kind == FSDP_OPERATION_ALL_GATHER ? bytes * world : bytes;
}

static fsdp_status find_spot(const comm *c, const part *p, const char *which, const void *ptr, uint64_t bytes,
                             spot *out_spot)
{
    *out_spot = (spot){0, 0, (uint64_t)(uintptr_t)ptr};
    if (c->peers == NULL || bytes == 0) return FSDP_OK;
    fsdp__piece piece;
    if (fsdp__memory_find(&c->dev->memory, ptr, bytes, &piece)) {
        *out_spot = (spot){piece.offset, piece.bytes, (uint64_t)((const char *)ptr - piece.ptr)};
        return FSDP_OK;
    }
    char what[256];
    fsdp__call_describe(&p->call, what, sizeof what);
    return fsdp__fail(
        FSDP_ERR_ARG,
        "%s: %llu bytes of %s are not device memory (fsdp_allocator_alloc, or pinned memory): ranks that are "
        "processes cannot see them",
        what, (unsigned long long)bytes, which);
}

static fsdp_status fill_item(const comm *c, group *g)
{
    g->item.n = g->n;
    for (uint32_t i = 0; i < g->n; i++) {
        const fsdp_collective *call = &g->list[i];
        part *p = &g->item.part[i];
        uint64_t sent, received;
        sizes_of(call, c->world, &sent, &received);
        fsdp__call_fill(&p->call, call, g->number, i, g->n);
        FSDP_TRY(find_spot(c, p, "send", call->send, sent, &p->send));
        FSDP_TRY(find_spot(c, p, "recv", call->recv, received, &p->recv));
    }
    return FSDP_OK;
}

/* Where this rank reads a buffer of a peer's; NULL if it cannot be mapped. */
static const char *see(const comm *c, uint32_t rank, const spot *at)
{
    if (c->peers == NULL) return (const char *)(uintptr_t)at->into;
    return fsdp__peers_at(c->peers, rank, at->offset, at->bytes, at->into);
}

static const char *send_of(const comm *c, const group *g, uint32_t rank, uint32_t i)
{
    if (rank == c->rank) return g->list[i].send;
    const item *it = fsdp__room_item(&c->room, rank);
    return see(c, rank, &it->part[i].send);
}

static const char *recv_of(const comm *c, const group *g, uint32_t rank, uint32_t i)
{
    if (rank == c->rank) return g->list[i].recv;
    const item *it = fsdp__room_item(&c->room, rank);
    return see(c, rank, &it->part[i].recv);
}

/* ---- Data. Each rank writes only its own buffers, and reads of its peers' what no peer writes in the same phase.
 * False: a peer's memory cannot be mapped. ---- */

/* Of count elements, part p of world begins here; part `world` is the end. */
static uint64_t part_begin(uint64_t count, uint32_t world, uint32_t p)
{
    uint64_t rest = count % world;
    return count / world * p + (p < rest ? p : rest);
}

static bool copy_elements(const fsdp_collective *to, uint64_t to_index, const char *from, uint64_t from_index,
                          uint64_t count)
{
    size_t each = fsdp_dtype_bytes(to->dtype);
    if (count == 0) return true;
    if (from == NULL) return false;
    char *dst = (char *)to->recv + to_index * each;
    const char *src = from + from_index * each;
    if (dst != src) memcpy(dst, src, count * each);
    return true;
}

/* recv[recv_index …] = Σ over ranks of send[send_index …]. */
static bool fold(const comm *c, const group *g, uint32_t i, uint64_t send_index, uint64_t recv_index, uint64_t count)
{
    const fsdp_collective *own = &g->list[i];
    size_t each = fsdp_dtype_bytes(own->dtype);
    const void *sources[FSDP__ROOM_WORLD];
    if (count == 0) return true;
    for (uint32_t r = 0; r < c->world; r++) {
        const char *send = send_of(c, g, r, i);
        if (send == NULL) return false;
        sources[r] = send + send_index * each;
    }
    fsdp__host_fold((char *)own->recv + recv_index * each, sources, c->world, count, own->dtype);
    return true;
}

static bool first_phase(const comm *c, const group *g, uint32_t i)
{
    const fsdp_collective *own = &g->list[i];
    uint64_t count = own->count, begin = part_begin(count, c->world, c->rank),
             end = part_begin(count, c->world, c->rank + 1);
    if (count == 0) return true;
    switch (own->kind) {
    case FSDP_OPERATION_ALL_GATHER:
        /* Beginning with its own, each rank reads another one's memory at a time. */
        for (uint32_t k = 0; k < c->world; k++) {
            uint32_t r = (c->rank + k) % c->world;
            if (!copy_elements(own, r * count, send_of(c, g, r, i), 0, count)) return false;
        }
        return true;
    case FSDP_OPERATION_REDUCE_SCATTER: return fold(c, g, i, c->rank * count, 0, count);
    case FSDP_OPERATION_ALL_REDUCE: return fold(c, g, i, begin, begin, end - begin);
    case FSDP_OPERATION_BROADCAST: return copy_elements(own, 0, send_of(c, g, own->root, i), 0, count);
    default: return true;
    }
}

/* All-reduce: the parts that the peers have folded. */
static bool second_phase(const comm *c, const group *g, uint32_t i)
{
    const fsdp_collective *own = &g->list[i];
    if (own->kind != FSDP_OPERATION_ALL_REDUCE) return true;
    for (uint32_t k = 1; k < c->world; k++) {
        uint32_t r = (c->rank + k) % c->world;
        uint64_t begin = part_begin(own->count, c->world, r), end = part_begin(own->count, c->world, r + 1);
        if (end > begin && !copy_elements(own, begin, recv_of(c, g, r, i), begin, end - begin)) return false;
    }
    return true;
}

/* ---- The link ---- */

/* What one rank sends, by host.h's counts. */
static double bytes_sent(const comm *c, const fsdp_collective *op)
{
    double bytes = (double)op->count * (double)fsdp_dtype_bytes(op->dtype), others = (double)(c->world - 1);
    switch (op->kind) {
    case FSDP_OPERATION_ALL_GATHER:
    case FSDP_OPERATION_REDUCE_SCATTER: return bytes * others;
    case FSDP_OPERATION_ALL_REDUCE: return 2.0 * bytes * others / (double)c->world;
    case FSDP_OPERATION_BROADCAST: return bytes;
    default: return 0.0;
    }
}

static uint64_t link_ns(const comm *c, const group *g)
{
    double bytes = 0.0;
    for (uint32_t i = 0; i < g->n; i++) bytes += bytes_sent(c, &g->list[i]);
    if (c->link.bytes_per_second == 0) return c->link.latency_ns;
    return c->link.latency_ns + (uint64_t)(bytes * 1e9 / (double)c->link.bytes_per_second);
}

/* ---- Running ---- */

static void run_phase(comm *c, const group *g, bool (*phase)(const comm *, const group *, uint32_t))
{
    for (uint32_t i = 0; i < g->n; i++) {
        if (phase(c, g, i)) continue;
        char what[256];
        int reason = errno;
        fsdp__call_describe(&g->item.part[i].call, what, sizeof what);
        (void)fsdp__room_fail(&c->room, FSDP_ERR_DEVICE, "%s: rank %u cannot map the memory of a peer: %s", what,
                              c->rank, strerror(reason));
    }
}

/* A phase that fails goes to its sync all the same: what it brought is no longer read on return. */
static fsdp_status meet(comm *c, const group *g)
{
    uint64_t start_ns, end_ns;
    bool reduces = false;
    FSDP_TRY(fsdp__room_enter(&c->room, g->number, &g->item, c->timeout_ns, &start_ns));
    for (uint32_t i = 0; i < g->n; i++) reduces = reduces || g->list[i].kind == FSDP_OPERATION_ALL_REDUCE;
    run_phase(c, g, first_phase);
    FSDP_TRY(fsdp__room_sync(&c->room, reduces));
    if (reduces) {
        run_phase(c, g, second_phase);
        FSDP_TRY(fsdp__room_sync(&c->room, false));
    }
    FSDP_TRY(fsdp__room_leave(&c->room, start_ns + link_ns(c, g), &end_ns));
    for (uint32_t i = 0; i < g->n; i++)
        if (g->list[i].span != NULL) *g->list[i].span = (fsdp_span){start_ns, end_ns};
    return FSDP_OK;
}

/* This rank will not come: its peers learn it now, not at their deadline. */
static fsdp_status give_up(comm *c, const group *g)
{
    char what[400], reason[400];
    fsdp_status why = fsdp__host_device_check(c->dev);
    snprintf(reason, sizeof reason, "%s", fsdp_last_error());
    fsdp__call_describe(&g->item.part[0].call, what, sizeof what);
    /* Aborted it is not lost: whoever aborts tells why. */
    return fsdp__room_fail(&c->room, why == FSDP_ERR_ABORTED ? why : FSDP_ERR_RANK_LOST,
                           "%s: rank %u of %u did not come: %s", what, c->rank, c->world, reason);
}

/* Every rank's host hears of it now; one that is inside a host call would wait there for as long again. The sentence is in
 * fsdp_last_error(), and stays. */
static fsdp_status tell_hosts(comm *c, fsdp_status status)
{
    if (status != FSDP_ERR_MISMATCH && status != FSDP_ERR_RANK_LOST) return status;
    char sentence[FSDP__SENTENCE_BYTES];
    snprintf(sentence, sizeof sentence, "%s", fsdp_last_error());
    pthread_mutex_lock(&c->telling);
    if (c->side != NULL) c->side_ops->fail(c->side, status, sentence);
    pthread_mutex_unlock(&c->telling);
    return fsdp__fail(status, "%s", sentence);
}

/* The watch's. Who has left the room is free to end. */
static void peer_gone(void *arg, uint32_t rank)
{
    comm *c = arg;
    if (fsdp__room_has_left(&c->room, rank)) return;
    (void)tell_hosts(c, fsdp__fail(FSDP_ERR_RANK_LOST, "rank %u is gone: its process ended", rank));
    (void)fsdp__room_fail(&c->room, FSDP_ERR_RANK_LOST, "rank %u is gone: its process ended", rank);
}

/* Out of the room, and away with it. */
static void quit(comm *c)
{
    fsdp__room_quit(&c->room);
    if (c->place != NULL) fsdp__place_leave(c->place);
    fsdp__peers_close(c->peers);
}

static void comm_free(comm *c)
{
    while (c->free_groups != NULL) {
        group *g = c->free_groups;
        c->free_groups = g->next_free;
        fsdp__host_free(c->host, g, 1, sizeof *g);
    }
    pthread_mutex_destroy(&c->telling);
    pthread_mutex_destroy(&c->lock);
    fsdp__host_free(c->host, c, 1, sizeof *c);
}

static void group_release(comm *c, group *g)
{
    pthread_mutex_lock(&c->lock);
    g->next_free = c->free_groups;
    c->free_groups = g;
    c->n_pending--;
    bool last = c->closed && c->n_pending == 0;
    pthread_mutex_unlock(&c->lock);
    if (!last) return;
    quit(c);
    comm_free(c);
}

static fsdp_status run(void *arg, bool skip)
{
    group *g = arg;
    comm *c = g->comm;
    fsdp_status status = tell_hosts(c, skip ? give_up(c, g) : meet(c, g));
    group_release(c, g);
    return status;
}

/* A free group, or a new one; it counts as pending. */
static group *group_take(comm *c)
{
    pthread_mutex_lock(&c->lock);
    group *g = c->free_groups;
    if (g != NULL) c->free_groups = g->next_free;
    else g = fsdp__host_alloc(c->host, 1, sizeof *g);
    if (g != NULL) {
        g->comm = c;
        c->n_pending++;
    }
    pthread_mutex_unlock(&c->lock);
    return g;
}

static fsdp_status enqueue(void *comm_, void *stream, const fsdp_collective *list, uint32_t n)
{
    comm *c = comm_;
    assert(n > 0 && n <= MAX_PARTS);
    FSDP_TRY(fsdp__room_check(&c->room));
    group *g = group_take(c);
    if (g == NULL)
        return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "communicator %u: no host memory for a group of %u", c->index, n);
    g->number = c->n_enqueued + 1;
    g->n = n;
    memcpy(g->list, list, n * sizeof *list);
    fsdp_status status = fill_item(c, g);
    if (status != FSDP_OK) {
        group_release(c, g);
        return status;
    }

    bool enqueued;
    pthread_mutex_lock(&c->dev->lock);
    status = fsdp__host_push(stream, &(fsdp__item){.kind = FSDP__ITEM_CALL, .u.call = {run, g}}, &enqueued);
    pthread_mutex_unlock(&c->dev->lock);
    if (enqueued) {
        c->n_enqueued++;
        return status;
    }
    /* A device that has failed refuses: peers must not wait for this rank. */
    if (fsdp__host_device_check(c->dev) != FSDP_OK) {
        (void)give_up(c, g);
        (void)fsdp__host_device_check(c->dev);
    }
    group_release(c, g);
    return status;
}

/* ---- The communicator ---- */

/* What the side channel says is why, and is what every rank hears: peers see this room fail before their own channel does. */
static void comm_abort(void *comm_)
{
    comm *c = comm_;
    fsdp_status why = c->side != NULL ? c->side_ops->check(c->side) : FSDP_OK; /* it is open as long as this is */
    if (why != FSDP_OK) (void)fsdp__room_fail(&c->room, why, "%s", fsdp_last_error());
    (void)fsdp__room_fail(&c->room, FSDP_ERR_ABORTED, "rank %u aborted communicator %u", c->rank, c->index);
}

static fsdp_status comm_check(void *comm_) { return fsdp__room_check(&((comm *)comm_)->room); }

static fsdp_status join(comm *c, const fsdp_comm_args *args, const fsdp__host_setup *setup)
{
    fsdp__room_shared *shared;
    if (setup->processes) {
        FSDP_TRY(fsdp__peers_open(args, setup, &c->peers));
        shared = fsdp__peers_room(c->peers);
    } else {
        fsdp__room_number number = args->index == 0 ? FSDP__ROOM_COMM : FSDP__ROOM_REDUCE_COMM;
        FSDP_TRY(fsdp__place_join(setup->config.local, setup->rank, args->host, number, args->timeout_ns, &c->place));
        shared = fsdp__place_shared(c->place);
    }
    fsdp__room_init(&c->room, shared, &kind, setup->rank, setup->world, setup->processes, args->timeout_ns);
    if (c->peers == NULL || c->index != 0) return FSDP_OK;
    int pidfd[FSDP__ROOM_WORLD];
    fsdp__peers_take_pidfds(c->peers, pidfd);
    c->watch = fsdp__watch_open(c->host, pidfd, c->world, peer_gone, c);
    return FSDP_OK;
}

static fsdp_status comm_open(const fsdp_comm_args *args, void **out_comm)
{
    fsdp__host_setup setup;
    FSDP_TRY(fsdp__host_setup_read(args->backend_config, &setup));
    if (args->index > 1) return fsdp__fail(FSDP_ERR_ARG, "communicator %u: there are 0 and 1", args->index);
    comm *c = fsdp__host_alloc(args->host, 1, sizeof *c);
    if (c == NULL)
        return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "communicator %u: no host memory for %zu bytes", args->index,
                          sizeof *c);
    c->host = args->host;
    c->dev = args->dev;
    c->index = args->index;
    c->rank = setup.rank;
    c->world = setup.world;
    c->link = setup.link;
    c->timeout_ns = args->timeout_ns;
    c->side_ops = args->side_ops;
    c->side = args->side;
    pthread_mutex_init(&c->lock, NULL);
    pthread_mutex_init(&c->telling, NULL);
    fsdp_status status = join(c, args, &setup);
    if (status != FSDP_OK) {
        comm_free(c);
        return status;
    }
    c->attached = (fsdp__attached){NULL, comm_abort, c};
    fsdp__host_attach(c->dev, &c->attached);
    *out_comm = c;
    return FSDP_OK;
}

/* Groups that are still enqueued run into the failed room; the last of them frees the communicator. */
static void comm_close(void *comm_)
{
    comm *c = comm_;
    fsdp__host_detach(c->dev, &c->attached);
    fsdp__watch_close(c->watch);
    pthread_mutex_lock(&c->telling);
    c->side = NULL;
    pthread_mutex_unlock(&c->telling);
    pthread_mutex_lock(&c->lock);
    uint32_t n_pending = c->n_pending;
    c->closed = true;
    if (n_pending > 0)
        (void)fsdp__room_fail(&c->room, FSDP_ERR_RANK_LOST,
                              "rank %u closed communicator %u with %u operations enqueued", c->rank, c->index,
                              n_pending);
    pthread_mutex_unlock(&c->lock);
    if (n_pending > 0) return;
    quit(c);
    comm_free(c);
}

const fsdp_comm_ops fsdp__host_comm_ops = {
    .size = sizeof fsdp__host_comm_ops,
    .name = "host",
    .open = comm_open,
    .close = comm_close,
    .enqueue = enqueue,
    .check = comm_check,
    .abort = comm_abort,
    .attach = fsdp__attach_nothing,
    .detach = fsdp__detach_nothing,
};
