/* SPDX-License-Identifier: MIT */
/* The device table. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "check.h"
#include "explore_parts.h"
#include "hash.h"

enum { ALIGNMENT = 256, GRANULARITY = 4096, FIRST_CAPACITY = 64, MAX_DEAD_BLOCKS = 1024, POISON = 0xa5 };
static const uint64_t device_bytes = 8ull << 30; /* more would be a machine's whole memory: it is all written to */

static fsdp_status no_host_memory(const char *what)
{
    return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "exploration device: no host memory for %s", what);
}

static fsdp_status device_open(const fsdp_device_args *args, void **out_dev, fsdp_device_caps *out_caps)
{
    explore_rank rank;
    FSDP_TRY(explore__rank_read(args->backend_config, &rank));
    explore_device *dev = calloc(1, sizeof *dev);
    if (dev == NULL) return no_host_memory("a device");
    dev->x = rank.x;
    dev->rank = rank.rank;
    dev->debug = args->debug;
    pthread_mutex_lock(&dev->x->lock);
    dev->next = dev->x->devices;
    dev->x->devices = dev;
    pthread_mutex_unlock(&dev->x->lock);
    *out_caps = (fsdp_device_caps){.size = sizeof *out_caps,
                                   .alignment = ALIGNMENT,
                                   .granularity = GRANULARITY,
                                   .has_data = true,
                                   .can_host_call = true};
    *out_dev = dev;
    return FSDP_OK;
}

static void device_close(void *dev_)
{
    explore_device *dev = dev_;
    explore *x = dev->x;
    pthread_mutex_lock(&x->lock);
    explore_device **link = &x->devices;
    while (*link != dev) link = &(*link)->next;
    *link = dev->next;
    pthread_mutex_unlock(&x->lock);
    free(dev);
}

/* ---- Memory. Blocks are sorted by address and do not overlap ---- */

explore_block *explore__find_block(explore *x, const char *ptr)
{
    size_t low = 0, high = x->n_blocks;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (x->blocks[middle].end <= ptr) low = middle + 1;
        else high = middle;
    }
    return low < x->n_blocks ? &x->blocks[low] : NULL;
}

static void remove_block(explore *x, explore_block *block)
{
    size_t i = (size_t)(block - x->blocks);
    munmap(block->begin, (size_t)(block->end - block->begin));
    memmove(block, block + 1, (--x->n_blocks - i) * sizeof *block);
}

void explore__blocks_close(explore *x)
{
    while (x->n_blocks > 0) remove_block(x, &x->blocks[x->n_blocks - 1]);
}

static bool insert_block(explore *x, explore_block block)
{
    if (!explore__grow(&x->blocks, &x->capacity_blocks, x->n_blocks + 1, sizeof *x->blocks)) return false;
    const explore_block *behind = explore__find_block(x, block.begin);
    size_t i = behind != NULL ? (size_t)(behind - x->blocks) : x->n_blocks;
    memmove(&x->blocks[i + 1], &x->blocks[i], (x->n_blocks++ - i) * sizeof block);
    x->blocks[i] = block;
    return true;
}

static fsdp_status mem_alloc(void *dev_, uint64_t bytes, fsdp_memory_kind kind, void **out_ptr)
{
    explore_device *dev = dev_;
    explore *x = dev->x;
    fsdp_status full = kind == FSDP_MEMORY_KIND_PINNED ? FSDP_ERR_NO_HOST_MEMORY : FSDP_ERR_NO_MEMORY;
    if (bytes > device_bytes - dev->bytes)
        return fsdp__fail(full, "exploration device: %llu bytes wanted, %llu of %llu are taken",
                          (unsigned long long)bytes, (unsigned long long)dev->bytes, (unsigned long long)device_bytes);
    char *ptr = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (ptr == MAP_FAILED)
        return fsdp__fail(full, "exploration device: mmap of %llu bytes failed", (unsigned long long)bytes);
    memset(ptr, POISON, bytes);
    pthread_mutex_lock(&x->lock);
    bool fits = insert_block(x, (explore_block){ptr, ptr + bytes, dev->rank, true, kind});
    if (fits) dev->bytes += bytes;
    pthread_mutex_unlock(&x->lock);
    if (!fits) {
        munmap(ptr, bytes);
        return no_host_memory("the list of allocations");
    }
    *out_ptr = ptr;
    return FSDP_OK;
}

/* What has begun and touches it loses its effect; what begins later is told. */
static void find_users(explore *x, const explore_block *block)
{
    for (uint32_t i = 0; i < x->n_streams; i++) {
        explore_stream *s = x->streams[i];
        if (!s->begun) continue;
        explore_range r;
        for (uint32_t k = 0; explore__range(explore__head(s), k, &r); k++) {
            if (r.bytes == 0 || r.ptr >= block->end || r.ptr + r.bytes <= block->begin) continue;
            s->dropped = true;
            if (s->dev->status == FSDP_OK)
                explore__complain(x, "rank %u gives %p back to the device while entry %llu of stream %u (%s) uses it",
                                  block->rank, (void *)block->begin, (unsigned long long)s->head, s->number, s->name);
        }
    }
}

static void mem_free(void *dev_, void *ptr, uint64_t bytes, fsdp_memory_kind kind)
{
    explore_device *dev = dev_;
    explore *x = dev->x;
    pthread_mutex_lock(&x->lock);
    explore_block *block = explore__find_block(x, ptr);
    if (block == NULL || block->begin != (char *)ptr || block->end != (char *)ptr + bytes || block->kind != kind ||
        !block->live || block->rank != dev->rank) {
        explore__complain(x, "rank %u gives back %llu bytes at %p, which are no allocation of its", dev->rank,
                          (unsigned long long)bytes, ptr);
        pthread_mutex_unlock(&x->lock);
        return;
    }
    find_users(x, block);
    explore__freed_drop(x, block->begin, block->end);
    dev->bytes -= bytes;
    block->live = false;
    /* The addresses stay taken, so that a late use is not taken for a use of something else. */
    madvise(ptr, bytes, MADV_DONTNEED);
    mprotect(ptr, bytes, PROT_NONE);
    if (++x->n_dead_blocks > MAX_DEAD_BLOCKS) {
        explore_block *first = x->blocks;
        while (first->live) first++;
        remove_block(x, first);
        x->n_dead_blocks--;
    }
    pthread_mutex_unlock(&x->lock);
}

/* ---- Streams ---- */

static void stream_free(explore_stream *s)
{
    free(s->ring);
    free(s->reach);
    free(s->copy);
    free(s);
}

static fsdp_status stream_create(void *dev_, const char *name, bool high_priority, void **out_stream)
{
    explore_device *dev = dev_;
    explore *x = dev->x;
    explore_stream *s = calloc(1, sizeof *s);
    if (s == NULL) return no_host_memory("a stream");
    s->ring = malloc(FIRST_CAPACITY * sizeof *s->ring);
    s->reach = malloc(FIRST_CAPACITY * sizeof *s->reach);
    if (s->ring == NULL || s->reach == NULL) {
        stream_free(s);
        return no_host_memory("a stream's queue");
    }
    s->capacity = FIRST_CAPACITY;
    s->dev = dev;
    s->high_priority = high_priority;
    snprintf(s->name, sizeof s->name, "%s", name != NULL ? name : "");
    pthread_mutex_lock(&x->lock);
    size_t capacity = x->capacity_streams, capacity_can = x->capacity_streams;
    if (!explore__grow(&x->streams, &capacity, x->n_streams + 1, sizeof(explore_stream *)) ||
        !explore__grow(&x->can, &capacity_can, x->n_streams + 1, sizeof(explore_stream *))) {
        pthread_mutex_unlock(&x->lock);
        stream_free(s);
        return no_host_memory("the list of streams");
    }
    x->capacity_streams = (uint32_t)capacity;
    x->streams[x->n_streams++] = s;
    s->number = x->n_streams_made++;
    s->free_since_ns = explore__now(x);
    s->priority = fsdp__mix(fsdp__mix(x->config.seed) ^ s->number) | 1ull << 32; /* above those that have fallen */
    pthread_mutex_unlock(&x->lock);
    *out_stream = s;
    return FSDP_OK;
}

static void stream_destroy(void *dev_, void *stream)
{
    explore_device *dev = dev_;
    explore *x = dev->x;
    explore_stream *s = stream;
    pthread_mutex_lock(&x->lock);
    const explore_wait wait = {explore__idle, s, "destroys", s, NULL, NULL};
    if (!explore__block(x, &wait, UINT64_MAX))
        explore__device_fail(dev, FSDP_ERR_TIMEOUT, "a stream is destroyed that can never be idle");
    explore__block(x, &wait, UINT64_MAX); /* a collective that has begun may be left */
    uint32_t i = 0;
    while (x->streams[i] != s) i++;
    memmove(&x->streams[i], &x->streams[i + 1], (--x->n_streams - i) * sizeof(explore_stream *));
    pthread_mutex_unlock(&x->lock);
    stream_free(s);
}

static fsdp_status stream_drain(void *dev_, void *stream, uint64_t timeout_ns)
{
    explore_device *dev = dev_;
    explore_stream *s = stream;
    pthread_mutex_lock(&dev->x->lock);
    const explore_wait wait = {explore__idle, s, "drains", s, NULL, NULL};
    bool idle = explore__block(dev->x, &wait, timeout_ns);
    uint64_t left = s->tail - s->head;
    fsdp_status status = explore__device_check(dev);
    pthread_mutex_unlock(&dev->x->lock);
    if (status == FSDP_OK && !idle)
        status = fsdp__fail(FSDP_ERR_TIMEOUT, "stream is not idle after %.3f s: %llu operations are left",
                            (double)timeout_ns * 1e-9, (unsigned long long)left);
    return status;
}

/* The stream has an entry more: with FSDP_DEBUG_SYNC it is over on return. With the lock held. */
fsdp_status explore__after_push(explore_stream *s)
{
    explore_device *dev = s->dev;
    if (!(dev->debug & FSDP_DEBUG_SYNC)) {
        explore__pause(dev->x);
        return FSDP_OK;
    }
    const explore_wait wait = {explore__idle, s, "waits for", s, NULL, NULL};
    explore__block(dev->x, &wait, UINT64_MAX);
    return explore__device_check(dev);
}

/* ---- Events ---- */

typedef struct event {
    explore_point *point; /* of its last record; NULL before the first */
} event;

static fsdp_status event_create(void *dev, void **out_event)
{
    (void)dev;
    event *e = calloc(1, sizeof *e);
    if (e == NULL) return no_host_memory("an event");
    *out_event = e;
    return FSDP_OK;
}

static void event_destroy(void *dev_, void *event_)
{
    explore *x = ((explore_device *)dev_)->x;
    event *e = event_;
    pthread_mutex_lock(&x->lock);
    explore__point_release(x, e->point);
    pthread_mutex_unlock(&x->lock);
    free(e);
}

static explore_point *point_take(explore *x)
{
    explore_point *point = x->free_points;
    if (point != NULL) x->free_points = point->next_free;
    else point = malloc(sizeof *point);
    if (point != NULL) *point = (explore_point){.refs = 1};
    return point;
}

static fsdp_status event_record(void *dev_, void *event_, void *stream, fsdp_span *span)
{
    explore *x = ((explore_device *)dev_)->x;
    explore_stream *s = stream;
    event *e = event_;
    pthread_mutex_lock(&x->lock);
    explore_point *point = point_take(x);
    fsdp_status status = point == NULL ? no_host_memory("a record") : FSDP_OK;
    if (status == FSDP_OK) {
        point->stream = s->number;
        point->index = s->tail;
        status = explore__push(s, (explore_item){.kind = EXPLORE_RECORD, .span = span, .u.point = point});
        if (status != FSDP_OK) explore__point_release(x, point);
    }
    if (status == FSDP_OK) {
        point->refs++;
        explore__point_release(x, e->point);
        e->point = point;
        status = explore__after_push(s);
    }
    pthread_mutex_unlock(&x->lock);
    return status;
}

static fsdp_status stream_wait(void *dev_, void *stream, void *event_, fsdp_span *span)
{
    explore *x = ((explore_device *)dev_)->x;
    explore_point *point = ((event *)event_)->point;
    pthread_mutex_lock(&x->lock);
    fsdp_status status = explore__push(stream, (explore_item){.kind = EXPLORE_WAIT, .span = span, .u.point = point});
    if (status == FSDP_OK) {
        if (point != NULL) point->refs++;
        status = explore__after_push(stream);
    }
    pthread_mutex_unlock(&x->lock);
    return status;
}

static bool is_reached(const void *point) { return ((const explore_point *)point)->reached; }

static fsdp_status event_query(void *dev_, void *event_, bool *out_done)
{
    explore_device *dev = dev_;
    const event *e = event_;
    pthread_mutex_lock(&dev->x->lock);
    fsdp_status status = explore__device_check(dev);
    if (status == FSDP_OK && e->point != NULL && !e->point->reached) {
        explore__query(dev->x);
        status = explore__device_check(dev); /* the steps may have broken it */
    }
    if (status == FSDP_OK) *out_done = e->point == NULL || e->point->reached;
    pthread_mutex_unlock(&dev->x->lock);
    return status;
}

/* The device may fail meanwhile, though the record's stream is stuck. */
typedef struct event_wait_arg {
    const explore_device *dev;
    const explore_point *point;
} event_wait_arg;

static bool is_reached_or_failed(const void *arg_)
{
    const event_wait_arg *arg = arg_;
    return arg->dev->status != FSDP_OK || is_reached(arg->point);
}

static fsdp_status event_wait(void *dev_, void *event_, uint64_t timeout_ns)
{
    explore_device *dev = dev_;
    bool reached = true;
    pthread_mutex_lock(&dev->x->lock);
    explore_point *point = ((event *)event_)->point;
    if (point != NULL) {
        point->refs++;
        const event_wait_arg arg = {dev, point};
        const explore_wait wait = {is_reached_or_failed, &arg, "waits for an event of", NULL, point, NULL};
        reached = explore__block(dev->x, &wait, timeout_ns);
        explore__point_release(dev->x, point);
    }
    fsdp_status status = explore__device_check(dev);
    pthread_mutex_unlock(&dev->x->lock);
    if (status == FSDP_OK && !reached)
        status = fsdp__fail(FSDP_ERR_TIMEOUT, "event has not happened after %.3f s", (double)timeout_ns * 1e-9);
    return status;
}

/* ---- Operations, errors, time ---- */

static fsdp_status launch(void *dev_, void *stream, const fsdp_device_op *op, fsdp_span *span)
{
    explore *x = ((explore_device *)dev_)->x;
    if (op->kind < FSDP_OPERATION_COPY || op->kind > FSDP_OPERATION_STEP_INPUT)
        return fsdp__fail(FSDP_ERR_UNSUPPORTED, "exploration device: operation %d is none of a stream's",
                          (int)op->kind);
    pthread_mutex_lock(&x->lock);
    fsdp_status status = explore__push(stream, (explore_item){.kind = EXPLORE_OPERATION, .span = span, .u.op = *op});
    if (status == FSDP_OK) status = explore__after_push(stream);
    pthread_mutex_unlock(&x->lock);
    return status;
}

static fsdp_status check(void *dev_)
{
    explore_device *dev = dev_;
    pthread_mutex_lock(&dev->x->lock);
    fsdp_status status = explore__device_check(dev);
    pthread_mutex_unlock(&dev->x->lock);
    return status;
}

static void device_abort(void *dev_)
{
    explore_device *dev = dev_;
    char sentence[64];
    snprintf(sentence, sizeof sentence, "rank %u: the device was aborted", dev->rank);
    pthread_mutex_lock(&dev->x->lock);
    explore__device_break(dev, FSDP_ERR_ABORTED, sentence);
    /* Before anything is skipped: what the device does not run is aborted, not lost. */
    for (explore_comm *comm = dev->comms; comm != NULL; comm = comm->next)
        explore__room_fail(comm->room, FSDP_ERR_ABORTED, "rank %u aborted communicator %u", comm->rank, comm->index);
    explore__device_skip(dev);
    pthread_mutex_unlock(&dev->x->lock);
}

static uint64_t now_ns(void *dev_)
{
    explore_device *dev = dev_;
    pthread_mutex_lock(&dev->x->lock);
    uint64_t now = explore__now(dev->x);
    pthread_mutex_unlock(&dev->x->lock);
    return now;
}

static const fsdp_device_ops device_ops = {
    .size = sizeof device_ops,
    .name = "explore",
    .open = device_open,
    .close = device_close,
    .mem_alloc = mem_alloc,
    .mem_free = mem_free,
    .stream_create = stream_create,
    .stream_destroy = stream_destroy,
    .stream_drain = stream_drain,
    .event_create = event_create,
    .event_destroy = event_destroy,
    .event_record = event_record,
    .stream_wait = stream_wait,
    .event_query = event_query,
    .event_wait = event_wait,
    .launch = launch,
    .check = check,
    .abort = device_abort,
    .now_ns = now_ns,
};

static const fsdp_backend backend = {
    .size = sizeof backend,
    .name = "explore",
    .device = &device_ops,
    .comm = &explore__comm_ops,
    .side = &explore__side_ops,
};

const fsdp_backend *explore_backend(void) { return &backend; }
