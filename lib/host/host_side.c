/* SPDX-License-Identifier: MIT */
/* The side channel between threads: small blobs, read from where their ranks have them. */
#include <stdio.h>
#include <string.h>

#include "check.h"
#include "host.h"
#include "hostmem.h"

typedef struct side {
    const fsdp_host_allocator *host;
    fsdp__room *room;
    uint32_t rank, world;
    uint64_t n_gathers;
} side;

typedef struct blob {
    const void *data;
    size_t bytes;
    uint64_t number;
} blob;

static bool same(const void *a_, const void *b_, uint32_t *out_place)
{
    const blob *a = a_, *b = b_;
    *out_place = 0;
    return a->bytes == b->bytes;
}

static void describe(const void *item, uint32_t place, char *text, size_t bytes)
{
    (void)place;
    const blob *b = item;
    snprintf(text, bytes, "side channel #%llu of %zu bytes", (unsigned long long)b->number, b->bytes);
}

static const fsdp__room_kind kind = {same, describe};

static fsdp_status side_open(const fsdp_side_args *args, void **out_side, uint32_t *out_rank, uint32_t *out_world)
{
    fsdp_host_config config;
    FSDP_TRY(fsdp__host_config_read(args->backend_config, &config));
    side *s = fsdp__host_alloc(args->host, 1, sizeof *s);
    if (s == NULL) return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "side channel: no host memory for %zu bytes", sizeof *s);
    s->host = args->host;
    s->rank = config.rank;
    s->world = fsdp__local_world(config.local);
    fsdp_status status = fsdp__room_join(&config, args->host, FSDP__ROOM_SIDE, &kind, args->timeout_ns, &s->room);
    if (status != FSDP_OK) {
        fsdp__host_free(args->host, s, 1, sizeof *s);
        return status;
    }
    *out_side = s;
    *out_rank = s->rank;
    *out_world = s->world;
    return FSDP_OK;
}

static void side_close(void *side_)
{
    side *s = side_;
    fsdp__room_quit(s->room, s->rank);
    fsdp__host_free(s->host, s, 1, sizeof *s);
}

static fsdp_status all_gather(void *side_, const void *mine, void *all, size_t bytes, uint64_t timeout_ns)
{
    side *s = side_;
    blob item = {mine, bytes, ++s->n_gathers};
    uint64_t start_ns, end_ns;
    FSDP_TRY(fsdp__room_enter(s->room, s->rank, item.number, &item, timeout_ns, &start_ns));
    for (uint32_t r = 0; r < s->world; r++) {
        const blob *theirs = fsdp__room_item(s->room, r);
        char *to = (char *)all + r * bytes;
        if (bytes > 0 && theirs->data != to) memcpy(to, theirs->data, bytes);
    }
    FSDP_TRY(fsdp__room_sync(s->room, false));
    return fsdp__room_leave(s->room, 0, &end_ns);
}

static fsdp_status broadcast(void *side_, void *data, size_t bytes, uint32_t root, uint64_t timeout_ns)
{
    side *s = side_;
    blob item = {data, bytes, ++s->n_gathers};
    uint64_t start_ns, end_ns;
    FSDP_TRY(fsdp__room_enter(s->room, s->rank, item.number, &item, timeout_ns, &start_ns));
    const blob *theirs = fsdp__room_item(s->room, root);
    if (bytes > 0 && s->rank != root) memcpy(data, theirs->data, bytes);
    FSDP_TRY(fsdp__room_sync(s->room, false));
    return fsdp__room_leave(s->room, 0, &end_ns);
}

static void side_fail(void *side_, fsdp_status status, const char *sentence)
{
    (void)fsdp__room_fail(((side *)side_)->room, status, "%s", sentence);
}

static fsdp_status side_check(void *side_) { return fsdp__room_check(((side *)side_)->room); }

const fsdp_side_ops fsdp__host_side_ops = {
    .size = sizeof fsdp__host_side_ops,
    .open = side_open,
    .close = side_close,
    .all_gather = all_gather,
    .broadcast = broadcast,
    .fail = side_fail,
    .check = side_check,
};
