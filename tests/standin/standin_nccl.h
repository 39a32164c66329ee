/* SPDX-License-Identifier: MIT */
/* Where the ranks of a communicator meet: memory that was mapped before the test forked them, at one address in all of
 * them, so that threads and processes meet alike, ThreadSanitizer sees how threads do, and a killed process leaves nothing
 * behind. */
#ifndef FSDP_TESTS_STANDIN_NCCL_H
#define FSDP_TESTS_STANDIN_NCCL_H

#include <nccl.h>

#include "standin.h"

/* For tests, of a process: from now on ncclCommAbort does not return, since what runs does not leave; and what
 * ncclCommGetAsyncError says of communicators on the device, until it is ncclSuccess again. */
void standin_nccl_hold_aborts(void);
void standin_nccl_find(int device, ncclResult_t error);

enum { STANDIN_RANKS = 8, STANDIN_SLOT_BYTES = 1 << 17, STANDIN_SPLITS = 8 };

typedef struct standin_room {
    _Atomic uint32_t tick;                                      /* to sleep by: somebody has come somewhere */
    _Atomic uint64_t n_init, n_connected, n_windows, n_closing; /* ranks that have come to these */
    _Atomic uint64_t in[STANDIN_RANKS],
        out[STANDIN_RANKS];                 /* steps that a rank has brought its part for; has read all of */
    _Atomic uint32_t split[STANDIN_SPLITS]; /* rooms of splits; 0: not chosen */
    _Alignas(64) char slot[STANDIN_RANKS][STANDIN_SLOT_BYTES];
} standin_room;

/* A room that nobody is in: its number, never 0. */
uint32_t standin_room_new(void);
standin_room *standin_room_of(uint32_t number);
void standin_room_changed(standin_room *room);
/* What ends a wait: an abort, or the end of the GPU. */
typedef struct standin_way_out {
    atomic_bool stopped;
    int device;
} standin_way_out;
bool standin_is_over(const standin_way_out *out);
/* Come in, and wait for all `n`. False: it is over. */
bool standin_room_meet(standin_room *room, _Atomic uint64_t *count, uint64_t n, const standin_way_out *out);
/* Wait until all ranks have come to the step. */
bool standin_room_all(standin_room *room, _Atomic uint64_t *steps, int world, uint64_t step,
                      const standin_way_out *out);

#endif
