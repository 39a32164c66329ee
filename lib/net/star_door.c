/* SPDX-License-Identifier: MIT */
/* Rank 0's door: open until every rank has come. Whoever knocks gets a fixed buffer and two seconds; nobody in front of it
 * can make it wait, grow, or let the wrong one in. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "star_parts.h"

#define HELLO_NS    (2000 * FSDP__MS)
#define FAREWELL_NS (300 * FSDP__MS)
enum { ACCEPTS_A_TURN = 64 };

/* Why somebody was turned away. */
enum { NO_HELLO, WRONG_NONCE, WRONG_VERSION, WRONG_WORLD, WRONG_RANK, N_REASONS };
static const char *const reasons[N_REASONS] = {"no hello of ours",
                                               "another job's (WORLD_SIZE, MASTER_PORT or FSDP_NONCE differs)",
                                               "another version of libfsdp", "wrong world", "no such rank"};

typedef struct door {
    fsdp__star *star;
    const fsdp_launch *launch;
    int listener;
    uint32_t n_came, n_pending;
    uint64_t n_turned[N_REASONS], deadline_ns, timeout_ns;
    int accept_error; /* the last one */
} door;

static void forget(door *d, uint32_t i)
{
    fsdp__pending *pending = d->star->pending;
    memmove(pending + i, pending + i + 1, (--d->n_pending - i) * sizeof *pending); /* the oldest stay first */
}

static void turn_away(door *d, uint32_t i, int reason)
{
    close(d->star->pending[i].fd);
    forget(d, i);
    d->n_turned[reason]++;
}

static void answer(const door *d, int fd, fsdp__answer code)
{
    unsigned char text[FSDP__HELLO_BYTES] = {0};
    memcpy(text, FSDP__HELLO_MAGIC, 8);
    fsdp__put_u32(text + 8, code);
    fsdp__put_u32(text + 12, FSDP__HELLO_VERSION);
    fsdp__put_u32(text + 16, d->star->world);
    (void)!send(fd, text, sizeof text, MSG_NOSIGNAL | MSG_DONTWAIT); /* the first bytes on it: there is room */
}

/* The whole hello is there: in, later, or away. */
static void judge(door *d, uint32_t i)
{
    fsdp__star *s = d->star;
    const unsigned char *hello = s->pending[i].hello;
    int fd = s->pending[i].fd;
    uint32_t rank = fsdp__get_u32(hello + 24);
    if (fsdp__get_u64(hello + 8) != d->launch->nonce) { /* not a word to a stranger */
        turn_away(d, i, WRONG_NONCE);
    } else if (fsdp__get_u32(hello + 16) != FSDP__HELLO_VERSION) {
        answer(d, fd, FSDP__ANSWER_VERSION);
        turn_away(d, i, WRONG_VERSION);
    } else if (fsdp__get_u32(hello + 20) != s->world) {
        answer(d, fd, FSDP__ANSWER_WORLD);
        turn_away(d, i, WRONG_WORLD);
    } else if (rank == 0 || rank >= s->world) {
        answer(d, fd, FSDP__ANSWER_RANK);
        turn_away(d, i, WRONG_RANK);
    } else if (s->links[rank].came) {
        answer(d, fd, FSDP__ANSWER_LATER);
        close(fd);
        forget(d, i);
    } else {
        answer(d, fd, FSDP__ANSWER_WELCOME);
        fsdp__link_open(&s->links[rank], fd, rank);
        s->links[rank].came = true;
        s->links[rank].need = fsdp__get_u64(hello + 32);
        forget(d, i);
    }
}

/* False: it is no longer pending. */
static bool hear(door *d, uint32_t i)
{
    fsdp__pending *p = &d->star->pending[i];
    ssize_t got = recv(p->fd, p->hello + p->n, sizeof p->hello - p->n, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return true;
    if (got > 0) p->n += (uint32_t)got;
    size_t magic = p->n < 8 ? p->n : 8;
    if (got <= 0 || memcmp(p->hello, FSDP__HELLO_MAGIC, magic) != 0) {
        turn_away(d, i, NO_HELLO);
        return false;
    }
    if (p->n < sizeof p->hello) return true;
    judge(d, i);
    return false;
}

static void let_them_knock(door *d)
{
    fsdp__star *s = d->star;
    for (int turn = 0; turn < ACCEPTS_A_TURN; turn++) {
        int fd = accept4(d->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0 && (errno == EINTR || errno == ECONNABORTED)) continue;
        if (fd < 0) {
            if (errno == EAGAIN || errno == EWOULDBLOCK) return;
            d->accept_error = errno; /* no descriptors left: who says nothing has to give one back */
            if (d->n_pending > 0) turn_away(d, 0, NO_HELLO);
            else nanosleep(&(struct timespec){0, 10 * FSDP__MS}, NULL);
            return;
        }
        fsdp__socket_tune(fd);
        if (d->n_pending == FSDP__PENDING) turn_away(d, 0, NO_HELLO);
        s->pending[d->n_pending++] = (fsdp__pending){.fd = fd, .deadline_ns = fsdp__now_ns() + HELLO_NS};
        (void)hear(d, d->n_pending - 1); /* a rank says it at once */
    }
}

static uint32_t count_came(const fsdp__star *s)
{
    uint32_t n = 0;
    for (uint32_t r = 1; r < s->world; r++) n += s->links[r].came;
    return n;
}

/* Sleep until something can be done. polls: the listener, the ranks, then who is pending. */
static void wait_at_door(door *d)
{
    fsdp__star *s = d->star;
    uint64_t until_ns = d->deadline_ns;
    s->polls[0] = (struct pollfd){.fd = d->listener, .events = POLLIN};
    for (uint32_t r = 1; r < s->world; r++) {
        short events = (short)(POLLIN | (s->links[r].n_out > 0 ? POLLOUT : 0));
        s->polls[r] = (struct pollfd){.fd = s->links[r].fd, .events = events};
    }
    for (uint32_t i = 0; i < d->n_pending; i++) {
        s->polls[s->world + i] = (struct pollfd){.fd = s->pending[i].fd, .events = POLLIN};
        if (s->pending[i].deadline_ns < until_ns) until_ns = s->pending[i].deadline_ns;
    }
    uint64_t now_ns = fsdp__now_ns(), left_ns = until_ns > now_ns ? until_ns - now_ns : 0;
    const struct timespec left = fsdp__timespec(left_ns);
    if (ppoll(s->polls, s->world + d->n_pending, &left, NULL) < 0)
        for (uint32_t i = 0; i < s->world + d->n_pending; i++) s->polls[i].revents = 0;
}

static void one_turn(door *d)
{
    fsdp__star *s = d->star;
    uint32_t n_pending = d->n_pending;
    wait_at_door(d);
    uint64_t now_ns = fsdp__now_ns();
    for (uint32_t i = n_pending; i-- > 0;) { /* from the last: whoever leaves moves only those that were looked at */
        if (s->polls[s->world + i].revents != 0 && !hear(d, i)) continue;
        if (now_ns >= s->pending[i].deadline_ns) turn_away(d, i, NO_HELLO);
    }
    for (uint32_t r = 1; r < s->world; r++) {
        short events = s->links[r].fd >= 0 ? s->polls[r].revents : 0;
        if (events == 0 || s->polls[r].fd != s->links[r].fd) continue;
        if (events & POLLOUT) fsdp__link_flush(s, &s->links[r]);
        if (events != POLLOUT) fsdp__link_receive(s, &s->links[r]);
    }
    if (s->polls[0].revents != 0) let_them_knock(d);
}

/* All have come: whoever has left since it was looked at last has not. */
static bool look_once_more(fsdp__star *s)
{
    bool all = true;
    for (uint32_t r = 1; r < s->world; r++) {
        struct pollfd one = {.fd = s->links[r].fd, .events = POLLIN};
        if (poll(&one, 1, 0) > 0) fsdp__link_receive(s, &s->links[r]);
        all = all && s->links[r].came;
    }
    return all;
}

/* ---- How it ends ---- */

static size_t put_turned(const door *d, char *text, size_t bytes)
{
    uint64_t n = 0;
    int n_kinds = 0;
    for (int i = 0; i < N_REASONS; i++) n += d->n_turned[i], n_kinds += d->n_turned[i] > 0;
    text[0] = '\0';
    if (n == 0) return 0;
    size_t at = (size_t)snprintf(text, bytes, "; %" PRIu64 " %s turned away:", n,
                                 n == 1 ? "connection was" : "connections were");
    const char *comma = " ";
    for (int i = 0; i < N_REASONS; i++) {
        if (d->n_turned[i] == 0) continue;
        at += (size_t)snprintf(text + at, bytes - at, "%s%s", comma, reasons[i]);
        if (n_kinds > 1) at += (size_t)snprintf(text + at, bytes - at, " (%" PRIu64 ")", d->n_turned[i]);
        comma = ", ";
    }
    return at;
}

/* Who came, who did not, who was turned away. */
static void put_missing(const door *d, uint64_t timeout_ns, char *text, size_t bytes)
{
    const fsdp__star *s = d->star;
    bool in[FSDP__MAX_WORLD];
    char missing[256], came[256], turned[256], trouble[160] = "", words[96];
    for (uint32_t r = 0; r < s->world; r++) in[r] = r > 0 && !s->links[r].came;
    fsdp__put_ranks(missing, sizeof missing, in, s->world);
    for (uint32_t r = 0; r < s->world; r++) in[r] = !in[r];
    fsdp__put_ranks(came, sizeof came, in, s->world);
    put_turned(d, turned, sizeof turned);
    if (d->accept_error != 0) {
        fsdp__errno_words(d->accept_error, words, sizeof words);
        snprintf(trouble, sizeof trouble, "; rank 0 could not take a connection: %s", words);
    }
    snprintf(text, bytes, "side channel: %s of %" PRIu32 " did not come to rank 0 at %s within %.3f s; %s did%s%s",
             missing, s->world, fsdp__place_of(d->launch).text, (double)timeout_ns * 1e-9, came, turned, trouble);
}

/* To those that are here, which then let go; they have a moment to read it. */
static fsdp_status give_up(door *d, fsdp_status status, const char *text)
{
    fsdp__star *s = d->star;
    s->failing = s->closing = true; /* from here on nothing that comes matters */
    fsdp__star_publish(s, status, text);
    for (uint32_t r = 1; r < s->world; r++)
        if (s->links[r].fd >= 0 && s->links[r].n_out == 0) (void)shutdown(s->links[r].fd, SHUT_WR);
    d->deadline_ns = fsdp__now_ns() + FAREWELL_NS;
    while (d->n_pending > 0) turn_away(d, 0, NO_HELLO);
    close(d->listener);
    d->listener = -1;
    for (bool any = true; any && fsdp__now_ns() < d->deadline_ns;) {
        any = false;
        for (uint32_t r = 1; r < s->world; r++) any = any || s->links[r].fd >= 0;
        if (any) one_turn(d);
    }
    return fsdp__fail(status, "%s", text);
}

static fsdp_status start(door *d)
{
    fsdp__star *s = d->star;
    char text[FSDP__SENTENCE_BYTES];
    for (uint32_t r = 1; r < s->world; r++) {
        if (s->links[r].need == 0) continue;
        snprintf(text, sizeof text, "side channel: rank %" PRIu32 " has no host memory for %" PRIu64 " bytes", r,
                 s->links[r].need);
        return give_up(d, FSDP_ERR_NO_HOST_MEMORY, text);
    }
    s->forming = false; /* whoever is lost from here on is lost to all */
    for (uint32_t r = 1; r < s->world; r++)
        fsdp__link_send(s, &s->links[r], (fsdp__frame){FSDP__FRAME_START, 0, 0, 0}, NULL, 0, NULL);
    fsdp_status status = fsdp__star_start_thread(s);
    if (status != FSDP_OK) {
        snprintf(text, sizeof text, "%.1000s", fsdp_last_error());
        return give_up(d, status, text);
    }
    while (d->n_pending > 0) turn_away(d, 0, NO_HELLO);
    close(d->listener);
    return FSDP_OK;
}

fsdp_status fsdp__star_form(fsdp__star *s, const fsdp_launch *launch, int listener, uint64_t timeout_ns)
{
    door d = {.star = s, .launch = launch, .listener = listener, .timeout_ns = timeout_ns};
    d.deadline_ns = fsdp__star_after(fsdp__now_ns(), timeout_ns);
    (void)fcntl(listener, F_SETFL, fcntl(listener, F_GETFL) | O_NONBLOCK);
    s->forming = true;
    while (count_came(s) < s->world - 1 || !look_once_more(s)) {
        bool late = fsdp__now_ns() >= d.deadline_ns;
        if (late || s->late_ns > 0) {
            char text[FSDP__SENTENCE_BYTES];
            put_missing(&d, late ? timeout_ns : s->late_ns, text, sizeof text);
            return give_up(&d, FSDP_ERR_RANK_LOST, text);
        }
        one_turn(&d);
    }
    return start(&d);
}
