/* SPDX-License-Identifier: MIT */
/* A call that must succeed: if not, the test ends with the call and what it said. */
#ifndef FSDP_TESTS_OK_H
#define FSDP_TESTS_OK_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "fsdp/status.h"

#define OK(call)                                                             \
    do {                                                                     \
        if ((call) != FSDP_OK) fail_msg("%s: %s", #call, fsdp_last_error()); \
    } while (0)

#endif
