/* SPDX-License-Identifier: MIT */
/* A data loader: batches are made in pinned memory and copied to the device ahead of the compute that reads them. Checks
 * itself: exits with 0 if every sample of every batch arrived whole, in its turn.
 *
 *     03_loader [BATCHES]                default: 240
 *
 * Three buffers take turns. The host fills one, the copy lane brings it to the device, compute reads it there: batch b
 * is being filled while b − 1 is being copied and b − 2 is being read. Nobody waits for more than he needs:
 *
 *     host      waits for copied[i] of the last turn, then fills pinned[i]
 *     copy      waits for used[i] of the last turn, then copies pinned[i] to device[i] and records copied[i]
 *     compute   waits for copied[i], reads device[i], records used[i] */
#include <fsdp/fsdp.h>
#ifdef WITH_JEMALLOC
#include <fsdp/jemalloc.h>
#endif
#include <stdio.h>
#include <stdlib.h>

enum { BUFFERS = 3, SAMPLES = 256, FLOATS = 128, BATCH_BYTES = SAMPLES * FLOATS * (int)sizeof(float), LINES = 4 };

#define TRY(call)                                                                      \
    do {                                                                               \
        fsdp_status status_ = (call);                                                  \
        if (status_ != FSDP_OK) {                                                      \
            fprintf(stderr, "%s: %s\n", fsdp_status_name(status_), fsdp_last_error()); \
            exit(1);                                                                   \
        }                                                                              \
    } while (0)

static const uint64_t timeout_ns = 10000000000u;

/* What compute gets with a batch. */
typedef struct task {
    const float *batch; /* (SAMPLES, FLOATS), on the device */
    int number;         /* of the batch */
    struct loader *loader;
} task;

typedef struct buffer {
    float *pinned;
    void *device;
    fsdp_event *copied, *used;
} buffer;

typedef struct loader {
    fsdp_context *ctx;
    fsdp_allocator *allocator;
    fsdp_stream *compute, *copy;
    buffer buffers[BUFFERS];
    /* Batch b's is written again for b + 6, when the host has waited for the copy of b + 4, which waited for the use of
     * b + 1. */
    task tasks[2 * BUFFERS];
    long n_wrong; /* floats; compute's own until the host has waited for it */
    double sum;
} loader;

/* Element k of batch b: stands for a file that is read, or a picture that is decoded. */
static float element(int b, int k) { return (float)(((unsigned)b * 2654435761u + (unsigned)k * 40503u) >> 9 & 0xffff); }

static void make_batch(float *batch, int b)
{
    for (int k = 0; k < SAMPLES * FLOATS; k++) batch[k] = element(b, k);
}

static void read_batch(void *arg)
{
    const task *t = arg;
    for (int k = 0; k < SAMPLES * FLOATS; k++) {
        t->loader->n_wrong += t->batch[k] != element(t->number, k);
        t->loader->sum += (double)t->batch[k];
    }
}

static void open_buffer(loader *l, buffer *buf)
{
    void *pinned;
    TRY(fsdp_pinned_alloc(l->ctx, BATCH_BYTES, &pinned));
    buf->pinned = pinned;
    TRY(fsdp_allocator_alloc(l->allocator, BATCH_BYTES, l->compute, "batch", &buf->device));
    TRY(fsdp_allocator_record_stream(l->allocator, buf->device, l->copy));
    TRY(fsdp_event_create(l->ctx, &buf->copied));
    TRY(fsdp_event_create(l->ctx, &buf->used));
}

static void close_buffer(loader *l, buffer *buf)
{
    TRY(fsdp_event_wait_host(buf->copied, timeout_ns)); /* nobody reads the pinned batch any more */
    TRY(fsdp_pinned_free(l->ctx, buf->pinned));
    TRY(fsdp_allocator_free(l->allocator, buf->device));
    fsdp_event_destroy(buf->copied);
    fsdp_event_destroy(buf->used);
}

/* Fill a buffer with batch b and send it on its way, as soon as the batch before it has left. An event that was never
 * recorded keeps nobody waiting. */
static void load(loader *l, int b)
{
    buffer *buf = &l->buffers[b % BUFFERS];
    TRY(fsdp_event_wait_host(buf->copied, timeout_ns));
    make_batch(buf->pinned, b);
    TRY(fsdp_stream_wait_event(l->copy, buf->used));
    TRY(fsdp_stream_copy(l->copy, buf->device, buf->pinned, BATCH_BYTES));
    TRY(fsdp_event_record(buf->copied, l->copy));
}

static void use(loader *l, int b)
{
    buffer *buf = &l->buffers[b % BUFFERS];
    task *t = &l->tasks[b % (2 * BUFFERS)];
    *t = (task){buf->device, b, l};
    TRY(fsdp_stream_wait_event(l->compute, buf->copied));
    TRY(fsdp_stream_host_call(l->compute, read_batch, t));
    TRY(fsdp_event_record(buf->used, l->compute));
}

static void run(loader *l, int batches)
{
    const int every = batches < LINES ? 1 : batches / LINES;
    for (int b = 0; b < batches; b++) {
        if (b == 0) load(l, 0);
        if (b + 1 < batches) load(l, b + 1); /* one ahead */
        use(l, b);
        if ((b + 1) % every != 0) continue;
        TRY(fsdp_event_wait_host(l->buffers[b % BUFFERS].used, timeout_ns));
        printf("%d of %d batches: mean %.1f, %ld floats wrong\n", b + 1, batches,
               l->sum / ((double)(b + 1) * SAMPLES * FLOATS), l->n_wrong);
    }
    TRY(fsdp_stream_drain_host(l->compute, timeout_ns));
}

int main(int argc, char **argv)
{
    const int batches = argc > 1 ? atoi(argv[1]) : 240;
    if (batches < 1) {
        fprintf(stderr, "usage: 03_loader [BATCHES]\n");
        return 2;
    }
    static loader l;
    fsdp_config config = FSDP_CONFIG_INIT;
#ifdef WITH_JEMALLOC
    if (fsdp_jemalloc_host_create(&config.host) != FSDP_OK) return 1;
    config.pinned = fsdp_jemalloc_pinned(); /* pieces of a few large regions */
#endif
    TRY(fsdp_context_create(&config, &l.ctx));
    TRY(fsdp_stream_create(l.ctx, "compute", &l.compute));
    TRY(fsdp_allocator_create(l.ctx, NULL, &l.allocator));
    l.copy = fsdp_context_lane(l.ctx, FSDP_LANE_COPY);
    for (int i = 0; i < BUFFERS; i++) open_buffer(&l, &l.buffers[i]);
    run(&l, batches);
    for (int i = 0; i < BUFFERS; i++) close_buffer(&l, &l.buffers[i]);
    TRY(fsdp_allocator_destroy(l.allocator));
    TRY(fsdp_stream_release(l.compute));
    TRY(fsdp_context_destroy(l.ctx));
#ifdef WITH_JEMALLOC
    if (fsdp_jemalloc_host_destroy(&config.host) != FSDP_OK) return 1;
#endif
    puts(l.n_wrong == 0 ? "ok" : "FAILED: a batch was overwritten, or read before it had arrived");
    return l.n_wrong == 0 ? 0 : 1;
}
