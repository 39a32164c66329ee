/* SPDX-License-Identifier: MIT */
/* One collective as other ranks see it: what they must agree on, in 96 bytes without a pointer, and the sentences about it. */
#ifndef FSDP_LIB_CALL_H
#define FSDP_LIB_CALL_H

#include "fsdp/backend.h"

typedef struct fsdp__call {
    uint64_t hash;   /* of all that ranks must agree on; the number is none of it */
    uint64_t number; /* of its group on its communicator: 1, 2, … */
    uint64_t count;
    uint32_t root;
    uint8_t kind, dtype;      /* fsdp_operation, fsdp_dtype */
    uint8_t part, n_parts;    /* of its group: 0 … n_parts - 1 */
    char label[48], pass[16]; /* cut, with their ends */
} fsdp__call;

void fsdp__call_fill(fsdp__call *call, const fsdp_collective *c, uint64_t number, uint32_t part, uint32_t n_parts);
/* "#12 all-gather of h.0 in TRAIN (294912 fp32)"; of a group "#12, 2 of 3: all-gather …". */
void fsdp__call_describe(const fsdp__call *call, char *text, size_t bytes);

enum {
    FSDP__SENTENCE_BYTES = 1024,
    FSDP__MAX_WORLD = 4096 /* ranks that a sentence can tell apart; more than any side channel takes */
};

/* Append what fits; *at stays below bytes. */
void fsdp__put(char *text, size_t bytes, size_t *at, const char *format, ...) __attribute__((format(printf, 4, 5)));
/* A set of ranks in words, "rank 3", "ranks 1, 2, 5 to 9": those r < world with in[r]. Returns the text's length. */
size_t fsdp__put_ranks(char *text, size_t bytes, const bool *in, uint32_t world);
/* Ranks that say the same stand together, in the order of the lowest: "rank 0: A; ranks 1 to 3: B". said[r] NULL: not one of
 * them. */
void fsdp__put_said(char *text, size_t bytes, const char *const *said, uint32_t world);

#endif
