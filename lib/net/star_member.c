/* SPDX-License-Identifier: MIT */
/* A member's part: it has one connection, to the hub. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "star_parts.h"

fsdp__where fsdp__member_expects(fsdp__star *s, fsdp__link *link, const fsdp__frame *frame, unsigned char **out_body)
{
    const fsdp__own_call *own = &s->own;
    bool in_call = own->active && !own->done && frame->number == own->number;
    bool has_it = own->said.what == FSDP__CALL_BROADCAST && own->said.root == s->rank;
    bool over = s->failing; /* what was on its way may still come */
    (void)link;
    switch (frame->kind) {
    case FSDP__FRAME_GO: return frame->bytes == 0 && (in_call || over) ? FSDP__WHERE_INSIDE : FSDP__WHERE_BAD;
    case FSDP__FRAME_RESULT:
        if (in_call && frame->bytes == (has_it ? 0 : own->result_bytes) && own->said.need == 0) *out_body = own->result;
        else if (!over) return FSDP__WHERE_BAD;
        return FSDP__WHERE_BODY;
    case FSDP__FRAME_REFUSED:
        return frame->bytes == 8 && frame->extra < s->world && (in_call || over) ? FSDP__WHERE_INSIDE : FSDP__WHERE_BAD;
    case FSDP__FRAME_FAILED:
        if (frame->bytes >= sizeof s->composed || !fsdp__star_is_failure(frame->extra)) return FSDP__WHERE_BAD;
        *out_body = (unsigned char *)s->composed;
        return FSDP__WHERE_BODY;
    case FSDP__FRAME_ASK:
        return frame->bytes == 0 && s->words.bytes > 0 && !s->asking ? FSDP__WHERE_INSIDE : FSDP__WHERE_BAD;
    case FSDP__FRAME_BYE: return frame->bytes == 0 ? FSDP__WHERE_INSIDE : FSDP__WHERE_BAD;
    default: return FSDP__WHERE_BAD;
    }
}

static void send_data(fsdp__star *s)
{
    fsdp__own_call *own = &s->own;
    bool has_data = own->said.what == FSDP__CALL_GATHER || own->said.root == s->rank;
    if (!own->active || own->done || !own->said.data_missing || !has_data) return;
    own->said.data_missing = false;
    fsdp__frame frame = {FSDP__FRAME_DATA, 0, own->number, own->said.bytes};
    fsdp__link_send(s, &s->links[0], frame, NULL, 0, own->blob);
}

static void call_is_done(fsdp__star *s, bool in_call)
{
    if (!in_call) return;
    s->own.done = true;
    if (!s->failing) s->deadline_ns = 0; /* it was late, and came */
}

void fsdp__member_takes(fsdp__star *s, fsdp__link *link, const fsdp__frame *frame, const unsigned char *payload)
{
    fsdp__own_call *own = &s->own;
    bool in_call = own->active && !own->done && frame->number == own->number;
    switch (frame->kind) {
    case FSDP__FRAME_GO: send_data(s); break;
    case FSDP__FRAME_REFUSED:
        if (in_call) {
            own->refused_rank = frame->extra;
            own->refused_need = fsdp__get_u64(payload);
        }
        call_is_done(s, in_call);
        break;
    case FSDP__FRAME_RESULT: call_is_done(s, in_call); break;
    case FSDP__FRAME_FAILED:
        s->composed[frame->bytes] = '\0';
        fsdp__star_publish(s, (fsdp_status)(int32_t)frame->extra, s->composed);
        break;
    case FSDP__FRAME_ASK:
        s->asking = s->words_due = true;
        /* The hub is at it: its sentence is worth more patience than silence is. */
        if (s->deadline_ns != 0) s->deadline_ns = fsdp__now_ns() + 2 * FSDP__ANSWER_NS;
        break;
    default: /* BYE */
        link->closed = true;
        fsdp__link_close(link);
        if (s->failing && !s->closing) fsdp__star_publish(s, s->first_status, s->first);
    }
    pthread_cond_broadcast(&s->changed);
}

void fsdp__member_loses(fsdp__star *s, const char *reason)
{
    if (s->closing) return;
    char text[FSDP__SENTENCE_BYTES];
    snprintf(text, sizeof text, "rank 0 is gone: %s", reason);
    fsdp__star_publish(s, FSDP_ERR_RANK_LOST, text);
}

void fsdp__member_without_hub(fsdp__star *s)
{
    char what[96], text[FSDP__SENTENCE_BYTES];
    fsdp__said plain = s->own.said;
    plain.what = FSDP__CALL_GATHER;
    fsdp__star_describe(&plain, s->own.number, what, sizeof what);
    snprintf(text, sizeof text, "%s: rank 0 of %" PRIu32 " closed before it came", what, s->world);
    fsdp__star_publish(s, FSDP_ERR_RANK_LOST, text);
}

void fsdp__member_late(fsdp__star *s)
{
    const fsdp__own_call *own = &s->own;
    unsigned char payload[16];
    fsdp__put_u64(payload, own->timeout_ns);
    fsdp__put_u64(payload + 8, own->said.bytes);
    fsdp__frame frame = {FSDP__FRAME_LATE, 0, own->number, sizeof payload};
    fsdp__link_send(s, &s->links[0], frame, payload, sizeof payload, NULL);
    if (s->failing) return;
    /* Who is missing is the hub's to say; if even its thread is silent, it is the hub. Not failing yet: the result may still
     * come first. */
    char what[96];
    fsdp__said plain = own->said;
    plain.what = FSDP__CALL_GATHER;
    fsdp__star_describe(&plain, own->number, what, sizeof what);
    snprintf(s->first, sizeof s->first,
             "%s: rank 0 of %" PRIu32 ", which holds the side channel, did not answer within %.3f s", what, s->world,
             (double)own->timeout_ns * 1e-9);
    s->first_status = FSDP_ERR_RANK_LOST;
    s->deadline_ns = fsdp__now_ns() + FSDP__ANSWER_NS;
    fsdp__star_wake(s);
}
