/* SPDX-License-Identifier: MIT */
/* How a failure becomes every rank's, with one sentence. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "star_parts.h"

void fsdp__star_describe(const fsdp__said *said, uint64_t number, char *text, size_t bytes)
{
    int n = snprintf(text, bytes, "side channel #%" PRIu64 " of %" PRIu64 " bytes", number, said->bytes);
    if (said->what == FSDP__CALL_BROADCAST && n > 0 && (size_t)n < bytes)
        snprintf(text + n, bytes - (size_t)n, " from rank %" PRIu32, said->root);
}

bool fsdp__star_is_failure(uint32_t status) { return fsdp__is_failure((int32_t)status); }

fsdp_status fsdp__star_check(fsdp__star *s)
{
    fsdp_status status = (fsdp_status)atomic_load_explicit(&s->status, memory_order_acquire);
    return status == FSDP_OK ? FSDP_OK : fsdp__fail(status, "%s", s->sentence);
}

/* Cut between characters. */
static void put_sentence(char *to, size_t bytes, const char *sentence)
{
    size_t length = strlen(sentence);
    if (length >= bytes) {
        length = bytes - 1;
        while (length > 0 && ((unsigned char)sentence[length] & 0xc0) == 0x80) length--;
    }
    memmove(to, sentence, length);
    to[length] = '\0';
}

void fsdp__star_publish(fsdp__star *s, fsdp_status status, const char *sentence)
{
    if (atomic_load(&s->status) != FSDP_OK) return;
    if (sentence[0] == '\0') sentence = "a rank failed and gave no reason";
    put_sentence(s->sentence, sizeof s->sentence, sentence);
    s->failing = true;
    s->asking = false;
    s->deadline_ns = 0;
    atomic_store_explicit(&s->status, status, memory_order_release);
    size_t bytes = strlen(s->sentence);
    for (uint32_t r = 1; fsdp__star_is_hub(s) && r < s->n_links; r++)
        fsdp__link_send(s, &s->links[r], (fsdp__frame){FSDP__FRAME_FAILED, (uint32_t)status, 0, bytes}, NULL, 0,
                        s->sentence);
    pthread_cond_broadcast(&s->changed);
    fsdp__star_wake(s); /* who calls failed */
}

void fsdp__hub_fails(fsdp__star *s, fsdp_status status, const char *sentence)
{
    if (s->failing) {
        /* The first one stays; but who aborts does not wait for anybody's words. */
        if (s->asking && status == FSDP_ERR_ABORTED) s->deadline_ns = fsdp__now_ns();
        fsdp__star_wake(s);
        return;
    }
    s->failing = true;
    if (status == FSDP_ERR_ABORTED || s->words.bytes == 0 || s->world == 1) {
        fsdp__star_publish(s, status, sentence);
        return;
    }
    s->first_status = status;
    put_sentence(s->first, sizeof s->first, sentence);
    s->asking = s->words_due = true;
    s->deadline_ns = fsdp__now_ns() + FSDP__ASK_NS;
    for (uint32_t r = 1; r < s->n_links; r++)
        fsdp__link_send(s, &s->links[r], (fsdp__frame){FSDP__FRAME_ASK, 0, 0, 0}, NULL, 0, NULL);
    fsdp__star_wake(s);
}

/* ---- The table's fail ---- */

static void wait_until_published(fsdp__star *s, uint64_t deadline_ns)
{
    while (atomic_load(&s->status) == FSDP_OK)
        if (!fsdp__cond_until(&s->changed, &s->lock, deadline_ns)) return;
}

static void member_fails(fsdp__star *s, fsdp_status status, const char *sentence)
{
    fsdp__link *hub = &s->links[0];
    if (hub->fd < 0) { /* nobody left to ask */
        fsdp__star_publish(s, status, sentence);
        return;
    }
    bool aborts = status == FSDP_ERR_ABORTED, *sent = aborts ? &s->abort_sent : &s->fail_sent;
    if (*sent) return;
    *sent = true;
    char *kept = s->own_sentence[aborts];
    put_sentence(kept, sizeof s->own_sentence[0], sentence[0] != '\0' ? sentence : "it gave no reason");
    if (!s->failing) {
        s->failing = true;
        s->first_status = status;
        put_sentence(s->first, sizeof s->first, kept);
        s->deadline_ns = fsdp__now_ns() + FSDP__ANSWER_NS;
    }
    fsdp__link_send(s, hub, (fsdp__frame){FSDP__FRAME_FAIL, (uint32_t)status, 0, strlen(kept)}, NULL, 0, kept);
    fsdp__star_wake(s);
}

void fsdp__star_fail(fsdp__star *s, fsdp_status status, const char *sentence)
{
    pthread_mutex_lock(&s->lock);
    if (atomic_load(&s->status) == FSDP_OK) {
        if (fsdp__star_is_hub(s)) fsdp__hub_fails(s, status, sentence);
        else member_fails(s, status, sentence);
        /* An abort waits just so long that on a network that works check fails when this returns. */
        bool own_thread = s->has_thread && pthread_equal(s->thread, pthread_self());
        uint64_t patience_ns = status == FSDP_ERR_ABORTED ? 20 * FSDP__MS : 3 * FSDP__ANSWER_NS;
        if (!own_thread) wait_until_published(s, fsdp__now_ns() + patience_ns);
        /* A hub that is slow or stopped: who aborts says why by itself, before its communicators stop for no reason given. */
        if (status == FSDP_ERR_ABORTED && atomic_load(&s->status) == FSDP_OK) fsdp__star_publish(s, status, sentence);
    }
    pthread_mutex_unlock(&s->lock);
}

/* ---- The thread's part ---- */

static void tell_own_words(fsdp__star *s)
{
    s->words_due = false;
    pthread_mutex_unlock(&s->lock);
    s->words.tell(s->words.arg, s->blobs);
    pthread_mutex_lock(&s->lock);
    if (fsdp__star_is_hub(s)) s->answered[0] = true;
    else fsdp__link_send(s, &s->links[0], (fsdp__frame){FSDP__FRAME_WORDS, 0, 0, s->words.bytes}, NULL, 0, s->blobs);
}

static bool all_answered(const fsdp__star *s)
{
    for (uint32_t r = 1; r < s->world; r++)
        if (s->links[r].fd >= 0 && !s->answered[r]) return false;
    return s->answered[0];
}

static void compose(fsdp__star *s)
{
    for (uint32_t r = 0; r < s->world; r++) s->told_blobs[r] = s->answered[r] ? s->blobs + r * s->words.bytes : NULL;
    s->asking = false; /* what comes now is dropped, so that nobody writes to blobs */
    s->composed[0] = '\0';
    pthread_mutex_unlock(&s->lock);
    s->words.compose(s->words.arg, s->first, s->told_blobs, s->world, s->composed,
                     sizeof s->composed - sizeof s->first);
    pthread_mutex_lock(&s->lock);
    s->composed[sizeof s->composed - sizeof s->first - 1] = 0;
    char whole[FSDP__ERROR_BYTES];
    snprintf(whole, sizeof whole, "%.1023s%s%.7100s", s->first, s->composed[0] != '\0' ? ". " : "", s->composed);
    fsdp__star_publish(s, s->first_status, whole);
}

void fsdp__star_tend(fsdp__star *s)
{
    if (s->closing) return;
    if (s->words_due) tell_own_words(s);
    bool late = s->deadline_ns != 0 && fsdp__now_ns() >= s->deadline_ns;
    if (fsdp__star_is_hub(s) && s->asking) {
        if (late || all_answered(s)) compose(s);
    } else if (late) {
        fsdp__star_publish(s, s->first_status, s->first);
    }
    if (atomic_load(&s->status) != FSDP_OK && !s->told) {
        s->told = true;
        if (s->failed == NULL) return;
        pthread_mutex_unlock(&s->lock);
        s->failed(s->failed_arg);
        pthread_mutex_lock(&s->lock);
    }
}
