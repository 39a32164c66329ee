/* SPDX-License-Identifier: MIT */
/* Happens-before over byte ranges, in one pass over the tape.
 *
 * after[s][t] is the last record of t, counted from 1, that comes before what s runs next. All edges point forward on
 * the tape, so record i of t (from 0) comes before the current record of s exactly if i < after[s][t].
 * The bytes are cut at every range's begin and end ("cuts", sorted); a segment is a run of bytes between two cuts with
 * one history: for each stream its last write and last read. Older ones need not be kept: whoever comes after the last
 * comes after them. A write that races with nothing replaces the history of its whole range, which becomes one segment:
 * whoever is not ordered after something older is not ordered after this write either. */
#include "hb_oracle.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sorted.h"

enum { STREAMS = 16, WORD = 64 };

typedef struct history {
    uint32_t write[STREAMS], read[STREAMS]; /* record, counted from 1; 0: none */
} history;

typedef struct oracle {
    const fsdp_trace *trace;
    uint32_t after[STREAMS][STREAMS];

    uint64_t *event; /* [n_events], sorted */
    size_t n_events;
    uint32_t (*recorded)[STREAMS]; /* [n_events]: what comes before the event's last record, itself included; 0: none */

    uint64_t *cut; /* [n_cuts], sorted */
    size_t n_cuts;
    history *segment;       /* [n_cuts]: of the segment that begins at the cut, if one does */
    uint64_t *head, *words; /* bit c of head: a segment begins at cut c; bit w of words: word w of head is not 0 */
    size_t n_head, n_words;
} oracle;

static size_t sort_unique(uint64_t *value, size_t n)
{
    sort_uint64s(value, n);
    size_t kept = 0;
    for (size_t i = 0; i < n; i++)
        if (kept == 0 || value[kept - 1] != value[i]) value[kept++] = value[i];
    return kept;
}

/* Where x is; x is there. */
static size_t position(const uint64_t *value, size_t n, uint64_t x)
{
    size_t low = 0, high = n;
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (value[middle] <= x) low = middle;
        else high = middle;
    }
    assert(n > 0 && value[low] == x);
    return low;
}

static uint64_t end_of(const fsdp_trace_access *access)
{
    return access->bytes > UINT64_MAX - access->begin ? UINT64_MAX : access->begin + access->bytes;
}

/* ---- The set of cuts at which a segment begins ---- */

static void set_head(oracle *o, size_t cut)
{
    o->head[cut / WORD] |= (uint64_t)1 << cut % WORD;
    o->words[cut / WORD / WORD] |= (uint64_t)1 << cut / WORD % WORD;
}

static void clear_head(oracle *o, size_t cut)
{
    o->head[cut / WORD] &= ~((uint64_t)1 << cut % WORD);
    if (o->head[cut / WORD] == 0) o->words[cut / WORD / WORD] &= ~((uint64_t)1 << cut / WORD % WORD);
}

/* The last set bit at or before `bit` of an array of words; the words before are searched one by one. One is set. */
static size_t bit_before(const uint64_t *word, size_t bit)
{
    size_t w = bit / WORD;
    uint64_t bits = word[w] << (WORD - 1 - bit % WORD);
    if (bits != 0) return bit - (size_t)__builtin_clzll(bits);
    do w--;
    while (word[w] == 0);
    return w * WORD + WORD - 1 - (size_t)__builtin_clzll(word[w]);
}

/* The first set bit after `bit`; limit (in bits) if there is none. */
static size_t bit_after(const uint64_t *word, size_t bit, size_t limit)
{
    bit++;
    if (bit >= limit) return limit;
    size_t w = bit / WORD;
    uint64_t bits = word[w] >> bit % WORD;
    if (bits != 0) return bit + (size_t)__builtin_ctzll(bits);
    for (w++; w * WORD < limit; w++)
        if (word[w] != 0) return w * WORD + (size_t)__builtin_ctzll(word[w]);
    return limit;
}

/* The segment that holds the bytes after the cut. */
static size_t head_before(const oracle *o, size_t cut)
{
    uint64_t bits = o->head[cut / WORD] << (WORD - 1 - cut % WORD);
    if (bits != 0) return cut - (size_t)__builtin_clzll(bits);
    size_t w = bit_before(o->words, cut / WORD - 1);
    return w * WORD + WORD - 1 - (size_t)__builtin_clzll(o->head[w]);
}

static size_t head_after(const oracle *o, size_t cut)
{
    uint64_t bits = cut % WORD == WORD - 1 ? 0 : o->head[cut / WORD] >> (cut % WORD + 1);
    if (bits != 0) return cut + 1 + (size_t)__builtin_ctzll(bits);
    size_t w = bit_after(o->words, cut / WORD, o->n_head);
    return w == o->n_head ? o->n_cuts : w * WORD + (size_t)__builtin_ctzll(o->head[w]);
}

static void split(oracle *o, size_t cut)
{
    size_t head = head_before(o, cut);
    if (head == cut) return;
    o->segment[cut] = o->segment[head];
    set_head(o, cut);
}

/* ---- One record ---- */

/* The latest record, counted from 1, that the access of stream s races with in this history; 0: none. Never one of s:
 * they all come before. */
static uint32_t racing(const oracle *o, const history *seen, int32_t s, bool write)
{
    uint32_t latest = 0;
    for (int t = 0; t < STREAMS; t++) {
        uint32_t last = seen->write[t];
        if (write && seen->read[t] > last) last = seen->read[t];
        if (last > o->after[s][t] && last > latest) latest = last;
    }
    return latest;
}

/* Take the access into the history of its bytes. Returns as racing. */
static uint32_t touch(oracle *o, int32_t s, uint32_t record, const fsdp_trace_access *access)
{
    if (access->bytes == 0) return 0;
    size_t begin = position(o->cut, o->n_cuts, access->begin), end = position(o->cut, o->n_cuts, end_of(access));
    split(o, begin);
    split(o, end);
    uint32_t latest = 0;
    for (size_t at = begin; at < end; at = head_after(o, at)) {
        uint32_t with = racing(o, &o->segment[at], s, access->write);
        if (with > latest) latest = with;
        if (access->write) o->segment[at].write[s] = record;
        else o->segment[at].read[s] = record;
    }
    if (!access->write || latest != 0) return latest;
    for (size_t at = head_after(o, begin); at < end; at = head_after(o, at)) clear_head(o, at);
    o->segment[begin] = (history){0};
    o->segment[begin].write[s] = record;
    return 0;
}

/* What stream s runs next comes after the event's last record. */
static void come_after(oracle *o, int32_t s, uint64_t event)
{
    uint64_t *known = o->n_events > 0 ? bsearch(&event, o->event, o->n_events, sizeof event, sorted_by_uint64) : NULL;
    for (int t = 0; known != NULL && t < STREAMS; t++) {
        uint32_t before = o->recorded[known - o->event][t];
        if (before > o->after[s][t]) o->after[s][t] = before;
    }
}

static uint32_t judge(oracle *o, uint32_t index)
{
    const fsdp_trace_record *record = fsdp_trace_at(o->trace, index);
    int32_t s = record->stream;
    assert(s >= 0 && s < STREAMS);
    uint32_t *after = o->after[s], latest = 0;
    if (record->kind == FSDP_RECORD_WAIT) come_after(o, s, record->event);
    for (int t = 0; record->kind == FSDP_RECORD_HOST && t < STREAMS; t++) come_after(o, t, record->event);
    after[s] = index + 1;
    if (record->kind == FSDP_RECORD_EVENT)
        memcpy(o->recorded[position(o->event, o->n_events, record->event)], after, sizeof o->recorded[0]);
    if (record->kind != FSDP_RECORD_OPERATION && record->kind != FSDP_RECORD_USE) return 0;
    for (uint32_t a = 0; a < record->n_accesses; a++) {
        uint32_t with = touch(o, s, index + 1, &record->access[a]);
        if (with > latest) latest = with;
    }
    return latest;
}

/* ---- Sentences ---- */

static int describe_record(const fsdp_trace *trace, uint64_t index, const fsdp_trace_access *access, char *text,
                           size_t text_bytes)
{
    const fsdp_trace_record *record = fsdp_trace_at(trace, index);
    const char *what = record->kind == FSDP_RECORD_USE ? "use" : fsdp_operation_name(record->operation);
    const char *stream = fsdp_trace_stream_name(trace, record->stream);
    return snprintf(text, text_bytes, "%s of \"%s\" on stream %d \"%s\" %s 0x%llx … 0x%llx", what, record->label,
                    (int)record->stream, stream, access->write ? "writes" : "reads", (unsigned long long)access->begin,
                    (unsigned long long)end_of(access));
}

static bool conflict(const fsdp_trace_access *a, const fsdp_trace_access *b)
{
    return (a->write || b->write) && a->begin < end_of(b) && b->begin < end_of(a) && a->bytes > 0 && b->bytes > 0;
}

static void describe(const fsdp_trace *trace, uint64_t first, uint64_t second, char *text, size_t text_bytes)
{
    const fsdp_trace_record *a = fsdp_trace_at(trace, first), *b = fsdp_trace_at(trace, second);
    const fsdp_trace_access *x = &a->access[0], *y = &b->access[0];
    for (uint32_t i = 0; i < a->n_accesses * b->n_accesses; i++) {
        x = &a->access[i / b->n_accesses];
        y = &b->access[i % b->n_accesses];
        if (conflict(x, y)) break;
    }
    char one[256], other[256];
    describe_record(trace, first, x, one, sizeof one);
    describe_record(trace, second, y, other, sizeof other);
    snprintf(text, text_bytes, "records %llu and %llu race: %s, %s, and nothing orders the two",
             (unsigned long long)first, (unsigned long long)second, one, other);
}

/* ---- The whole tape ---- */

static bool prepare(oracle *o, size_t n)
{
    o->event = malloc((n + 1) * sizeof *o->event);
    o->cut = malloc((n * FSDP_TRACE_MAX_ACCESSES * 2 + 1) * sizeof *o->cut);
    if (o->event == NULL || o->cut == NULL) return false;
    o->cut[o->n_cuts++] = 0; /* the first segment begins here, and no range before it */
    for (size_t i = 0; i < n; i++) {
        const fsdp_trace_record *record = fsdp_trace_at(o->trace, i);
        if (record->kind == FSDP_RECORD_EVENT) o->event[o->n_events++] = record->event;
        for (uint32_t a = 0; a < record->n_accesses; a++) {
            o->cut[o->n_cuts++] = record->access[a].begin;
            o->cut[o->n_cuts++] = end_of(&record->access[a]);
        }
    }
    o->n_events = sort_unique(o->event, o->n_events);
    o->n_cuts = sort_unique(o->cut, o->n_cuts);
    o->n_head = o->n_cuts / WORD + 1;
    o->n_words = o->n_head / WORD + 1;
    o->recorded = calloc(o->n_events + 1, sizeof *o->recorded);
    o->segment = calloc(o->n_cuts, sizeof *o->segment);
    o->head = calloc(o->n_head, sizeof *o->head);
    o->words = calloc(o->n_words, sizeof *o->words);
    if (o->recorded == NULL || o->segment == NULL || o->head == NULL || o->words == NULL) return false;
    set_head(o, 0);
    return true;
}

static size_t refuse(char *text, size_t text_bytes, const char *why)
{
    snprintf(text, text_bytes, "%s", why);
    return SIZE_MAX;
}

size_t hb_check(const fsdp_trace *trace, char *text, size_t text_bytes)
{
    if (text == NULL) text_bytes = 0;
    if (text_bytes > 0) text[0] = '\0';
    uint64_t n = fsdp_trace_count(trace);
    if (fsdp_trace_dropped(trace) > 0) return refuse(text, text_bytes, "the tape is not whole: records were dropped");
    if (n >= UINT32_MAX / (2 * FSDP_TRACE_MAX_ACCESSES)) return refuse(text, text_bytes, "the tape is too long");

    size_t races = 0;
    oracle o = {.trace = trace};
    if (!prepare(&o, n)) {
        races = refuse(text, text_bytes, "no memory to judge the tape");
        goto out;
    }
    for (uint32_t i = 0; i < n; i++) {
        uint32_t with = judge(&o, i);
        if (with == 0) continue;
        if (races++ == 0) describe(trace, with - 1, i, text, text_bytes);
    }
out:
    free(o.words);
    free(o.head);
    free(o.segment);
    free(o.recorded);
    free(o.cut);
    free(o.event);
    return races;
}
