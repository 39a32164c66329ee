/* SPDX-License-Identifier: MIT */
/* What bench_work measures with: a rank with three streams and buffers whose every element is known, and a device's clock. */
#ifndef FSDP_BENCH_WORK_RIG_H
#define FSDP_BENCH_WORK_RIG_H

#include <stdio.h>
#include <stdlib.h>

#include "fsdp/fsdp.h"
#include "monotonic.h"

enum { WORK_MARKS = 4 };

typedef struct work_rig work_rig;

/* A device's own clock. Marks are points on streams; what they say may be asked for once the streams are drained. */
typedef struct work_clock {
    void *(*open)(work_rig *rig);
    void (*close)(void *clock);
    void (*mark)(void *clock, int which, fsdp_stream *stream);
    double (*us_between)(void *clock, int from, int to);
    /* Around one collective on rig->wire: begin before it is enqueued, end after. read: when the device began and ended it, on
     * the clock of fsdp__now_ns; *error_ns: by how much too early both may be said to be. */
    void (*wire_begin)(void *clock);
    void (*wire_end)(void *clock);
    void (*wire_read)(void *clock, uint64_t *begin_ns, uint64_t *end_ns, uint64_t *error_ns);
} work_clock;

struct work_rig {
    fsdp_context *ctx;
    fsdp_comm *comm;
    uint32_t rank, world;
    fsdp_stream *app, *wire, *idle; /* makes the input and waits; has the collectives; has nothing to do with them */
    fsdp_allocator *pool;
    void *send, *recv; /* device memory */
    float *in, *out;   /* pinned */
    uint64_t max_bytes;
    const work_clock *ops;
    void *clock;
};

#define WORK_TRY(call)                                                                             \
    do {                                                                                           \
        fsdp_status status_ = (call);                                                              \
        if (status_ != FSDP_OK) {                                                                  \
            fprintf(stderr, "bench_work: %s: %s\n", fsdp_status_name(status_), fsdp_last_error()); \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

void work_rig_open(work_rig *rig, const fsdp_config *config, const work_clock *ops, uint64_t max_bytes);
void work_rig_close(work_rig *rig);

/* The round's input is on the device, and the result's place is full of 0xff, when it returns. bytes: a multiple of 1 KiB. */
void work_fill(work_rig *rig, uint64_t bytes, uint32_t round);
/* Is every element of the round's result right? Blocks. */
bool work_is_right(work_rig *rig, uint64_t bytes, uint32_t round);
/* Both streams are idle. */
void work_drain(work_rig *rig);

extern const work_clock work_host_clock;
#ifdef WORK_WITH_CUDA
extern const work_clock work_cuda_clock;
/* A config of the CUDA backend for this process, from its launcher; what it points to stays. Returns its place in *launch. */
void work_cuda_config(fsdp_config *config, fsdp_launch *launch, uint64_t spin_ns);
#endif

#endif
