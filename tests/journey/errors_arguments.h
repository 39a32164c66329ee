/* SPDX-License-Identifier: MIT */
/* Wrong arguments: what the files about them share. All calls are made on one live program, whose steps come out as if none
 * of them had been made. */
#ifndef ERRORS_ARGUMENTS_H
#define ERRORS_ARGUMENTS_H

#include <string.h>

#include "errors.h"

#define ARG(call, fragment) REFUSED(call, FSDP_ERR_ARG, fragment)

/* One rank on the host backend, sealed and filled. */
extern rank program;
int open_program(void **state);
int close_program(void **state);
/* The tests once more, in one program; its next step comes out as in a program without them. */
void assert_program_unharmed(void **state, void (*const *tests)(void **), size_t n);

/* ---- A struct whose size is wrong ---- */

enum { STRUCT_BYTES = 512 };

/* What a caller of another version has: the struct, and zeros or something behind it. */
typedef union sized {
    size_t size;
    _Alignas(16) unsigned char bytes[STRUCT_BYTES];
} sized;

static inline const void *sized_as(sized *s, const void *right, size_t bytes, size_t size, unsigned char behind)
{
    memset(s->bytes, 0, sizeof s->bytes);
    memcpy(s->bytes, right, bytes);
    s->bytes[bytes] = behind;
    s->size = size;
    return s->bytes;
}

/* call(config) with sizes that are too small, that know more than we do, and that are nonsense. */
#define CONFIG_SIZES(call, type, init, name)                                  \
    do {                                                                      \
        const type right_ = init;                                             \
        sized s_;                                                             \
        const type *config;                                                   \
        config = sized_as(&s_, &right_, sizeof right_, 0, 0);                 \
        ARG(call, name ".size is 0, expected");                               \
        config = sized_as(&s_, &right_, sizeof right_, sizeof right_ - 1, 0); \
        ARG(call, "start from " #init);                                       \
        config = sized_as(&s_, &right_, sizeof right_, SIZE_MAX, 0);          \
        ARG(call, name ".size is ");                                          \
        config = sized_as(&s_, &right_, sizeof right_, sizeof right_ + 8, 1); \
        ARG(call, "does not know");                                           \
        (void)config;                                                         \
    } while (0)

/* call(out), where out->size is too small. */
#define RESULT_SIZES(call, type, init, name)    \
    do {                                        \
        type result = init, *out = &result;     \
        result.size = 0;                        \
        ARG(call, name ".size is 0, expected"); \
        result.size = sizeof result - 8;        \
        ARG(call, name ".size is ");            \
        (void)out;                              \
    } while (0)

#endif
