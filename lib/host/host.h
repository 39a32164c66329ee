/* SPDX-License-Identifier: MIT */
/* The host backend: a thread a stream; ranks as threads of one process or as processes of one machine.
 *
 *  device  one lock; under it the queues of all streams, the points and the first error. Operations run without it.
 *  point   what one event record stands for. A wait keeps the point that it was given, so a later record of the event
 *          neither disturbs nor satisfies it, and destroying the event leaves it alone.
 *  room    where the ranks of one generation meet (host_room.h): a communicator's wire, or the side channel of threads.
 *  memory  device memory: anonymous; where ranks are processes, pieces of one file without a name, which peers map too.
 *
 * Lock order: a device's lock, then a room's. Nothing takes a device's lock while it holds a room's. */
#ifndef FSDP_LIB_HOST_HOST_H
#define FSDP_LIB_HOST_HOST_H

#include "fsdp/host.h"
#include "host_memory.h"
#include "host_room.h"

/* ---- host_config.c ---- */

/* The backend's config, or its defaults for NULL, with what follows from it. Errors: ARG, UNSUPPORTED. */
typedef struct fsdp__host_setup {
    fsdp_host_config config;
    uint32_t rank, world;
    bool processes; /* of a world of more than one */
    fsdp_link link;
} fsdp__host_setup;

fsdp_status fsdp__host_setup_read(const void *given, fsdp__host_setup *out_setup);

/* ---- host_local.c: ranks of one process ---- */

typedef enum fsdp__room_number {
    FSDP__ROOM_COMM = 0,        /* communicator 0 */
    FSDP__ROOM_REDUCE_COMM = 1, /* communicator 1 */
    FSDP__ROOM_SIDE = 2,
    FSDP__N_ROOMS = 3
} fsdp__room_number;

typedef struct fsdp__place fsdp__place;

/* Open the place of local's ranks (NULL: of one) that has this number, and wait until every rank has. Errors: ARG (the rank
 * is there already), NO_HOST_MEMORY, RANK_LOST. */
fsdp_status fsdp__place_join(fsdp_local *local, uint32_t rank, const fsdp_host_allocator *host,
                             fsdp__room_number number, uint64_t timeout_ns, fsdp__place **out_place);
fsdp__room_shared *fsdp__place_shared(fsdp__place *place);
/* What each rank can tell while its side channel is open; tell is NULL otherwise. */
typedef struct fsdp__tellers {
    pthread_mutex_t lock; /* held while one tells */
    fsdp_side_words words[FSDP__ROOM_WORLD];
} fsdp__tellers;
fsdp__tellers *fsdp__place_tellers(fsdp__place *place);
void fsdp__place_leave(fsdp__place *place);
uint32_t fsdp__local_world(const fsdp_local *local);
fsdp_link fsdp__local_link(const fsdp_local *local);

/* ---- host_device.c ---- */

typedef struct fsdp__point {
    struct fsdp__point *next_made, *next_free;
    uint32_t refs; /* its event, its record in the queue, its waiters */
    bool reached;
    bool skipped; /* reached because the device has failed: what came before it may not have run */
    pthread_cond_t cond;
} fsdp__point;

/* Somebody to wake when the device is aborted: its communicators. */
typedef struct fsdp__attached {
    struct fsdp__attached *next;
    void (*abort)(void *arg);
    void *arg;
} fsdp__attached;

typedef struct fsdp__host_device {
    const fsdp_host_allocator *host;
    uint32_t debug, rank;
    uint64_t jitter_ns, jitter_seed;
    fsdp__memory memory;
    fsdp_log_fn log;
    void *log_arg;
    atomic_flag warned; /* that pinned memory is not locked */

    pthread_mutex_t lock;
    pthread_cond_t failed; /* status has become an error: sleepers wake */
    atomic_int status;     /* written under the lock, once */
    char sentence[FSDP__SENTENCE_BYTES];
    fsdp__point *points, *free_points;
    fsdp__attached *attached;
    uint32_t n_streams, n_streams_made, n_events;
} fsdp__host_device;

/* The first error stays; from then on streams skip what they are given, and nobody waits. */
void fsdp__host_device_fail(fsdp__host_device *dev, fsdp_status status, const char *sentence);
fsdp_status fsdp__host_device_check(void *dev);
void fsdp__host_attach(fsdp__host_device *dev, fsdp__attached *attached);
void fsdp__host_detach(fsdp__host_device *dev, fsdp__attached *attached);
void fsdp__point_release(fsdp__host_device *dev, fsdp__point *point); /* with the lock held; NULL is nothing */

/* ---- host_stream.c ---- */

typedef enum fsdp__item_kind {
    FSDP__ITEM_OPERATION = 0,
    FSDP__ITEM_RECORD = 1,
    FSDP__ITEM_WAIT = 2,
    FSDP__ITEM_CALL = 3
} fsdp__item_kind;

/* One entry of a stream's queue, copied by value. It owns a reference of its point. */
typedef struct fsdp__item {
    fsdp__item_kind kind;
    fsdp_span *span;
    union {
        fsdp_device_op op;
        fsdp__point *point; /* WAIT: NULL for an event that was never recorded */
        /* skip: the device has failed; release what arg holds and tell whoever counts on it. */
        struct {
            fsdp_status (*run)(void *arg, bool skip);
            void *arg;
        } call;
    } u;
} fsdp__item;

typedef struct fsdp__host_stream {
    fsdp__host_device *dev;
    pthread_t thread;
    pthread_cond_t work, idle;
    fsdp__item *ring;    /* item i lies in ring[i % capacity] */
    size_t capacity;     /* a power of two */
    uint64_t head, tail; /* items taken, items given */
    uint32_t number;     /* of the streams of its device, in order of creation */
    bool running, stopping;
    char name[32]; /* for sentences */
} fsdp__host_stream;

fsdp_status fsdp__host_stream_create(void *dev, const char *name, bool high_priority, void **out_stream);
void fsdp__host_stream_destroy(void *dev, void *stream);
fsdp_status fsdp__host_stream_drain(void *dev, void *stream, uint64_t timeout_ns);
/* Give the stream an item, or return the device's error. With the lock held; with FSDP_DEBUG_SYNC it is let go meanwhile
 * and the item has run on return. On an error nothing was enqueued, or (FSDP_DEBUG_SYNC) the item has failed. */
fsdp_status fsdp__host_push(fsdp__host_stream *s, const fsdp__item *item, bool *out_enqueued);

/* ---- host_kernels.c: arithmetic ---- */

/* Run any operation but DELAY. */
void fsdp__host_kernel(const fsdp_device_op *op);
/* dst[i] = ((sources[0][i] + sources[1][i]) + …) in fp32, rounded once. dst may be one of the sources. */
void fsdp__host_fold(void *dst, const void *const *sources, uint32_t n_sources, uint64_t count, fsdp_dtype dtype);

/* ---- host_comm.c, host_side.c ---- */

extern const fsdp_comm_ops fsdp__host_comm_ops;
extern const fsdp_side_ops fsdp__host_side_ops;

#endif
