/* SPDX-License-Identifier: MIT */
/* Split effects: when an operation begins, everything that it reads is copied and the kernel runs on the copies; when it
 * ends, what the kernel has written is copied back. The kernels are the host backend's. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "explore_parts.h"
#include "lib/host/host.h"

enum { MAX_PARTS = 6, COPY_ALIGNMENT = 64, POISON = 0xa5 };

/* ---- What an operation touches ---- */

typedef struct op_part {
    size_t at; /* of the pointer, in fsdp_device_op */
    uint64_t bytes;
    bool write, may_be_host;
} op_part;

#define PART(member, bytes, ...) \
    (op_part) { offsetof(fsdp_device_op, u.member), bytes, __VA_ARGS__ }

static uint32_t op_parts(const fsdp_device_op *op, op_part *p)
{
    uint64_t n = op->u.adamw.count, table;
    switch (op->kind) {
    case FSDP_OPERATION_COPY:
        p[0] = PART(copy.src, op->u.copy.bytes, false, true);
        p[1] = PART(copy.dst, op->u.copy.bytes, true, true);
        return 2;
    case FSDP_OPERATION_FILL: p[0] = PART(fill.dst, op->u.fill.bytes, true, false); return 1;
    case FSDP_OPERATION_CAST:
        p[0] = PART(cast.src, op->u.cast.count * fsdp_dtype_bytes(op->u.cast.src_dtype), false, false);
        p[1] = PART(cast.dst, op->u.cast.count * fsdp_dtype_bytes(op->u.cast.dst_dtype), true, false);
        return 2;
    case FSDP_OPERATION_ADD:
        p[0] = PART(add.src, op->u.add.count * fsdp_dtype_bytes(op->u.add.src_dtype), false, false);
        p[1] = PART(add.dst, op->u.add.count * fsdp_dtype_bytes(op->u.add.dst_dtype), true, false);
        return 2;
    case FSDP_OPERATION_SQUARE_SUM:
        table = op->u.square_sum.n_segments * sizeof(fsdp_kernel_segment);
        p[0] = PART(square_sum.x, op->u.square_sum.count * fsdp_dtype_bytes(op->u.square_sum.dtype), false, false);
        p[1] = PART(square_sum.segments, table, false, false);
        p[2] = PART(square_sum.out, sizeof(float), true, false);
        return 3;
    case FSDP_OPERATION_STEP_INPUT:
        p[0] = PART(step_input.part, FSDP_STEP_FLOATS * sizeof(float), true, false);
        p[1] = PART(step_input.to, sizeof(fsdp_step_input), true, false);
        return 2;
    case FSDP_OPERATION_STEP_RESULT:
        p[0] = PART(step_result.total, FSDP_STEP_FLOATS * sizeof(float), false, false);
        p[1] = PART(step_result.part, FSDP_STEP_ORDER * sizeof(float), true, false);
        p[2] = PART(step_result.step, sizeof(fsdp_device_step), true, false);
        p[3] = PART(step_result.input, sizeof(fsdp_step_input), false, false);
        p[4] = PART(step_result.reports, op->u.step_result.n_reports * sizeof(fsdp_report_record), true, false);
        return 5;
    case FSDP_OPERATION_ADAMW:
        p[0] = PART(adamw.gradient, n * fsdp_dtype_bytes(op->u.adamw.gradient_dtype), false, false);
        p[1] = PART(adamw.segments, op->u.adamw.n_segments * sizeof(fsdp_kernel_segment), false, false);
        p[2] = PART(adamw.step, sizeof(fsdp_device_step), false, false);
        p[3] = PART(adamw.master, n * fsdp_dtype_bytes(op->u.adamw.master_dtype), true, false);
        p[4] = PART(adamw.m, n * sizeof(float), true, false);
        p[5] = PART(adamw.v, n * sizeof(float), true, false);
        return 6;
    default: return 0;
    }
}

static char *pointer_of(const fsdp_device_op *op, size_t at)
{
    char *ptr;
    memcpy(&ptr, (const char *)op + at, sizeof ptr);
    return ptr;
}

static bool group_range(const explore_group *group, uint32_t i, explore_range *out_range)
{
    if (i / 2 >= group->n) return false;
    const fsdp_collective *c = &group->part[i / 2].c;
    uint64_t bytes = c->count * fsdp_dtype_bytes(c->dtype), world = group->comm->x->config.world;
    bool write = i % 2 == 1;
    char *ptr = write ? c->recv : (char *)(uintptr_t)c->send;
    if (c->kind == FSDP_OPERATION_BARRIER) bytes = 0;
    if (c->kind == (write ? FSDP_OPERATION_ALL_GATHER : FSDP_OPERATION_REDUCE_SCATTER)) bytes *= world;
    if (c->kind == FSDP_OPERATION_BROADCAST && !write && c->root != group->comm->rank) bytes = 0;
    *out_range = (explore_range){ptr, bytes, write, false};
    return true;
}

bool explore__range(const explore_item *item, uint32_t i, explore_range *out_range)
{
    if (item->kind == EXPLORE_GROUP) return group_range(item->u.group, i, out_range);
    if (item->kind != EXPLORE_OPERATION) return false;
    op_part part[MAX_PARTS];
    if (i >= op_parts(&item->u.op, part)) return false;
    *out_range =
        (explore_range){pointer_of(&item->u.op, part[i].at), part[i].bytes, part[i].write, part[i].may_be_host};
    return true;
}

explore_reach explore__reach(const explore_item *item)
{
    explore_reach reach = {NULL, NULL, item->number};
    explore_range r;
    for (uint32_t i = 0; explore__range(item, i, &r); i++) {
        if (r.bytes == 0) continue;
        bool first = reach.begin == reach.end;
        if (first || r.ptr < reach.begin) reach.begin = r.ptr;
        if (first || r.ptr + r.bytes > reach.end) reach.end = r.ptr + r.bytes;
    }
    return reach;
}

/* ---- Where it may be ---- */

static const char *what_is_wrong(explore *x, uint32_t rank, const explore_range *r)
{
    const explore_block *block = explore__find_block(x, r->ptr);
    const char *end = r->ptr + r->bytes;
    if (block == NULL || block->begin >= end)
        return r->may_be_host || x->config.host_memory ? NULL : "were never the device's";
    if (block->begin > r->ptr || end > block->end) return "lie over the edge of an allocation";
    if (!block->live) return "are given back to the device";
    if (block->rank != rank) return "are another rank's";
    return NULL;
}

static const char *name_of(const explore_item *item)
{
    static const char *const names[] = {"all-gather",  "reduce-scatter", "all-reduce", "broadcast", "barrier",
                                        "copy",        "fill",           "cast",       "add",       "square-sum",
                                        "step-result", "adamw",          "host call",  "delay",     "step-input"};
    fsdp_operation kind = item->kind == EXPLORE_GROUP ? item->u.group->part[0].c.kind : item->u.op.kind;
    return (size_t)kind < sizeof names / sizeof *names ? names[kind] : "?";
}

bool explore__check_ranges(explore_stream *s, const explore_item *item)
{
    explore *x = s->dev->x;
    explore_range r;
    for (uint32_t i = 0; explore__range(item, i, &r); i++) {
        const char *wrong = r.bytes > 0 ? what_is_wrong(x, s->dev->rank, &r) : NULL;
        if (wrong == NULL) continue;
        explore__complain(x, "stream %u (rank %u, %s), entry %llu: %s %s %llu bytes at %p, which %s", s->number,
                          s->dev->rank, s->name, (unsigned long long)s->head, name_of(item),
                          r.write ? "writes" : "reads", (unsigned long long)r.bytes, (void *)r.ptr, wrong);
        return false;
    }
    return true;
}

/* ---- Effects ---- */

char *explore__copy_room(explore_stream *s, size_t bytes)
{
    if (bytes <= s->copy_bytes) return s->copy;
    size_t wanted = (bytes * 2 + COPY_ALIGNMENT - 1) / COPY_ALIGNMENT * COPY_ALIGNMENT;
    char *copy = aligned_alloc(COPY_ALIGNMENT, wanted);
    if (copy == NULL) {
        explore__complain(s->dev->x, "no host memory for an operation's %zu bytes", bytes);
        return NULL;
    }
    free(s->copy);
    s->copy = copy;
    s->copy_bytes = wanted;
    return copy;
}

static size_t aligned(uint64_t bytes) { return (bytes + COPY_ALIGNMENT - 1) / COPY_ALIGNMENT * COPY_ALIGNMENT; }

/* A table of segments that a race has spoiled must not lead the kernel astray. */
static bool segments_fit(const fsdp_kernel_segment *segment, uint64_t n, uint64_t count)
{
    for (uint64_t i = 0; i < n; i++)
        if (segment[i].offset > count || segment[i].count > count - segment[i].offset) return false;
    return true;
}

static bool makes_sense(const fsdp_device_op *op)
{
    if (op->kind == FSDP_OPERATION_SQUARE_SUM)
        return segments_fit(op->u.square_sum.segments, op->u.square_sum.n_segments, op->u.square_sum.count);
    if (op->kind == FSDP_OPERATION_ADAMW)
        return segments_fit(op->u.adamw.segments, op->u.adamw.n_segments, op->u.adamw.count);
    return true;
}

void explore__op_begin(explore_stream *s, const fsdp_device_op *op)
{
    if (op->kind == FSDP_OPERATION_FILL) return;
    op_part part[MAX_PARTS];
    uint32_t n = op_parts(op, part);
    size_t bytes = 0;
    for (uint32_t i = 0; i < n; i++) bytes += aligned(part[i].bytes);
    char *copy = explore__copy_room(s, bytes);
    s->dropped = copy == NULL && bytes > 0;
    if (s->dropped || bytes == 0) return;
    if (op->kind == FSDP_OPERATION_COPY) {
        memcpy(copy, op->u.copy.src, op->u.copy.bytes);
        return;
    }
    fsdp_device_op moved = *op;
    for (uint32_t i = 0; i < n; i++) {
        if (part[i].bytes > 0) memcpy(copy, pointer_of(op, part[i].at), part[i].bytes);
        memcpy((char *)&moved + part[i].at, &copy, sizeof copy);
        copy += aligned(part[i].bytes);
    }
    s->dropped = !makes_sense(&moved);
    if (s->dropped)
        explore__complain(s->dev->x,
                          "stream %u (rank %u, %s), entry %llu reads a table of segments that makes no sense",
                          s->number, s->dev->rank, s->name, (unsigned long long)s->head);
    else fsdp__host_kernel(&moved);
}

/* The optimizer writes its segments and leaves alone what lies between them. */
static void write_segments(const explore_stream *s, const fsdp_device_op *op, const op_part *part)
{
    const char *at[MAX_PARTS];
    const char *copy = s->copy;
    for (uint32_t i = 0; i < MAX_PARTS; i++) at[i] = copy, copy += aligned(part[i].bytes);
    const fsdp_kernel_segment *segment = (const void *)at[1];
    const fsdp_device_step *step = (const void *)at[2];
    if (step->skip != 0) return;
    for (uint32_t i = 3; i < MAX_PARTS; i++) {
        size_t each = i == 3 ? fsdp_dtype_bytes(op->u.adamw.master_dtype) : sizeof(float);
        char *to = pointer_of(op, part[i].at);
        for (uint64_t k = 0; k < op->u.adamw.n_segments; k++)
            memcpy(to + segment[k].offset * each, at[i] + segment[k].offset * each, segment[k].count * each);
    }
}

/* Of the reports it writes one; the host may look at the others. */
static void write_report(const char *ring, const fsdp_step_input *input, const fsdp_device_op *op)
{
    uint64_t at = input->step % op->u.step_result.n_reports;
    memcpy(&op->u.step_result.reports[at], (const fsdp_report_record *)(const void *)ring + at,
           sizeof(fsdp_report_record));
}

void explore__op_end(explore_stream *s, const fsdp_device_op *op)
{
    op_part part[MAX_PARTS];
    uint32_t n = op_parts(op, part);
    const char *copy = s->copy;
    if (op->kind == FSDP_OPERATION_FILL) {
        if (op->u.fill.bytes > 0) memset(op->u.fill.dst, op->u.fill.byte, op->u.fill.bytes);
        return;
    }
    if (op->kind == FSDP_OPERATION_COPY) {
        if (op->u.copy.bytes > 0) memcpy(op->u.copy.dst, copy, op->u.copy.bytes);
        return;
    }
    if (op->kind == FSDP_OPERATION_ADAMW) {
        write_segments(s, op, part);
        return;
    }
    bool result = op->kind == FSDP_OPERATION_STEP_RESULT;
    for (uint32_t i = 0; i < n; i++) {
        bool reports = result && i + 1 == n;
        if (reports) write_report(copy, (const void *)(copy - aligned(part[i - 1].bytes)), op);
        else if (part[i].write && part[i].bytes > 0) memcpy(pointer_of(op, part[i].at), copy, part[i].bytes);
        copy += aligned(part[i].bytes);
    }
}

/* ---- Poison ---- */

static bool has_range_in(const explore_item *item, const char *begin, const char *end)
{
    explore_range r;
    for (uint32_t i = 0; explore__range(item, i, &r); i++)
        if (r.bytes > 0 && r.ptr < end && begin < r.ptr + r.bytes) return true;
    return false;
}

static inline bool touches(const explore_stream *s, uint64_t index, const char *begin, const char *end)
{
    const explore_reach *reach = &s->reach[index & (s->capacity - 1)];
    return reach->begin < end && begin < reach->end && has_range_in(explore__item(s, index), begin, end);
}

/* Entries given before `number` that touch the bytes and are not over. */
static uint32_t count_pending(const explore *x, const char *begin, const char *end, uint64_t number)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < x->n_streams; i++) {
        const explore_stream *s = x->streams[i];
        for (uint64_t k = s->head; k < s->tail && s->reach[k & (s->capacity - 1)].number < number; k++)
            n += touches(s, k, begin, end);
    }
    return n;
}

/* Poison at once, or once what is pending is over. */
static void add_freed(explore *x, char *begin, char *end, uint64_t number)
{
    if (begin >= end) return;
    uint32_t pending = count_pending(x, begin, end, number);
    if (pending == 0) {
        memset(begin, POISON, (size_t)(end - begin));
        return;
    }
    if (!explore__grow(&x->freed, &x->capacity_freed, x->n_freed + 1, sizeof *x->freed)) {
        explore__complain(x, "no host memory for freed ranges");
        return;
    }
    x->freed[x->n_freed++] = (explore_freed_range){begin, end, number, pending};
}

void explore_freed(explore *x, uint32_t rank, const void *ptr, uint64_t bytes)
{
    if (bytes == 0) return;
    pthread_mutex_lock(&x->lock);
    x->frees = true;
    explore_range r = {(char *)(uintptr_t)ptr, bytes, true, false};
    const char *wrong = what_is_wrong(x, rank, &r);
    if (wrong != NULL)
        explore__complain(x, "explore_freed of %llu bytes at %p, which %s", (unsigned long long)bytes, ptr, wrong);
    else add_freed(x, r.ptr, r.ptr + bytes, x->n_items);
    pthread_mutex_unlock(&x->lock);
}

/* Take [begin, end) out of the i-th range; what is left on both sides goes on waiting for its poison. */
static void cut_freed(explore *x, size_t i, char *begin, char *end)
{
    explore_freed_range old = x->freed[i];
    x->freed[i] = x->freed[--x->n_freed];
    add_freed(x, old.begin, begin < old.end ? begin : old.end, old.number);
    add_freed(x, end > old.begin ? end : old.begin, old.end, old.number);
}

void explore__freed_begin(explore *x, const explore_item *item)
{
    explore_range r;
    for (uint32_t k = 0; explore__range(item, k, &r); k++) {
        for (size_t i = x->n_freed; r.bytes > 0 && i-- > 0;) {
            const explore_freed_range *f = &x->freed[i];
            if (f->number <= item->number && r.ptr < f->end && f->begin < r.ptr + r.bytes)
                cut_freed(x, i, r.ptr, r.ptr + r.bytes);
        }
    }
}

void explore__freed_over(explore_stream *s)
{
    explore *x = s->dev->x;
    const explore_reach *reach = &s->reach[s->head & (s->capacity - 1)];
    uint64_t number = reach->number;
    if (reach->begin == reach->end) return;
    for (size_t i = x->n_freed; i-- > 0;) {
        explore_freed_range *f = &x->freed[i];
        if (f->number <= number || !touches(s, s->head, f->begin, f->end) || --f->pending > 0) continue;
        memset(f->begin, POISON, (size_t)(f->end - f->begin));
        *f = x->freed[--x->n_freed];
    }
}

void explore__freed_drop(explore *x, const char *begin, const char *end)
{
    for (size_t i = x->n_freed; i-- > 0;)
        if (x->freed[i].begin < end && begin < x->freed[i].end) x->freed[i] = x->freed[--x->n_freed];
}
