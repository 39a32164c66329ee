/* SPDX-License-Identifier: MIT */
/* What a device must do, as tests that run on any backend. A backend takes part with a device_suite of its own and two
 * calls; what it cannot do (no data, no host calls, no jitter) is left out. */
#ifndef FSDP_TESTS_DEVICE_SUITE_H
#define FSDP_TESTS_DEVICE_SUITE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <pthread.h>

#include "fsdp/backend.h"

enum { CONFIG_BYTES = 256, FIXTURE_STREAMS = 4, FIXTURE_EVENTS = 6, FIXTURE_GATES = 4, FIXTURE_BLOCKS = 16 };

typedef struct device_suite {
    const fsdp_backend *backend;
    /* A backend_config in storage[CONFIG_BYTES]. NULL: the backend has no jitter, and jitter_ns is not 0. */
    const void *(*config)(void *storage, uint64_t jitter_ns, uint64_t jitter_seed);
    uint32_t max_ulps; /* by which divisions and roots may differ from IEEE's */
    /* A device that calls the host from one thread for all its streams: how the native stream is stopped until *word is not 0,
     * where word is pinned memory. NULL: a host call waits. */
    fsdp_status (*hold)(void *stream, uint32_t *word);
    uint32_t
        max_queued; /* operations that a stopped stream takes before the host has to wait; 0: as many as there are */
    bool runs_on;   /* what is enqueued when the device is aborted may run all the same */
} device_suite;

/* Each returns how many tests failed. */
int run_device_suite(const device_suite *suite); /* order, events, and the next */
int run_device_error_suite(const device_suite *suite);
int run_kernel_suite(const device_suite *suite); /* every operation against a plain reference */

/* A host call that waits until the test opens it: keeps a stream at one place for as long as the test wants. */
typedef struct gate {
    pthread_mutex_t lock;
    pthread_cond_t opened;
    bool open;
} gate;

void gate_init(gate *g); /* open */
void gate_fini(gate *g);
void gate_close(gate *g);
void gate_open(gate *g);
fsdp_device_op gate_op(gate *g); /* the host call that waits */

/* One device with streams, events and gates; all is given back by fixture_close, whatever a test has left behind. */
typedef struct fixture {
    const device_suite *suite;
    const fsdp_device_ops *ops;
    fsdp_host_allocator host;
    _Alignas(16) char config[CONFIG_BYTES];
    void *dev;
    fsdp_device_caps caps;
    void *stream[FIXTURE_STREAMS], *event[FIXTURE_EVENTS];
    gate gate[FIXTURE_GATES];
    uint32_t *words; /* [FIXTURE_GATES], with suite->hold; else NULL */
    struct {
        void *ptr;
        uint64_t bytes;
    } block[FIXTURE_BLOCKS];
} fixture;

enum { SECOND = 1000000000 };

#define DO(call) assert_int_equal((call), FSDP_OK)

/* False: the backend has no jitter. */
bool fixture_open(fixture *f, const device_suite *suite, uint32_t debug, uint64_t jitter_ns, uint64_t jitter_seed);
void fixture_close(fixture *f);
int fixture_setup(void **state); /* for CMocka: the initial state is a device_suite */
int fixture_teardown(void **state);

/* About half of the operations of a device with jitter. A delay is at least what was drawn, so gaps can only be longer: this
 * cannot fail on a slow machine. */
void assert_jitter_delays(const device_suite *suite);

/* Device memory that fixture_close frees. */
void *fixture_block(fixture *f, uint64_t bytes);
void launch(fixture *f, int stream, fsdp_device_op op, fsdp_span *span);
void record(fixture *f, int event, int stream);
void wait_event(fixture *f, int stream, int event);
void drain(fixture *f, int stream);
void host_call(fixture *f, int stream, fsdp_host_fn fn, void *arg);
void set_flag(void *flag);                          /* for host_call: an atomic_int becomes 1 */
void close_gate(fixture *f, int stream, int which); /* the stream stops here until open_gate */
void open_gate(fixture *f, int which);
bool is_done(fixture *f, int event);
enum { FIXTURE_NEVER_NS = 20000000 }; /* how long a test looks at what cannot happen */
/* The stream has not got to the event, and cannot. */
void assert_never(fixture *f, int event);

fsdp_device_op delay_op(uint64_t ns);
fsdp_device_op fill_op(void *dst, uint8_t byte, uint64_t bytes);
fsdp_device_op copy_op(void *dst, const void *src, uint64_t bytes);

/* Skip the test where the device has none. */
void need_host_calls(const fixture *f);
void need_data(const fixture *f);

#endif
