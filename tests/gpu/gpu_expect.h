/* SPDX-License-Identifier: MIT */
/* Asserts of a rank's process: they end its function, which returns bool, with a sentence that processes_run brings home. */
#ifndef FSDP_TESTS_GPU_EXPECT_H
#define FSDP_TESTS_GPU_EXPECT_H

#include "fsdp/status.h"
#include "processes.h"

#define EXPECT(condition)                                                                                 \
    do {                                                                                                  \
        if (condition) break;                                                                             \
        processes_complain(__FILE__, __LINE__, "%s is not true (%.700s)", #condition, fsdp_last_error()); \
        return false;                                                                                     \
    } while (0)
#define MUST(call) EXPECT((call) == FSDP_OK)

#endif
