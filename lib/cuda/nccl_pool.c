/* SPDX-License-Identifier: MIT */
/* Pools as windows: memory that NCCL has given and knows on every rank, so that its kernels may read peers' directly. What
 * came with NCCL 2.27 is looked for in the NCCL that runs, so that the library's build may be older or newer. */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "hostmem.h"
#include "nccl_parts.h"

enum { SYMMETRIC = 1 /* NCCL_WIN_COLL_SYMMETRIC */ };

typedef ncclResult_t (*register_fn)(ncclComm_t comm, void *base, size_t bytes, void **out_window, int flags);
typedef ncclResult_t (*deregister_fn)(ncclComm_t comm, void *window);

typedef struct pool {
    void *window;
    uint64_t bytes;
} pool;

static register_fn find_register(void)
{
    register_fn call = NULL;
    void *symbol = dlsym(RTLD_DEFAULT, "ncclCommWindowRegister");
    if (symbol != NULL) memcpy(&call, &symbol, sizeof call);
    return call;
}

static deregister_fn find_deregister(void)
{
    deregister_fn call = NULL;
    void *symbol = dlsym(RTLD_DEFAULT, "ncclCommWindowDeregister");
    if (symbol != NULL) memcpy(&call, &symbol, sizeof call);
    return call;
}

static void warn(fsdp__nccl_team *team, const char *why)
{
    char text[FSDP__SENTENCE_BYTES];
    pthread_mutex_lock(&team->lock);
    snprintf(team->path, sizeof team->path, "no windows: %.100s", why);
    pthread_mutex_unlock(&team->lock);
    if (team->dev->log == NULL) return;
    snprintf(text, sizeof text,
             "rank %u: fsdp_nccl_config.windows: %s: pools are not registered, and collectives go on "
             "without",
             team->rank, why);
    team->dev->log(team->dev->log_arg, text);
}

bool fsdp__nccl_has_windows(fsdp__nccl_team *team)
{
    char why[80];
    if (find_register() != NULL && find_deregister() != NULL) return true;
    snprintf(why, sizeof why, "NCCL %d has none (2.27 and later have)", team->version);
    warn(team, why);
    return false;
}

/* ---- Memory ---- */

/* NCCL says little of why it has none; the sizes in the caller's sentence say more. */
cudaError_t fsdp__nccl_mem_alloc(fsdp__cuda_device *dev, uint64_t bytes, void **out_ptr)
{
    if (dev->nccl == NULL || dev->nccl->windows == 0) return cudaMalloc(out_ptr, bytes);
    ncclResult_t result = ncclMemAlloc(out_ptr, bytes);
    if (result == ncclSuccess) return cudaSuccess;
    cudaError_t error = cudaGetLastError();
    return error == cudaSuccess || result == ncclInvalidArgument ? cudaErrorMemoryAllocation : error;
}

cudaError_t fsdp__nccl_mem_free(fsdp__cuda_device *dev, void *ptr)
{
    if (dev->nccl == NULL || dev->nccl->windows == 0) return cudaFree(ptr);
    if (ncclMemFree(ptr) == ncclSuccess) return cudaSuccess;
    cudaError_t error = cudaGetLastError();
    return error != cudaSuccess ? error : cudaErrorUnknown;
}

/* ---- Registering ---- */

static void run_register(fsdp__nccl_job *job)
{
    ncclResult_t result = ncclInvalidUsage;
    pthread_mutex_lock(&job->wire->entry);
    ncclComm_t comm = atomic_load(&job->wire->comm);
    if (comm != NULL) result = find_register()(comm, job->base, job->bytes, &job->window, SYMMETRIC);
    job->result = result;
    if (result != ncclSuccess) fsdp__nccl_words(result, comm, job->words, sizeof job->words);
    pthread_mutex_unlock(&job->wire->entry);
}

static void run_deregister(fsdp__nccl_job *job)
{
    ncclResult_t result = ncclSuccess;
    pthread_mutex_lock(&job->wire->entry);
    ncclComm_t comm = atomic_load(&job->wire->comm);
    if (comm != NULL) result = find_deregister()(comm, job->window);
    job->result = result;
    if (result != ncclSuccess) fsdp__nccl_words(result, comm, job->words, sizeof job->words);
    pthread_mutex_unlock(&job->wire->entry);
}

static fsdp_status run_job(fsdp__nccl_comm *c, fsdp__nccl_job *job)
{
    const fsdp__nccl_team *team = c->team;
    if (!fsdp__nccl_job_start(job)) return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "%s: no thread", job->call);
    return fsdp__nccl_job_wait(job, "a pool as a window", c->timeout_ns, team->side_ops, team->side);
}

/* Away with it on this rank. Whoever has failed leaves it to the abort. */
static void deregister(fsdp__nccl_comm *c, void *window)
{
    fsdp__nccl_job *job = fsdp__nccl_job_create(c->dev->ordinal, c->wire, run_deregister, "ncclCommWindowDeregister");
    if (job == NULL) return;
    job->window = window;
    FSDP_IGNORE(run_job(c, job));
    fsdp__nccl_job_release(job);
}

/* What NCCL refuses is no failure. */
static fsdp_status register_pool(fsdp__nccl_comm *c, fsdp__nccl_job *job, const pool *p)
{
    if (job == NULL || p == NULL) return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "a pool as a window: no host memory");
    FSDP_TRY(run_job(c, job));
    if (job->result != ncclSuccess) warn(c->team, job->words);
    else if (job->window == NULL) warn(c->team, "NCCL has no way to reach the memory of all peers");
    return FSDP_OK;
}

/* All ranks or none: a vote says whether each has its window. */
static fsdp_status agree(fsdp__nccl_comm *c, bool has, bool *out_all)
{
    fsdp__nccl_team *team = c->team;
    const uint32_t *all = team->ballots;
    uint32_t mine = has;
    FSDP_TRY(team->side_ops->all_gather(team->side, &mine, team->ballots, sizeof mine, c->timeout_ns));
    *out_all = true;
    for (uint32_t r = 0; r < team->world; r++) *out_all = *out_all && all[r] != 0;
    return FSDP_OK;
}

static void note(fsdp__nccl_comm *c, pool *p)
{
    fsdp__nccl_team *team = c->team;
    atomic_fetch_add(&team->n_windows, 1);
    atomic_fetch_add(&team->window_bytes, p->bytes);
    pthread_mutex_lock(&team->lock);
    snprintf(team->path, sizeof team->path, "windows: symmetric kernels where NCCL's tuning prefers them");
    pthread_mutex_unlock(&team->lock);
}

fsdp_status fsdp__nccl_attach(void *comm, fsdp_operation kind, void *base, uint64_t bytes, void **out_handle)
{
    fsdp__nccl_comm *c = comm;
    *out_handle = NULL;
    const uint32_t wanted = kind == FSDP_OPERATION_ALL_GATHER ? FSDP_NCCL_WINDOW_GATHER : FSDP_NCCL_WINDOW_GRAD;
    if (c->team == NULL || (c->team->windows & wanted) == 0 || bytes == 0) return FSDP_OK;
    fsdp__nccl_job *job = fsdp__nccl_job_create(c->dev->ordinal, c->wire, run_register, "ncclCommWindowRegister");
    pool *p = fsdp__host_alloc(c->host, 1, sizeof *p);
    if (job != NULL) job->base = base, job->bytes = bytes;
    bool all = false, ready = job != NULL && p != NULL;
    fsdp_status status = fsdp__nccl_vote(c, "a pool as a window", ready ? FSDP_OK : register_pool(c, job, p), 0);
    if (status == FSDP_OK) status = fsdp__nccl_vote(c, "a pool as a window", register_pool(c, job, p), 0);
    void *window = status == FSDP_OK && job->result == ncclSuccess ? job->window : NULL;
    if (status == FSDP_OK) status = agree(c, window != NULL, &all);
    if (status == FSDP_OK && all) {
        *p = (pool){window, bytes};
        note(c, p);
        *out_handle = p;
        p = NULL;
    } else if (window != NULL) {
        if (status == FSDP_OK) warn(c->team, "another rank's NCCL refused");
        deregister(c, window);
    }
    fsdp__host_free(c->host, p, 1, sizeof *p);
    fsdp__nccl_job_release(job);
    return status;
}

void fsdp__nccl_detach(void *comm, void *handle)
{
    fsdp__nccl_comm *c = comm;
    pool *p = handle;
    if (p == NULL) return;
    deregister(c, p->window);
    atomic_fetch_sub(&c->team->n_windows, 1);
    atomic_fetch_sub(&c->team->window_bytes, p->bytes);
    fsdp__host_free(c->host, p, 1, sizeof *p);
}
