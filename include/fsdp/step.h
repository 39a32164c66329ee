/* SPDX-License-Identifier: MIT */
/** @file step.h  The hooks of a training step.
 *
 *      fsdp_pass_begin(model, &args, s);
 *      for each unit, in order:   fsdp_forward_begin(u, s, &view);  your kernels on s;  fsdp_forward_end(u, s);
 *      for each unit, reversed:   fsdp_backward_begin(u, s, &view); your kernels on s;  fsdp_backward_end(u, s);
 *      fsdp_pass_end(model, s);
 *      fsdp_adamw_step(opt, &args, s);                                  (optim.h; or your own, inside the update bracket)
 *
 *  No hook, pass or update blocks (but where FSDP_DEBUG_SYNC or FSDP_DEBUG_ORDER asks for it), allocates device memory, or
 *  creates an event: they take the caller's compute stream and return when their work is enqueued. Ranks make the same calls
 *  in the same order.
 *  Errors of every hook: ARG; STATE (unmatched, wrong moment; names the unit); NO_MEMORY (off plan, what is open fills the
 *  pool); NO_HOST_MEMORY: nothing has changed. What begins a pass or an update also refuses a lane (ARG), and a stream in a
 *  capture that the library was not told of (STATE). A failure after something was enqueued leaves the model FAILED: every call
 *  but destroy, statistics and fsdp_pass_abort returns that first error. */
#ifndef FSDP_STEP_H
#define FSDP_STEP_H

#include "fsdp/device.h"
#include "fsdp/model.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fsdp_pass_args {
    size_t size;
    int32_t pass;   /**< FSDP_PASS_TRAIN, FSDP_PASS_EVAL, or fsdp_model_add_pass's number */
    uint32_t index; /**< which micro-step of the step: 0 … count - 1 */
    uint32_t count; /**< micro-steps in this step; with BACKWARD visits more than 1 need an accumulation */
    int32_t next;   /**< the pass after the last micro-step (and its update); FSDP_PASS_NONE if none is known */
} fsdp_pass_args;

#define FSDP_PASS_ARGS_INIT {sizeof(fsdp_pass_args), FSDP_PASS_TRAIN, 0, 1, FSDP_PASS_TRAIN}

/** Begin a micro-step. After the last one of a pass with BACKWARD visits an update must follow before the next pass. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_pass_begin(fsdp_model *model, const fsdp_pass_args *args, fsdp_stream *stream);
/** End it: gives back what is gathered and not wanted next. Errors: STATE (a unit is open: named). */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_pass_end(fsdp_model *model, fsdp_stream *stream);

/** The pointers of an open unit, in registration order of its parameters; valid until the end hook. */
typedef struct fsdp_view {
    size_t size;
    uint32_t n_params;
    bool grads_zeroed;   /**< true: add to grads; they are zeros, or the sum so far of a window outside this one or, with
                              ACCUMULATE_KEEP_FULL, of earlier micro-steps. false: they are undefined, write before you read */
    void *const *params; /**< compute dtype; each 256-byte aligned, 512 in a model of fp32 alone. Read only: in a world of one
                              it may be the shard itself. An empty parameter's is not to be followed */
    void *const *grads;  /**< gradient dtype, aligned like these; NULL outside backward; an entry is NULL where the parameter
                              is frozen. In a world of one it may be the gradient shard itself */
} fsdp_view;

#define FSDP_VIEW_INIT {sizeof(fsdp_view), 0, false, NULL, NULL}

/** Open a FORWARD, RECOMPUTE or READ visit: gather the unit if it is not there, make @p stream wait for it, gather ahead.
 *  A hook that is not the pass's next visit is correct, not prefetched, and counted (fsdp_model_stats). */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_forward_begin(fsdp_unit *unit, fsdp_stream *stream, fsdp_view *out_view);
/** Close it: what @p stream was given until now is the unit's last use; the bytes are free from here on, unless kept. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_forward_end(fsdp_unit *unit, fsdp_stream *stream);

/** Open a BACKWARD visit: as above, in backward order, with a flat gradient buffer: zeroed by default; with
 *  ACCUMULATE_KEEP_FULL it holds the sum so far. Windows of one unit that nest share it and are reduced once. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_backward_begin(fsdp_unit *unit, fsdp_stream *stream, fsdp_view *out_view);
/** Close it: the reduce lane reduces the gradients once @p stream has come this far. Gradients that are the shard are there.
 *  A unit that had no such window in a step has gradient zero in its update. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_backward_end(fsdp_unit *unit, fsdp_stream *stream);

/** A second compute stream uses the open unit too: @p other waits until it is gathered (in backward: and its gradients are
 *  zeroed); the window's end waits for @p other. At most four such streams a window. Errors: STATE (not open, a fifth). */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_unit_use(fsdp_unit *unit, fsdp_stream *other);

/** A whole micro-step of a rank that has no data for it: pass_begin, the pass's hooks in its order, pass_end, with gradients
 *  of zero and no compute, so that the ranks that have data, and make the same micro-step by that order, wait for nobody:
 *  windows that close behind the same visit close innermost first. Leaves behind what fsdp_pass_end leaves.
 *  The step is the one in which this rank's gradients and sums are zero; with ACCUMULATE_KEEP_FULL, those of its earlier
 *  micro-steps stay. The mean of the optimizer is over ranks, this one too. For the mean over samples: kernels leave the
 *  sum over this rank's samples, grad_sum is set, and grad_scale is 1 / the samples of all ranks and micro-steps, known
 *  from the data or from fsdp_sum_host; fsdp_step_sum of losses and of counts gives both in the report.
 *  Stream: enqueues on @p stream as the hooks do; never blocks. Ranks: collective, with the others' hooks.
 *  Errors: as fsdp_pass_begin, and nothing has begun; any later one leaves the model FAILED. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_pass_idle(fsdp_model *model, const fsdp_pass_args *args, fsdp_stream *stream);

/* ---- The update bracket: around whatever writes shards. fsdp_adamw_step brings its own. ---- */

/** @p stream waits for reductions, and for gathers that still read the shards. Without new gradients, too: for loading and
 *  saving values; it is an update all the same, and takes a number of fsdp_step_report_get's.
 *  Errors: STATE (a unit is open, a pass not ended, a micro-step missing); MISMATCH (ranks called different collectives
 *  before an earlier fsdp_adamw_step). */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_update_begin(fsdp_model *model, fsdp_stream *stream);
/** This unit's last write is enqueued: its next gather need wait for no other. Optional; update_end does it for the rest.
 *  @p stream, of both: update_begin's, or one that comes after that and after all writes, by an event of the caller's: nothing
 *  here makes it wait. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_update_unit(fsdp_unit *unit, fsdp_stream *stream);
/** Gathers the held units and the first visits of the pass that pass_begin's `next` named. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_update_end(fsdp_model *model, fsdp_stream *stream);

/** This rank's part of one parameter. */
typedef struct fsdp_shard_segment {
    fsdp_param *param;
    uint64_t begin, count; /**< elements of the parameter, in its own order */
    void *master;          /**< count elements of the master dtype */
    void *gradient;        /**< count elements of the reduce dtype, the sum over ranks; NULL if frozen */
} fsdp_shard_segment;

/** The segments of a unit, in parameter order, none for a parameter of which nothing lies here. Pointers are valid from seal
 *  to destroy, contents inside the bracket. *out_segments is borrowed. For an optimizer of one's own.
 *  Errors: ARG, STATE (not sealed). */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_unit_shard(fsdp_unit *unit, const fsdp_shard_segment **out_segments, uint32_t *out_n);

/** The factor that an optimizer of one's own applies to gradient shards: 1 / ranks, or 1 with grad_sum. */
FSDP_API float fsdp_model_grad_factor(const fsdp_model *model);

/* ---- Results without a stop ---- */

#define FSDP_MAX_SUMS 16
#define FSDP_REPORT_RING 8

/** Add the fp32 number at @p device_value (device memory, as of fsdp_allocator_alloc; on the host backend any; read when
 *  @p stream comes here) to sum @p index (0 … 15) of the current step; the sums of all ranks and calls
 *  ride on the norm's all-reduce and come out of the step report. What an EVAL pass adds is in the report of the update
 *  after it, with what that step itself adds: give it an index of its own, or fsdp_sum_host once @p stream is drained. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_step_sum(fsdp_model *model, uint32_t index, const float *device_value,
                                                  fsdp_stream *stream);

typedef struct fsdp_step_report {
    size_t size;
    uint64_t step;      /**< which update: 1, 2, … */
    uint64_t updates;   /**< updates that were not skipped, this one included */
    bool skipped;       /**< the norm was not finite (fsdp_param_get of FSDP_VALUE_GRADIENT says whose gradient, before the next
                             pass), or the caller asked: nothing was changed */
    float lr;           /**< as used */
    float grad_norm;    /**< of the mean (or sum) gradient, over all ranks, before clipping */
    float clip_scale;   /**< factor that clipping applied: 1 if none, or skipped */
    float sums[FSDP_MAX_SUMS];
} fsdp_step_report;

#define FSDP_STEP_REPORT_INIT {sizeof(fsdp_step_report), 0, 0, false, 0.0f, 0.0f, 0.0f, {0.0f}}

/** The report of update @p step, an fsdp_adamw_step among the last 8 updates. Blocks until the device has written it; asked for
 *  step - 2 it is log line, back-pressure and hang detector in one. With a timeout_ns above fsdp_config.timeout_ns it hears
 *  which rank is late, and not only that one is.
 *  Errors: ARG (not begun, or left the ring); TIMEOUT (ask again); MISMATCH (ranks called different collectives before that
 *  step); what stopped the context. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_step_report_get(fsdp_model *model, uint64_t step, uint64_t timeout_ns,
                                                         fsdp_step_report *out_report);

/** What the host decided, counted since seal. */
typedef struct fsdp_model_stats {
    size_t size;
    uint64_t steps;            /**< update brackets closed */
    uint64_t gathers;          /**< units gathered */
    uint64_t gathers_ahead;    /**< of these, before their own begin hook */
    uint64_t reductions;       /**< units reduced */
    uint64_t off_plan_hooks;   /**< begin hooks that were not the pass's next visit */
    uint64_t unused_gathers;   /**< gathered ahead and given back unused */
    uint64_t over_budget;      /**< prefetches left out because of prefetch_bytes */
    uint64_t no_room;          /**< prefetches left out because their planned bytes were still in use */
    uint64_t off_plan_places;  /**< gathers placed by best fit */
    uint64_t gather_trace, grad_trace; /**< hash of every place in the pool that was handed out from the update before the
                                            last one to the last: offset, bytes, stream. Equal on every rank, whatever
                                            its host waited for; from the second step on the same for equal steps */
} fsdp_model_stats;

#define FSDP_MODEL_STATS_INIT {sizeof(fsdp_model_stats), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

/** At any time, of a model that has FAILED as well. Errors: ARG. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_model_stats_get(const fsdp_model *model, fsdp_model_stats *out_stats);

/** Give up the micro-step and the step it belongs to: closes what is open, gives every buffer back, discards gradients,
 *  keeps the parameters of the last update. Clears FAILED where the failure was local. The next call is pass_begin with
 *  index 0. Every rank must do it. Errors: ABORTED, RANK_LOST, MISMATCH, DEVICE (the context is gone). */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_pass_abort(fsdp_model *model, fsdp_stream *stream);

#ifdef __cplusplus
}
#endif
#endif
