/* SPDX-License-Identifier: MIT */
/* What communicators and side channels must do, as tests that run on any backend whose ranks can be threads of one
 * process, or processes of one machine. */
#ifndef FSDP_TESTS_COMM_SUITE_H
#define FSDP_TESTS_COMM_SUITE_H

#include "device_suite.h"
#include "fsdp/host.h"
#include "processes.h"

typedef struct comm_suite {
    const fsdp_backend *backend;
    void *(*group_create)(uint32_t world, const fsdp_link *link); /* where the ranks meet */
    void (*group_destroy)(void *group);
    const void *(*config)(void *storage, void *group, uint32_t rank, uint64_t jitter_ns, uint64_t jitter_seed);
    bool processes; /* ranks are processes: what they leave behind lies in the team, which they share */
    /* Like NCCL: it compares no collectives, sums in an order of its own, and has no link; one communicator may wait for
     * the other; a span begins when its stream comes to it; a failure leaves streams idle. And all is slow, so that less is
     * tried. */
    bool loose;
    uint32_t most; /* ranks; 0: MAX_RANKS */
    /* As device_suite.h's. */
    fsdp_status (*hold)(void *stream, uint32_t *word);
} comm_suite;

/* Each returns how many tests failed. */
int run_comm_suite(const comm_suite *suite);       /* what comes out, order, time */
int run_comm_error_suite(const comm_suite *suite); /* mismatch, lost ranks, abort, closing */
int run_side_suite(const comm_suite *suite);

enum { MAX_RANKS = 64, RANK_STREAMS = 2, RANK_BLOCKS = 8, SENTENCE_BYTES = 1024 };

struct team;

/* One rank: a thread or a process with a device, a side channel, two communicators and two streams. */
typedef struct member {
    struct team *team;
    uint32_t rank, world;
    const fsdp_device_ops *device;
    const fsdp_comm_ops *comms;
    const fsdp_side_ops *sides;
    fsdp_host_allocator host;
    _Alignas(16) char config[CONFIG_BYTES];
    fsdp_device_caps caps;
    void *dev, *side, *comm[2], *stream[RANK_STREAMS], *event[2];
    gate gate;
    uint32_t *word; /* pinned, with suite->hold; else NULL */
    struct {
        void *ptr;
        uint64_t bytes;
    } block[RANK_BLOCKS];
    char sentence[SENTENCE_BYTES]; /* for a body to leave behind */
    const char *doing;             /* a constant: what it may hang in */
    bool failed;
} member;

typedef struct team {
    const comm_suite *suite;
    uint32_t world;
    fsdp_link link;
    uint64_t timeout_ns, jitter_ns, jitter_seed;
    uint32_t debug;
    bool is_apart;   /* no communicator is opened */
    void *group;     /* NULL: made for the run */
    meeting meet;    /* the test's own, beside what is tested */
    const void *arg; /* read only: processes have copies of what it points to */
    member rank[MAX_RANKS];
} team;

typedef void (*rank_body)(member *r);

/* Run body on `world` threads or processes, each a rank; assert that none failed. */
void run_team(team *t, rank_body body);
team *new_team(void **state, uint32_t world); /* timeouts of 60 s, no link */
/* The world can be had; how often something is to be repeated. Before or after new_team. */
bool suite_has(void **state, uint32_t world);
team *team_of_at_most(void **state, uint32_t world); /* new_team of so many, or of the most that can be had */
int suite_times(void **state, int usual);
int team_setup(void **state); /* for CMocka: the initial state is a comm_suite */
int team_teardown(void **state);

/* In a body, instead of CMocka's asserts, which belong to the main thread. */
#define EXPECT(condition)                                   \
    do {                                                    \
        if (!(condition)) {                                 \
            rank_failed(r, __FILE__, __LINE__, #condition); \
            return;                                         \
        }                                                   \
    } while (0)
#define EXPECT_OK(call) EXPECT((call) == FSDP_OK)

void rank_failed(member *r, const char *file, int line, const char *condition);
void meet(member *r); /* all ranks of the team */
fsdp_status open_comm(member *r, uint32_t index, uint64_t timeout_ns);
void close_comm(member *r, uint32_t index);
void *rank_block(member *r, uint64_t bytes); /* device memory, freed at the end; NULL on failure */
/* Send and receive in a block of this rank, large enough for either. Collectives take device memory only. */
fsdp_status rank_memory(member *r, fsdp_collective *list, uint32_t n);
void free_blocks(member *r);
fsdp_status rank_copy(member *r, void *dst, const void *src, uint64_t bytes); /* and wait */
fsdp_status rank_drain(member *r, int stream);
void rank_close_gate(member *r, int stream);
void rank_open_gate(member *r);
fsdp_status enqueue(member *r, int comm, int stream, fsdp_collective c);

#endif
