/* SPDX-License-Identifier: MIT */
#include "order.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "check.h"
#include "hash.h"
#include "side.h"

enum {
    MAX_SAID = 4, /* different texts that a sentence names; the rest is "something else" */
    IS_COLLECTIVE = 1,
    HAS_DEBUG_ORDER = 2
};

/* What this rank is about to do. */
typedef struct subject {
    const char *text;
    uint32_t flags;
    uint32_t comm, n; /* IS_COLLECTIVE: a group of n on this communicator, on the flight recorder and not enqueued */
} subject;

/* 16 bytes of every rank, in ctx->votes. */
typedef struct ballot {
    uint64_t a, b;
} ballot;

_Static_assert(sizeof(ballot) == FSDP__VOTE_BYTES, "a vote");

static fsdp_status gather(fsdp_context *ctx, uint64_t a, uint64_t b)
{
    ballot mine = {a, b};
    return fsdp__side_all_gather(ctx, &mine, ctx->votes, FSDP__VOTE_BYTES);
}

static ballot of_rank(const fsdp_context *ctx, uint32_t r)
{
    ballot b;
    memcpy(&b, ctx->votes + (size_t)r * FSDP__VOTE_BYTES, sizeof b);
    return b;
}

static bool equal(ballot x, ballot y) { return x.a == y.a && x.b == y.b; }

static bool all_equal(const fsdp_context *ctx)
{
    uint32_t r = 1;
    while (r < ctx->world && equal(of_rank(ctx, r), of_rank(ctx, 0))) r++;
    return r >= ctx->world;
}

/* Ranks with the same ballot have the same text: fetch each once, from the lowest rank that has it, and put them together. */
static fsdp_status put_texts(fsdp_context *ctx, const char *mine, char *sentence, size_t bytes)
{
    char text[MAX_SAID + 1][FSDP__SIDE_TEXT_BYTES] = {[MAX_SAID] = "something else"};
    const char *said[FSDP__MAX_WORLD];
    uint32_t first[MAX_SAID], n = 0, world = ctx->world < FSDP__MAX_WORLD ? ctx->world : FSDP__MAX_WORLD;
    for (uint32_t r = 0; r < world; r++) {
        uint32_t k = 0;
        while (k < n && !equal(of_rank(ctx, r), of_rank(ctx, first[k]))) k++;
        if (k == n && n < MAX_SAID) first[n++] = r;
        said[r] = text[k];
    }
    for (uint32_t k = 0; k < n; k++)
        FSDP_TRY(fsdp__side_text(ctx, first[k], mine, text[k])); /* no votes are left now */
    fsdp__put_said(sentence, bytes, said, world);
    return FSDP_OK;
}

/* The hash of what this rank has enqueued on a communicator up to group `number`; 0 where that is no longer known. */
static uint64_t hash_after(const fsdp_context *ctx, uint32_t comm, uint64_t number)
{
    uint64_t hash;
    return fsdp__flight_hash_after(&ctx->flight, comm, number, &hash) ? hash : 0;
}

/* Off the flight recorder again, before anybody is told what each rank did. */
static void forget(fsdp_context *ctx, const subject *mine)
{
    if (mine->flags & IS_COLLECTIVE) fsdp__flight_take_back(&ctx->flight, mine->comm, mine->n);
}

/* On every rank, and on none before all have forgotten. */
static fsdp_status fail_all(fsdp_context *ctx, const subject *mine, const char *sentence)
{
    forget(ctx, mine);
    FSDP_TRY(gather(ctx, 0, 0));
    return fsdp__context_fail_all(ctx, FSDP_ERR_MISMATCH, sentence);
}

/* All ranks are at the same call, and have not the same collectives behind them. That alone is no error: a rank that has
 * found no memory for one may be asking the others what to do. But those that they both have must be the same. */
static fsdp_status compare_histories(fsdp_context *ctx, const subject *mine)
{
    uint64_t n[FSDP__N_COMMS], hash;
    for (uint32_t c = 0; c < FSDP__N_COMMS; c++) fsdp__flight_count(&ctx->flight, c, &n[c], &hash);
    FSDP_TRY(gather(ctx, n[0], n[1]));
    ballot least = of_rank(ctx, 0);
    for (uint32_t r = 1; r < ctx->world; r++) {
        ballot b = of_rank(ctx, r);
        if (b.a < least.a) least.a = b.a;
        if (b.b < least.b) least.b = b.b;
    }
    FSDP_TRY(gather(ctx, hash_after(ctx, 0, least.a), hash_after(ctx, 1, least.b)));
    ballot known = {0, 0};
    bool same = true;
    for (uint32_t r = 0; r < ctx->world; r++) {
        ballot b = of_rank(ctx, r);
        if (known.a == 0) known.a = b.a;
        if (known.b == 0) known.b = b.b;
        same &= (b.a == 0 || b.a == known.a) && (b.b == 0 || b.b == known.b);
    }
    if (same) return FSDP_OK;
    char sentence[FSDP__SENTENCE_BYTES];
    snprintf(sentence, sizeof sentence, "%.400s: ranks have enqueued different collectives before it", mine->text);
    return fail_all(ctx, mine, sentence);
}

/* With the flags of all ranks in ctx->votes: some have FSDP_DEBUG_ORDER and some have not. */
static void put_debug(const fsdp_context *ctx, char *sentence, size_t bytes)
{
    bool in[FSDP__MAX_WORLD] = {false};
    uint32_t world = ctx->world < FSDP__MAX_WORLD ? ctx->world : FSDP__MAX_WORLD;
    for (uint32_t r = 0; r < world; r++) in[r] = of_rank(ctx, r).b & HAS_DEBUG_ORDER;
    size_t at = (size_t)snprintf(sentence, bytes, "fsdp_config.debug has FSDP_DEBUG_ORDER on ");
    at += fsdp__put_ranks(sentence + at, bytes - at, in, world);
    snprintf(sentence + at, bytes - at, " of %" PRIu32 " only: set it on every rank, or on none", ctx->world);
}

/* Some rank's ballot is another one: on every rank, find out why. */
static fsdp_status explain_difference(fsdp_context *ctx, const subject *mine)
{
    FSDP_TRY(gather(ctx, fsdp__hash_text(mine->text), mine->flags));
    if (all_equal(ctx)) return compare_histories(ctx, mine);
    uint64_t some = 0, every = UINT64_MAX;
    for (uint32_t r = 0; r < ctx->world; r++) some |= of_rank(ctx, r).b, every &= of_rank(ctx, r).b;
    char sentence[2048];
    size_t at = 0;
    if ((some & HAS_DEBUG_ORDER) != (every & HAS_DEBUG_ORDER)) {
        put_debug(ctx, sentence, sizeof sentence);
    } else {
        at = (size_t)snprintf(sentence, sizeof sentence, "ranks called different things: ");
        FSDP_TRY(put_texts(ctx, mine->text, sentence + at, sizeof sentence - 128 - at));
        at = strlen(sentence);
        snprintf(sentence + at, sizeof sentence - at, ". Nothing was %s: make the same call on every rank",
                 some & IS_COLLECTIVE ? "enqueued" : "done");
    }
    if (some & IS_COLLECTIVE) return fail_all(ctx, mine, sentence);
    return fsdp__fail(FSDP_ERR_MISMATCH, "%s", sentence);
}

fsdp_status fsdp__order_agree(fsdp_context *ctx, const char *what)
{
    uint64_t h = fsdp__flight_fold(&ctx->flight, fsdp__hash_text(what));
    subject mine = {.text = what, .flags = ctx->debug & FSDP_DEBUG_ORDER ? HAS_DEBUG_ORDER : 0};
    fsdp_status status = gather(ctx, h, mine.flags);
    if (status != FSDP_OK) return fsdp__fail(status, "%s: %s", what, fsdp_last_error());
    return all_equal(ctx) ? FSDP_OK : explain_difference(ctx, &mine);
}

/* One part of the group, which is `entry` on the flight recorder. */
static fsdp_status check_part(fsdp_context *ctx, uint32_t comm, const fsdp__flight_entry *entry)
{
    char text[256];
    subject mine = {text, IS_COLLECTIVE | HAS_DEBUG_ORDER, comm, entry->call.n_parts};
    fsdp_status status = gather(ctx, fsdp__mix(entry->rolling ^ comm), entry->call.number << 2 | mine.flags);
    if (status == FSDP_OK && all_equal(ctx)) return FSDP_OK;
    fsdp__call_describe(&entry->call, text, sizeof text);
    if (comm > 0) strncat(text, " on communicator 1", sizeof text - strlen(text) - 1);
    return status == FSDP_OK ? explain_difference(ctx, &mine) : fsdp__fail(status, "%s: %s", text, fsdp_last_error());
}

fsdp_status fsdp__order_check(fsdp_context *ctx, uint32_t comm, uint32_t n)
{
    if (ctx->world == 1) return FSDP_OK;
    uint64_t number, hash, end = atomic_load(&ctx->flight.n);
    fsdp__flight_count(&ctx->flight, comm, &number, &hash);
    if (ctx->compared_number[comm] == number && ctx->compared_hash[comm] == hash) return FSDP_OK;
    fsdp_status status = FSDP_OK;
    atomic_store(&ctx->comparing, true);
    for (uint32_t i = 0; i < n && status == FSDP_OK; i++) {
        fsdp__flight_entry entry;
        if (fsdp__flight_read(&ctx->flight, end - n + i, &entry)) status = check_part(ctx, comm, &entry);
    }
    atomic_store(&ctx->comparing, false);
    if (status == FSDP_OK) {
        ctx->compared_number[comm] = number;
        ctx->compared_hash[comm] = hash;
        return FSDP_OK;
    }
    /* It may still be there: somebody else can have failed while this rank was asking. Then to the file, which has waited. */
    if (atomic_load(&ctx->flight.n) == end) fsdp__flight_take_back(&ctx->flight, comm, n);
    char sentence[FSDP__ERROR_BYTES];
    snprintf(sentence, sizeof sentence, "%s", fsdp_last_error());
    FSDP_IGNORE(fsdp__context_check(ctx));
    return fsdp__fail(status, "%s", sentence);
}
