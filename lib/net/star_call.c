/* SPDX-License-Identifier: MIT */
/* A call, as the caller's thread sees it. */
#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "hostmem.h"
#include "star_parts.h"

static void give_room_back(fsdp__star *s, int turn)
{
    fsdp__host_free(s->host, s->large[turn], s->large_bytes[turn], 1);
    s->large[turn] = NULL;
    s->large_bytes[turn] = 0;
}

/* Room for the result; what is too large for `base` is taken now. By turns: the hub's last result may still be on its way to a
 * slow rank, but then the one before has arrived everywhere, since everybody has come to the last call. */
static void make_room(fsdp__star *s, fsdp__own_call *own)
{
    int turn = (int)(own->number % 2);
    give_room_back(s, turn);
    own->result = s->base[turn];
    if (own->result_bytes <= (uint64_t)s->world * FSDP__SMALL_BYTES) return;
    own->result = s->large[turn] = fsdp__host_alloc(s->host, (size_t)own->result_bytes, 1);
    if (own->result == NULL) own->said.need = own->result_bytes;
    else s->large_bytes[turn] = own->result_bytes;
}

static void send_call(fsdp__star *s)
{
    const fsdp__own_call *own = &s->own;
    unsigned char first[FSDP__CALL_BYTES + FSDP__SMALL_BYTES];
    fsdp__put_u32(first, own->said.what);
    fsdp__put_u32(first + 4, own->said.root);
    fsdp__put_u64(first + 8, own->said.bytes);
    fsdp__put_u64(first + 16, own->said.need);
    bool has_data = own->said.what == FSDP__CALL_GATHER || own->said.root == s->rank;
    size_t blob = own->said.need == 0 && has_data && own->said.bytes <= FSDP__SMALL_BYTES ? (size_t)own->said.bytes : 0;
    if (blob > 0) memcpy(first + FSDP__CALL_BYTES, own->blob, blob);
    fsdp__frame frame = {FSDP__FRAME_CALL, 0, own->number, FSDP__CALL_BYTES + blob};
    fsdp__link_send(s, &s->links[0], frame, first, (size_t)frame.bytes, NULL);
}

/* Until the call is done or the star has failed. */
static void wait_for_result(fsdp__star *s)
{
    fsdp__own_call *own = &s->own;
    bool is_late = own->timeout_ns == UINT64_MAX;
    uint64_t deadline_ns = fsdp__star_after(fsdp__now_ns(), own->timeout_ns);
    while (!own->done && atomic_load(&s->status) == FSDP_OK) {
        if (!fsdp__star_is_hub(s) && s->links[0].closed) {
            fsdp__member_without_hub(s);
        } else if (is_late) { /* from here on the star's thread sees to it that this ends */
            pthread_cond_wait(&s->changed, &s->lock);
        } else if (!fsdp__cond_until(&s->changed, &s->lock, deadline_ns) && !own->done) {
            is_late = true;
            if (fsdp__star_is_hub(s)) fsdp__hub_late(s, &own->said, own->number, own->timeout_ns);
            else fsdp__member_late(s);
        }
    }
}

/* The caller takes back what is his, whatever the thread is in the middle of. */
static void leave(fsdp__star *s)
{
    fsdp__link *hub = &s->links[0];
    s->own.active = false;
    if (fsdp__star_is_hub(s)) return;
    if (!s->own.done) {
        fsdp__link_drop_bodies(hub);
        if (hub->body_left > 0 && hub->frame.kind == FSDP__FRAME_RESULT) hub->body = NULL;
    }
}

static fsdp_status finish(fsdp__star *s, void *all)
{
    const fsdp__own_call *own = &s->own;
    if (!own->done) return fsdp__star_check(s);
    if (own->refused_need > 0)
        return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY,
                          "side channel #%" PRIu64 " of %" PRIu64 " bytes: rank %" PRIu32
                          " has no host memory for %" PRIu64 " bytes, so no rank gets a result",
                          own->number, own->said.bytes, own->refused_rank, own->refused_need);
    bool has_it = own->said.what == FSDP__CALL_BROADCAST && own->said.root == s->rank;
    if (own->result_bytes > 0 && !has_it) memcpy(all, own->result, (size_t)own->result_bytes);
    return FSDP_OK;
}

fsdp_status fsdp__star_call(fsdp__star *s, fsdp__said said, const void *mine, void *all, uint64_t timeout_ns)
{
    FSDP_TRY(fsdp__star_check(s));
    uint64_t result_bytes = said.bytes;
    if (said.what == FSDP__CALL_GATHER && __builtin_mul_overflow(said.bytes, (uint64_t)s->world, &result_bytes))
        return fsdp__fail(FSDP_ERR_ARG, "side channel: %" PRIu64 " bytes of %" PRIu32 " ranks", said.bytes, s->world);
    if (s->world == 1) {
        if (said.bytes > 0 && all != mine) memmove(all, mine, (size_t)said.bytes);
        return FSDP_OK;
    }
    fsdp__own_call own = {.number = ++s->n_calls, .timeout_ns = timeout_ns, .said = said, .blob = mine};
    own.result_bytes = result_bytes;
    own.active = own.said.data_missing = true;
    make_room(s, &own);
    pthread_mutex_lock(&s->lock);
    s->own = own;
    if (fsdp__star_is_hub(s)) {
        own.said.data_missing = false;
        fsdp__hub_arrives(s, 0, &own.said, mine);
    } else {
        send_call(s);
    }
    wait_for_result(s);
    leave(s);
    fsdp_status status = finish(s, all);
    pthread_mutex_unlock(&s->lock);
    if (!fsdp__star_is_hub(s)) give_room_back(s, (int)(own.number % 2));
    return status;
}
