/* SPDX-License-Identifier: MIT */
/* Streams: opening and closing, in the clocks. */
#ifndef FSDP_LIB_STREAM_H
#define FSDP_LIB_STREAM_H

#include "clock.h"

/* Take a slot, make the native stream and the ring's events. Errors: STATE (no slot), the device's. */
fsdp_status fsdp__stream_open(fsdp_context *ctx, const char *name, bool lane, fsdp_stream **out_stream);
/* The same for a native stream that a backend has made already, of the caller's. On an error native is left alone; else
 * close destroys it. */
fsdp_status fsdp__stream_adopt(fsdp_context *ctx, const char *name, void *native, fsdp_stream **out_stream);
/* Wait until it is idle; give back events and slot. */
void fsdp__stream_close(fsdp_stream *s);
/* Not NULL, and of this context. */
fsdp_status fsdp__stream_belongs(const char *call, const fsdp_context *ctx, const fsdp_stream *s);
/* What every call that enqueues on a caller's stream asks first: that (ctx NULL: any), and that the context lives. */
fsdp_status fsdp__stream_check(const char *call, const fsdp_context *ctx, const fsdp_stream *s);
/* And a stream for a step: no lane, and no capture is on that fsdp_capture_begin does not know of. */
fsdp_status fsdp__step_stream_check(const char *call, const fsdp_context *ctx, const fsdp_stream *s);

#endif
