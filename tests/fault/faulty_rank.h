/* SPDX-License-Identifier: MIT */
/* A rank that meets failures: the whole journey of a small model on two ranks, made of calls that are made again where that
 * can help, steps that are given up and taken again where all ranks can, and an orderly end where neither can. */
#ifndef FAULTY_RANK_H
#define FAULTY_RANK_H

#include "faulty.h"
#include "fsdp/fsdp.h"

enum { RANKS = 2, UNITS = 3, PARAMS = 2, MAX_VALUES = 128, MAX_JOBS = 1024, SAID_BYTES = 1024 };

/* What the ranks' program has beside the library, to say whether all go on. */
typedef struct meeting {
    pthread_mutex_t lock;
    pthread_cond_t cond;
    uint32_t n_here, n_left;
    uint64_t round, key;
    bool ok, apart, last_ok, last_apart;
} meeting;

void meeting_init(meeting *m);
void meeting_fini(meeting *m);

typedef struct rank rank;

typedef struct job {
    rank *r;
    const float *params;
    float *grads;
    uint64_t n;
    float factor;
} job;

struct rank {
    uint32_t number;
    faulty f;
    fsdp_host_config host;
    meeting *meeting;
    uint64_t timeout_ns;
    uint32_t debug;
    bool reduce_comm; /* and gradients kept instead of reduced in each micro-step */
    bool stubborn;    /* calls again; else it gives up at the first error */
    bool aborts;      /* gives up by fsdp_context_abort, so that the others hear it from it */

    fsdp_context *ctx;
    fsdp_stream *s, *second;
    fsdp_event *event;
    fsdp_work *work;
    fsdp_model *model;
    fsdp_unit *unit[UNITS];
    fsdp_param *param[UNITS][PARAMS];
    fsdp_adamw *opt;
    int32_t own_pass;
    job jobs[MAX_JOBS];
    uint32_t n_jobs, n_retries;
    float loss, sum[4], got[4];
    void *buffer;
    fsdp_allocator *pool;

    /* What came of it. */
    bool finished;
    bool gave_up; /* a step, with the others: from then on who waits for whom is another question than who failed */
    uint32_t n_before; /* values that it had when it gave up */
    bool left;         /* because another rank did, not by an error */
    uint32_t n_errors;
    fsdp_status status; /* of the first error, its call and sentence */
    const char *call;
    char said[SAID_BYTES];
    bool unchanged;             /* by that: context and model lived */
    char complaint[SAID_BYTES]; /* what must not be; "": nothing */
    uint64_t value[MAX_VALUES];
    uint32_t n_values;
};

/* A fsdp_status is not needed: the rank has it all. Opens, goes all the way or gives up, closes. */
void rank_journey(rank *r);

#endif
