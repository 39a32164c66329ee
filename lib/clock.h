/* SPDX-License-Identifier: MIT */
/* Vector clocks over streams: which work of which stream comes before what.
 *
 * Each stream has a slot t. now[t][t] is its open epoch; a fence recorded on t closes it, stores a snapshot of now[t], and
 * opens the next. now[s][t] >= e means: all work of t in epochs <= e comes before anything that s is given from now on.
 * A use of a resource is a point (t, the epoch open when it was submitted); it is covered for s once now[s][t] >= epoch.
 * A slot is a timeline: a stream that takes it goes on with the epochs of the last one, which was drained by the host.
 * [Note: Clocks] in docs/streams.md. Everything here is called with the context's lock held. */
#ifndef FSDP_LIB_CLOCK_H
#define FSDP_LIB_CLOCK_H

#include "fsdp/backend.h"

enum {
    FSDP__SLOTS = 16, /* streams at a time in a context */
    FSDP__FENCES = 64 /* fences kept a stream; an older one is replaced by the oldest that is left */
};

/* For each stream, the last epoch that must come before. All zero: nothing. */
typedef struct fsdp__clock {
    uint64_t at[FSDP__SLOTS];
} fsdp__clock;

/* With few streams all of it lies in one cache line: a hook writes and reads several. */
typedef struct fsdp__fence {
    uint64_t epoch; /* that it closed; 0: no fence */
    void *event;    /* the device's; NULL once its owner is gone */
    const char *label;
    int slot;             /* of the stream that recorded it */
    uint8_t mark;         /* fsdp_mark */
    bool captured;        /* inside a capture: its event has no moment of its own */
    fsdp__clock snapshot; /* what comes before it, itself included */
} fsdp__fence;

/* What hooks look at comes first, and lies close together: between hooks other code fills the caches. */
struct fsdp_stream {
    fsdp_context *ctx;
    void *native;
    int slot;
    bool lane;            /* the library's own */
    uint32_t n_open;      /* windows of units that are open on it */
    uint64_t first_fence; /* fences of the slot's earlier streams are below this */
    uint64_t n_fences;    /* fence i closed epoch i + 1 and lies in ring[i % FSDP__FENCES] */
    uint64_t late_drain; /* n_fences of a drain that ran out of time: asked again, it needs no further fence; 0: none */
    uint32_t n_drains;   /* host threads that wait, without the lock, until it is idle: it must not go before them */
    char name[32];
    /* Made with the stream; ring[i].event is event[i] unless a work or report lent its own. */
    void *event[FSDP__FENCES];
    struct {
        _Alignas(64) fsdp__fence fence;
    } ring[FSDP__FENCES];
};

typedef struct fsdp__clocks {
    _Alignas(64) fsdp__clock now[FSDP__SLOTS];
    /* The gate: a point that other streams come after, who wait for it only when they are first given something. It is where a
     * capture began, or the last replay's end. */
    uint64_t gate_epoch; /* 0: there is none */
    int gate_slot;
    uint32_t behind;                  /* bit t: stream t has not waited for it yet */
    int n_slots;                      /* slots used so far: loops end here */
    fsdp_stream *stream[FSDP__SLOTS]; /* NULL: the slot is free */
    uint64_t n_raised[FSDP__SLOTS];   /* times that a slot's clock has learnt of others */
} fsdp__clocks;

/* What an operation needs before it may run, gathered over all its ranges before anything waits. */
typedef struct fsdp__need {
    uint32_t slots;              /* bit t: stream t is needed; what follows has a meaning only there. 0: nothing is */
    uint8_t reason[FSDP__SLOTS]; /* fsdp_reason of the range that set clock.at[t] */
    fsdp__clock clock;
} fsdp__need;

/* An epoch of a stream: epoch × FSDP__SLOTS + slot; 0: none. */
typedef uint64_t fsdp__point;

/* A resource that streams hand to each other: who wrote it last, who has read it since. A write forgets the reads that it
 * waited for, so one point is enough for it; what is usual (a reader or two) lies in one cache line. */
typedef struct fsdp__edges {
    fsdp__point written;
    uint64_t n_reads;
    fsdp__point read[FSDP__SLOTS]; /* at most one a slot */
} fsdp__edges;

/* Nothing is needed. (= {0} would clear the rest, too, which compilers do by a slow instruction; hooks have several.) */
static inline void fsdp__no_need(fsdp__need *need) { need->slots = 0; }

static inline void fsdp__need_epoch(fsdp__need *need, uint64_t slot, uint64_t epoch, fsdp_reason reason)
{
    if (epoch == 0 || ((need->slots >> slot & 1u) && epoch <= need->clock.at[slot])) return;
    need->slots |= 1u << slot;
    need->clock.at[slot] = epoch;
    need->reason[slot] = (uint8_t)reason;
}

static inline void fsdp__clock_max(fsdp__clock *into, const fsdp__clock *other, int n_slots)
{
    for (int t = 0; t < n_slots; t++)
        if (other->at[t] > into->at[t]) into->at[t] = other->at[t];
}

/* The epoch that s's next fence will close. */
static inline uint64_t fsdp__epoch(const fsdp_stream *s) { return s->n_fences + 1; }
static inline fsdp__point fsdp__point_of(int slot, uint64_t epoch) { return epoch * FSDP__SLOTS + (unsigned)slot; }

/* Make it so: for each stream that is missing, s waits for its oldest fence that covers; one is recorded where none does. */
fsdp_status fsdp__wait_need(fsdp_stream *s, const fsdp__need *need);
/* s waits for this fence, unless it is covered. */
fsdp_status fsdp__wait_fence(fsdp_stream *s, const fsdp__fence *fence, fsdp_reason reason);
/* Close s's epoch. event: the device event to record, or NULL for the ring's own. *out_fence (may be NULL): a copy. */
fsdp_status fsdp__record(fsdp_stream *s, fsdp_mark mark, const char *label, void *event, fsdp__fence *out_fence);
/* Whoever is about to give s something calls this first (fsdp__record, the waits, device.c and comm.c do). */
__attribute__((cold)) fsdp_status fsdp__pass_gate_now(fsdp_stream *s);
/* Close s's epoch without an event: nobody will have to wait for what is in it. Returns the epoch. */
uint64_t fsdp__skip_epoch(fsdp_stream *s);
/* The host has waited for this fence: what anybody is given from now on comes after what it covers. A fact of the calls, as
 * they returned; nothing asks how far the device is. */
void fsdp__host_passed(fsdp_context *ctx, const fsdp__fence *fence);
/* The owner of a lent event takes it back: nobody will wait on this fence any more. */
void fsdp__fence_forget(fsdp__clocks *clocks, const fsdp__fence *fence);
/* The owner of a label frees it: fences that bear it, and that a tape may still name, bear their stream's name instead. */
void fsdp__label_forget(fsdp__clocks *clocks, const char *label);

/* The access rule: before an operation on s, collect what its ranges need … */
void fsdp__need_read(fsdp__need *need, const fsdp__edges *edges);
void fsdp__need_write(fsdp__need *need, const fsdp__edges *edges);
/* … and once it is submitted, before the fence that closes its epoch, note it. */
void fsdp__note_read(fsdp__edges *edges, const fsdp_stream *s);
void fsdp__note_write(fsdp__edges *edges, const fsdp_stream *s);
void fsdp__edges_clear(fsdp__edges *edges);

#endif
