/* SPDX-License-Identifier: MIT */
/* A member's way in. Whoever listens there may be the wrong one, or the right one at the wrong moment: until the deadline it
 * tries again, unless rank 0 itself says that it will never do. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "star_parts.h"

#define ANSWER_NS        (5000 * FSDP__MS)
#define CUT_NS           (200 * FSDP__MS) /* a try that had less time than this says nothing about who listens there */
#define FIRST_PAUSE_NS   FSDP__MS
#define LONGEST_PAUSE_NS (100 * FSDP__MS)

typedef struct attempt {
    const fsdp_launch *launch;
    uint64_t need, timeout_ns, deadline_ns;
    int fd;
    char why[160];  /* the last try came to nothing */
    bool is_rank_0; /* though it was rank 0 that answered */
} attempt;

/* Exactly so many bytes. False: why says what came instead. */
static bool receive_all(attempt *a, void *to, size_t bytes, uint64_t deadline_ns, const char *silent)
{
    size_t have = 0;
    while (have < bytes) {
        if (!fsdp__wait_for(a->fd, POLLIN, deadline_ns)) {
            snprintf(a->why, sizeof a->why, "%s", silent);
            return false;
        }
        ssize_t got = recv(a->fd, (unsigned char *)to + have, bytes - have, MSG_DONTWAIT);
        if (got > 0) have += (size_t)got;
        else if (got < 0 && (errno == EAGAIN || errno == EINTR)) continue;
        else {
            snprintf(a->why, sizeof a->why,
                     "what listens there turned it away without a word: another job, or none of ours");
            return false;
        }
    }
    return true;
}

static bool say_hello(attempt *a)
{
    unsigned char hello[FSDP__HELLO_BYTES] = {0};
    memcpy(hello, FSDP__HELLO_MAGIC, 8);
    fsdp__put_u64(hello + 8, a->launch->nonce);
    fsdp__put_u32(hello + 16, FSDP__HELLO_VERSION);
    fsdp__put_u32(hello + 20, a->launch->world);
    fsdp__put_u32(hello + 24, a->launch->rank);
    fsdp__put_u64(hello + 32, a->need);
    if (send(a->fd, hello, sizeof hello, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)sizeof hello) return true;
    fsdp__errno_words(errno, a->why, sizeof a->why);
    return false;
}

static fsdp_status refused(const attempt *a, const unsigned char *answer)
{
    const fsdp_launch *l = a->launch;
    fsdp__place place = fsdp__place_of(l);
    switch (fsdp__get_u32(answer + 8)) {
    case FSDP__ANSWER_VERSION:
        return fsdp__fail(FSDP_ERR_MISMATCH,
                          "side channel: rank %" PRIu32 " speaks version %d, rank 0 at %s version %" PRIu32
                          ": link all ranks with the same libfsdp",
                          l->rank, FSDP__HELLO_VERSION, place.text, fsdp__get_u32(answer + 12));
    case FSDP__ANSWER_WORLD:
        return fsdp__fail(FSDP_ERR_MISMATCH,
                          "side channel: rank %" PRIu32 " is of a world of %" PRIu32
                          ", rank 0 at %s of a world of %" PRIu32,
                          l->rank, l->world, place.text, fsdp__get_u32(answer + 16));
    default:
        return fsdp__fail(FSDP_ERR_MISMATCH, "side channel: rank 0 at %s has no place for rank %" PRIu32 " of %" PRIu32,
                          place.text, l->rank, l->world);
    }
}

/* Rank 0 let it in and then says no: with its sentence, on every rank. */
static fsdp_status hub_failed(attempt *a, const fsdp__frame *frame)
{
    char sentence[FSDP__ERROR_BYTES];
    if (frame->bytes >= sizeof sentence || !fsdp__star_is_failure(frame->extra) ||
        !receive_all(a, sentence, (size_t)frame->bytes, fsdp__now_ns() + FSDP__ANSWER_NS, ""))
        return fsdp__fail(FSDP_ERR_RANK_LOST, "side channel: rank 0 at %s gave up", fsdp__place_of(a->launch).text);
    sentence[frame->bytes] = '\0';
    return fsdp__fail((fsdp_status)(int32_t)frame->extra, "%s",
                      sentence[0] != '\0' ? sentence : "rank 0 gave no reason");
}

/* It is in: until all are. OK with *out_in false: try again. */
static fsdp_status wait_for_start(attempt *a, bool *out_in)
{
    unsigned char head[FSDP__HEAD_BYTES];
    if (!fsdp__wait_for(a->fd, POLLIN, a->deadline_ns)) {
        /* Who is missing is rank 0's to say, and to all at once. */
        unsigned char late[FSDP__HEAD_BYTES + 16] = {0};
        fsdp__frame frame = {FSDP__FRAME_LATE, 0, 0, 16};
        fsdp__frame_put(late, &frame);
        fsdp__put_u64(late + FSDP__HEAD_BYTES, a->timeout_ns);
        (void)!send(a->fd, late, sizeof late, MSG_NOSIGNAL | MSG_DONTWAIT);
    }
    uint64_t answer_ns = fsdp__now_ns() + FSDP__ANSWER_NS;
    if (!receive_all(a, head, sizeof head, answer_ns > a->deadline_ns ? answer_ns : a->deadline_ns,
                     "it was let in, and rank 0 fell silent"))
        return FSDP_OK;
    fsdp__frame frame = fsdp__frame_get(head);
    if (frame.kind == FSDP__FRAME_FAILED) return hub_failed(a, &frame);
    *out_in = frame.kind == FSDP__FRAME_START && frame.bytes == 0;
    if (!*out_in) snprintf(a->why, sizeof a->why, "what listens there is not rank 0 of libfsdp");
    return FSDP_OK;
}

static fsdp_status try_once(attempt *a, bool *out_in)
{
    unsigned char answer[FSDP__HELLO_BYTES];
    uint64_t answer_ns = fsdp__now_ns() + ANSWER_NS;
    if (answer_ns > a->deadline_ns) answer_ns = a->deadline_ns;
    if (!say_hello(a) || !receive_all(a, answer, sizeof answer, answer_ns, "what listens there does not answer"))
        return FSDP_OK;
    if (memcmp(answer, FSDP__HELLO_MAGIC, 8) != 0) {
        snprintf(a->why, sizeof a->why, "what listens there is not rank 0 of libfsdp");
        return FSDP_OK;
    }
    a->is_rank_0 = true;
    switch (fsdp__get_u32(answer + 8)) {
    case FSDP__ANSWER_WELCOME: return wait_for_start(a, out_in);
    case FSDP__ANSWER_LATER:
        snprintf(a->why, sizeof a->why, "rank 0 has a rank %" PRIu32 " already", a->launch->rank);
        return FSDP_OK;
    default: return refused(a, answer);
    }
}

/* Nobody, or somebody else, is where this rank looks for rank 0. */
static const char *what_to_check(const attempt *a)
{
    if (a->is_rank_0) return "";
    return a->launch->address[0] == '@'
               ? ": are FSDP_NONCE, the world and the user the same on all ranks?"
               : ": is that rank 0's address and port, and is the job the same (FSDP_NONCE, world)?";
}

fsdp_status fsdp__star_join(const fsdp_launch *launch, uint64_t need, uint64_t timeout_ns, int *out_fd)
{
    attempt a = {.launch = launch, .need = need, .timeout_ns = timeout_ns, .fd = -1};
    a.deadline_ns = fsdp__star_after(fsdp__now_ns(), timeout_ns);
    uint64_t pause_ns = FIRST_PAUSE_NS;
    for (;;) {
        bool in = false;
        fsdp_status status = FSDP_OK;
        attempt before = a;
        bool is_cut = fsdp__star_after(fsdp__now_ns(), CUT_NS) > a.deadline_ns && before.why[0] != '\0';
        a.is_rank_0 = false;
        a.fd = fsdp__place_connect(launch, a.deadline_ns, a.why, sizeof a.why);
        if (a.fd >= 0) status = try_once(&a, &in);
        if (in) {
            *out_fd = a.fd;
            return FSDP_OK;
        }
        if (a.fd >= 0) close(a.fd);
        if (status != FSDP_OK) return status;
        uint64_t now_ns = fsdp__now_ns();
        if (now_ns >= a.deadline_ns) {
            if (is_cut) a = before;
            break;
        }
        uint64_t left_ns = a.deadline_ns - now_ns, sleep_ns = pause_ns < left_ns ? pause_ns : left_ns;
        nanosleep(&(struct timespec){0, (long)sleep_ns}, NULL);
        pause_ns = pause_ns * 3 / 2 < LONGEST_PAUSE_NS ? pause_ns * 3 / 2 : LONGEST_PAUSE_NS;
    }
    return fsdp__fail(
        FSDP_ERR_RANK_LOST,
        "side channel: rank %" PRIu32 " of %" PRIu32 " was not let in by rank 0 at %s within %.3f s: %s%s",
        launch->rank, launch->world, fsdp__place_of(launch).text, (double)timeout_ns * 1e-9, a.why, what_to_check(&a));
}
