/* SPDX-License-Identifier: MIT */
/** @file capture.h  Whole steps as one graph of the device (a CUDA graph): captured once, replayed for next to no host time.
 *
 *      train_one_step(s);                                       // at least one whole step before, with the same `next`
 *      fsdp_capture_begin(ctx, s);
 *      cudaStreamBeginCapture(native, cudaStreamCaptureModeThreadLocal);      // s's own cudaStream_t
 *      train_one_step(s);                                       // the usual calls: nothing runs, everything is recorded
 *      fsdp_capture_end(ctx, s, &capture);
 *      cudaStreamEndCapture(native, &graph);
 *      cudaGraphInstantiate(&exec, graph, cudaGraphInstantiateFlagUseNodePriority);    // lanes keep their high priority
 *      for (;;) {
 *          … the next batch into the buffers that the captured kernels read, on s …
 *          fsdp_adamw_args args = FSDP_ADAMW_ARGS_INIT;         // this step's own learning rate
 *          args.lr = …;
 *          fsdp_replay(capture, 1, &args, s);
 *          cudaGraphLaunch(exec, native);
 *          fsdp_replayed(capture, s);
 *          fsdp_step_report_get(model, step - 2, timeout_ns, &report);        // as ever
 *      }
 *      fsdp_capture_destroy(capture);
 *
 *  The library calls nothing of CUDA for this: the graph is yours, and so is how it is captured (thread-local or relaxed
 *  mode), instantiated, launched and destroyed. Lanes and other streams of the context come into the capture when they are
 *  first given something, and are back in @p stream at its end; a further stream of yours, for kernels of your own, comes in
 *  by fsdp_stream_wait_stream(other, s) or any hook.
 *
 *  What is captured has addresses in it, so a replay is right only in the state in which the capture began: nothing is open,
 *  the same units are gathered, in the same places, from current shards. So it is after every step whose pass named the same
 *  `next`; a capture that does not end in the state it began in is refused, and so is a replay in another. Eager steps,
 *  evaluations and, with an eager step behind them, new values may come between replays.
 *  A device that can capture: CUDA (backend.h: can_capture). Others: UNSUPPORTED. At most eight fsdp_adamw_step of a model in
 *  one capture: as many as there are reports (FSDP_REPORT_RING).
 *
 *  Between fsdp_capture_begin and _end these are refused by name (STATE), and change nothing: making, sealing and destroying
 *  models; values in and out; making and releasing streams; whatever ends in _host, asks whether something is done, or waits
 *  for a report; allocators that are made, destroyed or would have to grow; pinned memory; traces; fsdp_pass_abort; a second
 *  capture. An event or work that was recorded there cannot be asked or waited for by the host afterwards: its moment comes
 *  with every replay. Blocks that the captured step took from an allocator are its own at every replay: the blocks that live
 *  must be the same when the capture begins, when it ends, and then (give the capture an allocator of its own).
 *
 *  Destroy capture, graph and model in any order. With collectives of NCCL in it the graph goes before the context: NCCL
 *  closes no communicator that a graph still has, and fsdp_context_destroy waits for it in vain. So it is after a failure:
 *  destroy such graphs at once, or the abort that lets this rank go is given up after 15 s, and leaves the device's memory.
 *  A step on a stream that is being captured without fsdp_capture_begin is refused (STATE).
 *  The deadline between ranks is not kept for single collectives of a replay: who has died is found as ever, who stands still
 *  by the deadline of fsdp_step_report_get. A trace shows of a replay what the two calls around it enqueue.
 *  Thread: the one that drives the context. */
#ifndef FSDP_CAPTURE_H
#define FSDP_CAPTURE_H

#include "fsdp/optim.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fsdp_capture fsdp_capture;

/** Just before @p stream's capture begins: @p stream and all other streams wait for each other once, so that nothing inside
 *  has to wait for anything before it. @p stream: one of the caller's.
 *  Ranks: make the same captures and replays, as they make the same hooks.
 *  Errors, and nothing has begun: ARG (a lane); STATE (a model is inside a step: names the unit or why; a trace is on; a
 *  capture is on, or CUDA's on this stream; a replay has had no fsdp_replayed; FSDP_DEBUG_SYNC or FSDP_DEBUG_ORDER, which
 *  wait at each call); UNSUPPORTED; NO_HOST_MEMORY; what stopped the context. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_capture_begin(fsdp_context *ctx, fsdp_stream *stream);

/** Just before @p stream's capture ends (nothing of the library in between, as at the beginning): every stream that came in
 *  joins @p stream.
 *  Owns: *out_capture is the caller's; destroy it before the context.
 *  Errors: ARG, STATE (none is on, or on another stream): the capture goes on. STATE (it does not end in the state in which it
 *  began: names the unit and why; models that it touched are then as after fsdp_pass_abort: the next call on them is
 *  fsdp_pass_begin with index 0), or what stopped the context: it is over, *out_capture is not set; end the stream's capture
 *  too, and throw its graph away. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_capture_end(fsdp_context *ctx, fsdp_stream *stream, fsdp_capture **out_capture);

/** Before each launch of the graph on @p stream: @p stream waits for what other streams were given since (after another replay:
 *  nothing), and the device gets this replay's own learning rate, grad scale, max_norm and skip. Several replays with different
 *  values may be in flight.
 *  @p args: one for each fsdp_adamw_step of the capture, in order of the calls; what that call was given itself is not used.
 *  Errors, and the graph must not be launched: ARG (@p n_args is not their number; values as of fsdp_adamw_step; a lane);
 *  STATE (a unit is not as the capture needs it: named, with what to do; a model or allocator of it is gone; the last replay
 *  has had no fsdp_replayed; inside a capture); NO_HOST_MEMORY (ask again); MISMATCH, …: what stopped the context. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_replay(fsdp_capture *capture, uint32_t n_args, const fsdp_adamw_args *args,
                                                fsdp_stream *stream);

/** After it: whatever other streams are given from now on comes after the replay, and the replay counts as its steps: updates,
 *  statistics, step reports. One event record for each report.
 *  Errors: STATE (no fsdp_replay came before, or hooks were called since: named); ARG (another stream); what stopped the
 *  context. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_replayed(fsdp_capture *capture, fsdp_stream *stream);

/** At any time: replays that are in flight need it no longer. NULL is nothing. */
FSDP_API void fsdp_capture_destroy(fsdp_capture *capture);

#ifdef __cplusplus
}
#endif
#endif
