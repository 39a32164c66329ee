/* SPDX-License-Identifier: MIT */
#include "flight_file.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "svg.h"

typedef struct reader {
    const char *text, *at;
    bool failed;
} reader;

static void need(reader *r, bool condition) { r->failed |= !condition; }

static void skip_space(reader *r)
{
    while (*r->at == ' ' || *r->at == '\n') r->at++;
}

static void take(reader *r, const char *token)
{
    skip_space(r);
    size_t n = strlen(token);
    need(r, strncmp(r->at, token, n) == 0);
    if (!r->failed) r->at += n;
}

static bool next_is(reader *r, const char *token)
{
    skip_space(r);
    return !r->failed && strncmp(r->at, token, strlen(token)) == 0;
}

/* As JSON has numbers: no sign, no leading zero. */
static uint64_t take_number(reader *r)
{
    uint64_t value = 0;
    skip_space(r);
    need(r, *r->at >= '0' && *r->at <= '9' && !(r->at[0] == '0' && r->at[1] >= '0' && r->at[1] <= '9'));
    for (; !r->failed && *r->at >= '0' && *r->at <= '9'; r->at++) value = value * 10 + (uint64_t)(*r->at - '0');
    return value;
}

/* U+FFFD comes back as "?", other escaped characters below 128 as themselves. */
static size_t take_character(reader *r, char *to)
{
    unsigned code;
    if (*r->at != '\\') {
        size_t n = fsdp__utf8_bytes(r->at);
        need(r, n > 0 && *r->at != '"');
        memcpy(to, r->at, n);
        r->at += n;
        return n;
    }
    if (r->at[1] == '"' || r->at[1] == '\\') *to = r->at[1], r->at += 2;
    else if (sscanf(r->at, "\\u%4x", &code) == 1 && (code < 128 || code == 0xfffd))
        *to = code < 128 ? (char)code : '?', r->at += 6;
    else r->failed = true;
    return 1;
}

static void take_string(reader *r, char *to, size_t bytes)
{
    size_t n = 0;
    take(r, "\"");
    while (!r->failed && *r->at != '"') {
        need(r, n + 5 < bytes);
        if (!r->failed) n += take_character(r, to + n);
    }
    to[n] = '\0';
    take(r, "\"");
}

static void take_hash(reader *r, uint64_t *hash)
{
    char text[32], *end;
    take_string(r, text, sizeof text);
    need(r, strlen(text) == 16 && strspn(text, "0123456789abcdef") == 16);
    *hash = strtoull(text, &end, 16);
}

static void take_collective(reader *r, flight_call *c)
{
    c->comm = (int)take_number(r);
    need(r, c->comm < 2);
    take(r, ",\"number\":"), c->number = take_number(r);
    take(r, ",\"part\":"), c->part = take_number(r);
    take(r, ",\"of\":"), c->of = take_number(r);
    take(r, ",\"call\":"), take_string(r, c->call, sizeof c->call);
    take(r, ",\"what\":"), take_string(r, c->what, sizeof c->what);
    take(r, ",\"pass\":"), take_string(r, c->pass, sizeof c->pass);
    take(r, ",\"count\":"), c->count = take_number(r);
    take(r, ",\"dtype\":"), take_string(r, c->dtype, sizeof c->dtype);
    take(r, ",\"root\":"), c->root = take_number(r);
}

static void take_call(reader *r, flight_call *c)
{
    take(r, "{\"comm\":");
    if (next_is(r, "-1")) {
        take(r, "-1");
        c->comm = -1;
        take(r, ",\"number\":"), c->number = take_number(r);
        take(r, ",\"call\":"), take_string(r, c->call, sizeof c->call);
        take(r, ",\"what\":"), take_string(r, c->what, sizeof c->what);
    } else {
        take_collective(r, c);
    }
    take(r, ",\"enqueued_ns\":"), c->enqueued_ns = take_number(r);
    take(r, ",\"state\":"), take_string(r, c->state, sizeof c->state);
    take(r, "}");
    bool host = strcmp(c->state, "inside") == 0 || strcmp(c->state, "returned") == 0;
    bool stream = strcmp(c->state, "done") == 0 || strcmp(c->state, "enqueued") == 0;
    need(r, c->comm < 0 ? host : stream);
}

static void take_file(reader *r, flight_file *f)
{
    take(r, "{\"version\":1,\"rank\":"), f->rank = take_number(r);
    take(r, ",\"world\":"), f->world = take_number(r);
    take(r, ",\"status\":"), take_string(r, f->status, sizeof f->status);
    take(r, ",\"error\":"), take_string(r, f->error, sizeof f->error);
    take(r, ",\"hash\":["), take_hash(r, &f->hash[0]), take(r, ","), take_hash(r, &f->hash[1]);
    take(r, "],\"n\":["), f->n[0] = take_number(r), take(r, ","), f->n[1] = take_number(r);
    take(r, "],"), take(r, "\"calls\":[");
    while (!r->failed && !next_is(r, "]")) {
        if (f->n_calls > 0) take(r, ",");
        need(r, f->n_calls < FSDP_FLIGHT_CALLS);
        if (!r->failed) take_call(r, &f->call[f->n_calls++]);
    }
    take(r, "]}");
    skip_space(r);
    need(r, *r->at == '\0');
}

bool flight_file_read(const char *path, flight_file *out_file, char *complaint, size_t bytes)
{
    enum { MOST = 1 << 20 };
    memset(out_file, 0, sizeof *out_file);
    FILE *file = fopen(path, "r");
    char *text = calloc(MOST, 1);
    size_t n = file != NULL && text != NULL ? fread(text, 1, MOST - 1, file) : 0;
    if (file != NULL) fclose(file);
    reader r = {text, text, n == 0 || strlen(text) != n};
    if (!r.failed) take_file(&r, out_file);
    if (r.failed)
        snprintf(complaint, bytes, "%s: at byte %zu of %zu: %.60s", path, (size_t)(r.at - r.text), n,
                 n > 0 ? r.at : "");
    free(text);
    return !r.failed;
}

const flight_call *flight_file_last(const flight_file *file)
{
    for (uint32_t i = file->n_calls; i-- > 0;)
        if (file->call[i].comm >= 0) return &file->call[i];
    return NULL;
}
