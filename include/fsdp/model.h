/* SPDX-License-Identifier: MIT */
/** @file model.h  Units and parameters: registration, passes, seal, bytes, values in and out.
 *
 *  A model is an ordered list of units; a unit is what is gathered and given back as one: usually a transformer block.
 *  Register, ask fsdp_model_predict whether it fits, seal (collective; takes every byte the model will ever take), fill,
 *  train (step.h). Nothing of a sealed model can be changed. */
#ifndef FSDP_MODEL_H
#define FSDP_MODEL_H

#include "fsdp/context.h"
#include "fsdp/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fsdp_model fsdp_model;
typedef struct fsdp_unit fsdp_unit;
typedef struct fsdp_param fsdp_param;

/** How the gradients of a step's micro-steps come together. */
typedef enum fsdp_accumulation {
    FSDP_ACCUMULATE_NONE = 0,        /**< one micro-step a step */
    FSDP_ACCUMULATE_REDUCE_EACH = 1, /**< each backward_end reduces onto the shard; one temporary of the largest shard */
    FSDP_ACCUMULATE_KEEP_FULL = 2    /**< full gradients stay, a buffer a unit; reduced in the last micro-step only, by each
                                          backward_end there that closes the unit */
} fsdp_accumulation;

typedef struct fsdp_model_config {
    size_t size;
    const char *name;         /**< for errors and traces; copied */
    uint32_t depth;           /**< how many positions of the pass ahead are gathered, held units not counted; 0 to 64 */
    uint64_t prefetch_bytes;  /**< most bytes gathered ahead at a time, held units not counted; 0: no limit beside depth */
    uint32_t grad_buffers;    /**< gradient buffers in flight: one written, the others being reduced; 1 to 64 */
    fsdp_accumulation accumulation;
    bool grad_sum;            /**< false: the optimizer sees the mean over ranks; true: the sum */
} fsdp_model_config;

#define FSDP_MODEL_CONFIG_INIT {sizeof(fsdp_model_config), "model", 1, 0, 2, FSDP_ACCUMULATE_NONE, false}

/** config NULL: FSDP_MODEL_CONFIG_INIT. Owns: *out_model is the caller's; destroy before its context.
 *  Errors: ARG, NO_HOST_MEMORY. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_model_create(fsdp_context *ctx, const fsdp_model_config *config,
                                                      fsdp_model **out_model);
/** Waits until the context's streams are idle, then frees it, its units, parameters and optimizer. NULL is nothing.
 *  Errors: STATE (inside a capture, the library's or the caller's own: nothing is freed). */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_model_destroy(fsdp_model *model);

/* ---- Registration: same calls, same order on every rank; seal compares. ---- */

typedef enum fsdp_reshard {
    FSDP_RESHARD_AFTER_USE = 0, /**< given back after each visit, unless the next one is within depth */
    FSDP_RESHARD_NEVER = 1      /**< held: gathered once a step. For tied embeddings, LayerNorms that a neighbour reads */
} fsdp_reshard;

typedef enum fsdp_place { FSDP_PLACE_DEVICE = 0 } fsdp_place;

/** A unit's policy. */
typedef struct fsdp_unit_config {
    size_t size;
    fsdp_dtype compute_dtype; /**< what is gathered and what the caller's kernels read */
    fsdp_dtype grad_dtype;    /**< what the caller's kernels write */
    fsdp_dtype reduce_dtype;  /**< what is summed over ranks and micro-steps, and what the optimizer reads. (A world of one
                                   adds what grad_dtype holds to it, without a rounding between) */
    fsdp_dtype master_dtype;  /**< what the optimizer writes: the shard itself */
    fsdp_reshard reshard;
    fsdp_place place;         /**< where the shard lives */
    bool zero_grads;          /**< backward_begin hands out zeros, so that kernels may do +=; false: undefined bytes */
} fsdp_unit_config;

#define FSDP_UNIT_CONFIG_INIT                                                                                         \
    {sizeof(fsdp_unit_config), FSDP_DTYPE_FP32, FSDP_DTYPE_FP32, FSDP_DTYPE_FP32, FSDP_DTYPE_FP32,                     \
     FSDP_RESHARD_AFTER_USE, FSDP_PLACE_DEVICE, true}

/** Append a unit. @p name: unique in the model, copied. config NULL: FSDP_UNIT_CONFIG_INIT.
 *  Errors: ARG (name, dtype, size); STATE (sealed); UNSUPPORTED (place; KEEP_FULL with grad_dtype != reduce_dtype, or
 *  without zero_grads). */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_model_add_unit(fsdp_model *model, const char *name, const fsdp_unit_config *config,
                                                        fsdp_unit **out_unit);

#define FSDP_MAX_DIMS 8

typedef struct fsdp_param_config {
    size_t size;
    fsdp_dtype compute_dtype; /**< INHERIT: the unit's. Another one opens a further flat group in the unit */
    bool frozen;              /**< gathered, never reduced or updated */
    bool no_decay;            /**< weight decay does not apply (biases, norms) */
    float lr_scale;           /**< factor on the learning rate */
} fsdp_param_config;

#define FSDP_PARAM_CONFIG_INIT {sizeof(fsdp_param_config), FSDP_DTYPE_INHERIT, false, false, 1.0f}

/** Append a parameter of @p n_dims (0 to 8) extents; an extent of 0 makes it empty, no extents a scalar.
 *  @p name: unique in the MODEL, independent of the unit ("h.0.attn.w"); copied. config NULL: FSDP_PARAM_CONFIG_INIT.
 *  *out_param (may be NULL) is borrowed. The order of these calls is the order of view.params[].
 *  Errors: ARG (name taken, more than 2^48 elements, dims); STATE (sealed). A unit, too, has at most 2^48 elements and at
 *  least one parameter: predict and seal say ARG. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_unit_add_param(fsdp_unit *unit, const char *name, uint32_t n_dims,
                                                        const uint64_t *dims, const fsdp_param_config *config,
                                                        fsdp_param **out_param);

/** As they were registered; names are borrowed, and live as long as the model. */
FSDP_API const char *fsdp_unit_name(const fsdp_unit *unit);
FSDP_API const char *fsdp_param_name(const fsdp_param *param);
FSDP_API uint64_t fsdp_param_elems(const fsdp_param *param);
/** The parameter of that name, or NULL. Borrowed. */
FSDP_API fsdp_param *fsdp_model_find_param(fsdp_model *model, const char *name);

/* ---- Passes ---- */

/** A pass is the list of visits of a micro-step. Two exist: TRAIN (held units first, then all in registration order;
 *  held units again, then the reverse) and EVAL (the forward half). A held unit has one window a half, open across it: begin
 *  it first, end it last. Others are the caller's, added before seal, each by a name of its own. */
enum { FSDP_PASS_TRAIN = 0, FSDP_PASS_EVAL = 1, FSDP_PASS_NONE = -1 };

typedef enum fsdp_use {
    FSDP_USE_FORWARD = 0,
    FSDP_USE_BACKWARD = 1,  /**< the only one with gradients; opened by fsdp_backward_begin */
    FSDP_USE_RECOMPUTE = 2, /**< forward again inside backward; opened by fsdp_forward_begin, like READ */
    FSDP_USE_READ = 3
} fsdp_use;

typedef struct fsdp_visit {
    fsdp_unit *unit;
    fsdp_use use;
    int32_t until; /**< index of the last visit that begins inside this one's window; its own index or less: none */
} fsdp_visit;

/** Declare a pass: @p n_visits visits in the order of their begin hooks. Any unit, any number of times, windows may nest.
 *  @p name: unique in the model, copied. n_visits: 1 to 2^24. *out_pass: its number for fsdp_pass_args.
 *  Errors: ARG; STATE (sealed); NO_HOST_MEMORY. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_model_add_pass(fsdp_model *model, const char *name, uint32_t n_visits,
                                                        const fsdp_visit *visits, int32_t *out_pass);

/* ---- Bytes ---- */

/** The device bytes of one rank, by pool; as the device hands them out, exact, the same on every rank. */
typedef struct fsdp_memory {
    size_t size;
    uint64_t total;
    uint64_t master;    /**< parameter shards */
    uint64_t gradients; /**< gradient shards */
    uint64_t moments;   /**< the optimizer's */
    uint64_t gather;    /**< full parameters of the units in flight: one range, planned. In a world of one without those
                             whose compute dtype is master_dtype: they are the shard itself */
    uint64_t grad;      /**< full gradients in flight: one range, planned. In a world of one without those of units whose
                             grad_dtype is reduce_dtype, if no unit is reduced twice in a step: they are the shard itself */
    uint64_t scratch;   /**< temporaries, tables and the step's small records */
    uint64_t pinned;    /**< host memory that the device writes: the report ring. Not in total */
    uint64_t gather_live_peak; /**< most bytes of gather that are live at once: what any placement needs at least */
    uint64_t params;    /**< elements of the whole model */
} fsdp_memory;

#define FSDP_MEMORY_INIT {sizeof(fsdp_memory), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

/** What seal would take, from the model, its policies, passes and optimizer as declared so far; nothing is allocated. Before
 *  seal: an optimizer that fsdp_adamw_create declares afterwards adds its moments.
 *  For a machine that you do not have: register on a sim context of that world (sim.h) and ask there.
 *  Errors: ARG; STATE (sealed: use fsdp_model_memory; no unit); NO_HOST_MEMORY. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_model_predict(fsdp_model *model, fsdp_memory *out_memory);
/** What seal took, by pool. Errors: ARG, STATE (not sealed). */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_model_memory(const fsdp_model *model, fsdp_memory *out_memory);

/** End registration: compare layout, policies, passes and bytes between ranks, vote, take every byte, run each kind of
 *  collective once. Ranks: collective. Blocks: at most timeout_ns for each of its votes and its collectives.
 *  Errors: ARG (a unit without a parameter or too large); STATE (sealed, no unit); MISMATCH (names the first difference, on
 *  every rank); NO_MEMORY and whatever else failed on any rank, on every rank. After an error the model is as before; in the
 *  one case in which the context is not (docs/errors.md, "Who is told"), fsdp_context_check says so. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_model_seal(fsdp_model *model);

/* ---- Values in and out. They block until values are where they should be; not inside a step. ---- */

typedef struct fsdp_param_range {
    fsdp_param *param;
    uint64_t begin; /**< first element, in the parameter's own row-major order */
    uint64_t count;
} fsdp_param_range;

/** Write elements begin … begin + count of the parameter to @p dst, in fsdp_model_fill's dtype. Non-zero gives up. */
typedef int (*fsdp_fill_fn)(void *arg, const fsdp_param_range *range, void *dst);

/** Ask @p fn for the values of this rank's shard, and of nothing else: ranges in registration order, ascending, at most
 *  2^18 elements at a time, on the calling thread. No rank ever holds a model. Not collective, but every rank must do it.
 *  After seal masters, gradients and moments are zero.
 *  Errors: ARG (also: fn gave up); STATE (not sealed, inside a step); TIMEOUT, …: the ranges asked for so far have been
 *  written. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_model_fill(fsdp_model *model, fsdp_fill_fn fn, void *arg, fsdp_dtype dtype);

/** What of a parameter. */
typedef enum fsdp_value {
    FSDP_VALUE_MASTER = 0,   /**< the shard that the optimizer writes */
    FSDP_VALUE_COMPUTE = 1,  /**< master, rounded to the compute dtype: what kernels see */
    FSDP_VALUE_GRADIENT = 2, /**< the reduced gradient of the last step, before any factor; after an abort, undefined */
    FSDP_VALUE_MOMENT_1 = 3, /**< AdamW's m */
    FSDP_VALUE_MOMENT_2 = 4  /**< AdamW's v */
} fsdp_value;

/** Replace the whole parameter's master by @p src (elems × dtype, host memory, the same on every rank). Not collective, but
 *  every rank must do it. Errors: as fsdp_model_fill. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_param_set(fsdp_param *param, const void *src, fsdp_dtype dtype);
/** The whole parameter's @p value in @p dst (elems × dtype, host memory). Collective; @p dst may be NULL on ranks that do
 *  not want it. Errors: ARG; STATE; UNSUPPORTED (a frozen parameter's gradient or moment, a moment without an optimizer);
 *  whatever failed on any rank, on every rank. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_param_get(fsdp_param *param, fsdp_value value, void *dst, fsdp_dtype dtype);

/** A hash of every parameter's name, shape and master bits, the same for every world size and layout. Collective.
 *  Errors: as fsdp_param_get. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_model_hash(fsdp_model *model, uint64_t *out_hash);

#ifdef __cplusplus
}
#endif
#endif
