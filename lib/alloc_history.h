/* SPDX-License-Identifier: MIT */
/* What a pool remembers: the last events, in a ring that is taken with the pool. For snapshots and errors; nothing is
 * decided by it. */
#ifndef FSDP_LIB_ALLOC_HISTORY_H
#define FSDP_LIB_ALLOC_HISTORY_H

#include <stdint.h>

enum { FSDP__HISTORY_MOST = 1 << 24 };
#define FSDP__NO_PLACE UINT64_MAX

typedef enum fsdp__alloc_event_kind {
    FSDP__ALLOC_EVENT_ALLOC = 0,
    FSDP__ALLOC_EVENT_FREE = 1,
    FSDP__ALLOC_EVENT_WAIT = 2, /* for the block: slot's stream waits for other's */
    FSDP__ALLOC_EVENT_GROW = 3, /* the segment: offset 0, its bytes */
    FSDP__ALLOC_EVENT_TRIM = 4,
    FSDP__ALLOC_EVENT_EVICT = 5,        /* of the FREE after it: gathered, not open, given up for room */
    FSDP__ALLOC_EVENT_OUT_OF_MEMORY = 6 /* bytes asked for */
} fsdp__alloc_event_kind;

typedef struct fsdp__alloc_event {
    uint64_t offset; /* in the segment; FSDP__NO_PLACE: of no block */
    uint64_t bytes;
    const char *owner;  /* never NULL */
    uint64_t allocated; /* of the pool, after it */
    uint64_t reserved;
    uint32_t segment;
    uint8_t kind; /* fsdp__alloc_event_kind */
    uint8_t slot; /* FSDP__NO_SLOT: none */
    uint8_t other;
} fsdp__alloc_event;

typedef struct fsdp__history {
    fsdp__alloc_event *events; /* event i lies in events[i % capacity] */
    uint64_t n;                /* events so far */
    uint32_t capacity;         /* a power of two, or 0: nothing is remembered */
} fsdp__history;

static inline void fsdp__history_add(fsdp__history *history, const fsdp__alloc_event *event)
{
    if (history->capacity == 0) return;
    history->events[history->n++ & (history->capacity - 1)] = *event;
}

#endif
