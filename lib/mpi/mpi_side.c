/* SPDX-License-Identifier: MIT */
/* The side channel: the star of sockets, whose meeting place MPI carries. MPI alone would not do: it does not notice that a
 * rank is gone, and nobody can answer by it while the host is busy elsewhere. */
#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <inttypes.h>
#include <net/if.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "hash.h"
#include "hostmem.h"
#include "mpi_backend.h"
#include "net/star.h"

typedef fsdp__mpi_address address;
typedef fsdp__mpi_place place;

enum { ADDRESSES = FSDP__MPI_ADDRESSES };

/* ---- Addresses ---- */

static uint32_t count_bits(const unsigned char *mask, size_t bytes)
{
    uint32_t bits = 0;
    while (bits < bytes * 8 && (mask[bits / 8] >> (7 - bits % 8) & 1)) bits++;
    return bits;
}

static bool read_address(const struct ifaddrs *from, address *out)
{
    if (from->ifa_addr == NULL || from->ifa_netmask == NULL) return false;
    if (!(from->ifa_flags & IFF_UP) || (from->ifa_flags & IFF_LOOPBACK)) return false;
    *out = (address){.family = from->ifa_addr->sa_family};
    if (out->family == AF_INET) {
        memcpy(out->bytes, &((const struct sockaddr_in *)(const void *)from->ifa_addr)->sin_addr, 4);
        const struct sockaddr_in *mask = (const struct sockaddr_in *)(const void *)from->ifa_netmask;
        out->bits = count_bits((const unsigned char *)&mask->sin_addr, 4);
        return true;
    }
    if (out->family != AF_INET6) return false;
    const struct in6_addr *a = &((const struct sockaddr_in6 *)(const void *)from->ifa_addr)->sin6_addr;
    if (IN6_IS_ADDR_LINKLOCAL(a)) return false; /* means nothing without its interface */
    memcpy(out->bytes, a, 16);
    out->bits = count_bits(((const struct sockaddr_in6 *)(const void *)from->ifa_netmask)->sin6_addr.s6_addr, 16);
    return true;
}

/* This machine's, IPv4 first. */
static uint32_t own_addresses(address *out)
{
    static const int families[] = {AF_INET, AF_INET6};
    struct ifaddrs *all = NULL;
    uint32_t n = 0;
    if (getifaddrs(&all) != 0) return 0;
    for (int f = 0; f < 2; f++) {
        for (const struct ifaddrs *at = all; at != NULL && n < ADDRESSES; at = at->ifa_next) {
            address a;
            if (read_address(at, &a) && a.family == families[f]) out[n++] = a;
        }
    }
    freeifaddrs(all);
    return n;
}

static bool same_network(const address *a, const address *b)
{
    if (a->family != b->family || a->bits != b->bits || a->bits == 0) return false;
    uint32_t whole = a->bits / 8, rest = a->bits % 8;
    if (memcmp(a->bytes, b->bytes, whole) != 0) return false;
    return rest == 0 || ((a->bytes[whole] ^ b->bytes[whole]) >> (8 - rest)) == 0;
}

/* The one that lies in a network of our own, else the first: a cluster's machines have networks that others cannot reach. */
static void choose_address(const place *p, char *text, size_t bytes)
{
    address own[ADDRESSES];
    uint32_t n_own = own_addresses(own), chosen = 0;
    for (uint32_t i = p->n_addresses; i-- > 0;)
        for (uint32_t k = 0; k < n_own; k++)
            if (same_network(&p->addresses[i], &own[k])) chosen = i;
    snprintf(text, bytes, "127.0.0.1");
    if (p->given[0] != '\0') snprintf(text, bytes, "%s", p->given);
    else if (p->n_addresses > 0)
        (void)inet_ntop(p->addresses[chosen].family, p->addresses[chosen].bytes, text, (socklen_t)bytes);
}

/* The machine, and the network as this process sees it: equal where an abstract Unix socket connects two processes. 0: not
 * known. */
static uint64_t machine(void)
{
    char id[64] = "";
    struct stat net;
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    ssize_t n = fd >= 0 ? read(fd, id, sizeof id - 1) : -1;
    if (fd >= 0) close(fd);
    if (n < 36 || stat("/proc/self/ns/net", &net) != 0) return 0;
    return fsdp__mix(fsdp__hash_text(id) ^ (uint64_t)net.st_ino);
}

/* ---- Opening ---- */

static void make_place(fsdp__mpi_side *s, const fsdp_mpi_config *config, int *out_listener)
{
    place *p = &s->place;
    uint16_t port = 0;
    p->one_machine = s->machines[0] != 0;
    for (uint32_t r = 1; r < s->world; r++) p->one_machine = p->one_machine && s->machines[r] == s->machines[0];
    if (getrandom(&p->nonce, sizeof p->nonce, 0) != sizeof p->nonce) p->nonce = fsdp__now_ns();
    if (s->world == 1) p->one_machine = 1;
    else if (config->address != NULL) p->one_machine = 0; /* as the caller says */
    if (p->one_machine) return;
    if (config->address != NULL) snprintf(p->given, sizeof p->given, "%s", config->address);
    p->n_addresses = own_addresses(p->addresses);
    p->status = fsdp__star_listen(out_listener, &port);
    p->port = port;
    if (p->status != FSDP_OK) snprintf(p->why, sizeof p->why, "%.200s", fsdp_last_error());
}

/* On a duplicate of the program's communicator: where rank 0 is. out_listener: rank 0's, of ranks on several machines; else
 * -1. */
static fsdp_status find_place(fsdp__mpi_side *s, const fsdp__mpi_opening *opening, const fsdp_mpi_config *config,
                              MPI_Comm comm, int *out_listener)
{
    MPI_Request request = MPI_REQUEST_NULL;
    FSDP_TRY(fsdp__mpi_opening_dup(opening, comm, &s->comm));
    s->machine = machine();
    fsdp__mpi_enter(&s->engine);
    int code = MPI_Iallgather(&s->machine, sizeof s->machine, MPI_BYTE, s->machines, sizeof s->machine, MPI_BYTE,
                              s->comm, &request);
    fsdp__mpi_leave(&s->engine);
    FSDP_TRY(fsdp__mpi_opening_wait(opening, code, &request));
    if (s->rank == 0) make_place(s, config, out_listener);
    fsdp__mpi_enter(&s->engine);
    code = MPI_Ibcast(&s->place, sizeof s->place, MPI_BYTE, 0, s->comm, &request);
    fsdp__mpi_leave(&s->engine);
    return fsdp__mpi_opening_wait(opening, code, &request);
}

static fsdp_status open_star(fsdp__mpi_side *s, const fsdp_side_args *args, int listener)
{
    const place *p = &s->place;
    fsdp_launch launch = FSDP_LAUNCH_INIT;
    launch.rank = s->rank;
    launch.world = s->world;
    launch.nonce = p->nonce;
    launch.port = (uint16_t)p->port;
    if (p->one_machine) snprintf(launch.address, sizeof launch.address, "@fsdp-mpi-%016" PRIx64, p->nonce);
    else choose_address(p, launch.address, sizeof launch.address);
    if (p->status != FSDP_OK)
        return fsdp__fail((fsdp_status)p->status, "side channel: rank 0 cannot listen: %s", p->why);
    fsdp__star_config config = {&launch, NULL, listener};
    fsdp_side_args star = *args;
    star.backend_config = &config;
    return fsdp__star_side_ops.open(&star, &s->star, &launch.rank, &launch.world);
}

/* One allocation, made first: from then on no rank can fail alone. */
static fsdp__mpi_side *side_create(const fsdp_host_allocator *host, uint32_t rank, uint32_t world)
{
    size_t bytes = sizeof(fsdp__mpi_side) + world * (sizeof(uint64_t) + sizeof(fsdp__mpi_ballot));
    fsdp__mpi_side *s = fsdp__host_alloc(host, bytes, 1);
    if (s == NULL) return NULL;
    s->host = host;
    s->bytes = bytes;
    s->rank = rank;
    s->world = world;
    atomic_init(&s->refs, 1);
    s->ballots = (fsdp__mpi_ballot *)(void *)(s + 1);
    s->machines = (uint64_t *)(void *)(s->ballots + world);
    pthread_mutex_init(&s->engine.lock, NULL);
    return s;
}

void fsdp__mpi_side_release(fsdp__mpi_side *s)
{
    if (atomic_fetch_sub(&s->refs, 1) > 1) return;
    pthread_mutex_destroy(&s->engine.lock);
    fsdp__host_free(s->host, s, s->bytes, 1);
}

static fsdp_status side_open(const fsdp_side_args *args, void **out_side, uint32_t *out_rank, uint32_t *out_world)
{
    fsdp_mpi_config config;
    fsdp__mpi_engine engine = {.serialized = false}; /* nobody else calls MPI for this context yet */
    MPI_Comm comm;
    uint32_t rank, world;
    int listener = -1;
    FSDP_TRY(fsdp__mpi_config_read(args->backend_config, &config, &engine));
    engine.serialized = false;
    FSDP_TRY(fsdp__mpi_comm_read(&config, &engine, &comm, &rank, &world));
    fsdp__mpi_side *s = side_create(args->host, rank, world);
    if (s == NULL) return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "side channel: no host memory for %u ranks", world);
    fsdp__mpi_opening opening = {&s->engine, "opening the side channel", args->timeout_ns,
                                 fsdp__after_ns(args->timeout_ns), NULL};
    FSDP_TRY(find_place(s, &opening, &config, comm, &listener)); /* else MPI may hold s */
    fsdp_status status = open_star(s, args, listener);
    if (status != FSDP_OK) {
        fsdp__mpi_side_release(s); /* the communicator stays: who knows where the others are */
        return status;
    }
    *out_side = s;
    *out_rank = rank;
    *out_world = world;
    return FSDP_OK;
}

fsdp_status fsdp__mpi_side_vote(fsdp__mpi_side *s, const char *what, fsdp_status mine, uint64_t chunk_bytes,
                                uint64_t timeout_ns)
{
    enum { PIECE = 64 /* for which the star needs no memory */ };
    char why[4 * PIECE] = "";
    uint32_t first = 0;
    fsdp__mpi_ballot ballot = {mine, chunk_bytes};
    if (mine != FSDP_OK) snprintf(why, sizeof why, "%.250s", fsdp_last_error());
    FSDP_TRY(fsdp__star_side_ops.all_gather(s->star, &ballot, s->ballots, sizeof ballot, timeout_ns));
    while (first < s->world && s->ballots[first].status == FSDP_OK) first++;
    if (first < s->world) {
        for (size_t at = 0; at < sizeof why; at += PIECE) {
            FSDP_TRY(fsdp__star_side_ops.broadcast(s->star, why + at, PIECE, first, timeout_ns));
            if (memchr(why + at, 0, PIECE) != NULL) break;
        }
        return fsdp__fail((fsdp_status)s->ballots[first].status, "%s failed on rank %u, so on every rank: %s", what,
                          first, why);
    }
    for (uint32_t r = 1; r < s->world; r++)
        if (s->ballots[r].chunk_bytes != s->ballots[0].chunk_bytes)
            return fsdp__fail(FSDP_ERR_MISMATCH,
                              "fsdp_mpi_config.chunk_bytes is %" PRIu64 " on rank 0 and %" PRIu64
                              " on rank %u: give the same on all",
                              s->ballots[0].chunk_bytes, s->ballots[r].chunk_bytes, r);
    return FSDP_OK;
}

static void *star_of(void *side) { return ((fsdp__mpi_side *)side)->star; }

static void side_close(void *side)
{
    fsdp__mpi_side *s = side;
    bool good = fsdp__star_side_ops.check(s->star) == FSDP_OK;
    fsdp__star_side_ops.close(s->star);
    if (good) MPI_Comm_free(&s->comm); /* no other call of this context's is made any more */
    s->star = NULL;
    fsdp__mpi_side_release(s);
}

static fsdp_status side_all_gather(void *side, const void *mine, void *all, size_t bytes, uint64_t timeout_ns)
{
    return fsdp__star_side_ops.all_gather(star_of(side), mine, all, bytes, timeout_ns);
}

static fsdp_status side_broadcast(void *side, void *data, size_t bytes, uint32_t root, uint64_t timeout_ns)
{
    return fsdp__star_side_ops.broadcast(star_of(side), data, bytes, root, timeout_ns);
}

static void side_fail(void *side, fsdp_status status, const char *sentence)
{
    if (star_of(side) != NULL) (fsdp__star_side_ops.fail)(star_of(side), status, sentence);
}

static fsdp_status side_check(void *side)
{
    return star_of(side) != NULL ? fsdp__star_side_ops.check(star_of(side)) : FSDP_OK;
}

const fsdp_side_ops fsdp__mpi_side_ops = {
    .size = sizeof fsdp__mpi_side_ops,
    .open = side_open,
    .close = side_close,
    .all_gather = side_all_gather,
    .broadcast = side_broadcast,
    .fail = side_fail,
    .check = side_check,
};
