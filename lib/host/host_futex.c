/* SPDX-License-Identifier: MIT */
/* Time, and sleeping until a word changes, in this process or between two. */
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "host_room.h"

uint64_t fsdp__host_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

uint64_t fsdp__host_after(uint64_t ns)
{
    uint64_t then;
    return __builtin_add_overflow(fsdp__host_now_ns(), ns, &then) ? UINT64_MAX : then;
}

void fsdp__host_cond_init(pthread_cond_t *cond)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(cond, &attributes);
    pthread_condattr_destroy(&attributes);
}

bool fsdp__host_cond_until(pthread_cond_t *cond, pthread_mutex_t *lock, uint64_t deadline_ns)
{
    struct timespec deadline = {(time_t)(deadline_ns / 1000000000u), (long)(deadline_ns % 1000000000u)};
    return pthread_cond_timedwait(cond, lock, &deadline) != ETIMEDOUT;
}

/* FUTEX_WAIT_BITSET, since its deadline is absolute, on the monotonic clock. */
bool fsdp__futex_wait(_Atomic uint32_t *word, uint32_t seen, uint64_t deadline_ns, bool between_processes)
{
    struct timespec deadline = {(time_t)(deadline_ns / 1000000000u), (long)(deadline_ns % 1000000000u)};
    int op = FUTEX_WAIT_BITSET | (between_processes ? 0 : FUTEX_PRIVATE_FLAG);
    long result = syscall(SYS_futex, (void *)word, op, seen, deadline_ns == UINT64_MAX ? NULL : &deadline, NULL,
                          FUTEX_BITSET_MATCH_ANY);
    return result == 0 || errno != ETIMEDOUT;
}

void fsdp__futex_wake_all(_Atomic uint32_t *word, bool between_processes)
{
    syscall(SYS_futex, (void *)word, FUTEX_WAKE | (between_processes ? 0 : FUTEX_PRIVATE_FLAG), INT_MAX, NULL, NULL, 0);
}
