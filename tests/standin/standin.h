/* SPDX-License-Identifier: MIT */
/* A stand-in for a GPU: the functions of the CUDA runtime and of NCCL that lib/cuda and its tests call, on the CPU, so
 * that they run where there is no GPU, and under the sanitizers. Tests link it in place of both libraries; headers are
 * CUDA's and NCCL's.
 *
 *  device  a few of them, alike. Device memory is the host's, and what is in it is counted.
 *  stream  a thread, which does what it was given in order. Nothing orders two streams but events and the NULL stream's
 *          rules, so that ThreadSanitizer sees two that share memory without one: no lock is both the host's and theirs.
 *  moment  one record of an event. It stays as it is when the event is recorded again.
 *  NCCL    ranks are threads of a process, or processes forked from one (standin_nccl.c).
 *
 * What CUDA and NCCL promise is taken from their documentation, and said where it is done. Where they may do either of
 * two things, the stand-in does what asks more of its caller. It is no GPU: it has no speed, no memory model, no limit of
 * what runs at once, and its kernels are the host backend's. */
#ifndef FSDP_TESTS_STANDIN_H
#define FSDP_TESTS_STANDIN_H

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "host/host_room.h" /* sleeping until a word changes */
#include "monotonic.h"

enum {
    STANDIN_DEVICES = 16,
    STANDIN_LOOK_NS = 20000000 /* between looks of who waits: for an abort, or a broken device */
};

/* Ends the program: what it says is a mistake of whoever calls CUDA or NCCL, which these need not notice. */
_Noreturn void standin_die(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* ---- standin_device.c ---- */

/* First in every call that gives something back: a call from a host function; a process forked since; an error of before,
 * on the current device. */
cudaError_t standin_enter(void);
/* What is given back is, also on a broken device; the call says its error all the same. */
bool standin_may_give_back(cudaError_t entered);
/* First in every other one: an error that a test has asked for, besides. */
cudaError_t standin_begin(const char *call);
/* Last in every call: what cudaGetLastError says next. */
cudaError_t standin_return(cudaError_t error);
#define STANDIN_ENTER()                                               \
    do {                                                              \
        cudaError_t entered_ = standin_enter();                       \
        if (entered_ != cudaSuccess) return standin_return(entered_); \
    } while (0)

#define STANDIN_BEGIN()                                           \
    do {                                                          \
        cudaError_t begun_ = standin_begin(__func__);             \
        if (begun_ != cudaSuccess) return standin_return(begun_); \
    } while (0)

int standin_current(void);                         /* this thread's device */
void standin_break(int device, cudaError_t error); /* nothing runs there any more */
bool standin_is_broken(int device);
void standin_in_host_function(bool on);
bool standin_is_known(const void *ptr, uint64_t bytes); /* allocated here, device or page-locked */

/* For tests. From now on the n-th call with the device current fails: once, or it and all later ones, and what is enqueued is
 * not done (for_good). n 0: none. Of a call that is made again and again only the first three count. */
void standin_fail(int device, uint64_t n, cudaError_t error, bool for_good);
const char *standin_failed(int device); /* the call that has failed; NULL: none yet */
/* What has been made on the device and not been given back: streams, events and memory; communicators. */
extern atomic_int standin_live[STANDIN_DEVICES], standin_live_comms[STANDIN_DEVICES];

/* ---- standin_stream.c ---- */

/* What a stream does: run has a copy of `bytes` bytes, on the stream's thread; enter has it before, on the host, when it
 * is enqueued (of a graph: at each launch); NULL: nothing. */
typedef struct standin_kind {
    void (*run)(void *arg);
    void (*enter)(void *arg);
    size_t bytes;
    bool always;     /* on a broken device, too: it gives something back */
    bool is_instant; /* it takes no time */
} standin_kind;

typedef struct standin_moment standin_moment;
typedef struct standin_capture standin_capture;
typedef struct standin_work standin_work;

struct CUstream_st {
    int device;
    unsigned flags;
    bool is_null;
    atomic_int refs;      /* the caller, the thread, who waits for it */
    pthread_mutex_t lock; /* of who enqueues */
    standin_work *last;   /* under lock */
    standin_work *first;  /* the thread's: it is done */
    _Atomic uint64_t n_pushed, n_done;
    _Atomic uint32_t pushed, done;      /* to sleep by */
    _Atomic(standin_capture *) capture; /* under standin_capture.c's lock */
    uint32_t branch;                    /* of the capture */
    struct CUstream_st *next;           /* of all */
};

/* NULL is the current device's; an error where it does not exist. */
cudaError_t standin_stream_of(cudaStream_t given, cudaStream_t *out_stream);
cudaStream_t standin_stream_make(int device, unsigned flags);
void standin_stream_leave(cudaStream_t stream); /* its thread ends when all is done */
/* Enqueue; while it captures, into the capture. */
cudaError_t standin_push(cudaStream_t stream, const standin_kind *kind, const void *arg);
/* A kernel: as CUDA does, only while the stream's device is current. */
cudaError_t standin_launch(cudaStream_t given, const standin_kind *kind, const void *arg);
/* Not into a capture, and whatever the NULL stream's rules are. */
void standin_push_now(cudaStream_t stream, const standin_kind *kind, const void *arg);
void standin_wait_device(int device); /* until all its streams are idle */
/* In run: the work has ended, and who is told from now on comes later. Else it ends when run returns. */
void standin_work_has_ended(void);
/* In run: when what came before on the stream had ended. */
uint64_t standin_ended_ns(void);

/* ---- standin_event.c ---- */

standin_moment *standin_moment_make(void); /* of one ref */
standin_moment *standin_moment_hold(standin_moment *m);
void standin_moment_release(standin_moment *m);                     /* NULL is nothing */
void standin_record_moment(cudaStream_t stream, standin_moment *m); /* takes over a ref */
void standin_wait_moment(cudaStream_t stream, standin_moment *m);   /* takes over a ref */

/* ---- standin_capture.c ---- */

/* Before a call that CUDA's guide calls potentially unsafe while a stream captures. */
cudaError_t standin_may_call(void);
/* Of a call that never goes with a capture of this stream; it ends the capture. */
cudaError_t standin_is_free(cudaStream_t stream);
/* The NULL stream cannot be used while a blocking stream of the device captures. */
cudaError_t standin_null_is_free(int device);
cudaError_t standin_capture_work(cudaStream_t stream, const standin_kind *kind, const void *arg);
/* Record or wait; false: the stream does not capture, and the event was not recorded in a capture. */
typedef struct standin_mark {
    uint64_t capture; /* 0: not in one */
    uint32_t index;
} standin_mark;
cudaError_t standin_capture_record(cudaStream_t stream, standin_mark *mark);
cudaError_t standin_capture_wait(cudaStream_t stream, standin_mark mark, bool recorded);

#endif
