/* SPDX-License-Identifier: MIT */
/* Bad input: what the files errors_*.c share. A small model, ranks as threads or processes, a step of real arithmetic on the
 * host backend, host memory that is counted and can run out, device memory that can run out. */
#ifndef ERRORS_H
#define ERRORS_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <pthread.h>

#include "fsdp/backend.h"
#include "fsdp/fsdp.h"
#include "processes.h"

/* Sanitizers are an order slower. */
#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define ERRORS_REDUCED 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define ERRORS_REDUCED 1
#endif
#ifndef ERRORS_REDUCED
#define ERRORS_REDUCED 0
#endif

enum { UNITS = 4, PARAMS = 2, MAX_RANKS = 8, SAID_BYTES = 2048, MAX_KERNELS = 256 };
static const uint64_t second_ns = 1000000000ull;

/* ---- Host memory ---- */

typedef struct meter {
    pthread_mutex_t lock;
    int64_t until_failure; /* allocations that still succeed; below 0: all */
    bool for_good;         /* from the first failure on, all fail */
    bool failed;
    int64_t live_bytes, n_allocs;
} meter;

void meter_init(meter *m);
void meter_fail_after(meter *m, int64_t n, bool for_good); /* n below 0: never */
fsdp_host_allocator meter_host(meter *m);

/* ---- A rank ---- */

typedef struct rank rank;

/* What registration does; the defaults are one model on every rank, tests change one thing on one rank. */
typedef struct recipe {
    fsdp_model_config model;
    fsdp_unit_config unit[UNITS];
    fsdp_param_config param[UNITS][PARAMS];
    fsdp_adamw_config adamw;
    bool no_adamw;
    const char *unit_name[UNITS], *param_name[UNITS][PARAMS];
    uint32_t order[UNITS], n_units; /* registration: order[0] first */
    uint32_t n_dims[UNITS][PARAMS];
    uint64_t dims[UNITS][PARAMS][FSDP_MAX_DIMS];
    uint32_t extra_visits; /* of a pass of the caller's; 0: none */
    fsdp_use extra_use;
} recipe;

/* "h.0" held, "h.1" … "h.3"; each a weight "h.1.w" of 40 × 7 and a bias "h.1.b" of 7. AdamW, depth 1. */
recipe recipe_default(void);

/* A kernel of the compute stream. */
typedef struct kernel {
    const float *params;
    float *grads;
    float factor;
} kernel;

struct rank {
    uint32_t number, world;
    fsdp_local *local;
    fsdp_launch launch;          /* size 0: ranks are threads */
    meeting *meet;               /* the test's own, beside what is tested */
    meter *meter;                /* NULL: libc */
    const fsdp_backend *backend; /* NULL: host */
    uint64_t timeout_ns;
    uint32_t debug;
    recipe recipe;
    void *arg;

    fsdp_context *ctx;
    fsdp_stream *s;
    fsdp_model *model;
    fsdp_unit *unit[UNITS];
    fsdp_param *param[UNITS][PARAMS];
    fsdp_adamw *opt;
    int32_t extra_pass;
    kernel kernel[MAX_KERNELS];
    uint32_t n_kernels;

    fsdp_status status; /* for a body to leave behind, with the sentence */
    char said[SAID_BYTES];
    char failed[512]; /* of EXPECT; "": all went well */
};

/* In a body that may run on a thread, instead of CMocka's asserts, which belong to the main one. */
#define EXPECT(who, condition)                                \
    do {                                                      \
        if (!(condition)) {                                   \
            rank_failed(who, __FILE__, __LINE__, #condition); \
            return;                                           \
        }                                                     \
    } while (0)
#define EXPECT_OK(who, call) EXPECT(who, (call) == FSDP_OK)
void rank_failed(rank *r, const char *file, int line, const char *condition);
/* Keep status and sentence. */
void rank_keep(rank *r, fsdp_status status);

typedef void (*rank_body)(rank *r);
/* A rank that is not opened: number 0 of a world of 1. */
rank rank_default(void);
/* Run body on `world` threads with ranks as given (their number, world, local and meet are set here); each must come to
 * its end. The local group lives until all have. With ranks_are_processes: on processes; what they leave in their ranks
 * comes home, what pointers of these point to does not. */
extern bool ranks_are_processes;
void run_ranks(rank *ranks, uint32_t world, rank_body body);

/* These return what the first call that failed did. */
fsdp_status open_context(rank *r); /* context and stream */
fsdp_status register_model(rank *r);
fsdp_status fill_model(rank *r);
fsdp_status open_all(rank *r); /* context, model, seal, fill */
/* Whatever there is; every call must succeed. */
void close_model(rank *r);
void close_all(rank *r);

/* One micro-step, call by call: run `at` before call number 0, 1, …; n_calls of them. NULL: nothing. */
typedef void (*between)(rank *r, uint32_t call);
fsdp_status micro_step(rank *r, uint32_t index, uint32_t count, between at);
fsdp_status update(rank *r);
fsdp_status train_step(rank *r);
/* Add kernels that use the unit's view: forward reads, backward adds to gradients. */
fsdp_status compute(rank *r, const fsdp_view *view, float factor);
fsdp_status hash_model(rank *r, uint64_t *out_hash);

/* ---- Saying ---- */

/* On the main thread: the call was refused with this status, and its sentence has the fragment. */
#define REFUSED(call, status, fragment) assert_refused(call, status, fragment, __FILE__, __LINE__)
void assert_refused(fsdp_status got, fsdp_status status, const char *fragment, const char *file, int line);
/* The same of what rank_keep kept. */
void assert_kept(const rank *r, fsdp_status status, const char *fragment);
#define OK(call) assert_ok(call, __FILE__, __LINE__)
void assert_ok(fsdp_status got, const char *file, int line);

/* ---- The groups ---- */

int run_argument_errors(void);
int run_model_argument_errors(void);
int run_state_errors(void);
int run_rank_errors(bool as_processes);
int run_memory_errors(void);
int errors_deadline(void **state);

#endif
