/* SPDX-License-Identifier: MIT */
#include "context.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "check.h"
#include "comm.h"
#include "device.h"
#include "fsdp/host.h"
#include "hostmem.h"
#include "order.h"
#include "side.h"
#include "stream.h"

static const char *const lane_names[] = {"gather", "reduce", "copy"};

/* Runs on a thread of the side channel: who waits for a peer in a collective is woken. Each call that fails then asks the
 * side channel first, which knows why. */
static void peers_failed(void *arg)
{
    fsdp_context *ctx = arg;
    pthread_mutex_lock(&ctx->comms_lock);
    if (ctx->comm != NULL) fsdp__comm_abort(ctx->comm);
    if (ctx->reduce_comm != NULL && ctx->reduce_comm != ctx->comm) fsdp__comm_abort(ctx->reduce_comm);
    pthread_mutex_unlock(&ctx->comms_lock);
}

static fsdp_status open_comm(fsdp_context *ctx, const fsdp_config *config, uint32_t index, fsdp_comm **out_comm)
{
    fsdp_comm *comm;
    FSDP_TRY(fsdp__comm_open(ctx, config, index, &comm));
    pthread_mutex_lock(&ctx->comms_lock);
    *out_comm = comm;
    pthread_mutex_unlock(&ctx->comms_lock);
    return ctx->backend->side->check(ctx->side); /* it may have failed before there was a communicator to tell */
}

/* One communicator for both. */
static void share_comm(fsdp_context *ctx)
{
    pthread_mutex_lock(&ctx->comms_lock);
    ctx->reduce_comm = ctx->comm;
    pthread_mutex_unlock(&ctx->comms_lock);
}

static void close_comms(fsdp_context *ctx)
{
    pthread_mutex_lock(&ctx->comms_lock);
    fsdp_comm *comm = ctx->comm, *reduce_comm = ctx->reduce_comm;
    ctx->comm = ctx->reduce_comm = NULL;
    pthread_mutex_unlock(&ctx->comms_lock);
    if (reduce_comm != comm) fsdp__comm_close(reduce_comm);
    fsdp__comm_close(comm);
}

static void close_all(fsdp_context *ctx)
{
    for (int lane = FSDP_LANE_COPY; lane >= FSDP_LANE_GATHER; lane--)
        if (ctx->lanes[lane] != NULL) fsdp__stream_close(ctx->lanes[lane]);
    close_comms(ctx);
    if (ctx->dev != NULL) fsdp__pinned_close(ctx); /* no stream is left that could use it */
    fsdp__host_free(&ctx->host, ctx->votes, ctx->world, FSDP__VOTE_BYTES);
    if (ctx->side != NULL) ctx->backend->side->close(ctx->side);
    if (ctx->dev != NULL) ctx->backend->device->close(ctx->dev);
    pthread_cond_destroy(&ctx->drained);
    pthread_mutex_destroy(&ctx->failing_lock);
    pthread_mutex_destroy(&ctx->comms_lock);
    pthread_mutex_destroy(&ctx->lock);
    fsdp_host_allocator host = ctx->host;
    fsdp__host_strfree(&host, ctx->flight_path);
    fsdp__host_free(&host, ctx, 1, sizeof *ctx);
}

/* Its rank is known from here on. */
static fsdp_status copy_flight_path(fsdp_context *ctx, const char *path)
{
    if (path == NULL) return FSDP_OK;
    size_t bytes = strlen(path) + 32;
    char *text = fsdp__host_alloc(&ctx->host, bytes, 1);
    if (text == NULL) return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "fsdp_config.flight_path: no host memory");
    snprintf(text, bytes, "%s.rank%u.json", path, ctx->rank);
    ctx->flight_path = fsdp__host_strdup(&ctx->host, text);
    fsdp__host_free(&ctx->host, text, bytes, 1);
    return ctx->flight_path != NULL ? FSDP_OK
                                    : fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "fsdp_config.flight_path: no host memory");
}

static fsdp_status open_all(fsdp_context *ctx, const fsdp_config *config)
{
    fsdp_device_args dev = {sizeof dev,  config->backend_config, &ctx->host, ctx->debug, ctx->timeout_ns, ctx->log,
                            ctx->log_arg};
    ctx->caps.size = sizeof ctx->caps;
    FSDP_TRY(ctx->backend->device->open(&dev, &ctx->dev, &ctx->caps));
    FSDP_TRY(fsdp__pinned_open(ctx, &config->pinned));
    fsdp_side_args side = {.size = sizeof side,
                           .backend_config = config->backend_config,
                           .host = &ctx->host,
                           .timeout_ns = ctx->timeout_ns,
                           .words = fsdp__order_words(ctx),
                           .failed = peers_failed,
                           .failed_arg = ctx};
    FSDP_TRY(ctx->backend->side->open(&side, &ctx->side, &ctx->rank, &ctx->world));
    FSDP_TRY(copy_flight_path(ctx, config->flight_path));
    ctx->votes = fsdp__host_alloc(&ctx->host, ctx->world, FSDP__VOTE_BYTES);
    if (ctx->votes == NULL)
        return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "fsdp_context_create: no host memory for votes of %u ranks",
                          ctx->world);
    FSDP_TRY(
        fsdp__order_agree(ctx, config->reduce_comm ? "fsdp_context_create with reduce_comm" : "fsdp_context_create"));
    FSDP_TRY(open_comm(ctx, config, 0, &ctx->comm));
    if (config->reduce_comm) FSDP_TRY(open_comm(ctx, config, 1, &ctx->reduce_comm));
    else share_comm(ctx);
    for (int lane = FSDP_LANE_GATHER; lane <= FSDP_LANE_COPY; lane++)
        FSDP_TRY(fsdp__stream_open(ctx, lane_names[lane], true, &ctx->lanes[lane]));
    return FSDP_OK;
}

/* A mutex that knows its owner, for fsdp__has_lock. */
static void init_lock(pthread_mutex_t *lock)
{
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_ERRORCHECK);
    pthread_mutex_init(lock, &attributes);
    pthread_mutexattr_destroy(&attributes);
}

/* Where this rank alone cannot open its context, its peers hear why, and not only that it closed. */
static void tell_why(fsdp_context *ctx, fsdp_status status, const char *sentence)
{
    bool alone = status == FSDP_ERR_NO_HOST_MEMORY || status == FSDP_ERR_NO_MEMORY || status == FSDP_ERR_DEVICE;
    if (!alone || ctx->side == NULL || ctx->backend->side->check(ctx->side) != FSDP_OK) return;
    char text[FSDP__SENTENCE_BYTES];
    snprintf(text, sizeof text, "rank %u could not open its context: %.900s", ctx->rank, sentence);
    ctx->backend->side->fail(ctx->side, FSDP_ERR_ABORTED, text);
}

bool fsdp__has_lock(fsdp_context *ctx)
{
    const struct timespec past = {0, 0}; /* nobody waits */
    int answer = pthread_mutex_timedlock(&ctx->lock, &past);
    if (answer == 0) pthread_mutex_unlock(&ctx->lock);
    return answer == EDEADLK;
}

/* One that was built with other headers has other tables: libfsdp_mpi is a file of its own, others are the caller's. */
static fsdp_status check_backend(const fsdp_backend *b)
{
    if (b->size == sizeof *b && b->device->size == sizeof *b->device && b->comm->size == sizeof *b->comm &&
        b->side->size == sizeof *b->side)
        return FSDP_OK;
    return fsdp__fail(
        FSDP_ERR_ARG,
        "fsdp_config.backend has the tables of another version of the library: build both from one source");
}

fsdp_status fsdp_context_create(const fsdp_config *config, fsdp_context **out_ctx)
{
    FSDP_NEED(config);
    FSDP_NEED(out_ctx);
    fsdp_config c = FSDP_CONFIG_INIT;
    FSDP_TRY(fsdp__read_config("fsdp_config", &c, sizeof c, config, sizeof c));
    if (c.debug & ~(uint32_t)(FSDP_DEBUG_SYNC | FSDP_DEBUG_POISON | FSDP_DEBUG_ORDER))
        return fsdp__fail(
            FSDP_ERR_ARG,
            "fsdp_config.debug is 0x%x: only FSDP_DEBUG_SYNC, FSDP_DEBUG_POISON and FSDP_DEBUG_ORDER exist", c.debug);
    if (c.flight_path != NULL && c.flight_path[0] == '\0')
        return fsdp__fail(FSDP_ERR_ARG, "fsdp_config.flight_path is empty: give a path, or NULL for no file");
    if (c.timeout_ns == 0)
        return fsdp__fail(FSDP_ERR_ARG, "fsdp_config.timeout_ns is 0: give a deadline in nanoseconds");
    if (c.backend != NULL) FSDP_TRY(check_backend(c.backend));
    fsdp_host_allocator host;
    FSDP_TRY(fsdp__host_allocator_resolve(&c.host, &host));
    FSDP_TRY(fsdp__pinned_check(&c.pinned));

    fsdp_context *ctx = fsdp__host_alloc(&host, 1, sizeof *ctx);
    if (ctx == NULL)
        return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "fsdp_context_create: no host memory for %zu bytes", sizeof *ctx);
    ctx->host = host;
    ctx->backend = c.backend != NULL ? c.backend : fsdp_host_backend();
    ctx->debug = c.debug;
    ctx->timeout_ns = c.timeout_ns;
    ctx->log = c.log;
    ctx->log_arg = c.log_arg;
    ctx->counters.size = sizeof ctx->counters;
    init_lock(&ctx->lock);
    pthread_mutex_init(&ctx->comms_lock, NULL);
    pthread_mutex_init(&ctx->failing_lock, NULL);
    pthread_cond_init(&ctx->drained, NULL);
    fsdp_status status = open_all(ctx, &c);
    if (status != FSDP_OK) {
        char sentence[FSDP__ERROR_BYTES]; /* a peer that waits for this rank gets one, and it is not this rank's */
        snprintf(sentence, sizeof sentence, "%s", fsdp_last_error());
        tell_why(ctx, status, sentence);
        close_all(ctx);
        return fsdp__fail(status, "%s", sentence);
    }
    *out_ctx = ctx;
    return FSDP_OK;
}

/* What of the caller's still lives, as "1 model, 2 streams (compute, copy)"; false: nothing. */
static bool list_live(fsdp_context *ctx, char *text, size_t bytes)
{
    static const char *const kinds[FSDP__N_CHILDREN] = {"model", "allocator", "stream",  "event",
                                                        "work",  "trace",     "capture", "pinned piece"};
    size_t at = 0;
    text[0] = 0;
    for (int k = 0; k < FSDP__N_CHILDREN; k++) {
        uint32_t n = ctx->n_live[k];
        if (n == 0 || at >= bytes) continue;
        at += (size_t)snprintf(text + at, bytes - at, "%s%u %s%s", at > 0 ? ", " : "", n, kinds[k], n > 1 ? "s" : "");
        const char *before = " (";
        for (int t = 0; k == FSDP__CHILD_STREAM && t < ctx->clocks.n_slots && at < bytes; t++) {
            const fsdp_stream *s = ctx->clocks.stream[t];
            if (s == NULL || s->lane) continue;
            at += (size_t)snprintf(text + at, bytes - at, "%s%s", before, s->name);
            before = ", ";
        }
        if (before[0] == ',' && at < bytes) at += (size_t)snprintf(text + at, bytes - at, ")");
    }
    return at > 0;
}

fsdp_status fsdp_context_destroy(fsdp_context *ctx)
{
    if (ctx == NULL) return FSDP_OK;
    char text[1024]; /* 13 streams with names of 31 bytes fit */
    fsdp__lock(ctx);
    bool live = list_live(ctx, text, sizeof text);
    fsdp__unlock(ctx);
    if (live)
        return fsdp__fail(FSDP_ERR_STATE, "fsdp_context_destroy: %s of yours still live: destroy or release them first",
                          text);
    close_all(ctx);
    return FSDP_OK;
}

void fsdp_context_abort(fsdp_context *ctx, const char *reason)
{
    if (ctx == NULL || atomic_exchange(&ctx->aborted, 1)) return;
    bool given = reason != NULL && reason[0] != 0;
    char sentence[512];
    snprintf(sentence, sizeof sentence, "rank %u aborted%s%.450s", ctx->rank, given ? ": " : "", given ? reason : "");
    ctx->backend->side->fail(ctx->side, FSDP_ERR_ABORTED, sentence);
    peers_failed(ctx);
    ctx->backend->device->abort(ctx->dev);
}

/* What stopped this rank's own device or communicators. The device first: one that breaks gives its collectives up, so that
 * communicators only know that this rank did not come. */
static fsdp_status check_own(fsdp_context *ctx)
{
    FSDP_TRY(ctx->backend->device->check(ctx->dev));
    FSDP_TRY(fsdp__comm_check(ctx->comm));
    return ctx->reduce_comm != ctx->comm ? fsdp__comm_check(ctx->reduce_comm) : FSDP_OK;
}

/* Give every rank this one's sentence, once. A second thread waits until it is everybody's. */
static void tell_failure(fsdp_context *ctx, fsdp_status status, const char *sentence)
{
    pthread_mutex_lock(&ctx->failing_lock);
    if (!ctx->told) ctx->backend->side->fail(ctx->side, status, sentence);
    ctx->told = true;
    pthread_mutex_unlock(&ctx->failing_lock);
}

/* The side channel's sentence is everybody's, with what each rank did last. But the rank whose device failed knows better
 * than its peers, who only miss it. */
static fsdp_status check_peers(fsdp_context *ctx)
{
    fsdp_status status = ctx->backend->side->check(ctx->side);
    if (status != FSDP_ERR_MISMATCH && status != FSDP_ERR_RANK_LOST) return status;
    if (ctx->backend->device->check(ctx->dev) == FSDP_ERR_DEVICE) return FSDP_ERR_DEVICE;
    return ctx->backend->side->check(ctx->side);
}

/* With the sentence in fsdp_last_error(), which stays. */
static __attribute__((noinline, cold)) void write_flight_file(fsdp_context *ctx, fsdp_status status)
{
    bool between_ranks = status == FSDP_ERR_MISMATCH || status == FSDP_ERR_RANK_LOST || status == FSDP_ERR_ABORTED;
    if (!between_ranks || ctx->flight_path == NULL || atomic_load(&ctx->comparing)) return;
    if (atomic_exchange(&ctx->flight_written, true)) return;
    char sentence[FSDP__ERROR_BYTES];
    snprintf(sentence, sizeof sentence, "%s", fsdp_last_error());
    if (fsdp__flight_write(ctx, ctx->flight_path, status, sentence) != FSDP_OK)
        fsdp__log(ctx, "the flight recorder is lost: %s", fsdp_last_error());
    FSDP_IGNORE(fsdp__fail(status, "%s", sentence));
}

/* The side channel first: an abort says who and why, while communicator and device only know that they stopped. */
fsdp_status fsdp__context_peek(fsdp_context *ctx)
{
    FSDP_TRY(check_peers(ctx));
    FSDP_TRY(check_own(ctx));
    return FSDP_OK;
}

/* Every hook asks: what only a failure needs, and much stack, is a function of its own. */
static __attribute__((noinline, cold)) fsdp_status own_failure(fsdp_context *ctx, fsdp_status status)
{
    if (status == FSDP_ERR_MISMATCH || status == FSDP_ERR_RANK_LOST) {
        char sentence[FSDP__SENTENCE_BYTES];
        snprintf(sentence, sizeof sentence, "%s", fsdp_last_error());
        tell_failure(ctx, status, sentence);
    }
    return fsdp__context_peek(ctx); /* the peers may also have stopped them a moment ago */
}

fsdp_status fsdp__context_check(fsdp_context *ctx)
{
    fsdp_status status = check_peers(ctx);
    if (status == FSDP_OK) {
        status = check_own(ctx);
        if (status == FSDP_OK) return FSDP_OK;
        status = own_failure(ctx, status);
    }
    write_flight_file(ctx, status);
    return status;
}

fsdp_status fsdp__context_fail_all(fsdp_context *ctx, fsdp_status status, const char *sentence)
{
    tell_failure(ctx, status, sentence);
    return fsdp__context_explain(ctx, fsdp__fail(status, "%s", sentence));
}

fsdp_status fsdp__context_explain(fsdp_context *ctx, fsdp_status status)
{
    fsdp_status why = fsdp__context_check(ctx);
    return why != FSDP_OK ? why : status;
}

fsdp_status fsdp__context_late(fsdp_context *ctx, fsdp_status status, uint64_t timeout_ns, const char *format, ...)
{
    status = fsdp__context_explain(ctx, status);
    if (status != FSDP_ERR_TIMEOUT) return status;
    char what[256], late[96] = "";
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    if (ctx->world > 1)
        snprintf(late, sizeof late, ". A rank that others wait for is named after fsdp_config.timeout_ns, %.3f s",
                 (double)ctx->timeout_ns * 1e-9);
    return fsdp__fail(status, "%s after %.3f s: ask again%s", what, (double)timeout_ns * 1e-9, late);
}

fsdp_status fsdp_context_check(fsdp_context *ctx)
{
    FSDP_NEED(ctx);
    return fsdp__context_check(ctx);
}

fsdp_status fsdp__context_drain(fsdp_context *ctx, uint64_t timeout_ns)
{
    fsdp_status result = FSDP_OK;
    for (int t = 0; t < FSDP__SLOTS; t++) {
        if (ctx->clocks.stream[t] == NULL) continue;
        fsdp_status status = fsdp__device_drain_host(ctx->clocks.stream[t], timeout_ns);
        /* A stream that is still running, or may be, matters more than one that stopped with an error. */
        if (result == FSDP_OK || status == FSDP_ERR_TIMEOUT) result = status;
        if (status == FSDP_ERR_STATE && result != FSDP_ERR_TIMEOUT) result = status;
    }
    return result;
}

fsdp_status fsdp__context_settle(fsdp_context *ctx, const char *call)
{
    if (fsdp__context_drain(ctx, UINT64_MAX) != FSDP_ERR_STATE) return FSDP_OK;
    return fsdp__fail(FSDP_ERR_STATE,
                      "%s: a stream is being captured, so that it cannot be waited for: end the capture first", call);
}

void fsdp__log(fsdp_context *ctx, const char *format, ...)
{
    if (ctx->log == NULL) return;
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    ctx->log(ctx->log_arg, text);
}

uint32_t fsdp_context_rank(const fsdp_context *ctx) { return ctx != NULL ? ctx->rank : 0; }
uint32_t fsdp_context_world(const fsdp_context *ctx) { return ctx != NULL ? ctx->world : 0; }
uint64_t fsdp_context_now_ns(fsdp_context *ctx) { return ctx != NULL ? ctx->backend->device->now_ns(ctx->dev) : 0; }

fsdp_status fsdp_context_counters(const fsdp_context *ctx, fsdp_counters *out_counters)
{
    FSDP_NEED(ctx);
    FSDP_NEED(out_counters);
    pthread_mutex_t *lock = (pthread_mutex_t *)&ctx->lock; /* asking changes nothing else */
    pthread_mutex_lock(lock);
    fsdp_counters counters = ctx->counters;
    pthread_mutex_unlock(lock);
    return fsdp__write_result("fsdp_counters", out_counters, &counters, sizeof counters, sizeof counters);
}
