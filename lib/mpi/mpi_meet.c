/* SPDX-License-Identifier: MIT */
/* The meeting before each operation: every rank tells rank 0 what it brings, rank 0 compares and answers. Two messages one
 * after the other, and rank 0 knows at any time who is missing. */
#include <stddef.h>
#include <stdio.h>

#include "mpi_backend.h"

enum { SLICE_NS = 10000000, ANSWER_NS = 300000000, CLOSING_NS = 1000000000, ABANDON_NS = 20000000 };

static uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }

/* ---- Requests ---- */

fsdp_status fsdp__mpi_wait(fsdp__mpi_comm *c, MPI_Request *requests, uint32_t n, uint64_t deadline_ns, bool *out_done)
{
    fsdp__mpi_engine *engine = &c->dev->engine;
    fsdp__mpi_pace pace = fsdp__mpi_pace_begin();
    *out_done = false;
    for (;;) {
        int n_done = MPI_UNDEFINED;
        fsdp__mpi_enter(engine);
        int code = MPI_Testsome((int)n, requests, &n_done, c->indices, MPI_STATUSES_IGNORE);
        fsdp__mpi_leave(engine);
        if (code != MPI_SUCCESS) {
            (void)fsdp__mpi_fail("communicator", code);
            return fsdp__mpi_comm_fail(c, FSDP_ERR_RANK_LOST, "rank %u: %.600s", c->rank, fsdp_last_error());
        }
        if (n_done == MPI_UNDEFINED) break;
        if (n_done > 0) {
            pace = fsdp__mpi_pace_begin();
            continue;
        }
        FSDP_TRY(fsdp__mpi_comm_check(c));
        if (fsdp__now_ns() >= deadline_ns) return FSDP_OK;
        fsdp__mpi_rest(&pace);
    }
    *out_done = true;
    return FSDP_OK;
}

/* A receive that has not begun can be taken back. A send cannot, and nor can what is under way. */
void fsdp__mpi_abandon(fsdp__mpi_comm *c, uint32_t n_sets)
{
    fsdp__mpi_engine *engine = &c->dev->engine;
    uint64_t deadline_ns = fsdp__after_ns(ABANDON_NS);
    uint32_t set = 2 * c->world, n = n_sets * set;
    fsdp__mpi_pace pace = fsdp__mpi_pace_begin();
    int done = 0, code;
    fsdp__mpi_enter(engine);
    for (uint32_t i = 0; i < n; i++)
        if (i % set < c->world && c->requests[i] != MPI_REQUEST_NULL) MPI_Cancel(&c->requests[i]);
    fsdp__mpi_leave(engine);
    do {
        fsdp__mpi_enter(engine);
        code = MPI_Testall((int)n, c->requests, &done, MPI_STATUSES_IGNORE);
        fsdp__mpi_leave(engine);
        if (code == MPI_SUCCESS && done) return;
        fsdp__mpi_rest(&pace);
    } while (code == MPI_SUCCESS && fsdp__now_ns() < deadline_ns);
    c->left = true;
    atomic_store(&c->dev->stuck, true);
}

static void post_receive(fsdp__mpi_comm *c, void *to, size_t bytes, uint32_t from, int tag, MPI_Request *request)
{
    fsdp__mpi_enter(&c->dev->engine);
    MPI_Irecv(to, (int)bytes, MPI_BYTE, (int)from, tag, c->mpi, request);
    fsdp__mpi_leave(&c->dev->engine);
}

static void post_send(fsdp__mpi_comm *c, const void *from, size_t bytes, uint32_t to, int tag, MPI_Request *request)
{
    fsdp__mpi_enter(&c->dev->engine);
    MPI_Isend(from, (int)bytes, MPI_BYTE, (int)to, tag, c->mpi, request);
    fsdp__mpi_leave(&c->dev->engine);
}

/* ---- Sentences ---- */

/* The ranks in c->missing are to blame. */
static fsdp_status lose(fsdp__mpi_comm *c, const char *how)
{
    char what[400], names[320];
    fsdp__call_describe(&c->mine.record[0], what, sizeof what);
    fsdp__put_ranks(names, sizeof names, c->missing, c->world);
    return fsdp__mpi_comm_fail(c, FSDP_ERR_RANK_LOST, "%s: %s of %u %s", what, names, c->world, how);
}

static fsdp_status lose_late(fsdp__mpi_comm *c)
{
    char how[64];
    snprintf(how, sizeof how, "did not come within %.3f s", (double)c->timeout_ns * 1e-9);
    return lose(c, how);
}

static bool has_come(const fsdp__mpi_comm *c, uint32_t rank)
{
    return rank == 0 || c->requests[rank] == MPI_REQUEST_NULL;
}

/* The first call that is not the same in all groups that have come; FSDP__MPI_RECORDS if it is one of those that are not
 * named. How many calls a group has is part of each call's hash. */
static uint32_t first_difference(const fsdp__mpi_comm *c)
{
    uint32_t place = 0;
    for (; place < FSDP__MPI_RECORDS; place++)
        for (uint32_t r = 1; r < c->world; r++)
            if (has_come(c, r) && c->brought[r].record[place].hash != c->mine.record[place].hash) return place;
    return place;
}

static fsdp_status differ(fsdp__mpi_comm *c)
{
    const char *said[FSDP__MAX_WORLD];
    char text[FSDP__SENTENCE_BYTES];
    uint32_t place = first_difference(c);
    for (uint32_t r = 0; r < c->world; r++) {
        const fsdp__mpi_brought *theirs = r == 0 ? &c->mine : &c->brought[r];
        said[r] = has_come(c, r) ? c->words[r] : NULL;
        if (place < FSDP__MPI_RECORDS) fsdp__call_describe(&theirs->record[place], c->words[r], sizeof c->words[r]);
        else
            snprintf(c->words[r], sizeof c->words[r], "#%llu, calls after %d of a group, hash %llx",
                     (unsigned long long)theirs->number, FSDP__MPI_RECORDS, (unsigned long long)theirs->hash);
    }
    fsdp__put_said(text, sizeof text, said, c->world);
    return fsdp__mpi_comm_fail(c, FSDP_ERR_MISMATCH, "%s", text);
}

/* ---- Rank 0 ---- */

/* What those who have come brought: with a rank that closes, or with different calls, nobody need wait for the rest. */
static fsdp_status judge(fsdp__mpi_comm *c)
{
    bool closes = false, differs = false;
    for (uint32_t r = 0; r < c->world; r++) {
        bool has = r > 0 && has_come(c, r);
        c->missing[r] = has && c->brought[r].hash == 0;
        closes = closes || c->missing[r];
        differs = differs || (has && c->brought[r].hash != c->mine.hash);
    }
    if (closes) return lose(c, "closed before it came");
    return differs ? differ(c) : FSDP_OK;
}

/* A rank whose patience is over before ours is: it came first. */
static bool is_asked(fsdp__mpi_comm *c)
{
    fsdp__mpi_engine *engine = &c->dev->engine;
    uint64_t number = 0;
    int asked = 0;
    MPI_Status status;
    fsdp__mpi_enter(engine);
    int code = MPI_Iprobe(MPI_ANY_SOURCE, FSDP__MPI_TAG_ASK, c->mpi, &asked, &status);
    if (code == MPI_SUCCESS && asked)
        MPI_Recv(&number, sizeof number, MPI_BYTE, status.MPI_SOURCE, FSDP__MPI_TAG_ASK, c->mpi, MPI_STATUS_IGNORE);
    fsdp__mpi_leave(engine);
    return number == c->mine.number; /* not about an earlier one, which came to its end after all */
}

static void post_brought(fsdp__mpi_comm *c)
{
    for (uint32_t r = 1; r < c->world; r++)
        post_receive(c, &c->brought[r], sizeof c->brought[r], r, FSDP__MPI_TAG_BROUGHT, &c->requests[r]);
}

static fsdp_status wait_for_all(fsdp__mpi_comm *c)
{
    uint64_t deadline_ns = fsdp__after_ns(c->timeout_ns);
    for (;;) {
        bool all = false;
        uint64_t slice_ns = least(deadline_ns, fsdp__after_ns(SLICE_NS));
        FSDP_TRY(fsdp__mpi_wait(c, c->requests, c->world, slice_ns, &all));
        FSDP_TRY(judge(c));
        if (all) return FSDP_OK;
        if (fsdp__now_ns() < deadline_ns && !is_asked(c)) continue;
        for (uint32_t r = 0; r < c->world; r++) c->missing[r] = !has_come(c, r);
        return lose_late(c);
    }
}

static fsdp_status answer_all(fsdp__mpi_comm *c)
{
    bool done;
    for (uint32_t r = 1; r < c->world; r++)
        post_send(c, &c->answer, sizeof c->answer, r, FSDP__MPI_TAG_ANSWER, &c->requests[c->world + r]);
    FSDP_TRY(fsdp__mpi_wait(c, c->requests, 2 * c->world, fsdp__after_ns(c->timeout_ns), &done));
    if (done) return FSDP_OK;
    for (uint32_t r = 0; r < c->world; r++) c->missing[r] = c->requests[c->world + r] != MPI_REQUEST_NULL;
    return lose_late(c);
}

static fsdp_status meet_as_hub(fsdp__mpi_comm *c)
{
    post_brought(c);
    FSDP_TRY(wait_for_all(c));
    c->answer = (fsdp__mpi_answer){c->mine.number, 0};
    return answer_all(c);
}

/* ---- The others ---- */

static size_t brought_bytes(const fsdp__mpi_comm *c)
{
    return offsetof(fsdp__mpi_brought, record) + c->mine.n_records * sizeof *c->mine.record;
}

static void tell_hub(fsdp__mpi_comm *c)
{
    post_receive(c, &c->answer, sizeof c->answer, 0, FSDP__MPI_TAG_ANSWER, &c->requests[0]);
    post_send(c, &c->mine, brought_bytes(c), 0, FSDP__MPI_TAG_BROUGHT, &c->requests[c->world]);
}

static fsdp_status meet_as_other(fsdp__mpi_comm *c)
{
    bool done;
    tell_hub(c);
    FSDP_TRY(fsdp__mpi_wait(c, c->requests, 2 * c->world, fsdp__after_ns(c->timeout_ns), &done));
    if (!done) {
        /* If rank 0 is there it knows who is missing, and says so on the side channel; else it is missing itself. */
        post_send(c, &c->mine.number, sizeof c->mine.number, 0, FSDP__MPI_TAG_ASK, &c->requests[c->world + 1]);
        FSDP_TRY(fsdp__mpi_wait(c, c->requests, 2 * c->world, fsdp__after_ns(ANSWER_NS), &done));
    }
    for (uint32_t r = 0; r < c->world; r++) c->missing[r] = r == 0;
    if (!done) return lose_late(c);
    return c->answer.closed ? lose(c, "closed before it came") : FSDP_OK;
}

fsdp_status fsdp__mpi_meet(fsdp__mpi_comm *c)
{
    if (c->world == 1) return FSDP_OK;
    fsdp_status status = c->rank == 0 ? meet_as_hub(c) : meet_as_other(c);
    if (status != FSDP_OK) {
        char sentence[FSDP__ERROR_BYTES];
        snprintf(sentence, sizeof sentence, "%s", fsdp_last_error());
        fsdp__mpi_abandon(c, 1);
        return fsdp__fail(status, "%s", sentence);
    }
    return FSDP_OK;
}

/* Each says that it closes and waits a little for the others; whoever comes with an operation instead learns it. */
bool fsdp__mpi_meet_closing(fsdp__mpi_comm *c)
{
    bool closes = true;
    c->mine = (fsdp__mpi_brought){.number = c->n_enqueued + 1};
    c->answer = (fsdp__mpi_answer){c->mine.number, 1};
    if (c->world == 1) return true;
    if (c->rank == 0) {
        post_brought(c);
        for (uint32_t r = 1; r < c->world; r++)
            post_send(c, &c->answer, sizeof c->answer, r, FSDP__MPI_TAG_ANSWER, &c->requests[c->world + r]);
    } else {
        tell_hub(c);
    }
    uint32_t n = 2 * c->world;
    if (fsdp__mpi_wait(c, c->requests, n, fsdp__after_ns(CLOSING_NS), &closes) != FSDP_OK) closes = false;
    if (!closes) fsdp__mpi_abandon(c, 1);
    for (uint32_t r = 1; c->rank == 0 && closes && r < c->world; r++) closes = c->brought[r].hash == 0;
    return closes && c->answer.closed;
}
