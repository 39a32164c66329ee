/* SPDX-License-Identifier: MIT */
#include "host_watch.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "host_room.h"
#include "hostmem.h"
#include "thread.h"

enum { STACK_BYTES = 256 * 1024 };

struct fsdp__watch {
    const fsdp_host_allocator *host;
    void (*gone)(void *arg, uint32_t rank);
    void *arg;
    pthread_t thread;
    uint32_t world;
    struct pollfd fd[FSDP__ROOM_WORLD + 1]; /* by rank, and the one that ends it */
};

int fsdp__pidfd_open(int32_t pid)
{
#ifdef SYS_pidfd_open
    return (int)syscall(SYS_pidfd_open, (pid_t)pid, 0); /* close-on-exec by itself */
#else
    (void)pid;
    errno = ENOSYS;
    return -1;
#endif
}

static void *watch_main(void *arg)
{
    fsdp__watch *w = arg;
    for (;;) {
        if (poll(w->fd, w->world + 1, -1) < 0 && errno != EINTR) return NULL;
        if (w->fd[w->world].revents != 0) return NULL;
        for (uint32_t r = 0; r < w->world; r++) {
            if (w->fd[r].fd < 0 || w->fd[r].revents == 0) continue;
            close(w->fd[r].fd);
            w->fd[r].fd = -1; /* poll skips it */
            w->gone(w->arg, r);
        }
    }
}

static bool start(fsdp__watch *w)
{
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    bool started = fsdp__thread_start(&w->thread, &attributes, watch_main, w) == 0;
    pthread_attr_destroy(&attributes);
    if (started) pthread_setname_np(w->thread, "fsdp-watch");
    return started;
}

static void free_watch(fsdp__watch *w)
{
    for (uint32_t i = 0; i <= w->world; i++)
        if (w->fd[i].fd >= 0) close(w->fd[i].fd);
    fsdp__host_free(w->host, w, 1, sizeof *w);
}

fsdp__watch *fsdp__watch_open(const fsdp_host_allocator *host, const int *pidfd, uint32_t world,
                              void (*gone)(void *arg, uint32_t rank), void *arg)
{
    bool any = false;
    for (uint32_t r = 0; r < world; r++) any = any || pidfd[r] >= 0;
    fsdp__watch *w = any ? fsdp__host_alloc(host, 1, sizeof *w) : NULL;
    if (w == NULL) {
        for (uint32_t r = 0; r < world; r++)
            if (pidfd[r] >= 0) close(pidfd[r]);
        return NULL;
    }
    w->host = host;
    w->gone = gone;
    w->arg = arg;
    w->world = world;
    for (uint32_t r = 0; r < world; r++) w->fd[r] = (struct pollfd){pidfd[r], POLLIN, 0};
    w->fd[world] = (struct pollfd){eventfd(0, EFD_CLOEXEC), POLLIN, 0};
    if (w->fd[world].fd >= 0 && start(w)) return w;
    free_watch(w);
    return NULL;
}

void fsdp__watch_close(fsdp__watch *watch)
{
    if (watch == NULL) return;
    eventfd_write(watch->fd[watch->world].fd, 1);
    pthread_join(watch->thread, NULL);
    free_watch(watch);
}
