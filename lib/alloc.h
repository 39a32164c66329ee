/* SPDX-License-Identifier: MIT */
/* The allocator's inner door, for planned ranges: the caller holds the context's lock, collects needs over several ranges
 * before it waits, and keeps block handles. Public calls are in include/fsdp/alloc.h. */
#ifndef FSDP_LIB_ALLOC_H
#define FSDP_LIB_ALLOC_H

#include "alloc_ranges.h"
#include "fsdp/alloc.h"

/* One contiguous range of `bytes` (rounded to the device's granularity), taken now, never grown. May be 0 bytes. */
fsdp_status fsdp__allocator_create_range(fsdp_context *ctx, const char *name, uint64_t bytes,
                                         fsdp_allocator **out_allocator);
/* Give the range back, blocks and all; the device is idle. NULL is nothing. */
void fsdp__allocator_destroy_range(fsdp_allocator *a);
/* Address of its first byte. */
void *fsdp__allocator_base(const fsdp_allocator *a);

/* Take [offset, offset + bytes) for use on s; NULL if somebody has any of it. What the bytes need goes into need (REUSE);
 * nothing waits yet. Nodes for two cuts must be reserved (fsdp__allocator_reserve). */
fsdp__block *fsdp__allocator_take_at(fsdp_allocator *a, uint64_t offset, uint64_t bytes, fsdp_stream *s,
                                     const char *tag, fsdp__need *need);
/* Best fit in the range instead; NULL if nothing fits. */
fsdp__block *fsdp__allocator_take(fsdp_allocator *a, uint64_t bytes, fsdp_stream *s, const char *tag, fsdp__need *need);
fsdp_status fsdp__allocator_reserve(fsdp_allocator *a);
/* s has been given its last use of the block so far: before the fence that closes it. */
void fsdp__allocator_use(fsdp__block *block, const fsdp_stream *s);
/* Back to the pool. until_free: the stream it was taken for uses it until now (else only what was noted counts). */
void fsdp__allocator_give(fsdp_allocator *a, fsdp__block *block, bool until_free);
/* Append the table of blocks to text: who holds what. */
void fsdp__allocator_describe(const fsdp_allocator *a, char *text, size_t text_bytes);

#endif
