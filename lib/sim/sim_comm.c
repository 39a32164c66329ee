/* SPDX-License-Identifier: MIT */
/* The sim communicator, a wire in virtual time, and the sim side channel. One rank stands for all: its peers call what
 * it calls, when it calls it, and say what it says. */
#include "sim.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "attach.h"
#include "call.h"
#include "check.h"
#include "hostmem.h"

typedef struct comm {
    const fsdp_host_allocator *host;
    fsdp__sim_device *dev;
    uint32_t rank, world;
    fsdp_link link;
    uint64_t free_ns; /* when the wire has carried everything so far */
    atomic_bool aborted;
} comm;

typedef struct side {
    const fsdp_host_allocator *host;
    uint32_t rank, world;
    pthread_mutex_t lock;
    fsdp_status status; /* the first failure */
    char sentence[FSDP__SENTENCE_BYTES];
} side;

/* ---- Collectives ---- */

static fsdp_status sim_comm_open(const fsdp_comm_args *args, void **out_comm)
{
    fsdp_sim_config config;
    FSDP_TRY(fsdp__sim_read_config(args->backend_config, &config));
    comm *c = fsdp__host_alloc(args->host, 1, sizeof *c);
    if (c == NULL) return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "sim communicator: the host allocator returned NULL");
    c->host = args->host;
    c->dev = args->dev;
    c->rank = config.rank;
    c->world = config.world;
    c->link = config.link;
    atomic_init(&c->aborted, false);
    *out_comm = c;
    return FSDP_OK;
}

static void sim_comm_close(void *comm_)
{
    comm *c = comm_;
    fsdp__host_free(c->host, c, 1, sizeof *c);
}

/* What one rank sends, by the counts of fsdp_link, in whole bytes. */
static fsdp__u128 wire_bytes(const comm *c, const fsdp_collective *op)
{
    fsdp__u128 buffer = (fsdp__u128)op->count * fsdp_dtype_bytes(op->dtype);
    switch (op->kind) {
    case FSDP_OPERATION_ALL_GATHER:
    case FSDP_OPERATION_REDUCE_SCATTER: return buffer * (c->world - 1);
    case FSDP_OPERATION_ALL_REDUCE: return buffer * 2 * (c->world - 1) / c->world;
    case FSDP_OPERATION_BROADCAST: return buffer;
    default: return 0;
    }
}

static fsdp_status sim_comm_check(void *comm_)
{
    comm *c = comm_;
    if (!atomic_load_explicit(&c->aborted, memory_order_acquire)) return FSDP_OK;
    return fsdp__fail(FSDP_ERR_ABORTED, "sim communicator of rank %" PRIu32 ": aborted", c->rank);
}

/* A group pays the latency once. Its operations follow one another on the wire, and each span says when. */
static fsdp_status sim_comm_enqueue(void *comm_, void *stream, const fsdp_collective *list, uint32_t n)
{
    comm *c = comm_;
    bool free_of_cost = c->world == 1;
    uint64_t latency_ns = free_of_cost ? 0 : c->link.latency_ns;
    fsdp__u128 bytes = 0;
    fsdp_span group;
    FSDP_TRY(sim_comm_check(c));
    if (n == 0) return FSDP_OK;
    for (uint32_t i = 0; i < n; i++) bytes += free_of_cost ? 0 : wire_bytes(c, &list[i]);
    uint64_t ns = fsdp__sim_add_ns(latency_ns, fsdp__sim_transfer_ns(bytes, c->link.bytes_per_second));
    FSDP_TRY(fsdp__sim_occupy(c->dev, stream, free_of_cost ? 0 : c->free_ns, ns, &group));
    c->free_ns = group.end_ns;
    uint64_t start_ns = group.start_ns;
    bytes = 0;
    for (uint32_t i = 0; i < n; i++) {
        bytes += free_of_cost ? 0 : wire_bytes(c, &list[i]);
        ns = fsdp__sim_add_ns(latency_ns, fsdp__sim_transfer_ns(bytes, c->link.bytes_per_second));
        uint64_t end_ns = fsdp__sim_add_ns(group.start_ns, ns);
        if (list[i].span != NULL) *list[i].span = (fsdp_span){start_ns, end_ns};
        start_ns = end_ns;
    }
    return FSDP_OK;
}

static void sim_comm_abort(void *comm_)
{
    comm *c = comm_;
    atomic_store_explicit(&c->aborted, true, memory_order_release);
}

const fsdp_comm_ops fsdp__sim_comm_ops = {
    .size = sizeof(fsdp_comm_ops),
    .name = "sim",
    .open = sim_comm_open,
    .close = sim_comm_close,
    .enqueue = sim_comm_enqueue,
    .check = sim_comm_check,
    .abort = sim_comm_abort,
    .attach = fsdp__attach_nothing,
    .detach = fsdp__detach_nothing,
};

/* ---- Side channel ---- */

static fsdp_status sim_side_open(const fsdp_side_args *args, void **out_side, uint32_t *out_rank, uint32_t *out_world)
{
    fsdp_sim_config config;
    FSDP_TRY(fsdp__sim_read_config(args->backend_config, &config));
    side *s = fsdp__host_alloc(args->host, 1, sizeof *s);
    if (s == NULL) return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "sim side channel: the host allocator returned NULL");
    s->host = args->host;
    s->rank = config.rank;
    s->world = config.world;
    pthread_mutex_init(&s->lock, NULL);
    *out_side = s;
    *out_rank = config.rank;
    *out_world = config.world;
    return FSDP_OK;
}

static void sim_side_close(void *side_)
{
    side *s = side_;
    pthread_mutex_destroy(&s->lock);
    fsdp__host_free(s->host, s, 1, sizeof *s);
}

static fsdp_status sim_side_check(void *side_)
{
    side *s = side_;
    fsdp_status status = FSDP_OK;
    pthread_mutex_lock(&s->lock);
    if (s->status != FSDP_OK) status = fsdp__fail(s->status, "%s", s->sentence);
    pthread_mutex_unlock(&s->lock);
    return status;
}

static fsdp_status sim_side_all_gather(void *side_, const void *mine, void *all, size_t bytes, uint64_t timeout_ns)
{
    side *s = side_;
    (void)timeout_ns; /* nobody is late */
    FSDP_TRY(sim_side_check(s));
    for (uint32_t rank = 0; rank < s->world; rank++) memcpy((char *)all + rank * bytes, mine, bytes);
    return FSDP_OK;
}

/* There is one rank, whose data is everybody's. */
static fsdp_status sim_side_broadcast(void *side_, void *data, size_t bytes, uint32_t root, uint64_t timeout_ns)
{
    (void)data, (void)bytes, (void)root, (void)timeout_ns;
    return sim_side_check(side_);
}

/* The first failure stays. */
static void sim_side_fail(void *side_, fsdp_status status, const char *sentence)
{
    side *s = side_;
    pthread_mutex_lock(&s->lock);
    if (s->status == FSDP_OK) {
        snprintf(s->sentence, sizeof s->sentence, "%s", sentence);
        s->status = status;
    }
    pthread_mutex_unlock(&s->lock);
}

const fsdp_side_ops fsdp__sim_side_ops = {
    .size = sizeof(fsdp_side_ops),
    .open = sim_side_open,
    .close = sim_side_close,
    .all_gather = sim_side_all_gather,
    .broadcast = sim_side_broadcast,
    .fail = sim_side_fail,
    .check = sim_side_check,
};
