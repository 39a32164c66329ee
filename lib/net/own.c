/* SPDX-License-Identifier: MIT */
/* The caller's own side channel as a side table. What a failed call leaves in `all` is the caller's function's. There is no
 * hub to say who was first: ranks that fail at the same moment keep their own sentences. */
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "call.h"
#include "check.h"
#include "hostmem.h"
#include "star.h"

typedef struct own_side {
    fsdp_side_channel channel;
    const fsdp_host_allocator *host;
    uint32_t rank, world;
    uint64_t n_calls;
    void (*failed)(void *arg);
    void *failed_arg;
    pthread_mutex_t lock;
    _Atomic int status;
    char sentence[FSDP__ERROR_BYTES];
} own_side;

/* What a broadcast agrees on before it takes memory for the blobs of all. */
typedef struct ballot {
    uint64_t bytes, root, need;
} ballot;

/* The first failure stays. */
static void keep(own_side *s, fsdp_status status, const char *sentence)
{
    pthread_mutex_lock(&s->lock);
    bool first = atomic_load(&s->status) == FSDP_OK;
    if (first) {
        snprintf(s->sentence, sizeof s->sentence, "%s", sentence);
        atomic_store_explicit(&s->status, status, memory_order_release);
    }
    pthread_mutex_unlock(&s->lock);
    if (first && s->failed != NULL) s->failed(s->failed_arg);
}

/* A reason travels as text alone; in front of it stands its status, "FSDP_ERR_RANK_LOST: …", unless it is an abort. */
static fsdp_status read_reason(const char **reason)
{
    for (int status = -100; status < 0; status++) {
        const char *name = fsdp_status_name((fsdp_status)status);
        size_t length = strlen(name);
        if (!fsdp__is_failure(status) || strncmp(*reason, name, length) != 0 || strncmp(*reason + length, ": ", 2) != 0)
            continue;
        *reason += length + 2;
        return (fsdp_status)status;
    }
    return FSDP_ERR_ABORTED;
}

static fsdp_status own_check(void *side)
{
    own_side *s = side;
    if (atomic_load_explicit(&s->status, memory_order_acquire) == FSDP_OK && s->channel.aborted != NULL) {
        const char *reason = s->channel.aborted(s->channel.arg);
        if (reason != NULL) {
            fsdp_status status = read_reason(&reason);
            keep(s, status, reason);
        }
    }
    fsdp_status status = (fsdp_status)atomic_load_explicit(&s->status, memory_order_acquire);
    return status == FSDP_OK ? FSDP_OK : fsdp__fail(status, "%s", s->sentence);
}

static void own_fail(void *side, fsdp_status status, const char *sentence)
{
    own_side *s = side;
    FSDP_IGNORE(own_check(s)); /* another rank's reason came first */
    if (atomic_load(&s->status) != FSDP_OK) return;
    char reason[FSDP__ERROR_BYTES];
    if (status == FSDP_ERR_ABORTED) snprintf(reason, sizeof reason, "%s", sentence);
    else snprintf(reason, sizeof reason, "%s: %s", fsdp_status_name(status), sentence);
    keep(s, status, sentence);
    if (s->channel.abort != NULL) s->channel.abort(s->channel.arg, reason);
}

/* A side channel loses a rank, hears that ranks differ, or of an abort. Whatever else its function says is a rank lost: a
 * caller that may ask again after a TIMEOUT, say, cannot ask a channel again whose ranks have no longer the same calls behind
 * them. */
static fsdp_status as_loss(fsdp_status status)
{
    return status == FSDP_ERR_MISMATCH || status == FSDP_ERR_ABORTED ? status : FSDP_ERR_RANK_LOST;
}

/* The caller's function, and what it says if it fails: that is for good. */
static fsdp_status ask(own_side *s, const void *mine, void *all, size_t bytes, uint64_t timeout_ns)
{
    FSDP_TRY(own_check(s));
    char before[FSDP__ERROR_BYTES], text[FSDP__ERROR_BYTES];
    snprintf(before, sizeof before, "%s", fsdp_last_error());
    uint64_t number = ++s->n_calls;
    fsdp_status status = s->channel.all_gather(s->channel.arg, mine, all, bytes, timeout_ns);
    if (status == FSDP_OK) return FSDP_OK;
    FSDP_IGNORE(own_check(s)); /* does it fail because of another rank's reason? */
    if (atomic_load(&s->status) == FSDP_OK) {
        const char *said = strcmp(fsdp_last_error(), before) != 0 ? fsdp_last_error() : "it gave no sentence";
        const char *name = fsdp__is_failure(status) ? fsdp_status_name(status) : "what is no status";
        snprintf(text, sizeof text,
                 "side channel #%" PRIu64 " of %zu bytes: the caller's all_gather returned %s (%d): %.6000s", number,
                 bytes, name, (int)status, said);
        own_fail(s, as_loss(status), text);
    }
    return own_check(s);
}

/* As ask; and a function that says OK has at least brought this rank's own blob. */
static fsdp_status gather(own_side *s, const void *mine, void *all, size_t bytes, uint64_t timeout_ns)
{
    FSDP_TRY(ask(s, mine, all, bytes, timeout_ns));
    if (bytes == 0 || memcmp((const char *)all + s->rank * bytes, mine, bytes) == 0) return FSDP_OK;
    char text[FSDP__SENTENCE_BYTES];
    snprintf(text, sizeof text,
             "side channel #%" PRIu64
             " of %zu bytes: the caller's all_gather returned FSDP_OK, and what lies in rank %" PRIu32
             "'s place on that rank is not what it gave: all[r * bytes ...] must be rank r's blob",
             s->n_calls, bytes, s->rank);
    own_fail(s, FSDP_ERR_MISMATCH, text);
    return own_check(s);
}

static fsdp_status own_all_gather(void *side, const void *mine, void *all, size_t bytes, uint64_t timeout_ns)
{
    own_side *s = side;
    if (s->world > 1) return gather(s, mine, all, bytes, timeout_ns);
    FSDP_TRY(own_check(s));
    if (bytes > 0 && all != mine) memmove(all, mine, bytes);
    return FSDP_OK;
}

/* All are in the same broadcast and have room for it. */
static fsdp_status agree(own_side *s, const ballot *mine, ballot *all, uint64_t timeout_ns)
{
    FSDP_TRY(gather(s, mine, all, sizeof *mine, timeout_ns));
    for (uint32_t r = 0; r < s->world; r++) {
        if (all[r].bytes == mine->bytes && all[r].root == mine->root) continue;
        char text[FSDP__SENTENCE_BYTES];
        uint32_t other = 0;
        while (all[other].bytes == all[0].bytes && all[other].root == all[0].root) other++;
        snprintf(text, sizeof text,
                 "rank 0: side channel #%" PRIu64 " of %" PRIu64 " bytes from rank %" PRIu64 "; rank %" PRIu32
                 ": side channel #%" PRIu64 " of %" PRIu64 " bytes from rank %" PRIu64,
                 s->n_calls, all[0].bytes, all[0].root, other, s->n_calls, all[other].bytes, all[other].root);
        keep(s, FSDP_ERR_MISMATCH, text); /* the others see it themselves */
        return own_check(s);
    }
    for (uint32_t r = 0; r < s->world; r++)
        if (all[r].need > 0)
            return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY,
                              "side channel #%" PRIu64 " of %" PRIu64 " bytes: rank %" PRIu32
                              " has no host memory for %" PRIu64 " bytes, so no rank gets a result",
                              s->n_calls, mine->bytes, r, all[r].need);
    return FSDP_OK;
}

static fsdp_status own_broadcast(void *side, void *data, size_t bytes, uint32_t root, uint64_t timeout_ns)
{
    own_side *s = side;
    if (root >= s->world)
        return fsdp__fail(FSDP_ERR_ARG, "side channel: root %" PRIu32 " in a world of %" PRIu32, root, s->world);
    if (s->world == 1) return own_check(s);
    size_t each = bytes > 0 ? bytes : 1;
    ballot *ballots = (void *)(s + 1);
    unsigned char *all = fsdp__host_alloc(s->host, s->world, each);
    ballot mine = {bytes, root, all == NULL ? (uint64_t)s->world * each : 0};
    fsdp_status status = agree(s, &mine, ballots, timeout_ns);
    if (status == FSDP_OK) status = gather(s, data, all, bytes, timeout_ns);
    if (status == FSDP_OK && bytes > 0 && root != s->rank) memcpy(data, all + root * bytes, bytes);
    fsdp__host_free(s->host, all, s->world, each);
    return status;
}

static void own_close(void *side)
{
    own_side *s = side;
    pthread_mutex_destroy(&s->lock);
    fsdp__host_free(s->host, s, sizeof *s + s->world * sizeof(ballot), 1);
}

/* The caller's function puts rank r's blob in place r. */
static fsdp_status try_it(own_side *s, uint64_t timeout_ns)
{
    ballot mine = {s->rank, s->world, 0}, *all = (void *)(s + 1);
    if (s->world == 1) return FSDP_OK;
    FSDP_TRY(ask(s, &mine, all, sizeof mine, timeout_ns));
    s->n_calls = 0;
    for (uint32_t r = 0; r < s->world; r++)
        if (all[r].bytes != r || all[r].root != s->world)
            return fsdp__fail(FSDP_ERR_MISMATCH,
                              "the caller's all_gather brought rank %" PRIu64 " of %" PRIu64 " in place %" PRIu32
                              " of %" PRIu32,
                              all[r].bytes, all[r].root, r, s->world);
    return FSDP_OK;
}

static fsdp_status own_open(const fsdp_side_args *args, void **out_side, uint32_t *out_rank, uint32_t *out_world)
{
    const fsdp__star_config *config = args->backend_config;
    if (config == NULL || config->launch == NULL || config->own == NULL)
        return fsdp__fail(FSDP_ERR_ARG, "side channel: launch or the caller's own channel is NULL");
    fsdp_launch launch = FSDP_LAUNCH_INIT;
    FSDP_TRY(fsdp__read_config("fsdp_launch", &launch, sizeof launch, config->launch, sizeof launch));
    fsdp_side_channel channel = {.size = sizeof channel};
    FSDP_TRY(fsdp__read_config("fsdp_side_channel", &channel, sizeof channel, config->own, sizeof channel));
    if (launch.world == 0 || launch.world > FSDP__MAX_WORLD || launch.rank >= launch.world)
        return fsdp__fail(FSDP_ERR_ARG,
                          "side channel: rank %" PRIu32 " of a world of %" PRIu32 "; 1 to %d ranks are possible",
                          launch.rank, launch.world, FSDP__MAX_WORLD);
    if (channel.all_gather == NULL) return fsdp__fail(FSDP_ERR_ARG, "fsdp_side_channel.all_gather is NULL");
    size_t bytes = sizeof(own_side) + launch.world * sizeof(ballot);
    own_side *s = fsdp__host_alloc(args->host, bytes, 1);
    if (s == NULL)
        return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "side channel: rank %" PRIu32 " has no host memory for %zu bytes",
                          launch.rank, bytes);
    s->channel = channel;
    s->host = args->host;
    s->rank = launch.rank;
    s->world = launch.world;
    pthread_mutex_init(&s->lock, NULL);
    fsdp_status status = try_it(s, args->timeout_ns);
    if (status != FSDP_OK) {
        own_close(s);
        return status;
    }
    s->failed = args->failed;
    s->failed_arg = args->failed_arg;
    *out_side = s;
    *out_rank = s->rank;
    *out_world = s->world;
    return FSDP_OK;
}

const fsdp_side_ops fsdp__own_side_ops = {
    .size = sizeof fsdp__own_side_ops,
    .open = own_open,
    .close = own_close,
    .all_gather = own_all_gather,
    .broadcast = own_broadcast,
    .fail = own_fail,
    .check = own_check,
};
