/* SPDX-License-Identifier: MIT */
/* NCCL of the stand-in: communicators whose ranks are threads of a process, or processes forked from one.
 *
 *  enqueue  The first collective of a communicator connects its ranks: the call returns when all have come (NCCL does so
 *           on the host). The following ones return at once.
 *  order    A communicator's collectives run one after the other, in the order of the calls, on whatever streams.
 *  end      A collective is over when every rank has come to it, not before. Nobody compares what ranks call.
 *  abort    What runs leaves, then the communicator is freed; in a group it is stopped at once and freed at the group's
 *           end. Peers hear nothing of it. A call that uses a communicator after that, or is in it meanwhile, ends the
 *           program; so do two threads in one communicator at once, which NCCL does not allow.
 *  close    Finalising, registering a window, splitting: all ranks must come. */
#include "standin_nccl.h"
#include "convert.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { GROUP = 64, CHUNK = 512 };

struct ncclComm {
    standin_room *room;
    int world, rank;
    standin_way_out out;
    uint32_t n_splits, n_windows;
    bool connected;
    uint64_t step;                      /* of the stream that runs its collective */
    _Atomic uint64_t n_entered, n_left; /* collectives */
    _Atomic uint32_t left;              /* to sleep by */
    atomic_bool freed;
    atomic_int n_inside;      /* calls on the host that have begun and not ended */
    _Atomic uintptr_t inside; /* the thread of them; 0: none */
    struct ncclComm *next;    /* of all ever made: they stay, so that a use after the end is seen */
};

typedef enum collective { ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, BROADCAST } collective;

typedef struct call {
    ncclComm_t comm;
    uint64_t number;
    collective kind;
    const char *send;
    char *recv;
    size_t count;
    fsdp_dtype dtype;
    int root;
} call;

typedef struct group {
    int depth;
    uint32_t n_calls, n_aborts;
    call calls[GROUP];
    cudaStream_t stream[GROUP];
    ncclComm_t abort[GROUP];
} group;

static _Thread_local group mine;
static pthread_mutex_t comms_lock = PTHREAD_MUTEX_INITIALIZER;
static ncclComm_t comms;
atomic_int standin_live_comms[STANDIN_DEVICES];

static void check_lives(ncclComm_t c)
{
    if (atomic_load(&c->freed)) standin_die("a communicator is used after its end");
}

static void go_inside(ncclComm_t c)
{
    uintptr_t nobody = 0, me = (uintptr_t)&mine;
    check_lives(c);
    if (!atomic_compare_exchange_strong(&c->inside, &nobody, me) && nobody != me)
        standin_die("two threads are in one communicator at once");
    atomic_fetch_add(&c->n_inside, 1);
}

static void go_outside(ncclComm_t c)
{
    if (atomic_fetch_sub(&c->n_inside, 1) == 1) atomic_store(&c->inside, 0);
}

/* ---- What a test wants ---- */

static atomic_bool aborts_are_held;
static atomic_int found[STANDIN_DEVICES];

void standin_nccl_hold_aborts(void) { atomic_store(&aborts_are_held, true); }
void standin_nccl_find(int device, ncclResult_t error) { atomic_store(&found[device], (int)error); }

/* A call that a test wants to fail: the network, or NCCL itself. */
#define BEGIN(call)                                                                                         \
    do {                                                                                                    \
        cudaError_t begun_ = standin_begin(call);                                                           \
        if (begun_ != cudaSuccess) return begun_ == cudaErrorUnknown ? ncclSystemError : ncclInternalError; \
    } while (0)

/* ---- Words ---- */

ncclResult_t ncclGetVersion(int *version)
{
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result)
{
    switch (result) {
    case ncclSuccess: return "no error";
    case ncclInvalidArgument: return "invalid argument";
    case ncclInvalidUsage: return "invalid usage";
    case ncclInternalError: return "internal error";
    case ncclSystemError: return "system error";
    case ncclRemoteError: return "remote error";
    default: return "unknown error";
    }
}

const char *ncclGetLastError(ncclComm_t comm)
{
    (void)comm;
    return "";
}

/* ---- A collective, on its stream ---- */

static size_t bytes_of(fsdp_dtype dtype) { return (size_t)fsdp_dtype_bytes(dtype); }

/* In the order of ranks, each sum rounded to the type, as each hop of a ring does. */
static void reduce(const call *x, char *to, size_t at, size_t count)
{
    float sum[CHUNK], term[CHUNK];
    size_t each = bytes_of(x->dtype);
    for (size_t done = 0; done < count; done += CHUNK) {
        size_t n = count - done < CHUNK ? count - done : CHUNK;
        for (int r = 0; r < x->comm->world; r++) {
            fsdp__load_floats(r == 0 ? sum : term, x->comm->room->slot[r] + (at + done) * each, n, x->dtype);
            for (size_t i = 0; i < n && r > 0; i++) sum[i] += term[i];
            fsdp__store_floats(to + done * each, sum, n, x->dtype);
            fsdp__load_floats(sum, to + done * each, n, x->dtype);
        }
    }
}

/* Elements from `from` on: this rank's part into its slot. Of a reduce-scatter a part for each rank. */
static void bring(const call *x, size_t from, size_t n)
{
    size_t each = bytes_of(x->dtype);
    char *slot = x->comm->room->slot[x->comm->rank];
    if (x->kind == BROADCAST && x->comm->rank != x->root) return;
    int n_parts = x->kind == REDUCE_SCATTER ? x->comm->world : 1;
    for (int r = 0; r < n_parts; r++)
        memcpy(slot + (size_t)r * n * each, x->send + ((size_t)r * x->count + from) * each, n * each);
}

static void take(const call *x, size_t from, size_t n)
{
    size_t each = bytes_of(x->dtype);
    const standin_room *room = x->comm->room;
    char *to = x->recv + from * each;
    switch (x->kind) {
    case ALL_GATHER:
        for (int r = 0; r < x->comm->world; r++) memcpy(to + (size_t)r * x->count * each, room->slot[r], n * each);
        break;
    case BROADCAST: memcpy(to, room->slot[x->root], n * each); break;
    case ALL_REDUCE: reduce(x, to, 0, n); break;
    case REDUCE_SCATTER: reduce(x, to, (size_t)x->comm->rank * n, n); break;
    }
}

static bool wait_turn(const call *x)
{
    ncclComm_t c = x->comm;
    for (;;) {
        uint32_t seen = atomic_load_explicit(&c->left, memory_order_acquire);
        if (standin_is_over(&c->out)) return false;
        if (atomic_load_explicit(&c->n_left, memory_order_acquire) == x->number - 1) return true;
        (void)fsdp__futex_wait(&c->left, seen, fsdp__after_ns(STANDIN_LOOK_NS), false);
    }
}

static void exchange(const call *x)
{
    ncclComm_t c = x->comm;
    standin_room *room = c->room;
    size_t most = STANDIN_SLOT_BYTES / bytes_of(x->dtype) / (x->kind == REDUCE_SCATTER ? (size_t)c->world : 1);
    for (size_t from = 0; from < x->count; from += most) {
        size_t n = x->count - from < most ? x->count - from : most;
        uint64_t step = ++c->step;
        bring(x, from, n);
        atomic_store_explicit(&room->in[c->rank], step, memory_order_release);
        standin_room_changed(room);
        if (!standin_room_all(room, room->in, c->world, step, &c->out)) return;
        take(x, from, n);
        atomic_store_explicit(&room->out[c->rank], step, memory_order_release);
        standin_room_changed(room);
        if (!standin_room_all(room, room->out, c->world, step, &c->out)) return;
    }
}

static void run_call(void *arg)
{
    const call *x = arg;
    ncclComm_t c = x->comm;
    if (wait_turn(x)) {
        exchange(x);
        standin_work_has_ended();
    }
    atomic_fetch_add_explicit(&c->n_left, 1, memory_order_release);
    atomic_fetch_add_explicit(&c->left, 1, memory_order_release);
    fsdp__futex_wake_all(&c->left, false);
}

static void enter_call(void *arg)
{
    call *x = arg;
    x->number = 1 + atomic_fetch_add(&x->comm->n_entered, 1);
}

static const standin_kind call_kind = {run_call, enter_call, sizeof(call), true, false};

/* ---- Calls of collectives ---- */

static ncclResult_t connect_ranks(ncclComm_t c)
{
    if (c->connected) return ncclSuccess;
    if (!standin_room_meet(c->room, &c->room->n_connected, (uint64_t)c->world, &c->out)) return ncclInternalError;
    c->connected = true;
    return ncclSuccess;
}

static ncclResult_t push_calls(void)
{
    ncclResult_t result = ncclSuccess;
    for (uint32_t i = 0; i < mine.n_calls; i++) {
        const call *x = &mine.calls[i];
        if (result == ncclSuccess) result = connect_ranks(x->comm);
        if (result == ncclSuccess && standin_push(mine.stream[i], &call_kind, x) != cudaSuccess)
            result = ncclUnhandledCudaError;
    }
    for (uint32_t i = 0; i < mine.n_calls; i++) go_outside(mine.calls[i].comm);
    mine.n_calls = 0;
    return result;
}

static ncclResult_t add_call(call x, ncclDataType_t type, cudaStream_t stream)
{
    ncclComm_t c = x.comm;
    size_t world = (size_t)c->world;
    check_lives(c);
    if (x.count == 0) return ncclSuccess;
    x.dtype = type == ncclFloat32 ? FSDP_DTYPE_FP32 : type == ncclFloat16 ? FSDP_DTYPE_FP16 : FSDP_DTYPE_BF16;
    size_t bytes = x.count * bytes_of(x.dtype);
    if (standin_stream_of(stream, &stream) != cudaSuccess || stream->device != c->out.device) return ncclInvalidUsage;
    if (!standin_is_known(x.send, bytes * (x.kind == REDUCE_SCATTER ? world : 1)) ||
        !standin_is_known(x.recv, bytes * (x.kind == ALL_GATHER ? world : 1)))
        standin_die("a collective of memory that is not the GPU's");
    if (mine.n_calls == GROUP) standin_die("a group of more than %d calls", GROUP);
    go_inside(c);
    mine.stream[mine.n_calls] = stream;
    mine.calls[mine.n_calls++] = x;
    return mine.depth > 0 ? ncclSuccess : push_calls();
}

ncclResult_t ncclAllGather(const void *send, void *recv, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream)
{
    BEGIN(__func__);
    return add_call((call){comm, 0, ALL_GATHER, send, recv, count, FSDP_DTYPE_FP32, 0}, type, stream);
}

ncclResult_t ncclReduceScatter(const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream)
{
    BEGIN(__func__);
    if (op != ncclSum) return ncclInvalidArgument;
    return add_call((call){comm, 0, REDUCE_SCATTER, send, recv, count, FSDP_DTYPE_FP32, 0}, type, stream);
}

ncclResult_t ncclAllReduce(const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream)
{
    BEGIN(__func__);
    if (op != ncclSum) return ncclInvalidArgument;
    return add_call((call){comm, 0, ALL_REDUCE, send, recv, count, FSDP_DTYPE_FP32, 0}, type, stream);
}

ncclResult_t ncclBroadcast(const void *send, void *recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream)
{
    BEGIN(__func__);
    return add_call((call){comm, 0, BROADCAST, send, recv, count, FSDP_DTYPE_FP32, root}, type, stream);
}

/* ---- The end ---- */

static void wait_left(ncclComm_t c)
{
    for (;;) {
        uint32_t seen = atomic_load_explicit(&c->left, memory_order_acquire);
        if (atomic_load_explicit(&c->n_left, memory_order_acquire) >= atomic_load(&c->n_entered)) return;
        (void)fsdp__futex_wait(&c->left, seen, fsdp__after_ns(STANDIN_LOOK_NS), false);
    }
}

static void stop(ncclComm_t c)
{
    atomic_store(&c->out.stopped, true);
    standin_room_changed(c->room);
    atomic_fetch_add(&c->left, 1);
    fsdp__futex_wake_all(&c->left, false);
}

static ncclResult_t reclaim(ncclComm_t c)
{
    wait_left(c);
    if (atomic_load(&c->n_inside) > 0) standin_die("a communicator is freed while somebody is in it");
    if (atomic_exchange(&c->freed, true)) standin_die("a communicator is freed twice");
    atomic_fetch_sub(&standin_live_comms[c->out.device], 1);
    return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t c)
{
    check_lives(c);
    while (atomic_load(&aborts_are_held)) pause();
    stop(c);
    if (mine.depth == 0) return reclaim(c);
    mine.abort[mine.n_aborts++] = c;
    return ncclSuccess;
}

ncclResult_t ncclGroupStart(void)
{
    BEGIN(__func__);
    mine.depth++;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void)
{
    if (mine.depth == 0) return ncclInvalidUsage;
    if (--mine.depth > 0) return ncclSuccess;
    ncclResult_t result = push_calls();
    while (mine.n_aborts > 0) (void)reclaim(mine.abort[--mine.n_aborts]);
    return result;
}

/* "Destroying a communicator is an intra-node collective call": here already the finalising before it is. */
ncclResult_t ncclCommFinalize(ncclComm_t c)
{
    BEGIN(__func__);
    check_lives(c);
    wait_left(c);
    bool all = standin_room_meet(c->room, &c->room->n_closing, (uint64_t)c->world, &c->out);
    return all ? ncclSuccess : ncclInternalError;
}

ncclResult_t ncclCommDestroy(ncclComm_t c)
{
    check_lives(c);
    return reclaim(c);
}

/* ---- The beginning ---- */

static ncclResult_t open_comm(standin_room *room, int world, int rank, ncclComm_t parent, ncclComm_t *out_comm)
{
    ncclComm_t c = calloc(1, sizeof *c);
    if (c == NULL || world > STANDIN_RANKS) standin_die("no communicator of %d ranks", world);
    c->room = room;
    c->world = world, c->rank = rank;
    c->out.device = standin_current();
    pthread_mutex_lock(&comms_lock);
    c->next = comms;
    comms = c;
    pthread_mutex_unlock(&comms_lock);
    /* For ever, as NCCL; an abort of the parent ends a split. */
    const standin_way_out *out = parent != NULL ? &parent->out : &c->out;
    if (!standin_room_meet(room, &room->n_init, (uint64_t)world, out)) {
        atomic_store(&c->freed, true);
        return ncclInternalError;
    }
    atomic_fetch_add(&standin_live_comms[c->out.device], 1);
    *out_comm = c;
    return ncclSuccess;
}

static const char magic[8] = "standin";

ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
    BEGIN(__func__);
    uint32_t number = standin_room_new();
    memset(id, 0, sizeof *id);
    memcpy(id->internal, magic, sizeof magic);
    memcpy(id->internal + sizeof magic, &number, sizeof number);
    return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int world, ncclUniqueId id, int rank)
{
    BEGIN(__func__);
    uint32_t number;
    memcpy(&number, id.internal + sizeof magic, sizeof number);
    if (memcmp(id.internal, magic, sizeof magic) != 0 || rank < 0 || rank >= world) return ncclInvalidArgument;
    return open_comm(standin_room_of(number), world, rank, NULL, comm);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int world, ncclUniqueId id, int rank, ncclConfig_t *config)
{
    if (config != NULL && config->blocking == 0) standin_die("communicators that do not block are not stood in for");
    return ncclCommInitRank(comm, world, id, rank);
}

/* Rank 0 chooses the room. One colour: all ranks. */
static ncclResult_t split(ncclComm_t parent, int rank, ncclComm_t *comm)
{
    standin_room *room = parent->room;
    _Atomic uint32_t *chosen = &room->split[parent->n_splits++];
    if (parent->rank == 0) {
        atomic_store(chosen, standin_room_new());
        standin_room_changed(room);
    }
    for (;;) {
        uint32_t seen = atomic_load(&room->tick), number = atomic_load(chosen);
        if (number != 0) return open_comm(standin_room_of(number), parent->world, rank, parent, comm);
        if (standin_is_over(&parent->out)) return ncclInternalError;
        (void)fsdp__futex_wait(&room->tick, seen, fsdp__after_ns(STANDIN_LOOK_NS), true);
    }
}

ncclResult_t ncclCommSplit(ncclComm_t parent, int colour, int key, ncclComm_t *comm, ncclConfig_t *config)
{
    BEGIN(__func__);
    (void)colour, (void)config;
    go_inside(parent);
    if (parent->n_splits == STANDIN_SPLITS) standin_die("more than %d splits", STANDIN_SPLITS);
    ncclResult_t result = split(parent, key, comm);
    go_outside(parent);
    return result;
}

/* ---- Questions ---- */

ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t *error)
{
    BEGIN(__func__);
    go_inside(c);
    *error = (ncclResult_t)atomic_load(&found[c->out.device]);
    go_outside(c);
    return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t c, int *count)
{
    check_lives(c);
    *count = c->world;
    return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t c, int *rank)
{
    check_lives(c);
    *rank = c->rank;
    return ncclSuccess;
}

ncclResult_t ncclCommCuDevice(const ncclComm_t c, int *device)
{
    check_lives(c);
    *device = c->out.device;
    return ncclSuccess;
}

/* ---- Memory ---- */

ncclResult_t ncclMemAlloc(void **ptr, size_t bytes)
{
    return cudaMalloc(ptr, bytes) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

ncclResult_t ncclMemFree(void *ptr) { return cudaFree(ptr) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError; }

#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
/* All ranks must come, and more than once: so the count is of registrations. */
ncclResult_t ncclCommWindowRegister(ncclComm_t c, void *base, size_t bytes, ncclWindow_t *window, int flags)
{
    BEGIN(__func__);
    (void)flags;
    go_inside(c);
    uint64_t n = ++c->n_windows * (uint64_t)c->world;
    bool all = standin_room_meet(c->room, &c->room->n_windows, n, &c->out);
    if (!standin_is_known(base, bytes)) standin_die("a window of memory that is not the GPU's");
    *window = base;
    go_outside(c);
    return all ? ncclSuccess : ncclInternalError;
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t c, ncclWindow_t window)
{
    (void)window;
    check_lives(c);
    return ncclSuccess;
}
#endif
