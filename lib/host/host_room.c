/* SPDX-License-Identifier: MIT */
#include "host_room.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "check.h"

/* Once two ranks are known to differ, the others get this long to come, so that the sentence can name all. */
#define MISMATCH_GRACE_NS 250000000u

/* One rank's. Atomics are read by peers at any time; the item from its arrival until the last sync of the meeting. */
typedef struct slot {
    _Alignas(64) _Atomic uint64_t arrived; /* the last meeting that it came to */
    _Atomic uint64_t synced;               /* phases that it has ended, over all meetings */
    _Atomic uint32_t reading;              /* it may be reading its peers' memory */
    _Alignas(64) unsigned char item[FSDP__ROOM_ITEM_BYTES];
    char sentence[FSDP__SENTENCE_BYTES]; /* written once, before `failure` names this rank */
} slot;

struct fsdp__room_shared {
    _Alignas(64) _Atomic uint32_t events;
    _Atomic uint32_t n_waiting;
    _Atomic uint64_t failure; /* 0; or the rank whose sentence it is, plus one, << 32 | the status, unsigned */
    _Atomic uint64_t closed;  /* bit r: rank r has left for good */
    _Alignas(64) _Atomic uint64_t n_arrived; /* of all ranks, over all meetings */
    _Atomic uint64_t complete;               /* the last meeting to which all have come */
    _Atomic uint64_t start_ns;               /* when the last rank came to it */
    _Alignas(64) _Atomic uint64_t n_synced;
    _Atomic uint64_t phases; /* that all have ended */
    slot slot[];
};

size_t fsdp__room_shared_bytes(uint32_t world) { return sizeof(fsdp__room_shared) + world * sizeof(slot); }

void fsdp__room_init(fsdp__room *room, fsdp__room_shared *shared, const fsdp__room_kind *kind, uint32_t rank,
                     uint32_t world, bool between_processes, uint64_t timeout_ns)
{
    assert(world <= FSDP__ROOM_WORLD && kind->item_bytes <= FSDP__ROOM_ITEM_BYTES);
    *room = (fsdp__room){.shared = shared,
                         .kind = kind,
                         .rank = rank,
                         .world = world,
                         .between_processes = between_processes,
                         .timeout_ns = timeout_ns};
    pthread_mutex_init(&room->failing, NULL);
}

/* ---- Waiting ---- */

static void wake(fsdp__room *room)
{
    fsdp__room_shared *sh = room->shared;
    atomic_fetch_add(&sh->events, 1);
    if (atomic_load(&sh->n_waiting) > 0) fsdp__futex_wake_all(&sh->events, room->between_processes);
}

static bool has_failed(const fsdp__room *room) { return atomic_load(&room->shared->failure) != 0; }

/* Until *count has reached target, the room has failed, or deadline_ns; false only for the last. */
static bool wait_until(fsdp__room *room, const _Atomic uint64_t *count, uint64_t target, uint64_t deadline_ns)
{
    fsdp__room_shared *sh = room->shared;
    bool in_time = true;
    for (;;) {
        uint32_t seen = atomic_load(&sh->events);
        if (atomic_load(count) >= target || has_failed(room)) return true;
        if (!in_time) return false;
        atomic_fetch_add(&sh->n_waiting, 1);
        in_time = fsdp__futex_wait(&sh->events, seen, deadline_ns, room->between_processes);
        atomic_fetch_sub(&sh->n_waiting, 1);
    }
}

/* ---- Failing ---- */

static fsdp_status failure_of(const fsdp__room *room, uint64_t failure)
{
    const char *sentence = room->shared->slot[(failure >> 32) - 1].sentence;
    return fsdp__fail((fsdp_status)(int32_t)(uint32_t)failure, "%s", sentence);
}

/* The sentence is written before `failure` and never again, so it needs no lock. */
fsdp_status fsdp__room_check(const fsdp__room *room)
{
    uint64_t failure = atomic_load(&room->shared->failure);
    return failure == 0 ? FSDP_OK : failure_of(room, failure);
}

fsdp_status fsdp__room_fail(fsdp__room *room, fsdp_status status, const char *format, ...)
{
    char sentence[FSDP__SENTENCE_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(sentence, sizeof sentence, format, args);
    va_end(args);
    if (!has_failed(room) && status != FSDP_ERR_ABORTED && room->more != NULL)
        room->more(room->more_arg, sentence, sizeof sentence);
    pthread_mutex_lock(&room->failing);
    if (!has_failed(room)) {
        memcpy(room->shared->slot[room->rank].sentence, sentence, sizeof sentence);
        uint64_t none = 0, failure = (uint64_t)(room->rank + 1) << 32 | (uint32_t)status;
        (void)atomic_compare_exchange_strong(&room->shared->failure, &none, failure);
    }
    pthread_mutex_unlock(&room->failing);
    wake(room); /* also if it had failed: who failed it may have been killed before it woke anybody */
    return fsdp__room_check(room);
}

/* Between threads nobody fails out of a meeting while a peer may still read what it brought. A process reads by a mapping of
 * its own, and may have stopped for good. */
static fsdp_status fail_out(fsdp__room *room)
{
    fsdp__room_shared *sh = room->shared;
    /* Who waits for this rank to have read; and, as in fsdp__room_fail, its own other streams. */
    wake(room);
    for (uint32_t r = 0; r < room->world && !room->between_processes; r++) {
        for (;;) {
            uint32_t seen = atomic_load(&sh->events);
            if (atomic_load(&sh->slot[r].reading) == 0) break;
            atomic_fetch_add(&sh->n_waiting, 1);
            fsdp__futex_wait(&sh->events, seen, UINT64_MAX, false);
            atomic_fetch_sub(&sh->n_waiting, 1);
        }
    }
    return fsdp__room_check(room);
}

/* From here on this rank may read its peers' memory; not if the room has failed. */
static bool begin_reading(fsdp__room *room)
{
    atomic_store(&room->shared->slot[room->rank].reading, 1);
    if (!has_failed(room)) return true;
    atomic_store(&room->shared->slot[room->rank].reading, 0);
    return false;
}

/* ---- What ranks brought ---- */

static bool has_arrived(const fsdp__room *room, uint32_t rank, uint64_t number)
{
    return atomic_load(&room->shared->slot[rank].arrived) >= number;
}

/* Do the ranks that have come to the meeting differ; where first. */
static bool differ(const fsdp__room *room, uint64_t number, uint32_t *out_place)
{
    const void *own = room->shared->slot[room->rank].item;
    for (uint32_t r = 0; r < room->world; r++)
        if (has_arrived(room, r, number) && !room->kind->same(room->shared->slot[r].item, own, out_place)) return true;
    return false;
}

static void fail_differing(fsdp__room *room, uint64_t number, uint32_t place)
{
    char text[FSDP__ROOM_WORLD][256], sentence[FSDP__SENTENCE_BYTES];
    const char *said[FSDP__ROOM_WORLD] = {NULL};
    for (uint32_t r = 0; r < room->world; r++) {
        if (!has_arrived(room, r, number)) continue;
        room->kind->say(room->shared->slot[r].item, place, text[r], sizeof text[r]);
        said[r] = text[r];
    }
    fsdp__put_said(sentence, sizeof sentence, said, room->world);
    (void)fsdp__room_fail(room, FSDP_ERR_MISMATCH, "%s", sentence);
}

/* Some ranks are missing at what this rank's item is for. */
static void lose(fsdp__room *room, uint32_t rank, const bool *missing, const char *how)
{
    char names[320], what[400];
    fsdp__put_ranks(names, sizeof names, missing, room->world);
    room->kind->say(room->shared->slot[rank].item, 0, what, sizeof what);
    (void)fsdp__room_fail(room, FSDP_ERR_RANK_LOST, "%s: %s of %u %s", what, names, room->world, how);
}

/* The deadline is over. False: nobody is late; the last rank came this moment, or has stopped between coming and saying that
 * all are there, and who sees it says so in its place. */
static bool lose_late(fsdp__room *room, const _Atomic uint64_t *(*count)(const fsdp__room *, uint32_t), uint64_t target,
                      const char *verb, uint64_t timeout_ns)
{
    bool missing[FSDP__ROOM_WORLD], any = false;
    char how[64];
    for (uint32_t r = 0; r < room->world; r++) {
        missing[r] = atomic_load(count(room, r)) < target;
        any = any || missing[r];
    }
    if (!any) return false;
    snprintf(how, sizeof how, "did not %s within %.3f s", verb, (double)timeout_ns * 1e-9);
    lose(room, room->rank, missing, how);
    return true;
}

static const _Atomic uint64_t *arrived_of(const fsdp__room *room, uint32_t rank)
{
    return &room->shared->slot[rank].arrived;
}
static const _Atomic uint64_t *synced_of(const fsdp__room *room, uint32_t rank)
{
    return &room->shared->slot[rank].synced;
}

static void lose_closed(fsdp__room *room, uint64_t number)
{
    uint64_t closed = atomic_load(&room->shared->closed);
    bool missing[FSDP__ROOM_WORLD], any = false;
    for (uint32_t r = 0; r < room->world; r++) {
        missing[r] = (closed >> r & 1) && !has_arrived(room, r, number);
        any = any || missing[r];
    }
    if (any) lose(room, room->rank, missing, "closed before it came");
}

/* ---- Meetings ---- */

/* A rank's streams share its communicator, and meet in the order of the numbers. */
static void wait_for_own(fsdp__room *room, uint64_t number)
{
    atomic_fetch_add(&room->own_waiting, 1);
    (void)wait_until(room, &room->left, number - 1, UINT64_MAX);
    atomic_fetch_sub(&room->own_waiting, 1);
}

/* The last rank to come compares all items before anybody reads. Done twice it does no harm: nobody goes on to another
 * meeting before all that have come to this one. */
static void complete(fsdp__room *room, uint64_t number)
{
    uint32_t place = 0;
    if (differ(room, number, &place)) {
        fail_differing(room, number, place);
        return;
    }
    atomic_store(&room->shared->start_ns, fsdp__now_ns());
    atomic_store(&room->shared->complete, number);
    wake(room);
}

static void wait_for_peers(fsdp__room *room, uint64_t number, uint64_t timeout_ns)
{
    uint64_t deadline_ns = fsdp__after_ns(timeout_ns);
    uint32_t place = 0;
    if (differ(room, number, &place)) {
        uint64_t grace_ns = fsdp__after_ns(MISMATCH_GRACE_NS);
        if (grace_ns < deadline_ns) deadline_ns = grace_ns;
    }
    if (wait_until(room, &room->shared->complete, number, deadline_ns)) return;
    if (differ(room, number, &place)) fail_differing(room, number, place);
    else if (!lose_late(room, arrived_of, number, "come", timeout_ns)) complete(room, number);
}

fsdp_status fsdp__room_enter(fsdp__room *room, uint64_t number, const void *item, uint64_t timeout_ns,
                             uint64_t *out_start_ns)
{
    fsdp__room_shared *sh = room->shared;
    wait_for_own(room, number);
    if (has_failed(room)) return fail_out(room);
    slot *own = &sh->slot[room->rank];
    room->number = number;
    memcpy(own->item, item, room->kind->item_bytes);
    atomic_store(&own->arrived, number);
    if (atomic_fetch_add(&sh->n_arrived, 1) + 1 == number * room->world) {
        complete(room, number);
    } else {
        lose_closed(room, number);
        wait_for_peers(room, number, timeout_ns);
    }
    if (atomic_load(&sh->complete) < number || !begin_reading(room)) return fail_out(room);
    *out_start_ns = atomic_load(&sh->start_ns);
    return FSDP_OK;
}

const void *fsdp__room_item(const fsdp__room *room, uint32_t rank) { return room->shared->slot[rank].item; }

fsdp_status fsdp__room_sync(fsdp__room *room, bool more_phases)
{
    fsdp__room_shared *sh = room->shared;
    slot *own = &sh->slot[room->rank];
    uint64_t phase = ++room->phases, deadline_ns = UINT64_MAX;
    if (room->between_processes) deadline_ns = fsdp__after_ns(room->timeout_ns);
    atomic_store(&own->synced, phase);
    atomic_store(&own->reading, 0);
    if (atomic_fetch_add(&sh->n_synced, 1) + 1 == phase * room->world) {
        atomic_store(&sh->phases, phase);
        wake(room);
    }
    if (!wait_until(room, &sh->phases, phase, deadline_ns) &&
        !lose_late(room, synced_of, phase, "finish", room->timeout_ns)) {
        atomic_store(&sh->phases, phase);
        wake(room);
    }
    if (atomic_load(&sh->phases) < phase) return fail_out(room);
    if (more_phases && !begin_reading(room)) return fail_out(room);
    return FSDP_OK;
}

fsdp_status fsdp__room_leave(fsdp__room *room, uint64_t not_before_ns, uint64_t *out_end_ns)
{
    static const _Atomic uint64_t never = 0;
    uint64_t now = fsdp__now_ns();
    while (now < not_before_ns && !has_failed(room)) {
        (void)wait_until(room, &never, 1, not_before_ns);
        now = fsdp__now_ns();
    }
    fsdp_status status = fsdp__room_check(room);
    *out_end_ns = now; /* taken before the next meeting can start */
    atomic_store(&room->left, room->number);
    if (atomic_load(&room->own_waiting) > 0) wake(room);
    return status;
}

bool fsdp__room_has_left(const fsdp__room *room, uint32_t rank)
{
    return atomic_load(&room->shared->closed) >> rank & 1;
}

void fsdp__room_quit(fsdp__room *room)
{
    fsdp__room_shared *sh = room->shared;
    uint64_t own = atomic_load(&sh->slot[room->rank].arrived);
    atomic_fetch_or(&sh->closed, (uint64_t)1 << room->rank);
    for (uint32_t r = 0; r < room->world && !has_failed(room); r++) {
        if (!has_arrived(room, r, own + 1)) continue;
        bool missing[FSDP__ROOM_WORLD] = {false};
        missing[room->rank] = true;
        lose(room, r, missing, "closed before it came");
    }
    pthread_mutex_destroy(&room->failing);
}
