/* SPDX-License-Identifier: MIT */
/* Collectives between threads. A communicator is one wire: its operations have numbers, given in host order, and run one
 * after another in that order on whatever streams they are; ranks are matched by the number. The rank's stream thread
 * meets its peers in the room, pulls its own output out of their buffers, and leaves when nobody reads any more. */
#include <stdio.h>
#include <string.h>

#include "check.h"
#include "host.h"
#include "hostmem.h"

typedef struct comm comm;

/* What one enqueue gave: one operation on the wire, a group of n. */
typedef struct group {
    struct group *next_free;
    comm *comm;
    uint64_t number;
    uint32_t n, capacity;
    fsdp_collective list[];
} group;

struct comm {
    const fsdp_host_allocator *host;
    fsdp__host_device *dev;
    fsdp__room *room;
    fsdp_link link;
    uint64_t timeout_ns;
    uint32_t rank, world, index;
    fsdp__attached attached;
    uint64_t n_enqueued; /* the host's */

    pthread_mutex_t lock; /* over the rest, between the host and the streams' threads */
    group *free_groups;   /* used again, so that a warm step allocates nothing */
    uint32_t n_pending;   /* groups enqueued and not run */
    bool closed;
};

/* ---- Names and comparison ---- */

static const char *kind_name(fsdp_operation kind)
{
    switch (kind) {
    case FSDP_OPERATION_ALL_GATHER: return "all-gather";
    case FSDP_OPERATION_REDUCE_SCATTER: return "reduce-scatter";
    case FSDP_OPERATION_ALL_REDUCE: return "all-reduce";
    case FSDP_OPERATION_BROADCAST: return "broadcast";
    case FSDP_OPERATION_BARRIER: return "barrier";
    default: return "?";
    }
}

static const char *label_of(const fsdp_collective *c) { return c->label != NULL ? c->label : ""; }

static bool same_collective(const fsdp_collective *a, const fsdp_collective *b)
{
    return a->kind == b->kind && a->count == b->count && a->dtype == b->dtype &&
           strcmp(label_of(a), label_of(b)) == 0 && (a->kind != FSDP_OPERATION_BROADCAST || a->root == b->root);
}

static bool same(const void *a_, const void *b_, uint32_t *out_place)
{
    const group *a = a_, *b = b_;
    uint32_t n = a->n < b->n ? a->n : b->n;
    for (*out_place = 0; *out_place < n; ++*out_place)
        if (!same_collective(&a->list[*out_place], &b->list[*out_place])) return false;
    *out_place = 0;
    return a->n == b->n;
}

/* "#12 all-gather of h.0 (294912 fp32)"; of a group "#12, 2 of 3: all-gather …". */
static void describe(const void *item, uint32_t place, char *text, size_t bytes)
{
    const group *g = item;
    const fsdp_collective *c = &g->list[place];
    char part[32] = "", root[32] = "", data[96] = "";
    if (g->n > 1) snprintf(part, sizeof part, ", %u of %u:", place + 1, g->n);
    if (c->kind == FSDP_OPERATION_BROADCAST) snprintf(root, sizeof root, " from rank %u", c->root);
    if (c->kind != FSDP_OPERATION_BARRIER)
        snprintf(data, sizeof data, " (%llu %s%s)", (unsigned long long)c->count, fsdp_dtype_name(c->dtype), root);
    snprintf(text, bytes, "#%llu%s %s%s%.200s%s", (unsigned long long)g->number, part, kind_name(c->kind),
             label_of(c)[0] != 0 ? " of " : "", label_of(c), data);
}

static const fsdp__room_kind kind = {same, describe};

/* ---- Data. Each rank writes only its own buffers, and reads of its peers' what no peer writes in the same phase ---- */

/* Of count elements, part p of world begins here; part `world` is the end. */
static uint64_t part_begin(uint64_t count, uint32_t world, uint32_t p)
{
    uint64_t rest = count % world;
    return count / world * p + (p < rest ? p : rest);
}

static const fsdp_collective *of_rank(const comm *c, uint32_t rank, uint32_t i)
{
    const group *g = fsdp__room_item(c->room, rank);
    return &g->list[i];
}

static void copy_elements(const fsdp_collective *to, uint64_t to_index, const void *from, uint64_t from_index,
                          uint64_t count)
{
    size_t each = fsdp_dtype_bytes(to->dtype);
    char *dst = (char *)to->recv + to_index * each;
    const char *src = (const char *)from + from_index * each;
    if (count > 0 && dst != src) memcpy(dst, src, count * each);
}

/* recv[recv_index …] = Σ over ranks of send[send_index …]. */
static void fold(const comm *c, uint32_t i, uint64_t send_index, uint64_t recv_index, uint64_t count)
{
    const fsdp_collective *own = of_rank(c, c->rank, i);
    size_t each = fsdp_dtype_bytes(own->dtype);
    const void *sources[FSDP__LOCAL_WORLD];
    if (count == 0) return;
    for (uint32_t r = 0; r < c->world; r++) sources[r] = (const char *)of_rank(c, r, i)->send + send_index * each;
    fsdp__host_fold((char *)own->recv + recv_index * each, sources, c->world, count, own->dtype);
}

static void first_phase(const comm *c, uint32_t i)
{
    const fsdp_collective *own = of_rank(c, c->rank, i);
    uint64_t count = own->count, begin = part_begin(count, c->world, c->rank),
             end = part_begin(count, c->world, c->rank + 1);
    switch (own->kind) {
    case FSDP_OPERATION_ALL_GATHER:
        /* Beginning with its own, each rank reads another one's memory at a time. */
        for (uint32_t k = 0; k < c->world; k++) {
            uint32_t r = (c->rank + k) % c->world;
            copy_elements(own, r * count, of_rank(c, r, i)->send, 0, count);
        }
        break;
    case FSDP_OPERATION_REDUCE_SCATTER: fold(c, i, c->rank * count, 0, count); break;
    case FSDP_OPERATION_ALL_REDUCE: fold(c, i, begin, begin, end - begin); break;
    case FSDP_OPERATION_BROADCAST: copy_elements(own, 0, of_rank(c, own->root, i)->send, 0, count); break;
    default: break;
    }
}

/* All-reduce: the parts that the peers have folded. */
static void second_phase(const comm *c, uint32_t i)
{
    const fsdp_collective *own = of_rank(c, c->rank, i);
    if (own->kind != FSDP_OPERATION_ALL_REDUCE) return;
    for (uint32_t k = 1; k < c->world; k++) {
        uint32_t r = (c->rank + k) % c->world;
        uint64_t begin = part_begin(own->count, c->world, r), end = part_begin(own->count, c->world, r + 1);
        copy_elements(own, begin, of_rank(c, r, i)->recv, begin, end - begin);
    }
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

static fsdp_status meet(const comm *c, const group *g)
{
    uint64_t start_ns, end_ns;
    bool reduces = false;
    FSDP_TRY(fsdp__room_enter(c->room, c->rank, g->number, g, c->timeout_ns, &start_ns));
    for (uint32_t i = 0; i < g->n; i++) {
        first_phase(c, i);
        if (g->list[i].kind == FSDP_OPERATION_ALL_REDUCE) reduces = true;
    }
    FSDP_TRY(fsdp__room_sync(c->room, reduces));
    if (reduces) {
        for (uint32_t i = 0; i < g->n; i++) second_phase(c, i);
        FSDP_TRY(fsdp__room_sync(c->room, false));
    }
    FSDP_TRY(fsdp__room_leave(c->room, start_ns + link_ns(c, g), &end_ns));
    for (uint32_t i = 0; i < g->n; i++)
        if (g->list[i].span != NULL) *g->list[i].span = (fsdp_span){start_ns, end_ns};
    return FSDP_OK;
}

/* This rank will not come: its peers learn it now, not at their deadline. */
static fsdp_status give_up(const comm *c, const group *g, const char *why)
{
    char what[400], reason[400];
    snprintf(reason, sizeof reason, "%s", why);
    describe(g, 0, what, sizeof what);
    return fsdp__room_fail(c->room, FSDP_ERR_RANK_LOST, "%s: rank %u of %u did not come: %s", what, c->rank, c->world,
                           reason);
}

static void comm_free(comm *c)
{
    while (c->free_groups != NULL) {
        group *g = c->free_groups;
        c->free_groups = g->next_free;
        fsdp__host_free(c->host, g, 1, sizeof *g + g->capacity * sizeof *g->list);
    }
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
    fsdp__room_quit(c->room, c->rank);
    comm_free(c);
}

static fsdp_status run(void *arg, bool skip)
{
    group *g = arg;
    comm *c = g->comm;
    fsdp_status status;
    if (skip) {
        (void)fsdp__host_device_check(c->dev); /* for its sentence */
        status = give_up(c, g, fsdp_last_error());
    } else {
        status = meet(c, g);
    }
    group_release(c, g);
    return status;
}

/* A free group of room for n, or a new one. */
static group *group_take(comm *c, uint32_t n)
{
    pthread_mutex_lock(&c->lock);
    group **link = &c->free_groups, *g;
    while (*link != NULL && (*link)->capacity < n) link = &(*link)->next_free;
    g = *link;
    if (g != NULL) *link = g->next_free;
    pthread_mutex_unlock(&c->lock);
    if (g != NULL) return g;
    uint32_t capacity = n < 4 ? 4 : n;
    g = fsdp__host_alloc(c->host, 1, sizeof *g + capacity * sizeof *g->list);
    if (g == NULL) return NULL;
    g->comm = c;
    g->capacity = capacity;
    return g;
}

static fsdp_status enqueue(void *comm_, void *stream, const fsdp_collective *list, uint32_t n)
{
    comm *c = comm_;
    FSDP_TRY(fsdp__room_check(c->room));
    group *g = group_take(c, n);
    if (g == NULL)
        return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "communicator %u: no host memory for a group of %u", c->index, n);
    g->number = c->n_enqueued + 1;
    g->n = n;
    memcpy(g->list, list, n * sizeof *list);
    pthread_mutex_lock(&c->lock);
    c->n_pending++;
    pthread_mutex_unlock(&c->lock);

    bool enqueued;
    pthread_mutex_lock(&c->dev->lock);
    fsdp_status status = fsdp__host_push(stream, &(fsdp__item){.kind = FSDP__ITEM_CALL, .u.call = {run, g}}, &enqueued);
    pthread_mutex_unlock(&c->dev->lock);
    if (enqueued) {
        c->n_enqueued++;
        return status;
    }
    /* A device that has failed refuses: peers must not wait for this rank. */
    if (fsdp__host_device_check(c->dev) != FSDP_OK) {
        (void)give_up(c, g, fsdp_last_error());
        (void)fsdp__host_device_check(c->dev);
    }
    group_release(c, g);
    return status;
}

/* ---- The communicator ---- */

static void comm_abort(void *comm_)
{
    comm *c = comm_;
    (void)fsdp__room_fail(c->room, FSDP_ERR_ABORTED, "rank %u aborted communicator %u", c->rank, c->index);
}

static fsdp_status comm_check(void *comm_) { return fsdp__room_check(((comm *)comm_)->room); }

static fsdp_status comm_open(const fsdp_comm_args *args, void **out_comm)
{
    fsdp_host_config config;
    FSDP_TRY(fsdp__host_config_read(args->backend_config, &config));
    if (args->index > 1) return fsdp__fail(FSDP_ERR_ARG, "communicator %u: there are 0 and 1", args->index);
    comm *c = fsdp__host_alloc(args->host, 1, sizeof *c);
    if (c == NULL)
        return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "communicator %u: no host memory for %zu bytes", args->index,
                          sizeof *c);
    c->host = args->host;
    c->dev = args->dev;
    c->index = args->index;
    c->rank = config.rank;
    c->world = fsdp__local_world(config.local);
    c->link = fsdp__local_link(config.local);
    c->timeout_ns = args->timeout_ns;
    pthread_mutex_init(&c->lock, NULL);
    fsdp__room_number number = args->index == 0 ? FSDP__ROOM_COMM : FSDP__ROOM_REDUCE_COMM;
    fsdp_status status = fsdp__room_join(&config, args->host, number, &kind, args->timeout_ns, &c->room);
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
    pthread_mutex_lock(&c->lock);
    uint32_t n_pending = c->n_pending;
    c->closed = true;
    if (n_pending > 0)
        (void)fsdp__room_fail(c->room, FSDP_ERR_RANK_LOST, "rank %u closed communicator %u with %u operations enqueued",
                              c->rank, c->index, n_pending);
    pthread_mutex_unlock(&c->lock);
    if (n_pending > 0) return;
    fsdp__room_quit(c->room, c->rank);
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
};
