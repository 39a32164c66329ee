/* SPDX-License-Identifier: MIT */
/* What a stopped tape says about time: the sums of one stream, and what a picture of it shows. timeline_svg.c draws. */
#ifndef FSDP_LIB_TIMELINE_H
#define FSDP_LIB_TIMELINE_H

#include "fsdp/device.h"
#include "fsdp/trace.h"

enum { FSDP__TIMELINE_SLOTS = 16 };

static inline bool fsdp__is_lane(int32_t slot) { return slot <= FSDP_LANE_COPY; }
static inline bool fsdp__has_run(const fsdp_trace_record *record) { return record->end_ns != 0; }

/* What the colour of a bar says. */
typedef enum fsdp__shade {
    FSDP__SHADE_FORWARD,  /* compute inside a window that only reads */
    FSDP__SHADE_BACKWARD, /* … that writes, gradients */
    FSDP__SHADE_COMPUTE,  /* … outside any */
    FSDP__SHADE_GATHER,
    FSDP__SHADE_SCATTER,
    FSDP__SHADE_ALL_REDUCE,
    FSDP__SHADE_OPTIMIZER,
    FSDP__SHADE_SMALL,
    FSDP__SHADE_OTHER,
    FSDP__SHADE_WIRE, /* nothing: a collective waits for the wire or a rank */
    FSDP__SHADE_IDLE, /* nothing: the host was late */
    FSDP__SHADES
} fsdp__shade;

static inline bool fsdp__in_window(fsdp__shade shade)
{
    return shade == FSDP__SHADE_FORWARD || shade == FSDP__SHADE_BACKWARD;
}

/* How much a wait mattered. */
typedef enum fsdp__weight {
    FSDP__WEIGHT_PASSED,  /* the event had happened */
    FSDP__WEIGHT_STOOD,   /* a lane stood, as lanes do */
    FSDP__WEIGHT_EXPOSED, /* compute stood */
    FSDP__WEIGHTS
} fsdp__weight;

/* One operation or gap, or several that are too narrow to be seen apart. */
typedef struct fsdp__bar {
    uint64_t start_ns, end_ns, bytes;
    uint32_t count;
    int row;
    fsdp__shade shade;
    size_t unit;         /* FORWARD, BACKWARD: the window's, by order of first use */
    uint64_t longest_ns; /* of them; what follows is about that one */
    const char *kind;    /* an operation's name, or what a gap is */
    const char *name;    /* the window's unit, or the operation's label */
    bool late;           /* it ended with the stream empty: the host was late */
} fsdp__bar;

/* A wait, on its way from the event's record. */
typedef struct fsdp__arrow {
    const fsdp_trace_record *wait;
    uint64_t from_ns;
    int from_row, to_row; /* from_row -1: nobody knows who recorded the event, and when; no arrow is drawn */
    fsdp__weight weight;
} fsdp__arrow;

typedef struct fsdp__timeline {
    const fsdp_trace *trace;
    const fsdp_host_allocator *host;
    uint64_t first_ns, span_ns;                                              /* span_ns > 0 */
    uint64_t pixel_ns;                                                       /* time of one pixel, at least 1 */
    int n_rows, row_of[FSDP__TIMELINE_SLOTS], slot_of[FSDP__TIMELINE_SLOTS]; /* row_of: -1 for streams without a row */
    int compute_slot; /* the compute stream that the sums are about: the busiest; -1: none */
    size_t n_units;
    const char **unit; /* [n_units] */
    size_t n_bars, n_arrows;
    fsdp__bar *bar;
    fsdp__arrow *arrow;
    size_t unit_capacity, bar_capacity, arrow_capacity;
} fsdp__timeline;

/* The sums of fsdp_trace_summary for the stream in that slot; out->size is the caller's to set. */
void fsdp__timeline_sum(const fsdp_trace *trace, int32_t slot, fsdp_trace_summary *out);
/* Take from the tape what a picture of so many pixels shows: at most a few bars and arrows a pixel, however long the
 * tape. Errors: NO_HOST_MEMORY (nothing is left to free). */
fsdp_status fsdp__timeline_read(const fsdp_host_allocator *host, const fsdp_trace *trace, int pixels,
                                fsdp__timeline *out);
void fsdp__timeline_free(fsdp__timeline *timeline);

#endif
