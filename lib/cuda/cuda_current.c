/* SPDX-License-Identifier: MIT */
/* The current device of the caller's thread: borrowed for a call. */
#include <dlfcn.h>
#include <string.h>

#include "cuda_backend.h"

/* In the program, or in what the runtime has loaded for itself. */
static void *find(void *loaded, const char *name)
{
    void *symbol = dlsym(RTLD_DEFAULT, name);
    return symbol == NULL && loaded != NULL ? dlsym(loaded, name) : symbol;
}

void fsdp__cuda_driver_find(fsdp__cuda_driver *driver)
{
    void *loaded = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD); /* by the runtime, which keeps it */
    void *get = find(loaded, "cuDeviceGet"), *state = find(loaded, "cuDevicePrimaryCtxGetState");
    *driver = (fsdp__cuda_driver){NULL, NULL};
    if (get != NULL && state != NULL) {
        memcpy(&driver->device_get, &get, sizeof get);
        memcpy(&driver->context_state, &state, sizeof state);
    }
    if (loaded != NULL) dlclose(loaded);
}

bool fsdp__cuda_is_used(const fsdp__cuda_driver *driver, int ordinal)
{
    int device = 0, active = 1;
    unsigned flags = 0;
    if (driver->context_state == NULL || driver->device_get(&device, ordinal) != 0) return true;
    return driver->context_state(device, &flags, &active) != 0 || active != 0;
}

/* cudaSetDevice makes a context where there is none, of half a gigabyte: if that device were made current again, GPU 0 would
 * get one of each rank of the machine. */
int fsdp__cuda_enter(const fsdp__cuda_device *dev)
{
    int current = -1;
    if (cudaGetDevice(&current) != cudaSuccess) {
        (void)cudaGetLastError();
        current = -1;
    }
    if (current == dev->ordinal) return -1;
    if (current >= 0 && !fsdp__cuda_is_used(&dev->driver, current)) current = -1;
    if (cudaSetDevice(dev->ordinal) != cudaSuccess) (void)cudaGetLastError(); /* the call that follows fails with it */
    return current;
}

void fsdp__cuda_leave(int before)
{
    if (before >= 0 && cudaSetDevice(before) != cudaSuccess) (void)cudaGetLastError();
}
