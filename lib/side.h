/* SPDX-License-Identifier: MIT */
/* The side channel: small blobs between ranks, beside the collectives. Blocks the host; never called inside a step. */
#ifndef FSDP_LIB_SIDE_H
#define FSDP_LIB_SIDE_H

#include "context.h"

/* all[r * bytes …] = rank r's blob, on every rank, within the context's deadline. With the context's lock or without. */
fsdp_status fsdp__side_all_gather(fsdp_context *ctx, const void *mine, void *all, size_t bytes);
enum { FSDP__SIDE_TEXT_BYTES = 1024 };

/* Rank root's text, cut to FSDP__SIDE_TEXT_BYTES with its end, on every rank. Takes no memory; in pieces, for errors. */
fsdp_status fsdp__side_text(fsdp_context *ctx, uint32_t root, const char *mine, char *out_text);
/* Every collective host call begins so: all ranks are in `what` (a call and its arguments, up to 1,000 bytes), or all get
 * MISMATCH with their texts, and nothing else has happened (order.h). Takes no memory. The flight recorder has the call as
 * the one that this rank is inside of, until it fails here or ends. */
fsdp_status fsdp__side_agree(fsdp_context *ctx, const char *what);
/* And ends so: returns status. */
fsdp_status fsdp__side_end(fsdp_context *ctx, fsdp_status status);
/* The vote: FSDP_OK if every rank brings FSDP_OK; else, on every rank, the code and sentence of the lowest rank that
 * failed, with its number. `mine` with its sentence in fsdp_last_error(). */
fsdp_status fsdp__side_vote(fsdp_context *ctx, fsdp_status mine, const char *what);

#endif
