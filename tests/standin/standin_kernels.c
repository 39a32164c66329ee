/* SPDX-License-Identifier: MIT */
/* What lib/cuda's and the tests' .cu files export, on the CPU: the arithmetic is the host backend's, which the GPU's
 * kernels equal but for the order of SQUARE_SUM's sum. */
#include "standin.h"

#include "../gpu/gpu_kernels.h"
#include "cuda/cuda_kernels.h"
#include "host/host.h"

#include <time.h>

static void nap(uint64_t ns)
{
    const struct timespec moment = {0, (long)(ns < 200000 ? ns : 200000)};
    nanosleep(&moment, NULL);
}

static void run_op(void *arg) { fsdp__host_kernel(arg); }

static const standin_kind op_kind = {run_op, NULL, sizeof(fsdp_device_op), false, false};

cudaError_t fsdp__cuda_load_kernels(void) { return standin_enter(); }
cudaError_t fsdp__cuda_cast(cudaStream_t s, const fsdp_device_op *op) { return standin_launch(s, &op_kind, op); }
cudaError_t fsdp__cuda_add(cudaStream_t s, const fsdp_device_op *op) { return standin_launch(s, &op_kind, op); }
cudaError_t fsdp__cuda_step_input(cudaStream_t s, const fsdp_device_op *op) { return standin_launch(s, &op_kind, op); }
cudaError_t fsdp__cuda_step_result(cudaStream_t s, const fsdp_device_op *op) { return standin_launch(s, &op_kind, op); }

cudaError_t fsdp__cuda_adamw(cudaStream_t s, const fsdp_device_op *op, int n_processors)
{
    (void)n_processors;
    return standin_launch(s, &op_kind, op);
}

/* The slot is written as the kernel does, so that two at once are seen: by ThreadSanitizer, and by what is left
 * there. */
typedef struct sum_arg {
    fsdp_device_op op;
    unsigned *slot;
} sum_arg;

static void run_square_sum(void *arg)
{
    const sum_arg *sum = arg;
    if (sum->slot[0] != 0) standin_die("a slot of SQUARE_SUM is in use, or was never zeroed");
    sum->slot[0] = 1;
    nap(1000); /* long enough to meet another */
    fsdp__host_kernel(&sum->op);
    sum->slot[0] = 0;
}

static const standin_kind square_sum_kind = {run_square_sum, NULL, sizeof(sum_arg), false, false};

cudaError_t fsdp__cuda_square_sum(cudaStream_t s, const fsdp_device_op *op, char *sum_slot)
{
    const sum_arg sum = {*op, (unsigned *)(void *)sum_slot};
    return standin_launch(s, &square_sum_kind, &sum);
}

typedef struct delay_arg {
    uint64_t ns;
    const uint32_t *stop;
    int device;
} delay_arg;

static void run_delay(void *arg)
{
    const delay_arg *delay = arg;
    uint64_t end_ns = fsdp__after_ns(delay->ns), now_ns;
    while ((now_ns = fsdp__now_ns()) < end_ns && __atomic_load_n(delay->stop, __ATOMIC_ACQUIRE) == 0 &&
           !standin_is_broken(delay->device))
        nap(end_ns - now_ns);
}

static const standin_kind delay_kind = {run_delay, NULL, sizeof(delay_arg), false, false};

cudaError_t fsdp__cuda_delay(cudaStream_t s, uint64_t ns, const uint32_t *stop)
{
    const delay_arg delay = {ns, stop, standin_current()};
    return standin_launch(s, &delay_kind, &delay);
}

/* ---- The tests' own ---- */

cudaError_t gpu_load_kernels(void) { return standin_enter(); }

typedef struct hold_arg {
    const uint32_t *word;
    int device;
} hold_arg;

static void run_hold(void *arg)
{
    const hold_arg *hold = arg;
    while (__atomic_load_n(hold->word, __ATOMIC_ACQUIRE) == 0 && !standin_is_broken(hold->device)) nap(20000);
}

static const standin_kind hold_kind = {run_hold, NULL, sizeof(hold_arg), false, false};

cudaError_t gpu_hold(cudaStream_t s, const uint32_t *word)
{
    const hold_arg hold = {word, standin_current()};
    return standin_launch(s, &hold_kind, &hold);
}

static void run_store_nowhere(void *arg) { standin_break(*(int *)arg, cudaErrorIllegalAddress); }

static const standin_kind store_kind = {run_store_nowhere, NULL, sizeof(int), false, false};

cudaError_t gpu_store_nowhere(cudaStream_t s)
{
    const int device = standin_current();
    return standin_launch(s, &store_kind, &device);
}
