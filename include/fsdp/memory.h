/* SPDX-License-Identifier: MIT */
/** @file memory.h  A snapshot of a context's device memory: every pool with every block and free range, who holds them, what
 *  must have run before they are used again, and what happened last. The program fsdp-memory draws it (docs/memory.md). */
#ifndef FSDP_MEMORY_H
#define FSDP_MEMORY_H

#include "fsdp/context.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Write it to @p path as JSON. Pools are the caller's allocators and the gather and grad range of each sealed model.
 *  The file is written beside @p path and renamed, so that a reader sees all of it or what was there before. A link or a
 *  device of that name (/dev/stdout) is refused.
 *  Thread: any; allocators stand while it is put together in host memory (150 to 300 bytes a block), not while it is written.
 *  Blocks: until the file is written; the device is not asked and not waited for. Works after an error or an abort, too.
 *  Errors: ARG; NO_HOST_MEMORY; IO (names the file and the reason; @p path is as it was). */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_memory_write_json(fsdp_context *ctx, const char *path);

#ifdef __cplusplus
}
#endif
#endif
