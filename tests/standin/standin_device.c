/* SPDX-License-Identifier: MIT */
/* Devices, errors and memory of the stand-in. */
#include "standin.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const uint64_t TOTAL_BYTES = (uint64_t)16 << 30, PAGE_BYTES = 2 << 20;
enum { FRESH_BYTES = 1 << 16, FRESH = 0xcb }; /* new memory holds anything */

_Noreturn void standin_die(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fputs("stand-in for CUDA and NCCL: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    abort();
}

/* ---- Errors ---- */

static _Thread_local int current;
static _Thread_local cudaError_t last_error;
static _Thread_local bool in_host_function;
static atomic_int broken[STANDIN_DEVICES];
static atomic_bool used[STANDIN_DEVICES]; /* has a primary context */
static _Atomic pid_t owner;
static atomic_int n_planned; /* devices that a test has asked an error of */

void standin_in_host_function(bool on) { in_host_function = on; }
int standin_current(void) { return current; }
void standin_break(int device, cudaError_t error) { atomic_store(&broken[device], (int)error); }
bool standin_is_broken(int device) { return atomic_load(&broken[device]) != cudaSuccess; }

cudaError_t standin_return(cudaError_t error)
{
    if (error != cudaSuccess) last_error = error;
    return error;
}

/* A host function must not make any call (cudaLaunchHostFunc). A forked process has the parent's context and cannot use
 * it. */
cudaError_t standin_enter(void)
{
    pid_t nobody = 0, me = getpid();
    if (in_host_function) return cudaErrorNotPermitted;
    if (!atomic_compare_exchange_strong(&owner, &nobody, me) && nobody != me) return cudaErrorInitializationError;
    return (cudaError_t)atomic_load(&broken[current]);
}

bool standin_may_give_back(cudaError_t entered)
{
    return entered != cudaErrorNotPermitted && entered != cudaErrorInitializationError;
}

/* ---- Errors that a test asks for ---- */

typedef struct plan {
    pthread_mutex_t lock;
    uint64_t n, n_seen; /* n 0: none */
    cudaError_t error;
    bool for_good;
    const char *last, *failed;
    uint32_t n_last; /* calls of `last` in a row */
} plan;

static plan plans[STANDIN_DEVICES];
static pthread_once_t plans_once = PTHREAD_ONCE_INIT;
atomic_int standin_live[STANDIN_DEVICES];

static void make_plans(void)
{
    for (int i = 0; i < STANDIN_DEVICES; i++) pthread_mutex_init(&plans[i].lock, NULL);
}

void standin_fail(int device, uint64_t n, cudaError_t error, bool for_good)
{
    pthread_once(&plans_once, make_plans);
    plan *p = &plans[device];
    atomic_fetch_add(&n_planned, 1);
    pthread_mutex_lock(&p->lock);
    p->n = n, p->n_seen = 0;
    p->error = error, p->for_good = for_good;
    p->last = p->failed = NULL;
    pthread_mutex_unlock(&p->lock);
    standin_break(device, cudaSuccess);
}

const char *standin_failed(int device)
{
    plan *p = &plans[device];
    pthread_mutex_lock(&p->lock);
    const char *failed = p->failed;
    pthread_mutex_unlock(&p->lock);
    return failed;
}

static cudaError_t planned(const char *call)
{
    plan *p = &plans[current];
    cudaError_t error = cudaSuccess;
    if (atomic_load(&n_planned) == 0) return cudaSuccess;
    pthread_mutex_lock(&p->lock);
    p->n_last = p->last == call ? p->n_last + 1 : 0;
    p->last = call;
    if (p->n > 0 && p->failed == NULL && p->n_last < 3 && ++p->n_seen == p->n) {
        p->failed = call;
        error = p->error;
    }
    bool breaks = error != cudaSuccess && p->for_good;
    pthread_mutex_unlock(&p->lock);
    if (breaks) standin_break(current, error);
    return error;
}

cudaError_t standin_begin(const char *call)
{
    atomic_store(&used[current], true);
    cudaError_t error = standin_enter();
    return error == cudaSuccess ? planned(call) : error;
}

cudaError_t cudaGetLastError(void)
{
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError(void) { return last_error; }

const char *cudaGetErrorName(cudaError_t error)
{
    switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInitializationError: return "cudaErrorInitializationError";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorInvalidResourceHandle: return "cudaErrorInvalidResourceHandle";
    case cudaErrorIllegalAddress: return "cudaErrorIllegalAddress";
    case cudaErrorLaunchFailure: return "cudaErrorLaunchFailure";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorNotPermitted: return "cudaErrorNotPermitted";
    case cudaErrorStreamCaptureUnsupported: return "cudaErrorStreamCaptureUnsupported";
    case cudaErrorStreamCaptureInvalidated: return "cudaErrorStreamCaptureInvalidated";
    case cudaErrorStreamCaptureUnjoined: return "cudaErrorStreamCaptureUnjoined";
    case cudaErrorStreamCaptureIsolation: return "cudaErrorStreamCaptureIsolation";
    case cudaErrorStreamCaptureImplicit: return "cudaErrorStreamCaptureImplicit";
    case cudaErrorCapturedEvent: return "cudaErrorCapturedEvent";
    default: return "cudaErrorUnknown";
    }
}

const char *cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error) + strlen("cuda"); }

/* ---- Devices ---- */

static pthread_once_t devices_once = PTHREAD_ONCE_INIT;
static int n_devices = STANDIN_DEVICES; /* or STANDIN_GPUS of the environment, if that is less */

static void read_devices(void)
{
    const char *given = getenv("STANDIN_GPUS");
    if (given != NULL && atoi(given) > 0 && atoi(given) < STANDIN_DEVICES) n_devices = atoi(given);
}

static bool is_device(int device)
{
    pthread_once(&devices_once, read_devices);
    return device >= 0 && device < n_devices;
}

cudaError_t cudaGetDeviceCount(int *count)
{
    pthread_once(&devices_once, read_devices);
    *count = n_devices;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device)
{
    *device = current;
    return standin_return(in_host_function ? cudaErrorNotPermitted : cudaSuccess);
}

cudaError_t cudaSetDevice(int device)
{
    if (in_host_function) return standin_return(cudaErrorNotPermitted);
    if (!is_device(device)) return standin_return(cudaErrorInvalidDevice);
    current = device;
    atomic_store(&used[device], true); /* since CUDA 12 */
    return standin_return((cudaError_t)atomic_load(&broken[device]));
}

/* Of the driver, which lib/cuda looks for in the program. */
int cuDeviceGet(int *device, int ordinal);
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active);

int cuDeviceGet(int *device, int ordinal)
{
    *device = ordinal;
    return is_device(ordinal) ? 0 : 101; /* CUDA_ERROR_INVALID_DEVICE */
}

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active)
{
    *flags = 0;
    *active = atomic_load(&used[device]);
    return 0;
}

/* Needs no context. */
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device)
{
    cudaError_t error = standin_enter();
    if (error == cudaSuccess) error = planned(__func__);
    if (error != cudaSuccess) return standin_return(error);
    if (!is_device(device)) return standin_return(cudaErrorInvalidDevice);
    *value = attribute == cudaDevAttrComputeCapabilityMajor ? 9 : attribute == cudaDevAttrMultiProcessorCount ? 4 : 0;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    STANDIN_BEGIN();
    *least = 0, *greatest = -5;
    return cudaSuccess;
}

/* ---- Memory ---- */

typedef struct block {
    char *base;
    uint64_t bytes;
    int device; /* -1: page-locked */
    struct block *next;
} block;

static pthread_mutex_t memory_lock = PTHREAD_MUTEX_INITIALIZER; /* over the blocks */
static block *blocks;

static uint64_t taken_bytes(int device)
{
    uint64_t bytes = 0;
    for (const block *b = blocks; b != NULL; b = b->next)
        if (b->device == device) bytes += (b->bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
    return bytes;
}

static cudaError_t allocate(void **out_ptr, size_t bytes, int device)
{
    STANDIN_BEGIN();
    cudaError_t error = standin_may_call();
    if (error != cudaSuccess) return standin_return(error);
    *out_ptr = NULL;
    if (bytes == 0) return cudaSuccess;
    block *b = calloc(1, sizeof *b);
    pthread_mutex_lock(&memory_lock);
    if (b != NULL && bytes <= TOTAL_BYTES && (device < 0 || taken_bytes(device) + bytes <= TOTAL_BYTES))
        b->base = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    if (b != NULL && b->base != NULL) {
        b->bytes = bytes, b->device = device, b->next = blocks;
        blocks = b;
    }
    pthread_mutex_unlock(&memory_lock);
    if (b == NULL || b->base == NULL) {
        free(b);
        return standin_return(cudaErrorMemoryAllocation);
    }
    if (device >= 0) atomic_fetch_add(&standin_live[device], 1);
    memset(b->base, FRESH, bytes < FRESH_BYTES ? bytes : FRESH_BYTES);
    *out_ptr = b->base;
    return cudaSuccess;
}

static block *take_out(const void *ptr, bool locked)
{
    pthread_mutex_lock(&memory_lock);
    block **link = &blocks, *found = NULL;
    while (*link != NULL && ((*link)->base != ptr || ((*link)->device < 0) != locked)) link = &(*link)->next;
    if ((found = *link) != NULL) *link = found->next;
    pthread_mutex_unlock(&memory_lock);
    return found;
}

/* CUDA's frees wait for what runs on the device; the guide counts them among what synchronises implicitly. */
static cudaError_t release(void *ptr, bool locked)
{
    cudaError_t entered = standin_enter(), error = standin_may_call();
    if (!standin_may_give_back(entered)) return standin_return(entered);
    if (error != cudaSuccess || ptr == NULL) return standin_return(error == cudaSuccess ? entered : error);
    block *b = take_out(ptr, locked);
    if (b == NULL) return standin_return(cudaErrorInvalidValue);
    standin_wait_device(b->device < 0 ? current : b->device);
    if (b->device >= 0) atomic_fetch_sub(&standin_live[b->device], 1);
    free(b->base);
    free(b);
    return standin_return(entered);
}

cudaError_t cudaMalloc(void **ptr, size_t bytes) { return allocate(ptr, bytes, current); }
cudaError_t cudaFree(void *ptr) { return release(ptr, false); }
cudaError_t cudaFreeHost(void *ptr) { return release(ptr, true); }

cudaError_t cudaHostAlloc(void **ptr, size_t bytes, unsigned flags)
{
    (void)flags;
    return allocate(ptr, bytes, -1);
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes)
{
    STANDIN_BEGIN();
    pthread_mutex_lock(&memory_lock);
    *free_bytes = TOTAL_BYTES - taken_bytes(current);
    pthread_mutex_unlock(&memory_lock);
    *total_bytes = TOTAL_BYTES;
    return cudaSuccess;
}

bool standin_is_known(const void *ptr, uint64_t bytes)
{
    bool known = false;
    const char *first = ptr;
    pthread_mutex_lock(&memory_lock);
    for (const block *b = blocks; b != NULL && !known; b = b->next)
        known = first >= b->base && first < b->base + b->bytes && bytes <= (uint64_t)(b->base + b->bytes - first);
    pthread_mutex_unlock(&memory_lock);
    return known;
}
