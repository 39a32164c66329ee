/* SPDX-License-Identifier: MIT */
/* The tape's writing end. device.c and comm.c add a record for everything they enqueue; trace.c keeps it. */
#ifndef FSDP_LIB_TRACE_H
#define FSDP_LIB_TRACE_H

#include "fsdp/backend.h"
#include "fsdp/trace.h"

/* Append a copy of record (its label is copied too). Returns where the device writes its times; NULL when the tape is full.
 * trace may be NULL: nothing happens. The span stays where it is until the trace is destroyed. Cold:
 * what a tape that is on costs. */
__attribute__((cold)) fsdp_span *fsdp__trace_add(fsdp_trace *trace, const fsdp_trace_record *record);
/* The caller's kernels are operations on it. */
bool fsdp__trace_sees_kernels(const fsdp_trace *trace);
/* Where it does not: that stream's last record has no time, or there is none. */
bool fsdp__trace_wants_time(const fsdp_trace *trace, int32_t slot);
/* The last record has not happened; span is what add returned for it. */
__attribute__((cold)) void fsdp__trace_take_back(fsdp_trace *trace, const fsdp_span *span);

#endif
