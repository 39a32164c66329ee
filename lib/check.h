/* SPDX-License-Identifier: MIT */
/* Errors and assertions. Who decides an error writes its sentence with fsdp__fail; everyone above passes it on. */
#ifndef FSDP_LIB_CHECK_H
#define FSDP_LIB_CHECK_H

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "fsdp/status.h"

enum { FSDP__ERROR_BYTES = 8192 }; /* of the longest sentence */

/* Set this thread's sentence, return status. Cold, as other functions that are seldom called: compilers put what leads only
 * there apart, so that a hook, whose code other code has driven out of the cache, has less to bring back. */
fsdp_status fsdp__fail(fsdp_status status, const char *format, ...) __attribute__((cold, format(printf, 2, 3)));

/* One of fsdp_status, and not FSDP_OK. A status that came from a peer may be anything. */
static inline bool fsdp__is_failure(int64_t status)
{
    if (status >= FSDP_OK || status < INT32_MIN) return false;
    return strcmp(fsdp_status_name((fsdp_status)status), "FSDP_ERR_?") != 0;
}

/* Its status, or RANK_LOST if that is none of ours. */
static inline fsdp_status fsdp__status_of_peer(int64_t status)
{
    return fsdp__is_failure(status) ? (fsdp_status)status : FSDP_ERR_RANK_LOST;
}

/* Return what expr returned unless that is FSDP_OK. */
#define FSDP_TRY(expr)                                            \
    do {                                                          \
        fsdp_status fsdp_try_status_ = (expr);                    \
        if (fsdp_try_status_ != FSDP_OK) return fsdp_try_status_; \
    } while (0)

/* A failure that somebody else reports already. */
#define FSDP_IGNORE(expr)                   \
    do {                                    \
        fsdp_status fsdp_ignored_ = (expr); \
        (void)fsdp_ignored_;                \
    } while (0)

/* Refuse a null argument by its name. */
#define FSDP_NEED(ptr)                                                                        \
    do {                                                                                      \
        if ((ptr) == NULL) return fsdp__fail(FSDP_ERR_ARG, "%s: %s is NULL", __func__, #ptr); \
    } while (0)

/* Refuse a struct by its size, naming the macro that it should have started from: its own name in capitals and _INIT. */
/* What a struct of ours that begins with its size may say: one above ours is a later version's. */
static inline bool fsdp__is_size(size_t size, size_t min_bytes) { return size >= min_bytes && size <= 65536; }

static inline fsdp_status fsdp__wrong_size(const char *what, size_t size, size_t expected)
{
    char macro[64];
    size_t n = 0;
    for (; what[n] != 0 && n + 1 < sizeof macro; n++)
        macro[n] = (char)(what[n] >= 'a' && what[n] <= 'z' ? what[n] - 'a' + 'A' : what[n]);
    macro[n] = 0;
    return fsdp__fail(FSDP_ERR_ARG, "%s.size is %zu, expected %zu: start from %s_INIT", what, size, expected, macro);
}

/* Copy a caller's config over `defaults` (a full struct of known_bytes). A size below min_bytes, or bytes beyond
 * known_bytes that are not zero, are refused: a newer caller must not be half understood. */
fsdp_status fsdp__read_config(const char *what, void *defaults, size_t known_bytes, const void *config,
                              size_t min_bytes);
/* Copy a result to the caller's struct, whose size field says how much of it he knows. */
fsdp_status fsdp__write_result(const char *what, void *out, const void *result, size_t known_bytes, size_t min_bytes);

#endif
