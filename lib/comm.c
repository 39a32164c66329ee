/* SPDX-License-Identifier: MIT */
#include "comm.h"

#include "check.h"
#include "context.h"
#include "device.h"
#include "hostmem.h"
#include "order.h"
#include "stream.h"
#include "trace.h"

struct fsdp_comm {
    fsdp_context *ctx;
    void *native;
    uint32_t index;
};

fsdp_status fsdp__comm_open(fsdp_context *ctx, const fsdp_config *config, uint32_t index, fsdp_comm **out_comm)
{
    fsdp_comm *comm = fsdp__host_alloc(&ctx->host, 1, sizeof *comm);
    if (comm == NULL) return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "communicator %u: no host memory", index);
    comm->ctx = ctx;
    comm->index = index;
    fsdp_comm_args args = {sizeof args, config->backend_config, ctx->dev,           &ctx->host,
                           index,       ctx->timeout_ns,        ctx->backend->side, ctx->side};
    fsdp_status status = ctx->backend->comm->open(&args, &comm->native);
    if (status != FSDP_OK) {
        fsdp__host_free(&ctx->host, comm, 1, sizeof *comm);
        return status;
    }
    *out_comm = comm;
    return FSDP_OK;
}

void fsdp__comm_close(fsdp_comm *comm)
{
    if (comm == NULL) return;
    comm->ctx->backend->comm->close(comm->native);
    fsdp__host_free(&comm->ctx->host, comm, 1, sizeof *comm);
}

fsdp_status fsdp__comm_check(fsdp_comm *comm) { return comm->ctx->backend->comm->check(comm->native); }
void fsdp__comm_abort(fsdp_comm *comm) { comm->ctx->backend->comm->abort(comm->native); }

void *fsdp__comm_native(const fsdp_comm *comm, const fsdp_comm_ops *ops)
{
    return comm->ctx->backend->comm == ops ? comm->native : NULL;
}

fsdp_status fsdp__comm_attach(fsdp_comm *comm, fsdp_operation kind, void *base, uint64_t bytes, void **out_handle)
{
    *out_handle = NULL;
    return bytes > 0 ? comm->ctx->backend->comm->attach(comm->native, kind, base, bytes, out_handle) : FSDP_OK;
}

void fsdp__comm_detach(fsdp_comm *comm, void *handle)
{
    if (handle != NULL) comm->ctx->backend->comm->detach(comm->native, handle);
}

fsdp_comm *fsdp_context_comm(fsdp_context *ctx) { return ctx != NULL ? ctx->comm : NULL; }
fsdp_comm *fsdp_context_reduce_comm(fsdp_context *ctx) { return ctx != NULL ? ctx->reduce_comm : NULL; }
uint32_t fsdp_comm_rank(const fsdp_comm *comm) { return comm != NULL ? comm->ctx->rank : 0; }
uint32_t fsdp_comm_size(const fsdp_comm *comm) { return comm != NULL ? comm->ctx->world : 0; }

/* What this rank's memory sees, and what it puts on the wire by host.h's counts. */
static void fill_record(const fsdp_comm *comm, const fsdp_collective *c, fsdp_trace_record *r)
{
    uint64_t world = comm->ctx->world, bytes = c->count * fsdp_dtype_bytes(c->dtype), sent = bytes, received = bytes;
    r->bytes = bytes;
    if (c->kind == FSDP_OPERATION_ALL_GATHER) received = bytes * world, r->bytes = bytes * (world - 1);
    if (c->kind == FSDP_OPERATION_REDUCE_SCATTER) sent = bytes * world, r->bytes = bytes * (world - 1);
    if (c->kind == FSDP_OPERATION_ALL_REDUCE) r->bytes = 2 * bytes * (world - 1) / world;
    if (bytes == 0) return;
    if (c->send != NULL) r->access[r->n_accesses++] = (fsdp_trace_access){(uint64_t)(uintptr_t)c->send, sent, false};
    if (c->recv != NULL) r->access[r->n_accesses++] = (fsdp_trace_access){(uint64_t)(uintptr_t)c->recv, received, true};
}

/* On the tape, and counted. */
static void note(fsdp_comm *comm, const fsdp_stream *s, fsdp_collective *list, uint32_t n, uint64_t now_ns)
{
    fsdp_context *ctx = comm->ctx;
    for (uint32_t i = 0; ctx->trace != NULL && i < n; i++) {
        fsdp_trace_record record = {.kind = FSDP_RECORD_OPERATION,
                                    .operation = list[i].kind,
                                    .stream = s->slot,
                                    .other = -1,
                                    .label = list[i].label,
                                    .enqueued_ns = now_ns};
        fill_record(comm, &list[i], &record);
        list[i].span = fsdp__trace_add(ctx->trace, &record);
    }
    ctx->counters.collectives += n;
}

fsdp_status fsdp__comm_enqueue(fsdp_comm *comm, fsdp_stream *s, fsdp_collective *list, uint32_t n)
{
    fsdp_context *ctx = comm->ctx;
    FSDP_TRY(fsdp__pass_gate(s));
    /* First: should this rank not come back from the next lines, the others are told where it is. */
    const uint64_t now_ns = ctx->backend->device->now_ns(ctx->dev);
    fsdp__flight_add(&ctx->flight, comm->index, list, n, fsdp__point_of(s->slot, fsdp__epoch(s)), now_ns);
    fsdp_status status = ctx->debug & FSDP_DEBUG_ORDER ? fsdp__order_check(ctx, comm->index, n) : FSDP_OK;
    if (status != FSDP_OK) return status;
    note(comm, s, list, n, now_ns);
    uint64_t number, hash;
    fsdp__flight_count(&ctx->flight, comm->index, &number, &hash);
    for (uint32_t i = 0; i < n; i++) list[i].captured = ctx->capture != NULL, list[i].number = number;
    status = ctx->backend->comm->enqueue(comm->native, s->native, list, n);
    if (status == FSDP_OK || (status != FSDP_ERR_NO_HOST_MEMORY && ctx->debug & FSDP_DEBUG_SYNC)) return status;
    fsdp__flight_take_back(&ctx->flight, comm->index, n);
    if (status != FSDP_ERR_NO_HOST_MEMORY) return status;
    ctx->counters.collectives -= n; /* it has not happened */
    for (uint32_t i = n; ctx->trace != NULL && i-- > 0;) fsdp__trace_take_back(ctx->trace, list[i].span);
    return status;
}

/* n parts of so many bytes; more than an address space has stands for the largest number. */
static uint64_t part_bytes(uint64_t bytes, uint64_t n)
{
    return bytes > 0 && n > UINT64_MAX / bytes ? UINT64_MAX : bytes * n;
}

static bool overlap(uint64_t one, uint64_t one_bytes, uint64_t other, uint64_t other_bytes)
{
    return one <= other ? other - one < one_bytes : one - other < other_bytes;
}

/* The words of comm.h: on its elements' boundaries; and in place, or apart. */
static fsdp_status check_buffers(const char *call, const fsdp_comm *comm, const fsdp_collective *c, size_t each)
{
    uint64_t send = (uintptr_t)c->send, recv = (uintptr_t)c->recv, bytes = c->count * each;
    if (send % each != 0 || recv % each != 0)
        return fsdp__fail(FSDP_ERR_ARG, "%s: %s is at %p, which is no multiple of %zu bytes, one %s", call,
                          c->kind == FSDP_OPERATION_BROADCAST ? "data"
                          : send % each != 0                  ? "send"
                                                              : "recv",
                          send % each != 0 ? c->send : c->recv, each, fsdp_dtype_name(c->dtype));
    if (c->kind == FSDP_OPERATION_BROADCAST) return FSDP_OK;
    uint64_t whole = part_bytes(bytes, comm->ctx->world), mine = part_bytes(bytes, comm->ctx->rank);
    uint64_t send_bytes = bytes, recv_bytes = bytes;
    const char *in_place = "send == recv";
    bool is_in_place = send == recv;
    if (c->kind == FSDP_OPERATION_ALL_GATHER) {
        recv_bytes = whole, in_place = "send == recv + rank * count";
        is_in_place = send >= recv && send - recv == mine;
    } else if (c->kind == FSDP_OPERATION_REDUCE_SCATTER) {
        send_bytes = whole, in_place = "recv == send + rank * count";
        is_in_place = recv >= send && recv - send == mine;
    }
    if (is_in_place || !overlap(send, send_bytes, recv, recv_bytes)) return FSDP_OK;
    return fsdp__fail(FSDP_ERR_ARG,
                      "%s: send (%llu bytes at %p) and recv (%llu bytes at %p) overlap, and rank %u is not in place, "
                      "which is %s",
                      call, (unsigned long long)send_bytes, c->send, (unsigned long long)recv_bytes, c->recv,
                      comm->ctx->rank, in_place);
}

static fsdp_status check_caller(const char *call, fsdp_comm *comm, const fsdp_collective *c, fsdp_stream *s)
{
    if (comm == NULL) return fsdp__fail(FSDP_ERR_ARG, "%s: comm is NULL", call);
    FSDP_TRY(fsdp__stream_check(call, comm->ctx, s));
    size_t each = fsdp_dtype_bytes(c->dtype);
    if (each == 0) return fsdp__fail(FSDP_ERR_ARG, "%s: %d is no dtype", call, (int)c->dtype);
    if (c->count > (uint64_t)1 << 48)
        return fsdp__fail(FSDP_ERR_ARG, "%s: count %llu is beyond 2^48", call, (unsigned long long)c->count);
    if (c->count > 0 && (c->send == NULL || c->recv == NULL))
        return fsdp__fail(FSDP_ERR_ARG, "%s: a buffer is NULL", call);
    if (c->root >= comm->ctx->world)
        return fsdp__fail(FSDP_ERR_ARG, "%s: root %u in a world of %u", call, c->root, comm->ctx->world);
    return c->count > 0 ? check_buffers(call, comm, c, each) : FSDP_OK;
}

static fsdp_status enqueue_caller(const char *call, fsdp_comm *comm, fsdp_collective *c, fsdp_stream *s,
                                  fsdp_work **out_work)
{
    FSDP_TRY(check_caller(call, comm, c, s));
    c->label = "caller";
    fsdp_work *work = NULL; /* made first: once the operation is enqueued, the call should not fail */
    fsdp__lock(comm->ctx);
    fsdp_status status = out_work != NULL ? fsdp__work_create(comm->ctx, &work) : FSDP_OK;
    if (status == FSDP_OK) status = fsdp__comm_enqueue(comm, s, c, 1);
    if (status == FSDP_OK && work != NULL) {
        status = fsdp__work_record(work, s);
        /* Enqueued it is: without memory for its event it is waited for, and an event that was never recorded is done. */
        if (status == FSDP_ERR_NO_HOST_MEMORY) status = fsdp__device_drain_host(s, comm->ctx->timeout_ns);
    }
    fsdp__unlock(comm->ctx);
    if (status == FSDP_OK) {
        if (out_work != NULL) *out_work = work;
        return status;
    }
    fsdp_work_release(work);
    return fsdp__context_explain(comm->ctx, status);
}

fsdp_status fsdp_all_gather(fsdp_comm *comm, const void *send, void *recv, uint64_t count, fsdp_dtype dtype,
                            fsdp_stream *stream, fsdp_work **out_work)
{
    fsdp_collective c = {.kind = FSDP_OPERATION_ALL_GATHER, .dtype = dtype, .count = count, .send = send, .recv = recv};
    return enqueue_caller(__func__, comm, &c, stream, out_work);
}

fsdp_status fsdp_reduce_scatter(fsdp_comm *comm, const void *send, void *recv, uint64_t count, fsdp_dtype dtype,
                                fsdp_stream *stream, fsdp_work **out_work)
{
    fsdp_collective c = {
        .kind = FSDP_OPERATION_REDUCE_SCATTER, .dtype = dtype, .count = count, .send = send, .recv = recv};
    return enqueue_caller(__func__, comm, &c, stream, out_work);
}

fsdp_status fsdp_all_reduce(fsdp_comm *comm, const void *send, void *recv, uint64_t count, fsdp_dtype dtype,
                            fsdp_stream *stream, fsdp_work **out_work)
{
    fsdp_collective c = {.kind = FSDP_OPERATION_ALL_REDUCE, .dtype = dtype, .count = count, .send = send, .recv = recv};
    return enqueue_caller(__func__, comm, &c, stream, out_work);
}

fsdp_status fsdp_broadcast(fsdp_comm *comm, void *data, uint64_t count, fsdp_dtype dtype, uint32_t root,
                           fsdp_stream *stream, fsdp_work **out_work)
{
    fsdp_collective c = {
        .kind = FSDP_OPERATION_BROADCAST, .dtype = dtype, .count = count, .send = data, .recv = data, .root = root};
    return enqueue_caller(__func__, comm, &c, stream, out_work);
}

fsdp_status fsdp_barrier(fsdp_comm *comm, fsdp_stream *stream, fsdp_work **out_work)
{
    fsdp_collective c = {.kind = FSDP_OPERATION_BARRIER, .dtype = FSDP_DTYPE_FP32};
    return enqueue_caller(__func__, comm, &c, stream, out_work);
}
