/* SPDX-License-Identifier: MIT */
/* Windows, and what is between the records of a stream. */
#include "timeline_gap.h"

#include <string.h>

#include "trace.h"

/* A stream that comes to a record so soon after the host has enqueued it had nothing left to run: a launch takes up to 10 µs,
 * and the host's time of the device's clock is known to some µs. */
static const uint64_t LATE_NS = 20000;

void fsdp__gaps_begin(fsdp__gaps *gaps, const fsdp_trace *trace)
{
    memset(gaps, 0, sizeof *gaps);
    gaps->sees_kernels = fsdp__trace_sees_kernels(trace);
    if (gaps->sees_kernels) return; /* one clock */
    uint64_t n = fsdp_trace_count(trace);
    for (uint64_t i = 0; i < n; i++) { /* nothing runs before it is enqueued, by a right clock */
        const fsdp_trace_record *record = fsdp_trace_at(trace, i);
        if (fsdp__has_run(record) && record->enqueued_ns > record->start_ns + gaps->behind_ns)
            gaps->behind_ns = record->enqueued_ns - record->start_ns;
    }
}

/* A use record opens the window of its unit or, if that is open, closes it. */
static void read_use(fsdp__gap_stream *s, const fsdp_trace_record *use)
{
    int at = s->n_open - 1;
    while (at >= 0 && strcmp(s->open[at].label, use->label) != 0) at--;
    if (at >= 0) {
        memmove(&s->open[at], &s->open[at + 1], (size_t)(s->n_open - at - 1) * sizeof *s->open);
        s->n_open--;
        return;
    }
    if (s->n_open == FSDP__MAX_WINDOWS) return;
    fsdp__window opened = {.label = use->label};
    for (uint32_t a = 0; a < use->n_accesses; a++) opened.writes = opened.writes || use->access[a].write;
    s->open[s->n_open++] = opened;
}

static uint64_t late_of(const fsdp__gaps *gaps, const fsdp_trace_record *next, uint64_t start_ns, uint64_t end_ns)
{
    uint64_t came_ns = next->enqueued_ns;
    if (gaps->sees_kernels) return came_ns <= start_ns ? 0 : (came_ns < end_ns ? came_ns : end_ns) - start_ns;
    return end_ns + gaps->behind_ns <= came_ns + LATE_NS ? end_ns - start_ns : 0;
}

static bool read_lane(const fsdp__gaps *gaps, const fsdp__gap_stream *s, const fsdp_trace_record *record,
                      fsdp__gap *out_gap)
{
    bool is_collective = record->kind == FSDP_RECORD_OPERATION && record->operation <= FSDP_OPERATION_BARRIER;
    uint64_t came_ns = record->enqueued_ns > s->until_ns ? record->enqueued_ns : s->until_ns;
    if (!gaps->sees_kernels || !is_collective || came_ns == 0 || record->start_ns <= came_ns) return false;
    *out_gap = (fsdp__gap){.start_ns = came_ns, .end_ns = record->start_ns, .for_wire = true};
    return true;
}

static bool read_callers(const fsdp__gaps *gaps, const fsdp__gap_stream *s, const fsdp_trace_record *record,
                         fsdp__gap *out_gap)
{
    uint64_t start_ns = s->until_ns, end_ns = record->start_ns;
    if (start_ns == 0 || end_ns <= start_ns) return false;
    *out_gap = (fsdp__gap){.start_ns = start_ns,
                           .end_ns = end_ns,
                           .late_ns = late_of(gaps, record, start_ns, end_ns),
                           .inside = fsdp__gaps_window(gaps, record->stream)};
    return true;
}

bool fsdp__gaps_read(fsdp__gaps *gaps, const fsdp_trace_record *record, fsdp__gap *out_gap)
{
    fsdp__gap_stream *s = &gaps->of[record->stream];
    if (record->kind == FSDP_RECORD_USE) read_use(s, record);
    if (record->kind == FSDP_RECORD_USE || record->kind == FSDP_RECORD_HOST || !fsdp__has_run(record)) return false;
    bool is_gap =
        fsdp__is_lane(record->stream) ? read_lane(gaps, s, record, out_gap) : read_callers(gaps, s, record, out_gap);
    if (record->end_ns > s->until_ns) s->until_ns = record->end_ns;
    return is_gap;
}

const fsdp__window *fsdp__gaps_window(const fsdp__gaps *gaps, int32_t slot)
{
    const fsdp__gap_stream *s = &gaps->of[slot];
    return s->n_open > 0 ? &s->open[s->n_open - 1] : NULL;
}
