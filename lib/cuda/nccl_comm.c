/* SPDX-License-Identifier: MIT */
/* NCCL's communicators as the backend's table of collectives. */
#include <stdio.h>
#include <time.h>

#include "hostmem.h"
#include "nccl_parts.h"

enum { MAX_PARTS = 16 /* of a group: lib/comm.h */, GRACE_NS = 300000000, NAP_NS = 5000000 };
#define MOST_CLOSING_NS 10000000000ull

/* ---- Failing ---- */

fsdp_status fsdp__nccl_check(void *comm)
{
    fsdp__nccl_comm *c = comm;
    fsdp_status status = (fsdp_status)atomic_load_explicit(&c->status, memory_order_acquire);
    return status == FSDP_OK ? FSDP_OK : fsdp__fail(status, "%s", c->sentence);
}

void fsdp__nccl_stop(fsdp__nccl_comm *c, fsdp_status status, const char *sentence)
{
    pthread_mutex_lock(&c->lock);
    if (atomic_load(&c->status) == FSDP_OK) {
        snprintf(c->sentence, sizeof c->sentence, "%s", sentence);
        atomic_store_explicit(&c->status, status, memory_order_release);
    }
    bool first = c->abort_job != NULL && !atomic_exchange(&c->aborting, true);
    if (first) (void)fsdp__nccl_job_start(c->abort_job); /* without a thread the kernels stay, until the process ends */
    pthread_mutex_unlock(&c->lock);
}

/* What the side channel says is why, and is what every rank hears. The channel calls this when it fails. */
static void comm_abort(void *comm)
{
    fsdp__nccl_comm *c = comm;
    char sentence[FSDP__SENTENCE_BYTES];
    fsdp_status why = c->team != NULL ? c->team->side_ops->check(c->team->side) : FSDP_OK;
    if (why != FSDP_OK) snprintf(sentence, sizeof sentence, "%s", fsdp_last_error());
    else snprintf(sentence, sizeof sentence, "rank %u aborted communicator %u", c->rank, c->index);
    fsdp__nccl_stop(c, why != FSDP_OK ? why : FSDP_ERR_ABORTED, sentence);
    if (why == FSDP_OK && c->team != NULL) (c->team->side_ops->fail)(c->team->side, FSDP_ERR_ABORTED, sentence);
}

/* NCCL has failed. A peer that is gone is what the side channel knows best; it hears of it at about the same time. */
static fsdp_status failed(fsdp__nccl_comm *c, const char *call, ncclResult_t result, const fsdp_collective *list,
                          uint32_t n)
{
    fsdp__nccl_team *team = c->team;
    const struct timespec nap = {0, NAP_NS};
    char words[FSDP__NCCL_WORDS], what[256], sentence[FSDP__SENTENCE_BYTES];
    fsdp__call words_of;
    fsdp__nccl_words(result, NULL, words, sizeof words);
    fsdp__call_fill(&words_of, &list[0], fsdp__nccl_number(c, list), 0, n);
    fsdp__call_describe(&words_of, what, sizeof what);
    fsdp_status status = fsdp__nccl_status(result);
    uint64_t end = fsdp__after_ns(GRACE_NS);
    while (status == FSDP_ERR_RANK_LOST && team->side_ops->check(team->side) == FSDP_OK && fsdp__now_ns() < end)
        nanosleep(&nap, NULL);
    if (team->side_ops->check(team->side) != FSDP_OK) comm_abort(c);
    FSDP_TRY(fsdp__nccl_check(c)); /* the peers' failure, or an abort, had reached it */
    snprintf(sentence, sizeof sentence, "%s: %s: %s", what, call, words);
    if (status == FSDP_ERR_DEVICE) FSDP_IGNORE(fsdp__cuda_fail(c->dev, cudaErrorUnknown, "%s", sentence));
    fsdp__nccl_stop(c, status, sentence);
    return fsdp__nccl_check(c);
}

/* A device that has failed refuses: peers must not wait for this rank. */
static fsdp_status refused(fsdp__nccl_comm *c, const fsdp_collective *list, uint32_t n)
{
    char why[400], what[256], sentence[FSDP__SENTENCE_BYTES];
    fsdp__call call;
    fsdp_status status = fsdp__cuda_check(c->dev);
    snprintf(why, sizeof why, "%s", fsdp_last_error());
    if (c->team != NULL && status != FSDP_ERR_ABORTED) {
        fsdp__call_fill(&call, &list[0], fsdp__nccl_number(c, list), 0, n);
        fsdp__call_describe(&call, what, sizeof what);
        snprintf(sentence, sizeof sentence, "%s: rank %u of %u did not come: %s", what, c->rank, c->world, why);
        fsdp__nccl_tell(c->team, FSDP_ERR_RANK_LOST, sentence);
    }
    return fsdp__cuda_check(c->dev);
}

/* ---- Enqueueing ---- */

/* Older headers name ncclBfloat16 only behind CUDA's own header of that type. */
static ncclDataType_t type_of(fsdp_dtype dtype)
{
    const ncclDataType_t bf16 = (ncclDataType_t)9;
    return dtype == FSDP_DTYPE_BF16 ? bf16 : dtype == FSDP_DTYPE_FP16 ? ncclFloat16 : ncclFloat32;
}

static ncclResult_t call_nccl(const fsdp__nccl_comm *c, ncclComm_t comm, cudaStream_t stream, const fsdp_collective *op)
{
    ncclDataType_t type = type_of(op->dtype);
    switch (op->kind) {
    case FSDP_OPERATION_ALL_GATHER: return ncclAllGather(op->send, op->recv, op->count, type, comm, stream);
    case FSDP_OPERATION_REDUCE_SCATTER:
        return ncclReduceScatter(op->send, op->recv, op->count, type, ncclSum, comm, stream);
    case FSDP_OPERATION_ALL_REDUCE: return ncclAllReduce(op->send, op->recv, op->count, type, ncclSum, comm, stream);
    case FSDP_OPERATION_BROADCAST:
        return ncclBroadcast(op->send, op->recv, op->count, type, (int)op->root, comm, stream);
    default: return ncclAllReduce(c->token, c->token, 1, ncclFloat32, ncclSum, comm, stream);
    }
}

/* With the entry held. A group that has begun is ended in any case. */
static ncclResult_t enqueue_group(const fsdp__nccl_comm *c, ncclComm_t comm, cudaStream_t stream,
                                  const fsdp_collective *list, uint32_t n)
{
    if (n == 1) return call_nccl(c, comm, stream, &list[0]);
    ncclResult_t result = ncclGroupStart();
    if (result != ncclSuccess) return result;
    for (uint32_t i = 0; i < n && (result == ncclSuccess || result == ncclInProgress); i++)
        result = call_nccl(c, comm, stream, &list[i]);
    ncclResult_t ended = ncclGroupEnd();
    return result != ncclSuccess && result != ncclInProgress ? result : ended;
}

/* The caller's own communicator may be one that does not block: then NCCL goes on by itself, and takes nothing meanwhile. */
static ncclResult_t settle(const fsdp__nccl_comm *c, ncclComm_t comm)
{
    ncclResult_t result = ncclInProgress;
    while (result == ncclInProgress && atomic_load(&c->status) == FSDP_OK)
        if (ncclCommGetAsyncError(comm, &result) != ncclSuccess) return ncclInternalError;
    return result;
}

static fsdp_status enqueue_nccl(fsdp__nccl_comm *c, fsdp__cuda_stream *s, const fsdp_collective *list, uint32_t n)
{
    fsdp__nccl_wire *wire = c->wire;
    pthread_mutex_lock(&wire->entry);
    ncclComm_t comm = atomic_load_explicit(&wire->comm, memory_order_relaxed);
    if (comm == NULL) {
        pthread_mutex_unlock(&wire->entry);
        return fsdp__nccl_check(c); /* it was stopped meanwhile */
    }
    fsdp__nccl_place place = fsdp__nccl_ring_begin(c, s, list, n);
    ncclResult_t result = enqueue_group(c, comm, s->native, list, n);
    if (result == ncclInProgress) result = settle(c, comm);
    fsdp__nccl_ring_end(c, s, place, result == ncclSuccess);
    pthread_mutex_unlock(&wire->entry);
    return result == ncclSuccess ? FSDP_OK : failed(c, n > 1 ? "ncclGroupEnd" : "NCCL", result, list, n);
}

/* A world of one: what comes out is what went in. */
static fsdp_status enqueue_copies(fsdp__nccl_comm *c, cudaStream_t stream, const fsdp_collective *list, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        const fsdp_collective *op = &list[i];
        uint64_t bytes = op->count * fsdp_dtype_bytes(op->dtype);
        if (op->kind == FSDP_OPERATION_BARRIER || bytes == 0 || op->send == op->recv) continue;
        FSDP__CUDA_TRY(c->dev, cudaMemcpyAsync(op->recv, op->send, bytes, cudaMemcpyDefault, stream));
    }
    return FSDP_OK;
}

/* Each part of a group has a span, and a stream knows one that is begun. */
static fsdp_status enqueue_spans(fsdp__nccl_comm *c, fsdp__cuda_stream *s, const fsdp_collective *list, uint32_t n)
{
    fsdp__cuda_mark *begun[MAX_PARTS];
    for (uint32_t i = n; i-- > 1;) {
        FSDP_TRY(fsdp__cuda_span_begin(s, list[i].span));
        begun[i] = s->begun;
        s->begun = NULL;
    }
    FSDP_TRY(fsdp__cuda_before(s, list[0].span));
    if (c->team != NULL) FSDP_TRY(enqueue_nccl(c, s, list, n));
    else FSDP_TRY(enqueue_copies(c, s->native, list, n));
    c->n_enqueued++;
    if (list[0].span != NULL) FSDP_TRY(fsdp__cuda_span_end(s, false));
    for (uint32_t i = 1; i < n; i++) {
        s->begun = begun[i];
        FSDP_TRY(fsdp__cuda_span_end(s, false));
    }
    return fsdp__cuda_sync(s);
}

/* NCCL makes its communicator's device current by itself, and events and copies need none; what stands around them may. */
static bool needs_device(const fsdp__cuda_stream *s, const fsdp_collective *list, uint32_t n)
{
    bool needs = s->needs_device || s->begun != NULL;
    for (uint32_t i = 0; i < n; i++) needs |= list[i].span != NULL;
    return needs;
}

static fsdp_status enqueue(void *comm, void *stream, const fsdp_collective *list, uint32_t n)
{
    fsdp__nccl_comm *c = comm;
    assert(n > 0 && n <= MAX_PARTS);
    FSDP_TRY(fsdp__nccl_check(c));
    if (fsdp__cuda_check(c->dev) != FSDP_OK) return refused(c, list, n);
    if (!needs_device(stream, list, n)) return enqueue_spans(c, stream, list, n);
    int before = fsdp__cuda_enter(c->dev);
    fsdp_status status = enqueue_spans(c, stream, list, n);
    fsdp__cuda_leave(before);
    return status;
}

/* ---- Closing ---- */

static uint64_t closing_ns(const fsdp__nccl_comm *c)
{
    return c->timeout_ns < MOST_CLOSING_NS ? c->timeout_ns : MOST_CLOSING_NS;
}

/* Finalise and destroy, with every rank. False: somebody does not come, or it must be aborted. */
static bool close_well(fsdp__nccl_comm *c)
{
    fsdp__nccl_team *team = c->team;
    if (fsdp__nccl_check(c) != FSDP_OK || team->side_ops->check(team->side) != FSDP_OK) return false;
    fsdp__nccl_job *job =
        fsdp__nccl_job_create(c->dev->ordinal, c->wire, fsdp__nccl_run_close, "ncclCommFinalize and ncclCommDestroy");
    if (job == NULL) return false;
    if (!fsdp__nccl_enter(c->wire)) { /* a split that nobody waits for any more: the abort lets it out */
        fsdp__nccl_job_release(job);
        return false;
    }
    job->comm = atomic_exchange(&c->wire->comm, NULL);
    pthread_mutex_unlock(&c->wire->entry);
    if (job->comm == NULL) { /* it is being aborted */
        fsdp__nccl_job_release(job);
        return false;
    }
    bool closed = fsdp__nccl_job_start(job) &&
                  fsdp__nccl_job_wait(job, "closing", closing_ns(c), team->side_ops, team->side) == FSDP_OK;
    int free_for_all = 0;
    if (!closed && atomic_compare_exchange_strong(&job->claim, &free_for_all, 2)) c->abort_job->comm = job->comm;
    else c->stuck = !closed;
    fsdp__nccl_job_release(job);
    return closed;
}

/* Its streams are idle, or aborted. The caller's own communicator is left as it is, unless the context has failed. */
static void close_wire(fsdp__nccl_comm *c)
{
    if (!c->owned && !atomic_load(&c->aborting)) {
        atomic_store(&c->wire->comm, NULL);
        return;
    }
    if (!atomic_load(&c->aborting) && close_well(c)) return;
    if (c->stuck) return; /* in ncclCommDestroy */
    fsdp__nccl_stop(c, FSDP_ERR_RANK_LOST, "a communicator could not be closed together with its peers");
    c->stuck = atomic_load(&c->dev->stuck) ||
               fsdp__nccl_job_wait(c->abort_job, "closing", closing_ns(c), NULL, NULL) != FSDP_OK;
}

static void comm_close(void *comm)
{
    fsdp__nccl_comm *c = comm;
    fsdp__nccl_team *team = c->team;
    if (team != NULL) {
        pthread_mutex_lock(&team->lock);
        team->comm[c->index] = NULL;
        pthread_mutex_unlock(&team->lock);
        fsdp__nccl_tell_device(team); /* the watch may not have come to it, and peers wait for what never comes */
        close_wire(c);
    }
    fsdp__nccl_comm_free(c);
    if (team == NULL || team->comm[0] != NULL || team->comm[1] != NULL) return;
    fsdp__nccl_watch_stop(team);
    team->dev->nccl = NULL;
    fsdp__nccl_team_free(team);
}

const fsdp_comm_ops fsdp__nccl_comm_ops = {
    .size = sizeof fsdp__nccl_comm_ops,
    .name = "nccl",
    .open = fsdp__nccl_open,
    .close = comm_close,
    .enqueue = enqueue,
    .check = fsdp__nccl_check,
    .abort = comm_abort,
    .attach = fsdp__nccl_attach,
    .detach = fsdp__nccl_detach,
};
