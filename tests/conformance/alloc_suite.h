/* SPDX-License-Identifier: MIT */
/* What the caching allocator must do on any backend and with either policy, as tests over the public interface. */
#ifndef FSDP_TESTS_ALLOC_SUITE_H
#define FSDP_TESTS_ALLOC_SUITE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "fsdp/fsdp.h"

enum { ALLOC_CONFIG_BYTES = 256, ALLOC_STREAMS = 4, KIB = 1024 };

typedef struct alloc_suite {
    const char *name;
    const fsdp_backend *backend;
    /* A backend_config in storage. A backend without jitter ignores it. */
    const void *(*config)(void *storage, uint64_t jitter_ns, uint64_t jitter_seed);
    void (*end)(void *storage); /* after the context; NULL: nothing */
    fsdp_alloc_policy policy;
    bool any_thread;     /* a context may be used from several threads */
    bool has_data;       /* memory has content */
    bool takes_time;     /* operations end some time after they were given */
    bool bounded;        /* the device refuses at some point */
    uint32_t n_programs; /* random ones, side by side with the model */
    void (*peek)(void *dst, const void *src,
                 uint64_t bytes); /* a copy out of idle device memory; NULL: memcpy does it */
    uint64_t granularity; /* instead of the device's own: these tests count in pages of 4096 bytes; 0: the device's */
} alloc_suite;

/* Each returns how many tests failed. */
int run_alloc_suite(const alloc_suite *suite); /* sizes, trim, numbers, errors */
int run_alloc_limit_suite(
    const alloc_suite *suite); /* budgets, a device that is full, what errors say, splits and merges */
int run_alloc_host_suite(const alloc_suite *suite); /* threads, host memory */
int run_alloc_stream_suite(
    const alloc_suite *suite); /* streams that come and go, many fences, trim while work is running */
int run_alloc_choice_suite(const alloc_suite *suite); /* which bytes come back */
int run_alloc_order_suite(const alloc_suite *suite);  /* no bytes are handed over without an edge; none too many */
void alloc_random_programs_have_no_unordered_pair(void **state); /* of it; the state is the suite */
int run_alloc_model_suite(const alloc_suite *suite); /* random programs, the same as an independent model's */

/* A context, four streams and an allocator. */
typedef struct alloc_rig {
    const alloc_suite *suite;
    _Alignas(16) char config[ALLOC_CONFIG_BYTES];
    fsdp_context *ctx;
    fsdp_stream *s[ALLOC_STREAMS];
    fsdp_allocator *a;
} alloc_rig;

#define OK(call) assert_int_equal((call), FSDP_OK)

/* host NULL: libc. No allocator yet. */
void alloc_rig_open(alloc_rig *r, const alloc_suite *suite, uint64_t jitter_ns, uint64_t jitter_seed,
                    uint64_t timeout_ns, const fsdp_host_allocator *host);
void alloc_rig_close(alloc_rig *r);
/* How much more memory the device gives; UINT64_MAX, as at first: as much as it has. */
void device_limit(uint64_t bytes);
int alloc_rig_setup(void **state); /* for CMocka: the initial state is an alloc_suite */
int alloc_rig_teardown(void **state);

/* The rig's allocator: budget 0 is none. */
void make_allocator(alloc_rig *r, uint64_t budget_bytes, uint64_t segment_bytes);
char *take(alloc_rig *r, uint64_t bytes, int stream);
void give(alloc_rig *r, void *ptr);
fsdp_alloc_stats stats_of(alloc_rig *r);
fsdp_counters counters_of(alloc_rig *r);
/* What is there, on an idle device; nothing is asserted where memory has no content. */
void assert_bytes(const alloc_suite *suite, const void *ptr, uint8_t byte, uint64_t bytes);
/* The thread's last error has the fragment. */
void assert_said(const char *fragment);
/* Stream waits that the device was given so far. */
uint64_t n_waits(alloc_rig *r);
void order(alloc_rig *r, int stream, int other); /* stream waits for other */
void touch(alloc_rig *r, int stream, void *ptr, uint8_t byte, uint64_t bytes);

#endif
