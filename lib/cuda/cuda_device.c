/* SPDX-License-Identifier: MIT */
/* Opening a GPU, the first error, and the table. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "cuda_backend.h"
#include "hostmem.h"

enum {
    ALIGNMENT = 512,      /* cudaMalloc gives at least 256 */
    GRANULARITY = 2 << 20 /* the GPU's large page: what is taken in these is what the GPU gives */
};

/* ---- The first error ---- */

void fsdp__cuda_keep(fsdp__cuda_device *dev, fsdp_status status, const char *sentence)
{
    pthread_mutex_lock(&dev->lock);
    if (atomic_load(&dev->status) == FSDP_OK) {
        snprintf(dev->sentence, sizeof dev->sentence, "%s", sentence);
        atomic_store(&dev->status, status);
    }
    pthread_mutex_unlock(&dev->lock);
    if (dev->waiter != NULL) fsdp__cuda_waiter_wake(dev->waiter);
}

/* Errors of a call that capture does not allow, or of the capture: its owner's to handle. */
static bool is_of_capture(cudaError_t error)
{
    return error >= cudaErrorStreamCaptureUnsupported && error <= cudaErrorStreamCaptureWrongThread;
}

/* Does the context run nothing any more after it? Those after which CUDA's header says that the process must end; older ones do
 * not name the first two. Any other error is of one call. */
static bool breaks_the_context(cudaError_t error)
{
    switch ((int)error) {
    case 226: /* cudaErrorContained */
    case 721: /* cudaErrorTensorMemoryLeak */
    case cudaErrorMpsClientTerminated:
    case cudaErrorExternalDevice:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorContextIsDestroyed:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure: return true;
    default: return false;
    }
}

fsdp_status fsdp__cuda_fail(fsdp__cuda_device *dev, cudaError_t error, const char *what, ...)
{
    if (error == cudaSuccess) return FSDP_OK;
    (void)cudaGetLastError();
    char call[256], sentence[FSDP__SENTENCE_BYTES];
    va_list args;
    va_start(args, what);
    vsnprintf(call, sizeof call, what, args);
    va_end(args);
    snprintf(sentence, sizeof sentence, "rank %u: CUDA on GPU %d: %s (%s), found by %s", dev->rank, dev->ordinal,
             cudaGetErrorString(error), cudaGetErrorName(error), call);
    if (error == cudaErrorMemoryAllocation) return fsdp__fail(FSDP_ERR_NO_MEMORY, "%s", sentence);
    if (is_of_capture(error)) return fsdp__fail(FSDP_ERR_STATE, "%s", sentence);
    if (breaks_the_context(error)) atomic_store(&dev->broken, true);
    fsdp__cuda_keep(dev, FSDP_ERR_DEVICE, sentence);
    return fsdp__cuda_check(dev); /* the first, if there was one before */
}

/* The sentence is written before the status and never again, so it needs no lock. */
fsdp_status fsdp__cuda_check(void *dev_)
{
    fsdp__cuda_device *dev = dev_;
    fsdp_status status = (fsdp_status)atomic_load(&dev->status);
    return status == FSDP_OK ? FSDP_OK : fsdp__fail(status, "%s", dev->sentence);
}

/* Also from a host call, on a thread of CUDA's: it may call nothing of CUDA. What is enqueued runs on, but for delays. */
static void device_abort(void *dev_)
{
    fsdp__cuda_device *dev = dev_;
    char sentence[64];
    snprintf(sentence, sizeof sentence, "rank %u: the device was aborted", dev->rank);
    __atomic_store_n(dev->stop, 1, __ATOMIC_RELEASE);
    fsdp__cuda_keep(dev, FSDP_ERR_ABORTED, sentence);
}

/* ---- Opening ---- */

static fsdp_status no_gpu(int ordinal, cudaError_t error)
{
    (void)cudaGetLastError();
    const char *hint = "";
    if (error == cudaErrorInsufficientDriver) hint = ": no driver, or one that is older than this CUDA runtime needs";
    if (error == cudaErrorNoDevice) hint = ": CUDA_VISIBLE_DEVICES may hide them";
    if (error == cudaErrorInitializationError) hint = ": a process that was forked after CUDA was used cannot use it";
    if (ordinal >= 0)
        return fsdp__fail(FSDP_ERR_DEVICE, "GPU %d: %s (%s)%s", ordinal, cudaGetErrorString(error),
                          cudaGetErrorName(error), hint);
    return fsdp__fail(FSDP_ERR_DEVICE, "no GPU: %s (%s)%s", cudaGetErrorString(error), cudaGetErrorName(error), hint);
}

static fsdp_status choose(int wanted, int *out_ordinal)
{
    int n = 0, ordinal = wanted;
    cudaError_t error = cudaGetDeviceCount(&n);
    if (error != cudaSuccess) return no_gpu(-1, error);
    if (wanted >= n)
        return fsdp__fail(FSDP_ERR_DEVICE, "fsdp_cuda_config.device is %d: this process sees %d GPU%s, numbered from 0",
                          wanted, n, n == 1 ? "" : "s");
    if (wanted < 0 && (error = cudaGetDevice(&ordinal)) != cudaSuccess) return no_gpu(-1, error);
    int major = 0, minor = 0;
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, ordinal);
    if (error != cudaSuccess) return no_gpu(ordinal, error);
    if (major < 8)
        return fsdp__fail(FSDP_ERR_UNSUPPORTED,
                          "GPU %d has compute capability %d.%d; libfsdp needs 8.0 (Ampere) or later", ordinal, major,
                          minor);
    *out_ordinal = ordinal;
    return FSDP_OK;
}

static void warn(const fsdp__cuda_device *dev, const char *name, bool when, const char *text)
{
    if (!when || dev->log == NULL) return;
    char line[256];
    snprintf(line, sizeof line, "rank %u: %s is set in the environment: %s", dev->rank, name, text);
    dev->log(dev->log_arg, line);
}

static void warn_of_environment(const fsdp__cuda_device *dev)
{
    const char *blocking = getenv("CUDA_LAUNCH_BLOCKING"), *queues = getenv("CUDA_DEVICE_MAX_CONNECTIONS");
    warn(dev, "CUDA_LAUNCH_BLOCKING", blocking != NULL && atoi(blocking) != 0,
         "every call waits for the GPU, so nothing overlaps");
    warn(dev, "CUDA_DEVICE_MAX_CONNECTIONS=1", queues != NULL && atoi(queues) == 1,
         "all streams share one queue, so that they wait for each other");
}

/* Everything that CUDA would load at its first use is loaded here: later it could meet a kernel that spins until the host
 * goes on, or a capture. */
static fsdp_status warm_up(fsdp__cuda_device *dev)
{
    cudaStream_t stream;
    FSDP__CUDA_TRY(dev, cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    cudaError_t error = fsdp__cuda_load_kernels();
    if (error == cudaSuccess)
        error = cudaMemsetAsync(dev->sums, 0, (size_t)FSDP__CUDA_SUM_SLOTS * FSDP__CUDA_SUM_BYTES, stream);
    if (error == cudaSuccess)
        error = cudaMemcpyAsync(dev->sums, dev->sums + FSDP__CUDA_SUM_BYTES, 64, cudaMemcpyDefault, stream);
    if (error == cudaSuccess) error = cudaMemcpyAsync(dev->stop + 1, dev->sums, 4, cudaMemcpyDefault, stream);
    if (error == cudaSuccess) error = cudaMemcpyAsync(dev->sums, dev->stop + 1, 4, cudaMemcpyDefault, stream);
    if (error == cudaSuccess) error = fsdp__cuda_delay(stream, 0, dev->stop);
    if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
    fsdp_status status =
        fsdp__cuda_fail(dev, error, "loading the kernels (built for other GPUs? see CMAKE_CUDA_ARCHITECTURES)");
    (void)cudaStreamDestroy(stream);
    return status;
}

static fsdp_status open_parts(fsdp__cuda_device *dev)
{
    cudaError_t error = cudaFree(NULL); /* makes the primary context, where there is none */
    if (error != cudaSuccess) return no_gpu(dev->ordinal, error);
    FSDP__CUDA_TRY(dev, cudaDeviceGetAttribute(&dev->n_processors, cudaDevAttrMultiProcessorCount, dev->ordinal));
    void *stop = NULL, *sums = NULL;
    FSDP__CUDA_TRY(dev, cudaHostAlloc(&stop, 64, cudaHostAllocPortable | cudaHostAllocMapped));
    dev->stop = stop;
    memset(stop, 0, 64);
    FSDP__CUDA_TRY(dev, cudaMalloc(&sums, (size_t)FSDP__CUDA_SUM_SLOTS * FSDP__CUDA_SUM_BYTES));
    dev->sums = sums;
    FSDP_TRY(warm_up(dev));
    FSDP_TRY(fsdp__cuda_waiter_open(dev));
    return fsdp__cuda_spans_open(dev);
}

static void close_parts(fsdp__cuda_device *dev)
{
    fsdp__cuda_spans_close(dev);
    fsdp__cuda_waiter_close(dev);
    fsdp__cuda_moments_close(dev);
    if (atomic_load(&dev->stuck)) return;
    if (dev->sums != NULL && cudaFree(dev->sums) != cudaSuccess) (void)cudaGetLastError();
    if (dev->stop != NULL && cudaFreeHost(dev->stop) != cudaSuccess) (void)cudaGetLastError();
}

static fsdp_status device_open(const fsdp_device_args *args, void **out_dev, fsdp_device_caps *out_caps)
{
    fsdp__cuda_setup setup;
    int ordinal = -1;
    FSDP_TRY(fsdp__cuda_setup_read(args->backend_config, &setup));
    FSDP_TRY(choose(setup.config.device, &ordinal));
    fsdp__cuda_device *dev = fsdp__host_alloc(args->host, 1, sizeof *dev);
    if (dev == NULL)
        return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "CUDA device: no host memory for %zu bytes", sizeof *dev);
    dev->host = args->host;
    dev->ordinal = ordinal;
    fsdp__cuda_driver_find(&dev->driver);
    dev->debug = args->debug;
    dev->rank = setup.rank;
    dev->timeout_ns = args->timeout_ns;
    dev->spin_ns = setup.config.spin_ns;
    dev->jitter_ns = setup.config.jitter_ns;
    dev->jitter_seed = setup.config.jitter_seed;
    dev->log = args->log;
    dev->log_arg = args->log_arg;
    pthread_mutex_init(&dev->lock, NULL);
    pthread_mutex_init(&dev->moment_lock, NULL);
    fsdp__cuda_inside inside = fsdp__cuda_enter_relaxed(dev);
    fsdp_status status = open_parts(dev);
    if (status == FSDP_OK) {
        warn_of_environment(dev);
        *out_caps = (fsdp_device_caps){.size = sizeof *out_caps,
                                       .alignment = ALIGNMENT,
                                       .granularity = GRANULARITY,
                                       .has_data = true,
                                       .can_host_call = true,
                                       .can_capture = true,
                                       .native_kernels = true};
        *out_dev = dev;
    } else {
        close_parts(dev);
        pthread_mutex_destroy(&dev->moment_lock);
        pthread_mutex_destroy(&dev->lock);
        fsdp__host_free(args->host, dev, 1, sizeof *dev);
    }
    fsdp__cuda_leave_relaxed(inside);
    return status;
}

static void device_close(void *dev_)
{
    fsdp__cuda_device *dev = dev_;
    assert(dev->streams == NULL);
    fsdp__cuda_inside inside = fsdp__cuda_enter_relaxed(dev);
    close_parts(dev);
    fsdp__cuda_leave_relaxed(inside);
    pthread_mutex_destroy(&dev->moment_lock);
    pthread_mutex_destroy(&dev->lock);
    fsdp__host_free(dev->host, dev, 1, sizeof *dev);
}

static uint64_t now_ns(void *dev)
{
    (void)dev;
    return fsdp__now_ns();
}

static bool stream_is_capturing(void *stream) { return fsdp__cuda_is_capturing(((fsdp__cuda_stream *)stream)->native); }

const fsdp_device_ops fsdp__cuda_device_ops = {
    .size = sizeof fsdp__cuda_device_ops,
    .name = "cuda",
    .open = device_open,
    .close = device_close,
    .mem_alloc = fsdp__cuda_mem_alloc,
    .mem_free = fsdp__cuda_mem_free,
    .stream_create = fsdp__cuda_stream_create,
    .stream_destroy = fsdp__cuda_stream_destroy,
    .stream_drain = fsdp__cuda_stream_drain,
    .event_create = fsdp__cuda_event_create,
    .event_destroy = fsdp__cuda_event_destroy,
    .event_record = fsdp__cuda_event_record,
    .stream_wait = fsdp__cuda_stream_wait,
    .event_query = fsdp__cuda_event_query,
    .event_wait = fsdp__cuda_event_wait,
    .launch = fsdp__cuda_launch,
    .check = fsdp__cuda_check,
    .abort = device_abort,
    .now_ns = now_ns,
    .stream_is_capturing = stream_is_capturing,
};
