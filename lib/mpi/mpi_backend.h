/* SPDX-License-Identifier: MIT */
/* The MPI backend: the host backend's device, collectives by messages between two ranks, the star as side channel.
 *
 *  engine  how MPI may be called. Every call of ours returns at once, so that a lock around each is enough for
 *          MPI_THREAD_SERIALIZED, and whoever waits can look at the clock and at the side channel between two calls.
 *  device  the host's, wrapped: a communicator that fails becomes the device's first error, with its sentence, and memory
 *          that MPI may still touch is kept.
 *  comm    one wire. Each operation begins with a meeting at rank 0, which compares what the ranks have brought; then the
 *          bytes move. Why not MPI's own collectives: their sums have no fixed order; one that has begun cannot be taken
 *          back, nor tell who is missing; and counts and displacements are ints.
 *
 * Lock order: a device's lock, then a communicator's. Neither is held in a call of the side channel that may wait. */
#ifndef FSDP_LIB_MPI_BACKEND_H
#define FSDP_LIB_MPI_BACKEND_H

#include <mpi.h>
#include <pthread.h>
#include <stdatomic.h>

#include "call.h"
#include "check.h"
#include "fsdp/backend.h"
#include "fsdp/launch.h"
#include "fsdp/mpi.h"
#include "monotonic.h"

typedef struct fsdp__mpi_comm fsdp__mpi_comm;
typedef struct fsdp__mpi_side fsdp__mpi_side;

/* ---- mpi_engine.c: the program's MPI ---- */

typedef struct fsdp__mpi_engine {
    pthread_mutex_t lock;
    bool serialized; /* one call at a time */
} fsdp__mpi_engine;

static inline void fsdp__mpi_enter(fsdp__mpi_engine *engine)
{
    if (engine->serialized) pthread_mutex_lock(&engine->lock);
}

static inline void fsdp__mpi_leave(fsdp__mpi_engine *engine)
{
    if (engine->serialized) pthread_mutex_unlock(&engine->lock);
}

/* The backend's config, or its defaults for NULL, and whether MPI is ready for it. Errors: ARG, UNSUPPORTED, RANK_LOST. */
fsdp_status fsdp__mpi_config_read(const void *given, fsdp_mpi_config *out_config, fsdp__mpi_engine *out_engine);
/* The caller's communicator, with this rank's number in it. */
fsdp_status fsdp__mpi_comm_read(const fsdp_mpi_config *config, fsdp__mpi_engine *engine, MPI_Comm *out_comm,
                                uint32_t *out_rank, uint32_t *out_world);
/* RANK_LOST with MPI's words for `code`. */
fsdp_status fsdp__mpi_fail(const char *what, int code);

/* Between two looks at something: gives the processor away at first, then sleeps, the longer the longer it has waited. */
typedef struct fsdp__mpi_pace {
    uint64_t since_ns;
} fsdp__mpi_pace;

fsdp__mpi_pace fsdp__mpi_pace_begin(void);
void fsdp__mpi_rest(const fsdp__mpi_pace *pace);

/* What is exchanged while a context is opened, with a deadline. A request that does not end is left to MPI, and so must be the
 * memory behind it: that is so whenever the status is not FSDP_OK. */
typedef struct fsdp__mpi_opening {
    fsdp__mpi_engine *engine;
    const char *what;
    uint64_t timeout_ns, deadline_ns;
    fsdp__mpi_side *side; /* to be asked meanwhile, or NULL */
} fsdp__mpi_opening;

/* code: what the call that made the request has returned. */
fsdp_status fsdp__mpi_opening_wait(const fsdp__mpi_opening *opening, int code, MPI_Request *request);
/* A duplicate that returns its errors. */
fsdp_status fsdp__mpi_opening_dup(const fsdp__mpi_opening *opening, MPI_Comm comm, MPI_Comm *out_comm);

/* ---- mpi_device.c ---- */

typedef struct fsdp__mpi_device {
    const fsdp_host_allocator *host;
    void *dev; /* the host backend's */
    uint32_t rank;
    fsdp__mpi_engine engine;
    atomic_bool stuck; /* MPI holds memory that it will not give back */

    pthread_mutex_t lock;
    atomic_int status; /* written under the lock, once */
    char sentence[FSDP__ERROR_BYTES];
    fsdp__mpi_comm *comms;  /* open */
    fsdp__mpi_comm *closed; /* with groups that a failed stream never ran */
} fsdp__mpi_device;

extern const fsdp_device_ops fsdp__mpi_device_ops;

/* The first error stays; from then on streams skip what they are given, and the device's communicators fail. */
void fsdp__mpi_device_fail(fsdp__mpi_device *dev, fsdp_status status, const char *sentence);
fsdp_status fsdp__mpi_device_check(void *dev);

/* ---- mpi_comm.c: groups, their order, and how a communicator fails ---- */

enum {
    FSDP__MPI_RECORDS = 16, /* calls of a group that are named; the hash is over all */
    FSDP__MPI_WORDS = 192   /* bytes of a call in words */
};

/* What a rank brings to a meeting. */
typedef struct fsdp__mpi_brought {
    uint64_t number, hash; /* hash: of all calls; 0: the communicator is being closed */
    uint32_t n_records, unused;
    fsdp__call record[FSDP__MPI_RECORDS];
} fsdp__mpi_brought;

/* What rank 0 answers. */
typedef struct fsdp__mpi_answer {
    uint64_t number;
    uint64_t closed; /* 1: rank 0 closes; 0: all have come, with the same */
} fsdp__mpi_answer;

enum { FSDP__MPI_TAG_BROUGHT = 1, FSDP__MPI_TAG_ANSWER, FSDP__MPI_TAG_ASK, FSDP__MPI_TAG_DATA };

/* Bytes between this rank and another: what goes out and what comes in. */
typedef struct fsdp__mpi_leg {
    const char *out;
    uint64_t out_bytes;
    char *in; /* NULL: into scratch, to be summed */
    uint64_t in_bytes;
} fsdp__mpi_leg;

/* What one enqueue gave: one operation on the wire, a group of n. */
typedef struct fsdp__mpi_group {
    struct fsdp__mpi_group *next, *next_free; /* all of a communicator's; those that wait to be used */
    fsdp__mpi_comm *comm;
    uint64_t number;
    uint32_t n, capacity;
    bool ran;
    fsdp_collective list[];
} fsdp__mpi_group;

struct fsdp__mpi_comm {
    fsdp__mpi_comm *next; /* of its device */
    const fsdp_host_allocator *host;
    fsdp__mpi_device *dev;
    fsdp__mpi_side *side;
    MPI_Comm mpi;
    uint64_t timeout_ns, chunk_bytes;
    uint32_t rank, world, index;
    uint64_t n_enqueued; /* the host's */

    /* Of the one thread whose group is next. */
    fsdp__mpi_brought mine, *brought; /* brought: rank 0's, one a rank, and so are words */
    char (*words)[FSDP__MPI_WORDS];
    fsdp__mpi_answer answer;
    MPI_Request *requests; /* two sets of `world` receives, then `world` sends; the meeting's is the first */
    int *indices;          /* as many */
    fsdp__mpi_leg *legs;   /* one a rank, and so are the next two */
    const void **sources;
    bool *missing;
    char *scratch;
    size_t scratch_bytes;
    bool left; /* MPI holds some of this for good */
    bool holds_side;

    pthread_mutex_t lock; /* over the rest */
    pthread_cond_t changed;
    fsdp__mpi_group *groups, *free_groups; /* used again, so that a warm step allocates nothing */
    char *larger_scratch;                  /* for the next group; NULL: the one that is there will do */
    size_t larger_bytes;
    uint64_t n_run;     /* the wire's: groups that are over */
    uint32_t n_pending; /* groups enqueued and not run */
    atomic_int status;  /* written under the lock, once */
    char sentence[FSDP__ERROR_BYTES];
};

extern const fsdp_comm_ops fsdp__mpi_comm_ops;

/* Tell every rank; the first failure stays, and is everybody's. Returns it. */
fsdp_status fsdp__mpi_comm_fail(fsdp__mpi_comm *c, fsdp_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* This communicator's own status, or what the side channel knows. */
fsdp_status fsdp__mpi_comm_check(fsdp__mpi_comm *c);
/* The device's first error is its communicators'. Never waits. */
void fsdp__mpi_comm_take_error(fsdp__mpi_comm *c, fsdp_status status, const char *sentence);
void fsdp__mpi_comm_free(fsdp__mpi_comm *c);

/* ---- mpi_meet.c ---- */

/* n requests are done; or the communicator has failed, or deadline_ns has passed: then *out_done is false and they are as they
 * were. */
fsdp_status fsdp__mpi_wait(fsdp__mpi_comm *c, MPI_Request *requests, uint32_t n, uint64_t deadline_ns, bool *out_done);
/* Requests of a communicator that has failed: take them back, or let MPI keep them and their memory. */
void fsdp__mpi_abandon(fsdp__mpi_comm *c, uint32_t n_sets);
/* All ranks have come to c->mine, with the same. */
fsdp_status fsdp__mpi_meet(fsdp__mpi_comm *c);
/* The last meeting: true if all ranks close. */
bool fsdp__mpi_meet_closing(fsdp__mpi_comm *c);

/* ---- mpi_move.c ---- */

/* Bytes of scratch that a collective needs. */
size_t fsdp__mpi_scratch_bytes(const fsdp__mpi_comm *c, const fsdp_collective *op);
fsdp_status fsdp__mpi_move(fsdp__mpi_comm *c, const fsdp_collective *op);

/* ---- mpi_side.c ---- */

/* What each rank says when a communicator is opened: fsdp_status, chunk_bytes. */
typedef struct fsdp__mpi_ballot {
    int64_t status;
    uint64_t chunk_bytes;
} fsdp__mpi_ballot;

/* Where rank 0 is. */
enum { FSDP__MPI_ADDRESSES = 16 };

typedef struct fsdp__mpi_address {
    int32_t family; /* AF_INET, AF_INET6 */
    uint32_t bits;  /* its network's part */
    unsigned char bytes[16];
} fsdp__mpi_address;

typedef struct fsdp__mpi_place {
    int32_t status; /* FSDP_OK, or rank 0 cannot listen, and why[] */
    uint32_t port, n_addresses, one_machine;
    uint64_t nonce;
    fsdp__mpi_address addresses[FSDP__MPI_ADDRESSES];
    char given[FSDP_ADDRESS_BYTES]; /* by the config; "" for none */
    char why[256];
} fsdp__mpi_place;

struct fsdp__mpi_side {
    const fsdp_host_allocator *host;
    size_t bytes; /* of this, with what follows it */
    fsdp__mpi_engine engine;
    uint32_t rank, world;
    MPI_Comm comm;    /* of which the communicators are duplicates */
    void *star;       /* NULL once it is closed */
    atomic_uint refs; /* its own, and its communicators', which may outlive it */
    fsdp__mpi_place place;
    uint64_t machine, *machines; /* this rank's; one a rank */
    fsdp__mpi_ballot *ballots;   /* one a rank */
};

void fsdp__mpi_side_release(fsdp__mpi_side *s);
/* One result for all: the first rank's that is not FSDP_OK, or MISMATCH if chunk_bytes differ. what: is being done. */
fsdp_status fsdp__mpi_side_vote(fsdp__mpi_side *s, const char *what, fsdp_status mine, uint64_t chunk_bytes,
                                uint64_t timeout_ns);

extern const fsdp_side_ops fsdp__mpi_side_ops;

#endif
