/* SPDX-License-Identifier: MIT */
/* Stars for tests: a place where nobody else is, ranks as threads, and raw connections that say whatever a test likes. */
#ifndef FSDP_TESTS_STAR_RIG_H
#define FSDP_TESTS_STAR_RIG_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
/* after those */
#include <cmocka.h>

#include "net/star.h"
#include "net/star_parts.h"

#define STAR_SECOND 1000000000ull
enum { STAR_NONCE = 0x5eed5 };

/* Where a star forms: launch of rank 0, and its socket, which listens already (-1 with "@name"). */
typedef struct star_place {
    fsdp_launch launch;
    int listener;
} star_place;

/* address: "127.0.0.1", "::1", or "@" for a name of its own. False: this machine has no such address. */
bool star_place_make(star_place *place, const char *address, uint32_t world);

/* One rank. */
typedef struct star_rank {
    fsdp_launch launch;
    fsdp__star_config config;
    fsdp_side_args args; /* a test may change it before star_rank_open */
    fsdp_host_allocator host;
    const star_place *place;
    void *side;
    void *arg; /* the test's */
    uint32_t rank, world;
    fsdp_status status;
    char sentence[8192];
    bool check_failed; /* a CHECK */
} star_rank;

void star_rank_init(star_rank *r, const star_place *place, uint32_t rank);
fsdp_status star_rank_open(star_rank *r); /* status and sentence are kept */
void star_rank_keep(star_rank *r, fsdp_status status);
void star_rank_close(star_rank *r);
fsdp_status star_rank_gather(star_rank *r, void *all, size_t bytes, uint64_t timeout_ns); /* of bytes rank + 1 */

typedef void (*star_body)(star_rank *r);
/* Every rank in a thread of its own; ranks are initialised. Returns when all are through; asserts that no CHECK failed. */
void star_run(star_rank *ranks, uint32_t n, star_body body);
/* Init, open, body, close. */
void star_run_open(const star_place *place, star_rank *ranks, star_body body, void *arg);

/* For threads, where CMocka's asserts cannot be. */
#define CHECK(condition)                                                                                              \
    do {                                                                                                              \
        if (!(condition)) {                                                                                           \
            fprintf(stderr, "%s:%d: rank %u: %s (%s)\n", __FILE__, __LINE__, r->rank, #condition, fsdp_last_error()); \
            r->check_failed = true;                                                                                   \
            return;                                                                                                   \
        }                                                                                                             \
    } while (0)

/* A raw connection to the place, once somebody listens there. */
int star_knock(const star_place *place);
void star_hello(unsigned char hello[FSDP__HELLO_BYTES], uint64_t nonce, uint32_t version, uint32_t world,
                uint32_t rank);
void star_say(int fd, const void *text, size_t bytes); /* also if nobody listens any more */
/* Until the end of the stream: what came, at most bytes. */
size_t star_hear_all(int fd, void *text, size_t bytes);
bool star_hear(int fd, void *text, size_t bytes); /* exactly so many */

int star_count_fds(void);
int star_count_threads(void);
uint64_t star_random(uint64_t *state);

int star_deadline(void **state); /* CMocka setup: alarm */

#endif
