/* SPDX-License-Identifier: MIT */
/* The hub's part: it puts calls together and decides what failed. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "star_parts.h"

static bool is_missing(const fsdp__star *s, uint32_t r)
{
    return s->collecting ? s->said[r].data_missing : !s->said[r].arrived;
}

/* Fail for the ranks in `missing`: "side channel #1 of 8 bytes: ranks 1, 3 of 4 …". */
static void fail_for(fsdp__star *s, const fsdp__said *said, const bool *missing, const char *why)
{
    char what[96], who[FSDP__SENTENCE_BYTES / 2], text[FSDP__SENTENCE_BYTES];
    fsdp__said plain = *said; /* who is missing knows nothing of a root */
    plain.what = FSDP__CALL_GATHER;
    fsdp__star_describe(&plain, s->number, what, sizeof what);
    fsdp__put_ranks(who, sizeof who, missing, s->world);
    snprintf(text, sizeof text, "%s: %s of %" PRIu32 " %s", what, who, s->world, why);
    fsdp__hub_fails(s, FSDP_ERR_RANK_LOST, text);
}

/* Somebody waits, and somebody who said goodbye will not come. */
static void look_for_closed(fsdp__star *s)
{
    if (s->n_arrived == 0 || s->failing || s->forming) return;
    bool missing[FSDP__MAX_WORLD] = {false}, any = false;
    const fsdp__said *said = NULL;
    for (uint32_t r = 0; r < s->world; r++) {
        if (s->said[r].arrived && said == NULL) said = &s->said[r];
        missing[r] = s->links[r].closed && is_missing(s, r);
        any = any || missing[r];
    }
    if (any) fail_for(s, said, missing, "closed before it came");
}

void fsdp__hub_late(fsdp__star *s, const fsdp__said *said, uint64_t number, uint64_t timeout_ns)
{
    if (number != s->number || s->failing) return; /* it came after all */
    bool missing[FSDP__MAX_WORLD] = {false};
    for (uint32_t r = 0; r < s->world; r++) missing[r] = is_missing(s, r);
    char why[64];
    snprintf(why, sizeof why, "did not come within %.3f s", (double)timeout_ns * 1e-9);
    fail_for(s, said, missing, why);
}

/* ---- A call ---- */

static bool says_same(const fsdp__said *a, const fsdp__said *b)
{
    return a->what == b->what && a->root == b->root && a->bytes == b->bytes;
}

static void mismatch(fsdp__star *s)
{
    enum { N = 8 }; /* so many things said can be told apart */
    char text[FSDP__SENTENCE_BYTES], said[N][96];
    const char *told[FSDP__MAX_WORLD] = {NULL};
    const fsdp__said *first[N];
    int n = 0;
    for (uint32_t r = 0; r < s->world; r++) {
        int i = 0;
        while (i < n && !says_same(first[i], &s->said[r])) i++;
        if (i == N) continue;
        if (i == n) {
            first[n++] = &s->said[r];
            fsdp__star_describe(&s->said[r], s->number, said[i], sizeof said[i]);
        }
        told[r] = said[i];
    }
    fsdp__put_said(text, sizeof text, told, s->world);
    fsdp__hub_fails(s, FSDP_ERR_MISMATCH, text);
}

static void next_call(fsdp__star *s)
{
    memset(s->said, 0, s->world * sizeof *s->said);
    s->n_arrived = s->n_data_missing = 0;
    s->collecting = false;
    s->number++;
    s->own.done = true;
    pthread_cond_broadcast(&s->changed);
}

static void complete(fsdp__star *s)
{
    const fsdp__said said = s->said[0];
    const unsigned char *result = s->own.result;
    fsdp__frame frame = {FSDP__FRAME_RESULT, 0, s->number, s->own.result_bytes};
    next_call(s); /* first: sending may lose somebody */
    for (uint32_t r = 1; r < s->world; r++) {
        bool has_it = said.what == FSDP__CALL_BROADCAST && r == said.root;
        fsdp__frame own = frame;
        if (has_it) own.bytes = 0;
        fsdp__link_send(s, &s->links[r], own, NULL, 0, has_it ? NULL : result);
    }
}

static void refuse(fsdp__star *s, uint32_t rank)
{
    unsigned char need[8];
    fsdp__put_u64(need, s->said[rank].need);
    fsdp__frame frame = {FSDP__FRAME_REFUSED, rank, s->number, sizeof need};
    s->own.refused_rank = rank;
    s->own.refused_need = s->said[rank].need;
    next_call(s);
    for (uint32_t r = 1; r < s->world; r++) fsdp__link_send(s, &s->links[r], frame, need, sizeof need, NULL);
}

static void all_arrived(fsdp__star *s)
{
    const fsdp__said *said = s->said;
    uint32_t refused = s->world;
    for (uint32_t r = 0; r < s->world; r++) {
        if (!says_same(&said[r], said)) {
            mismatch(s);
            return;
        }
        if (said[r].need > 0 && refused == s->world) refused = r;
    }
    if (refused < s->world) {
        refuse(s, refused);
        return;
    }
    if (said->bytes > FSDP__SMALL_BYTES) {
        s->collecting = true;
        for (uint32_t r = 1; r < s->world; r++) {
            if (said->what == FSDP__CALL_BROADCAST && r != said->root) continue;
            s->said[r].data_missing = true;
            s->n_data_missing++;
        }
        fsdp__frame go = {FSDP__FRAME_GO, 0, s->number, 0};
        for (uint32_t r = 1; r < s->world; r++)
            if (s->said[r].data_missing) fsdp__link_send(s, &s->links[r], go, NULL, 0, NULL);
    }
    if (s->n_data_missing == 0) complete(s);
}

/* Where rank r's blob has its place; room for it was made before it may send. */
static unsigned char *place_of(fsdp__star *s, uint32_t r)
{
    const fsdp__said *said = &s->said[r];
    unsigned char *to = said->bytes > FSDP__SMALL_BYTES ? s->own.result : s->base[s->number % 2];
    return said->what == FSDP__CALL_GATHER ? to + r * said->bytes : to;
}

void fsdp__hub_arrives(fsdp__star *s, uint32_t rank, const fsdp__said *said, const unsigned char *blob)
{
    if (s->failing) return;
    s->said[rank] = *said;
    s->said[rank].arrived = true;
    s->n_arrived++;
    bool has_data = said->what == FSDP__CALL_GATHER || said->root == rank;
    /* The hub's own blob is at hand, whatever its size; that of another rank only if it is small. */
    bool is_here = said->need == 0 && has_data && (rank == 0 || said->bytes <= FSDP__SMALL_BYTES);
    if (is_here && said->bytes > 0) memcpy(place_of(s, rank), blob, (size_t)said->bytes);
    if (s->n_arrived == s->world) all_arrived(s);
    else look_for_closed(s);
}

/* ---- Frames of members ---- */

fsdp__where fsdp__hub_expects(fsdp__star *s, fsdp__link *link, const fsdp__frame *frame, unsigned char **out_body)
{
    const fsdp__said *said = &s->said[link->rank];
    switch (frame->kind) {
    case FSDP__FRAME_LATE: return frame->bytes == 16 ? FSDP__WHERE_INSIDE : FSDP__WHERE_BAD;
    case FSDP__FRAME_BYE: return frame->bytes == 0 ? FSDP__WHERE_INSIDE : FSDP__WHERE_BAD;
    case FSDP__FRAME_FAIL:
        return !s->forming && frame->bytes > 0 && frame->bytes < FSDP__SENTENCE_BYTES &&
                       fsdp__star_is_failure(frame->extra)
                   ? FSDP__WHERE_INSIDE
                   : FSDP__WHERE_BAD;
    case FSDP__FRAME_CALL:
        return !s->forming && frame->bytes >= FSDP__CALL_BYTES && frame->bytes <= FSDP__CALL_BYTES + FSDP__SMALL_BYTES
                   ? FSDP__WHERE_INSIDE
                   : FSDP__WHERE_BAD;
    case FSDP__FRAME_DATA:
        if (s->failing) return FSDP__WHERE_BODY; /* it was on its way */
        if (!said->data_missing || frame->number != s->number || frame->bytes != said->bytes) return FSDP__WHERE_BAD;
        *out_body = place_of(s, link->rank);
        return FSDP__WHERE_BODY;
    case FSDP__FRAME_WORDS:
        if (frame->bytes != s->words.bytes || !s->failing || s->answered[link->rank]) return FSDP__WHERE_BAD;
        if (s->asking) *out_body = s->blobs + link->rank * s->words.bytes;
        return FSDP__WHERE_BODY;
    default: return FSDP__WHERE_BAD;
    }
}

/* False: it breaks the rules. */
static bool takes_call(fsdp__star *s, fsdp__link *link, const fsdp__frame *frame, const unsigned char *payload)
{
    if (s->failing || s->closing) return true;
    fsdp__said said = {.what = fsdp__get_u32(payload),
                       .root = fsdp__get_u32(payload + 4),
                       .bytes = fsdp__get_u64(payload + 8),
                       .need = fsdp__get_u64(payload + 16)};
    bool has_data = said.what == FSDP__CALL_GATHER || said.root == link->rank;
    uint64_t blob = said.need == 0 && has_data && said.bytes <= FSDP__SMALL_BYTES ? said.bytes : 0;
    if (said.what > FSDP__CALL_BROADCAST || said.root >= s->world || frame->number != s->number ||
        s->said[link->rank].arrived || frame->bytes != FSDP__CALL_BYTES + blob || link->n_out > 0)
        return false;
    fsdp__hub_arrives(s, link->rank, &said, payload + FSDP__CALL_BYTES);
    return true;
}

static void takes_late(fsdp__star *s, const fsdp__frame *frame, const unsigned char *payload)
{
    uint64_t timeout_ns = fsdp__get_u64(payload);
    const fsdp__said said = {.bytes = fsdp__get_u64(payload + 8)};
    if (s->forming) s->late_ns = timeout_ns > 0 ? timeout_ns : 1;
    else if (!s->closing) fsdp__hub_late(s, &said, frame->number, timeout_ns);
}

void fsdp__hub_takes(fsdp__star *s, fsdp__link *link, const fsdp__frame *frame, const unsigned char *payload)
{
    char text[FSDP__SENTENCE_BYTES];
    switch (frame->kind) {
    case FSDP__FRAME_CALL:
        if (takes_call(s, link, frame, payload)) break;
        fsdp__link_close(link);
        fsdp__hub_loses(s, link, "it sent what does not belong there");
        break;
    case FSDP__FRAME_DATA:
        if (s->failing || !s->said[link->rank].data_missing) break;
        s->said[link->rank].data_missing = false;
        if (--s->n_data_missing == 0) complete(s);
        break;
    case FSDP__FRAME_LATE: takes_late(s, frame, payload); break;
    case FSDP__FRAME_FAIL:
        memcpy(text, payload, (size_t)frame->bytes);
        text[frame->bytes] = '\0';
        fsdp__hub_fails(s, (fsdp_status)(int32_t)frame->extra, text);
        break;
    case FSDP__FRAME_WORDS: s->answered[link->rank] = s->asking; break;
    default: /* BYE */
        link->closed = !s->forming;
        fsdp__link_close(link);
        if (s->forming) link->came = false;
        look_for_closed(s);
    }
}

void fsdp__hub_loses(fsdp__star *s, fsdp__link *link, const char *reason)
{
    if (s->closing) return;
    if (s->forming) { /* it may come again */
        link->came = false;
        return;
    }
    char text[FSDP__SENTENCE_BYTES];
    snprintf(text, sizeof text, "rank %" PRIu32 " is gone: %s", link->rank, reason);
    fsdp__hub_fails(s, FSDP_ERR_RANK_LOST, text);
}
