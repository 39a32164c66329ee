/* SPDX-License-Identifier: MIT */
#include "fsdp_memory_read.h"

#include <cjson/cJSON.h>
#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *const fsdp__event_names[FSDP__EVENT_KINDS] = {"alloc", "free",  "wait",         "grow",
                                                          "trim",  "evict", "out_of_memory"};

/* Far more than any memory, and far from where sums would overflow. */
static const uint64_t most_bytes = (uint64_t)1 << 56;

/* The first complaint is kept; after it every getter gives nothing, so that callers need not ask after each. */
typedef struct reader {
    const char *path;
    char where[192]; /* "pool 2, segment 0, block 5: " */
    char *error;
    size_t error_bytes;
    bool failed;
} reader;

__attribute__((format(printf, 2, 3))) static void complain(reader *r, const char *format, ...)
{
    if (r->failed) return;
    r->failed = true;
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    snprintf(r->error, r->error_bytes, "%s: %s%s", r->path, r->where, text);
    for (char *c = r->error; *c != '\0'; c++)
        if (iscntrl((unsigned char)*c)) *c = '?';
}

static void *allocate(reader *r, size_t n, size_t each)
{
    void *ptr = r->failed ? NULL : calloc(n > 0 ? n : 1, each);
    if (ptr == NULL) complain(r, "no memory to read it");
    return ptr;
}

/* ---- Fields ---- */

static const cJSON *field(reader *r, const cJSON *object, const char *key)
{
    if (r->failed) return NULL;
    const cJSON *value = cJSON_GetObjectItemCaseSensitive(object, key);
    if (value == NULL) complain(r, "\"%s\" is missing", key);
    return value;
}

/* Counts above 2^53 are strings, since a reader may take numbers for doubles, as this one does. */
static bool to_count(const cJSON *value, uint64_t *out)
{
    if (cJSON_IsNumber(value)) {
        double d = value->valuedouble;
        if (!(d >= 0 && d <= 9007199254740992.0) || d != floor(d)) return false;
        *out = (uint64_t)d;
        return true;
    }
    if (!cJSON_IsString(value) || !isdigit((unsigned char)value->valuestring[0])) return false;
    char *end;
    errno = 0;
    *out = strtoull(value->valuestring, &end, 10);
    return errno == 0 && *end == '\0';
}

static uint64_t count(reader *r, const cJSON *object, const char *key)
{
    const cJSON *value = field(r, object, key);
    uint64_t n = 0;
    if (value != NULL && !to_count(value, &n)) {
        n = 0;
        complain(r, "\"%s\" is no count", key);
    }
    return n;
}

static uint64_t bytes(reader *r, const cJSON *object, const char *key)
{
    uint64_t n = count(r, object, key);
    if (n <= most_bytes) return n;
    complain(r, "\"%s\" is %llu bytes, more than any memory has", key, (unsigned long long)n);
    return 0;
}

static const char *word(reader *r, const cJSON *object, const char *key)
{
    const cJSON *value = field(r, object, key);
    if (value == NULL) return "";
    if (cJSON_IsString(value)) return value->valuestring;
    complain(r, "\"%s\" is no string", key);
    return "";
}

static bool truth(reader *r, const cJSON *object, const char *key)
{
    const cJSON *value = field(r, object, key);
    if (value != NULL && !cJSON_IsBool(value)) complain(r, "\"%s\" is neither true nor false", key);
    return value != NULL && cJSON_IsTrue(value);
}

/* An array of objects, or of strings. */
static const cJSON *list(reader *r, const cJSON *object, const char *key, bool of_objects)
{
    const cJSON *value = field(r, object, key), *each;
    if (value == NULL) return NULL;
    if (!cJSON_IsArray(value)) complain(r, "\"%s\" is no array", key);
    else cJSON_ArrayForEach(each, value)
        {
            if (of_objects ? !cJSON_IsObject(each) : !cJSON_IsString(each))
                complain(r, "\"%s\" holds something that is no %s", key, of_objects ? "object" : "string");
        }
    return r->failed ? NULL : value;
}

static const cJSON *object_in(reader *r, const cJSON *object, const char *key)
{
    const cJSON *value = field(r, object, key);
    if (value != NULL && !cJSON_IsObject(value)) complain(r, "\"%s\" is no object", key);
    return r->failed ? NULL : value;
}

static size_t length(const cJSON *array) { return array != NULL ? (size_t)cJSON_GetArraySize(array) : 0; }

/* ---- Blocks ---- */

static void read_points(reader *r, const cJSON *object, const char *key, fsdp__snapshot_piece *out)
{
    const cJSON *array = list(r, object, key, true), *each;
    out->points = allocate(r, length(array), sizeof *out->points);
    if (r->failed) return;
    cJSON_ArrayForEach(each, array)
    {
        out->points[out->n_points].stream = word(r, each, "stream");
        out->points[out->n_points++].epoch = count(r, each, "epoch");
    }
}

static void read_live(reader *r, const cJSON *block, fsdp__snapshot_piece *out)
{
    out->kind = FSDP__PIECE_LIVE;
    out->owner = word(r, block, "owner");
    out->stream = word(r, block, "stream");
    read_points(r, block, "uses", out);
    const cJSON *array = list(r, block, "until_free", false), *each;
    out->until_free = allocate(r, length(array), sizeof *out->until_free);
    if (r->failed) return;
    cJSON_ArrayForEach(each, array) out->until_free[out->n_until_free++] = each->valuestring;
}

static void read_fragment(reader *r, const cJSON *fragment, fsdp__snapshot_piece *out)
{
    out->offset = bytes(r, fragment, "offset");
    out->bytes = bytes(r, fragment, "bytes");
    out->stream = word(r, fragment, "stream");
    out->owner = "";
    out->freed = count(r, fragment, "freed");
    bool pending = truth(r, fragment, "pending");
    out->kind = pending ? FSDP__PIECE_PENDING : out->freed > 0 ? FSDP__PIECE_READY : FSDP__PIECE_UNUSED;
    read_points(r, fragment, "clock", out);
}

/* It begins where the last one ended. */
static void check_place(reader *r, const char *what, uint64_t offset, uint64_t n_bytes, uint64_t begin, uint64_t end)
{
    if (offset != begin)
        complain(r, "a %s begins at %llu, where the one before it ends at %llu", what, (unsigned long long)offset,
                 (unsigned long long)begin);
    else if (n_bytes == 0 || n_bytes > end - begin)
        complain(r, "a %s has %llu bytes, where there is room for 1 to %llu", what, (unsigned long long)n_bytes,
                 (unsigned long long)(end - begin));
}

static void read_free(reader *r, const cJSON *block, uint64_t range, fsdp__snapshot_segment *segment)
{
    uint64_t at = bytes(r, block, "offset"), range_bytes = bytes(r, block, "bytes"), end = at + range_bytes;
    const cJSON *array = list(r, block, "fragments", true), *each;
    if (r->failed) return;
    cJSON_ArrayForEach(each, array)
    {
        fsdp__snapshot_piece *piece = &segment->pieces[segment->n_pieces++];
        read_fragment(r, each, piece);
        check_place(r, "fragment", piece->offset, piece->bytes, at, end);
        if (r->failed) return;
        piece->range = range;
        piece->range_bytes = range_bytes;
        at += piece->bytes;
    }
    if (at != end)
        complain(r, "its fragments end at %llu, and not at %llu", (unsigned long long)at, (unsigned long long)end);
}

static bool is_live(reader *r, const cJSON *block)
{
    const char *state = word(r, block, "state");
    bool live = strcmp(state, "live") == 0;
    if (!live && strcmp(state, "free") != 0) complain(r, "\"state\" is \"%.40s\", neither live nor free", state);
    return live;
}

static size_t count_pieces(reader *r, const cJSON *blocks)
{
    size_t n = 0;
    const cJSON *block;
    cJSON_ArrayForEach(block, blocks) n += is_live(r, block) ? 1 : length(list(r, block, "fragments", true));
    return n;
}

static void read_blocks(reader *r, const cJSON *blocks, fsdp__snapshot_pool *pool, fsdp__snapshot_segment *segment)
{
    size_t used = strlen(r->where);
    uint64_t at = 0, n = 0;
    const cJSON *block;
    segment->pieces = allocate(r, count_pieces(r, blocks), sizeof *segment->pieces);
    cJSON_ArrayForEach(block, blocks)
    {
        if (r->failed) return;
        snprintf(r->where + used, sizeof r->where - used, "block %llu: ", (unsigned long long)n);
        uint64_t offset = bytes(r, block, "offset"), n_bytes = bytes(r, block, "bytes");
        check_place(r, "block", offset, n_bytes, at, segment->bytes);
        if (is_live(r, block)) {
            fsdp__snapshot_piece *piece = &segment->pieces[segment->n_pieces++];
            *piece = (fsdp__snapshot_piece){.offset = offset, .bytes = n_bytes, .range = n, .range_bytes = n_bytes};
            read_live(r, block, piece);
        } else {
            read_free(r, block, n, segment);
            pool->free_bytes += n_bytes;
            pool->free_ranges++;
            if (n_bytes > pool->largest_free) pool->largest_free = n_bytes;
        }
        at += n_bytes;
        n++;
    }
    r->where[used] = '\0';
    if (at != segment->bytes)
        complain(r, "its blocks end at %llu, and not at %llu", (unsigned long long)at,
                 (unsigned long long)segment->bytes);
}

/* ---- Pools ---- */

static void read_segments(reader *r, const cJSON *json, fsdp__snapshot_pool *pool)
{
    size_t used = strlen(r->where);
    uint64_t total = 0;
    const cJSON *array = list(r, json, "segments", true), *each;
    pool->segments = allocate(r, length(array), sizeof *pool->segments);
    cJSON_ArrayForEach(each, array)
    {
        if (r->failed) return;
        fsdp__snapshot_segment *segment = &pool->segments[pool->n_segments++];
        snprintf(r->where + used, sizeof r->where - used, "segment %zu: ", pool->n_segments - 1);
        segment->number = count(r, each, "number");
        segment->bytes = bytes(r, each, "bytes");
        total += segment->bytes;
        if (total > most_bytes) complain(r, "the segments add up to more than any memory has");
        read_blocks(r, list(r, each, "blocks", true), pool, segment);
        pool->n_pieces += segment->n_pieces;
    }
    r->where[used] = '\0';
    if (!r->failed && total != pool->reserved)
        complain(r, "the segments add up to %llu bytes, where \"reserved\" says %llu", (unsigned long long)total,
                 (unsigned long long)pool->reserved);
    if (!r->failed && total - pool->free_bytes != pool->allocated)
        complain(r, "live blocks add up to %llu bytes, where \"allocated\" says %llu",
                 (unsigned long long)(total - pool->free_bytes), (unsigned long long)pool->allocated);
    if (!r->failed && (pool->active < pool->allocated || pool->active > pool->reserved))
        complain(r, "\"active\" is not between \"allocated\" and \"reserved\"");
}

static void read_history(reader *r, const cJSON *json, fsdp__snapshot_pool *pool)
{
    size_t used = strlen(r->where);
    const cJSON *history = object_in(r, json, "history"), *array = list(r, history, "events", true), *each;
    pool->events_dropped = count(r, history, "dropped");
    pool->events = allocate(r, length(array), sizeof *pool->events);
    cJSON_ArrayForEach(each, array)
    {
        if (r->failed) return;
        fsdp__snapshot_event *event = &pool->events[pool->n_events++];
        snprintf(r->where + used, sizeof r->where - used, "event %zu: ", pool->n_events - 1);
        const char *what = word(r, each, "what");
        while (event->kind < FSDP__EVENT_KINDS && strcmp(what, fsdp__event_names[event->kind]) != 0) event->kind++;
        if (event->kind == FSDP__EVENT_KINDS) complain(r, "\"what\" is \"%.40s\", which is no kind of event", what);
        event->n = count(r, each, "n");
        event->bytes = bytes(r, each, "bytes");
        event->allocated = bytes(r, each, "allocated");
        event->reserved = bytes(r, each, "reserved");
        event->owner = word(r, each, "owner");
        event->stream = word(r, each, "stream");
        event->other = event->kind == FSDP__EVENT_WAIT ? word(r, each, "other") : "";
    }
    r->where[used] = '\0';
}

static void read_pool(reader *r, const cJSON *json, fsdp__snapshot_pool *pool)
{
    const cJSON *model = field(r, json, "model"), *stats = object_in(r, json, "stats");
    pool->name = word(r, json, "name");
    if (model != NULL && !cJSON_IsNull(model)) pool->model = word(r, json, "model");
    pool->policy = word(r, json, "policy");
    pool->budget = count(r, json, "budget");
    pool->segment_bytes = count(r, json, "segment_bytes");
    pool->allocated = bytes(r, stats, "allocated");
    pool->active = bytes(r, stats, "active");
    pool->reserved = bytes(r, stats, "reserved");
    pool->allocated_peak = bytes(r, stats, "allocated_peak");
    pool->active_peak = bytes(r, stats, "active_peak");
    pool->reserved_peak = bytes(r, stats, "reserved_peak");
    pool->allocs = count(r, stats, "allocs");
    pool->frees = count(r, stats, "frees");
    pool->waits = count(r, stats, "waits");
    pool->grows = count(r, stats, "grows");
    read_segments(r, json, pool);
    read_history(r, json, pool);
}

static void read_arenas(reader *r, const cJSON *json, fsdp__snapshot *out)
{
    static const char *const names[2] = {"host", "pinned"};
    const cJSON *arenas = object_in(r, json, "arenas");
    for (int i = 0; i < 2 && !r->failed; i++) {
        const cJSON *arena = cJSON_GetObjectItemCaseSensitive(arenas, names[i]);
        if (arena == NULL || cJSON_IsNull(arena)) continue; /* it keeps no statistics */
        arena = object_in(r, arenas, names[i]);
        out->arenas[out->n_arenas++] = (fsdp__snapshot_arena){names[i], bytes(r, arena, "allocated"),
                                                              bytes(r, arena, "active"), bytes(r, arena, "mapped")};
    }
}

static void read_snapshot(reader *r, const cJSON *json, fsdp__snapshot *out)
{
    if (!cJSON_IsObject(json) || !cJSON_HasObjectItem(json, "format") ||
        strcmp(word(r, json, "format"), "fsdp-memory") != 0) {
        r->failed = false;
        complain(r, "is JSON, but no memory snapshot: \"format\" is not \"fsdp-memory\"");
    }
    uint64_t version = count(r, json, "version");
    if (!r->failed && version != 1)
        complain(r, "has version %llu; this program knows version 1", (unsigned long long)version);
    out->rank = count(r, json, "rank");
    out->world = count(r, json, "world");
    out->backend = word(r, json, "backend");
    const cJSON *device = object_in(r, json, "device"), *pools = list(r, json, "pools", true), *each;
    out->device_bytes = bytes(r, device, "bytes");
    out->device_peak = bytes(r, device, "peak");
    out->pinned_bytes = bytes(r, device, "pinned");
    read_arenas(r, json, out);
    out->pools = allocate(r, length(pools), sizeof *out->pools);
    cJSON_ArrayForEach(each, pools)
    {
        if (r->failed) return;
        snprintf(r->where, sizeof r->where, "pool %zu: ", out->n_pools);
        read_pool(r, each, &out->pools[out->n_pools++]);
    }
    r->where[0] = '\0';
}

/* ---- The file ---- */

/* Whole, with a '\0' behind it; NULL and an error. */
static char *read_text(reader *r, size_t *out_bytes)
{
    FILE *file = fopen(r->path, "rb");
    if (file == NULL) {
        complain(r, "cannot be opened: %s", strerror(errno));
        return NULL;
    }
    size_t n = 0, capacity = 1 << 16;
    char *text = malloc(capacity);
    errno = 0;
    for (size_t got; text != NULL && (got = fread(text + n, 1, capacity - n - 1, file)) > 0;) {
        n += got;
        if (n + 1 < capacity) continue;
        char *grown = realloc(text, capacity *= 2);
        if (grown == NULL) free(text);
        text = grown;
    }
    if (text == NULL) complain(r, "no memory to read it");
    else if (ferror(file)) complain(r, "cannot be read: %s", strerror(errno));
    fclose(file);
    if (text != NULL) text[n] = '\0';
    *out_bytes = n;
    return text;
}

/* Brackets or a string are open at the end. */
static bool is_cut_off(const char *text, size_t n)
{
    long long depth = 0;
    bool in_string = false;
    for (size_t i = 0; i < n; i++) {
        if (in_string && text[i] == '\\') i++;
        else if (text[i] == '"') in_string = !in_string;
        else if (!in_string && (text[i] == '{' || text[i] == '[')) depth++;
        else if (!in_string && (text[i] == '}' || text[i] == ']')) depth--;
    }
    return depth > 0 || in_string;
}

static cJSON *parse(reader *r, const char *text, size_t n)
{
    size_t blank = strspn(text, " \t\r\n");
    if (blank == n) complain(r, "is empty");
    else if (strlen(text) != n) complain(r, "is not JSON: byte %zu is zero", strlen(text));
    if (r->failed) return NULL;
    const char *end = NULL;
    cJSON *json = cJSON_ParseWithLengthOpts(text, n + 1, &end, 1);
    if (json != NULL) return json;
    size_t at = end != NULL ? (size_t)(end - text) : 0;
    if ((text[blank] == '{' || text[blank] == '[') && is_cut_off(text, n))
        complain(r, "is cut off: the JSON is not complete after %zu bytes", n);
    else complain(r, "is not JSON: byte %zu does not belong there", at);
    return NULL;
}

bool fsdp__snapshot_read(const char *path, fsdp__snapshot *out, char *error, size_t error_bytes)
{
    reader r = {.path = path, .error = error, .error_bytes = error_bytes};
    *out = (fsdp__snapshot){0};
    size_t n = 0;
    char *text = read_text(&r, &n);
    if (!r.failed) out->json = parse(&r, text, n);
    free(text);
    if (!r.failed) read_snapshot(&r, out->json, out);
    if (r.failed) fsdp__snapshot_free(out);
    return !r.failed;
}

void fsdp__snapshot_free(fsdp__snapshot *snapshot)
{
    for (size_t p = 0; p < snapshot->n_pools; p++) {
        fsdp__snapshot_pool *pool = &snapshot->pools[p];
        for (size_t s = 0; s < pool->n_segments; s++) {
            fsdp__snapshot_segment *segment = &pool->segments[s];
            for (size_t i = 0; i < segment->n_pieces; i++) {
                free(segment->pieces[i].points);
                free(segment->pieces[i].until_free);
            }
            free(segment->pieces);
        }
        free(pool->segments);
        free(pool->events);
    }
    free(snapshot->pools);
    cJSON_Delete(snapshot->json);
    *snapshot = (fsdp__snapshot){0};
}
