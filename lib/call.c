/* SPDX-License-Identifier: MIT */
#include "call.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "hash.h"

static const char *kind_name(unsigned kind)
{
    switch (kind) {
    case FSDP_OPERATION_ALL_GATHER: return "all-gather";
    case FSDP_OPERATION_REDUCE_SCATTER: return "reduce-scatter";
    case FSDP_OPERATION_ALL_REDUCE: return "all-reduce";
    case FSDP_OPERATION_BROADCAST: return "broadcast";
    case FSDP_OPERATION_BARRIER: return "barrier";
    case FSDP_OPERATION_CAPTURE: return "begin of a capture";
    case FSDP_OPERATION_REPLAY: return "replay of a capture";
    default: return "?";
    }
}

/* Into zeros. Cut between characters, so that a long name in UTF-8 stays text. */
static void put_cut(char *to, size_t bytes, const char *name)
{
    size_t length = bytes - 1;
    while (length > 0 && ((unsigned char)name[length] & 0xc0) == 0x80) length--;
    memcpy(to, name, length);
}

/* Every collective of a step comes by here: eight bytes at a time. */
static uint64_t add_number(uint64_t h, uint64_t number)
{
    h = (h ^ number) * 0x9fb21c651e98df25ull;
    return h ^ h >> 32;
}

static uint64_t byte_at(const char *name, size_t i) { return (uint64_t)(unsigned char)name[i] << 8 * i; }

/* The last bytes of a name, less than eight, the first lowest. Reads that overlap agree where they do. */
static uint64_t rest_of(const char *name, size_t n)
{
    if (n == 0) return 0;
    if (n < 4) return byte_at(name, 0) | byte_at(name, n / 2) | byte_at(name, n - 1);
    uint32_t low, high;
    memcpy(&low, name, sizeof low);
    memcpy(&high, name + n - sizeof high, sizeof high);
    return low | (uint64_t)high << 8 * (n - sizeof high);
}

/* h with the name in it, which goes to `to`, into zeros: of as many bytes, a multiple of eight. Once in the code: hooks find it
 * out of the cache. */
static __attribute__((noinline)) uint64_t put_name(uint64_t h, char *to, size_t bytes, const char *name)
{
    const size_t length = strlen(name);
    const bool fits = length < bytes;
    size_t at = 0;
    uint64_t word;
    for (h = add_number(h, length); length - at >= sizeof word; at += sizeof word) {
        memcpy(&word, name + at, sizeof word);
        if (fits) memcpy(to + at, &word, sizeof word);
        h = add_number(h, word);
    }
    word = rest_of(name + at, length - at);
    if (fits) memcpy(to + at, &word, sizeof word);
    else put_cut(to, bytes, name);
    return add_number(h, word);
}

void fsdp__call_fill(fsdp__call *call, const fsdp_collective *c, uint64_t number, uint32_t part, uint32_t n_parts)
{
    const char *label = c->label != NULL ? c->label : "", *pass = c->pass != NULL ? c->pass : "";
    call->number = number; /* member by member: compilers zero a whole struct by a slow instruction */
    call->count = c->count;
    call->root = c->kind == FSDP_OPERATION_BROADCAST ? c->root : 0;
    call->kind = (uint8_t)c->kind;
    call->dtype = (uint8_t)c->dtype;
    call->part = (uint8_t)part;
    call->n_parts = (uint8_t)n_parts;
    memset(call->label, 0, sizeof call->label);
    memset(call->pass, 0, sizeof call->pass);
    uint64_t h = add_number(FSDP__HASH_SEED, c->count);
    h = add_number(h, (uint64_t)call->root << 32 | (uint64_t)call->kind << 24 | (uint64_t)call->dtype << 16 |
                          (uint64_t)call->part << 8 | call->n_parts);
    h = put_name(h, call->label, sizeof call->label, label);
    call->hash = fsdp__mix(put_name(h, call->pass, sizeof call->pass, pass));
}

void fsdp__call_describe(const fsdp__call *call, char *text, size_t bytes)
{
    char part[32] = "", root[32] = "", data[96] = "";
    if (call->n_parts > 1) snprintf(part, sizeof part, ", %u of %u:", call->part + 1u, call->n_parts);
    if (call->kind == FSDP_OPERATION_BROADCAST) snprintf(root, sizeof root, " from rank %" PRIu32, call->root);
    bool moves = call->kind != FSDP_OPERATION_BARRIER && call->kind != FSDP_OPERATION_CAPTURE &&
                 call->kind != FSDP_OPERATION_REPLAY;
    if (moves)
        snprintf(data, sizeof data, " (%" PRIu64 " %s%s)", call->count, fsdp_dtype_name((fsdp_dtype)call->dtype), root);
    snprintf(text, bytes, "#%" PRIu64 "%s %s%s%s%s%s%s", call->number, part, kind_name(call->kind),
             call->label[0] != 0 ? " of " : "", call->label, call->pass[0] != 0 ? " in " : "", call->pass, data);
}

void fsdp__put(char *text, size_t bytes, size_t *at, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int n = vsnprintf(text + *at, bytes - *at, format, args);
    va_end(args);
    if (n > 0) *at = *at + (size_t)n < bytes ? *at + (size_t)n : bytes - 1;
}

size_t fsdp__put_ranks(char *text, size_t bytes, const bool *in, uint32_t world)
{
    uint32_t n = 0;
    size_t at = 0;
    for (uint32_t r = 0; r < world; r++) n += in[r];
    fsdp__put(text, bytes, &at, n == 1 ? "rank" : "ranks");
    const char *comma = " ";
    for (uint32_t r = 0; r < world; r++) {
        if (!in[r]) continue;
        uint32_t last = r;
        while (last + 1 < world && in[last + 1]) last++;
        if (last >= r + 2) {
            fsdp__put(text, bytes, &at, "%s%" PRIu32 " to %" PRIu32, comma, r, last);
            r = last;
        } else {
            fsdp__put(text, bytes, &at, "%s%" PRIu32, comma, r);
        }
        comma = ", ";
    }
    return at;
}

void fsdp__put_said(char *text, size_t bytes, const char *const *said, uint32_t world)
{
    size_t at = 0;
    text[0] = '\0';
    for (uint32_t first = 0; first < world; first++) {
        bool same[FSDP__MAX_WORLD] = {false}, told = said[first] == NULL;
        for (uint32_t r = 0; r < first && !told; r++) told = said[r] != NULL && strcmp(said[r], said[first]) == 0;
        if (told) continue;
        for (uint32_t r = first; r < world; r++) same[r] = said[r] != NULL && strcmp(said[r], said[first]) == 0;
        if (at > 0) fsdp__put(text, bytes, &at, "; ");
        if (at + 1 < bytes) at += fsdp__put_ranks(text + at, bytes - at, same, world);
        fsdp__put(text, bytes, &at, ": %s", said[first]);
    }
}
