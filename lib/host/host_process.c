/* SPDX-License-Identifier: MIT */
#include "host_process.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"
#include "hash.h"
#include "host_watch.h"
#include "hostmem.h"

enum { MAX_WINDOWS = 64, TEXT_BYTES = 252 };

/* A piece of a peer's memory, mapped here. */
typedef struct window {
    const char *ptr; /* NULL: free */
    uint64_t offset, bytes, last_use;
} window;

typedef struct peer {
    int memory, pidfd; /* -1: none */
    window window[MAX_WINDOWS];
} peer;

struct fsdp__peers {
    const fsdp_host_allocator *host;
    uint32_t rank, world;
    fsdp__room_shared *room;
    size_t room_bytes;
    uint64_t n_uses;
    peer peer[];
};

/* What a rank tells the others. A file is known by its inode, so that a process of another PID namespace is not taken for
 * the peer. No gap, which would carry bytes of the stack to them. */
typedef struct hello {
    uint64_t machine; /* of its kernel's boot id */
    uint64_t memory_inode, room_inode;
    int32_t pid, memory, room, zero;
    fsdp_link link;
} hello;

static const char boot_id[] = "/proc/sys/kernel/random/boot_id";

static fsdp_status read_machine(uint32_t rank, uint64_t *out_machine)
{
    char id[64];
    ssize_t n = -1;
    int file = open(boot_id, O_RDONLY | O_CLOEXEC);
    if (file >= 0) {
        n = read(file, id, sizeof id);
        close(file);
    }
    if (n <= 0) return fsdp__fail(FSDP_ERR_UNSUPPORTED, "rank %u cannot read %s: %s", rank, boot_id, strerror(errno));
    *out_machine = fsdp__hash_bytes(FSDP__HASH_SEED, id, (size_t)n);
    return FSDP_OK;
}

static uint64_t inode_of(int file)
{
    struct stat about;
    return fstat(file, &about) == 0 ? (uint64_t)about.st_ino : 0;
}

/* A file of another process; -1 with errno, ESTALE for another file than the one that was meant. */
static int open_file_of(const hello *from, int number, uint64_t inode, int flags)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%" PRId32 "/fd/%d", from->pid, number);
    int file = open(path, flags | O_CLOEXEC);
    if (file >= 0 && inode_of(file) != inode) {
        close(file);
        errno = ESTALE;
        return -1;
    }
    return file;
}

/* ---- Windows ---- */

static window *oldest_window(peer *p)
{
    window *oldest = &p->window[0];
    for (int i = 0; i < MAX_WINDOWS; i++) {
        window *w = &p->window[i];
        if (w->ptr == NULL) return w;
        if (w->last_use < oldest->last_use) oldest = w;
    }
    return oldest;
}

static void unmap(window *w)
{
    if (w->ptr != NULL) munmap((void *)(uintptr_t)w->ptr, w->bytes);
    w->ptr = NULL;
}

const void *fsdp__peers_at(fsdp__peers *peers, uint32_t rank, uint64_t offset, uint64_t bytes, uint64_t into)
{
    peer *p = &peers->peer[rank];
    uint64_t use = ++peers->n_uses;
    for (int i = 0; i < MAX_WINDOWS; i++) {
        window *w = &p->window[i];
        if (w->ptr == NULL || w->offset != offset || w->bytes != bytes) continue;
        w->last_use = use;
        return w->ptr + into;
    }
    window *w = oldest_window(p);
    unmap(w);
    void *ptr = mmap(NULL, bytes, PROT_READ, MAP_SHARED, p->memory, (off_t)offset);
    if (ptr == MAP_FAILED) return NULL;
    *w = (window){ptr, offset, bytes, use};
    return w->ptr + into;
}

/* ---- Opening ---- */

void fsdp__peers_close(fsdp__peers *peers)
{
    if (peers == NULL) return;
    for (uint32_t r = 0; r < peers->world; r++) {
        peer *p = &peers->peer[r];
        for (int i = 0; i < MAX_WINDOWS; i++) unmap(&p->window[i]);
        if (p->memory >= 0) close(p->memory);
        if (p->pidfd >= 0) close(p->pidfd);
    }
    if (peers->room != NULL) munmap(peers->room, peers->room_bytes);
    fsdp__host_free(peers->host, peers, 1, sizeof *peers + peers->world * sizeof *peers->peer);
}

fsdp__room_shared *fsdp__peers_room(fsdp__peers *peers) { return peers->room; }

void fsdp__peers_take_pidfds(fsdp__peers *peers, int *out_pidfd)
{
    for (uint32_t r = 0; r < peers->world; r++) {
        out_pidfd[r] = peers->peer[r].pidfd;
        peers->peer[r].pidfd = -1;
    }
}

/* Rank 0: a new file for the room. */
static fsdp_status make_room(const fsdp__peers *peers, int *out_file)
{
    int file = memfd_create("fsdp room", MFD_CLOEXEC);
    if (file >= 0 && fsdp__file_resize(file, peers->room_bytes) == 0) {
        *out_file = file;
        return FSDP_OK;
    }
    char words[256];
    fsdp__file_words(errno, words, sizeof words);
    fsdp_status status =
        fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "a room of %zu bytes between processes: %s", peers->room_bytes, words);
    if (file >= 0) close(file);
    return status;
}

/* Every rank's outcome, so that all go on or none does. `mine` with its sentence in fsdp_last_error(). */
static fsdp_status vote(const fsdp_comm_args *args, uint32_t world, fsdp_status mine)
{
    typedef struct ballot {
        int32_t status;
        char text[TEXT_BYTES];
    } ballot;
    ballot own = {.status = mine}, all[FSDP__ROOM_WORLD];
    if (mine != FSDP_OK) snprintf(own.text, sizeof own.text, "%s", fsdp_last_error());
    /* A rank that has gone is why another one cannot see its memory. */
    FSDP_TRY(args->side_ops->all_gather(args->side, &own, all, sizeof own, args->timeout_ns));
    fsdp_status status = FSDP_OK;
    for (uint32_t r = 0; status == FSDP_OK && r < world; r++)
        if (all[r].status != FSDP_OK)
            status = fsdp__fail(fsdp__status_of_peer(all[r].status), "rank %u: %.*s", r, TEXT_BYTES, all[r].text);
    return mine != FSDP_OK ? fsdp__fail(mine, "%s", own.text) : status;
}

static fsdp_status open_of(fsdp__peers *peers, const hello *all, uint32_t rank)
{
    const hello *h = &all[rank], *own = &all[peers->rank];
    if (h->machine != own->machine)
        return fsdp__fail(
            FSDP_ERR_UNSUPPORTED,
            "rank %u and rank %u are on different machines: the host backend's processes share memory; across "
            "machines use the MPI backend",
            peers->rank, rank);
    if (h->link.latency_ns != own->link.latency_ns || h->link.bytes_per_second != own->link.bytes_per_second)
        return fsdp__fail(FSDP_ERR_MISMATCH, "fsdp_host_config.link differs between rank %u and rank %u", peers->rank,
                          rank);
    if (rank == peers->rank) return FSDP_OK;
    peers->peer[rank].pidfd = fsdp__pidfd_open(h->pid); /* first: if its file is there afterwards, it is that process */
    peers->peer[rank].memory = open_file_of(h, h->memory, h->memory_inode, O_RDONLY);
    if (peers->peer[rank].memory >= 0) return FSDP_OK;
    if (errno != ESTALE && errno != ENOENT && errno != EACCES)
        return fsdp__fail(FSDP_ERR_UNSUPPORTED, "rank %u cannot open the memory of rank %u (process %" PRId32 "): %s",
                          peers->rank, rank, h->pid, strerror(errno));
    return fsdp__fail(
        FSDP_ERR_UNSUPPORTED,
        "rank %u cannot open the memory of rank %u (process %" PRId32 "): %s: ranks as processes need the same user "
        "and the same PID namespace (container), and /proc",
        peers->rank, rank, h->pid, errno == ESTALE ? "another process has that number here" : strerror(errno));
}

static fsdp_status map_room(fsdp__peers *peers, const hello *first, int own_file)
{
    int file = own_file >= 0 ? own_file : open_file_of(first, first->room, first->room_inode, O_RDWR);
    void *ptr = MAP_FAILED;
    if (file >= 0) ptr = mmap(NULL, peers->room_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    int reason = errno;
    if (file >= 0 && file != own_file) close(file);
    if (ptr == MAP_FAILED)
        return fsdp__fail(FSDP_ERR_UNSUPPORTED, "rank %u cannot map the room of rank 0 (process %" PRId32 "): %s",
                          peers->rank, first->pid, strerror(reason));
    peers->room = ptr;
    return FSDP_OK;
}

/* Everything but the votes. */
static fsdp_status meet(const fsdp_comm_args *args, const fsdp__host_setup *setup, fsdp__peers *peers, int file,
                        uint64_t machine)
{
    const fsdp__host_device *dev = args->dev;
    hello own = {.machine = machine,
                 .memory_inode = inode_of(dev->memory.file),
                 .room_inode = file >= 0 ? inode_of(file) : 0,
                 .pid = (int32_t)getpid(),
                 .memory = dev->memory.file,
                 .room = file,
                 .link = setup->link};
    hello all[FSDP__ROOM_WORLD];
    FSDP_TRY(args->side_ops->all_gather(args->side, &own, all, sizeof own, args->timeout_ns));
    fsdp_status status = FSDP_OK;
    for (uint32_t r = 0; r < peers->world && status == FSDP_OK; r++) status = open_of(peers, all, r);
    if (status == FSDP_OK) status = map_room(peers, &all[0], file);
    return vote(args, peers->world, status);
}

fsdp_status fsdp__peers_open(const fsdp_comm_args *args, const fsdp__host_setup *setup, fsdp__peers **out_peers)
{
    uint32_t world = setup->world;
    size_t bytes = sizeof(fsdp__peers) + world * sizeof(peer);
    int file = -1;
    uint64_t machine = 0;
    fsdp__peers *peers = fsdp__host_alloc(args->host, 1, bytes);
    fsdp_status status = FSDP_OK;
    if (peers == NULL) {
        status =
            fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "communicator %u: no host memory for %zu bytes", args->index, bytes);
    } else {
        peers->host = args->host;
        peers->rank = setup->rank;
        peers->world = world;
        peers->room_bytes = fsdp__room_shared_bytes(world);
        for (uint32_t r = 0; r < world; r++) peers->peer[r].memory = peers->peer[r].pidfd = -1;
        status = read_machine(setup->rank, &machine);
        if (status == FSDP_OK && setup->rank == 0) status = make_room(peers, &file);
    }
    status = vote(args, world, status);
    if (status == FSDP_OK) status = meet(args, setup, peers, file, machine);
    if (file >= 0) close(file); /* every rank that could has mapped it */
    if (status == FSDP_OK) *out_peers = peers;
    else fsdp__peers_close(peers);
    return status;
}
