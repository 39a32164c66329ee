/* SPDX-License-Identifier: MIT */
/* The snapshot of memory.h. It is put together as text under the context's lock, so that all pools are of one moment, and
 * written to the file without it. Nothing is changed by it, not even which fragments count as pending. */
#include "fsdp/memory.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "alloc.h"
#include "check.h"
#include "context.h"
#include "hostmem.h"
#include "new_file.h"
#include "svg.h"

enum { FEW = 256 }; /* bytes that one call of put may append */

/* ---- Text ---- */

typedef struct text {
    const fsdp_host_allocator *host;
    char *data;
    size_t n, capacity;
    bool failed;
} text;

__attribute__((format(printf, 2, 3))) static void put(text *t, const char *format, ...)
{
    if (!t->failed) t->failed = !fsdp__host_grow(t->host, &t->data, &t->capacity, t->n + FEW, 1);
    if (t->failed) return;
    va_list args;
    va_start(args, format);
    int n = vsnprintf(t->data + t->n, FEW, format, args);
    va_end(args);
    assert(n >= 0 && n < FEW);
    t->n += (size_t)n;
}

/* ,"key": */
static void put_key(text *t, const char *key)
{
    put(t, "%s\"%s\":", t->n > 0 && strchr("{[", t->data[t->n - 1]) == NULL ? "," : "", key);
}

static void put_bytes(text *t, const char *data, size_t n)
{
    if (!t->failed) t->failed = !fsdp__host_grow(t->host, &t->data, &t->capacity, t->n + n, 1);
    if (t->failed) return;
    memcpy(t->data + t->n, data, n);
    t->n += n;
}

/* Bytes that stand for themselves in a string. */
static size_t plain_bytes(const char *value)
{
    size_t n = 0;
    for (size_t more = 1; more > 0 && value[n] != '"' && value[n] != '\\'; n += more)
        more = fsdp__utf8_bytes(value + n);
    return n;
}

/* A name may hold anything: what is no character of UTF-8 becomes U+FFFD. */
static void put_string(text *t, const char *key, const char *value)
{
    if (key != NULL) put_key(t, key);
    put(t, "\"");
    for (;;) {
        size_t n = plain_bytes(value);
        put_bytes(t, value, n);
        value += n;
        if (*value == '\0') break;
        if (*value == '"' || *value == '\\') put(t, "\\%c", *value);
        else if ((unsigned char)*value < 0x80) put(t, "\\u%04x", (unsigned)*value);
        else put(t, "\\ufffd");
        value++;
    }
    put(t, "\"");
}

/* Above 2^53 a reader that takes numbers for doubles would lose digits. */
static void put_count(text *t, const char *key, uint64_t value)
{
    const char *quote = value > (uint64_t)1 << 53 ? "\"" : "";
    put_key(t, key);
    put(t, "%s%llu%s", quote, (unsigned long long)value, quote);
}

static void put_separator(text *t)
{
    if (!t->failed && t->data[t->n - 1] != '[') put(t, ",");
}

/* ---- Streams ---- */

/* Who was in the slot at that epoch; its slot may have another owner by now. epoch 0: who is there now. */
static const char *name_at(const fsdp_context *ctx, int slot, uint64_t epoch)
{
    if (slot >= FSDP__SLOTS) return "";
    const fsdp_stream *s = ctx->clocks.stream[slot];
    return s != NULL && (epoch == 0 || epoch > s->first_fence) ? s->name : "a released stream";
}

/* but: bit t leaves stream t out. */
static void put_points(text *t, const fsdp_context *ctx, const char *key, const fsdp__frontier *frontier, uint32_t but)
{
    fsdp__clock clock;
    fsdp__frontier_clock(frontier, &clock);
    put_key(t, key);
    put(t, "[");
    for (int slot = 0; slot < FSDP__SLOTS; slot++) {
        if (clock.at[slot] == 0 || (but >> slot & 1u)) continue;
        put_separator(t);
        put(t, "{");
        put_string(t, "stream", name_at(ctx, slot, clock.at[slot]));
        put_count(t, "epoch", clock.at[slot]);
        put(t, "}");
    }
    put(t, "]");
}

static void put_streams(text *t, const fsdp_context *ctx)
{
    put_key(t, "streams");
    put(t, "[");
    for (int slot = 0; slot < ctx->clocks.n_slots; slot++) {
        if (ctx->clocks.stream[slot] == NULL) continue;
        put_separator(t);
        put(t, "{\"slot\":%d", slot);
        put_string(t, "name", ctx->clocks.stream[slot]->name);
        put(t, "}");
    }
    put(t, "]");
}

/* ---- Blocks ---- */

/* The flag is cleared when somebody looks; this asks what is true now. */
static bool is_pending(const fsdp_context *ctx, const fsdp__block *f)
{
    return f->pending && ctx->clocks.stream[f->slot] != NULL &&
           !fsdp__frontier_covered(&ctx->clocks.now[f->slot], &f->use);
}

static void put_place(text *t, const fsdp__segment *segment, const fsdp__block *b, uint64_t bytes)
{
    put_separator(t);
    put(t, "\n{");
    put_count(t, "offset", b->begin - segment->begin);
    put_count(t, "bytes", bytes);
}

static void put_live(text *t, const fsdp_context *ctx, const fsdp__segment *segment, const fsdp__block *b)
{
    put_place(t, segment, b, b->bytes);
    put_string(t, "state", "live");
    put_string(t, "owner", b->owner);
    put_string(t, "stream", name_at(ctx, b->slot, b->taken));
    put_key(t, "until_free");
    put(t, "[");
    for (uint32_t bits = b->until_free; bits != 0; bits &= bits - 1) {
        put_separator(t);
        int slot = __builtin_ctz(bits);
        put_string(t, NULL, name_at(ctx, slot, fsdp__frontier_at(&b->use, slot)));
    }
    put(t, "]");
    put_points(t, ctx, "uses", &b->use, b->until_free);
    put(t, "}");
}

static void put_fragment(text *t, const fsdp_context *ctx, const fsdp__segment *segment, const fsdp__block *f)
{
    fsdp__clock clock;
    fsdp__frontier_clock(&f->use, &clock);
    put_place(t, segment, f, f->bytes);
    put_string(t, "stream", name_at(ctx, f->slot, f->slot < FSDP__SLOTS ? clock.at[f->slot] : 0));
    put_count(t, "freed", f->freed);
    put_key(t, "pending");
    put(t, is_pending(ctx, f) ? "true" : "false");
    put_points(t, ctx, "clock", &f->use, 0);
    put(t, "}");
}

/* Returns the last fragment. */
static const fsdp__block *put_free(text *t, const fsdp_context *ctx, const fsdp__segment *segment,
                                   const fsdp__block *range)
{
    put_place(t, segment, range, range->range_bytes);
    put_string(t, "state", "free");
    put_key(t, "fragments");
    put(t, "[");
    const fsdp__block *f = range;
    for (; f != range->last; f = f->after) put_fragment(t, ctx, segment, f);
    put_fragment(t, ctx, segment, f);
    put(t, "]}");
    return f;
}

static void put_segments(text *t, const fsdp_allocator *a)
{
    put_key(t, "segments");
    put(t, "[");
    for (size_t i = 0; i < a->ranges.n_segments; i++) {
        const fsdp__segment *segment = &a->ranges.segments[i];
        if (segment->bytes == 0) continue; /* the number is free */
        put_separator(t);
        put(t, "{");
        put_count(t, "number", i);
        put_count(t, "bytes", segment->bytes);
        put_key(t, "blocks");
        put(t, "[");
        for (const fsdp__block *b = segment->first; b != NULL; b = b->after) {
            if (b->live) put_live(t, a->ctx, segment, b);
            else b = put_free(t, a->ctx, segment, b);
        }
        put(t, "]}");
    }
    put(t, "]");
}

/* ---- Pools ---- */

static void put_event(text *t, const fsdp_allocator *a, uint64_t n, const fsdp__alloc_event *event)
{
    static const char *const names[] = {"alloc", "free", "wait", "grow", "trim", "evict", "out_of_memory"};
    put_separator(t);
    put(t, "\n{");
    put_count(t, "n", n);
    put_string(t, "what", names[event->kind]);
    put_count(t, "bytes", event->bytes);
    put_count(t, "segment", event->segment);
    if (event->offset != FSDP__NO_PLACE) put_count(t, "offset", event->offset);
    else put(t, ",\"offset\":null");
    put_string(t, "stream", name_at(a->ctx, event->slot, 0));
    if (event->kind == FSDP__ALLOC_EVENT_WAIT) put_string(t, "other", name_at(a->ctx, event->other, 0));
    put_string(t, "owner", event->owner);
    put_count(t, "allocated", event->allocated);
    put_count(t, "reserved", event->reserved);
    put(t, "}");
}

static void put_history(text *t, const fsdp_allocator *a)
{
    const fsdp__history *h = &a->history;
    uint64_t kept = h->n < h->capacity ? h->n : h->capacity;
    put_key(t, "history");
    put(t, "{");
    put_count(t, "kept", kept);
    put_count(t, "dropped", h->n - kept);
    put_key(t, "events");
    put(t, "[");
    for (uint64_t n = h->n - kept; n < h->n; n++) put_event(t, a, n, &h->events[n & (h->capacity - 1)]);
    put(t, "]}");
}

static void put_stats(text *t, const fsdp_allocator *a)
{
    const fsdp_alloc_stats *st = &a->stats;
    uint64_t pending = 0;
    for (int slot = 0; slot < FSDP__SLOTS; slot++)
        for (const fsdp__block *f = a->ranges.pending[slot].oldest; f != NULL; f = f->newer)
            if (is_pending(a->ctx, f)) pending += f->bytes;
    put_key(t, "stats");
    put(t, "{");
    put_count(t, "allocated", st->allocated);
    put_count(t, "active", st->allocated + pending);
    put_count(t, "reserved", st->reserved);
    put_count(t, "allocated_peak", st->allocated_peak);
    put_count(t, "active_peak", st->active_peak);
    put_count(t, "reserved_peak", st->reserved_peak);
    put_count(t, "allocs", st->allocs);
    put_count(t, "frees", st->frees);
    put_count(t, "waits", st->waits);
    put_count(t, "grows", st->grows);
    put(t, ",\"trace_hash\":\"%llu\"}", (unsigned long long)st->trace_hash);
}

static void put_pool(text *t, const fsdp_allocator *a)
{
    const char *policy = a->config.policy == FSDP_ALLOC_GROW_FIRST ? "grow_first" : "wait_first";
    put_separator(t);
    put(t, "\n{");
    put_string(t, "name", a->name);
    if (a->model != NULL) put_string(t, "model", a->model);
    else put(t, ",\"model\":null");
    put_string(t, "policy", a->ranges.placed ? "planned" : policy);
    put_count(t, "budget", a->config.budget_bytes);
    put_count(t, "segment_bytes", a->config.segment_bytes);
    put_stats(t, a);
    put_segments(t, a);
    put_history(t, a);
    put(t, "}");
}

/* ---- All ---- */

static void put_arena(text *t, const char *key, bool known, const fsdp_arena_stats *stats)
{
    put_key(t, key);
    if (!known) {
        put(t, "null");
        return;
    }
    put(t, "{");
    put_count(t, "allocated", stats->allocated_bytes);
    put_count(t, "active", stats->active_bytes);
    put_count(t, "mapped", stats->mapped_bytes);
    put_count(t, "regions", stats->regions);
    put_count(t, "allocs", stats->allocs);
    put_count(t, "frees", stats->frees);
    put(t, "}");
}

/* The arenas first: the lock is not held around them. */
static void put_arenas(text *t, fsdp_context *ctx)
{
    fsdp_arena_stats host = FSDP_ARENA_STATS_INIT, pinned = FSDP_ARENA_STATS_INIT;
    bool knows_host = fsdp__arena_stats(ctx, FSDP__ARENA_HOST, &host);
    bool knows_pinned = fsdp__arena_stats(ctx, FSDP__ARENA_PINNED, &pinned);
    put_key(t, "arenas");
    put(t, "{");
    put_arena(t, "host", knows_host, &host);
    put_arena(t, "pinned", knows_pinned, &pinned);
    put(t, "}");
}

static void put_context(text *t, fsdp_context *ctx)
{
    put(t, "{");
    put_string(t, "format", "fsdp-memory");
    put_count(t, "version", 1);
    put_count(t, "rank", ctx->rank);
    put_count(t, "world", ctx->world);
    put_string(t, "backend", ctx->backend->name);
    put_arenas(t, ctx);
    fsdp__lock(ctx);
    put_streams(t, ctx);
    put_key(t, "device");
    put(t, "{");
    put_count(t, "bytes", ctx->counters.device_bytes);
    put_count(t, "peak", ctx->counters.device_bytes_peak);
    put_count(t, "pinned", ctx->counters.pinned_bytes);
    put(t, "}");
    put_key(t, "pools");
    put(t, "[");
    const fsdp_allocator *oldest = ctx->pools;
    while (oldest != NULL && oldest->next_pool != NULL) oldest = oldest->next_pool;
    for (const fsdp_allocator *a = oldest; a != NULL && !t->failed; a = a->previous_pool) put_pool(t, a);
    fsdp__unlock(ctx);
    put(t, "]}\n");
}

/* ---- The file ---- */

static fsdp_status write_file(const text *t, const char *path, char *temporary, size_t bytes)
{
    fsdp__new_file file;
    FSDP_TRY(fsdp__new_file_open(&file, path, temporary, bytes));
    fsdp__new_file_write(&file, t->data, t->n);
    return fsdp__new_file_close(&file);
}

fsdp_status fsdp_memory_write_json(fsdp_context *ctx, const char *path)
{
    FSDP_NEED(ctx);
    FSDP_NEED(path);
    if (path[0] == '\0') return fsdp__fail(FSDP_ERR_ARG, "%s: path is empty", __func__);
    size_t bytes = strlen(path) + FSDP__NEW_FILE_MORE;
    char *temporary = fsdp__host_alloc(&ctx->host, bytes, 1);
    text t = {.host = &ctx->host};
    if (temporary != NULL) put_context(&t, ctx);
    fsdp_status status;
    if (temporary == NULL || t.failed)
        status =
            fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "no host memory for a memory snapshot of more than %zu bytes", t.n);
    else status = write_file(&t, path, temporary, bytes);
    fsdp__host_free(&ctx->host, t.data, t.capacity, 1);
    fsdp__host_free(&ctx->host, temporary, bytes, 1);
    return status;
}
