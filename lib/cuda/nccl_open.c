/* SPDX-License-Identifier: MIT */
/* Opening a communicator: an id of rank 0's, a split, or the caller's own. Ranks vote before and after each call of NCCL that
 * needs all of them, so that none waits in it for one that could not come. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hostmem.h"
#include "nccl_parts.h"

enum {
    MODE_OWN = 1,
    MODE_OWN_REDUCE = 2,
    MODE_ID = 4,
    MODE_WINDOWS = 8,      /* and the bit above it: of fsdp_nccl_window each */
    FIRST_ORDERED = 22600, /* NCCL 2.26 */
    PIECE = 64,            /* for which a side channel needs no memory */
    LATE_NS = 2000000000
};

/* ---- The vote ---- */

static const uint32_t ALL_WINDOWS = FSDP_NCCL_WINDOW_GATHER | FSDP_NCCL_WINDOW_GRAD;

typedef struct ballot {
    int32_t status, version;
    uint32_t mode;
} ballot;

static const char *mode_name(uint32_t bit)
{
    switch (bit) {
    case MODE_OWN: return "comm";
    case MODE_OWN_REDUCE: return "reduce_comm";
    case MODE_ID: return "id";
    case MODE_WINDOWS *FSDP_NCCL_WINDOW_GATHER: return "windows: FSDP_NCCL_WINDOW_GATHER";
    default: return "windows: FSDP_NCCL_WINDOW_GRAD";
    }
}

static fsdp_status compare(const fsdp__nccl_team *team, const ballot *all)
{
    for (uint32_t r = 1; r < team->world; r++) {
        uint32_t differs = all[r].mode ^ all[0].mode, bit = differs & (~differs + 1);
        if (differs != 0)
            return fsdp__fail(FSDP_ERR_MISMATCH,
                              "fsdp_nccl_config.%s is set on rank %u and not on rank %u: give the same on all",
                              mode_name(bit), all[r].mode & bit ? r : 0, all[r].mode & bit ? 0 : r);
        if (all[r].version != all[0].version)
            return fsdp__fail(FSDP_ERR_MISMATCH,
                              "rank 0 runs NCCL %d and rank %u NCCL %d (as in NCCL_VERSION_CODE): give all ranks the "
                              "same libnccl",
                              all[0].version, r, all[r].version);
    }
    return FSDP_OK;
}

fsdp_status fsdp__nccl_vote(fsdp__nccl_comm *c, const char *what, fsdp_status mine, uint32_t mode)
{
    fsdp__nccl_team *team = c->team;
    char why[4 * PIECE] = "";
    uint32_t first = 0;
    ballot *all = team->ballots, ours = {mine, team->version, mode};
    /* Who has waited its deadline out does not wait for another one: the others are as late, or lost. */
    uint64_t timeout_ns = c->timeout_ns;
    if (mine == FSDP_ERR_RANK_LOST && timeout_ns > LATE_NS) timeout_ns = LATE_NS;
    if (mine != FSDP_OK) snprintf(why, sizeof why, "%.250s", fsdp_last_error());
    FSDP_TRY(team->side_ops->all_gather(team->side, &ours, all, sizeof ours, timeout_ns));
    while (first < team->world && all[first].status == FSDP_OK) first++;
    if (first == team->world) return compare(team, all);
    for (size_t at = 0; at < sizeof why; at += PIECE) {
        FSDP_TRY(team->side_ops->broadcast(team->side, why + at, PIECE, first, timeout_ns));
        if (memchr(why + at, 0, PIECE) != NULL) break;
    }
    why[sizeof why - 1] = '\0';
    return fsdp__fail(fsdp__status_of_peer(all[first].status), "%s failed on rank %u, so on every rank: %s", what,
                      first, why);
}

/* ---- The config ---- */

fsdp_status fsdp__nccl_config_read(const fsdp_cuda_config *config, fsdp_nccl_config *out_config)
{
    fsdp_nccl_config c = FSDP_NCCL_CONFIG_INIT;
    if (config->nccl != NULL) FSDP_TRY(fsdp__read_config("fsdp_nccl_config", &c, sizeof c, config->nccl, sizeof c));
    if (c.comm != NULL && (c.id != NULL || c.config != NULL))
        return fsdp__fail(FSDP_ERR_ARG,
                          "fsdp_nccl_config.%s is set with comm: the caller's communicator is there already",
                          c.id != NULL ? "id" : "config");
    if (c.reduce_comm != NULL && c.comm == NULL)
        return fsdp__fail(FSDP_ERR_ARG, "fsdp_nccl_config.reduce_comm is set without comm: give both, or none");
    if (c.reduce_comm != NULL && c.reduce_comm == c.comm)
        return fsdp__fail(FSDP_ERR_ARG, "fsdp_nccl_config.reduce_comm is comm: leave fsdp_config.reduce_comm false");
    if (c.config != NULL && (c.config->size < 2 * sizeof(size_t) || c.config->size > FSDP__NCCL_CONFIG_BYTES))
        return fsdp__fail(FSDP_ERR_ARG,
                          "fsdp_nccl_config.config says it has %zu bytes: begin it with "
                          "NCCL_CONFIG_INITIALIZER",
                          c.config->size);
    if ((c.windows & ~ALL_WINDOWS) != 0)
        return fsdp__fail(
            FSDP_ERR_ARG,
            "fsdp_nccl_config.windows is %#x: give FSDP_NCCL_WINDOW_GATHER (1), FSDP_NCCL_WINDOW_GRAD (2), "
            "both, or 0",
            c.windows);
    *out_config = c;
    return FSDP_OK;
}

bool fsdp__nccl_is_ordered(int version)
{
    const char *text = getenv("NCCL_LAUNCH_ORDER_IMPLICIT");
    return version >= FIRST_ORDERED && text != NULL && strtol(text, NULL, 0) == 1;
}

/* A copy of a name that the caller's config points to. */
static void copy_name(const char **name, char *room, size_t bytes)
{
    if (*name == NULL) return;
    snprintf(room, bytes, "%s", *name);
    *name = room;
}

static void give_config(fsdp__nccl_job *job, const ncclConfig_t *config)
{
    job->has_config = config != NULL;
    if (config == NULL) return;
    memcpy(job->config.bytes, config, config->size);
    ncclConfig_t *c = &job->config.config;
    if (c->size >= offsetof(ncclConfig_t, netName) + sizeof c->netName)
        copy_name(&c->netName, job->net_name, sizeof job->net_name);
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
    if (c->size >= offsetof(ncclConfig_t, commName) + sizeof c->commName)
        copy_name(&c->commName, job->comm_name, sizeof job->comm_name);
#endif
}

/* ---- The caller's own ---- */

static fsdp_status look_at(const fsdp__nccl_comm *c, ncclComm_t comm, const char *name)
{
    int n = 0, rank = 0, device = 0;
    char words[FSDP__NCCL_WORDS];
    ncclResult_t result = ncclCommCount(comm, &n);
    if (result == ncclSuccess) result = ncclCommUserRank(comm, &rank);
    if (result == ncclSuccess) result = ncclCommCuDevice(comm, &device);
    if (result != ncclSuccess) {
        fsdp__nccl_words(result, comm, words, sizeof words);
        return fsdp__fail(FSDP_ERR_ARG, "fsdp_nccl_config.%s: %s", name, words);
    }
    if ((uint32_t)n != c->world || (uint32_t)rank != c->rank)
        return fsdp__fail(FSDP_ERR_ARG,
                          "fsdp_nccl_config.%s is rank %d of %d, and the context rank %u of %u: give one of all ranks "
                          "in their order",
                          name, rank, n, c->rank, c->world);
    if (device != c->dev->ordinal)
        return fsdp__fail(FSDP_ERR_ARG, "fsdp_nccl_config.%s is on GPU %d, and the context on GPU %d", name, device,
                          c->dev->ordinal);
    return FSDP_OK;
}

/* ---- One of ours ---- */

/* What NCCL refuses before anything is sent (two ranks on one GPU, a config) is the caller's to put right. */
static fsdp_status result_of(const fsdp__nccl_job *job)
{
    if (job->result == ncclSuccess) return FSDP_OK;
    bool by_caller =
        job->result == ncclInvalidUsage || job->result == ncclInvalidArgument || job->result == ncclInProgress;
    fsdp_status status = by_caller ? FSDP_ERR_ARG : fsdp__nccl_status(job->result);
    const char *hint = job->result != ncclInProgress ? ""
                       : job->parent != NULL         ? " (it is split from a communicator that does not block)"
                                                     : " (NCCL_COMM_BLOCKING=0 is in the environment: unset it)";
    return fsdp__fail(status, "%s: %s%s", job->call, job->words, hint);
}

static fsdp_status make_id(const fsdp__nccl_comm *c, const fsdp_nccl_config *config, ncclUniqueId *id)
{
    char words[FSDP__NCCL_WORDS];
    if (config->id != NULL) *id = *config->id;
    if (config->id != NULL || c->rank != 0) return FSDP_OK;
    ncclResult_t result = ncclGetUniqueId(id);
    if (result == ncclSuccess) return FSDP_OK;
    fsdp__nccl_words(result, NULL, words, sizeof words);
    return fsdp__fail(FSDP_ERR_DEVICE, "ncclGetUniqueId: %s", words);
}

_Static_assert(sizeof(ncclUniqueId) % PIECE == 0, "an id travels in whole pieces");

static fsdp_status send_id(const fsdp__nccl_comm *c, ncclUniqueId *id)
{
    const fsdp__nccl_team *team = c->team;
    for (size_t at = 0; at < sizeof *id; at += PIECE)
        FSDP_TRY(team->side_ops->broadcast(team->side, (char *)id + at, PIECE, 0, c->timeout_ns));
    return FSDP_OK;
}

/* ---- What a rank needs by itself ---- */

typedef struct opening {
    const char *what;
    fsdp_nccl_config config;
    ncclComm_t own; /* the caller's */
    fsdp__nccl_job *job;
    uint32_t mode;
} opening;

static fsdp_status no_memory(const char *what)
{
    return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "%s: no host memory", what);
}

/* Nobody reads the sum, but zeros it is. Not by the NULL stream: another stream may be capturing. */
static fsdp_status make_token(fsdp__nccl_comm *c)
{
    void *token = NULL;
    cudaStream_t stream = NULL;
    fsdp__cuda_inside inside = fsdp__cuda_enter_relaxed(c->dev);
    cudaError_t error = cudaMalloc(&token, 256);
    if (error == cudaSuccess) error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    if (error == cudaSuccess) error = cudaMemsetAsync(token, 0, 256, stream);
    if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
    if (stream != NULL) (void)cudaStreamDestroy(stream);
    fsdp__cuda_leave_relaxed(inside);
    c->token = token;
    return fsdp__cuda_fail(c->dev, error, "cudaMalloc of 256 bytes for barriers");
}

/* Kernels of one may fill the GPU of this rank while those of the other fill a peer's: nccl.h. */
static fsdp_status check_order(const fsdp__nccl_comm *c, const opening *o)
{
    if (c->index == 0 || o->config.accept_unordered || fsdp__nccl_is_ordered(c->team->version)) return FSDP_OK;
    if (c->team->version < FIRST_ORDERED)
        return fsdp__fail(FSDP_ERR_UNSUPPORTED,
                          "fsdp_config.reduce_comm: two communicators on one GPU can wait for each other for ever, and "
                          "NCCL %d does not order their launches: use NCCL 2.26 or later with "
                          "NCCL_LAUNCH_ORDER_IMPLICIT=1, or set fsdp_nccl_config.accept_unordered",
                          c->team->version);
    return fsdp__fail(FSDP_ERR_UNSUPPORTED,
                      "fsdp_config.reduce_comm: two communicators on one GPU can wait for each other for ever: set "
                      "NCCL_LAUNCH_ORDER_IMPLICIT=1 in the environment of every rank before it starts, or "
                      "fsdp_nccl_config.accept_unordered");
}

static fsdp_status prepare(fsdp__nccl_comm *c, opening *o)
{
    int ordinal = c->dev->ordinal;
    bool splits = c->index > 0;
    if (c->team->version < FSDP__NCCL_OLDEST)
        return fsdp__fail(FSDP_ERR_UNSUPPORTED,
                          "%s: the NCCL of this process is %d.%d.%d, and libfsdp needs 2.19 or later", o->what,
                          c->team->version / 10000, c->team->version / 100 % 100, c->team->version % 100);
    FSDP_TRY(check_order(c, o));
    if (o->own != NULL) FSDP_TRY(look_at(c, o->own, splits ? "reduce_comm" : "comm"));
    c->wire = fsdp__nccl_wire_create();
    if (c->wire == NULL) return no_memory(o->what);
    c->abort_job = fsdp__nccl_job_create(ordinal, c->wire, fsdp__nccl_run_abort, "ncclCommAbort");
    if (c->abort_job == NULL) return no_memory(o->what);
    FSDP_TRY(fsdp__nccl_ring_open(c));
    FSDP_TRY(make_token(c));
    if (o->own != NULL) return FSDP_OK;
    o->job = fsdp__nccl_job_create(ordinal, c->wire, splits ? fsdp__nccl_run_split : fsdp__nccl_run_init,
                                   splits ? "ncclCommSplit" : "ncclCommInitRankConfig");
    if (o->job == NULL) return no_memory(o->what);
    o->job->undo = fsdp__nccl_undo_open;
    o->job->world = (int)c->world;
    o->job->rank = (int)c->rank;
    if (splits) o->job->parent = fsdp__nccl_wire_hold(c->team->comm[0]->wire);
    give_config(o->job, o->config.config);
    return splits ? FSDP_OK : make_id(c, &o->config, &o->job->id);
}

/* Together with the others. */
static fsdp_status meet(fsdp__nccl_comm *c, const opening *o)
{
    fsdp__nccl_team *team = c->team;
    fsdp__nccl_job *job = o->job;
    c->owned = job != NULL;
    if (job == NULL) {
        atomic_store(&c->wire->comm, o->own);
        return FSDP_OK;
    }
    if (c->index == 0 && o->config.id == NULL) FSDP_TRY(send_id(c, &job->id));
    if (!fsdp__nccl_job_start(job)) return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "%s: no thread", o->what);
    FSDP_TRY(fsdp__nccl_job_wait(job, o->what, c->timeout_ns, team->side_ops, team->side));
    return result_of(job);
}

/* ---- Team and communicator ---- */

static fsdp__nccl_team *team_create(const fsdp_comm_args *args, const fsdp__cuda_setup *setup)
{
    fsdp__nccl_team *team = fsdp__host_alloc(args->host, 1, sizeof *team);
    void *ballots = fsdp__host_alloc(args->host, setup->world, sizeof(ballot));
    if (team == NULL || ballots == NULL) {
        fsdp__host_free(args->host, ballots, setup->world, sizeof(ballot));
        fsdp__host_free(args->host, team, 1, sizeof *team);
        return NULL;
    }
    team->host = args->host;
    team->dev = args->dev;
    team->rank = setup->rank;
    team->world = setup->world;
    team->side_ops = args->side_ops;
    team->side = args->side;
    team->ballots = ballots;
    pthread_mutex_init(&team->lock, NULL);
    fsdp__cond_init(&team->wake);
    if (ncclGetVersion(&team->version) != ncclSuccess) team->version = 0;
    return team;
}

void fsdp__nccl_team_free(fsdp__nccl_team *team)
{
    pthread_cond_destroy(&team->wake);
    pthread_mutex_destroy(&team->lock);
    fsdp__host_free(team->host, team->ballots, team->world, sizeof(ballot));
    fsdp__host_free(team->host, team, 1, sizeof *team);
}

void fsdp__nccl_comm_free(fsdp__nccl_comm *c)
{
    fsdp__cuda_inside inside = fsdp__cuda_enter_relaxed(c->dev);
    if (!c->stuck && c->token != NULL && cudaFree(c->token) != cudaSuccess) (void)cudaGetLastError();
    fsdp__nccl_ring_close(c);
    fsdp__cuda_leave_relaxed(inside);
    fsdp__nccl_job_release(c->abort_job);
    fsdp__nccl_wire_release(c->wire);
    pthread_mutex_destroy(&c->lock);
    fsdp__host_free(c->host, c, 1, sizeof *c);
}

static fsdp__nccl_comm *comm_create(const fsdp_comm_args *args, const fsdp__cuda_setup *setup)
{
    fsdp__nccl_comm *c = fsdp__host_alloc(args->host, 1, sizeof *c);
    if (c == NULL) return NULL;
    c->host = args->host;
    c->dev = args->dev;
    c->index = args->index;
    c->rank = setup->rank;
    c->world = setup->world;
    c->timeout_ns = args->timeout_ns;
    pthread_mutex_init(&c->lock, NULL);
    return c;
}

static fsdp_status open_together(fsdp__nccl_comm *c, opening *o)
{
    FSDP_TRY(fsdp__nccl_vote(c, o->what, prepare(c, o), o->mode));
    return fsdp__nccl_vote(c, o->what, meet(c, o), o->mode);
}

/* With the others this one comes to nothing, too; how it goes is nobody's concern any more. The sentence stays. */
static void give_up(fsdp__nccl_comm *c, fsdp_status status)
{
    char sentence[FSDP__SENTENCE_BYTES];
    snprintf(sentence, sizeof sentence, "%s", fsdp_last_error());
    if (c->owned && c->wire != NULL && c->abort_job != NULL) fsdp__nccl_stop(c, status, sentence);
    if (!c->owned && c->wire != NULL) atomic_store(&c->wire->comm, NULL); /* the caller's stays his */
    fsdp__nccl_comm_free(c);
    FSDP_IGNORE(fsdp__fail(status, "%s", sentence));
}

static uint32_t mode_of(const fsdp_nccl_config *config)
{
    return (config->comm != NULL ? MODE_OWN : 0u) | (config->reduce_comm != NULL ? MODE_OWN_REDUCE : 0u) |
           (config->id != NULL ? MODE_ID : 0u) | config->windows * MODE_WINDOWS;
}

/* The team's first communicator brings the watch. */
static fsdp_status join(fsdp__nccl_comm *c, opening *o)
{
    fsdp__nccl_team *team = c->team;
    FSDP_TRY(open_together(c, o));
    if (team->dev->nccl == NULL) FSDP_TRY(fsdp__nccl_watch_start(team));
    pthread_mutex_lock(&team->lock);
    team->comm[c->index] = c;
    pthread_mutex_unlock(&team->lock);
    team->dev->nccl = team;
    return FSDP_OK;
}

static fsdp_status open_in_team(fsdp__nccl_comm *c, const fsdp_comm_args *args, const fsdp__cuda_setup *setup,
                                opening *o)
{
    fsdp__cuda_device *dev = c->dev;
    if (c->index > 0 && (dev->nccl == NULL || dev->nccl->comm[0] == NULL))
        return fsdp__fail(FSDP_ERR_ARG, "communicator 1 is opened after communicator 0, from which it is split");
    c->team = dev->nccl != NULL ? dev->nccl : team_create(args, setup);
    if (c->team == NULL) return no_memory(o->what);
    if (dev->nccl == NULL && o->config.windows != 0 && fsdp__nccl_has_windows(c->team))
        c->team->windows = o->config.windows;
    fsdp_status status = join(c, o);
    fsdp__nccl_job_release(o->job);
    return status;
}

fsdp_status fsdp__nccl_open(const fsdp_comm_args *args, void **out_comm)
{
    fsdp__cuda_setup setup;
    fsdp__cuda_device *dev = args->dev;
    char what[40];
    if (args->index > 1) return fsdp__fail(FSDP_ERR_ARG, "communicator %u: there are 0 and 1", args->index);
    snprintf(what, sizeof what, "opening communicator %u", args->index);
    opening o = {.what = what};
    FSDP_TRY(fsdp__cuda_setup_read(args->backend_config, &setup));
    FSDP_TRY(fsdp__nccl_config_read(&setup.config, &o.config));
    o.own = args->index == 0 ? o.config.comm : o.config.reduce_comm;
    o.mode = mode_of(&o.config);
    fsdp__nccl_comm *c = comm_create(args, &setup);
    if (c == NULL) return no_memory(what);
    fsdp_status status = FSDP_OK;
    if (setup.world > 1) status = open_in_team(c, args, &setup, &o);
    else if (o.own != NULL) status = look_at(c, o.own, args->index > 0 ? "reduce_comm" : "comm");
    if (status == FSDP_OK) {
        *out_comm = c;
        return FSDP_OK;
    }
    fsdp__nccl_team *own_team = c->team != NULL && dev->nccl == NULL ? c->team : NULL;
    give_up(c, status);
    if (own_team != NULL) fsdp__nccl_team_free(own_team);
    return status;
}
