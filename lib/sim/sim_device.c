/* SPDX-License-Identifier: MIT */
/* The sim device: streams, events and memory in virtual time (sim.h has the model). Device memory is addresses that
 * nobody may touch; none is given out twice, so a stale one is never valid again. */
#include "sim.h"

#include <assert.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>

#include "check.h"
#include "hostmem.h"

/* Above what x86-64 and aarch64 give to user programs by default (2^47, 2^48), so that using one faults. */
static const uint64_t FIRST_ADDRESS = (uint64_t)1 << 52, LAST_ADDRESS = (uint64_t)1 << 63;

enum { MAX_WORLD = 1 << 20 }; /* the side channel keeps a few bytes a rank */

typedef struct stream {
    uint64_t end_ns; /* of its last operation */
} stream;

typedef struct event {
    bool recorded;
    uint64_t ns;
} event;

typedef struct block {
    void *ptr;
    uint64_t bytes;
    fsdp_memory_kind kind;
} block;

/* What device memory would hold of a step, which has no content here: what the host said last, and how many updates there
 * have been. One for each place of an input. */
typedef struct step_memory {
    const fsdp_step_input *at;
    fsdp_step_input input;
    uint64_t updates;
} step_memory;

struct fsdp__sim_device {
    const fsdp_host_allocator *host;
    fsdp_sim_config config;
    bool sync; /* FSDP_DEBUG_SYNC */
    atomic_bool aborted;
    pthread_mutex_t lock; /* over everything below, streams and events: several threads may call */
    uint64_t host_ns;     /* the host's clock */
    uint64_t next_address;
    block *blocks;
    size_t n_blocks, blocks_capacity;
    step_memory *steps;
    size_t n_steps, steps_capacity;
    bool broken; /* a free did not match */
    char broken_text[160];
};

/* ---- Config and arithmetic ---- */

static bool is_power_of_two(uint64_t x) { return x != 0 && (x & (x - 1)) == 0; }

fsdp_status fsdp__sim_read_config(const void *backend_config, fsdp_sim_config *out)
{
    *out = (fsdp_sim_config)FSDP_SIM_CONFIG_INIT;
    if (backend_config != NULL)
        FSDP_TRY(fsdp__read_config("fsdp_sim_config", out, sizeof *out, backend_config, sizeof *out));
    if (out->world > MAX_WORLD)
        return fsdp__fail(FSDP_ERR_ARG, "fsdp_sim_config.world is %" PRIu32 ", expected 1 to %d", out->world,
                          MAX_WORLD);
    if (out->rank >= out->world)
        return fsdp__fail(FSDP_ERR_ARG, "fsdp_sim_config: rank %" PRIu32 " of a world of %" PRIu32, out->rank,
                          out->world);
    if (!is_power_of_two(out->alignment) || out->alignment < 256)
        return fsdp__fail(FSDP_ERR_ARG, "fsdp_sim_config.alignment is %" PRIu64 ", not a power of two of at least 256",
                          out->alignment);
    if (!is_power_of_two(out->granularity))
        return fsdp__fail(FSDP_ERR_ARG, "fsdp_sim_config.granularity is %" PRIu64 ", not a power of two",
                          out->granularity);
    return FSDP_OK;
}

uint64_t fsdp__sim_add_ns(uint64_t a, uint64_t b) { return a > UINT64_MAX - b ? UINT64_MAX : a + b; }

uint64_t fsdp__sim_transfer_ns(fsdp__u128 bytes, uint64_t bytes_per_second)
{
    if (bytes_per_second == 0) return 0;
    fsdp__u128 ns = (bytes * 1000000000u + bytes_per_second - 1) / bytes_per_second;
    return ns > UINT64_MAX ? UINT64_MAX : (uint64_t)ns;
}

static uint64_t later(uint64_t a, uint64_t b) { return a > b ? a : b; }

/* ---- Open, close, errors ---- */

static fsdp_status sim_check(void *dev)
{
    fsdp__sim_device *d = dev;
    if (atomic_load_explicit(&d->aborted, memory_order_acquire))
        return fsdp__fail(FSDP_ERR_ABORTED, "sim device of rank %" PRIu32 ": aborted", d->config.rank);
    pthread_mutex_lock(&d->lock);
    fsdp_status status = d->broken ? fsdp__fail(FSDP_ERR_DEVICE, "%s", d->broken_text) : FSDP_OK;
    pthread_mutex_unlock(&d->lock);
    return status;
}

static void sim_abort(void *dev)
{
    fsdp__sim_device *d = dev;
    atomic_store_explicit(&d->aborted, true, memory_order_release);
}

static fsdp_status sim_open(const fsdp_device_args *args, void **out_dev, fsdp_device_caps *out_caps)
{
    fsdp_sim_config config;
    FSDP_TRY(fsdp__sim_read_config(args->backend_config, &config));
    fsdp__sim_device *d = fsdp__host_alloc(args->host, 1, sizeof *d);
    if (d == NULL) return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "sim device: the host allocator returned NULL");
    d->host = args->host;
    d->config = config;
    d->sync = (args->debug & FSDP_DEBUG_SYNC) != 0;
    d->next_address = FIRST_ADDRESS;
    atomic_init(&d->aborted, false);
    pthread_mutex_init(&d->lock, NULL); /* cannot fail on Linux with default attributes */
    *out_dev = d;
    *out_caps =
        (fsdp_device_caps){.size = sizeof *out_caps, .alignment = config.alignment, .granularity = config.granularity};
    return FSDP_OK;
}

static void sim_close(void *dev)
{
    fsdp__sim_device *d = dev;
    assert(d->n_blocks == 0 || d->broken);
    pthread_mutex_destroy(&d->lock);
    fsdp__host_free(d->host, d->steps, d->steps_capacity, sizeof *d->steps);
    fsdp__host_free(d->host, d->blocks, d->blocks_capacity, sizeof *d->blocks);
    fsdp__host_free(d->host, d, 1, sizeof *d);
}

/* ---- Memory ---- */

/* Granular bytes at an aligned address; NULL: none are left. A step behind them stays free: no two blocks touch. */
static void *take_addresses(fsdp__sim_device *d, uint64_t bytes)
{
    uint64_t step = later(d->config.alignment, d->config.granularity), address = d->next_address;
    if (bytes > LAST_ADDRESS - address) return NULL;
    d->next_address += (bytes + step - 1) / step * step + step;
    if (d->next_address > LAST_ADDRESS) d->next_address = LAST_ADDRESS;
    return (void *)(uintptr_t)address;
}

static fsdp_status sim_mem_alloc(void *dev, uint64_t bytes, fsdp_memory_kind kind, void **out_ptr)
{
    fsdp__sim_device *d = dev;
    void *ptr = NULL;
    pthread_mutex_lock(&d->lock);
    bool ok = fsdp__host_grow(d->host, &d->blocks, &d->blocks_capacity, d->n_blocks + 1, sizeof *d->blocks);
    if (ok && kind != FSDP_MEMORY_KIND_PINNED) ptr = take_addresses(d, bytes);
    if (ok && kind == FSDP_MEMORY_KIND_PINNED) ptr = fsdp__host_alloc(d->host, (size_t)bytes, 1);
    if (ptr != NULL) d->blocks[d->n_blocks++] = (block){ptr, bytes, kind};
    pthread_mutex_unlock(&d->lock);
    if (ptr == NULL && ok && kind != FSDP_MEMORY_KIND_PINNED)
        return fsdp__fail(FSDP_ERR_NO_MEMORY, "sim device: %" PRIu64 " bytes are more than there are addresses", bytes);
    if (ptr == NULL)
        return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "sim device, for %" PRIu64 " bytes: no host memory", bytes);
    *out_ptr = ptr;
    return FSDP_OK;
}

static block *find_block(fsdp__sim_device *d, const void *ptr, uint64_t bytes, fsdp_memory_kind kind)
{
    for (size_t i = d->n_blocks; i-- > 0;) {
        block *b = &d->blocks[i];
        if (b->ptr == ptr) return b->bytes == bytes && b->kind == kind ? b : NULL;
    }
    return NULL;
}

/* A free that matches no block is remembered as the device's error: there is nobody here to return it to. */
static void sim_mem_free(void *dev, void *ptr, uint64_t bytes, fsdp_memory_kind kind)
{
    fsdp__sim_device *d = dev;
    pthread_mutex_lock(&d->lock);
    block *b = find_block(d, ptr, bytes, kind);
    if (b != NULL) {
        *b = d->blocks[--d->n_blocks];
        if (kind == FSDP_MEMORY_KIND_PINNED) fsdp__host_free(d->host, ptr, (size_t)bytes, 1);
    } else if (!d->broken) {
        d->broken = true;
        snprintf(d->broken_text, sizeof d->broken_text, "sim device: free of %" PRIu64 " %s bytes at %p: no such block",
                 bytes, kind == FSDP_MEMORY_KIND_PINNED ? "pinned" : "device", ptr);
    }
    pthread_mutex_unlock(&d->lock);
}

/* ---- Streams and events ---- */

/* When something enqueued on s now would start. */
static uint64_t stream_now(const fsdp__sim_device *d, const stream *s) { return later(s->end_ns, d->host_ns); }

static void set_span(fsdp_span *span, uint64_t start_ns, uint64_t end_ns)
{
    if (span != NULL) *span = (fsdp_span){start_ns, end_ns};
}

fsdp_status fsdp__sim_occupy(fsdp__sim_device *dev, void *stream_, uint64_t not_before_ns, uint64_t ns,
                             fsdp_span *out_span)
{
    stream *s = stream_;
    FSDP_TRY(sim_check(dev));
    pthread_mutex_lock(&dev->lock);
    uint64_t start_ns = later(stream_now(dev, s), not_before_ns);
    s->end_ns = fsdp__sim_add_ns(start_ns, ns);
    if (dev->sync) dev->host_ns = s->end_ns;
    set_span(out_span, start_ns, s->end_ns);
    pthread_mutex_unlock(&dev->lock);
    return FSDP_OK;
}

static fsdp_status sim_stream_create(void *dev, const char *name, bool high_priority, void **out_stream)
{
    fsdp__sim_device *d = dev;
    (void)high_priority; /* streams share nothing here */
    stream *s = fsdp__host_alloc(d->host, 1, sizeof *s);
    if (s == NULL) return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "sim stream %s: the host allocator returned NULL", name);
    *out_stream = s;
    return FSDP_OK;
}

/* Block the host until `ns`, or for timeout_ns of its own time. */
static fsdp_status host_wait(fsdp__sim_device *d, uint64_t ns, uint64_t timeout_ns, const char *what)
{
    FSDP_TRY(sim_check(d));
    pthread_mutex_lock(&d->lock);
    uint64_t limit_ns = fsdp__sim_add_ns(d->host_ns, timeout_ns);
    bool late = ns > limit_ns;
    d->host_ns = later(d->host_ns, late ? limit_ns : ns);
    pthread_mutex_unlock(&d->lock);
    if (late)
        return fsdp__fail(FSDP_ERR_TIMEOUT,
                          "%s: it comes at %" PRIu64 " ns, waited until %" PRIu64 " ns (virtual time)", what, ns,
                          limit_ns);
    return FSDP_OK;
}

static fsdp_status sim_stream_drain(void *dev, void *stream_, uint64_t timeout_ns)
{
    fsdp__sim_device *d = dev;
    const stream *s = stream_;
    pthread_mutex_lock(&d->lock);
    uint64_t ns = s->end_ns;
    pthread_mutex_unlock(&d->lock);
    return host_wait(d, ns, timeout_ns, "end of a sim stream");
}

static void sim_stream_destroy(void *dev, void *stream_)
{
    fsdp__sim_device *d = dev;
    stream *s = stream_;
    pthread_mutex_lock(&d->lock);
    d->host_ns = stream_now(d, s);
    pthread_mutex_unlock(&d->lock);
    fsdp__host_free(d->host, s, 1, sizeof *s);
}

static fsdp_status sim_event_create(void *dev, void **out_event)
{
    fsdp__sim_device *d = dev;
    event *e = fsdp__host_alloc(d->host, 1, sizeof *e);
    if (e == NULL) return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "sim event: the host allocator returned NULL");
    *out_event = e;
    return FSDP_OK;
}

static void sim_event_destroy(void *dev, void *event_)
{
    fsdp__sim_device *d = dev;
    fsdp__host_free(d->host, event_, 1, sizeof(event));
}

static fsdp_status sim_event_record(void *dev, void *event_, void *stream_, fsdp_span *span)
{
    fsdp__sim_device *d = dev;
    event *e = event_;
    const stream *s = stream_;
    FSDP_TRY(sim_check(d));
    pthread_mutex_lock(&d->lock);
    *e = (event){true, stream_now(d, s)};
    set_span(span, e->ns, e->ns);
    pthread_mutex_unlock(&d->lock);
    return FSDP_OK;
}

static fsdp_status sim_stream_wait(void *dev, void *stream_, void *event_, fsdp_span *span)
{
    fsdp__sim_device *d = dev;
    const event *e = event_;
    stream *s = stream_;
    FSDP_TRY(sim_check(d));
    pthread_mutex_lock(&d->lock);
    uint64_t start_ns = stream_now(d, s);
    s->end_ns = later(start_ns, e->recorded ? e->ns : 0);
    if (d->sync) d->host_ns = s->end_ns;
    set_span(span, start_ns, s->end_ns);
    pthread_mutex_unlock(&d->lock);
    return FSDP_OK;
}

static fsdp_status sim_event_query(void *dev, void *event_, bool *out_done)
{
    fsdp__sim_device *d = dev;
    const event *e = event_;
    FSDP_TRY(sim_check(d));
    pthread_mutex_lock(&d->lock);
    *out_done = !e->recorded || e->ns <= d->host_ns;
    pthread_mutex_unlock(&d->lock);
    return FSDP_OK;
}

static fsdp_status sim_event_wait(void *dev, void *event_, uint64_t timeout_ns)
{
    fsdp__sim_device *d = dev;
    const event *e = event_;
    pthread_mutex_lock(&d->lock);
    uint64_t ns = e->recorded ? e->ns : 0;
    pthread_mutex_unlock(&d->lock);
    return host_wait(d, ns, timeout_ns, "a sim event");
}

/* ---- Operations ---- */

/* Bytes that an operation reads and writes. Tables of segments are left out: they have no content here. */
static fsdp__u128 op_bytes(const fsdp_device_op *op)
{
    fsdp__u128 each; /* of one element, all buffers together; what is updated in place counts twice */
    switch (op->kind) {
    case FSDP_OPERATION_COPY: return (fsdp__u128)2 * op->u.copy.bytes;
    case FSDP_OPERATION_FILL: return op->u.fill.bytes;
    case FSDP_OPERATION_CAST:
        each = fsdp_dtype_bytes(op->u.cast.dst_dtype) + fsdp_dtype_bytes(op->u.cast.src_dtype);
        return each * op->u.cast.count;
    case FSDP_OPERATION_ADD:
        each = 2 * fsdp_dtype_bytes(op->u.add.dst_dtype) + fsdp_dtype_bytes(op->u.add.src_dtype);
        return each * op->u.add.count;
    case FSDP_OPERATION_SQUARE_SUM:
        each = fsdp_dtype_bytes(op->u.square_sum.dtype);
        return each * op->u.square_sum.count + 2 * sizeof *op->u.square_sum.out;
    case FSDP_OPERATION_ADAMW:
        each = 2 * fsdp_dtype_bytes(op->u.adamw.master_dtype) + fsdp_dtype_bytes(op->u.adamw.gradient_dtype) +
               2 * sizeof *op->u.adamw.m + 2 * sizeof *op->u.adamw.v;
        return each * op->u.adamw.count + sizeof(fsdp_device_step);
    case FSDP_OPERATION_STEP_RESULT: /* total, part, the host's values, the device's step, the report */
        return (FSDP_STEP_FLOATS + FSDP_STEP_ORDER) * sizeof(float) + sizeof(fsdp_step_input) +
               2 * sizeof(fsdp_device_step) + sizeof(fsdp_report_record);
    case FSDP_OPERATION_STEP_INPUT:
        return (FSDP_STEP_FLOATS - FSDP_STEP_ORDER) * sizeof(float) + sizeof(fsdp_step_input);
    default: return 0;
    }
}

static fsdp_status find_step(fsdp__sim_device *d, const fsdp_step_input *at, step_memory **out_memory)
{
    size_t i = 0;
    while (i < d->n_steps && d->steps[i].at != at) i++;
    if (!fsdp__host_grow(d->host, &d->steps, &d->steps_capacity, i + 1, sizeof *d->steps))
        return fsdp__fail(FSDP_ERR_NO_HOST_MEMORY, "sim device, step: the host allocator returned NULL");
    if (i == d->n_steps) d->steps[d->n_steps++] = (step_memory){.at = at};
    *out_memory = &d->steps[i];
    return FSDP_OK;
}

/* The report is real memory, and so is written. Nothing is known of gradients: the norm is 0 and clips nothing. */
static fsdp_status keep_or_report(fsdp__sim_device *d, const fsdp_device_op *op)
{
    bool result = op->kind == FSDP_OPERATION_STEP_RESULT;
    step_memory *memory = NULL;
    FSDP_TRY(find_step(d, result ? op->u.step_result.input : op->u.step_input.to, &memory));
    if (!result) {
        memory->input = op->u.step_input.input;
        return FSDP_OK;
    }
    const fsdp_step_input *input = &memory->input;
    if (input->skip == 0) memory->updates++;
    op->u.step_result.reports[input->step % op->u.step_result.n_reports] =
        (fsdp_report_record){.step = input->step,
                             .updates = memory->updates,
                             .skipped = input->skip != 0,
                             .lr = input->lr,
                             .clip_scale = 1.0f};
    return FSDP_OK;
}

static fsdp_status sim_launch(void *dev, void *stream_, const fsdp_device_op *op, fsdp_span *span)
{
    fsdp__sim_device *d = dev;
    uint64_t ns = fsdp__sim_add_ns(d->config.kernel_latency_ns,
                                   fsdp__sim_transfer_ns(op_bytes(op), d->config.kernel_bytes_per_second));
    FSDP_TRY(sim_check(d));
    if (op->kind < FSDP_OPERATION_COPY || op->kind > FSDP_OPERATION_STEP_INPUT)
        return fsdp__fail(FSDP_ERR_UNSUPPORTED, "sim device: operation %d is none of a stream's", (int)op->kind);
    switch (op->kind) {
    case FSDP_OPERATION_HOST_CALL:
        return fsdp__fail(FSDP_ERR_UNSUPPORTED, "the sim backend runs no function: give compute as fsdp_stream_delay");
    case FSDP_OPERATION_DELAY: ns = op->u.delay.ns; break;
    case FSDP_OPERATION_STEP_INPUT:
    case FSDP_OPERATION_STEP_RESULT: {
        pthread_mutex_lock(&d->lock);
        fsdp_status status = keep_or_report(d, op);
        pthread_mutex_unlock(&d->lock);
        FSDP_TRY(status);
        break;
    }
    default: break;
    }
    return fsdp__sim_occupy(d, stream_, 0, ns, span);
}

static uint64_t sim_now_ns(void *dev)
{
    fsdp__sim_device *d = dev;
    pthread_mutex_lock(&d->lock);
    uint64_t ns = d->host_ns;
    pthread_mutex_unlock(&d->lock);
    return ns;
}

static const fsdp_device_ops device_ops = {
    .size = sizeof(fsdp_device_ops),
    .name = "sim",
    .open = sim_open,
    .close = sim_close,
    .mem_alloc = sim_mem_alloc,
    .mem_free = sim_mem_free,
    .stream_create = sim_stream_create,
    .stream_destroy = sim_stream_destroy,
    .stream_drain = sim_stream_drain,
    .event_create = sim_event_create,
    .event_destroy = sim_event_destroy,
    .event_record = sim_event_record,
    .stream_wait = sim_stream_wait,
    .event_query = sim_event_query,
    .event_wait = sim_event_wait,
    .launch = sim_launch,
    .check = sim_check,
    .abort = sim_abort,
    .now_ns = sim_now_ns,
};

const fsdp_backend *fsdp_sim_backend(void)
{
    static const fsdp_backend backend = {sizeof backend, "sim", &device_ops, &fsdp__sim_comm_ops, &fsdp__sim_side_ops};
    return &backend;
}
