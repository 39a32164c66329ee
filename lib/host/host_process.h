/* SPDX-License-Identifier: MIT */
/* Ranks as processes of one machine: how they share a room, and read each other's device memory. Files without names are
 * opened through /proc/PID/fd, so that nothing is left behind however a process ends. */
#ifndef FSDP_LIB_HOST_PROCESS_H
#define FSDP_LIB_HOST_PROCESS_H

#include "host.h"

typedef struct fsdp__peers fsdp__peers;

/* Collective, over the side channel of args: make and map a room for setup's ranks, and open every rank's memory.
 * Errors, on every rank: UNSUPPORTED (not one machine, or not allowed to see each other), MISMATCH (links differ), RANK_LOST,
 * NO_HOST_MEMORY; the side channel's. */
fsdp_status fsdp__peers_open(const fsdp_comm_args *args, const fsdp__host_setup *setup, fsdp__peers **out_peers);
void fsdp__peers_close(fsdp__peers *peers);
fsdp__room_shared *fsdp__peers_room(fsdp__peers *peers);
/* Descriptors of the peers' processes, by rank, to be watched; -1: none. They are the caller's from then on. */
void fsdp__peers_take_pidfds(fsdp__peers *peers, int *out_pidfd);
/* Where this process sees bytes `into` of a piece of rank's memory, to read. Mappings are kept: a piece is mapped once. One
 * thread at a time. NULL: the kernel refused; errno. */
const void *fsdp__peers_at(fsdp__peers *peers, uint32_t rank, uint64_t offset, uint64_t bytes, uint64_t into);

#endif
