/* SPDX-License-Identifier: MIT */
/* jemalloc's own function, looked up in what the library brought along: linked directly jemalloc would replace malloc. */
#ifndef FSDP_TESTS_MALLCTL_H
#define FSDP_TESTS_MALLCTL_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <dlfcn.h>
#include <stdbool.h>
#include <string.h>
#include <unistd.h>

static int (*control)(const char *, void *, size_t *, void *, size_t);

/* First of all. False: it is not there. */
static inline bool find_control(void)
{
    void *symbol = dlsym(RTLD_DEFAULT, "mallctl");
    memcpy(&control, &symbol, sizeof control);
    return symbol != NULL;
}

static inline unsigned arena_of(void *piece)
{
    unsigned arena;
    size_t bytes = sizeof arena;
    assert_int_equal(control("arenas.lookup", &arena, &bytes, &piece, sizeof piece), 0);
    return arena;
}

static inline int deadline(void **unused)
{
    (void)unused;
    alarm(100);
    return 0;
}

#endif
