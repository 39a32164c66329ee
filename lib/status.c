/* SPDX-License-Identifier: MIT */
/* Code names, the thread's last error, and reading and writing of sized structs. */
#include "fsdp/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "check.h"
#include "fsdp/backend.h"

/* The one piece of state outside a context: per thread, so that no two callers see each other's sentence. Long enough
 * for a block table. */
static _Thread_local char last_error[FSDP__ERROR_BYTES];

const char *fsdp_status_name(fsdp_status status)
{
    switch (status) {
    case FSDP_OK: return "FSDP_OK";
    case FSDP_ERR_ARG: return "FSDP_ERR_ARG";
    case FSDP_ERR_STATE: return "FSDP_ERR_STATE";
    case FSDP_ERR_UNSUPPORTED: return "FSDP_ERR_UNSUPPORTED";
    case FSDP_ERR_TIMEOUT: return "FSDP_ERR_TIMEOUT";
    case FSDP_ERR_NO_MEMORY: return "FSDP_ERR_NO_MEMORY";
    case FSDP_ERR_NO_HOST_MEMORY: return "FSDP_ERR_NO_HOST_MEMORY";
    case FSDP_ERR_MISMATCH: return "FSDP_ERR_MISMATCH";
    case FSDP_ERR_RANK_LOST: return "FSDP_ERR_RANK_LOST";
    case FSDP_ERR_ABORTED: return "FSDP_ERR_ABORTED";
    case FSDP_ERR_DEVICE: return "FSDP_ERR_DEVICE";
    case FSDP_ERR_IO: return "FSDP_ERR_IO";
    }
    return "FSDP_ERR_?";
}

const char *fsdp_last_error(void) { return last_error; }

static fsdp_status fail_va(fsdp_status status, const char *format, va_list args)
{
    /* The new sentence may quote the old one: format beside it, then replace. */
    char text[sizeof last_error];
    vsnprintf(text, sizeof text, format, args);
    memcpy(last_error, text, strlen(text) + 1);
    return status;
}

fsdp_status fsdp__fail(fsdp_status status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fail_va(status, format, args);
    va_end(args);
    return status;
}

fsdp_status fsdp_backend_fail(fsdp_status status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fail_va(status, format, args);
    va_end(args);
    return status;
}

fsdp_status fsdp__read_config(const char *what, void *defaults, size_t known_bytes, const void *config,
                              size_t min_bytes)
{
    size_t size;
    memcpy(&size, config, sizeof size);
    if (!fsdp__is_size(size, min_bytes)) return fsdp__wrong_size(what, size, known_bytes);
    for (size_t i = known_bytes; i < size; i++) {
        if (((const unsigned char *)config)[i] != 0)
            return fsdp__fail(FSDP_ERR_ARG, "%s sets a field at byte %zu that this version (%zu bytes) does not know",
                              what, i, known_bytes);
    }
    memcpy(defaults, config, size < known_bytes ? size : known_bytes);
    memcpy(defaults, &known_bytes, sizeof known_bytes);
    return FSDP_OK;
}

fsdp_status fsdp__write_result(const char *what, void *out, const void *result, size_t known_bytes, size_t min_bytes)
{
    size_t size;
    memcpy(&size, out, sizeof size);
    if (!fsdp__is_size(size, min_bytes)) return fsdp__wrong_size(what, size, known_bytes);
    memcpy((char *)out + sizeof size, (const char *)result + sizeof size,
           (size < known_bytes ? size : known_bytes) - sizeof size);
    return FSDP_OK;
}
