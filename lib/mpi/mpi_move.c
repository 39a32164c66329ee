/* SPDX-License-Identifier: MIT */
/* The bytes. A collective is one or two exchanges: in each, every rank has something for every other. All go in messages of
 * chunk_bytes, two of them under way to each rank; sums are made while the next message travels. */
#include <stdio.h>
#include <string.h>

#include "host/host.h"
#include "mpi_backend.h"

enum { SMALL_BYTES = 8192 /* is summed, or handed round, in one step, though it moves more bytes */ };

/* Where sums go, of what this rank has itself and what comes in. */
typedef struct sum {
    char *to; /* NULL: nothing is summed */
    const char *mine;
    fsdp_dtype dtype;
} sum;

static uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }

/* Of count elements, part p of world begins here; part `world` is the end. */
static uint64_t part_begin(uint64_t count, uint32_t world, uint32_t p)
{
    uint64_t rest = count % world;
    return count / world * p + (p < rest ? p : rest);
}

/* ---- Exchanges ---- */

static uint64_t rest_of(uint64_t bytes, uint64_t at, uint64_t chunk)
{
    return at < bytes ? least(bytes - at, chunk) : 0;
}

/* Scratch of a set, for what comes from rank r. */
static char *scratch_of(const fsdp__mpi_comm *c, uint32_t set, uint32_t r)
{
    return c->scratch + (set * (size_t)c->world + r) * (c->scratch_bytes / (2 * (size_t)c->world));
}

static MPI_Request *requests_of(const fsdp__mpi_comm *c, uint32_t set)
{
    return c->requests + set * 2 * (size_t)c->world;
}

/* Messages number k, on the requests of set k % 2: receives, then sends. Beginning with the next rank, so that not all of
 * them send to the same one. */
static fsdp_status post(fsdp__mpi_comm *c, uint64_t k)
{
    uint64_t at = k * c->chunk_bytes;
    MPI_Request *requests = requests_of(c, k % 2);
    int code = MPI_SUCCESS;
    fsdp__mpi_enter(&c->dev->engine);
    for (uint32_t i = 1; i < c->world && code == MPI_SUCCESS; i++) {
        uint32_t r = (c->rank + c->world - i) % c->world;
        const fsdp__mpi_leg *leg = &c->legs[r];
        uint64_t bytes = rest_of(leg->in_bytes, at, c->chunk_bytes);
        char *to = leg->in != NULL ? leg->in + at : scratch_of(c, k % 2, r);
        if (bytes > 0) code = MPI_Irecv(to, (int)bytes, MPI_BYTE, (int)r, FSDP__MPI_TAG_DATA, c->mpi, &requests[r]);
    }
    for (uint32_t i = 1; i < c->world && code == MPI_SUCCESS; i++) {
        uint32_t r = (c->rank + i) % c->world;
        const fsdp__mpi_leg *leg = &c->legs[r];
        uint64_t bytes = rest_of(leg->out_bytes, at, c->chunk_bytes);
        if (bytes > 0)
            code = MPI_Isend(leg->out + at, (int)bytes, MPI_BYTE, (int)r, FSDP__MPI_TAG_DATA, c->mpi,
                             &requests[c->world + r]);
    }
    fsdp__mpi_leave(&c->dev->engine);
    if (code == MPI_SUCCESS) return FSDP_OK;
    (void)fsdp__mpi_fail("communicator", code);
    return fsdp__mpi_comm_fail(c, FSDP_ERR_RANK_LOST, "rank %u: %.600s", c->rank, fsdp_last_error());
}

static fsdp_status lose_silent(fsdp__mpi_comm *c, const fsdp_collective *op, const MPI_Request *requests)
{
    char what[400], names[320];
    for (uint32_t r = 0; r < c->world; r++)
        c->missing[r] = requests[r] != MPI_REQUEST_NULL || requests[c->world + r] != MPI_REQUEST_NULL;
    fsdp__call call;
    fsdp__call_fill(&call, op, c->mine.number, 0, 1);
    fsdp__call_describe(&call, what, sizeof what);
    fsdp__put_ranks(names, sizeof names, c->missing, c->world);
    return fsdp__mpi_comm_fail(c, FSDP_ERR_RANK_LOST, "%s: %s of %u came, and then stood still for %.3f s", what, names,
                               c->world, (double)c->timeout_ns * 1e-9);
}

/* The left fold in rank order of what came in with messages number k. */
static void fold(const fsdp__mpi_comm *c, const sum *s, uint64_t bytes, uint64_t k)
{
    uint64_t at = k * c->chunk_bytes, n = rest_of(bytes, at, c->chunk_bytes);
    if (n == 0) return;
    for (uint32_t r = 0; r < c->world; r++) c->sources[r] = r == c->rank ? s->mine + at : scratch_of(c, k % 2, r);
    fsdp__host_fold(s->to + at, c->sources, c->world, n / fsdp_dtype_bytes(s->dtype), s->dtype);
}

/* c->legs of all ranks but this; summed_bytes: how long the sum is. */
static fsdp_status exchange(fsdp__mpi_comm *c, const fsdp_collective *op, const sum *s, uint64_t summed_bytes)
{
    uint64_t most = summed_bytes;
    for (uint32_t r = 0; r < c->world; r++) {
        if (r == c->rank) continue;
        if (c->legs[r].in_bytes > most) most = c->legs[r].in_bytes;
        if (c->legs[r].out_bytes > most) most = c->legs[r].out_bytes;
    }
    uint64_t n = (most + c->chunk_bytes - 1) / c->chunk_bytes;
    fsdp_status status = n > 0 ? post(c, 0) : FSDP_OK;
    for (uint64_t k = 0; k < n && status == FSDP_OK; k++) {
        bool done = false;
        if (k + 1 < n) status = post(c, k + 1);
        if (status == FSDP_OK)
            status = fsdp__mpi_wait(c, requests_of(c, k % 2), 2 * c->world, fsdp__after_ns(c->timeout_ns), &done);
        if (status == FSDP_OK && !done) status = lose_silent(c, op, requests_of(c, k % 2));
        if (status == FSDP_OK && s != NULL) fold(c, s, summed_bytes, k);
    }
    if (status == FSDP_OK) return FSDP_OK;
    char sentence[FSDP__ERROR_BYTES];
    snprintf(sentence, sizeof sentence, "%s", fsdp_last_error());
    fsdp__mpi_abandon(c, 2);
    return fsdp__fail(status, "%s", sentence);
}

/* ---- Collectives ---- */

static void copy_own(void *to, const void *from, uint64_t bytes)
{
    if (bytes > 0 && to != from) memcpy(to, from, bytes);
}

/* Each rank has the part of `all` that is its own; all get all. Rank `has_all` needs nothing. */
static fsdp_status gather_parts(fsdp__mpi_comm *c, const fsdp_collective *op, uint32_t has_all)
{
    size_t each = fsdp_dtype_bytes(op->dtype);
    char *all = op->recv;
    uint64_t own = part_begin(op->count, c->world, c->rank) * each,
             own_end = part_begin(op->count, c->world, c->rank + 1) * each;
    for (uint32_t r = 0; r < c->world; r++) {
        uint64_t begin = part_begin(op->count, c->world, r) * each, end = part_begin(op->count, c->world, r + 1) * each;
        c->legs[r] = (fsdp__mpi_leg){all + own, r == has_all ? 0 : own_end - own, all + begin,
                                     c->rank == has_all ? 0 : end - begin};
    }
    return exchange(c, op, NULL, 0);
}

static fsdp_status all_gather(fsdp__mpi_comm *c, const fsdp_collective *op)
{
    uint64_t bytes = op->count * fsdp_dtype_bytes(op->dtype);
    char *recv = op->recv;
    copy_own(recv + c->rank * bytes, op->send, bytes);
    for (uint32_t r = 0; r < c->world; r++) c->legs[r] = (fsdp__mpi_leg){op->send, bytes, recv + r * bytes, bytes};
    return exchange(c, op, NULL, 0);
}

static fsdp_status reduce_scatter(fsdp__mpi_comm *c, const fsdp_collective *op)
{
    uint64_t bytes = op->count * fsdp_dtype_bytes(op->dtype);
    const char *send = op->send;
    for (uint32_t r = 0; r < c->world; r++) c->legs[r] = (fsdp__mpi_leg){send + r * bytes, bytes, NULL, bytes};
    return exchange(c, op, &(sum){op->recv, send + c->rank * bytes, op->dtype}, bytes);
}

static bool is_small(const fsdp__mpi_comm *c, const fsdp_collective *op)
{
    return op->count * fsdp_dtype_bytes(op->dtype) <= least(SMALL_BYTES, c->chunk_bytes);
}

static fsdp_status all_reduce(fsdp__mpi_comm *c, const fsdp_collective *op)
{
    size_t each = fsdp_dtype_bytes(op->dtype);
    const char *send = op->send;
    char *recv = op->recv;
    uint64_t bytes = op->count * each;
    if (is_small(c, op)) { /* everybody sums everything */
        for (uint32_t r = 0; r < c->world; r++) c->legs[r] = (fsdp__mpi_leg){send, bytes, NULL, bytes};
        return exchange(c, op, &(sum){recv, send, op->dtype}, bytes);
    }
    uint64_t own = part_begin(op->count, c->world, c->rank) * each,
             own_end = part_begin(op->count, c->world, c->rank + 1) * each;
    for (uint32_t r = 0; r < c->world; r++) {
        uint64_t begin = part_begin(op->count, c->world, r) * each, end = part_begin(op->count, c->world, r + 1) * each;
        c->legs[r] = (fsdp__mpi_leg){send + begin, end - begin, NULL, own_end - own};
    }
    FSDP_TRY(exchange(c, op, &(sum){recv + own, send + own, op->dtype}, own_end - own));
    return gather_parts(c, op, c->world);
}

/* What is large is dealt out first, so that the root sends it once and not to each. */
static fsdp_status broadcast(fsdp__mpi_comm *c, const fsdp_collective *op)
{
    size_t each = fsdp_dtype_bytes(op->dtype);
    char *data = op->recv;
    bool root = c->rank == op->root, dealt = !is_small(c, op) && c->world > 2;
    if (root) copy_own(data, op->send, op->count * each);
    for (uint32_t r = 0; r < c->world; r++) {
        uint32_t whose = root ? r : c->rank; /* part */
        uint64_t begin = dealt ? part_begin(op->count, c->world, whose) * each : 0;
        uint64_t end = dealt ? part_begin(op->count, c->world, whose + 1) * each : op->count * each;
        c->legs[r] =
            (fsdp__mpi_leg){data + begin, root ? end - begin : 0, data + begin, r == op->root ? end - begin : 0};
    }
    FSDP_TRY(exchange(c, op, NULL, 0));
    return dealt ? gather_parts(c, op, op->root) : FSDP_OK;
}

size_t fsdp__mpi_scratch_bytes(const fsdp__mpi_comm *c, const fsdp_collective *op)
{
    uint64_t bytes = op->count * fsdp_dtype_bytes(op->dtype);
    if (c->world == 1 || (op->kind != FSDP_OPERATION_REDUCE_SCATTER && op->kind != FSDP_OPERATION_ALL_REDUCE)) return 0;
    if (op->kind == FSDP_OPERATION_ALL_REDUCE && !is_small(c, op)) bytes = bytes / c->world + 4;
    return 2 * (size_t)c->world * ((size_t)(least(bytes, c->chunk_bytes) + 63) / 64 * 64);
}

fsdp_status fsdp__mpi_move(fsdp__mpi_comm *c, const fsdp_collective *op)
{
    if (op->count == 0) return FSDP_OK;
    switch (op->kind) {
    case FSDP_OPERATION_ALL_GATHER: return all_gather(c, op);
    case FSDP_OPERATION_REDUCE_SCATTER: return reduce_scatter(c, op);
    case FSDP_OPERATION_ALL_REDUCE: return all_reduce(c, op);
    case FSDP_OPERATION_BROADCAST: return broadcast(c, op);
    default: return FSDP_OK; /* a barrier has met */
    }
}
