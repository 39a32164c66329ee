/* SPDX-License-Identifier: MIT */
/* What the parts of the exploration device share.
 *
 *  explore.c         opening, choices and policies, the schedule as text
 *  explore_every.c   every order
 *  explore_run.c     queues and steps
 *  explore_host.c    hosts and whose turn it is; deadlock
 *  explore_device.c  the device table: memory, streams, events
 *  explore_effect.c  what an operation reads when it begins and writes when it ends; poison
 *  explore_room.c    where ranks meet; the side channel
 *  explore_meeting.c collectives as steps
 *  explore_comm.c    the collectives' table
 *
 * One lock over everything; only host calls run without it. A stream's head is its first entry that is not over; each
 * stream has at most one possible step, so that a choice is a choice of a stream. */
#ifndef FSDP_TESTS_EXPLORE_PARTS_H
#define FSDP_TESTS_EXPLORE_PARTS_H

#include <pthread.h>

#include "explore.h"

enum { EXPLORE_RANKS = 64, EXPLORE_SENTENCE = 1024, EXPLORE_N_ROOMS = 3, EXPLORE_SIDE = 2 };

typedef struct explore_device explore_device;
typedef struct explore_stream explore_stream;
typedef struct explore_comm explore_comm;
typedef struct explore_room explore_room;
typedef struct explore_group explore_group;

/* What one event record stands for; a wait keeps the point that it was given. */
typedef struct explore_point {
    struct explore_point *next_free;
    uint32_t refs; /* its event, its record in the queue, its waiters */
    bool reached;
    uint32_t stream; /* where it is, for the wait-for graph */
    uint64_t index;
} explore_point;

typedef enum explore_item_kind {
    EXPLORE_OPERATION = 0,
    EXPLORE_RECORD = 1,
    EXPLORE_WAIT = 2,
    EXPLORE_GROUP = 3
} explore_item_kind;

typedef struct explore_item {
    explore_item_kind kind;
    uint64_t number;   /* of all that the world was given, in host order */
    uint64_t given_ns; /* when */
    fsdp_span *span;
    union {
        fsdp_device_op op;
        explore_point *point; /* WAIT: NULL for an event that was never recorded */
        explore_group *group;
    } u;
} explore_item;

/* Where the bytes lie that an entry touches, so that most of a queue is passed over quickly. Nothing: begin = end. */
typedef struct explore_reach {
    const char *begin, *end;
    uint64_t number; /* the entry's */
} explore_reach;

struct explore_stream {
    explore_device *dev;
    uint32_t number; /* of the world's, in order of creation */
    char name[24];
    bool high_priority;
    explore_item *ring; /* entry i lies in ring[i & (capacity - 1)] */
    explore_reach *reach;
    size_t capacity;
    uint64_t head, tail;
    uint64_t free_since_ns; /* when the entry before the head was over */

    /* The head, once it has begun. */
    bool begun, calling; /* calling: its host call has not returned */
    bool dropped;        /* it has no effect: it touches what it must not, or its memory is gone */
    uint64_t start_ns, not_before_ns;
    pthread_t caller; /* with free threads, the thread of a host call */
    bool has_caller;
    char *copy; /* what it has read, and what it will write */
    size_t copy_bytes;

    uint64_t priority; /* PCT */
};

struct explore_device {
    explore_device *next;
    explore *x;
    uint32_t rank, debug;
    fsdp_status status;
    char sentence[EXPLORE_SENTENCE];
    explore_comm *comms;
    uint64_t bytes; /* of memory */
};

struct explore_comm {
    explore_comm *next; /* of its device */
    explore *x;
    explore_device *dev;
    explore_room *room;
    uint32_t rank, index;
    uint64_t timeout_ns;
    uint64_t n_enqueued, n_over;
    uint32_t n_pending;
    bool closed;
    explore_group *free_groups;
};

/* What one enqueue gave: one operation on the communicator's wire. */
struct explore_group {
    explore_group *next_free;
    explore_comm *comm;
    uint64_t number;
    uint64_t deadline_ns; /* once begun, with free threads */
    uint32_t n, capacity;
    struct {
        fsdp_collective c;
        char *sent, *result; /* copies, in its stream's */
    } part[];
};

/* One operation of a communicator: a rank may be at the next one while its peers end this one, never further. */
typedef struct explore_meeting {
    uint64_t arrived, over; /* bit r: rank r */
    uint64_t start_ns;
    explore_stream *stream[EXPLORE_RANKS];
} explore_meeting;

struct explore_room {
    explore_room *next;
    explore *x;
    uint32_t number; /* communicator 0 or 1, or EXPLORE_SIDE */
    uint64_t opened, closed;
    fsdp_status status;
    char sentence[EXPLORE_SENTENCE];
    explore_meeting meeting[2]; /* operation n is in meeting[n % 2] */
    /* The side channel's gather that is on. */
    uint64_t arrived, n_complete;
    size_t bytes[EXPLORE_RANKS];
    const void *mine[EXPLORE_RANKS];
    void *all[EXPLORE_RANKS];
};

/* Memory that the device has, or had: what was given back is kept out of the way for a while, so that late users show. */
typedef struct explore_block {
    char *begin, *end;
    uint32_t rank;
    bool live;
    fsdp_memory_kind kind;
} explore_block;

typedef struct explore_freed {
    char *begin, *end;
    uint64_t number;  /* entries below it were given before */
    uint32_t pending; /* of these, how many touch it and are not over */
} explore_freed_range;

/* A host that waits. */
typedef struct explore_wait {
    bool (*done)(const void *arg);
    const void *arg;
    const char *what; /* "drains", … */
    /* One of them is not NULL. */
    const explore_stream *stream;
    const explore_point *point;
    const explore_room *room; /* it waits for peers */
} explore_wait;

typedef struct explore_host {
    pthread_cond_t turn;
    const explore_wait *wait; /* NULL: it goes on as soon as it is its turn */
    bool expired, left;
} explore_host;

typedef struct explore_run_length {
    uint16_t pick, times;
} explore_run_length;

/* Choices of a depth-first search: pick of n, at each choice. */
typedef struct explore_path {
    struct {
        uint32_t pick, n;
    } * at;
    size_t length, capacity, next;
} explore_path;

struct explore {
    explore_config config;
    bool eager;         /* every order: what commutes with everything is no choice, and hosts are not held up */
    explore_path *path; /* every order */
    uint64_t asleep;    /* every order: bit n is the step of stream n, see explore_every.c */
    bool is_known;
    bool frees; /* explore_freed has been called */
    pthread_mutex_t lock;
    pthread_cond_t changed; /* free threads wait here */
    uint32_t n_waiting;

    explore_device *devices;
    explore_room *rooms, *forming[EXPLORE_N_ROOMS];
    explore_stream **streams, **can; /* can: those with a possible step, while one is chosen */
    uint32_t n_streams, capacity_streams, n_streams_made;
    explore_point *free_points;
    explore_block *blocks; /* by address */
    size_t n_blocks, n_dead_blocks, capacity_blocks;
    explore_freed_range *freed;
    size_t n_freed, capacity_freed;

    uint64_t n_items, backlog, n_queries; /* given; given and not over; queries since the last step */
    uint64_t n_steps, clock_ns, hash, random;
    uint64_t backlog_scale, host_priority, drop_at[8], n_drops; /* policies */

    explore_run_length *picks, *given; /* made; to be replayed */
    size_t n_picks, capacity_picks, n_given, at_given;
    uint32_t used_given;
    char *text;

    explore_host host[EXPLORE_RANKS];
    uint32_t n_hosts, turn;

    char complaint[4096];
};

/* ---- explore.c ---- */

void explore__complain(explore *x, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Choose among x->can[0 … n); NULL: the host goes on, if it may. */
explore_stream *explore__choose(explore *x, uint32_t n, bool may_go_on);
uint64_t explore__random(explore *x);
bool explore__grow(void *array, size_t *capacity, size_t needed, size_t each);

/* ---- explore_every.c ---- */

explore_stream *explore__find_eager(const explore *x, uint32_t n);
uint32_t explore__pick_of_path(explore *x, uint32_t n);

/* ---- explore_run.c ---- */

uint64_t explore__now(explore *x);
static inline explore_item *explore__item(const explore_stream *s, uint64_t index)
{
    return &s->ring[index & (s->capacity - 1)];
}
static inline explore_item *explore__head(const explore_stream *s) { return explore__item(s, s->head); }
/* With the lock held, all of these. Give the stream an entry, or return its device's error. */
fsdp_status explore__push(explore_stream *s, explore_item item);
/* One step, if there is one, and the host does not go on instead. */
bool explore__step(explore *x, bool may_go_on);
/* Some steps, as the policy likes, while the host goes on. */
void explore__pause(explore *x);
void explore__query(explore *x); /* before an event's state is told */
void explore__wake(explore *x);  /* something has changed that a free thread may wait for */
/* The first error stays. */
void explore__device_break(explore_device *dev, fsdp_status status, const char *sentence);
/* What is enqueued on a broken device is skipped, but for what is running. */
void explore__device_skip(explore_device *dev);
void explore__device_fail(explore_device *dev, fsdp_status status, const char *sentence); /* both */
fsdp_status explore__device_check(const explore_device *dev);
/* The head is over. */
void explore__over(explore_stream *s);
void explore__point_release(explore *x, explore_point *point);
bool explore__idle(const void *stream);

/* ---- explore_host.c ---- */

/* Until done; false if it never will be, or not in time. */
bool explore__block(explore *x, const explore_wait *wait, uint64_t timeout_ns);
/* No step is possible, and the host that has the turn asks for what has not come: let others go on, unless they have been
 * asking for long too. */
void explore__yield(explore *x, bool others_may_help);

/* ---- explore_effect.c ---- */

typedef struct explore_range {
    char *ptr;
    uint64_t bytes;
    bool write, may_be_host;
} explore_range;

/* The i-th range that the entry touches; false: there are no more. */
bool explore__range(const explore_item *item, uint32_t i, explore_range *out_range);
explore_reach explore__reach(const explore_item *item);
/* Are all ranges where they may be? If not, that is a complaint. */
bool explore__check_ranges(explore_stream *s, const explore_item *item);
char *explore__copy_room(explore_stream *s, size_t bytes); /* NULL: no memory, which is a complaint */
void explore__op_begin(explore_stream *s, const fsdp_device_op *op);
void explore__op_end(explore_stream *s, const fsdp_device_op *op);
void explore__freed_begin(explore *x, const explore_item *item); /* an entry begins: what it touches is its own */
void explore__freed_over(explore_stream *s);                     /* the head */
void explore__freed_drop(explore *x, const char *begin, const char *end);

/* ---- explore_device.c ---- */

explore_block *explore__find_block(explore *x, const char *ptr); /* the first that ends behind ptr; NULL: none */
void explore__blocks_close(explore *x);
/* The stream has an entry more: some steps may follow; with FSDP_DEBUG_SYNC it is over on return. */
fsdp_status explore__after_push(explore_stream *s);

/* ---- explore_room.c ---- */

explore_room *explore__room_join(explore *x, uint32_t number, uint32_t rank, uint64_t timeout_ns,
                                 fsdp_status *out_status);
void explore__room_quit(explore_room *room, uint32_t rank);
void explore__room_fail(explore_room *room, fsdp_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
fsdp_status explore__room_check(const explore_room *room);
uint64_t explore__all_ranks(const explore *x);
void explore__name_ranks(uint64_t ranks, char *text, size_t bytes);
/* A rank of the world; its config. */
fsdp_status explore__rank_read(const void *config, explore_rank *out_rank);
extern const fsdp_side_ops explore__side_ops;

/* ---- explore_meeting.c ---- */

bool explore__group_can_begin(const explore_group *group);
bool explore__group_can_end(explore_stream *s, const explore_group *group);
bool explore__group_is_complete(const explore_group *group);
void explore__group_begin(explore_stream *s, explore_group *group);
void explore__group_end(explore_stream *s, explore_group *group);
/* Its rank will not come: its peers learn it now. */
void explore__group_skip(explore_group *group, const char *why);
void explore__group_describe(const explore_group *group, uint32_t place, char *text, size_t bytes);
void explore__meetings_fail(explore_room *room);
void explore__meetings_close(explore_room *room, uint32_t rank); /* the rank comes no more */
/* A meeting that nobody else will come to any more: fail it. False: there is none. */
bool explore__meeting_lose(explore *x, uint64_t now_ns);

/* ---- explore_comm.c ---- */

extern const fsdp_comm_ops explore__comm_ops;
void explore__group_release(explore_group *group);

#endif
