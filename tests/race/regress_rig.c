/* SPDX-License-Identifier: MIT */
#include "regress_rig.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fsdp/backend.h"
#include "hb_oracle.h"

enum { DEADLINE_S = 60, WATCHED = 16, KEPT = 4 };

/* A stream of the device's, by order of creation; the caller's come after the library's lanes. */
typedef struct watched {
    void *native;
    int n_begun, n_inside, n_ended; /* drains */
    bool destroyed;
} watched;

static struct {
    const fsdp_backend *inner;
    fsdp_device_ops device;
    fsdp_comm_ops comm;
    fsdp_backend backend;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    watched stream[WATCHED];
    int n_streams, n_before; /* n_before: made before the rig's */
    void *held;              /* the next drain of it stands; NULL: none */
    bool holding;
    int n_wrong; /* destroyed while they were drained */
    uint64_t left_bytes;
    bool keeps;
    int n_kept;
    struct {
        void *dev, *ptr;
        uint64_t bytes;
    } kept[KEPT];
    seen seen;
} watch = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

static atomic_int until_failure = -1; /* below 0: never */
static atomic_bool did_fail;

/* ---- Host memory ---- */

static void *host_alloc(void *arg, size_t bytes, size_t alignment)
{
    (void)arg;
    if (atomic_load(&until_failure) >= 0 && atomic_fetch_sub(&until_failure, 1) == 0) {
        atomic_store(&did_fail, true);
        return NULL;
    }
    return aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}

static void host_free(void *arg, void *ptr, size_t bytes, size_t alignment)
{
    (void)arg, (void)bytes, (void)alignment;
    free(ptr);
}

void host_memory_fails_after(int n)
{
    atomic_store(&did_fail, false);
    atomic_store(&until_failure, n);
}

bool host_memory_failed(void)
{
    atomic_store(&until_failure, -1);
    return atomic_load(&did_fail);
}

/* ---- The device, watched ---- */

static watched *find(const void *native)
{
    for (int i = watch.n_streams - 1; i >= 0; i--)
        if (watch.stream[i].native == native && !watch.stream[i].destroyed) return &watch.stream[i];
    return NULL;
}

static fsdp_status stream_create(void *dev, const char *name, bool high_priority, void **out_stream)
{
    fsdp_status status = watch.inner->device->stream_create(dev, name, high_priority, out_stream);
    if (status != FSDP_OK) return status;
    pthread_mutex_lock(&watch.lock);
    int i = 0;
    while (i < watch.n_streams && (i < watch.n_before + REGRESS_STREAMS || !watch.stream[i].destroyed)) i++;
    assert_true(i < WATCHED);
    if (i == watch.n_streams) watch.n_streams++;
    watch.stream[i] = (watched){.native = *out_stream};
    pthread_mutex_unlock(&watch.lock);
    return FSDP_OK;
}

static void stream_destroy(void *dev, void *stream)
{
    pthread_mutex_lock(&watch.lock);
    watched *w = find(stream);
    watch.n_wrong += w->n_inside > 0;
    w->destroyed = true;
    pthread_cond_broadcast(&watch.changed);
    pthread_mutex_unlock(&watch.lock);
    watch.inner->device->stream_destroy(dev, stream);
}

static fsdp_status stream_drain(void *dev, void *stream, uint64_t timeout_ns)
{
    pthread_mutex_lock(&watch.lock);
    watched *w = find(stream);
    w->n_begun++, w->n_inside++;
    pthread_cond_broadcast(&watch.changed);
    if (watch.held == stream) {
        watch.held = NULL;
        watch.holding = true;
        while (watch.holding) pthread_cond_wait(&watch.changed, &watch.lock);
    }
    bool gone = w->destroyed; /* the rig says so later; the device must not be asked */
    pthread_mutex_unlock(&watch.lock);
    fsdp_status status = gone ? FSDP_OK : watch.inner->device->stream_drain(dev, stream, timeout_ns);
    pthread_mutex_lock(&watch.lock);
    w->n_inside--, w->n_ended++;
    pthread_cond_broadcast(&watch.changed);
    pthread_mutex_unlock(&watch.lock);
    return status;
}

/* Calls of these come one at a time: the context's lock is held. */
static fsdp_status event_record(void *dev, void *event, void *stream, fsdp_span *span)
{
    fsdp_status status = watch.inner->device->event_record(dev, event, stream, span);
    watch.seen.records += status == FSDP_OK;
    return status;
}

static fsdp_status stream_wait(void *dev, void *stream, void *event, fsdp_span *span)
{
    fsdp_status status = watch.inner->device->stream_wait(dev, stream, event, span);
    watch.seen.waits += status == FSDP_OK;
    return status;
}

static fsdp_status launch(void *dev, void *stream, const fsdp_device_op *op, fsdp_span *span)
{
    fsdp_status status = watch.inner->device->launch(dev, stream, op, span);
    watch.seen.operations += status == FSDP_OK;
    return status;
}

static fsdp_status enqueue(void *comm, void *stream, const fsdp_collective *list, uint32_t n)
{
    fsdp_status status = watch.inner->comm->enqueue(comm, stream, list, n);
    if (status == FSDP_OK) watch.seen.operations += n;
    return status;
}

static fsdp_status mem_alloc(void *dev, uint64_t bytes, fsdp_memory_kind kind, void **out_ptr)
{
    bool counts = kind == FSDP_MEMORY_KIND_DEVICE && watch.left_bytes != UINT64_MAX;
    if (counts && bytes > watch.left_bytes)
        return fsdp_backend_fail(FSDP_ERR_NO_MEMORY, "small device: %llu bytes are left",
                                 (unsigned long long)watch.left_bytes);
    fsdp_status status = watch.inner->device->mem_alloc(dev, bytes, kind, out_ptr);
    if (status == FSDP_OK && counts) watch.left_bytes -= bytes;
    return status;
}

/* Device memory goes back with the context's lock held. */
static void mem_free(void *dev, void *ptr, uint64_t bytes, fsdp_memory_kind kind)
{
    if (!watch.keeps || kind != FSDP_MEMORY_KIND_DEVICE || watch.n_kept == KEPT) {
        watch.inner->device->mem_free(dev, ptr, bytes, kind);
        return;
    }
    watch.kept[watch.n_kept].dev = dev;
    watch.kept[watch.n_kept].ptr = ptr;
    watch.kept[watch.n_kept++].bytes = bytes;
}

void keep_freed_memory(void) { watch.keeps = true; }

static void free_kept(void)
{
    for (int i = 0; i < watch.n_kept; i++)
        watch.inner->device->mem_free(watch.kept[i].dev, watch.kept[i].ptr, watch.kept[i].bytes,
                                      FSDP_MEMORY_KIND_DEVICE);
    watch.n_kept = 0;
    watch.keeps = false;
}

void device_has(uint64_t bytes) { watch.left_bytes = bytes; }

static const fsdp_backend *watched_backend(void)
{
    watch.inner = fsdp_host_backend();
    watch.device = *watch.inner->device;
    watch.device.stream_create = stream_create;
    watch.device.stream_destroy = stream_destroy;
    watch.device.stream_drain = stream_drain;
    watch.device.event_record = event_record;
    watch.device.stream_wait = stream_wait;
    watch.device.launch = launch;
    watch.device.mem_alloc = mem_alloc;
    watch.device.mem_free = mem_free;
    watch.comm = *watch.inner->comm;
    watch.comm.enqueue = enqueue;
    watch.backend = *watch.inner;
    watch.backend.device = &watch.device;
    watch.backend.comm = &watch.comm;
    watch.n_streams = watch.n_before = watch.n_wrong = 0;
    watch.held = NULL;
    watch.holding = false;
    watch.left_bytes = UINT64_MAX;
    watch.seen = (seen){0, 0, 0};
    return &watch.backend;
}

seen seen_so_far(void) { return watch.seen; }

/* ---- Drains ---- */

static watched *of(const regress_rig *r, int stream)
{
    (void)r;
    return &watch.stream[watch.n_before + stream];
}

void hold_next_drain(const regress_rig *r, int stream)
{
    pthread_mutex_lock(&watch.lock);
    watch.held = of(r, stream)->native;
    pthread_mutex_unlock(&watch.lock);
}

void wait_until_drains(const regress_rig *r, int stream, int n)
{
    pthread_mutex_lock(&watch.lock);
    const watched *w = of(r, stream);
    while (w->n_begun < n && !w->destroyed) pthread_cond_wait(&watch.changed, &watch.lock);
    pthread_mutex_unlock(&watch.lock);
}

void wait_until_left(const regress_rig *r, int stream)
{
    pthread_mutex_lock(&watch.lock);
    const watched *w = of(r, stream);
    while (w->n_ended < 1 && !w->destroyed) pthread_cond_wait(&watch.changed, &watch.lock);
    pthread_mutex_unlock(&watch.lock);
}

void release_drain(void)
{
    pthread_mutex_lock(&watch.lock);
    watch.held = NULL;
    watch.holding = false;
    pthread_cond_broadcast(&watch.changed);
    pthread_mutex_unlock(&watch.lock);
}

int destroyed_while_drained(void)
{
    pthread_mutex_lock(&watch.lock);
    int n = watch.n_wrong;
    pthread_mutex_unlock(&watch.lock);
    return n;
}

/* ---- The rig ---- */

void regress_open(regress_rig *r)
{
    alarm(DEADLINE_S);
    *r = (regress_rig){.ctx = NULL};
    for (int i = 0; i < REGRESS_STREAMS; i++) {
        pthread_mutex_init(&r->gate[i].lock, NULL);
        pthread_cond_init(&r->gate[i].changed, NULL);
    }
    fsdp_config config = FSDP_CONFIG_INIT;
    config.backend = watched_backend();
    config.host = (fsdp_host_allocator){.alloc = host_alloc, .free = host_free};
    OK(fsdp_context_create(&config, &r->ctx));
    watch.n_before = watch.n_streams;
    static const char *const names[REGRESS_STREAMS] = {"A", "B", "C", "D"};
    for (int i = 0; i < REGRESS_STREAMS; i++) OK(fsdp_stream_create(r->ctx, names[i], &r->s[i]));
}

void regress_close(regress_rig *r)
{
    (void)host_memory_failed();
    release_drain();
    for (int i = 0; i < REGRESS_STREAMS; i++) let_go(r, i);
    if (r->trace != NULL) fsdp_trace_destroy(r->trace);
    OK(fsdp_allocator_destroy(r->a));
    for (int i = 0; i < REGRESS_STREAMS; i++) OK(fsdp_stream_release(r->s[i]));
    free_kept();
    OK(fsdp_context_destroy(r->ctx));
    for (int i = 0; i < REGRESS_STREAMS; i++) {
        pthread_cond_destroy(&r->gate[i].changed);
        pthread_mutex_destroy(&r->gate[i].lock);
    }
    alarm(0);
}

static regress_rig only;

int regress_setup(void **state)
{
    regress_open(&only);
    *state = &only;
    return 0;
}

int regress_teardown(void **state)
{
    regress_close(*state);
    return 0;
}

void make(regress_rig *r, uint64_t budget_bytes, uint64_t segment_bytes, fsdp_alloc_policy policy)
{
    fsdp_allocator_config config = FSDP_ALLOCATOR_CONFIG_INIT;
    config.budget_bytes = budget_bytes;
    config.segment_bytes = segment_bytes;
    config.policy = policy;
    OK(fsdp_allocator_create(r->ctx, &config, &r->a));
}

void *take(regress_rig *r, uint64_t bytes, int stream)
{
    void *ptr = NULL;
    OK(fsdp_allocator_alloc(r->a, bytes, r->s[stream], "taken", &ptr));
    return ptr;
}

fsdp_alloc_stats stats_of(const regress_rig *r)
{
    fsdp_alloc_stats stats = FSDP_ALLOC_STATS_INIT;
    OK(fsdp_allocator_stats(r->a, &stats));
    return stats;
}

fsdp_counters counters_of(const regress_rig *r)
{
    fsdp_counters counters = FSDP_COUNTERS_INIT;
    OK(fsdp_context_counters(r->ctx, &counters));
    return counters;
}

/* ---- Gates ---- */

static void stand_at_gate(void *arg)
{
    gate *g = arg;
    pthread_mutex_lock(&g->lock);
    g->entered = true;
    pthread_cond_broadcast(&g->changed);
    while (!g->open) pthread_cond_wait(&g->changed, &g->lock);
    pthread_mutex_unlock(&g->lock);
}

void hold_stream(regress_rig *r, int stream)
{
    gate *g = &r->gate[stream];
    pthread_mutex_lock(&g->lock);
    g->entered = g->open = false;
    pthread_mutex_unlock(&g->lock);
    OK(fsdp_stream_host_call(r->s[stream], stand_at_gate, g));
    pthread_mutex_lock(&g->lock);
    while (!g->entered) pthread_cond_wait(&g->changed, &g->lock);
    pthread_mutex_unlock(&g->lock);
}

void hold_full(regress_rig *r, int stream, int room)
{
    hold_stream(r, stream);
    for (int i = room; i < FIRST_QUEUE; i++) OK(fsdp_stream_delay(r->s[stream], 0));
}

void let_go(regress_rig *r, int stream)
{
    gate *g = &r->gate[stream];
    pthread_mutex_lock(&g->lock);
    g->open = true;
    pthread_cond_broadcast(&g->changed);
    pthread_mutex_unlock(&g->lock);
}

/* ---- The tape ---- */

void start_trace(regress_rig *r, uint64_t max_records)
{
    OK(fsdp_trace_start(r->ctx, max_records, &r->trace));
    r->at_start = watch.seen;
}

void check_tape(const regress_rig *r)
{
    seen tape = {0, 0, 0}, now = watch.seen;
    uint64_t n_host = 0; /* what the host waited for: the device has no part in it */
    for (uint64_t i = 0; i < fsdp_trace_count(r->trace); i++) {
        fsdp_record_kind kind = fsdp_trace_at(r->trace, i)->kind;
        tape.records += kind == FSDP_RECORD_EVENT;
        tape.waits += kind == FSDP_RECORD_WAIT;
        tape.operations += kind == FSDP_RECORD_OPERATION;
        n_host += kind == FSDP_RECORD_HOST;
    }
    uint64_t dropped = fsdp_trace_dropped(r->trace);
    if (dropped == 0) {
        assert_int_equal(tape.records, now.records - r->at_start.records);
        assert_int_equal(tape.waits, now.waits - r->at_start.waits);
        assert_int_equal(tape.operations, now.operations - r->at_start.operations);
    }
    uint64_t happened = now.records + now.waits + now.operations;
    happened -= r->at_start.records + r->at_start.waits + r->at_start.operations;
    assert_int_equal(fsdp_trace_count(r->trace) - n_host + dropped, happened);
    fsdp_counters counters = counters_of(r);
    assert_int_equal(counters.records, now.records);
    assert_int_equal(counters.waits, now.waits);
    assert_int_equal(counters.operations + counters.collectives, now.operations);
}

void check_no_race(regress_rig *r)
{
    char text[400] = "";
    OK(fsdp_trace_stop_host(r->trace));
    if (hb_check(r->trace, text, sizeof text) != 0) fail_msg("%s", text);
}
