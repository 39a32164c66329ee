/* SPDX-License-Identifier: MIT */
/* Frames on one connection. Nothing here blocks; sizes from the wire are looked at before a byte is taken. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#include "star_parts.h"

void fsdp__put_u32(unsigned char *to, uint32_t value)
{
    for (int i = 0; i < 4; i++) to[i] = (unsigned char)(value >> 8 * i);
}

void fsdp__put_u64(unsigned char *to, uint64_t value)
{
    for (int i = 0; i < 8; i++) to[i] = (unsigned char)(value >> 8 * i);
}

uint32_t fsdp__get_u32(const unsigned char *from)
{
    uint32_t value = 0;
    for (int i = 0; i < 4; i++) value |= (uint32_t)from[i] << 8 * i;
    return value;
}

uint64_t fsdp__get_u64(const unsigned char *from)
{
    return fsdp__get_u32(from) | (uint64_t)fsdp__get_u32(from + 4) << 32;
}

void fsdp__frame_put(unsigned char *to, const fsdp__frame *frame)
{
    fsdp__put_u32(to, frame->kind);
    fsdp__put_u32(to + 4, frame->extra);
    fsdp__put_u64(to + 8, frame->number);
    fsdp__put_u64(to + 16, frame->bytes);
}

fsdp__frame fsdp__frame_get(const unsigned char *from)
{
    return (fsdp__frame){fsdp__get_u32(from), fsdp__get_u32(from + 4), fsdp__get_u64(from + 8),
                         fsdp__get_u64(from + 16)};
}

void fsdp__link_open(fsdp__link *link, int fd, uint32_t rank)
{
    memset(link, 0, sizeof *link);
    link->fd = fd;
    link->rank = rank;
}

void fsdp__link_close(fsdp__link *link)
{
    if (link->fd >= 0) close(link->fd);
    link->fd = -1;
    link->n_out = 0;
    link->body_left = 0;
    link->body = NULL;
}

/* ---- Sending ---- */

/* So much of the queue was sent. */
static void note_sent(fsdp__link *link, size_t bytes)
{
    uint32_t n_done = 0;
    for (uint32_t i = 0; i < link->n_out && bytes > 0; i++) {
        fsdp__out *out = &link->out[i];
        size_t left = out->head_bytes + out->body_bytes - out->sent, part = bytes < left ? bytes : left;
        out->sent += part;
        bytes -= part;
        n_done += part == left;
    }
    link->n_out -= n_done;
    memmove(link->out, link->out + n_done, link->n_out * sizeof *link->out);
}

static int fill_pieces(fsdp__link *link, struct iovec *pieces)
{
    int n = 0;
    for (uint32_t i = 0; i < link->n_out; i++) {
        fsdp__out *out = &link->out[i];
        size_t in_body = out->sent > out->head_bytes ? out->sent - out->head_bytes : 0;
        if (out->sent < out->head_bytes)
            pieces[n++] = (struct iovec){out->head + out->sent, out->head_bytes - out->sent};
        if (in_body < out->body_bytes)
            pieces[n++] = (struct iovec){(void *)(uintptr_t)(out->body + in_body), out->body_bytes - in_body};
    }
    return n;
}

void fsdp__link_flush(fsdp__star *s, fsdp__link *link)
{
    (void)s;
    while (link->fd >= 0 && link->n_out > 0 && !link->broken) {
        struct iovec pieces[2 * FSDP__OUT_FRAMES];
        struct msghdr message = {.msg_iov = pieces};
        message.msg_iovlen = (size_t)fill_pieces(link, pieces);
        ssize_t sent = sendmsg(link->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent >= 0) note_sent(link, (size_t)sent);
        else if (errno == EAGAIN || errno == EWOULDBLOCK) return;
        else if (errno != EINTR) link->broken = true; /* the receiving side will see the end, and what came before it */
    }
    if (link->broken) link->n_out = 0;
}

void fsdp__link_send(fsdp__star *s, fsdp__link *link, fsdp__frame frame, const void *first, size_t first_bytes,
                     const void *body)
{
    if (link->fd < 0 || link->broken || link->shut) return;
    if (link->n_out == FSDP__OUT_FRAMES) { /* cannot be, but for a peer that breaks the rules */
        link->broken = true;
        (void)shutdown(link->fd, SHUT_RDWR);
        return;
    }
    fsdp__out *out = &link->out[link->n_out++];
    fsdp__frame_put(out->head, &frame);
    if (first_bytes > 0) memcpy(out->head + FSDP__HEAD_BYTES, first, first_bytes);
    out->head_bytes = FSDP__HEAD_BYTES + first_bytes;
    out->body = body;
    out->body_bytes = frame.bytes - first_bytes;
    out->sent = 0;
    fsdp__link_flush(s, link);
    if (link->n_out > 0) fsdp__star_wake(s); /* its thread waits until there is room again */
}

void fsdp__link_drop_bodies(fsdp__link *link)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < link->n_out; i++) {
        fsdp__out *out = &link->out[i];
        bool is_data = fsdp__get_u32(out->head) == FSDP__FRAME_DATA;
        if (is_data && out->sent > 0) { /* half a frame: nothing sensible can follow */
            link->broken = true;
            (void)shutdown(link->fd, SHUT_RDWR);
        }
        if (!is_data) link->out[n++] = *out;
    }
    link->n_out = link->broken ? 0 : n;
}

/* ---- Receiving ---- */

static fsdp__where expects(fsdp__star *s, fsdp__link *link, const fsdp__frame *frame, unsigned char **out_body)
{
    *out_body = NULL;
    fsdp__where where = fsdp__star_is_hub(s) ? fsdp__hub_expects(s, link, frame, out_body)
                                             : fsdp__member_expects(s, link, frame, out_body);
    if (where == FSDP__WHERE_INSIDE && frame->bytes > sizeof link->in - FSDP__HEAD_BYTES) return FSDP__WHERE_BAD;
    return where;
}

static void takes(fsdp__star *s, fsdp__link *link, const fsdp__frame *frame, const unsigned char *payload)
{
    if (fsdp__star_is_hub(s)) fsdp__hub_takes(s, link, frame, payload);
    else fsdp__member_takes(s, link, frame, payload);
}

static void loses(fsdp__star *s, fsdp__link *link, const char *reason)
{
    fsdp__link_close(link);
    if (link->closed) return;
    if (fsdp__star_is_hub(s)) fsdp__hub_loses(s, link, reason);
    else fsdp__member_loses(s, reason);
}

static void consume(fsdp__link *link, size_t bytes)
{
    link->n_in -= bytes;
    memmove(link->in, link->in + bytes, link->n_in);
}

/* Take one frame, or the beginning of one, out of link->in. False: there is no whole one. */
static bool take_one(fsdp__star *s, fsdp__link *link)
{
    if (link->fd < 0 || link->body_left > 0 || link->n_in < FSDP__HEAD_BYTES) return false;
    fsdp__frame frame = fsdp__frame_get(link->in);
    unsigned char *body;
    fsdp__where where = expects(s, link, &frame, &body);
    if (where == FSDP__WHERE_BAD) {
        loses(s, link, "it sent what does not belong there");
        return false;
    }
    if (where == FSDP__WHERE_INSIDE) {
        if (link->n_in < FSDP__HEAD_BYTES + frame.bytes) return false;
        takes(s, link, &frame, link->in + FSDP__HEAD_BYTES);
        if (link->fd >= 0) consume(link, FSDP__HEAD_BYTES + (size_t)frame.bytes);
        return true;
    }
    size_t here = link->n_in - FSDP__HEAD_BYTES;
    if (here > frame.bytes) here = (size_t)frame.bytes;
    if (body != NULL && here > 0) memcpy(body, link->in + FSDP__HEAD_BYTES, here);
    consume(link, FSDP__HEAD_BYTES + here);
    link->frame = frame;
    link->body = body != NULL ? body + here : NULL;
    link->body_left = frame.bytes - here;
    if (link->body_left == 0) takes(s, link, &frame, NULL);
    return true;
}

/* One recv, of which *out_full says whether more may be waiting. Returns what recv did. */
static ssize_t receive_some(fsdp__star *s, fsdp__link *link, bool *out_full)
{
    unsigned char dropped[4096];
    unsigned char *to = link->in + link->n_in;
    size_t room = sizeof link->in - link->n_in;
    if (link->body_left > 0) {
        to = link->body != NULL ? link->body : dropped;
        room = link->body == NULL && link->body_left > sizeof dropped ? sizeof dropped : (size_t)link->body_left;
    }
    ssize_t got = recv(link->fd, to, room, MSG_DONTWAIT);
    *out_full = got == (ssize_t)room;
    if (got <= 0) return got;
    if (link->body_left == 0) {
        link->n_in += (size_t)got;
    } else {
        link->body_left -= (uint64_t)got;
        if (link->body != NULL) link->body += got;
        if (link->body_left == 0) takes(s, link, &link->frame, NULL);
    }
    while (take_one(s, link)) {
    }
    return got;
}

void fsdp__link_receive(fsdp__star *s, fsdp__link *link)
{
    bool full = true;
    for (int turns = 0; link->fd >= 0 && full && turns < 64; turns++) { /* then the others have theirs */
        ssize_t got = receive_some(s, link, &full);
        if (got > 0) continue;
        if (got < 0 && errno == EINTR) {
            full = true;
            continue;
        }
        if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
        char reason[160], words[96];
        if (got == 0 || errno == ECONNRESET || errno == EPIPE) {
            strcpy(reason, "its connection closed (the process ended or was killed)");
        } else if (errno == ETIMEDOUT || errno == EHOSTUNREACH || errno == ENETUNREACH) {
            fsdp__errno_words(errno, words, sizeof words);
            snprintf(reason, sizeof reason, "its machine no longer answers (%s)", words);
        } else {
            fsdp__errno_words(errno, words, sizeof words);
            snprintf(reason, sizeof reason, "its connection failed (%s)", words);
        }
        loses(s, link, reason);
    }
}
