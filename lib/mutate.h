/* SPDX-License-Identifier: MIT */
/* Bugs planted for tests: a test build compiles the library with FSDP_MUTATIONS and switches one on; each must be caught. In
 * every other build the conditions are constants and vanish. tests/race/ says what catches which. */
#ifndef FSDP_LIB_MUTATE_H
#define FSDP_LIB_MUTATE_H

enum {
    FSDP__MUTANT_NONE = 0,
    FSDP__MUTANT_NO_WAIT_USED = 1,    /* a gather does not wait for the last owner of its bytes */
    FSDP__MUTANT_NO_WAIT_REDUCED = 2, /* a gradient buffer is zeroed while its last owner is still being reduced */
    FSDP__MUTANT_NO_WAIT_UPDATED = 3, /* a gather reads a shard that the optimizer may still be writing */
    FSDP__MUTANT_EARLY_USE = 4,       /* the use of a gathered buffer is noted in the epoch before the one it is in */
    FSDP__MUTANT_WRONG_PLACE = 5      /* gathered buffers are written at the range's first byte, whatever was planned */
};

#ifdef FSDP_MUTATIONS
extern int fsdp__mutant;
#define FSDP__MUTATED(which) (fsdp__mutant == (which))
#else
#define FSDP__MUTATED(which) 0
#endif

#endif
