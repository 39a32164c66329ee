/* SPDX-License-Identifier: MIT */
/* The table, and what all parts of the star stand on. */
#include <inttypes.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "hostmem.h"
#include "star_parts.h"

/* The end of time is where timespec and all sums still hold. */
uint64_t fsdp__star_after(uint64_t from_ns, uint64_t by_ns)
{
    const uint64_t end_ns = (uint64_t)INT64_MAX / 2;
    return by_ns < end_ns - from_ns ? from_ns + by_ns : end_ns;
}

/* ---- Memory: one allocation ---- */

static void *cut(unsigned char *base, size_t *at, size_t n, size_t each)
{
    void *part = base != NULL ? base + *at : NULL;
    *at += (n * each + 63) / 64 * 64;
    return part;
}

/* Where everything lies in the allocation; base NULL: only how long it is. */
static size_t lay_out(fsdp__star *s, unsigned char *base)
{
    size_t at = 0, world = s->world;
    bool hub = fsdp__star_is_hub(s), alone = world == 1;
    (void)cut(base, &at, 1, sizeof *s);
    s->n_links = alone ? 0 : hub ? s->world : 1;
    s->links = cut(base, &at, s->n_links, sizeof *s->links);
    s->polls = cut(base, &at, hub && !alone ? 1 + FSDP__PENDING + world : 2, sizeof *s->polls);
    s->pending = cut(base, &at, hub && !alone ? FSDP__PENDING : 0, sizeof *s->pending);
    s->said = cut(base, &at, hub ? world : 0, sizeof *s->said);
    s->answered = cut(base, &at, hub ? world : 0, sizeof *s->answered);
    s->told_blobs = cut(base, &at, hub ? world : 0, sizeof *s->told_blobs);
    s->blobs = cut(base, &at, hub ? world : 1, s->words.bytes);
    for (int i = 0; i < 2; i++) s->base[i] = cut(base, &at, world, FSDP__SMALL_BYTES);
    return at;
}

static fsdp__star *star_create(const fsdp_side_args *args, const fsdp_launch *launch, size_t *out_bytes)
{
    fsdp__star plan = {.rank = launch->rank, .world = launch->world, .words = args->words};
    *out_bytes = lay_out(&plan, NULL);
    unsigned char *base = fsdp__host_alloc(args->host, *out_bytes, 1);
    if (base == NULL) return NULL;
    fsdp__star *s = (fsdp__star *)(void *)base;
    s->rank = launch->rank;
    s->world = launch->world;
    s->words = args->words;
    s->host = args->host;
    s->bytes = lay_out(s, base);
    s->failed = args->failed;
    s->failed_arg = args->failed_arg;
    s->wake_fd = -1;
    s->number = 1;
    for (uint32_t r = 0; r < s->n_links; r++) fsdp__link_open(&s->links[r], -1, r);
    fsdp__cond_init(&s->changed);
    pthread_mutex_init(&s->lock, NULL);
    return s;
}

static void star_close(void *star)
{
    fsdp__star *s = star;
    if (s->has_thread) fsdp__star_stop_thread(s);
    for (uint32_t r = 0; r < s->n_links; r++) fsdp__link_close(&s->links[r]);
    if (s->wake_fd >= 0) close(s->wake_fd);
    for (int i = 0; i < 2; i++) fsdp__host_free(s->host, s->large[i], s->large_bytes[i], 1);
    pthread_cond_destroy(&s->changed);
    pthread_mutex_destroy(&s->lock);
    fsdp__host_free(s->host, s, s->bytes, 1);
}

/* ---- The table ---- */

static fsdp_status read_launch(const fsdp_side_args *args, fsdp_launch *launch, int *out_listener)
{
    const fsdp__star_config *config = args->backend_config;
    if (config == NULL || config->launch == NULL) return fsdp__fail(FSDP_ERR_ARG, "side channel: launch is NULL");
    *launch = (fsdp_launch)FSDP_LAUNCH_INIT;
    FSDP_TRY(fsdp__read_config("fsdp_launch", launch, sizeof *launch, config->launch, sizeof *launch));
    if (launch->world == 0 || launch->world > FSDP__MAX_WORLD || launch->rank >= launch->world)
        return fsdp__fail(FSDP_ERR_ARG,
                          "side channel: rank %" PRIu32 " of a world of %" PRIu32 "; 1 to %d ranks are possible",
                          launch->rank, launch->world, FSDP__MAX_WORLD);
    *out_listener = launch->rank == 0 ? config->listener : -1;
    if (memchr(launch->address, 0, sizeof launch->address) == NULL)
        return fsdp__fail(FSDP_ERR_ARG, "side channel: the address has no end");
    FSDP_TRY(fsdp__place_check(launch));
    bool has_port = launch->port != 0 || launch->address[0] == '@' || *out_listener >= 0;
    if (launch->world > 1 && ((launch->address[0] == '\0' && *out_listener < 0) || !has_port))
        return fsdp__fail(FSDP_ERR_ARG,
                          "side channel: rank %" PRIu32 " of %" PRIu32
                          " knows no %s where rank 0 listens: give MASTER_ADDR "
                          "and MASTER_PORT, or fill fsdp_launch",
                          launch->rank, launch->world, launch->address[0] == '\0' ? "address" : "port");
    return FSDP_OK;
}

static fsdp_status no_memory(const fsdp_launch *launch, size_t bytes)
{
    return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "side channel: rank %" PRIu32 " has no host memory for %zu bytes",
                      launch->rank, bytes);
}

static fsdp_status open_hub(fsdp__star *s, const fsdp_launch *launch, int listener, uint64_t timeout_ns)
{
    uint64_t deadline_ns = fsdp__star_after(fsdp__now_ns(), timeout_ns);
    if (listener < 0) FSDP_TRY(fsdp__place_listen(launch, deadline_ns, &listener));
    return fsdp__star_form(s, launch, listener, timeout_ns);
}

static fsdp_status open_member(fsdp__star *s, const fsdp_launch *launch, uint64_t timeout_ns)
{
    int fd;
    FSDP_TRY(fsdp__star_join(launch, 0, timeout_ns, &fd));
    fsdp__link_open(&s->links[0], fd, 0);
    fsdp_status status = fsdp__star_start_thread(s);
    if (status == FSDP_OK) return FSDP_OK;
    /* The others wait for nothing: they hear why this rank is not there. */
    const char *why = fsdp_last_error();
    fsdp__frame frame = {FSDP__FRAME_FAIL, (uint32_t)status, 0, strlen(why)};
    if (frame.bytes > 0 && frame.bytes < FSDP__SENTENCE_BYTES) fsdp__link_send(s, &s->links[0], frame, NULL, 0, why);
    return status;
}

static fsdp_status star_open(const fsdp_side_args *args, void **out_side, uint32_t *out_rank, uint32_t *out_world)
{
    fsdp_launch launch;
    int listener = -1, fd;
    size_t bytes;
    FSDP_TRY(read_launch(args, &launch, &listener));
    fsdp__star *s = star_create(args, &launch, &bytes);
    if (s == NULL) {
        if (listener >= 0) close(listener);
        /* A member comes all the same, and says why it cannot stay; the hub's silence is named at the others' deadline. */
        if (launch.rank > 0) FSDP_IGNORE(fsdp__star_join(&launch, bytes, args->timeout_ns, &fd));
        return no_memory(&launch, bytes);
    }
    fsdp_status status = FSDP_OK;
    if (launch.world > 1) {
        status = launch.rank == 0 ? open_hub(s, &launch, listener, args->timeout_ns)
                                  : open_member(s, &launch, args->timeout_ns);
    } else if (listener >= 0) {
        close(listener);
    }
    if (status != FSDP_OK) {
        star_close(s);
        return status;
    }
    *out_side = s;
    *out_rank = s->rank;
    *out_world = s->world;
    return FSDP_OK;
}

static fsdp_status star_all_gather(void *star, const void *mine, void *all, size_t bytes, uint64_t timeout_ns)
{
    return fsdp__star_call(star, (fsdp__said){.what = FSDP__CALL_GATHER, .bytes = bytes}, mine, all, timeout_ns);
}

static fsdp_status star_broadcast(void *star, void *data, size_t bytes, uint32_t root, uint64_t timeout_ns)
{
    const fsdp__star *s = star;
    if (root >= s->world)
        return fsdp__fail(FSDP_ERR_ARG, "side channel: root %" PRIu32 " in a world of %" PRIu32, root, s->world);
    return fsdp__star_call(star, (fsdp__said){.what = FSDP__CALL_BROADCAST, .root = root, .bytes = bytes}, data, data,
                           timeout_ns);
}

static void star_fail(void *star, fsdp_status status, const char *sentence) { fsdp__star_fail(star, status, sentence); }

static fsdp_status star_check(void *star) { return fsdp__star_check(star); }

const fsdp_side_ops fsdp__star_side_ops = {
    .size = sizeof fsdp__star_side_ops,
    .open = star_open,
    .close = star_close,
    .all_gather = star_all_gather,
    .broadcast = star_broadcast,
    .fail = star_fail,
    .check = star_check,
};
