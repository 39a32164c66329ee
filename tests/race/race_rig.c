/* SPDX-License-Identifier: MIT */
#include "race_rig.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hb_oracle.h"
#include "xorshift.h"

enum { POISON = 0xa5 };
static const uint64_t timeout_ns = 20000000000ull;

void race_say(race_rig *r, race_judge judge, const char *format, ...)
{
    static const char *const names[RACE_JUDGES] = {"call", "data", "order", "device", "tape"};
    race_verdict *v = r->verdict;
    v->found[judge]++;
    if (judge == RACE_CALL) r->stopped = true;
    if (v->text[0] != '\0') return;
    int n = snprintf(v->text, sizeof v->text, "[%s] rank %u: ", names[judge], r->rank);
    va_list args;
    va_start(args, format);
    vsnprintf(v->text + n, sizeof v->text - (size_t)n, format, args);
    va_end(args);
}

uint64_t race_draw(race_rig *r, uint64_t below) { return (xorshift(&r->random) >> 11) % below; }

uint8_t race_next_byte(race_rig *r)
{
    r->last_byte = (uint8_t)(r->last_byte % 255 + 1);
    if (r->last_byte == POISON) r->last_byte++;
    return r->last_byte;
}

/* ---- Blocks ---- */

static race_block *free_entry(race_rig *r)
{
    for (int i = 0; i < RACE_LIVE; i++)
        if (r->live[i].ptr == NULL) return &r->live[i];
    abort(); /* the program's mistake */
}

race_block *race_try_take(race_rig *r, uint64_t bytes, int stream)
{
    race_block *block = free_entry(r);
    void *ptr = NULL;
    if (r->stopped) return NULL;
    fsdp_status status = fsdp_allocator_alloc(r->a, bytes, r->s[stream], r->scenario->name, &ptr);
    if (status == FSDP_ERR_NO_MEMORY) {
        r->verdict->n_refused++;
        return NULL;
    }
    if (status != FSDP_OK) {
        race_say(r, RACE_CALL, "fsdp_allocator_alloc: %s", fsdp_last_error());
        return NULL;
    }
    *block = (race_block){.ptr = ptr, .bytes = bytes, .stream = stream, .last = stream, .declared = 1u << stream};
    return block;
}

race_block *race_take(race_rig *r, uint64_t bytes, int stream)
{
    race_block *block = race_try_take(r, bytes, stream);
    if (block == NULL && !r->stopped) race_say(r, RACE_CALL, "no room for %llu bytes", (unsigned long long)bytes);
    return block;
}

void race_give(race_rig *r, race_block *block)
{
    if (r->stopped || block == NULL) return;
    RACE_TRY(r, fsdp_allocator_free(r->a, block->ptr));
    if (r->x != NULL && !r->stopped) explore_freed(r->x, r->rank, block->ptr, block->bytes);
    block->ptr = NULL;
}

void race_write(race_rig *r, race_block *block, int stream)
{
    if (r->stopped) return;
    block->byte = race_next_byte(r);
    RACE_TRY(r, fsdp_stream_fill(r->s[stream], block->ptr, block->byte, block->bytes));
}

void race_read_bytes(race_rig *r, const void *ptr, uint64_t bytes, uint8_t want, int stream)
{
    if (r->stopped || r->n_reads == r->max_reads) return;
    if (bytes > RACE_READ_BYTES) bytes = RACE_READ_BYTES;
    race_read_back *read = &r->read[r->n_reads];
    *read = (race_read_back){want, (uint16_t)bytes, (int8_t)stream, r->n_reads * RACE_READ_BYTES};
    r->n_reads++;
    RACE_TRY(r, fsdp_stream_copy(r->s[stream], r->pool + read->at, ptr, bytes));
}

void race_read_part(race_rig *r, const race_block *block, int stream, uint64_t begin)
{
    if (r->stopped) return;
    race_read_bytes(r, block->ptr + begin, block->bytes - begin, block->byte, stream);
}

void race_read(race_rig *r, const race_block *block, int stream)
{
    if (r->stopped) return;
    race_read_part(r, block, stream, block->bytes > RACE_READ_BYTES ? block->bytes - RACE_READ_BYTES : 0);
}

void race_copy(race_rig *r, race_block *to, const race_block *from, int stream)
{
    if (r->stopped || to->bytes > from->bytes) return;
    to->byte = from->byte;
    RACE_TRY(r, fsdp_stream_copy(r->s[stream], to->ptr, from->ptr, to->bytes));
}

/* ---- Streams ---- */

void race_order(race_rig *r, int stream, int other) { RACE_TRY(r, fsdp_stream_wait_stream(r->s[stream], r->s[other])); }

void race_record_stream(race_rig *r, race_block *block, int stream)
{
    if (!r->stopped) RACE_TRY(r, fsdp_allocator_record_stream(r->a, block->ptr, r->s[stream]));
}

void race_record_use(race_rig *r, race_block *block, int stream)
{
    if (!r->stopped) RACE_TRY(r, fsdp_allocator_record_use(r->a, block->ptr, r->s[stream]));
}

void race_event_record(race_rig *r, int event, int stream)
{
    RACE_TRY(r, fsdp_event_record(r->event[event], r->s[stream]));
}

void race_event_wait(race_rig *r, int event, int stream)
{
    RACE_TRY(r, fsdp_stream_wait_event(r->s[stream], r->event[event]));
}

void race_renew(race_rig *r, int stream)
{
    static const char *const names[] = {"a", "b", "c", "d", "e", "f"};
    if (r->stopped) return;
    const fsdp_stream *before = r->s[stream];
    race_note_drain(r, before); /* its records stand before those of whoever is given anything after the release */
    RACE_TRY(r, fsdp_stream_release(r->s[stream]));
    if (r->stopped) return;
    r->s[stream] = NULL;
    RACE_TRY(r, fsdp_stream_create(r->ctx, names[stream], &r->s[stream]));
}

void race_trim(race_rig *r)
{
    if (r->stopped) return;
    race_note_drain(r, NULL);
    race_write_down(r);
    RACE_TRY(r, fsdp_allocator_trim_host(r->a));
}

static void start_tape(race_rig *r)
{
    RACE_TRY(r, fsdp_trace_start(r->ctx, 4096 + 10 * (uint64_t)r->scenario->n_moves, &r->trace));
}

void race_restart_tape(race_rig *r)
{
    RACE_TRY(r, fsdp_trace_stop_host(r->trace));
    if (r->stopped) return;
    fsdp_trace_destroy(r->trace);
    r->trace = NULL;
    start_tape(r);
}

/* ---- Open and close ---- */

static void open_context(race_rig *r)
{
    explore_rank place = {sizeof place, r->x, r->rank};
    fsdp_host_config host = FSDP_HOST_CONFIG_INIT;
    host.jitter_ns = 20000;
    host.jitter_seed = r->jitter_seed;
    fsdp_config config = FSDP_CONFIG_INIT;
    config.backend = race_backend(r->x != NULL ? explore_backend() : fsdp_host_backend());
    config.backend_config = r->x != NULL ? (const void *)&place : &host;
    config.timeout_ns = timeout_ns;
    RACE_TRY(r, fsdp_context_create(&config, &r->ctx));
}

void race_open(race_rig *r)
{
    static const char *const names[] = {"a", "b", "c", "d", "e", "f"};
    const race_scenario *scenario = r->scenario;
    uint64_t moves = scenario->n_moves;
    r->random = (scenario->number + 1) * 0x9e3779b97f4a7c15ull;
    r->max_reads = moves > 0 ? moves : 512;
    r->pool = calloc(r->max_reads, RACE_READ_BYTES);
    r->read = calloc(r->max_reads, sizeof *r->read);
    if (r->pool == NULL || r->read == NULL) abort();
    open_context(r);
    if (r->stopped) return;
    for (uint32_t i = 0; i < scenario->n_streams; i++) RACE_TRY(r, fsdp_stream_create(r->ctx, names[i], &r->s[i]));
    for (int i = 0; i < RACE_EVENTS; i++) RACE_TRY(r, fsdp_event_create(r->ctx, &r->event[i]));
    r->s[RACE_COPY] = fsdp_context_lane(r->ctx, FSDP_LANE_COPY);
    fsdp_allocator_config config = FSDP_ALLOCATOR_CONFIG_INIT;
    config.name = scenario->name;
    config.budget_bytes = scenario->budget_bytes;
    config.segment_bytes = scenario->segment_bytes;
    config.policy = scenario->policy;
    config.history = 0;
    RACE_TRY(r, fsdp_allocator_create(r->ctx, &config, &r->a));
    start_tape(r);
}

static void judge_reads(race_rig *r)
{
    for (uint64_t i = 0; i < r->n_reads; i++) {
        const race_read_back *read = &r->read[i];
        const char *got = r->pool + read->at;
        uint32_t k = 0;
        while (k < read->bytes && (uint8_t)got[k] == read->want) k++;
        if (k == read->bytes) continue;
        race_say(r, RACE_DATA, "read %llu (stream %d): byte %u of %u is %02x, expected %02x%s", (unsigned long long)i,
                 read->stream, k, read->bytes, (uint8_t)got[k], read->want,
                 (uint8_t)got[k] == POISON ? ": it was freed, or never written" : "");
    }
}

static void judge(race_rig *r)
{
    char text[640];
    RACE_TRY(r, fsdp_trace_stop_host(r->trace));
    const char *complaint = r->x != NULL ? explore_complaint(r->x) : NULL;
    if (complaint != NULL) race_say(r, RACE_DEVICE, "%.600s", complaint);
    if (r->stopped) return;
    judge_reads(r);
    size_t races = hb_check(r->trace, text, sizeof text);
    if (races == SIZE_MAX) race_say(r, RACE_CALL, "%s", text);
    else if (races > 0) {
        race_say(r, RACE_ORDER, "%s", text);
        r->verdict->found[RACE_ORDER] += races - 1;
    }
    if (!r->scenario->no_tape) race_compare_tapes(r);
    r->verdict->n_records += fsdp_trace_count(r->trace);
    r->verdict->n_reads += r->n_reads;
    fsdp_counters counters = FSDP_COUNTERS_INIT;
    RACE_TRY(r, fsdp_context_counters(r->ctx, &counters));
    r->verdict->n_waits += counters.waits;
}

/* Also after a failure: as far as it goes. */
void race_close(race_rig *r)
{
    if (r->trace != NULL) judge(r);
    for (int i = 0; r->a != NULL && i < RACE_LIVE; i++)
        if (r->live[i].ptr != NULL) RACE_TRY(r, fsdp_allocator_free(r->a, r->live[i].ptr));
    fsdp_trace_destroy(r->trace);
    bool closed = r->a == NULL || fsdp_allocator_destroy(r->a) == FSDP_OK;
    for (int i = 0; i < RACE_EVENTS; i++) fsdp_event_destroy(r->event[i]);
    for (int i = 0; i < RACE_STREAMS; i++) closed = fsdp_stream_release(r->s[i]) == FSDP_OK && closed;
    if (r->ctx != NULL && (fsdp_context_destroy(r->ctx) != FSDP_OK || !closed))
        race_say(r, RACE_CALL, "close: %s", fsdp_last_error());
    free(r->pool);
    free(r->read);
    free(r->record);
    free(r->seen);
}

/* ---- One run ---- */

typedef struct run {
    const race_scenario *scenario;
    explore *x;
    uint64_t jitter_seed;
    race_reference *reference;
    race_verdict verdict[RACE_WORLD];
} run;

static void run_rank(uint32_t rank, void *arg)
{
    run *u = arg;
    race_rig *r = calloc(1, sizeof *r);
    if (r == NULL) abort();
    r->scenario = u->scenario;
    r->x = u->x;
    r->rank = rank;
    r->jitter_seed = u->jitter_seed;
    r->reference = u->reference;
    r->verdict = &u->verdict[rank];
    race_open(r);
    if (!r->stopped) u->scenario->play(r);
    race_close(r);
    free(r);
}

void race_play_on(const race_scenario *scenario, explore *x, uint64_t jitter_seed, race_reference *reference,
                  race_verdict *verdict)
{
    run u = {scenario, x, jitter_seed, reference, {{{0}, "", 0, 0, 0, 0, 0, 0}}};
    race_forget_memory();
    uint32_t world = scenario->world > 1 ? scenario->world : 1;
    if (world == 1) run_rank(0, &u);
    else explore_run_ranks(x, run_rank, &u);
    for (uint32_t rank = 0; rank < world; rank++) {
        const race_verdict *v = &u.verdict[rank];
        if (verdict->text[0] == '\0') memcpy(verdict->text, v->text, sizeof v->text);
        for (int j = 0; j < RACE_JUDGES; j++) verdict->found[j] += v->found[j];
        verdict->n_records += v->n_records;
        verdict->n_waits += v->n_waits;
        verdict->n_reads += v->n_reads;
        verdict->n_moves += v->n_moves;
        verdict->n_refused += v->n_refused;
    }
    if (x != NULL) verdict->n_steps += explore_steps(x);
}

uint64_t race_judged(const race_verdict *verdict)
{
    uint64_t n = 0;
    for (int j = 0; j < RACE_JUDGES; j++) n += verdict->found[j];
    return n;
}
