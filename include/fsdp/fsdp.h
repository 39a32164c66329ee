/* SPDX-License-Identifier: MIT */
/** @file fsdp.h  FSDP / ZeRO-3 for C. The whole interface.
 *
 *  A rank, from start to end (error checks left out; examples/01_train.c is this program, complete):
 *
 *      fsdp_config config = FSDP_CONFIG_INIT;                     // host backend, a world of one
 *      fsdp_context *ctx;          fsdp_context_create(&config, &ctx);
 *      fsdp_stream *s;             fsdp_stream_create(ctx, "compute", &s);
 *
 *      fsdp_model_config mc = FSDP_MODEL_CONFIG_INIT;             // gathers one unit ahead
 *      fsdp_model *model;          fsdp_model_create(ctx, &mc, &model);
 *      for (int l = 0; l < L; l++) {
 *          fsdp_model_add_unit(model, name[l], NULL, &unit[l]);
 *          fsdp_unit_add_param(unit[l], weight_name[l], 2, (uint64_t[]){d, d}, NULL, NULL);
 *      }
 *      fsdp_adamw_config ac = FSDP_ADAMW_CONFIG_INIT;
 *      fsdp_adamw *opt;            fsdp_adamw_create(model, &ac, &opt);
 *      fsdp_model_seal(model);                                    // every byte is taken here
 *      fsdp_model_fill(model, init, NULL, FSDP_DTYPE_FP32);
 *
 *      for (uint64_t step = 1; step <= steps; step++) {
 *          fsdp_pass_args pass = FSDP_PASS_ARGS_INIT;
 *          fsdp_view v = FSDP_VIEW_INIT;
 *          fsdp_pass_begin(model, &pass, s);
 *          for (int l = 0; l < L; l++) {
 *              fsdp_forward_begin(unit[l], s, &v);                // v.params[0] is the whole weight
 *              forward(s, l, v.params);                           // your kernels
 *              fsdp_forward_end(unit[l], s);
 *          }
 *          for (int l = L - 1; l >= 0; l--) {
 *              fsdp_backward_begin(unit[l], s, &v);               // v.grads[0] is zeroed
 *              backward(s, l, v.params, v.grads);
 *              fsdp_backward_end(unit[l], s);                     // reduce-scatter
 *          }
 *          fsdp_pass_end(model, s);
 *          fsdp_adamw_args update = FSDP_ADAMW_ARGS_INIT;
 *          fsdp_adamw_step(opt, &update, s);
 *          fsdp_step_report r = FSDP_STEP_REPORT_INIT;
 *          if (step > 2) fsdp_step_report_get(model, step - 2, timeout, &r);
 *      }
 *      fsdp_model_destroy(model);  fsdp_stream_release(s);  fsdp_context_destroy(ctx);
 *
 *  Structs of settings, arguments and results begin with their size and have an initialiser with the real defaults; items of
 *  lists and what lies inside another struct need neither. (docs/bindings.md has the defaults for languages without macros.)
 *  Every call that can fail returns fsdp_status; fsdp_last_error() has the sentence. Nothing is printed, nothing is global,
 *  nothing exits. Functions that the caller gives return: no exception of C++ and no longjmp passes through the library,
 *  which would keep what it holds at that moment.
 *
 *  Read model.h, step.h and optim.h first. Not in here are cuda.h and nccl.h, which include CUDA's and NCCL's headers; mpi.h
 *  and jemalloc.h, of libraries of their own; and backend.h, for who writes a backend. */
#ifndef FSDP_FSDP_H
#define FSDP_FSDP_H

#define FSDP_VERSION_MAJOR 0
#define FSDP_VERSION_MINOR 1
#define FSDP_VERSION_PATCH 0
#define FSDP_VERSION (FSDP_VERSION_MAJOR * 10000 + FSDP_VERSION_MINOR * 100 + FSDP_VERSION_PATCH)

#include "fsdp/alloc.h"
#include "fsdp/capture.h"
#include "fsdp/comm.h"
#include "fsdp/context.h"
#include "fsdp/device.h"
#include "fsdp/dtype.h"
#include "fsdp/flight.h"
#include "fsdp/host.h"
#include "fsdp/launch.h"
#include "fsdp/memory.h"
#include "fsdp/model.h"
#include "fsdp/optim.h"
#include "fsdp/sim.h"
#include "fsdp/status.h"
#include "fsdp/step.h"
#include "fsdp/trace.h"

#ifdef __cplusplus
extern "C" {
#endif

/** FSDP_VERSION of the library that runs: 102 is 0.1.2. Below 1.0 another minor version may have another interface: compare
 *  fsdp_version() / 100 with that of the headers, or of whatever was made from them. Thread: any. */
FSDP_API uint32_t fsdp_version(void);

#ifdef __cplusplus
}
#endif
#endif
