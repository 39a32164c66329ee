/* SPDX-License-Identifier: MIT */
/* The collectives' table. A communicator is one wire: a rank's operations have numbers, given in host order, and run one
 * after another in that order on whatever streams they are. */
#include <stdio.h>
#include <stdlib.h>

#include "attach.h"
#include "check.h"
#include "explore_parts.h"

/* ---- The communicator ---- */

static void comm_free(explore_comm *comm)
{
    while (comm->free_groups != NULL) {
        explore_group *group = comm->free_groups;
        comm->free_groups = group->next_free;
        free(group);
    }
    free(comm);
}

/* The last group of a closed communicator takes it along. */
void explore__group_release(explore_group *group)
{
    explore_comm *comm = group->comm;
    group->next_free = comm->free_groups;
    comm->free_groups = group;
    if (--comm->n_pending > 0 || !comm->closed) return;
    explore__room_quit(comm->room, comm->rank);
    comm_free(comm);
}

static explore_group *group_take(explore_comm *comm, uint32_t n)
{
    explore_group **link = &comm->free_groups, *group;
    while (*link != NULL && (*link)->capacity < n) link = &(*link)->next_free;
    group = *link;
    if (group != NULL) {
        *link = group->next_free;
        return group;
    }
    uint32_t capacity = n < 4 ? 4 : n;
    group = calloc(1, sizeof *group + capacity * sizeof *group->part);
    if (group == NULL) return NULL;
    group->comm = comm;
    group->capacity = capacity;
    return group;
}

/* With the lock held. */
static fsdp_status enqueue_locked(explore_comm *comm, explore_stream *s, const fsdp_collective *list, uint32_t n)
{
    FSDP_TRY(explore__room_check(comm->room));
    explore_group *group = group_take(comm, n);
    if (group == NULL)
        return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "communicator %u: no host memory for a group of %u", comm->index, n);
    group->number = comm->n_enqueued + 1;
    group->n = n;
    for (uint32_t i = 0; i < n; i++) group->part[i].c = list[i];
    comm->n_pending++;
    fsdp_status status = explore__push(s, (explore_item){.kind = EXPLORE_GROUP, .u.group = group});
    if (status == FSDP_OK) {
        comm->n_enqueued++;
        return explore__after_push(s);
    }
    /* A device that has failed refuses: peers must not wait for this rank. */
    if (comm->dev->status != FSDP_OK) {
        explore__group_skip(group, comm->dev->sentence);
        (void)explore__device_check(comm->dev);
    }
    explore__group_release(group);
    return status;
}

static fsdp_status enqueue(void *comm_, void *stream, const fsdp_collective *list, uint32_t n)
{
    explore_comm *comm = comm_;
    explore *x = comm->x;
    pthread_mutex_lock(&x->lock);
    fsdp_status status = enqueue_locked(comm, stream, list, n);
    pthread_mutex_unlock(&x->lock);
    return status;
}

static void comm_abort(void *comm_)
{
    explore_comm *comm = comm_;
    pthread_mutex_lock(&comm->x->lock);
    explore__room_fail(comm->room, FSDP_ERR_ABORTED, "rank %u aborted communicator %u", comm->rank, comm->index);
    pthread_mutex_unlock(&comm->x->lock);
}

static fsdp_status comm_check(void *comm_)
{
    explore_comm *comm = comm_;
    pthread_mutex_lock(&comm->x->lock);
    fsdp_status status = explore__room_check(comm->room);
    pthread_mutex_unlock(&comm->x->lock);
    return status;
}

static fsdp_status comm_open(const fsdp_comm_args *args, void **out_comm)
{
    explore_rank rank;
    FSDP_TRY(explore__rank_read(args->backend_config, &rank));
    if (args->index > 1) return fsdp__fail(FSDP_ERR_ARG, "communicator %u: there are 0 and 1", args->index);
    explore_comm *comm = calloc(1, sizeof *comm);
    if (comm == NULL)
        return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "exploration device: no host memory for a communicator");
    comm->x = rank.x;
    comm->dev = args->dev;
    comm->rank = rank.rank;
    comm->index = args->index;
    comm->timeout_ns = args->timeout_ns;
    fsdp_status status;
    pthread_mutex_lock(&rank.x->lock);
    comm->room = explore__room_join(rank.x, args->index, rank.rank, args->timeout_ns, &status);
    if (comm->room != NULL) {
        comm->next = comm->dev->comms;
        comm->dev->comms = comm;
    }
    pthread_mutex_unlock(&rank.x->lock);
    if (comm->room == NULL) {
        comm_free(comm);
        return status;
    }
    *out_comm = comm;
    return FSDP_OK;
}

/* Groups that are still enqueued run into the failed room. */
static void comm_close(void *comm_)
{
    explore_comm *comm = comm_;
    explore *x = comm->x;
    pthread_mutex_lock(&x->lock);
    explore_comm **link = &comm->dev->comms;
    while (*link != comm) link = &(*link)->next;
    *link = comm->next;
    if (comm->n_pending > 0)
        explore__room_fail(comm->room, FSDP_ERR_RANK_LOST, "rank %u closed communicator %u with %u operations enqueued",
                           comm->rank, comm->index, comm->n_pending);
    comm->closed = true;
    if (comm->n_pending == 0) {
        explore__room_quit(comm->room, comm->rank);
        comm_free(comm);
    }
    pthread_mutex_unlock(&x->lock);
}

const fsdp_comm_ops explore__comm_ops = {
    .size = sizeof explore__comm_ops,
    .name = "explore",
    .open = comm_open,
    .close = comm_close,
    .enqueue = enqueue,
    .check = comm_check,
    .abort = comm_abort,
    .attach = fsdp__attach_nothing,
    .detach = fsdp__detach_nothing,
};
