/* SPDX-License-Identifier: MIT */
/* A file that nobody sees before it is whole: it is written beside its path, under another name, and renamed at the end. */
#ifndef FSDP_LIB_NEW_FILE_H
#define FSDP_LIB_NEW_FILE_H

#include <signal.h>
#include <stdbool.h>
#include <stddef.h>

#include "fsdp/status.h"

enum { FSDP__NEW_FILE_MORE = 16 }; /* bytes behind the path in the other name, its end included */

typedef struct fsdp__new_file {
    const char *path;
    char *temporary;
    int file, reason; /* reason: the first errno; 0: none */
} fsdp__new_file;

/* temporary is the caller's and has `bytes`, at least strlen(path) + FSDP__NEW_FILE_MORE. IO also if something is there that is
 * no regular file. */
fsdp_status fsdp__new_file_open(fsdp__new_file *f, const char *path, char *temporary, size_t bytes);
void fsdp__new_file_write(fsdp__new_file *f, const char *data, size_t n);
/* IO if anything went wrong since it was opened: what was there before is there still. */
fsdp_status fsdp__new_file_close(fsdp__new_file *f);

/* Around writes of this thread to any file: beyond the limit on file size (ulimit -f) they fail with EFBIG, and only that.
 * Without it the kernel sends SIGXFSZ too, which ends the program. */
typedef struct fsdp__write_guard {
    sigset_t before;
    bool was_pending;
} fsdp__write_guard;

void fsdp__write_guard_begin(fsdp__write_guard *g);
void fsdp__write_guard_end(const fsdp__write_guard *g);

#endif
