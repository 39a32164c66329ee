/* SPDX-License-Identifier: MIT */
/** @file status.h  What a call answers, and the sentence behind it. */
#ifndef FSDP_STATUS_H
#define FSDP_STATUS_H

#if defined(_WIN32)
#error "libfsdp runs on Linux"
#endif

#define FSDP_API __attribute__((visibility("default")))
#define FSDP_NODISCARD __attribute__((warn_unused_result))

#ifdef __cplusplus
extern "C" {
#endif

/** Every call that can fail returns one of these. Codes are grouped by what is broken now, so that a caller
 *  knows what to rebuild; values never change. docs/errors.md lists each with its causes. */
typedef enum fsdp_status {
    FSDP_OK = 0,

    /* This call. It was refused before it did anything; nothing has changed. */
    FSDP_ERR_ARG = -1,         /**< an argument is wrong in itself: null, range, dtype, shape, struct size */
    FSDP_ERR_STATE = -2,       /**< right call, wrong moment: unmatched hook, sealed model, open unit */
    FSDP_ERR_UNSUPPORTED = -3, /**< this build, backend or policy cannot do it */
    FSDP_ERR_TIMEOUT = -4,     /**< not finished within the time given; nothing is lost, ask again */

    /* Memory. Nothing has changed; give something back, or ask for less, and call again. */
    FSDP_ERR_NO_MEMORY = -10,      /**< device memory: pool, budget or device is full */
    FSDP_ERR_NO_HOST_MEMORY = -11, /**< the host allocator returned NULL */

    /* Between ranks. Where fsdp_context_check is still FSDP_OK (seal and other host calls that differ between ranks)
     * nothing was done and nothing is lost; else the communicator is dead: destroy the context on every rank. */
    FSDP_ERR_MISMATCH = -20,  /**< ranks called different things; the text names both */
    FSDP_ERR_RANK_LOST = -21, /**< a rank did not come within the deadline */
    FSDP_ERR_ABORTED = -22,   /**< fsdp_context_abort here or on another rank, or one that could not open its context */

    /* This context. */
    FSDP_ERR_DEVICE = -30, /**< an operation failed on the device: every later call returns this, as fsdp_context_check does;
                                or a thread or stream could not be made: then nothing has changed */

    /* A file. */
    FSDP_ERR_IO = -40 /**< open, write or close failed; the text has errno's words */
} fsdp_status;

/** The code's own name, "FSDP_ERR_STATE"; never NULL ("FSDP_ERR_?" for a number that is no code). */
FSDP_API const char *fsdp_status_name(fsdp_status status);

/** The sentence of the last call on this thread that did not return FSDP_OK: which unit, which sizes, which rank,
 *  what to do. Owned by the library, valid until the next failing call on this thread; "" if none failed yet. */
FSDP_API const char *fsdp_last_error(void);

#ifdef __cplusplus
}
#endif
#endif
