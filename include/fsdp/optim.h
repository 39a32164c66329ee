/* SPDX-License-Identifier: MIT */
/** @file optim.h  AdamW on shards. */
#ifndef FSDP_OPTIM_H
#define FSDP_OPTIM_H

#include "fsdp/step.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fsdp_adamw fsdp_adamw;

typedef struct fsdp_adamw_config {
    size_t size;
    float beta1, beta2, eps;
    float weight_decay; /**< decoupled; not for parameters with no_decay */
} fsdp_adamw_config;

#define FSDP_ADAMW_CONFIG_INIT {sizeof(fsdp_adamw_config), 0.9f, 0.999f, 1e-8f, 0.01f}

/** Declare AdamW for the model's trainable parameters: two fp32 moments a shard element, zero at seal. Before seal; one
 *  optimizer a model. config NULL: FSDP_ADAMW_CONFIG_INIT. Owned by the model.
 *  Errors: ARG (0 <= beta < 1, eps > 0, weight_decay >= 0); STATE (sealed, or one exists); NO_HOST_MEMORY. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_adamw_create(fsdp_model *model, const fsdp_adamw_config *config,
                                                      fsdp_adamw **out_opt);

typedef struct fsdp_adamw_args {
    size_t size;
    float lr;          /**< the same on every rank, like all of these; they are not compared */
    double grad_scale; /**< factor on the gradients before anything reads them: 1 / micro-steps, 1 / loss scale */
    float max_norm;    /**< clip the global norm to this; 0: do not clip */
    bool skip;         /**< change nothing but the report (the caller's own judgement, the same on every rank) */
} fsdp_adamw_args;

#define FSDP_ADAMW_ARGS_INIT {sizeof(fsdp_adamw_args), 1e-3f, 1.0, 0.0f, false}

/** One update: the bracket of step.h, gradient norm, clip, AdamW on every unit, then the first gathers of what follows.
 *
 *      f    = float(grad_scale × (1 / ranks, or 1))             one factor, applied once, in fp32
 *      norm = f × sqrt(Σ over ranks of Σ g²)                    clip = max_norm < norm ? max_norm / norm : 1
 *      g    = gradient shard × (f × clip)
 *      m    = beta1 m + (1 − beta1) g                           b1 = 1 − beta1^t, b2 = 1 − beta2^t
 *      v    = beta2 v + (1 − beta2) (g g)
 *      w    = w − (lr lr_scale) (m / b1 / (sqrt(v / b2) + eps) + weight_decay w)
 *
 *  f, b1 and b2 are computed in double and rounded to fp32 once; every other operation is rounded to fp32 in the order
 *  written. So a plain loop written like this gives the same bits, with clip from the report. No decay where no_decay is set.
 *  t counts the updates that were not skipped. A norm that is not finite skips the step on every rank. t, lr, clip and
 *  skip live in device memory; the host learns them from the step report.
 *  Stream: enqueues on @p stream, the gather and the reduce lane; never blocks. Ranks: collective.
 *  Errors: as the hooks of step.h; STATE (no new gradients). Source: Loshchilov and Hutter, arXiv:1711.05101. */
FSDP_API FSDP_NODISCARD fsdp_status fsdp_adamw_step(fsdp_adamw *opt, const fsdp_adamw_args *args, fsdp_stream *stream);

#ifdef __cplusplus
}
#endif
#endif
