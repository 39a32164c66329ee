/* SPDX-License-Identifier: MIT */
/* The CUDA backend: what its files share. No file outside lib/cuda includes this one.
 *
 *  device   one GPU's primary context, by the CUDA runtime. Whoever calls may have another GPU current: each entry that needs
 *           it makes this one current for its own length (fsdp__cuda_enter).
 *  stream   a cudaStream_t, ours or the caller's (wrapped); with it what a trace's spans need.
 *  event    a cudaEvent_t without timing. Spans of a trace take events with timing from a pool.
 *  waiter   blocks the host until an event is done: asks for spin_ns, then sleeps for moments and asks in between.
 *  failure  the first error stays, with its sentence; every entry that meets one keeps it. check reads it, and no more.
 *  comm     NCCL. One ncclComm_t a communicator; a world of one has none and enqueues nothing.
 *  watch    one thread a device of a world of more than one: asks NCCL for its errors and events for how far collectives have
 *           got. The only thread that does; it touches the device by event query alone. */
#ifndef FSDP_LIB_CUDA_BACKEND_H
#define FSDP_LIB_CUDA_BACKEND_H

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdatomic.h>

#include "call.h"
#include "check.h"
#include "cuda_kernels.h"
#include "fsdp/backend.h"
#include "fsdp/cuda.h"
#include "monotonic.h"

/* ---- cuda_config.c ---- */

typedef struct fsdp__cuda_setup {
    fsdp_cuda_config config; /* its pointers are the caller's: good during fsdp_context_create only */
    uint32_t rank, world;
} fsdp__cuda_setup;

/* The backend's config, or its defaults for NULL, with what follows from it. Errors: ARG. */
fsdp_status fsdp__cuda_setup_read(const void *given, fsdp__cuda_setup *out_setup);

/* ---- cuda_device.c ---- */

typedef struct fsdp__cuda_spans fsdp__cuda_spans;   /* cuda_span.c */
typedef struct fsdp__cuda_waiter fsdp__cuda_waiter; /* cuda_wait.c */

typedef struct fsdp__cuda_stream fsdp__cuda_stream;

enum {
    FSDP__CUDA_SUM_SLOTS = 64, /* streams of a device that may have run SQUARE_SUM */
    FSDP__CUDA_FRONT = 4
};

/* One record of an event, as long as somebody may ask whether it has happened: the event's next record takes another one then.
 * Its memory stays until the device is closed. */
typedef struct fsdp__cuda_moment fsdp__cuda_moment;
struct fsdp__cuda_moment {
    cudaEvent_t native;
    uint32_t refs; /* under moment_lock, as is whatever names a moment; 0: it is free */
    fsdp__cuda_moment *next;
};

/* What a stream stands behind: the end of its last collective, and what it has waited for since; besides, it was given at most
 * operations of the backend's own that no one can hold up, as casts. So its next collective begins when all of this has
 * happened, or a moment later, and no event has to be recorded for that. n 0: not known. */
typedef struct fsdp__cuda_front {
    uint32_t n;
    bool has_more; /* such operations */
    fsdp__cuda_moment *at[FSDP__CUDA_FRONT];
} fsdp__cuda_front;

/* Of CUDA's driver, which this library is not linked with; its types are int, unsigned and enum. NULL: not found. */
typedef struct fsdp__cuda_driver {
    int (*device_get)(int *device, int ordinal);                    /* cuDeviceGet */
    int (*context_state)(int device, unsigned *flags, int *active); /* cuDevicePrimaryCtxGetState */
} fsdp__cuda_driver;

/* The first cache line is what every enqueue looks at; so it is in a stream and in a communicator. */
typedef struct fsdp__cuda_device {
    atomic_int status; /* the first error, written under `lock`, once */
    uint32_t debug;
    uint64_t jitter_ns;
    fsdp__cuda_moment *moments;  /* free ones */
    pthread_mutex_t moment_lock; /* over moments and their refs; nothing is locked inside */

    const fsdp_host_allocator *host;
    int ordinal; /* CUDA's number of the GPU */
    fsdp__cuda_driver driver;
    uint32_t rank;
    uint64_t timeout_ns, spin_ns, jitter_seed;
    fsdp_log_fn log;
    void *log_arg;
    int n_processors; /* multiprocessors, for grids */
    char *sums; /* device memory of the backend's own: SQUARE_SUM's, a slot a stream; the library counts none of it */
    uint32_t *stop; /* pinned, as the host and the GPU see it: 1 ends delays. Written once, by abort */
    fsdp__cuda_spans *spans;
    fsdp__cuda_waiter *waiter;
    struct fsdp__nccl_team *nccl; /* nccl_parts.h: while a communicator is open, in a world of more than one */

    pthread_mutex_t lock; /* over streams, spans and the sentence; never held in a call that can block */
    fsdp__cuda_stream *streams;
    uint32_t n_streams_made;
    uint64_t sum_slots; /* bit i: slot i has its stream */
    atomic_bool broken; /* an error has ended the context: nothing runs there any more, and nothing is waited for */
    atomic_bool stuck;  /* with broken: NCCL's kernels do not leave it, and CUDA's frees would wait for them */
    char sentence[FSDP__SENTENCE_BYTES];
} fsdp__cuda_device;

typedef struct fsdp__cuda_mark fsdp__cuda_mark; /* cuda_span.c: a span that is not written yet */

struct fsdp__cuda_stream {
    fsdp__cuda_device *dev;
    cudaStream_t native;
    fsdp__cuda_mark *begun; /* of the operation that is being enqueued */
    bool owned;             /* made here; else the caller's */
    /* Current, for an event too: it is the NULL stream, or jitter or FSDP_DEBUG_SYNC is on. */
    bool needs_device;
    /* The caller has its native stream, and may enqueue what nobody here knows of. */
    atomic_bool exposed;
    fsdp__cuda_front front;
    char name[32];
    uint64_t n_jitter;                        /* operations so far */
    uint32_t number;                          /* of the streams of its device, in order of creation */
    int sum_slot;                             /* -1: none yet */
    fsdp__cuda_mark *first_mark, **end_marks; /* enqueued, oldest first */
    fsdp__cuda_stream *next;
};

extern const fsdp_device_ops fsdp__cuda_device_ops;

/* Keep the first error and its sentence; returns FSDP_ERR_DEVICE. NO_MEMORY where CUDA says so, and STATE for what a capture
 * does not allow: those two break nothing and are not kept. cudaSuccess gives FSDP_OK. what: "cudaMalloc of 64 bytes". */
fsdp_status fsdp__cuda_fail(fsdp__cuda_device *dev, cudaError_t error, const char *what, ...)
    __attribute__((cold, format(printf, 3, 4)));
/* Keep status and its sentence, if it is the first. */
void fsdp__cuda_keep(fsdp__cuda_device *dev, fsdp_status status, const char *sentence);
/* The first error, with its sentence set, or FSDP_OK. Never calls CUDA. */
fsdp_status fsdp__cuda_check(void *dev);

/* ---- cuda_current.c ---- */

/* Make the device current where it is not. Returns the one that was, for fsdp__cuda_leave; or -1: nothing to undo, also where
 * the process does not use that one: the thread is left on the device. */
int fsdp__cuda_enter(const fsdp__cuda_device *dev);
void fsdp__cuda_leave(int before);
/* After the first call of the runtime, which loads the driver. */
void fsdp__cuda_driver_find(fsdp__cuda_driver *driver);
/* The GPU has a primary context in this process; so it is said, too, if nobody can tell. */
bool fsdp__cuda_is_used(const fsdp__cuda_driver *driver, int ordinal);

#define FSDP__CUDA_TRY(dev, call)                                                                \
    do {                                                                                         \
        cudaError_t cuda_error_ = (call);                                                        \
        if (cuda_error_ != cudaSuccess) return fsdp__cuda_fail((dev), cuda_error_, "%s", #call); \
    } while (0)

/* The watch and other threads may call while a stream of this process captures in the strictest mode. What these two stand
 * around is no part of it. */
static inline enum cudaStreamCaptureMode fsdp__cuda_relax(void)
{
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    return mode;
}
static inline void fsdp__cuda_unrelax(enum cudaStreamCaptureMode mode)
{
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
}

/* Both: for calls on the device's behalf whatever this thread, or a capture, is at. */
typedef struct fsdp__cuda_inside {
    int before;
    enum cudaStreamCaptureMode mode;
} fsdp__cuda_inside;
static inline fsdp__cuda_inside fsdp__cuda_enter_relaxed(const fsdp__cuda_device *dev)
{
    const int before = fsdp__cuda_enter(dev);
    return (fsdp__cuda_inside){before, fsdp__cuda_relax()};
}
static inline void fsdp__cuda_leave_relaxed(fsdp__cuda_inside inside)
{
    fsdp__cuda_unrelax(inside.mode);
    fsdp__cuda_leave(inside.before);
}

/* Of a query: "not ready" is no error, and the caller's own cudaGetLastError shall not find it. */
static inline cudaError_t fsdp__cuda_asked(cudaError_t error)
{
    if (error == cudaErrorNotReady) (void)cudaGetLastError();
    return error;
}

/* ---- cuda_memory.c ---- */

fsdp_status fsdp__cuda_mem_alloc(void *dev, uint64_t bytes, fsdp_memory_kind kind, void **out_ptr);
void fsdp__cuda_mem_free(void *dev, void *ptr, uint64_t bytes, fsdp_memory_kind kind);

/* ---- cuda_stream.c ---- */

fsdp_status fsdp__cuda_stream_create(void *dev, const char *name, bool high_priority, void **out_stream);
void fsdp__cuda_stream_destroy(void *dev, void *stream);
fsdp_status fsdp__cuda_stream_drain(void *dev, void *stream, uint64_t timeout_ns);
bool fsdp__cuda_is_capturing(cudaStream_t native);

/* ---- cuda_moment.c ---- */

/* With so many refs. */
fsdp_status fsdp__cuda_moment_take(fsdp__cuda_device *dev, uint32_t refs, fsdp__cuda_moment **out_moment);
fsdp_status fsdp__cuda_moments_reserve(fsdp__cuda_device *dev, uint32_t n);
void fsdp__cuda_moments_close(fsdp__cuda_device *dev);
/* One ref more, of the one that is named there. */
fsdp__cuda_moment *fsdp__cuda_moment_hold(fsdp__cuda_device *dev, fsdp__cuda_moment *const *from);
void fsdp__cuda_moment_release(fsdp__cuda_device *dev, fsdp__cuda_moment *m); /* NULL is nothing */
/* What an event is recorded into that has this one: itself, or another one if anybody else holds it. */
fsdp_status fsdp__cuda_moment_to_record(fsdp__cuda_device *dev, fsdp__cuda_moment *moment,
                                        fsdp__cuda_moment **out_moment);
/* That has been recorded: the event has it from now on, with its ref. */
void fsdp__cuda_moment_recorded(fsdp__cuda_device *dev, fsdp__cuda_moment **moment, fsdp__cuda_moment *m);

/* Nobody but the backend gives the stream anything, and it gives nothing unasked. */
static inline bool fsdp__cuda_front_is_known(const fsdp__cuda_stream *s)
{
    return s->owned && !s->needs_device && !atomic_load_explicit(&s->exposed, memory_order_relaxed);
}
/* Its last operation has ended then; takes over a ref. */
void fsdp__cuda_front_set(fsdp__cuda_stream *s, fsdp__cuda_moment *m);
/* It waits for that. */
void fsdp__cuda_front_wait(fsdp__cuda_stream *s, fsdp__cuda_moment *const *moment);
/* A record on it now would be of just that moment: it is. False: it would not. */
bool fsdp__cuda_front_share(fsdp__cuda_stream *s, fsdp__cuda_moment **moment);
/* Whoever enqueues anything else calls one of these: a short operation of the backend's; what may take any time. */
static inline void fsdp__cuda_front_add(fsdp__cuda_stream *s) { s->front.has_more = true; }
void fsdp__cuda_front_release(fsdp__cuda_device *dev, fsdp__cuda_front *front);
static inline void fsdp__cuda_front_drop(fsdp__cuda_stream *s)
{
    if (s->front.n > 0) fsdp__cuda_front_release(s->dev, &s->front);
}

/* ---- cuda_event.c ---- */

fsdp_status fsdp__cuda_event_create(void *dev, void **out_event);
void fsdp__cuda_event_destroy(void *dev, void *event);
fsdp_status fsdp__cuda_event_record(void *dev, void *event, void *stream, fsdp_span *span);
fsdp_status fsdp__cuda_stream_wait(void *dev, void *stream, void *event, fsdp_span *span);
fsdp_status fsdp__cuda_event_query(void *dev, void *event, bool *out_done);
fsdp_status fsdp__cuda_event_wait(void *dev, void *event, uint64_t timeout_ns);

/* ---- cuda_wait.c ---- */

fsdp_status fsdp__cuda_waiter_open(fsdp__cuda_device *dev);
void fsdp__cuda_waiter_close(fsdp__cuda_device *dev);
/* Wake who waits, to look at the device's status again. No call of CUDA. */
void fsdp__cuda_waiter_wake(fsdp__cuda_waiter *waiter);
/* Block the host until the event is done, at most timeout_ns (UINT64_MAX: for ever). Errors: TIMEOUT; the device's; ABORTED as
 * soon as the device is aborted. */
fsdp_status fsdp__cuda_wait_host(fsdp__cuda_device *dev, cudaEvent_t event, uint64_t timeout_ns);
/* Until the stream is idle. An abort does not end it: what it stopped must have ended before its memory is given back.
 * Returns OK then, and for a device that is broken. */
fsdp_status fsdp__cuda_wait_idle(fsdp__cuda_stream *s, uint64_t timeout_ns);

/* ---- cuda_span.c ---- */

fsdp_status fsdp__cuda_spans_open(fsdp__cuda_device *dev);
void fsdp__cuda_spans_close(fsdp__cuda_device *dev);
/* The span's start, on the stream; it is s->begun until end (instant: there and then) or the next begin. */
fsdp_status fsdp__cuda_span_begin(fsdp__cuda_stream *s, fsdp_span *span);
fsdp_status fsdp__cuda_span_end(fsdp__cuda_stream *s, bool instant);
/* Write the spans that are done; all: forget the others, too. */
void fsdp__cuda_spans_write(fsdp__cuda_stream *s, bool all);

/* ---- cuda_launch.c ---- */

fsdp_status fsdp__cuda_launch(void *dev, void *stream, const fsdp_device_op *op, fsdp_span *span);
/* Before and after each thing that is enqueued: the device's first error, the delay of jitter and the start of its span; its
 * end, and FSDP_DEBUG_SYNC. Collectives use them, too. The device is current (fsdp__cuda_enter). */
fsdp_status fsdp__cuda_before(fsdp__cuda_stream *s, fsdp_span *span);
fsdp_status fsdp__cuda_after(fsdp__cuda_stream *s, fsdp_span *span);
/* The second half of after, for what is an instant. */
fsdp_status fsdp__cuda_sync(fsdp__cuda_stream *s);

/* ---- cuda_side.c: the star between processes, a room between threads, the caller's own ---- */

extern const fsdp_side_ops fsdp__cuda_side_ops;

/* ---- nccl_*.c ---- */

extern const fsdp_comm_ops fsdp__nccl_comm_ops;

/* Memory of kind COLLECTIVE: NCCL's own where windows are wanted, else cudaMalloc's. The device is current. */
cudaError_t fsdp__nccl_mem_alloc(fsdp__cuda_device *dev, uint64_t bytes, void **out_ptr);
cudaError_t fsdp__nccl_mem_free(fsdp__cuda_device *dev, void *ptr);

#endif
