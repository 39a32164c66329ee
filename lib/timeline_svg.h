/* SPDX-License-Identifier: MIT */
/* The picture of a tape, as a file. */
#ifndef FSDP_LIB_TIMELINE_SVG_H
#define FSDP_LIB_TIMELINE_SVG_H

#include "fsdp/trace.h"

/* Errors: NO_HOST_MEMORY; IO (what was written so far stays). */
fsdp_status fsdp__timeline_write(const fsdp_host_allocator *host, const fsdp_trace *trace, const char *path,
                                 const char *title);

#endif
