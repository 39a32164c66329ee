/* SPDX-License-Identifier: MIT */
/* Sees a peer's process end at once, whatever keeps its connections open (a child that it forked). A thread that sleeps on the
 * peers' pidfds; kernels before 5.3 have none, and there a peer's end is seen by its connection, or at the deadline. */
#ifndef FSDP_LIB_HOST_WATCH_H
#define FSDP_LIB_HOST_WATCH_H

#include "fsdp/backend.h"

typedef struct fsdp__watch fsdp__watch;

/* pidfd[r]: of rank r, taken over; -1: not watched. gone: called once a rank, by the watch's thread, until close returns.
 * NULL: there is nobody to watch, or no memory or thread for it; then nothing is watched. */
fsdp__watch *fsdp__watch_open(const fsdp_host_allocator *host, const int *pidfd, uint32_t world,
                              void (*gone)(void *arg, uint32_t rank), void *arg);
void fsdp__watch_close(fsdp__watch *watch); /* NULL is nothing */

/* A descriptor of the process that is pid now; -1: none. */
int fsdp__pidfd_open(int32_t pid);

#endif
