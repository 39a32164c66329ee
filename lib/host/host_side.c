/* SPDX-License-Identifier: MIT */
/* The side channel. Between processes it is the star of lib/net, or the caller's own; between threads a room: small blobs,
 * read from where their ranks have them. */
#include <stdio.h>
#include <string.h>

#include "check.h"
#include "host.h"
#include "hostmem.h"
#include "net/star.h"

typedef struct side {
    const fsdp_side_ops *other; /* who does it; NULL: this file */
    void *other_side;

    const fsdp_host_allocator *host;
    fsdp__place *place;
    fsdp__room room;
    uint32_t rank, world;
    uint64_t n_calls;
    fsdp_side_words words;
} side;

/* What a rank brings: address and size of its blob. root: whose blob it is that all want; the world if everybody's. */
typedef struct blob {
    const void *data;
    size_t bytes;
    uint64_t number;
    uint32_t root, world;
} blob;

static bool same(const void *a_, const void *b_, uint32_t *out_place)
{
    const blob *a = a_, *b = b_;
    *out_place = 0;
    return a->bytes == b->bytes && a->root == b->root;
}

static void say(const void *item, uint32_t place, char *text, size_t bytes)
{
    (void)place;
    const blob *b = item;
    char from[32] = "";
    if (b->root < b->world) snprintf(from, sizeof from, " from rank %u", b->root);
    snprintf(text, bytes, "side channel #%llu of %zu bytes%s", (unsigned long long)b->number, b->bytes, from);
}

static const fsdp__room_kind kind = {same, say, sizeof(blob)};
_Static_assert(sizeof(blob) <= FSDP__ROOM_ITEM_BYTES, "an item");

/* ---- Words ---- */

/* Puts behind the sentence what every rank did last. Blobs come from host memory; without any the sentence stays as it is. */
static void ask_all(void *arg, char *sentence, size_t bytes)
{
    side *s = arg;
    size_t each = s->words.bytes, length = strlen(sentence);
    if (each == 0 || length + 8 > bytes) return;
    char *blobs = fsdp__host_alloc(s->host, s->world, each);
    if (blobs == NULL) return;
    const void *told[FSDP__ROOM_WORLD] = {NULL};
    fsdp__tellers *tellers = fsdp__place_tellers(s->place);
    pthread_mutex_lock(&tellers->lock);
    for (uint32_t r = 0; r < s->world; r++) {
        const fsdp_side_words *words = &tellers->words[r];
        if (words->tell == NULL || words->bytes != each) continue;
        words->tell(words->arg, blobs + r * each);
        told[r] = blobs + r * each;
    }
    pthread_mutex_unlock(&tellers->lock);
    s->words.compose(s->words.arg, sentence, told, s->world, sentence + length + 2, bytes - length - 2);
    if (sentence[length + 2] != '\0') memcpy(sentence + length, ". ", 2);
    fsdp__host_free(s->host, blobs, s->world, each);
}

static void set_teller(side *s, fsdp_side_words words)
{
    fsdp__tellers *tellers = fsdp__place_tellers(s->place);
    pthread_mutex_lock(&tellers->lock);
    tellers->words[s->rank] = words;
    pthread_mutex_unlock(&tellers->lock);
}

/* ---- The table ---- */

static fsdp_status open_room(side *s, const fsdp_side_args *args, const fsdp__host_setup *setup)
{
    s->host = args->host;
    s->rank = setup->rank;
    s->world = setup->world;
    FSDP_TRY(fsdp__place_join(setup->config.local, s->rank, args->host, FSDP__ROOM_SIDE, args->timeout_ns, &s->place));
    fsdp__room_init(&s->room, fsdp__place_shared(s->place), &kind, s->rank, s->world, false, args->timeout_ns);
    s->words = args->words;
    s->room.more = ask_all;
    s->room.more_arg = s;
    set_teller(s, args->words);
    return FSDP_OK;
}

static fsdp_status open_other(side *s, const fsdp_side_args *args, const fsdp_host_config *config, uint32_t *out_rank,
                              uint32_t *out_world)
{
    fsdp__star_config star = {config->launch, config->side, -1};
    fsdp_side_args theirs = *args;
    theirs.backend_config = &star;
    s->other = config->side != NULL ? &fsdp__own_side_ops : &fsdp__star_side_ops;
    return s->other->open(&theirs, &s->other_side, out_rank, out_world);
}

static fsdp_status side_open(const fsdp_side_args *args, void **out_side, uint32_t *out_rank, uint32_t *out_world)
{
    fsdp__host_setup setup;
    FSDP_TRY(fsdp__host_setup_read(args->backend_config, &setup));
    side *s = fsdp__host_alloc(args->host, 1, sizeof *s);
    if (s == NULL) return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "side channel: no host memory for %zu bytes", sizeof *s);
    s->host = args->host;
    uint32_t rank = setup.rank, world = setup.world;
    fsdp_status status =
        setup.config.launch != NULL ? open_other(s, args, &setup.config, &rank, &world) : open_room(s, args, &setup);
    if (status != FSDP_OK) {
        fsdp__host_free(args->host, s, 1, sizeof *s);
        return status;
    }
    *out_side = s;
    *out_rank = rank;
    *out_world = world;
    return FSDP_OK;
}

static void side_close(void *side_)
{
    side *s = side_;
    if (s->other != NULL) {
        s->other->close(s->other_side);
    } else {
        set_teller(s, (fsdp_side_words){NULL, 0, NULL, NULL});
        fsdp__room_quit(&s->room);
        fsdp__place_leave(s->place);
    }
    fsdp__host_free(s->host, s, 1, sizeof *s);
}

static fsdp_status all_gather(void *side_, const void *mine, void *all, size_t bytes, uint64_t timeout_ns)
{
    side *s = side_;
    if (s->other != NULL) return s->other->all_gather(s->other_side, mine, all, bytes, timeout_ns);
    blob item = {mine, bytes, ++s->n_calls, s->world, s->world};
    uint64_t start_ns, end_ns;
    FSDP_TRY(fsdp__room_enter(&s->room, item.number, &item, timeout_ns, &start_ns));
    for (uint32_t r = 0; r < s->world; r++) {
        const blob *theirs = fsdp__room_item(&s->room, r);
        char *to = (char *)all + r * bytes;
        if (bytes > 0 && theirs->data != to) memcpy(to, theirs->data, bytes);
    }
    FSDP_TRY(fsdp__room_sync(&s->room, false));
    return fsdp__room_leave(&s->room, 0, &end_ns);
}

static fsdp_status broadcast(void *side_, void *data, size_t bytes, uint32_t root, uint64_t timeout_ns)
{
    side *s = side_;
    if (s->other != NULL) return s->other->broadcast(s->other_side, data, bytes, root, timeout_ns);
    blob item = {data, bytes, ++s->n_calls, root, s->world};
    uint64_t start_ns, end_ns;
    FSDP_TRY(fsdp__room_enter(&s->room, item.number, &item, timeout_ns, &start_ns));
    const blob *theirs = fsdp__room_item(&s->room, root);
    if (bytes > 0 && s->rank != root) memcpy(data, theirs->data, bytes);
    FSDP_TRY(fsdp__room_sync(&s->room, false));
    return fsdp__room_leave(&s->room, 0, &end_ns);
}

static void side_fail(void *side_, fsdp_status status, const char *sentence)
{
    side *s = side_;
    if (s->other != NULL) s->other->fail(s->other_side, status, sentence);
    else (void)fsdp__room_fail(&s->room, status, "%s", sentence);
}

static fsdp_status side_check(void *side_)
{
    side *s = side_;
    return s->other != NULL ? s->other->check(s->other_side) : fsdp__room_check(&s->room);
}

const fsdp_side_ops fsdp__host_side_ops = {
    .size = sizeof fsdp__host_side_ops,
    .open = side_open,
    .close = side_close,
    .all_gather = all_gather,
    .broadcast = broadcast,
    .fail = side_fail,
    .check = side_check,
};
