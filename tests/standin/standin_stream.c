/* SPDX-License-Identifier: MIT */
/* Streams of the stand-in, and what they are given: copies, fills, host functions. */
#include "standin.h"

#include <stdlib.h>
#include <string.h>

struct standin_work {
    _Atomic(standin_work *) next;
    const standin_kind *kind; /* NULL: the stream ends */
    _Alignas(16) char arg[];
};

static pthread_mutex_t streams_lock =
    PTHREAD_MUTEX_INITIALIZER; /* over the list, and held where the NULL stream's rules apply */
static cudaStream_t streams, null_streams[STANDIN_DEVICES];
static pthread_mutex_t host_lock = PTHREAD_MUTEX_INITIALIZER; /* host functions may be serialised: here they are */

/* ---- The thread ---- */

static _Thread_local uint64_t ended_ns; /* when the last work of this thread's stream had ended */
static _Thread_local bool has_ended;

void standin_work_has_ended(void)
{
    ended_ns = fsdp__now_ns();
    has_ended = true;
}

uint64_t standin_ended_ns(void) { return ended_ns; }

static void release(cudaStream_t s)
{
    if (atomic_fetch_sub(&s->refs, 1) > 1) return;
    pthread_mutex_lock(&streams_lock);
    cudaStream_t *link = &streams;
    while (*link != s) link = &(*link)->next;
    *link = s->next;
    pthread_mutex_unlock(&streams_lock);
    pthread_mutex_destroy(&s->lock);
    free(s->first);
    free(s);
}

/* One ref more, of a stream in the list; false: it is going. */
static bool hold(cudaStream_t s)
{
    int refs = atomic_load(&s->refs);
    while (refs > 0 && !atomic_compare_exchange_weak(&s->refs, &refs, refs + 1)) {
    }
    return refs > 0;
}

static standin_work *next_work(cudaStream_t s)
{
    standin_work *next;
    for (;;) {
        uint32_t seen = atomic_load_explicit(&s->pushed, memory_order_relaxed);
        next = atomic_load_explicit(&s->first->next, memory_order_acquire);
        if (next != NULL) return next;
        (void)fsdp__futex_wait(&s->pushed, seen, UINT64_MAX, false);
    }
}

static void *stream_main(void *arg)
{
    cudaStream_t s = arg;
    for (;;) {
        standin_work *work = next_work(s);
        free(s->first);
        s->first = work;
        if (work->kind == NULL) break;
        has_ended = work->kind->is_instant;
        if (work->kind->always || !standin_is_broken(s->device)) work->kind->run(work->arg);
        if (!has_ended) standin_work_has_ended();
        atomic_fetch_add_explicit(&s->n_done, 1, memory_order_release);
        atomic_fetch_add_explicit(&s->done, 1, memory_order_relaxed);
        fsdp__futex_wake_all(&s->done, false);
    }
    release(s);
    return NULL;
}

cudaStream_t standin_stream_make(int device, unsigned flags)
{
    pthread_t thread;
    pthread_attr_t detached;
    cudaStream_t s = calloc(1, sizeof *s);
    standin_work *none = calloc(1, sizeof *none);
    if (s == NULL || none == NULL) standin_die("no memory for a stream");
    s->device = device, s->flags = flags;
    s->first = s->last = none;
    atomic_init(&s->refs, 2);
    pthread_mutex_init(&s->lock, NULL);
    pthread_mutex_lock(&streams_lock);
    s->next = streams;
    streams = s;
    pthread_mutex_unlock(&streams_lock);
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    if (pthread_create(&thread, &detached, stream_main, s) != 0) standin_die("no thread for a stream");
    pthread_attr_destroy(&detached);
    return s;
}

/* ---- Enqueueing ---- */

void standin_push_now(cudaStream_t s, const standin_kind *kind, const void *arg)
{
    size_t bytes = kind != NULL ? kind->bytes : 0;
    standin_work *work = calloc(1, sizeof *work + bytes);
    if (work == NULL) standin_die("no memory for a stream's work");
    work->kind = kind;
    if (bytes > 0) memcpy(work->arg, arg, bytes);
    if (kind != NULL && kind->enter != NULL) kind->enter(work->arg);
    pthread_mutex_lock(&s->lock);
    if (kind != NULL) atomic_fetch_add_explicit(&s->n_pushed, 1, memory_order_relaxed);
    atomic_store_explicit(&s->last->next, work, memory_order_release);
    s->last = work;
    atomic_fetch_add_explicit(&s->pushed, 1, memory_order_relaxed);
    pthread_mutex_unlock(&s->lock);
    fsdp__futex_wake_all(&s->pushed, false);
}

void standin_stream_leave(cudaStream_t s)
{
    standin_push_now(s, NULL, NULL);
    release(s);
}

static void wait_done(cudaStream_t s, uint64_t n)
{
    for (;;) {
        uint32_t seen = atomic_load_explicit(&s->done, memory_order_relaxed);
        if (atomic_load_explicit(&s->n_done, memory_order_acquire) >= n) return;
        (void)fsdp__futex_wait(&s->done, seen, fsdp__after_ns(STANDIN_LOOK_NS), false);
    }
}

typedef struct other_stream {
    cudaStream_t stream; /* a ref */
    uint64_t n;
} other_stream;

static void run_other_stream(void *arg)
{
    const other_stream *other = arg;
    wait_done(other->stream, other->n);
    release(other->stream);
}

static const standin_kind other_stream_kind = {run_other_stream, NULL, sizeof(other_stream), true, false};

static void stand_behind(cudaStream_t s, cudaStream_t other)
{
    other_stream wait = {other, atomic_load_explicit(&other->n_pushed, memory_order_relaxed)};
    if (wait.n > 0 && hold(other)) standin_push_now(s, &other_stream_kind, &wait);
}

/* The NULL stream's rules: it begins when all blocking streams of its device have done what they were given before, and
 * they what comes after when it has ("Default Stream" in CUDA's guide). */
static void push_blocking(cudaStream_t s, const standin_kind *kind, const void *arg)
{
    pthread_mutex_lock(&streams_lock);
    for (cudaStream_t other = streams; other != NULL; other = other->next) {
        bool blocks = (other->flags & cudaStreamNonBlocking) == 0 && other->device == s->device && other != s;
        if (blocks && (s->is_null || other->is_null)) stand_behind(s, other);
    }
    standin_push_now(s, kind, arg);
    pthread_mutex_unlock(&streams_lock);
}

cudaError_t standin_push(cudaStream_t s, const standin_kind *kind, const void *arg)
{
    if (atomic_load_explicit(&s->capture, memory_order_relaxed) != NULL) return standin_capture_work(s, kind, arg);
    if (s->flags & cudaStreamNonBlocking) {
        standin_push_now(s, kind, arg);
        return cudaSuccess;
    }
    cudaError_t error = s->is_null ? standin_null_is_free(s->device) : cudaSuccess;
    if (error == cudaSuccess) push_blocking(s, kind, arg);
    return error;
}

cudaError_t standin_launch(cudaStream_t given, const standin_kind *kind, const void *arg)
{
    cudaStream_t s = NULL;
    STANDIN_BEGIN();
    cudaError_t error = standin_stream_of(given, &s);
    if (error == cudaSuccess && s->device != standin_current()) error = cudaErrorInvalidResourceHandle;
    return standin_return(error == cudaSuccess ? standin_push(s, kind, arg) : error);
}

cudaError_t standin_stream_of(cudaStream_t given, cudaStream_t *out_stream)
{
    static pthread_mutex_t null_lock = PTHREAD_MUTEX_INITIALIZER;
    if (given == cudaStreamPerThread) return cudaErrorNotSupported;
    *out_stream = given;
    if (given != NULL && given != cudaStreamLegacy) return cudaSuccess;
    int device = standin_current();
    pthread_mutex_lock(&null_lock);
    if (null_streams[device] == NULL) {
        null_streams[device] = standin_stream_make(device, cudaStreamDefault);
        null_streams[device]->is_null = true;
    }
    *out_stream = null_streams[device];
    pthread_mutex_unlock(&null_lock);
    return cudaSuccess;
}

void standin_wait_device(int device)
{
    cudaStream_t *held;
    size_t n = 0;
    pthread_mutex_lock(&streams_lock);
    for (cudaStream_t s = streams; s != NULL; s = s->next) n++;
    held = calloc(n + 1, sizeof *held);
    if (held == NULL) standin_die("no memory to wait for a device");
    n = 0;
    for (cudaStream_t s = streams; s != NULL; s = s->next)
        if (s->device == device && hold(s)) held[n++] = s;
    pthread_mutex_unlock(&streams_lock);
    for (size_t i = 0; i < n; i++) {
        wait_done(held[i], atomic_load_explicit(&held[i]->n_pushed, memory_order_relaxed));
        release(held[i]);
    }
    free(held);
}

/* ---- CUDA's calls ---- */

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority)
{
    (void)priority;
    STANDIN_BEGIN();
    *stream = standin_stream_make(standin_current(), flags);
    atomic_fetch_add(&standin_live[standin_current()], 1);
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags)
{
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

/* It returns at once; the stream goes when it has done what it was given. */
cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    cudaError_t entered = standin_enter();
    if (!standin_may_give_back(entered)) return standin_return(entered);
    if (stream == NULL || stream == cudaStreamLegacy) return standin_return(cudaErrorInvalidResourceHandle);
    atomic_fetch_sub(&standin_live[stream->device], 1);
    standin_stream_leave(stream);
    return standin_return(entered);
}

static cudaError_t may_ask(const char *call, cudaStream_t given, cudaStream_t *out_stream)
{
    cudaError_t error = standin_begin(call);
    if (error == cudaSuccess) error = standin_may_call();
    if (error == cudaSuccess) error = standin_stream_of(given, out_stream);
    return error == cudaSuccess ? standin_is_free(*out_stream) : error;
}

cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    cudaError_t error = may_ask(__func__, stream, &stream);
    if (error != cudaSuccess) return standin_return(error);
    bool done = atomic_load_explicit(&stream->n_done, memory_order_acquire) >=
                atomic_load_explicit(&stream->n_pushed, memory_order_relaxed);
    return standin_return(done ? cudaSuccess : cudaErrorNotReady);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    cudaError_t error = may_ask(__func__, stream, &stream);
    if (error != cudaSuccess) return standin_return(error);
    wait_done(stream, atomic_load_explicit(&stream->n_pushed, memory_order_relaxed));
    return standin_return(standin_enter());
}

cudaError_t cudaDeviceSynchronize(void)
{
    STANDIN_BEGIN();
    cudaError_t error = standin_may_call();
    if (error == cudaSuccess) standin_wait_device(standin_current());
    return standin_return(error == cudaSuccess ? standin_enter() : error);
}

cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned *flags)
{
    STANDIN_BEGIN();
    cudaError_t error = standin_stream_of(stream, &stream);
    if (error == cudaSuccess) error = standin_is_free(stream);
    if (error == cudaSuccess) *flags = stream->flags;
    return standin_return(error);
}

#if CUDART_VERSION >= 12080
cudaError_t cudaStreamGetDevice(cudaStream_t stream, int *device)
{
    STANDIN_BEGIN();
    cudaError_t error = standin_stream_of(stream, &stream);
    if (error == cudaSuccess) error = standin_is_free(stream);
    if (error == cudaSuccess) *device = stream->device;
    return standin_return(error);
}
#endif

/* ---- Copies, fills, host functions ---- */

typedef struct copy_arg {
    void *dst;
    const void *src;
    size_t bytes;
    void *staged; /* freed behind it */
    int device;
} copy_arg;

static void run_copy(void *arg)
{
    const copy_arg *copy = arg;
    if (!standin_is_broken(copy->device)) memmove(copy->dst, copy->src, copy->bytes);
    free(copy->staged);
}

static const standin_kind copy_kind = {run_copy, NULL, sizeof(copy_arg), true, false};

/* From pageable memory it is staged, so that the source may change at once; into pageable memory it has happened when the
 * call returns ("API synchronization behavior"). */
cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream)
{
    (void)kind;
    STANDIN_BEGIN();
    copy_arg copy = {dst, src, bytes, NULL, 0};
    cudaError_t error = standin_stream_of(stream, &stream);
    if (error != cudaSuccess || bytes == 0) return standin_return(error);
    copy.device = stream->device;
    bool to_pageable = !standin_is_known(dst, bytes), from_pageable = !standin_is_known(src, bytes);
    if ((to_pageable || from_pageable) && (error = standin_is_free(stream)) != cudaSuccess)
        return standin_return(error);
    if (from_pageable && !to_pageable) {
        copy.src = copy.staged = malloc(bytes);
        if (copy.staged == NULL) return standin_return(cudaErrorMemoryAllocation);
        memcpy(copy.staged, src, bytes);
    }
    error = standin_push(stream, &copy_kind, &copy);
    if (error != cudaSuccess) free(copy.staged);
    if (error == cudaSuccess && to_pageable)
        wait_done(stream, atomic_load_explicit(&stream->n_pushed, memory_order_relaxed));
    return standin_return(error);
}

cudaError_t cudaMemcpy(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind)
{
    cudaError_t error = standin_may_call();
    if (error != cudaSuccess) return standin_return(error);
    error = cudaMemcpyAsync(dst, src, bytes, kind, NULL);
    return error == cudaSuccess ? cudaStreamSynchronize(NULL) : error;
}

typedef struct fill_arg {
    void *dst;
    int byte;
    size_t bytes;
} fill_arg;

static void run_fill(void *arg)
{
    const fill_arg *fill = arg;
    memset(fill->dst, fill->byte, fill->bytes);
}

static const standin_kind fill_kind = {run_fill, NULL, sizeof(fill_arg), false, false};

cudaError_t cudaMemsetAsync(void *dst, int byte, size_t bytes, cudaStream_t stream)
{
    STANDIN_BEGIN();
    fill_arg fill = {dst, byte, bytes};
    cudaError_t error = standin_stream_of(stream, &stream);
    if (error != cudaSuccess || bytes == 0) return standin_return(error);
    if (!standin_is_known(dst, bytes)) return standin_return(cudaErrorInvalidValue);
    return standin_return(standin_push(stream, &fill_kind, &fill));
}

/* "Asynchronous with respect to the host", on the NULL stream. */
cudaError_t cudaMemset(void *dst, int byte, size_t bytes)
{
    cudaError_t error = standin_may_call();
    return error != cudaSuccess ? standin_return(error) : cudaMemsetAsync(dst, byte, bytes, NULL);
}

typedef struct host_arg {
    cudaHostFn_t fn;
    void *arg;
} host_arg;

static void run_host(void *arg)
{
    const host_arg *host = arg;
    pthread_mutex_lock(&host_lock);
    standin_in_host_function(true);
    host->fn(host->arg);
    standin_in_host_function(false);
    pthread_mutex_unlock(&host_lock);
}

static const standin_kind host_kind = {run_host, NULL, sizeof(host_arg), false, false};

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t fn, void *arg)
{
    STANDIN_BEGIN();
    host_arg host = {fn, arg};
    cudaError_t error = standin_stream_of(stream, &stream);
    return standin_return(error == cudaSuccess ? standin_push(stream, &host_kind, &host) : error);
}
