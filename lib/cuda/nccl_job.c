/* SPDX-License-Identifier: MIT */
/* Threads for calls of NCCL that may never return, and what they do. */
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "hostmem.h"
#include "nccl_parts.h"
#include "thread.h"

enum { LOOK_NS = 20000000, INSIDE_NS = 1000000000, NAP_NS = 1000000, FIRST_IN_GROUPS = 22200 /* NCCL 2.22 */ };

/* ---- Words ---- */

void fsdp__nccl_words(ncclResult_t result, ncclComm_t comm, char *text, size_t bytes)
{
    const char *last = ncclGetLastError(comm);
    if (last == NULL) last = "";
    snprintf(text, bytes, "%s%s%s", ncclGetErrorString(result), last[0] != '\0' ? ": " : "", last);
    for (char *at = text; *at != '\0'; at++)
        if (*at == '\n') *at = ' ';
    for (size_t n = strlen(text); n > 0 && text[n - 1] == ' '; n--) text[n - 1] = '\0';
}

fsdp_status fsdp__nccl_status(ncclResult_t result)
{
    if (result == ncclSuccess || result == ncclInProgress) return FSDP_OK;
    return result == ncclSystemError || result == ncclRemoteError ? FSDP_ERR_RANK_LOST : FSDP_ERR_DEVICE;
}

/* ---- The wire ---- */

static fsdp_host_allocator libc_memory(void)
{
    fsdp_host_allocator none = {NULL, NULL, NULL, NULL}, libc = none;
    FSDP_IGNORE(fsdp__host_allocator_resolve(&none, &libc));
    return libc;
}

fsdp__nccl_wire *fsdp__nccl_wire_create(void)
{
    fsdp_host_allocator memory = libc_memory();
    fsdp__nccl_wire *wire = fsdp__host_alloc(&memory, 1, sizeof *wire);
    if (wire == NULL) return NULL;
    wire->memory = memory;
    atomic_init(&wire->refs, 1);
    atomic_init(&wire->comm, NULL);
    pthread_mutex_init(&wire->entry, NULL);
    return wire;
}

fsdp__nccl_wire *fsdp__nccl_wire_hold(fsdp__nccl_wire *wire)
{
    if (wire != NULL) atomic_fetch_add(&wire->refs, 1);
    return wire;
}

void fsdp__nccl_wire_release(fsdp__nccl_wire *wire)
{
    if (wire == NULL || atomic_fetch_sub(&wire->refs, 1) > 1) return;
    pthread_mutex_destroy(&wire->entry);
    fsdp_host_allocator memory = wire->memory;
    fsdp__host_free(&memory, wire, 1, sizeof *wire);
}

/* ---- The job ---- */

fsdp__nccl_job *fsdp__nccl_job_create(int ordinal, fsdp__nccl_wire *wire, void (*run)(fsdp__nccl_job *job),
                                      const char *call)
{
    fsdp_host_allocator memory = libc_memory();
    fsdp__nccl_job *job = fsdp__host_alloc(&memory, 1, sizeof *job);
    if (job == NULL) return NULL;
    job->memory = memory;
    job->ordinal = ordinal;
    job->wire = fsdp__nccl_wire_hold(wire);
    job->run = run;
    job->call = call;
    atomic_init(&job->refs, 1);
    pthread_mutex_init(&job->lock, NULL);
    fsdp__cond_init(&job->changed);
    return job;
}

void fsdp__nccl_job_release(fsdp__nccl_job *job)
{
    if (job == NULL || atomic_fetch_sub(&job->refs, 1) > 1) return;
    fsdp__nccl_wire_release(job->wire);
    fsdp__nccl_wire_release(job->parent);
    pthread_cond_destroy(&job->changed);
    pthread_mutex_destroy(&job->lock);
    fsdp_host_allocator memory = job->memory;
    fsdp__host_free(&memory, job, 1, sizeof *job);
}

/* Nothing here is part of what another thread may be capturing. */
static void *job_main(void *arg)
{
    fsdp__nccl_job *job = arg;
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaError_t error = cudaSetDevice(job->ordinal);
    if (error == cudaSuccess) error = cudaThreadExchangeStreamCaptureMode(&mode);
    if (error == cudaSuccess) {
        job->run(job);
    } else {
        job->result = ncclUnhandledCudaError;
        snprintf(job->words, sizeof job->words, "cudaSetDevice(%d): %s", job->ordinal, cudaGetErrorString(error));
    }
    pthread_mutex_lock(&job->lock);
    job->done = true;
    bool alone = atomic_load(&job->abandoned);
    pthread_cond_broadcast(&job->changed);
    pthread_mutex_unlock(&job->lock);
    if (alone && job->undo != NULL) job->undo(job);
    fsdp__nccl_job_release(job);
    return NULL;
}

bool fsdp__nccl_job_start(fsdp__nccl_job *job)
{
    pthread_t thread;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    atomic_fetch_add(&job->refs, 1);
    job->started = fsdp__thread_start(&thread, &attributes, job_main, job) == 0;
    pthread_attr_destroy(&attributes);
    if (!job->started) fsdp__nccl_job_release(job);
    return job->started;
}

fsdp_status fsdp__nccl_job_wait(fsdp__nccl_job *job, const char *what, uint64_t timeout_ns,
                                const fsdp_side_ops *side_ops, void *side)
{
    uint64_t end = fsdp__after_ns(timeout_ns);
    fsdp_status status = FSDP_OK;
    pthread_mutex_lock(&job->lock);
    while (!job->done && status == FSDP_OK) {
        uint64_t now = fsdp__now_ns(), until = now + LOOK_NS < end ? now + LOOK_NS : end;
        if (now >= end) {
            status = FSDP_ERR_RANK_LOST;
            break;
        }
        (void)fsdp__cond_until(&job->changed, &job->lock, until);
        if (job->done || side_ops == NULL) continue;
        pthread_mutex_unlock(&job->lock);
        status = side_ops->check(side);
        pthread_mutex_lock(&job->lock);
    }
    bool done = job->done, late = status == FSDP_ERR_RANK_LOST && fsdp__now_ns() >= end;
    if (!done) atomic_store(&job->abandoned, true);
    pthread_mutex_unlock(&job->lock);
    if (done) return FSDP_OK;
    if (side_ops != NULL && side_ops->check(side) != FSDP_OK) return side_ops->check(side);
    if (!late) return status;
    return fsdp__fail(FSDP_ERR_RANK_LOST, "%s: %s has not returned within %.3f s: a peer does not answer", what,
                      job->call, (double)timeout_ns / 1e9);
}

/* ---- What jobs do ---- */

static void keep_result(fsdp__nccl_job *job, ncclResult_t result, ncclComm_t comm)
{
    job->result = result;
    if (result != ncclSuccess) fsdp__nccl_words(result, comm, job->words, sizeof job->words);
}

/* One that does not block is not taken. */
static void keep_comm(fsdp__nccl_job *job, ncclResult_t result, ncclComm_t comm)
{
    if (result == ncclSuccess) atomic_store(&job->wire->comm, comm);
    else if (comm != NULL) (void)ncclCommAbort(comm);
}

void fsdp__nccl_run_init(fsdp__nccl_job *job)
{
    ncclConfig_t own = NCCL_CONFIG_INITIALIZER, *config = job->has_config ? &job->config.config : &own;
    ncclComm_t comm = NULL;
    config->blocking = 1;
    ncclResult_t result = ncclCommInitRankConfig(&comm, job->world, job->id, job->rank, config);
    keep_result(job, result, NULL);
    keep_comm(job, result, comm);
}

/* The config of a split that is not given is its parent's. */
void fsdp__nccl_run_split(fsdp__nccl_job *job)
{
    ncclComm_t comm = NULL;
    if (job->has_config) job->config.config.blocking = 1;
    pthread_mutex_lock(&job->parent->entry);
    ncclComm_t parent = atomic_load(&job->parent->comm);
    ncclResult_t result = ncclInvalidUsage;
    if (parent != NULL)
        result = ncclCommSplit(parent, 0, job->rank, &comm, job->has_config ? &job->config.config : NULL);
    keep_result(job, result, parent);
    pthread_mutex_unlock(&job->parent->entry);
    keep_comm(job, result, comm);
}

/* Whoever opened has left. */
void fsdp__nccl_undo_open(fsdp__nccl_job *job)
{
    ncclComm_t comm = atomic_exchange(&job->wire->comm, NULL);
    if (comm != NULL) (void)ncclCommAbort(comm);
}

/* Who has claimed the communicator ends it: this thread, or whoever waited for it and has left. */
void fsdp__nccl_run_close(fsdp__nccl_job *job)
{
    ncclResult_t result = ncclCommFinalize(job->comm);
    int free_for_all = 0;
    if (!atomic_compare_exchange_strong(&job->claim, &free_for_all, 1)) return;
    if (result == ncclSuccess) result = ncclCommDestroy(job->comm);
    else (void)ncclCommAbort(job->comm);
    keep_result(job, result, NULL);
}

bool fsdp__nccl_enter(fsdp__nccl_wire *wire)
{
    const struct timespec nap = {0, NAP_NS};
    uint64_t end = fsdp__after_ns(INSIDE_NS);
    while (pthread_mutex_trylock(&wire->entry) != 0) {
        if (fsdp__now_ns() >= end) return false;
        nanosleep(&nap, NULL);
    }
    return true;
}

/* Who is inside NCCL may wait there for a peer that will never come (its first collective makes the connections), and only an
 * abort lets him out; but an abort frees what he works with. In a group it stops everything at once, and frees at the group's
 * end: when he has left. An NCCL that knows no such groups frees at once: there he has a second. */
static ncclResult_t abort_wire(fsdp__nccl_wire *wire, ncclComm_t comm)
{
    int version = 0;
    ncclResult_t result = ncclGetVersion(&version);
    if (result != ncclSuccess || version < FIRST_IN_GROUPS) {
        if (fsdp__nccl_enter(wire)) pthread_mutex_unlock(&wire->entry);
        return ncclCommAbort(comm);
    }
    result = ncclGroupStart();
    if (result != ncclSuccess) return result;
    result = ncclCommAbort(comm);
    pthread_mutex_lock(&wire->entry);
    pthread_mutex_unlock(&wire->entry);
    ncclResult_t ended = ncclGroupEnd();
    return result != ncclSuccess ? result : ended;
}

/* Who comes from now on finds none. */
void fsdp__nccl_run_abort(fsdp__nccl_job *job)
{
    ncclComm_t comm = job->comm != NULL ? job->comm : atomic_exchange(&job->wire->comm, NULL);
    if (comm != NULL) keep_result(job, abort_wire(job->wire, comm), NULL);
}
