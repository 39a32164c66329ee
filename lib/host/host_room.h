/* SPDX-License-Identifier: MIT */
/* Where ranks meet: a communicator's wire, or the side channel of threads.
 *
 *  shared  what all ranks see: plain memory between threads, a mapping between processes. No pointer and no lock in it, so it
 *          lies anywhere and a rank that is killed holds nothing. Counters only grow; a slot is written by its rank alone.
 *  room    one rank's handle.
 *  meeting 1, 2, …: each rank enters with an item, reads what peers brought, syncs (again after each further phase), leaves.
 *
 * Nobody spins: who waits sleeps on one word, `events`, which moves when a meeting is complete, a phase has ended, or the
 * room has failed. */
#ifndef FSDP_LIB_HOST_ROOM_H
#define FSDP_LIB_HOST_ROOM_H

#include <pthread.h>
#include <stdatomic.h>

#include "call.h"
#include "fsdp/backend.h"
#include "monotonic.h"

enum {
    FSDP__ROOM_WORLD = 64,       /* a rank is a bit */
    FSDP__ROOM_ITEM_BYTES = 2432 /* copied into the slot: what peers may look at, without pointers that they follow */
};

/* ---- Futexes (host_futex.c) ---- */

/* Sleep while *word is seen, until woken or deadline_ns; false once it has passed. between_processes: the word is shared. */
bool fsdp__futex_wait(_Atomic uint32_t *word, uint32_t seen, uint64_t deadline_ns, bool between_processes);
void fsdp__futex_wake_all(_Atomic uint32_t *word, bool between_processes);

/* ---- Rooms (host_room.c) ---- */

/* What the items are. same: do a and b fit? say: what an item is, in words. `place` is where two items differ first. */
typedef struct fsdp__room_kind {
    bool (*same)(const void *a, const void *b, uint32_t *out_place);
    void (*say)(const void *item, uint32_t place, char *text, size_t bytes);
    size_t item_bytes; /* at most FSDP__ROOM_ITEM_BYTES */
} fsdp__room_kind;

typedef struct fsdp__room_shared fsdp__room_shared;

/* Of the shared part. Zeroed memory aligned to 64 is an empty room. */
size_t fsdp__room_shared_bytes(uint32_t world);

typedef struct fsdp__room {
    fsdp__room_shared *shared;
    const fsdp__room_kind *kind;
    uint32_t rank, world;
    bool between_processes;
    uint64_t timeout_ns; /* between processes: for a peer that has come and does not go on. Threads cannot stop alone */
    /* Called before the room fails with anything but ABORTED: may put more behind the sentence. NULL: nothing. */
    void (*more)(void *arg, char *sentence, size_t bytes);
    void *more_arg;

    pthread_mutex_t failing;      /* over this rank's sentence */
    _Atomic uint64_t left;        /* the last meeting that this rank has left */
    _Atomic uint32_t own_waiting; /* this rank's other threads that wait to follow */
    uint64_t number, phases;      /* the meeting that it is in; phases ended, over all meetings */
} fsdp__room;

void fsdp__room_init(fsdp__room *room, fsdp__room_shared *shared, const fsdp__room_kind *kind, uint32_t rank,
                     uint32_t world, bool between_processes, uint64_t timeout_ns);
/* Leave for good, and end the handle; the shared part is its owner's. Peers that wait for this rank, or come later, fail with
 * RANK_LOST. */
void fsdp__room_quit(fsdp__room *room);

/* Waits for this rank's earlier meetings, then at most timeout_ns for the peers. Between threads the memory behind an item
 * stays as long as a peer may read it: neither sync nor a failing call returns before nobody reads.
 * Errors: MISMATCH, RANK_LOST, whatever the room failed with. */
fsdp_status fsdp__room_enter(fsdp__room *room, uint64_t number, const void *item, uint64_t timeout_ns,
                             uint64_t *out_start_ns);
const void *fsdp__room_item(const fsdp__room *room, uint32_t rank); /* between enter and leave */
fsdp_status fsdp__room_sync(fsdp__room *room, bool more_phases);
fsdp_status fsdp__room_leave(fsdp__room *room, uint64_t not_before_ns, uint64_t *out_end_ns);

/* The first failure stays, and is everybody's. */
fsdp_status fsdp__room_fail(fsdp__room *room, fsdp_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
fsdp_status fsdp__room_check(const fsdp__room *room);
bool fsdp__room_has_left(const fsdp__room *room, uint32_t rank); /* for good */

#endif
