/* SPDX-License-Identifier: MIT */
/* A CUDA program that uses the library from outside: it trains one weight for two steps on one GPU, with kernels of its own
 * on a stream of its own. Exits with 0; with 77 and the library's sentence where there is no GPU. */
#include <fsdp/cuda.h>
#include <fsdp/fsdp.h>
#include <fsdp/nccl.h>
#if __has_include(<fsdp/jemalloc.h>)
#include <fsdp/jemalloc.h>
#endif
#if __has_include(<fsdp/mpi.h>)
#include <fsdp/mpi.h>
#endif
#include <cstdio>
#include <cstdlib>

#define TRY(call)                                                                                            \
    do {                                                                                                     \
        fsdp_status status_ = (call);                                                                        \
        if (status_ != FSDP_OK) {                                                                            \
            std::fprintf(stderr, "%s: %s: %s\n", #call, fsdp_status_name(status_), fsdp_last_error());       \
            std::exit(status_ == FSDP_ERR_DEVICE && cudaGetDeviceCount(&n_devices) != cudaSuccess ? 77 : 1); \
        }                                                                                                    \
    } while (0)

static int n_devices;
static const uint64_t elems = 1000, timeout_ns = 60000000000ull;

/* Gradient of Σ w² / 2. */
__global__ void add_gradient(float *dw, const float *w, uint64_t n)
{
    const uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x;
    if (i < n) dw[i] += w[i];
}

static int ones(void *, const fsdp_param_range *range, void *dst)
{
    for (uint64_t i = 0; i < range->count; i++) static_cast<float *>(dst)[i] = 1.0f;
    return 0;
}

static void train_step(fsdp_model *model, fsdp_unit *unit, fsdp_adamw *opt, fsdp_stream *s)
{
    fsdp_pass_args pass = FSDP_PASS_ARGS_INIT;
    fsdp_adamw_args update = FSDP_ADAMW_ARGS_INIT;
    fsdp_view v = FSDP_VIEW_INIT;
    update.lr = 0.25f;
    TRY(fsdp_pass_begin(model, &pass, s));
    TRY(fsdp_forward_begin(unit, s, &v));
    TRY(fsdp_forward_end(unit, s));
    TRY(fsdp_backward_begin(unit, s, &v));
    add_gradient<<<(elems + 255) / 256, 256, 0, fsdp_cuda_stream(s)>>>(static_cast<float *>(v.grads[0]),
                                                                       static_cast<const float *>(v.params[0]), elems);
    if (cudaGetLastError() != cudaSuccess) std::exit(1);
    TRY(fsdp_backward_end(unit, s));
    TRY(fsdp_pass_end(model, s));
    TRY(fsdp_adamw_step(opt, &update, s));
}

int main()
{
    fsdp_cuda_config cuda = FSDP_CUDA_CONFIG_INIT;
    fsdp_config config = FSDP_CONFIG_INIT;
    fsdp_adamw_config adamw = FSDP_ADAMW_CONFIG_INIT;
    fsdp_nccl_info info = FSDP_NCCL_INFO_INIT;
    fsdp_step_report report[2] = {FSDP_STEP_REPORT_INIT, FSDP_STEP_REPORT_INIT};
    fsdp_context *ctx;
    fsdp_stream *s;
    fsdp_model *model;
    fsdp_unit *unit;
    fsdp_param *param;
    fsdp_adamw *opt;
    cudaStream_t native;
    static float w[elems];
    config.backend = fsdp_cuda_backend();
    config.backend_config = &cuda;
    TRY(fsdp_context_create(&config, &ctx));
    TRY(fsdp_nccl_info_get(ctx, &info));
    if (cudaStreamCreateWithFlags(&native, cudaStreamNonBlocking) != cudaSuccess) return 1;
    TRY(fsdp_cuda_stream_wrap(ctx, native, "compute", &s));
    TRY(fsdp_model_create(ctx, nullptr, &model));
    TRY(fsdp_model_add_unit(model, "unit", nullptr, &unit));
    TRY(fsdp_unit_add_param(unit, "w", 1, &elems, nullptr, &param));
    adamw.weight_decay = 0.0f;
    TRY(fsdp_adamw_create(model, &adamw, &opt));
    TRY(fsdp_model_seal(model));
    TRY(fsdp_model_fill(model, ones, nullptr, FSDP_DTYPE_FP32));
    for (int step = 0; step < 2; step++) train_step(model, unit, opt, s);
    for (int step = 0; step < 2; step++) TRY(fsdp_step_report_get(model, step + 1, timeout_ns, &report[step]));
    TRY(fsdp_param_get(param, FSDP_VALUE_MASTER, w, FSDP_DTYPE_FP32));
    std::printf("GPU %d, norms %g and %g, w %g\n", fsdp_cuda_device(ctx), report[0].grad_norm, report[1].grad_norm,
                w[elems - 1]);
    TRY(fsdp_model_destroy(model));
    TRY(fsdp_stream_release(s));
    TRY(fsdp_context_destroy(ctx));
    if (cudaStreamDestroy(native) != cudaSuccess) return 1;
    /* The first step of AdamW goes by lr, whatever the gradient; √1000 is 31.62. */
    const bool right = report[0].grad_norm > 31.6f && report[0].grad_norm < 31.7f && report[1].grad_norm > 23.7f &&
                       report[1].grad_norm < 23.8f && w[elems - 1] > 0.4f && w[elems - 1] < 0.6f;
    return right ? 0 : 1;
}
