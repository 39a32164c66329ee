/* SPDX-License-Identifier: MIT */
/* Collectives: a rank's part begins by copying what it sends; the last to begin computes what everybody gets; each part
 * ends, and is written, by itself. Sums are the host backend's. */
#include <stdio.h>
#include <string.h>

#include "explore_parts.h"
#include "lib/host/host.h"

enum { COPY_ALIGNMENT = 64 };

/* ---- Names and comparison ---- */

static const char *kind_name(fsdp_operation kind)
{
    static const char *const names[] = {"all-gather", "reduce-scatter", "all-reduce", "broadcast", "barrier"};
    return (size_t)kind < sizeof names / sizeof *names ? names[kind] : "?";
}

static const char *label_of(const fsdp_collective *c) { return c->label != NULL ? c->label : ""; }

static bool same_collective(const fsdp_collective *a, const fsdp_collective *b)
{
    return a->kind == b->kind && a->count == b->count && a->dtype == b->dtype &&
           strcmp(label_of(a), label_of(b)) == 0 && (a->kind != FSDP_OPERATION_BROADCAST || a->root == b->root);
}

static bool same_group(const explore_group *a, const explore_group *b, uint32_t *out_place)
{
    uint32_t n = a->n < b->n ? a->n : b->n;
    for (*out_place = 0; *out_place < n; ++*out_place)
        if (!same_collective(&a->part[*out_place].c, &b->part[*out_place].c)) return false;
    *out_place = 0;
    return a->n == b->n;
}

/* "#12 all-gather of h.0 (294912 fp32)"; of a group "#12, 2 of 3: all-gather …". */
void explore__group_describe(const explore_group *group, uint32_t place, char *text, size_t bytes)
{
    const fsdp_collective *c = &group->part[place].c;
    char part[32] = "", root[32] = "", data[96] = "";
    if (group->n > 1) snprintf(part, sizeof part, ", %u of %u:", place + 1, group->n);
    if (c->kind == FSDP_OPERATION_BROADCAST) snprintf(root, sizeof root, " from rank %u", c->root);
    if (c->kind != FSDP_OPERATION_BARRIER)
        snprintf(data, sizeof data, " (%llu %s%s)", (unsigned long long)c->count, fsdp_dtype_name(c->dtype), root);
    snprintf(text, bytes, "#%llu%s %s%s%.200s%s", (unsigned long long)group->number, part, kind_name(c->kind),
             label_of(c)[0] != 0 ? " of " : "", label_of(c), data);
}

/* ---- Meetings ---- */

static explore_meeting *meeting_of(const explore_group *group)
{
    return &group->comm->room->meeting[group->number % 2];
}
static uint64_t bit_of(const explore_comm *comm) { return (uint64_t)1 << comm->rank; }

static const explore_group *group_at(const explore_meeting *m, uint32_t rank)
{
    return explore__head(m->stream[rank])->u.group;
}

bool explore__group_is_complete(const explore_group *group)
{
    return meeting_of(group)->arrived == explore__all_ranks(group->comm->x);
}

bool explore__group_can_begin(const explore_group *group)
{
    const explore_comm *comm = group->comm;
    if (comm->room->status != FSDP_OK) return true;
    if (group->number != comm->n_over + 1) return false;
    /* The meeting before the last may not be over for everybody; then its peers' parts are still in its place. */
    return !(meeting_of(group)->arrived & bit_of(comm));
}

bool explore__group_can_end(explore_stream *s, const explore_group *group)
{
    if (!explore__group_is_complete(group)) return false;
    return !s->dev->x->config.free_threads || explore__now(s->dev->x) >= s->not_before_ns;
}

static void lose(explore_room *room, const explore_group *group, uint64_t ranks, const char *how)
{
    char names[320], what[400];
    explore__name_ranks(ranks, names, sizeof names);
    explore__group_describe(group, 0, what, sizeof what);
    explore__room_fail(room, FSDP_ERR_RANK_LOST, "%s: %s of %u %s", what, names, room->x->config.world, how);
}

static const explore_group *first_waiting(const explore_meeting *m)
{
    return group_at(m, (uint32_t)__builtin_ctzll(m->arrived & ~m->over));
}

static bool is_waiting(const explore_room *room, const explore_meeting *m)
{
    return m->arrived != 0 && m->arrived != explore__all_ranks(room->x);
}

bool explore__meeting_lose(explore *x, uint64_t now_ns)
{
    for (explore_room *room = x->rooms; room != NULL; room = room->next) {
        for (int i = 0; i < 2 && room->number != EXPLORE_SIDE && room->status == FSDP_OK; i++) {
            const explore_meeting *m = &room->meeting[i];
            if (!is_waiting(room, m)) continue;
            bool late = false;
            uint64_t timeout_ns = 0;
            for (uint32_t r = 0; r < x->config.world && !late; r++) {
                if (!(m->arrived >> r & 1)) continue;
                late = now_ns == UINT64_MAX || group_at(m, r)->deadline_ns <= now_ns;
                timeout_ns = group_at(m, r)->comm->timeout_ns;
            }
            if (!late) continue;
            char how[64];
            snprintf(how, sizeof how, "did not come within %.3f s", (double)timeout_ns * 1e-9);
            lose(room, first_waiting(m), explore__all_ranks(x) & ~m->arrived, how);
            return true;
        }
    }
    return false;
}

void explore__meetings_close(explore_room *room, uint32_t rank)
{
    for (int i = 0; i < 2 && room->status == FSDP_OK; i++) {
        const explore_meeting *m = &room->meeting[i];
        if (is_waiting(room, m) && !(m->arrived >> rank & 1))
            lose(room, first_waiting(m), (uint64_t)1 << rank, "closed before it came");
    }
}

/* The room has failed: whoever waits in it fails. What all have come to ends as it would have, unless it is aborted. */
void explore__meetings_fail(explore_room *room)
{
    for (int i = 0; i < 2; i++) {
        explore_meeting *m = &room->meeting[i];
        if (!is_waiting(room, m) && room->status != FSDP_ERR_ABORTED) continue;
        uint64_t waiting = m->arrived & ~m->over;
        m->over |= waiting;
        for (uint32_t r = 0; r < room->x->config.world; r++) {
            if (!(waiting >> r & 1)) continue;
            explore_stream *s = m->stream[r];
            explore_group *group = explore__head(s)->u.group;
            explore__over(s);
            explore__device_fail(s->dev, room->status, room->sentence);
            explore__group_release(group);
        }
    }
}

/* ---- Data ---- */

static uint64_t bytes_of(const fsdp_collective *c) { return c->count * fsdp_dtype_bytes(c->dtype); }
static size_t aligned(uint64_t bytes) { return (bytes + COPY_ALIGNMENT - 1) / COPY_ALIGNMENT * COPY_ALIGNMENT; }

/* What a rank sends, and what it gets, in bytes. */
static uint64_t sent_bytes(const explore_comm *comm, const fsdp_collective *c)
{
    if (c->kind == FSDP_OPERATION_BARRIER) return 0;
    if (c->kind == FSDP_OPERATION_BROADCAST && c->root != comm->rank) return 0;
    return bytes_of(c) * (c->kind == FSDP_OPERATION_REDUCE_SCATTER ? comm->x->config.world : 1);
}

static uint64_t result_bytes(const explore_comm *comm, const fsdp_collective *c)
{
    if (c->kind == FSDP_OPERATION_BARRIER) return 0;
    return bytes_of(c) * (c->kind == FSDP_OPERATION_ALL_GATHER ? comm->x->config.world : 1);
}

/* With no memory for it, or where it must not read, a part sends nonsense: there is a complaint already. */
static void copy_sent(explore_stream *s, explore_group *group)
{
    const explore_comm *comm = group->comm;
    size_t bytes = COPY_ALIGNMENT;
    for (uint32_t i = 0; i < group->n; i++)
        bytes += aligned(sent_bytes(comm, &group->part[i].c)) + aligned(result_bytes(comm, &group->part[i].c));
    char *copy = explore__copy_room(s, bytes);
    for (uint32_t i = 0; i < group->n; i++) {
        const fsdp_collective *c = &group->part[i].c;
        uint64_t n_sent = sent_bytes(comm, c), n_result = result_bytes(comm, c);
        group->part[i].sent = copy;
        group->part[i].result = copy + aligned(n_sent);
        if (n_sent > 0 && s->dropped) memset(copy, 0xa5, n_sent);
        else if (n_sent > 0) memcpy(copy, c->send, n_sent);
        copy += aligned(n_sent) + aligned(n_result);
    }
}

static const char *sent_by(const explore_meeting *m, uint32_t rank, uint32_t i)
{
    return group_at(m, rank)->part[i].sent;
}

/* The host backend's fold: rank order, in fp32, rounded once. */
static void fold(const explore_meeting *m, const explore_group *group, uint32_t i, uint64_t offset)
{
    const fsdp_collective *c = &group->part[i].c;
    const void *sources[EXPLORE_RANKS];
    uint32_t world = group->comm->x->config.world;
    for (uint32_t r = 0; r < world; r++) sources[r] = sent_by(m, r, i) + offset;
    fsdp__host_fold(group->part[i].result, sources, world, c->count, c->dtype);
}

static void compute(const explore_meeting *m, const explore_group *group, uint32_t i)
{
    const explore_comm *comm = group->comm;
    const fsdp_collective *c = &group->part[i].c;
    uint64_t bytes = bytes_of(c);
    char *result = group->part[i].result;
    if (c->count == 0) return;
    switch (c->kind) {
    case FSDP_OPERATION_ALL_GATHER:
        for (uint32_t r = 0; r < comm->x->config.world; r++) memcpy(result + r * bytes, sent_by(m, r, i), bytes);
        break;
    case FSDP_OPERATION_REDUCE_SCATTER: fold(m, group, i, comm->rank * bytes); break;
    case FSDP_OPERATION_ALL_REDUCE:
        if (comm->rank == 0) fold(m, group, i, 0);
        else memcpy(result, group_at(m, 0)->part[i].result, bytes);
        break;
    case FSDP_OPERATION_BROADCAST: memcpy(result, sent_by(m, c->root, i), bytes); break;
    default: break;
    }
}

/* What the operation takes on the link, by host.h's counts. */
static uint64_t link_ns(const explore_group *group)
{
    const explore_config *config = &group->comm->x->config;
    double bytes = 0.0, world = (double)config->world;
    for (uint32_t i = 0; i < group->n; i++) {
        const fsdp_collective *c = &group->part[i].c;
        double each = (double)bytes_of(c);
        if (c->kind == FSDP_OPERATION_ALL_GATHER || c->kind == FSDP_OPERATION_REDUCE_SCATTER)
            bytes += each * (world - 1);
        if (c->kind == FSDP_OPERATION_ALL_REDUCE) bytes += 2.0 * each * (world - 1) / world;
        if (c->kind == FSDP_OPERATION_BROADCAST) bytes += each;
    }
    if (config->link_bytes_per_second == 0) return config->link_latency_ns;
    return config->link_latency_ns + (uint64_t)(bytes * 1e9 / (double)config->link_bytes_per_second);
}

/* ---- Steps ---- */

static void compare(explore_room *room, const explore_meeting *m, const explore_group *group)
{
    uint32_t rank = group->comm->rank;
    for (uint32_t r = 0; r < room->x->config.world; r++) {
        uint32_t place = 0;
        if (!(m->arrived >> r & 1) || same_group(group_at(m, r), group, &place)) continue;
        const explore_group *low = r < rank ? group_at(m, r) : group, *high = r < rank ? group : group_at(m, r);
        char first[400], second[400];
        explore__group_describe(low, place, first, sizeof first);
        explore__group_describe(high, place, second, sizeof second);
        explore__room_fail(room, FSDP_ERR_MISMATCH, "rank %u: %s; rank %u: %s", low->comm->rank, first,
                           high->comm->rank, second);
        return;
    }
}

/* Taken off first: failing the device skips the rest of its streams. */
static void fail_alone(explore_stream *s, explore_group *group)
{
    const explore_room *room = group->comm->room;
    explore__over(s);
    explore__device_fail(s->dev, room->status, room->sentence);
    explore__group_release(group);
}

static void all_have_come(explore_meeting *m, const explore_group *group)
{
    explore *x = group->comm->x;
    m->start_ns = explore__now(x);
    for (uint32_t r = 0; r < x->config.world; r++) {
        m->stream[r]->not_before_ns = x->config.free_threads ? m->start_ns + link_ns(group) : m->start_ns;
        for (uint32_t i = 0; i < group->n; i++) compute(m, group_at(m, r), i);
    }
}

void explore__group_begin(explore_stream *s, explore_group *group)
{
    explore_comm *comm = group->comm;
    explore_room *room = comm->room;
    explore *x = comm->x;
    explore_meeting *m = meeting_of(group);
    if (room->status != FSDP_OK) {
        fail_alone(s, group);
        return;
    }
    s->begun = true;
    s->start_ns = explore__now(x);
    s->not_before_ns = UINT64_MAX;
    if (__builtin_add_overflow(s->start_ns, comm->timeout_ns, &group->deadline_ns)) group->deadline_ns = UINT64_MAX;
    s->dropped = !explore__check_ranges(s, explore__head(s));
    copy_sent(s, group);
    m->stream[comm->rank] = s;
    uint64_t before = m->arrived;
    compare(room, m, group); /* whoever came before has failed by it; this rank has not come yet */
    if (room->status != FSDP_OK) {
        s->begun = false;
        fail_alone(s, group);
        return;
    }
    m->arrived = before | bit_of(comm);
    uint64_t gone = room->closed & ~m->arrived;
    if (gone != 0) lose(room, group, gone, "closed before it came");
    else if (m->arrived == explore__all_ranks(x)) all_have_come(m, group);
}

void explore__group_end(explore_stream *s, explore_group *group)
{
    explore_comm *comm = group->comm;
    explore_meeting *m = meeting_of(group);
    uint64_t now = explore__now(comm->x);
    for (uint32_t i = 0; i < group->n; i++) {
        const fsdp_collective *c = &group->part[i].c;
        uint64_t bytes = result_bytes(comm, c);
        if (bytes > 0 && !s->dropped) memcpy(c->recv, group->part[i].result, bytes);
        if (c->span != NULL) *c->span = (fsdp_span){m->start_ns, now};
    }
    m->over |= bit_of(comm);
    if (m->over == explore__all_ranks(comm->x)) m->arrived = m->over = 0;
    comm->n_over++;
    explore__over(s);
    explore__group_release(group);
    if (s->dev->status != FSDP_OK) explore__device_skip(s->dev);
}

void explore__group_skip(explore_group *group, const char *why)
{
    char what[400];
    explore__group_describe(group, 0, what, sizeof what);
    explore__room_fail(group->comm->room, FSDP_ERR_RANK_LOST, "%s: rank %u of %u did not come: %.400s", what,
                       group->comm->rank, group->comm->x->config.world, why);
}
