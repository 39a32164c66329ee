/* SPDX-License-Identifier: MIT */
/* NCCL's communicators: what the files nccl_*.c share.
 *
 *  job   a call of NCCL that may never return (init, split, finalise, abort, registering), on a thread of its own. Who waits
 *        for it has a deadline and leaves then; the thread cleans up by itself if it ever comes back. So what a job holds is
 *        libc's memory: it may outlive the context.
 *  wire  one ncclComm_t, and the lock of whoever is inside NCCL with it.
 *  team  what the communicators of one device share, in a world of more than one: made with the first, gone with the last.
 *  watch the team's thread: NCCL's errors, and how far collectives have got.
 *
 * Locks: a wire's entry is held in calls of NCCL, and nothing is locked inside it. Inside a team's lock only a
 * communicator's. */
#ifndef FSDP_LIB_CUDA_NCCL_PARTS_H
#define FSDP_LIB_CUDA_NCCL_PARTS_H

#include "cuda_backend.h"
#include "fsdp/nccl.h"

enum { FSDP__NCCL_OLDEST = 21900, FSDP__NCCL_RING = 512, FSDP__NCCL_CONFIG_BYTES = 512, FSDP__NCCL_WORDS = 400 };

/* ---- nccl_job.c ---- */

typedef struct fsdp__nccl_wire {
    _Atomic(ncclComm_t) comm; /* NULL: none yet, or it is being closed or aborted */
    pthread_mutex_t entry;
    atomic_int refs;
    fsdp_host_allocator memory; /* libc's */
} fsdp__nccl_wire;

/* NULL: no host memory. */
fsdp__nccl_wire *fsdp__nccl_wire_create(void);
fsdp__nccl_wire *fsdp__nccl_wire_hold(fsdp__nccl_wire *wire);
void fsdp__nccl_wire_release(fsdp__nccl_wire *wire); /* NULL is nothing */
/* Take its entry. False: somebody is inside NCCL, and has not come out within a second. */
bool fsdp__nccl_enter(fsdp__nccl_wire *wire);

typedef struct fsdp__nccl_job fsdp__nccl_job;
struct fsdp__nccl_job {
    void (*run)(fsdp__nccl_job *job);  /* on its thread, with the device current */
    void (*undo)(fsdp__nccl_job *job); /* after run, if nobody waits any more; may be NULL */
    const char *call;                  /* "ncclCommAbort": for sentences */
    fsdp__nccl_wire *wire, *parent;    /* held; parent: of a split */
    ncclComm_t comm;                   /* closing, aborting: this one, in place of the wire's */
    int world, rank;
    ncclUniqueId id;
    bool has_config;
    union {
        ncclConfig_t config;
        unsigned char bytes[FSDP__NCCL_CONFIG_BYTES]; /* a program with a newer header has a longer one */
    } config;
    char net_name[128], comm_name[128]; /* what config points to */
    void *base, *window;                /* of a pool */
    size_t bytes;

    ncclResult_t result; /* once it is done */
    char words[FSDP__NCCL_WORDS];

    fsdp_host_allocator memory; /* libc's */
    atomic_int refs;
    atomic_bool abandoned;
    atomic_int claim; /* of a close: 1 the thread destroys it, 2 whoever waited aborts it */
    int ordinal;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool started, done;
};

/* For one run; holds wire. NULL: no host memory. */
fsdp__nccl_job *fsdp__nccl_job_create(int ordinal, fsdp__nccl_wire *wire, void (*run)(fsdp__nccl_job *job),
                                      const char *call);
void fsdp__nccl_job_release(fsdp__nccl_job *job); /* NULL is nothing */
/* Begin; false: no thread for it. */
bool fsdp__nccl_job_start(fsdp__nccl_job *job);
/* Wait until it is done; or, abandoning it, until timeout_ns is over or a peer has failed. side_ops NULL: nobody is asked.
 * Errors: RANK_LOST with a sentence that begins with what; the side channel's. */
fsdp_status fsdp__nccl_job_wait(fsdp__nccl_job *job, const char *what, uint64_t timeout_ns,
                                const fsdp_side_ops *side_ops, void *side);

/* Jobs' run functions: nccl_job.c. */
void fsdp__nccl_run_init(fsdp__nccl_job *job);
void fsdp__nccl_run_split(fsdp__nccl_job *job);
void fsdp__nccl_run_close(fsdp__nccl_job *job);
void fsdp__nccl_run_abort(fsdp__nccl_job *job);
void fsdp__nccl_undo_open(fsdp__nccl_job *job);

/* NCCL's words for a result, in one line. */
void fsdp__nccl_words(ncclResult_t result, ncclComm_t comm, char *text, size_t bytes);
/* RANK_LOST where a peer or the network is to blame, else DEVICE. */
fsdp_status fsdp__nccl_status(ncclResult_t result);

/* ---- nccl_comm.c ---- */

typedef struct fsdp__nccl_comm fsdp__nccl_comm;

/* One group in flight. */
typedef struct fsdp__nccl_entry {
    fsdp__cuda_front begin; /* its stream has come to it when these have happened; none: only the host can be in it */
    fsdp__cuda_moment *end; /* it is over */
    fsdp__call call;        /* its first part */
} fsdp__nccl_entry;

/* What the watch looks at. Written by the host at n, read by the watch from n_done on. More groups in flight than there are
 * places share the last place: from then on, until all are over, only the newest is watched. The host may be long in a group,
 * too: NCCL connects ranks at their first collective, and waits for all to come. */
typedef struct fsdp__nccl_ring {
    _Atomic uint64_t n, n_done;
    uint64_t n_released;     /* the host's: entries below have given back their moments */
    _Atomic uint64_t inside; /* the number of the group that the host is enqueueing, at n; 0: it is not */
    atomic_bool is_full;
    _Alignas(64) fsdp__nccl_entry entry[FSDP__NCCL_RING];
    pthread_mutex_t lock; /* over last; and over the place at n, for a group that will not stay there; and: */
    fsdp__call last_call;
    cudaEvent_t last_begin, last_end;
    bool last_inside;               /* the host is enqueueing what last_call names */
    bool last_begun, last_enqueued; /* its events are recorded */
    uint64_t last_since_ns;         /* when the watch saw it begin; 0: it has not */
    uint64_t since_ns;              /* the watch's: when it saw the oldest begin; 0: it has not */
    uint64_t since_number;          /* the watch's: which one that was */
    uint64_t error_ns;              /* the watch's: when it first saw NCCL's error; 0: none */
} fsdp__nccl_ring;

typedef struct fsdp__nccl_team {
    const fsdp_host_allocator *host;
    fsdp__cuda_device *dev;
    uint32_t rank, world;
    const fsdp_side_ops *side_ops;
    void *side;       /* open as long as a communicator is */
    int version;      /* of the NCCL that runs */
    uint32_t windows; /* of fsdp_nccl_window: asked for, and this NCCL has them */
    void *ballots;
    atomic_uint n_windows;
    atomic_ullong window_bytes;

    pthread_mutex_t lock; /* over the rest */
    pthread_cond_t wake;
    fsdp__nccl_comm *comm[2];
    bool stopping, told;
    char path[128];     /* nccl.h's */
    uint64_t broken_ns; /* when the watch first saw that the device has failed; 0: it has not */
    pthread_t thread;
} fsdp__nccl_team;

struct fsdp__nccl_comm {
    fsdp__cuda_device *dev;
    fsdp__nccl_team *team; /* NULL: a world of one, with nothing of what follows up to token */
    fsdp__nccl_wire *wire;
    fsdp__nccl_ring *ring;
    fsdp__nccl_job *abort_job; /* made at open, so that an abort needs no memory */
    float *token;              /* device memory: what a barrier sums */
    uint64_t n_enqueued;
    atomic_int status; /* the first error, written once */
    bool owned;        /* made here; else the caller's */
    bool stuck; /* NCCL has not come back: what its kernels may be in stays, since freeing it would wait for them */

    const fsdp_host_allocator *host;
    uint32_t rank, world, index;
    uint64_t timeout_ns;
    pthread_mutex_t lock; /* over the sentence */
    char sentence[FSDP__SENTENCE_BYTES];
    atomic_bool aborting; /* the job has been started */
    uint64_t aborting_ns; /* when the watch first saw that */
};

/* The number that the next group has in sentences. */
static inline uint64_t fsdp__nccl_number(const fsdp__nccl_comm *c, const fsdp_collective *first)
{
    return first->number != 0 ? first->number : c->n_enqueued + 1;
}

/* The first error stays; NCCL's work is aborted, so that nobody waits for it. Any thread, at once. */
void fsdp__nccl_stop(fsdp__nccl_comm *c, fsdp_status status, const char *sentence);
fsdp_status fsdp__nccl_check(void *comm);

/* ---- nccl_open.c ---- */

fsdp_status fsdp__nccl_open(const fsdp_comm_args *args, void **out_comm);
/* Every rank says how it did at `what`; if any failed, all fail with the sentence of the lowest that did. mode: what must be
 * the same on all ranks. */
fsdp_status fsdp__nccl_vote(fsdp__nccl_comm *c, const char *what, fsdp_status mine, uint32_t mode);
fsdp_status fsdp__nccl_config_read(const fsdp_cuda_config *config, fsdp_nccl_config *out_config);
/* NCCL_LAUNCH_ORDER_IMPLICIT=1 is in the environment, and this NCCL knows it. */
bool fsdp__nccl_is_ordered(int version);
/* Free what open took, but for NCCL's part. */
void fsdp__nccl_comm_free(fsdp__nccl_comm *c);
void fsdp__nccl_team_free(fsdp__nccl_team *team);

/* ---- nccl_watch.c ---- */

fsdp_status fsdp__nccl_ring_open(fsdp__nccl_comm *c);
void fsdp__nccl_ring_close(fsdp__nccl_comm *c);
/* Around each group, on its stream; end has what begin gave. enqueued false: it has failed. */
typedef enum fsdp__nccl_place {
    FSDP__NCCL_UNWATCHED,
    FSDP__NCCL_CAPTURED,
    FSDP__NCCL_IN_RING,
    FSDP__NCCL_LAST
} fsdp__nccl_place;
fsdp__nccl_place fsdp__nccl_ring_begin(fsdp__nccl_comm *c, fsdp__cuda_stream *s, const fsdp_collective *list,
                                       uint32_t n);
void fsdp__nccl_ring_end(fsdp__nccl_comm *c, fsdp__cuda_stream *s, fsdp__nccl_place place, bool enqueued);
fsdp_status fsdp__nccl_watch_start(fsdp__nccl_team *team);
void fsdp__nccl_watch_stop(fsdp__nccl_team *team);
/* Every rank's host hears it now: the words of all ranks are put behind it. Half a second at most. */
void fsdp__nccl_tell(fsdp__nccl_team *team, fsdp_status status, const char *sentence);
/* That this rank's device has failed, if it has. */
void fsdp__nccl_tell_device(fsdp__nccl_team *team);

/* ---- nccl_pool.c: windows ---- */

/* This NCCL has them; else a warning says so. */
bool fsdp__nccl_has_windows(fsdp__nccl_team *team);
fsdp_status fsdp__nccl_attach(void *comm, fsdp_operation kind, void *base, uint64_t bytes, void **out_handle);
void fsdp__nccl_detach(void *comm, void *handle);

#endif
