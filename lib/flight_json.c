/* SPDX-License-Identifier: MIT */
/* The flight recorder as a file. It is written in pieces as it is read, so that a long record takes no memory, and under
 * another name until it is whole. The context's lock is wanted only to ask how far the streams are; whoever holds it may be
 * blocked by a rank that does not come, so nobody waits long for it: then nothing is known to be done. */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "check.h"
#include "context.h"
#include "hostmem.h"
#include "new_file.h"
#include "order.h"
#include "svg.h"

enum { LOCK_NS = 50000000 };

/* ---- How far the streams are ---- */

/* Of each slot: epochs up to this one are done. */
typedef struct progress {
    uint64_t done[FSDP__SLOTS];
} progress;

/* The newest fence of a stream that has happened. What earlier streams of the slot ran was done before this one came. */
static uint64_t ask_stream(const fsdp_context *ctx, const fsdp_stream *s)
{
    uint64_t oldest = s->n_fences > FSDP__FENCES ? s->n_fences - FSDP__FENCES : 0;
    if (oldest < s->first_fence) oldest = s->first_fence;
    for (uint64_t i = s->n_fences; i-- > oldest;) {
        const fsdp__fence *fence = &s->ring[i % FSDP__FENCES].fence;
        bool done = false;
        if (fence->event == NULL || fence->captured)
            continue; /* what is captured has no moment, and asking for it breaks it */
        if (ctx->backend->device->event_query(ctx->dev, fence->event, &done) != FSDP_OK) break;
        if (done) return fence->epoch;
    }
    return s->first_fence;
}

static void ask_streams(fsdp_context *ctx, progress *p)
{
    bool held = fsdp__has_lock(ctx);
    memset(p, 0, sizeof *p);
    if (!held) {
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += LOCK_NS;
        if (until.tv_nsec >= 1000000000) until.tv_sec++, until.tv_nsec -= 1000000000;
        if (pthread_mutex_timedlock(&ctx->lock, &until) != 0) return;
    }
    const int n_asked = ctx->capture == NULL ? ctx->clocks.n_slots : 0; /* inside a capture nobody asks for events */
    for (int t = 0; t < n_asked; t++) {
        const fsdp_stream *s = ctx->clocks.stream[t];
        p->done[t] = s != NULL ? ask_stream(ctx, s) : ctx->clocks.now[t].at[t] - 1;
    }
    if (!held) fsdp__unlock(ctx);
}

/* ---- Text ---- */

typedef struct output {
    fsdp__new_file file;
    size_t n;
    char data[4096];
} output;

static void flush(output *o)
{
    fsdp__new_file_write(&o->file, o->data, o->n);
    o->n = 0;
}

static void put_bytes(output *o, const char *data, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (o->n == sizeof o->data) flush(o);
        o->data[o->n++] = data[i];
    }
}

__attribute__((format(printf, 2, 3))) static void put(output *o, const char *format, ...)
{
    char text[256];
    va_list args;
    va_start(args, format);
    int n = vsnprintf(text, sizeof text, format, args);
    va_end(args);
    assert(n >= 0 && (size_t)n < sizeof text);
    put_bytes(o, text, (size_t)n);
}

/* A name may hold anything: what is no character of UTF-8 becomes U+FFFD. */
static void put_string(output *o, const char *value)
{
    put(o, "\"");
    while (*value != '\0') {
        size_t n = fsdp__utf8_bytes(value);
        if (*value == '"' || *value == '\\') put(o, "\\%c", *value);
        else if (n > 0) put_bytes(o, value, n);
        else put(o, (unsigned char)*value < 0x80 ? "\\u%04x" : "\\ufffd", (unsigned)*value);
        value += n > 0 ? n : 1;
    }
    put(o, "\"");
}

static void put_host_call(output *o, const fsdp__flight_entry *e, bool inside)
{
    /* "fsdp_sum_host of 3" is a call and what it is about. */
    char call[sizeof e->call.label];
    const char *space = strchr(e->call.label, ' '), *what = space != NULL ? space + 1 : "";
    memcpy(call, e->call.label, sizeof call);
    if (space != NULL) call[space - e->call.label] = '\0';
    if (strncmp(what, "of ", 3) == 0) what += 3;
    put(o, "{\"comm\":-1,\"number\":%" PRIu64 ",\"call\":", e->call.number);
    put_string(o, call);
    put(o, ",\"what\":");
    put_string(o, what);
    put(o, ",\"enqueued_ns\":%" PRIu64 ",\"state\":\"%s\"}", e->enqueued_ns, inside ? "inside" : "returned");
}

static void put_collective(output *o, const fsdp__flight_entry *e, const progress *p)
{
    const fsdp__call *c = &e->call;
    fsdp__point point = fsdp__flight_point(e);
    bool done = point / FSDP__SLOTS <= p->done[point % FSDP__SLOTS];
    put(o, "{\"comm\":%" PRIu32 ",\"number\":%" PRIu64 ",\"part\":%u,\"of\":%u,\"call\":\"%s\",\"what\":",
        fsdp__flight_comm(e), c->number, c->part, c->n_parts, fsdp_operation_name((fsdp_operation)c->kind));
    put_string(o, c->label);
    put(o, ",\"pass\":");
    put_string(o, c->pass);
    put(o, ",\"count\":%" PRIu64 ",\"dtype\":\"%s\",\"root\":%" PRIu32, c->count, fsdp_dtype_name((fsdp_dtype)c->dtype),
        c->root);
    put(o, ",\"enqueued_ns\":%" PRIu64 ",\"state\":\"%s\"}", e->enqueued_ns, done ? "done" : "enqueued");
}

static void put_context(output *o, fsdp_context *ctx, fsdp_status status, const char *sentence)
{
    const fsdp__flight *flight = &ctx->flight;
    progress p;
    ask_streams(ctx, &p);
    uint64_t inside = atomic_load(&flight->inside), end = atomic_load(&flight->n), n[FSDP__N_COMMS],
             hash[FSDP__N_COMMS];
    for (uint32_t c = 0; c < FSDP__N_COMMS; c++) fsdp__flight_count(flight, c, &n[c], &hash[c]);
    put(o, "{\"version\":1,\"rank\":%" PRIu32 ",\"world\":%" PRIu32 ",\"status\":\"%s\",\"error\":", ctx->rank,
        ctx->world, fsdp_status_name(status));
    put_string(o, sentence);
    put(o, ",\"hash\":[\"%016" PRIx64 "\",\"%016" PRIx64 "\"],\"n\":[%" PRIu64 ",%" PRIu64 "],\n \"calls\":[", hash[0],
        hash[1], n[0], n[1]);
    const char *separator = "\n  ";
    for (uint64_t i = end > FSDP_FLIGHT_CALLS ? end - FSDP_FLIGHT_CALLS : 0; i < end; i++) {
        fsdp__flight_entry e;
        if (!fsdp__flight_read(flight, i, &e)) continue;
        put(o, "%s", separator);
        if (fsdp__flight_comm(&e) == FSDP__FLIGHT_HOST) put_host_call(o, &e, inside == i + 1);
        else put_collective(o, &e, &p);
        separator = ",\n  ";
    }
    put(o, "]}\n");
    flush(o);
}

/* ---- The file ---- */

static fsdp_status write_file(fsdp_context *ctx, const char *path, char *temporary, size_t bytes, fsdp_status status,
                              const char *sentence)
{
    output o = {.n = 0};
    FSDP_TRY(fsdp__new_file_open(&o.file, path, temporary, bytes));
    put_context(&o, ctx, status, sentence);
    return fsdp__new_file_close(&o.file);
}

fsdp_status fsdp__flight_write(fsdp_context *ctx, const char *path, fsdp_status status, const char *sentence)
{
    size_t bytes = strlen(path) + FSDP__NEW_FILE_MORE;
    char *temporary = fsdp__host_alloc(&ctx->host, bytes, 1);
    if (temporary == NULL) return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "no host memory to write %s", path);
    fsdp_status written = write_file(ctx, path, temporary, bytes, status, sentence);
    fsdp__host_free(&ctx->host, temporary, bytes, 1);
    return written;
}

fsdp_status fsdp_flight_write_json(fsdp_context *ctx, const char *path)
{
    FSDP_NEED(ctx);
    FSDP_NEED(path);
    if (path[0] == '\0') return fsdp__fail(FSDP_ERR_ARG, "%s: path is empty", __func__);
    char before[FSDP__ERROR_BYTES], sentence[FSDP__ERROR_BYTES] = "";
    snprintf(before, sizeof before, "%s", fsdp_last_error());
    fsdp_status status = fsdp__context_peek(ctx);
    if (status != FSDP_OK) snprintf(sentence, sizeof sentence, "%s", fsdp_last_error());
    fsdp_status written = fsdp__flight_write(ctx, path, status, sentence);
    if (written == FSDP_OK) FSDP_IGNORE(fsdp__fail(FSDP_OK, "%s", before)); /* the caller's last failure is still his */
    return written;
}
