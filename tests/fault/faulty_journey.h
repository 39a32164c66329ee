/* SPDX-License-Identifier: MIT */
/* What faulty_rank.c and faulty_journey.c share. */
#ifndef FAULTY_JOURNEY_H
#define FAULTY_JOURNEY_H

#include "faulty_rank.h"

typedef enum verdict {
    ALL_OK,
    SOME_FAILED,
    APART /* another rank has left, or the keys differ: go no further */
} verdict;

/* Waits for all ranks, or until one has left. key: what must be the same to go on together. */
verdict rank_meet(rank *r, bool ok, uint64_t key);

/* From registration to the last hash. */
fsdp_status faulty_journey(rank *r);

/* Make the call; if it fails and nothing has changed by that, once more. Returns what then failed. */
#define CALL(r, expr)                                                                                   \
    do {                                                                                                \
        fsdp_status call_status_ = (expr);                                                              \
        if (call_status_ != FSDP_OK && rank_calls_again(r, call_status_, #expr)) call_status_ = (expr); \
        if (call_status_ != FSDP_OK) return rank_calls_again(r, call_status_, #expr), call_status_;     \
    } while (0)
/* Keeps the first error; true if the call may be made again. */
bool rank_calls_again(rank *r, fsdp_status status, const char *call);
bool rank_alive(rank *r);
void rank_complain(rank *r, const char *what, const char *why);
/* A result, to be compared with that of a journey without a failure. */
void rank_value(rank *r, uint64_t value);
void rank_float(rank *r, float value);

#endif
