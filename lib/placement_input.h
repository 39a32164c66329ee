/* SPDX-License-Identifier: MIT */
/* What a placement knows of its input before it searches: the order of the steps, classes of lives that share an offset, and
 * which classes must avoid each other. */
#ifndef FSDP_LIB_PLACEMENT_INPUT_H
#define FSDP_LIB_PLACEMENT_INPUT_H

#include <stdbool.h>
#include <stddef.h>

#include "placement.h"

typedef struct fsdp__avoid {
    uint32_t step; /* of the class to avoid */
    uint32_t next; /* index + 1 of the next, 0: none */
} fsdp__avoid;

/* What is known of the input before any search. A step is a position in `order`. */
typedef struct fsdp__placement_input {
    const fsdp_host_allocator *host;
    const fsdp__life *lives;
    uint32_t n;
    uint64_t alignment;
    uint32_t *order;      /* [n] step → life */
    uint32_t *first;      /* [n] step → step that chooses its offset; itself: a free choice */
    uint32_t *last;       /* [n] step that chooses → last step of its class */
    uint32_t *avoid_head; /* [n] step → index + 1 in avoids, 0: none */
    fsdp__avoid *avoids;
    size_t n_avoids, avoids_capacity;
    uint32_t most_avoids; /* of one step */
    uint32_t most_live;
    uint64_t live_peak;
    uint64_t class_bytes; /* all classes side by side */
    uint64_t work_left;   /* gaps that tries wider than 1 may still look at */
} fsdp__placement_input;

/* From host, lives, n and alignment. False: no memory; it is closed all the same. */
bool fsdp__placement_input_open(fsdp__placement_input *p);
void fsdp__placement_input_close(fsdp__placement_input *p);

#endif
