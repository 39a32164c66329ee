/* SPDX-License-Identifier: MIT */
/* The allocator in words: who holds what, and what would have fitted. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "alloc.h"
#include "check.h"
#include "context.h"

enum { MOST_OWNERS = 12, LINE_BYTES = 192 };

/* The stream that a live block was taken for; its slot may have another owner by now. */
static const char *holder(const fsdp_allocator *a, const fsdp__block *block)
{
    const fsdp_stream *s = a->ctx->clocks.stream[block->slot];
    return s != NULL && block->taken > s->first_fence ? s->name : "a released stream";
}

static bool append(char *text, size_t text_bytes, const char *format, ...) __attribute__((format(printf, 3, 4)));
static bool append(char *text, size_t text_bytes, const char *format, ...)
{
    size_t used = strlen(text);
    if (used + LINE_BYTES > text_bytes) return false; /* whole lines only */
    va_list args;
    va_start(args, format);
    vsnprintf(text + used, text_bytes - used, format, args);
    va_end(args);
    return true;
}

/* What one owner holds. */
typedef struct holding {
    const char *owner;
    uint64_t bytes, n;
} holding;

/* By bytes, most first; what does not fit is summed up in the last. Returns how many. */
static int list_owners(const fsdp_allocator *a, holding *list)
{
    int n = 0;
    for (size_t i = 0; i < a->ranges.n_segments; i++) {
        for (const fsdp__block *b = a->ranges.segments[i].first; b != NULL; b = b->after) {
            if (!b->live) continue;
            int k = 0;
            while (k < n && strcmp(list[k].owner, b->owner) != 0) k++;
            if (k == n && n < MOST_OWNERS) list[n++] = (holding){b->owner, 0, 0};
            if (k == MOST_OWNERS) list[k = MOST_OWNERS - 1].owner = "others";
            list[k].bytes += b->bytes;
            list[k].n++;
        }
    }
    for (int i = 1; i < n; i++)
        for (int k = i; k > 0 && list[k].bytes > list[k - 1].bytes; k--) {
            holding swap = list[k];
            list[k] = list[k - 1];
            list[k - 1] = swap;
        }
    return n;
}

void fsdp__allocator_describe(const fsdp_allocator *a, char *text, size_t text_bytes)
{
    holding list[MOST_OWNERS];
    int n = list_owners(a, list);
    for (int i = 0; i < n; i++)
        append(text, text_bytes, "\n  %s%.64s%s holds %llu bytes in %llu block%s",
               list[i].owner[0] ? "'" : "nobody named", list[i].owner, list[i].owner[0] ? "'" : "",
               (unsigned long long)list[i].bytes, (unsigned long long)list[i].n, list[i].n == 1 ? "" : "s");
    for (size_t i = 0; i < a->ranges.n_segments; i++) {
        const fsdp__segment *seg = &a->ranges.segments[i];
        if (a->ranges.n_segments > 1 && seg->bytes > 0)
            append(text, text_bytes, "\n  segment %zu, %llu bytes:", i, (unsigned long long)seg->bytes);
        for (const fsdp__block *b = seg->first; b != NULL; b = (b->live ? b : b->last)->after) {
            char what[128] = "free";
            if (b->live)
                snprintf(what, sizeof what, "live %.64s%son %s", b->owner, b->owner[0] ? " " : "", holder(a, b));
            if (!append(text, text_bytes, "\n  at %12llu  %12llu bytes  %s",
                        (unsigned long long)(b->begin - seg->begin),
                        (unsigned long long)(b->live ? b->bytes : b->range_bytes), what))
                return;
        }
    }
}

uint64_t fsdp__allocator_largest(const fsdp_allocator *a)
{
    uint64_t largest = 0;
    for (fsdp__block *r = fsdp__ranges_best(&a->ranges, 1); r != NULL; r = fsdp__ranges_next(&a->ranges, r))
        largest = r->range_bytes;
    return largest;
}

fsdp_status fsdp__allocator_fail(fsdp_allocator *a, uint64_t bytes, uint64_t room, const char *owner, const char *why)
{
    const fsdp_alloc_stats *st = &a->stats;
    uint64_t largest = fsdp__allocator_largest(a), idle = 0;
    for (uint32_t i = 0; i < a->ranges.n_segments; i++)
        if (a->ranges.segments[i].bytes > 0 && fsdp__ranges_is_free(&a->ranges, i)) idle += a->ranges.segments[i].bytes;
    fsdp__allocator_note(a, FSDP__ALLOC_EVENT_OUT_OF_MEMORY, NULL, bytes, owner);
    char text[6144] = "";
    fsdp__allocator_describe(a, text, sizeof text);
    return fsdp__fail(FSDP_ERR_NO_MEMORY,
                      "allocator %s: no room for %llu bytes%s%.64s: %llu of %llu reserved bytes are live, the largest "
                      "free range has %llu, and %s: at most %llu would have fitted. Free something, ask for less, or "
                      "call fsdp_allocator_trim_host: %llu bytes are in wholly free segments%s",
                      a->name, (unsigned long long)bytes, owner[0] ? " for " : "", owner,
                      (unsigned long long)st->allocated, (unsigned long long)st->reserved, (unsigned long long)largest,
                      why, (unsigned long long)(largest > room ? largest : room), (unsigned long long)idle, text);
}
