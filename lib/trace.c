/* SPDX-License-Identifier: MIT */
/* The tape: records in host order, the spans that the device fills, and the labels, in arrays that never move. */
#include "trace.h"

#include <string.h>

#include "check.h"
#include "context.h"
#include "graph.h"
#include "hostmem.h"
#include "timeline.h"
#include "timeline_svg.h"

enum {
    POOL_BYTES = 1 << 18,  /* text of the labels; a model of 1000 units needs a tenth */
    LABEL_SLOTS = 1 << 14, /* hash table, at most half full */
    MAX_LABELS = LABEL_SLOTS / 2,
    MAX_RECORDS = 1 << 26 /* 15 GB of tape: more than that is a mistake */
};

struct fsdp_trace {
    fsdp_context *ctx;
    uint64_t capacity, count, dropped;
    bool stopped;              /* the device is through with the spans, and the records have their times */
    fsdp_trace_record *record; /* [capacity] */
    fsdp_span *span;           /* [capacity]: written by the device until stopped */
    char *pool;                /* [POOL_BYTES]: each label once, NUL-terminated; pool[0] is "" */
    uint32_t pool_used, n_labels;
    uint32_t *label_at; /* [LABEL_SLOTS]: offset into pool; 0: empty */
    char stream_name[FSDP__SLOTS][sizeof((fsdp_stream *)0)->name];
    bool stream_seen[FSDP__SLOTS];
    bool has_time[FSDP__SLOTS]; /* the stream's last record */
};

static void free_trace(const fsdp_host_allocator *host, fsdp_trace *trace)
{
    fsdp__host_free(host, trace->label_at, LABEL_SLOTS, sizeof *trace->label_at);
    fsdp__host_free(host, trace->pool, POOL_BYTES, 1);
    fsdp__host_free(host, trace->span, trace->capacity, sizeof *trace->span);
    fsdp__host_free(host, trace->record, trace->capacity, sizeof *trace->record);
    fsdp__host_free(host, trace, 1, sizeof *trace);
}

static fsdp_trace *make_trace(fsdp_context *ctx, uint64_t capacity)
{
    fsdp_trace *trace = fsdp__host_alloc(&ctx->host, 1, sizeof *trace);
    if (trace == NULL) return NULL;
    trace->ctx = ctx;
    trace->capacity = capacity;
    trace->record = fsdp__host_alloc(&ctx->host, capacity, sizeof *trace->record);
    trace->span = fsdp__host_alloc(&ctx->host, capacity, sizeof *trace->span);
    trace->pool = fsdp__host_alloc(&ctx->host, POOL_BYTES, 1);
    trace->label_at = fsdp__host_alloc(&ctx->host, LABEL_SLOTS, sizeof *trace->label_at);
    trace->pool_used = 1;
    if (trace->record != NULL && trace->span != NULL && trace->pool != NULL && trace->label_at != NULL) return trace;
    free_trace(&ctx->host, trace);
    return NULL;
}

fsdp_status fsdp_trace_start(fsdp_context *ctx, uint64_t max_records, fsdp_trace **out_trace)
{
    FSDP_NEED(ctx);
    FSDP_NEED(out_trace);
    FSDP_TRY(fsdp__capture_off(__func__, ctx));
    if (max_records == 0 || max_records > MAX_RECORDS)
        return fsdp__fail(FSDP_ERR_ARG, "fsdp_trace_start: max_records is %llu, expected 1 to %d",
                          (unsigned long long)max_records, MAX_RECORDS);
    fsdp_trace *trace = make_trace(ctx, max_records);
    if (trace == NULL)
        return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "no host memory for a trace of %llu records of %zu bytes",
                          (unsigned long long)max_records, sizeof(fsdp_trace_record) + sizeof(fsdp_span));

    fsdp__lock(ctx);
    bool one_is_on = ctx->trace != NULL;
    if (!one_is_on) {
        ctx->trace = trace;
        ctx->n_live[FSDP__CHILD_TRACE]++;
        ctx->n_open_traces++;
    }
    fsdp__unlock(ctx);
    if (one_is_on) {
        free_trace(&ctx->host, trace);
        return fsdp__fail(FSDP_ERR_STATE, "fsdp_trace_start: a trace is on in this context; stop it first");
    }
    *out_trace = trace;
    return FSDP_OK;
}

static uint32_t hash_label(const char *label, size_t *out_bytes)
{
    /* FNV-1a, 32 bits: www.isthe.com/chongo/tech/comp/fnv */
    uint32_t hash = 2166136261u;
    size_t n = 0;
    for (; label[n] != '\0'; n++) hash = (hash ^ (unsigned char)label[n]) * 16777619u;
    *out_bytes = n + 1;
    return hash;
}

/* The pool's copy of label, which may be gone after the call; "" once the pool is full. */
static const char *intern_label(fsdp_trace *trace, const char *label)
{
    if (label == NULL || label[0] == '\0') return trace->pool;
    size_t bytes;
    uint32_t slot = hash_label(label, &bytes) % LABEL_SLOTS;
    for (; trace->label_at[slot] != 0; slot = (slot + 1) % LABEL_SLOTS) {
        const char *known = trace->pool + trace->label_at[slot];
        if (strcmp(known, label) == 0) return known;
    }
    if (trace->n_labels == MAX_LABELS || bytes > POOL_BYTES - trace->pool_used) return trace->pool;
    char *copy = trace->pool + trace->pool_used;
    memcpy(copy, label, bytes);
    trace->label_at[slot] = trace->pool_used;
    trace->pool_used += (uint32_t)bytes;
    trace->n_labels++;
    return copy;
}

/* The stream may be released before somebody asks for its name. A slot keeps the name of its first owner. */
static void note_stream(fsdp_trace *trace, int32_t slot)
{
    if (slot < 0 || slot >= FSDP__SLOTS || trace->stream_seen[slot]) return;
    const fsdp_stream *stream = trace->ctx->clocks.stream[slot];
    if (stream == NULL) return;
    memcpy(trace->stream_name[slot], stream->name, sizeof stream->name);
    trace->stream_seen[slot] = true;
}

fsdp_span *fsdp__trace_add(fsdp_trace *trace, const fsdp_trace_record *record)
{
    if (trace == NULL) return NULL;
    assert(record->stream >= 0 && record->stream < FSDP__SLOTS);
    assert(record->n_accesses <= FSDP_TRACE_MAX_ACCESSES);
    if (trace->count == trace->capacity) {
        trace->dropped++;
        return NULL;
    }
    fsdp_trace_record *kept = &trace->record[trace->count];
    *kept = *record;
    kept->label = intern_label(trace, record->label);
    kept->start_ns = kept->end_ns = 0;
    if (record->kind != FSDP_RECORD_HOST) trace->has_time[record->stream] = record->kind != FSDP_RECORD_USE;
    note_stream(trace, record->stream);
    if (record->kind == FSDP_RECORD_WAIT) note_stream(trace, record->other);
    return &trace->span[trace->count++];
}

void fsdp__trace_take_back(fsdp_trace *trace, const fsdp_span *span)
{
    if (span == NULL) trace->dropped--;
    else trace->count--;
}

/* Record no more, and wait until the device is through with the spans. */
static fsdp_status drain(fsdp_trace *trace)
{
    fsdp_context *ctx = trace->ctx;
    fsdp__lock(ctx);
    if (ctx->trace == trace) ctx->trace = NULL;
    fsdp_status status = fsdp__context_drain(ctx, ctx->timeout_ns);
    if (status == FSDP_OK) ctx->n_open_traces--;
    fsdp__unlock(ctx);
    return status;
}

fsdp_status fsdp_trace_stop_host(fsdp_trace *trace)
{
    FSDP_NEED(trace);
    if (trace->stopped) return FSDP_OK;
    FSDP_TRY(drain(trace));
    for (uint64_t i = 0; i < trace->count; i++) {
        /* What began and never ended, on a device that failed, has not run. */
        if (trace->span[i].end_ns < trace->span[i].start_ns) continue;
        trace->record[i].start_ns = trace->span[i].start_ns;
        trace->record[i].end_ns = trace->span[i].end_ns;
    }
    trace->stopped = true;
    return FSDP_OK;
}

void fsdp_trace_destroy(fsdp_trace *trace)
{
    if (trace == NULL) return;
    fsdp_context *ctx = trace->ctx;
    /* The device writes into the spans until its streams are idle. One that does not get there in time, or cannot be waited
     * for, keeps the tape: a leak, where freeing would let it write into freed memory. */
    fsdp_status drained = trace->stopped ? FSDP_OK : drain(trace);
    bool in_flight = drained == FSDP_ERR_TIMEOUT || drained == FSDP_ERR_STATE;
    fsdp__lock(ctx);
    if (drained != FSDP_OK) ctx->n_open_traces--; /* nobody has it any more */
    ctx->n_live[FSDP__CHILD_TRACE]--;
    fsdp__unlock(ctx);
    if (!in_flight) free_trace(&ctx->host, trace);
}

bool fsdp__trace_sees_kernels(const fsdp_trace *trace) { return !trace->ctx->caps.native_kernels; }

bool fsdp__trace_wants_time(const fsdp_trace *trace, int32_t slot)
{
    return !fsdp__trace_sees_kernels(trace) && !trace->has_time[slot];
}

uint64_t fsdp_trace_count(const fsdp_trace *trace)
{
    if (trace == NULL) return 0;
    fsdp__lock(trace->ctx);
    uint64_t count = trace->count;
    fsdp__unlock(trace->ctx);
    return count;
}

uint64_t fsdp_trace_dropped(const fsdp_trace *trace)
{
    if (trace == NULL) return 0;
    fsdp__lock(trace->ctx);
    uint64_t dropped = trace->dropped;
    fsdp__unlock(trace->ctx);
    return dropped;
}

const fsdp_trace_record *fsdp_trace_at(const fsdp_trace *trace, uint64_t index)
{
    return index < fsdp_trace_count(trace) ? &trace->record[index] : NULL;
}

const char *fsdp_trace_stream_name(const fsdp_trace *trace, int32_t stream)
{
    if (trace == NULL || stream < 0 || stream >= FSDP__SLOTS) return "";
    return trace->stream_name[stream];
}

fsdp_status fsdp_trace_summarize(const fsdp_trace *trace, const fsdp_stream *compute, fsdp_trace_summary *out_summary)
{
    FSDP_NEED(trace);
    FSDP_NEED(compute);
    FSDP_NEED(out_summary);
    if (compute->ctx != trace->ctx)
        return fsdp__fail(FSDP_ERR_ARG, "fsdp_trace_summarize: stream %s is not of the trace's context", compute->name);
    if (!trace->stopped)
        return fsdp__fail(FSDP_ERR_STATE, "fsdp_trace_summarize: the trace is on: call fsdp_trace_stop_host first");
    fsdp_trace_summary summary = FSDP_TRACE_SUMMARY_INIT;
    fsdp__timeline_sum(trace, compute->slot, &summary);
    return fsdp__write_result("fsdp_trace_summary", out_summary, &summary, sizeof summary, sizeof summary);
}

fsdp_status fsdp_trace_write_svg(const fsdp_trace *trace, const char *path, const char *title)
{
    FSDP_NEED(trace);
    FSDP_NEED(path);
    FSDP_NEED(title);
    if (path[0] == '\0') return fsdp__fail(FSDP_ERR_ARG, "fsdp_trace_write_svg: path is empty");
    if (!trace->stopped)
        return fsdp__fail(FSDP_ERR_STATE, "fsdp_trace_write_svg: the trace is on: call fsdp_trace_stop_host first");
    return fsdp__timeline_write(&trace->ctx->host, trace, path, title);
}

const char *fsdp_operation_name(fsdp_operation operation)
{
    switch (operation) {
    case FSDP_OPERATION_ALL_GATHER: return "all-gather";
    case FSDP_OPERATION_REDUCE_SCATTER: return "reduce-scatter";
    case FSDP_OPERATION_ALL_REDUCE: return "all-reduce";
    case FSDP_OPERATION_BROADCAST: return "broadcast";
    case FSDP_OPERATION_BARRIER: return "barrier";
    case FSDP_OPERATION_COPY: return "copy";
    case FSDP_OPERATION_FILL: return "fill";
    case FSDP_OPERATION_CAST: return "cast";
    case FSDP_OPERATION_ADD: return "add";
    case FSDP_OPERATION_SQUARE_SUM: return "square sum";
    case FSDP_OPERATION_STEP_INPUT: return "step input";
    case FSDP_OPERATION_STEP_RESULT: return "step result";
    case FSDP_OPERATION_ADAMW: return "adamw";
    case FSDP_OPERATION_HOST_CALL: return "host call";
    case FSDP_OPERATION_DELAY: return "delay";
    case FSDP_OPERATION_CAPTURE: return "capture";
    case FSDP_OPERATION_REPLAY: return "replay";
    }
    return "?";
}

const char *fsdp_mark_name(fsdp_mark mark)
{
    switch (mark) {
    case FSDP_MARK_READY: return "ready";
    case FSDP_MARK_USED: return "used";
    case FSDP_MARK_GRADS: return "grads";
    case FSDP_MARK_REDUCED: return "reduced";
    case FSDP_MARK_UPDATED: return "updated";
    case FSDP_MARK_NORM_PART: return "norm.part";
    case FSDP_MARK_NORM_SUM: return "norm.sum";
    case FSDP_MARK_CALLER: return "caller";
    case FSDP_MARK_DEMAND: return "demand";
    }
    return "?";
}

const char *fsdp_reason_name(fsdp_reason reason)
{
    switch (reason) {
    case FSDP_REASON_READ: return "read";
    case FSDP_REASON_WRITE: return "write";
    case FSDP_REASON_REUSE: return "reuse";
    case FSDP_REASON_CALLER: return "caller";
    }
    return "?";
}
