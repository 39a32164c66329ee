/* SPDX-License-Identifier: MIT */
/* The flight recorder's memory: the last calls between ranks, with a rolling hash of each communicator's. It is written with
 * the context's lock held, and read by any thread without a lock, so that whoever asks never waits for who is blocked inside
 * a call: an entry carries a stamp, and one that changes while it is read counts as gone. Every word is atomic; what is
 * release and acquire here are plain moves on x86-64. */
#ifndef FSDP_LIB_FLIGHT_H
#define FSDP_LIB_FLIGHT_H

#include <stdatomic.h>

#include "call.h"
#include "clock.h"
#include "fsdp/flight.h"

enum {
    FSDP__N_COMMS = 2,
    FSDP__FLIGHT_HOST = 2 /* in place of a communicator's index: a collective host call */
};

/* Of a host call: call.number counts them, call.label is its text, and there is nothing else in call. */
typedef struct fsdp__flight_entry {
    fsdp__call call;
    uint64_t rolling; /* hash of its communicator's calls up to this one */
    uint64_t enqueued_ns;
    uint64_t where; /* the point on its stream (clock.h) × 4 + the communicator's index, or FSDP__FLIGHT_HOST */
} fsdp__flight_entry;

enum { FSDP__FLIGHT_WORDS = sizeof(fsdp__flight_entry) / sizeof(uint64_t) };
_Static_assert(sizeof(fsdp__flight_entry) == 15 * sizeof(uint64_t), "with its stamp, two cache lines");

#define FSDP__FLIGHT_TURN_SHIFT 44
#define FSDP__FLIGHT_ENTRY_MASK (((uint64_t)1 << FSDP__FLIGHT_TURN_SHIFT) - 1)

typedef struct fsdp__flight_slot {
    _Atomic uint64_t stamp; /* entry i: 2 i + 1 while it is written, then 2 i + 2; above that, its turn */
    _Atomic uint64_t word[FSDP__FLIGHT_WORDS];
} fsdp__flight_slot;

typedef struct fsdp__flight {
    _Alignas(64) _Atomic uint64_t n; /* entries so far */
    struct {
        _Atomic uint64_t n, hash[2]; /* groups so far; the hash after group i is in hash[i % 2] */
    } comm[FSDP__N_COMMS];
    uint64_t n_taken_back;                     /* the writer's; so far the cache line of every entry */
    fsdp__flight_slot slot[FSDP_FLIGHT_CALLS]; /* entry i lies in slot[i % FSDP_FLIGHT_CALLS] */
    _Atomic uint64_t inside;                   /* 1 + the entry of the host call that has not returned; 0: none */
    uint64_t n_host_calls;                     /* the writer's */
} fsdp__flight;

/* One group, about to be enqueued; take_back: it was not, and no other has been added since. */
void fsdp__flight_add(fsdp__flight *flight, uint32_t comm, const fsdp_collective *list, uint32_t n, fsdp__point point,
                      uint64_t now_ns);
void fsdp__flight_take_back(fsdp__flight *flight, uint32_t comm, uint32_t n);
/* A host call, "fsdp_sum_host of 3": it is inside until end. */
void fsdp__flight_host_begin(fsdp__flight *flight, const char *text, uint64_t now_ns);
void fsdp__flight_host_end(fsdp__flight *flight);

/* ---- For readers, on any thread ---- */

/* Entry i < n; false: it has gone, or goes just now. */
bool fsdp__flight_read(const fsdp__flight *flight, uint64_t i, fsdp__flight_entry *out_entry);
static inline uint32_t fsdp__flight_comm(const fsdp__flight_entry *entry) { return entry->where % 4; }
static inline fsdp__point fsdp__flight_point(const fsdp__flight_entry *entry) { return entry->where / 4; }
/* Groups of one communicator so far, and their hash, of one moment. 0 and 0 before the first. */
void fsdp__flight_count(const fsdp__flight *flight, uint32_t comm, uint64_t *out_n, uint64_t *out_hash);
/* h, with all of both communicators' groups so far in it. */
uint64_t fsdp__flight_fold(const fsdp__flight *flight, uint64_t h);
/* Its hash after group `number`; false: that is no longer known. */
bool fsdp__flight_hash_after(const fsdp__flight *flight, uint32_t comm, uint64_t number, uint64_t *out_hash);

#endif
