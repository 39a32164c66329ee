/* SPDX-License-Identifier: MIT */
/* The picture of a memory snapshot. A panel a pool: how full it is, its addresses, its bytes over the last events. SVG 1.1, no
 * scripts, the reader's own fonts; however large the snapshot, a few shapes a pixel. */
#ifndef FSDP_TOOLS_MEMORY_SVG_H
#define FSDP_TOOLS_MEMORY_SVG_H

#include <stdio.h>

#include "fsdp_memory_read.h"
#include "svg.h"

enum {
    FSDP__PAGE_WIDTH = 1600,
    FSDP__PAGE_LEFT = 150, /* of every bar; its name stands left of it */
    FSDP__PAGE_RIGHT = 1572,
    FSDP__PAGE_OWNERS = 12 /* owners with a colour of their own; the rest share one */
};

/* Who holds how much, over all pools. */
typedef struct fsdp__snapshot_owner {
    const char *name; /* "": nobody's */
    uint64_t bytes, blocks;
    int color; /* of the page's; FSDP__PAGE_OWNERS: the one of the rest */
} fsdp__snapshot_owner;

typedef struct fsdp__page {
    const fsdp__snapshot *snapshot;
    FILE *file;
    size_t n_owners;
    fsdp__snapshot_owner *owners; /* by name */
    bool has_event[FSDP__EVENT_KINDS];
} fsdp__page;

/* Sum up the live blocks of the pools by owner, sorted by name. NULL: no memory. */
fsdp__snapshot_owner *fsdp__snapshot_owners(const fsdp__snapshot_pool *pools, size_t n_pools, size_t *out_n);
int fsdp__snapshot_by_bytes(const void *a, const void *b);

/* The map of a pool's addresses, wrapped like a text. */
double fsdp__map_height(const fsdp__snapshot_pool *pool);
void fsdp__map_draw(const fsdp__page *page, const fsdp__snapshot_pool *pool, double y);
/* The colour of an owner, or of what is free. */
const char *fsdp__page_fill(const fsdp__page *page, fsdp__piece_kind kind, const char *owner);
extern const char *const fsdp__page_colors[FSDP__PAGE_OWNERS + 1];

/* Allocated and reserved over the events that are kept. */
double fsdp__history_height(const fsdp__snapshot_pool *pool);
void fsdp__history_draw(const fsdp__page *page, const fsdp__snapshot_pool *pool, double y);
/* The mark of a kind of event around x, y. */
void fsdp__history_mark(FILE *file, fsdp__event_kind kind, double x, double y);

/* Write the picture. False: errno says why not. */
bool fsdp__snapshot_draw(const fsdp__snapshot *snapshot, const char *path);

#endif
