/* SPDX-License-Identifier: MIT */
/* A rank's own thread: it sleeps until a connection, a deadline or the caller wakes it. */
#include <errno.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "star_parts.h"
#include "thread.h"

enum { STACK_BYTES = 256 * 1024 };

void fsdp__star_wake(fsdp__star *s)
{
    static const uint64_t one = 1;
    if (!s->has_thread || pthread_equal(s->thread, pthread_self())) return;
    ssize_t n = write(s->wake_fd, &one, sizeof one); /* a full counter wakes as well */
    (void)n;
}

/* Goodbye to one peer: what is left to send, then the end of the stream; then its end. */
static void shut_down(fsdp__link *link)
{
    if (link->fd < 0 || link->n_out > 0 || link->shut) return;
    link->shut = true;
    (void)shutdown(link->fd, SHUT_WR);
}

/* False: there is nobody left to say goodbye to, or no time. */
static bool say_goodbye(fsdp__star *s)
{
    bool any = false;
    for (uint32_t r = 0; r < s->n_links; r++) {
        shut_down(&s->links[r]);
        any = any || s->links[r].fd >= 0;
    }
    return any && fsdp__now_ns() < s->close_deadline_ns;
}

static void wait_for_events(fsdp__star *s)
{
    s->polls[0] = (struct pollfd){.fd = s->wake_fd, .events = POLLIN};
    for (uint32_t r = 0; r < s->n_links; r++) {
        const fsdp__link *link = &s->links[r];
        short events = (short)(POLLIN | (link->n_out > 0 ? POLLOUT : 0));
        s->polls[1 + r] = (struct pollfd){.fd = link->fd, .events = events};
    }
    uint64_t until_ns = s->closing ? s->close_deadline_ns : s->deadline_ns, now_ns = fsdp__now_ns();
    uint64_t left_ns = until_ns > now_ns ? until_ns - now_ns : 0;
    const struct timespec left = fsdp__timespec(left_ns);
    pthread_mutex_unlock(&s->lock);
    (void)ppoll(s->polls, 1 + s->n_links, until_ns > 0 ? &left : NULL, NULL);
    pthread_mutex_lock(&s->lock);
}

static void take_events(fsdp__star *s)
{
    uint64_t count;
    if (s->polls[0].revents != 0 && read(s->wake_fd, &count, sizeof count) < 0 && errno != EAGAIN) return;
    for (uint32_t r = 0; r < s->n_links; r++) {
        fsdp__link *link = &s->links[r];
        short events = s->polls[1 + r].revents;
        if (link->fd < 0 || events == 0) continue;
        if (events & POLLOUT) fsdp__link_flush(s, link);
        if (events & (POLLIN | POLLERR | POLLHUP)) fsdp__link_receive(s, link);
    }
}

static void *thread_main(void *star)
{
    fsdp__star *s = star;
    pthread_mutex_lock(&s->lock);
    for (;;) {
        fsdp__star_tend(s);
        if (s->closing && !say_goodbye(s)) break;
        wait_for_events(s);
        take_events(s);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

fsdp_status fsdp__star_start_thread(fsdp__star *s)
{
    char words[96];
    s->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (s->wake_fd < 0) {
        fsdp__errno_words(errno, words, sizeof words);
        return fsdp__fail(FSDP_ERR_RANK_LOST, "side channel: rank %u gets no event descriptor: %s", s->rank, words);
    }
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    (void)pthread_attr_setstacksize(&attributes, STACK_BYTES);
    pthread_mutex_lock(&s->lock); /* it begins when `thread` is written */
    int error = fsdp__thread_start(&s->thread, &attributes, thread_main, s);
    if (error == EINVAL) error = fsdp__thread_start(&s->thread, NULL, thread_main, s); /* much thread-local data */
    s->has_thread = error == 0;
    pthread_mutex_unlock(&s->lock);
    pthread_attr_destroy(&attributes);
    if (error == 0) {
        pthread_setname_np(s->thread, "fsdp side");
        return FSDP_OK;
    }
    fsdp__errno_words(error, words, sizeof words);
    return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "side channel: rank %u gets no thread: %s%s", s->rank, words,
                      error == EAGAIN ? ": how many there may be is said by ulimit -u, and by the cgroup's pids.max"
                                      : "");
}

void fsdp__star_stop_thread(fsdp__star *s)
{
    pthread_mutex_lock(&s->lock);
    s->closing = true;
    /* Who has failed has little to wait for. */
    uint64_t linger_ns = atomic_load(&s->status) == FSDP_OK ? FSDP__LINGER_NS : FSDP__LINGER_NS / 4;
    s->close_deadline_ns = fsdp__now_ns() + linger_ns;
    for (uint32_t r = 0; r < s->n_links; r++)
        fsdp__link_send(s, &s->links[r], (fsdp__frame){FSDP__FRAME_BYE, 0, 0, 0}, NULL, 0, NULL);
    fsdp__star_wake(s);
    pthread_mutex_unlock(&s->lock);
    pthread_join(s->thread, NULL);
    s->has_thread = false;
}
