/* SPDX-License-Identifier: MIT */
/* Where ranks meet. A room belongs to one generation of contexts: its ranks open it together, and it goes with the last
 * that leaves. The sentences are the host backend's, so that one suite checks both. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "explore_parts.h"

fsdp_status explore__rank_read(const void *config, explore_rank *out_rank)
{
    const explore_rank *rank = config;
    if (rank == NULL || rank->size != sizeof *rank || rank->x == NULL)
        return fsdp__fail(FSDP_ERR_ARG, "exploration device: backend_config is no explore_rank");
    if (rank->rank >= rank->x->config.world)
        return fsdp__fail(FSDP_ERR_ARG, "explore_rank.rank is %u in a world of %u", rank->rank, rank->x->config.world);
    *out_rank = *rank;
    return FSDP_OK;
}

uint64_t explore__all_ranks(const explore *x)
{
    return x->config.world == 64 ? UINT64_MAX : ((uint64_t)1 << x->config.world) - 1;
}

/* "rank 3", "ranks 1, 3". */
void explore__name_ranks(uint64_t ranks, char *text, size_t bytes)
{
    int length = snprintf(text, bytes, (ranks & (ranks - 1)) != 0 ? "ranks" : "rank");
    const char *comma = "";
    for (uint32_t r = 0; r < EXPLORE_RANKS && length > 0 && (size_t)length < bytes; r++) {
        if (!(ranks >> r & 1)) continue;
        length += snprintf(text + length, bytes - (size_t)length, "%s %u", comma, r);
        comma = ",";
    }
}

/* ---- Failing: the first failure stays, and is everybody's ---- */

void explore__room_fail(explore_room *room, fsdp_status status, const char *format, ...)
{
    if (room->status != FSDP_OK) return;
    va_list args;
    va_start(args, format);
    vsnprintf(room->sentence, sizeof room->sentence, format, args);
    va_end(args);
    room->status = status;
    if (room->number != EXPLORE_SIDE) explore__meetings_fail(room);
    explore__wake(room->x);
}

fsdp_status explore__room_check(const explore_room *room)
{
    return room->status == FSDP_OK ? FSDP_OK : fsdp__fail(room->status, "%s", room->sentence);
}

/* ---- Opening and leaving ---- */

static bool has_formed(const void *room_)
{
    const explore_room *room = room_;
    return room->status != FSDP_OK || room->opened == explore__all_ranks(room->x);
}

static explore_room *room_of(explore *x, uint32_t number)
{
    if (x->forming[number] != NULL) return x->forming[number];
    explore_room *room = calloc(1, sizeof *room);
    if (room == NULL) return NULL;
    room->x = x;
    room->number = number;
    room->next = x->rooms;
    x->rooms = room;
    return x->forming[number] = room;
}

static void room_lost(explore_room *room, uint64_t timeout_ns)
{
    explore *x = room->x;
    static const char *const names[EXPLORE_N_ROOMS] = {"communicator 0", "communicator 1", "the side channel"};
    char came[320], missing[320];
    explore__name_ranks(room->opened, came, sizeof came);
    explore__name_ranks(explore__all_ranks(x) & ~room->opened, missing, sizeof missing);
    if (x->forming[room->number] == room) x->forming[room->number] = NULL;
    explore__room_fail(room, FSDP_ERR_RANK_LOST, "opening %s: %s of %u came, %s did not within %.3f s",
                       names[room->number], came, x->config.world, missing, (double)timeout_ns * 1e-9);
}

/* With the lock held, as all here. */
static void room_unref(explore_room *room)
{
    explore *x = room->x;
    if (room->opened & ~room->closed) return;
    if (x->forming[room->number] == room) x->forming[room->number] = NULL;
    explore_room **link = &x->rooms;
    while (*link != room) link = &(*link)->next;
    *link = room->next;
    free(room);
}

explore_room *explore__room_join(explore *x, uint32_t number, uint32_t rank, uint64_t timeout_ns,
                                 fsdp_status *out_status)
{
    uint64_t self = (uint64_t)1 << rank;
    explore_room *room = room_of(x, number);
    if (room == NULL) {
        *out_status = fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "exploration device: no host memory for a room");
        return NULL;
    }
    if (room->opened & self) {
        *out_status = fsdp__fail(FSDP_ERR_ARG, "rank %u of a world of %u is opened twice: each rank has its own number",
                                 rank, x->config.world);
        return NULL;
    }
    room->opened |= self;
    if (room->opened == explore__all_ranks(x)) x->forming[number] = NULL;
    explore__wake(x);
    const explore_wait wait = {has_formed, room, "opens a room", NULL, NULL, room};
    if (!explore__block(x, &wait, timeout_ns) && !has_formed(room)) room_lost(room, timeout_ns);
    *out_status = room->opened == explore__all_ranks(x) ? FSDP_OK : explore__room_check(room);
    if (*out_status == FSDP_OK) return room;
    room->closed |= self;
    room_unref(room);
    return NULL;
}

static void side_lost(explore_room *room, uint64_t missing, const char *how)
{
    char names[320];
    explore__name_ranks(missing, names, sizeof names);
    uint32_t waiting = (uint32_t)__builtin_ctzll(room->arrived);
    explore__room_fail(room, FSDP_ERR_RANK_LOST, "side channel #%llu of %zu bytes: %s of %u %s",
                       (unsigned long long)room->n_complete + 1, room->bytes[waiting], names, room->x->config.world,
                       how);
}

void explore__room_quit(explore_room *room, uint32_t rank)
{
    uint64_t self = (uint64_t)1 << rank;
    room->closed |= self;
    if (room->number == EXPLORE_SIDE) {
        if (room->arrived != 0 && !(room->arrived & self)) side_lost(room, self, "closed before it came");
    } else {
        explore__meetings_close(room, rank);
    }
    room_unref(room);
}

/* ---- The side channel ---- */

typedef struct side {
    explore_room *room;
    uint32_t rank;
    uint64_t n_gathers;
} side;

static fsdp_status side_open(const fsdp_side_args *args, void **out_side, uint32_t *out_rank, uint32_t *out_world)
{
    explore_rank rank;
    FSDP_TRY(explore__rank_read(args->backend_config, &rank));
    side *s = calloc(1, sizeof *s);
    if (s == NULL) return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "exploration device: no host memory for a side channel");
    fsdp_status status;
    s->rank = rank.rank;
    pthread_mutex_lock(&rank.x->lock);
    s->room = explore__room_join(rank.x, EXPLORE_SIDE, rank.rank, args->timeout_ns, &status);
    pthread_mutex_unlock(&rank.x->lock);
    if (s->room == NULL) {
        free(s);
        return status;
    }
    *out_side = s;
    *out_rank = rank.rank;
    *out_world = rank.x->config.world;
    return FSDP_OK;
}

static void side_close(void *side_)
{
    side *s = side_;
    explore *x = s->room->x;
    pthread_mutex_lock(&x->lock);
    explore__room_quit(s->room, s->rank);
    pthread_mutex_unlock(&x->lock);
    free(s);
}

static void side_compare(explore_room *room, uint32_t rank)
{
    for (uint32_t r = 0; r < room->x->config.world; r++) {
        if (!(room->arrived >> r & 1) || room->bytes[r] == room->bytes[rank]) continue;
        uint32_t low = r < rank ? r : rank, high = r < rank ? rank : r;
        unsigned long long number = room->n_complete + 1;
        explore__room_fail(room, FSDP_ERR_MISMATCH,
                           "rank %u: side channel #%llu of %zu bytes; rank %u: side channel #%llu of %zu bytes", low,
                           number, room->bytes[low], high, number, room->bytes[high]);
        return;
    }
}

/* The last that comes hands everything out, while all the others still stand there. */
static void side_complete(explore_room *room)
{
    uint32_t world = room->x->config.world;
    for (uint32_t to = 0; to < world; to++) {
        for (uint32_t from = 0; from < world; from++) {
            size_t bytes = room->bytes[from];
            char *dst = (char *)room->all[to] + from * bytes;
            if (bytes > 0 && dst != room->mine[from]) memcpy(dst, room->mine[from], bytes);
        }
    }
    room->arrived = 0;
    room->n_complete++;
    explore__wake(room->x);
}

static bool has_gathered(const void *side_)
{
    const side *s = side_;
    return s->room->status != FSDP_OK || s->room->n_complete >= s->n_gathers;
}

static void side_arrive(side *s, const void *mine, void *all, size_t bytes)
{
    explore_room *room = s->room;
    room->mine[s->rank] = mine;
    room->all[s->rank] = all;
    room->bytes[s->rank] = bytes;
    side_compare(room, s->rank);
    room->arrived |= (uint64_t)1 << s->rank;
    if (room->closed & ~room->arrived) side_lost(room, room->closed & ~room->arrived, "closed before it came");
    if (room->status == FSDP_OK && room->arrived == explore__all_ranks(room->x)) side_complete(room);
}

static fsdp_status all_gather(void *side_, const void *mine, void *all, size_t bytes, uint64_t timeout_ns)
{
    side *s = side_;
    explore_room *room = s->room;
    explore *x = room->x;
    pthread_mutex_lock(&x->lock);
    s->n_gathers++;
    if (room->status == FSDP_OK) side_arrive(s, mine, all, bytes);
    const explore_wait wait = {has_gathered, s, "gathers on the side channel", NULL, NULL, room};
    if (!explore__block(x, &wait, timeout_ns) && !has_gathered(s)) {
        char how[64];
        snprintf(how, sizeof how, "did not come within %.3f s", (double)timeout_ns * 1e-9);
        side_lost(room, explore__all_ranks(x) & ~room->arrived, how);
    }
    fsdp_status status = room->n_complete >= s->n_gathers ? FSDP_OK : explore__room_check(room);
    pthread_mutex_unlock(&x->lock);
    return status;
}

static fsdp_status broadcast(void *side_, void *data, size_t bytes, uint32_t root, uint64_t timeout_ns)
{
    const side *s = side_;
    char *all = malloc(s->room->x->config.world * bytes + 1);
    if (all == NULL) return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "exploration device: no host memory for a broadcast");
    fsdp_status status = all_gather(side_, data, all, bytes, timeout_ns);
    if (status == FSDP_OK) memcpy(data, all + root * bytes, bytes);
    free(all);
    return status;
}

static void side_fail(void *side_, fsdp_status status, const char *sentence)
{
    side *s = side_;
    pthread_mutex_lock(&s->room->x->lock);
    explore__room_fail(s->room, status, "%s", sentence);
    pthread_mutex_unlock(&s->room->x->lock);
}

static fsdp_status side_check(void *side_)
{
    side *s = side_;
    pthread_mutex_lock(&s->room->x->lock);
    fsdp_status status = explore__room_check(s->room);
    pthread_mutex_unlock(&s->room->x->lock);
    return status;
}

const fsdp_side_ops explore__side_ops = {
    .size = sizeof explore__side_ops,
    .open = side_open,
    .close = side_close,
    .all_gather = all_gather,
    .broadcast = broadcast,
    .fail = side_fail,
    .check = side_check,
};
