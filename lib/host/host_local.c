/* SPDX-License-Identifier: MIT */
/* Ranks as threads of one process: how they find their rooms. A place belongs to one generation of contexts: its ranks open it
 * together, and it goes with the last that leaves, so that a local group can be used again and an early close hurts nobody's
 * memory. */
#include <stdio.h>
#include <string.h>

#include "check.h"
#include "host.h"
#include "hostmem.h"

/* A room's shared part between threads, and who holds it. */
struct fsdp__place {
    fsdp_host_allocator host;
    uint32_t world, n_opened;
    atomic_uint refs;
    bool opened[FSDP__ROOM_WORLD];       /* who has come; under the group's lock */
    char given_up[FSDP__SENTENCE_BYTES]; /* a rank has waited in vain: nobody opens it any more */
    fsdp__tellers tellers;
    _Alignas(64) unsigned char shared[];
};

struct fsdp_local {
    fsdp_host_allocator host;
    uint32_t world;
    fsdp_link link;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    fsdp__place *forming[FSDP__N_ROOMS]; /* some of its ranks have come; NULL: none */
};

fsdp_status fsdp_local_create(uint32_t world, const fsdp_link *link, fsdp_local **out_local)
{
    FSDP_NEED(out_local);
    if (world == 0 || world > FSDP__ROOM_WORLD)
        return fsdp__fail(FSDP_ERR_ARG, "fsdp_local_create: a world of %u, expected 1 to %d", world, FSDP__ROOM_WORLD);
    fsdp_host_allocator none = {NULL, NULL, NULL, NULL}, host;
    FSDP_TRY(fsdp__host_allocator_resolve(&none, &host));
    fsdp_local *local = fsdp__host_alloc(&host, 1, sizeof *local);
    if (local == NULL)
        return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "fsdp_local_create: no host memory for %zu bytes", sizeof *local);
    local->host = host;
    local->world = world;
    if (link != NULL) local->link = *link;
    pthread_mutex_init(&local->lock, NULL);
    fsdp__cond_init(&local->changed);
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

uint32_t fsdp__local_world(const fsdp_local *local) { return local->world; }
fsdp_link fsdp__local_link(const fsdp_local *local) { return local->link; }

/* ---- Places ---- */

static size_t place_bytes(uint32_t world)
{
    size_t bytes = sizeof(fsdp__place) + fsdp__room_shared_bytes(world);
    return (bytes + 63) / 64 * 64;
}

static fsdp__place *place_create(const fsdp_host_allocator *host, uint32_t world)
{
    fsdp__place *place = fsdp__host_alloc(host, 1, place_bytes(world));
    if (place == NULL) return NULL;
    place->host = *host;
    place->world = world;
    pthread_mutex_init(&place->tellers.lock, NULL);
    return place;
}

void fsdp__place_leave(fsdp__place *place)
{
    if (atomic_fetch_sub(&place->refs, 1) > 1) return;
    pthread_mutex_destroy(&place->tellers.lock);
    fsdp_host_allocator host = place->host;
    fsdp__host_free(&host, place, 1, place_bytes(place->world));
}

fsdp__tellers *fsdp__place_tellers(fsdp__place *place) { return &place->tellers; }
fsdp__room_shared *fsdp__place_shared(fsdp__place *place) { return (fsdp__room_shared *)(void *)place->shared; }

/* With the group's lock held. A rank that has waited in vain takes the others with it, and the next to come begin anew. */
static fsdp_status wait_for_all(fsdp_local *local, fsdp__place *place, fsdp__room_number number, uint64_t timeout_ns)
{
    uint64_t deadline_ns = fsdp__after_ns(timeout_ns);
    bool in_time = true;
    while (place->n_opened < local->world && place->given_up[0] == '\0' && in_time)
        in_time = fsdp__cond_until(&local->changed, &local->lock, deadline_ns);
    if (place->n_opened == local->world) return FSDP_OK;
    if (place->given_up[0] == '\0') {
        local->forming[number] = NULL;
        bool missing[FSDP__ROOM_WORLD];
        char came[320], absent[320];
        for (uint32_t r = 0; r < local->world; r++) missing[r] = !place->opened[r];
        fsdp__put_ranks(came, sizeof came, place->opened, local->world);
        fsdp__put_ranks(absent, sizeof absent, missing, local->world);
        static const char *const names[FSDP__N_ROOMS] = {"communicator 0", "communicator 1", "the side channel"};
        snprintf(place->given_up, sizeof place->given_up, "opening %s: %s of %u came, %s did not within %.3f s%s",
                 names[number], came, local->world, absent, (double)timeout_ns * 1e-9,
                 place->n_opened == 1 ? ": do they have the same fsdp_local?" : "");
        pthread_cond_broadcast(&local->changed);
    }
    return fsdp__fail(FSDP_ERR_RANK_LOST, "%s", place->given_up);
}

static fsdp_status no_memory(uint32_t world)
{
    return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "a room for %u ranks: no host memory for %zu bytes", world,
                      place_bytes(world));
}

/* With the group's lock held. */
static fsdp_status join(fsdp_local *local, uint32_t rank, fsdp__room_number number, uint64_t timeout_ns,
                        fsdp__place **out_place)
{
    fsdp__place *place = local->forming[number];
    if (place == NULL) place = local->forming[number] = place_create(&local->host, local->world);
    if (place == NULL) return no_memory(local->world);
    if (place->opened[rank])
        return fsdp__fail(FSDP_ERR_ARG, "rank %u of a world of %u is opened twice: each rank has its own number", rank,
                          local->world);
    atomic_fetch_add(&place->refs, 1);
    place->opened[rank] = true;
    if (++place->n_opened == local->world) {
        local->forming[number] = NULL;
        pthread_cond_broadcast(&local->changed);
    }
    fsdp_status status = wait_for_all(local, place, number, timeout_ns);
    if (status != FSDP_OK) fsdp__place_leave(place);
    else *out_place = place;
    return status;
}

fsdp_status fsdp__place_join(fsdp_local *local, uint32_t rank, const fsdp_host_allocator *host,
                             fsdp__room_number number, uint64_t timeout_ns, fsdp__place **out_place)
{
    if (local == NULL) {
        fsdp__place *place = place_create(host, 1);
        if (place == NULL) return no_memory(1);
        atomic_store(&place->refs, 1);
        *out_place = place;
        return FSDP_OK;
    }
    pthread_mutex_lock(&local->lock);
    fsdp_status status = join(local, rank, number, timeout_ns, out_place);
    pthread_mutex_unlock(&local->lock);
    return status;
}
