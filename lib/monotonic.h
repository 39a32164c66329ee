/* SPDX-License-Identifier: MIT */
/* The monotonic clock in ns, and waiting for a condition until a moment of it. */
#ifndef FSDP_LIB_MONOTONIC_H
#define FSDP_LIB_MONOTONIC_H

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <time.h>

static inline uint64_t fsdp__now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* now + ns, at most the end of time */
static inline uint64_t fsdp__after_ns(uint64_t ns)
{
    uint64_t then;
    return __builtin_add_overflow(fsdp__now_ns(), ns, &then) ? UINT64_MAX : then;
}

/* Of a moment or of a time that something takes. */
static inline struct timespec fsdp__timespec(uint64_t ns)
{
    const struct timespec t = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
    return t;
}

static inline void fsdp__cond_init(pthread_cond_t *cond)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(cond, &attributes);
    pthread_condattr_destroy(&attributes);
}

/* Wait until deadline_ns at most; false once it has passed. */
static inline bool fsdp__cond_until(pthread_cond_t *cond, pthread_mutex_t *lock, uint64_t deadline_ns)
{
    const struct timespec deadline = fsdp__timespec(deadline_ns);
    return pthread_cond_timedwait(cond, lock, &deadline) != ETIMEDOUT;
}

#endif
