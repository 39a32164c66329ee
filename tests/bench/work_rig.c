/* SPDX-License-Identifier: MIT */
#include "work_rig.h"

#include <string.h>

enum { PERIOD = 256 }; /* elements after which the input repeats: 1 KiB */

void work_rig_open(work_rig *rig, const fsdp_config *config, const work_clock *ops, uint64_t max_bytes)
{
    *rig = (work_rig){.max_bytes = max_bytes, .ops = ops};
    WORK_TRY(fsdp_context_create(config, &rig->ctx));
    rig->comm = fsdp_context_comm(rig->ctx);
    rig->rank = fsdp_context_rank(rig->ctx);
    rig->world = fsdp_context_world(rig->ctx);
    WORK_TRY(fsdp_stream_create(rig->ctx, "app", &rig->app));
    WORK_TRY(fsdp_stream_create(rig->ctx, "wire", &rig->wire));
    WORK_TRY(fsdp_stream_create(rig->ctx, "idle", &rig->idle));
    fsdp_allocator_config pool = FSDP_ALLOCATOR_CONFIG_INIT;
    WORK_TRY(fsdp_allocator_create(rig->ctx, &pool, &rig->pool));
    WORK_TRY(fsdp_allocator_alloc(rig->pool, max_bytes, rig->app, "send", &rig->send));
    WORK_TRY(fsdp_allocator_alloc(rig->pool, max_bytes, rig->app, "recv", &rig->recv));
    void *in, *out;
    WORK_TRY(fsdp_pinned_alloc(rig->ctx, max_bytes, &in));
    WORK_TRY(fsdp_pinned_alloc(rig->ctx, max_bytes, &out));
    rig->in = in, rig->out = out;
    rig->clock = ops->open(rig);
}

void work_rig_close(work_rig *rig)
{
    rig->ops->close(rig->clock);
    WORK_TRY(fsdp_pinned_free(rig->ctx, rig->in));
    WORK_TRY(fsdp_pinned_free(rig->ctx, rig->out));
    WORK_TRY(fsdp_allocator_free(rig->pool, rig->send));
    WORK_TRY(fsdp_allocator_free(rig->pool, rig->recv));
    WORK_TRY(fsdp_allocator_destroy(rig->pool));
    WORK_TRY(fsdp_stream_release(rig->idle));
    WORK_TRY(fsdp_stream_release(rig->wire));
    WORK_TRY(fsdp_stream_release(rig->app));
    WORK_TRY(fsdp_context_destroy(rig->ctx));
}

/* Whole numbers, so that sums over ranks are exact in any order; other ones in each round. */
static float element(uint32_t i, uint32_t rank, uint32_t round) { return (float)((i + 3 * rank + 7 * round) % PERIOD); }

void work_drain(work_rig *rig)
{
    WORK_TRY(fsdp_stream_drain_host(rig->app, UINT64_MAX));
    WORK_TRY(fsdp_stream_drain_host(rig->wire, UINT64_MAX));
}

void work_fill(work_rig *rig, uint64_t bytes, uint32_t round)
{
    for (uint32_t i = 0; i < PERIOD; i++) rig->in[i] = element(i, rig->rank, round);
    for (uint64_t at = PERIOD * sizeof(float); at < bytes; at += PERIOD * sizeof(float))
        memcpy((char *)rig->in + at, rig->in, PERIOD * sizeof(float));
    WORK_TRY(fsdp_stream_copy(rig->app, rig->send, rig->in, bytes));
    WORK_TRY(fsdp_stream_fill(rig->app, rig->recv, 0xff, bytes));
    work_drain(rig);
}

bool work_is_right(work_rig *rig, uint64_t bytes, uint32_t round)
{
    float want[PERIOD] = {0.0f};
    for (uint32_t r = 0; r < rig->world; r++)
        for (uint32_t i = 0; i < PERIOD; i++) want[i] += element(i, r, round);
    WORK_TRY(fsdp_stream_copy(rig->app, rig->out, rig->recv, bytes));
    WORK_TRY(fsdp_stream_drain_host(rig->app, UINT64_MAX));
    uint64_t at = 0;
    while (at < bytes && memcmp((const char *)rig->out + at, want, sizeof want) == 0) at += sizeof want;
    return at >= bytes;
}

/* ---- The host backend's clock: its streams' own threads look at the time; a collective's times are on the tape ---- */

typedef struct host_clock {
    work_rig *rig;
    uint64_t at_ns[WORK_MARKS];
    fsdp_trace *trace;
} host_clock;

static void *host_open(work_rig *rig)
{
    host_clock *c = calloc(1, sizeof *c);
    if (c == NULL) exit(1);
    c->rig = rig;
    return c;
}

static void stamp(void *arg) { *(uint64_t *)arg = fsdp__now_ns(); }

static void host_mark(void *clock, int which, fsdp_stream *stream)
{
    host_clock *c = clock;
    WORK_TRY(fsdp_stream_host_call(stream, stamp, &c->at_ns[which]));
}

static double host_us_between(void *clock, int from, int to)
{
    const host_clock *c = clock;
    return ((double)c->at_ns[to] - (double)c->at_ns[from]) * 1e-3;
}

static void host_wire_begin(void *clock)
{
    host_clock *c = clock;
    WORK_TRY(fsdp_trace_start(c->rig->ctx, 64, &c->trace));
}

static void host_wire_end(void *clock) { (void)clock; }

static void host_wire_read(void *clock, uint64_t *begin_ns, uint64_t *end_ns, uint64_t *error_ns)
{
    host_clock *c = clock;
    WORK_TRY(fsdp_trace_stop_host(c->trace));
    *begin_ns = *end_ns = *error_ns = 0;
    for (uint64_t i = 0; i < fsdp_trace_count(c->trace); i++) {
        const fsdp_trace_record *r = fsdp_trace_at(c->trace, i);
        if (r->kind != FSDP_RECORD_OPERATION || r->operation != FSDP_OPERATION_ALL_REDUCE) continue;
        *begin_ns = r->start_ns;
        *end_ns = r->end_ns;
    }
    uint64_t device = fsdp_context_now_ns(c->rig->ctx),
             host = fsdp__now_ns(); /* the same clock, or one that began elsewhere */
    *begin_ns += host - device;
    *end_ns += host - device;
    fsdp_trace_destroy(c->trace);
}

const work_clock work_host_clock = {host_open,       free,          host_mark,     host_us_between,
                                    host_wire_begin, host_wire_end, host_wire_read};
