/* SPDX-License-Identifier: MIT */
/* Do ranks make the same calls? What each tells of itself when one is late, lost or different, the sentence about it, and
 * the comparison of each call before it runs: of host calls always, of collectives with FSDP_DEBUG_ORDER. */
#ifndef FSDP_LIB_ORDER_H
#define FSDP_LIB_ORDER_H

#include "context.h"

/* ---- order_words.c ---- */

enum { FSDP__ORDER_BLOB_BYTES = 8192 }; /* all that a flight recorder keeps, with names of usual length */

/* For the side channel: from the context's flight recorder, without a lock. It may be asked before its ranks are known. */
fsdp_side_words fsdp__order_words(fsdp_context *ctx);

/* ---- order.c. The side channel's 16-byte blobs and ctx->votes; no memory is taken ---- */

/* All ranks are in the host call `what`, with the same collectives before it, as far as they have got: a rank that lacks
 * some may still make them. Else MISMATCH on every rank. Where the calls differ nothing has happened, and the context goes
 * on; where the collectives do, or a rank is about to enqueue one, it has failed on every rank. */
fsdp_status fsdp__order_agree(fsdp_context *ctx, const char *what);
/* FSDP_DEBUG_ORDER: the same for the group of n that is the newest on the flight recorder, and not yet enqueued; after
 * an error it is not on it. With the context's lock held. */
__attribute__((cold)) fsdp_status fsdp__order_check(fsdp_context *ctx, uint32_t comm, uint32_t n);

/* The flight recorder as a file, with this status. */
fsdp_status fsdp__flight_write(fsdp_context *ctx, const char *path, fsdp_status status, const char *sentence);

#endif
