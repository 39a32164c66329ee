/* SPDX-License-Identifier: MIT */
/** @file trace.h  The tape: everything that was enqueued, in host order, with what it reads and writes and which edges
 *  order it. It can be drawn, summed up, and checked for races by somebody who knows nothing of the clocks. */
#ifndef FSDP_TRACE_H
#define FSDP_TRACE_H

#include "fsdp/device.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fsdp_trace fsdp_trace;

typedef enum fsdp_record_kind {
    FSDP_RECORD_OPERATION = 0, /**< a kernel, copy, fill, collective, host call or delay */
    FSDP_RECORD_WAIT = 1,      /**< the stream waits for an event */
    FSDP_RECORD_EVENT = 2,     /**< an event is recorded on the stream */
    FSDP_RECORD_HOST = 4,      /**< the host has waited for the event: what any stream is given from now on comes after
                                    what was before the event's record */
    FSDP_RECORD_USE = 3        /**< the caller's kernels may touch these ranges on this stream, here: noted when a window
                                    opens (after its waits) and when it closes (before its record) */
} fsdp_record_kind;

typedef enum fsdp_operation {
    FSDP_OPERATION_ALL_GATHER = 0,
    FSDP_OPERATION_REDUCE_SCATTER = 1,
    FSDP_OPERATION_ALL_REDUCE = 2,
    FSDP_OPERATION_BROADCAST = 3,
    FSDP_OPERATION_BARRIER = 4,
    FSDP_OPERATION_COPY = 5,
    FSDP_OPERATION_FILL = 6,
    FSDP_OPERATION_CAST = 7,        /**< dst = convert(src) */
    FSDP_OPERATION_ADD = 8,         /**< dst += src, in fp32 */
    FSDP_OPERATION_SQUARE_SUM = 9,  /**< a partial of the gradient norm */
    FSDP_OPERATION_STEP_RESULT = 10,/**< norm, clip, skip; writes the device's step record and the report */
    FSDP_OPERATION_ADAMW = 11,
    FSDP_OPERATION_HOST_CALL = 12,  /**< the caller's compute on the host backend */
    FSDP_OPERATION_DELAY = 13,      /**< the caller's compute in virtual time */
    FSDP_OPERATION_STEP_INPUT = 14, /**< what the host knows of the step, on its way to the device and to all ranks */
    FSDP_OPERATION_CAPTURE = 15,    /**< flight recorder only: a capture begins; what is enqueued runs in its replays */
    FSDP_OPERATION_REPLAY = 16      /**< flight recorder only: all of a capture again */
} fsdp_operation;

/** What a recorded event marks. */
typedef enum fsdp_mark {
    FSDP_MARK_READY = 0,     /**< the unit is gathered */
    FSDP_MARK_USED = 1,      /**< compute is done with the unit's parameters */
    FSDP_MARK_GRADS = 2,     /**< compute is done with the unit's parameters and has written its gradients */
    FSDP_MARK_REDUCED = 3,   /**< the unit's gradients are on the shard; their buffer is free */
    FSDP_MARK_UPDATED = 4,   /**< the optimizer has written the unit's shard */
    FSDP_MARK_NORM_PART = 5, /**< this rank's part of the norm and sums is there */
    FSDP_MARK_NORM_SUM = 6,  /**< norm, clip and skip are decided; the report is written */
    FSDP_MARK_CALLER = 7,    /**< an event, stream order or work of the caller's; on CUDA also where a window begins or ends and
                                  nothing else has a time: nobody waits for it */
    FSDP_MARK_DEMAND = 8     /**< no fence covered the need, so one was recorded for it */
} fsdp_mark;

/** Why a stream waits. */
typedef enum fsdp_reason {
    FSDP_REASON_READ = 0,    /**< it reads what another stream writes: gathered parameters, gradients, shards, norm */
    FSDP_REASON_WRITE = 1,   /**< it writes what another stream reads or writes: a shard still gathered or reduced */
    FSDP_REASON_REUSE = 2,   /**< it takes bytes whose last owner may still use them */
    FSDP_REASON_CALLER = 3   /**< the caller asked */
} fsdp_reason;

typedef struct fsdp_trace_access {
    uint64_t begin; /**< address */
    uint64_t bytes;
    bool write;     /**< false: read */
} fsdp_trace_access;

#define FSDP_TRACE_MAX_ACCESSES 6

typedef struct fsdp_trace_record {
    fsdp_record_kind kind;
    fsdp_operation operation; /**< OPERATION only */
    fsdp_mark mark;           /**< EVENT: what it marks. WAIT, HOST: what the awaited event marks */
    fsdp_reason reason;       /**< WAIT only */
    int32_t stream;           /**< slot, 0 … 15; names with fsdp_trace_stream_name. HOST: that recorded the event */
    int32_t other;            /**< WAIT: slot of the stream that recorded the event */
    uint64_t event;           /**< EVENT, WAIT, HOST: identity of the device's event. A wait means the last record before it */
    const char *label;        /**< unit, stream or model that it is about; "" for none. Valid while the trace lives */
    uint64_t bytes;           /**< OPERATION: bytes moved, by host.h's counts for collectives */
    uint64_t enqueued_ns;     /**< when the host came with it, by fsdp_context_now_ns */
    uint64_t start_ns, end_ns;/**< device time, on the same clock: on CUDA to some µs. WAIT: how long the stream stood. 0, 0
                                   if it has not run */
    uint32_t n_accesses;
    fsdp_trace_access access[FSDP_TRACE_MAX_ACCESSES];
} fsdp_trace_record;

/** Record from now on, at most @p max_records, 1 to 2^26 (later ones are counted, not kept; their memory, some 230 bytes
 *  each, is taken now). One trace a context at a time.
 *  Owns: the caller's; destroy it before the context. Errors: ARG; STATE (one is on); NO_HOST_MEMORY. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_trace_start(fsdp_context *ctx, uint64_t max_records, fsdp_trace **out_trace);
/** Record no more, and wait until what is on the tape has run. Blocks: at most timeout_ns a stream. Errors: TIMEOUT (ask
 *  again); what stopped the device. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_trace_stop_host(fsdp_trace *trace);
/** Stops it first if it is on. NULL is nothing. */
FSDP_API void fsdp_trace_destroy(fsdp_trace *trace);

/** Records that were kept, and those that found no room. */
FSDP_API uint64_t fsdp_trace_count(const fsdp_trace *trace);
FSDP_API uint64_t fsdp_trace_dropped(const fsdp_trace *trace);
/** Record @p index in host order, or NULL. Times are there after stop. */
FSDP_API const fsdp_trace_record *fsdp_trace_at(const fsdp_trace *trace, uint64_t index);
/** A stream's name, "" for a slot that was given nothing; and those of enums as pictures have them, "all-gather", "ready",
 *  "reuse", "?" for a number that is none. Never NULL. */
FSDP_API const char *fsdp_trace_stream_name(const fsdp_trace *trace, int32_t stream);
FSDP_API const char *fsdp_operation_name(fsdp_operation operation);
FSDP_API const char *fsdp_mark_name(fsdp_mark mark);
FSDP_API const char *fsdp_reason_name(fsdp_reason reason);

/** Where the time of one stream went. Exposed: the stream stood in a wait. All in ns, between the first start and the
 *  last end on any stream. */
typedef struct fsdp_trace_summary {
    size_t size;
    uint64_t span_ns;      /**< first start to last end, over all streams */
    uint64_t compute_ns;   /**< operations on the stream asked about */
    uint64_t between_ns;   /**< CUDA, where the tape does not see the caller's kernels: they, or nothing, between the stream's
                                records where none of these ran. 0 elsewhere, where they are operations */
    uint64_t late_ns;      /**< the stream had nothing left when the host came with its next record: so long it stood idle;
                                on CUDA at most so long, a part of between_ns: all between two records of which the second
                                was reached at once (within 20 µs) */
    uint64_t exposed_ns;   /**< its waits, all */
    uint64_t exposed_gather_ns; /**< of these, for an event that the gather lane recorded */
    uint64_t exposed_reduce_ns; /**< … and the reduce lane */
    uint64_t gather_ns, reduce_ns; /**< all-gathers; reduce-scatters and all-reduces: while they ran */
    uint64_t gather_bytes, reduce_bytes;
} fsdp_trace_summary;

#define FSDP_TRACE_SUMMARY_INIT {sizeof(fsdp_trace_summary), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

/** Errors: ARG; STATE (not stopped). */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_trace_summarize(const fsdp_trace *trace, const fsdp_stream *compute,
                                                         fsdp_trace_summary *out_summary);
/** Draw it: a lane a row, bars for operations (on CUDA for what is between the caller's hooks, too), arrows for edges with
 *  their mark; exposed time is hatched red, the wait of a collective for the wire or a rank grey, a late host dotted.
 *  @p title: one line.
 *  Errors: ARG; STATE (not stopped); IO (half a picture is not left at @p path). */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_trace_write_svg(const fsdp_trace *trace, const char *path, const char *title);

#ifdef __cplusplus
}
#endif
#endif
