/* SPDX-License-Identifier: MIT */
/** @file jemalloc.h  Two arenas of jemalloc's: one for the library's host memory, one over pinned memory.
 *
 *  A library of its own, fsdp::jemalloc (-lfsdp_jemalloc), for programs that link jemalloc anyway or want to; libfsdp never
 *  does. Both arenas are private: no piece of theirs ever meets malloc's or free's. With the shared library malloc stays
 *  libc's; the static one has the program link jemalloc itself, which then is its malloc, too. On GPUs see docs/backends.md
 *  for C++'s new. jemalloc must be loaded when the program starts: Debian's cannot be loaded by dlopen (static TLS).
 *
 *      fsdp_config config = FSDP_CONFIG_INIT;
 *      fsdp_jemalloc_host_create(&config.host);        // destroy it after the last context that uses it
 *      config.pinned = fsdp_jemalloc_pinned();         // every context opens and closes an arena of its own
 *
 *  After fork() the child must leave pinned memory alone. */
#ifndef FSDP_JEMALLOC_H
#define FSDP_JEMALLOC_H

#include "fsdp/context.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Make an arena and fill in the table for fsdp_config.host. It has stats. Thread: any.
 *  Errors: ARG; NO_HOST_MEMORY (jemalloc makes no arena: out of memory, or 4095 exist). */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_jemalloc_host_create(fsdp_host_allocator *out_host);

/** Give the arena back with all its pages; *host becomes zero, which is libc. A table that is zero is nothing.
 *  Errors: ARG (not from fsdp_jemalloc_host_create); STATE (pieces live: destroy the contexts first; nothing is freed). */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_jemalloc_host_destroy(fsdp_host_allocator *host);

/** The table for fsdp_config.pinned. Its heap is an arena over regions that the device gives: 2 MiB at a time, a larger piece
 *  in a region of the next size class (at most a quarter more). Regions are kept until the context is closed, since giving
 *  pinned memory back can stop a device; then each goes back whole. Pieces lie in one region each. stats.mapped_bytes and
 *  stats.regions are what the device gave. */
FSDP_API fsdp_pinned_allocator fsdp_jemalloc_pinned(void);

/** The sentence of this thread's last error of a function of this header: this library does not link libfsdp, so
 *  fsdp_last_error does not know it. Never NULL. */
FSDP_API const char *fsdp_jemalloc_last_error(void);

#ifdef __cplusplus
}
#endif
#endif
