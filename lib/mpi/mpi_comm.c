/* SPDX-License-Identifier: MIT */
/* Groups and their order. A group is a host call on its stream, which waits until it is the wire's next, meets the other
 * ranks, and moves the bytes. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "attach.h"
#include "hash.h"
#include "hostmem.h"
#include "mpi_backend.h"

enum { LOOK_NS = 50000000, MIN_CHUNK = 1 << 16, MAX_CHUNK = 1 << 20, SETS = 2 };

/* ---- Failing ---- */

static fsdp_status own_error(fsdp__mpi_comm *c)
{
    fsdp_status status = (fsdp_status)atomic_load(&c->status);
    return status == FSDP_OK ? FSDP_OK : fsdp__fail(status, "%s", c->sentence);
}

void fsdp__mpi_comm_take_error(fsdp__mpi_comm *c, fsdp_status status, const char *sentence)
{
    pthread_mutex_lock(&c->lock);
    if (atomic_load(&c->status) == FSDP_OK) {
        snprintf(c->sentence, sizeof c->sentence, "%s", sentence);
        atomic_store(&c->status, status);
        pthread_cond_broadcast(&c->changed);
    }
    pthread_mutex_unlock(&c->lock);
}

fsdp_status fsdp__mpi_comm_check(fsdp__mpi_comm *c)
{
    FSDP_TRY(own_error(c));
    fsdp_status status = fsdp__mpi_side_ops.check(c->side);
    if (status == FSDP_OK) return FSDP_OK;
    fsdp__mpi_comm_take_error(c, status, fsdp_last_error());
    return own_error(c);
}

/* By the side channel, whose first failure is every rank's: it may be another one than this. */
fsdp_status fsdp__mpi_comm_fail(fsdp__mpi_comm *c, fsdp_status status, const char *format, ...)
{
    char sentence[FSDP__SENTENCE_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(sentence, sizeof sentence, format, args);
    va_end(args);
    FSDP_TRY(fsdp__mpi_comm_check(c));
    (fsdp__mpi_side_ops.fail)(c->side, status, sentence);
    FSDP_TRY(fsdp__mpi_comm_check(c));
    fsdp__mpi_comm_take_error(c, status, sentence);
    return own_error(c);
}

static void comm_abort(void *comm_)
{
    fsdp__mpi_comm *c = comm_;
    (void)fsdp__mpi_comm_fail(c, FSDP_ERR_ABORTED, "rank %u aborted communicator %u", c->rank, c->index);
}

static fsdp_status comm_check(void *comm) { return fsdp__mpi_comm_check(comm); }

/* ---- Running ---- */

static void group_release(fsdp__mpi_comm *c, fsdp__mpi_group *g, bool ran)
{
    pthread_mutex_lock(&c->lock);
    g->ran = ran;
    g->next_free = c->free_groups;
    c->free_groups = g;
    c->n_pending--;
    if (ran) c->n_run = g->number;
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->lock);
}

/* Until all groups before this one are over. Looks at the side channel, too: a group before it may never run. */
static fsdp_status wait_for_turn(fsdp__mpi_comm *c, const fsdp__mpi_group *g)
{
    pthread_mutex_lock(&c->lock);
    while (c->n_run + 1 != g->number && atomic_load(&c->status) == FSDP_OK) {
        (void)fsdp__cond_until(&c->changed, &c->lock, fsdp__after_ns(LOOK_NS));
        pthread_mutex_unlock(&c->lock);
        FSDP_TRY(fsdp__mpi_comm_check(c));
        pthread_mutex_lock(&c->lock);
    }
    if (c->larger_scratch != NULL) {
        fsdp__host_free(c->host, c->scratch, c->scratch_bytes, 1);
        c->scratch = c->larger_scratch;
        c->scratch_bytes = c->larger_bytes;
        c->larger_scratch = NULL;
    }
    pthread_mutex_unlock(&c->lock);
    return fsdp__mpi_comm_check(c);
}

static void bring(fsdp__mpi_comm *c, const fsdp__mpi_group *g)
{
    fsdp__mpi_brought *mine = &c->mine;
    mine->number = g->number;
    mine->hash = FSDP__HASH_SEED;
    mine->n_records = g->n < FSDP__MPI_RECORDS ? g->n : FSDP__MPI_RECORDS;
    for (uint32_t i = 0; i < g->n; i++) {
        fsdp__call call;
        fsdp__call_fill(&call, &g->list[i], g->number, i, g->n);
        mine->hash = fsdp__mix(mine->hash ^ call.hash);
        if (i < FSDP__MPI_RECORDS) mine->record[i] = call;
    }
    if (mine->hash == 0) mine->hash = 1; /* 0 closes */
}

static fsdp_status run_group(fsdp__mpi_comm *c, const fsdp__mpi_group *g)
{
    FSDP_TRY(wait_for_turn(c, g));
    bring(c, g);
    FSDP_TRY(fsdp__mpi_meet(c));
    uint64_t start_ns = fsdp__mpi_device_ops.now_ns(c->dev);
    for (uint32_t i = 0; i < g->n; i++) FSDP_TRY(fsdp__mpi_move(c, &g->list[i]));
    uint64_t end_ns = fsdp__mpi_device_ops.now_ns(c->dev);
    for (uint32_t i = 0; i < g->n; i++)
        if (g->list[i].span != NULL) *g->list[i].span = (fsdp_span){start_ns, end_ns};
    return FSDP_OK;
}

static void run(void *arg)
{
    fsdp__mpi_group *g = arg;
    fsdp__mpi_comm *c = g->comm;
    fsdp_status status = run_group(c, g);
    if (status != FSDP_OK) {
        char sentence[FSDP__ERROR_BYTES];
        snprintf(sentence, sizeof sentence, "%s", fsdp_last_error());
        fsdp__mpi_device_fail(c->dev, status, sentence);
    }
    group_release(c, g, true);
}

/* ---- Enqueueing ---- */

/* A free group of room for n, or a new one. */
static fsdp__mpi_group *group_take(fsdp__mpi_comm *c, uint32_t n)
{
    pthread_mutex_lock(&c->lock);
    fsdp__mpi_group **link = &c->free_groups, *g;
    while (*link != NULL && (*link)->capacity < n) link = &(*link)->next_free;
    g = *link;
    if (g != NULL) *link = g->next_free;
    pthread_mutex_unlock(&c->lock);
    if (g == NULL) {
        uint32_t capacity = n < 4 ? 4 : n;
        g = fsdp__host_alloc(c->host, 1, sizeof *g + capacity * sizeof *g->list);
        if (g == NULL) return NULL;
        g->comm = c;
        g->capacity = capacity;
        g->next = c->groups;
        c->groups = g;
    }
    pthread_mutex_lock(&c->lock);
    c->n_pending++;
    pthread_mutex_unlock(&c->lock);
    return g;
}

/* The block in use stays with the group that runs; the next one takes the larger. */
static bool reserve_scratch(fsdp__mpi_comm *c, const fsdp_collective *list, uint32_t n)
{
    size_t need = 0;
    for (uint32_t i = 0; i < n; i++) {
        size_t bytes = fsdp__mpi_scratch_bytes(c, &list[i]);
        if (bytes > need) need = bytes;
    }
    pthread_mutex_lock(&c->lock);
    size_t have = c->larger_scratch != NULL ? c->larger_bytes : c->scratch_bytes;
    pthread_mutex_unlock(&c->lock);
    if (need <= have) return true;
    char *block = fsdp__host_alloc(c->host, need, 1);
    if (block == NULL) return false;
    pthread_mutex_lock(&c->lock);
    fsdp__host_free(c->host, c->larger_scratch, c->larger_bytes, 1);
    c->larger_scratch = block;
    c->larger_bytes = need;
    pthread_mutex_unlock(&c->lock);
    return true;
}

/* A device that has failed refuses: peers must not wait for this rank. */
static fsdp_status refused(fsdp__mpi_comm *c, const fsdp__mpi_group *g)
{
    char what[400], why[400];
    fsdp__call call;
    snprintf(why, sizeof why, "%s", fsdp_last_error());
    fsdp__call_fill(&call, &g->list[0], g->number, 0, g->n);
    fsdp__call_describe(&call, what, sizeof what);
    (void)fsdp__mpi_comm_fail(c, FSDP_ERR_RANK_LOST, "%s: rank %u of %u did not come: %s", what, c->rank, c->world,
                              why);
    return fsdp__mpi_device_check(c->dev);
}

static fsdp_status enqueue(void *comm_, void *stream, const fsdp_collective *list, uint32_t n)
{
    fsdp__mpi_comm *c = comm_;
    FSDP_TRY(fsdp__mpi_comm_check(c));
    fsdp__mpi_group *g = group_take(c, n);
    if (g == NULL)
        return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "communicator %u: no host memory for a group of %u", c->index, n);
    g->number = c->n_enqueued + 1;
    g->n = n;
    g->ran = false;
    memcpy(g->list, list, n * sizeof *list);
    if (!reserve_scratch(c, list, n)) {
        group_release(c, g, false);
        return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "communicator %u: no host memory to sum in", c->index);
    }
    const fsdp_device_op op = {.kind = FSDP_OPERATION_HOST_CALL, .u.host_call = {run, g}};
    fsdp_status status = fsdp__mpi_device_ops.launch(c->dev, stream, &op, NULL);
    pthread_mutex_lock(&c->lock);
    bool ran = g->ran; /* with FSDP_DEBUG_SYNC, if it fails */
    pthread_mutex_unlock(&c->lock);
    if (status == FSDP_OK || ran) {
        c->n_enqueued++;
        return status;
    }
    if (fsdp__mpi_device_check(c->dev) != FSDP_OK) status = refused(c, g);
    group_release(c, g, false);
    return status;
}

/* ---- Opening and closing ---- */

static void free_arrays(fsdp__mpi_comm *c)
{
    uint32_t n_brought = c->rank == 0 ? c->world : 1;
    fsdp__host_free(c->host, c->brought, n_brought, sizeof *c->brought);
    fsdp__host_free(c->host, c->words, n_brought, sizeof *c->words);
    fsdp__host_free(c->host, c->requests, 2 * SETS * (size_t)c->world, sizeof *c->requests);
    fsdp__host_free(c->host, c->indices, 2 * SETS * (size_t)c->world, sizeof *c->indices);
    fsdp__host_free(c->host, c->legs, c->world, sizeof *c->legs);
    fsdp__host_free(c->host, c->sources, c->world, sizeof *c->sources);
    fsdp__host_free(c->host, c->missing, c->world, sizeof *c->missing);
}

static bool make_arrays(fsdp__mpi_comm *c)
{
    uint32_t n_brought = c->rank == 0 ? c->world : 1;
    c->brought = fsdp__host_alloc(c->host, n_brought, sizeof *c->brought);
    c->words = fsdp__host_alloc(c->host, n_brought, sizeof *c->words);
    c->requests = fsdp__host_alloc(c->host, 2 * SETS * (size_t)c->world, sizeof *c->requests);
    c->indices = fsdp__host_alloc(c->host, 2 * SETS * (size_t)c->world, sizeof *c->indices);
    c->legs = fsdp__host_alloc(c->host, c->world, sizeof *c->legs);
    c->sources = fsdp__host_alloc(c->host, c->world, sizeof *c->sources);
    c->missing = fsdp__host_alloc(c->host, c->world, sizeof *c->missing);
    if (c->brought == NULL || c->words == NULL || c->requests == NULL || c->indices == NULL || c->legs == NULL ||
        c->sources == NULL || c->missing == NULL)
        return false;
    for (size_t i = 0; i < 2 * SETS * (size_t)c->world; i++) c->requests[i] = MPI_REQUEST_NULL;
    return true;
}

/* What MPI has not given back stays for good. */
void fsdp__mpi_comm_free(fsdp__mpi_comm *c)
{
    if (c->left) return;
    while (c->groups != NULL) {
        fsdp__mpi_group *g = c->groups;
        c->groups = g->next;
        fsdp__host_free(c->host, g, 1, sizeof *g + g->capacity * sizeof *g->list);
    }
    fsdp__host_free(c->host, c->scratch, c->scratch_bytes, 1);
    fsdp__host_free(c->host, c->larger_scratch, c->larger_bytes, 1);
    free_arrays(c);
    pthread_cond_destroy(&c->changed);
    pthread_mutex_destroy(&c->lock);
    if (c->holds_side) fsdp__mpi_side_release(c->side);
    fsdp__host_free(c->host, c, 1, sizeof *c);
}

static uint64_t usual_chunk(uint32_t world)
{
    uint64_t bytes = 8 * (uint64_t)MAX_CHUNK / world / 4 * 4;
    if (bytes < MIN_CHUNK) return MIN_CHUNK;
    return bytes > MAX_CHUNK ? MAX_CHUNK : bytes;
}

static fsdp__mpi_comm *comm_create(const fsdp_comm_args *args, const fsdp_mpi_config *config)
{
    fsdp__mpi_comm *c = fsdp__host_alloc(args->host, 1, sizeof *c);
    if (c == NULL) return NULL;
    c->host = args->host;
    c->dev = args->dev;
    c->side = args->side;
    c->index = args->index;
    c->rank = c->side->rank;
    c->world = c->side->world;
    c->timeout_ns = args->timeout_ns;
    c->chunk_bytes = config->chunk_bytes != 0 ? config->chunk_bytes : usual_chunk(c->world);
    fsdp__cond_init(&c->changed);
    pthread_mutex_init(&c->lock, NULL);
    if (make_arrays(c)) return c;
    fsdp__mpi_comm_free(c);
    return NULL;
}

/* By the side channel, on which a rank that does not come is noticed at once, and of its communicator: the program's is left
 * alone, and a rank that cannot come leaves nothing half done. */
static fsdp_status comm_open(const fsdp_comm_args *args, void **out_comm)
{
    fsdp_mpi_config config;
    fsdp__mpi_device *dev = args->dev;
    fsdp__mpi_side *side = args->side;
    char what[40];
    if (args->index > 1) return fsdp__fail(FSDP_ERR_ARG, "communicator %u: there are 0 and 1", args->index);
    snprintf(what, sizeof what, "opening communicator %u", args->index);
    FSDP_TRY(fsdp__mpi_config_read(args->backend_config, &config, &dev->engine));
    fsdp__mpi_comm *c = comm_create(args, &config);
    uint64_t chunk_bytes = c != NULL ? c->chunk_bytes : 0;
    fsdp_status status = FSDP_OK;
    if (c == NULL) status = fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "%s: no host memory for %u ranks", what, side->world);
    status = fsdp__mpi_side_vote(side, what, status, chunk_bytes, args->timeout_ns);
    if (status == FSDP_OK) {
        fsdp__mpi_opening opening = {&dev->engine, what, args->timeout_ns, fsdp__after_ns(args->timeout_ns), side};
        status = fsdp__mpi_opening_dup(&opening, side->comm, &c->mpi);
        c->left = status != FSDP_OK;
    }
    if (status != FSDP_OK) {
        if (c != NULL) fsdp__mpi_comm_free(c);
        return status;
    }
    atomic_fetch_add(&side->refs, 1);
    c->holds_side = true;
    pthread_mutex_lock(&dev->lock);
    c->next = dev->comms;
    dev->comms = c;
    pthread_mutex_unlock(&dev->lock);
    *out_comm = c;
    return FSDP_OK;
}

/* With groups that a stream may still hold, or that a failed one never runs, it stays until the device is closed. */
static void comm_close(void *comm_)
{
    fsdp__mpi_comm *c = comm_;
    fsdp__mpi_device *dev = c->dev;
    pthread_mutex_lock(&dev->lock);
    fsdp__mpi_comm **link = &dev->comms;
    while (*link != c) link = &(*link)->next;
    *link = c->next;
    pthread_mutex_unlock(&dev->lock);
    pthread_mutex_lock(&c->lock);
    uint32_t n_pending = c->n_pending;
    pthread_mutex_unlock(&c->lock);
    if (n_pending == 0) {
        if (fsdp__mpi_comm_check(c) == FSDP_OK && fsdp__mpi_meet_closing(c)) {
            fsdp__mpi_enter(&dev->engine);
            MPI_Comm_free(&c->mpi);
            fsdp__mpi_leave(&dev->engine);
        }
        fsdp__mpi_comm_free(c);
        return;
    }
    (void)fsdp__mpi_comm_fail(c, FSDP_ERR_RANK_LOST, "rank %u closed communicator %u with %u operations enqueued",
                              c->rank, c->index, n_pending);
    pthread_mutex_lock(&dev->lock);
    c->next = dev->closed;
    dev->closed = c;
    pthread_mutex_unlock(&dev->lock);
}

const fsdp_comm_ops fsdp__mpi_comm_ops = {
    .size = sizeof fsdp__mpi_comm_ops,
    .name = "mpi",
    .open = comm_open,
    .close = comm_close,
    .enqueue = enqueue,
    .check = comm_check,
    .abort = comm_abort,
    .attach = fsdp__attach_nothing,
    .detach = fsdp__detach_nothing,
};
