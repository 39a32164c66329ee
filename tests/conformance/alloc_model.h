/* SPDX-License-Identifier: MIT */
/* The allocator of include/fsdp/alloc.h and docs/allocator.md once more, in the plainest form that there is: memory is an
 * array of 256-byte pages, each with its own history, and everything else is found by looking through all of them. It knows
 * nothing of the library's trees, lists and tables, and it makes no device call. After the same calls the library must have
 * given the same bytes, the same errors, the same waits and the same statistics. */
#ifndef FSDP_TESTS_ALLOC_MODEL_H
#define FSDP_TESTS_ALLOC_MODEL_H

#include <stdbool.h>
#include <stdint.h>

#include "fsdp/fsdp.h"

enum {
    MODEL_PAGE = 256,      /* bytes */
    MODEL_SLOTS = 16,      /* streams at a time */
    MODEL_FENCES = 64,     /* fences kept a stream */
    MODEL_CANDIDATES = 32, /* fits looked at before the search jumps to twice the size */
    MODEL_FRAGMENTS = 64,  /* pieces of each of them, looked at from an end once one is not covered */
    MODEL_DEEP = 4096,     /* and while all are */
    MODEL_NEWEST = 64,     /* blocks and ranges of the newest segment, looked at last */
    MODEL_RUNS = 2048,     /* pieces of all of them, looked at for a run that needs no wait */
    MODEL_CUT_OFF = 16,    /* the part of a range that a run may cut off where waiting would do */
    MODEL_PAGES = 1 << 16, /* over all segments that ever were */
    MODEL_SEGMENTS = 1024,
    MODEL_PIECES = 1 << 15,
    MODEL_BLOCKS = 1024, /* live at a time */
    MODEL_EVENTS = 4
};

typedef struct model_clock {
    uint64_t at[MODEL_SLOTS];
} model_clock;

/* What earlier owners left on a run of free pages. */
typedef struct model_piece {
    model_clock clock;
    uint64_t freed; /* number of the newest free() among them; 0: never used */
    int slot;       /* of their stream; -1: none */
    bool pending;
} model_piece;

typedef struct model_fence {
    uint64_t epoch; /* 0: none */
    int slot;
    bool gone; /* its event is: nobody can wait for it any more */
    model_clock snapshot;
} model_fence;

typedef struct model_block {
    bool live;
    uint32_t segment, first, n; /* pages, from the segment's first */
    int slot;
    uint32_t until_free;         /* mask of slots */
    uint64_t named[MODEL_SLOTS]; /* the open epoch when the slot's stream was named last */
    model_clock guard, use;
} model_block;

/* A number is used again once its segment is gone. */
typedef struct model_segment {
    uint64_t base; /* address, from the library's first pointer into it */
    uint32_t page, n;
    bool gone;
} model_segment;

typedef struct model {
    fsdp_alloc_policy policy;
    uint64_t budget, segment_bytes, granularity, device_limit;

    struct {
        int block; /* -1: free */
        int piece;
        uint64_t touched; /* free: when its range was: number of the free() that made or widened it; 0: never */
    } page[MODEL_PAGES];
    uint32_t n_pages, n_segments, n_pieces;
    uint32_t newest; /* number of the segment that was taken last */
    model_segment segment[MODEL_SEGMENTS];
    model_piece piece[MODEL_PIECES];
    model_block block[MODEL_BLOCKS];
    uint64_t n_freed;

    bool open[MODEL_SLOTS];
    uint64_t opened[MODEL_SLOTS]; /* the epoch that was open then */
    uint64_t epoch[MODEL_SLOTS];  /* the open one; 0: the slot was never used */
    model_clock now[MODEL_SLOTS];
    model_fence fence[MODEL_SLOTS][MODEL_FENCES];
    model_fence event[MODEL_EVENTS]; /* the caller's */

    fsdp_alloc_stats stats;  /* but the hash */
    uint64_t records, waits; /* of the context */
} model;

void model_init(model *m, const fsdp_allocator_config *config, uint64_t granularity);
/* There is room for another call, whatever it is. */
bool model_has_room(const model *m);

int model_stream_open(model *m); /* the slot that it gets */
void model_stream_release(model *m, int slot);
void model_stream_wait_stream(model *m, int slot, int other);
void model_event_record(model *m, int event, int slot);
void model_event_wait(model *m, int event, int slot);
void model_event_destroy(model *m, int event);

/* *out_block: which block it is; *out_grew: it is the first of a new segment, whose address is told by model_place. */
fsdp_status model_alloc(model *m, uint64_t bytes, int slot, int *out_block, bool *out_grew);
void model_place(model *m, int block, const void *ptr);
const void *model_address(const model *m, int block);
void model_record_stream(model *m, int block, int slot);
void model_record_use(model *m, int block, int slot);
void model_free(model *m, int block);
void model_trim(model *m);
void model_reset_peaks(model *m);
/* Brings m->stats up to date. */
void model_note(model *m);
uint64_t model_largest_free(const model *m); /* bytes */

#endif
