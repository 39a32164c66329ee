/* SPDX-License-Identifier: MIT */
/* A judge of races who knows nothing of the library's clocks: he reads a tape and asks of every two touches of the same
 * bytes whether anything orders them.
 *
 * A record is a point on its stream, a stream runs its records in host order, and a slot that is given to another
 * stream goes on as the same line. A WAIT comes after the last EVENT record of its event before it on the tape; without
 * one it orders nothing; a HOST record is such a wait of every stream. There are no other edges: not time, not other ranks.
 * OPERATION and USE records touch their ranges. A window's two USE records stand for everything between them, since
 * both are on one stream: whoever comes after the close or before the open is clear of what lies between.
 * A race is two records of different streams, overlapping bytes, a write among them, and no path between the two. */
#ifndef HB_ORACLE_H
#define HB_ORACLE_H

#include <stddef.h>

#include "fsdp/trace.h"

/* How many records race with an earlier one. text (may be NULL): a sentence on the first of them and the latest record
 * that it races with, "records 3 and 7 race: …"; "" if there is none.
 * SIZE_MAX: the tape cannot be judged (records were dropped, no memory); text says why. */
size_t hb_check(const fsdp_trace *trace, char *text, size_t text_bytes);

#endif
