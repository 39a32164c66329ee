/* SPDX-License-Identifier: MIT */
#include "flight.h"

#include <string.h>

#include "hash.h"

static uint64_t load(const _Atomic uint64_t *word) { return atomic_load_explicit(word, memory_order_acquire); }
static void store(_Atomic uint64_t *word, uint64_t value) { atomic_store_explicit(word, value, memory_order_release); }

/* For the writer, who reads nothing but its own. */
static uint64_t own(const _Atomic uint64_t *word) { return atomic_load_explicit(word, memory_order_relaxed); }

/* Even: entry i is whole. One that was taken back and written anew has another turn: nobody takes the two for one. */
static uint64_t stamp_of(uint64_t turn, uint64_t i, bool whole)
{
    return turn << FSDP__FLIGHT_TURN_SHIFT | ((2 * i + (whole ? 2 : 1)) & FSDP__FLIGHT_ENTRY_MASK);
}

/* A reader that sees one of the words sees the odd stamp too, or a later one: each word is released behind it. */
static void write_entry(fsdp__flight *flight, uint64_t i, const fsdp__flight_entry *entry)
{
    fsdp__flight_slot *slot = &flight->slot[i % FSDP_FLIGHT_CALLS];
    store(&slot->stamp, stamp_of(flight->n_taken_back, i, false));
    for (size_t k = 0; k < FSDP__FLIGHT_WORDS; k++) {
        uint64_t word;
        memcpy(&word, (const char *)entry + k * sizeof word, sizeof word);
        store(&slot->word[k], word);
    }
    store(&slot->stamp, stamp_of(flight->n_taken_back, i, true));
}

bool fsdp__flight_read(const fsdp__flight *flight, uint64_t i, fsdp__flight_entry *out_entry)
{
    const fsdp__flight_slot *slot = &flight->slot[i % FSDP_FLIGHT_CALLS];
    uint64_t word[FSDP__FLIGHT_WORDS];
    uint64_t stamp = load(&slot->stamp);
    if ((stamp & FSDP__FLIGHT_ENTRY_MASK) != stamp_of(0, i, true)) return false;
    for (size_t k = 0; k < FSDP__FLIGHT_WORDS; k++) word[k] = load(&slot->word[k]);
    if (load(&slot->stamp) != stamp) return false;
    memcpy(out_entry, word, sizeof *out_entry);
    return true;
}

void fsdp__flight_add(fsdp__flight *flight, uint32_t comm, const fsdp_collective *list, uint32_t n, fsdp__point point,
                      uint64_t now_ns)
{
    uint64_t first = own(&flight->n), number = own(&flight->comm[comm].n) + 1,
             hash = own(&flight->comm[comm].hash[(number - 1) % 2]);
    for (uint32_t i = 0; i < n; i++) {
        fsdp__flight_entry entry;
        fsdp__call_fill(&entry.call, &list[i], number, i, n);
        entry.rolling = hash = fsdp__mix(hash ^ entry.call.hash);
        entry.enqueued_ns = now_ns;
        entry.where = point * 4 + comm;
        write_entry(flight, first + i, &entry);
    }
    store(&flight->n, first + n); /* before the count: who has seen that finds the entries */
    store(&flight->comm[comm].hash[number % 2], hash);
    store(&flight->comm[comm].n, number);
}

/* The hash before the group is where it was: two are kept. The entries that made room for it stay gone. */
void fsdp__flight_take_back(fsdp__flight *flight, uint32_t comm, uint32_t n)
{
    flight->n_taken_back++;
    store(&flight->n, own(&flight->n) - n);
    store(&flight->comm[comm].n, own(&flight->comm[comm].n) - 1);
}

void fsdp__flight_host_begin(fsdp__flight *flight, const char *text, uint64_t now_ns)
{
    uint64_t i = own(&flight->n);
    fsdp_collective named = {.label = text};
    fsdp__flight_entry entry = {.enqueued_ns = now_ns, .where = FSDP__FLIGHT_HOST};
    fsdp__call_fill(&entry.call, &named, ++flight->n_host_calls, 0, 1);
    write_entry(flight, i, &entry);
    store(&flight->n, i + 1);
    store(&flight->inside, i + 1);
}

void fsdp__flight_host_end(fsdp__flight *flight) { store(&flight->inside, 0); }

/* The writer disturbs hash[i % 2] only once group i + 1 is counted, so i still the count says that it was not. */
void fsdp__flight_count(const fsdp__flight *flight, uint32_t comm, uint64_t *out_n, uint64_t *out_hash)
{
    uint64_t n, hash;
    do {
        n = load(&flight->comm[comm].n);
        hash = load(&flight->comm[comm].hash[n % 2]);
    } while (load(&flight->comm[comm].n) != n);
    *out_n = n;
    *out_hash = hash;
}

uint64_t fsdp__flight_fold(const fsdp__flight *flight, uint64_t h)
{
    for (uint32_t c = 0; c < FSDP__N_COMMS; c++) {
        uint64_t n, hash;
        fsdp__flight_count(flight, c, &n, &hash);
        h = fsdp__mix(fsdp__mix(h ^ n) ^ hash);
    }
    return h;
}

bool fsdp__flight_hash_after(const fsdp__flight *flight, uint32_t comm, uint64_t number, uint64_t *out_hash)
{
    uint64_t n;
    fsdp__flight_count(flight, comm, &n, out_hash);
    if (number == n) return true;
    *out_hash = 0;
    if (number == 0) return true;
    uint64_t end = load(&flight->n);
    for (uint64_t i = end; i-- > (end > FSDP_FLIGHT_CALLS ? end - FSDP_FLIGHT_CALLS : 0);) {
        fsdp__flight_entry entry;
        if (!fsdp__flight_read(flight, i, &entry)) break;
        if (fsdp__flight_comm(&entry) != comm || entry.call.number != number) continue;
        *out_hash = entry.rolling; /* from the newest: the last of its group */
        return true;
    }
    return false;
}
