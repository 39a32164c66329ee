/* SPDX-License-Identifier: MIT */
/* Ranks as threads that are allowed to differ: what the tests of the order check share. */
#ifndef ORDER_TEAM_H
#define ORDER_TEAM_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "flight_file.h"
#include "fsdp/backend.h"
#include "fsdp/fsdp.h"

enum { UNITS = 3, WORLD = 4, SAID = 2048 };
static const uint64_t second_ns = 1000000000ull;

typedef struct member member;
struct member {
    uint32_t number, world;
    fsdp_local *local;
    pthread_barrier_t *meet;
    const fsdp_backend *backend; /* NULL: host */
    uint32_t debug, depth;
    bool reduce_comm;
    uint64_t timeout_ns;
    char folder[64], path[96], file_path[128], log[1024];
    void (*body)(member *m);
    void *arg;

    fsdp_context *ctx;
    fsdp_stream *s;
    fsdp_model *model;
    fsdp_unit *unit[UNITS];
    fsdp_adamw *opt;
    float data[64];

    fsdp_status status;
    char said[SAID];
    flight_file file;
    char failed[512];
};

#define EXPECT(condition)                                                                                   \
    do {                                                                                                    \
        if (condition) break;                                                                               \
        snprintf(m->failed, sizeof m->failed, "%s:%d: rank %u: %s (%.300s)", __FILE__, __LINE__, m->number, \
                 #condition, fsdp_last_error());                                                            \
        fprintf(stderr, "%s\n", m->failed);                                                                 \
        _exit(1); /* the others wait for this rank */                                                       \
    } while (0)
#define EXPECT_OK(call) EXPECT((call) == FSDP_OK)

/* The first call that failed, and its sentence. */
void keep(member *m, fsdp_status status);
void open_context(member *m);
/* And a model of three units, h.1 and h.2 of a size. */
void open_all(member *m);
void close_context(member *m);
void close_all(member *m);
fsdp_status all_reduce(member *m, uint64_t count);
fsdp_status visit(member *m, uint32_t unit, bool backward);

void read_file(member *m, const char *path);
bool is_there(const member *m); /* the rank's flight file */
/* Every rank: all have the same sentence, every call returns it, and the file was written once. It is in m->file. */
void is_dead_with_one_sentence(member *m);

/* On the main thread. A team has a folder of its own, and must leave nothing in it. */
member *team_new(uint32_t world, void (*body)(member *m), const void *arg);
void team_run(member *team);
void team_free(member *team);
void has(const member *m, const char *part);

#endif
