/* SPDX-License-Identifier: MIT */
#include "new_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "check.h"

enum { ATTEMPTS = 100 };

static sigset_t too_large(void)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGXFSZ);
    return set;
}

void fsdp__write_guard_begin(fsdp__write_guard *g)
{
    sigset_t set = too_large(), pending;
    pthread_sigmask(SIG_BLOCK, &set, &g->before);
    g->was_pending = sigpending(&pending) == 0 && sigismember(&pending, SIGXFSZ) == 1;
}

/* The signal is the writing thread's, so it is here by now. */
void fsdp__write_guard_end(const fsdp__write_guard *g)
{
    const sigset_t set = too_large();
    const struct timespec no_time = {0, 0};
    int error = errno;
    while (!g->was_pending && sigtimedwait(&set, NULL, &no_time) < 0 && errno == EINTR) {
    }
    pthread_sigmask(SIG_SETMASK, &g->before, NULL);
    errno = error;
}

/* -1 and errno. */
static int open_beside(const char *path, char *temporary, size_t bytes)
{
    int file = -1;
    for (int i = 0; i < ATTEMPTS && file < 0; i++) {
        snprintf(temporary, bytes, "%s.tmp%d", path, i);
        file = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (file < 0 && errno != EEXIST) break;
    }
    return file;
}

fsdp_status fsdp__new_file_open(fsdp__new_file *f, const char *path, char *temporary, size_t bytes)
{
    struct stat there; /* of a link, not of what it leads to: rename would take the link's place, /dev/stdout's too */
    if (lstat(path, &there) == 0 && !S_ISREG(there.st_mode))
        return fsdp__fail(FSDP_ERR_IO, "cannot write %s: it is there and no regular file", path);
    *f = (fsdp__new_file){path, temporary, open_beside(path, temporary, bytes), 0};
    return f->file >= 0 ? FSDP_OK : fsdp__fail(FSDP_ERR_IO, "cannot open %s: %s", temporary, strerror(errno));
}

void fsdp__new_file_write(fsdp__new_file *f, const char *data, size_t n)
{
    fsdp__write_guard guard;
    fsdp__write_guard_begin(&guard);
    while (f->reason == 0 && n > 0) {
        ssize_t written = write(f->file, data, n);
        if (written < 0 && errno != EINTR) f->reason = errno;
        if (written > 0) data += written, n -= (size_t)written;
    }
    fsdp__write_guard_end(&guard);
}

fsdp_status fsdp__new_file_close(fsdp__new_file *f)
{
    if (close(f->file) != 0 && f->reason == 0) f->reason = errno;
    if (f->reason == 0 && rename(f->temporary, f->path) != 0) f->reason = errno;
    if (f->reason == 0) return FSDP_OK;
    unlink(f->temporary);
    return fsdp__fail(FSDP_ERR_IO, "cannot write %s: %s", f->path, strerror(f->reason));
}
