/* SPDX-License-Identifier: MIT */
/* One device under test, and short names for what tests ask of it. */
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "device_suite.h"
#include "hostmem.h"

enum { DEADLINE_S = 100 };

void gate_init(gate *g)
{
    pthread_mutex_init(&g->lock, NULL);
    pthread_cond_init(&g->opened, NULL);
    g->open = true;
}

void gate_fini(gate *g)
{
    pthread_mutex_destroy(&g->lock);
    pthread_cond_destroy(&g->opened);
}

void gate_close(gate *g)
{
    pthread_mutex_lock(&g->lock);
    g->open = false;
    pthread_mutex_unlock(&g->lock);
}

void gate_open(gate *g)
{
    pthread_mutex_lock(&g->lock);
    g->open = true;
    pthread_cond_broadcast(&g->opened);
    pthread_mutex_unlock(&g->lock);
}

static void wait_at_gate(void *arg)
{
    gate *g = arg;
    pthread_mutex_lock(&g->lock);
    while (!g->open) pthread_cond_wait(&g->opened, &g->lock);
    pthread_mutex_unlock(&g->lock);
}

fsdp_device_op gate_op(gate *g)
{
    return (fsdp_device_op){.kind = FSDP_OPERATION_HOST_CALL, .u.host_call = {wait_at_gate, g}};
}

bool fixture_open(fixture *f, const device_suite *suite, uint32_t debug, uint64_t jitter_ns, uint64_t jitter_seed)
{
    *f = (fixture){.suite = suite, .ops = suite->backend->device};
    fsdp_host_allocator none = {NULL, NULL, NULL, NULL};
    DO(fsdp__host_allocator_resolve(&none, &f->host));
    const void *config = suite->config(f->config, jitter_ns, jitter_seed);
    if (config == NULL && jitter_ns > 0) return false;
    fsdp_device_args args = {sizeof args, config, &f->host, debug, 10ull * SECOND, NULL, NULL};
    f->caps.size = sizeof f->caps;
    DO(f->ops->open(&args, &f->dev, &f->caps));
    if (suite->hold != NULL) {
        void *words = NULL;
        DO(f->ops->mem_alloc(f->dev, f->caps.granularity, FSDP_MEMORY_KIND_PINNED, &words));
        f->words = words;
    }
    for (int i = 0; i < FIXTURE_GATES; i++) gate_init(&f->gate[i]);
    for (int i = 0; i < FIXTURE_STREAMS; i++) DO(f->ops->stream_create(f->dev, "test", i % 2 == 1, &f->stream[i]));
    for (int i = 0; i < FIXTURE_EVENTS; i++) DO(f->ops->event_create(f->dev, &f->event[i]));
    return true;
}

void fixture_close(fixture *f)
{
    for (int i = 0; i < FIXTURE_GATES; i++) open_gate(f, i);
    for (int i = 0; i < FIXTURE_STREAMS; i++)
        if (f->stream[i] != NULL) f->ops->stream_destroy(f->dev, f->stream[i]);
    for (int i = 0; i < FIXTURE_EVENTS; i++)
        if (f->event[i] != NULL) f->ops->event_destroy(f->dev, f->event[i]);
    for (int i = 0; i < FIXTURE_BLOCKS; i++)
        if (f->block[i].ptr != NULL)
            f->ops->mem_free(f->dev, f->block[i].ptr, f->block[i].bytes, FSDP_MEMORY_KIND_DEVICE);
    if (f->words != NULL) f->ops->mem_free(f->dev, f->words, f->caps.granularity, FSDP_MEMORY_KIND_PINNED);
    f->ops->close(f->dev);
    for (int i = 0; i < FIXTURE_GATES; i++) gate_fini(&f->gate[i]);
}

int fixture_setup(void **state)
{
    alarm(DEADLINE_S);
    static fixture f; /* tests run one after another */
    if (!fixture_open(&f, *state, 0, 0, 0)) return -1;
    *state = &f;
    return 0;
}

int fixture_teardown(void **state)
{
    fixture_close(*state);
    alarm(0);
    return 0;
}

void *fixture_block(fixture *f, uint64_t bytes)
{
    bytes = (bytes + f->caps.granularity) / f->caps.granularity * f->caps.granularity;
    int i = 0;
    while (i < FIXTURE_BLOCKS && f->block[i].ptr != NULL) i++;
    assert_true(i < FIXTURE_BLOCKS);
    DO(f->ops->mem_alloc(f->dev, bytes, FSDP_MEMORY_KIND_DEVICE, &f->block[i].ptr));
    f->block[i].bytes = bytes;
    return f->block[i].ptr;
}

void launch(fixture *f, int stream, fsdp_device_op op, fsdp_span *span)
{
    DO(f->ops->launch(f->dev, f->stream[stream], &op, span));
}

void record(fixture *f, int event, int stream)
{
    DO(f->ops->event_record(f->dev, f->event[event], f->stream[stream], NULL));
}
void wait_event(fixture *f, int stream, int event)
{
    DO(f->ops->stream_wait(f->dev, f->stream[stream], f->event[event], NULL));
}
void drain(fixture *f, int stream) { DO(f->ops->stream_drain(f->dev, f->stream[stream], 20ull * SECOND)); }

void host_call(fixture *f, int stream, fsdp_host_fn fn, void *arg)
{
    launch(f, stream, (fsdp_device_op){.kind = FSDP_OPERATION_HOST_CALL, .u.host_call = {fn, arg}}, NULL);
}

void close_gate(fixture *f, int stream, int which)
{
    gate_close(&f->gate[which]);
    if (f->words == NULL) {
        launch(f, stream, gate_op(&f->gate[which]), NULL);
        return;
    }
    __atomic_store_n(&f->words[which], 0, __ATOMIC_SEQ_CST);
    DO(f->suite->hold(f->stream[stream], &f->words[which]));
}

void open_gate(fixture *f, int which)
{
    gate_open(&f->gate[which]);
    if (f->words != NULL) __atomic_store_n(&f->words[which], 1, __ATOMIC_SEQ_CST);
}

bool is_done(fixture *f, int event)
{
    bool done = false;
    DO(f->ops->event_query(f->dev, f->event[event], &done));
    return done;
}

void assert_jitter_delays(const device_suite *suite)
{
    enum { N = 64, JITTER_NS = 2000000 };
    static fixture f;
    fsdp_span span[N] = {{0, 0}};
    assert_true(fixture_open(&f, suite, 0, JITTER_NS, 7));
    for (int i = 0; i < N; i++) launch(&f, 0, (fsdp_device_op){.kind = FSDP_OPERATION_DELAY, .u.delay = {0}}, &span[i]);
    drain(&f, 0);
    int n_delayed = 0;
    for (int i = 1; i < N; i++) n_delayed += span[i].start_ns - span[i - 1].end_ns >= JITTER_NS / 10;
    assert_true(n_delayed >= N / 4);
    fixture_close(&f);
}

fsdp_device_op delay_op(uint64_t ns) { return (fsdp_device_op){.kind = FSDP_OPERATION_DELAY, .u.delay = {ns}}; }

fsdp_device_op fill_op(void *dst, uint8_t byte, uint64_t bytes)
{
    return (fsdp_device_op){.kind = FSDP_OPERATION_FILL, .u.fill = {dst, bytes, byte}};
}

fsdp_device_op copy_op(void *dst, const void *src, uint64_t bytes)
{
    return (fsdp_device_op){.kind = FSDP_OPERATION_COPY, .u.copy = {dst, src, bytes}};
}

void assert_never(fixture *f, int event)
{
    assert_int_equal(f->ops->event_wait(f->dev, f->event[event], FIXTURE_NEVER_NS), FSDP_ERR_TIMEOUT);
    assert_false(is_done(f, event));
}

void need_host_calls(const fixture *f)
{
    if (!f->caps.can_host_call) skip();
}

void need_data(const fixture *f)
{
    if (!f->caps.has_data) skip();
}

void set_flag(void *arg) { atomic_store((atomic_int *)arg, 1); }
