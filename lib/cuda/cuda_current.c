/* SPDX-License-Identifier: MIT */
/* The current device of the caller's thread: borrowed for a call. */
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

#include "cuda_backend.h"

/* Of CUDA's driver, which this library is not linked with: the runtime has loaded it. Its types are int, unsigned, enum. */
typedef int (*device_get_fn)(int *device, int ordinal);
typedef int (*context_state_fn)(int device, unsigned *flags, int *active);

static pthread_once_t once = PTHREAD_ONCE_INIT;
static device_get_fn device_get;
static context_state_fn context_state;

static void find_driver(void)
{
    void *loaded = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD); /* and stays, as the runtime's does */
    void *get = dlsym(RTLD_DEFAULT, "cuDeviceGet"), *state = dlsym(RTLD_DEFAULT, "cuDevicePrimaryCtxGetState");
    if (get == NULL && loaded != NULL) get = dlsym(loaded, "cuDeviceGet");
    if (state == NULL && loaded != NULL) state = dlsym(loaded, "cuDevicePrimaryCtxGetState");
    if (get == NULL || state == NULL) return;
    memcpy(&device_get, &get, sizeof device_get);
    memcpy(&context_state, &state, sizeof context_state);
}

bool fsdp__cuda_is_used(int ordinal)
{
    int device = 0, active = 1;
    unsigned flags = 0;
    pthread_once(&once, find_driver);
    if (context_state == NULL || device_get(&device, ordinal) != 0) return true;
    return context_state(device, &flags, &active) != 0 || active != 0;
}

int fsdp__cuda_enter(const fsdp__cuda_device *dev)
{
    int current = -1;
    if (cudaGetDevice(&current) != cudaSuccess) {
        (void)cudaGetLastError();
        current = -1;
    }
    if (current == dev->ordinal) return -1;
    if (cudaSetDevice(dev->ordinal) != cudaSuccess) (void)cudaGetLastError(); /* the call that follows fails with it */
    return current;
}

/* cudaSetDevice makes a context where there is none, of half a gigabyte: GPU 0 would get one of each rank of the machine. */
void fsdp__cuda_leave(int before)
{
    if (before < 0 || !fsdp__cuda_is_used(before)) return;
    if (cudaSetDevice(before) != cudaSuccess) (void)cudaGetLastError();
}
