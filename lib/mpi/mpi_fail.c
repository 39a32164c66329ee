/* SPDX-License-Identifier: MIT */
/* For the shared library only: where its copies of libfsdp's insides leave their sentences. A thread has one last error, and
 * libfsdp.so keeps it. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "check.h"
#include "fsdp/backend.h"

fsdp_status fsdp__fail(fsdp_status status, const char *format, ...)
{
    char text[FSDP__ERROR_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return fsdp_backend_fail(status, "%s", text);
}

fsdp_status fsdp__read_config(const char *what, void *defaults, size_t known_bytes, const void *config,
                              size_t min_bytes)
{
    const unsigned char *given = config;
    size_t size;
    memcpy(&size, config, sizeof size);
    if (!fsdp__is_size(size, min_bytes)) return fsdp__wrong_size(what, size, known_bytes);
    for (size_t i = known_bytes; i < size; i++)
        if (given[i] != 0)
            return fsdp__fail(FSDP_ERR_ARG, "%s sets a field at byte %zu that this version (%zu bytes) does not know",
                              what, i, known_bytes);
    memcpy(defaults, config, size < known_bytes ? size : known_bytes);
    memcpy(defaults, &known_bytes, sizeof known_bytes);
    return FSDP_OK;
}
