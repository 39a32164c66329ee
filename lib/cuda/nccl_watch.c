/* SPDX-License-Identifier: MIT */
/* The watch. NCCL does not notice a peer that stands still, and the host may sleep: so a thread looks how long the GPU has been
 * in each collective. It asks events, never streams, and nothing that could wait. */
#include <signal.h>
#include <stdio.h>
#include <time.h>

#include "hostmem.h"
#include "nccl_parts.h"

enum {
    BUSY_NS = 20000000,  /* between looks while something is in flight */
    IDLE_NS = 100000000, /* and else */
    GRACE_NS = 300000000 /* who knows better than NCCL may speak first */
};
#define STUCK_NS 15000000000ull /* for NCCL's kernels to leave the GPU after an abort */

/* ---- The ring: the host's side ---- */

static cudaError_t make_entry(fsdp__nccl_entry *entry)
{
    cudaError_t error = cudaEventCreateWithFlags(&entry->begin, cudaEventDisableTiming);
    if (error == cudaSuccess) error = cudaEventCreateWithFlags(&entry->end, cudaEventDisableTiming);
    return error;
}

static void drop_entry(const fsdp__nccl_entry *entry)
{
    if (entry->begin != NULL && cudaEventDestroy(entry->begin) != cudaSuccess) (void)cudaGetLastError();
    if (entry->end != NULL && cudaEventDestroy(entry->end) != cudaSuccess) (void)cudaGetLastError();
}

fsdp_status fsdp__nccl_ring_open(fsdp__nccl_comm *c)
{
    fsdp__nccl_ring *ring = fsdp__host_alloc(c->host, 1, sizeof *ring);
    if (ring == NULL)
        return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "communicator %u: no host memory for %zu bytes", c->index,
                          sizeof *ring);
    c->ring = ring;
    pthread_mutex_init(&ring->lock, NULL);
    int before = fsdp__cuda_enter(c->dev);
    cudaError_t error = make_entry(&ring->last);
    for (uint32_t i = 0; i < FSDP__NCCL_RING && error == cudaSuccess; i++) error = make_entry(&ring->entry[i]);
    fsdp__cuda_leave(before);
    return fsdp__cuda_fail(c->dev, error, "cudaEventCreateWithFlags for communicator %u", c->index);
}

void fsdp__nccl_ring_close(fsdp__nccl_comm *c)
{
    fsdp__nccl_ring *ring = c->ring;
    if (ring == NULL) return;
    drop_entry(&ring->last);
    for (uint32_t i = 0; i < FSDP__NCCL_RING; i++) drop_entry(&ring->entry[i]);
    pthread_mutex_destroy(&ring->lock);
    fsdp__host_free(c->host, ring, 1, sizeof *ring);
}

/* An event that cannot be recorded is the next call's error to find; this group is not watched. */
static bool record(cudaEvent_t event, cudaStream_t stream)
{
    if (cudaEventRecord(event, stream) == cudaSuccess) return true;
    (void)cudaGetLastError();
    return false;
}

bool fsdp__nccl_ring_begin(fsdp__nccl_comm *c, cudaStream_t stream)
{
    fsdp__nccl_ring *ring = c->ring;
    if (fsdp__cuda_is_capturing(stream)) return false; /* an event would be a part of what is captured */
    uint64_t n = atomic_load_explicit(&ring->n, memory_order_relaxed),
             n_done = atomic_load_explicit(&ring->n_done, memory_order_acquire);
    if (n - n_done == FSDP__NCCL_RING) atomic_store_explicit(&ring->is_full, true, memory_order_relaxed);
    if (atomic_load_explicit(&ring->is_full, memory_order_relaxed)) return true;
    return record(ring->entry[n % FSDP__NCCL_RING].begin, stream);
}

static void end_last(fsdp__nccl_ring *ring, cudaStream_t stream, const fsdp__call *call)
{
    pthread_mutex_lock(&ring->lock);
    if (record(ring->last.end, stream)) {
        ring->last.call = *call;
        ring->last_ns = fsdp__cuda_now_ns();
    }
    pthread_mutex_unlock(&ring->lock);
}

void fsdp__nccl_ring_end(fsdp__nccl_comm *c, cudaStream_t stream, const fsdp_collective *list, uint32_t n_parts)
{
    fsdp__nccl_ring *ring = c->ring;
    uint64_t n = atomic_load_explicit(&ring->n, memory_order_relaxed);
    fsdp__nccl_entry *entry = &ring->entry[n % FSDP__NCCL_RING];
    if (atomic_load_explicit(&ring->is_full, memory_order_relaxed)) {
        fsdp__call call;
        fsdp__call_fill(&call, &list[0], c->n_enqueued + 1, 0, n_parts);
        end_last(ring, stream, &call);
        return;
    }
    fsdp__call_fill(&entry->call, &list[0], c->n_enqueued + 1, 0, n_parts);
    if (record(entry->end, stream)) atomic_store_explicit(&ring->n, n + 1, memory_order_release);
}

/* ---- The ring: the watch's side ---- */

typedef struct verdict {
    fsdp_status status;
    bool busy;
    char sentence[FSDP__SENTENCE_BYTES];
} verdict;

/* Has it happened? An error is the device's: it is kept there, and what it means for the peers is found below. */
static bool is_done(fsdp__nccl_comm *c, cudaEvent_t event)
{
    cudaError_t error = cudaEventQuery(event);
    if (error == cudaSuccess) return true;
    (void)cudaGetLastError();
    if (error != cudaErrorNotReady) FSDP_IGNORE(fsdp__cuda_fail(c->dev, error, "cudaEventQuery of a collective's end"));
    return false;
}

static void judge(const fsdp__nccl_comm *c, const fsdp__call *call, uint64_t waited_ns, verdict *v)
{
    char what[256];
    if (waited_ns < c->timeout_ns) return;
    fsdp__call_describe(call, what, sizeof what);
    v->status = FSDP_ERR_RANK_LOST;
    snprintf(v->sentence, sizeof v->sentence, "rank %u has waited %.3f s in %s%s", c->rank, (double)waited_ns / 1e9,
             what, c->index > 0 ? " on communicator 1" : "");
}

/* Groups beyond the ring. True: none is left. */
static bool look_at_last(fsdp__nccl_comm *c, uint64_t now_ns, verdict *v)
{
    fsdp__nccl_ring *ring = c->ring;
    pthread_mutex_lock(&ring->lock);
    bool known = ring->last_ns != 0, done = known && is_done(c, ring->last.end);
    if (done) ring->last_ns = 0;
    uint64_t since_ns = ring->since_ns > ring->last_ns ? ring->since_ns : ring->last_ns;
    if (known && !done && now_ns > since_ns) judge(c, &ring->last.call, now_ns - since_ns, v);
    pthread_mutex_unlock(&ring->lock);
    return done;
}

/* How long the GPU has been in the oldest that is not over: from when its stream came to it, not while it still computes what
 * comes before. */
static void look_at_ring(fsdp__nccl_comm *c, uint64_t now_ns, verdict *v)
{
    fsdp__nccl_ring *ring = c->ring;
    uint64_t n = atomic_load_explicit(&ring->n, memory_order_acquire), i = atomic_load(&ring->n_done);
    for (; i < n; i++) {
        const fsdp__nccl_entry *entry = &ring->entry[i % FSDP__NCCL_RING];
        if (is_done(c, entry->end)) {
            ring->since_ns = 0;
            continue;
        }
        if (ring->since_ns == 0 && is_done(c, entry->begin)) ring->since_ns = now_ns;
        if (ring->since_ns != 0) judge(c, &entry->call, now_ns - ring->since_ns, v);
        break;
    }
    atomic_store_explicit(&ring->n_done, i, memory_order_release);
    v->busy |= i < n;
    if (i < n || !atomic_load(&ring->is_full)) return;
    if (ring->since_ns == 0) ring->since_ns = now_ns;
    v->busy = true;
    if (!look_at_last(c, now_ns, v)) return;
    ring->since_ns = 0;
    atomic_store(&ring->is_full, false);
}

/* What NCCL itself has found: mostly that a connection to a peer broke. The side channel finds that, too, and names him. With
 * nothing in flight it is no matter: a peer may have closed. */
static void ask_nccl(fsdp__nccl_comm *c, uint64_t now_ns, verdict *v)
{
    ncclResult_t found = ncclSuccess;
    if (pthread_mutex_trylock(&c->wire->entry) != 0) return; /* the host is in NCCL: it hears by itself */
    ncclComm_t comm = atomic_load(&c->wire->comm);
    if (comm != NULL && ncclCommGetAsyncError(comm, &found) != ncclSuccess) found = ncclSuccess;
    char words[FSDP__NCCL_WORDS] = "";
    if (found != ncclSuccess && found != ncclInProgress) fsdp__nccl_words(found, comm, words, sizeof words);
    pthread_mutex_unlock(&c->wire->entry);
    if (words[0] == '\0') return;
    v->busy = true;
    if (c->ring->error_ns == 0) c->ring->error_ns = now_ns;
    if (now_ns - c->ring->error_ns < GRACE_NS) return;
    v->status = FSDP_ERR_RANK_LOST;
    snprintf(v->sentence, sizeof v->sentence, "rank %u: NCCL on communicator %u: %s", c->rank, c->index, words);
}

/* ---- Making it known ---- */

void fsdp__nccl_tell(fsdp__nccl_team *team, fsdp_status status, const char *sentence)
{
    pthread_mutex_lock(&team->lock);
    bool first = !team->told;
    team->told = true;
    pthread_mutex_unlock(&team->lock);
    if (first) (team->side_ops->fail)(team->side, status, sentence);
}

/* This rank's GPU is broken, and its host has not come by to say so. */
static void look_at_device(fsdp__nccl_team *team, uint64_t now_ns, verdict *v)
{
    if (v->status != FSDP_OK || atomic_load(&team->dev->status) == FSDP_OK) return;
    if (!atomic_load(&team->dev->broken)) { /* it was aborted, and so are they */
        v->status = FSDP_ERR_ABORTED;
        snprintf(v->sentence, sizeof v->sentence, "rank %u aborted its device", team->rank);
        return;
    }
    if (team->broken_ns == 0) team->broken_ns = now_ns;
    v->busy = true;
    if (now_ns - team->broken_ns < GRACE_NS) return;
    FSDP_IGNORE(fsdp__cuda_check(team->dev));
    v->status = FSDP_ERR_RANK_LOST;
    snprintf(v->sentence, sizeof v->sentence, "rank %u is lost: %.900s", team->rank, fsdp_last_error());
}

/* Kernels that do not leave would be waited for, for ever: from here on nobody waits for this GPU, and nothing is given
 * back. */
static void look_at_abort(fsdp__nccl_comm *c, uint64_t now_ns)
{
    fsdp__nccl_job *job = c->abort_job;
    fsdp__cuda_device *dev = c->dev;
    static const char *const sentence = "ncclCommAbort has not returned within 15 s: the GPU is left as it is";
    if (!atomic_load(&c->aborting)) return;
    if (c->aborting_ns == 0) c->aborting_ns = now_ns;
    pthread_mutex_lock(&job->lock);
    bool over = job->done;
    pthread_mutex_unlock(&job->lock);
    if (over || now_ns - c->aborting_ns < STUCK_NS || atomic_exchange(&dev->stuck, true)) return;
    atomic_store(&dev->broken, true);
    fsdp__cuda_keep(dev, FSDP_ERR_ABORTED, sentence);
    if (dev->log != NULL) dev->log(dev->log_arg, sentence);
}

/* With the team's lock held. */
static void look(fsdp__nccl_team *team, uint64_t now_ns, verdict *v)
{
    for (int i = 0; i < 2; i++) {
        fsdp__nccl_comm *c = team->comm[i];
        if (c == NULL) continue;
        look_at_abort(c, now_ns);
        if (atomic_load(&c->status) != FSDP_OK || atomic_load(&team->dev->broken)) continue;
        if (v->status == FSDP_OK) look_at_ring(c, now_ns, v);
        if (v->status == FSDP_OK && v->busy) ask_nccl(c, now_ns, v);
    }
    look_at_device(team, now_ns, v);
}

/* The side channel's sentence is every rank's. Where nobody calls back when it fails (ranks that are threads), the
 * communicators are stopped here. */
static void stop_all(fsdp__nccl_team *team)
{
    char sentence[FSDP__SENTENCE_BYTES];
    fsdp_status status = team->side_ops->check(team->side);
    if (status == FSDP_OK) return;
    snprintf(sentence, sizeof sentence, "%s", fsdp_last_error());
    pthread_mutex_lock(&team->lock);
    for (int i = 0; i < 2; i++)
        if (team->comm[i] != NULL && !atomic_load(&team->comm[i]->aborting))
            fsdp__nccl_stop(team->comm[i], status, sentence);
    pthread_mutex_unlock(&team->lock);
}

static void sleep_for(fsdp__nccl_team *team, uint64_t ns)
{
    uint64_t then = fsdp__cuda_after_ns(ns);
    struct timespec until = {(time_t)(then / 1000000000u), (long)(then % 1000000000u)};
    pthread_cond_timedwait(&team->wake, &team->lock, &until);
}

static void *watch_main(void *arg)
{
    fsdp__nccl_team *team = arg;
    if (cudaSetDevice(team->dev->ordinal) != cudaSuccess) (void)cudaGetLastError(); /* queries fail, and say so */
    (void)fsdp__cuda_relax();
    pthread_mutex_lock(&team->lock);
    while (!team->stopping) {
        verdict v = {.status = FSDP_OK};
        look(team, fsdp__cuda_now_ns(), &v);
        pthread_mutex_unlock(&team->lock);
        if (v.status != FSDP_OK) fsdp__nccl_tell(team, v.status, v.sentence);
        stop_all(team);
        pthread_mutex_lock(&team->lock);
        if (!team->stopping) sleep_for(team, v.busy ? BUSY_NS : IDLE_NS);
    }
    pthread_mutex_unlock(&team->lock);
    return NULL;
}

/* Signals are the program's: none is delivered on this thread. */
fsdp_status fsdp__nccl_watch_start(fsdp__nccl_team *team)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&team->thread, NULL, watch_main, team);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error != 0) return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "NCCL: no thread for the watch");
    pthread_setname_np(team->thread, "fsdp-nccl");
    return FSDP_OK;
}

void fsdp__nccl_watch_stop(fsdp__nccl_team *team)
{
    pthread_mutex_lock(&team->lock);
    team->stopping = true;
    pthread_cond_signal(&team->wake);
    pthread_mutex_unlock(&team->lock);
    pthread_join(team->thread, NULL);
}
