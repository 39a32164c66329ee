/* SPDX-License-Identifier: MIT */
/* Where the ranks of one process meet. A room belongs to one generation of contexts: its ranks open it together, and it
 * goes with the last that leaves, so that a local group can be used again and an early close hurts nobody's memory. */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <time.h>

#include "check.h"
#include "host.h"
#include "hostmem.h"

struct fsdp_local {
    fsdp_host_allocator host;
    uint32_t world;
    fsdp_link link;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    fsdp__room *forming[FSDP__N_ROOMS]; /* some of its ranks have come; NULL: none */
};

struct fsdp__room {
    fsdp_host_allocator host;
    const fsdp__room_kind *kind;
    uint32_t world;
    uint64_t opened; /* bit r: rank r has come. Under the local group's lock; constant once all have */

    pthread_mutex_t lock;
    pthread_cond_t changed; /* whenever something below changes that somebody may wait for */
    uint32_t refs;
    uint64_t closed;   /* bit r: rank r has left */
    atomic_int status; /* written under the lock, once */
    char sentence[FSDP__SENTENCE_BYTES];

    /* The meeting that is on. */
    uint64_t number;  /* 1, 2, … */
    uint64_t arrived; /* bit r: item[r] is there */
    const void *item[FSDP__LOCAL_WORLD];
    uint64_t start_ns;  /* when the last rank came */
    uint64_t phases;    /* ended so far, over all meetings */
    uint32_t n_synced;  /* ranks that have ended the phase */
    uint32_t n_reading; /* ranks that may be reading their peers' memory */
    uint32_t n_left;
};

/* ---- Time ---- */

uint64_t fsdp__host_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

uint64_t fsdp__host_after(uint64_t ns)
{
    uint64_t then;
    return __builtin_add_overflow(fsdp__host_now_ns(), ns, &then) ? UINT64_MAX : then;
}

void fsdp__host_cond_init(pthread_cond_t *cond)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(cond, &attributes);
    pthread_condattr_destroy(&attributes);
}

bool fsdp__host_cond_until(pthread_cond_t *cond, pthread_mutex_t *lock, uint64_t deadline_ns)
{
    struct timespec deadline = {(time_t)(deadline_ns / 1000000000u), (long)(deadline_ns % 1000000000u)};
    return pthread_cond_timedwait(cond, lock, &deadline) != ETIMEDOUT;
}

/* ---- The group ---- */

fsdp_status fsdp_local_create(uint32_t world, const fsdp_link *link, fsdp_local **out_local)
{
    FSDP_NEED(out_local);
    if (world == 0 || world > FSDP__LOCAL_WORLD)
        return fsdp__fail(FSDP_ERR_ARG, "fsdp_local_create: a world of %u, expected 1 to %d", world, FSDP__LOCAL_WORLD);
    fsdp_host_allocator none = {NULL, NULL, NULL, NULL}, host;
    FSDP_TRY(fsdp__host_allocator_resolve(&none, &host));
    fsdp_local *local = fsdp__host_alloc(&host, 1, sizeof *local);
    if (local == NULL)
        return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "fsdp_local_create: no host memory for %zu bytes", sizeof *local);
    local->host = host;
    local->world = world;
    if (link != NULL) local->link = *link;
    pthread_mutex_init(&local->lock, NULL);
    fsdp__host_cond_init(&local->changed);
    *out_local = local;
    return FSDP_OK;
}

void fsdp_local_destroy(fsdp_local *local)
{
    if (local == NULL) return;
    pthread_cond_destroy(&local->changed);
    pthread_mutex_destroy(&local->lock);
    fsdp_host_allocator host = local->host;
    fsdp__host_free(&host, local, 1, sizeof *local);
}

uint32_t fsdp__local_world(const fsdp_local *local) { return local != NULL ? local->world : 1; }
fsdp_link fsdp__local_link(const fsdp_local *local) { return local != NULL ? local->link : (fsdp_link){0, 0}; }

fsdp_status fsdp__host_config_read(const void *given, fsdp_host_config *out_config)
{
    fsdp_host_config config = FSDP_HOST_CONFIG_INIT;
    if (given != NULL) FSDP_TRY(fsdp__read_config("fsdp_host_config", &config, sizeof config, given, sizeof config));
    uint32_t world = fsdp__local_world(config.local);
    if (config.rank >= world)
        return fsdp__fail(FSDP_ERR_ARG, "fsdp_host_config.rank is %u in a world of %u%s", config.rank, world,
                          config.local == NULL ? " (local is NULL)" : "");
    *out_config = config;
    return FSDP_OK;
}

static uint64_t all_ranks(uint32_t world) { return world == 64 ? UINT64_MAX : ((uint64_t)1 << world) - 1; }

/* "rank 3", "ranks 1, 3". */
static void name_ranks(uint64_t ranks, char *text, size_t bytes)
{
    int length = snprintf(text, bytes, (ranks & (ranks - 1)) != 0 ? "ranks" : "rank");
    const char *comma = "";
    for (uint32_t r = 0; r < FSDP__LOCAL_WORLD && length > 0 && (size_t)length < bytes; r++) {
        if (!(ranks >> r & 1)) continue;
        length += snprintf(text + length, bytes - (size_t)length, "%s %u", comma, r);
        comma = ",";
    }
}

/* ---- Opening and closing a room ---- */

static fsdp__room *room_create(const fsdp_host_allocator *host, const fsdp__room_kind *kind, uint32_t world)
{
    fsdp__room *room = fsdp__host_alloc(host, 1, sizeof *room);
    if (room == NULL) return NULL;
    room->host = *host;
    room->kind = kind;
    room->world = world;
    room->number = 1;
    pthread_mutex_init(&room->lock, NULL);
    fsdp__host_cond_init(&room->changed);
    return room;
}

static void room_unref(fsdp__room *room)
{
    pthread_mutex_lock(&room->lock);
    uint32_t refs = --room->refs;
    pthread_mutex_unlock(&room->lock);
    if (refs > 0) return;
    pthread_cond_destroy(&room->changed);
    pthread_mutex_destroy(&room->lock);
    fsdp_host_allocator host = room->host;
    fsdp__host_free(&host, room, 1, sizeof *room);
}

static void room_ref(fsdp__room *room)
{
    pthread_mutex_lock(&room->lock);
    room->refs++;
    pthread_mutex_unlock(&room->lock);
}

/* With the group's lock held. A rank that has waited in vain takes the others with it, and the next to come begin anew. */
static fsdp_status wait_for_all(fsdp_local *local, fsdp__room *room, fsdp__room_number number, uint64_t timeout_ns)
{
    uint64_t deadline_ns = fsdp__host_after(timeout_ns), all = all_ranks(local->world);
    bool in_time = true;
    while (room->opened != all && fsdp__room_check(room) == FSDP_OK && in_time)
        in_time = fsdp__host_cond_until(&local->changed, &local->lock, deadline_ns);
    if (room->opened == all) return FSDP_OK;
    FSDP_TRY(fsdp__room_check(room));
    local->forming[number] = NULL;
    char came[320], missing[320];
    name_ranks(room->opened, came, sizeof came);
    name_ranks(all & ~room->opened, missing, sizeof missing);
    static const char *const names[FSDP__N_ROOMS] = {"communicator 0", "communicator 1", "the side channel"};
    fsdp_status status =
        fsdp__room_fail(room, FSDP_ERR_RANK_LOST, "opening %s: %s of %u came, %s did not within %.3f s", names[number],
                        came, local->world, missing, (double)timeout_ns * 1e-9);
    pthread_cond_broadcast(&local->changed);
    return status;
}

fsdp_status fsdp__room_join(const fsdp_host_config *config, const fsdp_host_allocator *host, fsdp__room_number number,
                            const fsdp__room_kind *kind, uint64_t timeout_ns, fsdp__room **out_room)
{
    fsdp_local *local = config->local;
    fsdp_status status = FSDP_OK;
    fsdp__room *room;
    if (local == NULL) {
        room = room_create(host, kind, 1);
        if (room == NULL)
            return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "communicator: no host memory for %zu bytes", sizeof *room);
        room->refs = 1;
        *out_room = room;
        return FSDP_OK;
    }

    uint64_t self = (uint64_t)1 << config->rank;
    pthread_mutex_lock(&local->lock);
    room = local->forming[number];
    if (room == NULL) room = local->forming[number] = room_create(&local->host, kind, local->world);
    if (room == NULL) {
        status = fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "communicator: no host memory for %zu bytes", sizeof *room);
    } else if (room->opened & self) {
        status = fsdp__fail(FSDP_ERR_ARG, "rank %u of a world of %u is opened twice: each rank has its own number",
                            config->rank, local->world);
    } else {
        room_ref(room);
        room->opened |= self;
        if (room->opened == all_ranks(local->world)) {
            local->forming[number] = NULL;
            pthread_cond_broadcast(&local->changed);
        }
        status = wait_for_all(local, room, number, timeout_ns);
        if (status != FSDP_OK) room_unref(room);
    }
    pthread_mutex_unlock(&local->lock);
    if (status == FSDP_OK) *out_room = room;
    return status;
}

/* ---- Failing ---- */

/* With the room's lock held. */
static fsdp_status fail_locked(fsdp__room *room, fsdp_status status, const char *format, va_list args)
{
    if (atomic_load(&room->status) == FSDP_OK) {
        vsnprintf(room->sentence, sizeof room->sentence, format, args);
        atomic_store(&room->status, status);
        pthread_cond_broadcast(&room->changed);
    }
    return fsdp__room_check(room);
}

__attribute__((format(printf, 3, 4))) static fsdp_status fail(fsdp__room *room, fsdp_status status, const char *format,
                                                              ...)
{
    va_list args;
    va_start(args, format);
    status = fail_locked(room, status, format, args);
    va_end(args);
    return status;
}

fsdp_status fsdp__room_fail(fsdp__room *room, fsdp_status status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    pthread_mutex_lock(&room->lock);
    status = fail_locked(room, status, format, args);
    pthread_mutex_unlock(&room->lock);
    va_end(args);
    return status;
}

/* The sentence is written before the status and never again, so it needs no lock. */
fsdp_status fsdp__room_check(fsdp__room *room)
{
    fsdp_status status = (fsdp_status)atomic_load(&room->status);
    return status == FSDP_OK ? FSDP_OK : fsdp__fail(status, "%s", room->sentence);
}

static bool has_failed(const fsdp__room *room) { return atomic_load(&room->status) != FSDP_OK; }

/* With the lock held. Nobody fails out of a meeting while a peer may still read what it brought. */
static fsdp_status fail_out(fsdp__room *room)
{
    while (room->n_reading > 0) pthread_cond_wait(&room->changed, &room->lock);
    return fsdp__room_check(room);
}

/* ---- Meetings ---- */

/* With the lock held: the first rank that came and brought something else. */
static fsdp_status compare(fsdp__room *room, uint32_t rank)
{
    for (uint32_t r = 0; r < room->world; r++) {
        uint32_t place = 0;
        if (!(room->arrived >> r & 1) || room->kind->same(room->item[r], room->item[rank], &place)) continue;
        uint32_t low = r < rank ? r : rank, high = r < rank ? rank : r;
        char first[400], second[400];
        room->kind->describe(room->item[low], place, first, sizeof first);
        room->kind->describe(room->item[high], place, second, sizeof second);
        return fail(room, FSDP_ERR_MISMATCH, "rank %u: %s; rank %u: %s", low, first, high, second);
    }
    return FSDP_OK;
}

/* With the lock held: `ranks` are missing at what `item` is for. */
static void lose(fsdp__room *room, uint64_t ranks, const void *item, const char *how)
{
    char names[320], what[400];
    name_ranks(ranks, names, sizeof names);
    room->kind->describe(item, 0, what, sizeof what);
    (void)fail(room, FSDP_ERR_RANK_LOST, "%s: %s of %u %s", what, names, room->world, how);
}

/* With the lock held. */
static void wait_for_peers(fsdp__room *room, const void *item, uint64_t timeout_ns)
{
    uint64_t all = all_ranks(room->world), deadline_ns = fsdp__host_after(timeout_ns);
    bool in_time = true;
    while (room->arrived != all && !has_failed(room) && in_time)
        in_time = fsdp__host_cond_until(&room->changed, &room->lock, deadline_ns);
    if (room->arrived == all || has_failed(room)) return;
    char how[64];
    snprintf(how, sizeof how, "did not come within %.3f s", (double)timeout_ns * 1e-9);
    lose(room, all & ~room->arrived, item, how);
}

fsdp_status fsdp__room_enter(fsdp__room *room, uint32_t rank, uint64_t number, const void *item, uint64_t timeout_ns,
                             uint64_t *out_start_ns)
{
    fsdp_status status = FSDP_OK;
    pthread_mutex_lock(&room->lock);
    while (room->number != number && !has_failed(room)) pthread_cond_wait(&room->changed, &room->lock);
    if (!has_failed(room)) {
        room->item[rank] = item;
        (void)compare(room, rank);
        room->arrived |= (uint64_t)1 << rank;
        if (room->closed & ~room->arrived) lose(room, room->closed & ~room->arrived, item, "closed before it came");
        if (room->arrived == all_ranks(room->world)) {
            room->start_ns = fsdp__host_now_ns();
            pthread_cond_broadcast(&room->changed);
        }
        wait_for_peers(room, item, timeout_ns);
    }
    if (has_failed(room)) {
        status = fail_out(room);
    } else {
        room->n_reading++;
        *out_start_ns = room->start_ns;
    }
    pthread_mutex_unlock(&room->lock);
    return status;
}

const void *fsdp__room_item(const fsdp__room *room, uint32_t rank) { return room->item[rank]; }

fsdp_status fsdp__room_sync(fsdp__room *room, bool more)
{
    fsdp_status status = FSDP_OK;
    pthread_mutex_lock(&room->lock);
    uint64_t phase = room->phases;
    room->n_reading--;
    if (++room->n_synced == room->world) {
        room->n_synced = 0;
        room->phases++;
        pthread_cond_broadcast(&room->changed);
    } else if (has_failed(room)) {
        pthread_cond_broadcast(&room->changed);
    }
    while (room->phases == phase && !has_failed(room)) pthread_cond_wait(&room->changed, &room->lock);
    if (room->phases == phase || (more && has_failed(room))) status = fail_out(room);
    else if (more) room->n_reading++;
    pthread_mutex_unlock(&room->lock);
    return status;
}

fsdp_status fsdp__room_leave(fsdp__room *room, uint64_t not_before_ns, uint64_t *out_end_ns)
{
    pthread_mutex_lock(&room->lock);
    uint64_t now = fsdp__host_now_ns();
    while (now < not_before_ns && !has_failed(room)) {
        fsdp__host_cond_until(&room->changed, &room->lock, not_before_ns);
        now = fsdp__host_now_ns();
    }
    fsdp_status status = fsdp__room_check(room);
    *out_end_ns = now; /* taken before the next meeting can start */
    if (++room->n_left == room->world) {
        room->n_left = 0;
        room->arrived = 0;
        room->number++;
        pthread_cond_broadcast(&room->changed);
    }
    pthread_mutex_unlock(&room->lock);
    return status;
}

void fsdp__room_quit(fsdp__room *room, uint32_t rank)
{
    uint64_t self = (uint64_t)1 << rank;
    pthread_mutex_lock(&room->lock);
    room->closed |= self;
    if (room->arrived != 0 && !(room->arrived & self) && !has_failed(room)) {
        uint32_t waiting = (uint32_t)__builtin_ctzll(room->arrived);
        lose(room, self, room->item[waiting], "closed before it came");
    }
    pthread_mutex_unlock(&room->lock);
    room_unref(room);
}
