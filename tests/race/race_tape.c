/* SPDX-License-Identifier: MIT */
/* The tape without addresses. A place in memory becomes the number of the device's allocation and an offset, an event
 * the number of its record: what is left must not depend on how the device ran. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "context.h"
#include "hash.h"
#include "race_rig.h"
#include "trace.h"

enum { MAX_MEMORY = 4096, EVENT_SLOTS = 1 << 13 };

/* ---- What the device gave ---- */

typedef struct memory {
    const void *dev;
    uint64_t begin, bytes, number;
    bool freed;
} memory;

static struct {
    pthread_mutex_t lock;
    fsdp_device_ops ops;
    fsdp_backend backend;
    const fsdp_device_ops *real;
    memory at[MAX_MEMORY];
    uint32_t n;
} noted = {.lock = PTHREAD_MUTEX_INITIALIZER};

void race_forget_memory(void) { noted.n = 0; }

static fsdp_status note_alloc(void *dev, uint64_t bytes, fsdp_memory_kind kind, void **out_ptr)
{
    fsdp_status status = noted.real->mem_alloc(dev, bytes, kind, out_ptr);
    if (status != FSDP_OK) return status;
    pthread_mutex_lock(&noted.lock);
    uint64_t number = 0;
    for (uint32_t i = 0; i < noted.n; i++) number += noted.at[i].dev == dev;
    if (noted.n == MAX_MEMORY) abort();
    noted.at[noted.n++] = (memory){dev, (uint64_t)(uintptr_t)*out_ptr, bytes, number, false};
    pthread_mutex_unlock(&noted.lock);
    return FSDP_OK;
}

static void note_free(void *dev, void *ptr, uint64_t bytes, fsdp_memory_kind kind)
{
    pthread_mutex_lock(&noted.lock);
    for (uint32_t i = 0; i < noted.n; i++)
        if (noted.at[i].begin == (uint64_t)(uintptr_t)ptr) noted.at[i].freed = true;
    pthread_mutex_unlock(&noted.lock);
    noted.real->mem_free(dev, ptr, bytes, kind);
}

const fsdp_backend *race_backend(const fsdp_backend *backend)
{
    if (noted.real == backend->device) return &noted.backend;
    noted.real = backend->device;
    noted.ops = *backend->device;
    noted.ops.mem_alloc = note_alloc;
    noted.ops.mem_free = note_free;
    noted.backend = *backend;
    noted.backend.device = &noted.ops;
    return &noted.backend;
}

static uint64_t hash_word(uint64_t hash, uint64_t word) { return fsdp__mix(hash ^ word); }

/* Memory that is not freed; the program's own buffers are one piece, and all else is nowhere. */
static uint64_t hash_place(const race_rig *r, uint64_t hash, uint64_t at)
{
    uint64_t pool = (uint64_t)(uintptr_t)r->pool, piece = UINT64_MAX, offset = 0;
    if (at >= pool && at < pool + r->max_reads * RACE_READ_BYTES) piece = UINT64_MAX - 1, offset = at - pool;
    pthread_mutex_lock(&noted.lock);
    for (uint32_t i = noted.n; i > 0 && piece == UINT64_MAX; i--) {
        const memory *m = &noted.at[i - 1];
        if (!m->freed && at >= m->begin && at - m->begin < m->bytes) piece = m->number, offset = at - m->begin;
    }
    pthread_mutex_unlock(&noted.lock);
    return hash_word(hash_word(hash, piece), offset);
}

/* ---- Records ---- */

/* The event records so far by their event: open addressing. */
struct race_event_seen {
    struct {
        uint64_t event, record; /* record: counted from 1; 0: an empty slot */
    } slot[EVENT_SLOTS];
    uint32_t n;
};

static uint64_t *record_of(struct race_event_seen *seen, uint64_t event)
{
    uint32_t i = (uint32_t)(event * 0x9e3779b97f4a7c15ull >> 51) % EVENT_SLOTS;
    while (seen->slot[i].record != 0 && seen->slot[i].event != event) i = (i + 1) % EVENT_SLOTS;
    if (seen->slot[i].record == 0) {
        if (++seen->n == EVENT_SLOTS) abort();
        seen->slot[i].event = event;
    }
    return &seen->slot[i].record;
}

static uint64_t hash_record(race_rig *r, const fsdp_trace_record *record, uint64_t index)
{
    uint64_t *recorded = record->event != 0 ? record_of(r->seen, record->event) : NULL;
    if (record->kind == FSDP_RECORD_EVENT) *recorded = index + 1;
    const uint64_t what[] = {
        (uint64_t)record->kind,          (uint64_t)record->operation,       (uint64_t)record->mark,
        (uint64_t)record->reason,        (uint64_t)(int64_t)record->stream, (uint64_t)(int64_t)record->other,
        recorded != NULL ? *recorded : 0};
    uint64_t hash = FSDP__HASH_SEED;
    for (size_t i = 0; i < sizeof what / sizeof *what; i++) hash = hash_word(hash, what[i]);
    for (uint32_t i = 0; i < record->n_accesses; i++) {
        hash = hash_word(hash_place(r, hash, record->access[i].begin), record->access[i].bytes);
        hash = hash_word(hash, record->access[i].write);
    }
    return hash;
}

void race_write_down(race_rig *r)
{
    if (r->reference == NULL || r->scenario->no_tape) return;
    uint64_t n = fsdp_trace_count(r->trace);
    if (r->seen == NULL) r->seen = calloc(1, sizeof *r->seen);
    r->record = realloc(r->record, (n + 1) * sizeof *r->record);
    if (r->seen == NULL || r->record == NULL) abort();
    for (; r->n_recorded < n; r->n_recorded++)
        r->record[r->n_recorded] = hash_record(r, fsdp_trace_at(r->trace, r->n_recorded), r->n_recorded);
}

/* Where this tape leaves the one of the first schedule. */
static void compare_records(race_rig *r, const race_reference *ref)
{
    static const char *const kinds[] = {"operation", "wait", "event", "use"};
    uint64_t i = 0, n = ref->n_records[r->rank];
    while (i < n && i < r->n_recorded && r->record[i] == ref->record[r->rank][i]) i++;
    if (i == n && i == r->n_recorded) return;
    const fsdp_trace_record *record = fsdp_trace_at(r->trace, i);
    race_say(r, RACE_TAPE, "record %llu of %llu (%s, stream %d) is another one than in the first schedule, of %llu",
             (unsigned long long)i, (unsigned long long)r->n_recorded, record != NULL ? kinds[record->kind] : "none",
             record != NULL ? record->stream : -1, (unsigned long long)n);
}

void race_compare_tapes(race_rig *r)
{
    race_reference *ref = r->reference;
    fsdp_alloc_stats stats = FSDP_ALLOC_STATS_INIT;
    if (ref == NULL) return;
    race_write_down(r);
    RACE_TRY(r, fsdp_allocator_stats(r->a, &stats));
    if (ref->set[0] && stats.trace_hash != ref->trace_hash) /* every rank's: only its collectives have other places */
        race_say(r, RACE_TAPE, "trace_hash is %016llx; rank 0 had %016llx in the first schedule",
                 (unsigned long long)stats.trace_hash, (unsigned long long)ref->trace_hash);
    if (ref->set[r->rank]) {
        compare_records(r, ref);
        return;
    }
    ref->set[r->rank] = true;
    ref->record[r->rank] = r->record;
    ref->n_records[r->rank] = r->n_recorded;
    if (r->rank == 0) ref->trace_hash = stats.trace_hash;
    r->record = NULL;
}

void race_reference_free(race_reference *reference)
{
    for (int i = 0; i < RACE_WORLD; i++) free(reference->record[i]);
    memset(reference, 0, sizeof *reference);
}

void race_note_drain(race_rig *r, const fsdp_stream *stream)
{
    const fsdp__clocks *clocks = &r->ctx->clocks;
    for (int t = 0; t < clocks->n_slots; t++) {
        const fsdp_stream *drained = clocks->stream[t];
        if (drained == NULL || (stream != NULL && drained != stream)) continue;
        uint64_t event = 2 * ++r->n_drains + 1; /* odd: no device's */
        fsdp_trace_record record = {
            .kind = FSDP_RECORD_EVENT, .stream = t, .other = -1, .label = "drain", .event = event};
        fsdp__trace_add(r->trace, &record);
        record.kind = FSDP_RECORD_WAIT;
        record.other = t;
        for (int s = 0; s < clocks->n_slots; s++) {
            record.stream = s;
            if (s != t && clocks->stream[s] != NULL) fsdp__trace_add(r->trace, &record);
        }
    }
}
