/* SPDX-License-Identifier: MIT */
/* What a stopped tape says about time: the sums of one stream, and what a picture of it shows, as bars and arrows. */
#include "timeline.h"

#include <string.h>

#include "check.h"
#include "hostmem.h"
#include "timeline_gap.h"

enum { SLOTS = FSDP__TIMELINE_SLOTS };

/* ---- Sums ---- */

/* Time that is not counted yet, of operations that begin in order: members of one group have one span between them. */
static uint64_t add_busy(uint64_t *busy_until_ns, const fsdp_trace_record *record)
{
    uint64_t begin = record->start_ns > *busy_until_ns ? record->start_ns : *busy_until_ns;
    if (record->end_ns <= begin) return 0;
    *busy_until_ns = record->end_ns;
    return record->end_ns - begin;
}

static bool is_gather(const fsdp_trace_record *record)
{
    return record->kind == FSDP_RECORD_OPERATION && record->operation == FSDP_OPERATION_ALL_GATHER;
}

static bool is_reduction(const fsdp_trace_record *record)
{
    return record->kind == FSDP_RECORD_OPERATION &&
           (record->operation == FSDP_OPERATION_REDUCE_SCATTER || record->operation == FSDP_OPERATION_ALL_REDUCE);
}

static void sum_wait(const fsdp_trace_record *record, fsdp_trace_summary *out)
{
    uint64_t stood_ns = record->end_ns - record->start_ns;
    out->exposed_ns += stood_ns;
    if (record->other == FSDP_LANE_GATHER) out->exposed_gather_ns += stood_ns;
    if (record->other == FSDP_LANE_REDUCE) out->exposed_reduce_ns += stood_ns;
}

static void sum_gap(const fsdp__gaps *gaps, const fsdp__gap *gap, fsdp_trace_summary *out)
{
    out->late_ns += gap->late_ns;
    if (!gaps->sees_kernels) /* of a lane there is none then */
        out->between_ns += gap->end_ns - gap->start_ns;
}

void fsdp__timeline_sum(const fsdp_trace *trace, int32_t slot, fsdp_trace_summary *out)
{
    uint64_t first_ns = UINT64_MAX, last_ns = 0, compute_until_ns = 0;
    uint64_t gather_until_ns[SLOTS] = {0}, reduce_until_ns[SLOTS] = {0};
    fsdp__gaps gaps;
    fsdp__gaps_begin(&gaps, trace);
    uint64_t n = fsdp_trace_count(trace);
    for (uint64_t i = 0; i < n; i++) {
        const fsdp_trace_record *record = fsdp_trace_at(trace, i);
        fsdp__gap gap;
        if (fsdp__gaps_read(&gaps, record, &gap) && record->stream == slot) sum_gap(&gaps, &gap, out);
        if (!fsdp__has_run(record)) continue;
        if (record->start_ns < first_ns) first_ns = record->start_ns;
        if (record->end_ns > last_ns) last_ns = record->end_ns;
        if (record->kind == FSDP_RECORD_WAIT && record->stream == slot) sum_wait(record, out);
        if (record->kind == FSDP_RECORD_OPERATION && record->stream == slot)
            out->compute_ns += add_busy(&compute_until_ns, record);
        if (is_gather(record)) {
            out->gather_ns += add_busy(&gather_until_ns[record->stream], record);
            out->gather_bytes += record->bytes;
        }
        if (is_reduction(record)) {
            out->reduce_ns += add_busy(&reduce_until_ns[record->stream], record);
            out->reduce_bytes += record->bytes;
        }
    }
    out->span_ns = last_ns > first_ns ? last_ns - first_ns : 0;
}

/* ---- What a picture shows ---- */

enum { LOOK_BACK = 4096 /* records in which an awaited event is looked for: one before them is long past */ };

/* What was open and pending on each stream while the tape is read. */
typedef struct reader {
    fsdp__timeline *out;
    fsdp__gaps gaps;
    bool has_windows[SLOTS];
    fsdp__bar pending[SLOTS]; /* count 0: none */
    uint64_t last_arrow_ns[SLOTS + 1][SLOTS][FSDP__WEIGHTS];
} reader;

/* Rows: compute streams by slot, then the lanes. A stream without windows that only records events has none. */
static void make_rows(fsdp__timeline *t, const bool *used, const uint64_t *busy_ns)
{
    t->compute_slot = -1;
    for (int i = 0; i < SLOTS; i++) {
        int slot = (i + FSDP_LANE_COPY + 1) % SLOTS;
        t->row_of[slot] = -1;
        if (!used[slot]) continue;
        t->slot_of[t->n_rows] = slot;
        t->row_of[slot] = t->n_rows++;
        if (!fsdp__is_lane(slot) && (t->compute_slot < 0 || busy_ns[slot] > busy_ns[t->compute_slot]))
            t->compute_slot = slot;
    }
}

static void survey(fsdp__timeline *t, int pixels, fsdp__gaps *gaps)
{
    fsdp__gaps_begin(gaps, t->trace);
    bool used[SLOTS] = {false};
    uint64_t busy_ns[SLOTS] = {0}, first_ns = UINT64_MAX, last_ns = 0, n = fsdp_trace_count(t->trace);
    for (uint64_t i = 0; i < n; i++) {
        const fsdp_trace_record *record = fsdp_trace_at(t->trace, i);
        fsdp__gap gap;
        if (fsdp__gaps_read(gaps, record, &gap) && !gaps->sees_kernels && gap.late_ns == 0)
            busy_ns[record->stream] += gap.end_ns - gap.start_ns;
        if (record->kind == FSDP_RECORD_USE) used[record->stream] = true;
        if (!fsdp__has_run(record)) continue;
        if (record->start_ns < first_ns) first_ns = record->start_ns;
        if (record->end_ns > last_ns) last_ns = record->end_ns;
        if (record->kind == FSDP_RECORD_EVENT) continue;
        used[record->stream] = true;
        if (record->kind == FSDP_RECORD_OPERATION) busy_ns[record->stream] += record->end_ns - record->start_ns;
    }
    t->first_ns = first_ns < last_ns ? first_ns : last_ns;
    t->span_ns = last_ns > first_ns ? last_ns - first_ns : 1;
    t->pixel_ns = t->span_ns / (uint64_t)pixels + 1;
    make_rows(t, used, busy_ns);
}

/* ---- Arrows ---- */

static const fsdp_trace_record *find_event(const fsdp_trace *trace, uint64_t wait_index, uint64_t event)
{
    for (uint64_t back = 1; back <= wait_index && back <= LOOK_BACK; back++) {
        const fsdp_trace_record *record = fsdp_trace_at(trace, wait_index - back);
        if (record->kind == FSDP_RECORD_EVENT && record->event == event) return fsdp__has_run(record) ? record : NULL;
    }
    return NULL;
}

/* Of arrows that would lie on one another the first stands for all: of the same rows and weight, one in two pixels. */
static bool hides(reader *r, const fsdp__arrow *a)
{
    uint64_t *last_ns = &r->last_arrow_ns[a->from_row + 1][a->to_row][a->weight];
    if (*last_ns != 0 && a->wait->end_ns < *last_ns + 2 * r->out->pixel_ns) return true;
    *last_ns = a->wait->end_ns;
    return false;
}

static bool read_wait(reader *r, uint64_t index, const fsdp_trace_record *wait)
{
    fsdp__timeline *t = r->out;
    const fsdp_trace_record *event = find_event(t->trace, index, wait->event);
    fsdp__arrow a = {.wait = wait, .from_row = -1, .to_row = t->row_of[wait->stream], .weight = FSDP__WEIGHT_PASSED};
    if (wait->end_ns - wait->start_ns >= t->pixel_ns)
        a.weight = fsdp__is_lane(wait->stream) ? FSDP__WEIGHT_STOOD : FSDP__WEIGHT_EXPOSED;
    if (event != NULL && event->stream != wait->stream) {
        a.from_ns = event->end_ns;
        a.from_row = t->row_of[event->stream];
    }
    if (a.from_row < 0 && a.weight != FSDP__WEIGHT_EXPOSED) return true;
    if (hides(r, &a)) return true;
    if (!fsdp__host_grow(t->host, &t->arrow, &t->arrow_capacity, t->n_arrows + 1, sizeof *t->arrow)) return false;
    t->arrow[t->n_arrows++] = a;
    return true;
}

/* ---- Bars ---- */

static fsdp__shade shade_of_compute(const fsdp__window *inside)
{
    if (inside == NULL) return FSDP__SHADE_COMPUTE;
    return inside->writes ? FSDP__SHADE_BACKWARD : FSDP__SHADE_FORWARD;
}

static fsdp__shade shade_of(fsdp_operation operation, const fsdp__window *inside)
{
    switch (operation) {
    case FSDP_OPERATION_ALL_GATHER: return FSDP__SHADE_GATHER;
    case FSDP_OPERATION_REDUCE_SCATTER: return FSDP__SHADE_SCATTER;
    case FSDP_OPERATION_ALL_REDUCE: return FSDP__SHADE_ALL_REDUCE;
    case FSDP_OPERATION_BROADCAST:
    case FSDP_OPERATION_BARRIER: return FSDP__SHADE_OTHER;
    case FSDP_OPERATION_COPY:
    case FSDP_OPERATION_FILL:
    case FSDP_OPERATION_CAST:
    case FSDP_OPERATION_ADD: return FSDP__SHADE_SMALL;
    case FSDP_OPERATION_SQUARE_SUM:
    case FSDP_OPERATION_STEP_INPUT:
    case FSDP_OPERATION_STEP_RESULT:
    case FSDP_OPERATION_ADAMW: return FSDP__SHADE_OPTIMIZER;
    case FSDP_OPERATION_HOST_CALL:
    case FSDP_OPERATION_CAPTURE:
    case FSDP_OPERATION_REPLAY:
    case FSDP_OPERATION_DELAY: break;
    }
    return shade_of_compute(inside);
}

static bool note_unit(fsdp__timeline *t, const char *label, size_t *out_unit)
{
    for (*out_unit = 0; *out_unit < t->n_units; ++*out_unit)
        if (strcmp(t->unit[*out_unit], label) == 0) return true;
    if (!fsdp__host_grow(t->host, &t->unit, &t->unit_capacity, t->n_units + 1, sizeof *t->unit)) return false;
    t->unit[t->n_units++] = label;
    return true;
}

static bool keep_bar(reader *r, fsdp__bar *pending)
{
    fsdp__timeline *t = r->out;
    if (pending->count == 0) return true;
    if (!fsdp__host_grow(t->host, &t->bar, &t->bar_capacity, t->n_bars + 1, sizeof *t->bar)) return false;
    t->bar[t->n_bars++] = *pending;
    pending->count = 0;
    return true;
}

/* Those that together are narrower than half a pixel are one bar, with the looks of the longest; so are the members of a group,
 * which have one span. */
static bool add_bar(reader *r, int32_t slot, fsdp__bar b)
{
    fsdp__bar *pending = &r->pending[slot];
    b.count = 1;
    b.row = r->out->row_of[slot];
    b.longest_ns = b.end_ns - b.start_ns;
    bool one_span = b.start_ns == pending->start_ns && b.end_ns == pending->end_ns;
    bool narrow = 2 * (b.end_ns - pending->start_ns) < r->out->pixel_ns;
    if (pending->count == 0 || (!one_span && !narrow)) {
        if (!keep_bar(r, pending)) return false;
        *pending = b;
        return true;
    }
    fsdp__bar both = b.longest_ns > pending->longest_ns ? b : *pending;
    both.start_ns = pending->start_ns;
    both.end_ns = b.end_ns > pending->end_ns ? b.end_ns : pending->end_ns;
    both.bytes = pending->bytes + b.bytes;
    both.count = pending->count + 1;
    *pending = both;
    return true;
}

static bool note_window(reader *r, const fsdp__window *inside, fsdp__bar *b)
{
    b->name = inside->label;
    return note_unit(r->out, inside->label, &b->unit);
}

static bool read_operation(reader *r, const fsdp_trace_record *record)
{
    const fsdp__window *inside = fsdp__gaps_window(&r->gaps, record->stream);
    fsdp__bar b = {.start_ns = record->start_ns,
                   .end_ns = record->end_ns,
                   .bytes = record->bytes,
                   .shade = shade_of(record->operation, inside),
                   .kind = fsdp_operation_name(record->operation),
                   .name = record->label};
    return (!fsdp__in_window(b.shade) || note_window(r, inside, &b)) && add_bar(r, record->stream, b);
}

/* Where the caller's kernels are not seen, a bar for them in windows and between them; else one where the host was late. On
 * lanes one where a collective waited. */
static bool read_gap(reader *r, const fsdp_trace_record *next, const fsdp__gap *gap)
{
    int32_t slot = next->stream;
    fsdp__bar b = {.start_ns = gap->start_ns, .end_ns = gap->end_ns, .kind = "between hooks", .name = ""};
    if (gap->for_wire) {
        if (b.start_ns < r->out->first_ns) b.start_ns = r->out->first_ns; /* enqueued before anything ran */
        if (b.start_ns >= b.end_ns) return true;
        b.shade = FSDP__SHADE_WIRE;
        b.kind = "waits for the wire or a rank:";
        b.name = next->label;
        return add_bar(r, slot, b);
    }
    if (!r->has_windows[slot]) return true;
    b.late = gap->late_ns > 0;
    if (r->gaps.sees_kernels) {
        if (!b.late) return true;
        b.shade = FSDP__SHADE_IDLE;
        b.kind = "idle";
        b.end_ns = gap->start_ns + gap->late_ns;
        return add_bar(r, slot, b);
    }
    b.shade = shade_of_compute(gap->inside);
    return (gap->inside == NULL || note_window(r, gap->inside, &b)) && add_bar(r, slot, b);
}

/* ---- All of it ---- */

static bool read_record(reader *r, uint64_t index)
{
    const fsdp_trace_record *record = fsdp_trace_at(r->out->trace, index);
    fsdp__gap gap;
    if (fsdp__gaps_read(&r->gaps, record, &gap) && !read_gap(r, record, &gap)) return false;
    if (record->kind == FSDP_RECORD_USE) r->has_windows[record->stream] = true;
    if (!fsdp__has_run(record)) return true;
    if (record->kind == FSDP_RECORD_WAIT) return read_wait(r, index, record);
    return record->kind == FSDP_RECORD_OPERATION ? read_operation(r, record) : true;
}

fsdp_status fsdp__timeline_read(const fsdp_host_allocator *host, const fsdp_trace *trace, int pixels,
                                fsdp__timeline *out)
{
    *out = (fsdp__timeline){.trace = trace, .host = host};
    reader *r = fsdp__host_alloc(host, 1, sizeof *r);
    if (r == NULL) goto no_memory;
    r->out = out;
    survey(out, pixels, &r->gaps);
    fsdp__gaps_begin(&r->gaps, trace);
    uint64_t n = fsdp_trace_count(trace);
    bool read = true;
    for (uint64_t i = 0; read && i < n; i++) read = read_record(r, i);
    for (int slot = 0; read && slot < SLOTS; slot++) read = keep_bar(r, &r->pending[slot]);
    fsdp__host_free(host, r, 1, sizeof *r);
    if (read) return FSDP_OK;
no_memory:
    fsdp__timeline_free(out);
    return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "no host memory to draw a trace");
}

void fsdp__timeline_free(fsdp__timeline *timeline)
{
    const fsdp_host_allocator *host = timeline->host;
    fsdp__host_free(host, timeline->arrow, timeline->arrow_capacity, sizeof *timeline->arrow);
    fsdp__host_free(host, timeline->bar, timeline->bar_capacity, sizeof *timeline->bar);
    fsdp__host_free(host, timeline->unit, timeline->unit_capacity, sizeof *timeline->unit);
    timeline->arrow = NULL;
    timeline->bar = NULL;
    timeline->unit = NULL;
}
