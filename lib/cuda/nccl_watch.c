/* SPDX-License-Identifier: MIT */
/* The watch. NCCL does not notice a peer that stands still, and the host may sleep, or be held inside NCCL: so a thread looks
 * how long the GPU, or the host, has been in each collective. It asks events, never streams, and nothing that could wait.
 *
 * On a lane of the library's this mostly costs the host no call of CUDA: when a collective begins follows from the events that
 * the lane has waited for (fsdp__cuda_front), and the event at its end is also the fence that the library records there
 * (fsdp__cuda_front_share). On other streams it has two events of its own. */
#include <stdio.h>

#include "hostmem.h"
#include "nccl_parts.h"
#include "thread.h"

enum {
    BUSY_NS = 20000000,  /* between looks while something is in flight */
    IDLE_NS = 100000000, /* and else */
    GRACE_NS = 300000000 /* who knows better than NCCL may speak first */
};
#define STUCK_NS 15000000000ull /* for NCCL's kernels to leave the GPU after an abort */

/* ---- The ring: the host's side ---- */

fsdp_status fsdp__nccl_ring_open(fsdp__nccl_comm *c)
{
    fsdp__nccl_ring *ring = fsdp__host_alloc(c->host, 1, sizeof *ring);
    if (ring == NULL)
        return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "communicator %u: no host memory for %zu bytes", c->index,
                          sizeof *ring);
    c->ring = ring;
    pthread_mutex_init(&ring->lock, NULL);
    int before = fsdp__cuda_enter(c->dev);
    cudaError_t error = cudaEventCreateWithFlags(&ring->last_begin, cudaEventDisableTiming);
    if (error == cudaSuccess) error = cudaEventCreateWithFlags(&ring->last_end, cudaEventDisableTiming);
    fsdp__cuda_leave(before);
    FSDP_TRY(fsdp__cuda_fail(c->dev, error, "cudaEventCreateWithFlags for communicator %u", c->index));
    return fsdp__cuda_moments_reserve(c->dev, 2 * FSDP__NCCL_RING);
}

static void release(fsdp__nccl_comm *c, fsdp__nccl_entry *entry)
{
    fsdp__cuda_front_release(c->dev, &entry->begin);
    fsdp__cuda_moment_release(c->dev, entry->end);
    entry->end = NULL;
}

void fsdp__nccl_ring_close(fsdp__nccl_comm *c)
{
    fsdp__nccl_ring *ring = c->ring;
    if (ring == NULL) return;
    if (ring->last_begin != NULL && cudaEventDestroy(ring->last_begin) != cudaSuccess) (void)cudaGetLastError();
    if (ring->last_end != NULL && cudaEventDestroy(ring->last_end) != cudaSuccess) (void)cudaGetLastError();
    for (uint32_t i = 0; i < FSDP__NCCL_RING; i++) release(c, &ring->entry[i]);
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

/* Give back what the entries that are over held. */
static uint64_t release_done(fsdp__nccl_comm *c)
{
    fsdp__nccl_ring *ring = c->ring;
    uint64_t n_done = atomic_load_explicit(&ring->n_done, memory_order_acquire);
    while (ring->n_released < n_done) release(c, &ring->entry[ring->n_released++ % FSDP__NCCL_RING]);
    return n_done;
}

/* What the stream does next, it begins after this. False: nobody can say when. */
static bool take_front(fsdp__nccl_comm *c, fsdp__cuda_stream *s, fsdp__cuda_front *out_front)
{
    if (!fsdp__cuda_front_is_known(s)) fsdp__cuda_front_drop(s);
    *out_front = s->front;
    s->front.n = 0;
    if (out_front->n > 0) return true;
    if (fsdp__cuda_moment_take(c->dev, 1, &out_front->at[0]) != FSDP_OK) return false;
    out_front->n = 1;
    return record(out_front->at[0]->native, s->native);
}

/* A lane is inside a capture when the library says so; what else the caller does with his streams only CUDA knows. */
static bool is_captured(const fsdp__cuda_stream *s, const fsdp_collective *first)
{
    return first->captured || (!fsdp__cuda_front_is_known(s) && fsdp__cuda_is_capturing(s->native));
}

/* Beyond the ring. False: all are over meanwhile, and there is room in it again. */
static bool begin_last(fsdp__nccl_ring *ring, cudaStream_t stream, const fsdp__call *call)
{
    pthread_mutex_lock(&ring->lock);
    bool is_full = atomic_load(&ring->is_full);
    if (is_full) {
        ring->last_call = *call;
        ring->last_inside = true;
        ring->last_since_ns = 0;
        ring->last_begun = record(ring->last_begin, stream);
    }
    pthread_mutex_unlock(&ring->lock);
    return is_full;
}

fsdp__nccl_place fsdp__nccl_ring_begin(fsdp__nccl_comm *c, fsdp__cuda_stream *s, const fsdp_collective *list,
                                       uint32_t n_parts)
{
    fsdp__nccl_ring *ring = c->ring;
    uint64_t n = atomic_load_explicit(&ring->n, memory_order_relaxed);
    bool is_full =
        atomic_load_explicit(&ring->is_full, memory_order_acquire); /* first: no longer means that all are over */
    if (n - release_done(c) == FSDP__NCCL_RING) {
        is_full = true;
        atomic_store_explicit(&ring->is_full, true, memory_order_relaxed);
    }
    bool captured = is_captured(s, &list[0]); /* an event would be a part of what is captured */
    fsdp__call call;
    fsdp__call_fill(&call, &list[0], fsdp__nccl_number(c, list), 0, n_parts);
    if (is_full) {
        fsdp__cuda_front_drop(s);
        if (captured) return FSDP__NCCL_UNWATCHED;
        if (begin_last(ring, s->native, &call)) return FSDP__NCCL_LAST;
        (void)release_done(c); /* all, or this one's place would be given back once more while it is in flight */
    }
    fsdp__nccl_entry *entry = &ring->entry[n % FSDP__NCCL_RING];
    release(c, entry); /* of one that failed */
    entry->call = call;
    if (captured) fsdp__cuda_front_drop(s);
    else if (!take_front(c, s, &entry->begin)) return FSDP__NCCL_UNWATCHED;
    atomic_store_explicit(&ring->inside, call.number, memory_order_release);
    return captured ? FSDP__NCCL_CAPTURED : FSDP__NCCL_IN_RING;
}

static void end_last(fsdp__nccl_ring *ring, cudaStream_t stream, bool enqueued)
{
    pthread_mutex_lock(&ring->lock);
    if (enqueued && record(ring->last_end, stream)) ring->last_enqueued = true;
    ring->last_inside = false;
    pthread_mutex_unlock(&ring->lock);
}

/* The event at its end is where the stream stands from now on; whoever records one next shares it. */
static bool end_entry(fsdp__nccl_comm *c, fsdp__cuda_stream *s, fsdp__nccl_entry *entry)
{
    bool known = fsdp__cuda_front_is_known(s);
    fsdp__cuda_moment *end = NULL;
    if (fsdp__cuda_moment_take(c->dev, known ? 2 : 1, &end) != FSDP_OK) return false;
    if (!record(end->native, s->native)) {
        fsdp__cuda_moment_release(c->dev, end);
        if (known) fsdp__cuda_moment_release(c->dev, end);
        return false;
    }
    entry->end = end;
    if (known) fsdp__cuda_front_set(s, end);
    return true;
}

/* The place of a group that is not in the ring then is the next one's: not while the watch looks at it. */
static void leave(fsdp__nccl_ring *ring, bool is_in_ring)
{
    if (!is_in_ring) pthread_mutex_lock(&ring->lock);
    atomic_store_explicit(&ring->inside, 0, memory_order_release);
    if (!is_in_ring) pthread_mutex_unlock(&ring->lock);
}

void fsdp__nccl_ring_end(fsdp__nccl_comm *c, fsdp__cuda_stream *s, fsdp__nccl_place place, bool enqueued)
{
    fsdp__nccl_ring *ring = c->ring;
    uint64_t n = atomic_load_explicit(&ring->n, memory_order_relaxed);
    if (place == FSDP__NCCL_LAST) end_last(ring, s->native, enqueued);
    bool is_in_ring = place == FSDP__NCCL_IN_RING && enqueued && end_entry(c, s, &ring->entry[n % FSDP__NCCL_RING]);
    if (is_in_ring) atomic_store_explicit(&ring->n, n + 1, memory_order_release);
    if (place == FSDP__NCCL_IN_RING || place == FSDP__NCCL_CAPTURED) leave(ring, is_in_ring);
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

static bool has_begun(fsdp__nccl_comm *c, const fsdp__nccl_entry *entry)
{
    for (uint32_t i = 0; i < entry->begin.n; i++)
        if (!is_done(c, entry->begin.at[i]->native)) return false;
    return true;
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

/* Groups beyond the ring: only the newest is known, and like any other it counts from when its stream came to it, so that what
 * is still computed before it is nobody's fault. Who hangs before it is found by the host's own deadlines. */
static void look_at_last(fsdp__nccl_comm *c, uint64_t now_ns, verdict *v)
{
    fsdp__nccl_ring *ring = c->ring;
    pthread_mutex_lock(&ring->lock);
    if (!ring->last_inside && (!ring->last_enqueued || is_done(c, ring->last_end))) {
        ring->last_enqueued = false;
        atomic_store(&ring->is_full, false); /* with the lock held: the next one finds room in the ring */
    } else if (ring->last_since_ns != 0) {
        judge(c, &ring->last_call, now_ns - ring->last_since_ns, v);
    } else if (ring->last_begun && is_done(c, ring->last_begin)) {
        ring->last_since_ns = now_ns;
    }
    pthread_mutex_unlock(&ring->lock);
}

/* Since when the GPU, or only the host, has been in this one. */
static void look_at_entry(fsdp__nccl_comm *c, const fsdp__nccl_entry *entry, uint64_t now_ns, verdict *v)
{
    fsdp__nccl_ring *ring = c->ring;
    if (ring->since_number != entry->call.number) ring->since_ns = 0;
    ring->since_number = entry->call.number;
    if (ring->since_ns == 0 && has_begun(c, entry)) ring->since_ns = now_ns;
    if (ring->since_ns != 0) judge(c, &entry->call, now_ns - ring->since_ns, v);
}

/* n first: the host may have ended that one meanwhile, and be in the next. */
static void look_inside(fsdp__nccl_comm *c, uint64_t now_ns, verdict *v)
{
    fsdp__nccl_ring *ring = c->ring;
    pthread_mutex_lock(&ring->lock);
    uint64_t n = atomic_load_explicit(&ring->n, memory_order_acquire);
    if (atomic_load_explicit(&ring->inside, memory_order_acquire) != 0)
        look_at_entry(c, &ring->entry[n % FSDP__NCCL_RING], now_ns, v);
    pthread_mutex_unlock(&ring->lock);
}

/* How long the GPU has been in the oldest that is not over: from when its stream came to it, not while it still computes what
 * comes before. */
static void look_at_ring(fsdp__nccl_comm *c, uint64_t now_ns, verdict *v)
{
    fsdp__nccl_ring *ring = c->ring;
    bool inside = atomic_load_explicit(&ring->inside, memory_order_acquire) != 0;
    uint64_t n = atomic_load_explicit(&ring->n, memory_order_acquire), i = atomic_load(&ring->n_done);
    while (i < n && is_done(c, ring->entry[i % FSDP__NCCL_RING].end->native)) i++;
    atomic_store_explicit(&ring->n_done, i, memory_order_release);
    v->busy |= i < n || inside;
    if (i < n) {
        look_at_entry(c, &ring->entry[i % FSDP__NCCL_RING], now_ns, v);
    } else if (atomic_load(&ring->is_full)) {
        v->busy = true;
        look_at_last(c, now_ns, v);
    } else if (inside) {
        look_inside(c, now_ns, v);
    }
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

static void say_of_device(const fsdp__nccl_team *team, char *sentence)
{
    FSDP_IGNORE(fsdp__cuda_check(team->dev));
    snprintf(sentence, FSDP__SENTENCE_BYTES, "rank %u is lost: %.900s", team->rank, fsdp_last_error());
}

void fsdp__nccl_tell_device(fsdp__nccl_team *team)
{
    char sentence[FSDP__SENTENCE_BYTES];
    fsdp_status own = (fsdp_status)atomic_load(&team->dev->status);
    if (own == FSDP_OK || own == FSDP_ERR_ABORTED) return;
    say_of_device(team, sentence);
    fsdp__nccl_tell(team, FSDP_ERR_RANK_LOST, sentence);
}

/* This rank's GPU is broken, and its host has not come by to say so. */
static void look_at_device(fsdp__nccl_team *team, uint64_t now_ns, verdict *v)
{
    fsdp_status own = (fsdp_status)atomic_load(&team->dev->status);
    if (v->status != FSDP_OK || own == FSDP_OK) return;
    if (own == FSDP_ERR_ABORTED) { /* and so are they */
        v->status = FSDP_ERR_ABORTED;
        snprintf(v->sentence, sizeof v->sentence, "rank %u aborted its device", team->rank);
        return;
    }
    if (team->broken_ns == 0) team->broken_ns = now_ns;
    v->busy = true;
    if (now_ns - team->broken_ns < GRACE_NS) return;
    v->status = FSDP_ERR_RANK_LOST;
    say_of_device(team, v->sentence);
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

static void *watch_main(void *arg)
{
    fsdp__nccl_team *team = arg;
    if (cudaSetDevice(team->dev->ordinal) != cudaSuccess) (void)cudaGetLastError(); /* queries fail, and say so */
    (void)fsdp__cuda_relax();
    pthread_mutex_lock(&team->lock);
    while (!team->stopping) {
        verdict v = {.status = FSDP_OK};
        look(team, fsdp__now_ns(), &v);
        pthread_mutex_unlock(&team->lock);
        if (v.status != FSDP_OK) fsdp__nccl_tell(team, v.status, v.sentence);
        stop_all(team);
        pthread_mutex_lock(&team->lock);
        if (!team->stopping) fsdp__cond_until(&team->wake, &team->lock, fsdp__after_ns(v.busy ? BUSY_NS : IDLE_NS));
    }
    pthread_mutex_unlock(&team->lock);
    return NULL;
}

fsdp_status fsdp__nccl_watch_start(fsdp__nccl_team *team)
{
    if (fsdp__thread_start(&team->thread, NULL, watch_main, team) != 0)
        return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "NCCL: no thread for the watch");
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
