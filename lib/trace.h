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
/* The last record has not happened; span is what add returned for it. */
__attribute__((cold)) void fsdp__trace_take_back(fsdp_trace *trace, const fsdp_span *span);

#endif
