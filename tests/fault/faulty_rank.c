/* SPDX-License-Identifier: MIT */
/* See faulty_rank.h: calling, meeting, opening, closing. The journey itself is in faulty_journey.c. */
#include "faulty_rank.h"

#include <stdio.h>
#include <string.h>

#include "faulty_journey.h"
#include "sharding/model.h"

/* ---- Meeting ---- */

void meeting_init(meeting *m)
{
    *m = (meeting){.ok = true};
    pthread_mutex_init(&m->lock, NULL);
    pthread_cond_init(&m->cond, NULL);
}

void meeting_fini(meeting *m)
{
    pthread_cond_destroy(&m->cond);
    pthread_mutex_destroy(&m->lock);
}

static void end_round(meeting *m)
{
    m->last_ok = m->ok, m->last_apart = m->apart;
    m->n_here = 0, m->ok = true, m->apart = false;
    m->round++;
    pthread_cond_broadcast(&m->cond);
}

verdict rank_meet(rank *r, bool ok, uint64_t key)
{
    meeting *m = r->meeting;
    pthread_mutex_lock(&m->lock);
    uint64_t round = m->round;
    if (m->n_here > 0 && m->key != key) m->apart = true;
    m->key = key;
    m->ok &= ok;
    if (++m->n_here == RANKS) end_round(m);
    while (m->round == round && m->n_left == 0) pthread_cond_wait(&m->cond, &m->lock);
    verdict v = m->round == round || m->last_apart ? APART : m->last_ok ? ALL_OK : SOME_FAILED;
    pthread_mutex_unlock(&m->lock);
    if (v == APART) r->left = true;
    return v;
}

static void leave(meeting *m)
{
    pthread_mutex_lock(&m->lock);
    m->n_left++;
    pthread_cond_broadcast(&m->cond);
    pthread_mutex_unlock(&m->lock);
}

/* ---- Calling ---- */

void rank_complain(rank *r, const char *what, const char *why)
{
    if (r->complaint[0] == 0) snprintf(r->complaint, sizeof r->complaint, "rank %u: %s: %s", r->number, what, why);
}

bool rank_alive(rank *r) { return r->ctx != NULL && fsdp_context_check(r->ctx) == FSDP_OK; }

bool rank_calls_again(rank *r, fsdp_status status, const char *call)
{
    if (fsdp_last_error()[0] == 0) rank_complain(r, call, "an error without a sentence");
    bool first = r->n_errors++ == 0;
    if (first) {
        r->status = status;
        r->call = call;
        snprintf(r->said, sizeof r->said, "%s", fsdp_last_error());
    }
    bool unchanged = rank_alive(r) && (r->model == NULL || r->model->failed == FSDP_OK);
    if (first) r->unchanged = unchanged;
    return r->stubborn && r->n_retries++ < 8 && unchanged;
}

void rank_value(rank *r, uint64_t value)
{
    if (r->n_values < MAX_VALUES) r->value[r->n_values++] = value;
    else rank_complain(r, "values", "more than there is room for");
}

void rank_float(rank *r, float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    rank_value(r, bits);
}

/* ---- From beginning to end ---- */

static fsdp_status open_context(rank *r)
{
    fsdp_config config = FSDP_CONFIG_INIT;
    config.backend = faulty_backend();
    config.backend_config = &r->f;
    config.timeout_ns = r->timeout_ns;
    config.host = faulty_host(&r->f);
    config.reduce_comm = r->reduce_comm;
    config.debug = r->debug;
    return fsdp_context_create(&config, &r->ctx);
}

/* A context that could not be opened is not asked for again: others may have it already, and wait there. */
static fsdp_status open_rank(rank *r)
{
    fsdp_status status = open_context(r);
    if (status != FSDP_OK) (void)rank_calls_again(r, status, "fsdp_context_create");
    if (rank_meet(r, status == FSDP_OK, 0) != ALL_OK) {
        r->left = true;
        return status != FSDP_OK ? status : FSDP_ERR_ABORTED;
    }
    CALL(r, fsdp_stream_create(r->ctx, "compute", &r->s));
    CALL(r, fsdp_stream_create(r->ctx, "second", &r->second));
    CALL(r, fsdp_event_create(r->ctx, &r->event));
    CALL(r, fsdp_allocator_create(r->ctx, NULL, &r->pool));
    CALL(r, fsdp_allocator_alloc(r->pool, 4096, r->s, "buffer", &r->buffer));
    return FSDP_OK;
}

/* Each of these must work, whatever has happened. */
static void must(rank *r, fsdp_status status, const char *call)
{
    if (status != FSDP_OK) rank_complain(r, call, fsdp_last_error());
}

static void close_rank(rank *r)
{
    if (!r->finished && r->aborts) fsdp_context_abort(r->ctx, r->said);
    fsdp_work_release(r->work);
    fsdp_event_destroy(r->event);
    must(r, fsdp_model_destroy(r->model), "fsdp_model_destroy");
    if (r->buffer != NULL) must(r, fsdp_allocator_free(r->pool, r->buffer), "fsdp_allocator_free");
    must(r, fsdp_allocator_destroy(r->pool), "fsdp_allocator_destroy");
    must(r, fsdp_stream_release(r->second), "fsdp_stream_release");
    must(r, fsdp_stream_release(r->s), "fsdp_stream_release");
    must(r, fsdp_context_destroy(r->ctx), "fsdp_context_destroy");
}

void rank_journey(rank *r)
{
    fsdp_status status = open_rank(r);
    if (status == FSDP_OK) status = faulty_journey(r);
    r->finished = status == FSDP_OK;
    if (!r->finished && !r->left && r->n_errors == 0) rank_complain(r, "the journey", "ended without an error");
    close_rank(r);
    leave(r->meeting);
}
