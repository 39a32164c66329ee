/* SPDX-License-Identifier: MIT */
/* Sleeping until a word changes, in this process or between two. */
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "host_room.h"

/* FUTEX_WAIT_BITSET, since its deadline is absolute, on the monotonic clock. */
bool fsdp__futex_wait(_Atomic uint32_t *word, uint32_t seen, uint64_t deadline_ns, bool between_processes)
{
    const struct timespec deadline = fsdp__timespec(deadline_ns);
    int op = FUTEX_WAIT_BITSET | (between_processes ? 0 : FUTEX_PRIVATE_FLAG);
    long result = syscall(SYS_futex, (void *)word, op, seen, deadline_ns == UINT64_MAX ? NULL : &deadline, NULL,
                          FUTEX_BITSET_MATCH_ANY);
    return result == 0 || errno != ETIMEDOUT;
}

void fsdp__futex_wake_all(_Atomic uint32_t *word, bool between_processes)
{
    syscall(SYS_futex, (void *)word, FUTEX_WAKE | (between_processes ? 0 : FUTEX_PRIVATE_FLAG), INT_MAX, NULL, NULL, 0);
}
