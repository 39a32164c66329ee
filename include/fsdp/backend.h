/* SPDX-License-Identifier: MIT */
/** @file backend.h  The seam: what a machine must offer. UNSTABLE: may change in any release; not for training programs.
 *
 *  A backend is three const tables (device, collectives, side channel), and capabilities as data. No slot is empty, but
 *  stream_is_capturing where nothing can be captured.
 *  Passing tests/conformance is what being a backend means. Only lib/device.c, lib/comm.c and lib/side.c call what takes
 *  memory, enqueues, waits or exchanges: it is traced and counted there, and its arguments have been checked, so that a table
 *  entry gets nothing but sense. Functions that fail set the sentence with fsdp_backend_fail and return its code. */
#ifndef FSDP_BACKEND_H
#define FSDP_BACKEND_H

#include "fsdp/device.h"
#include "fsdp/dtype.h"
#include "fsdp/trace.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Set this thread's error sentence (printf), return @p status. */
FSDP_API fsdp_status fsdp_backend_fail(fsdp_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

/** Capabilities. */
typedef struct fsdp_device_caps {
    size_t size;
    uint64_t alignment;   /**< bytes; every device pointer is a multiple. A power of two, at least 256 */
    uint64_t granularity; /**< bytes; device memory is taken in multiples */
    bool has_data;        /**< memory has content; false: addresses only, never read or written by anybody */
    bool can_host_call;   /**< FSDP_OPERATION_HOST_CALL works */
    bool can_capture;     /**< what a stream is given can be captured as a graph (capture.h) */
    bool native_kernels;  /**< the caller gives streams kernels himself, which no tape sees */
} fsdp_device_caps;

/** Where a backend writes when an enqueued thing began and ended, in its own ns; it may be read once the stream is
 *  drained. A NULL span is not written. */
typedef struct fsdp_span {
    uint64_t start_ns, end_ns;
} fsdp_span;

typedef enum fsdp_memory_kind {
    FSDP_MEMORY_KIND_DEVICE = 0,
    FSDP_MEMORY_KIND_PINNED = 1, /**< host memory that the device reads and writes; real memory on every backend */
    FSDP_MEMORY_KIND_COLLECTIVE = 2 /**< device memory that collectives travel in: a backend may take it from elsewhere */
} fsdp_memory_kind;

/** One parameter's part of a shard, as kernels see it: AdamW's table. Lives in device memory. */
typedef struct fsdp_kernel_segment {
    uint64_t offset, count; /**< elements, in the group's shard */
    float lr_scale;
    float decay;            /**< 1 or 0: factor on the optimizer's weight decay */
} fsdp_kernel_segment;

/** The step's small record in device memory: kernels read it, no host value is baked into them. */
typedef struct fsdp_device_step {
    float factor;           /**< on gradients: grad scale × clip */
    float lr;
    float bias1, bias2;     /**< 1 − beta^t */
    uint64_t updates;       /**< t: updates not skipped */
    uint64_t skip;          /**< 1: change nothing */
} fsdp_device_step;

/** A step's host values: STEP_INPUT writes them to device memory, STEP_RESULT reads them there. */
typedef struct fsdp_step_input {
    uint64_t step;
    float lr, factor, max_norm, beta1, beta2;
    uint32_t skip;
    uint32_t world;         /**< ranks that `total` was summed over */
    uint64_t order;         /**< hash of every collective that this rank has enqueued before the step's sum */
} fsdp_step_input;

/** What ranks sum in a step, in fp32: [0] Σ g²; [1 … 16] the caller's sums; then, for each of 8 pieces of 6 bits of `order`,
 *  the lowest first, the piece and its square. Up to 4096 ranks these sums are exact, and all ranks have the same piece if
 *  and only if ranks × the sum of squares is the sum squared: so every rank sees it, and all see the same. (With more
 *  ranks `order` is 0.) */
enum {
    FSDP_STEP_ORDER = 17, /* where the first piece stands */
    FSDP_STEP_ORDER_PIECES = 8,
    FSDP_STEP_ORDER_BITS = 6,
    FSDP_STEP_FLOATS = FSDP_STEP_ORDER + 2 * FSDP_STEP_ORDER_PIECES
};

/** What STEP_RESULT writes to pinned memory: fsdp_step_report without its size. */
typedef struct fsdp_report_record {
    uint64_t step, updates;
    uint32_t skipped;
    float lr, grad_norm, clip_scale;
    float sums[16];
    uint64_t differs;       /**< step, if ranks have enqueued different collectives before it (it is skipped then); else 0.
                                 Written last, and whole: the host may look before the step's event is done */
} fsdp_report_record;

/** Everything that runs on a stream but collectives. Copied at enqueue; pointers are device memory unless said. */
typedef struct fsdp_device_op {
    fsdp_operation kind;
    union {
        struct { void *dst; const void *src; uint64_t bytes; } copy;       /* either may be host memory */
        struct { void *dst; uint64_t bytes; uint8_t byte; } fill;
        struct { void *dst; const void *src; uint64_t count; fsdp_dtype dst_dtype, src_dtype; } cast;
        struct { void *dst; const void *src; uint64_t count; fsdp_dtype dst_dtype, src_dtype; } add; /* dst += src */
        /* *out += Σ x² over the segments only, in fp32, in an order that depends on counts alone */
        struct {
            float *out; const void *x;
            uint64_t count;       /* elements that x has; segments lie inside */
            const fsdp_kernel_segment *segments; uint64_t n_segments;
            fsdp_dtype dtype;
        } square_sum;
        /* *to = input, and the pieces of input.order and their squares to part[17 … 32]. */
        struct { float *part; fsdp_step_input *to; fsdp_step_input input; } step_input;
        /* total: part, summed over ranks. Computes *step and reports[input->step % n_reports] from it and *input (device
         * memory, which a STEP_INPUT wrote), then sets part[0 … 16] to zero for the next step. No host value is baked in but
         * addresses, so that a captured one can be replayed. */
        struct {
            float *part; const float *total;
            fsdp_device_step *step; const fsdp_step_input *input;
            fsdp_report_record *reports; uint32_t n_reports;
        } step_result;
        struct {
            void *master; const void *gradient; float *m, *v;
            uint64_t count;       /* elements that each of them has; segments lie inside */
            const fsdp_kernel_segment *segments; uint64_t n_segments;
            const fsdp_device_step *step;
            float beta1, beta2, eps, weight_decay;
            fsdp_dtype master_dtype, gradient_dtype;
        } adamw;
        struct { fsdp_host_fn fn; void *arg; } host_call;
        struct { uint64_t ns; } delay;
    } u;
} fsdp_device_op;

/** What a device's open gets. */
typedef struct fsdp_device_args {
    size_t size;
    const void *backend_config;
    const fsdp_host_allocator *host; /**< lives as long as the device */
    uint32_t debug;                  /**< FSDP_DEBUG_SYNC is the device's to do */
    uint64_t timeout_ns;
    fsdp_log_fn log;                 /**< for warnings; NULL: dropped */
    void *log_arg;
} fsdp_device_args;

typedef struct fsdp_device_ops {
    size_t size;
    const char *name;
    fsdp_status (*open)(const fsdp_device_args *args, void **out_dev, fsdp_device_caps *out_caps);
    void (*close)(void *dev);                       /* after every stream, event and block is gone */
    fsdp_status (*mem_alloc)(void *dev, uint64_t bytes, fsdp_memory_kind kind, void **out_ptr); /* bytes > 0, granular */
    void (*mem_free)(void *dev, void *ptr, uint64_t bytes, fsdp_memory_kind kind);
    /* Both, for PINNED on a device with data: from any thread, and not by args.host, whose locks may be held. */
    fsdp_status (*stream_create)(void *dev, const char *name, bool high_priority, void **out_stream);
    void (*stream_destroy)(void *dev, void *stream); /* waits until it is idle */
    fsdp_status (*stream_drain)(void *dev, void *stream, uint64_t timeout_ns);
    fsdp_status (*event_create)(void *dev, void **out_event);
    void (*event_destroy)(void *dev, void *event);   /* waits already enqueued stay good */
    fsdp_status (*event_record)(void *dev, void *event, void *stream, fsdp_span *span);
    /* for the event's last record before this call; span: how long the stream stood */
    fsdp_status (*stream_wait)(void *dev, void *stream, void *event, fsdp_span *span);
    fsdp_status (*event_query)(void *dev, void *event, bool *out_done);
    fsdp_status (*event_wait)(void *dev, void *event, uint64_t timeout_ns);           /* blocks the host */
    fsdp_status (*launch)(void *dev, void *stream, const fsdp_device_op *op, fsdp_span *span);
    fsdp_status (*check)(void *dev);                /* the device's sticky error, with its sentence; cheap, never blocks */
    void (*abort)(void *dev);                       /* any thread: wake every waiter, fail what is enqueued */
    uint64_t (*now_ns)(void *dev);
    bool (*stream_is_capturing)(void *stream);      /* can_capture: a capture is on, whoever began it; else NULL */
} fsdp_device_ops;

/** One collective, as enqueued. count as in comm.h. */
typedef struct fsdp_collective {
    fsdp_operation kind;      /**< ALL_GATHER … BARRIER */
    fsdp_dtype dtype;
    uint64_t count;
    const void *send;
    void *recv;
    uint32_t root;
    const char *label;        /**< unit or purpose; compared between ranks; lives as long as the communicator's owner */
    const char *pass;         /**< the pass it belongs to, "TRAIN", or NULL; as label */
    bool captured;            /**< its stream is inside a capture of the context */
    fsdp_span *span;
    uint64_t number;          /**< of its group on its communicator, as sentences have it, captures and replays counted;
                                   0: the backend counts */
} fsdp_collective;

typedef struct fsdp_side_ops fsdp_side_ops;

typedef struct fsdp_comm_args {
    size_t size;
    const void *backend_config;
    void *dev;
    const fsdp_host_allocator *host;
    uint32_t index;           /**< 0: the context's communicator; 1: the reduce communicator */
    uint64_t timeout_ns;
    const fsdp_side_ops *side_ops; /**< with side: open already, for what ranks must exchange to open a communicator */
    void *side;
} fsdp_comm_args;

typedef struct fsdp_comm_ops {
    size_t size;
    const char *name;
    fsdp_status (*open)(const fsdp_comm_args *args, void **out_comm);  /* collective */
    void (*close)(void *comm);
    fsdp_status (*enqueue)(void *comm, void *stream, const fsdp_collective *list, uint32_t n); /* n as one group */
    fsdp_status (*check)(void *comm);                                  /* MISMATCH, RANK_LOST, ABORTED with its sentence */
    void (*abort)(void *comm);                                         /* any thread */
    /* Memory of kind COLLECTIVE, whole, that this communicator's operations of one kind (ALL_GATHER, REDUCE_SCATTER) will be
     * in; collective, with the same bytes on every rank. A backend that has nothing to do gives NULL; what it cannot do is no
     * error. */
    fsdp_status (*attach)(void *comm, fsdp_operation kind, void *base, uint64_t bytes, void **out_handle);
    void (*detach)(void *comm, void *handle); /* before the memory goes; nothing uses it any more. NULL is nothing */
} fsdp_comm_ops;

/** What each rank did last, for the sentence that every rank gets when one is late, lost or out of order. Called by the side
 *  channel, from any thread, between open and close. */
typedef struct fsdp_side_words {
    void *arg;
    size_t bytes;                          /**< of one rank's blob; 0: nothing to tell */
    void (*tell)(void *arg, void *blob);   /**< this rank's, now */
    /** What goes behind @p sentence, from the blobs of all ranks (NULL: that rank did not answer), with its end, in at most
     *  bytes; what the sentence says already is left out. */
    void (*compose)(void *arg, const char *sentence, const void *const *blobs, uint32_t world, char *text, size_t bytes);
} fsdp_side_words;

typedef struct fsdp_side_args {
    size_t size;
    const void *backend_config;
    const fsdp_host_allocator *host;
    uint64_t timeout_ns;      /**< for open */
    fsdp_side_words words;
    /** Called at most once, by a thread of the channel or one that is in a call of it, when check begins to fail; so that who
     *  waits for a peer is woken. May be NULL. Not called by a channel whose ranks are threads: there the communicators
     *  meet in the same memory. */
    void (*failed)(void *arg);
    void *failed_arg;
} fsdp_side_args;

/** Small blobs between ranks, beside the collectives. The first failure stays, and is every rank's, with one sentence. */
struct fsdp_side_ops {
    size_t size;
    fsdp_status (*open)(const fsdp_side_args *args, void **out_side, uint32_t *out_rank, uint32_t *out_world); /* collective */
    void (*close)(void *side);
    /* all[r * bytes …] = rank r's blob; blocks until all have come. Takes no memory for up to 64 bytes */
    fsdp_status (*all_gather)(void *side, const void *mine, void *all, size_t bytes, uint64_t timeout_ns);
    /* data of rank root in everybody's data */
    fsdp_status (*broadcast)(void *side, void *data, size_t bytes, uint32_t root, uint64_t timeout_ns);
    /* Any thread: fail on every rank. ABORTED: returns within 20 ms, reaches every rank within 100 with this sentence. Another:
     * the words of all ranks are put behind it, which takes 500 ms, or two seconds where rank 0 is slow or stopped; on return
     * check has the whole sentence. */
    void (*fail)(void *side, fsdp_status status, const char *sentence);
    fsdp_status (*check)(void *side); /* never blocks */
};

struct fsdp_backend {
    size_t size;
    const char *name;
    const fsdp_device_ops *device;
    const fsdp_comm_ops *comm;
    const fsdp_side_ops *side;
};

#ifdef __cplusplus
}
#endif
#endif
