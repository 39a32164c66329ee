/* SPDX-License-Identifier: MIT */
/* Race tests of the allocator: small programs over streams and blocks, run under many schedules and judged five ways.
 *
 * A program (race_scenario.play) is a correct caller: it orders the streams that touch a block, records every use before it
 * frees. Its kernels are fills and copies, so the tape knows their bytes: race_write fills a block with a pattern of its own,
 * race_read copies a part of it into a buffer of its own, which must hold that pattern in the end.
 * The judges: every call must succeed; the bytes read must be the ones written last by the block's own program (freed bytes are
 * poisoned); hb_oracle.h on the tape; the exploration device's own complaints; and the tape itself, which must be the
 * same, addresses and waits included, whatever the schedule.
 * What fails is told with the command that repeats it: test program, scenario, number and schedule. */
#ifndef FSDP_TESTS_RACE_RIG_H
#define FSDP_TESTS_RACE_RIG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "explore.h"
#include "fsdp/fsdp.h"

enum {
    RACE_STREAMS = 6, /* callers' streams at most; the copy lane follows as number RACE_COPY */
    RACE_COPY = RACE_STREAMS,
    RACE_LIVE = 64, /* live blocks at most */
    RACE_EVENTS = 4,
    RACE_READ_BYTES = 256, /* of a block, that one read looks at */
    RACE_WORLD = 4,
    KIB = 1024
};

typedef enum race_judge {
    RACE_CALL,   /* a call failed */
    RACE_DATA,   /* a read found other bytes */
    RACE_ORDER,  /* the oracle found no edge */
    RACE_DEVICE, /* the device complained: deadlock, bytes that nobody owns */
    RACE_TAPE,   /* another tape than the first run's */
    RACE_JUDGES
} race_judge;

typedef struct race_verdict {
    uint64_t found[RACE_JUDGES]; /* how often each judge spoke */
    char text[768];              /* the first thing that one said */
    uint64_t n_records, n_steps, n_waits, n_reads, n_moves, n_refused;
} race_verdict;

typedef struct race_rig race_rig;

typedef struct race_scenario {
    const char *name;
    void (*play)(race_rig *r);
    uint32_t n_streams;
    uint64_t budget_bytes, segment_bytes;
    fsdp_alloc_policy policy;
    uint32_t world;   /* 0: one */
    uint64_t every;   /* most runs for all orders of it; 0: not tried, it is too long */
    uint64_t number;  /* of a random program */
    uint32_t n_moves; /* of a random program */
    bool no_tape;     /* calls come from several threads, so tapes differ */
} race_scenario;

typedef struct race_block {
    char *ptr; /* NULL: the entry is free */
    uint64_t bytes;
    uint8_t byte; /* what is in it; 0: nothing was written */
    int stream;   /* it was taken for */
    /* Of random programs: */
    int last; /* stream of the last write, or of the allocation */
    uint32_t readers, declared,
        owed; /* masks: streams that read since; that have it until free; with a use to record */
} race_block;

typedef struct race_read_back {
    uint8_t want;
    uint16_t bytes;
    int8_t stream;
    uint64_t at; /* in pool */
} race_read_back;

/* What every later run of the program must repeat. */
typedef struct race_reference {
    uint64_t *record[RACE_WORLD]; /* a hash each */
    uint64_t n_records[RACE_WORLD], trace_hash, n_steps;
    bool set[RACE_WORLD];
} race_reference;

struct race_rig {
    const race_scenario *scenario;
    explore *x; /* NULL: on the host backend */
    uint32_t rank;
    uint64_t jitter_seed; /* host backend */
    race_verdict *verdict;
    race_reference *reference; /* may be NULL */
    bool stopped;              /* a call failed: the rest of the program is left out */
    fsdp_context *ctx;
    fsdp_stream *s[RACE_STREAMS + 1];
    fsdp_event *event[RACE_EVENTS];
    fsdp_allocator *a;
    fsdp_trace *trace;
    race_block live[RACE_LIVE];
    uint8_t last_byte;
    char *pool; /* what reads read into */
    race_read_back *read;
    uint64_t n_reads, max_reads;
    uint64_t random; /* of race_draw */
    uint64_t n_drains;
    /* the tape, as far as it has been written down without addresses */
    uint64_t *record, n_recorded;
    struct race_event_seen *seen;
};

/* ---- For programs. Nothing happens once a call has failed ---- */

race_block *race_take(race_rig *r, uint64_t bytes, int stream);
/* NULL, and no complaint, if there is no room. */
race_block *race_try_take(race_rig *r, uint64_t bytes, int stream);
void race_give(race_rig *r, race_block *block);
void race_write(race_rig *r, race_block *block, int stream);                           /* all of it */
void race_read(race_rig *r, const race_block *block, int stream);                      /* its last bytes */
void race_read_part(race_rig *r, const race_block *block, int stream, uint64_t begin); /* bytes from begin on */
void race_read_bytes(race_rig *r, const void *ptr, uint64_t bytes, uint8_t want, int stream);
void race_copy(race_rig *r, race_block *to, const race_block *from, int stream); /* as much as both have, all of `to` */
void race_order(race_rig *r, int stream, int other);                             /* stream waits for other */
void race_record_stream(race_rig *r, race_block *block, int stream);
void race_record_use(race_rig *r, race_block *block, int stream);
void race_event_record(race_rig *r, int event, int stream);
void race_event_wait(race_rig *r, int event, int stream);
/* Release the stream and make another, which gets its slot. */
void race_renew(race_rig *r, int stream);
void race_trim(race_rig *r);
/* Everything has run: what is on the tape is forgotten. */
void race_restart_tape(race_rig *r);
uint64_t race_draw(race_rig *r, uint64_t below);
/* A byte that no other write of late has put anywhere, and not the poison. */
uint8_t race_next_byte(race_rig *r);

void race_say(race_rig *r, race_judge judge, const char *format, ...) __attribute__((format(printf, 3, 4)));
#define RACE_TRY(r, call)                                                                                     \
    do {                                                                                                      \
        if (!(r)->stopped && (call) != FSDP_OK) race_say((r), RACE_CALL, "%s: %s", #call, fsdp_last_error()); \
    } while (0)

/* ---- For who runs them ---- */

/* Context, streams, allocator, tape; and what ends with the tape judged. r is zero but for its first fields. */
void race_open(race_rig *r);
void race_close(race_rig *r);

/* The program on a device that is open, or (x NULL) on the host backend; what the judges say is added to *verdict. */
void race_play_on(const race_scenario *scenario, explore *x, uint64_t jitter_seed, race_reference *reference,
                  race_verdict *verdict);
uint64_t race_judged(const race_verdict *verdict); /* how often any judge spoke */
void race_reference_free(race_reference *reference);

/* ---- The tape without addresses (race_tape.c) ---- */

/* The backend of which the rig is to be made: as given, but it notes which memory the device gave. */
const fsdp_backend *race_backend(const fsdp_backend *backend);
void race_forget_memory(void); /* before a run */
/* Write down what is on the tape by now: addresses mean something until memory goes back to the device. */
void race_write_down(race_rig *r);
/* Ends with the judgement: the same as the reference, which it becomes if there was none. */
void race_compare_tapes(race_rig *r);
/* The host has waited for this stream (NULL: for all): an edge to every stream, which the tape does not know of. */
void race_note_drain(race_rig *r, const fsdp_stream *stream);

/* ---- Schedules (race_runs.c) ---- */

typedef struct race_options {
    const char *program; /* argv[0] */
    const char *scenario, *schedule;
    uint64_t seed, n_ops;
    bool has_seed, is_long;
} race_options;

/* 0: go on; else the exit status. */
int race_options_read(race_options *options, int argc, char **argv);

/* What is told of failures: one, with the command that repeats it; of those, one whose data was wrong if there is one. */
typedef struct race_report {
    char text[1 << 18]; /* "": nobody said anything. A soak's schedule is long */
    bool shows_data;
    race_verdict total; /* sums over all runs; its text is not used */
} race_report;

/* The scenario under every policy, with n_seeds for each that has seeds; and in every order if it says so. */
void race_run_all(const race_scenario *scenario, uint32_t n_seeds, const race_options *options, race_report *report);
/* One run. reference may be NULL. */
void race_run_one(const race_scenario *scenario, const explore_config *config, race_reference *reference,
                  race_report *report);

/* ---- Programs ---- */

extern const race_scenario race_scenarios[], race_rank_scenarios[];
extern const size_t n_race_scenarios, n_race_rank_scenarios;
/* Callers who break the rules, so that each judge is seen to speak: by the number of the judge who must (race_wrong.c). */
extern const race_scenario race_wrong_scenarios[RACE_JUDGES];
race_scenario race_random_program(uint64_t number, uint32_t n_moves); /* everything that a correct caller may do */
race_scenario race_actors_program(uint64_t number, uint32_t n_moves); /* four call sequences, interleaved at random */

/* Four real threads do what the actors do, each with a stream, on the host backend (race_actors.c). */
void race_play_threads(race_rig *r);

#endif
