/* SPDX-License-Identifier: MIT */
/* What each rank did last. A rank tells its newest calls, as many as its blob has room for: each with the rolling hash after
 * it, so that two ranks agree on everything up to a call if and only if they agree on that one number. The first number on
 * which two ranks differ is the first difference. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "order.h"

enum {
    HEAD_BYTES = 112,
    HOST_BYTES = 48,
    MAX_RECORD_BYTES = 5 + 3 * 10 + 4 + 2 + 48 + 16,
    WINDOW = 256, /* numbers among which the first difference is looked for */
    ROOM_BYTES = 4096,
    TEXT_BYTES = 256
};

typedef enum host_state {
    HOST_NONE = 0, /* no host call, or an older one than the newest collective */
    HOST_INSIDE = 1,
    HOST_RETURNED = 2
} host_state;

typedef struct head {
    uint64_t n[FSDP__N_COMMS], hash[FSDP__N_COMMS];
    uint32_t n_bytes; /* of the records that follow */
    uint8_t host;     /* host_state */
    char host_call[HOST_BYTES];
} head;

_Static_assert(sizeof(head) <= HEAD_BYTES, "the head of a blob");

/* One collective of a blob. */
typedef struct record {
    fsdp__call call;
    uint32_t comm, rolling; /* rolling: its lower half */
} record;

/* ---- Telling ---- */

static unsigned char *put_number(unsigned char *at, uint64_t number)
{
    for (; number >= 0x80; number >>= 7) *at++ = (unsigned char)(number | 0x80);
    *at++ = (unsigned char)number;
    return at;
}

static unsigned char *put_name(unsigned char *at, const char *name, size_t bytes)
{
    size_t n = strnlen(name, bytes);
    *at++ = (unsigned char)n;
    memcpy(at, name, n);
    return at + n;
}

static unsigned char *put_record(unsigned char *at, const fsdp__flight_entry *entry)
{
    const fsdp__call *c = &entry->call;
    const unsigned char bytes[] = {(unsigned char)fsdp__flight_comm(entry), c->kind, c->dtype, c->part, c->n_parts};
    uint32_t rolling = (uint32_t)entry->rolling;
    memcpy(at, bytes, sizeof bytes);
    memcpy(at + sizeof bytes, &rolling, sizeof rolling);
    at = put_number(at + sizeof bytes + sizeof rolling, c->number);
    at = put_number(at, c->count);
    at = put_number(at, c->root);
    return put_name(put_name(at, c->label, sizeof c->label - 1), c->pass, sizeof c->pass - 1);
}

/* Newest first, until one does not fit or has gone. */
static void tell(void *arg, void *blob)
{
    const fsdp_context *ctx = arg;
    const fsdp__flight *flight = &ctx->flight;
    head h = {.host = HOST_NONE};
    unsigned char *begin = (unsigned char *)blob + HEAD_BYTES, *at = begin;
    memset(blob, 0, FSDP__ORDER_BLOB_BYTES);
    for (uint32_t c = 0; c < FSDP__N_COMMS; c++) fsdp__flight_count(flight, c, &h.n[c], &h.hash[c]);
    uint64_t inside = atomic_load(&flight->inside), end = atomic_load(&flight->n);
    bool host_known = false;
    for (uint64_t i = end; i-- > (end > FSDP_FLIGHT_CALLS ? end - FSDP_FLIGHT_CALLS : 0);) {
        fsdp__flight_entry entry;
        if (!fsdp__flight_read(flight, i, &entry)) break;
        bool is_inside = inside == i + 1;
        if (fsdp__flight_comm(&entry) < FSDP__N_COMMS) {
            if (at + MAX_RECORD_BYTES <= (unsigned char *)blob + FSDP__ORDER_BLOB_BYTES) at = put_record(at, &entry);
        } else if (!host_known && (is_inside || at == begin)) {
            h.host = is_inside ? HOST_INSIDE : HOST_RETURNED;
            memcpy(h.host_call, entry.call.label, HOST_BYTES);
        }
        host_known |= h.host != HOST_NONE;
    }
    h.n_bytes = (uint32_t)(at - begin);
    memcpy(blob, &h, sizeof h);
}

/* ---- Reading ---- */

/* The records of one rank's blob. It came from another process: nothing in it is believed. */
typedef struct reader {
    const unsigned char *at, *end;
} reader;

static bool open_blob(const void *blob, head *out_head, reader *out_reader)
{
    if (blob == NULL) return false;
    memcpy(out_head, blob, sizeof *out_head);
    out_head->host_call[HOST_BYTES - 1] = '\0';
    uint32_t n = out_head->n_bytes, most = FSDP__ORDER_BLOB_BYTES - HEAD_BYTES;
    out_reader->at = (const unsigned char *)blob + HEAD_BYTES;
    out_reader->end = out_reader->at + (n < most ? n : most);
    return true;
}

static bool get_bytes(reader *r, void *to, size_t n)
{
    if ((size_t)(r->end - r->at) < n) return false;
    memcpy(to, r->at, n);
    r->at += n;
    return true;
}

static bool get_number(reader *r, uint64_t *out_number)
{
    unsigned char byte;
    *out_number = 0;
    for (unsigned shift = 0; shift < 64; shift += 7) {
        if (!get_bytes(r, &byte, 1)) return false;
        *out_number |= (uint64_t)(byte & 0x7f) << shift;
        if (byte < 0x80) return true;
    }
    return false;
}

static bool get_name(reader *r, char *name, size_t bytes)
{
    unsigned char n;
    return get_bytes(r, &n, 1) && n < bytes && get_bytes(r, name, n);
}

static bool next_record(reader *r, record *out_record)
{
    unsigned char bytes[5];
    uint64_t root;
    *out_record = (record){.comm = 0};
    fsdp__call *c = &out_record->call;
    if (!get_bytes(r, bytes, sizeof bytes) || !get_bytes(r, &out_record->rolling, sizeof out_record->rolling) ||
        !get_number(r, &c->number) || !get_number(r, &c->count) || !get_number(r, &root) ||
        !get_name(r, c->label, sizeof c->label) || !get_name(r, c->pass, sizeof c->pass))
        return false;
    out_record->comm = bytes[0];
    c->kind = bytes[1], c->dtype = bytes[2], c->part = bytes[3], c->n_parts = bytes[4];
    c->root = (uint32_t)root;
    return bytes[0] < FSDP__N_COMMS;
}

/* ---- The sentence ---- */

typedef struct text {
    char *data;
    size_t at, bytes; /* at stays below bytes */
} text;

#define put(t, ...) fsdp__put((t)->data, (t)->bytes, &(t)->at, __VA_ARGS__)

/* What ranks say; what several say is kept once. More than fits here would not fit into the sentence either. */
typedef struct sayings {
    const char *of[FSDP__MAX_WORLD];
    char room[ROOM_BYTES];
    size_t used;
} sayings;

static void say(sayings *s, uint32_t rank, const char *what)
{
    for (const char *old = s->room; old < s->room + s->used; old += strlen(old) + 1) {
        if (strcmp(old, what) != 0) continue;
        s->of[rank] = old;
        return;
    }
    size_t n = strlen(what) + 1;
    if (s->used + n > ROOM_BYTES) return;
    s->of[rank] = memcpy(s->room + s->used, what, n);
    s->used += n;
}

static void put_sayings(text *t, const sayings *s, uint32_t world)
{
    fsdp__put_said(t->data + t->at, t->bytes - t->at, s->of, world);
    t->at += strlen(t->data + t->at);
}

static void describe(const record *r, char *what, size_t bytes)
{
    fsdp__call_describe(&r->call, what, bytes);
    size_t n = strlen(what);
    if (r->comm > 0) snprintf(what + n, bytes - n, " on communicator %" PRIu32, r->comm);
}

/* What all ranks that tell of it have told of one number: the hash after the last of its group. */
typedef struct known {
    uint32_t hash, n_ranks;
    bool differs;
} known;

/* The most that two ranks have got to: beyond it there is nothing to compare. */
static uint64_t second_most(const void *const *blobs, uint32_t world, uint32_t comm)
{
    uint64_t most = 0, second = 0;
    for (uint32_t r = 0; r < world; r++) {
        head h;
        reader records;
        if (!open_blob(blobs[r], &h, &records)) continue;
        uint64_t n = h.n[comm];
        if (n > most) second = most, most = n;
        else if (n > second) second = n;
    }
    return second;
}

/* Of the numbers first … first + WINDOW - 1 that several ranks tell of. */
static void collect(const void *const *blobs, uint32_t world, uint32_t comm, uint64_t first, known *table)
{
    for (uint32_t r = 0; r < world; r++) {
        head h;
        reader records;
        record rec;
        if (!open_blob(blobs[r], &h, &records)) continue;
        while (next_record(&records, &rec)) {
            uint64_t i = rec.call.number - first;
            if (rec.comm != comm || i >= WINDOW || rec.call.part + 1 != rec.call.n_parts) continue;
            table[i].differs |= table[i].n_ranks > 0 && table[i].hash != rec.rolling;
            table[i].hash = rec.rolling;
            table[i].n_ranks++;
        }
    }
}

/* The record of a rank for one part of a group; false: it does not tell of it. */
static bool find(const void *blob, uint32_t comm, uint64_t number, uint32_t part, record *out_record)
{
    head h;
    reader records;
    if (!open_blob(blob, &h, &records)) return false;
    while (next_record(&records, out_record))
        if (out_record->comm == comm && out_record->call.number == number && out_record->call.part == part) return true;
    return false;
}

/* Group `number` is not the same on all ranks: the first of its parts that is not. */
static uint32_t first_part(const void *const *blobs, uint32_t world, uint32_t comm, uint64_t number)
{
    for (uint32_t part = 0; part < UINT8_MAX; part++) {
        record first = {.comm = 0}, other;
        uint32_t n = 0;
        for (uint32_t r = 0; r < world; r++) {
            if (!find(blobs[r], comm, number, part, n == 0 ? &first : &other)) continue;
            if (n++ > 0 && other.rolling != first.rolling) return part;
        }
        if (n == 0) break;
    }
    return 0;
}

/* "First difference: rank 0: …; ranks 1 to 3: …. ", unless that is the sentence itself. */
static void put_difference(text *t, const char *sentence, const void *const *blobs, uint32_t world, uint32_t comm)
{
    known table[WINDOW] = {{0, 0, false}};
    uint64_t last = second_most(blobs, world, comm), first = last > WINDOW ? last - WINDOW + 1 : 1;
    collect(blobs, world, comm, first, table);
    uint32_t i = 0;
    while (i < WINDOW && !table[i].differs) i++;
    if (i == WINDOW) return;
    uint64_t number = first + i;
    /* Only what came before can say that this is the first. */
    bool is_first = number == 1 || (i > 0 && table[i - 1].n_ranks > 1);
    if (!is_first) {
        put(t, "Calls%s differ before #%" PRIu64 " already, where nothing is kept. ",
            comm > 0 ? " on communicator 1" : "", number);
        return;
    }
    sayings s = {.used = 0};
    uint32_t part = first_part(blobs, world, comm, number);
    for (uint32_t r = 0; r < world; r++) {
        char what[TEXT_BYTES];
        record rec;
        if (!find(blobs[r], comm, number, part, &rec)) continue;
        describe(&rec, what, sizeof what);
        say(&s, r, what);
    }
    text before = *t;
    put(t, "First difference: ");
    size_t at = t->at;
    put_sayings(t, &s, world);
    if (t->at > at && strstr(sentence, t->data + at) != NULL) {
        *t = before;
        t->data[t->at] = '\0';
        return;
    }
    put(t, ". ");
}

/* "#812 all-gather of h.0 in TRAIN (…), inside fsdp_barrier_host". */
static void describe_last(const void *blob, char *what, size_t bytes)
{
    head h;
    reader records;
    record rec;
    (void)open_blob(blob, &h, &records);
    if (next_record(&records, &rec)) describe(&rec, what, bytes);
    else snprintf(what, bytes, "no collective");
    size_t n = strlen(what);
    if (h.host == HOST_INSIDE) snprintf(what + n, bytes - n, ", inside %s", h.host_call);
    if (h.host == HOST_RETURNED) snprintf(what + n, bytes - n, ", then %s, which has returned", h.host_call);
}

static void compose(void *arg, const char *sentence, const void *const *blobs, uint32_t world, char *out, size_t bytes)
{
    (void)arg;
    if (bytes == 0) return;
    out[0] = '\0';
    text t = {out, 0, bytes};
    if (world > FSDP__MAX_WORLD) world = FSDP__MAX_WORLD;
    for (uint32_t comm = 0; comm < FSDP__N_COMMS; comm++) put_difference(&t, sentence, blobs, world, comm);
    sayings s = {.used = 0};
    bool silent[FSDP__MAX_WORLD] = {false};
    uint32_t n_silent = 0;
    for (uint32_t r = 0; r < world; r++) {
        char what[TEXT_BYTES];
        silent[r] = blobs[r] == NULL;
        n_silent += silent[r];
        if (silent[r]) continue;
        describe_last(blobs[r], what, sizeof what);
        say(&s, r, what);
    }
    if (n_silent < world) put(&t, "Last: ");
    put_sayings(&t, &s, world);
    if (n_silent == 0) return;
    if (n_silent < world) put(&t, "; ");
    t.at += fsdp__put_ranks(t.data + t.at, t.bytes - t.at, silent, world);
    put(&t, " did not answer");
}

fsdp_side_words fsdp__order_words(fsdp_context *ctx)
{
    return (fsdp_side_words){ctx, FSDP__ORDER_BLOB_BYTES, tell, compose};
}
