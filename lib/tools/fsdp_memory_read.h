/* SPDX-License-Identifier: MIT */
/* A memory snapshot (include/fsdp/memory.h, docs/memory.md) read back from its file: checked, and flat enough to draw. The
 * file may be anything; what is wrong with it is said in one sentence. */
#ifndef FSDP_TOOLS_MEMORY_READ_H
#define FSDP_TOOLS_MEMORY_READ_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A live block, or one fragment of a free range. */
typedef enum fsdp__piece_kind {
    FSDP__PIECE_LIVE,
    FSDP__PIECE_PENDING, /* free; its stream's future is not ordered after its last use yet */
    FSDP__PIECE_READY,   /* free, and covered for its stream */
    FSDP__PIECE_UNUSED,  /* nobody ever had it */
    FSDP__PIECE_KINDS
} fsdp__piece_kind;

typedef struct fsdp__snapshot_point {
    const char *stream;
    uint64_t epoch;
} fsdp__snapshot_point;

typedef struct fsdp__snapshot_piece {
    fsdp__piece_kind kind;
    uint64_t offset, bytes; /* in its segment */
    uint64_t range;         /* number of its block in the segment: equal for the fragments of one free range */
    uint64_t range_bytes;
    const char *owner;  /* live: "" for nobody's */
    const char *stream; /* that it was taken for */
    uint64_t freed;     /* free: number of the free() */
    size_t n_points, n_until_free;
    fsdp__snapshot_point *points; /* live: its uses; free: its clock */
    const char **until_free;      /* live: streams */
} fsdp__snapshot_piece;

typedef struct fsdp__snapshot_segment {
    uint64_t number, bytes;
    size_t n_pieces;
    fsdp__snapshot_piece *pieces; /* in address order, without a gap */
} fsdp__snapshot_segment;

typedef enum fsdp__event_kind {
    FSDP__EVENT_ALLOC,
    FSDP__EVENT_FREE,
    FSDP__EVENT_WAIT,
    FSDP__EVENT_GROW,
    FSDP__EVENT_TRIM,
    FSDP__EVENT_EVICT,
    FSDP__EVENT_OUT_OF_MEMORY,
    FSDP__EVENT_KINDS
} fsdp__event_kind;

typedef struct fsdp__snapshot_event {
    fsdp__event_kind kind;
    uint64_t n, bytes, allocated, reserved;
    const char *owner, *stream, *other; /* other: wait: the stream that is waited for */
} fsdp__snapshot_event;

typedef struct fsdp__snapshot_pool {
    const char *name, *model, *policy; /* model: NULL for a public allocator */
    uint64_t budget, segment_bytes;
    uint64_t allocated, active, reserved, allocated_peak, active_peak, reserved_peak;
    uint64_t allocs, frees, waits, grows;
    uint64_t largest_free, free_bytes, free_ranges; /* counted here */
    size_t n_segments, n_pieces, n_events;
    fsdp__snapshot_segment *segments;
    fsdp__snapshot_event *events; /* oldest first */
    uint64_t events_dropped;
} fsdp__snapshot_pool;

typedef struct fsdp__snapshot_arena {
    const char *name;
    uint64_t allocated, active, mapped;
} fsdp__snapshot_arena;

typedef struct fsdp__snapshot {
    uint64_t rank, world;
    const char *backend;
    uint64_t device_bytes, device_peak, pinned_bytes;
    size_t n_arenas, n_pools;
    fsdp__snapshot_arena arenas[2];
    fsdp__snapshot_pool *pools;
    void *json; /* the text of all names */
} fsdp__snapshot;

extern const char *const fsdp__event_names[FSDP__EVENT_KINDS];

/* False: error holds a sentence with the file's name, and out is empty. */
bool fsdp__snapshot_read(const char *path, fsdp__snapshot *out, char *error, size_t error_bytes);
void fsdp__snapshot_free(fsdp__snapshot *snapshot);

#endif
